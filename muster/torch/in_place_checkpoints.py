"""Durable checkpoints of in-place training: each rank's copy of its part is also written to a file."""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muster.errors import SettingsError, WorkerError
from muster.training.mounted_path import mounted_path
from muster.training.part_copy import DamagedCopyError, PartCopy
from muster.training.part_files import part_order, read_parts, whole_checkpoints, write_part
from muster.wire.threads import start_thread

log = logging.getLogger("muster.worker")

Found = tuple[int, PartCopy]
"""A step and this rank's part of the state before it."""


class InPlaceCheckpoints:
    """The checkpoints of one training in a directory that all hosts share.

    A thread writes each part from the copy in memory, which later copies do not overwrite.

    Args:
        directory: the shared directory.
        every: least number of steps between two checkpoints.
        device: the device whose tensors the default process group communicates.

    Raises:
        SettingsError: ``every`` is below 1.
    """

    def __init__(self, directory: str | Path, *, every: int, device: Any) -> None:
        if every < 1:
            raise SettingsError(f"steps: checkpoint_every is {every}; it must be 1 or more.")
        self.directory, self._every, self._device = mounted_path(directory), every, device
        self._last = 0
        self._attempt, self._attempt_in = 0, -1
        self._writer: threading.Thread | None = None

    def go_on_from(self, step: int) -> None:
        """Counts the steps to the next checkpoint from ``step``, which is the same on all ranks."""
        self._last = step

    def write_due(self, copy: PartCopy) -> None:
        """Starts to write this rank's part, if a checkpoint is due; all ranks call it at the same steps."""
        generation, step = copy.key.snapshot
        if step - self._last < self._every:
            return
        self._last = step
        if self._attempt_in != generation:
            drawn = torch.randint(1 << 62, (1,), device=self._device, generator=_own_generator(self._device))
            dist.broadcast(drawn, 0)
            self._attempt, self._attempt_in = int(drawn), generation
        self.wait()
        what = part_order(copy, self.directory, f"{self._attempt:016x}.0")

        def write() -> None:
            try:
                write_part(copy.data, what)
            except (OSError, WorkerError) as error:
                log.error("The checkpoint of step %d is not written: %s", step, error)

        self._writer = start_thread(write, name="muster-checkpoint")

    def wait(self) -> None:
        """Waits until this rank's part is written."""
        if self._writer is not None:
            self._writer.join()

    def exists(self) -> bool:
        """Whether rank 0 sees a complete-looking checkpoint; all ranks call it and get rank 0's answer."""
        seen = torch.tensor([int(bool(whole_checkpoints(self.directory)))], device=self._device)
        dist.broadcast(seen, 0)
        return bool(seen)

    def load(self, rank: int, size: int) -> Found | None:
        """Loads the latest checkpoint of which each rank finds its part sound, or None. All ranks call it."""
        self.wait()
        names: list[Any] = [whole_checkpoints(self.directory) if rank == 0 else None]
        dist.broadcast_object_list(names, 0)
        for name in names[0]:
            copy = self._own_part(self.directory / name, rank, size)
            is_sound = torch.tensor([int(copy is not None)], device=self._device)
            dist.all_reduce(is_sound, dist.ReduceOp.MIN)
            if copy is not None and bool(is_sound):
                log.warning("The state is that of the checkpoint %s", self.directory / name)
                return copy.key.snapshot.step, replace(copy, data=memoryview(bytearray(copy.data)))
            log.warning("The checkpoint %s is damaged, or of another world size", self.directory / name)
        return None

    def _own_part(self, folder: Path, rank: int, size: int) -> PartCopy | None:
        with contextlib.suppress(OSError):
            for copy in read_parts(folder, rank, size):
                if (copy.key.rank, copy.key.world_size) != (rank, size):
                    continue
                try:
                    copy.check()
                except DamagedCopyError as error:
                    log.error("%s", error.message)
                else:
                    return copy
        return None


def _own_generator(device: Any) -> Any:
    """Returns a newly seeded generator from which the training does not draw."""
    generator = torch.Generator(device)
    generator.seed()
    return generator
