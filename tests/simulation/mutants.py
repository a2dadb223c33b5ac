"""Planted bugs, to prove that the checkers bite: green seeds alone prove little.

Each swaps one function for a wrong one while a seed is played. ``python -m tests.simulation --mutants``
says with which seed each was caught, and by which promise.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from muster.scheduler.core import admission, job, ledger, planning, ranks, reachability
from muster.scheduler.core import events as se
from muster.scheduler.core import job as probing
from muster.scheduler.core import job as reception
from muster.scheduler.core import members as contacts
from muster.scheduler.core import messages as sm
from muster.scheduler.core import messages as v
from muster.scheduler.core import phases as machine
from muster.scheduler.core import records as r
from muster.scheduler.wire import decode as scheduler_decode
from muster.scheduler.wire import encode as scheduler_encode
from muster.worker.control import machine as membership
from muster.worker.control import messages as m
from tests.simulation import scheduler as simulated
from tests.simulation.world import play

Make = Callable[[Any], Any]


@dataclass(frozen=True)
class Mutant:
    """One planted bug: in ``owner``, ``name`` is replaced by what ``make`` makes of the right one."""

    owner: Any
    name: str
    make: Make

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


def by_arrival(candidates: Any, **options: Any) -> list[v.Candidate]:
    return list(candidates)


def two_with_rank_0(right: Any) -> Any:
    return lambda ordered: tuple(replace(each, rank=max(0, each.rank - 1)) for each in right(ordered))


def local_ranks_by_host_name(right: Any) -> Any:
    def assign(ordered: Any) -> Any:
        twins = [replace(c, host=replace(c.host, id=c.host.name)) for c in ordered]
        return tuple(replace(member, candidate=c) for member, c in zip(right(twins), ordered, strict=True))

    return assign


# ---------------------------------------------------------------- records and recovery


def unrecorded(kind: type) -> Make:
    def make(right: Any) -> Any:
        def commit(self: machine.Machine, record: r.Record) -> None:
            if isinstance(record, kind):
                self.apply(record)
            else:
                right(self, record)

        return commit

    return make


def unapplied_unless_running(right: Any) -> Any:
    """State that is written beside apply(): recovery does not see it."""

    def plan_leave(self: job.Job, claim: ledger.Claim, reason: str) -> None:
        claim.leaving = reason

    return plan_leave


def no_grace(right: Any) -> Any:
    def recover(cls: type[job.Job], job_id: str, settings: Any, records: Any, now: float) -> Any:
        recovered = right.__func__(cls, job_id, settings, records, now)
        for contact in recovered._contacts.by_node.values():
            contact.last_heard = now - settings.node_timeout_s
        recovered._silence_due = now
        return recovered

    return classmethod(recover)


def greets_with_welcome_alone(right: Any) -> Any:
    def greet(self: reception.Reception, node_id: str, now: float) -> None:
        self._tell(node_id, sm.Welcome(2.0, 6.0, 30.0))

    return greet


def pauses_cost_the_place(right: Any) -> Any:
    def session_lost(self: job.Job, event: se.SessionLost, now: float) -> None:
        settings = self.settings
        self.settings = replace(settings, heartbeat_interval_s=settings.node_timeout_s)
        try:
            right(self, event, now)
        finally:
            self.settings = settings

    return session_lost


def only_long_absences_count(right: Any) -> Any:
    def excuse(self: contacts.Contacts, seconds: float, now: float) -> None:
        if seconds == math.inf:
            right(self, seconds, now)

    return excuse


def forgives_silence_alone(right: Any) -> Any:
    def fell_behind(self: job.Job, event: se.FellBehind, now: float) -> None:
        until = self._forgiving_until
        right(self, event, now)
        self._forgiving_until = until

    return fell_behind


def late_turns_do_not_add_up(right: Any) -> Any:
    def stood_still(self: job.Job, event: se.StoodStill, now: float) -> None:
        self._late_s = 0.0
        right(self, event, now)

    return stood_still


# ---------------------------------------------------------------- generations


def of_any_generation(right: Any) -> Any:
    def member_behind(self: job.Job, session: int, generation: int, now: float) -> Any:
        return right(self, session, self._ledger.generation, now)

    return member_behind


def keeps_ids_and_built(right: Any) -> Any:
    def apply(self: machine.Machine, record: r.Record) -> None:
        ids, built = self._unique_ids, set(self._built)
        right(self, record)
        if isinstance(record, r.GenerationFormed):
            self._unique_ids, self._built = ids, built

    return apply


def ids_to_everybody(right: Any) -> Any:
    def tell_members(self: machine.Machine, message: sm.Message) -> None:
        for node_id in self._ledger.claims:
            self._tell(node_id, message)

    return tell_members


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
    def regroup(self: machine.Machine, now: float, reason: str, switch_after_step: int = -1) -> bool:
        opened = self._ledger.opened
        assert opened is not None
        self._ledger.opened = replace(opened, worker_min=1)
        try:
            return bool(right(self, now, reason, switch_after_step))
        finally:
            self._ledger.opened = opened

    return regroup


def always_well(right: Any) -> Any:
    return lambda self, ok, reason: right(self, self._ledger.formed is not None, reason)


def no_switch_overdue(right: Any) -> Any:
    return lambda self: None


def quiesced_when_one_has(right: Any) -> Any:
    def all_quiesced(self: contacts.Contacts, known: ledger.Ledger) -> bool:
        living = [claim.candidate.node_id for claim in known.living_members()]
        return any(self.by_node[node_id].quiesced is not None for node_id in living)

    return all_quiesced


def earliest_step(right: Any) -> Any:
    def last_started_step(self: contacts.Contacts) -> int:
        steps = [c.quiesced for c in self.by_node.values() if c.quiesced is not None]
        return max(0, min(steps, default=0) - 1)

    return last_started_step


def newcomers_may_begin_anew(right: Any) -> Any:
    return lambda known, settings, stateless=frozenset(): right(known, settings)


def regroups_at_ticks(right: Any) -> Any:
    def tick(self: job.Job, event: se.Tick, now: float) -> None:
        right(self, event, now)
        if self.phase is ledger.Phase.RUNNING and not self._ledger.finishing and now > 9.0:
            self._regroup(now, "for no reason")

    return tick


def speaks_after_the_end(right: Any) -> Any:
    def left(self: job.Job, event: se.LeftCleanly, now: float) -> None:
        right(self, event, now)
        self._messages.append((event.session, sm.GroupBuilt(1)))

    return left


def every_goodbye_is_finished(right: Any) -> Any:
    return lambda self, event, now: right(self, replace(event, finished=True), now)


def leave_as_end(right: Any) -> Any:
    return staticmethod(lambda reason: sm.Ended(True, reason))


# ---------------------------------------------------------------- codecs and workers


def rank_off_by_one(right: Any) -> Any:
    def encode(self: Any, message: sm.Message) -> bytes:
        if isinstance(message, sm.Assignment) and message.rank > 0:
            message = replace(message, rank=message.rank - 1)
        return bytes(right(self, message))

    return encode


def loses_held_generation(right: Any) -> Any:
    def join(body: Any, session: int) -> Any:
        request = right(body, session)
        return replace(request, event=replace(request.event, candidate=replace(
            request.event.candidate, incarnation=request.event.candidate.incarnation & 0xFF
        )))  # fmt: skip

    return join


def worker_publishes_once(right: Any) -> Any:
    def mint_or_publish(self: membership.Membership, assignment: m.Assignment) -> None:
        if self._minted is None:
            right(self, assignment)

    return mint_or_publish


def worker_joins_as_new(right: Any) -> Any:
    def on_stream_opened(self: membership.Membership, event: Any) -> None:
        self.profile = self.profile.replaced(incarnation=self.profile.incarnation + 1)
        right(self, event)

    return on_stream_opened


def hangs_are_due(right: Any) -> Any:
    def deal(self: probing.Probing, now: float, waiting: int) -> None:
        right(self, now + 1000.0, waiting)

    return deal


def busy_unheard(right: Any) -> Any:
    return lambda self, event, now: right(self, replace(event, busy=""), now)


def proven_by_one_side(right: Any) -> Any:
    return lambda self, current, session: session in current.answers


def everybody_broken_goes(right: Any) -> Any:
    def best(names: frozenset[str], parties: Any, accusations: Any) -> frozenset[str]:
        return frozenset(n for n in names if all(n not in pair for pair in accusations))

    return best


def both_must_accuse(right: Any) -> Any:
    return lambda parties, accusations: right(
        parties, {(a, b) for a, b in accusations if (b, a) in accusations}
    )


def smallest_stays(right: Any) -> Any:
    return lambda names, parties, accusations: (False, -sum(parties[n].workers for n in names))


def all_save(right: Any) -> Any:
    def tell(self: machine.Machine, node_id: str, message: sm.Message) -> None:
        right(self, node_id, replace(message, save=True) if isinstance(message, sm.Suspended) else message)

    return tell


def none_saves(right: Any) -> Any:
    def tell(self: machine.Machine, node_id: str, message: sm.Message) -> None:
        right(self, node_id, replace(message, save=False) if isinstance(message, sm.Suspended) else message)

    return tell


MUTANTS: dict[str, Mutant] = {
    "ranks by arrival": Mutant(ranks, "in_order", instead(by_arrival)),
    "two members with rank 0": Mutant(ranks, "assign", two_with_rank_0),
    "local ranks by host name": Mutant(ranks, "assign", local_ranks_by_host_name),
    "retired incarnations forgotten": Mutant(ledger.Ledger, "retirement", instead(lambda *a: None)),
    "replaced incarnations not retired": Mutant(ledger.Ledger, "_retire", instead(nothing)),
    "node id taken while the holder lives": Mutant(admission, "_check_node", instead(nothing)),
    "removals not recorded": Mutant(machine.Machine, "_commit", unrecorded(r.Removed)),
    "group established not recorded": Mutant(machine.Machine, "_commit", unrecorded(r.GroupEstablished)),
    "generations not recorded": Mutant(machine.Machine, "_commit", unrecorded(r.GenerationFormed)),
    "leave planned beside the records": Mutant(job.Job, "_plan_leave", unapplied_unless_running),
    "messages before records": Mutant(simulated, "SEND_FIRST", instead(True)),
    "no grace after a restart": Mutant(job.Job, "recover", no_grace),
    "assignment not told again": Mutant(reception.Reception, "_greet", greets_with_welcome_alone),
    "stale generations count": Mutant(job.Job, "_member_behind", of_any_generation),
    "ids and built outlive the generation": Mutant(machine.Machine, "apply", keeps_ids_and_built),
    "ids go to everybody": Mutant(machine.Machine, "_tell_members", ids_to_everybody),
    "generation number reused": Mutant(planning, "next_generation", same_number_again),
    "state from the youngest": Mutant(
        planning,
        "next_generation",
        state_from(lambda formed: max(formed.newcomer_ranks, default=formed.state_source_rank)),
    ),
    "state never handed on": Mutant(planning, "next_generation", state_from(lambda formed: -1)),
    "newcomers trusted at once": Mutant(contacts.Contacts, "stateless", instead(lambda *a: iter(()))),
    "a newcomer begins anew at the end": Mutant(planning, "choose", newcomers_may_begin_anew),
    "leavers take the state with them": Mutant(planning, "leaving_holders", instead(lambda *a: [])),
    "a leave does not wait for the hand-over": Mutant(
        planning, "is_handing_over", instead(lambda *a: False)
    ),
    "worker_min ignored": Mutant(machine.Machine, "_regroup", ignores_worker_min),
    "job always ends well": Mutant(machine.Machine, "_end", always_well),
    "lost streams ignored": Mutant(job.Job, "_session_lost", instead(nothing)),
    "its own absence unnoticed": Mutant(job.Job, "_stood_still", instead(nothing)),
    "a pause costs the place": Mutant(job.Job, "_session_lost", pauses_cost_the_place),
    "unread words count as silence": Mutant(job.Job, "_fell_behind", instead(nothing)),
    "late turns count as silence": Mutant(contacts.Contacts, "excuse", only_long_absences_count),
    "streams may not break while it is behind": Mutant(job.Job, "_fell_behind", forgives_silence_alone),
    "late turns do not add up": Mutant(job.Job, "_stood_still", late_turns_do_not_add_up),
    "silence ignored": Mutant(contacts.Contacts, "silent", instead(lambda *a: [])),
    "switch at the earliest step": Mutant(contacts.Contacts, "last_started_step", earliest_step),
    "quiesced when one has": Mutant(contacts.Contacts, "all_quiesced", quiesced_when_one_has),
    "planned change never overdue": Mutant(machine.Machine, "_switch_due", no_switch_overdue),
    "busy members end the job": Mutant(machine, "absent", instead(lambda *a: [])),
    "suspicions ignored": Mutant(job.Job, "_peer_suspected", instead(nothing)),
    "regroups for no reason": Mutant(job.Job, "_tick", regroups_at_ticks),
    "time-outs ignored": Mutant(machine.Machine, "_timed_out", instead(lambda *a: False)),
    "a message after the last one": Mutant(job.Job, "_left", speaks_after_the_end),
    "every goodbye counts as finished": Mutant(job.Job, "_left", every_goodbye_is_finished),
    "a leave told as the job's end": Mutant(machine.Machine, "_farewell", leave_as_end),
    "held-back joins forgotten": Mutant(reception.Reception, "_retry_held_back", instead(nothing)),
    "rank off by one on the wire": Mutant(
        scheduler_encode.AssignmentEncoder, "encode", rank_off_by_one
    ),
    "incarnation cut on the wire": Mutant(scheduler_decode, "_join", loses_held_generation),
    "worker publishes the ids only once": Mutant(
        membership.Membership, "_mint_or_publish", worker_publishes_once
    ),
    "cuts ignored": Mutant(probing.Probing, "_expel_unreachable", instead(lambda *a: False)),
    "all that are in a broken pair go": Mutant(reachability, "_best", everybody_broken_goes),
    "one direction is not enough": Mutant(reachability, "leaving", both_must_accuse),
    "the smallest set stays": Mutant(reachability, "_worth", smallest_stays),
    "worker_min does not hold expulsions back": Mutant(
        probing.Probing, "_may_expel", instead(lambda *a: True)
    ),
    "expelled and taken in at once": Mutant(probing.Probing, "_is_barred", instead(lambda *a: False)),
    "taken in without a probe of the members": Mutant(probing.Probing, "_is_proven", proven_by_one_side),
    "who stands still counts as cut off": Mutant(probing, "TOGETHER_S", instead(1e9)),
    "busy ranks hang": Mutant(job.Job, "_probed", busy_unheard),
    "hanging ranks go at once": Mutant(probing.Probing, "_deal_with_hangs", hangs_are_due),
    "hanging ranks never go": Mutant(probing.Probing, "_deal_with_hangs", instead(nothing)),
    "lateness untold": Mutant(membership.Membership, "_on_peers_late", instead(nothing)),
    "probes unanswered": Mutant(membership.Membership, "_on_probes_done", instead(nothing)),
    "all save at a suspension": Mutant(machine.Machine, "_tell", all_save),
    "none saves at a suspension": Mutant(machine.Machine, "_tell", none_saves),
    "worker comes back as another": Mutant(membership.Membership, "_on_stream_opened", worker_joins_as_new),
}  # fmt: skip


def hunt(name: str, limit: int) -> tuple[int, str]:
    """The first seed that catches the mutant, and what it broke; -1 if none below ``limit`` does."""
    with MUTANTS[name].planted():
        for seed in range(limit):
            try:
                told = play(seed)
            except Exception as error:  # a machine that breaks down is caught as well
                told = f"{type(error).__name__}: {error}"
            if told:
                return seed, told
    return -1, ""
