"""``Setup``: a model on its devices, everything a formula of ``PerfModel`` needs but the tokens; ``Links``: those its axes cross.

A node's network link is shared by all of its devices. A ring over data-parallel ranks crosses a node's border once each way, so
with tp ranks side by side as many rings share it; a device gets its part::

    tp2 dp2 on two nodes    node 0 [ a0 b0 ]          rings a and b of dp share the network: each gets half
                                     |  |
                            node 1 [ a1 b1 ]

Cards in PCIe slots hang on two processors; what crosses from one's to the other's shares the bridge between them in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from hfsdk.core.cluster import ClusterSpec, DeviceSpec, LinkSpec
from hfsdk.core.layout import Layout
from hfsdk.core.lora import AdapterSpec, LoRA
from hfsdk.core.roles import RoleSpec
from hfsdk.core.rollout_sizes import LEAST_SEQS, cache_bytes
from hfsdk.core.spec import DTYPE_BYTES, ModelSpec
from hfsdk.core.table import Array
from hfsdk.planner.perf.adapter_sizes import Sums, layer_numbers, tp_sums
from hfsdk.planner.perf.collectives import AllToAllLinks
from hfsdk.planner.perf.expert_sizes import exchanged_rows
from hfsdk.planner.perf.memory import role_bytes
from hfsdk.planner.perf.sizing import sizes_alone, waits, with_least

# -- traits of an engine, and the links of a layout


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """The properties of an engine that cost time.

    The formulas of ``PerfModel`` are the same for all engines; what differs is a handful of properties, and no seconds are written
    here. The defaults are this package's engines: Megatron training, vLLM rollout with CUDA graphs, weights written in place. Those
    of other systems, with which the formulas are validated, are in ``benchmarks/``.
    """

    cuda_graphs: bool = True
    """Whether a decode step is replayed as one graph; without, every layer's kernels are launched by the host."""
    flash_attention: bool = True
    """Whether attention keeps its scores on the chip (arXiv 2205.14135); without, they are written and read."""
    attention: float = 1.0
    """Share of ``PerfModel.attention_efficiency`` that its attention reaches; about 0.6 where FlashAttention-2 runs on H100."""
    fused: bool = True
    """Whether norms, activations and residuals run as fused kernels; else each step of them is written and read."""
    sequence_parallel: bool = True
    """Whether norms and residuals are split over tp (Korthikanti et al., arXiv 2205.05198)."""
    overlaps_reduction: bool = True
    """Whether gradients are summed over dp while the last backward pass before a step still runs (Li et al., arXiv 2006.15704)."""
    overlaps_gather: bool = False
    """Whether the updated weights of a distributed optimizer are gathered over dp while the next forward pass runs."""
    gathers_weights: bool = False
    """Whether weights are sharded over dp and gathered for every pass (ZeRO stage 3, arXiv 1910.02054)."""
    overlaps_weights: bool = True
    """Whether the next layer's weights are gathered while this one computes, where they are."""
    sends_once: bool = False
    """Whether a token that several experts of a rank, or of another node, want is sent there once (DeepEP), not once for each."""
    generation_rows: int = 0
    """Rows of one generation micro-batch; 0 decodes all rows that have a slot together."""
    handover: float = 1.0
    """Stage times that a micro-batch occupies a pipeline stage in generation; 2 where sending waits for the receiver."""
    interleave: int = 1
    """Parts of the model that each pipeline stage holds; the bubble is as many times shorter (arXiv 2104.04473)."""


HFSDK = EngineTraits()
"""The engines of this package."""


