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
    """A session whose actor is declared again and again."""
    session = hf.Session(devices=2, seed=3, name="wide")
    yield session
    session.close()


@pytest.mark.filterwarnings("ignore:actor is replaced")
@pytest.mark.parametrize(
    ("train", "rollout", "mode"),
    [
        ("tp2", "tp1", "packed"), ("dp2", "tp1", "shared"), ("tp2", "tp1", "shared"),
        ("tp2", "tp2", "packed"), ("dp2", "tp2", "shared"), ("tp2", "tp2", "shared"), ("dp2", "tp2", "packed"),
    ],
)  # fmt: skip
def test_rollout_follows_the_trainer(wide, train, rollout, mode):
    """Each actor replaces the one before, whose engine is given back: also the rollout's tp may change."""
    optimizer, recompute = hf.AdamW(lr=1e-3, distributed=train == "dp2"), "full" if mode == "shared" else ""
    options = {"train": train, "rollout": rollout, "cpu_weights": mode, "optimizer": optimizer, "recompute": recompute}
    actor = wide.actor("tiny", **options, replace=True)
    prompts = [text + " " for text in OPENINGS[:6]]
    before, first = measured(actor, prompts)
    assert first <= 1e-4
    actor.update(before, likelihood, mini_batches=2).wait()
    after, second = measured(actor, prompts)
    assert second <= 1e-4
    assert set(after["policy_version"]) == {2}
    old = actor.compute_log_probs(before)["old_log_probs"].flat
    assert np.abs(old - before["rollout_log_probs"].flat).max() > 1e-3, "the update changed the policy"
    received = actor.run(lambda rank: rank._hosted.last_transport.bytes_received)
    assert (sum(received) > 0) == ((train, rollout) == ("tp2", "tp1")), "elsewhere every rank has what it needs"


def test_releasing_one_actor_leaves_the_other(wide):
    actor = wide.actor("tiny", name="first", train="dp2", rollout="tp2")
    other = wide.actor("tiny", name="second", train="dp2", rollout="tp2")
    assert max(measured(a, ["the film is "] * 3)[1] for a in (actor, other)) <= 1e-4
    other.release()
    assert measured(actor, ["the film is "] * 3)[1] <= 1e-4


def test_layouts_agree_on_the_same_tokens(live):
    """Teacher-forced log-probs and values do not depend on the layout."""
    batch = live.session.batch(prompt=[[1, 2, 3], [4]], response=[[5, 6], [7, 8, 9]])
    found = []
    for layout in ("tp2", "dp2"):
        reference = live.session.reference("tiny", layout=layout, name="other")
        found.append(reference.compute_log_probs(batch)["ref_log_probs"].flat)
        reference.release()
    assert np.abs(found[0] - found[1]).max() <= 1e-4


def test_offloaded_models_come_to_the_device_for_their_calls(live):
    """The numbers are those of a reference that stays; the timeline shows the way there and back."""
    batch = live.session.batch(prompt=[[1, 2, 3], [4]], response=[[5, 6], [7, 8, 9]])
    stays = live.session.reference("tiny", name="stays")
    expected = stays.compute_log_probs(batch)["ref_log_probs"].flat
    reference = live.session.reference("tiny", name="leaves", offload=True)
    found = reference.compute_log_probs(batch)["ref_log_probs"].flat
    assert np.array_equal(found, expected)
    spans = live.session.trace.to_pandas().query("role == 'leaves' and name in ('onload', 'offload')")
    assert set(spans["name"]) == {"onload", "offload"}
    for held in live.actor.run(lambda rank: rank.memory()):
        assert held["leaves"] == 0 < held["stays"] + held["reference"], "the one that stays has the weights of the session's own"
    with pytest.raises(hf.OptionError, match=r"offload=True keeps a model's weights in host memory; other is a function"):
        live.session.reward(lambda completions: [0.0], name="other", offload=True)
    for handle in (stays, reference):
        handle.release()


@pytest.mark.filterwarnings("ignore:actor is replaced")
@pytest.mark.parametrize("mode", ["packed", "shared"])
def test_a_trained_actor_in_host_memory_generates_and_learns_as_one_that_stays(wide, mode):
    """In ``shared`` the rollout has the weights on the same storage: they stay."""
    batch, found = wide.batch(prompt=[[1, 2, 3], [4], [9, 8]], response=[[5, 6], [7, 8, 9], [3]]), []
    for offload in (False, True):
        options = {"train": "dp2", "rollout": "tp2", "cpu_weights": mode, "optimizer": hf.AdamW(lr=1e-3)}
        actor = wide.actor("tiny", **options, offload=offload, replace=True)
        assert measured(actor, OPENINGS)[1] <= 1e-4
        (row,) = actor.update(batch, likelihood).rows
        actor.forward_backward(batch, likelihood).wait()
        norms = [actor.grad_norm]
        assert measured(actor, OPENINGS)[1] <= 1e-4, "it generates with a gradient gathered"
        norms.append(actor.grad_norm)
        actor.step().wait()
        assert measured(actor, OPENINGS)[1] <= 1e-4
        assert norms[0] == norms[1] > 0
        assert min(actor.run(lambda rank: rank._hosted.memory_parts()["weights"])) > 0
        assert (sum(actor.offloaded.values()) > 0) == offload
        found.append([row["loss"], row["grad_norm"], *norms, *actor.compute_log_probs(batch)["old_log_probs"].flat])
    np.testing.assert_allclose(*found, rtol=1e-4)  # an update takes its rows in an order of its own


def test_two_rollout_sizes_in_one_pool_are_refused(live):
    """At the call, in words; a role that failed so is forgotten, and others can be placed."""
    other = live.session.actor("tiny", name="other", train="dp2", rollout="tp2")
    with pytest.raises(hf.LayoutError, match=r"actor \(rollout tp=1\) and other \(rollout tp=2\) share the pool 'all'"):
        other.generate([[1, 2]])
    other.release()
    late = live.session.critic("tiny", name="late")
    assert len(late.compute_values(live.session.batch(prompt=[[1]], response=[[2]]))["values"]) == 1
    late.release()
