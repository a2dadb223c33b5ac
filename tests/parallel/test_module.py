"""What training needs beside a step: dropout, clipping, accumulation, evaluation, sums, losses outside."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

import muster
from muster.errors import ArrayError, CollectiveMismatchError, SettingsError
from muster.parallel.module import ParallelModule
from muster.parallel.operators import ForwardPass, keep_mask
from tests.parallel.models import MODELS, Bert, Lstm, ids, make
from tests.parallel.oracle import SLOW, close, part_of, state_of, whole_gradients
from tests.parallel.ranks import RankCommunicator, run_ranks

TOLERANCE = 1e-10
MIXED = {"up": {"n": 2}, "down": {"k": 2}}
"""The hidden layer of an MLP split, with a sum over the ranks behind it."""


def build(name: str, communicator: RankCommunicator, **settings: Any) -> Any:
    batch = [part_of(x, communicator, "data_parallel") for x in MODELS[name][1](0)]
    return muster.parallelize(make(name), batch, communicator=communicator, **settings)


def parts(communicator: RankCommunicator, batch: Any) -> list[Any]:
    return [part_of(x, communicator, "data_parallel") for x in batch]


def test_a_divided_model_does_not_keep_the_whole_one() -> None:
    """Its parameters may be larger than what a GPU has left."""

    def run(communicator: RankCommunicator) -> Any:
        net = make("mlp")
        batch = parts(communicator, MODELS["mlp"][1](0))
        model = muster.parallelize(net, batch, communicator=communicator, strategies=MIXED, machine=SLOW)
        assert not model.plan.is_data_parallel
        return model, [weakref.ref(parameter) for parameter in net.parameters()]

    made = run_ranks(2, run)
    gc.collect()
    for model, whole in made:
        own = set(map(id, model.parameters()))
        assert all(parameter() is None or id(parameter()) in own for parameter in whole)


def test_clipping_counts_each_part_once() -> None:
    reference = make("mlp")
    batch = MODELS["mlp"][1](1)
    (100 * reference(*batch)).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    grads = {name: p.grad for name, p in reference.named_parameters()}

    def train(communicator: RankCommunicator) -> Any:
        model = build("mlp", communicator, strategies=MIXED, machine=SLOW)
        (100 * model(*parts(communicator, batch))).backward()
        return model.clip_grad_norm_(0.5), whole_gradients(model), model.plan

    for got, got_grads, plan in run_ranks(4, train):
        assert any(state.sharded for state in plan.states)
        assert not plan.is_data_parallel
        close("norm", got, norm.detach(), TOLERANCE)
        for name, grad in grads.items():
            close(name, got_grads[name], grad, 1e-8)


def test_a_captured_step_clips_by_the_norm_of_all_parts() -> None:
    reference = make("mlp")
    optimizer = torch.optim.SGD(reference.parameters(), 1.0)
    batch = MODELS["mlp"][1](1)
    muster.capture_step(lambda *x: 100 * reference(*x), reference, optimizer, clip_norm=0.5)(*batch)

    def train(communicator: RankCommunicator) -> Any:
        model = build("mlp", communicator, strategies=MIXED, machine=SLOW)
        sgd = torch.optim.SGD(model.parameters(), 1.0)
        step = muster.capture_step(lambda *x: 100 * model(*x), model, sgd, clip_norm=0.5)
        step(*parts(communicator, batch))
        dims = {name: p.dim() for name, p in model.named_parameters()}
        assert any(state.sharded for state in model.plan.states)
        assert dims == {name: p.dim() for name, p in reference.named_parameters()}  # scripts sort by them
        return model.full_state_dict()

    for got in run_ranks(4, train):
        for name, value in reference.state_dict().items():
            close(name, got[name], value, TOLERANCE)


@pytest.mark.parametrize("quiet", [True, False])
def test_gradients_accumulate_over_passes(quiet: bool) -> None:
    reference = make("mlp")
    batches = [MODELS["mlp"][1](seed) for seed in range(3)]
    for batch in batches:
        reference(*batch).backward()
    grads = {name: p.grad for name, p in reference.named_parameters()}

    def train(communicator: RankCommunicator) -> Any:
        model = build("mlp", communicator, strategies=MIXED)
        sent = []
        for number, batch in enumerate(batches):
            del communicator.log[:]
            loss = model(*parts(communicator, batch))
            if quiet and number < 2:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
            sent.append(len(communicator.log))
        return whole_gradients(model), sent

    for got, sent in run_ranks(2, train):
        assert (sent[0] < sent[2]) == quiet
        for name, grad in grads.items():
            close(name, got[name], grad, TOLERANCE)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_has_accumulated_is_cleared_by_the_optimizer(set_to_none: bool) -> None:
    """As where an epoch ends during an accumulation, or a batch is skipped."""
    reference = make("mlp")
    first, batch = (MODELS["mlp"][1](seed) for seed in range(2))
    reference(*batch).backward()

    def train(communicator: RankCommunicator) -> Any:
        model = build("mlp", communicator, strategies=MIXED, machine=SLOW)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        with model.no_sync():
            model(*parts(communicator, first)).backward()
            sgd.zero_grad(set_to_none)
            model(*parts(communicator, first)).backward()
        sgd.zero_grad(set_to_none)
        model(*parts(communicator, batch)).backward()
        assert any(state.sharded for state in model.plan.states)
        return whole_gradients(model)

    for grads in run_ranks(2, train):
        for name, p in reference.named_parameters():
            close(name, grads[name], p.grad, TOLERANCE)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8, bias=False)

    def forward(self, x: Any, y: Any) -> Any:
        return F.mse_loss(self.fc(F.dropout(x, 0.4, self.training)), y)


@pytest.mark.parametrize(("name", "draws"), [("gpt", False), ("dropped", False), ("lstm", True)])
def test_only_what_the_host_seeds_in_each_step_keeps_it_from_being_captured(name: str, draws: bool) -> None:
    """Attention and dropout may draw, from generators that a graph takes along."""

    def one(communicator: RankCommunicator) -> str | None:
        if name == "gpt":
            obstacle: str | None = build(name, communicator).capture_obstacle
            return obstacle
        net, batch = (Dropped(), (torch.rand(4, 8),) * 2) if name == "dropped" else (Lstm(), ids(0))
        if name == "lstm":
            net.body.dropout = 0.3
        found: str | None = muster.parallelize(net, batch, communicator=communicator, seed=1).capture_obstacle
        return found

    for obstacle in run_ranks(2, one):
        assert (obstacle is not None) == draws, obstacle


@pytest.mark.parametrize("fed", ["data_parallel", "full_batch"])
def test_dropout_is_known_by_seed_step_operator_and_part(fed: str) -> None:
    torch.manual_seed(3)
    net = Dropped().double()
    x, y = torch.rand(4, 8).double(), torch.rand(4, 8).double()

    def train(communicator: RankCommunicator) -> Any:
        model = muster.parallelize(
            copy.deepcopy(net),
            [part_of(each, communicator, fed) for each in (x, y)],
            communicator=communicator,
            dataset_strategy=fed,
            seed=11,
        )
        assert isinstance(model, ParallelModule)
        losses = [model(*(part_of(each, communicator, fed) for each in (x, y))).item() for _ in range(3)]
        state = state_of(model.plan, "dropout")
        return (
            losses,
            state.modes,
            model.eval()(*(part_of(each, communicator, fed) for each in (x, y))).item(),
        )

    results = run_ranks(2, train)
    modes = results[0][1]
    for step in range(3):
        run = ForwardPass(11, step)
        if "-" in modes:
            mask = keep_mask(run, ((), ()), (4, 8), 0.4, x)
        else:
            split = [keep_mask(ForwardPass(11, step), ((0,), (r,)), (2, 8), 0.4, x) for r in range(2)]
            mask = torch.cat(split) if modes == ("d0",) else torch.cat([s.view(4, 4) for s in split], 1)
        want = F.mse_loss(net.fc(x * mask), y).item()
        for losses, _, _ in results:
            assert losses[step] == pytest.approx(want, abs=1e-12)
    assert len({losses[0] for losses, _, _ in results}) == 1
    assert len(set(results[0][0])) == 3
    assert results[0][2] == pytest.approx(F.mse_loss(net.fc(x), y).item(), abs=1e-12)


@pytest.mark.parametrize("kind", ["bert", "lstm"])
def test_dropout_within_operators_is_alike_on_replicas(kind: str) -> None:
    """Attention and LSTM draw within themselves; ranks that compute the same draw the same."""
    torch.manual_seed(0)
    net = Bert(dropout=0.3).double() if kind == "bert" else Lstm().double()
    if kind == "lstm":
        net.body.dropout = 0.3
    batch = ids(0)

    def train(communicator: RankCommunicator) -> Any:
        model = muster.parallelize(
            copy.deepcopy(net), batch, communicator=communicator, dataset_strategy="full_batch", seed=1
        )
        for _ in range(2):
            loss = model(*batch)
            loss.backward()
        assert any(n.op in ("scaled_dot_product_attention", "lstm") for n in model.plan.graph.nodes)
        return loss.item(), whole_gradients(model)

    first, second = run_ranks(2, train)
    assert first[0] == second[0]
    assert math.isfinite(first[0])
    for name, grad in first[1].items():
        close(name, second[1][name], grad, 1e-12)


def test_each_pass_draws_again_without_gradients_too() -> None:
    """As samples are drawn to see how sure a model is."""

    def train(communicator: RankCommunicator) -> Any:
        x = torch.ones(4, 8)
        model = muster.parallelize(Dropped(), (x, x), communicator=communicator, machine=SLOW)
        with torch.no_grad():
            return {model(x, x).item() for _ in range(5)}

    assert [len(seen) for seen in run_ranks(2, train)] == [5, 5]


def test_gradients_may_be_summed_over_the_parts_of_the_batch() -> None:
    reference = make("mlp")
    batch = MODELS["mlp"][1](0)
    reference(*batch).backward()

    def train(communicator: RankCommunicator) -> Any:
        model = build("mlp", communicator, gradients_mean=False)
        loss = model(*parts(communicator, batch))
        loss.backward()
        return whole_gradients(model), str(model.plan), loss.item()

    for grads, text, loss in run_ranks(2, train):
        assert "gradients are summed over the parts of the batch" in text
        assert loss == pytest.approx(reference(*batch).item(), abs=1e-12)
        for name, p in reference.named_parameters():
            close(name, grads[name], 2 * p.grad, TOLERANCE)


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8).double()

    def forward(self, weight: Any, x: Any, y: Any) -> Any:
        return weight * F.mse_loss(self.fc(x), y)


@pytest.mark.parametrize(("dataset", "times"), [("data_parallel", 2), ("full_batch", 1)])
@pytest.mark.parametrize("mode", ["auto", "data_parallel"])
def test_how_many_parts_are_summed_does_not_depend_on_an_input_without_a_batch(
    dataset: str, times: int, mode: str
) -> None:
    net, reference = Weighed(), Weighed()
    reference.load_state_dict(net.state_dict())
    weight, x, y = torch.tensor(3.0).double(), torch.rand(8, 8).double(), torch.rand(8, 8).double()
    reference(weight, x, y).backward()

    def train(communicator: RankCommunicator) -> Any:
        mine = (weight, part_of(x, communicator, dataset), part_of(y, communicator, dataset))
        model = muster.parallelize(
            copy.deepcopy(net),
            mine,
            communicator=communicator,
            mode=mode,
            dataset_strategy=dataset,
            gradients_mean=False,
        )
        model(*mine).backward()
        return [p.grad for p in model.parameters()]

    for grads in run_ranks(2, train):
        for grad, p in zip(grads, reference.parameters(), strict=True):
            close("gradient", grad, times * p.grad, TOLERANCE)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, out: Any, y: Any) -> Any:
        return F.mse_loss(self.proj(out), y)


@pytest.mark.parametrize("mode", ["auto", "data_parallel"])
def test_a_loss_with_parameters_begins_alike_on_all_ranks(mode: str) -> None:
    losses = [Projected() for _ in range(2)]

    def train(communicator: RankCommunicator) -> Any:
        mine = parts(communicator, (torch.ones(8, 16), torch.ones(8, 8)))
        loss = losses[communicator.rank]
        model = muster.parallelize(Scores(), mine, communicator=communicator, loss=loss, mode=mode)
        return [p.detach() for name, p in model.named_parameters() if "proj" in name]

    for first, second in zip(*run_ranks(2, train), strict=True):
        assert torch.equal(first, second)


def test_a_loss_whose_parameters_have_names_of_the_modules_own_is_refused() -> None:
    class Own(Scores):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.Linear(8, 8)

    def train(communicator: RankCommunicator) -> None:
        mine = parts(communicator, (torch.ones(8, 16), torch.ones(8, 8)))
        muster.parallelize(Own(), mine, communicator=communicator, loss=Projected())

    with pytest.raises(SettingsError, match='net has a submodule "loss"'):
        run_ranks(2, train)


def test_ranks_that_would_draw_differently_are_refused() -> None:
    with pytest.raises(CollectiveMismatchError, match=r"The ranks \[1\] came to another plan"):
        run_ranks(2, lambda communicator: build("mlp", communicator, seed=communicator.rank))


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


def test_a_loss_outside_of_the_module() -> None:
    """What has the batch's dimension comes out in parts, and each rank takes the mean over its own."""
    torch.manual_seed(0)
    net = Scores().double()
    x, y = torch.rand(8, 16).double(), torch.rand(8, 8).double()
    reference = copy.deepcopy(net)
    F.mse_loss(reference(x), y).backward()

    def train(communicator: RankCommunicator) -> Any:
        mine, want = parts(communicator, (x, y))
        model = muster.parallelize(
            copy.deepcopy(net), (mine,), communicator=communicator, mode="semi_auto", strategies=MIXED
        )
        out = model(mine)
        assert out.shape == (4, 8)
        F.mse_loss(out, want).backward()
        return whole_gradients(model), [tuple(p.shape) for _, p in model.named_parameters()]

    for grads, shapes in run_ranks(2, train):
        assert (16, 16) in shapes
        for name, p in reference.named_parameters():
            close(name, grads[name], p.grad, TOLERANCE)


