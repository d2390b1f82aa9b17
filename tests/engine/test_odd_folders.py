"""A law of model folders: the engines compute what transformers does, and what is saved of one, transformers reads as it was.

Of every family, and of folders as other programs leave them: a head beside tied embeddings, several files, tensors of rotary
positions, three dtypes. Nothing is trained in between, so that logits are equal bit for bit, as are all files beside the weights.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from spawn import run
from trainer_harness import rows_table

from hfsdk.assets import model_folder
from hfsdk.core.roles import Sampling
from hfsdk.core.spec import ModelSpec
from hfsdk.core.tokenizer_files import COMPANIONS
from hfsdk.core.turn_ends import TurnEnds

TOKENS, PROMPT = 12, [(7 * j) % 250 for j in range(20)]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def change(folder, make):
    """Write a folder's weights again, as ``make(tensors)`` returns them."""
    tensors = make(load_file(folder / "model.safetensors"))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def own_head(tensors):
    return tensors | {HEAD: tensors[EMBEDDING].flip(0)}


def frequencies(tensors):
    return tensors | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.full((16,), 7.0) for i in range(2)}


def three_dtypes(tensors):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return {name: tensor.to(dtypes[i % 3]) for i, (name, tensor) in enumerate(tensors.items())}


def named_value_head(tensors):
    return {name.replace("score.", "value_head."): tensor for name, tensor in tensors.items()}


FORMS = {
    "llama with frequencies": ("Llama", {}, frequencies),
    "llama in bf16": ("Llama", {"tie_word_embeddings": True}, lambda tensors: {n: t.bfloat16() for n, t in tensors.items()}),
    "mistral in three dtypes": ("Mistral", {"sliding_window": None}, three_dtypes),
    "phi3 in pieces": ("Phi3", {}, None),
    "qwen2 with a head of its own": ("Qwen2", {"tie_word_embeddings": True}, own_head),
    "qwen3 with the embeddings twice": (
        "Qwen3",
        {"tie_word_embeddings": True},
        lambda tensors: tensors | {HEAD: tensors[EMBEDDING]},
    ),
    "qwen3 tied": ("Qwen3", {"tie_word_embeddings": True}, None),
    "llama critic": ("Llama", {}, named_value_head),
}
"""Name -> (how transformers' class names of it begin, what its config has beside the sizes, what becomes of its file)."""
CHANGED = {
    "llama in bf16": {}, "qwen2 with a head of its own": {"tie_word_embeddings": False}, "llama critic": {},
}  # fmt: skip
"""What a saved config says otherwise: the files have another head than it tied."""


def is_critic(name):
    return name.endswith("critic")


def dtype_of(name):
    return "bf16" if name.endswith("bf16") else "fp32"


