"""What goes wrong in a group of the backend "muster": typed errors, at once, on every rank that is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.processes import Pki

torch = pytest.importorskip("torch")

import torch.distributed as dist

from tests.programs import ranks
from tests.waiting import wait_for

FAR_S = 100.0
"""Far below a group's own timeout, of 300 s."""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def outcome(call: Callable[[], Any]) -> tuple[str, str, float]:
    """The name of the error's type, its text, and the seconds that it took; empty: none."""
    begin = time.monotonic()
    try:
        call()
    except RuntimeError as error:  # as those who call Gloo catch
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def collectives(n: int) -> dict[str, Callable[[Any], Any]]:
    """Each collective as a function of its group, on few and on many bytes."""

    def some(count: int) -> Any:
        return torch.ones(count)

    big = 1 << 20
    return {
        "all_reduce": lambda g: dist.all_reduce(some(4), group=g),
        "all_reduce, large": lambda g: dist.all_reduce(some(big), group=g),
        "all_reduce, async": lambda g: dist.all_reduce(some(4), group=g, async_op=True).wait(),
        "reduce": lambda g: dist.reduce(some(4), dst=0, group=g),
        "broadcast": lambda g: dist.broadcast(some(big), src=0, group=g),
        "all_gather": lambda g: dist.all_gather([some(4) for _ in range(n)], some(4), group=g),
        "all_gather_single": lambda g: g.all_gather_single(some(big * n), some(big)).wait(),
        "reduce_scatter_single": lambda g: g.reduce_scatter_single(some(big), some(big * n)).wait(),
        "gather": lambda g: dist.gather(
            some(4), [some(4) for _ in range(n)] if g.rank() == 0 else None, dst=0, group=g
        ),
        "scatter": lambda g: dist.scatter(
            some(4), [some(4) for _ in range(n)] if g.rank() == 0 else None, src=0, group=g
        ),
        "all_to_all_single": lambda g: dist.all_to_all_single(some(4 * n), some(4 * n), group=g),
        "barrier": lambda g: dist.barrier(group=g),
        "objects": lambda g: dist.all_gather_object([None] * n, {"a": 1}, group=g),
        "recv": lambda g: dist.recv(some(4), src=n - 1, group=g),
        "recv of anybody": lambda g: dist.recv(some(4), group=g),
        "send": lambda g: dist.send(some(big), dst=n - 1, group=g),
        "monitored_barrier": lambda g: g.monitored_barrier(timedelta(seconds=50)),
    }


def dies_during_each(rank: int, size: int) -> dict[str, tuple[str, str, float]]:
    calls = collectives(size)
    groups = {name: dist.new_group(list(range(size)), backend="muster") for name in calls}
    dist.barrier()
    if rank == size - 1:
        time.sleep(1.0)  # so the others are in their first call; one that is late fails at its beginning
        os.kill(os.getpid(), signal.SIGKILL)
    return {name: outcome(lambda call=call, name=name: call(groups[name])) for name, call in calls.items()}  # type: ignore[misc]


def test_a_peer_that_dies_ends_every_call_at_once(pki: Pki, tmp_path: Path) -> None:
    found = ranks.finish(ranks.start(3, pki, tmp_path, dies_during_each, 3))
    assert found[2] is None
    for told in found[:2]:
        assert isinstance(told, dict), getattr(told, "text", told)
        for name, (kind, text, seconds) in told.items():
            expected = ("CollectiveTimeoutError",) if name == "monitored_barrier" else ("PeerLostError",)
            assert kind in expected, (name, kind, text)
            assert "rank 2 (node n2" in text or "node n2" in text or "rank" in text, (name, text)
            assert seconds < FAR_S, (name, seconds)


