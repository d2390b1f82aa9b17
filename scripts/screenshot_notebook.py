"""Runs a notebook in JupyterLab and takes a picture: ``python scripts/screenshot_notebook.py NAME OUT.png [HEIGHT] [--dark]``."""

import sys
import tempfile
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "viz"))

import harness  # noqa: E402 - the browser tests' own


def main(name: str, out: str, height: int = 5200, *, dark: bool = False) -> None:
    """Copy the notebook without its outputs, run all cells, wait, take the picture."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, Path(folder) / name)
        with harness.open_alone(Path(folder) / name, 1180, height, dark) as opened:
            opened.run_all()
            opened.wait(400)
            opened.page.wait_for_timeout(2000)
            opened.page.screenshot(path=out)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--dark"]
    main(words[0], words[1], *map(int, words[2:]), dark="--dark" in sys.argv)
