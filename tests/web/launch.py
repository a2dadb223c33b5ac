"""A real job on this host with its own keys, and a page beside it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.scheduler.processes import ROOT, environment
from tests.waiting import LIMIT_S
from tests.web.processes import Web, web

STARTING_S = 100.0


@dataclass
class Launch:
    """A job that ``muster run`` has started."""

    process: subprocess.Popen[bytes]
    directory: Path
    env: dict[str, str]

    def muster(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs another command, which finds the job by itself."""
        return subprocess.run(
            [sys.executable, "-m", "muster", *arguments],
            cwd=self.directory,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    def status(self) -> dict[str, Any]:
        """The job as ``muster status`` has it; empty while nobody answers."""
        ran = self.muster("status", "--json")
        return dict(json.loads(ran.stdout)) if not ran.returncode else {}

    def pid_of(self, rank: int) -> int:
        """The process of a rank."""
        return next(int(each["pid"]) for each in self.status()["workers"] if each["rank"] == rank)

    def web(self) -> AbstractContextManager[Web]:
        """A page for it."""
        return web(None, **self.env)


@contextlib.contextmanager
def launch(directory: Path, workers: int, *script: str, **settings: str) -> Iterator[Launch]:
    """Starts a job with a scheduler and certificates, waits until it trains, and ends it."""
    env = environment(XDG_RUNTIME_DIR=str(directory), MS_NODE_TIMEOUT="20", **settings)
    train = (str(ROOT / "train.py"), "--epochs", "1000000", "--batch-size", "96", "--checkpoint-dir", "")
    keys = ("certs", "init", "--dir", "keys", "--password-file", "password")
    subprocess.run(
        [sys.executable, "-m", "muster", *keys], cwd=directory, env=env, check=True, capture_output=True
    )
    tls = ("--config", "keys/config.json", "--password-file", "password")
    options = ("-n", str(workers), "--scheduler", "--min-workers", "2", *tls)
    command = [sys.executable, "-m", "muster", "run", *options, "--", sys.executable, *(script or train)]
    with (directory / "run.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=directory, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    job = Launch(process, directory, env)
    try:
        deadline = time.monotonic() + STARTING_S
        while job.status().get("state") != "running":
            assert process.poll() is None and time.monotonic() < deadline, (directory / "run.log").read_text()
            time.sleep(0.2)
        yield job
    finally:
        process.terminate()
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(LIMIT_S)
