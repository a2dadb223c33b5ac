"""Shifts a process's wall clock, as Python sees it, by the seconds that a file holds.

The kernel's clock cannot be changed for one process, and changing it for the host would change everybody's.
The monotonic clock and what C code reads for itself stay as they are.
"""

from __future__ import annotations

import datetime
import sys
import time
from pathlib import Path
from typing import Any

CLOCK_VARIABLE = "MUSTER_SOAK_CLOCK"
_Real = datetime.datetime


def follow(file: str | Path) -> None:
    """Makes ``time.time`` and ``datetime`` follow ``file`` from now on; without it the clock is right.

    Args:
        file: holds seconds, negative ones for a clock that is behind. It may change at any time; replace it
            as a whole.
    """
    path, wall = Path(file), time.time

    def shifted() -> float:
        if sys._getframe(1).f_globals["__name__"].startswith("grpc."):
            return wall()  # gRPC hands deadlines to C code, whose clock does not jump here
        try:
            return wall() + float(path.read_text() or 0)
        except OSError:
            return wall()

    class ShiftedType(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, _Real)

    class Shifted(_Real, metaclass=ShiftedType):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return _Real.fromtimestamp(time.time(), tz)

    patched: dict[Any, dict[str, Any]] = {
        time: {"time": shifted, "time_ns": lambda: int(1e9 * shifted())},
        datetime: {"datetime": Shifted},
    }
    for module, names in patched.items():
        vars(module).update(names)


def shift(file: Path, seconds: float) -> None:
    """Sets a clock that follows ``file``."""
    part = file.with_suffix(".part")
    part.write_text(str(seconds))
    part.replace(file)
