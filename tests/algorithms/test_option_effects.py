"""Every option of every algorithm, loss and function: what changing it does, and by how much.

Each is changed from its default, one at a time, in a step over made-up samples. The calls, the columns, and loss, gradient and
metrics of every update are then those of the loops in `papers.py`, and others than with the default.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from types import SimpleNamespace

import numpy as np
import papers
import pytest
import torch
from papers import sample, single
from toy import ToyBatch

import hfsdk as hf
import hfsdk.algorithms
from hfsdk.algorithms import (
    clip_cov,
    distillation,
    gdpo,
    gpg,
    grpo,
    kl_cov,
    opo,
    pass_at_k,
    ppo,
    process,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    safe_rlhf,
)
from hfsdk.algorithms.cispo import CISPOLoss
from hfsdk.algorithms.clip_cov import ClipCovLoss
from hfsdk.algorithms.dpo import DPOLoss
from hfsdk.algorithms.dppo import DPPOLoss
from hfsdk.algorithms.gmpo import GMPOLoss
from hfsdk.algorithms.gpg import GPGLoss
from hfsdk.algorithms.gspo import GSPOLoss
from hfsdk.algorithms.kl_cov import KLCovLoss
from hfsdk.algorithms.losses import PolicyLoss, ValueLoss
from hfsdk.algorithms.options import Options
from hfsdk.algorithms.preferences import PretrainingMix
from hfsdk.algorithms.rollout_correction import NormalisedWeights
from hfsdk.algorithms.sapo import SAPOLoss
from hfsdk.core.batch import Batch
from hfsdk.core.errors import OptionError
from hfsdk.core.table import Ragged, Table
from hfsdk.core.unscored import NOT_SCORED
from hfsdk.engine.training.loss import ModelOutput, Tally, TokenBatch, evaluate

NAMES = (
    "PPO", "GRPO", "GSPO", "CISPO", "DAPO", "DrGRPO", "KLCov", "ClipCov", "SAPO", "GMPO", "GPG", "DPPO", "GDPO",
    "PassAtKTraining", "ProcessGRPO", "RLOO", "OPO", "ReMax",
    "ReinforcePlusPlus", "ReinforcePlusPlusBaseline", "Distillation", "SafeRLHF",
)  # fmt: skip
PER_TOKEN = ("PPO", "ReinforcePlusPlus", "ProcessGRPO")
"""Algorithms that take a score of each token's own; the last takes nothing else."""

CHANGES = {
    "max_new_tokens": (3,), "temperature": (0.7,), "n": (5,), "kl_coef": (0.0, 0.3), "kl": ("k1", "k1+", "k2", "k3", "k3+", "abs"),
    "kl_by_ratio": (True,),
    "tis_cap": (1.2,), "tis_floor": (0.9,), "tis_level": ("sequence", "geometric"),
    "tis_bounds": ("mask",), "tis_normalise": (True,), "clip": (0.05,),
    "clip_high": (0.1,), "dual_clip": (1.1,), "entropy_coef": (0.2,),
    "aggregation": ("token_mean", "sequence_mean", "sequence_sum", "fixed_length"), "log_ratio_clamp": ("both", "none"),
    "epochs": (3,), "mini_batches": (4,), "old_log_probs": ("rollout",), "score_clip": (0.4,), "gamma": (0.8,), "lam": (0.5,),
    "whiten": (False,), "whiten_rewards": (True,), "missing_eos_penalty": (1.5,), "kl_in": ("loss",), "value_clip": (0.1, None),
    "scale": ("group", "batch", "none"), "epsilon": (0.05,), "increase_variance": (True,), "filter_groups": (True, False),
    "oversample": (1.0, 3.0), "share": (0.1,), "low": (0.2,), "high": (1.6,), "old_kl_coef": (0.3,), "step_ends": ((3, 5),),
    "tau_pos": (0.5,), "tau_neg": (3.0,), "divergence": ("kl",), "ratio_cap": (0.8,), "parts": (("exact",), ()),
    "weights": ((1.0, 0.2),), "k": (3,), "pass_score": (1.0,),
    "cost_limit": (0.5,), "multiplier_lr": (0.3,), "most_multiplier": (2.0, None), "ptx": ("demonstrations",), "ptx_coef": (16.0,),
    "beta": (0.5,), "kind": ("ipo", "hinge"), "label_smoothing": (0.1,), "sft_coef": (0.7,), "margin": (0.5,), "center": (0.1,),
    "sign_coef": (0.3,), "weight": (0.5,), "buffer": (2,), "penalty": (0.3,),
    "alone": ("score",), "multiplier": (2.0,), "fixed_length": (5,), "values": ("cost_values",), "returns": ("cost_returns",),
}  # fmt: skip
"""Other values of an option than its default; which of them that is, is passed over."""

BESIDE = {
    "kl": {"kl_coef": 0.3}, "kl_by_ratio": {"kl": "k3", "kl_coef": 0.3, "kl_in": "loss"},
    "tis_floor": {"tis_cap": 1.3}, "tis_level": {"tis_cap": 1.3}, "tis_bounds": {"tis_cap": 1.3},
    "tis_normalise": {"tis_cap": 1.3},
    "epsilon": {"scale": "group"}, "low": {"share": 0.5}, "high": {"share": 0.5}, "ptx_coef": {"ptx": "demonstrations"},
    "kl_in": {"kl": "k3", "kl_coef": 0.3}, "fixed_length": {"aggregation": "fixed_length", "fixed_length": 7},
}  # fmt: skip
"""What the option takes to be of any effect, set in the default's run as well."""

BASE = {name: {"n": 4} for name in ("PPO", "ReMax", "ReinforcePlusPlus", "Distillation", "SafeRLHF")} | {
    "ReinforcePlusPlusBaseline": {"kl": "k3"}, "CISPOLoss": {"clip": 1.0}, "GDPO": {"parts": ("exact", "brief")},
}  # fmt: skip
"""Beside every option of a class: several responses, of which some ended by themselves; where it is far, a KL and a weight that are
not bounded before."""

