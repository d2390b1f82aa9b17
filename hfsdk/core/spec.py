"""``ModelSpec``: a model as numbers, read of a ``config.json`` or of a preset.

Pure and frozen; nothing here loads a weight or asks a device. Parameter counts follow the tensor shapes of the Hugging
Face format exactly; FLOPs follow Kaplan et al. (arXiv 2001.08361, section 2.1): 2 per weight and token forward, twice
that again backward, plus the attention term.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from hfsdk.core.checks import (
    Count,
    Length,
    Name,
    NamedFields,
    NonNegative,
    OneOf,
    Positive,
    Within,
    check_fields,
    checked,
    is_whole,
    shown,
)
from hfsdk.core.errors import ModelNotFoundError, OptionError, UnsupportedModelError
from hfsdk.core.field_texts import documented
from hfsdk.core.rope import RopeScaling, YarnScaling, rope_parameters, rope_scaling
from hfsdk.core.text import nearest
from hfsdk.core.untrusted import has_file, read_json
from hfsdk.core.weight_files import own_head

# -- the keys of a config.json
#
# transformers is the reference. A key that only one of vLLM and transformers takes would give two models from one folder, and what
# an unknown key asks for would be left out in silence: both are refused. A key that is null says nothing.

CLASS_PREFIXES = {"llama": "Llama", "mistral": "Mistral", "phi3": "Phi3", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Family the engines know -> how transformers' class names of it begin."""

HEAD_CLASSES = {"lm": "ForCausalLM", "scalar": "ForSequenceClassification"}
"""Head of a model -> how transformers' class names with it end."""

SCALAR_HEAD_NAMES = ("score.weight", "value_head.weight")
"""Names of a scalar head in a model's folder; the first is transformers' and is the one that is written."""

FAMILIES = {prefix + end: family for family, prefix in CLASS_PREFIXES.items() for end in HEAD_CLASSES.values()}
"""Hugging Face architecture name -> family."""

MOST_LAYERS = 10_000
"""Most layers of a model whose folder is read; lists of weights are made for each."""

NEUTRAL: dict[str, tuple[Any, str]] = {
    "partial_rotary_factor": (1, "rotary positions over the whole head"),
    "rotary_pct": (1, "rotary positions over the whole head"),
    "rotary_emb_fraction": (1, "rotary positions over the whole head"),
    "rope_dim": (0, "rotary positions over the whole head"),
    "rope_interleaved": (False, "rotary positions in two halves"),
    "use_fope": (False, "rotary positions of one wave a dimension"),
    "alibi": (False, "rotary positions"),
    "mrope_section": ([], "positions of one number a token"),
    "quantization_config": ({}, "weights that are not quantized"),
    "compression_config": ({}, "weights that are not quantized"),
    "attn_logit_softcapping": (0, "attention without a cap"),
    "final_logit_softcapping": (0, "logits without a cap"),
    "logit_scale": (1, "logits as they are"),
    "head_dtype": ("model", "a head in the dtype of the model"),
    "is_causal": (True, "attention to what came before"),
    "dual_chunk_attention_config": ({}, "attention over the whole text at once"),
    "llama_4_scaling": ({}, "attention of one scale at every position"),
    "ada_rms_norm_t_cond": (False, "norms without a condition"),
    "qk_norm": (False, "queries and keys as the family has them"),
    "use_qk_norm": (False, "queries and keys as the family has them"),
    "use_mrope": (False, "positions of one number a token"),
    "lm_head_bias": (False, "a head without a bias"),
    "embedding_multiplier": (1, "embeddings as they are"),
    "residual_multiplier": (1, "sums without a weight"),
    "logits_scaling": (1, "logits as they are"),
    "full_attn_mod": (1, "attention of one kind in every layer"),
    "interpolate_factor": (1, "rotary positions as the rope parameters say"),
    "is_encoder_decoder": (False, "a decoder alone"),
    "add_cross_attention": (False, "a decoder alone"),
    "tie_encoder_decoder": (False, "a decoder alone"),
    "pruned_heads": ({}, "all heads of a layer"),
    "fusion_config": ({}, "the layers of the family"),
    "transformers_weights": ("model.safetensors", "weights that lie in model.safetensors, or in the files that its index names"),
}
"""Key of a ``config.json`` that changes what is computed and that the engines do not take -> its neutral value, and what they run.

Dropout (:data:`WITHOUT_EFFECT`) is left out: RLHF trains without."""

