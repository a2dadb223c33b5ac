"""Describes what a rank copies of its state and needs to restore it: tensors, and notes on the rest."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from muster.errors import SettingsError
from muster.torch.extra_state import ExtraState
from muster.torch.flat import is_dense
from muster.torch.optimizer_state import make_optimizer_state, number_of
from muster.torch.random import RandomState
from muster.torch.wrapper import SHARDED, check_whole
from muster.training.parts import Part, piece
from muster.training.sampler import ShardedSampler


@dataclass(frozen=True, slots=True)
class SnapshotTensor:
    """One tensor of a state, as one rank holds it.

    Attributes:
        name: the tensor's name, the same on all ranks.
        shape: the shape of the whole tensor.
        tensor: this rank's part of it; its elements, row by row, begin with those of ``wanted``.
        wanted: the elements of the whole tensor that this rank holds.
        own: the elements that this rank copies; ranks that hold the same elements divide them.
    """

    name: str
    shape: tuple[int, ...]
    tensor: Any
    wanted: Part
    own: Part

    def flat(self) -> Any:
        """The elements of ``wanted``, 1-dim; a view if the tensor is contiguous."""
        return self.tensor.detach().reshape(-1)[: self.wanted.stop - self.wanted.start]

    def own_flat(self) -> Any:
        """The elements of ``own``, 1-dim."""
        first = self.own.start - self.wanted.start
        return self.flat()[first : first + self.own.stop - self.own.start]

    def put(self, values: Any) -> None:
        """Overwrites the tensor with ``values``, the elements of ``wanted``, 1-dim."""
        tensor = self.tensor.detach()
        if tensor.is_contiguous():
            tensor.view(-1)[: values.numel()].copy_(values)
        else:
            tensor.copy_(values.view(tensor.shape))


def whole_tensor(name: str, tensor: Any, rank: int, world_size: int) -> SnapshotTensor:
    """Describes a tensor that is the same on all ranks; each rank copies its piece, in memory order."""
    flat = tensor.detach()
    if is_dense(flat) and not flat.is_contiguous():
        flat = flat.as_strided((flat.numel(),), (1,))
    shape = (tensor.numel(),)
    wanted = Part((0,), shape, 0, tensor.numel())
    return SnapshotTensor(name, shape, flat, wanted, piece(wanted, rank, world_size))


class TensorMemo:
    """Makes SnapshotTensors of whole tensors, and reuses those of the previous pass.

    Making them takes ten times as long. Only the tensors of the last two passes are kept alive.
    """

    def __init__(self) -> None:
        self._place = (-1, -1)
        self._made: dict[int, tuple[Any, Any, SnapshotTensor]] = {}
        self._last: dict[int, tuple[Any, Any, SnapshotTensor]] = {}

    def begin(self, rank: int, world_size: int) -> None:
        """Begins a pass over a rank's tensors."""
        self._last = self._made if self._place == (rank, world_size) else {}
        self._made, self._place = {}, (rank, world_size)

    def whole(self, name: str, tensor: Any) -> SnapshotTensor:
        """See :func:`whole_tensor`."""
        found = self._last.get(id(tensor))
        memory = name, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if found is None or found[0] is not tensor or found[1] != memory:
            found = tensor, memory, whole_tensor(name, tensor, *self._place)
        self._made[id(tensor)] = found
        return found[2]


@runtime_checkable
class GivesTensors(Protocol):
    """An object that describes this rank's tensors of its state itself, such as a ShardedOptimizer."""

    def snapshot_tensors(self, name: str) -> Iterator[SnapshotTensor]:
        """Yields this rank's sharded tensors and those derived from them; names begin with ``name``."""


class GivesParts(Protocol):
    """A state of which snapshots are taken."""

    def snapshot_tensors(self, rank: int, world_size: int) -> list[SnapshotTensor]:
        """The tensors of this rank at this world size."""

    def snapshot_notes(self) -> dict[str, Any]:
        """The rest of the state: JSON values, or functions that return them and may wait for the GPU."""

    def put_snapshot_notes(self, notes: Mapping[str, Any], *, same_rank: bool) -> None:
        """Restores what :meth:`snapshot_notes` returned on this rank or, if not ``same_rank``, on rank 0."""

    @property
    def device(self) -> Any:
        """The tensors' device."""


