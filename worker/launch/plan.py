"""What the launcher will start, worked out from its options and the environment: values only.

The launcher (:mod:`muster.worker.launch.launcher`) looks at the machine, calls :func:`plan_layout` and
:func:`plan_workers`, and starts what they say.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from muster.worker.errors import SettingsError
from muster.worker.launch.parsing import HostShare
from muster.worker.launch.rank_table_file import table_file

WORKERS_ANYWHERE = 32
WORKERS_PER_CORE = 8
"""More than both start so slowly, or take so much memory, that the number is more likely a slip."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Layout:
    """How many workers there are and which of them are this host's."""

    world_size: int
    local_size: int
    first_rank: int | None
    """Rank of this host's first worker; None where only the scheduler can tell."""

    scheduler_host: str = ""
    """Where the scheduler runs as far as the options say; empty when they do not."""

    first_host: bool = True


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker of this host. ``rank`` is None where only the scheduler will tell it."""

    index: int
    rank: int | None
    host: str
    env: Mapping[str, str]
    cores: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Names its log file and its lines on the terminal; hosts that share a directory differ in it."""
        return f"{self.host}_{self.index}" if self.rank is None else str(self.rank)

    @property
    def number(self) -> str:
        """What ``--tail`` calls it: its rank, or its index on this host where the rank is not known."""
        return str(self.index if self.rank is None else self.rank)


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asks for, as far as it decides who starts where. Zero or empty: not said."""

    workers: int = 0
    per_node: int = 0
    nodes: int = 0
    node_rank: int | None = None
    hosts: tuple[HostShare, ...] = field(default=())
    meeting: str = ""
    """The scheduler's host, where hosts without a number must find out which of them it is."""

    oversubscribe: bool = False
    """More workers than the cores can carry are wanted."""


# ---------------------------------------------------------------- who starts where


def plan_layout(request: Request, *, here: Collection[str], devices: int, cores: int = 0) -> Layout:
    """Decides how many workers this host starts and what their ranks are.

    Args:
        request: the options.
        here: the names and addresses by which a host list, or ``--join``, may mean this host.
        devices: GPUs this host offers; 0 when it has none.
        cores: that this host offers; 0: not known.

    Raises:
        SettingsError: the options contradict each other, or ask for more than there is.
    """
    if request.hosts:
        layout = _layout_of_hosts(request, set(here))
    elif request.nodes > 1:
        layout = _layout_of_nodes(request, here, devices)
    else:
        layout = _layout_of_one_host(request, devices)
    if devices and layout.local_size > devices:
        raise SettingsError(
            f"{layout.local_size} workers are asked for on this host, which offers {devices} "
            f"{'device' if devices == 1 else 'devices'}; a worker has a device of its own. "
            "Ask for fewer, or for CPU workers with --devices none."
        )
    most = max(WORKERS_ANYWHERE, WORKERS_PER_CORE * cores)
    if cores and layout.local_size > most and not request.oversubscribe:
        raise SettingsError(
            f"{layout.local_size} workers are asked for on this host, whose {cores} "
            f"{'core' if cores == 1 else 'cores'} can carry {most}; "
            "ask for fewer, or add --oversubscribe if you mean it."
        )
    return layout


def _layout_of_one_host(request: Request, devices: int) -> Layout:
    if request.node_rank:
        raise SettingsError(f"--node-rank {request.node_rank} needs --nnodes or -H.")
    counts = {count for count in (request.workers, request.per_node) if count}
    if len(counts) > 1:
        raise SettingsError(
            f"-n {request.workers} and --nproc-per-node {request.per_node} differ, and there is one host."
        )
    count = counts.pop() if counts else devices
    if not count:
        raise SettingsError("This host offers no GPU to count: say with -n how many workers to start.")
    return Layout(count, count, 0)


def _layout_of_nodes(request: Request, here: Collection[str], devices: int) -> Layout:
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
    return Layout(per_node * nodes, per_node, first, first_host=meets_here if rank is None else rank == 0)


def _layout_of_hosts(request: Request, here: set[str]) -> Layout:
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
            f"-n {left} is used up by the hosts before {hosts[position].name}: nothing to start here."
        )
    several = len(hosts) > 1
    return Layout(left, local, first, hosts[0].name if several else "", first_host=position == 0)


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


# ---------------------------------------------------------------- the environment of each worker


def plan_workers(
    layout: Layout,
    env: Mapping[str, str],
    *,
    common: Mapping[str, str],
    host: str = "localhost",
    devices: int = 0,
    cores: Sequence[int] = (),
    device_ids: Sequence[int] = (),
) -> tuple[WorkerPlan, ...]:
    """Gives each worker of this host its name and environment.

    Args:
        layout: from :func:`plan_layout`.
        env: the launcher's own environment; what the user set there is kept where it makes sense.
        common: variables that all workers get (the scheduler's address, the config file).
        host: this host's name, for the labels of workers whose rank is not known.
        devices: how many GPUs the host offers; each worker takes the one of its local index.
        cores: cores to spread over the workers, in order; empty to leave them alone.
        device_ids: of workers without GPUs, the devices that a rank table calls theirs.

    Returns:
        The workers; ``env`` of each holds only what differs from the launcher's.
    """
    plans = []
    for index in range(layout.local_size):
        rank = _own_rank(index, layout, env)
        own = {
            **common,
            **_thread_limits(layout.local_size, env),
            "MS_ROLE": "MS_WORKER",
            "MS_WORKER_NUM": str(layout.world_size),
            "MS_LOCAL_INDEX": str(index),
            **_node_id(index, rank, layout.local_size, env),
        }
        if devices and not (layout.local_size == 1 and env.get("DEVICE_ID")):
            own["DEVICE_ID"] = str(index)
        elif index < len(device_ids) and not devices and not env.get("DEVICE_ID"):
            own["DEVICE_ID"] = str(device_ids[index])
        part = _share(cores, index, layout.local_size)
        plans.append(WorkerPlan(index, rank, _in_file_names(host), own, part))
    return tuple(plans)


def _own_rank(index: int, layout: Layout, env: Mapping[str, str]) -> int | None:
    """The rank that the launcher itself decides, by a node id that is the rank; else None."""
    if layout.world_size == 1:
        return 0
    if layout.first_rank is None or env.get("MS_NODE_ID") or table_file(env):
        return None
    return layout.first_rank + index


def _in_file_names(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", host)


def _thread_limits(local_size: int, env: Mapping[str, str]) -> dict[str, str]:
    """One thread per worker, unless the user said otherwise: n workers with n threads each only fight."""
    if local_size < 2:
        return {}
    return {name: "1" for name in THREAD_VARIABLES if name not in env}


def _node_id(index: int, rank: int | None, local_size: int, env: Mapping[str, str]) -> dict[str, str]:
    given = env.get("MS_NODE_ID", "")
    if given:
        return {} if local_size == 1 else {"MS_NODE_ID": f"{given}-{index}"}
    if rank is None or table_file(env):
        return {}
    return {"MS_NODE_ID": str(rank)}


def _share(cores: Sequence[int], index: int, parts: int) -> tuple[int, ...]:
    if len(cores) < parts:
        return (cores[index % len(cores)],) if cores else ()
    return tuple(cores[index * len(cores) // parts : (index + 1) * len(cores) // parts])
