"""Drains of hosts and nodes, now or at a time of day: who goes, what is written down, what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muster.scheduler.core import events, records
from muster.scheduler.core.drains import MOST_PLANS
from muster.scheduler.core.machine import Machine
from muster.wire import messages
from tests.scheduler.core.scenes import SETTINGS, history, join, running

MIDNIGHT_S = 1_800_000_000.0


def hosted(session: int, node_id: str, host: str, *, spare: bool = False) -> events.Joined:
    made = join(session, node_id, 4)
    where = messages.Host(f"id-{host}", host, f"address-of-{host}")
    return events.Joined(session, made.candidate.replaced(host=where, spare=spare))


def two_hosts(worker_min: int = 1, spares: int = 0) -> tuple[Machine, list[records.Record]]:
    """Four members, two on each of the hosts left and right; and spares on a third."""
    job = Machine("red", replace(SETTINGS, worker_num=4, worker_min=worker_min, spares=spares))
    places = [(1, "0", "left"), (2, "1", "left"), (3, "2", "right"), (4, "3", "right")]
    journaled = history(job, *(hosted(*place) for place in places))
    journaled += history(job, *(events.BuiltReported(session, 1) for session in (1, 2, 3, 4)))
    for each in range(spares):
        journaled += history(job, hosted(5 + each, str(4 + each), "third", spare=True))
    return job, journaled


def asked(*hosts: str, nodes: tuple[str, ...] = (), at_s: float = 0.0) -> events.DrainAsked:
    return events.DrainAsked(nodes, hosts, "new disks", MIDNIGHT_S, at_s and MIDNIGHT_S + at_s)


def leaving(decision: events.Decision) -> list[str]:
    return [each.node_id for each in decision.records if isinstance(each, records.LeavePlanned)]


@pytest.mark.parametrize("name", ["right", "id-right", "address-of-right"])
def test_all_workers_of_a_host_leave_by_one_change(name: str) -> None:
    job, _ = two_hosts()
    decision = job.step(asked(name), 1.0)
    assert leaving(decision) == ["2", "3"]
    quiesces = [session for session, each in decision.messages if isinstance(each, messages.Quiesce)]
    assert sorted(quiesces) == [1, 2, 3, 4] and job.view(1.0).state == "quiescing"
    for session in (1, 2, 3, 4):
        decision = job.step(events.QuiescedReported(session, 1, 7), 1.5)
    (formed,) = (each for each in decision.records if isinstance(each, records.GenerationFormed))
    assert formed.generation == 2 and [member.candidate.node_id for member in formed.members] == ["0", "1"]


def test_a_planned_drain_waits_for_its_time_and_outlives_the_scheduler() -> None:
    job, journaled = two_hosts()
    decision = job.step(asked("right", nodes=("0",), at_s=3600.0), 10.0)
    journaled += decision.records
    assert leaving(decision) == [] and job.view(10.0).state == "running"
    assert decision.reason.startswith("The drain of host right and node 0 is planned: in 1 h 0 min. 3 ranks")
    (plan,) = job.view(10.0).drains
    assert (plan.at_s, plan.hosts, plan.node_ids) == (MIDNIGHT_S + 3600.0, ("right",), ("0",))

    for history_of_it in (journaled, [*folded(journaled)]):
        again = Machine.recover("red", job.job.settings, history_of_it, 5.0)
        assert again.view(5.0).drains == (plan,)
        again.step(events.TimeOfDay(MIDNIGHT_S + 3599.0), 6.0)
        assert leaving(again.step(events.Tick(), 6.5)) == []
        deadline = again.deadline()
        assert deadline is not None and deadline <= 7.0
        assert leaving(again.step(events.Tick(), 7.0)) == ["0", "2", "3"]
        assert again.view(7.0).drains == ()


def folded(journaled: list[records.Record]) -> list[records.Record]:
    """What compaction leaves of it, after a trip through the journal's form."""
    job = Machine.recover("red", replace(SETTINGS, worker_num=4, worker_min=1), journaled, 0.0)
    kept = job.job.ledger.snapshot()
    return [records.decode_record(records.encode_record(kept))]


def test_a_journal_without_planned_drains_is_as_older_versions_read_and_wrote_it() -> None:
    _, journaled = two_hosts()
    kept = Machine.recover("red", replace(SETTINGS, worker_num=4, worker_min=1), journaled, 0.0)
    snapshot = kept.job.ledger.snapshot()
    name, fields = records.encode_record(snapshot)
    assert isinstance(fields, dict) and "drains" not in fields
    assert records.decode_record([name, fields]) == snapshot


