"""How long a call takes, from the model's size, the layout and the device: a roofline, call by call.

Every prediction is the larger of arithmetic and memory traffic, plus communication, plus a fixed cost::

    train          3 passes' FLOPs / (tp pp peak e)   x  (1 + (pp - 1) micro-batches)   + tp all-reduces  + dp reduction
    forward        1 pass's FLOPs                     x  the same                        + tp all-reduces
    decode         per token: max(weights / bandwidth, FLOPs) + layers x overhead, and the KV cache read once a token
    reshard        bytes the fullest rank lacks / link, and one copy of what it needs through its own memory

A roofline model (as LLM-Viewer, arXiv 2402.16363). **The constants are plausible, not fitted to a machine**: times are made up
until a calibration exists. What holds: the same input gives the same output, and more tokens or a larger model never take less
time.

Symbols: P parameters, L layers, h hidden size, T tokens, tp/pp/dp the layout; a *row* is one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from hfsdk.layout import Layout
from hfsdk.resharding import ReshardPlan
from hfsdk.roles import RoleSpec
from hfsdk.spec import DTYPE_BYTES, ClusterSpec, DeviceSpec, LinkSpec, ModelSpec
from hfsdk.table import Array

if TYPE_CHECKING:
    from hfsdk.planner.calibration import Calibration, Measurable, Measured

Rows = tuple[Array, Array]
"""Prompt lengths and response lengths of some rows."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """The slowest link each axis of a layout crosses."""

    tp: LinkSpec
    pp: LinkSpec
    dp: LinkSpec

    @classmethod
    def of(cls, cluster: ClusterSpec, devices: Sequence[int], layout: Layout) -> Links:
        """Find which axes cross nodes when ``layout`` (filled) lies on ``devices`` in rank order (tp, then dp, then pp)."""
        node_of = [node for node, members in enumerate(cluster.node_devices) for _ in members]
        nodes = np.array([node_of[d] for d in devices]).reshape(layout.pp, layout.num_replicas, layout.tp)
        crossing = [bool((nodes != nodes.take([0], axis)).any()) for axis in range(3)]
        pp, dp, tp = (cluster.inter_node if crosses else cluster.intra_node for crosses in crossing)
        return cls(tp=tp, pp=pp, dp=dp)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model on its devices: everything a formula needs but the tokens."""

    spec: ModelSpec
    layout: Layout
    """Filled: training or inference."""
    device: DeviceSpec
    """The slowest of the pool."""
    links: Links
    dtype: str = "bf16"
    head: str = "lm"
    micro_batch_tokens: int = 2048
    recompute: str = ""
    """What the backward pass computes again, as ``RoleSpec`` has it."""
    rollout: Layout | None = None
    """Layout of the generating engine; ``None`` takes ``layout``'s tp."""
    max_num_seqs: int = 64
    """Rows decoded at once on one replica."""

    @classmethod
    def of(cls, role: RoleSpec, cluster: ClusterSpec, devices: Sequence[int]) -> Setup:
        """Describe a role with a model on a pool's devices."""
        assert role.model is not None
        layout = (role.train or Layout()).fill(len(devices))
        every = cluster.devices
        kinds = {id(every[d]): every[d] for d in devices}
        return cls(
            spec=role.model, layout=layout, device=min(kinds.values(), key=lambda d: (d.peak_flops, d.name)),
            links=Links.of(cluster, devices, layout), dtype=role.dtype, head=role.head,
            micro_batch_tokens=role.micro_batch_tokens, recompute=role.recompute, rollout=role.rollout,
            max_num_seqs=role.rollout_options.max_num_seqs,
        )  # fmt: skip

    @property
    def rollout_tp(self) -> int:
        """Tensor-parallel size of the generating engine."""
        return self.layout.tp if self.rollout is None else self.rollout.tp

    @cached_property
    def parameters(self) -> int:
        """All weights."""
        return _parameters(self.spec)

    @cached_property
    def matmul_parameters(self) -> int:
        """Weights each token is multiplied with: the embedding is a lookup, and a scalar head has no vocabulary."""
        table = self.spec.vocab_size * self.spec.hidden_size
        tables = (0 if self.spec.tied_embeddings else 1) + (1 if self.head == "scalar" else 0)
        return self.parameters - tables * table

    @property
    def forwards_again(self) -> float:
        """Share of a forward pass that the backward pass computes again; selective: the MLPs (attention is small beside them)."""
        mlps = 3 * self.spec.num_layers * self.spec.hidden_size * self.spec.mlp_hidden_size
        return {"": 0.0, "selective": mlps / self.matmul_parameters, "full": 1.0}[self.recompute]

    def forward_flops(self, lengths: Array) -> float:
        """Return the FLOPs of a pass over rows of these lengths: 2 per weight and token, and causal attention."""
        spec = self.spec
        tokens, squares = float(lengths.sum()), float((lengths.astype(np.float64) ** 2).sum())
        attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * squares / 2
        return 2.0 * (tokens * self.matmul_parameters + attention)


