"""Draws the README's figures from the JSON files that the GPU benchmarks wrote.

python -m muster.bench.plot muster/bench/results/{nccl-allreduce,train,scaling}-4xh200.json --out docs
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

NAMES = {
    "muster": "Muster",
    "example": "Muster, the whole example",
    "muster-cupy": "Muster (CuPy)",
    "torch": "torch.distributed",
    "nccl-tests": "nccl-tests",
    "ddp": "DDP",
    "ddp-compiled": "DDP, compiled",
    "ddp-captured": "DDP, captured by hand",
}


def bus_bandwidth(report: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Returns (bytes, GB/s) points by the name of what was measured."""
    return {
        NAMES.get(kind, kind): [(row["bytes"], row["bus_gb_s"]) for row in rows]
        for kind, rows in report["results"].items()
    }


def training_speed(report: dict[str, Any], batch: int) -> dict[str, list[tuple[int, float]]]:
    """Returns (GPUs, images/s) points by variant, for one batch size per GPU."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in report["results"]:
        if row["batch_per_gpu"] == batch and "images_per_s" in row:
            lines.setdefault(row["variant"], []).append((row["gpus"], row["images_per_s"]))
    return {variant: sorted(points) for variant, points in lines.items()}


def caption(report: dict[str, Any]) -> str:
    """Returns the caption of a plot: where and when it was measured."""
    machine = report["machine"]
    packages = machine.get("packages", {})
    parts = [
        f"{machine.get('gpus', report.get('gpus', ''))} x {machine['gpu']}",
        f"driver {machine.get('driver', '?')}",
        f"NCCL {_release(machine.get('nccl'))}",
        f"torch {packages.get('torch', '?')}",
        str(machine["date"]),
    ]
    return ", ".join(parts)


def _release(number: int | None) -> str:
    return "?" if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def draw(report: dict[str, Any], directory: Path) -> list[Path]:
    """Writes the PNG files of one report; returns their paths."""
    if report["benchmark"] != "train":
        return [_draw_bandwidth(report, directory)]
    batches = sorted({row["batch_per_gpu"] for row in report["results"] if "images_per_s" in row})
    if len({row["gpus"] for row in report["results"]}) > 1:
        return [_draw_scaling(report, batch, directory) for batch in batches]
    return [_draw_variants(report, batches, directory)]


def _draw_bandwidth(report: dict[str, Any], directory: Path) -> Path:
    figure, axes = _figure("AllReduce, float32, in place", report)
    for (name, points), marker in zip(bus_bandwidth(report).items(), "os^x", strict=False):
        axes.plot(*zip(*points, strict=True), marker=marker, fillstyle="none", linewidth=1, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("bus bandwidth, GB/s")
    return _save(figure, axes, directory / "allreduce.png")


def _draw_variants(report: dict[str, Any], batches: list[int], directory: Path) -> Path:
    gpus = report["results"][0]["gpus"]
    figure, axes = _figure(f"ResNet-50, 224x224, bf16, {gpus} GPUs, synthetic images", report)
    speeds = [training_speed(report, batch) for batch in batches]
    variants = list(speeds[0])
    width = 0.8 / len(variants)
    for index, variant in enumerate(variants):
        places = [group + (index - (len(variants) - 1) / 2) * width for group in range(len(batches))]
        bars = axes.bar(
            places, [speed[variant][0][1] for speed in speeds], width, label=NAMES.get(variant, variant)
        )
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    axes.set_xticks(range(len(batches)), [f"{batch} images per GPU" for batch in batches])
    axes.margins(y=0.08)
    axes.set_ylabel("images/s")
    return _save(figure, axes, directory / "train.png")


def _draw_scaling(report: dict[str, Any], batch: int, directory: Path) -> Path:
    figure, axes = _figure(f"ResNet-50, 224x224, bf16, {batch} images per GPU, synthetic images", report)
    counts = sorted({row["gpus"] for row in report["results"]})
    for variant, points in training_speed(report, batch).items():
        axes.plot(*zip(*points, strict=True), marker="o", label=NAMES.get(variant, variant))
        (fewest, speed), (most, reached) = points[0], points[-1]
        ideal = [speed * count / fewest for count in counts]
        axes.plot(counts, ideal, linestyle=":", color="gray", label="in proportion")
        share = f"{reached:,.0f} ({reached / ideal[-1]:.1%})"
        axes.annotate(share, (most, reached), (-8, -40), textcoords="offset points", ha="right", fontsize=8)
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("images/s")
    return _save(figure, axes, directory / f"scaling-{batch}.png")


def _figure(title: str, report: dict[str, Any]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.set_title(f"{title}\n{caption(report)}", fontsize=9)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> Path:
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of nccl-allreduce or train")
    parser.add_argument(
        "--out", type=Path, default=Path("muster/bench/results"), help="folder for the PNG files"
    )


def run(arguments: argparse.Namespace) -> int:
    """Draws the figures; returns the exit code."""
    for path in arguments.results:
        for written in draw(json.loads(path.read_text(encoding="utf-8")), arguments.out):
            print(written)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
