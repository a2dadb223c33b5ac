"""Stacks by signal: of a process that hangs, wherever it does; nobody else gets the signal."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from muster.worker.stacks.handler import SIGNAL, VARIABLE
from muster.worker.stacks.mailbox import YOUNG_S, Mailbox, age_s, catches, family
from tests.waiting import LIMIT_S, wait_for

HANGS = """
import ctypes, os, signal, sys, threading, time
sys.path[:0] = {path!r}
from muster.worker.stacks.handler import answer_signal

def noted(*_):
    os.write(1, b"usr1\\n")

signal.signal(signal.SIGUSR1, noted)
{before}
answer_signal(os.environ)

def hangs_here():
    kind = sys.argv[1]
    if kind == "sleep":
        time.sleep(600)
    elif kind == "c":
        libc = ctypes.CDLL(None)
        while True:
            libc.pause()
    elif kind == "c-with-the-lock":
        libc = ctypes.PyDLL(None)
        while True:
            libc.pause()
    elif kind == "python":
        while True:
            pass
    elif kind == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

os.write(1, b"ready\\n")
hangs_here()
"""
OWN = "signal.signal(signal.SIGRTMAX - 3, lambda *_: os.write(1, b'own\\n'))"


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    made = Mailbox()
    yield made
    made.close()


@contextlib.contextmanager
def hanging(kind: str, mailbox: Mailbox | None, before: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A process that hangs in a function, old enough to be asked."""
    script = HANGS.format(path=sys.path, before=before)
    variables = {VARIABLE: mailbox.path} if mailbox is not None else {}
    process = subprocess.Popen(
        [sys.executable, "-c", script, kind], env={**os.environ, **variables}, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        wait_for(lambda: age_s(process.pid) > YOUNG_S)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", ["sleep", "c", "c-with-the-lock", "python", "lock"])
def test_one_that_hangs_says_where_and_goes_on_hanging(
    kind: str, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.worker.stacks.mailbox.QUIET_S", 0.5)  # a busy host interrupts the answer
    with hanging(kind, mailbox) as process:
        for _ in range(2):
            said = mailbox.ask(process.pid, wait_s=60.0)
            assert said is not None and said.count("in hangs_here") == 1, "the second asks for its own alone"
        assert process.poll() is None
        if kind in ("sleep", "python"):
            process.send_signal(signal.SIGUSR1)
            assert process.stdout is not None and process.stdout.readline() == b"usr1\n"


def test_who_has_no_handler_is_not_sent_the_signal(mailbox: Mailbox) -> None:
    with hanging("sleep", None) as process:
        assert not catches(process.pid, SIGNAL)
        assert mailbox.ask(process.pid) is None
        assert process.poll() is None
    assert mailbox.ask(process.pid) is None, "it is gone"


def test_a_handler_of_the_script_s_own_is_left_alone(mailbox: Mailbox) -> None:
    with hanging("python", mailbox, before=OWN) as process:
        process.send_signal(SIGNAL)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], LIMIT_S)[0], "the handler is not the script's any more"
        assert process.stdout.readline() == b"own\n"


def test_one_that_was_just_forked_is_not_asked(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.worker.stacks.mailbox.YOUNG_S", time.monotonic() + 1e6)
    with hanging("sleep", mailbox) as process:
        assert mailbox.ask(process.pid) is None


def test_a_family_has_children_and_theirs() -> None:
    script = "sleep 600 & echo $!; wait"
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        assert family(process.pid) == [process.pid, grandchild]
        assert {process.pid, grandchild} <= set(family(os.getpid()))
        assert len(family(os.getpid(), most=1)) == 1
    finally:
        os.kill(grandchild, signal.SIGKILL)
        process.communicate()
