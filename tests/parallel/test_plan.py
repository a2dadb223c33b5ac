"""Plans are read, questioned, saved, loaded and refused; what users fix is checked in words."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

import muster
from muster.errors import CollectiveMismatchError, NotInitializedError, SettingsError
from muster.parallel.api import graph_of
from muster.parallel.planning import plan as plans
from muster.parallel.planning.costs import Machine
from muster.parallel.planning.layouts import coordinates, factorisations, parts
from muster.parallel.planning.plan import Plan
from muster.parallel.planning.planner import feeding, find_plan
from muster.parallel.saved import read_plan
from muster.torch.data_parallel import DataParallel
from tests.parallel.models import MODELS, Gpt, Mlp, make
from tests.parallel.oracle import part_of
from tests.parallel.ranks import RankCommunicator, run_ranks


@pytest.fixture(autouse=True)
def _fresh_context() -> Any:
    muster.reset_auto_parallel_context()
    yield
    muster.reset_auto_parallel_context()


class Wide(nn.Module):
    """A last layer so large that splitting it pays."""

    def __init__(self, classes: int = 400_000, width: int = 512) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, x: Any, y: Any) -> Any:
        return F.cross_entropy(self.fc(torch.relu(self.body(x))), y)


def wide(world: int = 4, **settings: Any) -> Plan:
    with torch.device("meta"):
        net = Wide(settings.pop("classes", 400_000))
        graph = graph_of(net, (torch.empty(16, 512), torch.empty(16, dtype=torch.long)), world)
    return find_plan(graph, world, machine=settings.pop("machine", Machine()), **settings)


# ---------------------------------------------------------------- words


def test_a_plan_is_printed_with_a_verdict_and_a_row_for_each_module() -> None:
    plan = wide()
    text = str(plan)
    assert re.match(r"\d\.\d\d times data parallel: fc's gradient of 819\.2 MB no longer travels\.", text)
    assert "4 ranks as 4; mode auto; gradients are averaged" in text
    fc = next(line for line in text.splitlines() if line.startswith("fc "))
    assert "linear ((1, 1), (4, 1), (4))" in fc
    assert "64x512 100000x512" in fc
    assert re.search(r"\d\.\d{3}", fc)
    assert "data parallel: " in text
    rows = {row.module: row for row in plan.rows()}
    assert set(rows) == {"(top)", "body", "fc"}
    assert rows["fc"].gigabytes > rows["body"].gigabytes
    # The rows' times add up to the plan's: every collective and operator stands in one of them.
    assert sum(row.predicted_ms for row in rows.values()) == pytest.approx(1e3 * plan.seconds, rel=0.01)


def test_why_shows_the_alternatives_and_what_they_would_cost() -> None:
    plan = wide()
    text = plan.why("fc")
    assert re.search(r"-> n: \(\(1, 1\), \(4, 1\), \(4\)\)", text)
    assert re.search(r"   b0: \(\(4, 1\), \(1, 1\), \(1\)\) \d+\.\d+ ms \(\+\d+\.\d%\)", text)
    costs = [each.seconds for each in plan.alternatives("linear_1")]
    assert costs == sorted(costs)
    assert costs[0] == pytest.approx(plan.seconds)
    with pytest.raises(SettingsError, match="no module or operator 'fd'; it has: body, fc"):
        plan.why("fd")


def test_fused_projections_say_why_they_cannot_be_split() -> None:
    graph = graph_of(Gpt(fused=True), MODELS["gpt"][1](0), 2)
    plan = find_plan(graph, 2, machine=Machine())
    assert "the dimension that it divides cannot be split" in plan.why("chunk")


def test_data_parallel_is_an_answer() -> None:
    plan = wide(classes=10)
    assert plan.is_data_parallel
    assert plan.verdict == "data parallel is best: no plan is predicted more than 5% faster."
    assert plan.seconds <= (plan.baseline_s or 0) * 1.002


def test_data_parallelism_computes_its_part_of_the_batch_and_nothing_twice() -> None:
    plan = wide(mode="data_parallel")
    for node, state in zip(plan.graph.nodes, plan.states, strict=True):
        if node.kind == "call":
            assert state.modes[0] in ("b0", "d0", "m"), node.name
    gradients = [each for each in plan.collectives if each.phase == "gradients"]
    whole = sum(v.nbytes for v in plan.graph.values if v.needs_grad and v.name.startswith("p_"))
    parameters = sum(node.kind == "parameter" for node in plan.graph.nodes)
    assert sum(each.nbytes for each in gradients) == whole + 4 * parameters  # and whether there is one
    assert {each.kind for each in plan.collectives if each.phase != "gradients"} == {"all_reduce"}
    assert plan.seconds == pytest.approx(wide().baseline_s or 0)


def test_what_does_not_fit_is_refused_and_what_does_is_within_the_limit() -> None:
    plan = wide(machine=Machine(memory_bytes=2.4e9))
    assert plan.verdict.startswith("data parallel does not fit: it needs ")
    assert plan.nbytes <= 0.9 * 2.4e9
    with pytest.raises(SettingsError, match=r"no plan fits into 0\.1 GB a rank"):
        wide(machine=Machine(memory_bytes=1e8))


def test_operators_without_a_rule_are_named() -> None:
    graph = graph_of(make("odd"), MODELS["odd"][1](0), 2)
    plan = find_plan(graph, 2, machine=Machine())
    assert "kept whole, for want of a rule: linalg_vector_norm" in str(plan)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not {name for name, _ in attrs} & {"src", "href"}, "the page loads something"
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_is_complete_and_loads_nothing() -> None:
    plan = wide()
    page = _Page()
    page.feed(plan.html())
    assert not page.open
    assert plan.verdict in page.words
    assert all(row.module in page.words for row in plan.rows())
    assert "cross_entropy_loss" in page.words
    assert "hsl(" in plan.html()


# ---------------------------------------------------------------- files


def test_a_plan_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    batch = MODELS["mlp"][1](0)

    def train(communicator: RankCommunicator) -> Any:
        mine = [part_of(x, communicator, "data_parallel") for x in batch]
        settings: dict[str, Any] = {"communicator": communicator}
        first = muster.parallelize(
            make("mlp"), mine, strategies={"up": {"n": 2}}, plan=path.with_suffix(".first"), **settings
        )
        communicator.barrier()
        again = muster.parallelize(make("mlp"), mine, plan=path.with_suffix(".first"), **settings)
        return first.plan, again.plan

    for first, again in run_ranks(2, train):
        assert [s.key for s in first.states] == [s.key for s in again.states]
        assert again.seconds == pytest.approx(first.seconds)
        assert again.strategies == {"up": "{'n': 2}"}
    saved = json.loads(path.with_suffix(".first").read_text())
    assert saved["collectives"]
    assert saved["machine"]["name"] == "H200, assumed"
    assert len(saved["fingerprint"]) == 16


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "data_parallel"}, 'divides parameters, which mode "data_parallel" does not'),
        ({"strategies": {"down": {"k": 2}}}, r"was made with the strategies .*up.*, not .*down"),
        ({"mesh": (1, 2)}, r"is for the mesh \[2\], not \[1, 2\]"),
        ({"memory": 1e-9}, r"needs 0.0 GB a rank, and memory=1e-09 of 139.0 GB is less"),
        ({"survive": 1}, "does not fit: p_up_.* cannot be split as"),
    ],
)
def test_a_loaded_plan_does_not_outvote_what_is_asked_for(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path, batch = tmp_path / "plan.json", MODELS["mlp"][1](0)
    fixed = {"up": {"n": 2}}
    find_plan(
        graph_of(Mlp().double(), batch, 1, "full_batch"),
        2,
        machine=Machine(),
        dataset="full_batch",
        strategies=fixed,
    ).save(path)

    def load(communicator: RankCommunicator) -> None:
        with pytest.raises(SettingsError, match=words):
            muster.parallelize(
                make("mlp"),
                batch,
                communicator=communicator,
                plan=path,
                **{"dataset_strategy": "full_batch", "batch_norm": "synchronised"} | settings,
            )

    run_ranks(2, load)


def test_a_plan_says_what_the_loss_of_a_rank_would_mean() -> None:
    from tests.parallel.test_search import graph  # ResNet-50 with a million classes

    split = str(find_plan(graph("resnet50_faces"), 4, machine=Machine()))
    assert "if rank 0 is lost, parts of " in split
    assert "survive=1 keeps every part on two" in split
    hosts = ("a", "a", "b", "b")
    kept = str(find_plan(graph("resnet50_faces"), 4, machine=Machine(), hosts=hosts))
    assert "if any one host is lost, the others hold every part of the state" in kept


def test_a_plan_of_another_model_is_refused_by_its_first_difference(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    batch = MODELS["mlp"][1](0)
    graph = graph_of(Mlp(), batch, 2)
    find_plan(graph, 2, machine=Machine()).save(path)
    saved = read_plan(path)
    other = copy.deepcopy(graph)
    node = next(n for n in other.nodes if n.name == "p_up_weight")
    other.values[node.outputs[0]].shape = (64, 16)
    with pytest.raises(SettingsError, match=r"another model: its node \d+ is 'p_up_weight: .*\[32, 16\]"):
        plans.check_model(saved, other, path)
    longer = {**saved, "model": [*saved["model"], "more: relu(x) -> y"]}
    with pytest.raises(SettingsError, match=r"the plan's node .* is 'more: relu"):
        plans.check_model(longer, graph, path)
    changed = {**saved, "fingerprint": "0"}
    with pytest.raises(SettingsError, match="with other arguments"):
        plans.check_model(changed, graph, path)


def test_a_plan_made_without_gpus_is_of_the_model_on_any_device() -> None:
    """Ranks have devices of their own, which stand in the graph where a module makes tensors."""

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return (self.fc(x) + torch.arange(8, device=x.device)).sum()

    prints = set()
    for device in ("cpu", "meta"):
        graph = graph_of(Placed().to(device), (torch.empty(2, 8, device=device),), 2)
        assert any("device" in str(node.kwargs) for node in graph.nodes)
        prints.add(graph.fingerprint())
    assert len(prints) == 1


def test_ranks_with_different_models_are_told_so() -> None:
    def train(communicator: RankCommunicator) -> Any:
        net = Mlp() if communicator.rank else Mlp().requires_grad_(False)
        net.up.requires_grad_(True)
        mine = [x.float()[:4] for x in MODELS["mlp"][1](0)]
        with pytest.raises(
            CollectiveMismatchError, match=r"The ranks \[1\] came to another plan than rank 0"
        ):
            muster.parallelize(net, mine, communicator=communicator)

    run_ranks(2, train)


# ---------------------------------------------------------------- what users fix


def quick(strategies: Any, world: int = 8, **settings: Any) -> Plan:
    from tests.parallel.models import Quick

    graph = graph_of(Quick(), (torch.empty(2, 32), torch.empty(2, 16)), world)
    return find_plan(graph, world, machine=Machine(), mode="semi_auto", strategies=strategies, **settings)


def test_the_tutorials_strategy_is_propagated_as_there() -> None:
    plan = quick({"matmul": ((2, 4), (4, 1))}, search="sharding_propagation")
    assert plan.mesh == (2, 4)
    rows = plan.rows()
    assert rows[0].strategies.startswith("matmul ((2, 4), (4, 1)); relu ((2, 4)); matmul ((2, 4), (4, 1))")
    assert rows[0].local.startswith("8x8 8x16; 8x4; 8x4 4x16")
    first = [each for each in plan.collectives if each.node == "relu" and each.phase == "forward"]
    assert [(each.kind, each.dims, each.nbytes) for each in first] == [("reduce_scatter", (1,), 8 * 16 * 4)]


def test_one_search_for_all_names() -> None:
    same = {
        name: quick({}, search=name).seconds
        for name in ("exact", "recursive_programming", "dynamic_programming")
    }
    assert len(set(same.values())) == 1
    assert quick({}, search="propagation").seconds >= same["exact"]


@pytest.mark.parametrize(
    ("strategies", "words"),
    [
        ({"matmul": ((2, 4), (2, 4))}, "the axis k is cut into 4 and into 2"),
        ({"matmul": ((2, 4, 1), (4, 1))}, "input 0 has 2 dimensions"),
        (
            {"matmul": ((3, 1), (1, 1))},
            r"its axis m has 16 elements, which 3 slices cannot share evenly; 18 could",
        ),
        ({"matmul": {"q": 2}}, r"has no axis 'q'; it has m \(16\), k \(32\), n \(16\)"),
        ({"nothing": ((1, 1), (1, 1))}, "nothing is called 'nothing'; there are: "),
        ({"matmul": ((16, 1), (1, 1))}, "cannot be split as its strategy .* on 8 ranks"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused_in_words(strategies: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        quick(strategies)


def test_a_vocabulary_that_does_not_divide_is_offered_padding() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.head = nn.Embedding(50257, 8), nn.Linear(8, 50257)

        def forward(self, x: Any, y: Any) -> Any:
            return F.cross_entropy(self.head(self.tok(x)), y)

    graph = graph_of(Words(), (torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)), 8)
    with pytest.raises(
        SettingsError, match=r"50257 elements, which 8 slices .* 50264 could. Build the layer with 50264"
    ):
        find_plan(graph, 8, machine=Machine(), strategies={"tok": {"v": 8}})


def test_a_linear_layers_strategy_in_either_order() -> None:
    graph = graph_of(Mlp(), [x.float() for x in MODELS["mlp"][1](0)], 2)
    for strategy in (((1, 2), (1, 2)), ((1, 2), (2, 1)), {"k": 2}):
        plan = find_plan(graph, 2, machine=Machine(), strategies={"down": strategy})
        assert plan.state_of("linear_1").modes == ("k",)


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    graph = graph_of(Mlp(), [x.float() for x in MODELS["mlp"][1](0)], 1)
    with pytest.raises(
        SettingsError, match=r"the batch \(x \[8, 16\], y \[8, 8\]\) cannot be shared by 3 ranks"
    ):
        find_plan(graph, 3, machine=Machine())


def test_slices_of_the_data_by_input() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: Any, y: Any) -> Any:
            return F.mse_loss(self.fc(x), y)

    dataset = ((2, 2), (2, 1))
    graph = graph_of(Pair(), (torch.empty(2, 4), torch.empty(2, 4)), 4, dataset)
    plan = find_plan(graph, 4, machine=Machine(), dataset=dataset, mesh=(2, 2))
    assert plan.state_of("x").outs == ((0, 1),)
    assert plan.state_of("y").outs == ((0, "R"),)
    assert "fed as dataset_strategy says, there is no data parallelism" in plan.verdict


@pytest.mark.parametrize(
    ("dataset", "cells"),
    [
        (((2, 1), (2, 1)), [((r // 4, 0), (r // 4, 0)) for r in range(8)]),
        (((2, 4), (2, 1)), [((r // 4, r % 4), (r // 4, 0)) for r in range(8)]),
        (((4, 2), (1, 2)), [((r // 2, r % 2), (0, r % 2)) for r in range(8)]),
        (((2, 1), (1, 4)), [((r // 4, 0), (0, r % 4)) for r in range(8)]),
        (((1, 8), (1, 2)), [((0, r), (0, r // 4)) for r in range(8)]),
    ],
)
def test_which_slices_a_rank_feeds_does_not_depend_on_the_mesh(dataset: Any, cells: Any) -> None:
    fitting = 0
    for mesh in [*factorisations(8, 3), (1, 2, 4), (4, 1, 2)]:
        layouts = feeding(mesh, dataset, [(16, 16), (16, 16)])
        for rank in range(8) if layouts is not None else ():
            assert layouts is not None
            place = coordinates(rank, mesh)
            got = []
            for layout in layouts:
                cell = [0, 0]
                for size, entry, index in zip(mesh, layout, place, strict=True):
                    if isinstance(entry, int):
                        cell[entry] = cell[entry] * size + index
                got.append(tuple(cell))
            assert tuple(got) == cells[rank], (mesh, rank, layouts)
        fitting += layouts is not None
    assert fitting >= 2


@pytest.mark.parametrize("order", [("b0", "n"), ("n", "b0")])
@pytest.mark.parametrize("counts", [{"b0": 2, "n": 4}, {"b0": 4, "n": 2}])
def test_ranks_that_feed_slices_train_on_the_whole_batch(
    order: tuple[str, str], counts: dict[str, int]
) -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 8).double()
    x, y = torch.rand(8, 8).double(), torch.randint(8, (8,))
    want = F.cross_entropy(net(x), y).item()
    rows = counts["b0"]

    def train(communicator: RankCommunicator) -> Any:
        mine = [each.chunk(rows)[communicator.rank * rows // 8] for each in (x, y)]
        model = muster.parallelize(
            copy.deepcopy(net),
            mine,
            loss=nn.CrossEntropyLoss(),
            communicator=communicator,
            strategies={"linear": {axis: counts[axis] for axis in order}},
            dataset_strategy=((rows, 1), (rows,)),
        )
        return model(*mine).item()

    for loss in run_ranks(8, train):
        assert loss == pytest.approx(want, abs=1e-12)


# ---------------------------------------------------------------- modes and MindSpore's names


def test_the_context_sets_defaults_and_is_forgotten() -> None:
    assert muster.get_auto_parallel_context("parallel_mode") == "stand_alone"
    assert muster.get_auto_parallel_context("mirror_mean") is False
    muster.set_auto_parallel_context(
        parallel_mode=muster.ParallelMode.AUTO_PARALLEL,
        auto_parallel_search_mode="sharding_propagation",
        mirror_mean=True,
    )
    assert muster.get_auto_parallel_context("gradients_mean") is True
    assert muster.get_auto_parallel_context("search_mode") == "sharding_propagation"
    muster.reset_auto_parallel_context()
    assert muster.get_auto_parallel_context("gradients_mean") is False


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipeline_stages": 2}, "pipeline_stages has no counterpart here. Pipelines are not offered"),
        (
            {"parallel_mode": "parallel"},
            "parallel_mode is one of stand_alone, data_parallel, hybrid_parallel",
        ),
        ({"search_mode": "best"}, "search_mode is one of exact"),
        ({"gradients_mean": 1}, "gradients_mean is True or False, not 1"),
        ({"gradients_mean": True, "mirror_mean": True}, "two names of one setting"),
        ({"dataset_strategy": "half"}, 'dataset_strategy is "data_parallel", "full_batch", or'),
        ({"mesh": 2}, "there is no setting 'mesh'; there are parallel_mode"),
    ],
)
def test_a_context_that_means_nothing_here_is_refused(settings: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        muster.set_auto_parallel_context(**settings)
    assert muster.get_auto_parallel_context("gradients_mean") is False


def test_what_mindspore_sets_and_nothing_here_does_is_refused_with_what_serves_instead() -> None:
    remedies = {
        "all_reduce_fusion_config": "buckets of one size",
        "auto_pipeline": "Pipelines are not offered",
        "dump_local_norm": "clip_grad_norm_",
        "force_fp32_communication": "keep parameters in float32",
        "gradient_fp32_sync": "keep parameters in float32",
        "group_ckpt_save_file": "save_divided",
        "loss_repeated_mean": "counts once",
        "optimizer_weight_shard_size": "enable_parallel_optimizer=True",
        "parallel_optimizer_config": "enable_parallel_optimizer=True",
        "pipeline_config": "Pipelines are not offered",
        "strategy_ckpt_config": "strategy_ckpt_save_file",
    }
    for name, words in remedies.items():
        with pytest.raises(SettingsError, match=f"{name} has no counterpart here") as caught:
            muster.set_auto_parallel_context(**{name: True})
        assert words in str(caught.value)


def test_size_and_rank_are_taken_when_they_are_true() -> None:
    muster.set_auto_parallel_context(parallel_mode="data_parallel", device_num=2)

    def train(communicator: RankCommunicator) -> Any:
        session = SimpleNamespace(communicator=communicator)
        return muster.parallelize(make("mlp"), [x[:4] for x in MODELS["mlp"][1](0)], session=session).plan

    assert len(run_ranks(2, train)) == 2
    muster.set_auto_parallel_context(device_num=3)
    with pytest.raises(SettingsError, match="device_num is 3, and must be 2: the job has this many ranks"):
        run_ranks(2, train)
    muster.reset_auto_parallel_context()
    muster.set_auto_parallel_context(parallel_mode="data_parallel", global_rank=0)
    with pytest.raises(SettingsError, match="global_rank is 0, and must be 1: this is the worker's rank"):
        run_ranks(2, train)
    with pytest.raises(SettingsError, match="device_num is a whole number, not True"):
        muster.set_auto_parallel_context(device_num=True)


def test_size_and_rank_are_checked_at_once_where_there_is_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotInitializedError):
        muster.get_auto_parallel_context("device_num")
    monkeypatch.setattr("muster.worker.collectives.get_group_size", lambda: 8)
    monkeypatch.setattr("muster.worker.collectives.get_rank", lambda: 5)
    muster.set_auto_parallel_context(device_num=8, global_rank=5)
    assert muster.get_auto_parallel_context("device_num") == 8
    assert muster.get_auto_parallel_context("global_rank") == 5
    with pytest.raises(SettingsError, match=r"device_num is 4, and must be 8.*muster\.get_group_size"):
        muster.set_auto_parallel_context(device_num=4)


def test_a_full_batch_by_its_older_name() -> None:
    muster.set_auto_parallel_context(full_batch=True)
    assert muster.get_auto_parallel_context("dataset_strategy") == "full_batch"
    assert muster.get_auto_parallel_context("full_batch") is True
    muster.set_auto_parallel_context(full_batch=False)
    assert muster.get_auto_parallel_context("dataset_strategy") == "data_parallel"
    with pytest.raises(SettingsError, match="full_batch is True or False, not 'yes'"):
        muster.set_auto_parallel_context(full_batch="yes")


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto", "auto"])
def test_the_parallel_optimizer_divides_all_updates_and_changes_no_result(mode: str) -> None:
    batch = MODELS["mlp"][1](0)
    muster.set_auto_parallel_context(
        parallel_mode=mode, gradients_mean=True, parameter_broadcast=True, enable_parallel_optimizer=True
    )

    def train(communicator: RankCommunicator, settings: Any = None) -> Any:
        mine = [part_of(x, communicator, "data_parallel") for x in batch]
        model = muster.parallelize(make("mlp"), mine, communicator=communicator, **(settings or {}))
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(*mine).backward()
            optimizer.step()
        return model.full_state_dict(), model.plan

    def whole(communicator: RankCommunicator) -> Any:
        return train(communicator, {"shard_updates": False, "mode": "auto"})

    (state, plan), _ = run_ranks(2, train)
    held = [s for n, s in zip(plan.graph.nodes, plan.states, strict=True) if n.kind == "parameter"]
    assert all(s.sharded or parts(s.outs[0], plan.mesh) > 1 for s in held)
    assert any(s.sharded for s in held)
    (wanted, other), _ = run_ranks(2, whole)
    assert not any(s.sharded for s in other.states)
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value)


def test_operators_without_a_strategy_run_data_parallel_if_asked_to() -> None:
    settings: dict[str, Any] = {"mode": "semi_auto", "strategies": {"body": {"n": 4}}}
    plan = wide(4, rest="data_parallel", **settings)
    assert plan.state_of(_linear_of(plan, "body")).modes == ("n",)
    assert set(plan.state_of(_linear_of(plan, "fc")).modes) == {"b0"}
    searched = wide(4, **settings)
    assert set(searched.state_of(_linear_of(searched, "fc")).modes) != {"b0"}
    mixed = wide(4, rest="data_parallel", mode="semi_auto", strategies={"body": {"b0": 2, "n": 2}})
    assert len(mixed.mesh) == 2
    assert mixed.state_of(_linear_of(mixed, "fc")).modes == ("b0", "b0")
    with pytest.raises(SettingsError, match='the second in mode "semi_auto" only'):
        wide(4, rest="data_parallel")


def _linear_of(plan: Plan, module: str) -> str:
    [name] = [node.name for node in plan.graph.nodes if node.module == module and node.op == "linear"]
    return name


def test_one_parameter_may_have_another_strategy_in_each_operator() -> None:
    """MindSpore refuses that; here the parameter is laid out anew for one of them."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Any) -> Any:
            return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight).square().mean()

    x, net = torch.randn(8, 8), Tied()

    def train(communicator: RankCommunicator) -> Any:
        model = muster.parallelize(
            copy.deepcopy(net),
            (part_of(x, communicator, "data_parallel"),),
            communicator=communicator,
            mode="semi_auto",
            strategies={"linear": {"n": 2}, "linear_1": {"k": 2}},
        )
        return model(part_of(x, communicator, "data_parallel")).item()

    wanted = net(x).item()
    assert run_ranks(2, train) == pytest.approx([wanted, wanted])


