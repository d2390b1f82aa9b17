"""How long a call takes, from the model's size, the layout and the device: a roofline, call by call.

A pass of a pipeline stage over tokens, forward or backward (``docs/perf-model.md`` derives every term)::

    stage     hypot(FLOPs / (tp peak e), weights read per micro-batch)  + traffic of everything that is not a matrix product
              + tp all-reduces + ep all-to-alls; at least the host's kernel launches
    pass      micro-batches x slowest stage, and once all the others (the bubble), + hops between stages
    train     forward + backward (twice the work, what is computed again, gradients), + dp reduction that nothing hides
    decode    per step: hypot(weights read, FLOPs) + layers x overhead + tp all-reduces, and the KV cache read once a token
    reshard   bytes the fullest rank lacks / its part of the link, and one copy of what it needs through its own memory

A roofline model (as LLM-Viewer, arXiv 2402.16363) whose corner is rounded: ``hypot`` is within 8 % of the larger of its arguments a
factor 2.4 from the corner, which is how measured layers bend (Vidur's profiles, arXiv 2405.05465: flat to 64 tokens on A100,
FLOP-bound from 512). Nothing is looked up per configuration. Two laws hold for any constants: the same input gives the same output,
and more tokens, a larger model or less bandwidth never take less time.

Symbols: P parameters, L layers, h hidden size, T tokens, tp/pp/dp the layout; a *row* is one sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Self

import numpy as np

from hfsdk.core.checks import Fraction, NonNegative, Positive, Within, check_fields, checked
from hfsdk.core.cluster import ClusterSpec, LinkSpec
from hfsdk.core.field_texts import documented
from hfsdk.core.methods import method_of
from hfsdk.core.roles import RoleSpec, state_bytes
from hfsdk.core.table import Array, RowLengths
from hfsdk.planner.perf.adapter_sizes import Sums, received_numbers, slot_numbers
from hfsdk.planner.perf.calibration import FITTED, Calibration, Measurable, Measured, fit
from hfsdk.planner.perf.collectives import all_reduce, all_to_all, ring_pass
from hfsdk.planner.perf.decoding import ReplicaRows, decode_each_s, decode_s
from hfsdk.planner.perf.expert_sizes import more_read, moved_rows
from hfsdk.planner.perf.row_lengths import LengthSums
from hfsdk.planner.perf.setup import Links, Setup, reshard_bytes
from hfsdk.resharding.reshard_plan import LINKS, ReshardPlan

__all__ = ["Links", "PerfModel", "Setup", "reshard_bytes"]

SHARES = tuple(f"{what}_efficiency" for what in ("train", "forward", "attention", "weight", "kv", "copy", "link"))
"""Constants of :class:`PerfModel` that are a share of a device's or a link's number on paper."""

MOST_SHARE = 10.0
"""Largest such share: above 1 is where the paper's figure is a round one (the preset ``cpu``) and a run was faster."""

Efficiency = Annotated[float, Within(above=0, most=MOST_SHARE)]


