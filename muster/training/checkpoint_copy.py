"""A copy of a state's arrays in one piece of memory, from which another process writes a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64

Place = tuple[str, tuple[int, ...], int]
"""Where an array is: its dtype as NumPy writes it, its shape, its first byte."""


class Room(Protocol):
    """Memory to copy to."""

    def take(self, size: int) -> memoryview:
        """Returns its first ``size`` bytes."""


@dataclass(frozen=True, slots=True)
class CheckpointCopy:
    """A state that is copied into a room.

    Attributes:
        description: everything of the state except the arrays' contents, as JSON.
        places: the places of the arrays, by name.
        size: bytes of all arrays together.
        ready: waits until the copy is complete; until then, the room must not be changed.
    """

    description: str
    places: Mapping[str, Place]
    size: int
    ready: Callable[[], None]


def place_arrays(kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[dict[str, Place], int]:
    """Lays out arrays of these dtypes and shapes one after the other; returns places and total bytes."""
    places, end = {}, 0
    for name, (dtype, shape) in kinds.items():
        places[name] = (dtype, shape, end)
        nbytes = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
        end = -(-(end + nbytes) // _ALIGNMENT) * _ALIGNMENT
    return places, end


def arrays_in(data: memoryview, places: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Returns the arrays in a room; they share its memory."""
    found = {}
    for name, (dtype, shape, start) in places.items():
        count = int(np.prod(shape, dtype=np.int64))
        found[name] = (
            np.frombuffer(data, np.dtype(dtype), count, start).reshape(shape)
            if count
            else (np.empty(shape, dtype))
        )
    return found


def copy_arrays(description: str, arrays: Mapping[str, NDArray[Any]], room: Room) -> CheckpointCopy:
    """Copies arrays into a room; the copy is complete when it returns.

    Raises:
        OSError: there is not enough memory.
    """
    places, size = place_arrays({name: (each.dtype.str, each.shape) for name, each in arrays.items()})
    data = room.take(size)
    for name, target in arrays_in(data, places).items():
        np.copyto(target, arrays[name])
    return CheckpointCopy(description, places, size, lambda: None)
