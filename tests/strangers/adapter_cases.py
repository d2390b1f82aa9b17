"""Folders of adapters: written by peft itself, then as other programs and other versions write them; peft says what they are."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hfsdk as hf
from hfsdk.core.lora import ADAPTER_CONFIG, PEFT, AdapterSpec
from hfsdk.core.weight_files import ADAPTER_WEIGHTS
from tests.strangers.frame import SIZES, Bench, Case, Refused

HIDDEN = SIZES["hidden_size"]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
REGEX = r"(?:model\.layers\.\d+\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"
"""As Unsloth writes it."""
SCORE = f"{PEFT}score.weight"
A = f"{PEFT}model.layers.0.self_attn.q_proj.lora_A.weight"


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what peft warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def base_model(folder: Path, *, scalar: bool = False):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if scalar:
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    return AutoModelForCausalLM.from_pretrained(folder)


def brought(it: Bench, *, said=None, more=None, fill=0.0, without=(), scalar=False, layers=1, **asked) -> tuple[Path, Path]:
    """Let peft write adapters of a new model; return the folders of both.

    Args:
        it: where.
        said: changes of ``adapter_config.json``.
        more: tensors beside peft's, or in their place.
        fill: their numbers.
        without: peft's tensors that are left out.
        scalar: whether the model has a scalar head.
        layers: of the model.
        asked: options of peft's ``LoraConfig``.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file

    base, folder = it.model(config={"num_hidden_layers": layers}), it.folder / "adapters"
    options = {"r": 4, "lora_alpha": 12, "target_modules": LINEARS, "task_type": "SEQ_CLS" if scalar else "CAUSAL_LM", **asked}
    with quiet():
        get_peft_model(base_model(base, scalar=scalar), LoraConfig(**options)).save_pretrained(folder)
    tensors = load_file(folder / ADAPTER_WEIGHTS) | {name: torch.full(shape, fill) for name, shape in (more or {}).items()}
    save_file({name: tensor for name, tensor in tensors.items() if name not in without}, folder / ADAPTER_WEIGHTS)
    config = json.loads((folder / ADAPTER_CONFIG).read_text()) | (said or {})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    return base, folder


def read(it: Bench, **asked):
    """Declare a reference with adapters; return each layer that has some and what they are multiplied with."""
    base, folder = brought(it, **asked)
    reference = it.session().reference(str(base), lora=folder)
    lora = reference.role.lora
    modules = {name.rsplit(".", 2)[0] for name in AdapterSpec.of(reference.spec, lora).tensors()}
    return dict.fromkeys(modules, (lora.rank, lora.scale))


def of_peft(it: Bench):
    """Return the same of peft's model."""
    from peft import PeftModel

    with quiet():
        adapted = PeftModel.from_pretrained(base_model(it.folder / "model1"), it.folder / "adapters").base_model.model
    layers = {name: module for name, module in adapted.named_modules() if hasattr(module, "lora_A") and len(module.lora_A)}
    return {name: (module.r["default"], module.scaling["default"]) for name, module in layers.items()}


def scored(it: Bench, **asked) -> list[str]:
    """Declare a reward model with adapters; return what is told of it."""
    base, folder = brought(it, scalar=True, **asked)
    session = it.session()
    session.reward(str(base), lora=folder)
    return list(session.messages)


def pickled(it: Bench):
    base, folder = brought(it)
    (folder / ADAPTER_WEIGHTS).rename(folder / "adapter_model.bin")
    it.session().reference(str(base), lora=folder)


def merged(it: Bench) -> tuple[bool, int]:
    """Declare an actor of what peft merges where a tied model's head was trained; return whether it is tied, and its numbers."""
    from peft import PeftModel

    base, folder = brought(it, modules_to_save=["lm_head"], more={f"{PEFT}lm_head.weight": (320, HIDDEN)}, fill=0.5)
    with quiet():
        PeftModel.from_pretrained(base_model(base), folder).merge_and_unload().save_pretrained(it.folder / "merged")
    spec = it.session_of(it.folder / "merged").models.actor.spec
    return spec.tied_embeddings, spec.num_parameters()


