"""What runs on every rank: each function calls collectives and judges the result by NumPy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from muster.communicators.reduce_ops import ReduceOp
from muster.errors import ArrayError, CommunicatorError, MembershipChanged
from tests.contracts.agents import Place
from tests.contracts.kits import NumpyArray, reference, values
from tests.waiting import wait_for

SIZES = (0, 1, 7, 5000, 120_001)
"""Empty, tiny, uneven, small enough to go at once, and large enough for rings (in most dtypes)."""


def equal(place: Place, array: Any, wanted: NumpyArray, *, rounding: bool = False) -> None:
    """Judges a result, bit by bit or, with ``rounding``, within an error of one rounding per rank."""
    found = place.kit.numpy(array)
    assert found.dtype == wanted.dtype
    found, wanted = found.reshape(-1), wanted.reshape(-1)
    if rounding:
        tolerance = float(np.finfo(wanted.dtype).eps) * (place.comm.world_size + 1)
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=0)
        return
    differ = np.flatnonzero(found != wanted) if found.shape == wanted.shape else np.arange(5)
    assert found.shape == wanted.shape and not differ.size, (
        f"rank {place.comm.rank}, {wanted.size} elements, {differ.size} differ: at {differ[:5]}"
        f" {found[differ[:5]]} instead of {wanted[differ[:5]]}"
    )


def all_parts(place: Place, size: int, dtype: str) -> list[NumpyArray]:
    return [values(rank, size, dtype) for rank in range(place.comm.world_size)]


def all_reduce(place: Place, dtype: str, op: ReduceOp, sizes: tuple[int, ...] = SIZES) -> list[bytes]:
    """Out of place and in place; returns the bytes of the results, to be compared across ranks."""
    shown = []
    for size in sizes:
        parts = all_parts(place, size, dtype)
        wanted = reference(op, parts)
        rounding = op is ReduceOp.MEAN and not place.kit.divides_last
        send = place.kit.array(parts[place.comm.rank])
        recv = place.kit.array(np.zeros_like(wanted))
        place.comm.all_reduce(send, recv, op).wait()
        equal(place, recv, wanted, rounding=rounding)
        equal(place, send, parts[place.comm.rank])
        place.comm.all_reduce(send, send, op).wait()
        equal(place, send, wanted, rounding=rounding)
        shown.append(place.kit.numpy(send).tobytes())
    return shown


def same_bits(place: Place, size: int) -> bytes:
    """A sum whose rounding depends on the order: all ranks must round alike."""
    generator = np.random.default_rng(place.comm.rank)
    send = place.kit.array((generator.standard_normal(size) * 1e6).astype("f4"))
    place.comm.all_reduce(send, send, ReduceOp.SUM).wait()
    return place.kit.numpy(send).tobytes()


def rooted(place: Place, dtype: str) -> None:
    """Reduce, broadcast, gather and scatter with every root."""
    comm, array = place.comm, place.kit.array
    for size in SIZES:
        parts = all_parts(place, size, dtype)
        for root in range(comm.world_size):
            at_root = comm.rank == root
            recv = array(np.zeros(size, dtype)) if at_root else None
            comm.reduce(array(parts[comm.rank]), recv, ReduceOp.SUM, root).wait()
            if at_root:
                equal(place, recv, reference(ReduceOp.SUM, parts))
            buffer = array(parts[comm.rank])
            comm.broadcast(buffer, root).wait()
            equal(place, buffer, parts[root])
            gathered = array(np.zeros(size * comm.world_size, dtype)) if at_root else None
            comm.gather(array(parts[comm.rank]), gathered, root).wait()
            if at_root:
                equal(place, gathered, np.concatenate(parts))
            whole = array(np.concatenate(parts)) if at_root else None
            part = array(np.zeros(size, dtype))
            comm.scatter(whole, part, root).wait()
            equal(place, part, parts[comm.rank])


def shuffles(place: Place, dtype: str) -> None:
    """All-gather, reduce-scatter and all-to-all."""
    comm, array = place.comm, place.kit.array
    n = comm.world_size
    for size in SIZES:
        parts = all_parts(place, size, dtype)
        recv = array(np.zeros(size * n, dtype))
        comm.all_gather(array(parts[comm.rank]), recv).wait()
        equal(place, recv, np.concatenate(parts))
        wide = all_parts(place, size * n, dtype)
        mine = slice(comm.rank * size, (comm.rank + 1) * size)
        part = array(np.zeros(size, dtype))
        comm.reduce_scatter(array(wide[comm.rank]), part, ReduceOp.SUM).wait()
        equal(place, part, reference(ReduceOp.SUM, wide)[mine])
        turned = array(np.zeros(size * n, dtype))
        comm.all_to_all(array(wide[comm.rank]), turned).wait()
        equal(place, turned, np.concatenate([w[mine] for w in wide]))


def in_place_shuffles(place: Place, size: int) -> None:
    """The natural in-place forms: a rank's own part stands where it belongs already."""
    comm, array = place.comm, place.kit.array
    n = comm.world_size
    parts = all_parts(place, size, "f4")
    whole = np.zeros(size * n, "f4")
    whole[comm.rank * size : (comm.rank + 1) * size] = parts[comm.rank]
    recv = array(whole)
    comm.all_gather(recv[comm.rank * size : (comm.rank + 1) * size], recv).wait()
    equal(place, recv, np.concatenate(parts))
    wide = all_parts(place, size * n, "f4")
    send = array(wide[comm.rank])
    part = send[comm.rank * size : (comm.rank + 1) * size]
    comm.reduce_scatter(send, part, ReduceOp.SUM).wait()
    equal(place, part, reference(ReduceOp.SUM, wide)[comm.rank * size : (comm.rank + 1) * size])


