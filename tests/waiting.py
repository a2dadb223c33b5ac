"""Waiting for what other processes, threads and tasks bring about."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

LIMIT_S = 100.0
"""Far beyond what anything takes: a machine that does much else is no fault of the code."""


def wait_for(condition: Callable[[], T], told: Callable[[], str] = lambda: "waited in vain") -> T:
    """Polls until the condition holds, and returns its value; fails after a long time with ``told()``."""
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, told()
        time.sleep(0.01)
    return value


def threads_end(name: str) -> None:
    """Waits for this process's threads of a name; fails after a long time."""
    wait_for(lambda: all(each.name != name for each in threading.enumerate()), lambda: f"{name} goes on")


async def until(condition: Callable[[], object]) -> None:
    """Lets other tasks run until the condition holds; fails after a long time."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.001)


def go(test: Coroutine[Any, Any, None]) -> None:
    """Runs a test's tasks; fails after a long time."""
    asyncio.run(asyncio.wait_for(test, LIMIT_S))
