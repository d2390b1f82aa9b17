"""A server of kept sessions in this process, over a simulated session; and those who come to it, or take its place, uninvited."""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import tempfile
import threading
from pathlib import Path

import hfsdk as hf
from hfsdk.kept import requests as k
from hfsdk.kept import server, tls, wire
from hfsdk.kept import session_actor as keepers
from hfsdk.kept.attach import package_version
from hfsdk.session.start import as_started, start_simulated

TOKEN = "a-token-of-thirty-two-characters"
NAME = "exp7"
WAIT_S = 60.0


class Near:
    """A keeper in this process, as the server asks it."""

    def __init__(self, keeper):
        self.ask = keeper.answer

    def lives(self):
        return True

    def leave(self):
        pass


@contextlib.contextmanager
def kept_session(monkeypatch):
    """Keep a simulated session, which every server of this process then finds."""
    monkeypatch.setattr(keepers.SessionActor, "_tick", lambda keeper: None)  # it ends its process with the session
    monkeypatch.setattr(keepers, "start_kept", lambda *options: as_started(start_simulated("1x2 A100-80GB", None)))
    keeper = keepers.SessionActor(
        k.KeepOptions(name=NAME, version=package_version(), seed=0, devices=2, own_machine=True, unattended_s=1e5)
    )
    monkeypatch.setattr(server, "keeper_of", lambda name, address: Near(keeper) if name == NAME else None)
    try:
        yield keeper
    finally:
        keeper.answer(k.End())


class Served:
    """A server, in threads; ``said`` is what it tells of strangers."""

    def __init__(self, port=0, token=TOKEN, **options):
        self.said = []
        self.server = server.Server(server.ServeOptions(port=port, token=token, **options), self.said.append)
        self.port = self.server.port
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        self.server.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def attach(port, token=TOKEN, name=NAME, scheme="hfsdk", **options):
    return hf.Session.attach(f"{scheme}://127.0.0.1:{port}/{name}", token=token, **options)


def connected(port):
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def kernels_line(port):
    """A connection within TLS, as a kernel begins it."""
    return tls.kernel_context(by_authorities=False).wrap_socket(connected(port))


def prove(line, token=TOKEN):
    """Say what a kernel with this token says, believing whatever the server shows; return that."""
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    line.sendall(nonce)
    shown = exactly(line, wire.NONCE_BYTES + wire.PROOF_BYTES)
    certificate = tls.fingerprint(line.getpeercert(binary_form=True))
    line.sendall(wire.proof(token, "kernel", nonce + shown[: wire.NONCE_BYTES], certificate))
    return shown


def exactly(line, size):
    data = b""
    while len(data) < size and (part := line.recv(size - len(data))):
        data += part
    return data


def all_of(line):
    """What comes until the other side ends the connection."""
    data = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while part := line.recv(2**16):
            data += part
    return data


def framed(data):
    return len(data).to_bytes(wire.LENGTH_BYTES, "big") + data


class Impostor:
    """Listens where a server was, and notes all that it is told: ``heard``, one per connection."""

    def __init__(self, port, speak):
        self.heard, self._speak, self._lines = [], speak, []
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                line.settimeout(WAIT_S)
                heard = bytearray()
                self.heard.append(heard)
                self._lines.append(line)
                self._threads.append(threading.Thread(target=self._take, args=(line, heard), daemon=True))
                self._threads[-1].start()

    def _take(self, line, heard):
        with line, contextlib.suppress(OSError):
            self._speak(line, heard)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)


def own_tls(line):
    """Speak TLS with a certificate of one's own, and the protocol of kernels."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols([tls.PROTOCOL])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "c.pem"
        file.write_bytes(tls.own_certificate())
        context.load_cert_chain(file)
    return context.wrap_socket(line, server_side=True)


def listen(line, heard):
    while part := line.recv(2**16):
        heard += part


def answers_as_http(line, heard):
    heard += line.recv(2**16)
    line.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
    listen(line, heard)


def guesses(line, heard):
    with own_tls(line) as tls:
        heard += exactly(tls, wire.NONCE_BYTES)
        tls.sendall(secrets.token_bytes(wire.NONCE_BYTES + wire.PROOF_BYTES))
        listen(tls, heard)


def echoes(line, heard):
    with own_tls(line) as tls:
        heard += exactly(tls, wire.NONCE_BYTES)
        tls.sendall(bytes(heard) * 3)
        listen(tls, heard)


def plays_back(shown):
    """Say again what the true server has said to somebody."""

    def speak(line, heard):
        with own_tls(line) as tls:
            heard += exactly(tls, wire.NONCE_BYTES)
            tls.sendall(shown)
            listen(tls, heard)

    return speak


def passes_on(port):
    """Read and pass on what a kernel says to the true server at another port, and what that one answers."""

    def speak(line, heard):
        with own_tls(line) as tls, kernels_line(port) as there:
            heard += exactly(tls, wire.NONCE_BYTES)
            there.sendall(bytes(heard))
            tls.sendall(exactly(there, wire.NONCE_BYTES + wire.PROOF_BYTES))
            listen(tls, heard)

    return speak
