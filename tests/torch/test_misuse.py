"""DataParallel where users do what is easily done wrong: right results, or an error in words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint

from muster.errors import ArrayError, CollectiveMismatchError, SettingsError, WorkerError
from muster.torch.data_parallel import DataParallel
from muster.torch.pass_counter import RankNumbers
from muster.torch.sharded_optimizer import ShardedOptimizer
from muster.torch.state import TorchTrainingState
from tests.gpu.threads import ThreadCommunicator, run_ranks
from tests.torch.test_data_parallel import batch_of, linear_net, loss_function, small_net
from tests.worker.session.scripted import stub_communicator


class Brittle(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Its backward pass can be made to fail half way."""

    def __init__(self) -> None:
        super().__init__()
        self.net = linear_net()
        self.breaks = False

    def forward(self, images: Any) -> Any:
        hidden = self.net[2](self.net[1](self.net[0](images)))
        if hidden.requires_grad:
            hidden.register_hook(self._break)
        return self.net[3](hidden)

    def _break(self, gradient: Any) -> None:
        if self.breaks:
            raise RuntimeError("out of memory, say")


def loss_of(model: Any, seed: int, samples: int = 4) -> Any:
    images, labels = batch_of(samples, seed)
    return loss_function(model(images.to(next(model.module.parameters()).dtype)).float(), labels)


def break_off(model: Any) -> None:
    model.module.breaks = True
    with pytest.raises(RuntimeError, match="out of memory, say"):
        loss_of(model, 1).backward()
    model.module.breaks = False


def gradients(model: Any) -> list[Any]:
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_after_a_backward_pass_that_broke_off_the_next_one_is_refused(bucket_bytes: int) -> None:
    """Else its gradients would stay this rank's own, and nobody would know."""

    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(
            Brittle(), communicator=communicator, bucket_bytes=bucket_bytes, first_bytes=bucket_bytes
        )
        loss_of(model, 0).backward()
        break_off(model)
        for _ in range(2):
            model.zero_grad()
            with pytest.raises(WorkerError, match="the previous pass failed"):
                loss_of(model, 2).backward()

    run_ranks(2, one)


class Fails(torch.autograd.Function):  # type: ignore[misc,name-defined]
    """The first thing that a backward pass comes to."""

    @staticmethod
    def forward(context: Any, tensor: Any) -> Any:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        raise RuntimeError("out of memory, say")


class FailsAtOnce(Brittle):
    """Its backward pass breaks before any gradient is there, or its forward pass does."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, images: Any) -> Any:
        if self.breaks and self.where == "forward":
            raise RuntimeError("out of memory, say")
        output = super().forward(images)
        return Fails.apply(output) if self.breaks and self.where == "top" else output


def broken_pass(model: Any, where: str) -> None:
    """A training pass that raises, or is given up, before any gradient is there."""
    model.module.breaks = where in ("forward", "top")
    with contextlib.suppress(RuntimeError):
        output = loss_of(model, 1)
        if where == "loss":
            Fails.apply(output).backward()
        elif where != "skipped":
            output.backward()
    model.module.breaks = False


WHERE = ("forward", "top", "loss", "skipped")


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "options", [{}, {"gradients_mean": False}, {"weights": "bf16"}, {"bucket_bytes": 64}]
)
def test_a_rank_that_goes_on_after_a_pass_that_failed_is_found_in_its_next_step(
    where: str, options: dict[str, Any]
) -> None:
    """Its gradients meet those of the others' step before: all would average what is not of one step."""

    def one(communicator: ThreadCommunicator) -> str:
        model = DataParallel(FailsAtOnce(where), communicator=communicator, **options)
        for step in range(3):
            model.zero_grad()
            loss_of(model, step).backward()
        if communicator.rank == 1:
            broken_pass(model, where)
        with pytest.raises(CollectiveMismatchError) as caught:
            loss_of(model, 3).backward()
        with pytest.raises(CollectiveMismatchError, match="different steps"):  # also for who catches this
            loss_of(model, 4).backward()
        model.rebind(communicator)
        loss_of(model, 5).backward()
        return str(caught.value)

    words = (
        "gradients of different steps: rank 1 (w1 on h) left a training pass unfinished and began the next"
    )
    assert all(words in said for said in run_ranks(3, one))


@pytest.mark.parametrize("where", WHERE)
def test_passes_that_all_ranks_leave_unfinished_are_their_affair(where: str) -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(FailsAtOnce(where), communicator=communicator)
        for step in range(3):
            model.zero_grad()
            loss_of(model, step).backward()
            broken_pass(model, where)
        return gradients(model)

    first, second = run_ranks(2, one)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


