"""The state of a training run at a step boundary, for checkpoints and newcomers."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from muster.communicators.arrays import Array
from muster.communicators.base import Communicator
from muster.errors import WorkerError
from muster.training.carrier import Carrier, NumpyLibrary, array_module
from muster.training.checkpoint_copy import CheckpointCopy, Room, copy_arrays
from muster.training.sampler import ShardedSampler


class StateMismatchError(WorkerError):
    """A saved or received state is of another model, optimizer or data set."""


class StateLostError(WorkerError):
    """Only lost workers held some part of the state, and there is no checkpoint."""


def _some_name() -> str:
    return os.urandom(8).hex()


@dataclass(eq=False)
class TrainingState:
    """The state of a run; arrays are overwritten in place, so the model may keep references to them.

    Attributes:
        arrays: parameters and the optimizer's arrays by name, C-contiguous, NumPy or CuPy.
        sampler: deals out the samples; its epoch and position are part of the state.
        step: number of steps finished since the run began.
        rng: the run's random generator, if it draws from one. It is the same on all ranks. Draw numbers that
            must differ between ranks from (seed, step, rank).
        extra: anything else, as JSON values (for example a learning rate schedule).
        run: names the training since its beginning, also after it was resumed; "": it has not begun in a job.
        launch: names the launch of the job that goes on with it.
        generation: the last generation whose members all had the state; 0: none yet.
        returns: how often this launch has gone back to a checkpoint.
        shared: whether all ranks have had the state at some time; before, a rank may know less than a
            newcomer.
        in_step: whether a step has begun, and has been neither committed nor rolled back.
        writes: functions that wait for a checkpoint that is being written while the training goes on. The
            loop calls them before planned changes of members, and at its end.
    """

    arrays: dict[str, Array]
    sampler: ShardedSampler
    step: int = 0
    rng: np.random.Generator | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    run: str = field(default="", init=False)
    launch: str = field(default="", init=False)
    generation: int = field(default=0, init=False)
    returns: int = field(default=0, init=False)
    shared: bool = field(default=False, init=False)
    in_step: bool = field(default=False, init=False)
    writes: list[Callable[[], None]] = field(default_factory=list, init=False, repr=False)
    _rng_before: Any = field(default=None, init=False, repr=False)
    _alone: str = field(default_factory=_some_name, init=False, repr=False)

    @property
    def attempt(self) -> str:
        """Names the attempt, within which generation and step order checkpoints; the same on all ranks.

        An attempt lasts until the launch goes back to a checkpoint; without a launch it is this object's own.
        """
        return f"{self.launch}.{self.returns}" if self.launch else self._alone

    def begin_attempt(self) -> None:
        """Begins an attempt: later saves count as later than all earlier ones, also at a lower step."""
        self.returns = self.returns + 1 if self.launch else 0
        self._alone = _some_name()

    def describe(self) -> str:
        """Returns everything except the arrays' contents, as JSON."""
        return json.dumps(
            {
                "step": self.step,
                "run": self.run,
                "returns": self.returns,
                "sampler": self.sampler.state(),
                "rng": None if self.rng is None else self.rng.bit_generator.state,
                "extra": self.extra,
                "arrays": self.layout(),
            },
            default=_encode_array,
        )

    def carrier(self, communicator: Communicator) -> Carrier:
        """Returns the carrier that sends the arrays to other ranks."""
        return Carrier(communicator, NumpyLibrary(array_module(self.arrays)))

    def begin(self) -> None:
        """Begins a step: its changes can be undone until :meth:`commit`.

        If the previous step was neither committed nor rolled back (for example because the script caught its
        error), it is undone first.
        """
        if self.in_step:
            self.roll_back()
        self.in_step = True
        self._rng_before = None if self.rng is None else self.rng.bit_generator.state

    def commit(self) -> None:
        """Ends a step, which then counts as finished. A failure on a device may show only later.

        Raises:
            MembershipChanged: this step, or the previous one, has broken.
        """
        self.in_step = False

    def confirm(self) -> None:
        """Waits until all committed steps have ended on the device.

        Raises:
            MembershipChanged: a committed step has broken; :meth:`roll_back` undoes it.
        """

    def roll_back(self) -> None:
        """Undoes a step that has begun, and committed steps that have broken.

        It is called before the state is shared or saved.
        """
        if self.in_step and self.rng is not None:
            self.rng.bit_generator.state = self._rng_before  # so that it draws the same again
        self.in_step = False

    def before_newcomers(self) -> None:
        """Goes back one step if newcomers need data that is not known after the last one.

        Called after :meth:`roll_back`.
        """

    def meet(self, session: StateHolder) -> None:
        """Takes the session in which the state is about to be shared."""

    def recover(self, session: StateHolder) -> bool:
        """Restores the state from the ranks' memory if no member has it; all ranks call it.

        Returns:
            Whether the state was restored, so that no file is needed.
        """
        return False

    def iterate(self, loader: Any) -> Iterator[Any]:
        """Begins to iterate over a DataLoader whose ``batch_sampler`` is the sampler."""
        return iter(loader)

    def settle(self) -> None:
        """Ends the run, after every rank has committed its last step.

        Raises:
            MembershipChanged: that step broke.
            RanksDifferError: the ranks differed in that step.
        """

    def end(self) -> None:
        """Ends the work that the state runs beside the training; called when a loop is over."""

    def enter(self, communicator: Communicator, source: int) -> None:
        """Enters a generation; ``source`` is the rank whose state all ranks hold now."""
        self.sampler.reshard(communicator.rank, communicator.world_size)
        self.generation = communicator.membership.generation

    def layout(self) -> dict[str, str]:
        """Returns dtype and shape of every array, as text, by name."""
        return {name: f"{array.dtype}{list(array.shape)}" for name, array in self.arrays.items()}

    def derived(self) -> set[str]:
        """Returns the names of arrays that can be computed from others; a checkpoint leaves them out."""
        return set()

    def check(self, description: str, origin: str) -> None:
        """Refuses a description that this state cannot restore; ``origin`` says where it comes from.

        Raises:
            StateMismatchError: arrays differ in name, dtype or shape.
        """
        mine = self.layout()
        theirs = {name: mine[name] for name in self.derived()} | json.loads(description)["arrays"]
        differences = [
            f"{name} is {theirs.get(name, 'absent')} there and {mine.get(name, 'absent')} here"
            for name in [*mine, *(name for name in theirs if name not in mine)]
            if theirs.get(name) != mine.get(name)
        ]
        if differences:
            raise StateMismatchError(
                f"The state in {origin} is of another model: {'; '.join(differences[:5])}.",
                remedy="Use the same model, optimizer and dtype as the run that it comes from.",
            )

    def restore(self, description: str) -> None:
        """Restores everything except the arrays' contents."""
        values = json.loads(description, object_hook=_decode_array)
        self.step = int(values["step"])
        self.sampler.restore(values["sampler"])
        self.extra = values["extra"]
        self.run = values.get("run", "")
        self.returns = int(values.get("returns", 0))
        if self.rng is not None and values["rng"] is not None:
            self.rng.bit_generator.state = values["rng"]

    # ------------------------------------------------------------ what a checkpoint holds

    def for_checkpoint(self) -> tuple[str, dict[str, NDArray[Any]]]:
        """Returns the description and every array on the host, for :meth:`from_checkpoint`."""
        return self.describe(), {name: _to_host(array) for name, array in self.arrays.items()}

    def copy_for_checkpoint(self, room: Room) -> CheckpointCopy:
        """Copies the same as :meth:`for_checkpoint`, to be written while the training goes on.

        Args:
            room: the memory to copy to.

        Raises:
            OSError: there is not enough memory.
        """
        return copy_arrays(*self.for_checkpoint(), room)

    def from_checkpoint(self, description: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restores a result of :meth:`for_checkpoint` that :meth:`check` accepts; arrays in place."""
        for name, array in self.arrays.items():
            if isinstance(array, np.ndarray):
                array[...] = arrays[name]
            else:
                array.set(arrays[name])
        self.restore(description)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"__array__": value.tolist(), "dtype": str(value.dtype)}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON: {value!r}")


def _decode_array(value: dict[str, Any]) -> Any:
    return np.array(value["__array__"], dtype=value["dtype"]) if "__array__" in value else value


def _to_host(array: Array) -> NDArray[Any]:
    return np.ascontiguousarray(array if isinstance(array, np.ndarray) else array.get())


# ---------------------------------------------------------------- one state on all ranks


class StateHolder(Protocol):
    """The part of a :class:`muster.worker.session.session.Session` that this module uses."""

    @property
    def communicator(self) -> Communicator:
        """The world's communicator in the present generation."""

    @property
    def state_source_rank(self) -> int:
        """The rank whose state newcomers take; -1: all start over."""

    @property
    def newcomer_ranks(self) -> tuple[int, ...]:
        """The ranks without the state."""


@runtime_checkable
class SharesItself(Protocol):
    """A state that no rank holds as a whole, with its own way to bring all ranks to the same step."""

    def share(self, session: StateHolder) -> int:
        """See :func:`share_state`, which calls this."""


def share_state(session: StateHolder, state: TrainingState) -> int:
    """Brings all ranks to the state of the furthest one, and the sampler to the new world size.

    A change of members may happen when some ranks are just before the end of a step and others just after it.
    The rank with the most steps is the source, so that a finished step is redone only for a newcomer that
    would not know what all others do. When all start over, a rank that resumed from a checkpoint is the
    furthest ahead. If it is lost before another rank has its state, the others start over again, because its
    replacement may have the checkpoint, too. If no rank lacks anything, only one small collective runs.

    Received arrays are put in place only when all have arrived. So if the source is lost half-way, every
    other rank still has the state that it had.

    Returns:
        The source, which is the rank whose state all ranks have now.

    Raises:
        StateMismatchError: the source trains another model.
        MembershipChanged: the members changed again; nothing was overwritten.
    """
    if isinstance(state, SharesItself):
        return state.share(session)
    communicator = session.communicator
    state.meet(session)
    state.roll_back()
    if session.newcomer_ranks:
        state.before_newcomers()
    rank, starts_over = communicator.rank, session.state_source_rank < 0
    carrier = state.carrier(communicator)
    description = state.describe().encode()
    holds = starts_over or (state.shared and rank not in session.newcomer_ranks)
    digest = [zlib.crc32(description), len(description)]
    tickets = carrier.gather([state.step if holds else -1, *digest])
    if all(steps < 0 for steps, *_ in tickets):
        starts_over, tickets = True, carrier.gather([state.step, *digest])
    source = _furthest([ticket[0] for ticket in tickets], session.state_source_rank)
    if starts_over or any(ticket != tickets[source] for ticket in tickets):
        text = carrier.broadcast_text(description, tickets[source][2], source)
        if rank != source:
            state.check(text, f"rank {source}")
        received = carrier.receive(state.arrays, source)
        if rank != source and (starts_over or tickets[rank] != tickets[source]):
            for name, array in received.items():
                state.arrays[name][...] = array
            state.restore(text)
    state.enter(communicator, source)
    state.shared = True
    return source


def _furthest(steps: list[int], preferred: int) -> int:
    """Returns the rank with the most steps; among equals the longest-lived, ``preferred``, else the first."""
    most = max(steps)
    if preferred >= 0 and steps[preferred] == most:
        return preferred
    return steps.index(most)
