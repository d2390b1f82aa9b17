"""Names of options in other libraries, and hfsdk's names for them, for readers who bring a name along."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hfsdk.algorithms.choices import MOST_EPSILON
from hfsdk.core.errors import OptionError
from hfsdk.core.other_names import ELSEWHERE, unknown_name

OTHER_NAMES = {
    "kl_coef": "beta kl_beta kl_coeff kl_weight init_kl_coef kl_loss_coef kl_penalty_coef",
    "kl": "kl_estimator kl_penalty kl_type kl_loss_type",
    "kl_by_ratio": "use_bias_correction_kl",
    "max_new_tokens": "max_tokens max_length max_completion_length max_response_length response_length generate_max_len",
    "n": "num_generations group_size num_samples num_return_sequences n_samples n_samples_per_prompt rollout_n rloo_k k",
    "clip": "epsilon eps cliprange clip_range clip_eps clip_epsilon clip_ratio clip_param epsilon_low clip_ratio_low eps_clip",
    "clip_high": "epsilon_high clip_ratio_high eps_clip_high clip_range_high",
    "dual_clip": "clip_ratio_c dual_clip_ratio delta",
    "value_clip": "cliprange_value clip_range_vf vf_clip vf_clip_param value_clip_range value_clip_ratio clip_range_value",
    "lam": "gae_lambda lambda lambda_ lmbda lambd gae_lam",
    "gamma": "discount discount_factor",
    "entropy_coef": "ent_coef entropy_coeff entropy_coefficient entropy_loss_coef entropy_weight",
    "epochs": "num_ppo_epochs ppo_epochs num_epochs n_epochs noptepochs update_epochs num_iterations mu",
    "mini_batches": "num_mini_batches num_minibatches nminibatches n_minibatches minibatches num_mini_batch",
    "whiten": "whiten_advantages normalize_advantage normalize_advantages norm_adv",
    "score_clip": "reward_clip cliprange_reward reward_clip_range clip_reward_value clip_rewards",
    "missing_eos_penalty": "non_eos_penalty eos_penalty",
    "aggregation": "loss_agg_mode loss_type loss_aggregation",
    "scale": "scale_rewards norm_adv_by_std_in_grpo",
    "tis_cap": "tis_imp_ratio_cap vllm_importance_sampling_cap vllm_importance_sampling_clip_max rollout_is_threshold",
    "tis_floor": "vllm_importance_sampling_clip_min",
    "tis_level": "rollout_is is_correction_level",
    "tis_normalise": "rollout_is_batch_normalize tis_normalize",
    "tau_pos": "sapo_temperature_pos",
    "tau_neg": "sapo_temperature_neg",
    "parts": "gdpo_reward_keys",
    "weights": "gdpo_reward_weights",
    "ratio_cap": "clip_ratio_c",
    "pass_score": "pass_threshold",
    "k": "pass_k",
    "tis_bounds": "vllm_importance_sampling_mode is_correction_mode",
    "oversample": "batch_multiplier gen_batch_size",
    "share": "kl_cov_ratio clip_cov_ratio",
    "old_kl_coef": "ppo_kl_coef",
    "low": "clip_cov_lb",
    "high": "clip_cov_ub",
    "buffer": "soft_punish_cache overlong_buffer_len",
    "penalty": "overlong_penalty_factor penalty_factor",
    "cost_limit": "threshold cost_threshold",
    "kind": "loss_type",
    "beta": "kl_coef",
}  # fmt: skip
"""hfsdk's name of an option -> its names in TRL, verl, OpenRLHF, Stable-Baselines3, CleanRL and the papers."""

