"""Whose configuration it is: told by signs that one system alone has, and by how many of its keys that system knows.

A batch of rollouts, a number of responses or a device's batch size are keys of many systems and tell nothing. Of systems that are
not read the signs are known too, so that theirs are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hfsdk.core.errors import OptionError
from hfsdk.planner.configs.unread_keys import is_of_release

SYSTEMS = ("verl", "TRL", "OpenRLHF", "NeMo-RL", "hfsdk")

SIGNS: dict[str, tuple[str, ...]] = {
    "verl": ("actor_rollout_ref.", "data.train_batch_size", "data.max_prompt_length", "algorithm.adv_estimator", "model_engine"),
    "NeMo-RL": (
        "grpo.num_", "ppo.num_", "policy.train_", "policy.generation.", "policy.dtensor_cfg.", "policy.model_name",
        "policy.megatron_cfg.",
    ),
    "OpenRLHF": (
        "rollout.batch_size", "rollout.n_samples_per_prompt", "train.micro_batch_size", "actor.model_name_or_path",
        "vllm.num_engines", "ds.zero_stage", "algo.advantage.",
        "micro_train_batch_size", "micro_rollout_batch_size", "colocate_all_models", "colocate_actor_ref", "vllm_num_engines",
        "generate_max_len", "ref_num_gpus_per_node", "remote_rm_url",
    ),
    "TRL": (
        "num_generations", "generation_batch_size", "steps_per_generation", "vllm_mode", "num_ppo_epochs", "max_completion_length",
        "num_sample_generations", "local_rollout_forward_batch_size",
    ),
}  # fmt: skip
"""System -> how keys begin that only it has, of those that are read."""

MODULES = {
    "verl": r"verl[./]", "NeMo-RL": r"nemo_rl[./]|run_grpo", "OpenRLHF": r"openrlhf[./]|train_ppo_ray", "TRL": r"trl[./]|trl grpo",
}  # fmt: skip
"""System -> what a command line of it runs."""


@dataclass(frozen=True, kw_only=True)
class Other:
    """A system, or a trainer of one, that is not read."""

    name: str
    runs: str
    """A pattern of what its command lines run."""
    keys: tuple[str, ...] = ()
    """How keys begin that are its own; ``"A$+B"`` are two whole keys that only together are a sign, ``"A=B"`` is a key's value."""


OTHERS_OF_NEMO = "NeMo-RL's SFT, DPO or distillation"
"""Their files have the same keys of the policy, and others in the place of ``grpo`` and ``ppo``."""

OTHERS = (
    Other(name="slime", runs=r"slime[./]", keys=(
        "rollout_max_response_len", "hf_checkpoint", "ref_load", "rollout_num_gpus", "sglang_mem_fraction", "num_steps_per_rollout",
        "rollout_temperature", "custom_generate_function_path", "num_rollout$+global_batch_size",
    )),
    Other(name="ROLL", runs=r"roll/|start_rlvr_pipeline|start_agentic_pipeline", keys=(
        "num_return_sequences_in_group", "actor_train.", "actor_infer.", "rewards.", "pretrain$+response_length",
    )),
    Other(name="open-instruct", runs=r"open_instruct[./]", keys=(
        "num_unique_prompts_rollout", "num_samples_per_prompt_rollout", "dataset_mixer_", "vllm_num_engines$+num_mini_batches",
    )),
    Other(name="ms-swift", runs=r"(^|\s)(swift|megatron) (rlhf|sft)|swift[./]cli", keys=(
        "rlhf_type", "train_type", "tuner_type", "sleep_level", "external_plugins", "move_model_batches", "sft_type",
    )),
    Other(name="SkyRL", runs=r"skyrl", keys=("trainer.policy.", "generator.", "trainer.placement.", "trainer.algorithm.")),
    Other(name="AReaL", runs=r"areal(ite)?[./]", keys=(
        "allocation_mode", "gconfig.", "actor.path", "rollout.max_head_offpolicyness", "cluster.fileroot", "actor.group_size",
        "recover.",
    )),
    Other(name="LLaMA-Factory", runs=r"llamafactory|llama_factory", keys=("finetuning_type", "template$+cutoff_len", "pref_beta")),
    Other(name="EasyR1", runs=r"verl\.trainer\.main(\s|$)", keys=("worker.actor.", "worker.rollout.", "worker.reward.")),
    Other(name="axolotl", runs=r"axolotl", keys=("base_model", "micro_batch_size$+datasets", "trl.", "sequence_len")),
    Other(name="trlX", runs=r"trlx[./]", keys=(
        "method.num_rollouts", "method.chunk_size", "method.ppo_epochs", "train.seq_length",
    )),
    Other(name="DeepSpeed-Chat", runs=r"step3_rlhf_finetuning|dschat", keys=(
        "actor_model_name_or_path", "critic_model_name_or_path", "actor_zero_stage", "max_prompt_seq_len",
    )),
    Other(name="NeMo-Aligner", runs=r"train_gpt_ppo|nemo_aligner", keys=(
        "trainer.ppo.", "model.ppo.", "trainer.reinforce.", "model.mcore_gpt",
    )),
    Other(name="prime-rl", runs=r"prime_rl|(^|\s)(uv run )?rl @|orchestrator @", keys=(
        "orchestrator.", "trainer.model.", "inference.model.", "rollouts_per_example",
    )),
    Other(name="Oumi", runs=r"oumi ", keys=("training.trainer_type", "training.grpo.", "model.model_max_length")),
    Other(name="torchtune", runs=r"(^|\s)tune run", keys=(
        "tokenizer._component_", "model._component_", "ppo_batch_size", "grpo_samples",
    )),
    Other(name="Megatron-LM", runs=r"train_rl\.py|pretrain_gpt", keys=(
        "grpo_group_size", "grpo_prompts_per_step", "num_attention_heads$+micro_batch_size", "langrl_",
    )),
    Other(name="Tunix", runs=r"tunix", keys=("rl_training_config.", "grpo_config.", "reference_model_config.", "rollout_config.")),
    Other(name="verifiers", runs=r"vf-rl|vf-train", keys=("rollouts_per_example", "max_concurrent$+batch_size")),
    Other(name="RAGEN", runs=r"ragen[./]", keys=("agent_proxy.", "es_manager.", "ctx_manager.")),
    Other(name="Trinity-RFT", runs=r"trinity run", keys=("algorithm.algorithm_type", "algorithm.repeat_times", "buffer.")),
    Other(name="verl's generation or evaluation", runs=r"main_(generation|eval)"),
    Other(name="verl's SFT", runs=r"sft_trainer", keys=(
        "model.partial_pretrain", "data.micro_batch_size_per_gpu", "optim.lr$+data.train_batch_size",
    )),
    Other(name="OpenRLHF's SFT, DPO or reward models", runs=r"openrlhf\.cli\.train_(sft|dpo|rm|kto|kd|prm)"),
    Other(name="OpenRLHF's PPO without Ray", runs=r"openrlhf\.cli\.train_ppo(\s|$)"),
    Other(name="TRL's SFT, DPO, KTO or reward models",
          runs=r"(^|\s)trl (sft|dpo|kto|reward|rloo)\b|trl/scripts/(sft|dpo|kto|reward)",
          keys=("max_seq_length$+per_device_train_batch_size", "loss_type=sigmoid", "desirable_weight", "rloo_k")),
    Other(name=OTHERS_OF_NEMO, runs=r"run_(sft|dpo|rm|distillation)\.py"),
)  # fmt: skip
"""Systems that are not read."""

