"""The built-in columns of a batch: what each holds, of which kind it is, and who writes it.

Handles, messages, dispatch, simulation, the planner's recorder and pictures ask here::

    response        tokens   one token id per response token     written by actor.generate
    values          tokens   one number per response token       written by critic.compute_values
    scores          sample   one number per sample               written by reward.compute_scores

Those that calls write are declared beside their calls (``methods.py``), those of the data and of algorithms here. A column of
another name is the data's or the user's own.
"""

from __future__ import annotations

from hfsdk.core.arguments import Scoring
from hfsdk.core.builtin import BuiltinColumn
from hfsdk.core.methods import METHODS, method_of

NEW_LOG_PROBS = "new_log_probs"
"""Name of the log-probabilities under the policy as it is now, where another batch gives them."""

_PPO, _SAFE = "ppo.advantages", "safe_rlhf.advantages"
_PROMPTS = "Take it from session.prompts(...)."

OF_DATA = (
    BuiltinColumn("prompt", "prompt", "int32", "token ids given to the actor", "session.prompts", hint=_PROMPTS, of_response=False),
    BuiltinColumn(
        "position",
        "sample",
        "int64",
        "place of the prompt in the prompt stream; part of the sample's seed",
        "session.prompts",
        hint=_PROMPTS,
        of_response=False,
        for_rewards=True,
    ),
)
"""Columns that come with the prompts."""

OF_ALGORITHMS = (
    BuiltinColumn(
        "baseline_scores",
        "sample",
        "float32",
        "score of the greedy response to the same prompt (ReMax)",
        "remax.with_baselines(batch, greedy)",
        for_rewards=True,
    ),
    BuiltinColumn(
        "cost_values",
        "token",
        "float32",
        "cost critic's value before each response token (Safe-RLHF)",
        "cost_critic.compute_values",
        hint="Call cost_critic.compute_values(batch) first, then batch.alias('cost_values', 'values').",
    ),
    BuiltinColumn(
        "cost_returns", "token", "float32", "per token: cost advantage + cost value, the cost critic's target (Safe-RLHF)", _SAFE
    ),
    BuiltinColumn("cost_advantages", "token", "float32", "per token: how much costlier than expected (Safe-RLHF)", _SAFE),
    BuiltinColumn(
        "token_costs",
        "token",
        "float32",
        "per token: kl_coef / 2 * KL, with the cost at the last response token (Safe-RLHF)",
        _SAFE,
    ),
    BuiltinColumn(
        "rewards", "token", "float32", "per token: -kl_coef * KL, with the score at the last response token", _PPO, label="reward"
    ),
    BuiltinColumn(
        "advantages",
        "token",
        "float32",
        "per token: how much better than expected",
        _PPO,
        label="advantage",
        hint="Call ppo.advantages(batch) first, or that of another algorithm, e.g. grpo.advantages(batch).",
    ),
    BuiltinColumn("returns", "token", "float32", "per token: advantage + value, the critic's target", _PPO, label="return"),
    BuiltinColumn(
        "covariance_mask",
        "token",
        "float32",
        "1 on tokens whose log-prob and advantage covary so much that the update holds them (KL-Cov, Clip-Cov)",
        "hf.KLCov().with_advantages(batch)",
    ),
    BuiltinColumn(
        "tis_weights",
        "token",
        "float32",
        "per token: weight of importance sampling from rollout to trainer, over the weights' mean (`tis_normalise`)",
        "hf.GRPO(tis_cap=2.0, tis_normalise=True).weighed(batch)",
    ),
    BuiltinColumn("kl", "token", "float32", "per token: old log-prob - reference log-prob", _PPO),
)
"""Columns that functions of algorithms write."""

COLUMNS: dict[str, BuiltinColumn] = {
    column.name: column
    for column in (*OF_DATA, *(column for method in METHODS.values() for column in method.columns), *OF_ALGORITHMS)
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


def writes_per_token(method: str, column: str) -> bool:
    """Return whether a call writes one value per response token into a column, where its values are not there to look at."""
    if column in COLUMNS:
        return COLUMNS[column].kind == "token"
    kind = method_of(method)
    return kind.arguments is not Scoring and (kind.work == "pass" or is_per_token(column))


def dtype_of(name: str) -> str:
    """Return the dtype that a column is written in; ``"float32"`` for one of the user's own."""
    return COLUMNS[name].dtype if name in COLUMNS else "float32"


def label_of(name: str) -> str:
    """Return a column's name in pictures: its label, else its name."""
    return (COLUMNS[name].label if name in COLUMNS else "") or name


def hint_for(name: str) -> str:
    """Return the advice for a missing column, for messages."""
    if name == NEW_LOG_PROBS:
        return "Give new=actor.compute_log_probs(batch), called after an update, or the name of a column."
    return COLUMNS[name].remedy if name in COLUMNS else "Write it first, e.g. with batch.with_columns(...)."


def column_lines() -> str:
    """Return a line for the docstring of a batch on each column: what it holds, per token or per sample, and who writes it."""
    return "".join(f"\n        {c.name}: {c.meaning}; {c.dtype}, by {c.writer}." for c in COLUMNS.values())