REFUSED = {
    **{(name, "kl"): ("k1", "abs") for name in papers.KL_IN_LOSS}, ("Distillation", "kl_coef"): (0.0,),
    ("DAPO", "filter_groups"): (False,), ("CISPO", "dual_clip"): (1.1,), ("KLCov", "dual_clip"): (1.1,),
    ("KLCov", "clip_high"): (0.1,),
    **{(name, "dual_clip"): (1.1,) for name in ("SAPO", "GMPO", "GPG", "DPPO")}, ("SAPO", "clip_high"): (0.1,),
    ("GPG", "clip_high"): (0.1,), ("GPG", "filter_groups"): (True,), ("PassAtKTraining", "scale"): ("batch",),
    ("PassAtKTraining", "increase_variance"): (True,),
}  # fmt: skip
"""Values that the algorithm refuses."""
NO_PART = {("KLCov", "clip"), ("SAPO", "clip"), ("GPG", "clip"), ("GPG", "log_ratio_clamp")}
"""Options that an algorithm inherits and that its documentation says have no part in it."""
CALLS_ALONE = ("temperature", "epochs", "mini_batches", "cost_limit", "multiplier_lr", "most_multiplier")
"""Options that reach a call and change no number before it."""
FAR = ("log_ratio_clamp",)
"""Options that count where the policy has moved far."""
TIE = {(name, "log_ratio_clamp", "none") for name in ("CISPO", "SAPO")}
"""Values without effect: CISPO's weights are clipped, SAPO's gate is shut below where the ratio is cut."""


def is_tie(name, option, value, in_reward=False):
    """Return whether a value has no effect by the paper; in a reward, which has no gradient, k1+ is k1."""
    return (name, option, value) in TIE or (value == "k1+" and (in_reward or name not in papers.KL_IN_LOSS))


RTOL = 2e-4
"""Columns, and PPO's advantages, are of float32."""


class Models:
    """Handles whose answers are those of `papers.sample`, and which write down what they are asked and what they are to learn."""

    def __init__(self, per_token=False, far=False, parts=False):
        self.parts = parts
        self.made = {"per_token": per_token, "far": far}
        self.calls, self.updates = [], []
        self.actor = SimpleNamespace(
            generate=self.generate, compute_log_probs=self.column("actor", "old_log_probs", "old"), update=self.update("actor"),
            compute_loss=self.compute_loss, spec=None,
        )  # fmt: skip
        self.reference = SimpleNamespace(compute_log_probs=self.column("reference", "ref_log_probs", "ref"), spec=None)
        self.critic = SimpleNamespace(compute_values=self.column("critic", "values", "values"), update=self.update("critic"))
        self.cost_critic = SimpleNamespace(
            compute_values=self.column("cost_critic", "values", "cost_values"), update=self.update("cost_critic")
        )
        self.reward = SimpleNamespace(compute_scores=self.scores)
        self.cost = SimpleNamespace(compute_costs=self.costs, multiplier=papers.MULTIPLIER, adapt_multiplier=self.adapt)

    def samples(self, batch):
        return [sample(int(key) // 1000, int(key) % 1000, int(most), **self.made)
                for key, most in zip(batch["key"], batch["longest"], strict=True)]  # fmt: skip

    def generate(self, prompts, *, max_new_tokens, temperature, n=1):
        self.calls.append(("actor.generate", {"max_new_tokens": max_new_tokens, "temperature": temperature, "n": n}))
        rows = np.repeat(np.arange(len(prompts)), n)
        places = np.tile(np.arange(n), len(prompts)) if temperature else np.full(len(rows), papers.GREEDY)
        key = 1000 * np.asarray(prompts["number"])[rows] + places
        asked = ToyBatch(Table({"key": key, "longest": np.full(len(rows), max_new_tokens)}))
        made = self.samples(asked)
        return prompts.take(rows).plus(
            key=key, longest=asked["longest"], group=rows, response=Ragged.of([s.response for s in made], np.int32),
            rollout_log_probs=floats([s.rollout for s in made]), finish_reason=np.where([s.ended for s in made], "stop", "length"),
        )  # fmt: skip

    def column(self, role, name, field):
        def run(batch):
            self.calls.append((f"{role}.{name}", {}))
            return batch.plus(**{name: floats([getattr(s, field) for s in self.samples(batch)])})

        return run

    def scores(self, batch):
        self.calls.append(("reward.scores", {}))
        made = self.samples(batch)
        scored = batch.plus(scores=np.float32([s.score for s in made]), **(parts_of(made) if self.parts else {}))
        return scored.plus(token_scores=floats([s.token_scores for s in made])) if self.made["per_token"] else scored

    def costs(self, batch):
        self.calls.append(("cost.costs", {}))
        return batch.plus(costs=np.float32([s.cost for s in self.samples(batch)]))

    def adapt(self, batch, *, limit, lr, most):
        self.calls.append(("cost.adapt", {"limit": limit, "lr": lr, "most": most}))
        return 0.9

    def compute_loss(self, batch, loss):
        self.calls.append(("actor.compute_loss", {}))
        return SimpleNamespace(value=self.evaluated("actor", batch, loss)["loss"])

    def update(self, role):
        def run(batch, loss, **how):
            self.calls.append((f"{role}.update", how))
            self.updates.append({"role": role, "keys": list(batch["key"]), **self.evaluated(role, batch, loss)})

        return run

    def evaluated(self, role, batch, loss):
        """Return loss, gradients and metrics of the whole batch, as the engine takes them."""
        made = self.samples(batch)
        rows = Table({name: batch.rows[name] for name in ("response", *getattr(loss, "reads", ()))})
        b = TokenBatch(rows, num_tokens=sum(map(len, made)), num_rows=len(made))
        if role == "actor":
            log_probs, entropy = (tensor([x for s in made for x in getattr(s, name)]) for name in ("new", "entropy"))
            return measured(loss, ModelOutput(log_probs=log_probs, entropy=entropy), b, (log_probs, entropy))
        values = tensor([x for s in made for x in (s.new_values if role == "critic" else s.new_cost_values)])
        return measured(loss, ModelOutput(values=values), b, (values,))


def parts_of(samples):
    return {f"scores_of_{name}": np.float32([s.parts[name] for s in samples]) for name in samples[0].parts}


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float32, requires_grad=True)


