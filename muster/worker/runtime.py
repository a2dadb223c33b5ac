"""The default session of this process: ``init``, ``release``, and its end with the script.

The functions of the public API use it. It is module-level state, so that scripts need not pass it around.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar, cast

from muster.errors import (
    SIGTERM_EXIT_CODE,
    JobEndedError,
    LeaveGranted,
    LeaveNow,
    NotInitializedError,
    SettingsError,
    WorkerError,
)
from muster.wire.json_lines import log_as_json, process_lines, wanted
from muster.wire.log_lines import BoundedFormatter
from muster.wire.variables import misspelt
from muster.worker.config import SecurityContext, Settings, load_settings
from muster.worker.ending import (
    NOTES_VARIABLE,
    is_good_end,
    note,
    on_sigterm,
    show_errors_in_words,
    watch_the_end,
)
from muster.worker.program_environment import AGENT_VARIABLE
from muster.worker.session.connection import SchedulerConnection
from muster.worker.session.credentials import load_keyring
from muster.worker.session.dialing import grpc_dial
from muster.worker.session.failures import is_consequence, is_good_exit, reason_of
from muster.worker.stacks.handler import answer_signal
from muster.worker.uplink.dialing import dial_by_uplink, timing_by_uplink
from muster.worker.uplink.door import OUTER

if TYPE_CHECKING:
    from muster.wire.messages import Host, Profile
    from muster.worker.gpu_health.check import GpuCheck
    from muster.worker.gpu_health.watch import GpuWatch
    from muster.worker.host import DeviceChoice
    from muster.worker.session.session import Session

log = logging.getLogger("muster.worker")

T = TypeVar("T")
NAME_SERVICE_PAUSES_S = (1.0, 2.0, 4.0, 8.0)


class ProcessState:
    """The state of ``init`` and ``release`` in this process.

    Attributes:
        context: the arguments that the script has set by ``set_ps_context``.
        session: the default session; None if there is none yet.
        interrupted: whether Ctrl-C ended ``init``.
        said: whether the reason for the worker's end has been recorded for its launcher.
    """

    def __init__(self) -> None:
        self.context = SecurityContext()
        self.session: Session | None = None
        self.interrupted = False
        self.said = False

    def was_interrupted(self) -> bool:
        """Whether Ctrl-C came during ``init`` or in a session.

        If neither is the case, the script's traceback is shown.
        """
        return self.interrupted or (self.session is not None and self.session.interrupted)

    def end(self, error: BaseException | None) -> None:
        """Releases the session at the script's end; never raises, and Ctrl-C shortens it."""
        if error is not None and not self.said and not is_good_exit(error):
            self.said = True
            error = self._cause(error)
            left = isinstance(error, LeaveGranted | LeaveNow) or self._passes_leave_on(error)
            note(error=reason_of(error), consequence=is_consequence(error), left=left)
        if self.session is not None:
            with contextlib.suppress(WorkerError, KeyboardInterrupt):
                self.session.end(error)

    def _cause(self, error: BaseException) -> BaseException:
        """Returns the error behind an exit, which the script may have caught outside the session's block."""
        session = self.session
        return session.error or error if isinstance(error, SystemExit) and session is not None else error

    def _passes_leave_on(self, error: BaseException) -> bool:
        """Whether a script that has caught LeaveGranted exits with the corresponding exit code."""
        asked = isinstance(error, SystemExit) and error.code == SIGTERM_EXIT_CODE
        return asked and self.session is not None and self.session.leaves


process = ProcessState()


def set_ps_context(
    *,
    config_file_path: str | None = None,
    enable_ssl: bool | None = None,
    client_password: str | None = None,
    server_password: str | None = None,
    enable_ps: bool | None = None,
    scheduler_manage_port: int | None = None,
) -> None:
    """Configures TLS in the script instead of the environment; call it before ``init``.

    Arguments that are given replace those of earlier calls; the others are kept.

    Args:
        config_file_path: config.json; wins over MS_CONFIG_FILE.
        enable_ssl: True requires TLS; False switches it off even if MS_CONFIG_FILE is set.
        client_password: password of the worker's PKCS#12 file; wins over MS_CLIENT_PASSWORD.
        server_password: password of the scheduler's PKCS#12 file, for ``init`` with MS_ROLE=MS_SCHED; wins
            over MS_SERVER_PASSWORD. A worker does not use it.
        enable_ps: MindSpore's switch for this way of starting. It is checked but has no effect, because there
            is no other way.
        scheduler_manage_port: refused, because Muster's scheduler is not managed over HTTP.

    Raises:
        SettingsError: an argument has the wrong type, or ``scheduler_manage_port`` is given.
    """
    show_errors_in_words()
    if scheduler_manage_port is not None:
        raise SettingsError(
            "scheduler_manage_port has no counterpart here: the scheduler has no port for HTTP.",
            remedy="muster status, drain and web ask and manage it; MS_METRICS_PORT serves metrics.",
        )
    given = {
        "config_file_path": config_file_path,
        "enable_ssl": enable_ssl,
        "client_password": client_password,
        "server_password": server_password,
        "enable_ps": enable_ps,
    }
    for name, value in given.items():
        kind = bool if name.startswith("enable_") else str
        if value is not None and not isinstance(value, (kind, os.PathLike)):
            raise SettingsError(f"{name} must be a {kind.__name__}; it is a {type(value).__name__}.")
    del given["enable_ps"]
    process.context = process.context.replaced(**{n: v for n, v in given.items() if v is not None})


