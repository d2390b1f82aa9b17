"""Pictures on a page of their own in a real browser: buttons, selectors, hovering and keys give the numbers of the nouns."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

import hfsdk as hf
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.layout import Layout
from hfsdk.core.placement import Placement, Pool
from hfsdk.core.roles import RoleSpec
from hfsdk.core.trace import Trace
from hfsdk.session.memory_use import MemoryUse
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.frame import bytes_text, html_page, seconds_text
from hfsdk.viz.placement.view import PlacementPicture, placement_view
from tests.viz import demo, harness
from tests.viz.bad_pictures import calibrated, counted, drained_trace, flow_of, gap_of, held_trace, plan_of, rows_of, run_of

pytest.importorskip("playwright", reason="playwright is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH"),
]


@pytest.fixture
def show(chromium: Any, tmp_path: Path) -> Iterator[Any]:
    """Open a picture on a page of its own; at the end nothing complained and nothing was asked for outside."""
    console: list[str] = []
    outside: list[str] = []
    pages = []

    def opened(picture: Any) -> Any:
        file = tmp_path / f"page{len(pages)}.html"
        file.write_text(html_page("picture", picture.to_html()), encoding="utf-8")
        page = chromium.new_page(viewport={"width": 1240, "height": 1000})
        pages.append(page)
        harness.watch(page, console, outside)
        page.goto(f"file://{file}")
        page.wait_for_selector("[data-ready]")
        return page

    yield opened
    for page in pages:
        page.close()
    assert console == []
    assert outside == []


def tip(page: Any) -> dict[str, str]:
    """The tooltip as label -> text."""
    found = page.locator(".hf-tip")
    return dict(zip(found.locator("dt").all_inner_texts(), found.locator("dd").all_inner_texts(), strict=True))


def rows(page: Any, css: str) -> list[int]:
    return sorted(page.eval_on_selector_all(css, "es => es.map((e) => Number(e.dataset.row))"))


def frames(page: Any) -> None:
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


# ---------------------------------------------------------------- timeline


def test_the_critical_path_button_marks_its_calls_and_what_ran_for_them(show: Any) -> None:
    trace = demo.pools_trace()
    page = show(picture_of(trace))
    button = page.locator("button", has_text="critical path")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    frames(page)
    assert button.get_attribute("aria-pressed") == "true"
    path = {s.call_id for s in trace.critical_path()}
    frame = trace.to_pandas()
    on = frame["call_id"].isin(path)
    assert 0 < on.sum() < len(frame)
    assert rows(page, ".hf-critical") == frame.index[on].tolist()
    assert rows(page, ".hf-faded") == frame.index[~on].tolist()
    button.click()
    frames(page)
    assert page.locator(".hf-critical, .hf-faded").count() == 0


def test_the_critical_path_is_seen_without_a_click_where_some_calls_are_off_it(show: Any) -> None:
    trace = demo.pools_trace()
    page = show(picture_of(trace))
    frame, path = trace.to_pandas(), {s.call_id for s in trace.critical_path()}
    calls = frame["device"].isna()
    assert page.locator(".hf-on-path").count() == (frame["call_id"].isin(path) & calls).sum()
    assert page.locator(".hf-path-words").inner_text() == f"{len(path)} of {calls.sum()} calls are on the critical path"


def test_where_every_call_is_critical_a_line_says_so(show: Any) -> None:
    page = show(picture_of(demo.step_trace()))
    assert page.locator(".hf-path-words").inner_text() == "every call is on the critical path"
    assert page.locator(".hf-on-path").count() == 0
    assert not page.locator("button", has_text="critical path").is_visible(), "it would change nothing"


def test_the_step_selector_and_the_pipeline_button_zoom(show: Any) -> None:
    trace = demo.step_trace(steps=3)
    page = show(picture_of(trace))
    steps = page.get_by_label("step", exact=True)
    assert steps.locator("option").all_inner_texts() == ["all steps", "step 0", "step 1", "step 2"]
    steps.select_option("step 1")
    frames(page)
    shown = rows(page, ".hf-span")
    frame = trace.to_pandas()
    assert set(frame.index[frame["step"] == 1]) <= set(shown)
    assert frame.loc[shown, "step"].isin([1, 2]).all(), "the first call of the next step begins at the edge"
    assert f"of {trace.duration_s:.2f} s" in page.locator(".hf-info").inner_text()
    steps.select_option("all steps")
    frames(page)
    assert len(rows(page, ".hf-span")) == len(trace)
    page = show(picture_of(demo.pools_trace()))
    page.locator("button", has_text="pipeline").click()
    frames(page)
    assert "1.00 s of 1.70 s" in page.locator(".hf-info").inner_text(), "the update, from 0.7 s to the end"
    page.keyboard.press("Tab")
    assert page.locator("table", has_text="micro-batches").locator("td").all_inner_texts() == [
        text for device in (0, 1) for text in
        (f"actor.update, device {device}", "1", "300 ms", "500 ms", "200 ms", "20 %")
    ]  # fmt: skip


def test_hovering_the_sequences_gives_the_numbers_of_drain(show: Any) -> None:
    trace = drained_trace()
    page = show(picture_of(trace))
    assert page.locator(".hf-drain").count() == 2
    frame = trace.drain()
    for device in (0, 1):
        box = page.locator(f'.hf-drain[data-device="{device}"]').bounding_box()
        mine = frame[frame["device"] == device].reset_index()
        for share, k in ((0.25, 0), (0.75, 1)):
            page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] - 4)
            found = tip(page)
            assert page.locator(".hf-tip b").inner_text() == f"device {device}"
            point = mine.loc[k]
            assert found["sequences running"] == f"{point['running']:.0f} of 3"
            assert found["waiting"] == f"{point['waiting']:.0f}"
            assert found["KV cache in use"] == f"{100 * point['kv_usage']:.0f} %"
    page.mouse.move(5, 5)
    assert not page.locator(".hf-tip").is_visible()


def test_several_traces_have_their_names_and_their_totals(show: Any) -> None:
    traces = {"one": demo.step_trace(), "two": demo.pools_trace()}
    page = show(hf.viz.timelines_picture(traces))
    assert page.locator(".hf-case").all_text_contents() == ["one", "two"]
    table = page.locator("table", has_text="device-seconds").locator("tbody tr")
    for row, trace in zip(table.all(), traces.values(), strict=True):
        total, idle = trace.device_seconds()
        words = row.locator("td").all_inner_texts()
        assert words[3:5] == [seconds_text(total), seconds_text(idle)]
    page.locator(f'.hf-span[data-row="{len(demo.pools_trace()) - 1}"]').last.hover()
    assert tip(page)["row"] == str(len(demo.pools_trace()) - 1), "the row of its own trace"


# ---------------------------------------------------------------- placement, comparison, memory, dashboard


def test_the_mesh_outlines_the_groups_of_a_rank(show: Any) -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    data = demo.placement_data(1, 8)
    mesh = layout.mesh()
    role = data["roles"][0]
    role |= {"train": str(layout), "rollout": None}
    role["shards"] = [
        dict(s, tp=mesh.coordinates(rank).tp, pp=mesh.coordinates(rank).pp, dp=mesh.coordinates(rank).dp, rollout_replica=None)
        for rank, s in enumerate(role["shards"])
    ]
    page = show(PlacementPicture(placement_view(data)))
    cells = page.locator(".hf-cell")
    assert cells.count() == 8
    here = mesh.coordinates(5)

    def group(axis: str) -> list[int]:
        others = [a for a in ("tp", "pp", "dp") if a != axis]
        found = [r for r in range(8) if all(getattr(mesh.coordinates(r), a) == getattr(here, a) for a in others)]
        return sorted(r for r in found if r != 5)

    page.locator('.hf-cell[data-rank="5"]').hover()
    for axis in ("tp", "pp", "dp"):
        found = page.eval_on_selector_all(f'.hf-shard[data-group="{axis}"]', "es => es.map((e) => Number(e.dataset.row))")
        assert sorted(found) == group(axis), "rows of the first role are its ranks"
        assert tip(page)[f"{axis} group"] == "ranks " + " ".join(map(str, sorted([5, *group(axis)])))
    assert page.locator('.hf-shard[data-group="self"]').count() == 1
    dashes = page.eval_on_selector_all(".hf-cell rect.hf-current", "es => es.map((e) => e.getAttribute('stroke-dasharray'))")
    assert sorted(map(str, dashes)) == ["1.5 2.5", "5 2", "None", "None"], "itself and tp solid, pp dashed, dp dotted"
    page.mouse.move(5, 5)
    assert page.locator("[data-group]").count() == 0
    page.get_by_label("order of the ranks").select_option("G numbers of the paper (tp, pp, dp)")
    number = 1 + here.dp * 4 + here.pp * 2 + here.tp
    assert page.locator('.hf-cell[data-rank="5"]').text_content() == f"G{number}"


def test_the_comparisons_bars_and_errors(show: Any) -> None:
    slow = [replace(s, duration_s=s.duration_s * (1.5 if s.method == "generate" else 0.8)) for s in demo.step_trace()]
    comparison = demo.step_trace().compare(Trace.of([replace(s, predicted=True) for s in slow], "said"))
    page = show(picture_of(comparison))
    frame = comparison.to_pandas()
    scale = None
    for i, row in frame.iterrows():
        mark = page.locator(f'.hf-row[data-row="{i}"]')
        assert float(mark.get_attribute("data-error")) == pytest.approx(row["error_s"], abs=1e-9)
        widths = [float(mark.locator(f".hf-bar-{k}").get_attribute("width")) for k in ("this", "other")]
        scale = scale or widths[0] / row["this_s"]
        assert widths == pytest.approx([scale * row["this_s"], scale * row["other_s"]])
        assert "hf-predicted" in mark.locator(".hf-bar-other").get_attribute("class")
        assert "hf-predicted" not in mark.locator(".hf-bar-this").get_attribute("class")
        sign = "+" if row["error_s"] >= 0 else "−"
        assert mark.locator(".hf-error-text").text_content().startswith(f"{sign}{abs(100 * row['error']):.0f} % ({sign}")
    page.locator('.hf-row[data-row="0"]').hover()
    assert tip(page) == {"row": "0", "PPO, step 0": "1.20 s", "said": "1.80 s", "error": "+50 % (+600 ms)"}
    page.locator(".hf-host").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.locator(".hf-current-row").get_attribute("data-row") == "1"
    assert page.locator(".hf-say").inner_text().startswith("actor.compute_log_probs, row 1, PPO, step 0 300 ms")


def test_the_memorys_bars_are_its_bytes(show: Any) -> None:
    model = hf.ModelSpec.preset("llama-7b")
    role = RoleSpec(name="actor", kind="actor", model=model, train=Layout(tp=2), rollout=Layout(tp=2), dtype="bf16")
    placement = Placement((Pool("all", (0, 1)),), {"actor": "all"})
    use = MemoryUse(held_trace(), (role,), placement, ClusterSpec.parse("1x2 H200"), "m")
    page = show(picture_of(use))
    frame = use.to_pandas()
    view = picture_of(use).view
    for device in (0, 1):
        drawn = page.locator(f'.hf-device-memory[data-device="{device}"]')
        mine = frame[frame["device"] == device]
        assert rows(page, f'[data-device="{device}"] .hf-held') == sorted(mine["row"])
        held = drawn.locator(f'.hf-held[data-row="{mine["row"].iloc[0]}"] rect')
        sizes = {e.get_attribute("data-part"): float(e.get_attribute("height")) for e in held.all()}
        one = sizes["weights"] / 1e9
        parts = ("weights", "optimizer", "kv_cache")
        assert sizes == pytest.approx({p: one * mine[f"{p}_bytes"].iloc[0] for p in parts})
        planned = view["devices"][device]["planned"]
        stack = {e.get_attribute("data-part"): float(e.get_attribute("height")) for e in drawn.locator(".hf-predicted rect").all()}
        wanted = {k: max(0.5, one * v) for k, v in planned.items() if v and k != "asked"}
        assert stack == pytest.approx(wanted)
    page.locator('[data-device="1"] .hf-held').first.hover()
    found = tip(page)
    assert (found["weights"], found["optimizer"], found["KV cache"]) == ("1.00 GB", "2.00 GB", "500 MB")
    assert (found["tensors in all"], found["resident (process)"]) == ("3.50 GB", "4.00 GB")
    page.locator('[data-device="1"] .hf-predicted').hover()
    assert tip(page)["in all"] == bytes_text(view["devices"][1]["planned"]["asked"])


def test_the_dashboard_opens_steps_by_click_and_key(show: Any) -> None:
    run = run_of(rows_of(None, 4))
    page = show(picture_of(run))
    assert page.locator(".hf-step .hf-title").inner_text().startswith("step 3")
    panel = page.locator('[data-curve="score_mean"]')
    panel.locator('circle[data-step="1"]').hover()
    assert tip(page)["score_mean"] == "1.5"
    assert tip(page)["busy_share"] == "150 %"
    panel.locator('circle[data-step="1"]').click()
    assert page.locator(".hf-step .hf-title").inner_text() == "step 1, 1.50 s"
    assert panel.locator(".hf-last").text_content() == "step 1: 1.5"
    widths = "es => es.map((e) => [e.dataset.call, Number(e.getAttribute('width'))])"
    calls = page.eval_on_selector_all(".hf-calls-bar rect", widths)
    assert [c for c, _ in calls] == [f"{role}.{method}" for role, method, *_ in demo.STEP]
    one = (calls[0][1] + 0.5) / 1.2
    assert [w for _, w in calls] == pytest.approx([one * seconds - 0.5 for *_, seconds, _ in demo.STEP])
    page.locator(".hf-host").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".hf-step .hf-title").inner_text() == "step 2, 2.50 s"
    assert page.locator(".hf-say").inner_text().startswith("step 2, score_mean 2.5, kl_mean 2.5")
    page.locator(".hf-step summary").click()
    numbers = dict(zip(*[iter(page.locator(".hf-step details td").all_inner_texts())] * 2, strict=True))
    assert numbers["own"] == "2.5"
    assert page.locator(".hf-predicted").count() == 0
    assert page.locator("button").count() == 0, "a frozen run has nothing to press"
    page.locator("summary", has_text="all curves").click()
    page.locator('[data-curve="own"]').wait_for()


# ---------------------------------------------------------------- axe


SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a real (simulated) session, and all other pictures below it."""
    from hfsdk.viz.report import write_report
    from tests.viz import token_batches as made

    folder = tmp_path_factory.mktemp("report")
    batch = made.batch(6)
    pictures = {
        "timeline of steps": picture_of(demo.step_trace(steps=2)), "drains": picture_of(drained_trace()),
        "running": picture_of(demo.step_trace(running=True)), "pools": picture_of(demo.pools_trace()),
        "timelines": hf.viz.timelines_picture({"one": demo.step_trace(), "two": demo.pools_trace()}),
        "comparison": picture_of(demo.step_trace().compare({"update": 1.0})), "dashboard": picture_of(run_of(rows_of(None))),
        "memory": picture_of(MemoryUse(held_trace(), (), None, ClusterSpec.parse("1x2 cpu"), "m")),
        "placement": PlacementPicture(placement_view(demo.placement_data(1, 4))),
        "dataflow": picture_of(flow_of("actor", 1.0)), "reshard": picture_of(plan_of("m", "tp4", "tp2")),
        "shadow": PlacementPicture(placement_view(demo.shadow_data())),
        "tokens": hf.viz.tokens_picture(batch, new="new_log_probs"), "credit": hf.viz.credit_picture(batch),
        "clip": hf.viz.clip_picture(batch), "calibration": calibrated(), "census": counted(3, twice=10**6),
        "gap": gap_of(), "probe": picture_of(demo.reward_probe()),
    }  # fmt: skip
    write_report(folder / "pictures.html", "all pictures", [(name, p.to_html()) for name, p in pictures.items()])
    with hf.Session.simulated("1x4 H200", price_per_device_hour=2.0) as session:
        actor = session.actor("tiny")
        session.critic("tiny"), session.reference(actor), session.reward(lambda prompts, completions, **c: [0.0] * len(prompts))
        session.train(hf.PPO(), session.prompts(["a", "b", "c"], batch_size=2), steps=2)
        session.report(folder / "report.html")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["pictures", "report"])
