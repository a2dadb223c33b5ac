"""Copies on their way to partners, over real connections between backends of one process."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.errors import CommunicatorError
from muster.training.copy_exchange import CopyExchange, OutgoingCopy
from muster.training.part_copy import CHUNK_BYTES, HeldCopies, PartCopy
from muster.training.snapshots.parts import PartKey, SnapshotId
from tests.communicators.tcp.world import Office, World, make_world
from tests.waiting import LIMIT_S


class Two:
    """Rank 0 sends to rank 1."""

    def __init__(self, world: World, most_bytes: int, **settings: Any) -> None:
        self.held = [HeldCopies(), HeldCopies()]
        self.done: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.generation = world.memberships[0].generation
        self.wanted = True
        self.exchanges = [
            CopyExchange(
                world.memberships[rank],
                world.backends[rank].endpoint,
                partners=[1] if rank == 0 else [],
                wards={} if rank == 0 else {0: most_bytes},
                held=self.held[rank],
                accept=lambda key, agreed: self.wanted,
                completed=lambda key: self.done.put(("completed", key)),
                failed=lambda key, reason: self.done.put(("failed", reason)),
                **settings,
            )
            for rank in range(2)
        ]

    def key(self, step: int) -> PartKey:
        return PartKey(SnapshotId(self.generation, step), 2, 0)

    def send(self, step: int, data: bytes) -> None:
        copy = PartCopy(self.key(step), b"{}", memoryview(bytearray(data)))
        self.exchanges[0].send(OutgoingCopy(copy.key, None, lambda: copy))

    def close(self) -> None:
        for exchange in self.exchanges:
            exchange.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    office = Office(tmp_path)
    made = make_world([office.credentials() for _ in range(2)])
    yield made
    made.close()


def test_a_copy_is_kept_at_both_ends_when_it_counts_as_complete(world: World) -> None:
    two = Two(world, 3 * CHUNK_BYTES)
    data = bytes(range(256)) * (CHUNK_BYTES // 100)
    two.send(4, data)
    assert two.done.get(timeout=LIMIT_S) == ("completed", two.key(4))
    for held in two.held:
        copy = held.get(two.key(4))
        assert copy is not None
        copy.check()
        assert bytes(copy.data) == data
    two.close()


def test_data_is_read_only_when_it_is_there(world: World) -> None:
    """On a GPU's host the copy comes later than the word of it."""
    two, there = Two(world, 100), threading.Event()
    room = bytearray(b"old")
    copy = PartCopy(two.key(1), b"", memoryview(room))
    two.exchanges[0].send(OutgoingCopy(copy.key, None, lambda: (there.wait(), copy)[1]))
    room[:] = b"new"
    there.set()
    assert two.done.get(timeout=LIMIT_S)[0] == "completed"
    kept = two.held[1].get(two.key(1))
    assert kept is not None
    assert bytes(kept.data) == b"new"
    two.close()


def test_a_copy_is_prepared_before_it_is_known_whether_it_counts(world: World) -> None:
    """One that does not, because its step broke, is neither kept nor sent, and nobody hears of it."""
    two, prepared = Two(world, 100), threading.Event()

    def outgoing(step: int) -> OutgoingCopy:
        copy = PartCopy(two.key(step), b"", memoryview(bytearray(b"of a step")))

        def finish() -> PartCopy:
            prepared.set()
            return copy

        return OutgoingCopy(copy.key, None, finish)

    broken, good = outgoing(1), outgoing(2)
    two.exchanges[0].prepare(broken)
    assert prepared.wait(LIMIT_S)
    assert two.exchanges[0].under_way == two.key(1)
    two.exchanges[0].withdraw(broken)
    two.exchanges[0].prepare(good)
    two.exchanges[0].send(good)
    assert two.done.get(timeout=LIMIT_S) == ("completed", two.key(2))
    assert [[copy.key for copy in held.all()] for held in two.held] == [[two.key(2)], [two.key(2)]]
    two.close()
    assert two.done.empty()


def test_a_prepared_copy_whose_reading_failed_is_reported_if_it_counts(world: World) -> None:
    two, tried = Two(world, 100), threading.Semaphore(0)

    def fails() -> PartCopy:
        tried.release()
        raise RuntimeError("no such memory")

    for step, counts in ((1, False), (2, True)):
        outgoing = OutgoingCopy(two.key(step), None, fails)
        two.exchanges[0].prepare(outgoing)
        assert tried.acquire(timeout=LIMIT_S)
        (two.exchanges[0].send if counts else two.exchanges[0].withdraw)(outgoing)
    assert two.done.get(timeout=LIMIT_S) == ("failed", "no such memory")
    two.close()
    assert two.done.empty()


