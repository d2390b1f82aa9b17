"""Whom the server of kept sessions answers: kernels that prove that they have its token, and browsers that come by its link."""

from __future__ import annotations

import pickle
import re
import socket
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path

import pytest
from expect import each, refuses, until
from served import TOKEN, Served, all_of, attach, connected, framed, kept_session, kernels_line, prove

import hfsdk as hf
from hfsdk.kept.attach import package_version
from hfsdk.kept.page_access import COOKIE_S, LINK_S, VISIT_S, PageAccess, PageRequest
from hfsdk.kept.remote_session import page_link
from hfsdk.kept.server import ServeOptions


@pytest.fixture
def served(monkeypatch):
    with kept_session(monkeypatch), Served() as server:
        yield server


class Marks:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def notices(served):
    return [text for text in served.said if "has not the token" in text]


@pytest.mark.parametrize("token", ["", "another-token-of-the-same-length", TOKEN[:-1], TOKEN + "x"])
def test_without_the_token_no_kernel_gets_in_and_nothing_it_says_is_read(served, tmp_path, token):
    mark = tmp_path / "loaded"
    with kernels_line(served.port) as line:
        prove(line, token)
        line.sendall(framed(b"hello") + framed(bytes(16) + pickle.dumps(Marks(mark))))
        assert all_of(line) == b""
    until("the notice", lambda: notices(served))
    assert not mark.exists()
    if token:
        with refuses(hf.SessionClosedError, served.port, "does not know this token"):
            attach(served.port, token)
    attach(served.port).detach()
    assert len(notices(served)) == 1, "once"


@each("size", [0, 1, 31, 32, 63, 64, 65, 4000])
def test_what_is_no_proof_ends_the_connection(served, size):
    with kernels_line(served.port) as line:
        line.sendall(bytes(size))
        socket.socket.shutdown(line, socket.SHUT_WR)  # beneath TLS
        assert len(all_of(line)) in (0, 64), "a nonce and a hash, or nothing"


@each("options, named", [({"token": "short"}, ["16", "5"]), ({"token": ""}, ["16"])])
def test_a_token_that_could_be_guessed_is_refused(options, named):
    with refuses(hf.OptionError, *named):
        ServeOptions(**options).check()


# -- browsers


