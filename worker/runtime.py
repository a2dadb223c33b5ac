"""The default session of this process: how it begins, who may use it, and that it ends cleanly.

This is the only module-level state of the package.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from _sitebuiltins import Quitter
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TypeVar

from muster.rendezvous.log_lines import BoundedFormatter
from muster.worker.config import SecurityContext, load_settings
from muster.worker.control.client import is_consequence, is_good_exit, reason_of
from muster.worker.control.credentials import load_keyring
from muster.worker.errors import (
    SIGTERM_EXIT_CODE,
    JobEndedError,
    LeaveGranted,
    LeaveNow,
    NotInitializedError,
    SettingsError,
    WorkerError,
)
from muster.worker.in_words import in_words, show_errors_in_words
from muster.worker.launch import last_words
from muster.worker.sigterm import on_sigterm

if TYPE_CHECKING:
    from muster.worker.control.session import Session

log = logging.getLogger("muster.worker")

T = TypeVar("T")
NAME_SERVICE_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
EXIT_LIMIT_S = 120


class _Process:
    """What this process has asked for and got."""

    def __init__(self) -> None:
        self.context = SecurityContext()
        self.session: Session | None = None
        self.hooked = False
        self.exit: SystemExit | None = None
        self.interrupted = False
        self.said = False


_process = _Process()


def set_ps_context(
    *,
    config_file_path: str | None = None,
    enable_ssl: bool | None = None,
    client_password: str | None = None,
    server_password: str | None = None,
) -> None:
    """Sets TLS up from the script instead of the environment; call it before ``init``.

    What is given replaces what an earlier call gave; what is not given stays.

    Args:
        config_file_path: config.json; wins over MS_CONFIG_FILE.
        enable_ssl: True demands TLS, False switches it off even where MS_CONFIG_FILE is set.
        client_password: password of the worker's PKCS#12 file; wins over MS_CLIENT_PASSWORD.
        server_password: taken for scripts that give both; a worker has no use for it.

    Raises:
        SettingsError: an argument is not of its type.
    """
    given = {
        "config_file_path": config_file_path,
        "enable_ssl": enable_ssl,
        "client_password": client_password,
        "server_password": server_password,
    }
    show_errors_in_words()
    for name, value in given.items():
        kind = bool if name == "enable_ssl" else str
        if value is not None and not isinstance(value, (kind, os.PathLike)):
            raise SettingsError(f"{name} must be a {kind.__name__}; it is a {type(value).__name__}.")
    _process.context = _process.context.replaced(**{n: v for n, v in given.items() if v is not None})


def init(backend: str | None = None) -> Session:
    """Joins the job that the environment names; returns when all members can communicate.

    Called again without a release in between, it returns the session that is there.

    Args:
        backend: "nccl", "tcp" or "gloo"; None: MS_BACKEND, else "nccl" where there are GPUs, else "tcp".

    Returns:
        The session, which is also the default one of the functions of this package.

    Raises:
        SettingsError: a variable or argument is wrong; exit code 2.
        SecurityError: TLS, certificate or identity failed on either side.
        RefusedError: the scheduler has no place for this worker; says why.
        SchedulerUnreachableError: it did not answer within MS_TOPO_TIMEOUT.
        FormationTimeoutError: the group did not form within it; says who is missing.
        JobEndedError: the job failed before this worker was in.
        SystemExit: while it waited it was asked to leave, by SIGTERM (exit code 143) or a drain (0), or the
            job ended well before this worker, a spare, was needed (0).

    An error that the script does not catch ends it with one sentence and the error's exit code, now and
    later; the traceback is shown with MS_LOG_LEVEL=DEBUG.
    """
    if _process.session is not None and not _process.session.released:
        return _process.session
    _hook_exit()
    leaving = _Leaving()
    try:
        with on_sigterm(leaving.ask):
            _process.said = False
            session = open_session(os.environ, _process.context, backend, sleep=leaving.sleep)
            _process.session = leaving.session = session
            leaving.check()
            session.open()
            leaving.check()
    except KeyboardInterrupt:
        _process.interrupted = True
        raise
    except (LeaveNow, WorkerError) as ended:
        if not _is_good_end(ended):
            raise
        abandon(ended)  # no news, unless the signal came when the session was just open
        log.info("%s", ended)
        sys.exit(SIGTERM_EXIT_CODE if leaving.is_asked and not isinstance(ended, JobEndedError) else 0)
    return session


def _is_good_end(error: BaseException) -> bool:
    """Whether this worker ends without an error: it leaves as asked, or the job ended well without it."""
    if isinstance(error, WorkerError):
        return isinstance(error, LeaveGranted) or error.exit_code == 0
    return isinstance(error, LeaveNow)


class _Leaving:
    """SIGTERM while ``init`` is under way: noted, and told to whatever waits.

    A handler must not raise there: what it interrupts may be an import, whose lock would stay locked for
    ever, or something whose errors Python drops, and the request with them.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.is_asked = False
        self._wakes: SimpleQueue[None] = SimpleQueue()  # a signal handler may put one, wherever it interrupts

    def ask(self) -> None:
        """Notes the request."""
        self.is_asked = True
        self._wakes.put(None)
        if self.session is not None:
            self.session.leave_now("SIGTERM")

    def sleep(self, seconds: float) -> None:
        """Waits, but no longer than until the request."""
        with contextlib.suppress(Empty):
            self._wakes.get(timeout=seconds)
        self.check()

    def check(self) -> None:
        """Raises LeaveNow if there was a request."""
        if self.is_asked:
            raise LeaveNow("This worker leaves the job: SIGTERM.")


