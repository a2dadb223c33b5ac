"""Runs the scheduler: binds, serves, stops, and returns the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from muster.certs.config import config_warnings
from muster.certs.runtime.follower import Follower
from muster.certs.runtime.grpc_credentials import RotatingServerCredentials
from muster.scheduler import systemd
from muster.scheduler.access import Access
from muster.scheduler.audit import membership
from muster.scheduler.audit.anchors import Anchors
from muster.scheduler.audit.audit_log import AuditLog
from muster.scheduler.audit.logs import LOG, Recorder
from muster.scheduler.audit.native_stderr import HandshakeWatch
from muster.scheduler.audit.refusals import ThinnedRecorder
from muster.scheduler.config import SchedulerSettings
from muster.scheduler.core import records
from muster.scheduler.core.ledger import count
from muster.scheduler.errors import BindError, JobFailedError
from muster.scheduler.jobs.adoption import AdoptingJob
from muster.scheduler.jobs.incidents import IncidentFiles
from muster.scheduler.jobs.jobs import Jobs
from muster.scheduler.jobs.storage import Storage
from muster.scheduler.serve import listen
from muster.scheduler.serve.credentials import check_may_listen
from muster.scheduler.serve.garbage import collect_seldom, keep_collecting
from muster.scheduler.serve.health import GuardedHealth
from muster.scheduler.serve.host_stream import HostStreams
from muster.scheduler.serve.service import SERVICE, Service
from muster.scheduler.serve.sessions import Limits, Sessions
from muster.scheduler.store.service import StoreService
from muster.scheduler.watch import recovery_traces
from muster.scheduler.watch.service import WatchService
from muster.wire.settings import server_options, show_address
from muster.wire.threads import Pool

if TYPE_CHECKING:
    from muster.scheduler.etcd.leadership import Leadership

MAX_REQUEST_BYTES = 1024 * 1024
AT_ONCE = 16
"""The most blocking calls that threads make at the same time."""

FAREWELL_S = 2.0
FOLLOW_INTERVAL_S = 0.5
READY_AT_LATEST_S = 5.0
HEALTH_INTERVAL_S = 0.25
EXIT_LIMIT_S = 60
"""How long the shutdown may take, in seconds. On a busy machine, it may take tens of seconds."""

EXIT_WARNING_S = 10
"""How long before :data:`EXIT_LIMIT_S` a warning is logged, in seconds, because SIGALRM logs nothing."""
_STOPPING = (signal.SIGTERM, signal.SIGINT)


def grpc_options(node_timeout_s: float) -> Sequence[tuple[str, int]]:
    """Returns all settings of the gRPC server.

    Args:
        node_timeout_s: how long a worker may be silent, in seconds; its connection is kept that long.
    """
    return (
        *server_options(node_timeout_s),
        # A worker needs only one stream. Each stream costs 33 kB even if it is refused, and the allocator
        # does not return the memory.
        ("grpc.max_concurrent_streams", 8),
        ("grpc.max_allowed_incoming_connections", 30_000),
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", 16 * 1024),
    )


async def run(
    settings: SchedulerSettings, security: Follower | None, watch: HandshakeWatch | None = None
) -> int:
    """Serves until the scheduler's own job is over or a signal arrives.

    Args:
        settings: the scheduler's settings.
        security: certificates; None for plaintext.
        watch: reports failed handshakes; None to report none.

    Returns:
        The exit code. It is 0 if the scheduler's own job ended well, or if a scheduler that serves several
        jobs got a signal. It is 128 + the signal's number if a signal came before the own job's end.

    Raises:
        SchedulerError: the scheduler could not start, or its own job failed.
    """
    loop = asyncio.get_running_loop()
    loop.set_default_executor(Pool(AT_ONCE, "scheduler"))
    stop: asyncio.Future[int] = loop.create_future()
    for number in _STOPPING:
        loop.add_signal_handler(number, functools.partial(_on_signal, stop, number))
    hosts = (settings.bind_host,) if settings.bind_host else settings.hosts
    addresses = await loop.run_in_executor(None, listen.resolve, hosts)
    if check_may_listen(settings, addresses, tls=security is not None):
        LOG.warning("INSECURE: no TLS beyond loopback; all who reach this port can join and read the ids")
    _raise_file_limit()
    audit = AuditLog(settings.audit_log_path) if settings.audit_log_path else None
    recorder = ThinnedRecorder(audit, loop)
    leadership = _leadership(settings, security, loop)
    storage = _storage(settings, leadership)
    jobs = _jobs(settings, loop, recorder, leadership, storage)
    anchors = Anchors(audit, storage) if audit is not None and storage is not None else None
    jobs.follow(lambda driver: membership.follow(driver, recorder.membership))
    exporter = recovery_traces.exporter_of(os.environ)
    if exporter is not None:
        jobs.follow(recovery_traces.RecoveryTraces(exporter.export, loop.call_later).follow)
    if watch is not None:
        watch.report_to(recorder)
    try:
        return await _serve(settings, security, addresses, jobs, recorder, stop, leadership, anchors)
    finally:
        await jobs.close()
        if watch is not None:
            watch.finish_reports()
        if exporter is not None:
            await loop.run_in_executor(None, exporter.close)
        recorder.close()
        _keep_exit_code()


def _keep_exit_code() -> None:
    """Keeps signals from changing the exit code, and ends a shutdown that hangs."""
    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if signal.alarm(EXIT_LIMIT_S):
        return  # An earlier call has done all of this.
    late = f"The scheduler's work is done, but its end takes long: SIGALRM ends it in {EXIT_WARNING_S} s."
    warning = threading.Timer(EXIT_LIMIT_S - EXIT_WARNING_S, LOG.error, (late,))
    warning.daemon = True
    # If no thread can be started at this stage, SIGALRM ends a hanging process without a warning.
    with contextlib.suppress(RuntimeError):
        warning.start()
    for number in _STOPPING:
        loop.remove_signal_handler(number)  # Closing the loop would restore the default handler.
        signal.signal(number, signal.SIG_IGN)


def _leadership(
    settings: SchedulerSettings, security: Follower | None, loop: asyncio.AbstractEventLoop
) -> Leadership | None:
    """Makes this process's claim to lead; returns None if there is only one scheduler."""
    if settings.etcd is None:
        return None
    from muster.scheduler.etcd.calls import EtcdCalls
    from muster.scheduler.etcd.leadership import Leadership

    own = settings.bind_host or (settings.hosts[0] if len(settings.hosts) == 1 else socket.gethostname())
    name = f"{show_address(own, settings.port)} (pid {os.getpid()} on {socket.gethostname()})"
    if security is not None:
        security.etcd()  # A problem with the certificate for etcd is reported at the start.
    calls = EtcdCalls(settings.etcd.endpoints, security.etcd if security is not None else None)
    addresses = [show_address(host, settings.port) for host in settings.hosts]
    return Leadership(calls, settings.etcd.prefix.encode(), name, loop, addresses)


