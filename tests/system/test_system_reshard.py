"""Moving the weights in a session: what is where at which moment, and that nothing a user does in between loses or changes them."""

import numpy as np
import pytest
from expect import refuses
from system_helpers import OPENINGS, fingerprint, gap, likelihood

import hfsdk as hf

PROMPTS = [text + " " for text in OPENINGS[:4]]
PARAMETER = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def actor(sharded):
    actor = sharded.actor("tiny", name="moved", train="tp2", rollout="tp1", cpu_weights="shared", optimizer=hf.AdamW(lr=1e-3))
    yield actor
    actor.release()


def greedy(actor):
    return actor.generate(PROMPTS, max_new_tokens=8, temperature=0.0)


def moments(actor):
    """With which engine the weights are; with no other."""
    census = actor.census()
    table = census.to_pandas()
    assert census.redundant_bytes == 0
    assert (table["redundant_bytes"] == 0).all()
    assert (table["total_bytes"] >= table["planned_bytes"]).all()
    return set(table["moment"])


def test_the_weights_are_with_one_engine_at_a_time(sharded, actor):
    actor.run(fingerprint)
    assert moments(actor) == {"training"}
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
    spans = sharded.trace.to_pandas().query("name == 'reshard' and role == 'moved'")
    assert set(spans["bytes"] > 0) == {True, False}, "to the rollout with bytes of others, back without"


@pytest.mark.parametrize("what", ["update", "halves", "save", "cancelled"])
def test_anything_may_follow_a_generation(sharded, actor, what, tmp_path):
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
        sharded.save(tmp_path)
        actor.update(actor.compute_log_probs(before), likelihood).wait()
        greedy(actor)
        sharded.load(tmp_path)
    elif what == "cancelled":
        actor.generate(PROMPTS, max_new_tokens=400, ignore_eos=True).cancel()
    after = actor.compute_log_probs(actor.generate(PROMPTS, max_new_tokens=8))
    assert gap(after) <= 1e-4
    if what in ("update", "halves"):
        assert actor.run(fingerprint) != weights
    else:
        assert actor.run(fingerprint) == weights
        assert np.array_equal(greedy(actor)["response"].flat, before["response"].flat)


def plant(rank, harm="number"):
    """On rank 1: what was written into one parameter is another thing when the transport is over."""
    import torch

    from hfsdk.engine.weights import transport

    if rank.rank != 1:
        return
    before = transport._Run.all

    def all_and_harm(self, rounds):
        before(self, rounds)
        transport._Run.all = before  # once
        with torch.no_grad():
            target = self.targets[PARAMETER]
            if harm == "number":
                target[3, 5] += 1e-7
            elif harm == "stride":
                target.copy_(target.t().reshape(target.shape).clone())
            else:
                target[:8].mul_(0.999)  # as of an older version

    transport._Run.all = all_and_harm


def test_a_number_that_changes_on_the_way_is_found_and_named(actor):
    expected = greedy(actor)
    assert actor.last_reshard.verified
    assert actor.last_reshard.boxes() == {"proven": len(actor.last_reshard.plan.moves), "unproven": 0, "wrong": 0}
    actor.run(plant)
    with refuses(hf.WeightMismatchError, f"{PARAMETER}[", "to rank 1", "0x"):
        greedy(actor).wait()
    report = actor.last_reshard
    assert not report.verified
    assert {(wrong.tensor, wrong.target) for wrong in report.wrong} == {(PARAMETER, 1)}
    assert report.boxes()["wrong"] == len(report.wrong)
    assert np.array_equal(greedy(actor)["response"].flat, expected["response"].flat)
    assert actor.last_reshard.verified
