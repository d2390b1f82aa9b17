"""Training in JupyterLab with a real kernel: the dashboard is live, its buttons work, it stays when the kernel is gone."""

from __future__ import annotations

import json
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

SESSION = """
import time, warnings, hfsdk as hf
warnings.filterwarnings("ignore", "paused after step")
session = hf.Session.simulated("1x4 H200", price_per_device_hour=2.0)
actor = session.actor("tiny"); critic = session.critic("tiny"); reference = session.reference(actor)
reward = session.reward(lambda prompts, completions, **columns: [0.0] * len(prompts))
prompts = session.prompts(["a", "b", "c", "d"], batch_size=2)
def slowly(row): time.sleep(0.25)  # steps on a virtual clock take no time
"""
BLOCKING = """
run = session.train(hf.PPO(), prompts, steps=1000, stop=slowly)
assert (run.state, run.paused) == ("paused", True), run
"""
BACKGROUND = """
work = session.train(hf.PPO(), prompts, steps=1000, stop=slowly, wait=False)
assert work.running
"""
PICTURES = [
    "session.trace", "session.placement", "session.memory",
    "hf.viz.timelines_picture({'a': session.trace[0], 'b': session.trace[1]})", "session.trace[0].compare(session.trace[1])", "run",
]  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.Lab]:
    lab = harness.Lab(tmp_path_factory.mktemp("notebooks"))
    yield lab
    lab.close()


def opened(lab: harness.Lab, chromium: Any, name: str, kernel: bool = True) -> harness.Notebook:
    page = chromium.new_page(viewport={"width": 1300, "height": 1600})
    return harness.Notebook(lab, page).open(name, kernel=kernel)


def state(page: Any, index: int = 0) -> Any:
    return page.locator(".hf-dashboard .hf-state").nth(index)


def wait_state(page: Any, words: str, index: int = 0) -> None:
    found = "document.querySelectorAll('.hf-dashboard .hf-state')[index]?.textContent || ''"
    page.wait_for_function(f"([words, index]) => new RegExp(words).test({found})", arg=[words, index])


@pytest.fixture(scope="module")
def saved(lab: harness.Lab, chromium: Any) -> Path:
    """A notebook that trained blocking and in the background, steered by its buttons, and was saved."""
    path = harness.write_notebook(lab.root / "train.ipynb", [SESSION, BLOCKING, *PICTURES, BACKGROUND])
    notebook = opened(lab, chromium, path.name)
    try:
        page = notebook.page
        notebook.run_all()
        wait_state(page, "^[2-9] of 1000 steps, running")
        assert page.locator(".hf-picture").count() == 0, "a live widget, not the frozen form"
        assert page.locator(".jp-InputPrompt").nth(1).inner_text() == "[*]:", "the cell blocks"
        points = page.locator('[data-curve="tokens_per_s"] circle[data-step]')
        before = points.count()
        wait_state(page, f"^{before + 2} of 1000")
        assert points.count() >= before + 1, "steps appear while the cell blocks"
        assert page.locator("[data-action]").all_inner_texts() == ["pause", "stop"]
        page.locator('[data-action="pause"]').click()
        page.wait_for_selector('.hf-dashboard .hf-state:text-matches(", paused")')
        wait_state(page, "^[0-9]+ of 1000 steps, running$", 2)  # the background run: the blocking one and its picture stand above
        steer(notebook)
        notebook.wait()
        page.wait_for_function("() => document.querySelectorAll('[data-ready]').length === 8")
        assert page.locator("[data-action]").count() == 0, "frozen"
        assert notebook.complaints() == []
        assert notebook.outside == []
        notebook.save()
    finally:
        notebook.close()
    return path


def steer(notebook: harness.Notebook) -> None:
    """Press every button of the background run."""
    page = notebook.page
    press = lambda action: page.locator(f'[data-action="{action}"]').click()  # noqa: E731
    press("pause")
    wait_state(page, "paused$", 2)
    assert python(notebook, "work.state") == "'paused'"
    at = int(python(notebook, "len(work.rows)"))
    assert page.locator("[data-action]").all_inner_texts() == ["resume", "step", "stop"]
    press("step")
    wait_state(page, f"^{at + 1} of 1000 steps, paused$", 2)
    assert python(notebook, "len(work.rows), work.state") == f"({at + 1}, 'paused')"
    press("resume")
    wait_state(page, f"^{at + 3} of 1000 steps, running$", 2)
    press("stop")
    wait_state(page, "stopped$", 2)
    assert python(notebook, "work.state, work.running") == "('stopped', False)"
    assert python(notebook, "session.train(hf.PPO(), prompts, steps=1, progress=False).state") == "'finished'"


def test_the_saved_notebook_has_frozen_pictures_only(saved: Path) -> None:
    outputs = [o for cell in json.loads(saved.read_text())["cells"] for o in cell["outputs"]]
    assert len(outputs) == 8
    for output in outputs:
        assert set(output["data"]) == {"text/plain", "text/html"}, "no widget-view: it could not be opened again"
        assert len("".join(output["data"]["text/html"])) < 200_000
    words = ["".join(o["data"]["text/plain"]) for o in outputs]
    assert "paused" in words[0].splitlines()[0]
    assert "stopped" in words[-1].splitlines()[0]


