"""Inputs with the right shape and wrong content."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

NUMBERS = (0, 1, -1, 2, 3, 7, 127, 128, 255, 4096, 65_535, 65_536, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1)
TEXTS = (
    "",
    "default",
    "node-0",
    "node-1",
    "0",
    "1",
    "2",
    "cpu",
    "cuda",
    "tcp",
    "\0",
    "a b",
    "a\nERROR forged",
    "\x1b[31m",
    "../../etc/passwd",
    "/dev/mem",
    "\u202e",
    "\ud7ff\U0010ffff",
    "x" * 129,
    "x" * 5000,
    "muster://default/worker",
    "%s%n{0}{__class__}",
    "127.0.0.1:1",
    "[::1]:99999",
)
_JSON: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    8,
    1e308,
    10**400,
    "",
    "0",
    "9" * 5000,
    "x" * 300,
    "\ud800",
    [],
    {},
    [[]],
    {"": ""},
)


def filled(message: Message, chance: random.Random, *, share: float = 0.6, depth: int = 0) -> Message:
    """Fills a share of a message's fields, whatever it is."""
    oneofs: Any = message.DESCRIPTOR.oneofs
    chosen = {oneof.name: chance.choice(list(oneof.fields)).name for oneof in oneofs}
    for each in message.DESCRIPTOR.fields:
        inside = each.containing_oneof
        if inside is not None and chosen.get(inside.name) != each.name:
            continue
        if inside is not None or chance.random() < share:
            _fill(message, each, chance, depth)
    return message


def _fill(message: Message, each: Any, chance: random.Random, depth: int) -> None:
    place = getattr(message, each.name)
    if each.message_type is not None and each.message_type.GetOptions().map_entry:
        for _ in range(chance.choice((0, 1, 3, 40))):
            place[chance.choice(TEXTS[:9])] = _value(each.message_type.fields_by_name["value"], chance)
    elif hasattr(place, "append"):
        for _ in range(chance.choice((0, 1, 2, 3, 70))):
            if each.message_type is not None:
                filled(place.add(), chance, depth=depth + 1)
            else:
                place.append(_value(each, chance))
    elif each.message_type is not None:
        place.SetInParent()
        if depth < 6:
            filled(place, chance, share=0.9, depth=depth + 1)
    else:
        setattr(message, each.name, _value(each, chance))


def _value(each: Any, chance: random.Random) -> Any:
    kind = each.cpp_type
    if kind == Field.CPPTYPE_STRING:
        text = chance.choice(TEXTS)
        return text.encode() * chance.choice((1, 20)) if each.type == Field.TYPE_BYTES else text
    if kind in (Field.CPPTYPE_DOUBLE, Field.CPPTYPE_FLOAT):
        return chance.choice((0.0, -1.0, 1.5, 1e308, float("inf"), float("nan")))
    if kind == Field.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind == Field.CPPTYPE_ENUM:
        return chance.choice((0, 1, 5, 9, 99))
    number = chance.choice(NUMBERS)
    bits = 32 if kind in (Field.CPPTYPE_INT32, Field.CPPTYPE_UINT32) else 64
    number &= 2**bits - 1
    signed = kind in (Field.CPPTYPE_INT32, Field.CPPTYPE_INT64)
    return number - 2**bits if signed and number >= 2 ** (bits - 1) else number


def changed_json(document: Any, chance: random.Random) -> Any:
    """A JSON document with something wrong at a random place."""
    if chance.random() < 0.2 or not isinstance(document, (dict, list)) or not document:
        return chance.choice((*_JSON, *TEXTS[:19]))
    if isinstance(document, list):
        index = chance.randrange(len(document))
        repeated = document + document[index : index + 1] * chance.choice((0, 0, 1))
        return [changed_json(e, chance) if i == index else e for i, e in enumerate(repeated)]
    key = chance.choice(list(document))
    if chance.random() < 0.15:
        return {k: e for k, e in document.items() if k != key}
    if chance.random() < 0.1:
        return {**document, chance.choice(TEXTS[:12]): chance.choice(_JSON)}
    return {k: changed_json(e, chance) if k == key else e for k, e in document.items()}


def changed_json_bytes(document: Any, chance: random.Random) -> bytes:
    """The same as a file's content."""
    return json.dumps(changed_json(document, chance), ensure_ascii=chance.random() < 0.7).encode(
        "utf-8", "surrogatepass"
    )


PIECE = struct.Struct("!BH")
"""Before each message of a conversation: which of several streams it is on, and its length."""


def conversation(pieces: list[tuple[int, bytes]]) -> bytes:
    """Several streams' messages as one input."""
    return b"".join(PIECE.pack(stream, len(data)) + data for stream, data in pieces if len(data) < 65_536)


def parts(data: bytes) -> list[tuple[int, bytes]]:
    """What :func:`conversation` put together; of anything else, what can be read."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while at + PIECE.size <= len(data) and len(found) < 60:
        stream, size = PIECE.unpack_from(data, at)
        at += PIECE.size
        found.append((stream, data[at : at + size]))
        at += size
    return found
