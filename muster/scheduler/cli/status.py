"""Prints a scheduler's answers as tables or JSON: a job and its workers, or a list of jobs."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from muster.scheduler.cli.client import UnreachableError
from muster.scheduler.cli.gpus import gpu_in_short, gpu_json, gpu_warnings, refused_in_words, refused_json
from muster.wire.messages import NCCL_WORDS

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from muster.wire.v1 import rendezvous_pb2 as pb

FILE_COLUMNS = 140
"""Width in columns of a table that is written to a file."""

WIDE_COLUMNS = 120
"""Terminal width in columns from which a table also shows addresses, models and last heartbeats."""

SILENT_S = 5.0
PARTNERS_SHOWN = 3


def as_json(reply: pb.StatusReply) -> dict[str, Any]:
    """Converts the reply to plain values for JSON. Ranks that are not assigned yet are null."""
    return {
        "job_id": reply.job_id,
        "state": reply.state,
        "generation": reply.generation,
        "worker_num": reply.worker_num,
        "worker_min": reply.worker_min,
        "workers": [_worker_json(worker) for worker in reply.workers],
        "missing": list(reply.missing),
        "reason": reply.reason,
        "uptime_s": round(reply.uptime_s, 3),
        "version": reply.version,
        "leader": reply.leader or None,
        "nccl_traffic": reply.nccl_traffic or None,
        "copies": _copies_json(reply.copies),
        "stragglers": [_straggler_json(straggler) for straggler in reply.stragglers],
        "evidence": reply.evidence or None,
        "seconds_by_cause": {cause: round(s, 3) for cause, s in sorted(reply.seconds_by_cause.items())},
        "steps": reply.steps or None,
        "remaining_s": round(reply.remaining_s, 3) if reply.remaining_s else None,
        "epoch": reply.epoch or None,
        "epochs": reply.epochs or None,
        "numbers": dict(sorted(reply.numbers.items())),
        "drains": [_drain_json(drain) for drain in reply.drains],
        "refused_gpus": [refused_json(refused) for refused in reply.refused_gpus],
    }


def _drain_json(drain: pb.PlannedDrain) -> dict[str, Any]:
    return {
        "at": drain.at_s,
        "node_ids": list(drain.node_ids),
        "hosts": list(drain.hosts),
        "reason": drain.reason,
    }


def goodput_in_words(seconds_by_cause: Mapping[str, float]) -> str:
    """Formats ``time: 93 % training, 5 % forming, 2 % redoing, of 1:02:03``, with the largest part first."""
    whole_s = sum(seconds_by_cause.values())
    parts = sorted(seconds_by_cause.items(), key=lambda each: -each[1])
    shares = ", ".join(f"{100 * seconds / whole_s:.0f} % {cause}" for cause, seconds in parts)
    return f"time: {shares}, of {_duration(whole_s)}"


def steps_in_words(reply: pb.StatusReply) -> str:
    """``epoch 3 of 10, step 480 of 1,000, about 0:03:00 left at the pace of now``; known parts only."""
    said = []
    if reply.epoch:
        said.append(f"epoch {reply.epoch:,}" + (f" of {reply.epochs:,}" if reply.epochs else ""))
    if reply.steps:
        step = min((worker.step for worker in reply.workers if worker.rank >= 0), default=0)
        said.append(f"step {step:,} of {reply.steps:,}")
    if reply.remaining_s:
        said.append(f"about {_duration(reply.remaining_s)} left at the pace of now")
    return ", ".join(said)


def drain_in_words(drain: pb.PlannedDrain) -> str:
    """Describes a planned drain in words."""
    names = [
        f"{noun} {', '.join(some)}"
        for noun, some in (("host", drain.hosts), ("node", drain.node_ids))
        if some
    ]
    when = dt.datetime.fromtimestamp(drain.at_s).astimezone()
    return f"drain planned at {when:%Y-%m-%d %H:%M:%S %z}: {' and '.join(names)} ({drain.reason})"


def _copies_json(copies: pb.JobCopies) -> dict[str, Any]:
    return {
        "snapshot": {
            "step": copies.snapshot_step,
            "age_s": round(copies.snapshot_age_s, 3),
            "size_bytes": copies.snapshot_bytes,
            "seconds": round(copies.snapshot_seconds, 3),
        }
        if copies.HasField("snapshot_step")
        else None,
        "checkpoint": {**_checkpoint_json(copies.checkpoint), "rank": copies.checkpoint_rank}
        if copies.HasField("checkpoint")
        else None,
    }


def _straggler_json(straggler: pb.Straggler) -> dict[str, Any]:
    return {
        "node_id": straggler.node_id,
        "rank": straggler.rank if straggler.rank >= 0 else None,
        "kind": straggler.kind,
        "since_s": round(straggler.since_s, 3),
        "excess_s": round(straggler.excess_s, 4),
        "slowdown": round(straggler.slowdown, 3),
        "peer_rank": straggler.peer_rank if straggler.peer_rank >= 0 else None,
        "sentence": straggler.sentence,
    }


def _checkpoint_json(checkpoint: pb.CheckpointReport) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "age_s": round(checkpoint.age_s, 3),
        "size_bytes": checkpoint.size_bytes,
        "seconds": round(checkpoint.seconds, 3),
    }


def _snapshot_json(snapshot: pb.SnapshotReport) -> dict[str, Any]:
    """Converts a worker's newest complete snapshot, and one in progress, to plain values for JSON."""
    newest = newest_of(snapshot)
    return {
        "step": newest if newest >= 0 else None,
        "under_way": snapshot.taken if snapshot.taken > newest else None,
        "age_s": round(snapshot.age_s, 3),
        "size_bytes": snapshot.size_bytes,
        "seconds": round(snapshot.seconds, 3),
        "partners": list(snapshot.partners),
    }


