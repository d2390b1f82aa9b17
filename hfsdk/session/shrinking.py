"""``Smaller``: where a run goes on when a node has left the cluster; planned for every node before the run begins.

::

    node 0 [0 1]   node 1 [2 3]    as it was placed                      actor "dp4" on devices 0-3
    node 0 [0 1]   node 1  gone    the plan without node 1, the save     actor "dp2" on devices 0-1
    node 0 [0 1]   node 1 [2 3]    back, with all that was learned       actor "dp4" on devices 0-3

A sample depends on its own seed and not on layouts, so the run goes on with the same samples, but for how sums over other ranks
are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import HfsdkError, OptionError, PlacementError
from hfsdk.core.placement import Placement, Pool
from hfsdk.core.plan import Workload
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import NodeStatus
from hfsdk.core.text import listed
from hfsdk.engine.calls import queries as q
from hfsdk.planner.perf.memory import check_fits
from hfsdk.session.algorithm import Algorithm
from hfsdk.session.declare import placed, with_layouts
from hfsdk.session.session_parts import Parts
from hfsdk.session.streams import RowStream


@dataclass(frozen=True)
class Fit:
    """Where the roles live on some of the nodes."""

    placement: Placement
    declared: tuple[RoleSpec, ...]
    """The roles with the layouts that they have there."""


class Smaller:
    """See the module's text."""

    def __init__(self, parts: Parts, algorithm: Algorithm, prompts: RowStream) -> None:
        self._parts, self._algorithm, self._prompts = parts, algorithm, prompts
        self._fits: dict[ClusterSpec, Fit] = {}
        """By what is left of the cluster."""

    def prepare(self) -> None:
        """Plan for every node but this one to leave, and tell what is planned.

        Raises:
            PlacementError: without one of them the roles fit nowhere.
        """
        nodes, told = self._nodes(), []
        for number, node in enumerate(nodes):
            if not node.here:
                told.append(f"without {node.name} {_words(self.fit(frozenset({number})))}")
        nothing = "every device is on this node, without which there is no session; it does nothing"
        self._parts.context.notice("shrink=True: " + ("; ".join(told) or nothing))

    @property
    def absent(self) -> frozenset[int]:
        """Numbers of the nodes without which the roles are placed now."""
        return self._parts.deployment.absent

    def missing(self) -> frozenset[int]:
        """Return the numbers of the nodes that have left."""
        return frozenset(number for number, node in enumerate(self._nodes()) if not node.present)

    def move(self, absent: frozenset[int], *, fresh: bool) -> None:
        """Place the roles without some nodes.

        Args:
            absent: numbers of the nodes.
            fresh: whether the roles start again from their initial weights, as where a save is loaded next.

        Raises: as :meth:`hfsdk.session.deployment.Deployment.place`; ``absent`` is the new one where roles were on their way.
        """
        deployment = self._parts.deployment
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
        return sum(len(devices) for n, devices in enumerate(self._parts.context.cluster.node_devices) if n not in self.absent)

    def _nodes(self) -> tuple[NodeStatus, ...]:
        return self._parts.client.send(q.Nodes())

    # -- planning

    def fit(self, absent: frozenset[int]) -> Fit:
        """Return where the roles live without some nodes; planned once for nodes that are alike.

        Raises:
            PlacementError: they fit nowhere.
        """
        cluster = self._parts.context.cluster
        kept = [number for number in range(len(cluster.node_devices)) if number not in absent]
        gone = listed([node.name for number, node in enumerate(self._nodes()) if number in absent])
        if not kept:
            raise PlacementError(f"shrink=True, and without {gone} no node is left")
        cores = tuple(cluster.node_cores[number] for number in kept) if cluster.node_cores else ()
        rest = replace(cluster, node_devices=tuple(cluster.node_devices[number] for number in kept), node_cores=cores)
        if rest not in self._fits:
            try:
                self._fits[rest] = self._planned(rest)
            except HfsdkError as error:
                raise PlacementError(f"shrink=True, and without {gone} the run cannot go on: {error}") from error
        return _renumbered(self._fits[rest], [d for d in range(cluster.num_devices) if cluster.node_of(d) in kept])

    def _planned(self, cluster: ClusterSpec) -> Fit:
        """Return the best placement on a smaller cluster, with tp and pp as declared where these fit."""
        book = self._parts.deployment.book
        declared = [book.declared(handle) for handle in book.models]
        try:
            return self._searched([_freed(role) for role in declared], cluster)
        except HfsdkError:  # these fit no pool, or not into memory
            return self._searched([_freed(role, all_of_it=True) for role in declared], cluster)

    def _searched(self, roles: Sequence[RoleSpec], cluster: ClusterSpec) -> Fit:
        try:
            plan = self._parts.plans.on(cluster, self._algorithm, self._workload, roles)
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
