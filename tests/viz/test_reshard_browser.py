"""The resharding picture in a real browser: steps, numbers, grouping, keyboard, animation, dark, nothing from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hfsdk as hf
from hfsdk.viz.frame import bytes_text, html_page
from tests.viz import harness
from tests.viz.test_resharding_picture import SPEC, report

pytest.importorskip("playwright", reason="playwright is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH"),
]
CROSSING = """root => [...root.querySelectorAll('.hf-matrix .hf-cell')].filter((c) => c.dataset.source !== c.dataset.target)
    .reduce((n, c) => n + Number(c.dataset.bytes), 0)"""


def opened(chromium: Any, tmp_path: Path, *pictures: Any, **options: Any) -> tuple[Any, list[str], list[str]]:
    (tmp_path / "page.html").write_text(html_page("resharding", "".join(p.to_html() for p in pictures)))
    console: list[str] = []
    outside: list[str] = []
    page = chromium.new_page(viewport={"width": 1240, "height": 1400}, **options)
    harness.watch(page, console, outside)
    page.goto(f"file://{tmp_path}/page.html")
    page.wait_for_function(f"() => document.querySelectorAll('[data-ready]').length === {len(pictures)}")
    return page, console, outside


def arrived(page: Any) -> int:
    return int(page.locator('.hf-after[data-arrived="1"]').count())


def test_the_slider_moves_the_pieces_and_the_switch_the_grouping(chromium: Any, tmp_path: Path) -> None:
    picture = hf.viz.grouping_picture(SPEC, "tp4 dp2", "tp2 dp4")
    strided, vanilla = picture.view["variants"]
    page, console, outside = opened(chromium, tmp_path, picture, reduced_motion="reduce")
    root, slider = page.locator(".hf-reshard"), page.locator('input[type="range"]')
    assert root.evaluate(CROSSING) == strided["moved"]
    assert page.locator(".hf-sums").get_attribute("data-redundant") == "0"
    page.locator('[data-grouping="vanilla"]').click()
    assert root.evaluate(CROSSING) == vanilla["moved"]
    assert page.locator(".hf-sums").get_attribute("data-redundant") == str(vanilla["redundant"])
    aside = page.eval_on_selector_all('[data-part="aside"]', "nodes => nodes.reduce((n, e) => n + Number(e.dataset.bytes), 0)")
    assert aside == vanilla["redundant"] > 0
    page.locator('[data-grouping="strided"]').click()

    page.locator("select").select_option(label="model.layers.0.self_attn.qkv_proj.weight (× 2 layers)")
    qkv = strided["parameters"][0]
    assert root.evaluate(CROSSING) == sum(n for s, row in enumerate(qkv["matrix"]) for t, n in enumerate(row) if s != t)
    everything = sum(len(pieces) for pieces in qkv["after"])
    assert arrived(page) == everything
    slider.fill("0")
    assert "before" in page.locator(".hf-steplabel").inner_text()
    assert arrived(page) == 0
    slider.fill("1")
    own = page.locator('.hf-after[data-way="1"]')
    assert "copied on its own rank" in page.locator(".hf-steplabel").inner_text()
    assert arrived(page) == own.count() > 0
    slider.fill("2")
    assert "rank 0 sends" in page.locator(".hf-steplabel").inner_text()
    assert arrived(page) == own.count() + page.locator('.hf-after[data-way="2"][data-from="0"]').count()
    page.locator('.hf-after[data-rank="2"][data-from="0"]').first.hover()
    tip = page.locator(".hf-tip").inner_text()
    for words in ("rank 2 generates with q 0:64", "rank 0", "moved within a node", "8.19 kB"):
        assert words in tip
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert slider.input_value() == "3"
    page.locator(".hf-host").focus()
    page.keyboard.press("-")
    assert slider.input_value() == "2"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert "rank 0 trains k 0:32" in page.locator(".hf-say").inner_text()
    assert page.locator(".hf-current").count() == 1
    page.locator(".hf-matrix").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "rank 0 → rank 2" in page.locator(".hf-say").inner_text()
    assert "parameters 8" in page.locator(".hf-say").inner_text()
    page.close()
    assert (console, outside) == ([], [])


def test_playing_flies_pieces_and_ends_at_the_last_step(chromium: Any, tmp_path: Path) -> None:
    from hfsdk.resharding.reshard_plan import ReshardPlan

    page, console, outside = opened(chromium, tmp_path, hf.viz.reshard_picture(ReshardPlan.between(SPEC, "tp2", "tp1")))
    page.locator("select").select_option(index=4)
    last = int(page.locator('input[type="range"]').get_attribute("max"))
    page.locator('input[type="range"]').fill(str(last - 3))
    page.locator(".hf-play").click()
    page.wait_for_function("() => document.querySelectorAll('.hf-bird').length > 0")
    assert page.locator(".hf-play").get_attribute("aria-label") == "pause"
    page.wait_for_function(f"() => document.querySelector('input[type=range]').value === '{last}'", timeout=10_000)
    page.wait_for_function("() => document.querySelectorAll('.hf-bird').length === 0")
    assert page.locator('.hf-after[data-arrived="0"]').count() == 0
    page.close()
    assert (console, outside) == ([], [])


def test_measured_is_solid_and_large_plans_stay_light_in_the_dark(chromium: Any, tmp_path: Path) -> None:
    from hfsdk.resharding.reshard_plan import ReshardPlan

    plan = ReshardPlan.between(SPEC, "tp4", "tp2", nodes=2)
    large = ReshardPlan.between(hf.ModelSpec.preset("llama-70b"), "tp8 pp8 dp2", "tp8 dp16", "bf16", nodes=8)
    pictures = [hf.viz.reshard_picture(one) for one in (plan, report(plan), large)]
    page, console, outside = opened(chromium, tmp_path, *pictures, color_scheme="dark")
    planned, measured, many = (page.locator(".hf-reshard").nth(k) for k in range(3))
    fills = "nodes => nodes.map((n) => n.querySelector('rect').getAttribute('fill').startsWith('url('))"
    assert all(planned.locator(".hf-matrix .hf-cell").evaluate_all(fills))
    assert not any(measured.locator(".hf-matrix .hf-cell").evaluate_all(fills))
    assert planned.evaluate(CROSSING) == measured.evaluate(CROSSING) == plan.bytes_moved
    assert measured.locator('[data-name="wire"]').get_attribute("data-bytes") == str(max(map(plan.bytes_received, range(4))))
    planned.locator(".hf-matrix .hf-cell").first.hover()
    assert "not measured" in planned.locator(".hf-tip").inner_text()
    far = bytes_text(plan.bytes_by_link()["network"])
    assert f"network: {far} planned" in planned.locator(".hf-links").inner_text()
    assert many.locator(".hf-matrix text").count() == 32
    many.locator("select").select_option(index=1)
    assert "(8 of 128 ranks)" in many.locator(".hf-steplabel").inner_text()
    color = page.evaluate("() => getComputedStyle(document.querySelector('.hf-reshard')).color")
    assert min(map(int, color[4:-1].split(","))) > 180
    page.close()
    assert (console, outside) == ([], [])
