"""What a captured step asks: a wrapped module answers, a bare one has an adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.torch.captured_model import BareModule, captured_model
from muster.torch.data_parallel import DataParallel
from tests.gpu.threads import ThreadCommunicator, run_ranks
from tests.torch.test_data_parallel import batch_of, linear_net
from tests.torch.test_step import step_of


@pytest.mark.parametrize("compiled", [False, True])
def test_a_wrapped_module_answers_for_itself_compiled_or_not(compiled: bool) -> None:
    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(linear_net(), communicator=communicator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = torch.compile(model, backend="eager") if compiled else model
        asked = captured_model(given, optimizer)
        assert asked is given and asked.communicator is communicator
        asked.updates_last = True  # as a captured step tells the state of an elastic loop
        assert model.updates_last

    run_ranks(1, one)


class Wrapped(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Another library's wrapper, which accumulates and clips by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = linear_net()
        self.calls: list[str] = []

    def forward(self, x: Any) -> Any:
        self.calls.append("forward")
        return self.net(x)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.calls.append("no_sync")
        yield

    def clip_grad_norm_(self, max_norm: float) -> None:
        self.calls.append(f"clip to {max_norm}")


def test_another_librarys_wrapper_accumulates_and_clips_by_itself() -> None:
    model = Wrapped()
    step_of(model, accumulate=3, clip_norm=0.5)(*batch_of(6, 0))
    assert model.calls == ["no_sync", "forward", "no_sync", "forward", "forward", "clip to 0.5"]


def test_of_a_bare_module_what_the_optimizer_trains_is_clipped() -> None:
    """That may be less than the module has, whose other gradients count for no norm then."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    trained = list(net[0].parameters())
    asked = captured_model(net, torch.optim.SGD(trained, lr=0.1))
    assert isinstance(asked, BareModule) and asked.communicator is None
    asked.clip_grad_norm_(1.0)
    assert torch.cat([each.grad.flatten() for each in trained]).norm().item() == pytest.approx(1.0, rel=1e-4)
    assert all(bool((each.grad == 3.0).all()) for each in net[1].parameters())
