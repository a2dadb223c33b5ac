"""DataParallel around modules that do what modules may do: with their buffers, weights, graphs and states."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.errors import ArrayError, NotInitializedError, SettingsError, WorkerError
from muster.torch.buckets import GradientBucket
from muster.torch.data_parallel import DataParallel
from tests.gpu.threads import ThreadCommunicator, run_ranks
from tests.torch.test_data_parallel import (
    batch_of,
    gradients_of,
    linear_net,
    loss_function,
    small_net,
)


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


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ("buffer", r"count is float32\[4\] on rank 1 and float32\[3\]"),
        ("frozen", "layer.bias is frozen on rank 1"),
    ],
)
def test_what_differs_between_ranks_is_told_before_it_is_sent(differs: str, words: str) -> None:
    """NCCL would hang, or write beyond the end."""

    def one(communicator: ThreadCommunicator) -> None:
        module = Counting()
        if communicator.rank and differs == "buffer":
            module.register_buffer("count", torch.zeros(4))
        if communicator.rank and differs == "frozen":
            module.layer.bias.requires_grad_(False)
        with pytest.raises(ArrayError, match=f"the module on rank 1 differs from rank 0's: .*{words}"):
            DataParallel(module, communicator=communicator)
        if differs == "frozen":
            joins = DataParallel(Counting(), communicator=communicator, elastic=True)
            joins.module.layer.bias.requires_grad_(communicator.rank == 0)
            joins.join(communicator, 0)
        else:  # each rank may keep its own buffers
            DataParallel(
                module, communicator=communicator, parameter_broadcast=False, broadcast_buffers=False
            )

    run_ranks(2, one)


class Growing(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.memory: Any
        self.register_buffer("memory", torch.zeros(1, 3))

    def forward(self, x: Any) -> Any:
        self.memory = torch.cat([self.memory, x.detach()])
        return self.layer(x)


def test_a_buffer_of_another_shape_than_before_is_refused() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(Growing(), communicator=communicator)
        words = r"'memory' of a Growing was float32\[1, 3\] on cpu .* now is float32\[2, 3\].*Wrap the module"
        with pytest.raises(ArrayError, match=words):
            model(torch.ones(1, 3)).sum().backward()
        options: tuple[dict[str, Any], ...] = (  # and by the name that torch 2.15 has
            {"broadcast_buffers": False},
            {"forward_sync_buffers": False},
            {"broadcast_buffers": True, "forward_sync_buffers": False},
        )
        for each in options:
            model = DataParallel(Growing(), communicator=communicator, **each)
            model(torch.ones(1, 3)).sum().backward()

    run_ranks(2, one)


# ---------------------------------------------------------------- parameters that change after the wrapping


@pytest.mark.parametrize("past", [False, True])
def test_a_parameter_that_is_unfrozen_later_is_averaged(past: bool) -> None:
    """Also where the module is called past its wrapper."""

    def one(communicator: ThreadCommunicator) -> Any:
        net = linear_net()
        net[1].weight.requires_grad_(False)
        model = DataParallel(net, communicator=communicator)
        loss_of(model, 0, communicator).backward()
        net[1].weight.requires_grad_(True)
        for _ in range(2):
            model.zero_grad()
            loss_of(net if past else model, 0, communicator).backward()
        return gradients_of(model)

    for found in run_ranks(2, one):
        assert_close(found, whole_gradients(0))


def test_a_parameter_that_one_rank_alone_unfreezes_is_named() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        net = linear_net()
        net[1].weight.requires_grad_(False)
        net[1].bias.requires_grad_(False)
        model = DataParallel(net, communicator=communicator)
        (net[1].bias if communicator.rank else net[1].weight).requires_grad_(True)
        with pytest.raises(ArrayError, match=r"1\.weight is frozen on rank 1 and not on rank 0"):
            loss_of(model, 0, communicator)

    run_ranks(2, one)


def test_a_newcomer_averages_what_the_others_have_unfrozen_before_it_does() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        net = linear_net()
        net[1].weight.requires_grad_(False)
        model = DataParallel(net, communicator=communicator, elastic=True)
        if communicator.rank == 0:
            net[1].weight.requires_grad_(True)
            loss_of(model, 0, communicator)  # alone so far
        model.join(communicator, 0)
        loss_of(model, 0, communicator).backward()
        without = net[1].weight.grad.clone()
        net[1].weight.requires_grad_(True)
        model.zero_grad()
        loss_of(model, 0, communicator).backward()
        return without, gradients_of(model)

    (first, whole), (second, also) = run_ranks(2, one)
    assert torch.equal(first, second) and bool(first.any())
    for found in (whole, also):
        assert_close(found, whole_gradients(0))


def test_a_parameter_may_be_frozen_for_a_while() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        net = linear_net()
        model = DataParallel(net, communicator=communicator)
        found = []
        for trains in (True, False, True):
            net[1].weight.requires_grad_(trains)
            model.zero_grad()
            loss_of(model, 0, communicator).backward()
            found.append(gradients_of(model))
        return found

    expected = whole_gradients(0)
    for first, frozen, last in run_ranks(2, one):
        assert_close(first, expected)
        assert frozen[0] is None
        assert_close(frozen[1:], expected[1:])
        assert_close(last, expected)


def new_head(net: Any) -> None:
    net[3] = torch.nn.Linear(16, 5)


def new_layer(net: Any) -> None:
    net.insert(3, torch.nn.Linear(16, 16))


class Adapted(torch.nn.Module):  # type: ignore[misc,name-defined]
    """LoRA: a frozen layer, and two small ones beside it that are trained."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = torch.nn.Linear(108, 2, bias=False), torch.nn.Linear(2, 16, bias=False)

    def forward(self, x: Any) -> Any:
        return self.layer(x) + self.up(self.down(x))


