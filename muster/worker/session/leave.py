"""Decides when a worker that wants to leave does so without the scheduler's consent."""

from __future__ import annotations

UNREACHABLE_S = 3.0  # Time to find a lost scheduler that could grant the leave; launchers kill after 10 s.
UNFORMED_S = 5.0  # Time for the next generation to form.


class LoneLeave:
    """Records whether a leave is wanted, and decides whether something has prevented it for too long.

    Args:
        unfinished_s: how long after the request it waits for others that do not come to the step's end.
        unreachable_s: how long the worker waits for a lost scheduler's consent.
        unformed_s: how long it waits for a generation to form.

    Attributes:
        wanted: when the leave was requested, and why; None if it was not. It is a single value, so that a
            signal handler can set it without a lock.
        at_once: whether the worker has begun nothing yet, and need not wait for anybody.
    """

    def __init__(
        self,
        *,
        unfinished_s: float,
        unreachable_s: float = UNREACHABLE_S,
        unformed_s: float = UNFORMED_S,
    ) -> None:
        self._unreachable_s = unreachable_s
        self._unformed_s = unformed_s
        self._unfinished_s = unfinished_s
        self._entering_since: float | None = None
        self.wanted: tuple[float, str] | None = None
        self.at_once = False

    def note_entering(self, now: float) -> None:
        """Records that the worker waits for a generation."""
        if self._entering_since is None:
            self._entering_since = now

    @property
    def entering(self) -> bool:
        """Whether the worker waits for a generation."""
        return self._entering_since is not None

    def note_entered(self) -> None:
        """Records that the generation was entered."""
        self._entering_since = None

    def obstacle(self, now: float, *, away: bool, waits: bool) -> str:
        """Returns the reason for leaving without consent; empty if the worker should not do that (yet).

        Args:
            now: the time, on the same clock as all other times here.
            away: whether there is no connection to the scheduler.
            waits: whether the worker waits for others to reach the end of the step. Its own work has no time
                limit.
        """
        if self.wanted is None:
            return ""
        since, entering = self.wanted[0], self._entering_since
        if away and now >= since + self._unreachable_s:
            return "the scheduler cannot be reached"
        if entering is not None and now >= max(since, entering) + self._unformed_s:
            return f"the next generation did not form within {self._unformed_s:g} s"
        if waits and now >= since + self._unfinished_s:
            return f"others did not finish the step with it within {self._unfinished_s:g} s"
        return ""
