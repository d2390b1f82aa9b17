"""Dashboard, memory, comparison, several timelines, drains and pipelines: their numbers, in the view, the SVG and the text."""

from __future__ import annotations

import re
import struct
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.layout import Layout
from hfsdk.core.placement import Placement, Pool
from hfsdk.core.roles import RoleSpec
from hfsdk.core.trace import Span, Trace
from hfsdk.run.run import Run, RunControl
from hfsdk.session.views import MemoryUse
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.frame import bytes_text
from hfsdk.viz.pictures.comparison import ComparisonView
from hfsdk.viz.pictures.dashboard import MOST_POINTS, DashboardView, dashboard_view
from hfsdk.viz.pictures.memory import MemoryView
from hfsdk.viz.pictures.timeline import TimelineView, timeline_view
from tests.viz import demo
from tests.viz.bad_pictures import HOSTILE, control_of, drained_trace, held_trace, rows_of, run_of
from tests.viz.test_frame import check

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [e.text or "" for e in ET.fromstring(svg).iter(f"{SVG}text")]


# ---------------------------------------------------------------- dashboard


def test_a_run_that_scores_nothing_shows_what_it_learns():
    """DPO's: the loss, the pairs told apart and by how much, in the picture, the text and the run's own line."""
    rows = [
        {"step": i, "actor_loss": 0.7 - 0.1 * i, "accuracy": 0.5 + 0.2 * i, "margin": 0.3 * i, "seconds": 1.0} for i in range(3)
    ]
    run = run_of(rows)
    view = picture_of(run).view
    assert [curve["name"] for curve in view["curves"] if curve["main"]] == ["actor_loss", "accuracy", "margin"]
    assert view["summary"].endswith("actor_loss 0.5, accuracy 0.9, margin 0.6")
    for name, ends in (("actor_loss", "0.7 -> 0.5"), ("accuracy", "0.5 -> 0.9"), ("margin", "0 -> 0.6")):
        assert re.search(rf"{name} +{re.escape(ends)}", picture_of(run).to_text()), name
    assert ", loss 0.500, accuracy 0.900" in repr(run)


def test_the_dashboard_has_the_runs_numbers():
    run = run_of(rows_of(None, 3))
    picture = picture_of(run)
    view = picture.view
    check(view, DashboardView)
    curves = {c["name"]: c for c in view["curves"]}
    assert curves["score_mean"]["points"] == [[0, 0.5], [1, 1.5], [2, 2.5]]
    assert curves["cost"]["points"] == [[0, 0.5], [1, 2.0], [2, 4.5]], "cost so far"
    assert view["curves"][0]["name"] == "score_mean"
    assert not curves["own"]["main"]
    assert view["title"] == "train: 3 of 3 steps, finished"
    step = view["steps"][-1]
    assert [c["call"] for c in step["calls"]] == [f"{role}.{method}" for role, method, *_ in demo.STEP]
    assert [c["seconds"] for c in step["calls"]] == [seconds for *_, seconds, _ in demo.STEP]
    assert step["calls"][1]["start_s"] == 1.22
    assert [c["row"] for c in step["calls"]] == [0, 0, 1, 2, 3, 2, 0], "one lane per role"
    assert dict(step["numbers"])["own"] == 2.5
    assert step["samples"][0]["score"] == 2.5
    text = picture.to_text()
    assert "score_mean             0.5 -> 2.5   (0.5 to 2.5)" in text
    assert "+2.50 'a prompt' -> 'a prompt'" in text
    assert {"last 4.5", "cost so far"} <= set(texts(picture.to_svg()))


def test_a_long_run_is_thinned_and_misses_nothing_that_is_measured_now_and_then():
    rows = [{"step": i, "score_mean": float(i), "cost": 1.0} for i in range(2345)]
    for i in range(0, 2345, 100):
        rows[i]["exam"] = i * 10.0
    view = dashboard_view(run_of([]).view() | {"rows": rows})
    curves = {c["name"]: c["points"] for c in view["curves"]}
    assert all(len(points) <= MOST_POINTS for points in curves.values())
    assert curves["score_mean"][-1] == [2344, 2344.0]
    assert curves["cost"][-1] == [2344, 2345.0]
    assert [p for p in curves["exam"] if p[1] is not None] == [[i, i * 10.0] for i in range(0, 2345, 100)]
    assert [s["step"] for s in view["steps"]] == list(range(2295, 2345))


