"""CIFAR-10 images on their way into the model, on the device: crop, flip, resize, normalise."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from worker.datasets import CIFAR10_MEAN, CIFAR10_STD

PADDING = 4


def augment(pixels: Any) -> Any:
    """Random crops of the padded images, half of them mirrored; draws on the device.

    Args:
        pixels: uint8 (N, 3, H, W).
    """
    samples, _, height, width = pixels.shape
    padded = functional.pad(pixels, (PADDING,) * 4)
    offsets = torch.randint(0, 2 * PADDING + 1, (2, samples, 1), device=pixels.device)
    rows = offsets[0] + torch.arange(height, device=pixels.device)
    columns = offsets[1] + torch.arange(width, device=pixels.device)
    mirrored = torch.rand(samples, 1, device=pixels.device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    which = torch.arange(samples, device=pixels.device)[:, None, None]
    # advanced indices around a slice put the sliced axis last: (N, H, W, 3)
    return padded[which, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def prepare(pixels: Any, size: int, dtype: Any) -> Any:
    """uint8 (N, 3, H, W) -> normalised (N, 3, size, size) in channels_last."""
    mean = torch.tensor(CIFAR10_MEAN, device=pixels.device).view(1, 3, 1, 1)
    std = torch.tensor(CIFAR10_STD, device=pixels.device).view(1, 3, 1, 1)
    images = ((pixels.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
    if images.shape[2] != size:
        images = functional.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return images.to(dtype).contiguous(memory_format=torch.channels_last)
