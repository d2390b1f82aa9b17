"""Several pools: roles that move with all they have learned, calls that overlap, shadows that are never stale."""

import os
import signal
import time

import numpy as np
import pytest
from system_helpers import OPENINGS, gap, lengths_reward, state_of

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.engine.calls import queries as q
from hfsdk.session.session_parts import parts_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def four(ray_here):
    """Four devices with PPO's roles, placed and placed again by the tests."""
    session = hf.Session(devices=4, seed=3, name="four")
    actor = session.actor("tiny", rollout="tp1", optimizer=hf.AdamW(lr=1e-3))
    session.critic("tiny", optimizer=hf.AdamW(lr=1e-3))
    session.reference(actor)
    session.reward(lengths_reward)
    session.place({"actor reference": 2, "critic": 2})
    yield session
    session.close()


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


def same(a, b):
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(np.array_equal(a[1][k], b[1][k]) for k in a[1])


def test_calls_on_two_pools_overlap(four):
    """Each call sleeps: one after the other they would take twice as long, and their spans would not meet."""

    @hf.primitive(reads=["prompt"], writes=["slept"], protocol=hf.protocols.DP)
    def sleep(model, rows):
        time.sleep(1.0)
        return {"slept": np.zeros(rows.num_rows)}

    batch = four.batch(prompt=[[1], [2]])
    both = [four.models.actor.call(sleep, batch), four.models.critic.call(sleep, batch)]
    for one in both:
        one.wait()
    first, second = [s for s in four.trace.spans if s.method == "call" and s.device is None][-2:]
    assert {first.pool, second.pool} == {"actor+reference", "critic"}
    assert max(first.start_ns, second.start_ns) < min(first.end_ns, second.end_ns)


@pytest.mark.parametrize(
    "where",
    [{"critic reference": 1, "actor": 2}, "separation", "colocate", {"actor critic": 2, "reference": 1, "actor.rollout": 1}],
    ids=["apart", "separation", "colocate", "shadow"],
)
def test_moving_loses_nothing(four, where):
    """Weights and optimizer state bit for bit, batches readable, the rollout right, and learning goes on."""
    models = four.models
    learn(four, prepared(four))
    before = {role: state_of(handle) for role, handle in (("actor", models.actor), ("critic", models.critic))}
    version = models.actor.version
    pending = prepared(four, seed=6)
    scores = models.actor.compute_log_probs(pending)
    four.place(where)
    assert len(pending["advantages"].flat) == len(pending["response"].flat)
    assert models.actor.version == version
    assert same(state_of(models.actor), before["actor"])
    assert same(state_of(models.critic), before["critic"])
    again = models.actor.compute_log_probs(pending)
    assert np.abs(again["old_log_probs"].flat - scores["old_log_probs"].flat).max() <= 1e-4
    fresh = prepared(four)
    assert gap(fresh) <= 1e-4
    assert set(fresh["policy_version"]) == {version}
    learn(four, fresh)
    after = prepared(four)
    assert gap(after) <= 1e-4
    assert set(after["policy_version"]) == {version + 2}


def test_a_shadow_gets_new_weights_once_and_only_when_there_are_some(four):
    """Placed with a shadow by the last test; three generations submitted at once share one transfer."""
    four.place({"actor critic": 2, "reference": 1, "actor.rollout": 1})
    actor = four.models.actor
    learn(four, prepared(four))

    def transfers():
        return sum(call.method == "export_weights" for call in parts_of(four).client.send(q.CallsOf()))

    before = transfers()
    batches = [actor.generate(OPENINGS[:4], max_new_tokens=6, seed=k) for k in range(3)]
    for batch in batches:
        assert set(batch["policy_version"]) == {actor.version}
    actor.generate(OPENINGS[:4], max_new_tokens=6).wait()
    assert transfers() == before + 1
    spans = [s for s in four.trace.spans if s.name == "sync"]
    assert spans
    assert all(s.role == "actor.rollout" and s.attrs["bytes"] > 10**6 for s in spans)
    taken = [s.attrs["bytes"] for s in four.trace.calls if s.method == "export_weights"]
    assert taken == [spans[0].attrs["bytes"]], "one copy of the weights, every box from one holder"
    assert actor.last_reshard.ratio == 1.0
    assert actor.last_reshard.ranks[2].bytes_received == spans[0].attrs["bytes"]


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


