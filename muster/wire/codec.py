"""Encodes the values of :mod:`muster.wire.messages` as protobuf, and decodes and checks them.

Decoders refuse all malformed messages. Every number has bounds, and workers' messages have a limit for every
string and count. Names have no blanks or control characters, and free text is made to fit one log line.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

from google.protobuf.message import DecodeError

from muster.wire import messages, rules
from muster.wire.log_lines import one_line
from muster.wire.messages import Value
from muster.wire.rules import MAX_NUMBER as MAX_NUMBER
from muster.wire.rules import MAX_STACKS_BYTES as MAX_STACKS_BYTES
from muster.wire.rules import MAX_TEXT as MAX_TEXT
from muster.wire.rules import Rule
from muster.wire.rules import WireError as WireError
from muster.wire.v1 import rendezvous_pb2 as pb

PROTOCOL_VERSION = 1
MAX_COUNT = 65_536
MAX_FACTS = 32
MAX_RECENT = 64
MAX_UNIQUE_IDS = 512
MAX_PARTNERS = 64
MAX_UNIQUE_ID_BYTES = 1024
TIMED = 7
"""The number of durations in a heartbeat's ``times``."""
LONGEST_TIMES_S = 1e9
"""Upper limit of the sum of these durations, in seconds; the check also refuses NaN."""
PACKED_FROM_BYTES = 4096
"""Size in bytes from which an assignment is compressed, once for all members."""
MAX_UNPACKED_BYTES = 64 * 1024 * 1024
"""Size limit of an unpacked assignment in bytes, above what MAX_COUNT members need."""
DELTA_FROM_MEMBERS = 64
"""Number of members from which receivers that hold the generation before are sent only changes."""
DEVICE_KINDS = ("cpu", "cuda")
GPU_STATES = ("well", "suspect", "ill")
MAX_REASONS, MAX_REASON, MAX_XIDS = 8, 120, 16
"""Limits of a heartbeat's report on a GPU: the number of reasons, their characters, the number of Xids."""

ValueT = TypeVar("ValueT", bound=Value)

# ---------------------------------------------------------------- encoding

_WRAPPERS: tuple[Any, ...] = (pb.WorkerMessage, pb.SchedulerMessage)
_BODIES = {
    getattr(messages, field.message_type.name): (wrapper, field.name)
    for wrapper in _WRAPPERS
    for field in wrapper.DESCRIPTOR.fields
}
"""For each message class, the protobuf message that carries it, and its field."""


def encode(message: messages.WorkerMessage | messages.SchedulerMessage) -> bytes:
    """Encodes one message of a session as a serialized WorkerMessage or SchedulerMessage."""
    wrapper, body = _BODIES[type(message)]
    return cast(bytes, wrapper(**{body: to_proto(message)}).SerializeToString())


def to_proto(value: Any) -> Any:
    """Converts a value, or one of its fields, to protobuf's classes."""
    if isinstance(value, Value):
        return _ENCODERS.get(type(value), _same_fields)(value)
    return [to_proto(item) for item in value] if isinstance(value, tuple) else value


_AS_THEY_ARE = frozenset((int, float, bool, str, bytes))


def _same_fields(value: Any) -> Any:
    fields = {
        name: item if type(item) in _AS_THEY_ARE else to_proto(item) for name, item in vars(value).items()
    }
    return vars(pb)[type(value).__name__](**fields)


def _join(join: messages.Join) -> pb.Join:
    return pb.Join(
        protocol_version=PROTOCOL_VERSION,
        held_generation=join.held_generation,
        held_rank=join.held_rank,
        built=join.built,
        step=join.step,
        held_world_size=join.held_world_size,
        takes_deltas=join.takes_deltas,
        gives_stacks=join.gives_stacks,
        **{
            **{name: to_proto(item) for name, item in vars(join.profile).items()},
            "facts": dict(join.profile.facts),
            "gpu_fault": join.profile.gpu_fault[:MAX_TEXT],
        },
    )


def _heartbeat(beat: messages.Heartbeat) -> Any:
    body = _same_fields(beat.replaced(recent=beat.recent[-MAX_RECENT:], numbers=()))
    body.numbers.update(beat.numbers)
    return body