def newest_of(snapshot: pb.SnapshotReport) -> int:
    """The step of the newest snapshot that a worker and its partners keep completely; -1 if there is none."""
    return max(snapshot.agreed, snapshot.taken if snapshot.complete else -1)


def _worker_json(worker: pb.WorkerStatus) -> dict[str, Any]:
    device, last = worker.device, worker.last_collective
    return {
        "node_id": worker.node_id,
        "host": {
            "name": worker.host_name,
            "id": worker.host_id,
            "address": worker.address,
            "topology": worker.topology,
        },
        "rank": worker.rank if worker.rank >= 0 else None,
        "local_rank": worker.local_rank if worker.local_rank >= 0 else None,
        "state": worker.state,
        "device": {
            "kind": device.kind,
            "index": device.index if device.index >= 0 else None,
            "pci_bus_id": device.pci_bus_id,
            "model": device.model,
        },
        "silent_s": round(worker.silent_s, 3),
        "step": worker.step,
        "samples_per_s": round(worker.samples_per_s, 3),
        "pid": worker.pid or None,
        "loss": worker.loss if worker.HasField("loss") else None,
        "last_collective": {
            "sequence": last.sequence,
            "name": last.name,
            "group": last.group,
            "dtype": last.dtype,
            "size_bytes": last.size_bytes,
            "done": last.done,
        }
        if worker.HasField("last_collective")
        else None,
        "snapshot": _snapshot_json(worker.snapshot) if worker.HasField("snapshot") else None,
        "checkpoint": _checkpoint_json(worker.checkpoint) if worker.HasField("checkpoint") else None,
        "step_seconds": {
            "computed": round(worker.shares.computed, 4),
            "waited": round(worker.shares.waited, 4),
            "data": round(worker.shares.data, 4),
        }
        if worker.HasField("shares")
        else None,
        "gpu": gpu_json(worker),
    }


def job_as_json(where: str, job: pb.JobSummary) -> dict[str, Any]:
    """Converts an entry of the list of jobs to plain values for JSON."""
    return {
        "scheduler": where,
        "job_id": job.job_id,
        "state": job.state,
        "generation": job.generation,
        "members": job.members,
        "worker_num": job.worker_num,
        "step": job.step,
    }


