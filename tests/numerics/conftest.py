"""The engine that the points are looked at on: the shared session of the system tests, and plain transformers beside it."""

import numpy as np
import pytest
from numerics_helpers import Judge, Plain

import hfsdk as hf


@pytest.fixture(scope="session")
def plain(live):
    """The initial weights of ``tiny`` in transformers: one row at a time, nothing padded."""
    return Plain(live.reference.role.folder)


@pytest.fixture(scope="module")
def judge(live, tmp_path_factory):
    """A reward model and a critic of one folder whose scalar head is random, and the same in transformers."""
    folder = tmp_path_factory.mktemp("judge")
    found = Judge(live.reference.role.folder, folder)
    found.reward = live.session.reward(folder, name="judge")
    optimizer = hf.AdamW(lr=0.0, eps=1e-3, max_grad_norm=0.05)
    found.critic = live.session.critic(folder, train="dp2", name="judge_critic", optimizer=optimizer, micro_batch_tokens=50)
    yield found
    found.reward.release()
    found.critic.release()


@pytest.fixture(scope="session")
def rows():
    """Prompts and responses of very different lengths and of any tokens; the last has special ones alone."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, n).tolist() for n in (1, 40, 3, 17, 5, 9)]
    responses = [rng.integers(0, 256, n).tolist() for n in (7, 1, 30, 4, 2)] + [[258, 256, 257, 258]]
    return {"prompt": prompts, "response": responses}
