"""Measures the same kills with torchft: dropped steps, and the time until others and until all train again.

The replica groups of torchft are single ranks for DDP, and halves of the ranks for HSDP. If a rank is lost,
its whole group ends and is restarted at once, because torchft cannot replace a single rank. The other groups
continue without it until it is back.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.bench.in_place.cpu import RANKS, START_TIMEOUT_S, STEP_TIMEOUT_S, Event, Say
from muster.bench.launches import environment, free_ports
from muster.bench.recovery.job import POLL_S, WorkerProcess, median_and_worst

PEER_KINDS = {"ddp": 1, "hsdp": 2}
"""The kinds of programs that torchft supports, and the number of ranks of a replica group."""

PEER_FIGURES = ("next_step_s", "all_back_s", "newcomer_builds_s", "steps_dropped")
_PROGRAM = Path(__file__).with_name("torchft_program.py")


class TorchftJob:
    """A lighthouse and replica groups, four ranks in all. A context manager: all end with it.

    Args:
        directory: the folder for logs and records, which is created.
        kind: the kind of program.
        pace_ms: a pause in each step, in milliseconds.
        python: a Python interpreter with torch and torchft.
        say: shows progress.
    """

    def __init__(self, directory: Path, *, kind: str, pace_ms: float, python: str, say: Say) -> None:
        directory.mkdir(parents=True)
        self._directory, self._say = directory, say
        self._command = [python, str(_PROGRAM), f"--kind={kind}", f"--pace-ms={pace_ms:g}"]
        self._size = PEER_KINDS[kind]
        # Muster may be installed in that environment, too, but must not be used there.
        self._env = environment(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        self._groups: dict[int, list[WorkerProcess]] = {}
        self._begun = 0
        self._lighthouse: subprocess.Popen[str] | None = None
        self._address = ""

    def __enter__(self) -> TorchftJob:
        """Starts the lighthouse."""
        self._lighthouse = subprocess.Popen(
            [self._command[0], str(_PROGRAM), "--lighthouse"],
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._lighthouse.stdout is not None
        said = self._lighthouse.stdout.readline()
        if not said:
            raise RuntimeError(f"{self._command[0]} cannot start torchft's lighthouse")
        self._address = re.sub(r"//.*:", "//localhost:", said.strip())
        return self

    def __exit__(self, *_: object) -> None:
        """Kills all."""
        for group in self._groups.values():
            _end(group)
        if self._lighthouse is not None:
            self._lighthouse.kill()
            self._lighthouse.communicate()

    def begin(self) -> None:
        """Starts all groups."""
        for replica in range(RANKS // self._size):
            self._start(replica)
        self._wait("all train", lambda: self._all_since(0.0), START_TIMEOUT_S)

    def _start(self, replica: int) -> None:
        [port], group = free_ports(), []
        for rank in range(self._size):
            self._begun += 1
            record = self._directory / f"record_{self._begun}.jsonl"
            log = self._directory / f"worker_{self._begun}.log"
            command = [*self._command, f"--replica={replica}", f"--rank={rank}", f"--size={self._size}"]
            command += [f"--port={port}", f"--at={self._address}", f"--record={record}"]
            with log.open("wb") as out:
                process = subprocess.Popen(command, env=self._env, stdout=out, stderr=out)
            group.append(WorkerProcess(f"{replica}.{rank}", process, record, log))
        self._groups[replica] = group

    def _all_since(self, since: float) -> list[Event] | None:
        """Returns each rank's first step after ``since`` with all groups; None if a rank has none yet."""
        found = []
        for group in self._groups.values():
            for worker in group:
                whole = (
                    step
                    for step in worker.steps()
                    if step["t"] > since and step["replicas"] == len(self._groups)
                )
                if (first := next(whole, None)) is None:
                    return None
                found.append(first)
        return found

    def kill(self, chance: random.Random) -> Event:
        """Kills a rank at a random moment; waits until all make steps together again."""
        there = len(self._groups)
        replica, rank = chance.randrange(there), chance.randrange(self._size)
        time.sleep(chance.uniform(0.0, 0.5))
        others = [worker for each, group in self._groups.items() if each != replica for worker in group]
        before = max(worker.steps()[-1]["step"] for group in self._groups.values() for worker in group)
        now = time.monotonic()
        os.kill(self._groups[replica][rank].process.pid, signal.SIGKILL)
        _end(self._groups[replica])
        self._start(replica)

        def firsts() -> list[Event] | None:
            """Returns the other groups' first steps without the lost group; None if one has none yet."""
            later = [
                [step for step in worker.steps() if step["step"] > before and step["replicas"] < there]
                for worker in others
            ]
            return [steps[0] for steps in later] if all(later) else None

        found = self._wait("the others go on", firsts, STEP_TIMEOUT_S)
        next_step_s = max(step["t"] for step in found) - now
        back = self._wait("all train again", lambda: self._all_since(self._built_at(replica)), STEP_TIMEOUT_S)
        return {
            "rank": replica * self._size + rank,
            "next_step_s": round(next_step_s, 3),
            "all_back_s": round(max(step["t"] for step in back) - now, 3),
            "newcomer_builds_s": round(self._built_at(replica) - now, 3),
            "steps_dropped": max(self._dropped(worker, now) for worker in others),
        }

    def _built_at(self, replica: int) -> float:
        built = [
            event["t"]
            for worker in self._groups[replica]
            for event in worker.follow()
            if event["what"] == "built"
        ]
        return max(built) if len(built) == self._size else float("inf")

    def _dropped(self, worker: WorkerProcess, since: float) -> int:
        return sum(event["what"] == "dropped" and event["t"] > since for event in worker.follow())

    def differing(self) -> int:
        """Returns the number of (step, rank in its group) pairs at which replicas had different numbers."""
        seen: dict[tuple[int, int], set[str]] = {}
        for record in self._directory.glob("record_*.jsonl"):
            worker = WorkerProcess("", self._groups[0][0].process, record, record)
            for step in worker.steps():
                place = step["step"], step["rank"] % self._size
                seen.setdefault(place, set()).add(step["digest"])
        return sum(len(each) > 1 for each in seen.values())

    def _wait(self, what: str, condition: Callable[[], Any], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            ended = [worker for group in self._groups.values() for worker in group if not worker.alive]
            if ended or time.monotonic() > deadline:
                why = (
                    f"rank {ended[0].name} has ended" if ended else f"waited {timeout_s:g} s in vain: {what}"
                )
                logs = (ended or [worker for group in self._groups.values() for worker in group])[:1]
                raise RuntimeError(f"torchft: {why}\n{logs[0].log.read_text(errors='replace')[-3000:]}")
            time.sleep(POLL_S)
        return found


def _end(group: list[WorkerProcess]) -> None:
    for worker in group:
        with contextlib.suppress(ProcessLookupError):
            worker.process.kill()
        worker.process.wait()


def measure_peer(kind: str, options: argparse.Namespace, directory: Path, say: Say) -> dict[str, Any]:
    """Kills single ranks of a program with torchft; returns the results.

    If the program does not go on, the results end with that kill, and ``failed`` has the end of a rank's log.
    """
    chance, kills = random.Random(f"{options.seed} {kind} torchft"), list[Event]()
    found: dict[str, Any] = {"seed": options.seed, "kills": kills}
    job = TorchftJob(directory, kind=kind, pace_ms=options.pace_ms, python=options.peer_python, say=say)
    with job:
        try:
            job.begin()
            for number in range(options.kills):
                kills.append(job.kill(chance))
                say(f"torchft, {kind}: kill {number + 1} of {options.kills}: {kills[-1]}")
        except RuntimeError as error:
            found["failed"] = str(error)
            say(f"torchft, {kind}: {error}")
        found["steps_at_which_replicas_differ"] = job.differing()
    found["load_after"] = round(os.getloadavg()[0], 2)
    return {**found, "summary": median_and_worst(kills, PEER_FIGURES)}
