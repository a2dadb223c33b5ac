"""Real worker processes, driven line by line."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.scheduler.processes import Pki, Scheduler, environment
from tests.waiting import LIMIT_S


class Process:
    """A module of this package, run as a worker; spoken with by its standard input and output."""

    def __init__(self, log: Path, module: str, *arguments: str, **env: str) -> None:
        self._log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", f"tests.end_to_end.{module}", *arguments],
                env=environment(**{"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", **env}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    @property
    def log(self) -> str:
        """What it wrote to stderr."""
        return self._log.read_text()


class Worker(Process):
    """One process of ``obedient_worker``."""

    def __init__(self, log: Path, **env: str) -> None:
        super().__init__(log, "obedient_worker", **env)

    def tell(self, code: str) -> None:
        """Gives it an expression to evaluate, without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(code + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """Waits for its next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(LIMIT_S)}:\n{self.log}"
        return line.rstrip("\n")

    def ask(self, code: str) -> str:
        self.tell(code)
        return self.answer()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def finish(self) -> int:
        """Ends its input and returns its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(LIMIT_S)


class Company:
    """The workers of one test; those that still run are killed at its end."""

    def __init__(self, directory: Path, scheduler: Scheduler, pki: Pki | None) -> None:
        self._directory = directory
        self._env = {
            "MS_SCHED_PORT": str(scheduler.port),
            "MS_LOG_LEVEL": "DEBUG",
            **(pki.env() if pki else {}),
        }
        self.workers: list[Worker] = []

    def start(self, **env: str) -> Worker:
        """Starts one more worker."""
        log = self._directory / f"worker_{len(self.workers)}.log"
        worker = Worker(log, **{**self._env, **env})
        self.workers.append(worker)
        return worker

    def form(self, count: int, **env: str) -> list[Worker]:
        """Starts ``count`` workers named by number and waits until they are in; in order of rank."""
        workers = [
            self.start(**{"MS_NODE_ID": str(i), "MS_WORKER_NUM": str(count), **env}) for i in range(count)
        ]
        assert [worker.answer() for worker in workers] == [f"ok {i}" for i in range(count)]
        return workers


@contextlib.contextmanager
def company(directory: Path, scheduler: Scheduler, pki: Pki | None = None) -> Iterator[Company]:
    """Workers for this scheduler."""
    hired = Company(directory, scheduler, pki)
    try:
        yield hired
    finally:
        for worker in hired.workers:
            if worker.process.poll() is None:
                worker.kill()
            worker.process.wait(LIMIT_S)
            for stream in (worker.process.stdin, worker.process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
