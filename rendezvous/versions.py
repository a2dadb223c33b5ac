"""The rule which versions of Muster may meet; docs/upgrading.md says it in words.

A version is MAJOR.MINOR.PATCH, and MAJOR.MINOR its series. Workers of one job are of one series. A scheduler
serves workers of its own series and of the one before: messages on the wire are only ever added to.
"""

from __future__ import annotations

import re

from muster.version import __version__

FACT = "muster"
"""The name under which a worker's facts have its version."""

BEFORE_VERSIONS = "0.1"
"""The series of a scheduler that says no version in its Welcome."""

_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:[.+a-z-].*)?", re.ASCII | re.DOTALL)


def series_of(version: str) -> tuple[int, int] | None:
    """Major and minor number; None: it is no version."""
    found = _VERSION.fullmatch(version)
    return (int(found[1]), int(found[2])) if found else None


def is_same_series(one: str, other: str) -> bool:
    """Whether two versions are equal, or differ in the patch only."""
    return one == other or (series_of(one) is not None and series_of(one) == series_of(other))


def is_later_series(one: str, other: str) -> bool:
    """Whether a version is of a later series than another; what is no version is not."""
    first, second = series_of(one), series_of(other)
    return first is not None and second is not None and first > second


def obstacle(*, scheduler: str, worker: str) -> str:
    """Why a scheduler and a worker of these versions may not meet, with the remedy; empty: they may.

    Args:
        scheduler: its version; "" where its Welcome says none.
        worker: its version.
    """
    theirs, own = series_of(scheduler or BEFORE_VERSIONS), series_of(worker)
    said = scheduler or f"{BEFORE_VERSIONS} or older"
    if theirs is None or own is None:
        return (
            f"The scheduler has Muster {said[:40]!a} and the worker {worker[:40]!a}: not both are versions."
        )
    if own > theirs:
        return (
            f"The scheduler has Muster {said}, and the worker {worker}, which is newer:"
            " upgrade the scheduler first, or install its version here."
        )
    if own != theirs and not (own[0] == theirs[0] and own[1] == theirs[1] - 1):
        return (
            f"The scheduler has Muster {said}, and the worker {worker}, which is too old: a scheduler"
            " serves workers of its own minor version and of the one before. Upgrade the worker."
        )
    return ""


def own_obstacle(scheduler: str) -> str:
    """:func:`obstacle` for a worker of this process's version."""
    return obstacle(scheduler=scheduler, worker=__version__)
