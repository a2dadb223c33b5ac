"""The work of a training step: forward and backward passes over the parts of a batch, and the update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from muster.errors import ArrayError
from muster.torch.captured_model import CapturedModel

Tensors = tuple[Any, ...]


class StepBody:
    """The work of a step, whether a graph records it or not. The arguments are those of ``capture_step``."""

    def __init__(
        self,
        loss: Callable[..., Any],
        model: CapturedModel,
        optimizer: Any,
        *,
        autocast: Any | None,
        clip_norm: float | None,
        accumulate: int,
    ) -> None:
        self._loss, self.model, self._optimizer = loss, model, optimizer
        self._autocast, self._clip_norm, self._accumulate = autocast, clip_norm, accumulate
        self._device = next(iter(model.parameters())).device

    def run(self, batch: Tensors, samples: int | None = None) -> Any:
        """Trains on a batch, which is on the device.

        Args:
            batch: tensors for the loss function.
            samples: number of this rank's samples if ranks have different numbers; 0: none, but take part.

        Returns:
            The loss of this rank's samples, a 0-dim tensor.

        Raises:
            ArrayError: with ``accumulate``, the batch cannot be cut into parts.
        """
        total = self.differentiate(batch, samples)
        self.update()
        return total

    def differentiate(self, batch: Tensors, samples: int | None = None) -> Any:
        """Computes the gradients, and clips them: the first part of :meth:`run`."""
        self._optimizer.zero_grad(set_to_none=True)
        with contextlib.nullcontext() if samples is None else self.model.uneven_batch(samples):
            total = self._passes(batch) if samples != 0 else torch.zeros((), device=self._device)
        if self._clip_norm is not None:
            self.model.clip_grad_norm_(self._clip_norm)
        return total

    def update(self) -> None:
        """Updates the parameters: the second part of :meth:`run`."""
        self._optimizer.step()

    def _passes(self, batch: Tensors) -> Any:
        """Runs forward and backward passes over the parts of a batch; returns the loss."""
        parts = self._parts(batch)
        total = None
        for number, (share, part) in enumerate(parts, 1):
            with contextlib.nullcontext() if number == len(parts) else self.model.no_sync():
                with self._precision():
                    loss = self._loss(*part)
                loss = loss * share if len(parts) > 1 else loss
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        return total

    def _parts(self, batch: Tensors) -> list[tuple[float, Tensors]]:
        """Returns the parts of a batch, each with its share of the samples; the last may be smaller."""
        if self._accumulate == 1:
            return [(1.0, batch)]
        lengths = {len(tensor) if tensor.dim() else 0 for tensor in batch}
        if len(lengths) != 1 or lengths == {0}:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in batch)
            raise ArrayError(
                f"accumulate={self._accumulate} splits all tensors of a batch along their first axis,"
                f" which must have the same length in each; these have the shapes {shapes}.",
                remedy="Pass tensors that are not part of the batch by the loss function's closure.",
            )
        count = lengths.pop()
        cut = zip(*(tensor.chunk(self._accumulate) for tensor in batch), strict=True)
        return [(len(part[0]) / count, part) for part in cut]

    def _precision(self) -> Any:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._autocast)
