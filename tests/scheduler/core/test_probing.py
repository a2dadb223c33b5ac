"""Rounds of probes: who is asked, what follows from the answers, who comes back and when."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from muster.scheduler.core import events, probing
from muster.scheduler.core.events import Decision
from muster.scheduler.core.machine import Machine
from muster.scheduler.core.probing import Accusation, Party, leaving
from muster.scheduler.core.probing_state import ROUND_PAUSE_S, ROUND_S
from muster.wire import messages

SETTINGS = events.CoreSettings(0, 0, 0, 1000.0, 500.0, 1.0, stall_timeout_s=1000.0, hang_timeout_s=60.0)


class Hosts:
    """A job of workers ``a0 a1 b0 ...`` on hosts a, b, ...; nobody dies, time moves by hand."""

    def __init__(self, *names: str, worker_min: int = 1, spare: str = "") -> None:
        settings = replace(SETTINGS, worker_num=len(names), worker_min=worker_min, spares=len(spare) and 1)
        self.job = Machine("red", settings)
        self.now = 100.0
        self.sessions: dict[str, int] = {}
        self.incarnation = 1
        self.last = Decision()
        self.said: list[str] = []
        for name in names:
            self.join(name)
        if spare:
            self.join(spare, spare=True)
        self.stand()

    def feed(self, event: events.Event) -> Decision:
        self.last = self.job.step(event, self.now)
        self.said.append(self.last.reason)
        return self.last

    def join(self, name: str, *, spare: bool = False, held_rank: int = -1, late: bool = False) -> Decision:
        session = 0 if late else len(self.said) + 1
        if not late:
            self.sessions[name] = session
        host = messages.Host(name[0], f"host-{name[0]}", "")
        size = self.job.job.settings.worker_num
        candidate = messages.Candidate(
            name, self.incarnation, host, messages.Device(), size, 0, "tcp", spare=spare
        )
        held = (self.generation if held_rank >= 0 else 0, held_rank, held_rank >= 0)
        return self.feed(events.Joined(session, candidate, *held, probe_address=f"{name}:1"))

    def stand(self) -> None:
        for name in self.ranks():
            self.feed(events.BuiltReported(self.sessions[name], self.generation))
        assert self.job.view(self.now).state == "running"

    @property
    def generation(self) -> int:
        return self.job.view(self.now).generation

    def ranks(self) -> list[str]:
        workers = self.job.view(self.now).workers
        return [w.candidate.node_id for w in sorted(workers, key=lambda w: w.rank) if w.rank >= 0]

    def late(self, name: str) -> dict[str, list[str]]:
        """A worker says that its collective is late; returns who is to probe whom."""
        self.now += ROUND_PAUSE_S
        self.feed(events.PeerLate(self.sessions[name], self.generation, 12.0))
        return self.asked()

    def asked(self) -> dict[str, list[str]]:
        names = {session: name for name, session in self.sessions.items()}
        return {
            names[session]: [node_id for node_id, _ in message.targets]
            for session, message in self.last.messages
            if isinstance(message, messages.Probe)
        }

    def number(self) -> int:
        return next(message.round for _, message in self.last.messages if isinstance(message, messages.Probe))

    def answer(
        self, cut: str = "", *, silent: str = "", idle: str = "", busy: str = "", late: bool = True
    ) -> None:
        """All answer; ``cut`` has pairs "a0>b0 ..." that fail; ``idle`` and ``busy`` wait for nobody."""
        failing = [tuple(pair.split(">")) for pair in cut.split()]
        asked, number = self.asked(), self.number()
        for name in [name for name in asked if name not in silent.split()]:
            unreached = tuple((t, "timed out") for t in asked[name] if (name, t) in failing)
            waits = name not in (*idle.split(), *busy.split())
            does = "evaluation" if name in busy.split() else ""
            self.feed(
                events.ProbeAnswered(self.sessions[name], number, unreached, late and waits, waits, does)
            )

    def tick(self, seconds: float) -> Decision:
        self.now += seconds
        return self.feed(events.Tick())

    def refused(self) -> dict[str, messages.Refused]:
        names = {session: name for name, session in self.sessions.items()}
        return {names[s]: told for s, told in self.last.messages if isinstance(told, messages.Refused)}


def test_nobody_is_asked_while_nobody_is_late() -> None:
    hosts = Hosts("a0", "b0")
    for _ in range(100):
        for session in hosts.sessions.values():
            assert not hosts.feed(events.Heard(session, 1, 5, 6, 1.0)).messages
        hosts.tick(1.0)
        assert not hosts.asked()


def test_each_worker_probes_one_of_each_other_host_and_all_addresses_are_tried() -> None:
    hosts = Hosts("a0", "a1", "b0", "b1", "c0")
    assert hosts.late("a0") == {
        "a0": ["b0", "c0"], "a1": ["b1", "c0"], "b0": ["a0", "c0"], "b1": ["a1", "c0"], "c0": ["a0", "b0"],
    }  # fmt: skip


def test_a_path_broken_between_two_single_workers_is_found_by_the_second_round() -> None:
    hosts = Hosts("a0", "a1", "b0", "b1")
    broken = "a0>b1 b1>a0"
    assert hosts.late("a0")["a0"] == ["b0"]
    hosts.answer(broken)
    hosts.now += 60.0
    assert set(hosts.late("a0")["a0"]) == {"b0", "b1"}
    hosts.answer(broken)
    assert len(hosts.ranks()) == 3
    assert not {"a0", "b1"} <= set(hosts.ranks())


def test_while_a_group_is_built_all_paths_are_asked_about_at_once() -> None:
    hosts = Hosts("a0", "a1", "b0", "b1")
    hosts.feed(events.SessionLost(hosts.sessions["b0"], "killed"))  # a new generation of those that are left
    assert {name: set(targets) for name, targets in hosts.late("a1").items()} == {
        "a0": {"b1"},
        "a1": {"b1"},
        "b1": {"a0", "a1"},
    }
    hosts.answer("a1>b1 b1>a1")
    assert len(hosts.ranks()) == 2


def test_of_many_hosts_each_is_asked_about_and_of_few_all_their_workers() -> None:
    names = [f"{host}{place}" for host in "abcdefghi" for place in range(8)]
    hosts = Hosts(*names)
    hosts.late("a0")
    hosts.answer()
    seen = set()
    for _ in range(2):
        hosts.now += 200.0
        asked = hosts.late("a0")["a0"]
        assert len(asked) == 8 * 4
        seen |= set(asked)
        hosts.answer()
    assert seen == {name for name in names if name[0] != "a"}


def test_many_late_ones_make_one_round() -> None:
    hosts = Hosts("a0", "b0", "c0")
    assert hosts.late("a0")
    hosts.feed(events.PeerLate(hosts.sessions["b0"], 1, 12.0))
    assert not hosts.asked()


def test_members_of_a_new_generation_do_not_wait_for_the_round_of_the_last() -> None:
    hosts = Hosts("a0", "b0", "c0")
    hosts.late("a0")
    hosts.answer(silent="b0")
    hosts.feed(events.LeftCleanly(hosts.sessions["b0"], 1, False, "gone"))
    assert hosts.ranks() == ["a0", "c0"]
    assert hosts.late("a0") == {"a0": ["c0"], "c0": ["a0"]}


def test_what_was_probed_before_the_group_stood_expels_nobody() -> None:
    hosts = Hosts("a0", "b0", "c0", "d0")
    hosts.feed(events.LeftCleanly(hosts.sessions["d0"], 1, False, "gone"))
    hosts.late("a0")
    number = hosts.number()
    hosts.stand()  # the path works again
    for name, other in (("a0", "b0"), ("b0", "a0"), ("c0", "")):
        unreached = ((other, "timed out"),) if other else ()
        hosts.feed(events.ProbeAnswered(hosts.sessions[name], number, unreached, True, True))
    assert hosts.ranks() == ["a0", "b0", "c0"]


def test_a_suspicion_begins_a_round_at_once() -> None:
    hosts = Hosts("a0", "b0")
    hosts.feed(events.PeerSuspected(hosts.sessions["a0"], 1, 1, "connection reset"))
    assert hosts.asked() == {"a0": ["b0"], "b0": ["a0"]}


def test_a_cut_between_hosts_costs_the_smaller_one_its_place() -> None:
    hosts = Hosts("a0", "a1", "b0", "c0")
    hosts.late("c0")
    hosts.answer("a0>b0 a1>b0 b0>a0")
    assert hosts.ranks() == ["a0", "a1", "c0"]
    told = hosts.refused()["b0"]
    assert told.code is messages.RefusalCode.SUPERSEDED
    assert "was expelled: hosts host-a and host-b cannot reach each other (timed out)" in told.sentence


def test_a_round_in_which_the_scheduler_could_not_decide_for_long_is_asked_again() -> None:
    hosts = Hosts("a0", "a1", "b0", "c0")
    asked, number = hosts.late("a0"), hosts.number()
    hosts.now += ROUND_PAUSE_S
    hosts.feed(events.HeldUp(ROUND_PAUSE_S))
    for name in asked:  # what was true then, and came too late to be written down
        unreached = (("b0", "timed out"),) if name[0] == "a" else ()
        hosts.feed(events.ProbeAnswered(hosts.sessions[name], number, unreached, True, True))
    assert hosts.ranks() == ["a0", "a1", "b0", "c0"]
    hosts.now += ROUND_PAUSE_S
    hosts.feed(events.Tick())
    assert hosts.asked() == asked


def test_one_direction_is_enough() -> None:
    hosts = Hosts("a0", "a1", "b0", "c0")
    hosts.late("c0")
    hosts.answer("a0>b0 a1>b0")
    assert hosts.ranks() == ["a0", "a1", "c0"]


def test_at_least_worker_min_stay_else_nobody_goes_and_it_is_said() -> None:
    hosts = Hosts("a0", "b0", "c0", worker_min=3)
    hosts.late("c0")
    hosts.answer("a0>b0 b0>a0")
    assert hosts.ranks() == ["a0", "b0", "c0"]
    assert "nobody is expelled, because only 2 could go on, and MS_WORKER_MIN is 3" in hosts.last.reason


def test_who_does_not_answer_the_round_is_no_matter_of_reachability() -> None:
    hosts = Hosts("a0", "b0", "c0")
    hosts.late("a0")
    hosts.answer("a0>b0 c0>b0", silent="b0")
    hosts.tick(ROUND_S)
    assert hosts.ranks() == ["a0", "b0", "c0"]


def probed(hosts: Hosts, number: int, name: str, at: float, seconds: float, unreached: str) -> None:
    """One worker has probed from ``at`` for so long; both count from the round's beginning at 100 s."""
    hosts.now = 100.0 + at + seconds
    why = tuple((other, "no answer") for other in unreached.split())
    hosts.feed(events.ProbeAnswered(hosts.sessions[name], number, why, True, True, seconds=seconds))


