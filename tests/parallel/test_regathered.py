"""Parameters that are whole only while they are computed with (ZeRO-3) compute what one process does."""

from __future__ import annotations

import contextlib
import functools
import weakref
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils import _python_dispatch

import muster
from muster.errors import SettingsError, WorkerError
from muster.parallel.planning import buckets
from muster.parallel.planning.plan import Plan
from muster.parallel.planning.planner import find_plan
from muster.parallel.planning.problem import ALWAYS
from muster.parallel.planning.search import solve
from muster.parallel.trace import trace
from tests.parallel.models import MODELS, make
from tests.parallel.oracle import SLOW, Case, close, part_of, whole_gradients
from tests.parallel.ranks import RankCommunicator, run_ranks

torch.set_num_threads(1)


@functools.cache
def case(name: str) -> Case:
    return Case(name)


@pytest.mark.parametrize("name", MODELS)
def test_as_one_process(name: str, small_buckets: None) -> None:
    one = case(name)
    world = 4 if name in ("quick", "gpt") else 2
    problem = one.problem((world,), whole_parameters=True, shard_parameters=ALWAYS)
    solution = solve(problem)
    assert solution is not None
    plan = one.plan(problem, solution.choice)
    assert any(state.regathered for state in plan.states)
    one.check(plan, tolerance=1e-12)


@pytest.mark.parametrize("name", ["mlp", "gpt_fused_tied"])
def test_beside_other_ways_of_holding(name: str, small_buckets: None) -> None:
    one = case(name)
    for seed in range(3):
        plan = one.random_plan((2, 2), seed)
        assert {(state.sharded, state.regathered) for state in plan.states} >= {(True, False), (True, True)}
        one.check(plan, tolerance=1e-12)


def made(communicator: RankCommunicator, name: str = "mlp", **settings: Any) -> Any:
    settings = {"shard_parameters": ALWAYS, "mode": "data_parallel", **settings}
    batch = [part_of(x, communicator, "data_parallel") for x in MODELS[name][1](0)]
    return muster.parallelize(make(name), batch, communicator=communicator, **settings)


def gradients_of(name: str, batches: Any) -> tuple[Any, dict[str, Any]]:
    net = make(name)
    loss = sum(net(*batch) for batch in batches)
    loss.backward()
    return net, {key: p.grad for key, p in net.named_parameters(remove_duplicate=False)}


def test_clipping_accumulation_and_evaluation(small_buckets: None) -> None:
    batches = [MODELS["mlp"][1](seed) for seed in range(3)]
    net, grads = gradients_of("mlp", batches)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)

    def train(communicator: RankCommunicator) -> Any:
        model = made(communicator)
        mine = [[part_of(x, communicator, "data_parallel") for x in batch] for batch in batches]
        model.eval()
        with torch.no_grad():
            evaluated = model(*mine[0])
        model.train()
        with model.no_sync():
            model(*mine[0]).backward()
        (model(*mine[1]) + model(*mine[2])).backward()
        clipped = model.clip_grad_norm_(0.1)
        return model.plan, evaluated, clipped, whole_gradients(model)

    for plan, evaluated, clipped, whole in run_ranks(4, train):
        assert sum(state.regathered for state in plan.states) > 5
        close("evaluation", evaluated, make("mlp")(*batches[0]).detach(), 1e-12)
        close("norm", clipped, norm.detach(), 1e-12)
        for key, grad in grads.items():
            close(key, whole[key], grad, 1e-12)


def test_weights_that_changed_before_the_backward_pass_are_refused() -> None:
    def train(communicator: RankCommunicator) -> None:
        model = made(communicator)
        loss = model(*[part_of(x, communicator, "data_parallel") for x in MODELS["mlp"][1](0)])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        with pytest.raises(WorkerError, match="was changed after a forward pass, and its backward pass"):
            loss.backward()

    run_ranks(2, train)


def test_a_backward_pass_that_is_given_up_leaves_nothing(small_buckets: None) -> None:
    batch = MODELS["mlp"][1](1)
    _, grads = gradients_of("mlp", [batch])

    def train(communicator: RankCommunicator) -> Any:
        model = made(communicator)
        mine = [part_of(x, communicator, "data_parallel") for x in batch]
        model(*mine)  # and no backward pass
        loss = model(*mine)
        loss.register_hook(_broken)
        with pytest.raises(RuntimeError, match="broken off"):
            loss.backward()
        model.forget_backward()
        model(*mine).backward()
        return whole_gradients(model)

    for whole in run_ranks(2, train):
        for key, grad in grads.items():
            close(key, whole[key], grad, 1e-12)


def _broken(_: Any) -> Any:
    raise RuntimeError("broken off")


class Deep(nn.Module):
    """Layers whose weights are large, and whose activations are not."""

    def __init__(self, layers: int = 8, width: int = 256) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def forward(self, x: Any, y: Any) -> Any:
        return ((self.body(x) - y) ** 2).mean()


class _Largest(_python_dispatch.TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """The most whole weights, or gradients of such, that were there at once."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.most = numel, 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes() >= 8 * self.numel:
            self._seen[result.untyped_storage().data_ptr()] = weakref.ref(result)
        there = [address for address, ref in self._seen.items() if ref() is not None]
        self.most = max(self.most, len(there))
        return result


def test_a_few_layers_at_once_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets.gradient_buckets, "__defaults__", (256 * 256 * 8,))
    batch = torch.rand(4, 256).double(), torch.rand(4, 256).double()
    net = Deep().double()

    def train(communicator: RankCommunicator, **settings: Any) -> int:
        mine = [part_of(x, communicator, "data_parallel") for x in batch]
        ways = {"mode": "data_parallel", "shard_updates": ALWAYS, **settings}
        model = muster.parallelize(net, mine, communicator=communicator, **ways)
        watch = _Largest(256 * 256)
        with (
            watch if communicator.rank == 0 else contextlib.nullcontext()
        ):  # torch has races of two such modes
            model(*mine).backward()
        return watch.most

    assert run_ranks(2, train)[0] >= 8
    assert run_ranks(2, functools.partial(train, shard_parameters=ALWAYS))[0] <= 7


def test_memory_that_is_too_small_for_whole_parameters_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets.gradient_buckets, "__defaults__", (256 * 256 * 8,))
    graph = trace(Deep().double(), (torch.rand(8, 256).double(),) * 2).graph
    size = 8 * 256 * 256 * 8

    def planned(memory_bytes: float) -> Plan:
        machine = replace(SLOW, memory_bytes=memory_bytes)
        return find_plan(  # the rest by the batch, or layers are split, whose parts are as small
            graph, 4, machine=machine, memory=1.0, mesh=(4,), mode="semi_auto", rest="data_parallel"
        )

    scarce = planned(1.7 * size)
    assert any(state.regathered for state in scarce.states)
    assert scarce.nbytes <= 1.7 * size
    assert "(ZeRO-3)" in str(scarce)
    with pytest.raises(SettingsError, match="no plan fits"):
        planned(0.9 * size)
    assert not any(state.regathered for state in planned(10 * size).states)
