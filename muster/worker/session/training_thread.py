"""The state of the training thread: what it waits for, and what it does alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from muster.wire import messages
from muster.worker.session.leave import LoneLeave

HANG_S = 5.0
"""How long a collective takes, in seconds, before it counts as waiting for others that may not come."""


class Collectives(Protocol):
    """The part of a :class:`~muster.communicators.fault_aware.FlightRecorder` that is used here."""

    def hanging_s(self) -> float:
        """Returns the age of the oldest collective in progress, in seconds; 0 if there is none."""

    def late_s(self) -> float:
        """Returns for how long the training thread has waited in a collective, if a device can tell."""

    def waits(self) -> bool:
        """Whether the training thread is blocked until others have come to a collective."""

    def recent(self, *, last_only: bool = False) -> tuple[messages.Collective, ...]:
        """Returns the last collectives, for heartbeats; with ``last_only`` only the very last one."""


class TrainingThread:
    """The state of the training thread that others need: what it waits for, and what it does alone.

    Args:
        collectives: the collectives that it has called.
        lone_leave: is told when the thread waits for a generation.
        over: given a generation, returns why it is over, or None if it is not.
        clock: returns monotonic seconds.

    Attributes:
        is_held: whether it waits at a step boundary while a planned change is being prepared.
    """

    def __init__(
        self,
        collectives: Collectives,
        lone_leave: LoneLeave,
        *,
        over: Callable[[int], Exception | None],
        clock: Callable[[], float],
    ) -> None:
        self._collectives = collectives
        self._lone_leave = lone_leave
        self._over = over
        self._clock = clock
        self.is_held = False
        self._busy: list[str] = []
        self._building_since: float | None = None
        self._taken = 0  # The last generation to be built.

    # ------------------------------------------------------------ what it reports itself

    def note_entering(self) -> None:
        """Records that it waits for a generation."""
        self._lone_leave.note_entering(self._clock())
        self._building_since = None

    def note_building(self, generation: int) -> None:
        """Records that it has taken a generation and builds its communicator."""
        self._building_since = self._clock()
        self._taken = generation

    def note_entered(self) -> None:
        """Records that this member and all others have entered the generation."""
        self._lone_leave.note_entered()
        self._building_since = None

    def begin_busy(self, what: str) -> None:
        """Records the beginning of work that it does alone, for any length of time."""
        self._busy.append(what)

    def end_busy(self, what: str) -> None:
        """Records the end of what :meth:`begin_busy` began."""
        self._busy.remove(what)

    # ------------------------------------------------------------ what others ask

    @property
    def busy(self) -> str:
        """What the thread does alone, in words; empty if nothing."""
        return ", ".join(self._busy)

    @property
    def is_building(self) -> bool:
        """Whether it builds a generation's communicator, or waits until all others have."""
        return self._building_since is not None

    @property
    def is_hanging(self) -> bool:
        """Whether a collective has taken so long that others may not come to it."""
        return self._collectives.hanging_s() > HANG_S

    def late_s(self) -> float:
        """Returns for how long the thread has waited for other members, in seconds; 0 if it does not wait."""
        if self._over(self._taken) is not None:
            return 0.0
        building_since = self._building_since
        building_s = 0.0 if building_since is None else self._clock() - building_since
        return max(self._collectives.late_s(), building_s)

    def waits(self) -> bool:
        """Whether the thread is blocked until other members act."""
        return self.is_held or self._is_entering() or self._collectives.waits()

    def _is_entering(self) -> bool:
        """Whether it waits for a generation, or builds one that is not over.

        If a generation ended before it was established, the thread was interrupted. Until it asks for the
        next generation, others wait for this member.
        """
        return self._lone_leave.entering and (self._building_since is None or self._over(self._taken) is None)
