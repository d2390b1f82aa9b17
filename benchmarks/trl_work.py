"""TRL's side of vs_trl.py, run by the Python of TRL's own environment (trl_environment.py): PPO or GRPO, a few steps, timed.

    python trl_work.py --config CONFIG.json

prints after every step a line ``reply {...}`` as vs_trl.py's own side does: seconds of the step and of its stages, of processors,
response tokens, optimizer steps. Imports nothing of hfsdk.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Stages:
    """Seconds by stage of the step that runs; ``finish`` prints them and begins the next one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = False
        self._begin()

    def _begin(self) -> None:
        self.started, self.cpu_started, self.seconds, self.tokens, self.updates = time.perf_counter(), time.process_time(), {}, 0, 0

    def timed(self, stage: str, function: Callable[..., Any], tokens: Callable[[Any], int] | None = None) -> Callable[..., Any]:
        """Return the function, its time counted to a stage where no gradient is made."""
        import torch

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside or (stage == "passes" and torch.is_grad_enabled()):
                return function(*args, **kwargs)
            self._inside, begun = True, time.perf_counter()
            try:
                found = function(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begun
            self.tokens += tokens(found) if tokens else 0
            return found

        return run

    def count_steps(self, optimizer: Any) -> None:
        """Count an optimizer's steps from now on."""
        step = optimizer.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.updates += 1
            return step(*args, **kwargs)

        optimizer.step = counted

    def finish(self) -> None:
        """Print the step."""
        took = time.perf_counter() - self.started
        stages = {**self.seconds, "update": took - sum(self.seconds.values())}
        done = {"cpu": time.process_time() - self.cpu_started, "tokens": self.tokens, "updates": self.updates}
        print("reply", json.dumps({"seconds": took, **stages, **done}), flush=True)
        self._begin()


def arguments_of(config: dict, folder: str) -> dict[str, Any]:
    """Return the arguments that both trainers have."""
    return {
        "output_dir": folder, "report_to": [], "save_strategy": "no", "eval_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        "logging_strategy": "no", "bf16": config["dtype"] == "bf16", "gradient_checkpointing": config["recompute"], "seed": 0,
        "learning_rate": config["lr"], "lr_scheduler_type": "constant", "temperature": 1.0, "gradient_accumulation_steps": 1,
    }  # fmt: skip


def model_of(config: dict, kind: Any, **options: Any) -> Any:
    """Load the model in float32: with bf16 TRL's own choice is mixed precision, weights in float32."""
    import torch

    return kind.from_pretrained(config["model"], dtype=torch.float32, **options)


def lora_of(config: dict, **options: Any) -> Any:
    """Return peft's description of the adapters, or nothing."""
    from peft import LoraConfig

    rank = config["rank"]
    return LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=LINEARS, **options) if rank else None


