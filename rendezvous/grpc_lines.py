"""What gRPC's C code writes to standard error, made harmless. Does no I/O.

Such lines hold what strangers have sent: the name in a TLS hello, line breaks and escapes included. gRPC
writes each of its records by one write, so whoever keeps the writes apart knows where a record ends; within
it nothing that looks like a line, or like a record, is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from muster.certs.one_line import one_line
from muster.rendezvous.rate_limit import OTHERS, Budget

MAX_TEXT = 160
WINDOW_S = 10.0
_RECORD = re.compile(rb"([IWEF])\d{4} \S+ +\d+ ([\w.+-]{1,80}:\d{1,9})\] ")
_PREAMBLE = b"WARNING: All log messages before absl::InitializeLog()"


@dataclass(frozen=True, slots=True)
class Record:
    """One record of gRPC's log.

    Attributes:
        level: I, W, E or F.
        source: the file and line that wrote it.
        data: what it says, as it came.
    """

    level: str
    source: str
    data: bytes


def record_of(written: bytes) -> Record | None:
    """Reads what came by one write; None if it is no record of gRPC's.

    The remark that its log is not set up counts as one of level I.
    """
    found = _RECORD.match(written)
    if found is not None:
        return Record(found[1].decode(), found[2].decode(), written[found.end() :])
    if written.startswith(_PREAMBLE):
        return Record("I", "absl", written)
    return None


def plain(data: bytes) -> str:
    """Text of C code on one line: escaped, and cut where it is long."""
    text = one_line(data.decode("utf-8", "backslashreplace").strip())
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(data)} bytes)"


class Sayings:
    """Few log lines about what C code says: the first of each place at once, then counts.

    Args:
        lines: of each place in gRPC's sources, or of all else, that are told within ten seconds.
    """

    def __init__(self, lines: int = 1) -> None:
        self._budget = Budget[str](lines=lines, window_s=WINDOW_S, max_callers=32)
        self.next_s = self._budget.next_s

    def add(self, written: bytes, record: Record | None, now_s: float) -> str | None:
        """Notes what was written; returns a line if it is to be told now. Call :meth:`due` before.

        Args:
            written: what came by one write.
            record: that, read by :func:`record_of`.
            now_s: the time.
        """
        if not written.strip():
            return None
        who, data = ("C code", written) if record is None else (f"gRPC ({record.source})", record.data)
        text = plain(data)
        return f"{who} says: {text}" if self._budget.take(who, "", text, now_s) else None

    def due(self, now_s: float) -> Iterator[str]:
        """Ends the intervals that are over; yields what was left untold in them."""
        for untold in self._budget.due(now_s):
            who, count = untold.caller if untold.caller != OTHERS else "C code", sum(untold.codes.values())
            more = f" {count} more things within {WINDOW_S:.0f} s, the last" if count > 1 else ""
            yield f"{who} says{more}: {untold.last}"

    def all(self) -> Iterator[str]:
        """Ends all intervals: nothing more will be said."""
        return self.due(float("inf"))
