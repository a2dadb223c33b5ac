"""A loop of steps that continues in the same processes when ranks are lost, and redoes broken steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from muster.errors import SettingsError, WorkerError
from muster.programs.keep_alive import LivingProgram, Meeting, living_program
from muster.torch.fsdp_reset import reset_fsdp
from muster.torch.in_place_checkpoints import Found, InPlaceCheckpoints
from muster.torch.peer_copies import PeerCopies, collective_device, newest_whole, parts_that_lack
from muster.torch.pipeline_reset import reset_pipelines
from muster.torch.random import RandomState
from muster.torch.replica_groups import active_ranks, replica_of, what_it_holds
from muster.torch.snapshot_copies import OwnRoom, PartCopier
from muster.torch.snapshot_restore import decode_head, encode_head
from muster.torch.snapshot_tensors import ObjectParts
from muster.torch.step_batches import NoMoreBatchesError, StepBatches
from muster.torch.zero_redundancy import opened
from muster.training.part_copy import PartCopy
from muster.training.snapshots.parts import PartKey, SnapshotId

log = logging.getLogger("muster.worker")

REHEARSED_STEPS = 2
"""Number of steps that create all lazily created objects: optimizer state, DDP's rebuilt buckets."""


@dataclass(frozen=True, slots=True)
class Copying:
    """When copies are made, and where they are kept; see :func:`steps`."""

    every: int = 10
    copies: int = 1
    checkpoint: str | Path | None = None
    checkpoint_every: int = 1000


@dataclass(frozen=True, slots=True)
class Resharded:
    """What a program has created for another world size; see ``reshard`` of :func:`steps`.

    Attributes:
        state: as for :func:`steps`, loaded from a checkpoint, or as at the program's beginning.
        loader: yields this rank's remaining batches.
        step: number of the next step; 0: there is no checkpoint.
        epochs: number of times that the loader is iterated.
    """

    state: Mapping[str, Any]
    loader: Any
    step: int = 0
    epochs: int = 1


def steps(
    state: Mapping[str, Any],
    loader: Any,
    *,
    epochs: int = 1,
    every: int = 10,
    copies: int = 1,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 1000,
    first: int = 0,
    reshard: Callable[[], Resharded] | None = None,
) -> Iterator[tuple[InPlaceStep, Any]]:
    """Yields the steps of a training that continues in the same processes when ranks are lost.

    ::

        muster.torch.keep_alive()
        dist.init_process_group()
        ...
        for step, batch in muster.torch.steps({"net": net, "optimizer": optimizer}, loader):
            with step:
                loss = train(batch)

    Every ``every`` steps, each rank copies its part of the state into its own memory and that of a partner,
    on another host if there is one. When ranks are lost, the errors that this causes on the others within
    ``with step`` are suppressed. All ranks, and the processes that replace the lost ones, go back to the
    newest complete copy. A replacement first does two steps by itself, whose results are overwritten
    (``step.rehearses``). So a step may run several times, and its effects outside ``state`` are not undone.
    The whole step must be within ``with``.

    Without :func:`keep_alive`, or if that has returned False, this is a plain loop over the batches.

    Args:
        state: objects by name: modules in the form in which they are called (also DDP's), optimizers,
            tensors, dictionaries of tensors and numbers, torch generators, and objects with ``state_dict()``
            and ``load_state_dict()``.
        loader: yields this rank's batches of one epoch each time that it is iterated, like a DataLoader.
        epochs: number of times that the loader is iterated.
        every: number of steps between two copies; the same on all ranks.
        copies: number of partners that hold each rank's part; any ``copies`` ranks can be lost at once.
        checkpoint: a directory that all hosts share, into which a thread of each rank also writes its part. A
            run resumes from the latest checkpoint there when it begins, or when no rank has some part in
            memory.
        checkpoint_every: least number of steps between two checkpoints.
        first: number of the first step, if the program has loaded its state from a checkpoint.
        reshard: called on all ranks when the world size has changed and no whole replicas of the model can go
            on. It is called with the new ``RANK`` and ``WORLD_SIZE``, after all process groups were
            destroyed. It creates groups, modules and optimizer as the program did, and loads them from a
            checkpoint of its own (torch.distributed.checkpoint). Without it, the program is restarted.

    Yields:
        The step, to be entered by ``with``, and its batch.

    Raises:
        SettingsError: a number is below 1, or an object cannot be part of the state.
    """
    numbers = {"epochs": epochs, "every": every, "copies": copies, "checkpoint_every": checkpoint_every}
    for name, value in numbers.items():
        if value < 1:
            raise SettingsError(f"steps: {name} is {value}; it must be 1 or more.")
    program = living_program()
    if program is None:
        return _plain_steps(loader, epochs, first)
    copying = Copying(every, copies, checkpoint, checkpoint_every)
    return InPlaceTraining(program, Resharded(state, loader, first, epochs), copying, reshard).run()