def floats(rows):
    return Ragged.from_lengths(np.float32([x for row in rows for x in row]), [len(row) for row in rows])


def measured(loss, out, b, inputs):
    tally = Tally()
    total = evaluate(loss, out, b, tally)
    gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    gradients = [np.zeros(len(x)) if g is None else g.double().numpy() for g, x in zip(gradients, inputs, strict=True)]
    return {"loss": total.item(), "gradients": gradients, "metrics": tally.metrics(), "tokens": each_token(loss, out, b)}


def each_token(loss, out, b):
    """Return the loss before it is averaged."""
    found = loss(out, b)
    return (found[0] if isinstance(found, tuple) else found).detach().double().numpy()


# -- the step as the papers have it


def wanted_step(name, o, per_token, far):
    """Return calls, columns and updates of a step, from `papers` alone."""
    make = {"longest": o["max_new_tokens"], "per_token": per_token, "far": far}
    sampling = {"max_new_tokens": o["max_new_tokens"], "temperature": o["temperature"], "n": o["n"]}
    groups = [[sample(number, place, **make) for place in range(o["n"])] for number in range(papers.PROMPTS)]
    teaches = [len({s.score for s in group}) > 1 for group in groups]
    calls, drawn = [("actor.generate", sampling)], papers.PROMPTS
    greedy = {number: sample(number, papers.GREEDY, **make).score for number in range(papers.PROMPTS)}
    if name == "ReMax":
        calls.append(("actor.generate", {"max_new_tokens": o["max_new_tokens"], "temperature": 0.0, "n": 1}))
    if name == "DAPO":
        calls, drawn, wanted = [], 0, math.ceil(papers.PROMPTS / o["oversample"])
        while (lacking := wanted - sum(teaches[:drawn])) > 0 and drawn < papers.PROMPTS:
            drawn = min(drawn + lacking, papers.PROMPTS)
            calls += [("actor.generate", sampling), ("reward.scores", {})]
    samples = [s for group in groups[:drawn] for s in group]
    calls += [("actor.old_log_probs", {})] * (o["old_log_probs"] == "recompute") + [("reference.ref_log_probs", {})]
    calls += [("cost_critic.values", {})] * (name == "SafeRLHF") + [("critic.values", {})] * (name in ("PPO", "SafeRLHF"))
    calls += [("reward.scores", {})] * {"DAPO": 0, "Distillation": 0, "ReMax": 2}.get(name, 1)
    calls += [("cost.costs", {})] * (name == "SafeRLHF")
    in_loss = name in papers.KL_IN_LOSS or (name == "PPO" and o["kl_in"] == "loss")
    of_batch = {**o, "kl_coef": 0.0} if in_loss else o
    columns = papers.advantages(name, of_batch, samples, greedy=greedy, per_token=per_token)
    if name in ("GDPO", "PassAtKTraining"):  # one score of all is not what teaches nothing
        rows = columns["advantages"]
        teaches = [any(abs(x) > 1e-12 for s, row in zip(samples, rows, strict=True) for x in row if s.number == k)
                   for k in range(papers.PROMPTS)]  # fmt: skip
    trained = [i for i, s in enumerate(samples) if not o.get("filter_groups") or teaches[s.number]]
    how = {"epochs": o["epochs"], "mini_batches": o["mini_batches"]}
    if o.get("filter_groups"):
        how["mini_batches"] = min(o["mini_batches"], len(trained))
    of_loss = {**o, "kl_coef": o["kl_coef"] if in_loss else 0.0}
    updates = []
    if name == "SafeRLHF":
        updates.append(wanted_values("cost_critic", o["value_clip"], samples, columns["cost_returns"]))
    if name in ("PPO", "SafeRLHF"):
        updates.append(wanted_values("critic", o["value_clip"], samples, columns["returns"]))
    calls += [(f"{update['role']}.update", how) for update in updates] + [("actor.update", how)]
    updates.append(SimpleNamespace(of_loss=of_loss, trained=trained, samples=samples, columns=columns))
    if o.get("ptx") is not None:
        calls += [("actor.compute_loss", {}), ("actor.update", {})]
        updates.append(wanted_cross_entropy(o["ptx_coef"], "token_mean", demonstrations(far)[1]))
    if name == "SafeRLHF":
        calls.append(("cost.adapt", {"limit": o["cost_limit"], "lr": o["multiplier_lr"], "most": o["most_multiplier"]}))
    return calls, samples, columns, updates


def wanted_policy(name, o, samples, columns, fixed_length=papers.LONGEST):
    """Return loss, gradients and metrics of an update of the policy; ``o["kl_coef"]`` is that of the loss."""
    tokens, weigh = papers.tokens_of(samples, o, columns), papers.weights(o["aggregation"], samples, fixed_length)
    each = [papers.policy_loss(name, o, token.new, token) for token in tokens]
    slopes = [papers.slope(lambda at, t=token: papers.policy_loss(name, o, at, t), token.new) for token in tokens]
    return {
        "role": "actor", "keys": [s.key for s in samples], "tokens": each, "loss": weighed(weigh, each),
        "gradients": [[w * x for w, x in zip(weigh, slopes, strict=True)], [-o["entropy_coef"] * w for w in weigh]],
        "metrics": papers.policy_metrics(name, o, tokens),
    }  # fmt: skip


def weighed(weigh, each):
    return sum(w * x for w, x in zip(weigh, each, strict=True))


