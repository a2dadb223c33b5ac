"""``worker.ShardedOptimizer``: each rank keeps and updates only its part of the optimizer's state (ZeRO-1).

A step is one reduce_scatter of all gradients, an update of this rank's part of the parameters, and one
all_gather of the updated parts: as many bytes as an AllReduce moves, with 1/n of the optimizer's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from worker.communicators.base import Communicator, ReduceOp
from worker.errors import ArrayError, SettingsError
from worker.torch_buckets import ALIGNMENT, views_of
from worker.torch_transfer import array_of, broadcast_tensors, check_same_parameters


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

    Buffers are not synchronised: each rank keeps its own (BatchNorm's statistics), from the start. Where
    that matters, broadcast rank 0's before evaluating and before a checkpoint.

    It belongs to one generation. When a member is lost, so is its part of the state, which nobody else has,
    and the step that broke may have updated some parts and not others. So after ``session.rejoin()`` build
    module and optimizer anew, with the new communicator, and load what was saved: the module's
    ``state_dict()`` and :meth:`gather_state`, with which any number of ranks goes on. An
    :class:`~worker.training.ElasticLoop` cannot do that.

    Args:
        module: on one device, trainable parameters of one dtype; rank 0's parameters are taken.
        communicator: of the ranks that train together.
        make: gets a list of one flat parameter, returns an optimizer for it.
        gradients_mean: average gradients over ranks; False: sum.

    Raises:
        ArrayError: parameters of several dtypes or devices, or different from another rank's.
        SettingsError: nothing to train.
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
        check_same_parameters(communicator, self._parameters[0].device, named)
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
        length = total // communicator.world_size
        begin = communicator.rank * length
        self._part = torch.nn.Parameter(self._flat[begin : begin + length].clone())
        self._part.grad = torch.zeros_like(self._part)
        self.inner = make([self._part])
        self.zero_grad()

    def step(self) -> None:
        """Reduces the gradients, updates this rank's part and gathers everybody's."""
        communicator = self._communicator
        self._collect()
        part = self._part.grad
        communicator.reduce_scatter(
            array_of(communicator, self._gradients), array_of(communicator, part), self._op
        )
        self.inner.step()
        communicator.all_gather(
            array_of(communicator, self._part.detach()), array_of(communicator, self._flat)
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the module's gradients to zero; backward adds to them in place.

        Args:
            set_to_none: taken as torch's optimizers do; the gradients' memory stays in any case.
        """
        self._gradients.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def _collect(self) -> None:
        """Takes gradients that do not lie in the flat tensor, because somebody else has set them."""
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

        Under ``"shapes"`` it says of which parameters. For checkpoints. All ranks must call it, and it takes
        the memory that the division saves.
        """
        state: dict[str, Any] = {"shapes": self._shapes()}
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
            if name == "shapes":
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

    def _shapes(self) -> list[list[int]]:
        return [list(parameter.shape) for parameter in self._parameters]


def _difference(shapes: Any, own: list[list[int]]) -> str:
    if not isinstance(shapes, list):
        return "it does not say of which"
    if len(shapes) != len(own):
        return f"it is of {len(shapes)}"
    number = next(index for index, pair in enumerate(zip(shapes, own, strict=True)) if pair[0] != pair[1])
    return f"parameter {number} has the shape {shapes[number]} there and {own[number]} here"


def _check(parameters: list[Any]) -> None:
    if not parameters:
        raise SettingsError("this module has no parameter that requires a gradient")
    kinds = {f"{parameter.dtype} on {parameter.device}" for parameter in parameters}
    if len(kinds) > 1:
        raise ArrayError(
            f"the parameters must be of one dtype and on one device, not {', '.join(sorted(kinds))}",
            remedy="Convert the module, or use one sharded optimizer per kind.",
        )
