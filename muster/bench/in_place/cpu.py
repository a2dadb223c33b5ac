"""Kills ranks of torch programs at random moments; other processes must survive, numbers stay the same."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.bench.recovery.job import MeasuredJob, WorkerProcess, median_and_worst

RANKS, SPARES = 4, 2
KINDS = ("ddp", "fsdp2", "hsdp", "fsdp2-tp", "pipeline", "zero")
"""The kinds of programs in :mod:`muster.bench.in_place.program`, which needs torch."""

MANNERS = ("one", "one", "two at once", "one", "two in a row")
"""How ranks are killed, in turns; "in a row": a second one while the job recovers from the first loss."""

START_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 150.0
END_TIMEOUT_S = 20.0
FIGURES = ("next_step_s", "newcomer_builds_s", "without_building_s", "steps_done_again")

Say = Callable[[str], None]
Event = dict[str, Any]


class LivingJob(MeasuredJob):
    """Four ranks of a torch program, and two spares.

    Args:
        directory: the folder for keys, logs and records, which is created.
        kind: the kind of program.
        every: the number of steps between two snapshots.
        copies: the number of copies of each rank's part.
        pace_ms: a pause in each step, in milliseconds.
        steps: the total number of steps; 0 for no end.
        gpu: whether to run over NCCL, with all ranks on the first GPU.
        say: shows progress.
    """

    def __init__(
        self,
        directory: Path,
        *,
        kind: str,
        every: int,
        copies: int,
        pace_ms: float,
        steps: int,
        gpu: bool,
        say: Say,
    ) -> None:
        directory.mkdir(parents=True)
        self._gpu = gpu
        program = [sys.executable, "-m", "muster.bench.in_place.program", f"--kind={kind}"]
        program += [f"--every={every}", f"--copies={copies}", f"--steps={steps}", f"--pace-ms={pace_ms:g}"]
        program += ["--gpu"] if gpu else []
        super().__init__(
            directory,
            workers=RANKS,
            worker_min=RANKS,
            command=["-m", "muster.programs.agent", "--", *program],
            env={"MS_SPARES": str(SPARES), "MS_TOPO_TIMEOUT": "240", "MS_NODE_TIMEOUT": "30"},
            say=say,
        )
        self._begun = 0

    def __exit__(self, *error: object) -> None:
        """Asks the agents to end, which end their programs; a killed agent would leave its program."""
        for worker in self.living():
            worker.process.terminate()
        for worker in self.living():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(END_TIMEOUT_S)
        super().__exit__(*error)

    def add(self, *, spare: bool) -> WorkerProcess:
        """Starts an agent, which starts the program when it is a member."""
        self._begun += 1
        name = f"w{self._begun}"
        env = {"MS_WORKER_SPARE": "1"} if spare else {}
        if self._gpu:  # NCCL refuses two ranks on one GPU unless they seem to be on different hosts
            env |= {"DEVICE_ID": "0", "NCCL_HOSTID": name, "NCCL_MIN_CTAS": "1", "NCCL_MAX_CTAS": "2"}
        return self.start_worker(name, **env)

    def members(self) -> dict[int, WorkerProcess]:
        """Returns the workers that have finished a step in the newest generation, by rank in the program."""
        last = {worker: worker.steps()[-1] for worker in self.living() if worker.steps()}
        newest = max((step["generation"] for step in last.values()), default=0)
        return {
            step["rank"]: worker
            for worker, step in sorted(last.items(), key=lambda item: item[1]["t"])
            if step["generation"] == newest
        }

    def is_safe(self) -> bool:
        """Whether all ranks train, and have snapshots, which a new generation takes at once."""
        members = self.members()
        return len(members) == RANKS and all(worker.steps()[-1]["step"] > 2 for worker in members.values())

    def has_spares(self) -> bool:
        """Whether all spares wait for a place."""
        members = self.members().values()
        others = [worker for worker in self.living() if worker not in members]
        waits = ["waits as a spare" in worker.log.read_text(errors="replace") for worker in others]
        return len(waits) == SPARES and all(waits)

    def begin(self) -> None:
        """Starts the ranks, then the spares."""
        self.start_scheduler()
        for _ in range(RANKS):
            self.add(spare=False)
        self.wait("all train", self.is_safe, START_TIMEOUT_S)
        self.restock()

    def restock(self) -> None:
        """Starts spares in the place of those that have become members."""
        for _ in range(RANKS + SPARES - len(self.living())):
            self.add(spare=True)
        self.wait("the spares are in", self.has_spares, START_TIMEOUT_S)

    def kill(self, chance: random.Random, manner: str) -> Event:
        """Kills ranks at a random moment; waits until all ranks have finished a later step than before."""
        members = self.members()
        victims = chance.sample(sorted(members), 1 if manner == "one" else 2)
        time.sleep(chance.uniform(0.0, 0.5))
        before = max(worker.steps()[-1]["step"] for worker in members.values())
        generation = members[0].steps()[-1]["generation"]
        lived = {rank: worker.steps()[-1]["pid"] for rank, worker in members.items() if rank not in victims}
        now = self._end(members[victims[0]])
        if manner == "two in a row":
            time.sleep(chance.uniform(0.0, 2.0))
        if manner != "one":
            self._end(members[victims[1]])

        def firsts() -> dict[int, Event] | None:
            found: dict[int, Event] = {}
            for worker in self.living():
                for step in worker.steps():
                    if step["generation"] > generation and step["step"] > before:
                        found.setdefault(step["rank"], step)
            return found if len(found) == RANKS else None

        found = self.wait("all train again", firsts, STEP_TIMEOUT_S)
        next_step_s = max(step["t"] for step in found.values()) - now
        builds_s = max(_building_s(worker, now) for worker in self.living())
        again = before - min(step["step"] for step in self._steps_after(generation)) + 1
        for rank, pid in lived.items():
            if found[rank]["pid"] != pid:
                raise RuntimeError(f"rank {rank} was not lost, but its process was {pid} and is another one")
        return {
            "manner": manner,
            "ranks": victims,
            "next_step_s": round(next_step_s, 3),
            "newcomer_builds_s": round(builds_s, 3),
            "without_building_s": round(next_step_s - builds_s, 3),
            "steps_done_again": again,
        }

    def _steps_after(self, generation: int) -> list[Event]:
        return [
            step for worker in self.living() for step in worker.steps() if step["generation"] > generation
        ]

    def _end(self, worker: WorkerProcess) -> float:
        """Kills a worker's program; its agent ends, too, or restarts it if another rank was lost first."""
        now = time.monotonic()
        os.kill(worker.steps()[-1]["pid"], signal.SIGKILL)
        return now

    def numbers(self) -> dict[tuple[int, int], set[tuple[str, str]]]:
        """Returns each rank's loss and digest after each step, by (step, rank); several if they differ."""
        found: dict[tuple[int, int], set[tuple[str, str]]] = {}
        for worker in self.workers:
            for step in worker.steps():
                place = step["step"], step["rank"]
                found.setdefault(place, set()).add((step["loss"], step["digest"]))
        return found


