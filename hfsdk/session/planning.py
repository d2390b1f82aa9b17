"""``session.plan``: runs the algorithm's step once to see its calls, and searches for the best placement and layouts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hfsdk.errors import PlacementError
from hfsdk.layout import Layout
from hfsdk.models import ModelHandle
from hfsdk.plan import Plan, Workload, check_workload
from hfsdk.planner.perf_model import PerfModel
from hfsdk.planner.planning import plan_step
from hfsdk.planner.recorded import Recorded
from hfsdk.roles import RoleSpec
from hfsdk.session.recording import record_step
from hfsdk.spec import ClusterSpec


@dataclass(frozen=True, eq=False, kw_only=True)
class Question:
    """What is planned; asked again with another workload or cluster, it needs no session."""

    algorithm: Any
    handles: Sequence[tuple[ModelHandle, RoleSpec]]
    """Handles and their roles as declared."""
    seed: int
    numbers: Mapping[str, float]
    cluster: ClusterSpec
    workload: Workload
    perf: PerfModel
    options: Mapping[str, Any]
    """Further arguments of ``plan_step``."""

    def recorded(self) -> Recorded:
        """Run one step and return its calls.

        Raises: as ``record_step``.
        """
        return record_step(self.algorithm, self.handles, self.workload, self.seed, self.numbers)

    def answer(self) -> Plan:
        """Return the plan.

        Raises: as ``record_step`` and ``plan_step``.
        """
        began = time.perf_counter()
        recorded = self.recorded()
        took = time.perf_counter() - began
        roles = [role for _, role in self.handles]
        plan = plan_step(recorded, roles, self.cluster, self.workload, self.perf, again=self.again, **self.options)
        return replace(plan, search=replace(plan.search, record_s=took))

    def again(self, *, workload: Workload | None = None, cluster: ClusterSpec | str | None = None, **options: Any) -> Plan:
        """Return the plan for another workload or cluster; a context left open grows with the lengths, up to the model's."""
        asked = check_workload(workload or self.workload)
        price = self.cluster.price_per_device_hour
        on = ClusterSpec.parse(cluster, price) if isinstance(cluster, str) else cluster or self.cluster
        handles = [(handle, _stretched(role, asked)) for handle, role in self.handles]
        return replace(self, workload=asked, cluster=on, handles=handles, options={**self.options, **options}).answer()

    def fixed(self, cluster: ClusterSpec, workload: Workload, placement: str, layouts: Mapping[str, Layout]) -> Plan:
        """Return the plan with some of it fixed.

        Args:
            cluster: the devices.
            workload: what a step works on.
            placement: a preset's name, or ``"auto"``.
            layouts: by role, or role and ``" rollout"``; those of other roles are as declared.

        Raises: as ``record_step`` and ``plan_step``.
        """
        handles = [(handle, _with_layouts(role, layouts)) for handle, role in self.handles]
        return replace(self, handles=handles).again(workload=workload, cluster=cluster, placement=placement)


def ask(
    algorithm: Any, workload: Workload, handles: Sequence[tuple[ModelHandle, RoleSpec]], cluster: ClusterSpec, *, seed: int,
    numbers: Mapping[str, float], perf: PerfModel, options: Mapping[str, Any],
) -> Question:  # fmt: skip
    """Return the question, checked.

    Raises:
        PlacementError: no role has a model.
        OptionError: the workload is none.
    """
    if not any(role.model is not None for _, role in handles):
        raise PlacementError("there is no model to plan for yet; declare some first, e.g. session.actor('tiny')")
    return Question(
        algorithm=algorithm, handles=handles, seed=seed, numbers=numbers, cluster=cluster, workload=check_workload(workload),
        perf=perf, options=options,
    )  # fmt: skip


def _stretched(role: RoleSpec, workload: Workload) -> RoleSpec:
    options, needed = role.rollout_options, workload.prompt_tokens + workload.response_tokens
    if role.rollout is None or options.max_model_len or role.model is None or needed > role.model.max_positions:
        return role
    longest = max(needed, min(role.model.max_positions, 2048))
    return replace(role, rollout_options=replace(options, max_model_len=longest))


def _with_layouts(role: RoleSpec, layouts: Mapping[str, Layout]) -> RoleSpec:
    for use, name in (("train", role.name), ("rollout", f"{role.name} rollout")):
        if name in layouts:
            chosen: dict[str, Any] = {use: layouts[name]}
            role = replace(role, **chosen, auto=tuple(a for a in role.auto if a != use))
    return role