def adapters(net: Any) -> None:
    net[1] = Adapted(net[1])


def new_parameter(net: Any) -> None:
    net[1].scale = torch.nn.Parameter(torch.ones(16))


def frozen_layer(net: Any) -> None:
    net.append(torch.nn.Linear(5, 5).requires_grad_(False))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (new_head, r"3\.weight \(and 1 more\) was replaced after the module was wrapped"),
        (new_layer, r"4\.weight \(and 1 more\) was added|3\.weight \(and 1 more\) was replaced"),
        (adapters, r"1\.down\.weight \(and 1 more\) was added after the module was wrapped"),
        (new_parameter, r"1\.scale was added"),
        (frozen_layer, r"4\.weight \(and 1 more\) was added"),
    ],
)
@pytest.mark.parametrize("past_the_wrapper", [False, True])
def test_layers_that_are_added_later_are_refused_by_name(
    change: Any, words: str, past_the_wrapper: bool
) -> None:
    """Each rank would train them by its own gradient, from its own beginning."""

    def one(communicator: ThreadCommunicator) -> Any:
        net = linear_net()
        model = DataParallel(net, communicator=communicator)
        loss_of(model, 0, communicator).backward()
        change(net)
        with pytest.raises(WorkerError, match=words):
            loss_of(net if past_the_wrapper else model, 0, communicator).backward()
        model = DataParallel(net, communicator=communicator)
        model.zero_grad()
        loss_of(model, 0, communicator).backward()
        return gradients_of(model)

    first, second = run_ranks(2, one)
    for ours, theirs in zip(first, second, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_layers_without_parameters_come_and_go_freely() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        net = linear_net()
        model = DataParallel(net, communicator=communicator)
        net.append(torch.nn.Identity())
        model(batch_of(2, 0)[0])
        net[2] = torch.nn.Tanh()
        head, net[3] = net[3], torch.nn.Identity()
        model(batch_of(2, 0)[0])
        net[3] = torch.nn.Sequential(head)
        loss_of(model, 0, communicator).backward()
        return gradients_of(model)

    for found in run_ranks(2, one):
        assert_close(found, whole_gradients(0))


@pytest.mark.parametrize("nested", [False, True])
def test_states_are_not_assigned(nested: bool) -> None:
    """The parameters would be others then, without hooks."""

    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(linear_net(), communicator=communicator)
        loads = torch.nn.Sequential(model) if nested else model
        with pytest.raises(SettingsError, match="assign=True would replace the parameters"):
            loads.load_state_dict(loads.state_dict(), assign=True)
        model.module.load_state_dict(linear_net().state_dict(), assign=True)
        with pytest.raises(WorkerError, match=r"1\.weight \(and 3 more\) was replaced"):
            loss_of(model, 0, communicator)

    run_ranks(1, one)


def test_a_module_that_was_converted_after_it_was_wrapped_is_refused() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(linear_net(), communicator=communicator)
        model.double()
        with pytest.raises(ArrayError, match=r"was float32\[5\] on cpu .* now is float64\[5\] on cpu"):
            model(batch_of(2, 0)[0].double()).sum().backward()

    run_ranks(1, one)


def test_masters_of_a_module_that_was_moved_since_are_refused() -> None:
    """They would be trained, and the module go on with weights that nobody trains."""

    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(small_net(), communicator=communicator, weights="bf16")
        model.to(memory_format=torch.channels_last)
        with pytest.raises(SettingsError, match=r"Call to\(\.\.\.\) before you wrap it"):
            model(batch_of(2, 0)[0].bfloat16()).float().sum().backward()

    run_ranks(1, one)


def test_named_parameters_are_those_that_parameters_gives() -> None:
    """An optimizer of the module's own bfloat16 weights would train nothing."""

    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(linear_net(), communicator=communicator, weights="bf16")
        assert [id(p) for _, p in model.named_parameters()] == [id(p) for p in model.parameters()]
        assert all(p.dtype == torch.float32 for p in model.parameters())
        bare = DataParallel(linear_net(), communicator=communicator)
        assert next(name for name, _ in bare.named_parameters()) == "1.weight"

    run_ranks(1, one)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: torch.nn.LazyLinear(3), "no shape yet"),
        (lambda: torch.nn.Linear(3, 3, device="meta"), "no val"),
    ],
)
def test_parameters_without_shape_or_values_are_refused(module: Any, words: str) -> None:
    with pytest.raises(ArrayError, match=f"weight has {words}"):
        run_ranks(1, lambda communicator: DataParallel(module(), communicator=communicator))


