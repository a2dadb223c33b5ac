"""What a program that outlives generations hears from its agent, and says to it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from muster.programs.agent_line import AgentLine
from muster.worker.program_environment import AGENT_PID_VARIABLE, AGENT_VARIABLE

LIMIT_S = 60


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setenv(AGENT_VARIABLE, str(theirs.fileno()))
        monkeypatch.setenv(AGENT_PID_VARIABLE, str(os.getpid()))
        monkeypatch.setenv("RANK", "0")
        yield ours
        ours.close()
        ended = [each for each in threading.enumerate() if each.name == "muster-agent"]
        for each in ended:  # it closes its end
            each.join(LIMIT_S)


def say(agent: socket.socket, **said: object) -> None:
    agent.sendall(json.dumps(said).encode() + b"\n")


def test_a_generation_that_ends_before_it_is_entered_is_passed_over(agent: socket.socket) -> None:
    heard = threading.Semaphore(0)
    line = AgentLine(lambda _: heard.release())
    say(agent, over="the first")
    say(agent, variables={"RANK": "1"})
    say(agent, over="the second, too")
    assert heard.acquire(timeout=LIMIT_S)
    assert heard.acquire(timeout=LIMIT_S)
    assert line.is_over
    entered = threading.Thread(target=line.enter_next)
    entered.start()
    say(agent, variables={"RANK": "2"})
    entered.join(LIMIT_S)
    assert not entered.is_alive()
    assert os.environ["RANK"] == "2"
    assert not line.is_over
    assert agent.recv(100) == b"rebuilds\n"


def test_a_program_that_cannot_go_on_says_why_on_one_line(agent: socket.socket) -> None:
    line = AgentLine(lambda _: None)
    assert agent.recv(100) == b"rebuilds\n"
    ended: list[str] = []

    def restart() -> None:
        try:
            line.restart("two\nlines")
        except SystemExit as end:
            ended.append(str(end))

    thread = threading.Thread(target=restart)
    thread.start()
    assert agent.recv(100) == b"restart two lines\n"
    agent.shutdown(socket.SHUT_RDWR)
    thread.join(LIMIT_S)
    assert ended == ["The agent of this program has gone."]


def test_a_program_that_cannot_go_on_yet_is_to_end_with_its_generation(agent: socket.socket) -> None:
    line = AgentLine(lambda _: None)
    line.do_not_stay()
    line.stay()
    said = b""
    while said.count(b"\n") < 3:
        said += agent.recv(100)
    assert said == b"rebuilds\nends\nrebuilds\n"


AGENT = """
import os, select, signal, socket, subprocess, sys
ours, theirs = socket.socketpair()
env = {**os.environ, sys.argv[1]: str(theirs.fileno()), sys.argv[2]: str(os.getpid())}
command = [sys.executable, "-c", sys.argv[3], sys.argv[4]]
program = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
theirs.close()
if sys.argv[4] == "unheard":  # what it has said is still unread when its agent ends
    select.select([ours], [], [])
else:
    ours.recv(100)
print(program.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
PROGRAM = """
import signal, sys, threading
from muster.programs.agent_line import AgentLine
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "deaf" else signal.SIG_DFL)
AgentLine(lambda _: None)
threading.Event().wait()
"""


@pytest.mark.parametrize("kind", ["willing", "deaf", "unheard"])
def test_a_program_whose_agent_is_killed_ends(kind: str) -> None:
    words = [AGENT, AGENT_VARIABLE, AGENT_PID_VARIABLE, PROGRAM, kind]
    agent = subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    with agent:
        program = int(agent.stdout.readline())
        try:
            handle = os.pidfd_open(program)
        except ProcessLookupError:  # so soon
            return
    try:
        assert select.select([handle], [], [], LIMIT_S)[0], "it goes on without an agent"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(program, signal.SIGKILL)
        os.close(handle)