def _text_cut(*fields: str) -> Callable[[Any], Any]:
    return lambda message: _same_fields(
        message.replaced(**{field: getattr(message, field)[:MAX_TEXT] for field in fields})
    )


def _probed(probed: messages.Probed) -> pb.Probed:
    return pb.Probed(
        round=probed.round,
        unreached=[pb.Unreached(node_id=n, detail=one_line(why)[:MAX_TEXT]) for n, why in probed.unreached],
        late=probed.late,
        waits=probed.waits,
        busy=one_line(probed.busy)[:MAX_TEXT],
        seconds=probed.seconds,
    )


def _probe(probe: messages.Probe) -> pb.Probe:
    targets = [pb.ProbeTarget(node_id=node_id, address=address) for node_id, address in probe.targets]
    return pb.Probe(round=probe.round, targets=targets)


def _assignment(assignment: messages.Assignment) -> pb.Assignment:
    """Encodes an assignment; each host is encoded once, even if several of its devices take part."""
    hosts = list(dict.fromkeys(member.host for member in assignment.members))
    index = {host: i for i, host in enumerate(hosts)}
    members = [_member(each, index[each.host]) for each in assignment.members]
    rest = {name: to_proto(item) for name, item in vars(assignment).items() if name != "members"}
    return pb.Assignment(hosts=to_proto(tuple(hosts)), members=members, **rest)


def _member(member: messages.Member, host_index: int) -> pb.Member:
    fields = {name: to_proto(item) for name, item in vars(member).items() if name != "host"}
    return pb.Member(host_index=host_index, **fields)


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    messages.Join: _join,
    messages.Heartbeat: _heartbeat,
    messages.StepTimes: lambda times: (times.steps, *times.seconds, times.link),
    messages.SuspectPeer: _text_cut("detail"),
    messages.RequestLeave: _text_cut("reason"),
    messages.Leave: _text_cut("reason", "gpu_fault"),
    messages.Probed: _probed,
    messages.Probe: _probe,
    messages.Assignment: _assignment,
}
"""Encoders of messages whose fields differ from protobuf's."""


class AssignmentEncoder:
    """Encodes messages for many receivers; their common part is encoded once.

    Assignments of a generation differ only in the rank. If the members are encoded once, 1,000 assignments of
    1,000 members take milliseconds each, instead of minutes together. A receiver that has the generation
    before gets only the members that have changed.

    Args:
        delta_from: the number of members from which on only changes are sent.
    """

    def __init__(self, *, delta_from: int = DELTA_FROM_MEMBERS) -> None:
        self._delta_from = delta_from
        self._last: messages.Assignment | None = None
        self._before: messages.Assignment | None = None
        self._whole: bytes | None = None
        self._delta: bytes | None = None
        self._other: tuple[messages.SchedulerMessage | None, bytes] = (None, b"")

    def encode(self, message: messages.SchedulerMessage) -> bytes:
        """Encodes any message; the members of an assignment are encoded once for all its receivers."""
        return b"".join(self.encode_parts(message))

    def encode_parts(self, message: messages.SchedulerMessage, held: int = 0) -> tuple[bytes, ...]:
        """Encodes any message in pieces to be concatenated; an assignment's receivers share the large piece.

        The small piece repeats the assignment's field, with only the rank in it; protobuf merges the two
        (Protocol Buffers, "Encoding": last one wins, and sub-messages are merged).

        Args:
            message: the message.
            held: the generation of the last assignment on the receiver's stream; 0: there was none, or the
                receiver takes no deltas.
        """
        if not isinstance(message, messages.Assignment):
            if self._other[0] is not message:  # One object for all members, such as unique ids.
                self._other = (message, encode(message))
            return (self._other[1],)
        last = self._last
        if last is None or not _same_but_rank(last, message):
            if last is not None and last.generation < message.generation:
                self._before = last
            self._last, self._whole, self._delta = message, None, None
        own = pb.SchedulerMessage(assignment=pb.Assignment(rank=message.rank))
        return self._shared(message, held), own.SerializeToString()

    def _shared(self, message: messages.Assignment, held: int) -> bytes:
        before = self._before
        if before is not None and 0 < held == before.generation < message.generation:
            if self._delta is None:
                large = len(message.members) >= self._delta_from
                delta = _changes(before, message) if large else None
                self._delta = _packed(delta) if delta is not None else b""
            if self._delta:
                return self._delta
        if self._whole is None:
            self._whole = _packed(_assignment(message.replaced(rank=0)))
        return self._whole


