"""PPO steps of published systems as plans: who lives where, in which layouts, how the weights get to the rollout.

A :class:`SystemPlan` says what a system does; :func:`ppo_step` replays one PPO step of it with ``PerfModel``'s seconds and the
rules of the simulated runtime (a pool runs its calls one after the other; a call starts when its pool is free and its inputs
are there)::

    HybridFlow       any placement; rollout in a layout of its own; a rank receives its missing shard alone
    DeepSpeed-Chat   everything on all devices, ZeRO-3; the whole model gathered before every rollout
    OpenRLHF         every model on devices of its own, ZeRO-3; vLLM too, to which the gathered model is broadcast
    NeMo-Aligner     actor and reference on one half, critic and reward on the other; the training engine generates

What their engines do stands in ``engines_of_2024.py``.

Memory: bf16 weights, fp32 gradients, masters and Adam moments (18 bytes a trained parameter, HybridFlow section 8.1), of which
the last 12 are sharded over dp (Megatron's distributed optimizer), with ZeRO-3 everything; frozen models 2. What is left of 90 %
of a device is the KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np
from engines_of_2024 import DEEPSPEED_CHAT, LEAST_PP, NEMO_ALIGNER, OPENRLHF, System

from hfsdk.core.checks import checked
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.layout import Layout
from hfsdk.core.spec import ModelSpec
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.planner.perf.setup import Links, Setup, parameters

ROLES = ("actor", "reference", "critic", "reward")
TRAINED = ("actor", "critic")
USABLE = 0.9
"""Share of a device's memory that is planned for."""
WORKING_BYTES = 6e9
"""Activations, logits and buffers of a device."""


@dataclass(frozen=True, kw_only=True)
class PpoWorkload:
    """One PPO step: HybridFlow's workload by default (section 8.1)."""

    prompts: int = 1024
    prompt_tokens: int = 1024
    response_tokens: int = 1024
    mini_batches: int = 8


@dataclass(frozen=True, kw_only=True)
class SystemPlan:
    """What a system does with its devices."""

    system: System
    pools: Mapping[str, int]
    """Roles that share devices, e.g. ``"actor reference"`` -> how many; ``"rollout"`` is a pool of its own or the actor's."""
    layouts: Mapping[str, Layout]
    """Pool -> layout of training and forward passes, filled."""
    rollout: Layout
    """Layout of one replica of the rollout."""

    def pool_of(self, role: str) -> str:
        """Return the pool of a role; the rollout is the actor's where it has none."""
        found = next((names for names in self.pools if role in names.split()), None)
        return found or self.pool_of("actor")

    def first_device(self, pool: str) -> int:
        """Return the number of a pool's first device: pools lie side by side in order."""
        before = 0
        for names, count in self.pools.items():
            if names == pool:
                return before
            before += count
        raise KeyError(pool)

    def __str__(self) -> str:
        pools = ", ".join(
            f"{names.replace(' ', '+')} {n} ({self.layouts.get(names, self.rollout)})" for names, n in self.pools.items()
        )
        return f"{self.system.name}: {pools}; rollout tp{self.rollout.tp}"


@dataclass(frozen=True, kw_only=True)
class PpoStep:
    """Seconds of one step."""

    total: float
    transition: float
    generation: float
    """Without the transition."""
    calls: Mapping[str, float]


@checked
def static_bytes(plan: SystemPlan, spec: ModelSpec, pool: str) -> float:
    """Return the bytes that the models of a pool hold on each of its devices all the time, without the rollout."""
    layout = plan.layouts.get(pool)
    if layout is None:
        return 0.0
    dp = layout.num_replicas
    each = 18 / dp if plan.system.traits.gathers_weights else 6 + 12 / dp
    trained = sum(role in TRAINED for role in pool.split())
    frozen = sum(role in ("reference", "reward") for role in pool.split()) * (2 / dp if plan.system.traits.gathers_weights else 2)
    return parameters(spec) * (each * trained + frozen) / (layout.tp * layout.pp)


