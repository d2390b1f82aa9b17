"""Write peer_variants.json: what TRL's and verl's own code gives for the algorithms of 2025 and 2026.

    python -m pip download --no-deps -d /tmp/peers trl==1.12 verl==0.9.1
    python tests/data/make_variant_oracles.py /tmp/peers

GSPO, CISPO, DAPO, Dr. GRPO, KL-Cov, Clip-Cov, SAPO, GMPO, GPG, DPPO, GDPO, OPO, REINFORCE++-baseline, distillation, the KL by the
ratio, truncated, masked and normalised importance sampling. As in make_oracles.py, nothing of the peers is imported and none of
their code is kept.
"""

import ast
import json
import math
import sys
import types
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from make_oracles import flat, functions, inputs, read, stretch

TRL_FILES = ("trl/trainer/grpo_trainer.py", "trl/rewards/other_rewards.py")
VERL_FILES = (
    "verl/trainer/ppo/core_algos.py", "verl/utils/torch_functional.py", "verl/trainer/ppo/rollout_corr_helper.py",
)  # fmt: skip
LENGTHS = [4, 1, 6, 3]
TRL_LOSSES = {
    "gspo": ("grpo", "sequence"), "cispo": ("cispo", "token"), "dapo": ("dapo", "token"), "dr_grpo": ("dr_grpo", "token"),
    "sapo": ("sapo", "token"), "kl_by_ratio": ("grpo", "token"),
}  # fmt: skip
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


VERL_LOSSES = ("gspo", "cispo", "sapo", "geo_mean", "gpg", "dppo_tv", "dppo_kl")


class Config(types.SimpleNamespace):
    """What verl's losses read of their configuration."""

    def get(self, name, default):
        return getattr(self, name, default)


def numbers(loss, log_probs, mask):
    """Return a loss and its gradient on the response tokens."""
    return {"loss": loss.item(), "gradient": flat(torch.autograd.grad(loss, log_probs)[0], mask)}


def trl_losses(source, mask, x, scores, options):
    """Run TRL's stretches from the log-ratio to the loss; one advantage per response."""
    found = {}
    for name, (loss_type, level) in TRL_LOSSES.items():
        log_probs = x["log_probs"].clone().requires_grad_()
        low, high = options[name]["clip"], options[name]["clip_high"]
        this = types.SimpleNamespace(
            importance_sampling_level=level, beta=options[name].get("kl_coef", 0.0), loss_type=loss_type, epsilon_low=low,
            epsilon_high=high,
            off_policy_mask_threshold=None, use_vllm=False, current_gradient_accumulation_steps=1, max_completion_length=7,
            args=types.SimpleNamespace(
                delta=None, steps_per_generation=1, use_bias_correction_kl=True, sapo_temperature_pos=options[name].get("tau_pos"),
                sapo_temperature_neg=options[name].get("tau_neg"),
            ),
            accelerator=types.SimpleNamespace(num_processes=1),
        )  # fmt: skip
        here = {"torch": torch, "self": this, "mask": mask.double(), "per_token_logps": log_probs, "mode": "train",
                "old_per_token_logps": x["old_log_probs"], "advantages": scores[:, None],
                "inputs": {"num_items_in_batch": mask.sum(), "ref_per_token_logps": x["ref_log_probs"]}}  # fmt: skip
        unknown = 'raise ValueError(f"Unknown loss type'
        exec(stretch(source, "log_ratio = per_token_logps - old_per_token_logps", unknown), here)
        with_vllm = 'if self.use_vllm and self.vllm_importance_sampling_correction and self.loss_type != "vespo":'
        exec(stretch(source, with_vllm, "per_token_loss = per_token_loss + self.beta"), here)
        exec(stretch(source, 'if self.loss_type in ["grpo", "sapo"]:', unknown), here)
        found[name] = numbers(here["loss"], log_probs, mask)
    return found


