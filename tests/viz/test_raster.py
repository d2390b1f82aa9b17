"""Every text of a picture's PNG has letters, whatever fonts the machine has."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expect import each, refuses

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
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without the fonts that matplotlib brings: it is looked for, and not needed."""
    forget_fonts()
    monkeypatch.setattr(raster, "find_spec", lambda name: None)
    yield
    forget_fonts()


def forget_fonts() -> None:
    """Have the fonts looked for anew: which there are is kept for the whole process."""
    raster._first_drawn.cache_clear()
    raster._shipped.cache_clear()


@pytest.fixture
def no_fonts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without any font."""
    monkeypatch.setattr(resvg_py, "svg_to_bytes", partial(resvg_py.svg_to_bytes, skip_system_fonts=True))
    forget_fonts()
    yield
    forget_fonts()


def texts_alone(svg: str) -> ET.Element:
    """The SVG with its texts alone, and what clips them."""
    root = ET.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent) if parent.tag != f"{SVG}clipPath" else ():
            if child.tag.removeprefix(SVG) not in ("g", "svg", "text", "tspan", "clipPath"):
                parent.remove(child)
    return root


def painted_texts(svg: str) -> tuple[str, list[str]]:
    """Return the SVG with its texts alone, the k-th in colour k + 1, without smoothing; and the texts."""
    root, texts = texts_alone(svg), []
    for element in root.iter():
        for name in ("class", "opacity", "fill-opacity", "style", "clip-path"):
            element.attrib.pop(name, None)
        if element.tag == f"{SVG}text":
            texts.append("".join(element.itertext()))
            element.set("fill", f"#{len(texts):06x}")
            element.set("text-rendering", "optimizeSpeed")
    return ET.tostring(root, encoding="unicode"), texts


def pixels_of(png: bytes) -> Any:
    """Red, green, blue and opacity, 0 to 255; shape [height, width, 4]."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA")).astype(np.int64)


def colors(png: bytes) -> set[int]:
    pixels = pixels_of(png)
    seen = pixels[pixels[..., 3] == 255]
    return set((seen[:, 0] << 16 | seen[:, 1] << 8 | seen[:, 2]).tolist())


@cache
def drawing_of(name: str) -> tuple[str, float, float]:
    """The SVG of a picture, its width and its height."""
    svg = PICTURES[name]().to_svg()
    width, height = re.findall(r'<svg[^>]* width="([\d.]+)" height="([\d.]+)"', svg)[0]
    return svg, float(width), float(height)


@pytest.mark.usefixtures("no_fonts")
@each("name", FULL.values())
def test_every_text_of_a_png_has_letters_on_a_machine_without_fonts(name: str) -> None:
    svg, texts = painted_texts(drawing_of(name)[0])
    seen = colors(raster.png_of(svg, 2.0))
    blank = [text for k, text in enumerate(texts) if k + 1 not in seen and re.search(r"[A-Za-z0-9]", text)]
    assert texts
    assert not blank


def test_without_matplotlib_a_font_of_the_machine_draws_letters(no_matplotlib: None) -> None:
    for family in ("system-ui, sans-serif", MONO):
        svg = TWO.format(family)
        try:
            drawn = raster.png_of(svg, 2.0)
        except ModuleNotFoundError:
            pytest.skip("this machine has no font")
        assert drawn != raster.png_of(svg.replace("words", ""), 2.0), family


@pytest.mark.usefixtures("no_fonts")
def test_no_font_at_all_is_said(no_matplotlib: None) -> None:
    with refuses(ModuleNotFoundError, "font", "pip install matplotlib"):
        raster.png_of(TWO.format(MONO), 2.0)


TEXTS = """
() => [...document.querySelectorAll('text')].map((e) => {
  const {left, top, right, bottom} = e.getBoundingClientRect();
  return {text: e.textContent, box: [left, top, right, bottom], clipped: e.closest('[clip-path]') !== null};
})
"""
LEAST_INK = 0.4
"""Of what the browser draws of a text; another font has other strokes, a missing one has none."""


def without_text(svg: str) -> str:
    return re.sub(r"<text\b", '<text visibility="hidden"', svg)


def ink(with_text: bytes, without: bytes) -> Any:
    """How much every pixel owes to a text, 0 to 1."""
    pictures = [np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(float) for png in (with_text, without)]
    return np.abs(pictures[0] - pictures[1]).max(axis=2) / 255


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """One page, for one drawing after the other."""
    page = chromium.new_page(color_scheme="light")
    yield page
    page.close()


@pytest.mark.browser
@pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH")
@pytest.mark.usefixtures("no_fonts")
@each("name", FULL.values())
def test_a_png_has_ink_where_the_browser_draws_text_and_no_text_is_cut(page: Any, tmp_path: Path, name: str) -> None:
    svg, width, height = drawing_of(name)
    file = tmp_path / "picture.svg"
    file.write_text(svg, encoding="utf-8")
    page.set_viewport_size({"width": int(width), "height": int(height)})
    page.goto(file.as_uri())
    texts, seen = page.evaluate(TEXTS), page.screenshot()
    page.evaluate("() => document.querySelectorAll('text').forEach((e) => e.setAttribute('visibility', 'hidden'))")
    browser = ink(seen, page.screenshot())
    png = ink(raster.png_of(svg, 1.0), raster.png_of(without_text(svg), 1.0))
    words = [t for t in texts if re.search(r"[A-Za-z0-9]", t["text"])]
    assert words
    boxes = [(t["text"], t["box"]) for t in words if not t["clipped"]]
    cut = [text for text, box in boxes if box[0] < -1 or box[2] > int(width) + 1 or box[3] > int(height) + 1]
    assert cut == [], "cut at the edge"
    pale = []
    for word in words:
        left, top, right, bottom = (round(edge) for edge in word["box"])
        part = np.s_[max(0, top - 2) : bottom + 2, max(0, left - 2) : right + 2]
        if png[part].sum() < LEAST_INK * browser[part].sum():
            pale.append(word["text"])
    assert pale == []


ROOM = 300


@each("name", FULL.values())
def test_no_text_reaches_beyond_its_picture(name: str) -> None:
    """With room around the picture nothing is drawn there; letters of DejaVu are as wide as any usual font's."""
    svg, width, height = drawing_of(name)
    box = f'viewBox="{-ROOM} 0 {width + 2 * ROOM} {height + ROOM}" width="{width + 2 * ROOM}" height="{height + ROOM}"'
    words = ET.tostring(texts_alone(svg), encoding="unicode")
    drawn = pixels_of(raster.png_of(re.sub(r'viewBox="[^"]*" width="[^"]*" height="[^"]*"', box, words, count=1), 1.0))[..., 3]
    assert drawn[: int(height), ROOM : ROOM + int(width)].sum() > 0
    beyond = [drawn[:, : ROOM - 1], drawn[:, ROOM + int(width) + 1 :], drawn[int(height) + 1 :]]
    assert [int(part.sum()) for part in beyond] == [0, 0, 0]
