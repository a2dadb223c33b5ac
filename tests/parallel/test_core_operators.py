"""Every operator of torch's core ATen set is ruled, whole with its cost counted, or refused: never wrong."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from muster.parallel.module import ParallelModule
from muster.parallel.planning.axes import RULES, Axis, OperatorCall
from muster.parallel.planning.costs import OperatorTimes
from muster.parallel.planning.graph import Graph
from muster.parallel.planning.layouts import Mesh, replicated
from muster.parallel.planning.plan import Plan
from muster.parallel.planning.planner import options_for
from muster.parallel.planning.problem import Options, Problem, build
from muster.parallel.planning.rules import LINEAR_VIEWS, modes_of
from muster.parallel.planning.search import solve
from muster.parallel.trace import Traced, trace
from tests.parallel.core_operators import (
    DRAWN,
    MORE,
    PAGE,
    REFUSED,
    SAMPLES,
    Calls,
    core_operators,
    operator_nodes,
    refusal,
    swept,
    table,
)
from tests.parallel.oracle import SLOW, whole_gradients
from tests.parallel.ranks import RankCommunicator, run_ranks

torch.set_num_threads(1)
FAR = 1e6  # seconds, of what is not wanted


class Sweep:
    """All operators in one graph, and what one process makes of them."""

    def __init__(self, seed: int, names: Sequence[str] = ()) -> None:
        self.names = list(names) or swept()
        self.module = Calls(self.names, seed)
        self.x = torch.ones(2, dtype=torch.float64)
        self.traced: Traced = trace(self.module, (self.x,))
        self.nodes = dict(operator_nodes(self.traced.graph, self.names))
        self.wanted = self.module(self.x)
        self.wanted.sum().backward()
        self.grads = {name: each.grad for name, each in self.module.named_parameters()}
        self.draw = random.Random(seed)
        self.reached: dict[str, set[str]] = defaultdict(set)

    def offered(self) -> dict[str, set[str]]:
        """By operator, the axes that its rule has on two ranks."""
        graph = self.traced.graph
        return {
            name: {m.name for node in nodes for m in modes_of(graph, node)[0] if m.size % 2 == 0}
            for name, nodes in self.nodes.items()
        }

    def plan(self, mesh: Mesh, number: int) -> Plan:
        """A plan in which each operator is split along its axis of that number, the rest at random."""
        graph = self.traced.graph
        options = options_for(graph, mesh, "full_batch", Options((), ()))
        assert options is not None
        problem = build(graph, mesh, SLOW, options)
        wanted = {node.name: number for nodes in self.nodes.values() for node in nodes}
        for index, (node, states) in enumerate(zip(graph.nodes, problem.states, strict=True)):
            place = wanted[node.name] % len(states) if node.name in wanted else -1
            problem.states[index] = [
                dataclasses.replace(state, seconds=self.draw.random() if place < 0 else FAR * (i != place))
                for i, state in enumerate(states)
            ]
        solution = solve(problem)
        assert solution is not None
        return self._noted(problem, options, problem.chosen(solution.choice))

    def _noted(self, problem: Problem, options: Options, states: list[Any]) -> Plan:
        graph = self.traced.graph
        by_name = graph.by_name()
        for name, nodes in self.nodes.items():
            for node in nodes:
                self.reached[name] |= set(states[by_name[node.name]].modes)
        return Plan(graph, problem.mesh, SLOW, options, states, "auto", 1.0, 1.0, 1.0)

    def check(self, plan: Plan) -> None:
        """Numbers and gradients are those of one process; an operator that draws has the same everywhere."""
        ranks = 1
        for size in plan.mesh:
            ranks *= size
        results = run_ranks(ranks, lambda communicator: self._run(plan, communicator))
        wrong = set()
        for values, grads in results:
            for number, name in enumerate(self.names):
                want = (results[0] if name in DRAWN else (self.wanted.detach(),))[0][number]
                if not torch.allclose(values[number], want, rtol=1e-10, atol=1e-10):
                    wrong.add(f"{name}: {values[number]:.6f}, not {want:.6f}")
            for path, grad in self.grads.items():
                name = self.names[int(path.split(".")[1])]
                if name in DRAWN or not self.nodes[name]:
                    continue
                own = grads[path]
                want = torch.zeros_like(own) if grad is None else grad
                if not torch.allclose(own, want, rtol=1e-10, atol=1e-10):
                    wrong.add(f"{name}: the gradient of {path}")
        states = {each.name: state.key for each, state in zip(plan.graph.nodes, plan.states, strict=True)}
        keys = {name: [states[node.name] for node in nodes] for name, nodes in self.nodes.items()}
        assert not wrong, [f"{each} as {keys[each.split(':')[0]]}" for each in sorted(wrong)]

    def _run(self, plan: Plan, communicator: RankCommunicator) -> Any:
        own = dataclasses.replace(plan, step_times=[], forward_times={}, forward_steps=set())
        model = ParallelModule(self.module, self.traced, own, communicator)
        values = model(self.x)
        values.sum().backward()
        return values.detach(), whole_gradients(model)


def test_every_operator_of_the_core_set_has_a_sample() -> None:
    missing = core_operators().keys() - SAMPLES.keys() - REFUSED
    assert not missing, f"{sorted(missing)} need a sample in core_operators.py"


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    return Sweep(0)


def test_numbers_and_gradients_are_those_of_one_process(sweep: Sweep) -> None:
    most = max(len(modes_of(sweep.traced.graph, n)[0]) for nodes in sweep.nodes.values() for n in nodes)
    for number in range(most):
        sweep.check(sweep.plan((2,), number))
    left = {name: axes - sweep.reached[name] for name, axes in sweep.offered().items()}
    assert not {name: axes for name, axes in left.items() if axes}
    assert not [name for name in MORE if not sweep.offered()[name]], "these lost their rules"


def test_the_table_of_the_page_is_current(sweep: Sweep) -> None:
    made = table(sweep.traced.graph, sweep.names)
    assert made in PAGE.read_text(), "docs/parallel.md is stale: python -m tests.parallel.core_operators"


def test_what_is_kept_whole_has_its_cost_counted(sweep: Sweep) -> None:
    """Only views are free."""
    graph, mesh = sweep.traced.graph, (2,)
    times = OperatorTimes(graph, mesh, SLOW)
    for node in graph.nodes:
        if node.kind != "call" or node.op in LINEAR_VIEWS or not node.inputs:
            continue
        whole = [replicated(mesh)] * len(node.inputs), [replicated(mesh)] * len(node.outputs)
        seconds = times.seconds(node, *whole, divided=1)
        assert seconds.forward > 0, f"{node.op} costs nothing"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_no_graph_can_hold_is_refused_in_a_sentence(name: str) -> None:
    sentence = refusal(name)
    assert "core_operators.py:" in sentence
    assert sentence.count("\n") == 0


def along(dim: int, *out: int | None) -> Callable[[OperatorCall], list[Axis]]:
    """A rule with one axis, that dimension of all inputs, which comes out as ``out``, or as it goes in."""

    def wrong(call: OperatorCall) -> list[Axis]:
        given = call.argument(dim, "dim", 1)
        d = call.dim(given if isinstance(given, int) else given[0])
        return [Axis("wrong", 2, (d,) * len(call.ins), out or (d,))]

    return wrong


def repeated(call: OperatorCall) -> list[Axis]:
    """A rule that splits what is repeated, whose parts do not stay in order."""
    repeats = list(call.args[1])
    most = repeats.index(max(repeats))
    return [Axis("wrong", 2, (most - len(repeats) + len(call.ins[0]),), (most,))]


WRONG: dict[str, tuple[str, Callable[[OperatorCall], list[Axis]]]] = {
    "gather along its own dimension": ("gather", along(1)),
    "scatter_add along its own dimension": ("scatter_add", along(1)),
    "the norm of parts as their sum": ("linalg_vector_norm", along(2, None)),
    "cosine_similarity along its vectors": ("cosine_similarity", along(2, None)),
    "repeats of a part": ("repeat", repeated),
    "what is added to, by each rank": (
        "index_add",
        lambda call: [Axis("wrong", 2, (None, 0, call.args[1]), (None,))],
    ),
    "a transposed convolution's weights by inputs": (
        "conv_transpose1d",
        lambda call: [Axis("wrong", 2, (None, 0, 0), (1,))],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_sweep_sees_a_wrong_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, wrong = WRONG[name]
    monkeypatch.setitem(RULES, op, wrong)
    sweep = Sweep(2, [op])
    graph = sweep.traced.graph
    (node,) = sweep.nodes[op]
    states = build_states(graph, node.name)
    with pytest.raises((AssertionError, RuntimeError)):
        sweep.check(sweep.plan((2,), states.index("wrong")))


def build_states(graph: Graph, name: str) -> list[str]:
    options = options_for(graph, (2,), "full_batch", Options((), ()))
    assert options is not None
    problem = build(graph, (2,), SLOW, options)
    return [state.key for state in problem.states[graph.by_name()[name]]]


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(1, 9))
def test_other_shapes_and_layouts(seed: int) -> None:
    sweep = Sweep(seed)
    for number in range(8):
        sweep.check(sweep.plan(((2,), (4,), (2, 2))[number % 3], sweep.draw.randrange(60)))
