"""``compare``: several algorithms from one point, each with several seeds, and back again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hfsdk.algorithms import DPO
from hfsdk.core.checks import Count, checked, shown
from hfsdk.core.errors import OptionError
from hfsdk.core.experiment import Experiment, read_baseline
from hfsdk.core.rows import Row
from hfsdk.core.snapshot import Snapshot
from hfsdk.session.algorithm import Algorithm, check_algorithm, check_roles
from hfsdk.session.client import uninterrupted
from hfsdk.session.notebook import wants_progress
from hfsdk.session.session_parts import Parts
from hfsdk.session.training import progress_bar, train

Algorithms = Sequence[Algorithm] | Mapping[str, Algorithm]

NAMES = {"score_mean": "score", "kl_mean": "kl", "response_tokens_mean": "length"}
"""What a step's row calls it -> what an experiment's does."""


@checked
def compare(  # noqa: D417
    parts: Parts,
    algorithms: Algorithms,
    prompts: Any,
    *,
    steps: Count,
    seeds: Sequence[int] = (0, 1, 2),
    snapshot: Snapshot | str | None = None,
    baseline: str | Path | None = None,
    save_baseline: bool = False,
    progress: bool | None = None,
) -> Experiment:
    """Run each algorithm with each seed from the same point, and go back to where the session was.

    Every run is a branch of :attr:`history`. Seeded means repeatable: the same call gives the same scores, bit for bit.

    Args:
        algorithms: e.g. ``[hf.PPO(), hf.GRPO()]``, or by name ``{"no KL": hf.PPO(kl_coef=0.0)}``.
        prompts: from :meth:`prompts`, or data as :meth:`train` takes them; each run begins at the same place.
        steps: of each run.
        seeds: of sampling and shuffling, in place of the session's.
        snapshot: where to start; by default here.
        baseline: a JSON file with earlier final scores, by which these are judged (``experiment.ok``).
        save_baseline: write that file from these scores instead.
        progress: whether to draw a bar; by default in a notebook and in a terminal.

    Returns:
        The experiment: one DataFrame, one picture, one verdict.

    Raises:
        OptionError: an option is out of its range; there is no baseline, or it is of other steps or options.
        PlacementError: the session lacks roles that an algorithm uses; names all of them, before anything is loaded.
        CallError: a call failed; the session is where it was.
    """
    named = _named(algorithms)
    for algorithm in named.values():
        check_roles(algorithm, parts.deployment.models)
    seeds = _different(seeds)
    options = {name: repr(algorithm) for name, algorithm in named.items()}
    if save_baseline and baseline is None:
        raise OptionError("save_baseline=True needs the file to write: baseline='ppo.json'")
    known = None if baseline is None or save_baseline else read_baseline(baseline, steps, options)
    if baseline is not None and parts.context.simulated:
        raise OptionError("a simulated session has no scores to judge by a baseline; leave baseline out")
    stream = parts.sources.stream_of(prompts, pairs=any(isinstance(one, DPO) for one in named.values()))
    shown = wants_progress() if progress is None else progress
    before, here = parts.runs.run, None
    rows: list[Row] = []
    branches: dict[tuple[str, int], str] = {}
    with uninterrupted() as held:  # outside of the runs, which hear interrupts themselves: back to where it was, whatever comes
        try:
            here = parts.snapshots.snapshot("compare")
            start = here if snapshot is None else parts.snapshots.find(snapshot)
            with progress_bar(len(named) * len(seeds) * steps, shown, "compare") as bar:
                for name, algorithm in named.items():
                    for seed in seeds:
                        branches[name, seed] = parts.snapshots.fork(start, _free(parts, f"{name}, seed {seed}"))
                        parts.context.seed = seed
                        if held:
                            raise KeyboardInterrupt(f"stopped before {name}, seed {seed}; the session is where it was")
                        run = train(parts, algorithm, stream, steps=steps, progress=False, stop=bar.step)
                        rows += [_row(name, seed, row) for row in run.rows]
                        if run.paused:
                            raise KeyboardInterrupt(f"stopped at {name}, seed {seed}; the session is where it was")
        finally:
            if here is not None and not parts.client.closed:
                parts.snapshots.resume(here)
                parts.snapshots.forget(here)
            parts.runs.run = before
    experiment = Experiment(tuple(rows), options, seeds, steps, known, branches)
    if save_baseline and baseline is not None:
        experiment.save_baseline(baseline)
    return experiment


def _row(name: str, seed: int, row: Mapping[str, Any]) -> Row:
    """Return a step's row under an experiment's names; what is not known is ``None``."""
    tokens = round(row["tokens_per_s"] * row["seconds"]) if "tokens_per_s" in row else None
    known = {new: row.get(old) for old, new in NAMES.items()}
    others = {key: value for key, value in row.items() if key not in NAMES and key not in ("step", "seconds")}
    return {"algorithm": name, "seed": seed, "step": row["step"], **known, "seconds": row["seconds"], "tokens": tokens, **others}


def _named(algorithms: Algorithms) -> dict[str, Algorithm]:
    """Return the algorithms by name: that of their class, and of those of one class also the options they differ in."""
    if isinstance(algorithms, Mapping):
        named = {str(name): algorithm for name, algorithm in algorithms.items()}
    else:
        named = {}
        for algorithm in algorithms:
            alike = [other for other in algorithms if type(other) is type(algorithm)]
            name = type(algorithm).__name__ + _differing(algorithm, alike)
            if name in named:
                raise OptionError(f"two of the algorithms are the same, {shown(algorithm)}; name them: {{'one': ..., 'two': ...}}")
            named[name] = algorithm
    if not named:
        raise OptionError("compare takes at least one algorithm, e.g. [hf.PPO(), hf.GRPO()]; got none")
    for algorithm in named.values():
        check_algorithm(algorithm)
    return named


def _differing(algorithm: Any, alike: Sequence[Any]) -> str:
    if len(alike) < 2 or not is_dataclass(algorithm):
        return ""
    names = [f.name for f in fields(algorithm) if any(getattr(o, f.name) != getattr(algorithm, f.name) for o in alike)]
    return f"({', '.join(f'{name}={getattr(algorithm, name)!r}' for name in names)})" if names else ""


def _different(seeds: Sequence[int]) -> tuple[int, ...]:
    if not seeds or len(set(seeds)) < len(seeds):
        raise OptionError(f"seeds are different whole numbers, e.g. [0, 1, 2]; got {shown(seeds)}")
    return tuple(seeds)


def _free(parts: Parts, name: str) -> str:
    """Return a name that no branch has yet."""
    taken = {branch.name for branch in parts.log.history().branches}
    return name if name not in taken else next(n for i in range(2, len(taken) + 3) if (n := f"{name} ({i})") not in taken)