def test_who_stood_still_while_others_probed_it_is_not_taken_for_cut_off() -> None:
    hosts = Hosts("a0", "b0", "c0")
    hosts.late("a0")
    number = hosts.number()
    for name in ("a0", "c0"):
        probed(hosts, number, name, 0.0, 3.0, "b0")
    probed(hosts, number, "b0", 3.5, 0.1, "")
    assert hosts.ranks() == ["a0", "b0", "c0"]


def test_who_stood_still_first_does_not_accuse_one_that_stood_still_after_it() -> None:
    """The accused answered the round at once; it stood still when the other, itself late, came to probe."""
    hosts = Hosts("a0", "b0", "c0")
    hosts.late("c0")
    number = hosts.number()
    probed(hosts, number, "b0", 0.0, 0.1, "")
    probed(hosts, number, "c0", 0.0, 0.1, "")
    probed(hosts, number, "a0", 1.5, 3.0, "b0")
    assert hosts.ranks() == ["a0", "b0", "c0"]


def test_who_stood_still_right_after_its_answer_is_not_taken_for_cut_off() -> None:
    """It has not been heard since the other began to try."""
    hosts = Hosts("a0", "b0", "c0")
    hosts.late("c0")
    number = hosts.number()
    probed(hosts, number, "b0", 0.0, 0.1, "")
    probed(hosts, number, "c0", 0.0, 0.1, "")
    probed(hosts, number, "a0", 0.3, 3.0, "b0")
    assert hosts.ranks() == ["a0", "b0", "c0"]


