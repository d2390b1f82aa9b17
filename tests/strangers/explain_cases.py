"""Configurations of other systems, as people showed them in public reports, and the numbers that those systems' own code gives.

Paths and names of runs are shortened; keys and values are those of the report, with what a release needs beside them to start.
Where a report names a file of a system's own repository, that file's values stand in ``tests/data/configs.json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hfsdk as hf
from tests.strangers.frame import Bench, Case, Refused

EXAMPLES = {
    one["example"].rsplit("/", 1)[-1]: one["config"]
    for one in json.loads((Path(__file__).parents[1] / "data" / "configs.json").read_text(encoding="utf-8"))
}  # fmt: skip
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
COUNTS = ("samples", "mini-batch", "data-parallel ranks", "mini-batch per rank", "gradient accumulation", "optimizer steps")


def rows(config: Any, *names: str, words: tuple[str, ...] = (), **options: Any) -> list[Any]:
    """Return whose configuration it is, and rows of its arithmetic."""
    found = hf.explain(config, words, **options)
    return [found.system, *(found[name] for name in names)]


def placed(config: Any, *names: str) -> list[Any]:
    """Return the same, and the GPUs of each pool."""
    return [*rows(config, *names), hf.explain(config).step.pools]


def broken(config: Any, *names: str, words: tuple[str, ...] = (), **options: Any) -> list[Any]:
    """Return rows, then the numbers that the system would refuse; it must not say that it fits."""
    found = hf.explain(config, words, **options)
    wrong = [one.got for one in found.findings if one.kind == "broken"]
    assert not wrong or "fits" not in str(found).splitlines()[1]
    return [*(found[name] for name in names), *wrong]


def cut(config: Any, *names: str, **options: Any) -> list[Any]:
    """Return rows, how weights, gradients and moments of the actor are cut, and the numbers that the system would refuse."""
    found = hf.explain(config, **options)
    held = found.step.roles[0].states
    return [
        *(found[name] for name in names),
        held.name,
        held.weights_over,
        held.gradients_over,
        held.optimizer_over,
        *(one.got for one in found.findings if one.kind == "broken"),
    ]


def told(config: Any, *names: str) -> list[Any]:
    """Return rows, how the actor's states are cut, and what is told of what the system does with it."""
    found = hf.explain(config)
    return [*cut(config, *names), *(one.got for one in found.findings if one.kind == "note")]


def written(it: Bench, name: str, content: Any) -> Path:
    """Return a new file: JSON, which YAML reads too, or text."""
    path = it.folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def left_out(config: Any, *names: str) -> list[Any]:
    """Return rows, and what is left out for which keys; it must not be given all the same."""
    found = hf.explain(config)
    assert not ("memory" in found.withheld and found.memory)
    assert not ("seconds" in found.withheld and found.trace)
    return [*(found[name] for name in names), dict(found.withheld)]


def without_numbers(config: Any, **options: Any) -> list[Any]:
    """Return the keys for which no number is given, and the numbers that are given all the same."""
    found = hf.explain(config, **options)
    given = [row.name for row in found.arithmetic if row.value is not None]
    given += [name for name in ("memory", "trace", "code", "cluster", "assumed") if getattr(found, name)]
    return [*found.withheld["sizes"], *given]


def logged(config: Any) -> Any:
    """Return a configuration as Weights & Biases saves it."""
    return {
        "_wandb": {"value": {"cli_version": "0.19.1"}},
        **{key: {"desc": None, "value": value} for key, value in config.items()},
    }


