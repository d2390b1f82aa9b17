"""Stretched rotary positions against transformers' and vLLM's own functions, number by number."""

import itertools

import pytest
from rows import every_row

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config

from hfsdk.core.spec import ModelSpec
from hfsdk.engine.training import cpu_support_megatron, megatron_model

SIZES = {
    "hidden_size": 512, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": 260, "max_position_embeddings": 4096,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
KINDS = [
    LLAMA3, YARN, YARN | {"truncate": False}, YARN | {"beta_fast": 16, "beta_slow": 2.0}, YARN | {"attention_factor": 1.25},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, YARN | {"mscale": 0.7}, YARN | {"factor": 1.0, "attention_factor": 0.5,
    "original_max_position_embeddings": 4096}, YARN | {"original_max_position_embeddings": 4096},
]  # fmt: skip


@pytest.fixture
def rotary_of():
    cpu_support_megatron.install()
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    def make(spec):
        plain = RotaryEmbedding(spec.head_dim, 1.0, rotary_base=spec.rope_theta, use_cpu_initialization=True, cp_group=False)
        megatron_model.stretch(plain, spec)
        return plain

    return make


def test_waves_and_attention_factor_are_those_of_transformers(rotary_of):
    with every_row() as row:
        for family, rope in itertools.product(["Llama", "Qwen3"], KINDS):
            with row(family, rope):
                check_waves_and_attention_factor_are_those_of_transformers(rope, family, rotary_of)


def check_waves_and_attention_factor_are_those_of_transformers(rope, family, rotary_of):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = getattr(transformers, f"{family}Config")(**SIZES, rope_parameters=dict(rope))
    rates, attention = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    spec = ModelSpec.from_hf_config(config.to_dict() | {"architectures": [f"{family}ForCausalLM"]})
    torch.testing.assert_close(rotary_of(spec).inv_freq, rates, rtol=1e-6, atol=0)

    class Told:
        pass

    told = Told()
    vars(told).update(megatron_model.attention_options(spec))
    assert _yarn_get_concentration_factor_from_config(told) == pytest.approx(attention, rel=1e-12)
    assert bool(megatron_model.attention_options(spec)) == (rope["rope_type"] == "yarn")


def test_waves_and_attention_factor_are_those_of_vllm(rotary_of):
    with every_row() as row:
        for rope in KINDS:
            with row(rope):
                check_waves_and_attention_factor_are_those_of_vllm(rope, rotary_of)


def check_waves_and_attention_factor_are_those_of_vllm(rope, rotary_of):
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    spec = ModelSpec.from_hf_config(SIZES | {"architectures": ["LlamaForCausalLM"], "rope_parameters": rope})
    with set_current_vllm_config(VllmConfig()):
        table = get_rope(128, 4096, rope_parameters=rope, dtype=torch.float32).cos_sin_cache
    assert len(table) >= spec.max_positions
    turned = torch.outer(torch.arange(len(table), dtype=torch.float32), rotary_of(spec).inv_freq)
    attention = getattr(spec.rope_scaling, "attention", 1.0)
    torch.testing.assert_close(table, torch.cat([turned.cos(), turned.sin()], -1) * attention, atol=3e-4, rtol=0)
