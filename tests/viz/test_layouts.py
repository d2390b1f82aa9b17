"""What pictures lay out is plain data, made where there is no document: marks at the places that their numbers say."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("quickjs")

from expect import each

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.trace import Span, Trace
from hfsdk.session.views import MemoryUse
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.modules import esm
from hfsdk.viz.pictures.timeline import MARK_FIELDS, RUNNING, timeline_view
from tests.viz import bad_pictures as bad
from tests.viz import demo

LANE, START, DURATION, FLAGS = map(MARK_FIELDS.index, ("lane", "start_s", "duration_s", "flags"))
LEFT, RIGHT = 150, 64
"""Beside the plot of a timeline."""


def called(picture: str, function: str, *given: Any) -> Any:
    """Return what a function of a picture's module answers in a context that has neither document nor window."""
    import quickjs

    context = quickjs.Context()
    module = esm(picture).partition("export default")[0]
    answer = "(name, json) => JSON.stringify(eval(name)(...JSON.parse(json)) ?? null)"
    context.eval(f"globalThis.call = (() => {{{module}return {answer};}})();")
    return json.loads(context.get("call")(function, json.dumps(given)))


def marks_in(marks: list[dict[str, Any]], **attrs: Any) -> list[dict[str, Any]]:
    """Return the marks, nested ones too, that have these attributes; ``_`` stands for ``-``."""
    every = [m for one in marks for m in [one, *marks_in(one.get("marks") or [])]]
    return [m for m in every if all(m["attrs"].get(k.replace("_", "-")) == v for k, v in attrs.items())]


def words_of(marks: list[dict[str, Any]]) -> list[str]:
    return [m["text"] for m in marks_in(marks) if m.get("text")]


# ---------------------------------------------------------------- timeline


def looked_at(**more: Any) -> dict[str, Any]:
    return {"isOpen": False, "now": 0.0, "zoomed": None, "width": 1000, **more}


def span(name: str, start_s: float, seconds: float | None, **more: Any) -> Span:
    start_ns = round(start_s * 1e9)
    given = {"role": "actor", "call_id": 1, "method": "update", "device": 0, "rank": 0, **more}
    return Span(name=name, start_ns=start_ns, duration_s=seconds, **given)


def test_spans_stand_in_their_lanes_at_their_seconds():
    view = timeline_view(Trace.of([span("forward", 0, 1), span("backward", 3, 1), span("forward", 0, 4, device=1, rank=1)]))
    scene = called("timeline", "layout", view, looked_at())
    plot = 1000 - LEFT - RIGHT
    for s in scene["spans"]:
        lane = view["lanes"][s["m"][LANE]]
        assert scene["at"]["laneTop"] + lane["y"] <= s["y"]
        assert s["y"] + s["h"] <= scene["at"]["laneTop"] + lane["y"] + lane["height"]
        assert s["x"] == pytest.approx(LEFT + s["m"][START] / view["duration_s"] * plot, abs=0.01)
        assert s["w"] == pytest.approx(s["m"][DURATION] / view["duration_s"] * plot, abs=0.01)
    assert len(scene["spans"]) == len(view["marks"])


def test_a_zoomed_timeline_leaves_out_what_is_not_in_view_and_cuts_what_is_longer():
    view = timeline_view(Trace.of([span("forward", 0, 1), span("backward", 3, 1), span("step", 0, 4, device=1, rank=1)]))
    scene = called("timeline", "layout", view, looked_at(zoomed=[2.5, 3.5]))
    starts = sorted(s["m"][START] for s in scene["spans"] if s["m"][DURATION] is not None)
    assert 3.0 in starts
    assert not any(s["m"][START] + s["m"][DURATION] < 2.5 for s in scene["spans"])
    assert all(s["x"] >= LEFT - 4 and s["x"] + s["w"] <= 1000 - RIGHT + 4 + 1e-9 for s in scene["spans"])
    assert called("timeline", "clamped", -1, 99, 4.0) is None, "all of it is no zoom"
    assert called("timeline", "clamped", -1, 1, 4.0) == [0, 2], "its window is moved, not cut"


def test_a_running_span_grows_until_now():
    view = timeline_view(demo.step_trace(running=True))
    running = next(i for i, m in enumerate(view["marks"]) if m[FLAGS] & RUNNING)
    live = {**view, "live": True}
    early, late = (called("timeline", "layout", live, looked_at(isOpen=True, now=view["now_s"] + s)) for s in (0, 5))
    assert late["at"]["running"]
    assert late["at"]["total"] == pytest.approx(view["now_s"] + 5)
    seconds = [
        s["w"] / scene["at"]["plot"] * scene["at"]["total"] for scene in (early, late) for s in scene["spans"] if s["i"] == running
    ]
    assert seconds[1] > seconds[0]


def test_an_empty_timeline_has_no_spans_and_still_an_axis():
    scene = called("timeline", "layout", timeline_view(Trace.of([])), looked_at())
    assert scene["spans"] == []
    assert "0" in words_of(scene["outer"])[0]


def test_arrows_walk_a_lane_and_come_to_the_nearest_of_the_next():
    spans = [
        span("forward", 0, 1),
        span("backward", 3, 1),
        span("forward", 0, 1, device=1, rank=1),
        span("backward", 3, 1, device=1, rank=1),
    ]
    view = timeline_view(Trace.of(spans))
    devices = sorted({lane for lane, one in enumerate(view["lanes"]) if one["kind"] == "device"})
    first, second = ([i for i, m in enumerate(view["marks"]) if m[LANE] == lane] for lane in devices)
    assert called("timeline", "stepped", view, first[0], 1, 0) == first[1]
    assert called("timeline", "stepped", view, first[1], 1, 0) == first[1], "a lane ends"
    assert called("timeline", "stepped", view, first[1], 0, 1) == second[1], "the nearest in time"
    assert called("timeline", "stepped", view, -1, 0, 1) == 0


# ---------------------------------------------------------------- memory


def test_what_a_call_holds_is_stacked_and_what_is_planned_stands_beside_it_hatched():
    view = picture_of(MemoryUse(bad.held_trace(), (), None, ClusterSpec.parse("1x2 cpu"), "memory")).view
    device = view["devices"][0]
    marks = called("memory", "layout", view, device)
    (held, *_) = [m for m in marks if m["attrs"].get("class") == "hf-held hf-mark"]
    parts = [m["attrs"] for m in held["marks"]]
    for below, above in zip(parts, parts[1:], strict=False):
        assert above["y"] + above["height"] == pytest.approx(below["y"])
    heights = [p["height"] / p["data-bytes"] for p in parts]
    assert heights == pytest.approx([heights[0]] * len(heights)), "bytes are heights on one scale"
    planned = bad.planned_memory().view
    stack = called("memory", "layout", planned, planned["devices"][0])
    (beside,) = [
        m for m in stack if m.get("tip") and "predicted" in m["tip"]["heading"] and m["attrs"]["class"].startswith("hf-pred")
    ]
    assert all("hatched" in m["attrs"]["fill"] for m in beside["marks"])


@each("picture", ["timeline", "memory"])
def test_a_layout_is_called_where_no_document_is(picture: str):
    assert called(picture, "(() => [typeof document, typeof window])") == ["undefined"] * 2
