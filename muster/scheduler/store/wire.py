"""Decodes, checks and encodes the store's messages. Errors never contain keys or values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from muster.scheduler.errors import MalformedError
from muster.scheduler.store.key_value_store import (
    Answer,
    Effect,
    EffectKind,
    Operation,
    OperationKind,
    Returned,
)
from muster.wire.v1 import store_pb2 as pb

MAX_ID = (1 << 63) - 1
MAX_KEYS = 65_536
MAX_NAME = 128
MAX_TIMEOUT_S = 31 * 86_400.0

_MULTIPLE = frozenset(
    (OperationKind.CHECK, OperationKind.WAIT, OperationKind.MULTI_GET, OperationKind.MULTI_SET)
)
_OPTIONAL = frozenset((OperationKind.NUM_KEYS, OperationKind.LIST_KEYS))
_VALUES = {
    OperationKind.SET: 1,
    OperationKind.COMPARE_SET: 2,
    OperationKind.APPEND: 1,
    OperationKind.QUEUE_PUSH: 1,
}
_KINDS = {kind.value: kind for kind in OperationKind}
_EFFECTS = {kind.value: kind for kind in EffectKind}


@dataclass(frozen=True, slots=True)
class Opening:
    """The first message of a stream: the member, and the namespace that it wants."""

    job_id: str
    node_id: str
    incarnation: int
    generation: int


def parse(data: bytes) -> pb.StoreRequest:
    """Reads a message.

    Raises:
        MalformedError: the bytes are not such a message.
    """
    try:
        return pb.StoreRequest.FromString(data)
    except DecodeError as error:
        raise MalformedError("The message is not a StoreRequest of rendezvous.v1.") from error


def opening(request: pb.StoreRequest) -> Opening:
    """Decodes the first message of a stream.

    Raises:
        MalformedError: the message has no ``open``, or a field is out of bounds.
    """
    if not request.HasField("open"):
        raise MalformedError("The first message of a store's stream must carry open.")
    said = request.open
    for name, text in (("job_id", said.job_id), ("node_id", said.node_id)):
        if not 0 < len(text) <= MAX_NAME or not text.isprintable():
            raise MalformedError(f"{name} must have 1 to {MAX_NAME} printable characters.")
    if not said.incarnation or said.generation > MAX_ID:
        raise MalformedError("incarnation must not be 0, and generation be below 2**63.")
    return Opening(said.job_id, said.node_id, said.incarnation, said.generation)


def operations(request: pb.StoreRequest) -> Iterable[Operation]:
    """Decodes the operations of a message.

    Raises:
        MalformedError: an operation exceeds a limit.
    """
    for said in request.operations:
        kind = _KINDS.get(said.kind)
        if kind is None:
            raise MalformedError(f"The store knows no operation of kind {int(said.kind)}.")
        count = len(said.keys)
        few = kind in _MULTIPLE or (kind in _OPTIONAL and count <= 1) or count == 1
        wanted = count if kind is OperationKind.MULTI_SET else _VALUES.get(kind, 0)
        if not few or count > MAX_KEYS or len(said.values) != wanted:
            raise MalformedError(f"{kind.name.lower()} has {count} keys and {len(said.values)} values.")
        if not 0 < said.id <= MAX_ID:
            raise MalformedError("The id of an operation must be from 1 to 2**63 - 1.")
        if not (math.isfinite(said.timeout_s) and 0 <= said.timeout_s <= MAX_TIMEOUT_S):
            raise MalformedError(f"timeout_s must be from 0 to {MAX_TIMEOUT_S:g} s.")
        yield Operation(said.id, kind, tuple(said.keys), tuple(said.values), said.amount, said.timeout_s)


def add_replay(returned: Returned, replay: pb.StoreReplay) -> bool:
    """Adds one part of the changes that a member sends after a restart; returns whether it was the last part.

    Raises:
        MalformedError: an effect's kind is unknown, or a number is out of bounds.
    """
    for said in replay.effects:
        kind = _EFFECTS.get(said.kind)
        if kind is None or not 0 < said.number <= MAX_ID:
            raise MalformedError("A replay holds an effect of no known kind, or without a number.")
        returned.add(Effect(said.number, kind, said.key, said.value, said.popped))
    if replay.last:
        if max(replay.count, replay.seen) > MAX_ID:
            raise MalformedError("The counts of a replay must be below 2**63.")
        returned.count, returned.seen = replay.count, replay.seen
        returned.incomplete = replay.incomplete
    return bool(replay.last)


def encode_opened(*, replay: bool, seen: int) -> bytes:
    """Encodes the first reply."""
    return pb.StoreReply(opened=pb.StoreOpened(replay=replay), seen=seen).SerializeToString()


def encode_answers(answers: Iterable[Answer], seen: int) -> bytes:
    """Encodes answers as one message."""
    reply = pb.StoreReply(seen=seen)
    for answer in answers:
        said = reply.answers.add(
            id=answer.id, amount=answer.amount, number=answer.number, popped=answer.popped
        )
        said.values.extend(answer.values)
        if answer.status:
            said.status = int(answer.status)  # type: ignore[assignment]
            said.sentence = answer.sentence
    return reply.SerializeToString()


def encode_values(values: Sequence[bytes]) -> bytes:
    """Encodes a part of an answer's values, for :func:`encode_long`."""
    return pb.StoreAnswer(values=values).SerializeToString()


def encode_long(answer: Answer, parts: Sequence[bytes], seen: int) -> bytes:
    """Encodes one answer as one message, from values that were encoded in parts, each in a separate turn.

    This relies on protobuf's merging: concatenated encodings of one message type decode as one message with
    all values.
    """
    head = pb.StoreAnswer(id=answer.id, amount=answer.amount, number=answer.number).SerializeToString()
    length = len(head) + sum(map(len, parts))
    begin = bytes((pb.StoreReply.ANSWERS_FIELD_NUMBER << 3 | 2,)) + _varint(length)
    return b"".join((pb.StoreReply(seen=seen).SerializeToString(), begin, head, *parts))


def _varint(number: int) -> bytes:
    """Encodes a number as a protobuf varint: seven bits in each byte, lowest bits first."""
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
