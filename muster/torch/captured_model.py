"""The interface that a captured step needs of its model, and an adapter for modules that lack it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch

from muster.communicators.base import Communicator


@runtime_checkable
class CapturedModel(Protocol):
    """A model whose training steps can be captured into CUDA graphs.

    Attributes:
        updates_last: set by the step: only the last of its graphs changes parameters.
        before_update: called before parameters change.
    """

    updates_last: bool
    before_update: Callable[[], None]

    @property
    def communicator(self) -> Communicator | None:
        """The communicator of all ranks that train the model; None: Muster runs no collectives for it."""

    @property
    def uneven(self) -> bool:
        """Whether an :meth:`uneven_batch` context is active."""

    @property
    def capture_obstacle(self) -> str | None:
        """The reason why no CUDA graph can hold a step; None: none is known."""

    def parameters(self) -> Iterable[Any]:
        """The parameters that the optimizer trains."""

    def check_step(self, *, begins: bool = False) -> None:
        """Raises an error if this rank is not in the same step as the others, or its module has changed."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backward passes only accumulate gradients, and do not reduce them."""

    def uneven_batch(self, samples: int) -> AbstractContextManager[None]:
        """Context of a backward pass in which ranks have different numbers of samples."""

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Scales the whole gradient down to a norm of at most ``max_norm``."""

    def captured_generators(self) -> list[Any]:
        """Random generators, besides torch's default ones, that a graph captured now draws from."""

    def before_replay(self) -> None:
        """Called before a captured step is launched."""

    def held_by_graphs(self) -> list[Any]:
        """Objects whose memory a graph uses for gradients; if one is replaced, the graph becomes invalid."""

    def forget_backward(self) -> None:
        """Drops a backward pass that a failed capture has only recorded, and its gradients."""


class BareModule:
    """Adapts a module that is not wrapped, or that another library has wrapped, to a captured step.

    Args:
        module: a torch module; its own ``no_sync`` and ``clip_grad_norm_`` are called if it has them.
        optimizer: the optimizer whose parameters' gradients are clipped if the module has no
            ``clip_grad_norm_``.
    """

    communicator = capture_obstacle = None
    uneven = False

    def __init__(self, module: Any, optimizer: Any) -> None:
        self._module, self._optimizer = module, optimizer
        self.updates_last = False
        self.before_update: Callable[[], None] = _nothing

    def parameters(self) -> Iterable[Any]:
        """See :class:`CapturedModel`."""
        parameters: Iterable[Any] = self._module.parameters()
        return parameters

    def check_step(self, *, begins: bool = False) -> None:
        """See :class:`CapturedModel`."""

    def no_sync(self) -> AbstractContextManager[None]:
        """See :class:`CapturedModel`."""
        context: AbstractContextManager[None] = getattr(self._module, "no_sync", contextlib.nullcontext)()
        return context

    def uneven_batch(self, samples: int) -> AbstractContextManager[None]:
        """See :class:`CapturedModel`."""
        return contextlib.nullcontext()

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """See :class:`CapturedModel`."""
        whole = getattr(self._module, "clip_grad_norm_", None)
        if whole is not None:  # each rank has only a part of the gradients and their norm
            return whole(max_norm)
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)

    def captured_generators(self) -> list[Any]:
        """See :class:`CapturedModel`."""
        return []

    def before_replay(self) -> None:
        """See :class:`CapturedModel`."""

    def held_by_graphs(self) -> list[Any]:
        """See :class:`CapturedModel`."""
        return []

    def forget_backward(self) -> None:
        """See :class:`CapturedModel`."""


def captured_model(module: Any, optimizer: Any) -> CapturedModel:
    """Returns the module itself, compiled or not, if it is a :class:`CapturedModel`; else an adapter."""
    compiled = getattr(module, "_orig_mod", module)  # a compiled module forwards attributes to it
    if isinstance(compiled, CapturedModel):
        answers: CapturedModel = module
        return answers
    return BareModule(module, optimizer)


def _nothing() -> None:
    return None
