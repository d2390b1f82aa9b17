"""Weights that travel to a shadow on another pool: by the plan, byte for byte, bit for bit the trained ones, and once."""

import pytest
from expect import refuses
from shadow_helpers import PROMPTS, check_by_plan, check_weights
from system_helpers import gap, likelihood

import hfsdk as hf


@pytest.fixture
def halves(four):
    """An actor trained in two halves, whose shadow generates whole on a device of its own."""
    actor = four.actor("tiny", name="halves", train="tp2", rollout="tp1", cpu_weights="shared", optimizer=hf.AdamW(lr=1e-3))
    four.place({"actor reference critic": 1, "halves": 2, "halves.rollout": 1})
    yield actor
    actor.release()


def transfers(session):
    """How often weights left their pool."""
    return sum(span.method == "export_weights" for span in session.trace[:].calls)


def test_a_shadow_has_the_trained_weights_bit_for_bit_and_gets_them_once(four, ray_here, halves):
    with refuses(hf.OptionError, "halves", "have not moved", "halves.generate"):
        halves.last_reshard  # noqa: B018 - the property raises
    for learned in range(2):
        before = transfers(four)
        batches = [halves.generate(PROMPTS, max_new_tokens=6, seed=seed) for seed in range(3)]  # at once: they share a transfer
        assert [set(batch["policy_version"]) for batch in batches] == [{learned}] * 3
        halves.generate(PROMPTS, max_new_tokens=6).wait()
        assert transfers(four) == before + 1
        batch = halves.compute_log_probs(batches[0])
        assert gap(batch) <= 1e-4
        full = check_weights(four, ray_here, halves, [3])
        kept = check_by_plan(four, halves, 2, 1)
        assert kept == sum(whole.nbytes for whole in full.values()), "one copy of the weights, every box from one holder"
        halves.update(batch, likelihood).wait()
