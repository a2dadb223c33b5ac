"""A process that loads torch once and then forks a job's workers, because loading takes long.

Its argument is the module whose ``main()`` each worker runs.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from typing import Any

import torch

from muster.bench.snapshots.namespaces import enter_namespace

POLL_S = 0.02


def _child(order: Mapping[str, Any]) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    if order["namespace"]:
        enter_namespace(order["namespace"])
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.argv[1:] = order["arguments"]


def main() -> int:
    """Forks a worker for each line of standard input, and reports those that have ended."""
    module = importlib.import_module(sys.argv[1])
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer loads much of torch
    children: set[int] = set()
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    pending = b""
    while True:
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                print("ended", pid, os.waitstatus_to_exitcode(status), flush=True)
        if not poll.poll(1000 * POLL_S):
            continue
        data = os.read(0, 1 << 16)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            pid = os.fork()
            if not pid:
                _child(json.loads(line))
                return int(module.main() or 0)
            children.add(pid)
            print("begun", pid, flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
