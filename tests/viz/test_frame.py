"""The pictures without a browser: schema, well-formed XML, escaping, size, nothing loaded, predicted against measured."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import types
import typing
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from expect import each

from hfsdk.core.trace import Span, Trace
from hfsdk.session.report import write_report
from hfsdk.viz import frame, hooks
from hfsdk.viz.frame import Picture
from hfsdk.viz.modules import esm, js_literal
from hfsdk.viz.pictures.placement import PlacementPicture, PlacementView, placement_view
from hfsdk.viz.pictures.timeline import MARK_FIELDS, PARENT, PREDICTED, RUNNING, TimelinePicture, TimelineView, timeline_view
from hfsdk.viz.tables import batch_html, metrics_html, progress_html, progress_text, session_html, sessions_html
from tests.viz import demo

STATIC = Path(frame.__file__).parent / "static"
SVG = "{http://www.w3.org/2000/svg}"
NASTY = "</script><!-- <b>&\"' ]]>"


def timeline(**options: Any) -> TimelinePicture:
    return TimelinePicture(timeline_view(demo.step_trace(**options)))


def placement(*shape: int, **options: Any) -> PlacementPicture:
    return PlacementPicture(placement_view(demo.placement_data(*shape, **options)))


PICTURES: dict[str, Callable[[], Picture]] = {
    "timeline": timeline,
    "timeline of three steps": lambda: timeline(steps=3, devices=4),
    "timeline of 128 devices": lambda: timeline(devices=128, nested=False),
    "timeline of two pools": lambda: TimelinePicture(timeline_view(demo.pools_trace())),
    "empty timeline": lambda: TimelinePicture(timeline_view(Trace.of([]))),
    "placement": placement,
    "placement of 16x8": lambda: placement(16, 8),
    "placement with a shadow": lambda: PlacementPicture(placement_view(demo.shadow_data())),
    "predicted placement": lambda: placement(1, 4, measured=False),
}


def check(value: Any, kind: Any, where: str = "view") -> None:
    """Check plain data against a TypedDict."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind)
        assert set(value) == set(hints), where
        for key, hint in hints.items():
            check(value[key], hint, f"{where}.{key}")
    elif origin in (list, dict):
        assert isinstance(value, origin), where
        for key, item in enumerate(value) if origin is list else value.items():
            check(item, arguments[-1], f"{where}[{key}]")
    elif origin is typing.Literal:
        assert value in arguments, where
    elif origin is types.UnionType:
        if value is not None:
            check(value, next(a for a in arguments if a is not type(None)), where)
    elif kind is not Any:
        assert isinstance(value, (int, float) if kind is float else kind), f"{where}: {value!r} is no {kind}"


@each("name", PICTURES)
def test_views_follow_their_schema_and_are_json(name: str) -> None:
    view = PICTURES[name]().view
    check(view, TimelineView if view["picture"] == "timeline" else PlacementView)
    assert json.loads(json.dumps(view, allow_nan=False)) == view


