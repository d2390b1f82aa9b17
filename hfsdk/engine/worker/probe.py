"""``Probe``: a role's measurements on one rank for ``run.first_bad()``: weights, layers' outputs, losses per token, gradients.

Nothing changes: no optimizer step is taken, and gradients that a probe makes are dropped. Each is collective over the role.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from hfsdk.core.functions import Shipped
from hfsdk.core.microbatch import MiniBatchPlan, PassPlan
from hfsdk.core.table import Ragged, Table
from hfsdk.engine.training.loss import sampled_at
from hfsdk.engine.training.megatron_adapters import trained
from hfsdk.engine.training.trainer import NonFiniteRows
from hfsdk.engine.worker.role_host import RoleOnRank

Layer = tuple[str, float]
"""A module's name and the largest absolute number of its output; NaN or infinite where one of them is."""


class Probe:
    """Looks at one role on one rank: weights, layers' outputs, losses per token, gradients."""

    def __init__(self, hosted: RoleOnRank) -> None:
        self._hosted = hosted

    @property
    def _stage(self) -> int:
        """This rank's pipeline stage."""
        return self._hosted.mesh.coordinates(self._hosted.groups.rank).pp

    def bad_weights(self) -> tuple[int, dict[str, float]]:
        """Return the optimizer steps done, and the parameters of this rank that hold NaN or infinity, each with that."""
        trainer = self._hosted.trainer
        extremes = {name: largest(parameter) for name, parameter in trainer.model.named_parameters()}
        return trainer.num_updates, {name: number for name, number in extremes.items() if not math.isfinite(number)}

    def weight_sums(self) -> tuple[int, dict[str, str]]:
        """Return the optimizer steps done, and a checksum of every parameter's bytes on this rank."""
        trainer = self._hosted.trainer
        return trainer.num_updates, {name: _checksum(parameter) for name, parameter in trainer.model.named_parameters()}

    def layer_outputs(self, rows: Table) -> tuple[int, list[Layer]]:
        """Pass rows, the same on every rank, through the model; return the pipeline stage and its modules in the order they end."""
        ended: list[Layer] = []
        with _hooked(self._hosted.trainer.model, lambda name, output: ended.append((name, largest(output)))):
            self._pass(rows)
        return self._stage, ended

    def gradients(self, rows: Table, loss: Shipped) -> tuple[int, dict[str, float]]:
        """Return the pipeline stage and the parameters whose gradient of a loss over rows, the same on all ranks, is not finite."""
        trainer = self._hosted.trainer
        try:
            trainer.forward_backward(rows, self._mini(rows), loss.load(), sampled_at(rows))
            trainer.grad_norm()  # summed over dp
            extremes = {name: largest(parameter.main_grad) for name, parameter in trained(trainer.model)}
        except NonFiniteRows:
            extremes = {}
        finally:
            trainer.zero_grad()
        return self._stage, {name: number for name, number in extremes.items() if not math.isfinite(number)}

    def token_losses(self, rows: Table, *, loss: Shipped, num_tokens: int, num_rows: int) -> Mapping[str, Ragged]:
        """A primitive: what a loss gives each response token, and its gradient by what the model says of the token.

        Args:
            rows: this dp rank's.
            loss: the user's.
            num_tokens: response tokens of the mini-batch over all ranks.
            num_rows: samples of it.

        Returns:
            ``token_loss`` and ``token_loss_gradient`` (the largest by absolute value of those by log-prob, entropy, value or
            score), one number per response token; 0 before the last pipeline stage.
        """
        lengths = rows.ragged("response").lengths
        spy = _TokenSpy(loss.load())
        micro_batches: list[tuple[int, ...]] = [(int(row),) for row in rows.row_ids]
        counts = self._hosted.groups.gather(len(micro_batches), int)
        micro_batches += [()] * (max(counts) - len(micro_batches))
        plan = PassPlan((tuple(micro_batches),) * self._hosted.mesh.layout.num_replicas)
        mini = MiniBatchPlan(0, 0, tuple(range(num_rows)), plan, num_tokens, num_rows)
        self._hosted.trainer.compute_loss(rows, mini, spy, sampled_at(rows))
        columns = {}
        for name, seen in (("token_loss", spy.losses), ("token_loss_gradient", spy.gradients)):
            parts = [seen.get(int(row), np.zeros(n, np.float32)) for row, n in zip(rows.row_ids, lengths, strict=True)]
            columns[name] = Ragged.from_lengths(np.concatenate([np.zeros(0, np.float32), *parts]), lengths)
        return columns

    def _pass(self, rows: Table) -> None:
        trainer = self._hosted.trainer
        micro_batches: Sequence[Sequence[int]] = [tuple(int(row) for row in rows.row_ids)]
        if trainer.role.head == "lm":
            trainer.log_probs(rows, micro_batches, sampled_at(rows))
        elif trainer.role.kind in ("reward", "cost"):
            trainer.scores(rows, micro_batches)
        else:
            trainer.values(rows, micro_batches)

    def _mini(self, rows: Table) -> MiniBatchPlan:
        """Plan the rows as one micro-batch that every dp rank takes alike."""
        numbers = tuple(int(row) for row in rows.row_ids)
        plan = PassPlan(((numbers,),) * self._hosted.mesh.layout.num_replicas)
        return MiniBatchPlan(0, 0, numbers, plan, max(1, len(rows.ragged("response").flat)), rows.num_rows)


