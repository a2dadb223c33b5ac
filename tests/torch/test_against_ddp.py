"""DataParallel against torch's DistributedDataParallel (gloo), bit for bit: one table of what users train.

Two processes serve the whole table. In each case both wrappers train the same module from the same beginning
(rank 0's; each rank makes another one) on the same batches (others on each rank), and losses, gradients and
parameters must be the same bits, on both ranks, whether gradients are packed or reduced where they are. With
two ranks that can be asked: a sum of two numbers has one order, and halves are exact. So no case has a
tolerance.

Buffers are compared on rank 0 alone: DistributedDataParallel brings rank 0's to the others before a forward
pass, DataParallel after a backward pass, so that in the end the others' are one update apart. Left out is
what DistributedDataParallel does not reduce (a second backward pass through one graph; test_modules.py
has it) or takes on GPUs only (SyncBatchNorm; it has its own tests).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from tests.contracts.agents import Agents, Place
from tests.torch.ddp.layers import LAYERS
from tests.torch.ddp.side import (
    Side,
    net,
)
from tests.torch.ddp.ways import WAYS

RANKS = 2


CASES = {**LAYERS, **WAYS}


def differences(place: Place, name: str, store: str) -> list[str]:
    """Runs on each rank: what the two wrappers do differently in a case."""
    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=place.comm.rank, world_size=RANKS
        )
    found = []
    for side in (Side(place, False), Side(place, True), Side(place, True, in_place_bytes=1)):
        torch.manual_seed(10 + place.comm.rank)
        CASES[name](side)
        found.append(side.seen)
    theirs, *ours = found
    assert all(list(theirs) == list(each) for each in ours) and theirs, [list(each) for each in found]
    return [
        f"{key}{where}: {text}"
        for mine, where in zip(ours, ("", " in place"), strict=True)
        for key in theirs
        if (text := different(mine[key], theirs[key]))
    ]


def leave(place: Place) -> None:
    """Runs on each rank, at the end."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def different(mine: Any, theirs: Any) -> str:
    if not isinstance(theirs, torch.Tensor) or not isinstance(mine, torch.Tensor):
        return "" if mine == theirs or (mine is theirs is None) else f"{mine} and not {theirs}"
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return f"{mine.dtype} {tuple(mine.shape)} and not {theirs.dtype} {tuple(theirs.shape)}"
    close = torch.equal(mine.isnan(), theirs.isnan()) and torch.equal(
        torch.nan_to_num(mine), torch.nan_to_num(theirs)
    )
    return "" if close else f"differs by up to {float((mine - theirs).abs().max())}"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agents, Path]]:
    """Two processes, and the file by which they find each other for gloo."""
    directory = tmp_path_factory.mktemp("ddp")
    agents = Agents(RANKS, directory)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    yield agents, directory / "store"
    agents.run("tcp-plain", RANKS, leave)
    agents.close()


LATER = {"complex parameters": (2, 6), "state of the wrapper": (2, 7)}
"""Gloo takes complex numbers, and torch.distributed.checkpoint any wrapper, since these releases of torch."""


@pytest.mark.parametrize("name", CASES)
def test_a_case_trains_as_with_distributed_data_parallel(pool: tuple[Agents, Path], name: str) -> None:
    if torch.__version__ < LATER.get(name, (2, 5)):
        pytest.skip(f"needs torch {LATER[name][0]}.{LATER[name][1]}: {name}")
    agents, store = pool
    for rank, found in enumerate(agents.run("tcp-plain", RANKS, differences, name, str(store))):
        assert not found, f"rank {rank}: {len(found)} differ, first {found[:3]}"


# ---------------------------------------------------------------- what DistributedDataParallel does not do


def synchronised_and_whole(place: Place) -> float:
    """Runs on each rank: how far SyncBatchNorm in uneven batches is from one process on the whole batch."""
    from muster.torch.data_parallel import DataParallel

    def made(kind: Any) -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), kind(8), nn.Tanh(), nn.Linear(8, 8), kind(8), nn.Linear(8, 2))

    model = DataParallel(made(nn.SyncBatchNorm).double(), communicator=place.comm, bucket_bytes=64)
    alone = made(nn.BatchNorm1d).double()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, alone)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        batch = torch.randn(7, 6, generator=generator, dtype=torch.float64) + 10
        mine = batch[:5] if place.comm.rank == 0 else batch[5:]
        for optimizer in optimizers:
            optimizer.zero_grad()
        with model.uneven_batch(len(mine)):
            model(mine).square().mean().backward()
        alone(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(model.state_dict().values(), alone.state_dict().values(), strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def test_sync_batch_norm_is_that_of_the_whole_batch(pool: tuple[Agents, Path]) -> None:
    assert max(pool[0].run("tcp-plain", RANKS, synchronised_and_whole)) < 1e-12


def goes_on_after_an_error(place: Place) -> str:
    """Runs on each rank: rank 1 catches an error of a backward pass and takes the next batch."""
    from muster.errors import WorkerError
    from muster.torch.data_parallel import DataParallel

    model = DataParallel(net(), communicator=place.comm)
    for step in range(4):
        model.zero_grad()
        output = model(torch.ones(2, 6))
        if step == 2 and place.comm.rank == 1:
            output.register_hook(lambda gradient: gradient.nothing_like_it)
            with pytest.raises(AttributeError):
                output.sum().backward()
            output = model(torch.ones(2, 6))
        try:
            output.sum().backward()
        except WorkerError as error:
            return f"{step} {type(error).__name__}: {error.message}"
    return "nobody has noticed"


def test_a_rank_that_goes_on_after_an_error_is_found_in_that_step(pool: tuple[Agents, Path]) -> None:
    words = (
        "2 CollectiveMismatchError: ranks average gradients of different steps: rank 1 (node-1 on localhost)"
        " left a training pass unfinished and began the next"
    )
    assert pool[0].run("tcp-plain", RANKS, goes_on_after_an_error) == [words] * RANKS
