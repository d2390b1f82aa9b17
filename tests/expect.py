"""What tests share: a refusal that names its values, a table's rows in one test, and waiting without a clock of one's own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time

import pytest

from hfsdk.core.checks import shown
from hfsdk.session.parts import parts_of

CEILING_S = 300.0
"""Longest wait for what should be there at once: nothing is slow enough to need it, whatever else the machine does."""
LOOK_AGAIN_S = 0.02


@contextlib.contextmanager
def refuses(error, *named):
    """Expect an error of this class whose text names each of these values.

    The wording of a class is pinned once, in ``test_error_texts.py``; elsewhere what was asked, what exists and what to do are
    values: ``with refuses(LayoutError, "tp=2", 9, "SmolLM2-135M"): ...``. Yields pytest's ``ExceptionInfo``.
    """
    with pytest.raises(error) as caught:
        yield caught
    text = str(caught.value)
    missing = [str(value) for value in named if str(value) not in text]
    assert not missing, f"{type(caught.value).__name__} does not name {missing}: {text}"


def each(names, table):
    """Give a test every row of a table, as ``pytest.mark.parametrize`` does, in one case: for rows that take milliseconds.

    All rows are tried, and one failure names each row that failed. They share the fixtures of the case: what a row changes there,
    the next one sees.
    """
    names, table = (names.replace(",", " ").split() if isinstance(names, str) else [*names]), [*table]

    def in_one_case(test):
        @functools.wraps(test)
        def run(*instance, **fixtures):
            failed = {}
            for number, row in enumerate(table):
                values = (row,) if len(names) == 1 else row
                try:
                    test(*instance, **fixtures, **dict(zip(names, values, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    failed[f"row {number}, {', '.join(map(_named, values))}"] = error
            told = "".join(f"\n{row}:\n    {type(error).__name__}: {error}" for row, error in failed.items())
            assert table, "the table is empty"
            if failed:
                raise AssertionError(f"{len(failed)} of {len(table)} rows failed{told}") from next(iter(failed.values()))

        parameters = inspect.signature(test).parameters
        assert set(names) <= set(parameters), f"{test.__name__} does not take {names}"
        rest = [parameter for name, parameter in parameters.items() if name not in names]
        run.__signature__ = inspect.Signature(rest)
        return run

    return in_one_case


def _named(value):
    """How a row's value is named: a function by its line too."""
    code = getattr(value, "__code__", None) if inspect.isfunction(value) else None
    return f"{value.__qualname__} of line {code.co_firstlineno}" if code else shown(value)


def until(what, wanted, session=None):
    """Wait until ``wanted()`` is true and return it; ``what`` says in a failure what did not come.

    With a session it is asked again at each event of the session (a call starts, progresses, ends; a role loads), else a few
    times a second: processes, files and other sessions tell nobody.
    """
    happened, end = threading.Event(), time.monotonic() + CEILING_S
    unsubscribe = parts_of(session).client.subscribe(lambda event: happened.set()) if session is not None else lambda: None
    try:
        while not (answer := wanted()):
            if time.monotonic() > end:
                raise AssertionError(f"waited {CEILING_S:g} s in vain for {what}")
            happened.wait(LOOK_AGAIN_S if session is None else 1.0)
            happened.clear()
        return answer
    finally:
        unsubscribe()
