"""Sharded checkpoints that a separate process of each rank writes while training continues.

The files are those of :func:`muster.parallel.checkpoint.save_divided`. Each rank's writer process writes its
parts into the unfinished directory, and then a small file that lists them. Rank 0's process waits for all
these files, and renames the directory. So no rank waits for another rank's disk, and no collective is needed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from muster.errors import WorkerError
from muster.parallel.checkpoint import (
    ViewKey,
    name_aliases,
    put_in_place,
    result_of,
    row_of,
    saved_values,
    together,
    views_of,
    write_items,
)
from muster.parallel.module import ParallelModule
from muster.parallel.planning.parts import Box
from muster.parallel.tensors import divided_tensors
from muster.torch.checkpoint_copier import CheckpointCopier
from muster.torch.transfer import broadcast_text
from muster.training.checkpoint import CheckpointError
from muster.training.checkpoint_copy import CheckpointCopy, arrays_in
from muster.training.paced_file import WritePace
from muster.training.writer_process import WriteOrder, WriterProcess
from muster.wire.files import beside

_RANK_FILE = ".rank_{}.json"
OTHERS_WITHIN_S = 60.0
"""How much longer than rank 0 another rank may write, beside as long again."""


class DividedWriter:
    """Writes the checkpoints of one model; each rank has a writer.

    Args:
        directory: see :func:`save_divided`.
        mbytes_per_s: the highest rate at which each rank writes, in 10**6 bytes a second; 0: no limit.
    """

    def __init__(self, directory: Path, mbytes_per_s: float) -> None:
        self._final = directory
        self._mbytes_per_s = mbytes_per_s
        self._writer = WriterProcess()
        self._copier: CheckpointCopier | None = None

    @property
    def is_writing(self) -> bool:
        """Whether this rank's process is writing."""
        return self._writer.is_writing

    def save(
        self,
        model: ParallelModule,
        optimizer: Any,
        extra: Mapping[str, Any],
        done: Callable[[int, float], None],
    ) -> int:
        """Copies this rank's parts, and starts to write them. All ranks call it.

        It first waits until all ranks have finished the previous write.

        Args:
            model: the model to save.
            optimizer: the optimizer of its parameters.
            extra: see :func:`save_divided`.
            done: called on rank 0 with the checkpoint's size in bytes and the seconds that writing took.

        Returns:
            The size of the copy in bytes.

        Raises:
            CheckpointError: a rank could not start; raised on all ranks.
        """
        rank, world_size = model.communicator.rank, model.communicator.world_size
        with together(model, "awaited"):
            self.wait()
        unfinished = self._make_unfinished(model)
        with together(model, "copied"):
            tensors = divided_tensors(model, optimizer)
            values = saved_values(model, optimizer, extra)
            rows = [
                [_row_of_item(item) for item in write_items(tensors, values, each)]
                for each in range(world_size)
            ]
            copy = self._begin_copy(
                rows[rank], views_of(tensors, rank), values, next(model.parameters()).device
            )
        what = {
            "unfinished": str(unfinished),
            "final": str(self._final),
            "rank": rank,
            "rows": rows,
            "aliases": [[each.name, list(each.aliases)] for each in tensors if each.aliases],
            "places": copy.places,
            "mbytes_per_s": self._mbytes_per_s,
        }

        def written(found: Any) -> None:
            if rank == 0:
                done(found["size_bytes"], found["seconds"])

        call = f"{__name__}:{write_parts.__name__}"
        # After a failed write rank 0 deletes the whole directory, the other ranks only their own file.
        partly = unfinished if rank == 0 else unfinished / _RANK_FILE.format(rank)
        self._writer.write(WriteOrder(call, what, copy.size, partly, copy.ready, written))
        return copy.size

    def _make_unfinished(self, model: ParallelModule) -> Path:
        """Returns the directory of an unfinished checkpoint. All ranks call it; rank 0 makes the directory.

        Its name is always new, as a disconnected host may still write to the directory of an abandoned write.
        """
        device = next(model.parameters()).device
        token = broadcast_text(model.communicator, device, os.urandom(4).hex(), 0)
        unfinished = self._final.with_name(f".{self._final.name}.{token}.unfinished")
        with together(model, "made ready"):
            if model.communicator.rank == 0:
                for old in unfinished.parent.glob(f".{self._final.name}.*.unfinished"):
                    shutil.rmtree(old, ignore_errors=True)
                unfinished.mkdir(parents=True)
        return unfinished

    def _begin_copy(
        self, rows: list[list[Any]], views: Mapping[ViewKey, Any], values: Mapping[str, Any], device: Any
    ) -> CheckpointCopy:
        """Starts to copy the items of this rank's rows, each under the number of its row."""
        tensors = {
            str(number): _as_bytes(views[row[0], tuple(row[1])])
            for number, row in enumerate(rows)
            if len(row) > 1
        }
        if self._copier is None:
            self._copier = CheckpointCopier(device)
        plain = {str(number): _saved(values[row[0]]) for number, row in enumerate(rows) if len(row) == 1}
        return self._copier.copy("", tensors, plain, self._writer.room)

    def wait(self) -> None:
        """Waits until this rank has finished writing; rank 0 waits for all ranks."""
        self._writer.wait()

    def give_up(self) -> None:
        """Abandons the current write, which may be waiting for a lost rank."""
        self._writer.give_up("members have changed while it was written")


