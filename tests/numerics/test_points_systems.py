"""Points 37 to 40 of docs/checklist.md on the real engines."""

import numpy as np
from numerics_helpers import FP32
from system_helpers import OPENINGS, gap, ppo_batch, ppo_step

import hfsdk as hf
from hfsdk.algorithms import ppo


def test_point_37_every_rollout_carries_the_version_of_its_weights(live):
    first = live.actor.generate(OPENINGS, max_new_tokens=4).wait()
    before = live.actor.version
    assert set(first["policy_version"]) == {before}
    ppo_step(live).actor.wait()
    assert live.actor.version == before + 2
    fresh = live.actor.generate(OPENINGS, max_new_tokens=4)
    assert set(fresh["policy_version"]) == {before + 2}
    assert gap(live.actor.compute_log_probs(fresh)) < FP32, "they are what the new weights say"
    stale = live.actor.compute_log_probs(first)
    assert set(stale["policy_version"]) == {before}, "how old the samples are stays visible"
    assert gap(stale) > 1e-3


def test_point_38_the_prefix_cache_is_emptied_when_the_weights_change(live):
    """Prompts of several cache blocks, asked for again: from the cache as long as the weights stand, never from older weights."""
    long = [[*f"{i} ".encode(), *(b"the film is a warm and funny one , and it never quite ends ; " * 3)] for i in range(4)]

    def drawn():
        return live.actor.compute_log_probs(live.actor.generate(long, max_new_tokens=4, temperature=0))

    first, again = drawn(), drawn()
    assert first["rollout_log_probs"] == again["rollout_log_probs"]
    live.actor.update(ppo_batch(live), ppo.PolicyLoss(), epochs=4).wait()
    after = drawn()
    assert gap(after) < FP32
    same = live.actor.compute_log_probs(first)
    assert gap(same) > 1e-3, "the update must be large enough for older keys and values to be seen"


def test_point_39_where_offloaded_state_is(live):
    """On the handle, in the placement and on the timeline: bytes in host memory now, none of them while a call needs them."""
    batch = live.session.batch(prompt=[[1, 2, 3], [4]], response=[[5, 6], [7, 8, 9]])
    batch = batch.with_columns(returns=[[1.0, 2.0], [0.0, 1.0, 2.0]], values=[[0.0] * 2, [0.0] * 3])
    away = live.session.reference("tiny", name="away", offload=True)
    thrifty = live.session.critic("tiny", name="thrifty", train="dp2", optimizer=hf.AdamW(offload=True))
    try:
        away.compute_log_probs(batch).wait()
        thrifty.update(batch, ppo.ValueLoss()).wait()
        weights = 4 * sum(int(np.prod(s)) for s in away.run(lambda rank: rank.parameters())[0].values())
        assert away.offloaded == {0: weights, 1: weights}
        assert away.memory == {0: 0, 1: 0}
        moments = thrifty.offloaded[0]
        assert moments == thrifty.offloaded[1] > 1.9 * weights
        assert set(thrifty.memory.values()) != {0}
        assert live.reference.offloaded == {}
        assert "weights in host memory" in repr(away)
        assert "optimizer in host memory" in repr(thrifty)
        assert "in host memory" not in repr(live.reference)
        (line,) = [line for line in repr(live.session.placement).splitlines() if line.strip().startswith("away:")]
        assert "0.01 GB in host memory now" in line
        table = live.session.placement.to_pandas().set_index("role")
        assert table.loc["away", "offloaded_bytes"].tolist() == [weights] * 2
        assert table.loc["reference", "offloaded_bytes"].isna().all()
        inside = away.run(lambda rank: rank._hosted.offloaded_bytes())
        assert inside == [0, 0], "during its own call it is on the device"
        spans = live.session.trace.to_pandas().query("name in ('onload', 'offload')")
        assert {"away", "thrifty"} <= set(spans["role"])
    finally:
        away.release()
        thrifty.release()


def test_point_40_the_numbers_to_watch_are_in_every_row_of_training(live):
    run = live.session.train(hf.PPO(max_new_tokens=8), live.prompts, steps=1, progress=False)
    wanted = {
        "policy_loss", "value_loss", "entropy", "clip_fraction", "approx_kl", "explained_variance", "response_tokens_mean",
        "eos_rate", "kl_mean", "score_mean", "rollout_gap_max", "ratio_max", "actor_grad_norm", "actor_lr", "critic_lr",
    }  # fmt: skip
    row = run.rows[0]
    assert wanted - set(row) == set()
    assert all(np.isfinite(number) for number in row.values() if isinstance(number, float))
