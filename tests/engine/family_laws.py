"""The laws of what models of one family differ in, for the layouts of a module's ``SWEEP``: transformers is the reference."""

import json

import numpy as np
import pytest
import torch
from layout_sweep import of
from trainer_harness import (
    NUM_ROWS,
    Harness,
    by_row,
    check_inference,
    is_critic,
    loss_of,
    reference_model_at,
    write_references,
)

from hfsdk.core.spec import ModelSpec

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 64}
"""With 64 positions of before, a head of 32 has dimensions of all three kinds."""

MODELS = {
    "yarn": ("Qwen2", {"rope_parameters": YARN}),
    "yarn with its own attention": ("Llama", {"rope_parameters": YARN | {"attention_factor": 0.8, "truncate": False}}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "bias of attention": ("Llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "bias of the MLP critic": ("Llama", {"mlp_bias": True}),
    "mistral": ("Mistral", {"head_dim": 64, "sliding_window": None}),
    "windowed mistral": ("Mistral", {"sliding_window": 6}),
    "phi3": ("Phi3", {}),
    "windowed phi3": ("Phi3", {"sliding_window": 7, "tie_word_embeddings": True}),
    "phi3 critic": ("Phi3", {}),
}
"""Name -> (how transformers' class names of it begin, what its config has beside the sizes)."""


def make_folder(name, folder, **sizes):
    import transformers

    family, more = MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        **{"vocab_size": 260, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
           "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "num_labels": 1, "pad_token_id": 0, "bos_token_id": 1,
           "eos_token_id": 2, **sizes, **more},
    )  # fmt: skip
    torch.manual_seed(list(MODELS).index(name))
    model = getattr(transformers, family + ("ForSequenceClassification" if is_critic(name) else "ForCausalLM"))(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Folders, and transformers' outputs and gradients of every model."""
    root = tmp_path_factory.mktemp("families")
    folders = {name: make_folder(name, root / name, hidden_size=256) for name in MODELS}
    references, _ = write_references(folders, root)
    assert all(references[name].columns["logits"].std() >= 1 for name in MODELS if not is_critic(name))
    return {"root": root, "folders": folders, "references": references}


# ---- what runs in the processes


def check_gradients(h):
    """With everything kept and, on one rank, with everything computed again: distance of the gradient, of the loss, of the norm."""
    found = {}
    for name in h.models:
        temperature = 1.0 if is_critic(name) else h.rows()["temperature"]
        for recompute in ("", "full") if h.mesh.layout.size == 1 else ("",):
            trainer = h.trainer(name, recompute=recompute)
            metrics = trainer.forward_backward(h.rows(name), h.plan(max_tokens=60)[0], loss_of(name), temperature)
            loss, gradient = h.gradients[name]
            norm = sum(g.double().pow(2).sum() for g in gradient.values()) ** 0.5
            off = h.difference(trainer.gradients(), gradient)
            found[name, recompute] = off, metrics["loss"] - loss, trainer.grad_norm() / float(norm) - 1
    return found


def check_saving(h):
    found = {}
    for name in h.models:
        trainer = h.trainer(name)
        trainer.update(h.rows(name), h.plan(), loss_of(name))
        folder = h.root / f"saved {name} {h.mesh.layout}"
        trainer.save_folder(folder)
        found[name] = str(folder), trainer.weights()
    return found


CHECKS = {"inference": check_inference, "gradients": check_gradients, "saving": check_saving}


HARNESS = Harness


# ---- the laws


@of("inference")
def test_outputs_are_those_of_transformers(case, results, layout):
    ranks, off = results(layout, "inference"), {}
    for model in ranks[0]:
        found = [rank[model] for rank in ranks]
        assert found[-1].keys() == ({"values", "scores"} if is_critic(model) else {"log_probs", "entropy"}), model
        for column in found[-1]:
            mine = by_row([rank.get(column, {}) for rank in found], NUM_ROWS)
            expected = case["references"][model].columns[column].detach().numpy()
            assert mine.shape == expected.shape, (model, column)
            off[model, column] = np.abs(mine - expected).max()
    assert {key: apart for key, apart in off.items() if not apart < 1e-4} == {}


@of("gradients")
def test_gradient_is_that_of_plain_pytorch(results, layout):
    off = {key: found for key, found in results(layout, "gradients")[0].items() if not max(map(abs, found)) < 1e-5}
    assert off == {}, "distance of the gradient, of the loss, of the norm"


@of("saving")
def test_saved_folder_is_read_by_transformers(case, results, layout):
    for model, (folder, weights) in results(layout, "saving")[0].items():
        loaded = dict(reference_model_at(folder, model).named_parameters())
        assert set(loaded) == set(weights), model
        assert [n for n in weights if not torch.equal(loaded[n], weights[n])] == [], model
        before = dict(case["references"][model].model.named_parameters())
        assert min((loaded[n] - before[n]).abs().max() for n in before) > 1e-5, (model, "an update moved every tensor")
        alone = results("tp1", "saving")[0][model][1]
        off = torch.cat([(alone[n] - weights[n]).flatten() for n in alone])
        assert off.abs().max() <= 6e-4, (model, "near-zero gradients may flip their sign")
        assert (off.abs() > 1e-6).float().mean() < 0.01, model
        kept = [json.loads((case["root"] / at / "config.json").read_text()) for at in (model, folder)]
        assert ModelSpec.from_hf_config(kept[0]) == ModelSpec.from_hf_config(kept[1]), model
