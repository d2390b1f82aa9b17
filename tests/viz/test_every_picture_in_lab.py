"""Every kind of picture in JupyterLab: shown by a kernel, saved, reopened without one (trusted and not), and by nbconvert."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.viz import harness
from tests.viz.bad_pictures import PICTURES

pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH"),
]

KINDS: dict[str, str] = {}
for full_name in PICTURES:  # of every kind the one with hostile texts: full, and the hardest to keep
    if full_name.partition(":")[0] not in KINDS or "hostile" in full_name:
        KINDS[full_name.partition(":")[0]] = full_name
STILL = [full_name for kind, full_name in KINDS.items() if kind in ("experiment", "lineage")]
"""Pictures that are an image everywhere."""
READY = '.hf-picture[data-ready="1"]'
VIEWPORT = {"width": 1300, "height": 1600}


@pytest.fixture(scope="module")
def saved(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[harness.Lab, Path]]:
    """A JupyterLab, and the notebook that showed one picture a cell and was saved by it."""
    root = tmp_path_factory.mktemp("every")
    cells = [f"from tests.viz.bad_pictures import PICTURES\nPICTURES[{name!r}]()" for name in KINDS.values()]
    path = harness.write_notebook(root / "every.ipynb", cells)
    lab = harness.Lab(root)
    notebook = harness.Notebook(lab, chromium.new_page(viewport=VIEWPORT))
    try:
        notebook.open("every.ipynb").run_all()
        notebook.wait()
        shown(notebook.page)
        assert notebook.complaints() == []
        assert notebook.outside == []
        notebook.save()
        yield lab, path
    finally:
        notebook.close()
        lab.close()


def shown(page: Any) -> None:
    """Wait until every kind is drawn, and see that none is empty."""
    moving = len(KINDS) - len(STILL)
    page.wait_for_function(f"() => document.querySelectorAll('{READY}').length === {moving}")
    empty = f"() => [...document.querySelectorAll('{READY}')].filter((e) => e.getBoundingClientRect().height < 40).length"
    assert page.evaluate(empty) == 0
    assert page.locator(READY).evaluate_all("all => new Set(all.map((e) => e.dataset.picture)).size") >= moving - 1
    images = page.locator('img[alt][src^="data:image/svg+xml"]')
    assert images.evaluate_all("all => all.filter((e) => e.naturalWidth > 200).length") >= len(STILL)


def test_what_is_saved_needs_no_kernel(saved: tuple[harness.Lab, Path]) -> None:
    outputs = [o["data"] for cell in json.loads(saved[1].read_text())["cells"] for o in cell["outputs"]]
    assert len(outputs) == len(KINDS)
    assert all(set(data) == {"text/plain", "text/html"} for data in outputs)


def test_reopened_and_trusted_every_picture_is_drawn(saved: tuple[harness.Lab, Path], chromium: Any) -> None:
    notebook = harness.Notebook(saved[0], chromium.new_page(viewport=VIEWPORT))
    try:
        shown(notebook.open("every.ipynb", kernel=False).page)
        assert notebook.complaints() == []
        assert notebook.outside == []
    finally:
        notebook.close()


def test_reopened_and_untrusted_every_picture_is_an_image(saved: tuple[harness.Lab, Path], chromium: Any) -> None:
    lab = harness.Lab(saved[1].parent)  # its own data folder: nothing is trusted there
    notebook = harness.Notebook(lab, chromium.new_page(viewport=VIEWPORT))
    try:
        page = notebook.open("every.ipynb", kernel=False).page
        images = '.jp-Cell-outputArea img[src^="data:image/svg+xml"]'
        page.wait_for_function(f"() => document.querySelectorAll('{images}').length === {len(KINDS)}")
        assert min(page.locator(images).evaluate_all("all => all.map((e) => e.complete ? e.naturalWidth : 0)")) > 200
        assert all(page.locator(images).evaluate_all("all => all.map((e) => e.alt.length > 5)"))
        assert page.locator(READY).count() == 0
    finally:
        notebook.close()
        lab.close()


def test_nbconvert_keeps_every_picture(saved: tuple[harness.Lab, Path], chromium: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nbconvert", "--to", "html", str(saved[1]), "--output-dir", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    page = chromium.new_page(viewport=VIEWPORT)
    try:
        page.goto((tmp_path / "every.html").as_uri())
        shown(page)
    finally:
        page.close()
