"""LoRA in a session, on real engines: adapters alone are trained, moved and kept; the base is there once and stays."""

import numpy as np
import pytest
from system_helpers import declare_lora, fingerprint

import hfsdk as hf


@pytest.fixture(scope="module")
def roles(ray_here):
    with hf.Session(devices=2, seed=5, name="lora") as session:
        roles = declare_lora(session)
        session.place("colocate")
        yield roles


def train(roles, steps):
    return roles.session.train(hf.PPO(max_new_tokens=8), roles.prompts, steps=steps, progress=False)


def trained_names(rank):
    return sorted(name for name, p in rank.module.named_parameters() if p.requires_grad)


def addresses(rank):
    """Where each parameter of the base lies."""
    return {name: p.data_ptr() for name, p in rank.module.named_parameters() if ".adapter." not in name}


def test_a_run_trains_and_moves_adapters_alone_over_one_base(roles):
    actor, reference, critic, before = roles.actor, roles.reference, roles.critic, roles.actor.run(fingerprint)
    run = train(roles, 2)
    assert all(np.isfinite(row["policy_loss"]) for row in run.rows)
    assert actor.run(fingerprint) != before
    assert all(".adapter." in name for name in actor.run(trained_names)[0])
    assert critic.run(trained_names)[0][-1] == "output_layer.weight"
    base = actor.run(addresses)
    assert base == reference.run(addresses)
    for mine, first in zip(critic.run(addresses), base, strict=True):
        assert {name: at for name, at in mine.items() if name != "output_layer.weight"}.items() <= first.items()

    batch = actor.compute_log_probs(actor.generate(roles.prompts[1], max_new_tokens=12))
    report, spec = actor.last_reshard, actor.role.learned
    assert actor.reshard_plan.spec == spec
    assert report.verified
    assert max(rank.bytes_received + rank.bytes_copied for rank in report.ranks) == spec.num_bytes("fp32")
    assert report.boxes() == {"proven": len(actor.reshard_plan.moves), "unproven": 0, "wrong": 0}
    assert np.abs(batch["rollout_log_probs"].flat - batch["old_log_probs"].flat).max() < 1e-4
    alone = reference.compute_log_probs(actor.generate(roles.prompts[1], max_new_tokens=12, adapter=None))
    assert np.abs(alone["rollout_log_probs"].flat - alone["ref_log_probs"].flat).max() < 1e-4, "the base alone is the reference"
    assert set(alone["policy_version"]) == {-1}


def test_adapters_of_a_snapshot_generate_beside_those_of_now_and_come_back(roles):
    actor, greedy = roles.actor, {"max_new_tokens": 12, "temperature": 0}
    snapshot, before = roles.session.snapshot("before"), [handle.run(fingerprint) for handle in (roles.actor, roles.critic)]
    moved, state = snapshot.to_pandas(), actor.role.learned.num_parameters() * 4 * 3
    assert moved[moved["role"] == "actor"]["bytes"].sum() < 1.5 * state, "no base in it"
    then = actor.generate(roles.prompts[2], **greedy)
    scored = actor.compute_log_probs(then)["old_log_probs"].flat
    train(roles, 1)
    now = actor.compute_log_probs(actor.generate(roles.prompts[2], **greedy))
    assert not np.array_equal(now["rollout_log_probs"].flat, then["rollout_log_probs"].flat)
    again = actor.generate(roles.prompts[2], **greedy, adapter=snapshot)
    assert np.array_equal(again["response"].flat, then["response"].flat)
    np.testing.assert_allclose(again["rollout_log_probs"].flat, scored, atol=1e-4)
    assert set(again["policy_version"]) == set(then["policy_version"])
    after = actor.generate(roles.prompts[2], **greedy)
    assert np.array_equal(after["rollout_log_probs"].flat, now["rollout_log_probs"].flat), "slot 0 is as it was"
    roles.session.rewind(snapshot)
    assert [handle.run(fingerprint) for handle in (roles.actor, roles.critic)] == before
    roles.session.forget(snapshot)
