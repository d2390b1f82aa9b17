"""Executes the notebooks and writes their outputs back, as they are committed: ``python scripts/run_notebooks.py [NAME ...]``."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"


def settle(cell: nbformat.NotebookNode) -> None:
    """Keep of a cell's printed output what a terminal would show in the end: a progress bar is one line.

    What Ray says of a worker that ended is left out: it names machines.
    """
    streams = [o for o in cell.outputs if o.output_type == "stream"]
    if streams:
        text = "".join(o.text for o in streams)
        lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n") if "(raylet)" not in line]
        streams[0].text = "\n".join(lines).strip("\n") + "\n"
        cell.outputs = [o for o in cell.outputs if o.output_type != "stream" or o is streams[0]]


def run(path: Path) -> None:
    """Execute one notebook and save it with outputs that need no kernel."""
    notebook = nbformat.read(path, as_version=4)
    beside = {"metadata": {"path": str(path.resolve().parent)}}  # where a reader runs it
    NotebookClient(notebook, timeout=600, kernel_name="python3", store_widget_state=False, resources=beside).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            settle(cell)
    notebook.metadata.pop("widgets", None)
    text = nbformat.writes(notebook).replace(f"{ROOT}/", "")  # tracebacks name files of this checkout
    path.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB\n")


if __name__ == "__main__":
    for notebook_path in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        run(notebook_path)
