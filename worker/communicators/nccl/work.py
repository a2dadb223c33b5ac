"""What a collective on NCCL gives back, and its operation beyond the common ones."""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass
from typing import Any, Protocol

from muster.worker.communicators.nccl.arrays import TYPE_NAMES
from muster.worker.communicators.nccl.streams import CudaLibrary
from muster.worker.errors import ArrayError

_FORMATS = {"float16": "<e", "float32": "<f", "float64": "<d", "bfloat16": "<f"}


class _Checked(Protocol):
    def check(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PreMultipliedSum:
    """An operation for the reducing collectives of NCCL: each rank's values times ``factor``, summed.

    ``muster.all_reduce(gradient, op=worker.PreMultipliedSum(0.5))``; for floating-point dtypes.

    Attributes:
        factor: rounded to the arrays' dtype before it is multiplied.
    """

    factor: float


class Issued:
    """A collective on the caller's stream: its result may be used from there at once."""

    __slots__ = ("_communicator", "library")

    def __init__(self, communicator: _Checked, library: CudaLibrary) -> None:
        self._communicator = communicator
        self.library = library

    def done(self) -> bool:
        """Whether it, and all else that is queued on the current stream, is over. Never blocks."""
        # One object serves all calls, so it cannot know which of them is meant; the last includes them.
        return self.library.idle()

    def wait(self) -> None:
        """Nothing to wait for on the same stream; raises what ended the communicator."""
        self._communicator.check()


class Queued:
    """A collective on the communicator's own stream. Holds its arrays until it is waited for."""

    __slots__ = ("_arrays", "_communicator", "_event", "_library")

    def __init__(self, communicator: _Checked, library: CudaLibrary, event: Any, arrays: Any) -> None:
        self._communicator = communicator
        self._library = library
        self._event = event
        self._arrays = arrays

    def done(self) -> bool:
        """Whether it has completed. Never blocks."""
        return self._library.happened(self._event)

    def wait(self) -> None:
        """Makes the current stream wait for it."""
        self._communicator.check()
        self._library.wait(self._event)
        self._arrays = None


def scalar_bytes(value: float, dtype: int) -> bytes:
    """``value`` as one element of NCCL's ``dtype``.

    Raises:
        ArrayError: the dtype is none of floating-point numbers, or cannot hold ``value``.
    """
    name = TYPE_NAMES[dtype]
    if name not in _FORMATS:
        raise ArrayError(f"a pre-multiplied sum needs a floating-point dtype, not {name}")
    try:
        data = struct.pack(_FORMATS[name], value)
        if name == "bfloat16":
            (bits,) = struct.unpack("<I", data)
            data = struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
            if data[1] & 0x7F == 0x7F and data[0] == 0x80 and not math.isinf(value):
                raise OverflowError
    except (OverflowError, struct.error) as error:
        raise ArrayError(
            f"the factor {value!r} of a pre-multiplied sum cannot be a {name}",
            remedy="Give a number within the dtype's range, or convert the array to a wider one.",
        ) from error
    return data


def address_of(data: bytes) -> int:
    """Address of ``data``, which the caller must keep alive over the call."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