VERL = [
    Case(
        "verl: PPO of five responses on one GPU, keys of 2025, a date in the run's name", "DeepRetrieval#34",
        lambda it: rows(
            """export CUDA_VISIBLE_DEVICES=0

            DATE=$(date '+%Y-%m-%d-%H-%M-%S')

            python3 -m verl.trainer.main_ppo data.train_files=ctgov/train.parquet data.val_files=ctgov/test.parquet \\
            data.train_batch_size=16 data.val_batch_size=16 data.max_prompt_length=2048 data.max_response_length=2048 \\
            actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.strategy=fsdp \\
            actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size=4 \\
            actor_rollout_ref.rollout.n=5 critic.ppo_micro_batch_size=8 \\
            actor_rollout_ref.rollout.log_prob_micro_batch_size=1 actor_rollout_ref.rollout.temperature=0.6 \\
            actor_rollout_ref.rollout.tensor_model_parallel_size=1 +trainer.val_before_train=False \\
            trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.experiment_name=ctgov_${DATE} 2>&1 | tee ctgov_$DATE.log""",
            *COUNTS, "tokens of a sample", "tokens generated",
        ),
        right=["verl", 80, 40, 1, 40, 10, 2, 4096, 163840],
        because="ActorConfig.validate takes the old key where the other is not; 16 x 5 = 80, 8 x 5 = 40, 40 / 4 = 10, 80 / 40 = 2",
    ),
    Case(
        "verl: 7B on eight GPUs, mini-batch as large as the batch", "verl#2820",
        lambda it: rows(
            """HYDRA_FULL_ERROR=1 python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=gsm8k.parquet \\
            data.train_batch_size=512 data.max_prompt_length=512 data.max_response_length=1024 data.truncation='error' \\
            data.filter_overlong_prompts=True actor_rollout_ref.model.path=./Qwen/Qwen2.5-7B \\
            actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=512 \\
            actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 actor_rollout_ref.actor.use_kl_loss=True \\
            actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
            actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True \\
            actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
            actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 trainer.n_gpus_per_node=8""",
            *COUNTS,
        ),
        right=["verl", 512, 512, 8, 64, 8, 1],
        because="engine_workers.py, train_mini_batch: 512 x rollout.n 1 / 8 ranks = 64; / 8 a pass = 8; 512 / 512 = 1 step",
    ),
    Case(
        "verl: a mini-batch of more prompts than the batch", "DeepResearcher#27",
        lambda it: broken(
            {
                "data.train_batch_size": 256, f"{A}.ppo_mini_batch_size": 4096, f"{R}.n": 16, "algorithm.adv_estimator": "grpo",
                f"{A}.ppo_micro_batch_size_per_gpu": 8, f"{R}.log_prob_micro_batch_size_per_gpu": 8,
            },
            "samples", "mini-batch",
        ),
        right=[4096, 65536, "256 < 4096"],
        because="workers/config/actor.py, ActorConfig.validate compares 256 with 4096, both in prompts: 4096 x 16 of 256 x 16",
    ),
    Case(
        "verl: 32 prompts of 8 responses, a mini-batch of 64", "verl#5821",
        lambda it: broken(
            {
                "algorithm.adv_estimator": "grpo", "data.train_batch_size": 32, f"{A}.ppo_mini_batch_size": 64, f"{R}.n": 8,
                f"{A}.ppo_micro_batch_size_per_gpu": 4, f"{R}.log_prob_micro_batch_size_per_gpu": 4,
            },
            "samples", "mini-batch per rank",
        ),
        right=[256, 64, "32 < 64"],
        because="the report's error: train_batch_size (32) must be >= actor.ppo_mini_batch_size (64); 64 x 8 / 8 GPUs a rank",
    ),
    Case(
        "verl: a sample longer than the tokens of a pass", "verl-internvl#15",
        lambda it: broken(
            {
                "algorithm.adv_estimator": "grpo", "data.train_batch_size": 8, "data.max_prompt_length": 8192,
                "data.max_response_length": 32768, "data.filter_overlong_prompts": True, "data.truncation": "error",
                "data.image_key": "images", "data.trust_remote_code": True, "actor_rollout_ref.model.trust_remote_code": True,
                "actor_rollout_ref.model.path": "/weights/InternVL3_5-4B", "actor_rollout_ref.model.use_remove_padding": True,
                f"{A}.optim.lr": 1e-6, f"{A}.use_dynamic_bsz": True, f"{A}.ppo_max_token_len_per_gpu": 16384,
                "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True, f"{R}.log_prob_use_dynamic_bsz": True,
                f"{A}.ppo_mini_batch_size": 8, f"{R}.n": 4,
            },
            "samples", "tokens of a sample", "optimizer steps",
        ),
        right=[32, 40960, 1, "16,384 tokens, 40,960 in a sample"],
        because="the report's assertion: max_token_len=16384 and max_seq_len=40960 (seqlen_balancing.py, rearrange_micro_batches)",
    ),
    Case(
        "verl: sixteen Ulysses ranks of 40 and 8 heads", "verl#1226",
        lambda it: broken(
            {
                "actor_rollout_ref.model.path": "Qwen/Qwen2.5-14B", f"{A}.ulysses_sequence_parallel_size": 16,
                f"{A}.use_dynamic_bsz": True, f"{A}.ppo_max_token_len_per_gpu": 8192, "data.max_prompt_length": 1024,
                "data.max_response_length": 64512, "algorithm.adv_estimator": "grpo", f"{R}.n": 8, "trainer.nnodes": 2,
            },
            "data-parallel ranks", "tokens of a sample",
        ),
        right=[1, 65536, "qwen2.5-14b: 40 and 8 heads, 16 ranks"],
        because="monkey_patch.py: 40 % 16 is not 0; the report: 8 and 40 are (kv heads are repeated)",
    ),
    Case(
        "verl: eight ways of tensor parallelism of 28 heads", "AdaptThink#1",
        lambda it: broken(
            {
                "actor_rollout_ref.model.path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", f"{R}.tensor_model_parallel_size": 8,
                "algorithm.adv_estimator": "grpo", f"{A}.use_dynamic_bsz": True, f"{R}.n": 16, "data.train_batch_size": 128,
                f"{A}.ppo_mini_batch_size": 128,
            },
            "samples", model="qwen2.5-7b",
        ),
        right=[2048, "qwen2.5-7b: 28 heads, tp 8"],
        because="vLLM's error in the report: Total number of attention heads (28) must be divisible by tensor parallel size (8)",
    ),
    Case(
        "verl: PPO of 8k responses, two Ulysses ranks, keys of 2025", "TinyZero#107",
        lambda it: rows(
            """data.train_batch_size=128 data.val_batch_size=1312 data.max_prompt_length=766 data.max_response_length=8192 \\
            actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True \\
            actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.use_dynamic_bsz=True \\
            actor_rollout_ref.actor.ppo_max_token_len_per_gpu=33534 actor_rollout_ref.actor.ppo_micro_batch_size=8 \\
            actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.model.enable_gradient_checkpointing=True \\
            actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.grad_offload=True \\
            actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.rollout.log_prob_micro_batch_size=16 \\
            actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.85 \\
            actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=1 \\
            actor_rollout_ref.rollout.max_num_batched_tokens=33534 actor_rollout_ref.ref.log_prob_micro_batch_size=8 \\
            actor_rollout_ref.ref.fsdp_config.param_offload=True critic.ppo_max_token_len_per_gpu=33534 \\
            critic.model.use_remove_padding=True trainer.n_gpus_per_node=2""",
            *COUNTS, "micro-batch tokens per rank", "tokens of a sample",
        ),
        right=["verl", 128, 32, 1, 32, 5, 4, 67068, 8958],
        because="33534 x 2 Ulysses ranks = 67068 hold 7 samples of 766 + 8192: 32 take 5 passes at most; 128 / 32 = 4 steps",
    ),
    Case(
        "verl: Megatron with experts on 32 GPUs", "verl#2865",
        lambda it: rows(
            """ray job submit --address="http://127.0.0.1:8265" --runtime-env=verl/trainer/runtime_env.yaml --no-wait -- \\
            python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\
            algorithm.adv_estimator=grpo data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=1024 \\
            data.filter_overlong_prompts=True data.truncation='error' \\
            actor_rollout_ref.model.path=/models/qwen3/Qwen3-30B-A3B actor_rollout_ref.actor.optim.lr=1e-6 \\
            actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \\
            actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \\
            actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \\
            actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 \\
            actor_rollout_ref.actor.megatron.use_dist_checkpointing=True actor_rollout_ref.actor.use_kl_loss=True \\
            trainer.nnodes=4 trainer.n_gpus_per_node=8 \\
            actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \\
            actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1""",
            "data-parallel ranks", "mini-batch per rank", "gradient accumulation", "tokens of a sample",
        ),
        right=["verl", 4, 16, 16, 1536],
        because="megatron/core/parallel_state.py: 32 / (tp 4 x pp 2 x cp 1) = 4; 64 x n 1 / 4 = 16 samples, one a pass",
    ),
    Case(
        "verl: GSPO of a mixture of experts, experts cut otherwise", "verl#3545",
        lambda it: rows(
            {
                "algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False, "algorithm.kl_ctrl.kl_coef": 0.0,
                f"{A}.strategy": "megatron", f"{A}.use_kl_loss": False, f"{A}.kl_loss_coef": 0.0, f"{A}.clip_ratio_low": 3e-4,
                f"{A}.clip_ratio_high": 4e-4, "data.max_prompt_length": 1024, "data.max_response_length": 1024,
                f"{A}.loss_agg_mode": "token-mean", f"{A}.policy_loss.loss_mode": "gspo", "data.train_batch_size": 32,
                f"{R}.n": 4, f"{A}.ppo_mini_batch_size": 8, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8,
                f"{R}.temperature": 1.0, f"{R}.top_p": 1.0, f"{R}.top_k": -1, f"{A}.use_dynamic_bsz": True,
                f"{A}.ppo_max_token_len_per_gpu": 2048, f"{R}.log_prob_max_token_len_per_gpu": 2048,
                f"{R}.tensor_model_parallel_size": 8, f"{R}.enforce_eager": True, f"{A}.megatron.tensor_model_parallel_size": 2,
                f"{A}.megatron.pipeline_model_parallel_size": 1, f"{A}.megatron.expert_model_parallel_size": 4,
                f"{A}.megatron.expert_tensor_parallel_size": 1, f"{A}.megatron.param_offload": True,
                f"{A}.megatron.optimizer_offload": True, f"{R}.name": "vllm",
                "actor_rollout_ref.model.path": "/models/Qwen3-30B-A3B-Instruct",
            },
            *COUNTS, "micro-batch tokens per rank",
        ),
        right=["verl", 128, 32, 4, 8, 8, 4, 2048],
        because="8 / tp 2 = 4 ranks; 8 x 4 / 4 = 8 samples of 2048 tokens, one in a pass of 2048; 128 / 32 = 4 steps",
    ),
    Case(
        "verl: one epoch over a batch is four updates", "verl#1008",
        lambda it: rows(
            {
                "data.train_batch_size": 32, f"{A}.ppo_mini_batch_size": 8, f"{A}.ppo_epochs": 1,
                "algorithm.adv_estimator": "grpo", f"{A}.ppo_micro_batch_size_per_gpu": 1,
                f"{R}.log_prob_micro_batch_size_per_gpu": 1,
            },
            "optimizer steps",
        ),
        right=["verl", 4],
        because="the answer there: batch_size 32 and ppo_mini_batch_size 8 make four iterations of ppo_epochs=1",
    ),
    *(
        Case(
            f"verl: whole copies on four GPUs, {strategy}", "verl#7493",
            lambda it, strategy=strategy: told(
                {
                    "algorithm.adv_estimator": "grpo", "data.train_batch_size": 64, f"{A}.ppo_mini_batch_size": 32, f"{R}.n": 4,
                    f"{A}.ppo_micro_batch_size_per_gpu": 4, f"{R}.log_prob_micro_batch_size_per_gpu": 4,
                    "trainer.n_gpus_per_node": 4, f"{A}.strategy": strategy, f"{A}.fsdp_config.fsdp_size": 1,
                },
                "data-parallel ranks", "mini-batch per rank",
            ),
            right=[4, 32, "FSDP", 1, 1, 1, *told_too],
            because="fsdp/utils.py makes a mesh of 4 x 1; pytorch#154888: FSDP1 reduces gradients over the 1, FSDP2 over both",
        )
        for strategy, told_too in (("fsdp", [f"{A}.fsdp_config.fsdp_size=1 on 4 GPUs"]), ("fsdp2", []))
    ),
    Case(
        "verl: a key that no release has", "verl#4773",
        lambda it: without_numbers(
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=1024 data.max_prompt_length=1024 "
            "data.max_response_length=512 actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct "
            "actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.rollout.ppo_micro_batch_size_per_gpu=32 "
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32"
        ),
        right=["actor_rollout_ref.rollout.ppo_micro_batch_size_per_gpu"],
        because="the pull request mends that key: the micro-batch is under actor, and hydra refuses the other (not in struct)",
    ),
    Case(
        "verl: a configuration that Weights & Biases saved", "kin of verl#1524: verl/utils/tracking.py",
        lambda it: rows(written(it, "config.yaml", logged({
            "actor_rollout_ref": {
                "actor": {"ppo_mini_batch_size": 256, "use_dynamic_bsz": True, "_target_": "verl.workers.config.FSDPActorConfig"},
                "rollout": {"n": 8, "name": "vllm", "mtp": {"enable": False}},
            },
            "data": {"train_batch_size": 512}, "algorithm": {"adv_estimator": "grpo"}, "trainer": {"n_gpus_per_node": 8},
        })), *COUNTS),
        right=["verl", 4096, 2048, 8, 256, 16, 2],
        because="OmegaConf.to_container, resolve=True: 512 x 8; 256 x 8 / 8 ranks = 256 samples, 16 of 1024 tokens in 16384",
    ),
]  # fmt: skip

