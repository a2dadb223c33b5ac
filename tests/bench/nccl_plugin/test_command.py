"""``muster bench nccl-plugin``: one short turn, and its bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.bench.__main__ import main
from muster.bench.nccl_plugin.command import check

RESULT = {
    "bandwidth": [
        {"connections": count, "variant": variant, "gb_per_s": rate * count}
        for count in (1, 4, 8)
        for variant, rate in (("bare", 4.0), ("plain", 3.8), ("sealed", 3.0))
    ],
    "latency": [{"variant": "plain", "us": 10.0}, {"variant": "sealed", "us": 14.0}],
    "ratios": {
        "1": {"plain/bare": 0.1, "sealed/plain": 0.1},
        "4": {"plain/bare": 0.95, "sealed/plain": 0.79},
        "8": {"plain/bare": 0.1, "sealed/plain": 0.1},
    },
}


@pytest.mark.parametrize(
    ("bound", "missed"),
    [
        ("plain/bare=0.9", False),
        ("sealed/plain=0.8", True),
        ("sealed=24", False),
        ("sealed=24.1", True),
        ("latency=4", False),
        ("latency=3.9", True),
    ],
)
def test_a_bound_is_judged_by_what_it_names(
    bound: str, missed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(RESULT, [bound]) is missed
    assert ("MISSED" in capsys.readouterr().out) is missed


@pytest.mark.system
def test_it_measures_all_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plugin.json"
    words = [
        "--connections",
        "1",
        "2",
        "--bytes",
        "1M",
        "--turns",
        "1",
        "--seconds",
        "0.3",
        "--json",
        str(path),
    ]
    assert main(["nccl-plugin", *words]) == 0
    measured = json.loads(path.read_text())
    assert {(row["connections"], row["variant"]) for row in measured["bandwidth"]} == {
        (count, variant) for count in (1, 2) for variant in ("bare", "plain", "sealed")
    }
    assert all(row["gb_per_s"] > 0 and row["sender_cpu_s_per_gb"] > 0 for row in measured["bandwidth"])
    assert "OpenSSL 3." in measured["plugin"]
    assert all(row["us"] > 0 for row in measured["latency"])
    assert "sealed/plain" in capsys.readouterr().out
