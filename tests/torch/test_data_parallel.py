"""DataParallel on the CPU, among threads: what must hold whatever the backend."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.errors import ArrayError, SettingsError
from muster.torch.data_parallel import DataParallel
from tests.gpu.threads import ThreadCommunicator, run_ranks


class Branches(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Four parameters; which of ``left`` and ``right`` are used is the caller's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.left = torch.nn.Linear(4, 2, bias=False)
        self.right = torch.nn.Linear(4, 2, bias=False)
        self.never = torch.nn.Linear(4, 2, bias=False)

    def forward(self, x: Any, way: str = "left") -> Any:
        hidden = self.first(x)
        return self.left(hidden) if way == "left" else self.right(hidden)


_seeding = threading.Lock()  # ranks are threads here, and torch's generator is the process's


def small_net() -> Any:
    with _seeding:
        torch.manual_seed(3)
        return _small_net()


def _small_net() -> Any:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 16, 5),
    )


def batch_of(samples: int, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(samples, 3, 6, 6, generator=generator),
        torch.randint(0, 5, (samples,), generator=generator),
    )


def linear_net() -> Any:
    with _seeding:
        torch.manual_seed(5)
        return _linear_net()


def _linear_net() -> Any:
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(108, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5)
    )


def gradients_of(model: Any) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


loss_function = torch.nn.functional.cross_entropy

packed_and_in_place = pytest.mark.parametrize("in_place_bytes", [1 << 30, 1], ids=["packed", "in place"])


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_gradients_are_those_of_the_whole_batch(bucket_bytes: int) -> None:
    images, labels = batch_of(12, 0)
    whole = linear_net()
    loss_function(whole(images), labels).backward()

    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(
            linear_net(), communicator=communicator, bucket_bytes=bucket_bytes, first_bytes=bucket_bytes
        )
        part = slice(communicator.rank * 4, communicator.rank * 4 + 4)
        for _ in range(3):  # the second backward pass runs on rebuilt buckets
            model.zero_grad()
            loss_function(model(images[part]), labels[part]).backward()
        return gradients_of(model)

    for gradients in run_ranks(3, one):
        for ours, expected in zip(gradients, gradients_of(whole), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_gradients_are_summed_when_asked() -> None:
    images, labels = batch_of(4, 0)
    alone = linear_net()
    loss_function(alone(images), labels).backward()

    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(linear_net(), communicator=communicator, gradients_mean=False)
        loss_function(model(images), labels).backward()
        return gradients_of(model)

    for gradients in run_ranks(2, one):
        for ours, expected in zip(gradients, gradients_of(alone), strict=True):
            torch.testing.assert_close(ours, 2 * expected)


def test_every_rank_starts_with_rank_zeros_parameters_and_buffers() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        torch_net = small_net()
        with torch.no_grad():
            for tensor in (*torch_net.parameters(), torch_net[1].running_mean):
                tensor.fill_(communicator.rank + 7)
        return DataParallel(torch_net, communicator=communicator).state_dict()

    for state in run_ranks(2, one):
        assert all(bool((v == 7).all()) for k, v in state.items() if "weight" in k or k == "1.running_mean")


def test_no_sync_accumulates_and_sends_nothing() -> None:
    images, labels = batch_of(8, 1)
    whole = linear_net()
    (loss_function(whole(images), labels) * 2).backward()

    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(linear_net(), communicator=communicator)
        own = images[communicator.rank :: 2], labels[communicator.rank :: 2]
        before = len(communicator.calls)
        with model.no_sync():
            loss_function(model(own[0][:2]), own[1][:2]).backward()
        assert len(communicator.calls) == before
        loss_function(model(own[0][2:]), own[1][2:]).backward()
        return gradients_of(model)

    for gradients in run_ranks(2, one):
        for ours, expected in zip(gradients, gradients_of(whole), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@packed_and_in_place
def test_unused_parameters_count_as_zero_and_stay_without_gradient_where_no_rank_used_them(
    in_place_bytes: int,
) -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        with _seeding:
            torch.manual_seed(0)
            branches = Branches()
        caps: Any = {"bucket_bytes": 32, "first_bytes": 32, "in_place_bytes": in_place_bytes}
        model = DataParallel(branches, communicator=communicator, **caps)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(1, 4), "left" if communicator.rank == 0 else "right").sum().backward()
        return {
            name: p.grad if p.grad is None else p.grad.clone() for name, p in model.module.named_parameters()
        }

    first, second = run_ranks(2, one)
    assert first["never.weight"] is None and second["never.weight"] is None
    torch.manual_seed(0)
    alone = Branches()
    alone(torch.ones(1, 4), "left").sum().backward()
    torch.testing.assert_close(first["left.weight"], alone.left.weight.grad / 2)
    for name in ("first.weight", "left.weight", "right.weight"):
        torch.testing.assert_close(first[name], second[name])


@packed_and_in_place
def test_a_rank_without_samples_takes_part(in_place_bytes: int) -> None:
    images, labels = batch_of(5, 2)
    whole = linear_net()
    loss_function(whole(images), labels).backward()

    def one(communicator: ThreadCommunicator) -> Any:
        caps: Any = {"bucket_bytes": 512, "first_bytes": 512, "in_place_bytes": in_place_bytes}
        model = DataParallel(linear_net(), communicator=communicator, **caps)
        part = [slice(0, 4), slice(4, 5), slice(5, 5)][communicator.rank]
        with model.uneven_batch(len(labels[part])):
            if len(labels[part]):
                loss_function(model(images[part]), labels[part]).backward()
        return gradients_of(model)

    for gradients in run_ranks(3, one):
        for ours, expected in zip(gradients, gradients_of(whole), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_buffers_follow_rank_zero() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(small_net(), communicator=communicator)
        images, labels = batch_of(4, communicator.rank)
        loss_function(model(images), labels).backward()
        return {name: buffer.clone() for name, buffer in model.module.named_buffers()}

    alone = small_net()
    alone(batch_of(4, 0)[0])
    for buffers in run_ranks(2, one):
        for name, buffer in alone.named_buffers():
            torch.testing.assert_close(buffers[name], buffer)


def test_clipping_sees_the_averaged_gradient() -> None:
    images, labels = batch_of(8, 3)
    whole = linear_net()
    loss_function(whole(images), labels).backward()
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)

    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(linear_net(), communicator=communicator)
        loss_function(model(images[communicator.rank :: 2]), labels[communicator.rank :: 2]).backward()
        return model.clip_grad_norm_(0.1), gradients_of(model)

    for norm, gradients in run_ranks(2, one):
        torch.testing.assert_close(norm, expected)
        for ours, expected_gradient in zip(gradients, gradients_of(whole), strict=True):
            torch.testing.assert_close(ours, expected_gradient, rtol=1e-5, atol=1e-6)


@packed_and_in_place
def test_channels_last_gradients_keep_the_layout_of_their_parameters(in_place_bytes: int) -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        net = small_net().to(memory_format=torch.channels_last)
        model = DataParallel(net, communicator=communicator, in_place_bytes=in_place_bytes)
        images, labels = batch_of(4, communicator.rank)
        loss_function(model(images), labels).backward()
        return net[0].weight.grad.stride() == net[0].weight.stride(), gradients_of(model)

    (same, channels_last), _ = run_ranks(2, one)
    assert same
    parts = []
    for rank in range(2):
        net = small_net()
        loss_function(net(batch_of(4, rank)[0]), batch_of(4, rank)[1]).backward()
        parts.append(gradients_of(net))
    for ours, first, second in zip(channels_last, *parts, strict=True):
        torch.testing.assert_close(ours, (first + second) / 2, rtol=1e-4, atol=1e-5)


def test_large_gradients_are_reduced_where_autograd_has_put_them() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        net, places = linear_net(), {}
        for name, parameter in net.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: places.update({name: p.grad.data_ptr()})
            )
        model = DataParallel(net, communicator=communicator, in_place_bytes=16 * 108 * 4)
        images, labels = batch_of(4, communicator.rank)
        loss_function(model(images), labels).backward()
        return {name: p.grad.data_ptr() == places[name] for name, p in net.named_parameters()}

    where = {"1.weight": True, "1.bias": False, "3.weight": False, "3.bias": False}
    assert run_ranks(2, one) == [where, where]


def test_a_large_gradient_that_lies_otherwise_than_its_parameter_is_copied() -> None:
    def turn(parameter: Any) -> None:
        parameter.grad = parameter.grad.t().contiguous().t()

    def one(communicator: ThreadCommunicator) -> Any:
        net = linear_net()
        if communicator.rank == 0:
            net[1].weight.register_post_accumulate_grad_hook(turn)
        model = DataParallel(net, communicator=communicator, in_place_bytes=1)
        loss_function(model(images), labels).backward()
        return gradients_of(model)

    images, labels = batch_of(4, 0)
    alone = linear_net()
    loss_function(alone(images), labels).backward()
    for gradients in run_ranks(2, one):
        for ours, expected in zip(gradients, gradients_of(alone), strict=True):
            torch.testing.assert_close(ours, expected)


def test_mixed_precision_leaves_gradients_in_the_parameters_dtype() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(linear_net(), communicator=communicator)
        images, labels = batch_of(4, communicator.rank)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_function(model(images), labels)
        loss.backward()
        return gradients_of(model)

    first, second = run_ranks(2, one)
    for ours, theirs in zip(first, second, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)


def test_training_ends_where_one_process_on_the_whole_batch_does() -> None:
    batches = [batch_of(8, seed) for seed in range(20)]

    def train(model: Any, part: slice) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for images, labels in batches:
            optimizer.zero_grad()
            loss_function(model(images[part]), labels[part]).backward()
            optimizer.step()
        return copy.deepcopy(model.state_dict())

    expected = train(linear_net(), slice(None))

    def one(communicator: ThreadCommunicator) -> Any:
        return train(DataParallel(linear_net(), communicator=communicator), slice(communicator.rank, None, 4))

    for state in run_ranks(4, one):
        linear_net().load_state_dict(state)  # a bare module loads it
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5)


def test_different_modules_are_refused_on_all_ranks() -> None:
    def one(communicator: ThreadCommunicator) -> str:
        module = torch.nn.Linear(3, 3 + communicator.rank // 2)
        with pytest.raises(ArrayError) as caught:
            DataParallel(module, communicator=communicator)
        return str(caught.value)

    expected = (
        "the module on ranks 2, 3 differs from rank 0's: weight is float32[4, 3] on rank 2"
        " and float32[3, 3] on rank 0 (1 more differ). Build the same module on all ranks."
    )
    assert run_ranks(4, one) == [expected] * 4


def add_layer(module: Any) -> None:
    module.append(torch.nn.Linear(5, 5))


def drop_bias(module: Any) -> None:
    module[1].bias = None


def freeze(module: Any) -> None:
    module[3].weight.requires_grad_(False)


def convert(module: Any) -> None:
    module[3].double()


def with_buffer(module: Any) -> None:
    module.register_buffer("table", torch.zeros(3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_layer, "rank 1 has 4.weight, and rank 0 has none (1 more differ)"),
        (drop_bias, "rank 1 has no 1.bias"),
        (freeze, "3.weight is frozen on rank 1 and not on rank 0"),
        (convert, "3.weight is float64[5, 16] on rank 1 and float32[5, 16] on rank 0 (1 more differ)"),
        (with_buffer, "rank 1 has table, and rank 0 has none"),
    ],
)
def test_a_module_that_is_another_on_one_rank_is_refused_by_the_parameters_name(
    change: Callable[[Any], None], words: str
) -> None:
    def one(communicator: ThreadCommunicator) -> str:
        module = linear_net()
        if communicator.rank:
            change(module)
        with pytest.raises(ArrayError) as caught:
            DataParallel(module, communicator=communicator)
        return caught.value.message

    assert run_ranks(2, one) == [f"the module on rank 1 differs from rank 0's: {words}"] * 2


def test_parameters_in_another_order_are_refused() -> None:
    def one(communicator: ThreadCommunicator) -> str:
        layers = {name: torch.nn.Linear(2, 2) for name in ("ab" if communicator.rank == 0 else "ba")}
        with pytest.raises(ArrayError) as caught:
            DataParallel(torch.nn.ModuleDict(layers), communicator=communicator)
        return caught.value.message

    words = "the module on rank 1 differs from rank 0's: rank 1 has them in another order"
    assert run_ranks(2, one) == [words] * 2


def test_unknown_compression_is_refused() -> None:
    with pytest.raises(SettingsError, match="bf16"):
        DataParallel(torch.nn.Linear(1, 1), communicator=object(), compression="fp8")  # type: ignore[arg-type]


def test_bf16_weights_train_like_autocast_and_keep_float32_masters() -> None:
    batches = [batch_of(8, seed) for seed in range(10)]

    def train(communicator: ThreadCommunicator, weights: str | None) -> Any:
        model = DataParallel(small_net(), communicator=communicator, weights=weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for images, labels in batches:
            images, labels = images[communicator.rank :: 2], labels[communicator.rank :: 2]
            optimizer.zero_grad()
            if weights is None:
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(images)
            else:
                output = model(images.bfloat16())
            loss_function(output.float(), labels).backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    autocast, _ = run_ranks(2, lambda communicator: train(communicator, None))
    masters, other = run_ranks(2, lambda communicator: train(communicator, "bf16"))
    start = small_net().state_dict()
    small_net().load_state_dict(masters)
    for name, value in masters.items():
        assert value.dtype == start[name].dtype and torch.equal(value, other[name]), name
        if "weight" in name:
            moved = float((autocast[name] - start[name]).abs().max())
            assert float((value - autocast[name]).abs().max()) < 0.15 * moved, name


def test_a_loaded_state_reaches_the_masters() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(linear_net(), communicator=communicator, weights="bf16")
        state = {name: torch.full_like(value, 0.1) for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        model(torch.zeros(1, 108).bfloat16())  # brings the weights for computing up to the masters
        held = [*model.state_dict().values(), *model.module.parameters()]
        return [torch.allclose(tensor.float(), torch.tensor(0.1), rtol=4e-3) for tensor in held]

    assert all(all(held) for held in run_ranks(2, one))


def test_what_comes_last_travels_apart() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(linear_net(), communicator=communicator, last_bytes=6950)
        return [[p.numel() for p in bucket.parameters] for bucket in model.buckets]

    # in the order of the backward pass: the first layer's weight is the last to come
    assert run_ranks(2, one)[0] == [[5, 80, 16], [1728]]


def test_every_gradient_and_weight_is_aligned() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(linear_net(), communicator=communicator, weights="bf16")
        tensors = [*model.module.parameters(), *(view for bucket in model.buckets for view in bucket.views)]
        return [tensor.data_ptr() % 64 for tensor in tensors]

    assert not any(run_ranks(2, one)[0])


class Crossed(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Its gradients become ready in another order than the definitions suggest."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(8, 2, bias=False)
        self.first = torch.nn.Linear(4, 8, bias=False)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x))


def test_buckets_follow_the_order_in_which_gradients_become_ready() -> None:
    """Else the first bucket, which waits for the last gradient, would hold back all the others."""

    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(Crossed(), communicator=communicator, bucket_bytes=32, first_bytes=32)
        sent: list[int] = []
        model.module.first.weight.register_hook(lambda gradient: sent.append(count(communicator)))
        for _ in range(3):
            before = count(communicator)
            model(torch.ones(1, 4)).sum().backward()
            sent[-1] -= before
        return sent, [[tuple(p.shape) for p in bucket.parameters] for bucket in model.buckets]

    def count(communicator: ThreadCommunicator) -> int:
        return [name for name, _ in communicator.calls].count("all_reduce")

    for sent, shapes in run_ranks(2, one):
        assert sent == [0, 1, 1]  # reductions under way when the last gradient came
        assert shapes == [[(2, 8)], [(8, 4)]]


def test_all_follow_rank_zeros_order() -> None:
    class Either(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, flip: bool) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
            self.layers = (self.b, self.a) if flip else (self.a, self.b)

        def forward(self, x: Any) -> Any:
            return self.layers[1](self.layers[0](x))

    def one(communicator: ThreadCommunicator) -> Any:
        module = Either(flip=communicator.rank == 0)
        model = DataParallel(module, communicator=communicator, bucket_bytes=16, first_bytes=16)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        return [bucket.parameters[0] is module.a.weight for bucket in model.buckets]

    assert run_ranks(2, one) == [[True, False]] * 2


def test_buffers_follow_rank_zero_in_training_mode_only() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(small_net(), communicator=communicator)
        mean = model.module[1].running_mean
        images, labels = batch_of(4, 0)
        loss_function(model(images), labels).backward()
        model.eval()
        with torch.no_grad():
            mean.fill_(communicator.rank + 1)
        before = len(communicator.calls)
        loss_function(model(images), labels).backward()
        evaluated = model.module[1].running_mean.clone(), communicator.calls[before:]
        model.train()
        loss_function(model(images), labels).backward()
        return evaluated, model.module[1].running_mean.clone()

    (first, first_end), (second, second_end) = run_ranks(2, one)
    for rank, (mean, calls) in enumerate((first, second)):
        assert bool((mean == rank + 1).all()) and {name for name, _ in calls} == {"all_reduce"}
    assert torch.equal(first_end, second_end)
