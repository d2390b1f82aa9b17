"""Snapshots beside a step: comparisons, shares of a distributed optimizer, roles that are no longer those of the snapshot."""

import numpy as np
import pytest
from system_helpers import OPENINGS, fingerprint, ppo_step, same_state, state_of

import hfsdk as hf
from hfsdk.run.run import MEASURED


def weights(roles):
    return [role.run(fingerprint) for role in (roles.actor, roles.critic)]


def test_compare_gives_the_same_numbers_again_and_comes_back(live):
    before, place = weights(live), live.prompts.position
    named = {"PPO": hf.PPO(max_new_tokens=8, mini_batches=2), "RLOO": hf.RLOO(max_new_tokens=8, n=2)}

    def numbers():
        experiment = live.session.compare(named, live.prompts, steps=2, seeds=[0, 1], progress=False)
        return [{k: v for k, v in row.items() if k not in MEASURED} for row in experiment.rows]

    first = numbers()
    assert {(row["algorithm"], row["seed"]) for row in first} == {(name, seed) for name in named for seed in (0, 1)}
    assert first[0]["entropy"] != first[2]["entropy"], "another seed samples other responses"
    assert numbers() == first
    assert weights(live) == before
    assert live.prompts.position == place


def test_shares_of_a_distributed_optimizer_come_back_here_and_elsewhere(ray_here, tmp_path):
    """Nothing of it is gathered: each worker keeps and writes what it steps."""
    with hf.Session(devices=2, seed=3, name="shared out") as session:
        actor = session.actor("tiny", optimizer=hf.AdamW(lr=3e-4, distributed=True))
        session.place({"actor": 2})
        prompts = session.prompts(OPENINGS, batch_size=8, seed=1)

        def step():
            batch = actor.generate(prompts[0], max_new_tokens=4)
            batch = actor.compute_log_probs(batch)
            return actor.update(batch, policy_loss_of_nothing, mini_batches=2).wait().rows

        step()
        before, state = session.snapshot("before"), state_of(actor)
        session.save(tmp_path)
        files = sorted(path.stat().st_size for path in (tmp_path / "state-1" / "actor").glob("*.distcp"))
        assert len(files) == 2
        assert files[1] <= 1.1 * files[0], "both write, and about as much"
        rows = before.to_pandas()
        numbers = sum(int(np.prod(shape)) for shape in actor.run(lambda rank: rank.parameters())[0].values())
        assert rows["bytes"].sum() == 12 * numbers
        assert rows["bytes"].max() <= 1.05 * rows["bytes"].mean()
        first = step()
        session.rewind(before)
        assert same_state(state_of(actor), state)
        assert step() == first
        session.load(tmp_path)
        assert same_state(state_of(actor), state)
        assert step() == first
        session.place({"actor": 1})
        session.rewind(before)
        assert same_state(state_of(actor), state), "in another layout, from both workers' pieces"


def policy_loss_of_nothing(out, b):
    return -out.log_probs * 1e-2


@pytest.mark.filterwarnings("ignore:critic is replaced")
def test_what_cannot_be_gone_back_to_is_refused_before_anything_changes(twin):
    session = twin.session
    before = session.snapshot("with all")
    ppo_step(twin, 1).actor.wait()
    updates, place, branch = twin.actor.version, twin.prompts.position, session.branch
    twin.reference.release()
    with pytest.raises(hf.OptionError, match="reference, which was released since; nothing was changed"):
        session.rewind(before)
    twin.reference = session.reference(twin.actor)
    extra = session.critic("tiny", name="second", train="tp2")
    with pytest.raises(hf.OptionError, match="has no second, which was declared after it"):
        session.rewind(before)
    extra.release()
    with pytest.raises(hf.OptionError, match=r"critic has had \d+ updates?, .*lr=suggested -> lr=0.005.*replace=True"):
        session.critic("tiny", train="tp2", optimizer=hf.AdamW(lr=5e-3))
    session.critic("tiny", train="tp2", optimizer=hf.AdamW(lr=5e-3), replace=True)
    with pytest.raises(hf.OptionError, match=r"another critic, which was replaced since \(optimizer lr=suggested -> lr=0.005\)"):
        session.rewind(before)
    with pytest.raises(hf.OptionError, match="there is no snapshot 'after'; the session has 'with all'"):
        session.rewind("after")
    assert (twin.actor.version, twin.prompts.position, session.branch) == (updates, place, branch)
    twin.critic = session.critic("tiny", train="tp2", optimizer=hf.AdamW())
    with pytest.raises(hf.CheckpointError, match="let go"):
        session.rewind(_forgotten(session))
    session.rewind(before)
    assert twin.actor.version == before.kept[0].num_updates
    ppo_step(twin, 1).actor.wait()


def _forgotten(session):
    gone = session.snapshot("gone")
    session.actor("tiny", train="dp2", rollout="tp1", optimizer=hf.AdamW(lr=3e-4)).run(lambda rank: None)
    other = session.snapshot("other")
    session.forget(gone)
    session.forget(other)
    return gone
