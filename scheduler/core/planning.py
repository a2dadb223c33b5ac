"""Who makes up the next generation, and whose state it starts from. Pure questions to the ledger."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from muster.scheduler.core import messages as v
from muster.scheduler.core import ranks
from muster.scheduler.core import records as r
from muster.scheduler.core.admission import is_spare, staying
from muster.scheduler.core.ledger import Claim, Ledger


def choose(
    ledger: Ledger, settings: v.Settings, stateless: Collection[str] = frozenset()
) -> list[v.Candidate]:
    """Members of the next generation in order of rank, at most ``worker_num``.

    Survivors come first, then workers that wait for a place, then spares. Among equals the rule of ranks
    decides, never the order of arrival. Once the job is finishing, only survivors that hold the state go
    on: a newcomer without it would begin the training anew.

    Where none of them holds the state and a member that leaves does, the longest-lived such member stays
    for one more generation, with room for at least one that takes the state from it.
    """
    assert ledger.opened is not None
    worker_num = ledger.opened.worker_num
    table = settings.rank_table
    limit = worker_num + settings.spares

    def ordered(claims: Iterable[Claim]) -> list[v.Candidate]:
        return ranks.in_order((claim.candidate for claim in claims), limit=limit, table=table)

    survivors = [claim for claim in ledger.living_members() if claim.leaving is None]
    if ledger.finishing:
        survivors = [claim for claim in survivors if claim.candidate.node_id not in stateless]
        return ordered(survivors)
    others = [claim for claim in staying(ledger) if ledger.rank_of(claim.candidate.node_id) < 0]
    spares = [claim for claim in others if is_spare(ledger, claim)]
    ready = [claim for claim in others if not is_spare(ledger, claim)]
    queue = ordered(ready) + ordered(spares)
    chosen = _filled(ordered(survivors), queue, worker_num, table)
    if not any(holds_state(ledger, claim.candidate.node_id, stateless) for claim in survivors):
        for giver in leaving_holders(ledger, stateless):
            group = _filled(ordered([*survivors, giver]), queue, max(worker_num, 2), table)
            if len(group) > 1:
                chosen = group
                break
    return ranks.in_order(chosen, limit=limit, table=table)


def leaving_holders(ledger: Ledger, stateless: Collection[str]) -> list[Claim]:
    """The members that leave and hold the state, the longest-lived first."""
    leaving = (claim for claim in ledger.living_members() if claim.leaving is not None)
    holders = [claim for claim in leaving if holds_state(ledger, claim.candidate.node_id, stateless)]
    return sorted(holders, key=lambda claim: claim.since)  # stable: among equals the lower rank


def is_handing_over(ledger: Ledger, stateless: Collection[str]) -> bool:
    """Whether members that leave still hold a state which none of those that stay is known to have."""
    if ledger.finishing or not leaving_holders(ledger, stateless):
        return False
    stay = [claim.candidate.node_id for claim in ledger.living_members() if claim.leaving is None]
    return bool(stay) and not any(holds_state(ledger, node_id, stateless) for node_id in stay)


def holds_state(ledger: Ledger, node_id: str, stateless: Collection[str]) -> bool:
    """Whether this worker was a member already, once there was a state, and is not known to lack it."""
    return ledger.ever_established and ledger.claims[node_id].since > 0 and node_id not in stateless


def next_generation(
    ledger: Ledger,
    chosen: list[v.Candidate],
    *,
    stateless: Collection[str],
    reason: str,
    switch_after_step: int,
) -> r.GenerationFormed:
    """The record of the next generation.

    Args:
        ledger: the job so far.
        chosen: its members in order of rank.
        stateless: node ids of newcomers that are not known to have received the state.
        reason: why it is formed.
        switch_after_step: see :class:`~muster.scheduler.core.messages.Assignment`.
    """
    members = ranks.assign(chosen)
    keepers = [
        (ledger.claims[member.candidate.node_id].since, member.rank)
        for member in members
        if holds_state(ledger, member.candidate.node_id, stateless)
    ]
    source = min(keepers)[1] if keepers else -1
    has_state = {rank for _, rank in keepers}
    newcomers = tuple(each.rank for each in members if each.rank not in has_state) if keepers else ()
    return r.GenerationFormed(
        generation=ledger.generation + 1,
        members=members,
        state_source_rank=source,
        newcomer_ranks=newcomers,
        reason=reason,
        switch_after_step=switch_after_step,
    )


def wanted_change(ledger: Ledger, settings: v.Settings) -> str | None:
    """Why the members of a running job should change at a step boundary; None if they should not."""
    leaving = [claim for claim in ledger.living_members() if claim.leaving is not None]
    if leaving:
        return "; ".join(f"node {c.candidate.node_id} leaves: {c.leaving}" for c in leaving)
    assert ledger.opened is not None
    if ledger.finishing or len(ledger.ranks) >= ledger.opened.worker_num:
        return None
    joining = [c for c in choose(ledger, settings) if ledger.rank_of(c.node_id) < 0]
    if not joining:
        return None
    return f"node {', '.join(candidate.node_id for candidate in joining)} joins"


def _filled(
    chosen: list[v.Candidate], queue: list[v.Candidate], worker_num: int, table: v.RankTable | None
) -> list[v.Candidate]:
    """With workers from the queue while there is room; with a rank table, only on lines that are free."""
    filled = list(chosen)
    taken = {ranks.table_entry(table, candidate) for candidate in chosen} if table is not None else set()
    for candidate in queue:
        if len(filled) >= worker_num:
            break
        if table is not None:
            entry = ranks.table_entry(table, candidate)
            if entry in taken:
                continue
            taken.add(entry)
        filled.append(candidate)
    return filled
