"""The map of tiers: every file is in one, every entry names something, quarantined tests are nightly, no test of a change waits."""

import ast
import re
from pathlib import Path

import tiers

TESTS = Path(__file__).parent
FILES = sorted(path.relative_to(TESTS.parent).as_posix() for path in TESTS.rglob("test_*.py"))
MAY_LOOK_AT_CLOCKS = {"expect.py", "conftest.py"}
"""Where waiting is written once."""
CLOCKS = {"sleep", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time"}


def functions_of(file):
    tree = ast.parse((TESTS.parent / file).read_text(encoding="utf-8"))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_entry_of_the_map_names_something_there_is():
    missing = []
    for entry in (*tiers.TIERS.by_prefix, *tiers.TIERS.slice):
        file, _, test = entry.partition("::")
        name = test.partition("[")[0].rpartition("::")[2]
        if not (TESTS.parent / file).exists() or (name and name not in functions_of(file)):
            missing.append(entry)
    assert not missing


def test_the_slice_is_of_engine_and_system():
    others = {"laws", "unit", "nightly"}
    assert not [entry for entry in tiers.TIERS.slice if tiers.TIERS.tier_of(entry) in others]


def test_the_longest_beginning_counts_and_ends_where_a_name_ends():
    tests = {"tests/": "unit", "tests/engine/": "engine", "tests/engine/test_a.py::test_b": "nightly"}
    found = tiers.Tiers(tests, ("tests/engine/test_a.py::test_c",))
    assert found.tier_of("tests/test_x.py::test_y") == "unit"
    assert found.tier_of("tests/engine/test_a.py::test_bc") == "engine"
    assert found.tier_of("tests/engine/test_a.py::test_b[1]") == "nightly"
    assert found.may_hold("tests/engine/test_a.py", "nightly")
    assert found.may_hold("tests/engine/test_a.py", "test")
    assert not found.may_hold("tests/engine/test_ab.py", "nightly")
    assert found.ids_of("check")("tests/engine/test_a.py::test_c[2]")
    assert not found.ids_of("check")("tests/engine/test_a.py::test_b")


def test_a_test_in_quarantine_is_nightly():
    table = (TESTS / "QUARANTINE.md").read_text(encoding="utf-8")
    quarantined = re.findall(r"^\| \d{4}-\d\d-\d\d \| `([^`]+)`", table, re.MULTILINE)
    assert not [test for test in quarantined if tiers.TIERS.tier_of(test) != "nightly"]


def test_what_has_passed_is_left_out_of_a_run_that_goes_on(tmp_path):
    file = tmp_path / "results.jsonl"
    lines = ['{"test": "a", "outcome": "failed", "seconds": 1}', '{"test": "b", "outcome": "passed", "seconds": 1}']
    again = [
        '{"test": "a", "outcome": "passed", "seconds": 1}',
        '{"test": "c", "outcome": "failed", "seconds": 1}',
        '{"test": "d", "ou',
    ]
    file.write_text("\n".join(lines + again))
    assert tiers.passed_in(file) == {"a", "b"}


def test_no_test_of_a_change_sleeps_or_reads_a_clock():
    """They wait by ``expect.until``, or for an event: what a quiet machine does in time, a busy one does not."""
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        file = path.relative_to(TESTS.parent).as_posix()
        if path.name in MAY_LOOK_AT_CLOCKS or tiers.TIERS.tier_of(file) == "nightly" or path.parent.name == "data":
            continue
        nightly = [n for name, n in functions_of(file).items() if tiers.TIERS.tier_of(f"{file}::{name}") == "nightly"]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            clock = isinstance(node, ast.Attribute) and node.attr in CLOCKS and ast.unparse(node.value) == "time"
            if clock and not any(n.lineno <= node.lineno <= n.end_lineno for n in nightly):
                found.append(f"{file}:{node.lineno} time.{node.attr}")
    assert not found, "\n".join(found)
