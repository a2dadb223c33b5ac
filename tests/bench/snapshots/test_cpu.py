"""Whole hosts killed in jobs whose state is divided: real processes, mutual TLS, SIGKILL."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

pytest.importorskip("torch")

from muster.bench.snapshots.cpu import measure

KILLS = 2


@pytest.mark.system
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["sharded", "parallel"])
def test_a_host_is_killed_and_every_state_is_that_of_the_run_that_lost_nobody(
    kind: str, tmp_path: Path
) -> None:
    """Bit for bit, on each rank after each step; there is no checkpoint that anybody could read."""
    options = argparse.Namespace(kinds=[kind], kills=KILLS, every=5, pace_ms=30, seed=11)
    result = measure(options, tmp_path, print)[kind]
    assert len(result["kills"]) == KILLS
    assert result["states_different"] == 0
    assert result["states_compared"] > 4 * KILLS
    assert any(kill["steps_done_again"] > 0 for kill in result["kills"])
    assert not list(tmp_path.rglob("*.npz")) + list(tmp_path.rglob(".metadata"))
