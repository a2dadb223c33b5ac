"""Recoveries as OpenTelemetry traces: from the end of a generation to the first new step of the next one.

The traces are sent by OTLP over HTTP to the endpoint in the standard variables
(``OTEL_EXPORTER_OTLP_ENDPOINT``). If no endpoint is set, OpenTelemetry is not loaded. The extra ``otel``
installs its packages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.scheduler.core import records
from muster.scheduler.jobs.driver import JobDriver
from muster.version import how_to_install
from muster.wire.log_lines import one_line
from muster.wire.threads import start_thread

LOG = logging.getLogger("scheduler")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
LOOK_S = 0.25
LONGEST_S = 600.0
"""How long to wait for the first step after a group was established, in seconds."""

CLOSE_S = 5.0
"""How long the scheduler waits at its end for traces that are not sent yet, in seconds."""

Attributes = Mapping[str, str | int | bool]


@dataclass(frozen=True, slots=True)
class TracedSpan:
    """One span of a trace. Times are in nanoseconds since 1970.

    Attributes:
        error: why the traced work failed; empty if it did not fail.
    """

    name: str
    began_ns: int
    ended_ns: int
    attributes: Attributes = field(default_factory=dict)
    error: str = ""


@dataclass(slots=True)
class Recovery:
    """A recovery in progress. Times are in nanoseconds since 1970.

    Attributes:
        lost: the generation that has ended.
        planned: whether the members changed at a planned step boundary, without a loss.
        steps: the number of finished steps that heartbeats had reported when the next group was established.
    """

    job_id: str
    lost: int
    reason: str
    began_ns: int
    planned: bool
    steps: int
    formed: records.GenerationFormed | None = None
    formed_ns: int = 0
    established_ns: int = 0

    def spans(self, now_ns: int, *, step: int = 0, error: str = "") -> list[TracedSpan]:
        """Returns the spans of a recovery that ends now: the whole recovery first, then its phases.

        Args:
            now_ns: the present time.
            step: the first new step; 0 if none was seen.
            error: why the recovery failed; empty if it did not fail.
        """
        facts: dict[str, str | int | bool] = {
            "muster.job": self.job_id,
            "muster.generation.ended": self.lost,
            "muster.planned": self.planned,
            "muster.reason": self.reason,
        }
        parts: list[TracedSpan] = []
        if self.formed is not None:
            facts["muster.generation.formed"] = self.formed.generation
            facts["muster.world_size"] = len(self.formed.members)
            facts["muster.newcomers"] = len(self.formed.newcomer_ranks)
            parts.append(TracedSpan("forming", self.began_ns, self.formed_ns))
            built_ns = self.established_ns or now_ns
            parts.append(TracedSpan("building", self.formed_ns, built_ns))
            if self.established_ns:
                parts.append(TracedSpan("first step", self.established_ns, now_ns))
        else:
            parts.append(TracedSpan("forming", self.began_ns, now_ns))
        if step:
            facts["muster.step"] = step
        return [TracedSpan("muster.recovery", self.began_ns, now_ns, facts, error), *parts]


class RecoveryTraces:
    """Follows jobs, and exports the spans of each recovery once it has ended.

    Args:
        export: called with a recovery's spans, that of the whole recovery first; returns immediately.
        later: calls a function after a number of seconds, like an event loop's ``call_later``.
        time_ns: returns the time in nanoseconds since 1970.
    """

    def __init__(
        self,
        export: Callable[[list[TracedSpan]], None],
        later: Callable[[float, Callable[[], None]], object],
        time_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._export, self._later, self._time_ns = export, later, time_ns
        self._open: dict[str, Recovery] = {}
        self._generations: dict[str, int] = {}

    def follow(self, driver: JobDriver) -> None:
        """Follows a job from now on."""
        if driver.formed is not None:  # The job was recovered from the journal.
            self._generations[driver.job_id] = driver.formed.generation
        driver.watch_records(lambda record: self._on_record(driver, record))

    def _on_record(self, driver: JobDriver, record: records.Record) -> None:
        if isinstance(record, records.GenerationEnded):
            self._begin(driver, record.reason, planned=False)
            recovery = self._open.get(driver.job_id)
            if recovery is not None:  # The next generation has ended during the recovery as well.
                recovery.formed, recovery.formed_ns, recovery.established_ns = None, 0, 0
        elif isinstance(record, records.GenerationFormed):
            self._begin(driver, record.reason, planned=record.switch_after_step >= 0)
            self._generations[driver.job_id] = record.generation
            recovery = self._open.get(driver.job_id)
            if recovery is not None:
                recovery.formed, recovery.formed_ns = record, self._time_ns()
                recovery.established_ns = 0
        elif isinstance(record, records.GroupEstablished):
            recovery = self._open.get(driver.job_id)
            if recovery is not None:
                recovery.established_ns = self._time_ns()
                # Heartbeats from the old generation may have arrived since then, up to a planned boundary.
                boundary = 0 if recovery.formed is None else recovery.formed.switch_after_step + 1
                recovery.steps = max(recovery.steps, boundary, _steps_finished(driver))
                self._look(driver, recovery)
        elif isinstance(record, records.JobEnded):
            self._end(driver.job_id, error="" if record.ok else record.reason)
            self._generations.pop(driver.job_id, None)

    def _begin(self, driver: JobDriver, reason: str, *, planned: bool) -> None:
        """Begins a recovery, unless one is in progress or no generation was formed before."""
        lost = self._generations.get(driver.job_id)
        if lost is not None and driver.job_id not in self._open:
            steps = _steps_finished(driver)
            recovery = Recovery(driver.job_id, lost, reason, self._time_ns(), planned, steps)
            self._open[driver.job_id] = recovery

    def _look(self, driver: JobDriver, recovery: Recovery) -> None:
        """Ends the recovery after a new step or after too long a time; otherwise looks again later."""
        if self._open.get(driver.job_id) is not recovery or not recovery.established_ns:
            return
        step = _steps_finished(driver)
        if step > recovery.steps:
            self._end(driver.job_id, step=step)
        elif self._time_ns() - recovery.established_ns > LONGEST_S * 1e9:
            self._end(driver.job_id, error="no new step was seen")
        else:
            self._later(LOOK_S, lambda: self._look(driver, recovery))

    def _end(self, job_id: str, *, step: int = 0, error: str = "") -> None:
        recovery = self._open.pop(job_id, None)
        if recovery is not None:
            self._export(recovery.spans(self._time_ns(), step=step, error=error))


class OtlpExporter:
    """Sends spans to a collector by OTLP over HTTP, in a thread of the OpenTelemetry SDK.

    Raises:
        ImportError: the packages of the extra ``otel`` are not installed.
    """

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        own = Resource({"service.name": "muster-scheduler"})
        resource = own.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("muster.scheduler")

    def export(self, spans: list[TracedSpan]) -> None:
        """Queues spans for sending. The first span is the parent of the others."""
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.status import Status, StatusCode

        context: Any = None
        for each in spans:
            span = self._tracer.start_span(
                each.name, context, attributes=dict(each.attributes), start_time=each.began_ns
            )
            if each.error:
                span.set_status(Status(StatusCode.ERROR, each.error))
            context = context or set_span_in_context(span)
            span.end(each.ended_ns)

    def close(self) -> None:
        """Sends the remaining spans, for at most :data:`CLOSE_S` seconds."""
        start_thread(self._provider.shutdown, name="scheduler-traces").join(CLOSE_S)


def exporter_of(env: Mapping[str, str]) -> OtlpExporter | None:
    """Makes the exporter that the environment asks for.

    Returns:
        The exporter. None if no endpoint is set, or if packages are missing or a setting is wrong; the log
        then says so.
    """
    asked = next((name for name in ENDPOINTS if env.get(name)), "")
    if not asked:
        return None
    try:
        return OtlpExporter()
    except ImportError:
        LOG.warning("%s is set, but recoveries are not traced. %s.", asked, how_to_install("otel"))
    except Exception as error:  # Jobs must be served even if a setting for tracing is wrong.
        LOG.warning("Recoveries are not traced: %s. See to the OTEL_ variables.", one_line(repr(error)))
    return None


def _steps_finished(driver: JobDriver) -> int:
    return max((worker.step for worker in driver.view().workers), default=0)
