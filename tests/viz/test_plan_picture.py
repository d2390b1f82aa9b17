"""The pictures of plans and of what-if: their numbers in the view, the SVG and the text; questions asked from Python."""

from __future__ import annotations

import gc
import re
import threading
import weakref
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.core.errors import DeviceMemoryError, LayoutError, OptionError
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.modules import esm
from hfsdk.viz.pictures import what_if as what_if_module
from hfsdk.viz.pictures.plan import PlanView, plan_view
from hfsdk.viz.pictures.what_if import WhatIfView, what_if_view
from tests.viz import demo_plans
from tests.viz.test_frame import check

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> str:
    return "\n".join("".join(e.itertext()) for e in ET.fromstring(svg).iter(f"{SVG}text"))


# ---------------------------------------------------------------- a plan


def test_the_view_has_the_plans_numbers() -> None:
    plan = demo_plans.plan()
    view = picture_of(plan).view
    check(view, PlanView)
    best, second = view["choices"][:2]
    assert [c["step_s"] for c in view["choices"]] == [plan.seconds, *(a.seconds for a in plan.runners_up)]
    assert (best["low_s"], best["high_s"]) == plan.band
    assert best["dollars_step"] == pytest.approx(plan.cost_per_step)
    assert best["dollars_run"] == pytest.approx(plan.cost)
    assert [c["call"] for c in best["calls"]] == [c.name for c in plan.calls]
    assert [c["start_s"] for c in best["calls"]] == [c.start_s for c in plan.calls]
    assert [p["num_devices"] for p in second["pools"]] == [64, 64]
    assert second["pools"][1]["devices"] == [[64, 128]]
    assert best["pools"][0]["roles"][0]["layout"] == "tp8 pp1 dp16, rollout tp4 pp1 dp32"
    asked = plan.memory[0]
    memory = best["pools"][0]["memory"]
    assert (memory["asked_bytes"], memory["exists_bytes"]) == (asked.asked, asked.exists)
    assert sum(p["bytes"] for p in memory["parts"]) == asked.asked
    assert view["scale_s"] == max(c["high_s"] for c in view["choices"])


def test_every_call_has_the_lane_of_its_pool() -> None:
    view = picture_of(demo_plans.plan()).view
    split = view["choices"][1]
    lanes = {c["call"]: split["lanes"][c["lane"]] for c in split["calls"]}
    assert lanes["actor.update"] == "actor+reference"
    assert lanes["critic.update"] == "critic+reward"
    assert lanes["ppo.advantages"] == "CPU tasks"


def test_what_lost_is_told_with_why() -> None:
    plan = demo_plans.plan()
    picture = picture_of(plan)
    text, svg = picture.to_text(), texts(picture.to_svg()).replace("\n", " ")
    told = ("+14 s of actor.generate", "Too close to call", "interleaving does not fit: out of memory by 12.0 GB", "from 4,096")
    for words in told:
        assert words in text
        assert words in svg
    assert demo_plans.FAMILY in text
    assert "1. colocate: actor critic reference reward (128): 41.30 s (37.17 s to 46.26 s), 2.94 a step" in text
    assert "Too close" not in picture_of(replace(plan, runners_up=plan.runners_up[1:])).to_text()


def test_prediction_is_hatched_everywhere() -> None:
    svg = picture_of(demo_plans.plan()).to_svg()
    calls = [e for e in ET.fromstring(svg).iter(f"{SVG}g") if "data-row" in e.attrib]
    assert len(calls) == 8
    painted = [e.get("fill") for call in calls for e in call.iter(f"{SVG}rect") if e.get("fill")]
    assert len(painted) >= 8
    assert all(fill.startswith("url(#") for fill in painted)


def test_without_a_price_there_is_no_money() -> None:
    view = picture_of(demo_plans.plan(price=0.0)).view
    assert {c["dollars_step"] for c in view["choices"]} == {None}
    assert "a device-hour" not in view["subtitle"]


def test_every_device_is_a_square_until_there_are_too_many() -> None:
    for cluster, squares in (("1x4 H100", 4), ("16x8 A100-80GB", 128), ("128x8 H100", 1024), ("256x8 H100", 256)):
        svg = picture_of(demo_plans.plan(cluster)).to_svg()
        blocks = [e for e in ET.fromstring(svg).iter(f"{SVG}g") if "data-devices" in e.attrib]
        assert sum(len(b) for b in blocks) == squares, cluster


def test_idle_devices_have_a_block() -> None:
    data = demo_plans.plan_data()
    data["best"]["pools"][0]["devices"] = list(range(120))
    idle = plan_view(data)["choices"][0]["pools"][-1]
    assert (idle["name"], idle["numbers"], idle["roles"]) == ("idle", "120-127", [])


def test_it_is_saved_in_every_form(tmp_path: Path) -> None:
    for subject in (demo_plans.plan(), demo_plans.what_if()):
        for ending in ("svg", "png", "html", "txt"):
            assert hf.viz.picture(subject).save(tmp_path / f"picture.{ending}").stat().st_size > 500


