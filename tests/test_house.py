"""How the package is built: functions fit on a screen or two, a class name means one thing, algorithms show their step."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALGORITHMS = {
    path.stem: path
    for path in sorted((ROOT / "hfsdk" / "algorithms").glob("*.py"))
    if "    def step(self, models" in path.read_text()
}
FIRST_SCREEN, LONGEST = 64, 150


def test_nothing_new_is_against_a_law():
    script = ROOT / "scripts" / "house.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout.partition("against a law:")[2]


def test_the_algorithms_are_those_with_a_step():
    with_steps = "dapo distillation dpo gdpo grpo ppo reinforce_pp remax rloo safe_rlhf"
    assert sorted(ALGORITHMS) == with_steps.split()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_shows_its_step_on_the_first_screen(name):
    text = ALGORITHMS[name].read_text(encoding="utf-8")
    (step,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == "step"]
    assert step.end_lineno <= FIRST_SCREEN, f"step ends at line {step.end_lineno}: its options stand below it"
    assert text.count("\n") <= LONGEST


NAMED = re.compile(r"``(\w+\.py)``")
OTHERS_FILES = {"default_worker.py", "megatron_policy_worker.py", "modeling_rope_utils.py", "ppo_trainer.py", "setup_worker.py",
                "theoretical_memory_usage.py", "torch_norm.py"}  # fmt: skip
"""Of Ray, NeMo-RL, transformers, verl, Megatron and DeepSpeed."""


def test_a_text_that_names_a_file_names_one_that_is_there():
    files = {path.name for room in ("hfsdk", "scripts", "tests", "benchmarks") for path in (ROOT / room).rglob("*.py")}
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "hfsdk").rglob("*.py")}
    named = {
        (path.relative_to(ROOT).as_posix(), name) for path, text in texts.items() for name in re.findall(r"``(\w+\.py)``", text)
    }
    assert len(named) > 20
    assert sorted((path, name) for path, name in named if name not in files | OTHERS_FILES) == []