@checked
def kv_bytes(plan: SystemPlan, spec: ModelSpec, cluster: ClusterSpec) -> float:
    """Return the bytes left for the KV cache on a rollout device; at most 0 where the plan does not fit."""
    pool = plan.pool_of("rollout")
    copy = 2 * parameters(spec) / (plan.rollout.tp * plan.rollout.pp)
    layout = plan.layouts.get(pool)
    if layout is not None and not plan.system.traits.gathers_weights and layout.tp % plan.rollout.tp == 0:
        copy -= 2 * parameters(spec) / (layout.tp * layout.pp)  # the training shard is part of it
    return USABLE * cluster.devices[0].memory_bytes - WORKING_BYTES - static_bytes(plan, spec, pool) - copy


@checked
def fits(plan: SystemPlan, spec: ModelSpec, cluster: ClusterSpec) -> bool:
    """Return whether every pool has memory for its models, and the rollout for one row of 2,048 tokens."""
    room = USABLE * cluster.devices[0].memory_bytes - WORKING_BYTES
    row = 2048 * spec.kv_bytes_per_token() / min(plan.rollout.tp, spec.num_kv_heads)
    return all(static_bytes(plan, spec, pool) <= room for pool in plan.pools) and kv_bytes(plan, spec, cluster) >= row


@lru_cache(maxsize=4096)
def _links(cluster: ClusterSpec, first: int, count: int, layout: Layout) -> Links:
    return Links.of(cluster, range(first, first + count), layout)


def _recompute(system: System, role: str) -> str:
    """ZeRO-3 systems train with gradient checkpointing (their examples switch it on)."""
    return "full" if system.traits.gathers_weights and role in TRAINED else ""