OPENRLHF = [
    Case(
        "OpenRLHF: limits of prompt and of response of 0.6", "OpenRLHF#887",
        lambda it: rows(
            "python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-7B --remote_rm_url http://h/r "
            "--advantage_estimator group_norm --n_samples_per_prompt 8 --rollout_batch_size 72 --train_batch_size 576 "
            "--init_kl_coef 0 --prompt_max_len 1024 --generate_max_len 36864 --actor_num_nodes 3 --micro_train_batch_size 1",
            "samples", "tokens of a sample", "optimizer steps", "gradient accumulation",
        ),
        right=["OpenRLHF", 576, 37888, 1, 24],
        because="experience_maker.py of 0.8.11: truncate_length = prompt_max_len + max_response_length; 72 x 8 = 576, / 24 GPUs",
    ),
    Case(
        "OpenRLHF: 72B on four nodes, each role by itself", "OpenRLHF#329",
        lambda it: rows(
            """ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "OpenRLHF",
            "excludes": ["*.log", "*.pt"]}' --no-wait -- python3 examples/train_ppo_ray.py --ref_num_nodes 1 \\
            --ref_num_gpus_per_node 4 --reward_num_nodes 1 --reward_num_gpus_per_node 4 --critic_num_nodes 1 \\
            --critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8 --vllm_num_engines 1 \\
            --vllm_tensor_parallel_size 8 --pretrain Qwen/Qwen2-72B --reward_pretrain /models/rm --save_path /out \\
            --micro_train_batch_size 1 --train_batch_size 128 --micro_rollout_batch_size 2 --rollout_batch_size 1024 \\
            --max_epochs 1 --prompt_max_len 1024 --generate_max_len 1024 --zero_stage 3 --bf16 --actor_learning_rate 5e-7 \\
            --critic_learning_rate 9e-6 --init_kl_coef 0.01 --prompt_data data --max_samples 80000 --normalize_reward \\
            --actor_init_on_gpu --adam_offload --gradient_checkpointing""",
            *COUNTS, "tokens of a sample",
        ),
        right=["OpenRLHF", 1024, 128, 8, 16, 16, 8, 2048],
        because="deepspeed.py: 128 / 1 / 8 GPUs of the actor = 16 passes; 1024 / 128 = 8 steps; 1024 + 1024 tokens",
    ),
    Case(
        "OpenRLHF: a 16B actor whose reward lives with the critic", "OpenRLHF#392",
        lambda it: placed(
            """python3 -m openrlhf.cli.train_ppo_ray --ref_num_nodes 1 --ref_num_gpus_per_node 1 \\
            --reward_num_nodes 1 --reward_num_gpus_per_node 2 --critic_num_nodes 1 --critic_num_gpus_per_node 2 \\
            --actor_num_nodes 1 --actor_num_gpus_per_node 4 --vllm_num_engines 1 --vllm_tensor_parallel_size 1 \\
            --colocate_critic_reward --ref_reward_offload --pretrain /models/deepseek --reward_pretrain /models/rm \\
            --save_path /out --micro_train_batch_size 4 --train_batch_size 16 --micro_rollout_batch_size 8 \\
            --rollout_batch_size 32 --max_samples 100000 --max_epochs 1 --prompt_max_len 1024 --generate_max_len 1024 \\
            --zero_stage 3 --bf16 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 \\
            --prompt_data MATH --input_key problem --normalize_reward --gradient_checkpointing""",
            *COUNTS,
        ),
        right=["OpenRLHF", 32, 16, 4, 4, 1, 2, {"actor": 4, "ref": 1, "critic": 2, "vllm": 1}],
        because="16 / (micro 4 x 4 GPUs) = 1 pass, 32 / 16 = 2 steps; train_ppo_ray.py: one placement group for critic and reward",
    ),
    Case(
        "OpenRLHF: two lists of data, no engine", "OpenRLHF#314",
        lambda it: rows(
            """ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/OpenRLHF"}' -- \\
            python3 /OpenRLHF/examples/train_ppo_ray.py --ref_num_nodes 1 --ref_num_gpus_per_node 1 --reward_num_nodes 1 \\
            --reward_num_gpus_per_node 1 --critic_num_nodes 1 --critic_num_gpus_per_node 2 --actor_num_nodes 1 \\
            --actor_num_gpus_per_node 4 --pretrain /models/Llama-2-7b-hf --reward_pretrain /models/Llama-2-7b-hf \\
            --save_path /out --micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16 \\
            --rollout_batch_size 1024 --max_epochs 1 --prompt_max_len 1024 --generate_max_len 1024 --zero_stage 2 --bf16 \\
            --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 --prompt_data OpenOrca,oasst1 \\
            --prompt_data_probs 0.5,0.5 --max_samples 80000 --normalize_reward --actor_init_on_gpu --adam_offload \\
            --flash_attn --gradient_checkpointing""",
            *COUNTS,
        ),
        right=["OpenRLHF", 1024, 128, 4, 32, 4, 8],
        because="deepspeed.py: train_batch_size 128 / (micro 8 x 4 GPUs) = 4 passes; 1024 / 128 = 8 steps",
    ),
    Case(
        "OpenRLHF: four responses to long prompts", "OpenRLHF#1050",
        lambda it: rows(
            "python3 -m openrlhf.cli.train_ppo_ray --num_episodes 1 --max_epochs 1 --max_samples 5000 --save_steps 10 "
            "--micro_train_batch_size 1 --train_batch_size 16 --micro_rollout_batch_size 1 --rollout_batch_size 32 "
            "--temperature 1.0 --n_samples_per_prompt 4 --generate_max_len 4096 --prompt_max_len 16384 "
            "--actor_learning_rate 1e-6 --init_kl_coef 0.0 --advantage_estimator group_norm --input_key message", "samples",
            "optimizer steps", "tokens of a sample", "tokens generated",
        ),
        right=["OpenRLHF", 128, 8, 20480, 524288],
        because="32 x 4 = 128 samples / 16 = 8 steps; 16384 + 4096 tokens, each with a limit of its own; 128 x 4096",
    ),
    Case(
        "OpenRLHF: a batch that seven GPUs cannot share", "OpenRLHF#346",
        lambda it: broken(
            "python3 -m openrlhf.cli.train_ppo_ray --train_batch_size 256 --micro_train_batch_size 2 --actor_num_gpus_per_node 7 "
            "--rollout_batch_size 1024 --ref_num_gpus_per_node 7 --pretrain /models/actor --reward_pretrain /models/rm",
            "data-parallel ranks",
        ),
        right=[7, "256, 2 x 7"],
        because="DeepSpeed's error in the report: 256 != 2 * 18 * 7",
    ),
    Case(
        "OpenRLHF: sixteen prompts on one GPU", "OpenRLHF#1033",
        lambda it: rows(
            {
                "rollout_batch_size": 16, "train_batch_size": 4, "micro_train_batch_size": 2, "n_samples_per_prompt": 1,
                "max_epochs": 1, "actor_num_gpus_per_node": 1, "actor_num_nodes": 1,
            },
            "optimizer steps", "gradient accumulation",
        ),
        right=["OpenRLHF", 4, 2],
        because="the maintainer there: train_steps = rollout_batch_size * nsamples * max_epochs / train_batch_size",
    ),
    Case(
        "OpenRLHF: three nodes, engines apart", "OpenRLHF#507",
        lambda it: placed(
            """ray job submit --address="http://127.0.0.1:8265" \\
            --runtime-env-json='{"env_vars": {"working_dir": "/openrlhf"}}' -- python3 -m openrlhf.cli.train_ppo_ray \\
            --ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1 --reward_num_gpus_per_node 8 \\
            --critic_num_nodes 1 --critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8 \\
            --vllm_num_engines 8 --vllm_tensor_parallel_size 1 --colocate_critic_reward --colocate_actor_ref \\
            --pretrain OpenRLHF/Llama-3-8b-sft-mixture --reward_pretrain OpenRLHF/Llama-3-8b-rm-mixture --save_path /out \\
            --micro_train_batch_size 8 --train_batch_size 256 --micro_rollout_batch_size 16 --rollout_batch_size 2048 \\
            --max_samples 100000 --max_epochs 1""",
            "gradient accumulation", "optimizer steps",
        ),
        right=["OpenRLHF", 4, 8, {"actor": 8, "critic": 8, "vllm": 8}],
        because="256 / (8 x 8 GPUs) = 4; 2048 / 256 = 8; 8 of actor and reference, 8 of critic and reward, 8 of vLLM",
    ),
    Case(
        "OpenRLHF: a reward function, no nodes of reward and critic", "OpenRLHF#908",
        lambda it: placed(
            """HEAD_IP=127.0.0.1
            # 提交Ray任务
            ray job submit --address="http://${HEAD_IP}:8265" \\
            -- python -m openrlhf.cli.train_ppo_ray --ref_num_nodes 1 --ref_num_gpus_per_node 4 --reward_num_nodes 0 \\
            --reward_num_gpus_per_node 0 --actor_num_nodes 1 --actor_num_gpus_per_node 8 --critic_num_nodes 0 \\
            --critic_num_gpus_per_node 0 --vllm_num_engines 1 --vllm_tensor_parallel_size 4 --advantage_estimator group_norm \\
            --use_kl_loss --kl_estimator k3 --pretrain /models/Qwen/Qwen2.5-7B-Instruct --prompt_data data.json --save_path /out \\
            --ckpt_path /ckpt --rollout_batch_size 8 --train_batch_size 8 --micro_train_batch_size 1 --micro_rollout_batch_size 2 \\
            --n_samples_per_prompt 8 --max_samples 10000 --max_epochs 1 --prompt_max_len 13024 --generate_max_len 13024 \\
            --zero_stage 3 --bf16 --actor_learning_rate 1e-6 --init_kl_coef 0.05 --save_steps 50 --flash_attn \\
            --gradient_checkpointing --remote_rm_url /plugin.py""",
            *COUNTS, "tokens of a sample",
        ),
        right=["OpenRLHF", 64, 8, 8, 1, 1, 8, 26048, {"actor": 8, "ref": 4, "vllm": 4}],
        because="8 x 8 = 64 samples / 8 = 8 steps; 8 / (micro 1 x 8 GPUs) = 1 pass; 13024 + 13024 tokens; 8, 4 and 4 GPUs",
    ),
    Case(
        "OpenRLHF: keys of two releases at once", "kin of OpenRLHF#887",
        lambda it: without_numbers(
            "python3 -m openrlhf.cli.train_ppo_ray --rollout_batch_size 64 --prompt_max_len 1024 --max_new_tokens 2048"
        ),
        right=["max_new_tokens"],
        because="0.9.6 has no --max_new_tokens, 0.9.7 no --prompt_max_len: no release takes both",
    ),
]  # fmt: skip
ZERO3 = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "DEEPSPEED", "downcast_bf16": "no",
    "deepspeed_config": {
        "deepspeed_multinode_launcher": "standard", "offload_optimizer_device": "none", "offload_param_device": "none",
        "zero3_init_flag": True, "zero3_save_16bit_model": True, "zero_stage": 3,
    },
    "machine_rank": 0, "main_training_function": "main", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8,
    "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False,
    "use_cpu": False,
}  # fmt: skip
"""open-r1's ``recipes/accelerate_configs/zero3.yaml``."""
FSDP = {
    "distributed_type": "FSDP", "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": True, "fsdp_offload_params": False, "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_sync_module_states": True, "fsdp_use_orig_params": True,
        "fsdp_cpu_ram_efficient_loading": False, "fsdp_activation_checkpointing": True,
    },
    "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8,
}  # fmt: skip
"""open-r1's ``fsdp.yaml``."""
QWEN = {"model_name_or_path": "Qwen/Qwen2.5-7B", "per_device_train_batch_size": 8, "num_generations": 8}


