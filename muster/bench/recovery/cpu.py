"""SIGKILL of workers and schedulers while ``train.py`` learns the digits: ``bench recovery`` for CPUs."""

from __future__ import annotations

import argparse
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.bench.recovery.job import MeasuredJob, WorkerProcess, longest_pause, median_and_worst
from muster.bench.recovery.loop import PACE_VARIABLE

SETTLE_TIMEOUT_S = 180.0
LEAST_WITH_STATE = 2
PROGRESS_S = 5.0


def harm(job: Digits, seconds: float, chance: random.Random) -> dict[str, Any]:
    """Kills workers and the scheduler at random for a while, and then lets the run end.

    Newcomers that are still joining are killed, too. Two workers that hold the state always survive, because
    without any the training would start over.

    Args:
        job: a job of at least four workers, which may go on with two.
        seconds: how long to harm it.
        chance: decides what is killed, and when.

    Raises:
        RuntimeError: a process ended that was not killed, or the job did not settle.
    """
    job.begin()
    job.say(f"chaos: all train; harm for {seconds:g} s")
    begun, kills, scheduler_kills = time.monotonic(), 0, 0
    next_word = begun + PROGRESS_S
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
        if time.monotonic() >= next_word:
            next_word += PROGRESS_S
            job.say(f"chaos: {kills} workers, {scheduler_kills} schedulers killed, {share:.0%} of the time")
    job.say("chaos: no more harm; waits until all train again")
    job.hold_back(0.0, SETTLE_PACE_S)
    job.wait("all train again", lambda: job.training(job.size, 2), SETTLE_TIMEOUT_S)
    job.say("chaos: all train again; runs to its end")
    accuracies = job.finish(300)
    return {"kills": kills, "scheduler_kills": scheduler_kills, "accuracy": accuracies, **job.count()}


def _victim(job: Digits, chance: random.Random) -> WorkerProcess | None:
    living = job.living()
    victim = chance.choice(living)
    others = [worker for worker in living if worker is not victim and worker.steps()]
    return victim if len(others) >= LEAST_WITH_STATE else None


STEPS_PER_EPOCH = 23
START_TIMEOUT_S = 180.0
STEP_TIMEOUT_S = 60.0
SLOW_PACE_S = 0.1
SETTLE_PACE_S = 0.5
"""The least time of a step, in seconds, by which the last newcomers join before the training ends."""

Say = Callable[[str], None]


def measure(options: argparse.Namespace, directory: Path, say: Say) -> dict[str, Any]:
    """Runs the training undisturbed, then under SIGKILLs of workers, then of schedulers.

    Args:
        options: workers, kills, scheduler_kills, epochs, pace_ms, seed, limit_s.
        directory: the folder for keys, logs and records.
        say: shows progress.

    Raises:
        RuntimeError: the job did not behave as expected.
    """
    results: dict[str, Any] = {"workers": options.workers, "tls": "mutual", "pace_ms": options.pace_ms}
    results["load_at_start"] = os.getloadavg()
    if options.kills:
        results["worker_kills"] = _worker_kills(options, directory / "workers", say)
    if options.scheduler_kills:
        results["scheduler_kills"] = _scheduler_kills(options, directory / "scheduler", say)
    if options.chaos_s:
        results["chaos"] = _chaos(options, directory / "chaos", say)
    results["load_at_end"] = os.getloadavg()
    results["summary"] = _summary(results)
    return results