class _TokenSpy:
    """A loss that keeps what another one says of each token. Rows come one by one."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss
        self.losses: dict[int, Any] = {}
        """The losses of each row's tokens, by the row's number."""
        self.gradients: dict[int, Any] = {}

    def __call__(self, out: Any, b: Any) -> Any:
        """Call the loss, note its value and gradient on each token, and return its result."""
        names = [f.name for f in fields(out) if getattr(out, f.name) is not None]
        with torch.enable_grad():
            leaves = {name: getattr(out, name).detach().requires_grad_() for name in names}
            returned = self._loss(replace(out, **leaves), b)
            each = returned[0] if isinstance(returned, tuple) else returned
            gradients = torch.autograd.grad(each.sum(), list(leaves.values()), allow_unused=True) if each.requires_grad else ()
        row, length = int(b.row_ids[0]), int(b.lengths[0])
        self.losses[row] = _on_tokens(each, length)
        parts = [_on_tokens(gradient, length) for gradient in gradients if gradient is not None]
        whole = np.stack([np.zeros(length, np.float32), *parts])
        bad = np.where(np.isfinite(whole), 0, whole).sum(0)
        self.gradients[row] = np.where(np.isfinite(whole).all(0), np.abs(np.nan_to_num(whole)).max(0), bad)
        return returned


def _on_tokens(numbers: torch.Tensor, length: int) -> Any:
    """Return one number per token of a single row: of a number per sample the same for all."""
    flat = numbers.detach().float().cpu().numpy()
    return flat[:length] if len(flat) == length else np.repeat(flat[:1], length)


def largest(value: Any) -> float:
    """Return the largest absolute number of a tensor, or of those in a tuple; NaN or infinity where one is so, 0 without any."""
    if isinstance(value, (tuple, list)):
        extremes = [largest(number) for number in value]
        return next((number for number in extremes if not math.isfinite(number)), max(extremes, default=0.0))
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return 0.0
    return float(torch.linalg.vector_norm(value.detach(), ord=math.inf, dtype=torch.float32))


@contextmanager
def _hooked(module: torch.nn.Module, ended: Callable[[str, Any], None]) -> Iterator[None]:
    """Have ``ended(name, output)`` called whenever a module inside has made its output."""

    def hook(name: str) -> Callable[[Any, Any, Any], None]:
        return lambda module, inputs, output: ended(name, output)

    handles = [inner.register_forward_hook(hook(name)) for name, inner in module.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _checksum(parameter: torch.Tensor) -> str:
    content = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()
