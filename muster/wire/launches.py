"""A launch's directory of logs, the record of the run in it, and the file by which commands find the job.

The launcher writes these files; none of them contains a password. While the launcher runs, a file names the
scheduler and the certificates. Only its owner can read it, and nobody else can write to its directory.

``muster report`` and ``muster web`` read the record. It is one file for each launcher, with one JSON object
per line. The lines say what the launcher has shown, which groups were established, how training progressed,
and how each process ended. Its size is bounded, because the figures of a longer run are further apart in
time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muster.wire.files import open_own, read_regular
from muster.wire.process_stat import stat_fields

INCIDENTS = "incidents"
"""The name of the folder in a run's directory that holds the evidence of hangs."""

INCIDENTS_VARIABLE = "MS_INCIDENT_DIR"

RUNS = Path("muster-runs")
LATEST = "latest"
ATTEMPTS = 1000

MAX_RECORD_BYTES = 8 * 1024 * 1024
MAX_READ_BYTES, MAX_LINES = 64 * 1024 * 1024, 200_000
"""Limits for reading a run's records: bytes, and lines (with figures and others counted separately)."""

MAX_LINE = 1024 * 1024
"""The largest number of characters of a line."""

LAST_S = 2.5e11
"""The latest accepted time, in seconds since 1970, some 8,000 years from now: calendars end soon after."""

FIGURES_BEFORE_THINNING = 1000
_RECORD = re.compile(r"record_[\w.-]+\.jsonl")


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch that runs on this host.

    Attributes:
        job_id: its job.
        host: the address of the job's scheduler.
        port: the port of the job's scheduler.
        config: the job's config.json; empty: none.
        password_file: the file with the certificates' password; empty: not known.
        directory: the directory of its logs.
        pid: the process id of the launcher.
        began: when that process was started, in the kernel's ticks. It shows whether another process has got
            the same process id since.
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
    """One launch's directory, and the file by which commands find the launch while it runs.

    Args:
        job_id: the job.
        directory: the directory of the logs, which exists.
    """

    def __init__(self, job_id: str, directory: Path) -> None:
        self.path = directory
        self._job_id = job_id
        self._file: Path | None = None

    @classmethod
    def begin(cls, job_id: str, log_dir: Path | None, *, shared: bool = False) -> LaunchDirectory:
        """Creates the directory of the logs.

        Args:
            job_id: the job.
            log_dir: the directory to use; None for a new one, ``muster-runs/<job>-<time>``, to which the link
                ``muster-runs/latest`` then points.
            shared: whether the job has other hosts, which may share the file system. The new directory's name
                then includes this host's name.

        Raises:
            OSError: the directory cannot be created or written to.
        """
        if log_dir is None:
            return cls(job_id, _new_directory(job_id, os.uname().nodename if shared else ""))
        log_dir.mkdir(parents=True, exist_ok=True)
        if not os.access(log_dir, os.W_OK | os.X_OK):
            raise PermissionError(13, "permission denied", str(log_dir))
        return cls(job_id, log_dir)

    def publish(self, *, host: str, port: str, config: str, password_file: str) -> None:
        """Writes the file by which ``muster status`` finds the job.

        If the file cannot be written, ``muster status`` needs the scheduler's address.
        """
        pid = os.getpid()
        began = _began(pid) or 0
        facts = Launched(
            self._job_id, host, port, config, password_file, str(self.path.absolute()), pid, began
        )
        with contextlib.suppress(OSError):
            file = _own_directory(os.environ) / f"{pid}.json"
            file.unlink(missing_ok=True)  # An earlier process with the same pid may have left it.
            self._file = file
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as out:
                json.dump(asdict(facts), out)

    def incidents(self, env: Mapping[str, str]) -> dict[str, str]:
        """Returns the setting that keeps a scheduler's evidence of hangs here, unless the user has set it."""
        return {INCIDENTS_VARIABLE: env.get(INCIDENTS_VARIABLE) or str(self.path.absolute() / INCIDENTS)}

    def withdraw(self) -> None:
        """Removes the file by which ``muster status`` finds the launch, because the launch is over."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
            self._file = None


def running(env: Mapping[str, str]) -> list[Launched]:
    """Lists this user's launches that run on this host, the latest first."""
    found = []
    with contextlib.suppress(OSError):
        for file in _own_directory(env).glob("*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                launch = _read(file)
                if launch.began and _began(launch.pid) == launch.began:
                    found.append(launch)
    return sorted(found, key=lambda launch: launch.began, reverse=True)


def chosen(env: Mapping[str, str], job_id: str = "", here: Path = RUNS / LATEST) -> Launched | None:
    """Finds the launch for a command that names no scheduler; None if no launch of this user runs here.

    Args:
        env: the environment.
        job_id: only launches of this job are considered; empty: those of all jobs.
        here: a link to a launch's directory; that launch is preferred.

    Raises:
        LookupError: several launches remain; the message lists them.
    """
    found = [launch for launch in running(env) if job_id in ("", launch.job_id)]
    with contextlib.suppress(OSError):
        latest = here.resolve(strict=True)
        own = [launch for launch in found if Path(launch.directory).resolve() == latest]
        found = own or found
    if len(found) > 1:
        raise LookupError("; ".join(f"job {launch.job_id} in {launch.directory}" for launch in found))
    return found[0] if found else None


def is_elsewhere(launch: Launched, here: Path = RUNS / LATEST) -> bool:
    """Whether the link ``here`` exists and points to the directory of another launch."""
    return os.path.lexists(here) and Path(launch.directory).resolve() != here.resolve()


def _read(file: Path) -> Launched:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, encoding="utf-8") as text:
        return Launched(**json.load(text))


