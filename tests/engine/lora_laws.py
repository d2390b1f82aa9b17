"""The laws of LoRA in the trainer, for the layouts of a module's ``SWEEP``: peft on transformers' model is the reference."""

from functools import partial

import numpy as np
import pytest
import torch
from layout_sweep import of
from trainer_harness import (
    NUM_ROWS,
    Harness,
    by_row,
    check_inference,
    equal,
    is_critic,
    loss_of,
    reference_model,
    rows_table,
    write_references,
)
from whole_state import state_of

MODELS = ("untied", "tied", "critic")


def lora():
    from hfsdk.core.lora import LoRA

    return LoRA(rank=4, alpha=12, seed=3)


# ---- the reference


def make_folders(root):
    import transformers
    from peft import LoraConfig, get_peft_model

    folders = {}
    for name in MODELS:
        config = transformers.LlamaConfig(
            vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=2 if name == "tied" else 4, head_dim=32, max_position_embeddings=64,
            tie_word_embeddings=name == "tied", rms_norm_eps=1e-5, num_labels=1, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(MODELS.index(name))
        model = getattr(transformers, "LlamaFor" + ("SequenceClassification" if is_critic(name) else "CausalLM"))(config)
        with torch.no_grad():
            for parameter in model.parameters():
                _ = parameter.mul_(8) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
        folders[name] = str(root / name)
        model.save_pretrained(folders[name])
        task = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]} if is_critic(name) else {"task_type": "CAUSAL_LM"}
        config = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", **task)
        adapted = get_peft_model(reference_model(folders[name]), config)
        with torch.no_grad():
            for of, parameter in adapted.named_parameters():
                if "lora_" in of:
                    parameter.copy_(0.1 * torch.randn_like(parameter))
        adapted.save_pretrained(adapters_of(folders[name]))
    return folders


def adapters_of(folder):
    return f"{folder}-adapters"


def adapted(folder):
    """Return transformers' model with peft's adapters in it, which are trained."""
    from peft import PeftModel

    return PeftModel.from_pretrained(reference_model(folder), adapters_of(folder), is_trainable=True).base_model.model


def plain_name(name):
    return name.replace(".default", "").replace(".modules_to_save", "")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    folders = make_folders(root)
    references, gradients = write_references(folders, root, make_model=adapted)
    for _, by_name in gradients.values():
        for name in list(by_name):
            by_name[plain_name(name)] = by_name.pop(name)
    torch.save({"old": torch.load(root / "reference.pt", weights_only=False)["old"], "gradients": gradients}, root / "reference.pt")
    return {"root": root, "folders": folders, "references": references}


# ---- what runs in the processes


class Adapted(Harness):
    """A harness whose trainers have peft's adapters."""

    def __init__(self, layout, *given):
        super().__init__(layout, *given)
        self.layout = layout

    def trainer(self, name, choices=None, **options):
        options = {"lora": lora(), "adapters": adapters_of(self.root / name), **options}
        return super().trainer(name, choices, **options)


def check_gradients(h, **options):
    found = {}
    for name in h.models:
        trainer, expected = h.trainer(name, **options), h.gradients[name]
        temperature = 1.0 if is_critic(name) else h.rows()["temperature"]
        metrics = trainer.forward_backward(h.rows(name), h.plan()[0], loss_of(name), temperature)
        norm = sum(g.double().pow(2).sum() for g in expected[1].values()) ** 0.5
        norm_off = trainer.grad_norm() / float(norm) - 1
        found[name] = h.difference(trainer.gradients(), expected[1]), metrics["loss"] - expected[0], norm_off
    return found


def check_sequence_parallel(h):
    from hfsdk.core.training_choices import TrainingChoices

    return check_gradients(h, choices=TrainingChoices(sequence_parallel=True))


