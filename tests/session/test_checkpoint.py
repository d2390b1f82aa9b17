"""Saving and loading over the scripted runtime: all or nothing, and clear about what does not fit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest
from expect import refuses, until

import hfsdk as hf
from hfsdk.state.checkpoint import Saving
from tests.session.scripted import ScriptedRuntime, learn, let_go_when, waits
from tests.session.test_training import TEXTS, OneCall


def prepared(session):
    session.actor("tiny")
    session.critic("tiny")
    return session.prompts(TEXTS, batch_size=3, seed=0)


@pytest.fixture
def other():
    """A session in another kernel, of another seed."""
    with hf.Session(runtime=ScriptedRuntime(), seed=9) as other:
        yield other


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_everything_comes_back(session, other, tmp_path, length_reward):
    prompts = prepared(session)
    session.reward(length_reward)
    session.train(OneCall(), prompts, steps=2)
    learn(session.models.actor, 5)
    session.save(tmp_path / "save")
    assert names(tmp_path / "save") == ["session.json", "state-1"]

    streams = prepared(other)
    other.reward(length_reward)
    other.load(tmp_path / "save")
    assert other.seed == 0
    assert streams.position == 2
    assert [dict(row) for row in other.history] == [dict(row) for row in session.history]
    assert other.models.actor.version == 5
    assert other.train(OneCall(), streams, steps=1).history["step"].tolist() == [2]
    later = other.prompts(TEXTS, batch_size=3, seed=0)  # made again in a cell: it starts over
    assert later.position == 0


def test_streams_made_after_loading_get_their_place_too(session, other, tmp_path):
    next(prepared(session))
    session.save(tmp_path)
    other.actor("tiny")
    other.critic("tiny")
    other.load(tmp_path)
    assert other.prompts(TEXTS, batch_size=3).position == 1
    assert other.prompts(TEXTS, batch_size=5).position == 0  # another stream


def test_a_later_save_replaces_the_earlier_one(session, tmp_path):
    prepared(session)
    for _ in range(3):
        session.save(tmp_path)
    assert names(tmp_path) == ["session.json", "state-3"]


def test_a_role_whose_worker_ends_comes_back_from_its_last_save(session, tmp_path, runtime):
    """And not from an earlier one, or from its first weights."""
    prepared(session)
    learn(session.models.actor, 2)
    session.save(tmp_path)
    learn(session.models.actor, 1)
    session.save(tmp_path)
    learn(session.models.actor, 4)
    runtime.failing["generate"] = hf.WorkerDiedError("killed", role="actor", rank=0)
    with pytest.raises(hf.WorkerDiedError):
        session.models.actor.generate("Hello").wait()
    runtime.failing.clear()
    session.models.actor.generate("Hello").wait()
    assert session.models.actor.version == 3


@pytest.mark.parametrize("kind", ["error", "interrupt"])
def test_a_save_that_does_not_finish_leaves_the_last_one(session, runtime, tmp_path, kind, keyboard):
    prepared(session)
    actor = session.models.actor
    learn(actor, 1)
    session.save(tmp_path)
    learn(actor, 1)
    if kind == "error":
        runtime.failing["save_state"] = hf.CallError("disk full", role="actor")
    else:
        runtime.hold("save_state")
        before = len(runtime.sent("save_state"))
        keyboard(lambda: waits() and len(runtime.sent("save_state")) > before)
    with pytest.raises(hf.CallError if kind == "error" else KeyboardInterrupt):
        session.save(tmp_path)
    runtime.failing.clear()
    runtime.let_go()
    assert names(tmp_path) == ["session.json", "state-1"]
    session.load(tmp_path)  # the failures of the other roles' calls are told with the first
    assert actor.version == 1


def test_a_kill_before_the_last_moment_leaves_the_last_one(session, tmp_path, monkeypatch):
    prepared(session)
    actor = session.models.actor
    learn(actor, 1)
    session.save(tmp_path)
    learn(actor, 1)
    replace = os.replace

    def killed(source, target):
        if target == tmp_path / "session.json":
            raise SystemExit
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(SystemExit):
            session.save(tmp_path)
    session.load(tmp_path)
    assert actor.version == 1
    session.save(tmp_path)
    assert names(tmp_path) == ["session.json", "state-2"]


def saved(session, tmp_path):
    prepared(session)
    session.save(tmp_path)
    return tmp_path


def test_where_there_is_no_checkpoint_its_absence_is_told(session, tmp_path):
    prepared(session)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with refuses(hf.CheckpointError, "no checkpoint", folder):
            session.load(folder)
    (tmp_path / "state-1.partial").mkdir()
    with refuses(hf.CheckpointError, "unfinished", tmp_path):
        session.load(tmp_path)


def test_incomplete_damaged_and_foreign_saves_are_told_apart(session, tmp_path):
    folder = saved(session, tmp_path)
    file = folder / "state-1" / "critic" / "simulated.json"
    content, size = file.read_text(), file.stat().st_size
    file.write_text("longer than " + content)
    with refuses(hf.CheckpointError, "damaged", file, f"{size + 12} bytes", f"{size} were saved"):
        session.load(folder)
    file.unlink()
    with refuses(hf.CheckpointError, "incomplete", file, "missing"):
        session.load(folder)
    file.write_text(content.replace("0", "7"))
    with refuses(hf.CheckpointError, "damaged", file, "content"):
        session.load(folder)
    file.write_text(content)
    session.load(folder)
    index = json.loads((folder / "session.json").read_text())
    (folder / "session.json").write_text(json.dumps({**index, "format": 99}))
    with refuses(hf.CheckpointError, "format 99"):
        session.load(folder)
    (folder / "session.json").write_text("{")
    with refuses(hf.CheckpointError, "damaged"):
        session.load(folder)


@pytest.mark.parametrize(
    ("actor", "named"),
    [
        ({"dtype": "bf16"}, ["'fp32'", "'bf16'"]),
        ({"model": "smollm2-135m-instruct"}, ["'tiny'", "'smollm2-135m-instruct'", "num_layers 4 -> 30"]),
    ],
)
def test_a_save_of_another_model_is_refused(session, other, tmp_path, actor, named):
    folder = saved(session, tmp_path)
    other.actor(**{"model": "tiny", **actor})
    other.critic("tiny")
    with refuses(hf.CheckpointError, *named):
        other.load(folder)


def test_another_layout_is_welcome(session, other, tmp_path):
    folder = saved(session, tmp_path)
    other.actor("tiny", train="tp2")
    other.critic("tiny", train="pp2")
    other.load(folder)


def test_missing_and_extra_roles_are_named(session, other, tmp_path):
    folder = saved(session, tmp_path)
    other.actor("tiny")
    with refuses(hf.CheckpointError, "declare critic"):
        other.load(folder)
    other.critic("tiny")
    other.critic("tiny", name="second")
    with refuses(hf.CheckpointError, "no second", "actor, critic"):
        other.load(folder)


def test_where_nothing_can_be_written_the_folder_is_named(session, tmp_path):
    prepared(session)
    (tmp_path / "file").write_text("")
    with refuses(hf.CheckpointError, tmp_path / "file"):
        session.save(tmp_path / "file")


# -- in the background


def test_a_save_in_the_background_holds_the_state_of_its_moment(session, other, runtime, tmp_path):
    """What comes after it waits only where it must."""
    prompts = prepared(session)
    next(prompts)
    actor = session.models.actor
    learn(actor, 5)
    runtime.hold("saved")
    saving = session.save(tmp_path, wait=False)
    assert not saving.done
    assert repr(saving) == f"<saving: {tmp_path}>"
    with refuses(TimeoutError, "0.05 s"):
        saving.wait(0.05)
    next(prompts)
    learn(actor, 1)
    assert not (tmp_path / "session.json").exists()
    prepared(other)
    with refuses(hf.CheckpointError, "unfinished"):
        other.load(tmp_path)

    async def look():
        return await saving

    runtime.let_go()
    assert asyncio.run(look()) is saving
    assert saving.done
    assert repr(saving) == f"<saved: {tmp_path}>"
    assert names(tmp_path) == ["session.json", "state-1"]
    session.load(tmp_path)
    assert prompts.position == 1
    assert len(session.history) == 5
    assert actor.version == 5


@pytest.mark.parametrize("then", ["save", "save in the background", "load", "place", "release", "close"])
def test_what_comes_next_waits_for_a_save_in_the_background(session, runtime, tmp_path, then):
    prepared(session)
    runtime.hold("saved")
    saving = session.save(tmp_path / "a", wait=False)
    acts = {
        "save": lambda: session.save(tmp_path / "b"), "save in the background": lambda: session.save(tmp_path / "b", wait=False),
        "load": lambda: session.load(tmp_path / "a"), "place": lambda: session.place("split"),
        "release": session.models.critic.release, "close": session.close,
    }  # fmt: skip
    with let_go_when(runtime, lambda: waits(Saving.wait, Saving.settle)):
        acts[then]()
        done = saving.done
    assert done
    saving.wait()
    assert (tmp_path / "a" / "session.json").exists()


def test_a_failure_in_the_background_is_not_lost(session, runtime, tmp_path):
    prepared(session)
    session.save(tmp_path)
    runtime.failing["saved"] = hf.CheckpointError("cannot save: the disk is full")
    saving = session.save(tmp_path, wait=False)
    until("the save has failed", lambda: repr(saving) == f"<failed: {tmp_path}>")
    runtime.failing.clear()
    with refuses(hf.CheckpointError, "the disk is full"):
        session.save(tmp_path)
    assert names(tmp_path) == ["session.json", "state-1"]
    session.save(tmp_path)  # it was told once
    assert names(tmp_path) == ["session.json", "state-2"]


KILLED = """
import os, signal
import hfsdk as hf
from tests.session.scripted import ScriptedRuntime, learn
runtime = ScriptedRuntime()
session = hf.Session(runtime=runtime)
session.actor("tiny"), session.critic("tiny")
learn(session.models.actor, 1)
session.save({folder!r})
learn(session.models.actor, 1)
if {when!r} == "writing":
    runtime.hold("saved")
    session.save({folder!r}, wait=False)
else:
    replace = os.replace
    os.replace = lambda a, b: os.kill(os.getpid(), signal.SIGKILL) if str(b) == {folder!r} + "/session.json" else replace(a, b)
    session.save({folder!r}, wait=False).wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["writing", "before the index"])
def test_a_killed_process_leaves_the_last_complete_save(session, tmp_path, when, pytestconfig):
    code = KILLED.format(folder=str(tmp_path), when=when)
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    left = {p.name for p in tmp_path.iterdir()}
    assert left > {"session.json", "state-1"}, "something of the second save"
    prepared(session)
    session.load(tmp_path)
    assert session.models.actor.version == 1
    session.save(tmp_path)
    assert names(tmp_path) == ["session.json", "state-2"], "and nothing of the one that was killed"
