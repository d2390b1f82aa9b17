"""A step of a real run in a folder, taken again in another process: bit for bit, or the first number that differs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from expect import refuses
from system_helpers import OPENINGS, lengths_reward

import hfsdk as hf
from hfsdk.engine.calls import messages as m
from hfsdk.session.parts import parts_of

ROOT = Path(__file__).parents[2]
REPLAY = """
import json, sys
import hfsdk as hf
again = hf.replay(sys.argv[1])
found = again.difference
print(json.dumps([bool(again), again.num_calls, again.num_values, again.num_weights, list(again.notes), found and str(found)]))
"""


def replayed(folder):
    """Replay in a process that has nothing of this one but the folder."""
    done = subprocess.run([sys.executable, "-c", REPLAY, str(folder)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def trained(live):
    """Three steps of PPO on the shared session, which goes back afterwards."""
    start = live.session.snapshot("before the exported run")
    live.session.reward(lengths_reward)
    prompts = live.session.prompts(OPENINGS, batch_size=8, seed=5)
    yield live.session, live.session.train(hf.PPO(max_new_tokens=8), prompts, steps=3, progress=False), prompts
    live.session.rewind(start)
    live.session.forget(start)


def test_a_step_is_the_same_bit_for_bit_in_another_process_and_folder(trained, tmp_path, monkeypatch):
    session, run, prompts = trained
    last, rows, version = run.rows[-1]["step"], len(session.history), session.models.actor.version
    place = prompts.position
    sent, client = [], parts_of(session).client
    send = client._controller.send
    monkeypatch.setattr(client._controller, "send", lambda message: sent.append(message) or send(message))
    written = session.export_step(last, tmp_path / "step")
    assert not [message for message in sent if isinstance(message, m.Recover)], "what a death brings back is what it was"
    assert (len(session.history), session.models.actor.version, prompts.position) == (rows, version, place), "it is where it was"
    summary = json.loads((written / "step.json").read_text())
    assert summary["calls"][0]["call"] == "actor.generate"
    assert summary["numbers"]["score_mean"] == run.rows[-1]["score_mean"]
    moved = tmp_path / "moved"
    shutil.move(written, moved)
    same, calls, values, weights, notes, difference = replayed(moved)
    assert (same, difference, notes) == (True, None, [])
    assert calls == len(summary["calls"])
    assert values > 8 * 8
    assert weights > 0


def test_a_step_that_cannot_be_exported_says_why_and_leaves_nothing(trained, tmp_path, monkeypatch):
    session, run, _ = trained
    with refuses(hf.OptionError, "no step 99", f"steps {run.rows[0]['step']} to {run.rows[-1]['step']}"):
        session.export_step(99, tmp_path / "step")
    assert not (tmp_path / "step").exists()
    monkeypatch.setattr("hfsdk.diagnose.step_export._write", lambda *given: (_ for _ in ()).throw(hf.CheckpointError("no space")))
    with refuses(hf.CheckpointError, "no space"):
        session.export_step(run.rows[-1]["step"], tmp_path / "step")
    assert not (tmp_path / "step").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with refuses(hf.CheckpointError, "mine.txt", "empty"):
        session.export_step(run.rows[-1]["step"], tmp_path / "full")
