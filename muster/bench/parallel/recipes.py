"""Predicts plans of well-known models on 8, 64 and 512 GPUs; needs no GPU.

    python -m muster.bench.parallel.recipes --json recipes.json

docs/parallel.md compares them with published recipes. The time of each search is given in seconds of
processor time, of this process and its threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from muster.bench.parallel.job import TASKS
from muster.bench.parallel.variants import written_loss
from muster.errors import SettingsError
from muster.parallel.api import graph_of
from muster.parallel.planning.costs import H100
from muster.parallel.planning.graph import Graph
from muster.parallel.planning.plan import Plan
from muster.parallel.planning.planner import find_plan
from muster.parallel.planning.precision import mark_autocast

Made = tuple[nn.Module, tuple[Any, ...], Any]


class _Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, each = heads, groups, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * each, bias=False) for _ in range(2))

    def forward(self, x: Any, turned: Callable[[Any], Any] | None) -> Any:
        q, k, v = (
            layer(x).unflatten(-1, (count, -1)).transpose(1, 2)
            for layer, count in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        if turned is not None:
            q, k = turned(q), turned(k)
        if self.groups != self.heads:
            k, v = (each.repeat_interleave(self.heads // self.groups, 1) for each in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class _LlamaLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = _Attention(width, heads, groups)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Any, turned: Callable[[Any], Any]) -> Any:
        x = x + self.attention(self.norm1(x), turned)
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama3(nn.Module):  # type: ignore[misc]
    """Llama 3: grouped queries, rotary places, RMSNorm, SwiGLU."""

    def __init__(self, width: int, layers: int, heads: int, inner: int, tokens: int) -> None:
        super().__init__()
        words, groups, each = 128_256, 8, width // heads
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(_LlamaLayer(width, heads, groups, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        angles = torch.outer(torch.arange(tokens), 500000.0 ** (-torch.arange(0, each, 2) / each)).repeat(
            1, 2
        )
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, ids: Any) -> Any:
        """[samples, tokens] of int64 to [samples, tokens, words]."""
        x = self.words(ids)
        cosine, sine = self.cosine.to(x.dtype), self.sine.to(x.dtype)

        def turned(each: Any) -> Any:
            first, second = each.chunk(2, -1)
            return each * cosine + torch.cat((-second, first), -1) * sine

        for layer in self.layers:
            x = layer(x, turned)
        return self.head(self.norm(x))


class _GptLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x), None)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt3(nn.Module):  # type: ignore[misc]
    """GPT-3 with 175 billion parameters."""

    def __init__(self, width: int = 12288, layers: int = 96, heads: int = 96, tokens: int = 2048) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(51_200, width), nn.Parameter(torch.zeros(tokens, width))
        self.layers = nn.ModuleList(_GptLayer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 51_200, bias=False)

    def forward(self, ids: Any) -> Any:
        """[samples, tokens] of int64 to [samples, tokens, words]."""
        x = self.words(ids) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


ROWS = (
    *(39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546, 403_346, 10),
    *(2_208, 11_938, 155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935, 12_972, 108, 36),
)
"""Of MLPerf's tables for Criteo's terabyte; here padded to multiples of 512, so that ranks can share them."""


class Dlrm(nn.Module):  # type: ignore[misc]
    """DLRM as in MLPerf: 26 tables of 128 columns, products of pairs, two stacks of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding((rows + 511) // 512 * 512, 128) for rows in ROWS)
        self.bottom = _stack(13, 512, 256, 128)
        pairs = (len(ROWS) + 1) ** 2
        self.top = _stack(128 + pairs, 1024, 1024, 512, 256)
        self.last = nn.Linear(256, 1)

    def forward(self, numbers: Any, *ids: Any) -> Any:
        """[samples, 13], and [samples] of int64 for each table, to [samples, 1]."""
        x = self.bottom(numbers)
        found = torch.stack([x, *(table(each) for table, each in zip(self.tables, ids, strict=True))], 1)
        pairs = (found @ found.transpose(1, 2)).flatten(1)
        return self.last(self.top(torch.cat([x, pairs], 1)))


def _stack(*widths: int) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU())))


def _words(net: nn.Module, samples: int, tokens: int) -> Made:
    ids = tuple(torch.zeros(samples, tokens, dtype=torch.long) for _ in range(2))
    return net, ids, written_loss