def wanted_values(role, clip, samples, returns, aggregation="token_mean", fixed_length=0):
    old, new = (("values", "new_values"), ("cost_values", "new_cost_values"))[role == "cost_critic"]
    tokens = [(v, getattr(s, old)[t], returns[i][t]) for i, s in enumerate(samples) for t, v in enumerate(getattr(s, new))]
    weigh = papers.weights(aggregation, samples, fixed_length)
    each, cut = zip(*(papers.value_loss(clip, *token) for token in tokens), strict=True)
    slopes = [papers.slope(lambda at, t=token: papers.value_loss(clip, at, *t[1:])[0], token[0]) for token in tokens]
    mean = papers.mean
    return {
        "role": role, "keys": [s.key for s in samples], "tokens": each, "loss": weighed(weigh, each),
        "gradients": [[w * x for w, x in zip(weigh, slopes, strict=True)]],
        "metrics": {"value_loss": mean(each), "value_clip_fraction": mean(cut), "value_mean": mean([v for v, *_ in tokens])},
    }  # fmt: skip


def wanted_cross_entropy(weight, aggregation, samples):
    weigh, nll = papers.weights(aggregation, samples, 0), [-x for s in samples for x in s.new]
    return {
        "role": "actor", "keys": [s.key for s in samples], "tokens": [weight * x for x in nll],
        "loss": sum(weight * w * x for w, x in zip(weigh, nll, strict=True)),
        "gradients": [[-weight * w for w in weigh], [0.0] * len(nll)],
        "metrics": {"nll": papers.mean(nll), "entropy": papers.mean([x for s in samples for x in s.entropy])},
    }  # fmt: skip


def demonstrations(far=False):
    samples = [sample(8, place, far=far) for place in range(4)]
    columns = {"key": np.array([s.key for s in samples]), "longest": np.full(4, papers.LONGEST)}
    return ToyBatch(Table({**columns, "response": Ragged.of([s.response for s in samples], np.int32)})), samples


# -- the comparison


def run(name, options, per_token=False, far=False):
    """Take a step and return what it left, checked against the papers' as far as it goes."""
    given = {**options, "ptx": iter([demonstrations(far)[0]])} if options.get("ptx") else options
    algorithm, models = getattr(hf, name)(**given), Models(per_token, far, name == "GDPO")
    prompts = ToyBatch(Table({"prompt": Ragged.of([[1]] * papers.PROMPTS), "number": np.arange(papers.PROMPTS)}))
    step = algorithm.step(models, prompts)
    o = {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)}
    calls, samples, columns, updates = wanted_step(name, o, per_token, far)
    faults = [] if models.calls == calls else [f"calls {models.calls}, wanted {calls}"]
    if list(step.batch["key"]) != [s.key for s in samples]:
        return step, models, [*faults, f"samples {list(step.batch['key'])}"]
    names = {column for column in step.batch.columns if not column.startswith("scores_of_")} - {*COLUMNS_OF_MODELS}
    if "covariance_mask" in names:
        names -= {"covariance_mask"}
        columns["covariance_mask"] = [row.tolist() for row in step.batch["covariance_mask"]]
        faults += wrong_marks(name, o, samples, columns)
    wanted_names = {*columns} - {"covariance_mask"}
    faults += [f"columns {sorted(names)}, wanted {sorted(wanted_names)}"] * (names != wanted_names)
    for column in names & {*columns}:
        faults += apart(column, step.batch[column].flat, [x for row in columns[column] for x in row], far)
    for found, wanted in zip(models.updates, updates, strict=True):
        if isinstance(wanted, SimpleNamespace):
            some = [wanted.samples[i] for i in wanted.trained]
            cut = {column: [rows[i] for i in wanted.trained] for column, rows in wanted.columns.items()}
            wanted = wanted_policy(name, wanted.of_loss, some, cut, o["max_new_tokens"])
        faults += wrong_update(found, wanted, far)
    return step, models, faults


COLUMNS_OF_MODELS = (
    "prompt", "number", "key", "longest", "group", "response", "rollout_log_probs", "finish_reason", "old_log_probs",
    "ref_log_probs", "values", "cost_values", "scores", "token_scores", "costs", "baseline_scores",
)  # fmt: skip


def wrong_update(found, wanted, far):
    faults = [] if (found["role"], found["keys"]) == (wanted["role"], wanted["keys"]) else [f"update of {found['keys']}"]
    faults += apart("loss per token", found["tokens"], wanted["tokens"], far)
    faults += apart("loss", [found["loss"]], [wanted["loss"]], far)
    if not far:  # where a ratio is e^22 the loops' differences have no digits left
        for one, other in zip(found["gradients"], wanted["gradients"], strict=True):
            faults += apart("gradient", one, other, far)
        faults += [f"metrics {sorted(found['metrics'])}"] * (found["metrics"].keys() != wanted["metrics"].keys())
        for metric in found["metrics"].keys() & wanted["metrics"].keys():
            faults += apart(metric, [found["metrics"][metric]], [wanted["metrics"][metric]], far)
    return [f"{wanted['role']}: {fault}" for fault in faults]


def apart(what, found, wanted, far):
    found, wanted = np.asarray(found, float), np.asarray(wanted, float)
    if found.shape == wanted.shape and np.allclose(found, wanted, rtol=1e-3 if far else RTOL, atol=1e-14 if far else 2e-6):
        return []
    worst = int(np.abs(found - wanted).argmax()) if found.shape == wanted.shape else 0
    return [f"{what} is {found[worst : worst + 1]} where the paper has {wanted[worst : worst + 1]}"]


def wrong_marks(name, o, samples, columns):
    """Check what is marked: of KL-Cov the tokens of the largest covariance, of Clip-Cov so many of those within the bounds."""
    marked = [x for row in columns["covariance_mask"] for x in row]
    found = papers.covariances(samples, o, columns["advantages"])
    count = max(1, int(o["share"] * len(found)))
    if name == "KLCov":
        lowest = sorted(found)[-count]
        wanted = [float(x >= lowest) for x in found]
        return [] if marked == wanted else [f"marked {marked}, wanted {wanted}"]
    may = [o["low"] < x < o["high"] for x in found]
    right = sum(marked) == min(count, sum(may)) and not any(m and not ok for m, ok in zip(marked, may, strict=True))
    return [] if right else [f"marked {sum(marked)} of {sum(may)}, wanted {count}"]


