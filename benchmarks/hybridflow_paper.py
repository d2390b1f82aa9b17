"""HybridFlow's experiments (arXiv 2409.19256, section 8) predicted: speed-ups, transitions, generation, placements.

    python benchmarks/hybridflow_paper.py --json FILE --check
    python benchmarks/hybridflow_paper.py --terms            # which statement needs which property of the engines

Every number of the paper's text is a statement; each is predicted with ``PerfModel()`` as it is and the engines of that time
(``engines_of_2024.py``), on 16 machines of 8 A100-80GB with NVLink and 200 Gbit/s a machine, 1,024 prompts of 1,024 tokens,
responses of 1,024, PPO with 8 mini-batches. Targets:

    average speed-ups over DeepSpeed-Chat, OpenRLHF, NeMo-Aligner    within a factor 1.6 of 3.67, 3.25, 12.52
    placements                                                       at least 8 of 9
    best generation tp at 16 GPUs, trained tp8                       2 for 7B, 4 for 13B
    transition of 70B, against OpenRLHF's                            within 10 points of 89.1 % less

A baseline is the system's plan (``baselines.py``); each gets its best layout unless its code or the paper says which it had.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from baselines import ROLES, PpoStep, SystemPlan, best_plan, compare_placements, placed, ppo_step, standalone
from common import Report, parser, table
from engines_of_2024 import DEEPSPEED_CHAT, HYBRIDFLOW, NEMO_ALIGNER, OPENRLHF, SYSTEMS, System

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.layout import Layout
from hfsdk.core.spec import ModelSpec
from hfsdk.planner.perf.perf_model import PerfModel, reshard_bytes

PERF = PerfModel()
FACTOR, POINTS = 1.6, 0.10
"""A factor holds within this factor of the paper's, a share within as many points."""
SIZES = {"7b": (8, 16, 32, 64, 128), "13b": (16, 32, 64, 128), "34b": (32, 64, 128), "70b": (64, 128)}
"""GPUs of figure 9 that hold the four models."""
PUBLISHED = {"DeepSpeed-Chat": (3.67, 7.84), "OpenRLHF": (3.25, 5.93), "NeMo-Aligner": (12.52, 20.57)}
"""Average and largest speed-up with PPO over all sizes and clusters (section 8.2)."""
RANGES = {"7b": (1.68, 8.63), "13b": (2.70, 18.96), "34b": (2.41, 20.57), "70b": (5.17, 17.98)}
"""Smallest and largest speed-up with PPO by model (captions of figure 9)."""
PLACEMENTS = {("13b", n): "colocate" for n in (16, 32, 64)} | {("34b", n): "colocate" for n in (32, 64)} | {
    ("13b", 96): "split", ("34b", 96): "split", ("34b", 128): "split", ("13b", 128): "standalone"}  # fmt: skip
"""Figure 12 and section 8.3: which placement was fastest."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A number or a word of the paper, and what is predicted."""

    paper: float | str
    predicted: float | str
    share: bool = False
    """Whether it is a share of something: compared by points, not by a factor."""

    @property
    def holds(self) -> bool:
        """Whether they agree."""
        if isinstance(self.paper, str) or isinstance(self.predicted, str):
            return self.paper == self.predicted
        if self.share:
            return abs(self.paper - self.predicted) <= POINTS
        return self.paper / FACTOR <= self.predicted <= self.paper * FACTOR

    @property
    def words(self) -> tuple[str, str, str]:
        """Paper, predicted, whether it holds."""
        paper, predicted = (
            one if isinstance(one, str) else f"{one:.1%}" if self.share else f"{one:.3g}" for one in (self.paper, self.predicted)
        )
        return paper, predicted, "holds" if self.holds else "does not"


def cluster(devices: int) -> ClusterSpec:
    return ClusterSpec.parse(f"{devices // 8}x8 A100-80GB")


@lru_cache(maxsize=4096)
def best_step(system: System, size: str, devices: int) -> PpoStep | None:
    """Return a step of a system's best plan; ``None`` where none fits."""
    spec = ModelSpec.preset(f"llama-{size}")
    plan = best_plan(system, PERF, spec, cluster(devices))
    return None if plan is None else ppo_step(PERF, plan, spec, cluster(devices))


Made = dict[str, Statement]
"""Statements by what they are about."""


