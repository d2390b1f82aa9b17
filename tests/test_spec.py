import math

import pytest

from hfsdk.errors import UnsupportedModelError
from hfsdk.spec import PRESETS, ModelSpec, RopeScaling

QWEN = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 260, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip


def read(prefix, **more):
    return ModelSpec.from_hf_config(QWEN | {"architectures": [f"{prefix}ForCausalLM"]} | more)


@pytest.mark.parametrize("prefix", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tied", [False, True])
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
        with pytest.raises(UnsupportedModelError, match=f"rope type 'llama3' with .*{key}="):
            read("Llama", rope_scaling={**LLAMA3, key: value})


def test_what_the_engines_do_not_run_is_refused():
    assert read("Qwen2", use_sliding_window=False, sliding_window=4096).family == "qwen2"
    assert read("Qwen3").head_dim == 128
    assert read("Qwen2").head_dim == 16
    for prefix in ("Qwen2", "Qwen3"):
        with pytest.raises(UnsupportedModelError, match="sliding window"):
            read(prefix, use_sliding_window=True)
        with pytest.raises(UnsupportedModelError, match="sliding window"):
            read(prefix, layer_types=["full_attention", "sliding_attention"])
        with pytest.raises(UnsupportedModelError, match="rope type 'yarn'"):
            read(prefix, rope_scaling={"type": "yarn", "factor": 4.0})
    for key, value in [
        ("partial_rotary_factor", 0.5), ("rope_interleaved", True), ("quantization_config", {"quant_method": "awq"}),
        ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0),
    ]:  # fmt: skip
        with pytest.raises(UnsupportedModelError, match=f"{key}="):
            read("Qwen3", **{key: value})
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor=0\.25; hfsdk runs rotary positions over the whole"):
        read("Llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25})
    assert read("Llama", partial_rotary_factor=1.0, rope_interleaved=False, quantization_config=None) == read("Llama")
    with pytest.raises(UnsupportedModelError, match="attention_bias=true"):
        read("Qwen3", attention_bias=True)
    with pytest.raises(UnsupportedModelError, match="Qwen2ForCausalLM"):
        read("Qwen2Moe")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-7b", 6.74), ("llama-70b", 68.98), ("qwen2.5-0.5b", 0.494), ("qwen2.5-7b", 7.62), ("qwen3-0.6b", 0.596),
     ("qwen3-8b", 8.19)],
)  # fmt: skip
def test_presets_have_the_published_sizes(name, billions):
    assert PRESETS[name].num_parameters() / 1e9 == pytest.approx(billions, rel=0.002)
