"""Keeps torch's random generators right through broken steps and changes of members."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


class RandomState:
    """What this rank draws next from torch's default generators: the CPU's, and its GPU's if it has one.

    Each rank keeps its own: dropout and augmentation differ between ranks. Reading and setting a state costs
    some microseconds and never waits for the GPU, whose generator is a seed and a count on the host; a CUDA
    graph that draws takes both at each launch.

    Args:
        device: where the model is.
    """

    def __init__(self, device: Any) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])

    def keep(self) -> list[Any]:
        """Where the generators are, for :meth:`put_back`."""
        return [generator.get_state() for generator in self._generators]

    def put_back(self, kept: list[Any]) -> None:
        """Sets the generators to where they were at that :meth:`keep`."""
        for generator, state in zip(self._generators, kept, strict=True):
            generator.set_state(state)

    def now(self) -> Any:
        """Where the generators are: uint8, one after the other."""
        return torch.cat([generator.get_state() for generator in self._generators])

    def set(self, states: Any) -> bool:
        """Sets the generators to what :meth:`now` gave; False: that is of other kinds of generators."""
        sizes = [generator.get_state().numel() for generator in self._generators]
        if states.numel() != sum(sizes):
            return False
        for generator, state in zip(self._generators, states.split(sizes), strict=True):
            generator.set_state(state.contiguous())
        return True

    def begin(self, rank: int, step: int) -> None:
        """Seeds the generators again for a rank that takes up a run at ``step``.

        With the seed that this process was started with it would draw once more what its rank drew in the
        run's first steps. The new seed depends on that one, so a seeded run stays repeatable.
        """
        seed = seed_of(torch.initial_seed(), rank, step)
        for generator in self._generators:
            generator.manual_seed(seed)


def seed_of(initial_seed: int, rank: int, step: int) -> int:
    """A seed below 2**63 for a rank that enters a run at a step."""
    digest = hashlib.sha256(f"{initial_seed} {rank} {step}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