SLOTS = 4
"""Cards of a node on one processor; more hang on two."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """The slowest link each axis of a layout crosses; bandwidths are one device's part."""

    tp: LinkSpec
    pp: LinkSpec
    dp: LinkSpec
    near: LinkSpec | None = None
    """The link between devices of a node; ``None`` takes ``tp``."""
    far: LinkSpec | None = None
    """The link between nodes, one device's part when all of a node's devices receive; ``None`` takes ``pp``."""
    ep: AllToAllLinks | None = None
    """The links between the replicas that share experts; ``None`` where none do."""
    cp: LinkSpec | None = None
    """The link between the ranks that share a sequence; ``None`` where none do."""

    @classmethod
    def of(cls, cluster: ClusterSpec, devices: Sequence[int], layout: Layout) -> Links:
        """Find which axes cross nodes when ``layout`` (filled) lies on ``devices`` in rank order (tp, then dp, then pp)."""
        places = [(node, i, len(members)) for node, members in enumerate(cluster.node_devices) for i in range(len(members))]
        on = np.array([places[d][0] for d in devices])
        on_node = np.bincount(on)
        fullest = int(on_node.max())
        uneven = len(set(on_node[on_node > 0].tolist())) > 1
        near, network = cluster.links_of(np.unique(on).tolist())
        halves = on * 2
        if near.bridge:
            halves += np.array([i * 2 // size if size > SLOTS else 0 for _, i, size in (places[d] for d in devices)])

        def along(shape: tuple[int, ...], axis: int) -> LinkSpec:
            """Return the slowest link of lines along an axis, one device's part."""
            lines, parts = (np.moveaxis(x.reshape(shape), axis, -1).reshape(-1, shape[axis]) for x in (on, halves))
            if not (lines != lines[:, :1]).any():
                crossing = lines[(parts != parts[:, :1]).any(1), 0]
                return _bridged(near, int(np.bincount(crossing).max())) if len(crossing) else near
            if uneven:  # the node that most of the lines leave
                crossing = lines[(lines != lines[:, :1]).any(1)]
                return _part(network, float(max((crossing == node).any(1).sum() for node in np.unique(on))))
            together = max(1, shape[axis] // len(np.unique(lines[0])))  # ranks of one ring on a node
            return _part(network, max(1.0, fullest / together))

        shape = layout.pp, layout.num_copies, layout.tp
        within = _bridged(near, 1) if len(np.unique(halves)) > len(np.unique(on)) else near
        across = _part(network, fullest)
        return cls(
            tp=along(shape, 2), pp=along(shape, 0), dp=along(shape, 1), near=within, far=across,
            ep=AllToAllLinks(within, across, _beside(on.reshape(shape), layout.ep)) if layout.ep > 1 else None,
            cp=along((layout.pp * layout.num_replicas, layout.cp, layout.tp), 1) if layout.cp > 1 else None,
        )  # fmt: skip

    @property
    def within(self) -> LinkSpec:
        """The link between devices of a node."""
        return self.near or self.tp

    @property
    def across(self) -> LinkSpec:
        """The link between nodes, one device's part."""
        return self.far or self.pp


@lru_cache(maxsize=256)
def _part(link: LinkSpec, sharers: float) -> LinkSpec:
    return link if sharers == 1 else replace(link, bandwidth=link.bandwidth / sharers)


def _beside(nodes: Array, ep: int) -> int:
    """Return how many of ``ep`` neighbouring replicas are on one node, at least, of [pp, dp, tp] nodes."""
    groups = nodes.reshape(nodes.shape[0], -1, ep, nodes.shape[2])
    return int((groups == groups[:, :, :1]).sum(2).min())


@lru_cache(maxsize=256)
def _bridged(link: LinkSpec, sharers: int) -> LinkSpec:
    """Return one line's part of the bandwidth between the halves of a node."""
    return replace(link, bandwidth=min(link.bandwidth, link.bridge / sharers), bridge=0.0)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model on its devices: everything a formula needs but the tokens."""

    spec: ModelSpec
    layout: Layout
    """The filled layout of training or inference."""
    device: DeviceSpec
    """The slowest of the pool."""
    links: Links
    dtype: str = "bf16"
    head: str = "lm"
    micro_batch_tokens: int = 2048
    recompute: str = ""
    """The part that the backward pass computes again, as ``RoleSpec`` has it."""
    rollout: Layout | None = None
    """Layout of the generating engine; ``None`` takes ``layout``'s tp."""
    rollout_links: Links | None = None
    """``None`` takes ``links``."""
    max_num_seqs: int = LEAST_SEQS
    """Rows decoded at once on one replica."""
    kv_cache_bytes: int = 0
    """Key/value cache of one rank; 0 has room for ``max_num_seqs`` rows of any length."""
    batch_tokens: int = 4096
    """Most prompt tokens the generating engine reads in one pass."""
    distributed: bool = False
    """Whether AdamW's state is sharded over dp."""
    lora: LoRA | None = None
    """Adapters that are trained in place of the weights, which stay frozen."""
    refills: bool = False
    """Whether the rollout sleeps between phases, so that a frozen base goes there with the adapters every time."""
    offloads: tuple[str, ...] = ()
    """The parts that stay in host memory while they are not used: ``"weights"``, ``"optimizer"``."""
    traits: EngineTraits = HFSDK

    @classmethod
    def of(cls, role: RoleSpec, cluster: ClusterSpec, devices: Sequence[int]) -> Setup:
        """Describe a role with a model on a pool's devices; sizes of its rollout that are open are those it has there alone."""
        assert role.model is not None
        layout = (role.train or Layout()).fill(len(devices))
        every = cluster.devices
        kinds = {id(every[d]): every[d] for d in devices}
        device = min(kinds.values(), key=lambda d: (d.peak_flops, d.name))
        on_cpu = device.name.startswith("cpu")
        options, links, rollout_links, cache = role.rollout_options, Links.of(cluster, devices, layout), None, 0
        if role.rollout is not None:
            if waits(role) and not on_cpu:
                options = sizes_alone(role, role_bytes(with_least(role), len(devices)), list(kinds.values()))
            groups = role.rollout.tp * role.rollout.pp
            if len(devices) % groups == 0:
                rollout_links = Links.of(cluster, devices, replace(role.rollout, dp=len(devices) // groups))
            cache = cache_bytes(role.model, options, role.rollout.tp, role.dtype, on_cpu=on_cpu)
        return cls(
            spec=role.model, layout=layout, device=device, links=links, dtype=role.dtype, head=role.head,
            micro_batch_tokens=role.micro_batch_tokens, recompute=role.recompute, rollout=role.rollout,
            rollout_links=rollout_links, max_num_seqs=options.max_num_seqs or LEAST_SEQS, kv_cache_bytes=cache,
            batch_tokens=options.max_num_batched_tokens, offloads=role.offloads,
            distributed=role.optimizer is not None and role.optimizer.distributed, lora=role.lora,
            refills=role.lora is not None and role.train is not None and not on_cpu,
        )  # fmt: skip

    @property
    def rollout_tp(self) -> int:
        """Tensor-parallel size of the generating engine."""
        return self.layout.tp if self.rollout is None else self.rollout.tp

    @property
    def rollout_pp(self) -> int:
        """Pipeline-parallel size of the generating engine (1 in hfsdk; other engines generate in stages)."""
        return 1 if self.rollout is None else self.rollout.pp

    @property
    def rollout_ep(self) -> int:
        """Replicas of the generating engine that share experts."""
        return self.layout.ep if self.rollout is None else self.rollout.ep

    @cached_property
    def generating(self) -> Setup:
        """The model as the generating engine has it: its layout is that of the rollout, nothing is trained.

        Where rows are generated in groups (``traits.generation_rows``), ``batch_tokens`` is the longest prompt, and a pass of the
        prefill reads a whole group.
        """
        layout = Layout(tp=self.rollout_tp, pp=self.rollout_pp, dp=self.rollout_ep, ep=self.rollout_ep)
        traits = replace(self.traits, gathers_weights=False)
        rows = self.traits.generation_rows
        return replace(
            self, layout=layout, links=self.rollout_links or self.links, traits=traits, offloads=(), recompute="",
            micro_batch_tokens=self.batch_tokens if not rows else rows * self.batch_tokens,
        )  # fmt: skip

    @cached_property
    def parameters(self) -> int:
        """All weights."""
        return parameters(self.spec)

    @cached_property
    def active(self) -> int:
        """Weights that a token goes through: all but those of the experts that it is not sent to."""
        return self.parameters if self.spec.experts is None else active_parameters(self.spec)

    @cached_property
    def adapters(self) -> AdapterSpec | None:
        """The adapters as numbers."""
        return None if self.lora is None else AdapterSpec.of(self.spec, self.lora)

    @cached_property
    def learned(self) -> int:
        """The numbers that are trained, kept and saved: all weights, or adapters and a scalar head."""
        if self.adapters is None:
            return self.parameters
        return parameters(self.adapters) + (self.spec.hidden_size if self.head == "scalar" else 0)

    @cached_property
    def local(self) -> float:
        """Weights of a rank, without those that lie uneven over stages."""
        return self._numbers_of(self.layout.tp, self.layout.pp, self.layout.ep)

    @cached_property
    def local_learned(self) -> float:
        """The numbers that are trained on a rank, without those that lie uneven over stages."""
        if self.adapters is None:
            return self.local
        return self.spec.num_layers / self.layout.pp * layer_numbers(self.adapters, self.layout.tp)

    @property
    def rollout_local(self) -> float:
        """Weights of a rank of the generating engine."""
        return self._numbers_of(self.rollout_tp, self.rollout_pp, self.rollout_ep)

    @property
    def without_ep(self) -> float:
        """Weights that a rank would have if it had all experts of its tp and pp, which the dp ranks have together."""
        return self._numbers_of(self.layout.tp, self.layout.pp, 1)

    def _numbers_of(self, tp: int, pp: int, ep: int) -> float:
        if ep == 1:
            return self.parameters / tp / pp
        return (self.parameters - self.spec.routed_parameters * (1 - 1 / ep)) / tp / pp

    @cached_property
    def stepped(self) -> float:
        """Weights that a rank updates: all that it trains, or its part where AdamW's state is sharded over dp.

        Experts' state is sharded over the dp / ep ranks that have them, so that ep changes nothing there.
        """
        if not (self.distributed or self.traits.gathers_weights):
            return self.local_learned
        return (self.local_learned if self.layout.ep == 1 else self.without_ep) / self.layout.num_copies

    @cached_property
    def summed_bytes(self) -> float:
        """Bytes that a rank sends to sum gradients over dp: an all-reduce in fp32, or a reduce-scatter where state is sharded."""
        return self._from_others * (4 if self.distributed or self.traits.gathers_weights else 8)

    @cached_property
    def gathered_bytes(self) -> float:
        """Bytes that a rank gets of the weights that others updated; none where weights stay sharded (ZeRO stage 3)."""
        gathers = self.distributed and not self.traits.gathers_weights
        return self._from_others * self.bytes_each * gathers

    @cached_property
    def _from_others(self) -> float:
        """The numbers that a rank trains and others update, where all that have them get a part; experts are on dp / ep ranks."""
        copies = self.layout.num_copies
        if self.layout.ep == 1:
            return (copies - 1) / copies * self.local_learned
        return self.local_learned - self.without_ep / copies

    @cached_property
    def passed_bytes(self) -> float:
        """Bytes of keys and values of a token and layer that a rank passes on to the others that share its sequences.

        Heads are cut by tp; the other ranks' keys and values pass by in turn (ring attention, arXiv 2310.01889).
        """
        if self.layout.cp == 1:
            return 0.0
        heads = self.spec.num_kv_heads if self.spec.latent is None else self.spec.num_heads  # made anew of what MLA compresses
        width = 2 * heads * self.spec.head_dim / min(self.layout.tp, heads)
        return (self.layout.cp - 1) * width * self.bytes_each

    @cached_property
    def exchanged_bytes(self) -> tuple[float, float]:
        """Bytes of a token and layer that a rank sends to where experts are, one way: inside its node, and to others.

        Each tp rank sends its part.
        """
        if self.links.ep is None:
            return 0.0, 0.0
        near, far = exchanged_rows(self.spec, self.layout.ep, self.links.ep.beside, self.traits.sends_once)
        each = self.bytes_each / self.layout.tp
        return near * each, far * each

    @cached_property
    def adapter_products(self) -> float:
        """Numbers of a layer's adapters that a rank multiplies each token with.

        With sequence parallelism a weight that is whole on every rank sees a part of the tokens, as if it were cut.
        """
        if self.adapters is None:
            return 0.0
        if self.traits.sequence_parallel:
            return parameters(self.adapters) / (self.spec.num_layers * self.layout.tp)
        return layer_numbers(self.adapters, self.layout.tp)

    @cached_property
    def adapter_sums(self) -> tuple[Sums, Sums]:
        """The sums over tp of a layer's adapters, forwards and backwards; in the generating engine W x and B A x have one sum."""
        return (Sums(), Sums()) if self.adapters is None else tp_sums(self.adapters)

    @cached_property
    def bytes_each(self) -> int:
        """Bytes of one weight or activation."""
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def peak_flops(self) -> float:
        """The device's FLOP/s in ``dtype``."""
        return self.device.flops(self.dtype)

    @cached_property
    def matmul_parameters(self) -> int:
        """Weights each token is multiplied with: the embedding is a lookup, and a scalar head has no vocabulary."""
        table = self.spec.vocab_size * self.spec.hidden_size
        tables = (0 if self.spec.tied_embeddings else 1) + (1 if self.head == "scalar" else 0)
        return self.active - tables * table

    @cached_property
    def layer_parameters(self) -> float:
        """Weights of one layer that a token is multiplied with."""
        ends = (1 if self.spec.tied_embeddings else 2) * self.spec.vocab_size * self.spec.hidden_size
        return (self.active - ends) / self.spec.num_layers

    @cached_property
    def head_layers(self) -> float:
        """The output layer's work, counted in layers."""
        return self.matmul_parameters / self.layer_parameters - self.spec.num_layers

    @cached_property
    def stage_layers(self) -> tuple[float, float, float]:
        """Layers' worth of work of the slowest pipeline stage, of all stages, and the most layers any stage has.

        Layers divide as evenly as they can; the last stage has the output layer as well.
        """
        most = math.ceil(self.spec.num_layers / self.layout.pp)
        last = self.spec.num_layers - most * (self.layout.pp - 1) + self.head_layers
        last = max(last, math.floor(self.spec.num_layers / self.layout.pp) + self.head_layers)
        return max(float(most), last), self.spec.num_layers + self.head_layers, most

    @property
    def forwards_again(self) -> float:
        """Share of a forward pass that the backward pass computes again; selective: the MLPs (attention is small in comparison)."""
        mlps = 3 * self.spec.num_layers * self.spec.hidden_size * self.spec.mlp_width_per_token
        return {"": 0.0, "selective": mlps / self.matmul_parameters, "full": 1.0}[self.recompute]

    def forward_flops(self, lengths: Array) -> float:
        """Return the FLOPs of a pass over rows of these lengths: 2 per weight and token, and causal attention."""
        spec = self.spec
        tokens, squares = float(lengths.sum()), float((lengths.astype(np.float64) ** 2).sum())
        attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * squares / 2
        return 2.0 * (tokens * self.matmul_parameters + attention)


@lru_cache(maxsize=64)
def parameters(spec: ModelSpec) -> int:
    """Return the number of weights, counted once a spec."""
    return spec.num_parameters()


@lru_cache(maxsize=64)
def active_parameters(spec: ModelSpec) -> int:
    """Return the number of weights that a token goes through, counted once a spec."""
    return spec.num_active_parameters()


def reshard_bytes(
    spec: ModelSpec, train: Layout, rollout_tp: int, dtype: str = "bf16", rollout_pp: int = 1, rollout_ep: int = 1
) -> float:
    """Return the bytes the fullest rank receives in a weight transition, in closed form.

    A rank needs M / (tp_g pp_g). Where tp_g divides tp it holds M / (pp tp) of that, which with pp_g = 1 gives table 2 of
    HybridFlow: (tp pp - tp_g) / (tp_g tp pp) M; with tp = 1 it holds M / (pp tp_g). Otherwise shards do not nest and some rank
    holds nothing of what it needs. ``ReshardPlan`` counts the rest: whole tensors (norms, the embedding) that lie uneven over pp.
    Experts are cut by ep as well, of which the same holds: of M_e / (tp_g pp_g ep_g) a rank holds what both divisions leave it,
    if replicas are numbered so that these nest.
    """
    nests = (train.tp == 1 or train.tp % rollout_tp == 0) and train.pp % rollout_pp == 0
    needed, shared_by = rollout_tp * rollout_pp, max(train.pp, rollout_pp) * max(train.tp, rollout_tp)
    if train.ep == rollout_ep == 1:
        model_bytes = parameters(spec) * DTYPE_BYTES[dtype]
        return model_bytes / needed - (model_bytes / shared_by if nests else 0.0)
    experts = spec.routed_parameters * DTYPE_BYTES[dtype]
    others = parameters(spec) * DTYPE_BYTES[dtype] - experts
    few, many = sorted((train.ep, rollout_ep))
    present = (others + (0 if many % few else experts / many)) / shared_by if nests else 0.0
    return (others + experts / rollout_ep) / needed - present
