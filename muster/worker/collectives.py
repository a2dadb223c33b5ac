"""Collectives and groups of the default session, for scripts: arrays in, arrays out.

Arrays must be C-contiguous. All backends take NumPy arrays and torch tensors on the CPU. ``nccl`` also takes
arrays on the worker's GPU: of CuPy, of torch, or with ``__cuda_array_interface__`` or DLPack. With ``nccl``,
arrays on the CPU are sent over ``tcp``, on connections that are opened at the first such call. They cannot be
used in a CUDA graph or in :func:`group`. Numbers and lists are converted to NumPy arrays. Every rank of a
group must call the same collectives in the same order with the same dtype and shape.

``tcp`` combines float16 and bfloat16 in float32, where a mean is also divided, and rounds once at the end,
half to even, as torch does. NCCL rounds in its own order.

Only ``broadcast``, ``recv`` and ``neighbor_exchange`` write into their input arrays. The others return a new
array, or fill ``out``, which for ``all_reduce`` and ``reduce`` may be the input array.

Raises:
    NotInitializedError: there is no session.
    ArrayError: the array cannot be used; raised before anything is sent.
    CollectiveMismatchError: the ranks called different collectives; the message says who called what. Only
        with ``tcp``, and with ``nccl`` for arrays on the CPU.
    CollectiveTimeoutError: MS_COLLECTIVE_TIMEOUT was exceeded for the second time in the same step, or while
        there is no scheduler; the message names the ranks waited for. The first time raises MembershipChanged
        instead, and the next generation waits for those ranks. See below for ``nccl``.
    MembershipChanged: the generation is over; call ``session.rejoin()``.
    GroupError: there is no such group, or this rank is not in it.

These functions only enqueue NCCL's collectives. NCCL neither compares what the ranks called nor times out. A
deadline applies where the host waits for the GPU: in ``barrier``, in ``create_group`` and in the
communicator's ``synchronize()``, which an ElasticLoop calls after each step of a torch model. Anything else
may hang until the generation ends. MS_STALL_TIMEOUT after the last progress, the scheduler reports which rank
lags and on which collective the ranks disagree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from muster.communicators.arrays import HOST, Array, Description, describe, kind_of
from muster.communicators.base import Communicator, check_place
from muster.communicators.reduce_ops import PreMultipliedSum, ReduceOp
from muster.communicators.work import Work
from muster.errors import ArrayError, GroupError
from muster.worker.runtime import current


class Pending:
    """A collective in progress. Keep it until it is done: it holds the arrays in use."""

    def __init__(self, work: Work, result: Array | None) -> None:
        self._work = work
        self._result = result

    def done(self) -> bool:
        """Whether the collective has completed, successfully or not. Never blocks."""
        return self._work.done()

    def wait(self) -> Array | None:
        """Waits for the result and returns it.

        Raises:
            CommunicatorError: the collective failed.
            MembershipChanged: the generation is over.
        """
        self._work.wait()
        return self._result


# ---------------------------------------------------------------- collectives


def all_reduce(
    x: Array,
    op: str | PreMultipliedSum = "sum",
    group: str | None = None,
    out: Array | None = None,
    async_op: bool = False,
) -> Any:
    """Combines ``x`` of all ranks, element by element; all ranks get the result.

    Args:
        x: any shape, the same on all ranks.
        op: "sum", "mean", "min", "max", "prod", or with NCCL a :class:`muster.PreMultipliedSum`.
        group: name of a group; None: all ranks.
        out: array for the result, of x's shape and dtype; may be x itself. None for a new array.
        async_op: return a :class:`Pending` immediately.

    Returns:
        The result, of x's shape and dtype; with ``async_op`` a :class:`Pending` of it.
    """
    communicator, given = _begin(group, x)
    target = _output(communicator, out, given, x)
    work = communicator.all_reduce(given, target, _op(op, communicator), async_op=async_op)
    return _finish(work, target, async_op, out)


def reduce(
    x: Array,
    root: int = 0,
    op: str | PreMultipliedSum = "sum",
    group: str | None = None,
    out: Array | None = None,
    async_op: bool = False,
) -> Any:
    """Like :func:`all_reduce`, but only ``root`` (a rank within the group) gets the result.

    The others get None.
    """
    communicator, given = _begin(group, x)
    target = _output(communicator, out, given, x) if communicator.rank == root else None
    work = communicator.reduce(given, target, _op(op, communicator), root, async_op=async_op)
    return _finish(work, target, async_op, out)


def broadcast(x: Array, root: int = 0, group: str | None = None, async_op: bool = False) -> Any:
    """Copies ``x`` from ``root`` (a rank within the group) into ``x`` of all ranks, in place.

    Returns ``x``.
    """
    communicator, given = _begin(group, x)
    out = None if given.is_made else x
    return _finish(communicator.broadcast(given, root, async_op=async_op), given, async_op, out)


def all_gather(x: Array, group: str | None = None, out: Array | None = None, async_op: bool = False) -> Any:
    """Concatenates the ranks' ``x`` along the first axis; all ranks get the result.

    Args:
        x: of shape (n, ...), or a scalar.
        group: name of a group; None: all ranks.
        out: array of shape (ranks * n, ...) for the result. None for a new array.
        async_op: return a :class:`Pending` immediately.

    Returns:
        An array of shape (ranks * n, ...); of shape (ranks,) for scalars.
    """
    communicator, given = _begin(group, x)
    target = _output(communicator, out, given, x, _gathered(given, communicator.world_size))
    return _finish(communicator.all_gather(given, target, async_op=async_op), target, async_op, out)


def reduce_scatter(
    x: Array,
    op: str | PreMultipliedSum = "sum",
    group: str | None = None,
    out: Array | None = None,
    async_op: bool = False,
) -> Any:
    """Combines ``x`` of all ranks and gives rank r the r-th part along the first axis.

    Args:
        x: of shape (n, ...), n divisible by the number of ranks.
        op: "sum", "mean", "min", "max", "prod", or with NCCL a :class:`muster.PreMultipliedSum`.
        group: name of a group; None: all ranks.
        out: array of shape (n / ranks, ...) for the result. None for a new array.
        async_op: return a :class:`Pending` immediately.

    Returns:
        An array of shape (n / ranks, ...).
    """
    communicator, given = _begin(group, x)
    target = _output(communicator, out, given, x, _part("reduce_scatter", given, communicator.world_size))
    work = communicator.reduce_scatter(given, target, _op(op, communicator), async_op=async_op)
    return _finish(work, target, async_op, out)


def gather(
    x: Array, root: int = 0, group: str | None = None, out: Array | None = None, async_op: bool = False
) -> Any:
    """Like :func:`all_gather`, but only ``root`` (a rank within the group) gets the result.

    The others get None.
    """
    communicator, given = _begin(group, x)
    mine = communicator.rank == root
    shape = _gathered(given, communicator.world_size)
    target = _output(communicator, out, given, x, shape) if mine else None
    return _finish(communicator.gather(given, target, root, async_op=async_op), target, async_op, out)


def scatter(
    x: Array | None,
    root: int = 0,
    group: str | None = None,
    out: Array | None = None,
    async_op: bool = False,
) -> Any:
    """Gives rank r the r-th part along the first axis of ``x`` of ``root`` (a rank within the group).

    Args:
        x: of shape (n, ...), n divisible by the number of ranks. Ranks other than ``root`` may pass None if
            they pass ``out``; otherwise, only the shape and dtype of their x are used.
        root: the rank whose x is scattered.
        group: name of a group; None: all ranks.
        out: array of shape (n / ranks, ...) for the result. None for a new array.
        async_op: return a :class:`Pending` immediately.

    Returns:
        An array of shape (n / ranks, ...).
    """
    communicator = _communicator(group)
    if x is None and (out is None or communicator.rank == root):
        raise ArrayError("scatter needs x on its root, and x or out on the other ranks.")
    given = None
    if x is None:
        target = _writable(communicator, out)
    else:
        given = check_place(describe(x), communicator)
        target = _output(communicator, out, given, x, _part("scatter", given, communicator.world_size))
    sent = given if communicator.rank == root else None
    return _finish(communicator.scatter(sent, target, root, async_op=async_op), target, async_op, out)


def all_to_all(x: Array, group: str | None = None, out: Array | None = None, async_op: bool = False) -> Any:
    """Sends the j-th part of ``x`` to rank j; part i of the result comes from rank i.

    Args:
        x: of shape (n, ...), n divisible by the number of ranks.
        group: name of a group; None: all ranks.
        out: array of x's shape for the result; must not be x itself. None for a new array.
        async_op: return a :class:`Pending` immediately.

    Returns:
        An array of x's shape.
    """
    communicator, given = _begin(group, x)
    _part("all_to_all", given, communicator.world_size)
    target = _output(communicator, out, given, x)
    return _finish(communicator.all_to_all(given, target, async_op=async_op), target, async_op, out)


def send(x: Array, peer: int, group: str | None = None, async_op: bool = False) -> Any:
    """Sends ``x`` to rank ``peer`` of the group, which must call :func:`recv` with equal dtype and size."""
    communicator, given = _begin(group, x)
    return _finish(communicator.send(given, peer, async_op=async_op), None, async_op)


def recv(out: Array, peer: int, group: str | None = None, async_op: bool = False) -> Any:
    """Receives into ``out`` the array that rank ``peer`` of the group sends; returns ``out``."""
    communicator = _communicator(group)
    target = _writable(communicator, out)
    return _finish(communicator.recv(target, peer, async_op=async_op), target, async_op, out)


def neighbor_exchange(
    send: Mapping[int, Array], recv: Mapping[int, Array], group: str | None = None
) -> Mapping[int, Array]:
    """Sends arrays to some ranks and receives from others, in an order that avoids deadlocks.

    Every rank must call it, even with empty arguments. If rank a sends to b, rank b must receive from a, with
    the same dtype and size. Arrays on GPUs are exchanged in one launch, arrays on the CPU one by one.

    Args:
        send: the array to send to each rank of the group, by its rank there.
        recv: the array to fill from each rank of the group, by its rank there.
        group: name of a group; None: all ranks.

    Returns:
        ``recv``.
    """
    communicator = _communicator(group)
    own = communicator.rank
    messages = [((own, peer), check_place(describe(x), communicator)) for peer, x in send.items()]
    messages += [((peer, own), _writable(communicator, x)) for peer, x in recv.items()]
    on_gpus = any(array.device != HOST for _, array in messages)
    with communicator.group() if on_gpus else contextlib.nullcontext():
        # All ranks use the same order, by (from, to), so both ends of the first remaining message are ready.
        for (source, peer), array in sorted(messages, key=lambda message: message[0]):
            if source == own:
                communicator.send(array, peer)
            else:
                communicator.recv(array, source)
    return recv


def barrier(group: str | None = None) -> None:
    """Returns when every rank of the group has called it."""
    _communicator(group).barrier()


@contextlib.contextmanager
def group(name: str | None = None) -> Iterator[None]:
    """Starts all collectives of one group in the block together, as one launch, when the block ends.

    With NCCL only. This saves a launch for each collective, and a send and a receive cannot block each
    other::

        with muster.group():
            muster.send(right, (rank + 1) % size)
            muster.recv(left, (rank - 1) % size)

    Results may be used after the block, on the stream that was current in it. ``async_op`` is refused inside.

    Args:
        name: name of the group; None for all ranks.

    Raises:
        CommunicatorError: this backend starts each collective separately.
    """
    with _communicator(name).group():
        yield


# ---------------------------------------------------------------- ranks and groups


def get_rank(group: str | None = None) -> int:
    """Returns this worker's rank within a group; None: among all."""
    return current().rank if group is None else _communicator(group).rank