def run_ppo(config: dict, folder: str) -> None:
    """Take steps of PPO."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    tokenizer, stages = AutoTokenizer.from_pretrained(config["model"], padding_side="left"), Stages()
    policy = model_of(config, AutoModelForCausalLM)
    value = model_of(config, AutoModelForSequenceClassification, num_labels=1)
    value.config.pad_token_id = tokenizer.pad_token_id
    if config["rank"]:
        from peft import inject_adapter_in_model

        value = inject_adapter_in_model(lora_of(config, task_type="SEQ_CLS"), value)
        value.score.requires_grad_(True)
    ids = [tokenizer(text)["input_ids"] for text in config["prompts"]]
    rows = config["rows"]
    arguments = PPOConfig(
        **arguments_of(config, folder), per_device_train_batch_size=rows, num_mini_batches=config["mini_batches"],
        num_ppo_epochs=1, local_rollout_forward_batch_size=rows, total_episodes=rows * config["steps"],
        response_length=config["new_tokens"], kl_coef=0.05, num_sample_generations=0,
    )  # fmt: skip
    width = len(ids[0])
    ppo_trainer.batch_generation = stages.timed("generate", ppo_trainer.batch_generation, lambda found: found[0][:, width:].numel())
    ppo_trainer.forward = stages.timed("passes", ppo_trainer.forward)
    ppo_trainer.get_reward = stages.timed("passes", ppo_trainer.get_reward)
    reference = None if config["rank"] else model_of(config, AutoModelForCausalLM)
    trainer = PPOTrainer(
        args=arguments, processing_class=tokenizer, model=policy, ref_model=reference,
        value_model=value, reward_model=length_module(tokenizer, width), train_dataset=Dataset.from_dict({"input_ids": ids}),
        eval_dataset=Dataset.from_dict({"input_ids": ids[:1]}), callbacks=[on_step_end(lambda step: stages.finish())],
        data_collator=DataCollatorWithPadding(tokenizer), peft_config=lora_of(config, task_type="CAUSAL_LM"),
    )  # fmt: skip
    stages.count_steps(trainer.optimizer.optimizer)
    trainer.train()


def run_grpo(config: dict, folder: str) -> None:
    """Take steps of GRPO; one generates and takes ``mini_batches`` optimizer steps."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer, stages, each = AutoTokenizer.from_pretrained(config["model"]), Stages(), config["mini_batches"]
    new_tokens = config["new_tokens"]
    arguments = GRPOConfig(
        **arguments_of(config, folder), per_device_train_batch_size=config["rows"] // each, steps_per_generation=each,
        max_steps=each * config["steps"], num_generations=config["copies"], max_completion_length=new_tokens, beta=0.04,
        loss_type="grpo", shuffle_dataset=False, generation_kwargs={"eos_token_id": None},
    )  # fmt: skip

    class Timed(GRPOTrainer):
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            made = super().create_optimizer(*args, **kwargs)
            stages.count_steps(made)
            return made

    def finish(step: int) -> None:
        if step % each == 0:
            stages.finish()

    model = model_of(config, AutoModelForCausalLM)
    model.generation_config.eos_token_id = None  # or the one of its own would be taken after all
    trainer = Timed(
        model=model, args=arguments, processing_class=tokenizer, reward_funcs=length,
        train_dataset=Dataset.from_dict({"prompt": config["prompts"]}), callbacks=[on_step_end(finish)],
        peft_config=lora_of(config, task_type="CAUSAL_LM"),
    )  # fmt: skip
    trainer.eos_token_ids = []
    trainer._generate_single_turn = stages.timed("generate", trainer._generate_single_turn, lambda found: sum(map(len, found[0])))
    trainer._get_per_token_logps_and_entropies = stages.timed("passes", trainer._get_per_token_logps_and_entropies)
    trainer.train()


def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Reward of no meaning and no cost: the same as vs_trl.py's."""
    return [len(text) / 100 for text in completions]


def length_module(tokenizer: Any, width: int) -> Any:
    """Return that reward as a module that TRL's PPO takes for a reward model; prompts have ``width`` tokens."""
    import torch

    class Backbone(torch.nn.Module):
        def forward(self, input_ids: Any, attention_mask: Any, **rest: Any) -> Any:
            texts = tokenizer.batch_decode(input_ids[:, width:], skip_special_tokens=True)
            scores = torch.tensor(length([], texts))
            return SimpleNamespace(hidden_states=[scores[:, None, None].expand(*input_ids.shape, 1)])

    class Reward(torch.nn.Module):
        base_model_prefix = "backbone"

        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.score = Backbone(), torch.nn.Identity()

    return Reward()


def on_step_end(run: Callable[[int], None]) -> Any:
    """Return a callback of transformers that is given the number of each optimizer step, or of PPO's each step."""
    from transformers import TrainerCallback

    class Called(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            run(state.global_step)

    return Called()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE", required=True, help="JSON: see config_of in vs_trl.py")
    config = json.loads(Path(parser.parse_args().config).read_text())
    sys.modules["vllm"] = None  # type: ignore[assignment]  # borrowed, not used, and TRL would import it
    import torch

    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory(prefix="hfsdk-trl-") as folder:
        {"ppo": run_ppo, "grpo": run_grpo}[config["algorithm"]](config, folder)


if __name__ == "__main__":
    main()
