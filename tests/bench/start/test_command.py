"""The start benchmark's results say what they were measured with."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from muster.bench.start import command as start


def results(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    start.add_arguments(parser)
    monkeypatch.setattr(start, "launch_commands", lambda options, directory: {"muster": [], "torchrun": []})
    monkeypatch.setattr(start, "timed_launch", lambda command, directory, options: 2.0)
    return start.run(parser.parse_args(arguments))


def test_results_on_gpus_name_driver_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings: Any = ModuleType("nccl.bindings")
    bindings.nccl = SimpleNamespace(get_version=lambda: 22809, get_library_path=lambda: "/lib/libnccl.so.2")
    monkeypatch.setitem(sys.modules, "nccl", ModuleType("nccl"))
    monkeypatch.setitem(sys.modules, "nccl.bindings", bindings)
    monkeypatch.setattr(start, "driver_version", lambda: "580.1")
    found = results(monkeypatch)
    assert {name: found[name] for name in ("device", "driver", "nccl", "nccl_library")} == {
        "device": "gpu",
        "driver": "580.1",
        "nccl": 22809,
        "nccl_library": "libnccl.so.2",
    }
    assert found["ratio"] == {"to_torchrun": 1.0}


def test_results_on_cpus_need_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl.bindings", None)
    found = results(monkeypatch, "--cpu")
    assert found["device"] == "cpu" and "driver" not in found
