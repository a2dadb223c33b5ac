"""CUDA graphs on the CPU: a graph records what is called between its begin and end, and replays it in place.

As on a GPU, nothing that is captured has an effect on parameters, optimizer and generator, numbers are fixed,
and what CUDA refuses within a capture is refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from muster.torch import capture
from muster.torch.transfer import CommStream
from tests.gpu import cuda_rules
from tests.gpu.threads import ThreadCommunicator

_here = threading.local()  # ranks are threads


class Graph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def replay(self) -> None:
        with torch.no_grad():
            for call in self.calls:
                call()

    def reset(self) -> None:
        self.calls = []

    def register_generator_state(self, generator: Any) -> None:
        cuda_rules.register(generator)

    def pool(self) -> tuple[int, int]:
        return 0, 1


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)

        def again() -> None:
            for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        _here.graph.calls.append(again)
        return result


class GraphCommunicator(ThreadCommunicator):
    """A collective that is called within a capture runs at each replay, and not before."""

    def _exchange(self, name: str, value: Any) -> list[Any]:
        if getattr(_here, "graph", None) is not None:
            return [value] * self.world_size
        return super()._exchange(name, value)

    def all_reduce(self, send: Any, recv: Any, op: Any, *, async_op: bool = False) -> Any:
        source, target = (each.numpy() if isinstance(each, torch.Tensor) else each for each in (send, recv))
        again = super().all_reduce
        if getattr(_here, "graph", None) is not None:
            _here.graph.calls.append(lambda: again(source, target, op))
        return again(source, target, op)

    def all_gather(self, send: Any, recv: Any, *, async_op: bool = False) -> Any:
        source, target = (each.numpy() if isinstance(each, torch.Tensor) else each for each in (send, recv))
        again = super().all_gather
        if getattr(_here, "graph", None) is not None:
            _here.graph.calls.append(lambda: again(source, target))
        return again(source, target)

    def before_end(self, release: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None:
        cuda_rules.synchronise()


def _unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    """NCCL reads the GPU's memory within a capture too, while the ranks here meet on NumPy arrays."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return call


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``capture_step`` capture modules that are on the CPU."""

    @contextlib.contextmanager
    def graph(graph: Graph, **options: Any) -> Iterator[None]:
        kept, drawn = [tensor.detach().clone() for tensor in _here.state()], torch.get_rng_state()
        _here.graph = graph
        try:
            with cuda_rules.capturing(), _Recorder():
                yield
        finally:
            _here.graph = None
            torch.set_rng_state(drawn)
            with torch.no_grad():
                for tensor, before in zip(_here.state(), kept, strict=True):
                    tensor.copy_(before)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", cuda_rules.synchronise)
    for name in ("reduce", "all_gather", "all_reduce"):
        monkeypatch.setattr(CommStream, name, _unseen(getattr(CommStream, name)))
    monkeypatch.setattr(capture, "free_generators", lambda device, others: None)
    monkeypatch.setattr(capture, "is_recording", lambda device: getattr(_here, "graph", None) is not None)
    monkeypatch.setattr(capture.TrainingStep, "obstacle", lambda step: None)
    monkeypatch.setattr(
        CommStream, "capturing", lambda comm_stream: getattr(_here, "graph", None) is not None
    )


def watch(model: Any, optimizer: Any) -> None:
    """What a capture must leave as it was, of this thread's rank."""
    _here.state = lambda: [
        *model.parameters(),
        *model.buffers(),
        *(v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)),
    ]
