"""Handles Joins: workers that arrive or return, and every reason for refusing one."""

from __future__ import annotations

from collections.abc import Iterator

from muster.scheduler.core import events, gpus, probing
from muster.scheduler.core.job import Job
from muster.scheduler.core.ledger import (
    Ledger,
    Phase,
    count,
    named_first,
    sizes,
    table_entry,
    who,
)
from muster.scheduler.core.sentences import broadcast_waiting, waiting_message
from muster.version import __version__
from muster.wire import messages

LONG_LIST = 32
"""From this many workers on, a Join is not announced to all workers immediately."""

SOFT = "~"
"""Prefix of the name of a fact for which a difference causes only a warning."""

UNSET = "(unset)"


def joined(job: Job, event: events.Joined, now: float, *, again: bool = False) -> None:
    """Handles a Join of a worker that arrives or returns; ``again``: the Join was held back before."""
    candidate = event.candidate
    job.admissions.held_back.pop(event.session, None)  # Each stream gets one answer, however often it asks.
    job.probing.addresses[event.session] = event.probe_address
    if event.gives_stacks:
        job.evidence.givers.add(event.session)
    job.deadlines.last_call_s = event.last_call_s or job.deadlines.last_call_s
    known = job.members.nodes.get(event.session)
    if known is not None and not _is_of(job, known, candidate):
        job.lose(known, "asked for a second place on its stream", messages.RefusalCode.MALFORMED)
        return
    # The worker has its answer and may have acted on it; another answer would revoke that one.
    if known is not None:
        return
    answer = check_process(job.ledger, event)
    if answer is not None:
        job.outbox.send(event.session, answer)
    elif _is_of(job, candidate.node_id, candidate):
        _come_back(job, event)
    else:
        # Some GPU has failed a check, perhaps the one of this worker.
        has_failed = event.gpu_fault or job.ledger.refused_gpus
        refusal = gpus.check(job, event) if has_failed else None
        refusal = refusal or check_place(job.ledger, job.settings, candidate)
        is_barred = refusal is None and job.probing.bars(candidate)
        if not (is_barred and probing.keep_outside(job, event)):
            _answer(job, event, refusal, again=again)


def _answer(job: Job, event: events.Joined, refusal: messages.Refused | None, *, again: bool) -> None:
    """Answers a new worker; ``refusal`` says why it gets no place."""
    candidate = event.candidate
    if refusal is not None and _may_free_up(job, refusal, candidate):
        job.admissions.held_back[event.session] = event
        if not again:
            job.outbox.mention(f"{named_first(candidate)} waits until it is clear who comes back.")
        return
    if refusal is not None:
        job.outbox.send(event.session, refusal)
        job.outbox.mention(refusal.sentence)
        return
    job.admit(event)
    _remark(job, candidate)
    job.admissions.arrived = candidate.node_id


def _is_of(job: Job, node_id: str, candidate: messages.Candidate) -> bool:
    claim = job.ledger.claims.get(node_id)
    return (
        claim is not None
        and node_id == candidate.node_id
        and claim.candidate.incarnation == candidate.incarnation
    )


def _remark(job: Job, candidate: messages.Candidate) -> None:
    """Logs warnings about a worker that differs from the others, each once."""
    for topic, sentence in remarks(job.ledger, candidate):
        _warn_once(job, topic, sentence)
    host = candidate.host
    if job.admissions.machines.setdefault(host.name, host.id) != host.id:
        sentence = f"several machines are named {host.name}; give each a host name of its own."
        _warn_once(job, f"host {host.name}", sentence)
    label = job.admissions.labels.setdefault(host.id, host.topology)
    if label != host.topology:
        one, other = sorted((label or UNSET, host.topology or UNSET))
        sentence = f"workers of host {host.name} came with MS_TOPOLOGY {one} and {other}; give all the same."
        _warn_once(job, f"label {host.id}", sentence)


def _warn_once(job: Job, topic: str, sentence: str) -> None:
    if topic not in job.admissions.remarked:
        job.admissions.remarked.add(topic)
        job.outbox.mention(f"Warning: {sentence}")