class Waves(torch.nn.Module):  # type: ignore[misc,name-defined]
    """One complex parameter and a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        self.real = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: Any) -> Any:
        return (x * self.wave * self.real).abs().square().sum()


@pytest.mark.parametrize("samples", [None, 2])
def test_complex_gradients_are_averaged(samples: int | None) -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(Waves(), communicator=communicator)
        x = torch.tensor([1.0 + communicator.rank, 2j])
        with contextlib.nullcontext() if samples is None else model.uneven_batch(samples):
            model(x).backward()
        return gradients_of(model)

    alone = Waves()
    ((alone(torch.tensor([1.0, 2j])) + alone(torch.tensor([2.0, 2j]))) / 2).backward()
    for found in run_ranks(2, one):
        assert_close(found, gradients_of(alone))


class RealOnly(ThreadCommunicator):
    """As tcp and NCCL: they have no complex dtype."""

    def all_reduce(self, send: Any, recv: Any, op: Any, *, async_op: bool = False) -> Any:
        assert send.dtype.kind == "f"
        return super().all_reduce(send, recv, op, async_op=async_op)


@pytest.mark.parametrize("compression", [None, "bf16"])
def test_complex_gradients_travel_as_pairs_of_real_numbers(compression: str | None) -> None:
    """Cut down to a real dtype they would lose their imaginary part."""
    bucket = GradientBucket([Waves().wave], wire_dtype={None: None, "bf16": torch.bfloat16}[compression])
    assert bucket.wire.is_complex()

    def one(communicator: ThreadCommunicator) -> None:
        own = RealOnly(communicator._meeting, communicator.rank)
        DataParallel(Waves(), communicator=own)(torch.ones(2)).backward()

    run_ranks(2, one)


def test_a_dtype_that_the_backend_cannot_send_is_refused_at_once() -> None:
    net = linear_net().to(torch.float8_e5m2)
    with pytest.raises(ArrayError, match=r"does not take torch\.float8_e5m2"):
        run_ranks(1, lambda communicator: DataParallel(net, communicator=communicator))


# ---------------------------------------------------------------- states, copies, graphs


@pytest.mark.parametrize("weights", [None, "bf16"])
def test_a_part_of_another_module_is_saved_and_loaded_by_the_bare_modules_names(weights: str | None) -> None:
    def one(communicator: ThreadCommunicator) -> None:
        whole = torch.nn.ModuleDict(
            {"net": DataParallel(linear_net(), communicator=communicator, weights=weights)}
        )
        bare = torch.nn.ModuleDict({"net": linear_net()})
        state = {name: value + 1 / 3 for name, value in bare.state_dict().items()}
        whole.load_state_dict(state)
        bare.load_state_dict(whole.state_dict())
        for name, value in bare.state_dict().items():
            assert torch.equal(value, state[name]), name

    run_ranks(1, one)


@pytest.mark.parametrize("weights", [None, "bf16"])
def test_a_copy_has_its_own_parameters_and_masters_and_sends_nothing(weights: str | None) -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        def loss(model: Any, seed: int) -> Any:
            images, labels = batch_of(4, seed + communicator.rank)
            return loss_function(model(images.to(next(model.module.parameters()).dtype)).float(), labels)

        model = DataParallel(linear_net(), communicator=communicator, weights=weights)
        model.note = "kept"
        loss(model, 0).backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        model.eval()
        begin = len(communicator.calls)
        twin = copy.deepcopy(model)
        assert len(communicator.calls) == begin and not twin.training and twin.note == "kept"
        model.train()
        twin.train()
        before = copy.deepcopy(model.state_dict())
        for name, value in twin.state_dict().items():
            assert torch.equal(value, before[name]), name
        twin.zero_grad()
        loss(twin, 1).backward()
        torch.optim.SGD(twin.parameters(), lr=0.5).step()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        return [value.clone() for value in twin.state_dict().values()]

    first, second = run_ranks(2, one)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


def test_the_average_of_a_wrapper_with_masters_is_one_of_masters() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(linear_net(), communicator=communicator, weights="bf16")
        first = copy.deepcopy(model.state_dict())
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        average.update_parameters(model)
        model.load_state_dict({name: value + 1e-4 for name, value in first.items()})
        average.update_parameters(model)
        for name, value in average.module.state_dict().items():
            torch.testing.assert_close(value, first[name] + 5e-5, rtol=0, atol=1e-6)

    run_ranks(1, one)


def test_a_wrapper_is_read_from_a_file_only_in_a_job() -> None:
    def one(communicator: ThreadCommunicator) -> bytes:
        return pickle.dumps(DataParallel(small_net(), communicator=communicator))

    (written,) = run_ranks(1, one)
    with pytest.raises(NotInitializedError):
        pickle.loads(written)


def test_forward_has_the_signature_of_the_modules() -> None:
    class Named(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, input_ids: Any, labels: Any = None, *, scale: float = 1.0) -> Any:
            return self.layer(input_ids) * scale

    def one(communicator: ThreadCommunicator) -> None:
        module = Named()
        model = DataParallel(module, communicator=communicator)
        for each in (model, copy.deepcopy(model)):
            assert inspect.signature(each.forward) == inspect.signature(module.forward)
            found = each(input_ids=torch.ones(1, 2), scale=2.0)
            assert torch.equal(found, module(torch.ones(1, 2), scale=2.0))

    run_ranks(1, one)


def test_parameters_have_the_names_that_the_state_has() -> None:
    def one(communicator: ThreadCommunicator) -> None:
        model = DataParallel(small_net(), communicator=communicator)
        names = [name for name, _ in model.named_parameters()]
        assert names == [name for name, _ in model.module.named_parameters()]
        assert set(names) <= model.state_dict().keys()

    run_ranks(1, one)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_backward_pass_may_make_a_graph_of_itself() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(linear_net(), communicator=communicator)
        for seed in range(2):
            model.zero_grad()
            loss_of(model, seed, communicator).backward(create_graph=True)
        return gradients_of(model), [p.grad.requires_grad for p in model.parameters()]

    for found, recorded in run_ranks(2, one):
        assert_close(found, whole_gradients(1))
        assert not any(recorded)  # what the other ranks computed is in no graph


def test_a_graph_may_be_passed_twice() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = DataParallel(linear_net(), communicator=communicator)
        loss = loss_of(model, 0, communicator)
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients_of(model)

    for found in run_ranks(2, one):
        assert_close(found, [2 * each for each in whole_gradients(0)])


@pytest.mark.parametrize("weights", [None, "bf16"])
@pytest.mark.parametrize("outside", [False, True])
def test_module_or_wrapper_may_be_compiled(outside: bool, weights: str | None) -> None:
    def one(communicator: ThreadCommunicator, compiled: bool) -> Any:
        module = linear_net()
        if compiled and not outside:
            module.compile(backend="aot_eager")
        model = DataParallel(module, communicator=communicator, weights=weights)
        runs = torch.compile(model, backend="aot_eager") if compiled and outside else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        images, labels = batch_of(8, 0)
        for _ in range(3):
            optimizer.zero_grad()
            given = images if weights is None else images.bfloat16()
            loss_function(runs(given).float(), labels).backward()
            optimizer.step()
        return list(model.state_dict().values())

    torch._dynamo.reset()
    (found,) = run_ranks(1, lambda communicator: one(communicator, True))
    (expected,) = run_ranks(1, lambda communicator: one(communicator, False))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2 if weights else 1e-6)


# ---------------------------------------------------------------- several wrappers


def test_a_wrapper_of_more_takes_over_what_another_had() -> None:
    """First a part is trained, then the whole: the part's wrapper must not reduce its gradients once more."""

    def one(communicator: ThreadCommunicator) -> Any:
        net = linear_net()
        part = DataParallel(net[1], communicator=communicator)
        part(torch.ones(1, 108)).sum().backward()
        model = DataParallel(net, communicator=communicator)
        model.zero_grad()
        loss_of(model, 0, communicator).backward()
        begin = len(communicator.calls)
        model.zero_grad()
        loss_of(model, 0, communicator).backward()
        sent = sum(size for name, size in communicator.calls[begin:] if name == "all_reduce")
        return gradients_of(model), sent

    for found, sent in run_ranks(2, one):
        assert_close(found, whole_gradients(0))
        assert sent < 1.2 * sum(parameter.numel() for parameter in linear_net().parameters())


def test_two_wrappers_of_one_layer_are_refused() -> None:
    """Each would reduce its gradient in a bucket of its own, at the same time."""

    def one(communicator: ThreadCommunicator) -> None:
        shared = torch.nn.Linear(3, 3)
        first, second = (
            DataParallel(torch.nn.Sequential(shared, torch.nn.Linear(3, 3)), communicator=communicator)
            for _ in range(2)
        )
        with pytest.raises(WorkerError, match="wrapped again, in a DataParallel without the others"):
            first(torch.ones(1, 3))
        second(torch.ones(1, 3)).sum().backward()

    run_ranks(2, one)
