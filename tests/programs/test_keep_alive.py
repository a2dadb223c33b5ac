"""Which number a process has among the ranks when others were lost."""

from __future__ import annotations

import pytest

from muster.programs.keep_alive import numbers_of


@pytest.mark.parametrize(
    ("claimed", "numbers"),
    [
        ([None, None, None], [0, 1, 2]),
        ([0, None, 2], [0, 1, 2]),
        ([0, 2, None], [0, 2, 1]),  # a spare: the scheduler counts it last
        ([None, 2, 3, None], [0, 2, 3, 1]),
    ],
)
def test_who_lives_on_keeps_its_number_and_others_take_what_is_free(
    claimed: list[int | None], numbers: list[int]
) -> None:
    assert numbers_of(claimed) == numbers