def points(place: Place) -> None:
    """Every pair sends and receives, small and large."""
    comm = place.comm
    for size in SIZES:
        for sender in range(comm.world_size):
            for receiver in range(comm.world_size):
                if sender == receiver:
                    continue
                if comm.rank == sender:
                    comm.send(place.kit.array(values(sender, size, "f4", receiver)), receiver).wait()
                if comm.rank == receiver:
                    buffer = place.kit.array(np.zeros(size, "f4"))
                    comm.recv(buffer, sender).wait()
                    equal(place, buffer, values(sender, size, "f4", receiver))


def asynchronous(place: Place, count: int) -> None:
    """Many in flight, mixed with synchronous calls: all in order, all right."""
    comm = place.comm
    sends = [place.kit.array(np.full(3000 * (i % 7) + 1, i + comm.rank, "f4")) for i in range(count)]
    works = []
    for index, send in enumerate(sends):
        works.append(comm.all_reduce(send, send, ReduceOp.SUM, async_op=index % 3 != 0))
    for work in reversed(works):
        work.wait()
        place.kit.synchronize()
        assert work.done()
    total = sum(range(comm.world_size))
    for index, send in enumerate(sends):
        wanted = np.full(3000 * (index % 7) + 1, index * comm.world_size + total, "f4")
        equal(place, send, wanted)


def barriers(place: Place) -> list[float]:
    """Times around a barrier: nobody leaves before the last has come."""
    time.sleep(0.05 * place.comm.rank)  # so that ranks come one after the other
    came = time.monotonic()
    place.comm.barrier()
    return [came, time.monotonic()]


def refusals(place: Place) -> list[str]:
    """Wrong arrays are refused before anything is sent; the communicator stays usable."""
    comm, array = place.comm, place.kit.array
    good = array(np.ones(6, "f4"))
    bad: list[Callable[[], Any]] = [
        lambda: comm.all_reduce(good, array(np.ones(5, "f4")), ReduceOp.SUM),
        lambda: comm.all_reduce(good, array(np.ones(6, "f8")), ReduceOp.SUM),
        lambda: comm.all_reduce(array(np.ones(12, "f4"))[::2], good, ReduceOp.SUM),
        lambda: comm.all_reduce(array(np.ones(6, "i4")), array(np.ones(6, "i4")), ReduceOp.MEAN),
        lambda: comm.broadcast(good, comm.world_size),
        lambda: comm.broadcast(good, -1),
        lambda: comm.all_gather(good, array(np.ones(6 * comm.world_size + 1, "f4"))),
        lambda: comm.send(good, comm.rank),
        lambda: comm.all_reduce([1.0, 2.0], good, ReduceOp.SUM),
    ]
    shown = []
    for call in bad:
        try:
            call()
        except ArrayError as error:
            shown.append(str(error))
        else:
            raise AssertionError(f"call {len(shown)} was taken")
    comm.all_reduce(good, good, ReduceOp.SUM).wait()
    equal(place, good, np.full(6, comm.world_size, "f4"))
    return shown


