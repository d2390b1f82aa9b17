"""Runs a notebook in JupyterLab and takes a picture of it: ``python scripts/screenshot_notebook.py NAME OUT.png [HEIGHT]``."""

import sys
import tempfile
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "viz"))

import harness  # noqa: E402 - the browser tests' own


def main(name: str, out: str, height: int = 5200) -> None:
    """Copy the notebook without its outputs, run all cells, wait, take the picture."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, Path(folder) / name)
        lab = harness.Lab(Path(folder))
        try:
            with harness.browser() as context:
                page = context.new_page()
                page.set_viewport_size({"width": 1180, "height": height})
                opened = harness.Notebook(lab, page).open(name)
                page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
                opened.run_all()
                opened.wait(400)
                page.wait_for_timeout(2000)
                page.screenshot(path=out)
                opened.close()
        finally:
            lab.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
