"""RLHF algorithms; each reads like its paper. Their numerics are in `hfsdk.algorithms.rlmath`, which needs torch.

They know models by the types of their handles alone.

May import: core, models.
"""

from hfsdk.algorithms.cispo import CISPO
from hfsdk.algorithms.clip_cov import ClipCov
from hfsdk.algorithms.dapo import DAPO, OverlongPenalty
from hfsdk.algorithms.distillation import Distillation
from hfsdk.algorithms.dpo import DPO
from hfsdk.algorithms.dppo import DPPO
from hfsdk.algorithms.dr_grpo import DrGRPO
from hfsdk.algorithms.gdpo import GDPO
from hfsdk.algorithms.gmpo import GMPO
from hfsdk.algorithms.gpg import GPG
from hfsdk.algorithms.grpo import GRPO
from hfsdk.algorithms.gspo import GSPO
from hfsdk.algorithms.kl_cov import KLCov
from hfsdk.algorithms.opo import OPO
from hfsdk.algorithms.pass_at_k import PassAtKTraining
from hfsdk.algorithms.pass_rate import PassAtK
from hfsdk.algorithms.ppo import PPO
from hfsdk.algorithms.preferences import BradleyTerry, CostLoss, CrossEntropy
from hfsdk.algorithms.process import ProcessGRPO
from hfsdk.algorithms.reinforce_pp import ReinforcePlusPlus
from hfsdk.algorithms.reinforce_pp_baseline import ReinforcePlusPlusBaseline
from hfsdk.algorithms.remax import ReMax
from hfsdk.algorithms.rloo import RLOO
from hfsdk.algorithms.safe_rlhf import SafeRLHF
from hfsdk.algorithms.sapo import SAPO

__all__ = [
    "CISPO", "DAPO", "DPO", "DPPO", "GDPO", "GMPO", "GPG", "GRPO", "GSPO", "OPO", "PPO", "RLOO", "SAPO", "BradleyTerry", "ClipCov",
    "CostLoss", "CrossEntropy", "Distillation", "DrGRPO", "KLCov", "OverlongPenalty", "PassAtK", "PassAtKTraining", "ProcessGRPO",
    "ReMax", "ReinforcePlusPlus", "ReinforcePlusPlusBaseline", "SafeRLHF",
]  # fmt: skip
