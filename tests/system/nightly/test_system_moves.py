"""Roles that move to other devices straight from pool to pool: by gloo here, as by NCCL on GPUs; with all they have learned."""

import numpy as np
import pytest
from system_helpers import state_of
from test_system_direct import end_in_the_next_transfer, pids, runtime_of

import hfsdk as hf


@pytest.fixture(scope="module")
def session(ray_here):
    with hf.Session(devices=4, seed=5, name="moves") as session:
        runtime_of(session).direct_on_cpus = True
        yield session


@pytest.fixture
def batch(session):
    return session.batch(prompt=[[1, 2], [3]], response=[[4, 5], [6, 7]])


@pytest.fixture
def critic_on(session, batch):
    """Makes a critic that has learned twice."""

    def made(where, **options):
        critic = session.critic("tiny", optimizer=hf.AdamW(lr=1e-3, distributed=True), **options)
        place(session, where)
        for _ in range(2):
            learn(critic, batch)
        return critic

    yield made
    session.models.critic.release()


def learn(critic, batch):
    critic.update(batch, lambda out, b: (out.values - 1.0) ** 2).wait()


def place(session, devices):
    session.place(hf.Placement((hf.Pool("critic", devices),), {"critic": "critic"}))


def same(a, b):
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(np.array_equal(a[1][k], b[1][k]) for k in a[1])


def counted(critic):
    """The bytes that each rank gave and took when weights or states last went over a link."""
    return critic.run(lambda rank: (rank._hosted.last_transport.bytes_sent, rank._hosted.last_transport.bytes_received))


WAYS = {"tp2": [(0, 1), (2, 3)], "auto": [(0, 1), (2, 3), (1,), (0, 2)]}
"""Declared layout -> devices, one place after the other; left open, a role has as many replicas as devices."""


@pytest.mark.parametrize("train", WAYS)
def test_its_state_is_the_same_bit_for_bit(session, batch, critic_on, monkeypatch, train):
    critic = critic_on(WAYS[train][0], train=train)
    exported = []
    export = runtime_of(session).export
    monkeypatch.setattr(runtime_of(session), "export", lambda role, pool: exported.append(role) or export(role, pool))
    for updates, devices in enumerate(WAYS[train][1:], 3):
        state, values = state_of(critic), critic.compute_values(batch)["values"].flat
        num_bytes = sum(tensor.nbytes for tensor in state[1].values())
        place(session, devices)
        assert exported == [], "nothing stands in an object store"
        taken = counted(critic)
        assert all(sent == 0 for sent, _ in taken)
        assert sum(received for _, received in taken) >= num_bytes, "the shares of all ranks are the whole state"
        assert same(state_of(critic), state)
        assert np.abs(critic.compute_values(batch)["values"].flat - values).max() <= 1e-4
        learn(critic, batch)
        assert critic.version == updates


def test_where_both_places_share_a_worker_the_object_store_takes_it(session, critic_on):
    critic = critic_on((0, 1))
    state = state_of(critic)
    place(session, (1, 2))
    assert critic.run(lambda rank: rank._hosted.last_transport is None) == [True, True]
    assert same(state_of(critic), state)


@pytest.mark.parametrize(("dies", "stay"), [(1, (2, 3)), (3, (0, 1))], ids=["giver", "taker"])
def test_a_worker_that_ends_in_a_move_costs_what_was_its_own(session, ray_here, batch, critic_on, dies, stay):
    critic = critic_on((0, 1))
    place(session, (2, 3))  # so that all four have a worker
    place(session, (0, 1))
    state, before = state_of(critic), pids_of(session, ray_here)
    end_in_the_next_transfer(session, ray_here, dies)
    with pytest.raises(hf.WorkerDiedError, match=rf"the worker of device {dies} .*ended") as told:
        place(session, (2, 3))
    lost = "critic comes back with its initial weights (2 updates lost)" in str(told.value)
    assert lost == (dies == 1)
    learn(critic, batch)
    assert critic.version == (1 if lost else 3)
    after = pids_of(session, ray_here)
    assert all(after.get(device) == before[device] for device in stay), str(told.value)
    assert lost or not same(state_of(critic), state), "it went on from what it had"
    assert set(pids(session)) == {2, 3}


def pids_of(session, ray):
    """Process ids of all workers, also of those that are in no pool."""
    members = runtime_of(session).pools.devices
    return dict(zip(members, ray.get([member.handle.pid.remote() for member in members.values()]), strict=True))
