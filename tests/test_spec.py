import math

import pytest
from expect import each, refuses

from hfsdk.core.errors import UnsupportedModelError
from hfsdk.core.rope import RopeScaling, YarnScaling
from hfsdk.core.spec import PRESETS, ModelSpec

QWEN = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 260, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip


def read(prefix, **more):
    return ModelSpec.from_hf_config(QWEN | {"architectures": [f"{prefix}ForCausalLM"]} | more)


@each("prefix", ["Llama", "Qwen2", "Qwen3"])
@each("tied", [False, True])
def test_tensors_are_those_of_transformers(prefix, tied):
    import transformers
    from accelerate import init_empty_weights

    config = getattr(transformers, f"{prefix}Config")(**QWEN, head_dim=32, tie_word_embeddings=tied)
    with init_empty_weights(include_buffers=True):
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    spec = ModelSpec.from_hf_config(config.to_dict() | {"architectures": [type(model).__name__]})
    assert spec.tensors() == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert spec.num_parameters() == sum(math.prod(p.shape) for p in model.parameters())
    assert spec.class_name() == type(model).__name__
    assert hasattr(transformers, spec.class_name("scalar"))
    assert (spec.qkv_bias, spec.qk_norm) == (prefix == "Qwen2", prefix == "Qwen3")
    assert spec.rope_theta == 1e6


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_llama_3s_stretched_positions_are_read():
    stretched = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    assert read("Llama", rope_scaling=LLAMA3, rope_theta=5e5).rope_scaling == stretched  # as Llama-3.1's own config has it
    assert read("Llama", rope_parameters={**LLAMA3, "rope_theta": 5e5}).rope_scaling == stretched  # as transformers 5 writes it
    assert read("Llama", rope_parameters={**LLAMA3, "rope_theta": 5e5}).rope_theta == 5e5
    assert read("Llama").rope_scaling is None
    for key, value in [("factor", None), ("factor", "8"), ("original_max_position_embeddings", 0), ("low_freq_factor", 4.0)]:
        with refuses(UnsupportedModelError, "'llama3'", f"{key}="):
            read("Llama", rope_scaling={**LLAMA3, key: value})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@each(
    "more, expected",
    [
        ({}, {}), ({"attention_factor": 1.3}, {"attention_factor": 1.3}), ({"truncate": False}, {"truncate": False}),
        ({"beta_fast": 16, "beta_slow": 2.0}, {"beta_fast": 16.0, "beta_slow": 2.0}), ({"mscale": 0.7}, {}),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, {"attention_factor": (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)}),
        ({"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 1.1}, {"attention_factor": 1.1}),
        ({"attention_factor": None, "mscale": None}, {}),
    ],
)  # fmt: skip
def test_yarns_stretched_positions_are_read(more, expected):
    scaling = read("Qwen2", rope_scaling=YARN | more).rope_scaling
    assert scaling == YarnScaling(factor=4.0, original_max_positions=32, **expected)
    if not expected:
        assert scaling.attention == 0.1 * math.log(4) + 1
    assert read("Qwen2", rope_scaling=YARN | more, rope_parameters={"rope_type": "default"}).rope_scaling == scaling


def test_the_length_beside_the_rope_parameters_counts():
    """As in transformers: one outside comes first, then one inside, then the model's own length."""
    short = {key: value for key, value in YARN.items() if "original" not in key}
    assert read("Qwen3", rope_scaling=short).rope_scaling.original_max_positions == 128
    assert read("Qwen3", rope_scaling=YARN).rope_scaling.original_max_positions == 32
    assert read("Qwen3", rope_scaling=YARN, original_max_position_embeddings=64).rope_scaling.original_max_positions == 64


@each(
    "key, value",
    [
        ("factor", None), ("factor", 0.5), ("beta_fast", None), ("beta_fast", 0.5), ("truncate", "no"), ("attention_factor", 0),
        ("mscale", "1"), ("original_max_position_embeddings", None),
    ],
)  # fmt: skip
def test_yarn_with_a_number_that_is_none_is_refused(key, value):
    with refuses(UnsupportedModelError, "'yarn'", f"{key}="):
        read("Llama", rope_scaling={**YARN, key: value})


def test_positions_that_one_engine_lacks_are_refused():
    with refuses(UnsupportedModelError, "max_position_embeddings=129", 32, 128):
        read("Llama", rope_scaling=YARN, max_position_embeddings=129)
    with refuses(UnsupportedModelError, "for all layers"):
        read("Qwen3", rope_parameters={"full_attention": YARN})


def test_what_the_engines_do_not_run_is_refused():
    assert read("Qwen2", use_sliding_window=False, sliding_window=4096).family == "qwen2"
    assert read("Qwen3").head_dim == 128
    assert read("Qwen2").head_dim == 16
    for prefix in ("Qwen2", "Qwen3"):
        with refuses(UnsupportedModelError, "sliding window"):
            read(prefix, use_sliding_window=True)
        with refuses(UnsupportedModelError, "sliding window"):
            read(prefix, layer_types=["full_attention", "sliding_attention"])
        with refuses(UnsupportedModelError, "'longrope'"):
            read(prefix, rope_scaling={"type": "longrope", "factor": 4.0})
    for key, value in [
        ("partial_rotary_factor", 0.5), ("rope_interleaved", True), ("quantization_config", {"quant_method": "awq"}),
        ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0), ("logit_scale", 0.5), ("is_causal", False),
        ("dual_chunk_attention_config", {"chunk_size": 64}), ("mrope_section", [8, 12, 12]), ("rotary_pct", 0.5),
    ]:  # fmt: skip
        with refuses(UnsupportedModelError, f"{key}="):
            read("Qwen3", **{key: value})
    with refuses(UnsupportedModelError, "partial_rotary_factor=0.25"):
        read("Llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25})
    assert read("Llama", partial_rotary_factor=1.0, rope_interleaved=False, quantization_config=None) == read("Llama")
    for prefix in ("Mistral", "Phi3", "Qwen2", "Qwen3"):
        for key in ("attention_bias", "mlp_bias"):
            with refuses(UnsupportedModelError, f"{key}=true", f"{key}=false", prefix.lower()):
                read(prefix, **{key: True})
    for more in ({"bias": True}, {"qkv_bias": True}, {"attention_bias": True, "qkv_bias": False}):
        with refuses(UnsupportedModelError, "qkv_bias=" if "qkv_bias" in more else "bias="):
            read("Llama", **more)
    for rope_type in ("yarn", "longrope", "llama3"):
        with refuses(UnsupportedModelError, f"'{rope_type}'", "'default'"):
            read("Phi3", rope_scaling=YARN | {"rope_type": rope_type})
    with refuses(UnsupportedModelError, "Qwen2ForCausalLM"):
        read("Qwen2Moe")


@each(
    "prefix, window, taken",
    [
        ("Mistral", 16, 16), ("Mistral", None, None), ("Mistral", 128, None), ("Mistral", 127, 127), ("Phi3", 47, 47),
        ("Phi3", None, None), ("Llama", None, None), ("Llama", 0, None), ("Llama", 4096, None),
        ("Qwen2", 16, None), ("Qwen3", 16, None),
    ],
)  # fmt: skip
def test_the_window_is_the_one_that_transformers_takes(prefix, window, taken):
    assert read(prefix, sliding_window=window).sliding_window == taken


def test_a_window_that_one_engine_takes_alone_is_refused():
    with refuses(UnsupportedModelError, "sliding_window=16", "llama"):
        read("Llama", sliding_window=16)
    for window in (0, -1, "16"):
        with refuses(UnsupportedModelError, "sliding_window="):
            read("Mistral", sliding_window=window)
    assert read("Mistral", max_position_embeddings=8192).sliding_window == 4096  # transformers' own where the key is left out
    assert read("Phi3", max_position_embeddings=8192).sliding_window is None
    spec = read("Mistral", sliding_window=16)
    assert spec.forward_flops(10, 100) == spec.forward_flops(10, 16) < read("Mistral").forward_flops(10, 100)


@each(
    "name, billions",
    [("llama-7b", 6.74), ("llama-70b", 68.98), ("qwen2.5-0.5b", 0.494), ("qwen2.5-7b", 7.62), ("qwen3-0.6b", 0.596),
     ("qwen3-8b", 8.19)],
)  # fmt: skip
def test_presets_have_the_published_sizes(name, billions):
    assert PRESETS[name].num_parameters() / 1e9 == pytest.approx(billions, rel=0.002)
