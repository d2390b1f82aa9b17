"""A kernel killed in the middle of training, in JupyterLab: its pictures say what goes on, and the next kernel attaches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.viz import attach_in_lab as program
from tests.viz import harness
from tests.viz.harness import python

pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
pytest.importorskip("ray")
pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH"),
    pytest.mark.timeout(400),
]

CELLS = [program.BEGIN, program.TRACE, program.ATTACH, program.LIST, program.WATCH, program.CLOSE]


@pytest.fixture
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.Notebook]:
    root = tmp_path_factory.mktemp("attach")
    with program.kept_state(root / "state") as state:
        path = harness.write_notebook(root / "attach.ipynb", CELLS)
        with harness.open_alone(path, 1300, 1600, state=state) as opened:
            yield opened


def test_the_next_kernel_goes_on_with_the_run_of_the_killed_one(notebook: harness.Notebook) -> None:
    page = notebook.page
    notebook.run(0, 1)
    program.wait_steps(notebook, 2)
    notebook.kill_kernel()
    assert page.locator(".hf-lost").count() == 2, "the dashboard and the live trace"
    for words in page.locator(".hf-lost").all_inner_texts():
        assert 'the session "lab" goes on without it' in words
        assert 'hf.Session.attach("lab")' in words
    assert page.locator(".hf-lost.hf-bad").count() == 0, "nothing is lost"
    assert page.locator("[data-action]").count() == 0
    at_death = state_of(page, 0)
    assert at_death.endswith(" steps when the kernel ended")
    notebook.accept_restart()
    notebook.run(2, 3, 4)
    notebook.wait()
    listed = page.locator(".hf-sessions tbody tr").all_inner_texts()
    assert len(listed) == 1
    assert "actor, reference, reward" in listed[0]
    kinds = "{row['kind'] for _ in range(20) if not __import__('time').sleep(0.05) for row in session.history}"
    assert python(notebook, kinds) == "{'step'}", "an update of the step under way is none by hand"
    at = int(python(notebook, "len(run.rows)"))
    assert at >= int(at_death.split()[0])
    program.wait_steps(notebook, at + 2, -1)
    assert state_of(page, 0) == at_death
    page.locator('[data-action="pause"]').click()
    page.wait_for_selector('.hf-dashboard .hf-state:text-matches(", paused")')
    assert python(notebook, "run.paused, run.state") == "(True, 'paused')"
    assert page.locator("[data-action]").all_inner_texts() == ["resume", "step", "stop"]
    notebook.run(5)
    notebook.wait()
    page.wait_for_selector('.hf-dashboard .hf-state:text-matches(", stopped")')
    assert page.locator(".hf-sessions").last.inner_text() == "no kept sessions"
    assert notebook.complaints() == []
    assert notebook.outside == []


def state_of(page: Any, index: int) -> str:
    words: str = page.locator(".hf-dashboard .hf-state").nth(index).inner_text()
    return words
