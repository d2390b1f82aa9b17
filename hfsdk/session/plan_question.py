"""``session.plan``: runs the algorithm's step once to see its calls, and searches for the best placement and layouts."""

from __future__ import annotations

import numbers
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hfsdk.core.checks import check_options, is_whole, shown
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import OptionError, PlacementError
from hfsdk.core.layout import Layout
from hfsdk.core.methods import METHODS
from hfsdk.core.placement import PRESETS
from hfsdk.core.plan import Plan, Workload, check_workload
from hfsdk.core.roles import RoleSpec
from hfsdk.core.rollout_sizes import context_tokens
from hfsdk.core.text import nearest
from hfsdk.engine.process.startup import without_collector
from hfsdk.models import ModelHandle
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.planner.planning import plan_step
from hfsdk.planner.search.recorded import Recorded
from hfsdk.session.recording import record_step

OPTIONS = ("top", "by_placement", "shadows", "error")
"""Arguments of ``session.plan`` that the search takes."""

PLANNED = tuple(method.name for method in METHODS.values() if method.in_step)
"""Methods whose error may be named in any plan; those of the planned step may as well."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanQuestion:
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
    errors: Mapping[str, float] | None = None
    """Relative errors by method where ``options`` name none."""
    stretches: bool = False
    """Whether a context that was left open grows with the workload's lengths, up to the model's."""

    def recorded(self) -> Recorded:
        """Run one step and return its calls.

        Raises: as ``record_step``.
        """
        handles = [(handle, role) for (handle, _), role in zip(self.handles, self.roles(), strict=True)]
        return record_step(self.algorithm, handles, self.workload, self.seed, self.numbers)

    def roles(self) -> list[RoleSpec]:
        """Return the roles as they are planned."""
        return [_stretched(role, self.workload) if self.stretches else role for _, role in self.handles]

    def answer(self) -> Plan:
        """Return the plan.

        Raises: as ``record_step`` and ``plan_step``.
        """
        with without_collector():  # it would go through all of a notebook again and again
            return self._answer()

    def _answer(self) -> Plan:
        began = time.perf_counter()
        recorded = self.recorded()
        took = time.perf_counter() - began
        roles, error = self.roles(), self.options.get("error")
        if isinstance(error, Mapping):
            known = dict.fromkeys([*(call.method for call in recorded.calls), *PLANNED])
            unknown = [name for name in error if name and name not in known]
            if unknown:
                what = shown(unknown[0])
                raise OptionError(f"error names the method {what}; {nearest(str(unknown[0]), known)}; '' is all others")
        options = {**self.options, "error": self.errors if error is None else error}
        plan = plan_step(recorded, roles, self.cluster, self.workload, self.perf, again=self.again, **options)
        notices = tuple(_grown(role) for role, (_, declared) in zip(roles, self.handles, strict=True) if role != declared)
        return replace(plan, search=replace(plan.search, record_s=took), notices=notices)

    def again(
        self, *, workload: Workload | None = None, cluster: ClusterSpec | str | None = None,
        layouts: Mapping[str, Layout] | None = None, **options: Any,
    ) -> Plan:  # fmt: skip
        """Return the plan for another workload or cluster; a context left open grows with the lengths, up to the model's.

        Args:
            workload: by default that of this plan.
            cluster: by default that of this plan; a text has its price.
            layouts: that are fixed, by role, or role and ``" rollout"``; those of other roles are as declared.
            options: ``top``, ``by_placement``, ``shadows``, ``error`` or ``placement``, as in ``session.plan`` and ``what_if``.

        Raises: as ``session.plan``.
        """
        asked = check_workload(self.workload if workload is None else workload)
        if not isinstance(cluster, str | ClusterSpec | None):
            raise OptionError(f"cluster is a text such as '16x8 H100' or an hf.ClusterSpec; got {shown(cluster)}")
        price = self.cluster.price_per_device_hour
        on = ClusterSpec.parse(cluster, price) if isinstance(cluster, str) else cluster or self.cluster
        _check_options(options, (*OPTIONS, "placement"))
        handles = [(handle, _with_layouts(role, layouts or {})) for handle, role in self.handles]
        options = {**self.options, **options}
        return replace(self, handles=handles, workload=asked, cluster=on, options=options, stretches=True).answer()

    def fixed(self, cluster: ClusterSpec, workload: Workload, placement: str, layouts: Mapping[str, Layout]) -> Plan:
        """Return the plan with some of it fixed.

        Args:
            cluster: the devices.
            workload: what a step works on.
            placement: a preset's name, or ``"auto"``.
            layouts: by role, or role and ``" rollout"``; those of other roles are as declared.

        Raises: as ``record_step`` and ``plan_step``.
        """
        return self.again(workload=workload, cluster=cluster, placement=placement, layouts=layouts)


def ask(
    algorithm: Any, workload: Workload, handles: Sequence[tuple[ModelHandle, RoleSpec]], cluster: ClusterSpec, *, seed: int,
    numbers: Mapping[str, float], perf: PerfModel, options: Mapping[str, Any], errors: Mapping[str, float] | None,
) -> PlanQuestion:  # fmt: skip
    """Return the question, checked.

    Raises:
        PlacementError: no role has a model.
        OptionError: the workload is none, or an option out of its range.
    """
    _check_options(options, OPTIONS)
    if not any(role.model is not None for _, role in handles):
        raise PlacementError("there is no model to plan for yet; declare some first, e.g. session.actor('tiny')")
    return PlanQuestion(
        algorithm=algorithm, handles=handles, seed=seed, numbers=numbers, cluster=cluster, workload=check_workload(workload),
        perf=perf, options=options, errors=errors,
    )  # fmt: skip


def priced(plan: Plan, price_per_device_hour: float) -> Plan:
    """Return the same plan where a device-hour has another price, its ``again`` included."""
    cluster, again = replace(plan.cluster, price_per_device_hour=price_per_device_hour), plan.again
    if again is None:
        return replace(plan, cluster=cluster)

    def asked(*, workload: Workload | None = None, cluster: ClusterSpec | str | None = None, **options: Any) -> Plan:
        on = ClusterSpec.parse(cluster, price_per_device_hour) if isinstance(cluster, str) else cluster
        return again(workload=workload, cluster=at if on is None else on, **options)

    at = cluster
    return replace(plan, cluster=cluster, again=asked)


def _check_options(options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check options of a plan.

    Raises:
        OptionError: there is none of that name, or its value is out of range.
    """
    for name, value in options.items():
        if name not in known:
            raise OptionError(f"a plan has no option {shown(name)}; {nearest(name, ('workload', 'cluster', *known))}")
        if name == "top" and (not is_whole(value) or value < 1):
            raise OptionError(f"top is how many plans to return, a whole number of at least 1; got {shown(value)}")
        if name in ("by_placement", "shadows"):
            check_options("plan", **{name: (value, bool)})
        if name == "placement" and value not in ("auto", *PRESETS):
            raise OptionError(f"no placement {shown(value)} to plan with; {nearest(str(value), ('auto', *PRESETS))}")
    error = options.get("error")
    wrong = [e for e in (error.values() if isinstance(error, Mapping) else [error]) if e is not None and not _is_share(e)]
    if wrong:
        raise OptionError(
            "error is a relative error of predicted seconds, from 0 to 1: a number, or by method, e.g. "
            f"{{'generate': 0.15, '': 0.1}}; got {shown(error)}"
        )


def _is_share(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) <= 1


def _stretched(role: RoleSpec, workload: Workload) -> RoleSpec:
    """Return the role with a context for samples as long as the workload's, where it was left open and the model has it."""
    options, needed = role.rollout_options, workload.prompt_tokens + workload.response_tokens
    if role.rollout is None or options.max_model_len or role.model is None or needed > role.model.max_positions:
        return role
    if needed <= context_tokens(role.model, options):
        return role
    return replace(role, rollout_options=replace(options, max_model_len=needed))


def _grown(role: RoleSpec) -> str:
    longest = role.rollout_options.max_model_len
    return (
        f"assumes that {role.name} has max_model_len={longest}; before session.place, declare session.{role.kind}(..., "
        f"rollout_options=hf.RolloutOptions(max_model_len={longest}))"
    )


def _with_layouts(role: RoleSpec, layouts: Mapping[str, Layout]) -> RoleSpec:
    for use, name in (("train", role.name), ("rollout", f"{role.name} rollout")):
        if name in layouts:
            chosen: dict[str, Any] = {use: layouts[name]}
            role = replace(role, **chosen, auto=tuple(a for a in role.auto if a != use))
    return role
