"""Sharded checkpoints in the format of ``torch.distributed.checkpoint``: each rank writes its parts.

The format stores each part as a box within the whole tensor. So a checkpoint of four ranks can be loaded by
another plan on three ranks, or by ``torch.distributed.checkpoint.load`` into a bare module. No process group
is needed: ranks exchange the metadata over the job's communicator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from muster.parallel.module import ParallelModule
from muster.parallel.planning.parts import Box
from muster.parallel.tensors import DividedTensor, divided_tensors, parameter_names
from muster.torch.optimizer_state import make_optimizer_state
from muster.torch.transfer import broadcast_text, gather_numbers
from muster.training.checkpoint import CheckpointError
from muster.training.mounted_path import mounted_path
from muster.training.state import StateMismatchError

_GROUPS, _STATE, _EXTRA = (
    "optimizer.param_groups",
    "optimizer.state",
    "extra",
)  # torch flattens lists and dictionaries into such names
ViewKey = tuple[str, tuple[int, ...]]
"""A tensor's name, and the offsets at which a box begins in it."""


def save_divided(
    directory: str | Path,
    model: ParallelModule,
    optimizer: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Saves a sharded model. All ranks call it; each writes some of the parts.

    The directory gets its name only when all parts are written; until then an older checkpoint of that name
    stays in place.

    Args:
        directory: the checkpoint's directory, on a file system that all ranks share.
        model: a model that :func:`muster.parallelize` made.
        optimizer: the optimizer of ``model.parameters()``; its state and settings are saved, too.
        extra: further values to save, as JSON values; the same on all ranks.

    Returns:
        The directory.

    Raises:
        CheckpointError: a rank could not write its parts; raised on all ranks, with the failed rank's number.
        SettingsError: the optimizer belongs to another model, or a parameter is layerwise.
    """
    communicator = model.communicator
    final = mounted_path(directory)
    unfinished = final.with_name(f".{final.name}.unfinished")
    device = _device(model)
    with together(model, "made ready"):
        if communicator.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
    tensors = divided_tensors(model, optimizer)
    values = saved_values(model, optimizer, extra)
    plans, metadata = create_default_global_save_plan(
        [SavePlan(write_items(tensors, values, rank)) for rank in range(communicator.world_size)]
    )
    written: list[Any] = []
    with together(model, "written"):
        writer = FileSystemWriter(unfinished, sync_files=True)
        plan = writer.prepare_global_plan(plans)[communicator.rank]
        written = writer.write_data(plan, _Source(tensors, values, communicator.rank)).wait()
    mine = json.dumps([row_of(each) for each in written])
    rows = [broadcast_text(communicator, device, mine, rank) for rank in range(communicator.world_size)]
    with together(model, "finished"):
        if communicator.rank == 0:
            results = [result_of(row) for text in rows for row in json.loads(text)]
            name_aliases([(each.name, each.aliases) for each in tensors], metadata, results)
            writer.finish(metadata, [results])
            put_in_place(unfinished, final)
    return final


def saved_values(model: ParallelModule, optimizer: Any, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the values that are saved in addition to the tensors, by name."""
    values: dict[str, Any] = {_EXTRA: json.dumps(dict(extra or {}))}
    if optimizer is not None:
        for number, group in enumerate(_settings(model, optimizer)):
            values |= {f"{_GROUPS}.{number}.{key}": value for key, value in group.items()}
    return values


def load_divided(directory: str | Path, model: ParallelModule, optimizer: Any = None) -> dict[str, Any]:
    """Loads a checkpoint of any plan and world size. All ranks call it; each reads only what it holds.

    Args:
        directory: a directory that :func:`save_divided` wrote. It must be trusted: like any checkpoint of
            torch it can run code.
        model: overwritten in place.
        optimizer: overwritten in place, with its settings; its state is created if it has none yet. A
            parameter without a saved state (it had no gradient yet) gets its state of before the first step.

    Returns:
        The values that were saved as ``extra``.

    Raises:
        CheckpointError: a rank could not read the checkpoint; raised on all ranks.
        StateMismatchError: the checkpoint is of another model, or has no optimizer.
    """
    if optimizer is not None:
        make_optimizer_state(optimizer)
    tensors = divided_tensors(model, optimizer)
    extra: dict[str, Any] = {}
    with together(model, "read"), torch.no_grad():
        try:
            reader = FileSystemReader(saved_at(directory))
            metadata = reader.read_metadata()
        except (OSError, EOFError, ValueError) as error:
            raise CheckpointError(f"There is no checkpoint in {directory}: {error}.") from error
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        known = metadata.state_dict_metadata
        without = _without_state(model, optimizer, known)
        tensors = [each for each in tensors if each.name.rpartition(".")[0] not in without]
        _check(tensors, known, optimizer, directory)
        if without:
            _check_kind(known, optimizer, directory)
        target, rank = _Target(), model.communicator.rank
        items = [item for each in tensors for item in target.read_items(each, known[each.name], rank)]
        items += [_bytes_item(name) for name in known if name == _EXTRA or name.startswith(_GROUPS)]
        reader.read_data(reader.prepare_local_plan(LoadPlan(items)), target).wait()
        extra = json.loads(target.values[_EXTRA])
        if optimizer is not None:
            _restore_settings(model, optimizer, target.values, directory)
            _reset_state(optimizer, list(without.values()))
    return extra


@contextlib.contextmanager
def together(model: ParallelModule, done: str) -> Iterator[None]:
    """Context for work that all ranks do: if one fails, the others raise an error with its number.

    Args:
        model: the model that has the communicator.
        done: the verb of the error: "the checkpoint could not be ..." read, say.

    Raises:
        CheckpointError: the work failed with an ``OSError``, or failed on another rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = gather_numbers(model.communicator, _device(model), int(error is not None))
    if isinstance(error, OSError):
        raise CheckpointError(f"The checkpoint could not be {done}: {error}.") from error
    if error is not None:
        raise error
    if any(failed):
        raise CheckpointError(
            f"The checkpoint could not be {done} on rank {failed.index(1)}.", remedy="Its own error says why."
        )


def _device(model: ParallelModule) -> Any:
    return next(model.parameters()).device


# ---------------------------------------------------------------- writing


def write_items(tensors: Sequence[DividedTensor], values: Mapping[str, Any], rank: int) -> list[WriteItem]:
    """Returns the parts that a rank writes; ranks that hold the same part take turns, tensor by tensor."""
    found = []
    for number, each in enumerate(tensors):
        part = each.parts[rank]
        if not math.prod(each.shape) and rank == 0:  # an empty tensor is saved by its name alone
            found.append(_shard(each, Box((0,) * len(each.shape), each.shape)))
        holders = [other for other, theirs in enumerate(each.parts) if theirs == part]
        if holders[number % len(holders)] != rank:
            continue
        found += [_shard(each, box) for box in part.boxes()]
    if rank == 0:
        found += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in values]
    return found


def _shard(tensor: DividedTensor, box: Box) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    properties = TensorProperties(dtype=tensor.own.dtype)
    return WriteItem(
        MetadataIndex(tensor.name, torch.Size(box.offsets)),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, properties, torch.Size(tensor.shape)),
    )


def views_of(tensors: Sequence[DividedTensor], rank: int) -> dict[ViewKey, Any]:
    """Returns views of a rank's elements, by the tensor's name and the box's offsets."""
    views = {(each.name, box.offsets): each.view(box) for each in tensors for box in each.parts[rank].boxes()}
    return views | {(t.name, (0,) * len(t.shape)): t.own.detach() for t in tensors if not t.own.numel()}


class _Source(DefaultSavePlanner):  # type: ignore[misc]
    """Gives torch's writer the boxes of this rank."""

    def __init__(self, tensors: Sequence[DividedTensor], values: Mapping[str, Any], rank: int) -> None:
        super().__init__()
        self._views = views_of(tensors, rank)
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Returns the tensor or the bytes of an item."""
        index = write_item.index
        if write_item.type != WriteItemType.BYTE_IO:
            return self._views[index.fqn, tuple(index.offset or ())]
        buffer = io.BytesIO()
        torch.save(self._values[index.fqn], buffer)
        return buffer


def row_of(result: Any) -> list[Any]:
    """Converts a writer's result (where an item was written) to JSON values."""
    index, place = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [
        index.fqn,
        offset,
        index.index,
        result.size_in_bytes,
        place.relative_path,
        place.offset,
        place.length,
    ]


def result_of(row: Sequence[Any]) -> WriteResult:
    """Converts the JSON values of :func:`row_of` back to a writer's result."""
    name, offset, number, nbytes, path, start, length = row
    index = MetadataIndex(name, None if offset is None else torch.Size(offset), number)
    return WriteResult(index, nbytes, _StorageInfo(path, start, length))


def name_aliases(
    aliases: Iterable[tuple[str, Sequence[str]]], metadata: Metadata, results: list[WriteResult]
) -> None:
    """Adds the other names of tied parameters, which are stored once, to the metadata and the results."""
    for name, others in aliases:
        for alias in others:
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            results += [
                dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=alias))
                for result in results
                if result.index.fqn == name
            ]


