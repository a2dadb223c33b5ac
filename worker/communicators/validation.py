"""Checks that all communicators share, with refusals in the same words. All come before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from muster.worker.communicators.base import Membership, ReduceOp
from muster.worker.errors import ArrayError


def check_rank(membership: Membership, rank: int, name: str) -> None:
    """Checks that ``rank``, called ``name`` in the message, is one of the group.

    Raises:
        ArrayError: it is not.
    """
    legal = hasattr(rank, "__index__") and 0 <= rank < membership.world_size
    if not legal:
        last = membership.world_size - 1
        raise ArrayError(f"{name} is {rank!r}; the group {membership.group!r} has ranks 0 to {last}.")


def check_peer(membership: Membership, peer: int, *, itself: bool = False) -> None:
    """Checks that ``peer`` is another rank of the group or, with ``itself``, any rank of it.

    Raises:
        ArrayError: it is not.
    """
    check_rank(membership, peer, "peer")
    if peer == membership.rank and not itself:
        raise ArrayError(f"Rank {peer} cannot send to or receive from itself.")


def part_of(membership: Membership, group: str, ranks: Sequence[int]) -> Membership | None:
    """The membership of a subset, in the order of ``ranks``; None on ranks that are not in it.

    Raises:
        ArrayError: a rank is not one of the group, or stands twice, or there is none.
    """
    for rank in ranks:
        check_rank(membership, rank, "a rank of the group")
    if not ranks or len(set(ranks)) != len(ranks):
        raise ArrayError(f"The group {group!r} needs each of its ranks once, and one at least.")
    if membership.rank not in ranks:
        return None
    peers = tuple(replace(membership.peers[rank], rank=i) for i, rank in enumerate(ranks))
    return replace(membership, group=group, rank=list(ranks).index(membership.rank), peers=peers)


def check_op(op: str) -> ReduceOp:
    """The operation of this name.

    Raises:
        ArrayError: there is none.
    """
    try:
        return ReduceOp(op)
    except ValueError:
        legal = ", ".join(each.value for each in ReduceOp)
        raise ArrayError(f"op must be one of {legal}; it is {op!r}.") from None


def overlapping() -> ArrayError:
    """The error of two arrays that share memory otherwise than in place."""
    return ArrayError("send and recv overlap in part.", remedy="Use one array in place, or two apart.")


def undefined_mean(dtype: str) -> ArrayError:
    """The error of a mean of whole numbers, which would have to be rounded."""
    return ArrayError(f"The mean of {dtype} is not defined.", remedy="Use sum, or a float dtype.")
