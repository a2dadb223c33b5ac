"""Shows a run's progress: lines and, on a terminal, a status line below them."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO


class StatusLine:
    """Prints lines; on a terminal, it also keeps a status line at the bottom, which is overwritten in place.

    As a context manager, it removes the status line at the end.

    Args:
        stream: the stream to print to; standard output by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._shown = ""

    def line(self, text: str) -> None:
        """Prints a permanent line."""
        self._write(f"{self._clearing()}{text}\n{self._shown}")

    def show(self, done: int, total: int, text: str) -> None:
        """Overwrites the status line: a bar of ``done`` of ``total``, and a text."""
        if not self._live:
            return
        filled = 20 * done // max(total, 1)
        clearing = self._clearing()
        width = shutil.get_terminal_size().columns - 1  # A full line would wrap, and could not be cleared.
        self._shown = f"[{'#' * filled}{'.' * (20 - filled)}] {done}/{total} {text}"[:width]
        self._write(clearing + self._shown)

    def close(self) -> None:
        """Removes the status line."""
        clearing, self._shown = self._clearing(), ""
        self._write(clearing)

    def __enter__(self) -> StatusLine:
        """Returns the status line."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Removes the status line."""
        self.close()

    def _clearing(self) -> str:
        return "\r\x1b[K" if self._shown else ""

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()
