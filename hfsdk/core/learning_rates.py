"""Learning rates and a warm-up for ``AdamW`` without ``lr``: by the role's objective and the model's size, each with its source.

A row holds for models of up to so many parameters that no row above it holds for. Larger models take smaller steps: their sources
are what papers and other libraries train with; those of ``tiny`` and SmolLM2 were measured here. A suggestion is where to
begin, not what is best: ``docs/algorithms.md`` says how to look.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class SuggestedRate:
    """One row of the table."""

    most_parameters: float
    """The largest model it is for."""
    lr: float
    """Peak learning rate."""
    source: str
    """The library or paper that trains so, or the benchmark that measured it."""


HERE = "benchmarks/recipe.py, benchmarks/learning_rates.py"
TULU = "Tulu 3 (arXiv 2411.15124), open-instruct docs/tulu3.md"

RATES: Mapping[str, tuple[SuggestedRate, ...]] = {
    "policy": (
        SuggestedRate(2e7, 5e-5, HERE),
        SuggestedRate(3e8, 3e-5, "benchmarks/learning_rates.py; TRL 0.4's GPT-2 (124M) on movie reviews has 1.41e-5"),
        SuggestedRate(3e9, 3e-6, "PPO of Pythia 1B and 2.8B (arXiv 2403.17031); TRL's PPOConfig"),
        SuggestedRate(4e10, 1e-6, "GRPO of DeepSeekMath 7B (arXiv 2402.03300), DAPO of 32B (2503.14476); TRL's GRPOConfig"),
        SuggestedRate(inf, 1e-7, f"PPO of 70B: {TULU}"),
    ),
    "values": (
        SuggestedRate(2e7, 1e-3, "benchmarks/learning.py"),
        SuggestedRate(3e8, 1e-4, "between the two: in all sources of this table a critic takes 3 to 30 times its policy's rate"),
        SuggestedRate(inf, 9e-6, "PPO of Llama 3 8B: OpenRLHF examples/scripts/train_ppo_llama_ray.sh"),
    ),
    "preferences": (
        SuggestedRate(2e7, 2e-4, "benchmarks/learning.py --all"),
        SuggestedRate(3e9, 1e-6, "DPO (arXiv 2305.18290), appendix B; TRL's DPOConfig"),
        SuggestedRate(4e10, 5e-7, f"DPO of 8B: {TULU}"),
        SuggestedRate(inf, 2e-7, f"DPO of 70B and 405B: {TULU}"),
    ),
    "demonstrations": (
        SuggestedRate(2e7, 2e-4, "notebooks/07_reward_and_cost_models.ipynb"),
        SuggestedRate(3e9, 2e-5, "TRL's SFTConfig"),
        SuggestedRate(4e10, 5e-6, f"SFT of 8B: {TULU}"),
        SuggestedRate(inf, 2e-6, f"SFT of 70B: {TULU}"),
    ),
    "scores": (
        SuggestedRate(2e7, 1e-4, "docs/algorithms.md, notebooks/07_reward_and_cost_models.ipynb"),
        SuggestedRate(3e8, 2e-5, "benchmarks/learning.py --all"),
        SuggestedRate(inf, 3e-6, f"reward model of 8B: {TULU}; of Pythia 1B to 6.9B (arXiv 2403.17031)"),
    ),
}  # fmt: skip
"""Rows for each kind of learning, the smallest models first."""

WORDS: Mapping[str, str] = {
    "policy": "a policy gradient (PPO, GRPO, ...)", "values": "a value function", "preferences": "DPO",
    "demonstrations": "supervised fine-tuning", "scores": "a reward or cost model",
}  # fmt: skip
"""The kinds of learning, in words."""

LEARNS: Mapping[str, str] = {"actor": "policy", "critic": "values", "reward": "scores", "cost": "scores"}
"""The kind of learning of each kind of role, for a loss that does not say it (``loss.learns``)."""

OF_ADAPTERS = 10
"""How many times a model's own rate its adapters take ("LoRA Without Regret", Schulman et al., Thinking Machines, 2025: 10, for
models and ranks of all sizes; TRL's documentation says the same)."""

WARMUP_STEPS = 10
"""Optimizer steps over which a suggested rate rises from 0: Adam's second moments are averages over few gradients until then
(verl's DAPO scripts: 10; DAPO, section 4.1: 20 rollout steps; Tulu 3: 10 % of the steps)."""


def suggested_rate(num_parameters: int, learns: str) -> SuggestedRate:
    """Return the row for a model of this size.

    Args:
        num_parameters: the model's number of parameters, embeddings included.
        learns: a key of `RATES`.
    """
    return next(row for row in RATES[learns] if num_parameters <= row.most_parameters)


def what_is_learned(loss: object, kind: str) -> str:
    """Return the key of `RATES` for a loss: its own ``learns``, or that of a role of this kind."""
    learns = getattr(loss, "learns", "")
    return learns if isinstance(learns, str) and learns in RATES else LEARNS[kind]
