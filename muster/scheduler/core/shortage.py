"""Whether the journal has no space at present, since when, and when to try again."""

from __future__ import annotations

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""The pause between two tries doubles up to this many seconds, so training continues at most this long after
there is space again.
"""

REPORT_S = 60.0
"""The pause between two log lines about one shortage."""


def pause_s(tries: int) -> float:
    """Returns the pause after this many failed tries in a row, in seconds."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries - 1, 30))


class Shortage:
    """Follows the calls to a journal that has no space; several jobs' calls may wait at once.

    Attributes:
        why: what refuses the calls, as a sentence; empty if nothing does.
        since: when that began, in seconds on the clock of all calls.
    """

    def __init__(self) -> None:
        self.why = ""
        self.since = 0.0
        self._tries: dict[object, int] = {}
        self._report_at = 0.0

    def refused(self, call: object, why: str, now: float) -> float:
        """Records that a call was refused; returns after how many seconds to try it again."""
        if not self._tries:
            self.since = self._report_at = now
        self.why = why
        self._tries[call] = tries = self._tries.get(call, 0) + 1
        return pause_s(tries)

    def over(self, call: object) -> bool:
        """Records that a call has ended in any way; returns whether it was the last one that waited."""
        waited = self._tries.pop(call, 0) > 0
        if waited and not self._tries:
            self.why = ""
            return True
        return False

    def report_due(self, now: float) -> bool:
        """Whether a log line is due; the next one is after :data:`REPORT_S`."""
        due = bool(self.why) and now >= self._report_at
        if due:
            self._report_at = now + REPORT_S
        return due
