"""Three schedulers on a real etcd, and workers that train: leaders killed and stopped, and no quorum."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muster.bench.launches import ROOT, environment
from muster.wire.patience import takeover_patience_s

pytestmark = [
    pytest.mark.system,
    pytest.mark.alone,  # a leader without a processor for seconds loses its lease
    pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed"),
    pytest.mark.timeout(400),
]


def measured(tmp_path: Path, *options: str) -> dict[str, Any]:
    target = tmp_path / "results.json"
    command = [sys.executable, "-m", "muster", "bench", "failover", "--workers", "3", *options]
    done = subprocess.run(
        [*command, "--json", str(target)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(target.read_text())["summary"]
    return summary


def test_a_job_outlives_leaders_etcds_leader_its_quorum_and_a_worker_that_dies_while_nobody_leads(
    tmp_path: Path,
) -> None:
    parts = ("leader", "etcd", "quorum", "worker")
    counts = ("--kills", "2", "--etcd-kills", "1", "--outage-s", "6", "--times", "1")
    summary = measured(tmp_path, *counts, "--only", *parts)
    assert summary["leader"]["kills"] == 2
    assert summary["etcd"]["nothing_happened"]
    assert summary["quorum"]["steps_meanwhile"] > 0
    for part in ("leader", "etcd", "quorum"):
        assert summary[part]["steps_lost_or_doubled"] == 0, part
        assert summary[part]["group_changes"] == 0, part
    assert summary["worker"]["times"] == 1


def test_a_death_with_the_leader_is_known_to_the_next_one_and_one_without_a_majority_ends_nobody(
    tmp_path: Path,
) -> None:
    # Workers of one scheduler would look for it for a second here, in place of MS_RECONNECT_TIMEOUT's 120.
    counts = ("--impatient", "--times", "1", "--outage-s", "3")
    summary = measured(tmp_path, *counts, "--only", "together", "mourning")
    together, mourning = summary["together"], summary["mourning"]
    waited_s = together["next_step_s"]["worst"] - together["takeover_s"]["worst"]
    assert waited_s < takeover_patience_s(5.0)  # else the next leader gives everybody so long to come back
    assert mourning["ended"] == 0
    assert mourning["waited_for_a_scheduler_s"] > 2
    assert mourning["steps_lost_or_doubled"] == 0


def test_a_leader_that_comes_back_is_refused_by_the_fence_alone(tmp_path: Path) -> None:
    summary = measured(tmp_path, "--stops", "2", "--only", "stopped")["stopped"]
    assert summary["late_decisions_refused"] == 2
    assert summary["steps_lost_or_doubled"] == 0
    assert summary["group_changes"] == 0


def test_a_worker_that_dies_while_the_journal_finds_no_space_is_gone_soon_after_there_is_some(
    tmp_path: Path,
) -> None:
    summary = measured(tmp_path, "--only", "space", "--shortages", "4", "--serve", "with")["space, --serve"]
    assert summary["within_limit"] == 1
    assert summary["same_schedulers"]
    assert summary["given_up"] == 0
    assert summary["steps_until_the_death"][0] > 0
