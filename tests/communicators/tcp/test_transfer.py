"""Transfers end with their data, at their deadline, when stopped, or when a peer hangs up."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from muster.communicators.membership import Membership, Peer
from muster.communicators.tcp import frames as wire
from muster.communicators.tcp.communicator import has_second_core
from muster.communicators.tcp.connection import PeerConnection
from muster.communicators.tcp.transfer import (
    DeadlinePassedError,
    FrameIn,
    Incoming,
    Multiplexer,
    Outgoing,
    PeerEndedError,
    StoppedError,
)


@dataclass
class Ends:
    """Rank 0's multiplexer and its connection to rank 1; and rank 1's end, as a bare socket."""

    multiplexer: Multiplexer
    link: PeerConnection
    peer: socket.socket


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = socket.socketpair()
    right.settimeout(60)
    multiplexer, link = Multiplexer(), PeerConnection(left, 1)
    multiplexer.watch(link)
    with left, right:
        yield Ends(multiplexer, link, right)
        multiplexer.close()


def soon() -> float:
    return time.monotonic() + 60


def test_views_are_filled_in_order_and_told_when_full(ends: Ends) -> None:
    views = [memoryview(bytearray(size)) for size in (3, 0, 2)]
    filled: list[int] = []
    ends.peer.sendall(b"abcde")
    ends.multiplexer.run([], [Incoming(ends.link, views, filled.append)], soon())
    assert [bytes(view) for view in views] == [b"abc", b"", b"de"]
    assert filled == [0, 1, 2]


def test_views_that_are_not_ready_wait(ends: Ends) -> None:
    outgoing = Outgoing(ends.link, [memoryview(b"one"), memoryview(b""), memoryview(b"two")], ready=1)
    assert outgoing.move()
    assert outgoing.held
    assert ends.peer.recv(100) == b"one"
    assert ends.link.in_payload
    outgoing.ready = 3
    ends.multiplexer.run([outgoing], [], soon())
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
    ends.multiplexer.run([Outgoing(ends.link, [memoryview(data)])], [Incoming(ends.link, [back])], soon())
    thread.join()
    assert bytes(back) == data


def test_the_deadline_names_the_peer_waited_for(ends: Ends) -> None:
    with pytest.raises(DeadlinePassedError) as caught:
        ends.multiplexer.run([], [Incoming(ends.link, [memoryview(bytearray(1))])], time.monotonic())
    assert caught.value.ranks == (1,)


def test_another_thread_can_stop_it_now_and_for_ever(ends: Ends) -> None:
    threading.Timer(0.02, ends.multiplexer.stop).start()
    for _ in range(2):
        with pytest.raises(StoppedError):
            ends.multiplexer.run([], [Incoming(ends.link, [memoryview(bytearray(1))])], soon())


def test_a_check_may_end_the_waiting(ends: Ends) -> None:
    def check() -> None:
        raise KeyError("cancelled")

    ends.multiplexer.check_while_waiting(check)
    with pytest.raises(KeyError):
        ends.multiplexer.run([], [Incoming(ends.link, [memoryview(bytearray(1))])], soon())


@pytest.mark.parametrize("size", [1, 4000])
def test_a_goodbye_in_the_place_of_data_is_read(ends: Ends, size: int) -> None:
    ends.peer.sendall(wire.goodbye(wire.Reason.MISMATCH, "they differ"))
    ends.peer.close()
    stream = FrameIn(ends.link) if size == 1 else Incoming(ends.link, [memoryview(bytearray(size))])
    with pytest.raises(PeerEndedError) as caught:
        ends.multiplexer.run([], [stream], soon())
    assert caught.value.rank == 1
    assert caught.value.farewell == (wire.Reason.MISMATCH, "they differ")


@pytest.mark.parametrize("sizes", [(1,), (4,), (3, 0, 5), (300,), (511,), (512,)])
def test_a_goodbye_is_not_taken_for_a_few_bytes_of_data(ends: Ends, sizes: tuple[int, ...]) -> None:
    ends.peer.sendall(wire.goodbye(wire.Reason.ABORTED, "it is over"))
    ends.peer.close()
    views = [memoryview(bytearray(size)) for size in sizes]
    with pytest.raises(PeerEndedError) as caught:
        ends.multiplexer.run([], [Incoming(ends.link, views)], soon())
    assert caught.value.farewell == (wire.Reason.ABORTED, "it is over")


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("closes", [False, True])
def test_data_that_begins_as_a_goodbye_does_stays_data(ends: Ends, size: int, closes: bool) -> None:
    data = wire.goodbye(wire.Reason.ABORTED, "")[:size]
    ends.peer.sendall(data + b"what follows")
    if closes:
        ends.peer.close()
    view, after = memoryview(bytearray(size)), memoryview(bytearray(12))
    ends.multiplexer.run([], [Incoming(ends.link, [view])], soon())
    ends.multiplexer.run([], [Incoming(ends.link, [after])], soon())
    assert (bytes(view), bytes(after)) == (data, b"what follows")


def test_a_peer_that_dies_is_noticed_though_nothing_is_expected_of_it(ends: Ends) -> None:
    left, right = socket.socketpair()
    with left, right:
        other = PeerConnection(left, 2)
        ends.multiplexer.watch(other)
        ends.peer.close()
        with pytest.raises(PeerEndedError) as caught:
            ends.multiplexer.run([], [Incoming(other, [memoryview(bytearray(1))])], soon())
        assert (caught.value.rank, caught.value.farewell) == (1, None)


def test_a_peer_that_is_done_may_go_while_others_work_on(ends: Ends) -> None:
    left, right = socket.socketpair()
    with left, right:
        other = PeerConnection(left, 2)
        ends.multiplexer.watch(other)
        ends.peer.sendall(b"last data" + wire.goodbye(wire.Reason.DONE, ""))
        ends.peer.close()
        threading.Timer(0.05, right.sendall, [b"x"]).start()
        ends.multiplexer.run([], [Incoming(other, [memoryview(bytearray(1))])], soon())
        view = memoryview(bytearray(9))
        ends.multiplexer.run([], [Incoming(ends.link, [view])], soon())
        assert bytes(view) == b"last data"
        with pytest.raises(PeerEndedError):
            ends.multiplexer.run([], [Incoming(ends.link, [memoryview(bytearray(1))])], soon())


def test_a_frame_takes_its_own_bytes_and_no_more(ends: Ends) -> None:
    call = wire.Call("all_reduce", "float32", "sum", -1, 5000).encode()
    frame = wire.blocks_frame(wire.FrameKind.CALLS, [(call, os.urandom(20_000))])
    ends.peer.sendall(frame + b"payload")
    incoming = FrameIn(ends.link)
    ends.multiplexer.run([], [incoming], soon())
    assert incoming.blocks[0][0] == call
    assert len(incoming.blocks[0][1]) == 20_000
    view = memoryview(bytearray(7))
    ends.multiplexer.run([], [Incoming(ends.link, [view])], soon())
    assert bytes(view) == b"payload"


class Meeting(PeerConnection):
    """Its first read and its first write wait for each other."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, 1)
        self.meet = threading.Barrier(2, timeout=60)
        self.met: set[str] = set()

    def _once(self, what: str) -> None:
        if what not in self.met:
            self.met.add(what)
            self.meet.wait()

    def read_into(self, view: memoryview) -> int:
        self._once("read")
        return super().read_into(view)

    def write(self, view: memoryview) -> int:
        self._once("write")
        return super().write(view)


