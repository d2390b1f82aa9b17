"""A law of adapters' folders: what peft computes with one, the trainer computes; what is saved of it, peft reads as it was.

Of rsLoRA with an odd rank and scale, of layers that a regular expression names (as Unsloth writes them), and of a classifier whose
head peft has trained with them.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import refuses
from safetensors.torch import load_file, save_file
from spawn import run
from trainer_harness import is_critic, rows_table

from hfsdk.core.errors import ModelNotFoundError
from hfsdk.core.lora import ADAPTER_CONFIG, LoRA
from hfsdk.core.spec import ModelSpec
from hfsdk.core.weight_files import ADAPTER_WEIGHTS

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FORMS = {
    "rslora": {"r": 7, "lora_alpha": 5, "use_rslora": True, "target_modules": LINEARS, "lora_dropout": 0.1},
    "regex": {"target_modules": r"(?:model\.layers\.\d+\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj|up_proj)))"},
    "fused": {"target_modules": "all-linear"},
    "score critic": {"target_modules": ["q_proj", "down_proj"], "task_type": "SEQ_CLS"},
}
"""Name -> what peft's description says."""
FAMILIES = {"regex": "Qwen2", "fused": "Phi3"}


def base_of(folder, name):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if is_critic(name):
        return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def make_folders(name, root):
    """Write a model and peft's adapters of it; return the folders of both."""
    import transformers
    from peft import LoraConfig, get_peft_model

    family = FAMILIES.get(name, "Llama")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            _ = parameter.mul_(8) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    base, adapters = str(root / name), str(root / f"{name} adapters")
    model.save_pretrained(base)
    options = {"r": 4, "lora_alpha": 12, "task_type": "CAUSAL_LM", **FORMS[name]}
    adapted = get_peft_model(base_of(base, name), LoraConfig(**options))
    with torch.no_grad():
        for of, parameter in adapted.named_parameters():
            if "lora_" in of or "modules_to_save" in of:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(adapters)
    return base, adapters


def of_peft(base, adapters, name):
    """Return what peft's model computes of each response: log-probabilities of its tokens, or a value at each."""
    from peft import PeftModel

    return of_model(PeftModel.from_pretrained(base_of(base, name), adapters).eval().base_model.model, name)


def of_model(model, name):
    rows, found = rows_table(), []
    for prompt, response in zip(rows.ragged("prompt"), rows.ragged("response"), strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, response]))[None]
        before = slice(len(prompt) - 1, len(prompt) - 1 + len(response))
        with torch.no_grad():
            if is_critic(name):
                found += model.score(model.model(tokens).last_hidden_state)[0, before, 0].tolist()
            else:
                every = model(tokens).logits[0, before].log_softmax(-1)
                found += every.gather(-1, torch.from_numpy(response.copy())[:, None])[:, 0].tolist()
    return found


# ---- what runs in the process


def save_each(rank, world_size, folders, root):
    from hfsdk.core.layout import Layout
    from hfsdk.core.microbatch import plan_pass
    from hfsdk.core.roles import AdamW, RoleSpec
    from hfsdk.engine.process.recorder import Recorder
    from hfsdk.engine.training.megatron_groups import RoleGroups
    from hfsdk.engine.training.trainer import Trainer

    mesh = Layout().fill(world_size).mesh()
    groups, rows, found = RoleGroups(mesh), rows_table(), {}
    micro_batches = plan_pass(rows.ragged("prompt").lengths + rows.ragged("response").lengths, 1, 64).micro_batches[0]
    for name, (base, adapters) in folders.items():
        more = {"kind": "critic", "head": "scalar"} if is_critic(name) else {"kind": "actor"}
        role = RoleSpec(
            name="one", folder=base, model=ModelSpec.from_folder(base), dtype="fp32", lora=LoRA.from_folder(adapters),
            adapters=adapters, optimizer=AdamW(lr=1e-3), **more,
        )  # fmt: skip
        one = Trainer(role, mesh, groups, Recorder(device=rank, rank=rank))
        values = one.values(rows, micro_batches)["values"] if is_critic(name) else one.log_probs(rows, micro_batches)["log_probs"]
        alone, merged = f"{root}/{name} alone", f"{root}/{name} merged"
        one.save_folder(alone, merge=False)
        one.save_folder(merged)
        found[name] = np.concatenate(list(values)).tolist(), alone, merged
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: make_folders(name, root) for name in FORMS}


@pytest.fixture(scope="module")
def saved(folders, tmp_path_factory):
    (found,) = run(save_each, 1, folders, str(tmp_path_factory.mktemp("saved")))
    return found


# ---- the law


@pytest.mark.parametrize("name", FORMS)
def test_the_trainer_computes_what_peft_does(folders, saved, name):
    np.testing.assert_allclose(saved[name][0], of_peft(*folders[name], name), atol=1e-4)


@pytest.mark.parametrize("name", FORMS)
def test_peft_reads_what_is_saved_as_it_was(folders, saved, name):
    (base, adapters), (_, alone, merged) = folders[name], saved[name]
    was, now = (load_file(f"{folder}/{ADAPTER_WEIGHTS}") for folder in (adapters, alone))
    assert was.keys() == now.keys()
    assert [tensor for tensor in was if not torch.equal(was[tensor], now[tensor])] == []
    assert of_peft(base, alone, name) == of_peft(base, adapters, name)
    np.testing.assert_allclose(of_model(base_of(merged, name).eval(), name), of_peft(base, adapters, name), atol=1e-4)
    before, after = (json.loads(Path(folder, ADAPTER_CONFIG).read_text()) for folder in (adapters, alone))
    layers = {tensor.rsplit(".", 3)[1] for tensor in was if "lora_A" in tensor}
    assert set(after["target_modules"]) == layers
    written = ("target_modules", "modules_to_save", "inference_mode", "base_model_name_or_path", "task_type", "init_lora_weights")
    lost = {key: value for key, value in before.items() if key not in written and after.get(key) != value}
    assert not {key: value for key, value in lost.items() if value not in (None, False, [], {})}


def test_a_tensor_that_nobody_reads_is_refused_where_it_is_loaded_too(folders, tmp_path):
    """The role was declared before the file changed."""
    base, adapters = folders["rslora"]
    changed = shutil.copytree(adapters, tmp_path / "changed")
    tensors = load_file(changed / ADAPTER_WEIGHTS) | {"base_model.model.lm_head.weight": torch.zeros(260, 64)}
    save_file(tensors, changed / ADAPTER_WEIGHTS)
    (text,) = run(refusal, 1, base, str(changed), str(tmp_path))
    assert "base_model.model.lm_head.weight" in text
    assert ADAPTER_WEIGHTS in text


def refusal(rank, world_size, base, adapters, root):
    with refuses(ModelNotFoundError) as told:
        save_each(rank, world_size, {"rslora": (base, adapters)}, root)
    return str(told.value)
