"""The session: devices, roles, prompts, training, checkpoints.

May import: core, resharding, assets, algorithms, planner, models, viz, engine.calls, engine.process, engine.weights,
engine.generation, engine.simulation, engine.controller, engine.ray, state, run, kept.
"""

from hfsdk.kept.attach import KeptSession, Sessions, sessions
from hfsdk.run.best import KeepBest
from hfsdk.run.run import Run
from hfsdk.run.trackers import MLflow, TensorBoard, WandB
from hfsdk.session.session import Session
from hfsdk.session.streams import PromptStream
from hfsdk.session.views import LivePlacement, LiveTrace, Traces
from hfsdk.session.what_if import WhatIf

__all__ = [
    "KeepBest",
    "KeptSession",
    "LivePlacement",
    "LiveTrace",
    "MLflow",
    "PromptStream",
    "Run",
    "Session",
    "Sessions",
    "TensorBoard",
    "Traces",
    "WandB",
    "WhatIf",
    "sessions",
]