def test_reopened_without_a_kernel_it_can_be_looked_at(saved: Path, lab: harness.Lab, chromium: Any) -> None:
    notebook = opened(lab, chromium, saved.name, kernel=False)
    try:
        page = notebook.page
        page.wait_for_function("() => document.querySelectorAll('[data-ready]').length === 8")
        assert "paused" in state(page).inner_text()
        bars = page.locator(".hf-dashboard .hf-calls-bar rect[data-call]")
        assert bars.count() == page.locator(".hf-dashboard .hf-calls-bar .hf-predicted").count() > 8, "simulated is hatched"
        panel = page.locator(".hf-dashboard").first.locator('[data-curve="tokens_per_s"]')
        panel.locator('circle[data-step="0"]').click()
        assert page.locator(".hf-step .hf-title").first.inner_text().startswith("step 0, ")
        assert page.locator(".hf-comparison .hf-row").count() == page.locator(".hf-comparison .hf-error-text").count() == 10
        page.locator(".hf-memory .hf-predicted").first.hover()
        assert "in all" in page.locator(".hf-memory .hf-tip").inner_text()
        page.locator(".hf-placement .hf-shard").first.hover()
        assert "actor on device 0" in page.locator(".hf-placement .hf-tip").inner_text()
        assert notebook.complaints() == []
        assert notebook.outside == []
    finally:
        notebook.close()


def test_nbconvert_with_its_own_settings_shows_the_pictures(saved: Path, chromium: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nbconvert", "--to", "html", str(saved), "--output-dir", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    page = chromium.new_page(viewport={"width": 1240, "height": 1000})
    errors: list[str] = []
    page.on("pageerror", lambda e: errors.append(str(e)))
    try:
        page.goto(f"file://{tmp_path}/train.html", wait_until="domcontentloaded")
        page.wait_for_function("() => document.querySelectorAll('[data-ready]').length === 8")
        assert page.locator(".hf-dashboard").count() == 3
        assert page.locator(".hf-span").count() > 20
    finally:
        page.close()
    assert [e for e in errors if "require" not in e.lower() and "mathjax" not in e.lower()] == []


STOPPED = """
try:
    session.train(hf.PPO(), prompts, steps=1000, stop=lambda row: time.sleep(3))
except KeyboardInterrupt:
    print("interrupted")
"""
AFTER = "time.sleep(1.5); print('not', 'interrupted')"


def test_the_stop_button_of_a_blocking_cell_stops_that_cell_alone(lab: harness.Lab, chromium: Any) -> None:
    path = harness.write_notebook(lab.root / "stop.ipynb", [SESSION, STOPPED, AFTER])
    notebook = opened(lab, chromium, path.name)
    try:
        page = notebook.page
        notebook.run_all()
        wait_state(page, "^1 of 1000 steps, running$|^0 of 1000 steps, running$")
        page.locator('[data-action="stop"]').click()
        wait_state(page, "stopped$|paused$")
        notebook.wait()
        assert "not interrupted" in page.locator(".jp-Cell-outputArea").last.inner_text()
        assert python(notebook, "session.run.running, session.run.state in ('stopped', 'paused')") == "(False, True)"
        assert notebook.complaints() == []
    finally:
        notebook.close()


def test_a_kernel_restarted_under_a_live_picture_is_told(lab: harness.Lab, chromium: Any) -> None:
    path = harness.write_notebook(lab.root / "restart.ipynb", [SESSION, BACKGROUND])
    notebook = opened(lab, chromium, path.name)
    try:
        page = notebook.page
        notebook.run_all()
        notebook.wait()
        wait_state(page, "^[2-9] of 1000 steps, running")
        page.evaluate(f"() => {KERNEL}.restart()")
        page.wait_for_selector(".hf-dashboard .hf-lost")
        words = page.locator(".hf-lost").inner_text()
        assert "the session, its models and what they learned are gone" in words
        assert 'session.train(..., save_every=10, folder="runs/1")' in words, "this run kept no save"
        assert 'resume="runs/1"' in words
        wait_state(page, "^[0-9]+ of 1000 steps, unfinished$")
        assert page.locator("[data-action]").count() == 0, "there is nothing to steer any more"
        assert page.locator(".hf-curve").count() > 2, "what was there can still be looked at"
        page.locator('[data-curve="tokens_per_s"] circle[data-step="0"]').click()
        assert page.locator(".hf-step .hf-title").inner_text().startswith("step 0, ")
        assert notebook.complaints() == []
        page.wait_for_function(f"() => {KERNEL}.status === 'idle'")
        assert python(notebook, "1 + 1") == "2"
        notebook.run_all()
        notebook.wait()
        wait_state(page, "^[2-9] of 1000 steps, running")
        assert page.locator(".hf-lost").count() == 0
    finally:
        notebook.close()
