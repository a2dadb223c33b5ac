"""Collectives and groups of the default session, for scripts: arrays in, arrays out.

Arrays are C-contiguous: NumPy with the backends ``tcp`` and ``gloo``; CuPy, torch or whatever has
``__cuda_array_interface__`` with ``nccl``. Numbers and lists become NumPy arrays. Every rank of a group
must call the same collectives in the same order with the same dtype and shape.

All of them raise, besides what they say:
    NotInitializedError: there is no session.
    ArrayError: the array cannot be used; raised before anything is sent.
    CollectiveMismatchError: the ranks disagree on what they called; names who called what.
    CollectiveTimeoutError: MS_COLLECTIVE_TIMEOUT is over; names the ranks waited for.
    MembershipChanged: the generation is over; call ``session.rejoin()``.
    GroupError: there is no such group, or this rank is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.communicators.base import Array, Communicator, ReduceOp, Work
from worker.errors import ArrayError, GroupError
from worker.process import current


class Pending:
    """A collective under way. ``result`` is the array that it fills; it is None where there is none."""

    def __init__(self, work: Work, result: Array | None) -> None:
        self._work = work
        self._result = result

    def done(self) -> bool:
        """Whether it has completed (well or not). Never blocks."""
        return self._work.done()

    def wait(self) -> Array | None:
        """Waits for the result and returns it.

        Raises:
            CommunicatorError: what the collective failed with.
            MembershipChanged: the generation is over.
        """
        self._work.wait()
        return self._result


# ---------------------------------------------------------------- collectives


def all_reduce(
    x: Array, op: str = "sum", group: str | None = None, out: Array | None = None, async_op: bool = False
) -> Any:
    """Combines ``x`` of all ranks, element by element; all ranks get the result.

    Args:
        x: any shape, the same on all ranks.
        op: "sum", "mean", "min", "max" or "prod".
        group: name of a group; None: all ranks.
        out: where the result goes, of x's shape and dtype; may be x itself. None: a new array.
        async_op: return at once with a :class:`Pending`.

    Returns:
        The result, of x's shape and dtype; with ``async_op`` a :class:`Pending` of it.
    """
    communicator, x = _communicator(group), _array(x)
    out = _output(out, x, _shape(x))
    return _finish(communicator.all_reduce(x, out, _op(op), async_op=async_op), out, async_op)


def reduce(
    x: Array,
    root: int = 0,
    op: str = "sum",
    group: str | None = None,
    out: Array | None = None,
    async_op: bool = False,
) -> Any:
    """As :func:`all_reduce`, but only ``root`` (a rank within the group) gets the result; others None."""
    communicator, x = _communicator(group), _array(x)
    out = _output(out, x, _shape(x)) if communicator.rank == root else None
    return _finish(communicator.reduce(x, out, _op(op), root, async_op=async_op), out, async_op)


def broadcast(x: Array, root: int = 0, group: str | None = None, async_op: bool = False) -> Any:
    """Copies ``x`` of ``root`` (a rank within the group) into ``x`` of all ranks, in place; returns it."""
    communicator, x = _communicator(group), _array(x)
    return _finish(communicator.broadcast(x, root, async_op=async_op), x, async_op)


def all_gather(x: Array, group: str | None = None, out: Array | None = None, async_op: bool = False) -> Any:
    """Puts the ranks' ``x`` one after the other along the first axis; all ranks get the result.

    Args:
        x: of shape (n, ...), or a scalar.
        group: name of a group; None: all ranks.
        out: of shape (ranks * n, ...). None: a new array.
        async_op: return at once with a :class:`Pending`.

    Returns:
        An array of shape (ranks * n, ...); of shape (ranks,) for scalars.
    """
    communicator, x = _communicator(group), _array(x)
    out = _output(out, x, _gathered(x, communicator.world_size))
    return _finish(communicator.all_gather(x, out, async_op=async_op), out, async_op)


def reduce_scatter(
    x: Array, op: str = "sum", group: str | None = None, out: Array | None = None, async_op: bool = False
) -> Any:
    """Combines ``x`` of all ranks and gives rank r the r-th part along the first axis.

    Args:
        x: of shape (n, ...), n divisible by the number of ranks.
        op: "sum", "mean", "min", "max" or "prod".
        group: name of a group; None: all ranks.
        out: of shape (n / ranks, ...). None: a new array.
        async_op: return at once with a :class:`Pending`.

    Returns:
        An array of shape (n / ranks, ...).
    """
    communicator, x = _communicator(group), _array(x)
    out = _output(out, x, _part("reduce_scatter", x, communicator.world_size))
    return _finish(communicator.reduce_scatter(x, out, _op(op), async_op=async_op), out, async_op)


def gather(
    x: Array, root: int = 0, group: str | None = None, out: Array | None = None, async_op: bool = False
) -> Any:
    """As :func:`all_gather`, but only ``root`` (a rank within the group) gets the result; others None."""
    communicator, x = _communicator(group), _array(x)
    out = _output(out, x, _gathered(x, communicator.world_size)) if communicator.rank == root else None
    return _finish(communicator.gather(x, out, root, async_op=async_op), out, async_op)


def scatter(
    x: Array | None,
    root: int = 0,
    group: str | None = None,
    out: Array | None = None,
    async_op: bool = False,
) -> Any:
    """Gives rank r the r-th part along the first axis of ``x`` of ``root`` (a rank within the group).

    Args:
        x: of shape (n, ...), n divisible by the number of ranks. Other ranks than ``root`` may give None if
            they give ``out``; what they give tells only shape and dtype.
        root: whose x is scattered.
        group: name of a group; None: all ranks.
        out: of shape (n / ranks, ...). None: a new array.
        async_op: return at once with a :class:`Pending`.

    Returns:
        An array of shape (n / ranks, ...).
    """
    communicator = _communicator(group)
    if x is None and (out is None or communicator.rank == root):
        raise ArrayError("scatter needs x on its root, and x or out on the other ranks.")
    if x is not None:
        x = _array(x)
        out = _output(out, x, _part("scatter", x, communicator.world_size))
    send = x if communicator.rank == root else None
    return _finish(communicator.scatter(send, out, root, async_op=async_op), out, async_op)


def all_to_all(x: Array, group: str | None = None, out: Array | None = None, async_op: bool = False) -> Any:
    """Sends the j-th part of ``x`` to rank j; part i of the result comes from rank i.

    Args:
        x: of shape (n, ...), n divisible by the number of ranks.
        group: name of a group; None: all ranks.
        out: of x's shape; not x itself. None: a new array.
        async_op: return at once with a :class:`Pending`.

    Returns:
        An array of x's shape.
    """
    communicator, x = _communicator(group), _array(x)
    _part("all_to_all", x, communicator.world_size)
    out = _output(out, x, _shape(x))
    return _finish(communicator.all_to_all(x, out, async_op=async_op), out, async_op)


def send(x: Array, peer: int, group: str | None = None, async_op: bool = False) -> Any:
    """Sends ``x`` to rank ``peer`` of the group, which calls :func:`recv` with the same dtype and size."""
    return _finish(_communicator(group).send(_array(x), peer, async_op=async_op), None, async_op)


def recv(out: Array, peer: int, group: str | None = None, async_op: bool = False) -> Any:
    """Receives into ``out`` what rank ``peer`` of the group sends; returns it."""
    return _finish(_communicator(group).recv(out, peer, async_op=async_op), out, async_op)


def barrier(group: str | None = None) -> None:
    """Returns when every rank of the group has called it."""
    _communicator(group).barrier()


# ---------------------------------------------------------------- ranks and groups


def get_rank(group: str | None = None) -> int:
    """This worker's rank within a group; None: among all."""
    return _communicator(group).rank


