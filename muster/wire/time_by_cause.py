"""The causes by which a job's time is counted, and how a log writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable

TRAINING, DATA, CHECKPOINTS, REDOING, FORMING, SUSPENDED = CAUSES = (
    "training",
    "waiting for data",
    "checkpoints",
    "redoing",
    "forming",
    "suspended",
)
"""The causes, in the order shown. Redoing means repeating steps that had been finished before a loss."""

_IN_WORDS = re.compile(r"(?:^|, )([a-z][a-z ]*) (\d+\.\d) s")


def spent_in_words(spent: Iterable[tuple[str, float]]) -> str:
    """Formats seconds by cause for a log: ``training 90.0 s, forming 3.5 s``; :func:`spent_of` parses it."""
    return ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in spent)


def spent_of(text: str) -> dict[str, float]:
    """Parses the seconds of each known cause from such a log line."""
    return {cause: float(seconds) for cause, seconds in _IN_WORDS.findall(text) if cause in CAUSES}