def test_modules_stay_small() -> None:
    for name in ("plan", "what_if"):
        assert re.search(r"export default", esm(name))
        assert len(esm(name).encode()) < 50_000


# ---------------------------------------------------------------- what if


def test_a_question_gives_the_plan_for_it() -> None:
    what_if = demo_plans.what_if()
    first = what_if.plan.seconds
    assert what_if.set(response_tokens=2048) is what_if
    assert what_if.plan.seconds == pytest.approx(2 * first)
    assert what_if.set(devices=64).plan.cluster.num_devices == 64
    assert str(what_if.set(device="H100").plan.cluster) == "8x8 H100"
    assert what_if.set(devices=4).plan.cluster.num_devices == 4
    assert what_if.set(placement="split").plan.best.preset == "split"
    assert what_if.set(price_per_device_hour=4).plan.cost_per_step == pytest.approx(what_if.plan.seconds * 4 / 3600 * 4)


def test_its_view_has_the_sliders_where_they_stand() -> None:
    what_if = demo_plans.what_if()
    what_if.set(devices=64, layouts={"actor rollout": "tp2"})
    view = what_if_view(what_if.view(), live=True, request=7)
    check(view, WhatIfView)
    sliders = {s["name"]: s for s in view["sliders"]}
    assert (sliders["devices"]["value"], sliders["response_tokens"]["value"]) == (64, 1024)
    assert {1, 2, 4, 8, 16, 128, 256} <= set(sliders["devices"]["stops"])
    assert max(sliders["response_tokens"]["stops"]) == 6144, "with the prompt, what the models' positions allow"
    menus = {m["name"]: m["value"] for m in view["menus"]}
    assert menus["layout of actor rollout"] == "tp2 pp1"
    assert menus["placement"] == "auto"
    assert (view["live"], view["request"]) == (True, 7)
    assert "devices 64" in picture_of(what_if).to_text()


def test_every_stop_can_be_asked_for() -> None:
    what_if = demo_plans.what_if()
    for slider in what_if.view()["sliders"]:
        for stop in slider["stops"]:
            what_if.attempt({slider["name"]: stop})
            assert what_if.error == "" or "do not fit" in what_if.error
        what_if.attempt({slider["name"]: slider["value"]})


CANNOT_BE_ASKED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"devices": 0}, ("devices", "at least 1", "got 0")), ({"devices": 12}, ("devices=12", "nodes of 8")),
    ({"devices": 2.5}, ("devices=2.5",)), ({"prompts": True}, ("prompts=True",)),
    ({"response_tokens": 10**6}, ("1000000", "8192")), ({"device": "H10"}, ("'H10'", "'H100'")),
    ({"price_per_device_hour": -1.0}, ("price_per_device_hour", "at least 0", "-1.0")),
    ({"price_per_device_hour": float("nan")}, ("price_per_device_hour=nan",)), ({"placement": "splitt"}, ("'splitt'", "'split'")),
    ({"layouts": {"acter": "tp2"}}, ("acter", "actor")), ({"layouts": {"actor": 2}}, ("layouts",)),
]  # fmt: skip
"""What is asked for, and what the refusal names."""


def test_what_cannot_be_asked_is_refused_and_changes_nothing() -> None:
    what_if = demo_plans.what_if()
    before = what_if.question
    for change, named in CANNOT_BE_ASKED:
        with refuses(OptionError, *named):
            what_if.set(**change)
        assert what_if.question == before, change
    with pytest.raises(LayoutError):
        what_if.set(layouts={"actor": "tp0"})


def test_where_nothing_fits_python_raises_and_the_picture_says_so() -> None:
    what_if = demo_plans.what_if()
    with refuses(DeviceMemoryError, "1x2 A100-80GB", "40.0 GB"):
        what_if.set(devices=2)
    assert what_if.question.devices == 128
    what_if.attempt({"devices": 2})
    assert "misses" in what_if.error
    assert what_if.question.devices == 2
    assert what_if.plan.cluster.num_devices == 128, "the last plan stays"
    what_if.attempt({"devices": 16})
    assert what_if.error == ""


def test_a_sweep_has_a_row_per_value() -> None:
    frame = demo_plans.what_if().sweep("devices")
    assert list(frame.columns) == ["seconds", "cost_per_step", "plan", "error"]
    assert frame.loc[128, "seconds"] == pytest.approx(frame.loc[256, "seconds"] * 2)
    assert frame.loc[1, "seconds"] != frame.loc[1, "seconds"], "nothing fits: missing"
    assert "do not fit" in frame.loc[1, "error"]
    lengths = demo_plans.what_if().sweep("response_tokens", [1024, 4096])
    assert list(lengths["plan"]) == ["colocate", "split"]
    with refuses(OptionError, "'colour'", "response_tokens"):
        demo_plans.what_if().sweep("colour")


