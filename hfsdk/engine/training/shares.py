"""A Megatron model's share: the part of its state that this rank copies, and how all ranks get the whole of it back.

Copying needs no other rank (but for one number where the optimizer is distributed); giving back does: every strip goes from the dp
rank whose share it is in straight into the tensors of the others, so no host ever holds a whole replica::

    weights, dp=2         dp 0              dp 1
    read_share            copies [a a a|    copies |b b b]
    write_share           [a a a|  --------------> [a a a|
                                |b b b] <--------------  |b b b]

With the distributed optimizer masters and moments stay where they are stepped; see ``megatron_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from hfsdk.core.errors import CheckpointError
from hfsdk.engine.training import megatron_model, megatron_optimizer
from hfsdk.engine.weights.on_host import copy_on_host
from hfsdk.engine.weights.role_state import KINDS, Summary
from hfsdk.engine.weights.shares import StateShare, Strip, divided

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    from hfsdk.engine.training.megatron_groups import RoleGroups


class ShareOfModel:
    """A model and its optimizer, as shares are taken of them.

    Args:
        model: Megatron's, on this rank.
        optimizer: ``None`` for a frozen role.
        groups: the role's process groups.
    """

    def __init__(self, model: torch.nn.Module, optimizer: MegatronOptimizer | None, groups: RoleGroups) -> None:
        self._model, self._optimizer, self._groups = model, optimizer, groups
        self._distributed = isinstance(optimizer, DistributedOptimizer)

    def summary(self, num_updates: int) -> Summary:
        """Return the facts that the state needs besides its numbers; collective over dp where the optimizer is distributed."""
        if self._optimizer is None:
            return Summary(num_updates)
        step = megatron_optimizer.num_steps(self._model, self._optimizer, self._groups)
        return Summary(num_updates, ("main",) if step is None else KINDS, step)

    def strips(self, kinds: Sequence[str]) -> list[Strip]:
        """Return this rank's share of the weights and of these tensors of the optimizer."""
        return [strip for kind in ("weights", *kinds) for strip in self._own_strips(kind)]

    @torch.no_grad()
    def read(self, layout: str, num_updates: int) -> StateShare:
        """Copy this rank's share to the CPU."""
        summary = self.summary(num_updates)
        strips = ((strip, copy_on_host(values)) for strip, values in self._in_place(summary))
        return StateShare(layout, self._groups.rank, summary, tuple(strips))

    @torch.no_grad()
    def in_place(self, layout: str, num_updates: int) -> StateShare:
        """Return this rank's share without a copy: its values are the model's own tensors."""
        summary = self.summary(num_updates)
        return StateShare(layout, self._groups.rank, summary, tuple(self._in_place(summary)))

    @torch.no_grad()
    def begin(self, layout: str, summary: Summary) -> StateShare:
        """Return this rank's share in place, of an optimizer with the tensors of ``summary``, for its numbers to be written."""
        if self._optimizer is not None:
            megatron_optimizer.start_afresh(self._model, self._optimizer, summary.step)
        return StateShare(layout, self._groups.rank, summary, tuple(self._in_place(summary)))

    @torch.no_grad()
    def complete(self, share: StateShare) -> None:
        """Bring the numbers written into every rank's share to the ranks that hold the same; collective over dp."""
        self._give("weights", dict(share.content))
        if self._optimizer is None:
            return
        megatron_optimizer.refresh_masters(self._model, self._optimizer)
        for kind in share.summary.kinds:
            self._give(kind, dict(share.content))

    def _in_place(self, summary: Summary) -> Iterator[tuple[Strip, torch.Tensor]]:
        for kind in ("weights", *(summary.kinds if self._optimizer is not None else ())):
            tensors = self._tensors_of(kind)
            for strip in self._own_strips(kind):
                yield strip, self._numbers_in(strip, tensors)

    @torch.no_grad()
    def weights_of(self, share: StateShare) -> dict[str, torch.Tensor]:
        """Return the weights of every rank's share as tensors of their own, by local name; collective over dp.

        Raises:
            CheckpointError: on every rank: tensors are missing or have other shapes.
        """
        self._check(share)
        tensors = {name: torch.empty_like(tensor) for name, tensor in megatron_model.local_tensors(self._model).items()}
        self._give("weights", dict(share.content), {name: (tensor, 0) for name, tensor in tensors.items()})
        return tensors

    @contextmanager
    def borrowed(self, share: StateShare) -> Iterator[None]:
        """Write the weights of every rank's share over the model's, and those back at the end; collective over dp.

        Raises:
            CheckpointError: as :meth:`write`.
        """
        self._check(share)
        tensors = megatron_model.local_tensors(self._model)
        with torch.no_grad():
            # The weights come back from a copy on the host: on the device there may be no room for a second model.
            own = {name: copy_on_host(tensor) for name, tensor in tensors.items()}
        try:
            with torch.no_grad():
                self._give("weights", dict(share.content))
            yield
        finally:
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(own[name])

    @torch.no_grad()
    def write(self, share: StateShare) -> None:
        """Take every rank's share; collective over dp. An optimizer that the shares do not know starts afresh.

        Raises:
            CheckpointError: on every rank, before anything changes: tensors are missing or have other shapes.
        """
        kinds = share.summary.kinds if self._optimizer is not None else ()
        # Before anything is written: a state that does not fit must leave the model as it was.
        self._check(share)
        values = dict(share.content)
        self._give("weights", values)
        if self._optimizer is None:
            return
        megatron_optimizer.start_afresh(self._model, self._optimizer, share.summary.step)
        for kind in kinds:
            self._give(kind, values)

    def _check(self, share: StateShare) -> None:
        trained = self._optimizer is not None
        wanted = set(self.strips(share.summary.kinds if trained else ()))
        present = {strip for strip, _ in share.content if trained or strip.kind == "weights"}
        odd = sorted(wanted ^ present, key=str)
        problem = f"{odd[0].kind} of {odd[0].local} {odd[0].shape}, numbers {odd[0].start}:{odd[0].stop}" if odd else ""
        # All ranks must raise, or those without a problem would wait in the next collective for ever.
        problems = [text for text in self._groups.gather(problem, str) if text]
        if problems:
            raise CheckpointError(f"the state does not fit the model, e.g. {problems[0]}. It is a state of another model.")

    def _give(
        self, kind: str, values: dict[Strip, torch.Tensor], tensors: dict[str, tuple[torch.Tensor, int]] | None = None
    ) -> None:
        """Write this rank's strips of a kind into its tensors, or others like them, and bring those of the other dp ranks."""
        tensors = self._tensors_of(kind) if tensors is None else tensors
        for strip in self._own_strips(kind):
            self._numbers_in(strip, tensors).copy_(values[strip])
        if self._stays(kind) or self._groups.dp_size == 1:
            return
        for source, part in enumerate(self._divided(kind)):
            for strip in part:
                # as bytes: every backend sends those, whatever the dtype
                dist.broadcast(self._numbers_in(strip, tensors).view(torch.uint8), group=self._groups.dp, group_src=source)

    def _stays(self, kind: str) -> bool:
        """Whether every dp rank has numbers of its own of this kind."""
        return kind != "weights" and self._distributed

    def _own_strips(self, kind: str) -> list[Strip]:
        if not self._stays(kind):
            return self._divided(kind)[self._groups.dp_rank]
        assert self._optimizer is not None
        return [
            Strip(kind, name, tuple(parameter.shape), torch.float32, part.start, part.stop)
            for name, parameter, _, _, part in megatron_optimizer.optimized(self._model, self._optimizer)
            if kind != "main" or parameter.dtype != torch.float32  # a float32 weight is its own master
        ]

    def _divided(self, kind: str) -> list[list[Strip]]:
        """Return, by dp rank, the shares of the tensors that all of them hold."""
        local = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in megatron_model.local_tensors(self._model).items()}
        if kind != "weights":
            local = {n: (shape, torch.float32) for n, (shape, dtype) in local.items() if kind != "main" or dtype != torch.float32}
        return divided(kind, local, self._groups.dp_size)

    def _tensors_of(self, kind: str) -> dict[str, tuple[torch.Tensor, int]]:
        """Return {local name: (tensor that this rank holds, which number of the local tensor is its first)}."""
        if kind == "weights":
            return {name: (tensor, 0) for name, tensor in megatron_model.local_tensors(self._model).items()}
        assert self._optimizer is not None
        return {
            name: (main if kind == "main" else state[kind], part.start)
            for name, _, main, state, part in megatron_optimizer.optimized(self._model, self._optimizer)
        }

    @staticmethod
    def _numbers_in(strip: Strip, tensors: dict[str, tuple[torch.Tensor, int]]) -> torch.Tensor:
        tensor, first = tensors[strip.local]
        return tensor.view(-1)[strip.start - first : strip.stop - first]
