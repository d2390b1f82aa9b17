"""Access to the pages of a server: a link that the server made opens one, once, for as long as the page is looked at.

::

    GET /exp7?link=CODE        a link is good once, for ten minutes       ->  a cookie, and on to the page
    GET /FOLDER/exp7           FOLDER is drawn at the server's start      ->  the page, and the cookie anew, for ten minutes more

A browser sends its cookies to every port of a host, and to whatever listens there next. So the cookie is for ``/FOLDER/`` alone,
which nobody else at another port can name, is signed with a key of this process, and is worth nothing to another server, to the
next one at this port, or ten minutes later. Requests that come from other sites, or by a name that is not this server's (DNS
rebinding), are refused.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, quote, unquote, urlsplit

LINK_S = COOKIE_S = 600.0

VISIT_S = 12 * 3600.0
"""The seconds after which a visit ends, however often its cookie was renewed."""

MOST_LINKS = 16
"""The number of links that may wait to be opened."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")

NEW_LINK = "`python -m hfsdk.serve --link`, with the server's --port, makes a link that is good once"

HEADERS = (
    ("Cache-Control", "no-store"), ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"), ("X-Content-Type-Options", "nosniff"), ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"), ("Connection", "close"),
)  # fmt: skip

POLICY_BEGINS = '<!doctype html><html lang="en"><meta http-equiv="Content-Security-Policy" content="'
"""A page that runs scripts begins so, and says which; one that begins otherwise runs none."""

