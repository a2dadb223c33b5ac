"""Whose stacks are asked for and when, and that to ask holds nothing up."""

from __future__ import annotations

from dataclasses import replace

from muster.scheduler.core import evidence
from muster.scheduler.core.events import (
    BuiltReported,
    Bundle,
    CoreSettings,
    Decision,
    Heard,
    Joined,
    PeerLate,
    ProbeAnswered,
    SessionLost,
    StacksRequested,
    StacksTold,
    Tick,
)
from muster.scheduler.core.evidence_state import GATHER_S, INCIDENTS_APART_S
from muster.scheduler.core.machine import Machine
from muster.scheduler.core.probing_state import ROUND_PAUSE_S
from muster.wire import messages
from tests.scheduler.core import scenes

SETTINGS = CoreSettings(3, 1, 0, 1000.0, 500.0, 1.0, stall_timeout_s=1000.0, hang_timeout_s=60.0)


class Trio:
    """A job of members a, b and c, on streams 1 to 3; all but ``old`` answer requests for stacks."""

    def __init__(self, settings: CoreSettings = SETTINGS, old: str = "") -> None:
        self.job = Machine("red", settings)
        self.now = 100.0
        self.decided: list[Decision] = []
        for number, node in enumerate("abc", 1):
            join = scenes.join(number, node, 3)
            self.feed(join.replaced(gives_stacks=node not in old, probe_address=f"{node}:1"))
        for number in (1, 2, 3):
            self.feed(BuiltReported(number, 1))

    def feed(self, event: object) -> Decision:
        decision = self.job.step(event, self.now)  # type: ignore[arg-type]
        self.decided.append(decision)
        return decision

    def name_late(self, *sessions: int) -> Decision:
        """The others wait; a round of probes finds that these do not. Returns what follows from it."""
        self.now += ROUND_PAUSE_S
        asked = self.feed(Tick())  # a hang that is due is asked about again
        if not probes(asked):
            asked = self.feed(PeerLate(next(n for n in (1, 2, 3) if n not in sessions), 1, 12.0))
        (number,) = {probe.round for probe in probes(asked)}
        answers = [
            self.feed(ProbeAnswered(n, number, (), n not in sessions, n not in sessions)) for n in (1, 2, 3)
        ]
        return answers[-1]

    def bundles(self) -> list[Bundle]:
        return [bundle for decision in self.decided for bundle in decision.bundles]


def probes(decision: Decision) -> list[messages.Probe]:
    return [told for _, told in decision.messages if isinstance(told, messages.Probe)]


def wanted(decision: Decision) -> dict[int, messages.StacksWanted]:
    return {to: told for to, told in decision.messages if isinstance(told, messages.StacksWanted)}


def test_a_rank_that_is_named_as_late_is_asked_once_for_each_standstill() -> None:
    trio = Trio()
    ((to, asked),) = wanted(trio.name_late(2)).items()
    assert (to, asked.limit_bytes) == (2, evidence.EACH_BYTES)
    assert not trio.bundles()
    trio.feed(StacksTold(2, asked.request, "in C"))
    (bundle,) = trio.bundles()
    assert "rank 1 (node b on host host-b) does not come to the step" in bundle.sentence.lower()
    assert [(each.candidate.node_id, each.rank, each.stacks) for each in bundle.ranks] == [
        ("a", 0, ""), ("b", 1, "in C"), ("c", 2, ""),
    ]  # fmt: skip
    trio.now += ROUND_PAUSE_S
    assert not wanted(trio.name_late(2)), "it stands where it stood"
    assert len(trio.bundles()) == 1


def test_the_bundle_has_the_last_collectives_of_all_ranks() -> None:
    trio = Trio()
    call = messages.Collective(7, "all_reduce", "world", "float32", 16, False)
    trio.feed(Heard(1, 1, 5, 6, 1.0, recent=(call,)))
    (asked,) = wanted(trio.name_late(2)).values()
    trio.feed(StacksTold(2, asked.request, "in C"))
    first = trio.bundles()[0].ranks[0]
    assert (first.step, first.started_step, first.recent) == (5, 6, (call,))