def get_group_size(group: str | None = None) -> int:
    """Returns the number of ranks in a group; None: in the whole job."""
    return current().world_size if group is None else len(current().groups.world_ranks(group))


def get_local_rank() -> int:
    """Returns this worker's rank among those of its host."""
    return current().local_rank


def get_local_rank_size() -> int:
    """Returns the number of workers on this host."""
    return current().local_world_size


def get_local_size() -> int:
    """Returns the number of workers on this host; another name of :func:`get_local_rank_size`."""
    return current().local_world_size


def create_group(name: str, ranks: Sequence[int]) -> None:
    """Creates a named group. Every rank of the job must call it with the same arguments, in the same order.

    Groups are recreated by ``session.rejoin()``. A worker that is new in the job calls this right after
    ``init``, as the others did.

    Args:
        name: the group's name, which must be unique.
        ranks: world ranks; their order is the rank order of the group.

    Raises:
        GroupError: the name is taken, or the ranks are not distinct ranks of the job.
    """
    current().groups.create(name, ranks)


def destroy_group(name: str) -> None:
    """Destroys a group; every rank of it must call this.

    Raises:
        GroupError: there is no such group, or it is the world.
    """
    current().groups.destroy(name)


def get_world_rank_from_group_rank(group: str, group_rank: int) -> int:
    """Returns the world rank of a group's rank.

    Raises:
        GroupError: there is no such group or rank.
    """
    ranks = current().groups.world_ranks(group)
    if not 0 <= group_rank < len(ranks):
        raise GroupError(f"The group {group!r} has the ranks 0 to {len(ranks) - 1}, not {group_rank}.")
    return ranks[group_rank]


