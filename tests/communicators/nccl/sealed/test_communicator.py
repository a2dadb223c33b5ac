"""Messages between two processes that call the plug-in as NCCL does, and each way to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.communicators.nccl.sealed import kit
from tests.communicators.nccl.sealed.kit import BOTH_OK, meet, move, ranks


def test_messages_of_every_size_arrive_as_they_were_sent(driver: Path) -> None:
    with ranks(driver, {}, {}) as (receiver, sender):
        meet(receiver, sender)
        assert move(receiver, sender, 0, count=40) == BOTH_OK
        assert move(receiver, sender, 0, step=1, count=100, room=9) == BOTH_OK
        for edge in (4096, 16384, 65536, 262144, 4 * 262144 + 64):
            assert move(receiver, sender, edge - 2, step=1, count=5, flight=3, room=1) == BOTH_OK
        assert move(receiver, sender, 8 << 20, count=3, flight=2, room=100) == BOTH_OK
        assert receiver.ask("reason") == sender.ask("reason") == ""


def test_thirty_two_requests_are_in_flight_and_one_more_waits(driver: Path) -> None:
    with ranks(driver, {}, {}) as (receiver, sender):
        meet(receiver, sender)
        assert receiver.ask("post 0 1000 40 5") == "posted 32"
        assert sender.ask("post 0 1000 40 5") == "posted 32"
        assert receiver.ask("wait 60") == "done 32"
        assert sender.ask("wait 60") == "done 32"
        assert move(receiver, sender, 50000, step=301, count=200) == BOTH_OK


@pytest.mark.parametrize("connections", ["1", "16"])
def test_the_side_that_connects_decides_how_many_connections_there_are(
    driver: Path, connections: str
) -> None:
    with ranks(driver, {}, {"MS_NCCL_CONNECTIONS": connections}) as (receiver, sender):
        meet(receiver, sender)
        before = receiver.descriptors()
        meet(receiver, sender, listener=1)
        assert receiver.descriptors() - before == int(connections) + 1  # and the listener
        assert move(receiver, sender, 1 << 20, step=13, count=6, number=1) == BOTH_OK


def test_a_message_that_is_too_large_ends_both_with_the_reason(driver: Path) -> None:
    with ranks(driver, {}, {}) as (receiver, sender):
        meet(receiver, sender)
        assert receiver.ask("post 0 100 1 1") == "posted 1"
        assert sender.ask("post 0 200 1 1") == "posted 1"
        answer = receiver.ask("wait 60")
        assert answer.startswith("error 5 NCCL's encrypted connection with 127.0.0.1:"), answer
        assert "200 bytes where this rank receives at most 100; let all ranks call the same" in answer


def test_many_communicators_share_a_bounded_number_of_threads(driver: Path) -> None:
    with ranks(driver, {}, {}) as (receiver, sender):
        for number in range(24):
            meet(receiver, sender, listener=number)
        for number in range(0, 24, 5):
            assert move(receiver, sender, 300000, count=8, number=number) == BOTH_OK
        for rank in (receiver, sender):
            assert rank.threads() <= kit.MAX_THREADS + 1  # the sanitizer has one


def test_helper_threads_block_every_signal(driver: Path) -> None:
    with ranks(driver, {}, {}) as (receiver, sender):
        meet(receiver, sender)
        tasks = Path(f"/proc/{receiver.process.pid}/task")
        helpers = [path for path in tasks.iterdir() if (path / "comm").read_text().strip() == "muster-nccl"]
        assert len(helpers) >= 4
        for helper in helpers:
            lines = dict(line.split(":\t", 1) for line in (helper / "status").read_text().splitlines())
            blocked = int(lines["SigBlk"], 16)
            for signal in range(1, 32):
                assert signal in (9, 19) or blocked & 1 << (signal - 1), signal


# ---------------------------------------------------------------- ends

CLOSES = ((0, 1), (1000, 1), (200_000, 1), (4 << 20, 1), (0, 32), (1000, 32), (200_000, 32))


@pytest.mark.parametrize("first", ["receiver", "sender"])
def test_an_orderly_close_is_no_failure(driver: Path, first: str) -> None:
    with ranks(driver, {}, {}) as (receiver, sender):
        meet(receiver, sender)
        assert move(receiver, sender, 100000, count=10) == BOTH_OK
        order = (receiver, sender) if first == "receiver" else (sender, receiver)
        for rank in order:
            assert rank.ask("close 0") == "ok"
        assert receiver.ask("reason") == sender.ask("reason") == ""


def test_what_was_sent_before_an_orderly_close_arrives_all_of_it(driver: Path) -> None:
    """The sender is done, and its communicator closed, before the receiver has asked for anything."""
    with ranks(driver, {}, {}) as (receiver, sender):
        meet(receiver, sender)
        assert sender.ask("post 0 20000 8 5") == "posted 8"
        assert sender.ask("wait 60") == "done 8"
        assert sender.ask("close 0") == "ok"
        assert receiver.ask("move 0 20000 0 8 8 0 5") == "ok"
        answer = receiver.ask("move 0 20000 0 1 1 0 5")
        assert answer.startswith("error 6"), answer
        assert "has closed it while data were still to come" in answer


@pytest.mark.system
def test_an_empty_message_before_an_orderly_close_arrives_also_without_ciphers(plain_driver: Path) -> None:
    with ranks(plain_driver, {}, {"MS_NCCL_CONNECTIONS": "1"}) as (receiver, sender):
        meet(receiver, sender)
        assert sender.ask("post 0 0 1 5") == "posted 1"
        assert sender.ask("wait 60") == "done 1"
        assert sender.ask("close 0") == "ok"
        assert receiver.ask("move 0 0 0 1 1 0 5") == "ok"


def test_a_send_after_the_receiver_has_closed_fails(driver: Path) -> None:
    with ranks(driver, {}, {}) as (receiver, sender):
        meet(receiver, sender)
        assert receiver.ask("close 0") == "ok"
        answer = ""
        while not answer.startswith("error"):
            answer = sender.ask("post 0 100000 1 1")
            answer = sender.ask("wait 5") if answer == "posted 1" else answer
        assert answer.startswith("error 6"), answer
        assert "has closed it while data were still to go" in answer


@pytest.mark.parametrize("who", ["receiver", "sender"])
def test_a_close_during_messages_ends_the_other_side_with_a_reason(driver: Path, who: str) -> None:
    with ranks(driver, {}, {}) as (receiver, sender):
        leaves, stays = (receiver, sender) if who == "receiver" else (sender, receiver)
        for turn, (size, begun) in enumerate(CLOSES):
            meet(receiver, sender, listener=turn)
            for rank in (receiver, sender):
                assert rank.ask(f"post {turn} {size} {begun} 3").startswith("posted")
            assert leaves.ask(f"close {turn}") == "ok"
            answer = stays.ask("wait 60")
            assert answer.startswith(("done", "error 6 NCCL's encrypted connection with 127.0.0.1:")), answer
            while answer.startswith("done"):  # all had arrived: then the next one fails
                answer = stays.ask(f"post {turn} 1000 1 3")
                answer = stays.ask("wait 60") if answer == "posted 1" else answer
            assert answer.startswith("error 6"), answer
            for rank in (leaves, stays):
                assert rank.ask("abandon") == "ok"
            assert stays.ask(f"close {turn}") == "ok"


@pytest.mark.parametrize("who", ["receiver", "sender"])
def test_an_idle_side_notices_that_its_peer_was_killed(driver: Path, who: str) -> None:
    """Nobody sends or asks for anything: the socket's own end tells."""
    with ranks(driver, {}, {}) as (receiver, sender):
        meet(receiver, sender)
        assert move(receiver, sender, 5000, count=3) == BOTH_OK
        dies, stays = (receiver, sender) if who == "receiver" else (sender, receiver)
        dies.kill()
        reason = stays.reason()
        assert reason.startswith("NCCL's encrypted connection with 127.0.0.1:"), reason
        assert "its process died" in reason.replace("the peer's process", "its process")
        assert stays.ask("forget") == "ok"
        assert stays.ask("reason") == ""
        while (answer := stays.ask("post 0 10 1 1")) == "posted 1":  # it is said before it counts
            assert stays.ask("abandon") == "ok"
        assert answer == f"error 6 {reason}"
        assert stays.ask("post 0 10 1 1").startswith("error 6")
        assert _levels(stays.end(), reason) == ["INFO", "WARN"]


def test_a_peer_that_was_idle_and_left_is_named_in_what_nccl_says_of_the_next_send(driver: Path) -> None:
    with ranks(driver, {}, {}) as (receiver, sender):
        meet(receiver, sender)
        assert receiver.ask("close 0") == "ok"
        while not (answer := sender.ask("post 0 10 1 1")).startswith("error 6"):
            sender.ask("wait 5")
        assert _levels(sender.end(), answer.removeprefix("error 6 "))[-1] == "WARN"


def _levels(log: str, sentence: str) -> list[str]:
    """How loud NCCL's log has this sentence each time: its errors tell the last warning, and no note."""
    return [line.partition(" ")[0] for line in log.splitlines() if sentence in line]
