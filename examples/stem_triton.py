# mypy: ignore-errors
"""Triton kernels of :func:`examples.stem_kernels.relu_pool`, for channels_last tensors below 2**31 elements.

Triton reads the annotations of a kernel's arguments: only ``tl.constexpr`` may stand there.
"""

import triton
import triton.language as tl

NOWHERE = tl.constexpr(9)
"""Where no pixel of a window is above zero."""


@triton.jit
def pool_forward(
    x, pooled, where, total, height, width, rows, columns, channels: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """One program: block elements of the pooled output."""
    index = tl.program_id(0) * block + tl.arange(0, block)
    valid = index < total
    channel = index % channels
    place = index // channels
    column = place % columns
    row = (place // columns) % rows
    sample = place // columns // rows
    best = tl.full((block,), float("-inf"), tl.float32)
    tap = tl.full((block,), NOWHERE, tl.int32)
    for kernel_row in tl.static_range(3):
        for kernel_column in tl.static_range(3):
            y = 2 * row - 1 + kernel_row
            z = 2 * column - 1 + kernel_column
            inside = valid & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            pixel = ((sample * height + y) * width + z) * channels + channel
            value = tl.load(x + pixel, mask=inside, other=float("-inf")).to(tl.float32)
            better = (value > best) | (value != value)
            best = tl.where(better, value, best)
            tap = tl.where(better, 3 * kernel_row + kernel_column, tap)
    nothing = best <= 0
    tl.store(pooled + index, tl.where(nothing, 0.0, best).to(pooled.dtype.element_ty), mask=valid)
    tl.store(where + index, tl.where(nothing, NOWHERE, tap).to(tl.int8), mask=valid)


@triton.jit
def pool_backward(
    gradient, where, result, total, height, width, rows, columns,
    channels: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One program: the 2x2 pixels of block pooled places, each from the up to four windows it lies in."""
    index = tl.program_id(0) * block + tl.arange(0, block)
    valid = index < total
    channel = index % channels
    place = index // channels
    column = place % columns
    row = (place // columns) % rows
    sample = place // columns // rows
    below = valid & (row + 1 < rows)
    right = valid & (column + 1 < columns)
    down = columns * channels
    here_tap = tl.load(where + index, mask=valid, other=NOWHERE)
    right_tap = tl.load(where + index + channels, mask=right, other=NOWHERE)
    below_tap = tl.load(where + index + down, mask=below, other=NOWHERE)
    both_tap = tl.load(where + index + down + channels, mask=below & right, other=NOWHERE)
    here = tl.load(gradient + index, mask=valid, other=0.0).to(tl.float32)
    beside = tl.load(gradient + index + channels, mask=right, other=0.0).to(tl.float32)
    under = tl.load(gradient + index + down, mask=below, other=0.0).to(tl.float32)
    both = tl.load(gradient + index + down + channels, mask=below & right, other=0.0).to(tl.float32)
    kind = result.dtype.element_ty
    y, z = 2 * row, 2 * column
    target = result + ((sample * height + y) * width + z) * channels + channel
    tl.store(target, tl.where(here_tap == 4, here, 0.0).to(kind), mask=valid)
    value = tl.where(here_tap == 5, here, 0.0) + tl.where(right_tap == 3, beside, 0.0)
    tl.store(target + channels, value.to(kind), mask=valid & (z + 1 < width))
    value = tl.where(here_tap == 7, here, 0.0) + tl.where(below_tap == 1, under, 0.0)
    tl.store(target + width * channels, value.to(kind), mask=valid & (y + 1 < height))
    value = tl.where(here_tap == 8, here, 0.0) + tl.where(right_tap == 6, beside, 0.0)
    value += tl.where(below_tap == 2, under, 0.0) + tl.where(both_tap == 0, both, 0.0)
    inside = valid & (y + 1 < height) & (z + 1 < width)
    tl.store(target + (width + 1) * channels, value.to(kind), mask=inside)
