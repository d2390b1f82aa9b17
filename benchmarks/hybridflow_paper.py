"""HybridFlow's experiments (arXiv 2409.19256, section 8) predicted: speed-ups, transitions, generation, placements.

    python benchmarks/hybridflow_paper.py --json FILE --check

Targets, where the paper's text gives a number; each is predicted with ``PerfModel()`` as it is, on 16 machines of 8 A100-80GB with
NVLink and 200 Gbit/s a machine, 1,024 prompts of 1,024 tokens, responses of 1,024, PPO with 8 mini-batches:

    speed-ups over DeepSpeed-Chat,     average 3.67, 3.25, 12.52 (at most 7.84, 5.93, 20.57): within a factor 2
        OpenRLHF, NeMo-Aligner
    best generation tp at 16 GPUs      2 for 7B, 4 for 13B, trained tp8
    transition of 70B                  89.1 % less than gathering whole models: bytes a GPU receives, within 5 points
    placements                         colocate at 16-64 GPUs, split for 34B at 96-128 and 13B at 96, standalone for 13B at 128

A baseline is the system's plan and its engine's traits (``baselines.py``); each gets its best layout.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np
from baselines import (
    HYBRIDFLOW,
    ROLES,
    SYSTEMS,
    PpoStep,
    SystemPlan,
    best_plan,
    compare_placements,
    placed,
    ppo_step,
    standalone,
)
from common import Report, parser, table

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.layout import Layout
from hfsdk.core.spec import ModelSpec
from hfsdk.planner.perf.perf_model import PerfModel, reshard_bytes

PERF = PerfModel()
SIZES = {"7b": (8, 16, 32, 64, 128), "13b": (16, 32, 64, 128), "34b": (32, 64, 128), "70b": (64, 128)}
"""GPUs of figure 9 that hold the four models."""
PUBLISHED = {"DeepSpeed-Chat": (3.67, 7.84), "OpenRLHF": (3.25, 5.93), "NeMo-Aligner": (12.52, 20.57)}
"""Average and largest speed-up with PPO over all sizes and clusters (section 8.2)."""
RANGES = {"7b": (1.68, 8.63), "13b": (2.70, 18.96), "34b": (2.41, 20.57), "70b": (5.17, 17.98)}
"""Smallest and largest speed-up with PPO by model (captions of figure 9)."""


def cluster(devices: int) -> ClusterSpec:
    return ClusterSpec.parse(f"{devices // 8}x8 A100-80GB")


CACHED = replace(SYSTEMS[2], name="NeMo-Aligner, cached", kv_cache=True)
"""NeMo-Aligner read as an eager engine that does keep keys and values: what would be the least it can take."""


def steps(size: str, devices: int) -> dict[str, PpoStep]:
    """Return a step of every system that fits, each with its best plan."""
    spec = ModelSpec.preset(f"llama-{size}")
    found = {}
    for system in (HYBRIDFLOW, *SYSTEMS, CACHED):
        plan = best_plan(system, PERF, spec, cluster(devices))
        if plan is not None:
            found[system.name] = ppo_step(PERF, plan, spec, cluster(devices))
    return found


def speed_ups(report: Report) -> None:
    """Compare HybridFlow with every baseline."""
    lines, over, by_size = [], defaultdict(list), defaultdict(list)
    for size, counts in SIZES.items():
        for devices in counts:
            found = steps(size, devices)
            own = found.pop(HYBRIDFLOW.name)
            for name, other in found.items():
                over[name].append(other.total / own.total)
                by_size[size].append((name, other.total / own.total))
            ratios = [f"{found[s.name].total / own.total:.2f}x" if s.name in found else "does not fit" for s in (*SYSTEMS, CACHED)]
            lines.append((f"llama-{size}", str(devices), f"{own.total:.0f} s", *ratios))
    print("\n" + table(("model", "GPUs", "HybridFlow", *(s.name for s in (*SYSTEMS, CACHED))), lines))
    for name, (average, largest) in PUBLISHED.items():
        mean = float(np.mean(over[name]))
        report.add(f"over {name}: average speed-up (paper {average}, error {mean / average - 1:+.0%})", mean,
                   at_least=average / 2, at_most=average * 2)  # fmt: skip
        report.add(f"over {name}: largest (paper {largest})", max(over[name]))
    report.add("over NeMo-Aligner if it had a KV cache: average speed-up", float(np.mean(over[CACHED.name])))
    cached = {size: [r for name, r in found if name in PUBLISHED and "NeMo" not in name] for size, found in by_size.items()}
    for size, (least, most) in RANGES.items():
        report.add(f"llama-{size}: smallest speed-up (paper {least})", min(cached[size]))
        report.add(f"llama-{size}: largest over DeepSpeed-Chat and OpenRLHF (paper {most} with NeMo-Aligner)", max(cached[size]))
    report.details["speed_ups"] = {name: list(map(float, found)) for name, found in over.items()}


def generation_tp(report: Report) -> None:
    """Figure 15: 16 GPUs, all models on all of them, trained with tp8 dp2; generation and transition by the rollout's tp."""
    lines = []
    for size, best in (("7b", 2), ("13b", 4)):
        spec, seconds = ModelSpec.preset(f"llama-{size}"), {}
        for tp in (1, 2, 4, 8):
            pool = " ".join(ROLES)
            plan = SystemPlan(system=HYBRIDFLOW, pools={pool: 16}, layouts={pool: Layout(tp=8, dp=2)}, rollout=Layout(tp=tp))
            step = ppo_step(PERF, plan, spec, cluster(16))
            seconds[tp] = step.generation + step.transition
            lines.append((f"llama-{size}", f"tp{tp}", f"{step.generation:.1f} s", f"{step.transition:.2f} s"))
        chosen = min(seconds, key=lambda tp: seconds[tp])
        less = 1 - seconds[best] / seconds[8]
        published = 0.603 if best == 2 else 0.364
        report.add(f"llama-{size}: best generation tp (paper {best})", chosen, at_least=best, at_most=best)
        report.add(f"llama-{size}: tp{best} saves of tp8's time (paper {published:.1%})", less)
    print("\n" + table(("model", "rollout", "generation", "transition"), lines))