def test_layerwise_parameters_keep_this_ranks_gradient() -> None:
    torch.manual_seed(0)
    net = Scores().double()
    x, y = torch.rand(8, 16).double(), torch.rand(8, 8).double()

    def train(communicator: RankCommunicator) -> Any:
        own = copy.deepcopy(net)
        muster.layerwise(own.down.bias)
        with torch.no_grad():
            own.down.bias += communicator.rank
            own.up.bias += communicator.rank  # this one is taken from rank 0
        mine = parts(communicator, (x, y))
        model = muster.parallelize(own, mine, communicator=communicator, mode="hybrid", loss=F.mse_loss)
        model(*mine).backward()
        return {name: (p.detach().clone(), p.grad) for name, p in model.named_parameters()}

    results = run_ranks(2, train)
    locals_ = []
    for rank in range(2):
        each = copy.deepcopy(net)
        with torch.no_grad():
            each.down.bias += rank
        F.mse_loss(each(x.chunk(2)[rank]), y.chunk(2)[rank]).backward()
        locals_.append({name: p.grad for name, p in each.named_parameters()})
    for rank, result in enumerate(results):
        close("kept", result["down.bias"][0], net.down.bias.detach() + rank, 1e-12)
        close("taken", result["up.bias"][0], net.up.bias.detach(), 1e-12)
        close("own gradient", result["down.bias"][1], locals_[rank]["down.bias"], TOLERANCE)
        mean = (locals_[0]["up.weight"] + locals_[1]["up.weight"]) / 2
        close("mean gradient", result["up.weight"][1], mean, TOLERANCE)


