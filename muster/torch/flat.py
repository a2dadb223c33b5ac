"""Makes views into flat tensors, aligned and in the memory format of the tensors that they replace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from muster.training.parts import Box

ALIGNMENT = 64
"""Alignment of views, in elements: tensor-core kernels are far slower if not aligned to 16 bytes."""

_DENSE_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def views_of(flat: Any, tensors: Sequence[Any]) -> list[Any]:
    """Returns views into ``flat``, one after the other, with each tensor's shape and (if dense) layout.

    Each begins at a multiple of ``ALIGNMENT`` elements; ``flat`` must have room for the gaps.
    """
    views, offset = [], 0
    for tensor in tensors:
        strides = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        views.append(flat.as_strided(tensor.shape, strides, offset))
        offset += padded(tensor.numel())
    return views


def padded(count: int) -> int:
    """The number of elements, rounded up to a multiple of ``ALIGNMENT``."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def is_dense(tensor: Any) -> bool:
    """Whether the tensor fills its memory without gaps in one of torch's memory formats."""
    formats = _DENSE_FORMATS[: 1 + (tensor.dim() == 4)] if tensor.dim() != 5 else _DENSE_FORMATS[::2]
    return any(tensor.is_contiguous(memory_format=layout) for layout in formats)


def kind_text(tensor: Any) -> str:
    """Returns a tensor's dtype, shape and device in words."""
    if not isinstance(tensor, torch.Tensor):
        return str(tensor)
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def elements_within(flat: Any, box: Box, both: Box) -> Any:
    """Returns a view of the elements in ``both`` of a rank's flat tensor, which holds ``box``."""
    found = flat.view(-1)[box.start : box.start + box.numel].view(box.sizes)
    for dim, (outer, offset, size) in enumerate(zip(box.offsets, both.offsets, both.sizes, strict=True)):
        found = found.narrow(dim, offset - outer, size)
    return found
