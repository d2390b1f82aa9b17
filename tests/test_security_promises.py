"""SECURITY.md promises nothing that no test holds: each row names tests, and each of them exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from expect import each

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (?P<promise>[^|]+) \| (?P<tests>[^|]+) \|$", re.MULTILINE)


def promises() -> list[tuple[str, list[str]]]:
    found = ROW.finditer((ROOT / "SECURITY.md").read_text())
    rows = [(row["promise"], re.findall(r"`(tests/[^`]+)`", row["tests"])) for row in found]
    return [row for row in rows if row[0] != "promise"]


@cache
def functions_of(file: str) -> set[str]:
    path = ROOT / file
    body = ast.parse(path.read_text()).body if path.is_file() else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_there_are_promises():
    assert len(promises()) >= 15


@each("promise, tests", promises())
def test_each_promise_names_tests_that_exist(promise, tests):
    assert tests, promise
    for test in tests:
        file, _, name = test.partition("::")
        assert name.startswith("test_"), test
        assert name in functions_of(file), f"{test} is named in SECURITY.md and does not exist"


def test_the_readme_leads_there():
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text()