def _building_s(worker: WorkerProcess, since: float) -> float:
    """Returns the seconds that a process begun after ``since`` took for imports, modules and rehearsal."""
    begun = [event["at"] for event in worker.follow() if event["what"] == "begun" and event["at"] > since]
    built = [event["t"] for event in worker.follow() if event["what"] == "rehearsed" and event["t"] > since]
    return max(built) - min(begun) if begun and built else 0.0


def measure(options: argparse.Namespace, directory: Path, say: Say) -> dict[str, Any]:
    """Kills ranks of each kind of program, and compares the numbers with those of undisturbed runs.

    Raises:
        RuntimeError: a program did not go on in its processes, or with other numbers.
    """
    return {kind: _one(kind, options, directory / kind, say) for kind in options.kinds}


def _one(kind: str, options: argparse.Namespace, directory: Path, say: Say) -> dict[str, Any]:
    chance, kills = random.Random(f"{options.seed} {kind}"), []
    same: dict[str, Any] = {"kind": kind, "every": options.every, "copies": options.copies, "say": say}
    same["gpu"] = options.gpu
    with LivingJob(directory / "killed", **same, pace_ms=options.pace_ms, steps=0) as job:
        job.begin()
        for number in range(options.kills):
            manner = "one" if options.one_at_a_time else MANNERS[number % len(MANNERS)]
            kills.append(job.kill(chance, manner))
            say(f"{kind}: kill {number + 1} of {options.kills}: {kills[-1]}")
            job.wait("all have copies again", job.is_safe, STEP_TIMEOUT_S)
            if number + 1 < options.kills:
                job.restock()
        found = job.numbers()
    last = max(step for step, _ in found)
    with LivingJob(directory / "whole", **same, pace_ms=0, steps=last) as whole:
        whole.start_scheduler()
        for _ in range(RANKS):
            whole.add(spare=False)
        whole.wait(
            "the run in which nobody is killed",
            lambda: all(worker.process.poll() is not None for worker in whole.workers),
            START_TIMEOUT_S + STEP_TIMEOUT_S,
            may_end=True,
        )
        want = whole.numbers()
    others = [place for place, numbers in found.items() if numbers != want.get(place)]
    if others:
        step, rank = min(others)
        raise RuntimeError(f"{kind}: after step {step} rank {rank} had other numbers than without kills")
    return {
        "seed": options.seed,
        "every": options.every,
        "copies": options.copies,
        "gpu": options.gpu,
        "kills": kills,
        "load_after": round(os.getloadavg()[0], 2),
        "steps": last,
        "states_compared": len(found),
        "states_different": len(others),
        "summary": median_and_worst(kills, FIGURES),
    }