def test_one_that_does_not_answer_holds_nothing_up_for_longer_than_its_time() -> None:
    trio = Trio()
    trio.name_late(2)
    due = trio.job.deadline()
    assert due is not None and due <= trio.now + GATHER_S
    trio.now += GATHER_S
    trio.feed(Tick())
    (bundle,) = trio.bundles()
    assert "did not answer within 10 s" in bundle.ranks[1].obstacle
    later = trio.job.deadline()
    assert later is None or later > trio.now, "the scheduler would spin"


def test_a_hang_that_times_out_sooner_waits_for_its_evidence_and_no_longer() -> None:
    trio = Trio(replace(SETTINGS, hang_timeout_s=1.0))
    asked = wanted(trio.name_late(2))
    assert "b" in trio.job.job.ledger.claims
    trio.name_late(2)
    assert "b" in trio.job.job.ledger.claims, "it is expelled before its stacks are there"
    trio.feed(StacksTold(2, asked[2].request, "in C"))
    trio.name_late(2)
    assert "b" not in trio.job.job.ledger.claims


def test_what_stands_still_after_training_went_on_is_gathered_of_again_a_minute_later() -> None:
    trio = Trio()
    (asked,) = wanted(trio.name_late(2)).values()
    trio.feed(StacksTold(2, asked.request, "in C"))

    def goes_on(step: int) -> None:
        for session in (1, 2, 3):
            trio.feed(Heard(session, 1, step, step + 1, 1.0))

    goes_on(5)
    assert not wanted(trio.name_late(3)), "a job that stutters would fill the disk"
    goes_on(6)
    trio.now += INCIDENTS_APART_S
    assert set(wanted(trio.name_late(3))) == {3}


def test_at_a_standstill_in_which_nobody_is_late_those_that_are_least_far_are_asked() -> None:
    trio = Trio(replace(SETTINGS, stall_timeout_s=60.0))
    for session, step in ((1, 5), (2, 4), (3, 5)):
        trio.feed(Heard(session, 1, step, step + 1, 1.0))
    trio.now += 61.0
    assert set(wanted(trio.feed(Tick()))) == {2}


def test_who_is_older_or_has_no_stream_is_not_asked_and_that_is_said() -> None:
    trio = Trio(old="b")
    trio.feed(SessionLost(3, "reset", may_return=True))
    trio.now += 400.0  # as of one that pauses: it may come back
    decision = trio.feed(StacksRequested(9))
    assert set(wanted(decision)) == {1}
    trio.feed(StacksTold(1, wanted(decision)[1].request, "here"))
    (bundle,) = trio.bundles()
    told = {each.candidate.node_id: each.stacks or each.obstacle for each in bundle.ranks}
    assert told == {"a": "here", "b": evidence.TOO_OLD, "c": evidence.NO_STREAM}


def test_an_operator_gets_what_was_asked_for_under_the_ticket() -> None:
    trio = Trio()
    asked = wanted(trio.feed(StacksRequested(9, "c")))
    assert set(asked) == {3}
    trio.feed(StacksTold(1, asked[3].request, "not asked"))
    trio.feed(StacksTold(3, asked[3].request + 1, "of another request"))
    assert not trio.bundles()
    trio.feed(StacksTold(3, asked[3].request, "there"))
    (bundle,) = trio.bundles()
    assert bundle.ticket == 9
    assert [(each.rank, each.stacks) for each in bundle.ranks] == [(2, "there")]


def test_answers_of_a_large_job_are_the_shorter_so_that_all_fit() -> None:
    size = 1000
    job = Machine("red", CoreSettings(size, 1, 0, 1000.0, 500.0, 1.0))
    for number in range(1, size + 1):
        joined: Joined = scenes.join(number, f"n{number}", size)
        job.step(joined.replaced(gives_stacks=True), 0.0)
    asked = wanted(job.step(StacksRequested(1), 1.0))
    assert len(asked) == size
    assert sum(each.limit_bytes for each in asked.values()) <= evidence.ALL_BYTES