def numbers_of(step, models):
    """Return what a step left besides its calls, to tell two apart."""
    columns = {name: step.batch[name].flat.tobytes() for name in step.batch.columns if isinstance(step.batch[name], Ragged)}
    return columns, [(u["role"], u["keys"], u["tokens"].tobytes(), [g.tobytes() for g in u["gradients"]]) for u in models.updates]


def changes_of(cls, option):
    """Return the values to try of an option and what is set beside it, as far as the class has it."""
    names = {field.name for field in dataclasses.fields(cls)}
    beside = BASE.get(cls.__name__, {}) | {k: v for k, v in BESIDE.get(option, {}).items() if k in names}
    return [v for v in CHANGES[option] if v != beside.get(option, getattr(cls, option, None))], beside


@pytest.mark.parametrize("name", NAMES)
def test_every_option_does_what_the_paper_says_and_does_something(name):
    faults = []
    for per_token in {name in PER_TOKEN, name == "ProcessGRPO"}:
        seen = {}
        for field in dataclasses.fields(getattr(hf, name)):
            values, beside = changes_of(getattr(hf, name), field.name)
            far = field.name in FAR
            told = repr(sorted(beside.items())), far
            if told not in seen:
                step, models, wrong = run(name, beside, per_token, far)
                seen[told] = numbers_of(step, models), models.calls
                faults += [f"{name}({beside}): {fault}" for fault in wrong]
            for value in values:
                if value in REFUSED.get((name, field.name), ()):
                    with pytest.raises(OptionError):
                        getattr(hf, name)(**beside | {field.name: value})
                    continue
                step, models, wrong = run(name, {**beside, field.name: value}, per_token, far)
                faults += [f"{name}({field.name}={value!r}): {fault}" for fault in wrong]
                numbers, calls = seen[told]
                same = numbers_of(step, models) == numbers
                if (name, field.name) in NO_PART:
                    wrong = [] if same and models.calls == calls else ["has a part in it"]
                elif field.name in CALLS_ALONE:
                    wrong = [] if same and models.calls != calls else ["changes numbers, or no call"]
                else:
                    wrong = ["changes nothing"] * (same and not is_tie(name, field.name, value))
                faults += [f"{name}({field.name}={value!r}) {fault}" for fault in wrong]
    assert not faults, "\n".join(faults)


# -- functions over columns and losses by themselves: groups of any size, and what an algorithm does not hand on

FUNCTIONS = {
    "PPO": ppo, "GRPO": grpo, "GPG": gpg, "GDPO": gdpo, "PassAtKTraining": pass_at_k,
    "RLOO": rloo, "OPO": opo, "ReMax": remax, "ReinforcePlusPlus": reinforce_pp,
    "ReinforcePlusPlusBaseline": reinforce_pp_baseline, "Distillation": distillation, "ProcessGRPO": process, "SafeRLHF": safe_rlhf,
}  # fmt: skip
UNEVEN = [(0, 0), (3, 3), (1, 2), (0, 1), (5, 0), (1, 5), (2, 0), (0, 4), (2, 1), (0, 2), (5, 5)]
"""Samples by prompt and place: four, two, two, two of one score, and one alone; one response is empty."""
BASELINES = {0: 0.25, 1: -1.0, 2: 0.5, 3: 2.0, 5: 0.0}


def table_of(samples, per_token):
    scores = {"token_scores": floats([s.token_scores for s in samples])} if per_token else {}
    per_token_columns = {"old_log_probs": "old", "ref_log_probs": "ref", "values": "values", "cost_values": "cost_values"}
    return Table({
        "response": Ragged.of([s.response for s in samples], np.int32), "group": np.array([s.number for s in samples]), **scores,
        **{name: floats([getattr(s, field) for s in samples]) for name, field in per_token_columns.items()},
        "scores": np.float32([s.score for s in samples]), "costs": np.float32([s.cost for s in samples]),
        "baseline_scores": np.float32([BASELINES[s.number] for s in samples]), **parts_of(samples),
        "finish_reason": np.where([s.ended for s in samples], "stop", "length"),
    })  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_option_of_advantages_does_what_the_paper_says(name):
    cls, faults = FUNCTIONS[name].Advantages, []
    required = {
        "SafeRLHF": {"multiplier": papers.MULTIPLIER}, "GDPO": {"parts": ("exact", "brief")},
        "PassAtKTraining": {"k": 2, "pass_score": 1.5},
    }.get(name, {})  # fmt: skip
    for per_token in {name in PER_TOKEN, name == "ProcessGRPO"}:
        samples = [sample(*where, per_token=per_token) for where in UNEVEN]

        def made(options):
            function = cls(**required | options)
            columns = [*function.reads, *(x for x in function.takes if x != "token_scores" or per_token)]  # noqa: B023
            table = table_of(samples, per_token)  # noqa: B023
            found = function(Table({column: table[column] for column in {*columns, "response"}}))
            o = {field.name: getattr(function, field.name) for field in dataclasses.fields(function)}
            wanted = papers.advantages(
                name, o, samples, greedy=BASELINES, per_token=per_token, multiplier=o.get("multiplier")  # noqa: B023
            )  # fmt: skip
            wrong = [f"columns {sorted(found)}"] * (found.keys() != wanted.keys() or {*found} != {*function.writes})
            for column in found.keys() & wanted.keys():
                wrong += apart(column, found[column].flat, [x for row in wanted[column] for x in row], False)
            return {column: values.flat.tobytes() for column, values in found.items()}, wrong

        for field in dataclasses.fields(cls):
            values, beside = changes_of(cls, field.name)
            before, wrong = made(beside)
            faults += [f"{name}({beside}): {fault}" for fault in wrong]
            for value in values:
                if value in REFUSED.get((name, field.name), ()) and name in ("Distillation", "PassAtKTraining"):
                    continue
                after, wrong = made({**beside, field.name: value})
                wrong += ["changes nothing"] * (after == before and not is_tie(name, field.name, value, in_reward=True))
                faults += [f"{name} {field.name}={value!r}: {fault}" for fault in wrong]
    assert not faults, "\n".join(faults)