def _own_directory(env: Mapping[str, str]) -> Path:
    """Returns a directory that only this user can use.

    Raises:
        OSError: the directory cannot be created, or other users can use it.
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
    """Returns when a process was started, in ticks since the machine's start; None if it does not exist."""
    try:
        fields = stat_fields(f"/proc/{pid}")
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _new_directory(job_id: str, host: str) -> Path:
    words = [job_id, time.strftime("%Y%m%d-%H%M%S"), host]
    name = "-".join(_in_file_names(word) for word in words if word)
    RUNS.mkdir(exist_ok=True)
    for attempt in range(1, ATTEMPTS):
        directory = RUNS / (name if attempt == 1 else f"{name}-{attempt}")
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            _point_to(directory)
            return directory
    raise FileExistsError(17, "there are too many of that name", str(RUNS / name))


def _in_file_names(word: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", word)[:64]


def _point_to(directory: Path) -> None:
    """Replaces the link by renaming a new one, so that it points to a directory at all times."""
    link = directory.parent / f".{LATEST}-{os.getpid()}"
    with contextlib.suppress(OSError):  # a file system without links
        link.unlink(missing_ok=True)
        link.symlink_to(directory.name)
        os.replace(link, directory.parent / LATEST)  # noqa: PTH105


# ---------------------------------------------------------------- the record of a run


class RunRecord:
    """Appends to the record of one launcher. A line that cannot be written is dropped, and the run goes on.

    The file is opened for each line, so that a forked child inherits no descriptor of it.

    Args:
        directory: the directory of the run, which exists.
        host: the host of the launcher.
        wall_clock: returns seconds since 1970.
        clock: returns monotonic seconds, by which the intervals between figures are measured.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = directory / f"record_{_in_file_names(host) or 'host'}.jsonl"
        self._wall_clock = wall_clock
        self._clock = clock
        self._bytes = 0
        self._apart_s = 1.0
        self._figures = 0
        self._due_s = 0.0

    def note(self, kind: str, **facts: object) -> None:
        """Appends one event, with the current time."""
        line = {"time": round(self._wall_clock(), 3), "kind": kind, **facts}
        data = (json.dumps(_finite(line), separators=(",", ":")) + "\n").encode()
        if self._bytes + len(data) > MAX_RECORD_BYTES:
            return
        with contextlib.suppress(OSError):
            descriptor = open_own(self._path)
            try:
                self._bytes += os.write(descriptor, data)
            finally:
                os.close(descriptor)

    @property
    def wants_figures(self) -> bool:
        """Whether the next figures are due: every second at first, and less often as the run gets longer."""
        return self._clock() >= self._due_s

    def figures(self, **facts: object) -> None:
        """Appends figures of the training's progress; call it when :attr:`wants_figures` is true."""
        self._figures += 1
        if self._figures % FIGURES_BEFORE_THINNING == 0:
            self._apart_s *= 2
        self._due_s = self._clock() + self._apart_s
        self.note("figures", **facts)


def read_records(directory: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a run's launchers, in order of time; skips lines that are not records.

    The amount of data is bounded, because other users may have put files there. Files are read from the
    smallest on, up to :data:`MAX_READ_BYTES` together, with at most :data:`MAX_LINES` lines with figures and
    as many others. Lines are kept as text and parsed again when they are yielded, because parsed lines take
    many times the memory.

    Raises:
        OSError: the directory cannot be read.
    """
    room, lines, kept = MAX_READ_BYTES, list[tuple[float, str]](), Counter[bool]()
    found = (path for path in directory.iterdir() if _RECORD.fullmatch(path.name))
    for path in sorted(found, key=lambda path: (_size(path), path.name)):
        with contextlib.suppress(OSError):
            data = read_regular(path, min(room, 2 * MAX_RECORD_BYTES))
            room -= len(data)
            for text in data.decode("utf-8", errors="replace").splitlines():
                line = _record_of(text)
                is_figure = line is not None and line.get("kind") == "figures"
                if line is not None and kept[is_figure] < MAX_LINES:
                    kept[is_figure] += 1
                    lines.append((line["time"], text))
    lines.sort(key=lambda line: line[0])
    for _, text in lines:
        line = _record_of(text)
        if line is not None:
            yield line


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:  # The file is gone.
        return 0


def _record_of(text: str) -> dict[str, Any] | None:
    """Returns a line of a record as a dictionary; None if it is not one."""
    if len(text) > MAX_LINE:
        return None
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    time_s = line.get("time") if isinstance(line, dict) else None
    return line if isinstance(time_s, int | float) and 0 <= time_s < LAST_S else None


def _finite(value: Any) -> Any:
    """Returns the value with NaN and infinity replaced by None, because JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return value
