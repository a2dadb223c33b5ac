"""``muster.ShardedOptimizer``: each rank keeps and updates only its part of the optimizer's state (ZeRO-1).

A step is one reduce_scatter of all gradients, an update of this rank's part of the parameters, and one
all_gather of the updated parts: as many bytes as an all_reduce moves, with 1/n of the optimizer's memory.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import torch

from muster.communicators.base import Communicator
from muster.communicators.reduce_ops import ReduceOp
from muster.errors import ArrayError, SettingsError
from muster.torch.device_waits import DeviceWaits
from muster.torch.flat import ALIGNMENT, padded, views_of
from muster.torch.optimizer_state import make_optimizer_state, number_of
from muster.torch.snapshot_tensors import SnapshotTensor, whole_tensor
from muster.torch.transfer import array_of, broadcast_tensors, check_same_tensors
from muster.torch.wrapper import SHARDED, ModuleWrapper, check_whole, communicator_of, is_wrapped
from muster.training.parts import Part

_NORMS = "scales its updates by norms of whole parameters"
_MATRICES = "treats parameters as matrices"
_NOT_ELEMENTWISE = {
    "LBFGS": "searches along a line through all parameters",
    "Adafactor": _NORMS,
    "Lamb": _NORMS,
    "LAMB": _NORMS,
    "FusedLAMB": _NORMS,
    "Lars": _NORMS,
    "LARS": _NORMS,
    "NovoGrad": _NORMS,
    "Adam_mini": _NORMS,
    "CAME": _NORMS,
    "Prodigy": _NORMS,
    "DAdaptAdam": _NORMS,
    "DAdaptSGD": _NORMS,
    "Muon": _MATRICES,
    "SOAP": _MATRICES,
    "Shampoo": _MATRICES,
    "DistributedShampoo": _MATRICES,
    "GaLoreAdamW": _MATRICES,
}
"""Optimizers whose update of an element depends on other elements, by the name of a class or base class."""


class _Group:
    """A parameter group: its parameters in one flat tensor, and this rank's part of it."""

    def __init__(self, parameters: Sequence[Any], communicator: Communicator, *, alone: bool) -> None:
        self.parameters = list(parameters)
        self._length = sum(padded(parameter.numel()) for parameter in self.parameters)
        first = self.parameters[0]
        self.flat = torch.zeros(0, dtype=first.dtype, device=first.device)
        self.part = torch.nn.Parameter(self.flat)
        self.divide(communicator)
        if not alone:
            broadcast_tensors(communicator, [self.flat], 0)

    def divide(self, communicator: Communicator) -> None:
        """Moves the parameters into a flat tensor with a part for each of the communicator's ranks."""
        rank, ranks = communicator.rank, communicator.world_size
        unit = ranks * ALIGNMENT
        total = -(-self._length // unit) * unit
        self.flat = torch.zeros(total, dtype=self.flat.dtype, device=self.flat.device)
        self.gradients = torch.zeros_like(self.flat)
        self._views = views_of(self.gradients, self.parameters)
        with torch.no_grad():
            for parameter, view in zip(self.parameters, views_of(self.flat, self.parameters), strict=True):
                view.copy_(parameter)
                parameter.data = view
        self._places = [parameter.data_ptr() for parameter in self.parameters]
        length = total // ranks
        self._mine = slice(rank * length, (rank + 1) * length)
        # A view of the flat tensor, so that a state that is loaded into the module's parameters counts.
        self.part.grad = None
        self.part.data = self.flat[self._mine]
        self.part.grad = torch.zeros_like(self.part)

    def snapshot_tensors(
        self, name: str, state: Mapping[str, Any], rank: int, ranks: int
    ) -> Iterator[SnapshotTensor]:
        """Yields the parameters, which each rank needs whole and copies in part, and its optimizer state."""
        shape = (self._length,)
        whole = Part((0,), shape, 0, self._length)
        own = Part((0,), shape, *(min(each, self._length) for each in (self._mine.start, self._mine.stop)))
        yield SnapshotTensor(f"{name}.parameters", shape, self.flat[: self._length], whole, own)
        for key, value in sorted(state.items()):
            if self.is_divided(value):
                yield SnapshotTensor(f"{name}.{key}", shape, value, own, own)
            elif isinstance(value, torch.Tensor):
                yield whole_tensor(f"{name}.{key}", value, rank, ranks)

    def clear(self) -> None:
        """Sets gradients to zero, in place."""
        self.gradients.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def collect(self) -> None:
        """Copies all gradients into the flat tensor, with zeros for a parameter that has none.

        Raises:
            SettingsError: the module was moved or converted since.
        """
        if any(each.data_ptr() != place for each, place in zip(self.parameters, self._places, strict=True)):
            raise SettingsError(
                "the module was moved or converted after its ShardedOptimizer was made: it would compute with"
                " weights that are not updated. Call to(...) before you make the optimizer."
            )
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            parameter.grad = view

    def whole(self, communicator: Communicator, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns each parameter's whole state, gathered from the ranks' parts."""
        found: list[dict[str, Any]] = [{} for _ in self.parameters]
        for name, value in state.items():
            if self.is_divided(value):
                flat = torch.zeros_like(self.flat, dtype=value.dtype)
                arrays = (array_of(communicator, each) for each in (value.contiguous(), flat))
                communicator.all_gather(*arrays)
                values = views_of(flat, self.parameters)
            else:
                values = [copy.deepcopy(value) for _ in self.parameters]
            for each, own in zip(found, values, strict=True):
                each[name] = own
        return found

    def is_divided(self, value: Any) -> bool:
        """Whether this entry of the inner optimizer's state has one value for each element of the part."""
        return isinstance(value, torch.Tensor) and value.shape == self.part.shape

    def part_of(self, states: Sequence[Mapping[str, Any]], first: int) -> dict[str, Any]:
        """This rank's part of the parameters' states; a parameter without one counts as zeros.

        Args:
            states: the states, by parameter.
            first: number of the first parameter, for error messages.
        """
        part: dict[str, Any] = {}
        for name in dict.fromkeys(name for state in states for name in state):
            values = [state.get(name) for state in states]
            there = [(n, each) for n, each in enumerate(values) if each is not None]
            if name != "step" and all(_shape(each) == self.parameters[n].shape for n, each in there):
                flat = torch.zeros(self.flat.shape, dtype=there[0][1].dtype, device=there[0][1].device)
                views = views_of(flat, self.parameters)
                for number, each in there:
                    views[number].copy_(each)
                part[name] = flat[self._mine].clone()
                continue
            for number, each in there:
                if _shape(each) not in (None, ()) and each.numel() != 1:
                    raise ArrayError(
                        f"{name} of parameter {first + number} has the shape {list(each.shape)} there and"
                        f" {list(self.parameters[number].shape)} here",
                        remedy="Load the state of an optimizer of the same module.",
                    )
                if each != there[0][1]:
                    raise ArrayError(
                        f"{name} is {number_of(there[0][1])} for parameter {first + there[0][0]} and"
                        f" {number_of(each)} for parameter {first + number}, which are in one group",
                        remedy="A group is updated as one: put these parameters into groups of their own.",
                    )
            part[name] = copy.deepcopy(there[0][1])
        return part


class ShardedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer whose state is sharded over the ranks.

    ::

        decay = [p for p in net.parameters() if p.dim() > 1]
        others = [p for p in net.parameters() if p.dim() < 2]  # biases, norms
        optimizer = muster.ShardedOptimizer(
            net,
            session,
            make=lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True),
            groups=[{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        )
        loss_function(net(images), labels).backward()   # the bare module: no DataParallel around it
        optimizer.step()                                # averages the gradients too
        optimizer.zero_grad()

    The parameters of a group move into one flat tensor, and every rank updates its part of it. So the
    optimizer must treat each element by itself, as SGD and Adam do. Parameters without a gradient count as
    having a gradient of zero, so weight decay and momentum go on. There is no loss scaling: train in
    bfloat16. Learning rate schedulers accept it like any optimizer of torch.

    Buffers are not synchronised: each rank keeps its own (BatchNorm's statistics), from the start. If that
    matters, broadcast those of rank 0 before an evaluation and before a checkpoint.

    When a member is lost, its part of the state is lost too, and the step that broke may have updated some
    parts and not others. With :class:`muster.torch.Snapshots` the parts are also in other ranks' memory, and
    an :class:`~muster.training.loop.ElasticLoop` goes on from those. For this, make the optimizer with
    ``elastic=True`` and give it to a :class:`muster.torch.SnapshotTrainingState`. Without snapshots it
    belongs to one generation. After ``session.rejoin()``, create module and optimizer again, and load the
    saved ``state_dict()`` of both, at any world size.

    Args:
        module: the module, on one device; rank 0's parameters are taken.
        session: the session whose communicator is used; None: that of ``muster.init()``.
        make: makes the inner optimizer, with one flat parameter in place of a group's parameters. It is
            called with a list of one parameter or, with ``groups``, of dictionaries.
        groups: as for a torch optimizer: dictionaries with "params" and the settings of the group. Each
            parameter that requires a gradient is in exactly one of them. None: one group.
        communicator: a communicator to use instead of a session's.
        gradients_mean: average gradients over ranks; False: sum.
        elastic: send nothing until a training state calls :meth:`join`.

    Attributes:
        inner: the optimizer that ``make`` made.

    Raises:
        ArrayError: a group's parameters have several dtypes or devices, or differ from another rank's.
        SettingsError: no parameter requires a gradient; a parameter is in no group, or in several; a
            DataParallel is around the module, or within it; ``make`` does not use its argument, or its
            optimizer is known not to treat each element by itself (LBFGS, Adafactor).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        session: Any = None,
        *,
        make: Callable[[list[Any]], Any],
        groups: Iterable[Mapping[str, Any]] | None = None,
        communicator: Communicator | None = None,
        gradients_mean: bool = True,
        elastic: bool = False,
    ) -> None:
        named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        given = [{"params": [each for _, each in named]}] if groups is None else list(map(dict, groups))
        for group in given:
            one = isinstance(group["params"], torch.Tensor)
            group["params"] = [group["params"]] if one else list(group["params"])
        _check(named, [group["params"] for group in given])
        check_whole(module, "ShardedOptimizer")
        _check_unwrapped(module)
        self._communicator = communicator = communicator or communicator_of(session)
        self._waits = DeviceWaits(named[0][1].device)
        communicator.measure_waits(self._waits.take)
        names = {id(each): name for name, each in named}
        described = [(f"{names[id(p)]} of group {n}", p) for n, g in enumerate(given) for p in g["params"]]
        self._described = named if groups is None else described
        if not elastic:
            check_same_tensors(communicator, named[0][1].device, self._described)
        self._op = ReduceOp.MEAN if gradients_mean else ReduceOp.SUM
        self._groups = [_Group(group["params"], communicator, alone=elastic) for group in given]
        self._reduced = False
        parts = [group.part for group in self._groups]
        made = [group | {"params": [part]} for group, part in zip(given, parts, strict=True)]
        self.inner = make(parts if groups is None else made)
        _check_trains_only(self.inner, parts)
        self._made = False
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self._made = True
        self._follow_inner()
        for _, parameter in named:
            SHARDED[parameter] = ref(self)
        self.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduces the gradients, updates this rank's part of the parameters and gathers the other parts.

        Args:
            closure: computes the loss and its gradients again; see torch's optimizers.

        Returns:
            What ``closure`` returned; None without one.

        Raises:
            SettingsError: the module was moved or converted since.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._reduced:
            self._reduce()
        self._reduced = False
        self.inner.step()
        communicator = self._communicator
        with self._waits.within_step(self._groups[0].flat):
            for group in self._groups:
                communicator.all_gather(
                    array_of(communicator, group.part.detach()), array_of(communicator, group.flat)
                )
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Scales the averaged gradient down to a norm of at most ``max_norm``; between backward and step.

        All ranks must call it. ``torch.nn.utils.clip_grad_norm_`` would see only this rank's own gradients.

        Returns:
            The norm before, a 0-dim tensor; the host does not wait for it.
        """
        self._reduce()
        self._reduced = True
        gradients = [group.part.grad for group in self._groups]
        norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients]
        square = torch.stack(norms).square().sum().reshape(1)
        array = array_of(self._communicator, square)
        with self._waits.within_step(square):
            self._communicator.all_reduce(array, array, ReduceOp.SUM)
        norm = square.sqrt()[0]
        for each in gradients:
            each.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _reduce(self) -> None:
        """Reduces the gradients by reduce_scatter, into the ``grad`` of this rank's part of each group."""
        communicator = self._communicator
        for group in self._groups:
            group.collect()
            whole, part = array_of(communicator, group.gradients), array_of(communicator, group.part.grad)
            with self._waits.within_step(group.flat):
                communicator.reduce_scatter(whole, part, self._op)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the module's gradients to zero; backward adds to them in place.

        Args:
            set_to_none: accepted, as by torch's optimizers, but the gradients' memory stays in any case.
        """
        self._reduced = False
        for group in self._groups:
            group.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses another group: the parameters are sharded when the optimizer is made.

        Raises:
            SettingsError: the optimizer has been made.
        """
        if self._made:
            raise SettingsError("a ShardedOptimizer takes all its groups when it is made: make it again")
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuses torch's GradScaler, which reads this attribute before a step."""
        raise SettingsError(
            "a GradScaler cannot work with a ShardedOptimizer, whose gradients are averaged within step()."
            " Train in bfloat16, which needs no loss scaling, or with muster.DataParallel."
        )

    def state_bytes(self) -> tuple[int, int]:
        """Bytes of sharded optimizer state: on this rank, and on all ranks together."""
        held = sum(
            value.numel() * value.element_size()
            for group in self._groups
            for value in self.inner.state.get(group.part, {}).values()
            if group.is_divided(value)
        )
        return held, held * self._communicator.world_size

    def state_dict(self) -> dict[str, Any]:
        """Gathers the whole state on every rank, as an unsharded optimizer with these groups would have it.

        For checkpoints. **All ranks must call it**, and it takes the memory that sharding saves.
        """
        states: dict[int, dict[str, Any]] = {}
        groups = []
        first = 0
        for group, inner in zip(self._groups, self.inner.param_groups, strict=True):
            numbers = list(range(first, first + len(group.parameters)))
            whole = group.whole(self._communicator, self.inner.state.get(group.part, {}))
            states.update({number: state for number, state in zip(numbers, whole, strict=True) if state})
            groups.append({k: v for k, v in inner.items() if k != "params"} | {"params": numbers})
            first += len(numbers)
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads this rank's part of a whole state, saved at any world size or by an unsharded optimizer.

        Args:
            state_dict: a result of :meth:`state_dict`, on any device, or the state of a torch optimizer of
                the same parameters in the same groups.

        Raises:
            ArrayError: the state is of other parameters or groups; nothing was changed.
        """
        theirs = [list(group["params"]) for group in state_dict["param_groups"]]
        counts, own = [len(group) for group in theirs], [len(group.parameters) for group in self._groups]
        if counts != own:
            raise ArrayError(
                f"this state has parameter groups with {counts} parameters, and this optimizer {own}",
                remedy="Load the state of an optimizer of the same module, with the same groups.",
            )
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for index, (numbers, group) in enumerate(zip(theirs, self._groups, strict=True)):
            given = [state_dict["state"].get(number, {}) for number in numbers]
            mine = group.part_of(given, sum(own[:index]))
            states |= {index: mine} if mine else {}
            groups.append(dict(state_dict["param_groups"][index]) | {"params": [index]})
        # The inner optimizer converts entries to the device and dtype that it needs, such as its step count.
        self.inner.load_state_dict({"state": states, "param_groups": groups})
        self._follow_inner()

    def join(self, communicator: Communicator) -> None:
        """Shards parameters and state again, over the ranks of another generation; all ranks call it.

        Values of the state are lost if the rank or the world size changes: restore them from a snapshot, or
        load a state.

        Args:
            communicator: the communicator of that generation.

        Raises:
            ArrayError: the parameters differ from another rank's.
        """
        check_same_tensors(communicator, self._described[0][1].device, self._described)
        make_optimizer_state(self.inner)
        before = self._communicator
        self._communicator = communicator
        communicator.measure_waits(self._waits.take)
        if (before.rank, before.world_size) != (communicator.rank, communicator.world_size):
            for group in self._groups:
                state = self.inner.state[group.part]
                divided = [key for key, value in state.items() if group.is_divided(value)]
                group.divide(communicator)
                for key in divided:
                    state[key] = torch.zeros_like(group.part, dtype=state[key].dtype, requires_grad=False)
        self.zero_grad()

    def snapshot_tensors(self, name: str) -> Iterator[SnapshotTensor]:
        """The parameters and this rank's part of the state, for :class:`muster.torch.Snapshots`."""
        rank, ranks = self._communicator.rank, self._communicator.world_size
        for number, group in enumerate(self._groups):
            state = self.inner.state.get(group.part, {})
            yield from group.snapshot_tensors(f"{name}.{number}", state, rank, ranks)

    def _follow_inner(self) -> None:
        """Shares the inner optimizer's groups and state, so that schedulers change its learning rates."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, torch.Tensor) else None


def _check_trains_only(inner: Any, parts: list[Any]) -> None:
    trained = [id(parameter) for group in inner.param_groups for parameter in group["params"]]
    kinds = {kind.__name__ for kind in type(inner).__mro__}
    reason = next((why for name, why in _NOT_ELEMENTWISE.items() if name in kinds), None)
    if reason is not None:
        raise SettingsError(
            f"{type(inner).__name__} {reason}, and cannot be divided among ranks, each of which sees a part"
            " of the parameters: take an optimizer that treats each element by itself (SGD, Adam, AdamW),"
            f" or train with muster.DataParallel and {type(inner).__name__}."
        )
    if trained != list(map(id, parts)):
        raise SettingsError(
            "the inner optimizer must train what it is given, and that alone:"
            " make=lambda groups: torch.optim.AdamW(groups, lr=1e-3), not of module.parameters()"
        )


def _check_unwrapped(module: Any) -> None:
    inside = [
        name or "the module" for name, each in module.named_modules() if isinstance(each, ModuleWrapper)
    ]
    if inside or any(is_wrapped(parameter) for parameter in module.parameters()):
        where = (
            f"{inside[0]} is a DataParallel" if inside else "a DataParallel holds some of these parameters"
        )
        raise SettingsError(
            f"{where}, and would average gradients that a ShardedOptimizer averages itself: give it the bare"
            " module, which nothing has wrapped."
        )


def _check(named: list[tuple[str, Any]], groups: list[list[Any]]) -> None:
    if not named:
        raise SettingsError("this module has no parameter that requires a gradient")
    times = Counter(id(parameter) for group in groups for parameter in group)
    for name, parameter in named:
        if times[id(parameter)] != 1:
            raise SettingsError(
                f"{name} is in {times[id(parameter)] or 'no'} parameter groups: each parameter that requires"
                " a gradient is in one."
            )
    known = {id(parameter) for _, parameter in named}
    for number, group in enumerate(groups):
        if not group or not known.issuperset(map(id, group)):
            what = (
                "has no parameters" if not group else "has some that are none of the module's, or are frozen"
            )
            raise SettingsError(f"parameter group {number} {what}.")
        kinds = {f"{parameter.dtype} on {parameter.device}" for parameter in group}
        if len(kinds) > 1:
            raise ArrayError(
                f"the parameters of a group must be of one dtype and on one device, not"
                f" {', '.join(sorted(kinds))}",
                remedy="Convert the module, or make a group of each kind.",
            )
