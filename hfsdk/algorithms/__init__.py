"""RLHF algorithms; each reads like its paper. Their numerics are in `hfsdk.algorithms.rlmath`, which needs torch."""

from hfsdk.algorithms.grpo import GRPO
from hfsdk.algorithms.ppo import PPO
from hfsdk.algorithms.reinforce_pp import ReinforcePlusPlus
from hfsdk.algorithms.remax import ReMax
from hfsdk.algorithms.rloo import RLOO

__all__ = ["GRPO", "PPO", "RLOO", "ReMax", "ReinforcePlusPlus"]