def get_group_size(group: str | None = None) -> int:
    """How many ranks a group has; None: all."""
    return len(current().groups.world_ranks(group))


def get_local_rank() -> int:
    """This worker's rank among those of its host."""
    return current().local_rank


def get_local_rank_size() -> int:
    """How many workers there are on this host."""
    return current().local_world_size


def create_group(name: str, ranks: Sequence[int]) -> None:
    """Makes a named group. Every rank of the job calls it, with the same arguments, in the same order.

    Groups are made anew after ``session.rejoin()``; a worker that is new in the job calls this right after
    ``init``, as the others once did.

    Args:
        name: unique.
        ranks: world ranks; their order is the rank order of the group.

    Raises:
        GroupError: the name is taken, or the ranks are not distinct ranks of the job.
    """
    current().groups.create(name, ranks)


def destroy_group(name: str) -> None:
    """Ends a group; every rank of it calls this.

    Raises:
        GroupError: there is no such group, or it is the world.
    """
    current().groups.destroy(name)


def get_world_rank_from_group_rank(group: str, group_rank: int) -> int:
    """The world rank of a group's rank.

    Raises:
        GroupError: there is no such group or rank.
    """
    ranks = current().groups.world_ranks(group)
    if not 0 <= group_rank < len(ranks):
        raise GroupError(f"The group {group!r} has the ranks 0 to {len(ranks) - 1}, not {group_rank}.")
    return ranks[group_rank]


def get_group_rank_from_world_rank(world_rank: int, group: str) -> int:
    """The rank within a group of a world rank.

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


def _op(op: str) -> ReduceOp:
    try:
        return ReduceOp(op)
    except ValueError:
        legal = ", ".join(each.value for each in ReduceOp)
        raise ArrayError(f"op must be one of {legal}; it is {op!r}.") from None


def _array(x: Array) -> Array:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return x
    import numpy as np

    return np.asarray(x)


def _shape(x: Array) -> tuple[int, ...]:
    return tuple(x.shape)


def _gathered(x: Array, size: int) -> tuple[int, ...]:
    shape = _shape(x) or (1,)
    return (size * shape[0], *shape[1:])


def _part(name: str, x: Array, size: int) -> tuple[int, ...]:
    shape = _shape(x)
    if not shape or shape[0] % size:
        raise ArrayError(f"{name} needs a first axis divisible by the {size} ranks; x has the shape {shape}.")
    return (shape[0] // size, *shape[1:])


def _output(out: Array | None, like: Array, shape: tuple[int, ...]) -> Array:
    """``out`` if it fits, or a new array of x's kind, dtype and device."""
    if out is not None:
        if _shape(out) != shape or out.dtype != like.dtype:
            raise ArrayError(
                f"out must have the shape {shape} and dtype {like.dtype};"
                f" it has {_shape(out)} and {out.dtype}."
            )
        return out
    if type(like).__module__.partition(".")[0] == "torch":
        return like.new_empty(shape)
    if hasattr(like, "__cuda_array_interface__"):
        import cupy

        return cupy.empty(shape, like.dtype)
    import numpy as np

    return np.empty(shape, like.dtype)


def _finish(work: Work, result: Array | None, async_op: bool) -> Any:
    return Pending(work, result) if async_op else result
