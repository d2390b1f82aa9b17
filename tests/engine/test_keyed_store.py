"""A store over several machines: torch's own laws hold, and who does not know its secret gets nothing and changes nothing."""

import secrets
import socket
import threading
from datetime import timedelta

import pytest
from expect import refuses, until

pytest.importorskip("torch")

from torch._C._distributed_c10d import PrefixStore

from hfsdk.engine.process import keyed_store
from hfsdk.engine.process.keyed_store import KeyedStore, StoreError, StoreServer

SECRET = secrets.token_bytes(32)


@pytest.fixture
def server():
    server = StoreServer("127.0.0.1", SECRET)
    yield server
    server.close()


def client(server, secret=SECRET):
    return KeyedStore("127.0.0.1", server.port, secret)


def stranger(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def is_ended(connection):
    """Read until the other side has closed."""
    connection.settimeout(300)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_what_torch_asks_of_a_store(server):
    mine, others = client(server), client(server)
    one, other = PrefixStore("p/", mine), PrefixStore("p/", others)
    one.set("a", "text")
    assert other.get("a") == b"text"
    assert (one.add("n", 2), other.add("n", 3), one.get("n")) == (2, 5, b"5")
    assert (one.check(["a", "n"]), one.check(["a", "z"])) == (True, False)
    assert (one.compare_set("c", "", "first"), one.compare_set("c", "other", "x"), one.compare_set("c", "first", "second")) == (
        b"first", b"first", b"second",
    )  # fmt: skip
    assert (one.delete_key("a"), one.delete_key("a"), one.num_keys()) == (True, False, 2)
    with pytest.raises(StoreError, match="z"):
        client(server).wait(["z"], timedelta(milliseconds=1))
    clone = client(server).clone()
    clone.set("q", b"\0\xff")
    assert clone.get("q") == b"\0\xff"


def test_who_waits_gets_what_another_sets_later(server):
    found = []
    waiting = threading.Thread(target=lambda: found.append(client(server).get("late")))
    waiting.start()
    client(server).set("late", "there")
    waiting.join(300)
    assert found == [b"there"]


def test_gloo_meets_through_it(server):
    import torch
    from torch.distributed import ProcessGroupGloo

    from hfsdk.engine.process import gloo_groups

    found = {}

    def rank(number):
        store = client(server)
        group = gloo_groups.make(PrefixStore("g/", store), number, 2, timedelta(seconds=300))
        values = torch.ones(3)
        group.allreduce([values]).wait()
        found[number] = (isinstance(group, ProcessGroupGloo), values.tolist())

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(300)
    assert found == dict.fromkeys((0, 1), (True, [2.0] * 3))


def test_a_wrong_secret_gets_nothing_and_is_counted(server):
    with refuses(StoreError, server.port):
        client(server, secrets.token_bytes(32))
    until("the server to count the refused connection", lambda: server.strangers)  # it hangs up first
    assert server.strangers == 1
    assert client(server).num_keys() == 0


def test_who_answers_without_the_secret_is_told_nothing():
    """A squatter on the port: it says a nonce, and takes what comes."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as squatter:

        def squat():
            one, _ = squatter.accept()
            with one:
                one.sendall(secrets.token_bytes(32))
                heard.append(one.recv(64))
                one.sendall(secrets.token_bytes(32))

        thread = threading.Thread(target=squat)
        thread.start()
        with refuses(StoreError, "secret"):
            KeyedStore("127.0.0.1", squatter.getsockname()[1], SECRET)
        thread.join(300)
    assert SECRET not in heard[0]


def test_what_was_overheard_cannot_be_said_again(server):
    """A relay that keeps what a client has proven and asked: said to the server again it opens nothing."""
    said = []
    with socket.create_server(("127.0.0.1", 0)) as relay:

        def forward():
            near, _ = relay.accept()
            far = stranger(server)
            near.sendall(far.recv(32))
            said.append(near.recv(64, socket.MSG_WAITALL))
            far.sendall(said[0])
            near.sendall(far.recv(32, socket.MSG_WAITALL))
            said.append(near.recv(1 << 16))
            far.sendall(said[1])
            near.sendall(far.recv(1 << 16))
            near.close()
            far.close()

        thread = threading.Thread(target=forward)
        thread.start()
        store = KeyedStore("127.0.0.1", relay.getsockname()[1], SECRET)
        store.set("key", "once")
        thread.join(300)
    with stranger(server) as again:
        again.recv(32, socket.MSG_WAITALL)
        again.sendall(said[0] + said[1])
        assert is_ended(again)
    assert client(server).num_keys() == 1


def test_a_changed_message_is_refused(server, monkeypatch):
    store = client(server)
    store.set("a", "1")
    sealed = store._says.frame
    monkeypatch.setattr(store._says, "frame", lambda message: sealed(message)[:-1] + b"!")
    with refuses(StoreError, server.port):
        store.set("a", "2")
    assert client(server).get("a") == b"1"


def test_a_thousand_that_say_nothing_change_nothing(server):
    silent = [stranger(server) for _ in range(300)]
    store = client(server)
    store.set("a", "1")
    until("the oldest are sent away", lambda: server.strangers >= 300 - keyed_store.MOST_UNPROVEN)
    assert store.get("a") == b"1"
    assert is_ended(silent[0])
    for one in silent:
        one.close()


def test_a_message_too_long_is_refused_by_who_would_send_it_and_by_who_would_read_it(server):
    store = client(server)
    with refuses(StoreError, f"{keyed_store.MOST_BYTES:,}"):
        store.set("a", b"x" * (keyed_store.MOST_BYTES + 1))
    store._socket.sendall(keyed_store.HEADER.pack(2**32 - 1) + b"x" * 40)
    assert is_ended(store._socket)
    assert client(server).num_keys() == 0


def test_a_store_that_is_closed_says_so(server):
    store = client(server)
    server.close()
    with refuses(StoreError, server.port):
        store.get("a")
        store.get("a")
