"""Planted bugs, to prove that the checkers bite: green seeds alone prove little.

Each swaps one function for a wrong one while a seed is played. ``python -m tests.simulation --mutants``
says with which seed each was caught, and by which promise.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from muster.scheduler.core import (
    events,
    evidence,
    hearing,
    job,
    joining,
    leaving,
    ledger,
    machine,
    members,
    phases,
    probing,
    probing_state,
    records,
    silence,
)
from muster.scheduler.errors import JournalUnavailableError
from muster.scheduler.jobs.driver import JobDriver, Stepped
from muster.scheduler.jobs.storage import WaitingStorage
from muster.wire import codec, messages
from muster.worker.session.client import Client
from muster.worker.session.live_communicators import LiveCommunicators
from muster.worker.session.pace import Pace
from tests.simulation import network
from tests.simulation.world import play

Job = job.Job
Make = Callable[[Any], Any]


@dataclass(frozen=True)
class Mutant:
    """One planted bug: in ``owner``, ``name`` is replaced by what ``make`` makes of the right one.

    ``seed`` is one that shows it, where those are rare.
    """

    owner: Any
    name: str
    make: Make
    seed: int = 0

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is there as long as the block runs."""
        bases = self.owner.__mro__ if isinstance(self.owner, type) else (self.owner,)
        owner = next(base for base in bases if self.name in vars(base))
        right = vars(owner)[self.name]
        setattr(owner, self.name, self.make(right))
        try:
            yield
        finally:
            setattr(owner, self.name, right)


def instead(wrong: Any) -> Make:
    """Something else altogether."""
    return lambda right: wrong


def nothing(*arguments: Any, **options: Any) -> None:
    """Does nothing."""


# ---------------------------------------------------------------- ranks


def by_arrival(candidates: Any, **options: Any) -> list[messages.Candidate]:
    return list(candidates)


def two_with_rank_0(right: Any) -> Any:
    return lambda ordered: tuple(replace(each, rank=max(0, each.rank - 1)) for each in right(ordered))


def local_ranks_by_host_name(right: Any) -> Any:
    def assign(ordered: Any) -> Any:
        twins = [c.replaced(host=c.host.replaced(id=c.host.name)) for c in ordered]
        return tuple(replace(member, candidate=c) for member, c in zip(right(twins), ordered, strict=True))

    return assign


# ---------------------------------------------------------------- records and recovery


def unrecorded(kind: type) -> Make:
    def make(right: Any) -> Any:
        def commit(self: Job, record: records.Record) -> None:
            if isinstance(record, kind):
                self.apply(record)
            else:
                right(self, record)

        return commit

    return make


def sends_first(right: Any) -> Any:
    async def persist(self: JobDriver, stepped: list[Stepped]) -> None:
        self.carry_out(stepped, self.clock.time())
        await right(self, stepped)

    return persist


def passes_failures_over(right: Any) -> Any:
    async def persist(self: JobDriver, stepped: list[Stepped]) -> None:
        with contextlib.suppress(JournalUnavailableError):
            await right(self, stepped)

    return persist


def gives_up_without_space(right: Any) -> Any:
    async def once(self: WaitingStorage, write: Callable[[], Awaitable[Any]]) -> Any:
        return await write()

    return once


def writes_one(right: Any) -> Any:
    async def persist(self: JobDriver, stepped: list[Stepped]) -> None:
        await right(self, [each for each in stepped if each[1].records][:1])

    return persist


def unapplied_unless_running(right: Any) -> Any:
    """State that is written beside apply(): recovery does not see it."""

    def plan_leave(job: Job, claim: ledger.Claim, reason: str) -> None:
        claim.leaving = reason

    return plan_leave


def forgets_the_claim_alone(right: Any) -> Any:
    def forget(self: members.Members, node_id: str) -> None:
        order = self.words.copy()
        right(self, node_id)
        self.words = order

    return forget


def speaks_out_of_turn(right: Any) -> Any:
    def has_spoken(self: members.Members, node_id: str, now: float) -> None:
        self.by_node[node_id].last_heard = now

    return has_spoken


