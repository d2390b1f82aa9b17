"""What pictures lay out is plain data, made where there is no document: marks at the places that their numbers say."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("quickjs")

from expect import each

import hfsdk as hf
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.trace import Span, Trace
from hfsdk.session.views import MemoryUse
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.frame import bytes_text
from hfsdk.viz.modules import esm
from hfsdk.viz.pictures.placement import placement_view
from hfsdk.viz.pictures.plan import plan_view
from hfsdk.viz.pictures.timeline import MARK_FIELDS, RUNNING, timeline_view
from hfsdk.viz.pictures.what_if import what_if_view
from tests.viz import bad_pictures as bad
from tests.viz import demo, demo_plans
from tests.viz import token_batches as made
from tests.viz.every_picture import EVERY, simulated_flow

LANE, START, DURATION, FLAGS = map(MARK_FIELDS.index, ("lane", "start_s", "duration_s", "flags"))
LEFT, RIGHT = 150, 64
"""Beside the plot of a timeline."""


def called(picture: str, function: str, *given: Any) -> Any:
    """Return what a function of a picture's module answers in a context that has neither document nor window."""
    import quickjs

    context = quickjs.Context()
    context.eval(
        "globalThis.TextDecoder = class { decode(bytes) { return String.fromCharCode(...bytes); } }"
    )  # no part of a document
    module = esm(picture).partition("export default")[0]
    answer = "(name, json) => JSON.stringify(eval(name)(...JSON.parse(json)) ?? null)"
    context.eval(f"globalThis.call = (() => {{{module}return {answer};}})();")
    return json.loads(context.get("call")(function, json.dumps(given)))


def marks_in(marks: list[dict[str, Any]], **attrs: Any) -> list[dict[str, Any]]:
    """Return the marks, nested ones too, that have these attributes; ``_`` stands for ``-``."""
    every = [m for one in marks for m in [one, *marks_in(one["inside"] if isinstance(one.get("inside"), list) else [])]]
    return [m for m in every if all(m["attrs"].get(k.replace("_", "-")) == v for k, v in attrs.items())]


def words_of(marks: list[dict[str, Any]]) -> list[str]:
    return [m["inside"] for m in marks_in(marks) if isinstance(m.get("inside"), str)]


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
    parts = [m["attrs"] for m in held["inside"]]
    for below, above in pairwise(parts):
        assert above["y"] + above["height"] == pytest.approx(below["y"])
    heights = [p["height"] / p["data-bytes"] for p in parts]
    assert heights == pytest.approx([heights[0]] * len(heights)), "bytes are heights on one scale"
    planned = bad.planned_memory().view
    stack = called("memory", "layout", planned, planned["devices"][0])
    (beside,) = [
        m for m in stack if m.get("tip") and "predicted" in m["tip"]["heading"] and m["attrs"]["class"].startswith("hf-pred")
    ]
    assert all("hatched" in m["attrs"]["fill"] for m in beside["inside"])


# ---------------------------------------------------------------- resharding


def resharded(variant: int = 0, chosen: str = "", at: int = 0, width: int = 900, flying: bool = False) -> dict[str, Any]:
    view = picture_of(bad.plan_of("m", "tp4", "tp2")).view
    look = {"variant": variant, "chosen": chosen, "at": at, "width": width, "flying": flying}
    return called("reshard", "layout", view, look)


def arrived(scene: dict[str, Any]) -> list[int]:
    return [m["attrs"]["data-arrived"] for m in marks_in(scene["marks"]) if "data-arrived" in m["attrs"]]


def test_bars_of_ranks_are_as_long_as_their_bytes_and_planned_ones_are_hatched():
    last = len(resharded()["steps"]) - 1
    for at, names in ((0, {"held"}), (last, {"own", "received", "aside"})):
        parts = [m["attrs"] for m in marks_in(resharded(at=at)["marks"], **{"class": "hf-part"})]
        assert {p["data-part"] for p in parts} <= names
        scale = [p["width"] / p["data-bytes"] for p in parts if p["width"] > 0.5]
        assert scale == pytest.approx([scale[0]] * len(scale))
        assert all("hatched" in p["fill"] for p in parts)


