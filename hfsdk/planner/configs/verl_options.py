"""What verl's configuration says of the algorithm, as release 0.9.1 reads it: hfsdk's class for it, and its options.

Sources in that release: ``verl/trainer/ppo/core_algos.py`` (estimators, losses, ``kl_penalty``),
``verl/trainer/ppo/rollout_corr_helper.py`` (weights), ``verl/trainer/config/_generated_ppo_trainer.yaml`` (defaults).
"""

from __future__ import annotations

from typing import Any

from hfsdk.planner.configs.settings import Settings

A, R, CORRECTION = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "algorithm.rollout_correction."

DEFAULTS: dict[str, Any] = {
    f"{A}clip_ratio_low": 0.2, f"{A}clip_ratio_high": 0.2, f"{A}clip_ratio_c": 3.0, f"{A}entropy_coeff": 0,
    f"{A}loss_agg_mode": "token-mean", f"{A}use_kl_loss": False, f"{A}kl_loss_coef": 0.001, f"{A}kl_loss_type": "low_var_kl",
    f"{A}tau_pos": 1.0, f"{A}tau_neg": 1.05,
    f"{A}policy_loss.loss_mode": "vanilla", f"{A}policy_loss.clip_cov_ratio": 0.0002, f"{A}policy_loss.clip_cov_lb": 1.0,
    f"{A}policy_loss.clip_cov_ub": 5.0, f"{A}policy_loss.kl_cov_ratio": 0.0002, f"{A}policy_loss.ppo_kl_coef": 0.1,
    f"{CORRECTION}rollout_is": None, f"{CORRECTION}rollout_is_threshold": 2.0, f"{CORRECTION}rollout_is_batch_normalize": False,
    "critic.cliprange_value": 0.5, f"{R}temperature": 1.0, "algorithm.gamma": 1.0, "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False, "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.norm_adv_by_std_in_grpo": True,
}  # fmt: skip
"""Of the keys that are read here."""

OURS = {
    "gae": "PPO", "grpo": "GRPO", "grpo_vectorized": "GRPO", "gdpo": "GDPO", "rloo": "RLOO", "rloo_vectorized": "RLOO",
    "remax": "ReMax", "reinforce_plus_plus": "ReinforcePlusPlus", "opo": "OPO",
    "reinforce_plus_plus_baseline": "ReinforcePlusPlusBaseline",
}  # fmt: skip
"""``algorithm.adv_estimator`` -> hfsdk's class, with the loss ``vanilla``."""

LOSSES = {
    "gspo": "GSPO", "cispo": "CISPO", "kl_cov": "KLCov", "clip_cov": "ClipCov", "sapo": "SAPO", "geo_mean": "GMPO",
    "dppo_tv": "DPPO", "dppo_kl": "DPPO", "gpg": "GPG",
}  # fmt: skip
"""``policy_loss.loss_mode`` -> hfsdk's class, with the estimator ``grpo``; that of ``gpg`` is ``gpg`` too."""

KL_KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""``kl_loss_type`` and ``kl_penalty`` -> hfsdk's estimator; a ``+`` behind it gives the gradient of k2."""

AGGREGATIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum": "sequence_sum"}


def algorithm_of(s: Settings, estimator: str) -> str:
    """Return the name of hfsdk's class, ``""`` where it has none."""
    mode = s.one_of(f"{A}policy_loss.loss_mode", ("vanilla", *LOSSES), "learning")
    if "gpg" in (estimator, mode):  # one without the other is neither
        return "GPG" if estimator == mode else ""
    if mode in LOSSES and estimator not in ("grpo", "grpo_vectorized"):
        return OURS.get(estimator, "") if estimator != "gdpo" else ""
    return LOSSES.get(mode) or OURS.get(estimator, "")