def test_who_stood_still_and_is_heard_again_before_the_round_ends_is_not_taken_for_cut_off() -> None:
    """A third answers late, so that the accused goes on again before anything is decided."""
    hosts = Hosts("a0", "b0", "c0")
    hosts.late("c0")
    number = hosts.number()
    probed(hosts, number, "b0", 0.0, 0.1, "")
    probed(hosts, number, "a0", 0.3, 3.0, "b0")
    hosts.now += 1.0
    hosts.feed(events.Heard(hosts.sessions["b0"], 1, 5, 6, 1.0))
    probed(hosts, number, "c0", 5.0, 0.1, "")
    assert hosts.ranks() == ["a0", "b0", "c0"]


def test_two_that_stood_still_one_after_the_other_are_not_apart() -> None:
    hosts = Hosts("a0", "b0", "c0")
    hosts.late("c0")
    number = hosts.number()
    probed(hosts, number, "c0", 0.0, 0.1, "")
    probed(hosts, number, "b0", 0.0, 3.0, "a0")
    probed(hosts, number, "a0", 3.2, 3.0, "b0")
    assert hosts.ranks() == ["a0", "b0", "c0"]


def test_a_failure_that_cannot_be_judged_is_soon_asked_about_again() -> None:
    """Rounds in which all reach each other follow ever more seldom; this one has not shown that."""
    hosts = Hosts("a0", "b0", "c0")
    for _ in range(2):
        assert hosts.late("c0")
        hosts.answer()
    assert not hosts.late("c0")
    assert hosts.late("c0")
    number, at = hosts.number(), hosts.now - 100.0
    probed(hosts, number, "c0", at, 0.1, "")
    probed(hosts, number, "b0", at, 3.0, "a0")
    probed(hosts, number, "a0", at + 3.2, 3.0, "b0")
    assert hosts.ranks() == ["a0", "b0", "c0"]
    assert hosts.late("c0")


def test_after_a_hang_the_next_wait_is_soon_asked_about() -> None:
    """Rounds that only find the same member hanging follow ever more seldom, until it goes on."""
    hosts = Hosts("a0", "b0", "c0")
    for _ in range(3):
        while not hosts.late("c0"):
            pass
        hosts.answer(idle="a0")
    while not hosts.late("c0"):
        pass
    hosts.answer()
    assert hosts.late("b0")


def test_long_probes_count_when_both_began_at_the_same_time() -> None:
    hosts = Hosts("a0", "b0", "c0")
    hosts.late("c0")
    number = hosts.number()
    probed(hosts, number, "c0", 0.0, 0.1, "")
    probed(hosts, number, "b0", 0.3, 8.0, "a0")
    probed(hosts, number, "a0", 0.0, 9.0, "b0")
    assert len(hosts.ranks()) == 2


def test_a_worker_that_alone_of_its_host_reaches_nobody_goes_alone() -> None:
    hosts = Hosts("a0", "a1", "b0", "b1", "c0", "c1")
    hosts.late("c0")
    hosts.answer("a1>b1 a1>c1")
    assert hosts.ranks() == ["a0", "b0", "b1", "c0", "c1"]