MISMATCHES: dict[str, Callable[[int, Any], Any]] = {
    "shape of all_reduce": lambda r, g: dist.all_reduce(torch.ones(4 + r), group=g),
    "large shape": lambda r, g: dist.all_reduce(torch.ones((1 << 18) + r), group=g),
    "dtype": lambda r, g: dist.all_reduce(torch.ones(4, dtype=torch.int32 if r else torch.float32), group=g),
    "operation": lambda r, g: dist.all_reduce(
        torch.ones(4), dist.ReduceOp.MAX if r else dist.ReduceOp.MIN, g
    ),
    "collective": lambda r, g: dist.barrier(group=g) if r else dist.all_reduce(torch.ones(4), group=g),
    "root": lambda r, g: dist.broadcast(torch.ones(4), src=r, group=g),
    "split sizes": lambda r, g: dist.all_to_all_single(
        torch.ones(3), torch.ones(4), [1, 2], [1, 3] if r else [2, 2], group=g
    ),
    "size of a message": lambda r, g: (
        dist.send(torch.ones(5), dst=0, group=g) if r else dist.recv(torch.ones(4), src=1, group=g)
    ),
    "size of a large message": lambda r, g: (
        dist.send(torch.ones(1 << 20), dst=0, group=g)
        if r
        else dist.recv(torch.ones(1 << 19), src=1, group=g)
    ),
    "dtype of a message": lambda r, g: (
        dist.send(torch.ones(4), dst=0, group=g)
        if r
        else dist.recv(torch.ones(4, dtype=torch.int32), src=1, group=g)
    ),
}


def disagree(rank: int) -> dict[str, tuple[str, str, float]]:
    found = {}
    for name, call in MISMATCHES.items():
        group = dist.new_group([0, 1], backend="muster")
        found[name] = outcome(lambda call=call, group=group: call(rank, group))  # type: ignore[misc]
        if "message" not in name:  # and what is called on the group later says why it cannot be
            again = outcome(lambda group=group: dist.barrier(group=group))  # type: ignore[misc]
            assert again[0] == "CollectiveMismatchError", (name, again)
    total = torch.ones(1)
    dist.all_reduce(total)  # other groups go on
    assert total.item() == 2
    return found


def test_ranks_that_disagree_learn_it_on_both_sides(pki: Pki, tmp_path: Path) -> None:
    for told in ranks.run(2, pki, tmp_path, disagree):
        wrong = {name: said for name, said in told.items() if said[0] != "CollectiveMismatchError"}
        assert not wrong
        assert all(seconds < FAR_S for _, _, seconds in told.values())
        assert "rank 0 (node n0" in told["root"][1] and "rank 1 (node n1" in told["root"][1]


LOCAL: dict[str, Callable[[Any], Any]] = {
    "mean of whole numbers": lambda g: dist.all_reduce(
        torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG, g
    ),
    "bits of floats": lambda g: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, g),
    "too few outputs": lambda g: g.allgather([[torch.ones(2)]], [torch.ones(2)]).wait(),
    "other dtype": lambda g: g.all_gather_single(torch.ones(4), torch.ones(2, dtype=torch.int32)).wait(),
    "other size": lambda g: g.all_gather_single(torch.ones(5), torch.ones(2)).wait(),
    "rows": lambda g: g.all_to_all_single(torch.ones(4), torch.ones(4), [1, 2], [2, 2]).wait(),
    "uneven rows": lambda g: g.all_to_all_single(torch.ones(3), torch.ones(3), [], []).wait(),
    "to itself": lambda g: g.send([torch.ones(1)], g.rank(), 0),
    "no rank": lambda g: g.recv([torch.ones(1)], 7, 0),
    "sparse": lambda g: g.broadcast([torch.ones(2).to_sparse()]).wait(),
}


def mistakes(rank: int) -> dict[str, tuple[str, str, float]]:
    """What is refused before anything is sent, so the group can be used after it."""
    world: Any = dist.group.WORLD
    found = {name: outcome(lambda call=call: call(world)) for name, call in LOCAL.items()}  # type: ignore[misc]
    mean = torch.tensor([float(rank)])
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.item() == 0.5
    truth = torch.tensor([rank == 1])
    dist.all_reduce(truth)  # any of them
    assert truth.item() is True
    dist.destroy_process_group()
    if torch.__version__ >= (2, 6):  # before it torch ends no group of Python's
        kind, text, _ = outcome(lambda: world.barrier().wait())
        assert kind == "CommunicatorAbortedError", text
    return found


def test_what_cannot_be_sent_is_refused_and_the_group_lives_on(pki: Pki, tmp_path: Path) -> None:
    for told in ranks.run(2, pki, tmp_path, mistakes):
        assert not {name: said for name, said in told.items() if said[0] != "ArrayError"}


