"""A launch's directory of logs and, while it runs, the file by which ``muster status`` finds it.

The launcher writes it, ``muster status`` reads it. Passwords are in neither. The file that names the
scheduler and the certificates is for its owner only, in a directory that nobody else can write to.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

RUNS = Path("muster-runs")
LATEST = "latest"
ATTEMPTS = 1000


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch that runs on this host.

    Attributes:
        job_id: its job.
        host: where the job's scheduler listens.
        port: likewise.
        config: the job's config.json; empty: none.
        password_file: of the certificates; empty: not known.
        directory: of its logs.
        pid: of the launcher.
        began: when that process was started, in the kernel's ticks: another may get its number.
    """

    job_id: str
    host: str
    port: str
    config: str
    password_file: str
    directory: str
    pid: int
    began: int


class LaunchDirectory:
    """One launch's directory, and its file while it runs.

    Args:
        job_id: the job.
        directory: of the logs, which exists.
    """

    def __init__(self, job_id: str, directory: Path) -> None:
        self.path = directory
        self._job_id = job_id
        self._file: Path | None = None

    @classmethod
    def begin(cls, job_id: str, log_dir: Path | None, *, shared: bool = False) -> LaunchDirectory:
        """Makes the directory of the logs.

        Args:
            job_id: the job.
            log_dir: the directory to take; None: a new one, ``muster-runs/<job>-<time>``, to which the link
                ``muster-runs/latest`` leads from then on.
            shared: the job has other hosts, which may share the file system: this one's name is added.

        Raises:
            OSError: it cannot be made, or not be written to.
        """
        if log_dir is None:
            return cls(job_id, _new_directory(job_id, os.uname().nodename if shared else ""))
        log_dir.mkdir(parents=True, exist_ok=True)
        if not os.access(log_dir, os.W_OK | os.X_OK):
            raise PermissionError(13, "permission denied", str(log_dir))
        return cls(job_id, log_dir)

    def publish(self, *, host: str, port: str, config: str, password_file: str) -> None:
        """Lets ``muster status`` find the job. Where that cannot be written, it asks for the address."""
        pid = os.getpid()
        began = _began(pid) or 0
        facts = Launched(
            self._job_id, host, port, config, password_file, str(self.path.absolute()), pid, began
        )
        with contextlib.suppress(OSError):
            file = _own_directory(os.environ) / f"{pid}.json"
            file.unlink(missing_ok=True)  # of a process that had this number before
            self._file = file
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as out:
                json.dump(asdict(facts), out)

    def withdraw(self) -> None:
        """The launch is over."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
            self._file = None


def running(env: Mapping[str, str]) -> list[Launched]:
    """The launches of this user that run on this host, the latest first."""
    found = []
    with contextlib.suppress(OSError):
        for file in _own_directory(env).glob("*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                launch = _read(file)
                if launch.began and _began(launch.pid) == launch.began:
                    found.append(launch)
    return sorted(found, key=lambda launch: launch.began, reverse=True)


def _read(file: Path) -> Launched:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, encoding="utf-8") as text:
        return Launched(**json.load(text))


def _own_directory(env: Mapping[str, str]) -> Path:
    """A directory that is this user's alone.

    Raises:
        OSError: there is none, and none can be made.
    """
    runtime, temporary = env.get("XDG_RUNTIME_DIR", ""), env.get("TMPDIR") or "/tmp"
    directory = Path(runtime) / "muster" if runtime else Path(temporary) / f"muster-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(1, "is not this user's alone", str(directory))
    return directory


def _began(pid: int) -> int | None:
    """When a process was started, in ticks since the machine was; None: there is no such process."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        )
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _new_directory(job_id: str, host: str) -> Path:
    words = [job_id, time.strftime("%Y%m%d-%H%M%S"), host]
    name = "-".join(re.sub(r"[^A-Za-z0-9._-]", "_", word)[:64] for word in words if word)
    RUNS.mkdir(exist_ok=True)
    for attempt in range(1, ATTEMPTS):
        directory = RUNS / (name if attempt == 1 else f"{name}-{attempt}")
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            _point_to(directory)
            return directory
    raise FileExistsError(17, "there are too many of that name", str(RUNS / name))


def _point_to(directory: Path) -> None:
    """Makes the link beside and renames it, so that it always leads somewhere."""
    link = directory.parent / f".{LATEST}-{os.getpid()}"
    with contextlib.suppress(OSError):  # a file system without links
        link.unlink(missing_ok=True)
        link.symlink_to(directory.name)
        os.replace(link, directory.parent / LATEST)  # noqa: PTH105