def options_of(s: Settings, estimator: str, response: int, copies: int) -> dict[str, Any]:
    """Return the options of hfsdk's class that the configuration says."""
    in_loss, in_reward = s.yes(f"{A}use_kl_loss"), s.yes("algorithm.use_kl_in_reward")
    coef = s.number(f"{A}kl_loss_coef") if in_loss else s.number("algorithm.kl_ctrl.kl_coef") if in_reward else 0.0
    low, high = s.number(f"{A}clip_ratio_low"), s.number(f"{A}clip_ratio_high")
    options = {
        "n": copies, "max_new_tokens": response, "temperature": s.number(f"{R}temperature"), "kl_coef": coef,
        "kl": _kl(s, f"{A}kl_loss_type" if in_loss else "algorithm.kl_penalty") if coef else None, "clip": low,
        "clip_high": high if high != low else None, "entropy_coef": s.number(f"{A}entropy_coeff"),
        "aggregation": AGGREGATIONS.get(s.one_of(f"{A}loss_agg_mode", tuple(AGGREGATIONS), "learning")),
    }  # fmt: skip
    if estimator == "gae":
        options |= {"gamma": s.number("algorithm.gamma"), "lam": s.number("algorithm.lam")}
        options |= {"value_clip": s.number("critic.cliprange_value"), "kl_in": "loss" if in_loss and coef else None}
    options |= _options_of_loss(s, s.text(f"{A}policy_loss.loss_mode")) | _correction(s)
    if estimator in ("grpo", "grpo_vectorized", "gdpo"):
        options["scale"] = "group" if s.yes("algorithm.norm_adv_by_std_in_grpo") else "none"
    return {name: value for name, value in options.items() if value is not None}


def _kl(s: Settings, key: str) -> str | None:
    kind = s.one_of(key, (*KL_KINDS, *(f"{one}+" for one in KL_KINDS)), "learning")
    ours = KL_KINDS.get(kind.removesuffix("+"))
    return f"{ours}+" if ours in ("k1", "k3") and kind.endswith("+") else ours


def _options_of_loss(s: Settings, mode: str) -> dict[str, Any]:
    """Return the options that one loss alone has, and ``None`` for those that have no part in it."""
    loss = f"{A}policy_loss."
    if mode == "kl_cov":
        return {"share": s.number(f"{loss}kl_cov_ratio"), "old_kl_coef": s.number(f"{loss}ppo_kl_coef"), "clip_high": None}
    if mode == "clip_cov":
        bounds = {"low": s.number(f"{loss}clip_cov_lb"), "high": s.number(f"{loss}clip_cov_ub")}
        return {"share": s.number(f"{loss}clip_cov_ratio"), **bounds}
    without_clip: dict[str, Any] = {"clip": None, "clip_high": None}
    if mode == "sapo":  # its loss is averaged so whatever loss_agg_mode says
        return {
            **without_clip,
            "tau_pos": s.number(f"{A}tau_pos"),
            "tau_neg": s.number(f"{A}tau_neg"),
            "aggregation": "sequence_mean",
        }
    if mode == "geo_mean":
        return {"aggregation": "sequence_mean"}
    if mode == "gpg":
        return without_clip
    if mode in ("dppo_tv", "dppo_kl"):
        return {"divergence": mode.removeprefix("dppo_"), "ratio_cap": s.number(f"{A}clip_ratio_c")}
    return {}


def _correction(s: Settings) -> dict[str, Any]:
    """Return the weights of the rollout's log-probs: a threshold of one number truncates them, ``"lower_upper"`` masks them."""
    level, threshold = s.value(f"{CORRECTION}rollout_is"), str(s.value(f"{CORRECTION}rollout_is_threshold"))
    normalised = s.yes(f"{CORRECTION}rollout_is_batch_normalize")
    try:
        *floor, cap = (float(bound) for bound in threshold.split("_"))
    except ValueError:
        return {}
    if level not in ("token", "sequence", "geometric"):  # the last of releases up to 0.6
        return {}
    found = {"tis_cap": cap, "tis_level": level, **({"tis_normalise": True} if normalised else {})}
    return found | {"tis_floor": floor[0], "tis_bounds": "mask"} if floor else found
