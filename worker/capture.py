"""``worker.capture_step``: a whole training step (forward, backward, AllReduce, optimizer) as one CUDA graph.

With small batches a GPU waits for the host, which launches some thousand kernels per step. A captured step
is launched once; the AllReduce of each bucket runs inside it, beside the rest of the backward pass.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from worker.communicators.base import Communicator, ReduceOp
from worker.errors import ArrayError, SettingsError, WorkerError

_log = logging.getLogger(__name__)
_LAUNCH_WAIT_S = 0.2


class CaptureError(WorkerError):
    """A step cannot be captured into a CUDA graph; says why."""


class TrainingStep:
    """One training step; made by :func:`capture_step`. Call it with the tensors of a batch."""

    reason: str | None
    """Why steps run eagerly; None while they are, or are going to be, captured."""

    def __init__(
        self,
        loss: Callable[..., Any],
        model: Any,
        optimizer: Any,
        *,
        autocast: Any | None,
        clip_norm: float | None,
        accumulate: int,
        warmup_steps: int,
        capture: bool,
        strict: bool,
    ) -> None:
        self._loss, self._model, self._optimizer = loss, model, optimizer
        self._autocast, self._clip_norm, self._accumulate = autocast, clip_norm, accumulate
        self._warmup_steps, self._strict = warmup_steps, strict
        self._device = next(model.parameters()).device
        self._graph: Any = None
        self._static: tuple[Any, ...] = ()
        self._fed: tuple[tuple[Any, ...], Any] | None = None
        self._static_loss: Any = None
        self._eager_steps = 0
        self._captured_for: Communicator | None = None
        self._forget: Callable[[], None] = _nothing
        self._note: Callable[[str], None] = _ignore
        self._lock = threading.Lock()
        self._ended = False
        self.reason = None if capture else "capture is switched off"
        self._decline(self._obstacle())
        if self.reason is None:
            self._stream = torch.cuda.Stream(self._device)
            self._copies = torch.cuda.Stream(self._device)
            self._make_rates_tensors()

    # ------------------------------------------------------------ what users call

    def __call__(self, *batch: Any) -> Any:
        """Trains one step on a batch.

        Args:
            batch: tensors for the loss function; none: those given to :meth:`feed` before.

        Returns:
            The loss of this rank's samples, a 0-dim tensor that the next step overwrites. The host does not
            wait for it.

        Raises:
            ArrayError: with ``accumulate``, the tensors' first axes differ.
            SettingsError: there is no batch.
        """
        if not batch:
            batch = self._take_fed()
        if self.reason is not None:
            return self._body(*self._to_device(batch))
        self._follow_communicator()
        if self._graph is None and self._eager_steps >= self._warmup_steps:
            self._capture(self._to_device(batch))
        if self._graph is None or not self._fits(batch):
            self._eager_steps += 1
            return self._run_eagerly(self._to_device(batch))
        self._update_rates()
        with self._lock:  # an abort in another thread may take the graph away
            if self._graph is not None:
                for static, given in zip(self._static, batch, strict=True):
                    static.copy_(given, non_blocking=True)
                self._note("captured_step")
                self._graph.replay()
        if self._ended:
            self.release()
        return self._static_loss

    def feed(self, *batch: Any) -> None:
        """Starts copying the next batch to the GPU, beside the running step; pin it for that to work."""
        if self.reason is not None:
            self._fed = (batch, None)
            return
        with torch.cuda.stream(self._copies):
            copies = tuple(tensor.to(self._device, non_blocking=True) for tensor in batch)
            self._fed = (copies, self._copies.record_event())

    @property
    def captured(self) -> bool:
        """Whether the next step of the captured shape is launched as a graph."""
        return self._graph is not None

    def release(self) -> None:
        """Gives up the graph. Runs by itself before the communicator is aborted or closed; idempotent."""
        self._ended = True
        if not self._lock.acquire(timeout=_LAUNCH_WAIT_S):
            return  # a launch hangs until the abort frees it; that thread then releases the graph itself
        try:
            graph, self._graph = self._graph, None
            self._eager_steps = 0
            if graph is not None:
                graph.reset()
        finally:
            self._lock.release()

    # ------------------------------------------------------------ the step

    def _body(self, *batch: Any) -> Any:
        self._optimizer.zero_grad(set_to_none=True)
        parts = self._parts(batch)
        no_sync = getattr(self._model, "no_sync", contextlib.nullcontext)
        total = None
        for number, (share, part) in enumerate(parts, 1):
            with contextlib.nullcontext() if number == len(parts) else no_sync():
                with self._precision():
                    loss = self._loss(*part)
                loss = loss * share if len(parts) > 1 else loss
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        self._optimizer.step()
        return total

    def _parts(self, batch: tuple[Any, ...]) -> list[tuple[float, tuple[Any, ...]]]:
        """The parts of a batch, each with its share of the samples: the last part may be smaller."""
        if self._accumulate == 1:
            return [(1.0, batch)]
        lengths = {len(tensor) if tensor.dim() else 0 for tensor in batch}
        if len(lengths) != 1 or lengths == {0}:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in batch)
            raise ArrayError(
                f"accumulate={self._accumulate} cuts all tensors of a batch along their first axis,"
                f" which must be as long in each; these have the shapes {shapes}.",
                remedy="What is no part of the batch can be bound by the loss function.",
            )
        count = lengths.pop()
        cut = zip(*(tensor.chunk(self._accumulate) for tensor in batch), strict=True)
        return [(len(part[0]) / count, part) for part in cut]

    def _precision(self) -> Any:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._autocast)

    def _clip(self, norm: float) -> None:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, norm, foreach=True)

    def _run_eagerly(self, batch: tuple[Any, ...]) -> Any:
        """On the stream of the capture, so that what is lazily made for a stream is there in time."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            loss = self._body(*batch)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return loss

    # ------------------------------------------------------------ capturing

    def _obstacle(self) -> str | None:
        if self._device.type != "cuda":
            return f"the module is on the {self._device.type}"
        bound = host_bound(self._optimizer)
        if bound is not None:
            return bound
        communicator = getattr(self._model, "communicator", None)
        if communicator is not None and not hasattr(communicator, "before_end"):
            return f'the backend "{communicator.name}" cannot be captured'
        return None

    def _decline(self, reason: str | None) -> None:
        if reason is None or self.reason is not None:
            return
        if self._strict:
            raise CaptureError(f"this step cannot be captured: {reason}", remedy="Or leave strict out.")
        self.reason = reason
        _log.warning("training steps run eagerly: %s", reason)

    def _capture(self, batch: tuple[Any, ...]) -> None:
        static = tuple(tensor.clone() for tensor in batch)
        graph, error = torch.cuda.CUDAGraph(), None
        try:
            # thread_local: other threads (heartbeats, the autograd engine) may call CUDA meanwhile
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                loss = self._body(*static)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            _free_generator(self._device)
        if not self._all_succeeded(error is None):
            graph.reset()
            self._optimizer.zero_grad(set_to_none=True)
            self._decline(error or "another rank could not capture it")
            return
        self._static, self._static_loss, self._graph, self._ended = static, loss, graph, False
        communicator = getattr(self._model, "communicator", None)
        self._captured_for = communicator
        self._note = getattr(communicator, "note", _ignore)
        if communicator is not None:
            self._forget = communicator.before_end(self.release)

    def _all_succeeded(self, succeeded: bool) -> bool:
        communicator = getattr(self._model, "communicator", None)
        flag = torch.tensor([int(succeeded)], dtype=torch.int32, device=self._device)
        if communicator is not None:
            communicator.all_reduce(flag, flag, ReduceOp.MIN)
        return bool(flag.item())

    def _follow_communicator(self) -> None:
        """A graph holds its generation's communicator: with another one it must be captured anew."""
        communicator = getattr(self._model, "communicator", None)
        if self._graph is not None and communicator is not self._captured_for:
            self._forget()
            self.release()

    def _fits(self, batch: tuple[Any, ...]) -> bool:
        return len(batch) == len(self._static) and all(
            given.shape == static.shape and given.dtype == static.dtype
            for given, static in zip(batch, self._static, strict=True)
        )

    # ------------------------------------------------------------ batches and learning rates

    def _to_device(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(tensor.to(self._device, non_blocking=True) for tensor in batch)

    def _take_fed(self) -> tuple[Any, ...]:
        if self._fed is None:
            raise SettingsError("a step without a batch needs feed() before it")
        (batch, event), self._fed = self._fed, None
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            for tensor in batch:
                tensor.record_stream(current)
        return batch

    def _make_rates_tensors(self) -> None:
        """Learning rates become tensors on the GPU: a number would be fixed in the graph for ever."""
        self._rates = []
        for group in self._optimizer.param_groups:
            self._rates.append(torch.tensor(float(group["lr"]), device=self._device))
            group["lr"] = self._rates[-1]

    def _update_rates(self) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if group["lr"] is not rate:
                rate.fill_(float(group["lr"]))
                group["lr"] = rate


def capture_step(
    loss: Callable[..., Any],
    model: Any,
    optimizer: Any,
    *,
    autocast: Any | None = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    warmup_steps: int = 3,
    capture: bool = True,
    strict: bool = False,
) -> TrainingStep:
    """Makes a training step that runs as one CUDA graph where that is possible.

    ::

        step = worker.capture_step(
            lambda images, labels: cross_entropy(model(images), labels),
            model, optimizer, autocast=torch.bfloat16,
        )
        for images, labels in batches:
            loss = step(images, labels)

    The first ``warmup_steps`` calls train eagerly (libraries choose their algorithms then); the next one
    captures. A batch of another shape runs eagerly. Learning rates may be changed at any time through
    ``optimizer.param_groups`` or a scheduler. Where capture fails, on any rank, all ranks go on eagerly and
    ``step.reason`` says why.

    Args:
        loss: gets the batch, calls the model, returns a scalar, a mean over the samples; must not read the
            GPU (``item()``, ``if`` on a tensor).
        model: a :class:`worker.DataParallel`, or a bare module in a job of one.
        optimizer: of torch; ``SGD(fused=True)`` or ``AdamW(fused=True, capturable=True)`` are fast.
        autocast: dtype of mixed precision, or None.
        clip_norm: clip the averaged gradient to this norm.
        accumulate: cut each batch along the first axis into so many parts (fewer where it is too short),
            and reduce once. Parts count by their samples, so a loss that is a mean over them gives what the
            whole batch would.
        warmup_steps: eager steps before the capture, at least 2.
        capture: False: always run eagerly.
        strict: raise :class:`CaptureError` instead of running eagerly.

    Raises:
        SettingsError: an argument is out of range.
        CaptureError: with ``strict``, the step cannot be captured.
    """
    if warmup_steps < 2:
        raise SettingsError(
            f"warmup_steps is at least 2 (optimizers make their state then), not {warmup_steps}"
        )
    if accumulate < 1:
        raise SettingsError(f"accumulate is at least 1, not {accumulate}")
    return TrainingStep(
        loss,
        model,
        optimizer,
        autocast=autocast,
        clip_norm=clip_norm,
        accumulate=accumulate,
        warmup_steps=warmup_steps,
        capture=capture,
        strict=strict,
    )


def host_bound(optimizer: Any) -> str | None:
    """Why no graph can hold this optimizer's step: what it needs of the host; None: nothing that is known."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS decides on the host how often to evaluate the loss"
    for group in optimizer.param_groups:
        if "capturable" in group:
            if not group["capturable"]:
                return f"{kind} reads its step count on the host: make it with capturable=True"
        elif type(optimizer).__module__.startswith("torch.optim") and not group.get("fused"):
            remedy = ": make it with fused=True" if "fused" in group else ""
            return f"{kind} reads its learning rate on the host{remedy}"
    return None


def _free_generator(device: Any) -> None:
    """After a capture that broke off: torch leaves the GPU's generator in it, and refuses the next draw."""
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())


def _nothing() -> None:
    return None


def _ignore(text: str) -> None:
    return None
