"""A loop of steps without other ranks; with them: tests/end_to_end/test_in_place.py."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import muster.torch
from muster.errors import SettingsError


def test_without_keep_alive_it_is_a_loop_like_any_other() -> None:
    found = []
    for step, batch in muster.torch.steps({}, [10, 20], epochs=2):
        with step:
            found.append((int(step), batch, step.rehearses))
        assert not step.is_broken
    assert found == [(0, 10, False), (1, 20, False), (2, 10, False), (3, 20, False)]


def test_steps_are_counted_from_the_one_that_a_checkpoint_has_left_off_at() -> None:
    found = [(int(step), batch) for step, batch in muster.torch.steps({}, [10, 20], first=7)]
    assert found == [(7, 10), (8, 20)]


def test_what_a_step_raises_by_itself_is_raised() -> None:
    with pytest.raises(ValueError, match="mine"):
        for step, _ in muster.torch.steps({}, [1]):
            with step:
                raise ValueError("mine")


@pytest.mark.parametrize("wrong", [{"every": 0}, {"epochs": 0}, {"copies": 0}, {"checkpoint_every": 0}])
def test_settings_below_1_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="it must be 1 or more"):
        muster.torch.steps({}, [1], **wrong)


def test_a_program_without_an_agent_is_told_that_it_will_not_live_on() -> None:
    assert muster.torch.keep_alive() is False
