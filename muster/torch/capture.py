"""``muster.capture_step``: a training step (forward, backward, all_reduce, optimizer) as one CUDA graph.

With small batches a GPU waits for the host, which launches some thousand kernels per step. A captured step
is launched once. The all_reduce of each bucket runs within the step, in parallel with the rest of the
backward pass.
"""

from __future__ import annotations

import logging
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from muster.communicators.base import Communicator
from muster.communicators.reduce_ops import ReduceOp
from muster.errors import ArrayError, SettingsError, WorkerError
from muster.torch.captured_model import captured_model
from muster.torch.captured_settings import CapturedSettings, host_bound
from muster.torch.optimizer_state import check_trains
from muster.torch.sharded_optimizer import ShardedOptimizer
from muster.torch.sparse_gradients import SparseGradients
from muster.torch.step import StepBody
from muster.torch.transfer import array_of

_log = logging.getLogger(__name__)
_LAUNCH_WAIT_S = 0.02
"""A time in seconds that is longer than a launch takes, unless the launch waits for a broken step."""


class CaptureError(WorkerError):
    """A step cannot be captured into a CUDA graph; the message says why."""


class TrainingStep:
    """One training step; made by :func:`capture_step`. Call it with the tensors of a batch."""

    reason: str | None
    """Why steps run eagerly; None while they are captured, or will be."""

    def __init__(
        self,
        body: StepBody,
        module: Any,
        optimizer: Any,
        *,
        warmup_steps: int,
        capture: bool,
        strict: bool,
    ) -> None:
        self._body, self._module, self._optimizer = body, module, optimizer
        self._model = body.model
        self._warmup_steps, self._strict = warmup_steps, strict
        self._device = next(module.parameters()).device
        self._graph: Any = None
        self._update: Any = None
        self._updates_last = False
        self._static: tuple[Any, ...] = ()
        self._fed: tuple[tuple[Any, ...], Any] | None = None
        self._static_loss: Any = None
        self._eager_steps = 0
        self._communicator: Communicator | None = None
        self._held: list[Any] = []
        self._capture_failed = False
        self._forget: Callable[[], None] = _nothing
        self._note: Callable[[str], None] = _ignore
        self._lock = threading.Lock()
        self._ended = False
        self.reason = None if capture else "capture is switched off"
        self._decline(self.obstacle())
        if self.reason is None:
            self._stream = torch.cuda.Stream(self._device)
            self._copies = torch.cuda.Stream(self._device)
            self._settings = CapturedSettings(optimizer, module, self._device)
            drop = weakref.WeakMethod(self._drop)  # the optimizer may live longer
            optimizer.register_load_state_dict_post_hook(lambda _: (call := drop()) and call())

    # ------------------------------------------------------------ what users call

    def __call__(self, *batch: Any, samples: int | None = None) -> Any:
        """Trains one step on a batch.

        Args:
            batch: tensors for the loss function; none: those given to :meth:`feed` before.
            samples: number of samples in this rank's batch, for a step in which ranks have different numbers,
                such as the last batch of an epoch. Gradients are then averaged over all samples. 0: this rank
                has none, but takes part. All ranks must pass it in such a step, which runs eagerly.

        Returns:
            The loss of this rank's samples, a 0-dim tensor that the next step overwrites. The host does not
            wait for it.

        Raises:
            ArrayError: a part of the batch is not a tensor; with ``accumulate``, their first axes differ.
            SettingsError: no batch is given here, and none was given to :meth:`feed`.
        """
        if not batch and samples != 0:
            batch = self._take_fed()
        wrong = [type(part).__name__ for part in batch if not isinstance(part, torch.Tensor)]
        if wrong:
            raise ArrayError(
                f"a batch is made of tensors, not of {', '.join(wrong)}",
                remedy="Let the loss function bind what is no part of the batch.",
            )
        self._follow_communicator()
        self._model.check_step(begins=True)
        if self.reason is None and self._settings.changed():
            self._drop()
            self._decline(self._settings.obstacle())
        if self.reason is not None:
            self._model.before_update()
            return self._body.run(self._to_device(batch), samples)
        uneven = samples is not None or self._model.uneven
        if self._graph is None or uneven or not self._fits(batch):
            self._model.before_update()
        if self._graph is None and self._eager_steps >= self._warmup_steps and not uneven:
            self._capture(self._to_device(batch))
        if self._graph is None or uneven or not self._fits(batch):
            self._eager_steps += 1
            return self._run_eagerly(self._to_device(batch), samples)
        self._settings.update_rates()
        with self._lock:  # an abort in another thread may release the graph
            if self._graph is not None:
                for static, given in zip(self._static, batch, strict=True):
                    static.copy_(given, non_blocking=True)
                self._note("captured_step")
                if not self._updates_last:  # another captured step may have set the model's flag
                    self._model.before_update()
                self._model.before_replay()
                self._graph.replay()
                self._model.before_update()
                self._update.replay()
        if self._ended:
            self.release()
        return self._static_loss

    def feed(self, *batch: Any) -> None:
        """Starts copying the next batch to the GPU; overlaps the running step if the batch is pinned."""
        if self.reason is not None:
            self._fed = (batch, None)
            return
        with torch.cuda.stream(self._copies):
            copies = tuple(tensor.to(self._device, non_blocking=True) for tensor in batch)
            self._fed = (copies, self._copies.record_event())

    def mean_over_ranks(self, loss: Any) -> float:
        """The mean of all ranks' losses, for progress output. All ranks call it; the host waits.

        Args:
            loss: a tensor of one element, as a step returned it.

        Raises:
            MembershipChanged: the members changed; within ``with step`` an elastic loop redoes the step.
        """
        communicator = self._model.communicator
        mean = loss.detach().to(torch.float32, copy=True).reshape(1)
        if communicator is not None:
            array = array_of(communicator, mean)
            communicator.all_reduce(array, array, ReduceOp.MEAN)
            communicator.synchronize()  # a plain read would return what an aborted collective left, or hang
        return float(mean)

    @property
    def captured(self) -> bool:
        """Whether the next step of the captured shape is launched as a graph."""
        return self._graph is not None

    def release(self) -> None:
        """Releases the graph; called by itself before the communicator is aborted or closed. Idempotent."""
        self._ended = True
        if not self._lock.acquire(timeout=_LAUNCH_WAIT_S):
            return  # a launch hangs until the abort frees it; that thread then releases the graph itself
        try:
            graphs = [graph for graph in (self._update, self._graph) if graph is not None]
            self._graph = self._update = None
            self._say_updates_last(False)
            self._eager_steps = 0
            for graph in graphs:
                graph.reset()
        finally:
            self._lock.release()

    def _say_updates_last(self, updates_last: bool) -> None:
        self._updates_last = self._model.updates_last = updates_last

    def _run_eagerly(self, batch: tuple[Any, ...], samples: int | None = None) -> Any:
        """Runs a step eagerly on the capture's stream, for which libraries lazily create what they need."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            loss = self._body.run(batch, samples)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return loss

    # ------------------------------------------------------------ capturing

    def obstacle(self) -> str | None:
        """Returns why the step cannot be captured; None if it can."""
        if SparseGradients(self._module).parameters:
            return "sparse gradients cannot be captured: each step reads how many rows there are"
        if self._device.type != "cuda":
            return f"the module is on the {self._device.type}"
        bound = host_bound(self._optimizer)
        if bound is not None:
            return bound
        communicator = self._model.communicator
        if communicator is not None and not communicator.capturable:
            return f'the backend "{communicator.name}" cannot be captured'
        return self._model.capture_obstacle

    def _decline(self, reason: str | None) -> None:
        if reason is None or self.reason is not None:
            return
        if self._strict:
            raise CaptureError(f"this step cannot be captured: {reason}", remedy="Or leave strict out.")
        self.reason = reason
        _log.warning("training steps run eagerly: %s", reason)

    def _capture(self, batch: tuple[Any, ...]) -> None:
        self._settings.update_rates()
        static = tuple(tensor.clone() for tensor in batch)
        graph, update, loss, error = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), None, None
        versions = self._versions()
        generators = self._model.captured_generators()
        for generator in generators:
            graph.register_generator_state(generator)
        communicator: Any = self._communicator
        self._note = _ignore if communicator is None else communicator.note
        self._ended = False
        if communicator is not None:  # before the capture, because an abort may come at any time
            self._forget = communicator.before_end(self.release)
        try:
            # thread_local: other threads (heartbeats, the autograd engine) may call CUDA at that time
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                loss = self._body.differentiate(static)
            updates_last = self._versions() == versions
            with torch.cuda.graph(
                update, pool=graph.pool(), stream=self._stream, capture_error_mode="thread_local"
            ):
                self._body.update()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            free_generators(self._device, generators)
        succeeded = False
        try:
            succeeded = self._all_succeeded(error is None)
        finally:
            if not succeeded:
                update.reset()
                graph.reset()
                self._drop()
                self._forget_gradients()
        if not succeeded:
            self._capture_failed = True
            self._decline(error or "another rank could not capture it")
            return
        self._settings.captured()
        self._held = self._model.held_by_graphs()
        with self._lock:
            self._static, self._static_loss, self._graph, self._update = static, loss, graph, update
            self._say_updates_last(updates_last)
        if self._ended:
            self.release()

    def _versions(self) -> list[int]:
        """Version counter of each parameter: how often it was changed in place."""
        return [parameter._version for parameter in self._model.parameters()]

    def _drop(self) -> None:
        """Releases the graph; the next steps warm up again."""
        self._forget()
        self.release()
        self._held = []

    def _forget_gradients(self) -> None:
        """Clears gradients after a failed capture, which has computed and sent nothing."""
        self._optimizer.zero_grad(set_to_none=True)
        self._model.forget_backward()

    def _all_succeeded(self, succeeded: bool) -> bool:
        flag = torch.tensor([int(succeeded)], dtype=torch.int32, device=self._device)
        if self._communicator is not None:
            self._communicator.all_reduce(flag, flag, ReduceOp.MIN)
        return bool(flag.item())

    def _follow_communicator(self) -> None:
        """Warms up again with another generation's communicator, as newcomers do."""
        communicator = self._model.communicator
        if communicator is self._communicator:
            if self._graph is not None and any(
                map(operator.is_not, self._held, self._model.held_by_graphs())
            ):
                self._drop()  # gradients are elsewhere now, so the graph would use freed memory
            return
        self._communicator = communicator
        self._drop()
        if self._capture_failed:
            self._capture_failed, self.reason = False, None

    def _fits(self, batch: tuple[Any, ...]) -> bool:
        return len(batch) == len(self._static) and all(
            given.shape == static.shape and given.dtype == static.dtype
            for given, static in zip(batch, self._static, strict=True)
        )

    # ------------------------------------------------------------ batches

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
    """Makes a training step that runs as one CUDA graph if that is possible.

    ::

        step = muster.capture_step(
            lambda images, labels: cross_entropy(model(images), labels),
            model, optimizer, autocast=torch.bfloat16,
        )
        for images, labels in batches:
            loss = step(images, labels)

    The first ``warmup_steps`` calls train eagerly (libraries choose their algorithms then); the next call
    captures the step. A batch of another shape runs eagerly. Learning rates may be changed at any time
    through ``optimizer.param_groups`` or a scheduler. The graph fixes all other settings, the state that
    ``optimizer.load_state_dict`` loads, which parameters are frozen and which modules are in training mode.
    After a change of these, which all ranks must make, the step is captured again. If the capture fails on
    any rank, all ranks go on eagerly and ``step.reason`` says why.

    Args:
        loss: gets the batch, calls the model, and returns a scalar, a mean over the samples. It must not read
            from the GPU (``item()``, ``if`` on a tensor).
        model: a :class:`muster.DataParallel`, or a bare module in a job of one.
        optimizer: an optimizer of torch; ``SGD(fused=True)`` or ``AdamW(fused=True, capturable=True)`` are
            fast.
        autocast: dtype of mixed precision, or None. Losses are not scaled, as float16 would need.
        clip_norm: clip the averaged gradient to this norm.
        accumulate: cut each batch along the first axis into this many parts (fewer if it is too short), and
            all_reduce once. Parts are weighted by their number of samples. So with a loss that is a mean over
            samples, the gradient is that of the whole batch.
        warmup_steps: eager steps before the capture, at least 2.
        capture: False: always run eagerly.
        strict: raise :class:`CaptureError` instead of running eagerly.

    Raises:
        SettingsError: an argument is out of range, or the optimizer is not one of this model.
        CaptureError: with ``strict``, the step cannot be captured.
    """
    if warmup_steps < 2:
        raise SettingsError(
            f"warmup_steps must be at least 2, for optimizers to create their state; it is {warmup_steps}"
        )
    if accumulate < 1:
        raise SettingsError(f"accumulate is at least 1, not {accumulate}")
    if isinstance(optimizer, ShardedOptimizer):
        raise SettingsError(
            "a ShardedOptimizer runs collectives of its own: call its step() without capture_step"
        )
    check_trains(optimizer, model)
    body = StepBody(
        loss,
        captured_model(model, optimizer),
        optimizer,
        autocast=autocast,
        clip_norm=clip_norm,
        accumulate=accumulate,
    )
    return TrainingStep(body, model, optimizer, warmup_steps=warmup_steps, capture=capture, strict=strict)


def free_generators(device: Any, others: Sequence[Any]) -> None:
    """Frees the GPU's random generators from a failed capture, in which torch leaves them."""
    for generator in (torch.cuda.default_generators[device.index], *others):
        generator.graphsafe_set_state(generator.clone_state())


def is_recording(device: Any) -> bool:
    """Whether the current stream is being captured, so that calls are recorded and computed at replay."""
    return bool(device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _nothing() -> None:
    return None


def _ignore(text: str) -> None:
    return None