def test_pieces_arrive_step_by_step_and_those_that_fly_are_not_there_yet():
    name = "model.layers.0.self_attn.qkv_proj.weight"
    steps = resharded(chosen=name)["steps"]
    there = [sum(arrived(resharded(chosen=name, at=k))) for k in range(len(steps))]
    assert there[0] == 0
    assert there == sorted(there)
    assert there[-1] == len(arrived(resharded(chosen=name)))
    assert there[1] > sum(arrived(resharded(chosen=name, at=1, flying=True)))


def test_a_narrow_room_puts_ranks_below_each_other():
    name = "model.layers.0.self_attn.qkv_proj.weight"
    wide, narrow = (resharded(chosen=name, width=width) for width in (1160, 440))
    assert narrow["height"] > wide["height"]
    assert narrow["width"] <= 440
    boxes = [m["attrs"] for m in marks_in(narrow["marks"]) if m["tag"] == "rect"]
    assert all(b["x"] >= 0 and b["x"] + b["width"] <= 448 for b in boxes)


def test_a_matrix_has_a_cell_for_every_pair_that_moves_and_arrows_go_to_the_nearest():
    view = picture_of(bad.plan_of("m", "tp4", "tp2")).view
    (plan,) = view["variants"]
    cells = [m["tip"] for m in called("reshard", "matrixOf", view, plan, None)["marks"] if m.get("tip")]
    assert len(cells) == sum(bool(n) for row in plan["matrix"] for n in row)
    tips = [{"row": row, "column": column} for row, column in ((0, 0), (0, 3), (0, 2), (2, 0))]
    assert [called("reshard", "nextCell", tips, 0, dx, dy) for dx, dy in ((1, 0), (0, 1), (-1, 0))] == [2, 3, 0]
    assert called("reshard", "nextCell", tips, -1, 1, 0) == 0


# ---------------------------------------------------------------- tokens

LOOK = {
    "sort": {"key": "row", "down": False}, "query": "", "current": 0, "token": -1, "side": False, "printed": False, "paper": False,
    "filter": {"key": "", "low": "", "high": "", "words": {}, "clipped": False},
}  # fmt: skip


def tokens_view() -> dict[str, Any]:
    return hf.viz.tokens_picture(made.batch(6), new="new_log_probs").view


def test_samples_are_sorted_either_way_and_those_without_a_number_come_last():
    view = tokens_view()
    view["samples"][2]["numbers"].pop("scores", None)
    ordered = "(d, order) => [order, order.map((i) => d.means[i].scores ?? null)]"
    ordered = f"(view, look) => {{ const d = numbersOf(view); return ({ordered})(d, orderOf(d, look)); }}"
    for down in (False, True):
        order, scores = called("tokens", ordered, view, {**LOOK, "sort": {"key": "scores", "down": down}})
        assert order[-1] == 2
        assert scores[:-1] == sorted(scores[:-1], reverse=down)


def test_a_filter_by_number_and_a_search_leave_those_that_match():
    view = tokens_view()
    ordered = "(view, look) => orderOf(numbersOf(view), look)"
    means = called("tokens", "(view) => numbersOf(view).means", view)
    least = sorted(m["tokens"] for m in means)[2]
    filtered = {**LOOK["filter"], "key": "tokens", "low": str(least)}
    assert called("tokens", ordered, view, {**LOOK, "filter": filtered}) == [i for i, m in enumerate(means) if m["tokens"] >= least]
    assert called("tokens", ordered, view, {**LOOK, "query": "no such words"}) == []


def test_a_pane_shows_the_page_of_the_chosen_token_and_rows_only_of_the_response():
    view = tokens_view()
    sample = view["samples"][0]
    size = len(sample["prompt"]) + len(sample["response"])
    page = "(view, look, room) => pageOf(numbersOf(view), 0, room, { ...look, pages: new Map([[0, 0]]) })"
    assert called("tokens", page, view, {**LOOK, "token": size - 1}, 5) == (size - 1) // 5 * 5
    assert called("tokens", page, view, LOOK, 5) == 0
    tokens = "(view, look, to) => tokensOf(numbersOf(view), 0, 0, to, { ...look, field: view.fields[0] })"
    shown = called("tokens", tokens, view, LOOK, size)
    rows = [sample["first_row"] + k for k in range(len(sample["response"]))]
    assert [t["row"] for t in shown] == [None] * len(sample["prompt"]) + rows
    assert all(("hf-given" in t["names"]) == (t["row"] is None) for t in shown)


# ---------------------------------------------------------------- dataflow


