"""Parses failed TLS handshakes from gRPC's trace, and limits how many log lines they cause. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from muster.scheduler.access import address_of
from muster.wire.grpc_stderr import GrpcRecord
from muster.wire.log_lines import OTHERS, LogBudget, Suppressed, one_line

HUNG_UP = "hung_up"
TIMED_OUT = "timed_out"
OTHER = "other"
_MAX_DETAIL = 120

_AUTHORITY = "Both sides need certificates of one authority in ca_cert_path."
_JOB = "If it is a worker, start it with this job's config.json."
_SENTENCES = {
    "expired": "its certificate, or its authority's, has expired. Renew it, or check this host's clock.",
    "not_yet_valid": "its certificate is not valid yet. Wait, or check this host's clock.",
    "wrong_use": "its certificate was not issued for use as a client.",
    "unknown_ca": f"its certificate is of an authority not trusted here ({{detail}}). {_AUTHORITY}",
    "bad_certificate": "its certificate is refused: {detail}.",
    "no_certificate": f"it showed no certificate. {_JOB}",
    "plaintext_http": f"it speaks HTTP in plaintext, not TLS. {_JOB}",
    "no_tls": f"it does not speak TLS: plaintext, or any bytes. {_JOB}",
    "no_grpc": "it speaks TLS, but not gRPC in it (ALPN names no h2).",
    "no_common_settings": "no TLS version or cipher in common ({detail}). Compare cipher_list on both sides.",
    "refused_us": f"it refused this scheduler ({{detail}}). Its own log says why. {_AUTHORITY}",
    HUNG_UP: "it hung up ({detail}).",
    TIMED_OUT: "it was not done in time. Look at the load of its host, and at the network.",
    OTHER: "{detail}.",
}
REASONS = tuple(_SENTENCES)
"""The codes of all failures."""

_SIGNS = {  # The first pattern that is found in gRPC's text determines the code.
    "certificate has expired": "expired",
    "certificate is not yet valid": "not_yet_valid",
    "unsupported certificate purpose": "wrong_use",
    "self signed|issuer certificate|verify the first|signature failure": "unknown_ca",
    "CERTIFICATE_VERIFY_FAILED": "bad_certificate",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no_certificate",
    "(HTTP|PROXY)_REQUEST": "plaintext_http",
    "WRONG_VERSION_NUMBER|ENCRYPTED_LENGTH_TOO_LONG": "no_tls",
    "ALPN": "no_grpc",
    "UNSUPPORTED_PROTOCOL|NO_(SHARED|COMMON)_|WRONG_CURVE": "no_common_settings",
    # The second pattern is an unencrypted alert at a point where TLS 1.3 encrypts. OpenSSL's clients refuse a
    # server in this way.
    "_ALERT_|BAD_PACKET_LENGTH": "refused_us",
    "Handshake (read|write) failed": HUNG_UP,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Failed handshakes: the reason's code, the peer's address and port, a sentence, and their number."""

    reason: str
    peer: str
    text: str
    count: int = 1

    @property
    def host(self) -> str:
        """The address without the port."""
        return self.peer.rpartition(":")[0]


def explain(error: str, peer: str) -> Failure:
    """Converts gRPC's text about a failed handshake into a code and a sentence."""
    return _failure(next((_SIGNS[sign] for sign in _SIGNS if re.search(sign, error)), OTHER), peer, error)


def _failure(code: str, peer: str, error: str = "") -> Failure:
    said = _SENTENCES[code].format(detail=_detail(error))
    return Failure(code, peer, f"The TLS handshake with {peer} failed: {said}")


def _detail(error: str) -> str:
    """Returns BoringSSL's reason for refusing a certificate, else its error's name, else gRPC's text."""
    for pattern in (r"CERTIFICATE_VERIFY_FAILED: ([^:]+)", r"OPENSSL_internal:(\w+)", r"\((.+)\)$", "(.*)"):
        found = re.search(pattern, error)
        if found is not None:
            break
    detail = found[1] if found is not None else error
    if detail.isupper():
        detail = detail.lower().replace("_", " ")
    return one_line(detail.strip())[:_MAX_DETAIL]


_FAILED = b"CallNextHandshakerLocked: error="
_TIMED_OUT = re.compile(rb"handshake.manager \S+ *Shutdown called: [^\n]*Handshake timed out")
_SHUTDOWN = b" shutdown="
_PEER = re.compile(rb"endpoint_peer_address=([^,}\s]{1,100})")


class TraceReader:
    """Finds failed handshakes in the records of gRPC's tracer."""

    def __init__(self) -> None:
        self._timeouts = 0

    def read(self, record: GrpcRecord) -> Failure | None:
        """Parses a record; returns the failure that it describes, if any."""
        if _TIMED_OUT.match(record.data):
            self._timeouts += 1
        if not record.data.startswith(_FAILED) or record.data.startswith(_FAILED + b"OK "):
            return None
        error, found, arguments = record.data[len(_FAILED) :].rpartition(_SHUTDOWN)
        if not found:
            return None
        address = _PEER.search(arguments)
        peer = (
            one_line(address_of(address[1].decode("ascii", "replace"))) if address else "an unknown address"
        )
        if not arguments.startswith(b"true"):
            return explain(error.partition(b"\n")[0].decode("ascii", "replace"), peer)
        if not self._timeouts:  # The handshake was shut down because the scheduler is stopping.
            return None
        self._timeouts -= 1
        return _failure(TIMED_OUT, peer)


INTERVAL_S = 10.0
MAX_HOSTS = 128


class Thinner:
    """Limits log lines: logs an address's first failure, and then a count once in each interval.

    Peers that only disconnect, as probes and port scans do, are counted separately.
    """

    def __init__(self) -> None:
        self._budgets = {
            quiet: LogBudget[Failure](lines=1, window_s=INTERVAL_S, max_callers=MAX_HOSTS)
            for quiet in (False, True)
        }

    def add(self, failure: Failure, now_s: float) -> list[Failure]:
        """Counts a failure; returns the failures and summaries that must be logged now."""
        told, budget = [*self.due(now_s)], self._budgets[failure.reason == HUNG_UP]
        is_due = budget.take(failure.host, failure.reason, failure, now_s)
        return [*told, failure] if is_due else told

    def due(self, now_s: float) -> Iterator[Failure]:
        """Closes the intervals that have ended; yields a summary of the suppressed failures of each.

        If the time is ``float("inf")``, all intervals are closed.
        """
        for budget in self._budgets.values():
            yield from map(_summary, budget.due(now_s))

    def next_s(self) -> float | None:
        """The time at which :meth:`due` next yields a summary; None if nothing was suppressed."""
        return earliest(budget.next_s() for budget in self._budgets.values())


def earliest(times: Iterable[float | None]) -> float | None:
    """The earliest of these times; None if there is none."""
    return min((at for at in times if at is not None), default=None)


def _summary(suppressed: Suppressed[Failure]) -> Failure:
    total = sum(suppressed.codes.values())
    if total == 1:
        return suppressed.last
    who = "other addresses" if suppressed.caller == OTHERS else suppressed.caller
    codes = suppressed.codes.most_common()
    reasons = ", ".join(f"{count} {code}" for code, count in codes)
    text = f"TLS handshakes failed: {total} more from {who} within {INTERVAL_S:.0f} s ({reasons})."
    return Failure(codes[0][0], who, text, total)
