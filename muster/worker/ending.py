"""The records of a worker's process for its launcher, and hooks for the end of its script.

The launcher sees only exit codes and signals, in the order in which processes end, which is not the order in
which they failed. So it gives each worker a file in memory, named by MUSTER_LAST_WORDS. The first bytes hold
the training's progress and are overwritten. The rest is appended as one JSON object per line, and
:func:`muster.launch.report.read_words` reads it.

A Muster error that a script does not catch is shown as a sentence, with its exit code, not as a traceback.
Before that, scheduler and launcher are told what ended the script. The exception hook sees exceptions, and
``atexit`` a normal end. Python does not report the exit code of a script, so ``sys.exit``, ``exit`` and
``quit`` are wrapped to record it (docs/design/process_end.md). SIGTERM ends the process, except in blocks
that handle it (:func:`on_sigterm`).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from muster.errors import LeaveGranted, LeaveNow, WorkerError
from muster.wire.json_lines import say, say_uncaught, wanted
from muster.wire.process_stat import stat_fields

log = logging.getLogger("muster.worker")

_MUSTER = Path(__file__).parents[1]
_BEGINNING = str(_MUSTER / "worker" / "runtime.py"), str(_MUSTER / "example" / "datasets.py")
"""Files whose errors are mistakes in settings, for which the script's line is not relevant."""

_ROOMS = ("communicators", "example", "launch", "parallel", "programs", "torch", "training", "worker")
_OURS = tuple(f"{_MUSTER / room}{os.sep}" for room in _ROOMS)
_LIBRARIES = (*_OURS, f"{Path(os.__file__).parent}{os.sep}", "<frozen")


# ---------------------------------------------------------------- notes for the launcher

NOTES_VARIABLE = "MUSTER_LAST_WORDS"
NOTES_FILE = "muster-last-words"
SLOT_BYTES = 512
"""Number of bytes reserved for the progress."""

PROGRESS_EVERY_S = 0.2
_progress_due_s = 0.0


def note(**facts: object) -> None:
    """Appends one line of facts; does nothing if there is no launcher, or if it has ended."""
    _write(os.O_APPEND, (json.dumps(facts) + "\n").encode())


def note_progress(**facts: object) -> None:
    """Overwrites the training's progress; called at most a few times a second. Otherwise like :func:`note`.

    The script's own ``numbers`` are left out if there is no room for them.
    """
    global _progress_due_s
    if NOTES_VARIABLE not in os.environ or time.monotonic() < _progress_due_s:
        return
    _progress_due_s = time.monotonic() + PROGRESS_EVERY_S
    data = json.dumps(facts).encode()
    if len(data) > SLOT_BYTES and facts.pop("numbers", None):
        data = json.dumps(facts).encode()
    if len(data) <= SLOT_BYTES:
        _write(0, data.ljust(SLOT_BYTES))


def _write(flags: int, data: bytes) -> None:
    path = os.environ.get(NOTES_VARIABLE)
    if not path:
        return
    try:
        if not str(Path(path).readlink()).startswith(f"/memfd:{NOTES_FILE}"):
            return  # Another process may have this pid by now.
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags)
    except OSError:
        return
    try:
        os.write(descriptor, data)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def set_title(who: str, script: str) -> None:
    """Names this process for ``ps``: ``muster: rank 3 train.py``.

    The kernel shows the memory that held the process's arguments at its start; Python has its own copy of
    them. Without a launcher nothing is done, because the process is not Muster's.

    Args:
        who: ``rank 3``.
        script: path or name of the script.
    """
    if NOTES_VARIABLE not in os.environ:
        return
    title = f"muster: {who} {Path(script).name}".rstrip().encode()
    try:
        Path("/proc/self/comm").write_bytes(title[:15].rstrip())
        fields = stat_fields()
        begin, end = int(fields[45]), int(fields[46])
        if 0 < begin < end:
            memory = os.open("/proc/self/mem", os.O_WRONLY | os.O_CLOEXEC)
            try:
                # Fill with zeros to the end: if the last byte is not zero, the kernel reads on into the
                # environment.
                os.pwrite(memory, title[: end - begin - 1].ljust(end - begin, b"\0"), begin)
            finally:
                os.close(memory)
    except (OSError, ValueError, IndexError):
        return


