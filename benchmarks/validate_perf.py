"""How right ``PerfModel`` is: fitted on one part of the published timings, it predicts the rest.

    python benchmarks/validate_perf.py                       # tables
    python benchmarks/validate_perf.py --plot docs/perf-model.svg --json FILE --check

Targets, for configurations that no fit saw:

    calibrated on the same cluster   median absolute error at most 10 % (training, forward passes), 15 % (generation),
                                     25 % (resharding)
    presets alone                    median absolute error at most 20 % over every case, resharding included, and in no quantity a
                                     median error beyond 10 % to one side
    bands                            of four in five on a further system, from the fitted side: at least 80 % of the predicted
                                     side within, and 70 % of the cases of systems that are left out in turn
    order of plans                   Kendall's tau at least 0.8 where a workload was measured in three or more layouts

Cases are those of ``published.py`` and of ``newer_published.py``. Split: a configuration (system, source, algorithm, sizes of
actor and critic, GPUs; joined by "|") is predicted when its sha256 mod 3 is 0, else fitted. A calibration refits the constants
named in ``FITTED`` on one system's runs on one kind of machine, by robust least squares on logarithms: residuals in units of
``NOISE``, each constant pulled to its preset by ``PRIOR``. Nothing is chosen per configuration.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import numpy as np
from common import Report, parser, table
from newer_published import newer_cases, newer_rows
from published import Case, cases, rows

from hfsdk.planner.perf.bands import grouped_band
from hfsdk.planner.perf.perf_model import PerfModel

FITTED = {
    "PUZZLE": ("train_efficiency", "forward_efficiency", "activation_bytes", "launch_s", "kv_efficiency", "link_efficiency"),
    "DeepSpeed-Chat": ("forward_efficiency", "launch_s", "link_efficiency"),
    "llm-foundry": ("train_efficiency", "attention_efficiency", "activation_bytes"),
    "TensorRT-LLM": ("forward_efficiency", "weight_efficiency", "kv_efficiency"),
    "vLLM": ("weight_efficiency", "layer_s", "step_s"),
    "ReaL-Heuristic": ("train_efficiency", "forward_efficiency", "launch_s", "link_efficiency"),
}
"""Constants that one calibration refits, by system; others have nothing on the other side of the split, and mixtures of experts
(MoE in their groups) are left to the presets."""
NOISE = 0.1
"""Standard deviation of a measured logarithm: what runs of the same configuration differ by."""
PRIOR = 1.0
"""The same of a constant around its preset; of 0.25, 0.5 and 1 the one whose fits on four fifths of the fitted side predict
the last fifth best."""
TARGETS = {"train": 0.10, "forward": 0.10, "generation": 0.15, "reshard": 0.25}


def fit(seen: Sequence[Case], names: Sequence[str], start: PerfModel) -> PerfModel:
    """Return ``start`` with the constants ``names`` refitted to the cases: Levenberg-Marquardt on Huber-weighted logarithms.

    Shares of a peak stay at or below 1.
    """
    origin = np.log([getattr(start, name) for name in names])
    most = np.array([0.0 if name.endswith("efficiency") else np.inf for name in names])

    def model(at: np.ndarray) -> PerfModel:
        return replace(start, **dict(zip(names, np.exp(at).tolist(), strict=True)))

    def residuals(at: np.ndarray) -> np.ndarray:
        made = model(at)
        errors = np.array([np.log(case.seconds(made) / case.measured) for case in seen]) / NOISE
        return np.concatenate([errors / np.sqrt(np.maximum(1.0, np.abs(errors))), (at - origin) / PRIOR])

    at, damping = origin, 1e-2
    found = residuals(at)
    for _ in range(30):
        slopes = np.stack([(residuals(at + step) - found) / 1e-3 for step in 1e-3 * np.eye(len(at))], axis=1)
        move = -np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(at)), slopes.T @ found)
        trial = np.minimum(at + np.clip(move, -0.5, 0.5), most)
        after = residuals(trial)
        if after @ after < found @ found:
            at, found, damping = trial, after, damping / 3
        else:
            damping *= 5
        if damping > 1e6:
            break
    return model(at)


@lru_cache
def every() -> tuple[Case, ...]:
    """Return the cases of both files."""
    return (*cases(), *newer_cases())


def error(case: Case, perf: PerfModel) -> float:
    """Return predicted / measured - 1."""
    return float(case.seconds(perf) / case.measured - 1)


def calibrations() -> dict[str, PerfModel]:
    """Return a calibration for every group that has both sides."""
    found = {}
    for group in dict.fromkeys(case.group for case in every()):
        names = FITTED.get(group.split(",")[0])
        seen = [c for c in every() if c.group == group and not c.test and _fits(c)]
        if names and seen:
            found[group] = fit(seen, names, PerfModel())
    return found


def _fits(case: Case) -> bool:
    return case.quantity in TARGETS or (case.quantity == "step" and case.group.startswith("ReaL"))


def summary(errors: Sequence[tuple[float, str]]) -> tuple[str, ...]:
    """Return count, median, nine-tenths quantile and the worst case as text."""
    sizes = np.abs([e for e, _ in errors])
    worst, name = max(errors, key=lambda e: abs(e[0]))
    return str(len(errors)), f"{np.median(sizes):.1%}", f"{np.quantile(sizes, 0.9):.1%}", f"{worst:+.0%} {name}"


def by_quantity(made: dict[str, PerfModel], test: bool | None) -> dict[tuple[str, str], list[tuple[float, str]]]:
    """Return errors and names of cases by group and quantity; ``test`` picks a side, ``None`` both."""
    found: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    for case in every():
        if case.group in made and (test is None or case.test == test):
            found[case.group, case.quantity].append((error(case, made[case.group]), case.config))
    return found


def orders(made: dict[str, PerfModel]) -> dict[str, tuple[int, float]]:
    """Return the number of layouts and Kendall's tau of every workload of PUZZLE's with three or more measured layouts.

    Runs of the same layout count once, by their mean.
    """
    seen: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for case in every():
        if case.group.startswith("PUZZLE") and case.quantity == "step":
            predicted = float(case.seconds(made[case.group]))
            seen[case.workload][case.plan].append((case.measured, predicted))
    found = {}
    for workload, layouts in seen.items():
        means = [np.mean(runs, axis=0) for runs in layouts.values()]
        if len(means) >= 3:
            signs = [np.sign((a[0] - b[0]) * (a[1] - b[1])) for a, b in combinations(means, 2)]
            found[workload] = (len(means), float(np.mean(signs)))
    return found


def pooled(found: dict[str, tuple[int, float]]) -> float:
    """Return tau over the pairs of all workloads."""
    pairs = np.array([n * (n - 1) / 2 for n, _ in found.values()])
    return float(pairs @ np.array([tau for _, tau in found.values()]) / pairs.sum())


def spread() -> tuple[int, float, float]:
    """Return how many pairs of runs share a layout and everything else, and by how much they differ: median and most.

    No model of configurations can be nearer than half of that.
    """
    seen: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for case in every():
        if case.group.startswith("PUZZLE") and case.quantity in TARGETS:
            seen[case.workload, case.plan, case.switching, case.quantity].append(case.measured)
    pairs = [max(a, b) / min(a, b) - 1 for runs in seen.values() for a, b in combinations(runs, 2)]
    return len(pairs), float(np.median(pairs)), max(pairs)


def plot(made: dict[str, PerfModel], path: str) -> None:
    """Draw predicted against measured seconds of configurations that no fit saw, and of all with presets."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.style.use("hfsdk.viz.charts")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), sharex=True, sharey=True)
    everywhere = {case.group: PerfModel() for case in every()}
    sides = ((axes[0], made, True, "calibrated, configurations no fit saw"), (axes[1], everywhere, None, "presets alone, all"))
    marks = dict(zip(("train", "forward", "generation", "reshard", "step"), "osD^v", strict=True))
    for ax, models, side, title in sides:
        for quantity, mark in marks.items():
            chosen = [c for c in every() if c.group in models and c.quantity == quantity and (side is None or c.test)]
            if chosen:
                predicted = [c.seconds(models[c.group]) for c in chosen]
                ax.loglog([c.measured for c in chosen], predicted, mark, ms=4, alpha=0.7, label=quantity)
        span = np.array([0.05, 30_000.0])
        ax.loglog(span, span, color="#797979", lw=0.8)
        ax.fill_between(span, span / 1.15, span * 1.15, color="#797979", alpha=0.25, lw=0, zorder=0)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("measured seconds")
        ax.legend(fontsize=8)
    axes[0].set_ylabel("predicted seconds (band: 15 %)")
    figure.tight_layout()
    plt.rcParams["svg.hashsalt"] = "hfsdk"
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


