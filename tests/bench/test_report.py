"""Figures carry what they were measured on, and are written whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.bench import report


def test_a_summary_has_median_least_and_90th_percentile() -> None:
    found = report.summary([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 100.0])
    assert found == {"median": 5.5, "min": 1.0, "p90": 100.0, "samples": 10}


def test_the_machine_is_described() -> None:
    machine = report.describe_machine()
    assert machine["cores"] >= 1
    assert machine["packages"]["numpy"]
    assert machine["cpu"]
    assert machine["date"].startswith("20")


def test_results_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "results" / "a.json"
    report.write(path, "allreduce", {"rows": [1]})
    assert json.loads(path.read_text()) == {"benchmark": "allreduce", "rows": [1]}
    with pytest.raises(TypeError):
        report.write(path, "allreduce", {"rows": {1, 2}})
    assert json.loads(path.read_text())["rows"] == [1]
    assert [each.name for each in path.parent.iterdir()] == ["a.json"]