def _may_free_up(job: Job, refusal: messages.Refused, candidate: messages.Candidate) -> bool:
    """Whether a refused worker may get the place of one that has not returned since a restart."""
    contacts = job.members.by_node
    if len(job.admissions.held_back) > job.needed + job.settings.spares:
        return False
    if refusal.code is messages.RefusalCode.NODE_ID_TAKEN and candidate.node_id in contacts:
        return contacts[candidate.node_id].session is None
    if refusal.code in (messages.RefusalCode.NODE_ID_TAKEN, messages.RefusalCode.JOB_FULL):
        return not job.members.all_have_streams
    return False


def held_back(job: Job) -> list[events.Joined]:
    """Retries the Joins that were held back, if something has changed for them."""
    now = job.records, job.members.turns
    if now == job.admissions.tried:
        return []
    job.admissions.tried = now
    joins, job.admissions.held_back = list(job.admissions.held_back.values()), {}
    return joins


def announce_arrival(job: Job, node_id: str) -> None:
    """Announces who is in and who is missing, after this worker has joined."""
    if job.phase not in (Phase.FORMING, Phase.SUSPENDED):
        return
    if len(job.ledger.claims) <= LONG_LIST:
        broadcast_waiting(job)
    else:
        job.send(node_id, _how_many(job))


def _how_many(job: Job) -> messages.Waiting:
    """The answer to a newcomer if a list of all workers would be long."""
    number = len(job.ledger.claims)
    return messages.Waiting(number, job.needed, f"{number} of {job.needed} workers are in.")


def _come_back(job: Job, event: events.Joined) -> None:
    """Accepts a worker that opens its stream again."""
    job.take_back(event)
    if job.phase is Phase.FORMING and job.members.session_of(event.candidate.node_id) == event.session:
        is_long = len(job.ledger.claims) > LONG_LIST
        job.send(event.candidate.node_id, _how_many(job) if is_long else waiting_message(job))


# ---------------------------------------------------------------- who may have a place


def check_process(ledger: Ledger, event: events.Joined) -> messages.Refused | messages.Ended | None:
    """Refuses a process that may not have a place at all; returns None if it may."""
    candidate = event.candidate
    if (candidate.node_id, candidate.incarnation) in ledger.completed:
        return messages.Ended(True, f"{named_first(candidate)} has completed the training.")
    if ledger.outcome is not None and (event.held_generation > 0 or _holds(ledger, candidate)):
        return messages.Ended(
            ledger.outcome.ok, ledger.outcome.reason
        )  # Also sent to a spare that was away at the end.
    retirement = ledger.retirement(candidate.node_id, candidate.incarnation)
    if retirement is not None:
        return messages.Refused(
            messages.RefusalCode.SUPERSEDED,
            f"This process of {who(candidate)} has lost its place for good: {retirement}. "
            "Join again under a new incarnation to get a new place.",
        )
    if ledger.outcome is not None:
        return messages.Refused(
            messages.RefusalCode.JOB_ENDED,
            f"The job has ended: {ledger.outcome.reason} {named_first(candidate)} came too late; "
            "start the job again, or under another MS_JOB_ID.",
        )
    if event.held_generation > 0 and not _holds(ledger, candidate):
        return messages.Refused(messages.RefusalCode.SUPERSEDED, _unknown_place(ledger, event))
    return None


def check_place(
    ledger: Ledger, settings: events.CoreSettings, candidate: messages.Candidate
) -> messages.Refused | None:
    """Refuses a new process for which the job has no place; returns None if there is one."""
    return (
        _check_sizes(ledger, settings, candidate)
        or _check_version(candidate)
        or _check_agreement(ledger, candidate)
        or check_node(ledger, candidate)
        or _check_table(ledger, settings, candidate)
        or _check_room(ledger, settings, candidate)
    )


def _holds(ledger: Ledger, candidate: messages.Candidate) -> bool:
    claim = ledger.claims.get(candidate.node_id)
    return claim is not None and claim.candidate.incarnation == candidate.incarnation