def of_merged(it: Bench) -> tuple[bool, int]:
    model = base_model(it.folder / "merged")
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert set(head.detach().flatten().tolist()) == {0.5}
    return head is embeddings, sum(parameter.numel() for parameter in model.parameters())


def named(it: Bench, inside: str = "") -> int:
    """Let peft write adapters that have a name; return the rank of what is read from its folder, or from one inside."""
    from peft import LoraConfig, get_peft_model

    base, folder = it.model(), it.folder / "adapters"
    with quiet():
        config = LoraConfig(r=4, target_modules=LINEARS, task_type="CAUSAL_LM")
        get_peft_model(base_model(base), config, adapter_name="lora").save_pretrained(folder)
    return it.session().reference(str(base), lora=folder / inside).role.lora.rank


def with_template(it: Bench, template: str) -> int:
    """Declare an actor with adapters beside which their trainer has saved the tokenizer; return the adapters' rank."""
    base, folder = brought(it)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((base / name).read_bytes())
    (folder / "chat_template.jinja").write_text(template or (base / "chat_template.jinja").read_text())
    session = it.session()
    return session.actor(str(base), lora=folder, optimizer=hf.AdamW(lr=1e-5)).role.lora.rank


def emptied(it: Bench):
    """Bring adapters whose tensors are empty, which ZeRO-3 leaves of parameters that it cuts."""
    import torch
    from safetensors.torch import load_file, save_file

    base, folder = brought(it)
    names = load_file(folder / ADAPTER_WEIGHTS)
    save_file({name: torch.zeros(0) for name in names}, folder / ADAPTER_WEIGHTS)
    it.session().reference(str(base), lora=folder)


def of_another(it: Bench):
    _, folder = brought(it)
    wider = it.model(config={"intermediate_size": 128})
    it.session().reference(str(wider), lora=folder)


def refused(*named: object) -> Refused:
    return Refused(hf.ModelNotFoundError, *named)


TAKEN = [
    Case("adapters of all linear layers", "kin of sglang#40835", lambda it: read(it), of_peft, "peft on the same folder"),
    Case(
        "adapters of two layers, named by their whole paths", "sglang#11034",
        lambda it: read(it, target_modules=["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"]), of_peft,
        "peft on the same folder",
    ),
    Case(
        "layers by a regular expression", "unsloth#9331, vllm#9275", lambda it: read(it, target_modules=REGEX), of_peft,
        "peft on the same folder",
    ),
    Case(
        "a regular expression of some layers", "vllm#9275",
        lambda it: read(it, target_modules=r".*\.(?:self_attn)\.(?:q_proj|v_proj)$"), of_peft, "peft on the same folder",
    ),
    Case(
        "all-linear", "kin of unsloth#9331", lambda it: read(it, target_modules="all-linear"), of_peft, "peft on the same folder",
    ),
    Case(
        "all-linear as a text in the file", "kin of unsloth#9331", lambda it: read(it, said={"target_modules": "all-linear"}),
        of_peft, "peft on the same folder",
    ),
    Case(
        "a task_type that is null", "verl#5488", lambda it: read(it, said={"task_type": None}), of_peft, "peft on the same folder",
    ),
    Case(
        "rsLoRA of an odd rank", "sglang#40835, exllamav2#619",
        lambda it: read(it, r=7, lora_alpha=5, use_rslora=True), of_peft, "peft on the same folder: alpha / sqrt(r)",
    ),
    Case(
        "layers that are left out", "kin of textgen#6819 (exclude_modules)",
        lambda it: read(it, exclude_modules=["up_proj", "down_proj"]), of_peft, "peft on the same folder",
    ),
    Case(
        "layers 0 of a model of one", "kin of peft#1979", lambda it: read(it, layers_to_transform=[0]), of_peft,
        "peft on the same folder",
    ),
    Case(
        "A that was drawn another way", "kin of peft#1626", lambda it: read(it, init_lora_weights="gaussian"), of_peft,
        "peft on the same folder: the weights beside it stayed",
    ),
    Case(
        "fields of a newer peft at their defaults", "peft#2275, peft#2038",
        lambda it: read(it, said={"foo_config": None, "use_foo": False, "foo_pattern": {}, "foo_layers": []}), of_peft,
        "peft on the same folder: it leaves them out",
    ),
    Case(
        "a file of an older peft", "peft#1087",
        lambda it: read(it, said={"enable_lora": None, "merge_weights": False, "peft_version": None}), of_peft,
        "peft on the same folder",
    ),
    Case(
        "adapters that have a name, in the folder of that name", "peft#2699", lambda it: named(it, "lora"), 4,
        "peft writes it there, r=4",
    ),
    Case(
        "a scalar head that was trained beside them", "kin of LongLoRA#79", scored, [],
        "peft saves it by itself: no random head is told",
    ),
    Case(
        "a chat template beside adapters", "kin of LlamaFactory#7785 (the template of training is another one)",
        lambda it: with_template(it, "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"), 4,
        "the texts of the session are made with the model's", notices=("adapters has a chat template of its own",),
    ),
    Case(
        "the model's chat template beside adapters", "kin of LlamaFactory#7785", lambda it: with_template(it, ""), 4,
        "it is the same one, so that nothing is told",
    ),
    Case(
        "a trained head, merged as the refusal of it advises", "unsloth#9326", merged, of_merged,
        "transformers on the merged folder: config.json still ties, and the head is the trained one",
    ),
]  # fmt: skip