def _changes(before: messages.Assignment, new: messages.Assignment) -> pb.Assignment | None:
    """Encodes only the members that differ from the previous assignment; returns None if too many do."""
    ranks = {member.node_id: member.rank for member in before.members}
    changed: list[messages.Member] = []
    kept: list[int] = []
    for member in new.members:
        rank = ranks.get(member.node_id, -1)
        if rank < 0 or before.members[rank].replaced(rank=member.rank) != member:
            changed.append(member)
        elif kept and rank == kept[-2] + kept[-1]:
            kept[-1] += 1
        else:
            kept += (rank, 1)
    if 2 * len(changed) > len(new.members):
        return None
    whole = _assignment(new.replaced(rank=0, members=tuple(changed)))
    whole.base = before.generation
    whole.kept.extend(kept)
    return whole


def _packed(whole: pb.Assignment) -> bytes:
    """Serializes a message with this assignment, with its large fields compressed."""
    large = pb.Assignment(members=whole.members, hosts=whole.hosts, lost=whole.lost).SerializeToString()
    if PACKED_FROM_BYTES <= len(large) <= MAX_UNPACKED_BYTES:
        for name in _LARGE:
            whole.ClearField(name)
        whole.packed = zlib.compress(large)
    return pb.SchedulerMessage(assignment=whole).SerializeToString()


_LARGE: tuple[Literal["members", "hosts", "lost"], ...] = ("members", "hosts", "lost")
"""The fields of an assignment that grow with the number of members."""