def infers(rank: int) -> list[float]:
    """Takes tensors of inference mode, no dense rows of memory, which a thread outside of that mode fills."""
    with torch.inference_mode():
        total, parts, taken = (
            torch.ones(2, 6)[:, ::2],
            [torch.zeros(3), torch.zeros(3)],
            torch.ones(2, 6)[:, ::2],
        )
        dist.all_reduce(total, async_op=True).wait()
        dist.all_gather(parts, torch.ones(3), async_op=True).wait()
        if rank == 0:
            dist.send(total, 1)
            dist.send(total, 1)
            return [12, 3, 12]
        dist.recv(taken, 0)
    nowhere = torch.zeros(1).expand(2, 3)  # six elements in the memory of one
    kind, text, _ = outcome(lambda: dist.recv(nowhere, 0))
    assert kind == "RuntimeError" and "memory" in text, (kind, text)
    return [float(each.sum()) for each in (total, parts[1], taken)]


def test_what_is_received_is_written_where_the_caller_may_or_it_is_told_why_not(
    pki: Pki, tmp_path: Path
) -> None:
    assert ranks.run(2, pki, tmp_path, infers) == [[12, 3, 12]] * 2


def stays_away(rank: int, folder: Path) -> Any:
    world: Any = dist.group.WORLD
    dist.barrier()  # so that the two that come come at about the same time
    if rank == 1:
        wait_for(lambda: len(list(folder.glob("gave up*"))) == 2)
        return None
    # The other one waits for what rank 0 says at the end of its time, however late the machine lets it.
    patience = timedelta(seconds=5 if rank == 0 else FAR_S)
    said = outcome(lambda: world.monitored_barrier(patience, wait_all_ranks=True))
    (folder / f"gave up {rank}").touch()
    return said


def test_a_monitored_barrier_names_who_did_not_come(pki: Pki, tmp_path: Path) -> None:
    first, _, third = ranks.run(3, pki, tmp_path, stays_away, tmp_path)
    for kind, text, _ in (first, third):
        assert kind == "CollectiveTimeoutError" and "rank 1 (node n1" in text and "rank 2" not in text, text


def stands_still(rank: int) -> tuple[str, float]:
    """Rank 1, which connects to rank 0, gives one message up while that one stands still, and calls again."""
    pids, taken = [torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.zeros(1)
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if rank == 0:
        dist.barrier()
        dist.send(torch.ones(1), 1)
        return "CollectiveTimeoutError", 1.0
    world: Any = dist.group.WORLD
    os.kill(int(pids[0]), signal.SIGSTOP)
    world.set_timeout(timedelta(seconds=1))
    kind, _, _ = outcome(lambda: dist.recv(taken, 0))
    world.set_timeout(timedelta(seconds=FAR_S))
    os.kill(int(pids[0]), signal.SIGCONT)
    dist.barrier()
    dist.recv(taken, 0)
    return kind, taken.item()


def test_after_a_message_that_was_given_up_the_next_one_connects(pki: Pki, tmp_path: Path) -> None:
    expected = ("CollectiveTimeoutError", 1.0)
    assert ranks.run(2, pki, tmp_path, stands_still) == [expected] * 2


def alike(rank: int) -> list[float]:
    """Groups of the same ranks: what goes through one arrives in that one, also once another is gone."""
    world: Any = dist.group.WORLD
    first, second, third = (dist.new_group([0, 1], backend="muster") for _ in range(3))
    found = []
    for number, group in enumerate((third, first, world, second)):
        sent = torch.full((1,), float(number))
        if rank == 0:
            dist.send(sent, dst=1, group=group)
        else:
            dist.recv(sent.zero_(), src=0, group=group)
        found.append(sent.item())
        if group is third:
            dist.destroy_process_group(group)
    return found


def test_groups_of_the_same_ranks_are_apart(pki: Pki, tmp_path: Path) -> None:
    assert ranks.run(2, pki, tmp_path, alike, timeout_s=60) == [[0.0, 1.0, 2.0, 3.0]] * 2


def strangers(rank: int) -> str:
    return "in"


def test_who_does_not_know_the_unique_id_is_kept_out(pki: Pki, tmp_path: Path) -> None:
    """The ports stand in a store that others may read; that alone lets nobody in."""
    first = ranks.start(2, pki, tmp_path, strangers, unique_ids=(b"a" * 128, b"b" * 128), timeout_s=15)
    found = ranks.finish(first)
    assert all("SecurityError" in each.text or "FormationTimeoutError" in each.text for each in found)
    assert any("does not know the unique id" in each.text for each in found)
