"""``Experiment``: algorithms run from one point with several seeds, and whether they are as good as they were.

A run's *final score* is the mean score of the last quarter of its steps. Against a baseline an algorithm passes when its final
score, averaged over seeds, is not below the baseline's by more than twice the standard error of the difference::

    score >= baseline - 2 * sqrt(s_now^2 / n_now + s_then^2 / n_then)          s: standard deviation over the n seeds

With one seed there is no spread to allow for: any lower score fails.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfsdk.core.checks import Title, checked, shown
from hfsdk.core.errors import OptionError
from hfsdk.core.field_texts import documented
from hfsdk.core.files import export
from hfsdk.core.rows import Row
from hfsdk.core.text import printable
from hfsdk.core.untrusted import parse_json, read_named

if TYPE_CHECKING:
    import pandas as pd


FORMAT = 1
MOST_BYTES = 16_000_000
"""Largest baseline file that is read."""
MEASURED = ("score", "kl", "length", "seconds", "tokens")
"""Numbers of every step: mean score, mean KL per sequence (nats), mean response length (tokens), seconds, tokens made."""

LAST_SHARE = 4
"""The last one in so many steps makes the final score."""

ROUNDING = 1e-6
"""Scores are float32 means: less than this is no difference."""


@dataclass(frozen=True)
class Judgement:
    """One algorithm against the baseline."""

    algorithm: str
    score: float
    """The algorithm's final score, mean over the seeds."""
    spread: float
    """Standard deviation over the seeds; 0 for one."""
    baseline: float | None = None
    """The baseline's final score; ``None`` where it has no such algorithm."""
    least: float | None = None
    """The lowest score that passes."""

    @property
    def verdict(self) -> str:
        """``"pass"``, ``"fail"`` or ``"no baseline"``."""
        if self.least is None:
            return "no baseline"
        return "pass" if self.score >= self.least else "fail"


@documented
@dataclass(frozen=True, eq=False)
class Experiment:
    """The result of ``session.compare``: one row per algorithm, seed and step, a picture, and a verdict."""

    rows: tuple[Row, ...]
    """One per algorithm, seed and step."""
    algorithms: Mapping[str, str]
    """Name -> the algorithm with all its options, as text."""
    seeds: tuple[int, ...]
    """Seeds of the runs."""
    steps: int
    """Steps of each run."""
    baseline: Mapping[str, Any] | None = field(default=None, repr=False)
    """The content of the file that :meth:`save_baseline` wrote earlier."""
    branches: Mapping[tuple[str, int], str] = field(default_factory=dict, repr=False)
    """(algorithm, seed) -> its branch in ``session.history``."""
    unfinished: tuple[tuple[str, int], ...] = ()
    """(algorithm, seed) of the runs that an interrupt left out, in order; ``session.compare(..., resume=True)`` runs them."""

    @property
    def partial(self) -> bool:
        """Whether runs are missing, because it was interrupted."""
        return bool(self.unfinished)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per algorithm, seed and step: score, kl, length, seconds, tokens, and what else the algorithm counts."""
        import pandas as pd

        first = ["algorithm", "seed", "step", *MEASURED]
        frame = pd.DataFrame(list(self.rows))
        return frame[[*[c for c in first if c in frame], *[c for c in frame if c not in first]]]

    @checked
    def final_scores(self, algorithm: Title) -> dict[int, float]:
        """Return each seed's final score; empty where there are no scores, as in a simulated session."""
        by_seed = {}
        for seed in self.seeds:
            scores = [row["score"] for row in self.rows if (row["algorithm"], row["seed"]) == (algorithm, seed)]
            finite = [score for score in scores[-max(1, math.ceil(len(scores) / LAST_SHARE)) :] if score is not None]
            if finite:
                by_seed[seed] = sum(finite) / len(finite)
        return by_seed

    @property
    def verdict(self) -> tuple[Judgement, ...]:
        """One judgement per algorithm: pass unless its score is below the baseline's by more than twice the standard error."""
        judged = []
        for name in self.algorithms:
            scores = list(self.final_scores(name).values())
            mean, spread = _mean(scores), _deviation(scores)
            then = (self.baseline or {}).get("algorithms", {}).get(name)
            if then is None or not scores:
                judged.append(Judgement(name, mean, spread))
                continue
            before = list(then["final_scores"].values())
            error = math.sqrt(spread**2 / len(scores) + _deviation(before) ** 2 / len(before))
            judged.append(Judgement(name, mean, spread, _mean(before), _mean(before) - max(2 * error, ROUNDING)))
        return tuple(judged)

    @property
    def ok(self) -> bool:
        """Whether no algorithm fails; true without a baseline. With one, a partial experiment is not ok."""
        if self.partial and self.baseline is not None:
            return False
        return all(judgement.verdict != "fail" for judgement in self.verdict)

    @checked
    def save_baseline(self, path: str | Path) -> Path:
        """Write the final scores to a JSON file that a later ``session.compare(..., baseline=path)`` is judged by.

        Raises:
            OptionError: there are no scores, as in a simulated session, runs are missing, or ``path`` is no path.
            OutputError: the file cannot be written; what was there is unchanged.
        """
        if self.partial:
            raise OptionError(
                f"a baseline needs all runs, and {self._finished()}; session.compare(..., resume=True) runs the others"
            )
        algorithms = {
            name: {"options": options, "final_scores": {str(seed): score for seed, score in self.final_scores(name).items()}}
            for name, options in self.algorithms.items()
        }
        if not all(entry["final_scores"] for entry in algorithms.values()):
            raise OptionError("there are no scores to be a baseline: a simulated session has shapes and times only")
        content = {"format": FORMAT, "steps": self.steps, "seeds": list(self.seeds), "algorithms": algorithms}
        return export(path, json.dumps(content, indent=1) + "\n", "the baseline")

    def view(self) -> dict[str, Any]:
        """Return plain data for display: for each algorithm mean, least and most over the seeds of every step."""
        curves: dict[str, dict[str, list[Row]]] = {}
        for name in self.algorithms:
            own_rows = [row for row in self.rows if row["algorithm"] == name]
            steps = sorted({row["step"] for row in own_rows})
            curves[name] = {
                key: [{"step": i, **_range([r[key] for r in own_rows if r["step"] == step])} for i, step in enumerate(steps)]
                for key in MEASURED
            }
        runs = {name: len({row["seed"] for row in self.rows if row["algorithm"] == name}) for name in self.algorithms}
        verdict = [
            {"algorithm": j.algorithm, "runs": runs[j.algorithm], "score": j.score, "spread": j.spread, "baseline": j.baseline,
             "least": j.least, "verdict": j.verdict} for j in self.verdict
        ]  # fmt: skip
        return {
            "algorithms": dict(self.algorithms), "seeds": list(self.seeds), "steps": self.steps, "curves": curves,
            "verdict": verdict, "judged": self.baseline is not None, "ok": self.ok,
            "finished": self._finished() if self.partial else "",
        }  # fmt: skip

    def _finished(self) -> str:
        number = len(self.algorithms) * len(self.seeds)
        return f"{number - len(self.unfinished)} of {number} runs are finished"

    def __repr__(self) -> str:
        head = f"Experiment({', '.join(self.algorithms)}; seeds {', '.join(map(str, self.seeds))}; {self.steps} steps)"
        lines = []
        if self.partial:
            others = ", ".join(f"{name} seed {seed}" for name, seed in self.unfinished)
            lines.append(f"  {self._finished()}; session.compare(..., resume=True) runs the others: {others}")
        for j in self.verdict:
            against = "" if j.least is None else f", baseline {j.baseline:.4f}, at least {j.least:.4f}: {j.verdict}"
            score = "no scores" if math.isnan(j.score) else f"final score {j.score:.4f} ± {j.spread:.4f}"
            lines.append(f"  {j.algorithm}: {score}{against}")
        return printable("\n".join([head, *lines]))


