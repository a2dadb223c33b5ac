"""A launch's output: its own sentences, the workers' lines, and a status line on a terminal.

The workers' output is passed on as bytes. Of the lines that Muster itself logs in a worker, only warnings and
errors are shown, unless the user asks for more. The worker's log has all of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence

from muster.wire import json_lines

_LOGGED = re.compile(
    rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} muster[.\w]* (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\+ )?(.*)",
    re.DOTALL,
)
"""A line as :class:`muster.wire.log_lines.BoundedFormatter` writes it."""

_YELLOW, _RED, _GREEN, _PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[32m", "\x1b[0m"
COLOURS = {"warning": _YELLOW, "error": _RED, "good": _GREEN}
BAR_CELLS = 20


def say(sentence: str) -> None:
    """Shows a sentence of a Muster command on standard error."""
    json_lines.say(sentence, as_text=f"muster: {sentence}")


def write(descriptor: int, data: bytes) -> None:
    """Writes all of the data; a terminal that has gone away must not end training."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


def shortened(text: str, length: int = 300) -> str:
    """The text, cut to fit a line of this many characters."""
    return text if len(text) <= length else f"{text[: max(length - 3, 0)]}..."


def is_for_the_screen(line: bytes) -> bool:
    """Whether a worker's JSON line comes from the program itself, or is a warning or error."""
    found = json_lines.fields_of(line)
    return found is None or found["component"] == "program" or found["level"] not in ("DEBUG", "INFO")


class Screen:
    """The terminal of a launch: sentences on one descriptor, the workers' output on another.

    Args:
        env: the environment, of which COLUMNS, NO_COLOR and TERM count.
        out: the descriptor for the workers' output.
        err: the descriptor for sentences and the status line.
        whole: whether all that Muster logs in the workers is shown.

    With MS_LOG_FORMAT=json in ``env``, each line on either descriptor is a JSON object.
    """

    def __init__(self, env: Mapping[str, str], *, out: int = 1, err: int = 2, whole: bool = False) -> None:
        self._out, self._err, self._whole = out, err, whole
        self.json = json_lines.wanted(env)
        self.live = os.isatty(err) and env.get("TERM") != "dumb" and not self.json
        plain = bool(env.get("NO_COLOR")) or env.get("TERM") == "dumb"
        self._coloured = {end: os.isatty(end) and not plain for end in (out, err)}
        self._env = env
        self._status = ""
        self.heard: Callable[[str, str], None] = lambda sentence, kind: None
        """Called with every sentence and its kind."""

    @property
    def width(self) -> int | None:
        """Characters of a line; None: not limited, as in a file."""
        with contextlib.suppress(OSError):
            columns = os.get_terminal_size(self._err).columns
            asked = self._env.get("COLUMNS", "")
            return max(int(asked) if asked.isdecimal() and len(asked) < 5 else columns, 20)
        return None

    def say(self, sentence: str, kind: str = "") -> None:
        """Shows a sentence, wrapped to the terminal; ``kind`` may be warning, error or good."""
        self.heard(sentence, kind)
        if self.json:
            self._put_json(sentence, kind)
            return
        text = f"muster: {sentence}"
        if self.width is not None:
            lines = textwrap.wrap(text, self.width, subsequent_indent="  ", break_on_hyphens=False)
            text = "\n".join(lines)
        self._put(self._err, f"{self._in_colour(self._err, text, kind)}\n".encode())

    def say_group(self, generation: int, sentence: str, kind: str) -> None:
        """Shows that a generation is established; later JSON lines carry its number."""
        json_lines.process_lines.stands(generation)
        self.say(sentence, kind)
        json_lines.process_lines.resolved()

    def show_end(self, lines: Sequence[bytes]) -> None:
        """Shows the last lines of a log, indented."""
        if self.json:
            shown = [line.decode(errors="replace") for line in lines]
            self._put_json("the end of that log", "error", lines=shown)
            return
        for line in lines:
            if self.width is not None:
                line = shortened(line.decode(errors="replace"), self.width - 4).encode()
            self._put(self._err, b"    " + line + b"\n")

    def show(self, head: bytes, lines: Sequence[bytes]) -> None:
        """Shows what a worker has written; JSON lines get no head, because they name their worker."""
        if self.json:
            told = [line + b"\n" for line in lines if self._whole or is_for_the_screen(line)]
            self._put(self._out, b"".join(told))
            return
        shown = [head + line + b"\n" for line in map(self._thinned, lines) if line is not None]
        if shown:
            self._put(self._out, b"".join(shown))

    def _thinned(self, line: bytes) -> bytes | None:
        """The line as it is shown; None: it goes only to the log."""
        logged = None if self._whole else _LOGGED.fullmatch(line)
        if logged is None:
            return line
        level, more, text = logged.groups()
        if more or level in (b"DEBUG", b"INFO"):
            return None
        words = f"{level.decode().lower()}: {text.decode(errors='replace')}"
        if self.width is not None:
            words = shortened(words, self.width - 6)
        kind = "warning" if level == b"WARNING" else "error"
        return self._in_colour(self._out, words, kind).encode()

    def follow(self, done: int, total: int, facts: str) -> None:
        """Shows the training's progress in a line that the next call overwrites; on a terminal only."""
        if not self.live:
            return
        filled = BAR_CELLS * done // total if 0 < done <= total else 0
        bar = (
            f"[{'#' * filled}{'.' * (BAR_CELLS - filled)}] {done:,}/{total:,}" if total else f"step {done:,}"
        )
        # A line of the full width would wrap, and could not be overwritten.
        status = shortened(f"{bar}  {facts}".rstrip(), (self.width or 80) - 1)
        if status != self._status:
            self._status = status
            write(self._err, f"\r\x1b[K{status}".encode())

    def close(self) -> None:
        """Removes the status line."""
        if self._status:
            self._status = ""
            write(self._err, b"\r\x1b[K")

    def _put_json(self, sentence: str, kind: str, **facts: object) -> None:
        level = {"warning": "WARNING", "error": "ERROR"}.get(kind, "INFO")
        line = json_lines.json_line(level, sentence, json_lines.process_lines, **facts)
        self._put(self._err, f"{line}\n".encode())

    def _put(self, end: int, data: bytes) -> None:
        if not self._status:
            write(end, data)
            return
        write(self._err, b"\r\x1b[K")
        write(end, data)
        write(self._err, self._status.encode())

    def _in_colour(self, end: int, text: str, kind: str) -> str:
        return f"{COLOURS[kind]}{text}{_PLAIN}" if kind and self._coloured[end] else text
