"""The soak's job with sharded weights and snapshots: each rank holds its own part of the weights.

The numbers are those of ``muster.bench.soak.job``. When members change, all restore the newest snapshot that
is complete in the ranks' memory, or the last checkpoint on disk if a part is lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from muster.bench.soak.job import (
    BATCH,
    ROWS,
    SIZE,
    STOP_VARIABLE,
    Numbers,
    block_digests,
    blocks_of,
    digest_of_blocks,
    elements_of,
    first_weights,
    mix,
    part,
)
from muster.bench.soak.job import main as work

EVERY, SAVE_EVERY = 10, 60
CHECKPOINTS_VARIABLE = "MUSTER_SOAK_CHECKPOINTS"
"""The directory of the job's checkpoints."""


class DividedWeights:
    """The blocks of the weights that this rank holds."""

    def __init__(self) -> None:
        self.blocks = range(0)
        self._tensor: Any = None

    def join(self, communicator: Any) -> None:
        """Makes this rank's blocks with their values before the first step."""
        import torch

        self.blocks = blocks_of(communicator.rank, communicator.world_size)
        self._tensor = torch.from_numpy(first_weights()[self.elements].view(np.int64).copy())

    @property
    def elements(self) -> slice:
        """The place of the blocks in the weights."""
        return elements_of(self.blocks)

    @property
    def numbers(self) -> Numbers:
        """The blocks' elements, as a view of shape [elements] of uint64."""
        numbers: Numbers = self._tensor.numpy().view(np.uint64)
        return numbers

    def snapshot_tensors(self, name: str) -> Iterator[Any]:
        """Yields the tensors of a snapshot; see :class:`muster.torch.Snapshots`."""
        from muster.torch.snapshot_tensors import SnapshotTensor
        from muster.training.parts import Part

        if self._tensor is not None:
            mine = Part((0,), (SIZE,), self.elements.start, self.elements.stop)
            yield SnapshotTensor(name, (SIZE,), self._tensor, mine, mine)

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the tensors are the whole state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: the tensors are the whole state."""


def train() -> None:
    """Trains until the stop file exists. All ranks learn of it in the same step."""
    import muster
    from muster.bench.recovery.loop import RecordingLoop
    from muster.torch import Snapshots, SnapshotTrainingState
    from muster.training.loop import Step
    from muster.training.sampler import ShardedSampler

    class DigestingPartsLoop(RecordingLoop):
        def _finish(self, step: Step) -> None:
            self.facts["digest"] = digest_of_blocks(block_digests(weights.numbers, weights.blocks))
            super()._finish(step)

    weights, stop = DividedWeights(), Path(os.environ[STOP_VARIABLE])
    with muster.init("tcp") as session:
        state = SnapshotTrainingState(
            {"weights": weights},
            ShardedSampler(ROWS, BATCH, shuffle=False),
            snapshots=Snapshots(every=EVERY),
            checkpoint=os.environ[CHECKPOINTS_VARIABLE],
        )
        for step in DigestingPartsLoop(session, state, epochs=1 << 40):
            with step:
                last = np.array([session.rank == 0 and stop.exists()], np.uint64)
                total = muster.all_reduce(
                    np.concatenate([part(state.step, step.batch.indices), last]), op="sum"
                )
                mix(weights.numbers, total[:-1][weights.elements])
                if state.step % SAVE_EVERY == SAVE_EVERY - 1:
                    state.save_beside()
            if step.done and total[-1]:
                break


def main() -> None:
    """Runs one worker."""
    work(train)


if __name__ == "__main__":
    main()