NO_SCRIPTS = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class PageRequest:
    """A browser's request."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """The headers, by their names in small letters."""

    @classmethod
    def of(cls, head: bytes) -> PageRequest:
        """Read the head of a request.

        Raises:
            ValueError: it is damaged, or says something twice.
        """
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        method, target, version = first.split(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(version)
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or not name or name.lower() in headers:
                raise ValueError(name)
            headers[name.lower()] = value.strip()
        url = urlsplit(target)
        return cls(method, unquote(url.path), {name: values[-1] for name, values in parse_qs(url.query).items()}, headers)


@dataclass(frozen=True)
class Visit:
    """The outcome of a request: a page to show, or an answer at once.

    Attributes:
        name: the name of the session whose page it is, ``""`` for the list; ``None``: what follows is the answer.
        text: HTML, or a refusal in plain text.
        cookie: the header that gives the browser a new one; ``None``: it was not let in.
    """

    name: str | None = None
    status: HTTPStatus = HTTPStatus.OK
    text: str = ""
    cookie: str | None = None


def refused(status: HTTPStatus, text: str) -> Visit:
    """Return the answer to a request that is not let in."""
    return Visit(None, status, f"{text}\n")


class PageAccess:
    """The links and cookies of a server's pages: a link opens them once, and a cookie as long as somebody looks.

    Args:
        port: the port on which the server listens.
        encrypted: whether it is reached by TLS alone, with a certificate that says its name; else on this machine's loopback.
        now: seconds.
    """

    def __init__(self, port: int, *, encrypted: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._encrypted, self._now = encrypted, now
        self._cookie_name, self._folder = f"hfsdk-{port}", secrets.token_urlsafe(16)
        self._key = secrets.token_bytes(32)
        self._links: dict[str, float] = {}

    def link(self, name: str = "") -> str:
        """Return the path of a new link to a session's page, or to the list."""
        while len(self._links) >= MOST_LINKS:
            del self._links[next(iter(self._links))]
        code = secrets.token_urlsafe(16)
        self._links[code] = self._now() + LINK_S
        return f"/{quote(name)}?link={code}"

    def visit(self, request: PageRequest) -> Visit:
        """Return the outcome of a request."""
        if request.headers.get("upgrade", "").lower() == "websocket":
            return refused(HTTPStatus.UPGRADE_REQUIRED, "this server is of a later hfsdk than this kernel: use the same version")
        if request.method != "GET":
            return refused(HTTPStatus.METHOD_NOT_ALLOWED, "pages are only looked at (GET)")
        if self._is_anothers(request):
            return refused(HTTPStatus.FORBIDDEN, "this comes from another site, or by a name that is not this server's")
        if "link" in request.query:
            return self._enter(request)
        begun_s = self._begin_of(request.headers.get("cookie", ""))
        if not request.path.startswith(f"/{self._folder}/") or begun_s is None:
            never = "the token does not belong into an address; " if "token" in request.query else ""
            return refused(HTTPStatus.UNAUTHORIZED, f"{never}{NEW_LINK}")
        name = request.path.removeprefix(f"/{self._folder}/")
        if "/" in name:
            return refused(HTTPStatus.NOT_FOUND, "there is no such page")
        return Visit(name, cookie=self._cookie(begun_s))

    def _is_anothers(self, request: PageRequest) -> bool:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        site = request.headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") and "link" not in request.query:  # a link may be in a mail
            return True
        try:
            trusted = self._encrypted or urlsplit(f"//{host}").hostname in LOOPBACK
            return not trusted or (origin is not None and urlsplit(origin).netloc != host)
        except ValueError:
            return True

    def _enter(self, request: PageRequest) -> Visit:
        until = self._links.pop(request.query["link"], 0.0)
        if self._now() >= until:
            return refused(HTTPStatus.UNAUTHORIZED, f"this link was opened before, is too old, or another server's; {NEW_LINK}")
        page = f"/{self._folder}/{quote(request.path.strip('/'))}"
        # not a redirect: a browser that comes from another site would follow it without the cookie
        head = f'<!doctype html><link rel="icon" href="data:,"><meta http-equiv="refresh" content="0;url={page}">'
        return Visit(text=f'{head}<a href="{page}">the page</a>\n', cookie=self._cookie(self._now()))

    # -- the cookie

    def _cookie(self, begun_s: float) -> str:
        """Return the header that gives a browser a new cookie, for a visit that began at a time."""
        age_s = max(0.0, min(COOKIE_S, begun_s + VISIT_S - self._now()))
        times = f"{begun_s:.0f}.{self._now() + age_s:.0f}"
        secure = "; Secure" if self._encrypted else ""
        value = f"{times}.{self._signed(times)}"
        return f"{self._cookie_name}={value}; Path=/{self._folder}/; Max-Age={age_s:.0f}; HttpOnly; SameSite=Strict{secure}"

    def _signed(self, times: str) -> str:
        return hmac.digest(self._key, times.encode(), "sha256").hex()

    def _begin_of(self, cookies: str) -> float | None:
        """Return when the visit of a cookie began; ``None`` where it is none of this server's, or too old."""
        try:
            cookie = SimpleCookie(cookies).get(self._cookie_name)
        except CookieError:
            return None
        times, _, signed = ("" if cookie is None else cookie.value).rpartition(".")
        # no visit is stored: a cookie carries its times, and the signature says that they are this server's
        if not hmac.compare_digest(signed.encode(), self._signed(times).encode()):
            return None
        begun, _, until = times.partition(".")
        return float(begun) if float(until) > self._now() else None


def response(status: HTTPStatus, text: str, cookie: str | None) -> bytes:
    """Return an answer as it is sent."""
    body = text.encode()
    kind = "text/html; charset=utf-8" if text.startswith("<") else "text/plain; charset=utf-8"
    said, _, _ = text.removeprefix(POLICY_BEGINS).partition('"') if text.startswith(POLICY_BEGINS) else (NO_SCRIPTS, "", "")
    policy = ("Content-Security-Policy", f"{said}; frame-ancestors 'none'")  # which a page cannot say itself
    headers = (("Content-Type", kind), ("Content-Length", str(len(body))), policy, *HEADERS)
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers)]
    if cookie is not None:
        lines.append(f"Set-Cookie: {cookie}")
    return "\r\n".join((*lines, "", "")).encode() + body