class Digits(MeasuredJob):
    """The job of ``train.py``, which learns the digits; slowed down while it is harmed.

    Args:
        directory: the folder for keys, logs and records, which is created.
        workers: MS_WORKER_NUM.
        worker_min: MS_WORKER_MIN.
        epochs: the number of epochs.
        pace_s: the least time of a step until :meth:`finish`, in seconds; 0 for none.
        say: shows progress.
    """

    def __init__(
        self, directory: Path, *, workers: int, worker_min: int, epochs: int, pace_s: float, say: Say
    ) -> None:
        directory.mkdir(parents=True)
        self.pace = directory / "pace"
        self.last_step = epochs * STEPS_PER_EPOCH
        if pace_s:
            self.pace.write_text(str(pace_s))
        super().__init__(
            directory,
            workers=workers,
            worker_min=worker_min,
            command=["-m", "muster.bench.recovery.digits", f"--epochs={epochs}", "--checkpoint-dir="],
            env={PACE_VARIABLE: str(self.pace), "MS_TOPO_TIMEOUT": "60"},
            say=say,
        )

    def begin(self) -> None:
        """Starts everything and waits until all train."""
        self.start_scheduler()
        for number in range(self.size):
            self.start_worker(str(number))
        self.wait("all train", lambda: self.training(self.size, 3), START_TIMEOUT_S)

    def hold_back(self, share: float, pace_s: float = SLOW_PACE_S) -> None:
        """Slows the training down if it is further than this share of the run."""
        newest = max(worker.steps()[-1]["step"] for worker in self.living() if worker.steps())
        if newest > share * self.last_step:
            self.pace.write_text(str(pace_s))

    def finish(self, timeout_s: float) -> list[float]:
        """Lets the training run at full speed to its end; returns the accuracies that the workers printed."""
        self.pace.unlink(missing_ok=True)
        running = self.living()
        self.wait("the end", lambda: all(not worker.alive for worker in running), timeout_s, may_end=True)
        assert self.scheduler is not None
        self.scheduler.wait(STEP_TIMEOUT_S)
        found = [re.findall(r"test accuracy: ([0-9.]+)", worker.log.read_text()) for worker in running]
        if code := self.scheduler.returncode:
            raise RuntimeError(f"the scheduler ended with code {code}\n{self.tails()}")
        if not all(found):
            raise RuntimeError(f"a worker ended without the accuracy of its model\n{self.tails()}")
        return [float(each[0]) for each in found]

    def count(self) -> dict[str, Any]:
        """Returns the number of steps, whether each was finished, and whether none was by a process twice."""
        steps = [[step["step"] for step in worker.steps()] for worker in self.workers]
        finished = {step for each in steps for step in each}
        return {
            "steps": max(finished),
            "exact": finished == set(range(1, self.last_step + 1)),
            "none_twice": all(len(each) == len(set(each)) for each in steps),
        }


def accuracy_undisturbed(directory: Path, *, workers: int, epochs: int, say: Say) -> float:
    """Returns the accuracy of a run without harm."""
    with Digits(directory, workers=workers, worker_min=workers, epochs=epochs, pace_s=0, say=say) as job:
        job.begin()
        return job.finish(300 + epochs)[0]


# ---------------------------------------------------------------- workers


def _worker_kills(options: argparse.Namespace, directory: Path, say: Say) -> dict[str, Any]:
    epochs = options.epochs or max(20, 15 * options.kills)
    directory.mkdir()
    expected = accuracy_undisturbed(directory / "calm", workers=options.workers, epochs=epochs, say=say)
    say(f"undisturbed: accuracy {expected:.4f} after {epochs} epochs")
    with Digits(
        directory / "harmed",
        workers=options.workers,
        worker_min=options.workers - 1,
        epochs=epochs,
        pace_s=options.pace_ms / 1000,
        say=say,
    ) as job:
        return kill_workers(job, options.kills, random.Random(options.seed)) | {
            "accuracy_undisturbed": expected
        }


