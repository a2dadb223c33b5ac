"""Trains twenty models on two CPU ranks by the plan that a search chooses and by data parallelism, in turns.

    python -m muster.bench.parallel.turns --json turns.json

The machine's costs are measured first, on the same ranks. Both variants of a model run in the same
processes, and train a few steps each in turn, so that disturbances affect both. The results are both
predicted times, and the medians of the measured ones. Needs two idle cores.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from muster.bench.parallel.models import Llama, Vision
from muster.bench.ranks import run_ranks
from muster.bench.report import describe_machine, write
from muster.parallel.api import parallelize
from muster.parallel.measure import measure
from muster.parallel.planning.costs import Hardware
from muster.torch.data_parallel import DataParallel

RANKS = 2
CALLED_FASTER = 1.05
"""From this ratio of predictions on a plan counts as called faster than data parallelism."""
TOLERATED = 1.05


class _Layers(nn.Module):  # type: ignore[misc]
    """Modules one after the other; of recurrent ones the outputs."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


class _Residual(nn.Module):  # type: ignore[misc]
    """x plus what layers make of it, with dimensions swapped before and after if ``turned``."""

    def __init__(self, *layers: nn.Module, turned: bool = False) -> None:
        super().__init__()
        self.layers, self.turned = nn.Sequential(*layers), turned

    def forward(self, x: Any) -> Any:
        return x + (self.layers(x.transpose(1, 2)).transpose(1, 2) if self.turned else self.layers(x))


class _Pooled(nn.Module):  # type: ignore[misc]
    """The mean over all dimensions from the second on but the last, or of images over their places."""

    def forward(self, x: Any) -> Any:
        return x.mean((2, 3)) if x.dim() == 4 else x.mean(1)


class _Tables(nn.Module):  # type: ignore[misc]
    """A model like DLRM: each sample reads one row of each table; linear layers follow."""

    def __init__(self, rows: int, tables: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: Any) -> Any:
        found = [table(each) for table, each in zip(self.tables, ids.unbind(1), strict=True)]
        return self.top(torch.cat(found, 1))


class _Experts(nn.Module):  # type: ignore[misc]
    """A soft mixture: every expert computes, and the gate weighs."""

    def __init__(self, width: int, experts: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * 0.02)

    def forward(self, x: Any) -> Any:
        y = torch.relu(torch.einsum("bd,edh->ebh", x, self.up))
        y = torch.einsum("ebh,ehd->ebd", y, self.down)
        return torch.einsum("be,ebd->bd", self.gate(x).softmax(-1), y)


