"""The roles of a simulated session: their state from call to call, the rows their ranks get, the bytes devices hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hfsdk.core.arguments import Generation
from hfsdk.core.dataflow import Call
from hfsdk.core.frozen_bases import HeldBase, base_key, held_by_others
from hfsdk.core.methods import method_of
from hfsdk.core.placement import Pool
from hfsdk.core.response_lengths import ResponseLengths, draw_lengths
from hfsdk.core.roles import RoleSpec
from hfsdk.core.rollout_weights import RolloutWeights
from hfsdk.core.runtime import Order
from hfsdk.core.table import Array
from hfsdk.engine.calls.dispatch import one_array_each
from hfsdk.engine.simulation.values import Estimate, PredictedBytes, Timeline, lengths_of, response_lengths, values_of

BASE_COPIED = "base_bytes_copied"
"""Attribute of a span in which a base went to the rollout: bytes of it that a rank writes."""


@dataclass(eq=False)
class SimulatedRole:
    """A role on its pool."""

    spec: RoleSpec
    pool: Pool
    on_cpu: bool
    num_updates: int = 0
    weights: RolloutWeights = field(init=False)
    """The rollout's, if it is not apart."""
    resharded_s: float | None = None
    """Seconds of the last transition, of a role apart those of its side of it; ``None`` before the first."""
    apart: tuple[RoleSpec, RoleSpec] | None = None
    """The trained role and the shadow between which it was."""
    estimate: Estimate | None = None
    awake: bool = False
    """Whether the weights and cache of a rollout that sleeps (``hfsdk.engine.generation.vllm_sleep``) are there."""

    def __post_init__(self) -> None:
        spec = self.spec
        shared = self.on_cpu and spec.rollout_options.cpu_weights == "shared" and spec.lora is None
        alone = shared and spec.rollout is not None and not spec.shadow_of
        self.weights = RolloutWeights(shared=alone)  # hfsdk.engine.weights.residency


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Ranks that got the same rows, and the lengths of those rows."""

    ranks: tuple[int, ...]
    order: Order
    prompts: Array
    responses: Array


def row_groups(orders: Sequence[Order], call: Call, lengths_drawn: ResponseLengths) -> list[RowGroup]:
    """Bring together the ranks that got the same rows; the lengths of generated ones are drawn."""
    ranks: dict[int, list[int]] = {}
    for rank, rows in enumerate(one_array_each([order.rows for order in orders])):
        ranks.setdefault(id(rows), []).append(rank)
    groups = []
    for members in ranks.values():
        order = orders[members[0]]
        lengths = lengths_of(order)
        prompts = lengths.get("prompt", np.zeros(len(order.rows), dtype=np.int64))
        responses = _draw(order, lengths_drawn) if method_of(call.method).generates else response_lengths(lengths)
        responses = np.zeros(len(order.rows), dtype=np.int64) if responses is None else responses
        groups.append(RowGroup(tuple(members), order, prompts, responses))
    return groups


def _draw(order: Order, response_lengths: ResponseLengths) -> Array:
    arguments = order.arguments
    assert isinstance(arguments, Generation)
    if arguments.lengths is not None:
        measured: Array = arguments.lengths[order.rows]
        return measured
    positions = values_of(order, "position")
    if positions is None:
        positions = order.rows // arguments.copies
    return draw_lengths(response_lengths, arguments.sampling, arguments.seed, positions, order.rows % arguments.copies)


def inputs_of(orders: Iterable[Order]) -> list[Timeline]:
    """Return the calls whose columns these orders read."""
    by_id = {id(h.line): h.line for order in orders for pick in order.picks for h in pick.handles if h.line is not None}
    return list(by_id.values())


def note_sleep(roles: Iterable[SimulatedRole], now: SimulatedRole, method: str) -> None:
    """Note whose rollout is awake after a call: who generates wakes; those on a trainer's devices sleep while it works."""
    if method_of(method).generates:
        now.awake = True
    elif method_of(method).needs:
        for state in roles:
            state.awake = state.awake and set(state.pool.devices).isdisjoint(now.pool.devices)


