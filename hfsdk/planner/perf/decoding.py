"""How long a replica decodes: slots, waves and steps, in one numpy expression per call.

Rows are handed to slots longest first, so that a slot's rows follow one another and a step's active rows are known in closed form::

    4 slots, responses 9 8 8 7 | 3 2 2        slot 0   9 + 3      steps 0-9: 4 active, a step costs the most
                                              slot 1   8 + 2      ...
                                              slot 2   8 + 2      the last step: 1 active, but all weights are read
                                              slot 3   7

Rows beyond the slots wait. Slots are limited by ``max_num_seqs`` and by how many of the longest rows the KV cache
holds, in whole blocks (:mod:`hfsdk.core.rollout_sizes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from hfsdk.core.rollout_sizes import CacheUnits
from hfsdk.core.table import Array, RowLengths
from hfsdk.planner.perf.adapter_sizes import slot_numbers
from hfsdk.planner.perf.collectives import all_reduce, all_to_all
from hfsdk.planner.perf.expert_sizes import more_read
from hfsdk.planner.perf.setup import Setup

_ACTIVE = np.arange(1.0, 1025.0)
"""Active rows of a replica, made once."""


class Rates(Protocol):
    """The constants that decoding depends on, and the price of links (``PerfModel`` has them)."""

    @property
    def weight_efficiency(self) -> float:
        """Share of memory bandwidth at which large weights are read."""
        ...

    @property
    def weight_half_bytes(self) -> float:
        """Bytes of a layer's weights at which that share is halved."""
        ...

    @property
    def kv_efficiency(self) -> float:
        """Share of memory bandwidth at which keys and values are read."""
        ...

    @property
    def forward_efficiency(self) -> float:
        """Share of peak FLOP/s of matrix products."""
        ...

    @property
    def layer_s(self) -> float:
        """Fixed seconds a layer and step, replayed as a graph."""
        ...

    @property
    def launch_s(self) -> float:
        """Seconds in which the host launches a layer's kernels."""
        ...

    @property
    def step_s(self) -> float:
        """Seconds of the host a step."""
        ...

    @property
    def row_s(self) -> float:
        """Seconds of the host a row and step."""
        ...

    @property
    def link_efficiency(self) -> float:
        """Share of a link's bandwidth that collectives reach."""
        ...


def slots(setup: Setup, prompts: Array, responses: Array) -> int:
    """Return how many rows one replica decodes at once; at least one."""
    rows = min(len(responses), setup.max_num_seqs)
    if setup.kv_cache_bytes and rows:
        longest = int((prompts + responses).max())
        units = CacheUnits.of_tokens(setup.spec, longest, setup.rollout_tp, setup.dtype, setup.rollout_pp)
        rows = min(rows, max(1, units.held_by(setup.kv_cache_bytes)))
    return rows


def decode_s(perf: Rates, setup: Setup, prompts: Array, responses: Array) -> float:
    """Return the seconds one replica takes to produce responses of these lengths.

    A step costs the larger of reading the weights and of the active rows' arithmetic (rounded: hypot), tp all-reduces, ep
    all-to-alls (replicas that share experts step together, each with as many rows), and what a layer and a step cost anyway; as
    rows end fewer are active, but the last one still reads all weights every step. In a pipeline of p stages a row's next token
    starts when the last one is through, so p stage times are a step, until more micro-batches than stages are under way.
    Keys and values of all earlier tokens are read once a token.
    """
    if not responses.any():
        return 0.0
    wide = slots(setup, prompts, responses)
    ends = np.sort(responses)
    if len(ends) > wide:  # ascending, so that the shortest rows stand in the first, incomplete round
        ends = np.concatenate([np.zeros(-len(ends) % wide, ends.dtype), ends]).reshape(-1, wide).sum(0)
    if ends[0] == ends[-1]:
        steps, active = ends[:1], _ACTIVE[wide - 1 : wide] if wide <= len(_ACTIVE) else np.array([float(wide)])
    else:
        steps = ends.copy()
        steps[1:] -= ends[:-1]
        active = np.arange(wide, 0.0, -1.0)
    per_step = _step_s(perf, setup, active)
    return float(steps @ per_step) + _read_tokens(prompts, responses) * _read_s(perf, setup, wide)


@dataclass(frozen=True, eq=False)
class ReplicaRows:
    """Rows of several replicas, sorted once for all setups that decode them."""

    each: Sequence[RowLengths]
    """Prompt lengths and response lengths of every replica."""

    @cached_property
    def counts(self) -> Array:
        """Rows, [replica]."""
        return np.array([len(responses) for _, responses in self.each])

    @cached_property
    def most(self) -> tuple[int, int]:
        """Most rows of any replica, and tokens of the longest of all rows."""
        return int(self.counts.max(initial=0)), int(self.longest.max(initial=0))

    @cached_property
    def longest(self) -> Array:
        """Tokens of the longest row, [replica]."""
        return np.array([(prompts + responses).max(initial=0) for prompts, responses in self.each])

    @cached_property
    def read(self) -> Array:
        """Keys and values that are read, counted in tokens, [replica]."""
        return np.array([_read_tokens(prompts, responses) for prompts, responses in self.each])

    @cached_property
    def prompts(self) -> tuple[Sequence[Array], Array]:
        """Prompt lengths that differ as a whole, and which of these each replica has, [replica]."""
        numbers: dict[bytes, int] = {}
        which = np.array([numbers.setdefault(prompts.tobytes(), len(numbers)) for prompts, _ in self.each])
        return [self.each[int(np.argmax(which == number))][0] for number in range(len(numbers))], which

    @cached_property
    def _ends(self) -> Array:
        """Responses from short to long, behind zeros where a replica has fewer than others, [replica, row]."""
        most = int(self.counts.max(initial=1))
        return np.sort([np.pad(responses, (most - len(responses), 0)) for _, responses in self.each], axis=1)

    @cached_property
    def _steps(self) -> dict[int, Array]:
        return {}

    def steps(self, wide: int) -> Array:
        """Return how many steps have so many slots active, one less, ..., one, as :func:`decode_s` has it, [replica, wide]."""
        if wide not in self._steps:
            ends = self._ends
            ends = np.pad(ends, ((0, 0), (-ends.shape[1] % wide, 0))).reshape(len(ends), -1, wide).sum(1)
            self._steps[wide] = np.diff(ends, axis=1, prepend=0).astype(np.float64)
        return self._steps[wide]