def trl_weights(source, mask, old, rollout, floor, cap):
    found = {}
    for mode in MODES:
        this = types.SimpleNamespace(
            use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=floor, vllm_importance_sampling_clip_max=cap,
        )  # fmt: skip
        here = {"torch": torch, "math": math, "self": this, "mask": mask.double(),
                "old_per_token_logps": old, "sampling_per_token_logps": rollout}  # fmt: skip
        first = "per_token_logps_diff = (old_per_token_logps - sampling_per_token_logps) * mask"
        exec(weights_stretch(source, first), here)
        found[mode] = flat(here["vllm_importance_sampling_ratio"].expand(mask.shape), mask)
    return found


def weights_stretch(source, first):
    """Return TRL's lines from the log-ratios to the weights, closing the choice of mode."""
    text = stretch(source, first, "vllm_importance_sampling_ratio = vllm_importance_sampling_ratio.masked_fill(")
    return (
        text.rpartition("\n")[0]
        + "\n"
        + " " * 4
        + ("vllm_importance_sampling_ratio = vllm_importance_sampling_ratio.masked_fill(invalid_mis_mask, value=0.0)")
    )


def trl_overlong(source):
    space = {"Callable": None}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "_SoftOverlongPunishment":
            exec(compile(ast.Module([node], []), node.name, "exec"), space)
    lengths = [0, 3, 11, 12, 13, 15, 19, 20]
    found = space["_SoftOverlongPunishment"](20, 8)(completion_ids=[[0] * n for n in lengths])
    return {"max_new_tokens": 20, "buffer": 8, "lengths": lengths, "expected": found}


def verl_space(core, helpers):
    masked = {"masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"}
    tools = types.SimpleNamespace(**functions(helpers, masked, {"torch": torch}))
    space = {"torch": torch, "np": np, "verl_F": tools, "Optional": None, "Any": None, "defaultdict": defaultdict}
    space |= {"ActorConfig": Config, "AlgoConfig": type("AlgoConfig", (), {})}
    names = {f"compute_policy_loss_{name}" for name in (*VERL_LOSSES, "clip_cov", "kl_cov", "vanilla")}
    names |= {"agg_loss", "kl_penalty", "kl_penalty_forward", "compute_opo_outcome_advantage", "compute_gdpo_outcome_advantage"}
    names |= {"compute_grpo_outcome_advantage"}
    return functions(core, names | {"compute_reinforce_plus_plus_baseline_outcome_advantage"}, space)


def verl_losses(space, mask, x, scores, options):
    """Run verl's losses; an advantage per token, and one per response for GSPO."""
    real, found = mask.double(), {}
    of_tokens, of_responses = x["values"], scores[:, None] * real
    teacher = -space["kl_penalty"](x["old_log_probs"], x["ref_log_probs"], "k1") * real
    cases = {
        "gspo": ("gspo", of_responses, "seq-mean-token-mean"), "gspo_token": ("gspo", of_tokens, "seq-mean-token-mean"),
        "cispo": ("cispo", of_tokens, "token-mean"), "clip_cov": ("clip_cov", of_tokens, "token-mean"),
        "kl_cov": ("kl_cov", of_tokens, "token-mean"), "distillation": ("vanilla", teacher, "token-mean"),
        "sapo": ("sapo", of_tokens, "seq-mean-token-mean"), "geo_mean": ("geo_mean", of_responses, "seq-mean-token-mean"),
        "gpg": ("gpg", of_tokens, "token-mean"), "dppo_tv": ("dppo_tv", of_tokens, "token-mean"),
        "dppo_kl": ("dppo_kl", of_tokens, "token-mean"),
    }  # fmt: skip
    for name, (function, advantages, mode) in cases.items():
        o, log_probs = options[name], x["log_probs"].clone().requires_grad_()
        config = Config(
            clip_ratio=0.2, clip_ratio_low=o["clip"], clip_ratio_high=o["clip_high"], global_batch_info={},
            clip_ratio_c=o.get("ratio_cap", 1e12), tau_pos=o.get("tau_pos", 1.0), tau_neg=o.get("tau_neg", 1.0),
            policy_loss=Config(
                clip_cov_ratio=o.get("share"), clip_cov_lb=o.get("low"), clip_cov_ub=o.get("high"), kl_cov_ratio=o.get("share"),
                ppo_kl_coef=o.get("old_kl_coef"),
            ),
        )  # fmt: skip
        run = space[f"compute_policy_loss_{function}"]
        loss, _ = run(x["old_log_probs"], log_probs, advantages, real, loss_agg_mode=mode, config=config)
        found[name] = numbers(loss, log_probs, mask)
    return found, flat(teacher, mask)


