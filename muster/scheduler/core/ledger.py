"""The durable state of a job, the one function that changes it, and the rules that assign ranks.

A :class:`Ledger` is the result of applying a job's records in order. The running machine and recovery both
use :meth:`Ledger.apply`; nothing else writes here. The members of the next generation are computed from it by
a pure function.

Ranks never follow the order of arrival. The first rule that applies holds for the whole generation:

1. a rank table: ranks follow the table;
2. all node ids are integers in range: ranks follow the ids (they *are* the ranks in a full job);
3. topology: hosts by label and name in natural order, the workers of a host by device index, so that the
   ranks of one host are contiguous, hosts with one label are neighbours, and local ranks follow device
   indexes. The PCI bus id decides only between equal indexes, then the launcher's index, then the node id.
"""

from __future__ import annotations

import enum
import functools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar

from muster.scheduler.core import events, records
from muster.wire import messages
from muster.wire.rank_table import RankTable, RankTableEntry

T = TypeVar("T")
NaturalKey = tuple[tuple[int, int, str, str], ...]
Place = tuple[bool, NaturalKey, NaturalKey]

LONGEST_KEPT = 48
"""The longest name, in characters, whose sort key is cached."""

_INTEGER = re.compile(r"0|[1-9][0-9]{0,8}")
_NUMBER = re.compile(r"([0-9]+)")


class Phase(enum.Enum):
    """The phase of a job; ``status`` shows the value."""

    FORMING = "forming"
    BUILDING = "building"
    RUNNING = "running"
    QUIESCING = "quiescing"
    SUSPENDED = "suspended"
    ENDED = "ended"


@dataclass(slots=True)
class Claim:
    """One admitted worker process.

    Attributes:
        candidate: what its Join said.
        since: the first generation of its present unbroken membership; 0 if it has never been a member.
        newcomer: whether it had to take the state from a survivor when its last generation was formed.
        leaving: why it will leave at the next step boundary; None if it stays.
    """

    candidate: messages.Candidate
    since: int = 0
    newcomer: bool = False
    leaving: str | None = None


