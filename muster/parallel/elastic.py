"""A sharded model in an ``ElasticLoop``: a change of members makes a new plan, and reshards the state.

The surviving ranks send each part to the ranks that need it by the new plan. If only lost workers held some
part, the state is loaded from the last checkpoint. :meth:`ParallelTrainingState.survival` says in advance
which of the two would happen.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from muster.communicators.base import Communicator
from muster.errors import SettingsError
from muster.parallel.checkpoint import load_divided, save_divided, saved_at, together
from muster.parallel.checkpoint_beside import DividedWriter
from muster.parallel.module import ParallelModule
from muster.parallel.planning.parts import Part, overlap
from muster.parallel.planning.plan import Plan
from muster.parallel.tensors import DividedTensor, divided_tensors
from muster.torch.extra_state import ExtraState
from muster.torch.flat import elements_within
from muster.torch.optimizer_state import is_number, make_optimizer_state, number_of
from muster.torch.random import RandomState
from muster.torch.snapshot_tensors import SnapshotTensor
from muster.torch.snapshots import Snapshots
from muster.torch.transfer import (
    CopiesAside,
    array_of,
    broadcast_text,
    bytes_of,
    gather_numbers,
    gather_rows,
)
from muster.training.checkpoint import CheckpointSession
from muster.training.mounted_path import mounted_path
from muster.training.parts import divided
from muster.training.sampler import ShardedSampler
from muster.training.state import StateHolder, StateMismatchError, TrainingState
from muster.training.state import StateLostError as StateLostError

log = logging.getLogger("muster.worker")


class ParallelTrainingState(TrainingState):
    """The training state of a model that is sharded over the ranks.

    ::

        model = muster.parallelize(net, example=(x, y), loss=loss, elastic=True)
        optimizer = torch.optim.AdamW(model.parameters())
        state = muster.ParallelTrainingState(model, optimizer, sampler, checkpoint="checkpoints/last")
        for step in muster.ElasticLoop(session, state, epochs=10):
            with step:
                if state.step % 100 == 0:
                    state.save()
                ...

    The batch size of the whole job stays the same, so every world size that may occur must divide it.

    Args:
        model: a model that :func:`muster.parallelize` made with ``elastic=True``.
        optimizer: the optimizer of ``model.parameters()``; its state is created now.
        sampler: the sampler that distributes the samples.
        checkpoint: the directory that :meth:`save` writes and that replacements load; "": none.
        also: further objects of the state, by name, that are the same on all ranks, such as learning rate
            schedulers.
        snapshots: keeps each rank's parts in the memory of other ranks, too. Parts that only lost workers
            held are restored from there; the checkpoint is used only for parts that are in nobody's memory.
        mbytes_per_s: the highest rate at which a rank writes in :meth:`save_beside`, in 10**6 bytes a second;
            0: no limit.

    Raises:
        SettingsError: ``mbytes_per_s`` is below 0; the optimizer belongs to another model, or its state
            cannot be created before the first step; the model was not made with ``elastic=True``.
    """

    def __init__(
        self,
        model: ParallelModule,
        optimizer: Any,
        sampler: ShardedSampler,
        *,
        checkpoint: str | Path = "",
        also: Mapping[str, Any] | None = None,
        snapshots: Snapshots | None = None,
        mbytes_per_s: float = 0.0,
    ) -> None:
        if mbytes_per_s < 0:
            raise SettingsError(f"ParallelTrainingState: mbytes_per_s is {mbytes_per_s:g}, it must be >= 0.")
        if not isinstance(model, ParallelModule) or not model.can_start:
            raise SettingsError(
                "ParallelTrainingState needs a model of parallelize(elastic=True) that has not trained yet;"
                " for data parallelism use muster.torch.TorchTrainingState"
            )
        for name, each in (also or {}).items():
            if isinstance(each, (torch.nn.Module, torch.optim.Optimizer)):
                raise SettingsError(
                    f"also: {name} is a {type(each).__name__}, and the plan does not shard its tensors;"
                    " give only what is the same on all ranks, such as schedulers"
                )
        make_optimizer_state(optimizer)
        super().__init__({}, sampler)
        self._model, self._optimizer = model, optimizer
        self._checkpoint = mounted_path(checkpoint) if checkpoint else None
        self._writer = None if self._checkpoint is None else DividedWriter(self._checkpoint, mbytes_per_s)
        self._session: StateHolder | None = None
        self._copied_bytes = 0
        self.writes.append(self.wait)
        self._tensors = divided_tensors(model, optimizer)
        self._place = model.communicator.rank
        self._kept: CopiesAside | None = None
        self._before: dict[str, Any] = {}
        self._also_before: dict[str, Any] = {}
        self._also = ExtraState(also or {}, self._device)
        self._random = RandomState(self._device)
        self._snapshots = snapshots
        if snapshots is not None:
            snapshots.follow(self)

    # ------------------------------------------------------------ what users call

    def save(self) -> None:
        """Saves the state after the last finished step. All ranks call it at the beginning of a step's block.

        Raises:
            CheckpointError: a rank could not write; raised on all ranks.
        """
        directory, writer = self._place_to_save()
        with self._busy("saves a checkpoint"):
            with together(self._model, "awaited"):
                writer.wait()
            begun = time.monotonic()
            save_divided(directory, self._model, self._optimizer, extra=self._whole_position())
            took_s = time.monotonic() - begun
            if self._model.communicator.rank == 0:
                self._report(self.step, sum(path.stat().st_size for path in directory.iterdir()), took_s)

    def save_beside(self) -> None:
        """Saves like :meth:`save`, but a separate process of each rank writes while training continues.

        It waits for the previous write, and returns when the parts are copied. If writing fails, the error is
        logged and the previous checkpoint stays. Planned changes of members and the end of an ElasticLoop
        wait for the write; it is abandoned when a member is lost.

        Raises:
            CheckpointError: a rank could not start to write; raised on all ranks.
        """
        _, writer = self._place_to_save()
        step = self.step
        with self._busy("copies the state for a checkpoint"):
            size = writer.save(
                self._model,
                self._optimizer,
                self._whole_position(),
                lambda size_bytes, seconds: self._report(step, size_bytes, seconds),
            )
        if size > self._copied_bytes:
            self._copied_bytes = size
            log.info("Checkpoints beside the training take %.1f MB of this host's memory", size / 1e6)

    def wait(self) -> None:
        """Waits until :meth:`save_beside` has written; the scheduler does not take this for a standstill."""
        if self._writer is not None and self._writer.is_writing:
            with self._busy("waits for a checkpoint that is being written"):
                self._writer.wait()

    def _place_to_save(self) -> tuple[Path, DividedWriter]:
        if self._checkpoint is None or self._writer is None:
            raise StateLostError(
                "There is no place to save to.", remedy="Give ParallelTrainingState checkpoint=."
            )
        return self._checkpoint, self._writer

    def _busy(self, what: str) -> AbstractContextManager[None]:
        session = self._session
        return session.busy(what) if isinstance(session, CheckpointSession) else contextlib.nullcontext()

    def _report(self, step: int, size_bytes: int, seconds: float) -> None:
        if isinstance(self._session, CheckpointSession):
            self._session.report_checkpoint(step, size_bytes=size_bytes, seconds=seconds)

    def load(self) -> bool:
        """Loads the checkpoint, if there is one, and returns whether there was one. All ranks call it."""
        if self._checkpoint is None or not self._is_saved(self._model.communicator):
            return False
        self._go_to(load_divided(self._checkpoint, self._model, self._optimizer))
        return True

    def _is_saved(self, communicator: Communicator) -> bool:
        """Whether all ranks see a checkpoint."""
        there = self._checkpoint is not None and (saved_at(self._checkpoint) / ".metadata").exists()
        return all(gather_numbers(communicator, self._device, int(there)))

    def survival(self, lost: Sequence[int]) -> str:
        """Returns a sentence that says what would happen if these ranks were lost now.

        Args:
            lost: ranks of the current generation.
        """
        places = set(range(math.prod(self._model.plan.mesh))) - set(lost)
        gone = [each.name for each in self._tensors if not _all_held(each.parts, places)]
        who = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}"
        if not gone:
            return f"Without {who} the others hold every part of the state: training goes on from there."
        if self._checkpoint is None:
            return f"Without {who} nobody holds {gone[0]}, and there is no checkpoint: training would end."
        return f"Without {who} nobody holds {gone[0]}: training goes on from {self._checkpoint}."

    # ------------------------------------------------------------ what the loop calls

    def begin(self) -> None:
        """Copies the state, for :meth:`roll_back`; see :class:`TrainingState`."""
        super().begin()
        snapshots = self._snapshots
        if self._kept is not None:
            if snapshots is not None:
                snapshots.wait_until_read(self._kept.copy_of)
            self._kept.take()
        else:
            self._kept = CopiesAside(each.own.detach() for each in self._tensors)
        self._before = self._position()
        self._also_before = self._also.keep()
        if snapshots is not None:
            snapshots.at_step(self.step, self._kept.copy_of)
            snapshots.confirm()  # the previous step has finished

    def commit(self) -> None:
        """Waits for the GPU; see :class:`TrainingState`."""
        self._wait(self._model.communicator)
        super().commit()

    def roll_back(self) -> None:
        """Restores the copy of :meth:`begin`, once the GPU has finished the broken step."""
        if self.in_step:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._put_back()
            self._model.forget_backward()
            self._go_to(self._before)
        super().roll_back()

    def share(self, session: StateHolder) -> int:
        """Brings all ranks to the same step, with the state sharded by the plan for their world size.

        Returns:
            The lowest rank that held some of the state; 0 if all ranks start over.

        Raises:
            StateLostError: parts are lost, and there is no checkpoint.
            StateMismatchError: a rank trains another model.
            SettingsError: there is no plan for this world size, because it does not divide the batch, say.
            MembershipChanged: the members changed again; nothing was overwritten.
        """
        self.roll_back()
        self._session = session
        if self._writer is not None:
            self._writer.give_up()  # it may be waiting for a lost rank
        communicator: Communicator = session.communicator
        rank, starts_over = communicator.rank, session.state_source_rank < 0
        holds = self.shared and (starts_over or rank not in session.newcomer_ranks)
        mine = (self.step, self._place, self._layout()) if holds else (-1, -1, -1)
        can_start = int(self._model.can_start)
        before = self._before.get("step", -1) if self._kept is not None else -1
        rows = gather_rows(communicator, self._device, [*mine, self._digest(), can_start, before])
        if self._snapshots is not None:
            self._snapshots.use(session)  # type: ignore[arg-type]
        others = [other for other, row in enumerate(rows) if row[3] != rows[0][3]]
        if others:
            raise StateMismatchError(
                f"The model or the optimizer on the ranks {others} is another than rank 0's.",
                remedy="Start all workers with the same script and arguments.",
            )
        plan = self._model.plan_for(communicator)
        holding = [row[0] for row in rows if row[0] >= 0]
        if holding and not self._meet(rows):  # only some ranks had gone back to a snapshot
            self._from_elsewhere(communicator, plan, divided_tensors(self._model, self._optimizer, plan))
        elif holding:
            self._step_back(min(holding))
            self._redistribute(communicator, plan, [row[:3] for row in rows])
        elif all(row[4] for row in rows):
            self._start(communicator, plan)
        else:  # the state was being loaded from elsewhere when the members changed again
            self._from_elsewhere(communicator, plan, divided_tensors(self._model, self._optimizer, plan))
        self.sampler.reshard(rank, communicator.world_size)
        self._kept, self._place, self.shared = None, rank, True
        if self._snapshots is not None:
            self._snapshots.enter(self.step)
        return next((other for other, row in enumerate(rows) if row[0] >= 0), 0)

    def _start(self, communicator: Communicator, plan: Plan) -> None:
        """Starts a run: all ranks take rank 0's values, or those of the checkpoint."""
        self._model.start(plan, communicator)
        seed, step = self._model.draws()
        self._model.draw_on_from([gather_numbers(communicator, self._device, seed)[0], step])
        self._optimizer.state.clear()
        make_optimizer_state(self._optimizer)
        self._tensors = divided_tensors(self._model, self._optimizer)
        if self.load():
            log.info("training goes on from %s, step %d", self._checkpoint, self.step)

    def _meet(self, rows: Sequence[Sequence[int]]) -> bool:
        """Whether all ranks that hold a state can go back to one step; always true without snapshots."""
        holding = [row for row in rows if row[0] >= 0]
        least = min(row[0] for row in holding)
        return self._snapshots is None or all(least in (row[0], row[5]) for row in holding)

    def _step_back(self, step: int) -> None:
        """Rolls back to the last step that all ranks have finished."""
        if self.shared and self.step > step:
            if self._kept is None or self._before.get("step") != step:
                raise StateMismatchError(f"This rank is at step {self.step}, and another one at step {step}.")
            self._put_back()
            self._go_to(self._before)

    def _redistribute(self, communicator: Communicator, plan: Plan, rows: Sequence[Sequence[int]]) -> None:
        """Sends each part of the old plan from one holder to all ranks that need it by the new plan.

        Ranks may hold parts by different plans: the members may have changed when only some ranks had
        finished the last redistribution. It is enough if all parts of one of these plans are held.

        Args:
            communicator: the communicator of the current generation.
            plan: the new plan.
            rows: each rank's step, rank in its old plan, and layout of that plan; -1: it holds nothing.
        """
        mine = json.dumps(
            {"parts": [_plain(each.parts) for each in self._tensors], "at": self._whole_position()}
        )
        wanted = divided_tensors(self._model, self._optimizer, plan)
        lost: list[str] = []
        for layout in dict.fromkeys(row[2] for row in rows if row[0] >= 0):
            holders = {new: row[1] for new, row in enumerate(rows) if row[0] >= 0 and row[2] == layout}
            given = json.loads(broadcast_text(communicator, self._device, mine, min(holders)))
            old = [[Part(*map(_tuple, row)) for row in parts] for parts in given["parts"]]
            rank_of = {place: new for new, place in sorted(holders.items(), reverse=True)}
            lost = [
                each.name
                for each, parts in zip(wanted, old, strict=True)
                if not _all_held(parts, rank_of.keys())
            ]
            if not lost:
                break
        else:
            self._from_elsewhere(communicator, plan, wanted, lost)
            return
        place = holders.get(communicator.rank, -1)
        fresh = [
            self._collect(communicator, each, parts, rank_of, place)
            for each, parts in zip(wanted, old, strict=True)
        ]
        self._wait(communicator)
        self._adopt(communicator, plan, wanted, fresh)
        self._go_to(given["at"])

    def _collect(
        self,
        communicator: Communicator,
        wanted: DividedTensor,
        old: Sequence[Part],
        rank_of: Mapping[int, int],
        place: int,
    ) -> Any:
        """Assembles this rank's part of a tensor by the new plan from parts by the old plan."""
        own = wanted.own.detach().reshape(-1)
        part = wanted.parts[communicator.rank]
        fresh = own.new_zeros(math.prod(wanted.local))
        done: set[Part] = set()
        for number, given in enumerate(old):
            length = given.stop - given.start
            if number not in rank_of or given in done or not length:
                continue
            done.add(given)
            piece = own[:length].clone() if place == number else own.new_empty(length)
            communicator.broadcast(array_of(communicator, bytes_of(piece)), rank_of[number])
            for source in given.boxes():
                for target in part.boxes():
                    both = overlap(source, target)
                    if both is not None:
                        elements_within(fresh, target, both).copy_(elements_within(piece, source, both))
        return fresh.view(wanted.local)

    def _adopt(
        self, communicator: Communicator, plan: Plan, tensors: Sequence[DividedTensor], fresh: Sequence[Any]
    ) -> None:
        """Switches model and optimizer to a plan, with new tensors.

        Args:
            communicator: the communicator of the current generation.
            plan: the new plan.
            tensors: the tensors to replace.
            fresh: the new tensor of each, sharded by ``plan``.
        """
        by_id = {id(each.own): value for each, value in zip(tensors, fresh, strict=True)}
        with torch.no_grad():
            for _, unused in self._model.unused_tensors():
                unused.copy_(by_id[id(unused)])
        self._model.move(
            plan, communicator, {node: by_id[id(tensor)] for node, tensor in self._model.held_tensors()}
        )
        for entries in self._optimizer.state.values():
            for key, value in entries.items():
                entries[key] = by_id.get(id(value), value)
        self._tensors = divided_tensors(self._model, self._optimizer)

    def _from_elsewhere(
        self,
        communicator: Communicator,
        plan: Plan,
        tensors: Sequence[DividedTensor],
        lost: Sequence[str] = (),
    ) -> None:
        """Restores the state from the ranks' copies of a snapshot, or from the checkpoint if one is missing.

        Raises:
            StateLostError: some part is in no copy, and there is no checkpoint.
        """
        what = f"{lost[0]} and {len(lost) - 1} more" if len(lost) > 1 else "".join(lost) or "the state"
        if self._snapshots is not None and self._snapshots.is_whole(communicator):
            self.shared = False
            self._adopt(communicator, plan, tensors, [each.own.new_zeros(each.local) for each in tensors])
            self._snapshots.go_back(communicator)
            return
        if not self._is_saved(communicator):
            raise StateLostError(
                f"Parts of {what} were held only by workers that are lost, and there is no checkpoint that"
                " all ranks see.",
                remedy="Give the state snapshots=, or call state.save() now and then, into a directory that"
                " all hosts share.",
            )
        self.shared = False  # if the members change again, no rank may take these zeros
        self._adopt(communicator, plan, tensors, [each.own.new_zeros(each.local) for each in tensors])
        self.load()
        log.warning(
            "parts of %s were held only by workers that are lost: training goes on from %s, step %d",
            what,
            self._checkpoint,
            self.step,
        )

    # ------------------------------------------------------------ what snapshots are of

    def end(self) -> None:
        """See :class:`TrainingState`."""
        if self._snapshots is not None:
            self._snapshots.end_generation()

    def snapshot_tensors(self, rank: int, world_size: int) -> list[SnapshotTensor]:
        """Returns this rank's parts; a part that several ranks hold is split among them."""
        return [
            SnapshotTensor(each.name, each.shape, each.own, each.parts[rank], divided(each.parts)[rank])
            for each in self._tensors
        ]

    def snapshot_notes(self) -> dict[str, Any]:
        """Returns the rest of the state, as JSON values."""
        random = [base64.b64encode(state.numpy().tobytes()).decode() for state in self._random.keep()]
        return {"position": self._whole_position(), "random": random}

    def put_snapshot_notes(self, notes: Mapping[str, Any], *, same_rank: bool) -> None:
        """Restores the values of :meth:`snapshot_notes`; random states only with ``same_rank``."""
        self._go_to(notes["position"])
        if same_rank:
            states = (bytearray(base64.b64decode(text)) for text in notes["random"])
            self._random.put_back([torch.frombuffer(state, dtype=torch.uint8) for state in states])

    @property
    def device(self) -> Any:
        """The device of the tensors."""
        return self._device

    # ------------------------------------------------------------ where it is

    @property
    def _device(self) -> Any:
        return next(self._model.parameters()).device

    def _trained(self) -> list[tuple[str, Any]]:
        """Returns the parameters that the plan trains, by node; a script may have frozen some since."""
        return [(name, held.parameter) for name, held in self._model.held_parameters.items()]

    def _position(self) -> dict[str, Any]:
        """Returns the state without tensors and ``also``, as JSON values."""
        return {
            "step": self.step,
            "run": self.run,
            "sampler": self.sampler.state(),
            "rng": None if self.rng is None else self.rng.bit_generator.state,
            "extra": self.extra,
            "draws": self._model.draws(),
            "frozen": [name for name, each in self._trained() if not each.requires_grad],
            "groups": [
                {key: number_of(value) for key, value in group.items() if is_number(value)}
                for group in self._optimizer.param_groups
            ],
        }

    def _whole_position(self) -> dict[str, Any]:
        """Returns the position with the states of the objects in ``also``."""
        also = {name: base64.b64encode(data).decode() for name, data in self._also.dump().items()}
        return self._position() | {"also": also}

    def _go_to(self, position: Mapping[str, Any]) -> None:
        self.step, self.run = int(position["step"]), position["run"]
        self.sampler.restore(position["sampler"])
        self.extra = position["extra"]
        if self.rng is not None and position["rng"] is not None:
            self.rng.bit_generator.state = position["rng"]
        self._model.draw_on_from(position["draws"])
        frozen = position.get("frozen", ())  # missing in checkpoints of Muster 0.2
        for name, parameter in self._trained():
            parameter.requires_grad_(name not in frozen)
        self._also.load({name: base64.b64decode(data) for name, data in position.get("also", {}).items()})
        for group, settings in zip(self._optimizer.param_groups, position["groups"], strict=True):
            for key, value in settings.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value

    def _put_back(self) -> None:
        assert self._kept is not None
        self._kept.put_back()
        self._also.put_back(self._also_before)

    def _layout(self) -> int:
        """Returns a hash of which rank holds which part by this rank's plan."""
        text = json.dumps([_plain(each.parts) for each in self._tensors])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def _digest(self) -> int:
        text = "\n".join(f"{each.name} {each.own.dtype} {each.shape}" for each in self._tensors)
        text += "\n".join(sorted(self._also.dump()))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def _wait(self, communicator: Communicator) -> None:
        """Waits for the GPU, as a failed collective raises its error only then."""
        communicator.synchronize()


def _plain(parts: Sequence[Part]) -> list[Any]:
    return [[part.offsets, part.sizes, part.start, part.stop] for part in parts]


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _all_held(parts: Sequence[Part], places: Collection[int]) -> bool:
    """Whether the ranks at these places of the plan together hold every part."""
    held = {part for number, part in enumerate(parts) if number in places}
    return all(part in held for part in parts if part.stop > part.start)
