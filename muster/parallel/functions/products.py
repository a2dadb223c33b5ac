"""Products with weights under autocast to bfloat16 that write the weight's gradient in float32 directly."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

# From torch 2.8 on, and on GPUs only.
_WRITES_WIDER = hasattr(torch.ops.aten.mm, "dtype")


class Product(torch.autograd.Function):  # type: ignore[misc]
    """A linear layer in low precision; the forward and backward pass share one cast of the weight.

    Torch would write the weight's gradient in bfloat16 first, and cast it to float32 in a second pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, low: Any, turned: bool, again: bool) -> Any:
        """Returns the layer's result, in the dtype of ``low``.

        Args:
            ctx: autograd's context.
            x: the input.
            weight: the weight in its own precision.
            bias: the bias, or None.
            low: the weight's cast to low precision.
            turned: whether the weight has shape [inputs, outputs] instead of [outputs, inputs].
            again: whether the backward pass casts the weight again, as a gathered weight is not kept.
        """
        x = x.to(low.dtype)
        reads = ctx.needs_input_grad[0]
        ctx.save_for_backward(x, (weight if reads else None) if again else low)
        ctx.turned, ctx.dtype = turned, weight.dtype
        return functional.linear(x, low.t() if turned else low, None if bias is None else bias.to(low.dtype))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradients of input, weight and bias; the last two in the weight's dtype."""
        x, low = ctx.saved_tensors
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        x_grad = weight_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            low = low.to(x.dtype)
            x_grad = (rows @ (low.t() if ctx.turned else low)).view(x.shape)
        if ctx.needs_input_grad[1]:
            pair = (inputs.t(), rows) if ctx.turned else (rows.t(), inputs)
            weight_grad = _product(*pair, ctx.dtype)
        if ctx.needs_input_grad[2]:
            bias_grad = rows.sum(0, dtype=ctx.dtype)
        return x_grad, weight_grad, bias_grad, None, None, None


def _product(a: Any, b: Any, dtype: Any) -> Any:
    if _WRITES_WIDER and a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def applies(x: Any, weight: Any, bias: Any) -> bool:
    """Whether autocast would cast these tensors to bfloat16, and the weight gets a gradient."""
    device = weight.device.type
    return bool(
        torch.is_grad_enabled()
        and weight.requires_grad
        and weight.dtype == torch.float32
        and weight.dim() == 2
        and x.dim() >= 2
        and (bias is None or bias.dim() == 1)
        and torch.is_autocast_enabled(device)
        and torch.get_autocast_dtype(device) == torch.bfloat16
    )


class Casts:
    """The casts of the weights of one forward pass; each is made once."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}

    def of(self, weight: Any, dtype: Any) -> Any:
        """Returns the weight in another dtype, detached."""
        if id(weight) not in self._made:  # keeps the weight too, so that its id is not reused
            self._made[id(weight)] = weight, weight.detach().to(dtype)
        return self._made[id(weight)][1]

    def clear(self) -> None:
        """Drops all casts, when the pass has finished or failed."""
        self._made.clear()
