"""Moving the weights in a session: what is where at which moment, and that nothing a user does in between loses them."""

import os

import numpy as np
import pytest
from system_helpers import fingerprint, gap, likelihood
from test_system_reshard import PROMPTS, greedy, moments

import hfsdk as hf


@pytest.fixture(scope="module")
def session(ray_here):
    with hf.Session(devices=2, seed=5, name="resharding") as session:
        yield session


@pytest.fixture(scope="module")
def actor(session):
    return session.actor("tiny", train="tp2", rollout="tp1", cpu_weights="shared", optimizer=hf.AdamW(lr=1e-3))


@pytest.mark.parametrize("what", ["export", "run", "place", "release"])
def test_anything_may_follow_a_generation(session, actor, what, tmp_path):
    weights = actor.run(fingerprint)
    before = greedy(actor)
    assert moments(actor) == {"generating"}
    if what == "export":
        folder = actor.save_pretrained(tmp_path / "model")
        other = session.reference(str(folder), name="exported")
        found = other.compute_log_probs(before)["ref_log_probs"].flat
        assert np.abs(found - actor.compute_log_probs(before)["old_log_probs"].flat).max() <= 1e-4
        other.release()
    elif what == "run":
        shapes = actor.run(lambda rank: sum(p.numel() * bool(p.abs().sum() > 0) for p in rank.module.parameters()))
        assert min(shapes) > 0, "a function on the ranks finds the trainer's weights"
    elif what == "place":
        session.place({"actor": 2}, fresh=False)
        greedy(actor)
        session.place("colocate")
    elif what == "release":
        late = session.critic("tiny", name="late")
        late.compute_values(before).wait()
        greedy(actor)
        late.release()
    after = actor.compute_log_probs(actor.generate(PROMPTS, max_new_tokens=8))
    assert gap(after) <= 1e-4
    assert actor.run(fingerprint) == weights
    assert np.array_equal(greedy(actor)["response"].flat, before["response"].flat)


def test_packed_says_that_it_keeps_a_copy(session):
    actor = session.actor("tiny", name="packed", train="dp2", rollout="tp1", cpu_weights="packed")
    actor.generate(PROMPTS, max_new_tokens=2).wait()
    table = actor.census().to_pandas()
    assert set(table["moment"]) == {"both"}
    assert (table["redundant_bytes"] > 0).all()
    actor.release()


def test_a_rank_dies_while_the_weights_move(session, actor, tmp_path):
    """Half of them are with neither engine then: the pool comes back from the save, and the error says so."""

    def bomb(rank):
        if rank.rank == 1:
            rank._hosted.transition.residency._clear_padding = lambda *args: os._exit(1)

    greedy(actor)
    session.save(tmp_path)
    kept, tokens = actor.run(fingerprint), greedy(actor)["response"].flat
    actor.update(actor.compute_log_probs(greedy(actor)), likelihood).wait()
    actor.run(bomb)
    with pytest.raises(hf.WorkerDiedError, match=r"actor comes back with checkpoint .* \(1 update lost\)"):
        actor.generate(PROMPTS, max_new_tokens=8).wait(timeout=120)
    assert actor.run(fingerprint) == kept
    assert np.array_equal(greedy(actor)["response"].flat, tokens)
    assert actor.last_reshard.ratio == 1.0


def test_ranks_that_differ_are_told_before_anything_moves(actor):
    def another_version(rank, by):
        rank._hosted.trainer.num_updates += by * rank.rank
        rank._hosted.transition.stale = True

    before = greedy(actor)["response"].flat
    actor.run(another_version, 1)
    with pytest.raises(hf.CallError, match=r"actor's ranks differ in what they would move.*Nothing moved"):
        greedy(actor).wait()
    actor.run(another_version, -1)
    assert np.array_equal(greedy(actor)["response"].flat, before)
