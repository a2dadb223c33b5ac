"""Sentences on a job for its workers and the log: who is missing, whether it is established or stalls."""

from __future__ import annotations

from muster.scheduler.core import evidence
from muster.scheduler.core.job import Job
from muster.scheduler.core.ledger import STATELESS, Phase, count, nodes, upper_first, waiting
from muster.scheduler.core.reports import awaited, progress_report, rearmost
from muster.wire import messages


def report(job: Job, now: float) -> None:
    """Logs from time to time who is in and who is missing."""
    if job.phase not in (Phase.FORMING, Phase.SUSPENDED, Phase.BUILDING) or now < job.deadlines.report:
        return
    job.deadlines.report = now + job.settings.waiting_report_interval_s
    formed = job.ledger.formed
    if job.switches_by_steps and formed is not None:
        standing = progress_report(job, now).partition(": ")[2]
        begins = f"Generation {formed.generation} begins after step {formed.switch_after_step}"
        job.say(f"{begins}: {standing}" if standing else f"{begins}.")
        return
    if job.phase is Phase.BUILDING:
        since = f"for {now - job.deadlines.formed_at:.0f} s"
        job.say(f"The group is being built {since}: {awaited(job)}.")
        # Each member's own log then says which ranks it waits for.
        job.send_to_members(messages.Waiting(len(job.current.built), len(job.ledger.ranks), job.reason))
        return
    broadcast_waiting(job)


def broadcast_waiting(job: Job) -> None:
    """Sends all workers the names of the missing workers."""
    message = waiting_message(job)
    for node_id in job.ledger.claims:
        job.send(node_id, message)
    job.say(message.sentence)


def waiting_message(job: Job) -> messages.Waiting:
    """The message to all workers while some are missing."""
    sentence = upper_first(waiting_sentence(job)) + "."
    return messages.Waiting(len(job.seated()), job.needed, sentence)


def waiting_sentence(job: Job) -> str:
    """Names who is in and who is missing, without a full stop."""
    sentence = waiting(job.seated(), job.needed, job.settings.rank_table)
    if job.phase is Phase.SUSPENDED and job.deadlines.holders_return > job.now:
        left_s = job.deadlines.holders_return - job.now
        return f"{sentence}; {left_s:.0f} s more for members that may return with the training state"
    spares = [job.ledger.claims[node_id].candidate for node_id in job.ledger.spares]
    if job.phase is not Phase.FORMING or not spares:
        return sentence
    left_s = job.deadlines.spares_fill_in - job.now
    when = f", to fill in after {left_s:.0f} s" if left_s > 0 else ""
    return f"{sentence}; {count(len(spares), 'spare')} in: {nodes(spares)}{when}"


def check_progress(job: Job, now: float) -> None:
    """Reports a stall of training, with growing intervals; the job keeps waiting."""
    due = stall_due(job)
    if due is None or now < due:
        return
    deadlines = job.deadlines
    report = progress_report(job, now)
    if report:
        deadlines.stalled, deadlines.stall_report = True, now + (now - deadlines.progress_since)
        job.say(report)
        if trains(job):  # A member that is building gets a similar message with each report.
            job.tell_members(report)
            evidence.standstill(job, now, rearmost(job), report)
    else:
        deadlines.progress_since = now


def stall_due(job: Job) -> float | None:
    """When a stall of training is to be reported (again); None if training is not expected to progress."""
    deadlines = job.deadlines
    if deadlines.stalled:
        return deadlines.stall_report if trains(job) else None
    rebuilds = job.phase is Phase.BUILDING and job.ledger.ever_established
    if not (trains(job) or rebuilds):
        return None
    return deadlines.progress_since + job.settings.stall_timeout_s


def trains(job: Job) -> bool:
    """Whether a group is established."""
    return job.phase in (Phase.RUNNING, Phase.QUIESCING)


def standing_sentence(job: Job) -> str:
    """Says that the group is established."""
    formed = job.ledger.formed
    remark = f": {STATELESS}" if formed is not None and formed.reason.endswith(STATELESS) else ""
    return f"Generation {job.ledger.generation} stands with {job.size()}{remark}."


def state_reason(job: Job) -> str:
    """The reason for the job's state. While all is well, news of single workers does not replace it."""
    complete = job.phase is Phase.RUNNING and not job.ledger.finished
    calm = not job.deadlines.stalled and job.deadlines.suspicion is None
    return standing_sentence(job) if complete and calm else job.reason
