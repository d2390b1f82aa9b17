"""A plan's step as schemes need it: a replica's costs, the other seconds on any part of the cluster, and rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from hfsdk.core.cluster import ClusterSpec, LinkSpec
from hfsdk.core.errors import HfsdkError, OptionError
from hfsdk.core.methods import method_of
from hfsdk.core.plan import Plan, PlannedCall
from hfsdk.core.response_lengths import ResponseLengths, draw_lengths
from hfsdk.core.roles import RoleSpec, Sampling
from hfsdk.core.table import Array
from hfsdk.planner.perf.memory import role_bytes
from hfsdk.planner.perf.perf_model import PerfModel, Setup
from hfsdk.planner.perf.sizing import sized
from hfsdk.planner.tails.replica import PendingResponse
from hfsdk.planner.tails.token_costs import TokenCosts

REST_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Shares of a step's prompts for which the rest of a step is planned; between them it is taken to be straight."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TailCase:
    """A workload with its lengths on a cluster."""

    plan: Plan
    """All roles on all devices (colocate), for these lengths."""
    perf: PerfModel
    lengths: Any
    seed: int
    steps: int

    @classmethod
    def of(cls, plan: Plan, lengths: Any, perf: PerfModel, seed: int, steps: int) -> TailCase:
        """Plan the workload anew, colocated and with these lengths.

        Raises:
            OptionError: the plan came from a file, the cluster is mixed, or the step generates more than once.
        """
        if plan.again is None:
            raise OptionError("this plan was loaded from a file and cannot be asked again; ask session.plan(...) for one")
        nodes = plan.cluster.node_devices
        if len({device for node in nodes for device in node}) > 1 or len({len(node) for node in nodes}) > 1:
            raise OptionError(
                f"long tails are simulated on nodes that are alike; the cluster is {plan.cluster}. "
                "Plan for one kind of them in a session of its own, e.g. hf.Session.simulated('2x8 H100')"
            )
        workload = replace(plan.workload, response_lengths=lengths)
        colocated = plan.again(workload=workload, placement="colocate", top=1, shadows=False)
        if len(_generating(colocated)) != 1:
            raise OptionError(
                f"long tails are simulated of steps that generate once; {colocated.algorithm} generates "
                f"{len(_generating(colocated))} times. Plan an algorithm that does, e.g. hf.GRPO()"
            )
        drawn = ResponseLengths(kind=lengths) if isinstance(lengths, str) else lengths
        return cls(plan=colocated, perf=perf, lengths=drawn, seed=seed, steps=steps)

    @property
    def cluster(self) -> ClusterSpec:
        """The devices."""
        return self.plan.cluster

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.cluster.num_devices

    @cached_property
    def role(self) -> RoleSpec:
        """The role that generates, in its layouts and with its rollout's sizes."""
        roles = [_in_layouts(role, self.plan) for role in self.plan.roles.values()]
        name = _generating(self.plan)[0].role
        return next(role for role in sized(roles, self.plan.placement, self.cluster) if role.name == name)

    @cached_property
    def setup(self) -> Setup:
        """The same as the model of time has it."""
        return Setup.of(self.role, self.cluster, self.plan.placement.pool_of(self.role.name).devices)

    @property
    def replica_devices(self) -> int:
        """Devices of a rollout replica."""
        return self.setup.rollout_tp * self.setup.rollout_pp

    @property
    def num_replicas(self) -> int:
        """Rollout replicas where all devices generate."""
        return self.plan.placement.pool_of(self.role.name).size // self.replica_devices

    @property
    def num_rows(self) -> int:
        """Responses of a step."""
        return _generating(self.plan)[0].num_rows

    @property
    def copies(self) -> int:
        """Responses of a prompt."""
        return self.num_rows // self.plan.workload.prompts

    @cached_property
    def reshard_s(self) -> float:
        """Seconds in which a step's weights go to rollouts on their own trainer's devices."""
        return sum(seconds for name, _, seconds in _generating(self.plan)[0].parts if name == "reshard")

    # -- the cluster's parts

    def shares(self) -> list[int]:
        """Return the numbers of devices that may generate while the others do the rest: eighths, in whole replicas.

        A part may end inside a node, where a replica does not: there the node's first devices are in one part, its others in the
        other.
        """
        node, replica = len(self.cluster.node_devices[0]), self.replica_devices
        eighths = sorted({self.devices * k // 8 for k in range(1, 8)} - {0})
        return [n for n in eighths if n % replica == 0 and (n % node == 0 or node % replica == 0)]

    def rest(self, devices: int) -> Plan | None:
        """Return the plan for a part of the cluster, ``None`` where nothing fits."""
        if devices == self.devices:
            return self.plan
        if devices not in self._parts:
            assert self.plan.again is not None
            try:
                plan = self.plan.again(cluster=part_of(self.cluster, devices), placement="colocate", top=1, shadows=False)
            except HfsdkError:
                plan = None
            self._parts[devices] = plan
        return self._parts[devices]

    def rest_s(self, devices: int, share: float = 1.0) -> float | None:
        """Return the seconds of all of a step but its generation, ``None`` where it does not fit.

        Args:
            devices: the number of devices of the part of the cluster whose plan gives the layouts.
            share: the share of a step's tokens. Fewer take longer than in proportion: an optimizer step, reading weights and
                filling a pipeline cost the same for a small mini-batch, and rows are whole.
        """
        curve = self._rest_curve(devices)
        if curve is None:
            return None
        shares, seconds = curve
        if share > shares[-1]:
            return float(seconds[-1] + (share - shares[-1]) * (seconds[-1] - seconds[-2]) / (shares[-1] - shares[-2]))
        return float(np.interp(share, shares, seconds))

    def rest_done(self, devices: int, seconds: float) -> float:
        """Return the share of a step's tokens for which so many devices do all but generation in so many seconds, 1 at most."""
        curve = self._rest_curve(devices)
        assert curve is not None
        return float(np.interp(seconds, curve[1], curve[0]))

    def _rest_curve(self, devices: int) -> tuple[Array, Array] | None:
        """Return shares of a step's tokens, ascending, and the rest's seconds for each, from plans for so many prompts.

        These keep the layouts of the plan for a whole step, and mini-batches as large as its own, as far as they are whole.
        """
        plan = self.rest(devices)
        if plan is None:
            return None
        if devices not in self._curves:
            prompts = self.plan.workload.prompts
            counts = sorted({max(1, round(prompts * share)) for share in REST_SHARES} - {prompts})
            planned = {0: 0.0, **{count: self._part_rest_s(plan, count) for count in counts}, prompts: _rest_of(plan)}
            shares, seconds = np.array([(count / prompts, s) for count, s in planned.items() if s is not None]).T
            self._curves[devices] = shares, np.maximum.accumulate(seconds)
        return self._curves[devices]

    def _part_rest_s(self, plan: Plan, prompts: int) -> float | None:
        """Return the seconds of all but generation in a step of fewer prompts, in a plan's layouts; ``None`` if that is no step."""
        assert plan.again is not None
        most = max(call.mini_batches for call in plan.calls)
        fewer = min(max(1, round(most * prompts / self.plan.workload.prompts)), prompts * self.copies)
        workload = replace(self.plan.workload, prompts=prompts, mini_batches=fewer if most > 1 else None)
        each = ((name, use, layout) for name, both in plan.layouts.items() for use, layout in both.items())
        layouts = {name if use == "train" else f"{name} {use}": layout for name, use, layout in each}
        try:
            replanned = plan.again(
                cluster=plan.cluster, workload=workload, placement="colocate", top=1, shadows=False, layouts=layouts
            )
        except HfsdkError:
            return None
        return _rest_of(replanned)

    def used(self, devices: int) -> int:
        """Return how many of so many devices the plan for them has roles on."""
        plan = self.rest(devices)
        return devices if plan is None else devices - plan.num_idle

    @cached_property
    def _parts(self) -> dict[int, Plan | None]:
        return {}

    @cached_property
    def _curves(self) -> dict[int, tuple[Array, Array]]:
        return {}

    def state_s(self, devices: int) -> float:
        """Return the seconds in which weights and optimizer states of all roles get to a layout of so many devices.

        As if a device had nothing yet of what it needs there: an upper bound.
        """
        plan = self.rest(devices)
        assert plan is not None
        home = plan.placement.pool_of
        estimates = [role_bytes(_in_layouts(role, plan), home(role.name).size) for role in plan.roles.values() if role.model]
        moved = sum(estimate.weights + estimate.optimizer for estimate in estimates)
        return self.perf.move(float(moved), self._between, self.setup.spec.num_layers)

    # -- generation

    @cached_property
    def costs(self) -> TokenCosts:
        """The costs of a replica that shares devices with its trainer."""
        return self._costs_of(self.setup, self.devices)

    def alone(self, devices: int) -> tuple[TokenCosts, float]:
        """Return a replica's costs in its own pool, and the seconds in which new weights get there from another pool."""
        declared = self.plan.roles[self.role.name].rollout_options
        setup = Setup.of(replace(self.role, train=None, rollout_options=declared), self.cluster, range(devices))
        received = setup.learned * setup.bytes_each / setup.rollout_tp
        moved = self.perf.move(received, self._between, setup.spec.num_layers) + self.perf.rewrite(setup)
        return self._costs_of(setup, devices), moved

    @property
    def _between(self) -> LinkSpec:
        """The link between two parts of the cluster, a device's part of it."""
        links = self.setup.links
        return links.across if len(self.cluster.node_devices) > 1 else links.within

    def _costs_of(self, setup: Setup, devices: int) -> TokenCosts:
        rows = self.rows(0, self.plan.workload.prompts)
        prompts = np.array([row.prompt for row in rows[: max(1, len(rows) * self.replica_devices // devices)]])
        return TokenCosts.of(self.perf, setup, prompts, len(rows), self._between)

    def rows(self, first: int, prompts: int) -> list[PendingResponse]:
        """Return the rows of so many prompts of the stream, from its ``first`` on."""
        positions = np.repeat(np.arange(first, first + prompts), self.copies)
        copies = np.tile(np.arange(self.copies), prompts)
        sampling = Sampling(max_new_tokens=self.plan.workload.response_tokens)
        lengths = draw_lengths(self.lengths, sampling, self.seed, positions, copies)
        numbers = positions * self.copies + copies
        return [
            PendingResponse(int(number), int(group), self.plan.workload.prompt_tokens, int(length))
            for number, group, length in zip(numbers, positions, lengths, strict=True)
        ]

    def each_step(self) -> Iterator[list[PendingResponse]]:
        """Yield the rows of every step of a run without over-sampling."""
        prompts = self.plan.workload.prompts
        return (self.rows(step * prompts, prompts) for step in range(self.steps))

    @cached_property
    def mean_tokens(self) -> float:
        """Tokens of prompts and responses of a step, in the mean: the plan's other seconds are for these."""
        return sum(row.most for rows in self.each_step() for row in rows) / self.steps


def _generating(plan: Plan) -> list[PlannedCall]:
    return [call for call in plan.calls if method_of(call.method).generates]


def _in_layouts(role: RoleSpec, plan: Plan) -> RoleSpec:
    layouts = plan.layouts.get(role.name, {})
    return replace(role, train=layouts.get("train", role.train), rollout=layouts.get("rollout", role.rollout))


def _rest_of(plan: Plan) -> float:
    """Return the seconds of all of a plan's step but its generation."""
    return plan.seconds - _generating(plan)[0].seconds


def part_of(cluster: ClusterSpec, devices: int) -> ClusterSpec:
    """Return a cluster of as many of its devices, of nodes that are alike: whole nodes, and a part of one.

    Links stay as they are: a node's link to the others is the whole one's, and what devices of two nodes send each other goes over
    it. Where workers share a node's cores, a part of them has its part.
    """
    node = len(cluster.node_devices[0])
    whole, more = divmod(devices, node)
    sizes = [node] * whole + [more] * bool(more)
    cores = min(cluster.node_cores, default=0)
    return replace(
        cluster, node_devices=tuple((cluster.devices[0],) * size for size in sizes),
        node_cores=tuple(max(1, cores * size // node) for size in sizes) if cores else (),
    )  # fmt: skip
