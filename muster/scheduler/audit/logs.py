"""Log lines, and the events among them that are also written to the audit log.

Each event is one line with its facts as key=value. Text from a peer is escaped, so that it cannot forge a
line.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from muster.scheduler import systemd
from muster.scheduler.access import address_of
from muster.scheduler.audit.grpc_trace import HUNG_UP, REASONS, Failure
from muster.scheduler.errors import SchedulerError, end_call
from muster.wire.json_lines import FACTS, JsonFormatter, incident_of, process_lines
from muster.wire.log_lines import BoundedFormatter, one_line

if TYPE_CHECKING:
    from muster.scheduler.access import Caller
    from muster.scheduler.jobs.driver import Note

LOG = logging.getLogger("scheduler")
CERTS_LOG = logging.getLogger("muster.certs")
AUDITED = frozenset(
    ("joined", "left", "lost", "refused", "denied", "expelled", "drained", "admitted", "ended", "expired")
)
Follow = Callable[[str, str, str, Mapping[str, object]], None]
FINGERPRINT_SHOWN = 23
"""The length of a shortened fingerprint in characters: 16 hexadecimal digits with colons in between."""

_LOUD = frozenset(("lost", "refused", "denied", "expelled", "expired"))


class LineFormatter(BoundedFormatter):
    """Formats lines as ``2026-01-31T12:00:00.123Z INFO text``.

    Line breaks are escaped, so that text cannot forge a second line.
    """

    def head(self, record: logging.LogRecord) -> str:
        """The time and the level."""
        moment = dt.datetime.fromtimestamp(record.created, dt.UTC)
        stamp = f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"
        return f"{stamp} {record.levelname} "

    def text(self, record: logging.LogRecord) -> str:
        """The message, in which all line breaks are escaped, also those of a traceback."""
        text = record.getMessage()
        if record.exc_info:
            text += " " + self.formatException(record.exc_info)
        return one_line(text)


class JournalFormatter(LineFormatter):
    """Formats lines like :class:`LineFormatter`, with a prefix that tells systemd's journal the priority."""

    def head(self, record: logging.LogRecord) -> str:
        """The priority, the time and the level."""
        return systemd.priority_prefix(record.levelno) + super().head(record)


class JournalJsonFormatter(JsonFormatter):
    """Formats lines as JSON with the same prefix, which systemd's journal removes before it shows them."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record."""
        return systemd.priority_prefix(record.levelno) + super().format(record)


def _formatter(format_: str, env: Mapping[str, str]) -> logging.Formatter:
    is_journal = systemd.is_journal(2, env)
    if format_ == "json":
        return (JournalJsonFormatter if is_journal else JsonFormatter)(process_lines)
    return JournalFormatter() if is_journal else LineFormatter()


