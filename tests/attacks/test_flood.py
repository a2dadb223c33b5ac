"""A flood of TLS handshakes beside a job that trains: nobody is lost, and a newcomer gets in."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.hosts import can_make_namespaces
from tests.scheduler.processes import ROOT, environment

LIMIT_S = 150.0
LEAST_TRIES_PER_S = 1_500.0
MANY = 5_000

pytestmark = [
    pytest.mark.system,
    pytest.mark.alone,
    pytest.mark.netns,
    pytest.mark.timeout(200, method="signal"),
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces cannot be made here"),
]


def flooded(directory: Path, *options: str) -> dict[str, Any]:
    """What a flood did to a job of six, by ``bench flood``."""
    written = directory / "flood.json"
    done = subprocess.run(
        [sys.executable, "-m", "muster", "bench", "flood", "--json", str(written), *options],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(written.read_text())
    return result


@pytest.mark.skipif(shutil.which("nft") is None, reason="nft is not installed")
def test_a_flood_of_handshakes_costs_no_member_and_keeps_nobody_out(tmp_path: Path) -> None:
    result = flooded(tmp_path, "--seconds", "12")
    assert result["flood"]["tries_per_s"] >= LEAST_TRIES_PER_S
    assert (result["members_lost"], result["generations"]) == (0, [1])
    assert result["steps_during"] > 0
    assert all(seconds is not None and seconds <= 5.0 for seconds in result["joins_s"]), result["joins_s"]
    assert result["memory_growth_mb"] <= 150.0


def test_without_kernel_rules_a_flood_costs_no_member_either(tmp_path: Path) -> None:
    result = flooded(tmp_path, "--seconds", "10", "--rules", "none", "--joins", "0")
    assert result["flood"]["hellos_per_s"] * result["flood"]["seconds"] > MANY
    assert (result["members_lost"], result["generations"]) == (0, [1])
    assert result["steps_during"] > 0
