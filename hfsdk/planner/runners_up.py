"""Why one plan loses against another, in numbers and in words; and whether the model can tell them apart at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache, partial

import numpy as np

from hfsdk.core.errors import LayoutError, PlacementError
from hfsdk.core.methods import method_of
from hfsdk.core.placement import Placement
from hfsdk.core.plan import Alternative, Hinge, Rejected
from hfsdk.core.roles import RoleSpec
from hfsdk.core.table import Array
from hfsdk.planner.perf.bands import BandCoverage
from hfsdk.planner.perf.memory import role_bytes
from hfsdk.planner.perf.perf_model import MOST_SHARE, PerfModel
from hfsdk.planner.perf.setup import Setup
from hfsdk.planner.perf.sizing import with_least
from hfsdk.planner.search.bases import Least, base_groups, least_of_all
from hfsdk.planner.search.candidates import process_bytes
from hfsdk.planner.search.fitting import LayoutsOf, rollouts_of, trains_of, with_layouts
from hfsdk.planner.search.leaf import describe
from hfsdk.planner.search.pools import Kind
from hfsdk.planner.search.recorded import Recorded, RecordedCall
from hfsdk.planner.search.solution import Solution

PRESET_BANDS = {"generate": (0.71, 1.98), "forward": (0.71, 1.56), "update": (0.69, 1.63), "": (0.68, 2.01)}
"""Ratios of measured to predicted seconds of four calls in five where the model is not calibrated, by kind of call; others ``""``.
``benchmarks/validate_perf.py`` prints them: of a system that is none of those which published timings, from the fitted side."""

PRESET_KEPT = {
    "generate": BandCoverage(held=74, num_rows=79), "forward": BandCoverage(held=15, num_rows=17),
    "update": BandCoverage(held=33, num_rows=40), "": BandCoverage(held=3, num_rows=3),
}  # fmt: skip
"""How many of the timings that these bands were not made of are within; the same command prints them."""

NAMED = ("colocate", "split", "standalone", "interleaving", "separation")
"""Presets that plans are named by."""


class Bands:
    """The factors of a predicted call's seconds between which the measured ones are expected to be."""

    def __init__(self, errors: float | Mapping[str, float] | None) -> None:
        """Take relative errors: one for all, or by method with ``""`` for others; methods without one have that of the presets."""
        self._errors = dict(errors) if isinstance(errors, Mapping) else {} if errors is None else {"": errors}

    def of(self, method: str) -> tuple[float, float]:
        """Return the least and the largest factor of a method's calls."""
        error = self._error(method)
        return PRESET_BANDS[_kind_of(method)] if error is None else (max(0.0, 1 - error), 1 + error)

    def _error(self, method: str) -> float | None:
        return self._errors.get(method, self._errors.get(""))

    def words(self, methods: Iterable[str]) -> str:
        """Say where the band of a step with calls of these methods comes from, and how often it held."""
        named = list(dict.fromkeys(methods))
        calibrated = [f"{method} {error:.0%}" for method in named if (error := self._error(method)) is not None]
        presets = [
            f"{kind or 'others'} x{PRESET_BANDS[kind][0]:.2f} to x{PRESET_BANDS[kind][1]:.2f} ({PRESET_KEPT[kind]})"
            for kind in dict.fromkeys(_kind_of(method) for method in named if self._error(method) is None)
        ]
        words = [f"calls off by the error that was given or calibrated: {', '.join(calibrated)}"] if calibrated else []
        if presets:
            words.append(
                "four in five calls on a system that is not calibrated, and in brackets of the published timings that this was not "
                f"made of how many it held: {', '.join(presets)}"
            )
        return f"The band is of {'; '.join(words)}." if words else ""


def _kind_of(method: str) -> str:
    kind = method_of(method)
    return "generate" if kind.generates else "update" if kind.learns else "forward" if kind.balanced else ""


