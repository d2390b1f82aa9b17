"""A plan made and applied on a real session: what it says is where the roles then are, and a step runs there."""

import pytest
from system_helpers import OPENINGS, lengths_reward

import hfsdk as hf


@pytest.fixture(scope="module")
def session(ray_here):
    with hf.Session(devices=2, seed=3, name="plan") as session:
        actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-4))
        session.critic("tiny", optimizer=hf.AdamW(lr=1e-4))
        session.reference(actor)
        session.reward(lengths_reward)
        yield session


WORKLOAD = hf.Workload(prompts=16, prompt_tokens=16, response_tokens=8)


def step(session):
    prompts = session.prompts(OPENINGS, batch_size=16, seed=1)
    made = hf.PPO(max_new_tokens=8).step(session.models, prompts[0])
    return [*made.critic.rows, *made.actor.rows]


def layouts_of(session):
    return {h.name: h.layouts for h in session.roles if h.spec is not None}


def test_a_plan_is_placed_and_a_step_runs(session):
    assert session.cluster.intra_node.name == "shared memory"  # what it costs to move things is this machine's, not NVLink's
    plan = session.plan(hf.PPO(), WORKLOAD)
    session.place(plan)
    for name, layouts in layouts_of(session).items():
        assert layouts["train"] == plan.layouts[name]["train"]
        assert session.placement.view()["pools"]
    assert plan.layouts["actor"].get("rollout", layouts_of(session)["actor"]["rollout"]) == layouts_of(session)["actor"]["rollout"]
    rows = step(session)
    assert all(row["loss"] == row["loss"] for row in rows)
    comparison = session.trace.compare(plan.trace)
    assert {row.call for row in comparison.rows if row.other_s is not None} >= {"actor.generate", "actor.update", "critic.update"}


def test_each_runner_up_can_be_placed(session):
    """Moved there with what was learned; the next step runs."""
    from dataclasses import replace

    plan = session.plan(hf.PPO(), WORKLOAD, top=3, shadows=False)
    for other in plan.runners_up:
        before = session.roles[0].version
        session.place(replace(plan, best=other))
        assert layouts_of(session)["actor"]["train"] == other.layouts["actor"]["train"]
        step(session)
        assert session.roles[0].version == before + 2
