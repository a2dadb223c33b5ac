"""``torch.nn.SyncBatchNorm`` within a ``DataParallel``: statistics of all ranks' samples.

Torch's own layer uses ``torch.distributed``. Without that, each rank silently normalises with the statistics
of its own samples. Here one all_gather in the forward pass exchanges mean, variance and number of elements of
each rank's part, and one all_reduce in the backward pass exchanges the two sums of the gradient. The host
never waits for the GPU, so that the step can be captured.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch.autograd.function import once_differentiable

from muster.communicators.reduce_ops import ReduceOp
from muster.errors import SettingsError
from muster.torch.transfer import CommStream


class Ranks(Protocol):
    """The wrapper's interface: a stream to the other ranks, and the weight of this rank's samples."""

    @property
    def comm_stream(self) -> CommStream | None:
        """The stream in which collectives run; None at world size 1."""

    @property
    def share(self) -> Any | None:
        """0-dim tensor by which this rank's gradients are going to be multiplied; None: 1."""


_RANKS: WeakKeyDictionary[Any, ref[Ranks]] = WeakKeyDictionary()
"""The wrapper of each layer, by weak references."""


class SharedBatchNorm(torch.nn.SyncBatchNorm):  # type: ignore[misc]
    """The class of a ``SyncBatchNorm`` in a wrapper. A copy or pickle of it is a ``SyncBatchNorm`` again."""

    def forward(self, input: Any) -> Any:
        """Normalises with the statistics of all ranks' samples; in evaluation mode with the running ones."""
        ranks = _RANKS.get(self, _nobody)()
        comm_stream = None if ranks is None else ranks.comm_stream
        if ranks is None or comm_stream is None or not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        output, mean, variance, count = _Normalise.apply(
            input, self.weight, self.bias, self.eps, ranks, comm_stream
        )
        if self.track_running_stats:
            self._follow(mean, variance, count)
        return output

    def _follow(self, mean: Any, variance: Any, count: Any) -> None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            factor = self.momentum
            if factor is None:
                factor = self.num_batches_tracked.to(mean.dtype).reciprocal()
            unbiased = variance * (count / (count - 1).clamp(min=1))
            for kept, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                kept.copy_(kept * (1 - factor) + new * factor)

    def _get_name(self) -> str:
        return "SyncBatchNorm"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles it as a layer of torch's class, so that loading it does not need Muster."""
        make, (_, *arguments), *others = super().__reduce_ex__(1)  # later protocols insist on this class
        return (make, (torch.nn.SyncBatchNorm, *arguments), *others)


# The same as torch.compiler.disable sets; calling that would load all of torch's compiler.
SharedBatchNorm.forward._torchdynamo_disable = True  # type: ignore[attr-defined]


def _nobody() -> None:
    return None


def adopt(module: Any, ranks: Ranks) -> bool:
    """Lets all ``SyncBatchNorm`` layers of ``module`` compute with ``ranks``; returns whether there are any.

    Raises:
        SettingsError: a layer is of a subclass, which may compute something else.
    """
    found = False
    for name, layer in module.named_modules():
        if not isinstance(layer, torch.nn.SyncBatchNorm):
            continue
        if type(layer) not in (torch.nn.SyncBatchNorm, SharedBatchNorm):
            raise SettingsError(
                f"{name} is a {type(layer).__name__}, a SyncBatchNorm that DataParallel does not know:"
                " it would normalise with the statistics of this rank's samples alone. Take torch's."
            )
        layer.__class__ = SharedBatchNorm
        _RANKS[layer] = ref(ranks)
        found = True
    return found


class _Normalise(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        context: Any,
        input: Any,
        weight: Any,
        bias: Any,
        eps: float,
        ranks: Ranks,
        comm_stream: CommStream,
    ) -> Any:
        dtype = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
        channels = input.shape[1]
        mine = torch.zeros(2 * channels + 1, dtype=dtype, device=input.device)
        elements = input.numel() // channels
        if elements:
            variance, mean = torch.var_mean(input.to(dtype), _all_but_channels(input), correction=0)
            mine[:channels] = mean
            mine[channels:-1] = variance * elements
            mine[-1].fill_(elements)
        rows = comm_stream.all_gather(mine)
        # Chan's rule, which stays accurate when a difference of squared sums would not.
        counts, means, squares = rows[:, -1:], rows[:, :channels], rows[:, channels:-1]
        count = counts.sum().clamp(min=1)
        mean = (means * counts).sum(0) / count
        variance = (squares.sum(0) + ((means - mean).square() * counts).sum(0)) / count
        output = torch.batch_norm(input, weight, bias, mean, variance, False, 0.0, eps, False)
        context.save_for_backward(input, weight, mean, variance, count)
        context.eps, context.ranks, context.comm_stream = eps, ranks, comm_stream
        context.mark_non_differentiable(mean, variance, count)
        context.set_materialize_grads(False)
        return output, mean, variance, count

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator, unused-ignore]
    def backward(context: Any, gradient: Any, *others: Any) -> Any:
        input, weight, mean, variance, count = context.saved_tensors
        factors = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        if input.numel():
            # Some kernels read the mean and deviation of a training pass also if there was none.
            saved = (mean, (variance + context.eps).rsqrt())
            local, weighted, summed = torch.ops.aten.native_batch_norm_backward(
                gradient, input, factors, mean, variance, *saved, False, context.eps, [True, True, True]
            )
        else:
            local, weighted, summed = input, torch.zeros_like(mean), torch.zeros_like(mean)
        into = None
        if context.needs_input_grad[0]:
            # Gradients are weighted by this rank's share of the samples only later, when they are packed. So
            # the sums are weighted before the all_reduce, and its result is divided by the weight.
            share, sums = context.ranks.share, torch.stack([summed, weighted])
            if share is None:
                sums = context.comm_stream.all_reduce(sums, ReduceOp.SUM)
            else:
                sums = context.comm_stream.all_reduce(sums * share, ReduceOp.SUM) / share
            shape = [1, -1] + [1] * (input.dim() - 2)
            scale = (variance + context.eps).rsqrt()
            constant = (factors * scale * sums[0] / count).view(shape)
            slope = (factors * scale * scale * sums[1] / count).view(shape)
            into = (local - constant - (input - mean.view(shape)) * slope).to(input.dtype)
        return (
            into,
            weighted.to(weight.dtype) if weight is not None and context.needs_input_grad[1] else None,
            summed if context.needs_input_grad[2] else None,
            None,
            None,
            None,
        )


def _all_but_channels(tensor: Any) -> list[int]:
    return [axis for axis in range(tensor.dim()) if axis != 1]
