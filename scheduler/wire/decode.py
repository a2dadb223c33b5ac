"""From protobuf to the core's values; nothing malformed gets past here.

Every string and count has a bound, names hold no blanks or control characters, and free text is made
fit for one log line. What breaks a rule raises MalformedError naming the field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from muster.rendezvous.log_lines import one_line
from muster.rendezvous.v1 import rendezvous_pb2 as pb
from muster.scheduler.core import events as e
from muster.scheduler.core import messages as v
from muster.scheduler.errors import MalformedError

PROTOCOL_VERSION = 1
MAX_COUNT = 65_536
MAX_NUMBER = 2**63 - 1
MAX_TEXT = 2048
MAX_FACTS = 32
MAX_RECENT = 64
MAX_UNIQUE_IDS = 512
MAX_UNIQUE_ID_BYTES = 1024
DEVICE_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A decoded Join: the job it names, and what the job's machine is told once it is allowed."""

    job_id: str
    event: e.Joined


# ---------------------------------------------------------------- checks


def _name(field: str, value: str, *, limit: int = 128, empty: bool = False) -> str:
    if not value and empty:
        return value
    if not 1 <= len(value) <= limit:
        raise MalformedError(f"{field} must have 1 to {limit} characters; it has {len(value)}.")
    if not value.isprintable() or " " in value:
        raise MalformedError(
            f"{field} must hold neither blanks nor control characters; it is {value[:140]!a}."
        )
    return value


def _label(field: str, value: str, *, limit: int = 256) -> str:
    if len(value) > limit or not value.isprintable():
        raise MalformedError(f"{field} must be printable and have at most {limit} characters.")
    return value


def _text(field: str, value: str) -> str:
    """Free text for people: kept, but never able to forge a second log line."""
    if len(value) > MAX_TEXT:
        raise MalformedError(f"{field} must have at most {MAX_TEXT} characters; it has {len(value)}.")
    return one_line(value)