def _storage(settings: SchedulerSettings, leadership: Leadership | None) -> Storage | None:
    path = settings.recovery_path
    if leadership is not None:
        from muster.scheduler.etcd.journal import EtcdJournal

        return EtcdJournal(leadership)
    if path is None:
        return None

    from muster.scheduler.jobs.journal import InThread, Journal

    name = f"scheduler-{settings.job_id}.sqlite"
    return InThread(lambda: Journal(path / name, owner=settings.job_id))


def _jobs(
    settings: SchedulerSettings,
    loop: asyncio.AbstractEventLoop,
    recorder: Recorder,
    leadership: Leadership | None,
    storage: Storage | None,
) -> Jobs:
    kept_at = settings.incident_directory
    return Jobs(
        settings,
        loop,
        recorder.note,
        new_machine=lambda job_id, core: AdoptingJob(job_id, core, (), 0.0, adopt=settings.adopt),
        recover_machine=functools.partial(AdoptingJob, adopt=settings.adopt),
        storage=storage,
        incidents=IncidentFiles(kept_at) if kept_at is not None else None,
        time_of_day=time.time,
        stood_by=lambda: leadership is not None and leadership.stood_by,
    )


async def _serve(
    settings: SchedulerSettings,
    security: Follower | None,
    addresses: list[str],
    jobs: Jobs,
    recorder: Recorder,
    stop: asyncio.Future[int],
    leadership: Leadership | None,
    anchors: Anchors | None,
) -> int:
    access = Access(
        tls=security is not None,
        require_identity=security.require_identity if security is not None else lambda: True,
        identity_map=security.identity_map if security is not None else lambda: None,
        revocations=security.revocations if security is not None else lambda: None,
    )
    limits = Limits(sessions_per_host=settings.max_streams_per_host)
    leader = leadership.name if leadership is not None else ""
    sessions = Sessions(jobs, access, recorder, limits)
    service = Service(sessions, settings.job_id, leader=leader)
    tls = RotatingServerCredentials(security.credentials) if security is not None else None
    async with contextlib.AsyncExitStack() as at_end:
        if settings.metrics_port is not None:
            at_end.callback(await _start_metrics(settings, jobs, sessions, recorder, security, leadership))
        up = asyncio.Event()
        for work in (_keep_systemd_informed(up), keep_collecting()):
            at_end.callback(asyncio.ensure_future(work).cancel)
        if security is not None and tls is not None:  # Certificates are renewed while standing by, too.
            at_end.callback(asyncio.ensure_future(keep_in_force(security, tls, sessions)).cancel)
        if leadership is not None:
            listen.usable(
                addresses, settings.port
            )  # A problem with the address is reported now, not only once this process leads.
            up.set()  # Standing by may take weeks, so systemd is told now that the scheduler is ready.
            if not await _stand_by(leadership, stop):
                return 0 if settings.serve else 128 + stop.result()
            at_end.callback(asyncio.ensure_future(leadership.keep()).cancel)
        if not await _opened(jobs, stop):
            return 0 if settings.serve else 128 + stop.result()
        server = grpc.aio.server(options=grpc_options(settings.node_timeout_s))
        at_end.push_async_callback(server.stop, 0.1)
        store = StoreService(jobs, access, recorder)
        watching = WatchService(jobs, access, recorder, settings.job_id, security)
        handlers = (service.handler(), HostStreams(sessions).handler(), store.handler(), watching.handler())
        server.add_generic_rpc_handlers(handlers)
        at_end.callback(store.close)
        health_servicer = GuardedHealth(access, recorder)
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        port = _bind(server, addresses, settings.port, tls)
        await server.start()
        at_end.callback(asyncio.ensure_future(_keep_health_true(health_servicer, jobs)).cancel)
        at_end.push_async_callback(_say_goodbye, health_servicer, jobs, sessions)
        at_end.push_async_callback(watching.close)
        if anchors is not None:
            await anchors.begin()
            at_end.push_async_callback(anchors.end)
        up.set()
        _say_ready(settings, security, port)
        return await _until_over(settings, jobs, sessions, stop, leadership)