def test_a_worker_that_alone_of_its_host_is_not_reached_goes_alone() -> None:
    hosts = Hosts("a0", "a1", "b0", "b1", "c0", "c1")
    hosts.late("c0")
    hosts.answer("a1>b1 c1>b1")
    assert hosts.ranks() == ["a0", "a1", "b0", "c0", "c1"]


def lies(hosts: Hosts, cut: str) -> list[str]:
    """A round in which these pairs fail; returns who goes by it."""
    before = hosts.ranks()
    hosts.late(before[0])
    hosts.answer(cut)
    after = hosts.ranks()
    if after != before:
        hosts.stand()
    return [name for name in before if name not in after]


@pytest.mark.parametrize("lie", ["{victim}>{liar}", "{liar}>{victim}"])
@pytest.mark.parametrize("liar", ["a0", "c0", "f0"])
def test_who_is_broken_with_another_each_round_costs_one_other_at_most(lie: str, liar: str) -> None:
    """It refuses the probes of one, or says that it does not reach it; the next round of another."""
    hosts = Hosts("a0", "b0", "c0", "d0", "e0", "f0")
    gone: list[str] = []
    while liar in hosts.ranks() and len(gone) < 4:
        victim = next(name for name in hosts.ranks() if name != liar)
        gone += lies(hosts, lie.format(victim=victim, liar=liar))
    assert len(gone) <= 2 and gone[-1] == liar


def test_a_liar_among_many_workers_of_its_host_does_not_cost_their_places() -> None:
    """The only worker of another host probes the liar alone; all others of its host reach that one."""
    hosts = Hosts("a0", "a1", "a2", "b0", "c0", "d0")
    assert lies(hosts, "b0>a0") == ["b0"]
    assert lies(hosts, "c0>a0") == ["a0"]
    assert hosts.ranks() == ["a1", "a2", "c0", "d0"]


@pytest.mark.parametrize("lie", ["c0>a0", "a0>c0"])
def test_what_a_spare_reaches_speaks_for_its_host(lie: str) -> None:
    """Beside a liar, or beside whom it lies of, somebody has reached the other host."""
    hosts = Hosts("a0", "a1", "b0", "b1", "c0", spare="c1")
    assert lies(hosts, lie) == ["c0"]
    assert hosts.ranks() == ["a0", "a1", "b0", "b1", "c1"]
    hosts = Hosts("a0", "a1", "b0", "b1", "c0", spare="c1")
    assert lies(hosts, f"{lie} c1>a1 a1>c1") == ["c0"]
    assert hosts.ranks() == ["a0", "a1", "b0", "b1"]


def test_who_lied_goes_at_once_when_it_does_so_again() -> None:
    hosts = Hosts("a0", "b0", "c0", "d0")
    assert [*lies(hosts, "b0>a0"), *lies(hosts, "c0>a0")] == ["b0", "a0"]
    hosts.incarnation = 2
    hosts.join("a0")
    hosts.tick(ROUND_PAUSE_S)
    hosts.answer(late=False)
    for name in ("c0", "d0"):
        hosts.feed(events.QuiescedReported(hosts.sessions[name], hosts.generation, 1))
    hosts.stand()
    assert hosts.ranks() == ["a0", "c0", "d0"]
    assert lies(hosts, "d0>a0") == ["a0"]


def test_a_pair_that_breaks_again_and_again_stays_a_pair() -> None:
    hosts = Hosts("a0", "b0", "c0", "d0", worker_min=4)
    for _ in range(3):
        assert lies(hosts, "a0>b0") == []
    hosts = Hosts("a0", "b0", "c0", "d0")
    assert lies(hosts, "a0>b0 b0>a0") == ["b0"]


def test_after_a_cut_between_sides_nobody_of_the_larger_is_under_suspicion() -> None:
    hosts = Hosts("a0", "b0", "c0", "d0", "e0")
    sides = [(x, y) for x in ("a0", "b0", "c0") for y in ("d0", "e0")]
    assert lies(hosts, " ".join(f"{x}>{y} {y}>{x}" for x, y in sides)) == ["d0", "e0"]
    assert lies(hosts, "a0>b0") == ["b0"]


def test_who_was_broken_with_one_that_was_at_fault_is_not_under_suspicion() -> None:
    """Of several pairs with one in common that one is at fault, not the others."""
    hosts = Hosts("a0", "b0", "c0", "d0", "e0", "f0")
    assert lies(hosts, "c0>a0 a0>c0 c0>b0 b0>c0") == ["c0"]
    assert lies(hosts, "a0>d0") == ["d0"]


def test_who_was_at_fault_towards_several_at_once_goes_with_its_next_pair() -> None:
    hosts = Hosts("a0", "b0", "c0", "d0", "e0")
    assert lies(hosts, "a0>b0 b0>a0 a0>c0 c0>a0") == ["a0"]
    hosts.incarnation = 2
    hosts.join("a0")
    hosts.tick(ROUND_PAUSE_S)
    hosts.answer(late=False)
    for name in ("b0", "c0", "d0", "e0"):
        hosts.feed(events.QuiescedReported(hosts.sessions[name], hosts.generation, 1))
    hosts.stand()
    assert hosts.ranks() == ["a0", "b0", "c0", "d0", "e0"]
    assert lies(hosts, "e0>a0") == ["a0"]


