"""Runs the launcher as users do, as a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests import ports
from tests.waiting import wait_for

DEADLINE_S = 200.0


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without what would steer a launch, plus ``variables``.

    Nor gRPC's log level, which a client of the scheduler sets where another test has made one.
    """
    dropped = ("MS_", "OMP_", "GRPC_VERBOSITY", "GRPC_TRACE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "MS_SCHED_PORT": "6667", **variables}


@dataclass
class Place:
    """A directory with scripts and the launches that run there, on CPUs unless they mean ``gpus``."""

    directory: Path
    gpus: bool = False
    launched: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def script(self, text: str, name: str = "script.py") -> str:
        """Writes a script and returns its name."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    def start(self, *options: str, command: tuple[str, ...], **variables: str) -> subprocess.Popen[bytes]:
        """Starts a launch and returns its process. A scheduler of its own takes any free port."""
        if "--scheduler" in options:
            variables.setdefault("MS_SCHED_PORT", "")
        if not self.gpus:
            variables.setdefault("CUDA_VISIBLE_DEVICES", "")
        launch = subprocess.Popen(
            [sys.executable, "-m", "muster", "run", *options, "--", *command],
            cwd=self.directory,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.launched.append(launch)
        return launch

    def run(self, *options: str, command: tuple[str, ...], **variables: str) -> tuple[int, str, str]:
        """Runs a launch to its end: exit code, output, error output."""
        launch = self.start(*options, command=command, **variables)
        out, err = launch.communicate(timeout=DEADLINE_S)
        return launch.returncode, out.decode(), err.decode()

    def log(self, label: str) -> str:
        """What a worker wrote, without the head of its log."""
        text = (self.directory / "muster-runs" / "latest" / f"worker_{label}.log").read_text()
        return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("# "))

    def scheduler_log(self) -> str:
        """What the scheduler of the latest launch wrote."""
        return (self.directory / "muster-runs" / "latest" / "scheduler.log").read_text()

    def until(self, name: str) -> str:
        """Waits for a file that a script writes (and renames into place) and returns its text."""
        wait_for((self.directory / name).exists)
        return (self.directory / name).read_text()


@contextlib.contextmanager
def place(directory: Path) -> Iterator[Place]:
    """A place whose launches are over when it is left."""
    made = Place(directory)
    try:
        yield made
    finally:
        for launch in made.launched:
            launch.kill()
            launch.communicate()


def free_port(host: str) -> str:
    """See :func:`tests.ports.free_port`."""
    return str(ports.free_port(host))


def gone(pid: int) -> bool:
    """Whether no live process has this number (a zombie counts as gone)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"
