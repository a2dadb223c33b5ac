"""What tests of parallel modes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import muster
from muster.parallel.planning import buckets


@pytest.fixture
def fresh_context() -> Iterator[None]:
    """Nothing is set in the parallel context when a test begins, nor when it is over."""
    muster.reset_auto_parallel_context()
    yield
    muster.reset_auto_parallel_context()


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parameters to a bucket, as large models have them."""
    monkeypatch.setattr(buckets.gradient_buckets, "__defaults__", (2048,))
    defaults = {**(buckets.collectives.__kwdefaults__ or {}), "bucket_bytes": 2048}
    monkeypatch.setattr(buckets.collectives, "__kwdefaults__", defaults)