def verl_advantages(space, seed):
    """Groups of several sizes, out of order; the group of one is where verl gives the score."""
    lengths, group = [4, 1, 6, 3, 2, 5, 3, 2], [7, 2, 7, 2, 7, 2, 2, 9]
    mask, _, scores = inputs(lengths, seed)
    rewards = torch.zeros(mask.shape, dtype=torch.double)
    rewards[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = scores
    found = {}
    for ours, name in (("opo", "opo"), ("reinforce_pp_baseline", "reinforce_plus_plus_baseline")):
        made, _ = space[f"compute_{name}_outcome_advantage"](rewards.clone(), mask.double(), np.array(group))
        found[ours] = flat(made, mask)
    return {"lengths": lengths, "group": group, "scores": scores.tolist(), "expected": found}


def of_several_rewards(trl_source, space, seed):
    """Three rewards of groups of four, one of which scores half of the responses alone: TRL's and, of the others, verl's."""
    lengths, size = [4, 1, 6, 3, 2, 5, 3, 2], 4
    mask, _, _ = inputs(lengths, seed)
    rng = np.random.default_rng(seed)
    rewards = torch.tensor(np.round(rng.normal(0, [[1.0, 0.1, 5.0]], (8, 3)), 2))
    rewards[4:, 2] = torch.nan
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.double)
    found = {"lengths": lengths, "group": [k // size for k in range(8)], "weights": weights.tolist(),
             "rewards": [[None if math.isnan(x) else x for x in row] for row in rewards.tolist()]}  # fmt: skip
    this = types.SimpleNamespace(reward_funcs=[0] * 3, reward_weights=weights, scale_rewards="group")
    here = {"torch": torch, "self": this, "rewards_per_func": rewards, "num_generations": size, "device": "cpu", "nanstd": nanstd,
            "unscorable_mask": torch.zeros(8, dtype=torch.bool)}  # fmt: skip
    exec(stretch(trl_source, "grouped = rewards_per_func.view(-1, num_generations", "advantages ="), here)
    found["trl"] = here["advantages"].tolist()
    keys = {"of_0": rewards[:, 0].numpy(), "of_1": rewards[:, 1].numpy()}
    config = Config(gdpo_reward_keys=list(keys), gdpo_reward_weights=weights[:2].tolist())
    prompts = {"prompts": torch.zeros(8, 2), "attention_mask": torch.cat([torch.ones(8, 2).long(), mask.long()], 1)}
    made, _ = space["compute_gdpo_outcome_advantage"](
        torch.zeros(mask.shape, dtype=torch.double), mask.double(), np.array(found["group"]), config=config,
        non_tensor_batch=keys, batch=prompts,
    )  # fmt: skip
    found["verl"] = flat(made, mask)
    return found


def nanstd(x, dim=None, keepdim=False):
    """The unbiased deviation of the numbers that are none of NaN; NaN of fewer than two (TRL's own is a helper of its trainer)."""
    here = ~torch.isnan(x)
    count = here.sum() if dim is None else here.sum(dim, keepdim=keepdim)
    mean = torch.nanmean(x) if dim is None else torch.nanmean(x, dim, keepdim=True)
    square = torch.nan_to_num((x - mean) ** 2)
    total = square.sum() if dim is None else square.sum(dim, keepdim=keepdim)
    return (total / (count - 1)).sqrt()


def verl_weights(correction, space, mask, old, rollout, floor, cap):
    theirs = {"torch": torch, "Any": None, "Optional": None, "verl_F": space["verl_F"], "SAFETY_BOUND": 20.0,
              "compute_is_metrics": lambda **_: {}}  # fmt: skip
    functions(correction, {"compute_rollout_correction_weights", "_parse_rollout_is_threshold"}, theirs)
    found = {}
    for mode in MODES:
        level, _, bounds = mode.partition("_")
        threshold = cap if bounds == "truncate" else f"{floor}_{cap}"
        weights, _ = theirs["compute_rollout_correction_weights"](old - rollout, mask.double(), level, threshold)
        found[mode] = flat(weights, mask)
        mean_1, _ = theirs["compute_rollout_correction_weights"](old - rollout, mask.double(), level, threshold, True)
        found[f"{mode}_normalised"] = flat(mean_1, mask)
    return found


OPTIONS = {
    "trl": {
        "gspo": {"clip": 0.1, "clip_high": 0.15}, "cispo": {"clip": 1.0, "clip_high": 1.2},
        "dapo": {"clip": 0.2, "clip_high": 0.28}, "dr_grpo": {"clip": 0.2, "clip_high": 0.2},
        "sapo": {"clip": 0.2, "clip_high": 0.2, "tau_pos": 1.0, "tau_neg": 1.05},
        "kl_by_ratio": {"clip": 0.2, "clip_high": 0.2, "kl_coef": 0.3},
    },
    "verl": {
        "gspo": {"clip": 0.1, "clip_high": 0.15}, "gspo_token": {"clip": 0.1, "clip_high": 0.15},
        "cispo": {"clip": 0.2, "clip_high": 0.3}, "distillation": {"clip": 0.2, "clip_high": 0.2},
        "clip_cov": {"clip": 0.2, "clip_high": 0.28, "share": 1.0, "low": 0.1, "high": 1.5},
        "kl_cov": {"clip": 0.2, "clip_high": 0.2, "share": 0.25, "old_kl_coef": 0.7},
        "sapo": {"clip": 0.2, "clip_high": 0.2, "tau_pos": 0.7, "tau_neg": 1.9}, "geo_mean": {"clip": 0.1, "clip_high": 0.25},
        "gpg": {"clip": 0.2, "clip_high": 0.2}, "dppo_tv": {"clip": 0.02, "clip_high": 0.03, "ratio_cap": 1.2},
        "dppo_kl": {"clip": 0.002, "clip_high": 0.004, "ratio_cap": 1e4},
    },
}  # fmt: skip
"""hfsdk's names; TRL's CISPO has the bound itself in place of its distance from 1."""


def main(folder):
    trl, verl = ([read(folder, name, file) for file in files] for name, files in (("trl", TRL_FILES), ("verl", VERL_FILES)))
    (grpo, _), (rewards, _) = trl
    (core, _), (helpers, _), (correction, _) = verl
    mask, x, scores = inputs(LENGTHS, 8)
    space = verl_space(core, helpers)
    losses, teacher = verl_losses(space, mask, x, scores, OPTIONS["verl"])
    apart = 1.5 * torch.tensor([-5.0, 1.0, 1.0, 1.0])[:, None]
    rollout = torch.where(mask, x["old_log_probs"] - apart * (x["log_probs"] - x["old_log_probs"]), 0.0)
    floor, cap = 0.6, 1.7
    columns = {name: flat(x[name], mask) for name in ("old_log_probs", "log_probs", "ref_log_probs")}
    columns |= {"rollout_log_probs": flat(rollout, mask), "token_advantages": flat(x["values"], mask)}
    oracle = {
        "origin": "tests/data/make_variant_oracles.py; numbers only, computed by the files named here",
        "trl_origin": [origin for _, origin in trl],
        "verl_origin": [origin for _, origin in verl],
        "lengths": LENGTHS, "options": OPTIONS, "columns": columns, "response_advantages": scores.tolist(),
        "trl": trl_losses(grpo, mask, x, scores, OPTIONS["trl"]),
        "verl": losses, "verl_teacher_advantages": teacher,
        "advantages": verl_advantages(space, 9), "several_rewards": of_several_rewards(grpo, space, 10),
        "weights": {
            "floor": floor, "cap": cap, "trl": trl_weights(grpo, mask, x["old_log_probs"], rollout, floor, cap),
            "verl": verl_weights(correction, space, mask, x["old_log_probs"], rollout, floor, cap),
        },
        "overlong": trl_overlong(rewards),
    }  # fmt: skip
    path = Path(__file__).with_name("peer_variants.json")
    path.write_text(json.dumps(oracle, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    print(main(sys.argv[1]))
