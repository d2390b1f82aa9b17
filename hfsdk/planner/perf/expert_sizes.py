"""The cost of a mixture of experts beyond a dense model of its active size: weights read and held, and copies of tokens.

Every term is 0 for a dense model. Experts are taken to be equally likely, so their load is even. The expected number of experts
that T tokens reach is E (1 - (1 - k / E)^T) (:func:`distinct`): a step that decodes one row reads k experts,
one of 64 rows nearly all::

    Qwen3-30B-A3B, E = 128, k = 8       1 row      8 experts of a layer read
                                       16 rows    82
                                       64 rows   126

With expert parallelism ``ep`` ranks with E / ep experts each see the tokens of all of them: a rank reads as many of its own as
all read of theirs, and every layer sends each token's copies to where their experts are, and back (GShard, arXiv 2006.16668).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hfsdk.core.spec import Experts, ModelSpec, latent_tensors


def distinct(experts: Experts, tokens: Any) -> Any:
    """Return how many experts T tokens (a number or an array) reach, expected, where all are alike: E (1 - (1 - k / E)^T)."""
    return experts.count * (1 - (1 - experts.per_token / experts.count) ** tokens)


def more_read(spec: ModelSpec, tokens: Any, ep: int = 1) -> Any:
    """Return how many weights of a layer (mean of the layers, all tp ranks) a pass reads beyond those of one token.

    Args:
        spec: the model.
        tokens: tokens of the pass on one data-parallel rank, a number or an array; at least 1 counts.
        ep: ranks that share the experts, each with as many tokens.

    Returns:
        Below 0 where a rank has fewer experts to read than one token is sent to.
    """
    experts = spec.experts
    if experts is None:
        return 0.0
    return _each(spec) * (distinct(experts, tokens * ep) / ep - experts.per_token)


def exchanged_rows(spec: ModelSpec, ep: int, beside: int, once: bool) -> tuple[float, float]:
    """Return the numbers a token and layer that a rank sends to others of its ``ep``, one way: inside its node, and to other nodes.

    Args:
        spec: the model.
        ep: ranks that share the experts.
        beside: the number of these ranks on one node, the rank itself included.
        once: whether several experts on a rank, or on another node, get one copy together, which that node's ranks pass on
            (DeepEP; DeepSeek-V3, arXiv 2412.19437, section 3.2.2); otherwise each of the k experts gets its own, wherever it is.
    """
    if spec.experts is None:
        return 0.0, 0.0
    k, nodes = spec.experts.per_token, ep / beside
    each = _copies(spec) / k
    if not once:
        return each * k * (beside - 1) / ep, each * k * (ep - beside) / ep
    return each * (ep - 1) * (1 - (1 - 1 / ep) ** k), each * (nodes - 1) * (1 - (1 - 1 / nodes) ** k)


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
    experts = spec.experts
    return 0.0 if experts is None else (1 - experts.first_dense / spec.num_layers) * experts.per_token * spec.hidden_size


@lru_cache(maxsize=4096)
def sparse_layers(spec: ModelSpec, tp: int, kv_shards: int, layers: int, ep: int = 1) -> int:
    """Return the parameters of a rank's ``layers`` layers, as many with experts as there can be; of a model with experts.

    Experts are cut by tp inside, as any MLP is, and a rank has ``1 / ep`` of those that the router chooses from; shared ones,
    the router and compressing projections are whole on every rank.
    """
    experts, hidden = spec.experts, spec.hidden_size
    assert experts is not None
    if spec.latent is not None:
        shapes = latent_tensors(spec.latent, hidden, spec.num_heads)
        cut = sum(a * b for name, (a, b) in _matrices(shapes).items() if "_b_proj" in name or name.startswith("o_proj"))
        whole = sum(a * b for a, b in _matrices(shapes).values()) - cut
        attention = cut // tp + whole + spec.latent.q_rank + spec.latent.kv_rank
    else:
        query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention = hidden * (2 * query // tp + 2 * kv // kv_shards) + (2 * spec.head_dim if spec.qk_norm else 0)
    attention += 2 * hidden
    router = experts.count * (hidden + experts.router_bias)
    sparse = min(layers, spec.num_layers - experts.first_dense)
    expert_layer = router + (experts.count // ep + experts.shared) * 3 * hidden * experts.width // tp
    return layers * attention + sparse * expert_layer + (layers - sparse) * 3 * hidden * spec.mlp_hidden_size // tp


def _matrices(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    return {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}