def test_a_time_that_passed_while_nobody_served_counts_at_once() -> None:
    job, journaled = two_hosts()
    journaled += job.step(asked("right", at_s=60.0), 10.0).records
    again = Machine.recover("red", job.job.settings, journaled, 5.0)
    assert leaving(again.step(events.Tick(), 5.5)) == []  # it does not know the time yet
    again.step(events.TimeOfDay(MIDNIGHT_S + 500.0), 6.0)
    assert leaving(again.step(events.Tick(), 6.0)) == ["2", "3"]


def test_who_is_there_at_the_time_leaves_and_nobody_may_be() -> None:
    job, _ = two_hosts()
    job.step(asked("right", at_s=60.0), 0.0)
    for session, node_id in ((3, "2"), (4, "3")):
        job.step(events.LeftCleanly(session, 1, False, f"{node_id} gives up"), 1.0)
    decision = job.step(events.Tick(), 60.0)
    assert leaving(decision) == []
    assert "The drain of host right is due, and none of its workers is here." in decision.reason


@pytest.mark.parametrize(
    ("called_off", "left"),
    [
        (events.DrainCalledOff(), ()),
        (events.DrainCalledOff(hosts=("right",)), (((), ("left",)),)),
        (events.DrainCalledOff(("0",), ("left", "right")), ()),
        (events.DrainCalledOff(("9",)), (((), ("left", "right")),)),
    ],
)
def test_a_planned_drain_is_undone_whole_or_in_part(called_off: events.DrainCalledOff, left: object) -> None:
    job, journaled = two_hosts()
    journaled += job.step(asked("left", "right", at_s=60.0), 0.0).records
    decision = job.step(called_off, 1.0)
    assert tuple((plan.node_ids, plan.hosts) for plan in job.view(1.0).drains) == left
    assert ("No such drain is planned." in decision.reason) == (called_off.node_ids == ("9",))
    again = Machine.recover("red", job.job.settings, [*journaled, *decision.records], 5.0)
    assert again.view(5.0).drains == job.view(1.0).drains
    if not left:
        assert leaving(job.step(events.Tick(), 61.0)) == []


def test_what_it_costs_is_said_in_steps_seconds_and_speed() -> None:
    job, _ = two_hosts()
    said = job.weigh_drain((), ("right",))
    assert said.startswith("2 ranks of 4 would go. No step is lost: all finish the one that they are in.")
    assert "How long a change takes is not known" in said
    assert said.endswith("2 ranks train on: about 50 % of the samples a second.")
    job.step(asked("right"), 1.0)
    for session in (1, 2, 3, 4):
        job.step(events.QuiescedReported(session, 1, 7), 2.0)
    for session in (1, 2):
        job.step(events.BuiltReported(session, 2), 3.5)
    assert "The last change took 1.5 s." in job.weigh_drain(("1",), ())


def test_spares_take_the_places_and_too_few_suspend_the_job() -> None:
    job, _ = two_hosts(worker_min=3, spares=1)
    assert "Others take the places: 4 ranks as before." in job.weigh_drain(("3",), ())
    assert job.weigh_drain(("4",), ()) == "1 worker without a rank would go: training does not notice."
    assert job.weigh_drain((), ("left", "right")) == (
        "4 ranks of 4 would go, 1 would be left, and MS_WORKER_MIN is 3: the job would be suspended, its"
        " state saved by one of them, until 2 workers more come."
    )
    assert job.weigh_drain(("7",), ()) == "None of node 7 is here now."


def test_only_so_many_drains_are_planned_at_a_time() -> None:
    job, _ = two_hosts()
    said = [job.step(asked("right", at_s=3600.0 + n), 10.0).reason for n in range(MOST_PLANS + 1)]
    assert len(job.view(10.0).drains) == MOST_PLANS
    assert said[-1] == f"{MOST_PLANS} drains are planned already; cancel one."


def test_a_job_that_has_ended_takes_no_drain() -> None:
    job, _ = running()
    job.step(events.EndRequested("enough"), 0.0)
    assert job.step(asked("host-a", at_s=9.0), 1.0) == events.Decision(reason="Job red has ended.")


def test_a_word_of_an_operator_that_waited_for_the_journal_makes_no_drain_late() -> None:
    job, _ = two_hosts()
    job.step(asked("right", at_s=3.0), 1.0)
    late = events.DrainAsked(("0",), (), "new disks", MIDNIGHT_S + 0.5, MIDNIGHT_S + 5000.0)
    job.step(late, 3.0)  # half a second after the first, and it waited for 1.5 s
    assert leaving(job.step(events.Tick(), 3.9)) == []
    assert leaving(job.step(events.Tick(), 4.0)) == ["2", "3"]
