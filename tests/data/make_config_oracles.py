"""Writes ``configs.json``: example configurations of verl, TRL, OpenRLHF and NeMo-RL, and what those systems' own formulas make of
them.

``python make_config_oracles.py VERL TRL TRL_PPO OPENRLHF NEMO``: folders with the packages ``verl`` 0.9.1, ``trl`` 1.16.0, ``trl``
1.9.0, ``openrlhf`` 0.11.2 and a checkout of NeMo-RL v0.7.0. A formula is an expression of their source, found by what it is
assigned to and worked out here over the numbers of a configuration; its text and its file stand beside the number. Nothing of
theirs is run.

The configurations are keys and values of examples, at the values that scripts take where nobody sets a variable; logging, data
files and names of runs are left out. Examples: verl v0.9.0, TRL's documentation and scripts at v1.9.0, OpenRLHF v0.11.0, NeMo-RL
v0.7.0.
"""

from __future__ import annotations

import ast
import json
import operator
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "configs.json"
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv, ast.Add: operator.add,
    ast.Sub: operator.sub,
}  # fmt: skip


def worked_out(node: ast.expr, names: Mapping[str, float]) -> float:
    """The value of arithmetic over names that are known by their text."""
    text = ast.unparse(node)
    if text in names:
        return names[text]
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](worked_out(node.left, names), worked_out(node.right, names))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "int":
        return int(worked_out(node.args[0], names))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "exact_div":
        whole, part = (worked_out(one, names) for one in node.args[:2])
        assert whole % part == 0
        return whole // part
    raise KeyError(f"{text} is not known")


class Source:
    """The files of one package, by path."""

    def __init__(self, release: str, folder: Path) -> None:
        self.release, self.folder = release, folder
        self.names: dict[str, float] = {}
        self.numbers: dict[str, dict[str, Any]] = {}

    def formula(self, file: str, target: str, having: str = "") -> ast.expr:
        """What is assigned to ``target`` (or returned by a function of that name, or an argument of a call to it)."""
        tree = ast.parse((self.folder / file).read_text(encoding="utf-8"))
        found: list[ast.expr] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and any(ast.unparse(one) == target for one in node.targets):
                found.append(node.value)
            if isinstance(node, ast.FunctionDef) and node.name == target:
                found += [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None]
            if isinstance(node, ast.Call) and ast.unparse(node.func) == target:
                found += node.args
        fitting = [one for one in found if having in ast.unparse(one) and not isinstance(one, (ast.Name, ast.Attribute))]
        assert fitting, f"{self.release}: {file} has no {target} with {having!r}"
        return fitting[0]

    def number(self, row: str, file: str, target: str, having: str = "") -> float:
        """Work a formula out and keep it as the oracle of a row (none, where ``row`` is empty)."""
        node = self.formula(file, target, having)
        value = worked_out(node, self.names)
        if row:
            self.numbers[row] = {"value": value, "formula": f"{target} = {ast.unparse(node)}", "source": f"{self.release}, {file}"}
        return value

    def begin(self, **names: float) -> None:
        self.names, self.numbers = dict(names), {}


