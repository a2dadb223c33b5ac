"""The GPU's context is begun early, in a thread, and nothing that fails there is heard."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from muster.worker.communicators.nccl.warmup import LIBRARY, begin_context


class Driver:
    """CUDA's driver, as far as it is called."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.calls: list[tuple[str, int]] = []
        self.threads: set[threading.Thread] = set()

    def load(self, name: str) -> Driver:
        assert name == LIBRARY
        return self

    def cuInit(self, flags: int) -> int:
        self.threads.add(threading.current_thread())
        self.calls.append(("init", flags))
        return self.status

    def cuDevicePrimaryCtxRetain(self, context: Any, ordinal: int) -> int:
        self.calls.append(("retain", ordinal))
        return self.status


@pytest.mark.parametrize(
    ("ordinal", "status", "calls"),
    [(2, 0, [("init", 0), ("retain", 2)]), (-1, 0, [("init", 0)]), (2, 100, [("init", 0)])],
)
def test_it_is_made_beside_the_caller(ordinal: int, status: int, calls: list[tuple[str, int]]) -> None:
    driver = Driver(status)
    thread = begin_context(ordinal, driver.load)
    thread.join(10)
    assert driver.calls == calls
    assert driver.threads == {thread} and thread.daemon


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_machine_without_a_driver_goes_on() -> None:
    def load(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    thread = begin_context(0, load)
    thread.join(10)
    assert not thread.is_alive()