def test_who_is_under_suspicion_stays_where_too_few_could_go_on_without_it() -> None:
    hosts = Hosts("a0", "a1", "b0", "b1", "c0", worker_min=2)
    assert lies(hosts, "a0>b0 a1>b1") == ["b0", "b1"]
    assert lies(hosts, "a0>c0 a1>c0") == ["c0"]
    assert hosts.ranks() == ["a0", "a1"]


def test_who_alone_accuses_many_stays_where_too_few_could_go_on_without_it() -> None:
    hosts = Hosts("a0", "a1", "a2", "b0", "c0", worker_min=3)
    accusations = "a0>b0 a1>b0 a2>b0 a0>c0 a1>c0 a2>c0"
    assert lies(hosts, accusations) == ["b0", "c0"]
    hosts = Hosts("a0", "a1", "a2", "b0", "c0", worker_min=2)
    assert lies(hosts, accusations) == ["a0", "a1", "a2"]


CUT = "a0>b0 b0>a0 a1>b1 b1>a1"
"""Hosts a and b, with two workers each."""


@pytest.mark.parametrize("single", ["c0>a0", "a0>c0"])
def test_sides_of_a_cut_are_compared_without_the_workers_that_they_would_lose(single: str) -> None:
    """Whether a and b stay is decided along with the single pair: without a, c0 has not to go."""
    hosts = Hosts("a0", "a1", "b0", "b1", "c0", worker_min=3)
    assert lies(hosts, f"{CUT} {single}") == ["a0", "a1"]
    hosts = Hosts("a0", "a1", "b0", "b1", "c0")
    assert lies(hosts, f"{CUT} c0>b0") == ["b0", "b1"]


def test_a_worker_whose_id_is_that_of_its_host_is_no_more_than_itself() -> None:
    hosts = Hosts("a", "a1", "a2", "a3", "b0", "b1", "c0", "d0")
    cut = "a>b0 a1>b1 a2>b0 a3>b1 b0>a b1>a1"
    assert lies(hosts, f"{cut} c0>a d0>a") == ["a", "b0", "b1"]


def test_who_is_cut_off_from_one_host_and_from_a_worker_of_another_is_in_no_lone_pair() -> None:
    """The other side of the cut is not under suspicion."""
    hosts = Hosts("a0", "a1", "b0", "b1", "c0", "d0")
    assert lies(hosts, f"{CUT} c0>a0") == ["a0", "a1"]
    assert lies(hosts, "b0>d0 b1>d0 d0>b0") == ["d0"]


def test_who_lied_goes_also_when_others_are_cut_off() -> None:
    hosts = Hosts("a0", "a1", "b0", "b1", "c0", "d0", "e0")
    assert lies(hosts, "c0>a0") == ["c0"]
    assert lies(hosts, "b0>e0 e0>b0 b1>e0 d0>a0") == ["a0", "e0"]
    assert hosts.ranks() == ["a1", "b0", "b1", "d0"]


def test_a_member_that_comes_back_during_the_round_counts_for_its_host() -> None:
    """After the scheduler was restarted a round may begin before all have opened their streams again."""
    hosts = Hosts("a0", "b0", "b1")
    hosts.feed(events.SessionLost(hosts.sessions["b1"], "its host's stream ended", may_return=True))
    assert hosts.late("a0") == {"a0": ["b0"], "b0": ["a0"]}
    asked = hosts.last
    hosts.join("b1", held_rank=2)
    hosts.last = asked
    hosts.answer("a0>b0 b0>a0")
    assert hosts.ranks() == ["b0", "b1"]


def test_of_two_members_nobody_is_expelled() -> None:
    hosts = Hosts("a0", "b0")
    assert lies(hosts, "a0>b0 b0>a0") == []
    assert "of two members neither can be shown to be at fault" in hosts.last.reason


def expelled() -> Hosts:
    hosts = Hosts("a0", "b0", "c0")
    hosts.late("c0")
    hosts.answer("a0>b0 b0>a0")
    assert hosts.ranks() == ["a0", "c0"]
    hosts.stand()
    hosts.incarnation = 2
    return hosts


def test_who_was_expelled_waits_outside_until_probes_succeed_both_ways() -> None:
    hosts = expelled()
    welcome, waiting = (message for _, message in hosts.join("b0").messages)
    assert isinstance(welcome, messages.Welcome) and isinstance(waiting, messages.Waiting)
    assert "b0 on host host-b is taken in when it and the members reach each other" in waiting.sentence
    for cut in ("b0>a0", "a0>b0", "c0>b0", "b0>c0"):
        hosts.tick(ROUND_PAUSE_S)
        assert hosts.asked() == {"a0": ["b0"], "c0": ["b0"], "b0": ["a0", "c0"]}
        hosts.answer(cut, late=False)
        assert "b0" not in [w.candidate.node_id for w in hosts.job.view(hosts.now).workers]
    hosts.tick(ROUND_PAUSE_S)
    hosts.answer(late=False)
    assert "b0 on host host-b has joined" in hosts.last.reason
    assert any(isinstance(message, messages.Quiesce) for _, message in hosts.last.messages)
    hosts.tick(10 * ROUND_PAUSE_S)
    assert not hosts.asked(), "nothing is probed once nobody is outside"


