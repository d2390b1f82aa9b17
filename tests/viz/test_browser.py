"""The pictures in a real browser: live, frozen, reopened trusted and untrusted, dark, standalone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hfsdk.viz.frame import html_page
from hfsdk.viz.pictures.placement import PlacementPicture, placement_view
from hfsdk.viz.pictures.timeline import TimelinePicture, timeline_view
from tests.viz import demo, harness

pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH"),
]

LIVE = """
import sys, threading, time, types
from dataclasses import replace
from hfsdk.core.trace import Span, Trace
from hfsdk.viz.hooks import CallProgress, register, show_trace

shell = get_ipython()
register(shell)

class LiveTrace:
    def __init__(self):
        self.running, self.spans = True, []
    def _ipython_display_(self):
        show_trace(self)
    def snapshot(self):
        return Trace.of(list(self.spans), "live")

live = LiveTrace()

def work():
    for i in range(30):
        t = time.time_ns()
        s = Span(name="forward", role="actor", method="update", phase="learning", call_id=i, device=i % 2, rank=i % 2, start_ns=t)
        call = replace(s, device=None, rank=None, name="update")
        live.spans += [call, s]
        time.sleep(0.1)
        live.spans[-2:] = [replace(call, duration_s=0.1), replace(s, duration_s=0.09, attrs={"tokens": 64})]
    live.running = False

threading.Thread(target=work).start()
live
"""

PROGRESS = """
events = []
CallProgress(events.append)
send = events[0]
base = {"call": "actor.generate", "line": "cell 2, line 3", "total": 50, "unit": "tokens", "done": 0, "error": None}
send(dict(base, type="call_started", call_id=1))
send(dict(base, type="call_started", call_id=2, call="reward.compute_scores"))
def later():
    send(dict(base, type="call_done", call_id=2, call="reward.compute_scores", seconds=0.01))
    for i in range(50):
        time.sleep(0.02)
        send(dict(base, type="call_progress", call_id=1, done=i))
    send(dict(base, type="call_failed", call_id=1, done=49, seconds=1.0, error="RewardFunctionError: <b>no</b>"))
thread = threading.Thread(target=later)
thread.start()
thread.join()
while live.running or any(t.name == "hfsdk-follow" for t in threading.enumerate()): time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def saved(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[harness.Lab, Path]]:
    """A dark JupyterLab and the notebook that it ran live and saved."""
    root = tmp_path_factory.mktemp("notebooks")
    path = harness.write_notebook(root / "live.ipynb", [LIVE, PROGRESS])
    lab = harness.Lab(root, dark=True)
    notebook = harness.Notebook(lab, chromium.new_page(viewport={"width": 1300, "height": 1300}))
    try:
        notebook.open("live.ipynb").run_all()
        page = notebook.page
        picture = page.locator(".hf-timeline")
        page.wait_for_function("() => document.querySelectorAll('.hf-timeline .hf-span').length > 4")
        assert page.locator(".hf-picture").count() == 0, "a live widget, not the frozen form"
        assert picture.locator(".hf-running").count() > 0
        before = picture.locator(".hf-span").count()
        page.wait_for_function(f"() => document.querySelectorAll('.hf-timeline .hf-span').length > {before + 4}")
        assert "running" in picture.locator(".hf-info").inner_text()
        notebook.wait()
        page.wait_for_selector('.hf-picture[data-ready="1"]')
        page.screenshot(path=str(root / "live_dark.png"))
        assert notebook.complaints() == []
        assert notebook.outside == []
        notebook.save()
        yield lab, path
    finally:
        notebook.close()
        lab.close()


def test_live_picture_freezes_into_the_saved_notebook(saved: tuple[harness.Lab, Path]) -> None:
    outputs = [o["data"] for cell in json.loads(saved[1].read_text())["cells"] for o in cell["outputs"]]
    timeline, progress = outputs
    assert set(timeline) == {"text/plain", "text/html"}, "no widget-view: it could not be opened again"
    html = "".join(progress["text/html"])
    assert "actor.generate" in html
    assert "&lt;b&gt;no" in html
    assert "reward.compute_scores" in html


