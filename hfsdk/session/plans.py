"""``Plans``: the best placement and layouts of the declared roles, searched for before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from hfsdk.core.checks import NonNegative, Within
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.plan import Plan, Workload
from hfsdk.core.roles import RoleSpec
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.session.algorithm import Algorithm
from hfsdk.session.context import Context
from hfsdk.session.placing import Deployment
from hfsdk.session.predictions import Predictions
from hfsdk.session.recording import PlanQuestion, ask
from hfsdk.session.what_if import WhatIf

Top = Annotated[int, Within(1, 1_000)]


class Plans:
    """Plans steps of the declared roles."""

    def __init__(self, context: Context, deployment: Deployment, predictions: Predictions) -> None:
        self._context, self._deployment, self._predictions = context, deployment, predictions

    def plan(
        self,
        algorithm: Algorithm,
        workload: Workload,
        *,
        top: Top = 5,
        by_placement: bool = False,
        shadows: bool = True,
        perf: PerfModel | None = None,
        error: NonNegative | Mapping[str, NonNegative] | None = None,
    ) -> Plan:
        """Carry out ``session.plan``; its text says what the arguments are."""
        return self._ask(
            algorithm, workload, perf, {"top": top, "by_placement": by_placement, "shadows": shadows, "error": error}
        ).answer()

    def what_if(
        self,
        algorithm: Algorithm,
        workload: Workload,
        *,
        top: Top = 5,
        shadows: bool = True,
        perf: PerfModel | None = None,
        error: NonNegative | Mapping[str, NonNegative] | None = None,
    ) -> WhatIf:
        """Carry out ``session.what_if``; its text says what the arguments are."""
        question = self._ask(algorithm, workload, perf, {"top": top, "shadows": shadows, "error": error})
        models = [role for _, role in question.handles if role.model is not None]
        what_if = WhatIf(
            question.fixed, self._context.cluster, workload, roles=[role.name for role in models],
            rollouts=[role.name for role in models if role.kind == "actor"],
            max_tokens=min(role.model.max_positions for role in models if role.model is not None),
            models={role.name: role.model for role in models if role.model is not None},
        )  # fmt: skip
        what_if.kept_as = self._context.client.kept_as
        return what_if

    def on(self, cluster: ClusterSpec, algorithm: Algorithm, workload: Workload, roles: Sequence[RoleSpec]) -> Plan:
        """Return the best plan on another cluster, without shadows; ``roles`` are declared with these layouts.

        Raises: as :meth:`plan`.
        """
        question = self._ask(algorithm, workload, None, {"top": 1, "shadows": False})
        changed = {role.name: role for role in roles}
        handles = [(handle, changed.get(handle.name, role)) for handle, role in question.handles]
        return replace(question, cluster=cluster, handles=handles).answer()

    def _ask(self, algorithm: Algorithm, workload: Workload, perf: PerfModel | None, options: Mapping[str, Any]) -> PlanQuestion:
        self._context.client.check_open()
        book = self._deployment.book
        handles = [(handle, book.declared(handle)) for handle in book]
        return ask(
            algorithm, workload, handles, self._context.cluster, seed=self._context.seed, numbers=self._context.counters.all(),
            perf=self._predictions.perf if perf is None else perf, options=options, errors=self._predictions.errors,
        )  # fmt: skip
