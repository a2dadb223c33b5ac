"""The journal's records of a job, and their JSON form."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.wire.messages import Candidate, Host, Value


@dataclass(frozen=True, slots=True)
class Placed:
    """A candidate with its place in one generation, as journaled."""

    rank: int
    local_rank: int
    local_world_size: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class JobOpened:
    """The job's sizes, once they are known.

    Recorded again if the scheduler is restarted with another ``worker_min``.
    """

    job_id: str
    worker_num: int
    worker_min: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A worker process has a claim on a place (incarnations are durable; heartbeats are not)."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class LeavePlanned:
    """This worker will leave at the next step boundary: it asked to, or an operator drains it."""

    node_id: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class DrainPlanned:
    """Workers of these hosts and node ids will leave at ``at_s``, in seconds since 1970."""

    number: int
    at_s: float
    node_ids: tuple[str, ...]
    hosts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class DrainOver:
    """A planned drain was carried out or cancelled."""

    number: int


@dataclass(frozen=True, slots=True)
class GpuRefused:
    """A GPU has failed a check: no worker on it gets a place until an operator admits it.

    ``gpu`` is its uuid, else its host's name and its index.
    """

    gpu: str
    host: Host
    node_id: str
    device_index: int
    reason: str


@dataclass(frozen=True, slots=True)
class GpuAdmitted:
    """An operator has let a refused GPU in again."""

    gpu: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A worker process has lost its claim: it finished, left, died, was superseded or expelled.

    A process that has been a member can never return under this incarnation.
    """

    node_id: str
    incarnation: int
    reason: str
    finished: bool = False


@dataclass(frozen=True, slots=True)
class GenerationFormed:
    """The membership of a generation, in order of rank."""

    generation: int
    members: tuple[Placed, ...]
    state_source_rank: int
    newcomer_ranks: tuple[int, ...]
    reason: str
    switch_after_step: int = -1


@dataclass(frozen=True, slots=True)
class GroupEstablished:
    """All members of the generation have built their communicator."""

    generation: int


@dataclass(frozen=True, slots=True)
class GenerationEnded:
    """Too few members are left; the job is suspended."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Process:
    """A worker process, and a text about it; ``reason`` is empty if there is none."""

    node_id: str
    incarnation: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """A claim as a snapshot keeps it."""

    candidate: Candidate
    since: int
    newcomer: bool
    leaving: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A job's whole ledger as one record, which replaces all before it when the journal is compacted.

    It is taken only while a generation is established, so that recovery from it gives the same state as
    recovery from the records. The fields are those of :class:`muster.scheduler.core.ledger.Ledger`; an
    optional value is a tuple with at most one item.
    """

    opened: tuple[JobOpened, ...]
    claims: tuple[Holder, ...]
    retired: tuple[Process, ...]
    absent: tuple[Process, ...]
    formed: tuple[GenerationFormed, ...]
    completed: tuple[Process, ...]
    lost: tuple[tuple[str, str], ...]
    parted: tuple[str, ...]
    arriving: tuple[str, ...]
    finished: tuple[str, ...]
    launch: int
    finishing: bool
    established: bool
    stood: int
    suspended: tuple[str, ...]
    drains: tuple[DrainPlanned, ...] = ()
    refused_gpus: tuple[GpuRefused, ...] = ()


Record = (
    JobOpened
    | Admitted
    | LeavePlanned
    | DrainPlanned
    | DrainOver
    | GpuRefused
    | GpuAdmitted
    | Removed
    | GenerationFormed
    | GroupEstablished
    | GenerationEnded
    | JobEnded
    | Snapshot
)


LEFT_OUT = {Snapshot: {"drains": (), "refused_gpus": ()}}
"""Fields that are left out if they have these values, so that versions without these fields can read the
journal.
"""

RECORD_TYPES: Mapping[str, type] = {kind.__name__: kind for kind in typing.get_args(Record)}


class RecordError(ValueError):
    """A value is not a record in the form that this version writes."""


def encode_record(record: Record) -> list[object]:
    """Encodes the record as ``[type name, {field: value}]``, ready for ``json.dumps``."""
    return [type(record).__name__, _encode(record)]


def decode_record(value: object) -> Record:
    """Decodes the result of :func:`encode_record` after it was parsed from JSON.

    Raises:
        RecordError: the type is unknown, a field is missing or unknown, or a value has the wrong type.
    """
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)):
        raise RecordError("a record must be a pair of type name and fields")
    kind = RECORD_TYPES.get(value[0])
    if kind is None:
        raise RecordError(f"unknown type of record {value[0]!r}")
    return typing.cast(Record, _decode(kind, value[1], value[0]))


def _encode(value: object) -> object:
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, Value) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        kind: Any = type(value)
        unsaid = LEFT_OUT.get(kind, {})
        told = {name: getattr(value, name) for name in _hints(kind)}
        return {name: _encode(each) for name, each in told.items() if unsaid.get(name, told) != each}
    return value


@functools.cache
def _hints(kind: Any) -> dict[str, object]:
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in kind._fields} if issubclass(kind, Value) else hints


def _decode(kind: object, value: object, where: str) -> object:
    if isinstance(kind, type) and (issubclass(kind, Value) or dataclasses.is_dataclass(kind)):
        return _decode_fields(kind, value, where)
    if typing.get_origin(kind) is tuple:
        return _decode_tuple(typing.get_args(kind), value, where)
    if not isinstance(kind, type) or type(value) is not kind:
        raise RecordError(f"{where} must be of type {kind}, not {type(value).__name__}")
    return value


def _decode_fields(kind: Any, value: object, where: str) -> object:
    hints = _hints(kind)
    if isinstance(value, dict):
        value = {**{name: list(each) for name, each in LEFT_OUT.get(kind, {}).items()}, **value}
    if not isinstance(value, dict) or value.keys() != hints.keys():
        raise RecordError(f"{where} must have exactly the fields {', '.join(hints)}")
    return kind(**{name: _decode(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})


def _decode_tuple(items: tuple[object, ...], value: object, where: str) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise RecordError(f"{where} must be a list, not {type(value).__name__}")
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_decode(items[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if len(items) != len(value):
        raise RecordError(f"{where} must have {len(items)} items, not {len(value)}")
    return tuple(
        _decode(kind, item, f"{where}[{index}]")
        for index, (kind, item) in enumerate(zip(items, value, strict=True))
    )
