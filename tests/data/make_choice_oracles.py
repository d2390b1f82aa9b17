"""Write peer_choices.json: what TRL's and verl's own code does where they differ from hfsdk's defaults, and their TIS weights.

    python -m pip download --no-deps -d /tmp/peers trl==1.12 verl==0.9.1
    python tests/data/make_choice_oracles.py /tmp/peers

As in make_oracles.py, nothing of the peers is imported and none of their code is kept.
"""

import json
import math
import sys
import types
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from make_oracles import flat, functions, inputs, read, stretch

VERL_FILES = (
    "verl/trainer/ppo/core_algos.py", "verl/utils/torch_functional.py", "verl/trainer/ppo/rollout_corr_helper.py",
)  # fmt: skip
TRL_FILES = ("trl/trainer/grpo_trainer.py",)
FAR = [-45.0, -25.0, -12.0, -1.0, 0.0, 1.0, 12.0]
"""New minus old log-probs (or policy minus reference); verl cuts at -20 and 20, and k3 at 10."""


def verl_space(core, helpers):
    masked = {"masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"}
    tools = types.SimpleNamespace(**functions(helpers, masked, {"torch": torch}))
    space = {"torch": torch, "np": np, "verl_F": tools, "Optional": None, "defaultdict": defaultdict}
    names = {"kl_penalty", "kl_penalty_forward", "compute_policy_loss", "agg_loss", "compute_grpo_outcome_advantage"}
    return functions(core, names | {"compute_rloo_outcome_advantage"}, space)


def verl_far(space):
    """Ratios and k3 of policies far apart: one row, advantages of both signs."""
    mask = torch.ones(1, len(FAR), dtype=torch.double)
    old = torch.full((1, len(FAR)), -50.0, dtype=torch.double)
    log_probs = (old + torch.tensor([FAR], dtype=torch.double)).requires_grad_()
    here = space | {"agg_loss": lambda loss_mat, loss_mask, **_: loss_mat}
    policy = functions(here["_core"], {"compute_policy_loss"}, here)["compute_policy_loss"]
    losses = {}
    for sign in (1, -1):
        clip = {"cliprange": 0.2, "cliprange_low": 0.2, "cliprange_high": 0.2, "clip_ratio_c": 1e12}
        loss, *_ = policy(old, log_probs, sign * mask, mask, **clip)
        losses[str(sign)] = {"loss": loss[0].tolist(), "gradient": torch.autograd.grad(loss.sum(), log_probs)[0][0].tolist()}
    estimate = space["kl_penalty"](log_probs, old, "k3")
    k3 = {"value": estimate[0].tolist(), "gradient": torch.autograd.grad(estimate.sum(), log_probs)[0][0].tolist()}
    return {"log_ratio": FAR, "policy": losses, "k3": k3}


def verl_alone(space):
    """Advantages where one group has one response."""
    lengths, group, scores = [2, 1, 3], [0, 1, 0], torch.tensor([1.0, -0.7, 3.0], dtype=torch.double)
    mask = torch.arange(3)[None, :] < torch.tensor(lengths)[:, None]
    rewards = torch.zeros(3, 3, dtype=torch.double)
    rewards[torch.arange(3), torch.tensor(lengths) - 1] = scores
    found = {}
    for name, more in (("grpo", {}), ("rloo", {})):
        made, _ = space[f"compute_{name}_outcome_advantage"](rewards, mask.double(), np.array(group), **more)
        found[name] = [row[0].item() for row in made]
    return {"scores": scores.tolist(), "group": group, "lengths": lengths, "expected": found}


def verl_empty(space):
    """Sequence means where one response is empty."""
    lengths, loss = [2, 0, 3], torch.tensor([[1.0, 3.0, 0.0], [0.0, 0.0, 0.0], [2.0, 4.0, 9.0]], dtype=torch.double)
    mask = (torch.arange(3)[None, :] < torch.tensor(lengths)[:, None]).double()
    modes = {"sequence_mean": "seq-mean-token-mean", "sequence_sum": "seq-mean-token-sum"}
    expected = {ours: float(space["agg_loss"](loss, mask, theirs)) for ours, theirs in modes.items()}
    return {"lengths": lengths, "loss": loss[mask.bool()].tolist(), "expected": expected}


def sampled(seed):
    """Trainer's and rollout's log-probs of ragged rows, some far enough apart to be cut."""
    mask, x, _ = inputs([4, 1, 6, 3], seed)
    return mask, x["old_log_probs"], torch.where(mask, x["old_log_probs"] - 1.5 * (x["log_probs"] - x["old_log_probs"]), 0.0)


def tis(trl, correction, space, cap):
    """Weights by TRL's stretch and by verl's function, of the same log-probs."""
    mask, old, rollout = sampled(6)
    options = types.SimpleNamespace(
        use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None, vllm_importance_sampling_clip_max=cap,
    )  # fmt: skip
    here = {"torch": torch, "math": math, "self": options, "mask": mask.double(),
            "old_per_token_logps": old, "sampling_per_token_logps": rollout}  # fmt: skip
    first = "per_token_logps_diff = (old_per_token_logps - sampling_per_token_logps) * mask"
    exec(stretch(trl, first, "elif self.vllm_importance_sampling_mode in") + "\n    pass", here)
    theirs = {"torch": torch, "Any": None, "Optional": None, "verl_F": space["verl_F"], "SAFETY_BOUND": 20.0,
              "compute_is_metrics": lambda **_: {}}  # fmt: skip
    functions(correction, {"compute_rollout_correction_weights", "_parse_rollout_is_threshold"}, theirs)
    weights, _ = theirs["compute_rollout_correction_weights"](old - rollout, mask.double(), "token", cap)
    return {"cap": cap, "lengths": mask.sum(1).tolist(), "old_log_probs": flat(old, mask), "rollout_log_probs": flat(rollout, mask),
            "expected": {"trl": flat(here["vllm_importance_sampling_ratio"], mask), "verl": flat(weights, mask)}}  # fmt: skip


def main(folder):
    ((trl, trl_origin),) = (read(folder, "trl", file) for file in TRL_FILES)
    (core, core_origin), (helpers, helpers_origin), (correction, correction_origin) = (
        read(folder, "verl", file) for file in VERL_FILES
    )
    space = verl_space(core, helpers) | {"_core": core}
    oracle = {
        "origin": "tests/data/make_choice_oracles.py; numbers only, computed by the files named here",
        "trl_origin": [trl_origin],
        "verl_origin": [core_origin, helpers_origin, correction_origin],
        "far": verl_far(space),
        "alone": verl_alone(space),
        "empty": verl_empty(space),
        "tis": tis(trl, correction, space, 2.0),
    }
    path = Path(__file__).with_name("peer_choices.json")
    path.write_text(json.dumps(oracle, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    print(main(sys.argv[1]))