class Repeats(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Parts that are used by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: Any, part: str = "first") -> Any:
        return {"out": (getattr(self, part)(x), None)}


def test_ranks_may_use_the_module_as_often_as_they_like_in_a_step() -> None:
    """Recurrent in one rank and not in another, evaluated on one rank alone, accumulated unevenly."""

    def one(communicator: ThreadCommunicator) -> Any:
        torch.manual_seed(0)
        model = DataParallel(Repeats(), communicator=communicator, bucket_bytes=64, first_bytes=64)
        for step in range(4):
            x = torch.ones(2, 4)
            for _ in range(1 + step * communicator.rank):
                x = model(x)["out"][0]
            if communicator.rank or step != 2:
                x = model(x, "second")["out"][0]
            for _ in range(communicator.rank):
                with torch.no_grad():
                    model(x)
                model.eval()
                model(x)
                model.train()
                with model.no_sync():
                    model(x)  # dropped
                    model(x)["out"][0].sum().backward(retain_graph=True)
            x.sum().backward()
        losses = [model(torch.ones(2, 4))["out"][0].sum() for _ in range(2)]
        losses[1].backward()
        losses[0].backward()
        return gradients(model)

    first, second = run_ranks(2, one)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


@pytest.mark.parametrize("weights", [None, "bf16"])
def test_rebind_forgets_the_gradients_of_a_pass_that_broke_off(weights: str | None) -> None:
    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(Brittle(), communicator=communicator, weights=weights)
        loss_of(model, 0).backward()
        expected = gradients(model)
        model.zero_grad()
        break_off(model)
        model.rebind(communicator)
        loss_of(model, 0).backward()
        for ours, theirs in zip(gradients(model), expected, strict=True):
            assert torch.equal(ours, theirs)

    run_ranks(2, one)


def test_masters_accumulate_over_passes_that_are_not_cleared() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(linear_net(), communicator=communicator, weights="bf16")
        loss_of(model, 0).backward()
        single = gradients(model)
        loss_of(model, 0).backward()
        for ours, once in zip(gradients(model), single, strict=True):
            torch.testing.assert_close(ours, 2 * once)
        for parameter in model.parameters():
            parameter.grad.zero_()  # zero_grad(set_to_none=False)
        loss_of(model, 0).backward()
        for ours, once in zip(gradients(model), single, strict=True):
            torch.testing.assert_close(ours, once)

    run_ranks(2, one)


def test_zero_grad_clears_what_no_sync_accumulated_for_masters() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(linear_net(), communicator=communicator, weights="bf16")
        loss_of(model, 0).backward()
        expected = gradients(model)
        with model.no_sync():
            loss_of(model, 1).backward()
        model.zero_grad()
        loss_of(model, 0).backward()
        for ours, theirs in zip(gradients(model), expected, strict=True):
            assert torch.equal(ours, theirs)

    run_ranks(2, one)


def test_an_optimizer_made_of_parameters_trains_the_masters() -> None:
    def one(communicator: ThreadCommunicator) -> tuple[float, float]:
        model = DataParallel(linear_net(), communicator=communicator, weights="bf16")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        first = loss_of(model, 0)
        for _ in range(10):
            optimizer.zero_grad()
            loss_of(model, 0).backward()
            optimizer.step()
        return float(first.detach()), float(loss_of(model, 0).detach())

    for first, last in run_ranks(2, one):
        assert last < first / 2


def test_a_state_of_another_models_optimizer_is_refused() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(linear_net(), communicator=communicator, weights="bf16", elastic=True)
        optimizer = torch.optim.SGD(model.module.parameters(), lr=0.5)
        with pytest.raises(SettingsError, match=r"make it of model\.parameters\(\)"):
            TorchTrainingState(model, optimizer, None)  # type: ignore[arg-type]

    run_ranks(1, one)


class Tied(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


def test_a_shared_weight_is_saved_exactly_under_each_of_its_names() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        module = Tied()
        weight = module.first.weight.detach().clone()
        model = DataParallel(module, communicator=communicator, weights="bf16")
        bare = Tied()
        bare.load_state_dict(model.state_dict())
        assert torch.equal(bare.first.weight, weight)
        model.load_state_dict({name: value + 1 / 3 for name, value in model.state_dict().items()})
        assert torch.equal(model.state_dict()["second.weight"], weight + 1 / 3)

    run_ranks(1, one)


def test_loading_a_part_leaves_the_other_masters_exact() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(linear_net(), communicator=communicator, weights="bf16")
        model.load_state_dict({"1.bias": torch.zeros(16)}, strict=False)
        expected = linear_net().state_dict() | {"1.bias": torch.zeros(16)}
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected[name]), name

    run_ranks(1, one)


