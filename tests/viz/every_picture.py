"""One full picture of every kind, with friendly data: what a reader of a notebook sees."""

from __future__ import annotations

from collections.abc import Callable

import hfsdk as hf
from hfsdk.core.cluster import ClusterSpec
from hfsdk.session.views import MemoryUse
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.frame import Picture
from hfsdk.viz.pictures.placement import PlacementPicture, placement_view
from hfsdk.viz.pictures.plan import PlanPicture, plan_view
from hfsdk.viz.pictures.resharding import ParameterPicture
from hfsdk.viz.pictures.what_if import WhatIfPicture, what_if_view
from hfsdk.viz.tables import batch_html, first_bad_html, metrics_html, progress_html, session_html, sessions_html
from tests.viz import bad_pictures as bad
from tests.viz import demo, demo_plans
from tests.viz import token_batches as made


def simulated_flow() -> Picture:
    """The dataflow of one PPO step."""
    with hf.Session.simulated("1x4 H200") as session:
        actor = session.actor("tiny")
        session.critic("tiny")
        session.reference(actor)
        session.reward(lambda prompts, completions, **columns: [0.0] * len(prompts))
        session.train(hf.PPO(), session.prompts(["a", "b", "c"], batch_size=2), steps=1)
        return picture_of(session.dataflow[0])


def parameter() -> Picture:
    plan = bad.plan_of("m", "tp4", "tp2")
    return ParameterPicture(plan.view_of("model.layers.0.self_attn.qkv_proj.weight"))


EVERY: dict[str, Callable[[], Picture]] = {
    "timeline": lambda: picture_of(demo.step_trace()),
    "timeline of steps": lambda: picture_of(demo.step_trace(steps=2)),
    "timeline, running": lambda: picture_of(demo.step_trace(running=True)),
    "timeline, predicted": lambda: picture_of(demo.step_trace(predicted=True)),
    "drains": lambda: picture_of(bad.drained_trace()),
    "pools": lambda: picture_of(demo.pools_trace()),
    "timelines": lambda: hf.viz.timelines_picture({"one": demo.step_trace(), "two": demo.pools_trace()}),
    "comparison": lambda: picture_of(demo.step_trace().compare({"update": 1.0})),
    "calibration": bad.calibrated,
    "census": lambda: bad.counted(4),
    "probe": lambda: picture_of(demo.reward_probe()),
    "gap": bad.gap_of,
    "dashboard": lambda: picture_of(bad.run_of(bad.rows_of(None))),
    "memory": lambda: picture_of(MemoryUse(bad.held_trace(), (), None, ClusterSpec.parse("1x2 cpu"), "memory")),
    "memory, planned": bad.planned_memory,
    "placement": lambda: PlacementPicture(placement_view(demo.placement_data(1, 4))),
    "placement of 2 nodes": lambda: PlacementPicture(placement_view(demo.placement_data(2, 8))),
    "shadow": lambda: PlacementPicture(placement_view(demo.shadow_data())),
    "dataflow": simulated_flow,
    "reshard": lambda: picture_of(bad.plan_of("m", "tp4", "tp2")),
    "grouping": lambda: hf.viz.grouping_picture(hf.ModelSpec.preset("llama-7b"), "tp4 dp2", "tp2 dp4"),
    "parameter": parameter,
    "tokens": lambda: hf.viz.tokens_picture(made.batch(6), new="new_log_probs"),
    "credit": lambda: hf.viz.credit_picture(made.batch(6)),
    "clip": lambda: hf.viz.clip_picture(made.batch(6)),
    "explanation": lambda: picture_of(bad.explained()),
    "plan": lambda: PlanPicture(plan_view(demo_plans.plan_data())),
    "what_if": lambda: WhatIfPicture(what_if_view(demo_plans.what_if().draw("response_tokens").view())),
    "experiment": lambda: picture_of(bad.experiment_of(0.3, judged=True)),
    "lineage": lambda: picture_of(bad.history_of(0.5)),
}
"""By name; those of a kind that look different have one each."""

CARDS: dict[str, Callable[[], str]] = {
    "batch": lambda: batch_html(demo.BATCH),
    "session": lambda: session_html(demo.SESSION),
    "sessions": lambda: sessions_html(demo.SESSIONS),
    "metrics": lambda: metrics_html(demo.METRICS),
    "progress": lambda: progress_html(demo.PROGRESS),
    "first bad number": lambda: first_bad_html(demo.FIRST_BAD),
}
"""What is HTML alone."""
