"""How the package is built and worded: short functions, one meaning a class name, algorithms that show their step, plain words."""

import ast
import importlib.util
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


@pytest.fixture(scope="module")
def house():
    spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_new_is_against_a_law():
    script = ROOT / "scripts" / "house.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout.partition("against a law:")[2]


def test_a_function_of_javascript_is_as_long_as_what_is_nested_in_it(house, tmp_path, monkeypatch):
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


def test_no_docstring_more_begins_as_a_fragment_and_no_story_name_more_is_bound(house):
    assert house.new_words() == []


def test_rooms_that_are_known_for_fragments_or_story_names_exist(house):
    rooms = {house.folder_of(module) for module, _ in house.modules()}
    assert set(house.KNOWN_WORDS) <= rooms


def test_a_fragment_is_found_at_a_module_a_class_a_function_and_below_a_field(house):
    text = '''"""What it is."""
class Row:
    """One row."""
    def read(self):
        """Of a row, its text."""
    size: int
    """In bytes."""
NOTE = "Of no docstring"
'''
    assert house.fragments(text) == [(1, "What"), (5, "Of"), (7, "In")]


def test_a_story_name_is_found_where_it_is_bound_and_fields_are_free(house):
    text = """class Row:
    held: int
    def read(self, told, *, asked=None, **given):
        self._kept = [one for one in told]
        self.known = known = self.held
"""
    assert house.story_names(text) == [(3, "asked"), (3, "given"), (3, "told"), (4, "_kept"), (4, "one"), (5, "known")]


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
