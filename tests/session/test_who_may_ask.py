"""Whom the server of kept sessions answers: nobody without its token, nobody elsewhere without TLS."""

import threading
import urllib.error
import urllib.request

import pytest
from expect import refuses

pytest.importorskip("websockets")
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import hfsdk as hf
from hfsdk.session.serving import ServeOptions, Server

TOKEN = "a token of twenty-four characters"


@pytest.fixture(scope="module")
def port():
    server = Server(ServeOptions(port=0, token=TOKEN))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield server.port
    server.close()
    thread.join(60)


def test_others_are_listened_to_with_tls_alone():
    for host in ("127.0.0.1", "::1", "localhost"):
        ServeOptions(host=host, token=TOKEN).check()
    for host in ("0.0.0.0", "::", "10.0.0.4", "node3"):
        with refuses(hf.OptionError, host, "--certificate"):
            ServeOptions(host=host, token=TOKEN).check()
        ServeOptions(host=host, token=TOKEN, certificate="c.pem", key="k.pem").check()
    with refuses(hf.OptionError, "16"):
        ServeOptions(token="short").check()


@pytest.mark.parametrize("shown", ["", "another token of the same length!", TOKEN[:-1], TOKEN + "x"])
def test_without_the_token_nobody_gets_in(port, shown):
    with pytest.raises(InvalidStatus, match="401"):
        connect(f"ws://127.0.0.1:{port}/name", additional_headers={"Authorization": f"Bearer {shown}"}).close()
    for headers in ({"Authorization": f"Bearer {shown}"}, {"Cookie": f'hfsdk="{shown}"'}):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/", headers=headers), timeout=60)


def test_with_the_token_a_kernel_is_greeted(port):
    with connect(f"ws://127.0.0.1:{port}/name", additional_headers={"Authorization": f"Bearer {TOKEN}"}) as connection:
        assert connection.recv(60)
