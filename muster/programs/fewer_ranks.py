"""Adapts a process group's operations to generations that lack some of its ranks: means stay means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from muster.errors import WorkerError

_SERVED = frozenset(("allreduce", "allreduce_coalesced", "allgather", "barrier", "broadcast", "send", "recv"))


class FewerRanks:
    """Turns the arguments of a group's operations into those for a group of fewer ranks.

    The inputs of a floating-point sum are scaled by the whole group's size over the number of present ranks,
    as if each absent rank had contributed the others' mean. So a sum that is divided by the whole world size,
    before or after the all_reduce, as in DDP and FSDP2, is the mean over the present ranks. In gathered
    results, the parts of absent ranks are zeros. A broadcast from an absent rank comes from the first present
    one instead.

    Args:
        there: the present ranks of the whole group, in order.
        size: the whole group's world size.
    """

    def __init__(self, there: Sequence[int], size: int) -> None:
        self._there, self._size = list(there), size

    def arguments(self, name: str, args: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the arguments for the group of the present ranks; scales the given tensors in place.

        Args:
            name: the process group's method.
            args: the arguments for the whole group.

        Raises:
            WorkerError: this operation needs all ranks.
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
