"""Operations of a process group some of whose ranks are not there: means stay means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from muster.errors import WorkerError

_SERVED = frozenset(("allreduce", "allreduce_coalesced", "allgather", "barrier", "broadcast", "send", "recv"))


class FewerRanks:
    """Turns the arguments of a group's operations into those of a group of fewer ranks.

    A sum of floating-point numbers is scaled up as if who is absent had given the mean of the others: so
    what is divided by the world size afterwards, or was before, as DDP and FSDP2 do, is the mean of those who
    are there. Of what is gathered, the absent ranks' parts are zeros. What an absent rank would broadcast
    comes from the first who is there.

    Args:
        there: which ranks of the whole group are there, in order.
        size: of the whole group.
    """

    def __init__(self, there: Sequence[int], size: int) -> None:
        self._there, self._size = list(there), size

    def arguments(self, name: str, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments for the group of those who are there.

        Args:
            name: the process group's method.
            args: as for the whole group.

        Raises:
            WorkerError: this operation cannot be done without all ranks.
        """
        given = list(args)
        if name not in _SERVED:
            raise WorkerError(
                f"{name} needs all ranks of its process group, and some are missing.",
                remedy="Only DDP and the replicas of FSDP2 go on with fewer ranks.",
            )
        if name in ("allreduce", "allreduce_coalesced"):
            self._scale(given)
        elif name == "broadcast" and len(given) > 1:
            root = given[1].rootRank
            given[1].rootRank = self._there.index(root) if root in self._there else 0
        elif name == "allgather":
            given[0] = [self._gathered(outputs) for outputs in given[0]]
        elif name in ("send", "recv"):
            given[1] = self._there.index(given[1])
        return tuple(given)

    def _scale(self, given: list[Any]) -> None:
        operation = given[1].reduceOp if len(given) > 1 else dist.ReduceOp.SUM
        if operation != dist.ReduceOp.SUM:
            return
        with torch.no_grad():
            for tensor in given[0]:
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.mul_(self._size / len(self._there))

    def _gathered(self, outputs: Sequence[Any]) -> list[Any]:
        for at, each in enumerate(outputs):
            if at not in self._there:
                each.zero_()
        return [outputs[at] for at in self._there]
