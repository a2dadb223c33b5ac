"""A drain that is planned outlives the scheduler that was told of it, with several of them on a real etcd."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from muster.bench.failover.job import SeveralSchedulers

WORKERS, GOES = 3, "1"
SECONDS = 75
"""Until the drain: longer than a takeover takes."""

pytestmark = [
    pytest.mark.system,
    pytest.mark.alone,  # a leader without a processor for seconds loses its lease
    pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed"),
    pytest.mark.timeout(300),
]


def command(job: SeveralSchedulers, *arguments: str) -> str:
    """Runs an operator's command against whoever leads."""
    done = subprocess.run(
        [sys.executable, "-m", "muster", *arguments],
        env=job.env,
        cwd=job.directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_planned_drain_happens_under_the_next_leader_and_one_that_was_called_off_does_not(
    tmp_path: Path,
) -> None:
    with SeveralSchedulers(tmp_path / "job", workers=WORKERS, worker_min=2, pace_s=0.05, say=print) as job:
        job.begin()
        leader = job.settled()
        at = (dt.datetime.now() + dt.timedelta(seconds=SECONDS)).isoformat(timespec="seconds")
        command(job, "drain", "2", "--at", at)
        said = command(job, "drain", GOES, "--at", at)
        assert "is planned" in said
        assert "called off" in command(job, "drain", "2", "--cancel")
        began, killed = job.kill_leader(leader)
        job.takeover(killed, began)
        shown = json.loads(command(job, "status", "--json"))
        assert [each["node_ids"] for each in shown["drains"]] == [[GOES]]
        assert len(shown["workers"]) == WORKERS

        def members() -> list[str]:
            return [each["node_id"] for each in json.loads(command(job, "status", "--json"))["workers"]]

        job.wait("the drained worker has gone", lambda: GOES not in members(), 150)
        assert members() == ["0", "2"]