async def _stand_by(leadership: Leadership, stop: asyncio.Future[int]) -> bool:
    """Waits until this process leads; returns False if it is asked to stop before that."""
    print(f"scheduler stands by as {leadership.name}", flush=True)
    return await _before_stop(leadership.campaign(), stop)


async def _opened(jobs: Jobs, stop: asyncio.Future[int]) -> bool:
    """Opens the jobs, and waits if the journal has no space.

    Returns False if the process is asked to stop before the jobs are open.
    """
    return await _before_stop(jobs.open(), stop)


async def _before_stop(work: Coroutine[Any, Any, None], stop: asyncio.Future[int]) -> bool:
    doing = asyncio.ensure_future(work)
    waits: set[asyncio.Future[Any]] = {doing, stop}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if doing.done():
        doing.result()
        return True
    doing.cancel()
    return False


async def _keep_health_true(health_servicer: GuardedHealth, jobs: Jobs) -> None:
    """Keeps the health service up to date: the scheduler is serving while the journal can be written."""
    while True:
        status = health_pb2.HealthCheckResponse
        await health_servicer.set(SERVICE, status.NOT_SERVING if jobs.unwritable else status.SERVING)
        await asyncio.sleep(HEALTH_INTERVAL_S)


async def _say_goodbye(health_servicer: GuardedHealth, jobs: Jobs, sessions: Sessions) -> None:
    """Tells systemd, health checkers and workers that the scheduler is stopping."""
    systemd.notify(systemd.STOPPING, os.environ)
    await health_servicer.enter_graceful_shutdown()
    await jobs.close()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(sessions.idle.wait(), FAREWELL_S)


