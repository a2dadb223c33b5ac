"""Immutable values, and which versions may meet: the rule of docs/upgrading.md, in both directions."""

from __future__ import annotations

from typing import Any

import pytest

from muster.version import __version__
from muster.wire.messages import Value, is_same_series, series_of, version_obstacle


class Point(Value):
    """For the tests."""

    x: int
    y: int = 2


class Key(Value):
    """For the tests."""

    secret_fields = ("material",)

    name: str
    material: bytes


class Other(Value):
    """Same fields as Point."""

    x: int
    y: int = 2


def test_fields_by_position_name_and_default() -> None:
    assert Point(1) == Point(1, 2) == Point(y=2, x=1)
    assert (Point(1, 3).x, Point(1, 3).y) == (1, 3)


def test_only_values_of_one_kind_are_equal() -> None:
    assert Point(1) != Point(2)
    assert Point(1) != Other(1)
    assert len({Point(1), Point(1, 2), Other(1)}) == 2


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 2, 3), {}), ((1,), {"z": 1}), ((1,), {"x": 1}), ((1, 2), {"y": 2})],
)
def test_wrong_fields_are_refused(args: tuple[int, ...], kwargs: dict[str, int]) -> None:
    point: Any = Point
    with pytest.raises(TypeError):
        point(*args, **kwargs)


def test_a_value_does_not_change() -> None:
    point: Any = Point(1)
    with pytest.raises(AttributeError):
        point.x = 5
    assert Point(1).replaced(x=5) == Point(5)


def test_secrets_do_not_show() -> None:
    assert repr(Key("k", b"geheim")) == "Key(name='k')"
    assert repr(Point(1)) == "Point(x=1, y=2)"
    assert Key("k", b"a") != Key("k", b"b")


class Base(Value):
    one: int
    two: int = 2


class Secret(Value):
    secret_fields = ("key",)

    key: str


class Both(Base, Secret):
    three: int = 3


def test_fields_are_inherited_in_the_order_of_dataclasses() -> None:
    value = Both("k", 1, three=4)
    assert (value.key, value.one, value.two, value.three) == ("k", 1, 2, 4)
    assert repr(value) == "Both(one=1, two=2, three=4)"
    assert value.replaced(one=5) == Both("k", 5, 2, 4)


@pytest.mark.parametrize(
    ("scheduler", "worker"),
    [
        ("0.2.0", "0.2.0"),
        ("0.2.0", "0.2.7"),
        ("0.2.7", "0.2.0"),
        ("0.2.0", "0.1.0"),
        ("0.2.0", "0.2.1.dev3+local"),
        ("", "0.1.0"),
        ("1.3.0", "1.2.9"),
    ],
)
def test_a_scheduler_serves_its_own_minor_version_and_the_one_before(scheduler: str, worker: str) -> None:
    assert version_obstacle(scheduler=scheduler, worker=worker) == ""


@pytest.mark.parametrize(
    ("scheduler", "worker", "remedy"),
    [
        ("0.2.0", "0.3.0", "upgrade the scheduler first"),
        ("0.2.0", "1.2.0", "upgrade the scheduler first"),
        ("", "0.2.0", "upgrade the scheduler first"),
        ("0.3.0", "0.1.9", "Upgrade the worker"),
        ("1.2.0", "0.1.0", "Upgrade the worker"),
        ("0.2.0", "newest", "not both are versions"),
        ("\x1b[2J", "0.2.0", "not both are versions"),
    ],
)
def test_others_are_refused_with_both_versions_and_the_remedy(
    scheduler: str, worker: str, remedy: str
) -> None:
    why = version_obstacle(scheduler=scheduler, worker=worker)
    assert remedy in why and worker in why and (scheduler or "0.1 or older") in why.replace("\\x1b", "\x1b")
    assert why.isprintable()


def test_patch_releases_are_one_series() -> None:
    assert is_same_series("0.2.0", "0.2.9") and not is_same_series("0.2.0", "0.3.0")
    assert is_same_series("odd", "odd") and not is_same_series("odd", "even")
    assert series_of(__version__) is not None
