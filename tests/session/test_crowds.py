"""Strangers at the server's port, however many and however slow: a kernel that is attached goes on, and a new one attaches."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading

import pytest
from expect import each, refuses, until
from served import Served, all_of, attach, connected, kept_session

import hfsdk as hf
from hfsdk.kept import acceptor

CROWD = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
port, said = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
lines = []
for _ in range(1000):
    line = socket.create_connection(("127.0.0.1", port), timeout=60)
    try:
        line.sendall(said)
    except OSError:
        pass
    lines.append(line)
print("there", flush=True)
sys.stdin.read()
"""
"""A process with a thousand connections, each of which has said so much and waits."""


@pytest.fixture
def few_descriptors():
    """This process may open some two hundred files more than it has open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(name) for name in os.listdir("/dev/fd")) + 200, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def crowd(port, said):
    process = subprocess.Popen(
        [sys.executable, "-c", CROWD, str(port), said.hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "there\n"
        yield
    finally:
        process.communicate()


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"\x16\x03\x01"], ids=["silent", "a header", "half TLS"]
)
def test_a_thousand_half_open_connections_change_nothing(monkeypatch, few_descriptors, said):
    with kept_session(monkeypatch), Served() as server:
        session = attach(server.port)
        threads, descriptors = threading.active_count(), len(os.listdir("/dev/fd"))
        with crowd(server.port, said):
            assert threading.active_count() <= threads + 20, "none has a thread"
            assert session.roles == ()
            session.batch(x=[[1.0]])
            attach(server.port, take_over=True).detach()
            another = attach(server.port, take_over=True)
            assert len(another.batch(x=[[1.0]])) == 1
        another.detach()
        until("the end of every connection", lambda: len(os.listdir("/dev/fd")) <= descriptors)
        session.detach()
        told = [text for text in server.said if text.startswith("a connection") and acceptor.CROWDED in text]
        assert len(told) == 1, "once"


def byte_by_byte(line, said):
    """Say it until the other side has ended the connection; whether it has."""
    line.settimeout(0.01)
    for byte in said:
        try:
            line.sendall(bytes([byte]))
            if not line.recv(1):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@each(
    "said",
    [b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(10_000)],
)
def test_whoever_proves_nothing_is_ended_in_time_however_slowly_it_speaks(said, served_briefly):
    with connected(served_briefly.port) as line:
        assert byte_by_byte(line, said)
    with connected(served_briefly.port) as line:
        assert all_of(line) == b"", "and who says nothing at all"


@pytest.fixture
def served_briefly(monkeypatch):
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 0.3)
    with kept_session(monkeypatch), Served() as server:
        yield server


def test_who_has_proven_itself_has_no_deadline(served_briefly):
    session = attach(served_briefly.port)
    with connected(served_briefly.port) as line:
        all_of(line)  # a deadline has passed
    assert session.roles == ()
    assert session._link._keeper._lost_s == float("inf"), "the connection is the first one"
    session.detach()


def test_a_head_without_an_end_is_not_read_to_its_end(monkeypatch):
    with kept_session(monkeypatch), Served() as server, connected(server.port) as line:
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                line.sendall(b"X-Header: " + b"y" * 10_000 + b"\r\n")
        assert all_of(line) == b""
        until("the notice", lambda: server.said)


def test_refusals_are_told_once_and_then_with_how_many_there_were():
    now_s, said = [0.0], []
    refusals = acceptor.Refusals(said.append, lambda: now_s[0])
    for number in range(1000):
        refusals.add("one kind", f"10.0.0.{number}:1")
        refusals.rest()
    refusals.add("another kind", "10.0.0.1:1")
    assert len(said) == 2
    assert "10.0.0.0:1" in said[0]
    now_s[0] = acceptor.TELL_S
    refusals.rest()
    refusals.rest()
    assert len(said) == 3
    assert "999 more" in said[2]


def test_a_server_without_file_descriptors_accepts_again_when_there_are_some(monkeypatch):
    with kept_session(monkeypatch), Served() as server:
        session = attach(server.port)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        line = socket.socket()
        taken = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(name) for name in os.listdir("/dev/fd")) + 1, before[1]))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(line.fileno()))
            line.connect(("127.0.0.1", server.port))
            assert session.roles == ()
            with refuses(hf.OptionError, "nothing answers", "open files"):
                attach(server.port)
        finally:
            for number in taken:
                os.close(number)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            line.close()
        attach(server.port, take_over=True).detach()
        session.detach()
