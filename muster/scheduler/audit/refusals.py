"""Limits the lines that one caller can cause: the first few refusals are written, then their number."""

from __future__ import annotations

from collections.abc import Mapping

from muster.scheduler.audit.logs import AuditFile, Recorder
from muster.scheduler.jobs.driver import Clock, Note, Timer
from muster.wire.log_lines import OTHERS, LogBudget, Suppressed

WINDOW_S = 60.0
LINES = 20
"""The most refusals of one caller that are written within a window."""

MAX_CALLERS = 1024

DECISIONS = 200
"""The most decisions about one job that are written within :data:`DECISIONS_WINDOW_S`. They are limited
because the job's workers can cause them.
"""

DECISIONS_WINDOW_S = 10.0

_WHO = ("certificate", "identity", "peer")

Facts = Mapping[str, object]


def caller_of(facts: Facts) -> str:
    """The key for counting a caller's refusals: the certificate, else the address without the port."""
    return str(facts.get("certificate") or str(facts.get("peer", "")).rpartition(":")[0])


class ThinnedRecorder(Recorder):
    """A recorder that limits how many refusals of each caller go to the log and the audit log.

    Failed handshakes are not limited here, because their reporter already limits them in another thread. The
    decisions of each job are limited as well, because refusals are among them.

    Args:
        audit: the audit log, if there is one.
        clock: the event loop, which provides the time and callbacks. Everything except failed handshakes is
            recorded from its thread.
    """

    def __init__(self, audit: AuditFile | None, clock: Clock) -> None:
        super().__init__(audit)
        self._clock = clock
        self._refused = LogBudget[Facts](lines=LINES, window_s=WINDOW_S, max_callers=MAX_CALLERS)
        self._decided = LogBudget[Facts](
            lines=DECISIONS, window_s=DECISIONS_WINDOW_S, max_callers=MAX_CALLERS
        )
        self._timer: Timer | None = None

    def _write(
        self, kind: str, text: str, code: str, facts: dict[str, object], state: Note | None = None
    ) -> None:
        if kind == "decided":
            budget, caller = self._decided, str(facts.get("job_id", ""))
        elif kind in ("refused", "denied") and facts.get("call") != "handshake":
            budget, caller = self._refused, caller_of(facts)
        else:
            super()._write(kind, text, code, facts, state)
            return
        now_s = self._clock.time()
        self._tell(now_s)
        if budget.take(caller, code, {**facts, "text": text}, now_s):
            super()._write(kind, text, code, facts, state)
        elif self._timer is None:
            self._wait()

    def close(self) -> None:
        """Logs the counts of suppressed refusals, and closes the audit log."""
        if self._timer is not None:
            self._timer.cancel()
        self._tell(float("inf"))
        super().close()

    def _wait(self) -> None:
        due_s = min(
            (at for budget in (self._refused, self._decided) if (at := budget.next_s()) is not None),
            default=None,
        )
        self._timer = None if due_s is None else self._clock.call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._tell(self._clock.time())
        self._wait()

    def _tell(self, now_s: float) -> None:
        for suppressed in self._refused.due(now_s):
            self._write_suppressed(suppressed)
        for suppressed in self._decided.due(now_s):
            count, last = suppressed.codes.total(), suppressed.last.get("text", "")
            text = f"{count} more within {DECISIONS_WINDOW_S:g} s were not written. The last: {last}"
            super()._write("decided", text, "", {"job_id": suppressed.caller, "count": count})

    def _write_suppressed(self, suppressed: Suppressed[Facts]) -> None:
        known = suppressed.caller != OTHERS
        who = {key: suppressed.last[key] for key in _WHO if known and key in suppressed.last}
        codes = suppressed.codes.most_common()
        count, whose = suppressed.codes.total(), "of this caller" if known else "of other callers"
        shares = ", ".join(f"{number} {code}" for code, number in codes)
        text = f"{count} more refusals {whose} within {WINDOW_S:g} s were not written ({shares})."
        super()._write("refused", text, codes[0][0], {"count": count, **who})