def test_a_host_that_comes_back_during_the_round_is_asked_before_another_is_taken_in() -> None:
    hosts = Hosts("a0", "b0", "c0", "d0")
    hosts.late("a0")
    hosts.answer("a0>b0 b0>a0 b0>c0 b0>d0")
    hosts.feed(events.SessionLost(hosts.sessions["d0"], "killed"))
    hosts.stand()
    hosts.incarnation = 2
    hosts.join("b0")
    hosts.tick(ROUND_PAUSE_S)
    asked, number = hosts.asked(), hosts.number()
    assert asked["b0"] == ["a0", "c0"]
    hosts.join("d0")
    for name in asked:
        hosts.feed(events.ProbeAnswered(hosts.sessions[name], number, (), False, False))
    assert "b0" not in [w.candidate.node_id for w in hosts.job.view(hosts.now).workers]
    hosts.tick(ROUND_PAUSE_S)
    assert hosts.asked()["b0"] == ["a0", "c0", "d0"]
    hosts.answer(late=False)
    assert "b0" in [w.candidate.node_id for w in hosts.job.view(hosts.now).workers]


def test_who_does_not_answer_stays_outside() -> None:
    hosts = expelled()
    hosts.join("b0")
    hosts.tick(ROUND_PAUSE_S)
    hosts.answer(silent="c0", late=False)
    hosts.tick(ROUND_S)
    assert "b0" not in [w.candidate.node_id for w in hosts.job.view(hosts.now).workers]


def test_another_worker_of_an_expelled_host_waits_outside_as_well() -> None:
    hosts = expelled()
    hosts.join("b9")
    assert "is taken in when" in hosts.last.reason


def test_where_the_last_worker_of_a_host_was_expelled_alone_the_next_of_that_host_waits_outside_too() -> None:
    """Another one had reached it, so that the host was not apart; nobody there shows that any more."""
    hosts = Hosts("a0", "a1", "b0", "b1", "c0")
    hosts.late("a0")
    hosts.answer("c0>a0")
    assert hosts.ranks() == ["a0", "a1", "b0", "b1"]
    hosts.stand()
    hosts.join("c1")
    assert "is taken in when" in hosts.last.reason


def test_who_waits_outside_is_told_the_end_of_the_job() -> None:
    hosts = expelled()
    hosts.join("b0")
    outside = hosts.sessions["b0"]
    for name in ("a0", "c0"):
        hosts.feed(events.LeftCleanly(hosts.sessions[name], 2, True, ""))
    assert (outside, messages.Ended(True, "All members have completed the training.")) in hosts.last.messages


def test_who_waits_outside_and_goes_is_forgotten() -> None:
    hosts = expelled()
    hosts.join("b0")
    hosts.feed(events.SessionLost(hosts.sessions["b0"], "gone"))
    hosts.tick(ROUND_PAUSE_S)
    assert not hosts.asked()


def test_a_newer_process_of_a_node_takes_its_place_outside() -> None:
    hosts = expelled()
    hosts.join("b0")
    first = hosts.sessions["b0"]
    hosts.incarnation = 3
    told = [message for session, message in hosts.join("b0").messages if session == first]
    assert [type(message) for message in told] == [messages.Refused]
    hosts.tick(ROUND_PAUSE_S)
    assert hosts.asked() == {"a0": ["b0"], "c0": ["b0"], "b0": ["a0", "c0"]}


def test_of_two_streams_of_one_that_waits_outside_the_newer_one_stays() -> None:
    hosts = expelled()
    hosts.join("b0")
    told = hosts.join("b0", late=True).messages
    assert [(session, type(message)) for session, message in told] == [(0, messages.Refused)]
    hosts.tick(ROUND_PAUSE_S)
    assert hosts.asked() == {"a0": ["b0"], "c0": ["b0"], "b0": ["a0", "c0"]}


def test_who_waits_for_one_that_has_finished_is_told_so() -> None:
    """With NCCL nothing breaks: the rest waits in its collective."""
    hosts = Hosts("a0", "b0", "c0")
    hosts.feed(events.LeftCleanly(hosts.sessions["b0"], 1, True, ""))
    hosts.late("a0")
    hosts.answer(idle="c0")
    assert "finished" not in hosts.last.reason, "rank 2 may still come, and be the last"
    hosts.tick(ROUND_PAUSE_S)
    hosts.late("a0")
    hosts.answer()
    said = "Rank 1 (node b0 on host host-b) has finished, while others still wait: it had fewer batches"
    assert said in hosts.last.reason
    told = {s for s, message in hosts.last.messages if isinstance(message, messages.Waiting)}
    assert told == {hosts.sessions["a0"], hosts.sessions["c0"]}


def test_a_round_that_nobody_answered_is_soon_followed_by_another() -> None:
    """It has shown nothing: the members are not taken to reach each other."""
    hosts = Hosts("a0", "b0")
    for _ in range(3):
        assert hosts.late("a0")
        hosts.tick(ROUND_S)


