"""Two pictures of the effect of PPO's numbers on a token: credit flowing back through GAE, and gradients that clipping takes away.

::

    rewards      .  .  .  .  .  #     KL penalty on every token, the score on the last     solid: the batch's own columns
    values       -  -  =  =  =  -
    deltas       .  |  .  |  .  #     r + gamma V' - V; filled as far as it arrives at     hatched: recomputed here for the
    weight       #  #  =  =  -  -       the chosen token: (gamma lambda)^k                   gamma and lambda of the sliders
    advantages   #  #  #  #  #  #     recomputed; the line is the batch's own
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

from hfsdk.core.checks import check_options, is_whole
from hfsdk.core.credit import estimate
from hfsdk.core.errors import ColumnError, OptionError
from hfsdk.core.table import Ragged
from hfsdk.viz.frame import Picture
from hfsdk.viz.pictures.tokens import visible
from hfsdk.viz.tokenmath import Array, Whitening, pack, unpack, whitening_of

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch


AGREES = 1e-5
"""Recomputed and own advantages that differ by less, relative to their size where it is above 1, are the same."""
TEXT_TOKENS = 60


class CreditView(TypedDict):
    """All the credit picture needs; columns are packed float32 (`tokenmath.pack`), one number per response token."""

    picture: Literal["credit"]
    title: str
    summary: str
    row: int
    first_row: int
    tokens: list[str]
    gamma: float
    lam: float
    columns: dict[str, str]
    """rewards and values; where the batch has them ``own`` (its advantages before whitening), advantages, returns."""
    score: float | None
    kl_coef: float | None
    """beta, where each reward is minus beta times the KL (plus the score at the end)."""
    whitening: dict[str, Any]
    note: str
    missing: list[str]


def credit_view(batch: Batch, row: int, gamma: float, lam: float) -> CreditView:
    """Bring one sample's columns, and from the whole batch whether advantages were whitened.

    Raises:
        ColumnError: there are no rewards or values yet, or the sample does not exist.
        OptionError: gamma or lam is not between 0 and 1.
    """
    check_options("credit_picture", gamma=(gamma, float), lam=(lam, float))
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise OptionError(f"credit_picture: {name} must be between 0 and 1; got {name}={value!r}")
    batch.need(["response", "rewards", "values"], "credit_picture")
    if not is_whole(row) or not 0 <= row < batch.num_rows:
        raise ColumnError(f"sample {row!r} does not exist; the batch has {batch.num_rows} samples (0 to {batch.num_rows - 1})")
    tokens = batch.tokens([row])
    table, names = tokens.table, [n for n in ("advantages", "returns", "values") if n in batch]
    sample: dict[str, Array] = {n: _numbers(table[n], n) for n in ("rewards", *names)}
    # Whitening takes the whole batch's mean and deviation: one sample cannot tell whether it was done.
    whole = batch.table(*names) if len(names) == 3 else None
    whitening = Whitening("unknown")
    if whole is not None:
        whitening = whitening_of(*(_numbers(whole[n], n) for n in ("advantages", "returns", "values")))
    own = _own(sample, whitening)
    columns = {name: pack(column) for name, column in sample.items()} | ({"own": pack(own)} if own is not None else {})
    score = float(np.asarray(table["scores"])[0]) if "scores" in table else None
    response = [int(t) for t in table.ragged("response")[0]]
    shown = [visible(tokens.vocabulary[t].decode("utf-8", "backslashreplace")) for t in response]
    kl = _numbers(table["kl"], "kl") if "kl" in table and isinstance(table["kl"], Ragged) else None
    view: CreditView = {
        "picture": "credit", "title": f"credit for sample {row}", "summary": "", "row": int(row),
        "first_row": int(tokens.first_rows[0]), "tokens": shown, "gamma": float(gamma), "lam": float(lam), "columns": columns,
        "score": score if score is not None and math.isfinite(score) else None,
        "kl_coef": _kl_coef(sample["rewards"], kl, score),
        "whitening": {"state": whitening.state, "mean": whitening.mean, "std": whitening.std},
        "note": whitening_words(whitening, "advantages" in sample),
        "missing": [n for n in ("scores", "advantages", "returns") if n not in table],
    }  # fmt: skip
    view["summary"] = _summary(view)
    return view


def whitening_words(whitening: Whitening, has_advantages: bool) -> str:
    """Say how the batch's advantages were changed after GAE."""
    if not has_advantages:
        return "the batch has no advantages yet: the line is missing"
    if whitening.state == "whitened":
        mean = whitening.mean or 0.0
        shift = f"A {'−' if mean >= 0 else '+'} {abs(mean):.4g}"
        return (
            f"the batch's advantages are whitened over all its tokens, ({shift}) / {whitening.std:.4g}; "
            "drawn here before whitening (returns − values)"
        )
    return {
        "no": "the batch's advantages are not whitened",
        "other": "the batch's advantages are neither returns − values nor that whitened; drawn as they are",
        "unknown": "without returns nobody can tell whether the batch's advantages are whitened; drawn as they are",
    }[whitening.state]


