"""Durable records as JSON values and back, strictly: a record that does not fit exactly is refused.

The shape follows the dataclasses of :mod:`muster.scheduler.core.records`; no secret is part of any record.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping

from muster.scheduler.core import records as r

RECORD_TYPES: Mapping[str, type] = {kind.__name__: kind for kind in typing.get_args(r.Record)}


class RecordError(ValueError):
    """A value is not a record in the form in which this version writes them."""


def encode_record(record: r.Record) -> list[object]:
    """The record as ``[type name, {field: value}]``, ready for ``json.dumps``."""
    return [type(record).__name__, _encode(record)]


def decode_record(value: object) -> r.Record:
    """The record that :func:`encode_record` made, after a trip through JSON.

    Raises:
        RecordError: unknown type, missing or unknown field, or a value of another type.
    """
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)):
        raise RecordError("a record must be a pair of type name and fields")
    kind = RECORD_TYPES.get(value[0])
    if kind is None:
        raise RecordError(f"unknown type of record {value[0]!r}")
    return typing.cast(r.Record, _decode(kind, value[1], value[0]))


def _encode(value: object) -> object:
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _encode(getattr(value, name)) for name in _hints(type(value))}
    return value


@functools.cache
def _hints(kind: type) -> dict[str, object]:
    return typing.get_type_hints(kind)


def _decode(kind: object, value: object, where: str) -> object:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    if typing.get_origin(kind) is tuple:
        return _decode_tuple(typing.get_args(kind), value, where)
    if not isinstance(kind, type) or type(value) is not kind:
        raise RecordError(f"{where} must be of type {kind}, not {type(value).__name__}")
    return value


def _decode_dataclass(kind: type, value: object, where: str) -> object:
    hints = _hints(kind)
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