def test_calls_on_a_part_and_on_the_whole_take_turns(four):
    """Collectives of both in quick succession: in another order on two workers they would wait for each other for ever."""
    four.place("interleaving")
    batch = four.batch(prompt=[[1, 2, 3], [4]], response=[[5, 6], [7, 8, 9]])
    models = four.models
    calls = [handle.compute_log_probs(batch) for _ in range(5) for handle in (models.reference, models.actor)]
    values = models.critic.compute_values(batch)
    for call in (*calls, values):
        call.wait(60)


@pytest.mark.filterwarnings("ignore:reference is replaced")
def test_a_role_on_a_part_of_a_pool_is_declared_anew(four):
    """Its groups have the ranks of those before; made again, they would be waited for for ever."""
    four.place("interleaving")
    batch = four.batch(prompt=[[1, 2, 3], [4]], response=[[5, 6], [7, 8, 9]])
    before = four.models.reference.compute_log_probs(batch)["ref_log_probs"]
    four.reference(four.models.actor, micro_batch_tokens=1024)
    assert np.array_equal(four.models.reference.compute_log_probs(batch).wait(120)["ref_log_probs"].flat, before.flat)
    four.reference(four.models.actor)


def test_moving_waits_for_what_runs(four):
    """A call submitted before ``place`` ends where it began; one after it runs at the new place."""

    @hf.primitive(reads=["prompt"], writes=["devices"], protocol=hf.protocols.DP)
    def where(model, rows):
        time.sleep(1.0)
        return {"devices": np.full(rows.num_rows, model.layout.size)}

    four.place("colocate")
    batch = four.batch(prompt=[[1]] * 4)
    before = four.models.actor.call(where, batch)
    four.place({"actor reference": 2, "critic": 2})
    assert before.done
    assert set(before["devices"]) == {4}
    assert set(four.models.actor.call(where, batch)["devices"]) == {2}


def test_a_pool_dies_and_the_others_go_on(four, tmp_path):
    """The critic's worker is killed inside a collective; the actor works on; the critic comes back from the save, and the step
    repeated gives what it gave without the kill."""
    four.place({"actor reference": 2, "critic": 2})
    models = four.models
    batch = prepared(four)
    batch = batch.with_columns(values=batch["values"])  # here, and not with the critic's workers, which will die
    learn(four, batch)
    four.save(tmp_path)
    saved, version = state_of(models.critic), models.critic.version
    learn(four, batch)
    unharmed = state_of(models.critic)
    four.load(tmp_path)
    pids = models.critic.run(lambda rank: os.getpid())

    @hf.primitive(reads=["prompt"], writes=["x"], protocol=hf.protocols.DP)
    def hang(model, rows):
        import torch
        import torch.distributed as dist

        if model.rank == 0:
            time.sleep(60)
        dist.all_reduce(torch.zeros(1), group=model.groups.world)
        return {"x": np.zeros(rows.num_rows)}

    held = models.critic.call(hang, four.batch(prompt=[[1], [2]]))
    time.sleep(1.0)
    os.kill(pids[0], signal.SIGKILL)
    assert len(models.actor.generate(OPENINGS[:2], max_new_tokens=4)["response"]) == 2
    with pytest.raises(hf.WorkerDiedError, match=r"critic comes back with checkpoint"):
        held.wait()
    assert models.critic.version == version
    assert same(state_of(models.critic), saved)
    learn(four, batch)
    assert same(state_of(models.critic), unharmed)
