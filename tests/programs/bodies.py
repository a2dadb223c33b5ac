"""What ranks do in the tests of process groups: functions that both backends run, imported where torch is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)
ALL = (*FLOATS, *WHOLE, torch.bool)
SIZES = {7: ALL, 30_000: (torch.float32, torch.bfloat16, torch.int64)}
"""Those that travel with the call itself, and those that follow it."""

Body = Callable[[Any], list[torch.Tensor]]
UNKNOWN_TO_GLOO = (torch.int16, torch.complex64, torch.float8_e5m2)


def given(rank: int, size: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """Small whole numbers, so that no sum is rounded; they differ by rank."""
    numbers = (torch.arange(size) * 7 + rank * 3 + shift) % 5 + 1
    return (numbers % 2).to(dtype) if dtype is torch.bool else numbers.to(dtype)


def cases(members: list[int]) -> Iterator[tuple[str, Body, Body]]:
    """Every collective, with every dtype, as functions of the group; ``members`` are its ranks in the world.

    The second function is for Gloo: the same but for dtypes that it does not know.
    """
    for name, body in usual_cases(members):
        yield name, body, body
    for dtype in UNKNOWN_TO_GLOO:
        for name, make in MOVES.items():
            me = members.index(dist.get_rank())
            ours, gloos = make(me, members, 7, dtype), make(me, members, 7, torch.float32)
            yield f"{name} {dtype}", ours, _converted(gloos, dtype)


def _converted(body: Body, dtype: torch.dtype) -> Body:
    return lambda group: [x.to(dtype) for x in body(group)]


def usual_cases(members: list[int]) -> Iterator[tuple[str, Body]]:
    """Those that Gloo knows."""
    n, me = len(members), members.index(dist.get_rank())
    for size, dtypes in SIZES.items():
        for dtype in dtypes:
            for op in ("SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"):
                if dtype in FLOATS and op.startswith("B"):
                    continue
                if dtype is torch.bool and op in ("SUM", "PRODUCT", "MIN", "MAX"):
                    continue  # Gloo adds truth values as bytes, and so makes some that are neither
                yield f"all_reduce {op} {dtype} {size}", _all_reduce(me, size, dtype, op)
                yield f"reduce {op} {dtype} {size}", _reduce(me, members, size, dtype, op)
                yield f"reduce_scatter {op} {dtype} {size}", _reduce_scatter(me, n, size, dtype, op)
        for dtype in dtypes:
            for name, make in MOVES.items():
                yield f"{name} {dtype} {size}", make(me, members, size, dtype)
    yield "barrier", _barrier
    yield "objects", _objects(me, members)
    yield "empty", _all_reduce(me, 0, torch.float32, "SUM")
    yield "sparse", _sparse(me)
    yield "strided", _strided(me, members)


def _all_reduce(me: int, size: int, dtype: torch.dtype, op: str) -> Body:
    def run(group: Any) -> list[torch.Tensor]:
        found = [given(me, size, dtype)]
        dist.all_reduce(found[0], getattr(dist.ReduceOp, op), group)
        if op == "SUM":
            found += [given(me, size, dtype, shift) for shift in (1, 2, 3)]
            works = [dist.all_reduce(x, group=group, async_op=True) for x in found[1:]]
            for work in works:
                work.wait()
        return found

    return run


def _reduce(me: int, members: list[int], size: int, dtype: torch.dtype, op: str) -> Body:
    def run(group: Any) -> list[torch.Tensor]:
        x = given(me, size, dtype)
        dist.reduce(x, members[-1], getattr(dist.ReduceOp, op), group)
        return [x] if me == len(members) - 1 else []  # Gloo spoils the others'

    return run


def _reduce_scatter(me: int, n: int, size: int, dtype: torch.dtype, op: str) -> Body:
    def run(group: Any) -> list[torch.Tensor]:
        if torch.__version__ < (2, 6) and op != "SUM":  # Gloo sums, whatever the operation
            return []
        single, listed = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
        whole = given(me, size * n, dtype)
        dist.reduce_scatter_tensor(single, whole, getattr(dist.ReduceOp, op), group)
        if op == "SUM" and torch.__version__ >= (2, 6):  # before it Gloo has none of lists
            dist.reduce_scatter(listed, list(whole.clone().chunk(n)), dist.ReduceOp.SUM, group)
        return [single, listed]

    return run


def _broadcast(me: int, members: list[int], size: int, dtype: torch.dtype) -> Body:
    def run(group: Any) -> list[torch.Tensor]:
        found = []
        for root in members:
            found.append(given(me, size, torch.float32).to(dtype))
            dist.broadcast(found[-1], root, group)
        return found

    return run


def _all_gather(me: int, members: list[int], size: int, dtype: torch.dtype) -> Body:
    def run(group: Any) -> list[torch.Tensor]:
        x = given(me, size, torch.float32).to(dtype)
        parts = [torch.zeros(size).to(dtype) for _ in members]
        whole = torch.zeros(size * len(members)).to(dtype)
        dist.all_gather(parts, x, group)
        dist.all_gather_into_tensor(whole, x, group)
        return [*parts, whole]

    return run


def _gather(me: int, members: list[int], size: int, dtype: torch.dtype) -> Body:
    def run(group: Any) -> list[torch.Tensor]:
        root = members[-1]
        x = given(me, size, torch.float32).to(dtype)
        here = dist.get_rank() == root
        parts = [torch.zeros(size).to(dtype) for _ in members] if here else None
        dist.gather(x, parts, root, group)
        back = torch.zeros(size).to(dtype)
        dist.scatter(back, parts, root, group)
        return [*(parts or []), back]

    return run


def _all_to_all(me: int, members: list[int], size: int, dtype: torch.dtype) -> Body:
    def run(group: Any) -> list[torch.Tensor]:
        n = len(members)
        even, got = given(me, size * n, torch.float32).to(dtype), torch.zeros(size * n).to(dtype)
        dist.all_to_all_single(got, even, group=group)
        sends = [(me + 2 * other) % 4 * size for other in range(n)]
        takes = [(other + 2 * me) % 4 * size for other in range(n)]
        uneven = given(me, 3 * sum(sends), torch.float32).to(dtype).reshape(-1, 3)
        rows = torch.zeros(sum(takes), 3).to(dtype)
        dist.all_to_all_single(rows, uneven, takes, sends, group=group)
        return [got, rows]

    return run


def _messages(me: int, members: list[int], size: int, dtype: torch.dtype) -> Body:
    def run(group: Any) -> list[torch.Tensor]:
        """All to all others at once, both directions, two tags that are taken in the other order."""
        works, found = [], {}
        for other in members:
            if other == dist.get_rank():
                continue
            for tag in (2, 1):
                found[other, tag] = torch.zeros(size).to(dtype)
                works.append(dist.irecv(found[other, tag], other, group, tag))
            for tag in (1, 2):
                works.append(dist.isend(given(me, size, torch.float32, tag).to(dtype), other, group, tag))
        for work in works:
            assert work is not None
            work.wait()
        return [found[key] for key in sorted(found)]

    return run


MOVES = {
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather and scatter": _gather,
    "all_to_all": _all_to_all,
    "messages": _messages,
}


def _barrier(group: Any) -> list[torch.Tensor]:
    dist.barrier(group)
    group.monitored_barrier()
    return []


def _objects(me: int, members: list[int]) -> Body:
    def run(group: Any) -> list[torch.Tensor]:
        mine = {"rank": me, "text": "x" * me * 100}
        everybodys: list[Any] = [None] * len(members)
        dist.all_gather_object(everybodys, mine, group)
        shared = [mine, me]
        dist.broadcast_object_list(shared, members[0], group)
        taken: list[Any] = [None]
        dist.scatter_object_list(taken, everybodys, members[0], group)
        root = dist.get_rank() == members[0]
        gathered: list[Any] | None = [None] * len(members) if root else None
        dist.gather_object(mine, gathered, members[0], group)
        text = repr((everybodys, shared, taken, gathered))
        return [torch.tensor(list(text.encode()))]

    return run


def _sparse(me: int) -> Body:
    def run(group: Any) -> list[torch.Tensor]:
        indices = torch.tensor([[me, 3, me + 1], [0, 1, 1]])
        x = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, me]), (6, 2))
        dist.all_reduce(x, group=group)
        return [x.to_dense()]

    return run


def _strided(me: int, members: list[int]) -> Body:
    """Tensors that are no dense row of memory; Gloo, which refuses some, gets dense ones."""

    def run(group: Any) -> list[torch.Tensor]:
        base = given(me, 24, torch.float32).reshape(4, 6)
        ours = type(group).__name__ == "MusterProcessGroup"
        x = base.clone().t() if ours else base.t().contiguous()
        dist.all_reduce(x, group=group)
        y = base.clone()[:, ::2] if ours else base[:, ::2].contiguous()
        dist.broadcast(y, members[0], group)
        return [x.contiguous(), y.contiguous()]

    return run


def against_gloo(rank: int, size: int) -> tuple[int, list[str]]:
    """Runs every case on groups of both backends; how many there were, and which differ."""
    differ, count = [], 0
    for members, part in (([*range(size)], 1), ([0, size - 1], 9), ([size - 1], 9)):
        gloo, ours = dist.new_group(members, backend="gloo"), dist.new_group(members, backend="muster")
        if rank not in members:
            continue
        for number, (name, run, run_gloo) in enumerate(cases(members)):
            if number % part:
                continue
            count += 1
            expected, found = run_gloo(gloo), run(ours)
            same = len(expected) == len(found) and all(map(_same, expected, found))
            if not same:
                differ.append(f"rank {rank} of {members}: {name}: {expected} {found}"[:400])
    return count, differ


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.dtype is torch.float8_e5m2:
        x, y = x.view(torch.uint8), y.view(torch.uint8)
    return bool(torch.equal(x, y))
