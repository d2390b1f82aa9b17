"""A run that goes on after the death of a worker ends where it would have ended: weights and numbers, bit for bit."""

import os
import signal
import threading

import pytest
from expect import until
from system_helpers import OPENINGS, fingerprint, lengths_reward, pids, working

import hfsdk as hf
from hfsdk.run.run import MEASURED


def killer(session, after):
    """Kill a worker once after each of these numbers of steps, while a call runs."""
    for which, rows in enumerate(after):
        until(f"step {rows}", lambda rows=rows: session.run is not None and len(session.run.rows) >= rows and working(session))
        os.kill(pids(session)[which % 2], signal.SIGKILL)
        until("the restore", lambda which=which: len(session.run.restores) > which)


def trained(folder, after, **options):
    with hf.Session(devices=2, name="goes-on") as session:
        actor = session.actor("tiny", train="dp2", optimizer=hf.AdamW(lr=3e-4))
        session.critic("tiny", train="tp2", optimizer=hf.AdamW(lr=1e-3))
        session.reference(actor)
        session.reward(lengths_reward)
        session.place("colocate")
        prompts = session.prompts(OPENINGS, batch_size=8, seed=1)
        kills = threading.Thread(target=killer, args=(session, after), daemon=True)
        kills.start()
        run = session.train(hf.PPO(max_new_tokens=6), prompts, steps=5, save_every=2, folder=folder, progress=False, **options)
        kills.join(60)
        assert not kills.is_alive()
        numbers = [{name: value for name, value in row.items() if name not in MEASURED} for row in run.rows]
        return numbers, actor.run(fingerprint), len(session.history), run.restores


@pytest.mark.timeout(400)
def test_a_death_costs_steps_and_changes_nothing(ray_here, tmp_path):
    undisturbed = trained(tmp_path / "a", ())
    with pytest.warns(UserWarning, match="goes on from its save after step"):
        disturbed = trained(tmp_path / "b", (3,), on_death="restore")
    assert disturbed[:3] == undisturbed[:3]
    assert [restored.back_to for restored in disturbed[3]] == [1]
