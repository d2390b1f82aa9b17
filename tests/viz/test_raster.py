"""Every text of a picture's PNG has letters, whatever fonts the machine has."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hfsdk.viz import raster
from tests.viz import harness
from tests.viz.bad_pictures import PICTURES

resvg_py = pytest.importorskip("resvg_py")
Image = pytest.importorskip("PIL.Image")
SVG = "{http://www.w3.org/2000/svg}"
HIDDEN = "empty|nothing|none|neither|nan|infinity|too long|: 0"
FULL = {name.partition(":")[0]: name for name in PICTURES if not re.search(HIDDEN, name)}
"""Of every kind one picture that is not empty."""
TWO = '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="40"><text y="15" font-family="{}">words</text></svg>'
MONO = "ui-monospace, 'DejaVu Sans Mono', monospace"


@pytest.fixture
def no_fonts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without any font."""
    monkeypatch.setattr(resvg_py, "svg_to_bytes", partial(resvg_py.svg_to_bytes, skip_system_fonts=True))
    raster._first_drawn.cache_clear()
    yield
    raster._first_drawn.cache_clear()


def painted_texts(svg: str) -> tuple[str, list[str]]:
    """Return the SVG with its texts alone, the k-th in colour k + 1, without smoothing; and the texts."""
    root, texts = ET.fromstring(svg), []
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag not in (f"{SVG}g", f"{SVG}svg", f"{SVG}text", f"{SVG}tspan"):
                parent.remove(child)
    for element in root.iter():
        for name in ("class", "opacity", "fill-opacity", "style", "clip-path"):
            element.attrib.pop(name, None)
        if element.tag == f"{SVG}text":
            texts.append("".join(element.itertext()))
            element.set("fill", f"#{len(texts):06x}")
            element.set("text-rendering", "optimizeSpeed")
    return ET.tostring(root, encoding="unicode"), texts


def colors(png: bytes) -> set[int]:
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGBA")).astype(np.int64)
    seen = pixels[pixels[..., 3] == 255]
    return set((seen[:, 0] << 16 | seen[:, 1] << 8 | seen[:, 2]).tolist())


@pytest.mark.usefixtures("no_fonts")
@pytest.mark.parametrize("name", FULL.values())
def test_every_text_of_a_png_has_letters_on_a_machine_without_fonts(name: str) -> None:
    svg, texts = painted_texts(PICTURES[name]().to_svg())
    seen = colors(raster.png_of(svg, 2.0))
    blank = [text for k, text in enumerate(texts) if k + 1 not in seen and re.search(r"[A-Za-z0-9]", text)]
    assert texts
    assert not blank


@pytest.mark.parametrize("family", ["system-ui, sans-serif", MONO])
def test_without_matplotlib_a_font_of_the_machine_draws_letters(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raster, "_shipped", list)
    if raster._first_drawn(raster.SANS) is None:
        pytest.skip("this machine has no font")
    svg = TWO.format(family)
    assert raster.png_of(svg, 2.0) != raster.png_of(svg.replace("words", ""), 2.0)


@pytest.mark.usefixtures("no_fonts")
def test_no_font_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raster, "_shipped", list)
    with pytest.raises(ModuleNotFoundError, match=r"need a font.*pip install matplotlib"):
        raster.png_of(TWO.format(MONO), 2.0)


def test_matplotlib_is_looked_up_and_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    raster._shipped.cache_clear()
    monkeypatch.setattr(raster, "find_spec", lambda name: None)
    try:
        found: Any = raster._shipped()
    finally:
        raster._shipped.cache_clear()
    assert found == []


TEXTS = """
() => [...document.querySelectorAll('text')].map((e) => {
  const {left, top, right, bottom} = e.getBoundingClientRect();
  return {text: e.textContent, box: [left, top, right, bottom], clipped: e.closest('[clip-path]') !== null};
})
"""
LEAST_INK = 0.4
"""Of what the browser draws of a text; another font has other strokes, a missing one has none."""


def ink(with_text: bytes, without: bytes) -> Any:
    """How much every pixel owes to a text, 0 to 1."""
    pictures = [np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(float) for png in (with_text, without)]
    return np.abs(pictures[0] - pictures[1]).max(axis=2) / 255


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH")
@pytest.mark.usefixtures("no_fonts")
@pytest.mark.parametrize("name", FULL.values())
def test_a_png_has_ink_where_the_browser_draws_text_and_no_text_is_cut(chromium: Any, tmp_path: Path, name: str) -> None:
    svg = PICTURES[name]().to_svg()
    blank = re.sub(r"<text\b", '<text visibility="hidden"', svg)
    (tmp_path / "picture.svg").write_text(svg, encoding="utf-8")
    width, height = (int(float(found)) for found in re.findall(r'<svg[^>]* width="([\d.]+)" height="([\d.]+)"', svg)[0])
    page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme="light")
    try:
        page.goto(f"file://{tmp_path}/picture.svg")
        texts, seen = page.evaluate(TEXTS), page.screenshot()
        page.evaluate("() => document.querySelectorAll('text').forEach((e) => e.setAttribute('visibility', 'hidden'))")
        browser = ink(seen, page.screenshot())
    finally:
        page.close()
    png = ink(raster.png_of(svg, 1.0), raster.png_of(blank, 1.0))
    words = [t for t in texts if re.search(r"[A-Za-z0-9]", t["text"])]
    assert words
    boxes = [(t["text"], t["box"]) for t in words if not t["clipped"]]
    assert [text for text, box in boxes if box[0] < -1 or box[2] > width + 1 or box[3] > height + 1] == [], "cut at the edge"
    pale = []
    for word in words:
        left, top, right, bottom = (round(edge) for edge in word["box"])
        part = np.s_[max(0, top - 2) : bottom + 2, max(0, left - 2) : right + 2]
        if png[part].sum() < LEAST_INK * browser[part].sum():
            pale.append(word["text"])
    assert pale == []


ROOM = 300


@pytest.mark.parametrize("name", FULL.values())
def test_no_text_reaches_beyond_its_picture(name: str) -> None:
    """With room around the picture nothing is drawn there; letters of DejaVu are as wide as any usual font's."""
    svg = PICTURES[name]().to_svg()
    width, height = (float(found) for found in re.findall(r'<svg[^>]* width="([\d.]+)" height="([\d.]+)"', svg)[0])
    box = f'viewBox="{-ROOM} 0 {width + 2 * ROOM} {height + ROOM}" width="{width + 2 * ROOM}" height="{height + ROOM}"'
    wide = re.sub(r'viewBox="[^"]*" width="[^"]*" height="[^"]*"', box, svg, count=1)
    drawn = ink(raster.png_of(wide, 1.0), raster.png_of(re.sub(r"<text\b", '<text visibility="hidden"', wide), 1.0))
    assert drawn[: int(height), ROOM : ROOM + int(width)].sum() > 0
    beyond = [drawn[:, : ROOM - 1], drawn[:, ROOM + int(width) + 1 :], drawn[int(height) + 1 :]]
    assert [float(part.sum()) for part in beyond] == [0.0, 0.0, 0.0]
