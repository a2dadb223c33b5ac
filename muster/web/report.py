"""``muster report``: writes one self-contained HTML file about a run."""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from muster.version import how_to_install
from muster.wire.files import beside
from muster.wire.launches import LATEST, RUNS
from muster.wire.log_lines import one_line

ASSETS = Path(__file__).parent / "assets"
POLICY = "default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
LOG_LINES = 60
SENTENCES = 400
ENDS, BARS, HOSTS = 32, 500, 64
"""The largest numbers of log ends, generations and hosts that are shown."""


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    made = argparse.ArgumentParser(
        prog="muster report",
        description="Writes one HTML file about a run, running or finished, from what muster run has kept in "
        "the run's directory: how it ended, faults, generations, plots, what was said, the ends of the logs. "
        "With --list it lists the runs that there are instead.",
    )
    made.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help=f"the run's directory (default: {RUNS / LATEST}); with --list, one with several ({RUNS})",
    )
    made.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in that directory")
    made.add_argument("--list", action="store_true", help="list the runs: when, how long, how they ended")
    made.add_argument("--json", action="store_true", help="with --list: print JSON instead of a table")
    return made


def main(argv: Sequence[str]) -> int:
    """Writes the file and says where; returns the exit code."""
    made = parser()
    options = made.parse_args(list(argv))
    if options.json and not options.list:
        made.error("--json goes with --list")
    if options.list and options.output:
        made.error("--output is for a report, not for --list")
    if options.list:
        return _list(options.directory or RUNS, as_json=options.json)
    options.directory = options.directory or RUNS / LATEST
    try:
        import jinja2  # noqa: F401
    except ModuleNotFoundError:
        print(f"muster: muster report needs an extra. {how_to_install('web')}.", file=sys.stderr)
        return 1
    target = options.output or options.directory / "report.html"
    try:
        html = page(options.directory)
        if html is None:
            print(
                f"muster: '{_shown(options.directory)}' holds no record of a run. Name a directory that "
                "muster run has made, such as one in muster-runs.",
                file=sys.stderr,
            )
            return 1
    except OSError as error:
        remedy = (
            "" if options.directory.is_dir() else " Name one that muster run has made, as muster-runs/latest."
        )
        where = _shown(error.filename or options.directory)
        print(f"muster: '{where}': {error.strerror}.{remedy}", file=sys.stderr)
        return 1
    try:
        _write(target, html)
    except OSError as error:
        print(
            f"muster: '{_shown(target)}' cannot be written: {error.strerror}; name another with --output.",
            file=sys.stderr,
        )
        return 1
    print(f"{_shown(target)} ({len(html.encode()) / 1000:,.0f} kB)")
    return 0


def _list(folder: Path, *, as_json: bool) -> int:
    from muster.web.run_list import runs_in, show

    try:
        rows, text = list(runs_in(folder)), "holds no run."
    except OSError as error:
        rows, text = [], f"cannot be read: {error.strerror}."
    if rows:
        show(rows, sys.stdout, json_wanted=as_json)
        return 0
    print(
        f"muster: '{_shown(folder)}' {text} Name a directory with those of runs, such as the muster-runs that"
        " muster run makes where it is started.",
        file=sys.stderr,
    )
    return 1


def page(directory: Path) -> str | None:
    """Returns the report of a run as HTML; None if the directory has no record of a run.

    Raises:
        OSError: the directory cannot be read.
    """
    from muster.web.incidents import hangs_of
    from muster.web.logs import logs_of, tail
    from muster.web.pages import render
    from muster.web.past import load
    from muster.web.plots import bars, plots, shares

    run = load(directory)
    if run.began is None:
        return None
    faults, hosts = run.faults, list(dict.fromkeys(run.hosts))
    style = (ASSETS / "style.css").read_text()
    until = run.ended if run.ended is not None else run.latest
    return render(
        "report.html",
        run=run,
        style=style,
        policy=POLICY.format(digest=_digest(style)),
        until=until,
        written=time.time(),
        directory=_shown(directory.resolve()),
        hosts=hosts,
        shown_hosts=hosts[:HOSTS],
        faults=faults[-SENTENCES:],
        more_faults=max(0, len(faults) - SENTENCES),
        ends=run.ends[-ENDS:],
        plots=plots(run.series, run.generations),
        shares=shares(run.time_by_cause),
        bars=bars(run.generations[-BARS:], until),
        said=run.said[-SENTENCES:],
        scheduler_said=run.scheduler_said[-SENTENCES:],
        hangs=hangs_of(directory),
        logs=[(log.name, tail(log, LOG_LINES)) for log in logs_of(directory)],
    )


def _shown(path: object) -> str:
    """Returns a path as one printable line, because other users may have chosen its characters."""
    return one_line(str(path))


def _digest(style: str) -> str:
    return base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()


def _write(target: Path, html: str) -> None:
    """Writes the file atomically; only its owner can read it, as is the case for the logs that it shows."""
    part = beside(target)
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:  # By name, it could be a link by now.
            out.write(html)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
