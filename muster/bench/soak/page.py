"""Runs ``muster web`` beside the soak's job, with a viewer."""

from __future__ import annotations

import contextlib
import http.client
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from muster.bench.launches import MUSTER

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 10.0
_LINK = re.compile(r"(?:is on|another browser:) (http://\S+)")


class Page:
    """A running ``muster web`` and its viewer.

    Args:
        env: the environment variables by which it finds the scheduler.
        log: the file for its output.

    Attributes:
        pid: its process id.
        port: the port on which it listens.
        seen: the number of times that the viewer got the page of all jobs.
        missed: the number of times that it did not.
    """

    def __init__(self, env: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [*MUSTER, "web"], env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self.pid = self._process.pid
        self.seen = self.missed = 0
        link = urlsplit(self._link(log))
        self.port = link.port or 80
        self._host = link.netloc
        self._place = link.path.rpartition("/")[0]
        self._cookie = ""
        self._cookie = self._ask(f"{link.path}?{link.query}")[1].partition(";")[0]

    def _link(self, log: Path) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (found := _LINK.search(log.read_text(errors="replace"))):
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.close()
                raise RuntimeError(f"muster web did not start: {log.read_text(errors='replace')[-1000:]}")
            time.sleep(0.05)
        return found[1]

    def look(self) -> None:
        """Requests the page of all jobs as its viewer, and counts the outcome."""
        status = 0
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, _ = self._ask(f"{self._place}/jobs")
        if status == 200:
            self.seen += 1
        else:
            self.missed += 1

    def _ask(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_TIMEOUT_S)
        try:
            headers = {"Host": self._host} | ({"Cookie": self._cookie} if self._cookie else {})
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.getheader("set-cookie", "")
        finally:
            connection.close()

    @property
    def ended(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """Kills the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
