from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muster.bench.snapshots.checkpoints import KINDS, CheckpointTurns
from muster.training.checkpoint_copy import CheckpointCopy
from muster.training.sampler import ShardedSampler
from muster.training.state import TrainingState
from tests.training.test_checkpoint import Launch


def test_each_kind_has_its_turns_and_checkpoints_are_written(tmp_path: Path) -> None:
    state, session = TrainingState({"w": np.zeros(9)}, ShardedSampler(9, 3)), Launch(1)
    ran: list[int] = []

    def run(steps: int) -> float:
        ran.append(steps)
        state.step += steps
        state.arrays["w"] += 1.0
        return 0.25 if session.written else 1.0

    turns = CheckpointTurns(tmp_path / "files", state, session, run, mbytes_per_s=0.0)
    found = turns.measure(3)
    assert {kind: len(found["turns"][kind]) for kind in KINDS} == dict.fromkeys(KINDS, 3)
    assert len(session.written) == 9
    assert found["bytes"] > 72
    assert found["step_ms"]["none"] == 250.0
    assert found["held_up_s"]["waiting"] > 0
    assert found["written_in_s"] > 0
    assert not (tmp_path / "files").exists()


class Torn(TrainingState):
    """What is copied of it changes while it is written."""

    def copy_for_checkpoint(self, room: Any) -> CheckpointCopy:
        copy = super().copy_for_checkpoint(room)
        room.take(copy.size)[0] ^= 1
        return copy


def test_a_copy_that_is_torn_is_told(tmp_path: Path) -> None:
    state = Torn({"w": np.zeros(9)}, ShardedSampler(9, 3))
    turns = CheckpointTurns(tmp_path / "files", state, Launch(1), lambda steps: 0.1, mbytes_per_s=0.0)
    with pytest.raises(RuntimeError, match="holds another state"):
        turns.measure(1)
