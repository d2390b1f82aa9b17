"""TRL's PPO on the task of learning.py, run by the Python of TRL's own environment (trl_environment.py).

    python trl_ppo.py --config CONFIG.json

reads one run's settings and writes, into ``folder``: ``step0000``, ``step0005``, ... (the policy as transformers loads it)
and ``history.json`` (seconds and TRL's own metrics of every step). Imports nothing of hfsdk: prompts and lengths come in CONFIG.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))


def run(config: dict) -> dict:
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        TrainerCallback,
        set_seed,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    torch.set_num_threads(THREADS)
    set_seed(config["seed"])
    folder, save_every = Path(config["folder"]), config["save_every"]
    tokenizer = AutoTokenizer.from_pretrained(config["model"], padding_side="left")
    policy, reference = (AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32) for _ in range(2))
    value = AutoModelForSequenceClassification.from_pretrained(config["model"], num_labels=1, dtype=torch.float32)
    value.config.pad_token_id = tokenizer.pad_token_id
    ids = [tokenizer(text)["input_ids"] for text in config["prompts"]]
    width = max(map(len, ids))
    arguments = PPOConfig(
        output_dir=str(folder / "trainer"), report_to=[], save_strategy="no", eval_strategy="no", disable_tqdm=True,
        logging_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, num_sample_generations=0,
        seed=config["seed"], per_device_train_batch_size=config["batch_size"], gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=config["batch_size"], total_episodes=config["batch_size"] * config["steps"],
        response_length=config["new_tokens"], stop_token="eos", temperature=1.0, num_ppo_epochs=config["epochs"],
        num_mini_batches=config["mini_batches"], learning_rate=config["lr"],
        warmup_steps=config["warmup"], kl_coef=config["kl_coef"], **config.get("more", {}),
    )  # fmt: skip
    history: list[dict] = []

    class Keep(TrainerCallback):
        started = time.perf_counter()

        def on_log(self, args, state, control, logs=None, **rest) -> None:
            now = time.perf_counter()
            history.append({"step": state.global_step, "seconds": now - self.started, **(logs or {})})
            self.started = now

        def on_step_end(self, args, state, control, **rest) -> None:
            if state.global_step % save_every == 0 or state.global_step == config["steps"]:
                policy.save_pretrained(folder / f"step{state.global_step:04d}")
                Keep.started = self.started = time.perf_counter()

    trainer = PPOTrainer(
        args=arguments, processing_class=tokenizer, model=policy, ref_model=reference, value_model=value,
        reward_model=sentiment_module(tokenizer, width), train_dataset=Dataset.from_dict({"input_ids": ids}),
        eval_dataset=Dataset.from_dict({"input_ids": ids[:1]}), callbacks=[Keep()],
        data_collator=DataCollatorWithPadding(tokenizer, padding="max_length", max_length=width),
    )  # fmt: skip
    policy.save_pretrained(folder / "step0000")
    trainer.train()
    return {"config": {k: v for k, v in config.items() if k != "prompts"}, "threads": THREADS, "history": history}


def sentiment_module(tokenizer, width: int):
    """Return a module that TRL takes for a reward model: its "logits" are VADER's compound score of the continuation.

    TRL calls ``model.<base_model_prefix>(...).hidden_states[-1]``, then ``model.score(...)``, and takes the entry at the last
    token; the score stands at every position. Prompts are padded to ``width``, so the continuation starts there.
    """
    import torch
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()

    class Backbone(torch.nn.Module):
        def forward(self, input_ids, attention_mask, **rest):
            texts = [
                tokenizer.decode(row[width:][mask[width:]].tolist(), skip_special_tokens=True)
                for row, mask in zip(input_ids, attention_mask.bool(), strict=True)
            ]
            scores = torch.tensor([analyzer.polarity_scores(text)["compound"] for text in texts])
            return SimpleNamespace(hidden_states=[scores[:, None, None].expand(*input_ids.shape, 1)])

    class Reward(torch.nn.Module):
        base_model_prefix = "backbone"

        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.score = Backbone(), torch.nn.Identity()

    return Reward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE", required=True, help="JSON: see config in learning.py")
    config = json.loads(Path(parser.parse_args().config).read_text())
    sys.modules["vllm"] = None  # type: ignore[assignment]  # borrowed, not used, and TRL would import it
    Path(config["folder"]).mkdir(parents=True, exist_ok=True)
    result = run(config)
    (Path(config["folder"]) / "history.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