POLICY_LOSSES = {
    "PPO": PolicyLoss, "GSPO": GSPOLoss, "CISPO": CISPOLoss, "KLCov": KLCovLoss, "ClipCov": ClipCovLoss, "SAPO": SAPOLoss,
    "GMPO": GMPOLoss, "GPG": GPGLoss, "DPPO": DPPOLoss,
}  # fmt: skip
NO_PART_IN_LOSS = {(name, "dual_clip") for name in ("CISPO", "GMPO", "DPPO")} | {
    (name, option) for name in ("KLCov", "SAPO", "GPG") for option in ("clip", "clip_high", "dual_clip")
} | {("GPG", "log_ratio_clamp")}  # fmt: skip


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_option_of_a_policys_loss_does_what_the_paper_says(name):
    cls, faults = POLICY_LOSSES[name], []
    for field in dataclasses.fields(cls):
        far = field.name in FAR
        samples = [sample(number, place, far=far) for number in (0, 1) for place in range(5)]
        advantages = [single(np.random.default_rng([1, s.key]).normal(0, 1, len(s))) for s in samples]
        marks = [[float(t % 2) for t in range(len(s))] for s in samples]
        columns = {"advantages": advantages, "covariance_mask": marks}
        fields = {"old_log_probs": "old", "ref_log_probs": "ref", "rollout_log_probs": "rollout"}
        table = Table({
            "response": Ragged.of([s.response for s in samples], np.int32), **{column: floats(x) for column, x in columns.items()},
            **{column: floats([getattr(s, x) for s in samples]) for column, x in fields.items()},
        })  # fmt: skip

        def made(options):
            loss = cls(**options)
            read = {column: table[column] for column in {"response", *loss.reads} - {"tis_weights"}}  # noqa: B023
            if loss.tis_normalise:
                read["tis_weights"] = floats(normalised(options_of(loss), samples, columns))  # noqa: B023
            b = TokenBatch(
                Table(read),
                num_tokens=sum(map(len, samples)), num_rows=len(samples),  # noqa: B023
            )  # fmt: skip
            log_probs, entropy = (tensor([x for s in samples for x in getattr(s, n)]) for n in ("new", "entropy"))  # noqa: B023
            found = measured(loss, ModelOutput(log_probs=log_probs, entropy=entropy), b, (log_probs, entropy))
            o = {one.name: getattr(loss, one.name) for one in dataclasses.fields(loss)}
            keys = [s.key for s in samples]  # noqa: B023
            wanted = wanted_policy(name, o, samples, columns, loss.fixed_length)  # noqa: B023
            return (
                [found["tokens"].tobytes(), found["loss"], *(g.tobytes() for g in found["gradients"])],
                wrong_update(found | {"role": "actor", "keys": keys}, wanted, far),  # noqa: B023
            )

        values, beside = changes_of(cls, field.name)
        before, wrong = made(beside)
        faults += [f"{name}({beside}): {fault}" for fault in wrong]
        for value in values:
            more = {"fixed_length": 7} if value == "fixed_length" else {}
            after, wrong = made({**beside, **more, field.name: value})
            none = (name, field.name) in NO_PART_IN_LOSS or (name, field.name, value) in TIE
            wrong += ["changes nothing"] * (after == before and not none)
            wrong += ["has a part in it"] * (after != before and (name, field.name) in NO_PART_IN_LOSS)
            faults += [f"{cls.__name__} {field.name}={value!r}: {fault}" for fault in wrong]
    assert not faults, "\n".join(faults)


def faults_of(cls, made, required=None, changes=CHANGES):
    """Change every option of a class; ``made(options)`` gives (what it does, what is wrong with it)."""
    faults, required = [], required or {}
    for field in dataclasses.fields(cls):
        beside = required | BESIDE.get(field.name, {})
        before, wrong = made(beside)
        default = beside.get(field.name, None if field.default is dataclasses.MISSING else field.default)
        for value in (value for value in changes[field.name] if value != default):
            more = {"fixed_length": 7} if value == "fixed_length" else {}
            after, bad = made({**beside, **more, field.name: value})
            wrong += [f"{field.name}={value!r}: {fault}" for fault in bad + ["changes nothing"] * (after == before)]
        faults += [f"{cls.__name__} beside {beside}: {fault}" for fault in wrong]
    return faults


def normalised(o, samples, columns):
    """Return the weights of the rollout's tokens over their mean, by row."""
    each = iter([papers.trust(o, token)[0] for token in papers.tokens_of(samples, o | {"clip": 0.2, "clip_high": None}, columns)])
    return [[next(each) for _ in range(len(s))] for s in samples]


def options_of(one):
    return {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}


def test_every_option_of_the_value_loss_does_what_the_paper_says():
    samples = [sample(number, place) for number in (0, 1) for place in range(5)]
    returns = {"returns": 0, "cost_returns": 1}
    targets = {
        name: [single(np.random.default_rng([k, s.key]).normal(0, 1, len(s))) for s in samples] for name, k in returns.items()
    }
    table = Table({
        "response": Ragged.of([s.response for s in samples], np.int32), "values": floats([s.values for s in samples]),
        "cost_values": floats([s.cost_values for s in samples]), **{name: floats(rows) for name, rows in targets.items()},
    })  # fmt: skip

    def made(options):
        loss = ValueLoss(**options)
        b = TokenBatch(
            Table({name: table[name] for name in ("response", *loss.reads)}), num_tokens=sum(map(len, samples)), num_rows=10
        )  # fmt: skip
        role = {"values": "critic", "cost_values": "cost_critic"}[loss.values]
        values = tensor([x for s in samples for x in (s.new_values if role == "critic" else s.new_cost_values)])
        found = measured(loss, ModelOutput(values=values), b, (values,))
        wanted = wanted_values(role, loss.clip, samples, targets[loss.returns], loss.aggregation, loss.fixed_length)
        found |= {"role": role, "keys": wanted["keys"]}
        return (found["tokens"].tobytes(), found["loss"]), wrong_update(found, wanted, False)

    faults = faults_of(ValueLoss, made)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("cls", [hf.CrossEntropy, PretrainingMix])