def put_in_place(unfinished: Path, final: Path) -> None:
    """Renames a finished directory to its final name; an older checkpoint is set aside, and then deleted."""
    old = _set_aside(final)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    unfinished.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _set_aside(final: Path) -> Path:
    """Returns the path of an old checkpoint while the new one is renamed."""
    return final.with_name(f".{final.name}.old")


def saved_at(directory: str | Path) -> Path:
    """Returns a checkpoint's path: its name, or where it was set aside, if rank 0 was killed in between."""
    final = mounted_path(directory)
    aside = _set_aside(final)
    return aside if not final.exists() and aside.exists() else final


def _settings(model: ParallelModule, optimizer: Any) -> list[dict[str, Any]]:
    """Returns the optimizer's parameter groups with names for parameters, as torch's state dictionaries."""
    names = parameter_names(model, optimizer)
    return [
        {
            key: [names[id(parameter)] for parameter in value]
            if key == "params"
            else value.item()
            if isinstance(value, torch.Tensor) and value.numel() == 1
            else value
            for key, value in group.items()
        }
        for group in optimizer.param_groups
    ]


# ---------------------------------------------------------------- reading


def _check(
    tensors: Sequence[DividedTensor], known: Mapping[str, Any], optimizer: Any, directory: str | Path
) -> None:
    if optimizer is not None and f"{_GROUPS}.0.params" not in known:
        raise StateMismatchError(
            f"The checkpoint {directory} has no optimizer.", remedy="Load the model alone, or another one."
        )
    for each in tensors:
        theirs = known.get(each.name)
        if not isinstance(theirs, TensorStorageMetadata):
            raise StateMismatchError(
                f"The checkpoint {directory} has no {each.name}: it is of another model or optimizer."
            )
        kind = f"{each.own.dtype}{list(each.shape)}"
        saved = f"{theirs.properties.dtype}{list(theirs.size)}"
        if kind != saved:
            raise StateMismatchError(
                f"{each.name} is {saved} in the checkpoint {directory}, and {kind} here."
            )