def slots_each(setup: Setup, rows: ReplicaRows) -> Array:
    """Return how many rows each replica decodes at once, as :func:`slots`, [replica]."""
    wides: Array = np.minimum(rows.counts, setup.max_num_seqs)
    if setup.kv_cache_bytes:
        units = CacheUnits.of_tokens(setup.spec, rows.most[1], setup.rollout_tp, setup.dtype, setup.rollout_pp)
        if units.held_by(setup.kv_cache_bytes) >= rows.most[0]:
            return wides
        wides = np.minimum(wides, np.maximum(1, units.held_each(setup.kv_cache_bytes, rows.longest)))
    return wides


def decode_each_s(perf: Rates, setup: Setup, rows: ReplicaRows) -> Array:
    """Return the seconds in which each of several replicas decodes its rows, as :func:`decode_s`, [replica]."""
    wides, seconds = slots_each(setup, rows), np.zeros(len(rows.each))
    for wide in np.unique(wides[wides > 0]).tolist():
        selected = wides == wide
        per_step = _step_s(perf, setup, np.arange(wide, 0.0, -1.0))
        seconds[selected] = rows.steps(wide)[selected] @ per_step + rows.read[selected] * _read_s(perf, setup, wide)
    return seconds


def _read_tokens(prompts: Array, responses: Array) -> float:
    """Keys and values that are read for all tokens of some rows: a token reads all before it."""
    return float(responses @ (prompts + responses / 2))


def _read_s(perf: Rates, setup: Setup, wide: int) -> float:
    """Seconds of reading one key and value of all layers, where so many rows are decoded at once."""
    spec = setup.spec
    shards = min(setup.rollout_tp, spec.num_kv_heads)
    each = spec.kv_bytes_per_token(setup.dtype) / shards
    stages, rows = setup.rollout_pp, setup.traits.generation_rows
    if stages > 1:
        # a stage reads its layers' part for the rows it has; rounds are as many stage times as _step_s counts
        each *= float(_rounds(setup, float(wide))) * min(1.0, (rows or wide) / wide) / stages
    return each / (setup.device.memory_bandwidth * perf.kv_efficiency)


def _rounds(setup: Setup, active: float | Array) -> float | Array:
    """Stage times from a row's token to its next."""
    traits, stages = setup.traits, setup.rollout_pp
    groups = np.ceil(active / traits.generation_rows) if traits.generation_rows else active * 0 + 1.0
    return np.maximum(stages, groups * (traits.handover if stages > 1 else 1.0))


def _step_s(perf: Rates, setup: Setup, active: Array) -> Array:
    """Seconds of a step with ``active`` rows, without the KV cache."""
    spec, tp, device, traits = setup.spec, setup.rollout_tp, setup.device, setup.traits
    at_once = np.minimum(active, traits.generation_rows) if traits.generation_rows else active
    stages = setup.rollout_pp
    layers = spec.num_layers / stages
    local = setup.matmul_parameters / (tp * stages)
    if setup.lora is not None:
        local += slot_numbers(setup.spec, setup.lora, tp) / stages
    more: Array | float = more_read(spec, at_once, setup.rollout_ep)
    layer_bytes = (setup.layer_parameters + more) * setup.bytes_each / tp
    bandwidth = device.memory_bandwidth * perf.weight_efficiency / (1 + perf.weight_half_bytes / layer_bytes)
    read = (local + layers * more / tp) * setup.bytes_each / bandwidth
    arithmetic = 2.0 * local / (setup.peak_flops * perf.forward_efficiency) * at_once
    message = at_once * (spec.hidden_size * setup.bytes_each)
    links = setup.rollout_links or setup.links
    reached, ep = perf.link_efficiency, setup.rollout_ep
    reduce = all_reduce(2 * layers * message, tp, links.tp, 2 * layers, reached)
    if ep > 1:
        near, far = (2 * layers * at_once * each for each in setup.generating.exchanged_bytes)
        reduce = reduce + all_to_all(near, far, ep, links.ep, 2 * layers, reached)
    kernels = perf.layer_s if traits.cuda_graphs else perf.launch_s * device.launches
    stage = np.hypot(read, arithmetic) + (reduce + layers * kernels)
    if stages > 1:
        stage = stage + message / (links.pp.bandwidth * reached) + links.pp.latency_s
    seconds: Array = _rounds(setup, active) * stage + (perf.step_s + perf.row_s * active)
    return seconds
