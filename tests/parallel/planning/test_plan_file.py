"""Plans are saved, loaded, and refused where they are of another model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import muster
from muster.errors import SettingsError
from muster.parallel.api import graph_of
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.plan_file import check_model
from muster.parallel.planning.planner import find_plan
from muster.parallel.saved import read_plan
from tests.parallel.models import MODELS, Mlp, make
from tests.parallel.oracle import part_of
from tests.parallel.ranks import RankCommunicator, run_ranks


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
        ({"memory": 1e-9}, r"needs 0.0 GB per rank, more than memory=1e-09 of 139.0 GB"),
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
        machine=Hardware(),
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


def test_a_plan_of_another_model_is_refused_by_its_first_difference(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    batch = MODELS["mlp"][1](0)
    graph = graph_of(Mlp(), batch, 2)
    find_plan(graph, 2, machine=Hardware()).save(path)
    saved = read_plan(path)
    other = copy.deepcopy(graph)
    node = next(n for n in other.nodes if n.name == "p_up_weight")
    other.values[node.outputs[0]].shape = (64, 16)
    with pytest.raises(SettingsError, match=r"another model: its node \d+ is 'p_up_weight: .*\[32, 16\]"):
        check_model(saved, other, path)
    longer = {**saved, "model": [*saved["model"], "more: relu(x) -> y"]}
    with pytest.raises(SettingsError, match=r"the plan's node .* is 'more: relu"):
        check_model(longer, graph, path)
    changed = {**saved, "fingerprint": "0"}
    with pytest.raises(SettingsError, match="with other arguments"):
        check_model(changed, graph, path)


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
