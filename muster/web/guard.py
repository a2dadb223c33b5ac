"""Admits browsers to the pages: those that have logged in, on requests that come from the pages themselves.

Browsers share cookies among all ports of a host. But other servers on the host must not receive the cookie,
and their pages must not use it. So all pages are below a random path, and browsers send the cookie only to
that path.
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
    "Referrer-Policy": "same-origin",  # Without a referrer, forms would have the origin "null".
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cache-Control": "no-store",
}


@dataclass
class Browser:
    """A browser that has logged in.

    Attributes:
        csrf_token: the token that its forms must contain.
        flash: a message that its next page shows once.
    """

    csrf_token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    flash: str = ""


class LoginLinks:
    """Issues one-time login links, and knows the browsers that have used one.

    Args:
        new_link: called with the token of the next link whenever one was used.
    """

    def __init__(self, new_link: Callable[[str], None] = lambda token: None) -> None:
        self._new_link = new_link
        self._token = secrets.token_urlsafe(32)
        self._browsers: OrderedDict[str, Browser] = OrderedDict()

    @property
    def token(self) -> str:
        """The token of the valid link."""
        return self._token

    def enter(self, token: str) -> str | None:
        """Logs a browser in by a link's token; returns its new cookie, or None if the token is not valid."""
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return None
        self._token = secrets.token_urlsafe(32)
        self._new_link(self._token)
        return self.open()

    def open(self) -> str:
        """Logs in a browser that is authenticated by other means; returns its cookie."""
        while len(self._browsers) >= BROWSERS:
            self._browsers.popitem(last=False)
        cookie = secrets.token_urlsafe(32)
        self._browsers[cookie] = Browser()
        return cookie

    def browser(self, cookie: str) -> Browser | None:
        """Returns the browser with this cookie; None if there is none."""
        return self._browsers.get(cookie)


class Guard:
    """ASGI middleware that checks each request before the pages get it.

    Args:
        app: the pages, below ``place``.
        place: the pages' random path, which begins with ``/``.
        origins: the pages' origins, such as ``http://127.0.0.1:8080``.
        login_links: the browsers that have logged in.
        by_certificate: whether TLS has already admitted operators only.
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
        """Passes a request on, or answers it with a refusal."""
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if scope.get("muster.browser") is None and not self._by_certificate:
                    headers["Connection"] = "close"  # One request per connection without login.
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
    """Returns the browser's cookie; empty if there is none that can be parsed."""
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[COOKIE].value if COOKIE in cookies else ""


def browser_of(scope: MutableMapping[str, object]) -> Browser:
    """Returns the browser of a request that the guard has passed on.

    Raises:
        PermissionError: the request is not from a browser that has logged in.
    """
    browser = scope.get("muster.browser")
    if not isinstance(browser, Browser):
        raise PermissionError("no browser was let in")
    return browser
