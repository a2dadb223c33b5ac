"""Prometheus metrics. A request reads them in the event loop, or gets those of a recent request."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from muster.scheduler import __version__
from muster.scheduler.config import SchedulerSettings
from muster.scheduler.errors import BindError
from muster.scheduler.serve.gpu_metrics import gpu_metrics
from muster.wire.messages import PLAIN, SEALED
from muster.wire.settings import show_address

if TYPE_CHECKING:
    from muster.certs.runtime.follower import Follower
    from muster.scheduler.audit.logs import Recorder
    from muster.scheduler.core.views import JobView
    from muster.scheduler.jobs.driver import Counters, JobDriver
    from muster.scheduler.jobs.jobs import Jobs
    from muster.scheduler.serve.sessions import Sessions

JOB_STATES = ("forming", "building", "running", "quiescing", "suspended", "ended")
MAX_CONNECTIONS = 32
"""The most simultaneous connections; further connections are closed."""

MAX_REQUEST_BYTES = 8192
SHARE = 0.02
"""The largest share of its time that the event loop spends on reading metrics, however often they are
requested. Readings that take less than :data:`CHEAP_S` are not counted.
"""

CHEAP_S = 0.002
"""Readings of the metrics that take less processor time than this, in seconds, are not limited."""

LONGEST_REUSE_S = 1.0
EXCHANGE_TIMEOUT_S = 5.0
"""Timeout of a request and its answer together, in seconds."""


class SchedulerCollector:
    """Collects all metrics. It runs in the scheduler's event loop, so that nothing changes in between."""

    def __init__(
        self,
        jobs: Jobs,
        sessions: Sessions,
        recorder: Recorder,
        security: Follower | None,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self._jobs = jobs
        self._leads = leads
        self._sessions = sessions
        self._recorder = recorder
        self._security = security
        self._started = time.monotonic()

    def collect(self) -> list[Metric]:
        """Returns all metric families."""
        drivers = self._jobs.all()
        gpus = gpu_metrics([driver.view() for driver in drivers])
        return [*self._process(), *_job_metrics(drivers), *_worker_metrics(drivers), *gpus, *self._expiry()]

    def _process(self) -> Iterator[Metric]:
        yield InfoMetricFamily("muster_scheduler", "The running scheduler.", {"version": __version__})
        yield GaugeMetricFamily(
            "muster_uptime_seconds", "Since the scheduler started.", time.monotonic() - self._started
        )
        yield GaugeMetricFamily(
            "muster_leader", "1 if this scheduler leads, 0 if it stands by for another.", float(self._leads())
        )
        yield GaugeMetricFamily(
            "muster_journal_unwritable",
            "1 while no record can be written for want of space: joins and losses wait.",
            float(bool(self._jobs.unwritable)),
        )
        yield GaugeMetricFamily("muster_sessions", "Open worker streams.", len(self._sessions.all))
        for name, meaning, label, counts in (
            ("muster_refusals", "Workers and calls turned away.", "code", self._recorder.refusals),
            (
                "muster_failed_handshakes",
                "TLS handshakes that failed.",
                "reason",
                self._recorder.failed_handshakes,
            ),
        ):
            family = CounterMetricFamily(name, meaning, labels=[label])
            for value, count in sorted(counts.items()):
                family.add_metric([value], count)
            yield family

    def _expiry(self) -> Iterator[Metric]:
        if self._security is None:
            return
        now = dt.datetime.now(dt.UTC)
        family = GaugeMetricFamily(
            "muster_certificate_expiry_seconds", "Until what is in force ends.", labels=["what"]
        )
        for expiry in self._security.expiries():
            family.add_metric([expiry.what], expiry.seconds_left(now))
        yield family


_SEALED = {SEALED: 1.0, PLAIN: 0.0}
_JOB_METRICS: tuple[tuple[type[Any], str, str, Callable[[JobView, Counters], float | None]], ...] = (
    (GaugeMetricFamily, "generation", "Number of the membership.", lambda view, _: view.generation),
    (GaugeMetricFamily, "workers_wanted", "MS_WORKER_NUM.", lambda view, _: view.worker_num),
    (
        GaugeMetricFamily,
        "nccl_sealed",
        "1 if NCCL's traffic between hosts is encrypted, 0 if it is plain; none where there is none.",
        lambda view, _: _SEALED.get(view.nccl_traffic),
    ),
    (CounterMetricFamily, "heartbeats", "Heartbeats received.", lambda _, seen: seen.heartbeats),
    (CounterMetricFamily, "events", "Events handled.", lambda _, seen: seen.events),
    (
        GaugeMetricFamily,
        "snapshot_age_seconds",
        "Since the snapshot was taken that all members keep in memory.",
        lambda view, _: view.copies.snapshot_age_s if view.copies.snapshot_step is not None else None,
    ),
    (
        GaugeMetricFamily,
        "snapshot_step",
        "Of the snapshot that all members keep in memory.",
        lambda view, _: view.copies.snapshot_step,
    ),
    (
        GaugeMetricFamily,
        "snapshot_bytes",
        "Of all its parts.",
        lambda view, _: view.copies.snapshot_bytes if view.copies.snapshot_step is not None else None,
    ),
    (
        GaugeMetricFamily,
        "snapshot_seconds",
        "That copying and sending its part took the slowest rank.",
        lambda view, _: view.copies.snapshot_seconds if view.copies.snapshot_step is not None else None,
    ),
    (
        GaugeMetricFamily,
        "checkpoint_age_seconds",
        "Since a worker last said that it had written a checkpoint.",
        lambda view, _: view.copies.checkpoint.age_s if view.copies.checkpoint is not None else None,
    ),
    (
        GaugeMetricFamily,
        "checkpoint_step",
        "Of that checkpoint.",
        lambda view, _: view.copies.checkpoint.step if view.copies.checkpoint is not None else None,
    ),
    (
        GaugeMetricFamily,
        "formation_seconds",
        "From the first join to the first built group.",
        lambda _, seen: seen.formation_s,
    ),
    (
        GaugeMetricFamily,
        "build_seconds",
        "From the last membership to its built group.",
        lambda _, seen: seen.build_s,
    ),
)
"""Each metric of a job: its kind, name, meaning, and a function that returns its value, None if unknown."""


def _job_metrics(drivers: list[JobDriver]) -> Iterator[Metric]:
    state = GaugeMetricFamily("muster_job_state", "1 for the state the job is in.", labels=["job", "state"])
    views = [(driver.job_id, driver.view(), driver.counters) for driver in drivers]
    for job_id, view, _ in views:
        for name in JOB_STATES:
            state.add_metric([job_id, name], float(view.state == name))
    yield state
    failed = GaugeMetricFamily("muster_job_failed", "1 if the job has ended, and not well.", labels=["job"])
    for driver in drivers:
        failed.add_metric([driver.job_id], float(driver.ended is not None and not driver.ended.ok))
    yield failed
    for kind, name, meaning, figure in _JOB_METRICS:
        family = kind(f"muster_{name}", meaning, labels=["job"])
        for job_id, view, counters in views:
            value = figure(view, counters)
            if value is not None:
                family.add_metric([job_id], value)
        yield family


def _worker_metrics(drivers: list[JobDriver]) -> Iterator[Metric]:
    workers = GaugeMetricFamily("muster_workers", "Workers by state.", labels=["job", "state"])
    rate = GaugeMetricFamily("muster_samples_per_second", "Sum over the job's workers.", labels=["job"])
    step = GaugeMetricFamily("muster_step", "The step that all workers have finished.", labels=["job"])
    missing = GaugeMetricFamily("muster_workers_missing", "Wanted, and without a rank.", labels=["job"])
    straggler = GaugeMetricFamily(
        "muster_straggler_slowdown",
        "How many times as long steps take because of a rank that holds the others up; none: nobody does.",
        labels=["job", "rank", "kind"],
    )
    silent = GaugeMetricFamily(
        "muster_longest_silence_seconds", "Since the rank was heard that is silent longest.", labels=["job"]
    )
    spent = GaugeMetricFamily(
        "muster_job_seconds", "The job's time since this scheduler began, by cause.", labels=["job", "cause"]
    )
    own = GaugeMetricFamily(
        "muster_number",
        "A number of the script's own, by name: mean over the ranks that report it.",
        labels=["job", "name"],
    )
    for driver in drivers:
        view = driver.view()
        for cause, seconds in view.time_by_cause:
            spent.add_metric([driver.job_id, cause], seconds)
        for name, value in view.numbers:
            own.add_metric([driver.job_id, name], value)
        ranked = [worker for worker in view.workers if worker.rank >= 0]
        gone = max(0, view.worker_num - len(ranked)) if view.state != "ended" else 0
        missing.add_metric([driver.job_id], gone)
        silent.add_metric([driver.job_id], max((worker.silent_s for worker in ranked), default=0.0))
        for each in view.stragglers:
            if each.kind != "one-off":
                straggler.add_metric([driver.job_id, str(each.rank), each.kind], each.slowdown)
        for state, count in sorted(Counter(worker.state for worker in view.workers).items()):
            workers.add_metric([driver.job_id, state], count)
        rate.add_metric([driver.job_id], sum(worker.samples_per_s for worker in ranked))
        step.add_metric([driver.job_id], min((worker.step for worker in ranked), default=0))
    yield from (workers, rate, step, missing, silent, straggler, spent, own)


class MetricsServer:
    """Answers ``GET /metrics`` in the event loop. Limits the number of connections and their duration.

    ``GET /leader`` is for probes. It is answered with 200 if this scheduler leads, and 503 if it stands by.

    Args:
        snapshot: returns the present metrics.
        leads: returns whether this scheduler leads.
    """

    def __init__(
        self, snapshot: Callable[[], Iterable[Metric]], leads: Callable[[], bool] = lambda: True
    ) -> None:
        self._snapshot = snapshot
        self._leads = leads
        self._tasks: set[asyncio.Task[None]] = set()
        self._taken = _Taken([])
        self._taken_until_s = 0.0
        self._encoded: dict[str, asyncio.Future[bytes]] = {}
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Starts to listen.

        Raises:
            OSError: binding the address fails.
        """
        self._server = await asyncio.start_server(self._connected, host, port, limit=MAX_REQUEST_BYTES)

    def close(self) -> None:
        """Stops listening, and aborts requests in progress."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                writer.write(await self._answer(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # The client is too slow, sends too much, or is gone.
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    def _leader(self) -> bytes:
        if self._leads():
            return _response("200 OK", "text/plain", b"leads\n")
        return _response("503 Service Unavailable", "text/plain", b"stands by\n")

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, _, rest = head[0].partition(" ")
        if method != "GET":
            return _response("405 Method Not Allowed", "text/plain", b"GET /metrics is all there is.\n")
        path = rest.partition(" ")[0].partition("?")[0]
        if path == "/leader":
            return self._leader()
        if path not in ("/", "/metrics"):
            return _response(
                "404 Not Found", "text/plain", b"GET /metrics and GET /leader are all there is.\n"
            )
        headers = dict(line.lower().partition(":")[::2] for line in head[1:])
        encode, content_type = choose_encoder(headers.get("accept", "").strip())
        return _response("200 OK", content_type, await self._written(encode, content_type))

    async def _written(self, encode: Callable[[Any], bytes], content_type: str) -> bytes:
        """Returns the metrics as text. Returns the last text again if requests would keep the loop busy."""
        loop, began = asyncio.get_running_loop(), time.thread_time()
        if loop.time() >= self._taken_until_s:
            self._taken, self._encoded = _Taken(list(self._snapshot())), {}
            took_s = time.thread_time() - began
            rest_s = 0.0 if took_s < CHEAP_S else min(LONGEST_REUSE_S, took_s / SHARE)
            self._taken_until_s = loop.time() + rest_s
        written = self._encoded.get(content_type)
        if written is None:
            # Reading the metrics must be done in the event loop. Formatting takes longer, so it runs in
            # another thread.
            written = self._encoded[content_type] = loop.run_in_executor(None, encode, self._taken)
        return await asyncio.shield(written)


class _Taken:
    """Collected metrics in the form that a registry accepts."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        """See :class:`prometheus_client.registry.Collector`."""
        return self._metrics


def _response(status: str, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + body


async def start_metrics(
    settings: SchedulerSettings,
    jobs: Jobs,
    sessions: Sessions,
    recorder: Recorder,
    security: Follower | None,
    leads: Callable[[], bool] = lambda: True,
) -> Callable[[], None]:
    """Starts to serve ``/metrics``; returns a function that stops it.

    Raises:
        BindError: MS_METRICS_PORT cannot be bound.
    """
    port = settings.metrics_port or 0
    server = MetricsServer(SchedulerCollector(jobs, sessions, recorder, security, leads).collect, leads)
    try:
        await server.start(settings.metrics_host, port)
    except OSError as error:
        raise BindError(
            f"The metrics cannot be served on {show_address(settings.metrics_host, port)}: {error.strerror}.",
            remedy="Choose another MS_METRICS_PORT.",
        ) from error
    return server.close
