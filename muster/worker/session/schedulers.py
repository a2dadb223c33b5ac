"""Decides which of a job's schedulers is tried next, and how long it may take to answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from muster.wire.patience import TRY_S
from muster.worker.config import Settings
from muster.worker.session.streams import DeniedError

CONNECT_TIMEOUT_S = 5.0
T = TypeVar("T")


class Turns:
    """The order in which schedulers are tried.

    A scheduler that has ended a connection comes last, because it may hang.

    Args:
        count: how many schedulers there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._found = -1

    def order(self) -> list[int]:
        """Returns the numbers of the schedulers, in the order in which to try them."""
        begin = self._found + 1
        return [number % self._count for number in range(begin, begin + self._count)]

    def found(self, number: int) -> None:
        """Records the scheduler that took the connection."""
        self._found = number


class Schedulers:
    """The schedulers of a job: one leads, and the others do not listen.

    Args:
        settings: the worker's settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._each = [settings.replaced(scheduler_hosts=(host,)) for host in settings.scheduler_hosts]
        self._turns = Turns(len(self._each))

    def first(self, attempt: Callable[[Settings], T]) -> T:
        """Returns the result of ``attempt`` for the first scheduler with which it succeeds.

        Args:
            attempt: called with the settings for one scheduler; raises DeniedError or OSError.
        """
        failures: list[DeniedError | OSError] = []
        for number in self._turns.order():
            try:
                result = attempt(self._each[number])
            except (DeniedError, OSError) as error:
                failures.append(error)
            else:
                self._turns.found(number)
                return result
        raise next((each for each in failures if isinstance(each, DeniedError)), failures[-1])


def connect_timeout_s(schedulers: int) -> float:
    """Returns the time in seconds within which one of several schedulers must answer."""
    return CONNECT_TIMEOUT_S if schedulers == 1 else TRY_S