def _row_of_item(item: WriteItem) -> list[Any]:
    """Converts an item to JSON values: name, offsets, sizes, whole shape and dtype; a value's name only."""
    if item.tensor_data is None:
        return [item.index.fqn]
    data = item.tensor_data
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return [item.index.fqn, list(data.chunk.offsets), list(data.chunk.sizes), list(data.size), dtype]


def _item_of(row: list[Any]) -> WriteItem:
    if len(row) == 1:
        return WriteItem(MetadataIndex(row[0]), WriteItemType.BYTE_IO)
    name, offsets, sizes, shape, dtype = row
    box = Box(tuple(offsets), tuple(sizes))
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape))
    return WriteItem(MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)


def _as_bytes(tensor: Any) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return np.frombuffer(buffer.getvalue(), np.uint8)


# ---------------------------------------------------------------- in the process that writes


class _Copied(DefaultSavePlanner):  # type: ignore[misc]
    """Gives torch's writer the copied items, at a limited rate."""

    def __init__(self, rows: list[Any], arrays: Mapping[str, Any], pace: WritePace) -> None:
        super().__init__()
        self._found = {
            (row[0], tuple(row[1]) if len(row) > 1 else None): (row, arrays[str(number)])
            for number, row in enumerate(rows)
        }
        self._pace = pace

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Returns the tensor or the bytes of an item."""
        index = write_item.index
        offset = None if index.offset is None else tuple(index.offset)
        row, array = self._found[index.fqn, offset]
        self._pace.wrote(array.nbytes)
        if offset is None:
            return io.BytesIO(array.tobytes())
        flat = torch.from_numpy(array.copy() if not array.size else array)
        return flat.view(getattr(torch, row[4])).view(row[2])


def write_parts(data: memoryview, what: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the copies of :meth:`DividedWriter.save`; on rank 0 it also waits for the others and finishes.

    Args:
        data: the copied bytes.
        what: a description of the bytes, and the paths to write to.

    Returns:
        The checkpoint's size in bytes (on rank 0 only), and the seconds that writing took.

    Raises:
        CheckpointError: writing failed; on rank 0 also if another rank's writing failed.
    """
    begun = time.monotonic()
    unfinished, rank, rows = Path(what["unfinished"]), what["rank"], what["rows"]
    try:
        writer = FileSystemWriter(unfinished, sync_files=True)
        plans, metadata = create_default_global_save_plan(
            [SavePlan([_item_of(row) for row in each]) for each in rows]
        )
        plan = writer.prepare_global_plan(plans)[rank]
        planner = _Copied(rows[rank], arrays_in(data, what["places"]), WritePace(what["mbytes_per_s"]))
        written = writer.write_data(plan, planner).wait()
        _say(unfinished, rank, {"rows": [row_of(each) for each in written]})
        if rank:
            return {"size_bytes": 0, "seconds": time.monotonic() - begun}
        now = time.monotonic()
        rows_of_all = _hear(unfinished, len(rows), now + OTHERS_WITHIN_S + (now - begun))
        results = [result_of(row) for each in rows_of_all for row in each]
        name_aliases(what["aliases"], metadata, results)
        writer.finish(metadata, [results])
        for other in range(len(rows)):
            (unfinished / _RANK_FILE.format(other)).unlink()
        size_bytes = sum(path.stat().st_size for path in unfinished.iterdir())
        put_in_place(unfinished, Path(what["final"]))
    except (OSError, RuntimeError, WorkerError) as error:
        with contextlib.suppress(OSError):
            _say(unfinished, rank, {"error": str(error)})
        if isinstance(error, WorkerError):
            raise
        raise CheckpointError(
            f"Rank {rank} could not write its parts of the checkpoint {what['final']}: {error}.",
            remedy="Make room, or choose another directory.",
        ) from error
    return {"size_bytes": size_bytes, "seconds": time.monotonic() - begun}


def _say(unfinished: Path, rank: int, words: Mapping[str, Any]) -> None:
    """Writes this rank's result to a file for rank 0's process."""
    path = unfinished / _RANK_FILE.format(rank)
    new = beside(path)
    new.write_text(json.dumps(words))
    new.replace(path)


def _hear(unfinished: Path, world_size: int, until: float) -> list[Any]:
    """Waits for the results of all ranks, in files: their writers share nothing but the file system."""
    found: list[Any] = []
    while len(found) < world_size:
        path = unfinished / _RANK_FILE.format(len(found))
        try:
            words = json.loads(path.read_text())
        except FileNotFoundError:
            if time.monotonic() > until:
                raise CheckpointError(
                    f"Rank {len(found)} has not written its parts of the checkpoint in {unfinished}."
                ) from None
            time.sleep(0.05)
            continue
        if "error" in words:
            raise CheckpointError(f"Rank {len(found)} could not write its parts of a checkpoint.")
        found.append(words["rows"])
    return found