@pytest.mark.parametrize("what", ["frozen", "float64"])
def test_masters_of_what_is_not_float32_and_trained_are_refused(what: str) -> None:
    module = linear_net()
    if what == "frozen":
        module[1].weight.requires_grad_(False)
    else:
        module.double()

    def one(communicator: ThreadCommunicator) -> None:
        with pytest.raises(SettingsError, match=rf"1\.weight is {what}"):
            DataParallel(module, communicator=communicator, weights="bf16")

    run_ranks(1, one)


def test_a_buffer_of_two_layers_stays_one_and_follows_rank_zero() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        net = small_net()
        twin = torch.nn.BatchNorm2d(8)
        twin.running_mean = net[1].running_mean
        net.insert(2, twin)
        model = DataParallel(net, communicator=communicator)
        for seed in range(2):
            loss_of(model, seed + communicator.rank).backward()
        assert net[1].running_mean is net[2].running_mean
        return net[1].running_mean.clone()

    first, second = run_ranks(2, one)
    assert torch.equal(first, second) and bool(first.any())


def test_a_second_wrapper_takes_the_place_of_the_first() -> None:
    def one(communicator: ThreadCommunicator) -> list[tuple[str, int]]:
        module = linear_net()
        DataParallel(module, communicator=communicator)
        model = DataParallel(module, communicator=communicator)
        begin = len(communicator.calls)
        loss_of(model, communicator.rank).backward()
        return communicator.calls[begin:]

    (calls, _) = run_ranks(2, one)
    numbers = sum(parameter.numel() for parameter in linear_net().parameters())
    assert numbers <= sum(size for name, size in calls if name == "all_reduce") < 2 * numbers


def test_training_before_anything_has_joined_is_refused() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(linear_net(), communicator=communicator, elastic=True)
        with pytest.raises(WorkerError, match=r"nothing has joined it.*ElasticLoop"):
            loss_of(model, 0).backward()
        model.rebind(communicator, source=0)
        loss_of(model, 0).backward()

    run_ranks(2, one)


