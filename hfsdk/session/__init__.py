"""The session: devices, roles, prompts, training, checkpoints.

May import: core, resharding, assets, algorithms, planner, models, viz, engine.calls, engine.process,
engine.weights, engine.generation, engine.simulation, engine.controller, engine.ray.
"""

from hfsdk.session.attach import KeptSession, Sessions, sessions
from hfsdk.session.keep_best import KeepBest
from hfsdk.session.prompts import PromptStream
from hfsdk.session.running import Run
from hfsdk.session.session import Session
from hfsdk.session.tracking import MLflow, TensorBoard, WandB
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
