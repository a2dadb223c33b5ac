"""A process between its fork and its program: no signal is lost, and none is taken for the launcher's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from muster.launch.plan import Recipe
from muster.launch.process import Child
from tests.launch.launching import environment

SPAWNING = """
import json, os, signal, sys
from pathlib import Path
from muster.launch.plan import Recipe
from muster.launch.process import Guardian, spawn

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1)
def held():
    return [n.name for n in NUMBERS if n in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
def at_fork():
    Path("at_fork").write_text(json.dumps(held()))
    os.kill(os.getpid(), signal.SIGTERM)  # the launcher is asked to end just now, and passes it on
guardian = Guardian.start()
signal.signal(signal.SIGTERM, lambda *_: Path("launchers_handler").touch())
os.register_at_fork(after_in_child=at_fork)
child = spawn(Recipe("0", (sys.executable, "-c", "print('ran')"), {}, "log"), Path(), guardian, print)
print(json.dumps(held()))
_, status = os.waitpid(child.pid, 0)
print(os.waitstatus_to_exitcode(status))
"""


def test_a_signal_right_after_the_fork_ends_the_new_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPAWNING],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "at_fork").read_text()) == [
        *("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGCHLD", "SIGUSR1")
    ]
    assert done.stdout == f"[]\n{-signal.SIGTERM}\n"
    assert not (tmp_path / "launchers_handler").exists()


def test_a_process_that_leads_no_group_yet_gets_the_signal_too(tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    child = Child(Recipe("0", ("true",), {}, "log"), pid, -1, tmp_path / "log", print)
    child.signal(signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    child.signal(signal.SIGTERM)  # nobody is there any more