@pytest.mark.parametrize("mode", ["auto", "semi_auto", "data_parallel"])
def test_layerwise_parameters_are_refused_where_they_would_be_shared(mode: str) -> None:
    def train(communicator: RankCommunicator) -> Any:
        own = Scores()
        muster.layerwise(own.down.bias)
        batch = torch.rand(4, 16), torch.rand(4, 8)
        return muster.parallelize(own, batch, communicator=communicator, mode=mode, loss=F.mse_loss)

    with pytest.raises(SettingsError, match=f'down.bias is layerwise, which mode "{mode}".*mode="hybrid"'):
        run_ranks(2, train)


def test_evaluation_uses_running_statistics_and_whole_weights_load_elsewhere() -> None:
    batch = MODELS["residual"][1](0)

    def train(communicator: RankCommunicator) -> Any:
        model = build("residual", communicator, strategies={"fc": {"n": 2}, "block.c3": {"n": 2}})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(*parts(communicator, batch)).backward()
            optimizer.step()
        with torch.no_grad():
            return model.eval()(*parts(communicator, batch)).item(), model.full_state_dict()

    for loss, state in run_ranks(2, train):
        bare = make("residual")
        bare.load_state_dict(state)
        assert loss == pytest.approx(bare.eval()(*batch).item(), abs=1e-10)


