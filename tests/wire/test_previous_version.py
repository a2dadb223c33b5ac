"""Schedulers serve workers of the minor version before: what those say is understood, and they understand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from muster.wire import codec
from muster.wire.v1 import rendezvous_pb2, store_pb2

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "wire-0.1.json").read_text())
"""The wire of version 0.1: its fields (number, type, label, type's name), and messages as it encoded them."""


def present() -> dict[str, dict[str, list[Any]]]:
    """The fields of today's messages, as the golden file has those of then."""
    found: dict[str, dict[str, list[Any]]] = {}

    def walk(message: Any) -> None:
        found[message.full_name] = {
            field.name: [field.number, field.type, field.label, _type_name(field)] for field in message.fields
        }
        for nested in message.nested_types:
            walk(nested)

    for file in (rendezvous_pb2.DESCRIPTOR, store_pb2.DESCRIPTOR):
        for message in file.message_types_by_name.values():
            walk(message)
    return found


def _type_name(field: Any) -> str:
    of = field.message_type or field.enum_type
    return f".{of.full_name}" if of is not None else ""


@pytest.mark.parametrize("message", GOLDEN["fields"])
def test_no_field_has_changed_or_gone(message: str) -> None:
    now = present()[message]
    for name, field in GOLDEN["fields"][message].items():
        assert now[name] == field, f"{message}.{name}"
    numbers = [field[0] for field in now.values()]
    assert len(set(numbers)) == len(numbers)


def test_no_value_of_an_enum_has_changed_or_gone() -> None:
    for file in (rendezvous_pb2.DESCRIPTOR, store_pb2.DESCRIPTOR):
        for enum in file.enum_types_by_name.values():
            then = GOLDEN["enums"].get(enum.full_name, {})
            assert {name: enum.values_by_name[name].number for name in then} == then


@pytest.mark.parametrize("said", GOLDEN["said"], ids=lambda said: str(said["message"]))
def test_what_a_worker_of_then_says_is_understood(said: dict[str, str]) -> None:
    message = codec.decode_worker_message(bytes.fromhex(said["bytes"]))
    assert type(message).__name__ == said["message"]
    for name, value in _fields(said["shown"]).items():
        assert value in repr(message), name


def _fields(shown: str) -> dict[str, str]:
    """The plain fields of a message as it was shown: those that hold no other."""
    inner = shown.partition("(")[2].removesuffix(")")
    parts = [part.strip() for part in inner.split(",") if "(" not in part and ")" not in part and "=" in part]
    return {part.partition("=")[0]: part for part in parts}
