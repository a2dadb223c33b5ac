"""Writes a safetensors file piece by piece: without a second copy in memory, at a limited rate."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PIECE_BYTES = 4 << 20
_NAMES = {
    "b1": "BOOL",
    "u1": "U8",
    "i1": "I8",
    "u2": "U16",
    "i2": "I16",
    "f2": "F16",
    "u4": "U32",
    "i4": "I32",
    "f4": "F32",
    "u8": "U64",
    "i8": "I64",
    "f8": "F64",
    "c8": "C64",
}


class WritePace:
    """Limits the rate of a writer.

    Args:
        mbytes_per_s: maximum rate, in 10**6 bytes per second; 0: no limit.
    """

    def __init__(self, mbytes_per_s: float) -> None:
        self._bytes_per_s = 1e6 * mbytes_per_s
        self._begun = time.monotonic()
        self._written = 0

    def wrote(self, nbytes: int) -> None:
        """Counts ``nbytes`` more bytes, and waits as long as they take at this rate."""
        self._written += nbytes
        if self._bytes_per_s:
            due = self._begun + self._written / self._bytes_per_s
            time.sleep(max(0.0, due - time.monotonic()))


def write_safetensors(
    path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str], *, mbytes_per_s: float = 0.0
) -> None:
    """Writes arrays and texts as ``safetensors.numpy.save_file`` does.

    Args:
        path: the path of the file.
        arrays: C-contiguous arrays by name.
        metadata: texts by name.
        mbytes_per_s: see :class:`WritePace`.

    Raises:
        OSError: the file cannot be written.
        TypeError: the format does not have an array's dtype.
    """
    # Arrays with large items come first, as the format demands, so that each array is aligned in the file.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        array = arrays[name]
        kind = _NAMES.get(array.dtype.str[1:])
        if kind is None or array.dtype.str[0] == ">":
            raise TypeError(f"{name} is of {array.dtype}, which a checkpoint cannot hold")
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pace = WritePace(mbytes_per_s)
    with path.open("wb", buffering=0) as file:
        write_all(file, memoryview(len(text).to_bytes(8, "little") + text), pace)
        for name in names:
            flat = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
            write_all(file, flat.data, pace)


def write_all(file: Any, data: memoryview, pace: WritePace) -> None:
    """Writes bytes piece by piece, no faster than ``pace`` allows."""
    while len(data):
        written = file.write(data[:_PIECE_BYTES])
        pace.wrote(written)
        data = data[written:]
