"""Puts a job back into the queue whose first node is lost, from another node of it.

The batch script and the scheduler run on the first node, and are lost with it. A job that may go on without a
node (``--no-kill``) then still runs for Slurm, without its script, until its time limit. So on two other
nodes, a process beside the first worker checks whether the scheduler can be reached. If it cannot, the
process asks Slurm about the first node.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from muster.launch.slurm.allocation import lost_nodes
from muster.launch.slurm.questions import ask

WATCH_S = 20.0
PARENT_S = 1.0
FIRST_NODE = "MUSTER_SLURM_FIRST_NODE"
"""Names the node of the batch script to its tasks; set only if the job may go back into the queue."""

_WATCHERS = ("1", "2")
"""SLURM_NODEID of the nodes that watch: two, because one may be lost together with the first node."""


def start_watch(command: Sequence[str], env: dict[str, str]) -> None:
    """Starts the watch beside a worker that is to have one; removes its variable from ``env``."""
    watched = env.pop(FIRST_NODE, "")
    if watched and env.get("SLURM_NODEID") in _WATCHERS and env.get("SLURM_LOCALID", "0") == "0":
        nowhere = subprocess.DEVNULL  # otherwise the step would wait for the end of its output
        subprocess.Popen(
            command, env={**env, FIRST_NODE: watched}, stdin=nowhere, stdout=nowhere, stderr=nowhere
        )


def watch_first_node(env: Mapping[str, str]) -> int:
    """Watches until the process that started it has ended, or the job is back in the queue."""
    # Slurm sends a step's signals to all its processes; this one has nothing to save.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent, looked = os.getppid(), time.monotonic()
    while os.getppid() == parent:
        time.sleep(PARENT_S)
        if time.monotonic() - looked < WATCH_S:
            continue
        looked = time.monotonic()
        if not why_not_reached(env["MS_SCHED_HOST"], int(env["MS_SCHED_PORT"])):
            continue
        states = ask(env, "sinfo", "--noheader", "--Node", f"--nodes={env[FIRST_NODE]}", "--format=%N %T")
        if lost_nodes(states or "") and ask(env, "scontrol", "requeue", env["SLURM_JOB_ID"]) is not None:
            break
    return 0


def why_not_reached(host: str, port: int) -> str:
    """Returns why this node cannot connect to the scheduler; "" if it can."""
    try:
        with socket.create_connection((host, port), timeout=10.0):
            return ""
    except OSError as error:
        return f"does not reach the scheduler at {host}:{port}: {error.strerror or error}"