def test_every_option_of_cross_entropy_does_what_it_says(cls):
    batch, samples = demonstrations()

    def made(options):
        loss = cls(**options)
        found = Models().evaluated("actor", batch, loss)
        wanted = wanted_cross_entropy(loss.weight, loss.aggregation, samples)
        return found["loss"], wrong_update(found | {"role": "actor", "keys": wanted["keys"]}, wanted, False)

    faults = faults_of(cls, made, changes=CHANGES | {"aggregation": ("sequence_mean", "sequence_sum")})
    assert not faults, "\n".join(faults)


PAIRS = [sample(8, place) for place in range(6)]
CHOSEN = np.tile(np.float32([1, 0]), 3)


def batch_of_pairs(**columns):
    return ToyBatch(Table({
        "key": np.array([s.key for s in PAIRS]), "longest": np.full(6, papers.LONGEST), "chosen": CHOSEN,
        "group": np.repeat(np.arange(3), 2), "response": Ragged.of([s.response for s in PAIRS], np.int32),
        "ref_log_probs": floats([s.ref for s in PAIRS]), **columns,
    }))  # fmt: skip


def preferred(better):
    """Return what is told of pairs, given each response's score."""
    margins = [better[i] - better[i + 1] for i in range(0, 6, 2)]
    right = [1.0 if m > 0 else 0.5 if m == 0 else 0.0 for m in margins]
    each = {"accuracy": right, "margin": margins, "chosen_score": better[0::2], "rejected_score": better[1::2]}
    return {name: papers.mean(numbers) for name, numbers in each.items()}


def dpo_mean(o, log_probs):
    """Return the mean loss of the pairs, given the policy's log-probabilities of all tokens, and every pair's."""
    rows, at = [], 0
    for s in PAIRS:
        rows.append(list(zip(log_probs[at : at + len(s)], s.ref, strict=True)))
        at += len(s)
    each = [papers.dpo(o, *rows[i : i + 2]) for i in range(0, 6, 2)]
    scores = [o["beta"] * sum(a - b for a, b in row) for row in rows]
    return papers.mean(each), each, preferred(scores)


def wrong_pairs(found, mean_of, given):
    """Compare a loss of pairs with ``mean_of(numbers)``: (mean, each pair's, metrics)."""
    mean, each, metrics = mean_of(given)
    moved = [[*given[:i], x, *given[i + 1 :]] for i, x in enumerate(given)]
    slopes = [papers.slope(lambda at, i=i: mean_of([*moved[i][:i], at, *moved[i][i + 1 :]])[0], x) for i, x in enumerate(given)]
    faults = apart("loss", [found["loss"]], [mean], False) + apart("loss per pair", found["tokens"], np.repeat(each, 2), False)
    faults += apart("gradient", found["gradients"][0], slopes, False)
    faults += [f"metrics {sorted(found['metrics'])}"] * (found["metrics"].keys() != metrics.keys())
    for name in found["metrics"].keys() & metrics.keys():
        faults += apart(name, [found["metrics"][name]], [metrics[name]], False)
    return faults


@pytest.mark.parametrize("whole", [True, False], ids=["DPO", "DPOLoss"])
def test_every_option_of_dpo_does_what_the_paper_says(whole):
    given = [x for s in PAIRS for x in s.new]

    def made(options):
        one, models = (hf.DPO if whole else DPOLoss)(**options), Models()
        if whole:
            one.step(models, batch_of_pairs().drop("ref_log_probs"))
            how = {"epochs": one.epochs, "mini_batches": one.mini_batches}
            wrong = [] if models.calls == [("reference.ref_log_probs", {}), ("actor.update", how)] else [f"calls {models.calls}"]
            (found,) = models.updates
        else:
            found, wrong = models.evaluated("actor", batch_of_pairs(), one), []
        wrong += wrong_pairs(found, lambda numbers: dpo_mean(options_of(one), numbers), given)
        return (found["tokens"].tobytes(), models.calls), wrong

    faults = faults_of(hf.DPO if whole else DPOLoss, made)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("cls", [hf.BradleyTerry, hf.CostLoss])
def test_every_option_of_a_preference_loss_does_what_the_paper_says(cls):
    given, signs, margins = [0.4, -0.3, 1.2, 1.5, -0.7, -0.7], [-1.0, 1.0, 1.0, 1.0, -1.0, 1.0], [2.0, 2.0, 0.5, 0.5, 0.0, 0.0]

    def made(options):
        loss, scores = cls(**options), tensor(given)
        columns = batch_of_pairs(sign=np.float32(signs), margin=np.float32(margins)).rows
        table = Table({name: columns[name] for name in ("response", *loss.reads)})
        found = measured(loss, ModelOutput(scores=scores), TokenBatch(table, sum(map(len, PAIRS)), 6), (scores,))

        def mean_of(numbers):
            o, rows = options_of(loss), range(0, 6, 2)
            if cls is hf.BradleyTerry:
                each = [papers.bradley_terry(o, *numbers[i : i + 2], margins[i]) for i in rows]
                return papers.mean(each), each, preferred(numbers)
            each = [papers.cost_loss(o, *numbers[i : i + 2], signs[i : i + 2]) for i in rows]
            right = [float(a * b > 0) for a, b in zip(numbers, signs, strict=True)]
            return papers.mean(each), each, preferred([-x for x in numbers]) | {"sign_accuracy": papers.mean(right)}

        return found["tokens"].tobytes(), wrong_pairs(found, mean_of, given)

    faults = faults_of(cls, made)
    assert not faults, "\n".join(faults)


