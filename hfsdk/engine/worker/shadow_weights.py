"""``ShadowWeights``: what a trained role gives to its shadow on other devices, and what the shadow takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hfsdk.core.errors import CallError, LostColumnError
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Weights
from hfsdk.engine.generation.rollout import Rollout
from hfsdk.engine.process.rendezvous import Link
from hfsdk.engine.process.safepoint import SafePoint
from hfsdk.engine.training.megatron_groups import RoleGroups
from hfsdk.engine.training.trainer import Trainer
from hfsdk.engine.weights import bridge, transport
from hfsdk.engine.weights.direct import NOTHING, Way
from hfsdk.engine.weights.fingerprints import MOVE_AGAIN, mismatch
from hfsdk.engine.worker.role_host import ObjectsGoneError, RoleHost
from hfsdk.engine.worker.transition import put_into_use
from hfsdk.resharding.reshard_report import TransportReport

if TYPE_CHECKING:
    from torch import Tensor


class ShadowWeights:
    """See the module's text.

    Attributes:
        version: of the weights that a shadow has.
        num_updates: optimizer steps that they have seen.
        last_report: of the last time that it took some, also where they were wrong.
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
        """Give a shadow what each of its ranks needs, over a link or in the store; return references to it, and what it came to."""
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
        start, given = time.perf_counter(), self._mapped(weights)
        route = self._route(given.role, self._spec, target=self._rank)
        self.version = -1  # nobody uses weights of which a part is new
        if given.link is not None:
            report = self._take_directly(self._way(given.role, self._spec, route), given.link, safe)
        else:
            if self._rollout is not None:
                received, proof = bridge.take(route, given, self._targets(self._rollout))
            else:
                assert self._trainer is not None
                with self._trainer.on_device("weights"):
                    received, proof = bridge.take(route, given, self._trainer.local_tensors)
            report = TransportReport(0, sum(received), 0, 0, received, time.perf_counter() - start, proof)
            self.last_report = report
            safe.agree(self._groups.world, mismatch(self._spec.name, proof, MOVE_AGAIN))
            if self._rollout is not None:
                self._use(self._rollout, safe)
        self.last_report = report
        self.version, self.num_updates = version, given.num_updates
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
        """Return what gives the tensors to write: all weights or, where the shadow read its base itself, its adapters."""
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
