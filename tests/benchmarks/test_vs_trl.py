"""vs_trl.py measures what it says and judges it by its targets. Neither TRL nor a session is needed here."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from expect import refuses

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = ("common", "trl_environment", "vs_trl")


@pytest.fixture
def vs_trl(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("vs_trl", FOLDER / "vs_trl.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "vs_trl", module)
    spec.loader.exec_module(module)
    yield module
    for name in MODULES:
        sys.modules.pop(name, None)


def side(module, seconds, peak_bytes):
    return module.Side(steps=[{"seconds": s, "cpu": 2 * s} for s in seconds], peak_bytes=peak_bytes)


def figures(module, runs):
    report = module.Report("vs_trl", "")
    module.judge(report, {case: {"hfsdk": side(module, *a), "TRL": side(module, *b)} for case, (a, b) in runs.items()})
    return {figure.name: figure for figure in report.figures}


def test_each_target_is_that_of_its_case(vs_trl):
    cases = {case.name: case for case in vs_trl.CASES}
    assert len(cases) == 8
    measured = {
        cases["ppo-fp32-full"]: (([8.0, 9.0, 12.0], 5), ([10.0], 5)),
        cases["ppo-bf16-full"]: (([6.0], 6), ([7.0], 5)),
        cases["ppo-fp32-lora"]: (([8.1], 5), ([10.0], 5)),
        cases["ppo-bf16-lora"]: (([5.0], 5), ([7.0], 5)),
    }
    found = figures(vs_trl, measured)
    missed = {name for name, figure in found.items() if figure.missed}
    assert found["ppo-fp32-full, hfsdk / TRL"].value == pytest.approx(0.9)
    assert found["ppo-bf16-full, hfsdk / TRL's fp32"].value == pytest.approx(0.6)
    assert found["ppo-bf16-lora, hfsdk / TRL's fp32"].value == pytest.approx(0.5)
    assert found["ppo-bf16-full, hfsdk / TRL"].target == ""
    assert missed == {
        "ppo-bf16-full, hfsdk / TRL's fp32", "ppo-bf16-full, memory, hfsdk / TRL", "ppo-fp32-lora, hfsdk / TRL",
    }  # fmt: skip


def test_bf16_alone_is_not_judged_by_times_that_were_not_taken(vs_trl):
    case = next(case for case in vs_trl.CASES if case.name == "grpo-bf16-full")
    found = figures(vs_trl, {case: (([9.0], 1), ([1.0], 1))})
    assert not any(figure.missed for figure in found.values())


def test_cases_are_chosen_by_parts_of_their_names(vs_trl, capsys):
    def names(*words):
        return [case.name for case in vs_trl.chosen(vs_trl.parse(["--only", *words]).only)]

    assert names("ppo-lora") == ["ppo-fp32-lora", "ppo-bf16-lora"]
    assert names("grpo-fp32-full", "ppo-bf16-lora") == ["ppo-bf16-lora", "grpo-fp32-full"]
    assert len(vs_trl.chosen([])) == 8
    with pytest.raises(SystemExit):
        vs_trl.parse(["--only", "dpo"])
    assert "got dpo" in capsys.readouterr().err


CHILD = """
import json, sys
for seconds, tokens in {replies}:
    step = dict(seconds=seconds, cpu=1, tokens=tokens, updates=2)
    print("noise"), print("reply", json.dumps(step), flush=True)
sys.exit({code})
"""


def run_child(module, replies, code=0):
    found, work = module.Side(), module.Work(rows=2, new_tokens=3)
    command = [sys.executable, "-c", CHILD.format(replies=replies, code=code)]
    module.measure(command, dict(os.environ), len(replies) - 2, found, work)
    return found


def test_neither_the_first_step_nor_the_one_whose_memory_is_watched_counts(vs_trl):
    found = run_child(vs_trl, [(9.0, 6), (1.0, 6), (3.0, 6), (9.0, 6)])
    assert [step["seconds"] for step in found.steps] == [1.0, 3.0]
    assert found.seconds() == 2.0


def test_other_work_and_failures_are_no_measurement(vs_trl):
    with refuses(RuntimeError, "5 response tokens", "2 optimizer steps"):
        run_child(vs_trl, [(1.0, 6), (1.0, 6), (1.0, 5)])
    with refuses(RuntimeError, "failed"):
        run_child(vs_trl, [(1.0, 6), (1.0, 6), (1.0, 6)], code=3)


def test_the_environment_of_trl_is_asked_what_it_lacks(vs_trl):
    from trl_environment import missing, package_folders

    assert missing(sys.executable, ("packaging", "jinja2")) == []
    assert missing(sys.executable, ("jinja2", "no-such-package-of-hfsdk")) == ["no-such-package-of-hfsdk"]
    assert any((Path(folder) / "numpy").is_dir() for folder in package_folders())
