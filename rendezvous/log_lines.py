"""Log lines of the scheduler and of workers: none is longer than 300 characters, and nothing is lost."""

from __future__ import annotations

import logging

MAX_LINE = 300
MORE = "+ "


def bounded(head: str, text: str, limit: int = MAX_LINE) -> str:
    """Puts a head before a text and breaks the line where it would be too long, at a blank if there is one.

    Args:
        head: what each line begins with: time, level.
        text: one or more lines.
        limit: characters of a line at most.

    Returns:
        Lines that all begin with the head; one that goes on another one has ``+`` after it.
    """
    lines = []
    for line in text.split("\n"):
        begin = head
        while len(line) > (room := max(limit - len(begin), 2)):
            cut = line.rfind(" ", room // 2, room + 1)
            cut = room if cut < 0 else cut
            lines.append(begin + line[:cut])
            begin, line = head + MORE, line[cut:].removeprefix(" ")
        lines.append(begin + line)
    return "\n".join(lines)


class BoundedFormatter(logging.Formatter):
    """Formats a record as ``time name level text``, on as many lines as it needs.

    Subclasses choose the head and the text of a record.
    """

    def head(self, record: logging.LogRecord) -> str:
        """What stands before the text, on each line."""
        return f"{self.formatTime(record)} {record.name} {record.levelname} "

    def text(self, record: logging.LogRecord) -> str:
        """The message, with the traceback if there is one."""
        text = record.getMessage()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record."""
        return bounded(self.head(record), self.text(record))


def one_line(text: str) -> str:
    """Escapes what is not printable, so that nobody forges a second line, or a terminal's command."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