def _faces() -> Made:
    batch = torch.zeros(64, 3, 224, 224), torch.zeros(64, dtype=torch.long)
    return TASKS["classes"].make(torch.device("meta")), batch, written_loss


def _dlrm() -> Made:
    ids = [torch.zeros(1024, dtype=torch.long) for _ in ROWS]
    batch = (torch.zeros(1024, 13), *ids, torch.zeros(1024, 1))
    return Dlrm(), batch, functional.binary_cross_entropy_with_logits


MODELS: dict[str, tuple[str, Callable[[], Made]]] = {
    "llama-8b": (
        "Llama 3 8B, 1 x 8,192 tokens a GPU",
        lambda: _words(Llama3(4096, 32, 32, 14336, 8192), 1, 8192),
    ),
    "llama-70b": (
        "Llama 3 70B, 1 x 8,192 tokens a GPU",
        lambda: _words(Llama3(8192, 80, 64, 28672, 8192), 1, 8192),
    ),
    "gpt-3": ("GPT-3 175B, 3 x 2,048 tokens a GPU", lambda: _words(Gpt3(), 3, 2048)),
    "dlrm": ("DLRM of MLPerf, 1,024 samples a GPU", _dlrm),
    "classes": ("ResNet-50, 1,000,000 classes, 64 images a GPU", _faces),
}
RANKS = (8, 64, 512)


def graph_for(model: str, ranks: int) -> Graph:
    """The graph of a model on the batch of all ranks, under autocast to bfloat16."""
    with torch.device("meta"):
        net, batch, loss = MODELS[model][1]()
        graph = graph_of(net, batch, ranks, loss=loss)
    mark_autocast(graph, 2)
    return graph


def planned(model: str, ranks: int) -> dict[str, Any]:
    """A row: what the search finds on H100 hosts of eight, and what that took."""
    graph = graph_for(model, ranks)
    machine = replace(H100, host_ranks=8)
    row: dict[str, Any] = {"model": model, "ranks": ranks}
    began = time.process_time()
    try:
        plan = find_plan(graph, ranks, machine=machine, local_norm=True)
    except SettingsError as error:
        return row | {"search_s": time.process_time() - began, "refused": str(error)}
    return row | {"search_s": time.process_time() - began} | described(plan)


def described(plan: Plan) -> dict[str, Any]:
    """Returns the facts of a plan that the table shows."""
    trained = [
        state for node, state in zip(plan.graph.nodes, plan.states, strict=True) if node.kind == "parameter"
    ]
    split = sum(any(isinstance(entry, int) for entry in state.outs[0]) for state in trained)
    return {
        "mesh": list(plan.mesh),
        "parameters": len(trained),
        "split": split,
        "zero_1": sum(state.sharded and not state.regathered for state in trained),
        "zero_3": sum(state.regathered for state in trained),
        "layers_again": len(plan.options.recomputed),
        "step_ms": 1e3 * plan.timeline.seconds,
        "memory_gb": plan.nbytes / 1e9,
        "gap": plan.gap,
        "verdict": plan.verdict,
        "modules": {
            row.module: row.strategies
            for row in plan.rows()
            if not any(part.isdigit() and int(part) for part in row.module.split("."))
        },
    }


def text(row: dict[str, Any]) -> str:
    """One line of what was found."""
    start = f"{row['model']:10} {row['ranks']:4} ranks, searched {row['search_s']:5.1f} s:"
    if "refused" in row:
        return f"{start} {row['refused']}"
    mesh = " x ".join(map(str, row["mesh"]))
    return (
        f"{start} {mesh}, of {row['parameters']} parameters {row['split']} split, {row['zero_1']} ZeRO-1,"
        f" {row['zero_3']} ZeRO-3; {row['layers_again']} layers again; {row['step_ms']:.0f} ms,"
        f" {row['memory_gb']:.1f} GB, gap {row['gap']:.1%}; {row['verdict']}"
    )


def main(argv: Sequence[str]) -> int:
    """Makes the plans and prints a line for each."""
    parser = argparse.ArgumentParser(prog="python -m muster.bench.parallel.recipes", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)
    rows = []
    for model in options.only:
        for ranks in options.ranks:
            rows.append(planned(model, ranks))
            print(text(rows[-1]), flush=True)
    if options.json:
        found = json.dumps({"machine": H100.to_json(), "rows": rows}, indent=1)
        Path(options.json).write_text(found + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
