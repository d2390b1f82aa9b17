"""The picture of every noun.

Nouns of the rooms below are looked up by the name of their class, so that nothing is imported for them. Nouns of the rooms above
say themselves how they are drawn, by a method ``_picture_`` (:class:`Drawn`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from hfsdk.core.errors import OptionError
from hfsdk.viz.frame import Picture
from hfsdk.viz.pictures.calibration import CalibrationPicture, calibration_view
from hfsdk.viz.pictures.census import CensusPicture, census_view
from hfsdk.viz.pictures.comparison import ComparisonPicture, comparison_view
from hfsdk.viz.pictures.dataflow import DataflowPicture, dataflow_view
from hfsdk.viz.pictures.experiment import ExperimentPicture, experiment_view
from hfsdk.viz.pictures.gap import GapPicture, gap_view
from hfsdk.viz.pictures.lineage import LineagePicture, lineage_view
from hfsdk.viz.pictures.plan import PlanPicture, plan_view
from hfsdk.viz.pictures.probe import ProbePicture, probe_view
from hfsdk.viz.pictures.resharding import ReshardPicture, reshard_view
from hfsdk.viz.pictures.timeline import TimelinePicture, timeline_view
from hfsdk.viz.pictures.tokens import TokensPicture, tokens_view

PICTURES: dict[tuple[str, str], Callable[[Any], Picture]] = {
    ("hfsdk.core.comparison", "Comparison"): lambda obj: ComparisonPicture(comparison_view(obj.view())),
    ("hfsdk.core.dataflow", "Dataflow"): lambda obj: DataflowPicture(dataflow_view(obj.view())),
    ("hfsdk.core.experiment", "Experiment"): lambda obj: ExperimentPicture(experiment_view(obj.view())),
    ("hfsdk.core.gap", "Gap"): lambda obj: GapPicture(gap_view(obj.view())),
    ("hfsdk.core.history", "History"): lambda obj: LineagePicture(lineage_view(obj.view())),
    ("hfsdk.core.plan", "Plan"): lambda obj: PlanPicture(plan_view(obj.view())),
    ("hfsdk.core.reward_probe", "RewardProbe"): lambda obj: ProbePicture(probe_view(obj.view())),
    ("hfsdk.planner.perf.calibration", "Calibration"): lambda obj: CalibrationPicture(calibration_view(obj.view())),
    ("hfsdk.resharding.census", "Census"): lambda obj: CensusPicture(census_view(obj.view())),
    ("hfsdk.resharding.reshard_plan", "ReshardPlan"): lambda obj: ReshardPicture(reshard_view(obj)),
    ("hfsdk.resharding.reshard_report", "ReshardReport"): lambda obj: ReshardPicture(reshard_view(obj)),
    ("hfsdk.core.tokens", "Tokens"): lambda obj: TokensPicture(tokens_view(obj)),
    ("hfsdk.core.trace", "Trace"): lambda obj: TimelinePicture(timeline_view(obj)),
}


@runtime_checkable
class Drawn(Protocol):
    """An object that says itself how it is drawn."""

    def _picture_(self) -> Picture:
        """Return its picture as it is now."""
        ...


def picture_of(obj: Any) -> Picture:
    """Return the picture of a noun, as it is now; a picture is its own.

    Raises:
        OptionError: there is none for objects of this type.
    """
    if isinstance(obj, Picture):
        return obj
    if isinstance(obj, Drawn):
        return obj._picture_()
    for kind in type(obj).__mro__:
        make = PICTURES.get((kind.__module__, kind.__qualname__))
        if make is not None:
            return make(obj)
    drawn = ", ".join(sorted({name for _, name in PICTURES}))
    raise OptionError(f"there is no picture of a {type(obj).__name__}; there are of {drawn}, and of what a session shows")
