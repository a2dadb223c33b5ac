"""The record of a run, which a launcher keeps in its directory for ``muster report`` and ``web``.

A file for each launcher, a JSON object a line: what it said, the groups that stood, how far the training was,
and how each process ended. Its size is bounded: the longer a run, the further apart its figures.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from muster.rendezvous.files import open_own, read_regular

MAX_BYTES = 8 * 1024 * 1024
LATEST_S = 2.5e11
"""Some 8,000 years from now: no time of day is later, and calendars end soon after."""

FIGURES_BEFORE_THINNING = 1000
_NAME = re.compile(r"record_[\w.-]+\.jsonl")


class RunRecord:
    """Appends to the record of one launcher. What cannot be written is left out: the run goes on.

    No file is held open, so that a fork has nothing to let go of.

    Args:
        directory: of the run, which exists.
        host: of the launcher.
        wall_clock: seconds since 1970.
        clock: seconds since whenever, by which figures are apart: nobody puts it back.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = directory / f"record_{re.sub(r'[^A-Za-z0-9._-]', '_', host)[:64] or 'host'}.jsonl"
        self._wall_clock = wall_clock
        self._clock = clock
        self._bytes = 0
        self._apart_s = 1.0
        self._figures = 0
        self._due_s = 0.0

    def note(self, kind: str, **facts: object) -> None:
        """Keeps one thing that happened, now."""
        line = {"time": round(self._wall_clock(), 3), "kind": kind, **facts}
        data = (json.dumps(_finite(line), separators=(",", ":")) + "\n").encode()
        if self._bytes + len(data) > MAX_BYTES:
            return
        with contextlib.suppress(OSError):
            descriptor = open_own(self._path)
            try:
                self._bytes += os.write(descriptor, data)
            finally:
                os.close(descriptor)

    @property
    def wants_figures(self) -> bool:
        """Whether it is time for the next figures: once a second, and ever more seldom."""
        return self._clock() >= self._due_s

    def figures(self, **facts: object) -> None:
        """Keeps how far the training is; call it when :attr:`wants_figures`."""
        self._figures += 1
        if self._figures % FIGURES_BEFORE_THINNING == 0:
            self._apart_s *= 2
        self._due_s = self._clock() + self._apart_s
        self.note("figures", **facts)


def read(directory: Path) -> Iterator[dict[str, Any]]:
    """What the launchers of a run have kept, in order of time; what is no such line is passed over.

    Raises:
        OSError: the directory cannot be read.
    """
    lines: list[dict[str, Any]] = []
    for path in sorted(directory.iterdir()):
        if not _NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            for text in read_regular(path, 2 * MAX_BYTES).decode("utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    line = json.loads(text)
                    time_s = line.get("time") if isinstance(line, dict) else None
                    if isinstance(time_s, int | float) and 0 <= time_s < LATEST_S:
                        lines.append(line)
    yield from sorted(lines, key=lambda line: line["time"])


def _finite(value: Any) -> Any:
    """The number, or None for NaN and infinity, which JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return value
