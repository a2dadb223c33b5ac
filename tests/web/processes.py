"""``muster web`` as a process of its own, and what a browser would ask of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlencode, urlsplit

from tests.scheduler.processes import Scheduler, environment
from tests.waiting import LIMIT_S

_LINK = re.compile(r"(?:is on|another browser:) (https?://\S+)")


@dataclass
class Web:
    """A running ``muster web``."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    grown: threading.Condition = field(default_factory=threading.Condition)

    def follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.grown:
                self.lines.append(line)
                self.grown.notify_all()

    def link(self, number: int = 0) -> str:
        """The link that was printed as the first, second and so on."""

        def links() -> list[str]:
            return _LINK.findall("".join(self.lines))

        with self.grown:
            assert self.grown.wait_for(lambda: len(links()) > number, LIMIT_S), "".join(self.lines)
            return links()[number]

    @property
    def origin(self) -> str:
        parts = urlsplit(self.link())
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def place(self) -> str:
        return urlsplit(self.link()).path.rpartition("/")[0]


@contextlib.contextmanager
def web(running: Scheduler | None, *arguments: str, **env: str) -> Iterator[Web]:
    """Starts it for a scheduler, and kills it at the end."""
    asked = (
        {**running.env, "MS_SCHED_PORT": str(running.port), "MS_SCHED_HOST": "127.0.0.1"} if running else {}
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "muster", "web", *arguments],
        env=environment(**{**asked, **env}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    started = Web(process)
    follower = threading.Thread(target=started.follow)
    follower.start()
    try:
        yield started
    finally:
        process.kill()
        process.wait(LIMIT_S)
        follower.join(LIMIT_S)
        assert process.stdout is not None
        process.stdout.close()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Visitor:
    """A browser's requests, one by one, with the headers that it would send or that the test wants."""

    web: Web
    cookie: str = ""

    def ask(self, page: str, *, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        """Asks for a page below the place, or for any path that begins with a slash."""
        parts = urlsplit(self.web.origin)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=LIMIT_S)
        sent = {"Host": parts.netloc, "Cookie": self.cookie}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        path = page if page.startswith("/") else f"{self.web.place}/{page}"
        try:
            connection.putrequest(method, path, skip_host=True)
            data = (body or "").encode()
            if body is not None:
                sent |= {
                    "Content-Type": "application/x-www-form-urlencoded",
                    "Content-Length": str(len(data)),
                }
            for name, value in sent.items():
                if value:
                    connection.putheader(name, value)
            connection.endheaders(data or None)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read().decode())
        finally:
            connection.close()

    def enter(self, link: str) -> Answer:
        parts = urlsplit(link)
        answer = self.ask(f"{parts.path}?{parts.query}")
        self.cookie = answer.headers.get("set-cookie", "").partition(";")[0]
        return answer

    def post(self, page: str, *, origin: str | None = None, **form: str) -> Answer:
        more = {} if origin == "" else {"Origin": origin or self.web.origin}
        return self.ask(page, method="POST", body=urlencode(form), **more)

    def csrf_token(self, page: str) -> str:
        """What the form on a page carries."""
        found = re.search(r'name="csrf_token" value="([^"]+)"', self.ask(page).text)
        assert found is not None
        return found[1]

    def events(self, page: str, until: Callable[[dict[str, str]], object]) -> dict[str, str]:
        """Reads a page's stream until its parts, all together, are as wanted."""
        parts = urlsplit(self.web.origin)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=LIMIT_S)
        connection.request("GET", f"{self.web.place}/{page}", headers={"Cookie": self.cookie})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        known: dict[str, str] = {}
        try:
            while not until(known):
                line = answer.readline().decode()
                assert line, "the stream ended"
                if line.startswith("data: "):
                    news = json.loads(line.removeprefix("data: "))
                    known |= news["parts"]
                    known |= {cell[0]: cell[3] for cell in news["cells"]}
        finally:
            connection.close()
        return known