def test_missing_numbers_and_words_are_no_curves():
    run = run_of([{"step": 0, "note": "text", "flag": True, "score_mean": 1.0, "nothing": float("nan")}, {"step": 1}])
    view = picture_of(run).view
    assert [c["name"] for c in view["curves"]] == ["score_mean"]
    assert view["curves"][0]["points"] == [[0, 1.0], [1, None]]
    assert view["steps"][0]["numbers"] == [["score_mean", 1.0], ["nothing", None]]


def test_what_a_run_was_warned_of_is_drawn_with_it():
    control = control_of(rows_of(None, 3))
    control.record.warnings.append("step 2: the score fell")
    picture = picture_of(Run(control))
    assert "step 2: the score fell" in texts(picture.to_svg())
    assert "  step 2: the score fell" in picture.to_text()


def test_a_run_that_saves_knows_its_last_save(tmp_path: Path):
    with hf.Session.simulated("1x4 H200") as session:
        actor = session.actor("tiny")
        session.critic("tiny"), session.reference(actor), session.reward(lambda prompts, completions, **c: [0.0] * len(prompts))
        prompts = session.prompts(["a", "b", "c"], batch_size=2)
        assert picture_of(session.train(hf.PPO(), prompts, steps=1)).view["saved"] is None
        run = session.train(hf.PPO(), prompts, steps=2, save_every=1, folder=tmp_path / "x")
    assert picture_of(run).view["saved"] == {"folder": str(tmp_path / "x"), "step": run.rows[-1]["step"]}


def test_a_simulated_run_is_drawn_as_predicted():
    measured, predicted = (picture_of(run_of(rows_of(None, 3), trace=demo.step_trace(predicted=p))) for p in (False, True))
    assert (measured.view["predicted"], predicted.view["predicted"]) == (False, True)
    assert predicted.view["title"].endswith("(predicted)")
    assert "stroke-dasharray" not in measured.to_svg().partition("</style>")[2]
    lines = re.findall(r'<path [^>]*stroke="#3b76c4"[^>]*>', predicted.to_svg())
    assert len(lines) == 6
    assert all("stroke-dasharray" in line for line in lines)


def test_curves_draw_gaps_as_gaps():
    svg = picture_of(run_of([{"step": i, "score_mean": None if i in (4, 5) else float(i)} for i in range(10)])).to_svg()
    (line,) = re.findall(r'<path d="([^"]*)"[^>]*stroke="#3b76c4"', svg)
    assert line.count("M") == 2


def test_a_picture_of_a_run_has_no_buttons_unless_it_is_shown_live():
    control = RunControl()
    control.begin(3, background=True, cancel=lambda: None)
    run = Run(control)
    view = dashboard_view(run.view(), live=True)
    assert (view["live"], view["background"], view["state"], view["steps_asked"]) == (True, True, "running", 3)
    assert not picture_of(run).view["live"], "a file has nobody to press for"


# ---------------------------------------------------------------- memory


def test_memory_is_in_bytes_after_each_call_and_as_planned():
    model = hf.ModelSpec.preset("llama-7b")
    role = RoleSpec(name="actor", kind="actor", model=model, train=Layout(tp=2), rollout=Layout(tp=2), dtype="bf16")
    placement = Placement((Pool("all", (0, 1)),), {"actor": "all"})
    picture = picture_of(MemoryUse(held_trace(), (role,), placement, ClusterSpec.parse("1x2 H200"), "m"))
    view = picture.view
    check(view, MemoryView)
    device = view["devices"][1]
    assert [c["call"] for c in device["calls"]] == [f"{role}.{method}" for role, method, *_ in demo.STEP if role != "reward"]
    assert {c["weights_bytes"] for c in device["calls"]} == {10**9}
    spans = held_trace().to_pandas()
    for call in device["calls"]:
        row = spans.loc[call["row"]]
        assert (row["device"], row["parent"]) == (1, "")
        assert call["end_s"] == pytest.approx(row["start_s"] + row["duration_s"], abs=1e-6)
    planned = device["planned"]
    assert sum(v for k, v in planned.items() if k != "asked") == planned["asked"]
    assert device["top_bytes"] == pytest.approx(1.08 * max(planned["asked"], 4 * 10**9))
    words = f"device 1: {bytes_text(planned['asked'])} planned at most, 4.00 GB resident at most"
    assert words in picture.to_text()
    svg = picture.to_svg()
    assert svg.count("url(#") >= 2 * sum(v > 0 for k, v in planned.items() if k != "asked"), "planned is hatched"
    assert f"planned at most {bytes_text(planned['asked'])}" in texts(svg)


