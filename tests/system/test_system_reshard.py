"""Moving the weights in a session: what is where at which moment, and that nothing a user does in between loses them."""

import os

import numpy as np
import pytest
from system_helpers import OPENINGS, fingerprint, gap

import hfsdk as hf


def likelihood(out, b):
    return -out.log_probs


PROMPTS = [text + " " for text in OPENINGS[:4]]


@pytest.fixture(scope="module")
def session(ray_here):
    with hf.Session(devices=2, seed=5, name="resharding") as session:
        yield session


@pytest.fixture(scope="module")
def actor(session):
    return session.actor("tiny", train="tp2", rollout="tp1", cpu_weights="shared", optimizer=hf.AdamW(lr=1e-3))


def greedy(actor):
    return actor.generate(PROMPTS, max_new_tokens=8, temperature=0.0)


def moments(actor):
    census = actor.census()
    table = census.to_pandas()
    assert census.redundant_bytes == 0
    assert (table["redundant_bytes"] == 0).all()
    assert (table["total_bytes"] >= table["planned_bytes"]).all()
    return set(table["moment"])


@pytest.mark.slow
def test_the_weights_are_with_one_engine_at_a_time(session, actor):
    with pytest.raises(hf.OptionError, match=r"actor's weights have not moved yet; call actor\.generate"):
        actor.last_reshard  # noqa: B018 - the property raises
    batch = greedy(actor)
    report = actor.last_reshard
    assert report.ratio == 1.0
    assert report.planned_bytes > 0
    assert report.bytes_by_link()["same rank"][0] == report.bytes_by_link()["same rank"][1]
    assert moments(actor) == {"generating"}
    resting = max(actor.memory.values())
    assert np.array_equal(greedy(actor)["response"].flat, batch["response"].flat)
    assert actor.last_reshard == report, "they were there"
    actor.compute_log_probs(batch).wait()
    assert moments(actor) == {"training"}
    assert max(actor.memory.values()) < resting
    spans = session.trace.to_pandas().query("name == 'reshard'")
    assert set(spans["bytes"] > 0) == {True, False}, "to the rollout with bytes of others, back without"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["update", "halves", "save", "export", "run", "place", "release"])
def test_anything_may_follow_a_generation(session, actor, what, tmp_path):
    weights = actor.run(fingerprint)
    before = greedy(actor)
    assert moments(actor) == {"generating"}
    if what == "update":
        actor.update(actor.compute_log_probs(before), likelihood).wait()
    elif what == "halves":
        actor.forward_backward(before, likelihood)
        between = greedy(actor)
        assert np.array_equal(between["response"].flat, before["response"].flat)
        assert actor.grad_norm > 0
        greedy(actor)
        actor.step()
    elif what == "save":
        session.save(tmp_path)
        kept = actor.run(fingerprint)
        actor.update(actor.compute_log_probs(before), likelihood).wait()
        greedy(actor)
        session.load(tmp_path)
        assert actor.run(fingerprint) == kept
    elif what == "export":
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
    if what in ("update", "halves"):
        assert actor.run(fingerprint) != weights
    else:
        assert actor.run(fingerprint) == weights
        assert np.array_equal(greedy(actor)["response"].flat, before["response"].flat)


def test_cancelled_between_generations(actor):
    greedy(actor)
    actor.compute_log_probs(greedy(actor)).wait()
    batch = actor.generate(PROMPTS, max_new_tokens=400, ignore_eos=True)
    batch.cancel()
    assert gap(actor.compute_log_probs(actor.generate(PROMPTS, max_new_tokens=8))) <= 1e-4


def test_packed_says_that_it_keeps_a_copy(session):
    actor = session.actor("tiny", name="packed", train="dp2", rollout="tp1", cpu_weights="packed")
    actor.generate(PROMPTS, max_new_tokens=2).wait()
    table = actor.census().to_pandas()
    assert set(table["moment"]) == {"both"}
    assert (table["redundant_bytes"] > 0).all()
    actor.release()


@pytest.mark.slow
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


def test_simulated_sessions_report_what_the_plan_moves_and_have_no_bytes_to_count():
    with hf.Session.simulated("1x4 A100-80GB") as session:
        actor = session.actor("llama-7b", train="tp4", rollout="tp2")
        session.place("colocate")
        actor.generate([[1, 2, 3]] * 4, max_new_tokens=4)
        assert actor.reshard_plan.bytes_moved > 0
        assert actor.last_reshard.measured_bytes == actor.reshard_plan.bytes_moved
        with pytest.raises(hf.SimulatedValueError, match="simulated"):
            actor.census()


def test_shadows_and_nodes_are_in_the_plan():
    with hf.Session.simulated("2x4 A100-80GB") as session:
        actor = session.actor("llama-7b", train="tp2 pp2", rollout="tp2")
        session.place("colocate")
        assert actor.reshard_plan.nodes == (0,) * 4 + (1,) * 4
        assert actor.reshard_plan.bytes_by_link()["network"] > 0
        session.place({"actor": 4, "actor.rollout": 2})
        plan = actor.reshard_plan
        assert (plan.apart, plan.num_ranks, plan.nodes) == (True, 6, (0,) * 4 + (1,) * 2)
        actor.generate([[1, 2, 3]] * 4, max_new_tokens=4).wait()
        assert actor.last_reshard.measured_bytes == plan.bytes_moved
        synced = [s for s in session.trace.spans if s.name == "sync"]
        assert {s.rank: s.attrs["bytes"] for s in synced} == {0: plan.bytes_received(4), 1: plan.bytes_received(5)}
        assert actor.version == 0