@dataclass
class Ledger:
    """The durable state of one job.

    Attributes:
        claims: admitted worker processes by node id.
        retired: incarnations that may not return, with the reason, by node id.
        absent: incarnations that left before they were members, and may return, by node id.
        completed: worker processes that completed the training.
        lost: members of the current generation that are gone and had not finished, with the reason.
        parted: those of the lost that left as planned, while the job was suspended or before they had made a
            step.
        arriving: those of the lost that were not members of any earlier generation, so that nobody had
            computed with them.
        finished: node ids of the current generation that completed the training.
        stood: the last established generation; its members compute in it until a planned switch is made.
        launch: incarnation of the worker that was admitted first. It identifies this launch of the job, also
            after a restart.
        finishing: some member has completed the training, so that no new worker gets a place.
        leaving: node ids of claims that will leave.
        unplaced: node ids of claims without a rank in the newest generation.
        spares: node ids of claims whose worker came as a spare.
        at: node ids of claims, in order, by host (name, address or id) and index of the device.
        drains: drains planned for later, by number.
        refused_gpus: GPUs that have failed a check and have not been admitted since, by name.

    The four attributes before ``drains`` can be derived from claims and ranks. They are kept so that no event
    has to go through all claims.
    """

    opened: records.JobOpened | None = None
    claims: dict[str, Claim] = field(default_factory=dict)
    retired: dict[str, dict[int, str]] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)
    formed: records.GenerationFormed | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    completed: set[tuple[str, int]] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    parted: set[str] = field(default_factory=set)
    arriving: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    launch: int = 0
    finishing: bool = False
    established: bool = False
    stood: int = 0
    suspended: str | None = None
    outcome: records.JobEnded | None = None
    leaving: set[str] = field(default_factory=set)
    unplaced: set[str] = field(default_factory=set)
    spares: set[str] = field(default_factory=set)
    at: dict[tuple[str, int], dict[str, None]] = field(default_factory=dict)
    drains: dict[int, records.DrainPlanned] = field(default_factory=dict)
    refused_gpus: dict[str, records.GpuRefused] = field(default_factory=dict)

    # ------------------------------------------------------------ questions

    @property
    def phase(self) -> Phase:
        """The phase according to the records (a change in preparation is not recorded)."""
        if self.outcome is not None:
            return Phase.ENDED
        if self.formed is None:
            return Phase.FORMING
        if self.suspended is not None:
            return Phase.SUSPENDED
        return Phase.RUNNING if self.established else Phase.BUILDING

    @property
    def generation(self) -> int:
        """Number of the newest generation; 0 before the first."""
        return self.formed.generation if self.formed is not None else 0

    @property
    def ever_established(self) -> bool:
        """Whether any generation was ever established, so that there may be training state to hand over."""
        return self.stood > 0

    def rank_of(self, node_id: str) -> int:
        """Rank of a living member of the newest generation; -1 for everybody else."""
        if node_id not in self.claims or node_id in self.lost or node_id in self.finished:
            return -1
        return self.ranks.get(node_id, -1)

    def living_members(self) -> Iterator[Claim]:
        """The members of the newest generation that are neither lost nor finished, by rank."""
        if self.formed is None:
            return
        for member in self.formed.members:
            if self.rank_of(member.candidate.node_id) >= 0:
                yield self.claims[member.candidate.node_id]

    @property
    def living(self) -> int:
        """Number of members of the newest generation that are neither lost nor finished."""
        return len(self.claims) - len(self.unplaced)

    def staying(self) -> Iterator[Claim]:
        """The claims that are not about to leave."""
        return (claim for claim in self.claims.values() if claim.leaving is None)

    def leaving_members(self) -> list[Claim]:
        """The living members that are to leave, by rank."""
        leave = self.leaving - self.unplaced
        return [self.claims[node_id] for node_id in sorted(leave, key=self.ranks.__getitem__)]

    def is_spare(self, claim: Claim) -> bool:
        """Whether this worker came as a spare and holds no place."""
        return claim.candidate.spare and self.rank_of(claim.candidate.node_id) < 0

    def waits_as_spare(self, claim: Claim) -> bool:
        """Whether this worker holds no place, and came as a spare or finds all places taken."""
        assert self.opened is not None
        if self.rank_of(claim.candidate.node_id) >= 0:
            return False
        return claim.candidate.spare or self.living >= self.opened.worker_num

    def retirement(self, node_id: str, incarnation: int) -> str | None:
        """Why this worker process may not return; None if it may."""
        return self.retired.get(node_id, {}).get(incarnation)

    def snapshot(self) -> records.Snapshot:
        """Returns a record that gives this ledger if applied to an empty one; the job must not have ended."""
        return records.Snapshot(
            opened=_maybe(self.opened),
            claims=tuple(
                records.Holder(one.candidate, one.since, one.newcomer, _maybe(one.leaving))
                for one in self.claims.values()
            ),
            retired=tuple(
                records.Process(node_id, incarnation, reason)
                for node_id, processes in self.retired.items()
                for incarnation, reason in processes.items()
            ),
            absent=tuple(
                records.Process(node_id, incarnation) for node_id, incarnation in self.absent.items()
            ),
            formed=_maybe(self.formed),
            completed=tuple(records.Process(*each) for each in sorted(self.completed)),
            lost=tuple(self.lost.items()),
            parted=tuple(sorted(self.parted)),
            arriving=tuple(sorted(self.arriving)),
            finished=tuple(sorted(self.finished)),
            launch=self.launch,
            finishing=self.finishing,
            established=self.established,
            stood=self.stood,
            suspended=_maybe(self.suspended),
            drains=tuple(self.drains.values()),
            refused_gpus=tuple(self.refused_gpus.values()),
        )

    # ------------------------------------------------------------ the next generation

    def choose(
        self, settings: events.CoreSettings, stateless: Collection[str] = frozenset()
    ) -> list[messages.Candidate]:
        """Members of the next generation in order of rank, at most ``worker_num``.

        Survivors come first, then workers that wait for a place, then spares. Among equals the rule of ranks
        decides, never the order of arrival. Once the job is finishing, only survivors that hold the state are
        chosen: a newcomer without it would start the training from the beginning.

        If none of them holds the state but a leaving member does, the longest-lived such member stays for one
        more generation, together with at least one worker that takes the state from it.
        """
        assert self.opened is not None
        worker_num = self.opened.worker_num
        table = settings.rank_table
        limit = worker_num + settings.spares

        def ordered(claims: Iterable[Claim]) -> list[messages.Candidate]:
            return in_order((claim.candidate for claim in claims), limit=limit, table=table)

        survivors = [claim for claim in self.living_members() if claim.leaving is None]
        if self.finishing:
            survivors = [claim for claim in survivors if claim.candidate.node_id not in stateless]
            return ordered(survivors)
        others = [claim for claim in self.staying() if self.rank_of(claim.candidate.node_id) < 0]
        spares = [claim for claim in others if self.is_spare(claim)]
        ready = [claim for claim in others if not self.is_spare(claim)]
        queue = ordered(ready) + ordered(spares)
        chosen = _filled(ordered(survivors), queue, worker_num, table)
        if not any(self.holds_state(claim.candidate.node_id, stateless) for claim in survivors):
            for giver in self.leaving_holders(stateless):
                group = _filled(ordered([*survivors, giver]), queue, max(worker_num, 2), table)
                if len(group) > 1:
                    chosen = group
                    break
        return in_order(chosen, limit=limit, table=table)

    def leaving_holders(self, stateless: Collection[str]) -> list[Claim]:
        """The members that are leaving and hold the training state, the longest-lived first."""
        holders = [claim for claim in self.leaving_members() if claim.candidate.node_id not in stateless]
        if not self.ever_established:
            return []
        # The sort is stable: among equals, the lower rank comes first.
        return sorted(holders, key=lambda claim: claim.since)

    def is_handing_over(self, stateless: Set[str]) -> bool:
        """Whether leaving members still hold a state that none of the staying workers is known to have.

        Args:
            stateless: node ids of the living newcomers that are not known to have received the state.
        """
        if self.finishing or not self.leaving or not self.ever_established:
            return False
        leave = self.leaving - self.unplaced
        stay = self.living - len(leave)
        return not leave <= stateless and 0 < stay == len(stateless) - len(stateless & leave)

    def holds_state(self, node_id: str, stateless: Collection[str]) -> bool:
        """Whether a worker holds the training state: it was a member, and is not known to lack the state."""
        return self.ever_established and self.claims[node_id].since > 0 and node_id not in stateless

    def next_generation(
        self,
        chosen: list[messages.Candidate],
        *,
        stateless: Collection[str],
        reason: str,
        switch_after_step: int,
    ) -> records.GenerationFormed:
        """Makes the record of the next generation.

        Args:
            chosen: its members in order of rank.
            stateless: node ids of newcomers that are not known to have received the state.
            reason: why it is formed.
            switch_after_step: see :class:`~muster.wire.messages.Assignment`.
        """
        members = assign(chosen)
        keepers = [
            (self.claims[member.candidate.node_id].since, member.rank)
            for member in members
            if self.holds_state(member.candidate.node_id, stateless)
        ]
        source = min(keepers)[1] if keepers else -1
        has_state = {rank for _, rank in keepers}
        newcomers = tuple(each.rank for each in members if each.rank not in has_state) if keepers else ()
        return records.GenerationFormed(
            generation=self.generation + 1,
            members=members,
            state_source_rank=source,
            newcomer_ranks=newcomers,
            reason=reason,
            switch_after_step=switch_after_step,
        )

    def wanted_change(self, settings: events.CoreSettings) -> str | None:
        """Why the members of a running job should change at a step boundary; None if they should not."""
        leaving = self.leaving_members()
        if leaving:
            return "; ".join(f"node {c.candidate.node_id} leaves: {c.leaving}" for c in leaving)
        assert self.opened is not None
        if self.finishing or len(self.ranks) >= self.opened.worker_num or self.unplaced <= self.leaving:
            return None
        joining = [c for c in self.choose(settings) if self.rank_of(c.node_id) < 0]
        if not joining:
            return None
        return f"node {', '.join(candidate.node_id for candidate in joining)} joins"

    # ------------------------------------------------------------ the one writer

    def apply(self, record: records.Record) -> None:
        """Applies one record. Records are applied in the order in which they were made."""
        if isinstance(record, records.JobOpened):
            self.opened = record
        elif isinstance(record, records.Admitted):
            self.launch = self.launch or record.candidate.incarnation
            self._admit(record.candidate)
        elif isinstance(record, records.LeavePlanned):
            self.claims[record.node_id].leaving = record.reason
            self.leaving.add(record.node_id)
        elif isinstance(record, records.DrainPlanned):
            self.drains[record.number] = record
        elif isinstance(record, records.DrainOver):
            del self.drains[record.number]
        elif isinstance(record, records.GpuRefused):
            self.refused_gpus[record.gpu] = record
        elif isinstance(record, records.GpuAdmitted):
            del self.refused_gpus[record.gpu]
        elif isinstance(record, records.Removed):
            self._remove(record)
        elif isinstance(record, records.GenerationFormed):
            self._form(record)
        elif isinstance(record, records.GroupEstablished):
            self.established = True
            self.stood = record.generation
        elif isinstance(record, records.GenerationEnded):
            self.suspended = record.reason
            self.established = False
        elif isinstance(record, records.Snapshot):
            self._restore(record)
        else:
            self.outcome = record

    def _admit(self, candidate: messages.Candidate) -> None:
        node_id = candidate.node_id
        before = self.absent.pop(node_id, candidate.incarnation)
        if before != candidate.incarnation:
            self.retire(node_id, before, "a newer process has taken its node id")
        self._take(Claim(candidate))

    def _take(self, claim: Claim) -> None:
        node_id = claim.candidate.node_id
        self.claims[node_id] = claim
        if claim.leaving is not None:
            self.leaving.add(node_id)
        if self.rank_of(node_id) < 0:
            self.unplaced.add(node_id)
        if claim.candidate.spare:
            self.spares.add(node_id)
        for place in places(claim.candidate):
            self.at.setdefault(place, {})[node_id] = None

    def _give_up(self, node_id: str) -> Claim:
        claim = self.claims.pop(node_id)
        for index in (self.leaving, self.unplaced, self.spares):
            index.discard(node_id)
        for place in places(claim.candidate):
            here = self.at[place]
            del here[node_id]
            if not here:
                del self.at[place]
        return claim

    def _remove(self, record: records.Removed) -> None:
        claim = self._give_up(record.node_id)
        if claim.since:
            self.retire(record.node_id, record.incarnation, record.reason)
        else:
            self.absent[record.node_id] = record.incarnation
        if record.node_id in self.ranks:
            if record.finished:
                self.finished.add(record.node_id)
                self.completed.add((record.node_id, record.incarnation))
                self.finishing = True
            else:
                self.lost[record.node_id] = record.reason
                arriving = claim.since == self.generation and not self.established
                if arriving:
                    self.arriving.add(record.node_id)
                if claim.leaving is not None and (arriving or self.suspended is not None):
                    self.parted.add(record.node_id)

    def retire(self, node_id: str, incarnation: int, reason: str) -> None:
        """Records that this process may not return."""
        self.retired.setdefault(node_id, {})[incarnation] = reason

    def _form(self, record: records.GenerationFormed) -> None:
        self.formed = record
        self.ranks = {member.candidate.node_id: member.rank for member in record.members}
        self.lost = {}
        self.parted = set()
        self.arriving = set()
        self.finished = set()
        self.established = False
        self.suspended = None
        self.unplaced = self.claims.keys() - self.ranks.keys()
        newcomers = set(record.newcomer_ranks)
        for member in record.members:
            claim = self.claims[member.candidate.node_id]
            claim.since = claim.since or record.generation
            claim.newcomer = member.rank in newcomers

    def _restore(self, kept: records.Snapshot) -> None:
        self.opened = next(iter(kept.opened), None)
        for each in kept.retired:
            self.retired.setdefault(each.node_id, {})[each.incarnation] = each.reason
        self.absent = {each.node_id: each.incarnation for each in kept.absent}
        self.formed = next(iter(kept.formed), None)
        if self.formed is not None:
            self.ranks = {member.candidate.node_id: member.rank for member in self.formed.members}
        self.completed = {(each.node_id, each.incarnation) for each in kept.completed}
        self.lost = dict(kept.lost)
        self.parted, self.arriving = set(kept.parted), set(kept.arriving)
        self.finished = set(kept.finished)
        self.launch, self.finishing = kept.launch, kept.finishing
        self.established, self.stood = kept.established, kept.stood
        self.suspended = next(iter(kept.suspended), None)
        self.drains = {plan.number: plan for plan in kept.drains}
        self.refused_gpus = {refused.gpu: refused for refused in kept.refused_gpus}
        for one in kept.claims:
            self._take(Claim(one.candidate, one.since, one.newcomer, next(iter(one.leaving), None)))