# ---------------------------------------------------------------- how the script ends


class _Script:
    """The state of this process's end. There is one, because there is one interpreter."""

    def __init__(self) -> None:
        self.end: Callable[[BaseException | None], None] | None = None
        self.was_interrupted: Callable[[], bool] = lambda: False
        self.hook = sys.__excepthook__
        self.exit: SystemExit | None = None
        self.explained = False


_script = _Script()


def show_errors_in_words() -> None:
    """Installs an exception hook that shows errors as sentences, unless the script has its own hook."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _on_exception


def watch_the_end(end: Callable[[BaseException | None], None], was_interrupted: Callable[[], bool]) -> None:
    """Calls ``end`` first when the script ends, with the error that ends it.

    Args:
        end: must not raise. Its argument is None if the script ran to its end.
        was_interrupted: returns whether Ctrl-C was expected, so that its traceback is not shown.
    """
    if _script.end is not None:
        return
    _script.end, _script.was_interrupted = end, was_interrupted
    os.register_at_fork(after_in_child=_forget_the_end)
    if sys.excepthook is not _on_exception:
        _script.hook, sys.excepthook = sys.excepthook, _on_exception
    leave = sys.exit

    def exit_noting_its_code(code: str | int | None = None, /) -> NoReturn:
        note_exit(code)
        leave(code)

    sys.exit = exit_noting_its_code
    for name in ("exit", "quit"):  # Added by the site module; each raises SystemExit by itself.
        if hasattr(builtins, name):
            setattr(builtins, name, exit_noting_its_code)
    atexit.register(_at_exit)


def _forget_the_end() -> None:
    """Removes the hooks in a forked child, which must not send Leave for its parent."""
    _script.end = None


def note_exit(code: str | int | None, trace: TracebackType | None = None) -> None:
    """Records the code with which the main thread is about to exit, because SystemExit reaches no hook.

    For code 1, which has no specific meaning, it logs the line of the script that asks for the exit. For
    Muster's own programs it does not, because they have already printed the reason.

    Args:
        code: the exit code.
        trace: the traceback of the exit; None if the exit is called for by this function's caller's caller.
    """
    if threading.current_thread() is threading.main_thread():
        _script.exit = SystemExit(code)
        if code == 1 and not _script.explained:  # An error that Python itself ends with is shown by Python.
            _script.explained = True
            file, line = _place_that_exits(trace)
            if not file.startswith(_OURS):
                log.warning("this process ends with exit code 1, as %s, line %d, asks", Path(file).name, line)


def _place_that_exits(trace: TracebackType | None) -> tuple[str, int]:
    """Returns the file and line that call an exit function, or that have raised the present SystemExit."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    frame, line = (sys._getframe(1), 0) if trace is None else (trace.tb_frame, trace.tb_lineno)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_code.co_filename, line or frame.f_lineno


@contextlib.contextmanager
def exit_noted() -> Iterator[None]:
    """Records the code of a SystemExit in a ``with`` block, for scripts that the launcher runs in a fork."""
    try:
        yield
    except SystemExit as error:
        note_exit(error.code, error.__traceback__)
        raise


def _at_exit() -> None:
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # The script is over, so there is nothing left to stop, and its exit code says more than the signal
        # would. An ignored signal stays ignored until the very end of the interpreter; a handler would not.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if _script.end is not None:
        _script.end(_script.exit)