@pytest.fixture(scope="module")
def flow() -> dict[str, Any]:
    return simulated_flow().view


def test_every_line_ends_at_a_row_of_the_box_that_reads_it(flow: dict[str, Any]):
    marks = called("dataflow", "layout", flow)
    boxes = {m["tip"]["call"]: m["tip"] for m in marks if "call" in (m.get("tip") or {})}
    ports = {m["tip"]["edge"]: m["tip"] for m in marks if "edge" in (m.get("tip") or {})}
    assert sorted(boxes) == sorted(call["id"] for call in flow["calls"])
    for k, edge in enumerate(flow["edges"]):
        assert ports[k]["x"] == boxes[edge["target"]]["x"]
        assert ports[k]["y"] > boxes[edge["target"]]["y"]
        assert called("dataflow", "touches", flow, k, {"call": edge["source"]})
        assert called("dataflow", "touches", flow, k, {"edge": k})
    empty = called("dataflow", "layout", {**flow, "calls": [], "edges": [], "bands": []})
    assert words_of(empty) == ["no calls in this step yet"]


def test_arrows_walk_a_column_of_boxes_and_go_to_the_nearest_of_the_next():
    tips = [{"x": 0, "y": 0}, {"x": 0, "y": 10}, {"x": 9, "y": 11}, {"x": 9, "y": 40}]
    steps = [(0, 0, 1, 1), (1, 0, 1, 1), (1, 1, 0, 2), (3, -1, 0, 1), (2, 1, 0, 2), (-1, 0, 1, 0)]
    for current, dx, dy, there in steps:
        assert called("dataflow", "stepped", tips, current, dx, dy) == there
    assert called("dataflow", "stepped", [], -1, 0, 1) == -1


def test_a_transfer_has_the_sums_of_its_rows_and_columns_at_its_ends(flow: dict[str, Any]):
    edge = max(flow["edges"], key=lambda e: len(e["cells"]))
    matrix = called("dataflow", "matrixOf", edge)
    cells = [m for m in matrix["marks"] if m.get("tip")]
    assert sum(m["attrs"]["data-bytes"] for m in cells) == edge["bytes_read"]
    assert words_of(matrix["marks"])[-1] == bytes_text(edge["bytes_read"])
    for m in cells:
        (box, *_) = m["inside"]
        assert 0 < box["attrs"]["x"] < matrix["width"]
        assert ("hatched" in box["attrs"]["fill"]) == bool(edge["predicted"])


# ---------------------------------------------------------------- placement


def test_shards_stack_in_their_device_and_memory_is_as_long_as_its_bytes():
    view = placement_view(demo.placement_data(1, 4))
    marks = called("placement", "layout", view)
    devices = {m["attrs"]["data-device"]: m["attrs"] for m in marks_in(marks) if "data-device" in m["attrs"]}
    shards = [m for m in marks if (m.get("tip") or {}).get("shard")]
    assert len(shards) == sum(len(d["shards"]) for node in view["nodes"] for d in node["devices"])
    for m in shards:
        device, card = devices[m["tip"]["device"]["number"]], m["inside"][0]["attrs"]
        assert device["x"] < card["x"]
        assert card["x"] + card["width"] < device["x"] + device["width"]
        assert device["y"] < card["y"]
        assert card["y"] + card["height"] < device["y"] + device["height"]
    planned = [m["attrs"] for m in marks if "hatched" in str(m["attrs"].get("fill"))]
    bytes_of = {s["row"]: s["planned_bytes"] for node in view["nodes"] for d in node["devices"] for s in d["shards"]}
    scale = [a["width"] / bytes_of[a["data-row"]] for a in planned if a["width"] > 0.5]
    assert scale == pytest.approx([scale[0]] * len(scale))


def test_memory_that_nobody_measured_is_an_empty_dashed_bar():
    marks = called("placement", "layout", placement_view(demo.placement_data(1, 4, measured=False)))
    assert len(marks_in(marks, **{"class": "hf-edge hf-nomeasure"})) == 4
    assert not [m for m in marks if (m.get("tip") or {}).get("rows")], "no process memory either"