def test_local_batch_norm_is_data_parallels() -> None:
    batch = MODELS["residual"][1](0)

    def train(communicator: RankCommunicator) -> Any:
        model = build("residual", communicator, batch_norm="local", mode="auto")
        mine = parts(communicator, batch)
        reference = make("residual")(*mine).item()
        assert "BatchNorm uses statistics of each rank's part of the batch" in str(model.plan)
        return model(*mine).item(), reference

    results = run_ranks(2, train)
    assert results[0][0] == pytest.approx(sum(reference for _, reference in results) / 2, abs=1e-12)


@pytest.mark.parametrize("settings", [{"batch_norm": "synchronised"}, {"autocast": torch.bfloat16}])
def test_data_parallelism_does_what_else_is_asked_for(settings: dict[str, Any]) -> None:
    batch = [x.float() if x.is_floating_point() else x for x in MODELS["residual"][1](0)]
    reference = make("residual").float()
    with torch.autocast("cpu", settings.get("autocast", torch.bfloat16), enabled="autocast" in settings):
        want = reference(*batch).item()

    def train(communicator: RankCommunicator) -> Any:
        mine, net = parts(communicator, batch), make("residual").float()
        settings.setdefault("batch_norm", "synchronised")
        model = muster.parallelize(net, mine, communicator=communicator, mode="data_parallel", **settings)
        assert model.plan.is_data_parallel
        return model(*mine).item()

    for loss in run_ranks(2, train):
        assert loss == pytest.approx(want, rel=1e-3 if "autocast" in settings else 1e-5)


