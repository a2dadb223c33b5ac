"""SyncBatchNorm in a DataParallel computes what one process does on the whole batch; here among threads."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from muster.errors import SettingsError
from muster.torch.capture import capture_step
from muster.torch.data_parallel import DataParallel
from tests.gpu import graphs
from tests.gpu.threads import ThreadCommunicator, run_ranks
from tests.torch.test_capture import ranks
from tests.torch.test_data_parallel import _seeding

STEPS = 4


def images(synchronised: bool = True, **options: Any) -> Any:
    """Two normalisations, one of them first of all: its input needs no gradient."""
    kind = nn.SyncBatchNorm if synchronised else nn.BatchNorm2d
    with _seeding:
        torch.manual_seed(0)
        layers = [kind(3, **options), nn.Conv2d(3, 4, 3), kind(4, **options), nn.Linear(36, 2)]
    return nn.Sequential(*layers[:3], nn.Tanh(), nn.Flatten(), layers[3]).double()


def rows(synchronised: bool = True, **options: Any) -> Any:
    kind = nn.SyncBatchNorm if synchronised else nn.BatchNorm1d
    with _seeding:
        torch.manual_seed(0)
        first, second = nn.Linear(6, 4), nn.Linear(4, 2)
    return nn.Sequential(first, kind(4, **options), nn.Tanh(), second).double()


def train(model: Any, batches: Sequence[Any], counts: Sequence[int] | None = None, rank: int = 0) -> Any:
    """Gradients, parameters and buffers of some steps, and an output; ``counts``: samples of each rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for batch in batches:
        optimizer.zero_grad()
        if counts is None:
            output = model(batch)
            output.square().mean().backward()
        else:
            begin = sum(counts[:rank])
            with model.uneven_batch(counts[rank]):
                output = model(batch[begin : begin + counts[rank]])
                output.square().mean().backward()
        seen += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
    return [*seen, *(value.clone() for value in model.state_dict().values())], output.detach()


def batches_of(make: Any, samples: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    shape = (samples, 6) if make is rows else (samples, 3, 5, 5)
    # A mean far from zero: sums of squares would lose digits.
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + 30 for _ in range(STEPS)]


