"""One of the two wrappers, and how a case trains with it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from tests.contracts.agents import Place


class Side:
    """One of the two wrappers, for a case; ours with ``caps`` of its own."""

    def __init__(self, place: Place, ours: bool, **caps: int) -> None:
        self.ours, self.rank, self.communicator, self._caps = ours, place.comm.rank, place.comm, caps
        self.seen: dict[str, Any] = {}

    def wrap(self, module: Any, *, unused: bool = False, small: bool = False) -> Any:
        """The wrapped module; ``unused``: not all ranks use all parameters; ``small``: in many buckets."""
        if self.ours:
            from muster.torch.data_parallel import DataParallel

            caps: dict[str, Any] = dict(self._caps)
            if small:
                caps |= {"bucket_bytes": 256, "first_bytes": 64, "last_bytes": 64}
            return DataParallel(module, communicator=self.communicator, **caps)
        cap = {"bucket_cap_mb": 1e-4} if small else {}
        return nn.parallel.DistributedDataParallel(module, find_unused_parameters=unused, **cap)

    def session(self) -> Any:
        """Inside, this process is in a job, as it is where a wrapper is read from a file."""
        session = SimpleNamespace(communicator=self.communicator)
        return mock.patch("muster.worker.runtime.current", lambda: session)

    def note(self, name: str, value: Any) -> None:
        """What must be the same on both sides; of a module parameters, gradients, and rank 0's buffers."""
        if isinstance(value, nn.Module):
            for key, parameter in value.named_parameters():
                self.note(f"{name}.{key}", parameter)
                self.note(f"{name}.{key}.grad", parameter.grad)
            for key, buffer in value.named_buffers() if self.rank == 0 else ():
                self.note(f"{name}.{key}", buffer)
            return
        if isinstance(value, torch.Tensor) and value.is_sparse:
            self.note(f"{name}.layout", str(value.layout))
            value = value.to_dense()
        kept = value.detach().clone() if isinstance(value, torch.Tensor) else value
        self.seen[f"{len(self.seen)} {name}"] = kept

    def batch(self, step: int, *shape: int, dtype: Any = None) -> Any:
        """This rank's numbers of a step, the same on both sides."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(shape, generator=generator, dtype=dtype)


def loss_of(output: Any) -> Any:
    """A loss of whatever a module returns."""
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return sum(loss_of(each) for each in output if each is not None)
    if output.is_complex():
        output = torch.view_as_real(output)
    return (output.double() if output.dtype == torch.float64 else output.float()).square().mean()


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def train(
    side: Side,
    module: Any,
    give: Callable[[Side, int], Any],
    *,
    optimizer: Callable[[Any], Any] = sgd,
    steps: int = 3,
    step_of: Callable[[Any, Any, Any], Any] | None = None,
    between: Callable[[Side, Any, Any, int], None] | None = None,
    **wrapping: Any,
) -> Any:
    """Trains, and notes losses, gradients and parameters."""
    model = side.wrap(module, **wrapping)
    made = optimizer(model.parameters())
    torch.manual_seed(100 + side.rank)
    for step in range(steps):
        given = give(side, step)
        made.zero_grad()
        if step_of is not None:
            loss = step_of(model, made, given)
        else:
            loss = loss_of(model(*given) if isinstance(given, tuple) else model(given))
            loss.backward()
        side.note(f"loss {step}", loss)
        side.note(f"step {step}", module)
        made.step()
        if between is not None:
            between(side, model, made, step)
    side.note("end", module)
    return model


def floats(*shape: int, dtype: Any = None) -> Callable[[Side, int], Any]:
    return lambda side, step: side.batch(step, *shape, dtype=dtype)


def several(*shapes: tuple[int, ...]) -> Callable[[Side, int], Any]:
    return lambda side, step: tuple(side.batch(step + 50 * n, *shape) for n, shape in enumerate(shapes))


def integers(high: int, *shape: int) -> Callable[[Side, int], Any]:
    def give(side: Side, step: int) -> Any:
        generator = torch.Generator().manual_seed(1000 * step + side.rank)
        return torch.randint(0, high, shape, generator=generator)

    return give


def net() -> Any:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def images() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * 9, 5),
    )


def back(output: Any) -> Any:
    loss = loss_of(output)
    loss.backward()
    return loss