def test_autocast() -> None:
    batch = [x.float() for x in MODELS["mlp"][1](0)]
    reference = make("mlp").float()(*batch).item()

    def train(communicator: RankCommunicator) -> Any:
        mine = parts(communicator, batch)
        model = muster.parallelize(
            make("mlp").float(), mine, communicator=communicator, strategies=MIXED, autocast=torch.bfloat16
        )
        loss = model(*mine)
        loss.backward()
        return loss.item(), {p.grad.dtype for p in model.parameters()}

    for loss, dtypes in run_ranks(2, train):
        assert loss == pytest.approx(reference, rel=0.02)
        assert loss != reference
        assert dtypes == {torch.float32}


def test_weights_in_bfloat16() -> None:
    batch = [x.bfloat16() for x in MODELS["mlp"][1](0)]

    def train(communicator: RankCommunicator) -> Any:
        mine = parts(communicator, batch)
        model = muster.parallelize(make("mlp").bfloat16(), mine, communicator=communicator, strategies=MIXED)
        model(*mine).backward()
        return {p.grad.dtype for p in model.parameters()}

    assert run_ranks(2, train)[0] == {torch.bfloat16}


def test_a_loss_in_float16_may_sum_up_to_more_than_float16_holds() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 64, bias=False).half()

        def forward(self, x: Any, y: Any) -> Any:
            return F.cross_entropy(self.fc(x), y)

    def train(communicator: RankCommunicator) -> Any:
        mine = torch.zeros(2**14, 4).half(), torch.zeros(2**14, dtype=torch.long)
        return muster.parallelize(Classes(), mine, communicator=communicator)(*mine).item()

    assert run_ranks(2, train) == [pytest.approx(math.log(64), abs=0.01)] * 2


