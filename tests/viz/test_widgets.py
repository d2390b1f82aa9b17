"""Every view is one anywidget: no container of ipywidgets, JSON in its traits, no kernel asked for; it follows what runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from expect import each, refuses, until

import hfsdk as hf
from hfsdk.core.errors import OptionError
from hfsdk.run.run import Run
from hfsdk.viz.drawn import picture_of
from tests.viz import demo, demo_plans
from tests.viz.bad_pictures import PICTURES, control_of, rows_of

anywidget = pytest.importorskip("anywidget")
ROOT = Path(__file__).parents[2]
KINDS: dict[str, str] = {}
for full_name in PICTURES:  # one of every kind
    KINDS.setdefault(full_name.partition(":")[0], full_name)


@pytest.fixture
def session() -> Iterator[hf.Session]:
    with hf.Session.simulated("1x4 A100-80GB", wait=True) as session:
        actor = session.actor("tiny")
        session.critic("tiny")
        session.reference(actor)
        session.reward(hf.data.exact_match)
        yield session


def is_bare(widget: Any) -> None:
    """Check that a widget is one anywidget whose state is JSON."""
    assert isinstance(widget, anywidget.AnyWidget)
    assert "export default" in widget._esm
    assert widget._css
    state = widget.get_state()
    assert json.loads(json.dumps(state, allow_nan=False)) == {**state, "_dom_classes": list(state["_dom_classes"])}
    assert not [
        name for name in state if isinstance(state[name], str) and state[name].startswith("IPY_MODEL_") and name != "layout"
    ]
    assert not {"children", "box_style"} & set(state)


@each("name", KINDS.values())
def test_every_picture_is_one_anywidget(name: str) -> None:
    picture = PICTURES[name]()
    widget = hf.viz.widget(picture)
    is_bare(widget)
    assert widget.view["title"] == picture.view.get("title", picture.name)
    widget.close()


def test_what_a_session_shows_is_one_anywidget(session: hf.Session) -> None:
    prompts = session.prompts(hf.data.additions(8), column="prompt", batch_size=8)
    run = session.train(hf.PPO(max_new_tokens=8), prompts, steps=1)
    ask = hf.PPO(max_new_tokens=8), hf.Workload(prompts=8, prompt_tokens=8, response_tokens=8)
    shown = [run, session.trace, session.placement, session.dataflow, session.memory, session.history, session.plan(*ask),
             session.what_if(*ask), session.models.actor.reshard_plan]  # fmt: skip
    for one in shown:
        widget = hf.viz.widget(one)
        is_bare(widget)
        widget.close()


def test_what_has_no_picture_has_no_widget() -> None:
    with refuses(OptionError, "int"):
        hf.viz.widget(3)


def test_sliders_are_answered(session: hf.Session) -> None:
    what_if = session.what_if(hf.PPO(max_new_tokens=8), hf.Workload(prompts=8, prompt_tokens=8, response_tokens=8))
    widget = hf.viz.widget(what_if)
    assert widget.key == "", "it stands where its host puts it"
    widget._handle_custom_msg({"set": {"devices": 2}, "request": 1}, [])
    until("the answer", lambda: widget.view["request"] == 1)
    assert what_if.question.devices == 2
    what_if.set(devices=1)
    assert next(s["value"] for s in widget.view["sliders"] if s["name"] == "devices") == 1
    widget.close()


def test_what_a_page_sets_is_kept_only_where_the_picture_has_a_control_for_it(monkeypatch: Any) -> None:
    """Until it is answered; a page, or what somebody put into it, could send names without end."""
    from hfsdk.viz.pictures.what_if import LiveWhatIf

    monkeypatch.setattr(LiveWhatIf, "_answer_all", lambda live: None)
    live = LiveWhatIf(demo_plans.what_if(), in_output=False)
    for number in range(50):
        live.hear({"set": {f"name {number}": "x" * 1000, "device": "y" * 10**6, "prompts": [1] * 10**5}, "request": number})
    live.hear({"set": {"devices": 2}, "request": 50})
    request, changes = live._wanted
    assert (request, changes["devices"], sorted(changes)) == (50, 2, ["device", "devices"])
    assert len(changes["device"]) == 200
    live.close()


def test_a_run_is_followed_and_its_buttons_are_heard() -> None:
    control = control_of(rows_of(0.5))
    run = Run(control)
    control.begin(9, True, lambda: None)
    widget = hf.viz.widget(run)
    assert widget.view["live"]
    assert widget.kept_as == "", "it ends with this process"
    widget._handle_custom_msg({"action": "pause"}, [])
    assert run.view()["asked"] == "pause"
    control.end()
    until("the run's end in its picture", lambda: not widget.view["live"])
    assert widget.view["state"] == picture_of(run).view["state"]
    widget.close()


def test_it_needs_no_ipython_and_no_kernel() -> None:
    """It is content with any comm, as that of marimo."""
    code = """
import sys, json
from tests.viz import demo
import hfsdk as hf
from comm import base_comm
sent = []
base_comm.BaseComm.publish_msg = lambda self, msg_type, data=None, **rest: sent.append((msg_type, data))
import comm
comm.create_comm = base_comm.BaseComm
widget = hf.viz.widget(demo.step_trace())
assert {kind for kind, _ in sent} == {"comm_open"}, "its own, and that of ipywidgets' layout"
json.dumps([data["state"] for _, data in sent])
widget.view = {**widget.view, "title": "another"}
assert sent[-1][1]["state"]["view"]["title"] == "another"
assert "ipykernel" not in sys.modules
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.strip() == "fine", done.stderr


def test_the_pictures_of_a_trace_are_alike_in_both_hosts() -> None:
    trace = demo.step_trace()
    assert hf.viz.widget(trace).view == hf.viz.picture(trace).view
