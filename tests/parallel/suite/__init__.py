"""Small models of the kinds that people train, written as people write them: plans are judged by them."""

from __future__ import annotations

from tests.parallel.suite import attention, images, objectives, sequences
from tests.parallel.suite.entries import SUITE, Entry

__all__ = ["SUITE", "Entry", "attention", "images", "objectives", "sequences"]
