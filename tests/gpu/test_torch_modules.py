"""DataParallel around modules that do what modules may do: with their buffers, weights, graphs and states."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.gpu.test_torch_data_parallel import (  # noqa: E402
    batch_of,
    gradients_of,
    linear_net,
    loss_function,
    small_net,
)
from tests.gpu.threads import ThreadCommunicator, run_ranks  # noqa: E402
from worker.errors import ArrayError  # noqa: E402
from worker.torch_data_parallel import DataParallel  # noqa: E402


def loss_of(model: Any, seed: int, communicator: ThreadCommunicator) -> Any:
    """The loss of this rank's part of a batch of eight."""
    images, labels = batch_of(8, seed)
    part = slice(communicator.rank, None, communicator.world_size)
    return loss_function(model(images[part]), labels[part])


def whole_gradients(seed: int, module: Any = None) -> list[Any]:
    """Those of one process on the whole batch."""
    alone = linear_net() if module is None else module
    images, labels = batch_of(8, seed)
    loss_function(alone(images), labels).backward()
    return gradients_of(alone)


def assert_close(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- buffers


class Counting(torch.nn.Module):  # type: ignore[misc,name-defined]
    """It knows its buffer under another name, by which it changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(3))
        self.all_counts = [self.count]

    def forward(self, x: Any) -> Any:
        self.all_counts[0].add_(1)
        return self.layer(x) * self.count


def test_a_buffer_stays_the_tensor_that_the_module_holds_elsewhere() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(Counting(), communicator=communicator)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
        return model.module.count.tolist()

    assert run_ranks(2, one) == [[2, 2, 2]] * 2


def test_a_buffer_that_requires_a_gradient_gets_one() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        module = Counting()
        module.count.requires_grad_()
        module.all_counts = [torch.zeros(3)]
        model = DataParallel(module, communicator=communicator)
        model(torch.ones(2, 3)).sum().backward()
        return module.count.is_leaf and module.count.grad is not None

    assert all(run_ranks(2, one))


class Growing(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.register_buffer("memory", torch.zeros(1, 3))

    def forward(self, x: Any) -> Any:
        self.memory = torch.cat([self.memory, x.detach()])
        return self.layer(x)


def test_a_buffer_of_another_shape_than_before_is_refused() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(Growing(), communicator=communicator)
        words = r"'memory' of a Growing was float32\[1, 3\] on cpu .* now is float32\[2, 3\].*Wrap the module anew"
        with pytest.raises(ArrayError, match=words):
            model(torch.ones(1, 3)).sum().backward()
        model = DataParallel(Growing(), communicator=communicator, broadcast_buffers=False)
        model(torch.ones(1, 3)).sum().backward()

    run_ranks(2, one)
