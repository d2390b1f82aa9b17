"""TRL's side of learned_texts.py, run by the Python of TRL's own environment (trl_environment.py); imports nothing of hfsdk.

    python trl_learned.py rows CONFIG.json      the token ids that SFTTrainer, DPOTrainer and GRPOTrainer make of rows, by tokenizer
    python trl_learned.py learn CONFIG.json     SFT, then DPO from it, each into a folder
    python trl_learned.py judge CONFIG.json     losses of model folders on held-out rows of token ids, by transformers alone

each as one line ``reply {...}``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer


class InOrder:
    """Trains on the rows as they are."""

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)  # type: ignore[attr-defined]


def arguments(config: dict, folder: str, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": folder, "report_to": [], "save_strategy": "no", "eval_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        "logging_strategy": "no", "bf16": False, "gradient_checkpointing": False, "seed": 0, "weight_decay": 0.0,
        "lr_scheduler_type": "constant", "warmup_steps": 0, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0,
        "per_device_train_batch_size": config.get("batch_size", 1), "max_steps": config.get("steps", 1), **more,
    }  # fmt: skip


def loaded(folder: str, tokenizer: str | None = None) -> tuple[Any, Any]:
    """Return the model of a folder, and its tokenizer or that of another."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(tokenizer or folder)


def supervised(config: dict, out: str) -> Any:
    from trl import SFTConfig, SFTTrainer

    class InOrderSFT(InOrder, SFTTrainer):
        pass

    model, tokenizer = loaded(config["model"], config.get("tokenizer"))
    args = SFTConfig(**arguments(config, out, learning_rate=config.get("lr", 1e-5)), completion_only_loss=True, max_length=None)
    return InOrderSFT(model=model, args=args, train_dataset=Dataset.from_list(config["demonstrations"]), processing_class=tokenizer)


def preferring(config: dict, model_folder: str, out: str) -> Any:
    from trl import DPOConfig, DPOTrainer

    class InOrderDPO(InOrder, DPOTrainer):
        pass

    model, tokenizer = loaded(model_folder, config.get("tokenizer"))
    args = DPOConfig(**arguments(config, out, learning_rate=config.get("dpo_lr", 1e-6)), beta=0.1, max_length=None)
    return InOrderDPO(
        model=model, ref_model=loaded(model_folder)[0], args=args, train_dataset=Dataset.from_list(config["pairs"]),
        processing_class=tokenizer,
    )  # fmt: skip


def rows(config: dict, out: str) -> list[dict[str, Any]]:
    """Return the token ids of each case."""
    return [rows_of({**config, **case}, out) for case in config["cases"]]


def rows_of(config: dict, out: str) -> dict[str, Any]:
    """Return (prompt, completion) of the demonstrations, (prompt, chosen, rejected) of the pairs, and prompts as GRPO has them."""
    from trl import GRPOConfig, GRPOTrainer

    demonstrations = []
    for row in supervised(config, out).train_dataset:
        first = next(i for i, label in enumerate(row["labels"]) if label != -100)
        demonstrations.append((row["input_ids"][:first], row["input_ids"][first:]))
    pairs = [
        (row["prompt_ids"], row["chosen_ids"], row["rejected_ids"])
        for row in preferring(config, config["model"], out).train_dataset
    ]
    prompts = [row["prompt"] for row in config["demonstrations"]]
    model, tokenizer = loaded(config["model"], config.get("tokenizer"))
    args = GRPOConfig(**arguments({**config, "batch_size": 2}, out), num_generations=2)
    trainer = GRPOTrainer(
        model=model, args=args, processing_class=tokenizer, reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
    )  # fmt: skip
    return {"demonstrations": demonstrations, "pairs": pairs, "prompts": list(trainer._tokenize_prompts(prompts)[0])}


def learn(config: dict, out: str) -> dict[str, Any]:
    first = supervised(config, out)
    first.train()
    first.save_model(config["sft"])
    second = preferring(config, config["sft"], out)
    second.train()
    second.save_model(config["dpo"])
    return {}


@torch.no_grad()
def log_probs(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def judge(config: dict, out: str) -> dict[str, Any]:
    """Return for each pair of folders the loss per token on demonstrations, and DPO's loss of the second against the first."""
    found = {}
    for name, (sft, dpo) in config["folders"].items():
        reference, policy = loaded(sft)[0].eval(), loaded(dpo)[0].eval()
        parts = [log_probs(reference, prompt, response) for prompt, response in config["held_out"]]
        losses = []
        for prompt, chosen, rejected in config["held_out_pairs"]:
            ratios = [(log_probs(policy, prompt, side) - log_probs(reference, prompt, side)).sum() for side in (chosen, rejected)]
            losses.append(-torch.nn.functional.logsigmoid(0.1 * (ratios[0] - ratios[1])).item())
        found[name] = {"sft": -torch.cat(parts).mean().item(), "dpo": sum(losses) / len(losses)}
    return found


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]) if len(sys.argv) > 3 else 2)
    with tempfile.TemporaryDirectory() as folder:
        done = {"rows": rows, "learn": learn, "judge": judge}[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()), folder)
    print("reply", json.dumps(done), flush=True)
