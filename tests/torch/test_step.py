"""The work of a step, which runs eagerly here: a batch in parts, and the mean over ranks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.errors import ArrayError
from muster.torch.capture import capture_step
from muster.torch.data_parallel import DataParallel
from tests.gpu.threads import ThreadCommunicator, run_ranks
from tests.torch.test_data_parallel import batch_of, linear_net, loss_function


def step_of(model: Any, rate: float = 1.0, **options: Any) -> Any:
    """A step of plain SGD: with a rate of 1 parameters move by the gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return capture_step(
        lambda images, labels: loss_function(model(images), labels), model, optimizer, **options
    )


def moved(samples: int, **options: Any) -> tuple[Any, list[Any]]:
    """Loss and parameters after one step."""
    net = linear_net()
    loss = step_of(net, **options)(*batch_of(samples, 0))
    return loss, [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize(("samples", "parts"), [(4, 2), (5, 2), (7, 3), (5, 4), (2, 3), (1, 2)])
def test_accumulated_parts_give_what_the_whole_batch_gives(
    samples: int, parts: int, clip_norm: float | None
) -> None:
    loss, expected = moved(samples, clip_norm=clip_norm)
    accumulated, found = moved(samples, accumulate=parts, clip_norm=clip_norm)
    torch.testing.assert_close(accumulated, loss)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_batch_is_cut_into_as_many_parts_as_asked_for() -> None:
    net, sizes = linear_net(), []

    def loss(images: Any, labels: Any) -> Any:
        sizes.append(len(images))
        return loss_function(net(images), labels)

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    capture_step(loss, net, optimizer, accumulate=3)(*batch_of(7, 0))
    assert sizes == [3, 3, 1]


def test_accumulating_ranks_reduce_once_and_get_the_mean_over_all_samples() -> None:
    images, labels = batch_of(10, 1)
    whole = linear_net()
    step_of(whole)(images, labels)

    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(linear_net(), communicator=communicator)
        step = step_of(model, accumulate=2)
        mine = slice(communicator.rank, None, 2)
        before = len(communicator.calls)
        step(images[mine], labels[mine])
        reductions = [name for name, _ in communicator.calls[before:]].count("all_reduce")
        return reductions, len(model.buckets), [p.detach().clone() for p in model.parameters()]

    for reductions, buckets, parameters in run_ranks(2, one):
        assert reductions == buckets
        for ours, expected in zip(parameters, whole.parameters(), strict=True):
            torch.testing.assert_close(ours, expected.detach(), rtol=1e-5, atol=1e-6)


def test_tensors_that_cannot_be_cut_alike_are_refused() -> None:
    images, labels = batch_of(4, 0)
    step = step_of(linear_net(), accumulate=2)
    for batch in ((images, labels[:3]), (images, torch.tensor(1.0)), (images[:0], labels[:0])):
        with pytest.raises(ArrayError, match=r"accumulate=2 .* first axis.*shapes \("):
            step(*batch)
    step_of(linear_net(), accumulate=1)(images, labels)
