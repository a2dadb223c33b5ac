"""Four real workers of which one is slow: it is named, with the kind, and nobody else is.

How soon is a matter of the core's tests: here the rest of the machine's load would decide.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.workers import Process
from tests.scheduler.processes import Pki, Scheduler, scheduler

WORKERS, SLOW = 4, "2"
BURST_S = 0.3

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


@contextlib.contextmanager
def workers(kind: str, sched: Scheduler, pki: Pki, tmp_path: Path) -> Iterator[list[Process]]:
    env = {"MS_SCHED_PORT": str(sched.port), "MS_WORKER_NUM": str(WORKERS), **pki.env()}
    started = [
        Process(tmp_path / f"{node}.log", "slow_worker", kind, SLOW, **env, MS_NODE_ID=str(node))
        for node in range(WORKERS)
    ]
    try:
        yield started
    finally:
        for each in started:
            each.process.kill()
            each.process.communicate()


@contextlib.contextmanager
def stopped_again_and_again(process: Process) -> Iterator[None]:
    """Stops a process for as long as it runs, again and again."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(BURST_S):
            process.process.send_signal(signal.SIGSTOP)
            over.wait(BURST_S)
            process.process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("kind", "named", "said"),
    [
        ("stopped", "computing", "holds the others up: it computes"),
        ("loader", "data", "holds the others up: it waits for data"),
        ("link", "link", "holds all up: data wait"),
    ],
)
def test_who_is_slow_is_named_and_nobody_else(
    kind: str, named: str, said: str, pki: Pki, tmp_path: Path
) -> None:
    env = {**pki.env(), "MS_WORKER_NUM": str(WORKERS), "MS_NODE_TIMEOUT": "10"}
    with scheduler(**env) as sched, workers(kind, sched, pki, tmp_path) as hired:
        sched.await_log("stands with 4 members")
        stops = stopped_again_and_again(hired[int(SLOW)]) if kind == "stopped" else contextlib.nullcontext()
        with stops:
            line = sched.await_log("up: ")
            shown = json.loads(sched.command("status", "--json", **pki.env()).stdout)
        assert said in line
        stragglers = [each for each in shown["stragglers"] if each["kind"] != "one-off"]
        assert [each["kind"] for each in stragglers] == [named]
        ends = {str(stragglers[0]["rank"]), str(stragglers[0]["peer_rank"])}
        assert SLOW in ends
        assert stragglers[0]["slowdown"] >= 1.2
        assert all(worker["step_seconds"]["computed"] > 0 for worker in shown["workers"])
        assert sched.log.count("up: it") + sched.log.count("up: data") == 1