def test_a_process_is_measured_by_its_highest_moment():
    use = MemoryUse(held_trace(), (), None, ClusterSpec.parse("1x2 cpu"), "m")
    frame = use.to_pandas()
    assert len(frame) == 13
    assert set(frame["optimizer_bytes"]) == {2 * 10**9}
    assert "the process 4.00 at most" in repr(use)
    assert picture_of(use).view["devices"][0]["planned"] is None


def test_a_rollout_that_sleeps_is_drawn_empty_and_counted_in_nothing():
    gone = {"weights_bytes": 10**9, "asleep_bytes": 6 * 10**9, "rss_bytes": 2 * 10**9}
    trace = held_trace()
    trace = Trace.of([s if s.method == "generate" else replace(s, attrs=gone) for s in trace])
    use = MemoryUse(trace, (), None, ClusterSpec.parse("1x2 cpu"), "m")
    view = picture_of(use).view
    calls = view["devices"][0]["calls"]
    asleep = [call for call in calls if call["asleep_bytes"]]
    assert [c["call"] for c in calls if c not in asleep] == ["actor.generate"]
    assert {call["rollout_bytes"] + call["kv_cache_bytes"] for call in asleep} == {0}
    assert view["devices"][0]["top_bytes"] == pytest.approx(1.08 * 7 * 10**9), "so that what is not there can be drawn"
    text = picture_of(use).to_text()
    assert f"rollout asleep after {len(asleep)} of {len(calls)} calls, 6.00 GB not there" in text
    drawn = sum(bool(call["asleep_bytes"]) for device in view["devices"] for call in device["calls"])
    assert picture_of(use).to_svg().count('stroke-dasharray="2 2"') == drawn + 1, "one in the legend"
    assert drawn > len(asleep)
    assert "asleep 6.00" in repr(use)
    assert set(use.to_pandas()["asleep_bytes"]) == {0, 6 * 10**9}


def test_of_many_devices_the_fullest_are_drawn():
    def grown(span: Span) -> Span:
        return replace(span, attrs={"weights_bytes": 10**9 * (1 + (span.device or 0)), "rss_bytes": 1})

    trace = Trace.of([grown(s) for s in demo.step_trace(devices=40, nested=False)])
    view = picture_of(MemoryUse(trace, (), None, ClusterSpec.parse("5x8 A100-80GB"), "m")).view
    assert [d["device"] for d in view["devices"]] == list(range(24, 40))
    assert view["left_out"] == 24


# ---------------------------------------------------------------- comparison


def test_errors_are_signed_and_the_total_is_the_last_row():
    slow = Trace.of([replace(s, duration_s=s.duration_s * (1.5 if s.method == "generate" else 1)) for s in demo.step_trace()])
    comparison = demo.step_trace().compare(slow)
    picture = picture_of(comparison)
    check(picture.view, ComparisonView)
    rows = {r["call"]: r for r in picture.view["rows"]}
    assert rows["actor.generate"]["error_s"] == pytest.approx(0.6)
    assert rows["actor.generate"]["error"] == pytest.approx(0.5)
    assert rows["critic.update"]["error_s"] == 0
    assert list(rows)[-1] == "the whole"
    assert comparison.points == pytest.approx(100 * (6 + 2 / 3) / 7)
    frame = comparison.to_pandas()
    assert frame["call"].tolist() == list(rows), "the picture's row is the table's"
    assert re.findall(r'<g data-row="(\d+)"', picture.to_svg()) == [str(i) for i in range(8)]
    assert "+50 % (+600 ms)" in texts(picture.to_svg())
    assert re.search(r"actor.generate +1.20 s +1.80 s \+50 % \(\+600 ms\)", picture.to_text())


def test_a_guess_is_hatched_and_what_was_not_guessed_left_out():
    comparison = demo.step_trace().compare({"update": 1.0, "actor.generate": 2.4})
    assert [(r.call, r.this_s, r.other_s) for r in comparison] == [
        ("update", pytest.approx(1.36), 1.0), ("actor.generate", 1.2, 2.4),
    ]  # fmt: skip
    picture = picture_of(comparison)
    assert picture.view["other"]["source"] == "guess"
    assert picture.to_svg().count('fill="url(#') == 4, "two calls, their sum, the legend"
    assert "−26 % (−360 ms)" in picture.to_text()


def test_bad_guesses():
    trace = demo.step_trace()
    for guess in ({}, {"generate": -1}, {"generate": float("nan")}, {"generate": True}, {"nothing": 1.0}, 3):
        with refuses(hf.OptionError):
            trace.compare(guess)


# ---------------------------------------------------------------- timelines, drains, pipelines, the critical path


