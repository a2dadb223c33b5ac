"""Objects of a script that belong to its training state: schedulers, scalers, averages of parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from muster.errors import SettingsError
from muster.torch.optimizer_state import make_optimizer_state


class ExtraState:
    """Objects with ``state_dict()`` and ``load_state_dict()``, by name.

    The tensors of a module on the model's device are read and written in place. Any other object's state is
    saved and loaded as a whole.

    Args:
        objects: the objects, by name.
        device: the model's device.

    Raises:
        SettingsError: an object lacks these methods, or its state holds more than numbers, texts and tensors.
    """

    def __init__(self, objects: Mapping[str, Any], device: Any) -> None:
        self._device = device
        self._modules: dict[str, Any] = {}
        self._others: dict[str, Any] = {}
        for name, each in objects.items():
            if not (callable(getattr(each, "state_dict", None)) and callable(_loader(each))):
                raise SettingsError(
                    f"also: {name} is a {type(each).__name__}, which lacks state_dict() or load_state_dict()"
                )
            if isinstance(each, torch.optim.Optimizer):
                make_optimizer_state(each)
            if isinstance(each, torch.nn.Module) and _lies_on(each, device):
                self._modules[name] = each
            else:
                self._others[name] = each
        for name, data in self.dump().items():
            try:
                self._read(data)
            except Exception as error:
                raise SettingsError(
                    f"also: the state of {name} holds more than numbers, texts and tensors: {error}"
                ) from error

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """The tensors of modules, by name; they are read and written in place."""
        for name, module in self._modules.items():
            for key, value in module.state_dict(keep_vars=True).items():
                if isinstance(value, torch.Tensor):
                    yield f"also.{name}.{key}", value

    def keep(self) -> dict[str, Any]:
        """The states of objects that are not modules, for :meth:`put_back`."""
        return {name: copy.deepcopy(each.state_dict()) for name, each in self._others.items()}

    def put_back(self, kept: dict[str, Any]) -> None:
        """Loads the states that :meth:`keep` has returned."""
        for name, state in kept.items():
            self._others[name].load_state_dict(copy.deepcopy(state))

    def dump(self) -> dict[str, bytes]:
        """The states of objects that are not modules, as bytes for :meth:`load`."""
        return {name: self._written(each.state_dict()) for name, each in self._others.items()}

    def load(self, dumped: Mapping[str, bytes]) -> None:
        """Loads the states that :meth:`dump` has returned; ignores names that are unknown here."""
        for name, data in dumped.items():
            if name in self._others:
                self._others[name].load_state_dict(self._read(data))

    def _written(self, state: Any) -> bytes:
        on_device: list[bool] = []  # for each tensor; a device's index differs from rank to rank

        def plain(value: Any) -> Any:
            if isinstance(value, np.generic):
                return value.item()
            if isinstance(value, torch.Tensor):
                on_device.append(value.device.type != "cpu")
                return value.detach().cpu()
            return value

        stream = io.BytesIO()
        torch.save([tree_map(plain, state), on_device], stream)
        return stream.getvalue()

    def _read(self, data: bytes) -> Any:
        state, on_device = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        flags = iter(on_device)

        def placed(value: Any) -> Any:
            return value.to(self._device) if isinstance(value, torch.Tensor) and next(flags) else value

        return tree_map(placed, state)


def _loader(each: Any) -> Any:
    return getattr(each, "load_state_dict", None)


def _lies_on(module: Any, device: Any) -> bool:
    return {tensor.device for tensor in (*module.parameters(), *module.buffers())} == {device}
