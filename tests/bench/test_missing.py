"""A benchmark that cannot run here says what it lacks, in one line."""

from __future__ import annotations

import sys

import pytest

from muster.bench.__main__ import main


@pytest.mark.parametrize("name", ["train", "loss-curve", "sharded"])
def test_gpus(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("muster.bench.gpu_fleet.count_gpus", lambda: 1)
    assert main([name, "--gpus", "2"]) == 1
    assert capsys.readouterr().err == "bench: 2 GPUs are asked for and this host has 1.\n"


def test_gpus_of_recovery(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("muster.bench.gpu_fleet.count_gpus", lambda: 1)
    assert main(["recovery", "--backend", "nccl", "--gpus", "4", "--ranks-per-gpu", "2"]) == 1
    assert capsys.readouterr().err == "bench: 2 GPUs are asked for and this host has 1.\n"


def test_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "nccl", None)
    assert main(["start"]) == 1
    assert capsys.readouterr().err == "bench: start needs nccl, which this Python does not have\n"


def test_what_a_module_imports_at_its_head(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "muster.bench.torch_groups", raising=False)
    assert main(["torch-groups"]) == 1
    assert capsys.readouterr().err == "bench: torch-groups needs torch, which this Python does not have\n"