class _Auto(nn.Module):  # type: ignore[misc]
    """A variational autoencoder without its noise."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.mean, self.spread = nn.Linear(width, inner), nn.Linear(inner, 32), nn.Linear(inner, 32)
        self.back = nn.Sequential(nn.Linear(32, inner), nn.ReLU(), nn.Linear(inner, width))

    def forward(self, x: Any) -> Any:
        hidden = torch.relu(self.up(x))
        return self.back(self.mean(hidden) + 0.1 * self.spread(hidden).tanh())


def _encoder(width: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def _convolutions(*channels: int, classes: int) -> nn.Module:
    pairs = itertools.pairwise(channels)
    blocks = [part for a, b in pairs for part in (nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(4, b), nn.ReLU())]
    return nn.Sequential(*blocks, _Pooled(), nn.Linear(channels[-1], classes))


def _ids(below: int, *shape: int) -> Callable[[], Any]:
    return lambda: torch.randint(below, shape)


def _floats(*shape: int) -> Callable[[], Any]:
    return lambda: torch.rand(shape)


def _cross_entropy(scores: Any, targets: Any) -> Any:
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


_MSE, _CE, _BCE = functional.mse_loss, _cross_entropy, functional.binary_cross_entropy_with_logits
Task = tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[], Any], Callable[..., Any]]
MODELS: dict[str, Task] = {
    "faces": (
        lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 20_000)),
        *(_floats(16, 256), _ids(20_000, 16), _CE),
    ),
    "faces-conv": (
        lambda: _convolutions(3, 32, 64, 256, classes=20_000),
        *(_floats(8, 3, 32, 32), _ids(20_000, 8), _CE),
    ),
    "words": (
        lambda: nn.Sequential(nn.Embedding(16_384, 128), nn.Linear(128, 16_384, bias=False)),
        *(_ids(16_384, 2, 16), _ids(16_384, 2, 16), _CE),
    ),
    "lstm-words": (
        lambda: _Layers(nn.Embedding(8_192, 128), nn.LSTM(128, 256, batch_first=True), nn.Linear(256, 8_192)),
        *(_ids(8_192, 4, 16), _ids(8_192, 4, 16), _CE),
    ),
    "wide": (
        lambda: nn.Sequential(nn.Linear(512, 8_192), nn.ReLU(), nn.Linear(8_192, 512)),
        *(_floats(16, 512), _floats(16, 512), _MSE),
    ),
    "deep": (
        lambda: nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(512, 512), nn.ReLU()))),
        *(_floats(64, 512), _floats(64, 512), _MSE),
    ),
    "tables": (lambda: _Tables(20_000, 8, 32), _ids(20_000, 128, 8), _floats(128, 1), _BCE),
    "large-tables": (lambda: _Tables(100_000, 4, 32), _ids(100_000, 64, 4), _floats(64, 1), _BCE),
    "experts": (lambda: _Experts(256, 8, 512), _floats(32, 256), _floats(32, 256), _MSE),
    "autoencoder": (lambda: _Auto(4_096, 512), _floats(32, 4_096), _floats(32, 4_096), _MSE),
    "llama": (lambda: Llama(2_048, 128, 4, 64), _ids(2_048, 4, 64), _ids(2_048, 4, 64), _CE),
    "llama-words": (lambda: Llama(16_384, 128, 2, 32), _ids(16_384, 2, 32), _ids(16_384, 2, 32), _CE),
    "vit": (lambda: Vision(100, 128, 4, 64), _floats(8, 3, 64, 64), _ids(100, 8), _CE),
    "encoder": (
        lambda: nn.Sequential(_encoder(128, 3), nn.Linear(128, 128)),
        *(_floats(8, 32, 128), _floats(8, 32, 128), _MSE),
    ),
    "mixer": (
        lambda: nn.Sequential(
            *(
                _Residual(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), turned=number % 2 == 0)
                for number in range(8)
            )
        ),
        *(_floats(32, 64, 64), _floats(32, 64, 64), _MSE),
    ),
    "convolutions": (
        lambda: _convolutions(3, 32, 64, 128, classes=10),
        *(_floats(16, 3, 64, 64), _ids(10, 16), _CE),
    ),
    "residual-convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1),
            *(_Residual(nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU()) for _ in range(4)),
            _Pooled(),
            nn.Linear(32, 10),
        ),
        *(_floats(16, 3, 32, 32), _ids(10, 16), _CE),
    ),
    "upsampling": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(16, 3, 3, 1, 1)
        ),
        *(_floats(8, 3, 64, 64), _floats(8, 3, 64, 64), _MSE),
    ),
    "gru": (
        lambda: _Layers(nn.GRU(64, 256, batch_first=True), nn.Linear(256, 64)),
        *(_floats(16, 32, 64), _floats(16, 32, 64), _MSE),
    ),
    "separable": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 64, 1), nn.Conv2d(64, 64, 7, 1, 3, groups=64), nn.Conv2d(64, 64, 1), _Pooled(),
            nn.Linear(64, 10),
        ),
        *(_floats(8, 3, 32, 32), _ids(10, 8), _CE),
    ),
}  # fmt: skip
"""Of each: the module, a rank's inputs and targets, and the loss."""


def measured_machine(communicator: Any) -> dict[str, Any]:
    """Measures the costs of a machine on these ranks."""
    torch.set_num_threads(1)
    return measure(communicator).to_json()


