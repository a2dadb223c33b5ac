"""Decides who may use the pages: browsers that came by a link that is good once, from our pages and address.

Cookies are shared by all ports of a host: another server here must not get ours, nor its pages use it. So
all pages lie below a path of their own that nobody can guess, and the cookie is sent there alone.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "muster"
BROWSERS = 64
MAX_URL = 4096
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with none at all, forms would come from the origin "null"
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cache-Control": "no-store",
}


@dataclass
class Browser:
    """A browser that was let in.

    Attributes:
        csrf_token: what its forms must carry.
        flash: what its next page says once.
    """

    csrf_token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    flash: str = ""


class LoginLinks:
    """Hands out links, each good once, and knows who came by one.

    Args:
        new_link: called with the token of the next link whenever one was used.
    """

    def __init__(self, new_link: Callable[[str], None] = lambda token: None) -> None:
        self._new_link = new_link
        self._token = secrets.token_urlsafe(32)
        self._browsers: OrderedDict[str, Browser] = OrderedDict()

    @property
    def token(self) -> str:
        """The token of the link that is good now."""
        return self._token

    def enter(self, token: str) -> str | None:
        """Takes a link's token; returns the browser's new cookie, None if it is not good (any more)."""
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return None
        self._token = secrets.token_urlsafe(32)
        self._new_link(self._token)
        return self.open()

    def open(self) -> str:
        """Lets a browser in that has shown by other means who it is; returns its cookie."""
        while len(self._browsers) >= BROWSERS:
            self._browsers.popitem(last=False)
        cookie = secrets.token_urlsafe(32)
        self._browsers[cookie] = Browser()
        return cookie

    def browser(self, cookie: str) -> Browser | None:
        """The browser of a cookie."""
        return self._browsers.get(cookie)


class Guard:
    """ASGI middleware before the pages, which checks each request.

    Args:
        app: the pages, below ``place``.
        place: their path, ``/`` and what nobody can guess.
        origins: where they are, as a browser says it: ``http://127.0.0.1:8080``.
        login_links: knows who was let in.
        by_certificate: TLS has already let in operators alone.
    """

    def __init__(
        self,
        app: ASGIApp,
        place: str,
        origins: Iterable[str],
        login_links: LoginLinks,
        *,
        by_certificate: bool = False,
    ) -> None:
        self._app = app
        self._place = place
        self._origins = frozenset(origins)
        self._hosts = frozenset(origin.partition("://")[2] for origin in self._origins)
        self._login_links = login_links
        self._by_certificate = by_certificate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it."""
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if scope.get("muster.browser") is None and not self._by_certificate:
                    headers["Connection"] = "close"  # strangers have one request a connection
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send_guarded)
        else:
            status, text = refusal
            await PlainTextResponse(f"{text}\n", status)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers, path, method = Headers(scope=scope), scope["path"], scope["method"]
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return 421, "This server does not answer to that name."
        if method not in ("GET", "HEAD", "POST"):
            return 405, "There is nothing of that kind here."
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_URL:
            return 414, "The address is too long."
        origins = headers.getlist("origin")
        if any(origin not in self._origins for origin in origins) or (method == "POST" and len(origins) != 1):
            return 403, "Other sites' requests are refused."
        enters = method != "POST" and path in (f"{self._place}/enter", "/")
        navigates = headers.get("sec-fetch-mode") == "navigate"
        site = headers.get("sec-fetch-site", "none")
        if site not in ("same-origin", "none") and not (enters and navigates):
            return 403, "Other sites' requests are refused."
        if not path.startswith(f"{self._place}/") and not (self._by_certificate and path == "/"):
            return 404, "Take the link that muster web prints in its terminal."
        scope["muster.browser"] = browser = self._login_links.browser(cookie_of(headers))
        if browser is None and not enters and not self._by_certificate:
            return 403, "This browser has not come by a link: take the newest that muster web has printed."
        return None


def cookie_of(headers: Headers) -> str:
    """The browser's cookie; empty: none, or none that can be read."""
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[COOKIE].value if COOKIE in cookies else ""


def browser_of(scope: MutableMapping[str, object]) -> Browser:
    """The browser of a request that the guard has let through.

    Raises:
        PermissionError: there is none.
    """
    browser = scope.get("muster.browser")
    if not isinstance(browser, Browser):
        raise PermissionError("no browser was let in")
    return browser
