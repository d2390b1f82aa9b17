"""``Gap``: why trainer and generating engine disagree on the log-probabilities of the same tokens, taken apart by experiments.

Per response token, with the batch's ``rollout_log_probs`` recorded when it was generated::

    trainer - recorded  =  (trainer - rollout now)  +  (rollout now - rollout as it is)  +  (rollout as it is - recorded)
                            engines: dtype, a layer      weights that did not arrive         temperature, top-k, tokens, age

Each part is measured by having an engine score the very same tokens with one thing changed. A part beyond what rounding makes
(:data:`GAP_TOLERANCE`) has a cause: the one thing whose change takes most of it away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hfsdk.core.checks import checked, shown
from hfsdk.core.errors import OptionError
from hfsdk.core.table import Array

if TYPE_CHECKING:
    from pandas import DataFrame

GAP_TOLERANCE = {"fp32": {"mean": 1e-4, "max": 1e-3}, "bf16": {"mean": 0.05, "max": 1.0}}
"""``|trainer - rollout|`` of a token's log-probability, in nats: rounding alone stays below."""

CAUSES = {
    "version": "weights of an older version", "weights": "weights that are not the trainer's", "temperature": "temperature",
    "top_k": "top-k", "top_p": "top-p", "min_new_tokens": "min_new_tokens", "prompt": "other prompt tokens",
    "template": "text tokenised anew", "cache": "prefix cache", "dtype": "dtype", "layer": "one layer computes otherwise",
    "tokens": "other tokens",
}  # fmt: skip
"""Every cause that is looked for, and its name in tables and pictures."""


@dataclass(frozen=True, eq=False)
class Scored:
    """The answer of one rank of the generating engine, besides log-probabilities, when it scores tokens that are there."""

    there: bool
    """Whether it had the weights that were asked for; without them nothing was scored."""
    num_updates: int
    """Optimizer updates that its weights have seen."""
    wrong: tuple[str, ...] = ()
    """Hugging Face tensors of which it has other numbers than the trainer, by fingerprint."""
    proven: int = 0
    """Boxes that are the trainer's, by fingerprint."""
    unproven: int = 0
    """Boxes that nobody can compare: packed kernels, or a trainer on another pool."""
    inside: HiddenStates | None = None
    cached: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(Row, response token) -> its log-probability behind the prefix cache."""


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Hidden states before one token, of one engine on one rank."""

    engine: str
    """``"trainer"``, ``"rollout"``, ``"fp32"`` or ``"bf16"``: the last two are transformers on the trainer's weights."""
    hidden: Mapping[str, Array]
    """Place (``"embedding"``, ``"layer 0"``, ..., ``"norm"``) -> hidden state, float32, shape [hidden size]; of one rank."""
    log_probs: Array | None = None
    """Log-probabilities of the sequence's response tokens."""


@dataclass(frozen=True)
class GapCause:
    """One cause that was looked for."""

    cause: str
    """A key of :data:`CAUSES`."""
    changed: str
    """The change that was made, in words; empty: none, as no gap was left to explain."""
    nats: float = 0.0
    """Mean over tokens of the part of the gap that it makes, absolute."""
    share: float = 0.0
    """How much of the gap goes away with it: 1 - mean |gap without it| / mean |gap|."""
    named: bool = False
    """Whether it is a cause."""
    detail: str = ""
    """The exact change: the two temperatures, the tensor, the layer."""


@dataclass(frozen=True)
class LayerGap:
    """One place in the model, at the worst token."""

    place: str
    trainer: float
    """Relative distance of the trainer's hidden state from that of transformers in fp32; NaN where it was not seen."""
    rollout: float
    bf16: float
    """The same of transformers in bf16: the distance that rounding alone makes."""