BAND_OF = {
    "generate": (("generation",), ("generation",)), "forward": (("forward",), ("forward", "train")),
    "update": (("train",), ("train",)), "": (("reshard",), tuple(TARGETS)),
}  # fmt: skip
"""Kind of call -> the quantities that it is, and those that its band is made of: fewer than three systems timed forward passes,
which are a third of training, and resharding."""


@dataclass(frozen=True)
class PresetBand:
    """Between which factors of the preset's seconds four of five measured ones are, on a system that was not there."""

    low: float
    high: float
    systems: int
    """On whose fitted side it was made."""
    held: int
    """Cases of the predicted side within."""
    num_rows: int
    apart: tuple[int, int]
    """Of all cases of each system in turn, those within the band of the others, and their number."""

    @property
    def share(self) -> float:
        """Of the predicted side within."""
        return self.held / self.num_rows


def preset_bands() -> dict[str, PresetBand]:
    """Return the bands of presets by kind of call, made of the fitted side and counted on the other one.

    A system's cases are off alike, and a plan is for a system that is none of these: each counts the same, once a quantity.
    """
    logs = [
        (case, (case.quantity, case.group.split(",")[0]), float(np.log(case.measured / case.seconds(PerfModel()))))
        for case in every() if case.quantity in TARGETS
    ]  # fmt: skip

    def band(quantities: Collection[str], counts: Callable[[Case, object], bool]) -> tuple[float, float, int]:
        by_system: dict[Hashable, list[float]] = defaultdict(list)
        for case, system, log in logs:
            if case.quantity in quantities and counts(case, system):
                by_system[system].append(log)
        low, high = grouped_band(by_system) or (-np.inf, np.inf)
        return low, high, len(by_system)

    found = {}
    for kind, (quantities, made_of) in BAND_OF.items():
        low, high, systems = band(made_of, lambda case, _: not case.test)
        held = [low <= log <= high for case, _, log in logs if case.test and case.quantity in quantities]
        apart = []
        for left_out in sorted({system for case, system, _ in logs if case.quantity in quantities}):
            least, most, _ = band(made_of, lambda _, system, without=left_out: system != without)
            apart += [least <= log <= most for _, system, log in logs if system == left_out]
        found[kind] = PresetBand(float(np.exp(low)), float(np.exp(high)), systems, sum(held), len(held), (sum(apart), len(apart)))
    return found


