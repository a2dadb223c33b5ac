"""Detects changed settings that a captured step has fixed, and optimizers whose step no graph can hold."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

_MOST_CHANGES = 10
"""Settings that change this many times before a capture count as changing in each step."""

_trains, _in_training = attrgetter("requires_grad"), attrgetter("training")


class CapturedSettings:
    """Detects changes of an optimizer's settings and a model's modes that a captured graph cannot follow.

    Learning rates become tensors on the GPU, because the graph would fix a number for ever.

    Args:
        optimizer: a torch optimizer.
        model: the model; its frozen parameters and its modules in training mode are watched.
        device: the model's device.
    """

    def __init__(self, optimizer: Any, model: Any, device: Any) -> None:
        self._optimizer, self._device = optimizer, device
        self._modules = list(model.modules())
        self._parameters = [
            each for module in self._modules for each in module._parameters.values() if each is not None
        ]
        self._modes = self._modes_now()
        self._before: list[Any] = []
        self._changes = 0
        self._last = ""
        self._make_rates()

    def changed(self) -> bool:
        """Whether modes, or settings other than learning rates, have changed since the last call."""
        modes, self._modes = self._modes, self._modes_now()
        return self._settings_changed() or self._count(modes != self._modes, "which parts of the model train")

    def _modes_now(self) -> list[bool]:
        return [*map(_trains, self._parameters), *map(_in_training, self._modules)]

    def _settings_changed(self) -> bool:
        settings = [
            {key: id(value) if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            | {"lr": None, "params": len(group["params"])}
            for group in self._optimizer.param_groups
        ]
        before, self._before = self._before, settings
        if settings == before or not before:
            return False
        if len(settings) != len(before):
            self._make_rates()
            return True
        pairs = zip(before, settings, strict=True)
        keys = sorted({key for old, new in pairs for key in new if new[key] != old.get(key)})
        return self._count(True, f"the optimizer's {', '.join(keys)}")

    def _count(self, changed: bool, what: str) -> bool:
        if changed:
            self._changes += 1
            self._last = what
        return changed

    def obstacle(self) -> str | None:
        """Returns why a capture with these settings would be of no use; None: no reason is known."""
        if self._changes < _MOST_CHANGES:
            return None
        return f"{self._last} changes in each step, and a graph holds it fixed"

    def captured(self) -> None:
        """Notes that a graph holds the settings, so that changes are counted from zero."""
        self._changes = 0

    def update_rates(self) -> None:
        """Copies learning rates that a script or scheduler has set into the tensors that the graph reads."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if group["lr"] is not rate:
                rate.fill_(float(group["lr"]))
                group["lr"] = rate

    def _make_rates(self) -> None:
        self._rates = []
        for group in self._optimizer.param_groups:
            self._rates.append(torch.tensor(float(group["lr"]), device=self._device))
            group["lr"] = self._rates[-1]


def host_bound(optimizer: Any) -> str | None:
    """Returns why no graph can hold this optimizer's step; None: no reason is known."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS decides on the host how often to evaluate the loss"
    for group in optimizer.param_groups:
        if "capturable" in group:
            if not group["capturable"]:
                return f"{kind} reads its step count on the host: make it with capturable=True"
        elif type(optimizer).__module__.startswith("torch.optim") and not group.get("fused"):
            remedy = ": make it with fused=True" if "fused" in group else ""
            return f"{kind} reads its learning rate on the host{remedy}"
    return None
