"""Jobs of a few workers, in the states that tests of the core begin with."""

from __future__ import annotations

from dataclasses import replace

from muster.scheduler.core import events, records
from muster.scheduler.core.events import Decision
from muster.scheduler.core.machine import Machine
from muster.wire import messages

SETTINGS = events.CoreSettings(2, 0, 0, 30.0, 5.0, 1.0)


def join(session: int, node_id: str, worker_num: int = 2, incarnation: int = 1) -> events.Joined:
    host = messages.Host(f"id-{node_id}", f"host-{node_id}", "10.0.0.1")
    return events.Joined(
        session, messages.Candidate(node_id, incarnation, host, messages.Device(), worker_num, 0, "tcp")
    )


def history(job: Machine, *events: events.Event) -> list[records.Record]:
    return [record for event in events for record in job.step(event, 0.0).records]


def running(settings: events.CoreSettings = SETTINGS) -> tuple[Machine, list[records.Record]]:
    job = Machine("red", settings)
    return job, history(
        job, join(1, "a"), join(2, "b"), events.BuiltReported(1, 1), events.BuiltReported(2, 1)
    )


def loss_after(silent_s: float) -> tuple[Machine, Decision]:
    """A job that runs, whose member b was last heard at 0 and loses its stream after so long."""
    job, _ = running(replace(SETTINGS, worker_min=1))
    return job, job.step(events.SessionLost(2, "reset"), silent_s)


def is_removed(decision: Decision) -> bool:
    return any(isinstance(record, records.Removed) for record in decision.records)


def suspended() -> list[records.Record]:
    """What a job of two that must be two has written down when one of them has died."""
    job, records = running()
    return records + list(job.step(events.SessionLost(2, "reset"), 0.0).records)


ELASTIC = events.CoreSettings(2, 1, 0, 30.0, 5.0, 1.0)


def switching(settings: events.CoreSettings = ELASTIC) -> Machine:
    """A job of member a; b is to arrive after step 7: generation 3 is formed, and a still runs in 2."""
    job = Machine("red", settings)
    history(job, join(1, "a"), join(2, "b"), events.BuiltReported(1, 1), events.BuiltReported(2, 1))
    history(job, events.LeftCleanly(2, 1, False, "gives up"), events.BuiltReported(1, 2))
    history(job, join(3, "b", incarnation=2), events.QuiescedReported(1, 2, 7))
    return job


def formed_by(job: Machine, event: events.Event) -> records.GenerationFormed:
    (record,) = [each for each in job.step(event, 0.0).records if isinstance(each, records.GenerationFormed)]
    return record


def three(worker_min: int, node_timeout_s: float = 5.0) -> Machine:
    """A job of members a, b and c that stands."""
    job = Machine("red", events.CoreSettings(3, worker_min, 0, 30.0, node_timeout_s, 1.0))
    history(job, *[join(number, node, 3) for number, node in enumerate("abc", 1)])
    history(job, *[events.BuiltReported(number, 1) for number in (1, 2, 3)])
    return job


def finish(job: Machine, session: int, now: float = 0.0) -> Decision:
    return job.step(events.LeftCleanly(session, 1, True, ""), now)


EARLY = "rank 1 (node b on host host-b) has finished, while others still wait: it had fewer batches"


def many(number: int, **settings: float) -> Machine:
    """A job of so many workers, which all are in."""
    job = Machine("red", replace(SETTINGS, worker_num=number, worker_min=1, **settings))  # type: ignore[arg-type]
    for session in range(1, number + 1):
        job.step(join(session, f"n{session}", number), 0.0)
    assert job.view(0.0).state == "building"
    return job
