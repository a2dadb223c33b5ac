"""The AllReduce benchmark runs, checks its sums, and reports what it measured."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muster.bench import __main__ as command
from muster.bench.allreduce import command as allreduce
from muster.bench.allreduce import nccl as nccl_allreduce
from muster.wire.variables import TABLE


def options_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    allreduce.add_arguments(parser)
    return parser.parse_args(words)


def test_sizes_have_units_and_limits() -> None:
    assert options_of("--sizes", "4096", "4K", "1m", "64M").sizes == [4096, 4096, 1 << 20, 64 << 20]
    for wrong in ("0", "5", "-4", "4T", "x", "8G", ""):
        with pytest.raises(SystemExit):
            options_of("--sizes", wrong)


def test_a_removed_backend_is_answered_with_what_became_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options_of("--backend", "gloo")
    assert ended.value.code == 2
    assert TABLE["MS_BACKEND"].removed["gloo"] in capsys.readouterr().err


def test_the_slowest_rank_counts() -> None:
    assert allreduce.slowest([[1.0, 5.0], [2.0, 4.0]]) == [2.0, 5.0]


def test_short_calls_are_measured_more_often_than_long_ones() -> None:
    assert allreduce.rounds_of(4096) > allreduce.rounds_of(64 << 20) >= 8


def test_it_measures_two_workers_with_tls_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "allreduce.json"
    words = ["allreduce", "--workers", "2", "--sizes", "4K", "256K", "--turns", "1", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "muster", "bench", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    assert written["benchmark"] == "allreduce"
    assert written["workers"] == 2
    assert [(row["backend"], row["bytes"]) for row in written["rows"]] == [("tcp", 4096), ("tcp", 262144)]
    assert all(row["median_ms"] >= row["min_ms"] > 0 for row in written["rows"])
    assert "median ms" in done.stdout


def test_a_failing_peer_is_told_in_words() -> None:
    options = options_of("--workers", "2", "--peer", "gloo", "--peer-python", "/bin/false", "--sizes", "4K")
    with pytest.raises(RuntimeError, match="gloo failed"):
        allreduce.measure_peer(options)


def test_nccl_is_the_same_command_on_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def run(**how: Any) -> int:
        asked.append(how)
        return 0

    monkeypatch.setattr(nccl_allreduce, "run", run)
    where = tmp_path / "nccl.json"
    assert command.main(["allreduce", "--backend", "nccl", "--json", str(where)]) == 0
    assert command.main(["allreduce", "--backend", "nccl", "--workers", "2", "--sizes", "4K"]) == 0
    usual = {"gpus": 4, "sizes": nccl_allreduce.SIZES, "nccl_tests": None, "json_path": where}
    assert asked == [usual, usual | {"gpus": 2, "sizes": (4096,), "json_path": None}]


def test_too_few_gpus_are_told_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("muster.bench.gpu_fleet.count_gpus", lambda: 1)
    assert command.main(["allreduce", "--backend", "nccl"]) == 1
    assert "4 GPUs are asked for and this host has 1" in capsys.readouterr().err
    assert command.main(["allreduce", "--backend", "nccl", "--plain"]) == 1
    assert "--plain" in capsys.readouterr().err


def test_help_lists_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    assert "allreduce" in capsys.readouterr().out
    assert command.main(["nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert set(command.available()) <= set(command.COMMANDS)


def test_every_benchmark_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["allreduce", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--backend" in shown
    assert "slowest rank" in shown
