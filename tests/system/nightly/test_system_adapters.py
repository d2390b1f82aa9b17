"""Adapters that are saved and loaded in another layout, counted, merged, and beside a scalar head."""

import json

import numpy as np
import pytest
from system_helpers import declare_lora

import hfsdk as hf


@pytest.fixture(scope="module")
def roles(ray_here):
    with hf.Session(devices=2, seed=5, name="lora") as session:
        roles = declare_lora(session)
        session.place("colocate")
        yield roles


def train(roles, steps=2):
    return roles.session.train(hf.PPO(max_new_tokens=8), roles.prompts, steps=steps, progress=False)


def test_a_census_counts_adapters_and_whose_base_it_is(roles):
    counted, plan = roles.actor.census(), roles.actor.reshard_plan
    whole = hf.ReshardPlan.between(roles.actor.spec, plan.train, plan.rollout)
    table = counted.to_pandas()
    assert set(counted.base_of) >= {"actor", "critic", "reference"}
    assert table["trainer_bytes"].tolist() == [plan.bytes_held(rank) for rank in range(2)]
    assert table["base_bytes"].tolist() == [whole.bytes_held(rank) for rank in range(2)]
    assert "base shared with critic, reference" in repr(counted)
    assert "LoRA rank 4" in repr(roles.session.placement)


def test_a_save_is_loaded_in_another_layout_and_not_by_other_adapters(roles, tmp_path, ray_here):
    roles.session.save(tmp_path / "save")
    size = sum(file.stat().st_size for file in (tmp_path / "save").rglob("*") if file.is_file())
    assert size < 4e6
    with hf.Session(devices=2, seed=5, name="lora again") as session:
        again = declare_lora(session, train="dp2", rollout="tp2")
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
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 16, "LORA")
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
