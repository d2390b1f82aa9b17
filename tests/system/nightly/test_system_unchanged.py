"""What leaves a step as it was: measuring the KL, and a model that is saved for transformers."""

from types import SimpleNamespace

import numpy as np
import pytest
from system_helpers import fingerprint, ppo_step

import hfsdk as hf


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
