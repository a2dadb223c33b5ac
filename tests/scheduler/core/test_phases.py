"""Time-outs, suspensions and groups that are formed again, in what they say and when."""

from __future__ import annotations

from dataclasses import replace

from muster.scheduler.core import events, records
from muster.scheduler.core.machine import Machine
from muster.wire import messages
from tests.scheduler.core.scenes import EARLY, SETTINGS, finish, history, join, suspended, three


def test_a_group_formed_again_late_has_half_of_the_time_and_all_together_twice() -> None:
    """Else a cut or a hang that is found late, before a group has ever stood, ends the job."""
    job = Machine("red", replace(SETTINGS, worker_num=6, worker_min=2, node_timeout_s=1000.0))
    history(job, *(join(number, node_id, 6) for number, node_id in enumerate("abcdef", 1)))
    for session, lost_at in ((6, 29.0), (5, 43.0), (4, 55.0), (3, 59.0)):
        assert not job.step(events.Tick(), lost_at).records
        job.step(events.Heard(session, 1, 0, 0, 0.0), lost_at)
        lost, formed = job.step(events.SessionLost(session, "reset"), lost_at).records
        assert isinstance(lost, records.Removed) and isinstance(formed, records.GenerationFormed)
    [ended] = job.step(events.Tick(), 60.0).records
    assert isinstance(ended, records.JobEnded) and "was not built in time" in ended.reason


def test_a_suspension_leaves_it_to_the_worker_to_say_how_long_it_waits() -> None:
    job = Machine("red", SETTINGS)
    history(job, join(1, "a"), join(2, "b"), events.BuiltReported(1, 1), events.BuiltReported(2, 1))
    decision = job.step(events.SessionLost(2, "reset"), 0.0)
    (suspended,) = (message for _, message in decision.messages if isinstance(message, messages.Suspended))
    assert suspended.wait_s == 30.0
    assert suspended.reason.endswith("1 member left (a), MS_WORKER_MIN is 2.")
    assert decision.reason.endswith("MS_WORKER_MIN is 2; waiting up to 30 s for more.")


def test_a_recovered_job_has_a_reason_at_once() -> None:
    assert Machine.recover("red", SETTINGS, suspended(), 5.0).view(5.0).reason == (
        "Generation 1 is over: rank 1 (node b on host host-b) is lost: its stream ended (reset). "
        "1 member left (a), MS_WORKER_MIN is 2; waiting up to 30 s for more."
    )
    first, both = (
        history(Machine("red", SETTINGS), join(1, "a")),
        history(Machine("red", SETTINGS), join(1, "a"), join(2, "b")),
    )
    assert Machine.recover("red", SETTINGS, first, 5.0).view(5.0).reason == (
        "1 of 2 workers is in: a; missing: 1 worker."
    )
    assert Machine.recover("red", SETTINGS, both, 5.0).view(5.0).reason == (
        "Generation 1 is formed with 2 members: all 2 workers are in."
    )


def test_a_group_formed_because_a_member_finished_early_says_so() -> None:
    job = three(1)
    finish(job, 2)
    job.step(events.PeerSuspected(1, 1, 0, "all_reduce failed in NCCL"), 0.0)
    for session in (1, 3):
        job.step(events.Heard(session, 1, 0, 0, 1.0), 4.0)
    [record] = [
        each for each in job.step(events.Tick(), 5.0).records if isinstance(each, records.GenerationFormed)
    ]
    assert EARLY in record.reason
