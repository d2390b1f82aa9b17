"""``train(on_death="restore")``: a worker that dies costs a run the steps since the last save, and it goes on by itself.

::

    step    0  1  2  3  4 [save]  5  6  7 x            a worker is killed in step 7
                                  5  6  7  8  9 [save] 10 ...    the same prompts and seeds again: the same numbers

A save has all that a step depends on: weights, optimizers, the prompts' places, counters of seeds; but for what a function of the
user's keeps between calls.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import HfsdkError, LostColumnError, OptionError, PlacementError, WorkerDiedError
from hfsdk.core.methods import RESTORE as RESTORED
from hfsdk.core.placement import Placement, Pool
from hfsdk.core.plan import Workload
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import NodeStatus
from hfsdk.core.text import listed
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.planner.perf.memory import check_fits
from hfsdk.run.best import BestCheckpointTracker
from hfsdk.run.host import TrainHost
from hfsdk.run.run import Resized, Restored, RunControl
from hfsdk.run.train_config import RESTORE, TrainConfig
from hfsdk.session.algorithm import Algorithm
from hfsdk.session.role_specs import placed, with_layouts
from hfsdk.session.streams import RowStream

MOST_CHARACTERS = 160
"""The length of an error in a message; the whole of it is in the trace."""


def is_death(error: BaseException) -> bool:
    """Whether an error comes from a worker that died: directly, or of a column that is gone with it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, WorkerDiedError | LostColumnError):
            return True
        cause = cause.__cause__
    return False


@dataclass(eq=False)
class AutoRestore:
    """Goes back to the last save of a run after a death."""

    host: TrainHost
    control: RunControl
    best: BestCheckpointTracker | None
    most: int
    """Deaths that the run goes on after."""
    folder: str | Path
    keep: int
    smaller: ElasticFallback | None = None
    """The plan for going on without a node, if the run may."""
    in_vain: frozenset[int] | None = None
    """The nodes that were missing when the roles could not move back."""

    def begin(self) -> None:
        """Save the start, for a death before the first save."""
        host = self.host
        with self.control.saving():
            host.saves.save(self.folder, keep=self.keep)
        self.control.record.saved = {"folder": str(self.folder), "step": host.context.next_step() - 1}

    def is_death(self, error: HfsdkError) -> bool:
        """Whether an error comes from a worker that died, or from a node that has left and is not gone without yet."""
        if self.control.is_stop(error):
            return False
        left = isinstance(error, PlacementError) and self.smaller is not None and not self.smaller.missing() <= self.smaller.absent
        return is_death(error) or left

    def go_back(self, error: HfsdkError) -> None:
        """Restore the last save: roles, prompts, counters and history; of the run, the steps until then are left.

        Raises:
            HfsdkError: ``error`` itself, where there were as many deaths before; or what the save cannot be loaded by.
        """
        record, host, begun, begun_ns = self.control.record, self.host, time.monotonic(), time.time_ns()
        died_in, before = host.context.next_step(), host.deployment.absent
        while True:
            if len(record.restores) == self.most:
                host.context.notice(f"the run went on after {self.most} deaths of workers, and may after no more (max_restores)")
                raise error
            text = textwrap.shorten(str(error).split("\n", 1)[0], MOST_CHARACTERS, placeholder=" ...")
            missing = self._missing()
            if self.smaller is not None and missing:
                self.smaller.fit(missing)  # what fits nowhere is told as that
            record.restores.append(Restored(died_in, died_in, 0.0, text))
            try:
                with self._seen():
                    if self.smaller is not None and missing != self.smaller.absent:
                        self.smaller.move(missing, fresh=True)
                    host.saves.load(self.folder)
                break
            except HfsdkError as again:  # another one died meanwhile
                if not self.is_death(again):
                    record.restores.pop()
                    raise
                if self._missing() != missing:
                    record.restores.pop()  # the same death: that its node had left was not known yet
                else:
                    error = again
        back_to = host.context.next_step() - 1  # as the save has it: the worker may have died when it was complete
        if self.best is not None:
            self.best.count_again()
        record.cut_after(back_to)
        seconds = time.monotonic() - begun
        restored = record.restores[-1] = Restored(died_in, back_to, seconds, text)
        host.client.send(m.TraceNote(RESTORED.name, begun_ns, seconds, str(restored)))
        host.context.notice(f"{restored} ({len(record.restores)} of {self.most} restores)")
        if self.smaller is not None and self.smaller.absent != before:
            self._tell_resized(self.smaller, before, back_to, seconds)

    def grow(self) -> None:
        """Move the roles, between two steps, back to nodes that have returned, with all that they have learned.

        Where they cannot, the run goes on as it was, until other nodes are there.

        Raises:
            WorkerDiedError: a worker ended meanwhile.
        """
        if self.smaller is None or not self.smaller.absent:
            return
        missing, before = self.smaller.missing(), self.smaller.absent
        # no node is back, or the same ones with which the move has failed already
        if not missing < before or missing == self.in_vain:
            return
        begun, begun_ns = time.monotonic(), time.time_ns()
        with self.control.saving():
            try:
                self.smaller.move(missing, fresh=False)
            except HfsdkError as error:
                if is_death(error) or self.control.is_stop(error):
                    raise
                self.in_vain = missing
                self.host.context.notice(
                    f"a node came back, and the run cannot go on over it: {str(error).rstrip('.')}. It goes on without."
                )
                # back to the placement without them
                self.smaller.move(before, fresh=False)
                return
        seconds = time.monotonic() - begun
        resized = self._tell_resized(self.smaller, before, self.host.context.next_step() - 1, seconds)
        self.host.client.send(m.TraceNote(RESTORED.name, begun_ns, seconds, str(resized)))

    def _missing(self) -> frozenset[int]:
        return self.smaller.missing() if self.smaller is not None else frozenset()

    def _tell_resized(self, smaller: ElasticFallback, before: frozenset[int], step: int, seconds: float) -> Resized:
        why, of_devices = smaller.changes(before), self.host.context.cluster.num_devices
        resized = Resized(step, smaller.num_devices(), of_devices, seconds, why)
        self.control.record.resized.append(resized)
        self.host.context.notice(str(resized))
        return resized

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """Acknowledge the calls that the death has failed: their ends tell nothing new. Then let the run save and load."""
        self.host.client.drain()
        self.host.client.send(m.AcknowledgeFailures())
        with self.control.saving():
            yield