def get_group_rank_from_world_rank(world_rank: int, group: str) -> int:
    """Returns the rank within a group of a world rank.

    Raises:
        GroupError: there is no such group, or that rank is not in it.
    """
    ranks = current().groups.world_ranks(group)
    if world_rank not in ranks:
        raise GroupError(f"World rank {world_rank} is not in the group {group!r} of ranks {list(ranks)}.")
    return ranks.index(world_rank)


# ---------------------------------------------------------------- helpers


def _communicator(group: str | None) -> Communicator:
    return current().group(group)


def _begin(group: str | None, x: Array) -> tuple[Communicator, Description]:
    communicator = _communicator(group)
    return communicator, check_place(describe(x), communicator)


_OPS = {op.value: op for op in ReduceOp}


def _op(op: str | PreMultipliedSum, communicator: Communicator) -> Any:
    if not isinstance(op, PreMultipliedSum):
        return _OPS.get(op) or ReduceOp.of(op)
    if not communicator.pre_multiplies:
        raise ArrayError(
            f'The backend "{communicator.name}" knows no PreMultipliedSum.',
            remedy=f'Multiply x by {op.factor:g} yourself, and use op="sum".',
        )
    return op


def _gathered(x: Description, size: int) -> tuple[int, ...]:
    shape = x.shape or (1,)
    return (size * shape[0], *shape[1:])


