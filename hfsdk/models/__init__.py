"""Typed handles of the models in an RLHF dataflow, and the user's own primitives.

May import: core, resharding, engine.calls.
"""

from hfsdk.models.actor import ActorModel
from hfsdk.models.critic import CriticModel
from hfsdk.models.handle import ModelHandle, Primitive, TrainedHandle, primitive
from hfsdk.models.reference import ReferenceModel
from hfsdk.models.reward import CostModel, RewardModel

__all__ = [
    "ActorModel", "CostModel", "CriticModel", "ModelHandle", "Primitive", "ReferenceModel", "RewardModel", "TrainedHandle",
    "primitive",
]  # fmt: skip
