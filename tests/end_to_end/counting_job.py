"""A job that counts its samples: the state holds how often each has been trained on in each epoch.

A ``DataLoader`` with a process reads them, and the number of each is what it gave. The counts are part of the
state, as weights are: they go back with it, and are saved and resumed with it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import muster
from muster.bench.recovery.loop import RecordingLoop
from muster.torch import DataParallel, Snapshots, SnapshotTrainingState, TorchTrainingState
from muster.training import checkpoint

SAMPLES, BATCH, EPOCHS = 199, 12, 12
"""The last batch of an epoch has 7 samples: some ranks have one less of it."""

SAVE_EVERY = 6


class Numbers(Dataset):  # type: ignore[misc]
    """Each sample is its number, and the process that read it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


class Counted(nn.Module):  # type: ignore[misc]
    """Something to train, with the counts as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("counts", torch.zeros(EPOCHS, SAMPLES, dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        return self.layer(x)


class Divided:
    """Each rank has a part of the optimizer's state; all go back to a snapshot when members change."""

    def __init__(self, net: Counted, session: Any, folder: Path) -> None:
        self.model = net
        self.optimizer: Any = muster.ShardedOptimizer(
            net, session, elastic=True, make=lambda parts: torch.optim.AdamW(parts, lr=1e-3)
        )
        self.state: Any = SnapshotTrainingState(
            {"net": net, "optimizer": self.optimizer},
            muster.ShardedSampler(SAMPLES, BATCH, seed=4),
            snapshots=Snapshots(every=3),
            checkpoint=folder,
        )
        self.loop: dict[str, Any] = {}

    def within_step(self) -> None:
        if self.state.step % SAVE_EVERY == SAVE_EVERY - 1:
            self.state.save_beside()

    def after_step(self, rank: int) -> None:
        """Nothing: all save within a step."""


class Whole:
    """Each rank has all of the state; who is left goes on from the step that broke."""

    def __init__(self, net: Counted, session: Any, folder: Path) -> None:
        self.model = DataParallel(net, session, elastic=True)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        sampler = muster.ShardedSampler(SAMPLES, BATCH, seed=4)
        self.state: Any = TorchTrainingState(self.model, self.optimizer, sampler)
        self.folder = checkpoint.Folder(str(folder), self.state, session)
        self.folder.resume("latest", say=print)
        self.loop = {"take_up": self.folder.take_up}

    def within_step(self) -> None:
        """Nothing: rank 0 saves after a step."""

    def after_step(self, rank: int) -> None:
        if rank == 0 and self.state.step % SAVE_EVERY == 0:
            self.folder.save_beside()


def main() -> None:
    """Trains, and leaves the counts in a file of this rank's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("divided", "whole"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Counted()
    with muster.init("tcp") as session:
        job = (Divided if options.kind == "divided" else Whole)(net, session, options.folder)
        state = job.state
        loader = DataLoader(Numbers(), batch_sampler=state.sampler, num_workers=1)
        loop = RecordingLoop(session, state, epochs=EPOCHS, load=loader, **job.loop)
        for step in loop:
            with step:
                mine, rows = torch.zeros_like(net.counts), len(step.batch.indices)
                if step.data is not None:
                    numbers, readers = step.data
                    assert os.getpid() not in readers.tolist()
                    mine[step.batch.epoch].index_add_(0, numbers, torch.ones_like(numbers))
                net.counts += muster.all_reduce(mine)
                job.optimizer.zero_grad()
                job.model(torch.ones(max(rows, 1), 8)).square().mean().backward()
                job.optimizer.step()
                job.within_step()
            if step.done:
                job.after_step(session.rank)
        torch.save(net.counts, f"counts_{session.rank}.pt")


if __name__ == "__main__":
    main()