def _maybe(value: T | None) -> tuple[T, ...]:
    return () if value is None else (value,)


def _filled(
    chosen: list[messages.Candidate],
    queue: list[messages.Candidate],
    worker_num: int,
    table: RankTable | None,
) -> list[messages.Candidate]:
    """Adds workers from the queue while there are places; with a rank table, only on free lines of it."""
    filled = list(chosen)
    taken = {table_entry(table, candidate) for candidate in chosen} if table is not None else set()
    for candidate in queue:
        if len(filled) >= worker_num:
            break
        if table is not None:
            entry = table_entry(table, candidate)
            if entry in taken:
                continue
            taken.add(entry)
        filled.append(candidate)
    return filled


def early_end(ledger: Ledger) -> str:
    """Says which members have finished while others still need them; empty if none has."""
    members = ledger.formed.members if ledger.formed is not None else ()
    gone = [members[rank] for rank in sorted(ledger.ranks[node_id] for node_id in ledger.finished)]
    if not gone:
        return ""
    one = len(gone) == 1
    why = "it had fewer batches, or its script has ended early"
    if not one:
        why = "they had fewer batches, or their scripts have ended early"
    names = listing([who(each.candidate, each.rank) for each in gone])
    return f"{names} {'has' if one else 'have'} finished, while others still wait: {why}"