def launch(it: Bench, launcher: Any, arguments: Any, words: str) -> str:
    """Return the command by which ``accelerate launch`` with a file of its own starts a script with one."""
    launched, trained = written(it, "launcher.yaml", launcher), written(it, "arguments.yaml", arguments)
    return f"accelerate launch --config_file {launched} {words} src/open_r1/grpo.py --config {trained}"


SAVED = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "hidden_size": 896, "num_hidden_layers": 24, "vocab_size": 151936, "rope_parameters": {"rope_theta": 1e6}, "use_cache": True,
    "num_generations": 8, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "generation_batch_size": 256,
    "steps_per_generation": 4, "max_completion_length": 256, "bf16": True, "output_dir": "out", "report_to": ["wandb"],
    "accelerator_config": {"split_batches": False, "even_batches": True}, "deepspeed": None, "fsdp_config": None,
}  # fmt: skip

OPEN_R1 = """# Model arguments
model_name_or_path: XXX
model_revision: main
torch_dtype: bfloat16
dataset_name: XXX
dataset_configs:
- all
# Num processes is less by 1 as vLLM is using 1 GPU
num_processes: 7
bf16: true
use_vllm: true
vllm_device: auto
vllm_gpu_memory_utilization: 0.7
do_eval: true
eval_strategy: steps
gradient_accumulation_steps: 16
gradient_checkpointing: true
learning_rate: 2.0e-05
max_prompt_length: 512
max_completion_length: 1024
max_steps: -1
overwrite_output_dir: true
per_device_eval_batch_size: 4
per_device_train_batch_size: 1
report_to:
- wandb
save_strategy: "no"
seed: 42
warmup_ratio: 0.1
"""