def test_auto_parallel_carries_the_settings_of_one_network(tmp_path: Path) -> None:
    batch = MODELS["mlp"][1](0)
    muster.set_auto_parallel_context(parallel_mode="stand_alone")  # of others

    def train(communicator: RankCommunicator) -> Any:
        net = muster.AutoParallel(make("mlp"), parallel_mode="sharding_propagation")
        net.dataset_strategy("full_batch")
        net.enable_gradients_mean()
        net.hsdp()
        net.save_operator_strategy_file(str(tmp_path / "plan.json"))
        model = muster.parallelize(net, batch, communicator=communicator)
        return model(*batch).item(), str(model.plan)

    wanted = make("mlp")(*batch).item()
    (loss, text), _ = run_ranks(2, train)
    assert loss == pytest.approx(wanted)
    assert "gradients are averaged" in text
    assert (tmp_path / "plan.json").exists()
    net = muster.AutoParallel(make("mlp"))
    assert net.settings["parallel_mode"] == "semi_auto"
    for call, words in (
        (lambda: muster.AutoParallel(net, "auto"), "parallel_mode is one of semi_auto, sharding_propagation"),
        (lambda: net.pipeline(2), "pipeline has no counterpart here.*Pipelines are not offered"),
        (lambda: net.hsdp(2), "the arguments of hsdp have no counterpart"),
        (lambda: net(*batch), "AutoParallel is not a model yet.*muster.parallelize"),
        (lambda: net.dataset_strategy("half"), 'dataset_strategy is "data_parallel", "full_batch", or'),
    ):
        with pytest.raises(SettingsError, match=words):
            call()
    assert not hasattr(net, "nonsense")


