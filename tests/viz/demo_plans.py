"""A made-up plan of the shape the planner gives, for the tests of its picture."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import DeviceMemoryError
from hfsdk.core.layout import Layout
from hfsdk.core.placement import Placement
from hfsdk.core.plan import Alternative, Plan, PlannedCall, PlannedMemory, Rejected, Searched, Turn, Workload
from hfsdk.session.what_if import WhatIf

GB = 10**9
STEP = (
    ("actor", "generate", "generation", 14.0, (("reshard", 0.5), ("prefill", 1.5), ("decode", 12.0))),
    ("actor", "compute_log_probs", "preparation", 2.5, (("forward", 2.5),)),
    ("reference", "compute_log_probs", "preparation", 2.5, (("forward", 2.5),)),
    ("critic", "compute_values", "preparation", 2.4, (("forward", 2.4),)),
    ("reward", "compute_scores", "preparation", 2.4, (("forward", 2.4),)),
    ("ppo", "advantages", "preparation", 0.1, ()),
    ("critic", "update", "learning", 8.5, (("forward", 2.8), ("backward", 5.2), ("optimizer", 0.5))),
    ("actor", "update", "learning", 9.0, (("forward", 3.0), ("backward", 5.5), ("optimizer", 0.5))),
)
"""Role, method, phase, seconds on 128 devices, parts."""
FAMILY = "Exact among set partitions of the roles on pools of 1, 2 or 4 devices or of whole nodes, with tp, pp and dp that fit."


def timeline(placement: Placement, num_devices: int) -> tuple[PlannedCall, ...]:
    """The step on pools that each do one call at a time; a pool of half the devices takes twice as long."""
    clock: dict[str, float] = {}
    generated, phase_end, calls = 0.0, {"generation": 0.0, "preparation": 0.0, "learning": 0.0}, []
    for number, (role, method, phase, whole_s, parts) in enumerate(STEP):
        pool = placement.pool_of(role) if role in placement.roles else None
        slower = num_devices / pool.size if pool else 1.0
        ready = {"generation": 0.0, "preparation": generated, "learning": phase_end["preparation"]}[phase]
        lane = pool.name if pool else ""
        start, shift, drawn = max(clock.get(lane, 0.0), ready), 0.0, []
        for name, seconds in parts:
            drawn.append((name, shift, seconds * slower))
            shift += seconds * slower
        seconds = whole_s * slower
        clock[lane] = start + seconds
        generated = max(generated, start + seconds) if phase == "generation" else generated
        phase_end[phase] = max(phase_end[phase], start + seconds)
        calls.append(PlannedCall(
            id=number, role=role, method=method, phase=phase, pool=lane, devices=pool.devices if pool else (), start_s=start,
            parts=tuple(drawn), seconds=seconds, num_rows=1024,
        ))  # fmt: skip
    return tuple(calls)


def memory(placement: Placement, num_devices: int) -> tuple[PlannedMemory, ...]:
    sizes = {"actor": (34, 9), "critic": (20, 9), "reference": (9, 1), "reward": (9, 1)}
    found = []
    for pool in placement.pools:
        share = num_devices / pool.size / 2
        roles = {
            name: {"weights": 0, "resident": round(sizes[name][0] * GB * share * 0.8), "working": sizes[name][1] * GB}
            for name, home in placement.roles.items() if home == pool.name
        }  # fmt: skip
        found.append(PlannedMemory(
            pool=pool.name, devices=pool.devices, device_name="A100-80GB", exists=80 * GB, process=3 * GB // 2, roles=roles,
        ))  # fmt: skip
    return tuple(found)


def alternative(preset: str, num_devices: int, **words: Any) -> Alternative:
    roles = ["actor", "critic", "reference", "reward"]
    placement = Placement.of(preset, roles, num_devices)
    calls = timeline(placement, num_devices)
    seconds = max(c.start_s + c.seconds for c in calls)
    sizes = {role: placement.pool_of(role).size for role in roles}
    layouts = {role: {"train": Layout(tp=math.gcd(8, size)).fill(size)} for role, size in sizes.items()}
    actor = sizes["actor"]
    layouts["actor"]["rollout"] = Layout(tp=math.gcd(4, actor)).fill(actor)
    title = " | ".join(f"{' '.join(r for r in roles if placement.roles[r] == p.name)} ({p.size})" for p in placement.pools)
    return Alternative(
        title=title, preset=preset, placement=placement, layouts=layouts, seconds=seconds, band=(seconds * 0.9, seconds * 1.12),
        calls={f"{c.role}.{c.method}": c.seconds for c in calls}, facts={}, peak_bytes=60 * GB, timeline=calls,
        memory=memory(placement, num_devices), **words,
    )  # fmt: skip


def plan(cluster: str = "16x8 A100-80GB", price: float = 2.0, steps: int = 500) -> Plan:
    spec = ClusterSpec.parse(cluster, price)
    best = alternative("colocate", spec.num_devices)
    others = []
    if spec.num_devices >= 4:
        others = [
            alternative("split", spec.num_devices, why="+14 s of actor.generate, -5 s of preparation", too_close=True),
            alternative("standalone", spec.num_devices, why="+42 s of actor.generate: 32 devices have a quarter of the bandwidth"),
        ]
    made = Plan(
        algorithm="PPO", cluster=spec, workload=Workload(steps=steps), best=best, calls=best.timeline, memory=best.memory,
        runners_up=tuple(others), models=dict.fromkeys(["actor", "critic", "reference", "reward"], "llama-70b"),
        rejected=(Rejected(preset="interleaving", title="", over_bytes=12 * GB, where="each device of pool 'all'"),),
        search=Searched(family=FAMILY, num_considered=1234, num_pruned=1200, num_layouts=456, seconds=0.087),
    )  # fmt: skip
    turn = Turn(field="response_tokens", value=4096, title="split", seconds=71.0, before="colocate")
    made.__dict__["sensitivity"] = (turn,)
    return made


def plan_data(**options: Any) -> dict[str, Any]:
    """Return what ``Plan.view()`` returns."""
    return plan(**options).view()


def no_plan() -> dict[str, Any]:
    return {**plan_data(), "best": None, "runners_up": [], "rejected": [], "sensitivity": []}


def answer(cluster: ClusterSpec, workload: Workload, placement: str, layouts: Any) -> Plan:
    """Stands for the planner: the made-up plan, slower with longer responses; 4 devices are too few, and long ones want a split."""
    if cluster.num_devices < 4:
        raise DeviceMemoryError(f"the models do not fit: {cluster} misses 40.0 GB on each device; 4 devices would do")
    made = plan(str(cluster), cluster.price_per_device_hour)
    slower = workload.response_tokens / 1024 * workload.prompts / 1024 * 128 / cluster.num_devices
    wanted = "split" if workload.response_tokens > 2048 else "colocate"
    ranked = sorted((made.best, *made.runners_up), key=lambda a: a.preset != wanted)
    if placement != "auto":
        ranked.sort(key=lambda a: a.preset != placement)
    scaled = [
        replace(a, seconds=a.seconds * slower, band=(a.band[0] * slower, a.band[1] * slower), why=a.why if i else "",
                timeline=tuple(replace(c, start_s=c.start_s * slower, seconds=c.seconds * slower, parts=()) for c in a.timeline))
        for i, a in enumerate(ranked)
    ]  # fmt: skip
    return replace(
        made,
        workload=replace(workload, steps=500),
        best=scaled[0],
        calls=scaled[0].timeline,
        memory=scaled[0].memory,
        runners_up=tuple(scaled[1:]),
    )


def what_if(cluster: str = "16x8 A100-80GB", answer: Any = answer, **options: Any) -> WhatIf:
    spec = ClusterSpec.parse(cluster, 2.0)
    return WhatIf(answer, spec, Workload(**options), roles=["actor", "critic"], rollouts=["actor"], max_tokens=8192)
