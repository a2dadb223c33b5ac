"""The models of the suite by name, each with what it is fed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BATCH = 8
"""Samples of all ranks."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A model: its kind, its class, and a batch of a seed."""

    kind: str
    module: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, ...]]

    def make(self) -> nn.Module:
        """The model with the same weights each time, in float64."""
        torch.manual_seed(11)
        return self.module().double()


SUITE: dict[str, Entry] = {}


def floats(*shape: int) -> Callable[[torch.Generator], Any]:
    return lambda draw: torch.rand(BATCH, *shape, generator=draw, dtype=torch.float64)


def ids(below: int, *shape: int) -> Callable[[torch.Generator], Any]:
    return lambda draw: torch.randint(below, (BATCH, *shape), generator=draw)


def model(kind: str, *inputs: Callable[[torch.Generator], Any]) -> Callable[[Any], Any]:
    """Registers a class whose forward pass takes these inputs and returns a loss."""

    def register(module: Any) -> Any:
        def batch(seed: int) -> tuple[Any, ...]:
            draw = torch.Generator().manual_seed(seed)
            return tuple(each(draw) for each in inputs)

        name = module.__name__
        SUITE["".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")] = Entry(
            kind, module, batch
        )
        return module

    return register
