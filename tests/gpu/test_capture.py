"""capture_step where nothing can be captured: what a step computes, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.errors import ArrayError, SettingsError
from muster.torch.capture import CaptureError, capture_step, host_bound
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


def test_strict_raises_what_otherwise_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CaptureError, match="the module is on the cpu"):
        step_of(linear_net(), strict=True)
    assert not caplog.records
    step = step_of(linear_net())
    assert step.reason == "the module is on the cpu" and not step.captured
    assert "training steps run eagerly: the module is on the cpu" in caplog.text


def test_a_step_may_be_kept_eager_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    step = step_of(linear_net(), capture=False)
    assert step.reason == "capture is switched off" and not caplog.records


def test_a_batch_that_was_fed_before_is_trained_on() -> None:
    net, fed = linear_net(), linear_net()
    step_of(net)(*batch_of(4, 0))
    step = step_of(fed)
    step.feed(*batch_of(4, 0))
    step()
    for ours, theirs in zip(net.parameters(), fed.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(SettingsError, match=r"feed\(\) before"):
        step()


def test_the_loss_that_is_shown_is_the_mean_over_ranks() -> None:
    def one(communicator: ThreadCommunicator) -> tuple[float, float]:
        step = step_of(DataParallel(linear_net(), communicator=communicator))
        loss = step(*batch_of(4, communicator.rank))
        return float(loss), step.mean_over_ranks(loss)

    found = run_ranks(3, one)
    mean = sum(own for own, _ in found) / 3
    assert len({own for own, _ in found}) == 3 and len({shown for _, shown in found}) == 1
    assert found[0][1] == pytest.approx(mean)
    alone = step_of(linear_net())
    loss = alone(*batch_of(4, 0))
    assert alone.mean_over_ranks(loss) == float(loss)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_steps": 1}, r"at least 2 \(optimizers make their state then\), not 1"),
        ({"accumulate": 0}, "at least 1, not 0"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        step_of(linear_net(), **options)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("SGD", {"lr": 0.1}, "SGD reads its learning rate on the host: make it with fused=True"),
        ("SGD", {"lr": 0.1, "fused": True}, None),
        ("Adafactor", {}, "Adafactor reads its learning rate on the host"),
        ("AdamW", {"fused": True}, "AdamW reads its step count on the host: make it with capturable=True"),
        ("AdamW", {"fused": True, "capturable": True}, None),
        ("NAdam", {"capturable": True}, None),
        ("LBFGS", {}, "LBFGS decides on the host how often to evaluate the loss"),
    ],
)
def test_optimizers_that_need_the_host_in_each_step_are_known(
    kind: str, options: dict[str, Any], words: str | None
) -> None:
    make = getattr(torch.optim, kind, None)
    if make is None:
        pytest.skip(f"this torch has no {kind}")
    assert host_bound(make([torch.nn.Parameter(torch.zeros(2, 2))], **options)) == words


def test_another_library_s_optimizer_is_given_a_try() -> None:
    class Own(torch.optim.SGD):  # type: ignore[misc,name-defined]
        pass

    assert host_bound(Own([torch.nn.Parameter(torch.zeros(2))], lr=0.1)) is None
