"""CIFAR-10 images on their way into the model, on the device: crop, flip, resize, normalise."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from muster.example.datasets import CIFAR10_MEAN, CIFAR10_STD

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


class Preparation:
    """uint8 images (N, 3, H, W) -> normalised ones (N, 3, size, size) in channels_last; to be called.

    Its constants are made once, here: a CUDA graph cannot hold the copy that takes them to the GPU.

    Args:
        device: where the images are.
        size: height and width of the result.
        dtype: of the result.
    """

    def __init__(self, device: Any, size: int, dtype: Any) -> None:
        self._mean = torch.tensor(CIFAR10_MEAN, device=device).view(1, 3, 1, 1)
        self._std = torch.tensor(CIFAR10_STD, device=device).view(1, 3, 1, 1)
        self._size, self._dtype = size, dtype

    def __call__(self, pixels: Any) -> Any:
        """The images as the model takes them."""
        images = (pixels.float() / 255 - self._mean) / self._std
        images = images.contiguous(memory_format=torch.channels_last)
        if images.shape[2] != self._size:
            size = (self._size, self._size)
            images = functional.interpolate(images, size=size, mode="bilinear", align_corners=False)
        return images.to(self._dtype).contiguous(memory_format=torch.channels_last)