SAMPLING = (
    "temperature", "top_k", "top_p", "do_sample", "max_length", "max_new_tokens", "num_return_sequences", "min_length", "num_beams",
    "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping", "repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "typical_p", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "exponential_decay_length_penalty", "remove_invalid_values",
)  # fmt: skip
"""How texts are drawn, as transformers before 5 wrote it into every model's config; ``generate`` is told by its arguments."""

WITHOUT_EFFECT = {
    "where the file comes from": (
        "transformers_version", "_name_or_path", "name_or_path", "_model_name_or_path", "_commit_hash", "_from_auto",
        "_from_pipeline", "_configuration_file", "_auto_class", "auto_map", "custom_pipelines", "finetuning_task",
        "task_specific_params", "is_llama_config", "transformers.js_config", "unsloth_fixed", "unsloth_version",
        "trust_remote_code",
    ),
    "the dtype of the file": ("dtype", "torch_dtype", "use_bfloat16"),
    "what weights are drawn from": ("initializer_range", "initializer_factor"),
    "how it is trained": (
        "attention_dropout", "resid_pdrop", "embd_pdrop", "dropout", "hidden_dropout", "mlp_dropout", "hidden_dropout_prob",
        "attention_probs_dropout_prob", "gradient_checkpointing",
    ),
    "how it is computed, and not what": (
        "use_cache", "pretraining_tp", "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
        "_attn_implementation_autoset", "_flash_attn_2_enabled", "use_flash_attn", "use_flash_attention", "use_flash_attention_2",
        "use_sdpa", "chunk_size_feed_forward", "torchscript", "tf_legacy_loss", "xla_device", "cache_implementation",
    ),
    "what transformers returns": (
        "return_dict", "output_attentions", "_output_attentions", "output_hidden_states", "output_scores",
        "return_dict_in_generate",
    ),
    "tokens; ends of a text are read by themselves": (
        "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
        "decoder_start_token_id", "tokenizer_class", "prefix",
    ),
    "labels; how many there are is told by the head": ("id2label", "label2id", "num_labels", "problem_type"),
    "other names of a longest text": ("max_sequence_length", "max_seq_len", "seq_length", "model_max_length", "n_positions"),
    "of layers with a window, which are refused": ("max_window_layers",),
    "of kinds of model that these are not": ("is_decoder", "cross_attention_hidden_size"),
    "what a scorer of hfsdk's adds": ("hfsdk_score",),
    "how texts are drawn": SAMPLING,
}  # fmt: skip
"""Keys of a ``config.json`` that change no number of a model's, by their subject."""


READ = (
    "architectures", "model_type",
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "sliding_window",
    "use_sliding_window",
)  # fmt: skip
"""Keys that decide the computation, except those of rotary positions."""

READ_BESIDE = (
    "layer_types", "bias", "qkv_bias", "rope_scaling", "rope_parameters", "rope_theta", "original_max_position_embeddings",
)  # fmt: skip
"""Keys that are read too, and of which no library is told but by the others."""

READ_OF_ROPE = (
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "beta_fast", "beta_slow", "attention_factor", "truncate", "mscale", "mscale_all_dim",
)  # fmt: skip
"""Keys of the rotary positions."""

KNOWN = frozenset((*READ, *READ_BESIDE, *NEUTRAL, *(key for keys in WITHOUT_EFFECT.values() for key in keys)))
"""Keys of a ``config.json`` that hfsdk knows."""

KNOWN_OF_ROPE = frozenset((*READ_OF_ROPE, *NEUTRAL, "finetuned"))
"""Keys of rope parameters that it knows; ``finetuned`` is a note of YaRN's authors."""