def assert_alike(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


OPTIONS = [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("counts", [(4, 4), (1, 6, 2)])
@pytest.mark.parametrize("make", [images, rows])
def test_it_is_batch_norm_of_one_process_on_the_whole_batch(
    make: Any, counts: tuple[int, ...], options: dict[str, Any]
) -> None:
    batches = batches_of(make, sum(counts))
    expected, _ = train(make(False, **options), batches)

    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(make(**options), communicator=communicator)
        return train(model, batches, counts, communicator.rank)[0]

    for found in run_ranks(len(counts), one):
        assert_alike(found, expected)


def test_even_batches_need_nothing_around_them() -> None:
    batches = batches_of(images, 8)
    expected, _ = train(images(False), batches)

    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(images(), communicator=communicator, bucket_bytes=64, first_bytes=64)
        return train(model, [batch[communicator.rank :: 2] for batch in batches])[0]

    for found in run_ranks(2, one):
        assert_alike(found, expected)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_memory_layouts_are_kept(layout: Any) -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(nn.SyncBatchNorm(3), communicator=communicator)
        given = torch.randn(4, 3, 5, 5).to(memory_format=layout).requires_grad_()
        output = model(given)
        output.sum().backward()  # an expanded gradient
        assert given.grad is not None
        return output.is_contiguous(memory_format=layout) and given.grad.is_contiguous(memory_format=layout)

    assert all(run_ranks(2, one))


def test_autocast_and_bf16_weights_compute_statistics_in_float32() -> None:
    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(8, 6, generator=generator) + 10

    def one(communicator: ThreadCommunicator, weights: str | None) -> Any:
        model = DataParallel(rows().float(), communicator=communicator, weights=weights)
        own = batch[communicator.rank :: 2]
        with torch.autocast("cpu", torch.bfloat16, enabled=weights is None):
            output = model(own if weights is None else own.bfloat16())
        output.float().square().mean().backward()
        return model.module[1].running_mean, model.module[1].weight.dtype

    alone = rows(False).float()
    with torch.autocast("cpu", torch.bfloat16):
        alone(batch)
    for weights in (None, "bf16"):
        for mean, dtype in run_ranks(2, partial(one, weights=weights)):
            torch.testing.assert_close(mean, alone[1].running_mean, rtol=1e-2, atol=1e-2)
            assert dtype == torch.float32


def test_evaluation_uses_what_was_kept_and_sends_nothing() -> None:
    batches = batches_of(images, 8)
    alone = images(False)
    train(alone, batches)

    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(images(), communicator=communicator)
        train(model, [batch[communicator.rank :: 2] for batch in batches])
        model.eval()
        begin = len(communicator.calls)
        output = model(batches[0])
        assert len(communicator.calls) == begin
        return output

    for output in run_ranks(2, one):
        torch.testing.assert_close(output, alone.eval()(batches[0]), rtol=1e-12, atol=1e-12)


def test_an_empty_batch_takes_part() -> None:
    batch = batches_of(rows, 4)[0]
    alone = rows(False)
    alone(batch).square().sum().backward()

    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(rows(), communicator=communicator, gradients_mean=False)
        model(batch if communicator.rank == 0 else batch[:0]).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    for found in run_ranks(2, one):
        assert_alike(found, [parameter.grad for parameter in alone.parameters()])


def test_a_rank_without_samples_is_refused_on_all_ranks() -> None:
    """The others would wait for its statistics."""

    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(rows(), communicator=communicator)
        words = "no samples on rank 1, and a SyncBatchNorm layer needs all ranks"
        with pytest.raises(SettingsError, match=words), model.uneven_batch(3 - 3 * communicator.rank):
            raise AssertionError("not to be entered")

    run_ranks(2, one)


@pytest.mark.parametrize("when", ["before", "after"])
def test_layers_that_are_converted_count_also_after_the_wrapping(when: str) -> None:
    batches = batches_of(images, 8)
    expected, _ = train(images(False), batches)

    def one(communicator: ThreadCommunicator) -> Any:
        module = images(False)
        if when == "before":
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        model = DataParallel(module, communicator=communicator)
        if when == "after":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return train(model, [batch[communicator.rank :: 2] for batch in batches])[0]

    for found in run_ranks(2, one):
        assert_alike(found, expected)


def test_another_generations_communicator_is_used() -> None:
    batches = batches_of(rows, 8)

    def first(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(rows(), communicator=communicator)
        train(model, [batch[communicator.rank :: 2] for batch in batches[:2]])
        return model

    models = run_ranks(2, first)
    expected = copy.deepcopy(models[0].module)
    expected, _ = train(nn.Sequential(expected), batches[2:])

    def second(communicator: ThreadCommunicator) -> Any:
        model = models[communicator.rank]
        model.rebind(communicator)
        return train(model, [batch[communicator.rank :: 2] for batch in batches[2:]])[0]

    for found in run_ranks(2, second):
        assert_alike(found, expected)


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_the_module_is_what_torch_made(copies: Any) -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(rows(), communicator=communicator)
        copied = copies(model.module)
        begin = len(communicator.calls)
        copied(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
        assert len(communicator.calls) == begin
        return type(copied[1]), repr(copied) == repr(model.module)

    assert run_ranks(1, one) == [(nn.SyncBatchNorm, True)]


def test_a_layer_of_a_class_of_its_own_is_refused() -> None:
    class Own(nn.SyncBatchNorm):  # type: ignore[misc]
        pass

    def one(communicator: ThreadCommunicator) -> None:
        with pytest.raises(
            SettingsError, match=r"0 is a Own, a SyncBatchNorm that DataParallel does not know"
        ):
            DataParallel(nn.Sequential(Own(3)), communicator=communicator)

    run_ranks(1, one)


def test_captured_steps_give_what_eager_ones_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read on the host: a graph holds all of it."""
    graphs.install(monkeypatch)
    batches = batches_of(rows, 8)

    def one(communicator: graphs.GraphCommunicator, capture: bool) -> Any:
        model = DataParallel(rows(), communicator=communicator, broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9, fused=True)
        graphs.watch(model, optimizer)
        step = capture_step(lambda x: model(x).square().mean(), model, optimizer, capture=capture)
        for batch in [*batches, *batches]:
            step(batch[communicator.rank :: 2])
        assert step.captured is capture
        return [value.clone() for value in model.state_dict().values()]

    captured, eager = (ranks(2, partial(one, capture=how)) for how in (True, False))
    for found, expected in zip(captured, eager, strict=True):
        assert_alike(found, expected)
