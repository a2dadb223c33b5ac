"""Flat gradient buckets for torch: where gradients lie while they travel, and the views the optimizer sees.

A bucket's flat tensor holds its parameters' gradients one after the other and, behind them, one flag per
parameter: 1 where this rank has a gradient. The flags are reduced with the gradients, so that a parameter
that no rank used can be told from one that only this rank did not use, at no extra collective. The last
bucket also has one number per rank, in which each rank says how many training passes it has not finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from muster.worker.errors import ArrayError
from muster.worker.training.buckets import Bucket, ParameterSpec, plan_buckets

ALIGNMENT = 64
"""Elements. Kernels for tensor cores need addresses aligned to 16 bytes, or fall far behind."""

_DENSE_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


class GradientBucket:
    """One bucket.

    Args:
        parameters: the parameters, in the bucket's order.
        wire_dtype: dtype in which gradients travel, but for complex ones; None: their own.
        ranks: how many numbers travel behind the flags, one per rank.
    """

    def __init__(self, parameters: Sequence[Any], *, wire_dtype: Any | None, ranks: int = 0) -> None:
        self.parameters = list(parameters)
        self.size = sum(_padded(parameter.numel()) for parameter in self.parameters)
        self._wire_dtype = wire_dtype
        self.allocate(ranks)
        self.waiting = len(self.parameters)
        self.missing: list[int] = []
        self.master: Any = None

    def allocate(self, ranks: int) -> None:
        """Makes the flat tensors, with a number for each of so many ranks; gradients become others."""
        first, count = self.parameters[0], len(self.parameters)
        self.flat = torch.zeros(self.size + count + ranks, dtype=first.dtype, device=first.device)
        compressed = self._wire_dtype not in (None, first.dtype) and not first.is_complex()
        self.wire = torch.zeros_like(self.flat, dtype=self._wire_dtype) if compressed else self.flat
        self.views = views_of(self.flat, self.parameters)
        self.wire_views = views_of(self.wire, self.parameters) if compressed else self.views
        self.flags, self.numbers = self.wire[self.size :].split([count, ranks])

    def fill(self, scale: Any | None) -> list[Any]:
        """Packs the gradients there are, and zeros for the others, on the current stream.

        Args:
            scale: 0-dim tensor by which this rank's gradients are multiplied; None: 1.

        Returns:
            The gradients that were packed, whose places the views have taken: made on another stream, they
            must not be reused before this one has read them.

        Raises:
            ArrayError: a gradient is sparse, or of another dtype or device than before.
        """
        targets, sources = [], []
        self.missing = []
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None:
                self.missing.append(index)
            elif gradient.layout is not torch.strided:
                raise ArrayError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse",
                    remedy="Make its layer with sparse=False.",
                )
            elif gradient.data_ptr() != self.wire_views[index].data_ptr():
                targets.append(self.wire_views[index])
                sources.append(gradient)
                self._replace(parameter, index)
        if self.master is not None and self.master.grad is not None:
            # Averaged before and not cleared: what comes now is added, as to any gradient.
            self.wire[: self.size].copy_(self.master.grad)
            if sources:
                torch._foreach_add_(targets, sources)
        else:
            if self.missing:
                torch._foreach_zero_([self.wire_views[index] for index in self.missing])
            if sources:
                torch._foreach_copy_(targets, sources)
        self.flags.fill_(1)
        for index in self.missing:
            self.flags[index].zero_()
        if scale is not None:
            self.wire[: self.size].mul_(scale)
        return sources

    def _replace(self, parameter: Any, index: int) -> None:
        try:
            parameter.grad = self.views[index] if self.master is None else None
        except RuntimeError as error:
            raise ArrayError(
                f"a parameter of shape {tuple(parameter.shape)} was {_kind(self.views[index])} when it was"
                f" wrapped, and now is {_kind(parameter)}",
                remedy="Convert or move the module before you wrap it.",
            ) from error

    def unpack(self) -> None:
        """After the reduction: gradients in their own dtype, on the current stream."""
        if self.wire is not self.flat:
            self.flat.copy_(self.wire)

    def finish(self, *, unused: frozenset[int]) -> None:
        """Hands the views to the parameters; those in ``unused`` (by position) get no gradient."""
        self.waiting = len(self.parameters)
        if self.master is not None:
            self.master.grad = self.flat[: self.size]
        for index, parameter in enumerate(self.parameters):
            alone = index in unused or self.master is not None
            parameter.grad = None if alone else self.views[index]


def views_of(flat: Any, tensors: Sequence[Any]) -> list[Any]:
    """Views into ``flat``, one after the other, with each tensor's shape and (if dense) memory layout.

    Each begins at a multiple of ``ALIGNMENT`` elements; ``flat`` must have room for the gaps.
    """
    views, offset = [], 0
    for tensor in tensors:
        strides = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        views.append(flat.as_strided(tensor.shape, strides, offset))
        offset += _padded(tensor.numel())
    return views


def _padded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def is_dense(tensor: Any) -> bool:
    """Whether the tensor fills its memory without gaps in one of torch's memory formats."""
    formats = _DENSE_FORMATS[: 1 + (tensor.dim() == 4)] if tensor.dim() != 5 else _DENSE_FORMATS[::2]
    return any(tensor.is_contiguous(memory_format=layout) for layout in formats)