def caught(place: Place, call: str) -> tuple[str, str]:
    """Makes one call and returns the error's kind and words."""
    array = place.kit.array
    ten, eleven = array(np.ones(10, "f4")), array(np.ones(11, "f4"))
    big = array(np.ones(100_000, "f4"))
    comm = place.comm
    calls: dict[str, Callable[[], Any]] = {
        "sum10": lambda: comm.all_reduce(ten, ten, ReduceOp.SUM),
        "sum11": lambda: comm.all_reduce(eleven, eleven, ReduceOp.SUM),
        "big": lambda: comm.all_reduce(big, big, ReduceOp.SUM),
        "max10": lambda: comm.all_reduce(ten, ten, ReduceOp.MAX),
        "double": lambda: comm.all_reduce(array(np.ones(10)), array(np.ones(10)), ReduceOp.SUM),
        "broadcast0": lambda: comm.broadcast(ten, 0),
        "broadcast1": lambda: comm.broadcast(ten, 1),
        "barrier": lambda: comm.barrier(),
        "recv0": lambda: comm.recv(ten, 0),
        "recv0 of 11": lambda: comm.recv(eleven, 0),
        "recv0 of doubles": lambda: comm.recv(array(np.ones(10)), 0),
        "recv1": lambda: comm.recv(ten, 1),
        "send0": lambda: comm.send(ten, 0),
        "send0 of much": lambda: comm.send(big, 0),
        "send1": lambda: comm.send(ten, 1),
        "send1 of much": lambda: comm.send(big, 1),
        "nothing": lambda: None,
    }
    try:
        work = calls[call]()
        if work is not None:
            work.wait()
    except CommunicatorError as error:
        try:
            comm.barrier()
        except CommunicatorError as again:
            assert type(again) is type(error)
        return type(error).__name__, str(error)
    return "", ""


def aborted_while_waiting(place: Place, size: int, over: Path) -> tuple[str, str, str]:
    """Rank 0 hangs in a collective that nobody joins, and another thread aborts it; then ``over`` exists."""
    comm = place.comm
    if comm.rank != 0:
        wait_for(over.exists)  # stays for as long as rank 0 hangs, but does not join in
        return "", "", ""
    change = MembershipChanged("node-1 left", generation=place.membership.generation)
    thread = threading.Timer(0.05, lambda: comm.abort(change))
    thread.start()
    send = place.kit.array(np.ones(size, "f4"))
    shown = []
    for _ in range(2):
        try:
            comm.all_reduce(send, send, ReduceOp.SUM).wait()
        except MembershipChanged as error:
            shown.append(str(error))
    thread.join()
    comm.abort(change)
    over.touch()
    return type(change).__name__, shown[0], shown[1]


def use_after_close(place: Place) -> str:
    """A closed communicator says so."""
    place.comm.close()
    place.comm.close()
    try:
        place.comm.barrier()
    except CommunicatorError as error:
        return type(error).__name__
    return ""


def splits(place: Place) -> list[Any]:
    """Sub-groups in another order of ranks, at the same time as their parent, and nested."""
    comm = place.comm
    n = comm.world_size
    backwards = comm.split("backwards", list(reversed(range(n))))
    assert backwards is not None
    assert backwards.rank == n - 1 - comm.rank
    assert backwards.membership.peers[backwards.rank].node_id == comm.membership.peers[comm.rank].node_id
    odd, even = comm.split("odd", list(range(1, n, 2)) or [0]), comm.split("even", list(range(0, n, 2)))
    part = odd if comm.rank % 2 or n == 1 else even
    assert part is not None
    assert (odd is None) == (comm.rank % 2 == 0 and n > 1)
    assert (even is None) == (comm.rank % 2 == 1)
    found = []
    for group in (backwards, part, comm):
        buffer = place.kit.array(np.full(40_000, comm.rank + 1, "f4"))
        group.all_reduce(buffer, buffer, ReduceOp.SUM).wait()
        found.append(float(place.kit.numpy(buffer)[-1]))
    for group in {id(g): g for g in (backwards, odd, even) if g is not None}.values():
        group.close()
    comm.barrier()
    return found


# ---------------------------------------------------------------- torch


def torch_values(rank: int, size: int, dtype: str) -> Any:
    """Numbers of a rank whose sums and products need more digits than the dtype has; float32 has enough."""
    import torch

    generator = torch.Generator().manual_seed(7 * size + rank)
    eighths = torch.randint(-64, 64, (size,), generator=generator)
    return (eighths * 2.0**-3 + torch.randint(0, 2, (size,), generator=generator)).to(getattr(torch, dtype))


def torch_reference(op: ReduceOp, parts: list[Any]) -> Any:
    """What torch makes of all ranks' values: combined in float32 or wider, and rounded once."""
    import torch

    dtype = parts[0].dtype
    wide = torch.stack(parts).to(torch.float64)
    found = {
        ReduceOp.SUM: lambda: wide.sum(0),
        ReduceOp.MEAN: lambda: wide.sum(0).float() / len(parts),
        ReduceOp.MIN: lambda: wide.amin(0),
        ReduceOp.MAX: lambda: wide.amax(0),
        ReduceOp.PROD: lambda: wide.prod(0),
    }[op]()
    return found.float().to(dtype)


