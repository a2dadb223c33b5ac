"""A process that the launcher starts: session, output and end; and the guardian of all processes."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from muster.errors import SettingsError
from muster.launch.hardware import prefer_memory_of
from muster.launch.plan import Recipe
from muster.wire.files import open_own
from muster.wire.json_lines import LineContext, json_line, process_lines, wanted, wrapped
from muster.wire.process_stat import stat_fields
from muster.wire.redaction import SECRET_WORDS
from muster.worker.ending import NOTES_FILE, NOTES_VARIABLE, SLOT_BYTES

if TYPE_CHECKING:
    from muster.launch.report import LastWords

_SHOWN_PREFIXES = (
    *("MS_", "CUDA", "NVIDIA_", "NCCL_", "GLOO_", "GRPC_", "OMP_", "OPENBLAS_", "MKL_"),
    *("SLURM_", "OMPI_COMM_", "PMI_", "PYTHON", "LD_LIBRARY", "VIRTUAL_ENV"),
)
_SHOWN_NAMES = ("DEVICE_ID", "RANK_TABLE_FILE", "DATA_PATH", "PATH", "LANG", "LC_ALL", "JOB_COMPLETION_INDEX")


def environment_dump(env: Mapping[str, str]) -> list[str]:
    """Returns the variables that matter for a run, sorted, one per line; secrets only as ``(set)``."""
    lines = []
    for name, value in sorted(env.items()):
        if name not in _SHOWN_NAMES and not name.startswith(_SHOWN_PREFIXES):
            continue
        secret = any(word in name.upper() for word in SECRET_WORDS)
        lines.append(f"{name}={'(set)' if secret else value}")
    return lines


LAST_LINES = 20

LAST_S = 1.0
"""How long the process that is killed last has to report the others' end, in seconds."""

LEFTOVERS_S = 5.0
"""How long killed processes may take to end, in seconds: they may have to wait for a disk or a GPU."""