def test_several_traces_share_one_axis():
    traces = {"one": demo.step_trace(devices=2), "two": demo.pools_trace(), "said": demo.step_trace(predicted=True, seed=1)}
    picture = hf.viz.timelines_picture(traces, "title")
    view = picture.view
    check(view, TimelineView)
    assert [lane["case"] for lane in view["lanes"] if lane["case"]] == list(traces)
    assert view["duration_s"] == pytest.approx(max(t.duration_s for t in traces.values()))
    assert len(view["marks"]) == sum(map(len, traces.values()))
    at = 0
    for trace in traces.values():
        frame = trace.to_pandas()
        for mark in view["marks"][at : at + len(frame)]:
            row = frame.loc[mark[0]]
            assert mark[4] == pytest.approx(row["start_s"], abs=1e-6)
            assert view["methods"][mark[8]] == row["method"]
            assert view["roles"][mark[7]]["name"] == row["role"]
            assert view["names"][mark[6]]["name"] == row["name"]
        at += len(frame)
    tops = [lane["y"] for lane in view["lanes"]]
    assert tops == sorted(tops)
    cases = {c["title"]: c for c in view["cases"]}
    total, idle = traces["one"].device_seconds()
    assert (cases["one"]["device_s"], cases["one"]["idle_device_s"]) == (total, idle)
    assert [c["predicted"] for c in view["cases"]] == [False, False, True]
    calls = {mark[11] for mark in view["marks"]}
    assert len(calls) == sum(len({s.call_id for s in t}) for t in traces.values()), "calls of two traces are told apart"
    critical = {view["marks"][row][11] for row in view["critical"]}
    assert len(critical) == sum(len(t.critical_path()) for t in traces.values())


def test_timelines_of_nothing_say_so():
    with refuses(hf.OptionError, "no trace"):
        hf.viz.timelines_picture({})
    with refuses(hf.OptionError, "traces['a']=3"):
        hf.viz.timelines_picture({"a": 3})


def test_drains_are_drawn_when_the_span_ended():
    trace = drained_trace()
    view = timeline_view(trace)
    frame = trace.drain()
    assert len(view["drains"]) == 2
    for drain in view["drains"]:
        mine = frame[frame["device"] == drain["device"]]
        (run,) = drain["runs"]
        assert [p[1:] for p in run] == mine[["running", "waiting", "kv_usage"]].to_numpy().tolist()
        assert [p[0] for p in run] == pytest.approx(mine["seconds"], abs=1e-4)
        decode = next(s for s in trace if s.name == "decode" and s.device == drain["device"])
        assert run[-1][0] == pytest.approx((decode.end_ns - trace.start_ns) / 1e9, abs=1e-4)
        lane = view["lanes"][drain["lane"]]
        assert (lane["kind"], lane["device"], drain["most"]) == ("drain", drain["device"], 3)
    svg = picture_of(trace).to_svg()
    assert texts(svg).count("most 3") == 2
    assert "sequences of device 0: at most 3, the last half took 100.0 ms" in picture_of(trace).to_text()


def test_only_the_devices_that_ended_last_have_a_lane_of_sequences():
    drain = timeline_view(drained_trace(devices=20))["drains"]
    assert len(drain) == 8
    ends = {s.device: s.end_ns for s in drained_trace(devices=20) if s.name == "decode"}
    assert {d["device"] for d in drain} == set(sorted(ends, key=lambda d: -ends[d])[:8])


def test_a_pipelines_bubble_is_the_share_of_waiting():
    picture = picture_of(demo.pools_trace())
    rows = picture.view["pipelines"]
    assert [(r["call"], r["device"], r["micro_batches"]) for r in rows] == [("actor.update", 0, 1), ("actor.update", 1, 1)]
    assert [r["bubble"] for r in rows] == pytest.approx([0.2, 0.2])
    assert (rows[0]["start_s"], rows[0]["end_s"]) == (0.7, 1.7)
    assert "actor.update on device 1: 1 micro-batches, 200 ms waiting, a bubble of 20 %" in picture.to_text()
    assert timeline_view(demo.step_trace())["pipelines"] == []


def test_the_critical_paths_rows_are_the_calls_of_the_path():
    trace = demo.step_trace()
    view = timeline_view(trace)
    frame = trace.to_pandas()
    path = trace.critical_path()
    assert frame.loc[view["critical"], "call_id"].tolist() == [s.call_id for s in path] == list(range(7))
    assert frame.loc[view["critical"], "device"].isna().all(), "calls, not what ran for them"


# ---------------------------------------------------------------- picture_of, save, PNG


def test_what_has_no_picture_says_what_has():
    with refuses(hf.OptionError, "int", "Trace"):
        hf.viz.picture(3)
    picture = picture_of(demo.step_trace())
    assert hf.viz.picture(picture) is picture


