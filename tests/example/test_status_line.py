from __future__ import annotations

import io
import os
import shutil

import pytest

from muster.example.status_line import StatusLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((40, 20)))
    return Terminal()


def test_off_a_terminal_only_lines_are_written() -> None:
    stream = io.StringIO()
    with StatusLine(stream) as out:
        out.show(1, 2, "working")
        out.line("done")
    assert stream.getvalue() == "done\n"


def test_the_status_line_is_overwritten_and_taken_away(terminal: Terminal) -> None:
    with StatusLine(terminal) as out:
        out.show(1, 4, "a")
        out.show(4, 4, "b")
    assert terminal.getvalue() == "[#####...............] 1/4 a\r\x1b[K[####################] 4/4 b\r\x1b[K"


def test_lines_go_above_the_status_line(terminal: Terminal) -> None:
    out = StatusLine(terminal)
    out.show(0, 0, "a")
    out.line("stays")
    assert terminal.getvalue().endswith("\r\x1b[Kstays\n[....................] 0/0 a")


def test_the_status_line_never_wraps(terminal: Terminal) -> None:
    StatusLine(terminal).show(1, 2, "x" * 100)
    assert len(terminal.getvalue()) == 39


def test_an_error_takes_the_status_line_away_too(terminal: Terminal) -> None:
    with pytest.raises(ValueError, match="broken"), StatusLine(terminal) as out:
        out.show(1, 2, "a")
        raise ValueError("broken")
    assert terminal.getvalue().endswith("\r\x1b[K")
