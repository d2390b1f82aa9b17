"""LoRA in a session, on real engines: adapters alone are trained, moved, kept and saved; the base is there once and stays."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from system_helpers import OPENINGS, fingerprint, lengths_reward

import hfsdk as hf

RANK = 4


def declared(session, train="tp2", rollout="tp1", **more):
    lora = hf.LoRA(rank=RANK, alpha=16)
    actor = session.actor("tiny", train=train, rollout=rollout, lora=lora, optimizer=hf.AdamW(lr=3e-3), **more)
    critic = session.critic("tiny", train=train, lora=hf.LoRA(rank=2), optimizer=hf.AdamW(lr=3e-3))
    reference = session.reference(actor)
    reward = session.reward(lengths_reward)
    prompts = session.prompts(OPENINGS, batch_size=16, seed=1)
    return SimpleNamespace(session=session, actor=actor, critic=critic, reference=reference, reward=reward, prompts=prompts)


@pytest.fixture(scope="module")
def roles(ray_here):
    with hf.Session(devices=2, seed=5, name="lora") as session:
        roles = declared(session)
        session.place("colocate")
        yield roles


def adapters_alone(rank):
    """Whether every frozen parameter of the model lies where the reference's does, and the names of the others."""
    return sorted(name for name, p in rank.module.named_parameters() if p.requires_grad)


def addresses(rank):
    return {name: p.data_ptr() for name, p in rank.module.named_parameters() if ".adapter." not in name}


def train(roles, steps=2):
    return roles.session.train(hf.PPO(max_new_tokens=8), roles.prompts, steps=steps, progress=False)


def test_a_run_trains_adapters_and_a_scalar_head(roles):
    before = roles.actor.run(fingerprint)
    run = train(roles)
    assert len(run.rows) == 2
    assert all(np.isfinite(row["policy_loss"]) for row in run.rows)
    assert roles.actor.run(fingerprint) != before
    assert all(".adapter." in name for name in roles.actor.run(adapters_alone)[0])
    assert roles.critic.run(adapters_alone)[0][-1] == "output_layer.weight"


def test_the_base_is_there_once_for_all_roles(roles):
    actor, reference = roles.actor.run(addresses), roles.reference.run(addresses)
    assert actor == reference
    for mine, first in zip(roles.critic.run(addresses), actor, strict=True):
        assert {name: at for name, at in mine.items() if name != "output_layer.weight"}.items() <= first.items()
    assert roles.session.memory.to_pandas()["weights_bytes"].max() < 1.4 * roles.actor.spec.num_bytes("fp32") / 2


def test_a_census_counts_adapters_and_whose_base_it_is(roles):
    counted, plan = roles.actor.census(), roles.actor.reshard_plan
    whole = hf.ReshardPlan.between(roles.actor.spec, plan.train, plan.rollout)
    table = counted.to_pandas()
    assert set(counted.base_of) >= {"actor", "critic", "reference"}
    assert table["trainer_bytes"].tolist() == [plan.bytes_held(rank) for rank in range(2)]
    assert table["base_bytes"].tolist() == [whole.bytes_held(rank) for rank in range(2)]
    assert "base shared with critic, reference" in repr(counted)
    assert "LoRA rank 4" in repr(roles.session.placement)


def test_only_adapters_move_and_are_proven(roles):
    roles.actor.generate(roles.prompts[0], max_new_tokens=4).wait()
    report = roles.actor.last_reshard
    spec = roles.actor.role.learned
    assert roles.actor.reshard_plan.spec == spec
    assert report.verified
    assert max(rank.bytes_received + rank.bytes_copied for rank in report.ranks) == spec.num_bytes("fp32")
    assert report.boxes() == {"proven": len(roles.actor.reshard_plan.moves), "unproven": 0, "wrong": 0}


def test_the_rollout_says_what_the_trainer_says(roles):
    batch = roles.actor.generate(roles.prompts[1], max_new_tokens=12)
    batch = roles.actor.compute_log_probs(batch)
    gap = np.abs(batch["rollout_log_probs"].flat - batch["old_log_probs"].flat)
    assert gap.max() < 1e-4
    base = roles.reference.compute_log_probs(roles.actor.generate(roles.prompts[1], max_new_tokens=12, adapter=None))
    assert np.abs(base["rollout_log_probs"].flat - base["ref_log_probs"].flat).max() < 1e-4, "the base alone is the reference"
    assert set(base["policy_version"]) == {-1}


