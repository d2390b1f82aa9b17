"""A model whose layers compute what the engines do not is refused by the key that says so, before anything is loaded."""

import pytest
from expect import refuses

from hfsdk.core.errors import UnsupportedModelError
from hfsdk.core.spec import ModelSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_a_plain_model_is_taken():
    assert ModelSpec.from_hf_config({**LLAMA, "hidden_act": "silu"}, "plain").num_layers == 2


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_pytorch_tanh"])
def test_another_activation_is_refused(activation):
    with refuses(UnsupportedModelError, "odd", activation, "silu"):
        ModelSpec.from_hf_config({**LLAMA, "hidden_act": activation}, "odd")
