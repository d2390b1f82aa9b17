"""The built-in columns of a batch, each declared once: what it holds, of which kind it is, and which call writes it.

Handles, messages, dispatch, simulation and the planner's recorder ask here::

    response        tokens   one token id per response token     written by actor.generate
    values          tokens   one number per response token       written by critic.compute_values
    scores          sample   one number per sample               written by reward.compute_scores

A column of another name is the data's or the user's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["prompt", "token", "sample", "text"]
"""``"prompt"``: a token id per prompt token; ``"token"``: one entry per response token; ``"sample"``: one number per sample;
``"text"``: one text per sample."""


@dataclass(frozen=True)
class BuiltinColumn:
    """A column that hfsdk knows."""

    name: str
    kind: Kind
    dtype: str
    """As it is written, e.g. ``"float32"``."""
    meaning: str
    hint: str = ""
    """What to do where it is missing, for messages."""
    of_response: bool = True
    """Whether it belongs to one response, so that new responses drop it."""
    for_rewards: bool = False
    """Whether a reward function gets it as a keyword argument."""


NEW_LOG_PROBS = "new_log_probs"
"""Name of the log-probabilities under the policy as it is now, where another batch gives them."""

_GENERATE = "Call actor.generate(batch) first."
_PPO = "Call ppo.advantages(batch) first."

COLUMNS: dict[str, BuiltinColumn] = {
    column.name: column
    for column in (
        BuiltinColumn(
            "prompt", "prompt", "int32", "token ids given to the actor", "Take it from session.prompts(...).", of_response=False
        ),
        BuiltinColumn("response", "token", "int32", "token ids the actor produced, end-of-sequence token included", _GENERATE),
        BuiltinColumn(
            "rollout_log_probs", "token", "float32", "log-probability of each response token, from the generating engine", _GENERATE
        ),
        BuiltinColumn(
            "old_log_probs",
            "token",
            "float32",
            "the same from the trainer: the ratio's denominator",
            "Call actor.compute_log_probs(batch) first, or batch.alias('old_log_probs', 'rollout_log_probs').",
        ),
        BuiltinColumn(
            "ref_log_probs",
            "token",
            "float32",
            "the same under the frozen reference",
            "Call reference.compute_log_probs(batch) first.",
        ),
        BuiltinColumn("entropy", "token", "float32", "entropy of the distribution each response token was drawn from, in nats"),
        BuiltinColumn(
            "values", "token", "float32", "critic's value before each response token", "Call critic.compute_values(batch) first."
        ),
        BuiltinColumn(
            "scores", "sample", "float32", "one number per sequence, from the reward", "Call reward.compute_scores(batch) first."
        ),
        BuiltinColumn(
            "token_scores",
            "token",
            "float32",
            "per token: what the reward gave it, where it is a per-token reward; their sum is the score",
            for_rewards=True,
        ),
        BuiltinColumn(
            "baseline_scores",
            "sample",
            "float32",
            "score of the greedy response to the same prompt (ReMax)",
            "Call remax.with_baselines(batch, greedy) first.",
            for_rewards=True,
        ),
        BuiltinColumn("costs", "sample", "float32", "one number per sequence, from the cost model"),
        BuiltinColumn("cost_values", "token", "float32", "cost critic's value before each response token (Safe-RLHF)"),
        BuiltinColumn(
            "cost_returns", "token", "float32", "per token: cost advantage + cost value, the cost critic's target (Safe-RLHF)"
        ),
        BuiltinColumn("cost_advantages", "token", "float32", "per token: how much costlier than expected (Safe-RLHF)"),
        BuiltinColumn(
            "token_costs", "token", "float32", "per token: kl_coef / 2 * KL, with the cost at the last response token (Safe-RLHF)"
        ),
        BuiltinColumn("rewards", "token", "float32", "per token: -kl_coef * KL, with the score at the last response token", _PPO),
        BuiltinColumn(
            "advantages",
            "token",
            "float32",
            "per token: how much better than expected",
            "Call ppo.advantages(batch) first, or that of another algorithm, e.g. grpo.advantages(batch).",
        ),
        BuiltinColumn("returns", "token", "float32", "per token: advantage + value, the critic's target", _PPO),
        BuiltinColumn("kl", "token", "float32", "per token: old log-prob - reference log-prob"),
        BuiltinColumn("group", "sample", "int64", "number of the prompt a response belongs to", for_rewards=True),
        BuiltinColumn("finish_reason", "text", "<U6", "stop or length", for_rewards=True),
        BuiltinColumn("policy_version", "sample", "int64", "optimizer updates the generating weights had seen", for_rewards=True),
        BuiltinColumn(
            "temperature", "sample", "float32", "sampling temperature, used again in every log-prob pass", for_rewards=True
        ),
        BuiltinColumn(
            "position",
            "sample",
            "int64",
            "place of the prompt in the prompt stream; part of the sample's seed",
            of_response=False,
            for_rewards=True,
        ),
    )
}
"""Name -> column."""

PER_TOKEN = frozenset(column.name for column in COLUMNS.values() if column.kind == "token")
"""Columns with one entry per response token."""

OF_RESPONSE = frozenset(column.name for column in COLUMNS.values() if column.of_response)
"""Columns that belong to one response: dropped when new responses are generated."""

NOT_FOR_REWARDS = frozenset(column.name for column in COLUMNS.values() if not column.for_rewards)
"""Columns that a reward function does not get as keyword arguments: it has the texts, and judges no training."""

ENDINGS = ("log_probs", "mask", "ratio")
"""How the user's own columns of one value per response token end, beside the names of the built-in ones."""


def is_per_token(name: str) -> bool:
    """Return whether a column is taken to have one value per response token where its values are not there to look at."""
    return name.endswith((*PER_TOKEN, *ENDINGS))


def dtype_of(name: str) -> str:
    """Return the dtype that a column is written in; ``"float32"`` for one of the user's own."""
    return COLUMNS[name].dtype if name in COLUMNS else "float32"


def hint_for(name: str) -> str:
    """Return what to do where a column is missing, for messages."""
    if name == NEW_LOG_PROBS:
        return "Give new=actor.compute_log_probs(batch), called after an update, or the name of a column."
    known = COLUMNS.get(name)
    return (known.hint if known else "") or "Write it first, e.g. with batch.with_columns(...)."
