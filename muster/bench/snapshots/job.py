"""A job with sharded state, in an elastic loop that records each step and the digest of the rank's state.

Started by ``muster bench snapshots`` and by tests.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from typing import Any

import torch
from torch import nn

import muster
from muster.bench.recovery.loop import RecordingLoop
from muster.torch import Snapshots, SnapshotTrainingState

SAMPLES, BATCH, WIDTH, CLASSES = 960, 24, 48, 24
KINDS = ("sharded", "parallel")


def data() -> tuple[Any, Any]:
    """Makes the training data: [SAMPLES, WIDTH] of float32, and [SAMPLES] of int64."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(SAMPLES, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def make() -> Any:
    """Makes the module, the same on all ranks; its dropout draws from each rank's generator."""
    torch.manual_seed(7)
    hidden = 4 * WIDTH
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, CLASSES))


def digest(tensors: Any) -> str:
    """Returns a digest of these tensors' bits."""
    text = hashlib.sha256()
    for tensor in tensors:
        text.update(tensor.detach().contiguous().numpy().tobytes())
    return text.hexdigest()[:16]


class Sharded:
    """Trains with a ShardedOptimizer."""

    def __init__(self, session: Any, snapshots: Snapshots) -> None:
        self.net = make()
        torch.manual_seed(100 + session.rank)
        self.optimizer = muster.ShardedOptimizer(
            self.net, session, make=lambda parts: torch.optim.AdamW(parts, lr=1e-2), elastic=True
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer.inner, 0.999)
        sampler = muster.ShardedSampler(SAMPLES, BATCH, seed=3)
        objects = {"net": self.net, "optimizer": self.optimizer, "schedule": self.schedule}
        self.state: Any = SnapshotTrainingState(objects, sampler, snapshots=snapshots)

    def step(self, x: Any, y: Any) -> None:
        """One step."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.net(x), y).backward()
        self.optimizer.step()
        self.schedule.step()

    def tensors(self) -> list[Any]:
        """Returns all tensors of this rank's state."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.net.state_dict().values(), *states]


class Parallel:
    """Trains a model whose hidden layer is split over all ranks."""

    def __init__(self, session: Any, snapshots: Snapshots) -> None:
        x, y = data()
        ranks = session.world_size
        self.net = muster.parallelize(
            make(),
            (x[: BATCH // ranks], y[: BATCH // ranks]),
            loss=nn.CrossEntropyLoss(),
            mode="semi_auto",
            strategies={"0": {"n": ranks}, "3": {"k": ranks}},
            elastic=True,
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2)
        sampler = muster.ShardedSampler(SAMPLES, BATCH, seed=3)
        self.state: Any = muster.ParallelTrainingState(self.net, self.optimizer, sampler, snapshots=snapshots)

    def step(self, x: Any, y: Any) -> None:
        """One step."""
        self.optimizer.zero_grad()
        self.net(x, y).backward()
        self.optimizer.step()

    def tensors(self) -> list[Any]:
        """Returns all tensors of this rank's state."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*(each.detach() for each in self.net.parameters()), *states]


def warm_up() -> None:
    """Runs a first step, so that loading does not make others wait for this rank later."""
    net = make()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.zeros(2, WIDTH)).sum().backward()
    optimizer.step()


def main() -> int:
    """Trains, and records a digest of this rank's state after each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, default="sharded")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--every", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x, y = data()
    warm_up()
    with muster.init("tcp") as session:
        snapshots = Snapshots(every=options.every)
        job = (Sharded if options.kind == "sharded" else Parallel)(session, snapshots)
        loop = RecordingLoop(session, job.state, epochs=10**9, steps=options.steps)
        for step in loop:
            with step:
                rows = torch.from_numpy(step.batch.indices.copy())
                job.step(x[rows], y[rows])
                counts = snapshots.complete
                loop.facts = {"digest": digest(job.tensors()), "counts": -1 if counts is None else counts[0]}
    return 0


if __name__ == "__main__":
    sys.exit(main())
