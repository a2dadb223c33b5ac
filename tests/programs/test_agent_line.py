"""What a program that outlives generations hears from its agent, and says to it."""

from __future__ import annotations

import json
import os
import socket
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