_CHUNK = 1 << 16
_RESET_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)
_FORWARDED_TOO = (signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.002


def kill_sessions(leaders: Collection[int]) -> list[int]:
    """Kills every process of the sessions that these processes lead, until none is left.

    A session contains all processes that its leader has started, in any process group and with any parent,
    such as the processes of a DataLoader and the server that forks them. Only a process that makes its own
    session is outside. The number of a session is not reused before its leader is collected, nor while a
    process is in it.

    Returns:
        The processes that have not ended within ``LEFTOVERS_S``, or may not be killed.
    """
    deadline = time.monotonic() + LEFTOVERS_S
    # Repeated until none is found, because a process may have started another one since the last scan.
    while (members := list(_living(leaders))) and time.monotonic() < deadline:
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
    return members


def _living(sessions: Collection[int]) -> Iterator[int]:
    """Yields the processes of these sessions that have not ended."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - making thousands of Path objects would be slower
        if not name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            pid = int(name)
            if os.getsid(pid) in sessions and _state(pid) not in "ZX":
                yield pid


def _state(pid: int) -> str:
    """Returns the letter of a process's state, as in proc(5); Z: it has ended and is not collected yet."""
    return stat_fields(f"/proc/{pid}")[0]


class Guardian:
    """Ends all processes of a launch if the launcher itself is killed, so that there are no orphans.

    ``SIGKILL`` leaves the launcher no chance to clean up, and Linux's parent-death signal reaches only direct
    children (they use it too, in case the guardian is killed as well). So a small process, forked before
    anything else is started, holds the read end of a pipe; only the launcher keeps the write end open. When
    the write end closes, the guardian kills every session that was announced and not withdrawn.

    Args:
        pid: the guardian's process id.
        write_end: the pipe's write end.
    """

    def __init__(self, pid: int, write_end: int) -> None:
        self.pid = pid
        self._write_end = write_end

    @classmethod
    def start(cls) -> Guardian:
        """Forks the guardian's process."""
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            _guard(read_end, write_end)
        os.close(read_end)
        return cls(pid, write_end)

    def announce(self, leader: int) -> None:
        """Registers a session to be ended; called by the session's leader itself, so that there is no gap."""
        self._write(b"+%d\n" % leader)

    def announce_last(self, leader: int) -> None:
        """Registers a session to be ended shortly after the others."""
        self._write(b"~%d\n" % leader)

    def withdraw(self, leader: int) -> None:
        """Removes an ended session, because another process may get its number."""
        self._write(b"-%d\n" % leader)

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the guardian was killed; the launcher works without it
            os.write(self._write_end, line)

    def forget(self) -> None:
        """Closes the pipe in a forked child."""
        os.close(self._write_end)

    def close(self) -> None:
        """Ends the guardian, after the launcher has ended every session itself."""
        os.close(self._write_end)
        os.kill(self.pid, signal.SIGCONT)  # a stopped guardian would never end, and block waitpid
        os.waitpid(self.pid, 0)


def _guard(read_end: int, write_end: int) -> None:
    """Runs the guardian; never returns."""
    try:
        os.close(write_end)
        os.setsid()  # a terminal's signal to the launcher's group must not end the guardian
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        first, last = _sessions_left(read_end)
        for leaders, after_s in ((first, 0.0), (last, LAST_S)):
            if leaders:
                time.sleep(after_s)
                kill_sessions(leaders)
    finally:
        os._exit(0)


def _sessions_left(read_end: int) -> tuple[set[int], set[int]]:
    """Reads sessions until the launcher is gone; returns those to kill at once and those later."""
    first: set[int] = set()
    last: set[int] = set()
    with os.fdopen(read_end, "rb") as lines:
        for line in lines:
            leader = int(line[1:])
            if line.startswith(b"-"):
                first.discard(leader)
                last.discard(leader)
            else:
                (first if line.startswith(b"+") else last).add(leader)
    return first, last


@dataclass
class Child:
    """A started process. ``returncode`` is None while it lives, negative for a signal."""

    recipe: Recipe
    pid: int
    output: int
    log_path: Path
    say: Callable[[str], None]
    returncode: int | None = None
    restarts: int = 0
    words_file: int = -1
    lines_of: LineContext | None = None
    """If logs are JSON: the context of lines that the process itself does not write as JSON."""

    order: int = 0
    stopped: bool = False
    last_lines: collections.deque[bytes] = field(
        default_factory=lambda: collections.deque[bytes](maxlen=LAST_LINES)
    )
    open: bool = True
    _rest: bytes = b""
    _words: bytes = b""
    _log: int = -1
    _log_failed: bool = False

    @property
    def label(self) -> str:
        """Its name: the worker's rank, or its host and index there; or ``scheduler``."""
        return self.recipe.label

    def pump(self, show: Callable[[Child, Sequence[bytes]], None], *, stamp: bool) -> bool:
        """Copies the process's output to its log and, unless it is quiet, to ``show``.

        Returns:
            Whether there may be more output now. At the end of the output it returns False, and closes it.
        """
        if not self.open:
            return False
        try:
            chunk = os.read(self.output, _CHUNK)
        except BlockingIOError:
            return False
        ended = not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if self._rest and (not chunk or len(self._rest) > _CHUNK):
            lines.append(self._rest)
            self._rest = b""
        self.last_lines.extend(line for line in lines if line.strip())
        if self.lines_of is not None:
            lines = [wrapped(line, self.lines_of) for line in lines]
            chunk = b"".join(line + b"\n" for line in lines)
        self._write(chunk, lines, stamp=stamp and self.lines_of is None)
        if lines and not self.recipe.quiet:
            show(self, lines)
        if ended:
            self.close()
        return not ended

    def _write(self, chunk: bytes, lines: Sequence[bytes], *, stamp: bool) -> None:
        if stamp:
            head = timestamp()
            chunk = b"".join(b"%s %s\n" % (head, line) for line in lines)
        try:
            while chunk:
                chunk = chunk[os.write(self._log, chunk) :]
        except OSError as error:  # a full disk must not end the training
            if not self._log_failed:
                self.say(f"{self.log_path} cannot be written ({error.strerror}); its output is lost")
            self._log_failed = True

    def signal(self, number: int) -> None:
        """Sends a signal to the process and everything that it started in its group."""
        if self.returncode is not None:
            return
        self.stopped = self.stopped or number not in _FORWARDED_TOO
        # A stopped process would handle the signal only after SIGCONT.
        for each in (number,) if number in _FORWARDED_TOO else (number, signal.SIGCONT):
            try:
                os.killpg(self.pid, each)
            except ProcessLookupError:  # it is so young that it leads no group yet
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, each)

    def has_ended(self) -> bool:
        """Whether the process has ended and is not collected yet."""
        if self.returncode is not None:
            return False
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def collect(self, guardian: Guardian) -> None:
        """Collects a process that has ended, with its exit code."""
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        guardian.withdraw(self.pid)

    def words(self) -> LastWords:
        """The notes that the process has made for the launcher so far."""
        from muster.launch.report import read_words

        if self.words_file >= 0:
            self._words = os.pread(self.words_file, _CHUNK, SLOT_BYTES)
        return read_words(self._words.decode(errors="replace"))

    def noted(self) -> int:
        """The size in bytes of its notes for the launcher, which only grow."""
        return os.fstat(self.words_file).st_size if self.words_file >= 0 else len(self._words) + SLOT_BYTES

    def progress(self) -> bytes:
        """Its training's progress as JSON; empty while there is none."""
        if self.words_file < 0:
            return b""
        return os.pread(self.words_file, SLOT_BYTES, 0).strip(b"\0 ")

    def forget(self) -> None:
        """Closes its descriptors in this process; its notes stay readable."""
        self.close()
        if self.words_file >= 0:
            self.words()
            os.close(self.words_file)
            self.words_file = -1

    def close(self) -> None:
        """Closes its output and log."""
        if self.open:
            self.open = False
            os.close(self.output)
            os.close(self._log)


