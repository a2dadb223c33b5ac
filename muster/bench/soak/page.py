"""``muster web`` beside the soak's job, and somebody who looks at it."""

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
        env: how the page reaches the scheduler.
        log: where its output goes.

    Attributes:
        pid: of the page's process.
        port: where it listens.
        seen: how often the viewer got the jobs page.
        missed: how often not.
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
        """Asks for the jobs page, as its viewer."""
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
        """The exit code, once there is one."""
        return self._process.poll()

    def close(self) -> None:
        """Kills it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