def no_grace(right: Any) -> Any:
    def recover(cls: type[machine.Machine], job_id: str, settings: Any, records: Any, now: float) -> Any:
        recovered = right.__func__(cls, job_id, settings, records, now)
        for contact in recovered.job.members.by_node.values():
            contact.last_heard = now - settings.node_timeout_s
        return recovered

    return classmethod(recover)


def greets_with_welcome_alone(right: Any) -> Any:
    def greet(self: Job, node_id: str, session: int) -> None:
        self.outbox.send(session, messages.Welcome(2.0, 6.0, 30.0))

    return greet


def pauses_cost_the_place(right: Any) -> Any:
    def session_lost(job: Job, event: events.SessionLost, now: float) -> None:
        settings = job.settings
        job.settings = replace(settings, heartbeat_interval_s=settings.node_timeout_s)
        try:
            right(job, event, now)
        finally:
            job.settings = settings

    return session_lost


def uplinks_cost_the_places(right: Any) -> Any:
    return lambda job, event, now: right(job, event.replaced(may_return=False), now)


def only_long_absences_count(right: Any) -> Any:
    def excuse(self: members.Members, seconds: float, now: float) -> None:
        if seconds == math.inf:
            right(self, seconds, now)

    return excuse


def ends_count_as_those_of_members(right: Any) -> Any:
    def session_lost(job: Job, event: events.SessionLost, now: float) -> None:
        contact = job.members.by_node.get(job.members.nodes.get(event.session, ""))
        waits = contact is not None and contact.waits
        if contact is not None:
            contact.waits = False
        right(job, event, now)
        if contact is not None:
            contact.waits = waits

    return session_lost


def once_in_a_node_timeout(right: Any) -> Any:
    return property(lambda self: self.settings.node_timeout_s)


def forgives_silence_alone(right: Any) -> Any:
    def receive_backlog(job: Job, event: events.ReceiveBacklog, now: float) -> None:
        until = job.deadlines.forgiving_until
        right(job, event, now)
        job.deadlines.forgiving_until = until

    return receive_backlog


def a_forgiven_end_is_no_word(right: Any) -> Any:
    def session_lost(job: Job, event: events.SessionLost, now: float) -> None:
        job.members.has_spoken = nothing  # type: ignore[method-assign]
        right(job, event, now)
        del job.members.has_spoken

    return session_lost


def patient_for_good(right: Any) -> Any:
    def held_up(job: Job, event: events.HeldUp, now: float) -> None:
        right(job, event, now)
        job.settings = replace(job.settings, node_timeout_s=job.settings.node_timeout_s + 6.0)

    return held_up


def late_turns_do_not_add_up(right: Any) -> Any:
    def process_paused(job: Job, event: events.ProcessPaused, now: float) -> None:
        job.deadlines.late_s = 0.0
        right(job, event, now)

    return process_paused


# ---------------------------------------------------------------- generations


def forgets_held_back(job: Job) -> list[events.Joined]:
    job.admissions.held_back.clear()
    return []


def of_any_generation(right: Any) -> Any:
    def member_behind(self: Job, session: int, generation: int) -> Any:
        return right(self, session, self.ledger.generation)

    return member_behind


def keeps_ids_and_built(right: Any) -> Any:
    def apply(self: Job, record: records.Record) -> None:
        ids, built = self.current.unique_ids, set(self.current.built)
        right(self, record)
        if isinstance(record, records.GenerationFormed):
            self.current.unique_ids, self.current.built = ids, built

    return apply


def ids_to_everybody(right: Any) -> Any:
    def send_to_members(self: Job, message: messages.SchedulerMessage) -> None:
        for node_id in self.ledger.claims:
            self.send(node_id, message)

    return send_to_members


def same_number_again(right: Any) -> Any:
    def next_generation(*arguments: Any, **options: Any) -> Any:
        record = right(*arguments, **options)
        return replace(record, generation=max(1, record.generation - 1))

    return next_generation


def state_from(choice: Any) -> Make:
    def make(right: Any) -> Any:
        def next_generation(*arguments: Any, **options: Any) -> Any:
            record = right(*arguments, **options)
            return replace(record, state_source_rank=choice(record)) if len(record.members) > 1 else record

        return next_generation

    return make


