"""Runs the scheduler: binds, serves, stops, and says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from muster.certs.config import config_warnings
from muster.certs.runtime.grpc_credentials import RotatingServerCredentials, server_options
from muster.certs.runtime.watcher import Change
from muster.scheduler.audit.logs import LOG, Recorder
from muster.scheduler.audit.native_stderr import HandshakeWatch
from muster.scheduler.audit.refusals import ThinnedAuditLog
from muster.scheduler.config import SchedulerSettings
from muster.scheduler.core import records as r
from muster.scheduler.core.job import Job
from muster.scheduler.core.wording import count
from muster.scheduler.errors import BindError, JobFailedError
from muster.scheduler.jobs.jobs import Jobs, Storage
from muster.scheduler.serve import listen, systemd
from muster.scheduler.serve.access import Access
from muster.scheduler.serve.credentials import Security, check_may_listen
from muster.scheduler.serve.health import GuardedHealth
from muster.scheduler.serve.service import SERVICE, Limits, Service

MAX_REQUEST_BYTES = 1024 * 1024
FAREWELL_S = 2.0
FOLLOW_INTERVAL_S = 0.5
EXIT_LIMIT_S = 10
_STOPPING = (signal.SIGTERM, signal.SIGINT)


def grpc_options(node_timeout_s: float) -> Sequence[tuple[str, int]]:
    """All settings of the gRPC server.

    Args:
        node_timeout_s: how long a worker may be silent; its connection lives as long.
    """
    return (
        *server_options(node_timeout_s),
        # A worker needs one. Each costs 33 kB, refused or not, and the allocator keeps what it has had once.
        ("grpc.max_concurrent_streams", 8),
        ("grpc.max_allowed_incoming_connections", 30_000),
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", 16 * 1024),
    )


async def run(
    settings: SchedulerSettings, security: Security | None, watch: HandshakeWatch | None = None
) -> int:
    """Serves until the own job is over or a signal comes.

    Args:
        settings: what to serve, and where.
        security: certificates; None for plaintext.
        watch: learns of the handshakes that fail; None where nobody does.

    Returns:
        The exit code: 0 when the own job ended well (or, serving several, on a signal), 128 + the
        signal's number when a signal ended it before.

    Raises:
        SchedulerError: the scheduler could not start, or its own job failed.
    """
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[int] = loop.create_future()
    for number in _STOPPING:
        loop.add_signal_handler(number, functools.partial(_on_signal, stop, number))
    addresses = await loop.run_in_executor(None, listen.resolve, settings.bind_host)
    if check_may_listen(settings, addresses, tls=security is not None):
        LOG.warning("INSECURE: no TLS beyond loopback; whoever reaches this port can join and read the ids")
    _raise_file_limit()
    audit = ThinnedAuditLog(settings.audit_log_path, loop) if settings.audit_log_path else None
    recorder = Recorder(audit)
    jobs = _jobs(settings, loop, recorder)
    await jobs.open()
    if watch is not None:
        watch.report_to(recorder)
    try:
        return await _serve(settings, security, addresses, jobs, recorder, stop)
    finally:
        await jobs.close()
        if watch is not None:
            watch.finish_reports()
        if audit is not None:
            audit.close()
        _keep_exit_code()


def _keep_exit_code() -> None:
    """From here on no signal replaces the exit code, and an end that hangs is cut short."""
    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_LIMIT_S)
    for number in _STOPPING:
        loop.remove_signal_handler(number)  # the loop's own end would put the default back
        signal.signal(number, signal.SIG_IGN)


def _jobs(settings: SchedulerSettings, loop: asyncio.AbstractEventLoop, recorder: Recorder) -> Jobs:
    path = settings.recovery_path

    def open_storage() -> Storage:
        from muster.scheduler.jobs.journal import Journal

        assert path is not None
        return Journal(path / f"scheduler-{settings.job_id}.sqlite", owner=settings.job_id)

    return Jobs(
        settings,
        loop,
        recorder.note,
        new_machine=Job,
        recover_machine=Job.recover,
        open_storage=open_storage if path is not None else None,
    )


async def _serve(
    settings: SchedulerSettings,
    security: Security | None,
    addresses: list[str],
    jobs: Jobs,
    recorder: Recorder,
    stop: asyncio.Future[int],
) -> int:
    access = Access(
        tls=security is not None,
        require_identity=security.require_identity if security is not None else lambda: True,
        revocations=security.revocations if security is not None else lambda: None,
    )
    limits = Limits(sessions_per_host=settings.max_streams_per_host)
    service = Service(jobs, access, recorder, settings.job_id, limits)
    tls = RotatingServerCredentials(security.credentials) if security is not None else None
    async with contextlib.AsyncExitStack() as at_end:
        server = grpc.aio.server(options=grpc_options(settings.node_timeout_s))
        at_end.push_async_callback(server.stop, 0.1)
        server.add_generic_rpc_handlers((service.handler(),))
        health_servicer = GuardedHealth(access, recorder)
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        port = _bind(server, addresses, settings.port, tls)
        if settings.metrics_port is not None:
            at_end.callback(_start_metrics(settings, jobs, service, recorder, security))
        await server.start()
        await health_servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        at_end.push_async_callback(_say_goodbye, health_servicer, jobs, service)
        at_end.callback(asyncio.ensure_future(_keep_systemd_informed()).cancel)
        if security is not None and tls is not None:
            at_end.callback(asyncio.ensure_future(_follow_files(security, tls, service)).cancel)
        _say_ready(settings, security, port)
        return await _until_over(settings, jobs, service, stop)


async def _say_goodbye(health_servicer: GuardedHealth, jobs: Jobs, service: Service) -> None:
    """Tells systemd, health checkers and workers that the scheduler is stopping."""
    systemd.notify(systemd.STOPPING, os.environ)
    await health_servicer.enter_graceful_shutdown()
    await jobs.close()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(service.idle.wait(), FAREWELL_S)


async def _until_over(
    settings: SchedulerSettings, jobs: Jobs, service: Service, stop: asyncio.Future[int]
) -> int:
    waits: set[asyncio.Future[Any]] = {stop} if settings.serve else {stop, jobs.own_job_over}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if not settings.serve and jobs.own_job_over.done():
        _keep_exit_code()
        ended: r.JobEnded = jobs.own_job_over.result()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(service.idle.wait(), FAREWELL_S)
        if not ended.ok:
            raise JobFailedError(f"Job {settings.job_id} failed: {ended.reason}")
        LOG.info("job %s ended: %s", settings.job_id, ended.reason)
        return 0
    number = stop.result()
    LOG.info("stopping on %s; workers that train go on by themselves", signal.Signals(number).name)
    return 0 if settings.serve else 128 + number


def _on_signal(stop: asyncio.Future[int], number: int) -> None:
    if stop.done():  # the second one means it
        raise SystemExit(128 + number)
    stop.set_result(number)


def _bind(
    server: grpc.aio.Server, addresses: list[str], port: int, tls: RotatingServerCredentials | None
) -> int:
    for address in listen.usable(addresses, port):
        where = listen.show(address, port)
        try:
            if tls is None:
                port = server.add_insecure_port(where)
            else:
                port = server.add_secure_port(where, tls.credentials)
        except RuntimeError as error:
            raise BindError(f"Listening on {where} failed: {error}.") from error
    return port


def _say_ready(settings: SchedulerSettings, security: Security | None, port: int) -> None:
    size = count(settings.worker_num, "worker") if settings.worker_num else "any number of workers"
    transport = "mutual TLS" if security is not None else "NO TLS"
    where = listen.show(settings.bind_host, port)
    print(f"scheduler ready on {where} (job {settings.job_id}, {size}, {transport})", flush=True)
    if security is not None:
        for sentence in config_warnings(security.config):
            LOG.warning("%s", sentence)
        LOG.info("certificate %s %s", security.credentials.identity, security.credentials.fingerprint)


async def _keep_systemd_informed() -> None:
    """Says ready once, and alive for as long as the event loop turns."""
    systemd.notify(systemd.READY, os.environ)
    interval_s = systemd.watchdog_interval_s(os.environ)
    while interval_s is not None:
        systemd.notify(systemd.ALIVE, os.environ)
        await asyncio.sleep(interval_s)


async def _follow_files(security: Security, tls: RotatingServerCredentials, service: Service) -> None:
    """Puts renewed certificates and revocation lists in force while streams live on."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            change = await loop.run_in_executor(None, security.poll)
        except Exception:
            LOG.exception("fault while reading the certificates; those in force stay")
            change = None
        if change is not None:
            await _put_in_force(change, tls, service)
        for sentence in security.expiry_warnings():
            LOG.warning("%s", sentence)
        service.report_expired()
        await asyncio.sleep(FOLLOW_INTERVAL_S)


async def _put_in_force(change: Change, tls: RotatingServerCredentials, service: Service) -> None:
    if change.new_certificate or change.new_authorities:
        tls.update(change.credentials)
    for problem in change.problems:
        LOG.error("%s", problem)
    for sentence in change.warnings:
        LOG.warning("%s", sentence)
    for sentence in change.notes:
        LOG.info("%s", sentence)
    if change.new_revocations:
        await service.expel_revoked()


def _start_metrics(
    settings: SchedulerSettings, jobs: Jobs, service: Service, recorder: Recorder, security: Security | None
) -> Callable[[], None]:
    from muster.scheduler.serve.metrics import start_metrics

    return start_metrics(settings, jobs, service, recorder, security)


def _raise_file_limit() -> None:
    """Each worker takes a file descriptor; the soft limit of 1,024 is a relic."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(settings: SchedulerSettings, security: Security | None, watch: HandshakeWatch | None = None) -> int:
    """Runs the scheduler in this process; see :func:`run`."""
    try:
        return asyncio.run(run(settings, security, watch))
    finally:
        sys.stdout.flush()