def verl_numbers(s: Source, c: Mapping[str, Any]) -> dict[str, Any]:
    a, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    gpus = c["trainer.n_gpus_per_node"] * c["trainer.nnodes"]
    s.begin(**{
        "config.data.train_batch_size": c["data.train_batch_size"], "config.actor_rollout_ref.rollout.n": c[f"{rollout}n"],
        "self.config.actor_rollout_ref.rollout.n": c[f"{rollout}n"], "ppo_mini_batch_size": c[f"{a}ppo_mini_batch_size"],
        "torch.distributed.get_world_size()": gpus, "n_gpus": gpus, "force_group_size": 1, "epochs": 1,
        "self.ulysses_sequence_parallel_size": c.get(f"{a}ulysses_sequence_parallel_size", 1),
        "config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size": c.get(f"{a}megatron.tensor_model_parallel_size", 1),
        "config.actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": c.get(f"{a}megatron.pipeline_model_parallel_size",
        1),
        "config.actor_rollout_ref.actor.megatron.context_parallel_size": c.get(f"{a}megatron.context_parallel_size", 1),
    })  # fmt: skip
    samples = s.number("samples", "utils/config.py", "real_train_batch_size")
    mini = s.number("mini-batch", "trainer/ppo/v1/trainer_base.py", "ppo_mini_batch_size", "rollout.n")
    if c.get("model_engine") == "megatron":
        s.names["model_parallel_size"] = s.number("", "utils/config.py", "model_parallel_size", "pipeline")
        dp = s.number("data-parallel ranks", "utils/config.py", "megatron_dp")
    else:
        dp = s.number("data-parallel ranks", "workers/engine/fsdp/transformer_impl.py", "get_data_parallel_size", "world_size")
    s.names |= {"mini_batch_size": mini, "self.engine.get_data_parallel_size()": dp, "data.shape[0]": samples // dp}
    local = s.number("mini-batch per rank", "workers/engine_workers.py", "mini_batch_size_per_gpu", "get_data_parallel_size")
    s.names |= {"mini_batch_size_per_gpu": local, "total_data_size": local}
    s.number("optimizer steps", "workers/engine_workers.py", "total_num_iterations", "epochs")
    micro = c.get(f"{a}ppo_micro_batch_size_per_gpu")
    if micro and not c.get(f"{a}use_dynamic_bsz"):
        s.names["micro_batch_size_per_gpu"] = micro
        s.number("gradient accumulation", "workers/engine/utils.py", "tu.chunk_tensordict", "micro_batch_size_per_gpu")
    return s.numbers


def grpo_numbers(s: Source, c: Mapping[str, Any], processes: int) -> dict[str, Any]:
    config = "trainer/grpo_config.py"
    accumulated, copies = c.get("gradient_accumulation_steps", 1), c.get("num_generations", 8)
    s.begin(**{
        "self.per_device_train_batch_size": c.get("per_device_train_batch_size", 8), "num_processes": processes,
        "self.gradient_accumulation_steps": accumulated, "self.num_iterations": c.get("num_iterations", 1),
    })  # fmt: skip
    if "generation_batch_size" in c:
        s.names["self.generation_batch_size"] = c["generation_batch_size"]
        steps = s.number("", config, "self.steps_per_generation", "//")
    else:
        steps = c.get("steps_per_generation", accumulated)
    s.names |= {"self.steps_per_generation": steps, "self.args.steps_per_generation": steps}
    samples = s.number("samples", config, "self.generation_batch_size", "num_processes")
    every = s.number("", "trainer/grpo_trainer.py", "generate_every")
    told = s.formula("trainer/grpo_trainer.py", "generate_every")
    words = f"generate_every = {ast.unparse(told)}; an optimizer step every gradient_accumulation_steps of them (transformers)"
    s.numbers["optimizer steps"] = {
        "value": every / accumulated, "formula": words, "source": f"{s.release}, trainer/grpo_trainer.py, _prepare_inputs"
    }  # fmt: skip
    s.numbers["prompts"] = {
        "value": samples // copies, "formula": "generation_batch_size % num_generations == 0: whole groups",
        "source": f"{s.release}, {config}",
    }  # fmt: skip
    return s.numbers


def ppo_numbers(s: Source, c: Mapping[str, Any], processes: int) -> dict[str, Any]:
    file = "experimental/ppo/ppo_trainer.py"
    s.begin(**{
        "args.per_device_train_batch_size": c["per_device_train_batch_size"], "args.world_size": processes,
        "args.gradient_accumulation_steps": c["gradient_accumulation_steps"], "args.num_mini_batches": c.get("num_mini_batches", 1),
    })  # fmt: skip
    s.names["args.local_batch_size"] = s.number("", file, "args.local_batch_size")
    s.names["args.batch_size"] = s.number("samples", file, "args.batch_size")
    s.number("mini-batch", file, "args.mini_batch_size")
    local = s.number("mini-batch per rank", file, "args.local_mini_batch_size")
    epochs, parts = c.get("num_ppo_epochs", 4), c.get("num_mini_batches", 1)
    s.numbers["gradient accumulation"] = {
        "value": local / c["per_device_train_batch_size"], "source": f"{s.release}, {file}, train",
        "formula": "range(0, args.local_mini_batch_size, args.per_device_train_batch_size)",
    }  # fmt: skip
    s.numbers["optimizer steps"] = {
        "value": epochs * parts, "formula": "num_ppo_epochs x range(0, args.local_batch_size, args.local_mini_batch_size)",
        "source": f"{s.release}, {file}, train",
    }  # fmt: skip
    return s.numbers


def openrlhf_numbers(s: Source, c: Mapping[str, Any]) -> dict[str, Any]:
    gpus = c["actor.num_nodes"] * c["actor.num_gpus_per_node"]
    s.begin(**{
        "self.world_size": gpus, "self.ring_attn_size": c.get("ds.ring_attn_size", 1),
        "self.ds_tensor_parallel_size": c.get("ds.tensor_parallel_size", 1), "self.train_batch_size": c["train.batch_size"],
        "self.micro_train_batch_size": c.get("train.micro_batch_size", 1), "args.rollout.batch_size": c["rollout.batch_size"],
        "args.rollout.n_samples_per_prompt": c.get("rollout.n_samples_per_prompt", 1),
        "args.train.batch_size": c["train.batch_size"],
    })  # fmt: skip
    file = "utils/deepspeed/deepspeed.py"
    s.names["dp_size"] = s.number("data-parallel ranks", file, "dp_size")
    s.number("optimizer steps", "trainer/ppo_utils/replay_buffer.py", "expected_num_steps")
    s.number("mini-batch per rank", "trainer/ppo_utils/replay_buffer.py", "local_train_batch_size")
    if not c.get("train.dynamic_batch_enable"):
        s.number("gradient accumulation", file, "self.accumulated_gradient")
    return s.numbers


def nemo_numbers(s: Source, c: Mapping[str, Any]) -> dict[str, Any]:
    worker = "nemo_rl/models/policy/workers/" + ("megatron" if c["megatron"] else "dtensor") + "_policy_worker"
    file = worker + ("" if c["megatron"] else "_v2") + ".py"
    samples = c["prompts"] * c["copies"]
    s.begin(**{"gbs": c["train_global_batch_size"], "self.dp_size": c["dp"], "total_dataset_size.item()": samples})
    s.number("mini-batch per rank", file, "local_gbs")
    batches = s.number("", file, "num_global_batches")
    words = f"num_global_batches = {ast.unparse(s.formula(file, 'num_global_batches'))}, x epochs {c['epochs']}"
    s.numbers["optimizer steps"] = {"value": batches * c["epochs"], "formula": words, "source": f"{s.release}, {file}"}
    text = "actual_world_size must be divisible by PP * CP * TP; DP = world_size / (PP * CP * TP)"
    s.numbers["data-parallel ranks"] = {
        "value": c["gpus"] // c["model_parallel"], "formula": text, "source": f"{s.release}, nemo_rl/models/policy/lm_policy.py"
    }  # fmt: skip
    return s.numbers


def verl_config(**more: Any) -> dict[str, Any]:
    a, rollout, ref = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
    common = {
        "data.max_prompt_length": 1024, "data.max_response_length": 2048, "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True, f"{a}optim.lr": 1e-6, f"{a}ppo_mini_batch_size": 256,
        f"{rollout}name": "vllm", f"{rollout}tensor_model_parallel_size": 2, f"{rollout}gpu_memory_utilization": 0.6,
        "trainer.n_gpus_per_node": 8, "trainer.nnodes": 1,
    }  # fmt: skip
    dynamic = {
        f"{a}use_dynamic_bsz": True, f"{a}ppo_max_token_len_per_gpu": 24576, f"{rollout}log_prob_use_dynamic_bsz": True,
        f"{rollout}log_prob_max_token_len_per_gpu": 24576, f"{ref}log_prob_use_dynamic_bsz": True,
        f"{ref}log_prob_max_token_len_per_gpu": 24576,
    }  # fmt: skip
    return {**common, **(dynamic if more.pop("dynamic", True) else {}), **more}


def verl_configs() -> dict[str, dict[str, Any]]:
    a, rollout, ref, model = (
        "actor_rollout_ref.actor.",
        "actor_rollout_ref.rollout.",
        "actor_rollout_ref.ref.",
        "actor_rollout_ref.model.path",
    )
    grpo = {"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False, "data.train_batch_size": 1024, f"{rollout}n": 5,
            f"{a}use_kl_loss": True, f"{a}kl_loss_coef": 0.001, f"{a}kl_loss_type": "low_var_kl"}  # fmt: skip
    static = {f"{a}ppo_micro_batch_size_per_gpu": 2, f"{rollout}log_prob_micro_batch_size_per_gpu": 2,
              f"{ref}log_prob_micro_batch_size_per_gpu": 2, f"{ref}fsdp_config.param_offload": True,
              "data.max_response_length": 1024}  # fmt: skip
    return {
        "examples/grpo_trainer/run_qwen3_8b_fsdp.sh": verl_config(
            **grpo, **{model: "Qwen/Qwen3-8B", f"{ref}fsdp_config.param_offload": True}
        ),
        "examples/grpo_trainer/run_qwen3_8b_megatron.sh": verl_config(
            **grpo, **{
                model: "Qwen/Qwen3-8B", "model_engine": "megatron", f"{a}megatron.tensor_model_parallel_size": 2,
                f"{a}megatron.pipeline_model_parallel_size": 2, f"{ref}megatron.tensor_model_parallel_size": 2,
                f"{ref}megatron.pipeline_model_parallel_size": 2,
            }
        ),
        "examples/ppo_trainer/run_qwen3_8b_fsdp.sh": verl_config(
            **{
                "algorithm.adv_estimator": "gae", "data.train_batch_size": 1024, f"{rollout}n": 1, model: "Qwen/Qwen3-8B",
                f"{ref}fsdp_config.param_offload": True, "critic.model.path": "Qwen/Qwen3-8B", "critic.optim.lr": 1e-5,
                "critic.use_dynamic_bsz": True, "critic.ppo_max_token_len_per_gpu": 24576, "critic.fsdp.param_offload": False,
                "critic.fsdp.optimizer_offload": False, "trainer.critic_warmup": 0,
            }
        ),
        "examples/grpo_trainer/run_qwen2_5_32b_fsdp.sh": verl_config(
            dynamic=False, **{
                **grpo, **static, model: "Qwen/Qwen2.5-32B", f"{a}ppo_mini_batch_size": 128, "trainer.nnodes": 2,
                f"{rollout}tensor_model_parallel_size": 8, f"{rollout}gpu_memory_utilization": 0.4,
            }
        ),
        "examples/grpo_trainer/run_qwen3_4b_fsdp.sh": verl_config(
            dynamic=False, **{
                **grpo, **static, model: "Qwen/Qwen3-4B", "data.train_batch_size": 512, f"{a}use_dynamic_bsz": True,
                f"{a}ppo_max_token_len_per_gpu": 3000, f"{rollout}log_prob_use_dynamic_bsz": True,
                f"{rollout}log_prob_max_token_len_per_gpu": 4096, f"{ref}log_prob_use_dynamic_bsz": True,
                f"{ref}log_prob_max_token_len_per_gpu": 8192,
            }
        ),
        "examples/remax_trainer/run_qwen2.5_math_7b_sync_fsdp.sh": verl_config(
            **{
                "algorithm.adv_estimator": "remax", "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.0,
                "data.train_batch_size": 128, f"{a}ppo_mini_batch_size": 64, f"{rollout}n": 4, model: "Qwen/Qwen2.5-Math-7B",
                f"{rollout}gpu_memory_utilization": 0.7, f"{a}ulysses_sequence_parallel_size": 2,
            }
        ),
    }  # fmt: skip


TRL_GRPO: dict[str, tuple[int, dict[str, Any]]] = {
    "docs/source/grpo_trainer.md, 72B on 4 nodes and a server": (32, {
        "per_device_train_batch_size": 4, "use_vllm": True, "vllm_mode": "server", "model_name_or_path": "Qwen/Qwen2.5-72B",
        "num_processes": 32, "num_machines": 4, "deepspeed_config": {"zero_stage": 3},
    }),
    "docs/source/lora_without_regret.md": (1, {
        "model_name_or_path": "Qwen/Qwen3-0.6B", "learning_rate": 1e-6, "beta": 0.0, "max_completion_length": 4096,
        "num_generations": 16, "generation_batch_size": 16, "gradient_accumulation_steps": 8, "per_device_train_batch_size": 1,
        "vllm_mode": "colocate", "max_steps": 200, "lora_r": 1,
    }),
    "docs/source/paper_index.md, DeepSeekMath": (1, {
        "loss_type": "grpo", "beta": 0.001, "epsilon": 10.0, "num_generations": 16, "max_completion_length": 32768,
        "steps_per_generation": 16, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 128,
    }),
    "docs/source/paper_index.md, GSPO": (8, {
        "importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.0, "epsilon": 3e-4, "epsilon_high": 4e-4,
        "gradient_accumulation_steps": 1, "steps_per_generation": 4, "num_processes": 8,
    }),
    "examples/scripts/grpo_continuous_batching.py": (8, {
        "model_name_or_path": "Qwen/Qwen3-1.7B", "num_generations": 32, "max_completion_length": 1024, "use_peft": True,
        "num_processes": 8, "deepspeed_config": {"zero_stage": 3},
    }),
}  # fmt: skip
TRL_PPO: dict[str, tuple[int, dict[str, Any]]] = {
    "docs/source/ppo_trainer.md, ppo.py": (1, {
        "learning_rate": 3e-6, "num_ppo_epochs": 1, "num_mini_batches": 1, "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": 1, "total_episodes": 10000, "model_name_or_path": "EleutherAI/pythia-1b-deduped",
        "missing_eos_penalty": 1.0,
    }),
    "docs/source/ppo_trainer.md, ppo_tldr.py": (8, {
        "learning_rate": 3e-6, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "total_episodes": 1000000,
        "model_name_or_path": "EleutherAI/pythia-1b-deduped", "local_rollout_forward_batch_size": 16, "missing_eos_penalty": 1.0,
        "stop_token": "eos", "num_processes": 8, "deepspeed_config": {"zero_stage": 2},
    }),
}  # fmt: skip
HYBRID = {
    "actor.num_nodes": 1, "ref.num_nodes": 1, "vllm.enforce_eager": True, "vllm.sync_backend": "nccl", "train.colocate_all": True,
    "ds.zero_stage": 3, "ds.param_dtype": "bf16", "ds.packing_samples": True, "ds.enable_sleep": True,
    "actor.gradient_checkpointing_enable": True, "train.max_epochs": 1, "algo.advantage.is_correction_enable": True,
}  # fmt: skip
EIGHT = {"actor.num_gpus_per_node": 8, "ref.num_gpus_per_node": 8, "vllm.enable_sleep": True}
OPENRLHF: dict[str, dict[str, Any]] = {
    "examples/scripts/train_ppo_ray_hybrid_engine.sh": {
        **HYBRID, **EIGHT, "reward.num_nodes": 1, "reward.num_gpus_per_node": 8, "critic.num_nodes": 1,
        "critic.num_gpus_per_node": 8,
        "vllm.num_engines": 4, "vllm.tensor_parallel_size": 2, "vllm.gpu_memory_utilization": 0.5,
        "actor.model_name_or_path": "OpenRLHF/Llama-3-8b-sft-mixture", "reward.model_name_or_path": "OpenRLHF/Llama-3-8b-rm-700k",
        "train.batch_size": 128, "rollout.batch_size": 1024, "rollout.n_samples_per_prompt": 1, "data.max_len": 2048,
        "actor.adam.lr": 5e-7, "critic.adam.lr": 9e-6, "algo.kl.init_coef": 0.01, "train.dynamic_batch_enable": True,
        "train.max_tokens_per_gpu": 16384,
    },
    "examples/scripts/train_dapo_ray_hybrid_engine.sh": {
        **HYBRID, **EIGHT, "vllm.num_engines": 4, "vllm.tensor_parallel_size": 2, "vllm.gpu_memory_utilization": 0.6,
        "algo.kl.init_coef": 1e-3, "algo.advantage.gamma": 1.0, "algo.kl.use_loss": True, "algo.kl.estimator": "k3",
        "algo.advantage.estimator": "group_norm", "algo.dynamic_filtering_enable": True, "algo.dynamic_filtering_range": [0, 1],
        "actor.eps_clip_low_high": [0.2, 0.27], "actor.model_name_or_path": "OpenRLHF/Llama-3-8b-sft-mixture",
        "reward.remote_url": "reward_func.py", "train.micro_batch_size": 8, "train.batch_size": 128, "rollout.micro_batch_size": 16,
        "rollout.batch_size": 128, "rollout.n_samples_per_prompt": 8, "data.max_len": 2048, "actor.adam.lr": 5e-7,
    },
    "examples/scripts/train_reinforce_baseline_hybrid_engine.sh": {
        **HYBRID, "actor.num_gpus_per_node": 4, "ref.num_gpus_per_node": 4, "vllm.num_engines": 2, "vllm.tensor_parallel_size": 2,
        "vllm.gpu_memory_utilization": 0.7, "train.agent_func_path": "agent_func.py", "ckpt.load_enable": True,
        "actor.model_name_or_path": "Qwen/Qwen3-4B-Thinking-2507", "data.max_len": 74240, "rollout.max_new_tokens": 64000,
        "rollout.batch_size": 128, "rollout.n_samples_per_prompt": 8, "train.batch_size": 1024, "train.dynamic_batch_enable": True,
        "algo.dynamic_filtering_enable": True, "algo.dynamic_filtering_range": [0.0, 1.0], "train.max_tokens_per_gpu": 16192,
        "rollout.max_tokens_per_gpu": 32768, "train.micro_batch_size": 1, "rollout.micro_batch_size": 8, "train.num_episodes": 1,
        "ds.ring_attn_size": 2, "ds.ring_attn_head_stride": 2, "algo.advantage.estimator": "reinforce_baseline",
        "actor.adam.lr": 5e-7,
        "actor.entropy_coef": 0.0, "algo.kl.init_coef": 1e-5, "algo.kl.use_loss": True, "algo.kl.estimator": "k2",
        "algo.advantage.is_correction_type": "icepop",
    },
    "examples/scripts/train_prorlv2_math_hybrid_engine.sh": {
        **HYBRID, **EIGHT, "vllm.num_engines": 8, "vllm.tensor_parallel_size": 1, "vllm.gpu_memory_utilization": 0.75,
        "algo.kl.init_coef": 1e-4, "algo.advantage.gamma": 1.0, "algo.kl.use_loss": True, "algo.kl.estimator": "k2",
        "algo.advantage.estimator": "reinforce_baseline", "algo.dynamic_filtering_enable": True,
        "actor.eps_clip_low_high": [0.2, 0.27], "actor.model_name_or_path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "reward.remote_url": "math_reward_func.py", "train.batch_size": 1024, "rollout.batch_size": 512,
        "rollout.n_samples_per_prompt": 16, "train.dynamic_batch_enable": True, "train.num_episodes": 100, "data.max_len": 9216,
        "rollout.max_new_tokens": 8192, "actor.adam.lr": 1e-6, "train.max_tokens_per_gpu": 32768,
    },
    "examples/scripts/train_ppo_with_reward_fn.sh": {
        "ref.num_nodes": 1, "ref.num_gpus_per_node": 2, "critic.num_nodes": 1, "critic.num_gpus_per_node": 2, "actor.num_nodes": 1,
        "actor.num_gpus_per_node": 2, "vllm.num_engines": 2, "vllm.tensor_parallel_size": 2, "train.colocate_actor_ref": True,
        "actor.model_name_or_path": "OpenRLHF/Llama-3-8b-sft-mixture", "reward.remote_url": "reward_func.py",
        "train.micro_batch_size": 8, "train.batch_size": 128, "rollout.micro_batch_size": 16, "rollout.batch_size": 1024,
        "train.max_epochs": 1, "data.max_len": 2048, "ds.zero_stage": 3, "ds.param_dtype": "bf16", "actor.adam.lr": 5e-7,
        "critic.adam.lr": 9e-6, "algo.kl.init_coef": 0.01, "ds.packing_samples": True, "ds.adam_offload": True,
        "actor.gradient_checkpointing_enable": True,
    },
}  # fmt: skip
NEMO = (
    ("examples/configs/grpo_math_1B.yaml", {"prompts": 32, "copies": 16, "train_global_batch_size": 512, "gpus": 1,
    "model_parallel": 1}),
    ("examples/configs/grpo_math_8B.yaml", {"prompts": 64, "copies": 32, "train_global_batch_size": 512, "gpus": 8,
    "model_parallel": 1}),
    ("examples/configs/grpo_math_8B_megatron.yaml",
     {"prompts": 64, "copies": 32, "train_global_batch_size": 512, "gpus": 8, "model_parallel": 2, "megatron": True}),
    ("examples/configs/grpo_math_70B_megatron.yaml",
     {"prompts": 64, "copies": 32, "train_global_batch_size": 512, "gpus": 64, "model_parallel": 16, "megatron": True}),
    ("examples/configs/ppo_math_1B.yaml",
     {"prompts": 32, "copies": 16, "train_global_batch_size": 512, "gpus": 1, "model_parallel": 1, "epochs": 4}),
    ("examples/configs/recipes/llm/grpo-llama3.1-8b-instruct-2n8g-fsdp2tp1-noncolocated.yaml",
     {"prompts": 64, "copies": 32, "train_global_batch_size": 512, "gpus": 8, "model_parallel": 1}),
    ("examples/configs/recipes/llm/grpo-deepscaler-1.5b-8K.yaml",
     {"prompts": 128, "copies": 8, "train_global_batch_size": 64, "gpus": 8, "model_parallel": 1}),
    ("examples/configs/recipes/llm/dapo-qwen2.5-7b.v2.yaml",
     {"prompts": 512, "copies": 16, "train_global_batch_size": 512, "gpus": 128, "model_parallel": 4}),
)  # fmt: skip
"""A file, and the numbers that stand in it or in what it inherits, for the formulas."""
NEMO_LEFT_OUT = (
    "logger", "env", "checkpointing", "data_plane", "on_policy_distillation", "val_", "scheduler", "mcore_generation_config",
    "reward_",
    "peft", "lora_cfg.target", "fp8_cfg", "draft", "moe_", "mtp_", "kl_input", "kl_output",
)  # fmt: skip


def nemo_config(folder: Path, file: str) -> dict[str, Any]:
    """The keys of a file over those of the files it inherits, without what has nothing to do with a step."""
    import yaml

    def over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
        return {
            **below,
            **{k: over(below[k], v) if isinstance(v, dict) and isinstance(below.get(k), dict) else v for k, v in above.items()},
        }

    def read(path: Path) -> dict[str, Any]:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        parent = tree.pop("defaults", None)
        return over(read((path.parent / parent).resolve()), tree) if parent else tree

    def kept(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
        found = {k: kept(v, f"{before}{k}.") if isinstance(v, dict) else v for k, v in tree.items()}
        return {k: v for k, v in found.items() if v != {} and not any(word in f"{before}{k}" for word in NEMO_LEFT_OUT)}

    return kept(read(folder / file))


def main(verl: Path, trl: Path, trl_ppo: Path, openrlhf: Path, nemo: Path) -> None:
    s = Source("verl 0.9.1", verl)
    made = [{"system": "verl", "example": name, "config": c, "oracle": verl_numbers(s, c)} for name, c in verl_configs().items()]
    s = Source("TRL 1.16.0", trl)
    made += [{"system": "TRL", "example": name, "config": c, "oracle": grpo_numbers(s, c, n)} for name, (n, c) in TRL_GRPO.items()]
    s = Source("TRL 1.9.0", trl_ppo)
    made += [{"system": "TRL", "example": name, "config": c, "oracle": ppo_numbers(s, c, n)} for name, (n, c) in TRL_PPO.items()]
    s = Source("OpenRLHF 0.11.2", openrlhf)
    made += [{"system": "OpenRLHF", "example": name, "config": c, "oracle": openrlhf_numbers(s, c)} for name, c in OPENRLHF.items()]
    s = Source("NeMo-RL 0.7.0", nemo)
    for file, numbers in NEMO:
        facts = {"epochs": 1, "megatron": False, **numbers}
        facts["dp"] = facts["gpus"] // facts["model_parallel"]
        made.append({"system": "NeMo-RL", "example": file, "config": nemo_config(nemo, file), "oracle": nemo_numbers(s, facts)})
    OUT.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:6]))