_OPTIMIZER = "it belongs to a model's optimizer: session.actor(model, optimizer=hf.AdamW(lr=1e-5)), and so with session.critic"
_PER_MINI_BATCH = "an update is cut into a number of parts, mini_batches; how many tokens a pass takes at once belongs to the role"
_OWN_STEP = "it belongs to a call of your own step: a subclass whose step has models.actor.generate(prompts, {})"
_ELSEWHERE = {
    "lr learning_rate actor_lr critic_lr actor_learning_rate critic_learning_rate weight_decay max_grad_norm optimizer": _OPTIMIZER,
    "vf_coef value_coef value_loss_coef": (
        "no loss is weighed against the other, actor and critic have optimizers of their own: session.critic(model, "
        "optimizer=hf.AdamW(lr=1e-5))"
    ),
    "batch_size train_batch_size rollout_batch_size per_device_train_batch_size": (
        "it belongs to the prompts: session.prompts(data, batch_size=32)"
    ),
    "mini_batch_size minibatch_size ppo_mini_batch_size micro_batch_size": _PER_MINI_BATCH,
    "importance_sampling_level": "the ratio of whole responses is an algorithm: hf.GSPO()",
    "loss_mode policy_loss_type adv_estimator advantage_estimator": (
        "each is an algorithm: hf.GSPO(), hf.CISPO(), hf.SAPO(), hf.GMPO() (geo_mean), hf.GPG(), hf.DPPO(), hf.GDPO(), ..."
    ),
    "sapo_temperature_pos sapo_temperature_neg": "the soft gate is an algorithm: hf.SAPO()",
    "multi_objective_aggregation gdpo_reward_keys gdpo_reward_weights": (
        "rewards that are normalised by themselves before they are summed are an algorithm: hf.GDPO()"
    ),
    "pass_k": "pass@k is trained by hf.PassAtKTraining(k=4), and measured by metrics=[hf.PassAtK(k=(1, 4))]",
    "steps num_steps max_steps total_episodes total_timesteps": "it belongs to the loop: session.train(..., steps=50)",
    "max_prompt_length": "it belongs to the data: session.prompts(data, max_prompt_tokens=64)",
    "max_length max_seq_length": "of pairs hfsdk calls it max_tokens: session.pairs(data, max_tokens=512)",
    "top_p top_k min_new_tokens min_tokens": _OWN_STEP.format("top_p=0.9, top_k=50, min_new_tokens=4"),
    "stop stop_strings stop_sequences stop_words stop_token_ids stop_tokens ignore_eos": (
        _OWN_STEP.format("stop=['\\n'], stop_token_ids=[13]") + ". Else responses end at the model's own ends, eos_token_id of its "
        "generation_config.json (a list of them is taken)"
    ),
}
"""Options that are no algorithm's -> where they are."""

_VALUES: dict[str, dict[object, str]] = {
    "aggregation": {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "fixed_length"},
    "scale": {True: "group", False: "none"},
    "kl": {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "low_var_kl+": "k3+"},
}
"""An option of hfsdk's -> what TRL's values of it (``loss_type``, ``scale_rewards``), and verl's of ``kl``, are here."""

_ALGORITHM_VALUES = {"aggregation": {"cispo": "hf.CISPO()", "sapo": "hf.SAPO()"}}
"""An option of hfsdk's -> TRL's values of it that are algorithms here."""


def check_value(what: str, name: str, value: Any) -> None:
    """Refuse a value that has another name here.

    Raises:
        OptionError: says what hfsdk calls it.
    """
    if name == "epsilon" and isinstance(value, float) and MOST_EPSILON < value < 1:
        said = f"epsilon must be at most {MOST_EPSILON}, it is added to the standard deviation of the scores"
        raise OptionError(f"{what}: TRL's epsilon={value:g} is clip={value:g} here; {said}") from None
    if isinstance(value, str | bool) and (ours := _VALUES.get(name, {}).get(value)):
        library = "verl" if name == "kl" else "TRL"
        raise OptionError(f"{what}: {library}'s {name}={value!r} is {name}={ours!r} here") from None
    if isinstance(value, str) and (whole := _ALGORITHM_VALUES.get(name, {}).get(value)):
        raise OptionError(f"{what}: TRL's {name}={value!r} is an algorithm here: {whole}") from None


def unknown_option(what: str, name: str, existing: Collection[str]) -> str:
    """Return the message on an option that does not exist.

    Args:
        what: the algorithm, loss or function, as the user calls it.
        name: the option that was given.
        existing: the names that exist.
    """
    others = {names: said for names, said in ELSEWHERE.items() if not said.startswith("it belongs to the algorithm")}
    return unknown_name(what, name, existing, OTHER_NAMES, {**_ELSEWHERE, **others})
