"""Measures what durable checkpoints cost: written while training continues, and written while it waits."""

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
    """Turns of steps: without a checkpoint, with one that is written beside them, and with one before them.

    Args:
        directory: the folder for checkpoints.
        state: the state to save.
        session: the training's session.
        run: trains the given number of steps, and returns seconds per step.
        mbytes_per_s: the limit for writing beside the training, in MB/s; 0 for none.
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
        """Measures each kind in turn, in an order that rotates by round; returns the results.

        Raises:
            RuntimeError: a checkpoint written beside the training differs from one of a save that waits.
        """
        self._one("beside")  # starts the writing process, and allocates its memory
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
        """Returns the digest of all contents that the latest file stores."""
        with safe_open(checkpoint.find(self._directory)[0].path, framework="np") as file:
            return str(file.metadata()["digest"])

    def _one(self, kind: str) -> dict[str, float]:
        """Runs one turn; returns how long the training was held up, and its steps' times afterwards."""
        self._folder.wait()
        self._run(2)
        begun = time.perf_counter()
        if kind == "beside":
            self._folder.save_beside()
        elif kind == "waiting":
            self._folder.save()
        held_up_s = time.perf_counter() - begun
        times: list[float] = []  # for the same number of steps in each kind, since each ends in a GPU sync
        while self._folder.is_writing or len(times) < (1 if kind == "beside" else self._turns):
            times.append(self._run(STEPS_AT_ONCE))
        if kind == "beside":
            self._turns = len(times)  # the other kinds' turns have the same length
        return {
            "held_up_s": held_up_s,
            "step_ms": 1e3 * statistics.mean(times),
            "written_in_s": time.perf_counter() - begun if kind == "beside" else 0.0,
        }
