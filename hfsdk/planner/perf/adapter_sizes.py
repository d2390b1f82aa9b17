"""The cost of adapters of low rank on a rank: numbers, bytes that travel, messages; counted from boxes, one layer of each.

On a linear that tp cuts by rows A is whole on every rank and B is cut; on one cut by columns A is cut and B is whole
(:mod:`hfsdk.engine.training.megatron_adapters`, whose two sums of [tokens, rank] are counted here)::

    cut by rows      q, k, v, gate, up      the gradient of h is summed over tp     one message backward
    cut by columns   o, down                h is summed over tp                     one message forward
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hfsdk.core.layout import Layout
from hfsdk.core.lora import A, AdapterSpec, LoRA
from hfsdk.core.roles import RoleSpec
from hfsdk.core.spec import ModelSpec
from hfsdk.resharding.boxes import held_adapters, intersect, megatron_layer, vllm_layer

CUT_BY_COLUMNS = ("o_proj", "down_proj")
"""Linears whose output is a sum over tp."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The sums over tp that adapters add to a layer in one pass."""

    numbers: int = 0
    """Numbers for each token."""
    messages: int = 0


@lru_cache(maxsize=1024)
def layer_numbers(adapters: AdapterSpec, tp: int) -> int:
    """Return the numbers of one layer's adapters on the fullest rank of a trainer."""
    return max(sum(box.numel for box in megatron_layer(adapters, tp, rank, 0, 0)) for rank in range(tp))


def trained_numbers(role: RoleSpec, layout: Layout) -> int:
    """Return the parameters trained on top of a base on a rank of the fullest stage: adapters and, with pp=1, a scalar head."""
    assert role.model is not None
    assert role.lora is not None
    adapters = AdapterSpec.of(role.model, role.lora)
    head = role.model.hidden_size if role.head == "scalar" and layout.pp == 1 else 0
    return role.model.num_layers // layout.pp * layer_numbers(adapters, layout.tp) + head


@lru_cache(maxsize=1024)
def slot_numbers(spec: ModelSpec, lora: LoRA, tp: int) -> int:
    """Return the numbers for which a rank of the generating engine has room in a slot: of a padded rank."""
    return spec.num_layers * sum(box.numel for box in vllm_layer(held_adapters(spec, lora), tp, 0, 0))


@lru_cache(maxsize=1024)
def rollout_numbers(adapters: AdapterSpec, tp: int) -> int:
    """Return the numbers that a rank of the generating engine needs."""
    return adapters.num_layers * sum(box.numel for box in vllm_layer(adapters, tp, 0, 0))


@lru_cache(maxsize=1024)
def tp_sums(adapters: AdapterSpec) -> tuple[Sums, Sums]:
    """Return the numbers that a layer's adapters sum over tp forwards, and backwards."""
    names = [name for name in adapters.tensors() if name.startswith("model.layers.0.") and name.endswith(A)]
    modules = [name.removesuffix(A).rsplit(".", 1)[-1] for name in names]
    rank = adapters.lora.rank
    columns = [name for name in modules if name in CUT_BY_COLUMNS]
    rows = [name for name in modules if name not in CUT_BY_COLUMNS]
    fused = {"qkv" if name[0] in "qkv" else "fc1" for name in rows}
    return Sums(numbers=rank * len(columns), messages=len(columns)), Sums(numbers=rank * len(rows), messages=len(fused))


@lru_cache(maxsize=1024)
def received_numbers(adapters: AdapterSpec, tp: int, pp: int, rollout_tp: int) -> float:
    """Return the numbers that the fullest rank receives when adapters go to the rollout: those that it needs and does not hold.

    For the layers of its own stage a rank holds the part that its trainer's boxes share with the rollout's.
    """
    mesh = Layout(tp=tp, dp=math.lcm(tp, rollout_tp) // tp).mesh(rollout_tp)
    most = 0.0
    for rank in mesh.ranks:
        own_boxes = megatron_layer(adapters, tp, mesh.coordinates(rank).tp, 0, 0)
        needed = vllm_layer(adapters, rollout_tp, rank % rollout_tp, 0)
        both = [intersect(own_box, box) for box in needed for own_box in own_boxes if own_box.tensor == box.tensor]
        there = sum(math.prod(shared[1]) for shared in both if shared is not None)
        most = max(most, sum(box.numel for box in needed) - there / pp)
    return adapters.num_layers * most
