"""Flat gradient buckets for torch: where gradients lie while they travel, and the views the optimizer sees.

A bucket's flat tensor holds its parameters' gradients one after the other and, behind them, one flag per
parameter: 1 where this rank has a gradient. The flags are reduced with the gradients, so that a parameter
that no rank used differs from one that only this rank did not use, at no extra collective. The last
bucket also has one number per rank, in which each rank says how many training passes it has not finished.

On a CPU a copy costs more than a collective's beginning. So a large gradient is reduced there where autograd
has put it; the flat tensor has its flag, and no place for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from muster.errors import ArrayError
from muster.torch.flat import is_dense, kind_text, padded, views_of
from muster.training.buckets import Bucket, ParameterSpec, plan_buckets


class GradientBucket:
    """One bucket.

    Args:
        parameters: the parameters, in the bucket's order.
        wire_dtype: dtype in which gradients travel, but for complex ones; None: their own.
        device: where an empty bucket is; others are where their parameters are.
        ranks: how many numbers travel behind the flags, one per rank.
        in_place_bytes: gradients of at least this size are reduced where they are, which goes with neither a
            wire dtype nor masters; None: none.

    Attributes:
        in_place: those of this pass, flat, from :meth:`fill` to :meth:`finish`.
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        *,
        wire_dtype: Any | None,
        device: Any = None,
        ranks: int = 0,
        in_place_bytes: int | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self._dtype = self.parameters[0].dtype if self.parameters else torch.float32
        self._device = self.parameters[0].device if self.parameters else device
        self._large = {
            index: (parameter.dtype, parameter.device, parameter.stride())
            for index, parameter in enumerate(self.parameters)
            if in_place_bytes is not None and parameter.nbytes >= in_place_bytes and is_dense(parameter)
        }
        self._packed = [p for index, p in enumerate(self.parameters) if index not in self._large]
        self.size = sum(padded(parameter.numel()) for parameter in self._packed)
        self.in_place: list[Any] = []
        self._wire_dtype = wire_dtype
        self.allocate(ranks)
        self.missing: list[int] = []
        self._unused: frozenset[int] = frozenset()
        self.master: Any = None

    def allocate(self, ranks: int) -> None:
        """Makes the flat tensors, with a number for each of the ranks; gradients become others."""
        count = len(self.parameters)
        self.flat = torch.zeros(self.size + count + ranks, dtype=self._dtype, device=self._device)
        compressed = self._wire_dtype not in (None, self._dtype) and not self._dtype.is_complex
        self.wire = torch.zeros_like(self.flat, dtype=self._wire_dtype) if compressed else self.flat
        self.views = self._places(self.flat)
        self.wire_views = self._places(self.wire) if compressed else self.views
        self.flags, self.numbers = self.wire[self.size :].split([count, ranks])

    def _places(self, flat: Any) -> list[Any]:
        """Each parameter's view into ``flat``; None for one that has no place there."""
        views = iter(views_of(flat, self._packed))
        return [None if index in self._large else next(views) for index in range(len(self.parameters))]

    def fill(self, scale: Any | None) -> list[Any]:
        """Packs the gradients there are, and zeros for the others, on the current stream.

        Large ones that stay where they are get ready there.

        Args:
            scale: 0-dim tensor by which this rank's gradients are multiplied; None: 1.

        Returns:
            The gradients that were packed, whose places the views have taken: made on another stream, they
            must not be reused before this one has read them.

        Raises:
            ArrayError: a gradient is sparse, or of another dtype or device than before.
        """
        targets, sources = [], []
        self.in_place = []
        self.missing = [index for index, each in enumerate(self.parameters) if each.grad is None]
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None and index not in self._large:
                continue
            if gradient is not None and gradient.layout is not torch.strided:
                raise ArrayError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse",
                    remedy="Sparse are only gradients of Embedding and EmbeddingBag layers with sparse=True.",
                )
            if index in self._large:
                self.in_place.append(self._flat_gradient(parameter, index))
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
            if zeros := [self.wire_views[index] for index in self.missing if index not in self._large]:
                torch._foreach_zero_(zeros)
            if sources:
                torch._foreach_copy_(targets, sources)
        self.flags.fill_(1)
        for index in self.missing:
            self.flags[index].zero_()
        if scale is not None:
            for part in (self.wire[: self.size], *self.in_place):
                part.mul_(scale)
        return sources

    def _flat_gradient(self, parameter: Any, index: int) -> Any:
        """A large gradient, flat; a new one where there is none, or it lies otherwise than its parameter."""
        dtype, device, strides = self._large[index]
        if (parameter.dtype, parameter.device, parameter.stride()) != self._large[index]:
            raise _converted(parameter, torch.empty(parameter.shape, dtype=dtype, device=device))
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = torch.zeros_like(parameter)
        elif gradient.stride() != strides or gradient.requires_grad:
            parameter.grad = torch.empty_like(parameter).copy_(gradient.detach())
        return parameter.grad.as_strided((parameter.numel(),), (1,))

    def _replace(self, parameter: Any, index: int) -> None:
        try:
            parameter.grad = self.views[index] if self.master is None else None
        except RuntimeError as error:
            raise _converted(parameter, self.views[index]) from error

    def unpack(self) -> None:
        """After the reduction: gradients in their own dtype, on the current stream."""
        if self.wire is not self.flat:
            self.flat.copy_(self.wire)

    def finish(self, *, capturing: bool = False) -> None:
        """Hands the views to the parameters; those without a gradient on any rank get none.

        Args:
            capturing: nothing can be read now; what earlier steps have shown holds.
        """
        unused = self._unused_now(capturing)
        self.forget()
        if self.master is not None:
            self.master.grad = self.flat[: self.size]
        for index, parameter in enumerate(self.parameters):
            if index in unused or self.master is not None:
                parameter.grad = None
            elif index not in self._large:
                parameter.grad = self.views[index]

    def _unused_now(self, capturing: bool) -> frozenset[int]:
        """Positions of what no rank has a gradient of; reads the device only if one is missing here."""
        if not self.missing:
            return frozenset()
        if not capturing:
            flags = self.flags.tolist()
            self._unused = frozenset(index for index in self.missing if flags[index] == 0)
        return self._unused

    def forget(self) -> None:
        """Lets go of gradients that are reduced where they are."""
        self.in_place = []


def _converted(parameter: Any, wrapped: Any) -> ArrayError:
    return ArrayError(
        f"a parameter of shape {tuple(parameter.shape)} was {kind_text(wrapped)} when it was wrapped, and now"
        f" is {kind_text(parameter)}",
        remedy="Convert or move the module before you wrap it.",
    )


def make_buckets(
    named: Sequence[tuple[str, Any]],
    *,
    bucket_bytes: int,
    first_bytes: int,
    last_bytes: int,
    wire_dtype: Any | None,
    device: Any,
    ranks: int,
    in_place_bytes: int | None = None,
) -> list[GradientBucket]:
    """Packs parameters, given in the order in which their gradients become ready, into buckets.

    The last ``last_bytes`` of them form buckets of their own: nothing is left to hide their reduction behind,
    so there should be little of it. The last bucket has a number for each of ``ranks``; there is always one.
    """
    if not named:
        return [GradientBucket([], wire_dtype=None, device=device, ranks=ranks)]
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
            device=device,
            ranks=ranks if bucket is plan[-1] else 0,
            in_place_bytes=in_place_bytes,
        )
        for bucket in plan
    ]