def make_buckets(
    named: Sequence[tuple[str, Any]],
    *,
    bucket_bytes: int,
    first_bytes: int,
    last_bytes: int,
    wire_dtype: Any | None,
    ranks: int,
) -> list[GradientBucket]:
    """Packs parameters, given in the order in which their gradients become ready, into buckets.

    The last ``last_bytes`` of them form buckets of their own: nothing is left to hide their reduction behind,
    so there should be little of it. The last bucket has a number for each of ``ranks``.
    """
    by_name = dict(named)
    specs = [ParameterSpec(name, p.numel(), f"{p.dtype} {p.device}", p.element_size()) for name, p in named]
    cut, tail = len(specs), 0
    while cut > 1 and tail + specs[cut - 1].size * specs[cut - 1].itemsize <= last_bytes:
        cut -= 1
        tail += specs[cut].size * specs[cut].itemsize
    plan: list[Bucket] = [
        *plan_buckets(specs[:cut], bucket_bytes=bucket_bytes, first_bytes=first_bytes),
        *plan_buckets(specs[cut:], bucket_bytes=bucket_bytes, first_bytes=bucket_bytes),
    ]
    return [
        GradientBucket(
            [by_name[slot.name] for slot in bucket.slots],
            wire_dtype=wire_dtype,
            ranks=ranks if bucket is plan[-1] else 0,
        )
        for bucket in plan
    ]


class FlatBuffers:
    """A module's buffers of one dtype, moved into one flat tensor, so that one broadcast sends them all."""

    def __init__(self, shared: Sequence[Sequence[tuple[Any, str]]]) -> None:
        """Each buffer is given by all (module, name) that it has."""
        tensors = [owners[0][0]._buffers[owners[0][1]] for owners in shared]
        room = sum(_padded(tensor.numel()) for tensor in tensors)
        self.flat = torch.zeros(room, dtype=tensors[0].dtype, device=tensors[0].device)
        self._entries = []
        for owners, tensor, part in zip(shared, tensors, views_of(self.flat, tensors), strict=True):
            part.copy_(tensor.detach())
            # The tensors stay the objects they are: a module may hold them under other names too. And they do
            # not become views, which autograd would all take for changed by each one's update.
            tensor.data = part
            self._entries += [(owner, name, tensor) for owner, name in owners]

    def gather(self) -> list[Any]:
        """Takes in buffers that the module has replaced since, and returns those.

        Raises:
            ArrayError: one became something else.
        """
        replaced = []
        for owner, name, kept in self._entries:
            current = owner._buffers.get(name)
            if current is kept:
                continue
            if _kind(current) != _kind(kept):
                raise ArrayError(
                    f"the buffer {name!r} of a {type(owner).__name__} was {_kind(kept)} when it was wrapped,"
                    f" and now is {_kind(current)}",
                    remedy="Wrap the module anew after such a change, or leave its buffers alone with"
                    " broadcast_buffers=False.",
                )
            kept.detach().copy_(current.detach())
            owner._buffers[name] = kept
            replaced.append(current)
        return replaced


def _kind(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return str(tensor)
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


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
