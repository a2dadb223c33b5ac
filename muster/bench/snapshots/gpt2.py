"""Trains examples/gpt2.py with and without snapshots, in turns; started by ``muster bench snapshots``."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import muster
from examples import gpt2 as example
from muster.bench.snapshots.checkpoints import CheckpointTurns
from muster.bench.snapshots.keeper import PairSession
from muster.bench.training import gpt2
from muster.torch import Snapshots, TorchTrainingState
from muster.torch.snapshot_tensors import GivesParts, SnapshotTensor

WARM_UP_STEPS = 12


class AllOfIt:
    """Gives the whole state as this rank's part, because the partner does not train."""

    def __init__(self, parts: GivesParts) -> None:
        self._parts = parts

    @property
    def device(self) -> Any:
        """The tensors' device."""
        return self._parts.device

    def snapshot_tensors(self, rank: int, world_size: int) -> list[SnapshotTensor]:
        """Returns all tensors, regardless of the rank."""
        return self._parts.snapshot_tensors(0, 1)

    def snapshot_notes(self) -> dict[str, Any]:
        """Returns the rest of the state."""
        return self._parts.snapshot_notes()

    def put_snapshot_notes(self, notes: Mapping[str, Any], *, same_rank: bool) -> None:
        """Restores the rest of the state."""
        self._parts.put_snapshot_notes(notes, same_rank=same_rank)


class PausedSnapshots(Snapshots):
    """Snapshots that go to a process beside the training's ranks, and pause in every other turn."""

    paused = True
    taken = 0

    def follow(self, parts: GivesParts) -> None:
        """Follows a state; the whole state counts as this rank's part."""
        super().follow(AllOfIt(parts))

    def use(self, session: Any) -> None:
        """Does nothing: it keeps the session that it was made with."""

    def at_step(self, step: int, *args: Any, **options: Any) -> None:
        """Takes a snapshot unless it pauses."""
        if not self.paused:
            super().at_step(step, *args, **options)


class ExampleRunner:
    """The example's job and loop.

    Args:
        arguments: the example's command line.
        session: the session of the training.
        snapshots: the snapshots of the example's state.
    """

    def __init__(self, arguments: list[str], session: Any, snapshots: PausedSnapshots) -> None:
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", session.device_ordinal) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        args = example.settings(arguments)
        self.job = example.Job(args, session, self.device)
        self.job.state = TorchTrainingState(
            self.job.model,
            self.job.optimizer,
            self.job.state.sampler,
            samples_per_rank=args.batch_size,
            snapshots=snapshots,
        )
        loop = muster.ElasticLoop(session, self.job.state, epochs=10**9, load=self.job.rows)
        self._steps = iter(loop)
        self._losses: list[Any] = []

    def run(self, steps: int) -> float:
        """Trains; returns seconds a step."""
        begun = time.perf_counter()
        for _ in range(steps):
            step = next(self._steps)
            with step:
                self._losses = [self.job.train_step(step.data)]
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / steps


def main() -> int:
    """Measures, and writes the results."""
    parser = argparse.ArgumentParser()
    option = parser.add_argument
    option("--directory", type=Path, required=True)
    option("--every", type=int, required=True)
    option("--batch", type=int, required=True)
    option("--rounds", type=int, required=True)
    option("--seconds", type=float, required=True)
    option("--mbytes-per-s", type=float, default=0.0)
    option("--checkpoints", type=int, default=0)
    option("--tiny", action="store_true")
    options = parser.parse_args()
    pair = PairSession(options.directory)
    snapshots = PausedSnapshots(
        session=pair, every=options.every, copies=1, mbytes_per_s=options.mbytes_per_s
    )
    arguments = gpt2.arguments(options.directory / "text", options.batch, tiny=options.tiny)
    with muster.init("tcp" if options.tiny else "nccl") as session:
        runner = ExampleRunner(arguments, session, snapshots)
        runner.run(WARM_UP_STEPS)
        snapshots.paused = False
        runner.run(2 * options.every)  # allocates buffers and starts threads
        steps = max(2 * options.every, int(options.seconds / runner.run(options.every)))
        turns: dict[str, list[float]] = {"without": [], "with": []}
        taken = []
        for number in range(2 * options.rounds):
            kind = ("without", "with")[(number + number // 2) % 2]
            snapshots.paused = kind == "without"
            before = len(pair.completed)
            turns[kind].append(1e3 * runner.run(steps))
            if kind == "with":
                taken.append(len(pair.completed) - before)
        snapshots.paused = True
        durable: dict[str, Any] = {}
        if options.checkpoints:
            turns_of_checkpoints = CheckpointTurns(
                options.directory / "checkpoints",
                runner.job.state,
                session,
                runner.run,
                mbytes_per_s=options.mbytes_per_s,
            )
            durable = {"checkpoints": turns_of_checkpoints.measure(options.checkpoints)}
        parts = runner.job.state.snapshot_tensors(0, 1)
        size = sum(each.tensor.numel() * each.tensor.element_size() for each in parts)
        captured = runner.job.step.captured
        snapshots.close()
    medians = {kind: statistics.median(values) for kind, values in turns.items()}
    result = {
        "every": options.every,
        "steps_a_turn": steps,
        "turns_ms": turns,
        "step_ms": medians,
        "cost": medians["with"] / medians["without"] - 1,
        "due_a_turn": steps // options.every,
        "complete_in_turns": taken,
        "seconds_a_snapshot": statistics.median([seconds for _, seconds in pair.completed[2:]] or [0.0]),
        "state_bytes": size,
        "captured_steps": captured,
        "kept_at_the_end": pair.close(),
        **durable,
    }
    (options.directory / "result.json").write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