def test_a_rank_that_does_not_come_is_named_at_once_and_expelled_in_the_end() -> None:
    hosts = Hosts("a0", "b0", "c0")
    hosts.late("a0")
    hosts.answer(idle="b0")
    assert hosts.last.reason.startswith(
        "Rank 1 (node b0 on host host-b) can be reached and does not come to the step for which 2 members"
    )
    assert hosts.ranks() == ["a0", "b0", "c0"]
    due = hosts.job.deadline()
    assert due == hosts.now + 60.0
    hosts.tick(59.0)
    assert not hosts.asked()
    hosts.tick(1.0)
    hosts.answer(idle="b0")
    assert hosts.ranks() == ["a0", "c0"]
    assert (
        "has not come to the step for which 2 members wait in 60 s (MS_HANG_TIMEOUT)"
        in hosts.refused()["b0"].sentence
    )


@pytest.mark.parametrize("how", ["moved", "busy", "came", "nobody is late"])
def test_who_is_slow_or_busy_is_not_expelled(how: str) -> None:
    hosts = Hosts("a0", "b0", "c0")
    hosts.late("a0")
    hosts.answer(idle="b0")
    if how == "moved":
        hosts.feed(events.Heard(hosts.sessions["b0"], 1, 7, 8, 1.0))
    hosts.tick(60.0)
    hosts.answer(
        busy="b0" if how == "busy" else "", idle="b0" if how == "moved" else "", late=how != "nobody is late"
    )
    assert hosts.ranks() == ["a0", "b0", "c0"]
    hosts.tick(30.0)
    assert hosts.ranks() == ["a0", "b0", "c0"]


def test_who_has_issued_as_much_as_those_that_wait_may_wait_for_its_device_and_is_not_named() -> None:
    hosts = Hosts("a0", "b0", "c0")
    for name, sequence in (("a0", 7), ("b0", 7), ("c0", 6)):
        last = messages.Collective(sequence, "all_reduce", "world", "float32", 4, False)
        hosts.feed(events.Heard(hosts.sessions[name], 1, 5, 6, 1.0, (last,), 1))
    hosts.late("a0")
    number = hosts.number()
    for name, waits in (("a0", True), ("b0", False), ("c0", False)):
        hosts.feed(events.ProbeAnswered(hosts.sessions[name], number, (), late=True, waits=waits))
    assert "Rank 2 (node c0 on host host-c) can be reached" in hosts.last.reason


def test_a_busy_rank_is_said_to_be_busy() -> None:
    hosts = Hosts("a0", "b0")
    hosts.late("a0")
    hosts.answer(busy="b0")
    assert "rank 1 (node b0 on host host-b) is busy alone: evaluation" in " ".join(hosts.said).replace(
        "Rank", "rank"
    )


def test_a_hang_without_which_too_few_are_left_is_only_named() -> None:
    hosts = Hosts("a0", "b0", worker_min=2)
    hosts.late("a0")
    hosts.answer(idle="b0")
    hosts.tick(60.0)
    hosts.answer(idle="b0")
    assert hosts.ranks() == ["a0", "b0"]
    said = " ".join(hosts.said)
    assert said.count("nobody is expelled, because only 1 could go on, and MS_WORKER_MIN is 2") == 1
    assert "expelled after" not in said, "a promise that MS_WORKER_MIN forbids"
    deadline = hosts.job.deadline()
    assert deadline is not None and deadline > hosts.now, "the scheduler would spin"


def test_members_hear_for_whom_they_wait_and_that_it_is_over() -> None:
    hosts = Hosts("a0", "b0", "c0")
    hosts.late("a0")
    hosts.answer(idle="b0")
    waiting = {s: message for s, message in hosts.last.messages if isinstance(message, messages.Waiting)}
    assert set(waiting) == set(hosts.sessions.values())  # a launcher asks any of its workers
    sentence = waiting[hosts.sessions["a0"]].sentence
    assert sentence.startswith("Rank 1 (node b0 on host host-b) can be reached and does not come to the step")
    assert "expelled after 60 s (MS_HANG_TIMEOUT), unless it says session.busy()" in sentence
    assert not hosts.feed(events.Heard(hosts.sessions["a0"], 1, 5, 6, 1.0)).messages  # it is not the one
    moved = hosts.feed(events.Heard(hosts.sessions["b0"], 1, 7, 8, 1.0)).messages
    told = {(one.sentence, one.present, one.needed) for _, one in moved if isinstance(one, messages.Waiting)}
    assert told == {("Training goes on at step 7.", 3, 3)}


def test_a_standstill_is_said_again_ever_more_rarely() -> None:
    hosts = Hosts("a0", "b0")
    for session in hosts.sessions.values():
        hosts.feed(events.Heard(session, 1, 5, 6, 1.0))
    began, told = hosts.now, {}
    while hosts.now < began + 10_000:
        for session in hosts.sessions.values():
            hosts.feed(events.Heard(session, 1, 5, 6, 1.0))
        if "No progress for" in hosts.tick(100.0).reason:
            receivers = [s for s, message in hosts.last.messages if isinstance(message, messages.Waiting)]
            told[hosts.now - began] = len(receivers)
    assert told == {1000: 2, 2000: 2, 4000: 2, 8000: 2}


