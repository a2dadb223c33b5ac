"""Whole hosts killed in jobs whose state is divided: real processes, mutual TLS, SIGKILL."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

pytest.importorskip("torch")

from muster.bench.snapshots.cpu import HOSTS, measure
from muster.bench.snapshots.namespaces import NamespaceHosts

KILLS = 2


def can_make_hosts() -> bool:
    """Whether hosts may be network namespaces here."""
    try:
        with NamespaceHosts(HOSTS):
            return True
    except RuntimeError:
        return False


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "loss"), [("sharded", "kill"), ("sharded", "cut"), ("parallel", "kill")])
def test_a_host_is_lost_and_every_state_is_that_of_the_run_that_lost_nobody(
    kind: str, loss: str, tmp_path: Path
) -> None:
    """Bit for bit, on each rank after each step; there is no checkpoint that anybody could read.

    Where hosts may be made, they are network namespaces: one is cut off, and its ranks go on for a while.
    """
    namespaces = can_make_hosts()
    options = argparse.Namespace(
        kinds=[kind],
        kills=KILLS,
        every=50,  # else a kill may come just after one, and nothing is done again
        pace_ms=30,
        seed=11,
        loss=loss if namespaces else "kill",
        namespaces=namespaces,
    )
    result = measure(options, tmp_path, print)[kind]
    assert len(result["kills"]) == KILLS
    assert result["states_different"] == 0
    assert result["states_compared"] > 4 * KILLS
    assert any(kill["steps_done_again"] > 0 for kill in result["kills"])
    assert result["checkpoint_files"] == 0


def test_a_host_by_name_alone_cannot_be_cut_off(tmp_path: Path) -> None:
    options = argparse.Namespace(loss="cut", namespaces=False, kinds=["sharded"])
    with pytest.raises(RuntimeError, match="--namespaces makes hosts"):
        measure(options, tmp_path, print)
