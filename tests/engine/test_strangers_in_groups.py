"""Who connects to a worker's port and is no rank of its group gets nothing, changes nothing, and is noticed."""

import os
import pickle
import queue
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from expect import refuses
from spawn import run

from hfsdk.engine.process import gloo_groups, plain_objects
from hfsdk.engine.process.gloo_groups import Device

LONG = timedelta(seconds=300)
SAYS = {
    "nothing": b"",
    "zeros": b"\0" * 4096,
    "an absurd length": struct.pack("<6Q", 48, 0, 5, 0, 2**62, 0) * 8,
    "ones": b"\xff" * 4096,
}
"""After the number of the pair whose place a stranger takes."""


class Ran:
    """Put in the place of a value: it tells whether it was unpickled."""

    def __reduce__(self):
        return os.putenv, ("A_STRANGERS_PICKLE_RAN", "1")


def port_of(interface="lo"):
    (device,) = gloo_groups._current(interface)
    with device._socket() as listener:
        return listener.getsockname()


def sums(group, times=3):
    found = []
    for k in range(times):
        values = torch.full((1000,), float(k + 1))
        group.allreduce([values]).wait()
        found.append(values.sum().item())
    return found


def place_taken(rank, size, folder, says):
    """A stranger is faster than all ranks: it has taken every place before the group is made."""
    Device._close = lambda self: None  # the port is open as it is while a group is made
    (device,) = gloo_groups._current("lo")
    with device.opened():
        pass
    gloo_groups.PROOF_LIMIT = timedelta(seconds=2)  # of a silent one
    strangers = []
    if rank == 0:
        for number in range(8):
            strangers.append(socket.create_connection(port_of(), timeout=60))
            strangers[-1].sendall(struct.pack("<Q", number) + SAYS[says])
    store = dist.FileStore(f"{folder}/store", size)
    store.set(f"stranger{rank}", "is there")
    store.wait([f"stranger{other}" for other in range(size)], LONG)
    group = gloo_groups.make(store, rank, size, LONG)
    return sums(group)


@pytest.mark.parametrize("says", SAYS)
def test_a_group_whose_places_strangers_have_taken_is_made_again(tmp_path, says):
    assert run(place_taken, 3, str(tmp_path), says) == [[3000.0, 6000.0, 9000.0]] * 3


def closed(rank, size, folder):
    """Many strangers come to the port of a group that stands."""
    store = dist.FileStore(f"{folder}/store", size)
    group = gloo_groups.make(store, rank, size, LONG)
    before = sums(group)
    strangers = []
    for _ in range(500):
        strangers.append(socket.socket())
        strangers[-1].setblocking(False)
        strangers[-1].connect_ex(port_of())
    during = sums(group)
    unknown = [s for s in strangers if s.connect_ex(port_of()) == 0]
    again = sums(gloo_groups.make(dist.PrefixStore("again/", store), rank, size, LONG))
    return before == during == again, len(unknown), gloo_groups.knocks() >= 500


def test_the_port_of_a_group_that_stands_is_closed_and_who_comes_is_counted(tmp_path):
    assert run(closed, 2, str(tmp_path)) == [(True, 0, True)] * 2


def files_of_devices(rank, size):
    """Devices are made and given up; files, pipes and sockets are open meanwhile."""
    kept = [os.pipe(), socket.socketpair()]
    counts = []
    for _ in range(4):
        gloo_groups._current("lo")[0].forget()
        gloo_groups._devices.clear()
        counts.append(len(os.listdir("/proc/self/fd")))
    return kept and max(counts) - min(counts)


def test_making_devices_leaves_no_file_open():
    """Each look for gloo's own socket among all files of the process would leave some."""
    assert run(files_of_devices, 1) == [0]


def test_strangers_that_take_a_place_at_every_try_are_told(monkeypatch):
    monkeypatch.setattr(gloo_groups, "_is_proven", lambda *_: False)
    monkeypatch.setattr(gloo_groups, "_meet", lambda *_: b"key")
    monkeypatch.setattr(gloo_groups, "_current", lambda _: [])

    class Gloo:
        _Options = type("Options", (), {})

        def __init__(self, *_):
            pass

    monkeypatch.setattr(dist, "ProcessGroupGloo", Gloo)
    with refuses(gloo_groups.StrangersError, gloo_groups.MOST_TRIES):
        gloo_groups.make(dist.HashStore(), 0, 2, LONG)


