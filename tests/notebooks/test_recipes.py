"""Every recipe of docs/recipes.md runs as it stands, in an empty folder, on roles of its own.

Two things are put in their place for time: ``tiny`` for the larger model of the chat recipe, and four steps for twenty.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from expect import each

import hfsdk as hf
from hfsdk.assets import model_folder

ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"^## (.+)\n((?:(?!^## ).*\n)*)", re.M)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
RECIPES = {
    f"{title} ({number})": code
    for title, text in SECTION.findall((ROOT / "docs" / "recipes.md").read_text())
    for number, code in enumerate(BLOCK.findall(text), start=1)
}
ALONE = "from vllm import"
"""Runs in a process of its own, as its page says."""

SHORTER = {"smollm2-135m-instruct": "tiny", "steps=20": "steps=4"}

WITHOUT_GPU = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture(scope="module")
def session(ray_here):
    with hf.Session(devices=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the recipes find: a model and questions, and what the recipes before them have written."""
    made = tmp_path_factory.mktemp("recipes")
    shutil.copytree(model_folder("tiny"), made / "my-model")
    sums = [(a, b) for a in range(1, 9) for b in range(1, 9)]
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": a + b}) for a, b in sums]
    (made / "questions.jsonl").write_text("\n".join(lines) + "\n")
    return made


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_recipe_runs(name, session, folder, monkeypatch):
    code = RECIPES[name]
    monkeypatch.chdir(folder)
    if "math_verify" in code:
        pytest.importorskip("math_verify")
    if ALONE in code:
        run_alone(code, folder)
        return
    found = {"__name__": "__main__", "hf": hf, "session": session}
    try:
        for long, short in SHORTER.items():
            code = code.replace(long, short)
        exec(compile(code, name, "exec"), found)
    finally:
        for role in session.roles:
            role.release()
    check = next((check for start, check in CHECKS.items() if name.startswith(start)), None)
    if check is not None:
        check(found, folder)


def run_alone(code, folder):
    """Run vLLM's recipe as a script; what it writes is what transformers writes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (folder / "alone.py").write_text(code)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "alone.py"], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path, **WITHOUT_GPU},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    tokenizer, model = AutoTokenizer.from_pretrained("exported"), AutoModelForCausalLM.from_pretrained("exported")
    prompt = tokenizer("12+7=", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=3, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() in done.stdout


def own_data(found, folder):
    assert (folder / "my-model-trained" / "model.safetensors").exists()
    assert found["right"](["  7", "8"], [7, 9]) == [1.0, 0.0]


def chat(found, folder):
    assert found["right"](["It is \\boxed{0.5}.", "3"], ["$\\frac{1}{2}$", "$2$"]) == [1.0, 0.0]


def evaluated(found, folder):
    assert [int(frame.policy_version.iloc[0]) for frame in (found["before"], found["after"])] == [0, 4]
    assert float(found["after"].score_mean.iloc[0]) > float(found["before"].score_mean.iloc[0]) - 0.05, "it unlearned"


def preferred(found, folder):
    assert len(found["run"].history) == 8


def judged(found, folder):
    assert len(found["scores"]) == 200


def continued(found, folder):
    steps = found["session"].history.to_pandas()
    assert list(steps[steps.kind == "step"].step) == [0, 1, 2, 3, 4, 5]


def compared(found, folder):
    assert found["experiment"].ok, "the same seeds give the same scores"


def tracked(found, folder):
    assert (folder / "mlflow.db").exists()
    assert list((folder / "wandb").glob("offline-run-*"))
    assert list((folder / "runs" / "first").iterdir())


CHECKS = {
    "Own data": own_data, "Chat": chat, "Evaluate": evaluated, "SFT": preferred, "A reward model": judged, "Continue": continued,
    "Two algorithms": compared, "Weights": tracked,
}  # fmt: skip


@each("name", RECIPES)
def test_a_recipe_is_under_fifteen_lines(name):
    assert len([line for line in RECIPES[name].splitlines() if line.strip()]) < 15


def test_every_check_has_its_recipe():
    assert [start for start in CHECKS if not any(name.startswith(start) for name in RECIPES)] == []
