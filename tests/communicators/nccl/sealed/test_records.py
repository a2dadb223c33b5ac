"""Who stands between two ranks and changes what they send is refused with a reason, and nobody hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.communicators.nccl.sealed.kit import BOTH_OK, Rank, meet, move, ranks
from tests.communicators.nccl.sealed.relay import (
    ANSWER,
    FINISH,
    HEADER,
    HELLO,
    Counted,
    Edit,
    Relay,
    flip,
    record,
)

ONE = {"MS_NCCL_CONNECTIONS": "1"}
SIZE = 1000
RECORD = record(SIZE)
SIZES = (HELLO, FINISH, *[RECORD] * 5)  # then, in order, the record that closes
FIRST = 2  # the first record's place among these


def refused(answer: str) -> bool:
    """Whether a message that was altered ended with the reason."""
    return answer.startswith("error 6 NCCL's encrypted connection with 127.0.0.1:") and (
        "altered on the way" in answer
    )


def receive_five(receiver: Rank, sender: Rank, handle: str, turn: int = 0) -> str:
    """Sends five messages by way of a relay; the receiver's answer, which compares every byte."""
    meet(receiver, sender, handle, turn)
    receiver.tell(f"move {turn} {SIZE} 0 5 5 0 1")
    sender.tell(f"move {turn} {SIZE} 0 5 5 0 1")
    sender.hear()
    return receiver.hear()


PATTERN = b"gradient that nobody else reads."


def pattern_on_the_wire(driver: Path) -> bool:
    """Sends messages full of one pattern through a relay, and looks for it there."""
    with ranks(driver, {}, {}) as (receiver, sender):
        meet(receiver, sender)
        assert move(receiver, sender, 1 << 20, step=999, count=20, flight=5) == BOTH_OK
    with ranks(driver, {}, {}) as (receiver, sender), Relay(receiver.listen()) as relay:
        meet(receiver, sender, relay.handle)
        for size in (32, 1000, 300_000):
            assert receiver.ask(f"post 0 {size} 1 0") == sender.ask(f"post 0 {size} 1 0") == "posted 1"
        assert receiver.ask("wait 60") == sender.ask("wait 60") == "done 3"
        assert sender.ask("close 0") == receiver.ask("close 0") == "ok"
        assert receiver.ask("reason") == sender.ask("reason") == ""
        assert sum(map(len, relay.seen)) > 300_000
        return any(PATTERN in stream or PATTERN[:24] in stream for stream in relay.seen)


def test_a_relay_that_changes_nothing_is_not_noticed_and_reads_nothing(driver: Path) -> None:
    assert not pattern_on_the_wire(driver)


@pytest.mark.system
def test_what_is_not_sealed_is_read_there(plain_driver: Path) -> None:
    """So that what looks for the pattern is seen to find it."""
    assert pattern_on_the_wire(plain_driver)


@pytest.mark.parametrize("number", [0, 4])
def test_a_flipped_bit_anywhere_in_a_record_is_refused(driver: Path, number: int) -> None:
    places = (0, 8, 12, 23, 24, HEADER - 1, HEADER, HEADER + 500, RECORD - 16, RECORD - 1)
    with ranks(driver, {}, ONE) as (receiver, sender):
        for turn, at in enumerate(places):
            with Relay(receiver.listen(), Counted(FIRST + number, flip(at)), SIZES) as relay:
                assert refused(receive_five(receiver, sender, relay.handle, turn)), at


def _swapped(number: int, piece: bytes, seen: dict[str, bytes]) -> bytes:
    seen["count"] = seen.get("count", b"") + b"."
    count = len(seen["count"]) - 1
    if count == FIRST:
        seen["held"] = piece
        return b""
    return piece + seen["held"] if count == FIRST + 1 else piece


ALTERATIONS: dict[str, Callable[[bytes], bytes | None]] = {
    "dropped": lambda piece: b"",
    "repeated": lambda piece: piece + piece,
    "without its body": lambda piece: piece[:HEADER],
    "with a byte more": lambda piece: piece + b"\0",
}


def test_a_record_that_is_not_as_it_was_sent_is_refused(driver: Path) -> None:
    with ranks(driver, {}, ONE) as (receiver, sender):
        for turn, (name, change) in enumerate(ALTERATIONS.items()):
            with Relay(receiver.listen(), Counted(FIRST + 1, change), SIZES) as relay:
                assert refused(receive_five(receiver, sender, relay.handle, turn)), name


def test_records_in_another_order_are_refused(driver: Path) -> None:
    seen: dict[str, bytes] = {}
    with (
        ranks(driver, {}, ONE) as (receiver, sender),
        Relay(receiver.listen(), lambda number, piece: _swapped(number, piece, seen), SIZES) as relay,
    ):
        assert refused(receive_five(receiver, sender, relay.handle))


def test_records_of_another_connection_are_refused(driver: Path) -> None:
    """Both connections carry a record of the same size; each gets the other's."""
    held: dict[int, bytes] = {}
    counts: dict[int, int] = {}

    def cross(number: int, piece: bytes) -> bytes:
        count = counts[number] = counts.get(number, -1) + 1
        if count != FIRST:
            return piece
        held[number] = piece
        other = held.get(1 - number)
        return other if other is not None else b""

    with (
        ranks(driver, {}, {"MS_NCCL_CONNECTIONS": "2"}) as (receiver, sender),
        Relay(receiver.listen(), cross, SIZES) as relay,
    ):
        assert refused(receive_five(receiver, sender, relay.handle))
        assert set(held) == {0, 1}


