"""A job for recovery benchmarks: a scheduler and workers on this host, mutual TLS, their records."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from muster.bench.launches import environment, free_ports, make_keys
from muster.bench.recovery.loop import RECORD_VARIABLE

POLL_S = 0.005

J = TypeVar("J", bound="MeasuredJob")


class WorkerProcess:
    """One worker process, and the events that it has recorded so far."""

    def __init__(
        self, name: str, process: subprocess.Popen[Any], record: Path, log: Path, *, launched: bool = False
    ) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.killed = False
        self._launched = launched
        self.events: list[dict[str, Any]] = []
        self._record = record
        self._read = 0

    @property
    def alive(self) -> bool:
        """Whether the process runs and was not killed."""
        return not self.killed and self.process.poll() is None

    def follow(self) -> list[dict[str, Any]]:
        """Reads new events; returns all events so far."""
        if self._record.exists():
            with self._record.open("rb") as file:
                file.seek(self._read)
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._read += len(whole) + 1
                self.events += [json.loads(line) for line in whole.splitlines()]
        return self.events

    def steps(self) -> list[dict[str, Any]]:
        """Returns the finished steps, in order."""
        return [event for event in self.follow() if event["what"] == "step"]

    def kill(self) -> float:
        """Kills the worker, not its launcher, by SIGKILL; returns the time on the monotonic clock in s."""
        self.killed = True
        if self._launched:
            pid = next(event["pid"] for event in self.follow() if event["what"] == "joined")
            now = time.monotonic()
            os.kill(pid, signal.SIGKILL)
        else:
            now = time.monotonic()
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        return now


def longest_pause(worker: WorkerProcess, since: float = 0.0, *, but_first: int = 0) -> float:
    """Returns the longest time between two steps after ``since``, without the first ``but_first`` steps."""
    times = [step["t"] for step in worker.steps() if step["t"] > since][but_first:]
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def median_and_worst(kills: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """Returns the median and the largest value of each of the kills' figures."""
    found = {key: [kill[key] for kill in kills if key in kill] for key in keys}
    return {
        key: {"median": round(statistics.median(values), 4), "worst": max(values)}
        for key, values in found.items()
        if values
    }


class MeasuredJob:
    """A scheduler and its workers. A context manager: what still runs at the end is killed.

    Args:
        directory: the folder for keys, journal, logs and records.
        workers: MS_WORKER_NUM.
        worker_min: MS_WORKER_MIN.
        command: a worker's command line after the interpreter.
        env: further environment variables of all processes.
        say: shows progress.
        launched: whether ``command`` runs a launcher, which starts the worker.

    Attributes:
        scheduler_module: the module that runs as the scheduler.
        scheduler_prefix: a command before the scheduler's interpreter, such as ``ip netns exec``.
    """

    scheduler_module = "scheduler"
    scheduler_prefix: tuple[str, ...] = ()

    def __init__(
        self,
        directory: Path,
        *,
        workers: int,
        worker_min: int,
        command: Sequence[str],
        launched: bool = False,
        env: Mapping[str, str] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.directory = directory
        self.size = workers
        self.say = say
        self.workers: list[WorkerProcess] = []
        self.scheduler: subprocess.Popen[bytes] | None = None
        self._command = list(command)
        self._launched = launched
        self.config, password = make_keys(directory / "keys")
        self.port = free_ports()[0]
        self.env = environment() | {
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MS_WORKER_NUM": str(workers),
            "MS_WORKER_MIN": str(worker_min),
            "MS_SCHED_HOST": "127.0.0.1",
            "MS_SCHED_PORT": str(self.port),
            "MS_CONFIG_FILE": str(self.config),
            "MS_SERVER_PASSWORD_FILE": str(password),
            "MS_CLIENT_PASSWORD_FILE": str(password),
            "MS_ENABLE_RECOVERY": "1",
            "MS_RECOVERY_PATH": str(directory / "journal"),
            **(env or {}),
        }

    def arguments(self, *more: str) -> None:
        """Adds arguments to the command line of workers that are started later."""
        self._command += more

    # ------------------------------------------------------------ processes

    def start_scheduler(self, *arguments: str) -> None:
        """Starts the scheduler, for the first time or on the journal of the previous one."""
        with (self.directory / "scheduler.log").open("ab") as log:
            self.scheduler = subprocess.Popen(
                [*self.scheduler_prefix, sys.executable, "-m", self.scheduler_module, *arguments],
                env={**self.env, "MS_ROLE": "MS_SCHED"},
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill_scheduler(self) -> float:
        """Kills the scheduler by SIGKILL; returns the time on the monotonic clock, in seconds."""
        assert self.scheduler is not None
        now = time.monotonic()
        self.scheduler.send_signal(signal.SIGKILL)
        self.scheduler.wait()
        return now

    def start_worker(self, name: str, **env: str) -> WorkerProcess:
        """Starts a worker with this node id."""
        number = len(self.workers)
        record, log = self.directory / f"record_{number}.jsonl", self.directory / f"worker_{number}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *self._command],
                env={
                    **self.env,
                    "MS_ROLE": "MS_WORKER",
                    "MS_NODE_ID": name,
                    RECORD_VARIABLE: str(record),
                    **env,
                },
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        worker = WorkerProcess(name, process, record, log, launched=self._launched)
        self.workers.append(worker)
        return worker

    # ------------------------------------------------------------ watching

    def wait(
        self, what: str, condition: Callable[[], Any], timeout_s: float, *, may_end: bool = False
    ) -> Any:
        """Polls until ``condition`` holds; returns its value.

        Raises:
            RuntimeError: the condition was not met in time, or a worker ended with an error before.
        """
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            self.check(may_end=may_end)
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {timeout_s:g} s in vain: {what}\n{self.tails()}")
            time.sleep(POLL_S)
        return found

    def check(self, *, may_end: bool = False) -> None:
        """Raises RuntimeError if a worker that nobody killed has ended before its time."""
        for worker in self.workers:
            code = worker.process.poll()
            if code not in (None, -signal.SIGKILL) and not worker.killed and not (may_end and code == 0):
                raise RuntimeError(f"worker {worker.name} ended with code {code}\n{self.tails()}")

    def living(self) -> list[WorkerProcess]:
        """Returns the workers that run."""
        return [worker for worker in self.workers if worker.alive]

    def training(self, world: int, steps: int = 1) -> bool:
        """Whether all living workers have finished ``steps`` steps in a generation of ``world`` ranks."""
        living = self.living()
        last = [worker.steps()[-steps:] for worker in living]
        return len(living) == world and all(
            len(each) == steps
            and all(step["world"] == world for step in each)
            and len({step["generation"] for step in each}) == 1
            for each in last
        )

    def tails(self) -> str:
        """Returns the end of every log, for an error message."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.directory.glob("*.log"))
        )

    def __enter__(self: J) -> J:
        """Returns the job itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kills what still runs."""
        for process in [*(worker.process for worker in self.workers), self.scheduler]:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