LEAST_KNOWN = 0.5
"""Share of its keys that a system has to know for a configuration to be its own."""

SIGNS_OF_ANOTHER = 8
"""Signs of a system that one sign of another that is not read outweighs: those of both grow out of the same libraries."""

READ = ", ".join(SYSTEMS[:-1])
READ_ALONE = "verl's PPO and GRPO, TRL's GRPO and PPO, OpenRLHF's PPO with Ray, NeMo-RL's GRPO and PPO"


def system_of(name: str, keys: Mapping[str, object], runs: str) -> str:
    """Return the system of a configuration.

    Args:
        name: of the configuration in messages.
        keys: its keys.
        runs: what a command line of it runs, or ``""``.

    Raises:
        OptionError: it is of none that is read.
    """
    refuse_others(name, runs)
    ran = _system_that_runs(runs)
    if ran:
        return ran
    counts = {system: sum(key.startswith(signs) for key in keys) for system, signs in SIGNS.items()}
    known = {system: sum(is_of_release(system, key) for key in keys) for system in SIGNS}
    found = max(SIGNS, key=lambda system: (counts[system], known[system]))
    theirs = {one.name: sum(_has(keys, sign) for sign in one.keys) for one in OTHERS}
    most = max(theirs, key=lambda one: theirs[one])
    if theirs[most] > counts[found] // SIGNS_OF_ANOTHER:
        raise _not_read(name, most)
    if not counts[found]:
        has = ", ".join(list(keys)[:5]) or "no keys"
        raise OptionError(
            f"{name} is of no system that is read ({READ}, hfsdk): it has {has}. If it is of one of them, say which: system='verl'."
        )
    if found == "NeMo-RL" and _has_parts(keys, "sft.", "dpo.", "rm.", "distillation.") and not _has_parts(keys, "grpo.", "ppo."):
        raise _not_read(name, OTHERS_OF_NEMO)
    if known[found] < LEAST_KNOWN * len(keys):
        raise OptionError(
            f"{name} has {len(keys)} keys, of which {found} knows {known[found]}: it is of another system, and those that are read "
            f"are {READ}. If it is {found}'s, say system={found!r}; numbers that other keys could change are then left out."
        )
    return found


def _system_that_runs(runs: str) -> str:
    return next((system for system, pattern in MODULES.items() if re.search(rf"(^|\s|/)({pattern})", runs)), "")


def is_read(runs: str) -> bool:
    """Return whether a command runs a trainer whose configurations are read."""
    return bool(_system_that_runs(runs))


def _has_parts(keys: Mapping[str, object], *parts: str) -> bool:
    return any(key.startswith(parts) for key in keys)


def refuse_others(name: str, runs: str) -> None:
    """Refuse what runs a system that is not read.

    Raises:
        OptionError: it does.
    """
    for one in OTHERS:
        if re.search(one.runs, runs):
            raise _not_read(name, one.name)


def _has(keys: Mapping[str, object], sign: str) -> bool:
    if "$+" in sign:
        return all(any(key == part or key.startswith(f"{part}.") for key in keys) for part in sign.split("$+"))
    if "=" in sign:
        key, _, value = sign.partition("=")
        return str(keys.get(key)) == value
    return any(key.startswith(sign) for key in keys)


def _not_read(name: str, other: str) -> OptionError:
    return OptionError(f"{name} is of {other}, which is not read; read are {READ_ALONE}, and hfsdk's own algorithms.")