def _unknown_place(ledger: Ledger, event: events.Joined) -> str:
    held = f"rank {event.held_rank} of generation {event.held_generation}"
    if event.held_generation > ledger.generation:
        return (
            f"{named_first(event.candidate)} says it holds {held}, but this scheduler knows no "
            f"generation after {ledger.generation}: it was started without the journal of the job. "
            "Set MS_ENABLE_RECOVERY and MS_RECOVERY_PATH, and start the workers again."
        )
    return (
        f"{named_first(event.candidate)} says it holds {held}, but this process has no place in the "
        f"job, which is in generation {ledger.generation}. Join again under a new incarnation to get a "
        "new place."
    )


def _check_sizes(
    ledger: Ledger, settings: events.CoreSettings, candidate: messages.Candidate
) -> messages.Refused | None:
    if not candidate.node_id:
        return messages.Refused(messages.RefusalCode.MALFORMED, "The node id is empty; set MS_NODE_ID.")
    if candidate.worker_num < 1 or not 0 <= candidate.worker_min <= candidate.worker_num:
        return messages.Refused(
            messages.RefusalCode.MALFORMED,
            f"{named_first(candidate)} has MS_WORKER_NUM={candidate.worker_num} and "
            f"MS_WORKER_MIN={candidate.worker_min}; 1 <= MS_WORKER_MIN <= MS_WORKER_NUM must hold.",
        )
    opened = ledger.opened
    num, least = (opened.worker_num, opened.worker_min) if opened else sizes(settings, candidate)
    if candidate.worker_num != num:
        return _differs(candidate, "MS_WORKER_NUM", str(candidate.worker_num), str(num), "the job")
    if candidate.worker_min not in (0, least):
        return _differs(candidate, "MS_WORKER_MIN", str(candidate.worker_min), str(least), "the job")
    return None


def _check_version(candidate: messages.Candidate) -> messages.Refused | None:
    version = dict(candidate.facts).get(messages.VERSION_FACT)
    why = messages.version_obstacle(scheduler=__version__, worker=version) if version is not None else ""
    if not why:
        return None
    return messages.Refused(
        messages.RefusalCode.SETTINGS_DIFFER, f"{named_first(candidate)} is refused. {why}"
    )


def _check_agreement(ledger: Ledger, candidate: messages.Candidate) -> messages.Refused | None:
    other = next(iter(ledger.claims.values()), None)
    if other is None:
        return None
    peer = other.candidate
    if candidate.backend != peer.backend:
        return _differs(candidate, "backend", candidate.backend, peer.backend, who(peer))
    for key, mine, theirs in _differences(candidate, peer):
        if not key.startswith(SOFT) and not (
            key == messages.VERSION_FACT and messages.is_same_series(mine, theirs)
        ):
            return _differs(candidate, key, mine, theirs, who(peer))
    return None


def remarks(ledger: Ledger, candidate: messages.Candidate) -> Iterator[tuple[str, str]]:
    """Warnings about a worker that differs from the others in a way that is allowed.

    Yields:
        The subject of the warning, and a sentence.
    """
    peer = next(iter(ledger.claims.values())).candidate
    differences = _differences(candidate, peer)
    mild = [row for row in differences if row[0].startswith(SOFT) or row[0] == messages.VERSION_FACT]
    found = [(key.removeprefix(SOFT), *values) for key, *values in mild]
    if candidate.device.model != peer.device.model:
        found.append(("GPU model", candidate.device.model or UNSET, peer.device.model or UNSET))
    for name, mine, theirs in found:
        sentence = f"{named_first(candidate)} has {name} {mine}, but {who(peer)} has {theirs}."
        yield name, sentence


def _differences(candidate: messages.Candidate, peer: messages.Candidate) -> list[tuple[str, str, str]]:
    if candidate.facts == peer.facts:
        return []
    mine, theirs = dict(candidate.facts), dict(peer.facts)
    return [
        (key, mine.get(key, UNSET), theirs.get(key, UNSET))
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key)
    ]