def read_baseline(path: str | Path, steps: int, algorithms: Mapping[str, str]) -> dict[str, Any]:
    """Return the baseline that ``Experiment.save_baseline`` wrote.

    Raises:
        OptionError: there is no such file, it is damaged, or of other steps or options.
    """
    try:
        if not os.path.exists(path):
            raise FileNotFoundError(path)
        baseline: dict[str, Any] = parse_json(read_named(path, MOST_BYTES, error=OptionError))
        judged = baseline["format"] == FORMAT and {name: entry["options"] for name, entry in baseline["algorithms"].items()}
        then, finals = int(baseline["steps"]), [entry["final_scores"].values() for entry in baseline["algorithms"].values()]
        # All that is read later is read inside this block, so that a damaged file is refused here and not halfway through a
        # comparison.
        if not all(isinstance(score, int | float) for scores in finals for score in scores) or not all(finals):
            raise ValueError("final_scores are numbers, at least one per algorithm")
    except FileNotFoundError:
        there = sorted(file.name for file in Path(path).parent.glob("*.json"))[:10]
        others = f"the folder has {', '.join(there)}" if there else "its folder has no .json file"
        raise OptionError(
            f"there is no baseline {path} yet; {others}. This call with save_baseline=True writes it, and later ones are judged"
        ) from None
    except OptionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OptionError(f"{path} is no baseline ({shown(error)}); compare(..., save_baseline=True) writes one") from None
    if not judged:
        raise OptionError(f"{path} has format {baseline['format']}; this version of hfsdk reads format {FORMAT}. Write it again.")
    if then != steps:
        raise OptionError(f"the baseline {path} was made with steps={then}; got steps={steps}. Use steps={then}, or write another.")
    for name, options in algorithms.items():
        if not _same(judged.get(name, options), options):
            raise OptionError(f"the baseline {path} has {name} as {judged[name]}; got {options}. Give these options another name.")
    return baseline


OFF = ("None", "0", "0.0", "False")
"""Values of an option that changes nothing."""


def _same(before: str, now: str) -> bool:
    """Whether two algorithms' ``repr`` are alike: in any order, and but for options that came since and are off."""
    (was, had), (name, has) = ((text.partition("(")[0], _options(text)) for text in (before, now))
    came = {option for option, value in has.items() if option not in had and value in OFF}
    return was == name and had == {option: value for option, value in has.items() if option not in came}


def _options(text: str) -> dict[str, str]:
    """Return the options of a ``repr`` with their values."""
    arguments = text.removesuffix(")").partition("(")[2]
    return {option: value for option, _, value in (part.partition("=") for part in arguments.split(", "))}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _range(values: Sequence[float | None]) -> dict[str, float | None]:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return {"mean": None, "low": None, "high": None}
    return {"mean": _mean(numbers), "low": min(numbers), "high": max(numbers)}
