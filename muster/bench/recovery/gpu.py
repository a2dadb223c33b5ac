"""SIGKILL of ranks that train ResNet-50 on GPUs with captured steps: ``bench recovery`` for NCCL."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.bench.gpu_fleet import SAFE_ENVIRONMENT
from muster.bench.recovery.job import MeasuredJob, WorkerProcess, longest_pause, median_and_worst
from muster.launch.plan import sharing_environment

STEADY_STEPS = 20


def measure(options: argparse.Namespace, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the job, harms it and returns the results; stops early at the time limit.

    Args:
        options: kills, gpus, ranks_per_gpu, images, seed, limit_s, tiny.
        directory: the folder for logs and records.
        say: shows progress.
    """
    command = ["-m", "muster.bench.recovery.resnet", "--images", str(options.images)]
    if options.tiny:
        command += ["--tiny", "--cpu", "--size", "32"]
    results: dict[str, Any] = {"gpus": options.gpus, "images_per_gpu": options.images, "kills": []}
    if options.ranks_per_gpu > 1:
        results["ranks_per_gpu"] = options.ranks_per_gpu
    chance = random.Random(options.seed)
    job = MeasuredJob(
        directory,
        workers=options.gpus,
        worker_min=options.gpus - 1,
        command=command,
        env={**SAFE_ENVIRONMENT, "MS_TOPO_TIMEOUT": "120", "MS_COLLECTIVE_TIMEOUT": "60"},
        say=say,
    )
    deadline = time.monotonic() + options.limit_s
    with job:
        try:
            began = time.monotonic()
            job.start_scheduler()
            for number in range(options.gpus):
                _start(job, number, options.ranks_per_gpu)
            _await_steady(job, options, deadline)
            say(f"{options.gpus} ranks train, steps captured, after {time.monotonic() - began:.1f} s")
            results["step_s_before"] = round(_step_time(job.living()), 5)
            victims = chance.sample(range(options.gpus), options.gpus)
            for number in range(options.kills):
                time.sleep(chance.uniform(0.05, 0.5))  # anywhere within a step
                victim = str(victims[number % options.gpus])
                results["kills"].append(_kill_one(job, options, victim, deadline))
                say(f"kill {number + 1}: {results['kills'][-1]}")
            results["leave"] = _leave(job, options, deadline)
            say(f"leave: {results['leave']}")
        except RuntimeError as error:
            results["stopped_early"] = str(error)[:20_000]
            say(f"stopped early: {error}")
        results["values"] = _values(job)
        results["loss"] = [event["loss"] for event in job.workers[0].follow() if event["what"] == "loss"][:40]
    results["summary"] = _summary(results)
    return results


