"""Workers without a launcher that fork: their children hide no death, and harm nothing that they inherit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.workers import Company, Worker, company
from tests.scheduler.processes import Pki, scheduler
from tests.waiting import wait_for

NEVER_S = "600"
"""What is noticed within a test is not noticed by silence."""


@pytest.fixture(params=["TLS", "plaintext"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Worker]]:
    pki = Pki.make(tmp_path) if request.param == "TLS" else None
    with (
        scheduler(MS_NODE_TIMEOUT=NEVER_S, **(pki.env() if pki else {})) as running,
        company(tmp_path, running, pki) as hired,
    ):
        yield form(hired)


def form(hired: Company) -> list[Worker]:
    workers = hired.form(2, MS_NODE_TIMEOUT=NEVER_S, MS_STALL_TIMEOUT=NEVER_S)
    for worker in workers:
        worker.tell("float(worker.all_reduce(np.ones(1, np.float32))[0])")
    assert [worker.answer() for worker in workers] == ["ok 2.0", "ok 2.0"]
    return workers


def test_a_killed_worker_is_missed_at_once_though_a_child_of_it_lives(pair: list[Worker]) -> None:
    killed, other = pair
    child = int(killed.ask("__import__('os').fork() or __import__('time').sleep(600)").removeprefix("ok "))
    try:
        killed.kill()
        wait_for(lambda: "is lost" in other.log, lambda: other.log)
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_ends_as_a_script_does_harms_nothing(pair: list[Worker]) -> None:
    forking, other = pair
    exits = "(__import__('os').fork() or __import__('sys').exit(0), __import__('os').wait()[1])[1]"
    assert forking.ask(exits) == "ok 0"
    for worker in pair:
        worker.tell("float(worker.all_reduce(np.ones(1, np.float32))[0])")
    assert [worker.answer() for worker in pair] == ["ok 2.0", "ok 2.0"]
    assert "lost" not in other.log