def speed_ups(systems: Mapping[str, System], show: bool) -> Made:
    """Compare HybridFlow with every baseline."""
    lines, over, by_size = [], defaultdict(list), defaultdict(list)
    for size, counts in SIZES.items():
        for devices in counts:
            own = best_step(systems["HybridFlow"], size, devices)
            assert own is not None
            words = []
            for name in PUBLISHED:
                other = best_step(systems[name], size, devices)
                if other is not None:
                    over[name].append(other.total / own.total)
                    by_size[size].append(other.total / own.total)
                words.append("does not fit" if other is None else f"{other.total / own.total:.2f}x")
            lines.append((f"llama-{size}", str(devices), f"{own.total:.0f} s", *words))
    if show:
        print("\n" + table(("model", "GPUs", "HybridFlow", *PUBLISHED), lines))
    found: Made = {}
    for name, (average, largest) in PUBLISHED.items():
        found[f"over {name}: average"] = Statement(paper=average, predicted=float(np.mean(over[name])))
        found[f"over {name}: largest"] = Statement(paper=largest, predicted=max(over[name]))
    for size, (least, most) in RANGES.items():
        found[f"llama-{size}: smallest speed-up"] = Statement(paper=least, predicted=min(by_size[size]))
        found[f"llama-{size}: largest speed-up"] = Statement(paper=most, predicted=max(by_size[size]))
    return found


def generation_tp(systems: Mapping[str, System], show: bool) -> Made:
    """Figure 15: 16 GPUs, all models on all of them, trained with tp8 dp2; generation and transition by the rollout's tp."""
    lines, found = [], {}
    for size, best, saved in (("7b", 2, 0.603), ("13b", 4, 0.364)):
        spec, seconds = ModelSpec.preset(f"llama-{size}"), {}
        for tp in (1, 2, 4, 8):
            pool = " ".join(ROLES)
            plan = SystemPlan(
                system=systems["HybridFlow"], pools={pool: 16}, layouts={pool: Layout(tp=8, dp=2)}, rollout=Layout(tp=tp)
            )
            step = ppo_step(PERF, plan, spec, cluster(16))
            seconds[tp] = step.generation + step.transition
            lines.append((f"llama-{size}", f"tp{tp}", f"{step.generation:.1f} s", f"{step.transition:.2f} s"))
        chosen = min(seconds, key=lambda tp: seconds[tp])
        found[f"llama-{size}: best generation tp"] = Statement(paper=f"tp{best}", predicted=f"tp{chosen}")
        found[f"llama-{size}: tp{best} saves of tp8's time"] = Statement(
            paper=saved, predicted=1 - seconds[best] / seconds[8], share=True
        )
    if show:
        print("\n" + table(("model", "rollout", "generation", "transition"), lines))
    return found


def transition(systems: Mapping[str, System], show: bool) -> Made:
    """Figure 14: the transition of 70B at 128 GPUs, against gathering the whole model as OpenRLHF does."""
    spec = ModelSpec.preset("llama-70b")
    whole = spec.num_bytes("bf16") * 127 / 128
    part = reshard_bytes(spec, Layout(tp=8, pp=8, dp=2), 8)
    seconds = {}
    for name in ("HybridFlow", "OpenRLHF"):
        step = best_step(systems[name], "70b", 128)
        assert step is not None
        seconds[name] = step.transition
    return {
        "70B transition: bytes a GPU gets, less than all": Statement(paper=0.891, predicted=1 - part / whole, share=True),
        "70B transition: seconds of HybridFlow": Statement(paper=9.6, predicted=seconds["HybridFlow"]),
        "70B transition: seconds of OpenRLHF": Statement(paper=87.8, predicted=seconds["OpenRLHF"]),
        "70B transition: seconds saved": Statement(
            paper=0.891, predicted=1 - seconds["HybridFlow"] / seconds["OpenRLHF"], share=True
        ),
    }


