"""Reads the evidence of hangs from a run's directory, for its report."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from muster.wire.files import read_regular
from muster.wire.launches import INCIDENTS
from muster.wire.log_lines import one_line

SHOWN = 8
"""The largest number of hangs that are shown; the newest ones are."""

FILES_SHOWN = 12
MOST_BYTES = 128 * 1024
"""The largest size in bytes of a file that is shown; of a larger file, only the name is shown."""

SUMMARY = "incident.txt"


@dataclass
class ObservedHang:
    """The evidence of one hang.

    Attributes:
        name: the name of its directory.
        sentence: what happened.
        files: name and text of each file, the summary first.
    """

    name: str
    sentence: str = ""
    files: list[tuple[str, str]] = field(default_factory=list)


def hangs_of(directory: Path) -> list[ObservedHang]:
    """Returns the newest hangs of a run, the newest last, and then the stacks of workers that were killed."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted((directory / INCIDENTS).iterdir())[-SHOWN:]:
            hang = _hang(path)
            if hang.files:
                found.append(hang)
    with contextlib.suppress(OSError):
        killed = sorted(directory.glob("stacks-*.txt"))[:FILES_SHOWN]
        if killed:
            said = "Workers that did not end were killed; where they stood:"
            found.append(ObservedHang("stacks", said, [(each.name, _text(each)) for each in killed]))
    return found


def _hang(path: Path) -> ObservedHang:
    hang = ObservedHang(path.name)
    with contextlib.suppress(OSError):
        names = sorted(path.iterdir(), key=lambda each: (each.name != SUMMARY, each.name))
        hang.files = [(each.name, _text(each)) for each in names[:FILES_SHOWN]]
    lines = hang.files[0][1].splitlines() if hang.files else []
    hang.sentence = " ".join(lines[:2])
    return hang


def _text(path: Path) -> str:
    if path.is_symlink():
        return "It is a link, and none is followed here."
    try:
        text = read_regular(path, MOST_BYTES).decode(errors="replace")
    except OSError as error:
        return f"It cannot be shown: {error.strerror}."
    return "\n".join(map(one_line, text.split("\n")))
