"""A session's checkpoint on real workers: from one layout to another, in the background, and killed in the middle."""

import json
import os
import signal
import time

import numpy as np
import pytest
from system_helpers import OPENINGS, fingerprint, pids, until

import hfsdk as hf


def value_loss(out, b):
    return (out.values - b["goal"]) ** 2


def slow_writes(rank):
    """Make the files of this worker's saves take half a minute."""
    from hfsdk.engine import megatron_checkpoint

    quick = megatron_checkpoint._Writer.write

    def slow(self):
        time.sleep(30)
        return quick(self)

    megatron_checkpoint._Writer.write = slow


def rows(session):
    rng = np.random.default_rng(0)
    prompts = [list(text.encode()) for text in OPENINGS]
    responses = [rng.integers(32, 120, n).tolist() for n in rng.integers(1, 12, len(prompts))]
    goal = [rng.standard_normal(len(r)).tolist() for r in responses]
    return session.batch(prompt=prompts, response=responses, goal=goal)


def learn(critic, batch):
    return critic.update(batch, value_loss, mini_batches=2).rows


def opened(name, layout):
    session = hf.Session(devices=2, seed=3, name=name)
    critic = session.critic("tiny", train=layout, optimizer=hf.AdamW(lr=1e-3))
    return session, critic, rows(session)


@pytest.fixture(scope="module")
def home(ray_here):
    """A critic at tp2 that has learned a little."""
    session, critic, batch = opened("home", "tp2")
    learn(critic, batch)
    yield session, critic, batch
    session.close()


def test_another_layout_goes_on_alike(home, tmp_path):
    """Saved in the background while the next update runs; what was saved is the state before it."""
    session, critic, mine = home
    before = critic.version
    saving = session.save(tmp_path, wait=False)
    after = learn(critic, mine)
    assert saving.wait().done
    assert json.loads((tmp_path / "session.json").read_text())["roles"]["critic"]["num_updates"] == before
    values = critic.compute_values(mine)["values"].flat
    weights = critic.run(fingerprint)
    with hf.Session(devices=2, seed=3, name="elsewhere") as other:
        batch = rows(other)
        for layout in ("dp2", "pp2"):
            there = other.critic("tiny", train=layout, optimizer=hf.AdamW(lr=1e-3))
            other.load(tmp_path)
            assert there.version == before
            for row, expected in zip(learn(there, batch), after, strict=True):
                assert row == pytest.approx(expected, rel=1e-4)
            assert np.abs(there.compute_values(batch)["values"].flat - values).max() <= 1e-4
            other.save(tmp_path / layout)
            there.release()
    session.load(tmp_path / "pp2")  # and back: what it learned there
    assert critic.version == before + 2
    assert critic.run(fingerprint) != weights
    assert np.abs(critic.compute_values(mine)["values"].flat - values).max() <= 1e-4
    session.load(tmp_path)
    assert learn(critic, mine) == after, "its own layout: to the bit"
    assert critic.run(fingerprint) == weights


def test_other_models_are_refused(home, tmp_path):
    session, critic, _ = home
    session.save(tmp_path)
    index = json.loads((tmp_path / "session.json").read_text())
    index["roles"]["critic"]["model"]["num_layers"] = 2
    (tmp_path / "session.json").write_text(json.dumps(index))
    weights = critic.run(fingerprint)
    with pytest.raises(hf.CheckpointError, match="num_layers 2 -> 4"):
        session.load(tmp_path)
    assert critic.run(fingerprint) == weights


def test_a_worker_killed_while_it_writes(home, tmp_path):
    """Training goes on while files are written; the last complete save is what comes back."""
    session, critic, batch = home
    session.save(tmp_path)
    saved = critic.run(fingerprint)
    critic.run(slow_writes)
    learn(critic, batch)
    saving = session.save(tmp_path, wait=False)
    learn(critic, batch)
    assert not saving.done, "the pool was held for the copy only"
    until("the second state", lambda: list(tmp_path.glob("state-2.partial/critic/common.pt")))
    os.kill(pids(session)[1], signal.SIGKILL)
    with pytest.raises(hf.CheckpointError, match="ended while it wrote critic's state; save again"):
        saving.wait(60)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["session.json", "state-1"]
    with pytest.raises(hf.WorkerDiedError, match=r"critic comes back with checkpoint .*state-1 \(4 updates lost\)"):
        critic.compute_values(batch).wait(timeout=120)
    assert critic.run(fingerprint) == saved
    session.save(tmp_path)
    session.load(tmp_path)
    assert critic.run(fingerprint) == saved
