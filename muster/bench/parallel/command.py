"""Compares a plan of ``muster.parallelize`` with data parallelism, FSDP2 and hand-written sharding.

    muster bench parallel --gpus 2 --json results.json

All variants train the same model by AdamW on one batch in GPU memory, with bfloat16 autocast and the same
fused loss. Variants run one after the other in separate processes, in several passes; the result is the
median of the passes. The machine's costs are measured first, and the predicted step time is shown with the
measured one. ``--plans`` compares the chosen plan with five other plans.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.bench.gpu_fleet import Fleet, FleetError

MODELS = {
    "classes": "ResNet-50 with 1,000,000 classes, 64 images a GPU",
    "vocabulary": "a transformer of 6 layers, 1,024 wide, 262,144 words, 4,096 tokens a GPU",
    "resnet50": "ResNet-50 with 1,000 classes, 64 images a GPU",
    "gpt2": "GPT-2 with 124 million parameters, 8 x 1,024 tokens a GPU",
    "vit": "a vision transformer, ViT-B/16 with 1,000 classes, 64 images a GPU",
    "llama": "a transformer of Llama's kind, 12 layers, 1,024 wide, 32,000 words, 4 x 2,048 tokens a GPU",
    "large": "a transformer of 36 layers, 5,120 wide, 11.8 billion parameters, 2 x 2,048 tokens a GPU",
}
PLANS = {
    "auto": "muster.parallelize, captured",
    "plan-data-parallel": "the plan that only divides the batch",
    "plan-whole-updates": "the best one that divides no updates",
    "plan-head-by-outputs": "the best one with the last layer divided by outputs",
    "plan-head-by-inputs": "the best one with the last layer divided by inputs",
    "plan-least-sent": "the one that sends least",
}
PEERS = {
    "data-parallel": "muster.DataParallel, captured",
    "zero-1": "muster.ShardedOptimizer",
    "by-hand": "the last layer and its loss split by hand, the rest data-parallel, captured",
    "tensor-parallel": "the last layer by parallelize_module, the rest by compiled DistributedDataParallel",
    "ddp-compiled": "DistributedDataParallel, compiled",
    "fsdp2": "fully_shard of each block and of the whole",
    "fsdp2-compiled": "the same, compiled",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    option = parser.add_argument
    option("--gpus", type=int, default=2)
    option("--only", nargs="+", metavar="MODEL", choices=MODELS, default=list(MODELS), help=", ".join(MODELS))
    option("--variants", nargs="+", choices=[*PLANS, *PEERS], default=["auto", *PEERS])
    option("--plans", action="store_true", help="compare the chosen plan with five others, not with peers")
    option("--passes", type=int, default=2, help="how often each variant is started and measured (2)")
    option("--seconds", type=float, default=2.0, help="how long each is measured per pass (2)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures; returns rows for each model and variant.

    Raises:
        FleetError: there are too few GPUs, or their costs cannot be measured.
    """
    from muster.bench.parallel import job

    variants = list(PLANS) if options.plans else options.variants
    with Fleet(options.gpus, timeout_s=240) as fleet:
        machine = fleet.run(job.machine_of)[0]
    rows = [
        _row(options, machine, model, variant, turn)
        for model in options.only
        for turn in range(options.passes)
        for variant in (variants if turn % 2 == 0 else reversed(variants))
    ]
    return {"gpus": options.gpus, "costs": machine, "rows": medians(rows)}


def _row(options: argparse.Namespace, machine: Any, model: str, variant: str, turn: int) -> dict[str, Any]:
    """Measures one variant in processes of its own; returns a row with ``error`` if they die."""
    from muster.bench.parallel import job

    try:
        with tempfile.TemporaryDirectory() as folder, Fleet(options.gpus, timeout_s=240) as fleet:
            row: dict[str, Any] = fleet.run(
                job.measure,
                model=model,
                variant=variant,
                seconds=options.seconds,
                init_file=str(Path(folder) / "meeting"),
                machine=machine,
            )[0]
    except FleetError as error:
        row = {"model": model, "variant": variant, "error": str(error).strip().splitlines()[-1][:200]}
    print(f"{model} {variant} {turn}:", row.get("error") or row["step_ms"], file=sys.stderr, flush=True)
    return row


def medians(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges the passes: returns one row per model and variant, the first pass's with the median of all."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["variant"]), []).append(row)
    merged = []
    for each in found.values():
        good = [row for row in each if "error" not in row]
        row = dict((good or each)[0])
        if good:
            row["passes_ms"] = [one["step_ms"] for one in good]
            row["step_ms"] = statistics.median(row["passes_ms"])
        merged.append(row)
    return merged


def report(result: dict[str, Any]) -> None:
    """Prints a table, and how far the chosen plan is behind the best of the others that ran."""
    for row in result["rows"]:
        start = f"{row['model']:11} {row['variant']:21}"
        if "error" in row:
            print(start, row["error"])
            continue
        line = f"{start} {row['step_ms']:9.3f} ms  {row['memory_gb']:7.2f} GB"
        line += "  captured" if row["captured"] else "  eager   "
        if "verdict" in row:
            line += f"  predicted {row['predicted_ms']:.2f} ms ({_off(row, 'predicted_ms', 'step_ms')}),"
            line += (
                f" {row['predicted_gb']:.2f} GB ({_off(row, 'predicted_gb', 'memory_gb')}); {row['verdict']}"
            )
        print(line)
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        behind = behind_the_best(result["rows"], model)
        if behind is not None:
            print(f"{model:11} the chosen plan takes {behind:+.1%} beside the best of the others that ran")


def _off(row: dict[str, Any], predicted: str, measured: str) -> str:
    """Returns a prediction's relative error, in percent."""
    return f"{row[predicted] / row[measured] - 1:+.1%}" if row[measured] else "not measured"


def behind_the_best(rows: Sequence[dict[str, Any]], model: str) -> float | None:
    """Returns by what share the chosen plan is slower than the fastest other; None if one did not run."""
    times = {row["variant"]: row["step_ms"] for row in rows if row["model"] == model and "step_ms" in row}
    others = [ms for variant, ms in times.items() if variant in PLANS and variant != "auto"]
    return times["auto"] / min(others) - 1 if others and "auto" in times else None