@checked
def describe(plan: SystemPlan, role: str, spec: ModelSpec, cluster: ClusterSpec) -> Setup:
    """Return a role of the plan as ``PerfModel`` needs it."""
    pool = plan.pool_of(role)
    count = plan.pools[pool]
    layout = plan.layouts.get(pool) or replace(plan.rollout, dp=count // plan.rollout.size)
    first = plan.first_device(pool)
    whole = replace(plan.rollout, dp=plan.pools[plan.pool_of("rollout")] // (plan.rollout.tp * plan.rollout.pp))
    home = plan.pool_of("rollout")
    return Setup(
        spec=spec, layout=layout, device=cluster.devices[0], links=_links(cluster, first, count, layout),
        head="lm" if role in ("actor", "reference", "rollout") else "scalar", recompute=_recompute(plan.system, role),
        rollout=plan.rollout, rollout_links=_links(cluster, plan.first_device(home), plan.pools[home], whole),
        max_num_seqs=plan.system.rows_of(spec, plan.rollout.tp),
        kv_cache_bytes=max(1, int(kv_bytes(plan, spec, cluster))), distributed=True, traits=plan.system.traits,
        micro_batch_tokens=4096,
    )  # fmt: skip


@checked
def transition_s(perf: PerfModel, plan: SystemPlan, spec: ModelSpec, cluster: ClusterSpec, prompts: int = 1024) -> float:
    """Return the seconds from trained weights to a rollout that has them."""
    actor = describe(plan, "actor", spec, cluster)
    if not plan.system.generates_apart:
        return 0.0
    if not plan.system.traits.gathers_weights:
        missing = 1 / plan.rollout.tp - 1 / (actor.layout.tp * actor.layout.pp) if plan.system.waits_on_host else 0.0
        host = 2 * parameters(spec) * missing / (actor.device.host_bandwidth * perf.link_efficiency)
        return perf.reshard(actor) + 2 * host  # there, and away before training
    gathered = perf.gather(actor) + perf.rewrite(actor)
    if plan.pool_of("rollout") == plan.pool_of("actor"):  # gathered anew for every batch of rows
        replicas = plan.pools[plan.pool_of("rollout")] // plan.rollout.tp
        return gathered * math.ceil(prompts / replicas / plan.system.rows_of(spec, plan.rollout.tp))
    return gathered + perf.move(2 * parameters(spec), cluster.inter_node, spec.num_layers)


@checked
def ppo_step(perf: PerfModel, plan: SystemPlan, spec: ModelSpec, cluster: ClusterSpec, work: PpoWorkload | None = None) -> PpoStep:
    """Replay one PPO step: generate; reference log-probs, values, scores; updates of critic and actor."""
    work = work or PpoWorkload()
    perf = replace(perf, **plan.system.constants)
    transition = transition_s(perf, plan, spec, cluster, work.prompts)
    home = plan.pool_of("rollout")
    replicas = plan.pools[home] // (plan.rollout.tp * plan.rollout.pp)
    actor = describe(plan, "actor", spec, cluster)
    mine = -(-work.prompts // replicas)
    prompts, responses = np.full(mine, work.prompt_tokens), np.full(mine, work.response_tokens)
    generation = perf.prefill(actor, prompts) + perf.decode(actor, prompts, responses)
    calls = {"generate": transition + generation}
    for role, method in (("reference", "log_probs"), ("critic", "values"), ("reward", "scores")):
        setup = describe(plan, role, spec, cluster)
        rows = np.full(-(-work.prompts // setup.layout.num_replicas), work.prompt_tokens + work.response_tokens)
        swapped = 2 * perf.onload(setup, "weights") if plan.system.swaps and role == "reference" else 0.0
        calls[f"{role} {method}"] = perf.forward(setup, rows) + swapped
    for role in ("critic", "actor"):
        setup = describe(plan, role, spec, cluster)
        count = -(-work.prompts // work.mini_batches // setup.layout.num_replicas)
        rows = np.full(count, work.prompt_tokens + work.response_tokens)
        swapped = 2 * perf.onload(setup, "optimizer") if plan.system.swaps and role == "actor" else 0.0
        calls[f"{role} update"] = work.mini_batches * (sum(perf.train(setup, rows)) + perf.optimizer(setup) + swapped)
    return PpoStep(total=_makespan(plan, calls), transition=transition, generation=generation, calls=calls)


def _makespan(plan: SystemPlan, calls: Mapping[str, float]) -> float:
    clocks = dict.fromkeys(plan.pools, 0.0)
    ready = calls["generate"]
    clocks[plan.pool_of("rollout")] = clocks[plan.pool_of("actor")] = ready
    prepared = ready
    for name, seconds in calls.items():
        if name == "generate":
            continue
        pool = plan.pool_of(name.split()[0])
        begin = max(clocks[pool], prepared if name.endswith("update") else ready)
        clocks[pool] = begin + seconds
        if not name.endswith("update"):
            prepared = max(prepared, clocks[pool])
    return max(clocks.values())


# -- what each system may choose from


def _trained(system: System, devices: int, spec: ModelSpec) -> list[Layout]:
    """Layouts in which a system can train on so many devices."""
    if system.traits.gathers_weights:
        return [Layout(dp=devices)]
    found = list(_megatron(devices, spec))
    if not system.own_layout:
        return found
    least = min(LEAST_PP[spec.num_layers], max(1, devices // 8))
    own = [layout for layout in found if layout.tp == min(8, devices) and layout.pp >= least]
    return sorted(own, key=lambda layout: layout.pp)[:1]


def _megatron(devices: int, spec: ModelSpec) -> Iterator[Layout]:
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 3, 4, 6, 8, 12, 16):
            if tp * pp <= devices and devices % (tp * pp) == 0 and spec.num_layers % pp == 0:
                yield Layout(tp=tp, pp=pp, dp=devices // (tp * pp))


def _rollouts(devices: int) -> Iterator[Layout]:
    return (Layout(tp=tp) for tp in (1, 2, 4, 8) if tp <= devices)


@checked
def placed(system: System, pools: Mapping[str, int], perf: PerfModel, spec: ModelSpec, cluster: ClusterSpec) -> SystemPlan | None:
    """Return the fastest plan with these pools over all layouts that fit, or ``None`` where none does.

    Layouts of pools without the actor are chosen first, each by its own calls; then the actor's together with the rollout's.
    """
    best, least = None, np.inf
    chosen: dict[str, Layout] = {}
    for pool, count in pools.items():
        if "actor" not in pool.split() and pool != "rollout":
            found = _fastest(system, pools, pool, _trained(system, count, spec), perf, spec, cluster)
            if found is None:
                return None
            chosen[pool] = found
    own = next(pool for pool in pools if "actor" in pool.split())
    for layout in _trained(system, pools[own], spec):
        same = [Layout(tp=layout.tp, pp=layout.pp)]
        for rollout in _rollouts(pools.get("rollout", pools[own])) if system.generates_apart else same:
            plan = SystemPlan(system=system, pools=pools, layouts={**chosen, own: layout}, rollout=rollout)
            if pools[plan.pool_of("rollout")] % rollout.size == 0 and fits(plan, spec, cluster):
                total = ppo_step(perf, plan, spec, cluster).total
                if total < least:
                    best, least = plan, total
    return best


def _fastest(
    system: System,
    pools: Mapping[str, int],
    pool: str,
    options: list[Layout],
    perf: PerfModel,
    spec: ModelSpec,
    cluster: ClusterSpec,
) -> Layout | None:
    best, least = None, np.inf
    work, room = PpoWorkload(), USABLE * cluster.devices[0].memory_bytes - WORKING_BYTES
    for layout in options:
        plan = SystemPlan(system=system, pools=pools, layouts={pool: layout}, rollout=Layout())
        if static_bytes(plan, spec, pool) > room:
            continue
        seconds = 0.0
        for role in pool.split():
            setup = Setup(
                spec=spec, layout=layout, device=cluster.devices[0], traits=system.traits, head="scalar", micro_batch_tokens=4096,
                links=_links(cluster, plan.first_device(pool), pools[pool], layout), recompute=_recompute(system, role),
                distributed=True,
            )  # fmt: skip
            rows = np.full(-(-work.prompts // layout.num_replicas), work.prompt_tokens + work.response_tokens)
            seconds += perf.forward(setup, rows)
            if role in TRAINED:
                part = rows[: max(1, len(rows) // work.mini_batches)]
                seconds += work.mini_batches * (sum(perf.train(setup, part)) + perf.optimizer(setup))
        if seconds < least:
            best, least = layout, seconds
    return best


def _five(devices: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield devices of actor, critic, each frozen model and the rollout, in sixteenths of all."""
    unit = max(1, devices // 16)
    for a, c, f in product((2, 4, 6, 8), (1, 2, 4, 6), (1, 2)):
        r = devices - unit * (a + c + 2 * f)
        if r > 0 and (r & (r - 1) == 0 or r % 8 == 0):
            yield unit * a, unit * c, unit * f, r


@checked
def best_plan(system: System, perf: PerfModel, spec: ModelSpec, cluster: ClusterSpec) -> SystemPlan | None:
    """Return the fastest plan a system can run on the whole cluster, or ``None`` where it runs out of memory.

    HybridFlow chooses among colocate, split and standalone (its Figure 12), OpenRLHF how many devices each model gets.
    """
    devices = cluster.num_devices
    everything = {" ".join(ROLES): devices}
    halves = {"actor reference": devices // 2, "critic reward": devices // 2}
    if system.name == DEEPSPEED_CHAT.name:
        options: list[Mapping[str, int]] = [everything]
    elif system.name.startswith(NEMO_ALIGNER.name):
        options = [halves]
    elif system.name == OPENRLHF.name:
        names = ("actor", "critic", "reference", "reward", "rollout")
        options = [dict(zip(names, (a, c, f, f, r), strict=True)) for a, c, f, r in _five(devices)]
    else:
        options = [everything, halves, *standalone(devices)]
    plans = [plan for pools in options if (plan := placed(system, pools, perf, spec, cluster)) is not None]
    return min(plans, key=lambda plan: ppo_step(perf, plan, spec, cluster).total, default=None)


@checked
def standalone(devices: int) -> list[Mapping[str, int]]:
    """Return placements in which every model has devices of its own, the actor the most, as HybridFlow's best at 128 devices."""
    if devices < 8:
        return []
    eighth, names = devices // 8, ("actor", "critic", "reference", "reward")
    return [dict(zip(names, (eighth * n for n in shares), strict=True)) for shares in ((4, 2, 1, 1), (2, 2, 2, 2))]


@checked
def compare_placements(seconds: Mapping[str, float]) -> tuple[str, float]:
    """Return the fastest placement of given predicted step seconds, and by which factor the next one is slower.

    Example: ``compare_placements({"colocate": 10.0, "split": 12.0})`` is ``("colocate", 1.2)``.
    """
    order = sorted(seconds, key=lambda name: seconds[name])
    return order[0], seconds[order[1]] / seconds[order[0]] if len(order) > 1 else 1.0