async def _until_over(
    settings: SchedulerSettings,
    jobs: Jobs,
    sessions: Sessions,
    stop: asyncio.Future[int],
    leadership: Leadership | None,
) -> int:
    waits: set[asyncio.Future[Any]] = {stop, jobs.journal_lost if settings.serve else jobs.own_job_over}
    if leadership is not None:
        waits.add(leadership.deposed)
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if not settings.serve and jobs.own_job_over.done():
        _keep_exit_code()
        ended: records.JobEnded = jobs.own_job_over.result()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(sessions.idle.wait(), FAREWELL_S)
        if not ended.ok:
            raise JobFailedError(f"Job {settings.job_id} failed: {ended.reason}")
        LOG.info("job %s ended: %s", settings.job_id, ended.reason)
        return 0
    if leadership is not None and leadership.deposed.done():
        raise leadership.depose(leadership.deposed.result())
    if settings.serve and jobs.journal_lost.done() and not stop.done():
        raise jobs.journal_lost.result()
    number = stop.result()
    LOG.info("stopping on %s; workers continue to train without a scheduler", signal.Signals(number).name)
    return 0 if settings.serve else 128 + number


def _on_signal(stop: asyncio.Future[int], number: int) -> None:
    if stop.done():  # A second signal ends the process immediately.
        raise SystemExit(128 + number)
    stop.set_result(number)


def _bind(
    server: grpc.aio.Server, addresses: list[str], port: int, tls: RotatingServerCredentials | None
) -> int:
    for address in listen.usable(addresses, port):
        where = show_address(address, port)
        try:
            if tls is None:
                port = server.add_insecure_port(where)
            else:
                port = server.add_secure_port(where, tls.credentials)
        except RuntimeError as error:
            raise BindError(f"Listening on {where} failed: {error}.") from error
    return port


def _say_ready(settings: SchedulerSettings, security: Follower | None, port: int) -> None:
    size = count(settings.worker_num, "worker") if settings.worker_num else "any number of workers"
    transport = "mutual TLS" if security is not None else "NO TLS"
    where = show_address(settings.bind_host or ",".join(settings.hosts), port)
    print(f"scheduler ready on {where} (job {settings.job_id}, {size}, {transport})", flush=True)
    if security is not None:
        for sentence in config_warnings(security.config):
            LOG.warning("%s", sentence)
        LOG.info("certificate %s %s", security.credentials.identity, security.credentials.fingerprint)


async def _keep_systemd_informed(up: asyncio.Event) -> None:
    """Tells systemd that the scheduler is ready, and then regularly that its event loop is alive.

    A scheduler whose journal has no space waits before it listens. It reports that it is ready all the same,
    because systemd ends a service that is not ready in time, and watches only a service that is ready.
    """
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(up.wait(), READY_AT_LATEST_S)
    systemd.notify(systemd.READY, os.environ)
    interval_s = systemd.watchdog_interval_s(os.environ)
    while interval_s is not None:
        systemd.notify(systemd.ALIVE, os.environ)
        await asyncio.sleep(interval_s)


async def keep_in_force(security: Follower, tls: RotatingServerCredentials, sessions: Sessions) -> None:
    """Applies renewed certificates and new revocation lists.

    A new revocation list ends the streams of the certificates that it names.
    """
    loop = asyncio.get_running_loop()
    while True:
        change = await loop.run_in_executor(None, security.poll)
        if change is not None and (change.new_certificate or change.new_authorities):
            tls.update(change.credentials)
        security.log_change(change)
        if change is not None and change.new_revocations:
            await sessions.expel_revoked()
        sessions.report_expired()
        await asyncio.sleep(FOLLOW_INTERVAL_S)


async def _start_metrics(
    settings: SchedulerSettings,
    jobs: Jobs,
    sessions: Sessions,
    recorder: Recorder,
    security: Follower | None,
    leadership: Leadership | None,
) -> Callable[[], None]:
    from muster.scheduler.serve.metrics import start_metrics

    leads = (lambda: leadership.leads) if leadership is not None else lambda: True
    return await start_metrics(settings, jobs, sessions, recorder, security, leads)


def _raise_file_limit() -> None:
    """Raises the soft limit on open files, because each worker needs a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(settings: SchedulerSettings, security: Follower | None, watch: HandshakeWatch | None = None) -> int:
    """Runs the scheduler in this process; see :func:`run`."""
    collect_seldom()
    try:
        return asyncio.run(run(settings, security, watch))
    finally:
        sys.stdout.flush()