def _unpacked(body: pb.Assignment) -> pb.Assignment:
    """Returns an assignment with all its fields, decompressed if necessary.

    Raises:
        WireError: the compressed part is not an assignment or is too large, or its fields also exist
            uncompressed.
    """
    if not body.packed:
        return body
    if any(len(getattr(body, name)) for name in _LARGE):
        raise WireError("an assignment has members beside those that are packed.")
    stream = zlib.decompressobj()
    try:
        large = stream.decompress(body.packed, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise WireError(f"packed must be a zlib stream: {error}.") from error
    if not stream.eof:  # truncated, or larger than allowed
        raise WireError(f"packed must be a whole zlib stream of at most {MAX_UNPACKED_BYTES} bytes.")
    if stream.unused_data:
        raise WireError("something follows the zlib stream in packed.")
    inner = parse(pb.Assignment, large)
    if not {field.name for field, _ in inner.ListFields()} <= set(_LARGE):
        raise WireError(f"packed must hold {', '.join(_LARGE)} alone.")
    body.ClearField("packed")
    body.MergeFrom(inner)
    return body


def _same_but_rank(a: messages.Assignment, b: messages.Assignment) -> bool:
    own = {"rank": 0, "members": ()}
    return a.members is b.members and {**vars(a), **own} == {**vars(b), **own}


# ---------------------------------------------------------------- the rules of each message


def _unique_id(what: str, value: bytes) -> bytes:
    rules.whole(1, MAX_UNIQUE_ID_BYTES)(f"length of a {what}", len(value))
    return value


def _device_kind(field: str, value: str) -> str:
    if value not in DEVICE_KINDS:
        raise WireError(f"{field} must be one of {', '.join(DEVICE_KINDS)}; it is {value[:40]!a}.")
    return value


def _gpu_report(field: str, body: pb.GpuReport) -> messages.GpuReport:
    """Reads a worker's report of its GPU; checks numbers only against the bounds of their protobuf types."""
    told: dict[str, Any] = {each.name: value for each, value in body.ListFields()}
    state = told.get("state", "")
    if state not in GPU_STATES:
        raise WireError(f"{field}'s state must be one of {', '.join(GPU_STATES)}; it is {state[:40]!a}.")
    if "reasons" in told:
        told["reasons"] = _REASONS(f"{field}'s reasons", told["reasons"])
    if "xids" in told:
        told["xids"] = _XIDS(f"{field}'s xids", told["xids"])
    return messages.GpuReport(**{**_NOTHING_TOLD, **told})


_NOTHING_TOLD: dict[str, Any] = dict.fromkeys(messages.GpuReport._fields) | {"reasons": (), "xids": ()}
_REASONS = rules.each(rules.label(MAX_REASON), "reason", 0, MAX_REASONS)
_XIDS = rules.each(rules.as_is, "Xid", 0, MAX_XIDS)
_NUMBER_COUNT = rules.whole(0, messages.MAX_NUMBERS)
_NUMBER_NAME = rules.name(messages.MAX_NUMBER_NAME)


def _unreached(what: str, body: pb.Unreached) -> tuple[str, str]:
    return rules.name()(f"node_id of an {what}", body.node_id), rules.text(
        "detail", body.detail
    ) or "no reason given"


def _step_times(field: str, body: Sequence[float]) -> messages.StepTimes | None:
    """Reads the time of steps by cause; None if not reported. Checks all durations at once."""
    if not body:
        return None
    if len(body) != 2 + TIMED:
        raise WireError(f"{field} must be a number of steps, {TIMED} durations and a link.")
    steps, *seconds, link = body
    if min(seconds) < 0.0 or not sum(seconds) <= LONGEST_TIMES_S:
        raise WireError(f"{field} must have {TIMED} durations in seconds.")
    if not 1.0 <= steps <= LONGEST_TIMES_S or not 0.0 <= link <= MAX_COUNT:
        raise WireError(f"{field} must be of at least one step, and a link that of a rank.")
    return messages.StepTimes(steps=int(steps), seconds=tuple(seconds), link=int(link))


def _numbers(field: str, body: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Reads the script's own numbers, in the order of their names."""
    if not body:
        return ()
    found = sorted(body.items())
    _NUMBER_COUNT(f"count of {field}", len(found))
    what = f"name in {field}"
    for number_name, value in found:
        _NUMBER_NAME(what, number_name)
        if not math.isfinite(value):
            raise WireError(f"{field} must be finite; {number_name} is {value}.")
    return tuple(found)


def _first_loss(_: str, body: pb.FirstLoss) -> messages.FirstLoss | None:
    return _read(messages.FirstLoss, body) if body.node_id else None


def _refusal_code(_: str, value: int) -> messages.RefusalCode:
    try:
        return messages.RefusalCode(value)
    except ValueError:  # a newer scheduler's reason, which its sentence explains
        return messages.RefusalCode.UNSPECIFIED


_GENERATION, _RANK, _EXIT_CODE = rules.whole(1), rules.whole(0, MAX_COUNT - 1), rules.whole(0, 255)
_UNIQUE_IDS = rules.each(_unique_id, "unique id", 1, MAX_UNIQUE_IDS)

_RULES: dict[type[Value], dict[str, Rule]] = {
    messages.Host: {
        "id": rules.name(),
        "name": rules.name(253),
        "address": rules.name(253, empty=True),
        "topology": rules.label(),
    },
    messages.Device: {
        "kind": _device_kind,
        "index": rules.whole(-1, MAX_COUNT),
        "pci_bus_id": rules.name(64, empty=True),
        "model": rules.label(),
    },
    messages.Collective: {
        "sequence": rules.whole(),
        "name": rules.name(64),
        "group": rules.label(128),
        "dtype": rules.label(32),
        "size_bytes": rules.whole(),
        "done": rules.as_is,
    },
    messages.PublishUniqueIds: {"generation": _GENERATION, "unique_ids": _UNIQUE_IDS},
    messages.Built: {"generation": _GENERATION},
    messages.Heartbeat: {
        "generation": rules.whole(),
        "step": rules.whole(),
        "started_step": rules.whole(),
        "samples_per_s": rules.rate,
        "recent": rules.each(
            lambda what, c: _read(messages.Collective, c, f"{what}'s "), "collective", 0, MAX_RECENT
        ),
        "entered_generation": rules.whole(),
        "loss": rules.as_is,
        "pid": rules.whole(),
        "learning_rate": rules.as_is,
        "snapshot": lambda what, body: _read(messages.SnapshotReport, body, f"{what}."),
        "checkpoint": lambda what, body: _read(messages.CheckpointReport, body, f"{what}."),
        "times": _step_times,
        "gpu": _gpu_report,
        "checkpoints_s": rules.rate,
        "numbers": _numbers,
        "steps": rules.whole(),
        "epoch": rules.whole(),
        "epochs": rules.whole(),
    },
    messages.SnapshotReport: {
        "generation": rules.whole(),
        "agreed": rules.whole(-1),
        "taken": rules.whole(-1),
        "complete": rules.as_is,
        "passed": rules.whole(-1),
        "age_s": rules.rate,
        "size_bytes": rules.whole(),
        "seconds": rules.rate,
        "partners": rules.each(_RANK, "partner", 0, MAX_PARTNERS),
    },
    messages.CheckpointReport: {
        "step": rules.whole(),
        "age_s": rules.rate,
        "size_bytes": rules.whole(),
        "seconds": rules.rate,
    },
    messages.Quiesced: {"generation": _GENERATION, "last_started_step": rules.whole()},
    messages.SuspectPeer: {
        "generation": _GENERATION,
        "rank": rules.whole(-1, MAX_COUNT - 1),
        "detail": rules.text,
    },
    messages.Late: {"generation": _GENERATION, "seconds": rules.rate},
    messages.Probed: {
        "round": rules.whole(),
        "unreached": rules.each(_unreached, "unreached worker", 0, MAX_COUNT),
        "late": rules.as_is,
        "waits": rules.as_is,
        "busy": rules.text,
        "seconds": rules.rate,
    },
    messages.Stacks: {"request": rules.whole(), "text": rules.lines},
    messages.RequestLeave: {"generation": rules.whole(), "reason": rules.text},
    messages.Leave: {
        "generation": rules.whole(),
        "finished": rules.as_is,
        "reason": rules.text,
        "consequence": rules.as_is,
        "exit_code": _EXIT_CODE,
        "gpu_fault": rules.text,
    },
    messages.Welcome: {
        "heartbeat_interval_s": rules.seconds(0.0),
        "node_timeout_s": rules.seconds(0.0),
        "topo_timeout_s": rules.seconds(0.0),
        "spare": rules.as_is,
        "waiting_interval_s": rules.rate,
        "version": rules.label(),
    },
    messages.Waiting: {
        "present": rules.as_is,
        "needed": rules.as_is,
        "sentence": rules.line,
        "finished_ranks": rules.each(_RANK, "finished rank", 0, MAX_COUNT),
        "undecided": rules.as_is,
    },
    messages.FirstLoss: {
        "node_id": rules.line,
        "incarnation": rules.as_is,
        "sentence": rules.line,
        "exit_code": _EXIT_CODE,
    },
    messages.UniqueIds: {"generation": _GENERATION, "unique_ids": _UNIQUE_IDS},
    messages.GroupBuilt: {"generation": _GENERATION},
    messages.Suspended: {
        "generation": _GENERATION,
        "reason": rules.line,
        "wait_s": rules.seconds(-1.0),
        "first_loss": _first_loss,
        "save": rules.as_is,
    },
    messages.Quiesce: {"generation": _GENERATION, "reason": rules.line},
    messages.Probe: {
        "round": rules.as_is,
        "targets": rules.each(lambda _, t: (t.node_id, t.address), "target", 0, MAX_COUNT),
    },
    messages.StacksWanted: {"request": rules.whole(), "limit_bytes": rules.whole(1, MAX_STACKS_BYTES)},
    messages.SnapshotWord: {"generation": _GENERATION, "complete": rules.whole(-1), "next": rules.whole()},
    messages.Refused: {"code": _refusal_code, "sentence": rules.line},
    messages.Ended: {
        "ok": rules.as_is,
        "reason": rules.line,
        "leave": rules.as_is,
        "first_loss": _first_loss,
    },
}


_OPTIONAL: dict[type[Value], tuple[str, ...]] = {
    messages.Heartbeat: ("loss", "learning_rate", "snapshot", "checkpoint", "gpu"),
}
"""Fields that are None if the message lacks them."""


def _read(kind: type[ValueT], body: Any, whose: str = "") -> ValueT:
    """Decodes a message to a value of this class, each field by its rule."""
    optional = _OPTIONAL.get(kind, ())
    missing = {name for name in optional if not body.HasField(name)} if optional else ()
    fields = {
        name: None if name in missing else rule(label, getattr(body, name))
        for name, label, rule in _rules_of(cast(Any, kind), whose)
    }
    return kind(**fields)


@functools.cache
def _rules_of(kind: Any, whose: str) -> tuple[tuple[str, str, Rule], ...]:
    return tuple((name, whose + name, rule) for name, rule in _RULES[kind].items())


# ---------------------------------------------------------------- decoding


def decode_worker_message(data: bytes) -> messages.WorkerMessage:
    """Decodes one message of a worker.

    Args:
        data: a serialized WorkerMessage.

    Raises:
        WireError: not protobuf, no known body, or a field out of bounds.
    """
    return cast(messages.WorkerMessage, _decode(pb.WorkerMessage, data))


def decode_scheduler_message(
    data: bytes, held: messages.Assignment | None = None
) -> messages.SchedulerMessage:
    """Decodes one message of the scheduler.

    Args:
        data: a serialized SchedulerMessage.
        held: the last assignment on the same stream, to which the message may refer.

    Raises:
        WireError: not protobuf, no known body, or a field out of bounds.
    """
    return cast(messages.SchedulerMessage, _decode(pb.SchedulerMessage, data, held))


def _decode(wrapper: Any, data: bytes, held: messages.Assignment | None = None) -> object:
    message = parse(wrapper, data)
    body = message.WhichOneof("body")
    if body is None:
        raise WireError(f"The {wrapper.DESCRIPTOR.name} has no body that is known here.")
    content = getattr(message, body)
    if body == "join":
        return _read_join(content)
    if body == "assignment":
        return _read_assignment(content, held)
    return _read(getattr(messages, content.DESCRIPTOR.name), content)


def parse(kind: Any, data: bytes) -> Any:
    """Parses a protobuf message of this kind.

    Raises:
        WireError: the bytes are not such a message.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise WireError(f"The message is not a {kind.DESCRIPTOR.name} of rendezvous.v1.") from error


def _read_join(join: pb.Join) -> messages.Join:
    if join.protocol_version != PROTOCOL_VERSION:
        raise WireError(
            f"The worker speaks protocol version {join.protocol_version}, this scheduler {PROTOCOL_VERSION}.",
            remedy="Install the same version of Muster on both.",
        )
    held_generation = rules.whole()("held_generation", join.held_generation)
    return messages.Join(
        profile=_read_profile(join),
        held_generation=held_generation,
        held_rank=rules.whole(-1, MAX_COUNT - 1)("held_rank", join.held_rank) if held_generation else -1,
        built=join.built,
        step=rules.whole()("step", join.step),
        held_world_size=rules.whole(0, MAX_COUNT)("held_world_size", join.held_world_size),
        takes_deltas=join.takes_deltas,
        gives_stacks=join.gives_stacks,
    )


def _read_profile(join: pb.Join) -> messages.Profile:
    worker_num = rules.whole(1, MAX_COUNT)("worker_num", join.worker_num)
    if not join.incarnation:
        raise WireError("incarnation must be a random number drawn at the worker's start; it is 0.")
    rules.whole(0, MAX_FACTS)("number of facts", len(join.facts))
    return messages.Profile(
        job_id=rules.name()("job_id", join.job_id),
        node_id=rules.name()("node_id", join.node_id),
        incarnation=join.incarnation,
        host=_read(messages.Host, join.host, "host."),
        device=_read(messages.Device, join.device, "device."),
        worker_num=worker_num,
        worker_min=rules.whole(0, worker_num)("worker_min", join.worker_min) or worker_num,
        backend=rules.name(32)("backend", join.backend),
        local_index=rules.whole(-1, MAX_COUNT)("local_index", join.local_index),
        data_address=rules.name(300, empty=True)("data_address", join.data_address),
        probe_address=rules.name(300, empty=True)("probe_address", join.probe_address),
        last_call_s=rules.seconds(-1.0)("last_call_s", join.last_call_s),
        spare=join.spare,
        gpu_uuid=rules.name(empty=True)("gpu_uuid", join.gpu_uuid),
        gpu_fault=rules.text("gpu_fault", join.gpu_fault),
        facts=tuple(
            (rules.name(64)("a fact's name", key), rules.label()("a fact's value", value))
            for key, value in sorted(join.facts.items())
        ),
    )


def _read_assignment(body: pb.Assignment, held: messages.Assignment | None) -> messages.Assignment:
    body = _unpacked(body)
    hosts = [messages.Host(host.id, host.name, host.address, host.topology) for host in body.hosts]
    members = tuple(_read_member(member, hosts) for member in body.members)
    if body.base:
        members = _with_kept(members, body, held)
    size = len(members)
    if [member.rank for member in members] != list(range(size)):
        raise WireError("members must be in order of rank, from 0, without a gap.")
    if len({member.node_id for member in members}) != size:
        raise WireError("a node id stands twice among the members.")
    among, maybe = rules.whole(0, size - 1), rules.whole(-1, size - 1)
    rank = maybe("rank", body.rank)
    return messages.Assignment(
        generation=_GENERATION("generation", body.generation),
        rank=rank,
        members=members,
        state_source_rank=maybe("state_source_rank", body.state_source_rank),
        newcomer_ranks=tuple(among("newcomer_ranks", r) for r in body.newcomer_ranks),
        unique_id_count=rules.whole(0 if rank < 0 else 1, MAX_UNIQUE_IDS)(
            "unique_id_count", body.unique_id_count
        ),
        reason=one_line(body.reason),
        switch_after_step=rules.whole(-1)("switch_after_step", body.switch_after_step),
        lost=tuple(one_line(sentence) for sentence in body.lost),
        launch=body.launch,
        first_loss=_first_loss("first_loss", body.first_loss),
    )


def _with_kept(
    changed: tuple[messages.Member, ...], body: pb.Assignment, held: messages.Assignment | None
) -> tuple[messages.Member, ...]:
    """Returns all members of an assignment that lists only those that have changed since the previous one.

    Raises:
        WireError: the previous one was not received, or lacks members that this one keeps.
    """
    if held is None or held.generation != body.base:
        raise WireError(
            f"the assignment builds on generation {body.base}, which has not come on this stream."
        )
    firsts, counts = body.kept[::2], body.kept[1::2]
    most = len(held.members)
    if (
        len(firsts) != len(counts)
        or sum(counts) > most
        or any(map(lambda a, n: a + n > most, firsts, counts))
    ):
        raise WireError(f"kept does not name ranks of generation {body.base}, which has {most}.")
    rest = (
        held.members[first + n] for first, count in zip(firsts, counts, strict=True) for n in range(count)
    )
    listed = {member.rank: member for member in changed}
    members = []
    for rank in range(len(changed) + sum(counts)):
        member = listed.get(rank)
        if member is None:
            kept = next(rest, None)
            if kept is None:
                raise WireError("members must be in order of rank, from 0, without a gap.")
            member = kept if kept.rank == rank else kept.replaced(rank=rank)
        members.append(member)
    return tuple(members)


def _read_member(body: pb.Member, hosts: list[messages.Host]) -> messages.Member:
    device = body.device
    if not body.node_id:
        raise WireError("a member has no node_id.")
    local_world_size = rules.whole(1, MAX_COUNT)("local_world_size", body.local_world_size)
    return messages.Member(
        rank=_RANK("rank", body.rank),
        node_id=body.node_id,
        incarnation=body.incarnation,
        host=hosts[rules.whole(0, len(hosts) - 1)("host_index", body.host_index)],
        device=messages.Device(device.kind, device.index, device.pci_bus_id, device.model),
        local_rank=rules.whole(0, local_world_size - 1)("local_rank", body.local_rank),
        local_world_size=local_world_size,
        data_address=body.data_address,
    )