class InPlaceStep:
    """One step of :func:`steps`, used as a context; ``int(step)`` is its number.

    Attributes:
        number: the step's number, from 0.
        rehearses: whether its results will be overwritten, because it only creates objects that other ranks
            already have.
        is_broken: whether a rank was lost in it, so that it is done again.
    """

    def __init__(self, number: int, program: LivingProgram | None = None, *, rehearses: bool = False) -> None:
        self.number, self.rehearses = number, rehearses
        self.is_broken = False
        self._program = program

    def __int__(self) -> int:
        """The step's number."""
        return self.number

    __index__ = __int__

    def __enter__(self) -> InPlaceStep:
        """Begins the step."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Ends the step; suppresses an error that the loss of a rank has caused."""
        if self._program is None or self._program.rehearses:
            return False
        if error is None:
            self.is_broken = self._program.is_over
            return False
        if not isinstance(error, Exception) or self._program.is_own_failure():
            return False
        log.info("step %d is undone: %s", self.number, error)
        self.is_broken = True
        return True


def _plain_steps(loader: Any, epochs: int, number: int) -> Iterator[tuple[InPlaceStep, Any]]:
    batches = StepBatches(loader, epochs, RandomState(torch.device("cpu")))
    batches.forget_before(number)
    while True:
        try:
            batch = batches.at(number)
        except NoMoreBatchesError:
            return
        yield InPlaceStep(number), batch
        number += 1
        batches.forget_before(number)


