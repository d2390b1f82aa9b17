"""``plan_step``: from recorded calls to a ``Plan``, by a search, or to a clear error where there is none."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import DeviceMemoryError, LayoutError, OptionError, PlacementError
from hfsdk.core.placement import Placement
from hfsdk.core.plan import Again, Alternative, Plan, PlannedCall, PlannedMemory, Searched, Workload
from hfsdk.core.roles import RoleSpec
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.planner.runners_up import Bands, alternative, every_layout, hinges, least_over, preset_grouping, rejected_presets
from hfsdk.planner.search.candidates import Tables, process_bytes
from hfsdk.planner.search.fitting import LayoutsOf
from hfsdk.planner.search.items import Item, Job
from hfsdk.planner.search.pools import Kind, kinds_of
from hfsdk.planner.search.recorded import Recorded
from hfsdk.planner.search.search import FAMILY, FROM_MEMORY, OVER_STEPS, SHARING_CORES, Search
from hfsdk.planner.search.solution import Solution

MOST_NODES = 1024
"""Nodes up to which the smallest cluster that would do is looked for."""


def _run(search: Search) -> Search:
    search.prepare()
    search.run()
    return search


def plan_step(
    recorded: Recorded,
    roles: Sequence[RoleSpec],
    cluster: ClusterSpec,
    workload: Workload,
    perf: PerfModel | None = None,
    *,
    top: int = 5,
    by_placement: bool = False,
    shadows: bool = True,
    error: float | Mapping[str, float] | None = None,
    placement: str = "auto",
    again: Again | None = None,
) -> Plan:
    """Return the best placement and layouts for one step; pure: no session, no runtime.

    Args:
        recorded: the step's calls, e.g. from ``hfsdk.session.recording.record_step``.
        roles: the roles as declared; those with a model are placed. Layouts named in ``role.auto`` are searched, others kept.
        cluster: the devices.
        workload: the workload that the calls were recorded for (its prices and steps; the lengths are in ``recorded``).
        perf: predicts seconds; by default the presets.
        top: how many plans to return, the best one included.
        by_placement: whether two of them may share devices in the same way and differ in pool sizes.
        shadows: whether shadows (separation) are in the family.
        error: relative error of predicted seconds, for bands: a number, or by method, e.g. ``{"generate": 0.15, "": 0.1}``; by
            default what published timings say of the presets (:data:`~hfsdk.planner.runners_up.PRESET_BANDS`).
        placement: a preset's name (``"split"``, ...): it fixes which roles share devices; sizes and layouts are searched.
        again: kept as ``plan.again``.

    Raises:
        PlacementError: there is no such preset, or not with these roles.
        DeviceMemoryError: nothing fits; says by how many bytes, and the smallest cluster that would do.
        LayoutError: a declared layout covers no pool of this cluster.
        OptionError: ``top`` is below 1.
    """
    if top < 1:
        raise OptionError(f"top is how many plans to return, at least 1; got {top}")
    began = time.perf_counter()
    models = [role for role in roles if role.model is not None]
    tables = Tables(cluster, perf or PerfModel())
    kinds = tables.kinds
    _check_declared(models, kinds)
    only = None if placement == "auto" else _only(placement, models, cluster)

    def search_with(tables: Tables) -> Search:
        search = Search.over(models, recorded, tables, top=top, by_placement=by_placement, shadows=shadows, only=only)
        if not search.spaces:
            raise PlacementError(
                f"placement {placement!r} is not among those that are searched for these roles; use 'auto', or place it yourself: "
                f"session.place({placement!r})"
            )
        return _run(search)

    searches = [search_with(tables)]
    # Nothing fits with the caches that rollouts should have: the least ones are tried before a plan is refused.
    if searches[0].sizes_are_open and not searches[0].best.by_key:
        searches = [search_with(tables.but(least=True))]
    # Rollouts were timed with the cache they would have alone, which is a lower bound: the best plans are timed again with what is
    # left.
    elif searches[0].sizes_matter:
        searches.append(_run(searches[0].again(tables.but(alone=False))))
    search, by_key = searches[0], searches[-1].best.by_key
    solutions = sorted(by_key.values(), key=lambda solution: solution.step_seconds)[:top]
    if not solutions:
        raise _nothing_fits(models, recorded, cluster, placement)
    bands = Bands(error)
    best, first = solutions[0], alternative(solutions[0], bands)
    searched = Searched(
        family=_family(search, cluster, len(first.steps_s)),
        num_considered=(considered := search.num_placements()), num_pruned=considered - search.num_leaves,
        num_layouts=sum(s.spaces[0].tables.num_predicted for s in searches), seconds=time.perf_counter() - began,
        tables_s=sum(s.tables_s for s in searches),
    )  # fmt: skip
    return Plan(
        algorithm=recorded.algorithm, cluster=cluster, workload=workload, best=first, calls=planned_calls(best),
        memory=planned_memory(best), runners_up=tuple(_runner_up(solution, bands, best, first) for solution in solutions[1:]),
        rejected=() if only else tuple(rejected_presets(list(by_key.values()), models, recorded, kinds[0], cluster.num_devices)),
        models={role.name: str(role.model) for role in models}, roles={role.name: role for role in models}, search=searched,
        band_words=bands.words(best.methods), again=again, find_hinges=partial(hinges, best, solutions[1:]),
    )  # fmt: skip


def _family(search: Search, cluster: ClusterSpec, steps: int) -> str:
    """Say among which plans was searched, and how they were compared."""
    words = FAMILY + SHARING_CORES * cluster.shares_cores + (OVER_STEPS.format(steps) if steps else "")
    return words + FROM_MEMORY * search.sizes_are_open + search.shortened


def _nothing_fits(
    models: Sequence[RoleSpec], recorded: Recorded, cluster: ClusterSpec, placement: str
) -> DeviceMemoryError:  # fmt: skip
    """Return the error where nothing fits; it names a cluster that would suffice, or another placement."""
    if placement == "auto":
        return DeviceMemoryError(_does_not_fit(models, recorded, cluster))
    return DeviceMemoryError(
        f"nothing fits on {cluster} with placement {placement!r}, whatever the sizes of its pools and the layouts; "
        "placement 'auto' looks at the others as well"
    )


def _only(placement: str, roles: Sequence[RoleSpec], cluster: ClusterSpec) -> object:
    """Return the grouping of a preset.

    Raises:
        PlacementError: there is no such preset, or not with these roles.
    """
    names = [role.name for role in roles]
    Placement.of(placement, names, cluster.num_devices)
    return preset_grouping(placement, tuple(names), cluster.num_devices)


def _runner_up(solution: Solution, bands: Bands, best: Solution, first: Alternative) -> Alternative:
    return replace(alternative(solution, bands, best, first), timeline=planned_calls(solution), memory=planned_memory(solution))


def planned_calls(solution: Solution) -> tuple[PlannedCall, ...]:
    """Return the calls of a plan on a timeline that starts at 0."""
    leaf, space = solution.leaf, solution.leaf.space
    placement, rows = leaf.placement(), solution.job_phases
    seconds = solution.job_seconds
    grouping = space.arrangements[leaf.arrangement].grouping
    ends = space.replay.ends(seconds[None], grouping)[0]
    calls = []
    for number, (job, before, phases) in enumerate(rows):
        pool = placement.pool_of(job.item) if job.item else None
        parts, at = [], before
        for name, took in phases:
            parts.append((name, at, took))
            at += took
        calls.append(PlannedCall(
            id=number + 1, role=job.role, method=job.method, phase=job.phase, pool=pool.name if pool else "",
            devices=pool.devices if pool else (), start_s=float(ends[number] - seconds[number]),
            parts=tuple(p for p in parts if p[2] and pool), seconds=float(seconds[number]),
            after=tuple(source + 1 for source in job.after), num_rows=job.call.num_rows if job.call else 0,
            mini_batches=round(job.call.num_rows / len(job.call.mini_batches[0])) if job.call and job.call.mini_batches else 0,
        ))  # fmt: skip
    return tuple(calls)


def planned_memory(solution: Solution) -> tuple[PlannedMemory, ...]:
    """Return the bytes that devices hold, devices that are alike together."""
    leaf, space = solution.leaf, solution.leaf.space
    devices = leaf.devices()
    assert devices is not None
    by_block: dict[int, dict[str, dict[str, int]]] = {}
    for b in range(len(leaf.blocks)):
        by_block[b] = {}
        for name, estimate in solution.held_on(b).items():
            numbers = {part: value for part, value in asdict(estimate).items() if isinstance(value, int)}
            by_block[b][name] = {**numbers, "resident": estimate.resident, "working": estimate.working}
    placement, rows = leaf.placement(), []
    for b, host in enumerate(leaf.hosts):
        # Devices of a part are listed with the part, which adds what lives on its host.
        inside = {d for p, h in enumerate(leaf.hosts) if h == b for d in devices[p]}
        own = tuple(d for d in devices[b] if d not in inside)
        if not own:
            continue
        kind, roles = leaf.kind(b), {**(by_block[host] if host >= 0 else {}), **by_block[b]}
        name = placement.pool_of(space.mode.items[leaf.blocks[b][0]].name).name
        rows.append(PlannedMemory(
            pool=name, devices=own, device_name=kind.device.name, exists=kind.device.memory_bytes, process=process_bytes(kind),
            roles=roles,
        ))  # fmt: skip
    return tuple(sorted(rows, key=lambda row: row.devices[0]))


# -- where there is no plan


def _check_declared(roles: Sequence[RoleSpec], kinds: Sequence[Kind]) -> None:
    """Check that every role's declared layouts cover some pool of the cluster.

    Raises:
        LayoutError: names the role, its layout, and the pools there are.
    """
    for role in roles:
        if not any(every_layout(role, kind, int(size)) for kind in kinds for size in kind.sizes):
            both = ("train", role.train), ("rollout", role.rollout)
            declared = ", ".join(f"{use} '{layout}'" for use, layout in both if layout)
            sizes = sorted({int(size) for kind in kinds for size in kind.sizes})
            exist = ", ".join(map(str, sizes[:6])) + (f", ..., {sizes[-1]}" if len(sizes) > 6 else "")
            raise LayoutError(
                f"{role.name}'s declared layouts ({declared}) together cover no pool of this cluster; pools have {exist} devices. "
                'Leave them out ("auto"), or give sizes whose product is one of these.'
            )


class _ByBytes(Tables):
    """A search by bytes alone: every call takes no time, so that whatever fits is a best plan."""

    def seconds(self, item: Item, job: Job, layouts: LayoutsOf, kind: Kind, size: int) -> float:
        return 0.0


def fits(roles: Sequence[RoleSpec], recorded: Recorded, cluster: ClusterSpec) -> bool:
    """Whether any placement of the roles on a cluster fits into memory; those without shadows are looked at first."""
    tables = _ByBytes(cluster, PerfModel(), least=True)
    return any(Search.over(roles, recorded, tables, top=1, shadows=shadows).run() for shadows in (False, True))


def smallest_cluster(roles: Sequence[RoleSpec], recorded: Recorded, cluster: ClusterSpec) -> ClusterSpec | None:
    """Return the smallest cluster of nodes like the first one on which the roles fit: fuller nodes up to 8 devices, then more."""
    device = cluster.node_devices[0][0]
    node_size = len(cluster.node_devices[0])

    def of(nodes: int, size: int) -> ClusterSpec:
        cores = cluster.node_cores[:1] * nodes
        return replace(cluster, node_devices=((device,) * size,) * nodes, node_cores=cores)

    while len(cluster.node_devices) == 1 and node_size < 8:
        node_size += 1
        if fits(roles, recorded, of(1, node_size)):
            return of(1, node_size)
    low, high = 1, 2
    while not fits(roles, recorded, of(high, node_size)):
        low, high = high, high * 2
        if high > MOST_NODES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(roles, recorded, of(middle, node_size)) else (middle, high)
    return of(high, node_size)


def _least_over(roles: Sequence[RoleSpec], recorded: Recorded, kinds: Sequence[Kind]) -> tuple[float, str, int]:
    """Return (bytes too much, device, pool size) where roles on one pool miss least; infinite where no size has layouts of all."""
    misses = [
        (over, kind.device.name, int(size))
        for kind in kinds for size in kind.sizes
        if (over := least_over([(role, int(size)) for role in roles], recorded, kind)) is not None
    ]  # fmt: skip
    return min(misses, default=(math.inf, "", 0))


def _does_not_fit(roles: Sequence[RoleSpec], recorded: Recorded, cluster: ClusterSpec) -> str:
    kinds = kinds_of(cluster)
    worst, device, role = max(((*_least_over([role], recorded, kinds)[:2], role) for role in roles), key=lambda miss: miss[0])
    over, together, size = _least_over(roles, recorded, kinds)
    if worst > 0:
        what = f"{role.name} ({role.model}) alone is too much by {worst / 1e9:.1f} GB for each {device} of any pool"
    elif 0 < over < math.inf:
        what = (
            f"all roles together on {size} devices are too much by {over / 1e9:.1f} GB on each {together}, "
            "and no way to spread them fits"
        )
    else:
        what = "each role fits alone, but their declared layouts cover no pools that lie side by side with room for all"
    enough = smallest_cluster(roles, recorded, cluster)
    none = f"No number of these nodes up to {MOST_NODES} would do."
    do = f"The smallest cluster that would do is '{enough}'." if enough else none
    return f"nothing fits on {cluster}: {what}. {do} What also helps: {', '.join(_also(roles, recorded, kinds))}."


def _also(roles: Sequence[RoleSpec], recorded: Recorded, kinds: Sequence[Kind]) -> Iterator[str]:
    """Yield the options that take less memory and that some role does not have yet."""
    if any(getattr(role, use) and use not in role.auto for role in roles for use in ("train", "rollout")):
        yield 'layouts left open ("auto"), where they are declared'
    if any(role.optimizer and not role.optimizer.distributed for role in roles):
        yield "optimizer=AdamW(distributed=True)"
    if not all(role.offload for role in roles) and not all(kind.on_cpu for kind in kinds):
        yield "offload=True"
    if any(role.trainable and role.recompute != "full" for role in roles):
        yield "recompute='full'"
    if any(role.dtype == "fp32" for role in roles):
        yield "dtype='bf16'"
    row = max(map(recorded.long_row, roles), default=0)
    alone = f"rows shorter than {row:,} tokens (one longer than micro_batch_tokens runs alone)"
    yield alone if row else "fewer micro_batch_tokens"
    if any(role.could_adapt for role in roles):
        yield "lora=hf.LoRA(rank=16)"
