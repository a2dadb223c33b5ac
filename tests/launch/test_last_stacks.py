"""The stacks of a worker that is about to be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.launch.last_stacks import KEPT_AT_MOST, LastStacks
from muster.launch.report import LastWords
from muster.wire.process_stat import stat_fields
from muster.worker.stacks.mailbox import YOUNG_S, age_s
from tests.launch.launching import place
from tests.waiting import wait_for

HOLDS_THE_LOCK = """
import ctypes, os, sys
sys.path[:0] = {path!r}
from muster.worker.stacks.handler import answer_signal
answer_signal(os.environ)

def hangs_here():
    libc = ctypes.PyDLL(None)
    os.write(1, b"ready\\n")
    while True:
        libc.pause()

hangs_here()
"""


def test_one_whose_lock_c_code_holds_says_where_it_stands(tmp_path: Path) -> None:
    stacks = LastStacks()
    command = [sys.executable, "-c", HOLDS_THE_LOCK.format(path=sys.path)]
    process = subprocess.Popen(command, env={**os.environ, **stacks.variables}, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        wait_for(lambda: age_s(process.pid) > YOUNG_S)
        for _ in range(KEPT_AT_MOST):  # a standstill may last for all the time that an answer has
            assert stacks.keep(process.pid, "3", tmp_path) == f"; its stacks: {tmp_path / 'stacks-3.txt'}"
            if "in hangs_here" in (tmp_path / "stacks-3.txt").read_text():
                break
    finally:
        process.kill()
        process.communicate()
        stacks.close()
    said = (tmp_path / "stacks-3.txt").read_text()
    assert "in hangs_here" in said and "kernel:\nthread " in said
    assert (tmp_path / "stacks-3.txt").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_one_that_is_lost_because_c_code_holds_its_lock_is_looked_at_while_it_lives(tmp_path: Path) -> None:
    script = """
import ctypes, os, time
import numpy as np
import muster

def hangs_here():
    libc = ctypes.PyDLL(None)
    time.sleep(1.5)
    while True:
        libc.pause()

session = muster.init()
muster.barrier()
if session.rank == 1:
    hangs_here()
try:
    while not os.path.exists("muster-runs/latest/stacks-1.txt"):
        muster.all_reduce(np.ones(4))
except muster.errors.MembershipChanged:
    session.rejoin()
    while not os.path.exists("over"):
        time.sleep(0.1)
"""
    with place(tmp_path) as here:
        launch = here.start(
            "--scheduler", "-n", "2", "--min-workers", "1", command=(sys.executable, here.script(script)),
            MS_NODE_TIMEOUT="3",
        )  # fmt: skip
        stacks = tmp_path / "muster-runs" / "latest" / "stacks-1.txt"
        wait_for(
            lambda: stacks.exists() and "kernel:" in stacks.read_text(), lambda: f"ended: {launch.poll()}"
        )
        (tmp_path / "over").touch()
        launch.terminate()
        _, err = launch.communicate(timeout=100)
    assert "in hangs_here" in stacks.read_text()
    assert "is alive, but lost to the others; its stacks: " in err.decode()


def test_one_without_handler_is_described_by_the_kernel_and_few_are(tmp_path: Path) -> None:
    stacks = LastStacks()
    process = subprocess.Popen(["sleep", "600"])
    try:
        for number in range(KEPT_AT_MOST):
            assert stacks.keep(process.pid, str(number), tmp_path)
        assert not stacks.keep(process.pid, "more", tmp_path)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        stacks.close()
    assert "no handler for them here" in (tmp_path / "stacks-0.txt").read_text()


def test_where_nothing_can_be_written_nothing_is_promised(tmp_path: Path) -> None:
    stacks = LastStacks()
    assert stacks.keep(os.getpid(), "0", tmp_path / "missing") == ""
    stacks.close()


class Lost:
    """This process as a worker of which another has heard that it is lost, and has gone on since."""

    label, returncode = "1", None

    def __init__(self, error: str = "", pid: int = 0) -> None:
        self._error, self.pid = error, pid or os.getpid()

    def has_ended(self) -> bool:
        return False

    def noted(self) -> int:
        return 1

    def words(self) -> LastWords:
        me = frozenset({("1", 7)})
        return LastWords(me, error=self._error, lost=me)


@pytest.mark.parametrize(("error", "asked"), [("", True), ("RefusedError: Rank 1 is lost.", False)])
def test_one_that_has_said_what_ends_it_is_left_alone(tmp_path: Path, error: str, asked: bool) -> None:
    stacks, said = LastStacks(), list[str]()
    stacks.look([Lost(error)], tmp_path, said.append)
    stacks.close()
    assert bool(said) == asked == any(tmp_path.iterdir())


ENDS = """
import ctypes, os, threading
threading.Thread(target=threading.Event().wait).start()
os.write(1, b"ready\\n")
ctypes.CDLL(None).pthread_exit(None)
"""


def test_one_that_is_ending_is_not_said_to_be_alive(tmp_path: Path) -> None:
    """A killed process has closed its connections some time before it can be collected."""
    stacks, said = LastStacks(), list[str]()
    with subprocess.Popen([sys.executable, "-c", ENDS], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            main = f"/proc/{process.pid}/task/{process.pid}"
            wait_for(lambda: stat_fields(main)[0] == "Z")
            stacks.look([Lost(pid=process.pid)], tmp_path, said.append)
        finally:
            process.kill()
    stacks.close()
    assert not said and not any(tmp_path.iterdir())