def sizes(settings: events.CoreSettings, candidate: messages.Candidate) -> tuple[int, int]:
    """Returns ``worker_num`` and ``worker_min`` of a job that this worker opens.

    0 in the settings means that the worker decides.
    """
    table_size = len(settings.rank_table.entries) if settings.rank_table is not None else 0
    worker_num = settings.worker_num or table_size or candidate.worker_num
    worker_min = settings.worker_min
    if not worker_min and not settings.worker_num:
        worker_min = candidate.worker_min
    return worker_num, min(worker_min or worker_num, worker_num)


# ---------------------------------------------------------------- the order of ranks


def natural_key(text: str) -> NaturalKey:
    """Sort key under which ``node2`` comes before ``node10``.

    Different strings have different keys ("01" and "1" too).
    """
    return _kept_key(text) if len(text) <= LONGEST_KEPT else _key(text)


def _key(text: str) -> NaturalKey:
    key = []
    for index, part in enumerate(_NUMBER.split(text)):
        # The odd parts are the pattern's group: digits. They are compared as numbers of any length, without
        # int().
        if index % 2:
            digits = part.lstrip("0")
            key.append((1, len(digits), digits, part))
        elif part:
            key.append((0, 0, part, part))
    return tuple(key)


_kept_key = functools.lru_cache(maxsize=1 << 14)(_key)
"""The sort keys of recently used names. Only a limited number of short names is cached, to bound memory."""


