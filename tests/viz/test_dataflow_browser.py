"""The dataflow picture in a real browser: an opened edge's numbers, hover, keyboard, dark, nothing from outside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hfsdk.viz.frame import html_page
from hfsdk.viz.modules import esm, static
from tests.viz import harness
from tests.viz.test_dataflow_picture import AWKWARD, flow, picture

pytest.importorskip("playwright", reason="playwright is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH"),
]


def opened(chromium: Any, tmp_path: Path, *pictures: Any, **options: Any) -> tuple[Any, list[str], list[str]]:
    (tmp_path / "page.html").write_text(html_page("dataflow", "".join(p.to_html() for p in pictures)))
    console: list[str] = []
    outside: list[str] = []
    page = chromium.new_page(viewport={"width": 1240, "height": 1200}, **options)
    harness.watch(page, console, outside)
    page.goto(f"file://{tmp_path}/page.html")
    page.wait_for_function(f"() => document.querySelectorAll('[data-ready]').length === {len(pictures)}")
    return page, console, outside


def numbers(page: Any, selector: str) -> list[int]:
    found: list[int] = page.eval_on_selector_all(selector, "nodes => nodes.map((n) => Number(n.dataset.bytes))")
    return found


def test_an_opened_edge_adds_up_and_answers_the_keyboard(chromium: Any, tmp_path: Path) -> None:
    given = flow(4, per_node=2)
    page, console, outside = opened(chromium, tmp_path, picture(given))
    edge = given.edge(1, 2)
    assert page.locator(".hf-call").count() == 4
    page.locator('.hf-port[data-edge="0"]').click()
    assert sum(numbers(page, ".hf-cell")) == edge.bytes_read == 800
    assert numbers(page, ".hf-columns tbody td:nth-child(2)") == [400, edge.num_bytes, edge.bytes_read]
    page.locator('.hf-cell[data-writer="2"][data-reader="3"]').hover()
    tip = page.locator(".hf-tip").inner_text()
    for words in ("rank 2 → rank 3", "4-5", "100 B", "device 2, node 1, tp0 pp0 dp2", "same node: mapped, no copy"):
        assert words in tip
    page.locator(".hf-matrix").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator(".hf-cell .hf-current").count() == 1
    assert "rank 1 → rank 1" in page.locator(".hf-say").inner_text()
    page.keyboard.press("Escape")
    assert page.locator(".hf-cell").count() == 0

    page.locator(".hf-host").focus()  # the clicked row of a box is the current mark
    page.keyboard.press("ArrowRight")
    assert "critic.update" in page.locator(".hf-say").inner_text()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowDown")
    assert "actor.generate #1 → " in page.locator(".hf-say").inner_text()
    assert page.locator(".hf-edgeline.hf-faded").count() == 3, "the other lines step back"
    page.keyboard.press("Enter")
    assert sum(numbers(page, ".hf-cell")) in (400, 800)
    page.keyboard.press("Escape")
    page.locator('.hf-call[data-call="4"]').hover()
    assert "pending" in page.locator(".hf-tip").inner_text()
    page.locator('.hf-port[data-edge="2"]').click()
    assert "nothing has been read yet" in page.locator(".hf-transfer").inner_text()
    page.close()
    assert (console, outside) == ([], [])


def test_network_prediction_large_and_awkward_in_the_dark(chromium: Any, tmp_path: Path) -> None:
    far, many = picture(flow(4, per_node=1, predicted=True)), picture(flow(128))
    empty = picture(replace(flow(), calls=(), edges=()))
    awkward = flow()
    calls = tuple(replace(call, role=AWKWARD, method=AWKWARD, line=AWKWARD) for call in awkward.calls)
    pictures = (far, many, empty, picture(replace(awkward, calls=calls, title=AWKWARD)))
    page, console, outside = opened(chromium, tmp_path, *pictures, color_scheme="dark")
    first, second, third, fourth = (page.locator(".hf-dataflow").nth(k) for k in range(4))
    assert first.locator(".hf-edgeline.hf-predicted").count() == 1
    first.locator('.hf-port[data-edge="0"]').click()
    cell = first.locator('.hf-cell[data-writer="0"][data-reader="1"]')
    assert "⇄" in cell.text_content()
    assert cell.locator("rect").first.get_attribute("fill").startswith("url(#"), "predicted is hatched"
    cell.hover()
    assert "network" in first.locator(".hf-tip").inner_text()
    second.locator('.hf-port[data-edge="0"]').click()
    assert second.locator(".hf-cell").count() == 16
    assert "node 15" in second.locator(".hf-matrix").text_content()
    assert "no calls in this step yet" in third.text_content()
    assert fourth.locator(".hf-call").count() == 4
    assert "</script>" in fourth.text_content()
    color = page.evaluate("() => getComputedStyle(document.querySelector('.hf-dataflow')).color")
    assert min(map(int, color[4:-1].split(","))) > 180
    page.close()
    assert (console, outside) == ([], [])


def test_a_new_view_is_drawn_and_keeps_what_is_open(chromium: Any, tmp_path: Path) -> None:
    """Under anywidget the view changes while calls run."""
    early = flow(4)
    early = replace(early, calls=early.calls[:2], edges=early.edges[:1])
    (tmp_path / "page.html").write_text(html_page("live", f"<style>{static('frame.css')}</style><div id='here'></div>"))
    console: list[str] = []
    page = chromium.new_page()
    harness.watch(page, console, [])
    page.goto(f"file://{tmp_path}/page.html")
    page.evaluate(
        """async ([code, view]) => {
            const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" })), picture = (await import(url)).default;
            const model = { view, get: (k) => model[k], on(e, f) { model.changed = f; }, off() { model.changed = null; } };
            window.model = model;
            window.close_ = picture.render({ model, el: document.getElementById("here") });
        }""",
        [esm("dataflow"), picture(early).view],
    )
    assert page.locator(".hf-call").count() == 2
    page.locator('.hf-port[data-edge="0"]').click()
    page.evaluate("(view) => { model.view = view; model.changed(); }", picture(flow(4)).view)
    page.wait_for_function("() => document.querySelectorAll('.hf-call').length === 4")
    assert sum(numbers(page, ".hf-cell")) == 800, "the opened edge stays open"
    assert page.evaluate("() => { close_(); return model.changed; }") is None
    page.close()
    assert console == []
