"""Shifts the wall clock that Python code of a process reads, by the seconds that a file holds.

The kernel's clock cannot be changed for a single process. The monotonic clock, and the clocks that C code
reads, do not change.
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
    """Makes ``time.time`` and ``datetime`` follow ``file`` from now on; without the file the clock is right.

    Args:
        file: the file with the shift in seconds, negative for a clock that is behind. It may change at any
            time, and must be replaced as a whole.
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
    """Sets the shift of a clock that follows ``file``, in seconds."""
    part = file.with_suffix(".part")
    part.write_text(str(seconds))
    part.replace(file)
