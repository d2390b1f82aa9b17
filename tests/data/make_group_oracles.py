"""Write peer_groups.json: the advantages of TRL's and verl's own GRPO, RLOO, ReMax and REINFORCE++ code on small inputs.

    python -m pip download --no-deps -d /tmp/peers trl==1.12 verl==0.9.1
    python tests/data/make_group_oracles.py /tmp/peers

As in make_oracles.py, nothing of the peers is imported and none of their code is kept.
"""

import json
import sys
import types
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from make_oracles import flat, functions, inputs, read, stretch

TRL_FILES = ("trl/trainer/grpo_trainer.py", "trl/trainer/rloo_trainer.py", "trl/trainer/utils.py")
VERL_FILES = ("verl/trainer/ppo/core_algos.py", "verl/utils/torch_functional.py")
VERL_FUNCTIONS = {
    "compute_grpo_outcome_advantage", "compute_rloo_outcome_advantage", "compute_remax_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
}  # fmt: skip


def trl_case(grpo, rloo, utils, seed):
    """Run TRL's stretches from rewards to advantages; groups of one size, one after the other, as TRL has them."""
    lengths, n, beta = [4, 1, 6, 3, 2, 5], 3, 0.1
    mask, x, scores = inputs(lengths, seed)
    space = functions(utils, {"nanstd"}, {"torch": torch})
    space |= {"num_generations": n, "gather": lambda kl: kl, "completion_mask": mask.double()}
    space |= {"old_per_token_logps": x["old_log_probs"], "ref_per_token_logps": x["ref_log_probs"]}
    expected = {}
    for scale in ("group", "batch", "none"):
        here = space | {"rewards": scores, "self": types.SimpleNamespace(scale_rewards=scale)}
        last = "advantages = advantages / (std"
        exec(stretch(grpo, "mean_grouped_rewards = torch.nanmean(", last), here)
        expected[f"grpo_{scale}"] = here["advantages"].tolist()
    here = space | {"rewards": scores, "self": types.SimpleNamespace(beta=beta)}
    exec(stretch(rloo, "# Include the KL penalty in the reward", "advantages = rewards - baselines"), here)
    expected["rloo"] = here["advantages"].tolist()
    options = {"epsilon": 1e-4, "kl_coef": beta}
    return {"options": options, "lengths": lengths, "group": [0, 0, 0, 1, 1, 1], "scores": scores.tolist(), "expected": expected,
            **{name: flat(x[name], mask) for name in ("old_log_probs", "ref_log_probs")}}  # fmt: skip


def verl_case(core, helpers, seed):
    """Run verl's functions; groups of several sizes, out of order. Groups of one are left out: there verl differs."""
    lengths, group = [4, 1, 6, 3, 2, 5, 3], [7, 2, 7, 2, 7, 2, 2]
    options = {"epsilon": 1e-6, "gamma": 0.97, "kl_coef": 0.1}
    mask, x, scores = inputs(lengths, seed)
    real = mask.double()
    tools = types.SimpleNamespace(
        **functions(helpers, {"masked_sum", "masked_mean", "masked_var", "masked_whiten"}, {"torch": torch})
    )
    space = {"torch": torch, "np": np, "verl_F": tools, "defaultdict": defaultdict, "Optional": None}
    functions(core, VERL_FUNCTIONS, space)
    last = torch.tensor(lengths) - 1
    plain = torch.zeros_like(real)
    plain[torch.arange(len(lengths)), last] = scores
    with_kl = plain - options["kl_coef"] * (x["old_log_probs"] - x["ref_log_probs"]) * real
    baselines = torch.tensor(np.round(np.random.default_rng(seed + 1).normal(0, 2, len(lengths)), 6))
    config, index = types.SimpleNamespace(gamma=options["gamma"]), np.array(group)
    expected = {}
    for name, by_std in (("grpo_group", True), ("grpo_none", False)):
        made, _ = space["compute_grpo_outcome_advantage"](plain, real, index, norm_adv_by_std_in_grpo=by_std)
        expected[name] = flat(made, mask)
    expected["rloo"] = flat(space["compute_rloo_outcome_advantage"](with_kl, real, index)[0], mask)
    expected["remax"] = flat(space["compute_remax_outcome_advantage"](with_kl, baselines, real)[0], mask)
    made, returns = space["compute_reinforce_plus_plus_outcome_advantage"](with_kl, real, config=config)
    expected |= {"reinforce_pp": flat(made, mask), "reinforce_pp_returns": flat(returns, mask)}
    return {"options": options, "lengths": lengths, "group": group, "scores": scores.tolist(),
            "baseline_scores": baselines.tolist(), "expected": expected,
            **{name: flat(x[name], mask) for name in ("old_log_probs", "ref_log_probs")}}  # fmt: skip


def main(folder):
    trl, verl = ([read(folder, name, file) for file in files] for name, files in (("trl", TRL_FILES), ("verl", VERL_FILES)))
    oracle = {
        "origin": "tests/data/make_group_oracles.py; numbers only, computed by the files named here",
        "trl_origin": [origin for _, origin in trl],
        "verl_origin": [origin for _, origin in verl],
        "trl": trl_case(*[text for text, _ in trl], seed=4),
        "verl": verl_case(*[text for text, _ in verl], seed=5),
    }
    path = Path(__file__).with_name("peer_groups.json")
    path.write_text(json.dumps(oracle, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    print(main(sys.argv[1]))
