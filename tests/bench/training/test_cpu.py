"""``bench train-cpu``: all variants in turns, and what --check says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from muster.bench import __main__ as bench
from muster.bench.training import cpu


def test_all_variants_run_in_turns_and_a_ratio_too_low_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    small = ("--width", "16", "--rounds", "3", "--steps", "1", "--batch", "2", "--threads", "1")
    checks = ("muster/alone=1e-9", "muster/ddp=1e9")
    assert bench.main(["train-cpu", *small, "--json", str(file), "--check", *checks]) == 1
    said = capsys.readouterr().out
    assert "at least 1e-09" in said and "BELOW 1e+09" in said
    report = json.loads(file.read_text())
    assert report["machine"]["packages"]["torch"] and report["parameters"] == 6 * 16 * 17
    assert report["results"].keys() == cpu.VARIANTS.keys()
    assert all(len(row["rounds_ms"]) == 3 for row in report["results"].values())


@pytest.mark.parametrize("text", ["muster", "muster/nobody=1", "muster/ddp=fast"])
def test_a_bound_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["train-cpu", "--check", text])
    assert "is no bound, as muster/ddp=0.87 is" in capsys.readouterr().err
