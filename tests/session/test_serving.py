"""What the server of kept sessions remembers and takes: each request once, no answer longer than needed, nothing without bounds."""

import tempfile
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from expect import each, refuses
from served import NAME, Served, all_of, attach, framed, kept_session, kernels_line, prove

import hfsdk as hf
from hfsdk import serve
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.replies import Reply
from hfsdk.kept import requests as k
from hfsdk.kept import server as serving
from hfsdk.kept import tls, wire
from hfsdk.kept.attach import package_version

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
    answers, done = serving.AnsweredRequests(1), Done()
    assert [answers.once(number, 1, ACT, done).result().value for number in (1, 2, 1, 2)] == [1, 2, 1, 2]
    # one request is not answered, however many are after it
    kept = [weakref.ref(answers.once(number, 2, ACT, done)) for number in range(3, 3000)]
    assert all(answer() is not None for answer in kept)
    assert answers.once(2, 2, ACT, done).result().value == 2
    last = answers.once(3000, 3000, ACT, done)
    assert answers.once(3000, 3000, ACT, done) is last
    assert [answer() for answer in kept] == [None] * len(kept), "what has come to the kernel"


def test_what_a_forgotten_kernel_asks_again_is_told_as_unknown():
    answers, done = serving.AnsweredRequests(8), Done()
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
def session_kept(monkeypatch):
    with kept_session(monkeypatch) as keeper:
        yield keeper


@pytest.fixture
def small(monkeypatch):
    """Messages of at most this."""
    monkeypatch.setattr(wire, "MOST_BYTES", 100_000)
    return 100_000


def test_what_is_too_large_to_send_is_refused_at_the_users_line_and_nothing_else_changes(session_kept, small):
    with Served() as server:
        session = attach(server.port)
        session.seed = 4711
        with refuses(hf.OptionError, f"{small:,}", "in parts"):
            session.batch(x=[np.arange(20_000.0)])
        assert len(session.batch(x=[np.arange(10.0)])) == 1
        another = attach(server.port, read_only=True)
        assert another.seed == 4711, "what came along with the refused message was told"
        another.detach()
        session.detach()


def test_what_cannot_be_sent_takes_nothing_along(session_kept):
    with Served() as server:
        session = attach(server.port)
        session.seed = 4711
        with pytest.raises(TypeError, match="lock"):
            session._link.send(m.Forget((threading.Lock(),)))
        another = attach(server.port, read_only=True)
        assert another.seed == 4711
        another.detach()
        session.detach()


@each("address", ["hfsdk://", "hfsdk://127.0.0.1:1", "hfsdk://127.0.0.1:99999/exp7", "hfsdk://127.0.0.1:x/exp7", "hfsdk://[/exp7"])
def test_what_is_no_address_is_refused(address):
    with refuses(hf.OptionError, "hfsdk://HOST:PORT/NAME", address):
        hf.Session.attach(address, token="x" * 20)


def test_an_answer_that_is_too_large_is_an_error_of_its_question_alone(small):
    number, reply = wire.answer_of(wire.answer_bytes(7, Reply(np.arange(20_000.0))), None)
    assert number == 7
    with refuses(hf.OptionError, f"{small:,}"):
        reply.unpack()
    assert wire.answer_of(wire.answer_bytes(8, Reply(3)), None)[1].unpack() == 3


def hello(name=NAME, **more):
    return framed(wire.msgpack().encode({"client": "c", "version": package_version(), "name": name, "next": 1} | more))


@each(
    "frames, named",
    [
        ((2**31).to_bytes(4, "big"), "2,147,483,648"),  # no such message is read, and no memory taken for it
        (framed(b"no request"), "no request"),
        (framed(bytes(16) + b"\x80\x05cut"), "no request"),
    ],
)
def test_a_kernel_that_makes_no_sense_is_told_so_and_the_others_go_on(session_kept, frames, named):
    with Served() as server:
        session = attach(server.port)
        with kernels_line(server.port) as line:
            prove(line)
            line.sendall(hello() + frames)
            said = all_of(line)
        assert named.encode() in said
        assert session.roles == ()
        session.detach()
        assert [text for text in server.said if "token" in text] == [], "it has the token: the kernel is told, and nobody else"