def test_a_stream_that_is_cut_is_no_orderly_end(driver: Path) -> None:
    """Also between two records: without the sealed record that closes it is an error."""
    with ranks(driver, {}, ONE) as (receiver, sender):
        for turn, left in enumerate((0, 1, HEADER, HEADER + 7, RECORD - 1)):
            with Relay(receiver.listen(), _cut_to(left), SIZES) as relay:
                answer = receive_five(receiver, sender, relay.handle, turn)
                assert answer.startswith("error 6"), answer
                assert "it was cut, or the peer's process died" in answer or refused(answer)


def _cut_to(left: int) -> Edit:
    """Passes the first record and this much of the second, and then cuts."""
    cut: list[int] = []

    def edit(number: int, piece: bytes) -> bytes | None:
        count = len(cut)
        cut.append(1)
        if count == FIRST + 1:
            return piece[:left]
        return None if count > FIRST + 1 else piece

    return edit


def test_an_end_that_was_only_claimed_is_an_error(driver: Path) -> None:
    """All five messages arrive; then the stream ends, without its last record."""
    edit = Counted(FIRST + 5, lambda piece: None)
    with ranks(driver, {}, ONE) as (receiver, sender), Relay(receiver.listen(), edit, SIZES) as relay:
        assert receive_five(receiver, sender, relay.handle) == "ok"
        assert sender.ask("close 0") == "ok"
        reason = receiver.reason()
        assert "without the sealed record that closes it" in reason


def test_what_comes_back_to_a_sender_is_sealed_too(driver: Path) -> None:
    edit = Counted(1, flip(9))  # after the answer comes nothing but the receiver's close
    with (
        ranks(driver, {}, ONE) as (receiver, sender),
        Relay(receiver.listen(), edit_back=edit, back_sizes=(ANSWER,)) as relay,
    ):
        assert receive_five(receiver, sender, relay.handle) == "ok"
        assert receiver.ask("close 0") == "ok"
        reason = sender.reason()
        assert "altered on the way" in reason


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("aes", ["11", "10", "01"])
def test_both_ciphers_carry_messages_past_many_changes_of_keys(driver: Path, aes: str) -> None:
    """AES where both processors have it, else ChaCha20-Poly1305; a new key each three records."""
    low = {"MUSTER_TEST_RECORDS_PER_KEY": "3", "MS_NCCL_CONNECTIONS": "2"}
    with ranks(driver, low | {"MUSTER_TEST_AES": aes[0]}, low | {"MUSTER_TEST_AES": aes[1]}) as (
        receiver,
        sender,
    ):
        meet(receiver, sender)
        assert move(receiver, sender, 100_000, step=3, count=30) == BOTH_OK
        assert move(receiver, sender, 10, count=50) == BOTH_OK
        assert sender.ask("close 0") == receiver.ask("close 0") == "ok"
        assert sender.ask("reason") == receiver.ask("reason") == ""


def test_sides_that_change_keys_at_different_records_do_not_understand_each_other(driver: Path) -> None:
    """So a key is changed where it is said to be."""
    low = {"MUSTER_TEST_RECORDS_PER_KEY": "3", "MS_NCCL_CONNECTIONS": "1"}
    with ranks(driver, low, low | {"MUSTER_TEST_RECORDS_PER_KEY": "4"}) as (receiver, sender):
        meet(receiver, sender)
        assert move(receiver, sender, 10, count=3) == BOTH_OK
        receiver.tell("move 0 10 0 1 1 0 1")
        sender.tell("move 0 10 0 1 1 0 1")
        assert refused(receiver.hear())


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", [0, 1])
def test_a_flipped_bit_anywhere_in_a_short_conversation_is_refused(driver: Path, way: int) -> None:
    """Every seventh byte, from the first of the handshake to the last record, both ways."""
    last = (HELLO + FINISH + 2 * record(20)) if way == 0 else ANSWER
    for at in range(0, last, 7):
        edits = [None, None]
        edits[way] = _flip_at(at)  # type: ignore[call-overload]
        with (
            ranks(driver, ONE | {"MS_NCCL_ACCEPT_TIMEOUT": "1"}, ONE) as (
                receiver,
                sender,
            ),
            Relay(receiver.listen(), edits[0], edit_back=edits[1]) as relay,
        ):
            receiver.tell("accept 0 20")
            answer = sender.ask(f"connect {relay.handle} 20")
            heard = receiver.hear()
            if heard.startswith("communicator"):
                sender.ask("post 0 20 2 1")
                heard = receiver.ask("post 0 20 2 1")
                heard = receiver.ask("wait 60") if heard == "posted 2" else heard
            assert heard.startswith("error 6"), (at, answer, heard)


def _flip_at(at: int) -> Edit:
    """On each connection: who was refused may try again, and is refused again."""
    passed: dict[int, int] = {}

    def edit(number: int, piece: bytes) -> bytes:
        begin = passed.get(number, 0)
        passed[number] = begin + len(piece)
        return flip(at - begin)(piece) if begin <= at < begin + len(piece) else piece

    return edit
