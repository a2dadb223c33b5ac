"""Rules for the fields of messages: each one reads a field, or raises an error that says what is wrong.

Numbers have bounds, and every string and count that workers send has a limit. Names contain no blanks or
control characters, and free text is made to fit one log line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from muster.wire.errors import RemediedError
from muster.wire.log_lines import one_line

MAX_NUMBER = 2**63 - 1
MAX_TEXT = 2048
MAX_STACKS_BYTES = 64 * 1024
"""Size limit of one worker's stacks, in bytes."""

Rule = Callable[[str, Any], Any]
"""Takes a field's name and its raw value; returns the checked value, or raises WireError."""


class WireError(RemediedError):
    """A message violates the protocol; the error names the field."""


def as_is(_: str, value: Any) -> Any:
    """Returns the value as it is: protobuf has checked its type."""
    return value


def whole(low: int = 0, high: int = MAX_NUMBER) -> Rule:
    """Returns the rule for a whole number within these bounds."""

    def rule(field: str, value: int) -> int:
        if not low <= value <= high:
            raise WireError(f"{field} must be from {low} to {high}; it is {value}.")
        return value

    return rule


def name(limit: int = 128, *, empty: bool = False) -> Rule:
    """Returns the rule for a name without blanks, of at most ``limit`` characters; with ``empty`` also ""."""

    def rule(field: str, value: str) -> str:
        if not value and empty:
            return value
        if not 1 <= len(value) <= limit:
            raise WireError(f"{field} must have 1 to {limit} characters; it has {len(value)}.")
        if not value.isprintable() or " " in value:
            raise WireError(
                f"{field} must hold neither blanks nor control characters; it is {value[:140]!a}."
            )
        return value

    return rule


def label(limit: int = 256) -> Rule:
    """Returns the rule for printable text of at most ``limit`` characters."""

    def rule(field: str, value: str) -> str:
        if len(value) > limit or not value.isprintable():
            raise WireError(f"{field} must be printable and have at most {limit} characters.")
        return value

    return rule


def text(field: str, value: str) -> str:
    """Reads free text, and escapes it so that it cannot forge a second log line."""
    if len(value) > MAX_TEXT:
        raise WireError(f"{field} must have at most {MAX_TEXT} characters; it has {len(value)}.")
    return one_line(value)


def lines(field: str, value: str) -> str:
    """Reads text of several lines, and escapes each of them."""
    if len(value) > MAX_STACKS_BYTES:
        raise WireError(f"{field} must have at most {MAX_STACKS_BYTES} characters; it has {len(value)}.")
    return "\n".join(one_line(line) for line in value.split("\n"))


def line(_: str, value: str) -> str:
    """Reads free text from the scheduler, which may be long."""
    return one_line(value)


def rate(field: str, value: float) -> float:
    """Reads a finite number that is not negative."""
    if not math.isfinite(value) or value < 0:
        raise WireError(f"{field} must be a number from 0; it is {value}.")
    return value


def seconds(above: float) -> Rule:
    """Returns the rule for a finite number of seconds that is greater than ``above``."""

    def rule(field: str, value: float) -> float:
        if not math.isfinite(value) or value <= above:
            raise WireError(f"{field} must be a number of seconds; it is {value}.")
        return value

    return rule


def each(rule: Rule, what: str, low: int, high: int) -> Rule:
    """Returns the rule for a tuple of ``low`` to ``high`` elements; ``what`` names one element in errors."""
    count = whole(low, high)

    def of_all(_: str, values: Any) -> tuple[Any, ...]:
        count(f"number of {what}s", len(values))
        return tuple(rule(what, value) for value in values)

    return of_all