def test_a_mesh_has_stages_side_by_side_and_replicas_below_each_other():
    shards = [
        {"rank": 4 * d + 2 * p + t, "row": 0, "tp": t, "pp": p, "dp": d} for d in range(2) for p in range(2) for t in range(2)
    ]
    role = {"name": "actor", "color": "#3b76c4"}
    cells = {
        m["attrs"]["data-rank"]: m["inside"] for m in called("placement", "meshOf", role, shards, True)["marks"] if m.get("tip")
    }
    at = {rank: (box["attrs"]["x"], box["attrs"]["y"]) for rank, (box, _) in cells.items()}
    assert at[0][0] < at[1][0] < at[2][0]
    assert at[0][1] == at[2][1]
    assert at[4][0] == at[0][0]
    assert at[4][1] > at[0][1]
    assert [text["inside"] for _, text in cells.values()] == [f"G{k}" for k in range(1, 9)], "the paper's numbers begin at 1"
    assert [called("placement", "along", shards[0], other) for other in shards] == [None, "tp", "pp", None, "dp", None, None, None]


# ---------------------------------------------------------------- plan


def test_pools_of_a_plan_have_a_square_per_device_and_memory_below_them_where_it_is_narrow():
    view = plan_view(demo_plans.plan_data())
    choice = view["choices"][0]
    wide, narrow = (called("plan", "poolsLayout", view, choice, width) for width in (1180, 600))
    assert narrow["height"] > wide["height"]
    for pool, m in zip(choice["pools"], wide["marks"], strict=True):
        (block,) = [one for one in m["inside"] if "hf-pool-devices" in one["attrs"].get("class", "")]
        assert len(block["inside"]) == pool["num_devices"]
        (gradient,) = [one for one in m["inside"] if one["tag"] == "defs"]
        assert len(gradient["inside"][0]["inside"]) == 2 * len(pool["roles"])
    backs = [m["inside"][0]["attrs"] for m in wide["marks"]]
    assert all(above["y"] + above["height"] < below["y"] for above, below in pairwise(backs))


def test_calls_of_a_plan_stand_at_their_seconds_and_bands_of_phases_never_overlap():
    view = plan_view(demo_plans.plan_data())
    choice = view["choices"][0]
    step = called("plan", "stepLayout", view, choice, 1180)
    calls = {m["attrs"]["data-call"]: m["inside"][0]["attrs"] for m in step["marks"] if "data-call" in m["attrs"]}
    plot = 1180 - 118 - 76
    for call in choice["calls"]:
        assert calls[call["call"]]["x"] == pytest.approx(118 + call["start_s"] / view["scale_s"] * plot)
    bands = [{"phase": p, "start_s": s, "seconds": 2.0} for p, s in (("a", 0), ("b", 1), ("c", 2.5))]
    assert [b["row"] for b in called("plan", "phaseBands", bands)] == [0, 1, 0]
    assert called("plan", "stepLayout", view, {**choice, "calls": [], "step_s": None}, 1180)["marks"][-1]["inside"] == "0 s"


# ---------------------------------------------------------------- a plan's curves


def test_a_point_stands_between_two_stops_by_its_share_and_no_fit_is_a_cross_that_lifts_the_line():
    assert [called("what_if", "share", [1, 2, 4], v) for v in (1, 1.5, 2, 3, 4, 9)] == [0, 0.25, 0.5, 0.75, 1, 1]
    assert called("what_if", "share", [5], 5) == 0.5
    points = [{"value": v, "seconds": s, "dollars": None, "plan": p} for v, s, p in ((1, 2.0, "a"), (2, None, ""), (4, 1.0, "b"))]
    view = what_if_view(demo_plans.what_if().draw("response_tokens").view())
    view["curve"] = {**view["curve"], "points": points, "stops": [1, 2, 4]}
    scene = called("what_if", "(view) => layout(view, METRICS[0])", view)
    assert len(scene["places"]) == 3
    (line,) = [m["attrs"]["d"] for m in scene["marks"] if m["tag"] == "path"]
    assert line.count("M") == 2
    assert "L" not in line
    assert words_of(scene["marks"])[-1] == "×: nothing fits"
    assert len(marks_in(scene["marks"], **{"class": "hf-edge hf-turn"})) == 1, "another plan is best from there"


# ---------------------------------------------------------------- dashboard


