"""Fills up the journal's space and kills a worker: training must go on once there is space again.

Measured on etcd, whose database reaches its quota, and on a small disk (a tmpfs, which requires root to
mount), each with ``--serve`` and without.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from muster.bench.failover.job import SeveralSchedulers
from muster.bench.launches import MUSTER
from muster.bench.recovery.job import MeasuredJob, WorkerProcess
from muster.bench.recovery.loop import PACE_VARIABLE
from muster.bench.small_disk import SmallDisk

QUOTA_BYTES = 8 << 20
LIMIT_S = 10.0
"""The time within which the survivors must train after there is space again, in seconds."""

_GAUGE = re.compile(r"^muster_journal_unwritable (\S+)$", re.M)


class OnEtcd(SeveralSchedulers):
    """Three schedulers on an etcd with a small quota."""

    def fill(self) -> None:
        """Takes the journal's space away."""
        self.etcd.fill()

    def make_space(self) -> None:
        """Gives it back."""
        self.etcd.make_space()

    def lives(self) -> list[int]:
        """Returns the process ids of all schedulers."""
        return [each.process.pid for each in self.schedulers]

    def metrics_at(self) -> tuple[str, int]:
        """Returns host and port at which the leading scheduler serves its metrics."""
        leader = self.leader()
        return (leader.host if leader is not None else "127.0.0.1"), self.metrics_port


class OnDisk(MeasuredJob):
    """One scheduler whose journal has a disk of its own."""

    def __init__(
        self, directory: Path, *, workers: int, pace_s: float, say: Callable[[str], None], serve: bool
    ) -> None:
        directory.mkdir(parents=True)
        self._disk = SmallDisk(directory / "disk")
        self._arguments = ("--serve",) if serve else ()
        pace = directory / "pace"
        pace.write_text(str(pace_s))
        self._metrics_port = 0
        super().__init__(
            directory,
            workers=workers,
            worker_min=2,
            command=["-m", "muster.bench.recovery.digits", "--epochs=1000000", "--checkpoint-dir="],
            env={PACE_VARIABLE: str(pace), "MS_RECOVERY_PATH": str(self._disk.path / "journal")},
            say=say,
        )
        self._metrics_port = self.port + 1 if self.port < 65_535 else self.port - 1
        self.env["MS_METRICS_PORT"] = str(self._metrics_port)

    def begin(self) -> None:
        """Mounts the disk, starts everything, and waits until all train.

        Raises:
            RuntimeError: this process must not mount disks.
        """
        self._disk.mount()
        self.start_scheduler(*self._arguments)
        for number in range(self.size):
            self.start_worker(str(number))
        self.wait("all train", lambda: self.training(self.size, 3), 120)

    def fill(self) -> None:
        """Takes the journal's space away."""
        self._disk.fill()

    def make_space(self) -> None:
        """Gives it back."""
        self._disk.make_space()

    def lives(self) -> list[int]:
        """Returns the process ids of all schedulers that run."""
        assert self.scheduler is not None
        return [self.scheduler.pid] if self.scheduler.poll() is None else []

    def metrics_at(self) -> tuple[str, int]:
        """Returns host and port at which the leading scheduler serves its metrics."""
        return "127.0.0.1", self._metrics_port

    def __exit__(self, *error: object) -> None:
        """Kills everything, and unmounts the disk."""
        super().__exit__(*error)
        self._disk.unmount()


@contextlib.contextmanager
def job_without_much_space(
    part: str, directory: Path, *, workers: int, pace_s: float, say: Callable[[str], None], serve: bool
) -> Iterator[Any]:
    """Yields a job that trains with its journal on ``etcd`` or on a small ``disk``."""
    if part == "disk":
        with OnDisk(directory, workers=workers, pace_s=pace_s, say=say, serve=serve) as on_disk:
            on_disk.begin()
            yield on_disk
        return
    with OnEtcd(
        directory,
        workers=workers,
        worker_min=2,
        pace_s=pace_s,
        say=say,
        arguments=("--serve",) if serve else (),
        quota_bytes=QUOTA_BYTES,
    ) as on_etcd:
        on_etcd.begin()
        on_etcd.settled()
        yield on_etcd


def measure(job: Any, shortages_s: list[float]) -> dict[str, Any]:
    """Fills up the journal's space for each of these times, and kills a worker in the middle.

    Raises:
        RuntimeError: the job did not behave as expected; the message says how.
    """
    rows = []
    for number, seconds in enumerate(shortages_s):
        rows.append(_shortage(job, seconds, job.living()[number % job.size]))
        row = rows[-1]
        job.say(
            f"no space for {seconds:g} s: the survivors' next step {row['next_step_s']} s after it: {row}"
        )
        job.start_worker(f"r{len(job.workers)}")
        job.wait("all train again", lambda: job.training(job.size, 3), 60)
    return {
        "shortages": rows,
        "summary": {
            "shortages_s": list(shortages_s),
            "next_step_s": [row["next_step_s"] for row in rows],
            "within_limit": sum(row["next_step_s"] <= LIMIT_S for row in rows),
            "same_schedulers": all(row["same_schedulers"] for row in rows),
            "steps_until_the_death": [row["steps_until_the_death"] for row in rows],
            "given_up": sum(len(each.codes) for each in getattr(job, "schedulers", ())),
        },
    }


def _shortage(job: Any, seconds: float, victim: WorkerProcess) -> dict[str, Any]:
    schedulers, steps = job.lives(), _steps(job)
    job.fill()
    began = time.monotonic()
    _sit_out(job, began + 0.3 * seconds)
    trained = _steps(job) - steps
    died = victim.kill()
    job.wait("the metric says so", lambda: _unwritable(job) == 1.0, 30)
    job.wait("the health says so", lambda: _health(job) == "NOT_SERVING", 30)
    _sit_out(job, began + seconds)
    job.make_space()
    freed = time.monotonic()
    world = job.size - 1
    job.wait("the survivors train", lambda: job.training(world), 120)
    first = max(
        next(step["t"] for step in worker.steps() if step["t"] > died and step["world"] == world)
        for worker in job.living()
    )
    job.wait("the metric says that it is over", lambda: _unwritable(job) == 0.0, 30)
    job.wait("the health says that it is over", lambda: _health(job) == "SERVING", 30)
    return {
        "seconds": seconds,
        "next_step_s": round(first - freed, 2),
        "steps_until_the_death": trained,
        "same_schedulers": job.lives() == schedulers,
    }


def _sit_out(job: Any, until: float) -> None:
    while time.monotonic() < until:
        job.check()
        time.sleep(0.05)


def _steps(job: Any) -> int:
    return sum(len(worker.steps()) for worker in job.workers)


def _unwritable(job: Any) -> float | None:
    host, port = job.metrics_at()
    with contextlib.suppress(OSError):
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5.0) as reply:
            found = _GAUGE.search(reply.read().decode())
        return float(found[1]) if found else None
    return None


def _health(job: Any) -> str:
    """Returns what ``muster health`` prints about the leading scheduler."""
    host, _ = job.metrics_at()
    command = [*MUSTER, "health", "--host", host]
    done = subprocess.run(
        command,
        env={**os.environ, **job.env},
        cwd=job.directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.strip() or done.stderr.strip()