def relative_errors(bands: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Turn a calibration's bands (multipliers by ``method.phase``) into relative errors by method: those of its widest phase."""
    errors: dict[str, float] = {}
    for kind, (low, high) in bands.items():
        method = kind.partition(".")[0]
        errors[method] = max(errors.get(method, 0.0), min(1.0, max(high - 1, 1 - low)))
    return errors


def preset_of(solution: Solution, num_devices: int) -> str:
    """Return the name of the preset whose way of sharing devices a plan has, or nothing."""
    roles = [item.name for item in solution.leaf.space.mode.items if not item.role.shadow_of]
    for name in NAMED:
        if preset_grouping(name, tuple(roles), num_devices) == solution.grouping:
            return name
    return ""


@lru_cache(maxsize=256)
def preset_grouping(name: str, roles: tuple[str, ...], num_devices: int) -> object:
    """Return who shares devices with whom in a preset, as ``Solution.grouping`` has it; ``None`` where it does not fit them."""
    try:
        placement = Placement.of(name, roles, num_devices)
    except PlacementError:
        return None
    members = {p.name: frozenset(r for r, home in placement.roles.items() if home == p.name) for p in placement.pools}
    return frozenset((members[p.name], members.get(p.within, frozenset())) for p in placement.pools if members[p.name])


def alternative(solution: Solution, bands: Bands, best: Solution | None = None, against: Alternative | None = None) -> Alternative:
    """Return a plan as data, with why it lost against ``best`` (``against`` is that one as data)."""
    space = solution.leaf.space
    seconds = solution.job_seconds
    low, high = np.array([bands.of(job.method) for job in space.mode.jobs]).reshape(-1, 2).T
    made = Alternative(
        title=describe([item.name for item in space.mode.items], solution.leaf),
        preset=preset_of(solution, space.tables.cluster.num_devices), placement=solution.leaf.placement(),
        layouts={item.name: solution.layouts[i] for i, item in enumerate(space.mode.items)}, seconds=solution.makespan(seconds),
        band=(solution.makespan(seconds * low), solution.makespan(seconds * high)), calls=_calls(solution, seconds),
        facts=_facts(solution, seconds), peak_bytes=_peak_bytes(solution), steps_s=solution.steps_s,
    )  # fmt: skip
    if best is None or against is None:
        return made
    why = _why(_judged(solution, made), _judged(best, against))
    chance = _chance(made, against)
    apart = solution.step_seconds / best.step_seconds - 1
    if chance and apart <= chance:
        why += f"; {apart:.1%} apart, and the lengths that a step draws make {chance:.1%} of difference alone"
    elif chance:
        why += f"; in the mean of {len(made.steps_s)} steps, whose lengths make {chance:.1%} of difference"
    return replace(made, why=why, too_close=apart <= chance or _too_close(solution, best, bands))


def _calls(solution: Solution, seconds: Array) -> dict[str, float]:
    """Return the seconds of a step by kind of call."""
    calls: dict[str, float] = {}
    for job, took in zip(solution.leaf.space.mode.jobs, seconds, strict=True):
        name = f"{job.role}.{job.method}"
        calls[name] = calls.get(name, 0.0) + float(took)
    return calls


def _judged(solution: Solution, made: Alternative) -> Alternative:
    """Return a plan as data with the seconds by which it was compared: the mean over the lengths of several steps."""
    if not solution.varies:
        return made
    return replace(made, seconds=solution.step_seconds, calls=_calls(solution, solution.mean_job_seconds))


def _chance(plan: Alternative, best: Alternative) -> float:
    """Return the difference between two plans that the lengths of one step alone make, as a share of the better one's seconds.

    The standard deviation, over the run's first steps, of the one's seconds less the other's.
    """
    if len(plan.steps_s) < 2:
        return 0.0
    differences = np.subtract(plan.steps_s, best.steps_s)
    return float(np.std(differences, ddof=1) / np.mean(best.steps_s))


def _makespans(solution: Solution, seconds: Array) -> Array:
    space = solution.leaf.space
    return space.replay.makespan(seconds, space.arrangements[solution.leaf.arrangement].grouping)


def _too_close(solution: Solution, best: Solution, bands: Bands) -> bool:
    """Whether errors of the calls, each kind off by its band and independent of the others, may turn the order.

    A kind of call (``generate``, ``update``, ...) is off by the same factor in both plans: what both have in common does not count.
    """
    sides = [(plan, plan.mean_job_seconds, [job.method for job in plan.leaf.space.mode.jobs]) for plan in (solution, best)]
    methods = sorted({name for _, _, names in sides for name in names})

    factors = np.array([[factor if m == n else 1.0 for n in methods] for m in methods for factor in bands.of(m)]
                       + [[1.0] * len(methods)])  # fmt: skip
    ends = [_makespans(plan, s * factors[:, [methods.index(n) for n in names]]) for plan, s, names in sides]
    differences = ends[0] - ends[1]
    moved = np.abs(differences[:-1] - differences[-1]).reshape(-1, 2).max(1)
    return bool(differences[-1] <= np.sqrt(np.sum(np.square(moved))))


def _why(plan: Alternative, best: Alternative) -> str:
    """Say by which calls a plan loses; calls side by side make a step shorter than their sum."""
    calls = {name: plan.calls.get(name, 0.0) - best.calls.get(name, 0.0) for name in {**best.calls, **plan.calls}}
    ranked = sorted(calls, key=lambda name: -abs(calls[name]))
    words = [f"{name} {_signed(calls[name])} s" for name in ranked[:3] if abs(calls[name]) >= 0.01 * best.seconds]
    waits = sum(f["bubble_s"] for f in plan.facts.values()) - sum(f["bubble_s"] for f in best.facts.values())
    if abs(waits) >= 0.01 * best.seconds:
        words.append(f"pipeline bubbles {_signed(waits)} s")
    sent = sum(f["tp_bytes"] for f in plan.facts.values()) - sum(f["tp_bytes"] for f in best.facts.values())
    if abs(sent) >= 0.05 * sum(f["tp_bytes"] for f in best.facts.values()):
        words.append(f"tp all-reduces {sent / 1e9:+.0f} GB a rank")
    aside = (sum(plan.calls.values()) - plan.seconds) - (sum(best.calls.values()) - best.seconds)
    if abs(aside) >= 0.01 * best.seconds:
        words.append(f"{_signed(abs(aside))[1:]} s {'more' if aside > 0 else 'less'} run side by side")
    more = plan.seconds - best.seconds
    return f"{_signed(more).lstrip('+')} s more ({more / best.seconds:+.0%})" + (f": {', '.join(words)}" if words else "")


def _signed(seconds: float) -> str:
    """Return seconds with their sign and one decimal or, below ten, two digits."""
    return f"{seconds:+.1f}" if abs(seconds) >= 9.95 else f"{seconds:+.2g}"


def _facts(solution: Solution, seconds: Array) -> dict[str, dict[str, float]]:
    space, leaf = solution.leaf.space, solution.leaf
    tables, homes = space.tables, {i: b for b, block in enumerate(leaf.blocks) for i in block}
    facts = {}
    for i, item in enumerate(space.mode.items):
        size = leaf.num_devices(homes[i])
        setup = tables.setup(item, solution.layouts[i], leaf.kind(homes[i]), size)
        numbers = dict.fromkeys(("bubble_s", "tp_bytes", "dp_bytes"), 0.0)
        for j in space.jobs_of[i]:
            call = space.mode.jobs[j].call
            if call is not None:
                for name, number in _call_facts(call, setup, tables.perf, solution.layouts[i], float(seconds[j])).items():
                    numbers[name] += number
        facts[item.name] = numbers
    return facts


def _call_facts(call: RecordedCall, setup: Setup, perf: PerfModel, layouts: LayoutsOf, took: float) -> dict[str, float]:
    """Bubble of GPipe and 1F1B (arXiv 1811.06965), 2 all-reduces a layer and pass (arXiv 1909.08053), one reduction a step.

    A backward pass that computes activations again also sends them again.
    """
    spec, each = setup.spec, setup.bytes_each
    generating = method_of(call.method).generates and "rollout" in layouts
    layout = layouts["rollout"] if generating else setup.layout
    training = method_of(call.method).learns
    steps = max(1, len(call.mini_batches)) if training else 1
    rows = sum(map(len, call.mini_batches)) if training else call.num_rows
    both = call.prompts + call.responses
    mean, longest = (float(both.mean()), float(both.max()) / layout.cp) if call.num_rows else (0.0, 0.0)
    tokens = mean * rows / layout.num_copies
    filling = (layout.pp - 1) * min(tokens / steps, max(setup.micro_batch_tokens, longest))
    message = 2 * spec.num_layers / layout.pp * tokens * spec.hidden_size * each * 2 * (layout.tp - 1) / layout.tp
    return {
        "bubble_s": took * filling / (tokens / steps + filling) if tokens else 0.0,
        "tp_bytes": message * (2 + setup.forwards_again if training else 1),
        "dp_bytes": perf.reduced_bytes(setup) * steps if training else 0.0,
    }  # fmt: skip


def _peak_bytes(solution: Solution) -> int:
    leaf = solution.leaf
    by_block = [list(solution.held_on(b).values()) for b in range(len(leaf.blocks))]
    most = 0
    for b, host in enumerate(leaf.hosts):
        estimates = by_block[b] + (by_block[host] if host >= 0 else [])
        most = max(most, process_bytes(leaf.kind(b)) + sum(e.resident for e in estimates) + max(e.working for e in estimates))
    return most


def rejected_presets(
    solutions: Sequence[Solution], roles: Sequence[RoleSpec], recorded: Recorded, kind: Kind, num_devices: int
) -> list[Rejected]:  # fmt: skip
    """Return the presets in which nothing fits, with their own pool sizes and the least greedy layouts."""
    names = [role.name for role in roles]
    has = {solution.grouping for solution in solutions}
    rows = []
    for preset in NAMED:
        grouping = preset_grouping(preset, tuple(names), num_devices)
        if grouping is None or grouping in has or preset == "separation":
            continue
        placement = Placement.of(preset, names, num_devices)
        worst: tuple[int, str] | None = None
        for pool in placement.pools:
            pool_roles = [r for r in roles if placement.roles[r.name] in (pool.name, pool.within)]
            sizes = {r.name: placement.pool_of(r.name).size for r in pool_roles}
            if not pool_roles:
                continue
            over = least_over([(r, sizes[r.name]) for r in pool_roles], recorded, kind)
            where = f"each device of pool {pool.name!r} ({pool.size} x {kind.device.name})"
            if over is None:  # it is not for bytes that it is left out: a declared layout covers another number of devices
                worst = None
                break
            if worst is None or over > worst[0]:
                worst = over, where
        if worst is not None and worst[0] > 0:
            title = " | ".join(f"{' '.join(r for r in names if placement.roles[r] == p.name)} ({p.size})" for p in placement.pools)
            rows.append(Rejected(preset=preset, title=title, over_bytes=worst[0], where=worst[1]))
    return rows


def least_over(roles: Sequence[tuple[RoleSpec, int]], recorded: Recorded, kind: Kind) -> int | None:
    """Return by how many bytes roles on pools of these sizes miss one device, in the least greedy layouts (negative: room).

    Caches that are open are the smallest. ``None`` where the declared layouts of one do not cover its pool. Calls run one after the
    other: for every amount that the greediest may need while it runs, each role takes, of the layouts that need no more, the one
    that holds least all the time.
    """
    choices = [
        (working, number, least)
        for number, (role, size) in enumerate(roles)
        for working, least in _greed(role, size, kind, recorded.long_row(role))
    ]
    groups = base_groups(role for role, _ in roles)
    least: dict[int, Least] = {}
    totals = []
    for working, number, candidate in sorted(choices):
        least[number] = Least(*map(min, candidate, least.get(number, candidate)))
        if len(least) == len(roles):
            totals.append(working + int(least_of_all(least, groups)))
    return process_bytes(kind) + min(totals) - kind.device.memory_bytes if totals else None


@lru_cache(maxsize=256)
def _greed(role: RoleSpec, size: int, kind: Kind, longest: int) -> tuple[tuple[int, Least], ...]:
    """Return the bytes that a role works with and holds in each of its layouts, once for all plans that ask."""
    laid = (with_layouts(role, layouts) for layouts in every_layout(role, kind, size, longest))
    each = (role_bytes(x if kind.on_cpu else with_least(x), size, on_cpu=kind.on_cpu, longest=longest) for x in laid)
    return tuple(
        (estimate.working, Least(estimate.resident, estimate.resident - estimate.base, estimate.base)) for estimate in each
    )


def every_layout(role: RoleSpec, kind: Kind, size: int, long_row: int = 0) -> list[LayoutsOf]:
    """Return the layouts of a role on a pool, one for every rollout with each of the trainer's."""
    try:
        trains, rollouts = trains_of(role, kind, size, long_row), rollouts_of(role, kind, size) if role.rollout else [None]
    except LayoutError:
        return []
    return [{"train": t, **({"rollout": r} if r else {})} for t in trains for r in rollouts]


# -- hinges: the constant of the model that decides between two plans

LOGS = tuple(math.log(factor) for factor in (1.25, 1.6, 2.0, 2.8, 4.0))
"""How far constants are moved, each way."""
HALVINGS = 8
AT_MOST = {"exposed_reduction": 1.0}
"""Constants that have a largest value besides efficiencies."""


def hinges(best: Solution, others: Sequence[Solution]) -> tuple[Hinge | None, ...]:
    """Return, for each of some slower plans, the constant that has to change least for it to be as fast as the best one.

    Both keep their layouts. ``None`` where no constant alone does it within a factor of four, or where workers share cores.
    """
    if best.leaf.space.tables.cluster.shares_cores:
        return (None,) * len(others)
    perf = best.leaf.space.tables.perf
    by_perf: dict[PerfModel, float] = {}

    def seconds(made: PerfModel) -> float:
        if made not in by_perf:
            by_perf[made] = best.seconds_by(made)
        return by_perf[made]

    def behind(other: Solution, made: PerfModel) -> float:
        return other.seconds_by(made) - seconds(made)

    return tuple(_least(perf, partial(behind, other)) for other in others)


def _least(perf: PerfModel, behind: Callable[[PerfModel], float]) -> Hinge | None:
    nearest: tuple[float, str] | None = None
    for constant in fields(perf):
        for log in _turns(perf, constant.name, behind):
            if nearest is None or abs(log) < abs(nearest[0]):
                nearest = log, constant.name
    if nearest is None:
        return None
    log, name = nearest
    return Hinge(constant=name, now=getattr(perf, name), at=getattr(_moved(perf, name, log), name))


def _turns(perf: PerfModel, name: str, behind: Callable[[PerfModel], float]) -> list[float]:
    """Return the nearest turn upwards and the nearest downwards, as logarithms of the factor."""
    if not getattr(perf, name):
        return []
    turns = []
    for sign in (1.0, -1.0):
        near = 0.0
        for far in (sign * log for log in LOGS):
            if behind(_moved(perf, name, far)) <= 0:
                for _ in range(HALVINGS):
                    middle = (near + far) / 2
                    near, far = (near, middle) if behind(_moved(perf, name, middle)) <= 0 else (middle, far)
                turns.append(far)
                break
            near = far
    return turns


def _moved(perf: PerfModel, name: str, log: float) -> PerfModel:
    most = MOST_SHARE if name.endswith("efficiency") else AT_MOST.get(name, math.inf)
    return replace(perf, **{name: min(most, getattr(perf, name) * math.exp(log))})
