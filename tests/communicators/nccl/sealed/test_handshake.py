"""Who does not hold the generation's secret gets no connection, whatever he sends."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.communicators.nccl.sealed.kit import BOTH_OK, OTHER_SECRET, SECRET, Rank, meet, move, ranks
from tests.communicators.nccl.sealed.relay import ANSWER, FINISH, HELLO, Counted, Relay, flip, port_of

SHORT = {"MS_NCCL_ACCEPT_TIMEOUT": "5"}
"""Long enough for a peer to come though the machine stands still for seconds."""
ONE = {"MS_NCCL_CONNECTIONS": "1"}


def test_another_secret_is_refused_on_both_sides(driver: Path) -> None:
    with ranks(driver, SHORT, {"secret": OTHER_SECRET}) as (receiver, sender):
        handle = receiver.listen()
        receiver.tell("accept 0 40")
        answer = sender.ask(f"connect {handle} 40")
        assert answer.startswith("error 6 NCCL's network does not connect to 127.0.0.1:"), answer
        assert "another secret or another generation" in answer
        heard = receiver.hear()
        assert heard.startswith("error 6 NCCL's network at 127.0.0.1:"), heard
        assert "another secret or another generation" in heard
        for rank in (receiver, sender):
            log = rank.end()
            assert SECRET[:8] not in log and OTHER_SECRET[:8] not in log


def test_another_generation_is_refused_before_anything_is_sent(driver: Path) -> None:
    with ranks(driver, {}, {"generation": "2"}) as (receiver, sender):
        answer = sender.ask(f"connect {receiver.listen()} 5")
        assert (
            "it is of generation 1 and this process of 2; the older one has to join its job again" in answer
        )


def test_a_listener_of_before_refuses_who_holds_the_next_generation_s_secret(driver: Path) -> None:
    with ranks(driver, SHORT, {}) as (receiver, sender):
        old = receiver.listen()
        for rank in (receiver, sender):
            assert rank.ask(f"secret 2 {OTHER_SECRET}") == "0"
        assert sender.ask(f"connect {old} 5").startswith("error 6")
        meet(receiver, sender, listener=1)
        assert move(receiver, sender, 10_000) == BOTH_OK


def test_what_is_connected_stays_so_when_the_secret_is_replaced(driver: Path) -> None:
    with ranks(driver, {}, {}) as (receiver, sender):
        meet(receiver, sender)
        for rank in (receiver, sender):
            assert rank.ask(f"secret 2 {OTHER_SECRET}") == "0"
        assert move(receiver, sender, 100_000, count=5) == BOTH_OK


def test_a_handle_that_is_none_of_ours_is_refused(driver: Path) -> None:
    with ranks(driver, {}) as (sender,):
        answer = sender.ask(f"connect {'00' * 128} 5")
        assert answer.endswith("turn encryption on for all ranks, or for none."), answer


def test_a_flipped_bit_in_a_hello_is_refused_and_the_listener_stays_open(driver: Path) -> None:
    with ranks(driver, {}, ONE) as (receiver, sender):
        handle = receiver.listen()
        receiver.tell("accept 0 40")
        for at in (0, 8, 16, 49, 88, 151):
            with Relay(handle, Counted(0, flip(at)), (HELLO,)) as relay:
                assert sender.ask(f"connect {relay.handle} 40").startswith("error 6"), at
        assert sender.ask(f"connect {handle} 40") == "communicator 0"
        assert receiver.hear() == "communicator 0"
        assert move(receiver, sender, 3000) == BOTH_OK


def test_a_flipped_bit_in_an_answer_is_refused(driver: Path) -> None:
    with ranks(driver, {}, ONE) as (receiver, sender):
        handle = receiver.listen()
        receiver.tell("accept 0 40")
        for at in (0, 32, 64, 65, 72, 103):
            with Relay(handle, edit_back=Counted(0, flip(at)), back_sizes=(ANSWER,)) as relay:
                assert "another secret" in sender.ask(f"connect {relay.handle} 40"), at
        assert sender.ask(f"connect {handle} 40") == "communicator 0"
        assert receiver.hear() == "communicator 0"


def test_a_weaker_cipher_cannot_be_asked_for_by_who_stands_between(driver: Path) -> None:
    """AES struck out of the hello, and the cipher of the answer replaced: both are under the proofs."""
    with ranks(driver, SHORT | {"MUSTER_TEST_AES": "1"}, ONE | {"MUSTER_TEST_AES": "1"}) as (
        receiver,
        sender,
    ):
        handle = receiver.listen()
        receiver.tell("accept 0 40")
        with Relay(handle, Counted(0, lambda hello: hello[:50] + b"\0" + hello[51:]), (HELLO,)) as relay:
            assert sender.ask(f"connect {relay.handle} 40").startswith("error 6")
        answered = Counted(0, lambda answer: answer[:64] + b"\2" + answer[65:])
        with Relay(handle, edit_back=answered, back_sizes=(ANSWER,)) as relay:
            assert sender.ask(f"connect {relay.handle} 40").startswith("error 6")
        assert receiver.hear().startswith("error 6")


def test_a_recorded_connection_cannot_be_replayed(driver: Path) -> None:
    """Neither to its own listener, nor to one of the next generation, whose member still gets in."""
    with ranks(driver, {}, ONE) as (receiver, sender):
        handle = receiver.listen()
        with Relay(handle) as relay:
            meet(receiver, sender, relay.handle)
            assert move(receiver, sender, 3000, count=3) == BOTH_OK
            recorded = relay.seen[0]
        for rank in (receiver, sender):
            assert rank.ask(f"secret 2 {OTHER_SECRET}") == "0"
        later = receiver.listen()
        for port in (port_of(handle), port_of(later)):
            receiver.tell(f"accept {int(port == port_of(later))} 0.5")
            with socket.create_connection(("127.0.0.1", port)) as replay:
                replay.sendall(recorded[: HELLO + FINISH])
                assert receiver.hear() == "nobody"
        meet(receiver, sender, later, listener=1)
        assert move(receiver, sender, 3000, number=1) == BOTH_OK


def test_a_recorded_hello_is_answered_at_its_own_listener_and_comes_no_further(driver: Path) -> None:
    with ranks(driver, {}, ONE) as (receiver, sender):
        handle = receiver.listen()
        with Relay(handle, Counted(0, lambda hello: b""), (HELLO,)) as relay:  # kept from the listener
            sender.tell(f"connect {relay.handle} 3")
            assert sender.hear() == "nobody"
            hello = relay.seen[0][:HELLO]
        with socket.create_connection(("127.0.0.1", port_of(handle))) as replay:
            replay.sendall(hello)
            receiver.tell("accept 0 5")
            assert len(replay.recv(ANSWER, socket.MSG_WAITALL)) == ANSWER
            replay.sendall(bytes(FINISH))
            assert replay.recv(1) == b""
        assert receiver.hear() == "nobody"


# ---------------------------------------------------------------- anything at all


@pytest.fixture(scope="module")
def open_listener(driver: Path) -> tuple[Rank, Rank, str]:
    """A listener and one who may come in, for many strangers."""
    receiver, sender = Rank(driver), Rank(driver, MS_NCCL_CONNECTIONS="1")
    for rank in (receiver, sender):
        assert rank.ask("init") == "ok"
    return receiver, sender, receiver.listen()


@given(data=st.binary(min_size=0, max_size=400), seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_whatever_a_stranger_sends_he_gets_nothing(
    open_listener: tuple[Rank, Rank, str], data: bytes, seed: int
) -> None:
    receiver, _, handle = open_listener
    draw = random.Random(seed)
    genuine = bytes.fromhex(handle)
    begun = bytearray(b"MSNCCLH1" + genuine[8:32] + draw.randbytes(16) + bytes([0, 1, 1]) + bytes(5))
    begun += draw.randbytes(96)
    hello = (
        data if draw.random() < 0.4 else bytes(begun)[: draw.choice([HELLO, draw.randrange(HELLO)])] + data
    )
    with socket.create_connection(("127.0.0.1", port_of(handle))) as stranger:
        stranger.sendall(hello)
        if draw.random() < 0.5:
            stranger.shutdown(socket.SHUT_WR)
        assert receiver.ask("accept 0 0.005") == "nobody"
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            assert stranger.recv(1) == b""


def test_after_them_the_right_one_still_comes_in(open_listener: tuple[Rank, Rank, str]) -> None:
    receiver, sender, handle = open_listener
    meet(receiver, sender, handle)
    assert move(receiver, sender, 5000, count=3) == BOTH_OK
    for rank in (receiver, sender):
        rank.end()
        for pipe in (rank.process.stdin, rank.process.stdout, rank.process.stderr):
            assert pipe is not None
            pipe.close()