def difference(view: CreditView) -> float | None:
    """Return the largest difference between GAE at the view's gamma and lambda and the batch's own advantages."""
    if "own" not in view["columns"] or not view["tokens"]:
        return None
    columns = {name: unpack(text) for name, text in view["columns"].items()}
    _, advantages = gae(columns["rewards"], columns["values"], view["gamma"], view["lam"])
    gap = np.abs(advantages - columns["own"])
    return float(gap.max()) if np.isfinite(gap).all() else math.nan


class CreditPicture(Picture):
    """A score flowing back through GAE. ``CreditPicture(credit_view(batch, row, gamma, lam))``."""

    name = "credit"

    def to_text(self) -> str:
        """Return the sample's numbers, one line per token."""
        view: Any = self.view
        lines = [f"{view['title']}: {view['summary']}", view["note"]]
        if not view["tokens"]:
            return "\n".join([*lines, "no response tokens"])
        columns = {name: unpack(text) for name, text in view["columns"].items()}
        deltas, advantages = gae(columns["rewards"], columns["values"], view["gamma"], view["lam"])
        lines.append(f"{'row':>6} {'token':<12} {'reward':>10} {'value':>10} {'delta':>10} {'advantage':>10} {'of batch':>12}")
        for k, token in enumerate(view["tokens"][:TEXT_TOKENS]):
            own = f"{columns['own'][k]:>12.5g}" if "own" in columns else "not measured"
            lines.append(
                f"{view['first_row'] + k:>6} {token:<12} {columns['rewards'][k]:>10.4g} {columns['values'][k]:>10.4g} "
                f"{deltas[k]:>10.4g} {advantages[k]:>10.4g} {own}"
            )
        if len(view["tokens"]) > TEXT_TOKENS:
            lines.append(f"and {len(view['tokens']) - TEXT_TOKENS} more tokens")
        return "\n".join(lines)


# ---------------------------------------------------------------- parts of the view


def _numbers(column: Any, name: str) -> Array:
    if not isinstance(column, Ragged):
        raise ColumnError(f"column {name!r} has one value per sample; one number per response token is needed here")
    return column.flat.astype(np.float32)


def _own(sample: dict[str, Array], whitening: Whitening) -> Array | None:
    if "returns" in sample and whitening.state in ("no", "whitened"):
        return sample["advantages"] if whitening.state == "no" else sample["returns"] - sample["values"]
    if "advantages" in sample:
        return sample["advantages"]
    return sample["returns"] - sample["values"] if "returns" in sample else None


def _kl_coef(rewards: Array, kl: Array | None, score: float | None) -> float | None:
    """Find beta with ``rewards = -beta kl`` (+ the score at the last token); ``None`` where rewards are made otherwise."""
    if kl is None or score is None or len(kl) != len(rewards) or not len(kl):
        return None
    penalty = rewards.astype(np.float64).copy()
    penalty[-1] -= score
    size = float(np.dot(kl, kl))
    beta = -float(np.dot(penalty, kl)) / size if size else 0.0
    fits = np.abs(penalty + beta * kl).max() <= 1e-4 * max(1.0, float(np.abs(rewards).max()))
    return beta if bool(fits) and beta >= 0 else None


def _summary(view: CreditView) -> str:
    gap = difference(view)
    words = f"{len(view['tokens'])} tokens"
    words += ", score not measured" if view["score"] is None else f", score {view['score']:+.4g}"
    words += f", gamma {view['gamma']:g}, lambda {view['lam']:g}: "
    if gap is None:
        return words + "the batch has no advantages to compare with"
    if math.isnan(gap):
        return words + "not to be compared with the batch's advantages, for not all numbers are finite"
    own = np.abs(unpack(view["columns"]["own"])).max()
    if gap <= AGREES * max(1.0, float(own)):
        return words + f"equal to the batch's own advantages (largest difference {gap:.1e})"
    return words + f"NOT those the batch's advantages were made with (largest difference {gap:.3g})"


# -- GAE of one sequence on arrays, so that nobody needs torch to look


def gae(rewards: Array, values: Array, gamma: float, lam: float) -> tuple[Array, Array]:
    """Return deltas and advantages of one sequence in float64 (GAE eq. 16; `rlmath.gae` is its batched twin in torch)."""
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    advantages = np.zeros_like(values)
    deltas = estimate(rewards, values, np.append(values[1:], 0.0)[: len(values)], gamma, lam, advantages)
    return deltas, advantages
