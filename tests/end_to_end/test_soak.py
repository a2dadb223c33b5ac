"""Minutes of harm: workers are killed and stopped, and schedulers killed, while six and two spares learn."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from muster.bench.recovery.cpu import Digits
from muster.bench.recovery.job import Worker

WORKERS, SPARES = 6, 2
EPOCHS = 60
PACE_S = 0.1
HARM_S = float(os.environ.get("MUSTER_SOAK_S", "100"))
SEED = int(os.environ.get("MUSTER_SOAK_SEED", "1"))
WAIT_S = 120.0


class Soak(Digits):
    """The job: the world is always of six, so that every step has one right result, whoever computes it."""

    def __init__(self, directory: Path, pace_s: float) -> None:
        super().__init__(
            directory, workers=WORKERS, worker_min=WORKERS, epochs=EPOCHS, pace_s=pace_s, say=print
        )
        self.env |= {"MS_NODE_TIMEOUT": "3", "MS_SPARES": "4"}
        self._command[1] = "tests.end_to_end.soak_worker"
        self.stopped: dict[Worker, float] = {}
        self.was_stopped: set[Worker] = set()

    def start_spare(self) -> None:
        """One more that waits for a place."""
        self.start_worker(f"spare-{len(self.workers)}", MS_WORKER_SPARE="1")

    def check(self, *, may_end: bool = False) -> None:
        """Who was stopped for too long may have lost its place to a spare, and is refused then."""
        for worker in self.workers:
            code = worker.process.poll()
            if code not in (None, 0, -signal.SIGKILL) and worker in self.was_stopped:
                assert "refused" in worker.log.read_text().lower(), worker.log.read_text()[-3000:]
                continue
            if code not in (None, -signal.SIGKILL) and not (may_end and code == 0):
                raise RuntimeError(f"worker {worker.name} ended with code {code}\n{self.tails()}")

    def holders(self) -> list[Worker]:
        """Those that run and have the state."""
        return [each for each in self.living() if each not in self.stopped and each.steps()]

    def wake(self, now: float) -> None:
        """Lets those go on that were stopped for long enough."""
        for worker in [each for each, until in self.stopped.items() if until <= now]:
            del self.stopped[worker]
            if worker.alive:
                worker.process.send_signal(signal.SIGCONT)


def harm(job: Soak, seconds: float, chance: random.Random) -> Counter[str]:
    """Does harm by a schedule that the seed decides; at least three that hold the state always run."""
    done: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        time.sleep(chance.uniform(0.2, 2.5))
        job.wake(now)
        job.check()
        what, victim = chance.choices(("kill", "stop", "scheduler"), (5, 3, 2))[0], chance.random()
        holders = job.holders()
        if what == "scheduler":
            job.kill_scheduler()
            time.sleep(chance.uniform(0, 0.5))
            job.start_scheduler()
        elif len(holders) <= 3 or (what == "stop" and job.stopped):
            continue
        elif what == "kill":
            holders[int(victim * len(holders))].kill()
        else:
            worker = holders[int(victim * len(holders))]
            worker.process.send_signal(signal.SIGSTOP)
            job.stopped[worker] = time.monotonic() + chance.choice((0.3, 1.0, 2.0, 6.0))
            job.was_stopped.add(worker)
        done[what] += 1
        while len(job.living()) < WORKERS + SPARES:
            job.start_spare()
    job.wake(float("inf"))
    return done


def finish(job: Soak) -> None:
    """Lets the run come to its end."""
    job.pace.unlink(missing_ok=True)
    job.wait("the end", lambda: not job.living(), WAIT_S, may_end=True)


def results(job: Soak) -> dict[int, set[str]]:
    """What the state was after each step, by all that say so."""
    found: dict[int, set[str]] = {}
    for worker in job.workers:
        for step in worker.steps():
            found.setdefault(step["step"], set()).add(step["digest"])
    return found


@pytest.mark.system
@pytest.mark.timeout(900, method="signal")
def test_no_step_of_any_process_is_wrong(tmp_path: Path, record_property: Any) -> None:
    with Soak(tmp_path / "calm", 0) as calm:
        calm.begin()
        finish(calm)
        wanted = results(calm)
    assert {len(each) for each in wanted.values()} == {1}
    with Soak(tmp_path / "harmed", PACE_S) as job:
        job.begin()
        for _ in range(SPARES):
            job.start_spare()
        done = harm(job, HARM_S, random.Random(SEED))
        finish(job)
        found = results(job)
        checked = sum(len(worker.steps()) for worker in job.workers)
        twice = [w.name for w in job.workers if len({s["step"] for s in w.steps()}) != len(w.steps())]
        generations = {step["generation"] for worker in job.workers for step in worker.steps()}
    wrong = {step: digests for step, digests in found.items() if digests != wanted[step]}
    figures = {
        "harm": dict(done),
        "processes": len(job.workers),
        "generations": len(generations),
        "steps": len(found),
        "checked_steps": checked,
        "wrong_steps": len(wrong),
    }
    record_property("soak", json.dumps(figures))
    print(json.dumps(figures))
    assert not wrong
    assert found.keys() == wanted.keys()
    assert not twice
    assert done["kill"] and done["stop"] and done["scheduler"], done
    assert checked > WORKERS * len(wanted) // 2
