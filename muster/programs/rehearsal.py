"""What collectives give a rank that is alone: the results that it would get if all ranks gave what it gives.

A process that takes a lost rank's place builds its modules while the others are training, so none of its
collectives has a counterpart. What it computes with these results is overwritten by the state that it gets
from the others; what matters is only that all objects come to exist as theirs did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = Any


class RehearsedBackend:
    """What torch hears of the backend of a group that answers by itself."""

    supports_coalescing = False

    def name(self) -> str:
        """See torch."""
        return "rehearsal"


def rehearse(name: str, args: Sequence[Any], rank: int, size: int) -> None:
    """Writes the results of an operation of a process group into the tensors given for them.

    Args:
        name: the process group's method.
        args: its arguments, those for the results first.
        rank: of this process within the group.
        size: of the group.
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
                output.fill_(1)  # by which a pipeline's stages tell each other that all know their shapes


def _repeat(output: Tensor, given: Tensor, size: int) -> None:
    output.view(size, -1).copy_(given.clone().reshape(1, -1))  # FSDP2 gives a part of the output


def _take_part(output: Tensor, given: Tensor, rank: int, size: int) -> None:
    output.view(-1).copy_(given.reshape(size, -1)[rank].clone())


def _copy_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Where the shapes differ by rank, zeros: nobody computes with them."""
    for output, given in zip(outputs, inputs, strict=True):
        if output.shape == given.shape:
            output.copy_(given)
        else:
            output.zero_()
