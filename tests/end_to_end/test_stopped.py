"""Workers that are stopped, by SIGSTOP, for longer than MS_NODE_TIMEOUT while ``worker.init()`` waits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.end_to_end.workers import Worker, company
from tests.scheduler.processes import Scheduler, scheduler
from tests.waiting import wait_for

ENV = {"MS_NODE_TIMEOUT": "1"}
ASKS_ANEW = "this worker has lost its place and asks for one as a newcomer"

pytestmark = pytest.mark.timeout(90, method="signal")


def stop_until_lost(worker: Worker, running: Scheduler, node_id: str) -> None:
    worker.process.send_signal(signal.SIGSTOP)
    assert f"Node {node_id} on host" in running.await_log("is lost: not heard for")
    worker.process.send_signal(signal.SIGCONT)


def test_a_spare_that_was_stopped_asks_for_its_place_again_and_takes_over(tmp_path: Path) -> None:
    with scheduler(MS_SPARES="1", **ENV) as running, company(tmp_path, running) as hired:
        first, second = hired.form(2, **ENV)
        spare = hired.start(MS_NODE_ID="s0", MS_WORKER_SPARE="1", **ENV)
        running.await_log("as a spare")
        stop_until_lost(spare, running, "s0")
        wait_for(lambda: spare.log.count("waits as a spare") >= 2, lambda: spare.log)
        assert spare.log.count(ASKS_ANEW) == 1
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
        assert early.log.count(ASKS_ANEW) == 1
        assert [worker.finish() for worker in (early, late)] == [0, 0]
        assert running.wait() == 0
