"""Snapshots of a training state in other ranks' memory, from which it is restored without files."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from muster.communicators.base import Communicator
from muster.errors import SettingsError
from muster.torch.snapshot_copies import GpuRead, OwnRoom, PartCopier, Source, room_bytes
from muster.torch.snapshot_restore import Restorer, encode_head
from muster.torch.snapshot_tensors import GivesParts, ObjectParts
from muster.training.carrier import Carrier, NumpyLibrary
from muster.training.copy_exchange import CopyExchange, OutgoingCopy
from muster.training.part_copy import HeldCopies, PartCopy
from muster.training.shared_room import SharedRoom
from muster.training.snapshots.partners import partners
from muster.training.snapshots.parts import PartKey, SnapshotId
from muster.training.snapshots.restoration import Restoration
from muster.training.snapshots.retention import Retention, RetentionChange
from muster.wire import messages
from muster.worker import runtime

_LOG = logging.getLogger("muster.worker")


class SnapshotSession(Protocol):
    """The part of a :class:`muster.worker.session.session.Session` that snapshots need."""

    @property
    def communicator(self) -> Communicator:
        """The communicator of all members."""

    @property
    def members(self) -> tuple[messages.Member, ...]:
        """All members, in order of rank."""

    @property
    def snapshot_word(self) -> messages.SnapshotWord | None:
        """The scheduler's last message about snapshots in this generation; None: there is none."""

    def report_snapshot(self, report: messages.SnapshotReport) -> None:
        """Reports which snapshots this worker keeps."""


