"""The judge of ``bench identities``: each thing that must hold is missed by its name."""

from __future__ import annotations

from typing import Any

import pytest

from muster.bench.identities.command import judge

END = {"ended_s": 0.7, "code": 1, "said_why": True}
GOOD: dict[str, Any] = {
    "wrong_steps": 0,
    "checked_steps": 100,
    "generations": 1,
    "connections": 4,
    "connections_lasted": 4,
    "not_taken_up": 0,
    "ends": {"stranger": [END | {"ended_s": 30.0}], "unmapped": [END], "revoked": [END]},
}


def test_a_good_run_passes() -> None:
    assert judge(GOOD) == []


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"wrong_steps": 1}, "undisturbed"),
        ({"checked_steps": 0}, "undisturbed"),
        ({"generations": 2}, "membership"),
        ({"connections_lasted": 3}, "outlive"),
        ({"connections": 0, "connections_lasted": 0}, "outlive"),
        ({"not_taken_up": 1}, "takes up"),
        ({"ends": {"revoked": [END | {"ended_s": 5.1}]}}, "within 5 s"),
        ({"ends": {"unmapped": [END | {"said_why": False}]}}, "says why"),
        ({"ends": {"stranger": [END | {"code": 0}]}}, "says why"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_does_not_hold_is_named(wrong: dict[str, Any], word: str) -> None:
    [rule] = judge(GOOD | wrong)
    assert word in rule
