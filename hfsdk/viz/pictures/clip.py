"""The ratio of every token of a batch, and how much of the gradient clipping takes away.

::

          A > 0   |        _|#|_         xx     clipped above 1 + clip: cross-hatched
    tokens -------+--------|#|#|---------|----  ratio, on a logarithmic axis
          A < 0   |   xx    |#|                 clipped below 1 - clip
                     0.8     1      1.2

The view holds the batch's tokens sorted by ratio, each of them up to ``MOST_EXACT`` and merged into narrow groups above; no
group crosses a bound that the slider can take, so the numbers are exact at each of its positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

from hfsdk.core.errors import ColumnError
from hfsdk.core.table import Ragged
from hfsdk.core.tokens import check_clip
from hfsdk.viz.frame import Picture
from hfsdk.viz.tokenmath import MAX_LOG_RATIO, Array, pack, subtract, unpack

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch

MOST_EXACT = 4000
"""Tokens up to which each is kept by itself."""
STEP = 0.01
"""Step of the slider."""
GRID = 0.004
"""Width of a merged group, in the logarithm of the ratio."""


class ClipView(TypedDict):
    """All the clip picture needs. Groups are packed float32, sorted by ratio."""

    picture: Literal["clip"]
    title: str
    summary: str
    new: str
    old: str
    low: float
    high: float
    linked: bool
    """Whether one slider moves both bounds."""
    num_tokens: int
    num_missing: int
    """Tokens without a finite ratio or advantage; they are not counted."""
    merged: bool
    span: float
    """The histogram reaches from ``exp(-span)`` to ``exp(span)``; tokens beyond stand in the outermost bins."""
    groups: dict[str, str]
    """``log_ratio``; ``positive``, ``negative`` and ``zero``: tokens by the sign of A; ``positive_mass``, ``negative_mass``:
    their summed |A|."""


class ClipNumbers(TypedDict):
    """The tokens that clipping leaves without gradient, counted."""

    tokens: int
    positive: int
    negative: int
    token_share: float | None
    mass_share: float | None


def clip_view(batch: Batch, new: str | Batch, old: str, clip: float, clip_high: float | None) -> ClipView:
    """Bring the ratio's columns of the whole batch.

    Raises:
        ColumnError: a column is missing, or is not as long as the responses.
        OptionError: a bound is out of its range.
    """
    from hfsdk.core.batch import Batch as Kind

    check_clip(clip, clip_high)
    own = [old, "advantages"] + ([new] if isinstance(new, str) else [])
    batch.need(own, "clip_picture")
    table = batch.table(*dict.fromkeys(own))
    newer = new.table("old_log_probs")["old_log_probs"] if isinstance(new, Kind) else table[str(new)]
    columns = {"new": newer, "old": table[old], "advantages": table["advantages"]}
    for name, column in columns.items():
        if not isinstance(column, Ragged) or not np.array_equal(column.lengths, table.ragged("advantages").lengths):
            raise ColumnError(f"clip_picture: the column for {name!r} does not have one number per response token; advantages has")
    name = "new log-probs" if isinstance(new, Kind) else str(new)
    high = float(clip if clip_high is None else clip_high)
    flats = [c.flat for c in columns.values() if isinstance(c, Ragged)]
    return view_of(*flats, low=float(clip), high=high, linked=clip_high is None, names=(name, old))


def view_of(
    new: Array, old: Array, advantages: Array, *, low: float, high: float, linked: bool = True,
    names: tuple[str, str] = ("new log-probs", "old_log_probs"),
) -> ClipView:  # fmt: skip
    """Turn log-probabilities and advantages, all of shape [T], into the view of the picture."""
    log_ratio = np.minimum(subtract(new, old), np.float32(MAX_LOG_RATIO))
    a = np.asarray(advantages, np.float32)
    finite = np.isfinite(log_ratio) & np.isfinite(a)
    groups = _groups(log_ratio[finite], a[finite], low, high)
    sizes = np.abs(log_ratio[finite])
    span = max(1.5 * math.log1p(high), -1.5 * math.log1p(-low), float(np.quantile(sizes, 0.998)) if len(sizes) else 0.0)
    view: ClipView = {
        "picture": "clip", "title": "the ratio and what is clipped", "summary": "", "new": names[0],
        "old": names[1], "low": low, "high": high, "linked": linked, "num_tokens": int(finite.sum()),
        "num_missing": int((~finite).sum()), "merged": bool(finite.sum() > MOST_EXACT), "span": min(span, 4.0),
        "groups": {name: pack(numbers) for name, numbers in groups.items()},
    }  # fmt: skip
    view["summary"] = words(view, clip_numbers(view, low, high), low, high)
    return view


def clip_numbers(view: Mapping[str, Any], low: float, high: float) -> ClipNumbers:
    """Return how many tokens, and how much of the summed |advantage|, have no gradient with these bounds."""
    g = {name: unpack(text).astype(np.float64) for name, text in view["groups"].items()}
    ratios = np.exp(unpack(view["groups"]["log_ratio"]))
    above, below = ratios > np.float32(1 + high), ratios < np.float32(1 - low)
    positive, negative = int(g["positive"][above].sum()), int(g["negative"][below].sum())
    mass = float(g["positive_mass"].sum() + g["negative_mass"].sum())
    lost = float(g["positive_mass"][above].sum() + g["negative_mass"][below].sum())
    total = view["num_tokens"]
    return {
        "tokens": positive + negative, "positive": positive, "negative": negative,
        "token_share": (positive + negative) / total if total else None, "mass_share": lost / mass if mass else None,
    }  # fmt: skip


def words(view: Mapping[str, Any], numbers: ClipNumbers, low: float, high: float) -> str:
    """Say the numbers as a sentence."""
    if numbers["token_share"] is None:
        return "no token has a ratio"
    mass = "not known" if numbers["mass_share"] is None else f"{100 * numbers['mass_share']:.2f} %"
    text = (
        f"{numbers['tokens']} of {view['num_tokens']} tokens ({100 * numbers['token_share']:.2f} %) have zero gradient: "
        f"{numbers['positive']} with A > 0 above {1 + high:g}, {numbers['negative']} with A < 0 below {1 - low:g}; "
        f"they hold {mass} of all |A|"
    )
    return text + (f"; {view['num_missing']} tokens without a number are not counted" if view["num_missing"] else "")


class ClipPicture(Picture):
    """The ratio's histogram with its clipped part. ``ClipPicture(clip_view(batch, ...))``."""

    name = "clip"

    def to_text(self) -> str:
        """Return the numbers and the histogram as text."""
        view: Any = self.view
        edges, counts = histogram(view, view["low"], view["high"], bins=21)
        lines = [f"{view['title']}: {view['summary']}"]
        longest = max(1, int(max(sum(c) for c in counts)))
        for k, (pos, pos_cut, neg, neg_cut, zero) in enumerate(counts):
            learned, cut = pos + neg + zero, pos_cut + neg_cut
            bar = "#" * math.ceil(40 * learned / longest) + "x" * math.ceil(40 * cut / longest)
            lines.append(f"  {math.exp((edges[k] + edges[k + 1]) / 2):>8.3f} {bar} {int(learned + cut)}")
        return "\n".join([*lines, "  # with gradient, x clipped"])