def only_read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checked config with the keys that are read and no other: nobody knows what a library would do with the rest.

    transformers makes a list of ``num_labels`` labels, however many these are.
    """
    read_keys = {key: config[key] for key in READ if config.get(key) is not None}
    architectures = [name for name in config["architectures"] if isinstance(name, str) and name in FAMILIES]
    read_keys |= {"architectures": architectures[:1], "model_type": FAMILIES[architectures[0]]}
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key):
            read_keys[key] = {name: config[key][name] for name in READ_OF_ROPE if config[key].get(name) is not None}
            break
    rope = read_keys.get("rope_scaling") or read_keys.get("rope_parameters") or {}
    if (rope.get("rope_type") or rope.get("type") or "default") != "default":
        read_keys |= {key: config[key] for key in ("original_max_position_embeddings",) if key in config}
    if "rope_theta" not in rope and config.get("rope_theta"):
        read_keys["rope_theta"] = config["rope_theta"]
    return read_keys


def require(condition: bool, name: str, has: str, runs: str) -> None:
    """Refuse a model with anything that hfsdk does not run.

    Raises:
        UnsupportedModelError: the condition does not hold.
    """
    if not condition:
        raise UnsupportedModelError(f"{name} has {has}; hfsdk runs {runs}. Use another model.")


def size_of(config: Mapping[str, Any], name: str, key: str, most: int = 10**9) -> int:
    """Return one size of a config, which is a whole number above 0 and of at most ``most``.

    Raises:
        UnsupportedModelError: it is missing, or another thing.
    """
    size: Any = config.get(key)
    if not is_whole(size) or not 0 < size <= most:
        raise UnsupportedModelError(
            f"the config of {name} has {key}={shown(size)}; a whole number from 1 to {most:,} is needed. Mend it."
        )
    return int(size)


def flag_of(config: Mapping[str, Any], name: str, key: str, default: bool = False) -> bool:
    """Return whether a config says yes to something; null is no.

    Raises:
        UnsupportedModelError: it is neither yes nor no: the text "false" is true to one reader and false to another.
    """
    flag: Any = config.get(key, default)
    if flag not in (None, True, False):
        raise UnsupportedModelError(f"the config of {name} has {key}={shown(flag)}; true or false is needed. Mend it.")
    return bool(flag)


def family_of(config: Mapping[str, Any], name: str) -> str:
    """Return the family of a config's architecture.

    Raises:
        UnsupportedModelError: it is one that the engines do not run.
    """
    architectures = config.get("architectures") or []
    known_families = [a for a in architectures if isinstance(a, str) and a in FAMILIES] if isinstance(architectures, list) else []
    if not known_families:
        listed_architectures = ", ".join(map(shown, architectures[:4])) if isinstance(architectures, list) else shown(architectures)
        raise UnsupportedModelError(
            f"{name} has architecture {listed_architectures or 'none'}; hfsdk runs {', '.join(sorted(FAMILIES))}. "
            "Use a model of one of these architectures."
        )
    class_name = known_families[0]
    family = FAMILIES[class_name]
    kind = config.get("model_type")  # by which transformers chooses the model
    require(
        kind in (None, family), name, f"model_type={shown(kind)} beside {class_name}", f"{class_name} with model_type={family!r}"
    )
    return family


def check_neutral(config: Mapping[str, Any], rope: Mapping[str, Any], name: str) -> None:
    """Refuse what no family has: another activation, every key of :data:`NEUTRAL` with another value, and keys that are unknown.

    Raises:
        UnsupportedModelError: names the key and what hfsdk runs.
    """
    activation = config.get("hidden_act", "silu")
    require(activation == "silu", name, f"activation {shown(activation)}", "silu")
    for key, (neutral, words) in NEUTRAL.items():
        for where in (config, rope):
            value = where.get(key)
            require(value is None or value == neutral, name, f"{key}={shown(value)}", words)
    for where, known_keys in ((config, KNOWN), (rope, KNOWN_OF_ROPE)):
        check_known(where, known_keys, name)


def check_known(config: Mapping[str, Any], known_keys: Collection[str], name: str) -> None:
    """Refuse keys that nobody here knows, and that say something.

    Raises:
        UnsupportedModelError: names them.
    """
    unknown = [key for key, value in config.items() if key not in known_keys and value is not None]
    if unknown:
        listed = ", ".join(f"{shown(key)}: {shown(config[key])}" for key in unknown[:5])
        raise UnsupportedModelError(
            f"{name} has keys that hfsdk does not know, {listed}: what they ask for would be left out. Take out those that change "
            "nothing, or use another model."
        )


def biases_of(config: Mapping[str, Any], family: str, name: str) -> tuple[bool, bool]:
    """Return whether attention's and the MLP's linear layers have biases, where that is an option: with llama.

    Raises:
        UnsupportedModelError: the family has none in one of the engines, or only some of them are asked for.
    """
    attention, mlp = (flag_of(config, name, key) for key in ("attention_bias", "mlp_bias"))
    if family != "llama":
        require(not attention, name, "attention_bias=true", f"attention_bias=false with {family}")
        require(not mlp, name, "mlp_bias=true", f"mlp_bias=false with {family}")
    if family not in ("qwen2", "qwen3"):  # which vLLM runs by the code of its Llama: that has more names for biases
        require(not flag_of(config, name, "bias"), name, "bias=true", "biases that are named attention_bias and mlp_bias")
        alike = flag_of(config, name, "qkv_bias", attention) == attention
        require(alike, name, f"qkv_bias={shown(config.get('qkv_bias'))}", "attention_bias for all four of its layers")
    return attention, mlp


def window_of(config: Mapping[str, Any], family: str, name: str) -> int | None:
    """Return how many tokens each token sees, itself included, in every layer; ``None``: all of them.

    A window as long as the longest text is none.

    Raises:
        UnsupportedModelError: some layers have one and others none, or it is one that one engine takes and the other does not.
    """
    layers = config.get("layer_types") or []
    whole = isinstance(layers, list) and all(layer == "full_attention" for layer in layers)
    windowed = flag_of(config, name, "use_sliding_window") or not whole
    require(not windowed, name, "layers with a sliding window", "attention over the whole text")
    if family in ("qwen2", "qwen3"):  # there use_sliding_window decides
        return None
    window = config.get("sliding_window", 4096 if family == "mistral" else None)
    if window is None or (is_whole(window) and window >= size_of(config, name, "max_position_embeddings")):
        return None
    if family == "llama":
        require(window == 0, name, f"sliding_window={shown(window)}", "llama without a window, as transformers does")
        return None
    require(is_whole(window) and window > 0, name, f"sliding_window={shown(window)}", "a window of one token or more, or null")
    return int(window)


def check_heads(family: str, hidden_size: int, num_heads: int, name: str) -> None:
    """Refuse a Llama whose width is no multiple of its heads: transformers and vLLM do so too, even with another ``head_dim``.

    Raises:
        UnsupportedModelError: names both numbers, and the class that computes the same and is taken.
    """
    if family == "llama" and hidden_size % num_heads:
        raise UnsupportedModelError(
            f"{name} has hidden_size={hidden_size} and num_attention_heads={num_heads}; transformers and vLLM take a Llama only "
            "where the first is a multiple of the second, whatever head_dim says. Without biases a Mistral computes the same, and "
            'is taken: say "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": null in its '
            "config.json."
        )


def kv_heads_of(config: Mapping[str, Any], family: str, num_heads: int) -> Any:
    """Return the key/value heads; where they are not named, transformers' default."""
    return config.get("num_key_value_heads", 8 if family == "mistral" else num_heads) or num_heads


