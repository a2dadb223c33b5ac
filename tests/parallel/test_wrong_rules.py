"""Deliberately wrong rules are caught: what the tests of exactness are worth."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from muster.parallel import operators
from muster.parallel.planning import axes as named
from muster.parallel.planning import problem, rules
from muster.parallel.planning.axes import Axis, Mode
from muster.parallel.planning.graph import Graph, Node
from muster.parallel.planning.layouts import REPLICATE
from muster.parallel.planning.search import solve
from tests.parallel.oracle import Case

Change = Callable[[Graph, Node, list[Axis]], list[Axis]]


@functools.cache
def case(name: str) -> Case:
    return Case(name)


def shape(graph: Graph, node: Node, position: int) -> tuple[int, ...]:
    return graph.values[node.inputs[position]].shape


def swap(axes: list[Axis], name: str, **changes: Any) -> list[Axis]:
    from dataclasses import replace

    return [replace(axis, **changes) if axis.name == name else axis for axis in axes]


def more(name: str, size: int, ins: tuple[int | None, ...], outs: tuple[int | None, ...]) -> Change:
    return lambda graph, node, axes: [*axes, Axis(name, size, ins, outs)]


WRONG: dict[str, tuple[str, str, str, Change]] = {
    # model, operator, axis that is pinned, what is wrong about it
    "layer_norm along what it normalises": ("gpt", "layer_norm", "w", more("w", 16, (2, 0, 0), (2,))),
    "softmax along its own dimension": ("mlp", "softmax", "d1", more("d1", 8, (1,), (1,))),
    "attention along the queries": (
        "gpt",
        "scaled_dot_product_attention",
        "s",
        more("s", 8, (2, 2, 2), (2,)),
    ),
    "gelu of a sum": ("gpt", "gelu", "p", more("p", 2, (None,), (None,))),
    "a contraction that comes out whole": (
        "gpt",
        "linear",
        "k",
        lambda g, n, a: swap(a, "k", outs=(named.EXCHANGED,)),
    ),
    "weights of a linear layer by the wrong dimension": (
        "gpt",
        "linear",
        "n",
        lambda g, n, a: swap(a, "n", ins=(None, 1, *(0,) * (len(n.inputs) - 2))),
    ),
    "a mean that is a sum": ("mlp", "mean", "d0", lambda g, n, a: a),
    "a bias that goes in with each part": ("gpt", "linear", "k", lambda g, n, a: a),
    "the trailing dimension of a view": (
        "gpt",
        "reshape",
        "t",
        lambda g, n, a: [*a, Axis("t", 4, (3,), (2,))],
    ),
    "a transposition that forgets to move": (
        "gpt",
        "transpose",
        "d1",
        lambda g, n, a: swap(a, "d1", outs=(1,)),
    ),
    "BatchNorm's scale as if it were split": (
        "residual",
        "batch_norm",
        "c",
        lambda g, n, a: swap(a, "c", ins=(1, 0, None, 0, 0)),
    ),
    "an embedding whose rows are not shifted": ("gpt", "embedding", "v", lambda g, n, a: a),
    "the gradient of a weight that is taken for whole": ("gpt", "linear", "b0", lambda g, n, a: a),
    "the statistics of one rank's samples": ("residual", "batch_norm", "b", lambda g, n, a: a),
}


def break_more(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong elsewhere than in the axes."""
    local: Any = operators.LocalFunction
    if which == "a mean that is a sum":
        before = local.choose

        def choose(self: Any) -> Any:
            return self.plain if self.node.op == "mean" else before(self)

        monkeypatch.setattr(local, "choose", choose)
    if which == "a bias that goes in with each part":
        monkeypatch.setattr(local, "with_bias", local.plain)
    if which == "an embedding whose rows are not shifted":
        monkeypatch.setattr(local, "embedding", lambda self, t: self.function(t[0], t[1] % t[0].shape[0]))
    if which == "the statistics of one rank's samples":
        before_norm = operators.local_function
        from muster.parallel import instructions

        monkeypatch.setattr(
            instructions,
            "local_function",
            lambda *a, **k: before_norm(*a, **{**k, "local_norm": True}),
        )


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_rule_is_caught(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, op, axis, change = WRONG[which]
    one = case(name)
    graph = one.traced.graph
    node = next(node for node in graph.nodes if node.op == op and (axis != "k" or len(node.inputs) == 3))
    honest = rules.modes_of

    def wrong(graph: Graph, each: Node) -> tuple[list[Mode], bool]:
        modes, known = honest(graph, each)
        if each.name != node.name:
            return modes, known
        axes = change(graph, each, rules.axes_of(graph, each) or [])
        made = [a.mode() for a in axes]
        if which.startswith("the gradient of a weight"):
            made = [
                Mode(m.name, m.size, m.ins, (m.ins[0], *(REPLICATE,) * (len(m.ins) - 1)), m.outs, m.out_grads)
                for m in made
            ]
        return [modes[0], *made], known

    monkeypatch.setattr(problem, "modes_of", wrong)
    break_more(which, monkeypatch)
    pinned = one.problem((2,), {node.name: lambda _, state: state.modes[0] == axis})
    solution = solve(pinned)
    assert solution is not None
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        one.check(one.plan(pinned, solution.choice))


@pytest.mark.parametrize(
    "which", sorted({(m, o, a) for m, o, a, _ in WRONG.values() if a in ("k", "n", "v", "b", "b0")})
)
def test_the_right_rule_is_not(which: tuple[str, str, str]) -> None:
    name, op, axis = which
    one = case(name)
    node = next(n for n in one.traced.graph.nodes if n.op == op and (axis != "k" or len(n.inputs) == 3))
    pinned = one.problem((2,), {node.name: lambda _, state: state.modes[0] == axis})
    solution = solve(pinned)
    assert solution is not None
    one.check(one.plan(pinned, solution.choice))
