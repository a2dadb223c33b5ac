"""Between protobuf and the worker's values. Strict: nothing malformed reaches the machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from muster.rendezvous.log_lines import one_line
from muster.rendezvous.v1 import rendezvous_pb2 as pb
from muster.worker.control import messages as m

PROTOCOL_VERSION = 1
MAX_RECENT = 64
MAX_TEXT = 2048
_MAX_WORLD = 65_536
_MAX_UNIQUE_IDS = 512
_MAX_UNIQUE_ID_BYTES = 1024


class WireError(ValueError):
    """A message breaks the protocol; names the field."""


# ---------------------------------------------------------------- worker to scheduler


def encode(message: m.Outgoing) -> bytes:
    """Encodes one message to the scheduler as a serialized WorkerMessage."""
    return _ENCODERS[type(message)](message).SerializeToString()


def _join(join: m.Join) -> pb.WorkerMessage:
    profile = join.profile
    body = pb.Join(
        protocol_version=PROTOCOL_VERSION,
        job_id=profile.job_id,
        node_id=profile.node_id,
        incarnation=profile.incarnation,
        worker_num=profile.worker_num,
        worker_min=profile.worker_min,
        spare=profile.spare,
        host=_host_message(profile.host),
        device=_device_message(profile.device),
        local_index=profile.local_index,
        data_address=profile.data_address,
        held_generation=join.held_generation,
        held_rank=join.held_rank,
        built=join.built,
        step=join.step,
        facts=dict(profile.facts),
        backend=profile.backend,
        probe_address=profile.probe_address,
    )
    return pb.WorkerMessage(join=body)


def _host_message(host: m.Host) -> pb.Host:
    return pb.Host(id=host.id, name=host.name, address=host.address, topology=host.topology)


def _device_message(device: m.Device) -> pb.Device:
    return pb.Device(kind=device.kind, index=device.index, pci_bus_id=device.pci_bus_id, model=device.model)


def _publish(publish: m.PublishUniqueIds) -> pb.WorkerMessage:
    body = pb.PublishUniqueIds(generation=publish.generation, unique_ids=publish.unique_ids)
    return pb.WorkerMessage(publish_unique_ids=body)


def _built(built: m.Built) -> pb.WorkerMessage:
    return pb.WorkerMessage(built=pb.Built(generation=built.generation))


def _heartbeat(beat: m.Heartbeat) -> pb.WorkerMessage:
    body = pb.Heartbeat(
        generation=beat.generation,
        step=beat.step,
        samples_per_s=beat.samples_per_s,
        started_step=beat.started_step,
        entered_generation=beat.entered_generation,
        recent=[
            pb.Collective(
                sequence=c.sequence,
                name=c.name,
                group=c.group,
                dtype=c.dtype,
                size_bytes=c.size_bytes,
                done=c.done,
            )
            for c in beat.recent[-MAX_RECENT:]
        ],
    )
    return pb.WorkerMessage(heartbeat=body)


def _quiesced(quiesced: m.Quiesced) -> pb.WorkerMessage:
    body = pb.Quiesced(generation=quiesced.generation, last_started_step=quiesced.last_started_step)
    return pb.WorkerMessage(quiesced=body)


def _suspect(suspect: m.SuspectPeer) -> pb.WorkerMessage:
    detail = suspect.detail[:MAX_TEXT]
    body = pb.SuspectPeer(generation=suspect.generation, rank=suspect.rank, detail=detail)
    return pb.WorkerMessage(suspect_peer=body)


def _late(late: m.Late) -> pb.WorkerMessage:
    return pb.WorkerMessage(late=pb.Late(generation=late.generation, seconds=late.seconds))


def _probed(probed: m.Probed) -> pb.WorkerMessage:
    unreached = [pb.Unreached(node_id=n, detail=one_line(why)[:MAX_TEXT]) for n, why in probed.unreached]
    body = pb.Probed(
        round=probed.round,
        unreached=unreached,
        late=probed.late,
        waits=probed.waits,
        busy=one_line(probed.busy)[:MAX_TEXT],
        seconds=probed.seconds,
    )
    return pb.WorkerMessage(probed=body)


def _request_leave(request: m.RequestLeave) -> pb.WorkerMessage:
    body = pb.RequestLeave(generation=request.generation, reason=request.reason[:MAX_TEXT])
    return pb.WorkerMessage(request_leave=body)


def _leave(leave: m.Leave) -> pb.WorkerMessage:
    body = pb.Leave(
        generation=leave.generation,
        finished=leave.finished,
        reason=leave.reason[:MAX_TEXT],
        consequence=leave.consequence,
        exit_code=leave.exit_code,
    )
    return pb.WorkerMessage(leave=body)


_ENCODERS: dict[type, Callable[[Any], pb.WorkerMessage]] = {
    m.Join: _join,
    m.PublishUniqueIds: _publish,
    m.Built: _built,
    m.Heartbeat: _heartbeat,
    m.Quiesced: _quiesced,
    m.SuspectPeer: _suspect,
    m.Late: _late,
    m.Probed: _probed,
    m.RequestLeave: _request_leave,
    m.Leave: _leave,
}


# ---------------------------------------------------------------- scheduler to worker


def decode(data: bytes) -> m.Incoming:
    """Decodes one message of the scheduler.

    Args:
        data: a serialized SchedulerMessage.

    Raises:
        WireError: not protobuf, no known body, or a field out of bounds.
    """
    try:
        message = pb.SchedulerMessage.FromString(data)
    except DecodeError as error:
        raise WireError("The message is not a SchedulerMessage of rendezvous.v1.") from error
    body = message.WhichOneof("body")
    if body is None:
        raise WireError("The message has no body that this worker knows.")
    return _DECODERS[body](getattr(message, body))


def _welcome(body: pb.Welcome) -> m.Welcome:
    return m.Welcome(
        _seconds("heartbeat_interval_s", body.heartbeat_interval_s, above=0.0),
        _seconds("node_timeout_s", body.node_timeout_s, above=0.0),
        _seconds("topo_timeout_s", body.topo_timeout_s, above=0.0),
        body.spare,
    )


def _waiting(body: pb.Waiting) -> m.Waiting:
    return m.Waiting(body.present, body.needed, one_line(body.sentence))


def _assignment(body: pb.Assignment) -> m.Assignment:
    hosts = [m.Host(host.id, host.name, host.address, host.topology) for host in body.hosts]
    members = tuple(_member(member, hosts) for member in body.members)
    size = len(members)
    if [member.rank for member in members] != list(range(size)):
        raise WireError("members must be in order of rank, from 0, without a gap.")
    if len({member.node_id for member in members}) != size:
        raise WireError("a node id stands twice among the members.")
    rank = _number("rank", body.rank, -1, size - 1)
    return m.Assignment(
        generation=_generation(body.generation),
        rank=rank,
        members=members,
        state_source_rank=_number("state_source_rank", body.state_source_rank, -1, size - 1),
        newcomer_ranks=tuple(_number("newcomer_ranks", r, 0, size - 1) for r in body.newcomer_ranks),
        unique_id_count=_number(
            "unique_id_count", body.unique_id_count, 0 if rank < 0 else 1, _MAX_UNIQUE_IDS
        ),
        reason=one_line(body.reason),
        switch_after_step=_number("switch_after_step", body.switch_after_step, -1, 2**63 - 1),
        lost=tuple(one_line(sentence) for sentence in body.lost),
        launch=body.launch,
        first_loss=_first_loss(body),
    )


def _first_loss(body: pb.Assignment | pb.Suspended | pb.Ended) -> m.FirstLoss | None:
    loss = body.first_loss
    if not loss.node_id:
        return None
    exit_code = _number("exit_code", loss.exit_code, 0, 255)
    return m.FirstLoss(one_line(loss.node_id), loss.incarnation, one_line(loss.sentence), exit_code)


def _member(body: pb.Member, hosts: list[m.Host]) -> m.Member:
    device = body.device
    if not body.node_id:
        raise WireError("a member has no node_id.")
    local_world_size = _number("local_world_size", body.local_world_size, 1, _MAX_WORLD)
    return m.Member(
        rank=_number("rank", body.rank, 0, _MAX_WORLD - 1),
        node_id=body.node_id,
        incarnation=body.incarnation,
        host=hosts[_number("host_index", body.host_index, 0, len(hosts) - 1)],
        device=m.Device(device.kind, device.index, device.pci_bus_id, device.model),
        local_rank=_number("local_rank", body.local_rank, 0, local_world_size - 1),
        local_world_size=local_world_size,
        data_address=body.data_address,
    )


def _unique_ids(body: pb.UniqueIds) -> m.UniqueIds:
    _number("number of unique ids", len(body.unique_ids), 1, _MAX_UNIQUE_IDS)
    for unique_id in body.unique_ids:
        _number("length of a unique id", len(unique_id), 1, _MAX_UNIQUE_ID_BYTES)
    return m.UniqueIds(_generation(body.generation), tuple(body.unique_ids))


def _suspended(body: pb.Suspended) -> m.Suspended:
    wait_s = _seconds("wait_s", body.wait_s, above=-1.0)
    reason = one_line(body.reason)
    return m.Suspended(_generation(body.generation), reason, wait_s, _first_loss(body), body.save)


def _probe(body: pb.Probe) -> m.Probe:
    _number("number of targets", len(body.targets), 0, _MAX_WORLD)
    return m.Probe(body.round, tuple((target.node_id, target.address) for target in body.targets))


def _quiesce(body: pb.Quiesce) -> m.Quiesce:
    return m.Quiesce(_generation(body.generation), one_line(body.reason))


def _refused(body: pb.Refused) -> m.Refused:
    try:
        code = m.RefusalCode(body.code)
    except ValueError:  # a newer scheduler's reason: its sentence says what matters
        code = m.RefusalCode.UNSPECIFIED
    return m.Refused(code, one_line(body.sentence))


def _ended(body: pb.Ended) -> m.Ended:
    return m.Ended(body.ok, one_line(body.reason), body.leave, _first_loss(body))


def _group_built(body: pb.GroupBuilt) -> m.GroupBuilt:
    return m.GroupBuilt(_generation(body.generation))


_DECODERS: dict[str, Callable[[Any], m.Incoming]] = {
    "welcome": _welcome,
    "waiting": _waiting,
    "assignment": _assignment,
    "unique_ids": _unique_ids,
    "suspended": _suspended,
    "quiesce": _quiesce,
    "probe": _probe,
    "refused": _refused,
    "ended": _ended,
    "group_built": _group_built,
}


def _generation(value: int) -> int:
    return _number("generation", value, 1, 2**63 - 1)


def _number(field: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise WireError(f"{field} must be from {low} to {high}; it is {value}.")
    return value


def _seconds(field: str, value: float, *, above: float) -> float:
    if not math.isfinite(value) or value <= above:
        raise WireError(f"{field} must be a number of seconds; it is {value}.")
    return value