def ignores_worker_min(right: Any) -> Any:
    def regroup(job: Job, now: float, reason: str, switch_after_step: int = -1) -> bool:
        opened = job.ledger.opened
        assert opened is not None
        job.ledger.opened = replace(opened, worker_min=1)
        try:
            return bool(right(job, now, reason, switch_after_step))
        finally:
            job.ledger.opened = opened

    return regroup


def always_well(right: Any) -> Any:
    return lambda job, ok, reason: right(job, job.ledger.formed is not None, reason)


def no_switch_overdue(right: Any) -> Any:
    return lambda job: None


def quiesced_when_one_has(right: Any) -> Any:
    def all_quiesced(self: members.Members, known: ledger.Ledger) -> bool:
        living = [claim.candidate.node_id for claim in known.living_members()]
        return any(self.by_node[node_id].quiesced is not None for node_id in living)

    return all_quiesced


def goes_without_goodbye(self: Job, claim: ledger.Claim) -> bool:
    return claim.leaving is not None and self.ledger.rank_of(claim.candidate.node_id) < 0


def earliest_step(right: Any) -> Any:
    def last_started_step(self: members.Members) -> int:
        steps = [c.quiesced for c in self.by_node.values() if c.quiesced is not None]
        return max(0, min(steps, default=0) - 1)

    return last_started_step


def newcomers_may_start_over(right: Any) -> Any:
    return lambda known, settings, stateless=frozenset(): right(known, settings)


def regroups_at_ticks(right: Any) -> Any:
    def tick(job: Job, event: events.Tick, now: float) -> None:
        right(job, event, now)
        if job.phase is ledger.Phase.RUNNING and not job.ledger.finishing and now > 9.0:
            phases.regroup(job, now, "for no reason")

    return tick


def speaks_after_the_end(right: Any) -> Any:
    def left(job: Job, event: events.LeftCleanly, now: float) -> None:
        right(job, event, now)
        job.outbox.send(event.session, messages.GroupBuilt(1))

    return left


def every_goodbye_is_finished(right: Any) -> Any:
    return lambda job, event, now: right(job, event.replaced(finished=True), now)


def leave_as_end(right: Any) -> Any:
    return staticmethod(lambda reason: messages.Ended(True, reason))


# ---------------------------------------------------------------- codecs and workers


def rank_off_by_one(right: Any) -> Any:
    def encode_parts(self: Any, message: messages.SchedulerMessage, held: int = 0) -> Any:
        if isinstance(message, messages.Assignment) and message.rank > 0:
            message = message.replaced(rank=message.rank - 1)
        return right(self, message, held)

    return encode_parts


def trusts_in_the_generation_before(right: Any) -> Any:
    def encode_parts(self: Any, message: messages.SchedulerMessage, held: int = 0) -> Any:
        return right(self, message, message.generation - 1 if isinstance(message, messages.Assignment) else 0)

    return encode_parts


def cuts_incarnations(right: Any) -> Any:
    def decode(data: bytes) -> messages.WorkerMessage:
        message: messages.WorkerMessage = right(data)
        if isinstance(message, messages.Join):
            cut = message.profile.replaced(incarnation=message.profile.incarnation & 0xFF)
            return message.replaced(profile=cut)
        return message

    return decode


def unsent(*kinds: type) -> Make:
    """Workers keep these words to themselves."""

    def make(right: Any) -> Any:
        def send_up(self: network.Network, worker: Any, message: messages.WorkerMessage) -> None:
            if not isinstance(message, kinds):
                right(self, worker, message)

        return send_up

    return make


def publishes_once(right: Any) -> Any:
    def send_up(self: network.Network, worker: Any, message: messages.WorkerMessage) -> None:
        if isinstance(message, messages.PublishUniqueIds):
            if getattr(worker, "published", 0) == message.generation:
                return
            worker.published = message.generation
        right(self, worker, message)

    return send_up


def joins_as_another(right: Any) -> Any:
    def send_up(self: network.Network, worker: Any, message: messages.WorkerMessage) -> None:
        if isinstance(message, messages.Join):
            worker.joins = getattr(worker, "joins", 0) + 1
            other = message.profile.replaced(incarnation=message.profile.incarnation + worker.joins)
            message = message.replaced(profile=other)
        right(self, worker, message)

    return send_up


def counts_waits_beside_steps(self: Pace, seconds: float) -> None:
    self._durations.append(seconds)


