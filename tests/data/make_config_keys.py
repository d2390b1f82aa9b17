"""Writes ``hfsdk/planner/configs/keys/*.txt``: the keys that verl, TRL, OpenRLHF and NeMo-RL have, from their sources.

``python make_config_keys.py VERL TRL OPENRLHF NEMO``: folders with the packages ``verl`` 0.9.1, ``trl`` 1.16.0 and ``openrlhf``
0.11.2 (their wheels, unpacked) and a checkout of NeMo-RL v0.7.0. Files are read and parsed, none is run or imported.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import yaml

KEYS = Path(__file__).parents[2] / "hfsdk" / "planner" / "configs" / "keys"


def leaves(tree: object, before: str = "") -> set[str]:
    if not isinstance(tree, dict) or not tree:
        return {before.rstrip(".")} if before else set()
    return set().union(*(leaves(value, f"{before}{key}.") for key, value in tree.items()))


def yaml_keys(files: list[Path]) -> set[str]:
    found = set().union(*(leaves(yaml.safe_load(file.read_text())) for file in files))
    return {key for key in found if not key.endswith("_target_")}


def field_names(file: Path) -> set[str]:
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    return {
        item.target.id
        for one in classes
        for item in one.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def write(name: str, release: str, keys: set[str]) -> None:
    KEYS.mkdir(exist_ok=True)
    (KEYS / f"{name}.txt").write_text("\n".join([f"# keys of {release}", *sorted(keys)]) + "\n")


def main(verl: Path, trl: Path, openrlhf: Path, nemo: Path) -> None:
    write("verl", "verl 0.9.1", yaml_keys(sorted((verl / "trainer" / "config").glob("_generated_ppo_*.yaml"))) | {"model_engine"})
    import transformers.training_args as arguments

    config = trl / "trainer"
    named = (
        field_names(config / "grpo_config.py") | field_names(config / "base_config.py") | field_names(config / "model_config.py")
    )
    named |= field_names(Path(arguments.__file__)) | {"reward_funcs", "dataset_name", "dataset_config", "num_processes"}
    write("trl", "TRL 1.16.0, with transformers' TrainingArguments and accelerate launch", named | ACCELERATE | PPO)
    flags = re.findall(r'"--([\w.]+)"', (openrlhf / "cli" / "train_ppo_ray.py").read_text())
    optimizers = re.findall(r'f"--\{prefix\}\.([\w.]+)"', (openrlhf / "cli" / "train_ppo_ray.py").read_text())
    write("openrlhf", "OpenRLHF 0.11.2", {*flags, *(f"{role}.{one}" for role in ("actor", "critic") for one in optimizers)})
    write("nemo_rl", "NeMo-RL 0.7.0", yaml_keys(sorted((nemo / "examples" / "configs").glob("*_*.yaml"))))


ACCELERATE = {
    "num_machines", "machine_rank", "main_process_ip", "main_process_port", "config_file", "mixed_precision", "multi_gpu",
    "compute_environment", "distributed_type", "downcast_bf16", "main_training_function", "rdzv_backend", "same_network", "use_cpu",
    "debug", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "deepspeed_config.zero_stage", "deepspeed_config.zero3_init_flag",
    "deepspeed_config.zero3_save_16bit_model", "deepspeed_config.deepspeed_multinode_launcher",
    "deepspeed_config.offload_optimizer_device", "deepspeed_config.offload_param_device", "dataset_train_split",
    "dataset_test_split",
    "server_ip",
}  # fmt: skip
PPO = {
    "num_mini_batches", "total_episodes", "local_rollout_forward_batch_size", "num_sample_generations", "response_length",
    "stop_token",
    "stop_token_id", "missing_eos_penalty", "sft_model_path", "reward_model_path", "num_ppo_epochs", "whiten_rewards", "kl_coef",
    "kl_estimator", "cliprange", "vf_coef", "cliprange_value", "gamma", "lam", "ds3_gather_for_generation", "exp_name",
    "dataset_num_proc", "model_adapter_name", "ref_adapter_name",
}  # fmt: skip
"""Of TRL 1.9.0's PPOConfig."""

if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]))
