"""The checkers. They see what is committed, sent and done, and know nothing of the machine's inside."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NoReturn

from muster.scheduler.core import events as scheduler_events
from muster.scheduler.core import records
from muster.scheduler.core.events import Decision
from muster.scheduler.core.evidence_state import GATHER_S, INCIDENTS_APART_S
from muster.scheduler.core.job import Job, as_sent
from muster.scheduler.core.machine import Machine
from muster.wire import messages
from muster.worker.session import events as worker_events
from tests.simulation.launchers import SAID
from tests.simulation.scenario import (
    HANG_TIMEOUT_S,
    HEARTBEAT_S,
    NODE_TIMEOUT_S,
    TOPO_TIMEOUT_S,
    WAITING_HEARTBEAT_S,
)

if TYPE_CHECKING:
    from muster.wire import messages
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

Process = tuple[str, int]

LATE = "does not come to the step for which"
"""Says who is late."""

TWO_ROUNDS_S = 12.0
"""A round of probes that began just before a cut was over still finds it, in 3 s; the next begins when
somebody is late again, 4 s later, and takes 3 s if others cannot reach each other still."""

PROBES_S = 3.5
"""A round of probes in which somebody does not answer, and its report."""

STARTED_AGAIN_S = 5.0
"""A process that ends is started again within so long, and has joined."""

STOPPED_S = 10.0
"""A member may have been stopped for so long, by SIGSTOP, before its training thread stands still."""


class Violation(AssertionError):  # noqa: N818 - what the simulator looks for
    """A promise was broken."""


class Judge:
    """Follows one world and raises :class:`Violation` as soon as a promise is broken."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.claims: dict[str, int] = {}
        self.admitted: dict[str, set[int]] = {}
        self.retired: set[Process] = set()
        self.since: dict[Process, int] = {}
        self.placed_at: dict[Process, float] = {}
        self.newcomers: set[Process] = set()
        self.leaving: set[Process] = set()
        self.formed: records.GenerationFormed | None = None
        self.history: dict[int, records.GenerationFormed] = {}
        self.established = False
        self.ever_established = False
        self.suspended = False
        self.finished: set[str] = set()
        self.completed: set[Process] = set()
        self.finishing = False
        self.outcome: records.JobEnded | None = None
        self.identity: dict[int, Process] = {}
        self.newest_stream: dict[Process, int] = {}
        self.closed: set[int] = set()
        self.unique_ids: dict[int, tuple[bytes, ...]] = {}
        self.steps_done = 0
        self.step_seen: set[tuple[int, int]] = set()
        self.redone = 0
        self.starts_over = False
        self.went = False
        self.heard_at: dict[Process, float] = {}
        self.ended_at: dict[int, float] = {}
        self.forgiven_at: dict[Process, float] = {}  # the end of its stream
        self.disturbed_at = 0.0
        self.barred: dict[str, float] = {}
        self.lost_to_one: set[str] = set()  # hosts with honest members expelled while one alone was at fault
        self.taught: set[Process] = set()  # they have finished a step of the newest generation
        self.broken_with: dict[str, set[str]] = {}  # of hosts that may be at fault, with which others
        self.remembers_since = 0.0
        self.asked_at = 0.0  # the newest round of probes
        self.came_back_at = -math.inf  # somebody of whom the journal knew
        self.round = 0
        self.asked: set[int] = set()  # the streams of the workers that it has asked
        self.answered: set[int] = set()  # those on which it has been answered, and that are not over
        self.torn = False  # too few workers reached each other when the job ended
        self.held_up = False  # a member hung until its group's time to build was over
        self.stuck = False  # too many stood still while a group was waited for
        self.formed_at = 0.0
        self.stacks_wanted_at = -math.inf  # of those that are late
        self.change_gave_up_at = 0.0  # a planned change found no step to end with, in its time

    def fault(self, what: str) -> NoReturn:
        """A promise was broken."""
        raise Violation(f"at {self.world.loop.now:.3f} s: {what}")

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.fault(what)

    def disturbed(self, until: float = 0.0) -> None:
        """Something happened, or goes on until then, that may change the group."""
        self.disturbed_at = max(self.disturbed_at, self.world.loop.now, until)

    # ------------------------------------------------------------ records

    def decided(self, decision: Decision) -> None:
        """Is told of each decision, before it is carried out."""

    def committed(self, written: tuple[records.Record, ...]) -> None:
        formed, newcomers, taught = self.formed, self.newcomers, self.taught
        claims = set(self.claims)
        for record in written:
            self.expect(self.outcome is None, "a record follows the end of the job")
            if isinstance(record, records.Admitted):
                self._admitted(record.candidate)
            elif isinstance(record, records.LeavePlanned):
                self.leaving.add((record.node_id, record.incarnation))
            elif isinstance(record, records.Removed):
                self._removed(record)
            elif isinstance(record, records.GenerationFormed):
                self._settled("a new generation was formed")
                self._formed(record)
            elif isinstance(record, records.GenerationEnded):
                self.starts_over = self.suspended = True  # the step under way is given up
                self._settled("the generation was ended")
                self.established = False
            elif isinstance(record, records.GroupEstablished):
                self.established = self.ever_established = True
            elif isinstance(record, records.JobEnded):
                self.outcome = record
                self._ended(record)
        removed = [
            each for each in written if isinstance(each, records.Removed) and "cannot reach" in each.reason
        ]
        if removed:
            assert formed is not None
            here = [each.candidate for each in formed.members if each.candidate.node_id in claims]
            # Where others stay of its host, a worker alone was expelled, and its host is not barred.
            for host in {self.world.host(node_id) for node_id in self.claims}:
                self.barred.pop(host, None)
            self._check_lost_to_one(removed, here, newcomers - taught)
            self._check_most_stay(removed, formed, newcomers)

    def _admitted(self, candidate: messages.Candidate) -> None:
        node_id, incarnation = candidate.node_id, candidate.incarnation
        self._check_taken_in(candidate.host.id)
        self.expect(node_id not in self.claims, f"node {node_id} was admitted beside a living holder")
        self.expect((node_id, incarnation) not in self.retired, f"{node_id} came back after it was replaced")
        earlier = self.admitted.setdefault(node_id, set())
        self.retired |= {(node_id, other) for other in earlier if other != incarnation}
        earlier.add(incarnation)
        self.claims[node_id] = incarnation

    def _removed(self, record: records.Removed) -> None:
        process = (record.node_id, record.incarnation)
        self.expect(self.claims.pop(record.node_id, None) == record.incarnation, "a stranger was removed")
        self._check_expelled(process, record.reason)
        if SAID in record.reason:
            self.expect(process in self.world.died_at, f"{process} lives, and is lost for a launcher's word")
        if "not heard for" in record.reason:
            for_s = self.world.loop.now - self.forgiven_at.get(process, -math.inf)
            self.expect(for_s >= NODE_TIMEOUT_S, f"{process} had {for_s:.1f} s to come back")
        if process in self.since:
            self.retired.add(process)
            arriving = self.formed is None or self.since[process] == self.formed.generation
            stood = not arriving or self.established  # else it goes before anybody steps with it
            self.went = self.went or (process in self.world.went_between_steps and stood)
        if record.finished:
            left = self.world.steps_left(process)
            self.expect(not left, f"{process} is said to have finished, with {left} steps to do")
            self.finished.add(record.node_id)
            self.completed.add(process)
            self.finishing = True

    def _check_taken_in(self, host: str) -> None:
        """Who was expelled because it was not reached comes back when it is, unless the scheduler died."""
        if self.barred.pop(host, -1.0) <= self.world.scheduler.up_since:
            return
        decided_at = self.world.loop.now - self.world.scheduler.held_up_s()
        since = decided_at - 8.0  # a round may take so long
        for node_id in self.claims:
            cut = self.world.cables.was_cut_throughout(host, self.world.host(node_id), since)
            self.expect(not cut, f"{host} is taken in, and cannot reach {node_id}")

    def _check_expelled(self, process: Process, reason: str) -> None:
        world = self.world
        if "was expelled" not in reason or "revoked" in reason:
            return
        members = [each.candidate.node_id for each in self.formed.members] if self.formed else []
        hosts = {world.host(node) for node in members}
        self.expect(world.host(process[0]) in hosts, f"{process} is expelled, and its host has no member")
        here = [node for node in members if node in self.claims]
        left = [node for node in here if (node, self.claims[node]) not in self.leaving]
        least = 1 if self.finishing else world.scenario.worker_min
        self.expect(len(left) >= least, f"{process} is expelled, and {len(left)} are left")
        (worker,) = (w for w in world.processes if (w.node_id, w.incarnation) == process)
        if "has not come" in reason:
            since = min(worker.busy_since, worker.waiting_since)
            self.expect(world.loop.now >= since + HANG_TIMEOUT_S, f"{process} has hung for too short a time")
            self.expect(not worker.busy, f"{process} is expelled while it is busy")
            return
        host, ago = world.host(process[0]), world.loop.now - 20.0 - world.scheduler.held_up_s()
        others = {world.host(node_id) for node_id in members} - {host}
        cut = any(world.cables.is_cut(host, other, ago) for other in others)
        self.expect(cut, f"{process} is expelled, and reaches all: {reason}")
        self.barred[host] = world.loop.now

    def _check_lost_to_one(
        self, removed: list[records.Removed], here: list[messages.Candidate], stateless: set[Process]
    ) -> None:
        """One that is at fault costs one honest host its place at most.

        Unless the others could not go on without it, because it has the state, or they are too few: then the
        job goes on with it, as long as enough reach each other.
        """
        world = self.world
        lost = {world.host(each.node_id) for each in removed if each.node_id not in world.at_fault}
        if not world.at_fault or not lost:
            return
        honest = [each for each in here if each.node_id not in world.at_fault]
        hold = [each for each in honest if (each.node_id, each.incarnation) not in stateless]
        least = 1 if self.finishing else world.scenario.worker_min
        if len(honest) < least or (self.ever_established and not hold):
            return
        self.lost_to_one |= lost
        names = ", ".join(sorted(self.lost_to_one))
        self.expect(len(self.lost_to_one) < 2, f"{names} are lost to {sorted(world.at_fault)}")

    def _check_most_stay(
        self, removed: list[records.Removed], formed: records.GenerationFormed | None, newcomers: set[Process]
    ) -> None:
        """As many members stay as have reached each other; or those that hold the state.

        Who was killed cannot stay, whether or not the scheduler knows of it.
        Unless one host, or worker, alone was at fault: it goes, whatever it has of workers. So does one that
        was broken with two others, one after the other.
        """
        assert formed is not None
        if self.world.at_fault:
            return
        world = self.world
        gone = {each.node_id for each in removed}
        members = [each.candidate.node_id for each in formed.members]
        here = [node for node in members if node in self.claims]
        ago = world.loop.now - 20.0 - world.scheduler.held_up_s()
        living = {(worker.node_id, worker.incarnation) for worker in world.living()}
        could_stay = {each.node_id for each in removed if (each.node_id, each.incarnation) in living}
        nodes = [*here, *(could_stay & set(members))]
        left = {world.host(node) for node in here}
        # Who is in a single pair now is what the newest round has found: it saw no cut that was over before.
        suspect = self._suspect({world.host(node) for node in gone} - left, left, max(ago, self.asked_at))
        most = world.cables.most_together([node for node in nodes if world.host(node) != suspect], ago)
        self.expect(bool(newcomers) or len(here) >= most, f"{len(here)} stay where {most} could")

    def _suspect(self, gone: set[str], left: set[str], ago: float) -> str:
        """The host that goes because it was in single pairs with more others than its peer; "": none does.

        Only pairs for which one of the two went count, and of a pair one of which was apart from others as
        well, only that one is under suspicion.
        """
        if self.remembers_since != self.world.scheduler.up_since:
            self.remembers_since, self.broken_with = self.world.scheduler.up_since, {}
        is_cut = self.world.cables.is_cut
        # Of a host from which no answer counts, because its streams were lost in that round, say, the round
        # has found nothing: who is in a single pair beside it is in no other one.
        told = {self.world.host(self.identity[session][0]) for session in self.answered & set(self.identity)}
        hosts = (gone | left) & told
        apart = {one: {x for x in hosts - {one} if is_cut(one, x, ago)} for one in hosts}
        apart |= {one: set() for one in (gone | left) - hosts}
        # What was cut after a round had begun, it may have seen or not.
        seen = {one: {x for x in apart[one] if is_cut(one, x, ago, begun_by=self.asked_at)} for one in apart}
        for one in gone:
            self.broken_with.setdefault(one, set()).update(apart[one])
            for peer in apart[one]:
                alone = {one} in (apart[peer], seen[peer])
                if alone and len(apart[one]) == 1:
                    self.broken_with.setdefault(peer, set()).add(one)
        if len(gone) != 1 or any(len(apart[one]) != 1 for one in gone):
            return ""
        (one,) = gone
        (peer,) = apart[one]
        others = self.broken_with[one]
        known = len(others) > max(1, len(self.broken_with.get(peer, ())))
        return one if known and apart[peer] == {one} else ""

    def hung(self, worker: Worker, until: float) -> None:
        """A rank is about to wake up: had it hung for long, the others would have gone on without it."""
        world, scenario = self.world, self.world.scenario
        if self.formed is None or self.outcome is not None or worker.busy or worker.busy_until != until:
            return
        members = [each.candidate.node_id for each in self.formed.members]
        others = [w for w in world.living() if w is not worker and w.node_id in members]
        # Whose only steps so far were long ones, by a hang of its own, takes long to find a wait too long.
        patience_s = max([5.0, *(w.pace.of_steps.limit_s for w in others)])
        since = world.loop.now - HANG_TIMEOUT_S - 35.0 - patience_s
        waiting = all(w.waiting_for is not None and w.waiting_since < since for w in others)
        if worker.busy_since > since or not others or not waiting or world.scheduler.up_since > since:
            return
        whole = world.cables.most_together(members, since) == len(members)
        known = self.claims.get(worker.node_id) == worker.incarnation and worker.node_id in members
        enough = len(others) >= scenario.worker_min and len(others) == len(members) - 1
        self.expect(not (whole and known and enough), f"{worker} has hung for long, and is waited for")

    def _settled(self, what: str) -> None:
        since = max(self.disturbed_at, self.change_gave_up_at, self.world.scheduler.up_since)
        calm_for = self.world.loop.now - since
        if self.established:
            self.expect(
                calm_for < NODE_TIMEOUT_S + 5.0, f"{what} though nothing happened for {calm_for:.1f} s"
            )

    def _formed(self, record: records.GenerationFormed) -> None:
        before = self.formed.generation if self.formed else 0
        self.expect(record.generation == before + 1, f"generation {record.generation} follows {before}")
        members = record.members
        self.expect([x.rank for x in members] == list(range(len(members))), "ranks are not dense")
        nodes = [x.candidate.node_id for x in members]
        self.expect(len(set(nodes)) == len(nodes), "a node has two ranks")
        self.expect(nodes == self.world.in_rank_order(nodes), f"ranks break the rule: {nodes}")
        scenario = self.world.scenario
        least = 1 if self.finishing else scenario.worker_min
        givers = [x for x in members if (x.candidate.node_id, x.candidate.incarnation) in self.leaving]
        most = max(scenario.worker_num, 2) if givers else scenario.worker_num
        self.expect(least <= len(members) <= most, f"a group of {len(members)}")
        self._check_givers(record, givers)
        self._check_local_ranks(members)
        for member in members:
            self._check_member((member.candidate.node_id, member.candidate.incarnation))
        self._check_source(record)
        if self.formed is not None and scenario.kind == "elastic" and not self.suspended:
            in_step = self.established or self.formed.switch_after_step >= 0
            abrupt = in_step and record.switch_after_step < 0
            # A member that went between two steps broke none; whether one is redone is judged at the end.
            needed = self.went or self.world.scheduler.lacked_space()  # who waits too long for a change goes
            self.expect(not abrupt or needed, f"a step is broken without need: {record.reason}")
        if "took over" in record.reason:  # a change that waits behind it begins only then
            self.change_gave_up_at = self.world.loop.now
        self.went = False
        self.starts_over = self.starts_over or (record.state_source_rank < 0 and self.formed is not None)
        self.formed, self.finished = record, set()
        self.history[record.generation] = record
        self.formed_at = self.world.loop.now
        self.established = self.suspended = False
        now = {(x.candidate.node_id, x.candidate.incarnation): x.rank for x in members}
        self.since = {p: self.since.get(p, record.generation) for p in (*self.since, *now)}
        self.placed_at = {p: self.placed_at.get(p, self.formed_at) for p in (*self.placed_at, *now)}
        self.newcomers = {process for process, rank in now.items() if rank in record.newcomer_ranks}
        self.taught = set()

    def _check_local_ranks(self, members: tuple[records.Placed, ...]) -> None:
        hosts: dict[str, list[records.Placed]] = {}
        for member in members:
            hosts.setdefault(member.candidate.host.id, []).append(member)
        for here in hosts.values():
            wanted = [(number, len(here)) for number in range(len(here))]
            self.expect([(x.local_rank, x.local_world_size) for x in here] == wanted, "local ranks are wrong")

    def _check_member(self, process: Process) -> None:
        self.expect(process not in self.retired, f"{process} was superseded, and is ranked")
        self.expect(self.claims.get(process[0]) == process[1], f"{process} is ranked without a claim")
        settings = self.world.scenario.settings
        dead_for = self.world.dead_for(process)
        # After a takeover silence counts only when workers have had time to find the new leader.
        grace_s = max(0.0, (settings.recovered_timeout_s or 0.0) - settings.node_timeout_s)
        self.expect(
            dead_for < NODE_TIMEOUT_S + 4.5 + grace_s, f"{process} is ranked, dead for {dead_for:.1f} s"
        )

    def _check_source(self, record: records.GenerationFormed) -> None:
        source = record.state_source_rank
        if source < 0:
            starts_over = self.finishing and self.formed is not None
            self.expect(not starts_over, "some have completed the training, and others start over")
        if source < 0 or self.formed is None:
            self.expect(
                source < 0 and not record.newcomer_ranks, "the first generation has no state to hand on"
            )
            self.expect(
                not self._survivors(record) or not self._state_known(record), "the state is forgotten"
            )
            return
        candidate = record.members[source].candidate
        process = (candidate.node_id, candidate.incarnation)
        self.expect(source not in record.newcomer_ranks, "a newcomer is to hand on the state")
        self.expect(process in self.since, f"{process} is to hand on the state and is new")
        old = [p for p in self._survivors(record) if p not in self.newcomers]
        eldest = min((self.since[p] for p in old), default=self.since.get(process, 0))
        self.expect(self.since.get(process, 0) <= eldest, f"{process} is not the longest-lived")
        if process in self.newcomers:
            self.expect(self.world.has_state(process), f"{process} is to hand on a state that it never got")
        for rank, member in enumerate(record.members):
            other = (member.candidate.node_id, member.candidate.incarnation)
            self.expect(other in self.since or rank in record.newcomer_ranks, f"{other} is not seen as new")

    def _check_givers(self, record: records.GenerationFormed, givers: list[records.Placed]) -> None:
        """Who leaves stays for a generation more if, and only if, nobody else could hand on the state."""
        for giver in givers:
            self.expect([giver.rank] == [record.state_source_rank], f"{giver} is not let go without need")
            self.expect(len(givers) == 1 < len(record.members), f"nobody takes the state from {giver}")
            same = self.formed is not None and self.formed.members == record.members
            self.expect(not same or record.switch_after_step < 0, "a step boundary changes nothing")
        if record.state_source_rank >= 0 or self.formed is None or not self.ever_established:
            return
        before = {(x.candidate.node_id, x.candidate.incarnation) for x in self.formed.members}
        for process in before - self.newcomers:
            gone = self.claims.get(process[0]) != process[1]
            self.expect(gone, f"{process} holds the state and leaves, and the others start over")

    def _survivors(self, record: records.GenerationFormed) -> list[Process]:
        processes = [(x.candidate.node_id, x.candidate.incarnation) for x in record.members]
        return [process for process in processes if process in self.since]

    def _state_known(self, record: records.GenerationFormed) -> bool:
        return self.ever_established and any(p not in self.newcomers for p in self._survivors(record))

    def _ended(self, record: records.JobEnded) -> None:
        if record.ok:
            members = {x.candidate.node_id for x in self.formed.members} if self.formed else set()
            left = members - self.finished
            self.expect(self.finishing, "the job ended well and nobody finished")
            left -= self.world.leavers | {node for node, _ in self.newcomers}
            self.expect(not left, f"the job ended well without {left}")
        self.expect(bool(record.reason), "the job ended without a reason")
        if self.formed is not None:
            nodes = [each.candidate.node_id for each in self.formed.members]
            decided_at = self.world.loop.now - self.world.scheduler.held_up_s()
            together = self.world.cables.most_together(nodes, decided_at - TWO_ROUNDS_S)
            # Of two members nobody is expelled, whatever MS_WORKER_MIN is.
            self.torn = together < max(self.world.scenario.worker_min, min(2, len(nodes)))
            # MS_TOPO_TIMEOUT bounds the building of a job that has not trained yet, over all generations that
            # it takes: two hangs, or a hang after a cut, may last as long as that. Seldom: the one that hung
            # must have done so until just now, else the others had the time to find by probes who cannot
            # reach whom, and to build.
            recently = self.world.loop.now - NODE_TIMEOUT_S - PROBES_S
            hung = any(w.busy_until > recently for w in self.world.living() if w.node_id in nodes)
            in_time = "was not built in time" not in record.reason
            self.held_up = hung and not in_time and not self.ever_established
            self.stuck = self._others_stood_still()

    def _others_stood_still(self) -> bool:
        """Whether those that are missing could not come back, because their training threads stood still.

        Whoever has lost its place, or has been let go, ends when its training thread comes to learn of it;
        nobody kills it before, if no SIGTERM came, and only then is its node started again.
        """
        world = self.world
        missing = [w for node_id, w in world.newest.items() if node_id not in self.claims]
        stuck = [w for w in missing if w.stood_still_for(STARTED_AGAIN_S) > TOPO_TIMEOUT_S - STOPPED_S]
        return len(self.claims) < world.scenario.worker_min <= len(self.claims) + len(stuck)

    # ------------------------------------------------------------ messages

    def identify(self, session: int, candidate: messages.Candidate) -> None:
        process = (candidate.node_id, candidate.incarnation)
        self.identity[session] = process
        self.newest_stream[process] = session

    def sending(self, session: int, message: messages.SchedulerMessage) -> None:
        self.expect(session not in self.closed, f"a message follows the last one on session {session}")
        if isinstance(message, messages.Probe):
            self.asked_at = self.world.loop.now
            if message.round != self.round:
                self.round, self.asked, self.answered = message.round, set(), set()
            self.asked.add(session)
        if isinstance(message, messages.Refused | messages.Ended):
            self.closed.add(session)
            self.answered.discard(session)
            self.expect(
                bool(message.sentence if isinstance(message, messages.Refused) else message.reason),
                "no reason",
            )
        elif isinstance(message, messages.UniqueIds):
            self.expect(message.generation in self.history, "ids of a generation that is not on the disk")
            members = self._members(message.generation)
            self.expect(self.identity[session] in members, "an id goes to a worker that is no member")
        elif isinstance(message, messages.Assignment):
            self._assigned(self.identity[session], message)

    def _members(self, generation: int) -> list[Process]:
        members = self.history[generation].members
        return [(x.candidate.node_id, x.candidate.incarnation) for x in members]

    def _assigned(self, process: Process, message: messages.Assignment) -> None:
        formed = self.history.get(message.generation)
        if formed is None:
            self.fault("an assignment of a generation that is not on the disk")
        members = self._members(message.generation)
        if message.rank < 0:
            self.expect(process not in members, f"{process} is a member and told to leave")
        else:
            self.expect(members[message.rank] == process, f"{process} is told another's rank {message.rank}")
        self.expect(
            message.members == tuple(map(as_sent, formed.members)),
            "an assignment differs from the record",
        )

    def arriving(self, event: scheduler_events.Event) -> None:
        """Before each step of the scheduler."""
        if isinstance(
            event,
            scheduler_events.PeerSuspected
            | scheduler_events.SessionLost
            | scheduler_events.LeftCleanly
            | scheduler_events.LeaveRequested,
        ):
            self.disturbed()
        session = getattr(event, "session", None)
        if isinstance(event, scheduler_events.ProbeAnswered) and event.round == self.round:
            self.answered |= {event.session} & self.asked  # else it has come back on another stream since
        if isinstance(event, scheduler_events.SessionLost | scheduler_events.LeftCleanly):
            self.answered.discard(event.session)
        if isinstance(event, scheduler_events.SessionLost):
            self.ended_at[event.session] = self.world.loop.now
        elif session in self.identity:
            self.heard_at[self.identity[session]] = self.world.loop.now

    def _check_evidence(self, decision: Decision) -> None:
        """Who is named as late is asked for its stacks, once a minute at most; the evidence comes soon."""
        now, started_at = self.world.loop.now, self.world.scheduler.started_at
        if any(isinstance(told, messages.StacksWanted) for _, told in decision.messages):
            apart_s = now - max(self.stacks_wanted_at, started_at)
            seldom = self.stacks_wanted_at < started_at or apart_s >= INCIDENTS_APART_S
            self.expect(seldom, f"stacks are asked for again after {apart_s:.1f} s")
            self.stacks_wanted_at = now
        asked = self.stacks_wanted_at >= started_at
        self.expect(asked or LATE not in decision.reason, f"nobody is asked for stacks: {decision.reason}")
        held_up_s = self.world.scheduler.held_up_s()
        for bundle in decision.bundles:
            at_once = bundle.sentence in decision.reason  # none of those that are named has a stream
            took_s = 0.0 if at_once else now - self.stacks_wanted_at
            self.expect(took_s <= GATHER_S + held_up_s + 1.0, f"{bundle.sentence} takes {took_s:.1f} s")

    def stepped(self, event: scheduler_events.Event, decision: Decision, *, alone: bool) -> None:
        """After each step of the scheduler, once that is carried out; ``alone``: not along with others."""
        if isinstance(event, scheduler_events.Joined):
            candidate = event.candidate
            if self.claims.get(candidate.node_id) == candidate.incarnation:
                self.came_back_at = self.world.loop.now
        suspended = [(s, told.save) for s, told in decision.messages if isinstance(told, messages.Suspended)]
        ended = decision.records[-1:]  # a next generation may have been formed at once
        if alone and ended and isinstance(ended[0], records.GenerationEnded) and self.ever_established:
            savers = [session for session, save in suspended if save]
            self.expect(len(savers) <= 1, "several are told to save")
            holders = [s for s, _ in suspended if self.identity[s] not in self.newcomers]
            self.expect(not holders or bool(savers), "nobody is told to save")
        if (
            isinstance(event, scheduler_events.SessionLost | scheduler_events.LeftCleanly)
            and self.outcome is None
        ):
            process = self.identity.get(event.session)
            if process is not None and self.newest_stream.get(process) == event.session:
                silent_s = self.world.loop.now - self.heard_at.get(process, 0.0)
                waits = self.heard_at.get(process, 0.0) < self.placed_at.get(process, math.inf)
                often = WAITING_HEARTBEAT_S if waits else HEARTBEAT_S
                may_return = isinstance(event, scheduler_events.SessionLost) and event.may_return
                may_live = may_return or self.world.scheduler.forgives() or silent_s > 2 * often
                gone = self.claims.get(process[0]) != process[1]
                if not gone and "it may come back" in decision.reason:
                    self.forgiven_at[process] = self.ended_at[event.session]
                self.expect(gone or may_live, f"{process} is gone, and keeps its claim")

        self._check_evidence(decision)
        self._check_planned_change()

    def _check_planned_change(self) -> None:
        """A planned change that a worker holds up gives way to one that interrupts."""
        formed = self.formed
        if formed is None or formed.switch_after_step < 0 or self.established or self.suspended:
            return
        if self.outcome is None:
            scheduler = self.world.scheduler
            held_up_for = self.world.loop.now - max(self.formed_at, scheduler.up_since, scheduler.held_up_at)
            limit = self.world.scenario.settings.stall_timeout_s + 3.0
            self.expect(held_up_for < limit, f"a planned change is held up for {held_up_for:.1f} s")

    def check_recovery(self, machine: Machine, records: list[records.Record]) -> None:
        """What the disk says is what the machine knew."""
        again = Machine.recover("job", self.world.scenario.settings, records, self.world.loop.now)
        self.expect(again.job.ledger == machine.job.ledger, "what was recovered is not what was")

    def is_heard_as_member(self, process: Process) -> bool:
        """Whether it is heard as often as members are."""
        return self.heard_at.get(process, 0.0) > self.placed_at.get(process, math.inf)

    def check_indexes(self, job: Job) -> None:
        """What is kept beside claims and contacts, so that nobody has to walk them, says what they say."""
        ledger, members = job.ledger, job.members
        living = {claim.candidate.node_id: claim for claim in ledger.living_members()}
        contacts = members.by_node
        words, early = members.words, members.early
        heard = [[contact.last_heard for contact in group.values()] for group in (words, early)]
        agree = {
            "leaving": ledger.leaving == {n for n, each in ledger.claims.items() if each.leaving is not None},
            "unplaced": ledger.unplaced == {n for n in ledger.claims if ledger.rank_of(n) < 0},
            "living": ledger.living == len(living),
            "spares": ledger.spares == {n for n, each in ledger.claims.items() if each.candidate.spare},
            "at": {n for here in ledger.at.values() for n in here} == set(ledger.claims),
            "lacking": members.lacking
            == {n for n, each in living.items() if each.newcomer and not contacts[n].has_moved},
            "quiesced": members.quiesced == {n for n in living if contacts[n].quiesced is not None},
            "words": {**words, **early} == contacts and heard == [sorted(group) for group in heard],
            "one order": len(words) + len(early) == len(contacts),
            "waits": all(c.waits == (n in early) and c.waits | c.placed for n, c in contacts.items()),
            "placed": all(c.placed == (ledger.claims[n].since > 0) for n, c in contacts.items()),
            "nodes": set(members.nodes.values()) == {n for n, c in contacts.items() if c.session is not None},
        }
        wrong = [name for name, holds in agree.items() if not holds]
        self.expect(not wrong, f"{', '.join(wrong)} do not agree with claims and contacts")

    def check_secrecy(self, lines: list[str]) -> None:
        """No unique id is on the disk."""
        self.expect(not any("ID-" in line for line in lines), "an id is in the journal")

    # ------------------------------------------------------------ workers

    def building(self, worker: Worker, place: messages.Assignment, unique_ids: tuple[bytes, ...]) -> None:
        known = self.unique_ids.setdefault(place.generation, unique_ids)
        self.expect(known == unique_ids, f"{worker} has other unique ids for generation {place.generation}")
        root = place.members[0]
        minted = re.match(rb"ID-(\d+)-(\d+)-", unique_ids[0])
        wanted = (place.generation, root.incarnation)
        self.expect(
            minted is not None and (int(minted[1]), int(minted[2])) == wanted,
            f"the ids of generation {place.generation} are not those of its rank 0",
        )
        me = place.members[place.rank]
        self.expect((me.node_id, me.incarnation) == (worker.node_id, worker.incarnation), "a wrong rank")

    def step_met(self, worker: Worker, generation: int, step: int) -> None:
        """A worker has finished a step's collective."""
        if self.formed is not None and generation == self.formed.generation:
            self.taught.add((worker.node_id, worker.incarnation))
        if (generation, step) in self.step_seen:
            return
        self.step_seen.add((generation, step))
        self.expect(step <= self.steps_done, f"step {step} was done, {self.steps_done} is next")
        self.redone += step < self.steps_done and not self.starts_over
        self.steps_done = max(self.steps_done, step + 1)

    def failed(self, worker: Worker, notice: worker_events.Failed) -> None:
        """A worker learns that its membership is over."""
        over = self.outcome is not None or self.finishing
        told_ended = notice.kind is worker_events.FailureKind.JOB_ENDED
        self.expect(over or not told_ended, f"{worker} is told that the job has ended: {notice.sentence}")
        if notice.kind is worker_events.FailureKind.LEAVE:
            self.expect(worker.node_id in self.world.leavers, f"{worker} leaves, and nobody asked it to")

    def parting(self, worker: Worker, notice: worker_events.Dismissed) -> None:
        """A worker learns from a next generation that it leaves; whoever leaves otherwise saves anyway."""
        formed = self.formed
        known = formed is not None and notice.reason == formed.reason
        starts_over = formed is not None and formed.state_source_rank < 0
        self.expect(not known or notice.alone == starts_over, f"{worker} is not told who has the state")

    # ------------------------------------------------------------ the end

    def final(self) -> None:
        """When all is over."""
        world, scenario = self.world, self.world.scenario
        phase = world.scheduler.job.machine.job.phase
        self.expect(self.outcome is not None, f"the job has not ended; it is {phase.value}")
        assert self.outcome is not None
        alive = [str(worker) for worker in world.processes if worker.alive]
        self.expect(not alive, f"the job has ended, and {', '.join(alive)} do not know it")
        if scenario.supervised and not self.outcome.ok:
            why = "while the others finished" in self.outcome.reason or self.torn or self.held_up
            why = why or (self.stuck and "No group could be formed again in time" in self.outcome.reason)
            self.expect(why, f"ended: {self.outcome.reason}")
        lacked_space = world.scheduler.lacked_space()  # a goodbye may have waited until its sender was gone
        if scenario.kind in ("calm", "crashes", "pauses", "elastic"):
            # A scheduler that is away for as long as a goodbye is tried takes its sender for lost.
            unheard = any(worker.finished and worker.unheard for worker in world.processes) or lacked_space
            self.expect(self.outcome.ok or unheard, f"ended without need: {self.outcome.reason}")
            self.expect(self.redone == 0, f"{self.redone} steps were redone without need")
        if scenario.kind == "trouble" and not lacked_space:
            reasons = {worker.ended_by for worker in world.processes}
            self.expect(reasons == {"left"}, f"workers ended without need: {reasons}")
            self.expect(all(worker.finished for worker in world.processes), "a worker gave up")
        if scenario.kind in ("calm", "crashes", "pauses") and not lacked_space:
            assert self.formed is not None
            self.expect(self.formed.generation == 1, f"{self.formed.generation} generations without need")
