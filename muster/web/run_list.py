"""``muster report --list``: the runs that a directory holds, the newest first, one line each."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from muster.web.past import Run, load
from muster.web.words import duration
from muster.wire.launches import LATEST
from muster.wire.log_lines import one_line

MOST_RUNS = 100
"""The largest number of directories that are read: those that changed last."""


def runs_in(folder: Path) -> Iterator[tuple[Path, Run]]:
    """Yields the runs whose directories are in ``folder``, the latest first.

    Raises:
        OSError: ``folder`` cannot be read.
    """
    changed: list[tuple[float, Path]] = []
    for each in folder.iterdir():
        with contextlib.suppress(OSError):  # The directory may be gone by now.
            if each.is_dir() and each.name != LATEST:
                changed.append((each.stat().st_mtime, each))
    found = []
    for _, directory in sorted(changed)[-MOST_RUNS:]:
        with contextlib.suppress(OSError):
            run = load(directory)
            if run.began is not None:
                found.append((directory, run))
    yield from sorted(found, key=lambda each: -(each[1].began or 0.0))


def as_json(directory: Path, run: Run) -> dict[str, Any]:
    """Returns a run's row as JSON values: times in seconds since 1970, and durations in seconds."""
    report = directory / "report.html"
    return {
        "directory": str(directory),
        "job": run.job_id,
        "workers": run.workers,
        "hosts": list(dict.fromkeys(run.hosts)),
        "command": run.command,
        "began": run.began,
        "ended": run.ended,
        "exit_code": None if run.ended is None else max(run.codes, default=0),
        "outcome": _outcome(run),
        "generations": len(run.generations),
        "seconds_by_cause": run.time_by_cause,
        "report": str(report) if report.is_file() else None,
    }


def show(rows: Sequence[tuple[Path, Run]], out: TextIO, *, json_wanted: bool) -> None:
    """Prints the runs as a table, or as JSON."""
    if json_wanted:
        print(json.dumps([as_json(*row) for row in rows], indent=2), file=out)
        return
    table = [("DIRECTORY", "BEGAN", "LASTED", "WORKERS", "TRAINING", "OUTCOME")]
    for directory, run in rows:
        began = dt.datetime.fromtimestamp(run.began or 0.0).strftime("%Y-%m-%d %H:%M")
        lasted = duration((run.latest if run.ended is None else run.ended) - (run.began or 0.0))
        table.append(
            (
                one_line(str(directory)),
                began,
                lasted,
                str(run.workers),
                _training(run),
                one_line(_outcome(run)),
            )
        )
    if rows:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for line in table:
            print(
                "  ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip(),
                file=out,
            )


def _training(run: Run) -> str:
    """Returns the share of a run's time in which it trained, in percent."""
    whole = sum(run.time_by_cause.values())
    return f"{run.time_by_cause.get('training', 0.0) / whole:.0%}" if whole else "-"


def _outcome(run: Run) -> str:
    if run.ended is None:
        return "runs, or its launcher was killed"
    return run.outcome
