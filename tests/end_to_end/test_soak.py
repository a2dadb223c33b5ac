"""Minutes of harm to a job whose every step has one right result; ``muster bench soak`` takes hours of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HARM_S = float(os.environ.get("MUSTER_SOAK_S", "110"))
SEED = os.environ.get("MUSTER_SOAK_SEED", "1")


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(900, method="signal")
@pytest.mark.parametrize("more", [[], ["--snapshots"]], ids=["whole", "snapshots"])
def test_no_step_of_any_process_is_wrong(more: list[str], tmp_path: Path, record_property: Any) -> None:
    if more:
        pytest.importorskip("torch")
    options = ["--hours", str(HARM_S / 3600), "--seed", SEED, "--json", "soak.json", "--keep", "logs", *more]
    done = subprocess.run(
        [sys.executable, "-m", "muster", "bench", "soak", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-5000:], done.stderr[-10_000:])
    assert done.returncode == 0
    found = json.loads((tmp_path / "soak.json").read_text())
    record_property("soak", json.dumps(found))
    assert found["did_not_hold"] == [] and found["wrong_steps"] == 0
    assert found["checked_steps"] > 3 * found["steps"]
    if HARM_S > 100:  # on a busy machine the time is over before each kind has had its turn
        assert len({"kill", "stop", "cut data", "cut control", "scheduler"} & found["harm"].keys()) >= 3
