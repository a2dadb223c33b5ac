"""Copies of what one rank held at a step, in host memory, with checksums that show what became of them."""

from __future__ import annotations

import hashlib
import struct
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from muster.errors import WorkerError
from muster.training.snapshots.parts import PartKey

CHUNK_BYTES = 4 << 20
"""Bytes of a copy that have one checksum, and travel as one message."""

_KEY = struct.Struct("!QQII")


class DamagedCopyError(WorkerError):
    """A copy in memory is not what its rank held: flipped bits, parts of two steps, another step's bytes."""


@dataclass(frozen=True, slots=True)
class PartCopy:
    """What one rank held at a step.

    Attributes:
        key: which part it is.
        head: says what the data is, as JSON, and holds what is no tensor.
        data: the tensors' bytes.
        checksums: of each chunk of the data, with key and head.
        is_own: this process took it.
    """

    key: PartKey
    head: bytes
    data: memoryview
    checksums: tuple[int, ...] = ()
    is_own: bool = False

    def sealed(self, found: Mapping[int, int] | None = None) -> PartCopy:
        """The copy with the checksums of what it holds now; ``found``: those that are known, by chunk."""
        return replace(self, checksums=tuple(self._sums(found)))

    @property
    def announced(self) -> int:
        """What its owner found when it was sealed, in one number below 2**64."""
        return _in_one(self.checksums)

    def found(self) -> int:
        """What it holds now, likewise."""
        return _in_one(tuple(self._sums()))

    def checksum(self, number: int) -> int:
        """The checksum of what one chunk holds now."""
        (generation, step), world_size, rank = self.key
        # Each begins with the name and the head, so that no chunk passes for one of another copy.
        seed = zlib.crc32(self.head, zlib.crc32(_KEY.pack(generation, step, world_size, rank)))
        return zlib.crc32(self.data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES], seed)

    def check(self, found: Mapping[int, int] | None = None) -> None:
        """Compares what it holds with its checksums.

        Args:
            found: the checksums of what it holds that are known, by chunk.

        Raises:
            DamagedCopyError: they differ.
        """
        sums = tuple(self._sums(found))
        if len(sums) != len(self.checksums):
            raise DamagedCopyError(f"The copy of {in_words(self.key)} is not whole.")
        for number, (one, other) in enumerate(zip(sums, self.checksums, strict=True)):
            if one != other:
                raise DamagedCopyError(f"The copy of {in_words(self.key)} is damaged in its chunk {number}.")

    def _sums(self, found: Mapping[int, int] | None = None) -> Iterable[int]:
        known = found or {}
        for number in range(chunk_count(len(self.data))):
            yield known[number] if number in known else self.checksum(number)


def in_words(key: PartKey) -> str:
    """A part as messages show it."""
    return f"rank {key.rank}'s part of {key.snapshot}"


def _in_one(checksums: tuple[int, ...]) -> int:
    packed = struct.pack(f"!{len(checksums)}I", *checksums)
    return int.from_bytes(hashlib.sha256(packed).digest()[:8], "big")


def chunk_count(size: int) -> int:
    """How many checksums a number of bytes has."""
    return max(1, -(-size // CHUNK_BYTES))


def chunks(data: memoryview) -> list[memoryview]:
    """The data's chunks, in order; they share its memory."""
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]


class HeldCopies:
    """The whole copies that this process holds, its own and others'; callable from any thread."""

    def __init__(self) -> None:
        self._copies: dict[PartKey, PartCopy] = {}
        self._lock = threading.Lock()

    def keep(self, copy: PartCopy) -> None:
        """Adds a whole copy."""
        with self._lock:
            self._copies[copy.key] = copy

    def get(self, key: PartKey | None) -> PartCopy | None:
        """The copy of that part, if it is here."""
        with self._lock:
            return None if key is None else self._copies.get(key)

    def all(self) -> list[PartCopy]:
        """What is here, by part."""
        with self._lock:
            return [self._copies[key] for key in sorted(self._copies)]

    def drop(self, keys: Iterable[PartKey]) -> None:
        """Lets go of copies."""
        with self._lock:
            for key in keys:
                self._copies.pop(key, None)
