"""Workers that are ahead of the journal are neither sent away nor taken back into the past."""

from __future__ import annotations

import math

import pytest

from muster.scheduler.core import events, records
from muster.scheduler.core.events import Decision
from muster.scheduler.jobs.adoption import AdoptingJob
from muster.wire import messages

SETTINGS = events.CoreSettings(3, 2, 0, 60.0, 5.0, 1.0)


def candidate(node_id: str, incarnation: int = 1, host: str = "") -> messages.Candidate:
    return messages.Candidate(
        node_id=node_id,
        incarnation=incarnation,
        host=messages.Host(host or f"host-{node_id}", node_id, "10.0.0.1", ""),
        device=messages.Device("cpu", 0, "", ""),
        worker_num=3,
        worker_min=2,
        backend="tcp",
    )


A, B, C, D = (candidate(name) for name in "abcd")


def journal(*members: messages.Candidate) -> list[records.Record]:
    placed = tuple(records.Placed(rank, 0, 1, one) for rank, one in enumerate(members))
    return [
        records.JobOpened("job", 3, 2),
        *(records.Admitted(one) for one in members),
        records.GenerationFormed(1, placed, -1, (), "all are in"),
        records.GroupEstablished(1),
    ]


def session_of(who: messages.Candidate) -> events.SessionId:
    return events.SessionId(100 * "abcd".index(who.node_id) + who.incarnation)


def joined(
    who: messages.Candidate, rank: int, *, generation: int = 4, size: int = 3, built: bool = True
) -> events.Joined:
    return events.Joined(session_of(who), who, generation, rank, built=built, step=90, held_world_size=size)


def adopting(*, adopt: bool, records: list[records.Record] | None = None) -> AdoptingJob:
    return AdoptingJob("job", SETTINGS, journal(A, B, C) if records is None else records, 0.0, adopt=adopt)


def kinds(decision: Decision) -> set[str]:
    return {type(message).__name__ for _, message in decision.messages}


def test_without_a_word_workers_that_are_ahead_wait_and_nobody_is_lost() -> None:
    job = adopting(adopt=False)
    for rank, who in enumerate((A, D, C)):
        decision = job.step(joined(who, rank), 1.0)
        assert kinds(decision) == {"Welcome", "Waiting"}
        assert not decision.records
        assert "older than the workers" in decision.reason and "--adopt" in decision.reason
    assert job.deadline() == math.inf and not job.overdue(500.0)
    assert job.step(events.Tick(), 500.0) == Decision()
    assert job.view(500.0).generation == 1


def test_a_generation_whose_members_agree_is_adopted() -> None:
    job = adopting(adopt=True)
    assert kinds(job.step(joined(C, 2), 1.0)) == {"Welcome", "Waiting"}
    assert kinds(job.step(joined(A, 0), 1.0)) == {"Welcome", "Waiting"}
    decision = job.step(joined(D, 1), 1.0)
    assert [type(record).__name__ for record in decision.records[:4]] == [
        "Removed",
        "Admitted",
        "GenerationFormed",
        "GroupEstablished",
    ]
    assert "Generation 4 of 3 members is adopted" in decision.reason
    assigned = {s: one for s, one in decision.messages if isinstance(one, messages.Assignment)}
    assert {s: (one.generation, one.rank) for s, one in assigned.items()} == {
        session_of(A): (4, 0),
        session_of(D): (4, 1),
        session_of(C): (4, 2),
    }
    view = job.view(2.0)
    assert (view.state, view.generation) == ("running", 4)
    again = AdoptingJob("job", SETTINGS, [*journal(A, B, C), *decision.records], 3.0, adopt=False)
    assert again.view(3.0).generation == 4


def test_a_lost_journal_is_made_again_from_members_that_agree() -> None:
    job = adopting(adopt=True, records=[])
    for rank, who in enumerate((A, B)):
        job.step(joined(who, rank), 1.0)
    decision = job.step(joined(C, 2, built=False), 1.0)
    assert isinstance(decision.records[0], records.JobOpened)
    assert not any(isinstance(record, records.GroupEstablished) for record in decision.records)
    assert job.view(2.0).state == "building"


@pytest.mark.parametrize(
    "last",
    [
        joined(D, 0),
        joined(D, 3),
        joined(D, 2, size=4),
        joined(D, 2, generation=3),
        joined(candidate("a", incarnation=7), 2),
    ],
    ids=["a rank twice", "a rank beyond", "another size", "another generation", "a node twice"],
)
def test_members_that_contradict_one_another_are_not_adopted(last: events.Joined) -> None:
    job = adopting(adopt=True)
    for rank, who in enumerate((A, B)):
        job.step(joined(who, rank), 1.0)
    decision = job.step(last, 1.0)
    assert kinds(decision) == {"Welcome", "Waiting"} and not decision.records
    assert job.view(1.0).generation == 1