def show(reply: pb.StatusReply, out: TextIO, *, width: int | None = None) -> None:
    """Prints a job as a table. ``width`` is in columns; None means the terminal's width."""
    console = _console(out, width)
    for part in _parts(reply, console.width):
        console.print(part)


def show_jobs(rows: Sequence[tuple[str, pb.JobSummary]], out: TextIO, *, width: int | None = None) -> None:
    """Prints a table of jobs, each with the address of its scheduler."""
    from rich.table import Table
    from rich.text import Text

    console = _console(out, width)
    if not rows:
        console.print("no jobs")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("job", "state"):
        table.add_column(title, overflow="fold")
    for title in ("generation", "workers", "step"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("scheduler", overflow="fold")
    for where, job in rows:
        size = f"{job.members} of {job.worker_num or '?'}"
        cells = (job.job_id, job.state, str(job.generation), size, f"{job.step:,}", where)
        table.add_row(*map(Text, cells))
    console.print(table)


def watch(ask: Callable[[], pb.StatusReply], out: TextIO, *, pause: Callable[[], None]) -> int:
    """Prints a job repeatedly until Ctrl-C or the job's end; returns the exit code.

    Args:
        ask: asks the scheduler for the job's state.
        out: the stream to print to.
        pause: waits between two calls of ``ask``.
    """
    from rich.console import Group
    from rich.live import Live

    console = _console(out, None)
    reply = ask()
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(Group(*_parts(reply, console.width)), refresh=True)
                if reply.state == "ended":
                    return 0
                pause()
                reply = ask()
        except KeyboardInterrupt:
            return 0
        except UnreachableError:
            console.print("the scheduler is gone: the job has ended, or the scheduler is being restarted")
            return 0


def _console(out: TextIO, width: int | None) -> Console:
    from rich.console import Console

    return Console(file=out, width=width or (None if out.isatty() else FILE_COLUMNS), highlight=False)


def _parts(reply: pb.StatusReply, width: int) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    formed = sum(1 for worker in reply.workers if worker.rank >= 0)
    size = str(reply.worker_num) if reply.worker_num else "?"
    least = f", at least {reply.worker_min}" if reply.worker_min not in (0, reply.worker_num) else ""
    parts: list[RenderableType] = [
        Text(
            f"job {reply.job_id}: {reply.state}, generation {reply.generation}, "
            f"{formed} of {size} ranks{least}, scheduler up {_duration(reply.uptime_s)}"
            + (f", {reply.leader} leads" if reply.leader else "")
        )
    ]
    if reply.workers:
        wide = width >= WIDE_COLUMNS
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for title in ("rank", "node id", "host", "device", "state"):
            table.add_column(title, overflow="fold", no_wrap=title == "rank")
        for title in ("pid", "step", "waits", "samples/s", "loss", *(["heard"] if wide else [])):
            table.add_column(title, justify="right", no_wrap=True)
        keeps = wide and any(worker.HasField("snapshot") for worker in reply.workers)
        if keeps:
            table.add_column("snapshot", justify="right", no_wrap=True)
        tells = wide and any(worker.HasField("gpu") for worker in reply.workers)
        if tells:
            table.add_column("gpu", justify="right", no_wrap=True)
        for worker in reply.workers:
            more = [_snapshot(worker)] if keeps else []
            more += [gpu_in_short(worker.gpu) if worker.HasField("gpu") else "-"] if tells else []
            table.add_row(*map(Text, [*_row(worker, wide=wide), *more]))
        parts.append(table)
    parts += map(Text, copies_in_words(reply.copies))
    parts += [
        Text(straggler.sentence, style="" if straggler.kind == "one-off" else "bold yellow")
        for straggler in reply.stragglers
    ]
    parts += [Text(sentence, style="bold yellow") for sentence in gpu_warnings(reply.workers)]
    parts += [Text(refused_in_words(refused), style="bold yellow") for refused in reply.refused_gpus]
    if sum(reply.seconds_by_cause.values()) > 0.0:
        parts.append(Text(goodput_in_words(reply.seconds_by_cause)))
    if said := steps_in_words(reply):
        parts.append(Text(said))
    if reply.numbers:
        parts.append(Text(", ".join(f"{name} {value:.4g}" for name, value in sorted(reply.numbers.items()))))
    parts += [Text(drain_in_words(drain), style="bold") for drain in reply.drains]
    trouble = "bold red" if reply.state == "suspended" else "bold yellow"
    parts += [Text(f"missing: {missing}", style=trouble) for missing in reply.missing]
    if words := NCCL_WORDS.get(reply.nccl_traffic):
        parts.append(Text(f"NCCL between hosts: {words}"))
    if reply.reason:
        parts.append(Text(reply.reason, style="bold red" if reply.state == "suspended" else ""))
    if reply.evidence:
        parts.append(Text(reply.evidence))
    return parts


def _row(worker: pb.WorkerStatus, *, wide: bool) -> list[str]:
    ranked = worker.rank >= 0
    silent = f", silent {worker.silent_s:.0f} s" if worker.silent_s >= SILENT_S and not wide else ""
    return [
        str(worker.rank) if ranked else "-",
        worker.node_id,
        _host(worker) if wide else worker.host_name,
        _device(worker.device, wide=wide),
        worker.state + silent,
        str(worker.pid) if worker.pid else "-",
        str(worker.step),
        _waits(worker),
        f"{worker.samples_per_s:,.1f}" if worker.samples_per_s < 100_000 else f"{worker.samples_per_s:,.0f}",
        f"{worker.loss:.4g}" if worker.HasField("loss") else "-",
        *([f"{worker.silent_s:.1f} s ago"] if wide else []),
    ]


def _waits(worker: pb.WorkerStatus) -> str:
    """Formats the share of recent steps' time in which a worker waited for other workers or for data."""
    shares = worker.shares
    waited_s = shares.waited + shares.data
    whole_s = shares.computed + waited_s
    return f"{100 * waited_s / whole_s:.0f} %" if whole_s > 0 else "-"


def _snapshot(worker: pb.WorkerStatus) -> str:
    """Formats ``120 at 3, 12 s``: the step of the newest complete snapshot, the partners, and its age."""
    newest = newest_of(worker.snapshot) if worker.HasField("snapshot") else -1
    if newest < 0:
        return "-"
    partners = ", ".join(map(str, worker.snapshot.partners[:PARTNERS_SHOWN]))
    return f"{newest}{f' at {partners}' if partners else ''}, {_seconds(worker.snapshot.age_s)}"


def copies_in_words(copies: pb.JobCopies) -> Iterator[str]:
    """Yields a line about a job's last complete snapshot and one about its last checkpoint."""
    if copies.HasField("snapshot_step"):
        age, took = _seconds(copies.snapshot_age_s), _seconds(copies.snapshot_seconds)
        yield (
            f"snapshot of step {copies.snapshot_step}: complete everywhere, {age} old,"
            f" {_megabytes(copies.snapshot_bytes)}, copied and sent in {took}"
        )
    if copies.HasField("checkpoint"):
        last = copies.checkpoint
        yield (
            f"checkpoint of step {last.step}: {_seconds(last.age_s)} old, {_megabytes(last.size_bytes)},"
            f" written by rank {copies.checkpoint_rank} in {_seconds(last.seconds)}"
        )


def _device(device: pb.Device, *, wide: bool) -> str:
    index = f":{device.index}" if device.index >= 0 else ""
    more = (device.pci_bus_id, device.model) if wide else ()
    return " ".join(filter(None, (f"{device.kind}{index}", *more)))


def _host(worker: pb.WorkerStatus) -> str:
    address = f" ({worker.address})" if worker.address else ""
    topology = f", {worker.topology}" if worker.topology else ""
    return f"{worker.host_name}{address}{topology}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:,.0f} s"


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
