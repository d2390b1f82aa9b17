"""What a mixture of experts asks beyond a dense model of its active size: weights read and held, and copies of tokens.

Every term is 0 for a dense model. Experts are taken to be equally likely, so their load is even. The expected number of experts
that T tokens reach is E (1 - (1 - k / E)^T) (:func:`distinct`): a step that decodes one row reads k experts,
one of 64 rows nearly all::

    Qwen3-30B-A3B, E = 128, k = 8       1 row      8 experts of a layer read
                                       16 rows    82
                                       64 rows   126
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hfsdk.core.experts import Experts, latent_tensors
from hfsdk.core.spec import ModelSpec


def distinct(experts: Experts, tokens: Any) -> Any:
    """Return how many experts T tokens (a number or an array) reach, expected, where all are alike: E (1 - (1 - k / E)^T)."""
    return experts.count * (1 - (1 - experts.per_token / experts.count) ** tokens)


def more_read(spec: ModelSpec, tokens: Any) -> Any:
    """Return how many weights of a layer (mean of the layers, all tp ranks) a pass reads beyond those of one token.

    Args:
        spec: the model.
        tokens: of the pass, a number or an array; at least 1 counts.
    """
    one = spec.experts
    if one is None:
        return 0.0
    return _each(spec) * (distinct(one, tokens) - one.per_token)


@lru_cache(maxsize=64)
def _each(spec: ModelSpec) -> float:
    """Weights of one expert, times the share of layers that have experts."""
    assert spec.experts is not None
    return spec.routed_parameters / (spec.num_layers * spec.experts.count)


def moved_rows(spec: ModelSpec) -> float:
    """Return the numbers a token and layer that sorting tokens by expert reads and writes: k copies there, and k back."""
    return 4.0 * _copies(spec)


def kept_rows(spec: ModelSpec) -> float:
    """Return the bytes a token and layer in bf16 that are kept for the backward pass: k copies before the experts, k after them.

    They are whole on every tp rank, as experts are cut inside.
    """
    return 4.0 * _copies(spec)


def _copies(spec: ModelSpec) -> float:
    one = spec.experts
    return 0.0 if one is None else (1 - one.first_dense / spec.num_layers) * one.per_token * spec.hidden_size


@lru_cache(maxsize=4096)
def sparse_layers(spec: ModelSpec, tp: int, kv_shards: int, layers: int) -> int:
    """Return the parameters of a rank's ``layers`` layers, as many with experts as there can be; of a model with experts.

    Experts are cut by tp inside, as any MLP is; the router and compressing projections are whole on every rank.
    """
    one, hidden = spec.experts, spec.hidden_size
    assert one is not None
    if spec.latent is not None:
        shapes = latent_tensors(spec.latent, hidden, spec.num_heads)
        cut = sum(a * b for name, (a, b) in _matrices(shapes).items() if "_b_proj" in name or name.startswith("o_proj"))
        whole = sum(a * b for a, b in _matrices(shapes).values()) - cut
        attention = cut // tp + whole + spec.latent.q_rank + spec.latent.kv_rank
    else:
        query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention = hidden * (2 * query // tp + 2 * kv // kv_shards) + (2 * spec.head_dim if spec.qk_norm else 0)
    attention += 2 * hidden
    router = one.count * (hidden + one.router_bias)
    sparse = min(layers, spec.num_layers - one.first_dense)
    experts = router + (one.count + one.shared) * 3 * hidden * one.width // tp
    return layers * attention + sparse * experts + (layers - sparse) * 3 * hidden * spec.mlp_hidden_size // tp


def _matrices(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    return {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}
