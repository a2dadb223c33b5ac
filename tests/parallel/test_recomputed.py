"""Layers that are computed again in the backward pass compute what one process does."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

import muster
from muster.errors import SettingsError, WorkerError
from muster.parallel import module as parallel_module
from muster.parallel.planning.memory import step_memory
from muster.parallel.planning.problem import ALWAYS
from muster.parallel.planning.recomputed import layers_of
from muster.parallel.planning.search import solve
from muster.torch import capture
from muster.torch.capture import capture_step
from tests.gpu import graphs
from tests.gpu.threads import _Meeting
from tests.parallel.models import MODELS, Gpt, make
from tests.parallel.oracle import Case, close, part_of, whole_gradients
from tests.parallel.planning.test_memory import Live
from tests.parallel.ranks import RankCommunicator, run_ranks
from tests.parallel.suite import SUITE

torch.set_num_threads(1)
DEEP = ("llama_halves", "unet_transposed", "two_views", "cell_by_hand", "dlrm_bags", "attending_translator")
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"whole_parameters": True, "shard_parameters": False, "shard_updates": False},
    "in shares": {"whole_parameters": True, "shard_parameters": ALWAYS},
    "split": {"shard_parameters": False},
}


@functools.cache
def case(name: str) -> Case:
    if name in MODELS:
        return Case(name)
    entry = SUITE[name]
    return Case(name, module=entry.make(), batches=[entry.batch(seed) for seed in range(2)])


def layers(one: Case) -> tuple[str, ...]:
    """All that there are, whether it pays or not."""
    return tuple(layer.name for layer in layers_of(one.traced.graph))


def check(name: str, way: str, ranks: int) -> None:
    one = case(name)
    problem = one.problem((ranks,), recomputed=layers(one), **WAYS[way])
    solution = solve(problem)
    assert solution is not None
    plan = one.plan(problem, solution.choice)
    assert any(state.recomputed for state in plan.states)
    one.check(plan, tolerance=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["mlp", "gpt", "gpt_fused_tied", "bert", "lstm", "residual", *DEEP])
def test_as_one_process(name: str, way: str, small_buckets: None) -> None:
    """Losses, gradients, weights, statistics of batches; what is sent is what the plan says."""
    check(name, way, 4 if name in ("gpt", "two_views") else 2)


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(SUITE))
def test_the_suite_as_one_process(name: str, way: str, small_buckets: None) -> None:
    for ranks in (2, 4):
        if layers(case(name)):
            check(name, way, ranks)


@pytest.mark.parametrize("name", ["mlp", "gpt_fused_tied"])
def test_some_layers_beside_others_and_other_ways_of_holding(name: str, small_buckets: None) -> None:
    one = case(name)
    for seed in range(3):
        chosen = one.random_plan((2, 2), seed)
        some = layers(one)[seed % 2 :: 2]
        problem = one.problem((2, 2), recomputed=some)
        plain = one.problem((2, 2)).choice_of({n.name: s.key for n, s in _with(one, chosen)})
        one.check(one.plan(problem, plain), tolerance=1e-12)


def _with(one: Case, plan: Any) -> Any:
    return zip(one.traced.graph.nodes, plan.states, strict=True)


# ---------------------------------------------------------------- training


def made(communicator: RankCommunicator, net: nn.Module, batch: Any, **settings: Any) -> Any:
    settings = {"checkpoint_activations": ALWAYS, "mode": "data_parallel", "seed": 3, **settings}
    mine = [part_of(x, communicator, "data_parallel") for x in batch]
    model = muster.parallelize(net, mine, communicator=communicator, **settings)
    assert any(state.recomputed for state in model.plan.states) == bool(settings["checkpoint_activations"])
    return model


@pytest.mark.parametrize("shares", [False, ALWAYS])
def test_clipping_accumulation_and_evaluation(shares: Any, small_buckets: None) -> None:
    batches = [MODELS["gpt"][1](seed) for seed in range(3)]
    net = make("gpt")
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        sum(net(*batch) for batch in batches).backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    def train(communicator: RankCommunicator) -> Any:
        model = made(communicator, make("gpt"), batches[0], shard_parameters=shares)
        own = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        mine = [[part_of(x, communicator, "data_parallel") for x in batch] for batch in batches]
        model.eval()
        with torch.no_grad():
            evaluated = model(*mine[0])
        model.train()
        for _ in range(2):
            with model.no_sync():
                model(*mine[0]).backward()
            (model(*mine[1]) + model(*mine[2])).backward()
            clipped = model.clip_grad_norm_(0.1)
            own.step()
            own.zero_grad()
        return evaluated, clipped, model.full_state_dict()

    for evaluated, clipped, whole in run_ranks(2, train):
        close("evaluation", evaluated, make("gpt")(*batches[0]).detach(), 1e-12)
        close("norm", clipped, norm.detach(), 1e-12)
        for key, weight in net.state_dict().items():
            close(key, whole[key], weight, 1e-12)


class Noisy(nn.Module):
    """Layers that drop within, and an LSTM that draws by torch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_NoisyLayer() for _ in range(2))
        self.lstm = nn.ModuleList([nn.LSTM(16, 16, 2, batch_first=True, dropout=0.3)])

    def forward(self, x: Any, y: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.lstm[0](x)[0], y)


