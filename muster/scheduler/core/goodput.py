"""A job's time by cause: how much of it was training, and where the rest went.

Computed from what the scheduler knows anyway: phases, steps in heartbeats, and sums of step times. It starts
with the scheduler's process and is not journaled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.wire.time_by_cause import CAUSES, CHECKPOINTS, DATA, REDOING, TRAINING


@dataclass(slots=True)
class Goodput:
    """Sums of a job's time by cause, in seconds.

    Attributes:
        furthest: the highest number of steps that any member has finished.
        redo_until: steps up to this number are being repeated; 0 if none are.
    """

    furthest: int = 0
    redo_until: int = 0
    _spent: dict[str, float] = field(default_factory=dict)
    _cause: str = ""
    _since: float = 0.0
    _told: dict[str, float] = field(default_factory=dict)
    _checkpoints: dict[str, float] = field(default_factory=dict)
    _longest: float = 0.0

    def follow(self, cause: str, now: float) -> None:
        """From now on, counts the time under this cause; with an empty one, under none, as after the end."""
        if cause == self._cause:
            return
        self._settle(now)
        self._cause = cause

    def step_heard(self, step: int, now: float, *, fell: bool) -> None:
        """Updates the number of steps that a member of the established generation has finished.

        Args:
            step: that number.
            now: the time.
            fell: the member went back to an earlier step. Otherwise, a lower number only means that it was
                heard later than the furthest one.
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
        """Moves this much of the time counted as training to waiting for data."""
        self._move(seconds, now, (TRAINING,), DATA)

    def generation_formed(self) -> None:
        """A generation was formed; from now on other members may write checkpoints."""
        self._checkpoints, self._longest = {}, 0.0

    def checkpoints_heard(self, node_id: str, total_s: float, now: float) -> None:
        """Updates how long a member has been blocked by checkpoints since its process began.

        Members that write at the same time, or wait for the one that writes, must count once. So the highest
        value of any member in this generation is used.
        """
        before = self._told.get(node_id, total_s)
        self._told[node_id] = total_s
        if total_s == before:
            return
        more = total_s - before if total_s > before else total_s  # A new process has begun at 0.
        mine = self._checkpoints[node_id] = self._checkpoints.get(node_id, 0.0) + more
        longest, self._longest = self._longest, max(self._longest, mine)
        self._move(self._longest - longest, now, (TRAINING, REDOING), CHECKPOINTS)

    def left(self, node_id: str) -> None:
        """Forgets a worker."""
        self._told.pop(node_id, None)

    def seconds(self, now: float) -> tuple[tuple[str, float], ...]:
        """The sums so far of each cause that is not zero, in the order of :data:`CAUSES`."""
        spent = dict(self._spent)
        if self._cause:
            spent[self._cause] = spent.get(self._cause, 0.0) + max(0.0, now - self._since)
        return tuple((cause, spent[cause]) for cause in CAUSES if spent.get(cause))

    def _move(self, seconds: float, now: float, causes: tuple[str, ...], cause: str) -> None:
        """Moves this much time from these causes to another one, but never more than they have."""
        self._settle(now)
        seconds = max(0.0, seconds)
        for each in causes:
            moved = min(seconds, self._spent.get(each, 0.0))
            if moved:
                self._spent[each] -= moved
                self._spent[cause] = self._spent.get(cause, 0.0) + moved
                seconds -= moved

    def _settle(self, now: float) -> None:
        if self._cause:
            self._spent[self._cause] = self._spent.get(self._cause, 0.0) + max(0.0, now - self._since)
        self._since = now
