"""What takes a training state from rank to rank: collectives on one kind of arrays."""

from __future__ import annotations

from typing import Any, Protocol

from muster.worker.communicators.base import Array, Communicator
from muster.worker.training.arrays import array_module
from muster.worker.training.buckets import DEFAULT_BUCKET_BYTES, Bucket, ParameterSpec, plan_buckets


class Carrier(Protocol):
    """Collectives on one kind of arrays, as far as sharing a state needs them."""

    def gather(self, row: list[int]) -> list[list[int]]:
        """Every rank's numbers, by rank."""

    def broadcast_text(self, mine: bytes, length: int, source: int) -> str:
        """The text of ``source``, ``length`` bytes long."""

    def broadcast_arrays(self, source: int) -> dict[str, Array]:
        """The arrays of ``source`` by name; own arrays stay untouched."""


class ArrayCarrier:
    """Takes NumPy and CuPy arrays from rank to rank."""

    def __init__(self, communicator: Communicator, arrays: dict[str, Array]) -> None:
        self._communicator = communicator
        self._arrays = arrays
        self._xp: Any = array_module(arrays)

    def gather(self, row: list[int]) -> list[list[int]]:
        """See :class:`Carrier`."""
        send = self._xp.asarray(row, dtype="int64")
        recv = self._xp.zeros(len(row) * self._communicator.world_size, dtype="int64")
        self._communicator.all_gather(send, recv)
        rows: list[list[int]] = recv.reshape(-1, len(row)).tolist()
        return rows

    def broadcast_text(self, mine: bytes, length: int, source: int) -> str:
        """See :class:`Carrier`."""
        buffer = self._xp.zeros(length, dtype="uint8")
        if self._communicator.rank == source:
            buffer[:] = self._xp.asarray(bytearray(mine), dtype="uint8")
        self._communicator.broadcast(buffer, source)
        return bytes(buffer.tolist()).decode()

    def broadcast_arrays(self, source: int) -> dict[str, Array]:
        """See :class:`Carrier`; few large broadcasts."""
        arrays, communicator = self._arrays, self._communicator
        specs = [
            ParameterSpec(name, int(a.size), str(a.dtype), a.dtype.itemsize) for name, a in arrays.items()
        ]
        received: dict[str, Array] = {}
        works = []
        for bucket in plan_buckets(specs, first_bytes=DEFAULT_BUCKET_BYTES):
            gives = communicator.rank == source
            buffer = self._packed(bucket) if gives else self._xp.empty(bucket.size, bucket.dtype)
            works.append(communicator.broadcast(buffer, source, async_op=True))
            for slot in bucket.slots:
                part = buffer[slot.offset : slot.offset + slot.size]
                received[slot.name] = part.reshape(arrays[slot.name].shape)
        for work in works:
            work.wait()
        return received

    def _packed(self, bucket: Bucket) -> Array:
        return self._xp.concatenate([self._arrays[slot.name].reshape(-1) for slot in bucket.slots])