class ObjectParts:
    """The parts of a state that is given as objects by name; :class:`muster.torch.Snapshots` says which.

    Args:
        objects: the objects, by name.

    Raises:
        SettingsError: an object cannot be part of a snapshot.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = dict(objects)
        self._memo = TensorMemo()
        self._dictionaries: list[dict[Any, Any]] = []
        extra: dict[str, Any] = {}
        for name, each in self._objects.items():
            if isinstance(each, torch.nn.Module):
                check_whole_or_dtensors(each)
            elif isinstance(each, torch.optim.Optimizer):
                make_optimizer_state(getattr(each, "inner", each))
            elif isinstance(each, (torch.Tensor, torch.Generator, ShardedSampler, dict)):
                pass
            elif callable(getattr(each, "state_dict", None)):
                extra[name] = each
            else:
                raise SettingsError(
                    f"Snapshots: {name} is a {type(each).__name__}, which is no module, optimizer, tensor,"
                    " dictionary of tensors, generator or sampler, and has no state_dict()"
                )
        self._device = next((each.tensor.device for each in self.snapshot_tensors(0, 1)), torch.device("cpu"))
        self._extra = ExtraState(extra, self._device)
        self._random = RandomState(self._device)

    @property
    def device(self) -> Any:
        """See :class:`GivesParts`."""
        return self._device

    def snapshot_tensors(self, rank: int, world_size: int) -> list[SnapshotTensor]:
        """See :class:`GivesParts`."""
        found: dict[int, SnapshotTensor] = {}
        divided = {id(each) for each in self._objects.values() if isinstance(each, GivesTensors)}

        self._memo.begin(rank, world_size)
        whole = self._memo.whole
        for name, each in self._objects.items():
            if isinstance(each, GivesTensors):
                tensors = each.snapshot_tensors(name)
            elif isinstance(each, torch.nn.Module):
                tensors = _of_module(name, each, divided, whole)
            elif isinstance(each, torch.optim.Optimizer):
                tensors = _of_optimizer(name, each, whole)
            elif isinstance(each, torch.Tensor):
                tensors = iter([_of_tensor(name, each, whole)])
            elif isinstance(each, dict):
                tensors = (_of_tensor(path, value, whole) for path, value in _tensors_in(name, each))
            else:
                continue
            for tensor in tensors:
                found.setdefault(id(tensor.tensor), tensor)
        return list(found.values())

    def snapshot_notes(self) -> dict[str, Any]:
        """See :class:`GivesParts`."""
        notes: dict[str, Any] = {
            "random": [_text(each) for each in self._random.keep()],
            "extra": {name: base64.b64encode(data).decode() for name, data in self._extra.dump().items()},
        }
        for name, each in self._objects.items():
            if isinstance(each, torch.optim.Optimizer):
                notes[f"settings.{name}"] = settings_of(each)
            elif isinstance(each, torch.Generator):
                notes[f"generator.{name}"] = _text(each.get_state())
            elif isinstance(each, ShardedSampler):
                notes[f"sampler.{name}"] = each.state()
            elif isinstance(each, dict):
                notes[f"values.{name}"] = _plain_values(each)
        return notes

    def put_snapshot_notes(self, notes: Mapping[str, Any], *, same_rank: bool) -> None:
        """See :class:`GivesParts`; leaves generators as they are if the notes are another rank's."""
        self._extra.load({name: base64.b64decode(data) for name, data in notes["extra"].items()})
        if same_rank:
            self._random.put_back([_bytes(text) for text in notes["random"]])
        for name, each in self._objects.items():
            if isinstance(each, torch.optim.Optimizer):
                put_settings(each, notes[f"settings.{name}"])
            elif isinstance(each, torch.Generator) and same_rank:
                each.set_state(_bytes(notes[f"generator.{name}"]))
            elif isinstance(each, ShardedSampler):
                each.restore(notes[f"sampler.{name}"])
            elif isinstance(each, dict):
                _put_values(each, notes[f"values.{name}"])


def check_whole_or_dtensors(module: Any) -> None:
    """Refuses a module whose parameters are sharded, but are not DTensors."""
    if any(is_dtensor(parameter) for parameter in module.parameters()):
        return
    check_whole(module, "Snapshots")


def is_dtensor(tensor: Any) -> bool:
    """Whether this is a DTensor, which knows how it is sharded over ranks, like FSDP2's parameters."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _of_tensor(name: str, tensor: Any, whole: Callable[[str, Any], SnapshotTensor]) -> SnapshotTensor:
    if not is_dtensor(tensor):
        return whole(name, tensor)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local().detach()
    if tuple(sizes) != tuple(local.shape):
        raise SettingsError(f"{name} is divided as {tensor.placements}, which a snapshot cannot follow")
    part = Part(tuple(offsets), tuple(sizes), 0, math.prod(sizes))
    return SnapshotTensor(name, tuple(tensor.shape), local, part, part)


def _of_module(
    name: str, module: Any, divided: set[int], whole: Callable[[str, Any], SnapshotTensor]
) -> Iterator[SnapshotTensor]:
    """Yields a module's parameters and buffers, except those that a ShardedOptimizer of the state gives."""
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        sharded = SHARDED.get(tensor, lambda: None)()
        if sharded is None or id(sharded) not in divided:
            yield _of_tensor(f"{name}.{path}", tensor, whole)


def _of_optimizer(
    name: str, optimizer: Any, whole: Callable[[str, Any], SnapshotTensor]
) -> Iterator[SnapshotTensor]:
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            for key, value in sorted(optimizer.state[parameter].items()):
                if isinstance(value, torch.Tensor):
                    yield _of_tensor(f"{name}.{number}.{index}.{key}", value, whole)


def _tensors_in(name: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            yield f"{name}.{key}", value
        elif isinstance(value, dict):
            yield from _tensors_in(f"{name}.{key}", value)


def _plain_values(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the numbers and texts of a dictionary, and of dictionaries within it."""
    return {
        str(key): _plain_values(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if isinstance(value, (dict, int, float, str, bool))
    }


def _put_values(values: dict[Any, Any], kept: Mapping[str, Any]) -> None:
    for key, value in list(values.items()):
        if isinstance(value, dict):
            _put_values(value, kept.get(str(key), {}))
        elif str(key) in kept:
            values[key] = kept[str(key)]


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the numbers in each parameter group: rates, betas, decay."""
    return [
        {
            key: [number_of(each) for each in value] if isinstance(value, (tuple, list)) else number_of(value)
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def put_settings(optimizer: Any, settings: list[dict[str, Any]]) -> None:
    """Restores the settings that :func:`settings_of` has returned."""
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        for key, value in kept.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _text(state: Any) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> Any:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