def test_the_context_is_what_parallelize_does(tmp_path: Path) -> None:
    batch = [x[:4] for x in MODELS["mlp"][1](0)]
    path = tmp_path / "strategy.json"
    alone = make("mlp")
    muster.set_auto_parallel_context(parallel_mode="stand_alone")
    model = muster.parallelize(alone, batch)
    assert model(*batch).item() == pytest.approx(alone(*batch).item())
    muster.set_auto_parallel_context(parallel_mode="auto_parallel", strategy_ckpt_save_file=str(path))

    def train(communicator: RankCommunicator) -> Any:
        return str(muster.parallelize(make("mlp"), batch, communicator=communicator).plan)

    text = run_ranks(2, train)[0]
    assert "gradients are summed" in text
    muster.set_auto_parallel_context(strategy_ckpt_save_file="", strategy_ckpt_load_file=str(path))
    text = run_ranks(2, train)[0]
    assert text.startswith(f"loaded from {path}: ") and "data parallel" not in text


def test_data_parallel_is_dataparallel_with_a_plan() -> None:
    batch = MODELS["quick"][1](0)
    reference = make("quick")
    reference(*batch).backward()

    def train(communicator: RankCommunicator) -> Any:
        mine = [part_of(x, communicator, "data_parallel") for x in batch]
        model = muster.parallelize(make("quick"), mine, communicator=communicator, mode="data_parallel")
        assert isinstance(model, DataParallel)
        model(*mine).backward()
        return {name: p.grad for name, p in model.module.named_parameters()}, model.plan

    for grads, plan in run_ranks(2, train):
        assert plan.verdict.startswith("data parallel, as asked: ")
        for name, p in reference.named_parameters():
            torch.testing.assert_close(grads[name], p.grad)


class Choosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        out = self.fc(x)
        if out.sum() > 0:  # the line that is named
            out = -out
        return out.square().mean()


def test_control_flow_is_named_by_its_line_and_falls_back_to_data_parallelism(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if "the line that is named" in text)

    def train(communicator: RankCommunicator) -> Any:
        model = muster.parallelize(Choosy(), (torch.rand(2, 4),), communicator=communicator)
        model(torch.rand(2, 4)).backward()
        with pytest.raises(muster.WorkerError, match=f"test_plan.py:{line}"):
            muster.parallelize(Choosy(), (torch.rand(2, 4),), communicator=communicator, mode="semi_auto")
        return model

    model = run_ranks(2, train)[0]
    assert isinstance(model, DataParallel)
    assert f"test_plan.py:{line}" in str(model.plan)
    assert "data parallel, because nothing else can be searched" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "both"}, 'mode is "auto", "semi_auto"'),
        ({"search": "fast"}, "search is one of exact"),
        ({"memory": 2}, "memory is a share above 0 and up to 1"),
        ({"batch_norm": "none"}, 'batch_norm is "local" or "synchronised"'),
        ({"mode": "hybrid", "strategies": {"up": {"n": 2}}}, 'strategies need "semi_auto" or "auto"'),
        ({"mesh": (3,)}, r"the mesh \[3\] has 3 ranks, and the job 1"),
        ({"mesh": "1"}, "a mesh is the ranks along each of its dimensions"),
        ({"mode": "stand_alone", "strategies": {"up": {"n": 2}}}, "the strategy of 'up' needs"),
        ({"strategies": {"up": 2}}, "a strategy is a tuple of slices for each input"),
        ({"strategies": {"nobody": {"n": 1}}}, "nothing is called 'nobody'"),
        ({"dataset_strategy": ((1, 1),) * 3}, "dataset_strategy has 3 tuples, and the batch 2 tensors"),
        ({"machine": "none.json"}, "the measured machine none.json cannot be read"),
        ({"autocast": torch.float16}, "a GradScaler sees the gradients of one rank's parts"),
    ],
)
def test_wrong_arguments_are_refused_in_words(settings: Any, words: str) -> None:
    def train(communicator: RankCommunicator) -> None:
        with pytest.raises(SettingsError, match=words):
            muster.parallelize(make("mlp"), MODELS["mlp"][1](0), communicator=communicator, **settings)

    run_ranks(1, train)


def test_without_a_session_it_says_so() -> None:
    with pytest.raises(NotInitializedError):
        muster.parallelize(make("mlp"), MODELS["mlp"][1](0))
    with pytest.raises(SettingsError, match="example is a tuple of the tensors"):
        run_ranks(1, lambda c: muster.parallelize(make("mlp"), "batch", communicator=c))


def test_measured_times_stand_beside_the_predicted_ones() -> None:
    batch = MODELS["mlp"][1](0)

    def train(communicator: RankCommunicator) -> Any:
        mine = [part_of(x, communicator, "data_parallel") for x in batch]
        model = muster.parallelize(make("mlp"), mine, communicator=communicator)
        for _ in range(9):
            model(*mine).backward()
        return model.plan

    plan = run_ranks(2, train)[0]
    assert re.search(r"measured \d+\.\d{3} ms a step \(median of 5\)", str(plan))
    assert all(row.measured_ms is not None and row.measured_ms > 0 for row in plan.rows())