def _on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _script.end is not None:
        _script.end(error)  # First, so that the peers are told immediately.
    _script.explained = True
    plain = _script.hook is sys.__excepthook__
    if isinstance(error, KeyboardInterrupt) and plain and _script.was_interrupted():
        say("interrupted", as_text="interrupted")  # No traceback; Python continues and ends by SIGINT.
    elif isinstance(error, WorkerError) and is_good_end(error) and _script.end is not None:
        if not getattr(error, "logged", False):
            log.info("%s", error)
        sys.exit(error.exit_code)  # Raised in the hook, this counts as the script's own exit.
    elif plain:
        in_words(kind, error, trace)
    else:
        _script.hook(kind, error, trace)
        if isinstance(error, WorkerError):  # The script's own hook has shown it.
            sys.exit(error.exit_code)


def is_good_end(error: BaseException) -> bool:
    """Whether a worker ends without an error: it leaves as asked, or the job ended well without it."""
    if isinstance(error, WorkerError):
        return isinstance(error, LeaveGranted) or error.exit_code == 0
    return isinstance(error, LeaveNow)


def in_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows an uncaught error: one of Muster's as a sentence, any other with its traceback.

    With MS_LOG_LEVEL=DEBUG, the traceback is always shown. It is also shown if an error in the script's own
    code caused Muster's error, because only the traceback shows where.

    Raises:
        SystemExit: with the exit code of Muster's error.
    """
    if not isinstance(error, WorkerError):
        _show(kind, error, trace)
        return
    if os.environ.get("MS_LOG_LEVEL", "").strip().upper() == "DEBUG" or _has_foreign_cause(error):
        _show(kind, error, trace)
    else:
        said = f"{_place(trace)}{error}"
        say(said, level="ERROR", as_text=f"muster: {said}")
    sys.exit(error.exit_code)


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows a traceback."""
    (say_uncaught if wanted(os.environ) else sys.__excepthook__)(kind, error, trace)


def _has_foreign_cause(error: BaseException) -> bool:
    """Whether an error was caused by one that comes neither from Muster nor from the operating system."""
    from muster.certs.errors import CertificateError

    known = (WorkerError, CertificateError, OSError)
    cause = error.__cause__
    while cause is not None:
        if not isinstance(cause, known):
            return True
        cause = cause.__cause__
    return False


def _place(trace: TracebackType | None) -> str:
    """Returns the place in the script where an error occurred, as ``train.py, line 12: ``.

    Empty for errors of settings.
    """
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file in _BEGINNING:
            return ""
        if not file.startswith(_LIBRARIES) and "site-packages" not in file:
            place = f"{Path(file).name}, line {trace.tb_lineno}: "
        trace = trace.tb_next
    return place


TWIN_S = 0.1
"""For how many seconds after a SIGTERM another one counts as the same request.

GNU timeout, for example, sends the signal to the process and to its group at the same time.
"""


def _absorb_twin() -> None:
    """Waits for a second SIGTERM of the same request, for as long as one may come.

    The caller sets the handler that is used afterwards.
    """
    signal.signal(signal.SIGTERM, _nothing)
    pause_for_twin()


def pause_for_twin() -> None:
    """Waits for as long as a second SIGTERM of the same request may take."""
    time.sleep(TWIN_S)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Ignores the signal, because the request is known."""


@contextlib.contextmanager
def on_sigterm(react: Callable[[], None], *, before_own: bool = False) -> Iterator[None]:
    """Calls ``react`` at the first SIGTERM in a ``with`` block; a second one ends the process as usual.

    Only the main thread gets signals; in other threads, this does nothing.

    Args:
        react: called in the main thread, at any point of its execution.
        before_own: whether to replace also the script's own handler. Otherwise, such a handler stays, because
            it knows what to do.
    """
    own = signal.getsignal(signal.SIGTERM)
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or own is None or (own is not signal.SIG_DFL and not before_own):
        yield  # None means that the handler was not set by Python, and could not be restored.
        return

    def handler(number: int, frame: FrameType | None) -> None:
        _absorb_twin()
        signal.signal(signal.SIGTERM, own)
        react()

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, own)
