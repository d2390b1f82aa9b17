"""Every notebook runs from its first cell to its last, and is committed with outputs that need no kernel.

Where a notebook trains for several steps, the test takes two: whether every cell works does not hang on more. The committed outputs
are those of all steps (``scripts/run_notebooks.py``).
"""

import re
from contextlib import ExitStack
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
QUICK = ("01",)
"""Run by `make test` too."""

TRAIN = ("01", "05", "06", "07")
"""Notebooks with training loops of many steps."""
FEW_STEPS = 2

START = """
import ray
from hfsdk.engine.ray import ray_start
if not ray.is_initialized():
    ray_start.start(8)
"""


class Kernel:
    """One kernel and one Ray for all notebooks; each forgets the names of the one before.

    A notebook that fails takes its kernel, and what it left behind, with it.
    """

    def __init__(self):
        self._client = None
        self._running = ExitStack()

    def run(self, notebook, folder):
        """Run every cell in order, in ``folder``; raises what a cell raises."""
        if self._client is None:
            self._client = NotebookClient(notebook, timeout=300, kernel_name="python3")
            self._running.enter_context(self._client.setup_kernel())
        try:
            for code in (START, "%reset -f", f"%cd -q {folder}"):
                self._client.execute_cell(nbformat.v4.new_code_cell(code), 0)
            self._client.nb = notebook
            self._client.reset_execution_trackers()
            for index, cell in enumerate(notebook.cells):
                self._client.execute_cell(cell, index)
        except BaseException:
            self.end()
            raise

    def end(self):
        """End the kernel."""
        self._running.close()
        self._client = None


def case(path):
    return pytest.param(path, marks=[pytest.mark.slow] * (not path.name.startswith(QUICK)))


@pytest.fixture(scope="module")
def kernel():
    made = Kernel()
    yield made
    made.end()


@pytest.mark.parametrize("path", [case(path) for path in NOTEBOOKS], ids=lambda p: p.stem)
def test_notebook_runs(kernel, path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count = None
    if path.name.startswith(TRAIN):
        assert with_few_steps(notebook) > 0
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (tmp_path / "benchmarks").symlink_to(path.parents[1] / "benchmarks")  # as in the repository
    kernel.run(notebook, folder)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


def with_few_steps(notebook):
    """Let training loops end early; returns how many do."""
    found = 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source, count = re.subn(r'(\bsteps"?[=:] ?)\d+', rf"\g<1>{FEW_STEPS}", cell.source)
            found += count
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_outputs_stand_alone(path):
    notebook = nbformat.read(path, as_version=4)
    assert "widgets" not in notebook.metadata
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    bundles = [output.data for output in outputs if "data" in output]
    assert not [data for data in bundles if "application/vnd.jupyter.widget-view+json" in data]
    assert any("data:image/svg+xml" in data.get("text/html", "") for data in bundles), "pictures carry a static image"
