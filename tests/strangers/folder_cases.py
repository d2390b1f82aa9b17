"""Model folders: heads, indices, towers, quantised weights, keys of ``config.json`` and of ``generation_config.json``."""

from __future__ import annotations

import json
from pathlib import Path

import hfsdk as hf
from hfsdk.core.weight_files import EMBEDDING, HEAD, WEIGHTS
from tests.session.scripted import ScriptedRuntime
from tests.strangers.frame import SIZES, Bench, Case, Refused
from tests.strangers.tensor_files import change, shard, tensors_of, write

HIDDEN, ROWS, WIDTH = SIZES["hidden_size"], 320, SIZES["intermediate_size"]
LAYER = "model.layers.0."
SCORE, VALUE = "score.weight", "value_head.weight"
OTHER = "model-00002-of-00002.safetensors"


def actor(it: Bench, folder: Path) -> hf.ModelSpec:
    """Declare an actor; return what it is."""
    return it.session_of(folder).models.actor.spec


def scorer(it: Bench, more, *, without=(HEAD,), **changes) -> str:
    """Declare a reward model of a folder with these tensors too; return the ends of its session's messages."""
    session = it.session()
    session.reward(str(change(it.model(config=changes), more, without)))
    return "".join(session.messages)


def saved_config(it: Bench) -> str:
    """Save a reward model whose scores are not normalised where a worker has written what it had; return its ``config.json``."""
    folder = change(it.model(), {SCORE: ("F32", (1, HIDDEN))}, [HEAD])
    runtime = ScriptedRuntime()
    runtime.results["save_pretrained"] = []
    (it.folder / "out").mkdir()
    (it.folder / "out" / "config.json").write_text(OWN_FORM)
    with hf.Session(runtime=runtime) as session:
        session.reward(str(folder)).save_pretrained(it.folder / "out")
    return (it.folder / "out" / "config.json").read_text()


def loaded(it: Bench):
    """Return transformers' model of the folder that was brought."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(it.folder / "model1")


def ties(it: Bench) -> bool:
    """Whether transformers' model of the folder has one tensor for embeddings and head."""
    model = loaded(it)
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def count(it: Bench) -> int:
    """The numbers of transformers' model."""
    return sum(parameter.numel() for parameter in loaded(it).parameters())


def tied(it: Bench, *ones: str, **more) -> Path:
    return change(it.model(), {HEAD: ("BF16", (ROWS, HIDDEN)), **more}, ones=ones)


def numbers(it: Bench) -> tuple[int, ...]:
    """What a config says of a model's sizes and positions, as transformers reads it."""
    config = loaded(it).config
    return (
        config.num_hidden_layers, config.hidden_size, config.num_key_value_heads, config.head_dim, config.vocab_size,
        config.max_position_embeddings, config.rope_parameters["rope_theta"],
    )  # fmt: skip


def numbers_of(spec: hf.ModelSpec) -> tuple[int, ...]:
    return (
        spec.num_layers, spec.hidden_size, spec.num_kv_heads, spec.head_dim, spec.vocab_size, spec.max_positions,
        spec.rope_theta,
    )  # fmt: skip


def full_generation(it: Bench) -> Path:
    """Return a folder whose generation_config.json says all that transformers knows, at its defaults of version 4."""
    from transformers import GenerationConfig

    old = {
        "num_beams": 1, "num_beam_groups": 1, "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0,
        "encoder_no_repeat_ngram_size": 0, "diversity_penalty": 0.0, "typical_p": 1.0, "top_k": 50, "top_p": 1.0,
        "temperature": 1.0,
        "do_sample": False, "early_stopping": False, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "encoder_repetition_penalty": 1.0,
        "min_length": 0, "max_length": 20, "num_return_sequences": 1, "remove_invalid_values": False, "token_healing": False,
    }  # fmt: skip
    folder = it.model()
    (folder / "generation_config.json").write_text(json.dumps({**GenerationConfig().to_dict(), **old, "eos_token_id": 258}))
    return folder


