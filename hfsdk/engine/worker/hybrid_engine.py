"""``HybridEngine``: the weights of one role, between its trainer and its rollout on the same devices (HybridFlow section 5).

What moves has a plan, a *leg*. Of a role that trains all its weights there is one. Of one with adapters there are two: the base,
which moves when the rollout does not hold it (the first time, or because it slept), and the adapters, whenever they are old.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hfsdk.core.errors import CallError, LostColumnError, WeightMismatchError
from hfsdk.core.lora import BESIDE, LoRA
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Weights
from hfsdk.core.spec import ModelSpec
from hfsdk.engine.generation.rollout import Rollout
from hfsdk.engine.process.rendezvous import Link
from hfsdk.engine.process.safepoint import PeerFailed, SafePoint
from hfsdk.engine.training import megatron_adapters, megatron_model
from hfsdk.engine.training.megatron_groups import RoleGroups
from hfsdk.engine.training.trainer import Trainer
from hfsdk.engine.weights import bridge, fingerprints, transport
from hfsdk.engine.weights.direct import NOTHING, Way
from hfsdk.engine.weights.fingerprints import MOVE_AGAIN, mismatch
from hfsdk.engine.weights.residency import Residency
from hfsdk.engine.worker.role_host import ObjectsGoneError, RoleHost
from hfsdk.resharding.boxes import megatron_boxes, vllm_boxes
from hfsdk.resharding.proof import Proof, Witness
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.resharding.reshard_report import Resident, TransportReport

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from hfsdk.engine.worker.kept_share import KeptShare


DAMAGED = (
    "The trainer's weights of this rank are damaged: session.load(...) a checkpoint, or rewind to a snapshot, before you go on."
)
"""The advice where the weights were nowhere else."""


def put_into_use(rollout: Rollout, group: ProcessGroup, safe: SafePoint) -> None:
    """Have a rollout use the weights that were written; on all ranks, or on none.

    Raises:
        WeightMismatchError: a packed layer does not multiply as its weight did.
    """
    error = None
    try:
        rollout.finish_update()
    except WeightMismatchError as mismatch_error:
        error = mismatch_error
    safe.agree(group, error)


@dataclass(frozen=True)
class WeightTransfer:
    """Tensors that move together, by one plan."""

    plan: ReshardPlan
    witness: Witness
    sources: Callable[[], Mapping[str, Tensor]]
    """The trainer's, by local name."""
    targets: Callable[[], Mapping[str, Tensor]]
    """The rollout's; it does not generate until they are put into use."""
    use: Callable[[SafePoint], None]
    """Has the rollout use what was written; on all ranks, or on none."""


def _data_of(rollout: Rollout) -> dict[str, Tensor]:
    return {name: parameter.data for name, parameter in rollout.parameters().items()}


def _scaled(adapters: Mapping[str, Tensor], lora: LoRA) -> dict[str, Tensor]:
    """Return adapters as the rollout multiplies with them: B times its scale."""
    return {name: tensor * lora.scale if name.endswith(".B") else tensor for name, tensor in adapters.items()}


