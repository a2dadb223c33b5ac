"""Messages between two ranks, by tag: beside the collectives and independent of them. No torch is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from muster.communicators.reduce_ops import ReduceOp
from muster.communicators.tcp.messages import SMALL_BYTES, Message, Messages
from muster.communicators.tcp.pending_group import PendingGroup
from muster.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    PeerLostError,
)
from tests.communicators.tcp.world import Office, World, make_world, together
from tests.waiting import LIMIT_S

SMALL, LARGE = 5, 8 * SMALL_BYTES


class Party:
    """The messages of all ranks, and their communicators."""

    def __init__(self, world: World, timeout_s: float = 60.0) -> None:
        self.communicators = world.connect()
        self.messages = [
            Messages(
                membership, backend.endpoint, path="party", timeout_s=timeout_s, others=communicator.links
            )
            for membership, backend, communicator in zip(
                world.memberships, world.backends, self.communicators, strict=True
            )
        ]

    def send(self, sender: int, to: int, data: bytes, tag: int = 0, dtype: str = "uint8") -> Message:
        return self.messages[sender].send(memoryview(data), to, tag, dtype)

    def receive(self, receiver: int, source: int, size: int, tag: int = 0) -> tuple[Message, bytearray]:
        room = bytearray(size)
        return self.messages[receiver].receive(memoryview(room), source, tag, "uint8"), room


@pytest.fixture(params=["tls", "plain"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    office = Office(tmp_path) if request.param == "tls" else None
    made = make_world([office.credentials() if office else None for _ in range(3)])
    yield made
    made.close()


@pytest.fixture
def party(world: World) -> Iterator[Party]:
    made = Party(world)
    yield made
    for each in (*made.messages, *made.communicators):
        each.close()


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_messages_are_taken_by_tag_and_in_order_within_one(party: Party, size: int) -> None:
    sent = [party.send(0, 1, bytes([number]) * size, tag) for number, tag in enumerate((7, 8, 7, 8))]
    taken = []
    for tag in (8, 7, 7, 8):
        message, room = party.receive(1, 0, size, tag)
        assert message.wait(LIMIT_S) and message.error is None
        taken.append(bytes(room))
    assert taken == [bytes([number]) * size for number in (1, 0, 2, 3)]
    assert all(message.wait(LIMIT_S) and message.error is None for message in sent)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_message_of_anybody_says_who_sent_it(party: Party, size: int) -> None:
    message, room = party.receive(1, -1, size)
    party.send(2, 1, b"x" * size)
    assert message.wait(LIMIT_S) and message.error is None
    assert (message.peer, bytes(room)) == (2, b"x" * size)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_send_is_over_when_it_has_been_called_for(party: Party, size: int) -> None:
    first, second = party.send(0, 1, b"x" * size, 1), party.send(0, 1, b"y" * size, 2)
    message, room = party.receive(1, 0, size, 2)
    assert message.wait(LIMIT_S) and second.wait(LIMIT_S)
    assert bytes(room) == b"y" * size
    assert not first.done()
    message, room = party.receive(1, 0, size, 1)
    assert message.wait(LIMIT_S) and first.wait(LIMIT_S)
    assert bytes(room) == b"x" * size


def test_a_receive_that_waits_holds_up_no_collective(party: Party) -> None:
    waiting, room = party.receive(0, 1, SMALL)

    def add(rank: int) -> float:
        numbers = np.ones(100_000, "f4")
        party.communicators[rank].all_reduce(numbers, numbers, ReduceOp.SUM).wait()
        return float(numbers[-1])

    assert together([lambda rank=rank: add(rank) for rank in range(3)]) == [3.0] * 3  # type: ignore[misc]
    assert not waiting.done()
    party.send(1, 0, b"later")
    assert waiting.wait(LIMIT_S) and bytes(room) == b"later"


def test_two_that_disagree_are_told_and_the_others_messages_go_on(party: Party) -> None:
    sent = party.send(0, 1, b"12345")
    message, _ = party.receive(1, 0, 4)
    for each in (sent, message):
        assert each.wait(LIMIT_S)
        assert isinstance(each.error, CollectiveMismatchError)
        assert "rank 0 (node n0 on host) has sent 5 bytes of uint8" in str(each.error)
        assert "rank 1 (node n1 on host) has called for 4 bytes" in str(each.error)
    party.send(0, 1, b"right")
    message, room = party.receive(1, 0, 5)
    assert message.wait(LIMIT_S) and bytes(room) == b"right"


def test_a_peer_that_is_gone_ends_what_waits_for_it_alone(party: Party) -> None:
    """Also one to which there is no connection for messages yet: that of the collectives shows it."""
    of_gone, of_other = party.receive(0, 2, SMALL)[0], party.receive(0, 1, SMALL)[0]
    of_anybody = party.receive(0, -1, SMALL, 5)[0]
    party.messages[2].abort(CommunicatorAbortedError("It is over."))
    party.communicators[2].abort(CommunicatorAbortedError("It is over."))
    for each in (of_gone, of_anybody):
        assert each.wait(LIMIT_S)
        assert isinstance(each.error, PeerLostError)
        assert "rank 2 (node n2 on host) in group 'world' of generation 5" in str(each.error)
    assert not of_other.done()
    party.send(1, 0, b"12345")
    assert of_other.wait(LIMIT_S) and of_other.error is None


def test_who_aborts_without_a_message_of_its_own_lets_nobody_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections for messages are there, though it has never used one."""
    endpoint, groups = world.backends[2].endpoint, []
    gather = endpoint.gather

    def note(group: PendingGroup) -> None:
        groups.append(group)
        gather(group)

    monkeypatch.setattr(endpoint, "gather", note)
    party = Party(world)
    message = party.receive(0, 2, SMALL)[0]
    with groups[-1].changed:
        assert groups[-1].changed.wait_for(lambda: 0 in groups[-1].arrived, LIMIT_S)
    party.messages[2].abort(CommunicatorAbortedError("n1 left"))
    assert message.wait(LIMIT_S)
    assert isinstance(message.error, PeerLostError) and "n1 left" in str(message.error)
    for each in (*party.messages, *party.communicators):
        each.close()


def test_an_abort_ends_all_messages_with_its_reason(party: Party) -> None:
    message = party.receive(0, 1, SMALL)[0]
    party.messages[0].abort(CommunicatorAbortedError("n1 left"))
    assert message.wait(LIMIT_S) and "n1 left" in str(message.error)
    with pytest.raises(CommunicatorAbortedError, match="n1 left"):
        party.send(0, 1, b"more")


def test_a_message_that_nobody_sends_ends_with_its_deadline(world: World) -> None:
    party = Party(world, timeout_s=0.2)
    message = party.receive(0, 1, SMALL, 3)[0]
    assert message.wait(LIMIT_S)
    assert isinstance(message.error, CollectiveTimeoutError)
    assert "recv with tag 3 from rank 1 (node n1 on host) in group 'world'" in str(message.error)
    for each in (*party.messages, *party.communicators):
        each.close()
