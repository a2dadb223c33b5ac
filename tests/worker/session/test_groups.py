"""Named groups."""

from __future__ import annotations

from typing import Any

import pytest

from muster.errors import GroupError
from muster.worker.session.groups import Groups
from tests.worker.session.scripted import stub_communicator


def groups(rank: int = 0, size: int = 4) -> Groups:
    made = Groups()
    made.enter(stub_communicator(rank, size))
    return made


def test_the_world_has_mindspores_names_too() -> None:
    made = groups()
    assert made.communicator() is made.communicator("world") is made.communicator("nccl_world_group")
    assert made.world_ranks() == (0, 1, 2, 3)


def test_the_order_of_the_ranks_is_the_order_in_the_group() -> None:
    made = groups(rank=3)
    made.create("tp", [3, 1])
    assert made.communicator("tp").rank == 0
    assert made.world_ranks("tp") == (3, 1)


def test_a_destroyed_group_is_gone_and_its_name_free() -> None:
    made = groups()
    made.create("tp", [0, 1])
    old = made.communicator("tp")
    made.destroy("tp")
    assert old.closed  # type: ignore[attr-defined]
    with pytest.raises(GroupError, match=r"no group 'tp'; there are: world\."):
        made.communicator("tp")
    made.create("tp", [0])


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("world", [0], "exists already"),
        ("tp", [0], "exists already"),
        ("", [0], "1 to 128 printable"),
        ("a\nb", [0], "1 to 128 printable"),
        ("x" * 129, [0], "1 to 128 printable"),
        ("new", [], "from 0 to 3"),
        ("new", [0, 0], "different whole numbers"),
        ("new", [4], "from 0 to 3"),
        ("new", [-1], "from 0 to 3"),
        ("new", [True], "whole numbers"),
        ("new", [0.0], "whole numbers"),
    ],
)
def test_what_is_no_group_is_refused(name: str, ranks: Any, words: str) -> None:
    made = groups()
    made.create("tp", [0, 1])
    with pytest.raises(GroupError, match=words):
        made.create(name, ranks)


def test_the_world_cannot_be_destroyed() -> None:
    with pytest.raises(GroupError, match="cannot be destroyed"):
        groups().destroy("world")


def test_a_smaller_world_leaves_groups_out_that_do_not_fit() -> None:
    made = groups()
    made.create("low", [0, 1])
    made.create("high", [0, 3])
    made.leave()
    with pytest.raises(GroupError, match="rejoin"):
        made.communicator()
    made.enter(stub_communicator(0, 2))
    assert made.communicator("low").world_size == 2
    with pytest.raises(GroupError, match="has only 2 ranks since its members changed"):
        made.communicator("high")
    made.destroy("high")
