"""The keys of a ``generation_config.json``, one by one: how a model's author would have its texts drawn.

A rollout draws as ``generate`` is told by its arguments, and ends a response where the file says so (:mod:`turn_ends`). Penalties,
beams and constraints are not there: a response that is learned from must follow the distribution it was drawn from. Many published
models ask for one all the same, so it is told and not refused. A key that nobody here knows is refused, as one of ``config.json``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hfsdk.core.spec import check_known
from hfsdk.core.turn_ends import GENERATION
from hfsdk.core.untrusted import has_file, read_json

WITHOUT_EFFECT = {
    "ends of a text, read by themselves": ("eos_token_id",),
    "what generate is told by its arguments": (
        "do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens", "min_new_tokens", "num_return_sequences",
    ),
    "tokens of other uses": ("bos_token_id", "pad_token_id", "decoder_start_token_id"),
    "where the file comes from": (
        "transformers_version", "_from_model_config", "_name_or_path", "_commit_hash", "unsloth_fixed", "trust_remote_code",
    ),
    "how it is computed, and not what": (
        "use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache", "low_memory", "use_mtp",
        "compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size", "speculation_type", "is_assistant",
        "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens",
        "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
    ),
    "what transformers returns": (
        "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    ),
    "of beams, which are told by their number": ("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups"),
    "logits that stay as they are": ("renormalize_logits", "remove_invalid_values"),
}  # fmt: skip
"""Keys that change no token which is drawn here, by their subject."""

NEUTRAL: dict[str, Any] = {
    "num_beams": 1, "penalty_alpha": 0, "dola_layers": [], "repetition_penalty": 1, "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": [], "force_words_ids": [], "constraints": [],
    "forced_bos_token_id": [], "forced_eos_token_id": [], "exponential_decay_length_penalty": [], "suppress_tokens": [],
    "begin_suppress_tokens": [], "sequence_bias": {}, "token_healing": False, "guidance_scale": 1, "watermarking_config": {},
    "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "min_p": 0, "top_h": 1, "min_length": 0, "stop_strings": [],
    "max_time": 0,
}  # fmt: skip
"""Keys that change which tokens are drawn, and that no rollout applies -> their neutral value."""

KNOWN = frozenset((*NEUTRAL, *(key for keys in WITHOUT_EFFECT.values() for key in keys)))


def not_applied(folder: str | Path) -> dict[str, Any]:
    """Return the requests of a folder's file that a rollout does not apply.

    Raises:
        ModelNotFoundError: the file is damaged.
        UnsupportedModelError: it has a key that hfsdk does not know.
    """
    config = read_json(folder, GENERATION) if has_file(folder, GENERATION) else {}
    check_known(config, KNOWN, f"{folder}/{GENERATION}")
    return {key: config[key] for key, neutral in NEUTRAL.items() if config.get(key, neutral) not in (None, neutral)}
