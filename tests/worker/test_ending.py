"""What a worker lets its launcher know at its end, and who reacts to SIGTERM within a block and after it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.errors import LeaveGranted, PeerLostError
from muster.launch.report import LastWords, read_words
from muster.worker import ending, runtime
from muster.worker.ending import on_sigterm
from tests.worker.session.scripted import Thread


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What has reacted, in order; the test's own handlers end with it."""
    before = signal.getsignal(signal.SIGTERM)
    yield []
    signal.signal(signal.SIGTERM, before)


def noting(heard: list[str], name: str) -> Callable[..., None]:
    return lambda *_: heard.append(name)


def test_the_second_signal_is_the_scripts_where_the_first_goes_before(heard: list[str]) -> None:
    own = noting(heard, "own")
    signal.signal(signal.SIGTERM, own)
    with on_sigterm(noting(heard, "block"), before_own=True):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert heard == ["block", "own"]
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_scripts_handler_stays_otherwise(heard: list[str]) -> None:
    signal.signal(signal.SIGTERM, noting(heard, "own"))
    with on_sigterm(noting(heard, "block")):
        signal.raise_signal(signal.SIGTERM)
    assert heard == ["own"]


@pytest.mark.parametrize("before_own", [False, True])
def test_without_a_signal_all_is_as_before(heard: list[str], before_own: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with on_sigterm(noting(heard, "block"), before_own=before_own):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert (heard, signal.getsignal(signal.SIGTERM)) == ([], signal.SIG_DFL)


@pytest.mark.parametrize("before_own", [False, True])
def test_a_handler_that_is_set_inside_stays(heard: list[str], before_own: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    own = noting(heard, "own")
    with on_sigterm(noting(heard, "block"), before_own=before_own):
        signal.signal(signal.SIGTERM, own)
    assert signal.getsignal(signal.SIGTERM) is own


def test_another_thread_sets_nothing(heard: list[str]) -> None:
    own = noting(heard, "own")
    signal.signal(signal.SIGTERM, own)

    def block() -> object:
        with on_sigterm(noting(heard, "block"), before_own=True):
            return signal.getsignal(signal.SIGTERM)

    assert Thread(block).result() is own


def test_facts_are_appended_to_the_launchers_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = os.memfd_create(ending.NOTES_FILE)
    monkeypatch.setenv(ending.NOTES_VARIABLE, f"/proc/{os.getpid()}/fd/{file}")
    ending.note(node_id="a")
    ending.note(error="two\nlines")
    lines = os.pread(file, 1000, 0).decode().splitlines()
    os.close(file)
    assert [json.loads(line) for line in lines] == [{"node_id": "a"}, {"error": "two\nlines"}]


@pytest.mark.parametrize(
    ("session", "code", "words"),
    [
        (
            {"error": PeerLostError("gone", rank=1)},
            1,
            LastWords(error="PeerLostError: gone", consequence=True),
        ),
        ({"error": LeaveGranted("go")}, 0xFF, LastWords(error="asked to leave", left=True)),
        ({"leaves": True}, 143, LastWords(error="exit code 143", left=True)),
        ({"leaves": True}, 3, LastWords(error="exit code 3")),
        ({}, 3, LastWords(error="exit code 3")),
    ],
)
def test_an_exit_code_stands_for_the_error_that_was_caught(
    monkeypatch: pytest.MonkeyPatch, session: dict[str, Any], code: int, words: LastWords
) -> None:
    file = os.memfd_create(ending.NOTES_FILE)
    monkeypatch.setenv(ending.NOTES_VARIABLE, f"/proc/{os.getpid()}/fd/{file}")
    monkeypatch.setattr(runtime.process, "said", False)
    ended = SimpleNamespace(**({"error": None, "leaves": False} | session), end=lambda error: None)
    monkeypatch.setattr(runtime.process, "session", ended)
    runtime.abandon(SystemExit(code))
    noted = os.pread(file, 1000, 0).decode()
    os.close(file)
    assert read_words(noted) == words


def test_no_other_file_is_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher is gone, say, and its number with a descriptor another process's."""
    mine = tmp_path / "mine"
    with mine.open("w") as file:
        for name in (f"/proc/{os.getpid()}/fd/{file.fileno()}", str(mine), "/proc/0/fd/0", ""):
            monkeypatch.setenv(ending.NOTES_VARIABLE, name)
            ending.note(node_id="a")
    assert mine.read_text() == ""
