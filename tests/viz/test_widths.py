"""Every picture in a narrow notebook: nothing sticks out, no word is broken, no label lies on another or is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.viz import harness
from tests.viz.every_picture import CARDS, EVERY

pytest.importorskip("playwright", reason="playwright is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH"),
]

COLUMN = 714
"""Pixels of a notebook's output at 800: JupyterLab's prompt and its margins take the rest."""
NARROWEST = 560
"""And where JupyterLab shows its side bars as well."""
FAULTS = """
() => Object.fromEntries([...document.querySelectorAll('section[data-name]')].map((s) => [s.dataset.name, (() => {
  const faults = [], seen = (e) => e.getClientRects().length > 0;
  const scrolls = (e) => e && (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const shown = (text) => text.trim().slice(0, 60);
  for (const e of s.querySelectorAll('*')) {
    const box = e.getBoundingClientRect();
    if (box.right > innerWidth + 1 && !(e.closest('svg') && !e.matches('svg')) && !scrolls(e.parentElement))
      faults.push(`${e.tagName}.${e.getAttribute('class')} ends at ${Math.round(box.right)}`);
    if (e.matches('.hf-dataflow .hf-host')) continue;  // as wide as its phases: it scrolls in itself
    if (e.scrollWidth > e.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(e).overflowX) && e.matches('.hf *'))
      faults.push(`${e.tagName}.${e.getAttribute('class')} scrolls: ${e.scrollWidth} of ${e.clientWidth}`);
  }
  const texts = document.createTreeWalker(s, NodeFilter.SHOW_TEXT), range = document.createRange();
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    if (node.parentElement.closest('svg, script, style, pre, .hf-flow, .hf-tip')) continue;
    for (const word of node.data.matchAll(/[^\\s]+/g)) {
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const rows = [...range.getClientRects()].filter((r) => r.width > 0).map((r) => Math.round(r.top));
      if (!/[-/–]/.test(word[0]) && Math.max(...rows) - Math.min(...rows) > 4) faults.push(`broken: ${word[0]}`);
    }
  }
  for (const svg of s.querySelectorAll('svg')) {
    const all = [...svg.querySelectorAll('text')].filter((t) => seen(t) && t.textContent.trim());
    const frame = svg.getBoundingClientRect();
    const boxes = all.map((t) => [t, t.getBoundingClientRect()]).filter(([t]) => !t.closest('[clip-path]'));
    for (const [t, b] of boxes)
      if (b.left < frame.left - 2 || b.right > frame.right + 2) faults.push(`cut: ${shown(t.textContent)}`);
    boxes.forEach(([t, b], i) => {
      for (const [other, c] of boxes.slice(i + 1))
        if (Math.min(b.right, c.right) - Math.max(b.left, c.left) > 3 && Math.min(b.bottom, c.bottom) - Math.max(b.top, c.top) > 5)
          faults.push(`over each other: ${shown(t.textContent)} | ${shown(other.textContent)}`);
    });
  }
  return [...new Set(faults)];
})()]))
"""


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pictures and cards below each other, each as wide as the window."""
    made = {name: make().to_html() for name, make in EVERY.items()} | {f"card of {name}": make() for name, make in CARDS.items()}
    head = '<meta charset="utf-8"/><meta name="color-scheme" content="light dark"/>'
    body = "".join(f'<section data-name="{name}">{html}</section>' for name, html in made.items())
    file = tmp_path_factory.mktemp("widths") / "gallery.html"
    file.write_text(f'<!doctype html><head>{head}</head><body style="margin:0">{body}</body>', "utf-8")
    return file


@pytest.mark.parametrize("width", [COLUMN, 800])
def test_narrow_pictures_are_whole(chromium: Any, gallery: Path, width: int) -> None:
    found = faults_of(chromium, gallery, width)
    assert len(found) == len(EVERY) + len(CARDS)
    broken = {name: faults for name, faults in found.items() if faults}
    assert broken == {}, json.dumps(broken, indent=1, ensure_ascii=False)


def test_with_both_side_bars_open_a_table_of_a_timeline_scrolls_in_itself(chromium: Any, gallery: Path) -> None:
    found = {name: faults for name, faults in faults_of(chromium, gallery, NARROWEST).items() if name.startswith("timeline")}
    assert found
    assert [fault for faults in found.values() for fault in faults if " ends at " in fault] == []


def faults_of(chromium: Any, gallery: Path, width: int) -> dict[str, list[str]]:
    """Return what is cut, broken or too wide of each picture in a window of this width."""
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme="light")
    try:
        page.goto(gallery.as_uri())
        page.wait_for_function("() => document.querySelectorAll('.hf-picture[id]:not([data-ready])').length === 0")
        page.evaluate("() => document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        harness.frames(page)
        faults: dict[str, list[str]] = page.evaluate(FAULTS)
    finally:
        page.close()
    return faults