def release() -> None:
    """Says that this worker has finished, or left as asked, and frees everything; idempotent."""
    if _process.session is not None:
        _process.session.release()


def current() -> Session:
    """The default session.

    Raises:
        NotInitializedError: there is none.
    """
    if _process.session is None or _process.session.released:
        raise NotInitializedError("There is no session.", remedy="Call worker.init() first.")
    return _process.session


def open_session(
    env: Mapping[str, str],
    context: SecurityContext,
    backend: str | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Session:
    """Makes a session from the settings, not yet joined; ``sleep`` waits for what may pass by itself.

    Raises:
        SettingsError: a setting is wrong.
        SecurityError: the certificate cannot be used.
    """
    settings = load_settings(env, context)
    _set_up_log(settings.log_level)
    from muster.worker.host import UnresolvedHostError, choose_device, describe_host, node_identity

    device = choose_device(settings)
    name = backend or settings.backend or _default_backend(device.visible_count)
    if name == "nccl" and not settings.spare:  # a spare may wait for long, and holds no GPU meanwhile
        from muster.worker.communicators.nccl.warmup import begin_context

        begin_context(device.ordinal)  # beside all that follows: it takes as long
    keyring = load_keyring(settings, env)  # sets the ciphers: before anything imports grpc
    from muster.worker.check.facts import bind_libraries, join_facts
    from muster.worker.communicators import create_backend, tls_policies
    from muster.worker.communicators.tcp.probe import Probes
    from muster.worker.control.connection import GrpcConnector
    from muster.worker.control.messages import Profile
    from muster.worker.control.session import Session, new_incarnation

    host = retried(lambda: describe_host(settings), UnresolvedHostError, sleep=sleep)
    bind_libraries(settings.interface)
    policies = None if keyring is None else tls_policies(keyring, settings.job_id)
    plane = create_backend(name, tls=keyring, job_id=settings.job_id, allow_insecure=settings.allow_insecure)
    data_address = plane.open_endpoint(host.address)
    probes = Probes(policies, settings.job_id, allow_insecure=settings.allow_insecure)
    probe_address = data_address if name == "tcp" else probes.open(host.address)
    profile = Profile(
        job_id=settings.job_id,
        node_id=node_identity(settings, host, os.urandom(4).hex()),
        incarnation=new_incarnation(),
        worker_num=settings.worker_num,
        worker_min=settings.worker_min,
        host=host,
        device=device.device,
        backend=name,
        local_index=settings.local_index,
        data_address=data_address,
        probe_address=probe_address,
        spare=settings.spare,
        facts=tuple(sorted(join_facts(name, plane, env).items())),
    )
    connector = GrpcConnector(settings, keyring)
    return Session(
        settings, profile=profile, device=device, backend=plane, connector=connector, probes=probes
    )


def retried(
    attempt: Callable[[], T],
    passing: type[WorkerError],
    *,
    pauses_s: Sequence[float] = NAME_SERVICE_PAUSES_S,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Tries again while an error may pass by itself: a cluster's name service learns of new hosts late.

    Args:
        attempt: what to do.
        passing: the error that may pass.
        pauses_s: how long to wait after each failure, in seconds; after the last the error is raised.
        sleep: waits.
    """
    for pause_s in pauses_s:
        try:
            return attempt()
        except passing as error:
            log.warning("%s Trying again in %g s.", error.message, pause_s)
            sleep(pause_s)
    return attempt()


def _default_backend(gpu_count: int) -> str:
    if not gpu_count:
        return "tcp"
    from importlib.util import find_spec

    if find_spec("nccl") is not None:
        return "nccl"
    log.warning("%d GPUs are visible, but nccl4py is not installed: computing on the CPU", gpu_count)
    return "tcp"


def _set_up_log(level: str) -> None:
    """Shows progress on stderr, unless the script has set up logging itself."""
    logger = logging.getLogger("muster")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(BoundedFormatter())
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level)


def _hook_exit() -> None:
    """Ends the session with the process: finished at a normal end, failed at an exception or exit code.

    A script need not catch what is no failure: LeaveGranted, say, ends it without a traceback.
    """
    if _process.hooked:
        return
    _process.hooked = True
    show_errors_in_words()
    previous = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        abandon(error)  # first: the peers learn at once
        plain = previous in (sys.__excepthook__, in_words)
        if isinstance(error, KeyboardInterrupt) and plain and _was_interrupted():
            print("interrupted", file=sys.stderr)  # no traceback; Python goes on to end by SIGINT
        elif isinstance(error, WorkerError) and _is_good_end(error):
            if not getattr(error, "logged", False):
                log.info("%s", error)
            sys.exit(error.exit_code)  # Python takes this for the script's own exit, where its hook raises it
        else:
            previous(kind, error, trace)
            if isinstance(error, WorkerError):  # the script's own hook has shown it
                sys.exit(error.exit_code)

    def on_exit(code: str | int | None = None, /) -> NoReturn:
        note_exit(code)
        leave(code)

    def on_quit(self: Quitter, code: str | int | None = None) -> NoReturn:
        note_exit(code)
        quit_with(self, code)

    leave, quit_with = sys.exit, Quitter.__call__
    sys.exit = on_exit
    Quitter.__call__ = on_quit  # type: ignore[method-assign]  # exit() and quit()
    sys.excepthook = on_exception
    atexit.register(_at_exit)


def note_exit(code: str | int | None) -> None:
    """Notes the code that the main thread is about to exit with: SystemExit itself reaches no hook.

    Called by whatever raises it, or sees it pass; a script's own ``raise SystemExit`` is seen by a ``with``
    block of the session, and by the launcher that has forked it.
    """
    if threading.current_thread() is threading.main_thread():
        _process.exit = SystemExit(code)


def _was_interrupted() -> bool:
    """Whether Ctrl-C met ``init`` or a session: a script without either keeps its traceback."""
    session = _process.session
    return _process.interrupted or (session is not None and session.interrupted)


def abandon(error: BaseException) -> None:
    """Tells the scheduler that this worker is gone, and why. Never raises; Ctrl-C cuts the goodbye short."""
    _end(error)


def limit_exit(limit_s: int = EXIT_LIMIT_S) -> None:
    """Lets the system end this process (SIGALRM) if the interpreter has not ended by then.

    gRPC was seen, rarely, to wait for ever while the interpreter takes its modules apart.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(limit_s)


def _at_exit() -> None:
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # The script is over: nothing is left to stop, and its exit code tells more than the signal would.
        # To ignore it holds to the interpreter's very end; a handler would not.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end(_process.exit)
    limit_exit()


def _end(error: BaseException | None) -> None:
    if error is not None and not _process.said and not is_good_exit(error):
        _process.said = True
        error = _cause(error)
        left = isinstance(error, LeaveGranted | LeaveNow) or _passes_leave_on(error)
        last_words.note(error=reason_of(error), consequence=is_consequence(error), left=left)
    if _process.session is not None:
        with contextlib.suppress(WorkerError, KeyboardInterrupt):
            _process.session.end(error)


def _cause(error: BaseException) -> BaseException:
    """What lies behind an exit: the error that has left the session's block, and was caught outside."""
    session = _process.session
    return session.error or error if isinstance(error, SystemExit) and session is not None else error


def _passes_leave_on(error: BaseException) -> bool:
    """Whether a script that has caught LeaveGranted exits with the code that stands for it."""
    session = _process.session
    asked = isinstance(error, SystemExit) and error.code == SIGTERM_EXIT_CODE
    return asked and session is not None and session.leaves
