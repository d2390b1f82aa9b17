"""Saving and loading over a fake controller: all or nothing, and clear about what does not fit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import hfsdk as hf
from tests.session.fakes import actor, controller, session  # noqa
from hfsdk.engine.calls import messages as m
from hfsdk.session.session_parts import parts_of
from tests.session.fakes import session_over

TEXTS = [f"review number {i}" for i in range(10)]


def prepared(session):
    session.actor("tiny")
    session.critic("tiny")
    return session.prompts(TEXTS, batch_size=3, seed=0)


def test_everything_comes_back(session, controller, tmp_path):
    prompts = prepared(session)
    next(prompts), next(prompts)
    controller.updates["actor"] = 5
    session.record({"step": 0, "score_mean": 0.25})
    parts_of(session).context.counters.next("steps")
    session.save(tmp_path / "save")
    assert sorted(p.name for p in (tmp_path / "save").iterdir()) == ["session.json", "state-1"]

    other = session_over(type(controller)(), session.cluster, seed=9)
    streams = prepared(other)
    other.load(tmp_path / "save")
    assert other.seed == 0
    assert streams.position == 2
    assert other.history["score_mean"].tolist() == [0.25]
    assert parts_of(other).context.counters.next("steps") == 1
    assert other.models.actor.version == 5
    later = other.prompts(TEXTS, batch_size=3, seed=0)  # made again in a cell: it starts over
    assert later.position == 0
    other.close()


def test_streams_made_after_loading_get_their_place_too(session, controller, tmp_path):
    next(prepared(session))
    session.save(tmp_path)
    other = session_over(type(controller)(), session.cluster)
    other.actor("tiny")
    other.critic("tiny")
    other.load(tmp_path)
    assert other.prompts(TEXTS, batch_size=3).position == 1
    assert other.prompts(TEXTS, batch_size=5).position == 0  # another stream
    other.close()


def test_a_later_save_replaces_the_earlier_one(session, controller, tmp_path):
    prepared(session)
    for _ in range(3):
        session.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["session.json", "state-3"]
    assert controller.sent(m.Recover)[-1].folder.endswith("state-3")


@pytest.mark.parametrize("kind", ["error", "interrupt"])
def test_a_save_that_does_not_finish_leaves_the_last_one(session, controller, tmp_path, kind):
    prepared(session)
    controller.updates["actor"] = 1
    session.save(tmp_path)
    controller.updates["actor"] = 2
    if kind == "error":
        controller.failing["save_state"] = hf.CallError("disk full", role="actor")
    else:
        controller.held.add("save_state")
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(hf.CallError if kind == "error" else KeyboardInterrupt):
        session.save(tmp_path)
    controller.failing.clear()
    controller.held.clear()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["session.json", "state-1"]
    session.load(tmp_path)
    assert controller.updates["actor"] == 1


def test_a_kill_before_the_last_moment_leaves_the_last_one(session, controller, tmp_path, monkeypatch):
    prepared(session)
    controller.updates["actor"] = 1
    session.save(tmp_path)
    controller.updates["actor"] = 2
    replace = os.replace

    def killed(source, target):
        if target == tmp_path / "session.json":
            raise SystemExit
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("hfsdk.session.checkpoint.os.replace", killed)
        with pytest.raises(SystemExit):
            session.save(tmp_path)
    session.load(tmp_path)
    assert controller.updates["actor"] == 1
    session.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["session.json", "state-2"]


def saved(session, tmp_path):
    prepared(session)
    session.save(tmp_path)
    return tmp_path


def test_no_checkpoint(session, tmp_path):
    prepared(session)
    with pytest.raises(hf.CheckpointError, match="holds no checkpoint"):
        session.load(tmp_path)
    with pytest.raises(hf.CheckpointError, match="holds no checkpoint"):
        session.load(tmp_path / "nowhere")
    (tmp_path / "state-1.partial").mkdir()
    with pytest.raises(hf.CheckpointError, match="an unfinished save"):
        session.load(tmp_path)


def test_incomplete_damaged_and_foreign(session, tmp_path):
    folder = saved(session, tmp_path)
    file = folder / "state-1" / "critic" / "rank0.pt"
    content = file.read_text()
    file.write_text("longer than before")
    with pytest.raises(hf.CheckpointError, match=r"damaged: .*state-1/critic/rank0.pt has 18 bytes, 1 were saved"):
        session.load(folder)
    file.unlink()
    with pytest.raises(hf.CheckpointError, match=r"incomplete: .*state-1/critic/rank0.pt is missing"):
        session.load(folder)
    file.write_text("7")
    with pytest.raises(hf.CheckpointError, match=r"damaged: .*state-1/critic/rank0.pt has other content than was saved"):
        session.load(folder)
    file.write_text(content)
    session.load(folder)
    index = json.loads((folder / "session.json").read_text())
    (folder / "session.json").write_text(json.dumps({**index, "format": 99}))
    with pytest.raises(hf.CheckpointError, match="format 99"):
        session.load(folder)
    (folder / "session.json").write_text("{")
    with pytest.raises(hf.CheckpointError, match="damaged"):
        session.load(folder)


@pytest.mark.parametrize(
    ("actor", "words"),
    [
        ({"dtype": "bf16"}, "dtype 'fp32'; the session has 'bf16'"),
        ({"model": "smollm2-135m-instruct"}, "model 'tiny'; the session has 'smollm2-135m-instruct' .*num_layers 4 -> 30"),
    ],
)
def test_other_roles(session, controller, tmp_path, actor, words):
    folder = saved(session, tmp_path)
    other = session_over(type(controller)(), session.cluster.with_memory(10**11))
    other.actor(**{"model": "tiny", **actor})
    other.critic("tiny")
    with pytest.raises(hf.CheckpointError, match=words):
        other.load(folder)
    other.close()


def test_another_layout_is_welcome(session, controller, tmp_path):
    folder = saved(session, tmp_path)
    other = session_over(type(controller)(), session.cluster)
    other.actor("tiny", train="tp2")
    other.critic("tiny", train="pp2")
    other.load(folder)
    other.close()


def test_missing_and_extra_roles(session, controller, tmp_path):
    folder = saved(session, tmp_path)
    other = session_over(type(controller)(), session.cluster)
    other.actor("tiny")
    with pytest.raises(hf.CheckpointError, match="has critic, which the session does not; declare critic first"):
        other.load(folder)
    other.critic("tiny")
    other.critic("tiny", name="second")
    with pytest.raises(hf.CheckpointError, match="has no second; it has actor, critic"):
        other.load(folder)
    other.close()


def test_where_nothing_can_be_written(session, tmp_path):
    prepared(session)
    (tmp_path / "file").write_text("")
    with pytest.raises(hf.CheckpointError, match="cannot save to"):
        session.save(tmp_path / "file")


# -- in the background


def test_a_save_in_the_background(session, controller, tmp_path):
    """It holds the state of its moment; what comes after it waits only where it must."""
    prompts = prepared(session)
    next(prompts)
    controller.updates["actor"] = 5
    session.record({"step": 0})
    controller.held.add("saved")
    saving = session.save(tmp_path, wait=False)
    assert not saving.done
    assert repr(saving) == f"<saving: {tmp_path}>"
    with pytest.raises(TimeoutError, match=r"is not complete after 0.05 s; it goes on"):
        saving.wait(0.05)
    next(prompts)
    controller.updates["actor"] = 6
    session.record({"step": 1})
    assert not (tmp_path / "session.json").exists()
    with pytest.raises(hf.CheckpointError, match="an unfinished save"):
        session_over(controller, session.cluster).load(tmp_path)

    async def look():
        return await saving

    controller.held.clear()
    assert asyncio.run(look()) is saving
    assert saving.done
    assert repr(saving) == f"<saved: {tmp_path}>"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["session.json", "state-1"]
    assert {(x.role, x.num_updates) for x in controller.sent(m.Recover)} == {("actor", 5), ("critic", 0)}
    session.load(tmp_path)
    assert prompts.position == 1
    assert len(session.history) == 1
    assert controller.updates["actor"] == 5


@pytest.mark.parametrize("then", ["save", "save in the background", "load", "place", "release", "close"])
def test_what_waits_for_a_save_in_the_background(session, controller, tmp_path, then):
    prepared(session)
    controller.held.add("saved")
    saving = session.save(tmp_path / "a", wait=False)
    threading.Timer(0.3, controller.held.clear).start()
    {
        "save": lambda: session.save(tmp_path / "b"), "save in the background": lambda: session.save(tmp_path / "b", wait=False),
        "load": lambda: session.load(tmp_path / "a"), "place": lambda: session.place("split"),
        "release": session.models.critic.release, "close": session.close,
    }[then]()  # fmt: skip
    assert saving.done
    saving.wait()
    assert (tmp_path / "a" / "session.json").exists()


def test_a_failure_in_the_background_is_not_lost(session, controller, tmp_path):
    prepared(session)
    session.save(tmp_path)
    controller.failing["saved"] = hf.CheckpointError("cannot save: the disk is full")
    saving = session.save(tmp_path, wait=False)
    saving.settle()
    assert repr(saving) == f"<failed: {tmp_path}>"
    controller.failing.clear()
    with pytest.raises(hf.CheckpointError, match="the disk is full"):
        session.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["session.json", "state-1"]
    session.save(tmp_path)  # it was told once
    assert sorted(p.name for p in tmp_path.iterdir()) == ["session.json", "state-2"]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import hfsdk as hf
from fakes import CPU2, FakeController, session_over
controller = FakeController()
session = session_over(controller, CPU2)
session.actor("tiny"), session.critic("tiny")
controller.updates["actor"] = 1
session.save({folder!r})
controller.updates["actor"] = 2
if {when!r} == "writing":
    controller.held.add("saved")
    session.save({folder!r}, wait=False)
else:
    replace = os.replace
    os.replace = lambda a, b: os.kill(os.getpid(), signal.SIGKILL) if str(b) == {folder!r} + "/session.json" else replace(a, b)
    session.save({folder!r}, wait=False).wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["writing", "before the index"])
def test_a_killed_process_leaves_the_last_complete_save(session, controller, tmp_path, when):
    code = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path), when=when)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    left = {p.name for p in tmp_path.iterdir()}
    assert left > {"session.json", "state-1"}, "something of the second save"
    prepared(session)
    session.load(tmp_path)
    assert controller.updates["actor"] == 1
    session.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["session.json", "state-2"], "and nothing of the one that was killed"
