"""``muster bench store`` with a few members."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.bench.__main__ import main


def test_it_measures_meetings_over_mutual_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store.json"
    assert main(["store", "--workers", "6", "--mesh", "3", "--json", str(path)]) == 0
    measured = json.loads(path.read_text())
    assert measured["workers"] == 6
    assert measured["gloo_like_operations_per_s"] > 0
    assert measured["opened_and_met_s"] > measured["links_opened_s"] > 0
    assert "scheduler_bytes_per_link" in capsys.readouterr().out