def _without_state(model: ParallelModule, optimizer: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the optimizer's parameters that have no saved state, by the name that the state would have."""
    if optimizer is None:
        return {}
    names = parameter_names(model, optimizer)
    saved = {name.rpartition(".")[0] for name in known}
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    found = {f"{_STATE}.{names[id(parameter)]}": parameter for parameter in parameters}
    return {name: parameter for name, parameter in found.items() if name not in saved}


def _check_kind(known: Mapping[str, Any], optimizer: Any, directory: str | Path) -> None:
    """Checks the kind of the optimizer by its settings, as missing states cannot show it.

    Raises:
        StateMismatchError: the saved optimizer lacks a setting.
    """
    missing = [key for key in optimizer.defaults if f"{_GROUPS}.0.{key}" not in known]
    if missing:
        raise StateMismatchError(
            f"The optimizer in {directory} has no {missing[0]}: it is another kind than"
            f" {type(optimizer).__name__}."
        )


def _reset_state(optimizer: Any, parameters: Sequence[Any]) -> None:
    """Resets the optimizer state of parameters to that of before the first step, in place."""
    before = {parameter: optimizer.state.pop(parameter, {}) for parameter in parameters}
    make_optimizer_state(optimizer)
    for parameter, entries in before.items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                value.copy_(optimizer.state[parameter][key])
        if entries:
            optimizer.state[parameter] = entries


class _Target(DefaultLoadPlanner):  # type: ignore[misc]
    """Gives torch's reader the memory that it reads into."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Any] = {}

    def read_items(self, each: DividedTensor, saved: TensorStorageMetadata, rank: int) -> list[ReadItem]:
        """Returns the items to read for this rank's part of a tensor."""
        boxes = each.parts[rank].boxes()
        for box in boxes:
            self._views[each.name, box.offsets] = each.view(box)
        chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
        found: list[ReadItem] = create_read_items_for_chunk_list(each.name, saved, chunks)
        return found

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        """Returns the memory that an item is read into."""
        found = self._views[read_item.dest_index.fqn, tuple(read_item.dest_index.offset or ())]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            found = found.narrow(dim, offset, length)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        """Does nothing: the tensor was read in place."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keeps a value that is not a tensor."""
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _bytes_item(name: str) -> ReadItem:
    none = torch.Size((0,))
    index = MetadataIndex(name)
    return ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)


def _restore_settings(
    model: ParallelModule, optimizer: Any, values: Mapping[str, Any], directory: str | Path
) -> None:
    names = parameter_names(model, optimizer)
    groups: list[dict[str, Any]] = []
    while f"{_GROUPS}.{len(groups)}.params" in values:
        prefix = f"{_GROUPS}.{len(groups)}."
        groups.append({key.removeprefix(prefix): v for key, v in values.items() if key.startswith(prefix)})
    mine = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if mine != [list(group["params"]) for group in groups]:
        raise StateMismatchError(
            f"The optimizer in {directory} has other parameter groups than this one.",
            remedy="Make the optimizer as the run did that saved it.",
        )
    for own, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if isinstance(own.get(key), torch.Tensor):
                own[key].fill_(value)
            elif key != "params":
                own[key] = value
