"""Several pools: another pool's death, shadows that are asked again and again."""

import os
import signal
import time

import numpy as np
import pytest
from system_helpers import OPENINGS, gap, same_state, state_of
from test_system_pools import learn, prepared

import hfsdk as hf
from hfsdk.engine.calls import queries as q
from hfsdk.session.parts import parts_of


@pytest.mark.parametrize(
    "where",
    ["separation", {"actor critic": 2, "reference": 1, "actor.rollout": 1}],
    ids=["separation", "shadow"],
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


def test_a_shadow_gets_new_weights_once_and_only_when_there_are_some(four):
    """Three generations submitted at once share one transfer."""
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
    assert taken[-1:] == [spans[-1].attrs["bytes"]], "one copy of the weights, every box from one holder"
    assert actor.last_reshard.ratio == 1.0
    assert actor.last_reshard.ranks[2].bytes_received == spans[-1].attrs["bytes"]


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
    assert same_state(state_of(models.critic), saved)
    learn(four, batch)
    assert same_state(state_of(models.critic), unharmed)
