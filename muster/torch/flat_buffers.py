"""A module's buffers in flat tensors, so that few broadcasts keep them equal to rank 0's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from muster.errors import ArrayError
from muster.torch.flat import kind_text, padded, views_of


class FlatBuffers:
    """A module's buffers of one dtype, moved into one flat tensor, so that one broadcast sends them all."""

    def __init__(self, shared: Sequence[Sequence[tuple[Any, str]]]) -> None:
        """Takes each buffer with all (module, name) pairs under which it is registered."""
        tensors = [owners[0][0]._buffers[owners[0][1]] for owners in shared]
        room = sum(padded(tensor.numel()) for tensor in tensors)
        self.flat = torch.zeros(room, dtype=tensors[0].dtype, device=tensors[0].device)
        self._entries = []
        for owners, tensor, part in zip(shared, tensors, views_of(self.flat, tensors), strict=True):
            part.copy_(tensor.detach())
            # The tensor objects stay, because a module may hold them under other names too. They do not
            # become views of one tensor either: autograd would take an update of one for a change of all.
            tensor.data = part
            self._entries += [(owner, name, tensor) for owner, name in owners]

    def gather(self) -> list[Any]:
        """Copies buffers that the module has replaced since into the flat tensor, and returns them.

        Raises:
            ArrayError: a buffer has another dtype, shape or device now, or is gone.
        """
        replaced = []
        for owner, name, kept in self._entries:
            current = owner._buffers.get(name)
            if current is kept:
                continue
            if kind_text(current) != kind_text(kept):
                raise ArrayError(
                    f"the buffer {name!r} of a {type(owner).__name__} was {kind_text(kept)} when it was"
                    f" wrapped, and now is {kind_text(current)}",
                    remedy="Wrap the module again after such a change, or leave its buffers alone with"
                    " broadcast_buffers=False.",
                )
            kept.detach().copy_(current.detach())
            owner._buffers[name] = kept
            replaced.append(current)
        return replaced


def flat_buffers(module: Any) -> list[FlatBuffers]:
    """Moves all buffers of ``module`` into flat tensors, one per dtype."""
    owners: dict[int, list[tuple[Any, str]]] = {}
    groups: dict[Any, list[list[tuple[Any, str]]]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or not buffer.numel():
                continue
            if id(buffer) not in owners:
                owners[id(buffer)] = []
                groups.setdefault((buffer.dtype, buffer.device), []).append(owners[id(buffer)])
            owners[id(buffer)].append((owner, name))
    return [FlatBuffers(shared) for shared in groups.values()]