OLD_CONFIG = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "torch_dtype": "float16", "pretraining_tp": 1, "use_cache": True,
    "attention_dropout": 0.0, "initializer_range": 0.02, "rope_scaling": None, "rope_theta": 500000.0, "rope_parameters": None,
    "return_dict": True, "output_hidden_states": False, "pruned_heads": {}, "is_encoder_decoder": False,
    "add_cross_attention": False, "temperature": 1.0, "top_k": 50, "num_beams": 1, "length_penalty": 1.0,
    "chunk_size_feed_forward": 0, "tf_legacy_loss": False, "torchscript": False, "use_bfloat16": False, "finetuning_task": None,
    "problem_type": None, "prefix": None, "unsloth_fixed": True,
}  # fmt: skip
"""What transformers 4 wrote of a Llama, sampling included."""

OWN_FORM = json.dumps({"architectures": ["LlamaForSequenceClassification"], "hidden_size": HIDDEN}, indent=1)

HEADS = [
    Case(
        "a head of its own beside tie_word_embeddings", "vllm#51665, transformers#42612",
        lambda it: actor(it, tied(it, HEAD)).tied_embeddings, ties, "transformers keeps both, whatever config.json says",
    ),
    Case(
        "the embeddings once more as the head", "vllm#3344 (Qwen1.5-0.5B-Chat)",
        lambda it: actor(it, tied(it)).tied_embeddings, ties, "transformers ties what is equal",
    ),
    Case(
        "a tied model without a head in its files", "llama-models#172 (Llama 3.2)",
        lambda it: actor(it, it.model()).num_parameters(), count, "transformers' parameters",
    ),
    Case(
        "an untied model without a head", "Automodel#2511",
        lambda it: actor(it, change(it.model(config={"tie_word_embeddings": False}), {}, [HEAD])),
        Refused(hf.ModelNotFoundError, WEIGHTS, HEAD), "transformers draws a random one",
    ),
    Case(
        "a tied model whose files have the head alone", "kin of Automodel#2511",
        lambda it: actor(it, change(it.model(), {HEAD: ("BF16", (ROWS, HIDDEN))}, [EMBEDDING])),
        Refused(hf.ModelNotFoundError, WEIGHTS, EMBEDDING), "no name says that it is the embedding",
    ),
    Case(
        "more embeddings than config.json says", "kin of vllm#9280 (tokens were added)",
        lambda it: actor(it, change(it.model(), {EMBEDDING: ("BF16", (ROWS + 8, HIDDEN))})),
        Refused(hf.ModelNotFoundError, WEIGHTS, EMBEDDING, (ROWS + 8, HIDDEN), (ROWS, HIDDEN)), "transformers refuses it as well",
    ),
    Case(
        "a scalar head named value_head", "OpenRLHF#209", lambda it: scorer(it, {VALUE: ("F32", (1, HIDDEN))}), "",
        "OpenRLHF's name: it is read, and no random head is told",
    ),
    Case(
        "a reward model that is saved as it was", "kin of LlamaFactory#8399", saved_config, OWN_FORM,
        "nothing was learned that config.json says", notices=("replaced the model in",),
    ),
    Case(
        "two scalar heads", "kin of OpenRLHF#209",
        lambda it: scorer(it, {SCORE: ("F32", (1, HIDDEN)), VALUE: ("F32", (1, HIDDEN))}),
        Refused(hf.ModelNotFoundError, WEIGHTS, VALUE), "one of them would be left out",
    ),
    Case(
        "a classifier of two labels as a reward model", "OpenRLHF#1039, trl#3269",
        lambda it: scorer(it, {SCORE: ("BF16", (2, HIDDEN))}),
        Refused(hf.ModelNotFoundError, WEIGHTS, SCORE, (2, HIDDEN), (1, HIDDEN)), "a score is one number",
    ),
    Case(
        "a scalar head with a bias", "LlamaFactory#4379 (v_head.summary)",
        lambda it: scorer(it, {SCORE: ("BF16", (1, HIDDEN)), "score.bias": ("BF16", (1,))}),
        Refused(hf.ModelNotFoundError, WEIGHTS, "score.bias"), "transformers' score has none",
    ),
    Case(
        "TRL's value head", "trl#2095", lambda it: scorer(it, {"v_head.summary.weight": ("F32", (1, HIDDEN))}),
        Refused(hf.ModelNotFoundError, WEIGHTS, "v_head.summary.weight", SCORE), "the reward would come from a random head",
    ),
    Case(
        "a reward model as the actor", "kin of OpenRLHF#1039",
        lambda it: actor(it, change(it.model(), {SCORE: ("BF16", (1, HIDDEN))})),
        Refused(hf.ModelNotFoundError, WEIGHTS, SCORE), "the head would be lost when it is saved",
    ),
]  # fmt: skip