def gives_up_at_once(right: Any) -> Any:
    """A broken collective ends the worker, whatever the scheduler would say."""
    return lambda self, generation, rank, error: error


def sees_later_ends_alone(right: Any) -> Any:

    def over(self: Client, generation: int) -> Any:
        return right(self, generation + 1)

    return over


def hangs_are_due(right: Any) -> Any:
    def deal(job: Job, now: float, waiting: int) -> None:
        right(job, now + 1000.0, waiting)

    return deal


def busy_unheard(right: Any) -> Any:
    return lambda job, event, now: right(job, event.replaced(busy=""), now)


def proven_by_one_side(right: Any) -> Any:
    return lambda job, current, session: session in current.answers


def everybody_broken_goes(right: Any) -> Any:
    def best(names: frozenset[str], parties: Any, accusations: Any) -> frozenset[str]:
        return frozenset(n for n in names if all(n not in pair for pair in accusations))

    return best


def both_must_accuse(right: Any) -> Any:
    return lambda parties, accusations, *more: right(
        parties, {(a, b) for a, b in accusations if (b, a) in accusations}, *more
    )


def suspects_all_in_a_star(right: Any) -> Any:
    """Who was broken with one at fault is under suspicion as well."""

    def stars_of(centres: Any, accusations: Any) -> frozenset[tuple[str, str]]:
        found: frozenset[tuple[str, str]] = right(centres, accusations)
        return found | frozenset((other, centre) for centre, other in found)

    return stars_of


def holds_on_to_suspicions(right: Any) -> Any:
    """Who is under suspicion goes, or nobody, even where it and others would be enough to go on."""

    def leaving_by_size(parties: Any, accusations: Any, others: Any = None, split: Any = None) -> Any:
        if others is None:
            return right(parties, accusations, split=split)
        return probing.leaving(parties, accusations, others, split)

    return leaving_by_size


def compares_whole_sides(right: Any) -> Any:
    """Between the sides of a cut is decided without a look at whom else each of them would lose."""
    return lambda self, parties, accusations: right(probing.WHOLE, parties, accusations)


def forgets_pairs_of_silent_members(right: Any) -> Any:
    """Of a pair the one that accuses goes, whatever was before: who refuses probes gains by silence."""

    def repeaters(parties: Any, accusations: Any, others: Any) -> frozenset[str]:
        alone = probing.lone_pairs(accusations)
        return frozenset(a for a, b in accusations if {a, b} in alone and (b, a) not in accusations)

    return repeaters


def lowest_rank_stays(right: Any) -> Any:
    return lambda names, parties: (any(parties[n].holds_state for n in names), *right(names, parties)[3:])


def smallest_stays(right: Any) -> Any:
    return lambda names, parties: (False, -sum(parties[n].workers for n in names))


def all_save(right: Any) -> Any:
    def send(self: Job, node_id: str, message: messages.SchedulerMessage) -> None:
        right(
            self, node_id, message.replaced(save=True) if isinstance(message, messages.Suspended) else message
        )

    return send


def none_saves(right: Any) -> Any:
    def send(self: Job, node_id: str, message: messages.SchedulerMessage) -> None:
        right(
            self,
            node_id,
            message.replaced(save=False) if isinstance(message, messages.Suspended) else message,
        )

    return send