TRL = [
    Case(
        "TRL: a recipe of open-r1 for seven of eight GPUs", "open-r1#365",
        lambda it: left_out(
            written(it, "config.yaml", OPEN_R1), "samples", "prompts", "responses per prompt", "data-parallel ranks",
            "optimizer steps",
        ),
        right=[112, 14, 8, 7, 1, {"memory": ("vllm_device",), "seconds": ("vllm_device",)}],
        because="GRPOConfig.__post_init__: 1 x 7 processes x 16 = 112, a multiple of the 8 generations that are the default",
    ),
    Case(
        "TRL: what open-r1's own scripts add", "kin of open-r1#365 (its configs.py)",
        lambda it: left_out(
            {
                **QWEN, "num_processes": 8, "hub_model_revision": "main", "chat_template": "{{ messages }}", "benchmarks": ["math"],
                "code_eval_test_batch_size": 4, "e2b_router_url": "x", "morph_router_url": "x", "ioi_provider": "piston",
                "dataset_mixer": {"a/b": 1.0}, "cosine_max_len": 1000, "reward_funcs": ["accuracy"],
            },
            "samples",
        ),
        right=[64, {}],
        because="open-r1's GRPOConfig and GRPOScriptArguments: rewards, data, hub and logs; 8 x 8 processes = 64",
    ),
    Case(
        "TRL: 24 processes of three completions", "trl#3165",
        lambda it: cut(
            {
                "per_device_train_batch_size": 3, "gradient_accumulation_steps": 1, "num_train_epochs": 1, "num_processes": 24,
                "num_machines": 3, "use_vllm": True, "vllm_mode": "server", "deepspeed": {"zero_optimization": {"stage": 1}},
            },
            "samples", "prompts", "optimizer steps", system="TRL",
        ),
        right=[72, 9, 1, "ZeRO-1", 1, 1, 24],
        because="the report: total train batch size 72; the answer: of 8 generations a prompt; ZeRO-1 cuts moments alone",
    ),
    Case(
        "TRL: three processes, eight generations, by files", "open-r1#236",
        lambda it: cut(
            launch(
                it, ZERO3,
                {
                    "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct", "per_device_train_batch_size": 1, "num_generations": 8,
                    "gradient_accumulation_steps": 1, "use_vllm": True, "vllm_mode": "server", "max_prompt_length": 512,
                    "max_completion_length": 1024, "bf16": True, "system_prompt": "You are a helpful assistant",
                    "warmup_ratio": 0.1,
                },
                "--num_processes=3",
            ),
            "samples", "data-parallel ranks",
        ),
        right=[3, 3, "ZeRO-3", 3, 3, 3, "1 x 3 processes x 1 = 3, 8"],
        because="the report's error: the global train batch size (3 x 1) must be evenly divisible by the generations (8)",
    ),
    Case(
        "TRL: FSDP by accelerate's file, flags above it", "trl#3582",
        lambda it: cut(
            launch(it, FSDP, {**QWEN, "gradient_checkpointing": False}, "--num_processes 4"), "data-parallel ranks", "samples"
        ),
        right=[4, 32, "FSDP", 4, 4, 4],
        because="accelerate/commands/launch.py: a flag wins over the file; FULL_SHARD cuts all three (arXiv 2304.11277)",
    ),
    Case(
        "TRL: ZeRO-2 on three GPUs, six generations", "trl#3204",
        lambda it: cut(
            {
                "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_processes": 3, "num_generations": 6,
                "deepspeed": {
                    "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
                },
            },
            "samples", "prompts", "mini-batch", "optimizer steps",
        ),
        right=[24, 4, 24, 1, "ZeRO-2", 1, 3, 3],
        because="the report: 4 * 2 * 3 = 24 completions a step, of 24 / 6 = 4 prompts; ZeRO-2 cuts gradients and moments",
    ),
    Case(
        "TRL: two generations on four GPUs", "trl#2961",
        lambda it: rows(
            "accelerate launch --num_processes 4 grpo.py --num_generations 2 --per_device_train_batch_size 2", "samples",
            "prompts", "optimizer steps",
        ),
        right=["TRL", 8, 4, 1],
        because="grpo_config.py, __post_init__: 2 x 4 processes x 1 = 8 completions, of 8 / 2 = 4 prompts",
    ),
    Case(
        "TRL: one completion a GPU, eight generations", "trl#3061",
        lambda it: broken({"per_device_train_batch_size": 1, "num_generations": 8, "num_processes": 4}, "samples"),
        right=[4, "1 x 4 processes x 1 = 4, 8"],
        because="grpo_config.py, __post_init__: 4 is no multiple of 8; the answer: the least per_device_train_batch_size is 2",
    ),
    Case(
        "TRL: a script by torchrun, DeepSpeed by a file", "trl#3172",
        lambda it: cut(
            "torchrun --nproc_per_node 8 grpo.py --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 8 "
            f"--num_generations 8 --deepspeed {written(it, 'zero3.json', {'zero_optimization': {'stage': 3}})}",
            "data-parallel ranks",
        ),
        right=[8, "ZeRO-3", 8, 8, 8],
        because="torch/distributed/run.py starts 8 processes; ZeRO-3 cuts weights, gradients and moments (arXiv 1910.02054)",
    ),
    Case(
        "TRL: the smallest run, in a dict of its arguments", "trl#2625",
        lambda it: rows(
            {"output_dir": "GRPO", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "logging_steps": 2},
            "samples", "prompts", "optimizer steps", system="TRL",
        ),
        right=["TRL", 8, 1, 1],
        because="grpo_config.py: steps_per_generation is gradient_accumulation_steps, 4 x 1 x 2 = 8 of 8 generations",
    ),
    Case(
        "TRL: a configuration that Weights & Biases saved, the model's among it", "kin of trl#2625: WandbCallback.setup",
        lambda it: [*rows(file := written(it, "config.yaml", logged(SAVED)), "samples", "prompts", "mini-batch"),
                    hf.explain(file).step.roles[0].model, hf.explain(file).withheld],
        right=["TRL", 256, 32, 256, "Qwen/Qwen2.5-0.5B-Instruct", {}],
        because="{key: {desc, value}}, args over model.config; a made GRPOConfig has 256 = 16 x 4 steps x processes, which were 4",
    ),
    Case(
        "TRL: a file of DeepSpeed that is not here", "kin of trl#3172",
        lambda it: left_out({**QWEN, "num_processes": 8, "deepspeed": "configs/ds_z3.json"}, "samples"),
        right=[64, {"memory": ("deepspeed",), "seconds": ("deepspeed",)}],
        because="ZeRO-3 or not, 8 x 8 completions are made; what a device holds hangs on the file",
    ),
]  # fmt: skip
OMNI = {
    "grpo": {"num_prompts_per_step": 256, "num_generations_per_prompt": 16}, "cluster": {"num_nodes": 16, "gpus_per_node": 8},
    "policy": {
        "model_name": "nemotron", "train_global_batch_size": 4096, "train_micro_batch_size": 1, "max_total_sequence_length": 16384,
        "dtensor_cfg": {"enabled": False}, "megatron_cfg": {
            "enabled": True, "tensor_model_parallel_size": 8, "context_parallel_size": 2, "expert_model_parallel_size": 16,
        },
        "generation": {"colocated": {"enabled": False, "resources": {"num_nodes": 8, "gpus_per_node": 8}},
                       "vllm_cfg": {"tensor_parallel_size": 8}},
    },
}  # fmt: skip
WORDS_656 = (
    "policy.model_name=Qwen/Qwen2.5-32B", "policy.generation.vllm_cfg.tensor_parallel_size=4",
    "policy.max_total_sequence_length=16384", "policy.dtensor_cfg.enabled=true", "policy.dtensor_cfg.tensor_parallel_size=8",
    "policy.dtensor_cfg.sequence_parallel=true", "policy.dtensor_cfg.activation_checkpointing=true",
    "policy.dynamic_batching.train_mb_tokens=16384", "policy.dynamic_batching.logprob_mb_tokens=32768",
    "checkpointing.enabled=false", "logger.wandb_enabled=true", "logger.tensorboard_enabled=false", "logger.monitor_gpus=true",
    "logger.wandb.project=p", "logger.wandb.name=n", "cluster.num_nodes=16", "cluster.gpus_per_node=8",
)  # fmt: skip