TENSORS = [
    Case(
        "frequencies of rotary positions among the weights", "transformers#35255 (Llama 2)",
        lambda it: actor(it, change(it.model(), {LAYER + "self_attn.rotary_emb.inv_freq": ("F32", (16,))})).num_parameters(), count,
        "transformers makes them from config.json",
    ),
    Case(
        "a layer more than config.json says", "kin of transformers#42612",
        lambda it: actor(it, change(it.model(), {"model.layers.1.mlp.up_proj.weight": ("BF16", (WIDTH, HIDDEN))})),
        Refused(hf.ModelNotFoundError, "actor: ", WEIGHTS, "model.layers.1.mlp.up_proj.weight"),
        "it would be missing from what is saved",
    ),
    Case(
        "a tower for pictures", "transformers#43429 (Ministral 3)",
        lambda it: actor(it, change(it.model(), {"vision_tower.patch_conv.weight": ("BF16", (8, 8))})),
        Refused(hf.ModelNotFoundError, WEIGHTS, "vision_tower.patch_conv.weight", "texts alone"), "the trainer has none",
    ),
    Case(
        "4-bit weights of bitsandbytes", "bitsandbytes#1123, gemma.cpp#533",
        lambda it: actor(it, change(it.model(), {LAYER + "mlp.up_proj.weight": ("U8", (WIDTH * HIDDEN // 2, 1))})),
        Refused(hf.ModelNotFoundError, WEIGHTS, "mlp.up_proj.weight"), "they mean something with their scales alone",
    ),
    Case(
        "scales of weights in eight bits", "kin of vllm#54230",
        lambda it: actor(it, change(it.model(), {LAYER + "mlp.up_proj.weight_scale": ("F32", (1,))})),
        Refused(hf.ModelNotFoundError, WEIGHTS, "mlp.up_proj.weight_scale", "quantised"), "the weights are not what they say",
    ),
    Case(
        "weights in FP8", "kin of vllm#54230",
        lambda it: actor(it, change(it.model(), {LAYER + "mlp.up_proj.weight": ("F8_E4M3", (WIDTH, HIDDEN))})),
        Refused(hf.ModelNotFoundError, WEIGHTS, "mlp.up_proj.weight", "F8_E4M3"), "they mean something with their scales alone",
    ),
    Case(
        "GPTQ's weights", "GPTQModel#1736",
        lambda it: actor(
            it, change(it.model(), {LAYER + "mlp.up_proj.qweight": ("I32", (8, WIDTH))}, [LAYER + "mlp.up_proj.weight"]),
        ),
        Refused(hf.ModelNotFoundError, WEIGHTS, "mlp.up_proj.weight"), "there is no such weight",
    ),
    Case(
        "names as torch.compile has them", "pytorch#101107, Soup#351", lambda it: actor(it, compiled(it)),
        Refused(hf.ModelNotFoundError, WEIGHTS, EMBEDDING), "no name is that of a weight",
    ),
    Case(
        "adapters among the weights", "kin of unsloth#1061",
        lambda it: actor(it, change(it.model(), {LAYER + "mlp.up_proj.lora_A.default.weight": ("BF16", (4, HIDDEN))})),
        Refused(hf.ModelNotFoundError, WEIGHTS, "lora_A.default.weight", "merge_and_unload"), "they would be lost",
    ),
    Case(
        "a folder with adapters beside its weights", "unsloth#1061", lambda it: actor(it, with_adapters(it)),
        Refused(hf.ModelNotFoundError, "adapter_config.json", "lora="), "transformers adds them",
    ),
    Case(
        "weights in three dtypes", "kin of transformers#42612",
        lambda it: actor(it, mixed(it)).num_parameters(), count, "transformers reads each in the dtype that it has",
    ),
    Case(
        "weights that are pickled", "kin of peft#1087 (old folders)", lambda it: actor(it, pickled(it)),
        Refused(hf.ModelNotFoundError, "*.safetensors", "pytorch_model.bin"), "unpickling runs code",
    ),
]  # fmt: skip


def compiled(it: Bench) -> Path:
    folder = it.model()
    write(folder / WEIGHTS, {f"_orig_mod.{name}": tensor for name, tensor in tensors_of(folder).items()})
    return folder


def with_adapters(it: Bench) -> Path:
    folder = it.model()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}))
    return folder


def mixed(it: Bench) -> Path:
    folder = it.model()
    names = list(tensors_of(folder).items())
    write(folder / WEIGHTS, {name: (("F32", "F16", "BF16")[i % 3], shape) for i, (name, (_, shape)) in enumerate(names)})
    return folder


def pickled(it: Bench) -> Path:
    folder = it.model()
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    return folder


def two(it: Bench) -> Path:
    """A folder whose single file stayed when another model was written into it in two."""
    folder = it.model()
    content = (folder / WEIGHTS).read_bytes()
    shard(folder)
    (folder / WEIGHTS).write_bytes(content)
    return folder


def consolidated(it: Bench) -> Path:
    """A folder that has Mistral's own form of the weights too."""
    folder = shard(it.model())
    own = {"tok_embeddings.weight": ("BF16", (ROWS, HIDDEN)), "layers.0.attention.wk.weight": ("BF16", (HIDDEN // 2, HIDDEN))}
    write(folder / "consolidated.safetensors", own)
    (folder / "params.json").write_text(json.dumps({"dim": HIDDEN, "n_layers": 7}))
    return folder


def cut_short(it: Bench) -> Path:
    folder = shard(it.model())
    (folder / OTHER).unlink()
    return folder


INDICES = [
    Case(
        "weights in two files", "kin of mlx-vlm#1464", lambda it: actor(it, shard(it.model())).num_parameters(), count,
        "transformers' parameters",
    ),
    Case(
        "an index beside the file of another model", "mlx-vlm#1464", lambda it: actor(it, two(it)),
        Refused(hf.ModelNotFoundError, WEIGHTS, f"{WEIGHTS}.index.json"), "transformers and vLLM read different ones of them",
    ),
    Case(
        "Mistral's own form of the weights beside the index", "vllm#40765 (Ministral 3)",
        lambda it: actor(it, consolidated(it)).num_parameters(), count, "transformers reads what the index names",
    ),
    Case(
        "an index whose second file did not come", "sglang#32279", lambda it: actor(it, cut_short(it)),
        Refused(hf.ModelNotFoundError, f"{WEIGHTS}.index.json", OTHER), "half of the model would be random",
    ),
    Case(
        "a file with a tensor that the index does not list", "vllm#54230",
        lambda it: actor(it, shard(it.model(), more={"model.layers.7.mlp.up_proj.weight": ("BF16", (WIDTH, HIDDEN))})),
        Refused(hf.ModelNotFoundError, OTHER, "model.layers.7.mlp.up_proj.weight"), "vLLM loads it, transformers does not",
    ),
    Case(
        "a tensor in another file than the index says", "mlx-serve#465",
        lambda it: actor(it, shard(it.model(), moved={EMBEDDING: OTHER})),
        Refused(hf.ModelNotFoundError, OTHER, EMBEDDING), "one of the two is of another model",
    ),
]  # fmt: skip

KEYS = [
    Case(
        "a Llama with biases in attention and MLP", "mlc-llm#3494 (Bielik 3)",
        lambda it: actor(it, it.model(config={"attention_bias": True, "mlp_bias": True})).num_parameters(), count,
        "transformers' parameters: seven biases a layer",
    ),
    Case(
        "such a Llama whose file lacks one of them", "kin of mlc-llm#3494",
        lambda it: actor(
            it, change(it.model(config={"attention_bias": True, "mlp_bias": True}), {}, [f"{LAYER}mlp.down_proj.bias"]),
        ),
        Refused(hf.ModelNotFoundError, WEIGHTS, f"{LAYER}mlp.down_proj.bias"), "transformers draws it",
    ),
    Case(
        "a bias of which config.json says nothing", "kin of mlc-llm#3494",
        lambda it: actor(it, change(it.model(), {f"{LAYER}self_attn.q_proj.bias": ("BF16", (64,))})),
        Refused(hf.ModelNotFoundError, WEIGHTS, f"{LAYER}self_attn.q_proj.bias"), "it would be left out",
    ),
    Case(
        "a config.json without a dtype over bf16 weights", "sglang#30594 (Hunyuan 3)",
        lambda it: it.session_of(it.model(config={"dtype": None, "torch_dtype": None})).models.actor.role.dtype, "fp32",
        "the dtype is the role's, and the file's only says how the weights are stored: nothing falls back to fp16",
    ),
    Case(
        "a config.json of transformers 4", "kin of Soup#793",
        lambda it: numbers_of(actor(it, it.model(config=OLD_CONFIG))), numbers, "transformers 5 on the same file",
    ),
    Case(
        "rotary positions over a part of the head", "sglang#3935 (Phi-4-mini)",
        lambda it: actor(it, it.model(config={"partial_rotary_factor": 0.75})),
        Refused(hf.UnsupportedModelError, "config.json", "partial_rotary_factor=0.75"), "the engines turn the whole head",
    ),
    Case(
        "the same over the whole head", "kin of sglang#3935",
        lambda it: numbers_of(actor(it, it.model(config={"partial_rotary_factor": 1.0}))), numbers, "1 is the whole head",
    ),
    Case(
        "a Llama whose width is no multiple of its heads", "transformers#46211 (Kanana 1.5)",
        lambda it: actor(it, it.model(config={"hidden_size": 56, "num_attention_heads": 3})),
        Refused(hf.UnsupportedModelError, "hidden_size=56", "num_attention_heads=3", "MistralForCausalLM"),
        "transformers 5 and vLLM do not take it",
    ),
    Case(
        "the same as a Mistral", "transformers#46211 (Kanana 1.5)",
        lambda it: actor(it, it.model(config={
            "hidden_size": 56, "num_attention_heads": 3, "architectures": ["MistralForCausalLM"], "model_type": "mistral",
            "sliding_window": None,
        })).num_parameters(), count, "transformers' parameters",
    ),
    Case(
        "a key of an older model that the family does not read", "transformers#48486 (MiniMax-M2)",
        lambda it: actor(it, it.model(config={"rotary_dim": 16})),
        Refused(hf.UnsupportedModelError, "config.json", "rotary_dim", 16), "what it asks for would be left out",
    ),
    Case(
        "a Granite in a Llama's clothes", "kin of transformers#48486",
        lambda it: actor(it, it.model(config={"embedding_multiplier": 12.0})),
        Refused(hf.UnsupportedModelError, "config.json", "embedding_multiplier=12.0"), "the engines multiply by 1",
    ),
    Case(
        "YaRN's factor by vLLM's name", "kin of Soup#793",
        lambda it: actor(it, it.model(config={"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64, "attn_factor": 0.5,
        }})),
        Refused(hf.UnsupportedModelError, "config.json", "attn_factor", 0.5), "vLLM reads it, transformers does not",
    ),
    Case(
        "a class of one family and the model_type of another", "kin of transformers#43429",
        lambda it: actor(it, it.model(config={"model_type": "mistral"})),
        Refused(hf.UnsupportedModelError, "config.json", "model_type", "mistral", "LlamaForCausalLM"),
        "transformers goes by one of them, vLLM by the other",
    ),
    Case(
        "a quantization_config", "kin of bitsandbytes#1123",
        lambda it: actor(it, it.model(config={"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})),
        Refused(hf.UnsupportedModelError, "config.json", "quantization_config"), "the weights are not what they say",
    ),
    Case(
        "a penalty of repetitions in generation_config.json", "verl#7270, NeMo-RL#3497 (Qwen2.5)",
        lambda it: actor(it, it.model(generation={"repetition_penalty": 1.05, "temperature": 0.7})).num_layers, 1,
        "what is learned from has to be of the distribution that it was drawn from; the model is usable",
        notices=("generation_config.json asks for repetition_penalty=1.05, which no rollout applies",),
    ),
    Case(
        "strings that end a text in generation_config.json", "kin of trl#2820",
        lambda it: actor(it, it.model(generation={"stop_strings": ["User:"]})).num_layers, 1,
        "generate(stop=) takes them", notices=("generation_config.json asks for stop_strings=",),
    ),
    Case(
        "a generation_config.json with all that transformers writes", "kin of LlamaFactory#2545",
        lambda it: actor(it, full_generation(it)).num_layers, 1, "its defaults ask for nothing, so that nothing is told",
    ),
    Case(
        "a key of generation_config.json that nobody knows", "kin of NeMo-RL#3497",
        lambda it: actor(it, it.model(generation={"entropy_floor": 0.2})),
        Refused(hf.UnsupportedModelError, "generation_config.json", "entropy_floor", 0.2), "it would be left out of the rollouts",
    ),
]  # fmt: skip

CASES = [*HEADS, *TENSORS, *INDICES, *KEYS]
