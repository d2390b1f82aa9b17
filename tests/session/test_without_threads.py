"""A Python that starts no thread, as one in a browser: simulated sessions, plans and pictures work all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hfsdk as hf
from hfsdk.algorithms import ppo

ROOT = Path(__file__).parents[2]

REFUSED = """
import contextlib, io, json, sys, threading, traceback
import numpy, pandas, tqdm

def refuse(self):
    raise RuntimeError("can't start new thread")

threading.Thread.start = refuse
import hfsdk as hf
from hfsdk.algorithms import ppo
from tests.session.scripted import ScriptedRuntime
"""

PPO = """
with hf.Session.simulated("2x8 A100-80GB", price_per_device_hour=2.0) as session:
    heard = []
    session.subscribe(lambda event: heard.append((event["type"], event.get("call"), session.trace.step)))
    actor = session.actor("tiny", train="tp2 dp4", rollout="tp1 dp8")
    critic, reference = session.critic("tiny"), session.reference(actor)
    reward = session.reward(lambda completions: [0.0 for _ in completions])
    session.place({"actor reference reward": 8, "critic": 8})
    batch = actor.generate(session.prompts([[1, 2, 3]] * 16, batch_size=16)[0], max_new_tokens=8)
    batch = reference.compute_log_probs(actor.compute_log_probs(batch))
    batch = ppo.advantages(reward.compute_scores(critic.compute_values(batch)), gamma=1.0, lam=0.95, kl_coef=0.1)
    assert critic.update(batch, ppo.ValueLoss(clip=0.2)).wait().done and actor.update(batch, ppo.PolicyLoss(clip=0.2)).wait().done
    starts, ends = ([call for kind, call, _ in heard if kind == wanted] for wanted in ("call_started", "call_done"))
    print(len(session.trace.snapshot()) > 8, starts == ends, len(ends), ends[0])
"""

REST = """
with hf.Session.simulated("1x8 A100-80GB") as session:
    actor = session.actor("tiny")
    session.critic("tiny"), session.reference(actor), session.reward(hf.data.exact_match)
    prompts = session.prompts(hf.data.additions(32), column="prompt", batch_size=16)
    run = session.train(hf.PPO(max_new_tokens=8), prompts, steps=2, folder="saves", save_every=1)
    session.snapshot("before")
    session.train(hf.GRPO(max_new_tokens=8), prompts, steps=1)
    session.rewind("before")
    print(session.save("saves", wait=False).done, len(run.rows))
    session.load("saves")
    ask = hf.PPO(max_new_tokens=8), hf.Workload(prompts=32, prompt_tokens=8, response_tokens=8)
    what_if = session.what_if(*ask)
    widget = hf.viz.widget(what_if)
    asked = {"method": "custom", "content": {"set": {"devices": 4}, "request": 1}}
    widget.comm.handle_msg({"content": {"data": asked}, "buffers": []})
    print(widget.view["request"], what_if.question.devices)
    for shown in (session.plan(*ask), session.trace, session.placement, session.predict(), run):
        assert hf.viz.picture(shown).to_html()
        hf.viz.widget(shown)
    session.report("report.html")
    try:
        session.train(hf.PPO(max_new_tokens=8), prompts, steps=1, wait=False)
    except hf.OptionError as error:
        print(error)
"""

LISTENER = """
with hf.Session.simulated("1x2 A100-80GB") as session:
    actor = session.actor("tiny")
    lengths = []

    def listener(event):
        if event["type"] == "call_done":
            lengths.append(actor.generate([[1, 2]], max_new_tokens=4).wait().num_rows)

    session.subscribe(listener)
    actor.generate([[1, 2]] * 3, max_new_tokens=4).wait()
    print(lengths)
"""

FAILURE = """
runtime = ScriptedRuntime("1x2 A100-80GB")
runtime.kind, runtime.failing["compute_scores"] = "simulated", hf.CallError("no score today")
with hf.Session(runtime=runtime) as session:
    actor, reward = session.actor("tiny"), session.reward(lambda completions: [0.0 for _ in completions])
    scored = reward.compute_scores(actor.generate([[1, 2]] * 2, max_new_tokens=4))
    print([state for state in scored.column_states() if state["name"] == "scores"])
    try:
        scored.wait()
    except hf.CallError as error:
        print(error)
"""

TIMES = "    print(session.trace.snapshot().to_pandas().duration_s.tolist())\n"

PARTS = {"step": PPO + TIMES, "rest": REST, "listener": LISTENER, "failure": FAILURE}

EACH = """
answers = {}
for name, code in json.loads(sys.argv[1]).items():
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            exec(code, dict(globals()))
        answers[name] = said.getvalue().splitlines()
    except Exception:
        answers[name] = traceback.format_exc()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, list[str]]:
    """What each part printed, all of them in one Python that starts no thread."""
    pytest.importorskip("anywidget")
    command = [sys.executable, "-W", "error", "-c", REFUSED + EACH, json.dumps(PARTS)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path_factory.mktemp("folder"), check=False, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_step_is_carried_out_call_by_call(said) -> None:
    assert said["step"][0] == "True True 8 actor.generate"


def test_training_saving_planning_and_pictures(said) -> None:
    saved, asked, refused = said["rest"]
    assert (saved, asked) == ("True 2", "1 4")
    assert "this Python can start none" in refused


def test_a_listener_may_call(said) -> None:
    assert said["listener"] == ["[1]"]


def test_a_failure_is_kept_for_whoever_looks(said) -> None:
    states, error = said["failure"]
    assert "failed" in states
    assert error.startswith("reward.compute_scores")
    assert "no score today" in error


def test_the_same_step_takes_as_long_with_threads(said, capsys) -> None:
    exec(PARTS["step"], {"hf": hf, "ppo": ppo})
    assert capsys.readouterr().out.splitlines()[1:] == said["step"][1:]
