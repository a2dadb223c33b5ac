"""A job's machine as a whole: recovery and its refusals, deadlines, losses that come together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muster.scheduler.core import events, records
from muster.scheduler.core.machine import Machine, RecoveryError
from muster.wire import messages
from muster.wire.rank_table import RankTable, RankTableEntry
from tests.scheduler.core.scenes import SETTINGS, history, join, suspended


def test_records_of_another_job_are_refused() -> None:
    records = history(Machine("red", SETTINGS), join(1, "a"))
    with pytest.raises(RecoveryError, match="those of job red, not of job blue"):
        Machine.recover("blue", SETTINGS, records, 0.0)


def test_records_of_another_size_are_refused_naming_both() -> None:
    records = history(Machine("red", SETTINGS), join(1, "a"))
    with pytest.raises(RecoveryError, match="MS_WORKER_NUM=2, the scheduler has 3"):
        Machine.recover("red", replace(SETTINGS, worker_num=3), records, 0.0)
    Machine.recover("red", replace(SETTINGS, worker_num=0), records, 0.0)


def test_records_that_are_no_history_are_refused() -> None:
    with pytest.raises(RecoveryError, match="contradict"):
        Machine.recover("red", SETTINGS, [records.Removed("nobody", 1, "left")], 0.0)
    journaled = history(Machine("red", SETTINGS), join(1, "a"))
    with pytest.raises(RecoveryError, match="begin with its opening"):
        Machine.recover("red", SETTINGS, journaled[1:], 0.0)


def test_nothing_recovered_is_a_new_job() -> None:
    job = Machine.recover("red", SETTINGS, [], 3.0)
    assert job.view(3.0).state == "forming"
    assert job.deadline() == 13.0


def test_an_ended_job_stays_ended() -> None:
    job = Machine("red", replace(SETTINGS, worker_num=1))
    records = history(job, join(1, "a", 1), events.BuiltReported(1, 1), events.LeftCleanly(1, 1, True, ""))
    assert job.outcome is not None and job.outcome.ok
    again = Machine.recover("red", replace(SETTINGS, worker_num=1), records, 5.0)
    assert again.outcome == job.outcome
    assert again.deadline() is None


def test_a_rank_table_of_another_size_than_worker_num_is_refused() -> None:
    table = RankTable((RankTableEntry(0, "a", 0),))
    with pytest.raises(ValueError, match="MS_WORKER_NUM is 2, but the rank table has 1 entries"):
        Machine("red", replace(SETTINGS, rank_table=table))


def test_the_deadline_is_never_in_the_past_after_a_tick_on_time() -> None:
    job = Machine("red", replace(SETTINGS, spares=1))
    now = 0.0
    for event in (events.Tick(), join(1, "a"), join(2, "b")):
        job.step(event, now)
    for _ in range(20):
        due = job.deadline()
        if due is None:
            break
        assert due >= now
        job.step(events.Tick(), due)
        assert job.deadline() is None or job.deadline() != due
        now = due
    assert job.outcome is not None and not job.outcome.ok


def test_losses_that_come_together_make_one_generation_that_names_them_all() -> None:
    job = Machine("red", replace(SETTINGS, worker_num=4, worker_min=1))
    history(job, *(join(number, str(number), 4) for number in range(4)))
    first = job.step(events.SessionLost(1, "killed"), 1.0, more=True)
    assert [type(record) for record in first.records] == [records.Removed]
    last = job.step(events.SessionLost(2, "killed"), 1.0)
    told = {
        session: message for session, message in last.messages if isinstance(message, messages.Assignment)
    }
    assert sorted(told) == [0, 3]
    assert {message.generation for message in told.values()} == {2}
    assert [len(message.lost) for message in told.values()] == [2, 2]


def test_a_lower_worker_min_at_a_restart_is_journaled_and_frees_a_suspended_job() -> None:
    lower = replace(SETTINGS, worker_min=1)
    journaled = suspended()
    job = Machine.recover("red", lower, journaled, 5.0)
    assert job.deadline() == 0.0  # at once
    decision = job.step(events.Tick(), 5.0)
    assert decision.reason.startswith(
        "MS_WORKER_MIN is 1 from now on; it was 2. Generation 2 is formed with 1"
    )
    assert decision.records[0] == records.JobOpened("red", 2, 1)
    assert job.view(5.0).worker_min == 1
    same = join(3, "b", incarnation=2).candidate.replaced(worker_min=1)
    other = join(4, "b", incarnation=3).candidate.replaced(worker_min=2)
    answers = [job.step(events.Joined(session, each), 6.0) for session, each in ((4, other), (3, same))]
    (refused,) = (message for _, message in answers[0].messages)
    assert isinstance(refused, messages.Refused) and "the job has MS_WORKER_MIN=1" in refused.sentence
    assert any(isinstance(record, records.Admitted) for record in answers[1].records)
    again = Machine.recover("red", lower, [*journaled, *decision.records], 7.0)
    assert again.view(7.0).worker_min == 1
    assert not again.step(events.Tick(), 7.0).records


def test_a_worker_min_that_the_workers_said_stays() -> None:
    settings = replace(SETTINGS, worker_num=0)
    event = join(1, "a", 3)
    said = event.replaced(candidate=event.candidate.replaced(worker_min=2))
    records = history(Machine("red", settings), said)
    assert Machine.recover("red", settings, records, 1.0).view(1.0).worker_min == 2