class Snapshots:
    """Copies of each rank's part of the state, in its own memory and in that of its partners.

    ::

        snapshots = muster.torch.Snapshots(every=10)
        state = muster.ParallelTrainingState(model, optimizer, sampler, snapshots=snapshots)
        for step in muster.ElasticLoop(session, state, epochs=10):
            ...

    In a loop of your own, without an ElasticLoop::

        snapshots = muster.torch.Snapshots({"net": net, "optimizer": optimizer, "data": sampler}, every=10)
        step = snapshots.restore() or 0   # after init(), and after each rejoin(); all ranks call it
        while step < steps:
            train(sampler.batch())
            sampler.advance()
            step += 1
            snapshots.step(step)

    When ranks are lost, all ranks go back, bit for bit, to the newest snapshot whose parts are all in the
    memory of remaining ranks, also at another world size. docs/snapshots.md says what is promised.

    Args:
        state: objects by name: modules, optimizers, :class:`muster.ShardedOptimizer`, tensors, dictionaries
            of tensors and numbers, torch generators, a ``ShardedSampler``, and objects with ``state_dict()``
            and ``load_state_dict()`` (learning rate schedulers). Tensors are the same on all ranks, except
            DTensors (FSDP2) and those of a ShardedOptimizer, of which each rank has its part. None: the
            snapshots are given to a training state.
        session: this worker's place in the job; None: that of ``muster.init()``.
        every: number of steps between two snapshots; the same on all ranks.
        copies: number of partners that hold each rank's part, on other hosts if there are any.
        mbytes_per_s: maximum rate at which a rank sends, in 10**6 bytes per second; 0: no limit.

    Attributes:
        held: the complete copies that this process holds, its own and others'.

    Raises:
        SettingsError: a number is out of range, or an object cannot be part of a snapshot.
    """

    def __init__(
        self,
        state: Mapping[str, Any] | None = None,
        session: SnapshotSession | None = None,
        *,
        every: int,
        copies: int = 1,
        mbytes_per_s: float = 0.0,
    ) -> None:
        for name, value in (("every", every), ("copies", copies)):
            if value < 1:
                raise SettingsError(f"Snapshots: {name} is {value}, it must be >= 1.")
        if mbytes_per_s < 0:
            raise SettingsError(f"Snapshots: mbytes_per_s is {mbytes_per_s:g}, it must be >= 0.")
        self._given_session = session
        self._copies, self._mbytes_per_s = copies, mbytes_per_s
        self._parts: GivesParts | None = None if state is None else ObjectParts(state)
        self.held = HeldCopies()
        self._retention = Retention(every)
        self._lock = threading.Lock()
        """Guards the retention and the reports about it."""
        self._exchange: CopyExchange | None = None
        self._copier: PartCopier | None = None
        self._rooms: list[tuple[PartKey | None, OwnRoom]] = []
        self._lent: set[PartKey] = set()
        self._shares_rooms = False
        self._begun: dict[PartKey, float] = {}
        self._seconds = 0.0
        self._partners: tuple[int, ...] = ()
        self._due: PartKey | None = None
        self._pending: tuple[OutgoingCopy, GpuRead] | None = None
        self._reported: messages.SnapshotReport | None = None
        self._keep: SnapshotId | None = None
        self._decided_in = -1
        self._decision: Restoration | None = None
        self._entered = (-1, 0)  # the generation, and how often it was entered before

    # ------------------------------------------------------------ a loop of one's own

    def restore(self, state: Mapping[str, Any] | None = None) -> int | None:
        """Restores the state from the newest complete snapshot, and begins to take snapshots again.

        All ranks call it, after ``muster.init()`` and after each ``session.rejoin()``.

        Args:
            state: the new objects, if the constructor's objects were created again.

        Returns:
            Number of finished steps in the state. None: there is no complete snapshot, because the job begins
            or because parts are lost, which the log then names. Load a durable checkpoint in that case.
        """
        if state is not None:
            self._parts = ObjectParts(state)
        snapshot = self.go_back(self._session.communicator)
        self.enter(0 if snapshot is None else snapshot.step)
        if self._due is not None:
            self._take_due()
            self.confirm()
        return None if snapshot is None else snapshot.step

    def step(self, step: int) -> None:
        """Takes a snapshot if one is due; call it after each step, with the number of finished steps.

        Raises:
            MembershipChanged: on a GPU, the previous step has broken.
        """
        communicator = self._session.communicator
        if self._pending is not None:
            communicator.synchronize()
            self.confirm()
        self.at_step(step)
        if not communicator.on_device:
            self.confirm()

    def close(self) -> None:
        """Closes connections and drops all copies; idempotent."""
        self.end_generation()
        self.held.drop([copy.key for copy in self.held.all()])
        self._rooms, self._copier = [], None

    # ------------------------------------------------------------ what training states call

    def follow(self, parts: GivesParts) -> None:
        """Sets the state of which snapshots are taken.

        Raises:
            SettingsError: these snapshots have a state already.
        """
        if self._parts is not None:
            raise SettingsError(
                "Snapshots belong to one state: give a training state some that were made without a state"
            )
        self._parts = parts

    def use(self, session: SnapshotSession) -> None:
        """Sets the session that is used from now on."""
        self._given_session = session

    def is_whole(self, communicator: Communicator) -> bool:
        """Whether all ranks together hold a complete snapshot; if not, logs why. All ranks call it."""
        return self._decide(communicator) is not None

    def go_back(self, communicator: Communicator) -> SnapshotId | None:
        """Restores the state from the newest snapshot that all ranks together hold; None: there is none.

        Raises:
            StateMismatchError: the copies are of another state.
            MembershipChanged: the members have changed again; nothing was overwritten.
        """
        begun = time.monotonic()
        is_decided = self._decided_in == communicator.membership.generation
        decision = self._decision if is_decided else self._decide(communicator)
        if decision is None:
            return None
        assert self._parts is not None
        Restorer(communicator, self.held).restore(decision, self._parts)
        _LOG.info(
            "The state is that of %s, from the ranks' memory, in %.2f s",
            decision.snapshot,
            time.monotonic() - begun,
        )
        return decision.snapshot

    def _decide(self, communicator: Communicator, *, is_needed: bool = True) -> Restoration | None:
        """Decides with all ranks which snapshot to restore; None: none is complete, logged if needed."""
        self.end_generation()
        decision = Restorer(communicator, self.held).decide(self._retention.agreed, check=is_needed)
        self._decided_in, self._decision, self._keep = communicator.membership.generation, None, None
        if isinstance(decision, Restoration):
            self._decision, self._keep = decision, decision.keep
            return decision
        if decision.snapshot is not None and is_needed:
            _LOG.warning(
                "There is no complete snapshot: of %s, taken by %d ranks, nobody holds the parts of ranks %s",
                decision.snapshot,
                decision.world_size,
                ", ".join(map(str, decision.ranks)),
            )
        return None

    def enter(self, step: int) -> None:
        """Begins a generation in which all ranks are at ``step``; its first snapshot is due at once."""
        session = self._session
        communicator = session.communicator
        if self._decided_in != communicator.membership.generation:
            self._decide(
                communicator, is_needed=False
            )  # no rank goes back, but all ranks agree on what to keep
        self._decided_in = -1
        copier = self._copier_now()
        world_size, rank = communicator.world_size, communicator.rank
        table = partners(session.members, self._copies)
        self._partners = table[rank]
        sizes = [row[0] for row in Carrier(communicator, NumpyLibrary(np)).gather([copier.size])]
        wards = {other: sizes[other] for other in range(world_size) if rank in table[other]}
        inner = getattr(communicator, "host", communicator)
        endpoint = getattr(inner, "endpoint", None)
        if endpoint is None:
            raise SettingsError(
                f"Snapshots need encrypted connections between ranks, which the backend {communicator.name!r}"
                " does not have here: give certificates (MS_CONFIG_FILE), or set MS_ALLOW_INSECURE=1"
            )
        with self._lock:
            change = self._retention.enter(
                communicator.membership.generation,
                rank=rank,
                world_size=world_size,
                step=step,
                keep=self._keep,
            )
        generation = communicator.membership.generation
        self._entered = (generation, self._entered[1] + 1 if self._entered[0] == generation else 0)
        self._exchange = CopyExchange(
            inner.membership,
            endpoint,
            number=self._entered[1],
            partners=self._partners,
            wards=wards,
            held=self.held,
            accept=self._accept,
            completed=self._on_completed,
            failed=self._on_failed,
            mbytes_per_s=self._mbytes_per_s,
        )
        self._say_memory(copier, list(wards.values()))
        self._follow_change(change)

    def at_step(self, step: int, source: Source | None = None, *, after: Sequence[Any] = ()) -> None:
        """Takes a snapshot of the state as it is now, after ``step`` steps, if one is due.

        It is copied into host memory at once, in the background. It is sent only at the next
        :meth:`confirm`, because a step on a GPU may turn out to have broken.

        Args:
            step: number of finished steps.
            source: finds copies that exist on the GPU anyhow; see :class:`PartCopier`. Before they are
                written again, :meth:`wait_until_read` must be called.
            after: events on the GPU for which reading these copies waits.
        """
        if self._exchange is None:
            return
        if self._due is None:
            with self._lock:
                change = self._retention.at_step(step, self._session.snapshot_word)
            self._follow_change(change)
        if self._due is not None:
            self._take_due(source, after)

    def confirm(self) -> None:
        """Sends the snapshot that was taken last: the step before it has succeeded."""
        pending, self._pending = self._pending, None
        if pending is not None and self._exchange is not None:
            self._exchange.send(pending[0])

    def drop_unconfirmed(self) -> None:
        """Drops the snapshot taken last: the step before it broke, or the state changed during the copy."""
        pending, self._pending = self._pending, None
        if pending is not None:
            outgoing, read = pending
            if self._exchange is not None:
                self._exchange.withdraw(outgoing)
            read.drop()
            self._on_failed(outgoing.key, "")

    def end_generation(self) -> None:
        """Ends connections and threads, and drops unfinished copies; complete copies stay."""
        self._pending = None
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()
        if self._copier is not None:
            self._copier.drop_reads()
        self._due = None

    def wait_until_read(self, source: Source) -> None:
        """Makes the GPU's current stream wait until no snapshot is being read from what ``source`` finds."""
        if self._copier is not None:
            self._copier.wait_until_read(source)

    @property
    def complete(self) -> SnapshotId | None:
        """The newest snapshot that is complete everywhere, as far as this rank has heard; or None."""
        agreed, word = self._retention.agreed, self._session.snapshot_word
        if word is None or word.complete < 0:
            return agreed
        return max(agreed or SnapshotId(-1, 0), SnapshotId(word.generation, word.complete))

    # ------------------------------------------------------------ what writes checkpoints calls

    def share_rooms(self) -> None:
        """Keeps copies of CPU tensors in shared memory from now on, for other processes of this host."""
        self._shares_rooms = True

    def lend(self, key: PartKey) -> SharedRoom | None:
        """Keeps the memory of this rank's copy unchanged until :meth:`take_back`.

        Returns:
            The memory as another process can map it; None: it is private.
        """
        self._lent.add(key)
        return next((room.shared for old, room in self._rooms if old == key), None)

    def take_back(self, key: PartKey) -> None:
        """Ends :meth:`lend`: the copy is no longer read."""
        self._lent.discard(key)

    # ------------------------------------------------------------ taking

    @property
    def _session(self) -> SnapshotSession:
        return self._given_session or runtime.current()

    def _copier_now(self) -> PartCopier:
        """The copier of the state's current tensors; a new one if their device has changed."""
        assert self._parts is not None
        communicator = self._session.communicator
        tensors = self._parts.snapshot_tensors(communicator.rank, communicator.world_size)
        old = self._copier
        if old is None or old.device != self._parts.device:
            self._copier = PartCopier(tensors, self._parts.device)
        else:
            old.follow(tensors)
        assert self._copier is not None
        return self._copier

    def _take_due(self, source: Source | None = None, after: Sequence[Any] = ()) -> None:
        key, self._due = self._due, None
        assert key is not None
        assert self._parts is not None
        copier = self._copier_now()
        room = self._room_for(key, copier)
        if room is None:
            self._on_failed(key, "the memory for it is still being read")
            return
        self._begun = {key: time.monotonic()}
        read = copier.take(room, source, after=after)
        notes, data = self._parts.snapshot_notes(), room.data[: copier.size]
        tensors, places = copier.tensors, copier.places

        def finish() -> PartCopy:
            read.wait()
            with copier.beside():
                known = {name: value() if callable(value) else value for name, value in notes.items()}
            return PartCopy(key, encode_head(tensors, places, known), data, is_own=True)

        self._pending = OutgoingCopy(key, self._retention.agreed, finish), read
        if self._exchange is not None:
            self._exchange.prepare(self._pending[0])
        self._report()

    def _room_for(self, key: PartKey, copier: PartCopier) -> OwnRoom | None:
        """Returns memory of this rank that no copy needs any more; None: all of it is in use.

        There are at most two rooms, and a third while a dropped copy is still being written to disk.
        """
        busy = set(self._lent)
        if self._exchange is not None and self._exchange.under_way is not None:
            busy.add(self._exchange.under_way)
        most = 3 if any(self.held.get(each) is None for each in self._lent) else 2
        free = [
            room
            for old, room in self._rooms
            if old is None or (old not in busy and self.held.get(old) is None)
        ]
        kept = [(old, room) for old, room in self._rooms if all(room is not each for each in free)]
        fitting = [room for room in free if len(room.data) >= copier.size]
        if len(kept) >= most:
            return None
        room = fitting[0] if fitting else self._new_room(copier)
        spare = [(None, each) for each in fitting[1:]][: max(0, 1 - len(kept))]
        self._rooms = [*kept, *spare, (key, room)]
        return room

    def _new_room(self, copier: PartCopier) -> OwnRoom:
        if self._shares_rooms and copier.size and copier.device.type == "cpu":
            try:
                return OwnRoom.in_shared_memory(copier.size)
            except OSError as error:
                _LOG.warning(
                    "No shared memory for a snapshot, which is copied again to be written: %s", error
                )
        return OwnRoom(copier.size, pinned=copier.device.type == "cuda")

    def _follow_change(self, change: RetentionChange) -> None:
        self.held.drop(change.drop)
        if change.take is not None:
            self._due = change.take
        self._report()

    # ------------------------------------------------------------ called by the exchange's threads

    def _accept(self, key: PartKey, agreed: SnapshotId | None) -> bool:
        with self._lock:
            change = self._retention.accept(key, agreed)
        self.held.drop(change.drop)
        return key not in change.drop

    def _on_completed(self, key: PartKey) -> None:
        with self._lock:
            self._retention.completed(key)
            self._seconds = time.monotonic() - self._begun.get(key, time.monotonic())
        self._report()

    def _on_failed(self, key: PartKey, reason: str) -> None:
        if reason:
            _LOG.warning("No snapshot of step %d: %s", key.snapshot.step, reason)
        with self._lock:
            change = self._retention.failed(key)
        self.held.drop(change.drop)
        self._report()

    def _report(self) -> None:
        """Reports to the scheduler which snapshots are kept, if that has changed."""
        with self._lock:
            size = 0 if self._copier is None else self._copier.size
            report = self._retention.report().replaced(
                size_bytes=size, seconds=self._seconds, partners=self._partners
            )
            if report == self._reported:
                return
            self._reported = report
        self._session.report_snapshot(report)

    def _say_memory(self, copier: PartCopier, received: Sequence[int]) -> None:
        on_gpu = copier.device.type == "cuda"
        room = room_bytes(copier.size, pinned=on_gpu)
        own, others = 2 * room, 2 * sum(received)
        _LOG.info(
            "Snapshots take %s of host memory a rank (2 x %s of its own, 2 x %s for %d others)%s;"
            " partners: %s",
            _size(own + others),
            _size(room),
            _size(others // 2),
            len(received),
            f", and {_size(copier.size)} on the GPU at most" if on_gpu else "",
            ", ".join(f"rank {rank}" for rank in self._partners) or "none",
        )


def _size(count: int) -> str:
    """Formats a number of bytes."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
