"""Writes synthetic files in CIFAR-10's binary format: a label and 3,072 bytes of pixels per record."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from muster.example.datasets import CIFAR10_RECORD_BYTES, CIFAR10_TEST_FILE, CIFAR10_TRAIN_FILES

CLASSES = 10
PLANE = 32 * 32


def write(directory: Path, *, records: int = 10_000, seed: int = 0) -> None:
    """Writes all files: noise around one colour per class, so that there is something to learn.

    Args:
        directory: the folder, which is created if need be.
        records: the number of records in each of the six files; the real ones have 10,000.
        seed: the seed of the random numbers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    colours = np.repeat(random.integers(0, 200, (CLASSES, 3), np.uint8), PLANE, axis=1)  # red, green, blue
    for name in (*CIFAR10_TRAIN_FILES, CIFAR10_TEST_FILE):
        labels = random.integers(0, CLASSES, records, np.uint8)
        pixels = colours[labels] + random.integers(0, 56, (records, CIFAR10_RECORD_BYTES - 1), np.uint8)
        np.column_stack([labels, pixels]).tofile(directory / name)
