"""For how long a GPU waited for other ranks: what its events tell."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from muster.torch.device_waits import MOST_CAPTURED, DeviceWaits

CPU = torch.device("cpu")


class FakeEvent:
    """An event of a GPU that is as far as the test says."""

    over = True
    at_ms = 0.0
    made: ClassVar[list[FakeEvent]] = []

    def __init__(self, **options: Any) -> None:
        self.recorded_at = -1.0
        FakeEvent.made.append(self)

    def record(self, stream: Any) -> None:
        self.recorded_at = FakeEvent.at_ms

    def query(self) -> bool:
        return FakeEvent.over

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.recorded_at - self.recorded_at


class OldEvent(FakeEvent):
    """As torch had it before 2.8: no graph can record it."""

    def __init__(self, enable_timing: bool = False) -> None:
        super().__init__()


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(FakeEvent, "over", True)
    monkeypatch.setattr(FakeEvent, "at_ms", 0.0)
    monkeypatch.setattr(FakeEvent, "made", [])


def wait(waits: DeviceWaits, milliseconds: float, *, capturing: bool = False) -> None:
    with waits.measuring(capturing=capturing):
        FakeEvent.at_ms += milliseconds


def test_a_wait_is_told_once_and_not_before_it_is_over() -> None:
    waits = DeviceWaits(CPU)
    assert waits.take() is None
    wait(waits, 250.0)
    FakeEvent.over = False
    assert waits.take() is None
    FakeEvent.over = True
    assert waits.take() == 0.25
    assert waits.take() is None


def test_several_waits_of_a_step_add_up_and_one_within_another_counts_once() -> None:
    waits = DeviceWaits(CPU)
    wait(waits, 250.0)
    wait(waits, 125.0)
    with waits.measuring(capturing=False):
        wait(waits, 500.0)
    assert waits.take() == 0.875
    assert waits.take() is None


def test_what_is_not_over_at_the_end_of_a_step_counts_in_the_next_one() -> None:
    waits = DeviceWaits(CPU)
    wait(waits, 250.0)
    FakeEvent.over = False
    assert waits.take() is None
    wait(waits, 125.0)
    FakeEvent.over = True
    assert waits.take() == 0.375


@pytest.mark.parametrize(
    ("is_cuda", "captures", "at_once", "replayed"),
    [(True, False, 0.25, None), (True, True, None, 0.25), (False, False, None, None)],
)
def test_within_a_step_streams_are_measured_and_not_the_host(
    is_cuda: bool,
    captures: bool,
    at_once: float | None,
    replayed: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    waits = DeviceWaits(CPU)
    with waits.within_step(SimpleNamespace(is_cuda=is_cuda)):
        FakeEvent.at_ms += 250.0
    assert waits.take() == at_once
    waits.replayed()
    assert waits.take() == replayed


def test_in_a_graph_each_replay_measures_and_the_capture_does_not() -> None:
    waits = DeviceWaits(CPU)
    wait(waits, 500.0)
    assert waits.take() == 0.5
    wait(waits, 125.0, capturing=True)
    assert waits.take() is None
    waits.replayed()
    assert waits.take() == 0.125


def test_a_replay_measures_all_waits_of_its_step_and_none_of_a_step_captured_before() -> None:
    waits = DeviceWaits(CPU)
    for milliseconds in (125.0, 250.0, 500.0):
        wait(waits, milliseconds, capturing=True)
    waits.replayed()
    assert waits.take() == 0.875
    made = len(FakeEvent.made)
    for milliseconds in (1.0, 2.0):
        wait(waits, milliseconds, capturing=True)
    waits.replayed()
    assert waits.take() == 0.003
    assert len(FakeEvent.made) == made, "events are used again"


def test_of_a_capture_that_broke_off_nothing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def elapsed(self: FakeEvent, later: FakeEvent) -> float:
        if later.recorded_at < 0.0:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return later.recorded_at - self.recorded_at

    monkeypatch.setattr(FakeEvent, "elapsed_time", elapsed)
    waits = DeviceWaits(CPU)
    wait(waits, 125.0, capturing=True)
    for event in FakeEvent.made:
        event.recorded_at = -1.0  # as a capture records none
    wait(waits, 250.0, capturing=True)
    waits.replayed()
    assert waits.take() == 0.25


def test_of_very_many_waits_of_a_step_the_first_ones_are_measured() -> None:
    waits = DeviceWaits(CPU)
    for _ in range(MOST_CAPTURED + 10):
        wait(waits, 1.0, capturing=True)
    waits.replayed()
    assert waits.take() == pytest.approx(MOST_CAPTURED / 1000)


def test_events_that_a_graph_records_outlive_the_next_capture_and_their_model() -> None:
    """A graph that is replayed with an event that was destroyed ends the process."""
    waits = DeviceWaits(CPU)
    wait(waits, 125.0, capturing=True)
    events = [weakref.ref(event) for event in FakeEvent.made]
    wait(waits, 125.0, capturing=True)
    del waits
    FakeEvent.made.clear()
    assert len(events) == 2
    assert all(event() is not None for event in events)


def test_between_the_events_of_two_steps_nothing_is_measured() -> None:
    waits = DeviceWaits(CPU)
    wait(waits, 250.0, capturing=True)
    waits.replayed()
    FakeEvent.at_ms += 50.0
    with waits.measuring(capturing=True):  # as a replay does
        FakeEvent.at_ms += 1.0
        assert waits.take() is None  # begun again, and the end is still the last step's
    assert waits.take() == 0.001


def test_with_a_torch_whose_graphs_record_no_events_eager_steps_alone_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", OldEvent)
    waits = DeviceWaits(CPU)
    wait(waits, 250.0)
    assert waits.take() == 0.25
    wait(waits, 250.0, capturing=True)
    waits.replayed()
    assert waits.take() is None
