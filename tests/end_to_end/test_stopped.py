"""Workers that are stopped, by SIGSTOP: for less than MS_NODE_TIMEOUT, and for longer."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.workers import Worker, company
from tests.scheduler.processes import Pki, Scheduler, scheduler
from tests.waiting import wait_for

ENV = {"MS_NODE_TIMEOUT": "2"}
ASKS_AS_NEWCOMER = "this worker has lost its place and asks for one as a newcomer"

pytestmark = pytest.mark.timeout(240, method="signal")


def stop_until_lost(worker: Worker, running: Scheduler, node_id: str) -> None:
    worker.process.send_signal(signal.SIGSTOP)
    assert f"Node {node_id} on host" in running.await_log("is lost: not heard for")
    worker.process.send_signal(signal.SIGCONT)


def test_workers_that_pause_for_less_than_node_timeout_keep_their_places(tmp_path: Path) -> None:
    """In whatever moment the pause begins: with a ping under way, just before a heartbeat."""
    env = {"MS_NODE_TIMEOUT": "8"}
    pki = Pki.make(tmp_path)
    with scheduler(**pki.env(), **env) as running, company(tmp_path, running, pki) as hired:
        workers = hired.form(2, **env)
        for _ in range(2):
            for worker in workers:
                worker.process.send_signal(signal.SIGSTOP)
                worker.tell("worker.all_reduce(1.0).tolist()")
            time.sleep(5.0)  # the pause: several heartbeats, and room for a machine that is late
            for worker in workers:
                worker.process.send_signal(signal.SIGCONT)
            assert [worker.answer() for worker in workers] == ["ok 2.0", "ok 2.0"]
        assert [worker.ask("s.generation") for worker in workers] == ["ok 1", "ok 1"]
        assert "is lost" not in running.log
        workers[1].kill()
        assert "its stream ended" in running.await_log("Rank 1 (node 1 on host")


def test_a_spare_that_was_stopped_asks_for_its_place_again_and_takes_over(tmp_path: Path) -> None:
    with scheduler(MS_SPARES="1", **ENV) as running, company(tmp_path, running) as hired:
        first, second = hired.form(2, **ENV)
        spare = hired.start(MS_NODE_ID="s0", MS_WORKER_SPARE="1", **ENV)
        running.await_log("as a spare")
        stop_until_lost(spare, running, "s0")
        wait_for(lambda: spare.log.count("waits as a spare") >= 2, lambda: spare.log)
        assert spare.log.count(ASKS_AS_NEWCOMER) == 1
        first.tell("worker.all_reduce(1.0)")
        second.kill()
        assert first.answer().startswith("error MembershipChanged")
        first.tell("s.rejoin()")
        assert first.answer() == "ok None"
        assert spare.answer().startswith("ok ")
        for worker in (first, spare):
            worker.tell("worker.all_reduce(1.0).tolist()")
        assert [worker.answer() for worker in (first, spare)] == ["ok 2.0", "ok 2.0"]


def test_a_worker_that_was_stopped_while_others_were_missing_is_in_when_they_come(tmp_path: Path) -> None:
    with scheduler(**ENV) as running, company(tmp_path, running) as hired:
        early = hired.start(MS_NODE_ID="0", **ENV)
        running.await_log("1 of 2 workers is in")
        stop_until_lost(early, running, "0")
        late = hired.start(MS_NODE_ID="1", **ENV)
        assert [worker.answer() for worker in (early, late)] == ["ok 0", "ok 1"]
        assert early.log.count(ASKS_AS_NEWCOMER) == 1
        assert [worker.finish() for worker in (early, late)] == [0, 0]
        assert running.wait() == 0
