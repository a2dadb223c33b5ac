"""Prometheus metrics: a snapshot is taken in the event loop whenever somebody asks."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from muster.scheduler import __version__
from muster.scheduler.config import SchedulerSettings
from muster.scheduler.errors import BindError
from muster.scheduler.serve.listen import show

if TYPE_CHECKING:
    from muster.scheduler.audit.logs import Recorder
    from muster.scheduler.jobs.driver import JobDriver
    from muster.scheduler.jobs.jobs import Jobs
    from muster.scheduler.serve.credentials import Security
    from muster.scheduler.serve.service import Service

JOB_STATES = ("forming", "building", "running", "quiescing", "suspended", "ended")
SNAPSHOT_TIMEOUT_S = 5.0


class SchedulerCollector:
    """Collects what the scheduler knows, in its event loop, when Prometheus asks in a thread of its own."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        jobs: Jobs,
        service: Service,
        recorder: Recorder,
        security: Security | None,
    ) -> None:
        self._loop = loop
        self._jobs = jobs
        self._service = service
        self._recorder = recorder
        self._security = security
        self._started = time.monotonic()

    def collect(self) -> Iterable[Metric]:
        """Returns all metric families."""
        return asyncio.run_coroutine_threadsafe(self.snapshot(), self._loop).result(SNAPSHOT_TIMEOUT_S)

    async def snapshot(self) -> list[Metric]:
        """Builds all metric families; runs in the event loop, where nothing changes meanwhile."""
        drivers = self._jobs.all()
        return [*self._process(), *_job_metrics(drivers), *_worker_metrics(drivers), *self._expiry()]

    def _process(self) -> Iterator[Metric]:
        yield InfoMetricFamily("muster_scheduler", "The running scheduler.", {"version": __version__})
        yield GaugeMetricFamily(
            "muster_uptime_seconds", "Since the scheduler started.", time.monotonic() - self._started
        )
        yield GaugeMetricFamily("muster_sessions", "Open worker streams.", len(self._service.sessions))
        refusals = CounterMetricFamily("muster_refusals", "Workers and calls turned away.", labels=["code"])
        for code, count in sorted(self._recorder.refusals.items()):
            refusals.add_metric([code], count)
        yield refusals
        handshakes = CounterMetricFamily(
            "muster_failed_handshakes", "TLS handshakes that failed.", labels=["reason"]
        )
        for reason, count in sorted(self._recorder.failed_handshakes.items()):
            handshakes.add_metric([reason], count)
        yield handshakes

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


def _job_metrics(drivers: list[JobDriver]) -> Iterator[Metric]:
    state = GaugeMetricFamily("muster_job_state", "1 for the state the job is in.", labels=["job", "state"])
    generation = GaugeMetricFamily("muster_generation", "Number of the membership.", labels=["job"])
    wanted = GaugeMetricFamily("muster_workers_wanted", "MS_WORKER_NUM.", labels=["job"])
    beats = CounterMetricFamily("muster_heartbeats", "Heartbeats received.", labels=["job"])
    events = CounterMetricFamily("muster_events", "Events handled.", labels=["job"])
    formation = GaugeMetricFamily(
        "muster_formation_seconds", "From the first join to the first built group.", labels=["job"]
    )
    build = GaugeMetricFamily(
        "muster_build_seconds", "From the last membership to its built group.", labels=["job"]
    )
    for driver in drivers:
        job, view, counters = [driver.job_id], driver.view(), driver.counters
        for name in JOB_STATES:
            state.add_metric([driver.job_id, name], float(view.state == name))
        generation.add_metric(job, view.generation)
        wanted.add_metric(job, view.worker_num)
        beats.add_metric(job, counters.heartbeats)
        events.add_metric(job, counters.events)
        if counters.formation_s is not None:
            formation.add_metric(job, counters.formation_s)
        if counters.build_s is not None:
            build.add_metric(job, counters.build_s)
    yield from (state, generation, wanted, beats, events, formation, build)


def _worker_metrics(drivers: list[JobDriver]) -> Iterator[Metric]:
    workers = GaugeMetricFamily("muster_workers", "Workers by state.", labels=["job", "state"])
    rate = GaugeMetricFamily("muster_samples_per_second", "Sum over the job's workers.", labels=["job"])
    step = GaugeMetricFamily("muster_step", "The step that all workers have finished.", labels=["job"])
    for driver in drivers:
        view = driver.view()
        ranked = [worker for worker in view.workers if worker.rank >= 0]
        for state, count in sorted(Counter(worker.state for worker in view.workers).items()):
            workers.add_metric([driver.job_id, state], count)
        rate.add_metric([driver.job_id], sum(worker.samples_per_s for worker in ranked))
        step.add_metric([driver.job_id], min((worker.step for worker in ranked), default=0))
    yield from (workers, rate, step)


def start_metrics(
    settings: SchedulerSettings, jobs: Jobs, service: Service, recorder: Recorder, security: Security | None
) -> Callable[[], None]:
    """Serves ``/metrics``; returns what stops it.

    Raises:
        BindError: MS_METRICS_PORT cannot be bound.
    """
    registry = CollectorRegistry(auto_describe=False)
    collector = SchedulerCollector(asyncio.get_running_loop(), jobs, service, recorder, security)
    port = settings.metrics_port or 0
    try:
        server, _thread = start_http_server(port, settings.metrics_host, registry)
    except OSError as error:
        raise BindError(
            f"The metrics cannot be served on {show(settings.metrics_host, port)}: {error.strerror}.",
            remedy="Choose another MS_METRICS_PORT.",
        ) from error
    registry.register(collector)

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return stop
