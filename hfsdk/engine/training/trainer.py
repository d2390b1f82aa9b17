"""One role's Megatron model on one rank: inference passes, updates in micro-batches, and its whole state.

One optimizer step (a mini-batch) on every rank; S marks a safe point, where ranks agree on cancel and failure::

    for each micro-batch of this dp rank:   S | forward, loss, backward into the gradient buffer
    (pp > 1: for each chunk of them):       S | Megatron's 1F1B schedule over the stages
    once:                                   S | gather metrics, sum the buffers over dp, gradient norm, clip, AdamW

Losses are divided by token and row counts of the *whole* mini-batch before the backward pass, and gradients are summed
(not averaged) over dp, so any split into micro-batches or over ranks gives the same gradient. The step is refused on every
rank when a loss or the gradient is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer

from hfsdk.core.errors import CheckpointError, OptionError
from hfsdk.core.layout import Mesh
from hfsdk.core.learning_rates import LEARNS, what_is_learned
from hfsdk.core.methods import onloads
from hfsdk.core.microbatch import MiniBatchPlan
from hfsdk.core.roles import PARTS, AdamW, RoleSpec
from hfsdk.core.spec import ModelSpec
from hfsdk.core.table import Array, Ragged, Table
from hfsdk.core.training_choices import TrainingChoices, choose_training
from hfsdk.engine.process.recorder import Recorder
from hfsdk.engine.process.safepoint import SafePoint
from hfsdk.engine.training import megatron_adapters, megatron_folder, megatron_model, megatron_optimizer
from hfsdk.engine.training.cpu_support_megatron import cuda_type_names
from hfsdk.engine.training.loss import Loss, Temperature
from hfsdk.engine.training.megatron_groups import RoleGroups
from hfsdk.engine.training.passes import Overlap, Passes, Pipeline
from hfsdk.engine.training.shared_base import SharedWeights
from hfsdk.engine.training.shares import ShareOfModel
from hfsdk.engine.training.vocab_parallel import KeptTokens
from hfsdk.engine.weights.offload import Offloaded
from hfsdk.engine.weights.role_state import Shard, Summary
from hfsdk.engine.weights.shares import StateShare

NEVER = SafePoint(lambda: False)
"""A safe point of a call that nobody cancels."""


class NonFiniteRows(Exception):  # noqa: N818 - raised on all ranks alike; the controller makes the user's error of it
    """A loss or the gradient was NaN or infinite: the step was refused on every rank and nothing changed.

    Attributes:
        row_ids: the rows whose loss was not finite, over all ranks; empty when only the gradient was.
    """

    def __init__(self, row_ids: Sequence[int]) -> None:
        super().__init__(list(row_ids))
        self.row_ids = list(row_ids)

    def __str__(self) -> str:
        return f"the loss of rows {self.row_ids} is not finite" if self.row_ids else "the gradient is not finite"


class Trainer:
    """A role's model on this rank, with its optimizer unless the role is frozen.

    Collective over the role's ranks, except :meth:`zero_grad`, :meth:`take_share` and :meth:`memory_bytes`. Rows are named by
    ``rows.row_ids``; ``rows`` needs the ragged columns ``prompt`` and ``response`` and may hold just this dp rank's rows.

    Attributes:
        num_updates: optimizer steps done.
        frozen: the weights that nothing trains, which other roles may have too.
        choices: the kernels and schedules that are on.
    """

    def __init__(
        self, role: RoleSpec, mesh: Mesh, groups: RoleGroups, recorder: Recorder, choices: TrainingChoices | None = None
    ) -> None:
        """Build the model and load ``role.folder``; ``choices`` are those of the device and the layout where none are given.

        Raises:
            LayoutError: the layout does not fit the model.
            ModelNotFoundError: the folder has no weights, or those of another model.
        """
        self.role, self.mesh, self.groups, self.recorder = role, mesh, groups, recorder
        self.spec = role.model or ModelSpec.from_folder(role.folder)
        on_cpu = groups.device.type == "cpu"
        self.choices = choices or choose_training(on_cpu=on_cpu, tp=groups.tp_size, dp=groups.dp_size)
        self.model = megatron_model.build_model(
            self.spec, groups, role.head, role.dtype, self.spec.max_positions, role.recompute,
            sequence_parallel=self.choices.sequence_parallel, lora=role.lora,
        )  # fmt: skip
        has_head = megatron_folder.load_folder(self.model, self.spec, groups, role.folder)
        if role.adapters:
            has_head |= megatron_folder.load_adapters(self.model, groups, role.adapters)
        # A critic's head begins at zero, so that its first values are no noise; a reward model's has to be drawn.
        if role.head == "scalar" and not has_head and role.kind != "critic":
            megatron_model.init_scalar_head(self.model, role.seed)
        self.num_updates = 0
        self._learns = LEARNS.get(role.kind, "policy")
        """The kind of learning by which the optimizer's step takes a suggested learning rate: the last loss says it."""
        self._reduced = False
        self._ddp: DistributedDataParallel | None = None
        self._optimizer: MegatronOptimizer | None = None
        self._overlap: Overlap | None = None
        if role.optimizer is None:
            self.model.requires_grad_(False)
            self.model.eval()
        self.frozen = SharedWeights(self.model, role, groups)
        if role.optimizer is not None:
            self._ddp = megatron_optimizer.wrap(self.model, groups, role.optimizer, self.choices)
            self._optimizer = megatron_optimizer.make_optimizer(self._ddp, groups, role.optimizer, role.dtype, self.choices)
            self._overlap = Overlap(self._ddp) if self.choices.overlap else None
        self.pipeline = Pipeline(self.model, groups, recorder, self._overlap)
        self._passes = Passes(role, self.spec, groups, recorder, self.pipeline, self.choices.sequence_parallel)
        tensors_of: dict[str, Callable[[], Iterable[torch.Tensor]]] = {
            "optimizer": partial(megatron_optimizer.state_tensors, self.model, self._optimizer),
            "gradients": partial(megatron_optimizer.gradient_tensors, self._ddp),
            "weights": partial(megatron_optimizer.weight_tensors, self.model, self._ddp),
        }
        self._offloaded = {
            part: Offloaded(tensors_of[part], recorder, device=groups.device, part=part, skip_zeros=part == "gradients")
            for part in tensors_of if part in role.offloads
        }  # fmt: skip
        """The parts that can be offloaded, in the order in which they leave: which masters are the weights themselves can be seen
        only while those are there."""

    def log_probs(
        self,
        rows: Table,
        micro_batches: Sequence[Sequence[int]],
        temperature: Temperature = 1.0,
        safe: SafePoint = NEVER,
        entropy: bool = False,
        allowed: KeptTokens = KeptTokens(),  # noqa: B008
    ) -> dict[str, Ragged]:
        """Return ``log_probs`` (and ``entropy``) of each response token given all before it; float32, ordered as ``rows``.

        Like all passes, it returns them on the ranks of the last pipeline stage and nothing on the others.

        Args:
            rows: this dp rank's rows.
            micro_batches: row numbers of each micro-batch; equally many micro-batches on every dp rank.
            temperature: divides the logits: one number, one per row, or one per response token. 0 (greedy) counts as 1.
            safe: the points at which the call may stop.
            entropy: whether to return it too.
            allowed: the tokens that the distribution is of.

        Raises:
            OptionError: a row without a prompt or too long, or micro-batches that do not cover the rows.
        """
        self._need_head("lm", "log_probs")
        return self._passes.log_probs(rows, micro_batches, temperature, safe, entropy=entropy, allowed=allowed)

    def values(self, rows: Table, micro_batches: Sequence[Sequence[int]], safe: SafePoint = NEVER) -> dict[str, Ragged]:
        """Return ``values``: the scalar head's value of the state before each response token, ordered as ``rows``."""
        self._need_head("scalar", "values")
        columns = self._passes.infer(rows, micro_batches, safe, lambda table, micro, out: [out[:, 0]], 1)
        return dict(zip(["values"], columns, strict=False))

    def scores(self, rows: Table, micro_batches: Sequence[Sequence[int]], safe: SafePoint = NEVER) -> dict[str, Array]:
        """Return ``scores``: the scalar head at the last token of prompt plus response; one float32 per row."""
        self._need_head("scalar", "scores")

        columns = self._passes.infer(rows, micro_batches, safe, lambda table, micro, out: [out[:, 0]], 1, per_row=True)
        return dict(zip(["scores"], [column.flat for column in columns], strict=False))

    def update(
        self,
        rows: Table,
        plan: Sequence[MiniBatchPlan],
        loss: Loss,
        temperature: Temperature = 1.0,
        safe: SafePoint = NEVER,
    ) -> list[dict[str, float]]:
        """Take one optimizer step per mini-batch and return each one's metrics, the same on every rank.

        Metrics: loss, grad_norm (before clipping), lr, num_tokens, num_samples, epoch, mini_batch, and what ``loss`` returns:
        per-token tensors as token means, per-sample tensors as sample means, single numbers as means weighted by tokens,
        names ending in ``_max`` as maxima. Micro-batches without a response token are left out.

        Raises:
            NonFiniteRows: on every rank; the mini-batch's step was refused, earlier ones stand.
            Cancelled: at a safe point; the steps that were finished stand.
            Exception: what ``loss`` raised, on its rank (``PeerFailed`` on the others).
        """
        steps = []
        total = sum(mini.passes.num_micro_batches for mini in plan)
        done = 0
        for mini in plan:
            self.zero_grad()
            try:
                metrics = self._accumulate(rows, mini, loss, temperature, safe, (done, total), reduce=True)
                metrics |= self.step()
            except BaseException:
                self.zero_grad()
                raise
            done += mini.passes.num_micro_batches
            steps.append(metrics)
        return steps

    def forward_backward(
        self, rows: Table, mini: MiniBatchPlan, loss: Loss, temperature: Temperature = 1.0, safe: SafePoint = NEVER
    ) -> dict[str, float]:
        """Add one mini-batch's gradient to the sum so far and return its metrics; :meth:`step` applies it.

        Raises:
            NonFiniteRows: a loss was not finite, on every rank; the gradient is gone.
        """
        try:
            return self._accumulate(rows, mini, loss, temperature, safe, (0, mini.passes.num_micro_batches))
        except BaseException:
            self.zero_grad()
            raise

    def compute_loss(
        self, rows: Table, mini: MiniBatchPlan, loss: Loss, temperature: Temperature = 1.0, safe: SafePoint = NEVER
    ) -> float:
        """Return a mini-batch's loss without a gradient."""
        progress = (0, mini.passes.num_micro_batches)
        return self._passes.losses(rows, mini, loss, temperature, safe, progress, train=False).loss

    def zero_grad(self) -> None:
        """Drop the gradient."""
        ddp, optimizer = self._trainable()
        if self._overlap is not None:
            self._overlap.settle()
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        if self._overlap is not None:
            self._overlap.over()
        self._reduced = False

    def grad_norm(self) -> float:
        """Return the norm of the whole model's gradient, over all shards."""
        _, optimizer = self._trainable()
        self._reduce()
        with torch.no_grad(), cuda_type_names():
            optimizer.prepare_grads()
            norm = float(optimizer.get_grad_norm())
            optimizer.zero_grad()  # param.grad was the buffer; main_grad keeps the gradient
        return norm

    @property
    def optimizer_taken(self) -> AdamW | None:
        """The role's optimizer with the learning rate that its model takes, given or suggested."""
        declared = self.role.optimizer
        adapters = self.role.lora is not None
        return None if declared is None else declared.for_model(self.spec.num_parameters(), self._learns, adapters=adapters)

    def step(self) -> dict[str, float]:
        """Clip, set the learning rate, take one AdamW step and drop the gradient.

        Returns:
            ``grad_norm`` (before clipping) and ``lr``.

        Raises:
            NonFiniteRows: the gradient is not finite; nothing changed but the gradient is gone.
        """
        _, optimizer = self._trainable()
        wanted = self.optimizer_taken
        assert wanted is not None
        self._reduce()
        with self.on_device("optimizer"), self.recorder.span("optimizer"), torch.no_grad(), cuda_type_names():
            optimizer.prepare_grads()
            norm = float(optimizer.get_grad_norm())
            if not math.isfinite(norm):
                self.zero_grad()
                raise NonFiniteRows([])
            if wanted.max_grad_norm:
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), wanted.max_grad_norm, norm)
            lr = wanted.lr_at(self.num_updates)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step_with_ready_grads()
            self.num_updates += 1
        self.zero_grad()
        return {"grad_norm": norm, "lr": lr}

    def gradients(self) -> dict[str, torch.Tensor] | None:
        """Return the whole model's gradient under Hugging Face names, float32, on rank 0 (``None`` elsewhere)."""
        ddp, _ = self._trainable()
        self._reduce()
        megatron_optimizer.gather_gradient(ddp, self.groups)
        local = {name: parameter.main_grad for name, parameter in megatron_adapters.trained(self.model)}
        scalar = megatron_model.has_scalar_head(self.model)
        return megatron_folder.gather_tensors(local, self.learned, self.groups, scalar=scalar)

    def weights(self, *, merge: bool = True) -> dict[str, torch.Tensor] | None:
        """Return the whole model under Hugging Face names on rank 0 (``None`` elsewhere), or its adapters where not merged."""
        return megatron_folder.gather_full(self.model, self.spec, self.groups, merge=merge)

    def save_folder(self, folder: str | Path, *, merge: bool = True) -> list[str]:
        """Write a folder that transformers reads or, with ``merge=False``, adapters as peft does; return rank 0's notes."""
        return megatron_folder.save_folder(self.model, self.spec, self.groups, folder, self.role, merge=merge)

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters by Megatron name, for the weight transition."""
        return megatron_model.local_tensors(self.model)

    @property
    def learned(self) -> ModelSpec:
        """The part of the model that is the role's own: its adapters where it has some, else all of it."""
        return self.model.adapters or self.spec

    @property
    def shard(self) -> Shard:
        """The part of the role's state that this rank holds."""
        scalar = megatron_model.has_scalar_head(self.model)
        return Shard(spec=self.learned, layout=self.mesh.layout, at=self.groups.coordinates, scalar=scalar)

    def share(self) -> StateShare:
        """Return a copy of this rank's share of the role's state, on the CPU."""
        with self.on_device("weights", "optimizer"):
            return self.shares.read(str(self.mesh), self.num_updates)

    def blank_share(self, summary: Summary, device: str = "cpu") -> StateShare:
        """Return a share for :meth:`take_share`, all zero, to be filled with a state that any layout saved."""
        kinds = summary.kinds if self._optimizer is not None else ()
        return StateShare.blank(str(self.mesh), self.groups.rank, summary, self.shares.strips(kinds), device)

    @contextmanager
    def giving_share(self) -> Iterator[StateShare]:
        """Have this rank's share where it lies, to be read from; its summary is collective over dp."""
        with self.on_device("weights", "optimizer"):
            yield self.shares.in_place(str(self.mesh), self.num_updates)

    @contextmanager
    def taking_share(self, summary: Summary) -> Iterator[StateShare]:
        """Have this rank's share where it lies, to be written; then every rank gets the parts that it needs. Collective over dp.

        A state of which a part was written is of no use.
        """
        self.frozen.own()
        with self.on_device(*PARTS):
            share = self.shares.begin(str(self.mesh), summary)
            yield share
            self.shares.complete(share)
            self.frozen.share()
            if self._optimizer is not None:
                self.zero_grad()
        self.num_updates = summary.num_updates

    def take_share(self, share: StateShare) -> None:
        """Restore the share that :meth:`share` returned on every rank, bit for bit.

        Raises:
            CheckpointError: the state is of another layout, rank or model; on every rank, and nothing changed.
        """
        self._need_own(share.layout, share.rank)
        self.frozen.own()
        with self.on_device(*PARTS):
            self.shares.write(share)
            self.frozen.share()
            if self._optimizer is not None:
                self.zero_grad()
        self.num_updates = share.summary.num_updates

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank's device holds now, of ``weights``, ``gradients``, ``optimizer`` (masters included)."""
        return megatron_model.memory_bytes(self.model, self._ddp, self._optimizer, self.frozen)

    def offloaded_bytes(self) -> int:
        """Return the bytes of this rank that are in host memory now, instead of on the device."""
        return sum(part.host_bytes for part in self._offloaded.values())

    @contextmanager
    def on_device(self, *parts: str) -> Iterator[None]:
        """Bring the offloaded ones of ``"weights"``, ``"gradients"`` and ``"optimizer"`` to the device for a while."""
        with ExitStack() as stack:
            for part in (part for part in parts if part in self._offloaded):
                stack.enter_context(self._offloaded[part].on_device())
            yield

    @contextmanager
    def during(self, method: str) -> Iterator[None]:
        """Bring the offloaded parts that a call needs all along; AdamW's state travels during the passes, its step waits for it."""
        parts = [part for part in onloads(method, self.role) if part in self._offloaded]
        with ExitStack() as stack:
            for part in parts:
                here = self._offloaded[part]
                stack.enter_context(here.coming() if part == "optimizer" else here.on_device())
            yield

    def keep_weights(self) -> None:
        """Leave the weights where they are from now on: another engine has them on the same storage."""
        if "weights" in self._offloaded:
            self._offloaded.pop("weights").stay()

    # ---- inside

    @property
    def shares(self) -> ShareOfModel:
        """The model and its optimizer, as shares are taken of them."""
        return ShareOfModel(self.model, self._optimizer, self.groups)

    def _need_own(self, layout: str, rank: int) -> None:
        here = str(self.mesh), self.groups.rank
        if here != (layout, rank):
            raise CheckpointError(
                f"the state is of layout '{layout}' rank {rank}; role {self.role.name!r} has layout '{here[0]}' rank {here[1]} "
                "here. Cut it into pieces and fill a blank share (shares.py)."
            )

    def _trainable(self) -> tuple[DistributedDataParallel, MegatronOptimizer]:
        if self._ddp is None or self._optimizer is None:
            raise OptionError(f"role {self.role.name!r} is frozen: it has no optimizer. Give it one, e.g. AdamW(lr=1e-5).")
        return self._ddp, self._optimizer

    def _need_head(self, head: str, method: str) -> None:
        if self.role.head != head:
            raise OptionError(f"{method} needs a model with head {head!r}; role {self.role.name!r} has {self.role.head!r}.")

    def _accumulate(
        self, rows: Table, mini: MiniBatchPlan, loss: Loss, temperature: Temperature, safe: SafePoint,
        progress: tuple[int, int], *, reduce: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        ddp, _ = self._trainable()
        self._learns = what_is_learned(loss, self.role.kind)
        if self._reduced:
            megatron_optimizer.keep_sum_once(ddp, self.groups)
            self._reduced = False
        tally = self._passes.losses(rows, mini, loss, temperature, safe, progress, train=True, reduce=reduce)
        if tally.bad_rows:
            raise NonFiniteRows(sorted(tally.bad_rows))
        counts = {"num_tokens": mini.num_tokens, "num_samples": mini.num_rows, "epoch": mini.epoch}
        return {"loss": tally.loss, **tally.metrics(), **counts, "mini_batch": mini.index}

    def _reduce(self) -> None:
        """Sum the gradient over dp, once."""
        ddp, _ = self._trainable()
        if not self._reduced:
            size = sum(buffer.grad_data.nbytes for buffer in ddp.buffers) if self.groups.dp_size > 1 else 0
            with self.recorder.span("backward", bytes=size), torch.no_grad():
                finalize_model_grads([ddp], pg_collection=self.groups.collection())
            if self._overlap is not None:
                self._overlap.over()
            self._reduced = True
