"""The training state of a torch model in an ``ElasticLoop``, which outlives members, captured or not.

On a GPU the host runs ahead, and the values that an aborted all_reduce leaves behind still reach the
optimizer's update, which may be part of a CUDA graph. So the state is copied before each step, and a broken
step is undone from that copy. The host learns that a step broke only while the GPU works on the next one,
which is undone with it. So there are two copies, used in turn. Tensors that only the update changes
(parameters, optimizer state) are copied while a captured step's forward and backward passes run, and the
update waits for the copy.

On a CPU, the second copy is needed if a rank is lost before the others know the states of its random
generators after a step. To give a newcomer the states from before, all ranks go back to before that step.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

import numpy as np
import torch
from numpy.typing import NDArray

from muster.communicators.base import Communicator
from muster.errors import MembershipChanged, SettingsError, WorkerError
from muster.torch.checkpoint_copier import CheckpointCopier
from muster.torch.comparison import RankComparison
from muster.torch.data_parallel import DataParallel
from muster.torch.extra_state import ExtraState
from muster.torch.optimizer_state import check_trains, is_number, make_optimizer_state, number_of
from muster.torch.random import RandomState, seed_of
from muster.torch.snapshot_tensors import SnapshotTensor, TensorMemo
from muster.torch.snapshots import Snapshots
from muster.torch.transfer import CopiesAside, TensorLibrary, memory_bytes
from muster.training.carrier import Carrier
from muster.training.checkpoint_copy import CheckpointCopy, Room
from muster.training.sampler import ShardedSampler
from muster.training.state import StateHolder, StateMismatchError, TrainingState

_log = logging.getLogger(__name__)
_MOST_OF_MEMORY = 0.1
_ALSO = "@also."
"""Prefix of the names under which a file has the objects in ``also``, as arrays of uint8."""


class TorchTrainingState(TrainingState):
    """The state of a training with DataParallel: parameters, buffers, optimizer state, position in the data.

    ::

        model = muster.DataParallel(net, session, elastic=True)
        state = TorchTrainingState(model, optimizer, sampler)
        for step in ElasticLoop(session, state, epochs=90):
            with step:
                loss = train_step(images[step.batch.indices], labels[step.batch.indices])

    Each rank has its own states of torch's default generators, for the CPU and for its GPU, so that a step
    that is redone draws the same numbers again. After each step all ranks (up to 256) know the states of all,
    and a checkpoint has them too. So a process that replaces a lost rank, or resumes the run at the same
    world size, draws what that rank would have drawn. At another world size, newcomers seed their generators
    again, from the initial seed, the rank and the step. A state that ``optimizer.load_state_dict`` loads
    becomes part of the state, and so do parameters that the optimizer is given later, on all ranks.
    Generators of your own are not part of it: seed them from (seed, step, rank).

    After each step the ranks compare the optimizer's settings (rates, betas, decay) and step counts. If they
    differ, the next step ends on all ranks with RanksDifferError, which names the difference.

    Args:
        model: the model, made with ``elastic=True``.
        optimizer: a torch optimizer; its state is created now, as its first step would create it.
        sampler: distributes the samples.
        samples_per_rank: number of samples per rank, kept at any world size, so that shapes, and with them
            captured graphs and tuned kernels, stay the same; None: keep the size of the global batch.
        also: further objects of the state, by name: learning rate schedulers, a GradScaler, averaged
            parameters, another optimizer, any object with ``state_dict()`` and ``load_state_dict()``. They
            are given to newcomers, saved, and restored after a broken step. Must be the same on all ranks.
        snapshots: also keep the state in other ranks' memory, each rank a piece of it. Every remaining member
            has the whole state anyway, so this helps only if just newcomers without the state are left.

    Raises:
        SettingsError: the optimizer is of another model, or its state cannot be made before a first step or
            is not all tensors; or an object in ``also`` cannot be part of a state.
    """

    def __init__(
        self,
        model: DataParallel,
        optimizer: Any,
        sampler: ShardedSampler,
        *,
        samples_per_rank: int | None = None,
        also: Mapping[str, Any] | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        if not isinstance(model, DataParallel):
            raise SettingsError(
                f"TorchTrainingState takes a muster.DataParallel, not a {type(model).__name__}: a module that"
                " parallelize() divided has muster.ParallelTrainingState"
            )
        check_trains(optimizer, model)
        make_optimizer_state(optimizer)
        self._model = model
        self._optimizer = optimizer
        self._also = ExtraState(also or {}, model.device)
        self._updated: set[str] = set()
        super().__init__(self._tensors(), sampler)
        self._samples_per_rank = samples_per_rank
        self._copies: list[StateSnapshot] = []
        self._began: StateSnapshot | None = None
        self._committed: StateSnapshot | None = None
        self._unknown: StateSnapshot | None = (
            None  # from before a step, after which some ranks do not know all generators' states yet
        )
        self._room = True  # there is memory for two copies
        self._stream: Any = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self._beside: Any = None  # the end of a copy that may still run
        self._changes = 0
        self._may_copy_beside = True
        self._comparison = RankComparison(optimizer, model.device)
        self._generators_at: tuple[int, list[str]] = (0, [])
        self._parameter_count = _parameter_count(optimizer)
        self._random = RandomState(model.device)
        self._loader_generator = torch.Generator()
        self._takes_up = False  # whether it joins a run that has made steps
        self._restored = False  # whether it got the state since it entered a generation
        self._checkpoint_copier: CheckpointCopier | None = None
        self._snapshots = snapshots
        self._tensor_memo = TensorMemo()
        if snapshots is not None:
            snapshots.follow(self)
        follow = WeakMethod(self._follow_optimizer)  # the optimizer and the model may live longer
        optimizer.register_load_state_dict_post_hook(lambda _: (call := follow()) and call())
        wait = WeakMethod(self._await_copy)
        model.before_update = lambda: (call := wait()) and call()
        optimizer.register_step_pre_hook(lambda *_: (call := wait()) and call())

    # ------------------------------------------------------------ what the loop calls

    def carrier(self, communicator: Communicator) -> Carrier:
        """See :class:`TrainingState`."""
        return Carrier(communicator, TensorLibrary(self._model.device))

    def begin(self) -> None:
        """Copies the state, in case the step breaks; see :class:`TrainingState`."""
        if self.in_step:
            self.roll_back()
        if _parameter_count(self._optimizer) != self._parameter_count:
            self._confirm_or_undo()
            self._follow_optimizer()
        self._began = self._snapshot()
        super().begin()
        self._began.note(
            step=self.step,
            sampler=self.sampler.state(),
            extra=copy.deepcopy(self.extra),
            rng=self._rng_before,
            random=self._random.keep(),
            also=self._also.keep(),
            settings=[_kept_settings(group) for group in self._optimizer.param_groups],
        )
        if self._snapshots is not None:
            beside = [] if self._beside is None else [self._beside]
            self._snapshots.at_step(self.step, self._began.copy_of, after=beside)

    def _snapshot(self) -> StateSnapshot:
        """Snapshots the current state into the buffer that is not needed for rollback."""
        self._await_copy()
        for each in self._copies:
            if each is not self._committed and each is not self._unknown:
                self._take(each)
                return each
        if self._copies and not self._has_room():
            _log.warning("no room on the GPU for a second copy of the state: training waits for each step")
            self._room = False
            self._confirm_or_undo()
            self._take(self._copies[0])
        else:
            self._copies.append(StateSnapshot(*self._copy()))
        return self._copies[-1]

    def _copy(self) -> tuple[CopiesAside, CopiesAside]:
        """Makes copies of what only the update changes, and of the rest except low-precision weights."""
        updated = [tensor for name, tensor in self.arrays.items() if name in self._updated]
        left_out = set(self._updated)
        if self._model.weights_dtype is not None:  # the module's parameters are computed from their masters
            left_out.update(name for name, _ in self._model.module.named_parameters())
        rest = [tensor for name, tensor in self.arrays.items() if name not in left_out]
        flat = {each.untyped_storage().data_ptr(): each for each in self._model.flat_buffers()}
        homes = [flat.get(tensor.untyped_storage().data_ptr(), tensor) for tensor in rest]
        return CopiesAside(updated), CopiesAside({id(home): home for home in homes}.values())

    def _take(self, copies: StateSnapshot) -> None:
        """Copies the current state.

        If the step allows it, tensors that only the update changes are copied on a side stream.
        """
        if self._snapshots is not None:
            self._snapshots.wait_until_read(copies.copy_of)
        copies.rest.take()
        copies.is_torn = False
        if not (self._model.updates_last and self._may_copy_beside and self._stream):
            copies.updated.take()
            return
        self._changes = self._count_changes()
        self._stream.wait_stream(torch.cuda.current_stream(self._model.device))
        with torch.cuda.stream(self._stream):
            copies.updated.take()
            self._beside = self._stream.record_event()

    def _await_copy(self) -> None:
        """Makes the current stream wait for the end of a copy on the side stream."""
        end, self._beside = self._beside, None
        if end is None:
            return
        torch.cuda.current_stream(self._model.device).wait_event(end)
        if self._count_changes() != self._changes and self._began is not None:
            _log.warning("parameters are changed in a step before its captured part: it now waits for copies")
            self._began.is_torn, self._may_copy_beside = True, False

    def _count_changes(self) -> int:
        """Returns the number of times that torch has changed the optimizer's parameters in place."""
        return sum(each._version for group in self._optimizer.param_groups for each in group["params"])

    def _has_room(self) -> bool:
        """Whether there is memory for two copies; larger states have longer steps, which gain less by it."""
        size_bytes: int = sum(each.numel() * each.element_size() for each in self.arrays.values())
        return size_bytes <= memory_bytes(self._model.device) * _MOST_OF_MEMORY

    def _confirm_or_undo(self) -> bool:
        """Undoes the committed step if it broke, and returns whether it did."""
        with contextlib.suppress(WorkerError):
            self.confirm()
        if self._committed is None:
            return False
        self._undo(self._committed)
        return True

    def commit(self) -> None:
        """Checks whether the previous step broke on a GPU, and compares settings; see :class:`TrainingState`.

        Raises:
            MembershipChanged: this step broke, or the previous one.
            RanksDifferError: a setting, such as a learning rate, differed between ranks in the previous step.
        """
        self.confirm()
        if self._snapshots is not None:
            if self._began is not None and self._began.is_torn:
                self._snapshots.drop_unconfirmed()
            self._snapshots.confirm()
        self._comparison.receive()
        self._comparison.send(self.step + 1, self._random.now())
        with self._comparison.beside():
            wait = self._model.communicator.mark()
        self._unknown = self._began if self._comparison.under_way else None
        if wait is not None and self._began is not None:
            self._began.wait, self._committed = wait, self._began
            if not self._room:
                self.confirm()
        super().commit()

    def confirm(self) -> None:
        """See :class:`TrainingState`."""
        if self._committed is not None:
            try:
                self._committed.wait()
            except WorkerError as error:
                self._committed.wait = partial(_raise, error)
                raise
            self._comparison.arrive()
            self._committed = None

    def iterate(self, loader: Any) -> Iterator[Any]:
        """See :class:`TrainingState`; draws nothing from torch's default generators, as loaders usually do.

        The seeds of the loader's processes are derived from the initial seed, the rank and the step instead,
        unless the loader has a generator of its own. Each of these processes leads a process group of its
        own. Otherwise a signal to this process's group, by which a launcher asks it to leave, would end them
        during a step.
        """
        begin = getattr(loader, "worker_init_fn", None)
        if not (isinstance(begin, partial) and begin.func is _lead_group):
            loader.worker_init_fn = partial(_lead_group, begin)
        generator = getattr(loader, "generator", None)
        if generator is None or generator is self._loader_generator:
            seed = seed_of(torch.initial_seed(), self.sampler.rank, self.step)
            loader.generator = self._loader_generator.manual_seed(seed)
        return iter(loader)

    def settle(self) -> None:
        """Compares the ranks' settings in their last step; see :class:`TrainingState`."""
        self.confirm()
        self._comparison.receive()

    def roll_back(self) -> None:
        """Restores the state from before the broken steps, once none of their work runs any more."""
        began = self._began if self.in_step else None
        super().roll_back()
        if not self._confirm_or_undo() and began is not None:
            self._undo(began)

    def before_newcomers(self) -> None:
        """Undoes a step if a lost rank's generators are not known after it; see :class:`TrainingState`."""
        if self._unknown is not None and not self._generator_rows():
            self._undo(self._unknown)

    def _undo(self, before: StateSnapshot) -> None:
        """Restores the state of before a step.

        Raises:
            WorkerError: the parameters were changed while ``before`` was copied.
        """
        if before.is_torn:
            raise WorkerError(
                "a failed step cannot be undone, as its parameters were changed before its captured part",
                remedy="Change parameters in the captured part or between steps; resume from a checkpoint.",
            )
        if self._snapshots is not None and before.step != self.step:
            self._snapshots.drop_unconfirmed()
        self._committed = None
        if before is self._unknown:
            self._unknown = None
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        before.updated.put_back()
        before.rest.put_back()
        self._model.refresh_weights()
        self.step = before.step
        self.sampler.restore(before.sampler)
        self.extra = before.extra
        if self.rng is not None:
            self.rng.bit_generator.state = before.rng
        self._random.put_back(before.random)
        self._also.put_back(before.also)
        for group, settings in zip(self._optimizer.param_groups, before.settings, strict=False):
            for key, (value, kept) in settings.items():
                group[key] = value if kept is None else value.copy_(kept)

    def enter(self, communicator: Communicator, source: int) -> None:
        """See :class:`TrainingState`."""
        super().enter(communicator, source)
        if self._samples_per_rank is not None:
            self.sampler.batch_size = self._samples_per_rank * communicator.world_size
        self._enter_generators(communicator)
        self._model.join(communicator, source)
        self._comparison.enter(communicator)
        if self._snapshots is not None:
            self._snapshots.enter(self.step)

    def meet(self, session: StateHolder) -> None:
        """See :class:`TrainingState`."""
        if self._snapshots is not None:
            self._snapshots.use(session)  # type: ignore[arg-type]

    def recover(self, session: StateHolder) -> bool:
        """See :class:`TrainingState`."""
        if self._snapshots is None:
            return False
        self.meet(session)
        self.roll_back()
        return self._snapshots.go_back(session.communicator) is not None

    def _enter_generators(self, communicator: Communicator) -> None:
        """Restores the generators of the process that had this rank before; else a newcomer seeds its own."""
        rank, rows = communicator.rank, self._generator_rows()
        known = len(rows) == communicator.world_size
        if self._restored or self._model.communicator.rank != rank:
            goes_on = known and self._random.set(_unpacked(rows[rank]))
            if self._takes_up and not goes_on:
                self._random.begin(rank, self.step)
        self._takes_up = self._restored = False
        self._generators_at = (self.step, rows if known else [])  # the first step may go back to it
        self._unknown = None

    def _tensors(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        seen = set()
        module = self._model.module
        trained = {id(each) for group in self._optimizer.param_groups for each in group["params"]}
        also = {id(tensor) for _, tensor in self._also.tensors()}
        for name, tensor in (*module.named_parameters(), *module.named_buffers(), *self._also.tensors()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor.detach()
        model_names = set(found)
        for number, group in enumerate(self._optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in seen:  # master weights
                    found[f"optimizer.{number}.{index}"] = parameter.detach()
                for key, value in sorted(self._optimizer.state[parameter].items()):
                    if isinstance(value, torch.Tensor):
                        found[f"optimizer.{number}.{index}.{key}"] = value
        self._updated = set(found) - model_names | {
            name for name, parameter in module.named_parameters() if id(parameter) in trained - also
        }
        return found

    def _follow_optimizer(self) -> None:
        """Uses the optimizer's new tensors, after it has loaded a state or got more parameters."""
        self.confirm()  # an earlier step cannot be undone afterwards
        make_optimizer_state(self._optimizer)
        self.arrays.clear()
        self.arrays.update(self._tensors())
        self._parameter_count = _parameter_count(self._optimizer)
        self._await_copy()  # the old tensors' memory may be reused at once
        self._copies.clear()
        self._unknown = None
        if self._began is not None and self.in_step:  # the step goes back to this if it breaks
            self._began.updated, self._began.rest = self._copy()
            self._copies.append(self._began)

    # ------------------------------------------------------------ the state that is not in tensors

    def describe(self) -> str:
        """See :class:`TrainingState`; includes the optimizer's numbers, for example learning rates."""
        return self._describer(self._optimizer.param_groups)()

    def _describer(self, groups: Sequence[Mapping[str, Any]]) -> Callable[[], str]:
        """Returns a function that returns the present description, and waits for numbers on the GPU."""
        also = {name: base64.b64encode(data).decode() for name, data in self._also.dump().items()}
        known = json.loads(super().describe())
        more = {"also": also, "generators": self._generator_rows()}

        def describe() -> str:
            numbers = [
                {key: _plain(value) for key, value in group.items() if _is_setting(key, value)}
                for group in groups
            ]
            return json.dumps(known | {"groups": numbers} | more)

        return describe

    def restore(self, description: str) -> None:
        """See :class:`TrainingState`."""
        steps_before = self.step
        super().restore(description)
        self._takes_up |= steps_before == 0 < self.step
        self._restored = True
        values = json.loads(description)
        for group, settings in zip(self._optimizer.param_groups, values["groups"], strict=True):
            for key, value in settings.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value
        self._also.load({name: base64.b64decode(data) for name, data in values.get("also", {}).items()})
        self._generators_at = (self.step, values.get("generators", []))
        self._model.follow_order(values.get("buckets", []))

    def check(self, description: str, origin: str) -> None:
        """See :class:`TrainingState`."""
        super().check(description, origin)
        values = json.loads(description)
        groups, own = len(values.get("groups", [])), len(self._optimizer.param_groups)
        if groups != own:
            raise StateMismatchError(
                f"The state in {origin} is of an optimizer with {groups} parameter groups, this has {own}.",
                remedy="Make the optimizer with the groups of the run that the state comes from.",
            )
        theirs, mine = values.get("also"), self._also.dump().keys()
        if theirs is not None and theirs.keys() != mine:
            raise StateMismatchError(
                f"The state in {origin} has other objects beside the model:"
                f" {', '.join(sorted(theirs)) or 'none'} there and {', '.join(sorted(mine)) or 'none'} here.",
                remedy="Give TorchTrainingState the same names in also.",
            )

    # ------------------------------------------------------------ what snapshots are of

    def end(self) -> None:
        """See :class:`TrainingState`."""
        if self._snapshots is not None:
            self._snapshots.end_generation()

    @property
    def device(self) -> Any:
        """The tensors' device."""
        return self._model.device

    def snapshot_tensors(self, rank: int, world_size: int) -> list[SnapshotTensor]:
        """All tensors except derived ones; each rank copies its piece of each."""
        derived = self.derived()
        self._tensor_memo.begin(rank, world_size)
        return [
            self._tensor_memo.whole(name, tensor)
            for name, tensor in self.arrays.items()
            if name not in derived
        ]

    def snapshot_notes(self) -> dict[str, Any]:
        """The rest of the state. Learning rates on the GPU are read later, from copies of them."""
        groups: Sequence[Mapping[str, Any]] = self._optimizer.param_groups
        if self._began is not None and self.in_step:
            groups = [
                {key: value if kept is None else kept for key, (value, kept) in group.items()}
                for group in self._began.settings
            ]
        return {"description": self._describer(groups), "generators": _packed(self._random.now())}

    def put_snapshot_notes(self, notes: Mapping[str, Any], *, same_rank: bool) -> None:
        """Restores what :meth:`snapshot_notes` has returned."""
        self._model.refresh_weights()
        self.restore(notes["description"])
        if same_rank and self._random.set(_unpacked(notes["generators"])):
            self._takes_up = self._restored = False

    # ------------------------------------------------------------ what a checkpoint holds

    def for_checkpoint(self) -> tuple[str, dict[str, NDArray[Any]]]:
        """See :class:`TrainingState`; tensors whose dtype NumPy lacks are given as float32, which is exact.

        First undoes a step that was committed but broke.
        """
        description, tensors, more = self._for_checkpoint()
        return description, {name: _to_host(tensor) for name, tensor in tensors.items()} | more

    def copy_for_checkpoint(self, room: Room) -> CheckpointCopy:
        """See :class:`TrainingState`; without GPU memory for one more copy, waits for a copy to the host."""
        description, tensors, more = self._for_checkpoint()
        if self._checkpoint_copier is None:
            self._checkpoint_copier = CheckpointCopier(self._model.device)
        try:
            return self._checkpoint_copier.copy(description, tensors, more, room)
        except torch.OutOfMemoryError:
            _log.warning("no room on the GPU for a copy of the state: training waits for a copy to the host")
            self._checkpoint_copier = None
            return super().copy_for_checkpoint(room)

    def _for_checkpoint(self) -> tuple[str, dict[str, Any], dict[str, NDArray[Any]]]:
        """The description, the tensors, and the other arrays that are written."""
        try:
            self.confirm()
        except MembershipChanged:
            if self.in_step:
                raise
            self.roll_back()
        derived = self.derived()
        tensors = {name: tensor for name, tensor in self.arrays.items() if name not in derived}
        arrays: dict[str, NDArray[Any]] = {}
        values = json.loads(self.describe())
        for name, data in values["also"].items():  # may be too large for a header
            arrays[_ALSO + name] = np.frombuffer(base64.b64decode(data), np.uint8)
            values["also"][name] = ""
        generators = [_packed(row) for row in self._all_generators()]
        order = self._model.bucket_order()
        return json.dumps(values | {"generators": generators, "buckets": order}), tensors, arrays

    def _all_generators(self) -> list[Any]:
        """Generator states of all ranks, by rank; empty if those of the others are not known."""
        communicator = self._model.communicator
        known = self._comparison.generators(self.step)
        if known is None:
            return [self._random.now()] if communicator.world_size == 1 else []
        rows = list(known)
        rows[communicator.rank] = self._random.now()
        return rows

    def _generator_rows(self) -> list[str]:
        """Generator states of all ranks after the last step, by rank, in base64; empty if not known."""
        known = self._comparison.generators(self.step)
        if known is not None:
            return [_packed(row) for row in known]
        step, rows = self._generators_at
        return rows if step == self.step else []

    def from_checkpoint(self, description: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """See :class:`TrainingState`."""
        derived = self.derived()
        for name, tensor in self.arrays.items():
            if name not in derived:
                tensor.detach().copy_(torch.from_numpy(arrays[name]).view(tensor.shape))
        self._model.refresh_weights()
        values = json.loads(description)
        for name in values.get("also", {}):
            values["also"][name] = base64.b64encode(arrays[_ALSO + name].tobytes()).decode()
        self.restore(json.dumps(values))

    def layout(self) -> dict[str, str]:
        """See :class:`TrainingState`."""
        return {name: text.removeprefix("torch.") for name, text in super().layout().items()}

    def derived(self) -> set[str]:
        """Names of the low-precision weights, which are computed from the optimizer's master weights."""
        low = self._model.weights_dtype
        return {name for name, _ in self._model.module.named_parameters() if self.arrays[name].dtype == low}


class StateSnapshot:
    """A copy, from before a step, of everything that the step may change.

    Args:
        updated: copies of the arrays that only an update changes.
        rest: copies of the others.

    Attributes:
        is_torn: something else changed ``updated`` while it was copied.
    """

    def __init__(self, updated: CopiesAside, rest: CopiesAside) -> None:
        self.updated, self.rest = updated, rest
        self.is_torn = False
        self.wait: Callable[[], None] = lambda: None
        """Waits for the step's end, once it is committed; raises the error that broke it."""

    def copy_of(self, view: Any) -> Any:
        """The copy of a 1-dim part of a tensor; None: the tensor is not in these copies."""
        found = self.updated.copy_of(view)
        return self.rest.copy_of(view) if found is None else found

    def note(
        self,
        *,
        step: int,
        sampler: dict[str, Any],
        extra: dict[str, Any],
        rng: Any,
        random: list[Any],
        also: dict[str, Any],
        settings: list[dict[str, tuple[Any, Any]]],
    ) -> None:
        """Keeps the state that is not in the arrays."""
        self.step, self.sampler, self.extra, self.rng = step, sampler, extra, rng
        self.random, self.also, self.settings = random, also, settings


def _packed(generators: Any) -> str:
    return base64.b64encode(generators.numpy()).decode()


def _unpacked(text: str) -> Any:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _raise(error: WorkerError) -> None:
    raise error.with_traceback(None)


def _lead_group(then: Callable[[int], object] | None, number: int) -> None:
    """Moves a DataLoader's process into a process group of its own; the process calls it first."""
    os.setpgid(0, 0)
    if then is not None:
        then(number)


def _is_setting(key: str, value: Any) -> bool:
    pair = key != "params" and isinstance(value, (tuple, list)) and all(map(is_number, value))
    return pair or is_number(value)


def _plain(value: Any) -> Any:
    return [number_of(each) for each in value] if isinstance(value, (tuple, list)) else number_of(value)


def _kept_settings(group: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns a group's settings, with a copy of each tensor; a graph goes on reading the tensor itself."""
    return {
        key: (value, value.clone() if isinstance(value, torch.Tensor) else None)
        for key, value in group.items()
        if key != "params"
    }


def _parameter_count(optimizer: Any) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _to_host(tensor: Any) -> NDArray[Any]:
    host = tensor.detach().to("cpu", copy=True).contiguous()
    # Torch decides: NumPy may have a dtype that torch cannot convert to, such as bfloat16 with ml_dtypes.
    try:
        array: NDArray[Any] = host.numpy()
    except TypeError:
        array = host.float().numpy()
    return array