MUTANTS: dict[str, Mutant] = {
    "ranks by arrival": Mutant(ledger, "in_order", instead(by_arrival)),
    "two members with rank 0": Mutant(ledger, "assign", two_with_rank_0),
    "local ranks by host name": Mutant(ledger, "assign", local_ranks_by_host_name),
    "retired incarnations forgotten": Mutant(ledger.Ledger, "retirement", instead(lambda *a: None), 136),
    "replaced incarnations not retired": Mutant(ledger.Ledger, "retire", instead(nothing), 136),
    "node id taken while the holder lives": Mutant(joining, "check_node", instead(nothing), 188),
    "removals not recorded": Mutant(Job, "commit", unrecorded(records.Removed)),
    "group established not recorded": Mutant(Job, "commit", unrecorded(records.GroupEstablished)),
    "generations not recorded": Mutant(Job, "commit", unrecorded(records.GenerationFormed)),
    "leave planned beside the records": Mutant(leaving, "plan_leave", unapplied_unless_running, 128),
    "messages before records": Mutant(JobDriver, "persist", sends_first),
    "a scheduler without space gives up": Mutant(WaitingStorage, "_in_time", gives_up_without_space),
    "a write that failed is passed over": Mutant(JobDriver, "persist", passes_failures_over),
    "of several decisions one is written": Mutant(JobDriver, "persist", writes_one, 0),
    "not looked before silence is judged": Mutant(
        JobDriver, "look", instead(lambda self, now: (None, False))
    ),
    "no grace after a restart": Mutant(machine.Machine, "recover", no_grace),
    "assignment not told again": Mutant(Job, "greet", greets_with_welcome_alone),
    "stale generations count": Mutant(Job, "member_behind", of_any_generation, 762),
    "ids and built outlive the generation": Mutant(Job, "apply", keeps_ids_and_built),
    "ids go to everybody": Mutant(Job, "send_to_members", ids_to_everybody),
    "generation number reused": Mutant(ledger.Ledger, "next_generation", same_number_again),
    "state from the youngest": Mutant(
        ledger.Ledger,
        "next_generation",
        state_from(lambda formed: max(formed.newcomer_ranks, default=formed.state_source_rank)),
    ),
    "state never handed on": Mutant(ledger.Ledger, "next_generation", state_from(lambda formed: -1)),
    "newcomers trusted at once": Mutant(members.Members, "stateless", instead(lambda *a: frozenset())),
    "a newcomer starts over at the end": Mutant(ledger.Ledger, "choose", newcomers_may_start_over),
    "leavers take the state with them": Mutant(ledger.Ledger, "leaving_holders", instead(lambda *a: []), 346),
    "a leave does not wait for the hand-over": Mutant(
        ledger.Ledger, "is_handing_over", instead(lambda *a: False), 346),
    "worker_min ignored": Mutant(phases, "regroup", ignores_worker_min),
    "job always ends well": Mutant(phases, "end", always_well, 103),
    "lost streams ignored": Mutant(leaving, "session_lost", instead(nothing)),
    "its own absence unnoticed": Mutant(silence, "process_paused", instead(nothing)),
    "a pause costs the place": Mutant(leaving, "session_lost", pauses_cost_the_place, 274),
    "the end of a host's stream costs the places": Mutant(leaving, "session_lost", uplinks_cost_the_places),
    "unread words count as silence": Mutant(silence, "receive_backlog", instead(nothing), 79),
    "late turns count as silence": Mutant(members.Members, "excuse", only_long_absences_count, 380),
    "streams may not break while it is behind": Mutant(
        silence, "receive_backlog", forgives_silence_alone, 860),
    "who lost its stream meanwhile has no time to come back": Mutant(
        leaving, "session_lost", a_forgiven_end_is_no_word, 1943),
    "a time without a journal makes it patient for good": Mutant(
        silence, "held_up", patient_for_good, 1109000432),
    "late turns do not add up": Mutant(silence, "process_paused", late_turns_do_not_add_up, 1377),
    "what is unread takes the time to build": Mutant(job.Deadlines, "excuse", instead(nothing), 60417),
    "who is gone is still listened for": Mutant(members.Members, "forget", forgets_the_claim_alone),
    "the order of words is not kept": Mutant(members.Members, "has_spoken", speaks_out_of_turn),
    "a killed worker that was rarely heard is waited for": Mutant(
        leaving, "session_lost", ends_count_as_those_of_members, 630),
    "members are heard once in a node timeout": Mutant(Job, "heartbeat_interval_s", once_in_a_node_timeout),
    "silence ignored": Mutant(members.Members, "silent", instead(lambda *a: [])),
    "who left long ago breaks a step": Mutant(Job, "leaves_now", instead(goes_without_goodbye), 70015913),
    "who has stopped hands nothing over": Mutant(
        phases, "hand_over_first", instead(lambda job: False), 70052872),
    "switch at the earliest step": Mutant(members.Members, "last_started_step", earliest_step),
    "quiesced when one has": Mutant(members.Members, "all_quiesced", quiesced_when_one_has),
    "planned change never overdue": Mutant(phases, "switch_due", no_switch_overdue, 2915),
    "busy members end the job": Mutant(phases, "absent", instead(lambda *a: [])),
    "suspicions ignored": Mutant(hearing, "peer_suspected", instead(nothing)),
    "regroups for no reason": Mutant(silence, "tick", regroups_at_ticks),
    "time-outs ignored": Mutant(phases, "timed_out", instead(lambda *a: False)),
    "a message after the last one": Mutant(leaving, "left", speaks_after_the_end),
    "every goodbye counts as finished": Mutant(leaving, "left", every_goodbye_is_finished, seed=878),
    "a leave told as the job's end": Mutant(Job, "farewell", leave_as_end),
    "held-back joins forgotten": Mutant(joining, "held_back", instead(forgets_held_back)),
    "rank off by one on the wire": Mutant(
        codec.AssignmentEncoder, "encode_parts", rank_off_by_one
    ),
    "deltas for who does not hold the base": Mutant(
        codec.AssignmentEncoder, "encode_parts", trusts_in_the_generation_before
    ),
    "incarnation cut on the wire": Mutant(codec, "decode_worker_message", cuts_incarnations),
    "worker publishes the ids only once": Mutant(network.Network, "send_up", publishes_once),
    "a broken collective is nobody's but its own": Mutant(Client, "verdict", gives_up_at_once),
    "hanging collectives are not aborted": Mutant(LiveCommunicators, "abort", instead(nothing)),
    "the end of a generation is not seen": Mutant(Client, "over", sees_later_ends_alone),
    "cuts ignored": Mutant(probing, "expel_unreachable", instead(lambda *a: False)),
    "all that are in a broken pair go": Mutant(probing, "best", everybody_broken_goes),
    "one direction is not enough": Mutant(probing, "leaving", both_must_accuse, 347),
    "broken pairs are not remembered": Mutant(probing, "lone_pairs", instead(lambda *a: frozenset())),
    "of a pair the accuser goes": Mutant(probing, "repeaters", forgets_pairs_of_silent_members),
    "who was broken with one at fault is suspected": Mutant(
        probing, "stars_of", suspects_all_in_a_star, 947004328),
    "who is suspected goes, or nobody": Mutant(
        probing, "leaving_by_size", holds_on_to_suspicions, 950003099),
    "sides of a cut are compared as wholes": Mutant(
        probing.Split, "apart", compares_whole_sides, 1103226210),
    "the side of the lowest rank stays": Mutant(probing, "worth", lowest_rank_stays),
    "the smallest set stays": Mutant(probing, "worth", smallest_stays),
    "worker_min does not hold expulsions back": Mutant(
        probing, "may_expel", instead(lambda *a: True), 148
    ),
    "expelled and taken in at once": Mutant(probing_state.Probing, "bars", instead(lambda *a: False)),
    "taken in without a probe of the members": Mutant(probing, "is_proven", proven_by_one_side),
    "who stands still counts as cut off": Mutant(probing_state, "TOGETHER_S", instead(1e9), 35610),
    "busy ranks hang": Mutant(hearing, "probed", busy_unheard),
    "long waits count beside their steps": Mutant(
        Pace, "note_wait", instead(counts_waits_beside_steps), 70091650),
    "hanging ranks go at once": Mutant(probing, "deal_with_hangs", hangs_are_due, 186),
    "hangs leave no evidence": Mutant(evidence, "standstill", instead(nothing), 186),
    "hanging ranks never go": Mutant(probing, "deal_with_hangs", instead(nothing)),
    "lateness untold": Mutant(network.Network, "send_up", unsent(messages.Late)),
    "probes unanswered": Mutant(network.Network, "send_up", unsent(messages.Probed)),
    "all save at a suspension": Mutant(Job, "send", all_save),
    "none saves at a suspension": Mutant(Job, "send", none_saves),
    "worker comes back as another": Mutant(network.Network, "send_up", joins_as_another),
}  # fmt: skip


def hunt(mutant: Mutant, limit: int, run: Callable[[int], str] = play) -> tuple[int, str]:
    """The first seed that catches the mutant, and what it broke; -1 if none below ``limit`` does."""
    with mutant.planted():
        for seed in (mutant.seed, *range(limit)):
            try:
                told = run(seed)
            except Exception as error:  # a machine that breaks down is caught as well
                told = f"{type(error).__name__}: {error}"
            if told:
                return seed, told
    return -1, ""