def test_reopened_trusted_is_interactive_and_dark(saved: tuple[harness.Lab, Path], chromium: Any) -> None:
    notebook = harness.Notebook(saved[0], chromium.new_page(viewport={"width": 1300, "height": 1300}))
    try:
        page = notebook.open("live.ipynb", kernel=False).page
        page.wait_for_selector('.hf-picture[data-ready="1"]')
        assert page.locator(".hf-span").count() == 60
        page.locator(".hf-span").nth(10).hover()
        assert "wall time" in page.locator(".hf-tip").inner_text()
        page.wait_for_selector('body[data-jp-theme-light="false"]', state="attached")
        color = page.evaluate("() => getComputedStyle(document.querySelector('.hf-timeline')).color")
        assert min(map(int, color[4:-1].split(","))) > 180, f"text is light in the dark theme; got {color}"
        page.locator(".hf-host").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.locator(".hf-current").count() == 1
        assert "actor" in page.locator(".hf-say").first.inner_text()
        assert notebook.complaints() == []
        assert notebook.outside == []
    finally:
        notebook.close()


def test_reopened_untrusted_shows_the_static_picture(saved: tuple[harness.Lab, Path], chromium: Any) -> None:
    lab = harness.Lab(saved[1].parent)  # its own data folder: nothing is trusted there
    notebook = harness.Notebook(lab, chromium.new_page(viewport={"width": 1300, "height": 1000}))
    try:
        page = notebook.open("live.ipynb", kernel=False).page
        image = page.locator('.jp-Cell-outputArea img[src^="data:image/svg+xml"]').first
        image.wait_for()
        assert image.evaluate("e => e.complete && e.naturalWidth") > 500
        assert page.locator(".hf-picture[data-ready]").count() == 0
        assert "actor.generate" in page.locator(".jp-Cell-outputArea").nth(1).inner_text()
        page.screenshot(path=str(saved[1].parent / "untrusted.png"))
        assert notebook.outside == []
    finally:
        notebook.close()
        lab.close()


def test_standalone_page_zooms_pans_fits_and_hovers(chromium: Any, tmp_path: Path) -> None:
    timeline = TimelinePicture(timeline_view(demo.step_trace()))
    large = TimelinePicture(timeline_view(demo.step_trace(devices=32, steps=6)))
    placement = PlacementPicture(placement_view(demo.placement_data()))
    (tmp_path / "page.html").write_text(html_page("all", placement.to_html() + timeline.to_html() + large.to_html()))
    console: list[str] = []
    outside: list[str] = []
    page = chromium.new_page(viewport={"width": 1240, "height": 1600}, color_scheme="light")
    harness.watch(page, console, outside)
    page.goto(f"file://{tmp_path}/page.html")
    page.wait_for_function("() => document.querySelectorAll('[data-ready]').length === 3")
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids)), "ids belong to the whole page"
    first = page.locator(".hf-timeline").first
    assert first.locator(".hf-span").count() == 47
    box = first.locator("svg").first.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 60)
    for _ in range(8):
        page.mouse.wheel(0, -100)
    page.wait_for_function("() => document.querySelector('.hf-timeline .hf-info').textContent.includes('in view')")
    places = "[...document.querySelectorAll('.hf-timeline')[0].querySelectorAll('.hf-span')].map((e) => e.getAttribute('x')).join()"
    before = page.evaluate(places)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_function(f"(before) => {places} !== before", arg=before)
    first.locator(".hf-fit").click()
    page.wait_for_function("() => document.querySelectorAll('.hf-timeline')[0].querySelectorAll('.hf-span').length === 47")
    assert page.locator(".hf-timeline").nth(1).locator("canvas").count() == 1, "thousands of marks go on a canvas"
    assert page.locator(".hf-timeline").nth(1).locator(".hf-span").count() == 0
    page.locator('.hf-placement [data-role="critic"]').first.hover()
    tip = page.locator(".hf-placement .hf-tip").inner_text()
    assert "tp0 pp0 dp0" in tip
    assert "memory predicted" in tip
    assert page.locator(".hf-placement .hf-shard.hf-faded").count() == 4, "other roles step back"
    page.locator('.hf-placement [data-role="reference"]').first.hover()
    assert "not measured" in page.locator(".hf-placement .hf-tip").inner_text()
    page.close()
    assert console == []
    assert outside == []