def kill_workers(job: Digits, kills: int, chance: random.Random) -> dict[str, Any]:
    """Kills random workers at random times, each replaced by a new process; lets the run end.

    Returns:
        The kills, the step count, the accuracies, and which processes there were.
    """
    job.begin()
    seen = []
    for number in range(kills):
        time.sleep(chance.uniform(0.1, 0.6))
        seen.append(kill_one(job, chance))
        job.say(f"kill {number + 1}: {seen[-1]}")
        job.hold_back((number + 1) / kills * 0.9)
    accuracies = job.finish(300)
    ended = [worker.process.returncode for worker in job.workers]
    return {
        "kills": seen,
        **job.count(),
        "accuracy": sorted(set(accuracies)),
        "processes": len(ended),
        "killed": sum(code == -9 for code in ended),
        "ended_well": sum(code == 0 for code in ended),
    }


def kill_one(job: Digits, chance: random.Random) -> dict[str, Any]:
    """Kills a random worker, waits until the others train on, and until its replacement does, too."""
    victim = chance.choice(job.living())
    survivors = [worker for worker in job.living() if worker is not victim]
    last = victim.steps()[-1]
    killed = victim.kill()
    job.wait(
        "the survivors' next step",
        lambda: all(next_step(worker, last["generation"], killed) for worker in survivors),
        STEP_TIMEOUT_S,
    )
    newcomer = job.start_worker(victim.name)
    job.wait("the replacement trains", lambda: job.training(job.size, 2), STEP_TIMEOUT_S)
    return {
        "rank": last["rank"],
        "step": last["step"],
        "told_s": round(_last(survivors, "interrupted", killed) - killed, 4),
        "next_step_s": round(
            max(next_step(worker, last["generation"], killed)["t"] for worker in survivors) - killed, 4
        ),
        "replaced_s": round(newcomer.steps()[0]["t"] - killed, 3),
    }


def next_step(worker: WorkerProcess, generation: int, since: float) -> dict[str, Any]:
    """Returns the worker's first step after ``since`` in a later generation; {} if there is none yet."""
    return next((s for s in worker.steps() if s["t"] > since and s["generation"] > generation), {})


def _last(workers: list[WorkerProcess], what: str, since: float) -> float:
    """Returns when all workers had recorded an event of a kind after ``since``, on the monotonic clock."""
    firsts = [
        next(event["t"] for event in worker.follow() if event["what"] == what and event["t"] > since)
        for worker in workers
    ]
    return float(max(firsts))


# ---------------------------------------------------------------- schedulers


def _scheduler_kills(options: argparse.Namespace, directory: Path, say: Say) -> dict[str, Any]:
    epochs = options.epochs or max(20, 10 * options.scheduler_kills)
    with Digits(
        directory,
        workers=options.workers,
        worker_min=options.workers - 1,
        epochs=epochs,
        pace_s=options.pace_ms / 1000,
        say=say,
    ) as job:
        return kill_schedulers(job, options.scheduler_kills, random.Random(options.seed))


def kill_schedulers(job: Digits, kills: int, chance: random.Random) -> dict[str, Any]:
    """Kills the scheduler at random times, the last time together with a worker; lets the run end.

    Returns:
        What the workers noticed (it must be nothing), and how the loss of the worker was handled.
    """
    job.begin()
    for number in range(kills):
        time.sleep(chance.uniform(0.0, 2.0))  # while it starts, while workers reconnect, or later
        job.kill_scheduler()
        time.sleep(chance.uniform(0.0, 0.5))
        job.start_scheduler()
        job.say(f"scheduler kill {number + 1}")
        job.hold_back((number + 1) / kills * 0.8)
    noticed = [event for worker in job.workers for event in worker.follow() if event["what"] == "interrupted"]
    steps_of = [worker.steps() for worker in job.workers]  # read once: they train on
    steps = [step for done in steps_of for step in done]
    in_order = all([step["step"] for step in done] == list(range(1, len(done) + 1)) for done in steps_of)
    pauses = [longest_pause(worker, but_first=3) for worker in job.workers]
    result: dict[str, Any] = {
        "kills": kills,
        "steps_meanwhile": max(step["step"] for step in steps),
        "none_lost_or_redone": in_order,
        "interruptions": len(noticed),
        "generations": sorted({step["generation"] for step in steps}),
        "longest_pause_s": round(max(pauses), 4),
    }
    result["worker_killed_in_absence"] = _kill_both(job, chance)
    job.say(f"a worker killed while there is no scheduler: {result['worker_killed_in_absence']}")
    job.finish(300)
    return result | job.count()


