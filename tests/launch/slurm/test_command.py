"""What ``muster slurm`` says and ends with, where Slurm is not needed to see it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.scheduler.processes import environment

ALLOCATION = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "localhost",
    "SLURM_NTASKS": "1",
    "SLURMD_NODENAME": "localhost",
}


def slurm(at: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a folder, with an srun that leaves a file there."""
    at.joinpath("srun").write_text(f"#!/bin/sh\ntouch {at}/started\n")
    at.joinpath("srun").chmod(0o755)
    return subprocess.run(
        [sys.executable, "-m", "muster", "slurm", *arguments],
        cwd=at,
        env=environment(PATH=f"{at}{os.pathsep}{os.environ['PATH']}", **env),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_where_the_scheduler_cannot_start_its_words_are_shown_and_no_worker_is(tmp_path: Path) -> None:
    log = tmp_path / "scheduler-7.log"
    log.write_text("scheduler ready on localhost:20007\n")  # of the attempt before the requeue
    done = slurm(tmp_path, "--", "true", **ALLOCATION, MS_NODE_TIMEOUT="soon")
    assert done.returncode == 1
    assert "MS_NODE_TIMEOUT" in done.stderr  # what the scheduler said, not only where
    assert "muster: the scheduler does not serve; its log: scheduler-7.log" in done.stderr
    assert "scheduler ready on" not in done.stderr
    assert log.read_text().startswith("scheduler ready on localhost:20007\n")
    assert not (tmp_path / "started").exists()


def test_outside_a_batch_script_it_says_what_to_submit(tmp_path: Path) -> None:
    done = slurm(tmp_path, "--", "true", **dict.fromkeys(ALLOCATION, ""))
    assert done.returncode == 2
    assert "muster slurm runs in a batch script of Slurm" in done.stderr
    assert "sbatch" in done.stderr
