"""Every notebook runs from its first cell to its last, and is committed with outputs that need no kernel."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


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
