"""What a Hugging Face ``config.json`` says, key by key: each is read here, is known to change no number, or is refused.

transformers is the reference. A key that vLLM's model takes and transformers' does not (or the other way round) would give two
models from one folder, so it is refused as well. So is a key that nobody here knows: what it asks for would be left out in silence.
A key that is null says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hfsdk.core.checks import is_whole, shown
from hfsdk.core.errors import UnsupportedModelError

CLASS_PREFIXES = {"llama": "Llama", "mistral": "Mistral", "phi3": "Phi3", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Family the engines know -> how transformers' class names of it begin."""

HEAD_CLASSES = {"lm": "ForCausalLM", "scalar": "ForSequenceClassification"}
"""Head of a model -> how transformers' class names with it end."""

SCALAR_HEAD_NAMES = ("score.weight", "value_head.weight")
"""Names of a scalar head in a model's folder; the first is transformers' and what is written."""

FAMILIES = {prefix + end: family for family, prefix in CLASS_PREFIXES.items() for end in HEAD_CLASSES.values()}
"""Hugging Face architecture name -> family."""

MOST_LAYERS = 10_000
"""Of a model whose folder is read; for each of them lists of weights are made."""

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
"""Keys of a ``config.json`` that change no number of a model's: what they are about -> which."""


READ = (
    "architectures", "model_type",
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "sliding_window",
    "use_sliding_window",
)  # fmt: skip
"""Keys that say what is computed, but for the rotary positions."""

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
    """Return a checked config with what is read of it, and no other key: what a library makes of those nobody has looked at.

    transformers makes a list of ``num_labels`` labels, however many these are.
    """
    found = {key: config[key] for key in READ if config.get(key) is not None}
    known = [one for one in config["architectures"] if isinstance(one, str) and one in FAMILIES]
    found |= {"architectures": known[:1], "model_type": FAMILIES[known[0]]}
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key):
            found[key] = {name: config[key][name] for name in READ_OF_ROPE if config[key].get(name) is not None}
            break
    rope = found.get("rope_scaling") or found.get("rope_parameters") or {}
    if (rope.get("rope_type") or rope.get("type") or "default") != "default":
        found |= {key: config[key] for key in ("original_max_position_embeddings",) if key in config}
    if "rope_theta" not in rope and config.get("rope_theta"):
        found["rope_theta"] = config["rope_theta"]
    return found


def require(condition: bool, name: str, has: str, runs: str) -> None:
    """Refuse a model that has something else than what hfsdk runs.

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
    known = [a for a in architectures if isinstance(a, str) and a in FAMILIES] if isinstance(architectures, list) else []
    if not known:
        given = ", ".join(map(shown, architectures[:4])) if isinstance(architectures, list) else shown(architectures)
        raise UnsupportedModelError(
            f"{name} has architecture {given or 'none'}; hfsdk runs {', '.join(sorted(FAMILIES))}. "
            "Use a model of one of these architectures."
        )
    family = FAMILIES[known[0]]
    kind = config.get("model_type")  # by which transformers chooses the model
    require(kind in (None, family), name, f"model_type={shown(kind)} beside {known[0]}", f"{known[0]} with model_type={family!r}")
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
    for where, known in ((config, KNOWN), (rope, KNOWN_OF_ROPE)):
        check_known(where, known, name)


def check_known(config: Mapping[str, Any], known: Collection[str], name: str) -> None:
    """Refuse keys that nobody here knows, and that say something.

    Raises:
        UnsupportedModelError: names them.
    """
    unknown = [key for key, value in config.items() if key not in known and value is not None]
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
    """Refuse a Llama whose width is no multiple of its heads: transformers and vLLM do, whatever ``head_dim`` says.

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
    """Return the key/value heads; where they are not named, what transformers takes."""
    return config.get("num_key_value_heads", 8 if family == "mistral" else num_heads) or num_heads