def _number(field: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise MalformedError(f"{field} must be from {low} to {high}; it is {value}.")
    return value


def _rate(field: str, value: float) -> float:
    if not math.isfinite(value) or value < 0:
        raise MalformedError(f"{field} must be a number from 0; it is {value}.")
    return value


# ---------------------------------------------------------------- worker to scheduler


def decode_worker_message(data: bytes, session: v.SessionId) -> JoinRequest | e.Event:
    """Decodes one message of a worker's stream.

    Args:
        data: the serialized WorkerMessage.
        session: the stream that it came on.

    Returns:
        A JoinRequest for Join, else the event for the job's machine.

    Raises:
        MalformedError: not protobuf, no body, or a field out of bounds.
    """
    try:
        message = pb.WorkerMessage.FromString(data)
    except DecodeError as error:
        raise MalformedError("The message is not a WorkerMessage of rendezvous.v1.") from error
    body = message.WhichOneof("body")
    if body is None:
        raise MalformedError("The message has no body that this scheduler knows.")
    if body == "join":
        return _join(message.join, session)
    if body == "probed":
        return _probed(message.probed, session)
    generation = _number(
        "generation", getattr(message, body).generation, 1 if body in _NEEDS_GENERATION else 0, MAX_NUMBER
    )
    return _event(body, message, session, generation)


_NEEDS_GENERATION = frozenset(("publish_unique_ids", "built", "quiesced", "suspect_peer", "late"))


def _event(body: str, message: pb.WorkerMessage, session: v.SessionId, generation: int) -> e.Event:
    if body == "heartbeat":
        return _heard(message.heartbeat, session, generation)
    if body == "publish_unique_ids":
        ids = _unique_ids(message.publish_unique_ids)
        return e.UniqueIdsPublished(session, generation, ids)
    if body == "built":
        return e.BuiltReported(session, generation)
    if body == "quiesced":
        step = _number("last_started_step", message.quiesced.last_started_step, 0, MAX_NUMBER)
        return e.QuiescedReported(session, generation, step)
    if body == "suspect_peer":
        suspect = message.suspect_peer
        rank = _number("rank", suspect.rank, 0, MAX_COUNT - 1)
        return e.PeerSuspected(session, generation, rank, _text("detail", suspect.detail))
    if body == "late":
        return e.PeerLate(session, generation, _rate("seconds", message.late.seconds))
    if body == "request_leave":
        return e.LeaveRequested(session, generation, _text("reason", message.request_leave.reason))
    leave = message.leave
    exit_code = _number("exit_code", leave.exit_code, 0, 255)
    reason = _text("reason", leave.reason)
    return e.LeftCleanly(session, generation, leave.finished, reason, leave.consequence, exit_code)


def _join(join: pb.Join, session: v.SessionId) -> JoinRequest:
    if join.protocol_version != PROTOCOL_VERSION:
        raise MalformedError(
            f"The worker speaks protocol version {join.protocol_version}, this scheduler {PROTOCOL_VERSION}.",
            remedy="Install the same version of Muster on both.",
        )
    held_generation = _number("held_generation", join.held_generation, 0, MAX_NUMBER)
    event = e.Joined(
        session=session,
        candidate=_candidate(join),
        held_generation=held_generation,
        held_rank=_number("held_rank", join.held_rank, -1, MAX_COUNT - 1) if held_generation else -1,
        built=join.built,
        step=_number("step", join.step, 0, MAX_NUMBER),
        probe_address=_name("probe_address", join.probe_address, limit=300, empty=True),
    )
    return JoinRequest(_name("job_id", join.job_id), event)


def _candidate(join: pb.Join) -> v.Candidate:
    worker_num = _number("worker_num", join.worker_num, 1, MAX_COUNT)
    if not join.incarnation:
        raise MalformedError("incarnation must be a random number drawn at the worker's start; it is 0.")
    return v.Candidate(
        node_id=_name("node_id", join.node_id),
        incarnation=join.incarnation,
        host=v.Host(
            id=_name("host.id", join.host.id),
            name=_name("host.name", join.host.name, limit=253),
            address=_name("host.address", join.host.address, limit=253, empty=True),
            topology=_label("host.topology", join.host.topology),
        ),
        device=_device(join.device),
        worker_num=worker_num,
        worker_min=_number("worker_min", join.worker_min, 0, worker_num) or worker_num,
        backend=_name("backend", join.backend, limit=32),
        local_index=_number("local_index", join.local_index, -1, MAX_COUNT),
        data_address=_name("data_address", join.data_address, limit=300, empty=True),
        spare=join.spare,
        facts=_facts(join),
    )


def _device(device: pb.Device) -> v.Device:
    if device.kind not in DEVICE_KINDS:
        raise MalformedError(
            f"device.kind must be one of {', '.join(DEVICE_KINDS)}; it is {device.kind[:40]!a}."
        )
    return v.Device(
        kind=device.kind,
        index=_number("device.index", device.index, -1, MAX_COUNT),
        pci_bus_id=_name("device.pci_bus_id", device.pci_bus_id, limit=64, empty=True),
        model=_label("device.model", device.model),
    )


def _facts(join: pb.Join) -> tuple[tuple[str, str], ...]:
    _number("number of facts", len(join.facts), 0, MAX_FACTS)
    return tuple(
        (_name("a fact's name", key, limit=64), _label("a fact's value", value))
        for key, value in sorted(join.facts.items())
    )


def _heard(beat: pb.Heartbeat, session: v.SessionId, generation: int) -> e.Heard:
    _number("number of recent collectives", len(beat.recent), 0, MAX_RECENT)
    return e.Heard(
        session=session,
        generation=generation,
        step=_number("step", beat.step, 0, MAX_NUMBER),
        started_step=_number("started_step", beat.started_step, 0, MAX_NUMBER),
        samples_per_s=_rate("samples_per_s", beat.samples_per_s),
        recent=tuple(_collective(c) for c in beat.recent),
        entered_generation=_number("entered_generation", beat.entered_generation, 0, MAX_NUMBER),
    )


def _collective(c: pb.Collective) -> v.Collective:
    return v.Collective(
        sequence=_number("sequence", c.sequence, 0, MAX_NUMBER),
        name=_name("a collective's name", c.name, limit=64),
        group=_label("a collective's group", c.group, limit=128),
        dtype=_label("a collective's dtype", c.dtype, limit=32),
        size_bytes=_number("size_bytes", c.size_bytes, 0, MAX_NUMBER),
        done=c.done,
    )


def _probed(probed: pb.Probed, session: v.SessionId) -> e.Probed:
    _number("number of unreached workers", len(probed.unreached), 0, MAX_COUNT)
    return e.Probed(
        session=session,
        round=_number("round", probed.round, 0, MAX_NUMBER),
        unreached=tuple(_unreached(each) for each in probed.unreached),
        late=probed.late,
        waits=probed.waits,
        busy=_text("busy", probed.busy),
        seconds=_rate("seconds", probed.seconds),
    )


def _unreached(unreached: pb.Unreached) -> tuple[str, str]:
    node_id = _name("an unreached worker's node_id", unreached.node_id)
    return node_id, _text("detail", unreached.detail) or "no reason given"


def _unique_ids(message: pb.PublishUniqueIds) -> tuple[bytes, ...]:
    _number("number of unique ids", len(message.unique_ids), 1, MAX_UNIQUE_IDS)
    for unique_id in message.unique_ids:
        _number("length of a unique id", len(unique_id), 1, MAX_UNIQUE_ID_BYTES)
    return tuple(message.unique_ids)


# ---------------------------------------------------------------- unary requests


def decode_status_request(data: bytes) -> str:
    """Returns the job that is asked for; "" for the scheduler's own."""
    try:
        return _name("job_id", pb.StatusRequest.FromString(data).job_id, empty=True)
    except DecodeError as error:
        raise MalformedError("The message is not a StatusRequest of rendezvous.v1.") from error


def decode_drain_request(data: bytes) -> tuple[str, e.DrainRequested]:
    """Returns the job ("" for the scheduler's own) and what its machine is asked."""
    try:
        request = pb.DrainRequest.FromString(data)
    except DecodeError as error:
        raise MalformedError("The message is not a DrainRequest of rendezvous.v1.") from error
    job_id = _name("job_id", request.job_id, empty=True)
    return job_id, e.DrainRequested(_name("node_id", request.node_id), _text("reason", request.reason))
