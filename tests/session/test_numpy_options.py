"""Numbers of numpy are options as Python's are: a sweep over ``np.linspace`` runs."""

from __future__ import annotations

import numpy as np
import pytest
from expect import each

import hfsdk as hf


def score(prompts, completions, **columns):
    return [0.0] * len(completions)


@pytest.fixture(scope="module")
def session():
    with hf.Session.simulated("1x8 A100-80GB") as made:
        actor = made.actor("tiny")
        made.critic("tiny")
        made.critic("tiny", name="cost_critic")
        made.reference(actor)
        made.reward(score)
        made.cost(score)
        made.place("colocate")
        yield made


@each("algorithm", [hf.PPO, hf.GRPO, hf.RLOO, hf.ReMax, hf.ReinforcePlusPlus, hf.SafeRLHF])
def test_a_step_takes_options_of_numpy(session, algorithm):
    prompts = session.prompts([[1, 2, 3]] * 4, batch_size=2)
    options = {"kl_coef": np.float64(0.05), "epochs": np.int64(1), "max_new_tokens": np.int32(4), "clip": np.float32(0.25)}
    made = algorithm(**options)
    assert [type(getattr(made, name)) for name in options] == [float, int, int, float]
    step = made.step(session.models, prompts[0]).actor.wait()
    assert step.done


def test_an_argument_takes_a_truth_value_of_numpy(session):
    batch = session.models.actor.generate([[1, 2]], max_new_tokens=np.int64(2), temperature=np.float64(1.0))
    assert "entropy" in session.models.actor.compute_log_probs(batch, entropy=np.True_)
    assert "entropy" not in session.models.actor.compute_log_probs(batch, entropy=np.False_)
