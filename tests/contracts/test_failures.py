"""What happens when ranks disagree, hang, die, abort or close: never a hang, always words."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.errors import CommunicatorError
from tests.contracts import bodies
from tests.contracts.agents import Agents, Failure, Place
from tests.contracts.kits import Kit
from tests.waiting import wait_for


@pytest.fixture
def strict(backend: Kit) -> Kit:
    """Backends that detect calls that disagree."""
    if not backend.tells_mismatch:
        pytest.skip(f"{backend.name} cannot tell")
    return backend


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    ("usual", "odd", "words"),
    [
        ("sum10", "sum11", "11 elements"),
        ("sum10", "big", "100000 elements"),
        ("big", "sum10", "10 elements"),
        ("sum10", "max10", "all_reduce(max"),
        ("sum10", "double", "float64"),
        ("broadcast0", "broadcast1", "root 1"),
        ("sum10", "barrier", "barrier()"),
        ("sum10", "recv0", "recv("),
        ("big", "send0", "send("),
    ],
)
def test_calls_that_disagree_fail_on_every_rank(
    agents: Agents, strict: Kit, world: int, usual: str, odd: str, words: str
) -> None:
    plan = [(usual,)] * (world - 1) + [(odd,)]
    shown = agents.fresh(strict.name, world, bodies.caught, per_rank=plan, may_fail=True)
    for result in shown:
        # A rank may hear of it while it still waits for the last round of the connection itself.
        kind, text = (result.kind, result.text) if isinstance(result, Failure) else result
        assert kind == "CollectiveMismatchError", text
        assert words in text
        assert f"rank {world - 1} (node node-{world - 1}" in text


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("send1", "send0", "send(float32, 10 elements, to rank 0)"),
        ("recv1", "recv0", "recv(float32, 10 elements, from rank 0)"),
        ("send1", "recv0 of 11", "recv(float32, 11 elements, from rank 0)"),
        ("send1", "recv0 of doubles", "recv(float64, 10 elements, from rank 0)"),
        ("send1 of much", "recv0", "recv(float32, 10 elements, from rank 0)"),
        ("recv1", "send0 of much", "send(float32, 100000 elements, to rank 0)"),
    ],
)
def test_a_pair_that_disagrees_is_told_on_both_sides(
    agents: Agents, strict: Kit, first: str, second: str, words: str
) -> None:
    shown = agents.fresh(strict.name, 2, bodies.caught, per_rank=[(first,), (second,)])
    for kind, text in shown:
        assert kind == "CollectiveMismatchError", text
        assert words in text


@pytest.mark.parametrize("call", ["sum10", "big"])
def test_a_deadline_names_the_rank_waited_for(agents: Agents, strict: Kit, call: str, tmp_path: Path) -> None:
    plan = [(call, tmp_path), (call, tmp_path), ("hang", tmp_path)]
    shown = agents.fresh(strict.name, 3, hang_or_call, per_rank=plan, timeout_s=2.0)
    for kind, text in shown[:2]:
        assert kind == "CollectiveTimeoutError", text
        assert "rank 2 (node node-2" in text


def hang_or_call(place: Place, call: str, over: Path) -> tuple[str, str]:
    if call == "hang":
        wait_for(lambda: len(list(over.iterdir())) == 2)  # the others have run into their deadline
        return "", ""
    said = bodies.caught(place, call)
    (over / str(place.comm.rank)).touch()
    return said


@pytest.mark.parametrize("size", [2, 3], indirect=True)
@pytest.mark.parametrize("elements", [10, 1_000_000])
def test_abort_ends_a_collective_that_hangs(
    agents: Agents, backend: Kit, size: int, elements: int, tmp_path: Path
) -> None:
    hang = bodies.aborted_while_waiting
    results = agents.fresh(backend.name, size, hang, elements, tmp_path / "over", may_fail=True)
    first = results[0]
    assert not isinstance(first, Failure), first.trace
    assert "node-1 left" in first[1]
    assert "node-1 left" in first[2]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("call", ["sum10", "big"])
def test_who_has_finished_is_named_where_it_is_still_needed(
    agents: Agents, strict: Kit, world: int, call: str
) -> None:
    """It had fewer batches, say."""
    plan = [(call,)] * (world - 1) + [("finish",)]
    shown = agents.fresh(strict.name, world, finish_or_call, per_rank=plan)
    said = [(kind, text) for kind, text in shown[:-1] if kind == "PeerFinishedError"]
    # Of several, one may hear of it from another.
    assert said and all(kind in ("PeerFinishedError", "PeerLostError") for kind, _ in shown[:-1])
    for text in (text for _, text in shown[:-1]):
        assert f"rank {world - 1} (node node-{world - 1} on localhost) has finished, while this rank" in text


def finish_or_call(place: Place, call: str) -> tuple[str, str]:
    try:
        place.comm.barrier()
    except CommunicatorError as error:  # another rank has left the barrier and heard of it already
        return type(error).__name__, str(error)
    if call != "finish":
        return bodies.caught(place, call)
    place.comm.finished = True
    place.comm.close()
    return "", ""


def test_a_closed_communicator_says_so(agents: Agents, backend: Kit) -> None:
    size = min(2, backend.max_world_size)
    assert agents.fresh(backend.name, size, bodies.use_after_close) == ["CommunicatorAbortedError"] * size
