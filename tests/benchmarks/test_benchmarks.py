"""The benchmarks' scripts start, and what they share does what it says. The benchmarks themselves are run by `make bench`."""

import argparse
import ast
import importlib.util
import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from expect import each

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
ROOT = FOLDER.parent


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield {name: load(name) for name in ("common", "learning")}
    for name in set(sys.modules) - before:
        if name in ("common", "learning", "learning_task", "additions_task", "trl_environment"):
            del sys.modules[name]


IMPORT_ALL = """
import importlib, pathlib, sys
for folder in map(pathlib.Path, sys.argv[1:]):
    sys.path.insert(0, str(folder))
    for path in sorted(folder.rglob("*.py")):
        if not path.name.startswith("__"):
            importlib.import_module(".".join(path.relative_to(folder).with_suffix("").parts))
            print(path)
"""


def test_every_module_beside_the_package_can_be_imported():
    """A name that moves in the package is found missing here, not by a benchmark that nobody ran."""
    folders = [str(FOLDER), str(ROOT / "scripts")]
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL, *folders], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) > 50


def file_of(module, root):
    """Where a module lies, of those that lie here."""
    path = root.joinpath(*module.split("."))
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if found.is_file()), None)


@cache
def names_in(file):
    """What a module has, by its text; None where that cannot be told, as it makes its names when they are asked for."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(name.asname or name.name).split(".")[0] for name in node.names}
    return None if "__getattr__" in found else found


def missing_names(file, roots):
    """What a file imports of modules that lie under ``roots``, and they do not have."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            asked = [(name.name, None) for name in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            asked = [(node.module, name.name) for name in node.names]
        else:
            continue
        for module, name in asked:
            root = next((root for root in roots if file_of(module.split(".")[0], root)), None)
            if root is None or (name and file_of(f"{module}.{name}", root)):
                continue
            found = file_of(module, root)
            if found is None or (name and (names := names_in(found)) is not None and name not in names):
                yield f"{file.name}:{node.lineno} {module} {name or ''}".rstrip()


