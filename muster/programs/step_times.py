"""Measures how the time of a torch program's steps is spent, and reports it to the program's agent.

A program that knows nothing of Muster reports nothing, so calls that every program makes are watched:

- A step ends with the optimizer's step.
- A program waits for other ranks in a collective, in ``Work.wait``, in ``wait_tensor``, or in C++ at the end
  of a backward pass, where DDP waits for its gradients.
- A program waits for data in a ``DataLoader``.

On a GPU the host does not wait. Instead, events on the stream that waits show how long it did. FSDP2's
collectives have streams of their own; what counts is how long the computing stream waits for them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from muster.wire.messages import StepTimes
from muster.worker.adopted import data_waits, line_to_agent
from muster.worker.program_environment import GENERATION_VARIABLE
from muster.worker.session.step_clock import StepClock

OTHER_OPTIMIZER_S = 60.0
"""After this many seconds without a step of an optimizer, another one's steps may end the program's."""

COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
)
"""Calls of torch.distributed that by default run on the current stream of a GPU, without a ``Work``."""

FSDP_MODULES = (
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed._composable.fsdp._fsdp_param_group",  # torch before 2.6
)

MOST_EVENTS = 4096
"""Maximum number of GPU waits kept until they are over; beyond it, the oldest are dropped."""


class ProgramWaits:
    """The time that this program's training has waited for other ranks.

    Args:
        clock: monotonic seconds.

    Attributes:
        waited_s: how long the training thread has waited in total, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.waited_s = 0.0
        self._thread = threading.main_thread().ident
        self._mine = threading.local()
        self._failures = 0
        self._uses_device = False
        self._taken_s = 0.0
        self._events: deque[tuple[Any, Any]] = deque(maxlen=MOST_EVENTS)
        self._spare: list[tuple[Any, Any]] = []

    def begin(self, *, of_training: bool = False) -> Any:
        """Notes that this thread begins to wait; returns the argument for :meth:`end`.

        Only the training's waits count, and a wait within another wait does not count again.

        Args:
            of_training: whether it is the training that waits, regardless of the thread.
        """
        depth = self._depth()
        self._mine.depth = (self._failures, depth + 1)
        if depth or not (of_training or self._stream() is not None or self.is_training()):
            return None
        return self._clock(), self._record_begin()

    def end(self, begun: Any) -> None:
        """Notes that this thread's wait is over."""
        self._mine.depth = (self._failures, max(0, self._depth() - 1))
        if begun is None:
            return
        since, events = begun
        if events is None:
            self.waited_s += self._clock() - since
            return
        with contextlib.suppress(RuntimeError):  # the GPU has failed: its next user gets the error
            events[1].record()
            self._events.append(events)

    def give_up(self) -> None:
        """Drops the waits that have begun in any thread and will not end."""
        self._failures += 1

    def _depth(self) -> int:
        failures, depth = getattr(self._mine, "depth", (self._failures, 0))
        return int(depth) if failures == self._failures else 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which this thread waits for others."""
        begun = self.begin()
        try:
            yield
        finally:
            self.end(begun)

    @contextlib.contextmanager
    def beside(self, stream: Any) -> Iterator[None]:
        """Context in which the training's collectives run on other streams than the one that computes.

        The time of the collectives does not count. Only the time for which ``stream`` or the host waits for
        them counts.

        Args:
            stream: the stream that computes.
        """
        before, self._mine.stream = self._stream(), stream
        try:
            yield
        finally:
            self._mine.stream = before

    def waits_beside(self, stream: Any) -> bool:
        """Whether this is the stream that computes, within :meth:`beside`."""
        computes = self._stream()
        return computes is not None and bool(computes == stream)

    def _stream(self) -> Any:
        return getattr(self._mine, "stream", None)

    def is_training(self) -> bool:
        """Whether this thread makes the steps, or runs a backward pass for the thread that does."""
        return threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1

    def note_training_thread(self) -> None:
        """Notes that this thread makes the steps; until the first one it is the main thread."""
        self._thread = threading.get_ident()

    def take_device_wait(self) -> float | None:
        """Returns for how many seconds the GPU's streams and the host have waited since the last call.

        None if no GPU is used. Waits that are not over yet count the next time.
        """
        if not self._uses_device:
            return None
        waited_s, self._taken_s = self.waited_s - self._taken_s, self.waited_s
        with contextlib.suppress(RuntimeError):
            while self._events and self._events[0][1].query():
                events = self._events.popleft()
                waited_s += float(events[0].elapsed_time(events[1])) / 1000
                self._spare.append(events)
        return waited_s

    def _record_begin(self) -> tuple[Any, Any] | None:
        """Returns two events for a wait of the current stream, the first recorded; None: the host waits."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        self._uses_device = True
        stream = self._stream()
        if stream is not None and torch.cuda.current_stream() != stream:
            return None
        make = functools.partial(torch.cuda.Event, enable_timing=True)
        events = self._spare.pop() if self._spare else (make(), make())
        events[0].record()
        return events