def reap(children: Sequence[Child], guardian: Guardian) -> Iterator[Child]:
    """Collects the processes that have ended, one after the other; kills the rest of their sessions first.

    A process that still held a killed worker's sockets would hide its end from others, and keep its place.
    """
    ended = [child for child in children if child.has_ended()]
    # The processes are not collected yet, so their numbers cannot belong to others. All are killed in one
    # pass over /proc, because many may end at the same moment.
    left = kill_sessions({child.pid for child in ended}) if ended else []
    if left:
        pids = ", ".join(map(str, left[:8]))
        ended[0].say(f"processes that a worker has started do not end, though they are killed: pid {pids}")
    for child in ended:
        child.collect(guardian)
        yield child


def timestamp() -> bytes:
    """Returns the local time, to the millisecond."""
    now = time.time()
    return (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now)) + f".{int(now * 1000) % 1000:03}"
    ).encode()


def spawn(
    recipe: Recipe,
    directory: Path,
    guardian: Guardian,
    say: Callable[[str], None],
    *,
    log_needed: bool = True,
) -> Child | None:
    """Starts a process in a new session and process group, without input, and with a pipe for its output.

    Args:
        recipe: the instructions to start it.
        directory: the directory of its log.
        guardian: kills it if the launcher is killed.
        say: shows a sentence to the user.
        log_needed: whether it must not start if its log cannot be written; otherwise only the log is lost.

    Returns:
        The process; None in the process itself, if it continues as a copy of the launcher.

    Raises:
        SettingsError: its log cannot be written.
    """
    path = directory / recipe.log
    lines_of = _lines_of(recipe) if wanted(os.environ) else None
    try:
        log = _open_log(recipe, path, lines_of)
    except OSError as error:
        reason = f"{path} cannot be written ({error.strerror})"
        if log_needed:
            raise SettingsError(f"The log {reason}; name another place with --log-dir.") from error
        say(f"{reason}; its output is lost")
        log = os.open(os.devnull, os.O_WRONLY)
    words = os.memfd_create(NOTES_FILE)
    with contextlib.suppress(OSError):  # a limit on file sizes also applies to files in memory
        os.ftruncate(words, SLOT_BYTES)
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # Until the new process has its own handlers, a signal to it would run the launcher's handler and be lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*_RESET_SIGNALS, *_FORWARDED_TOO))
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.environ[NOTES_VARIABLE] = f"/proc/{launcher}/fd/{words}"
        _become(recipe, write_end, guardian, launcher, mask)
        for descriptor in (log, words, read_end, write_end):
            os.close(descriptor)
        return None
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(write_end)
    os.set_blocking(read_end, False)
    return Child(recipe, pid, read_end, path, say, words_file=words, lines_of=lines_of, _log=log)


def _lines_of(recipe: Recipe) -> LineContext:
    """The context for log lines of a process that does not write JSON itself."""
    known = {"scheduler.log": "scheduler", "uplink.log": "uplink"}
    rank = int(recipe.label) if recipe.label.isdecimal() else None
    return LineContext(known.get(recipe.log, "program"), process_lines.job, rank=rank)


def _open_log(recipe: Recipe, path: Path, lines_of: LineContext | None) -> int:
    head = [
        f"# {' '.join(recipe.argv)}",
        f"# in {os.getcwd()} on {os.uname().nodename}, {timestamp().decode()}",  # noqa: PTH109
        *(f"# {line}" for line in environment_dump(recipe.environment(os.environ))),
    ]
    # Only the owner may read it, because a program's output and arguments may be secret.
    log = open_own(path)
    data = ("\n".join(head) + "\n").encode()
    if lines_of is not None:
        said = [line.removeprefix("# ") for line in head]
        data = (json_line("INFO", said[0], lines_of, event="started", environment=said[1:]) + "\n").encode()
    try:
        while data:
            data = data[os.write(log, data) :]
    except OSError:
        os.close(log)
        raise
    return log


def _end_with(launcher: int) -> None:
    """Makes the kernel kill this process when the launcher dies, in case the guardian is killed, too."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(127)


def _become(
    recipe: Recipe, output: int, guardian: Guardian, launcher: int, mask: set[int | signal.Signals]
) -> None:
    """Sets up the new process: session, streams, environment. Returns only in a fork."""
    try:
        _end_with(launcher)
        os.setsid()
        (guardian.announce_last if recipe.last else guardian.announce)(os.getpid())
        signal.set_wakeup_fd(-1)
        for number in (*_RESET_SIGNALS, *_FORWARDED_TOO):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.close(null)
        if recipe.placement.cores:
            os.sched_setaffinity(0, recipe.placement.cores)
        if recipe.placement.memory_node >= 0:
            prefer_memory_of(recipe.placement.memory_node)
        if not recipe.forked:
            if recipe.inherits >= 0:
                os.set_inheritable(recipe.inherits, True)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; programs expect them
                signal.signal(number, signal.SIG_DFL)
            os.execvpe(recipe.argv[0], recipe.argv, recipe.environment(os.environ))
    except BaseException as error:
        os.write(2, f"cannot start {recipe.argv[0]}: {error}\n".encode())
        os._exit(127)
    for name in recipe.removed & os.environ.keys():
        del os.environ[name]
    os.environ.update(recipe.env)