# -- mixtures of experts and latent attention, for planning and simulation only

Some = Annotated[int, Within(1, 10**6)]
Further = Annotated[int, Within(0, 10**6)]


@documented
@dataclass(frozen=True, kw_only=True)
class Experts(NamedFields):
    """The sparse layers of a mixture of experts: a router [E, h] sends each token to *k* of *E* experts, small gated MLPs.

    The layers before ``first_dense`` have one MLP of ``mlp_hidden_size`` each. In the layers after them a token sees k experts and
    the shared ones, each of ``width``.
    """

    count: Some
    """E: experts of a sparse layer that the router chooses from."""
    per_token: Some
    """k: experts that each token is sent to."""
    width: Some
    """Width inside each expert's gated MLP (``moe_intermediate_size``)."""
    shared: Further = 0
    """Experts of that width that see every token in addition to the chosen ones (``n_shared_experts``)."""
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
    """Attention whose keys and values come from one compressed vector a token (MLA, arXiv 2405.04434, section 2.1).

    The cache keeps that vector for all heads, and no keys and values.
    """

    q_rank: Some
    """Width of the compressed queries (``q_lora_rank``)."""
    kv_rank: Some
    """Width of the compressed keys and values, which the cache holds (``kv_lora_rank``)."""
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
        """Mean width of a head's products with scores and with values, from which attention's FLOPs come."""
        return (self.nope_dim + self.rope_dim + self.value_dim) // 2


def latent_tensors(attention: LatentAttention, hidden: int, heads: int) -> dict[str, tuple[int, ...]]:
    """Return a layer's weights by Hugging Face name; ``o_proj`` and those that end in ``_b_proj`` are cut over heads."""
    return {
        "q_a_proj.weight": (attention.q_rank, hidden),
        "q_a_layernorm.weight": (attention.q_rank,),
        "q_b_proj.weight": (heads * (attention.nope_dim + attention.rope_dim), attention.q_rank),
        "kv_a_proj_with_mqa.weight": (attention.kv_rank + attention.rope_dim, hidden),
        "kv_a_layernorm.weight": (attention.kv_rank,),
        "kv_b_proj.weight": (heads * (attention.nope_dim + attention.value_dim), attention.kv_rank),
        "o_proj.weight": (hidden, heads * attention.value_dim),
    }


