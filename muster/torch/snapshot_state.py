"""A state in an ``ElasticLoop`` that goes back to its last snapshot whenever members change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from muster.communicators.base import Communicator
from muster.errors import SettingsError
from muster.torch.data_parallel import DataParallel
from muster.torch.snapshot_folder import SnapshotFolder
from muster.torch.snapshot_tensors import ObjectParts, SnapshotTensor
from muster.torch.snapshots import Snapshots
from muster.torch.transfer import broadcast_tensors, gather_numbers
from muster.training.checkpoint import CheckpointSession
from muster.training.parts import whole_part
from muster.training.sampler import ShardedSampler
from muster.training.state import StateHolder, StateLostError, TrainingState

_LOG = logging.getLogger("muster.worker")


class SnapshotTrainingState(TrainingState):
    """The training state of objects of which each rank has its part, such as a ShardedOptimizer.

    ::

        optimizer = muster.ShardedOptimizer(net, session, elastic=True, make=torch.optim.AdamW)
        state = muster.torch.SnapshotTrainingState(
            {"net": net, "optimizer": optimizer, "schedule": schedule},
            sampler,
            snapshots=muster.torch.Snapshots(every=10),
        )
        for step in muster.ElasticLoop(session, state, epochs=10):
            with step:
                ...

    After each change of members, also a planned one, all ranks go back to the newest complete snapshot,
    because it is not known which parts a broken step has updated. A ShardedOptimizer is sharded again over
    the new number of ranks.

    Args:
        objects: the objects by name; see :class:`muster.torch.Snapshots`. For a ``DataParallel``, whose state
            is whole on each rank, use ``muster.torch.TorchTrainingState`` instead.
        sampler: distributes the samples.
        snapshots: the snapshots, made without a state.
        take_up: loads the last durable checkpoint into the objects, and returns whether there was one. All
            ranks call it if there is no complete snapshot in memory and none in ``checkpoint``.
        checkpoint: a directory that all hosts share, for :meth:`save_beside`; "": none. A new run resumes
            from the latest checkpoint there.
        mbytes_per_s: maximum rate at which a rank writes there, in 10**6 bytes per second; 0: no limit.

    Raises:
        SettingsError: an object cannot be part of a snapshot.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        sampler: ShardedSampler,
        *,
        snapshots: Snapshots,
        take_up: Callable[[], bool] = lambda: False,
        checkpoint: str | Path = "",
        mbytes_per_s: float = 0.0,
    ) -> None:
        wrapped = [name for name, each in objects.items() if isinstance(each, DataParallel)]
        if wrapped:
            raise SettingsError(
                f"{wrapped[0]} is a DataParallel, whose state each rank has as a whole: take"
                " muster.torch.TorchTrainingState"
            )
        super().__init__({}, sampler)
        self._parts = ObjectParts(objects)
        self._joining = [each for each in objects.values() if callable(getattr(each, "join", None))]
        self._snapshots = snapshots
        self._read_checkpoint = take_up
        self._communicator: Communicator | None = None
        snapshots.follow(self)
        self._session: CheckpointSession | None = None
        self._folder: SnapshotFolder | None = None
        if str(checkpoint):
            self._folder = SnapshotFolder(checkpoint, snapshots, mbytes_per_s=mbytes_per_s)
            self.writes.append(self._folder.wait)

    # ------------------------------------------------------------ what users call

    def save_beside(self) -> bool:
        """Starts to write the newest complete snapshot to disk; all ranks call it, in a step's block.

        For each rank, a separate process writes its part; tensors on a CPU are not copied for it. Waits for
        the previous write first. A write that fails is logged. Planned changes of members and the end of an
        ElasticLoop wait for the write.

        Returns:
            Whether a write has started; False: no snapshot of this generation is complete yet.

        Raises:
            StateLostError: the state was given no directory.
        """
        if self._folder is None:
            raise StateLostError(
                "There is no place to save to.", remedy="Give SnapshotTrainingState checkpoint=."
            )
        assert self._communicator is not None
        assert self._session is not None
        return self._folder.save_beside(self._session, self._communicator) is not None

    # ------------------------------------------------------------ what the loop calls

    def begin(self) -> None:
        """Takes a snapshot if one is due; see :class:`TrainingState`."""
        super().begin()
        self._snapshots.at_step(self.step)
        self._snapshots.confirm()  # the previous step has been waited for

    def commit(self) -> None:
        """Waits for the GPU; see :class:`TrainingState`."""
        assert self._communicator is not None
        self._communicator.synchronize()
        super().commit()

    def share(self, session: StateHolder) -> int:
        """Brings all ranks to the newest complete snapshot.

        Returns:
            0, because no single rank is the source of the state.

        Raises:
            StateLostError: no complete snapshot is left in memory, and there is no checkpoint.
            StateMismatchError: a rank trains another model.
            MembershipChanged: the members changed again.
        """
        self.roll_back()
        communicator = self._communicator = session.communicator
        self._snapshots.use(session)  # type: ignore[arg-type]
        self._session = session  # type: ignore[assignment]
        for each in self._joining:
            each.join(communicator)
        has_begun = any(gather_numbers(communicator, self.device, int(self.step > 0)))
        if self._snapshots.go_back(communicator) is None:
            self._start(communicator, has_begun=has_begun)
        self.sampler.reshard(communicator.rank, communicator.world_size)
        self.generation = communicator.membership.generation
        self._snapshots.enter(self.step)
        self.shared = True
        return 0

    def _start(self, communicator: Communicator, *, has_begun: bool) -> None:
        """Begins a run with rank 0's values, or resumes from a durable checkpoint."""
        taken_up = self._take_up(communicator) if has_begun or not self.shared else False
        if has_begun and not taken_up:
            raise StateLostError(
                "Parts of the state were held only by workers that are lost, and there is no checkpoint.",
                remedy="Give Snapshots more copies=, or SnapshotTrainingState a take_up= that reads one.",
            )
        if taken_up:
            _LOG.warning("training goes on from the last checkpoint, step %d", self.step)
        else:
            tensors = self._parts.snapshot_tensors(communicator.rank, communicator.world_size)
            everywhere = [each.tensor for each in tensors if each.wanted == whole_part(each.shape)]
            broadcast_tensors(communicator, everywhere, 0)

    def _take_up(self, communicator: Communicator) -> bool:
        if self._folder is not None and self._folder.load(communicator, self) is not None:
            return True
        return self._read_checkpoint()

    def end(self) -> None:
        """See :class:`TrainingState`."""
        self._snapshots.end_generation()

    # ------------------------------------------------------------ what snapshots are of

    @property
    def device(self) -> Any:
        """The tensors' device."""
        return self._parts.device

    def snapshot_tensors(self, rank: int, world_size: int) -> list[SnapshotTensor]:
        """The tensors of this rank at this world size."""
        return self._parts.snapshot_tensors(rank, world_size)

    def snapshot_notes(self) -> dict[str, Any]:
        """The rest of the state, as JSON values."""
        position = {
            "step": self.step,
            "run": self.run,
            "sampler": self.sampler.state(),
            "rng": None if self.rng is None else self.rng.bit_generator.state,
            "extra": self.extra,
        }
        return {**self._parts.snapshot_notes(), "position": position}

    def put_snapshot_notes(self, notes: Mapping[str, Any], *, same_rank: bool) -> None:
        """Restores what :meth:`snapshot_notes` has returned."""
        self._parts.put_snapshot_notes(notes, same_rank=same_rank)
        position = notes["position"]
        self.step, self.run, self.extra = int(position["step"]), position["run"], position["extra"]
        self.sampler.restore(position["sampler"])
        if self.rng is not None and position["rng"] is not None:
            self.rng.bit_generator.state = position["rng"]
