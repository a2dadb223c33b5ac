"""Workers and schedulers killed, stopped and replaced while ``train.py`` learns: every step counts."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.bench.recovery.cpu import Digits, kill_schedulers, kill_workers
from muster.bench.recovery.job import WorkerProcess
from muster.training import checkpoint
from tests.waiting import LIMIT_S

PACE_S = 0.02

pytestmark = pytest.mark.timeout(240, method="signal")


def digits(
    directory: Path, workers: int, worker_min: int, epochs: int = 20, pace_s: float = PACE_S, **env: str
) -> Digits:
    """A job that makes a step each ``pace_s`` until its end is due, so that no harm comes too late."""
    job = Digits(
        directory / "job", workers=workers, worker_min=worker_min, epochs=epochs, pace_s=pace_s, say=print
    )
    job.env.update(env)
    return job


def test_killed_workers_are_replaced_and_no_step_is_lost(tmp_path: Path) -> None:
    with digits(tmp_path, 4, 3) as job:
        result = kill_workers(job, 2, random.Random(1))
    assert result["exact"] and result["none_twice"]
    assert (result["processes"], result["killed"], result["ended_well"]) == (6, 2, 4)
    assert len(result["accuracy"]) == 1 and result["accuracy"][0] >= 0.95


def test_nobody_notices_that_the_scheduler_is_killed(tmp_path: Path) -> None:
    """At last it is killed together with a worker, whose death it finds when it is back."""
    with digits(tmp_path, 4, 3, epochs=12, pace_s=0.04, MS_NODE_TIMEOUT="2") as job:
        result = kill_schedulers(job, 2, random.Random(2))
    assert result["none_lost_or_redone"]
    assert (result["interruptions"], result["generations"]) == (0, [1])
    assert result["worker_killed_in_absence"]["world"] == 3
    assert result["exact"] and result["none_twice"]


def test_nobody_is_lost_because_the_scheduler_stood_still(tmp_path: Path) -> None:
    """It is stopped for so long that the workers give up their streams; it sees that when it goes on."""
    with digits(tmp_path, 3, 3, pace_s=0.1, MS_NODE_TIMEOUT="2") as job:
        job.begin()
        assert job.scheduler is not None
        log = job.directory / "scheduler.log"
        job.scheduler.send_signal(signal.SIGSTOP)
        logs = [worker.log for worker in job.workers]
        job.wait("all gave up", lambda: all("trying again" in each.read_text() for each in logs), LIMIT_S)
        job.scheduler.send_signal(signal.SIGCONT)
        job.wait("it has noticed", lambda: "itself stood still for" in log.read_text(), LIMIT_S)
        job.wait("all are back", lambda: log.read_text().count(" is back.") == 3, LIMIT_S)
        last = [worker.steps()[-1]["step"] for worker in job.workers]
        job.wait("training", lambda: all(w.steps()[-1]["step"] > max(last) for w in job.workers), LIMIT_S)
        job.finish(LIMIT_S)
        assert "has lost its stream while the scheduler stood still" in log.read_text()
        assert " is lost: " not in log.read_text()
        assert {step["generation"] for worker in job.workers for step in worker.steps()} == {1}
        assert job.count() == {"steps": job.last_step, "exact": True, "none_twice": True}


def await_world(job: Digits, workers: list[WorkerProcess], world: int, generation: int) -> None:
    """Waits until these workers train as ``world`` ranks in ``generation`` or later."""

    def there() -> bool:
        last = [worker.steps()[-1:] for worker in workers]
        return all(
            each and each[0]["world"] == world and each[0]["generation"] >= generation for each in last
        )

    job.wait(f"{world} ranks train", there, LIMIT_S)


def test_a_stopped_worker_is_declared_dead_and_comes_back_as_a_newcomer(tmp_path: Path) -> None:
    with digits(tmp_path, 3, 2, epochs=16, pace_s=0.05, MS_NODE_TIMEOUT="2") as job:
        job.begin()
        first, stopped, third = job.workers
        stopped.process.send_signal(signal.SIGSTOP)
        await_world(job, [first, third], 2, generation=2)
        before = len(stopped.steps())
        stopped.process.send_signal(signal.SIGCONT)
        await_world(job, [first, stopped, third], 3, generation=3)
        job.finish(LIMIT_S)
        assert "not heard for" in (job.directory / "scheduler.log").read_text()
        # It trained nothing on the place that it had lost.
        late = stopped.steps()[before:]
        assert {step["generation"] for step in late if step["world"] == 3} >= {late[0]["generation"]}
        assert job.count() == {"steps": job.last_step, "exact": True, "none_twice": True}


def test_training_ends_well_without_the_scheduler(tmp_path: Path) -> None:
    with digits(tmp_path, 2, 2, MS_RECONNECT_TIMEOUT="2") as job:
        job.begin()
        job.kill_scheduler()
        job.pace.unlink()
        job.wait("the end", lambda: not job.living(), LIMIT_S, may_end=True)
        assert [worker.process.returncode for worker in job.workers] == [0, 0]
        assert job.count() == {"steps": job.last_step, "exact": True, "none_twice": True}


def test_a_loss_without_a_scheduler_ends_with_the_reason_and_the_state_on_disk(tmp_path: Path) -> None:
    with digits(tmp_path, 3, 2, MS_NODE_TIMEOUT="1", MS_RECONNECT_TIMEOUT="2") as job:
        job.arguments("--checkpoint-dir=kept")
        job.begin()
        job.kill_scheduler()
        before = max(worker.steps()[-1]["step"] for worker in job.workers)
        job.wait("training goes on", lambda: job.workers[0].steps()[-1]["step"] > before + 5, LIMIT_S)
        job.workers[2].kill()
        survivors = job.workers[:2]
        assert [worker.process.wait(LIMIT_S) for worker in survivors] == [1, 1], job.tails()
        last = max(worker.steps()[-1]["step"] for worker in survivors)
        for worker in survivors:
            assert "the scheduler, which would know why, has been away" in worker.log.read_text()
        assert checkpoint.find(job.directory / "kept")[0].step == last


@pytest.fixture
def spared(tmp_path: Path) -> Iterator[Digits]:
    """Three workers that must be three, and a spare."""
    with digits(tmp_path, 3, 3, epochs=12, pace_s=0.05, MS_SPARES="1") as job:
        job.begin()
        job.start_worker("spare", MS_WORKER_SPARE="1")
        job.wait("the spare waits", lambda: "waits as a spare" in job.workers[3].log.read_text(), LIMIT_S)
        yield job


def test_a_spare_disturbs_nobody_and_is_promoted_when_a_member_dies(spared: Digits) -> None:
    members, spare = spared.workers[:3], spared.workers[3]
    assert {step["generation"] for worker in members for step in worker.steps()} == {1}
    assert spare.steps() == []
    members[1].kill()
    await_world(spared, [members[0], spare, members[2]], 3, generation=2)
    assert spare.steps()[0]["step"] > 1  # it took the state over
    spared.finish(LIMIT_S)
    assert spared.count() == {"steps": spared.last_step, "exact": True, "none_twice": True}


def test_a_spare_that_is_not_needed_ends_well_with_the_job(spared: Digits) -> None:
    *_, spare = spared.workers
    spared.pace.unlink()
    spared.wait("the end", lambda: not spared.living(), LIMIT_S, may_end=True)
    assert spare.process.returncode == 0
    assert spare.steps() == []
