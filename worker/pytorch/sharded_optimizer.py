"""``muster.ShardedOptimizer``: each rank keeps and updates only its part of the optimizer's state (ZeRO-1).

A step is one reduce_scatter of all gradients, an update of this rank's part of the parameters, and one
all_gather of the updated parts: as many bytes as an AllReduce moves, with 1/n of the optimizer's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from muster.worker.communicators.base import Communicator, ReduceOp
from muster.worker.errors import ArrayError, SettingsError
from muster.worker.pytorch.buckets import ALIGNMENT, views_of
from muster.worker.pytorch.optimizer_state import is_number, number_of
from muster.worker.pytorch.transfer import array_of, broadcast_tensors, check_same_tensors
from muster.worker.pytorch.wrapper import SHARDED, ModuleWrapper, check_whole, is_wrapped

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
"""Optimizers whose update of an element depends on others, by the name of their class or of a base of it."""


class ShardedOptimizer:
    """An optimizer whose state is divided among the ranks.

    ::

        optimizer = worker.ShardedOptimizer(
            module, communicator, lambda part: torch.optim.AdamW(part, lr=1e-3, fused=True)
        )
        loss_function(module(images), labels).backward()   # the bare module: no DataParallel around it
        optimizer.step()                                   # averages the gradients too
        optimizer.zero_grad()

    The parameters move into one flat tensor, of which every rank updates its part. So the optimizer must
    treat each element by itself, as SGD and Adam do, with one learning rate and weight decay for all.
    Parameters without a gradient count as having one of zero, frozen ones too: weight decay and momentum go
    on. A learning rate scheduler takes :attr:`inner`. There is no loss scaling: train in bfloat16.

    Buffers are not synchronised: each rank keeps its own (BatchNorm's statistics), from the start. Where
    that matters, broadcast rank 0's before evaluating and before a checkpoint.

    It belongs to one generation. When a member is lost, so is its part of the state, which nobody else has,
    and the step that broke may have updated some parts and not others. So after ``session.rejoin()`` build
    module and optimizer anew, with the new communicator, and load what was saved: the module's
    ``state_dict()`` and :meth:`gather_state`, with which any number of ranks goes on. An
    :class:`~muster.worker.training.loop.ElasticLoop` cannot do that.

    Args:
        module: on one device, trainable parameters of one dtype; rank 0's parameters are taken.
        communicator: of the ranks that train together.
        make: gets a list of one flat parameter, returns an optimizer for it.
        gradients_mean: average gradients over ranks; False: sum.

    Raises:
        ArrayError: parameters of several dtypes or devices, or different from another rank's.
        SettingsError: nothing to train; a DataParallel around the module, or within it; ``make`` does not use
            what it gets, or its optimizer is known not to treat each element by itself (LBFGS, Adafactor).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        communicator: Communicator,
        make: Callable[[list[Any]], Any],
        *,
        gradients_mean: bool = True,
    ) -> None:
        named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        _check(self._parameters)
        check_whole(module, "ShardedOptimizer")
        _check_unwrapped(module)
        check_same_tensors(communicator, self._parameters[0].device, named)
        self._communicator = communicator
        self._op = ReduceOp.MEAN if gradients_mean else ReduceOp.SUM
        sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in self._parameters]
        unit = communicator.world_size * ALIGNMENT
        total = -(-sum(sizes) // unit) * unit
        first = self._parameters[0]
        self._flat = torch.zeros(total, dtype=first.dtype, device=first.device)
        self._gradients = torch.zeros_like(self._flat)
        self._views = views_of(self._gradients, self._parameters)
        with torch.no_grad():
            for parameter, view in zip(self._parameters, views_of(self._flat, self._parameters), strict=True):
                view.copy_(parameter)
                parameter.data = view
        broadcast_tensors(communicator, [self._flat], 0)
        self._reduced = False
        self._places = [parameter.data_ptr() for parameter in self._parameters]
        length = total // communicator.world_size
        begin = communicator.rank * length
        # Within the flat tensor: what is written into the module's parameters counts, a loaded state say.
        self._part = torch.nn.Parameter(self._flat[begin : begin + length])
        self._part.grad = torch.zeros_like(self._part)
        self.inner = make([self._part])
        _check_trains_only(self.inner, self._part)
        for parameter in self._parameters:
            SHARDED[parameter] = ref(self)
        self.zero_grad()

    def step(self) -> None:
        """Reduces the gradients, updates this rank's part and gathers everybody's.

        Raises:
            SettingsError: the module was moved or converted since.
        """
        if not self._reduced:
            self._reduce()
        self._reduced = False
        communicator = self._communicator
        self.inner.step()
        communicator.all_gather(
            array_of(communicator, self._part.detach()), array_of(communicator, self._flat)
        )

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Scales the averaged gradient down to a norm of at most ``max_norm``; between backward and step.

        ``torch.nn.utils.clip_grad_norm_`` would see only what this rank computed. All ranks must call it.

        Returns:
            The norm before, a 0-dim tensor; the host does not wait for it.
        """
        self._reduce()
        self._reduced = True
        part = self._part.grad
        square = torch.linalg.vector_norm(part, dtype=torch.float32).square().reshape(1)
        array = array_of(self._communicator, square)
        self._communicator.all_reduce(array, array, ReduceOp.SUM)
        norm = square.sqrt()[0]
        part.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _reduce(self) -> None:
        """Puts this rank's part of the averaged gradient where the inner optimizer finds it."""
        self._collect()
        communicator = self._communicator
        communicator.reduce_scatter(
            array_of(communicator, self._gradients), array_of(communicator, self._part.grad), self._op
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the module's gradients to zero; backward adds to them in place.

        Args:
            set_to_none: taken as torch's optimizers do; the gradients' memory stays in any case.
        """
        self._reduced = False
        self._gradients.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def _collect(self) -> None:
        """Takes gradients that do not lie in the flat tensor, because somebody else has set them."""
        if any(each.data_ptr() != place for each, place in zip(self._parameters, self._places, strict=True)):
            raise SettingsError(
                "the module was moved or converted after its ShardedOptimizer was made, and would compute"
                " with weights that nobody updates. Call to(...) before you make the optimizer."
            )
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            parameter.grad = view

    @property
    def param_groups(self) -> Any:
        """The inner optimizer's, for learning rates."""
        return self.inner.param_groups

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's GradScaler asks before a step."""
        raise SettingsError(
            "a GradScaler cannot work with a ShardedOptimizer, whose gradients are averaged within step()."
            " Train in bfloat16, which needs no loss scaling, or with worker.DataParallel."
        )

    def state_bytes(self) -> tuple[int, int]:
        """Bytes of optimizer state on this rank, and what they would be undivided."""
        held = sum(
            value.numel() * value.element_size()
            for values in self.inner.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor) and value.shape == self._part.shape
        )
        return held, held * self._communicator.world_size

    def gather_state(self) -> dict[str, Any]:
        """The whole state, on every rank: flat tensors by name, in the order of ``module.parameters()``.

        Under ``"shapes"`` it says of which parameters, under ``"settings"`` are the learning rate and other
        numbers. For checkpoints. All ranks must call it, and it takes the memory that the division saves.
        """
        state: dict[str, Any] = {"shapes": self._shapes(), "settings": _numbers(self.inner.param_groups[0])}
        for name, value in self.inner.state.get(self._part, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == self._part.shape:
                whole = torch.zeros_like(self._flat, dtype=value.dtype)
                arrays = (array_of(self._communicator, each) for each in (value.contiguous(), whole))
                self._communicator.all_gather(*arrays)
                state[name] = whole
            else:
                state[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes this rank's part of what :meth:`gather_state` gave, of any number of ranks, on any device.

        The learning rate and other numbers of the inner optimizer become what they were, too.

        Raises:
            ArrayError: it is the state of other parameters.
        """
        shapes = state.get("shapes")
        if shapes != self._shapes():
            raise ArrayError(
                f"this is not the state of this module's {len(self._parameters)} parameters:"
                f" {_difference(shapes, self._shapes())}",
                remedy="Load what gather_state() gave for the same module.",
            )
        length = self._part.numel()
        begin = self._communicator.rank * length
        mine: dict[str, Any] = {}
        for name, value in state.items():
            if name in ("shapes", "settings"):
                continue
            if isinstance(value, torch.Tensor) and value.dim() == 1:
                whole = torch.zeros_like(self._flat, dtype=value.dtype)
                count = min(len(value), len(whole))  # only the padding at the end differs
                whole[:count] = value[:count]
                mine[name] = whole[begin : begin + length].clone()
            else:
                mine[name] = value.clone() if isinstance(value, torch.Tensor) else value
        # The optimizer knows on which device and in which dtype it needs its step count, say.
        self.inner.load_state_dict(self.inner.state_dict() | {"state": {0: mine} if mine else {}})
        group = self.inner.param_groups[0]
        for name, value in state.get("settings", {}).items():
            own = group.get(name)
            group[name] = own.fill_(value) if isinstance(own, torch.Tensor) else value

    def _shapes(self) -> list[list[int]]:
        return [list(parameter.shape) for parameter in self._parameters]


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group that are numbers, or several of them (betas)."""
    settings = {name: value for name, value in group.items() if name != "params"}
    return {
        name: number_of(value)
        for name, value in settings.items()
        if is_number(value) or (isinstance(value, (tuple, list)) and all(map(is_number, value)))
    }


def _difference(shapes: Any, own: list[list[int]]) -> str:
    if not isinstance(shapes, list):
        return "it does not say of which"
    if len(shapes) != len(own):
        return f"it is of {len(shapes)}"
    number = next(index for index, pair in enumerate(zip(shapes, own, strict=True)) if pair[0] != pair[1])
    return f"parameter {number} has the shape {shapes[number]} there and {own[number]} here"


def _check_trains_only(inner: Any, part: Any) -> None:
    trained = [id(parameter) for group in inner.param_groups for parameter in group["params"]]
    kinds = {kind.__name__ for kind in type(inner).__mro__}
    reason = next((why for name, why in _NOT_ELEMENTWISE.items() if name in kinds), None)
    if reason is not None:
        raise SettingsError(
            f"{type(inner).__name__} {reason}, and cannot be divided among ranks, each of which sees a part"
            " of the parameters: take an optimizer that treats each element by itself (SGD, Adam, AdamW),"
            f" or train with worker.DataParallel and {type(inner).__name__}."
        )
    if trained != [id(part)]:
        raise SettingsError(
            "the inner optimizer must train what it is given, and that alone:"
            " lambda part: torch.optim.AdamW(part, lr=1e-3), not of module.parameters()"
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


def _check(parameters: list[Any]) -> None:
    if not parameters:
        raise SettingsError("this module has no parameter that requires a gradient")
    kinds = {f"{parameter.dtype} on {parameter.device}" for parameter in parameters}
    if len(kinds) > 1:
        raise ArrayError(
            f"the parameters must be of one dtype and on one device, not {', '.join(sorted(kinds))}",
            remedy="Convert the module, or use one sharded optimizer per kind.",
        )
