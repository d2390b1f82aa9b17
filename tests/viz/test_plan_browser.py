"""What-if in JupyterLab with a kernel that plans while a slider is dragged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.viz import harness
from tests.viz.harness import KERNEL, python

pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH"),
]

CELLS = [
    """
import threading

from tests.viz import demo_plans

asked, may_answer = [], threading.Event()
may_answer.set()


def answer(cluster, workload, placement, layouts):
    asked.append(workload.response_tokens)
    assert may_answer.wait(180)
    return demo_plans.answer(cluster, workload, placement, layouts)


what_if = demo_plans.what_if(answer=answer)
""",
    "what_if",
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.Lab]:
    lab = harness.Lab(tmp_path_factory.mktemp("notebooks"))
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def live(lab: harness.Lab, chromium: Any) -> Iterator[harness.Notebook]:
    path = harness.write_notebook(lab.root / "what_if.ipynb", CELLS)
    notebook = harness.Notebook(lab, chromium.new_page(viewport={"width": 1300, "height": 1500})).open(path.name)
    try:
        notebook.run_all()
        notebook.wait()
        notebook.page.wait_for_selector(".hf-live .hf-what-if")
        yield notebook
    finally:
        notebook.close()


def drag(page: Any, name: str, to: float) -> None:
    """Move a slider to a value, as a hand would: an input event."""
    index = page.evaluate(
        """([name, to]) => { const input = document.querySelector(`.hf-live input[name=${name}]`);
            for (let i = 0; i <= Number(input.max); i++) {
                input.value = i;
                input.dispatchEvent(new Event('input', {bubbles: true}));
                if (document.querySelector(`.hf-live output[data-of=${name}]`).textContent.replace(/[^0-9]/g, '') === String(to))
                    return i; }
            return -1; }""",
        [name, to],
    )
    assert index >= 0, f"{name} has no stop {to}"


def drawn(page: Any) -> None:
    page.wait_for_function(
        "() => { const d = document.querySelector('.hf-live .hf-what-if').dataset; return d.sent && d.sent === d.drawn; }"
    )


def copy_is_up_to_date(page: Any) -> None:
    """Wait until the frozen picture that a saved notebook would keep says what the live one says."""
    page.wait_for_function(
        """() => {
            const said = (css) => document.querySelector(`[data-hf-live] ${css} output[data-of=prompts]`)?.textContent;
            return said('.hf-live') && said('.hf-picture:not(.hf-live)') === said('.hf-live');
        }"""
    )


def title(page: Any) -> str:
    return str(page.locator(".hf-live .hf-title").inner_text())


def test_a_drag_is_planned_anew_and_the_newest_value_wins(live: harness.Notebook) -> None:
    page = live.page
    assert "41.30 s a step" in title(page)
    python(live, "asked.clear() or may_answer.clear()")
    drag(page, "response_tokens", 4096)  # over all the stops before it, while the first is planned
    python(live, "may_answer.set()")
    page.wait_for_function("() => document.querySelector('.hf-live .hf-title').textContent.includes('224.0 s')")
    drawn(page)
    assert python(live, "what_if.question.response_tokens, what_if.plan.best.preset") == "(4096, 'split')"
    assert json.loads(python(live, "asked")).index(4096) == 1, "what came while one was planned was dropped"
    assert page.locator(".hf-live .hf-plan-pool").count() == 2
    assert "planned in" in page.locator(".hf-live .hf-status").inner_text()
    page.wait_for_function("() => document.querySelectorAll('.hf-live .hf-curve').length === 2")
    assert "from here: split" in page.locator(".hf-live .hf-turn-name").first.text_content()


def test_a_place_where_nothing_fits_is_told_and_the_plan_stays(live: harness.Notebook) -> None:
    page = live.page
    page.locator(".hf-live input[name=devices]").fill("0")
    page.wait_for_function("() => document.querySelector('.hf-live .hf-what-if-error').textContent.includes('do not fit')")
    assert page.locator(".hf-live .hf-plan-call").count() == 8
    drag(page, "devices", 128)
    page.wait_for_function("() => document.querySelector('.hf-live .hf-what-if-error').hidden")


def test_menus_fix_the_placement(live: harness.Notebook) -> None:
    page = live.page
    page.locator(".hf-live select[name=placement]").select_option("standalone")
    page.wait_for_function("() => document.querySelectorAll('.hf-live .hf-plan-pool').length === 4")
    assert python(live, "what_if.question.placement") == "'standalone'"
    page.locator(".hf-live select[name=placement]").select_option("auto")
    page.wait_for_function("() => document.querySelectorAll('.hf-live .hf-plan-pool').length === 2")


def test_python_moves_the_sliders(live: harness.Notebook) -> None:
    page = live.page
    python(live, "what_if.set(prompts=512, devices=64) and None")
    page.wait_for_function("() => document.querySelector('.hf-live output[data-of=prompts]').textContent === '512'")
    assert page.locator(".hf-live output[data-of=devices]").inner_text() == "64"
    assert page.locator(".hf-live .hf-what-if").count() == 1, "one picture, in the place of the frozen one"


def test_arrow_keys_move_a_slider(live: harness.Notebook) -> None:
    page = live.page
    slider = page.locator(".hf-live input[name=prompts]")
    slider.focus()
    slider.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('.hf-live output[data-of=prompts]').textContent.startsWith('1')")
    drawn(page)
    assert python(live, "what_if.question.prompts") == "1024"
    copy_is_up_to_date(page)  # the output was replaced, and the picture moved into the new one
    assert page.evaluate("document.activeElement.name") == "prompts", "the focus stays on the slider"


def test_saved_it_is_frozen_with_the_last_plan(live: harness.Notebook, lab: harness.Lab, chromium: Any, tmp_path: Path) -> None:
    drawn(live.page)
    copy_is_up_to_date(live.page)
    live.save()
    assert live.complaints() == []
    assert live.outside == []
    path = lab.root / "what_if.ipynb"
    (output,) = [o for cell in json.loads(path.read_text())["cells"] for o in cell["outputs"]]
    assert set(output["data"]) == {"text/plain", "text/html"}, "no widget-view: it could not be opened again"
    shutil.copy(path, lab.root / "copy.ipynb")
    viewport = {"width": 1300, "height": 1500}
    reopened = harness.Notebook(lab, chromium.new_page(viewport=viewport)).open("copy.ipynb", kernel=False)
    try:
        page = reopened.page
        page.wait_for_selector("[data-ready]")
        assert page.locator(".hf-live").count() == 0
        assert page.locator("output[data-of=prompts]").inner_text() == "1 024"
        assert page.locator("output[data-of=devices]").inner_text() == "64"
        assert all(page.locator("input[type=range]").evaluate_all("all => all.map((e) => e.disabled)"))
        assert reopened.complaints() == []
        assert reopened.outside == []
    finally:
        reopened.close()
    command = [sys.executable, "-m", "nbconvert", "--to", "html", str(path), "--output-dir", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    page = chromium.new_page()
    try:
        page.goto((tmp_path / "what_if.html").as_uri())
        page.wait_for_selector("[data-ready] .hf-plan-call")
        assert "without a kernel" in page.locator(".hf-frozen-note").inner_text()
    finally:
        page.close()


def test_when_the_kernel_has_gone_it_says_so(live: harness.Notebook) -> None:
    page = live.page
    page.evaluate(f"() => {KERNEL}.restart().then(() => true)")
    page.wait_for_function(
        "() => [...document.querySelectorAll('input[type=range]')].filter((e) => e.offsetParent).every((e) => e.disabled)",
    )
    assert "kernel" in page.locator(".hf-lost:visible, .hf-frozen-note:visible").first.inner_text()
    assert page.locator(".hf-plan-call:visible").count() == 8, "the last plan stays"
