"""Computes which workers of a launch start on this host, and their ranks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from muster.errors import SettingsError
from muster.launch.parsing import HostShare
from muster.wire.variables import TABLE

WORKERS_ANYWHERE = 32
WORKERS_PER_CORE = 8
"""Workers per core beyond which a launch is refused, because the number is more likely a mistake."""

MOST_SPARES = int(TABLE["MS_SPARES"].high)
"""Maximum number of spares of a job."""


@dataclass(frozen=True, slots=True)
class Request:
    """The options that decide which workers start where; zero or empty: not given."""

    workers: int = 0
    per_node: int = 0
    nodes: int = 0
    node_rank: int | None = None
    hosts: tuple[HostShare, ...] = field(default=())
    meeting: str = ""
    """The scheduler's host, if hosts without a number must find out which of them it is."""

    oversubscribe: bool = False
    """Whether more workers than the cores can carry are wanted."""

    share_gpus: bool = False
    """Whether more workers than GPUs are wanted."""

    spares: int = 0
    """Number of further workers on each host, which wait for a place to become free."""


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """The number of workers, and which of them are this host's."""

    world_size: int
    local_size: int
    first_rank: int | None
    """Rank of this host's first worker; None if only the scheduler knows it."""

    scheduler_host: str = ""
    """The scheduler's host, as far as the options say; empty if they do not."""

    first_host: bool = True

    spares: int = 0
    """Number of workers of this host that wait for a place to become free, in addition to ``local_size``."""

    all_spares: int = 0
    """Number of spares of all hosts."""

    first_spare: int | None = 0
    """Number of this host's first spare among those of all hosts; None if hosts have no numbers."""


def count_workers(request: Request, *, here: Collection[str], devices: int, cores: int = 0) -> WorkerCounts:
    """Decides how many workers this host starts and what their ranks are.

    Args:
        request: the options.
        here: the names and addresses by which a host list, or ``--join``, may mean this host.
        devices: number of GPUs that this host offers; 0 if it has none.
        cores: number of cores that this host offers; 0: not known.

    Raises:
        SettingsError: the options contradict each other, or ask for more than there is.
    """
    if request.hosts:
        counts = _counts_of_hosts(request, set(here))
    elif request.nodes > 1:
        counts = _counts_of_nodes(request, here, devices)
    else:
        counts = _counts_of_one_host(request, devices)
    asked = f"{counts.local_size} workers"
    if counts.spares:
        asked += f" and {counts.spares} {'spare' if counts.spares == 1 else 'spares'}"
    count = counts.local_size + counts.spares
    if devices and count > devices and not request.share_gpus:
        fewer = f"-n {devices - counts.spares}" if counts.spares < devices else "--spares"
        raise SettingsError(
            f"{asked} are asked for on this host, which offers {devices} "
            f"{'device' if devices == 1 else 'devices'}; each worker needs its own device.",
            remedy=f"Ask for fewer ({fewer}), for CPU workers (--devices none), or, to try things out, "
            "for several workers on a GPU (--share-gpus).",
        )
    most = max(WORKERS_ANYWHERE, WORKERS_PER_CORE * cores)
    if cores and count > most and not request.oversubscribe:
        raise SettingsError(
            f"{asked} are asked for on this host, whose {cores} "
            f"{'core' if cores == 1 else 'cores'} can carry {most}; "
            "ask for fewer, or add --oversubscribe if you mean it."
        )
    return counts


def _counts_of_one_host(request: Request, devices: int) -> WorkerCounts:
    if request.node_rank:
        raise SettingsError(f"--node-rank {request.node_rank} needs --nnodes or -H.")
    given = {count for count in (request.workers, request.per_node) if count}
    if len(given) > 1:
        raise SettingsError(
            f"-n {request.workers} and --nproc-per-node {request.per_node} differ, and there is one host."
        )
    count = given.pop() if given else devices
    if not count:
        raise SettingsError("This host offers no GPU to count: say with -n how many workers to start.")
    return _with_spares(WorkerCounts(count, count, 0), request, 0, 1)


def _with_spares(counts: WorkerCounts, request: Request, position: int | None, hosts: int) -> WorkerCounts:
    """Adds the spares: the same count on every host, so that a host without a number knows its spares."""
    each, total = request.spares, request.spares * hosts
    if total > MOST_SPARES:
        raise SettingsError(
            f"--spares {each} on {hosts} {'host' if hosts == 1 else 'hosts'} makes {total} spares; a job has"
            f" at most {MOST_SPARES}."
        )
    if not each:
        return counts
    return replace(
        counts, spares=each, all_spares=total, first_spare=None if position is None else each * position
    )


def _counts_of_nodes(request: Request, here: Collection[str], devices: int) -> WorkerCounts:
    nodes, rank = request.nodes, request.node_rank
    if rank is not None and not 0 <= rank < nodes:
        raise SettingsError(f"--node-rank is {rank}; with --nnodes {nodes} it must be from 0 to {nodes - 1}.")
    per_node = request.per_node or (request.workers // nodes if request.workers else devices)
    if not per_node and not request.workers:
        raise SettingsError("This host offers no GPU to count: say with --nproc-per-node how many workers.")
    if request.workers and request.workers != per_node * nodes:
        if not request.per_node:
            raise SettingsError(f"-n is {request.workers}, which {nodes} hosts cannot share evenly.")
        raise SettingsError(
            f"-n is {request.workers}, but {nodes} hosts with {per_node} workers make {per_node * nodes}."
        )
    first = None if rank is None else rank * per_node
    meets_here = not request.meeting or request.meeting in here
    first_host = meets_here if rank is None else rank == 0
    counts = WorkerCounts(per_node * nodes, per_node, first, first_host=first_host)
    return _with_spares(counts, request, rank, nodes)


def _counts_of_hosts(request: Request, here: set[str]) -> WorkerCounts:
    hosts = request.hosts
    if request.nodes and request.nodes != len(hosts):
        raise SettingsError(f"--nnodes is {request.nodes}, but the host list names {len(hosts)} hosts.")
    if request.per_node:
        hosts = tuple(HostShare(host.name, request.per_node) for host in hosts)
    total = sum(host.slots for host in hosts)
    if request.workers > total:
        raise SettingsError(f"-n is {request.workers}, but the host list has room for {total} workers.")
    position = _position(hosts, request.node_rank, here)
    left = request.workers or total
    first = sum(host.slots for host in hosts[:position])
    local = max(0, min(hosts[position].slots, left - first))
    if not local:
        raise SettingsError(
            f"The hosts before {hosts[position].name} start all {left} workers of -n: none is left for it."
        )
    several = len(hosts) > 1
    counts = WorkerCounts(left, local, first, hosts[0].name if several else "", first_host=position == 0)
    begins = [sum(host.slots for host in hosts[:at]) for at in range(len(hosts))]
    return _with_spares(counts, request, position, sum(begin < left for begin in begins))


def _position(hosts: Sequence[HostShare], node_rank: int | None, here: set[str]) -> int:
    if node_rank is not None:
        if not 0 <= node_rank < len(hosts):
            raise SettingsError(f"--node-rank is {node_rank}; it must be from 0 to {len(hosts) - 1}.")
        return node_rank
    matches = [index for index, host in enumerate(hosts) if host.name in here]
    if len(matches) != 1:
        names = ", ".join(host.name for host in hosts)
        what = "is not in the host list" if not matches else "answers to several names of the host list"
        raise SettingsError(
            f"This host ({', '.join(sorted(here))}) {what} ({names}); say which it is with --node-rank."
        )
    return matches[0]