def test_adapters_of_a_snapshot_generate_beside_those_of_now(roles):
    greedy = {"max_new_tokens": 12, "temperature": 0}
    snapshot = roles.session.snapshot("before")
    then = roles.actor.generate(roles.prompts[2], **greedy)
    scored = roles.actor.compute_log_probs(then)["old_log_probs"].flat
    train(roles, 1)
    now = roles.actor.compute_log_probs(roles.actor.generate(roles.prompts[2], **greedy))
    assert not np.array_equal(now["rollout_log_probs"].flat, then["rollout_log_probs"].flat)
    for adapter in (snapshot, "before"):
        again = roles.actor.generate(roles.prompts[2], **greedy, adapter=adapter)
        assert np.array_equal(again["response"].flat, then["response"].flat)
        np.testing.assert_allclose(again["rollout_log_probs"].flat, scored, atol=1e-4)
        assert set(again["policy_version"]) == set(then["policy_version"])
    after = roles.actor.generate(roles.prompts[2], **greedy)
    assert np.array_equal(after["rollout_log_probs"].flat, now["rollout_log_probs"].flat), "slot 0 is as it was"
    roles.session.forget(snapshot)


def test_rewind_gives_adapters_back_bit_for_bit(roles):
    snapshot, before = roles.session.snapshot(), [handle.run(fingerprint) for handle in (roles.actor, roles.critic)]
    moved = snapshot.to_pandas()
    train(roles, 1)
    roles.session.rewind(snapshot)
    assert [handle.run(fingerprint) for handle in (roles.actor, roles.critic)] == before
    state = roles.actor.role.learned.num_parameters() * 4 * 3
    assert moved[moved["role"] == "actor"]["bytes"].sum() < 1.5 * state, "no base in it"


def test_a_save_is_loaded_in_another_layout_and_not_by_other_adapters(roles, tmp_path, ray_here):
    roles.session.save(tmp_path / "save")
    size = sum(file.stat().st_size for file in (tmp_path / "save").rglob("*") if file.is_file())
    assert size < 4e6
    with hf.Session(devices=2, seed=5, name="lora again") as session:
        again = declared(session, train="dp2", rollout="tp2")
        session.load(tmp_path / "save")
        assert again.actor.version == roles.actor.version
        generated = again.actor.compute_log_probs(again.actor.generate(again.prompts[0], max_new_tokens=8, temperature=1.0))
        assert np.abs(generated["rollout_log_probs"].flat - generated["old_log_probs"].flat).max() < 1e-4
        again.actor.save_pretrained(tmp_path / "again")
        roles.actor.save_pretrained(tmp_path / "first")
    from safetensors.numpy import load_file

    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "again"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_what_is_saved_goes_on_as_adapters_and_merged(roles, tmp_path):
    roles.actor.save_pretrained(tmp_path / "adapters")
    roles.actor.save_pretrained(tmp_path / "merged", merge=True)
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, 16, "LORA")
    session = roles.session
    batch = roles.actor.compute_log_probs(roles.actor.generate(roles.prompts[0], max_new_tokens=8))
    for name, reference in (
        ("ref merged", session.reference(tmp_path / "merged", name="ref_merged")),
        ("ref adapters", session.reference("tiny", lora=str(tmp_path / "adapters"), name="ref_adapters")),
    ):
        scored = reference.compute_log_probs(batch)
        np.testing.assert_allclose(scored["ref_log_probs"].flat, batch["old_log_probs"].flat, atol=1e-4, err_msg=name)
        reference.release()


def test_bad_questions_are_told(roles, tmp_path):
    with pytest.raises(hf.OptionError, match="there is no snapshot 'nothing'"):
        roles.actor.generate(roles.prompts[0], adapter="nothing")
    with pytest.raises(hf.OptionError, match="give it an optimizer too"):
        roles.session.reward("tiny", lora=hf.LoRA(), name="judge")
    with pytest.raises(hf.ModelNotFoundError, match="adapter_config"):
        roles.session.actor("tiny", lora=tmp_path, name="other")


def test_a_judge_goes_on_with_the_head_that_was_saved_beside_its_adapters(roles, tmp_path):
    """And without a warning that it has none; an actor's adapters have none."""
    session = roles.session
    judge = session.reward("tiny", lora=hf.LoRA(rank=2), optimizer=hf.AdamW(lr=1e-2), name="judge")
    pairs = session.pairs(hf.data.review_pairs("train", 20), batch_size=4, max_tokens=32)
    judge.update(pairs[0], hf.BradleyTerry(), epochs=2).wait()
    scores = judge.compute_scores(pairs[0])["scores"]
    judge.save_pretrained(tmp_path / "judge")
    for name, more in (("frozen", {}), ("trained", {"optimizer": hf.AdamW(lr=1e-2)})):
        again = session.reward("tiny", lora=tmp_path / "judge", name=name, **more)
        np.testing.assert_allclose(again.compute_scores(pairs[0])["scores"], scores, atol=1e-5, err_msg=name)
        again.release()
    judge.release()
    roles.actor.save_pretrained(tmp_path / "actor")
    with pytest.warns(UserWarning, match="random: tiny has no trained scalar head"):
        session.reward("tiny", lora=tmp_path / "actor", name="random").release()
