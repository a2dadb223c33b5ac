"""``muster.init()`` in a script whose agent holds the session."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator

import pytest

import muster
from muster.errors import NotInitializedError, SettingsError
from muster.worker import runtime


@pytest.fixture(autouse=True)
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The agent's end of the line; this process is the agent, too."""
    ours, theirs = socket.socketpair()
    said = {
        "MUSTER_AGENT_FD": str(theirs.fileno()),
        "MUSTER_AGENT_PID": str(os.getpid()),
        "MUSTER_NODE_ID": "node7",
        "MUSTER_GENERATION": "3",
        "TORCHELASTIC_RUN_ID": "job",
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
    }
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(runtime, "process", runtime.ProcessState())
    with ours, theirs:
        ours.settimeout(10)
        yield ours
        muster.release()


def test_it_has_the_ranks_of_the_agent_and_is_the_default_session(monkeypatch: pytest.MonkeyPatch) -> None:
    with muster.init() as session:
        assert muster.init() is session
        assert (session.job_id, session.node_id, session.generation) == ("job", "node7", 3)
        assert (session.rank, session.world_size) == (muster.get_rank(), muster.get_group_size()) == (5, 8)
        assert (session.local_rank, session.local_world_size) == (1, 4)
        monkeypatch.setenv("RANK", "4")  # a new generation within the same process
        assert session.rank == 4
    with pytest.raises(NotInitializedError):
        muster.get_rank()


def test_what_it_reports_goes_to_the_agent_and_never_waits_for_it(agent: socket.socket) -> None:
    session = muster.init()
    session.report(4, loss=0.5, samples=32)
    session.report(loss=0.25)
    said = [json.loads(line)["report"] for line in agent.recv(4096).splitlines()]
    assert [(each["step"], each["loss"], each["samples"]) for each in said] == [(4, 0.5, 32), (5, 0.25, None)]
    for step in range(20_000):  # nobody reads
        session.report(step)


def test_own_numbers_and_epochs_go_to_the_agent_and_alone_are_no_step(agent: socket.socket) -> None:
    session = muster.init()
    session.report(loss=0.5, learning_rate=0.1, epoch=1, epochs=10, data_s=0.25)
    session.report(accuracy=0.97, epoch=2)
    session.report()
    said = [json.loads(line)["report"] for line in agent.recv(4096).splitlines()]
    assert [each.get("step") for each in said] == [1, None, 2]
    beside = [(each["epoch"], each["epochs"], each["data_s"]) for each in said]
    assert beside == [(1, 10, 0.25), (2, None, 0), (None, None, 0)]
    assert (said[0]["learning_rate"], said[1]["accuracy"]) == (0.1, 0.97)


@pytest.mark.parametrize("name", ["communicator", "groups", "members"])
def test_what_only_a_session_of_its_own_has_is_refused_in_words(name: str) -> None:
    with pytest.raises(SettingsError, match="--program muster"):
        muster.init("tcp")
    with pytest.raises(NotInitializedError, match="--program muster"):
        getattr(muster.init(), name)


def test_a_child_that_did_not_inherit_the_line_writes_into_no_other_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stranger, other = socket.socketpair()
    with stranger, other:
        monkeypatch.setenv("MUSTER_AGENT_FD", str(stranger.fileno()))
        monkeypatch.setenv("MUSTER_AGENT_PID", "1")
        session = muster.init()
        session.report(1)
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)
        assert session.rank == 5


@pytest.mark.parametrize("number", ["9" * 30, "-1", "x", "\u00b2", ""])
@pytest.mark.parametrize("name", ["MUSTER_AGENT_FD", "MUSTER_AGENT_PID"])
def test_a_variable_that_names_nothing_costs_the_reports_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, number: str
) -> None:
    monkeypatch.setenv(name, number)
    session = muster.init()
    session.report(1)
    assert session.rank == 5