class InPlaceTraining:
    """The loop of :func:`steps` in a process that survives the loss of other ranks.

    Args:
        program: this process, as the job knows it.
        begun: state, loader, first step and epochs, as given to :func:`steps`.
        copying: when copies are made, and where they are kept.
        reshard: see :func:`steps`.
    """

    def __init__(
        self,
        program: LivingProgram,
        begun: Resharded,
        copying: Copying,
        reshard: Callable[[], Resharded] | None = None,
    ) -> None:
        self._program, self._every, self._copying = program, copying.every, copying
        self._reshard_function = reshard
        self._hold(begun)

    def _hold(self, begun: Resharded) -> None:
        """Sets up the objects to train from now on, at the current world size."""
        self._objects = dict(begun.state)
        self._parts = ObjectParts(opened(begun.state))
        self._random = RandomState(self._parts.device)
        self._loader = begun.loader
        self._batches = StepBatches(begun.loader, begun.epochs, self._random)
        self._batches.forget_before(begun.step)
        self._number = begun.step
        self._rehearsed = begun.step + REHEARSED_STEPS
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._replica = replica_of(self._objects)
        has_replicas = self._replica is not None
        reshards = self._reshard_function is not None and not has_replicas
        self._program.begin(takes_fewer=has_replicas, reshards=reshards)
        self._copies = PeerCopies(self._rank, self._size, self._copying.copies)
        self._checkpoints: InPlaceCheckpoints | None = None
        if self._copying.checkpoint is not None:
            self._checkpoints = InPlaceCheckpoints(
                self._copying.checkpoint, every=self._copying.checkpoint_every, device=collective_device()
            )
            self._checkpoints.go_on_from(begun.step)
        self._taken: tuple[int, int] | None = None

    def run(self) -> Iterator[tuple[InPlaceStep, Any]]:
        """Yields the steps, each with its batch."""
        if self._program.rehearses:
            if not self._program.is_resharding:
                yield from self._rehearse()
            self._recover(is_newcomer=True)
        else:
            yield from self._begin_with_checkpoint()
        while True:
            try:
                self._take_due()
                batch = self._next_batch()
            except NoMoreBatchesError:
                return
            except Exception as error:
                if self._program.is_own_failure():
                    raise
                log.info("step %d is postponed: %s", self._number, error)
                self._recover()
                continue
            step = InPlaceStep(self._number, self._program)
            yield step, batch
            if step.is_broken:
                self._recover()
            else:
                self._number += 1

    def _begin_with_checkpoint(self) -> Iterator[tuple[InPlaceStep, Any]]:
        """Resumes from the latest checkpoint, after rehearsed steps that create the state to load."""
        try:
            if not self._checkpoints or not self._checkpoints.exists():
                return
            for step, batch in self._rehearse():
                yield step, batch
                if step.is_broken:
                    self._program.restart("The members have changed before the state was there.")
            if why := self._settle_modules():
                raise SettingsError(why)
            found = self._checkpoints.load(self._rank, self._size)
            if found is None:
                raise WorkerError(
                    f"No checkpoint in {self._checkpoints.directory} can be used by {self._size} ranks.",
                    remedy="Start as many ranks as have written it, or name another directory.",
                )
            self._put(found, is_newcomer=True)
        except Exception:
            if self._program.is_own_failure():
                raise
            self._program.restart("The members have changed before the state was there.")

    def _next_batch(self) -> Any:
        try:
            return self._batches.at(self._number)
        except NoMoreBatchesError:
            if self._checkpoints:
                self._checkpoints.wait()
            dist.barrier()  # if a rank is lost in the last step, the others must do it again
            raise

    def _rehearse(self) -> Iterator[tuple[InPlaceStep, Any]]:
        random = RandomState(self._parts.device)
        batches = StepBatches(self._loader, 1, random)
        for number in range(REHEARSED_STEPS):
            try:
                batch = batches.at(number)
            except NoMoreBatchesError:
                return
            yield InPlaceStep(number, self._program, rehearses=True), batch

    # ------------------------------------------------------------ copies

    def _take_due(self) -> None:
        """Copies the state if a copy is due; the first one is due after the rehearsed steps."""
        number, rehearsed = self._number, self._rehearsed
        is_due = number == rehearsed or (number > rehearsed and number % self._every == 0)
        if is_due and self._taken != (self._program.generation, number):  # not again after going back to it
            self._take(self._encode())

    def _take(self, part: PartCopy) -> None:
        self._taken = self._program.generation, self._number
        copy = self._copies.take(self._taken, part)
        if self._checkpoints:
            self._checkpoints.write_due(copy)
        self._batches.forget_before(self._number)
        self._program.note_state()

    def _encode(self) -> PartCopy:
        """Copies this rank's state before the next step."""
        on_gpu = self._parts.device.type == "cuda"
        copier = PartCopier(self._parts.snapshot_tensors(0, 1), self._parts.device)
        room = OwnRoom(copier.size, pinned=on_gpu)
        copier.take(room, lambda tensor: tensor).wait()  # at once, because the tensors themselves are read
        notes = {"state": self._parts.snapshot_notes(), "place": self._batches.place(self._number)}
        key = PartKey(SnapshotId(self._program.generation, self._number), self._size, self._rank)
        return PartCopy(key, encode_head(copier.tensors, copier.places, notes), room.data[: copier.size])

    def _decode(self, part: PartCopy, *, is_newcomer: bool, is_own: bool) -> None:
        """Restores the state from a copy; generators only from this rank's own copy, not from a replica's."""
        head = decode_head(part.head.decode())
        with torch.no_grad():
            for each, span in zip(self._parts.snapshot_tensors(0, 1), head.tensors, strict=True):
                if span.stop > span.start:
                    values = torch.frombuffer(part.data[span.start : span.stop], dtype=each.tensor.dtype)
                    each.put(values.to(each.tensor.device))
        before = self._random.keep()
        if is_newcomer:
            self._batches.go_to(self._number, head.notes["place"])
        self._random.put_back(before)
        self._parts.put_snapshot_notes(head.notes["state"], same_rank=is_own)

    # ------------------------------------------------------------ another generation

    def _recover(self, *, is_newcomer: bool = False) -> None:
        """Enters the next generation, in which all ranks go back to the newest complete copy."""
        enters = not is_newcomer
        while True:
            try:
                if enters:
                    self._program.enter_next()
                enters = True
                if self._program.is_resharding:
                    self._reshard()
                    return
                if why := self._settle_modules():
                    self._program.restart(why)
                meeting = self._program.connect(self._said(), self._active_of)
                if self._rank not in meeting.active:
                    log.warning("This rank waits: others that share its replica of the model are missing.")
                    continue
                self._restore(meeting, is_newcomer=is_newcomer)
                return
            except Exception as error:
                if self._program.is_own_failure():
                    raise
                log.info("the generation ended before all ranks had restored their state: %s", error)
                self._program.break_off()

    def _reshard(self) -> None:
        """Calls the program to create groups, modules and optimizer for the new world size."""
        if self._reshard_function is None:
            raise SettingsError("steps: reshard is given on some ranks only; give it on all or none.")
        self._program.leave_groups()
        made = self._reshard_function()
        self._hold(made)
        if made.step:  # loaded from a checkpoint, so the optimizer's state exists
            self._take(self._encode())
        self._program.settle()
        log.info("%d ranks continue with step %d, resharded", self._size, self._number)

    def _said(self) -> dict[str, Any]:
        """Returns what this rank tells the others: its copies, the layout of its part, and its replica."""
        return {
            "copies": self._copies.holds,
            "like": what_it_holds(self._parts.snapshot_tensors(0, 1)),
            "replica": self._replica or list(range(self._size)),
        }

    def _active_of(self, told: list[Any]) -> list[int]:
        active = active_ranks([each and each["replica"] for each in told])
        if not active:
            self._program.restart("No replica of the model has all its ranks.")
        return active

    def _restore(self, meeting: Meeting, *, is_newcomer: bool) -> None:
        if len(meeting.active) < self._size:
            log.warning("Generation %d trains on ranks %s alone", meeting.generation, meeting.active)
        self._copies.among(meeting.active)
        holds = [each["copies"] if each else [] for each in meeting.said]
        like = [each["like"] if each and self._replica else str(at) for at, each in enumerate(meeting.said)]
        whole = newest_whole(holds, meeting.active, like)
        if whole is not None:
            key, sources = whole
            found, is_own = (key[1], self._copies.restore(key, sources)), sources[self._rank][0] == self._rank
            if not is_own:
                log.warning("The state is that of rank %d, a replica", sources[self._rank][0])
            self._put(found, is_newcomer=is_newcomer, is_own=is_own)
        else:
            # Like a newcomer, because a survivor has kept only the batches since its last copy, and a
            # checkpoint is older.
            self._put(self._from_checkpoint(_what_lacks(holds, meeting.active)), is_newcomer=True)
        log.info("generation %d continues with step %d in place", meeting.generation, self._number)

    def _from_checkpoint(self, why: str) -> Found:
        """Loads the latest checkpoint, as no copy in memory is whole; restarts the program without one."""
        if self._checkpoints is None:
            self._program.restart(why)
        log.warning("%s", why)
        found = self._checkpoints.load(self._rank, self._size)
        if found is None:
            self._program.restart(f"{why} No checkpoint can be used, either.")
        return found

    def _put(self, found: Found, *, is_newcomer: bool, is_own: bool = True) -> None:
        """Goes back to a step; this rank and its partners hold the copy of it afterwards."""
        self._number, part = found
        if self._checkpoints:
            self._checkpoints.go_on_from(self._number)
        self._decode(part, is_newcomer=is_newcomer, is_own=is_own)
        self._take(part if is_own else self._encode())

    def _settle_modules(self) -> str:
        """Drops what a broken step has left in modules and pipelines; returns why it cannot, or ""."""
        if not reset_pipelines():
            return "This torch's pipelines cannot drop a broken step."
        for module in self._objects.values():
            if not isinstance(module, torch.nn.Module):
                continue
            for each in module.modules():
                if isinstance(each, torch.nn.parallel.DistributedDataParallel):
                    if not hasattr(each.reducer, "_reset_state"):
                        return "This torch's DDP cannot drop a broken step."
                    each.reducer._reset_state()
                elif hasattr(each, "_get_fsdp_state") and not reset_fsdp(each._get_fsdp_state()):
                    return "This torch's FSDP2 cannot drop a broken step."
            for parameter in module.parameters():
                parameter.grad = None
        return ""


def _what_lacks(holds: Any, active: Sequence[int]) -> str:
    lacking = parts_that_lack(holds, active)
    if lacking is None:
        return "No rank that is left has a copy of the state."
    step, ranks = lacking
    return f"Of step {step} the parts of ranks {', '.join(map(str, ranks))} are in nobody's memory."
