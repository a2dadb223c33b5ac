"""A job with three schedulers, which this process restarts when they end, and the etcd that they share."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from muster.bench.failover.etcd import EtcdCluster, make_keys
from muster.bench.launches import free_ports
from muster.bench.recovery.job import MeasuredJob
from muster.bench.recovery.loop import PACE_VARIABLE

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
RESTART_S = 1.0
"""The pause before a scheduler is started again, in seconds, as `RestartSec=` in deploy/systemd."""

DEPOSED = 75
WORKER = "muster.bench.recovery.digits"
_SESSIONS = re.compile(r"^muster_sessions (\d+)", re.M)


class Scheduler:
    """One of the schedulers: its process, which is started again when it ends."""

    def __init__(self, job: SeveralSchedulers, host: str) -> None:
        self.job = job
        self.host = host
        self.log = job.directory / f"scheduler-{host}.log"
        self.codes: list[int] = []
        self._down_since: float | None = None
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Starts the process."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.job.command_of_schedulers, "--bind", self.host],
                env={**self.job.env, "MS_ROLE": "MS_SCHED", "MS_METRICS_HOST": self.host},
                cwd=self.job.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._down_since = None

    def tend(self) -> None:
        """Starts it again a second after its end, as systemd does."""
        code = self.process.poll()
        if code is None:
            return
        if self._down_since is None:
            self._down_since = time.monotonic()
            self.codes.append(code)
        elif time.monotonic() > self._down_since + RESTART_S:
            self.start()

    @property
    def listens(self) -> bool:
        """Whether it accepts connections."""
        try:
            socket.create_connection((self.host, self.job.port), 0.2).close()
        except OSError:
            return False
        return True

    def sessions(self) -> int:
        """Returns the number of its workers' streams, from its metrics."""
        with contextlib.suppress(OSError):
            where = f"http://{self.host}:{self.job.metrics_port}/metrics"
            with urllib.request.urlopen(where, timeout=1.0) as reply:
                found = _SESSIONS.search(reply.read().decode())
            return int(found[1]) if found else 0
        return 0


class SeveralSchedulers(MeasuredJob):
    """A job that learns the digits under three schedulers.

    Args:
        directory: the folder for keys, logs and records, which is created.
        workers: MS_WORKER_NUM.
        worker_min: MS_WORKER_MIN.
        pace_s: the least time of a step, in seconds.
        say: shows progress.
        module: the module that runs as a scheduler.
        arguments: the schedulers' arguments.
        launched: whether each worker runs under its own launcher, as on a host of its own.
        worker: the module that a worker runs.
        quota_bytes: the quota of etcd's database in bytes; 0 for etcd's default.
    """

    def __init__(
        self,
        directory: Path,
        *,
        workers: int,
        worker_min: int,
        pace_s: float,
        say: Callable[[str], None],
        module: str = "scheduler",
        arguments: Sequence[str] = (),
        launched: bool = False,
        worker: str = WORKER,
        quota_bytes: int = 0,
    ) -> None:
        directory.mkdir(parents=True)
        make_keys(directory / "keys", ",".join(HOSTS))
        keys = directory / "keys" / "etcd"
        self.etcd = EtcdCluster(directory / "etcd", keys, quota_bytes=quota_bytes)
        self.command_of_schedulers = ("-m", module, *arguments)
        self.schedulers: list[Scheduler] = []
        pace = directory / "pace"
        pace.write_text(str(pace_s))
        self.metrics_port = free_ports()[0]
        command = ["-m", worker, "--epochs=1000000", "--checkpoint-dir="]
        if launched:
            shape = ("--nnodes", str(workers), "--nproc-per-node", "1", "--start", "exec")
            command = ["-m", "muster", "run", *shape, "--", sys.executable, *command]
        super().__init__(
            directory,
            workers=workers,
            worker_min=worker_min,
            command=command,
            launched=launched,
            env={
                PACE_VARIABLE: str(pace),
                "MS_TOPO_TIMEOUT": "120",
                "MS_SCHED_HOST": ",".join(HOSTS),
                "MS_RECOVERY_PATH": f"etcd://{','.join(self.etcd.endpoints)}/muster",
                "MS_METRICS_PORT": str(self.metrics_port),
            },
            say=say,
        )

    def begin(self) -> None:
        """Starts everything, and waits until all train."""
        self.etcd.start()
        self.schedulers = [Scheduler(self, host) for host in HOSTS]
        self.wait("somebody leads", self.leader, 60)
        for number in range(self.size):
            self.start_worker(str(number))
        self.wait("all train", lambda: self.training(self.size, 3), 120)

    def check(self, *, may_end: bool = False) -> None:
        """Restarts schedulers that have ended, and checks the workers; see :meth:`MeasuredJob.check`."""
        for scheduler in self.schedulers:
            scheduler.tend()
        super().check(may_end=may_end)

    def leader(self, but: subprocess.Popen[bytes] | None = None) -> Scheduler | None:
        """Returns the scheduler that listens, unless its process is ``but``; None if none does.

        ``but`` is a process rather than a host, because a restarted scheduler on the last leader's host may
        be the next leader.
        """
        return next((each for each in self.schedulers if each.process is not but and each.listens), None)

    def settled(self, but: subprocess.Popen[bytes] | None = None) -> Scheduler:
        """Waits for a leader, other than the process ``but``, that has all workers' streams; returns it."""

        def found() -> Scheduler | None:
            leader = self.leader(but)
            return leader if leader is not None and leader.sessions() >= len(self.living()) else None

        settled: Scheduler = self.wait("all workers are with the one that leads", found, 60)
        return settled

    def kill_leader(self, old: Scheduler) -> tuple[float, subprocess.Popen[bytes]]:
        """Kills the leader by SIGKILL; returns the time on the monotonic clock in s, and its process."""
        began, process = time.monotonic(), old.process
        process.send_signal(signal.SIGKILL)
        process.wait()
        return began, process

    def takeover(self, old: subprocess.Popen[bytes], since: float) -> tuple[Scheduler, float, float]:
        """Waits until another leader than ``old`` listens, and then has all workers' streams.

        Returns:
            The new leader, and the seconds from ``since`` until each of the two.
        """
        self.wait("the next one leads", lambda: self.leader(old), 60)
        led_s = time.monotonic() - since
        new = self.settled(old)
        return new, round(led_s, 3), round(time.monotonic() - since, 3)

    def irregular_steps(self, since: float) -> int:
        """Returns the number of steps since ``since`` that were lost or doubled, over all workers."""
        return sum(
            after["t"] > since and after["step"] != before["step"] + 1
            for worker in self.workers
            for before, after in itertools.pairwise(worker.steps())
        )

    def group_changes(self, since: float) -> int:
        """Returns the number of changes of generation in training since ``since``."""
        return sum(
            after["t"] > since and after["generation"] != before["generation"]
            for before, after in itertools.pairwise(self.living()[0].steps())
        )

    def __exit__(self, *error: object) -> None:
        """Kills everything."""
        for scheduler in self.schedulers:
            if scheduler.process.poll() is None:
                scheduler.process.send_signal(signal.SIGKILL)
                scheduler.process.wait()
        super().__exit__(None, None, None)
        self.etcd.close()
