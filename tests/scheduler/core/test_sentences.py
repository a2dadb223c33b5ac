"""What the state of a job is put down to, and what is said of a standstill."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muster.scheduler.core import events
from muster.scheduler.core.machine import Machine
from tests.scheduler.core.scenes import EARLY, SETTINGS, finish, history, join, running, three

STANDS = "Generation 1 stands with 2 members."


@pytest.mark.parametrize(
    "event",
    [
        join(3, "c"),
        join(3, "c", 7),
        join(3, "a", incarnation=9),
        events.DrainRequested("nobody", "maintenance"),
    ],
)
def test_what_is_refused_is_said_but_is_not_the_reason_of_a_running_job(event: events.Event) -> None:
    job, _ = running()
    decision = job.step(event, 1.0)
    assert decision.reason and decision.reason != STANDS
    assert job.view(1.0).reason == STANDS


def test_what_is_refused_is_not_the_reason_of_a_job_that_forms_stalls_or_waits() -> None:
    job = Machine("red", SETTINGS)
    history(job, join(1, "a"), join(2, "b", 7))
    assert job.view(0.0).reason == "1 of 2 workers is in: a; missing: 1 worker."
    job, _ = running(replace(SETTINGS, node_timeout_s=100.0))
    job.step(events.Heard(1, 1, 4, 5, 1.0, ()), 0.0)
    job.step(events.Tick(), 60.0)
    stalled = job.view(60.0).reason
    assert stalled and stalled != STANDS
    job.step(join(3, "c"), 61.0)
    assert job.view(61.0).reason == stalled
    job.step(events.Heard(1, 1, 4, 5, 1.0, ()), 62.0)
    job.step(events.SessionLost(1, "killed"), 62.0)
    suspended = job.view(62.0).reason
    job.step(join(4, "c", 7), 63.0)
    assert job.view(63.0).reason == suspended
    assert "Generation 1 is over" in suspended


def test_a_running_job_says_that_it_stands_whoever_comes_goes_or_restarts() -> None:
    job, records = running(replace(SETTINGS, spares=1))
    spare = join(3, "s")
    job.step(spare.replaced(candidate=spare.candidate.replaced(spare=True)), 1.0)
    assert job.view(1.0).reason == STANDS
    job.step(events.SessionLost(3, "killed"), 1.0)
    assert job.view(1.0).reason == STANDS
    assert Machine.recover("red", SETTINGS, records, 1.0).view(1.0).reason == STANDS


def test_a_stall_report_names_who_has_finished() -> None:
    job = three(1)
    for session in (1, 3):
        job.step(events.Heard(session, 1, 4, 5, 1.0), 0.0)
    finish(job, 2)
    for session in (1, 3):
        job.step(events.Heard(session, 1, 4, 5, 1.0), 59.0)
    assert EARLY in job.step(events.Tick(), 61.0).reason
