"""Writes durable checkpoints from the copies that snapshots keep in memory, without another copy."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from muster.communicators.base import Communicator
from muster.errors import SettingsError
from muster.torch.snapshot_restore import Restorer
from muster.torch.snapshot_tensors import GivesParts
from muster.torch.snapshots import Snapshots
from muster.torch.transfer import broadcast_text
from muster.training.carrier import Carrier, NumpyLibrary
from muster.training.checkpoint import CheckpointSession
from muster.training.mounted_path import mounted_path
from muster.training.part_copy import HeldCopies, PartCopy
from muster.training.part_files import part_order, read_parts, whole_checkpoints, write_part
from muster.training.snapshots.parts import PartKey, SnapshotId
from muster.training.snapshots.restoration import Restoration
from muster.training.writer_process import WriteOrder, WriterProcess

_LOG = logging.getLogger("muster.worker")


class SnapshotFolder:
    """A directory of checkpoints, written from copies of :class:`muster.torch.Snapshots`; all ranks have one.

    Args:
        directory: its path, on a file system that all hosts share.
        snapshots: the snapshots whose copies are written.
        mbytes_per_s: maximum rate at which each rank writes, in 10**6 bytes per second; 0: no limit.

    Raises:
        SettingsError: ``mbytes_per_s`` is below 0, or the directory is an address.
    """

    def __init__(self, directory: str | Path, snapshots: Snapshots, *, mbytes_per_s: float = 0.0) -> None:
        if mbytes_per_s < 0:
            raise SettingsError(f"SnapshotFolder: mbytes_per_s is {mbytes_per_s:g}, it must be >= 0.")
        self._root = mounted_path(directory)
        self._snapshots = snapshots
        self._mbytes_per_s = mbytes_per_s
        self._writer = WriterProcess()
        self._session: CheckpointSession | None = None
        snapshots.share_rooms()

    @property
    def is_writing(self) -> bool:
        """Whether this rank's writer process is writing."""
        return self._writer.is_writing

    def save_beside(self, session: CheckpointSession, communicator: Communicator) -> SnapshotId | None:
        """Starts to write the newest snapshot that counts; all ranks call it between the same two steps.

        Waits for the previous write first. A write that fails is logged.

        Args:
            session: the session of this generation, to which the write is reported.
            communicator: the communicator of all ranks.

        Returns:
            The snapshot that is being written; None: no snapshot of this generation counts yet.
        """
        self._session = session
        self.wait()
        before = self._own()
        agreed = self._snapshots.complete or SnapshotId(-1, 0)
        heard = Carrier(communicator, NumpyLibrary(np)).gather([agreed.generation + 1, agreed.step])
        # The latest snapshot of which any rank has heard counts. All ranks keep it, or kept it until they
        # heard of a later one.
        newest = max(SnapshotId(generation - 1, step) for generation, step in heard)
        generation, world_size = communicator.membership.generation, communicator.world_size
        if newest.generation != generation:
            _LOG.info("No checkpoint is written: no snapshot of generation %d is complete yet", generation)
            return None
        key = PartKey(newest, world_size, communicator.rank)
        copy = ({each.key: each for each in before} | {each.key: each for each in self._own()})[key]
        self._write(copy, session)
        return newest

    def wait(self) -> None:
        """Waits until this rank has written; the scheduler knows, and does not report a standstill."""
        if self._writer.is_writing:
            with self._busy():
                self._writer.wait()

    def close(self) -> None:
        """Waits for a write in progress, and ends the process that writes."""
        self._writer.close()

    def load(self, communicator: Communicator, parts: GivesParts) -> SnapshotId | None:
        """Restores the state from the latest checkpoint that is sound; all ranks call it.

        Returns:
            The snapshot from which the checkpoint was written; None: there is no sound checkpoint.

        Raises:
            StateMismatchError: the checkpoint is of another state.
            MembershipChanged: the members have changed.
        """
        mine = json.dumps(whole_checkpoints(self._root) if communicator.rank == 0 else [])
        for name in json.loads(broadcast_text(communicator, parts.device, mine, 0)):
            held = HeldCopies()
            with contextlib.suppress(OSError):
                for copy in read_parts(self._root / name, communicator.rank, communicator.world_size):
                    held.keep(copy)
            restorer = Restorer(communicator, held)
            decision = restorer.decide(None)
            if isinstance(decision, Restoration):
                restorer.restore(decision, parts)
                _LOG.info("The state is that of the checkpoint %s", self._root / name)
                return decision.snapshot
            _LOG.warning("The checkpoint %s is damaged and is not used", self._root / name)
        return None

    def _own(self) -> list[PartCopy]:
        return [copy for copy in self._snapshots.held.all() if copy.is_own]

    def _busy(self) -> AbstractContextManager[None]:
        if self._session is None:
            return contextlib.nullcontext()
        return self._session.busy("waits for a checkpoint that is being written")

    def _write(self, copy: PartCopy, session: CheckpointSession) -> None:
        room = self._snapshots.lend(copy.key)
        what = part_order(copy, self._root, f"{session.launch:016x}.0", self._mbytes_per_s)
        snapshots, step = self._snapshots, copy.key.snapshot.step

        def done(found: Any) -> None:
            if found["size_bytes"]:
                session.report_checkpoint(step, size_bytes=found["size_bytes"], seconds=found["seconds"])

        self._writer.write(
            WriteOrder(
                f"{write_part.__module__}:{write_part.__name__}",
                what,
                len(copy.data),
                Path(what["unfinished"]),
                _nothing if room is not None else self._brought_over(copy.data),
                done,
                room,
                lambda: snapshots.take_back(copy.key),
            )
        )

    def _brought_over(self, data: memoryview) -> Callable[[], None]:
        """Returns a function that copies data to memory that the writer can read, unlike pinned memory."""

        def copy() -> None:
            np.copyto(
                np.frombuffer(self._writer.room.take(len(data)), np.uint8), np.frombuffer(data, np.uint8)
            )

        return copy if len(data) else _nothing


def _nothing() -> None:
    return None
