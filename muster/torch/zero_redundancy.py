"""Handles torch's ZeroRedundancyOptimizer, whose inner optimizer holds the rank's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.torch.snapshot_tensors import put_settings, settings_of


def opened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the objects; a ZeroRedundancyOptimizer is replaced by its inner optimizer and its settings."""
    found: dict[str, Any] = {}
    for name, each in state.items():
        if _is_zero_redundancy(each):
            found[name], found[f"{name}.settings"] = each.optim, OuterSettings(each)
        else:
            found[name] = each
    return found


class OuterSettings:
    """The numbers that a ZeroRedundancyOptimizer gives its inner optimizer before each step.

    Args:
        optimizer: the ZeroRedundancyOptimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The settings of all parameter groups."""
        return {"groups": settings_of(self._optimizer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the settings that :meth:`state_dict` has returned."""
        put_settings(self._optimizer, list(state["groups"]))


def _is_zero_redundancy(each: Any) -> bool:
    """Whether this is a ZeroRedundancyOptimizer, by its class's name, so that nothing need be imported."""
    return any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(each).__mro__)
