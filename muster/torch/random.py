"""Keeps torch's random generators consistent through broken steps and changes of members."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


class RandomState:
    """The states of torch's default generators on this rank: the CPU's, and its GPU's if it has one.

    Each rank keeps its own states, because dropout and augmentation differ between ranks. Reading and setting
    a state costs some microseconds and never waits for the GPU: its generator is a seed and a count on the
    host, and a CUDA graph that draws reads both at each launch.

    Args:
        device: the model's device.
    """

    def __init__(self, device: Any) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])

    def keep(self) -> list[Any]:
        """Returns the generators' states, for :meth:`put_back`."""
        return [generator.get_state() for generator in self._generators]

    def put_back(self, kept: list[Any]) -> None:
        """Restores the states that :meth:`keep` has returned."""
        for generator, state in zip(self._generators, kept, strict=True):
            generator.set_state(state)

    def now(self) -> Any:
        """Returns the generators' states in one tensor, one after the other: uint8, 1-dim."""
        return torch.cat([generator.get_state() for generator in self._generators])

    def set(self, states: Any) -> bool:
        """Restores a result of :meth:`now`; returns False if it is of other kinds of generators."""
        sizes = [generator.get_state().numel() for generator in self._generators]
        if states.numel() != sum(sizes):
            return False
        for generator, state in zip(self._generators, states.split(sizes), strict=True):
            generator.set_state(state.contiguous())
        return True

    def begin(self, rank: int, step: int) -> None:
        """Seeds the generators again for a rank that enters a run at ``step``.

        With the seed with which this process was started, it would draw the same numbers as its rank in the
        run's first steps. The new seed is derived from that seed, so a seeded run stays repeatable.
        """
        seed = seed_of(torch.initial_seed(), rank, step)
        for generator in self._generators:
            generator.manual_seed(seed)


def seed_of(initial_seed: int, rank: int, step: int) -> int:
    """Returns a seed below 2**63 for a rank that enters a run at a step."""
    digest = hashlib.sha256(f"{initial_seed} {rank} {step}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