def integer_id(node_id: str) -> int | None:
    """Returns the rank that a node id denotes if it is a plain decimal integer (no sign, no leading zero)."""
    return int(node_id) if _INTEGER.fullmatch(node_id) else None


def all_integers(node_ids: Iterable[str], limit: int) -> bool:
    """Whether every node id is an integer in [0, limit)."""
    numbers = [integer_id(node_id) for node_id in node_ids]
    return all(number is not None and number < limit for number in numbers)


def places(candidate: messages.Candidate) -> tuple[tuple[str, int], ...]:
    """The names under which a rank table may list a worker's host (address, name, id), with its device."""
    host = candidate.host
    names = dict.fromkeys((host.address, host.name, host.id))
    return tuple((name, device_index(candidate)) for name in names)


def table_entry(table: RankTable, candidate: messages.Candidate) -> RankTableEntry | None:
    """Finds the line of the rank table that belongs to this worker."""
    ranks = [table.rank_at[place] for place in places(candidate) if place in table.rank_at]
    return table.entries[min(ranks)] if ranks else None


def device_index(candidate: messages.Candidate) -> int:
    """The index of the worker's device; if it has not chosen one, the worker's own index on its host."""
    return candidate.device.index if candidate.device.index >= 0 else candidate.local_index


def in_order(
    candidates: Iterable[messages.Candidate], *, limit: int, table: RankTable | None
) -> list[messages.Candidate]:
    """The candidates in order of rank.

    Args:
        candidates: workers with distinct node ids; with a rank table, each has a line of its own.
        limit: integer node ids count as ranks if all are below it.
        table: the job's rank table.
    """
    pool = list(candidates)
    if table is not None:
        return sorted(pool, key=lambda candidate: _table_rank(table, candidate))
    if all_integers((candidate.node_id for candidate in pool), limit):
        return sorted(pool, key=lambda candidate: int(candidate.node_id))
    places = _places(pool)
    return sorted(pool, key=lambda candidate: _topology_key(candidate, places[candidate.host.id]))


def assign(ordered: Sequence[messages.Candidate]) -> tuple[records.Placed, ...]:
    """Assigns ranks from 0 without gaps; local ranks count within one host *id*, whatever the host's name."""
    sizes = Counter(candidate.host.id for candidate in ordered)
    seen: Counter[str] = Counter()
    members = []
    for rank, candidate in enumerate(ordered):
        host_id = candidate.host.id
        members.append(records.Placed(rank, seen[host_id], sizes[host_id], candidate))
        seen[host_id] += 1
    return tuple(members)


