"""``bench step-times`` on the CPU: two programs in turns, one of which is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from muster.bench.__main__ import main


def test_a_program_with_measuring_and_one_without_make_steps_in_turns(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    options = ["--tiny", "--batch", "2", "--rounds", "3", "--steps", "2", "--json", str(path)]
    assert main(["step-times", *options, "--check", "-100"]) == 1
    report = json.loads(path.read_text())
    assert {kind: len(row["rounds_ms"]) for kind, row in report["results"].items()} == {"on": 3, "off": 3}
    assert report["cost_percent"] > -100.0
    assert main(["step-times", *options, "--check", "1000000"]) == 0


def test_a_program_that_does_not_start_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["step-times", "--tiny", "--batch", "-1"]) == 1
    assert "MS_STEP_TIMES=1 has ended, or does not start:" in capsys.readouterr().err
