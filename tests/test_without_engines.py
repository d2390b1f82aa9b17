"""An environment without the engines, really installed: ``requirements/base.lock`` and the packages of the notebook extra.

JupyterLab is left out of it: it shows notebooks, and runs nothing of them. Notebook 10 runs on this environment's kernel, driven by
the nbclient of the one that runs the tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest

Requirement = pytest.importorskip("packaging.requirements").Requirement

ROOT = Path(__file__).parents[1]
ENGINES = ("torch", "ray", "vllm", "megatron", "transformers", "tokenizers")
LEFT_OUT = "jupyterlab"
WITH_JUPYTERLAB = ("jinja2",)
"""What comes with it and tables of pandas with colours need."""
NO_INDEX = (
    "No matching distribution",
    "Could not find a version",
    "ConnectionError",
    "Max retries",
    "NewConnectionError",
    "timed out",
)
"""What pip says where it reaches no index."""


def notebook_pins() -> list[str]:
    """The notebook extra and what it needs, each as it is installed here, which is as ``requirements/cpu.lock`` pins it."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]["notebook"]
    base = set(re.findall(r"^([\w-]+)==", (ROOT / "requirements" / "base.lock").read_text(encoding="utf-8"), re.MULTILINE))
    todo, found = [*WITH_JUPYTERLAB, *(name for one in extra if (name := Requirement(one).name) != LEFT_OUT)], {}
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name not in found and name not in base:
            found[name] = version(name)
            needs = [Requirement(one) for one in requires(name) or ()]
            todo += [one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [f"{name}=={number}" for name, number in sorted(found.items())]


def pip(python: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode and any(words in done.stderr for words in NO_INDEX):
        pytest.skip(f"no package index is reachable: {done.stderr.strip().splitlines()[-1][:200]}")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of the environment; the repository is on its path."""
    folder = tmp_path_factory.mktemp("without_engines") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    made = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    pip(made, "--require-hashes", "-r", str(ROOT / "requirements" / "base.lock"))
    pip(made, *notebook_pins())
    (packages,) = folder.glob("**/site-packages")
    (packages / "repository.pth").write_text(f"{ROOT}\n", encoding="utf-8")
    return made


def run(python: Path, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HFSDK_"))}
    env |= {"HFSDK_HOME": str(folder / "home"), "PYTHONNOUSERSITE": "1", "MPLBACKEND": "agg"}
    command = [str(python), "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=False, timeout=300)


def test_it_has_no_engine(python: Path, tmp_path: Path) -> None:
    code = f"from importlib.util import find_spec; print([name for name in {ENGINES} if find_spec(name)])"
    assert run(python, code, tmp_path).stdout.strip() == "[]"


STEP = """
import hfsdk as hf
import pandas as pd
from hfsdk.algorithms import ppo

session = hf.Session.simulated("2x8 A100-80GB", price_per_device_hour=2.0)
actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-5))
session.critic("tiny"), session.reference(actor), session.reward(hf.data.exact_match)
session.place("colocate")
prompts = session.prompts(hf.data.additions(64), column="prompt", batch_size=32)
run = session.train(hf.PPO(max_new_tokens=16), prompts, steps=2)
assert len(run.history) == 2 and run.cost > 0
ask = hf.PPO(max_new_tokens=128), hf.Workload(prompts=512, prompt_tokens=64, response_tokens=128)
plan, what_if = session.plan(*ask), session.what_if(*ask)
what_if.set(devices=8).draw("devices")
by_length = what_if.sweep("response_tokens")
assert isinstance(by_length, pd.DataFrame) and len(by_length) > 3
session.snapshot("before")
session.fork("before", "again")
session.save("saved")
own = session.batch(
    prompt=[[65, 66]], response=[[67, 68, 69]], old_log_probs=[[-1.0, -2.0, -0.5]], new_log_probs=[[-1.1, -1.5, -0.5]],
    ref_log_probs=[[-1.0, -2.0, -0.4]], values=[[0.1, 0.2, 0.3]], rewards=[[0.0, 0.0, 1.0]], advantages=[[0.9, 0.8, 0.7]],
    returns=[[1.0, 1.0, 1.0]], scores=[1.0],
)
spec = hf.ModelSpec.preset("llama-7b")
experiment = session.compare([hf.PPO(max_new_tokens=16), hf.GRPO(max_new_tokens=16)], prompts, steps=1, seeds=[0])
pictures = {
    "trace": session.trace[0], "placement": session.placement, "dataflow": session.dataflow, "memory": session.memory,
    "history": session.history, "run": run, "plan": plan, "what_if": what_if, "experiment": experiment,
    "comparison": session.trace[0].compare(session.trace[1]), "reshard": actor.reshard_plan, "last_reshard": actor.last_reshard,
    "grouping": hf.viz.grouping_picture(spec, "tp4 dp2", "tp2 dp4"), "timelines": hf.viz.timelines_picture({"a": session.trace[0]}),
    "parameter": hf.viz.parameter_picture(actor.reshard_plan, "model.layers.0.self_attn.qkv_proj.weight"),
    "tokens": hf.viz.tokens_picture(own, new="new_log_probs"), "credit": hf.viz.credit_picture(own),
    "clip": hf.viz.clip_picture(own),
}
"""

DRAW = """
from pathlib import Path
for name, shown in pictures.items():
    picture = hf.viz.picture(shown)
    for ending in ("svg", "png", "html", "txt"):
        picture.save(f"{name}.{ending}")
    assert Path(f"{name}.png").read_bytes().startswith(b"\\x89PNG") and "<svg" in Path(f"{name}.svg").read_text(encoding="utf-8")
    assert not set(hf.viz.widget(shown).keys) & {"children"}
session.report("report.html")
hf.viz.advantages_figure(own.inspect(0)).savefig("advantages.png")
print(len(pictures))
"""

ASSETS = """
import hfsdk as hf
from hfsdk.assets import model_folder
print((model_folder("tiny") / "config.json").is_file(), len(hf.data.additions(10)))
for ask in (lambda: hf.data.movie_reviews("train"), lambda: hf.data.vader_sentiment(["good"]),
            lambda: model_folder("smollm2-135m-instruct"), lambda: hf.Session(devices=1)):
    try:
        ask()
    except hf.ModelNotFoundError as error:
        print("SAID", error)
print(hf.doctor().can_run, [found.name for found in hf.doctor().missing if found.topic in ("base", "notebook")])
"""


def test_a_step_a_plan_and_every_picture(python: Path, tmp_path: Path) -> None:
    done = run(python, STEP + DRAW, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["18"]


def test_what_is_not_there_says_how_to_get_it(python: Path, tmp_path: Path) -> None:
    done = run(python, ASSETS, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *said, last = done.stdout.splitlines()
    assert first == "True 10"
    assert len(said) == 4
    assert [line for line in said if not re.search(r"pip install|hfsdk\[cpu\]", line)] == []
    assert last == "False []"


def test_notebook_10_runs_on_its_kernel(python: Path, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class Specs(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=argv, display_name="without engines", language="python", env={"PYTHONPATH": ""})

    class Manager(AsyncKernelManager):
        def __init__(self, **options: Any) -> None:
            super().__init__(kernel_spec_manager=Specs(), **options)

    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "notebooks").mkdir()
    (path,) = (ROOT / "notebooks").glob("10_*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path / "notebooks")}}
    nbclient.NotebookClient(
        notebook, kernel_name="without", kernel_manager_class=Manager, timeout=300, resources=where
    ).execute()  # which ends only a kernel whose manager it made itself
    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in ran)
    assert "statements" in json.dumps([cell.outputs for cell in ran])
