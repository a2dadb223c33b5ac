"""The GPU's context is begun early, in a thread, and nothing that fails there is heard."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from muster.communicators.nccl import warmup
from muster.communicators.nccl.warmup import LIBRARY, WarmUp


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
def test_the_context_is_made_beside_the_caller(
    ordinal: int, status: int, calls: list[tuple[str, int]]
) -> None:
    driver = Driver(status)
    WarmUp(ordinal, driver.load).end(60)
    assert driver.calls == calls
    [thread] = driver.threads
    assert thread is not threading.current_thread() and thread.daemon and not thread.is_alive()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_machine_without_a_driver_goes_on() -> None:
    asked: list[str] = []

    def load(name: str) -> Any:
        asked.append(name)
        raise OSError(f"{name}: cannot open shared object file")

    WarmUp(0, load).end(60)
    assert asked == [LIBRARY]


def test_the_library_is_loaded_by_the_same_thread_once_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, used = Driver(), list[tuple[int, threading.Thread]]()
    monkeypatch.setattr(warmup, "use_device", lambda index: used.append((index, threading.current_thread())))
    warm_up = WarmUp(3, driver.load)
    warm_up.load()
    warm_up.end(60)
    warm_up.end(60)
    [thread] = driver.threads
    assert used == [(3, thread)]


def test_a_process_that_ends_before_it_joins_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(warmup, "use_device", used.append)
    WarmUp(3, Driver().load).end(60)
    assert used == []
