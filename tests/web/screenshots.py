"""``python -m tests.web.screenshots``: pictures of the page, taken of a real job, for the documents.

A job of six trains, loses a worker and has one drained; light and dark.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.scheduler.processes import ROOT
from tests.waiting import wait_for
from tests.web.browser import available, browser, picture, show, whole_page, wrong_layout
from tests.web.launch import launch

TRAINING_S = 15.0
"""How long the job trains before and after it loses a worker: its plots are to show something."""

PAINTED = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
"""Calls back when the page has been painted as it is now."""

VIEWS = (("light", 1280, 1480, False), ("dark", 1280, 1480, True))


def main() -> int:
    """Takes the pictures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "docs", metavar="DIR", help="default: docs")
    options = parser.parse_args()
    if not available():
        print("screenshots: chromium, chromium-driver and selenium are needed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name, launch(Path(name), 6) as job, job.web() as page:
        time.sleep(TRAINING_S)
        os.kill(job.pid_of(3), signal.SIGKILL)
        job.muster("drain", "1", "--reason", "the host is to be serviced")
        time.sleep(TRAINING_S)
        with browser() as window:
            window.get(page.link())
            window.get(f"{page.origin}{page.place}/job?id=default")
            live = "return document.getElementById('link').textContent === 'live'"
            wait_for(lambda: window.execute_script(live))
            return _take(window, options.to)


def _take(window: Any, directory: Path) -> int:
    wrong: list[str] = []
    for name, width, height, dark in VIEWS:
        whole_page(window, width, dark=dark)
        wrong += [f"{name}: {each}" for each in wrong_layout(window)]
        show(window, width, height, dark=dark)
        window.execute_async_script(PAINTED)
        path = directory / f"web-{name}.png"
        picture(window, path)
        print(f"{path} ({path.stat().st_size / 1000:,.0f} kB)")
    for each in wrong:
        print(f"screenshots: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