def test_every_name_that_benchmarks_and_scripts_import_exists():
    """By their texts, in a moment; whether they can be imported is a longer test's."""
    files = [*FOLDER.rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    roots = [ROOT, FOLDER, ROOT / "scripts"]
    assert [told for file in files for told in missing_names(file, roots)] == []


@each(
    "code, noticed",
    [
        ("from hfsdk.core.layout import Layout", False), ("from hfsdk.core import layout", False), ("from hfsdk import PPO", False),
        ("from hfsdk.core.layout import Lay", True), ("def f():\n    from hfsdk.core import lay", True),
        ("import hfsdk.nowhere", True), ("from common import TOOR", True), ("from common import ROOT", False),
        ("import nowhere", False),
    ],
)  # fmt: skip
def test_a_name_that_is_not_there_is_noticed(code, noticed, tmp_path):
    (tmp_path / "script.py").write_text(code)
    assert bool([*missing_names(tmp_path / "script.py", [ROOT, FOLDER])]) is noticed


SCRIPTS = (
    *("parity", "learning", "additions_task", "overhead", "long_run", "reshard", "snapshot", "saving", "calibrate", "trl_ppo"),
    *("validate_perf", "hybridflow_paper", "planner", "what_if", "under_fire", "recipe", "learning_rates", "remote_notebook"),
    "vs_trl",
)
HELP_OF_ALL = """
import hfsdk, json, os, pandas, runpy, sys
[getattr(hfsdk, name) for name in hfsdk.__all__]
folder, names = sys.argv[1], sys.argv[2:]
sys.path.insert(0, folder)
for name in names:
    sys.stdout.flush()
    if not (child := os.fork()):  # so that each starts without what the others have imported of the folder
        sys.argv[:] = [f"{folder}/{name}.py", "--help"]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            sys.stdout.flush()
            os._exit(ended.code or 0)
        os._exit(1)
    print(json.dumps({"script": name, "status": os.waitpid(child, 0)[1]}))
"""


def test_each_scripts_help_says_what_it_is():
    run = subprocess.run([sys.executable, "-c", HELP_OF_ALL, FOLDER, *SCRIPTS], capture_output=True, text=True, timeout=600)
    said, texts = "", {}
    for line in run.stdout.splitlines():
        if line.startswith('{"script"'):
            ended = json.loads(line)
            texts[ended["script"]], said = said if ended["status"] == 0 else f"status {ended['status']}", ""
        else:
            said += line + "\n"
    assert [*texts] == [*SCRIPTS], run.stderr
    wanted = {name: () if name == "trl_ppo" else ("--check", "Target", "--json") for name in SCRIPTS}
    lacking = {name: [word for word in wanted[name] if word not in text] for name, text in texts.items() if "usage" in text}
    assert not {name: words for name, words in lacking.items() if words}
    assert [*lacking] == [*SCRIPTS], run.stderr


def test_figures_know_whether_they_miss(modules):
    figure = modules["common"].Figure
    assert not figure(name="a", value=3.0, at_most=3.0).missed
    assert figure(name="a", value=3.1, at_most=3.0).missed
    assert figure(name="a", value=0.2, at_least=0.3).missed
    assert figure(name="a", value=math.nan, at_most=3.0).missed
    assert not figure(name="a", value=math.nan).missed
    assert figure(name="a", value=1, at_most=3.0, at_least=0.5).target == "<= 3 >= 0.5"


def test_report_prints_writes_and_checks(modules, tmp_path, capsys):
    report = modules["common"].Report("demo", "1 process", details={"history": [1, 2]})
    report.add("fast", 2.0, "s", at_most=3.0)
    report.add("small", 12.5, "GB", at_most=12.0)
    report.add("plain", 7)
    path = tmp_path / "out.json"
    arguments = argparse.Namespace(json=str(path), check=True)
    assert report.finish(arguments) == 1
    out = capsys.readouterr().out
    assert "small   12.5 GB   <= 12   missed" in out
    assert "missed: small is 12.5 GB (target <= 12)" in out
    kept = json.loads(path.read_text())
    assert kept["figures"][0] == {"name": "fast", "value": 2.0, "unit": "s", "at_most": 3.0, "at_least": None, "missed": False}
    assert kept["history"] == [1, 2]
    assert report.finish(argparse.Namespace(json=None, check=False)) == 0


def test_table_aligns_its_columns(modules):
    lines = modules["common"].table(("a", "bb"), [("ccc", "d"), ("e", "")]).splitlines()
    assert lines == ["a    bb", "---  --", "ccc  d", "e"]


def test_score_at_equal_kl_lies_between_the_judged_policies(modules):
    curve = [{"kl": 0.0, "score": 0.1}, {"kl": 4.0, "score": 0.5}, {"kl": 2.0, "score": 0.2}]
    score_at = modules["learning"].score_at
    assert score_at(curve, 1.0) == pytest.approx(0.15)
    assert score_at(curve, 3.0) == pytest.approx(0.35)
    assert score_at(curve, 9.0) == pytest.approx(0.5)


def test_prompts_are_whole_words(modules):
    task = load("learning_task")
    assert task.prompt_of("a film that is both very long and very dull") == "a film that is both very"
    assert task.prompt_of("too short") is None
    assert task.prompt_of("Incomprehensibilities-of-the-first-rank are rare") is None


def test_no_held_out_addition_is_trained_in_any_order(modules):
    task = load("additions_task")
    train, held_out = ([tuple(map(int, p.rstrip("=").split("+"))) for p in part["prompt"]] for part in task.split())
    assert len(set(held_out)) == len({frozenset(pair) for pair in held_out}) == task.NUM_HELD_OUT
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in held_out}
    assert len({*train, *held_out, *(pair[::-1] for pair in held_out)}) == (task.LARGEST + 1) ** 2
    assert all(int(answer) == sum(pair) for part, pairs in zip(task.split(), (train, held_out), strict=True)
               for answer, pair in zip(part["answer"], pairs, strict=True))  # fmt: skip


def test_what_the_recipe_measures_neither_trains_nor_chooses(modules):
    parts = [{frozenset(p.rstrip("=").split("+")) for p in part["prompt"]} for part in load("recipe").sets()]
    assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2]
    assert [len(part) for part in parts] == [215, 100, 150]
    sys.modules.pop("recipe", None)


def test_the_order_of_strategies_is_judged_but_for_ties(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    calibrate = load("calibrate")

    def rows(*pairs):
        return [{"strategy": name, "measured_s": m, "predicted_s": p} for name, m, p in pairs]

    assert calibrate.misordered(rows(("a", 1.0, 1.5), ("b", 2.0, 1.6), ("c", 3.0, 9.0))) == []
    assert calibrate.misordered(rows(("a", 1.0, 1.5), ("b", 2.0, 1.4), ("c", 3.0, 9.0))) == ["a and b"]
    assert calibrate.misordered(rows(("a", 1.0, 1.5), ("b", 1.05, 1.4))) == []  # a tie: within 10 %
    for name in ("calibrate", "strategies", "common"):
        sys.modules.pop(name, None)
