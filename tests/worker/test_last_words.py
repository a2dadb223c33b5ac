"""What a worker lets its launcher know."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from worker import last_words


def test_facts_are_appended_to_the_launchers_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = os.memfd_create(last_words.FILE_NAME)
    monkeypatch.setenv(last_words.VARIABLE, f"/proc/{os.getpid()}/fd/{file}")
    last_words.note(node_id="a")
    last_words.note(error="two\nlines")
    lines = os.pread(file, 1000, 0).decode().splitlines()
    os.close(file)
    assert [json.loads(line) for line in lines] == [{"node_id": "a"}, {"error": "two\nlines"}]


def test_no_other_file_is_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher is gone, say, and its number with a descriptor another process's."""
    mine = tmp_path / "mine"
    with mine.open("w") as file:
        for name in (f"/proc/{os.getpid()}/fd/{file.fileno()}", str(mine), "/proc/0/fd/0", ""):
            monkeypatch.setenv(last_words.VARIABLE, name)
            last_words.note(node_id="a")
    assert mine.read_text() == ""
