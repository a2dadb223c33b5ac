"""What a durable checkpoint costs the training: written beside it, and while it waits."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from muster.training import checkpoint

KINDS = ("none", "beside", "waiting")
STEPS_AT_ONCE = 5


class CheckpointTurns:
    """Turns of steps: with no checkpoint, with one that is written beside them, and with one before them.

    Args:
        directory: where checkpoints go.
        state: what is saved.
        session: of the training.
        run: trains that many steps, and returns seconds a step.
        mbytes_per_s: the most that is written beside; 0: no bound.
    """

    def __init__(
        self,
        directory: Path,
        state: Any,
        session: Any,
        run: Callable[[int], float],
        *,
        mbytes_per_s: float,
    ) -> None:
        self._directory = directory
        self._folder = checkpoint.Folder(str(directory), state, session, mbytes_per_s=mbytes_per_s)
        self._run = run
        self._turns = 1
        self.turns: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}

    def measure(self, rounds: int) -> dict[str, Any]:
        """Takes each kind in turn, the order turning with them; returns what was measured.

        Raises:
            RuntimeError: what was written beside the training is not what a save that waits writes.
        """
        self._one("beside")  # the process begins, memory is made
        for number in range(rounds):
            for index in range(len(KINDS)):
                kind = KINDS[(index + number) % len(KINDS)]
                self.turns[kind].append(self._one(kind))
        self._compare()
        size = max(path.stat().st_size for path in self._directory.glob("step_*"))
        shutil.rmtree(self._directory)
        step_ms = {
            kind: statistics.median(turn["step_ms"] for turn in turns) for kind, turns in self.turns.items()
        }
        return {
            "turns": self.turns,
            "step_ms": step_ms,
            "cost_while_written": step_ms["beside"] / step_ms["none"] - 1,
            "held_up_s": {
                kind: statistics.median(turn["held_up_s"] for turn in self.turns[kind]) for kind in KINDS[1:]
            },
            "written_in_s": statistics.median(turn["written_in_s"] for turn in self.turns["beside"]),
            "bytes": size,
        }

    def _compare(self) -> None:
        self._folder.save()
        waiting = self._digest()
        self._folder.save_beside()
        self._run(STEPS_AT_ONCE)  # changes what was copied
        self._folder.wait()
        if self._digest() != waiting:
            raise RuntimeError("a checkpoint that was written beside the training holds another state")

    def _digest(self) -> str:
        """The digest of all contents in the latest file."""
        with safe_open(checkpoint.find(self._directory)[0].path, framework="np") as file:
            return str(file.metadata()["digest"])

    def _one(self, kind: str) -> dict[str, float]:
        """One turn: how long the training was held up, and how long its steps took then."""
        self._folder.wait()
        self._run(2)
        begun = time.perf_counter()
        if kind == "beside":
            self._folder.save_beside()
        elif kind == "waiting":
            self._folder.save()
        held_up_s = time.perf_counter() - begun
        times: list[float] = []  # of as many steps at once in each kind: each time a GPU is waited for
        while self._folder.is_writing or len(times) < (1 if kind == "beside" else self._turns):
            times.append(self._run(STEPS_AT_ONCE))
        if kind == "beside":
            self._turns = len(times)  # the other kinds' turns are as long
        return {
            "held_up_s": held_up_s,
            "step_ms": 1e3 * statistics.mean(times),
            "written_in_s": time.perf_counter() - begun if kind == "beside" else 0.0,
        }