def model_of(folder, name):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind = AutoModelForSequenceClassification if is_critic(name) else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def make_folder(name, folder):
    import transformers

    family, more, change_file = FORMS[name]
    config = getattr(transformers, f"{family}Config")(
        **{"vocab_size": 320, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
           "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 512, "num_labels": 1, "pad_token_id": 256,
           "bos_token_id": 257, "eos_token_id": 258, **more},
    )  # fmt: skip
    torch.manual_seed(list(FORMS).index(name))
    model = getattr(transformers, family + ("ForSequenceClassification" if is_critic(name) else "ForCausalLM"))(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            _ = parameter.mul_(6) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="300KB" if name.endswith("in pieces") else "1GB")
    assert (folder / "model.safetensors.index.json").exists() == name.endswith("in pieces")
    for file in COMPANIONS:
        if (model_folder("tiny") / file).is_file():
            shutil.copy(model_folder("tiny") / file, folder)
    for file in ("config.json", "tokenizer_config.json"):  # in a form of its own
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()), indent=1))
    if change_file is not None:
        change(folder, change_file)
    if not is_critic(name):  # a token that ends a text because generation_config.json says so, and nothing else does
        drawn = greedy(folder, name)
        generation = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [258, drawn[TOKENS // 2]]}))
    return str(folder)


def greedy(folder, name):
    model, prompt = model_of(folder, name), torch.tensor([PROMPT])
    return model.generate(prompt, do_sample=False, max_new_tokens=TOKENS, attention_mask=torch.ones_like(prompt))[0, 20:].tolist()


def logits(folder, name):
    with torch.no_grad():
        return model_of(folder, name)(torch.tensor([PROMPT])).logits


def log_probs(folder, name):
    """Return transformers' log-probabilities of the responses' tokens."""
    model, rows, found = model_of(folder, name), rows_table(), []
    for prompt, response in zip(rows.ragged("prompt"), rows.ragged("response"), strict=True):
        with torch.no_grad():
            every = model(torch.from_numpy(np.concatenate([prompt, response]))[None]).logits[0].log_softmax(-1)
        found += every[len(prompt) - 1 : -1].gather(-1, torch.from_numpy(response.copy())[:, None])[:, 0].tolist()
    return found


# ---- what runs in the process


def save_each(rank, world_size, folders, root, layout="tp1"):
    """Load each folder, compute with it, save it, and load what was saved."""
    from hfsdk.core.layout import Layout
    from hfsdk.core.microbatch import plan_pass
    from hfsdk.core.roles import RoleSpec
    from hfsdk.engine.process.recorder import Recorder
    from hfsdk.engine.training.megatron_groups import RoleGroups
    from hfsdk.engine.training.trainer import Trainer

    mesh = Layout.parse(layout).fill(world_size).mesh()
    groups, rows, found = RoleGroups(mesh), rows_table(), {}
    micro_batches = plan_pass(rows.ragged("prompt").lengths + rows.ragged("response").lengths, 1, 64).micro_batches[0]

    def trainer(folder, name):
        more = {"kind": "critic", "head": "scalar"} if is_critic(name) else {"kind": "actor"}
        role = RoleSpec(name="one", folder=folder, model=ModelSpec.from_folder(folder), dtype=dtype_of(name), **more)
        return Trainer(role, mesh, groups, Recorder(device=rank, rank=rank))

    def computed(one, name):
        values = one.values(rows, micro_batches)["values"] if is_critic(name) else one.log_probs(rows, micro_batches)["log_probs"]
        return np.concatenate(list(values)).tolist()

    for name, folder in folders.items():
        one, target = trainer(folder, name), f"{root}/saved {name}"
        left_out = one.save_folder(target)
        found[name] = target, left_out, computed(one, name), computed(trainer(target, name), name)
    return found


def generate_each(rank, world_size, folders):
    """Return what vLLM draws of each folder, where it is most probable: by its own reading, or with weights that it is given."""
    from test_rollout import draw, make, push

    from hfsdk.core.table import Ragged

    found = {}
    for name, folder in folders.items():
        given = name.endswith("head of its own")
        rollout = make(folder, "shared", load_weights=not given)
        if given:
            push(rollout, model_of(folder, name))
        drawn = draw(
            rollout, Sampling(max_new_tokens=TOKENS, temperature=0.0), prompts=Ragged.of([PROMPT], np.int32),
            seeds=np.zeros(1, np.int64), eos=TurnEnds.of(folder).ids,
        )  # fmt: skip
        found[name] = drawn["response"][0].tolist()
        rollout.close()
    return found


# ---- the law


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("odd")
    return {name: make_folder(name, root / name) for name in FORMS}


@pytest.fixture(scope="module")
def saved(folders, tmp_path_factory):
    (found,) = run(save_each, 1, folders, str(tmp_path_factory.mktemp("saved")))
    return found


@pytest.mark.parametrize("name", FORMS)
def test_what_is_saved_is_what_was_loaded(folders, saved, name):
    folder, (target, left_out, before, again) = Path(folders[name]), saved[name]
    target = Path(target)
    assert before == again
    assert left_out == []
    kept = {file.name for file in folder.iterdir() if file.name in COMPANIONS}
    assert {file.name for file in target.iterdir()} == kept | {"config.json", "model.safetensors"}
    for file in kept:
        assert (target / file).read_bytes() == (folder / file).read_bytes(), file
    if is_critic(name):
        value_head, score = load_file(folder / "model.safetensors"), load_file(target / "model.safetensors")
        assert torch.equal(value_head["value_head.weight"], score["score.weight"])
        return
    assert torch.equal(logits(folder, name), logits(target, name))
    assert greedy(folder, name) == greedy(target, name)
    np.testing.assert_allclose(before, log_probs(folder, name), atol=0.3 if dtype_of(name) == "bf16" else 1e-4)


@pytest.mark.parametrize("name", FORMS)
def test_a_saved_config_says_what_it_said_but_for_the_weights(folders, saved, name):
    was, now = ((Path(place) / "config.json").read_bytes() for place in (folders[name], saved[name][0]))
    if name not in CHANGED:
        assert was == now
        return
    said = {**json.loads(was), **CHANGED[name]} | ({"dtype": "bfloat16"} if dtype_of(name) == "bf16" else {})
    assert json.loads(now) == said


def test_ranks_that_cut_the_vocabulary_write_the_same_file(folders, saved, tmp_path):
    names = ("qwen2 with a head of its own", "phi3 in pieces", "mistral in three dtypes")
    found, _ = run(save_each, 2, {name: folders[name] for name in names}, str(tmp_path), "tp2")
    for name in names:
        assert Path(found[name][0], "model.safetensors").read_bytes() == Path(saved[name][0], "model.safetensors").read_bytes()


def test_vllm_draws_what_transformers_draws(folders):
    pytest.importorskip("vllm")
    asked = {name: folder for name, folder in folders.items() if not is_critic(name) and dtype_of(name) == "fp32"}
    (found,) = run(generate_each, 1, asked)
    assert found == {name: greedy(folder, name) for name, folder in asked.items()}
    assert all(len(drawn) <= TOKENS // 2 + 1 for drawn in found.values()), "each ends where generation_config.json says"
