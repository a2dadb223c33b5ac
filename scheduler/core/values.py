"""What events, messages and records are about: hosts, devices, candidates, members, settings."""

from __future__ import annotations

from dataclasses import dataclass

SessionId = int
"""Number of one worker stream, given by the adapter; never reused within a scheduler process."""


@dataclass(frozen=True, slots=True)
class Host:
    """One machine. ``id`` tells hosts apart even where two share a name."""

    id: str
    name: str
    address: str
    topology: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a host; ``index`` is -1 while the worker has not chosen one."""

    kind: str = "cpu"
    index: int = -1
    pci_bus_id: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker process that asks for a place, as its Join message tells."""

    node_id: str
    incarnation: int
    host: Host
    device: Device
    worker_num: int
    worker_min: int
    backend: str
    local_index: int = -1
    data_address: str = ""
    spare: bool = False
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """A candidate with its place in one generation."""

    rank: int
    local_rank: int
    local_world_size: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as a worker last saw it."""

    sequence: int
    name: str
    group: str
    dtype: str
    size_bytes: int
    done: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """What the core must know of the scheduler's settings.

    ``worker_num`` 0 means: the first worker that joins this job says it.
    """

    worker_num: int
    worker_min: int
    spares: int
    topo_timeout_s: float
    node_timeout_s: float
    heartbeat_interval_s: float
    waiting_report_interval_s: float = 10.0
    stall_timeout_s: float = 60.0
    hang_timeout_s: float = 600.0
    ranks_per_unique_id: int = 128
    rank_table: RankTable | None = None


@dataclass(frozen=True, slots=True)
class RankTableEntry:
    """One line of a rank table: this device of this server has this rank."""

    rank: int
    server_id: str
    device_index: int


@dataclass(frozen=True, slots=True)
class RankTable:
    """Fixed ranks by host and device; entries in order of rank, ranks dense from 0."""

    entries: tuple[RankTableEntry, ...]