LEFT_OUT = [
    Case(
        "adapters that verl merged, with an alpha of 0", "verl#1821, verl#5488",
        lambda it: read(it, said={"task_type": None, "lora_alpha": 0}), refused(ADAPTER_CONFIG, "lora_alpha=0"),
        "peft multiplies by 0: nothing that was learned would be there",
    ),
    Case(
        "a head that was trained whole", "unsloth#9326, vllm#9280",
        lambda it: read(it, modules_to_save=["lm_head"]), refused(ADAPTER_CONFIG, "modules_to_save", "lm_head", "merge_and_unload"),
        "peft runs that head",
    ),
    Case(
        "embeddings and norms that were trained whole", "LongLoRA#79",
        lambda it: read(it, modules_to_save=["embed_tokens", "norm"]), refused(ADAPTER_CONFIG, "modules_to_save", "embed_tokens"),
        "peft runs those",
    ),
    Case(
        "the head in the file, and not in the description", "unsloth#918 (peft saves resized embeddings by itself)",
        lambda it: read(it, more={f"{PEFT}lm_head.weight": (320, HIDDEN)}), refused(ADAPTER_WEIGHTS, f"{PEFT}lm_head.weight"),
        "peft loads it",
    ),
    Case(
        "adapters of the head", "unsloth#4098", lambda it: read(it, target_modules=[*LINEARS, "lm_head"]),
        refused(ADAPTER_CONFIG, "lm_head", "merge_and_unload"), "peft runs them",
    ),
    Case(
        "adapters of the embeddings", "unsloth#918", lambda it: read(it, target_modules=[*LINEARS, "embed_tokens"]),
        refused(ADAPTER_CONFIG, "embed_tokens"), "peft runs them",
    ),
    Case(
        "other ranks in some layers", "axolotl#3673, Soup#803", lambda it: read(it, rank_pattern={"q_proj": 2}),
        refused(ADAPTER_CONFIG, "rank_pattern"), "peft reads them",
    ),
    Case(
        "other scales in some layers", "axolotl#3673, peft#2195", lambda it: read(it, alpha_pattern={"q_proj": 64}),
        refused(ADAPTER_CONFIG, "alpha_pattern"), "peft reads them",
    ),
    Case(
        "DoRA", "vllm#6983, unsloth-zoo#954", lambda it: read(it, use_dora=True), refused(ADAPTER_CONFIG, "use_dora"),
        "peft scales each row",
    ),
    Case(
        "DoRA's magnitudes without its flag", "kin of vllm#6983",
        lambda it: read(it, more={A.replace("lora_A.weight", "lora_magnitude_vector"): (64,)}),
        refused("reference: ", ADAPTER_WEIGHTS, "lora_magnitude_vector"), "they would be left out",
    ),
    Case(
        "biases that were trained", "kin of LongLoRA#79", lambda it: read(it, said={"bias": "lora_only"}),
        refused(ADAPTER_CONFIG, "bias", "lora_only"), "peft loads them",
    ),
    Case(
        "PiSSA, beside weights that it changed", "transformers#34468, peft#1626",
        lambda it: read(it, said={"init_lora_weights": "pissa"}),
        refused(ADAPTER_CONFIG, "init_lora_weights", "pissa"), "peft takes its first part out of the base",
    ),
    Case(
        "tokens that were trained alone", "textgen#6819", lambda it: read(it, said={"trainable_token_indices": [3]}),
        refused(ADAPTER_CONFIG, "trainable_token_indices"), "peft puts them over the embeddings",
    ),
    Case(
        "layers that are run twice", "peft#1979", lambda it: read(it, said={"layer_replication": [[0, 1], [0, 1]]}),
        refused(ADAPTER_CONFIG, "layer_replication"), "peft runs two layers",
    ),
    Case(
        "a field of a newer peft that asks for something", "peft#2038", lambda it: read(it, said={"use_foo": True}),
        refused(ADAPTER_CONFIG, "use_foo"), "what it asks for would be left out",
    ),
    Case(
        "another kind of adapter", "kin of peft#340", lambda it: read(it, said={"peft_type": "LOHA"}),
        refused(ADAPTER_CONFIG, "peft_type", "LOHA"), "its product is another one",
    ),
    Case(
        "a trained scalar head on an actor", "kin of OpenRLHF#1039", lambda it: read(it, scalar=True),
        refused(ADAPTER_WEIGHTS, SCORE), "it would be lost when it is saved",
    ),
    Case(
        "a scalar head of two labels", "kin of trl#3269", lambda it: scored(it, more={SCORE: (2, HIDDEN)}),
        refused(ADAPTER_WEIGHTS, SCORE, (2, HIDDEN), (1, HIDDEN)), "a score is one number",
    ),
    Case(
        "a layer without its B", "kin of vllm#55193", lambda it: read(it, without=[A.replace("lora_A", "lora_B")]),
        refused(ADAPTER_WEIGHTS, A.replace("lora_A", "lora_B")), "peft leaves it zero and only warns",
    ),
    Case(
        "adapters of one block of two", "kin of vllm#55193 (layers_to_transform)",
        lambda it: read(it, layers=2, layers_to_transform=[0]),
        refused("adapters", ADAPTER_WEIGHTS, "model.layers.1.mlp.down_proj.lora_A.weight", "merge_and_unload"),
        "peft has none in the other: every block has the same ones here",
    ),
    Case(
        "fields that ms-swift writes beside peft's", "kin of peft#1168",
        lambda it: read(it, said={"lora_dtype": "float32", "lorap_lr_ratio": 16.0}), of_peft,
        "peft on the same folder: it leaves them out",
    ),
    Case(
        "adapters by the names that torch.compile has", "Soup#351",
        lambda it: read(it, more={A.replace(PEFT, f"{PEFT}_orig_mod."): (4, HIDDEN)}, without=[A]),
        refused(ADAPTER_WEIGHTS, A), "peft leaves it zero and only warns",
    ),
    Case(
        "names of a model with a tower", "vllm#34186",
        lambda it: read(it, more={A.replace("model.layers", "model.language_model.layers"): (4, HIDDEN)}),
        refused(ADAPTER_WEIGHTS, "model.language_model.layers.0"), "they would be left out",
    ),
    Case(
        "adapters of another model", "kin of LlamaFactory#1517", of_another,
        refused(ADAPTER_WEIGHTS, (64, 4), (128, 4)), "peft refuses them as well",
    ),
    Case(
        "adapters that have a name, by the folder around it", "peft#2699, transformers#28531", named,
        refused(ADAPTER_CONFIG, "the one inside it, 'lora'"), "it is the folder that save_pretrained was given",
    ),
    Case(
        "adapters that ZeRO-3 has cut", "trl#4416, peft#2892, DeepSpeed#7900", emptied,
        refused(ADAPTER_WEIGHTS, A, (0,), (4, HIDDEN), "ZeRO-3"), "there are no numbers in them",
    ),
    Case(
        "adapters that are pickled", "vllm#9275 (adapter_model.bin)", pickled, refused("adapters", ADAPTER_WEIGHTS),
        "unpickling runs code",
    ),
]  # fmt: skip

CASES = [*TAKEN, *LEFT_OUT]
