"""Each operator by itself, along each of its axes, on two ranks beside one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

from muster.parallel.planning.problem import Pin
from muster.parallel.planning.rules import modes_of
from muster.parallel.planning.search import solve
from muster.parallel.trace import trace
from tests.parallel.models import MODELS, make
from tests.parallel.oracle import Case

torch.set_num_threads(1)
LABELS = torch.tensor([1, 3, 0, 2, 3, 1, 0, 2])
MASK = torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(4)) > 0.3

# name: (function, shapes of what it takes, and the axes that a rule must offer)
OPERATORS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str]] = {
    "linear": (F.linear, ((4, 6), (8, 6), (8,)), "b0 n k"),
    "linear without bias": (lambda x, w: F.linear(x, w), ((2, 4, 6), (8, 6)), "b0 b1 n k"),
    "addmm": (torch.addmm, ((8,), (4, 6), (6, 8)), "m k n"),
    "addmm with a bias of one element": (torch.addmm, ((1,), (4, 6), (6, 8)), ""),
    "matmul of a batch": (torch.matmul, ((2, 4, 6), (2, 6, 8)), "b0 m k n"),
    "matmul that repeats": (torch.matmul, ((2, 4, 6), (6, 8)), "b0 m k n"),
    "bmm": (torch.bmm, ((2, 4, 6), (2, 6, 8)), "b0 m k n"),
    "mm": (torch.mm, ((4, 6), (6, 8)), "m k n"),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), ((2, 4, 6), (2, 8, 6)), "b i j k"),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), ((2, 4, 6), (8, 4, 3), (8,)), "b n k"),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), ((2, 4, 6, 6), (8, 4, 3, 3)), "b n k"),
    "conv2d in groups": (
        lambda x, w, b: F.conv2d(x, w, b, groups=4), ((2, 8, 4, 4), (8, 2, 3, 3), (8,)), "b g"),
    "conv3d": (F.conv3d, ((2, 4, 4, 4, 4), (4, 4, 2, 2, 2), (4,)), "b n k"),
    "attention": (F.scaled_dot_product_attention, ((4, 2, 6, 4),) * 3, "b h"),
    "attention with a mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK), ((4, 2, 6, 4),) * 3, "b h"),
    "attention with a bias": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (*((4, 2, 6, 4),) * 3, (2, 6, 6)), "b h"),
    "attention with fewer keys": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        ((2, 4, 6, 4), (2, 2, 6, 4), (2, 2, 6, 4)), "b h"),
    "embedding": (lambda w: F.embedding(LABELS, w), ((4, 6),), "b0 n v"),
    "embedding of two dimensions": (lambda w: F.embedding(LABELS.view(2, 4), w), ((4, 6),), "b0 b1 n v"),
    "embedding with padding": (lambda w: F.embedding(LABELS, w, padding_idx=1), ((4, 6),), "b0 n"),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), ((2, 4, 6), (6,), (6,)), "b0 b1"),
    "layer_norm of two dimensions": (lambda x: F.layer_norm(x, (4, 6)), ((2, 4, 6),), "b0"),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), ((2, 4, 6), (6,)), "b0 b1"),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), ((4, 4, 6), (4,), (4,)), "b"),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((4, 4, 6), (4,), (4,)), "b c"),
    "batch_norm without weights": (lambda x: F.batch_norm(x, None, None, training=True), ((4, 6),), "b c"),
    "softmax": (lambda x: F.softmax(x, 1), ((4, 6, 8),), "d0 d2"),
    "log_softmax": (lambda x: F.log_softmax(x, -1), ((4, 6, 8),), "d0 d1"),
    "cross_entropy": (lambda x: F.cross_entropy(x, LABELS), ((8, 4),), "m v"),
    "cross_entropy that ignores": (
        lambda x: F.cross_entropy(x, LABELS, ignore_index=3), ((8, 4),), "m v"),
    "cross_entropy summed": (lambda x: F.cross_entropy(x, LABELS, reduction="sum"), ((8, 4),), "m v"),
    "cross_entropy of each": (lambda x: F.cross_entropy(x, LABELS, reduction="none"), ((8, 4),), "m"),
    "cross_entropy smoothed": (lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.2), ((8, 4),), "m"),
    "cross_entropy smoothed that ignores": (
        lambda x: F.cross_entropy(x, LABELS, ignore_index=0, label_smoothing=0.2), ((8, 4),), "m"),
    "cross_entropy of pixels": (
        lambda x: F.cross_entropy(x, LABELS.view(2, 4)), ((2, 4, 4),), "m"),
    "cross_entropy with weights": (
        lambda x: F.cross_entropy(x, LABELS, torch.tensor([0.1, 0.2, 0.3, 0.4]).double()), ((8, 4),), "m"),
    "cross_entropy of probabilities": (
        lambda x, y: F.cross_entropy(x, y.softmax(1), label_smoothing=0.1), ((8, 4), (8, 4)), "m"),
    "embedding_bag": (
        lambda w: F.embedding_bag(torch.arange(12).view(4, 3) % 6, w, mode="sum"), ((6, 4),), "b n"),
    "embedding_bag that scales by frequency": (
        lambda w: F.embedding_bag(
            torch.arange(12).view(4, 3) % 5, w, mode="sum", scale_grad_by_freq=True), ((6, 4),), "n"),
    "index of each": (lambda x: x[torch.arange(8), LABELS], ((8, 4),), "i0 each"),
    "nll_loss": (lambda x: F.nll_loss(x.log_softmax(1), LABELS, ignore_index=1), ((8, 4),), "m"),
    "mse_loss": (F.mse_loss, ((4, 6), (4, 6)), "d0 d1"),
    "l1_loss": (lambda a, b: F.l1_loss(a, b, reduction="sum"), ((4, 6), (4, 6)), "d0 d1"),
    "smooth_l1_loss": (F.smooth_l1_loss, ((4, 6), (4, 6)), "d0 d1"),
    "huber_loss": (lambda a, b: F.huber_loss(a, b, delta=0.5), ((4, 6), (4, 6)), "d0 d1"),
    "binary_cross_entropy": (
        lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()), ((4, 6), (4, 6)), "d0 d1"),
    "binary_cross_entropy_with_logits": (
        lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()), ((4, 6), (4, 6)), "d0 d1"),
    "mean": (lambda x: x.mean((0, 2)), ((4, 6, 8),), "d0 d1 d2"),
    "mean of all": (torch.mean, ((4, 6),), "d0 d1"),
    "mean that keeps": (lambda x: x.mean(1, keepdim=True), ((4, 6, 8),), "d0 d1 d2"),
    "sum": (lambda x: x.sum(1), ((4, 6, 8),), "d0 d1 d2"),
    "sum of all": (torch.sum, ((4, 6),), "d0 d1"),
    "amax": (lambda x: x.amax(1), ((4, 6, 8),), "d0 d2"),
    "max": (lambda x: x.max(1).values, ((4, 6, 8),), "d0 d2"),
    "var": (lambda x: x.var(1), ((4, 6, 8),), "d0 d2"),
    "std": (lambda x: x.std(1, keepdim=True), ((4, 6, 8),), "d0 d2"),
    "logsumexp": (lambda x: x.logsumexp(1), ((4, 6, 8),), "d0 d2"),
    "topk": (lambda x: x.topk(2, 1).values, ((4, 6, 8),), "d0 d2"),
    "sort": (lambda x: x.sort(0).values, ((4, 6),), "d1"),
    "cumsum": (lambda x: x.cumsum(1), ((4, 6, 8),), "d0 d2"),
    "glu": (lambda x: F.glu(x, 1), ((4, 6, 8),), "d0 d2"),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), ((2, 4, 4, 4),), "b c"),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), ((2, 4, 4),), "b c"),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), ((2, 4, 4, 4),), "b c"),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), ((2, 4, 4, 4),), "b c"),
    "upsample_nearest2d": (lambda x: F.interpolate(x, scale_factor=2), ((2, 4, 4, 4),), "b c"),
    "upsample_bilinear2d": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((2, 4, 4, 4),), "b c"),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), ((2, 4, 4, 4),), "b"),
    "prelu": (F.prelu, ((2, 4, 6), (4,)), "d0 d1 d2"),
    "prelu with one weight": (F.prelu, ((2, 4, 6), (1,)), "d0 d1 d2"),
    "gru": (
        lambda x, h, *w: torch.gru(x, h, w, True, 1, 0.0, True, False, True)[0],
        ((2, 4, 6), (1, 2, 4), (12, 6), (12, 4), (12,), (12,)), "b"),
    "rnn_tanh": (
        lambda x, h, *w: torch.rnn_tanh(x, h, w, True, 1, 0.0, True, False, False)[0],
        ((4, 2, 6), (1, 2, 4), (4, 6), (4, 4), (4,), (4,)), "b"),
    "add that repeats": (lambda a, b: a + b, ((4, 6, 8), (6, 1)), "d0 d1 d2"),
    "mul": (torch.mul, ((4, 6), (4, 6)), "d0 d1"),
    "div": (lambda a, b: a / (b.abs() + 1), ((4, 6), (6,)), "d0 d1"),
    "div rounded": (lambda a: torch.div(a, 0.5, rounding_mode="floor") * a, ((4, 6),), "d0 d1"),
    "neg": (torch.neg, ((4, 6),), "d0 d1"),
    "mul by a number": (lambda a: a * 3, ((4, 6),), "d0 d1"),
    "add a number": (lambda x: x + 1, ((4, 6),), "d0 d1"),
    "subtract times a number": (lambda a, b: torch.sub(a, b, alpha=2), ((4, 6), (4, 6)), "d0 d1"),
    "where": (lambda a, b: torch.where(a > b, a, b), ((4, 6), (4, 6)), "d0 d1"),
    "masked_fill": (lambda a: a.masked_fill(a > 0, 2.0), ((4, 6),), "d0 d1"),
    "clamp": (lambda a: a.clamp(-0.5, 0.5), ((4, 6),), "d0 d1"),
    "pow": (lambda a: a**3, ((4, 6),), "d0 d1"),
    "gelu": (lambda a: F.gelu(a, approximate="tanh"), ((4, 6),), "d0 d1"),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), ((4, 6), (4, 6)), "d0 d1"),
    "type_as": (lambda a, b: a.float().type_as(b) * b, ((4, 6), (4, 6)), "d0 d1"),
    "view": (lambda x: x.view(24, 2, 4), ((4, 6, 8),), "d0 d2"),
    "view as other numbers": (lambda x: x * x.view(torch.int64).view(torch.float64), ((4, 6),), ""),
    "var of all": (lambda x: x.var(False), ((4, 6),), ""),
    "view with ones": (lambda x: x.view(1, 4, 6, 1, 8), ((4, 6, 8),), "d0 d1 d2"),
    "flatten": (lambda x: x.flatten(1), ((4, 6, 8),), "d0 d1"),
    "unflatten": (lambda x: x.unflatten(1, (2, 3)), ((4, 6, 8),), "d0 d1 d2"),
    "squeeze": (lambda x: x.squeeze(1), ((4, 1, 6),), "d0 d2"),
    "unsqueeze": (lambda x: x.unsqueeze(1), ((4, 6),), "d0 d1"),
    "expand": (lambda x: x.expand(2, 4, 6), ((4, 1),), "d0 d1 d2"),
    "transpose": (lambda x: x.transpose(0, 2), ((4, 6, 8),), "d0 d1 d2"),
    "t": (lambda x: x.t(), ((4, 6),), "d0 d1"),
    "permute": (lambda x: x.permute(2, 0, 1), ((4, 6, 8),), "d0 d1 d2"),
    "movedim": (lambda x: x.movedim(0, 1), ((4, 6, 8),), "d0 d1 d2"),
    "slice": (lambda x: x[:, 1:4], ((4, 6, 8),), "d0 d2"),
    "narrow": (lambda x: x.narrow(1, 1, 2), ((4, 6, 8),), "d0 d2"),
    "select": (lambda x: x[:, 2], ((4, 6, 8),), "d0 d2"),
    "chunk": (lambda x: x.chunk(3, 1)[1], ((4, 6, 8),), "d0 d2"),
    "split": (lambda x: torch.cat(x.split([2, 4], 1)[::-1], 1), ((4, 6, 8),), "d0 d2"),
    "unbind": (lambda x: x.unbind(1)[2], ((4, 6, 8),), "d0 d2"),
    "flip": (lambda x: x.flip(1), ((4, 6, 8),), "d0 d2"),
    "roll": (lambda x: x.roll(1, 1), ((4, 6, 8),), "d0 d2"),
    "cat": (lambda a, b: torch.cat([a, b], 1), ((4, 6), (4, 2)), "d0"),
    "stack": (lambda a, b: torch.stack([a, b], 1), ((4, 6), (4, 6)), "d0 d1"),
    "pad": (lambda x: F.pad(x, (1, 1)), ((4, 6, 8),), "d0 d1"),
    "pad by reflection": (lambda x: F.pad(x, (1, 1), mode="reflect"), ((4, 6, 8),), "d0 d1"),
}  # fmt: skip


class One(nn.Module):
    """An operator on parameters, times fixed numbers, so that every element of its result counts."""

    def __init__(self, function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.operands = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64)) for shape in shapes
        )
        self.function = function
        with torch.no_grad():
            out = function(*self.operands)
        self.register_buffer("numbers", torch.randn(out.shape, generator=draw, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return (self.function(*self.operands) * self.numbers).sum() + x.sum()


def _first(axis: str) -> Pin:
    return lambda _, state: state.modes[0] == axis


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_along_each_axis(name: str) -> None:
    function, shapes, wanted = OPERATORS[name]
    batches = [(torch.rand(2, dtype=torch.float64),)]  # one step: whole models take three
    one = Case(name, dataset="full_batch", module=One(function, shapes), batches=batches)
    op = name.split()[0]
    others = {
        "subtract": "sub",
        "attention": "scaled_dot_product_attention",
        "cross_entropy": "cross_entropy_loss",
        "nll_loss": "nll_loss_nd",
        "split": "split_with_sizes",
    }
    graph = one.traced.graph
    node = next(n for n in graph.nodes if n.kind == "call" and n.op in (op, others.get(op)))
    modes, has_rule = modes_of(graph, node)
    assert has_rule or not wanted
    offered = [mode.name for mode in modes if mode.size]
    assert offered == wanted.split()
    for mode in modes:
        pinned = one.problem((2,), {node.name: _first(mode.name)})
        solution = solve(pinned)
        if solution is None:
            assert mode.size == 0 or mode.size % 2
            continue
        one.check(one.plan(pinned, solution.choice))


def test_a_table_of_bags_whose_gradients_are_sparse_is_kept_whole() -> None:
    def bags(table: Any) -> Any:
        return F.embedding_bag(torch.arange(12).view(4, 3) % 6, table, mode="sum", sparse=True)

    graph = trace(One(bags, ((6, 4),)), (torch.zeros(2),)).graph
    node = next(each for each in graph.nodes if each.op == "embedding_bag")
    assert not [mode for mode in modes_of(graph, node)[0] if mode.size]


def test_a_recurrence_whose_states_were_recorded_in_another_shape_is_kept_whole() -> None:
    """Torch 2.11 records those of an LSTM on a CPU with a dimension too many: no part fits them."""
    graph = trace(make("lstm"), MODELS["lstm"][1](0)).graph
    node = next(node for node in graph.nodes if node.op == "lstm")
    batch = [mode.name for mode in modes_of(graph, node)[0] if mode.size]
    states = graph.values[node.outputs[1]]
    graph.values[node.outputs[1]] = replace(states, shape=(states.shape[0], 1, *states.shape[1:]))
    assert not [mode for mode in modes_of(graph, node)[0] if mode.size]
    assert batch == ["b"] or len(states.shape) == 4