def restorer(
    host: TrainHost, control: RunControl, best: BestCheckpointTracker | None, config: TrainConfig, smaller: ElasticFallback | None
) -> AutoRestore | None:
    """Return the recovery of a run after a death; ``None`` where a death ends it."""
    if config.on_death != RESTORE or config.folder is None:
        return None
    return AutoRestore(host, control, best, config.max_restores, config.folder, config.keep, smaller)


# -- the smaller cluster on which a run goes on when a node has left


@dataclass(frozen=True)
class Fit:
    """A placement of the roles on some of the nodes."""

    placement: Placement
    declared: tuple[RoleSpec, ...]
    """The roles with the layouts that they have there."""


class ElasticFallback:
    """Plans for going on without a node, made for every node before the run begins.

    ::

        node 0 [0 1]   node 1 [2 3]    as it was placed                      actor "dp4" on devices 0-3
        node 0 [0 1]   node 1  gone    the plan without node 1, the save     actor "dp2" on devices 0-1
        node 0 [0 1]   node 1 [2 3]    back, with all that was learned       actor "dp4" on devices 0-3

    A sample depends on its own seed and not on layouts, so the run goes on with the same samples, but for how sums over other
    ranks are rounded.
    """

    def __init__(self, host: TrainHost, algorithm: Algorithm, prompts: RowStream) -> None:
        self._host, self._algorithm, self._prompts = host, algorithm, prompts
        self._fits: dict[ClusterSpec, Fit] = {}
        """The placement for each remaining part of the cluster."""

    def prepare(self) -> None:
        """Plan for every node but this one to leave, and give a notice of the plans.

        Raises:
            PlacementError: without one of them the roles fit nowhere.
        """
        nodes, plans = self._nodes(), []
        for number, node in enumerate(nodes):
            if not node.here:
                plans.append(f"without {node.name} {_words(self.fit(frozenset({number})))}")
        nothing = "every device is on this node, without which there is no session; it does nothing"
        self._host.context.notice("shrink=True: " + ("; ".join(plans) or nothing))

    @property
    def absent(self) -> frozenset[int]:
        """Numbers of the nodes without which the roles are placed now."""
        return self._host.deployment.absent

    def missing(self) -> frozenset[int]:
        """Return the numbers of the nodes that have left."""
        return frozenset(number for number, node in enumerate(self._nodes()) if not node.present)

    def move(self, absent: frozenset[int], *, fresh: bool) -> None:
        """Place the roles without some nodes.

        Args:
            absent: numbers of the nodes.
            fresh: whether the roles start again from their initial weights, as where a save is loaded next.

        Raises: as :meth:`hfsdk.session.placing.Deployment.place`; ``absent`` is the new one where roles were on their way.
        """
        deployment = self._host.deployment
        if absent:
            fit = self.fit(absent)
            deployment.place_as(fit.placement, fit.declared, fresh=fresh, absent=absent)
        else:
            deployment.place(deployment.asked, fresh=fresh)

    def changes(self, before: frozenset[int]) -> str:
        """Return in words which nodes have left or come back since others were absent."""
        names = [node.name for node in self._nodes()]
        left, back = sorted(self.absent - before), sorted(before - self.absent)
        left_words = f"{listed([names[k] for k in left])} left the cluster" if left else ""
        back_words = f"{listed([names[k] for k in back])} came back" if back else ""
        return " and ".join(filter(None, (left_words, back_words)))

    def num_devices(self) -> int:
        """Return how many devices there are without the nodes that are absent."""
        return sum(len(devices) for n, devices in enumerate(self._host.context.cluster.node_devices) if n not in self.absent)

    def _nodes(self) -> tuple[NodeStatus, ...]:
        return self._host.client.send(q.Nodes())

    # -- planning

    def fit(self, absent: frozenset[int]) -> Fit:
        """Return where the roles live without some nodes; planned once for nodes that are alike.

        Raises:
            PlacementError: they fit nowhere.
        """
        cluster = self._host.context.cluster
        remaining = [number for number in range(len(cluster.node_devices)) if number not in absent]
        gone = listed([node.name for number, node in enumerate(self._nodes()) if number in absent])
        if not remaining:
            raise PlacementError(f"shrink=True, and without {gone} no node is left")
        cores = tuple(cluster.node_cores[number] for number in remaining) if cluster.node_cores else ()
        rest = replace(cluster, node_devices=tuple(cluster.node_devices[number] for number in remaining), node_cores=cores)
        if rest not in self._fits:
            try:
                self._fits[rest] = self._planned(rest)
            except HfsdkError as error:
                raise PlacementError(f"shrink=True, and without {gone} the run cannot go on: {error}") from error
        return _renumbered(self._fits[rest], [d for d in range(cluster.num_devices) if cluster.node_of(d) in remaining])

    def _planned(self, cluster: ClusterSpec) -> Fit:
        """Return the best placement on a smaller cluster, with tp and pp as declared where these fit."""
        book = self._host.deployment.book
        declared = [book.declared(handle) for handle in book.models]
        try:
            return self._searched([_freed(role) for role in declared], cluster)
        except HfsdkError:  # these fit no pool, or not into memory
            return self._searched([_freed(role, all_of_it=True) for role in declared], cluster)

    def _searched(self, roles: Sequence[RoleSpec], cluster: ClusterSpec) -> Fit:
        try:
            plan = self._host.plans.on(cluster, self._algorithm, self._workload, roles)
        except OptionError:  # a step that cannot be run without values, or that generates nothing
            placement = Placement.of("colocate", [role.name for role in roles], cluster.num_devices)
            fits = placed(roles, placement, cluster)
            check_fits(fits, placement, cluster)
            return Fit(placement, tuple(roles))
        return Fit(plan.placement, tuple(with_layouts(plan.layouts, roles)))

    @cached_property
    def _workload(self) -> Workload:
        size = self._prompts.batch_size
        batch = self._prompts.rows(0, size)
        longest = max((len(tokens) for tokens in batch["prompt"]), default=1) if "prompt" in batch.columns else 1
        return Workload(prompts=size, prompt_tokens=max(1, longest), response_tokens=getattr(self._algorithm, "max_new_tokens", 1))


def _freed(role: RoleSpec, *, all_of_it: bool = False) -> RoleSpec:
    """Return a role whose layouts may change: how often it stands there, or everything."""
    uses = tuple(use for use in ("train", "rollout") if getattr(role, use) is not None)
    if all_of_it:
        return replace(role, auto=uses)
    changed: dict[str, Any] = {use: replace(getattr(role, use), dp=None) for use in uses}
    return replace(role, **changed)


def _renumbered(fit: Fit, devices: Sequence[int]) -> Fit:
    """Return the same with the numbers that devices have in the session's cluster."""
    pools = tuple(Pool(pool.name, tuple(devices[d] for d in pool.devices), pool.within) for pool in fit.placement.pools)
    return replace(fit, placement=replace(fit.placement, pools=pools))


def _words(fit: Fit) -> str:
    roles = ", ".join(f"{role.name} '{role.train or role.rollout}'" for role in fit.declared)
    numbers = sorted({device for pool in fit.placement.pools for device in pool.devices})
    return f"it goes on over device{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} ({roles})"
