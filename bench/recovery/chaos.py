"""Harm without mercy: workers and schedulers killed again before the last loss is made good."""

from __future__ import annotations

import random
import time
from typing import Any

from muster.bench.recovery.cpu import Digits
from muster.bench.recovery.job import Worker

SETTLE_TIMEOUT_S = 60.0
LEAST_WITH_STATE = 2


def harm(job: Digits, seconds: float, chance: random.Random) -> dict[str, Any]:
    """Kills at random for a while, whoever it hits, newcomers on their way in too; lets the run end.

    Two workers that hold the state always live: with none of them the training would begin anew.

    Args:
        job: of at least four workers, which may go on with two.
        seconds: for how long.
        chance: decides whom, and when.

    Raises:
        RuntimeError: a process ended that nobody killed, or the job did not settle.
    """
    job.begin()
    begun, kills, scheduler_kills = time.monotonic(), 0, 0
    while (share := (time.monotonic() - begun) / seconds) < 1:
        time.sleep(chance.uniform(0.05, 1.2))
        victim = _victim(job, chance)
        if chance.random() < 0.25:
            job.kill_scheduler()
            time.sleep(chance.uniform(0, 0.3))
            job.start_scheduler()
            scheduler_kills += 1
        elif victim is not None:
            victim.kill()
            time.sleep(chance.uniform(0, 0.3))
            job.start_worker(victim.name)
            kills += 1
        job.check()
        job.hold_back(0.9 * share)
    job.wait("all train again", lambda: job.training(job.size, 2), SETTLE_TIMEOUT_S)
    accuracies = job.finish(300)
    return {"kills": kills, "scheduler_kills": scheduler_kills, "accuracy": accuracies, **job.count()}


def _victim(job: Digits, chance: random.Random) -> Worker | None:
    living = job.living()
    victim = chance.choice(living)
    others = [worker for worker in living if worker is not victim and worker.steps()]
    return victim if len(others) >= LEAST_WITH_STATE else None