class Checkpointed(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Its last layers are computed again within the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.net = linear_net()
        self.reentrant = reentrant

    def forward(self, images: Any) -> Any:
        return checkpoint(self.net[2:], self.net[:2](images), use_reentrant=self.reentrant)


@pytest.mark.parametrize("options", [{"gradients_mean": False}, {"weights": "bf16"}, {}])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_pass_within_a_pass_is_right_or_refused(options: dict[str, Any], reentrant: bool) -> None:
    def one(communicator: ThreadCommunicator, module: Any) -> list[Any]:
        model = DataParallel(module, communicator=communicator, **options)
        for _ in range(2):
            model.zero_grad()
            loss_of(model, communicator.rank).backward()
        return gradients(model)

    refused = bool(reentrant and options)
    with pytest.raises(WorkerError, match="use_reentrant=False") if refused else contextlib.nullcontext():
        found = run_ranks(2, lambda communicator: one(communicator, Checkpointed(reentrant)))
        expected = run_ranks(2, lambda communicator: one(communicator, linear_net()))
        for ours, theirs in zip(found[0], expected[0], strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.fixture
def process_group() -> Iterator[None]:
    """Of this process alone; what torch divides needs one."""
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("needs torch 2.6: fully_shard")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_module_that_fsdp_has_divided_is_refused_by_the_parameters_name(process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    def one(communicator: ThreadCommunicator) -> None:
        module = linear_net()
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        fully_shard(module[3], mesh=mesh)
        with pytest.raises(SettingsError, match=r"3\.weight is divided among ranks \(by FSDP or tensor"):
            DataParallel(module, communicator=communicator)
        with pytest.raises(SettingsError, match=r"ShardedOptimizer takes modules of which each rank holds"):
            ShardedOptimizer(
                module, communicator=communicator, make=lambda part: torch.optim.SGD(part, lr=0.1)
            )

    run_ranks(1, one)


def test_a_module_that_fsdp_divides_after_it_was_wrapped_is_refused(process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(linear_net(), communicator=communicator)
        fully_shard(model.module, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(WorkerError, match=r"1\.weight \(and 3 more\) was replaced"):
            loss_of(model, 0)

    run_ranks(1, one)


class Rows(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Its gradient is sparse, which no layer says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.embedding(x, self.weight, sparse=True)


def test_a_sparse_gradient_that_no_layer_announces_is_refused() -> None:
    """Other ranks could not know that it comes."""

    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(Rows(), communicator=communicator)
        with pytest.raises(ArrayError, match=r"shape \(5, 4\) is sparse.*Embedding and EmbeddingBag layers"):
            model(torch.tensor([1, 2])).sum().backward()

    run_ranks(1, one)


class TiedRows(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Rows of a weight that a dense layer has too, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(5, 4, sparse=True)

    def forward(self, x: Any, dense: bool) -> Any:
        hidden = self.rows(x)
        return hidden @ self.rows.weight.t() if dense else hidden


@pytest.mark.parametrize("mean", [True, False])
def test_a_sparse_gradient_that_is_dense_on_one_rank_is_the_sum_of_both(mean: bool) -> None:
    def made() -> Any:
        module = TiedRows()
        torch.nn.init.eye_(module.rows.weight)
        return module

    def gradient(model: Any, rank: int) -> Any:
        model(torch.tensor([rank, 1, 1]), rank == 1).square().sum().backward()

    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(made(), communicator=communicator, gradients_mean=mean)
        gradient(model, communicator.rank)
        return model.module.rows.weight.grad

    expected = torch.zeros(5, 4)
    for rank in range(3):
        alone = made()
        gradient(alone, rank)
        expected += alone.rows.weight.grad.to_dense() / (3 if mean else 1)
    for found in run_ranks(3, one):
        assert found.layout is torch.strided
        torch.testing.assert_close(found, expected)


def test_sparse_gradients_are_weighted_by_uneven_batches_and_none_is_left_where_no_rank_has_one() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(torch.nn.Embedding(5, 4, sparse=True), communicator=communicator)
        samples = communicator.rank
        with model.uneven_batch(samples):
            if samples:
                model(torch.tensor([samples] * samples)).sum(1).mean().backward()
        weighted = model.module.weight.grad.to_dense()[:, 0].tolist()
        model.zero_grad()
        with model.uneven_batch(0):
            pass
        return weighted, model.module.weight.grad

    for weighted, nothing in run_ranks(3, one):
        assert weighted == [0, pytest.approx(1 / 3), pytest.approx(2 / 3), 0, 0]
        assert nothing is None


def test_masters_of_what_has_sparse_gradients_are_refused() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        module = torch.nn.Embedding(5, 4, sparse=True)
        with pytest.raises(SettingsError, match="which sparse gradients cannot train"):
            DataParallel(module, communicator=communicator, weights="bf16")

    run_ranks(1, one)


def test_local_gradients_are_let_go_when_they_are_packed() -> None:
    """Kept until the end, they would double the memory that gradients take."""

    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(linear_net(), communicator=communicator, bucket_bytes=64, first_bytes=64)
        seen = []

        def look(gradient: Any) -> None:
            bucket = model.buckets[0]
            inside = [view.data_ptr() for view in bucket.views]
            seen.append([p.grad is not None and p.grad.data_ptr() in inside for p in bucket.parameters])

        loss_of(model, 0).backward()
        model.zero_grad()
        # Within the backward pass, after the last layer and before the first.
        model.module[2].register_forward_hook(
            lambda layer, given, hidden: hidden.register_hook(look) and None
        )
        loss_of(model, 0).backward()
        assert seen and all(all(each) for each in seen)

    run_ranks(1, one)


def test_numbers_that_the_host_reads_amid_a_copy_are_not_taken_for_different_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU writes them into the host's memory one by one, while the host looks whenever it likes."""
    copy = torch.Tensor.copy_
    numbers = RankNumbers(stub_communicator(0, 3), torch.zeros(3))
    looks = []

    def slowly(target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        for place in range(len(source)):
            copy(target[place], source[place])
            numbers.check()
            looks.append(target.tolist())
        return target

    monkeypatch.setattr(torch.Tensor, "copy_", slowly)
    for number in (1.0, 2.0, 2.0, 5.0):
        numbers.take(torch.full((3,), number))
    assert [2.0, 1.0, 1.0] in looks
    with pytest.raises(CollectiveMismatchError, match=r"rank 1 \(n1"):
        numbers.take(torch.tensor([6.0, 5.0, 6.0]))