def _part(name: str, x: Description, size: int) -> tuple[int, ...]:
    shape = x.shape
    if not shape or shape[0] % size:
        raise ArrayError(f"{name} needs a first axis divisible by the {size} ranks; x has the shape {shape}.")
    return (shape[0] // size, *shape[1:])


def _writable(communicator: Communicator, out: Array) -> Description:
    target = check_place(describe(out, "out"), communicator, "out")
    if target.is_made:
        raise ArrayError(f"out is a {kind_of(out)}, which cannot be filled.", remedy="Give an array.")
    return target


def _output(
    communicator: Communicator,
    out: Array | None,
    like: Description,
    x: Array,
    shape: tuple[int, ...] | None = None,
) -> Description:
    """Returns ``out`` if it fits, else a new array of x's kind, dtype and device."""
    shape = like.shape if shape is None else shape
    if out is None:
        return like.new(shape)
    target = like if out is x and not like.is_made else _writable(communicator, out)
    if target.shape != shape or target.dtype != like.dtype:
        raise ArrayError(
            f"out must have the shape {shape} and dtype {like.dtype};"
            f" it has {target.shape} and {target.dtype}."
        )
    return target


def _finish(work: Work, target: Description | None, async_op: bool, out: Array | None = None) -> Any:
    """Returns the result or a handle for it; the result is the caller's ``out`` if that was given."""
    result = None if target is None else target.array if out is None else out
    return Pending(work, result) if async_op else result
