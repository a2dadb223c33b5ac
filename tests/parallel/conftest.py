"""What tests of parallel modes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import muster


@pytest.fixture
def fresh_context() -> Iterator[None]:
    """Nothing is set in the parallel context when a test begins, nor when it is over."""
    muster.reset_auto_parallel_context()
    yield
    muster.reset_auto_parallel_context()
