"""Which copy all ranks go back to: the latest of which each rank's part is held by somebody."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.torch.peer_copies import PeerCopies, collective_device, newest_whole, partners_on, parts_that_lack
from muster.training.part_copy import PartCopy
from muster.training.snapshots.parts import PartKey, SnapshotId
from tests.torch.worlds import end_rank, end_world


def holds(*steps: tuple[int, int], rank: int, size: int = 3) -> list[list[int]]:
    """Its own parts and those of the rank before it."""
    return [[owner, *step] for step in steps for owner in (rank, (rank - 1) % size)]


def sources(said: Any, active: Any = None, like: Any = ()) -> Any:
    """Key and holders, where all take their own parts."""
    active = range(len(said)) if active is None else active
    found = newest_whole(said, active, like or [str(rank) for rank in range(len(said))])
    if found is None:
        return None
    assert all(owner == rank for rank, (owner, _) in found[1].items())
    return found[0], [holder for _, holder in found[1].values()]


def test_ranks_that_are_missing_need_no_part_and_one_that_comes_takes_a_replica_s() -> None:
    said = [holds((1, 4), rank=0), [], holds((1, 4), rank=2)]
    left = [[each for each in parts if each[0] != 1] for parts in said]
    assert sources(left) is None
    assert sources(left, [0, 2]) == ((1, 4), [0, 2])
    assert newest_whole(left, range(3), ["a", "b", "b"]) == ((1, 4), {0: (0, 0), 1: (2, 2), 2: (2, 2)})
    assert newest_whole(left, range(3), ["a", "b", "a"]) is None
    assert newest_whole(said, range(3), ["a"] * 3) == ((1, 4), {0: (0, 0), 1: (1, 2), 2: (2, 2)})


def test_a_lost_rank_s_part_comes_from_the_rank_after_it() -> None:
    said = [holds((1, 4), rank=0), [], holds((1, 4), rank=2)]
    assert sources(said) == ((1, 4), [0, 2, 2])


def test_two_lost_ranks_beside_each_other_take_a_part_along() -> None:
    assert sources([holds((1, 4), rank=0), [], []]) is None
    assert sources([[], [], []]) is None


def test_with_two_copies_any_two_ranks_may_be_lost_and_else_the_parts_that_lack_are_named() -> None:
    for copies, ranks_apart in ((2, (1, 2, 3)), (1, (2,))):
        table = partners_on([0] * 4, copies)
        assert all(len(mine) == copies for mine in table)
        said = [[[o, 1, 4] for o in range(4) if o == rank or rank in table[o]] for rank in range(4)]
        for apart in ranks_apart:
            left = [[] if rank in (0, apart) else each for rank, each in enumerate(said)]
            if copies == 2:
                assert sources(left) is not None
            else:
                assert sources(left) is None
                assert parts_that_lack(left, range(4)) == (4, [0, 2])
    assert parts_that_lack([[], []], range(2)) is None
    assert parts_that_lack([[[0, 1, 4], [1, 1, 4]], [[1, 2, 2]], []], range(3)) == (4, [2])


def test_a_copy_that_not_all_have_taken_does_not_count() -> None:
    said = [holds((1, 4), (1, 8), rank=0), holds((1, 4), rank=1), holds((1, 4), rank=2)]
    assert sources(said) == ((1, 4), [0, 1, 2])


def test_of_two_generations_the_later_counts() -> None:
    both = [holds((1, 8), (2, 4), rank=rank) for rank in range(3)]
    assert sources(both) == ((2, 4), [0, 1, 2])


def test_partners_are_on_another_host_where_there_is_one() -> None:
    assert partners_on([0, 0, 1, 1]) == ((2,), (3,), (0,), (1,))
    assert all(mine % 2 != rank % 2 for rank, (mine,) in enumerate(partners_on([0, 1, 0, 1])))
    for rank, (mine,) in enumerate(partners_on([0, 0, 0, 1])):
        assert mine == 3 if rank < 3 else mine < 3
    assert partners_on([0, 0]) == ((1,), (0,))
    assert partners_on([0]) == ((),)


def part_of(rank: int, data: Any) -> PartCopy:
    key = PartKey(SnapshotId(0, 0), 4, rank)
    return PartCopy(key, f"head {rank}".encode(), memoryview(data.numpy()))


def _two_hosts(rank: int, path: str) -> None:
    os.environ["GROUP_RANK"] = str(rank // 2)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    sizes = [5 << 20, 0, 5 << 20, 1]  # a rank may have no element of anything
    parts: list[Any] = [torch.full((size,), each, dtype=torch.uint8) for each, size in enumerate(sizes)]
    copies = PeerCopies(rank, 4)
    copies.take((1, 4), part_of(rank, parts[rank]))
    assert copies.holds == sorted([[rank, 1, 4], [(rank + 2) % 4, 1, 4]])
    if rank < 2:  # all of host 0 is lost, and others come in its place
        copies = PeerCopies(rank, 4)
    said: list[Any] = [None] * 4
    torch.distributed.all_gather_object(said, copies.holds)
    assert sources(said) == ((1, 4), [2, 3, 2, 3])
    got = copies.restore((1, 4), {0: (0, 2), 1: (1, 3), 2: (2, 2), 3: (3, 3)})
    assert (got.head, bytes(got.data)) == (f"head {rank}".encode(), parts[rank].numpy().tobytes())
    mine = copies.take((2, 4), got)
    assert mine.key.snapshot == SnapshotId(2, 4) and len(copies.holds) == 2
    if rank == 2:
        mine.data[-1] ^= 1
        assert copies.holds == [[0, 2, 4]]
    torch.distributed.all_gather_object(said, copies.holds)
    assert sources(said) == ((2, 4), [0, 1, 0, 3])  # the damaged copy is not used, the partner's is
    end_rank()


def test_a_lost_host_s_parts_come_from_the_other_one_and_a_flipped_copy_is_not_used(tmp_path: Path) -> None:
    from torch.multiprocessing import spawn

    spawn(_two_hosts, (str(tmp_path / "meeting"),), nprocs=4)


class Done:
    def wait(self) -> None:
        pass


def test_two_ranks_begin_what_they_send_each_other_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NCCL two that both send first wait for each other, once tensors are too large for its buffers."""
    begun: dict[int, list[str]] = {}
    for rank in range(2):
        order = begun.setdefault(rank, [])

        def isend(tensor: Any, to: int, rank: int = rank, order: list[str] = order) -> Done:
            order.append(f"{rank} to {to}")
            return Done()

        def irecv(tensor: Any, source: int, rank: int = rank, order: list[str] = order) -> Done:
            order.append(f"{source} to {rank}")
            tensor.fill_(2)
            return Done()

        monkeypatch.setattr(torch.distributed, "isend", isend)
        monkeypatch.setattr(torch.distributed, "irecv", irecv)
        monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
        monkeypatch.setattr(torch.distributed, "all_gather", lambda hosts, host: None)
        PeerCopies(rank, 2).take((1, 4), part_of(rank, torch.zeros(3, dtype=torch.uint8)))
    assert begun[0] == begun[1]
    assert begun[0][:2] == ["0 to 1", "1 to 0"]


def test_a_group_of_gpus_alone_takes_tensors_on_this_rank_s_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("cuda:gloo", init_method=store, rank=0, world_size=1)
    try:
        assert collective_device() == torch.device("cuda", 1)
    finally:
        end_world()