def _differs(
    candidate: messages.Candidate, name: str, mine: str, theirs: str, owner: str
) -> messages.Refused:
    return messages.Refused(
        messages.RefusalCode.SETTINGS_DIFFER,
        f"{named_first(candidate)} has {name}={mine}, but {owner} has {name}={theirs}; "
        "make it the same everywhere.",
    )


def check_node(ledger: Ledger, candidate: messages.Candidate) -> messages.Refused | None:
    """Refuses a worker whose node id is taken; returns None if it is free."""
    holder = ledger.claims.get(candidate.node_id)
    if holder is None:
        return None
    return messages.Refused(
        messages.RefusalCode.NODE_ID_TAKEN,
        f"Node id {candidate.node_id} of the worker on host {candidate.host.name} is held by a living "
        f"process on host {holder.candidate.host.name}; give each worker an MS_NODE_ID of its own, "
        "or end the other process first.",
    )


def _check_table(
    ledger: Ledger, settings: events.CoreSettings, candidate: messages.Candidate
) -> messages.Refused | None:
    table = settings.rank_table
    if table is None:
        return None
    entry = table_entry(table, candidate)
    host, device = candidate.host, candidate.device
    index = device.index if device.index >= 0 else candidate.local_index
    if entry is None:
        device_words = f"device {index}" if index >= 0 else "no device: DEVICE_ID is not set"
        return messages.Refused(
            messages.RefusalCode.NOT_IN_RANK_TABLE,
            f"{named_first(candidate)} (address {host.address}, {device_words}) is not in the rank "
            "table; add its server_id and device_id to RANK_TABLE_FILE, or start it on a listed device.",
        )
    for node_id in ledger.at.get((entry.server_id, entry.device_index), ()):
        claim = ledger.claims[node_id]
        if claim.leaving is None and not claim.candidate.spare and not candidate.spare:
            return messages.Refused(
                messages.RefusalCode.NODE_ID_TAKEN,
                f"{named_first(candidate)} fills rank {entry.rank} of the rank table (server "
                f"{entry.server_id}, device {entry.device_index}), which {who(claim.candidate)} has taken; "
                "start one worker per device.",
            )
    return None


def _check_room(
    ledger: Ledger, settings: events.CoreSettings, candidate: messages.Candidate
) -> messages.Refused | None:
    worker_num = ledger.opened.worker_num if ledger.opened else sizes(settings, candidate)[0]
    if ledger.finishing:
        return messages.Refused(
            messages.RefusalCode.JOB_FULL,
            f"{named_first(candidate)} has no place: the job is finishing, some workers have completed "
            "the training already.",
        )
    if candidate.spare and ledger.formed is None:
        return _check_spare(ledger, settings, candidate)
    total = len(ledger.claims) - len(ledger.leaving)
    spares = ledger.spares - ledger.leaving
    ordinary = total - len(spares)
    places = total - len(spares & ledger.unplaced)
    if not candidate.spare and places < worker_num:
        return None
    # If a spare has filled in for a worker that comes only now, that worker waits in the spare's place.
    if (candidate.spare or ordinary < worker_num) and total < worker_num + settings.spares:
        return None
    how = (
        f"no spare place is free (MS_SPARES={settings.spares})"
        if candidate.spare
        else "a worker with MS_WORKER_SPARE=1 could wait where the scheduler has MS_SPARES"
    )
    return messages.Refused(
        messages.RefusalCode.JOB_FULL,
        f"{named_first(candidate)} has no place: all {count(worker_num, 'worker')} of the job are in "
        f"(MS_WORKER_NUM={worker_num}), and {how}.",
    )


def _check_spare(
    ledger: Ledger, settings: events.CoreSettings, candidate: messages.Candidate
) -> messages.Refused | None:
    """Refuses a spare beyond MS_SPARES before the first group; returns None if it may wait."""
    if len((ledger.spares & ledger.unplaced) - ledger.leaving) < settings.spares:
        return None
    return messages.Refused(
        messages.RefusalCode.JOB_FULL,
        f"{named_first(candidate)} has no place: it came as a spare, and no spare place is free "
        f"(MS_SPARES={settings.spares}); raise that at the scheduler, or start it without MS_WORKER_SPARE.",
    )