def test_a_curve_is_lifted_where_a_step_measured_nothing_and_its_lonely_points_are_dots():
    curve = {"name": "score", "points": [[0, 1.0], [1, None], [2, 3.0], [3, 2.0]], "last": 2.0}
    scene = called("dashboard", "layout", curve, 2, False)
    (line,) = [m["attrs"]["d"] for m in scene["marks"] if m["tag"] == "path"]
    assert (line.count("M"), line.count("L")) == (2, 1)
    assert [step for _, step in scene["places"]] == [0, 2, 3]
    assert len(marks_in(scene["marks"], **{"class": "hf-current"})) == 1
    long = {**curve, "points": [[k, None if k == 1 else float(k)] for k in range(60)]}
    dots = [m["attrs"]["data-step"] for m in called("dashboard", "layout", long, None, False)["marks"] if m["tag"] == "circle"]
    assert dots == [0], "where there are many, only those that no line reaches"
    empty = called("dashboard", "layout", {**curve, "points": [[0, None]]}, None, False)
    assert words_of(empty["marks"]) == ["score", "not measured"]
    assert empty["places"] == []


def test_calls_of_a_step_have_a_row_per_role_and_predicted_ones_are_hatched():
    calls = [
        {"call": f"{role}.update", "row": k, "start_s": s, "seconds": 1.0, "color": "#3b76c4"}
        for k, role, s in ((0, "actor", 0.0), (1, "critic", 0.5))
    ]
    made = called("dashboard", "callsLayout", {"calls": calls}, 600, True)
    bars = [m["attrs"] for m in made["marks"] if m["attrs"].get("data-call")]
    assert [b["y"] for b in bars] == [1, 19]
    assert bars[1]["x"] - bars[0]["x"] == pytest.approx((600 - 84) / 1.5 * 0.5)
    assert all("hatched" in b["fill"] for b in bars)
    assert called("dashboard", "callsLayout", {"calls": []}, 600, True) is None


# ---------------------------------------------------------------- credit


COLUMNS = {"rewards": [0.0, -0.5, 1.0], "values": [0.2, 0.4, 0.6]}


def credit_view(**more: Any) -> dict[str, Any]:
    return {"tokens": ["a", "b", "c"], "first_row": 7, "score": 1.0, "kl_coef": 0.0, **more}


def bars_of(scene: dict[str, Any], panel: str) -> list[dict[str, Any]]:
    (found,) = marks_in(scene["marks"], **{"data-panel": panel})
    return [m["attrs"] for m in found["inside"] if m["attrs"].get("class") == "hf-bar"]


def test_columns_of_a_credit_picture_have_their_rows_and_the_last_reward_the_colour_of_its_score():
    look = {"gamma": 1.0, "lam": 0.5, "chosen": 1, "from": 0, "width": 900}
    scene = called("credit", "layout", credit_view(), COLUMNS, look)
    rewards, advantages = bars_of(scene, "rewards"), bars_of(scene, "advantages")
    assert [b["data-row"] for b in rewards] == [7, 8, 9]
    assert [b["fill"] for b in rewards[:2]] == ["#77808a"] * 2
    assert rewards[2]["fill"] == "#2f7fd0"
    assert all("hatched" in b["fill"] for b in advantages)
    deltas = [0.2, -0.3, 0.4]
    expected = [deltas[0] + 0.5 * (deltas[1] + 0.5 * deltas[2]), deltas[1] + 0.5 * deltas[2], deltas[2]]
    assert scene["made"]["advantages"] == pytest.approx(expected)
    assert scene["made"]["arriving"] == pytest.approx([0, deltas[1], 0.5 * deltas[2]])
    (chosen, *_) = scene["marks"]
    assert chosen["attrs"]["x"] == pytest.approx(rewards[1]["x"] - 0.75)


def test_a_credit_picture_without_tokens_says_so_and_a_number_that_is_none_is_a_dashed_frame():
    look = {"gamma": 1.0, "lam": 1.0, "chosen": 0, "from": 0, "width": 900}
    empty = called("credit", "layout", credit_view(tokens=[]), {"rewards": [], "values": []}, look)
    assert words_of(empty["marks"]) == ["no response tokens"]
    broken = called("credit", "layout", credit_view(), {**COLUMNS, "values": [0.2, None, 0.6]}, look)
    frames = marks_in(broken["marks"], **{"class": "hf-edge hf-nomeasure"})
    assert len(frames) == len([m for m in frames if m["attrs"]["stroke-dasharray"] == "2 2"])


# ---------------------------------------------------------------- clip