@dataclass(frozen=True, kw_only=True)
class PerfModel:
    """Predicts seconds. Frozen: another calibration is another ``PerfModel``.

    Example: ``PerfModel(train_efficiency=0.3).seconds("update", setup, prompts, responses)``.
    """

    train_efficiency: float = 0.5
    """Share of peak FLOP/s of training's matrix products (Megatron reaches 0.41-0.48 with communication)."""
    forward_efficiency: float = 0.6
    """The same without a backward pass, and in prefill (measured layers: 0.7-0.78 at 4096 tokens)."""
    weight_efficiency: float = 0.8
    """Share of memory bandwidth at which decode reads weights (large layers on A100 and H100: 0.75-0.86)."""
    kv_efficiency: float = 0.6
    """The same for the key/value cache."""
    layer_s: float = 20e-6
    """Fixed seconds a layer and decode step: launches and short kernels; with it tp8 of 7B reads at 0.5 of the bandwidth."""
    step_s: float = 1e-3
    """Seconds of scheduling a decode step on the host."""
    link_efficiency: float = 0.7
    """Share of a link's bandwidth that collectives reach (0.6 on A100, 0.8 on H100 within a node)."""
    exposed_reduction: float = 0.3
    """Share of the gradient reduction that does not hide behind the backward pass."""
    optimizer_bytes: float = 20.0
    """Bytes of memory traffic of Adam per parameter it updates."""
    storage_bandwidth: float = 1e9
    """Bytes per second and replica to and from a checkpoint."""
    dispatch_s: float = 5e-3
    """Seconds between a call's start and its work on the devices."""
    task_s: float = 20e-3
    """Fixed seconds of a CPU task."""
    task_token_s: float = 2e-7
    """Seconds of a CPU task per token: decoding and the user's arithmetic."""

    # -- formulas

    def forward(self, setup: Setup, lengths: Array) -> float:
        """Return the seconds of one forward pass of one dp rank over rows of these lengths (prompt + response)."""
        return self._pass(setup, lengths, 1.0, self.forward_efficiency)

    def train(self, setup: Setup, lengths: Array) -> tuple[float, float]:
        """Return the seconds of forward and of backward over one mini-batch's rows on one dp rank.

        6 P T FLOPs in all (Kaplan et al., arXiv 2001.08361), a third of them forward; the reduction of the gradients
        (fp32 reduce-scatter, all-gather of the weights) is part of the backward pass, and so is what is computed again.
        """
        forward = self._pass(setup, lengths, 1.0, self.train_efficiency)
        backward = self._pass(setup, lengths, 2.0 + setup.forwards_again, self.train_efficiency)
        return forward, backward + self.exposed_reduction * self._reduction(setup)

    def _pass(self, setup: Setup, lengths: Array, times: float, efficiency: float) -> float:
        """Seconds of ``times`` forward passes' work, with the tp all-reduces of one (2 a layer) and pp's bubble.

        The bubble is pp - 1 full micro-batches, so that m micro-batches take (m + pp - 1) / m of their arithmetic.
        """
        spec, layout = setup.spec, setup.layout
        tokens = float(lengths.sum())
        if not tokens:
            return 0.0
        micro_batches = np.ceil(tokens / setup.micro_batch_tokens)
        arithmetic = times * setup.forward_flops(lengths) / (layout.tp * layout.pp * setup.device.peak_flops * efficiency)
        message = tokens * spec.hidden_size * DTYPE_BYTES[setup.dtype]
        stage_layers = spec.num_layers / layout.pp
        reduce = 2 * stage_layers * self._all_reduce(message, layout.tp, setup.links.tp, micro_batches)
        hops = (message / layout.tp / self._rate(setup.links.pp) + micro_batches * setup.links.pp.latency_s) * (layout.pp > 1)
        filling = 1 + (layout.pp - 1) * min(tokens, setup.micro_batch_tokens) / tokens
        return float((arithmetic + reduce + hops) * filling)

    def _reduction(self, setup: Setup) -> float:
        """Seconds of reduce-scatter of fp32 gradients and all-gather of the weights over dp."""
        layout, dp = setup.layout, setup.layout.num_replicas
        local = setup.parameters / (layout.tp * layout.pp)
        return (dp - 1) / dp * local * (4 + DTYPE_BYTES[setup.dtype]) / self._rate(setup.links.dp)

    def optimizer(self, setup: Setup) -> float:
        """Return the seconds of one optimizer step: memory traffic over this rank's share of the state."""
        layout = setup.layout
        local = setup.parameters / (layout.tp * layout.pp * layout.num_replicas)
        clip = setup.links.dp.latency_s * (layout.size > 1)
        return self.optimizer_bytes * local / setup.device.memory_bandwidth + clip

    def prefill(self, setup: Setup, prompts: Array) -> float:
        """Return the seconds one rollout replica takes to read its prompts."""
        tokens, tp = float(prompts.sum()), setup.rollout_tp
        if not tokens:
            return 0.0
        flops = setup.forward_flops(prompts) / (tp * setup.device.peak_flops * self.forward_efficiency)
        message = tokens * setup.spec.hidden_size * DTYPE_BYTES[setup.dtype]
        batches = np.ceil(tokens / 4096)
        reduce = 2 * setup.spec.num_layers * self._all_reduce(message, tp, setup.links.tp, batches)
        return float(max(flops, self._weight_read(setup)) + reduce + batches * self.step_s)

    def decode(self, setup: Setup, prompts: Array, responses: Array) -> float:
        """Return the seconds one rollout replica takes to produce responses of these lengths.

        Rows beyond ``max_num_seqs`` wait for a free slot. A step takes the larger of reading the weights and of the active
        rows' arithmetic; as rows end, fewer are active, but the last one still reads all weights every step.
        """
        if not responses.sum():
            return 0.0
        spec, tp, device = setup.spec, setup.rollout_tp, setup.device
        slots = min(len(responses), setup.max_num_seqs)
        ends = np.sort(np.bincount(np.arange(len(responses)) % slots, weights=responses, minlength=slots))
        steps = np.diff(ends, prepend=0.0)
        active = np.arange(len(ends), 0, -1)
        arithmetic = 2.0 * setup.matmul_parameters * active / (tp * device.peak_flops * self.forward_efficiency)
        message = active * spec.hidden_size * DTYPE_BYTES[setup.dtype]
        reduce = 2 * spec.num_layers * self._all_reduce(message, tp, setup.links.tp, 1)
        fixed = spec.num_layers * self.layer_s + self.step_s
        per_step = np.maximum(self._weight_read(setup), arithmetic) + reduce + fixed
        read = float((responses * (prompts + responses / 2)).sum()) * spec.kv_bytes_per_token(setup.dtype)
        cache = read / (min(tp, spec.num_kv_heads) * device.memory_bandwidth * self.kv_efficiency)
        return float((steps * per_step).sum()) + cache

    def reshard(self, setup: Setup, received_bytes: float | None = None) -> float:
        """Return the seconds of a weight transition on the slowest rank.

        Args:
            setup: the actor.
            received_bytes: bytes the fullest rank receives, e.g. counted by a ``ReshardPlan``; by default in closed form.
        """
        layout = setup.layout
        if received_bytes is None:
            received_bytes = reshard_bytes(setup.spec, layout, setup.rollout_tp, setup.dtype)
        needed = setup.parameters * DTYPE_BYTES[setup.dtype] / setup.rollout_tp
        link = setup.links.pp if layout.pp > 1 else setup.links.tp if layout.tp > 1 else setup.links.dp
        latency = link.latency_s * setup.spec.num_layers * (received_bytes > 0)
        return received_bytes / self._rate(link) + latency + 2 * needed / setup.device.memory_bandwidth

    def planned_reshard(self, setup: Setup, plan: ReshardPlan) -> float:
        """Return the seconds of a planned weight transition, from the bytes the plan counts for its fullest rank."""
        matrix = plan.bytes_matrix()
        received = [sum(row[target] for source, row in enumerate(matrix) if source != target) for target in range(len(matrix))]
        return self.reshard(setup, float(max(received)))

    def host_task(self, num_rows: int, num_tokens: int) -> float:
        """Return the seconds of a function of the user's over columns, in a CPU task."""
        return self.task_s + num_rows * 1e-6 + num_tokens * self.task_token_s

    # -- calls

    def costs(self, method: str, setup: Setup, prompts: Array, responses: Array, stale: bool = False) -> dict[str, float]:
        """Return the seconds of a call by the names of its spans, in their order, on ranks that get these rows.

        ``update`` is one optimizer step over the rows.
        """
        if method in ("generate", "chat"):
            reshard = {"reshard": self.reshard(setup)} if stale else {}
            return {**reshard, "prefill": self.prefill(setup, prompts), "decode": self.decode(setup, prompts, responses)}
        if method in ("update", "forward_backward"):
            forward, backward = self.train(setup, prompts + responses)
            end = {"optimizer": self.optimizer(setup)} if method == "update" else {}
            return {"forward": forward, "backward": backward, **end}
        if method == "to_training":  # mode shared: what was put aside comes back, nothing is received
            return {"reshard": self.reshard(setup, 0.0)}
        if method == "step":
            return {"optimizer": self.optimizer(setup)}
        if method in ("save_pretrained", "save_state", "load_state"):
            state = 16 if method.endswith("state") else DTYPE_BYTES[setup.dtype]
            return {method: state * setup.parameters / self.storage_bandwidth / setup.layout.num_replicas}
        if method in ("run", "grad_norm", "last_reshard", "census"):
            return {method: self.task_s}
        return {"forward": self.forward(setup, prompts + responses)}

    def seconds(self, method: str, setup: Setup, prompts: Array, responses: Array, stale: bool = False) -> float:
        """Return the seconds of a call on ranks that get rows of these lengths: the sum of :meth:`costs`."""
        return sum(self.costs(method, setup, prompts, responses, stale).values())

    def method_costs(
        self, method: str, role: RoleSpec, cluster: ClusterSpec, devices: Sequence[int], rows: Sequence[Rows], stale: bool = False
    ) -> list[Mapping[str, float]]:
        """Return, for each group of ranks that share rows, the call's seconds by span name (see :meth:`costs`)."""
        setup = Setup.of(role, cluster, devices)
        return [self.costs(method, setup, prompts, responses, stale) for prompts, responses in rows]

    # -- parts of formulas

    def _rate(self, link: LinkSpec) -> float:
        return link.bandwidth * self.link_efficiency

    def _all_reduce(self, num_bytes: Array | float, ranks: int, link: LinkSpec, messages: float) -> Array | float:
        """Seconds of a ring: every byte crosses 2 (n - 1) / n times (Patarasuk and Yuan, 2009)."""
        if ranks == 1:
            return 0.0
        return 2 * (ranks - 1) / ranks * num_bytes / self._rate(link) + messages * link.latency_s

    def _weight_read(self, setup: Setup) -> float:
        local = setup.parameters * DTYPE_BYTES[setup.dtype] / setup.rollout_tp
        return local / (setup.device.memory_bandwidth * self.weight_efficiency)


    @classmethod
    def fit(
        cls, measured: Measured | Measurable | Sequence[Measured | Measurable], *, start: PerfModel | None = None,
        constants: Sequence[str] = (),
    ) -> Calibration:  # fmt: skip
        """Refit at most eight constants from measured steps: robust least squares on logarithms, held to the presets.

        Args:
            measured: a real session (its last step), what ``session.measured(step)`` returns, or several of these.
            start: the constants before; by default the presets.
            constants: which to fit; by default ``hfsdk.planner.calibration.FITTED``.

        Returns:
            The fitted model with its report: errors by call before and after, bands, and constants the steps say nothing of.

        Raises:
            OptionError: nothing was measured, the trace was predicted, or too many or unknown constants.
        """
        from hfsdk.planner.calibration import FITTED, fit

        return fit(measured, start or cls(), constants or FITTED)


def reshard_bytes(spec: ModelSpec, train: Layout, rollout_tp: int, dtype: str = "bf16") -> float:
    """Return the bytes the fullest rank receives in a weight transition, in closed form.

    A rank needs M / tp_g. Where tp_g divides tp it holds M / (pp tp) of that, which gives table 2 of HybridFlow:
    (tp pp - tp_g) / (tp_g tp pp) M; with tp = 1 it holds M / (pp tp_g). Otherwise shards do not nest and some rank holds
    nothing of what it needs. ``ReshardPlan`` counts the rest: whole tensors (norms, the embedding) that lie uneven over pp.
    """
    model_bytes = _parameters(spec) * DTYPE_BYTES[dtype]
    nests = train.tp == 1 or train.tp % rollout_tp == 0
    held = model_bytes / (train.pp * max(train.tp, rollout_tp)) if nests else 0.0
    return model_bytes / rollout_tp - held


@lru_cache(maxsize=64)
def _parameters(spec: ModelSpec) -> int:
    return spec.num_parameters()
