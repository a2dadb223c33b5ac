"""Checkpoints of divided models: saved in one plan, loaded in another, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from muster.errors import SettingsError
from muster.parallel.api import parallelize
from muster.parallel.checkpoint import load_divided, save_divided, saved_at
from muster.parallel.module import ParallelModule
from muster.parallel.planning.parts import Part, overlap, parts_of
from muster.parallel.planning.search import solve
from muster.torch.optimizer_state import make_optimizer_state
from muster.training.checkpoint import CheckpointError
from muster.training.state import StateMismatchError
from tests.parallel.models import make
from tests.parallel.oracle import Case, part_of
from tests.parallel.ranks import RankCommunicator, run_ranks


def plan_for(case: Case, mesh: tuple[int, ...], seed: int) -> Any:
    return case.random_plan(mesh, seed) if math.prod(mesh) > 1 else _of_one(case)


def _of_one(case: Case) -> Any:
    problem = case.problem((1,))
    solution = solve(problem)
    assert solution is not None
    return case.plan(problem, solution.choice)


def trained(case: Case, plan: Any, communicator: RankCommunicator, steps: int = 2) -> Any:
    model = ParallelModule(make(case.name), case.traced, plan, communicator)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if "bias" not in n]},
            {"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    for batch in case.batches[:steps]:
        optimizer.zero_grad()
        model(*(part_of(x, communicator, case.dataset) for x in batch)).backward()
        optimizer.step()
    return model, optimizer


def whole(model: ParallelModule, optimizer: Any) -> dict[str, Any]:
    """Every tensor of model and optimizer, whole."""
    found = {f"model.{name}": tensor for name, tensor in model.full_state_dict().items()}
    values = model.full_state_dict()
    for key in ("exp_avg", "exp_avg_sq"):
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(optimizer.state[p][key] if p in optimizer.state else torch.zeros_like(p))
        found |= {f"{key}.{name}": tensor for name, tensor in model.full_state_dict().items()}
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old)
    assert all(torch.equal(values[name], tensor) for name, tensor in model.full_state_dict().items())
    return found


@pytest.mark.parametrize("name", ["mlp", "gpt_fused_tied", "residual"])
def test_what_four_ranks_saved_is_loaded_on_one_two_and_three(name: str, tmp_path: Path) -> None:
    case = Case(name)
    folder = tmp_path / "step"

    def save(communicator: RankCommunicator) -> Any:
        model, optimizer = trained(case, plan_for(case, (2, 2), 11), communicator)
        optimizer.param_groups[0]["lr"] = 0.25
        save_divided(folder, model, optimizer, extra={"step": 2})
        return whole(model, optimizer)

    want = run_ranks(4, save)[0]
    for world, mesh in ((1, (1,)), (2, (2,)), (3, (3,)), (4, (4,))):
        try:
            plan = plan_for(case, mesh, 3 + world)
        except AssertionError:
            assert world == 3  # the batch does not divide by three
            continue

        def load(communicator: RankCommunicator, plan: Any = plan) -> Any:
            model, optimizer = trained(case, plan, communicator, steps=0)
            extra = load_divided(folder, model, optimizer)
            steps = {float(state["step"]) for state in optimizer.state.values()}
            return whole(model, optimizer), extra, optimizer.param_groups[0]["lr"], steps

        for got, extra, rate, steps in run_ranks(world, load):
            assert extra == {"step": 2}
            assert rate == 0.25
            assert steps == {2.0}
            assert got.keys() == want.keys()
            assert [key for key in want if not torch.equal(got[key], want[key])] == []


def test_channels_last_is_saved_and_loaded_like_any_other_format(tmp_path: Path) -> None:
    case = Case("residual")
    plan = case.random_plan((2,), 1)

    def run(communicator: RankCommunicator) -> Any:
        model = ParallelModule(
            make("residual").to(memory_format=torch.channels_last), case.traced, plan, communicator
        )
        want = {name: tensor.clone() for name, tensor in model.full_state_dict().items()}
        save_divided(tmp_path / "step", model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_divided(tmp_path / "step", model)
        return want, model.full_state_dict()

    for want, got in run_ranks(2, run):
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
        assert any(t.dim() == 4 and not t.is_contiguous() for t in want.values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_bare_module_loads_it_with_torch_alone(tmp_path: Path) -> None:
    case = Case("gpt_fused_tied")

    def save(communicator: RankCommunicator) -> Any:
        model, optimizer = trained(case, case.random_plan((2, 2), 5), communicator)
        save_divided(tmp_path / "step", model, optimizer)
        return whole(model, optimizer)

    want = run_ranks(4, save)[0]
    torch.manual_seed(99)
    bare = make("gpt_fused_tied")
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in bare.named_parameters() if "bias" not in n]},
            {"params": [p for n, p in bare.named_parameters() if "bias" in n], "weight_decay": 0.0},
        ]
    )
    with torch.no_grad():
        for p in bare.parameters():
            p.add_(1)
            p.grad = torch.zeros_like(p)
    state = {"model": bare.state_dict(), "optimizer": get_optimizer_state_dict(bare, optimizer)}
    dcp.load(state, checkpoint_id=str(tmp_path / "step"), no_dist=True)
    for name, tensor in bare.state_dict().items():
        assert torch.equal(tensor, want[f"model.{name}"]), name
    for name, entries in state["optimizer"]["state"].items():
        assert torch.equal(entries["exp_avg"], want[f"exp_avg.{name}"]), name
        assert float(entries["step"]) == 2.0
    assert state["optimizer"]["param_groups"][0]["lr"] == 1e-2


def test_what_cannot_be_saved_or_loaded_is_refused_on_all_ranks(tmp_path: Path) -> None:
    case = Case("mlp")

    def run(communicator: RankCommunicator) -> list[str]:
        model, optimizer = trained(case, case.random_plan((2,), 1), communicator)
        refusals = []
        (tmp_path / "file").write_text("")
        for call, kind in (
            (lambda: save_divided(tmp_path / "file" / "step", model, optimizer), CheckpointError),
            (lambda: load_divided(tmp_path / "nothing", model, optimizer), CheckpointError),
        ):
            with pytest.raises(kind) as refused:
                call()
            refusals.append(str(refused.value))
        save_divided(tmp_path / "bare", model)
        with pytest.raises(StateMismatchError, match="no optimizer"):
            load_divided(tmp_path / "bare", model, optimizer)
        return refusals

    for first, second in run_ranks(2, run):
        assert "could not be made ready" in first
        assert "no checkpoint" in second


class Partly(nn.Module):
    """Trains some parameters; one is frozen, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)
        self.frozen, self.unused = nn.Linear(12, 12).requires_grad_(False), nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.frozen(self.up(x)))).square().mean()


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_parameters_without_gradients_do_not_stand_in_the_way(kind: str, steps: int, tmp_path: Path) -> None:
    """They had no state when it was saved; what they have where it is loaded starts over."""
    net = Partly()
    settings: dict[str, Any] = {"lr": 1e-2} | ({"momentum": 0.9} if kind == "SGD" else {})

    def made(communicator: RankCommunicator) -> tuple[Any, Any, Any]:
        x = torch.ones(4, 8)
        model = parallelize(copy.deepcopy(net), (x,), communicator=communicator)
        return model, getattr(torch.optim, kind)(model.parameters(), **settings), x

    def states(model: Any, optimizer: Any) -> dict[str, Any]:
        return {
            f"{name}.{key}": value.clone()
            for name, parameter in model.named_parameters()
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def save(communicator: RankCommunicator) -> dict[str, Any]:
        model, optimizer, x = made(communicator)
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        save_divided(tmp_path / "step", model, optimizer)
        return states(model, optimizer)

    def load(communicator: RankCommunicator) -> tuple[dict[str, Any], dict[str, Any]]:
        model, optimizer, _ = made(communicator)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        held = {id(value) for entries in optimizer.state.values() for value in entries.values()}
        load_divided(tmp_path / "step", model, optimizer)
        assert held == {id(value) for entries in optimizer.state.values() for value in entries.values()}
        with pytest.raises(StateMismatchError, match=r"another kind than Adagrad|has no optimizer\.state"):
            load_divided(tmp_path / "step", model, torch.optim.Adagrad(model.parameters()))
        return states(model, optimizer), model.full_state_dict()

    want = run_ranks(2, save)[0]
    assert len(want) == (0 if not steps else 4 * len({key.rpartition(".")[2] for key in want}))
    for got, weights in run_ranks(2, load):
        assert all(torch.equal(got[key], value) for key, value in want.items())
        assert all(not value.any() for key, value in got.items() if key not in want)
        assert torch.equal(weights["unused.weight"], net.unused.weight)


class WithNothing(nn.Module):
    """Has a parameter and a buffer without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.none = nn.Linear(8, 4), nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("gone", torch.zeros(0, dtype=torch.long))

    def forward(self, x: Any) -> Any:
        return self.fc(x).square().mean()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_without_elements_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    net = WithNothing()

    def run(communicator: RankCommunicator) -> bool:
        model = parallelize(copy.deepcopy(net), (torch.ones(2, 8),), communicator=communicator)
        optimizer = torch.optim.AdamW(model.parameters())
        make_optimizer_state(optimizer)
        save_divided(tmp_path / "step", model, optimizer)
        with torch.no_grad():
            model.fc.weight.zero_()
        load_divided(tmp_path / "step", model, optimizer)
        return bool(torch.equal(model.full_state_dict()["fc.weight"], net.fc.weight))

    assert run_ranks(2, run) == [True, True]
    state = {"model": WithNothing().state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "step"), no_dist=True)
    assert torch.equal(state["model"]["fc.weight"], net.fc.weight)


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_a_rank_that_is_killed_while_it_replaces_a_checkpoint_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, folder = Case("mlp"), tmp_path / "step"
    plan = case.random_plan((2,), 1)
    renamed = Path.rename

    def broken_off(self: Path, target: Path) -> Path:
        if target == folder and (tmp_path / ".step.old").exists():
            raise Killed
        return renamed(self, target)

    def save(communicator: RankCommunicator) -> None:
        model, optimizer = trained(case, plan, communicator)
        with contextlib.suppress(Killed, threading.BrokenBarrierError):
            save_divided(folder, model, optimizer, extra={"step": communicator.world_size})
        if communicator.rank == 0:  # who waits for it learns of its end
            communicator.abort(Exception())

    def load(communicator: RankCommunicator) -> int:
        model, optimizer = trained(case, plan, communicator, steps=0)
        step: int = load_divided(folder, model, optimizer)["step"]
        return step

    run_ranks(2, save)
    with monkeypatch.context() as killed:
        killed.setattr(Path, "rename", broken_off)
        run_ranks(2, save)
    assert not folder.exists()
    assert run_ranks(2, load) == [2, 2]
    run_ranks(2, save)
    assert folder.exists()
    assert not (tmp_path / ".step.old").exists()


def test_another_model_is_refused_by_the_name_of_what_differs(tmp_path: Path) -> None:
    first, other = Case("mlp"), Case("quick")

    def save(communicator: RankCommunicator) -> None:
        save_divided(tmp_path / "step", trained(first, first.random_plan((2,), 1), communicator)[0])

    def load(communicator: RankCommunicator) -> None:
        with pytest.raises(StateMismatchError, match=r"has no model\."):
            load_divided(tmp_path / "step", trained(other, other.random_plan((2,), 1), communicator)[0])

    run_ranks(2, save)
    run_ranks(2, load)


def test_boxes_are_exactly_the_elements_that_a_rank_holds() -> None:
    draw = random.Random(4)
    for _ in range(200):
        sizes = tuple(draw.randint(1, 4) for _ in range(draw.randint(0, 3)))
        offsets = tuple(draw.randint(0, 3) for _ in sizes)
        count = math.prod(sizes)
        start = draw.randint(0, count)
        stop = draw.randint(start, count)
        seen: list[int] = []
        whole_sizes = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        numbers = torch.arange(math.prod(whole_sizes)).view(whole_sizes)
        own = numbers[tuple(slice(o, None) for o in offsets)].reshape(-1)[start:stop]
        for box in Part(offsets, sizes, start, stop).boxes():
            assert box.start == len(seen)
            index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            seen += numbers[index].reshape(-1).tolist()
        assert seen == own.tolist()


def test_the_parts_of_all_ranks_cover_each_tensor() -> None:
    case = Case("gpt")
    for seed in range(3):
        plan = case.random_plan((2, 2), seed)
        for name, parts in parts_of(plan.graph, plan.states, plan.mesh).items():
            node = plan.graph.nodes[plan.graph.by_name()[name]]
            covered = torch.zeros(plan.graph.values[node.outputs[0]].shape)
            boxes = {box for part in set(parts) for box in part.boxes()}
            for box in boxes:
                covered[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
                assert all(a is b or overlap(a, b) is None for a in [box] for b in boxes)
            assert bool((covered == 1).all()), name


def test_an_address_is_refused() -> None:
    with pytest.raises(SettingsError, match="'s3://bucket/run' is an address"):
        saved_at("s3://bucket/run")