def compare(
    communicator: Any, name: str, turns: int, seconds: float, costs: dict[str, Any]
) -> dict[str, Any]:
    """A row, as this rank sees it.

    Args:
        communicator: a communicator of two ranks.
        name: the name of the model.
        turns: the number of turns of each variant.
        seconds: the approximate length of a turn.
        costs: the costs of this machine.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, inputs, targets, loss = MODELS[name]
    net = make()
    torch.manual_seed(1 + communicator.rank)
    batch = inputs(), targets()
    other = DataParallel(copy.deepcopy(net), communicator=communicator)
    began = time.process_time()
    model = parallelize(
        net, batch, loss=loss, communicator=communicator, machine=Hardware(**costs), batch_norm="local"
    )
    searched = time.process_time() - began
    steps = {
        "plan": _step(model, lambda: model(*batch)),
        "data_parallel": _step(other, lambda: loss(other(batch[0]), batch[1])),
    }
    for step in steps.values():  # what is made once is there; ranks take as many steps as rank 0 says
        for _ in range(3):
            step()
    count = torch.tensor([max(3, int(seconds / max(1e-4, _timed(steps["data_parallel"], 3))))])
    communicator.broadcast(count.numpy(), 0)
    times: dict[str, list[float]] = {way: [] for way in steps}
    for turn in range(turns):
        for way in list(steps) if turn % 2 == 0 else reversed(list(steps)):
            times[way].append(_timed(steps[way], int(count)))
    plan = model.plan
    return {
        "model": name,
        "search_s": searched,
        "verdict": plan.verdict,
        "is_data_parallel": plan.is_data_parallel,
        "predicted_ms": 1e3 * plan.seconds,
        "data_parallel_predicted_ms": None if plan.baseline_s is None else 1e3 * plan.baseline_s,
        "step_ms": 1e3 * statistics.median(times["plan"]),
        "data_parallel_step_ms": 1e3 * statistics.median(times["data_parallel"]),
        "turns_ms": {way: [1e3 * each for each in found] for way, found in times.items()},
    }


def _step(model: Any, loss: Callable[[], Any]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def _timed(step: Callable[[], None], count: int) -> float:
    """Returns the mean time of a step in seconds."""
    began = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - began) / count


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the models predicted to be faster, those that are, and those that are intolerably slower."""
    called = [row for row in rows if _ratio(row) >= CALLED_FASTER]
    faster = [row["model"] for row in called if row["step_ms"] < row["data_parallel_step_ms"]]
    slower = [row["model"] for row in called if row["step_ms"] > TOLERATED * row["data_parallel_step_ms"]]
    return {"called_faster": [row["model"] for row in called], "are_faster": faster, "are_slower": slower}


def _ratio(row: dict[str, Any]) -> float:
    """Returns the predicted speedup of a plan over data parallelism; 0 if that is not possible."""
    base = row["data_parallel_predicted_ms"]
    return base / row["predicted_ms"] if base else 0.0


def main(argv: Sequence[str]) -> int:
    """Measures all models; prints a line for each, and a summary."""
    parser = argparse.ArgumentParser(prog="python -m muster.bench.parallel.turns", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="MODEL", choices=MODELS, default=list(MODELS))
    parser.add_argument("--turns", type=int, default=7, help="turns of each variant (7)")
    parser.add_argument("--seconds", type=float, default=1.0, help="approximate length of a turn (1)")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)
    costs = run_ranks(RANKS, measured_machine)[0]
    rows = []
    for name in options.only:
        rows.append(run_ranks(RANKS, compare, name, options.turns, options.seconds, costs)[0])
        row = rows[-1]
        print(
            f"{name:22} {row['step_ms']:8.2f} ms, data parallel {row['data_parallel_step_ms']:8.2f} ms:"
            f" {row['data_parallel_step_ms'] / row['step_ms']:5.2f} times, predicted {_ratio(row):5.2f};"
            f" {row['verdict']}",
            flush=True,
        )
    found = judged(rows)
    print(json.dumps(found))
    if options.json:
        results = {"machine": describe_machine(), "costs": costs, "judged": found, "rows": rows}
        write(Path(options.json), "parallel-turns", results)
    return 1 if found["are_slower"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