class _NoisyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Any) -> Any:
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)
        x = x + y.transpose(1, 2).flatten(2)
        return x + F.dropout(self.down(F.dropout(F.gelu(self.up(x)), 0.3)), 0.4)


def noisy() -> tuple[nn.Module, list[Any]]:
    draw = torch.Generator().manual_seed(2)
    net = Noisy().double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=draw, dtype=torch.float64) - 0.5)
    return net, [torch.rand(8, 4, 16, generator=draw, dtype=torch.float64) for _ in range(2)]


def _once(function: Any, *args: Any, **_: Any) -> Any:
    """In the place of torch's ``checkpoint``: what is computed is kept."""
    return function(*args)


@pytest.mark.parametrize("strategies", [{}, {"layers.0.up": {"n": 2}, "layers.0.down": {"k": 2}}])
def test_what_was_dropped_is_dropped_again(strategies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where passes of several batches go backward together, the last one first."""
    settings = {"mode": "semi_auto", "strategies": strategies} if strategies else {}

    def train(communicator: RankCommunicator) -> Any:
        net, batch = noisy()
        model = made(communicator, net, batch, **settings)
        mine = [part_of(x, communicator, "data_parallel") for x in batch]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            with model.no_sync():
                (model(*mine) + 2 * model(*mine)).backward()
            loss = model(*mine)
            loss.backward()
            optimizer.step()
        return loss.detach(), whole_gradients(model)

    again = run_ranks(2, train)
    monkeypatch.setattr(parallel_module, "checkpoint", _once)
    for (loss, grads), (kept_loss, kept_grads) in zip(again, run_ranks(2, train), strict=True):
        close("loss", loss, kept_loss, 1e-12)
        for key, grad in kept_grads.items():
            close(key, grads[key], grad, 1e-12)


class _OnGpu(torch.Generator):
    """Refuses within a capture what CUDA's generators refuse there."""

    def get_state(self) -> Any:
        assert not capture.is_recording(None)
        return super().get_state()

    def set_state(self, state: Any) -> Any:
        assert not capture.is_recording(None)
        return super().set_state(state)


class Undrawn(nn.Module):
    """What draws here draws by generators, so that a graph can hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_NoisyLayer() for _ in range(2))

    def forward(self, x: Any, y: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_captured_step_draws_again_what_an_eager_one_draws(
    monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    graphs.install(monkeypatch)
    monkeypatch.setattr(torch, "Generator", _OnGpu)

    def losses(*, capture: bool) -> tuple[list[float], bool]:
        torch.manual_seed(0)
        net, batch = Undrawn(), (torch.rand(4, 4, 16), torch.rand(4, 4, 16))
        communicator = graphs.GraphCommunicator(_Meeting(1), 0)
        parts = tuple(each[: 4 // accumulate] for each in batch)
        model = made(communicator, net, parts)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        graphs.watch(model, optimizer)
        step = capture_step(model, model, optimizer, capture=capture, accumulate=accumulate)
        return [step(*batch).item() for _ in range(8)], step.captured

    eager, was_captured = losses(capture=False)
    assert not was_captured
    captured, was_captured = losses(capture=True)
    assert was_captured
    assert captured == pytest.approx(eager, rel=1e-6)


def test_under_autocast_it_is_what_keeping_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = MODELS["gpt"][1](0)

    def train(communicator: RankCommunicator) -> Any:
        net = make("gpt").float()
        model = made(communicator, net, batch, autocast=torch.bfloat16, shard_parameters=ALWAYS)
        model(*[part_of(x, communicator, "data_parallel") for x in batch]).backward()
        return whole_gradients(model)

    again = run_ranks(2, train)
    monkeypatch.setattr(parallel_module, "checkpoint", _once)
    for grads, kept in zip(again, run_ranks(2, train), strict=True):
        for key, grad in kept.items():
            close(key, grads[key], grad, 1e-6)


@pytest.mark.parametrize(("shares", "error"), [(False, RuntimeError), (ALWAYS, WorkerError)])
def test_weights_that_changed_before_the_backward_pass_are_refused(shares: Any, error: Any) -> None:
    def train(communicator: RankCommunicator) -> None:
        batch = MODELS["gpt"][1](0)
        model = made(communicator, make("gpt"), batch, shard_parameters=shares)
        loss = model(*[part_of(x, communicator, "data_parallel") for x in batch])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        with pytest.raises(error, match=r"was changed after a forward pass|modified by an inplace operation"):
            loss.backward()

    run_ranks(2, train)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("shares", [False, ALWAYS])
def test_a_step_takes_the_memory_that_is_predicted_and_less_than_without(shares: Any) -> None:
    torch.manual_seed(0)
    whole = tuple(torch.randint(32, (256, 8)) for _ in range(2))
    nets = [Gpt(layers=6) for _ in range(2)]
    for net in nets:
        net.load_state_dict(nets[0].state_dict())

    def train(communicator: RankCommunicator, checkpoint_activations: Any) -> Any:
        model = made(
            communicator,
            nets[communicator.rank],
            whole,
            checkpoint_activations=checkpoint_activations,
            shard_parameters=shares,
            shard_updates=ALWAYS,
        )
        own = [part_of(x, communicator, "data_parallel") for x in whole]
        model(*own).backward()
        for parameter in model.parameters():
            parameter.grad = None
        gc.collect()
        with Live() as live:
            model(*own).backward()
        memory = step_memory(model.plan.graph, model.plan.states, model.plan.mesh)
        return live.peak, memory.peak - memory.held

    again, kept = (
        run_ranks(2, functools.partial(train, checkpoint_activations=each)) for each in (ALWAYS, False)
    )
    for measured, predicted in (*again, *kept):
        print(f"predicted {predicted:,}, measured {measured:,}: {predicted / measured:.3f}")
    assert max(measured for measured, _ in again) < 0.5 * min(measured for measured, _ in kept)
    for measured, predicted in (*again, *kept):
        assert predicted == pytest.approx(measured, rel=0.1)


# ---------------------------------------------------------------- settings and files


def test_a_saved_plan_computes_the_same_layers_again(tmp_path: Path) -> None:
    batch = MODELS["gpt"][1](0)
    path = tmp_path / "plan.json"

    def train(communicator: RankCommunicator) -> Any:
        settings = {"mode": "semi_auto", "plan": path if communicator.rank == 0 else None}
        first = made(communicator, make("gpt"), batch, **settings)
        communicator.barrier()
        again = made(communicator, make("gpt"), batch, mode="semi_auto", plan=path)
        again(*[part_of(x, communicator, "data_parallel") for x in batch]).backward()
        return first.plan, again.plan

    for first, again in run_ranks(2, train):
        assert again.loaded
        assert again.digest == first.digest
        assert again.options.recomputed == first.options.recomputed == ("blocks.0", "ln")
        assert again.collectives == first.collectives


def test_other_words_are_refused() -> None:
    with pytest.raises(SettingsError, match='checkpoint_activations is True, False or "always", not 7'):
        run_ranks(
            1,
            lambda communicator: made(
                communicator, make("gpt"), MODELS["gpt"][1](0), checkpoint_activations=7
            ),
        )
