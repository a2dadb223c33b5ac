"""Copies of one rank's part of the state at a step, in host memory, with checksums that detect damage."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from muster.errors import WorkerError
from muster.training.snapshots.parts import PartKey

CHUNK_BYTES = 16 << 20
"""Size of a chunk, in bytes: the part of a copy with one checksum, which is sent as one message."""

_CHECKSUM_BYTES = 4

_KEY = struct.Struct("!QQII")


class DamagedCopyError(WorkerError):
    """A copy does not match its checksums, because bits have flipped or bytes are of another step."""


@dataclass(frozen=True, slots=True)
class PartCopy:
    """A copy of one rank's part of the state at a step.

    Attributes:
        key: the part's identity.
        head: a description of the data, and the rest of the state, as JSON.
        data: the bytes of the tensors.
        checksums: for each chunk of the data, together with key and head, the first 4 bytes of a GMAC (NIST
            SP 800-38D) with a public key. A processor with AES computes it four times as fast as a CRC-32.
            It only detects damage; the secret keys of the connections keep attackers out.
        is_own: whether this process made the copy.
    """

    key: PartKey
    head: bytes
    data: memoryview
    checksums: tuple[int, ...] = ()
    is_own: bool = False

    def sealed(self, found: Mapping[int, int] | None = None) -> PartCopy:
        """Returns the copy with checksums of its contents; ``found``: checksums already known, by chunk."""
        return replace(self, checksums=tuple(self._sums(found)))

    @property
    def announced(self) -> int:
        """The checksums of :meth:`sealed`, which its owner computed, as one number below 2**64."""
        return _in_one(self.checksums)

    def found(self) -> int:
        """The checksums of its current contents, as one number below 2**64."""
        return _in_one(tuple(self._sums()))

    def checksum(self, number: int) -> int:
        """Computes the checksum of the current contents of one chunk."""
        (generation, step), world_size, rank = self.key
        # Each includes the key and the head, so that a chunk of another copy is not taken for this one.
        mac = Cipher(algorithms.AES(bytes(16)), modes.GCM(bytes(12))).encryptor()
        mac.authenticate_additional_data(_KEY.pack(generation, step, world_size, rank))
        mac.authenticate_additional_data(hashlib.sha256(self.head).digest())
        mac.authenticate_additional_data(self.data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])
        mac.finalize()
        return int.from_bytes(mac.tag[:_CHECKSUM_BYTES])

    def check(self, found: Mapping[int, int] | None = None) -> None:
        """Compares its contents with its checksums.

        Args:
            found: already known checksums of its current contents, by chunk.

        Raises:
            DamagedCopyError: a checksum differs.
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
    """Returns a name of a part, for messages."""
    return f"rank {key.rank}'s part of {key.snapshot}"


def _in_one(checksums: tuple[int, ...]) -> int:
    packed = struct.pack(f"!{len(checksums)}I", *checksums)
    return int.from_bytes(hashlib.sha256(packed).digest()[:8], "big")


def chunk_count(size: int) -> int:
    """Returns the number of chunks (and of checksums) of ``size`` bytes; at least 1."""
    return max(1, -(-size // CHUNK_BYTES))


def chunks(data: memoryview) -> list[memoryview]:
    """Returns views of the data's chunks, in order."""
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]


class HeldCopies:
    """The complete copies that this process holds, its own and those of others; usable in any thread."""

    def __init__(self) -> None:
        self._copies: dict[PartKey, PartCopy] = {}
        self._lock = threading.Lock()

    def keep(self, copy: PartCopy) -> None:
        """Adds a complete copy."""
        with self._lock:
            self._copies[copy.key] = copy

    def get(self, key: PartKey | None) -> PartCopy | None:
        """Returns the copy of that part; None: it is not held."""
        with self._lock:
            return None if key is None else self._copies.get(key)

    def all(self) -> list[PartCopy]:
        """Returns all copies, in the order of their parts."""
        with self._lock:
            return [self._copies[key] for key in sorted(self._copies)]

    def drop(self, keys: Iterable[PartKey]) -> None:
        """Drops copies."""
        with self._lock:
            for key in keys:
                self._copies.pop(key, None)
