"""Waiting for what other processes and threads bring about."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 60.0


def wait_for(condition: Callable[[], object], told: Callable[[], str] = lambda: "waited in vain") -> None:
    """Polls until the condition holds; fails with what ``told`` says after a long time."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.01)
