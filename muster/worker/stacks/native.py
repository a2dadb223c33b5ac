"""Reads the C and Python frames of a process with py-spy, if that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from muster.worker.stacks.handler import let_trace

LIMIT_S = 4.0
ABSENT = "not taken: py-spy is not installed here (pip install py-spy)"


def native_frames(pid: int) -> str:
    """Returns the frames of all threads of a process, or why there are none; pauses it for a moment.

    Args:
        pid: this process, a child of it, or a process that allows it to attach.
    """
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        return ABSENT
    if pid == os.getpid():
        let_trace(pid)  # This allows its children, of which py-spy is one.
    command = [tool, "dump", "--native", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not taken: py-spy took over {LIMIT_S:g} s"
    except OSError as error:
        return f"not taken: {tool}: {error.strerror}"
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return f"not taken: py-spy: {said[0] if said else f'exit code {done.returncode}'}"
    return done.stdout.decode(errors="replace").strip()
