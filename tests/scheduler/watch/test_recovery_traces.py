"""Recoveries as traces: their spans as a real driver's records come, and what a collector gets by OTLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from muster.scheduler.core import events, records
from muster.scheduler.core.events import Decision
from muster.scheduler.watch import recovery_traces
from muster.scheduler.watch.recovery_traces import RecoveryTraces, TracedSpan, exporter_of
from tests.scheduler.fakes import candidate, placed
from tests.scheduler.jobs.test_driver import Rig
from tests.scheduler.watch.collector import Collector
from tests.waiting import go

Script = list[tuple[int, records.Record | int]]
"""Each is a time in seconds, and a record or the step that workers have come to by then."""

MEMBERS = (placed(0, "node-1"), placed(1, "node-2"))


class Told:
    """A job's records one after the other, at times of the test's, and the recoveries that are told of."""

    def __init__(self) -> None:
        self.found: list[list[TracedSpan]] = []
        self.now_s = 100
        self.step = 0
        self._due: list[Callable[[], None]] = []

    def play(self, script: Script) -> list[list[TracedSpan]]:
        async def test() -> None:
            decisions = iter([[record] for _, record in script if not isinstance(record, int)])
            rig = Rig(lambda event: Decision(tuple(next(decisions))))
            rig.driver.view = lambda: SimpleNamespace(workers=[SimpleNamespace(step=self.step)])  # type: ignore[method-assign,assignment,return-value]
            traces = RecoveryTraces(
                self.found.append, lambda _, call: self._due.append(call), lambda: self.now_s * 10**9
            )
            traces.follow(rig.driver)
            rig.session(1)
            for self.now_s, record in script:
                if isinstance(record, int):
                    self.step = record
                else:
                    await rig.driver.submit(events.Joined(1, candidate()))
                due, self._due = self._due, []
                for call in due:
                    call()
            await rig.close()

        go(test())
        return self.found


def formed(generation: int, reason: str = "rank 1 died", *, after_step: int = -1) -> records.GenerationFormed:
    return records.GenerationFormed(generation, MEMBERS, 0, (1,), reason, switch_after_step=after_step)


BEGUN: Script = [(1, formed(1, "all are in")), (2, records.GroupEstablished(1)), (3, 7)]


def test_a_recovery_has_its_parts_and_says_what_it_was() -> None:
    lost = records.GenerationEnded(1, "rank 1 died")
    script: Script = [
        *BEGUN,
        (10, lost),
        (14, formed(2)),
        (15, records.GroupEstablished(2)),
        (16, 7),
        (18, 8),
    ]
    [[whole, *parts]] = Told().play(script)
    assert (whole.name, whole.began_ns, whole.ended_ns) == ("muster.recovery", 10 * 10**9, 18 * 10**9)
    assert dict(whole.attributes) == {
        "muster.job": "job",
        "muster.generation.ended": 1,
        "muster.generation.formed": 2,
        "muster.planned": False,
        "muster.reason": "rank 1 died",
        "muster.world_size": 2,
        "muster.newcomers": 1,
        "muster.step": 8,
    }
    assert [(each.name, each.began_ns // 10**9, each.ended_ns // 10**9) for each in parts] == [
        ("forming", 10, 14),
        ("building", 14, 15),
        ("first step", 15, 18),
    ]


def test_late_words_of_steps_before_are_no_new_step() -> None:
    script: Script = [*BEGUN, (10, formed(2)), (11, 9), (12, records.GroupEstablished(2)), (13, 9), (14, 10)]
    [[whole, *_]] = Told().play(script)
    assert (whole.attributes["muster.step"], whole.ended_ns // 10**9) == (10, 14)
    drained: Script = [
        *BEGUN,
        (10, formed(2, after_step=9)),
        (12, records.GroupEstablished(2)),
        (13, 10),
        (14, 11),
    ]
    [[whole, *_]] = Told().play(drained)
    assert (whole.attributes["muster.step"], whole.ended_ns // 10**9) == (11, 14)


def test_a_suspension_within_a_recovery_is_time_of_forming() -> None:
    ended = records.GenerationEnded(2, "too few")
    script: Script = [*BEGUN, (10, formed(2)), (11, records.GroupEstablished(2)), (12, ended)]
    [[whole, *parts]] = Told().play([*script, (30, formed(3)), (31, records.GroupEstablished(3)), (32, 8)])
    assert whole.attributes["muster.generation.formed"] == 3
    assert [each.ended_ns // 10**9 for each in parts] == [30, 31, 32]


def test_the_first_generation_is_no_recovery_and_a_drain_is_a_planned_one() -> None:
    assert Told().play(BEGUN) == []
    drained: Script = [*BEGUN, (10, formed(2, after_step=7)), (11, records.GroupEstablished(2)), (12, 9)]
    [[whole, *_]] = Told().play(drained)
    assert whole.attributes["muster.planned"] is True


def test_a_second_loss_within_a_recovery_belongs_to_it() -> None:
    script: Script = [*BEGUN, (10, formed(2)), (11, records.GroupEstablished(2)), (12, formed(3))]
    [[whole, *parts]] = Told().play([*script, (13, records.GroupEstablished(3)), (14, 8)])
    assert (whole.attributes["muster.generation.ended"], whole.attributes["muster.generation.formed"]) == (
        1,
        3,
    )
    assert [each.ended_ns // 10**9 for each in parts] == [12, 13, 14]


@pytest.mark.parametrize(
    ("end", "error"),
    [((20, records.JobEnded(False, "too few came")), "too few came"), ((2000, 7), "no new step was seen")],
)
def test_a_recovery_without_a_new_step_says_so(end: tuple[int, Any], error: str) -> None:
    script: Script = [*BEGUN, (10, formed(2)), (11, records.GroupEstablished(2)), end]
    [[whole, *_]] = Told().play(script)
    assert whole.error == error and "muster.step" not in whole.attributes


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def test_a_collector_gets_a_recovery_as_one_trace(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
    exporter = exporter_of({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.address})
    assert exporter is not None
    whole = TracedSpan("muster.recovery", 10, 50, {"muster.job": "j", "muster.planned": False}, "too few")
    exporter.export([whole, TracedSpan("forming", 10, 20), TracedSpan("building", 20, 50)])
    exporter.close()
    assert collector.services() == {"muster-scheduler"}
    spans = {span.name: span for span in collector.spans()}
    parent = spans["muster.recovery"]
    assert {span.trace_id for span in spans.values()} == {parent.trace_id}
    assert spans["forming"].parent_span_id == spans["building"].parent_span_id == parent.span_id
    assert (parent.start_time_unix_nano, parent.end_time_unix_nano) == (10, 50)
    assert {each.key for each in parent.attributes} == {"muster.job", "muster.planned"}
    assert parent.status.message == "too few"


def test_nothing_is_exported_unless_asked_for() -> None:
    assert exporter_of({}) is None


def test_a_wrong_setting_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "99999")  # more than the queue holds
    assert exporter_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is None
    assert "Recoveries are not traced" in caplog.text


def test_missing_packages_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacks() -> None:
        raise ImportError

    monkeypatch.setattr(recovery_traces, "OtlpExporter", lacks)
    assert exporter_of({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}) is None
    assert "recoveries are not traced" in caplog.text and "[otel]" in caplog.text