class ProgramSteps:
    """Measures the steps of this program, and sends their times.

    Args:
        waits: the training's waits.
        send: called with the times of some steps, about once a second.
        clock: monotonic seconds.
    """

    def __init__(
        self, waits: ProgramWaits, send: Callable[[StepTimes], None], clock: Callable[[], float]
    ) -> None:
        self._waits, self._send, self._clock = waits, send, clock
        self._steps = StepClock(waits, clock)
        self._generation = ""
        self._counts: Callable[[], object] = lambda: None
        self._stepped_s = 0.0
        self._sees_loader = False

    def note_data(self, seconds: float, *, is_reported: bool = False) -> None:
        """Notes that this thread has waited for data.

        Args:
            seconds: for how long.
            is_reported: whether the program reports it. If its loader is watched, the report is ignored.
        """
        if self._waits.is_training():
            self._sees_loader = self._sees_loader or not is_reported
            if not (is_reported and self._sees_loader):
                self._steps.note_data(seconds)

    def optimizer_stepped(self, optimizer: object) -> None:
        """Notes that an optimizer has made a step; the first optimizer's steps end the program's steps."""
        now = self._clock()
        counting = self._counts()
        if counting is not optimizer and counting is not None and now < self._stepped_s + OTHER_OPTIMIZER_S:
            return
        if counting is not optimizer:
            self._counts = weakref.ref(optimizer)
        self._stepped_s = now
        self._waits.note_training_thread()
        self._end_step()

    def _end_step(self) -> None:
        generation = os.environ.get(GENERATION_VARIABLE, "")
        if generation != self._generation:  # other work came before its first step
            self._generation = generation
            self._steps.begin(int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
            return
        self._steps.end_step()
        times = self._steps.take()
        if times is not None:
            self._send(times)


WAITS = ProgramWaits()
"""The waits of this process. Muster's own process groups count here, too."""


def install() -> None:
    """Measures this program's steps from now on, if it has an agent that asks for it."""
    line = line_to_agent(os.environ)
    if line is None:
        return
    pid = os.getpid()

    def send(times: StepTimes) -> None:
        if os.getpid() == pid:  # steps of a forked child do not count
            said = {"times": [times.steps, times.seconds[:6]]}
            with contextlib.suppress(OSError):  # the agent is busy, or has ended
                line.send(json.dumps(said).encode() + b"\n", socket.MSG_DONTWAIT)

    steps = ProgramSteps(WAITS, send, time.monotonic)

    @functools.cache
    def watch_what_is_used() -> None:
        _watch_loader(steps)
        _watch_functional(WAITS)
        _watch_fsdp(WAITS)

    def stepped(optimizer: Any, _args: object, _kwargs: object) -> None:
        watch_what_is_used()
        steps.optimizer_stepped(optimizer)

    register_optimizer_step_post_hook(stepped)
    data_waits.append(functools.partial(steps.note_data, is_reported=True))
    _watch_calls(WAITS)
    _watch_backward(WAITS)


def _watch_calls(waits: ProgramWaits) -> None:
    """Counts the waits of Python code in torch's process groups."""
    dist.Work.wait = _timed(waits, dist.Work.wait)
    if hasattr(dist, "_broadcast_coalesced"):  # DDP's buffers, before each forward pass
        dist._broadcast_coalesced = _timed(waits, dist._broadcast_coalesced)
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    for name in COLLECTIVES:
        if hasattr(c10d, name):
            timed = _timed(waits, getattr(c10d, name))
            setattr(c10d, name, timed)
            setattr(dist, name, timed)


def _timed(waits: ProgramWaits, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or kwargs.get("async_op"):
            return call(*args, **kwargs)
        begun = waits.begin()
        try:
            return call(*args, **kwargs)
        finally:
            waits.end(begun)

    return timed


def _watch_functional(waits: ProgramWaits) -> None:
    """Counts the waits for functional collectives, for example those of tensor parallelism."""
    functional: Any = sys.modules.get("torch.distributed._functional_collectives")
    if hasattr(functional, "wait_tensor"):
        functional.wait_tensor = _timed(waits, functional.wait_tensor)


def _watch_fsdp(waits: ProgramWaits) -> None:
    """Counts the waits of the stream that computes for the streams of FSDP2.

    :func:`_watch_backward` counts its wait at the end of a backward pass.
    """
    found = [sys.modules[name] for name in FSDP_MODULES if name in sys.modules]
    group = getattr(found[0], "FSDPParamGroup", None) if found else None
    for name in ("unshard", "wait_for_unshard", "post_backward"):
        if hasattr(group, name):
            setattr(group, name, _beside(waits, getattr(group, name)))
    if group is not None:
        torch.cuda.Stream.wait_event = _timed_of_stream(waits, torch.cuda.Stream.wait_event)


def _beside(waits: ProgramWaits, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def beside(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = getattr(self, "device", None)
        if torch.compiler.is_compiling() or getattr(device, "type", None) != "cuda":
            return method(self, *args, **kwargs)
        with waits.beside(torch.cuda.current_stream()):
            return method(self, *args, **kwargs)

    return beside


def _timed_of_stream(waits: ProgramWaits, wait_event: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(wait_event)
    def timed(self: Any, event: Any) -> None:
        if torch.compiler.is_compiling() or not waits.waits_beside(self):
            return wait_event(self, event)
        with waits.waiting():
            return wait_event(self, event)

    return timed


def _watch_backward(waits: ProgramWaits) -> None:
    """Counts DDP's wait in C++, at the end of a backward pass.

    There the engine runs the queued callbacks, one after the other. Ours is queued when the pass begins, so
    it runs before DDP's callback; it queues another one, which runs after DDP's.
    """
    backward = torch.autograd.backward
    engine = torch.autograd.Variable._execution_engine

    @functools.wraps(backward)
    def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        root = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
        if torch.compiler.is_compiling() or _is_compiled_backward() or not dist.is_initialized():
            return backward(tensors, *args, **kwargs)
        if root is None or not getattr(root, "requires_grad", False):
            return backward(tensors, *args, **kwargs)
        open_waits: list[Any] = []

        def over() -> None:
            waits.end(open_waits.pop())

        def computed() -> None:
            open_waits.append(waits.begin(of_training=True))
            engine.queue_callback(over)

        def begins(_gradient: Any) -> None:
            engine.queue_callback(computed)

        hook = root.register_hook(begins)
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            hook.remove()
            if open_waits:  # the pass failed during the wait
                waits.give_up()

    torch.autograd.backward = watched


def _is_compiled_backward() -> bool:
    """Whether torch compiles backward passes, including hooks."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))


def _watch_loader(steps: ProgramSteps) -> None:
    """Counts the training thread's waits for its loader."""
    loading = sys.modules.get("torch.utils.data.dataloader")
    iterator = getattr(loading, "_BaseDataLoaderIter", None)
    if iterator is None:
        return
    fetch = iterator.__next__

    @functools.wraps(fetch)
    def fetched(self: Any) -> Any:
        begun = time.monotonic()
        try:
            return fetch(self)
        finally:
            steps.note_data(time.monotonic() - begun)

    iterator.__next__ = fetched