def test_axe_finds_nothing_serious(report: Path, chromium: Any, name: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = chromium.new_page(viewport={"width": 1240, "height": 1000}, color_scheme=scheme)
    try:
        page.goto(f"file://{report}/{name}.html")
        page.wait_for_function("() => document.querySelectorAll('.hf-picture:not([data-ready])').length === 0")
        found = axe.Axe().run(page).response["violations"]
    finally:
        page.close()
    serious = [
        {"rule": v["id"], "help": v["help"], "count": len(v["nodes"]), "first": [n["html"][:160] for n in v["nodes"][:4]]}
        for v in found if v["impact"] in SERIOUS
    ]  # fmt: skip
    assert serious == [], json.dumps(serious, indent=1)


# ---------------------------------------------------------------- what a saved page may do


class Asked(BaseHTTPRequestHandler):
    """Keeps what is asked for."""

    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        self.send_error(404)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def pixel() -> Iterator[str]:
    """The address of a picture on another server."""
    Asked.paths.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Asked) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/pixel"
        server.shutdown()


@pytest.mark.parametrize("policy", [True, False], ids=["as it is saved", "without its policy"])
def test_a_saved_page_runs_only_its_own_scripts_and_asks_nobody(chromium: Any, tmp_path: Path, pixel: str, policy: bool) -> None:
    """What got into the page in spite of every escape is neither run nor fetched; without the policy it would be."""
    smuggled = f'<script>window.hacked=1</script><img src="{pixel}"/><img src="data:," onerror="window.hacked=2"/>'
    path = picture_of(demo.pools_trace()).save(tmp_path / "picture.html")
    text = path.read_text(encoding="utf-8")
    if not policy:
        text = re.sub("<meta http-equiv=.*?/>", "", text)
    path.write_text(text.replace("</body>", smuggled + "</body>"), encoding="utf-8")
    page = chromium.new_page()
    page.goto(f"file://{path}")
    page.wait_for_selector("[data-ready]")
    page.wait_for_load_state("load")
    assert (page.evaluate("() => window.hacked") is None) == policy
    assert (Asked.paths == []) == policy
    page.close()