def test_every_option_of_the_overlong_penalty_does_what_the_paper_says():
    def made(options):
        penalty = hf.OverlongPenalty(**options)
        found = penalty(completion_ids=[[0] * n for n in range(12)])
        return found, apart("penalty", found, [papers.overlong(options_of(penalty), n) for n in range(12)], False)

    faults = faults_of(hf.OverlongPenalty, made, {"max_new_tokens": 8, "buffer": 3})
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("name", "cls"), [("KLCov", kl_cov.Largest), ("ClipCov", clip_cov.DrawnTokens)])
def test_every_option_of_what_is_marked_does_what_the_paper_says(name, cls):
    samples = [sample(number, place) for number in range(6) for place in range(6)]
    advantages = [single(np.random.default_rng([3, s.key]).normal(0, 1, len(s))) for s in samples]
    table = Table({"advantages": floats(advantages), "old_log_probs": floats([s.old for s in samples])})

    def made(options):
        function = cls(**options)
        mask = function(table)["covariance_mask"]
        columns = {"advantages": advantages, "covariance_mask": [row.tolist() for row in mask]}
        return mask.flat.tobytes(), wrong_marks(name, options_of(function), samples, columns)

    faults = faults_of(cls, made)
    assert not faults, "\n".join(faults)


def test_every_option_of_normalised_weights_does_what_it_says():
    """Weights of mean 1 over tokens or responses; a response without tokens has none, one that was not scored no part."""
    samples = [sample(number, place) for number in range(4) for place in range(4)]
    columns = {"advantages": [[0.5] * len(s) for s in samples]}
    table = Table({
        "advantages": floats(columns["advantages"] + [[float(NOT_SCORED)]]),
        "old_log_probs": floats([*(s.old for s in samples), [-1.0]]),
        "rollout_log_probs": floats([*(s.rollout for s in samples), [-9.0]]),
    })  # fmt: skip

    def made(options):
        function = NormalisedWeights(**options)
        found = function(table)["tis_weights"]
        wanted = normalised({**options_of(function), "tis_normalise": True}, samples, columns)
        return found.flat.tobytes(), apart("weights", found.flat[:-1], [x for row in wanted for x in row], False)

    faults = faults_of(NormalisedWeights, made, {"tis_cap": 1.5}, CHANGES | {"tis_normalise": ()})
    assert not faults, "\n".join(faults)
    assert np.isnan(NormalisedWeights(tis_cap=1.5)(table)["tis_weights"].flat[-1])
    nothing = NormalisedWeights(tis_cap=1e-9, tis_bounds="mask")(table)["tis_weights"].flat[:-1]
    assert (nothing == 0).all(), "of weights that are all 0 there is no mean to divide by"


def test_every_option_of_the_metric_pass_at_k_does_what_the_paper_says():
    samples = [sample(number, place) for number in range(6) for place in range(6)]
    rows = {"scores": np.float32([s.score for s in samples]), "group": np.array([s.number for s in samples])}

    def made(options):
        metric = hf.PassAtK(**options)
        found = metric(ToyBatch(Table(rows)))
        wanted = {f"pass_at_{k}": papers.pass_at_k(samples, k, metric.pass_score) for k in metric.k}
        return found, [] if found == pytest.approx(wanted) else [f"{found}, wanted {wanted}"]

    faults = faults_of(hf.PassAtK, made, changes={"k": ((1, 4, 6),), "pass_score": (1.0,)})
    assert not faults, "\n".join(faults)


BASES = {
    "Options", "BatchFunction", "CorrectionOptions", "SurrogateOptions", "SamplingOptions", "KLOptions", "OnPolicy", "KLReward",
    "GAEOptions", "KLRewardFunction", "ShareOptions", "Marks", "MarkedLoss", "AdvantageOptions", "LossOptions", "KLLossOptions",
    "KLCovOptions",
    "ClipCovOptions", "StepOptions", "TemperatureOptions", "DivergenceOptions", "PartOptions", "PassOptions",
}  # fmt: skip
"""Classes that others inherit from, and nobody makes."""


def test_no_class_of_options_and_no_option_is_left_out():
    for module in pkgutil.iter_modules(hfsdk.algorithms.__path__):
        importlib.import_module(f"hfsdk.algorithms.{module.name}")
    found, waiting = set(), [Options]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if cls.__module__.startswith("hfsdk.") and cls.__name__ not in BASES:
            found.add(cls)
    tried = {getattr(hf, name) for name in (*NAMES, "DPO", "BradleyTerry", "CostLoss", "CrossEntropy", "OverlongPenalty")}
    tried |= {module.Advantages for module in FUNCTIONS.values()} | {*POLICY_LOSSES.values()}
    tried |= {ValueLoss, DPOLoss, PretrainingMix, kl_cov.Largest, clip_cov.DrawnTokens, NormalisedWeights, hf.PassAtK}
    assert found == tried
    without = [f"{cls.__name__}.{field.name}" for cls in tried for field in dataclasses.fields(cls) if field.name not in CHANGES]
    assert not without, f"no other value is tried of {without}"


def test_every_option_of_the_multiplier_moves_it_as_the_paper_says(monkeypatch):
    """Safe-RLHF, eq. 10 and appendix B.3, from each value to the next; a sample without a cost has no part in the mean."""
    costs = [1.0, 2.5, -0.5]
    table = Table({"costs": np.append(np.float32(costs), NOT_SCORED)})
    monkeypatch.setattr(Batch, "reduce", lambda batch, function, reads: SimpleNamespace(value=function(table)))
    with hf.Session.simulated("1x4 H200") as session:
        cost = session.cost(lambda completions: [0.0] * len(completions))
        batch = session.batch(prompt=[[1]] * 4, response=[[2]] * 4, costs=[0.0] * 4)
        assert cost.multiplier == 1.0
        for limit, lr, most, before in (
            (0.0, 0.1, 5.0, 1.0), (0.5, 0.1, 5.0, 1.0), (0.0, 0.3, 5.0, 1.0), (0.0, 0.3, 1.2, 1.0), (2.0, 0.3, 5.0, 1.0),
            (0.0, 0.1, 5.0, 3.0), (0.0, 0.9, None, 3.0),
        ):  # fmt: skip
            cost.multiplier = before
            moved = before * math.exp(lr * before * (papers.mean(costs) - limit))
            wanted = moved if most is None else min(moved, most)
            assert cost.adapt_multiplier(batch, limit=limit, lr=lr, most=most) == pytest.approx(wanted), (limit, lr, most, before)
            assert cost.multiplier == pytest.approx(wanted)