def set_up(level: str, env: Mapping[str, str], format_: str = "text") -> None:
    """Sets up the scheduler's log, which is written to standard error.

    Args:
        level: the lowest level that is logged.
        env: the process's environment.
        format_: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(format_, env))
    for log in (LOG, CERTS_LOG):
        log.handlers[:] = [handler]
        log.setLevel(level)
        log.propagate = False


def fields(**facts: object) -> str:
    """Formats facts as ``key=value``, with quotes where the value needs them; omits empty values."""
    parts = []
    for key, value in facts.items():
        text = one_line(str(value))
        if value is None or text == "":
            continue
        plain = all(c.isalnum() or c in "._:/@[]*+-" for c in text)
        parts.append(f"{key}={text if plain else json.dumps(text, ensure_ascii=False)}")
    return " ".join(parts)


class AuditFile(Protocol):
    """The part of :class:`muster.scheduler.audit.audit_log.AuditLog` that is used here."""

    def write(self, event: str, facts: Mapping[str, object]) -> None:
        """Appends one event."""

    def close(self) -> None:
        """Closes the file."""


class Recorder:
    """Records each event as a log line, security events also in the audit log; counts refusals."""

    def __init__(self, audit: AuditFile | None = None) -> None:
        self._audit = audit
        self._followers: list[Follow] = []
        self.refusals: Counter[str] = Counter()
        # All keys exist from the start, because another thread counts, and the dictionary must not grow
        # while it is read.
        self.failed_handshakes: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    def note(self, note: Note) -> None:
        """Records an event of a job's driver."""
        session = note.session
        facts: dict[str, object] = {"job_id": note.job_id}
        if session is not None:
            facts |= _who(session.caller)
            if session.candidate is not None:
                host = session.candidate.host
                facts |= {"node_id": session.candidate.node_id, "host": host.name, "host_id": host.id}
            if session.rank >= 0:
                facts |= {"rank": session.rank, "generation": session.generation}
        self._record(note.kind, note.text, note.code, facts, state=note)

    def membership(self, kind: str, job_id: str, text: str, facts: Mapping[str, object]) -> None:
        """Records a change of membership in the audit log only; see ``audit/membership.py``."""
        if self._audit is not None:
            self._audit.write(kind, {"job_id": job_id, **facts, "text": one_line(text)})

    def denied(self, call: str, caller: Caller | None, address: str, code: str, sentence: str) -> None:
        """Records a call that was refused before it reached a job."""
        who = _who(caller) if caller is not None else {"peer": address}
        self._record("denied", sentence, code, {"call": call, **who})

    async def turn_away(
        self, call: str, context: Any, caller: Caller | None, error: BaseException
    ) -> NoReturn:
        """Records that a call was refused or failed, and ends the call. Always raises, as gRPC's abort does.

        Args:
            call: the name of the call's method.
            context: gRPC's context of the call.
            caller: the caller, if it is known.
            error: the reason.
        """
        if isinstance(error, SchedulerError):
            self.denied(call, caller, address_of(context.peer()), error.refusal, str(error))
        else:
            LOG.error("fault in %s", call, exc_info=error)
        await end_call(context, error)

    def drained(self, job_id: str, node_id: str, caller: Caller, sentence: str, hosts: str = "") -> None:
        """Records that an operator drains workers, plans a drain for later, or cancels one."""
        whose = {name: value for name, value in (("node_id", node_id), ("hosts", hosts)) if value}
        self._record("drained", sentence, "", {"job_id": job_id, **whose, **_who(caller)})

    def stacks_asked(self, job_id: str, node_id: str, caller: Caller) -> None:
        """Records that an operator asked for workers' stacks. An empty node id means all workers."""
        facts: dict[str, object] = {"job_id": job_id, **({"node_id": node_id} if node_id else {})}
        self._record("stacks", "an operator asks for stacks", "", {**facts, **_who(caller)})

    def admitted(self, job_id: str, name: str, caller: Caller, sentence: str) -> None:
        """Records that an operator readmits refused GPUs."""
        self._record("admitted", sentence, "by_operator", {"job_id": job_id, "name": name, **_who(caller)})

    def lost(self, job_id: str, node_id: str, caller: Caller, sentence: str) -> None:
        """Records who reported the end of a worker's process, because of which the worker lost its place."""
        self._record("lost", sentence, "by_launcher", {"job_id": job_id, "node_id": node_id, **_who(caller)})

    def job_ended(self, job_id: str, caller: Caller, sentence: str) -> None:
        """Records that an operator ended the job."""
        self._record("ended", sentence, "by_operator", {"job_id": job_id, **_who(caller)})

    def follow(self, follower: Follow) -> None:
        """Calls ``follower`` with kind, text, code and facts of each event that is logged from now on.

        For failed handshakes, it is called from another thread.
        """
        self._followers.append(follower)

    def handshake_failed(self, failure: Failure) -> None:
        """Records failed TLS handshakes, which the caller has already counted. Runs in a separate thread.

        If a peer only disconnected, as probes and port scans do, this is logged at debug level.
        """
        facts: dict[str, object] = {"call": "handshake", "peer": failure.peer}
        if failure.count > 1:
            facts["count"] = failure.count
        if failure.reason == HUNG_UP:
            LOG.debug("denied %s", fields(code=failure.reason, **facts, text=failure.text))
        else:
            self._write("denied", failure.text, failure.reason, facts)

    def close(self) -> None:
        """Closes the audit log."""
        if self._audit is not None:
            self._audit.close()

    def _record(
        self, kind: str, text: str, code: str, facts: dict[str, object], state: Note | None = None
    ) -> None:
        if kind in ("refused", "denied", "expelled"):
            self.refusals[code or kind] += 1
        self._write(kind, text, code, facts, state)

    def _write(
        self, kind: str, text: str, code: str, facts: dict[str, object], state: Note | None = None
    ) -> None:
        level = logging.WARNING if kind in _LOUD else logging.INFO
        if LOG.isEnabledFor(level):
            brief = _brief(facts)
            more = {FACTS: _as_json(kind, text, code, brief, state)}
            LOG.log(level, "%s %s", kind, fields(code=code, **brief, text=text), extra=more)
        for follower in self._followers:
            follower(kind, text, code, facts)
        if self._audit is not None and kind in AUDITED:
            extra = {"code": code} if code else {}
            self._audit.write(kind, {**extra, **facts, "text": one_line(text)})


def _as_json(
    kind: str, text: str, code: str, facts: dict[str, object], state: Note | None
) -> dict[str, object]:
    """Converts an event and its facts to the fields of a JSON line."""
    rest = {name: value for name, value in facts.items() if name != "job_id"}
    told: dict[str, object] = {"job": facts.get("job_id"), **rest, "event": kind, "text": text or kind}
    if code:
        told["code"] = code
    if state is not None:
        told.setdefault("generation", state.generation or None)
        told["incident"] = incident_of(state.job_id, state.incident) if state.incident else None
    return told


def _brief(facts: dict[str, object]) -> dict[str, object]:
    """Shortens a fingerprint in a log line to the length that ``certs revoke --fingerprint`` needs.

    The audit log contains the full fingerprint.
    """
    certificate = facts.get("certificate")
    return facts if certificate is None else {**facts, "certificate": str(certificate)[:FINGERPRINT_SHOWN]}


def _who(caller: Caller) -> dict[str, object]:
    facts: dict[str, object] = {"peer": caller.address}
    if caller.certificate is not None:
        facts |= {
            "certificate": caller.certificate.fingerprint,
            "identity": str(caller.certificate.identity),
        }
    return facts
