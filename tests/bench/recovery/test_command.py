"""What the recovery benchmark makes of the workers' records, and how it judges them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from muster.bench.recovery import command as recovery
from muster.bench.recovery import cpu as recovery_cpu
from muster.bench.recovery import gpu as recovery_gpu
from muster.bench.recovery.job import WorkerProcess
from muster.bench.recovery.loop import EventFile
from muster.launch.command import count_gpus


def worker(directory: Path, *events: dict[str, Any]) -> WorkerProcess:
    """A worker that has ended, with these events in its record."""
    record = directory / "record.jsonl"
    record.write_text("".join(json.dumps(event) + "\n" for event in events))
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return WorkerProcess("0", process, record, directory / "worker.log")


def step(t: float, number: int, generation: int, **facts: Any) -> dict[str, Any]:
    return {"t": t, "what": "step", "step": number, "generation": generation, "world": 2, "rank": 0, **facts}


def test_a_record_is_read_as_it_grows_and_never_half_a_line(tmp_path: Path) -> None:
    one = worker(tmp_path, step(1.0, 1, 1))
    assert [event["step"] for event in one.steps()] == [1]
    with (tmp_path / "record.jsonl").open("a") as file:
        file.write(json.dumps(step(2.0, 2, 1)) + '\n{"t": 3.0, "wh')
        file.flush()
        assert [event["step"] for event in one.steps()] == [1, 2]
        file.write('at": "interrupted"}\n')
    assert [event["what"] for event in one.follow()] == ["step", "step", "interrupted"]


def test_what_is_noted_can_be_read(tmp_path: Path) -> None:
    one = worker(tmp_path)
    EventFile(str(tmp_path / "record.jsonl")).note("step", step=4)
    (event,) = one.steps()
    assert event["step"] == 4 and event["t"] > 0


def test_a_step_of_the_old_generation_is_no_recovery(tmp_path: Path) -> None:
    """A survivor may finish the step that was under way when another was killed."""
    one = worker(
        tmp_path,
        step(9.9, 7, 1, captured="replayed"),
        step(10.01, 8, 1, captured="replayed"),
        {"t": 10.1, "what": "interrupted", "step": 8},
        {"t": 10.4, "what": "rejoined", "generation": 2},
        {"t": 10.5, "what": "shared", "generation": 2},
        step(10.6, 9, 2, seconds=0.02),
        step(10.7, 10, 2, seconds=0.05, captured="made"),
        step(10.8, 11, 2, seconds=0.01, captured="replayed"),
    )
    assert recovery_gpu.phases([one], 10.0) == {
        "told_s": 0.1,
        "built_s": 0.4,
        "shared_s": 0.5,
        "next_step_s": 0.6,
    }
    assert recovery_gpu.recapture([one], 10.0) == {"recapture_s": 0.05, "captured_again_s": 0.8}
    assert recovery_cpu.next_step(one, 1, 10.0)["t"] == 10.6


HARMED: dict[str, Any] = {
    "kills": [{}, {}],
    "exact": True,
    "none_twice": True,
    "accuracy": [0.96],
    "accuracy_undisturbed": 0.9625,
    "processes": 6,
    "killed": 2,
    "ended_well": 4,
}
ABSENT: dict[str, Any] = {
    "none_lost_or_redone": True,
    "interruptions": 0,
    "generations": [1],
    "exact": True,
    "none_twice": True,
}


def test_it_says_what_did_not_hold() -> None:
    assert recovery_cpu.broken_promises(HARMED, ABSENT) == []
    harm: list[dict[str, Any]] = [
        {"exact": False},
        {"accuracy": [0.96, 0.95]},
        {"ended_well": 3},
        {"killed": 3},
    ]
    for change in harm:
        assert len(recovery_cpu.broken_promises(HARMED | change, None)) == 1
    noticed: list[dict[str, Any]] = [
        {"none_lost_or_redone": False},
        {"interruptions": 1},
        {"generations": [1, 2]},
        {"exact": False},
    ]
    for change in noticed:
        assert len(recovery_cpu.broken_promises(None, ABSENT | change)) == 1


def test_the_defaults_are_those_of_the_bars() -> None:
    parser = argparse.ArgumentParser()
    recovery.add_arguments(parser)
    options = parser.parse_args([])
    assert (options.backend, options.workers, options.scheduler_kills) == ("tcp", 4, 20)
    assert options.gpus == max(2, count_gpus())
    assert options.kills is None  # 20, or 5 on GPUs


def test_chaos_trains_about_as_long_as_it_harms() -> None:
    for seconds in (60, 600):
        steps = recovery_cpu.chaos_epochs(seconds, 20) * recovery_cpu.STEPS_PER_EPOCH
        assert 0.3 * seconds < steps * 0.02 < 0.6 * seconds
