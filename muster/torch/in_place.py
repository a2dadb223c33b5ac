"""A loop of steps that goes on in the same processes when ranks are lost: broken steps are done once more."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from muster.errors import SettingsError
from muster.programs.keep_alive import LivingProgram, Meeting, living_program
from muster.torch.peer_copies import PeerCopies, newest_whole
from muster.torch.random import RandomState
from muster.torch.snapshot_tensors import ObjectParts
from muster.torch.step_batches import NoMoreBatchesError, StepBatches

log = logging.getLogger("muster.worker")

REHEARSED_STEPS = 2
"""After so many steps all is there that modules make as they go: optimizers' state, DDP's second buckets."""

_HEAD_BYTES = 8


def steps(
    state: Mapping[str, Any], loader: Any, *, epochs: int = 1, every: int = 10
) -> Iterator[tuple[InPlaceStep, Any]]:
    """The steps of a training that goes on in the same processes when ranks are lost.

    ::

        muster.torch.keep_alive()
        dist.init_process_group()
        ...
        for step, batch in muster.torch.steps({"net": net, "optimizer": optimizer}, loader):
            with step:
                loss = train(batch)

    Every so many steps each rank copies its part of the state into its own memory and that of a partner, on
    another host where there is one. When ranks are lost, what their loss makes the others raise within
    ``with step`` is dropped; all go back to the newest copy that is whole, and so does the process that takes
    a lost rank's place. That one first does two steps for itself, the results of which are overwritten
    (``step.rehearses``). So a step may be done several times: what it leaves anywhere but in ``state`` stays
    there. All of it belongs within ``with``.

    Without :func:`keep_alive`, or where that has said no, it is a loop like any other.

    Args:
        state: objects by name: modules, as they are called (DDP's, too), optimizers, tensors, dictionaries of
            tensors and numbers, torch generators, and what has ``state_dict()`` and ``load_state_dict()``.
        loader: gives an epoch's batches each time that it is iterated, this rank's; a DataLoader, say.
        epochs: how often it is iterated.
        every: steps between two copies; the same on all ranks.

    Yields:
        The step, to be entered by ``with``, and its batch.

    Raises:
        SettingsError: ``every`` or ``epochs`` is below 1, or an object cannot be part of the state.
    """
    if every < 1 or epochs < 1:
        raise SettingsError(f"steps: every is {every} and epochs is {epochs}; both must be 1 or more.")
    program = living_program()
    if program is None:
        return _plain_steps(loader, epochs)
    return InPlaceTraining(program, state, loader, epochs=epochs, every=every).run()


class InPlaceStep:
    """One step of :func:`steps`: ``int(step)`` is its number, from 0.

    Attributes:
        number: the same.
        rehearses: its results will be overwritten: this process only makes what the others have already.
        is_broken: it has not been done, because a rank was lost; it comes once more.
    """

    def __init__(self, number: int, program: LivingProgram | None = None, *, rehearses: bool = False) -> None:
        self.number, self.rehearses = number, rehearses
        self.is_broken = False
        self._program = program

    def __int__(self) -> int:
        """Its number."""
        return self.number

    __index__ = __int__

    def __enter__(self) -> InPlaceStep:
        """Begins it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Ends it; drops what the loss of a rank has brought about."""
        if self._program is None or self.rehearses:
            return False
        if error is None:
            self.is_broken = self._program.is_over
            return False
        if not isinstance(error, Exception) or self._program.is_own_failure():
            return False
        log.info("step %d is undone: %s", self.number, error)
        self.is_broken = True
        return True


def _plain_steps(loader: Any, epochs: int) -> Iterator[tuple[InPlaceStep, Any]]:
    batches = StepBatches(loader, epochs, RandomState(torch.device("cpu")))
    number = 0
    while True:
        try:
            batch = batches.at(number)
        except NoMoreBatchesError:
            return
        yield InPlaceStep(number), batch
        number += 1
        batches.forget_before(number)


class InPlaceTraining:
    """What :func:`steps` does in a process that lives on.

    Args:
        program: this process.
        state: see :func:`steps`, as are the others.
    """

    def __init__(
        self, program: LivingProgram, state: Mapping[str, Any], loader: Any, *, epochs: int, every: int
    ) -> None:
        self._program, self._every = program, every
        self._objects = dict(state)
        self._parts = ObjectParts(state)
        random = RandomState(self._parts.device)
        self._loader, self._batches = loader, StepBatches(loader, epochs, random)
        self._copies = PeerCopies(dist.get_rank(), dist.get_world_size())
        self._number = self._generation = 0
        self._needs_copy = False

    def run(self) -> Iterator[tuple[InPlaceStep, Any]]:
        """The steps."""
        if self._program.rehearses:
            yield from self._rehearse()
            self._recover(is_newcomer=True)
        while True:
            try:
                self._take_due()
                batch = self._next_batch()
            except NoMoreBatchesError:
                return
            except Exception as error:
                if self._program.is_own_failure():
                    raise
                log.info("step %d is put off: %s", self._number, error)
                self._recover()
                continue
            step = InPlaceStep(self._number, self._program)
            yield step, batch
            if step.is_broken:
                self._recover()
            else:
                self._number += 1

    def _next_batch(self) -> Any:
        try:
            return self._batches.at(self._number)
        except NoMoreBatchesError:
            dist.barrier()  # a rank that was lost in the last step needs the others to do it once more
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
        """A copy, at every so many steps, after the first ones."""
        number = self._number
        if (
            self._needs_copy
            or number == REHEARSED_STEPS
            or (number > REHEARSED_STEPS and number % self._every == 0)
        ):
            self._take(self._encode())

    def _take(self, part: Any) -> None:
        self._copies.take((self._program.generation, self._number), part)
        self._needs_copy = False
        self._batches.forget_before(self._number)
        self._program.note_state()

    def _encode(self) -> Any:
        """This rank's state before the next step: uint8, a head in JSON and the tensors."""
        tensors = [each.flat().to("cpu").contiguous() for each in self._parts.snapshot_tensors(0, 1)]
        head = {
            "notes": self._parts.snapshot_notes(),
            "place": self._batches.place(self._number),
            "bytes": [each.numel() * each.element_size() for each in tensors],
        }
        text = json.dumps(head).encode()
        whole = torch.empty(_HEAD_BYTES + len(text) + sum(head["bytes"]), dtype=torch.uint8)
        first = len(text).to_bytes(_HEAD_BYTES, "little") + text
        whole[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        at = len(first)
        for tensor, count in zip(tensors, head["bytes"], strict=True):
            if count:
                whole[at : at + count] = tensor.view(torch.uint8)
            at += count
        return whole

    def _decode(self, part: Any, *, is_newcomer: bool) -> None:
        """Puts the state in place."""
        length = int.from_bytes(bytes(part[:_HEAD_BYTES].numpy()), "little")
        head = json.loads(bytes(part[_HEAD_BYTES : _HEAD_BYTES + length].numpy()))
        at = _HEAD_BYTES + length
        with torch.no_grad():
            for each, count in zip(self._parts.snapshot_tensors(0, 1), head["bytes"], strict=True):
                if count:  # cloned, for a view of another type must begin at a multiple of its size
                    values = part[at : at + count].clone().view(each.tensor.dtype)
                    each.put(values.to(each.tensor.device))
                at += count
        if is_newcomer:
            self._batches.go_to(self._number, head["place"])
        self._parts.put_snapshot_notes(head["notes"], same_rank=True)

    # ------------------------------------------------------------ another generation

    def _recover(self, *, is_newcomer: bool = False) -> None:
        """Enters the next generation, in which all go back to the newest copy that is whole."""
        enters = not is_newcomer
        while True:
            try:
                if enters:
                    self._program.enter_next()
                enters = True
                if why := self._settle_modules():
                    self._program.restart(why)
                self._restore(self._program.connect(self._copies.holds), is_newcomer=is_newcomer)
                return
            except Exception as error:
                if self._program.is_own_failure():
                    raise
                log.info("the generation was over before all had gone back: %s", error)
                self._program.break_off()

    def _restore(self, meeting: Meeting, *, is_newcomer: bool) -> None:
        found = newest_whole(meeting.said)
        if found is None:
            self._program.restart("Parts of the state are in the memory of no rank that is left.")
            return
        key, holders = found
        part = self._copies.restore(key, holders)
        self._number = key[1]
        self._decode(part, is_newcomer=is_newcomer)
        log.info("generation %d goes on with step %d in place", meeting.generation, self._number)
        self._take(part)

    def _settle_modules(self) -> str:
        """Drops what a broken step has left in modules; says why that cannot be done, if it cannot."""
        for module in self._objects.values():
            if not isinstance(module, torch.nn.Module):
                continue
            for each in module.modules():
                if isinstance(each, torch.nn.parallel.DistributedDataParallel):
                    if not hasattr(each.reducer, "_reset_state"):
                        return "This torch's DDP cannot drop a broken step."
                    each.reducer._reset_state()
                elif hasattr(each, "_get_fsdp_state"):
                    state = each._get_fsdp_state()
                    if not hasattr(state, "_reset_iter_state"):
                        return "This torch's FSDP2 cannot drop a broken step."
                    _settle_fsdp(state)
            for parameter in module.parameters():
                parameter.grad = None
        return ""


def _settle_fsdp(state: Any) -> None:
    for group in state._fsdp_param_groups:
        group._all_gather_result = None  # it has failed, and would say so
    if state._is_root:
        state._reset_iter_state()
