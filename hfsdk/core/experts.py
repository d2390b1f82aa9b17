"""Mixtures of experts and latent attention as numbers, those of a model's ``config.json``. For planning and simulation only.

In a sparse layer a router sends each token to *k* of *E* experts, small gated MLPs; shared experts see every token. Latent
attention (DeepSeek-V2, arXiv 2405.04434, 2.1) keeps one compressed vector a token, for all heads, not keys and values::

    layers before first_dense      one MLP of mlp_hidden_size
    the layers after them          router [E, h], E experts and the shared ones, each of `width`; a token sees k + shared
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hfsdk.core.checks import NamedFields, Within, check_fields, shown
from hfsdk.core.errors import OptionError, UnsupportedModelError
from hfsdk.core.field_texts import documented

Some = Annotated[int, Within(1, 10**6)]
Further = Annotated[int, Within(0, 10**6)]


@documented
@dataclass(frozen=True, kw_only=True)
class Experts(NamedFields):
    """The sparse layers of a mixture of experts."""

    count: Some
    """E: experts of a sparse layer that the router chooses from."""
    per_token: Some
    """k: experts that each token is sent to."""
    width: Some
    """Width inside each expert's gated MLP (``moe_intermediate_size``)."""
    shared: Further = 0
    """Experts of that width that see every token beside the chosen ones (``n_shared_experts``)."""
    first_dense: Further = 0
    """Layers at the beginning that have one MLP in place of experts (``first_k_dense_replace``)."""
    router_bias: bool = False
    """Whether the router has a number for each expert that balances their load (DeepSeek-V3, arXiv 2412.19437)."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.per_token > self.count:
            raise OptionError(f"a token is sent to {self.per_token} of {self.count} experts; per_token must be at most count")


@documented
@dataclass(frozen=True, kw_only=True)
class LatentAttention(NamedFields):
    """Attention whose keys and values come from one compressed vector a token (MLA, arXiv 2405.04434)."""

    q_rank: Some
    """Width of the compressed queries (``q_lora_rank``)."""
    kv_rank: Some
    """Width of the compressed keys and values, which is what the cache holds (``kv_lora_rank``)."""
    rope_dim: Some
    """Width of the key part with rotary positions, one for all heads and in the cache as well (``qk_rope_head_dim``)."""
    nope_dim: Some
    """Width of a head's query and key without positions (``qk_nope_head_dim``)."""
    value_dim: Some
    """Width of a head's value (``v_head_dim``)."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def head_dim(self) -> int:
        """Mean width of a head's products with scores and with values: what attention's FLOPs come from."""
        return (self.nope_dim + self.rope_dim + self.value_dim) // 2


def latent_tensors(one: LatentAttention, hidden: int, heads: int) -> dict[str, tuple[int, ...]]:
    """Return a layer's weights by Hugging Face name; what ends in ``_b_proj`` or is ``o_proj`` is cut over heads."""
    return {
        "q_a_proj.weight": (one.q_rank, hidden),
        "q_a_layernorm.weight": (one.q_rank,),
        "q_b_proj.weight": (heads * (one.nope_dim + one.rope_dim), one.q_rank),
        "kv_a_proj_with_mqa.weight": (one.kv_rank + one.rope_dim, hidden),
        "kv_a_layernorm.weight": (one.kv_rank,),
        "kv_b_proj.weight": (heads * (one.nope_dim + one.value_dim), one.kv_rank),
        "o_proj.weight": (hidden, heads * one.value_dim),
    }


def refuse_experts(what: str, experts: object, name: str) -> None:
    """Refuse what is not modelled for mixtures of experts.

    Raises:
        UnsupportedModelError: the model is one.
    """
    if experts is not None:
        raise UnsupportedModelError(f"{shown(name)} is a mixture of experts; {what} knows dense models only. Use a dense model.")
