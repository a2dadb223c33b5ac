"""Workers that a real mpirun has started take their places from its variables alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.processes import ROOT, Pki, environment, scheduler

REPORT = str(ROOT / "tests/end_to_end/host_report.py")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    pki = Pki.make(tmp_path / "keys")
    with scheduler(MS_WORKER_NUM="3", **pki.env()) as sched:
        done = subprocess.run(
            ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, REPORT],
            env=environment(MS_SCHED_PORT=str(sched.port), MS_TOPO_TIMEOUT="40", **pki.env()),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr + sched.log
        reports = [json.loads(line) for line in re.findall(r"\{\"rank\"[^{}]*\}", done.stdout)]
        reports.sort(key=lambda report: int(report["rank"]))
        assert [report["rank"] for report in reports] == [0, 1, 2]
        assert [report["local"] for report in reports] == [[0, 3], [1, 3], [2, 3]]
        assert [report["sum"] for report in reports] == [3.0] * 3
        assert sched.wait() == 0
    assert "node 2 on host" in sched.log.lower()
