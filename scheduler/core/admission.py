"""Who may have a place: every reason for which a Join is refused, in words.

Pure questions to the ledger; nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Iterator

from muster.scheduler.core import events as e
from muster.scheduler.core import messages as m
from muster.scheduler.core import messages as v
from muster.scheduler.core.ledger import Claim, Ledger
from muster.scheduler.core.ranks import fills, table_entry
from muster.scheduler.core.wording import count, upper_first, who

SOFT = "~"
"""Begins the name of a fact whose difference is worth a warning and no more."""

UNSET = "(unset)"


def sizes(settings: v.Settings, candidate: v.Candidate) -> tuple[int, int]:
    """``worker_num`` and ``worker_min`` of a job that this worker opens; 0 in the settings leaves it free."""
    table_size = len(settings.rank_table.entries) if settings.rank_table is not None else 0
    worker_num = settings.worker_num or table_size or candidate.worker_num
    worker_min = settings.worker_min
    if not worker_min and not settings.worker_num:
        worker_min = candidate.worker_min
    return worker_num, min(worker_min or worker_num, worker_num)


def check_process(ledger: Ledger, event: e.Joined) -> m.Refused | m.Ended | None:
    """Whether this very process may (still) have a place, whatever the job needs; None if it may."""
    candidate = event.candidate
    if (candidate.node_id, candidate.incarnation) in ledger.completed:
        return m.Ended(True, f"{upper_first(who(candidate))} has completed the training.")
    if ledger.outcome is not None and (event.held_generation > 0 or _holds(ledger, candidate)):
        return m.Ended(ledger.outcome.ok, ledger.outcome.reason)  # also to a spare that was away at the end
    retirement = ledger.retirement(candidate.node_id, candidate.incarnation)
    if retirement is not None:
        return m.Refused(
            m.RefusalCode.SUPERSEDED,
            f"This process of {who(candidate)} has lost its place for good: {retirement}. "
            "Join again under a new incarnation to get a new place.",
        )
    if ledger.outcome is not None:
        return m.Refused(
            m.RefusalCode.JOB_ENDED,
            f"The job has ended: {ledger.outcome.reason} {upper_first(who(candidate))} came too late; "
            "start the job anew, or under another MS_JOB_ID.",
        )
    if event.held_generation > 0 and not _holds(ledger, candidate):
        return m.Refused(m.RefusalCode.SUPERSEDED, _unknown_place(ledger, event))
    return None


def check_place(ledger: Ledger, settings: v.Settings, candidate: v.Candidate) -> m.Refused | None:
    """Whether the job has a place for this new process."""
    return (
        _check_sizes(ledger, settings, candidate)
        or _check_agreement(ledger, candidate)
        or _check_node(ledger, candidate)
        or _check_table(ledger, settings, candidate)
        or _check_room(ledger, settings, candidate)
    )


def is_spare(ledger: Ledger, claim: Claim) -> bool:
    """Whether this worker came as a spare and holds no place."""
    return claim.candidate.spare and ledger.rank_of(claim.candidate.node_id) < 0


def staying(ledger: Ledger) -> Iterator[Claim]:
    """The claims that are not about to leave."""
    return (claim for claim in ledger.claims.values() if claim.leaving is None)


def _holds(ledger: Ledger, candidate: v.Candidate) -> bool:
    claim = ledger.claims.get(candidate.node_id)
    return claim is not None and claim.candidate.incarnation == candidate.incarnation


def _unknown_place(ledger: Ledger, event: e.Joined) -> str:
    held = f"rank {event.held_rank} of generation {event.held_generation}"
    if event.held_generation > ledger.generation:
        return (
            f"{upper_first(who(event.candidate))} says it holds {held}, but this scheduler knows no "
            f"generation after {ledger.generation}: it was started without the journal of the job. "
            "Set MS_ENABLE_RECOVERY and MS_RECOVERY_PATH, and start the workers again."
        )
    return (
        f"{upper_first(who(event.candidate))} says it holds {held}, but this process has no place in the "
        f"job, which is in generation {ledger.generation}. Join again under a new incarnation to get a "
        "new place."
    )


def _check_sizes(ledger: Ledger, settings: v.Settings, candidate: v.Candidate) -> m.Refused | None:
    if not candidate.node_id:
        return m.Refused(m.RefusalCode.MALFORMED, "The node id is empty; set MS_NODE_ID.")
    if candidate.worker_num < 1 or not 0 <= candidate.worker_min <= candidate.worker_num:
        return m.Refused(
            m.RefusalCode.MALFORMED,
            f"{upper_first(who(candidate))} has MS_WORKER_NUM={candidate.worker_num} and "
            f"MS_WORKER_MIN={candidate.worker_min}; 1 <= MS_WORKER_MIN <= MS_WORKER_NUM must hold.",
        )
    opened = ledger.opened
    num, least = (opened.worker_num, opened.worker_min) if opened else sizes(settings, candidate)
    if candidate.worker_num != num:
        return _differs(candidate, "MS_WORKER_NUM", str(candidate.worker_num), str(num), "the job")
    if candidate.worker_min not in (0, least):
        return _differs(candidate, "MS_WORKER_MIN", str(candidate.worker_min), str(least), "the job")
    return None


def _check_agreement(ledger: Ledger, candidate: v.Candidate) -> m.Refused | None:
    other = next(iter(ledger.claims.values()), None)
    if other is None:
        return None
    peer = other.candidate
    if candidate.backend != peer.backend:
        return _differs(candidate, "backend", candidate.backend, peer.backend, who(peer))
    for key, mine, theirs in _differences(candidate, peer):
        if not key.startswith(SOFT):
            return _differs(candidate, key, mine, theirs, who(peer))
    return None


def remarks(ledger: Ledger, candidate: v.Candidate) -> Iterator[tuple[str, str]]:
    """What is odd about a worker beside the others, but no reason to refuse it.

    Yields:
        What it is about, and a sentence.
    """
    peer = next(iter(ledger.claims.values())).candidate
    differences = _differences(candidate, peer)
    found = [(key.removeprefix(SOFT), *values) for key, *values in differences if key.startswith(SOFT)]
    if candidate.device.model != peer.device.model:
        found.append(("GPU model", candidate.device.model or UNSET, peer.device.model or UNSET))
    for name, mine, theirs in found:
        sentence = f"{upper_first(who(candidate))} has {name} {mine}, but {who(peer)} has {theirs}."
        yield name, sentence


def _differences(candidate: v.Candidate, peer: v.Candidate) -> list[tuple[str, str, str]]:
    if candidate.facts == peer.facts:
        return []
    mine, theirs = dict(candidate.facts), dict(peer.facts)
    return [
        (key, mine.get(key, UNSET), theirs.get(key, UNSET))
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key)
    ]


def _differs(candidate: v.Candidate, name: str, mine: str, theirs: str, owner: str) -> m.Refused:
    return m.Refused(
        m.RefusalCode.SETTINGS_DIFFER,
        f"{upper_first(who(candidate))} has {name}={mine}, but {owner} has {name}={theirs}; "
        "make it the same everywhere.",
    )


def _check_node(ledger: Ledger, candidate: v.Candidate) -> m.Refused | None:
    holder = ledger.claims.get(candidate.node_id)
    if holder is None:
        return None
    return m.Refused(
        m.RefusalCode.NODE_ID_TAKEN,
        f"Node id {candidate.node_id} of the worker on host {candidate.host.name} is held by a living "
        f"process on host {holder.candidate.host.name}; give each worker an MS_NODE_ID of its own, "
        "or end the other process first.",
    )


def _check_table(ledger: Ledger, settings: v.Settings, candidate: v.Candidate) -> m.Refused | None:
    table = settings.rank_table
    if table is None:
        return None
    entry = table_entry(table, candidate)
    host, device = candidate.host, candidate.device
    index = device.index if device.index >= 0 else candidate.local_index
    if entry is None:
        device_words = f"device {index}" if index >= 0 else "no device: DEVICE_ID is not set"
        return m.Refused(
            m.RefusalCode.NOT_IN_RANK_TABLE,
            f"{upper_first(who(candidate))} (address {host.address}, {device_words}) is not in the rank "
            "table; add its server_id and device_id to RANK_TABLE_FILE, or start it on a listed device.",
        )
    for claim in staying(ledger):
        if not claim.candidate.spare and not candidate.spare and fills(entry, claim.candidate):
            return m.Refused(
                m.RefusalCode.NODE_ID_TAKEN,
                f"{upper_first(who(candidate))} fills rank {entry.rank} of the rank table (server "
                f"{entry.server_id}, device {entry.device_index}), which {who(claim.candidate)} has taken; "
                "start one worker per device.",
            )
    return None


def _check_room(ledger: Ledger, settings: v.Settings, candidate: v.Candidate) -> m.Refused | None:
    worker_num = ledger.opened.worker_num if ledger.opened else sizes(settings, candidate)[0]
    if ledger.finishing:
        return m.Refused(
            m.RefusalCode.JOB_FULL,
            f"{upper_first(who(candidate))} has no place: the job is finishing, some workers have completed "
            "the training already.",
        )
    if candidate.spare and ledger.formed is None:
        return _check_spare(ledger, settings, candidate)
    places = sum(not is_spare(ledger, claim) for claim in staying(ledger))
    ordinary = sum(not claim.candidate.spare for claim in staying(ledger))
    total = sum(1 for _ in staying(ledger))
    if not candidate.spare and places < worker_num:
        return None
    # Where a spare has filled in for a worker that comes only now, that one waits in the spare's stead.
    if (candidate.spare or ordinary < worker_num) and total < worker_num + settings.spares:
        return None
    how = (
        f"no spare place is free (MS_SPARES={settings.spares})"
        if candidate.spare
        else "a worker with MS_WORKER_SPARE=1 could wait where the scheduler has MS_SPARES"
    )
    return m.Refused(
        m.RefusalCode.JOB_FULL,
        f"{upper_first(who(candidate))} has no place: all {count(worker_num, 'worker')} of the job are in "
        f"(MS_WORKER_NUM={worker_num}), and {how}.",
    )


def _check_spare(ledger: Ledger, settings: v.Settings, candidate: v.Candidate) -> m.Refused | None:
    """Before the first group, whose places are kept for ordinary workers, however early spares come."""
    if sum(is_spare(ledger, claim) for claim in staying(ledger)) < settings.spares:
        return None
    return m.Refused(
        m.RefusalCode.JOB_FULL,
        f"{upper_first(who(candidate))} has no place: it came as a spare, and no spare place is free "
        f"(MS_SPARES={settings.spares}); raise that at the scheduler, or start it without MS_WORKER_SPARE.",
    )
