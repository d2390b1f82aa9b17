"""One picture from end to end: a trace is saved as a page, and chromium opens it, light and dark, with mouse and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hfsdk as hf
from tests.viz import demo, harness

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH"),
]


def test_a_saved_picture_is_read_hovered_and_walked_over_in_a_browser(chromium: Any, tmp_path: Path) -> None:
    trace = demo.step_trace()
    path = hf.viz.picture(trace).save(tmp_path / "trace.html")
    console: list[str] = []
    outside: list[str] = []
    page = chromium.new_page(viewport={"width": 1240, "height": 1000}, color_scheme="light")
    harness.watch(page, console, outside)
    try:
        page.goto(path.as_uri())
        page.wait_for_selector("[data-ready]")
        assert page.locator(".hf-span").count() == len(trace)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            channels = "(c) => c.match(/[0-9.]+/g).slice(0, 3).map(Number)"
            paper, ink = (
                sum(page.evaluate(f"({channels})(getComputedStyle(document.querySelector('.hf')).{of})"))
                for of in ("backgroundColor", "color")
            )
            assert (paper > ink) == (scheme == "light")
            assert abs(paper - ink) > 300
        row = trace.to_pandas().iloc[-1]
        page.locator(f'.hf-span[data-row="{len(trace) - 1}"]').hover()
        tip = page.locator(".hf-tip")
        told = dict(zip(tip.locator("dt").all_inner_texts(), tip.locator("dd").all_inner_texts(), strict=True))
        assert (told["row"], told["role"], told["method"]) == (str(len(trace) - 1), row["role"], row["method"])
        page.locator(".hf-host").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.locator(".hf-current").count() == 1
        assert "role actor" in page.locator(".hf-say").inner_text()
        page.keyboard.press("Escape")
        assert tip.is_hidden()
    finally:
        page.close()
    assert (console, outside) == ([], [])