def placements(systems: Mapping[str, System], show: bool) -> Made:
    """Compare colocate, split and standalone at the paper's points."""
    lines, found, system = [], {}, systems["HybridFlow"]
    for (size, devices), winner in PLACEMENTS.items():
        spec = ModelSpec.preset(f"llama-{size}")
        split = {"actor reference": devices // 2, "critic reward": devices // 2}
        options = {"colocate": [{" ".join(ROLES): devices}], "split": [split], "standalone": standalone(devices)}
        seconds = {}
        for name, pools in options.items():
            fit = [plan for p in pools if (plan := placed(system, p, PERF, spec, cluster(devices))) is not None]
            if fit:
                seconds[name] = min(ppo_step(PERF, plan, spec, cluster(devices)).total for plan in fit)
        best, margin = compare_placements(seconds)
        found[f"llama-{size} on {devices} GPUs: fastest"] = Statement(paper=winner, predicted=best)
        times = [f"{seconds[name]:.1f} s" if name in seconds else "does not fit" for name in options]
        lines.append((f"llama-{size}", str(devices), *times, best, winner, f"{margin - 1:.1%}"))
    if show:
        print("\n" + table(("model", "GPUs", "colocate", "split", "standalone", "predicted", "paper", "ahead by"), lines))
    return found


def share_of_generation(systems: Mapping[str, System], show: bool) -> Made:
    """NeMo-Aligner's generation as a part of its step, the most of figure 9's points."""
    steps = [best_step(systems["NeMo-Aligner"], size, devices) for size, counts in SIZES.items() for devices in counts]
    most = max(step.generation / step.total for step in steps if step is not None)
    return {"NeMo-Aligner: largest share of generation": Statement(paper=0.812, predicted=most, share=True)}


PARTS: tuple[Callable[[Mapping[str, System], bool], Made], ...] = (
    speed_ups, generation_tp, transition, placements, share_of_generation,
)  # fmt: skip


def statements(systems: Mapping[str, System], *, show: bool = False) -> Made:
    """Predict every statement with these systems."""
    return {name: one for part in PARTS for name, one in part(systems, show).items()}


# -- terms: one property of the engines taken away


def _without(system: System, **traits: bool) -> System:
    return replace(system, traits=replace(system.traits, **traits))


def terms() -> Iterator[tuple[str, dict[str, System]]]:
    """Yield what is taken away, and the systems without it."""
    plain = {system.name: system for system in (HYBRIDFLOW, *SYSTEMS)}
    megatron = {s.name: _without(s, overlaps_reduction=True) for s in (HYBRIDFLOW, NEMO_ALIGNER)}
    yield "gradients are summed after the backward pass", plain | megatron
    yield "HybridFlow decodes without CUDA graphs", plain | {"HybridFlow": _without(HYBRIDFLOW, cuda_graphs=True)}
    yield "the host's seconds of vLLM in 2024", plain | {s.name: replace(s, constants={}) for s in (HYBRIDFLOW, OPENRLHF)}
    fastest = {s.name: replace(s, own_layout=False) for s in (HYBRIDFLOW, NEMO_ALIGNER)}
    yield "tp8 and the least pp, as in figure 14", plain | fastest
    yield "the rollout's weights wait in host memory", plain | {"HybridFlow": replace(HYBRIDFLOW, waits_on_host=False)}
    few = {s.name: replace(s, rows=256, rows_of_device=False) for s in SYSTEMS}
    yield "baselines generate few rows at a time", plain | few
    yield "the host's seconds of DeepSpeed-Chat's generation", plain | {"DeepSpeed-Chat": replace(DEEPSPEED_CHAT, constants={})}
    yield "DeepSpeed-Chat gathers no layer ahead", plain | {"DeepSpeed-Chat": _without(DEEPSPEED_CHAT, overlaps_weights=True)}
    unfused = {s.name: _without(s, fused=True) for s in (DEEPSPEED_CHAT, OPENRLHF)}
    yield "norms and rotations of transformers are not fused", plain | unfused
    yield "NeMo-Aligner swaps with host memory", plain | {"NeMo-Aligner": replace(NEMO_ALIGNER, swaps=False)}


def show_terms(found: Made) -> list[tuple[str, str, str]]:
    """Return, for every term, what no longer holds without it and what only holds without it."""
    lines = []
    for term, systems in terms():
        without = statements(systems)
        lost = [name for name, one in found.items() if one.holds and not without[name].holds]
        gained = [name for name, one in found.items() if not one.holds and without[name].holds]
        lines.append((term, "; ".join(lost) or "-", "; ".join(gained) or "-"))
    return lines


def main(arguments: argparse.Namespace) -> int:
    """Predict the paper's experiments and compare."""
    report = Report("hybridflow_paper", "one process, one thread")
    found = statements({system.name: system for system in (HYBRIDFLOW, *SYSTEMS)}, show=True)
    print("\n" + table(("statement", "paper", "predicted", ""), [(name, *one.words) for name, one in found.items()]))
    if arguments.terms:
        lines = show_terms(found)
        print("\n" + table(("without", "no longer holds", "holds only then"), lines))
        report.details["terms"] = lines
    for name, (average, _) in PUBLISHED.items():
        one = found[f"over {name}: average"]
        report.add(f"over {name}: average speed-up (paper {average})", float(one.predicted), at_least=average / FACTOR,
                   at_most=average * FACTOR)  # fmt: skip
    winners = [one.holds for name, one in found.items() if name.endswith("fastest")]
    report.add(f"placements as the paper found them, of {len(winners)}", sum(winners), at_least=8)
    tps = [one.holds for name, one in found.items() if name.endswith("best generation tp")]
    report.add("best generation tp as the paper found it, of 2", sum(tps), at_least=2)
    saved = found["70B transition: seconds saved"]
    report.add("70B transition: points from the paper's 89.1 %", 100 * abs(float(saved.predicted) - 0.891), at_most=100 * POINTS)
    report.add(f"statements that hold, of {len(found)}", sum(one.holds for one in found.values()))
    report.details["statements"] = {name: [one.paper, one.predicted, one.holds] for name, one in found.items()}
    return report.finish(arguments)


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--terms", action="store_true", help="predict everything again without each property (a minute)")
    sys.exit(main(options.parse_args()))
