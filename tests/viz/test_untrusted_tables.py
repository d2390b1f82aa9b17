"""Cards and tables in a notebook that is not trusted: JupyterLab drops ``<style>``, and with it every class rule."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from expect import each

from hfsdk.viz.tables import batch_html, metrics_html, progress_html, session_html
from tests.viz import demo, harness

CARDS: dict[str, Callable[[], str]] = {
    "batch": lambda: batch_html(demo.BATCH),
    "session": lambda: session_html(demo.SESSION),
    "metrics": lambda: metrics_html(demo.METRICS),
    "progress": lambda: progress_html(demo.PROGRESS),
}


def untrusted(html: str) -> ET.Element:
    """The card without what the sanitiser drops, and without classes: no rule names them there."""
    kept = re.sub(r"<(style|script)\b.*?</\1>", "", html, flags=re.DOTALL)
    return ET.fromstring(re.sub(r' (class|aria-\w+|role)="[^"]*"', "", kept))


def style(element: ET.Element) -> dict[str, str]:
    return dict(part.split(":", 1) for part in element.get("style", "").split(";") if part)


@each("name", CARDS)
def test_a_card_is_rows_and_columns_without_its_style(name: str) -> None:
    card = untrusted(CARDS[name]())
    assert len(card.findall(".//tr")) > 3
    for table in card.iter("table"):
        widths = {sum(int(cell.get("colspan", "1")) for cell in row) for row in table.iter("tr")}
        assert len(widths) == 1, "every row has the same columns"
    assert all("var(" not in element.get("style", "") for element in card.iter()), "variables are declared in the style"


def test_each_call_is_one_row() -> None:
    card = untrusted(progress_html(demo.PROGRESS))
    rows = list(card.iter("tr"))
    calls = [call["call"] for call in demo.PROGRESS]
    assert [row.findtext(".//code") for row in rows if len(row) == 4] == calls
    assert len(rows) == len(calls) + 1, "and one for the error"
    assert "".join(card.itertext()).count("RewardFunctionError") == 1


@each("name", ["session", "progress"])
def test_bars_and_swatches_have_a_size_and_a_colour_of_their_own(name: str) -> None:
    painted = [e for e in untrusted(CARDS[name]()).iter() if e.tag == "i"]
    assert painted
    for element in painted:
        own = style(element)
        assert own["display"] in ("block", "inline-block")
        assert re.fullmatch("#[0-9a-f]{6}", own["background-color"])
        assert own["height"].endswith("px")
        assert own["width"].endswith(("px", "%"))


LAID_OUT = """
() => [...document.querySelectorAll('.jp-Cell-outputArea table')].map((table) => ({
  tops: [...table.querySelectorAll('tr')].map((row) => new Set([...row.children].map((c) => c.getBoundingClientRect().top)).size),
  bars: [...table.querySelectorAll('.hf-track, .hf-track i, .hf-dot')].map((bar) => [
    bar.getBoundingClientRect().width, bar.getBoundingClientRect().height, getComputedStyle(bar).backgroundColor,
  ]),
}))
"""


@pytest.mark.browser
@pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_jupyterlab_shows_rows_bars_and_swatches_of_cards_it_does_not_trust(chromium: Any, tmp_path: Path, dark: bool) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
    path = harness.write_notebook(tmp_path / "cards.ipynb", [f"'{name}'" for name in CARDS])
    notebook = nbformat.read(path, as_version=4)
    for cell, card in zip(notebook.cells, CARDS.values(), strict=True):
        cell.outputs = [nbformat.v4.new_output("display_data", {"text/plain": "card", "text/html": card()})]
    nbformat.write(notebook, path)
    lab = harness.Lab(tmp_path, dark=dark)
    opened = harness.Notebook(lab, chromium.new_page(viewport={"width": 1000, "height": 1400}))
    try:
        page = opened.open("cards.ipynb", kernel=False).page
        page.wait_for_selector(f'body[data-jp-theme-light="{str(not dark).lower()}"]', state="attached")
        page.locator(".jp-Cell-outputArea table").nth(len(CARDS)).wait_for()
        assert page.locator(".jp-Cell-outputArea style").count() == 0, "the notebook is not trusted"
        page.screenshot(path=str(tmp_path / "cards.png"))
        tables = page.evaluate(LAID_OUT)
    finally:
        opened.close()
        lab.close()
    assert all(count == 1 for table in tables for count in table["tops"]), "a row's cells stand side by side"
    bars = [bar for table in tables for bar in table["bars"]]
    assert len(bars) >= 8
    assert all(width > 5 and height > 5 and color != "rgba(0, 0, 0, 0)" for width, height, color in bars)
