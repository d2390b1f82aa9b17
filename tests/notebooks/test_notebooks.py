"""Every notebook runs from its first cell to its last, and is committed with outputs that need no kernel.

Where a notebook trains for several steps, with several seeds or on thousands of pairs, the test takes one or two, one, and a
hundred: whether every cell works does not hang on more. The committed outputs are those of all
(``scripts/run_notebooks.py``). A cell with the tag ``stored`` checks what the text says of them (seconds, and what many steps
of training reach); it stops the script, and is left out here.
"""

import inspect
import re
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from expect import each
from nbclient import NotebookClient

import hfsdk as hf
from hfsdk.teach.exercise_kinds import Code, Loss, StepCode
from hfsdk.teach.exercises import EXERCISES

WITHOUT_ENGINES = "10"
"""Needs none, and is run where there is none, by ``tests/test_without_engines.py``."""

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
JOINS = ("12",)
"""Notebooks that join a Ray which runs already, and so start in a kernel that has none."""

SHORTER = {
    "01": {r"steps=10\b": "steps=2"},
    "02": {r"learn\(prepare\([035]\)\).*\n": ""},  # steps that warm up what is measured
    "05": {r"steps=3, seeds=\[0, 1\]": "steps=1, seeds=[0]"},
    "06": {'"steps": 8': '"steps": 1', r"steps=3, seeds=\[0, 1\]": "steps=1, seeds=[0]"},
    "07": {
        r"range\(8\)": "range(2)", r"steps=1[04]\b": "steps=2",
        r"preferences\(3600\b": "preferences(200", r"preferences\(600\b": "preferences(100",
        r"len\(margins\) > 200": "len(margins) > 20",
    },
    "12": {r"\b40\b": "15"},
}  # fmt: skip
"""By number: what of a notebook's cells is replaced by what for time; each of it has to be there."""

START = """
import ray
from hfsdk.engine.ray import start
if not ray.is_initialized():
    start.start(8)
"""


class Kernel:
    """One kernel and one Ray for all notebooks; each forgets the names of the one before.

    A notebook that fails takes its kernel, and what it left behind, with it.
    """

    def __init__(self, start=START):
        self._start = start
        self._client = None
        self._running = ExitStack()

    def run(self, notebook, folder):
        """Run every cell in order, in ``folder``; raises what a cell raises."""
        if self._client is None:
            self._client = NotebookClient(notebook, timeout=300, kernel_name="python3")
            self._running.enter_context(self._client.setup_kernel())
        try:
            for code in (self._start, "%reset -f", f"%cd -q {folder}"):
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


@pytest.fixture(scope="module")
def kernel():
    made = Kernel()
    yield made
    made.end()


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if not path.name.startswith(WITHOUT_ENGINES)], ids=lambda p: p.stem)
def test_a_notebook_runs(kernel, path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "stored" not in cell.metadata.get("tags", [])]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count = None
    shorten(notebook, SHORTER.get(path.name[:2], {}))
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (tmp_path / "benchmarks").symlink_to(path.parents[1] / "benchmarks")  # as in the repository
    if path.name.startswith(JOINS):
        own = Kernel(start="")
        own.run(notebook, folder)
        own.end()
    else:
        kernel.run(notebook, folder)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


def shorten(notebook, shorter):
    """Let training loops end early, and the like."""
    for long, short in shorter.items():
        found = 0
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.source, count = re.subn(long, short, cell.source)
                found += count
        assert found, f"there is no {long} any more"


@each("path", NOTEBOOKS)
def test_committed_outputs_stand_alone(path):
    notebook = nbformat.read(path, as_version=4)
    assert "widgets" not in notebook.metadata
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    bundles = [output.data for output in outputs if "data" in output]
    assert not [data for data in bundles if "application/vnd.jupyter.widget-view+json" in data]
    assert any("data:image/svg+xml" in data.get("text/html", "") for data in bundles), "pictures carry a static image"


@each("path", NOTEBOOKS)
def test_notebook_opens_with_its_number_a_question_what_it_needs_and_minutes(path):
    title, _, question, needs, minutes, *_ = nbformat.read(path, as_version=4).cells[0].source.split("\n")
    assert title.startswith(f"# {int(path.name[:2])}. ")
    assert question.startswith("- **Question:** ")
    assert question.endswith("?")
    assert needs.startswith("- **You need:** ")
    assert "](" in needs, "it links to what is needed"
    assert re.fullmatch(r"- \*\*Time:\*\* about \d+ minutes; its cells run in .+\.", minutes)


def test_the_step_that_notebook_0_prints_is_that_of_now():
    cells = nbformat.read(NOTEBOOKS[0], as_version=4).cells
    printed = [output.text for cell in cells for output in cell.get("outputs", []) if "text" in output]
    assert inspect.getsource(hf.PPO.step).strip() in "\n".join(printed)


def test_notebooks_are_numbered_without_a_gap():
    assert [int(path.name[:2]) for path in NOTEBOOKS] == list(range(len(NOTEBOOKS)))


@each("path", NOTEBOOKS)
def test_links_lead_somewhere(path):
    texts = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", "\n".join(texts))
    for file, place in links:
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), file
        if place:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert place in slugs, f"{file}#{place}"


@each("path", NOTEBOOKS)
def test_guesses_are_left_to_the_reader_and_come_before_the_answer(path):
    cells = nbformat.read(path, as_version=4).cells
    for before, cell in pairwise(cells):
        guesses = [line for line in cell.source.split("\n") if re.match(r"(guess|my_\w+) = ", line)]
        if cell.cell_type == "code" and guesses:
            assert before.cell_type == "markdown"
            assert "uess" in before.source
            for line in guesses:
                values = re.findall(r'(?:=|":) (\.\.\.|\{|[^,}\s]+)', line)
                assert set(values) <= {"...", "{"}, line


@each("path", NOTEBOOKS)
def test_the_last_cells_check_what_the_text_says(path):
    cells = nbformat.read(path, as_version=4).cells
    last = cells[-2:] if "stored" in cells[-1].metadata.get("tags", []) else cells[-1:]
    for cell in last:
        assert re.search(r"^assert ", cell.source, re.M)
        assert cell.execution_count, "it was run with the outputs that are stored"
    assert not any("stored" in cell.metadata.get("tags", []) for cell in cells[:-1])


@each("path", NOTEBOOKS)
def test_every_notebook_has_three_exercises_and_one_changes_code(path):
    of_notebook = [number for number in EXERCISES if number[:2] == path.name[:2]]
    assert len(of_notebook) >= 3
    assert any(isinstance(EXERCISES[number], Code | Loss | StepCode) for number in of_notebook)
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if "hf.testing.exercise(" in cell.source]
    asked = re.findall(r'hf\.testing\.exercise\("(\d\d\.\d)", (\w+|\.\.\.)\)', "\n".join(cell.source for cell in cells))
    assert [number for number, _ in asked] == of_notebook
    for cell in cells:
        assert "open: " in "".join(output["data"]["text/plain"] for output in cell.outputs), "the answer is left to the reader"
