"""The benchmarks' scripts start, and what they share does what it says. The benchmarks themselves are run by `make bench`."""

import argparse
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


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
    folders = [str(FOLDER), str(FOLDER.parent / "scripts")]
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL, *folders], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) > 50


@pytest.mark.parametrize(
    "name",
    [
        "parity", "learning", "additions_task", "overhead", "long_run", "reshard", "snapshot", "saving", "calibrate", "trl_ppo",
        "validate_perf", "hybridflow_paper", "planner", "what_if", "under_fire", "recipe", "learning_rates", "remote_notebook",
        "vs_trl",
    ],
)  # fmt: skip
def test_help_says_what_it_is(name):
    done = subprocess.run([sys.executable, FOLDER / f"{name}.py", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--check" in done.stdout or name == "trl_ppo"
    if name != "trl_ppo":
        assert "Target" in done.stdout
        assert "--json" in done.stdout


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
