"""Ranks of torch programs killed at random moments: real processes, mutual TLS, SIGKILL."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

pytest.importorskip("torch")

from muster.bench.in_place import program
from muster.bench.in_place.cpu import KINDS, measure

KILLS = 2


def test_the_kinds_are_those_of_the_program() -> None:
    assert tuple(program.KINDS) == KINDS


@pytest.mark.system
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_all_others_stay_and_every_step_is_that_of_the_run_in_which_nobody_is_killed(
    kind: str, tmp_path: Path
) -> None:
    copying = {"every": 5, "copies": 2, "pace_ms": 50, "gpu": False}
    options = argparse.Namespace(kinds=[kind], kills=KILLS, seed=3, one_at_a_time=False, **copying)
    result = measure(options, tmp_path, print)[kind]
    assert len(result["kills"]) == KILLS
    assert result["states_different"] == 0
    assert result["states_compared"] > 4 * KILLS
