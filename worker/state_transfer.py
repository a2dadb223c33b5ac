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


def share_state(session: StateHolder, state: TrainingState) -> int:
    """Makes the state of all ranks that of the furthest one, and the sampler fit the new world.

    A change of members may catch some ranks just before, others just after a step: the most steps win, so
    that no finished step is redone. When all start anew, a rank that resumed from a checkpoint is the
    furthest. Where nobody lacks anything, one small collective is all that happens.

    What is received is put in place only when it is there as a whole: a giver that dies half-way leaves
    every other rank with the state it had.

    Returns:
        The rank whose state it is now.

    Raises:
        StateMismatchError: the giver trains another model.
        MembershipChanged: the members changed again; nothing was overwritten.
    """
    communicator = session.communicator
    rank, anew = communicator.rank, session.state_source_rank < 0
    xp = array_module(state.arrays)
    description = state.describe().encode()
    holds = anew or rank not in session.newcomer_ranks
    tickets = _gather(
        communicator, xp, [state.step if holds else -1, zlib.crc32(description), len(description)]
    )
    source = _furthest([ticket[0] for ticket in tickets], session.state_source_rank)
    if anew or any(ticket != tickets[source] for ticket in tickets):
        text = _broadcast_text(communicator, xp, description, tickets[source][2], source)
        if rank != source:
            state.check(text, f"rank {source}")
        received = _broadcast_packed(communicator, xp, state.arrays, source)
        if rank != source and (anew or tickets[rank] != tickets[source]):
            for name, array in received.items():
                state.arrays[name][...] = array
            state.restore(text)
    state.sampler.reshard(rank, communicator.world_size)
    return source


def _furthest(steps: list[int], preferred: int) -> int:
    """The rank with the most steps; among equals the longest-lived, as the scheduler says, else the first."""
    most = max(steps)
    if preferred >= 0 and steps[preferred] == most:
        return preferred
    return steps.index(most)


def _gather(communicator: Communicator, xp: Any, row: list[int]) -> list[list[int]]:
    send = xp.asarray(row, dtype="int64")
    recv = xp.zeros(len(row) * communicator.world_size, dtype="int64")
    communicator.all_gather(send, recv)
    rows: list[list[int]] = recv.reshape(-1, len(row)).tolist()
    return rows


def _broadcast_text(communicator: Communicator, xp: Any, mine: bytes, length: int, source: int) -> str:
    buffer = xp.zeros(length, dtype="uint8")
    if communicator.rank == source:
        buffer[:] = xp.asarray(bytearray(mine), dtype="uint8")
    communicator.broadcast(buffer, source)
    return bytes(buffer.tolist()).decode()


def _broadcast_packed(
    communicator: Communicator, xp: Any, arrays: dict[str, Array], source: int
) -> dict[str, Array]:
    """The arrays of ``source`` by name, in few large broadcasts; own arrays stay untouched."""
    specs = [ParameterSpec(name, int(a.size), str(a.dtype), a.dtype.itemsize) for name, a in arrays.items()]
    received: dict[str, Array] = {}
    works = []
    for bucket in plan_buckets(specs, first_bytes=DEFAULT_BUCKET_BYTES):
        buffer = (
            _packed(xp, bucket, arrays)
            if communicator.rank == source
            else xp.empty(bucket.size, bucket.dtype)
        )
        works.append(communicator.broadcast(buffer, source, async_op=True))
        for slot in bucket.slots:
            part = buffer[slot.offset : slot.offset + slot.size]
            received[slot.name] = part.reshape(arrays[slot.name].shape)
    for work in works:
        work.wait()
    return received


def _packed(xp: Any, bucket: Bucket, arrays: dict[str, Array]) -> Array:
    return xp.concatenate([arrays[slot.name].reshape(-1) for slot in bucket.slots])
