"""Shows a run's progress: lines, and a status line below them on a terminal."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO


class StatusLine:
    """Prints lines; on a terminal it also keeps a status line at the bottom, overwritten in place.

    As a context manager it takes the status line away at the end.

    Args:
        stream: where to; standard output by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._shown = ""

    def line(self, text: str) -> None:
        """Prints a line that stays."""
        self._write(f"{self._clearing()}{text}\n{self._shown}")

    def show(self, done: int, total: int, text: str) -> None:
        """Overwrites the status line: a bar of ``done`` of ``total``, and a text."""
        if not self._live:
            return
        filled = 20 * done // max(total, 1)
        clearing = self._clearing()
        width = shutil.get_terminal_size().columns - 1  # a full line would wrap, and could not be cleared
        self._shown = f"[{'#' * filled}{'.' * (20 - filled)}] {done}/{total} {text}"[:width]
        self._write(clearing + self._shown)

    def close(self) -> None:
        """Takes the status line away."""
        clearing, self._shown = self._clearing(), ""
        self._write(clearing)

    def __enter__(self) -> StatusLine:
        """Returns the status line."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Takes the status line away."""
        self.close()

    def _clearing(self) -> str:
        return "\r\x1b[K" if self._shown else ""

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()
