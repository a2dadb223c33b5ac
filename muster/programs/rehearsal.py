"""Computes the results of collectives for a single rank, as if all ranks gave the same inputs.

A process that takes a lost rank's place builds its modules while the others are training, so none of its
collectives has a counterpart. The state that it then gets from the others overwrites what it computed with
these results; they only serve to create the same objects as on the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = Any


class RehearsedBackend:
    """The backend that a rehearsing group reports to torch."""

    supports_coalescing = False

    def name(self) -> str:
        """See torch."""
        return "rehearsal"


def rehearse(name: str, args: Sequence[Any], rank: int, size: int) -> None:
    """Writes the results of a process group's operation into its output tensors.

    Args:
        name: the process group's method.
        args: its arguments, the output tensors first.
        rank: this process's rank within the group.
        size: the group's world size.
    """
    if name in ("barrier", "send"):
        return
    outputs = args[0]
    with torch.no_grad():
        if name in ("allgather", "gather"):
            for parts, given in zip(outputs, args[1], strict=False):
                for part in parts:
                    part.copy_(given)
        elif name == "allgather_coalesced":
            for parts in outputs:
                _copy_all(parts, args[1])
        elif name in ("_allgather_base", "all_gather_single"):
            _repeat(outputs, args[1], size)
        elif name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
            for output, given in zip(outputs, args[1], strict=True):
                _repeat(output, given, size)
        elif name in ("reduce_scatter", "scatter"):
            for output, parts in zip(outputs, args[1], strict=False):
                output.copy_(parts[rank])
        elif name in ("_reduce_scatter_base", "reduce_scatter_single"):
            _take_part(outputs, args[1], rank, size)
        elif name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
            for output, given in zip(outputs, args[1], strict=True):
                _take_part(output, given, rank, size)
        elif name == "alltoall":
            _copy_all(outputs, args[1])
        elif name in ("alltoall_base", "all_to_all_single"):
            _copy_all([outputs], [args[1]])
        elif name in ("recv", "recv_anysource"):
            for output in outputs:
                output.fill_(1)  # a pipeline's stages send 1 to say that all shapes are known


def _repeat(output: Tensor, given: Tensor, size: int) -> None:
    output.view(size, -1).copy_(given.clone().reshape(1, -1))  # FSDP2's input is a part of its output


def _take_part(output: Tensor, given: Tensor, rank: int, size: int) -> None:
    output.view(-1).copy_(given.reshape(size, -1)[rank].clone())


def _copy_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Copies inputs to outputs; writes zeros if shapes differ between ranks, as they are never read."""
    for output, given in zip(outputs, inputs, strict=True):
        if output.shape == given.shape:
            output.copy_(given)
        else:
            output.zero_()