PIECES = 64


def pieces(fill: int = 0) -> list[memoryview]:
    return [memoryview(bytearray([fill] * 4096)) for _ in range(PIECES)]


def test_much_is_sent_while_much_is_received() -> None:
    """Sealing takes as long as sending: one after the other a ring would be half as fast."""
    left, right = socket.socketpair()
    right.settimeout(60)
    with left, right:
        multiplexer, link = Multiplexer(), Meeting(left)
        multiplexer.watch(link)
        got = bytearray()

        def peer() -> None:
            right.sendall(b"\2" * 4096 * PIECES)
            while len(got) < 4096 * PIECES:
                got.extend(right.recv(1 << 16))

        thread = threading.Thread(target=peer)
        thread.start()
        into, filled = pieces(), list[int]()
        multiplexer.run([Outgoing(link, pieces(1))], [Incoming(link, into, filled.append)], soon())
        thread.join(60)
        assert got == b"\1" * 4096 * PIECES
        assert all(bytes(view) == b"\2" * 4096 for view in into) and filled == list(range(PIECES))
        multiplexer.close()


def test_one_thread_does_both_where_there_is_no_second_core() -> None:
    left, right = socket.socketpair()
    with left, right:
        ends = [(Multiplexer(second_core=False), PeerConnection(sock, 1)) for sock in (left, right)]
        into = [pieces(), pieces()]
        before = {each.ident for each in threading.enumerate() if each.name == "muster-tcp-send"}

        def move(which: int) -> None:
            multiplexer, link = ends[which]
            multiplexer.watch(link)
            multiplexer.run([Outgoing(link, pieces(which + 1))], [Incoming(link, into[which])], soon())

        other = threading.Thread(target=move, args=(1,))
        other.start()
        move(0)
        other.join(60)
        assert all(bytes(view) == b"\2" * 4096 for view in into[0])
        assert all(bytes(view) == b"\1" * 4096 for view in into[1])
        assert {each.ident for each in threading.enumerate() if each.name == "muster-tcp-send"} <= before
        for multiplexer, _ in ends:
            multiplexer.close()


@pytest.mark.parametrize(
    ("hosts", "cores", "second"), [("aa", 4, True), ("aa", 3, False), ("ab", 2, True), ("aabb", 3, False)]
)
def test_a_second_core_is_one_that_no_other_rank_of_this_host_needs(
    monkeypatch: pytest.MonkeyPatch, hosts: str, cores: int, second: bool
) -> None:
    peers = tuple(Peer(rank, f"n{rank}", 1, host, host, "") for rank, host in enumerate(hosts))
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cores)))
    assert has_second_core(Membership("job", 1, "world", 0, peers)) is second


@pytest.mark.parametrize("said", [b"", wire.goodbye(wire.Reason.LOST, "see you")])
def test_a_peer_that_hangs_up_amid_much_in_both_directions_is_told_with_its_farewell(
    ends: Ends, said: bytes
) -> None:
    ends.peer.sendall(b"\2" * 100 + said)
    ends.peer.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerEndedError) as caught:
        ends.multiplexer.run([Outgoing(ends.link, pieces(1))], [Incoming(ends.link, pieces())], soon())
    assert caught.value.rank == 1
    assert caught.value.farewell == ((wire.Reason.LOST, "see you") if said else None)


def test_much_in_both_directions_can_be_stopped(ends: Ends) -> None:
    timer = threading.Timer(0.1, ends.multiplexer.stop)
    timer.start()
    with pytest.raises(StoppedError):
        ends.multiplexer.run([Outgoing(ends.link, pieces(1))], [Incoming(ends.link, pieces())], soon())
    timer.join()
