"""Several pools: roles that move with all they have learned, calls that overlap, places that wait for what runs."""

import threading

import numpy as np
import pytest
from expect import until
from system_helpers import OPENINGS, gap, gate, meet, same_state, state_of, waits

import hfsdk as hf
from hfsdk.algorithms import ppo


def prepared(session, tokens=8, seed=5):
    """A batch as PPO prepares it."""
    models = session.models
    batch = models.actor.generate(OPENINGS[:8], max_new_tokens=tokens, seed=seed)
    batch = models.actor.compute_log_probs(models.reference.compute_log_probs(batch))
    batch = models.critic.compute_values(models.reward.compute_scores(batch))
    return ppo.advantages(batch)


def learn(session, batch):
    session.models.critic.update(batch, ppo.ValueLoss(), mini_batches=2)
    session.models.actor.update(batch, ppo.PolicyLoss(), mini_batches=2).wait()


def meets(arrive):
    """A primitive on one rank of the pool that waits for whom it is to meet."""

    @hf.primitive(reads=["prompt"], writes=["met"], protocol=hf.protocols.DP)
    def met(model, rows):
        if model.rank == 0:
            arrive()
        return {"met": np.zeros(rows.num_rows)}

    return met


def test_calls_on_two_pools_overlap(four, tmp_path):
    """Each call ends when the other has begun: one after the other, the first would never end."""
    four.place({"actor reference": 2, "critic": 2})
    batch = four.batch(prompt=[[1], [2]])
    both = [
        four.models.actor.call(meets(meet(tmp_path, "actor", "critic")), batch),
        four.models.critic.call(meets(meet(tmp_path, "critic", "actor")), batch),
    ]
    for one in both:
        one.wait()
    first, second = [s for s in four.trace.calls if s.method == "call"][-2:]
    assert {first.pool, second.pool} == {"actor+reference", "critic"}


@pytest.mark.parametrize("where", [{"critic reference": 1, "actor": 2}, "colocate"], ids=["apart", "colocate"])
def test_moving_loses_nothing(four, where):
    """Weights and optimizer state bit for bit, batches readable, the rollout right, and learning goes on."""
    models = four.models
    four.place({"actor reference": 2, "critic": 2})
    learn(four, prepared(four))
    before = {role: state_of(handle) for role, handle in (("actor", models.actor), ("critic", models.critic))}
    version = models.actor.version
    pending = prepared(four, seed=6)
    scores = models.actor.compute_log_probs(pending)
    four.place(where)
    assert len(pending["advantages"].flat) == len(pending["response"].flat)
    assert models.actor.version == version
    assert same_state(state_of(models.actor), before["actor"])
    assert same_state(state_of(models.critic), before["critic"])
    again = models.actor.compute_log_probs(pending)
    assert np.abs(again["old_log_probs"].flat - scores["old_log_probs"].flat).max() <= 1e-4
    fresh = prepared(four)
    assert gap(fresh) <= 1e-4
    assert set(fresh["policy_version"]) == {version}
    learn(four, fresh)
    after = prepared(four)
    assert gap(after) <= 1e-4
    assert set(after["policy_version"]) == {version + 2}


def test_strategies_compute_the_same(four):
    """Teacher-forced, fp32: the same tokens and weights give the same numbers wherever the roles live."""
    batch = four.batch(prompt=[[1, 2, 3], [4], [5, 6], [7]], response=[[5, 6], [7, 8, 9], [1], [2, 3]])
    found = []
    for where in ("interleaving", {"actor critic": 1.0, "reference": 0.75}, "standalone"):
        four.place(where)
        filled = four.models.critic.compute_values(four.models.actor.compute_log_probs(batch))
        found.append(four.models.reference.compute_log_probs(filled).table("old_log_probs", "ref_log_probs", "values"))
    for other in found[1:]:
        for name in other:
            assert np.abs(other[name].flat - found[0][name].flat).max() <= 1e-4


@pytest.mark.filterwarnings("ignore:reference is replaced")
def test_calls_on_a_part_of_a_pool_and_on_the_whole_take_turns(four):
    """Collectives of both in quick succession: in another order on two workers they would wait for each other for ever. Nor do the
    groups of a role that is declared anew, which have the ranks of those before."""
    four.place("interleaving")
    batch, models = four.batch(prompt=[[1, 2, 3], [4]], response=[[5, 6], [7, 8, 9]]), four.models
    calls = [handle.compute_log_probs(batch) for _ in range(5) for handle in (models.reference, models.actor)]
    for call in (*calls, models.critic.compute_values(batch)):
        call.wait(120)
    before = models.reference.compute_log_probs(batch)["ref_log_probs"]
    four.reference(models.actor, micro_batch_tokens=1024)
    assert np.array_equal(four.models.reference.compute_log_probs(batch).wait(120)["ref_log_probs"].flat, before.flat)
    four.reference(models.actor)


def test_moving_waits_for_what_runs(four, tmp_path):
    """A call submitted before ``place`` ends where it began; one after it runs at the new place."""
    entrance = gate(tmp_path)
    stay = entrance.stay

    @hf.primitive(reads=["prompt"], writes=["devices"], protocol=hf.protocols.DP)
    def where(model, rows):
        stay()
        return {"devices": np.full(rows.num_rows, model.layout.size)}

    four.place("colocate")
    batch = four.batch(prompt=[[1]] * 4)
    before = four.models.actor.call(where, batch)
    place = threading.Thread(target=four.place, args=({"actor reference": 2, "critic": 2},))
    place.start()
    until("place to wait for the call", lambda: entrance.reached() and waits("settle", place))
    assert before.state == "running"
    entrance.open()
    place.join(120)
    assert before.done
    assert set(before["devices"]) == {4}
    assert set(four.models.actor.call(where, batch)["devices"]) == {2}