@each(
    "first, named",
    [
        (framed(b"x" * 5000), "no kernel"),  # more than a hello may be
        (framed(b"x"), "no kernel"),
        (framed(wire.msgpack().encode([1, 2])), "no kernel"),
        (framed(wire.msgpack().encode({"version": "0", "name": NAME})), "another version"),
        (hello("none"), "there is no session"),
    ],
)
def test_a_first_word_that_is_no_kernels_ends_the_connection_with_a_reason(session_kept, first, named):
    with Served() as server, kernels_line(server.port) as line:
        prove(line)
        line.sendall(first)
        assert named.encode() in all_of(line)


def test_another_version_is_told_before_anything_is_sent(session_kept, monkeypatch):
    with Served() as server:
        this = package_version()
        monkeypatch.setattr("hfsdk.kept.attach.package_version", lambda: "99")
        with refuses(hf.SessionClosedError, this, "99", server.port, "nothing was sent"):
            attach(server.port)


def test_a_certificate_of_ones_own_serves_and_is_checked_by_authorities_where_the_address_says_so(
    session_kept, tmp_path, monkeypatch
):
    file = tmp_path / "own.pem"
    file.write_bytes(tls.own_certificate())
    with Served(certificate=str(file), key=None) as server:
        attach(server.port).detach()
        with refuses(hf.SessionClosedError, "authorities", "SSL_CERT_FILE"):
            attach(server.port, scheme="hfsdks")
    file.write_text("no certificate")
    with refuses(hf.OptionError, file, "PEM"):
        Served(certificate=str(file), key=None)


def test_no_key_of_the_server_is_left_on_disk_and_a_killed_server_leaves_one_that_nobody_can_use(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "shared").mkdir()
    load, seen = tls._load, []

    def loaded(context, certificate, *options):
        file = Path(certificate)
        seen.append((file.read_text(), file.parent.stat().st_mode & 0o777))
        assert file.is_relative_to(tmp_path / "state" / "hfsdk")
        return load(context, certificate, *options)

    monkeypatch.setattr(tls, "_load", loaded)
    with Served():
        assert list((tmp_path / "shared").iterdir()) == []
        assert list((tmp_path / "state" / "hfsdk").iterdir()) == []
    ((text, mode),) = seen
    assert mode == 0o700
    assert "BEGIN ENCRYPTED PRIVATE KEY" in text
    assert "BEGIN PRIVATE KEY" not in text


@each(
    "arguments, named",
    [
        (["--token-file", "MISSING"], ["--token-file", "no such file", "leave --token-file out", "DIR is there"]),
        (["--token-file", "DIR"], ["--token-file", "a folder", "leave --token-file out"]),
        (["--link", "--token-file", "MISSING"], ["--token-file", "no such file", "leave --token-file out"]),
        (["--token-file", "TOKEN", "--certificate", "MISSING"], ["--certificate", "no such file", "leave --certificate"]),
        (["--token-file", "TOKEN", "--certificate", "TOKEN", "--key", "MISSING"], ["--key", "no such file", "leave --certificate"]),
        (["--token-file", "TOKEN", "--key", "TOKEN"], ["--key", "--certificate FILE"]),
    ],
)
def test_a_file_that_is_not_there_is_told_with_the_option_and_what_to_do(tmp_path, capsys, arguments, named):
    token = tmp_path / "token"
    token.write_text("x" * 43)
    places = {"MISSING": str(tmp_path / "nowhere" / "file"), "DIR": str(tmp_path), "TOKEN": str(token)}
    given = [places.get(argument, argument) for argument in arguments]
    assert serve.main(["--port", "0", *given]) == 1
    told = capsys.readouterr().err
    assert "Errno" not in told
    missing = [each for each in named if each.replace("DIR", places["DIR"]) not in told]
    assert not missing, told
