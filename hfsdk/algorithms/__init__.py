"""RLHF algorithms; each reads like its paper. Their numerics are in `hfsdk.algorithms.rlmath`, which needs torch."""

from hfsdk.algorithms.grpo import GRPO
from hfsdk.algorithms.ppo import PPO

__all__ = ["GRPO", "PPO"]
