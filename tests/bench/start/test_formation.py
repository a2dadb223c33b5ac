"""The formation benchmark measures a real, small launch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from muster.bench.__main__ import main


def test_it_measures_a_launch_with_mutual_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "formation.json"
    arguments = ["--workers", "2", "--runs", "2", "--warmups", "0", "--json", str(file)]
    assert main(["formation", *arguments]) == 0
    results = json.loads(file.read_text())
    assert results["workers"] == 2
    assert results["tls"] == {"muster": "mutual TLS"}
    runs = results["muster"]["runs_s"]
    assert len(runs) == 2
    assert min(runs) <= results["muster"]["median_s"] <= max(runs)
    assert results["machine"]["packages"]["grpcio"]
    spent = results["muster"]["processor_runs_s"]
    assert len(spent) == 2 and 0.1 < min(spent) <= results["muster"]["processor_median_s"] <= max(spent)
    out = capsys.readouterr().out
    assert out.startswith("muster ") and "s of processor time" in out


def test_what_counts_is_a_compiled_muster_as_an_installed_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    program, seen = tmp_path / "mpirun", tmp_path / "seen"
    program.write_text(f'#!/bin/sh\ncase "$1" in --version|-c) echo 1;; *) env > {seen};; esac\n')
    program.chmod(0o755)
    arguments = ["--workers", "2", "--runs", "1", "--warmups", "0", "--peer", "openmpi"]
    options = ["--mpirun", str(program), "--peer-python", str(program)]
    file = tmp_path / "formation.json"
    assert main(["formation", *arguments, *options, "--json", str(file)]) == 0
    assert "PYTHONDONTWRITEBYTECODE" not in seen.read_text()
    assert json.loads(file.read_text())["processor_ratio"] > 1


def test_a_failed_run_is_an_error_with_its_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "mpirun"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] || echo no slots; exit 1\n')
    program.chmod(0o755)
    arguments = ["--workers", "2", "--runs", "1", "--warmups", "0", "--peer", "openmpi"]
    assert main(["formation", *arguments, "--mpirun", str(program), "--peer-python", sys.executable]) == 1
    assert "ended with code 1:\nno slots" in capsys.readouterr().err
