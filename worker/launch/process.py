"""One process that the launcher started: its group, its output, its end."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.worker.errors import SettingsError
from muster.worker.launch.guardian import Guardian
from muster.worker.launch.last_words import FILE_NAME, VARIABLE
from muster.worker.launch.report import LastWords, environment_dump, read_words


def say(sentence: str) -> None:
    """Tells the user what the launcher does, on standard error."""
    with contextlib.suppress(OSError):
        print(f"muster: {sentence}", file=sys.stderr, flush=True)


def write(descriptor: int, data: bytes) -> None:
    """Writes it all; a terminal that has gone away is no reason to end training."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


LAST_LINES = 20
_CHUNK = 1 << 16
_RESET_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)
_FORWARDED_TOO = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start a process: what to run, with which changes to the environment, where it logs.

    ``removed`` are variables of the launcher that the process must not see. With ``forked`` the process
    goes on as a copy of the launcher (see :class:`Forked`) instead of executing ``argv``.
    """

    label: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_path: Path
    removed: frozenset[str] = frozenset()
    cores: tuple[int, ...] = ()
    forked: bool = False
    quiet: bool = True

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The process's whole environment."""
        kept = {name: value for name, value in base.items() if name not in self.removed}
        return {**kept, **self.env}


class Forked(BaseException):
    """Raised in a forked process, so that it leaves the launcher's frames and becomes what it is to be."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        super().__init__(recipe.label)


@dataclass
class Child:
    """A started process. ``returncode`` is None while it lives, negative for a signal."""

    recipe: Recipe
    pid: int
    output: int
    returncode: int | None = None
    restarts: int = 0
    words_file: int = -1
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
        """Rank, or host and index on it, or ``scheduler``."""
        return self.recipe.label

    def pump(self, show: Callable[[Child, Sequence[bytes]], None], *, stamp: bool) -> bool:
        """Moves what the process has written to its log and, unless quiet, to ``show``.

        Returns:
            Whether there may be more at once; False also at the end of its output, where it closes.
        """
        if not self.open:
            return False
        try:
            chunk = os.read(self.output, _CHUNK)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if self._rest and (not chunk or len(self._rest) > _CHUNK):
            lines.append(self._rest)
            self._rest = b""
        self._write(chunk, lines, stamp=stamp)
        self.last_lines.extend(line for line in lines if line.strip())
        if lines and not self.recipe.quiet:
            show(self, lines)
        if not chunk:
            self.close()
        return bool(chunk)

    def _write(self, chunk: bytes, lines: Sequence[bytes], *, stamp: bool) -> None:
        if stamp:
            head = timestamp()
            chunk = b"".join(b"%s %s\n" % (head, line) for line in lines)
        try:
            while chunk:
                chunk = chunk[os.write(self._log, chunk) :]
        except OSError as error:  # a full disk must not end the training
            if not self._log_failed:
                say(f"{self.recipe.log_path} cannot be written ({error.strerror}); its output is lost")
            self._log_failed = True

    def signal(self, number: int) -> None:
        """Sends a signal to the process and everything that it started in its group."""
        if self.returncode is not None:
            return
        self.stopped = self.stopped or number not in _FORWARDED_TOO
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # it is so young that it leads no group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def reap(self, guardian: Guardian) -> bool:
        """Collects the process if it has ended; what is left of its group ends with it."""
        if self.returncode is not None:
            return False
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        # Not collected yet, so the group's number cannot have gone to somebody else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        guardian.withdraw(self.pid)
        return True

    def words(self) -> LastWords:
        """What it has let the launcher know so far."""
        if self.words_file >= 0:
            self._words = os.pread(self.words_file, _CHUNK, 0)
        return read_words(self._words.decode(errors="replace"))

    def forget(self) -> None:
        """Closes all that belongs to it here; what it has noted stays known."""
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


def timestamp() -> bytes:
    """Local time to the millisecond."""
    now = time.time()
    return (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now)) + f".{int(now * 1000) % 1000:03}"
    ).encode()


def spawn(recipe: Recipe, guardian: Guardian, *, log_needed: bool = True) -> Child:
    """Starts a process in a session and process group of its own, reading nothing, writing to a pipe.

    Args:
        recipe: what to start.
        guardian: kills it should the launcher be killed.
        log_needed: nothing is started if its log cannot be written; else it only loses that.

    Raises:
        Forked: in the new process, if the recipe says so.
        SettingsError: its log cannot be written.
    """
    try:
        log = _open_log(recipe)
    except OSError as error:
        told = f"{recipe.log_path} cannot be written ({error.strerror})"
        if log_needed:
            raise SettingsError(f"The log {told}; name another place with --log-dir.") from error
        say(f"{told}; its output is lost")
        log = os.open(os.devnull, os.O_WRONLY)
    words = os.memfd_create(FILE_NAME)
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # Until the new process has its own handlers, a signal to it would run the launcher's and be lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*_RESET_SIGNALS, *_FORWARDED_TOO))
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.environ[VARIABLE] = f"/proc/{launcher}/fd/{words}"
        _become(recipe, write_end, guardian, mask)
        for descriptor in (log, words, read_end, write_end):
            os.close(descriptor)
        raise Forked(recipe)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(write_end)
    os.set_blocking(read_end, False)
    return Child(recipe, pid, read_end, words_file=words, _log=log)


def _open_log(recipe: Recipe) -> int:
    head = [
        f"# {' '.join(recipe.argv)}",
        f"# in {os.getcwd()} on {os.uname().nodename}, {timestamp().decode()}",  # noqa: PTH109
        *(f"# {line}" for line in environment_dump(recipe.environment(os.environ))),
    ]
    # For its owner only: what a program prints, or is called with, may be secret.
    log = os.open(recipe.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    data = ("\n".join(head) + "\n").encode()
    try:
        while data:
            data = data[os.write(log, data) :]
    except OSError:
        os.close(log)
        raise
    return log


def _become(recipe: Recipe, output: int, guardian: Guardian, mask: set[int | signal.Signals]) -> None:
    """In the new process: own session, streams and environment. Returns only to go on as a fork."""
    try:
        os.setsid()
        guardian.announce(os.getpid())
        signal.set_wakeup_fd(-1)
        for number in (*_RESET_SIGNALS, *_FORWARDED_TOO):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.close(null)
        if recipe.cores:
            os.sched_setaffinity(0, recipe.cores)
        if not recipe.forked:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; programs expect them
                signal.signal(number, signal.SIG_DFL)
            os.execvpe(recipe.argv[0], recipe.argv, recipe.environment(os.environ))
    except BaseException as error:
        os.write(2, f"cannot start {recipe.argv[0]}: {error}\n".encode())
        os._exit(127)
    for name in recipe.removed & os.environ.keys():
        del os.environ[name]
    os.environ.update(recipe.env)