def test_pictures_are_saved_as_the_file_is_called(tmp_path: Path):
    picture = hf.viz.picture(demo.step_trace())
    for ending, begins in {".html": "<!doctype html>", ".svg": "<svg ", ".txt": "PPO, step 0"}.items():
        path = picture.save(tmp_path / f"a{ending}")
        assert path.read_text(encoding="utf-8").startswith(begins)
    for name in ("a.pdf", "a", "a.PNG.gz"):
        with refuses(hf.OptionError, name, ".html", ".svg", ".png", ".txt"):
            picture.save(tmp_path / name)
    with pytest.raises(hf.OutputError):
        picture.save(tmp_path / "no" / "a.svg")
    assert picture.save(str(tmp_path / "B.SVG")).read_text(encoding="utf-8").startswith("<svg ")


def test_png_has_the_svgs_size_times_the_zoom(tmp_path: Path):
    pytest.importorskip("resvg_py")
    picture = hf.viz.picture(demo.step_trace())
    root = ET.fromstring(picture.to_svg())
    for zoom in (1.0, 2.0):
        data = picture.to_png(tmp_path / "a.png", zoom=zoom).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        size = struct.unpack(">II", data[16:24])
        assert size == pytest.approx([zoom * float(root.get(k, 0)) for k in ("width", "height")], abs=2)
        assert len(data) > 5000, "something is drawn"
    for name in ("hostile", "nan"):
        assert hf.viz.picture(Trace.of([], HOSTILE)).save(tmp_path / f"{name}.png").stat().st_size > 500


# ---------------------------------------------------------------- the report


@pytest.fixture(scope="module")
def trained() -> Any:
    with hf.Session.simulated("1x4 H200", price_per_device_hour=2.0) as session:
        actor = session.actor("tiny")
        session.critic("tiny"), session.reference(actor), session.reward(lambda prompts, completions, **c: [0.0] * len(prompts))
        session.train(hf.PPO(), session.prompts(["a", "b", "c"], batch_size=2), steps=2)
        yield session


HEADINGS = ["Session", "Placement", "Training", "Dataflow of the last step", "Timeline of the last step", "Memory"]


def headings(path: Path) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", path.read_text(encoding="utf-8"))


def test_a_report_has_all_there_is(trained: Any, tmp_path: Path):
    path = trained.report(tmp_path / "r.html")
    assert headings(path)[:6] == HEADINGS
    assert "History" in headings(path)
    assert path.read_text(encoding="utf-8").count('class="hf-picture"') >= 4
    assert "not drawn" not in path.read_text(encoding="utf-8")
    for name in ("r.txt", "no/r.html"):
        with refuses(hf.OptionError, name, ".html"):
            trained.report(tmp_path / name)


@pytest.mark.parametrize("error", [hf.OptionError("nothing yet"), TypeError(HOSTILE)])
def test_a_report_survives_what_cannot_be_drawn(trained: Any, tmp_path: Path, monkeypatch: Any, error: Exception):
    def broken(self: Any) -> None:
        raise error

    monkeypatch.setattr(type(trained.roles[0]), "last_reshard", property(broken))
    path = trained.report(tmp_path / "r.html")
    words = path.read_text(encoding="utf-8")
    assert ("Resharding of actor" in words) == ("not drawn: TypeError" in words) == isinstance(error, TypeError)
    assert headings(path)[:6] == HEADINGS
    assert "<script>window" not in words


def test_a_report_of_an_empty_session_with_a_hostile_name(tmp_path: Path):
    with hf.Session.simulated("1x1 cpu", name=HOSTILE) as session:
        path = session.report(tmp_path / "r.html")
    words = path.read_text(encoding="utf-8")
    assert words.count("</script>") == words.count("<script")
    assert headings(path) == [h for h in HEADINGS if h != "Training"]


def test_a_closed_session_writes_the_report_it_would_have_written(tmp_path: Path):
    with hf.Session.simulated("1x4 H200") as session:
        actor = session.actor("tiny")
        session.critic("tiny"), session.reference(actor), session.reward(lambda prompts, completions, **c: [0.0] * len(prompts))
        session.train(hf.PPO(), session.prompts(["a", "b", "c"], batch_size=2), steps=2)
        before = headings(session.report(tmp_path / "before.html"))
    path = session.report(tmp_path / "after.html")
    assert headings(path) == [heading for heading in before if not heading.startswith("Resharding")], "that asks the workers"
    assert "not drawn" not in path.read_text(encoding="utf-8")