def bases_elsewhere(estimates: Mapping[SimulatedRole, Estimate]) -> dict[str, str]:
    """Return, of each role on a device whose frozen base another holds, the name of that one."""
    return held_by_others({state.spec.name: HeldBase(base_key(state.spec), estimate.base) for state, estimate in estimates.items()})


def base_moved(role: RoleSpec) -> dict[str, int]:
    """Return the attribute of the span in which the base under adapters goes to the rollout."""
    assert role.model is not None
    assert role.rollout is not None
    return {BASE_COPIED: role.model.num_bytes(role.dtype) // role.rollout.tp}


class DeviceBytes:
    """Bytes of devices after a call, worked out once for all calls after which they are the same.

    Args:
        process_bytes: the bytes of a worker's process besides its roles.
        on_cpu: whether the cluster's devices are processors.
    """

    def __init__(self, process_bytes: int, *, on_cpu: bool) -> None:
        self._process_bytes, self._on_cpu = process_bytes, on_cpu
        self._by_state: dict[tuple[Any, ...], Mapping[int, PredictedBytes]] = {}

    def clear(self) -> None:
        """Forget it: roles came, went or moved."""
        self._by_state.clear()

    def after(self, now: SimulatedRole, roles: Iterable[SimulatedRole], pool: Pool) -> Mapping[int, PredictedBytes]:
        """Return the bytes that every device of a pool holds after a call of one of these roles."""
        estimated = [state for state in roles if state.estimate is not None]
        # Bytes change only by these; a step has many calls, and most come with a key that was seen.
        key = (now.spec.name, *((state.spec.name, state.num_updates > 0, state.awake) for state in estimated))
        if key not in self._by_state:
            groups: dict[tuple[str, ...], PredictedBytes] = {}
            by_device = {}
            for device in pool.devices:
                here = [state for state in estimated if device in state.pool.devices]
                names = tuple(state.spec.name for state in here)
                if names not in groups:
                    groups[names] = _predicted_on(here, now, self._process_bytes, self._on_cpu)
                by_device[device] = groups[names]
            self._by_state[key] = by_device
        return self._by_state[key]


def _predicted_on(roles: Sequence[SimulatedRole], now: SimulatedRole, process_bytes: int, on_cpu: bool) -> PredictedBytes:
    """Add up the bytes that roles hold on a device, moments only once there are some, and those that a call needs besides."""
    parts, asleep = dict.fromkeys(("weights", "gradients", "optimizer", "rollout", "kv_cache"), 0), 0
    elsewhere = bases_elsewhere({state: state.estimate for state in roles if state.estimate is not None})
    for state in roles:
        estimate = state.estimate
        assert estimate is not None
        masters = 4 * (state.spec.dtype != "fp32")
        # Masters are there from the start, moments only after the first step: of 4 + 8 bytes a parameter the 4, with fp32 weights
        # none.
        made = estimate.optimizer if state.num_updates else estimate.optimizer * masters // (masters + 8)
        weights = estimate.weights - (estimate.base if state.spec.name in elsewhere else 0)
        here = {
            "weights": weights, "gradients": estimate.gradients, "optimizer": made,
            "rollout": estimate.rollout_weights, "kv_cache": estimate.kv_cache,
        }  # fmt: skip
        if estimate.asleep and not state.awake:
            here |= {"rollout": 0, "kv_cache": 0}
            asleep += estimate.asleep
        parts = {name: size + (0 if name in estimate.offloaded else here[name]) for name, size in parts.items()}
    working = now.estimate.passes if now.estimate is not None else 0
    gauge = "rss_bytes" if on_cpu else "allocated_bytes"
    there = process_bytes + sum(parts.values())
    parts |= {"asleep": asleep} if any(state.estimate is not None and state.estimate.asleep for state in roles) else {}
    return PredictedBytes({f"{name}_bytes": size for name, size in parts.items()}, gauge, there, working)


def numbers(prompts: Array, responses: Array, **more: int) -> dict[str, dict[str, int]]:
    """Return the attributes of worker spans by their names."""
    read, written = int(prompts.sum()), int(responses.sum())
    both = {"rows": len(prompts), "tokens": read + written, **more}
    return {
        "prefill": {"rows": len(prompts), "tokens": read}, "decode": {"rows": len(prompts), "tokens": written},
        "forward": both, "backward": both,
    }  # fmt: skip
