"""Mixtures of experts and latent attention as numbers, read from the fields of a ``config.json``. For planning and simulation only.

In a sparse layer a router sends each token to *k* of *E* experts, small gated MLPs; shared experts see every token. Latent
attention (DeepSeek-V2, arXiv 2405.04434, 2.1) keeps one compressed vector a token, for all heads, not keys and values::

    layers before first_dense      one MLP of mlp_hidden_size
    the layers after them          router [E, h], E experts and the shared ones, each of `width`; a token sees k + shared
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from hfsdk.core.checks import NamedFields, Within, check_fields, shown
from hfsdk.core.errors import OptionError, UnsupportedModelError
from hfsdk.core.field_texts import documented
from hfsdk.core.hf_config import size_of

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


def experts_of(config: Mapping[str, Any], name: str) -> Experts:
    """Read the fields that Mixtral, Qwen3-MoE and DeepSeek-V3 give their experts.

    Raises:
        UnsupportedModelError: a number is missing, or layers with and without experts take turns.
    """
    dense_between = (
        config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers") or config.get("moe_layer_freq", 1) != 1
    )
    if dense_between:
        raise UnsupportedModelError(
            f"{name} has layers with and without experts in turns (decoder_sparse_step, moe_layer_freq, mlp_only_layers); "
            "here every layer has them, or all after the first first_k_dense_replace. Use another model."
        )
    key = next((k for k in ("n_routed_experts", "num_experts", "num_local_experts") if k in config), "num_experts")
    width = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    return Experts(
        count=size_of(config, name, key), per_token=size_of(config, name, "num_experts_per_tok"),
        width=size_of(config, name, width), shared=config.get("n_shared_experts") or 0,
        first_dense=config.get("first_k_dense_replace") or 0, router_bias=config.get("topk_method") == "noaux_tc",
    )  # fmt: skip


def latent_of(config: Mapping[str, Any], name: str) -> LatentAttention:
    """Read the fields that DeepSeek-V3 gives its attention.

    Raises:
        UnsupportedModelError: a number is missing.
    """
    keys = {"q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "rope_dim": "qk_rope_head_dim", "nope_dim": "qk_nope_head_dim",
            "value_dim": "v_head_dim"}  # fmt: skip
    return LatentAttention(**{ours: size_of(config, name, theirs) for ours, theirs in keys.items()})


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
