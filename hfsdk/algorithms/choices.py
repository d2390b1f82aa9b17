"""Choices of options: their names, and types with their bounds. Needs no torch; ``rlmath`` reads it too."""

from __future__ import annotations

from typing import Annotated

from hfsdk.core.checks import OneOf, Within

LOG_RATIO_CLAMPS = ("above", "both", "none")
"""Bounds at which log-ratios are cut before ``exp``: at +20; at -20 too, and k3 itself at 10 (verl); none (TRL)."""
KL_KINDS = ("k1", "k1+", "k2", "k3", "k3+", "abs")
"""Estimators of the KL divergence; `hfsdk.algorithms.rlmath.kl_estimate` tells them apart."""
KL_KINDS_OF_LOSS = ("k1+", "k2", "k3", "k3+")
"""The kinds of KL that may stand in a loss: the gradients of k1 and abs there are nothing that anybody means."""
KL_KINDS_BY_RATIO = ("k1", "k3")
"""The kinds of KL whose mean, weighed by the ratio, is the KL and has its gradient (DeepSeek-V3.2, arXiv 2512.02556, section
3.1)."""
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")
"""How the engine reduces a per-token loss: the mean over all tokens; over sequences, of their token means; over
sequences, of their token sums; or that divided by ``fixed_length`` (Dr. GRPO, arXiv 2503.20783)."""
DIVERGENCES = ("tv", "kl")
"""Divergences of a token's distribution "this one or another" under two policies: total variation, or the KL (DPPO, arXiv
2602.04879)."""
SCALES = ("group", "batch", "none")
"""Divisors of GRPO's advantages: the standard deviation of the group's scores, of all, or nothing (Dr. GRPO)."""
DPO_KINDS = ("sigmoid", "ipo", "hinge")
"""Losses of the margin: DPO's own, IPO's (arXiv 2310.12036), SLiC's hinge (2305.10425)."""

KL = Annotated[str, OneOf(*KL_KINDS)]
Aggregation = Annotated[str, OneOf(*AGGREGATIONS)]
Clamp = Annotated[str, OneOf(*LOG_RATIO_CLAMPS)]
OldLogProbs = Annotated[str, OneOf("recompute", "rollout")]
Scale = Annotated[str, OneOf(*SCALES)]
TokenShare = Annotated[float, Within(above=0, most=1)]
"""A share of all response tokens."""
Level = Annotated[str, OneOf("token", "sequence", "geometric")]
WeightBounds = Annotated[str, OneOf("truncate", "mask")]
Alone = Annotated[str, OneOf("zero", "score")]
"""The advantage of a group of one response."""
MOST_EPSILON = 0.05
"""Largest ``epsilon`` of GRPO: a larger one is PPO's, which is ``clip`` here."""
Epsilon = Annotated[float, Within(above=0, most=MOST_EPSILON)]
Clip = Annotated[float, Within(above=0, most=1)]
DualClip = Annotated[float, Within(above=1)]
NewTokens = Annotated[int, Within(1, 10**7)]
Copies = Annotated[int, Within(1, 100_000)]
"""Responses per prompt."""
Temperature = Annotated[float, Within(above=0.0, most=2.0)]
Epochs = Annotated[int, Within(1, 1000)]
MiniBatches = Annotated[int, Within(1, 10**6)]
