"""Who is asked for a password on a terminal may decline by Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduler.processes import Pki, environment
from tests.waiting import LIMIT_S

ON_A_TERMINAL = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def declined(directory: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """The exit code of a command that is answered with Ctrl-C, and what stood on its terminal."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", ON_A_TERMINAL, sys.executable, "-W", "error", *arguments]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=directory, env=environment(**env)
    )
    os.close(theirs)
    shown = b""
    try:
        while b"Password of " not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, b"\x03")
        code = process.wait(LIMIT_S)
        while more := _rest(ours):
            shown += more
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return code, shown.decode()


def _rest(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # nobody holds its other end any more
        return b""


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "scheduler"),
        ("-m", "scheduler", "status"),
        ("-m", "muster", "run", "-n", "2", "--scheduler", "--", "true"),
        ("-m", "muster", "check", "-n", "2", "--scheduler"),
    ],
    ids=" ".join,
)
def test_ctrl_c_at_the_question_ends_without_a_traceback(
    tmp_path: Path, pki: Pki, arguments: tuple[str, ...]
) -> None:
    env = {"MS_CONFIG_FILE": str(pki.config), "MS_WORKER_NUM": "2", "MS_ROLE": ""}
    if arguments == ("-m", "scheduler"):
        env["MS_ROLE"] = "MS_SCHED"
    code, shown = declined(tmp_path, *arguments, **env)
    assert (code, "Traceback" in shown) == (130, False), shown
    assert shown.endswith("interrupted\r\n")