class HybridEngine:
    """Moves one role's weights between its trainer and its rollout on the same devices.

    Attributes:
        plan: how what the role learns goes from the trainer to the rollout; ``None`` where one of them is missing.
        residency: the record of which of the two has the weights, where they share memory.
        stale: whether the rollout's weights are older than the trainer's.
        touched: whether a base may have changed, which nothing trains.
        last_report: the report of the last time that the rollout took some, also where they were wrong.
    """

    def __init__(
        self, spec: RoleSpec, worker: RoleHost, groups: RoleGroups, trainer: Trainer | None, rollout: Rollout | None
    ) -> None:
        self._spec, self._worker, self._groups = spec, worker, groups
        self._trainer, self._rollout = trainer, rollout
        self.plan: ReshardPlan | None = None
        self.residency: Residency | None = None
        self.stale, self.touched = True, False
        self.last_report: TransportReport | None = None
        self._beside = 0
        """Number of the snapshot whose adapters the rollout has beside the role's."""
        self._leg: WeightTransfer | None = None
        self._base: WeightTransfer | None = None
        self._base_sums: fingerprints.Sums | None = None
        """Fingerprints of the base that the rollout has."""
        self._proof_s = 0.0
        """Seconds that proofs have taken since the transition began."""
        self._given_sums: fingerprints.Sums | None = None
        """Fingerprints of what this rank gave last."""
        self._damaged: Exception | None = None
        """Why the trainer's weights must not be used, until there are others."""
        self.num_updates = 0
        """Optimizer steps that the rollout's weights have seen."""
        if trainer is None or rollout is None or spec.train is None or spec.rollout is None:
            return
        assert spec.model is not None
        put = partial(put_into_use, rollout, groups.world)
        if spec.lora is None:
            self._leg = self._leg_of(spec.model, trainer.local_tensors, rollout.weight_targets, put, vllm_tp=rollout.tp)
            self.plan = self._leg.plan
            if rollout.in_place:
                trainer.keep_weights()  # the transition itself leaves no weight there twice
                parameters = dict(trainer.model.named_parameters())
                self.residency = Residency(self.plan, worker.setup.rank, parameters, rollout.parameters())
                witness = self._witness_of(self.plan, rollout.tp)
                self._leg = replace(self._leg, witness=witness, targets=partial(_data_of, rollout))
            return
        base = partial(megatron_model.base_tensors, trainer.model)
        self._base = self._leg_of(spec.model, base, rollout.weight_targets, put, vllm_tp=rollout.tp)
        self._leg = self._leg_of(
            trainer.learned,
            trainer.local_tensors,
            rollout.adapter_targets,
            lambda safe: rollout.finish_adapters(),
            vllm_tp=rollout.tp,
        )
        self.plan = self._leg.plan

    def _leg_of(
        self, model: ModelSpec, sources: Callable[[], Mapping[str, Tensor]], targets: Callable[[], Mapping[str, Tensor]],
        use: Callable[[SafePoint], None], *, vllm_tp: int,
    ) -> WeightTransfer:  # fmt: skip
        spec = self._spec
        assert spec.train is not None
        assert spec.rollout is not None
        plan = ReshardPlan.between(model, spec.train, spec.rollout, spec.dtype, nodes=spec.nodes or None)
        return WeightTransfer(plan, self._witness_of(plan, vllm_tp), sources, targets, use)

    def _witness_of(self, plan: ReshardPlan, vllm_tp: int) -> Witness:
        rank = self._worker.setup.rank
        at = plan.train_at(rank)
        assert at is not None
        trainer_boxes, needed = megatron_boxes(plan.spec, plan.train, at.tp, at.pp), vllm_boxes(plan.spec, vllm_tp, rank % vllm_tp)
        return Witness(plan.moves, rank, trainer_boxes, needed, () if self.residency is None else self.residency.shared)

    def to_rollout(self, safe: SafePoint) -> TransportReport | None:
        """Give the rollout the trainer's weights (section 5.2, step 1); ``None`` if it has them, or they are another role's.

        Raises:
            CallError: ranks differ in what they would move.
            WeightMismatchError: what arrived is not what left; the rollout does not generate with it.
            Cancelled, PeerFailed: as at any safe point.
        """
        leg, trainer, rollout = self._leg, self._trainer, self._rollout
        if leg is None or trainer is None or rollout is None:  # a shadow's weights came before the call
            return None
        if not self._lacks_weights(rollout):
            return None
        self._take_back(safe)
        # a rollout that slept has given up its base as well
        if not rollout.awake:
            self._base_sums = None
        self._together(rollout, rollout.wake_weights, safe)
        self._proof_s = -rollout.probe_s
        with trainer.on_device("weights"), self._worker.recorder.span("reshard") as attrs:
            base = self._move_base(safe)
            report = self.last_report = self._move(leg, trainer.num_updates, safe)
            attrs.update(
                bytes=report.bytes_received, bytes_copied=report.bytes_copied, bytes_shared=report.bytes_shared,
                proof_s=self._proof_s + rollout.probe_s,
            )  # fmt: skip
            if base is not None:
                attrs.update(base_bytes=base.bytes_received, base_bytes_copied=base.bytes_copied)
        self.stale, self.num_updates = False, trainer.num_updates
        self._together(rollout, rollout.wake_cache, safe)
        return report

    def _move_base(self, safe: SafePoint) -> TransportReport | None:
        """Give the rollout the base that adapters stand beside, where it has none, or an older one on some rank."""
        if self._base is None:
            return None
        lacks = self._base_sums is None
        if self.touched and not lacks:
            lacks = bool((self._fingerprints(self._base, self._base.sources()) != self._base_sums).any())
        self.touched = False
        if not any(self._groups.gather(lacks, bool)):
            return None
        self._base_sums = None
        report = self._move(self._base, 0, safe)
        self._base_sums = self._given_sums
        return report

    def _move(self, leg: WeightTransfer, num_updates: int, safe: SafePoint) -> TransportReport:
        """Carry a leg out, compare both ends, and have the rollout use what arrived."""
        rank, world = self._worker.setup.rank, self._groups.world
        sources, targets = leg.sources(), leg.targets()
        self._agree(leg.plan, transport.problem(leg.plan, rank, sources, targets), num_updates, safe)
        sums = self._fingerprints(leg, sources)
        if self.residency is None:
            report = transport.execute(leg.plan, rank, sources, targets, world, checked=True)
        else:
            report = self.residency.to_rollout(world)
        report = self._compare(leg, report, sums, targets, safe)
        del targets  # or a plain weight would outlive its packing
        leg.use(safe)
        return report

    def put_beside(self, number: int, state: KeptShare, safe: SafePoint) -> None:
        """Have the rollout hold a snapshot's adapters too, in a slot of their own, unless it does; collective over the role.

        Raises:
            WeightMismatchError: what arrived is not what left.
        """
        leg, trainer, rollout = self._leg, self._trainer, self._rollout
        assert leg is not None
        assert trainer is not None
        assert rollout is not None
        has = self._beside == number and bool(rollout.readable_adapters(BESIDE))
        if all(self._groups.gather(has, bool)):
            return
        with self._worker.recorder.span("reshard") as attrs:
            tensors = trainer.shares.weights_of(state.share)
            slot = replace(
                leg, sources=lambda: tensors, targets=partial(rollout.adapter_targets, BESIDE),
                use=lambda safe: rollout.finish_adapters(BESIDE),
            )  # fmt: skip
            last, sums = self.last_report, self._given_sums
            report = self._move(slot, state.num_updates, safe)
            self.last_report, self._given_sums = last, sums
            attrs.update(bytes=report.bytes_received, bytes_copied=report.bytes_copied)
        self._beside = number

    def rollout_has_some(self) -> bool:
        """Whether the rollout can generate with what it has, however old; the same on all ranks."""
        rollout = self._rollout
        has = rollout is not None and rollout.ready and (self.residency is None or self.residency.generating)
        return all(self._groups.gather(has, bool))

    def look(self) -> tuple[Proof, int]:
        """Compare what the rollout has now with what the trainer has, or had when it gave it away.

        Returns:
            What was compared, and how many boxes cannot be: packed kernels hide the weights that they multiply with.
        """
        leg, trainer, rollout = self._leg, self._trainer, self._rollout
        assert leg is not None
        assert trainer is not None
        assert rollout is not None
        plan, witness, lora = leg.plan, leg.witness, self._spec.lora
        targets = rollout.readable() if lora is None else rollout.readable_adapters()
        hidden = {take.move.target_local for take in witness.takes} - set(targets)
        with trainer.on_device("weights"):
            # where both share memory the trainer has given its weights away: fingerprints of then stand for them
            away = self.residency is not None and self.residency.generating and self._given_sums is not None
            sums = (
                self._given_sums
                if away
                else self._fingerprints(leg, leg.sources() if lora is None else _scaled(leg.sources(), lora))
            )
        assert sums is not None
        all_sums = fingerprints.gathered(sums, [witness.num_given(rank) for rank in range(plan.num_ranks)], self._groups.world)
        proof = fingerprints.compared(witness, targets, all_sums, plan.num_ranks, hidden)
        return proof, len(witness.takes) + witness.num_shared - proof.num_boxes

    def _fingerprints(self, leg: WeightTransfer, sources: Mapping[str, Tensor]) -> fingerprints.Sums:
        begun = time.perf_counter()
        sums = fingerprints.of_given(leg.witness, sources, transport.TORCH_DTYPES[leg.plan.dtype])
        self._proof_s += time.perf_counter() - begun
        return sums

    def _compare(
        self, leg: WeightTransfer, report: TransportReport, sums: fingerprints.Sums, targets: Mapping[str, Tensor], safe: SafePoint
    ) -> TransportReport:
        """Compare what is in the rollout's parameters with what left, before they are packed; return the report with the proof."""
        begun = time.perf_counter()
        counts = [leg.witness.num_given(rank) for rank in range(leg.plan.num_ranks)]
        all_sums = fingerprints.gathered(sums, counts, self._groups.world)
        proof = fingerprints.compared(leg.witness, targets, all_sums, leg.plan.num_ranks)
        self._given_sums, self.last_report = sums, replace(report, proof=proof)
        self._proof_s += time.perf_counter() - begun
        safe.agree(self._groups.world, fingerprints.mismatch(f"{self._spec.name}'s rollout", proof, fingerprints.MOVE_AGAIN))
        return self.last_report

    def to_training(self, safe: SafePoint | None = None) -> None:
        """Give the trainer its weights back, if they are with the rollout, and the memory of the rollouts here that sleep.

        Args:
            safe: the point at which the call may stop; without it what comes back is not compared with what left.

        Raises:
            WeightMismatchError: what came back is not what left.
        """
        self._worker.rest()
        self._take_back(safe)

    def census(self) -> Resident:
        """Return what there is of the weights now, and how often."""
        if self.residency is not None:
            return self.residency.census()
        trainer, base = 0, 0
        base_of: tuple[str, ...] = ()
        if self._trainer is not None and self._spec.lora is None:
            trainer = self._trainer.memory_bytes()["weights"]
        elif self._trainer is not None:
            frozen = self._trainer.frozen
            trainer = megatron_model.storage_bytes(p.data for _, p in megatron_adapters.trained(self._trainer.model))
            base, base_of = megatron_model.storage_bytes(frozen.tensors()), frozen.roles
        rollout = self._rollout
        if rollout is None or not rollout.awake:
            return Resident("training", trainer, 0, 0, 0, 0, base, base_of)
        twice = sum(leg.plan.bytes_copied(self._worker.setup.rank) for leg in (self._leg, self._base) if leg is not None)
        return Resident("both", trainer, rollout.memory_bytes() - rollout.kv_cache_bytes, 0, 0, twice, base, base_of)

    def close(self) -> None:
        """Let go of both."""
        self._trainer = self._rollout = self.residency = self._leg = self._base = None

    def _take_back(self, safe: SafePoint | None) -> None:
        if self._damaged is not None and safe is not None:
            raise self._damaged
        if self.residency is None or not self.residency.generating:
            return
        leg, trainer = self._leg, self._trainer
        assert leg is not None
        assert trainer is not None
        with self._worker.recorder.span("reshard") as attrs:
            self._proof_s = 0.0
            attrs.update(bytes=0, bytes_copied=self.residency.to_training())
            sums, self._given_sums = self._given_sums, None
            if safe is None or sums is None:
                return
            error = None
            if bool((self._fingerprints(leg, trainer.local_tensors()) != sums).any()):
                error = WeightMismatchError(f"weights that {self._spec.name}'s rollout gave back are not those it got. {DAMAGED}")
            attrs["proof_s"] = self._proof_s
            try:
                safe.agree(self._groups.world, error)
            # one rank's damage is every rank's: no call may use the weights before they are replaced
            except (WeightMismatchError, PeerFailed) as failure:
                self._damaged = failure
                raise

    def replaced(self) -> None:
        """Note that the trainer has other weights now, all that it learns."""
        self.stale, self._damaged = True, None

    def _lacks_weights(self, rollout: Rollout) -> bool:
        """Whether the rollout's weights are old or not there, on any rank: one may have slept while another did not."""
        lacks = self.stale or (self.residency is not None and not self.residency.generating)
        return any(self._groups.gather(lacks or not rollout.ready, bool)) if rollout.sleeps else lacks

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
        own = [zlib.crc32(words.encode()), num_updates]
        all_ranks = self._groups.gather(own, list[int])
        if error is None and any(theirs != own for theirs in all_ranks):
            error = CallError(
                f"{self._spec.name}'s ranks differ in what they would move; (plan, version) by rank: {all_ranks}. Nothing moved. "
                "Load a checkpoint with session.load(...), or declare the role again."
            )
        safe.agree(self._groups.world, error)


