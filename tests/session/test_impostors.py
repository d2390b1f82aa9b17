"""Who listens where a server was, or between it and a kernel, learns nothing that can be used, and changes nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import warnings

import pytest
from expect import refuses, until
from served import (
    NAME,
    TOKEN,
    WAIT_S,
    Impostor,
    Served,
    answers_as_http,
    attach,
    connected,
    echoes,
    exactly,
    guesses,
    kept_session,
    kernels_line,
    listen,
    passes_on,
    plays_back,
)

import hfsdk as hf
from hfsdk.kept import wire


@pytest.fixture
def session_kept(monkeypatch):
    with kept_session(monkeypatch) as keeper:
        yield keeper


def told_to(impostor):
    """What it was told, by each connection that said something."""
    return [bytes(heard) for heard in impostor.heard if heard]


def shown_to_a_stranger(port):
    """What the true server says to whoever asks."""
    with kernels_line(port) as line:
        line.sendall(bytes(wire.NONCE_BYTES))
        return exactly(line, wire.NONCE_BYTES + wire.PROOF_BYTES)


@pytest.mark.parametrize("attack", ["http", "guesses", "echoes", "plays back", "passes on"])
def test_who_took_the_servers_port_gets_nothing_and_the_kernel_goes_on(session_kept, attack):
    with Served() as elsewhere, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        server = Served()
        port = server.port
        session = attach(port)
        actor = session.actor("qwen2.5-0.5b", optimizer=hf.AdamW(lr=1e-5))
        session.place("colocate")
        speak = {
            "http": answers_as_http, "guesses": guesses, "echoes": echoes, "plays back": plays_back(shown_to_a_stranger(port)),
            "passes on": passes_on(elsewhere.port),
        }[attack]  # fmt: skip
        server.close()
        with Impostor(port, speak) as impostor:
            until("several tries of the kernel", lambda: len(told_to(impostor)) > 3)
            with refuses(hf.SessionClosedError, f"hfsdk://127.0.0.1:{port}", "does not"):
                attach(port, take_over=True)
        with Served(port):
            assert len(actor.generate([[1, 2, 3]] * 4, max_new_tokens=4)) == 4
            session.detach()
    for heard in impostor.heard:
        assert TOKEN.encode() not in heard
        assert attack == "http" or len(heard) <= wire.NONCE_BYTES, "nothing but a nonce, which is new each time"
    assert len(set(told_to(impostor))) == len(told_to(impostor))
    texts = [str(one.message) for one in told if str(one.message).startswith("what answers at")]
    assert len(texts) == 1, "told once"
    assert f"hfsdk://127.0.0.1:{port}/{NAME}" in texts[0]


def test_who_says_nothing_at_the_servers_port_gets_nothing(session_kept, monkeypatch):
    monkeypatch.setattr("hfsdk.kept.remote_session.CONNECT_S", 0.3)
    server = Served()
    session = attach(server.port)
    server.close()
    with Impostor(server.port, listen) as impostor:
        until("several tries of the kernel", lambda: len(told_to(impostor)) > 2)
        with refuses(hf.OptionError, "nothing answers", server.port):
            attach(server.port)
    with Served(server.port):
        assert session.roles == ()
        session.detach()
    assert all(TOKEN.encode() not in heard for heard in impostor.heard)


def test_what_ends_each_connection_at_once_is_told():
    """The server of an older hfsdk, or a tunnel to nowhere."""
    with Impostor(0, lambda line, heard: None) as impostor:
        with refuses(hf.OptionError, impostor.port, "ends each connection", "older hfsdk"):
            attach(impostor.port)
        assert len(impostor.heard) > 1, "it is tried again: the true server may have been crowded"


class Between:
    """Passes a kernel's connection on as it is, notes it, and may change a byte of what comes back."""

    def __init__(self, port):
        self.passed, self.spoil, self.num = bytearray(), threading.Event(), 0
        self._port, self._lines = port, []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                there = connected(self._port)
                self._lines += [line, there]
                self.num += 1
                for pair in ((line, there, False), (there, line, True)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=pair, daemon=True))
                    self._threads[-1].start()

    def _pass_on(self, source, target, back):
        with contextlib.suppress(OSError):
            while part := source.recv(2**16):
                self.passed += part
                if back and self.spoil.is_set():
                    self.spoil.clear()
                    part = part[:-1] + bytes([part[-1] ^ 1])
                target.sendall(part)
        for line in (source, target):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def close(self):
        for line in (self._listener, *self._lines):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        for line in (*self._lines, self._listener):
            line.close()


def test_who_passes_all_on_reads_nothing_and_a_changed_byte_ends_the_connection(session_kept):
    with Served() as server, contextlib.closing(Between(server.port)) as between:
        session = attach(between.port)
        session.actor("qwen2.5-0.5b", optimizer=hf.AdamW(lr=1e-5))
        before = between.num
        between.spoil.set()
        until("another connection", lambda: between.num > before)
        assert len(session.roles) == 1
        assert session.models.actor.spec.name
        session.detach()
    for text in (TOKEN, NAME, "qwen2", "hfsdk.session", "version"):
        assert text.encode() not in between.passed, text


def test_the_proofs_of_both_sides_and_of_each_connection_differ(session_kept):
    nonces, certificate = bytes(64), bytes(32)
    made = {
        wire.proof(token, role, nonces, shown)
        for token in (TOKEN, TOKEN + "x") for role in ("server", "kernel") for shown in (certificate, bytes([1]) * 32)
    }  # fmt: skip
    assert len(made) == 8
    with Served() as server, Served() as other:
        shown = [shown_to_a_stranger(port) for port in (server.port, server.port, other.port)]
    assert len(set(shown)) == 3, "though the kernel's nonce is the same"
