"""How a model's rotary positions are stretched beyond the text it was first trained on.

Each pair of a head's dimensions turns at its own rate: the first by one radian a token, the last hardly at all::

    rope type    pairs that turn often    in between                  pairs that turn seldom     cosines and sines
    llama3       as they were             blended by the wave         factor times slower        as they were
    yarn         as they were             blended by the dimension    factor times slower        times the attention factor

The reference is transformers (``modeling_rope_utils.py``); vLLM and the trainer compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from hfsdk.core.checks import Positive, Within, check_fields, shown
from hfsdk.core.errors import OptionError, UnsupportedModelError

ROPE_TYPES = ("default", "llama3", "yarn")
"""Rope types that both engines run as transformers does."""

OWN_ROPE_TYPES = {"phi3": ("default",)}
"""Family that runs fewer -> which. transformers takes a Phi-3's yarn for longrope, whose waves depend on the length of the text."""

Factor = Annotated[float, Within(1, 10**6)]
"""How many times longer the text may be."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama-3.x stretches its rotary positions (rope type ``llama3``).

    Waves longer than ``original_max_positions / low_freq_factor`` tokens become ``factor`` times longer, those shorter than
    ``original_max_positions / high_freq_factor`` stay, and between the two it is interpolated (Llama 3, arXiv 2407.21783).
    """

    factor: Factor
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_positions: Annotated[int, Within(1, 10**9)]

    def __post_init__(self) -> None:
        check_fields(self)
        if self.low_freq_factor >= self.high_freq_factor:
            raise OptionError(
                f"low_freq_factor must be below high_freq_factor; got {self.low_freq_factor:g} and {self.high_freq_factor:g}"
            )


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """How YaRN stretches rotary positions, e.g. of Qwen2.5 and Qwen3 (rope type ``yarn``; arXiv 2309.00071).

    Dimensions that turn more than ``beta_fast`` times within ``original_max_positions`` tokens stay, those that turn less than
    ``beta_slow`` times turn ``factor`` times slower, and between the two lies a ramp.
    """

    factor: Factor
    original_max_positions: Annotated[int, Within(1, 10**9)]
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    """Factor of cosines and sines, so attention has its square; ``None``: 0.1 ln(factor) + 1 (section 3.4)."""
    truncate: bool = True
    """Whether the ends of the ramp are rounded outwards to whole dimensions."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.beta_slow > self.beta_fast:
            raise OptionError(f"beta_slow must be at most beta_fast; got {self.beta_slow:g} and {self.beta_fast:g}")

    @property
    def attention(self) -> float:
        """The factor of cosines and sines."""
        return _attention(self.factor) if self.attention_factor is None else self.attention_factor


def _attention(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def rope_parameters(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the rotary numbers of a ``config.json``; where it has both spellings, those that transformers takes.

    Raises:
        UnsupportedModelError: no mapping, or one of mappings: numbers of their own for some layers.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModelError(
            f"{name} has rope parameters {shown(rope)}; hfsdk takes one mapping of them for all layers. Use another model."
        )
    return rope


def rope_scaling(config: Mapping[str, Any], rope: Mapping[str, Any], family: str, name: str) -> RopeScaling | YarnScaling | None:
    """Read how the rotary positions of a ``config.json`` are stretched.

    Args:
        config: the whole of it; a length that it names outside the rope parameters is the one that counts.
        rope: its :func:`rope_parameters`.
        family: the model's family.
        name: the model's name in messages.

    Raises:
        UnsupportedModelError: another rope type, or a number that is missing or none.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    types = OWN_ROPE_TYPES.get(family, ROPE_TYPES)
    if kind not in types:
        listed_types = ", ".join(map(repr, types))
        raise UnsupportedModelError(
            f"{name} has rope type {shown(kind)}; hfsdk runs rotary positions {listed_types}. Use another model."
        )
    length = "original_max_position_embeddings"
    own = {length: config[length]} if length in config else {length: rope.get(length, config.get("max_position_embeddings"))}
    numbers = {**rope, **own}
    try:
        if kind == "llama3":
            return RopeScaling(
                factor=numbers.get("factor"), low_freq_factor=numbers.get("low_freq_factor"),  # type: ignore[arg-type]
                high_freq_factor=numbers.get("high_freq_factor"), original_max_positions=numbers[length],  # type: ignore[arg-type]
            )  # fmt: skip
        return _yarn(numbers, numbers[length], config.get("max_position_embeddings")) if kind == "yarn" else None
    except OptionError as error:
        left_out = ("rope_type", "type", "rope_theta")
        listed = ", ".join(f"{key}={shown(number)}" for key, number in numbers.items() if key not in left_out)
        raise UnsupportedModelError(f"{name} has rope type {kind!r} with {listed}: {error}") from None


def _yarn(numbers: Mapping[str, Any], original_max_positions: Any, max_positions: Any) -> YarnScaling:
    options = {key: numbers[key] for key in ("beta_fast", "beta_slow", "truncate") if key in numbers}
    scaling = YarnScaling(
        factor=numbers.get("factor"), original_max_positions=original_max_positions,  # type: ignore[arg-type]
        attention_factor=numbers.get("attention_factor"), **options,
    )  # fmt: skip
    reached = scaling.factor * scaling.original_max_positions
    if isinstance(max_positions, int) and max_positions > reached:  # vLLM keeps a table of these
        reach = f"factor x {scaling.original_max_positions} = {reached:g}"
        raise OptionError(f"max_position_embeddings={max_positions} is beyond {reach}")
    weights = _AttentionFactors(mscale=numbers.get("mscale"), mscale_all_dim=numbers.get("mscale_all_dim"))
    if scaling.attention_factor is not None or not weights.mscale or not weights.mscale_all_dim:
        return scaling
    attention = _attention(scaling.factor, weights.mscale) / _attention(scaling.factor, weights.mscale_all_dim)
    return YarnScaling(**{**vars(scaling), "attention_factor": attention})


@dataclass(frozen=True, kw_only=True)
class _AttentionFactors:
    """DeepSeek's two weights of the attention factor; with only one of them, or zero, neither counts."""

    mscale: Annotated[float, Within(0, 10**6)] | None
    mscale_all_dim: Annotated[float, Within(0, 10**6)] | None

    def __post_init__(self) -> None:
        check_fields(self)