def test_who_goes_away_is_not_counted() -> None:
    job = adopting(adopt=True)
    job.step(joined(A, 0), 1.0)
    job.step(joined(B, 1), 1.0)
    job.step(events.SessionLost(session_of(A), "reset"), 1.0)
    assert not job.step(joined(C, 2), 1.0).records
    assert job.step(joined(A, 0), 1.0).records


def test_one_liar_cannot_hold_up_a_job_whose_journal_is_in_force() -> None:
    job = adopting(adopt=False)
    assert kinds(job.step(joined(D, 0, generation=900), 1.0)) == {"Welcome", "Waiting"}
    assert kinds(job.step(joined(A, 0, generation=1), 1.0)) == {"Welcome", "Waiting"}
    decision = job.step(joined(B, 1, generation=1), 1.0)
    assert [(s, one.code.name) for s, one in decision.messages if isinstance(one, messages.Refused)] == [
        (session_of(D), "SUPERSEDED")
    ]
    assert {s for s, one in decision.messages if isinstance(one, messages.Assignment)} == {
        session_of(A),
        session_of(B),
    }
    assert job.deadline() != math.inf


def test_who_is_held_back_may_leave_and_is_not_counted() -> None:
    job = adopting(adopt=True)
    job.step(joined(A, 0), 1.0)
    job.step(joined(B, 1), 1.0)
    answer = job.step(events.LeftCleanly(session_of(A), 4, True, "done"), 1.0)
    assert [(s, type(one)) for s, one in answer.messages] == [(session_of(A), messages.Ended)]
    assert not job.step(joined(C, 2), 1.0).records


def test_a_job_whose_journal_is_in_force_goes_on_as_ever() -> None:
    job = adopting(adopt=False)
    decisions = [job.step(joined(who, rank, generation=1), 1.0) for rank, who in enumerate((A, B, C))]
    assert all("Assignment" in kinds(decision) for decision in decisions)


def word_on(who: messages.Candidate, incarnation: int = 1) -> events.ProcessEnded:
    return events.ProcessEnded(who.node_id, incarnation, "was killed by SIGKILL")


def removed(decision: Decision) -> list[str]:
    return [record.node_id for record in decision.records if isinstance(record, records.Removed)]


def test_who_has_ended_says_its_launcher_is_not_waited_for_after_a_restart() -> None:
    job = adopting(adopt=False)
    job.step(joined(A, 0, generation=1), 1.0)
    decision = job.step(word_on(C), 1.1)
    assert removed(decision) == ["c"]
    assert "is lost: its launcher says that it was killed by SIGKILL" in decision.reason
    assert job.view(1.1).generation == 2
    assert {worker.candidate.node_id for worker in job.view(1.1).workers} == {"a", "b"}


def test_a_word_counts_after_the_last_worker_that_came_back_has_finished() -> None:
    job = adopting(adopt=False)
    job.step(joined(A, 0, generation=1), 1.0)
    job.step(events.LeftCleanly(session_of(A), 1, True, "finished"), 1.0)
    assert removed(job.step(word_on(C), 1.1)) == ["c"]
    assert {worker.candidate.node_id for worker in job.view(1.1).workers} == {"b"}


def test_a_word_on_another_incarnation_or_on_one_that_is_here_expels_nobody() -> None:
    job = adopting(adopt=False)
    job.step(joined(A, 0, generation=1), 1.0)
    for word in (word_on(A), word_on(C, 2), word_on(D)):
        assert job.step(word, 1.1) == Decision()
    assert job.view(1.1).generation == 1


@pytest.mark.parametrize("generation", [0, 4])
def test_while_no_worker_of_the_journals_generation_has_come_no_word_changes_it(generation: int) -> None:
    job = adopting(adopt=False)
    if generation:  # it is ahead of the journal
        job.step(joined(A, 0, generation=generation), 1.0)
    assert job.step(word_on(C), 1.1) == Decision()


def test_while_one_that_is_ahead_waits_no_word_counts() -> None:
    job = adopting(adopt=False)
    job.step(joined(A, 0, generation=1), 1.0)
    job.step(joined(D, 1), 1.0)
    assert job.step(word_on(C), 1.1) == Decision()
    job.step(events.SessionLost(session_of(D), "reset"), 1.2)
    assert removed(job.step(word_on(C), 1.3)) == ["c"]
