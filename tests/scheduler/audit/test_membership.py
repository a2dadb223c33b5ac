"""What the audit log says of membership, as a real driver's records come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.scheduler.access import Caller
from muster.scheduler.audit.membership import follow
from muster.scheduler.core import events, records
from muster.scheduler.core.events import Decision
from tests.scheduler.fakes import candidate, placed
from tests.scheduler.jobs.test_driver import Rig
from tests.waiting import go

Told = tuple[str, Mapping[str, Any]]


def told_of(*records: records.Record) -> list[Told]:
    """What is written of records that a driver makes durable."""
    told: list[Told] = []

    async def test() -> None:
        rig = Rig(lambda event: Decision(records))
        session = rig.session(1)
        session.caller = Caller("10.0.0.2:7")
        follow(rig.driver, lambda event, job_id, text, facts: told.append((event, facts)))
        await rig.driver.submit(events.Joined(1, candidate()))
        await rig.close()

    go(test())
    return told


def test_who_is_a_member_is_written_with_the_step_from_which_on() -> None:
    members = (placed(0, "node-1"), placed(1, "node-2"))
    [(event, facts)] = told_of(records.GenerationFormed(4, members, 0, (), "grown", switch_after_step=11))
    assert event == "formed"
    assert (facts["generation"], facts["step"]) == (4, 12)
    assert [(each["rank"], each["node_id"]) for each in facts["members"]] == [(0, "node-1"), (1, "node-2")]
    assert all(each["host"] and each["incarnation"] for each in facts["members"])


def test_an_end_and_a_suspension_close_a_membership() -> None:
    told = told_of(records.GenerationEnded(4, "too few"), records.JobEnded(True, "done"))
    assert [event for event, _ in told] == ["over", "over"]


def test_records_that_change_no_group_are_not_written() -> None:
    assert told_of(records.Admitted(candidate()), records.GroupEstablished(1)) == []
