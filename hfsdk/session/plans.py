"""``Plans``: the best placement and layouts of the declared roles, searched for before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from hfsdk.core.checks import NonNegative, Within, checked
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

    @checked
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
        """Find the best placement and layouts of the declared roles for one step of an algorithm; nothing runs, nothing is loaded.

        The algorithm's ``step`` is run once without values, to see its calls; then the optimum is searched over set partitions of
        the roles, pool sizes, layouts and strategies (interleaving, separation), under memory: exact within that family
        (``plan.search.family``) and the performance model. Layouts that were declared are kept; those left ``"auto"`` are searched.
        Where responses vary in length, plans are compared in the mean over the lengths of several steps (``plan.best.steps_s``).

        Args:
            algorithm: e.g. ``hf.PPO()``.
            workload: prompts and lengths of one step; what it names replaces the algorithm's own options.
            top: how many plans to return, the best one included.
            by_placement: whether two of them may share devices in the same way and differ in pool sizes.
            shadows: whether shadows (separation) may be used.
            perf: predicts seconds; by default the session's own.
            error: relative error of predicted seconds, for the bands: a number from 0 to 1, or by method; by default what
                :meth:`calibrate` found, or what published timings say of the presets.

        Returns:
            The plan; ``session.place(plan)`` applies it, ``plan.why()`` explains it.

        Raises:
            DeviceMemoryError: nothing fits; says by how many bytes, and the smallest cluster that would do.
            LayoutError: a declared layout covers no pool of this cluster.
            OptionError: the workload is none, the algorithm generates nothing or lacks an option that the workload names, an
                option is out of its range, or samples would be longer than the actor's ``max_model_len``.
            PlacementError: a role that the step uses is not declared.
        """
        return self._ask(
            algorithm, workload, perf, {"top": top, "by_placement": by_placement, "shadows": shadows, "error": error}
        ).answer()

    @checked
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
        """Return the plan with sliders: in a notebook, devices, lengths, prompts, price, placement and layouts can be moved.

        Whatever is moved, the plan is found anew. Nothing of the session changes; ``session.place(what_if.plan)`` applies it.
        Where lengths outgrow a ``max_model_len`` that was left open, the plan assumes a larger one and says so.

        Args:
            algorithm: as in :meth:`plan`.
            workload: where the sliders begin.
            top: as in :meth:`plan`.
            shadows: as in :meth:`plan`.
            perf: as in :meth:`plan`.
            error: as in :meth:`plan`.

        Raises: as :meth:`plan`.
        """
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
        asked = self._ask(algorithm, workload, None, {"top": 1, "shadows": False})
        changed = {role.name: role for role in roles}
        handles = [(handle, changed.get(handle.name, role)) for handle, role in asked.handles]
        return replace(asked, cluster=cluster, handles=handles).answer()

    def _ask(self, algorithm: Algorithm, workload: Workload, perf: PerfModel | None, options: Mapping[str, Any]) -> PlanQuestion:
        self._context.client.check_open()
        book = self._deployment.book
        handles = [(handle, book.declared(handle)) for handle in book]
        return ask(
            algorithm, workload, handles, self._context.cluster, seed=self._context.seed, numbers=self._context.counters.all(),
            perf=self._predictions.perf if perf is None else perf, options=options, errors=self._predictions.errors,
        )  # fmt: skip
