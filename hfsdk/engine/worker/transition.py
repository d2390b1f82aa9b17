"""``Transition``: the weights of one role, between its trainer and its rollout on the same devices (HybridFlow section 5)."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from hfsdk.core.errors import CallError
from hfsdk.core.roles import RoleSpec
from hfsdk.engine.generation.rollout import Rollout
from hfsdk.engine.process.safepoint import SafePoint
from hfsdk.engine.training.megatron_groups import RoleGroups
from hfsdk.engine.training.trainer import Trainer
from hfsdk.engine.weights import transport
from hfsdk.engine.weights.residency import Residency
from hfsdk.engine.worker.role_host import RoleHost
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.resharding.reshard_report import Resident, TransportReport


class Transition:
    """See the module's text.

    Attributes:
        plan: what goes from the trainer to the rollout; ``None`` where one of them is missing.
        residency: which of the two has the weights, where they share memory.
        stale: whether the rollout's weights are older than the trainer's.
    """

    def __init__(
        self, spec: RoleSpec, worker: RoleHost, groups: RoleGroups, trainer: Trainer | None, rollout: Rollout | None
    ) -> None:
        self._spec, self._worker, self._groups = spec, worker, groups
        self._trainer, self._rollout = trainer, rollout
        self.plan: ReshardPlan | None = None
        self.residency: Residency | None = None
        self.stale = True
        if trainer is None or rollout is None or spec.train is None or spec.rollout is None:
            return
        assert spec.model is not None
        self.plan = ReshardPlan.between(spec.model, spec.train, spec.rollout, spec.dtype, nodes=spec.nodes or None)
        if rollout.in_place:
            trainer.keep_weights()  # the transition itself leaves no weight there twice
            parameters = dict(trainer.model.named_parameters())
            self.residency = Residency(self.plan, worker.setup.rank, parameters, rollout.parameters())

    def to_rollout(self, safe: SafePoint) -> TransportReport | None:
        """Give the rollout the trainer's weights (section 5.2, step 1); ``None`` if it has them, or they are another role's.

        Raises:
            CallError: ranks differ in what they would move.
            Cancelled, PeerFailed: as at any safe point.
        """
        plan, trainer, rollout = self.plan, self._trainer, self._rollout
        if plan is None or trainer is None or rollout is None:  # a shadow's weights came before the call
            return None
        if not self._lacks_weights(rollout):
            return None
        self._take_back()
        rank, world = self._worker.setup.rank, self._groups.world
        self._together(rollout, rollout.wake_weights, safe)
        with trainer.on_device("weights"), self._worker.recorder.span("reshard") as attrs:
            sources = trainer.local_tensors()
            if self.residency is None:
                targets = rollout.weight_targets()
                self._agree(plan, transport.problem(plan, rank, sources, targets), trainer.num_updates, safe)
                report = transport.execute(plan, rank, sources, targets, world, checked=True)
            else:
                targets = {name: parameter.data for name, parameter in rollout.parameters().items()}
                self._agree(plan, transport.problem(plan, rank, sources, targets), trainer.num_updates, safe)
                report = self.residency.to_rollout(world)
            rollout.finish_update()
            attrs.update(bytes=report.bytes_received, bytes_copied=report.bytes_copied, bytes_shared=report.bytes_shared)
        self.stale = False
        self._together(rollout, rollout.wake_cache, safe)
        return report

    def to_training(self) -> None:
        """Give the trainer its weights back, if they are with the rollout, and the memory of the rollouts here that sleep."""
        self._worker.rest()
        self._take_back()

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

    def _take_back(self) -> None:
        if self.residency is not None and self.residency.generating:
            with self._worker.recorder.span("reshard") as attrs:
                attrs.update(bytes=0, bytes_copied=self.residency.to_training())

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
