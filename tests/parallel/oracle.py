"""Runs plans on ranks that are threads, beside one process, and compares losses, gradients and weights."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from muster.parallel.module import ParallelModule
from muster.parallel.planning.buckets import parameter_shards
from muster.parallel.planning.costs import Hardware
from muster.parallel.planning.layouts import Mesh, group_ranks
from muster.parallel.planning.plan import Plan
from muster.parallel.planning.planner import options_for
from muster.parallel.planning.problem import Options, Pin, Problem, State, build
from muster.parallel.planning.search import solve
from muster.parallel.trace import Traced, trace
from tests.parallel.models import MODELS, make
from tests.parallel.ranks import RankCommunicator, run_ranks

STEPS = 3
EPSILON = 1e-3  # a bias before BatchNorm has no gradient but noise, which Adam would blow up
SLOW = Hardware(
    "test", flops_per_s=1e9, memory_bytes_per_s=1e9, bus_bytes_per_s=1e9, latency_s=1e-7, launch_s=0
)


class Case:
    """A model, its graph, and what one process makes of it in three steps."""

    def __init__(
        self, name: str, *, dataset: Any = "data_parallel", module: Any = None, batches: Any = None
    ) -> None:
        self.name, self.dataset = name, dataset
        self.module = make(name) if module is None else module
        self.batches = batches or [MODELS[name][1](seed) for seed in range(STEPS)]
        self.traced: Traced = trace(copy.deepcopy(self.module), self.batches[0])
        self.reference = one_process(copy.deepcopy(self.module), self.batches)

    def problem(self, mesh: Mesh, pins: dict[str, Pin] | None = None, **options: Any) -> Problem:
        given = options_for(self.traced.graph, mesh, self.dataset, Options((), (), **options))
        assert given is not None
        return build(self.traced.graph, mesh, SLOW, given, pins)

    def plan(self, problem: Problem, choice: Sequence[int]) -> Plan:
        given = options_for(self.traced.graph, problem.mesh, self.dataset, Options((), ()))
        assert given is not None
        states = problem.chosen(choice)
        return Plan(self.traced.graph, problem.mesh, SLOW, given, states, "auto", 1.0, 1.0, 1.0)

    def random_plan(self, mesh: Mesh, seed: int) -> Plan:
        """A legal plan of random preferences."""
        problem = self.problem(mesh)
        draw = random.Random(seed)
        import dataclasses

        for number, states in enumerate(problem.states):
            problem.states[number] = [dataclasses.replace(s, seconds=draw.random()) for s in states]
        solution = solve(problem)
        assert solution is not None
        return self.plan(self.problem(mesh), solution.choice)

    def check(self, plan: Plan, *, tolerance: float = 1e-10) -> list[Any]:
        """Trains on ranks; compares with one process, and what was sent with the plan."""
        size = 1
        for n in plan.mesh:
            size *= n
        results = run_ranks(size, lambda communicator: self._train(plan, communicator))
        losses, grads, weights = self.reference
        for rank, (own_losses, own_grads, own_weights, _, _) in enumerate(results):
            for step in range(len(self.batches)):
                close(f"loss {step} of rank {rank}", own_losses[step], losses[step], tolerance)
            for name, grad in grads.items():
                close(f"gradient of {name} on rank {rank}", own_grads[name], grad, tolerance)
            for name, weight in weights.items():
                close(f"weight {name} on rank {rank}", own_weights[name], weight, tolerance)
        return results

    def _train(self, plan: Plan, communicator: RankCommunicator) -> Any:
        import dataclasses

        own = dataclasses.replace(plan, step_times=[], forward_times={}, forward_steps=set())
        model = ParallelModule(self.module, self.traced, own, communicator)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=EPSILON)
        losses = []
        sent: Counter[Any] = Counter()
        for batch in self.batches:
            mine = [part_of(x, communicator, self.dataset) for x in batch]
            optimizer.zero_grad()
            del communicator.log[:]
            loss = model(*mine)
            loss.backward()
            sent = Counter(communicator.log)
            optimizer.step()
            losses.append(loss.detach())
        assert sent == planned(plan, communicator.rank), (
            f"sent {sent}, planned {planned(plan, communicator.rank)}"
        )
        grads = whole_gradients(model)
        state = sum(
            value.numel() * value.element_size()
            for each in optimizer.state.values()
            for name, value in each.items()
            if name.startswith("exp_avg")
        )
        held = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        owned = [
            each.own_bytes(plan.options.optimizer_states)
            for each in parameter_shards(plan.graph, plan.states, plan.mesh).values()
        ]
        parameters, states = (sum(nbytes) for nbytes in zip(*owned, strict=True))
        assert held == parameters, f"{held} bytes of parameters, planned {parameters}"
        assert state == states, f"{state} bytes of state, planned {states}"
        return losses, grads, model.full_state_dict(), held, state


def state_of(plan: Plan, name: str) -> State:
    """How a plan divides the node of this name."""
    return plan.states[plan.graph.by_name()[name]]


def planned(plan: Plan, rank: int) -> Counter[Any]:
    """What a plan says that a rank sends in a step."""
    found: Counter[Any] = Counter()
    for each in plan.collectives:
        ranks = next(g for g in group_ranks(each.dims, plan.mesh) if rank in g)
        found[each.kind, ranks, each.nbytes] += 1
    return found


def part_of(x: Any, communicator: Any, dataset: Any) -> Any:
    if dataset == "full_batch":
        return x
    return x.chunk(communicator.world_size)[communicator.rank].contiguous()


def whole_gradients(model: ParallelModule) -> dict[str, Any]:
    """The gradients as weights would be gathered."""
    grads = {}
    for held in model.held_parameters.values():
        parameter = held.parameter
        grads[held.name] = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    whole = model.full_state_dict()
    with torch.no_grad():
        for held in model.held_parameters.values():
            held.parameter.copy_(grads[held.name])
    return whole


def one_process(module: Any, batches: Sequence[Any]) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2, eps=EPSILON)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = {n: p.grad for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    return losses, grads, dict(module.state_dict())


def close(what: str, got: Any, want: Any, tolerance: float) -> None:
    if want.is_floating_point():
        apart = (got - want).abs().max().item() if want.numel() else 0.0
        assert apart <= tolerance * max(1.0, want.abs().max().item()), f"{what} is {apart:.2e} off"
    else:
        assert torch.equal(got, want), what
