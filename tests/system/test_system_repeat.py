"""Seeded means repeatable; saved means the next step is the same, bit for bit."""

from edited_saves import save_of
from system_helpers import fingerprint, outcome, ppo_step

import hfsdk as hf
from hfsdk.run.run import MEASURED


def test_two_sessions_with_one_seed_are_bit_equal(live, twin):
    """The first step of each: samples, columns and metrics of both updates."""
    columns, critic, actor = live.first
    again, critic_again, actor_again = twin.first
    assert {n for n in columns if columns[n] != again[n]} == set()
    assert critic == critic_again
    assert actor == actor_again


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