@dataclass(frozen=True, eq=False, repr=False)
class Gap:
    """Why trainer and rollout differ: a verdict, a row per experiment, numbers per token. Made by ``actor.explain_gap(batch)``."""

    role: str
    dtype: str
    verdict: str
    """One sentence."""
    experiments: tuple[GapCause, ...]
    layers: tuple[LayerGap, ...]
    """The layers from the outermost on; empty where the engines agree."""
    lengths: Array
    """Response tokens of each row; shape [rows]."""
    trainer: Array
    """Log-probabilities by the trainer, now; flat over response tokens."""
    recorded: Array
    """The batch's ``rollout_log_probs``."""
    parts: Mapping[str, Array]
    """Cause -> its part of every token's gap; ``"rest"`` is the part that none of them makes."""
    worst: tuple[int, int]
    """(Row, response token) with the largest gap."""
    worst_text: str = ""
    """The worst token, and the text before it."""
    seconds: float = 0.0

    @property
    def gap(self) -> Array:
        """Trainer's log-probability less the recorded one, per response token, in nats."""
        return self.trainer - self.recorded

    @property
    def causes(self) -> tuple[str, ...]:
        """The causes that are named, the largest first; none where the engines agree within rounding."""
        return tuple(e.cause for e in sorted(self.experiments, key=lambda e: -e.nats) if e.named)

    @property
    def mean(self) -> float:
        """Mean absolute gap of a token, in nats."""
        return size(self.gap)[0]

    @property
    def max(self) -> float:
        """Largest absolute gap of a token, in nats."""
        return size(self.gap)[1]

    @checked
    def to_pandas(self, what: str = "causes") -> DataFrame:
        """Return a table: ``"causes"``, a row per experiment; ``"tokens"``, a row per response token; ``"layers"``, one per layer.

        Raises:
            OptionError: there is no such table.
        """
        import pandas as pd

        if what == "causes":
            return pd.DataFrame([{**vars(e), "cause": e.cause} for e in self.experiments]).set_index("cause")
        if what == "layers":
            return pd.DataFrame([vars(layer) for layer in self.layers], columns=["place", "trainer", "rollout", "bf16"])
        if what == "tokens":
            rows = np.repeat(np.arange(len(self.lengths)), self.lengths)
            places = np.concatenate([np.arange(n) for n in self.lengths]) if len(self.lengths) else rows
            columns = {"sample": rows, "position": places, "trainer": self.trainer, "recorded": self.recorded, "gap": self.gap}
            return pd.DataFrame({**columns, **self.parts})
        raise OptionError(f"to_pandas takes 'causes', 'tokens' or 'layers'; got {shown(what)}")

    def view(self) -> dict[str, Any]:
        """Return plain data for a picture."""
        row, token = self.worst
        at = int(self.lengths[:row].sum()) + token
        worst = {
            "row": row, "token": token, "text": self.worst_text, "trainer": _number(self.trainer[at]),
            "recorded": _number(self.recorded[at]),
        }  # fmt: skip
        return {
            "role": self.role, "dtype": self.dtype, "verdict": self.verdict, "mean": self.mean, "max": self.max,
            "tokens": len(self.trainer), "tolerance": GAP_TOLERANCE[self.dtype]["mean"], "worst": worst,
            "causes": [{**vars(e), "words": CAUSES[e.cause]} for e in self.experiments],
            "layers": [{k: v if k == "place" else _number(v) for k, v in vars(layer).items()} for layer in self.layers],
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"Gap({self.role}: {self.verdict})"


def size(gap: Array) -> tuple[float, float]:
    """Return mean and maximum of the absolute gap of the tokens that have one; a log-probability of -inf counts as -20."""
    finite = np.abs(np.clip(gap[~np.isnan(gap)], -20.0, 20.0))
    return (float(finite.mean()), float(finite.max())) if len(finite) else (0.0, 0.0)


def is_rounding(gap: Array, dtype: str) -> bool:
    """Return whether a gap is no larger than rounding makes it."""
    mean, largest = size(gap)
    return mean <= GAP_TOLERANCE[dtype]["mean"] and largest <= GAP_TOLERANCE[dtype]["max"]


def layer_gaps(insides: Sequence[HiddenStates], places: Sequence[str]) -> tuple[LayerGap, ...]:
    """Return every place's distance from transformers in fp32, of what all ranks saw together."""
    seen: dict[str, dict[str, Array]] = {}
    for inside in insides:
        seen.setdefault(inside.engine, {}).update(inside.hidden)
    oracle = seen.get("fp32", {})

    def far(engine: str, place: str) -> float:
        own, theirs = seen.get(engine, {}).get(place), oracle.get(place)
        if own is None or theirs is None:
            return float("nan")
        return float(np.linalg.norm(own - theirs) / max(float(np.linalg.norm(theirs)), 1e-30))

    return tuple(LayerGap(place, far("trainer", place), far("rollout", place), far("bf16", place)) for place in places)


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