@documented
@dataclass(frozen=True, kw_only=True)
class PerfModel:
    """Predicts seconds. Frozen: another calibration is another ``PerfModel``.

    Example: ``PerfModel(train_efficiency=0.7).seconds("update", setup, prompts, responses)``.
    """

    train_efficiency: Efficiency = 0.7
    """Share of peak FLOP/s of training's matrix products, as single layers reach it (7B and 70B at 4096 tokens: 0.66-0.78 on A100
    and H100, kernel profiles of Vidur, arXiv 2405.05465)."""
    forward_efficiency: Efficiency = 0.75
    """The same without a backward pass, and in prefill, as single layers reach it (Vidur's profiles)."""
    attention_efficiency: Efficiency = 0.5
    """Share of peak FLOP/s of attention whose scores stay on the chip, causal, forward and backward; a round figure.
    FlashAttention-2 reaches 0.5 to 0.73 on A100 and at most 335 TFLOP/s on H100, 0.34 (arXiv 2307.08691), its successor up to 740
    there (arXiv 2407.08608)."""
    weight_efficiency: Efficiency = 0.82
    """Share of memory bandwidth at which matrix products with few tokens read large weights. Same source: 0.78 on A100, 0.86 on
    H100, where ``weight_half_bytes`` is taken out."""
    weight_half_bytes: NonNegative = 32e6
    """Bytes of one layer's weights on a device at which that share is halved. Same source: 7B reads at 0.75 with tp1 and at 0.48
    with tp8 on A100, at 0.77 and 0.52 on H100."""
    kv_efficiency: Efficiency = 0.75
    """Share of memory bandwidth at which decode reads keys and values (FlashDecoding's kernels: 0.7-0.9)."""
    copy_efficiency: Efficiency = 1.0
    """Share of memory bandwidth at which weights are copied from one engine to the other, tensor by tensor; a round figure."""
    activation_bytes: NonNegative = 60.0
    """Bytes of memory traffic a token, layer and hidden unit of a forward pass that are no matrix product, in bf16 and with
    fused kernels: norms, residuals, rotations, the MLP's gate. Korthikanti et al. (arXiv 2205.05198) count 34 bytes kept; each
    is written and nearly all are read once. Three times that where each operation is a separate kernel."""
    layer_s: NonNegative = 15e-6
    """Fixed seconds a layer and decode step replayed as a CUDA graph: the short kernels between the matrix products."""
    launch_s: NonNegative = 4e-4
    """Seconds in which the host launches one layer's kernels where there is no graph: about 50 at 8 microseconds. On CPU, where the
    host does the work as well, they come on top of it."""
    agree_s: NonNegative = 4e-4
    """Seconds in which ranks agree at the end of a pass, for each doubling of their number: that all are well, and what they
    counted. The slowest makes the others wait."""
    step_s: NonNegative = 1e-3
    """Seconds of scheduling and sampling a decode step on the host."""
    row_s: NonNegative = 2e-5
    """The same for every row of the step."""
    link_efficiency: Efficiency = 0.7
    """Share of a link's bandwidth that collectives reach (0.6 on A100, 0.8 on H100 within a node: Vidur's profiles)."""
    exposed_reduction: Fraction = 0.3
    """Share of a dp reduction, or of gathering updated weights, that shows even where all of it could hide behind a pass."""
    optimizer_bytes: NonNegative = 20.0
    """Bytes of memory traffic of Adam per parameter it updates: read and write two moments and the master, read the gradient, write
    the weight."""
    storage_bandwidth: Positive = 1e9
    """Bytes per second and replica to and from a checkpoint."""
    dispatch_s: NonNegative = 5e-3
    """Seconds between a call's start and its work on the devices."""
    task_s: NonNegative = 10e-3
    """Fixed seconds of a CPU task."""
    task_token_s: NonNegative = 2e-7
    """Seconds of a CPU task per token: decoding and the user's arithmetic."""

    def __post_init__(self) -> None:
        check_fields(self)

    # -- passes

    def forward(self, setup: Setup, lengths: Array | LengthSums) -> float:
        """Return the seconds of one forward pass of one dp rank over rows of these lengths (prompt + response)."""
        rows = LengthSums.of(lengths, setup.layout.cp)
        return self._pass(setup, rows, 1.0, 1.0, self.forward_efficiency, sums=setup.adapter_sums[:1])

    def train(self, setup: Setup, lengths: Array | LengthSums) -> tuple[float, float]:
        """Return the seconds of forward and of backward over one mini-batch's rows on one dp rank.

        6 P T FLOPs in all (Kaplan et al., arXiv 2001.08361), a third of them forward; the backward pass also reads and writes the
        fp32 gradients of every micro-batch, computes again what was not kept, and ends with the reduction over dp. For a frozen
        base no gradient is computed but that of its input: 4 P T (Hu et al., arXiv 2106.09685, section 4.2), and 6 for each
        adapter's.
        """
        lengths = LengthSums.of(lengths, setup.layout.cp)
        there, back = setup.adapter_sums
        forward = self._pass(setup, lengths, 1.0, 1.0, self.train_efficiency, sums=(there,))
        again = setup.forwards_again
        reads = (2.0 if setup.lora is None else 1.0) + again
        sums = (there,) * (setup.recompute == "full") + (back,)
        backward = self._pass(setup, lengths, 2.0 + again, reads, self.train_efficiency, reduces=1.0 + again, sums=sums)
        num_micro, _ = lengths.micro_batches(setup.micro_batch_tokens, setup.layout.cp)
        backward += (8 + 2 * setup.bytes_each) * num_micro * setup.local_learned / setup.device.memory_bandwidth
        if not lengths.tokens:
            return forward, backward
        # Buckets are filled by the last micro-batch alone, so only its backward pass hides their sums.
        hides = backward / (num_micro + setup.layout.pp - 1) if setup.traits.overlaps_reduction else 0.0
        return forward, backward + self._exposed(setup.summed_bytes / self._rate(setup.links.dp), hides)

    def _exposed(self, seconds: float, hides: float) -> float:
        """Seconds of a collective that are not hidden by work of ``hides`` seconds."""
        # Even a sum with enough work to hide behind shows a share of itself: its kernels take memory bandwidth from the others'.
        return max(self.exposed_reduction * seconds, seconds - hides) if hides else seconds

    def _pass(
        self, setup: Setup, lengths: Array | LengthSums, times: float, reads: float, efficiency: float, reduces: float = 1.0,
        sums: Sequence[Sums] = (), chunked: bool = False,
    ) -> float:  # fmt: skip
        """Seconds of ``times`` forward passes' work in which weights are read, and multiplied with, ``reads`` times.

        ``sums`` is what adapters sum over tp, a layer. Where it is ``chunked`` rows are cut between micro-batches (prefill); else a
        row that is longer than one runs alone.

        In layers' worth of work: m micro-batches take m of the slowest stage and, once, all the others (GPipe, arXiv 1811.06965;
        1F1B has the same bubble), which is (m + pp - 1) stages where all are alike.
        """
        spec, layout, device, traits = setup.spec, setup.layout, setup.device, setup.traits
        rows, most_tokens = LengthSums.of(lengths), setup.micro_batch_tokens
        tokens, squared, longest, _ = rows
        if not tokens:
            return 0.0
        num_micro, largest = rows.micro_batches(most_tokens, layout.cp)
        if chunked:
            num_micro, largest = math.ceil(tokens / most_tokens), min(tokens, float(most_tokens))
        tp, hidden, bandwidth = layout.tp, spec.hidden_size, device.memory_bandwidth
        # In the pipeline's ramp the other stages wait for one micro-batch each; interleaved stages wait for a part of it.
        filling = largest / traits.interleave
        slowest, every, most = setup.stage_layers
        layer_tokens = tokens * slowest + filling * (every - slowest)
        layer_passes = num_micro * slowest + (every - slowest) / traits.interleave
        # attention: causal, so half of the square; the bubble is filled by micro-batches of the longest rows
        squares = squared * most + filling * longest * (spec.num_layers - most)
        attention = 2.0 * spec.num_heads * spec.head_dim * squares
        # without a kernel that keeps scores on the chip they are plain products, of the whole square
        attention *= efficiency / (self.attention_efficiency * traits.attention) if traits.flash_attention else 2.0
        flops = reads * 2.0 * setup.layer_parameters * layer_tokens + times * attention
        inside = spec.num_layers / every  # adapters and experts are in layers only, and not at the output layer
        adapted = layer_tokens * inside
        arithmetic = (flops / tp + times * 2.0 * setup.adapter_products * adapted) / (setup.peak_flops * efficiency)
        # Every micro-batch reads the weights anew; of experts only those that its tokens reach.
        layer_read = setup.layer_parameters + inside * more_read(spec, largest, layout.ep)
        weights = reads * layer_passes * layer_read * setup.bytes_each / (tp * bandwidth * self.weight_efficiency)
        # Norms and residuals: 10 of 34 h per token that tp does not cut unless sequences are (arXiv 2205.05198, table 2).
        share = 1 / tp if traits.sequence_parallel else (10 + 24 / tp) / 34
        numbers_kept = self.activation_bytes / 2 * (1 if traits.fused else 3) * setup.bytes_each
        traffic = numbers_kept * hidden * share * layer_tokens
        traffic += moved_rows(spec) * setup.bytes_each * adapted
        if not traits.flash_attention:
            traffic += 8 * setup.bytes_each * spec.num_heads / tp * squares
        # Products are bound by arithmetic or by reading weights; near the ridge of the roofline both show, which the hypotenuse
        # rounds off.
        seconds = math.hypot(arithmetic, weights) + times * traffic / bandwidth
        launching = times * layer_passes * self.launch_s
        # the host of an accelerator runs ahead of it; where the device is the host, one comes after the other
        seconds = max(seconds, launching * device.launches) if device.launches else seconds + launching
        # Two all-reduces a layer over tp (Megatron-LM, arXiv 1909.08053), each pass again.
        message, reached = layer_tokens * hidden * setup.bytes_each, self.link_efficiency
        seconds += 2 * reduces * float(all_reduce(message, tp, setup.links.tp, layer_passes, reached))
        for layer_sums in sums:
            sent = adapted * layer_sums.numbers * setup.bytes_each
            seconds += float(all_reduce(sent, tp, setup.links.tp, layer_sums.messages * layer_passes, reached))
        if layout.cp > 1:  # at the same time as attention, which hides as much of it as takes no longer
            ring = ring_pass(times * adapted * setup.passed_bytes, layout.cp, setup.links.cp, times * layer_passes, reached)
            seconds += max(0.0, ring - times * attention / (tp * setup.peak_flops * efficiency))
        if layout.ep > 1:
            near, far = (adapted * each for each in setup.exchanged_bytes)
            seconds += 2 * reduces * float(all_to_all(near, far, layout.ep, setup.links.ep, layer_passes * inside, reached))
        # ZeRO-3 gathers the weights of every layer for the forward pass, and once more for the backward.
        if traits.gathers_weights:
            gathers = num_micro * (1 + (times > 1)) * self.gather(setup)
            seconds = max(seconds, gathers) if traits.overlaps_weights else seconds + gathers
        return seconds + self._hops(setup, tokens, filling, num_micro)

    def _hops(self, setup: Setup, tokens: float, filling: float, num_micro: int) -> float:
        """Seconds of activations between stages, of which each tp rank sends its part (as Megatron-LM does)."""
        layout, link = setup.layout, setup.links.pp
        if layout.pp == 1:
            return 0.0
        sent = (tokens + (layout.pp - 1) * filling) * setup.spec.hidden_size * setup.bytes_each / layout.tp
        return sent / self._rate(link) + (num_micro + layout.pp - 1) * link.latency_s

    def reduction(self, setup: Setup) -> float:
        """Return the seconds of making gradients, and with the distributed optimizer updated weights, alike over dp.

        An all-reduce in fp32; with the distributed optimizer (ZeRO stage 1, arXiv 1910.02054) a reduce-scatter, and an all-gather
        of the updated weights. The part of them that is not hidden is in :meth:`train` and :meth:`optimizer`.
        """
        return self.reduced_bytes(setup) / self._rate(setup.links.dp)

    def reduced_bytes(self, setup: Setup) -> float:
        """Return the bytes that a rank sends for that."""
        return setup.summed_bytes + setup.gathered_bytes

    def gather(self, setup: Setup) -> float:
        """Return the seconds of gathering one rank's weights from all dp ranks, as ZeRO-3 does in every pass."""
        own_numbers, copies = self._local(setup), setup.layout.num_copies
        others = (copies - 1) / copies * own_numbers if setup.layout.ep == 1 else own_numbers - setup.without_ep / copies
        return others * setup.bytes_each / self._rate(setup.links.dp)

    def optimizer(self, setup: Setup) -> float:
        """Return the seconds of one optimizer step: memory traffic over this rank's share of the state, then the weights' gather.

        Every dp rank updates all of its weights, or 1 / dp of them with ``AdamW(distributed=True)``, which are then gathered from
        all; an engine that gathers them while the next forward pass runs shows ``exposed_reduction`` of that.
        """
        clip = setup.links.dp.latency_s * (setup.layout.size > 1)
        gather = setup.gathered_bytes / self._rate(setup.links.dp)
        gather *= self.exposed_reduction if setup.traits.overlaps_gather else 1.0
        return self.optimizer_bytes * setup.stepped / setup.device.memory_bandwidth + clip + gather

    def agree(self, setup: Setup) -> float:
        """Return the seconds in which a role's ranks agree at the end of a pass that all of them are well and what they counted."""
        return self.agree_s * math.log2(setup.layout.size)

    # -- generation

    def prefill(self, setup: Setup, prompts: Array) -> float:
        """Return the seconds one rollout replica takes to read its prompts: forward passes over chunks of them."""
        tokens = float(prompts.sum())
        if not tokens:
            return 0.0
        generating = setup.generating
        chunks = math.ceil(tokens / generating.micro_batch_tokens)
        return self._pass(generating, prompts, 1.0, 1.0, self.forward_efficiency, chunked=True) + chunks * self.step_s

    def decode(self, setup: Setup, prompts: Array, responses: Array) -> float:
        """Return the seconds one rollout replica takes to produce responses of these lengths (see ``planner.perf.decoding``)."""
        return decode_s(self, setup, prompts, responses)

    def generate_each(self, setup: Setup, rows: ReplicaRows) -> dict[str, Array]:
        """Return the seconds of prefill and of decoding of several replicas by the names of their spans, [replica]."""
        prompts, which = rows.prompts
        prefill = np.array([self.prefill(setup, lengths) for lengths in prompts])[which]
        return {"prefill": prefill, "decode": decode_each_s(self, setup, rows)}

    # -- weights on the move

    def reshard(self, setup: Setup, received_bytes: float | None = None, *, base: bool = False) -> float:
        """Return the seconds of a weight transition on the slowest rank.

        For a role with adapters only the adapters go; their base goes once, and again wherever the rollout has slept (``refills``).

        Args:
            setup: the actor.
            received_bytes: bytes the fullest rank receives, e.g. counted by a ``ReshardPlan``; by default in closed form.
            base: whether adapters' base goes too, because it is the first time.
        """
        layout, adapters = setup.layout, setup.adapters
        # The base goes like the weights of a role without adapters, and the adapters after it.
        if adapters is not None and (base or setup.refills):
            whole = replace(setup, lora=None, refills=False)
            return self.reshard(whole) + self.reshard(replace(setup, refills=False), received_bytes)
        if received_bytes is None and adapters is not None:
            received_bytes = received_numbers(adapters, layout.tp, layout.pp, setup.rollout_tp) * setup.bytes_each
        if received_bytes is None:
            received_bytes = reshard_bytes(setup.spec, layout, setup.rollout_tp, setup.dtype, setup.rollout_pp, setup.rollout_ep)
        link = setup.links.pp if layout.pp > 1 else setup.links.tp if layout.tp > 1 else setup.links.dp
        link = setup.links.within if setup.rollout_pp > 1 else link  # stages are folded with their neighbours only
        latency = link.latency_s * setup.spec.num_layers / setup.rollout_pp * (received_bytes > 0)
        return received_bytes / self._rate(link) + latency + self.rewrite(setup)

    def planned_reshard(self, setup: Setup, plan: ReshardPlan) -> float:
        """Return the seconds of a planned weight transition: the rank whose bytes, link by link, take longest."""
        matrix = plan.matrix
        nodes = np.asarray(plan.nodes)
        same = (nodes[:, None] == nodes[None, :]) & ~np.eye(plan.num_ranks, dtype=bool)
        near, far = (matrix * same).sum(0), (matrix * (nodes[:, None] != nodes[None, :])).sum(0)
        links = dict(zip(LINKS[1:], (setup.links.within, setup.links.across), strict=True))
        seconds = sum(
            received / self._rate(link) + (received > 0) * link.latency_s * setup.spec.num_layers
            for received, link in zip((near, far), links.values(), strict=True)
        )
        # A rank waits for all of its links; the transition is over with the slowest rank.
        return float(np.max(seconds)) + self.rewrite(setup)

    def rewrite(self, setup: Setup) -> float:
        """Return the seconds of copying a rollout rank's weights through its own memory once.

        On CPU in mode ``shared`` only one engine's weights are there at a time: the trainer's come back at this price, with no
        bytes over a link (``to_training``).
        """
        needed = setup.rollout_local
        if setup.lora is not None:
            needed = slot_numbers(setup.spec, setup.lora, setup.rollout_tp)
        # Every number is read once and written once.
        return 2 * needed * setup.bytes_each / (setup.device.memory_bandwidth * self.copy_efficiency)

    def onload(self, setup: Setup, what: str) -> float:
        """Return the seconds of bringing ``"weights"`` or ``"optimizer"`` from host memory (or back: the links are symmetric).

        In bf16 the optimizer's part is the fp32 master and two moments, in fp32 the moments; sharded over dp with
        ``AdamW(distributed=True)``.
        """
        count, each = self._local(setup), float(setup.bytes_each)
        if what == "optimizer":
            count, each = (setup.stepped if setup.distributed else setup.local_learned), 8.0 if setup.dtype == "fp32" else 12.0
        return count * each / (setup.device.host_bandwidth * self.link_efficiency)

    def move(self, num_bytes: float, link: LinkSpec, messages: int = 1) -> float:
        """Return the seconds of a batch's columns between pools: bytes of the fullest receiver over its link."""
        return num_bytes / self._rate(link) + messages * link.latency_s

    def host_task(self, num_rows: int, num_tokens: int) -> float:
        """Return the seconds of a function of the user's over columns, in a CPU task."""
        return self.task_s + num_rows * 1e-6 + num_tokens * self.task_token_s

    # -- calls

    def costs(
        self, method: str, setup: Setup, prompts: Array, responses: Array, stale: bool = False, lengths: LengthSums | None = None,
        first: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        """Return the seconds of a call by the names of its spans, in their order, on ranks that get these rows.

        ``update`` is one optimizer step over the rows. With ``stale`` the rollout lacks the trainer's weights, with ``first``
        also the weights that nothing trains. ``lengths`` are those of prompts and responses together, where they were summed
        before.
        """
        kind = method_of(method)
        if kind.generates:
            reshard = {"reshard": self.reshard(setup, base=first)} if stale else {}
            return {**reshard, "prefill": self.prefill(setup, prompts), "decode": self.decode(setup, prompts, responses)}
        if kind.learns:
            forward, backward = self.train(setup, lengths or prompts + responses)
            end = self._step(setup) if kind.changes_weights else {}
            return {"forward": forward, "backward": backward, **self._agree(setup), **end}
        if kind.work == "transition":  # mode shared: what was put aside comes back, nothing is received
            return {"reshard": self.rewrite(setup)}
        if kind.work == "step":
            return self._step(setup)
        if kind.files:
            each = state_bytes(setup.dtype) if kind.files == "state" else setup.bytes_each
            return {method: each * setup.learned / self.storage_bandwidth / setup.layout.num_copies}
        if kind.phase == "inspection" or kind.work == "look":
            return {method: self.task_s}
        seconds = {"forward": self.forward(setup, lengths or prompts + responses), **self._agree(setup)}
        if "weights" in setup.offloads:
            moved = self.onload(setup, "weights")
            return {"onload": moved, **seconds, "offload": moved}
        return seconds

    def _agree(self, setup: Setup) -> dict[str, float]:
        return {"agree": self.agree(setup)} if setup.layout.size > 1 else {}

    def _step(self, setup: Setup) -> dict[str, float]:
        if "optimizer" not in setup.offloads:
            return {"optimizer": self.optimizer(setup)}
        moved = self.onload(setup, "optimizer")
        return {"onload": moved, "optimizer": self.optimizer(setup), "offload": moved}

    def seconds(self, method: str, setup: Setup, prompts: Array, responses: Array, stale: bool = False) -> float:
        """Return the seconds of a call on ranks that get rows of these lengths: the sum of :meth:`costs`."""
        return sum(self.costs(method, setup, prompts, responses, stale).values())

    def method_costs(
        self,
        method: str,
        role: RoleSpec,
        cluster: ClusterSpec,
        devices: Sequence[int],
        rows: Sequence[RowLengths],
        stale: bool = False,
        first: bool = False,
    ) -> list[Mapping[str, float]]:
        """Return, for each group of ranks that share rows, the call's seconds by span name (see :meth:`costs`)."""
        setup = _setup(role, cluster, tuple(devices))
        return [self.costs(method, setup, prompts, responses, stale, first=first) for prompts, responses in rows]

    # -- parts of formulas

    def _rate(self, link: LinkSpec) -> float:
        return link.bandwidth * self.link_efficiency

    @staticmethod
    def _local(setup: Setup) -> float:
        """Parameters of a rank, a frozen base included."""
        return setup.local + (0.0 if setup.lora is None else setup.local_learned)

    def _moved(self, logs: Mapping[str, float]) -> Self:
        """Return a model whose constants are so many e-folds from where they are; shares stay in their range."""
        moved = {name: getattr(self, name) * math.exp(log) for name, log in logs.items()}
        return replace(self, **{name: min(value, MOST_SHARE) if name in SHARES else value for name, value in moved.items()})

    @classmethod
    @checked
    def fit(
        cls, measured: Measured | Measurable | Sequence[Measured | Measurable], *, start: PerfModel | None = None,
        constants: Sequence[str] = (),
    ) -> Calibration[PerfModel]:  # fmt: skip
        """Refit at most eight constants from measured steps: robust least squares on logarithms, held to the presets.

        Args:
            measured: a real session (its last step), a result of ``session.measured(step)``, or several of these.
            start: the constants before; by default the presets.
            constants: which to fit; by default the eight of ``hfsdk.planner.perf.calibration.FITTED`` of which the steps say most.

        Returns:
            The fitted model with its report: errors by call before and after, bands, and constants the steps say nothing of.

        Raises:
            OptionError: nothing was measured, the trace was predicted, or too many or unknown constants.
        """
        return fit(measured, start or cls(), constants or FITTED)


@lru_cache(maxsize=1024)
def _setup(role: RoleSpec, cluster: ClusterSpec, devices: tuple[int, ...]) -> Setup:
    return Setup.of(role, cluster, devices)