def by_torch(rank, size, what):
    if what == "plain":
        values = [None] * size
        dist.all_gather_object(values, (rank, {"a": [1.5, None, b"\0"], (1, "b"): True}))
        told = ["from 0" if rank == 0 else None, 3]
        dist.broadcast_object_list(told, src=0)
        return values, told
    try:
        dist.all_gather_object([None] * size, Ran())
    except plain_objects.NotPlainError:
        return "refused"


def test_torchs_object_collectives_carry_plain_data():
    each = [(k, {"a": [1.5, None, b"\0"], (1, "b"): True}) for k in range(2)]
    assert run(by_torch, 2, "plain") == [(each, ["from 0", 3])] * 2


def test_what_is_no_plain_data_is_refused_where_it_would_be_sent():
    assert run(by_torch, 2, "an object") == ["refused"] * 2


def pickles(rank, size, by):
    """Rank 1 sends a pickle, as torch would without more ado; the other takes what comes."""
    if rank == 0:
        try:
            if by == "torch":
                dist.all_gather_object([None] * size, "here")
            else:
                plain_objects.gather("here", str, dist.group.WORLD)
        except plain_objects.NotPlainError:
            return "refused", os.getenv("A_STRANGERS_PICKLE_RAN")
        return "taken", os.getenv("A_STRANGERS_PICKLE_RAN")
    if by == "torch":
        with plain_objects.written_by(pickle.dumps, bytes):
            dist.all_gather_object([None] * size, Ran())
    else:
        plain_objects.msgspec = SimpleNamespace(
            MsgspecError=ValueError, msgpack=SimpleNamespace(encode=lambda _: pickle.dumps(Ran()), decode=lambda *_, **__: None)
        )
        plain_objects.gather("", str, dist.group.WORLD)
    return None


def gathers(rank, size):
    short = plain_objects.gather((rank, "é"), tuple[int, str], dist.group.WORLD)
    long = plain_objects.gather({"x" * 1000: [2**63 + rank]}, dict[str, list[int]], dist.group.WORLD)
    mixed = plain_objects.gather("y" * (700 * rank), str, dist.group.WORLD)
    try:
        plain_objects.gather(rank, str, dist.group.WORLD)
    except plain_objects.NotPlainError:
        return short, long, [len(text) for text in mixed]


def test_ranks_are_told_what_each_sends_of_the_type_that_is_asked():
    short, long = [(0, "é"), (1, "é")], [{"x" * 1000: [2**63]}, {"x" * 1000: [2**63 + 1]}]
    assert run(gathers, 2) == [(short, long, [0, 700])] * 2


@pytest.mark.parametrize("by", ["torch", "gather"])
def test_a_pickle_that_comes_over_a_group_is_not_run(by):
    assert run(pickles, 2, by)[0] == ("refused", None)


def too_much(rank, size):
    plain_objects.MOST_BYTES = 1000
    try:
        plain_objects.gather("x" * (2000 * rank), str, dist.group.WORLD)
    except plain_objects.NotPlainError as error:
        return "1,000" in str(error)


def test_more_than_the_bound_is_refused_on_all_ranks_before_room_is_made_for_it():
    assert run(too_much, 2) == [True, True]


TAGS = (gloo_groups.PROOF_TAG, gloo_groups.ALL_PROVEN_TAG)


class Wire:
    """A group of two in one process: what one sends under a tag is what the other receives under it."""

    def __init__(self):
        self.sent = {(rank, tag): queue.Queue() for rank in range(2) for tag in TAGS}

    def of(self, rank):
        def send(tensors, other, tag):
            self.sent[rank, tag].put(tensors[0].clone())
            return SimpleNamespace(wait=lambda limit: None)

        def recv(tensors, other, tag):
            return SimpleNamespace(wait=lambda limit: tensors[0].copy_(self.sent[other, tag].get(timeout=60)))

        return SimpleNamespace(send=send, recv=recv)


@pytest.mark.parametrize(("keys", "proven"), [((b"k" * 32, b"k" * 32), [True, True]), ((b"k" * 32, b"s" * 32), [False, False])])
def test_a_rank_is_proven_by_the_session_s_key_alone(monkeypatch, keys, proven):
    monkeypatch.setattr(gloo_groups._Seen, "intruders", 0)
    wire = Wire()
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(gloo_groups._is_proven, wire.of(rank), key, rank, 2) for rank, key in enumerate(keys)]
        assert [one.result(60) for one in found] == proven
