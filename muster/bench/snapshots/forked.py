"""Starts a job's workers as forks of a process that has loaded torch, because loading takes long."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.bench.recovery.job import MeasuredJob, WorkerProcess
from muster.bench.recovery.loop import RECORD_VARIABLE


class Nursery:
    """The process that forks workers; closing it kills those that are left.

    Args:
        module: the module whose ``main()`` each worker runs.
        env: the environment of the forking process.
        log: the file for its own output.
    """

    def __init__(self, module: str, *, env: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "muster.bench.snapshots.nursery", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env=dict(env),
            )
        self._codes: dict[int, int] = {}
        self._pids: list[int] = []
        self._changed = threading.Condition()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            what, pid, *code = line.split()
            with self._changed:
                if what == "begun":
                    self._pids.append(int(pid))
                else:
                    self._codes[int(pid)] = int(code[0])
                self._changed.notify_all()
        with self._changed:
            self._process.wait()
            self._changed.notify_all()

    def start(
        self, arguments: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path, *, namespace: str = ""
    ) -> Forked:
        """Starts a worker, in a network namespace if one is named.

        Raises:
            RuntimeError: the nursery has ended.
        """
        assert self._process.stdin is not None
        log.touch()  # a busy machine's worker may open it later than others look for it
        order = {
            "arguments": list(arguments),
            "env": dict(env),
            "log": str(log),
            "cwd": str(cwd),
            "namespace": namespace,
        }
        with self._changed:
            count = len(self._pids)
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            self._changed.wait_for(lambda: len(self._pids) > count or self._process.poll() is not None, 180)
            if len(self._pids) == count:
                raise RuntimeError("no worker could be started: see nursery.log")
            return Forked(self, self._pids[-1])

    def code(self, pid: int) -> int | None:
        """Returns a worker's exit code; None while it runs."""
        with self._changed:
            return self._codes.get(pid)

    def wait(self, pid: int, timeout_s: float | None) -> int:
        """Waits for a worker's end; returns its exit code."""
        with self._changed:
            self._changed.wait_for(
                lambda: pid in self._codes or self._process.poll() is not None, timeout_s or 60
            )
            return self._codes.get(pid, -signal.SIGKILL)

    def close(self) -> None:
        """Ends the forking process, which kills the workers that are left."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait(60)
        self._listener.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Forked:
    """A forked worker, with the methods of ``subprocess.Popen`` that a job needs.

    Args:
        nursery: the process that forked it.
        pid: its process id.
    """

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid

    def poll(self) -> int | None:
        """Returns its exit code; None while it runs."""
        return self._nursery.code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end."""
        return self._nursery.wait(self.pid, timeout)

    def send_signal(self, number: int) -> None:
        """Sends a signal, if the worker runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL, if the worker runs."""
        self.send_signal(signal.SIGKILL)


class ForkedJob(MeasuredJob):
    """A job whose workers are forks of one process; ``command`` is their arguments. See :class:`MeasuredJob`.

    Args:
        directory: the folder for keys, journal, logs and records.
        module: the module whose ``main()`` a worker runs; "" if each worker is a process of its own that runs
            ``command``.
        options: further arguments of :class:`MeasuredJob`.
    """

    def __init__(self, directory: Path, module: str, **options: Any) -> None:
        super().__init__(directory, **options)
        self._nursery: Nursery | None = None
        if module:
            self._nursery = Nursery(module, env=self.env, log=directory / "nursery.log")

    def namespace_of(self, name: str) -> str:
        """Returns the network namespace in which a worker is started; "" for that of the forking process."""
        return ""

    def start_worker(self, name: str, **env: str) -> WorkerProcess:
        """Starts a worker with this node id; see :class:`MeasuredJob`."""
        if self._nursery is None:
            return super().start_worker(name, **env)
        number = len(self.workers)
        record, log = self.directory / f"record_{number}.jsonl", self.directory / f"worker_{number}.log"
        whole = {**self.env, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": name, RECORD_VARIABLE: str(record), **env}
        process: Any = self._nursery.start(
            self._command, whole, log, self.directory, namespace=self.namespace_of(name)
        )
        self.workers.append(WorkerProcess(name, process, record, log))
        return self.workers[-1]

    def __exit__(self, *error: object) -> None:
        """Kills what still runs."""
        super().__exit__(*error)
        if self._nursery is not None:
            self._nursery.close()