def transition(report: Report) -> None:
    """Figure 14: the transition of 70B at 128 GPUs, against gathering the whole model as DeepSpeed-Chat and OpenRLHF do."""
    spec = ModelSpec.preset("llama-70b")
    whole = spec.num_bytes("bf16")
    part = reshard_bytes(spec, Layout(tp=8, pp=4, dp=4), 8)
    report.add("70B: bytes a GPU receives, less than the whole model by (paper 89.1 % of the time)", 1 - part / (whole * 127 / 128),
               at_least=0.841, at_most=0.941)  # fmt: skip
    plans = {s.name: best_plan(s, PERF, spec, cluster(128)) for s in (HYBRIDFLOW, *SYSTEMS[:2])}
    seconds = {name: ppo_step(PERF, plan, spec, cluster(128)).transition for name, plan in plans.items() if plan}
    for name, paper in (("HybridFlow", 9.6), ("OpenRLHF", 87.8)):
        report.add(f"70B: transition of {name} (paper {paper} s)", seconds[name], "s")
    report.add("70B: transition saved against OpenRLHF, by seconds (paper 89.1 %)", 1 - seconds["HybridFlow"] / seconds["OpenRLHF"])


PLACEMENTS = {("13b", n): "colocate" for n in (16, 32, 64)} | {("34b", n): "colocate" for n in (32, 64)} | {
    ("13b", 96): "split", ("34b", 96): "split", ("34b", 128): "split", ("13b", 128): "standalone"}  # fmt: skip
"""Figure 12 and section 8.3: which placement was fastest."""


def placements(report: Report) -> None:
    """Compare colocate, split and standalone at the paper's points."""
    lines, right = [], 0
    for (size, devices), winner in PLACEMENTS.items():
        spec = ModelSpec.preset(f"llama-{size}")
        split = {"actor reference": devices // 2, "critic reward": devices // 2}
        options = {"colocate": [{" ".join(ROLES): devices}], "split": [split], "standalone": standalone(devices)}
        seconds = {}
        for name, pools in options.items():
            found = [plan for p in pools if (plan := placed(HYBRIDFLOW, p, PERF, spec, cluster(devices))) is not None]
            if found:
                seconds[name] = min(ppo_step(PERF, plan, spec, cluster(devices)).total for plan in found)
        best, margin = compare_placements(seconds)
        right += best == winner
        times = [f"{seconds[name]:.1f} s" if name in seconds else "does not fit" for name in options]
        lines.append((f"llama-{size}", str(devices), *times, best, winner, f"{margin - 1:.1%}"))
    print("\n" + table(("model", "GPUs", "colocate", "split", "standalone", "predicted", "paper", "ahead by"), lines))
    report.add(f"placements as the paper found them, of {len(PLACEMENTS)}", right, at_least=len(PLACEMENTS))


def without_cache(report: Report) -> None:
    """NeMo-Aligner's share of generation (paper: up to 81.2 %), read as no cache at all, and as an eager engine with one."""
    spec = ModelSpec.preset("llama-7b")
    for label, system in (("no KV cache", SYSTEMS[2]), ("a KV cache, eager", CACHED)):
        plan = best_plan(system, PERF, spec, cluster(32))
        if plan is not None:
            step = ppo_step(PERF, plan, spec, cluster(32))
            share = step.generation / step.total
            report.add(f"NeMo-Aligner, 7B on 32 GPUs, {label}: share of generation (paper up to 81.2 %)", share)


def main(arguments: argparse.Namespace) -> int:
    """Predict the paper's experiments and compare."""
    report = Report("hybridflow_paper", "one process, one thread")
    for part in (speed_ups, generation_tp, transition, placements, without_cache):
        part(report)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
