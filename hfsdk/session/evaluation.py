"""``evaluate``: generate and score without training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hfsdk.algorithms.choices import Copies
from hfsdk.algorithms.pass_rate import pass_rates
from hfsdk.core.checks import Count, Index, NonNegative, checked, shown
from hfsdk.core.errors import OptionError, SimulatedValueError
from hfsdk.core.table import Table
from hfsdk.core.unscored import scored_rows
from hfsdk.models import ReferenceModel, RewardModel
from hfsdk.session.prompts import PromptStream
from hfsdk.session.session_parts import Parts
from hfsdk.session.streams import RowStream

if TYPE_CHECKING:
    import pandas as pd

    from hfsdk.core.batch import Batch


@checked
def evaluate(  # noqa: D417
    parts: Parts,
    prompts: Any,
    *,
    reward: RewardModel | None = None,
    num_prompts: Count = 128,
    max_new_tokens: Count = 32,
    temperature: NonNegative = 1.0,
    seed: int | None = None,
    num_samples: Index = 3,
    n: Copies = 1,
    pass_at: Sequence[Copies] = (),
    pass_score: float = 0.5,
) -> pd.DataFrame:
    """Generate for the first ``num_prompts`` of a stream and score the responses; nothing is trained, nothing advances.

    Args:
        prompts: a stream from :meth:`prompts` (best of held-out data), or data as that takes them, in their order.
        reward: by default the session's.
        num_prompts: at most as many as there are.
        max_new_tokens: longest response, in tokens.
        temperature: of sampling.
        seed: of sampling; by default the session's.
        num_samples: samples kept in ``frame.attrs["samples"]``.
        n: responses per prompt.
        pass_at: each k of which pass@k is to be told, the chance that one of k responses passes; at most ``n``.
        pass_score: the score from which on a response passes.

    Returns:
        One row: num_prompts, score_mean, score_std, score_stderr, response_tokens_mean, eos_rate, policy_version,
        ``pass_at_<k>`` (arXiv 2107.03374, eq. 1: the mean over the prompts that have k scored responses) and, where the session
        has a reference, kl_mean (per sequence, nats, k1). Scores are those of the samples that the reward scored; where it did not
        score some, ``not_scored`` is how many. ``score_stderr`` is over prompts: responses to one are no independent measurements.

    Raises:
        OptionError: ``prompts`` are pairs or demonstrations, or a k is more than ``n``.
        SimulatedValueError: the session is simulated and has no scores.
    """
    import pandas as pd

    if isinstance(prompts, RowStream) and not isinstance(prompts, PromptStream):
        raise OptionError(f"evaluate takes prompts, session.prompts(held_out), to generate for; got {prompts!r}")
    if pass_at and max(pass_at) > n:
        raise OptionError(f"pass_at must be at most n, the responses to a prompt; got pass_at={shown(tuple(pass_at))}, n={n}")
    models = parts.deployment.models
    reward = reward or models.reward
    stream = prompts if isinstance(prompts, PromptStream) else parts.sources.in_order(prompts)
    batch: Batch = stream.rows(0, min(num_prompts, stream.num_prompts))
    batch = models.actor.generate(batch, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, n=n)
    reads = ["response", "scores", "finish_reason", "policy_version", "group"]
    if any(isinstance(h, ReferenceModel) for h in parts.deployment.book) and temperature > 0:
        batch = models.actor.compute_log_probs(batch)
        batch = models.reference.compute_log_probs(batch)
        reads += ["old_log_probs", "ref_log_probs"]
    batch = reward.compute_scores(batch)
    try:
        numbers = batch.reduce(_summary, reads=reads).value
        if pass_at:
            numbers = {**numbers, **pass_rates(batch, pass_at, pass_score)}
        frame = pd.DataFrame([numbers])
    except SimulatedValueError:
        words = "session.evaluate needs scores, and a simulated session has none; the trace has its calls"
        raise SimulatedValueError(words) from None
    frame.attrs["samples"] = _samples(batch, num_samples)
    return frame


def _summary(table: Table) -> dict[str, float]:
    scored = scored_rows({"scores": table["scores"]}, table.num_rows)
    scores = np.asarray(table["scores"], dtype=np.float64)[scored]
    lengths = table.ragged("response").lengths
    group = np.asarray(table["group"])
    _, of_prompt, counts = np.unique(group[scored], return_inverse=True, return_counts=True)
    of_prompts = np.bincount(of_prompt, scores) / counts
    numbers = {
        "num_prompts": len(np.unique(group)), "score_mean": float(scores.mean()), "score_std": float(scores.std()),
        "score_stderr": float(of_prompts.std() / np.sqrt(len(of_prompts))), "response_tokens_mean": float(lengths.mean()),
        "eos_rate": float(np.mean([str(r) == "stop" for r in table["finish_reason"]])),
        "policy_version": int(np.asarray(table["policy_version"]).max()),
    }  # fmt: skip
    if "ref_log_probs" in table:
        old, ref = table.ragged("old_log_probs"), table.ragged("ref_log_probs")
        numbers["kl_mean"] = float((old.flat.astype(np.float64) - ref.flat).sum() / table.num_rows)
    if len(scores) < table.num_rows:
        numbers["not_scored"] = table.num_rows - len(scores)
    return numbers


def _samples(batch: Batch, count: int) -> list[dict[str, Any]]:
    if count < 1:
        return []
    few = batch[: min(count, len(batch))]
    scores = few.table("scores")["scores"]
    texts = zip(few.text("prompt"), few.text("response"), scores, strict=True)
    return [{"prompt": prompt, "response": response, "score": float(score)} for prompt, response, score in texts]
