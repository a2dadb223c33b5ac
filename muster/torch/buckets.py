"""Flat gradient buckets for torch: the tensors that are reduced, and the views that the optimizer sees.

A bucket's flat tensor holds its parameters' gradients one after the other and, after them, one flag per
parameter: 1 if this rank has a gradient. The flags are reduced with the gradients. So without a further
collective, they distinguish a parameter that no rank used from a parameter that only this rank did not use.
The last bucket also has one number per rank: how many training passes that rank has left unfinished.

On a CPU a copy costs more than starting a collective. So there, large gradients are reduced in place, where
autograd has put them, and the flat tensor holds only their flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from muster.errors import ArrayError
from muster.torch.flat import is_dense, kind_text, padded, views_of
from muster.training.buckets import Bucket, ParameterSpec, plan_buckets


class GradientBucket:
    """Gradients that are reduced together, in a flat tensor.

    Args:
        parameters: the parameters, in the bucket's order.
        wire_dtype: dtype in which gradients are communicated, except complex ones; None: their own dtype.
        device: device of a bucket without parameters; other buckets are on their parameters' device.
        ranks: number of elements after the flags, one per rank.
        in_place_bytes: gradients of at least this size, in bytes, are reduced in place; None: no gradient is.
            Must be None with a wire dtype or master weights.

    Attributes:
        in_place: this pass's gradients that are reduced in place, 1-dim, from :meth:`fill` to :meth:`finish`.
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
        """Allocates new flat tensors, with one number per rank; older views become invalid."""
        count = len(self.parameters)
        self.flat = torch.zeros(self.size + count + ranks, dtype=self._dtype, device=self._device)
        compressed = self._wire_dtype not in (None, self._dtype) and not self._dtype.is_complex
        self.wire = torch.zeros_like(self.flat, dtype=self._wire_dtype) if compressed else self.flat
        self.views = self._places(self.flat)
        self.wire_views = self._places(self.wire) if compressed else self.views
        self.flags, self.numbers = self.wire[self.size :].split([count, ranks])

    def _places(self, flat: Any) -> list[Any]:
        """Returns each parameter's view of ``flat``; None if its gradient is reduced in place."""
        views = iter(views_of(flat, self._packed))
        return [None if index in self._large else next(views) for index in range(len(self.parameters))]

    def fill(self, scale: Any | None) -> list[Any]:
        """Packs the gradients into the bucket on the current stream; zeros if a parameter has none.

        Large gradients are prepared in place.

        Args:
            scale: 0-dim tensor by which this rank's gradients are multiplied; None: 1.

        Returns:
            The packed gradients that ``parameter.grad`` no longer holds. They were made on another stream, so
            their memory must not be reused before the current stream has read it.

        Raises:
            ArrayError: a gradient is sparse, or its parameter was converted or moved since it was wrapped.
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
                    remedy="Only Embedding and EmbeddingBag layers with sparse=True may have such gradients.",
                )
            if index in self._large:
                self.in_place.append(self._flat_gradient(parameter, index))
            elif gradient.data_ptr() != self.wire_views[index].data_ptr():
                targets.append(self.wire_views[index])
                sources.append(gradient)
                self._replace(parameter, index)
        if self.master is not None and self.master.grad is not None:
            # The master's gradient of an earlier pass was not cleared, so this pass is added, as in autograd.
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
        """Returns a large gradient as a 1-dim view; replaces one that is missing or has another layout."""
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
        """Converts the reduced gradients from the wire dtype to their own, on the current stream."""
        if self.wire is not self.flat:
            self.flat.copy_(self.wire)

    def finish(self, *, capturing: bool = False) -> None:
        """Gives the reduced gradients to the parameters, or to their master; None if no rank has one.

        Args:
            capturing: whether a CUDA graph is being captured. Flags cannot be read then, so those of earlier
                steps count.
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
        """Returns the positions of parameters that have no gradient on any rank.

        It reads the device only if a parameter has no gradient on this rank.
        """
        if not self.missing:
            return frozenset()
        if not capturing:
            flags = self.flags.tolist()
            self._unused = frozenset(index for index in self.missing if flags[index] == 0)
        return self._unused

    def forget(self) -> None:
        """Drops the references to gradients that are reduced in place."""
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

    The last ``last_bytes`` bytes of gradients form buckets of their own, because no computation is left to
    overlap their reduction, so it should be short. The last bucket has a number for each of ``ranks``; at
    least one bucket is returned.
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
