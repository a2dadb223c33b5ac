"""Refusals that all communicators share, in the same words. All come before anything is sent."""

from __future__ import annotations

from worker.communicators.base import Membership, ReduceOp
from worker.errors import ArrayError


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


def undefined_mean(dtype: str) -> ArrayError:
    """The error of a mean of whole numbers, which would have to be rounded."""
    return ArrayError(f"The mean of {dtype} is not defined.", remedy="Use sum, or a float dtype.")