def show(title: str, found: dict[tuple[str, str], list[tuple[float, str]]]) -> None:
    """Print one table of errors."""
    lines = [(group, quantity, *summary(errors)) for (group, quantity), errors in found.items()]
    print(f"\n{title}\n\n{table(('measured by', 'quantity', 'cases', 'median', '9 of 10', 'worst'), lines)}")


def main(arguments: argparse.Namespace) -> int:
    """Fit, predict, print and check."""
    report = Report("validate_perf", "one process, one thread")
    made = calibrations()
    presets = {case.group: PerfModel() for case in every()}
    print(f"{len(rows())} and {len(newer_rows())} published rows, {len(every())} cases of them say enough to be predicted")
    changed = [(g, *(f"{n}={getattr(p, n):.3g}" for n in FITTED[g.split(",")[0]])) for g, p in made.items()]
    print("\nconstants fitted\n\n" + "\n".join("  ".join(line) for line in changed))
    show("calibrated on the same cluster: configurations the fit saw", by_quantity(made, False))
    held_out = by_quantity(made, True)
    show("calibrated on the same cluster: configurations the fit did not see", held_out)
    everything = by_quantity(presets, None)
    show("presets alone: every configuration", everything)
    trained = [c for c in every() if " MoE" in c.group and c.quantity == "train"]
    lines = [(c.config, f"{c.measured:.2f}", f"{c.seconds(PerfModel()):.2f}", f"{error(c, PerfModel()):+.0%}") for c in trained]
    print(f"\nmixtures of experts in training, one by one\n\n{table(('case', 'measured', 'predicted', 'error'), lines)}")
    for (group, quantity), errors in held_out.items():
        if group.startswith("PUZZLE") and quantity in ("train", "forward"):
            size = float(np.median(np.abs([e for e, _ in errors])))
            report.add(f"calibrated, {group}, {quantity}: median error", size, at_most=TARGETS[quantity])
    for quantity, target in TARGETS.items():
        together = [e for (_, q), errors in held_out.items() if q == quantity for e, _ in errors]
        report.add(f"calibrated, {quantity}: median error", float(np.median(np.abs(together))), at_most=target)
        report.add(f"calibrated, {quantity}: worst tenth from", float(np.quantile(np.abs(together), 0.9)))
    steps = [e for (g, q), errors in held_out.items() if q == "step" and g.startswith("ReaL") for e, _ in errors]
    report.add("calibrated, ReaL's whole steps: median error", float(np.median(np.abs(steps))), at_most=0.15)
    alone = [e for errors in everything.values() for e, _ in errors]
    report.add("presets: median error over everything", float(np.median(np.abs(alone))), at_most=0.20)
    report.add("presets: worst tenth from", float(np.quantile(np.abs(alone), 0.9)))
    for quantity in (*TARGETS, "step"):
        one = [e for (_, q), errors in everything.items() if q == quantity for e, _ in errors]
        report.add(f"presets, {quantity}: median error", float(np.median(np.abs(one))))
        report.add(f"presets, {quantity}: bias, the median with its sign", abs(float(np.median(one))), at_most=0.10)
    bands = preset_bands()
    print("\nmeasured / predicted by presets, four of five on a further system\n\n" + table(
        ("kind of call", "systems", "from", "to", "of the predicted side within", "of systems left out in turn within"),
        [(name or "others", str(b.systems), f"{b.low:.2f}", f"{b.high:.2f}", f"{b.held} of {b.num_rows} ({b.share:.0%})",
          f"{b.apart[0]} of {b.apart[1]} ({b.apart[0] / b.apart[1]:.0%})") for name, b in bands.items()]))  # fmt: skip
    for kind, one in bands.items():
        what = f"presets, {kind or 'others'}"
        report.add(f"{what}: share of the predicted side within the band of four in five", one.share, at_least=0.8)
        report.add(f"{what}: the same of systems left out in turn", one.apart[0] / one.apart[1], at_least=0.7 if kind else None)
    taus = orders(made)
    lines = [(workload, str(count), f"{tau:.2f}") for workload, (count, tau) in taus.items()]
    print("\norder of plans\n\n" + table(("workload", "layouts", "Kendall's tau"), lines))
    report.add("order of plans: Kendall's tau over all pairs", pooled(taus), at_least=0.8)
    pairs, usual, most = spread()
    report.add(f"runs of equal configuration differ by, of {pairs} pairs: median", usual)
    report.add("runs of equal configuration differ by at most", most)
    report.details = {"constants": {g: {n: getattr(p, n) for n in FITTED[g.split(",")[0]]} for g, p in made.items()},
                      "held_out": {f"{g}, {q}": errors for (g, q), errors in held_out.items()}, "orders": taus}  # fmt: skip
    if arguments.plot:
        Path(arguments.plot).parent.mkdir(parents=True, exist_ok=True)
        plot(made, arguments.plot)
    return report.finish(arguments)


if __name__ == "__main__":
    made_parser = parser(__doc__)
    made_parser.add_argument("--plot", metavar="FILE", help="draw predicted against measured there (.svg or .png)")
    sys.exit(main(made_parser.parse_args()))
