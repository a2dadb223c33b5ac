"""Creates a torch optimizer's state before its first step.

Optimizers create their state lazily, within the first step. A run whose state is shared needs it earlier. So
one step is done with gradients of zero, each entry is kept as it was when it was created, and all other
effects of the step are undone. Zeros would be right for most optimizers, but not for all: Rprop's step sizes
begin with the learning rate, and NAdam's product of momenta with one.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from muster.errors import SettingsError

_FIRST_STEP = "Do one step before you make the training state"


def check_trains(optimizer: Any, model: torch.nn.Module) -> None:
    """Checks that the optimizer trains parameters of the model.

    Raises:
        SettingsError: the optimizer has no parameter of the model.
    """
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise SettingsError(
            "the optimizer trains no parameter of this model: make it of model.parameters(), with the model"
            ' as muster.DataParallel returned it (with weights="bf16" these are float32 masters)'
        )


def make_optimizer_state(optimizer: Any) -> None:
    """Creates the optimizer state of each parameter that has none, as its first step would create it.

    Parameters, gradients and settings stay as they are.

    Args:
        optimizer: a torch optimizer, or one that works alike: it writes ``state[parameter][name]`` when it
            first sees a gradient, and then updates in place.

    Raises:
        SettingsError: this optimizer's state cannot be created in advance, or cannot be shared because
            not all of it is tensors.
    """
    _check_tensors(optimizer)  # existing state is not created again, only checked
    lacking = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not optimizer.state.get(parameter)
    ]
    if lacking:
        _check_dampening(optimizer)
        with _undone(optimizer, lacking):
            first = _first_values(optimizer, lacking)
        optimizer.state.update(first)
        _check_tensors(optimizer)


class _FirstValues(dict[str, Any]):
    """One parameter's state, which also keeps a copy of each entry from when it was created."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            tensor = isinstance(value, torch.Tensor)
            self.first[key] = value.detach().clone() if tensor else copy.deepcopy(value)
        super().__setitem__(key, value)

    def update(self, *given: Mapping[str, Any], **named: Any) -> None:  # type: ignore[override]
        for key, value in dict(*given, **named).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


def _first_values(optimizer: Any, lacking: list[Any]) -> dict[Any, dict[str, Any]]:
    """Runs an optimizer step; returns each parameter's state as it was when the step created it."""
    before = optimizer.state
    optimizer.state = defaultdict(_FirstValues, before)
    try:
        optimizer.step()
        made = {parameter: optimizer.state[parameter] for parameter in lacking}
    except Exception as error:
        raise SettingsError(
            f"{_kind(optimizer)} cannot make its state before its first step: {error}.",
            remedy=f"{_FIRST_STEP}, or use another optimizer.",
        ) from error
    finally:
        optimizer.state = before
    if not all(isinstance(values, _FirstValues) for values in made.values()):
        raise SettingsError(
            f"{_kind(optimizer)} replaces a parameter's whole state, so that its first one is not known.",
            remedy=f"{_FIRST_STEP}.",
        )
    return {parameter: values.first for parameter, values in made.items() if values.first}


@contextmanager
def _undone(optimizer: Any, lacking: list[Any]) -> Iterator[None]:
    """Context in which only ``lacking`` have gradients (zeros), and which restores all but the state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    values = [parameter.detach().clone() for parameter in lacking]
    for parameter in parameters:
        parameter.grad = None
    for parameter in lacking:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        # SGD's momentum begins as the first gradient, of which decay would be a part.
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    try:
        yield
    finally:
        for group, kept in zip(optimizer.param_groups, settings, strict=True):
            group.update(kept)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for parameter, value in zip(lacking, values, strict=True):
                parameter.copy_(value)


def _check_dampening(optimizer: Any) -> None:
    """Refuses dampening, because no initial momentum gives the same first step."""
    if any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups):
        raise SettingsError(
            f"{_kind(optimizer)} with dampening cannot make its state before its first step:"
            " momentum begins as the first gradient.",
            remedy=f"{_FIRST_STEP}, or set dampening=0.",
        )


def _check_tensors(optimizer: Any) -> None:
    """Refuses state that is not in tensors, because it could not be sent or restored."""
    names = {
        str(name)
        for values in optimizer.state.values()
        for name, value in values.items()
        if value is not None and not isinstance(value, torch.Tensor)
    }
    if names:
        raise SettingsError(
            f"{_kind(optimizer)} keeps {', '.join(sorted(names))} outside tensors, so its state can be"
            " neither shared nor rolled back.",
            remedy="Use another optimizer.",
        )


def _kind(optimizer: Any) -> str:
    return type(optimizer).__name__


def is_number(value: Any) -> bool:
    """Whether a setting of a parameter group is one number, as a tensor or not."""
    scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return scalar or (isinstance(value, (int, float)) and not isinstance(value, bool))


def number_of(value: Any) -> Any:
    """The value as a Python number."""
    return value.item() if isinstance(value, torch.Tensor) else value
