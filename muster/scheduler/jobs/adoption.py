"""Adopts a job whose workers are ahead of its journal, because the journal was lost or is a backup.

Such workers are not refused. They continue to train, and are held back until the newest journal is restored
or an operator consents (``--adopt``). With that consent, their generation is adopted once all its members
have joined and agree about it, each with a different rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from muster.scheduler.core import events, records
from muster.scheduler.core.events import Decision
from muster.scheduler.core.ledger import (
    Ledger,
    count,
    sizes,
    upper_first,
    who,
)
from muster.scheduler.core.machine import Machine as Job
from muster.scheduler.core.views import JobView
from muster.wire import messages


class AdoptingJob:
    """A job that does not put a worker back into an older generation than the worker holds.

    Args:
        job_id: the job.
        settings: its settings.
        journaled: the records of its journal.
        now: the time in seconds, on the clock of all calls.
        adopt: whether the operator has consented to adopting a generation whose members agree.

    Attributes:
        machine: the job's machine; replaced when a generation is adopted.

    Raises:
        RecoveryError: as for :meth:`Machine.recover`.
    """

    def __init__(
        self,
        job_id: str,
        settings: events.CoreSettings,
        journaled: Iterable[records.Record],
        now: float,
        *,
        adopt: bool,
    ) -> None:
        self._job_id, self._settings, self._adopt = job_id, settings, adopt
        self._records: list[records.Record] | None = list(journaled)
        self.machine = (
            Job.recover(job_id, settings, self._records, now) if self._records else Job(job_id, settings)
        )
        self._ledger = Ledger()
        self._keep(self._records)
        if not adopt and not self._ledger.generation:
            self._records = None  # Without a journaled generation and without --adopt, nobody is held back.
        self._held: dict[events.SessionId, events.Joined] = {}
        # Whether any worker was admitted with the journal's generation, even if it has finished since.
        self._anybody_came = False

    def step(self, event: events.Event, now: float, *, more: bool = False) -> Decision:
        """Like :meth:`Machine.step`; also holds back workers that are ahead, and adopts their generation."""
        if self._records is None:
            return self.machine.step(event, now, more=more)
        if isinstance(event, events.Joined) and (self._held or self._is_ahead(event)):
            self._held[event.session] = event
            return self._decide(now) or self._wait(event)
        if self._held and isinstance(event, events.Tick):
            return Decision()  # Nobody is declared lost before it is clear which generation counts.
        if isinstance(event, events.ProcessEnded) and (self._held or not self._anybody_came):
            return Decision()  # For the same reason; the report is repeated later.
        session = getattr(event, "session", None)
        if session in self._held:
            if isinstance(event, events.SessionLost | events.LeftCleanly):
                del self._held[event.session]
            if isinstance(event, events.LeftCleanly):
                return Decision((), ((event.session, messages.Ended(True, "Goodbye.")),))
            return Decision()
        decision = self.machine.step(event, now, more=more)
        self._anybody_came |= bool(self.machine.job.members.nodes)
        self._keep(decision.records)
        self._records += decision.records
        if any(isinstance(record, records.GenerationFormed) for record in decision.records):
            self._records = None  # The job has continued by itself.
        return decision

    def deadline(self) -> float | None:
        """Like :meth:`Machine.deadline`, but without a deadline while workers are held back."""
        return math.inf if self._held else self.machine.deadline()

    def overdue(self, now: float) -> Sequence[events.SessionId]:
        """Like :meth:`Machine.overdue`, but nobody is overdue while workers are held back."""
        return () if self._held else self.machine.overdue(now)

    def view(self, now: float) -> JobView:
        """Like :meth:`Machine.view`."""
        return self.machine.view(now)

    def weigh_drain(self, node_ids: Collection[str], hosts: Collection[str]) -> str:
        """Like :meth:`Machine.weigh_drain`."""
        return self.machine.weigh_drain(node_ids, hosts)

    # ------------------------------------------------------------ inside

    def _keep(self, records: Iterable[records.Record]) -> None:
        for record in records:
            self._ledger.apply(record)

    def _is_ahead(self, event: events.Joined) -> bool:
        return event.held_generation > self._ledger.generation

    def _is_current(self, event: events.Joined) -> bool:
        claim = self._ledger.claims.get(event.candidate.node_id)
        return (
            claim is not None
            and claim.candidate.incarnation == event.candidate.incarnation
            and event.held_generation == self._ledger.generation
        )

    def _wait(self, event: events.Joined) -> Decision:
        remedy = (
            "The newest generation is taken over when all its members are here and say the same."
            if self._adopt
            else "They train on unwatched. Stop the scheduler and put the newest journal back; without one,"
            " start it with --adopt, which takes over the generation that all its members hold."
        )
        newest = max(self._held.values(), key=lambda one: one.held_generation)
        sentence = (
            f"{upper_first(who(newest.candidate))} holds rank {newest.held_rank} of generation "
            f"{newest.held_generation}, and the journal ends with generation {self._ledger.generation}: it"
            f" is older than the workers. {remedy}"
        )
        times = (
            self._settings.heartbeat_interval_s,
            self._settings.node_timeout_s,
            self._settings.topo_timeout_s,
        )
        waiting = messages.Waiting(len(self._held), max(1, newest.held_world_size), sentence)
        return Decision((), ((event.session, messages.Welcome(*times)), (event.session, waiting)), sentence)

    def _decide(self, now: float) -> Decision | None:
        """Lets the workers that are held back continue, once it is clear which generation counts."""
        held = list(self._held.values())
        takeover: tuple[records.Record, ...] = ()
        if self._adopt:
            members = agreeing_members(held)
            if not members:
                return None
            takeover = tuple(self._takeover(members))
            assert self._records is not None
            known = self.machine.job.unix_offset_s
            self.machine = Job.recover(self._job_id, self._settings, [*self._records, *takeover], now)
            self.machine.job.unix_offset_s = known
        elif sum(map(self._is_current, held)) <= sum(map(self._is_ahead, held)):
            return None
        self._records, self._held = None, {}
        steps = [self.machine.step(event, now) for event in held]
        reasons = [record.reason for record in takeover if isinstance(record, records.GenerationFormed)]
        return Decision(
            takeover + tuple(record for step in steps for record in step.records),
            tuple(message for step in steps for message in step.messages),
            " ".join([*reasons, *(step.reason for step in steps if step.reason)]),
        )

    def _takeover(self, held: Sequence[events.Joined]) -> Iterable[records.Record]:
        """Yields the records of the generation that the workers hold and the journal lacks."""
        incarnations = {event.candidate.node_id: event.candidate.incarnation for event in held}
        if self._ledger.opened is None:
            yield records.JobOpened(self._job_id, *sizes(self._settings, held[0].candidate))
        for claim in self._ledger.claims.values():
            node_id, incarnation = claim.candidate.node_id, claim.candidate.incarnation
            if incarnations.get(node_id) == incarnation:
                del incarnations[node_id]
            else:
                yield records.Removed(node_id, incarnation, "not in the generation that was adopted")
        for event in held:
            if event.candidate.node_id in incarnations:
                yield records.Admitted(event.candidate)
        hosts = [event.candidate.host.id for event in held]
        members = tuple(
            records.Placed(rank, hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank]), event.candidate)
            for rank, event in enumerate(held)
        )
        generation = held[0].held_generation
        reason = f"Generation {generation} of {count(len(held), 'member')} is adopted, as --adopt says."
        yield records.GenerationFormed(generation, members, -1, (), reason)
        if all(event.built for event in held):
            yield records.GroupEstablished(generation)


def agreeing_members(held: Sequence[events.Joined]) -> list[events.Joined]:
    """Returns the members of the newest generation by rank if all have joined and agree; otherwise none."""
    generation = max(event.held_generation for event in held)
    members = sorted(
        (event for event in held if event.held_generation == generation), key=lambda one: one.held_rank
    )
    ranks = [event.held_rank for event in members]
    sizes = {event.held_world_size for event in members}
    nodes = {event.candidate.node_id for event in members}
    agree = ranks == list(range(len(members))) and sizes == {len(members)} and len(nodes) == len(members)
    return members if agree else []