def test_the_curve_is_kept_while_its_own_slider_moves_and_dropped_when_another_does() -> None:
    what_if = demo_plans.what_if()
    assert what_if.view()["curve"] is None
    steps = sum(1 for _ in what_if.draw_curve("response_tokens"))
    curve = what_if.view()["curve"]
    assert len(curve["points"]) == steps >= 10
    assert curve["done"]
    assert [p["value"] for p in curve["points"]] == sorted(p["value"] for p in curve["points"])
    assert {p["plan"] for p in curve["points"]} == {"colocate", "split"}
    what_if.attempt({"response_tokens": 2048})
    assert what_if.view()["curve"] is not None
    assert list(what_if.draw_curve("response_tokens")) == [], "it is there already"
    what_if.attempt({"devices": 64})
    assert what_if.view()["curve"] is None


def test_prices_need_no_new_plan() -> None:
    calls = []

    def counted(*asked: object) -> object:
        calls.append(asked)
        return demo_plans.answer(*asked)  # type: ignore[arg-type]

    what_if = demo_plans.what_if(answer=counted)
    calls.clear()
    what_if.set(price_per_device_hour=3.0)
    assert calls == []
    what_if.set(prompts=512)
    assert len(calls) == 1


def test_a_closed_widget_lets_go_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anywidget")
    widgets, make = [], what_if_module.widget_class

    def kept(**traits: Any) -> Any:
        widgets.append(make("what_if")(**traits))
        return widgets[-1]

    monkeypatch.setattr(what_if_module, "widget_class", lambda name: kept)
    monkeypatch.setattr("IPython.display.display", lambda *shown, **options: None)
    what_if = demo_plans.what_if()
    before = set(threading.enumerate())
    what_if_module.show_live(what_if)
    threads = [t for t in set(threading.enumerate()) - before if t.name == "hfsdk-what-if"]
    assert len(threads) == 1
    widgets.pop().close()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    gone = weakref.ref(what_if)
    del what_if
    gc.collect()
    assert gone() is None


# ---------------------------------------------------------------- what if, over the planner


@pytest.fixture
def session() -> Iterator[hf.Session]:
    with hf.Session.simulated("1x8 A100-80GB", price_per_device_hour=2.0) as session:
        actor = session.actor("llama-7b", dtype="bf16", optimizer=hf.AdamW(distributed=True))
        session.critic("llama-7b", dtype="bf16", optimizer=hf.AdamW(distributed=True))
        session.reference(actor)
        session.reward(lambda prompts, completions, **columns: [0.0] * len(prompts))
        yield session


WORK = hf.Workload(prompts=64, prompt_tokens=256, response_tokens=256)


def test_it_asks_the_planner(session: hf.Session) -> None:
    what_if = session.what_if(hf.PPO(), WORK)
    assert what_if.plan.seconds == session.plan(hf.PPO(), WORK).seconds
    what_if.set(response_tokens=512, prompts=128)
    asked = hf.Workload(prompts=128, prompt_tokens=256, response_tokens=512)
    assert what_if.plan.seconds == session.plan(hf.PPO(), asked).seconds
    assert what_if.set(device="H100").plan.seconds < session.plan(hf.PPO(), asked).seconds
    assert session.placement.placement is None, "nothing of the session changes"
    assert {m["name"] for m in what_if.view()["menus"]} >= {"layout of actor", "layout of actor rollout", "layout of reference"}
    assert "layout of reward" not in {m["name"] for m in what_if.view()["menus"]}, "a function has none"


def test_what_is_fixed_stays_fixed(session: hf.Session) -> None:
    free = session.what_if(hf.PPO(), WORK).plan
    what_if = session.what_if(hf.PPO(), WORK).set(layouts={"actor": "tp2 pp2", "actor rollout": "tp1"})
    layouts = what_if.plan.layouts["actor"]
    assert (layouts["train"].tp, layouts["train"].pp, layouts["rollout"].tp) == (2, 2, 1)
    assert what_if.plan.seconds >= free.seconds
    what_if.set(layouts={"actor": "auto", "actor rollout": "auto"}, placement="split")
    homes = what_if.plan.placement.roles
    assert homes["actor"] == homes["reference"] != homes["critic"]
    assert what_if.plan.runners_up == (), "who shares devices with whom is fixed"
    assert what_if.set(placement="auto").plan.seconds == free.seconds
    session.place(what_if.plan)
    assert session.placement.placement == free.placement


def test_a_runner_up_has_its_own_blocks_step_and_memory(session: hf.Session) -> None:
    plan = session.plan(hf.PPO(), WORK)
    view = picture_of(plan).view
    assert len(view["choices"]) > 1
    for choice in view["choices"]:
        ends = [c["start_s"] + c["seconds"] for c in choice["calls"]]
        assert max(ends) == pytest.approx(choice["step_s"])
        placed = [p for p in choice["pools"] if p["roles"]]
        assert all(p["memory"] is None or p["memory"]["asked_bytes"] <= p["memory"]["exists_bytes"] for p in placed)
        assert any(p["memory"] for p in placed)


def test_placements_that_cannot_be_are_refused(session: hf.Session) -> None:
    what_if = session.what_if(hf.PPO(), WORK)
    with refuses(hf.PlacementError, "actor+reference", "there are 1", "'colocate'"):
        what_if.set(placement="split", devices=1)
    with pytest.raises(hf.LayoutError):
        what_if.set(layouts={"actor": "tp5"})
    assert what_if.question.placement == "auto"