def test_an_exchange_ends_with_a_prepared_copy_of_which_nothing_is_known(world: World) -> None:
    two, prepared = Two(world, 100), threading.Event()

    def finish() -> PartCopy:
        prepared.set()
        return PartCopy(two.key(1), b"", memoryview(bytearray(b"x")))

    two.exchanges[0].prepare(OutgoingCopy(two.key(1), None, finish))
    assert prepared.wait(LIMIT_S)
    two.close()
    assert two.done.empty()
    assert not two.held[0].all()


def test_a_third_copy_finds_room_only_where_one_was_dropped(world: World) -> None:
    two = Two(world, 100)
    for step in (1, 2):
        two.send(step, b"x" * step)
        assert two.done.get(timeout=LIMIT_S)[0] == "completed"
    two.send(3, b"xyz")
    assert two.done.get(timeout=LIMIT_S)[0] == "failed"
    two.held[1].drop([two.key(1)])
    two.send(3, b"xyz")
    assert two.done.get(timeout=LIMIT_S)[0] == "completed"
    assert [copy.key.snapshot.step for copy in two.held[1].all()] == [2, 3]
    two.close()


def test_what_is_not_wanted_is_not_kept_and_not_complete(world: World) -> None:
    two = Two(world, 100)
    two.wanted = False
    two.send(1, b"late")
    what, reason = two.done.get(timeout=LIMIT_S)
    assert what == "failed"
    assert "did not keep the copy of rank 0's part of step 1" in reason
    assert not two.held[1].all()
    two.close()


def test_more_bytes_than_were_agreed_on_are_not_taken(world: World) -> None:
    """A member that lies about the size of its part takes no more memory than it said."""
    two = Two(world, 100)
    two.send(1, b"x" * 101)
    assert two.done.get(timeout=LIMIT_S)[0] == "failed"
    assert not two.held[1].all()
    two.send(2, b"x" * 100)
    assert two.done.get(timeout=LIMIT_S) == ("completed", two.key(2))
    two.close()


def test_what_goes_out_is_held_back_to_the_rate(world: World) -> None:
    """Three chunks at two a second: at least a second passes before the last has gone."""
    two = Two(world, 3 * CHUNK_BYTES, mbytes_per_s=2 * CHUNK_BYTES / 1e6)
    begun = time.monotonic()
    two.send(1, bytes(3 * CHUNK_BYTES))
    assert two.done.get(timeout=LIMIT_S)[0] == "completed"
    assert time.monotonic() - begun > 1.0
    two.close()


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has processors for several lanes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.usefixtures("lanes")
def test_a_copy_goes_whole_over_several_lanes(world: World) -> None:
    two = Two(world, 9 * CHUNK_BYTES)
    for step, size in ((1, 9 * CHUNK_BYTES), (2, 2 * CHUNK_BYTES + 5), (3, 0)):
        two.held[1].drop([two.key(step - 2)])
        data = random.Random(step).randbytes(size)
        two.send(step, data)
        assert two.done.get(timeout=LIMIT_S) == ("completed", two.key(step))
        for held in two.held:
            copy = held.get(two.key(step))
            assert copy is not None
            copy.check()
            assert bytes(copy.data) == data
    two.close()


@pytest.mark.usefixtures("lanes")
def test_a_lane_that_fails_ends_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would wait for the rest of the generation, and nobody would hear of it."""
    found = PartCopy.checksum

    def checksum(copy: PartCopy, number: int) -> int:
        if number == 6 and not copy.is_own:
            raise CommunicatorError("the connection broke")
        return found(copy, number)

    monkeypatch.setattr(PartCopy, "checksum", checksum)
    two = Two(world, 9 * CHUNK_BYTES)
    copy = PartCopy(two.key(1), b"{}", memoryview(bytearray(9 * CHUNK_BYTES)), is_own=True)
    two.exchanges[0].send(OutgoingCopy(copy.key, None, lambda: copy))
    assert two.done.get(timeout=LIMIT_S)[0] == "failed"
    assert two.held[1].get(two.key(1)) is None
    two.close()
