"""How the package is built: no function is longer than a screen or two, few entries, algorithms show their step."""

import ast
import importlib.util
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


def test_nothing_new_is_over_a_limit():
    script = ROOT / "scripts" / "house.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout.partition("over a limit:")[2]


def test_a_function_of_javascript_is_as_long_as_what_is_nested_in_it(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    monkeypatch.setattr(house, "PACKAGE", tmp_path)
    inner = ["  const inner = () => {", *["    call();"] * 147, "  };"]
    text = "\n".join(["export function outer(", "  a,", ") {", "  return a;", "}", "function long() {", *inner, "}", ""])
    (tmp_path / "a.js").write_text(text)
    assert house.long_js_functions() == {"js a.js long": 151}
    (tmp_path / "a.js").write_text(text.replace("    call();\n", "", 1))
    assert house.long_js_functions() == {}


def test_the_algorithms_are_those_with_a_step():
    with_steps = "dapo distillation dpo gdpo grpo ppo reinforce_pp remax rloo safe_rlhf"
    assert sorted(ALGORITHMS) == with_steps.split()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_shows_its_step_on_the_first_screen(name):
    text = ALGORITHMS[name].read_text(encoding="utf-8")
    (step,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == "step"]
    assert step.end_lineno <= FIRST_SCREEN, f"step ends at line {step.end_lineno}: its options stand below it"
    assert text.count("\n") <= LONGEST
