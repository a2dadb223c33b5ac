"""Declares silent workers lost, unless the scheduler itself did not run."""

from __future__ import annotations

import math

from muster.scheduler.core import events, probing
from muster.scheduler.core.job import Job
from muster.scheduler.core.ledger import Phase, count
from muster.scheduler.core.probing_state import ROUND_PAUSE_S
from muster.wire import messages


def tick(job: Job, event: events.Tick, now: float) -> None:
    """Handles a Tick: does everything that is due."""
    if job.phase is Phase.ENDED:
        return
    for node_id in job.members.silent(now, job.patience):
        what = f"is lost: not heard for {now - job.members.by_node[node_id].last_heard:.1f} s"
        job.lose(node_id, what, messages.RefusalCode.SUPERSEDED)
    if job.probing.due(job.settings.hang_timeout_s) is not None:
        probing.tend_rounds(job, now)


def process_paused(job: Job, event: events.ProcessPaused, now: float) -> None:
    """Handles a pause of the scheduler's process: its silence does not count, and streams may return.

    Workers close a stream that does not answer. The scheduler sees this only afterwards, also for streams
    that were opened during the pause.
    """
    seconds, node_timeout_s = event.seconds, job.settings.node_timeout_s
    breaking_s = job.settings.breaking_pause_s or node_timeout_s / 3
    if job.phase is Phase.ENDED:
        return
    # Late turns add up, unless they are rare compared with the time between them.
    job.deadlines.late_s = max(0.0, job.deadlines.late_s - (now - job.deadlines.late_at) / 3) + seconds
    job.deadlines.late_at = now
    if job.deadlines.late_s < breaking_s:  # Too short to break a stream.
        job.members.excuse(seconds, now)
        return
    forgave = now < job.deadlines.forgiving_until
    job.deadlines.forgiving_until = now + node_timeout_s
    job.members.excuse(math.inf if seconds >= breaking_s else seconds, now)
    job.deadlines.excuse(seconds)
    if not forgave or seconds >= breaking_s:
        job.outbox.mention(
            f"The scheduler itself stood still for {job.deadlines.late_s:.1f} s; "
            f"its workers have {node_timeout_s:g} s to be heard again."
        )


def held_up(job: Job, event: events.HeldUp, now: float) -> None:
    """Handles a time without a journal: messages that were sent during it are handled only now.

    Members that are gone stay gone.
    """
    if job.phase is not Phase.ENDED:
        job.members.excuse(event.seconds, now)
        job.deadlines.excuse(event.seconds)
        if event.seconds >= ROUND_PAUSE_S:
            job.probing.repeat()


def receive_backlog(job: Job, event: events.ReceiveBacklog, now: float) -> None:
    """Handles a backlog: silence does not count while the scheduler has not read what workers have sent."""
    unread = [node_id for session in event.sessions if (node_id := job.members.nodes.get(session))]
    if unread and job.phase is not Phase.ENDED:
        # From now on a worker may be silent for its whole patience again, before the scheduler checks once
        # more; streams may return until soon after that.
        job.deadlines.forgiving_until = now + job.patience.waiting_s + job.heartbeat_interval_s
        job.members.excuse(math.inf, now)
        job.deadlines.excuse(job.settings.node_timeout_s)  # Nothing was read during that time.
        job.outbox.mention(
            f"The scheduler is behind: what {count(len(unread), 'worker')} sent is not read yet; "
            f"its workers have {job.settings.node_timeout_s:g} s to be heard again."
        )
