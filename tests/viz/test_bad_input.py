"""Bad input for every picture: in Python, and as a page per kind of picture in a real browser."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html import escape
from pathlib import Path
from typing import Any

import pytest
from expect import each

from hfsdk.session.report import write_report
from hfsdk.viz.frame import LivePicture, html_page
from hfsdk.viz.tables import batch_html, metrics_html, progress_html, progress_text, session_html
from tests.viz import demo, harness
from tests.viz.bad_pictures import HOSTILE, INF, NAN, PICTURES, hostile

ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@each("name", PICTURES)
def test_every_form_is_whole(name: str) -> None:
    picture = PICTURES[name]()
    assert json.loads(json.dumps(picture.view, allow_nan=False)) == picture.view
    text, svg = picture.to_text(), picture.to_svg()
    picture.to_svg = lambda: svg  # type: ignore[method-assign]  # drawn once: HTML holds the drawing as an image
    html = picture.to_html()
    assert text.strip()
    for form in (text, svg, html, picture.to_html(full=True), repr(picture)):
        form.encode()
        assert not ORDERS.search(form), "a terminal or a page would be given control characters"
    root = ET.fromstring(svg)
    drawn = root.attrib | {"style": ""}
    assert min(float(drawn["width"]), float(drawn["height"])) > 20
    assert len("".join(root.itertext())) > 20, "never an empty drawing"
    for shape in (e.attrib for e in root.iter()):
        assert not any(re.search(r"\b(nan|inf|None)\b", v) for k, v in shape.items() if k in SHAPE), shape
    assert "<script>window" not in html
    assert html.count("</script>") == html.count("<script")


SHAPE = {"x", "y", "width", "height", "d", "points", "x1", "x2", "y1", "y2", "cx", "cy", "r", "transform", "viewBox"}


def test_tables_hold_hostile_texts_and_no_numbers() -> None:
    data = hostile(demo.BATCH)
    data["columns"] = [{**c, "writer": HOSTILE, "dtype": HOSTILE, "bytes": NAN, "mean_length": NAN} for c in data["columns"]]
    data["samples"] = [{**s, "score": number} for s, number in zip(data["samples"], (NAN, INF, None), strict=True)]
    calls = [{**c, "call": HOSTILE, "line": HOSTILE, "error": HOSTILE, "unit": HOSTILE, "seconds": NAN} for c in demo.PROGRESS]
    session = {**hostile(demo.SESSION), "messages": [HOSTILE], "runtime": HOSTILE}
    for html in (batch_html(data), session_html(session), progress_html(calls), metrics_html([{HOSTILE: NAN, "b": INF}])):
        html.encode()
        ET.fromstring(html)
        assert "<script" not in html
    progress_text(calls).encode()
    assert not ORDERS.search(progress_text(calls))
    assert ">nan<" not in batch_html(data)


def test_a_report_with_hostile_headings_can_be_written(tmp_path: Path) -> None:
    path = write_report(tmp_path / "report.html", HOSTILE, [(HOSTILE, f"<pre>{escape(HOSTILE)}</pre>")])
    assert "�" in path.read_text(encoding="utf-8")


@each("name", ["timeline: hostile", "placement: nan", "dashboard: hostile", "comparison: neither"])
def test_what_is_sent_to_a_live_picture_is_json(name: str) -> None:
    pytest.importorskip("anywidget")
    picture = PICTURES[name]()
    live = LivePicture(picture)
    json.dumps(live.widget.view, allow_nan=False, ensure_ascii=False).encode()
    live.publish({**picture.view, "title": HOSTILE, "summary": HOSTILE, "number": NAN})
    live.freeze(Handle())
    assert "\ud800" not in live.picture.view["title"]


class Handle:
    def update(self, bundle: dict[str, str], raw: bool) -> None:
        for form in bundle.values():
            form.encode()


# ---------------------------------------------------------------- in a browser


EMPTY = """() => [...document.querySelectorAll('.hf-picture')].map((p, i) => [i, p]).filter(([, p]) => {
    const box = p.getBoundingClientRect();
    const parts = [...p.querySelectorAll('.hf svg, .hf table, .hf canvas, .hf p, img')];
    const drawn = parts.filter((e) => e.getBoundingClientRect().height > 5);
    return box.height < 30 || !drawn.length || (p.dataset.ready && p.innerText.trim().length < 10);
}).map(([i]) => i)"""
UNREADY = "() => [...document.querySelectorAll('.hf-picture')].flatMap((p, i) => p.dataset.ready ? [] : [i])"
WIDE = """() => [...document.querySelectorAll('.hf-picture')].flatMap((p, i) =>
    [...p.querySelectorAll('.hf *:not(.hf-say)')].some((e) => e.getBoundingClientRect().width > 1225) ? [i] : [])"""
WRONG = """() => [...document.querySelectorAll('.hf-picture *')].filter((e) => [...e.attributes].some((a) =>
    ['x', 'y', 'width', 'height', 'd', 'x1', 'x2', 'y1', 'y2', 'cx', 'cy', 'style', 'viewBox', 'points'].includes(a.name)
    && /NaN|Infinity|undefined|null/.test(a.value))).map((e) => e.outerHTML.slice(0, 200))"""


@pytest.mark.browser
@pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH")
def test_a_browser_draws_them_all(chromium: Any, tmp_path: Path) -> None:
    names = list(PICTURES)
    htmls = [PICTURES[name]().to_html() for name in names]
    (tmp_path / "page.html").write_text(html_page("all", "".join(htmls)), encoding="utf-8")
    console: list[str] = []
    outside: list[str] = []
    page = chromium.new_page(viewport={"width": 1240, "height": 1000})
    harness.watch(page, console, outside)
    try:
        page.goto(f"file://{tmp_path}/page.html")
        ready = sum("<script" in html for html in htmls)
        try:
            page.wait_for_function(f"() => document.querySelectorAll('[data-ready]').length === {ready}")
        except Exception:
            unready = page.evaluate(UNREADY)
            raise AssertionError(f"not drawn: {[names[i] for i in unready]}; {console}") from None
        harness.frames(page)
        assert [names[i] for i in page.evaluate(EMPTY)] == []
        assert [names[i] for i in page.evaluate(WIDE)] == [], "wider than the page"
        assert page.evaluate(WRONG) == []
        words = page.evaluate("() => document.body.innerText")
        assert re.findall(r".{0,40}\b(?:undefined|null|\[object)\b.{0,40}", words) == []
        assert page.evaluate("() => window.hacked") is None
    finally:
        page.close()
    assert console == []
    assert outside == []