def refuse_experts(what: str, experts: object, name: str) -> None:
    """Refuse features that are not modelled for mixtures of experts.

    Raises:
        UnsupportedModelError: the model is one.
    """
    if experts is not None:
        raise UnsupportedModelError(f"{shown(name)} is a mixture of experts; {what} knows dense models only. Use a dense model.")


DTYPE_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes per element of the dtypes that hfsdk trains and generates in."""

Dtype = Annotated[str, OneOf(*DTYPE_BYTES)]

Heads = Annotated[int, Within(1, 10**5)]
Width = Annotated[int, Within(1, 10**7)]
"""Sizes of a model, bounded by some hundred times those of the largest models, so that a slip is told."""


@documented
@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The architecture of a causal language model (decoder only, RMSNorm, gated MLP, rotary positions).

    Families differ in the attention: ``qwen2`` adds a bias to queries, keys and values (arXiv 2407.10671), ``qwen3`` norms
    each head's queries and keys instead (arXiv 2505.09388), ``llama``, ``mistral`` (2310.06825) and ``phi3`` (2404.14219) do
    neither. A Phi-3's files hold queries, keys and values as one tensor, gate and up-projection as another.

    Example: ``ModelSpec.from_folder(path).num_parameters()``.
    """

    name: Annotated[str, Length(0, 200, encoded=False)]
    """A short name for messages and pictures, e.g. ``"SmolLM2-135M"``."""
    family: Annotated[str, OneOf(*CLASS_PREFIXES)] = "llama"
    """``"llama"``, ``"mistral"``, ``"phi3"``, ``"qwen2"`` or ``"qwen3"``."""
    num_layers: Annotated[int, Within(1, 10_000)]
    """Transformer blocks."""
    hidden_size: Width
    """Width of the residual stream."""
    mlp_hidden_size: Width
    """Width inside the gated MLP (``intermediate_size`` in ``config.json``)."""
    num_heads: Heads
    """Query heads."""
    num_kv_heads: Heads
    """Key/value heads; fewer than ``num_heads`` is grouped-query attention."""
    head_dim: Heads
    """Size of one head; need not be ``hidden_size / num_heads``."""
    vocab_size: Annotated[int, Within(1, 10**8)]
    """Rows of the embedding as stored, without any engine's padding."""
    max_positions: Count
    """Longest sequence, in tokens."""
    tied_embeddings: bool = False
    """Whether input and output embedding are one matrix."""
    norm_eps: Positive = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: Positive = 10000.0
    """Base of the rotary angles."""
    rope_scaling: RopeScaling | YarnScaling | None = None
    """The stretched positions of rope type ``llama3`` or ``yarn``; ``None``: rotary positions as they are."""
    attention_bias: bool = False
    """Whether queries, keys, values and the output of attention have a bias; for llama alone."""
    mlp_bias: bool = False
    """Whether the three layers of the MLP have a bias; for llama alone."""
    sliding_window: Count | None = None
    """How many tokens each token sees, itself included; ``None``: all before it."""
    experts: Experts | None = None
    """The sparse layers of a mixture of experts, for planning and simulation. ``None``: every layer has one MLP."""
    latent: LatentAttention | None = None
    """Attention with compressed keys and values, for the same; ``num_kv_heads`` is 1 then, as all heads share them."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_heads % self.num_kv_heads:
            raise OptionError(
                f"{self.name}: num_kv_heads must divide num_heads; got num_kv_heads={self.num_kv_heads}, num_heads={self.num_heads}"
            )
        if (self.attention_bias or self.mlp_bias) and self.family != "llama":
            raise OptionError(f"{self.name}: attention_bias and mlp_bias are options of llama; got family={self.family!r}")
        if self.experts is not None and self.experts.first_dense >= self.num_layers:
            raise OptionError(
                f"{self.name}: experts.first_dense={self.experts.first_dense} of num_layers={self.num_layers} leaves no layer with "
                "experts; give fewer, or experts=None for a dense model"
            )

    @classmethod
    @checked
    def from_hf_config(cls, config: Mapping[str, Any], name: Annotated[str, Length(0, 200, encoded=False)] = "model") -> ModelSpec:
        """Read a Hugging Face ``config.json`` given as a dict.

        Raises:
            UnsupportedModelError: the architecture, activation, rope type, a sliding window or a bias is one the engines do not
                run, or a number is missing or none.
        """
        name = name if name.isprintable() else shown(name)
        family, rope = family_of(config, name), rope_parameters(config, name)
        check_neutral(config, rope, name)
        attention_bias, mlp_bias = biases_of(config, family, name)
        num_heads, hidden_size = (size_of(config, name, key) for key in ("num_attention_heads", "hidden_size"))
        check_heads(family, hidden_size, num_heads, name)
        return cls(
            name=name,
            family=family,
            num_layers=size_of(config, name, "num_hidden_layers", MOST_LAYERS),
            hidden_size=hidden_size,
            mlp_hidden_size=size_of(config, name, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=kv_heads_of(config, family, num_heads),
            head_dim=config.get("head_dim") or (128 if family == "qwen3" else hidden_size // num_heads),
            vocab_size=size_of(config, name, "vocab_size"),
            max_positions=size_of(config, name, "max_position_embeddings"),
            tied_embeddings=flag_of(config, name, "tie_word_embeddings"),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
            rope_scaling=rope_scaling(config, rope, family, name),
            attention_bias=attention_bias,
            mlp_bias=mlp_bias,
            sliding_window=window_of(config, family, name),
        )

    @classmethod
    @checked
    def from_folder(cls, folder: str | Path) -> ModelSpec:
        """Read ``folder/config.json``; where it ties a head to the embeddings and the files have another one, theirs counts.

        Raises:
            ModelNotFoundError: the folder has no ``config.json``, or one that cannot be read.
            UnsupportedModelError: as :meth:`from_hf_config`, and where a number is out of its range.
        """
        if not has_file(folder, "config.json"):
            raise ModelNotFoundError(
                f"{shown(str(folder))} has no config.json; a model folder holds config.json and *.safetensors as "
                "transformers' save_pretrained writes them. Check the path."
            )
        config = read_json(folder, "config.json")
        try:
            spec = cls.from_hf_config(config, name=Path(folder).resolve().name[:200] or "model")
            return replace(spec, tied_embeddings=spec.tied_embeddings and not own_head(folder))
        except (OptionError, UnsupportedModelError) as error:
            raise UnsupportedModelError(f"{folder}/config.json: {error}") from None

    @classmethod
    @checked
    def preset(cls, name: Name) -> ModelSpec:
        """Return a published architecture by name, for planning and simulation.

        Raises:
            ModelNotFoundError: no preset has this name.
        """
        if name not in PRESETS:
            nearest_names = nearest(name, PRESETS)
            raise ModelNotFoundError(f"no model preset {shown(name)}; {nearest_names}. Or give its numbers: hf.ModelSpec(...)")
        return PRESETS[name]

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return self.family == "qwen2" or self.attention_bias

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys go through a norm."""
        return self.family == "qwen3"

    @property
    def fused(self) -> bool:
        """Whether files hold queries, keys and values, and gate and up-projection, as one tensor each."""
        return self.family == "phi3"

    @checked
    def class_name(self, head: Annotated[str, OneOf(*HEAD_CLASSES)] = "lm") -> str:
        """Return the name of transformers' class with this head, ``"lm"`` or ``"scalar"``."""
        return CLASS_PREFIXES[self.family] + HEAD_CLASSES[head]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every weight as ``{Hugging Face name: shape}``, in file order."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            prefix = f"model.layers.{i}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes |= {f"{prefix}self_attn.{name}": shape for name, shape in self._attention_tensors().items()}
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            sparse = self.experts is not None and i >= self.experts.first_dense
            mlp = self._expert_tensors() if sparse else self._mlp_tensors(self.mlp_hidden_size)
            shapes |= {f"{prefix}mlp.{name}": shape for name, shape in mlp.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def _attention_tensors(self) -> dict[str, tuple[int, ...]]:
        hidden, query, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if self.latent is not None:
            return latent_tensors(self.latent, hidden, self.num_heads)
        rows = {"qkv_proj": query + 2 * kv} if self.fused else {"q_proj": query, "k_proj": kv, "v_proj": kv}
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (count, hidden) for name, count in rows.items()}
        shapes["o_proj.weight"] = (hidden, query)
        if self.qkv_bias:
            shapes |= {f"{name}.bias": (count,) for name, count in rows.items()}
        if self.attention_bias:
            shapes["o_proj.bias"] = (hidden,)
        if self.qk_norm:
            shapes |= {f"{x}_norm.weight": (self.head_dim,) for x in "qk"}
        return shapes

    def _mlp_tensors(self, width: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        rows = {"gate_up_proj": 2 * width} if self.fused else {"gate_proj": width, "up_proj": width}
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (count, hidden) for name, count in rows.items()}
        shapes["down_proj.weight"] = (hidden, width)
        if self.mlp_bias:
            shapes |= {f"{name}.bias": (count,) for name, count in (*rows.items(), ("down_proj", hidden))}
        return shapes

    def _expert_tensors(self) -> dict[str, tuple[int, ...]]:
        assert self.experts is not None
        shapes: dict[str, tuple[int, ...]] = {"gate.weight": (self.experts.count, self.hidden_size)}
        if self.experts.router_bias:
            shapes["gate.e_score_correction_bias"] = (self.experts.count,)
        each = self._mlp_tensors(self.experts.width)
        shapes |= {f"experts.{e}.{name}": shape for e in range(self.experts.count) for name, shape in each.items()}
        if self.experts.shared:
            together = self._mlp_tensors(self.experts.shared * self.experts.width)
            shapes |= {f"shared_experts.{name}": shape for name, shape in together.items()}
        return shapes

    @property
    def routed_parameters(self) -> int:
        """Weights of all experts that a router chooses from; 0 of a dense model."""
        if self.experts is None:
            return 0
        sparse = self.num_layers - self.experts.first_dense
        return sparse * self.experts.count * 3 * self.hidden_size * self.experts.width

    @property
    def mlp_width_per_token(self) -> int:
        """Width inside the MLPs that one token goes through, the mean of the layers."""
        experts = self.experts
        if experts is None:
            return self.mlp_hidden_size
        sparse = (self.num_layers - experts.first_dense) * (experts.per_token + experts.shared) * experts.width
        return (sparse + experts.first_dense * self.mlp_hidden_size) // self.num_layers

    def num_active_parameters(self) -> int:
        """Count the weights that one token goes through: of the experts those it is sent to."""
        if self.experts is None:
            return self.num_parameters()
        unused = self.routed_parameters * (self.experts.count - self.experts.per_token) // self.experts.count
        return self.num_parameters() - unused

    def num_parameters(self) -> int:
        """Count the weights (tied embeddings once)."""
        return sum(math.prod(shape) for shape in self.tensors().values())

    @checked
    def num_bytes(self, dtype: Dtype = "bf16") -> int:
        """Return the bytes of one copy of the weights in ``dtype``."""
        return self.num_parameters() * DTYPE_BYTES[dtype]

    @checked
    def forward_flops(self, num_tokens: Annotated[int, Within(0, 10**15)], context_tokens: NonNegative) -> float:
        """Return the FLOPs of one forward pass over ``num_tokens`` that each see ``context_tokens`` on average."""
        matmul = self.num_active_parameters() - (0 if self.tied_embeddings else self.vocab_size * self.hidden_size)
        seen = context_tokens if self.sliding_window is None else min(context_tokens, self.sliding_window)
        attention = 2 * self.num_layers * seen * self.num_heads * self.head_dim
        return 2.0 * num_tokens * (matmul + attention)

    @checked
    def kv_bytes_per_token(self, dtype: Dtype = "bf16") -> int:
        """Return the bytes of key and value cache one token needs over all layers."""
        if self.latent is not None:
            return self.num_layers * (self.latent.kv_rank + self.latent.rope_dim) * DTYPE_BYTES[dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def __str__(self) -> str:
        return self.name


Sizes = tuple[int, int, int, int, int]
"""Layers, hidden size, MLP hidden size, query heads, key/value heads."""

LLAMA_SIZES: dict[str, Sizes] = {
    "llama-7b": (32, 4096, 11008, 32, 32), "llama-13b": (40, 5120, 13824, 40, 40), "llama-33b": (60, 6656, 17920, 52, 52),
    "llama-34b": (48, 8192, 22016, 64, 8), "llama-65b": (80, 8192, 22016, 64, 64), "llama-70b": (80, 8192, 28672, 64, 8),
}  # fmt: skip
"""Llama 2 (arXiv 2307.09288), its size 34b as Code Llama (2308.12950) has it, and 33b and 65b of the first Llama (2302.13971)."""

LLAMA3_SIZES: dict[str, Sizes] = {
    "llama3-1b": (16, 2048, 8192, 32, 8), "llama3-3b": (28, 3072, 8192, 24, 8), "llama3-8b": (32, 4096, 14336, 32, 8),
    "llama3-70b": (80, 8192, 28672, 64, 8), "llama3-405b": (126, 16384, 53248, 128, 8),
}  # fmt: skip
"""Llama 3, 3.1 and, below 8b, 3.2 (arXiv 2407.21783 and the published configs); the rope of 3.1 changes no size."""

QWEN_SIZES: dict[str, Sizes] = {
    "qwen2.5-0.5b": (24, 896, 4864, 14, 2), "qwen2.5-1.5b": (28, 1536, 8960, 12, 2), "qwen2.5-3b": (36, 2048, 11008, 16, 2),
    "qwen2.5-7b": (28, 3584, 18944, 28, 4), "qwen2.5-14b": (48, 5120, 13824, 40, 8), "qwen2.5-32b": (64, 5120, 27648, 40, 8),
    "qwen2.5-72b": (80, 8192, 29568, 64, 8),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8), "qwen3-1.7b": (28, 2048, 6144, 16, 8), "qwen3-4b": (36, 2560, 9728, 32, 8),
    "qwen3-8b": (36, 4096, 12288, 32, 8), "qwen3-14b": (40, 5120, 17408, 40, 8), "qwen3-32b": (64, 5120, 25600, 64, 8),
}  # fmt: skip
"""Qwen2.5 (arXiv 2412.15115) and the dense models of Qwen3 (2505.09388), and the published configs."""

