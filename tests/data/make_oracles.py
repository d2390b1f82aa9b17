"""Write peer_ppo.json: what TRL's and verl's own PPO code returns on small inputs; the tests compare hfsdk with it.

    python -m pip download --no-deps -d /tmp/peers trl==1.12 verl==0.9.1
    python tests/data/make_oracles.py /tmp/peers

Nothing of the peers is imported (their packages need much that is not wanted here) and none of their code is kept:
their functions, and the stretches of TRL's training loop that hold its PPO formulas, are cut out of the wheels and
executed.
"""

import ast
import hashlib
import json
import sys
import textwrap
import types
import zipfile
from pathlib import Path

import numpy as np
import torch

TRL_FILE = "trl/experimental/ppo/ppo_trainer.py"
VERL_FILES = ("verl/trainer/ppo/core_algos.py", "verl/utils/torch_functional.py")


def read(folder, name, member):
    wheel = next(Path(folder).glob(f"{name}-*.whl"))
    text = zipfile.ZipFile(wheel).read(member).decode()
    return text, {"wheel": wheel.name, "file": member, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def functions(source, names, namespace):
    """Execute some functions of a module, without their decorators and annotations, in ``namespace``."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list, node.returns = [], None
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                argument.annotation = None
            exec(compile(ast.fix_missing_locations(ast.Module([node], [])), node.name, "exec"), namespace)
    return namespace


def stretch(source, first, last):
    """Return the lines from the one that contains ``first`` to the next one that starts with ``last``."""
    lines = source.splitlines()
    start = next(i for i, line in enumerate(lines) if first in line)
    stop = next(i for i in range(start, len(lines)) if lines[i].strip().startswith(last))
    return textwrap.dedent("\n".join(lines[start : stop + 1]))


def inputs(lengths, seed):
    """Return ragged inputs as lists, and the same padded: a dict of [N, L] tensors in float64."""
    rng = np.random.default_rng(seed)
    num, longest = len(lengths), max(lengths)
    mask = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
    padded = {"old_log_probs": -rng.exponential(1.0, (num, longest))}
    padded["log_probs"] = padded["old_log_probs"] + rng.normal(0, 0.35, (num, longest))
    padded["ref_log_probs"] = padded["old_log_probs"] + rng.normal(0, 0.5, (num, longest))
    padded["values"] = rng.normal(0, 1, (num, longest))
    padded["new_values"] = padded["values"] + rng.normal(0, 0.3, (num, longest))
    padded = {name: torch.tensor(np.round(x, 6)) * mask for name, x in padded.items()}
    scores = torch.tensor(np.round(rng.normal(0, 2, num), 6))
    return mask, padded, scores


def flat(x, mask):
    return x[mask].tolist()


def trl_case(source, lengths, seed, whiten_rewards, kl):
    """Run TRL's "compute rewards .. compute advantages and returns" and its loss on rows of one length.

    Rows are of one length because TRL puts the score of a shorter row on the position after its last token.
    """
    mask, x, scores = inputs(lengths, seed)
    options = {"kl_coef": 0.1, "gamma": 0.99, "lam": 0.9, "cliprange": 0.2, "cliprange_value": 0.15, "vf_coef": 1.0}
    args = types.SimpleNamespace(kl_estimator=kl, whiten_rewards=whiten_rewards, **options)
    last = torch.tensor(lengths) - 1
    space = {
        "torch": torch, "args": args, "scores": scores, "responses": x["values"], "values": x["values"],
        "logprobs": x["old_log_probs"], "ref_logprobs": x["ref_log_probs"], "empty_cache": lambda: None,
        "sequence_lengths": last, "sequence_lengths_p1": last + 1, "padding_mask": ~mask, "padding_mask_p1": ~mask,
        "micro_batch_inds": slice(None), "new_logprobs": x["log_probs"], "vpred": x["new_values"],
    }  # fmt: skip
    functions(source, {"masked_mean", "masked_var", "masked_whiten"}, space)
    exec(stretch(source, "# 4. compute rewards", "advantages = torch.masked_fill"), space)
    space |= {"mb_values": x["values"], "mb_return": space["returns"], "mb_advantage": space["advantages"]}
    space["mb_logprobs"] = x["old_log_probs"]
    exec(stretch(source, "vpredclipped = torch.clamp(", "loss = pg_loss + args.vf_coef"), space)
    exec(stretch(source, "pg_clipfrac = masked_mean(", ")"), space)
    expected = {name: flat(space[name], mask) for name in ("kl", "rewards", "advantages", "returns", "ratio")}
    expected |= {"policy_loss": flat(space["pg_loss_max"], mask), "value_loss": flat(0.5 * space["vf_loss_max"], mask)}
    for name in ("pg_loss", "vf_loss", "vf_clipfrac", "pg_clipfrac"):
        expected[name] = float(space[name])
    return {"options": vars(args), "lengths": lengths, "scores": scores.tolist(), "expected": expected,
            **{name: flat(v, mask) for name, v in x.items()}}  # fmt: skip


def verl_case(core, helpers, lengths, seed):
    """Run verl's functions on rows of several lengths."""
    mask, x, scores = inputs(lengths, seed)
    real = mask.double()
    options = {"kl_coef": 0.1, "gamma": 0.99, "lam": 0.9, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}
    options |= {"value_clip": 0.15, "fixed_length": 7}
    tools = types.SimpleNamespace(
        **functions(helpers, {"masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"}, {"torch": torch})
    )
    space = {"torch": torch, "np": np, "verl_F": tools, "Optional": None}
    names = {
        "kl_penalty",
        "kl_penalty_forward",
        "compute_gae_advantage_return",
        "compute_policy_loss",
        "compute_value_loss",
    }
    functions(core, names | {"agg_loss"}, space)

    log_probs = x["log_probs"].clone().requires_grad_()
    kl, kl_gradient = {}, {}
    for kind in ("k1", "k1+", "k2", "k3", "k3+", "abs"):
        estimate = space["kl_penalty"](log_probs, x["ref_log_probs"], kind)
        kl[kind] = flat(estimate, mask)
        kl_gradient[kind] = flat(torch.autograd.grad(estimate[mask].sum(), log_probs)[0], mask)

    rewards = -options["kl_coef"] * space["kl_penalty"](x["old_log_probs"], x["ref_log_probs"], "k1") * real
    rewards[torch.arange(len(lengths)), torch.tensor(lengths) - 1] += scores
    advantages, returns = space["compute_gae_advantage_return"](rewards, x["values"], real, options["gamma"], options["lam"])

    aggregate, space["agg_loss"] = space["agg_loss"], lambda loss_mat, loss_mask, **_: loss_mat
    clip = {
        "cliprange_low": options["clip_low"],
        "cliprange_high": options["clip_high"],
        "clip_ratio_c": options["dual_clip"],
    }
    policy, clip_fraction, _, dual_fraction = space["compute_policy_loss"](
        x["old_log_probs"], log_probs, advantages * real, real, cliprange=options["clip_low"], **clip
    )
    gradient = torch.autograd.grad(policy[mask].sum(), log_probs)[0]
    value, value_clip_fraction = space["compute_value_loss"](x["new_values"], returns, x["values"], real, options["value_clip"])
    modes = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean", "sequence_sum": "seq-mean-token-sum"}
    losses = {ours: float(aggregate(policy.detach(), real, theirs)) for ours, theirs in modes.items()}
    losses["fixed_length"] = float(
        aggregate(policy.detach(), real, "seq-mean-token-sum-norm", loss_scale_factor=options["fixed_length"])
    )
    expected = {"kl": kl, "kl_gradient": kl_gradient, "rewards": flat(rewards, mask),
                "advantages": flat(advantages, mask), "returns": flat(returns, mask),
                "policy_loss": flat(policy.detach(), mask), "aggregated": losses,
                "policy_gradient": flat(gradient, mask), "clip_fraction": float(clip_fraction),
                "dual_clip_fraction": float(dual_fraction), "value_loss": flat(value, mask),
                "value_clip_fraction": float(value_clip_fraction)}  # fmt: skip
    return {"options": options, "lengths": lengths, "scores": scores.tolist(), "expected": expected,
            **{name: flat(v, mask) for name, v in x.items()}}  # fmt: skip


def main(folder):
    trl, trl_origin = read(folder, "trl", TRL_FILE)
    (core, core_origin), (helpers, helpers_origin) = (read(folder, "verl", file) for file in VERL_FILES)
    oracle = {
        "origin": "tests/data/make_oracles.py; numbers only, computed by the files named here",
        "trl_origin": [trl_origin],
        "verl_origin": [core_origin, helpers_origin],
        "trl": [trl_case(trl, [6] * 4, 0, False, "k1"), trl_case(trl, [5] * 3, 1, True, "k3")],
        "verl": [verl_case(core, helpers, [4, 1, 6, 3], 2), verl_case(core, helpers, [1, 2], 3)],
    }
    path = Path(__file__).with_name("peer_ppo.json")
    path.write_text(json.dumps(oracle, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    print(main(sys.argv[1]))