def test_what_clipping_cuts_is_counted_on_its_side_and_stands_crossed_over_the_rest():
    groups = {
        "ratio": [0.5, 1.0, 2.0], "log_ratio": [-0.6931, 0.0, 0.6931], "positive": [1, 2, 3], "negative": [4, 5, 6],
        "zero": [0, 0, 0], "positive_mass": [1.0, 2.0, 3.0], "negative_mass": [4.0, 5.0, 6.0],
    }  # fmt: skip
    view = {"span": 2.0, "num_tokens": 21, "new": "new", "old": "old"}
    sums = called("clip", "counted", view, groups, 0.2, 0.2)
    assert (sums["positive"], sums["negative"], sums["clipped"]) == (3, 4, 7)
    assert sums["share"] == pytest.approx(7 / 21)
    assert sums["mass"] == pytest.approx(7 / 21)
    look = {"low": 0.2, "high": 0.2, "logCounts": False, "current": -1, "width": 900}
    scene = called("clip", "layout", view, sums, look)
    crossed = [m["attrs"] for m in marks_in(scene["marks"]) if isinstance(m["attrs"].get("fill"), dict)]
    middle = 20 + 120
    assert sorted(box["y"] >= middle for box in crossed) == [False, True]
    every = [m["attrs"] for m in marks_in(scene["marks"]) if "data-count" in m["attrs"]]
    scale = [box["height"] / box["data-count"] for box in every]
    assert scale == pytest.approx([scale[0]] * len(scale))
    logs = called("clip", "layout", view, sums, {**look, "logCounts": True})
    heights = {m["attrs"]["data-count"]: m["attrs"]["height"] for m in marks_in(logs["marks"]) if "data-count" in m["attrs"]}
    assert heights[6] / heights[3] == pytest.approx(math.log10(7) / math.log10(4))


# ---------------------------------------------------------------- probe


def test_every_sample_is_a_mark_in_each_panel_where_it_has_a_number():
    view = picture_of(demo.reward_probe()).view
    scene = called("probe", "layout", view, 1000)
    for panel, m in zip(view["panels"], scene["marks"], strict=True):
        drawn = [one for one in m["inside"] if one.get("tip")]
        known = [r for r in view["rows"] if r.get(panel["key"]) is not None]
        assert len(drawn) == (len(view["rows"]) if panel["key"] == "seconds" else len(known))
        for one in drawn:
            assert 0 <= one["tip"]["x"] <= 1000
            assert 0 <= one["tip"]["y"] <= scene["height"]
    narrow = called("probe", "layout", view, 300)
    assert narrow["height"] == len(view["panels"]) * 196, "one below the other"


# ---------------------------------------------------------------- pictures of rows

ROWS = {"calibration": "calls", "census": "ranks", "comparison": "rows", "explanation": "bars", "gap": "causes"}
"""Pictures with a row for each entry of a list of their views."""


def rows_laid_out(name: str, view: dict[str, Any], current: int = -1) -> list[dict[str, Any]]:
    laid = called(name, "layout", view, 900, current)
    return laid["marks"] if isinstance(laid, dict) else laid


@each("name", ROWS)
def test_rows_stand_below_each_other_and_the_current_one_is_shaded(name: str):
    view = EVERY[name]().view
    rows = [m for m in rows_laid_out(name, view, current=1) if m.get("tip")]
    backs = [m["inside"][0]["attrs"] for m in rows]
    assert len(rows) > 1
    assert [m["tip"]["row"] for m in rows] == [i for i, one in enumerate(view[ROWS[name]]) if one.get("kind") != "heading"]
    assert all(above["y"] + above["height"] <= below["y"] for above, below in pairwise(backs))
    assert [back["fill-opacity"] for back in backs] == [int(m["tip"]["row"] == 1) for m in rows]


@each("name", ROWS)
def test_a_picture_of_no_rows_lays_out_none(name: str):
    empty = {**EVERY[name]().view, ROWS[name]: [], "layers": []}
    assert rows_laid_out(name, empty) == []


PICTURES = [
    "clip",
    "credit",
    "dashboard",
    "dataflow",
    "memory",
    "placement",
    "plan",
    "probe",
    "reshard",
    "timeline",
    "tokens",
    "what_if",
]


@each("picture", [*ROWS, *PICTURES])
def test_a_layout_is_called_where_no_document_is(picture: str):
    assert called(picture, "(() => [typeof document, typeof window])") == ["undefined"] * 2
