"""What ``run.first_bad()`` asks of a role's ranks: numbers of weights, of layers' outputs, of a loss per token, of gradients.

Nothing changes: no optimizer step is taken, and gradients that a probe makes are dropped. Each is collective over the role; torch
is imported where they run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from hfsdk.core.functions import Shipped
from hfsdk.core.microbatch import MiniBatchPlan, PassPlan
from hfsdk.core.table import Ragged, Table

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hfsdk.engine.worker.rank_view import RankView

Layer = tuple[str, float]
"""A module's name and the largest absolute number of its output; NaN or infinite where one of them is."""


def bad_weights(rank: RankView) -> tuple[int, dict[str, float]]:
    """Return the optimizer steps done, and the parameters of this rank that hold NaN or infinity, each with that."""
    found = {name: largest(parameter) for name, parameter in rank.module.named_parameters()}
    return rank.num_updates, {name: number for name, number in found.items() if not math.isfinite(number)}


def layer_outputs(rank: RankView, rows: Table) -> tuple[int, list[Layer]]:
    """Pass rows, the same on every rank, through the model; return the pipeline stage and its modules in the order they end."""
    ended: list[Layer] = []
    with _hooked(rank.module, lambda name, output: ended.append((name, largest(output)))):
        _pass(rank, rows)
    return rank.coordinates.pp, ended


def gradients(rank: RankView, rows: Table, loss: Shipped) -> tuple[int, dict[str, float]]:
    """Return the pipeline stage and the parameters whose gradient of a loss over rows, the same on all ranks, is not finite."""
    from hfsdk.engine.training.loss_io import sampled_at
    from hfsdk.engine.training.trainer import NonFiniteRows

    trainer = rank._hosted.trainer
    try:
        trainer.forward_backward(rows, _mini(rank, rows), loss.load(), sampled_at(rows))
        trainer.grad_norm()  # summed over dp
        found = {name: largest(parameter.main_grad) for name, parameter in rank.module.named_parameters()}
    except NonFiniteRows:
        found = {}
    finally:
        trainer.zero_grad()
    return rank.coordinates.pp, {name: number for name, number in found.items() if not math.isfinite(number)}


def token_losses(rank: RankView, rows: Table, *, loss: Shipped, num_tokens: int, num_rows: int) -> Mapping[str, Ragged]:
    """A primitive: what a loss gives each response token, and its gradient by what the model says of the token.

    Args:
        rank: of the role.
        rows: this dp rank's.
        loss: the user's.
        num_tokens: response tokens of the mini-batch over all ranks.
        num_rows: samples of it.

    Returns:
        ``token_loss`` and ``token_loss_gradient`` (the largest by absolute value of those by log-prob, entropy, value or score),
        one number per response token; 0 before the last pipeline stage.
    """
    from hfsdk.engine.training.loss_io import sampled_at

    lengths = rows.ragged("response").lengths
    spy = _TokenSpy(loss.load())
    micro_batches: list[tuple[int, ...]] = [(int(row),) for row in rows.row_ids]
    counts = rank._hosted.groups.gather_objects(len(micro_batches))
    micro_batches += [()] * (max(counts) - len(micro_batches))
    plan = PassPlan((tuple(micro_batches),) * rank.layout.num_replicas)
    mini = MiniBatchPlan(0, 0, tuple(range(num_rows)), plan, num_tokens, num_rows)
    rank._hosted.trainer.compute_loss(rows, mini, spy, sampled_at(rows))
    columns = {}
    for name, seen in (("token_loss", spy.losses), ("token_loss_gradient", spy.gradients)):
        parts = [seen.get(int(row), np.zeros(n, np.float32)) for row, n in zip(rows.row_ids, lengths, strict=True)]
        columns[name] = Ragged.from_lengths(np.concatenate([np.zeros(0, np.float32), *parts]), lengths)
    return columns


class _TokenSpy:
    """A loss that keeps what another one says of each token. Rows come one by one."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss
        self.losses: dict[int, Any] = {}
        """By the row's number."""
        self.gradients: dict[int, Any] = {}

    def __call__(self, out: Any, b: Any) -> Any:
        """Return what the loss returns."""
        import dataclasses

        import torch

        names = [f.name for f in dataclasses.fields(out) if getattr(out, f.name) is not None]
        with torch.enable_grad():
            leaves = {name: getattr(out, name).detach().requires_grad_() for name in names}
            returned = self._loss(dataclasses.replace(out, **leaves), b)
            each = returned[0] if isinstance(returned, tuple) else returned
            found = torch.autograd.grad(each.sum(), list(leaves.values()), allow_unused=True) if each.requires_grad else ()
        row, length = int(b.row_ids[0]), int(b.lengths[0])
        self.losses[row] = _on_tokens(each, length)
        parts = [_on_tokens(gradient, length) for gradient in found if gradient is not None]
        whole = np.stack([np.zeros(length, np.float32), *parts])
        bad = np.where(np.isfinite(whole), 0, whole).sum(0)
        self.gradients[row] = np.where(np.isfinite(whole).all(0), np.abs(np.nan_to_num(whole)).max(0), bad)
        return returned


def _on_tokens(numbers: Tensor, length: int) -> Any:
    """Return one number per token of a single row: of a number per sample the same for all."""
    flat = numbers.detach().float().cpu().numpy()
    return flat[:length] if len(flat) == length else np.repeat(flat[:1], length)


def largest(value: Any) -> float:
    """Return the largest absolute number of a tensor, or of those in a tuple; NaN or infinity where one is so, 0 without any."""
    import torch

    if isinstance(value, (tuple, list)):
        found = [largest(one) for one in value]
        return next((one for one in found if not math.isfinite(one)), max(found, default=0.0))
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return 0.0
    return float(torch.linalg.vector_norm(value.detach(), ord=math.inf, dtype=torch.float32))


@contextmanager
def _hooked(module: nn.Module, ended: Callable[[str, Any], None]) -> Iterator[None]:
    """Have ``ended(name, output)`` called whenever a module inside has made its output."""

    def hook(name: str) -> Callable[[Any, Any, Any], None]:
        return lambda module, inputs, output: ended(name, output)

    handles = [inner.register_forward_hook(hook(name)) for name, inner in module.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _pass(rank: RankView, rows: Table) -> None:
    from hfsdk.engine.training.loss_io import sampled_at

    trainer = rank._hosted.trainer
    micro_batches: Sequence[Sequence[int]] = [tuple(int(row) for row in rows.row_ids)]
    if trainer.role.head == "lm":
        trainer.log_probs(rows, micro_batches, sampled_at(rows))
    elif trainer.role.kind in ("reward", "cost"):
        trainer.scores(rows, micro_batches)
    else:
        trainer.values(rows, micro_batches)


def _mini(rank: RankView, rows: Table) -> MiniBatchPlan:
    """Plan the rows as one micro-batch that every dp rank takes alike."""
    numbers = tuple(int(row) for row in rows.row_ids)
    plan = PassPlan(((numbers,),) * rank.layout.num_replicas)
    return MiniBatchPlan(0, 0, numbers, plan, max(1, len(rows.ragged("response").flat)), rows.num_rows)
