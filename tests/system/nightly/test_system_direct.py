"""Weights straight from pool to pool, in a session: by gloo here, as by NCCL on GPUs; by the plan and bit for bit."""

import numpy as np
import pytest
from shadow_helpers import PROMPTS, check_by_plan, check_weights, declared, likelihood
from system_helpers import gap

import hfsdk as hf
from hfsdk.engine.calls import queries as q
from hfsdk.session.parts import parts_of


@pytest.fixture(scope="module")
def session(ray_here):
    with hf.Session(devices=4, seed=5, name="direct") as session:
        runtime_of(session).direct_on_cpus = True
        yield session


def runtime_of(session):
    return parts_of(session).client._controller._runtime


def links(session, ray, devices):
    """The numbers of the links that workers have joined."""
    workers = runtime_of(session).pools.devices
    read = lambda process: sorted(process._worker.links._joined)  # noqa: E731
    return ray.get([workers[device].handle.__ray_call__.remote(read) for device in devices])


@pytest.mark.filterwarnings("ignore:actor is replaced")
@pytest.mark.parametrize(("train", "rollout", "pools"), [("tp2", "tp1", (2, 2)), ("tp1", "tp2", (1, 2)), ("pp2", "tp1", (2, 1))])
def test_a_shadow_has_the_trained_weights_bit_for_bit(session, ray_here, train, rollout, pools):
    actor = declared(session, train, rollout)
    session.place({"actor": pools[0], "actor.rollout": pools[1]})
    controller = parts_of(session).client._controller
    numbers = set()
    for learned in range(2):
        batch = actor.compute_log_probs(actor.generate(PROMPTS, max_new_tokens=6, seed=learned))
        assert gap(batch) <= 1e-4
        assert set(batch["policy_version"]) == {learned}
        assert controller._roles["actor"].sync.weights is None, "nothing stands in an object store"
        check_weights(session, ray_here, actor, range(pools[0], sum(pools)))
        check_by_plan(session, actor, *pools)
        numbers |= {tuple(joined) for joined in links(session, ray_here, range(sum(pools)))}
        actor.update(batch, likelihood).wait()
    assert len(numbers) == 1, "one link, of all of them, used twice"
    names = {node.id: f"{node.role}.{node.method}" for node in session.dataflow.calls}
    edges = {(names.get(e.source), names.get(e.target)) for e in session.dataflow.edges if "weights" in e.columns}
    assert edges == {("actor.export_weights", "actor.rollout.generate")}
    session.place("colocate")
    assert links(session, ray_here, range(sum(pools))) == [[]] * sum(pools), "a link ends with its pools"


@pytest.mark.filterwarnings("ignore:actor is replaced")
def test_a_critic_s_shadow_infers_with_the_trained_weights(session, ray_here):
    declared(session, "tp2", "tp1")
    critic = session.critic("tiny", train="tp2", optimizer=hf.AdamW(lr=1e-3))
    session.place({"actor critic": 2, "actor.rollout critic.inference": 2})
    batch = session.models.actor.generate(PROMPTS, max_new_tokens=6)
    critic.update(batch, lambda out, b: (out.values - 1.0) ** 2).wait()
    apart = critic.compute_values(batch)["values"].flat
    assert links(session, ray_here, range(4)) == [links(session, ray_here, [0])[0]] * 4
    assert len(links(session, ray_here, [0])[0]) == 1, "the two pools have one link, whoever's weights go over it"
    session.place("colocate")
    assert np.abs(critic.compute_values(batch)["values"].flat - apart).max() <= 1e-4
    critic.release()


def pids(session):
    """Process ids of the workers, by device."""
    return {status.device: status.pid for status in parts_of(session).client.send(q.Devices())}


def end_in_the_next_transfer(session, ray, device):
    """Have a worker end with the first round of what it gives or takes next under way."""

    def arrange(process):
        import os
        import signal

        from hfsdk.engine.weights import transport

        transport._Run._copy = lambda self, step: os.kill(os.getpid(), signal.SIGKILL)

    ray.get(runtime_of(session).pools.devices[device].handle.__ray_call__.remote(arrange))


@pytest.mark.parametrize(("dies", "stay", "version"), [(1, (2, 3), 0), (3, (0, 1), 1)], ids=["giver", "taker"])
def test_a_worker_that_ends_in_a_transfer_costs_its_own_pool_alone(session, ray_here, dies, stay, version):
    actor = declared(session, "tp2", "tp1")
    session.place({"actor": 2, "actor.rollout": 2})
    batch = actor.compute_log_probs(actor.generate(PROMPTS, max_new_tokens=4))
    actor.update(batch, likelihood).wait()
    before = pids(session)
    end_in_the_next_transfer(session, ray_here, dies)
    with pytest.raises(hf.CallError, match=rf"the worker of device {dies} .*ended") as told:
        actor.generate(PROMPTS, max_new_tokens=4).wait(240)
    assert ("1 update lost" in str(told.value)) == (version == 0)
    fresh = actor.compute_log_probs(actor.generate(PROMPTS, max_new_tokens=4))
    assert gap(fresh) <= 1e-4
    after = pids(session)
    assert {device for device in after if after[device] == before[device]} == set(stay), "the other pool's workers are the same"
    assert set(fresh["policy_version"]) == {version}, "and have what they had"


def test_a_generation_that_is_cancelled_leaves_the_weights_to_the_next(session):
    actor = declared(session, "tp2", "tp1")
    session.place({"actor": 2, "actor.rollout": 2})
    batch = actor.compute_log_probs(actor.generate(PROMPTS, max_new_tokens=4))
    actor.update(batch, likelihood)
    late = actor.generate(PROMPTS, max_new_tokens=4)
    late.cancel()
    fresh = actor.compute_log_probs(actor.generate(PROMPTS, max_new_tokens=4))
    assert gap(fresh) <= 1e-4
    assert set(fresh["policy_version"]) == {actor.version}
