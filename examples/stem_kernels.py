"""The two costly parts of ResNet's stem, computed in another way with the same result.

``stem_convolution``: a 7x7 convolution with stride 2 of 3 channels is a 4x4 convolution with stride 1 of
12 channels (each 2x2 block of pixels becomes one of 12 channels); tensor cores have little use for 3.

``relu_pool``: ReLU and 3x3 max pooling with stride 2 in one Triton kernel, and a backward pass that writes
every pixel once. Ties go to the first pixel, as in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

_CHANNELS = 16
_BLOCK = 1024


def stem_convolution(images: Any, weight: Any) -> Any:
    """``conv2d(images, weight, stride=2, padding=3)`` for a (K, 3, 7, 7) weight.

    Args:
        images: (N, 3, H, W), H and W even.
        weight: (K, 3, 7, 7).
    """
    samples, colours, height, width = images.shape
    kernels = weight.shape[0]
    padded = functional.pad(images, (4, 2, 4, 2))
    rows, columns = height // 2 + 3, width // 2 + 3
    blocks = padded.view(samples, colours, rows, 2, columns, 2).permute(0, 3, 5, 1, 2, 4)
    blocks = blocks.reshape(samples, 4 * colours, rows, columns)
    taps = functional.pad(weight, (1, 0, 1, 0)).view(kernels, colours, 4, 2, 4, 2).permute(0, 3, 5, 1, 2, 4)
    taps = taps.reshape(kernels, 4 * colours, 4, 4)
    spare = (0, 0, 0, 0, 0, _CHANNELS - 4 * colours)  # tensor cores take channels by the eight
    blocks = functional.pad(blocks, spare).contiguous(memory_format=torch.channels_last)
    taps = functional.pad(taps, spare).contiguous(memory_format=torch.channels_last)
    return functional.conv2d(blocks, taps)


def relu_pool(x: Any) -> Any:
    """``max_pool2d(relu(x), 3, stride=2, padding=1)``; fast for channels_last on a GPU."""
    if not x.is_cuda:
        return functional.max_pool2d(functional.relu(x), 3, stride=2, padding=1)
    return torch.ops.muster_examples.relu_pool(x)[0]


def _launch_forward(x: Any) -> tuple[Any, Any]:
    from examples.stem_triton import pool_forward

    x = x.contiguous(memory_format=torch.channels_last)
    pooled, where = _empty_pooled(x)
    total = pooled.numel()
    grid = (-(-total // _BLOCK),)
    _, channels, height, width = x.shape
    pool_forward[grid](
        x, pooled, where, total, height, width, pooled.shape[2], pooled.shape[3], channels, block=_BLOCK
    )
    return pooled, where


def _launch_backward(gradient: Any, where: Any, height: int, width: int) -> Any:
    from examples.stem_triton import pool_backward

    gradient = gradient.contiguous(memory_format=torch.channels_last)
    result = _empty_input(gradient, height, width)
    total = gradient.numel()
    grid = (-(-total // _BLOCK),)
    _, channels, rows, columns = gradient.shape
    pool_backward[grid](gradient, where, result, total, height, width, rows, columns, channels, block=_BLOCK)
    return result


def _empty_pooled(x: Any) -> tuple[Any, Any]:
    samples, channels, height, width = x.shape
    shape = (samples, channels, (height + 1) // 2, (width + 1) // 2)
    pooled = x.new_empty(shape).contiguous(memory_format=torch.channels_last)
    return pooled, torch.empty_like(pooled, dtype=torch.int8)


def _empty_input(gradient: Any, height: int, width: int) -> Any:
    shape = (*gradient.shape[:2], height, width)
    return gradient.new_empty(shape).contiguous(memory_format=torch.channels_last)


def _define() -> None:
    library = torch.library

    pool = library.custom_op(
        "muster_examples::relu_pool",
        _launch_forward,
        mutates_args=(),
        schema="(Tensor x) -> (Tensor, Tensor)",
    )
    back = library.custom_op(
        "muster_examples::relu_pool_backward",
        _launch_backward,
        mutates_args=(),
        schema="(Tensor gradient, Tensor where, int height, int width) -> Tensor",
    )
    pool.register_fake(_empty_pooled)
    back.register_fake(lambda gradient, where, height, width: _empty_input(gradient, height, width))

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])
        ctx.size = inputs[0].shape[2:]

    def differentiate(ctx: Any, gradient: Any, _: Any) -> Any:
        (where,) = ctx.saved_tensors
        return torch.ops.muster_examples.relu_pool_backward(gradient, where, *ctx.size)

    pool.register_autograd(differentiate, setup_context=keep)


_define()