def merged(config: Any, *parts: Any) -> Any:
    """Return a nested configuration with others above it."""
    for part in parts:
        config = {
            **config,
            **{key: merged(config.get(key, {}), value) if isinstance(value, dict) else value for key, value in part.items()},
        }
    return config


def sequence_parallelism(key: str) -> int:
    """Return the bytes of a learning device that sequence parallelism saves a 7B at tp 4 with one row of 8,192 tokens."""
    config = {
        "grpo.num_prompts_per_step": 64, "grpo.num_generations_per_prompt": 8, "policy.model_name": "Qwen/Qwen2.5-7B",
        "policy.train_global_batch_size": 512, "policy.train_micro_batch_size": 1, "policy.max_total_sequence_length": 8192,
        "policy.megatron_cfg.enabled": True, "policy.dtensor_cfg.enabled": False, "policy.sequence_packing.enabled": False,
        "policy.megatron_cfg.tensor_model_parallel_size": 4, "cluster.gpus_per_node": 8, "cluster.num_nodes": 1,
    }  # fmt: skip
    both = [hf.explain({**config, key: cut}) for cut in (False, True)]
    assert all(not one.findings and not one.unread for one in both)
    without, with_it = (next(one.asked for one in found.memory if one.phase == "learning") for found in both)
    return without - with_it