SMOLLM2_SIZES: dict[str, Sizes] = {
    "smollm2-135m": (30, 576, 1536, 9, 3), "smollm2-360m": (32, 960, 2560, 15, 5), "smollm2-1.7b": (24, 2048, 8192, 32, 32),
}  # fmt: skip
"""SmolLM2 (arXiv 2502.02737) and the published configs."""

TIED = ("llama3-1b", "llama3-3b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")
"""The sizes of presets whose output layer is the embedding; SmolLM2's all are."""


_QWEN3 = {"family": "qwen3", "head_dim": 128, "vocab_size": 151936, "max_positions": 40960, "norm_eps": 1e-6, "rope_theta": 1e6}


def _preset(name: str, sizes: Sizes, **more: Any) -> ModelSpec:
    layers, hidden, mlp, heads, kv_heads = sizes
    more = {"head_dim": hidden // heads, "tied_embeddings": name in TIED, **more}
    return ModelSpec(
        name=name, num_layers=layers, hidden_size=hidden, mlp_hidden_size=mlp, num_heads=heads, num_kv_heads=kv_heads, **more
    )


def _qwen(name: str, sizes: Sizes) -> ModelSpec:
    common = {"norm_eps": 1e-6, "rope_theta": 1e6}
    if name.startswith("qwen3"):
        return _preset(name, sizes, **_QWEN3)
    vocab = 151936 if name in TIED else 152064
    return _preset(name, sizes, family="qwen2", vocab_size=vocab, max_positions=32768, **common)


_EXPERTS: dict[str, tuple[Sizes, Experts, dict[str, Any]]] = {
    "mixtral-8x7b": ((32, 4096, 14336, 32, 8), Experts(count=8, per_token=2, width=14336),
                     {"vocab_size": 32000, "max_positions": 32768, "rope_theta": 1e6}),
    "qwen3-30b-a3b": ((48, 2048, 6144, 32, 4), Experts(count=128, per_token=8, width=768), _QWEN3),
    "qwen3-235b-a22b": ((94, 4096, 12288, 64, 4), Experts(count=128, per_token=8, width=1536), _QWEN3),
    "deepseek-v3": ((61, 7168, 18432, 128, 1),
                    Experts(count=256, per_token=8, width=2048, shared=1, first_dense=3, router_bias=True),
                    {"vocab_size": 129280, "max_positions": 163840, "norm_eps": 1e-6, "head_dim": 160,
                     "latent": LatentAttention(q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)}),
}  # fmt: skip
"""Mixtral (arXiv 2401.04088), Qwen3 (2505.09388), DeepSeek-V3 without its multi-token prediction (2412.19437)."""

PRESETS: dict[str, ModelSpec] = {
    **{name: _preset(name, sizes, vocab_size=32000, max_positions=4096) for name, sizes in LLAMA_SIZES.items()},
    **{name: _preset(name, sizes, vocab_size=128256, max_positions=8192, rope_theta=5e5) for name, sizes in LLAMA3_SIZES.items()},
    **{name: _qwen(name, sizes) for name, sizes in QWEN_SIZES.items()},
    **{
        name: _preset(name, sizes, vocab_size=49152, max_positions=8192, rope_theta=1e5, tied_embeddings=True)
        for name, sizes in SMOLLM2_SIZES.items()
    },
    **{name: _preset(name, sizes, experts=experts, **more) for name, (sizes, experts, more) in _EXPERTS.items()},
}
"""Published architectures by name, for planning and simulation."""
