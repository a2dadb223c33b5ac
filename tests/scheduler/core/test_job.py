"""What a job answers: unique ids, first losses, steps that losses break, how often workers are heard."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muster.scheduler.core import events, records
from muster.scheduler.core.machine import Machine
from muster.wire import messages
from tests.scheduler.core.scenes import (
    ELASTIC,
    SETTINGS,
    formed_by,
    history,
    join,
    switching,
    three,
)


def test_no_unique_id_is_in_a_record_a_view_or_a_reason() -> None:
    job = Machine("red", SETTINGS)
    decisions = [job.step(event, 0.0) for event in (join(1, "a"), join(2, "b"))]
    decisions.append(job.step(events.UniqueIdsPublished(1, 1, (b"S3CRET",)), 0.0))
    assert any(isinstance(message, messages.UniqueIds) for _, message in decisions[-1].messages)
    assert "S3CRET" not in repr(decisions) + repr(job.view(0.0))
    assert not decisions[-1].records


def test_large_worlds_take_several_unique_ids() -> None:
    job = Machine("red", replace(SETTINGS, worker_num=5, ranks_per_unique_id=2))
    decisions = [job.step(join(number, str(number), 5), 0.0) for number in range(5)]
    assignments = [told for _, told in decisions[-1].messages if isinstance(told, messages.Assignment)]
    assert {assignment.unique_id_count for assignment in assignments} == {3}


def test_a_newcomer_that_goes_before_it_came_breaks_no_step() -> None:
    record = formed_by(switching(), events.LeftCleanly(3, 3, False, "gives up"))
    assert [member.candidate.node_id for member in record.members] == ["a"]
    assert (record.generation, record.switch_after_step) == (4, 7)


def test_a_member_that_is_lost_before_a_switch_breaks_its_step() -> None:
    record = formed_by(switching(), events.SessionLost(1, "reset"))
    assert [member.candidate.node_id for member in record.members] == ["b"]
    assert record.switch_after_step == -1


def leaving() -> Machine:
    """A job of a and b, which is to leave after step 7: generation 2 is formed, and both still run in 1."""
    job = Machine("red", ELASTIC)
    history(job, join(1, "a"), join(2, "b"), events.BuiltReported(1, 1), events.BuiltReported(2, 1))
    history(job, events.DrainRequested("b", "maintenance"))
    history(job, events.QuiescedReported(1, 1, 7), events.QuiescedReported(2, 1, 7))
    return job


def test_who_leaves_and_is_lost_before_the_switch_breaks_its_last_step() -> None:
    assert formed_by(leaving(), events.SessionLost(2, "reset")).switch_after_step == -1


def test_who_left_with_an_earlier_generation_breaks_no_step_when_it_is_lost() -> None:
    """Its goodbye was not heard, say; the others train without it already."""
    job = leaving()
    history(job, events.BuiltReported(1, 2), join(3, "c"), events.QuiescedReported(1, 2, 9))
    [gone] = job.step(events.SessionLost(2, "reset"), 0.0).records
    assert isinstance(gone, records.Removed)
    assert gone.node_id == "b"


def test_who_leaves_breaks_nothing_where_all_have_given_the_step_up() -> None:
    job = leaving()
    assert formed_by(job, events.PeerSuspected(1, 1, 1, "connection reset")).switch_after_step == -1
    [gone] = job.step(events.SessionLost(2, "reset"), 0.0).records
    assert isinstance(gone, records.Removed)


def losses_told(job: Machine, event: events.Event) -> dict[int, messages.FirstLoss | None]:
    """Whom each session hears of as the first loss, with what follows from the event."""
    kinds = (messages.Assignment, messages.Suspended, messages.Ended)
    sent = job.step(event, 0.0).messages
    return {session: message.first_loss for session, message in sent if isinstance(message, kinds)}


@pytest.mark.parametrize("worker_min", [0, 2])
def test_all_hear_who_was_the_first_to_go_and_how(worker_min: int) -> None:
    job = three(worker_min)
    raised = events.LeftCleanly(2, 1, False, "ValueError: no data", exit_code=1)
    first = messages.FirstLoss("b", 1, "rank 1 (node b on host host-b) left: ValueError: no data", 1)
    assert losses_told(job, raised) == {1: first, 2: first, 3: first}
    late = events.LeftCleanly(1, 1, False, "MembershipChanged", consequence=True, exit_code=1)
    assert losses_told(job, late)[1] == first
    assert losses_told(job, events.SessionLost(3, "reset")) == {}


def test_who_goes_because_of_others_is_not_the_first_even_if_it_is_heard_first() -> None:
    job = three(2)
    assert losses_told(job, events.LeftCleanly(1, 1, False, "PeerLostError", consequence=True)) == {
        1: None,
        2: None,
        3: None,
    }
    [first] = set(losses_told(job, events.SessionLost(2, "reset")).values())
    assert first is not None and first.node_id == "b"


def test_a_leave_is_no_loss_and_a_group_that_goes_on_forgets_the_last_one() -> None:
    job = three(1)
    history(job, events.LeaveRequested(1, 1, "SIGTERM"))
    assert set(losses_told(job, events.LeftCleanly(1, 1, False, "asked to leave")).values()) == {None}
    [first] = set(losses_told(job, events.SessionLost(2, "reset")).values())
    assert first is not None and first.node_id == "b"
    generation = job.view(0.0).generation
    history(job, events.BuiltReported(3, generation))
    assert job.view(0.0).state == "running"
    [second] = set(losses_told(job, events.LeftCleanly(3, generation, False, "KeyError: 1")).values())
    assert second is not None and second.node_id == "c"


@pytest.mark.parametrize(
    ("number", "per_s", "node_timeout_s", "member_s", "waiting_s"),
    [
        (2, 1000.0, 30.0, 1.0, 10.0),  # a third of the node timeout while they wait, then once a second
        (20, 10.0, 30.0, 2.0, 10.0),  # all members together so many times a second
        (90, 10.0, 30.0, 6.0, 10.0),  # a fifth of the node timeout at most
        (90, 10.0, 4.0, 1.0, 4.0 / 3),
        (2, 1000.0, 2.0, 1.0, 1.0),
    ],
)
def test_workers_hear_how_often_they_are_to_be_heard(
    number: int, per_s: float, node_timeout_s: float, member_s: float, waiting_s: float
) -> None:
    job = Machine(
        "red", replace(SETTINGS, worker_num=number, node_timeout_s=node_timeout_s, heartbeats_per_s=per_s)
    )
    decision = job.step(join(1, "a", number), 0.0)
    [welcome] = [message for _, message in decision.messages if isinstance(message, messages.Welcome)]
    assert welcome.heartbeat_interval_s == pytest.approx(member_s)
    assert welcome.waiting_interval_s == pytest.approx(waiting_s)
