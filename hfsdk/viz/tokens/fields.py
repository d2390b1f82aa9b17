"""A field of a tokens view as numbers: its values, and which tokens the ratio's clip leaves without gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hfsdk.viz.tokens import tokenmath
from hfsdk.viz.tokens.tokenmath import Array, unpack


def field_values(view: Mapping[str, Any], field: Mapping[str, Any]) -> Array:
    """Return a field's numbers over the tokens of all samples shown, float32, shape [T]."""
    parts = [unpack(view["columns"][name]) for name in field["of"]]
    return compute(field["op"], parts)


def compute(op: str, parts: Sequence[Array]) -> Array:
    """Return what follows from one or two columns."""
    if op == "column":
        return parts[0]
    return {"subtract": tokenmath.subtract, "k3": tokenmath.k3, "ratio": tokenmath.ratio}[op](*parts)


def clipped_tokens(view: Mapping[str, Any]) -> Array:
    """Return which tokens clipping leaves without gradient, bool, shape [T] (none where nothing can be clipped)."""
    clip = view["clip"]
    if clip is None or not clip["known"]:
        return np.zeros(sum(len(s["response"]) for s in view["samples"]), dtype=bool)
    columns = {name: unpack(view["columns"][name]) for name in (clip["new"], clip["old"], "advantages")}
    ratios = tokenmath.ratio(columns[clip["new"]], columns[clip["old"]])
    return tokenmath.clipped(ratios, columns["advantages"], clip["low"], clip["high"])


def offsets(view: Mapping[str, Any]) -> list[int]:
    """Return where each sample's tokens begin among all tokens shown."""
    lengths = [len(s["response"]) for s in view["samples"]]
    return [0, *np.cumsum(lengths).tolist()] if lengths else [0]
