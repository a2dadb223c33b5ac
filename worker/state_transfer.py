"""Bringing all members to one state after a change: the furthest gives, whoever needs it takes."""

from __future__ import annotations

import zlib
from typing import Any, Protocol

from worker.arrays import array_module
from worker.communicators.base import Array, Communicator
from worker.core.bucket_plan import DEFAULT_BUCKET_BYTES, Bucket, ParameterSpec, plan_buckets
from worker.state import TrainingState


class StateHolder(Protocol):
    """What is needed of a :class:`worker.session.Session`."""

    @property
    def communicator(self) -> Communicator:
        """The world's communicator in the present generation."""

    @property
    def state_source_rank(self) -> int:
        """Who holds the state that newcomers take; -1: all start anew."""

    @property
    def newcomer_ranks(self) -> tuple[int, ...]:
        """Who holds no state."""


class Carrier(Protocol):
    """Collectives on one kind of arrays, as far as sharing a state needs them."""

    def gather(self, row: list[int]) -> list[list[int]]:
        """Every rank's numbers, by rank."""

    def broadcast_text(self, mine: bytes, length: int, source: int) -> str:
        """The text of ``source``, ``length`` bytes long."""

    def broadcast_arrays(self, source: int) -> dict[str, Array]:
        """The arrays of ``source`` by name; own arrays stay untouched."""


def share_state(session: StateHolder, state: TrainingState) -> int:
    """Makes the state of all ranks that of the furthest one, and the sampler fit the new world.

    A change of members may catch some ranks just before, others just after a step: the most steps win, so
    that no finished step is redone. When all start anew, a rank that resumed from a checkpoint is the
    furthest. Should it die before any other has its state, the rest start anew once more: its replacement
    may have the checkpoint, too. Where nobody lacks anything, one small collective is all that happens.

    What is received is put in place only when it is there as a whole: a giver that dies half-way leaves
    every other rank with the state it had.

    Returns:
        The rank whose state it is now.

    Raises:
        StateMismatchError: the giver trains another model.
        MembershipChanged: the members changed again; nothing was overwritten.
    """
    communicator = session.communicator
    state.roll_back()
    rank, anew = communicator.rank, session.state_source_rank < 0
    carrier = state.carrier(communicator)
    description = state.describe().encode()
    holds = anew or (state.shared and rank not in session.newcomer_ranks)
    digest = [zlib.crc32(description), len(description)]
    tickets = carrier.gather([state.step if holds else -1, *digest])
    if all(steps < 0 for steps, *_ in tickets):
        anew, tickets = True, carrier.gather([state.step, *digest])
    source = _furthest([ticket[0] for ticket in tickets], session.state_source_rank)
    if anew or any(ticket != tickets[source] for ticket in tickets):
        text = carrier.broadcast_text(description, tickets[source][2], source)
        if rank != source:
            state.check(text, f"rank {source}")
        received = carrier.broadcast_arrays(source)
        if rank != source and (anew or tickets[rank] != tickets[source]):
            for name, array in received.items():
                state.arrays[name][...] = array
            state.restore(text)
    state.enter(communicator, source)
    state.shared = True
    return source


def _furthest(steps: list[int], preferred: int) -> int:
    """The rank with the most steps; among equals the longest-lived, as the scheduler says, else the first."""
    most = max(steps)
    if preferred >= 0 and steps[preferred] == most:
        return preferred
    return steps.index(most)


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