@pytest.mark.parametrize(("rank", "peer"), [(0, "its peers"), (1, "rank 1 (node b0 on host host-b)")])
def test_nobody_is_said_to_wait_for_himself(rank: int, peer: str) -> None:
    hosts = Hosts("a0", "b0")
    said = hosts.feed(events.PeerSuspected(hosts.sessions["a0"], 1, rank, "nothing came")).reason
    assert f"Rank 0 (node a0 on host host-a) could not go on with {peer}: nothing came." in said


def test_one_that_holds_the_state_is_told_to_save_when_the_job_cannot_go_on() -> None:
    hosts = Hosts("a0", "b0", "c0", worker_min=3)
    hosts.feed(events.SessionLost(hosts.sessions["a0"], "gone"))
    told = {s: message.save for s, message in hosts.last.messages if isinstance(message, messages.Suspended)}
    assert told == {hosts.sessions["b0"]: True, hosts.sessions["c0"]: False}


# ---------------------------------------------------------------- who stays


def parties(**workers: int) -> dict[str, Party]:
    """Hosts by name with so many workers; all hold the state, ranks go up from the first."""
    return {name: Party(count, True, 10 * number) for number, (name, count) in enumerate(workers.items())}


def both_ways(*pairs: str) -> set[Accusation]:
    """``"ab"``: a and b accuse each other."""
    return {ends for pair in pairs for ends in ((pair[0], pair[1]), (pair[1], pair[0]))}


@pytest.mark.parametrize(
    ("hosts", "accusations", "out"),
    [
        (parties(a=1, b=1, c=1), set(), ""),
        # Of two that cannot reach each other the one with fewer workers goes, else that of higher rank.
        (parties(a=1, b=2, c=1), both_ways("ab"), "a"),
        (parties(a=1, b=1, c=1), both_ways("ab"), "b"),
        # A host that nobody reaches goes, wherever it stands.
        (parties(a=1, b=1, c=1, d=1), both_ways("ab", "ac", "ad"), "a"),
        # The largest set, not the first that comes: b is in most broken pairs.
        (parties(a=1, b=1, c=1, d=1), both_ways("ab", "bc", "bd", "cd"), "bd"),
        # One direction is enough, and neither who accuses nor who is silent gains by it.
        (parties(a=1, b=1), {("a", "b")}, "b"),
        (parties(a=1, b=1), {("b", "a")}, "b"),
        # One that alone accuses many goes, however many workers it has.
        (parties(a=8, b=1, c=1), {("a", "b"), ("a", "c")}, "a"),
        # Not if they accuse it as well: then it is a cut between equals, and the most workers stay.
        (parties(a=8, b=1, c=1), both_ways("ab", "ac"), "bc"),
        (parties(a=8, b=1, c=1), {("a", "b"), ("a", "c"), ("c", "a")}, "bc"),
    ],
)
def test_who_goes(hosts: dict[str, Party], accusations: set[Accusation], out: str) -> None:
    assert leaving(hosts, accusations) == set(out)


def test_the_training_state_stays() -> None:
    hosts = {"a": Party(1, True, 0), "b": Party(3, False, 1), "c": Party(3, False, 4)}
    assert leaving(hosts, both_ways("ab", "ac")) == {"b", "c"}
    assert leaving(hosts, {("a", "b"), ("a", "c")}) == {"b", "c"}


def test_the_training_state_stays_among_many_hosts() -> None:
    names = [f"h{n}" for n in range(20)]
    hosts = {name: Party(1, name == "h7", n) for n, name in enumerate(names)}
    cut = {(a, b) for a in names for b in names if a != b and "h7" in (a, b)}
    assert "h7" not in leaving(hosts, cut)


def test_above_sixteen_hosts_the_one_with_the_most_broken_pairs_goes_first() -> None:
    hosts = {f"h{n}": Party(1, True, n) for n in range(40)}
    stars = {("h3", f"h{n}") for n in range(10, 20)} | {("h4", f"h{n}") for n in range(20, 30)}
    back = {(b, a) for a, b in stars}
    assert leaving(hosts, stars | back) == {"h3", "h4"}


def test_the_exact_answer_is_that_of_trying_all_sets() -> None:
    rng = random.Random(5)
    for _ in range(300):
        names = "abcdefg"[: rng.randint(2, 7)]
        hosts = {name: Party(rng.randint(1, 3), True, n) for n, name in enumerate(names)}
        broken = [pair for pair in itertools.combinations(names, 2) if rng.random() < 0.4]
        accusations = both_ways(*("".join(pair) for pair in broken))
        stay = set(names) - leaving(hosts, accusations)
        assert not any(set(pair) <= stay for pair in broken)
        sets = (set(some) for n in range(len(names) + 1) for some in itertools.combinations(names, n))
        whole = [each for each in sets if not any(set(pair) <= each for pair in broken)]
        most = max(sum(hosts[name].workers for name in each) for each in whole)
        assert sum(hosts[name].workers for name in stay) == most


def test_sixteen_hosts_that_all_hate_each_other_are_decided_soon() -> None:
    names = [f"h{n}" for n in range(probing.EXACT_PARTIES)]
    hosts = {name: Party(1, True, n) for n, name in enumerate(names)}
    assert leaving(hosts, set(itertools.permutations(names, 2))) == set(names[1:])
