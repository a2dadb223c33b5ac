"""Divided models: a plan of ``muster.parallelize`` against data parallelism, FSDP2 and a split by hand.

    muster bench parallel --gpus 2 --json results.json

All variants train the same model with AdamW on one batch that lies on the GPU, with bfloat16 autocast and
the same loss. One after the other, in several passes over all, since they do not fit into memory at once; the
median of the passes counts. The machine's costs are measured before, and the plan's prediction stands beside
its step.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from muster.bench.gpu_fleet import Fleet

MODELS = {
    "classes": "ResNet-50 with 1,000,000 classes, 64 images a GPU",
    "vocabulary": "a transformer of 6 layers, 1,024 wide, 262,144 words, 4,096 tokens a GPU",
    "resnet50": "ResNet-50 with 1,000 classes, 64 images a GPU",
    "gpt2": "GPT-2 with 124 million parameters, 8 x 1,024 tokens a GPU",
}
VARIANTS = {
    "auto": "muster.parallelize, captured",
    "data-parallel": "muster.DataParallel, captured",
    "zero-1": "muster.ShardedOptimizer",
    "by-hand": "the last layer and its loss split by hand, the rest data-parallel, captured",
    "ddp-compiled": "DistributedDataParallel, compiled",
    "fsdp2": "fully_shard of each block and of the whole",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--passes", type=int, default=2, help="how often each variant is made and measured")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each is measured in a pass")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures; returns rows for each model and variant.

    Raises:
        FleetError: there are not so many GPUs, or a rank failed.
    """
    from muster.bench.parallel.job import measure

    with tempfile.TemporaryDirectory() as folder, Fleet(options.gpus, timeout_s=540) as fleet:
        rows = fleet.run(
            measure,
            models=options.models,
            variants=options.variants,
            passes=options.passes,
            seconds=options.seconds,
            init_file=str(Path(folder) / "meeting"),
        )[0]
    return {"gpus": options.gpus, "rows": rows}


def report(result: dict[str, Any]) -> None:
    """Prints a table."""
    for row in result["rows"]:
        if "error" in row:
            print(f"{row['model']:12} {row['variant']:14} {row['error']}")
            continue
        more = f"  predicted {row['predicted_ms']:.2f} ms; {row['verdict']}" if "verdict" in row else ""
        print(
            f"{row['model']:12} {row['variant']:14} {row['step_ms']:9.3f} ms  {row['memory_gib']:7.2f} GiB"
            f"  {'captured' if row['captured'] else 'eager':8}{more}"
        )
