"""Helpers for tests of training, and the exercises of the notebooks.

The assertions raise ``AssertionError`` that says what is wrong. They need no pytest, and fit into it::

    def test_ppo_still_learns(session, prompts):
        experiment = session.compare([hf.PPO()], prompts, steps=20, seeds=[0, 1, 2], baseline="ppo.json")
        hf.testing.assert_finite(experiment)
        hf.testing.assert_not_below("ppo.json", experiment)

``hf.testing.exercise("04.1", answer)`` looks at an answer to an exercise of a notebook and gives a hint where it is wrong.

``hf.testing.broken_run(1, session)`` is one of six runs in which something is wrong, to practise on (notebook 13).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hfsdk.core.checks import NonNegative, checked, shown
from hfsdk.core.errors import OptionError
from hfsdk.core.experiment import Experiment, read_baseline
from hfsdk.teach.broken_runs import broken_run
from hfsdk.teach.grading import Feedback, exercise

__all__ = ["Feedback", "assert_finite", "assert_invariants", "assert_not_below", "broken_run", "exercise"]


def assert_finite(what: Any) -> None:
    """Assert that no number is NaN or infinite.

    Args:
        what: a Run, an Experiment, a History, a Step, Metrics, a DataFrame, rows (dicts), or one dict of numbers.
    """
    for i, row in enumerate(_rows(what)):
        for name, value in row.items():
            if isinstance(value, float | np.floating) and not math.isfinite(value):
                raise AssertionError(f"{name} is {value} in row {i}: {_short(row)}")


@checked
def assert_invariants(metrics: Any, tolerance: NonNegative = 1e-4) -> None:
    """Assert the invariants of the first mini-batch of an actor's update: ratio 1, approximate KL 0, nothing clipped.

    Args:
        metrics: the metrics that ``actor.update`` returned, a Step, or the rows.
        tolerance: largest ``|ratio - 1|`` and approximate KL; about 0.05 in bf16, and with log-probs of the rollout.
    """
    from hfsdk.algorithms.invariants import invariants

    try:
        rows = [dict(row) for row in _rows(getattr(metrics, "actor", metrics))]
    except OptionError:
        raise
    except Exception as error:  # the user's own object
        raise OptionError(f"metrics must be an actor's update; got metrics={shown(metrics)}") from error
    if not rows or "ratio" not in rows[0]:
        raise OptionError(f"metrics must be an actor's update with a policy loss; got metrics={shown(metrics)}")
    broken = invariants(rows, tolerance)
    if broken:
        raise AssertionError("; ".join(broken))


@checked
def assert_not_below(baseline: str | Path, result: Experiment) -> None:
    """Assert that no algorithm's final score is below the baseline's by more than the spread (see ``hfsdk.core.experiment``).

    Args:
        baseline: a file that ``Experiment.save_baseline`` wrote.
        result: the result of ``session.compare``.

    Raises:
        OptionError: the file is no baseline of these algorithms and steps.
    """
    judged = replace(result, baseline=read_baseline(baseline, result.steps, result.algorithms))
    lacking = [j.algorithm for j in judged.verdict if j.verdict == "no baseline"]
    if lacking:
        raise OptionError(f"the baseline {baseline} has no {', '.join(lacking)}; write it again with these algorithms")
    failed = [j for j in judged.verdict if j.verdict == "fail"]
    if failed:
        words = [f"{j.algorithm}: final score {j.score:.4f}, baseline {j.baseline:.4f}, at least {j.least:.4f}" for j in failed]
        raise AssertionError("below the baseline: " + "; ".join(words))


def _rows(what: Any) -> Sequence[Mapping[str, Any]]:
    """Return the numbers of whatever has some, as rows.

    Raises:
        OptionError: it has none, or raises itself when it is looked at.
    """
    try:
        rows = _rows_in(what)
    except Exception:  # the user's own object, whatever it raises
        rows = None
    if rows is None:
        raise OptionError(f"numbers are in a Run, Experiment, History, Step, Metrics, DataFrame or dicts; got {shown(what)}")
    return rows


def _rows_in(what: Any) -> list[Mapping[str, Any]] | None:
    if isinstance(what, Mapping):
        return [what]
    rows: Any = getattr(what, "rows", what)
    halves: list[Any] = [getattr(what, name, None) for name in ("critic", "actor")]
    halves = [half for half in halves if hasattr(half, "rows")]
    if halves:
        rows = [row for half in halves for row in half.rows]
    elif type(what).__module__.partition(".")[0] == "pandas" and hasattr(what, "columns"):
        rows = what.to_dict("records")
    checked: list[Mapping[str, Any]] = []
    for row in rows if isinstance(rows, Iterable) and getattr(rows, "shape", None) != () else [rows]:
        if not isinstance(row, Mapping):
            return None
        checked.append(row)
    return checked


def _short(row: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name}={value!r}" for name, value in row.items())
    return text if len(text) < 300 else text[:299] + "…"