class ShadowWeights:
    """The weights that a trained role gives to its shadow on other devices, and that the shadow takes.

    Attributes:
        version: the version of the weights that a shadow has.
        num_updates: optimizer steps that they have seen.
        last_report: the report of the last time that it took some, also where they were wrong.
    """

    def __init__(
        self, spec: RoleSpec, worker: RoleHost, groups: RoleGroups, trainer: Trainer | None, rollout: Rollout | None
    ) -> None:
        self._spec, self._worker, self._groups, self._rank = spec, worker, groups, groups.rank
        self._trainer, self._rollout = trainer, rollout
        self.version = self.num_updates = 0
        self._planned: tuple[RoleSpec, RoleSpec, bridge.Route] | None = None
        self._last_way: Way | None = None
        self.last_report: TransportReport | None = None

    def give(self, shadow: RoleSpec, link: Link | None, safe: SafePoint) -> tuple[Any, TransportReport]:
        """Give a shadow the weights that each of its ranks needs, over a link or in the store; return references and a report."""
        assert self._trainer is not None
        dtype = transport.TORCH_DTYPES[self._spec.dtype] if shadow.rollout is not None else None
        with self._worker.recorder.span("export") as attrs:
            route = self._route(self._spec, shadow, source=self._rank)
            if link is not None:
                way = self._way(self._spec, shadow, route)
                report = self._worker.exchange(way, link, self._trainer.local_tensors(), NOTHING, safe)
                attrs.update(bytes=report.bytes_sent, bytes_sent=report.bytes_sent)
                return way.given(), report
            bundles, report = bridge.give(route, self._trainer.local_tensors(), self._worker.store.put, dtype)
            attrs.update(bytes=sum(bundle.num_bytes for bundle in bundles), bytes_sent=report.bytes_sent)
        return bundles, report

    def take(self, weights: Weights, version: int, safe: SafePoint) -> TransportReport:
        """Take the trained role's weights into this shadow.

        Raises:
            LostColumnError: a worker that sent some of them ended.
            WeightMismatchError: they are not those that left; nothing uses them.
        """
        start, mapped = time.perf_counter(), self._mapped(weights)
        route = self._route(mapped.role, self._spec, target=self._rank)
        self.version = -1  # nobody uses weights of which a part is new
        if mapped.link is not None:
            report = self._take_directly(self._way(mapped.role, self._spec, route), mapped.link, safe)
        else:
            if self._rollout is not None:
                received, proof = bridge.take(route, mapped, self._targets(self._rollout))
            else:
                assert self._trainer is not None
                with self._trainer.on_device("weights"):
                    received, proof = bridge.take(route, mapped, self._trainer.local_tensors)
            report = TransportReport(0, sum(received), 0, 0, received, time.perf_counter() - start, proof)
            self.last_report = report
            safe.agree(self._groups.world, mismatch(self._spec.name, proof, MOVE_AGAIN))
            if self._rollout is not None:
                self._use(self._rollout, safe)
        self.last_report = report
        self.version, self.num_updates = version, mapped.num_updates
        return report

    def _mapped(self, weights: Weights) -> Weights:
        try:
            contents = self._worker.store.get([bundle.content for bundle in weights.bundles])
        except ObjectsGoneError:
            raise LostColumnError(
                f"the weights of {weights.role.name} for its shadow are gone with the worker that sent them; run the call again"
            ) from None
        bundles = zip(weights.bundles, contents, strict=True)
        return replace(weights, bundles=tuple(replace(bundle, content=content) for bundle, content in bundles))

    def _take_directly(self, way: Way, link: Link, safe: SafePoint) -> TransportReport:
        if self._rollout is None:
            assert self._trainer is not None
            with self._trainer.on_device("weights"):
                return self._worker.exchange(way, link, NOTHING, self._trainer.local_tensors(), safe, self._keep)
        report = self._worker.exchange(way, link, NOTHING, self._targets(self._rollout)(), safe, self._keep)
        self._use(self._rollout, safe)
        return report

    def _targets(self, rollout: Rollout) -> Callable[[], dict[str, Tensor]]:
        """Return a function that gives the tensors to write: all or, where the shadow read its base itself, its adapters."""
        return rollout.weight_targets if self._spec.lora is None else rollout.adapter_targets

    def _use(self, rollout: Rollout, safe: SafePoint) -> None:
        if self._spec.lora is None:
            put_into_use(rollout, self._groups.world, safe)
        else:
            rollout.finish_adapters()

    def _keep(self, report: TransportReport) -> None:
        self.last_report = report

    def _way(self, trained: RoleSpec, shadow: RoleSpec, route: bridge.Route) -> Way:
        if self._last_way is None or self._last_way.route is not route:
            self._last_way = Way.between(trained, shadow, route)
        return self._last_way

    def _route(self, trained: RoleSpec, shadow: RoleSpec, **rank: int) -> bridge.Route:
        """Plan this rank's way to or from another pool, once for a pair of places."""
        if self._planned is None or self._planned[:2] != (trained, shadow):
            self._planned = trained, shadow, bridge.Route.between(trained, shadow, **rank)
        return self._planned[2]

    def check_version(self, version: int) -> None:
        """Refuse to use weights that are not those the call was submitted for.

        Raises:
            CallError: a shadow's weights are old.
        """
        if self._spec.shadow_of and self.version != version:
            raise CallError(
                f"{self._spec.name} has weights of version {self.version}, the call needs {version}; a stale shadow is never used"
            )