def histogram(view: Mapping[str, Any], low: float, high: float, bins: int) -> tuple[Array, Array]:
    """Return bin edges (log ratio) and counts, shape [bins, 5]: A > 0, of them clipped, A < 0, of them clipped, A = 0.

    The counts of A > 0 and A < 0 are those that are not clipped.
    """
    g = {name: unpack(text) for name, text in view["groups"].items()}
    edges = np.linspace(-view["span"], view["span"], bins + 1)
    at = np.clip(np.searchsorted(edges, g["log_ratio"], side="right") - 1, 0, bins - 1)
    ratios = np.exp(g["log_ratio"])
    above, below = ratios > np.float32(1 + high), ratios < np.float32(1 - low)
    parts = [g["positive"] * ~above, g["positive"] * above, g["negative"] * ~below, g["negative"] * below, g["zero"]]
    return edges, np.stack([np.bincount(at, weights=p, minlength=bins) for p in parts], axis=1)


# ---------------------------------------------------------------- parts


def _groups(log_ratio: Array, a: Array, low: float, high: float) -> dict[str, Array]:
    order = np.argsort(log_ratio, kind="stable")
    log_ratio, a = log_ratio[order], a[order].astype(np.float64)
    parts = {
        "positive": (a > 0) * 1.0, "negative": (a < 0) * 1.0, "zero": (a == 0) * 1.0,
        "positive_mass": np.maximum(a, 0), "negative_mass": np.maximum(-a, 0),
    }  # fmt: skip
    if len(a) <= MOST_EXACT:
        return {"log_ratio": log_ratio, **parts}
    below, above = 1 - np.arange(1, 100) * STEP, 1 + np.arange(1, 201) * STEP
    bounds = np.concatenate([below, above, [1 - low, 1 + high]]).astype(np.float32)
    grid = np.exp(np.arange(-4, 4, GRID)).astype(np.float32)
    edges = np.unique(np.concatenate([grid, bounds, np.nextafter(bounds, np.float32(-1))]))
    group = np.searchsorted(edges, np.exp(log_ratio), side="left")  # so a token exactly at a bound has its own group
    first = np.flatnonzero(np.diff(group, prepend=-1))
    middle = (first + np.append(first[1:], len(group)) - 1) // 2  # a token of the group stands for it: it is inside
    return {"log_ratio": log_ratio[middle]} | {name: np.add.reduceat(p, first) for name, p in parts.items()}
