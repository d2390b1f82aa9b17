"""Seeded means repeatable; saved means the next step is the same, bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest
from edited_saves import save_of
from system_helpers import fingerprint, outcome, ppo_step

import hfsdk as hf
from hfsdk.session.run_record import MEASURED


@pytest.mark.slow
def test_two_sessions_with_one_seed_are_bit_equal(live, twin):
    """The first step of each: samples, columns and metrics of both updates."""
    columns, critic, actor = live.first
    again, critic_again, actor_again = twin.first
    assert {n for n in columns if columns[n] != again[n]} == set()
    assert critic == critic_again
    assert actor == actor_again


@pytest.mark.slow
def test_a_saved_step_goes_on_bit_equal_elsewhere(live, twin, tmp_path):
    """Save here, take a step here and there: the same numbers, then the same weights."""
    live.session.save(tmp_path)
    step = outcome(ppo_step(live, 3))
    weights = [role.run(fingerprint) for role in (live.actor, live.critic)]
    twin.session.load(tmp_path)
    assert twin.actor.version == weights[0][0][0] - 2
    there = outcome(ppo_step(twin, 3))
    assert {n for n in step[0] if step[0][n] != there[0][n]} == set()
    assert step[1:] == there[1:]
    assert [role.run(fingerprint) for role in (twin.actor, twin.critic)] == weights


@pytest.mark.slow
def test_training_resumes_as_if_it_had_not_stopped(live, twin, tmp_path):
    def train(roles, steps, **options):
        run = roles.session.train(hf.PPO(max_new_tokens=8), roles.prompts, steps=steps, progress=False, **options)
        return [{k: v for k, v in row.items() if k not in MEASURED} for row in run.rows]

    first = train(live, 2, save_every=1, folder=tmp_path)
    _, state = save_of(tmp_path)
    assert list(tmp_path.glob("state-*")) == [state], "only the last save is kept"
    uninterrupted = train(live, 2)
    assert [row["step"] for row in first + uninterrupted] == list(range(first[0]["step"], first[0]["step"] + 4))
    assert train(twin, 2, resume=tmp_path) == uninterrupted
    assert twin.prompts.position == live.prompts.position


def test_measuring_the_kl_changes_nothing_that_is_learned(live):
    """At ``kl_coef=0`` one step with the reference and one without, from the same weights: bit-equal but for ``kl_mean``."""
    session, algorithm, found = live.session, hf.PPO(max_new_tokens=8, kl_coef=0.0), []
    before = session.snapshot("before measuring")
    without = SimpleNamespace(actor=live.actor, critic=live.critic, reward=session.models.reward)
    for models in (session.models, without):
        step = algorithm.step(models, live.prompts[5])
        numbers = algorithm.metrics(step)
        assert ("kl_mean" in numbers) == (models is not without)
        numbers.pop("kl_mean", None)
        found.append((numbers, [role.run(fingerprint) for role in (live.actor, live.critic)]))
        session.rewind(before)
    session.forget(before)
    assert found[0] == found[1]


def test_the_seed_makes_the_sample(live):
    def sample(**options):
        batch = live.actor.generate(live.prompts[0], max_new_tokens=8, **options)
        return [tuple(row) for row in batch["response"]]

    one = sample(seed=1)
    assert sample(seed=1) == one
    assert sample(seed=2) != one
    three = sample(seed=1, n=3)
    assert three[::3] == one, "copy 0 of three is the only copy of one"
    assert sum(len(set(three[i : i + 3])) for i in range(0, 48, 3)) > 40, "copies differ"
    rows = [11, 2, 7]
    some = live.actor.generate(live.prompts[0].take(rows), max_new_tokens=8, seed=1)
    assert [tuple(row) for row in some["response"]] == [one[row] for row in rows], "not the place in the batch, nor the rank"


def test_prompts_repeat(live):
    first, second = live.prompts[0], live.prompts[1]
    assert live.prompts[0]["prompt"] == first["prompt"]
    assert live.prompts[1]["prompt"] != first["prompt"]
    assert list(second["position"]) == list(range(16, 32))
    position = live.prompts.position
    assert next(live.prompts)["prompt"] == live.prompts[position]["prompt"]
    assert live.prompts.position == position + 1
    live.prompts.position = position
    other = live.session.prompts([f"prompt {i}" for i in range(40)], batch_size=16, seed=2)
    again = live.session.prompts([f"prompt {i}" for i in range(40)], batch_size=16, seed=2)
    third = live.session.prompts([f"prompt {i}" for i in range(40)], batch_size=16, seed=9)
    assert other[0]["prompt"] == again[0]["prompt"]
    assert other[0]["prompt"] != third[0]["prompt"]


def test_saved_model_loads_in_transformers(live, tmp_path):
    """Its logits give the trainer's log-probs; its own session goes on from it."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ppo_step(live).actor.wait()
    folder = live.actor.save_pretrained(str(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = live.actor.compute_log_probs(live.actor.generate(live.prompts[0], max_new_tokens=8))
    table = batch.table("prompt", "response", "old_log_probs")
    worst = 0.0
    for prompt, response, wanted in zip(*(table[n] for n in ("prompt", "response", "old_log_probs")), strict=True):
        tokens = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        mine = logits.gather(-1, torch.tensor(response.tolist())[:, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(mine - wanted).max()))
    assert worst <= 1e-4
    assert AutoTokenizer.from_pretrained(folder).decode(table["response"][0].tolist(), skip_special_tokens=True) == batch.text()[0]
    copy = live.session.reference(folder, name="copy")
    same = copy.compute_log_probs(batch)
    assert np.abs(same["ref_log_probs"].flat - table["old_log_probs"].flat).max() <= 1e-5
    copy.release()


def test_checkpoint_of_something_else_is_refused(live, tmp_path):
    with pytest.raises(hf.CheckpointError, match="no checkpoint"):
        live.session.load(tmp_path)
    live.session.save(tmp_path)
    save, state = save_of(tmp_path)
    name = next(iter(save["files"]))
    weights = live.actor.run(fingerprint)
    (state / name).write_bytes(b"cut off")
    with pytest.raises(hf.CheckpointError, match="damaged"):
        live.session.load(tmp_path)
    assert live.actor.run(fingerprint) == weights
