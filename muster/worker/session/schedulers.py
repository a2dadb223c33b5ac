"""Which of a job's schedulers is tried next, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from muster.wire.patience import TRY_S
from muster.worker.config import Settings
from muster.worker.session.streams import DeniedError

CONNECT_TIMEOUT_S = 5.0
T = TypeVar("T")


class Turns:
    """The order in which schedulers are tried: one that has broken off comes last, as it may hang.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._found = -1

    def order(self) -> list[int]:
        """The numbers of the schedulers, those to be tried first first."""
        begin = self._found + 1
        return [number % self._count for number in range(begin, begin + self._count)]

    def found(self, number: int) -> None:
        """Notes the scheduler that took the connection."""
        self._found = number


class Schedulers:
    """The schedulers of a job, of which one leads and the others do not listen.

    Args:
        settings: of the worker.
    """

    def __init__(self, settings: Settings) -> None:
        self._each = [settings.replaced(scheduler_hosts=(host,)) for host in settings.scheduler_hosts]
        self._turns = Turns(len(self._each))

    def first(self, attempt: Callable[[Settings], T]) -> T:
        """Returns the result of ``attempt`` for the first scheduler with which it succeeds.

        Args:
            attempt: gets the settings with one scheduler; raises DeniedError or OSError.
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
    """How long one of several schedulers may take to answer."""
    return CONNECT_TIMEOUT_S if schedulers == 1 else TRY_S
