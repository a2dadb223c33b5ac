"""The watch of the node that has the batch script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.launch.slurm.watch import FIRST_NODE, start_watch
from tests.ports import free_port
from tests.scheduler.processes import environment

QUICK = """
import os
from muster.launch.slurm import watch
watch.WATCH_S, watch.PARENT_S = 0.0, 0.05
watch.watch_first_node(os.environ)
"""
SINFO = """#!/bin/sh
echo asked >>asked
if [ "$(wc -l <asked)" -lt 3 ]; then echo 'n1 mixed'; else echo 'n1 down*'; fi
"""
SCONTROL = """#!/bin/sh
echo "$@ after $(wc -l <asked)" >>told
"""


def test_the_job_is_queued_again_when_slurm_has_lost_the_first_node_and_not_before(tmp_path: Path) -> None:
    for name, text in (("sinfo", SINFO), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    nobody = {"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(free_port())}
    job = {"SLURM_JOB_ID": "7", FIRST_NODE: "n1", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(
        [sys.executable, "-c", QUICK], cwd=tmp_path, env=environment(**nobody, **job), check=True, timeout=100
    )
    assert (tmp_path / "told").read_text().split() == ["requeue", "7", "after", "3"]


@pytest.mark.parametrize(
    ("node", "local", "watched", "starts"),
    [
        ("1", "0", "n1", True),
        ("2", "0", "n1", True),
        ("0", "0", "n1", False),
        ("3", "0", "n1", False),
        ("1", "1", "n1", False),
        ("1", "0", "", False),  # the job may not go back into the queue
    ],
)
def test_one_process_on_each_of_two_other_nodes_watches(
    node: str, local: str, watched: str, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    env = {"SLURM_NODEID": node, "SLURM_LOCALID": local, FIRST_NODE: watched}
    start_watch(("watch",), env)
    assert bool(started) == starts
    assert FIRST_NODE not in env