def test_a_batch_of_another_shape_is_refused_in_words() -> None:
    def train(communicator: RankCommunicator) -> Any:
        model = build("mlp", communicator, mode="auto", strategies=MIXED)
        with pytest.raises(ArrayError, match=r"takes x of shape \[4, 16\] from each rank; it got \[3, 16\]"):
            model(torch.rand(3, 16).double(), torch.rand(3, 8).double())
        with pytest.raises(SettingsError, match="no gradients to clip"):
            model.clip_grad_norm_(1.0)

    run_ranks(2, train)


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(8, 4, max_norm=1.0)

    def forward(self, x: Any) -> Any:
        return self.tok(x).square().mean()


def test_what_changes_a_parameter_in_the_forward_pass_is_not_split() -> None:
    def train(communicator: RankCommunicator) -> Any:
        batch = (torch.zeros(2, dtype=torch.long),)
        return muster.parallelize(Renormed(), batch, communicator=communicator)

    model = run_ranks(2, train)[0]
    assert isinstance(model, muster.DataParallel)
    assert "changes a tensor in place" in str(model.plan)


def fail(*args: Any) -> Any:
    raise RuntimeError("cut")


def test_a_broken_backward_pass_is_forgotten() -> None:
    batch = MODELS["mlp"][1](0)
    reference = make("mlp")
    reference(*batch).backward()

    def train(communicator: RankCommunicator) -> Any:
        model = build("mlp", communicator, strategies=MIXED)
        loss = model(*parts(communicator, batch))
        broken = (loss * Break.apply(loss)).sum()
        with pytest.raises(RuntimeError, match="on purpose"):
            broken.backward()
        model.forget_backward()
        loss = model(*parts(communicator, batch))
        start, model.mesh_communicator.start_all_reduce = model.mesh_communicator.start_all_reduce, fail
        with pytest.raises(RuntimeError, match="cut"):
            loss.backward()
        model.mesh_communicator.start_all_reduce = start
        with pytest.raises(muster.WorkerError, match="the previous backward pass failed"):
            model(*parts(communicator, batch)).backward()
        model.forget_backward()
        model(*parts(communicator, batch)).backward()
        return whole_gradients(model)

    for grads in run_ranks(2, train):
        for name, p in reference.named_parameters():
            close(name, grads[name], p.grad, TOLERANCE)


def test_whole_weights_are_loaded_in_parts() -> None:
    batch = MODELS["mlp"][1](0)
    torch.manual_seed(9)
    other = MODELS["mlp"][0]().double()

    def train(communicator: RankCommunicator) -> Any:
        model = build("mlp", communicator, strategies=MIXED, machine=SLOW)
        model.load_full_state_dict(other.state_dict())
        with pytest.raises(
            SettingsError, match=r"temperature has the shape \[1\]; what is loaded is missing"
        ):
            model.load_full_state_dict({})
        with pytest.raises(SettingsError, match="do so before parallelize"):
            model.half()
        return model(*parts(communicator, batch)).item(), model.full_state_dict()

    for loss, state in run_ranks(2, train):
        assert loss == pytest.approx(other(*batch).item(), abs=1e-12)
        for name, tensor in other.state_dict().items():
            close(name, state[name], tensor, 1e-12)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        h = self.fc(x)
        first = h[:, 0]
        h.mul_(2)  # seen through first, too
        return (h.sum(1) + first).square().mean()


