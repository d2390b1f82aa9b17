"""What the system tests share beside the sessions of ``tests/conftest.py``: another reward for a while, a session that splits."""

import contextlib
from types import SimpleNamespace

import pytest
from first_bad_helpers import see_failures
from system_helpers import OPENINGS, lengths_reward


@pytest.fixture
def give_reward(live):
    """``give_reward(function, **options)``: another reward function for the shared session; its own comes back."""
    yield live.session.reward
    live.session.reward(lengths_reward)


@pytest.fixture(scope="session")
def four(ray_here):
    """Four devices with PPO's roles, which tests place as they need them; the reference and the critic are where they like."""
    import hfsdk as hf

    with hf.Session(devices=4, seed=3, name="four") as session:
        actor = session.actor("tiny", rollout="tp1", optimizer=hf.AdamW(lr=1e-3))
        session.critic("tiny", optimizer=hf.AdamW(lr=1e-3))
        session.reference(actor)
        session.reward(lengths_reward)
        yield session


@pytest.fixture(scope="session")
def sharded(ray_here):
    """Two devices whose actors are trained in tensor-parallel halves and generate whole: declared by the tests."""
    import hfsdk as hf

    with hf.Session(devices=2, seed=3, name="sharded") as session:
        yield session


@pytest.fixture
def planted(live):
    """``planted(what, step, reward)``: a run in whose step that is planted, on the shared session, which goes back afterwards."""
    import hfsdk as hf
    from benchmarks.why_parts.planted_runs import Planted, lengths, prompts

    start = live.session.snapshot("before what is planted")

    def run(what, step, reward=lengths):
        live.session.reward(reward)
        before = live.actor.version
        with contextlib.suppress(hf.HfsdkError):
            live.session.train(Planted(what), prompts(live.session, OPENINGS, step), steps=step + 2, progress=False)
        see_failures(live)
        updates = live.actor.version - before
        return SimpleNamespace(session=live.session, run=live.session.run, actor=live.actor, critic=live.critic, updates=updates)

    yield run
    see_failures(live)
    live.session.rewind(start)
    live.session.forget(start)
