"""Products with weights under autocast to bfloat16, whose gradients are written in float32 at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

# From torch 2.8 on, and on GPUs only.
_WRITES_WIDER = hasattr(torch.ops.aten.mm, "dtype")


class Product(torch.autograd.Function):  # type: ignore[misc]
    """A linear layer in the dtype of ``low``, the weight's cast, which forward and backward pass share.

    Torch writes a weight's gradient in bfloat16 and casts it in a second pass over it.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, low: Any, turned: bool, again: bool) -> Any:
        """The layer's result.

        Args:
            ctx: of autograd.
            x: the input.
            weight: in its own precision.
            bias: None: there is none.
            low: the weight's cast.
            turned: the weight is [inputs, outputs].
            again: the weight is not kept, so its cast is not either: the backward pass casts again.
        """
        x = x.to(low.dtype)
        reads = ctx.needs_input_grad[0]
        ctx.save_for_backward(x, (weight if reads else None) if again else low)
        ctx.turned, ctx.dtype = turned, weight.dtype
        return functional.linear(x, low.t() if turned else low, None if bias is None else bias.to(low.dtype))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Any) -> Any:
        """Gradients of the input, the weight and the bias; the latter two in the weight's dtype."""
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
    """Whether autocast would bring these to bfloat16, and a gradient comes back to the weight."""
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
    """The casts of one forward pass's weights, each made once."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}

    def of(self, weight: Any, dtype: Any) -> Any:
        """The weight in another dtype, without a gradient."""
        if id(weight) not in self._made:  # holding the weight, so that no other takes its id
            self._made[id(weight)] = weight, weight.detach().to(dtype)
        return self._made[id(weight)][1]

    def clear(self) -> None:
        """Forgets them: the pass is over, or broke off."""
        self._made.clear()