def test_what_is_changed_in_place_behind_a_view_is_not_split() -> None:
    def train(communicator: RankCommunicator) -> Any:
        return muster.parallelize(InPlace(), (torch.rand(2, 8),), communicator=communicator)

    model = run_ranks(2, train)[0]
    assert isinstance(model, muster.DataParallel)
    assert "changes a tensor in place that is also seen through a view" in str(model.plan)


class Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise RuntimeError("on purpose")


def _by_hand(parameters: list[Any]) -> None:
    """As programs did before torch had a function for it."""
    sum(float(p.grad.data.norm(2)) ** 2 for p in parameters)


NORMS_OF_TORCH: dict[str, Callable[[list[Any]], Any]] = {
    "clip_grad_norm_": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5),
    "foreach": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5, foreach=True),
    "one by one": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5, foreach=False),
    "largest": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5, norm_type=float("inf")),
    "by hand": _by_hand,
    "all together": lambda parameters: torch.linalg.norm(
        torch.stack([torch.linalg.norm(p.grad.detach()) for p in parameters])
    ),
}


@pytest.mark.parametrize("accumulates", [False, True])
def test_torch_s_norm_of_a_part_is_refused_and_nothing_is_scaled(accumulates: bool) -> None:
    batch = MODELS["mlp"][1](1)

    def train(communicator: RankCommunicator) -> list[str]:
        model = build("mlp", communicator, strategies=MIXED, machine=SLOW)
        parameters = list(model.parameters())
        for _ in range(2):  # the second time a gradient is added to what is there
            model(*parts(communicator, batch)).backward()
        if accumulates:
            model.zero_grad()
            with model.no_sync():
                model(*parts(communicator, batch)).backward()
        before = [p.grad.clone() for p in parameters]
        said = []
        for function in NORMS_OF_TORCH.values():
            with pytest.raises(SettingsError) as refused:
                function(parameters)
            said.append(str(refused.value))
        assert all(torch.equal(p.grad, grad) for p, grad in zip(parameters, before, strict=True))
        assert all(float(grad.norm()) >= 0 for grad in before)  # a copy is a tensor like any other
        return said

    for said in run_ranks(4, train):
        assert all("model.clip_grad_norm_(max_norm)" in each for each in said)


def test_where_every_rank_has_whole_gradients_torch_s_norm_is_right() -> None:
    reference = make("mlp")
    batch = MODELS["mlp"][1](1)
    reference(*batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)

    def train(communicator: RankCommunicator) -> Any:
        ways = {"strategies": {}, "shard_updates": False}
        model = build("mlp", communicator, mesh=(2,), **ways)
        model(*parts(communicator, batch)).backward()
        return model.plan.is_data_parallel, torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    for data_parallel, got in run_ranks(2, train):
        assert data_parallel
        close("norm", got, norm, TOLERANCE)


def test_optimizers_take_the_gradients_of_parts_in_every_way() -> None:
    batch = MODELS["mlp"][1](1)

    def train(communicator: RankCommunicator) -> list[list[Any]]:
        found = []
        for way in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            model = build("mlp", communicator, strategies=MIXED, machine=SLOW)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **way)
            for _ in range(2):
                optimizer.zero_grad()
                model(*parts(communicator, batch)).backward()
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
            kept = [value for state in optimizer.state.values() for value in state.values()]
            assert {type(each) for each in kept} == {torch.Tensor}
            found.append([p.detach().clone() for p in model.parameters()])
        return found

    for one_by_one, *others in run_ranks(4, train):
        for other in others:
            for expected, got in zip(one_by_one, other, strict=True):
                close("parameter", got, expected, TOLERANCE)
