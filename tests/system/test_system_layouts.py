"""The weights reach the rollout for every pair of layouts and in both modes, before and after an update."""

import numpy as np
import pytest
from system_helpers import OPENINGS, gap

import hfsdk as hf


def likelihood(out, b):
    return -out.log_probs


def measured(actor, prompts):
    batch = actor.compute_log_probs(actor.generate(prompts, max_new_tokens=10, seed=5))
    return batch, gap(batch)


@pytest.fixture(scope="module")
def wide(ray_here):
    """A session whose rollouts have tp2."""
    session = hf.Session(devices=2, seed=3, name="wide")
    yield session
    session.close()


@pytest.mark.parametrize("mode", ["packed", "shared"])
@pytest.mark.parametrize("train", ["tp2", "dp2"])
@pytest.mark.parametrize("rollout", ["tp1", "tp2"])
def test_rollout_follows_the_trainer(live, wide, train, rollout, mode):
    session = live.session if rollout == "tp1" else wide
    actor = session.actor(
        "tiny", name="other", train=train, rollout=rollout, cpu_weights=mode, optimizer=hf.AdamW(lr=1e-3)
    )
    try:
        prompts = [text + " " for text in OPENINGS[:6]]
        before, first = measured(actor, prompts)
        assert first <= 1e-4
        actor.update(before, likelihood, mini_batches=2).wait()
        after, second = measured(actor, prompts)
        assert second <= 1e-4
        assert set(after["policy_version"]) == {2}
        old = actor.compute_log_probs(before)["old_log_probs"].flat
        assert np.abs(old - before["rollout_log_probs"].flat).max() > 1e-3, "the update changed the policy"
        checked = actor.run(lambda rank: rank._hosted.last_transport.bytes_received)
        assert (sum(checked) > 0) == ((train, rollout) == ("tp2", "tp1")), "elsewhere every rank has what it needs"
    finally:
        actor.release()


def test_layouts_agree_on_the_same_tokens(live):
    """Teacher-forced log-probs and values do not depend on the layout."""
    batch = live.session.batch(prompt=[[1, 2, 3], [4]], response=[[5, 6], [7, 8, 9]])
    found = []
    for layout in ("tp2", "dp2"):
        reference = live.session.reference("tiny", layout=layout, name="other")
        found.append(reference.compute_log_probs(batch)["ref_log_probs"].flat)
        reference.release()
    assert np.abs(found[0] - found[1]).max() <= 1e-4