def check_training(h):
    """Take steps; return the adapters after them, whether the base is as before, and what a save and a restore give."""
    trainer = h.trainer("tied", adapters="")
    base = {name: p.data.clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    untrained = trainer.log_probs(h.mine(h.rows("tied"), h.passes()[0]), h.passes()[1])
    trainer.update(h.rows("tied"), h.plan(mini_batches=2, epochs=2), loss_of("tied"))
    same_base = all(torch.equal(p.data, base[name]) for name, p in trainer.model.named_parameters() if name in base)
    share = trainer.share()
    whole = state_of(trainer)
    trainer.update(h.rows("tied"), h.plan(), loss_of("tied"))
    trainer.take_share(share)
    back = equal(state_of(trainer), whole)
    folder, merged = (str(h.root / f"{kind} {h.layout}") for kind in ("saved", "merged"))
    trainer.save_folder(folder, merge=False)
    trainer.save_folder(merged)
    again = h.trainer("tied", adapters=folder)
    read = equal(again.weights(merge=False), trainer.weights(merge=False))
    rows, micro = h.mine(h.rows("tied"), h.passes()[0]), h.passes()[1]
    plain = h.trainer("tied", lora=None, adapters="", optimizer=None)
    first = plain.log_probs(rows, micro)
    zero_before = all(np.array_equal(untrained[c].flat, first[c].flat) for c in first)
    return {
        "same_base": same_base, "back": back, "read": read, "zero_before": zero_before, "weights": trainer.weights(merge=False),
        "memory": trainer.memory_bytes(), "num_own": sum(t.numel() for t in trainer.local_tensors().values()),
        "log_probs": {c: dict(zip(rows.row_ids.tolist(), v, strict=True)) for c, v in trainer.log_probs(rows, micro).items()},
    }  # fmt: skip


CHECKS = {
    "inference": check_inference, "gradients": check_gradients, "recomputed": partial(check_gradients, recompute="full"),
    "sequence_parallel": check_sequence_parallel, "training": check_training,
}  # fmt: skip


HARNESS = Adapted


# ---- the tests


@of("inference")
def test_outputs_are_those_of_peft(layout, results, case):
    ranks = results(layout, "inference")
    for name in MODELS:
        for column in ("values", "scores") if is_critic(name) else ("log_probs", "entropy"):
            found = by_row([rank[name].get(column, {}) for rank in ranks], NUM_ROWS)
            expected = case["references"][name].columns[column].detach().numpy()
            np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def hold_gradients(rank):
    off = {name: found for name, found in rank.items() if not max(map(abs, found)) < 1e-5}
    assert off == {}, "distance of the gradient, of the loss, of the norm"


@of("gradients")
def test_gradients_are_those_of_peft(layout, results):
    hold_gradients(results(layout, "gradients")[0])


@of("recomputed")
def test_gradients_are_the_same_where_activations_are_computed_again(layout, results):
    hold_gradients(results(layout, "recomputed")[0])


@of("sequence_parallel")
def test_gradients_are_the_same_where_norms_are_cut_over_ranks(layout, results):
    hold_gradients(results(layout, "sequence_parallel")[0])


@of("training")
def test_only_adapters_are_trained_kept_and_saved(layout, results, case):
    ranks = results(layout, "training")
    for rank in ranks:
        assert rank["same_base"]
        assert rank["back"]
        assert rank["read"]
        assert rank["zero_before"], "before the first step B is zero: nothing changes"
        assert rank["memory"]["gradients"] <= 4 * rank["num_own"] + 4096, "no gradient of the base"
        assert rank["memory"]["optimizer"] <= 8 * rank["num_own"] + 4096
    names = {plain_name(name) for name in case["references"]["tied"].model.state_dict() if "lora_" in name}
    assert set(ranks[0]["weights"]) == names


@of("training")
def test_every_layout_learns_the_same(layout, results):
    mine, first = results(layout, "training")[0]["weights"], results("tp1", "training")[0]["weights"]
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, first[name], atol=2e-5, rtol=1e-4)


@of("training")
def test_peft_reads_what_is_saved_and_merged_equals_adapted(layout, results, case):
    from peft import PeftModel
    from trainer_harness import Reference

    ranks, folder = results(layout, "training"), case["folders"]["tied"]
    found = by_row([rank["log_probs"].get("log_probs", {}) for rank in ranks], NUM_ROWS)
    rows = rows_table()
    saved, merged = (str(case["root"] / f"{kind} {layout}") for kind in ("saved", "merged"))
    models = {
        "adapters": lambda _: PeftModel.from_pretrained(reference_model(folder), saved).base_model.model,
        "merged": lambda _: reference_model(merged),
    }
    for name, make in models.items():
        reference = Reference(folder, rows, np.ones(NUM_ROWS, np.float32), make)
        expected = reference.columns["log_probs"].detach().numpy()
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-5, err_msg=name)
