"""MindSpore's names: a context, and the settings of one network."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import muster
from muster.errors import NotInitializedError, SettingsError
from muster.parallel.planning.layouts import parts
from tests.parallel.models import MODELS, make
from tests.parallel.oracle import part_of
from tests.parallel.ranks import RankCommunicator, run_ranks

pytestmark = pytest.mark.usefixtures("fresh_context")


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


def test_auto_parallel_carries_the_settings_of_one_network(tmp_path: Path) -> None:
    batch = MODELS["mlp"][1](0)
    muster.set_auto_parallel_context(parallel_mode="stand_alone")  # of others

    path = str(tmp_path / "plan.json")

    def train(communicator: RankCommunicator) -> Any:
        net = muster.AutoParallel(make("mlp"), parallel_mode="sharding_propagation")
        net.dataset_strategy("full_batch")
        net.enable_gradients_mean()
        net.hsdp()
        net.save_operator_strategy_file(path)
        model = muster.parallelize(net, batch, communicator=communicator)
        again = muster.AutoParallel(make("mlp"), parallel_mode="sharding_propagation")
        again.dataset_strategy("full_batch")
        again.load_operator_strategy_file(path)
        loaded = muster.parallelize(again, batch, communicator=communicator)
        return model(*batch).item(), str(model.plan), loaded.plan.loaded

    wanted = make("mlp")(*batch).item()
    (loss, text, loaded), _ = run_ranks(2, train)
    assert loss == pytest.approx(wanted)
    assert "gradients are averaged" in text
    assert loaded == path
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
