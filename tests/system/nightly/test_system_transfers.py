"""Weights that travel to a shadow on another pool: by the plan, byte for byte, and bit for bit the trained ones."""

import time

import numpy as np
import pytest
from shadow_helpers import PROMPTS, at, check_by_plan, check_weights, declared, likelihood, trained_weights
from system_helpers import gap

import hfsdk as hf
from hfsdk.session.parts import parts_of


@pytest.fixture(scope="module")
def session(ray_here):
    with hf.Session(devices=4, seed=5, name="shadows") as session:
        yield session


@pytest.mark.filterwarnings("ignore:actor is replaced")
@pytest.mark.parametrize(
    ("train", "rollout", "pools"),
    [("tp2", "tp1", (2, 1)), ("tp2", "tp1", (2, 2)), ("tp2", "tp2", (2, 2)), ("tp1", "tp2", (2, 2)), ("pp2", "tp1", (2, 1))],
    ids=["tp2 to tp1", "tp2 to tp1 dp2", "tp2 to tp2", "dp2 to tp2", "pp2 to tp1"],
)
def test_a_shadow_has_the_trained_weights_bit_for_bit(session, ray_here, train, rollout, pools):
    actor = declared(session, train, rollout)
    session.place({"actor": pools[0], "actor.rollout": pools[1]})
    with pytest.raises(hf.OptionError, match=r"actor's weights have not moved yet; call actor\.generate"):
        actor.last_reshard  # noqa: B018 - the property raises
    for learned in range(2):
        batch = actor.compute_log_probs(actor.generate(PROMPTS, max_new_tokens=6, seed=learned))
        assert gap(batch) <= 1e-4
        full = check_weights(session, ray_here, actor, range(pools[0], sum(pools)))
        kept = check_by_plan(session, actor, *pools)
        assert kept == sum(whole.nbytes for whole in full.values()), "replicas on a node share objects"
        actor.update(batch, likelihood).wait()


@pytest.fixture
def critic(session):
    critic = session.critic("tiny", train="tp2", optimizer=hf.AdamW(lr=1e-3))
    yield critic
    critic.release()


@pytest.mark.filterwarnings("ignore:actor is replaced")
def test_a_critic_s_shadow_infers_with_the_trained_weights(session, ray_here, critic):
    """From tp2 to whole models on two ranks, the scalar head too; the same values as the trained one's own layout gives."""
    actor = declared(session, "tp2", "tp1")
    session.place({"actor critic": 2, "actor.rollout critic.inference": 2})
    batch = actor.generate(PROMPTS, max_new_tokens=6)

    def squared(out, b):
        return (out.values - 1.0) ** 2

    critic.update(batch, squared).wait()
    apart = critic.compute_values(batch)["values"].flat
    full = trained_weights(critic)
    assert "score.weight" in full
    workers = parts_of(session).client._controller._runtime.pools.devices

    def read(process):
        hosted = process._worker.roles["critic.inference"]
        tensors = {name: tensor.numpy().copy() for name, tensor in hosted.trainer.local_tensors().items()}
        return tensors, hosted.trainer.shard.boxes

    for local, boxes in ray_here.get([workers[device].handle.__ray_call__.remote(read) for device in (2, 3)]):
        assert {box.tensor for box in boxes} == set(full)
        for box in boxes:
            part = local[box.local][at(box.local_start, box.size)]
            assert np.array_equal(part, full[box.tensor][at(box.start, box.size)]), box
    taken = [s.attrs["bytes"] for s in session.trace.spans if s.name == "sync" and s.role == "critic.inference"]
    assert taken == [sum(whole.nbytes for whole in full.values())] * 2
    session.place("colocate")
    assert np.abs(critic.compute_values(batch)["values"].flat - apart).max() <= 1e-4


def test_objects_addressed_to_another_layout_are_not_used(session):
    """They stand ready for a generation that was cancelled, then the shadow moves: the next one asks again."""

    @hf.primitive(reads=["prompt"], writes=["slept"], protocol=hf.protocols.DP)
    def sleep(model, rows):
        time.sleep(1.0)
        return {"slept": np.zeros(rows.num_rows)}

    actor = declared(session, "tp2", "tp1")
    session.place({"actor": 2, "actor.rollout": 1})
    batch = actor.compute_log_probs(actor.generate(PROMPTS, max_new_tokens=4))
    actor.update(batch, likelihood).wait()
    slept = actor.call(sleep, batch)
    late = actor.generate(PROMPTS, max_new_tokens=4)
    late.cancel()
    slept.wait()
    session.place({"actor": 2, "actor.rollout": 2})
    waiting = parts_of(session).client._controller._roles["actor"].sync
    assert waiting.weights is not None
    assert waiting.weights.bundles[0].targets == (0,)
    fresh = actor.compute_log_probs(actor.generate(PROMPTS, max_new_tokens=4))
    assert gap(fresh) <= 1e-4
    assert set(fresh["policy_version"]) == {1}
    assert len(actor.last_reshard.ranks) == 4


def test_a_rank_that_gets_other_bytes_than_planned_says_so(session):
    """Nothing is written then, and the next generation asks for the weights again."""

    def short(rank):
        store = rank._hosted.worker.store
        put = store.put
        if rank.rank == 1:

            def forgetful(boxes):
                store.put = put
                return put(boxes[1:])

            store.put = forgetful

    actor = declared(session, "tp2", "tp1")
    session.place({"actor": 2, "actor.rollout": 2})
    actor.generate(PROMPTS, max_new_tokens=4).wait()
    planned = actor.reshard_plan.matrix[1, 2]
    actor.update(actor.compute_log_probs(actor.generate(PROMPTS, max_new_tokens=4)), likelihood).wait()
    actor.run(short)
    with pytest.raises(hf.CallError, match=rf"actor\.rollout rank \d received \d+ bytes from rank 1 .*; the plan says {planned}"):
        actor.generate(PROMPTS, max_new_tokens=4).wait()
    assert gap(actor.compute_log_probs(actor.generate(PROMPTS, max_new_tokens=4))) <= 1e-4