def asked(port, path, **headers):
    """What a browser gets: (status, text, headers)."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


def entered(port, link):
    """Open a link as a browser does; return the page it leads to and the cookie."""
    status, text, headers = asked(port, link)
    assert status == 200
    return re.search('url=([^"]+)"', text).group(1), headers["Set-Cookie"].partition(";")[0]


def test_a_link_is_good_once_and_its_cookie_shows_the_pages(served, monkeypatch):
    shown = []
    monkeypatch.setattr(served.server._pages, "page", lambda name: shown.append(name) or (HTTPStatus.OK, f"<p>{name}</p>"))
    link = page_link(f"hfsdk://127.0.0.1:{served.port}/exp7", TOKEN, package_version())
    path = link.removeprefix(f"http://127.0.0.1:{served.port}")
    page, cookie = entered(served.port, path)
    status, text, headers = asked(served.port, page, Cookie=cookie)
    assert (status, text, shown) == (200, "<p>exp7</p>", ["exp7"])
    for attribute in ("HttpOnly", "SameSite=Strict", f"Path={page.rpartition('/')[0]}/", f"Max-Age={COOKIE_S:.0f}"):
        assert attribute in headers["Set-Cookie"], attribute
    assert f"hfsdk-{served.port}=" in headers["Set-Cookie"]
    rules = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    for rule in ("default-src", "frame-ancestors", "base-uri", "form-action"):
        assert rules[rule] == "'none'", rule
    assert "script-src" not in rules, "a page runs the scripts that it says, and this one has none"
    assert headers["Cross-Origin-Opener-Policy"] == headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert asked(served.port, path)[0] == 401, "the link was opened before"
    assert asked(served.port, page)[0] == 401, "without the cookie"
    assert asked(served.port, "/exp7", Cookie=cookie)[0] == 401, "the cookie is of the folder alone"
    assert shown == ["exp7"]


@each(
    "path, headers",
    [
        ("/", {}),
        ("/exp7", {}),
        (f"/exp7?token={TOKEN}", {}),
        ("/exp7", {"Authorization": f"Bearer {TOKEN}"}),
        ("/?link=x", {}),
        ("/", {"Cookie": f"hfsdk={TOKEN}"}),
    ],
)
def test_no_browser_gets_in_without_a_link_and_the_token_is_of_no_use_there(served, path, headers):
    status, text, answered = asked(served.port, path, **headers)
    assert status == 401
    assert "--link" in text
    assert "Set-Cookie" not in answered


def test_what_a_browser_shows_an_impostor_is_worth_nothing_to_any_other_server(served):
    """It has the address and the cookie of a page of the server that was at this port before."""
    with Served() as other:
        page, cookie = entered(other.port, other.server.page_link("exp7"))
        port = other.port
    with Served(port) as again:
        value = cookie.partition("=")[2]
        folder = again.server._access._folder
        for server in (again, served):
            for path in (page, f"/{server.server._access._folder}/exp7"):
                assert asked(server.port, path, Cookie=f"{cookie}; hfsdk-{server.port}={value}")[0] == 401
        assert folder not in page


def request(path, host="127.0.0.1:8267", method="GET", **headers):
    lines = [f"{method} {path} HTTP/1.1", *([f"Host: {host}"] if host else []), *(f"{k}: {v}" for k, v in headers.items())]
    return PageRequest.of("\r\n".join((*lines, "", "")).encode())


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def visited(access):
    """Enter by a link: (the page's path, the cookie)."""
    visit = access.visit(request(access.link("exp7")))
    return re.search('url=([^"]+)"', visit.text).group(1), visit.cookie.partition(";")[0]


def test_links_and_cookies_end_and_a_cookie_that_is_used_is_renewed():
    clock = Clock()
    access = PageAccess(8267, encrypted=False, now=clock)
    late = access.link()
    page, cookie = visited(access)
    clock.now_s += LINK_S
    assert access.visit(request(late)).cookie is None
    clock.now_s += COOKIE_S - LINK_S - 1
    visit = access.visit(request(page, Cookie=cookie))
    assert visit.name == "exp7"
    renewed = visit.cookie.partition(";")[0]
    clock.now_s += 2
    assert access.visit(request(page, Cookie=cookie)).cookie is None
    assert access.visit(request(page, Cookie=renewed)).cookie is not None


def test_a_visit_ends_however_often_its_cookie_is_renewed():
    clock = Clock()
    access = PageAccess(8267, encrypted=False, now=clock)
    page, cookie = visited(access)
    end_s = clock.now_s + VISIT_S
    while (visit := access.visit(request(page, Cookie=cookie))).cookie is not None:
        cookie = visit.cookie.partition(";")[0]
        clock.now_s += COOKIE_S / 2
        assert clock.now_s <= end_s + COOKIE_S
    assert clock.now_s >= end_s


@each(
    "changed",
    [
        {"host": "evil.example:8267"},  # DNS rebinding: the name of another, which leads here
        {"host": ""},
        {"host": "["},
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},  # another port of this host
        {"method": "POST"},
    ],
)
def test_what_comes_from_another_site_or_by_another_name_is_refused(changed):
    access = PageAccess(8267, encrypted=False)
    page, cookie = visited(access)
    assert access.visit(request(page, Cookie=cookie)).cookie is not None
    assert access.visit(request(page, Cookie=cookie, **changed)).cookie is None


@each("cookie", ["hfsdk-8267=", "hfsdk-8267=9e9.", "hfsdk-8267=0.inf.00", "hfsdk-8267=\xe9.\xe9", "hfsdk-8267", "a=b; c", "=", ""])
def test_a_cookie_that_the_server_did_not_make_is_refused(cookie):
    access = PageAccess(8267, encrypted=False)
    page, _ = visited(access)
    assert access.visit(request(page, Cookie=cookie)).cookie is None


@each(
    "said, status",
    [
        (b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: one\r\nHost: two\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        # a kernel of an earlier hfsdk
        (b"GET /exp7 HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nAuthorization: Bearer x\r\n\r\n", 426),
    ],
)
def test_what_is_no_request_of_a_page_is_refused_in_a_line(served, said, status):
    with connected(served.port) as line:
        line.sendall(said)
        assert all_of(line).startswith(f"HTTP/1.1 {status} ".encode())


def test_a_server_that_others_reach_shows_no_pages_without_a_certificate(monkeypatch):
    with kept_session(monkeypatch), Served(host="0.0.0.0") as server:
        assert asked(server.port, server.server.page_link())[0] == 403
        with refuses(hf.OptionError, "--certificate", "127.0.0.1"):
            page_link(f"hfsdk://127.0.0.1:{server.port}", TOKEN, package_version())
        attach(server.port).detach()