def init(backend: str | None = None) -> Session:
    """Joins the job as a worker; see :func:`muster.init`, which also handles the scheduler's role.

    Raises:
        WorkerError: as documented there.
        SystemExit: as documented there.
    """
    if process.session is not None and not process.session.released:
        return process.session
    begin_lines("program" if AGENT_VARIABLE in os.environ else "agent" if backend == "torch" else "worker")
    if AGENT_VARIABLE in os.environ:
        process.session = _adopted(backend)
        return process.session
    watch_the_end(process.end, process.was_interrupted)
    answer_signal(os.environ)
    if NOTES_VARIABLE not in os.environ:  # Otherwise the launcher has reported it.
        for sentence in misspelt(os.environ):
            log.warning("%s", sentence)
    leaving = Leaving()
    try:
        with on_sigterm(leaving.ask):
            process.said = False
            session = open_session(os.environ, process.context, backend, sleep=leaving.sleep)
            process.session = leaving.session = session
            leaving.check()
            session.open()
            leaving.check()
    except KeyboardInterrupt:
        process.interrupted = True
        raise
    except (LeaveNow, WorkerError) as ended:
        if not is_good_end(ended):
            raise
        abandon(ended)  # Has an effect only if the signal came just after the session had opened.
        log.info("%s", ended)
        sys.exit(SIGTERM_EXIT_CODE if leaving.is_asked and not isinstance(ended, JobEndedError) else 0)
    return session


def _adopted(backend: str | None) -> Session:
    """Returns the session for a program whose agent is the job's member."""
    if backend not in (None, "torch"):
        raise SettingsError(
            f"This program has an agent that holds its session, without the communicator {backend}.",
            remedy="Use torch.distributed, or start it with muster run --program muster.",
        )
    from muster.worker.adopted import AdoptedSession

    return cast("Session", AdoptedSession(os.environ))


class Leaving:
    """Records a SIGTERM during ``init`` and passes it on to the code that waits.

    A signal handler must not raise there. It may interrupt an import, whose lock would then stay locked for
    ever. Or it may interrupt code whose exceptions Python ignores, and the request would be lost.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.is_asked = False
        # A SimpleQueue, because a signal handler may put something at any point of the program.
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def ask(self) -> None:
        """Records the request."""
        self.is_asked = True
        self._wakes.put(None)
        if self.session is not None:
            self.session.leave_now("SIGTERM")

    def sleep(self, seconds: float) -> None:
        """Waits, but returns as soon as there is a request."""
        with contextlib.suppress(Empty):
            self._wakes.get(timeout=seconds)
        self.check()

    def check(self) -> None:
        """Raises LeaveNow if there was a request."""
        if self.is_asked:
            raise LeaveNow("This worker leaves the job: SIGTERM.")


def release() -> None:
    """Reports that this worker has finished, or left as asked, and frees everything; idempotent."""
    if process.session is not None:
        process.session.release()


def current() -> Session:
    """Returns the default session.

    Raises:
        NotInitializedError: there is no session.
    """
    if process.session is None or process.session.released:
        raise NotInitializedError("There is no session.", remedy="Call muster.init() first.")
    return process.session


def open_session(
    env: Mapping[str, str],
    context: SecurityContext,
    backend: str | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Session:
    """Creates a session that has not joined yet; ``sleep`` is called to wait before something is tried again.

    Raises:
        SettingsError: a setting is wrong.
        SecurityError: the certificate cannot be used.
    """
    settings = load_settings(env, context)
    _set_up_log(settings.log_level)
    process_lines.job = settings.job_id
    from muster.worker.host import UnresolvedHostError, choose_device, describe_host

    device = choose_device(settings)
    check = _gpu_check(settings, device)  # In parallel with what follows, because it takes longer.
    name = backend or settings.backend or _default_backend(device.visible_count)
    from muster.communicators import create_backend, tls_policies, warm_up

    # In parallel with what follows, because it takes as long.
    warmed = warm_up(name, -1 if settings.spare else device.ordinal)
    keyring = load_keyring(settings, env)  # Sets the ciphers; must come before anything imports grpc.
    from muster.communicators.tcp.probe import Prober, answer_probes
    from muster.worker.host import bind_libraries, join_facts
    from muster.worker.nccl_protection import encryption_facts, protect_nccl
    from muster.worker.session.own_gpu import OwnGpu
    from muster.worker.session.session import Session

    host = retried(lambda: describe_host(settings), UnresolvedHostError, sleep=sleep)
    bind_libraries(settings.interface)
    policies = None if keyring is None else tls_policies(keyring, settings.job_id)
    insecure = settings.allow_insecure
    plane = create_backend(name, tls=keyring, job_id=settings.job_id, allow_insecure=insecure, warm_up=warmed)
    protection = protect_nccl(settings, plane, env, os.environ, tls=keyring is not None)
    data_address = plane.open_endpoint(host.address)
    answering, probe_address = (
        (None, data_address)
        if plane.answers_probes
        else answer_probes(policies, host.address, allow_insecure=insecure)
    )
    facts = {**join_facts(plane, env), **encryption_facts(protection, plane)}
    profile = _profile_of(settings, name, host, device, data_address, probe_address, facts)
    dial = grpc_dial(settings, keyring)
    return Session(
        settings,
        profile=profile,
        device=device,
        backend=plane,
        connection=SchedulerConnection(dial_by_uplink(env, dial, settings) if OUTER in env else dial),
        timing=timing_by_uplink() if OUTER in env else None,
        prober=Prober(policies, settings.job_id),
        answering=answering,
        prepare=None if warmed is None else warmed.load,
        nccl=protection,
        gpu=OwnGpu(lambda ordinal: _gpu_watch(settings, ordinal), check),
    )


def _gpu_watch(settings: Settings, ordinal: int) -> GpuWatch:
    """Creates the reader of this worker's GPU health."""
    from muster.worker.gpu_health.watch import GpuWatch
    from muster.worker.host import visible_gpu

    return GpuWatch(visible_gpu(settings, ordinal), settings.gpu_limits)