def on_torch(place: Place, dtype: str, sizes: tuple[int, ...]) -> list[list[float]]:
    """Every collective on torch's tensors, in place and not, against torch's own arithmetic."""
    import torch

    torch.set_num_threads(1)
    comm, rank, n = place.comm, place.comm.rank, place.comm.world_size
    shown = []

    def same(found: Any, wanted: Any, what: str) -> None:
        assert torch.equal(found, wanted), f"{what} of {wanted.numel()} {dtype} on rank {rank}"

    for size in sizes:
        parts = [torch_values(r, size, dtype) for r in range(n)]
        wide = [torch_values(r, size * n, dtype).view(n, -1) for r in range(n)]
        mine, everything = slice(rank, rank + 1), torch.cat(parts)
        for number, op in enumerate(ReduceOp):
            recv = torch.zeros_like(parts[rank])
            comm.all_reduce(parts[rank], recv, op).wait()
            same(recv, torch_reference(op, parts), f"all_reduce {op}")
            shown.append(recv[:50].tolist())
            buffer = parts[rank].clone()
            comm.all_reduce(buffer, buffer, op, async_op=True).wait()
            same(buffer, recv, f"all_reduce in place {op}")
            part = torch.zeros(1, size, dtype=recv.dtype)
            comm.reduce_scatter(wide[rank], part, op).wait()
            same(part, torch_reference(op, wide)[mine], f"reduce_scatter {op}")
            total = torch.zeros_like(recv) if rank == number % n else None
            comm.reduce(parts[rank], total, op, number % n).wait()
            if total is not None:
                same(total, recv, f"reduce {op}")
        recv = torch.zeros_like(everything)
        comm.all_gather(parts[rank], recv).wait()
        same(recv, everything, "all_gather")
        recv = torch.zeros_like(wide[rank])
        comm.all_to_all(wide[rank], recv).wait()
        same(recv, torch.cat([each[mine] for each in wide]), "all_to_all")
        for root in range(n):
            buffer = parts[rank].clone()
            comm.broadcast(buffer, root).wait()
            same(buffer, parts[root], "broadcast")
            recv = torch.zeros_like(everything) if rank == root else None
            comm.gather(parts[rank], recv, root).wait()
            if recv is not None:
                same(recv, everything, "gather")
            part = torch.zeros_like(parts[rank])
            comm.scatter(everything if rank == root else None, part, root).wait()
            same(part, parts[rank], "scatter")
        got = torch.zeros_like(parts[rank])
        left, right = (rank - 1) % n, (rank + 1) % n
        sent = comm.send(parts[rank], right, async_op=True) if rank % 2 == 0 else None
        comm.recv(got, left).wait()
        if sent is not None:
            sent.wait()
        else:
            comm.send(parts[rank], right).wait()
        same(got, parts[left], "send and recv")
    return shown


def half_means(place: Place, size: int) -> list[float]:
    """A mean that is a float16 although the sum is none, by NumPy's arrays."""
    send = place.kit.array(np.full(size, 60000, "f2"))
    place.comm.all_reduce(send, send, ReduceOp.MEAN).wait()
    part = place.kit.array(np.zeros(size // place.comm.world_size, "f2"))
    place.comm.reduce_scatter(send, part, ReduceOp.MEAN).wait()
    return sorted({*place.kit.numpy(send).tolist(), *place.kit.numpy(part).tolist()})


def data_parallel_in_bfloat16(place: Place) -> list[list[float]]:
    """One step of a model whose gradients travel in bfloat16; returns gradients and their float32 mean."""
    import torch

    from muster.torch.data_parallel import DataParallel

    torch.manual_seed(1)
    bare = torch.nn.Linear(300, 200)
    inputs = torch.randn(place.comm.world_size, 4, 300)
    model = DataParallel(bare, communicator=place.comm, compression="bf16")
    model(inputs[place.comm.rank]).square().mean().backward()
    found = bare.weight.grad.clone()
    parts = []
    for batch in inputs:
        bare.zero_grad()
        bare(batch).square().mean().backward()
        parts.append(bare.weight.grad.to(torch.bfloat16).float())
    mean = (torch.stack(parts).sum(0) / len(parts)).to(torch.bfloat16).float()
    return [found.view(-1).tolist(), mean.view(-1).tolist()]
