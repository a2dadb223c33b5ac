"""The GPU benchmarks' arithmetic and reading of results; what they measure needs GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.bench import plot
from muster.bench.allreduce import nccl as nccl_allreduce
from muster.bench.training import loss_curve

RESULTS = Path(__file__).parents[2] / "muster" / "bench" / "results"
KINDS = ("nccl-allreduce", "train", "scaling")
REPORTS = sorted(
    path
    for kind in KINDS
    for path in RESULTS.glob(f"{kind}-*.json")
    if not path.name.startswith("train-cpu-")
)


def test_bus_bandwidth_is_nccl_tests() -> None:
    (row,) = nccl_allreduce.add_bus_bandwidth([{"bytes": 4 * 10**9, "time_us": 20_000}], 4)
    assert row["bus_gb_s"] == pytest.approx(300)  # 200 GB/s of data, times 2 * 3 / 4


def test_nccl_tests_output_is_read(tmp_path: Path) -> None:
    binary = tmp_path / "all_reduce_perf"
    binary.write_text(
        "#!/bin/sh\n"
        'echo "# nThread 1"\n'
        'echo "  4194304 1048576 float sum -1 47.1 89.0 133.6 0 46.5 90.2 135.3 0"\n'
        'echo "# Avg bus bandwidth"\n'
    )
    binary.chmod(0o755)
    assert nccl_allreduce.run_nccl_tests(binary, 4, (4194304,)) == [{"bytes": 4194304, "time_us": 46.5}]


def test_curves_are_compared_smoothed() -> None:
    wave = [step % 2 * 1.0 for step in range(12)]
    assert loss_curve.smoothed(wave) == [0.5, 0.5, 0.5]
    later = [*wave[:11], wave[11] + 1]
    assert loss_curve.difference(wave, later) == pytest.approx(0.1 / 3)


def test_curves_of_two_kinds_are_compared_with_pairs_of_one_kind() -> None:
    levels = dict.fromkeys(loss_curve.CURVES, 1.0) | {
        "muster turned": 1.1,
        "ddp turned": 1.3,
        "ddp-float32": 2.0,
    }
    found = loss_curve.compare({name: [level] * 12 for name, level in levels.items()})
    assert {kind: gap["pairs"] for kind, gap in found.items()} == {
        "muster to muster": 3,
        "ddp to ddp": 6,
        "muster to ddp": 12,
        "ddp to ddp-float32": 4,
    }
    assert found["muster to muster"]["largest"] == pytest.approx(0.1)
    assert found["ddp to ddp"] == pytest.approx({"mean": 0.15, "least": 0, "largest": 0.3, "pairs": 6})
    assert found["muster to ddp"]["least"] == 0
    assert found["ddp to ddp-float32"]["least"] == pytest.approx(0.7)


def test_each_round_begins_with_another() -> None:
    turns = [nccl_allreduce.turned(("a", "b", "c"), turn) for turn in range(4)]
    assert turns == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]


def test_lines_are_drawn_from_reports() -> None:
    rows = [
        {"variant": variant, "gpus": gpus, "batch_per_gpu": batch, "images_per_s": gpus * 100.0 + batch}
        for variant in ("muster", "ddp")
        for gpus in (4, 1)
        for batch in (32, 256)
    ]
    assert plot.training_speed({"results": rows}, 32) == {
        "muster": [(1, 132.0), (4, 432.0)],
        "ddp": [(1, 132.0), (4, 432.0)],
    }


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.name)
def test_committed_figures_say_where_they_are_from(path: Path) -> None:
    report = json.loads(path.read_text(encoding="utf-8"))
    machine = report["machine"]
    assert machine["gpu"] and machine["driver"] and machine["date"] and machine["packages"]


def test_figures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [
        written
        for path in REPORTS
        for written in plot.draw(json.loads(path.read_text(encoding="utf-8")), tmp_path)
    ]
    assert paths and all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
