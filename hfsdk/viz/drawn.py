"""Which picture every noun has, found by the name of its class: nothing of what they need is imported for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hfsdk.core.errors import OptionError
from hfsdk.viz.comparison.view import ComparisonPicture, comparison_view
from hfsdk.viz.dashboard.view import DashboardPicture, dashboard_view
from hfsdk.viz.dataflow.view import DataflowPicture, dataflow_view
from hfsdk.viz.experiment.view import ExperimentPicture, experiment_view
from hfsdk.viz.frame import Picture
from hfsdk.viz.lineage.view import LineagePicture, lineage_view
from hfsdk.viz.memory.view import MemoryPicture, memory_view
from hfsdk.viz.placement.view import PlacementPicture, placement_view
from hfsdk.viz.plan.view import PlanPicture, plan_view
from hfsdk.viz.resharding.drawing import ReshardPicture
from hfsdk.viz.resharding.view import reshard_view
from hfsdk.viz.timeline.view import TimelinePicture, timeline_view
from hfsdk.viz.tokens.view import TokensPicture, tokens_view
from hfsdk.viz.what_if.view import WhatIfPicture, what_if_view

PICTURES: dict[tuple[str, str], Callable[[Any], Picture]] = {
    ("hfsdk.core.comparison", "Comparison"): lambda obj: ComparisonPicture(comparison_view(obj.view())),
    ("hfsdk.core.dataflow", "Dataflow"): lambda obj: DataflowPicture(dataflow_view(obj.view())),
    ("hfsdk.session.flows", "LiveDataflow"): lambda obj: DataflowPicture(dataflow_view(obj.view())),
    ("hfsdk.core.experiment", "Experiment"): lambda obj: ExperimentPicture(experiment_view(obj.view())),
    ("hfsdk.core.history", "History"): lambda obj: LineagePicture(lineage_view(obj.view())),
    ("hfsdk.core.plan", "Plan"): lambda obj: PlanPicture(plan_view(obj.view())),
    ("hfsdk.resharding.reshard_plan", "ReshardPlan"): lambda obj: ReshardPicture(reshard_view(obj)),
    ("hfsdk.resharding.reshard_report", "ReshardReport"): lambda obj: ReshardPicture(reshard_view(obj)),
    ("hfsdk.session.memory_use", "MemoryUse"): lambda obj: MemoryPicture(memory_view(obj.view())),
    ("hfsdk.session.running", "Run"): lambda obj: DashboardPicture(dashboard_view(obj.view())),
    ("hfsdk.session.what_if", "WhatIf"): lambda obj: WhatIfPicture(what_if_view(obj.view())),
    ("hfsdk.session.views", "PlacementPicture"): lambda obj: PlacementPicture(placement_view(obj.view())),
    ("hfsdk.session.views", "LiveTrace"): lambda obj: TimelinePicture(timeline_view(obj.snapshot())),
    ("hfsdk.core.tokens", "Tokens"): lambda obj: TokensPicture(tokens_view(obj)),
    ("hfsdk.core.trace", "Trace"): lambda obj: TimelinePicture(timeline_view(obj)),
}


def picture_of(obj: Any) -> Picture:
    """Return the picture of a noun, as it is now; a picture is its own.

    Raises:
        OptionError: there is none for objects of this type.
    """
    if isinstance(obj, Picture):
        return obj
    for kind in type(obj).__mro__:
        make = PICTURES.get((kind.__module__, kind.__qualname__))
        if make is not None:
            return make(obj)
    drawn = ", ".join(sorted({name for _, name in PICTURES}))
    raise OptionError(f"there is no picture of a {type(obj).__name__}; there are of {drawn}")