@each("name", PICTURES)
def test_drawings_are_well_formed_and_described_and_load_nothing_from_anywhere(name: str) -> None:
    picture = PICTURES[name]()
    svg = picture.to_svg()
    picture.to_svg = lambda: svg  # type: ignore[method-assign]  # drawn once: HTML holds the drawing as an image
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title") is not None
    assert root.find(f"{SVG}desc").text
    for text in (picture.to_html(), picture.to_html(full=True), svg):
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[^\s\"'\\<]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, "a namespace is no address"
        assert "@import" not in text
        assert "<link" not in text


def test_frozen_html_shows_an_image_where_scripts_do_not_run() -> None:
    html = timeline().to_html()
    source = re.search(r'<img alt="([^"]*)"[^>]* src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert "7 calls" in source[1]
    ET.fromstring(base64.b64decode(source[2]))
    assert set(timeline().bundle()) == {"text/plain", "text/html"}


def test_texts_cannot_leave_their_place() -> None:
    span = Span(name=NASTY, role=NASTY, call_id=0, method=NASTY, start_ns=0, duration_s=1.0, attrs={NASTY: NASTY})
    data = demo.placement_data()
    data["title"] = data["nodes"][0]["name"] = data["roles"][0]["name"] = data["devices"][0]["name"] = NASTY
    for picture in (TimelinePicture(timeline_view(Trace.of([span], NASTY))), PlacementPicture(placement_view(data))):
        html = picture.to_html()
        ET.fromstring(picture.to_svg())
        assert html.count("</script") == 1, "only the frame's own end of script"
        assert "<!--" not in html
        assert "<b>" not in html
    assert not re.search("[<>&]", js_literal({"a": NASTY}))
    assert json.loads(js_literal({"a": NASTY})) == {"a": NASTY}


def test_sizes_stay_small() -> None:
    assert len(timeline().to_html()) < 80_000
    assert len(placement().to_html()) < 60_000
    assert len(esm("timeline")) < 36_000
    assert len(esm("placement")) < 26_000
    assert len(timeline(devices=32, steps=24).to_svg()) < 1_500_000


@each("name", sorted(path.stem for path in STATIC.glob("*.js") if "export default" in path.read_text(encoding="utf-8")))
def test_the_parts_of_a_module_have_names_of_their_own_and_no_function_is_idle(name: str) -> None:
    quickjs = pytest.importorskip("quickjs")
    quickjs.Context().module(esm(name))  # refuses what is declared twice
    for function in re.findall(r"^function (\w+)", esm(name), re.MULTILINE):
        assert len(re.findall(rf"\b{function}\b", esm(name))) > 1, function


def test_predicted_and_measured_never_share_a_style() -> None:
    span = Span(name="update", role="actor", call_id=0, method="update", start_ns=0, duration_s=1.0)
    svg = ET.fromstring(TimelinePicture(timeline_view(Trace.of([span, replace(span, predicted=True)]))).to_svg())
    measured, predicted = by_row(svg, 0)[0], by_row(svg, 1)[0]
    assert measured.get("fill").startswith("#")
    assert predicted.get("fill").startswith("url(#")
    assert predicted.get("stroke")
    drawing = ET.fromstring(placement().to_svg())
    fills = {e.get("fill")[:4] for e in by_row(drawing, 0) if e.get("height") == "9"}
    assert fills == {"url(", "#3b7"}, "the same shard: planned hatched, measured solid"


def by_row(svg: ET.Element, row: int) -> list[ET.Element]:
    return [e for e in svg.iter() if e.get("data-row") == str(row)]


def test_missing_is_drawn_as_missing() -> None:
    svg = placement(1, 2, measured=False).to_svg()
    assert svg.count(">not measured<") == 3, "one per device and one in the legend"
    assert "not measured" in placement(1, 2, measured=False).to_text()
    row = next(r for r in timeline().view["breakdown"] if r["call"] == "reward.compute_scores")
    assert row["tokens"] is None
    assert row["tokens_per_s"] is None
    assert "not measured" in metrics_html(demo.METRICS)


def test_shadows_are_roles_of_their_own_kind() -> None:
    for behind, words in ((None, "no weights yet"), (0, "fresh"), (2, "2 updates behind")):
        picture = PlacementPicture(placement_view(demo.shadow_data(behind)))
        actor, *_, shadow = picture.view["roles"]
        assert shadow["color"] == frame.shade(actor["color"], frame.SHADOW_TONE)
        assert "generates in actor.rollout" in actor["label"]
        cards = {e.get("data-role"): "|".join(e.itertext()) for e in ET.fromstring(picture.to_svg()).iter() if e.get("data-role")}
        place = "rollout 0 tp0" if len(words) < 16 else "rollout 0 …"  # side by side, in a card's width
        assert cards["actor.rollout"] == f"actor.rollout|rank 0|{place}|{words}"
        assert cards["actor"].endswith("rollout apart")
        assert "actor.rollout · shadow of actor" in picture.to_text()


def test_pools_stand_above_their_devices() -> None:
    picture = PlacementPicture(placement_view(demo.shadow_data()))
    spans = picture.view["nodes"][0]["pools"]
    assert [(s["first"], s["num_devices"]) for s in spans] == [(0, 2), (2, 1), (3, 1)]
    assert [s["text"] for s in spans[:2]] == ["pool actor+reference", "pool actor.rollout"]
    assert spans[2]["text"].endswith("…")
    assert all(s["text"] in picture.to_svg() for s in spans)
    assert "pool actor+reference: devices 0, 1" in picture.to_text()


def test_lanes_of_several_pools_stand_together_and_say_who_overlaps() -> None:
    picture = TimelinePicture(timeline_view(demo.pools_trace()))
    lanes = [(lane["device"], lane["pool"]) for lane in picture.view["lanes"] if lane["device"] is not None]
    assert lanes == [(0, "actor"), (1, ""), (2, "actor.rollout")]
    assert ">pool actor.rollout<" in picture.to_svg()
    rows = {r["pools"]: r["seconds"] for r in picture.view["overlaps"]}
    assert rows == pytest.approx({"actor alone": 0.7, "actor.rollout alone": 0.5, "actor and actor.rollout at once": 0.5})
    notes = {n["name"]: n["note"] for n in picture.view["names"] if n["color"]}
    assert {name for name, note in notes.items() if note == "moves data"} == {"sync", "export_weights", "fetch"}
    assert notes["wait"] == "for a neighbouring stage"
    assert all(f">{name}<" in picture.to_svg() for name in notes), "each is in the legend"
    assert timeline().view["overlaps"] == [], "one pool overlaps with none"
    assert not any(lane["pool"] for lane in timeline().view["lanes"])


def test_every_span_is_a_mark_with_its_row() -> None:
    for nested in (True, False):
        trace = demo.step_trace(nested=nested)
        picture = TimelinePicture(timeline_view(trace))
        assert [m[MARK_FIELDS.index("row")] for m in picture.view["marks"]] == list(range(len(trace)))
        drawn = {int(e.get("data-row")) for e in ET.fromstring(picture.to_svg()).iter() if e.get("data-row")}
        assert drawn == set(range(len(trace)))
        frame_ = trace.to_pandas()
        for mark in picture.view["marks"]:
            fields = dict(zip(MARK_FIELDS, mark, strict=True))
            assert picture.view["names"][fields["name"]]["name"] == frame_["name"][fields["row"]]
            assert fields["start_s"] == pytest.approx(frame_["start_s"][fields["row"]], abs=1e-9)


def test_sub_spans_are_nested_in_their_parent_and_lanes_are_one_row() -> None:
    view = timeline().view
    flags, depth = MARK_FIELDS.index("flags"), MARK_FIELDS.index("depth")
    assert {m[depth] for m in view["marks"] if m[flags] & PARENT} == {0}
    assert {m[depth] for m in view["marks"]} == {0, 1}
    assert [lane["label"] for lane in view["lanes"]] == [
        "actor",
        "reference",
        "critic",
        "reward",
        "device 0",
        "device 1",
    ]
    assert all(lane["height"] == lane["row_height"] for lane in view["lanes"])
    assert [p["phase"] for p in view["phases"]] == ["generation", "preparation", "learning"]
    assert sum(r["share"] for r in view["breakdown"]) == pytest.approx(3.44 / 3.56)


def test_idle_agrees_with_the_trace() -> None:
    trace = demo.step_trace(nested=True)
    busy = {lane["device"]: lane["busy_share"] for lane in timeline_view(trace)["lanes"] if lane["device"] is not None}
    for device, idle in trace.idle().items():
        assert busy[device] == pytest.approx(1 - idle, abs=1e-6)
    activities = timeline_view(trace)["activities"]
    assert sum(a["share"] for a in activities) == pytest.approx(1.0)


def test_overlapping_calls_get_rows_of_their_own() -> None:
    first = Span(name="a", role="actor", call_id=0, method="a", start_ns=0, duration_s=1.0)
    second = replace(first, name="b", call_id=1, start_ns=500_000_000)
    lane = timeline_view(Trace.of([first, second]))["lanes"][0]
    assert lane["height"] == 2 * lane["row_height"]


def test_running_spans_are_open_ended() -> None:
    trace = demo.step_trace(running=True)
    now_ns = demo.START_NS + 5_000_000_000
    live, still = timeline_view(trace, now_ns), timeline_view(trace)
    assert live["live"]
    assert not still["live"], "without a clock nothing grows"
    assert live["now_s"] == 5.0
    assert live["duration_s"] == 5.0
    assert live["phases"][-1]["end_s"] is None
    running = [m for m in live["marks"] if m[MARK_FIELDS.index("flags")] & RUNNING]
    assert len(running) == 5, "the call, and on each device its span and the last sub-span"
    assert all(m[MARK_FIELDS.index("duration_s")] is None for m in running)
    assert not timeline_view(demo.step_trace(), now_ns)["live"]
    assert not any(m[MARK_FIELDS.index("flags")] & PREDICTED for m in live["marks"])


LONG_SAMPLES = [{"prompt": "x\x00" * 9999}] * 500
TABLES: dict[str, Callable[[], str]] = {
    "batch": lambda: batch_html(demo.BATCH),
    "session": lambda: session_html(demo.SESSION),
    "sessions": lambda: sessions_html(demo.SESSIONS),
    "metrics": lambda: metrics_html(demo.METRICS),
    "progress": lambda: progress_html(demo.PROGRESS),
    "large batch": lambda: batch_html({**demo.BATCH, "columns": demo.BATCH["columns"] * 100, "samples": LONG_SAMPLES}),
    "long metrics": lambda: metrics_html([{"loss": i / 7, NASTY: float("inf")} for i in range(5000)]),
    "many calls": lambda: progress_html([dict(c) for c in demo.PROGRESS[:2] * 300]),
    "nothing": lambda: metrics_html([]) + session_html({"name": "s", "runtime": "simulated", "devices": 128, "roles": []}),
}  # fmt: skip


@each("name", TABLES)
def test_tables_are_well_formed_small_and_inert(name: str) -> None:
    html = TABLES[name]()
    ET.fromstring(f"<div>{html}</div>")
    assert len(html) < 200_000
    assert "<script" not in html
    assert "http" not in html


def test_tables_say_state_in_words() -> None:
    html = batch_html(demo.BATCH)
    for state in ("ready", "running", "pending", "failed", "lost"):
        assert f"</span>\N{NO-BREAK SPACE}{state}</td>" in html
    assert "&lt;b&gt;your&lt;/b&gt;" in html
    assert "3.2 h unattended of 1 d" in sessions_html(demo.SESSIONS)
    assert "no kept sessions" in sessions_html([])
    assert "RewardFunctionError" in progress_html(demo.PROGRESS[3])
    assert progress_text([dict(demo.PROGRESS[1]) for _ in range(20)]).startswith("12 calls done before these, 1.44 s\n")
    assert progress_text(demo.PROGRESS[0]) == "actor.generate (cell 4, line 1): done, 16\u202f384 tokens, 3.41 s"


def test_advantages_figure_labels_every_token() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from hfsdk.viz.curves import advantages_figure

    tokens = [" it", " costs", " $5 and $6", "\n"]
    figure = advantages_figure(tokens, values=[0.1] * 4, rewards=[0, 0, 0, 1.0], advantages=[0.2, -0.1, 0, 0.4], title="$")
    labels = [t.get_text() for t in figure.axes[-1].get_xticklabels()]
    assert labels == ["·it", "·costs", "·\\$5 and \\$6", "⏎"]
    figure.canvas.draw()


def test_report_is_one_file(tmp_path: Path) -> None:
    path = write_report(
        tmp_path / "report.html", "A <report>", [("One & two", timeline().to_html()), ("Batch", batch_html(demo.BATCH))]
    )
    page = path.read_text()
    assert "A &lt;report&gt;" in page
    assert page.count("<section") == 2
    assert "prefers-color-scheme:dark" in page


def test_hooks_draw_nouns_they_never_import() -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    shell = types.SimpleNamespace(display_formatter=formatters.DisplayFormatter())
    hooks.register(shell)
    batch = type("Batch", (), {"view": lambda self: demo.BATCH, "__module__": "hfsdk.core.batch"})()
    session = type("Session", (), {"view": lambda self: demo.SESSION, "_repr_html_": hooks.session_card})()
    rows = {"state": "done", "rows": demo.METRICS}
    metrics = type("Metrics", (), {"view": lambda self: rows, "__module__": "hfsdk.core.pending"})()
    for noun, sign in (
        (batch, "hf-batch"),
        (session, "hf-session"),
        (metrics, "hf-metrics"),
        (demo.step_trace(), "hf-picture"),
    ):
        data, _ = shell.display_formatter.format(noun)
        assert sign in data["text/html"]


def test_viz_loads_no_widgets_and_says_how_to_install_them() -> None:
    code = """
import sys
import hfsdk.viz.hooks, hfsdk.session.report, hfsdk.viz.curves
for name in ("anywidget", "ipywidgets", "matplotlib", "IPython", "torch"):
    assert name not in sys.modules, name
sys.modules["anywidget"] = None
from hfsdk.viz.frame import LivePicture
from hfsdk.viz.pictures.timeline import TimelinePicture, timeline_view
from hfsdk.core.trace import Trace
try:
    LivePicture(TimelinePicture(timeline_view(Trace.of([]))))
except ModuleNotFoundError as error:
    assert "hfsdk[notebook]" in str(error), error
else:
    raise AssertionError("no error")
sys.modules["IPython"] = None
hfsdk.viz.hooks.CallProgress(lambda callback: callback({"type": "call_started", "call_id": 1}))
assert not hfsdk.viz.register_hooks()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_what_was_not_measured_says_so() -> None:
    for missing in (None, float("nan"), float("inf")):
        assert frame.seconds_text(missing) == frame.bytes_text(missing) == frame.count_text(missing) == "not measured"
