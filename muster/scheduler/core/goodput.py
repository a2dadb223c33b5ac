"""A job's time by cause: what of it was training, and what the rest went into.

Fed by what the scheduler hears and decides anyway: phases, steps in heartbeats, and the sums of step times.
It begins with the scheduler's process and is not written down.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRAINING, DATA, REDOING, FORMING, SUSPENDED = CAUSES = (
    "training",
    "waiting for data",
    "redoing",
    "forming",
    "suspended",
)
"""In the order in which they are shown. Redoing: steps that had been finished before members were lost."""


@dataclass(slots=True)
class Goodput:
    """Sums of a job's time by cause, in seconds.

    Attributes:
        furthest: the most steps that a member has finished.
        redo_until: steps up to here are made again; 0: none are.
    """

    furthest: int = 0
    redo_until: int = 0
    _spent: dict[str, float] = field(default_factory=dict)
    _cause: str = ""
    _since: float = 0.0

    def follow(self, cause: str, now: float) -> None:
        """From now on the time goes into this; empty: into nothing, as after the end."""
        if cause == self._cause:
            return
        self._settle(now)
        self._cause = cause

    def step_heard(self, step: int, now: float, *, fell: bool) -> None:
        """Takes in how many steps a member of the generation that stands has finished.

        Args:
            step: that number.
            now: the time.
            fell: it went back. Otherwise one that is behind the furthest is merely heard later than that one.
        """
        if step < self.furthest:
            if fell and self._cause == TRAINING and not self.redo_until:
                self.redo_until = self.furthest
                self.follow(REDOING, now)
            return
        self.furthest = step
        if self.redo_until:
            self.redo_until = 0
            if self._cause == REDOING:
                self.follow(TRAINING, now)

    def data_waited(self, seconds: float, now: float) -> None:
        """So much of the time that counted as training was waiting for data."""
        self._settle(now)
        moved = min(max(0.0, seconds), self._spent.get(TRAINING, 0.0))
        if moved:
            self._spent[TRAINING] -= moved
            self._spent[DATA] = self._spent.get(DATA, 0.0) + moved

    def seconds(self, now: float) -> tuple[tuple[str, float], ...]:
        """The sums until now of each cause that had any, in the order of :data:`CAUSES`."""
        spent = dict(self._spent)
        if self._cause:
            spent[self._cause] = spent.get(self._cause, 0.0) + max(0.0, now - self._since)
        return tuple((cause, spent[cause]) for cause in CAUSES if spent.get(cause))

    def _settle(self, now: float) -> None:
        if self._cause:
            self._spent[self._cause] = self._spent.get(self._cause, 0.0) + max(0.0, now - self._since)
        self._since = now