def _gpu_check(settings: Settings, device: DeviceChoice) -> GpuCheck | None:
    """Returns the check of this worker's GPU, which has started; None if no check is wanted."""
    if settings.gpu_check != "on" or not device.visible_count:
        return None
    if device.ordinal < 0:
        log.warning(
            "the GPU is not checked: several are visible, and MS_LOCAL_INDEX does not say which it is"
        )
        return None
    from muster.worker.gpu_health.check import GpuCheck

    check = GpuCheck(device.ordinal)
    check.begin()
    return check


def _profile_of(
    settings: Settings,
    backend: str,
    host: Host,
    device: DeviceChoice,
    data_address: str,
    probe_address: str,
    facts: Mapping[str, str],
) -> Profile:
    """Returns this worker's description in its Join."""
    from muster.wire.messages import Profile
    from muster.worker.host import node_identity, visible_gpu
    from muster.worker.session.incarnation_number import new_incarnation

    return Profile(
        job_id=settings.job_id,
        node_id=node_identity(settings, host, os.urandom(4).hex()),
        incarnation=new_incarnation(),
        worker_num=settings.worker_num,
        worker_min=settings.worker_min,
        host=host,
        device=device.device,
        backend=backend,
        local_index=settings.local_index,
        data_address=data_address,
        probe_address=probe_address,
        last_call_s=settings.last_call_s,
        spare=settings.spare,
        facts=tuple(sorted(facts.items())),
        gpu_uuid=visible_gpu(settings, device.ordinal).uuid if device.ordinal >= 0 else "",
    )


def retried(
    attempt: Callable[[], T],
    passing: type[WorkerError],
    *,
    pauses_s: Sequence[float] = NAME_SERVICE_PAUSES_S,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Retries while an error may be temporary, such as when a name service does not know new hosts yet.

    Args:
        attempt: the function to call.
        passing: the error that may be temporary.
        pauses_s: how long to wait after each failure, in seconds; if the last attempt fails, its error is
            raised.
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


def begin_lines(component: str) -> None:
    """Switches the log to JSON lines, if the environment asks for them.

    Because the user has asked for it, this applies even if the script has set up logging itself, but not if
    it has set up Muster's loggers.
    """
    if wanted(os.environ):
        process_lines.begin(component, os.environ.get("MS_JOB_ID") or None)
        log_as_json("muster")


def _set_up_log(level: str) -> None:
    """Shows progress on stderr, unless the script has set up logging itself."""
    logger = logging.getLogger("muster")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(BoundedFormatter())
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level)


def abandon(error: BaseException) -> None:
    """Tells the scheduler that this worker is gone, and why. Never raises."""
    process.end(error)
