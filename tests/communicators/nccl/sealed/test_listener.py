"""Strangers at a listener: however many come, the one who holds the secret gets in, and accept has an end."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.communicators.nccl.sealed.kit import BOTH_OK, Rank, meet, move, ranks
from tests.communicators.nccl.sealed.relay import HELLO, Counted, Relay, port_of

MAX_GUESTS = 64
HELLO_S = 5.0


def test_an_accept_that_nobody_comes_to_ends_with_a_reason(driver: Path) -> None:
    with ranks(driver, {"MS_NCCL_ACCEPT_TIMEOUT": "1"}) as (receiver,):
        receiver.listen()
        answer = receiver.ask("accept 0 30")
        assert answer.startswith("error 6 NCCL's network at 127.0.0.1:"), answer
        assert "waited 1 s for its peer and nobody came" in answer
        assert "MS_NCCL_ACCEPT_TIMEOUT" in answer


def test_a_connect_that_nobody_answers_ends_with_a_reason(driver: Path) -> None:
    with ranks(driver, {}, {"MS_NCCL_ACCEPT_TIMEOUT": "1"}) as (receiver, sender):
        answer = sender.ask(f"connect {receiver.listen()} 30")
        assert answer.startswith("error 6 NCCL's network does not connect to 127.0.0.1:"), answer
        assert "did not finish its handshake in time" in answer


def test_a_connect_to_a_process_that_is_gone_ends_with_a_reason(driver: Path) -> None:
    with ranks(driver, {}, {}) as (receiver, sender):
        handle = receiver.listen()
        assert receiver.ask("unlisten 0") == "ok"
        answer = sender.ask(f"connect {handle} 30")
        assert "it cannot be reached (Connection refused); look whether its process is alive" in answer


def test_a_listener_that_closes_during_a_handshake_ends_the_connect(driver: Path) -> None:
    with ranks(driver, {}, {"MS_NCCL_CONNECTIONS": "1"}) as (receiver, sender):
        for tried in range(20):
            handle = receiver.listen()
            sender.tell(f"connect {handle} 30")
            taken = receiver.ask(f"accept {tried} 0.001") != "nobody"
            assert receiver.ask(f"unlisten {tried}") == "ok"
            answer = sender.hear()
            if not taken:
                break  # else the handshake had ended within that millisecond
        assert not taken
        if answer.startswith("communicator "):  # it had ended on this side; there is nobody on the other
            answer = sender.reason()
        else:
            assert answer.startswith("error 6 NCCL's network does not connect to 127.0.0.1:"), answer
        assert "127.0.0.1:" in answer


def test_neither_connect_nor_accept_blocks(driver: Path) -> None:
    """One process does both, by turns: whichever waited for the other would wait for ever."""
    with ranks(driver, {}, {}) as (receiver, sender):
        handle = receiver.listen()
        for _ in range(200):
            if (answer := sender.ask(f"connect {handle} 0.0001")) != "nobody":
                break
            receiver.ask("accept 0 0.0001")
        assert answer == "communicator 0"


def knock(port: int, many: int, hello: bytes = b"") -> list[socket.socket]:
    """Opens connections and leaves them open."""
    opened = []
    for _ in range(many):
        stranger = socket.create_connection(("127.0.0.1", port))
        with contextlib.suppress(OSError):
            stranger.sendall(hello)
        opened.append(stranger)
    return opened


@pytest.mark.parametrize("hello", [b"", b"MSNCCLH1", b"GET / HTTP/1.1\r\n\r\n" * 20])
def test_strangers_who_stay_take_no_more_than_their_places(driver: Path, hello: bytes) -> None:
    with ranks(driver, {}, {}) as (receiver, sender):
        handle = receiver.listen()
        before = receiver.descriptors()
        opened: list[socket.socket] = []
        for _ in range(4):
            opened += knock(port_of(handle), 50, hello)
            assert receiver.ask("accept 0 0.01") == "nobody"
            assert receiver.descriptors() - before <= MAX_GUESTS
        meet(receiver, sender, handle)
        assert move(receiver, sender, 100_000, count=4) == BOTH_OK
        for stranger in opened:
            stranger.close()


@pytest.mark.system
def test_a_stranger_who_says_nothing_is_shown_out_after_few_seconds(driver: Path) -> None:
    with ranks(driver, {}, {}) as (receiver, sender):
        handle = receiver.listen()
        [stranger] = knock(port_of(handle), 1)
        receiver.tell("accept 0 60")
        stranger.settimeout(30)
        assert stranger.recv(1) == b""
        stranger.close()
        assert sender.ask(f"connect {handle} 30") == "communicator 0"
        assert receiver.hear() == "communicator 0"


@pytest.mark.system
def test_a_hello_that_came_in_time_counts_though_nobody_looked_for_longer(driver: Path) -> None:
    may_pass = threading.Event()

    def hold(piece: bytes) -> bytes:
        may_pass.wait(30)
        return piece

    with ranks(driver, {}, {"MS_NCCL_CONNECTIONS": "1"}) as (receiver, sender):
        handle = receiver.listen()
        with Relay(handle, Counted(0, hold), (HELLO,)) as relay:
            sender.tell(f"connect {relay.handle} 40")
            while not relay.seen or len(relay.seen[0]) < HELLO:
                assert receiver.ask("accept 0 0.05") == "nobody"
            may_pass.set()
            time.sleep(HELLO_S + 0.5)  # nobody asks
            assert receiver.ask("accept 0 40") == sender.hear() == "communicator 0"
            assert len(relay.seen) == 1


def _flood(port: int, many: int, stop: threading.Event) -> None:
    """Comes again and again, each time a little late with saying nothing."""
    opened: list[socket.socket] = []
    for _ in range(many):
        if stop.is_set():
            break
        with contextlib.suppress(OSError):
            opened.append(socket.create_connection(("127.0.0.1", port), timeout=5))
        if len(opened) > 200:
            opened.pop(0).close()
    for one in opened:
        one.close()


@pytest.mark.system
@pytest.mark.timeout(300)
def test_ten_thousand_strangers_neither_stall_nor_exhaust_a_listener(driver: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft >= 1024 or hard >= 1024
    with ranks(driver, {}, {}) as (receiver, sender):
        handle = receiver.listen()
        meet(receiver, sender, handle)  # threads and descriptors that stay
        before, memory = receiver.descriptors(), _memory_kib(receiver)
        stop = threading.Event()
        flood = threading.Thread(target=_flood, args=(port_of(handle), 10_000, stop))
        flood.start()
        most = 0
        while flood.is_alive():
            assert receiver.ask("accept 0 0.05") == "nobody"
            most = max(most, receiver.descriptors() - before)
        flood.join()
        assert 0 < most <= MAX_GUESTS
        assert _memory_kib(receiver) - memory < 20_000
        second = threading.Thread(target=_flood, args=(port_of(handle), 10_000, stop))
        second.start()
        meet(receiver, sender, handle)  # during a second flood
        stop.set()
        second.join()
        assert move(receiver, sender, 1 << 20, count=5, number=1) == BOTH_OK


def _memory_kib(rank: Rank) -> int:
    status = Path(f"/proc/{rank.process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1])
