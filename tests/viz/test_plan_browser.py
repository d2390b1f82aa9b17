"""Plans in a real browser: frozen pages, and what-if in JupyterLab with a kernel that plans while a slider is dragged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hfsdk.viz.drawn import picture_of
from tests.viz import demo_plans, harness
from tests.viz.harness import KERNEL, python

pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH"),
]

CELLS = [
    "import hfsdk as hf\nfrom tests.viz import demo_plans\nwhat_if = demo_plans.what_if()",
    "what_if",
    "answers = []\nanswer = what_if._answer\ndef slowly(*asked):\n    import time\n    time.sleep(0.12)\n"
    "    answers.append(asked[1].response_tokens)\n    return answer(*asked)\nwhat_if._answer = slowly",
]


class Frozen:
    """A picture saved as a page and opened without a kernel."""

    def __init__(self, chromium: Any, file: Path, subject: Any, **options: Any) -> None:
        self.console: list[str] = []
        self.outside: list[str] = []
        picture_of(subject).save(file)
        self.page = chromium.new_page(viewport={"width": 1180, "height": 1000}, **options)
        harness.watch(self.page, self.console, self.outside)
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("[data-ready]")

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self.page.close()
        if kind is None:
            assert self.console == []
            assert self.outside == []


def tip(page: Any) -> str:
    found = page.locator(".hf-tip:not([hidden])")
    return str(found.inner_text()) if found.count() else ""


# ---------------------------------------------------------------- a plan


def test_the_drawn_numbers_are_the_plans(chromium: Any, tmp_path: Path) -> None:
    plan = demo_plans.plan()
    with Frozen(chromium, tmp_path / "plan.html", plan) as page:
        calls = page.locator(".hf-plan-call")
        assert calls.evaluate_all("all => all.map((e) => e.dataset.call)") == [c.name for c in plan.calls]
        assert calls.evaluate_all("all => all.map((e) => Number(e.dataset.seconds))") == [c.seconds for c in plan.calls]
        assert page.locator(".hf-pool-devices rect").count() == 128
        assert float(page.locator(".hf-plan-memory").get_attribute("data-bytes")) == plan.memory[0].asked
        assert page.locator(".hf-plan-row").count() == 3
        assert "41.30 s" in page.locator(".hf-plan-row").first.inner_text()
        spoken = page.locator(".hf-plan-step svg").get_attribute("aria-label")
        assert spoken.startswith("The step as predicted: actor.generate 14.00 s")
        assert "Too close to call" in page.locator(".hf-plan-close").inner_text()
        assert page.locator(".hf-plan-sensitivity li").count() == 1
        fills = page.locator(".hf-plan-call > rect:nth-child(2)").evaluate_all("all => all.map((e) => e.getAttribute('fill'))")
        assert all(fill.startswith("url(#") for fill in fills), "predicted is hatched"
        widths = calls.locator("rect:nth-child(1)").evaluate_all("all => all.map((e) => Number(e.getAttribute('width')))")
        assert widths[0] / widths[7] == pytest.approx(plan.calls[0].seconds / plan.calls[7].seconds, rel=0.01)


def test_hover_tells_of_calls_pools_and_memory(chromium: Any, tmp_path: Path) -> None:
    with Frozen(chromium, tmp_path / "plan.html", demo_plans.plan()) as page:
        page.locator('.hf-plan-call[data-call="actor.generate"]').hover()
        assert "actor.generate (predicted)" in tip(page)
        assert "decode\n12.00 s" in tip(page).replace("\t", "\n")
        page.locator(".hf-pool-devices rect").nth(70).hover()
        assert "128: 0-127" in tip(page)
        page.locator(".hf-plan-memory rect").nth(1).hover()
        assert "actor, all the time" in tip(page)
        page.locator(".hf-plan-bar").nth(1).hover()
        assert "50.40 s to 62.72 s" in tip(page)


def test_a_click_shows_the_blocks_and_the_step_of_a_runner_up(chromium: Any, tmp_path: Path) -> None:
    with Frozen(chromium, tmp_path / "plan.html", demo_plans.plan()) as page:
        page.locator(".hf-plan-row").nth(1).click()
        pools = page.locator(".hf-plan-pool").evaluate_all("all => all.map((e) => e.dataset.pool)")
        assert pools == ["actor+reference", "critic+reward"]
        assert page.locator(".hf-pool-devices").evaluate_all("all => all.map((e) => e.dataset.devices)") == ["64", "64"]
        generate = page.locator('.hf-plan-call[data-call="actor.generate"]')
        assert float(generate.get_attribute("data-seconds")) == 28.0
        assert page.locator(".hf-plan-row[aria-current=true]").get_attribute("data-row") == "1"
        page.get_by_role("button", name="show plan 3").press("Enter")
        assert page.locator(".hf-plan-pool").count() == 4
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "show plan 3", "the focus stays"


def test_the_keyboard_chooses_plans_and_walks_over_marks(chromium: Any, tmp_path: Path) -> None:
    with Frozen(chromium, tmp_path / "plan.html", demo_plans.plan()) as page:
        page.locator(".hf-host").focus()
        page.keyboard.press("ArrowDown")
        assert page.locator(".hf-plan-row[aria-current=true]").get_attribute("data-row") == "1"
        assert "split" in page.locator(".hf-say").text_content()
        page.keyboard.press("ArrowUp")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        assert "actor.generate" in tip(page)
        assert "actor.generate" in page.locator(".hf-say").text_content()
        page.keyboard.press("Escape")
        assert tip(page) == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_can_be_read(chromium: Any, tmp_path: Path, scheme: str) -> None:
    for subject in (demo_plans.plan(), demo_plans.what_if()):
        with Frozen(chromium, tmp_path / "plan.html", subject, color_scheme=scheme) as page:
            channels = "(c) => c.match(/[0-9.]+/g).slice(0, 3).map(Number)"
            paper, ink = (page.evaluate(f"({channels})(getComputedStyle(document.querySelector('.hf')).{of})")
                          for of in ("backgroundColor", "color"))  # fmt: skip
            assert (sum(paper) > sum(ink)) == (scheme == "light")
            assert abs(sum(paper) - sum(ink)) > 300


def test_it_fits_a_narrow_cell(chromium: Any, tmp_path: Path) -> None:
    with Frozen(chromium, tmp_path / "plan.html", demo_plans.plan()) as page:
        page.set_viewport_size({"width": 640, "height": 900})
        page.wait_for_function("() => document.querySelector('.hf-plan-step svg').getBoundingClientRect().width < 640")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 640


# ---------------------------------------------------------------- what if, frozen


def test_frozen_the_plan_stays_and_the_sliders_say_why_they_rest(chromium: Any, tmp_path: Path) -> None:
    what_if = demo_plans.what_if().draw("response_tokens")
    with Frozen(chromium, tmp_path / "what_if.html", what_if) as page:
        sliders = page.locator("input[type=range]")
        assert sliders.count() == 5
        assert all(sliders.evaluate_all("all => all.map((e) => e.disabled)"))
        assert all(page.locator("select").evaluate_all("all => all.map((e) => e.disabled)"))
        assert "without a kernel" in page.locator(".hf-frozen-note").inner_text()
        assert page.locator(".hf-plan-call").count() == 8
        assert page.locator(".hf-curve").count() == 2
        assert "from here: split" in page.locator(".hf-turn-name").first.text_content()
        page.locator(".hf-curve").first.hover()
        assert "a step takes" in tip(page)
        page.locator(".hf-plan-row").nth(2).click()
        assert page.locator(".hf-plan-pool").count() == 4, "what needs no kernel works"


# ---------------------------------------------------------------- what if, live


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


def title(page: Any) -> str:
    return str(page.locator(".hf-live .hf-title").inner_text())


@pytest.mark.slow
def test_a_drag_is_planned_anew_and_the_newest_value_wins(live: harness.Notebook) -> None:
    page = live.page
    assert "41.30 s a step" in title(page)
    drag(page, "response_tokens", 4096)  # over all the stops before it, without waiting
    page.wait_for_function("() => document.querySelector('.hf-live .hf-title').textContent.includes('224.0 s')", timeout=10_000)
    drawn(page)
    assert python(live, "what_if.question.response_tokens, what_if.plan.best.preset") == "(4096, 'split')"
    asked = json.loads(python(live, "answers"))
    assert asked.index(4096) <= 2, "what came while one was planned was dropped"
    assert page.locator(".hf-live .hf-plan-pool").count() == 2
    assert "planned in" in page.locator(".hf-live .hf-status").inner_text()
    page.wait_for_function("() => document.querySelectorAll('.hf-live .hf-curve').length === 2", timeout=15_000)
    assert "from here: split" in page.locator(".hf-live .hf-turn-name").first.text_content()


@pytest.mark.slow
def test_a_place_where_nothing_fits_is_told_and_the_plan_stays(live: harness.Notebook) -> None:
    page = live.page
    page.locator(".hf-live input[name=devices]").fill("0")
    page.wait_for_function("() => document.querySelector('.hf-live .hf-what-if-error').textContent.includes('do not fit')")
    assert page.locator(".hf-live .hf-plan-call").count() == 8
    drag(page, "devices", 128)
    page.wait_for_function("() => document.querySelector('.hf-live .hf-what-if-error').hidden")


@pytest.mark.slow
def test_menus_fix_the_placement(live: harness.Notebook) -> None:
    page = live.page
    page.locator(".hf-live select[name=placement]").select_option("standalone")
    page.wait_for_function("() => document.querySelectorAll('.hf-live .hf-plan-pool').length === 4")
    assert python(live, "what_if.question.placement") == "'standalone'"
    page.locator(".hf-live select[name=placement]").select_option("auto")
    page.wait_for_function("() => document.querySelectorAll('.hf-live .hf-plan-pool').length === 2")


@pytest.mark.slow
def test_python_moves_the_sliders(live: harness.Notebook) -> None:
    page = live.page
    python(live, "what_if.set(prompts=512, devices=64) and None")
    page.wait_for_function("() => document.querySelector('.hf-live output[data-of=prompts]').textContent === '512'")
    assert page.locator(".hf-live output[data-of=devices]").inner_text() == "64"
    assert page.locator(".hf-live .hf-what-if").count() == 1, "one picture, in the place of the frozen one"


@pytest.mark.slow
def test_arrow_keys_move_a_slider(live: harness.Notebook) -> None:
    page = live.page
    slider = page.locator(".hf-live input[name=prompts]")
    slider.focus()
    slider.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('.hf-live output[data-of=prompts]').textContent.startsWith('1')")
    drawn(page)
    assert python(live, "what_if.question.prompts") == "1024"
    page.wait_for_timeout(1500)  # the saved copy is brought up to date, and the picture moves into it
    assert page.evaluate("document.activeElement.name") == "prompts", "the focus stays on the slider"


@pytest.mark.slow
def test_saved_it_is_frozen_with_the_last_plan(live: harness.Notebook, lab: harness.Lab, chromium: Any, tmp_path: Path) -> None:
    drawn(live.page)
    live.page.wait_for_timeout(1500)
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


@pytest.mark.slow
def test_when_the_kernel_has_gone_it_says_so(live: harness.Notebook) -> None:
    page = live.page
    page.evaluate(f"() => {KERNEL}.restart().then(() => true)")
    page.wait_for_function(
        "() => [...document.querySelectorAll('input[type=range]')].filter((e) => e.offsetParent).every((e) => e.disabled)",
        timeout=30_000,
    )
    assert "kernel" in page.locator(".hf-lost:visible, .hf-frozen-note:visible").first.inner_text()
    assert page.locator(".hf-plan-call:visible").count() == 8, "the last plan stays"
