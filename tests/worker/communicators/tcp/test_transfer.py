"""Transfers end with their data, at their deadline, when stopped, or when a peer hangs up."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from muster.worker.communicators.tcp import frames as wire
from muster.worker.communicators.tcp.connection import Connection
from muster.worker.communicators.tcp.transfer import (
    DeadlinePassedError,
    FrameIn,
    Incoming,
    Mover,
    Outgoing,
    PeerEndedError,
    StoppedError,
)


@dataclass
class Ends:
    """Rank 0's mover and its connection to rank 1; and rank 1's end, as a bare socket."""

    mover: Mover
    link: Connection
    peer: socket.socket


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = socket.socketpair()
    right.settimeout(10)
    mover, link = Mover(), Connection(left, 1)
    mover.watch(link)
    with left, right:
        yield Ends(mover, link, right)
        mover.close()


def soon() -> float:
    return time.monotonic() + 10


def test_views_are_filled_in_order_and_told_when_full(ends: Ends) -> None:
    views = [memoryview(bytearray(size)) for size in (3, 0, 2)]
    filled: list[int] = []
    ends.peer.sendall(b"abcde")
    ends.mover.run([], [Incoming(ends.link, views, filled.append)], soon())
    assert [bytes(view) for view in views] == [b"abc", b"", b"de"]
    assert filled == [0, 1, 2]


def test_views_that_are_not_ready_wait(ends: Ends) -> None:
    outgoing = Outgoing(ends.link, [memoryview(b"one"), memoryview(b""), memoryview(b"two")], ready=1)
    assert outgoing.move()
    assert outgoing.held
    assert ends.peer.recv(100) == b"one"
    assert ends.link.in_payload
    outgoing.ready = 3
    ends.mover.run([outgoing], [], soon())
    assert ends.peer.recv(100) == b"two"
    assert not ends.link.in_payload


def test_more_than_the_kernel_holds_goes_both_ways_at_once(ends: Ends) -> None:
    data, size = os.urandom(1 << 20), 1 << 20
    got = bytearray()

    def echo() -> None:
        while len(got) < size:
            piece = ends.peer.recv(65536)
            got.extend(piece)
            ends.peer.sendall(piece)

    thread = threading.Thread(target=echo)
    thread.start()
    back = memoryview(bytearray(size))
    ends.mover.run([Outgoing(ends.link, [memoryview(data)])], [Incoming(ends.link, [back])], soon())
    thread.join()
    assert bytes(back) == data


def test_the_deadline_names_the_peer_waited_for(ends: Ends) -> None:
    with pytest.raises(DeadlinePassedError) as caught:
        ends.mover.run([], [Incoming(ends.link, [memoryview(bytearray(1))])], time.monotonic())
    assert caught.value.ranks == (1,)


def test_another_thread_can_stop_it_now_and_for_ever(ends: Ends) -> None:
    threading.Timer(0.02, ends.mover.stop).start()
    for _ in range(2):
        with pytest.raises(StoppedError):
            ends.mover.run([], [Incoming(ends.link, [memoryview(bytearray(1))])], soon())


def test_a_check_may_end_the_waiting(ends: Ends) -> None:
    def check() -> None:
        raise KeyError("cancelled")

    ends.mover.check_while_waiting(check)
    with pytest.raises(KeyError):
        ends.mover.run([], [Incoming(ends.link, [memoryview(bytearray(1))])], soon())


@pytest.mark.parametrize("size", [1, 4000])
def test_a_goodbye_in_the_place_of_data_is_read(ends: Ends, size: int) -> None:
    ends.peer.sendall(wire.goodbye(wire.Reason.MISMATCH, "they differ"))
    ends.peer.close()
    stream = FrameIn(ends.link) if size == 1 else Incoming(ends.link, [memoryview(bytearray(size))])
    with pytest.raises(PeerEndedError) as caught:
        ends.mover.run([], [stream], soon())
    assert caught.value.rank == 1
    assert caught.value.farewell == (wire.Reason.MISMATCH, "they differ")


def test_a_peer_that_dies_is_noticed_though_nothing_is_expected_of_it(ends: Ends) -> None:
    left, right = socket.socketpair()
    with left, right:
        other = Connection(left, 2)
        ends.mover.watch(other)
        ends.peer.close()
        with pytest.raises(PeerEndedError) as caught:
            ends.mover.run([], [Incoming(other, [memoryview(bytearray(1))])], soon())
        assert (caught.value.rank, caught.value.farewell) == (1, None)


def test_a_peer_that_is_done_may_go_while_others_work_on(ends: Ends) -> None:
    left, right = socket.socketpair()
    with left, right:
        other = Connection(left, 2)
        ends.mover.watch(other)
        ends.peer.sendall(b"last data" + wire.goodbye(wire.Reason.DONE, ""))
        ends.peer.close()
        threading.Timer(0.05, right.sendall, [b"x"]).start()
        ends.mover.run([], [Incoming(other, [memoryview(bytearray(1))])], soon())
        view = memoryview(bytearray(9))
        ends.mover.run([], [Incoming(ends.link, [view])], soon())
        assert bytes(view) == b"last data"
        with pytest.raises(PeerEndedError):
            ends.mover.run([], [Incoming(ends.link, [memoryview(bytearray(1))])], soon())


def test_a_frame_takes_its_own_bytes_and_no_more(ends: Ends) -> None:
    call = wire.Call("all_reduce", "f4", "sum", -1, 5000).encode()
    frame = wire.blocks_frame(wire.FrameKind.CALLS, [(call, os.urandom(20_000))])
    ends.peer.sendall(frame + b"payload")
    incoming = FrameIn(ends.link)
    ends.mover.run([], [incoming], soon())
    assert incoming.blocks[0][0] == call
    assert len(incoming.blocks[0][1]) == 20_000
    view = memoryview(bytearray(7))
    ends.mover.run([], [Incoming(ends.link, [view])], soon())
    assert bytes(view) == b"payload"
