"""Serves the pages over HTTP: renders them on request, and updates them while they are viewed."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from muster.certs.errors import CertificateError
from muster.scheduler.cli.client import SchedulerClient
from muster.scheduler.errors import SchedulerError
from muster.web.feed import Feed
from muster.web.guard import COOKIE, Browser, LoginLinks, browser_of
from muster.web.logs import Log
from muster.web.model import Followed
from muster.web.pages import JobPage, JobsPage, render, url
from muster.web.series import Point

ASSETS = Path(__file__).parent / "assets"
FOLLOWED = 64
"""The largest number of jobs that are followed at the same time, each with a connection and a thread."""

VIEWERS = 32
"""The largest number of browser windows that are kept up to date at the same time."""

REFRESH_S = 0.2
"""The least time between two renderings, in seconds. Even without changes, pages are rendered once a second,
because they show ages.
"""

SEND_S = 20.0
"""How long a browser may stop reading before its stream is ended, in seconds."""

FIRST_LOOK_S = 1.5
"""How long a page waits for the scheduler's first reply about a job, in seconds."""

LINGER_S = 20.0
"""How long a job is followed after its page was sent, until the browser opens its stream, in seconds."""

MAX_FORM_BYTES = 8192
MAX_REASON = 200


@dataclass
class Pages:
    """The pages' state and their dependencies.

    Attributes:
        known: the model of the scheduler.
        login_links: the browsers that have logged in.
        connect: see :data:`muster.web.feed.Connect`.
        identity: the identity of the operator's certificate, in words.
        own_ends: when that certificate ends, in seconds since 1970; None without one.
        logs: returns the logs of a job's launch on this host.
        past: returns the figures that this launch has recorded.
        origin: returns this launch's command and the directory of its logs; empty if it is not here.
        by_certificate: whether browsers log in by an operator's certificate.
        place: the path below which the pages are.
        feed: the source that keeps ``known`` up to date.
        viewers: the number of browser windows that are kept up to date.
    """

    known: Followed
    login_links: LoginLinks
    connect: Callable[[str], SchedulerClient]
    identity: str = ""
    own_ends: float | None = None
    logs: Callable[[str], list[Log]] = lambda job_id: []
    past: Callable[[str], list[Point]] = lambda job_id: []
    origin: Callable[[str], tuple[str, str]] = lambda job_id: ("", "")
    by_certificate: bool = False
    place: str = ""
    feed: Feed = field(init=False)
    viewers: int = 0
    _jobs: dict[str, JobPage] = field(default_factory=dict)
    _looking: dict[str, int] = field(default_factory=dict)
    _with_past: set[str] = field(default_factory=set)
    _all: JobsPage = field(init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _refreshed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Makes the parts that depend on the fields."""
        self.feed = Feed(self.connect, self.known, self._changed.set)
        self._all = JobsPage(self.known)

    # ------------------------------------------------------------ updates

    @contextlib.contextmanager
    def _following(self, job_id: str) -> Iterator[None]:
        if job_id:
            self._follow(job_id)
        try:
            yield
        finally:
            if job_id:
                self._leave(job_id)

    def _follow(self, job_id: str) -> None:
        if job_id not in self._jobs:
            self._jobs[job_id] = JobPage(
                self.known, job_id, self.logs(job_id), self.own_ends, self.origin(job_id)
            )
        job = self.known.jobs.get(job_id)
        if job is not None and job_id not in self._with_past:
            self._with_past.add(job_id)
            job.series.prepend(self.past(job_id))
        self._looking[job_id] = self._looking.get(job_id, 0) + 1
        self.feed.watch(job_id)

    def _leave(self, job_id: str) -> None:
        self._looking[job_id] -= 1
        if not self._looking[job_id]:
            del self._looking[job_id], self._jobs[job_id]
        self.feed.leave(job_id)

    def _page(self, job_id: str) -> JobsPage | JobPage:
        return self._jobs[job_id] if job_id else self._all

    async def keep_fresh(self) -> None:
        """Renders the viewed pages whenever something has changed, and at least once a second."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._changed.wait()
            self._changed.clear()
            now = time.time()
            if self.viewers:
                self._all.refresh(now)
                for page in list(self._jobs.values()):
                    page.refresh(now)
            refreshed, self._refreshed = self._refreshed, asyncio.Event()
            refreshed.set()
            await asyncio.sleep(REFRESH_S)

    # ------------------------------------------------------------ pages

    async def enter(self, request: Request) -> Response:
        """Logs a browser in by the link that the terminal shows."""
        cookie = self.login_links.enter(request.query_params.get("token", ""))
        if cookie is None:
            text = (
                "It was used already, or another muster web has printed it. "
                "Take the newest from the terminal: each is good once."
            )
            return HTMLResponse(render("message.html", title="This link is not good", text=text), 403)
        return self._let_in(request, cookie)

    def _let_in(self, request: Request, cookie: str) -> Response:
        first, answer = f"{self.place}/jobs", Response()
        if request.headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
            answer = RedirectResponse(first, 303)
        else:  # The link came, for example, from a file: after a redirect, the browser would send no cookie.
            html = render("message.html", title="muster web", text="Your jobs are on their way.")
            answer = HTMLResponse(html, headers={"Refresh": f"0; url={first}"})
        path = f"{self.place}/"
        secure = self.by_certificate
        answer.set_cookie(COOKIE, cookie, path=path, httponly=True, samesite="strict", secure=secure)
        return answer

    async def root(self, request: Request) -> Response:
        """Logs in a browser with an operator's certificate, and redirects it to the pages."""
        return self._let_in(request, self.login_links.open())

    async def jobs(self, request: Request) -> Response:
        """Serves the page of all jobs."""
        browser = self._browser(request)
        await self._until(lambda: bool(self.known.overview.version))
        self._all.refresh(time.time())
        return HTMLResponse(self._all.html(flash=_flash(browser)))

    async def job(self, request: Request) -> Response:
        """Serves the page of a job."""
        browser, job_id = self._browser(request), _named(request)
        if not job_id:
            raise HTTPException(404, "The address names no job.")
        if job_id not in self._jobs and len(self._jobs) >= FOLLOWED:
            raise HTTPException(503, f"{FOLLOWED} jobs are being looked at: try again in a minute.")
        self._follow(job_id)
        asyncio.get_running_loop().call_later(LINGER_S, self._leave, job_id)

        def is_known() -> bool:
            job = self.known.jobs.get(job_id)
            if job is None:
                return bool(self.known.overview.version)
            return bool(job.refusal or job.progress.roster or self.known.absent_since is not None)

        await self._until(is_known)
        page = self._jobs[job_id]
        page.refresh(time.time())
        status = 200 if job_id in self.known.jobs else 404
        return HTMLResponse(page.html(flash=_flash(browser)), status)

    async def worker(self, request: Request) -> Response:
        """Serves one worker's details, as a part of its job's page."""
        self._browser(request)
        job_id = _named(request)
        html = JobPage(self.known, job_id).worker(request.query_params.get("node", ""))
        return HTMLResponse(html, 200 if html else 404)

    async def _until(self, true: Callable[[], bool]) -> None:
        """Waits until a condition is true, at most ``FIRST_LOOK_S``."""
        deadline = time.monotonic() + FIRST_LOOK_S
        while not true() and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self._changed.wait()

    def _browser(self, request: Request) -> Browser:
        try:
            return browser_of(request.scope)
        except PermissionError:  # Admitted by certificate, but with a cookie of an earlier process.
            raise HTTPException(303, headers={"Location": "/"}) from None

    # ------------------------------------------------------------ actions

    async def drain(self, request: Request) -> Response:
        """Serves the page that asks whether to drain a worker."""
        node = request.query_params.get("node", "")
        return self._confirm(
            request,
            title=f"Drain node {node}?",
            text="It finishes its step, hands over what the others need, and leaves. The others go on "
            "without it, if they are enough; else the job waits for a replacement.",
            action="drain",
            button="Drain it",
            node=node,
        )

    async def end(self, request: Request) -> Response:
        """Serves the page that asks whether to end a job."""
        return self._confirm(
            request,
            title=f"End job {_named(request)}?",
            text="All its workers learn that the job is over and end with an error. They write no "
            "checkpoint first: training can be taken up from the last one only.",
            action="end",
            button="End the job",
        )

    def _confirm(self, request: Request, *, node: str = "", **values: str) -> Response:
        browser = self._browser(request)
        reason = "through muster web"
        job_id, identity = _named(request), self.identity
        html = render(
            "confirm.html",
            csrf_token=browser.csrf_token,
            job_id=job_id,
            node=node,
            reason=reason,
            identity=identity or "none: the scheduler runs without TLS",
            **values,
        )
        return HTMLResponse(html)

    async def do_drain(self, request: Request) -> Response:
        """Drains a worker."""
        form = await self._form(request)
        node, reason = form.get("node", ""), form.get("reason", "")
        return await self._act(request, form, lambda client: client.drain(node, reason))

    async def do_end(self, request: Request) -> Response:
        """Ends a job."""
        form = await self._form(request)
        return await self._act(request, form, lambda client: client.end_job(form.get("reason", "")))

    async def _form(self, request: Request) -> dict[str, str]:
        browser, body = self._browser(request), b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_FORM_BYTES:
                raise HTTPException(413, "The form is too large.")
        text = body.decode("utf-8", errors="replace")
        form = {name: values[0] for name, values in parse_qs(text, max_num_fields=16).items()}
        if not hmac.compare_digest(form.get("csrf_token", "").encode(), browser.csrf_token.encode()):
            raise HTTPException(403, "The form is not one of this browser's: load the page again.")
        form["reason"] = form.get("reason", "")[:MAX_REASON] or "through muster web"
        return form

    async def _act(
        self, request: Request, form: dict[str, str], act: Callable[[SchedulerClient], str]
    ) -> Response:
        browser, job_id = self._browser(request), form.get("id", "")

        def do() -> str:
            with self.connect(job_id) as client:
                return act(client)

        try:
            browser.flash = await asyncio.get_running_loop().run_in_executor(None, do)
        except (SchedulerError, CertificateError) as error:
            browser.flash = f"Not done: {error}"
        return RedirectResponse(f"{self.place}/{url('job', id=job_id)}", 303)

    # ------------------------------------------------------------ server-sent events

    async def events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams the parts of a page that have changed as server-sent events, while the browser listens."""
        request = Request(scope)
        job_id = request.query_params.get("id", "")
        if self.viewers >= VIEWERS or (job_id not in self._jobs and len(self._jobs) >= FOLLOWED):
            text = f"{VIEWERS} windows are open already: close one."
            await PlainTextResponse(text, 503)(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        self.viewers += 1
        gone = asyncio.ensure_future(_gone(receive))
        try:
            with self._following(job_id):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                async for text in self._news(job_id, gone):
                    async with asyncio.timeout(SEND_S):
                        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        except (TimeoutError, OSError):
            pass  # The browser does not read, or has gone.
        finally:
            self.viewers -= 1
            gone.cancel()

    async def _news(self, job_id: str, gone: asyncio.Future[None]) -> AsyncIterator[str]:
        seen, quiet_s = 0, 0.0
        page = self._page(job_id)
        page.refresh(time.time())
        while not gone.done():
            refreshed = self._refreshed
            data = page.live.since(seen)
            seen = page.live.number
            if data:
                quiet_s = 0.0
                yield f"data: {data}\n\n"
            elif quiet_s >= 10:
                quiet_s = 0.0
                yield ": still here\n\n"
            news, began = asyncio.ensure_future(refreshed.wait()), time.monotonic()
            waits: set[asyncio.Future[Any]] = {news, gone}
            await asyncio.wait(waits, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            quiet_s += time.monotonic() - began

    # ------------------------------------------------------------ the application

    def app(self) -> Starlette:
        """Returns the pages as an application below :attr:`place`; a :class:`Guard` must check requests."""
        pages: list[Route | Mount] = [
            Route("/enter", self.enter),
            Route("/jobs", self.jobs),
            Route("/job", self.job),
            Route("/worker", self.worker),
            Route("/events", _Streamed(self.events)),
            Route("/drain", self.drain, methods=["GET"]),
            Route("/drain", self.do_drain, methods=["POST"]),
            Route("/end", self.end, methods=["GET"]),
            Route("/end", self.do_end, methods=["POST"]),
            Mount("/assets", StaticFiles(directory=ASSETS)),
        ]
        return Starlette(
            routes=[Route("/", self.root), Mount(self.place, routes=pages)],
            exception_handlers={HTTPException: _refused},
        )


class _Streamed:
    """A route's endpoint that is itself an ASGI application."""

    def __init__(self, call: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the application."""
        await self._call(scope, receive, send)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 303:
        return RedirectResponse("/", 303)
    title = "There is no such page" if error.status_code == 404 else "Refused"
    html = render("message.html", title=title, text=error.detail)
    return HTMLResponse(html, error.status_code)


def _named(request: Request) -> str:
    return request.query_params.get("id", "")


def _flash(browser: Browser) -> str:
    flash, browser.flash = browser.flash, ""
    return flash