def _start(job: MeasuredJob, number: int, ranks_per_gpu: int) -> WorkerProcess:
    sharing = sharing_environment(f"rank-{number}") if ranks_per_gpu > 1 else {}
    return job.start_worker(
        str(number), DEVICE_ID=str(number // ranks_per_gpu), MS_LOCAL_INDEX=str(number), **sharing
    )


def _await_steady(job: MeasuredJob, options: argparse.Namespace, deadline: float) -> None:
    """Waits until all ranks have trained for ``STEADY_STEPS``, on a GPU by captured steps."""

    def steady() -> bool:
        if not job.training(options.gpus, STEADY_STEPS):
            return False
        last = [worker.steps()[-STEADY_STEPS:] for worker in job.living()]
        return options.tiny or all(step.get("captured") == "replayed" for each in last for step in each)

    job.wait("all ranks train on captured steps", steady, deadline - time.monotonic())


def _step_time(workers: list[WorkerProcess]) -> float:
    """Returns the median time between the last finished steps, in seconds."""
    times = [[step["t"] for step in worker.steps()[-STEADY_STEPS:]] for worker in workers]
    return float(statistics.median([b - a for each in times for a, b in itertools.pairwise(each)]))


def _kill_one(job: MeasuredJob, options: argparse.Namespace, name: str, deadline: float) -> dict[str, Any]:
    victim = next(worker for worker in job.living() if worker.name == name)
    survivors = [worker for worker in job.living() if worker is not victim]
    rank = victim.steps()[-1]["rank"]
    pids = [worker.process.pid for worker in survivors]
    killed = victim.kill()
    job.wait(
        "the survivors' next good step",
        lambda: all(_first(worker, "step", killed) for worker in survivors),
        min(60, deadline - time.monotonic()),
    )
    result: dict[str, Any] = {"rank": rank, "node": victim.name, **phases(survivors, killed)}
    job.wait(
        "the survivors' captured steps",
        lambda: options.tiny or all(_captured(worker, killed) for worker in survivors),
        min(60, deadline - time.monotonic()),
    )
    result |= recapture(survivors, killed)
    started = time.monotonic()
    newcomer = _start(job, int(victim.name), options.ranks_per_gpu)
    _await_steady(job, options, deadline)
    first = newcomer.steps()[0]
    result["replacement"] = {
        "start_to_first_step_s": round(first["t"] - started, 3),
        "longest_pause_of_survivors_s": round(max(longest_pause(worker, started) for worker in survivors), 3),
        "ranks": first["world"],
        "step": first["step"],
    }
    result["survivors_same_processes"] = pids == [worker.process.pid for worker in survivors if worker.alive]
    result["step_s_after"] = round(_step_time(job.living()), 5)
    return result


def _first(worker: WorkerProcess, what: str, since: float) -> dict[str, Any] | None:
    """Returns the first event of a kind in a generation that was entered after ``since``; None without one.

    Events without a generation, such as interruptions, count from ``since`` on.
    """
    events = worker.follow()
    entered = next((e["generation"] for e in events if e["what"] == "rejoined" and e["t"] > since), None)
    for event in events:
        if (
            event["what"] == what
            and event["t"] > since
            and ("generation" not in event or (entered is not None and event["generation"] >= entered))
        ):
            return event
    return None


def phases(survivors: list[WorkerProcess], killed: float) -> dict[str, Any]:
    """Returns when each phase was over on all survivors, in seconds since the kill."""
    phases = {}
    for what, name in (("interrupted", "told_s"), ("rejoined", "built_s"), ("shared", "shared_s")):
        times = [_first(worker, what, killed) for worker in survivors]
        phases[name] = round(max(event["t"] for event in times if event) - killed, 4)
    steps = [_first(worker, "step", killed) for worker in survivors]
    phases["next_step_s"] = round(max(step["t"] for step in steps if step) - killed, 4)
    return phases


def _since_rejoined(worker: WorkerProcess, since: float) -> list[dict[str, Any]]:
    """Returns the steps finished in generations that were entered after ``since``."""
    entered = _first(worker, "rejoined", since)
    return [] if entered is None else [s for s in worker.steps() if s["generation"] >= entered["generation"]]


def _captured(worker: WorkerProcess, since: float) -> dict[str, Any] | None:
    steps = _since_rejoined(worker, since)
    return next((step for step in steps if step.get("captured") == "replayed"), None)


def recapture(survivors: list[WorkerProcess], killed: float) -> dict[str, Any]:
    """Returns how long the capturing step took, and when steps were replayed again after the kill."""
    made = [
        step["seconds"]
        for worker in survivors
        for step in _since_rejoined(worker, killed)
        if step.get("captured") == "made"
    ]
    again = [step for worker in survivors if (step := _captured(worker, killed))]
    if not made or not again:
        return {}
    return {
        "recapture_s": round(max(made), 4),
        "captured_again_s": round(max(step["t"] for step in again) - killed, 4),
    }


def _leave(job: MeasuredJob, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Sends SIGTERM to one worker: it leaves at a step boundary, and the others go on without an abort."""
    leaver, *others = job.living()
    asked = time.monotonic()
    leaver.process.terminate()
    job.wait(
        "the others' next step",
        lambda: not leaver.alive and all(_first(worker, "step", asked) for worker in others),
        min(60, deadline - time.monotonic()),
        may_end=True,
    )
    return {
        "exit_code": leaver.process.poll(),
        "longest_pause_of_others_s": round(max(longest_pause(worker, asked) for worker in others), 3),
    }


def _values(job: MeasuredJob) -> dict[str, Any]:
    """Returns the results of the ranks' checks of their values."""
    found: dict[str, list[bool]] = {"same bits": [], "right step": []}
    errors = []
    for worker in job.workers:
        for event in worker.follow():
            if event["what"] in found:
                found[event["what"]].append(event["good"])
                errors += [event["error"]] if "error" in event else []
    return {
        **{name.replace(" ", "_"): {"checked": len(each), "good": sum(each)} for name, each in found.items()},
        "largest_error": round(max(errors, default=0.0), 5),
    }


def _summary(results: dict[str, Any]) -> dict[str, Any]:
    kills = results["kills"]
    summary: dict[str, Any] = {"kills": len(kills)}
    keys = ("told_s", "built_s", "shared_s", "next_step_s", "recapture_s", "captured_again_s")
    summary |= median_and_worst(kills, keys)
    with contextlib.suppress(statistics.StatisticsError):
        summary["replacement_pause_s"] = statistics.median(
            kill["replacement"]["longest_pause_of_survivors_s"] for kill in kills
        )
    return summary
