"""What the server of kept sessions remembers: each request once, answers no longer than needed, no keeper that has ended."""

import socket
import threading
import weakref
from concurrent.futures import Future

import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.replies import Reply
from hfsdk.session import keeper_requests as k
from hfsdk.session import serving

ACT, LOOK = k.Ask(1, m.Release((1,))), k.Ask(1, q.StateOf(3))


class Done:
    """Counts what is done."""

    def __init__(self):
        self.num = 0

    def __call__(self):
        self.num += 1
        done = Future()
        done.set_result(Reply(self.num))
        return done


def test_asked_again_is_not_done_again_and_what_has_come_is_forgotten():
    answers, done = serving.Answers(1), Done()
    assert [answers.once(number, 1, ACT, done).result().value for number in (1, 2, 1, 2)] == [1, 2, 1, 2]
    # one request is not answered, however many are after it
    kept = [weakref.ref(answers.once(number, 2, ACT, done)) for number in range(3, 3000)]
    assert all(answer() is not None for answer in kept)
    assert answers.once(2, 2, ACT, done).result().value == 2
    last = answers.once(3000, 3000, ACT, done)
    assert answers.once(3000, 3000, ACT, done) is last
    assert [answer() for answer in kept] == [None] * len(kept), "what has come to the kernel"


def test_what_a_forgotten_kernel_asks_again_is_told_as_unknown():
    answers, done = serving.Answers(8), Done()
    assert "not known whether it was done" in str(answers.once(7, 7, ACT, done).result().errors[0])
    assert answers.once(6, 6, LOOK, done).result().value == 1
    assert answers.once(8, 8, ACT, done).result().value == 2


def test_the_server_has_done_with_a_keeper_that_has_ended(monkeypatch):
    class Keeper:
        alive = True

        def lives(self):
            return self.alive

    first, left = Keeper(), []
    there = [first]
    monkeypatch.setattr(serving, "keeper_of", lambda name, address: there[0])
    monkeypatch.setattr(serving, "done_with", left.append)
    keepers = serving.Keepers(None)
    assert keepers.enter("a") is first
    first.alive, there[0] = False, None
    assert keepers.enter("a") is None
    assert left == [first], "or its Ray would be used for ever"
    keepers.leave("a")
    keepers.rest(0.0)
    assert left == [first]


@pytest.fixture
def server():
    """A server of kept sessions without Ray, on a port of its own."""
    pytest.importorskip("websockets")
    server = serving.Server(serving.ServeOptions(port=0, token="0123456789abcdef"))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.close()
    thread.join(60)


def status_and_text(server, lines):
    """Send a request's lines and return what the server answers before it ends the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall("\r\n".join((*lines, "", "")).encode())
        with connection.makefile("rb") as answer:
            status, *_, text = answer.read().decode().split("\r\n")
    return status.split(" ")[1], text


KERNEL = ("Host: localhost", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
          "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==")  # fmt: skip
BROWSER = ("Host: localhost", "Connection: close")


@each(
    "path, headers",
    [
        ("/exp7", KERNEL),
        ("/exp7", (*KERNEL, "Authorization: Bearer 0123456789abcdeF")),
        ("/exp7?token=0123456789abcdef", KERNEL),  # a page's address may be in somebody's history
        ("/", BROWSER),
        ("/?token=0123456789abcde", BROWSER),
        ("/", (*BROWSER, "Cookie: hfsdk=nothing")),
    ],
)
def test_nobody_without_the_token_gets_anything(server, path, headers):
    status, text = status_and_text(server, (f"GET {path} HTTP/1.1", *headers))
    assert status == "401"
    assert "token" in text


@each(
    "options, named",
    [
        ({"host": "0.0.0.0", "token": "0123456789abcdef"}, ["0.0.0.0", "--certificate"]),
        ({"host": "192.168.0.7", "token": "0123456789abcdef"}, ["192.168.0.7", "ssh -L"]),
        ({"token": "short"}, ["16 characters"]),
    ],
)
def test_a_server_that_would_be_open_to_others_is_not_started(options, named):
    with refuses(hf.OptionError, *named):
        serving.Server(serving.ServeOptions(port=0, **options))


@each(
    "request_line, headers",
    [
        ("GET http://[ HTTP/1.1", ()),
        ("GET /fire HTTP/1.1", ("Authorization: Bearer one", "Authorization: Bearer two")),
    ],
)
def test_a_damaged_request_is_refused_in_a_line(server, request_line, headers):
    assert status_and_text(server, (request_line, *KERNEL, *headers)) == ("400", "what came is no request\n")