def _kill_both(job: Digits, chance: random.Random) -> dict[str, Any]:
    time.sleep(2.0)
    victim = chance.choice(job.living())
    survivors = [worker for worker in job.living() if worker is not victim]
    generation = victim.steps()[-1]["generation"]
    job.kill_scheduler()
    killed = victim.kill()
    time.sleep(1.0)
    back = time.monotonic()
    job.start_scheduler()
    job.wait(
        "the survivors' next step",
        lambda: all(next_step(worker, generation, killed) for worker in survivors),
        STEP_TIMEOUT_S,
    )
    step = max(next_step(worker, generation, killed)["t"] for worker in survivors)
    return {"scheduler_start_to_next_step_s": round(step - back, 3), "world": len(survivors)}


def chaos_epochs(seconds: float, pace_ms: float) -> int:
    """Returns half the number of epochs that an undisturbed run would have in the time of the harm."""
    return max(20, int(seconds * 1000 / max(pace_ms, 1) / STEPS_PER_EPOCH / 2))


def _chaos(options: argparse.Namespace, directory: Path, say: Say) -> dict[str, Any]:
    with Digits(
        directory,
        workers=options.workers,
        worker_min=2,
        epochs=options.epochs or chaos_epochs(options.chaos_s, options.pace_ms),
        pace_s=options.pace_ms / 1000,
        say=say,
    ) as job:
        result = harm(job, options.chaos_s, random.Random(options.seed))
        say(f"chaos: {result}")
        return result


# ---------------------------------------------------------------- results


def _summary(results: dict[str, Any]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    harmed = results.get("worker_kills")
    if harmed:
        summary |= median_and_worst(harmed["kills"], ("told_s", "next_step_s", "replaced_s"))
        summary["exact_steps"] = harmed["exact"] and harmed["none_twice"]
        summary["accuracy"] = {"harmed": harmed["accuracy"], "undisturbed": harmed["accuracy_undisturbed"]}
    absent = results.get("scheduler_kills")
    if absent:
        summary["scheduler_kills"] = {
            key: absent[key]
            for key in ("kills", "none_lost_or_redone", "interruptions", "generations", "longest_pause_s")
        }
        summary["worker_killed_in_absence"] = absent["worker_killed_in_absence"]
    summary["did_not_hold"] = broken_promises(harmed, absent)
    chaos = results.get("chaos")
    if chaos and not (chaos["exact"] and chaos["none_twice"]):
        summary["did_not_hold"].append("every step is finished, by each process once, in chaos")
    return summary


def broken_promises(harmed: dict[str, Any] | None, absent: dict[str, Any] | None) -> list[str]:
    """Returns the requirements that did not hold, in words."""
    rules = []
    if harmed:
        gap = max(abs(each - harmed["accuracy_undisturbed"]) for each in harmed["accuracy"])
        survivors = (harmed["killed"], harmed["processes"] - harmed["killed"])
        rules += [
            (harmed["exact"] and harmed["none_twice"], "every step is finished, by each process once"),
            (gap <= 0.005, "the accuracy is that of an undisturbed run"),
            (survivors == (len(harmed["kills"]), harmed["ended_well"]), "no process ends but those killed"),
        ]
    if absent:
        calm = absent["none_lost_or_redone"] and not absent["interruptions"]
        rules += [
            (calm and absent["generations"] == [1], "nobody notices that the scheduler is killed"),
            (absent["exact"] and absent["none_twice"], "every step is finished while schedulers are killed"),
        ]
    return [words for holds, words in rules if not holds]
