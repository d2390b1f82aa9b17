"""``Session(deterministic=True)`` on processors: nothing to do, and the same numbers as without."""

import numpy as np

import hfsdk as hf


def look(rank):
    import os

    import torch

    named = [name for name in os.environ if name.startswith(("NCCL_", "CUBLAS_")) or name == "VLLM_BATCH_INVARIANT"]
    return named, torch.are_deterministic_algorithms_enabled()


def step(**options):
    """Take an optimizer step on what was generated; return what the workers say, and numbers from before and after."""
    with hf.Session(devices=1, seed=3, **options) as session:
        actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-3))
        prompts = session.prompts(["a film", "one more"], batch_size=2)
        batch = actor.generate(prompts[0], max_new_tokens=6)
        actor.update(batch, lambda out, b: -out.log_probs)
        after = actor.compute_log_probs(batch)
        return actor.run(look), np.concatenate(list(batch["response"])), np.concatenate(list(after["old_log_probs"]))


def test_on_processors_the_deterministic_mode_changes_nothing(ray_here):
    seen, response, log_probs = step(deterministic=True)
    plain, same_response, same_log_probs = step()
    assert seen == plain == [([], False)]
    assert response.tolist() == same_response.tolist()
    assert log_probs.tobytes() == same_log_probs.tobytes()