def _table_rank(table: RankTable, candidate: messages.Candidate) -> int:
    entry = table_entry(table, candidate)
    return entry.rank if entry is not None else len(table.entries)


def _places(pool: Iterable[messages.Candidate]) -> dict[str, Place]:
    """Gives each host id one place: its workers stay together even if they report different labels or names.

    The smallest label is used; a host has no label only if none of its workers has one.
    """
    places: dict[str, Place] = {}
    for host in (candidate.host for candidate in pool):
        reported = _reported_place(host)
        places[host.id] = min(reported, places.get(host.id, reported))
    return places


def _reported_place(host: messages.Host) -> Place:
    return not host.topology, natural_key(host.topology), natural_key(host.name)


def _topology_key(
    candidate: messages.Candidate, place: Place
) -> tuple[NaturalKey, NaturalKey, str, int, str, int, NaturalKey]:
    device = candidate.device
    _, label, name = place
    return (
        label,
        name,
        candidate.host.id,
        device.index,
        device.pci_bus_id,
        candidate.local_index,
        natural_key(candidate.node_id),
    )


# ---------------------------------------------------------------- workers in words

LISTED_AT_MOST = 16
STATELESS = (
    "no member is known to hold the training state: without one it starts from a checkpoint"
    " or from the beginning"
)


def who(candidate: messages.Candidate, rank: int = -1) -> str:
    """A worker's name for messages: rank if it has one, node id, host, device."""
    device = f", {candidate.device.kind}:{candidate.device.index}" if candidate.device.index >= 0 else ""
    place = f"node {candidate.node_id} on host {candidate.host.name}{device}"
    return f"rank {rank} ({place})" if rank >= 0 else place


def upper_first(text: str) -> str:
    """The text with a capital first letter; the rest is unchanged, because it may contain node ids."""
    return text[:1].upper() + text[1:]


def named_first(candidate: messages.Candidate, rank: int = -1) -> str:
    """A worker's name as the first words of a sentence."""
    return upper_first(who(candidate, rank))


def listing(items: Sequence[str]) -> str:
    """Joins the items with commas; a long list is cut and ends with the number of remaining items."""
    if len(items) <= LISTED_AT_MOST:
        return ", ".join(items)
    return f"{', '.join(items[:LISTED_AT_MOST])} and {len(items) - LISTED_AT_MOST} more"


def nodes(candidates: Iterable[messages.Candidate]) -> str:
    """Node ids in natural order."""
    return listing(sorted((candidate.node_id for candidate in candidates), key=natural_key))


def count(number: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def are_in(number: int) -> str:
    """``1 worker is in``, ``2 workers are in``."""
    return f"{count(number, 'worker')} {'is' if number == 1 else 'are'} in"


def all_in(number: int) -> str:
    """``the only worker is in``, ``all 2 workers are in``."""
    return "the only worker is in" if number == 1 else f"all {are_in(number)}"


def missing(
    candidates: Sequence[messages.Candidate], needed: int, table: RankTable | None
) -> tuple[str, ...]:
    """Names the missing workers: as lines of the rank table, as integer node ids, or as a number.

    Args:
        candidates: the workers that are there.
        needed: how many there should be.
        table: the job's rank table.
    """
    if table is not None:
        filled = {table_entry(table, candidate) for candidate in candidates}
        return tuple(
            f"host {entry.server_id} device {entry.device_index} (rank {entry.rank})"
            for entry in table.entries
            if entry not in filled
        )
    absent = needed - len(candidates)
    if absent <= 0:
        return ()
    present = {candidate.node_id for candidate in candidates}
    if present and all_integers(present, needed):
        return tuple(f"node {number}" for number in range(needed) if str(number) not in present)
    return (count(absent, "worker"),)


def waiting(candidates: Sequence[messages.Candidate], needed: int, table: RankTable | None) -> str:
    """Formats ``2 of 4 workers are in: ...; missing: ...``."""
    if not needed:
        return "no worker has come yet"
    absent = missing(candidates, needed, table)
    present = f"{len(candidates)} of {count(needed, 'worker')} {'is' if len(candidates) == 1 else 'are'} in"
    there = f": {nodes(candidates)}" if candidates else ""
    return f"{present}{there}; missing: {listing(absent) or 'nobody'}"