NEMO_RL = [
    Case(
        "NeMo-RL: 32B at 16k tokens on 128 GPUs", "RL#656",
        lambda it: rows(
            EXAMPLES["grpo_math_8B.yaml"], *COUNTS, "tokens of a sample",
            words=(
                *WORDS_656, "policy.dynamic_batching.enabled=true", "policy.sequence_packing.enabled=false",
                "policy.logprob_batch_size=1",
            ),
        ),
        right=["NeMo-RL", 2048, 512, 16, 32, 32, 4, 16384],
        because="lm_policy.py: 128 / tp 8 = 16 ranks; 64 x 32 = 2048 / 512 = 4 steps; one sample of 16384 fills 16384 tokens",
    ),
    Case(
        "NeMo-RL: the same where the release packs by default", "RL#656, on 0.7.0",
        lambda it: broken(
            EXAMPLES["grpo_math_8B.yaml"], "data-parallel ranks",
            words=(
                *WORDS_656, "policy.dynamic_batching.enabled=true",
            ),
        ),
        right=[16, "both are enabled", "tp 8, 1, 2"],
        because="lm_policy.py: dynamic batching and packing exclude each other; from tp 4 on both micro-batches are the same",
    ),
    Case(
        "NeMo-RL: deepscaler at 16k tokens, two ways", "RL#456",
        lambda it: rows(
            merged(
                EXAMPLES["grpo-deepscaler-1.5b-8K.yaml"],
                {
                    "loss_fn": {"reference_policy_kl_penalty": 0.001, "ratio_clip_max": 0.28},
                    "policy": {
                        "max_total_sequence_length": 16384, "dynamic_batching": {"enabled": False},
                        "dtensor_cfg": {
                            "tensor_parallel_size": 2, "cpu_offload": True, "sequence_parallel": True,
                            "activation_checkpointing": True,
                        },
                    },
                },
            ),
            *COUNTS, "tokens of a sample",
        ),
        right=["NeMo-RL", 1024, 64, 4, 16, 16, 16, 16384],
        because="8 GPUs / tp 2 = 4 ranks; 128 x 8 / 64 = 16 steps; 64 / 4 = 16 samples, one a pass",
    ),
    Case(
        "NeMo-RL: tp 4 with and without sequence parallelism", "RL's megatron/setup.py, which warns of it",
        lambda it: sequence_parallelism("policy.megatron_cfg.sequence_parallel"),
        right=10 * 3584 * 8192 * 28 * 3 // 4,
        because="arXiv 2205.05198, table 2: (10 + 24 / t) h a token and layer without, 34 / t with it",
    ),
    Case(
        "NeMo-RL: a puzzle of many turns", "RL#604",
        lambda it: rows(
            merged(
                EXAMPLES["grpo_math_1B.yaml"],
                {
                    "grpo": {"max_rollout_turns": 50},
                    "policy": {
                        "model_name": "Qwen/Qwen2.5-1.5B-Instruct", "max_total_sequence_length": 1024,
                        "train_micro_batch_size": 1,
                        "dtensor_cfg": {"cpu_offload": True, "activation_checkpointing": True, "sequence_parallel": True},
                    },
                    "cluster": {"gpus_per_node": 8},
                },
            ),
            "samples", "data-parallel ranks", "mini-batch per rank", "optimizer steps",
        ),
        right=["NeMo-RL", 512, 8, 64, 1],
        because="32 x 16 = 512 samples; train_global_batch_size 512 / 8 ranks (dtensor_policy_worker_v2.py)",
    ),
    Case(
        "NeMo-RL: a hybrid model on 16 nodes, half of them generating", "RL#3494",
        lambda it: placed(OMNI, "samples", "data-parallel ranks", "mini-batch per rank", "optimizer steps", "tokens of a sample"),
        right=["NeMo-RL", 4096, 4, 1024, 1, 16384, {"policy": 64, "generation": 64}],
        because="the guide's table: 8 of 16 nodes generate; 64 / (tp 8 x cp 2) = 4 ranks; 256 x 16 = 4096 = the global batch",
    ),
    Case(
        "NeMo-RL: 64 prompts of 32 generations by default", "RL#111",
        lambda it: rows(EXAMPLES["grpo_math_8B.yaml"], "prompts", "responses per prompt", "samples"),
        right=["NeMo-RL", 64, 32, 2048],
        because="the pull request: 64 prompts per step and 32 generations per prompt",
    ),
    Case(
        "NeMo-RL: async GRPO as its first draft wrote it", "RL#1098",
        lambda it: without_numbers(
            merged(
                EXAMPLES["grpo_math_1B.yaml"],
                {
                    "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1},
                    "grpo": {"num_prompts_per_step": 64, "num_generations_per_prompt": 32},
                },
            )
        ),
        right=["async_grpo.enabled", "async_grpo.max_trajectory_age_steps"],
        because="0.7.0 has it below grpo; up there nothing reads it, and what it was meant to change is not said",
    ),
    Case(
        "NeMo-RL: async GRPO below grpo", "RL#1098, as merged",
        lambda it: left_out(merged(EXAMPLES["grpo_math_1B.yaml"], {"grpo": {"async_grpo": {"enabled": True}}}), "samples"),
        right=[512, {"seconds": ("grpo.async_grpo.enabled",)}],
        because="32 x 16 = 512 samples a step; rollouts beside the update make a step shorter, which no simulated one here is",
    ),
]  # fmt: skip

ROLL = {
    "exp_name": "qwen3-8B-rlvr-config", "seed": 42, "logging_dir": "./output/logs", "output_dir": "./output",
    "checkpoint_config": {"type": "file_system", "output_dir": "/models"}, "track_with": "wandb", "num_gpus_per_node": 8,
    "num_nodes": 2, "max_steps": 500, "save_steps": 100, "logging_steps": 1, "eval_steps": 10, "rollout_batch_size": 64,
    "prompt_length": 2048, "response_length": 20480, "num_return_sequences_in_group": 8, "ppo_epochs": 8,
    "adv_estimator": "grpo", "value_clip": 0.5, "reward_clip": 10, "advantage_clip": 2.0, "dual_clip_loss": True,
    "whiten_advantages": True, "pretrain": "/models/Qwen3-8B-Base",
}  # fmt: skip
SKYRL = {
    "generator.async_engine": True, "generator.backend": "vllm", "generator.batched": True,
    "generator.gpu_memory_utilization": 0.8, "generator.inference_engine_tensor_parallel_size": 1,
    "generator.n_samples_per_prompt": 4, "generator.num_inference_engines": 4, "generator.run_engines_locally": True,
    "generator.sampling_params.max_generate_length": 16000, "generator.weight_sync_backend": "nccl",
    "trainer.algorithm.advantage_estimator": "grpo", "trainer.algorithm.use_kl_loss": True, "trainer.ckpt_interval": 10,
}  # fmt: skip
PPO_OF_FACTORY = {
    "model_name_or_path": "meta-llama/Llama-3.2-1B-Instruct", "reward_model": "saves/reward", "stage": "ppo", "do_train": True,
    "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all", "dataset": "Sky-T1", "template": "llama3",
    "cutoff_len": 2048, "max_samples": 1000, "overwrite_cache": True, "preprocessing_num_workers": 16,
    "output_dir": "saves/ppo", "logging_steps": 10, "save_steps": 500, "plot_loss": True, "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8, "learning_rate": 1e-6, "num_train_epochs": 3.0, "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1, "bf16": True, "ddp_timeout": 180000000, "max_new_tokens": 2000, "top_k": 0, "top_p": 0.9,
}  # fmt: skip
AXOLOTL = {
    "base_model": "Qwen/Qwen3-8B", "load_in_8bit": False, "load_in_4bit": False, "strict": False, "torch_compile": True,
    "rl": "grpo", "trl": {"beta": 0.001, "max_completion_length": 512, "use_vllm": True, "vllm_gpu_memory_utilization": 0.9,
                          "vllm_max_model_len": 800, "num_generations": 16},
    "chat_template": "qwen3", "datasets": [{"path": "skrishna/gsm8k_only_answer"}], "val_set_size": 0.0, "sequence_len": 800,
    "sample_packing": False, "pad_to_sequence_len": False,
}  # fmt: skip
TRINITY = {
    "project": "agent_grpo", "name": "train-1120", "checkpoint_root_dir": "/ckpt",
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 8, "advantage_fn": "grpo"},
    "model": {"model_path": "/models/Qwen2.5-7B-Instruct", "max_response_tokens": 8192, "max_model_len": 131072},
    "cluster": {"node_num": 1, "gpu_per_node": 8},
    "buffer": {"total_epochs": 20480, "batch_size": 8, "train_batch_size": 18, "explorer_input": {"taskset": {"name": "train"}}},
}  # fmt: skip


