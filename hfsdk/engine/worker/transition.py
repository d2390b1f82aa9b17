"""``Transition``: the weights of one role, between its trainer and its rollout on the same devices (HybridFlow section 5)."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hfsdk.core.errors import CallError, WeightMismatchError
from hfsdk.core.roles import RoleSpec
from hfsdk.engine.generation.rollout import Rollout
from hfsdk.engine.process.safepoint import PeerFailed, SafePoint
from hfsdk.engine.training.megatron_groups import RoleGroups
from hfsdk.engine.training.trainer import Trainer
from hfsdk.engine.weights import fingerprints, transport
from hfsdk.engine.weights.residency import Residency
from hfsdk.engine.worker.role_host import RoleHost
from hfsdk.resharding.boxes import megatron_boxes, vllm_boxes
from hfsdk.resharding.proof import Proof, Witness
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.resharding.reshard_report import Resident, TransportReport

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

DAMAGED = (
    "The trainer's weights of this rank are damaged: session.load(...) a checkpoint, or rewind to a snapshot, before you go on."
)
"""What to do where the weights were nowhere else."""


def put_into_use(rollout: Rollout, group: ProcessGroup, safe: SafePoint) -> None:
    """Have a rollout use the weights that were written; on all ranks, or on none.

    Raises:
        WeightMismatchError: a packed layer does not multiply as its weight did.
    """
    error = None
    try:
        rollout.finish_update()
    except WeightMismatchError as found:
        error = found
    safe.agree(group, error)


class Transition:
    """See the module's text.

    Attributes:
        plan: what goes from the trainer to the rollout; ``None`` where one of them is missing.
        residency: which of the two has the weights, where they share memory.
        stale: whether the rollout's weights are older than the trainer's.
        last_report: of the last time that the rollout took some, also where they were wrong.
    """

    def __init__(
        self, spec: RoleSpec, worker: RoleHost, groups: RoleGroups, trainer: Trainer | None, rollout: Rollout | None
    ) -> None:
        self._spec, self._worker, self._groups = spec, worker, groups
        self._trainer, self._rollout = trainer, rollout
        self.plan: ReshardPlan | None = None
        self.residency: Residency | None = None
        self.stale = True
        self.last_report: TransportReport | None = None
        self._witness: Witness | None = None
        self._proof_s = 0.0
        """Seconds that proofs have taken since the transition began."""
        self._given: fingerprints.Sums | None = None
        """Fingerprints of what this rank gave last."""
        self._damaged: Exception | None = None
        """Why the trainer's weights must not be used, until there are others."""
        self.num_updates = 0
        """Optimizer steps that the rollout's weights have seen."""
        if trainer is None or rollout is None or spec.train is None or spec.rollout is None:
            return
        assert spec.model is not None
        self.plan = ReshardPlan.between(spec.model, spec.train, spec.rollout, spec.dtype, nodes=spec.nodes or None)
        if rollout.in_place:
            trainer.keep_weights()  # the transition itself leaves no weight there twice
            parameters = dict(trainer.model.named_parameters())
            self.residency = Residency(self.plan, worker.setup.rank, parameters, rollout.parameters())
        self._witness = self._witness_of(self.plan, rollout)

    def _witness_of(self, plan: ReshardPlan, rollout: Rollout) -> Witness:
        rank = self._worker.setup.rank
        at = plan.train_at(rank)
        assert at is not None
        held, needed = megatron_boxes(plan.spec, plan.train, at.tp, at.pp), vllm_boxes(plan.spec, rollout.tp, rollout.tp_rank)
        return Witness(plan.moves, rank, held, needed, () if self.residency is None else self.residency.shared)

    def to_rollout(self, safe: SafePoint) -> TransportReport | None:
        """Give the rollout the trainer's weights (section 5.2, step 1); ``None`` if it has them, or they are another role's.

        Raises:
            CallError: ranks differ in what they would move.
            WeightMismatchError: what arrived is not what left; the rollout does not generate with it.
            Cancelled, PeerFailed: as at any safe point.
        """
        plan, trainer, rollout = self.plan, self._trainer, self._rollout
        if plan is None or trainer is None or rollout is None:  # a shadow's weights came before the call
            return None
        if not self._lacks_weights(rollout):
            return None
        self._take_back(safe)
        rank, world = self._worker.setup.rank, self._groups.world
        self._together(rollout, rollout.wake_weights, safe)
        self._proof_s = -rollout.probe_s
        with trainer.on_device("weights"), self._worker.recorder.span("reshard") as attrs:
            sources = trainer.local_tensors()
            if self.residency is None:
                targets = rollout.weight_targets()
                self._agree(plan, transport.problem(plan, rank, sources, targets), trainer.num_updates, safe)
                given = self._fingerprints(plan, sources)
                report = transport.execute(plan, rank, sources, targets, world, checked=True)
            else:
                targets = {name: parameter.data for name, parameter in rollout.parameters().items()}
                self._agree(plan, transport.problem(plan, rank, sources, targets), trainer.num_updates, safe)
                given = self._fingerprints(plan, sources)
                report = self.residency.to_rollout(world)
            report = self._compare(plan, report, given, targets, safe)
            put_into_use(rollout, self._groups.world, safe)
            attrs.update(
                bytes=report.bytes_received, bytes_copied=report.bytes_copied, bytes_shared=report.bytes_shared,
                proof_s=self._proof_s + rollout.probe_s,
            )  # fmt: skip
        self.stale, self.num_updates = False, trainer.num_updates
        self._together(rollout, rollout.wake_cache, safe)
        return report

    def rollout_has_some(self) -> bool:
        """Whether the rollout can generate with what it has, however old; the same on all ranks."""
        rollout = self._rollout
        has = rollout is not None and rollout.ready and (self.residency is None or self.residency.generating)
        return all(self._groups.gather_objects(has))

    def look(self) -> tuple[Proof, int]:
        """Compare what the rollout has now with what the trainer has, or had when it gave it away.

        Returns:
            What was compared, and how many boxes cannot be: packed kernels hide the weights that they multiply with.
        """
        plan, trainer, rollout, witness = self.plan, self._trainer, self._rollout, self._witness
        assert plan is not None
        assert trainer is not None
        assert rollout is not None
        assert witness is not None
        targets = rollout.readable()
        hidden = {taken.move.target_local for taken in witness.takes} - set(targets)
        with trainer.on_device("weights"):
            away = self.residency is not None and self.residency.generating and self._given is not None
            sums = self._given if away else self._fingerprints(plan, trainer.local_tensors())
        assert sums is not None
        given = fingerprints.gathered(sums, [witness.num_given(rank) for rank in range(plan.num_ranks)], self._groups.world)
        proof = fingerprints.compared(witness, targets, given, plan.num_ranks, hidden)
        return proof, len(witness.takes) + witness.num_shared - proof.num_boxes

    def _fingerprints(self, plan: ReshardPlan, sources: Mapping[str, Tensor]) -> fingerprints.Sums:
        assert self._witness is not None
        begun = time.perf_counter()
        sums = fingerprints.of_given(self._witness, sources, transport.TORCH_DTYPES[plan.dtype])
        self._proof_s += time.perf_counter() - begun
        return sums

    def _compare(
        self, plan: ReshardPlan, report: TransportReport, sums: fingerprints.Sums, targets: Mapping[str, Tensor], safe: SafePoint
    ) -> TransportReport:
        """Compare what is in the rollout's parameters with what left, before they are packed; return the report with the proof."""
        assert self._witness is not None
        begun = time.perf_counter()
        counts = [self._witness.num_given(rank) for rank in range(plan.num_ranks)]
        given = fingerprints.gathered(sums, counts, self._groups.world)
        proof = fingerprints.compared(self._witness, targets, given, plan.num_ranks)
        self._given, self.last_report = sums, replace(report, proof=proof)
        self._proof_s += time.perf_counter() - begun
        safe.agree(self._groups.world, fingerprints.mismatch(f"{self._spec.name}'s rollout", proof, fingerprints.MOVE_AGAIN))
        return self.last_report

    def to_training(self, safe: SafePoint | None = None) -> None:
        """Give the trainer its weights back, if they are with the rollout, and the memory of the rollouts here that sleep.

        Args:
            safe: where the call may stop; without it what comes back is not compared with what left.

        Raises:
            WeightMismatchError: what came back is not what left.
        """
        self._worker.rest()
        self._take_back(safe)

    def census(self) -> Resident:
        """Return what there is of the weights now, and how often."""
        if self.residency is not None:
            return self.residency.census()
        trainer = self._trainer.memory_bytes()["weights"] if self._trainer is not None else 0
        rollout = self._rollout
        if rollout is None or not rollout.awake:
            return Resident("training", trainer, 0, 0, 0, 0)
        twice = self.plan.bytes_copied(self._worker.setup.rank) if self.plan is not None else 0
        return Resident("both", trainer, rollout.memory_bytes() - rollout.kv_cache_bytes, 0, 0, twice)

    def close(self) -> None:
        """Let go of both."""
        self._trainer = self._rollout = self.residency = None

    def _take_back(self, safe: SafePoint | None) -> None:
        if self._damaged is not None and safe is not None:
            raise self._damaged
        if self.residency is None or not self.residency.generating:
            return
        plan, trainer = self.plan, self._trainer
        assert plan is not None
        assert trainer is not None
        with self._worker.recorder.span("reshard") as attrs:
            self._proof_s = 0.0
            attrs.update(bytes=0, bytes_copied=self.residency.to_training())
            given, self._given = self._given, None
            if safe is None or given is None:
                return
            error = None
            if bool((self._fingerprints(plan, trainer.local_tensors()) != given).any()):
                error = WeightMismatchError(f"weights that {self._spec.name}'s rollout gave back are not those it got. {DAMAGED}")
            attrs["proof_s"] = self._proof_s
            try:
                safe.agree(self._groups.world, error)
            except (WeightMismatchError, PeerFailed) as found:
                self._damaged = found
                raise

    def replaced(self) -> None:
        """Know that the trainer has other weights now, all of them."""
        self.stale, self._damaged = True, None

    def _lacks_weights(self, rollout: Rollout) -> bool:
        """Whether the rollout's weights are old or not there, on any rank: one may have slept while another did not."""
        lacks = self.stale or (self.residency is not None and not self.residency.generating)
        return any(self._groups.gather_objects(lacks or not rollout.ready)) if rollout.sleeps else lacks

    def _together(self, rollout: Rollout, wake: Callable[[], None], safe: SafePoint) -> None:
        """Wake the rollout's memory on every rank, or fail on every rank: those that wait for weights must not wait for ever."""
        if not rollout.sleeps:
            return
        error: Exception | None = None
        try:
            wake()
        except Exception as problem:
            error = problem
        safe.agree(self._groups.world, error)

    def _agree(self, plan: ReshardPlan, error: Exception | None, num_updates: int, safe: SafePoint) -> None:
        """Make sure, before anything moves, that all ranks carry out the same plan with weights of the same version."""
        words = f"{plan.spec}|{plan.train}|{plan.rollout}|{plan.dtype}|{plan.grouping}"
        mine = [zlib.crc32(words.encode()), num_updates]
        all_ranks = self._groups.gather_objects(mine)
        if error is None and any(theirs != mine for theirs in all_ranks):
            error = CallError(
                f"{self._spec.name}'s ranks differ in what they would move; (plan, version) by rank: {all_ranks}. Nothing moved. "
                "Load a checkpoint with session.load(...), or declare the role again."
            )
        safe.agree(self._groups.world, error)
