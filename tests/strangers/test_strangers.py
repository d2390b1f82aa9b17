"""Every case of the table, one by one; see ``frame.py``."""

from __future__ import annotations

import importlib
import warnings
from contextlib import ExitStack
from pathlib import Path

import pytest
from expect import refuses

from tests.strangers.frame import Bench, Refused

MODULES = sorted(path.stem for path in Path(__file__).parent.glob("*_cases.py"))
TABLE = [case for name in MODULES for case in importlib.import_module(f"tests.strangers.{name}").CASES]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.what)
def test_what_a_stranger_brings(case, tmp_path):
    with ExitStack() as stack, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        bench = Bench(tmp_path, stack)
        if isinstance(case.right, Refused):
            with refuses(case.right.error, *case.right.named):
                case.bring(bench)
        else:
            found = case.bring(bench)
            right = case.right(bench) if callable(case.right) else case.right
            assert found == right, f"{case.source}: right by {case.because}"
    notices = [str(warning.message) for warning in told if "AdamW: learning rate" not in str(warning.message)]
    assert all(any(part in notice for notice in notices) for part in case.notices), f"not told: {case.notices} in {notices}"
    others = [notice for notice in notices if not any(part in notice for part in case.notices)]
    assert not others, f"told beside: {others}"


def test_each_case_has_a_name_of_its_own_a_source_and_a_reason():
    assert len({case.what for case in TABLE}) == len(TABLE)
    assert not [case.what for case in TABLE if not (case.source and case.because)]