def unread(what: str, source: str, config: Any, name: str) -> Case:
    """Return a case of a system that is not read: it has to be refused by its name."""
    return Case(
        f"unread: {what}",
        source,
        lambda it: hf.explain(config),
        right=Refused(hf.OptionError, name, "not read"),
        because=f"it is {name}'s: none of its numbers means here what it means there",
    )


UNREAD = [
    unread("slime, four flags that OpenRLHF has too", "slime#2366",
           "python3 train.py --num-rollout 2 --rollout-batch-size 8 --n-samples-per-prompt 8 --global-batch-size 256", "slime"),
    unread("slime, a whole launch", "slime#371",
           "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint Qwen3-4B "
           "--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --global-batch-size 256 "
           "--advantage-estimator grpo --tensor-model-parallel-size 2", "slime"),
    unread("ROLL's pipeline of rewards", "ROLL#159", ROLL, "ROLL"),
    unread("open-instruct's PPO on two nodes", "open-instruct#526",
           "source configs/ray_node_setup.sh && python open_instruct/ppo_vllm_thread_ray_gtrl.py --dataset_train_splits train "
           "--max_token_length 2048 --max_prompt_token_length 2048 --response_length 2048 --temperature 1.0 "
           "--model_name_or_path mistralai/Mistral-Nemo-Instruct-2407 --deepspeed_stage 3 --per_device_train_batch_size 2 "
           "--local_rollout_forward_batch_size 2 --local_mini_batch_size 32 --local_rollout_batch_size 32 "
           "--actor_num_gpus_per_node 7 8", "open-instruct"),
    unread("open-instruct's packed GRPO", "open-instruct#587",
           "python open_instruct/grpo_fast.py --exp_name base --max_token_length 256 --max_prompt_token_length 256 "
           "--response_length 128 --pack_length 1024 --number_samples_per_prompt 4 --deepspeed_stage 2 "
           "--model_name_or_path HuggingFaceTB/SmolLM2-135M --per_device_train_batch_size 1 "
           "--local_rollout_forward_batch_size 1 --local_mini_batch_size 16 --num_epochs 1 --actor_num_gpus_per_node 1 "
           "--vllm_tensor_parallel_size 1 --beta 0.01", "open-instruct"),
    unread("ms-swift, GRPO of a 32B model beside its engine", "ms-swift#4275",
           "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 NPROC_PER_NODE=8 python3 -m swift.cli.rlhf --rlhf_type grpo "
           "--model /DeepSeek_32B --reward_funcs accuracy --use_vllm true --vllm_mode colocate --train_type lora "
           "--torch_dtype bfloat16 --max_completion_length 2080 --per_device_train_batch_size 1 --learning_rate 5e-6 "
           "--gradient_accumulation_steps 1 --num_generations 8 --temperature 0.6 --deepspeed zero3", "ms-swift"),
    unread("ms-swift, a server and a trainer in one script", "ms-swift#9095",
           "CUDA_VISIBLE_DEVICES=0,1 swift rollout --model /m --vllm_tensor_parallel_size 2 --max_turns 11\n"
           "CUDA_VISIBLE_DEVICES=2,3,4,5,6,7 NPROC_PER_NODE=6 swift rlhf --rlhf_type grpo --model /m --tuner_type full "
           "--num_generations 8 --per_device_train_batch_size 1\n", "ms-swift"),
    unread("SkyRL's dotted keys", "SkyRL#292", SKYRL, "SkyRL"),
    unread("AReaL's launcher, a file that is not here", "AReaL#188",
           "python3 -m arealite.launcher.local examples/clevr_count_70k_grpo.py --config configs/clevr_count_70k_grpo.yaml",
           "AReaL"),
    unread("AReaL's keys of a GPU for both", "AReaL#1678", {
        "experiment_name": "gsm8k-grpo", "trial_name": "trial0", "allocation_mode": "sglang:d1p1t1+fsdp:d1p1t1",
        "actor": {"path": "Qwen/Qwen3-0.6B"}, "gconfig": {"n_samples": 4, "max_new_tokens": 512},
        "train_dataset": {"batch_size": 8}, "valid_dataset": None,
    }, "AReaL"),
    unread("LLaMA-Factory's PPO by flags", "LlamaFactory#1469",
           "CUDA_VISIBLE_DEVICES=0 python src/train_bash.py --stage ppo --model_name_or_path huggyllama/llama-7b "
           "--do_train True --finetuning_type lora --template default --dataset_dir data --cutoff_len 1024 "
           "--per_device_train_batch_size 4 --gradient_accumulation_steps 4 --lora_rank 8 --reward_model rm",
           "LLaMA-Factory"),
    unread("LLaMA-Factory's PPO by a file", "LlamaFactory#7706", PPO_OF_FACTORY, "LLaMA-Factory"),
    unread("EasyR1, which runs verl.trainer.main", "EasyR1#30",
           "python3 -m verl.trainer.main worker.actor.model.model_path=/m data.max_prompt_length=2048 "
           "data.max_response_length=1024 data.rollout_batch_size=512 worker.actor.global_batch_size=128 worker.rollout.n=128 "
           "worker.actor.micro_batch_size_per_device_for_update=4 trainer.n_gpus_per_node=8 trainer.nnodes=4", "EasyR1"),
    unread("axolotl, whose keys hold TRL's", "axolotl#2740", AXOLOTL, "axolotl"),
    unread("Trinity-RFT, which trains with verl", "Trinity-RFT#398", TRINITY, "Trinity-RFT"),
    unread("verl's generation alone", "verl#473",
           "python3 -m verl.trainer.main_generation trainer.nnodes=1 trainer.n_gpus_per_node=2 data.n_samples=1 "
           "data.batch_size=1 rollout.temperature=1.0 rollout.prompt_length=4096 rollout.response_length=1024 "
           "rollout.tensor_model_parallel_size=2", "verl's generation"),
    unread("OpenRLHF's PPO without Ray, as its log shows it", "OpenRLHF#519", [
        "python", "-u", "-m", "openrlhf.cli.train_ppo", "--local_rank=7", "--pretrain", "OpenRLHF/Llama-3-8b-sft-mixture",
        "--micro_train_batch_size", "2", "--train_batch_size", "128", "--rollout_batch_size", "1024", "--zero_stage", "2",
    ], "OpenRLHF's PPO without Ray"),
]  # fmt: skip

CASES = [*VERL, *OPENRLHF, *TRL, *NEMO_RL, *UNREAD]
