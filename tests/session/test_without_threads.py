"""A Python that starts no thread, as one in a browser: simulated sessions, plans and pictures work all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

REFUSED = """
import sys, threading
import numpy, pandas, tqdm

def refuse(self):
    raise RuntimeError("can't start new thread")

threading.Thread.start = refuse
import hfsdk as hf
from hfsdk.algorithms import ppo
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
    widget._handle_custom_msg({"set": {"devices": 4}, "request": 1}, [])
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
from hfsdk.session.session_parts import parts_of
with hf.Session.simulated("1x2 A100-80GB") as session:
    actor, reward = session.actor("tiny"), session.reward(lambda completions: [0.0 for _ in completions])
    runtime = parts_of(session).client._controller._runtime
    def broken(work):
        raise hf.CallError("no score today")
    runtime.task = broken
    scored = reward.compute_scores(actor.generate([[1, 2]] * 2, max_new_tokens=4))
    print([state for state in scored.column_states() if state["name"] == "scores"])
    try:
        scored.wait()
    except hf.CallError as error:
        print(error)
"""


def said(code: str, folder: Path) -> list[str]:
    command = [sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + REFUSED + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_step_is_carried_out_call_by_call(tmp_path: Path) -> None:
    assert said(PPO, tmp_path) == ["True True 8 actor.generate"]


def test_training_saving_planning_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("anywidget")
    saved, asked, refused = said(REST, tmp_path)
    assert (saved, asked) == ("True 2", "1 4")
    assert "this Python can start none" in refused


def test_a_listener_may_call(tmp_path: Path) -> None:
    assert said(LISTENER, tmp_path) == ["[1]"]


def test_a_failure_is_kept_for_whoever_looks(tmp_path: Path) -> None:
    states, error = said(FAILURE, tmp_path)
    assert "failed" in states
    assert error.startswith("reward.compute_scores")
    assert "no score today" in error


def test_the_same_step_takes_as_long_with_threads(tmp_path: Path) -> None:
    timed = PPO + "    print(session.trace.snapshot().to_pandas().duration_s.tolist())\n"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport hfsdk as hf\nfrom hfsdk.algorithms import ppo\n" + timed
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True, timeout=120)
    assert done.stdout.splitlines()[1:] == said(timed, tmp_path)[1:]
