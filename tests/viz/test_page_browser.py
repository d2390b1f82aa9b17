"""Pictures on a page of their own in chromium: the laws of ``test_page.py`` again, and those that hang on boxes and colours."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import hfsdk as hf
from hfsdk.core.cluster import ClusterSpec
from hfsdk.session.report import write_report
from hfsdk.session.views import MemoryUse
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.frame import html_page
from hfsdk.viz.pictures.placement import PlacementPicture, placement_view
from tests.viz import demo, demo_plans, harness
from tests.viz import token_batches as made
from tests.viz.bad_pictures import calibrated, counted, drained_trace, flow_of, gap_of, held_trace, plan_of, rows_of, run_of
from tests.viz.test_page import *  # noqa: F403 - its tests, with the fixtures below
from tests.viz.test_page import SPEC, tip

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

    def opened(picture: Any, **options: Any) -> Any:
        file = tmp_path / f"page{len(pages)}.html"
        file.write_text(html_page("picture", picture.to_html()), encoding="utf-8")
        page = chromium.new_page(**{"viewport": {"width": 1240, "height": 1400}, "reduced_motion": "reduce", **options})
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


@pytest.fixture
def frames() -> Callable[[Any], None]:
    """Wait until what was asked to be drawn is drawn."""
    return harness.frames


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


def test_playing_flies_pieces_and_ends_at_the_last_step(show: Any) -> None:
    page = show(hf.viz.reshard_picture(hf.ReshardPlan.between(SPEC, "tp2", "tp1")), reduced_motion="no-preference")
    page.locator("select").select_option(index=4)
    last = int(page.locator('input[type="range"]').get_attribute("max"))
    page.locator('input[type="range"]').fill(str(last - 3))
    page.locator(".hf-play").click()
    page.wait_for_function("() => document.querySelectorAll('.hf-bird').length > 0")
    assert page.locator(".hf-play").get_attribute("aria-label") == "pause"
    page.wait_for_function(f"() => document.querySelector('input[type=range]').value === '{last}'")
    page.wait_for_function("() => document.querySelectorAll('.hf-bird').length === 0")
    assert page.locator('.hf-after[data-arrived="0"]').count() == 0


# ---------------------------------------------------------------- colours and boxes


CONTRAST = """e => {
  const paint = (color) => {
    const c = document.createElement("canvas").getContext("2d");
    c.fillStyle = color;
    c.fillRect(0, 0, 1, 1);
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return [...c.getImageData(0, 0, 1, 1).data.slice(0, 3)].map((v) => linear(v / 255));
  };
  const light = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05, style = getComputedStyle(e);
  const [a, b] = [light(paint(style.color)), light(paint(style.backgroundColor))];
  return Math.max(a, b) / Math.min(a, b);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_the_strongest_colours(show: Any, scheme: str) -> None:
    columns = made.columns()
    numbers = columns["advantages"].flat.copy()
    numbers[:2] = np.inf, -np.inf
    entropy = columns["advantages"].map(np.abs(numbers))
    columns |= {"advantages": columns["advantages"].map(numbers), "entropy": entropy}
    batch = hf.Batch.from_columns(made.LocalClient(), columns)
    page = show(hf.viz.tokens_picture(batch, [0], color="advantages"), color_scheme=scheme)
    above, below = page.locator('.hf-tok[data-row="0"]'), page.locator('.hf-tok[data-row="1"]')
    assert above.evaluate("e => e.style.borderTopColor") != "", "a line above says positive without colour"
    assert below.evaluate("e => e.style.borderBottomColor") != ""
    assert [t.evaluate("e => e.style.backgroundColor").split("%")[0][-2:] for t in (above, below)] == ["64", "64"]
    for token in (above, below):
        assert token.evaluate(CONTRAST) >= 4.5
    page.locator(".hf-color").select_option("entropy")
    assert page.locator('.hf-tok[data-row="0"]').evaluate(CONTRAST) >= 4.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_can_be_read(show: Any, scheme: str) -> None:
    batch = made.batch(6)
    pictures = [
        picture_of(demo_plans.plan()), picture_of(demo_plans.what_if()), picture_of(demo.step_trace()),
        hf.viz.tokens_picture(batch), hf.viz.credit_picture(batch), picture_of(plan_of("m", "tp4", "tp2")),
        picture_of(flow_of("actor", 1.0)),
    ]  # fmt: skip
    for picture in pictures:
        page = show(picture, color_scheme=scheme)
        channels = "(c) => c.match(/[0-9.]+/g).slice(0, 3).map(Number)"
        paper, ink = (page.evaluate(f"({channels})(getComputedStyle(document.querySelector('.hf')).{of})")
                      for of in ("backgroundColor", "color"))  # fmt: skip
        assert (sum(paper) > sum(ink)) == (scheme == "light"), picture.name
        assert abs(sum(paper) - sum(ink)) > 300, picture.name


def test_clipped_tokens_have_a_pattern_and_an_outline_not_colour_alone(show: Any) -> None:
    page = show(hf.viz.tokens_picture(made.batch(), new="new_log_probs", clip=0.35))
    page.locator(".hf-onlyclipped").click()
    mark = page.locator(".hf-tok.hf-clipped[data-row]").first
    pattern, outline = mark.evaluate("e => [getComputedStyle(e).backgroundImage, getComputedStyle(e).outlineStyle]")
    assert "repeating-linear-gradient" in pattern
    assert outline == "dashed"


def test_a_plan_fits_a_narrow_cell(show: Any) -> None:
    page = show(picture_of(demo_plans.plan()))
    page.set_viewport_size({"width": 640, "height": 900})
    page.wait_for_function("() => document.querySelector('.hf-plan-step svg').getBoundingClientRect().width < 640")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 640


# ---------------------------------------------------------------- axe


SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a real (simulated) session, and all other pictures below it."""
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


@pytest.mark.parametrize("name", ["pictures", "report"])
def test_axe_finds_nothing_serious(report: Path, chromium: Any, name: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = chromium.new_page(viewport={"width": 1240, "height": 1000})
    serious = []
    try:
        page.goto(f"file://{report}/{name}.html")
        page.wait_for_function("() => document.querySelectorAll('.hf-picture:not([data-ready])').length === 0")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            harness.frames(page)
            serious += [
                {"scheme": scheme, "rule": v["id"], "help": v["help"], "count": len(v["nodes"]),
                 "first": [n["html"][:160] for n in v["nodes"][:4]]}
                for v in axe.Axe().run(page).response["violations"] if v["impact"] in SERIOUS
            ]  # fmt: skip
    finally:
        page.close()
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
