"""RLHF algorithms; each reads like its paper. Their numerics are in `hfsdk.algorithms.rlmath`, which needs torch.

Of models they know the types of the handles alone.

May import: core, models.
"""

from hfsdk.algorithms.dpo import DPO
from hfsdk.algorithms.grpo import GRPO
from hfsdk.algorithms.ppo import PPO
from hfsdk.algorithms.preferences import BradleyTerry, CostLoss, CrossEntropy
from hfsdk.algorithms.reinforce_pp import ReinforcePlusPlus
from hfsdk.algorithms.remax import ReMax
from hfsdk.algorithms.rloo import RLOO
from hfsdk.algorithms.safe_rlhf import SafeRLHF

__all__ = [
    "DPO", "GRPO", "PPO", "RLOO", "BradleyTerry", "CostLoss", "CrossEntropy", "ReMax", "ReinforcePlusPlus", "SafeRLHF",
]  # fmt: skip
