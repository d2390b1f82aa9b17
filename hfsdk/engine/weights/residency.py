"""Residency of weights on a rank: the trainer's are there or the rollout's, never both (HybridFlow, section 5.3).

A weight that both engines hold in the same box, order and dtype is one storage for both. For all other weights one engine's are
there at a time; the part of a training shard that the rollout does not need is kept aside. One rank, tp4 to tp2, with a quarter q0
of a weight and a whole norm n::

    training       Megatron [n | q0]                vLLM [n | -     ]        n is one storage, "-" is empty
    to_rollout     q0 is copied, q1 received, then q0 given up, weight by weight
    generating     Megatron [n | - ]                vLLM [n | q0 q1 ]
    to_training    q0 is copied back; q1 is dropped

Storages are emptied and filled again; the tensors on them stay, so parameters, optimizers and views need not know.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from hfsdk.engine.weights import transport
from hfsdk.engine.weights.offload import empty
from hfsdk.engine.weights.role_state import slices
from hfsdk.resharding.box_moves import Move
from hfsdk.resharding.boxes import VOCAB_TABLES, Box, inside, intersect, megatron_boxes, vllm_boxes, without
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.resharding.reshard_report import Resident, TransportReport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TABLES = (*VOCAB_TABLES, "embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters whose padding rows must be zero, of either engine."""


class Residency:
    """The weights of a role that trains and generates on one rank.

    Args:
        plan: the transition to the rollout.
        rank: this rank's number in the plan.
        trainer: Megatron's parameters by local name: the parameters themselves, not their ``.data``.
        rollout: vLLM's parameters by name; parameters that lie alike are given the trainer's storage here, the others emptied.
    """

    def __init__(
        self, plan: ReshardPlan, rank: int, trainer: Mapping[str, torch.Tensor], rollout: Mapping[str, torch.Tensor]
    ) -> None:
        self.plan, self.rank, self.generating = plan, rank, False
        train, after = plan.train_at(rank), plan.rollout_at(rank)
        assert train is not None
        assert after is not None
        self._train_tp_rank, self._rollout_tp_rank = train.tp, after.tp
        self._trainer = dict(trainer)
        on_storage: dict[int, list[str]] = defaultdict(list)
        for name, tensor in trainer.items():
            on_storage[_address(tensor)].append(name)
        self._together = {name: tuple(names) for names in on_storage.values() for name in names}
        """The parameters on the same storage as each parameter: only one that is alone can be emptied alone, or shared."""
        self.shared = {
            target: source for target, source in plan.shared(rank).items()
            if len(self._together[source]) == 1 and rollout[target].shape == trainer[source].shape
            and rollout[target].dtype == trainer[source].dtype
        }  # fmt: skip
        for target, source in self.shared.items():
            # From here on both engines have one storage: whatever the trainer writes, the rollout reads.
            rollout[target].data = trainer[source].data
        self._rollout = dict(rollout)
        self._own = [move for move in plan.moves if move.source == move.target == rank and move.target_local not in self.shared]
        self._left = _left_over(plan, rank)
        self._aside: list[tuple[str, tuple[slice, ...], torch.Tensor]] = []
        self._bytes = {name: t.untyped_storage().nbytes() for name, t in (*self._rollout.items(), *trainer.items())}
        # A role begins in training: the rollout's own storages are given up until the first generation.
        for name in self._rollout:
            self._empty_rollout(name)

    @torch.no_grad()
    def to_rollout(self, group: ProcessGroup | None) -> TransportReport:
        """Give the rollout its weights and empty the trainer's; collective. The transport's errors are raised as they are."""
        read = {move.source_local for move in self.plan.moves if move.source == self.rank}
        # A storage with several parameters can be emptied only when the last of them has been read.
        pending = {names: read.intersection(names) for names in self._together.values()}

        def begin(name: str) -> None:
            if name not in self.shared:
                self._fill(self._rollout[name], self._bytes[name])
                self._clear_padding(name, self._rollout[name], self._rollout_tp_rank)

        def done(name: str) -> None:
            names = self._together[name]
            pending[names].discard(name)
            if not pending[names] and name not in self.shared.values():
                self._give_up(names)

        self.generating = True
        try:
            report = transport.execute(
                self.plan, self.rank, self._trainer, self._rollout, group, shared=self.shared, begin=begin, done=done, checked=True
            )
            for name in self._rollout:  # of which nothing comes from anywhere: padding alone
                if not self._rollout[name].untyped_storage().nbytes():
                    begin(name)
            for names in set(self._together.values()):  # of which nothing goes anywhere
                if not read.intersection(names):
                    self._give_up(names)
        except BaseException:
            self.to_training()  # what was given up is in the rollout by then
            raise
        return report

    @torch.no_grad()
    def to_training(self) -> int:
        """Give the trainer its weights again, as they were, and empty the rollout's; return the bytes copied."""
        if not self.generating:
            return 0
        by_source: dict[str, list[Move]] = defaultdict(list)
        left_in: dict[str, int] = defaultdict(int)
        for move in self._own:
            by_source[move.source_local].append(move)
            left_in[move.target_local] += 1
        copied = 0
        # What is not empty was never given up, or is one storage for both: it has its numbers.
        gone = [name for name, tensor in self._trainer.items() if not tensor.untyped_storage().nbytes()]
        for name in gone:
            tensor = self._trainer[name]
            self._fill(tensor, self._bytes[name])
            self._clear_padding(name, tensor, self._train_tp_rank)
            for move in by_source[name]:
                source = self._rollout[move.target_local]
                tensor[slices(move.source_start, move.size)].copy_(source[slices(move.target_start, move.size)])
                copied += move.numel * tensor.element_size()
                left_in[move.target_local] -= 1
                # A parameter of the rollout goes as soon as everything that the trainer wants of it is back: both are never there
                # whole.
                if not left_in[move.target_local]:
                    self._empty_rollout(move.target_local)
        for name in self._rollout:
            self._empty_rollout(name)
        for name, where, values in self._aside:
            self._trainer[name][where] = values
        self._aside.clear()
        self.generating = False
        return copied

    def bytes_beside(self) -> int:
        """Return the bytes that are there in addition to the trainer's storages; may be asked from another thread at any time."""
        trainer, rollout = (_resident(tensors.values()) for tensors in (self._trainer, self._rollout))
        aside = sum(values.nbytes for _, _, values in list(self._aside))
        return aside + sum(size for at, size in rollout.items() if at not in trainer)

    def census(self) -> Resident:
        """Count the bytes on the rank now, from the storages that are not empty."""
        trainer, rollout = (_resident(tensors.values()) for tensors in (self._trainer, self._rollout))
        both = trainer.keys() & rollout.keys()
        return Resident(
            "generating" if self.generating else "training",
            sum(size for at, size in trainer.items() if at not in both),
            sum(size for at, size in rollout.items() if at not in both),
            sum(trainer[at] for at in both),
            sum(values.nbytes for _, _, values in self._aside),
            self._twice(),
        )

    def _twice(self) -> int:
        """Count the bytes of the rollout's boxes that are in the trainer's storages too, at other addresses, or aside."""
        at = self.plan.train_at(self.rank)
        assert at is not None
        trained = [box for box in megatron_boxes(self.plan.spec, self.plan.train, at.tp, at.pp) if box.local in self._trainer]
        needed = vllm_boxes(self.plan.spec, self.plan.rollout.tp, self.rank % self.plan.rollout.tp)
        by_tensor: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
        for box in trained:
            by_tensor[box.tensor] += [(box, self._trainer[box.local]), *self._aside_of(box)]
        return sum(
            _common(box, self._rollout[box.local], trained_box, tensor)
            for box in needed for trained_box, tensor in by_tensor[box.tensor]
        )  # fmt: skip

    def _aside_of(self, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the parts of a box of the trainer's that are kept aside: which part of the tensor, and its values."""
        for name, where, values in self._aside:
            start = tuple(cut.start for cut in where)
            if name == box.local:
                part = intersect(Box("", start, tuple(values.shape), "", ()), Box("", box.local_start, box.size, "", ()))
                if part:
                    first = tuple(b + s - lo for b, s, lo in zip(box.start, part[0], box.local_start, strict=True))
                    yield Box(box.tensor, first, part[1], name, tuple(s - a for s, a in zip(part[0], start, strict=True))), values

    # ---- storages

    def _give_up(self, names: Sequence[str]) -> None:
        """Empty a storage of the trainer's; parts that the rollout does not take are put aside first."""
        aside = []
        for name in names:
            for start, size in self._left.get(name, ()):
                where = slices(start, size)
                aside.append((name, where, self._trainer[name][where].detach().clone()))
        # A storage that numpy has seen cannot be freed: its values are then still in place, and nothing is put aside.
        if empty(self._trainer[names[0]], alone=len(names) == 1):
            self._aside += aside

    def _empty_rollout(self, name: str) -> None:
        if name not in self.shared:
            empty(self._rollout[name], alone=True)

    @staticmethod
    def _fill(tensor: torch.Tensor, num_bytes: int) -> None:
        """Give a tensor's storage its size again."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            storage.resize_(num_bytes)

    def _clear_padding(self, name: str, table: torch.Tensor, tp_rank: int) -> None:
        if name in TABLES:
            table[max(self.plan.spec.vocab_size - tp_rank * len(table), 0) :].zero_()


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _resident(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    return {_address(t): t.untyped_storage().nbytes() for t in tensors if t.untyped_storage().nbytes()}


def _common(needed: Box, there: torch.Tensor, present: Box, here: torch.Tensor) -> int:
    part = intersect(needed, present)
    if part is None or not there.untyped_storage().nbytes() or not here.untyped_storage().nbytes() or here.dtype != there.dtype:
        return 0
    start, size = part
    first, second = there[slices(inside(needed, start), size)], here[slices(inside(present, start), size)]
    return 0 if first.data_ptr() == second.data_ptr() else first.nbytes


def _left_over(plan: ReshardPlan, rank: int) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return the boxes of a rank's training parameters that it does not take into its rollout."""
    at = plan.train_at(rank)
    assert at is not None
    moved: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    for move in plan.moves:
        if move.source == move.target == rank:
            moved[move.source_local].append((move.source_start, move.size))
    left: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    for box in megatron_boxes(plan.spec, plan.train, at.tp, at.pp):
        left[box.local] += without(box.local_start, box.size, moved[box.local])
    return {name: boxes for name, boxes in left.items() if boxes}
