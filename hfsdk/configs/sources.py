"""Sources of a configuration: a YAML file, a dict, the words of a command line, or an object; and the system that it is of.

Nothing in it is run: YAML is read by ``yaml.safe_load``, words are cut as a shell cuts them, and what a shell or a resolver would
work out is refused, with what to write in its place.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfsdk.configs import openrlhf, trl, verl, zero_and_fsdp
from hfsdk.configs.command_line import arguments_of, commands_of, job_words, program_of
from hfsdk.configs.settings import OfAShell, flatten
from hfsdk.configs.unread_keys import is_of_release
from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError
from hfsdk.core.text import nearest
from hfsdk.core.untrusted import read_named

MOST_BYTES = 2_000_000
"""Largest file that is read, in bytes."""
MOST_PARENTS = 16
"""Files that a configuration of NeMo-RL may inherit from."""
FILES_OF_TRL = {
    "deepspeed": "deepspeed.",
    "deepspeed_config_file": "deepspeed.",
    "fsdp_config": "fsdp_config.",
    "accelerate_config": "",
}
"""Keys of TRL, transformers and accelerate that may name a file -> how its keys begin."""

CONFIGS_OF_TRL = {"GRPOConfig", "PPOConfig"}

WRITE = (
    "a path of a YAML file, a dict, the words of a command line ('data.train_batch_size=1024 ...', '--train.batch_size 128 ...'), "
    "TRL's GRPOConfig, or an algorithm with session="
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """A configuration as it was given."""

    what: str
    """The configuration's name in messages."""
    system: str
    keys: dict[str, Any]
    """Dotted key -> value."""
    renamed: Mapping[str, str]
    """Keys as they were given, in names of other releases or of a launcher -> as they are read."""
    apart: Mapping[str, str]
    """Keys that are no part of it -> their meaning."""
    runs: str = ""
    """The program that a command line runs."""
    assumed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables of a script -> the defaults that it has for them, which were taken."""


@dataclasses.dataclass(frozen=True)
class _Command:
    """The content of a command line."""

    keys: dict[str, Any]
    runs: str = ""
    assumed: Mapping[str, str] = dataclasses.field(default_factory=dict)


def open_config(config: Any, overrides: Iterable[str], system: str | None) -> SourceConfig:
    """Return a configuration's keys and whose it is.

    Raises:
        OptionError: it is no configuration, cannot be read, or of no system that is known.
    """
    name, command = _keys(config)
    more, dropped = _overrides(list(overrides))
    keys, runs = _without({**command.keys, **more}, dropped), command.runs
    of_system = system_named(system) if system else "TRL" if name in CONFIGS_OF_TRL else system_of(name, keys, runs)
    renamed: dict[str, str] = {}
    apart: dict[str, str] = {}
    if of_system == "OpenRLHF":
        keys, renamed = openrlhf.named_now(keys)
    elif of_system == "verl":
        keys, renamed = verl.named_now(keys)
    elif of_system == "TRL":
        keys, apart = trl.saved_by_a_run(keys, is_argument=lambda key: is_of_release("TRL", key))
        keys, renamed = zero_and_fsdp.named_now(_of_trl_files(keys))
    return SourceConfig(what=name, system=of_system, keys=keys, renamed=renamed, apart=apart, runs=runs, assumed=command.assumed)


def _without(keys: dict[str, Any], dropped: Iterable[str]) -> dict[str, Any]:
    for key in dropped:
        there = [name for name in keys if name == key or name.startswith(f"{key}.")]
        if not there:
            raise OptionError(f"'~{key}' leaves out a key that is not given; {nearest(key, list(keys))}")
        keys = {name: value for name, value in keys.items() if name not in there}
    return keys


def _of_trl_files(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with those of the JSON files that they name; a file that is not here stays named."""
    contents: dict[str, Any] = {}
    for key, value in keys.items():
        last = key.rsplit(".", 1)[-1]
        path = Path(os.path.expanduser(value)) if isinstance(value, str) and value and last in FILES_OF_TRL else None
        if path is None or not os.path.isfile(path):
            contents[key] = value
            continue
        inside = _json(path) if path.suffix == ".json" else _yaml(path, _read(path))
        contents = {f"{FILES_OF_TRL[last]}{name}": item for name, item in flatten(inside, path.name).items()} | contents
    return contents


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} is no JSON: {str(error)[:300]}. Correct it there.") from error
    if not isinstance(content, dict):
        raise OptionError(f"{path} holds {shown(content)}; a configuration is a mapping of keys to values. Name another file.")
    return content


def system_named(system: str) -> str:
    """Return a system by its name, in any case of letters.

    Raises:
        OptionError: there is none.
    """
    plain = {re.sub(r"[^a-z]", "", known_name.lower()): known_name for known_name in SYSTEMS}
    wanted = re.sub(r"[^a-z]", "", system.lower())
    if wanted not in plain:
        raise OptionError(f"system={shown(system)} is not read; {nearest(system, SYSTEMS)}")
    return plain[wanted]


def _keys(config: Any) -> tuple[str, _Command]:
    """Return the name of a configuration, and its keys."""
    if isinstance(config, Mapping):
        return "the dict", _Command(flatten(_logged(config), "the dict"))
    if isinstance(config, Path):
        return config.name, _file(config)
    if isinstance(config, str):
        return _text(config)
    if isinstance(config, Sequence) and all(isinstance(word, str) for word in config):
        return "the arguments", _command(list(config), {})
    kinds = {base.__name__ for base in type(config).__mro__}
    if dataclasses.is_dataclass(config) and not isinstance(config, type) and (of_trl := kinds & CONFIGS_OF_TRL):
        return of_trl.pop(), _Command(_object(config))
    raise OptionError(f"hf.explain takes {WRITE}; got {shown(config)}")


def _logged(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys that Weights & Biases saved: its ``config.yaml`` holds ``{key: {"desc": ..., "value": ...}}``."""
    values = {key: value for key, value in config.items() if key not in ("wandb_version", "_wandb")}
    if values and all(
        isinstance(entry, Mapping) and "value" in entry and set(entry) <= {"value", "desc"} for entry in values.values()
    ):
        return {key: entry["value"] for key, entry in values.items()}
    return config


def _command(words: Sequence[str], defaults: Mapping[str, str]) -> _Command:
    """Return the keys of a command line over those of the files that it names, and the program that it runs."""
    words = job_words(words)
    arguments, files, dropped = arguments_of(words)
    below: dict[str, Any] = {}
    for name in files:
        if isinstance(name, OfAShell):
            raise OptionError(f"the command line names the file {shown(str(name))}, which a shell would work out; write its path")
        if not os.path.isfile(os.path.expanduser(name)):
            refuse_others("the command line", program_of(words))  # rather than for the file
        below |= _file(Path(name).expanduser()).keys
    assumed = {
        name: f"{value or 'nothing'}, the script's own default: the environment of a run may give another"
        for name, value in defaults.items() if "/" not in value
    }  # fmt: skip
    return _Command(_without({**below, **arguments}, dropped), program_of(words), assumed)


def _object(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration object whose values are not their defaults, and how many processes it was made for.

    Made, a GRPOConfig has both generation_batch_size and steps_per_generation.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if hasattr(config, field.name)}
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    keys = {name: value for name, value in values.items() if value != defaults[name]}
    keys |= {name: value for name, value in trl.with_processes(values).items() if name not in values}
    return flatten(keys, type(config).__name__)


def _text(text: str) -> tuple[str, _Command]:
    if "\n" not in text and len(text) < 4096 and (os.path.isfile(os.path.expanduser(text)) or _is_path(text)):
        path = Path(text).expanduser()
        return path.name, _file(path)
    all_commands, defaults = commands_of(text)
    commands = [command for command in all_commands if any("=" in word or word.startswith("--") for word in command)]
    jobs = [command for command in commands if program_of(command)]
    if jobs:  # what stands alone before it are variables of the shell
        commands = [command for command in commands if not all(re.match(r"[A-Za-z_]\w*=", word) for word in command)]
    trains = [command for command in jobs if is_read(program_of(command))]
    if len(trains) == 1:  # the others prepare data, or convert a model
        jobs, commands = trains, [command for command in commands if command in trains or not program_of(command)]
    if len(jobs) > 1:
        for command in jobs:
            refuse_others("the command line", program_of(command))
        listed = " and ".join(shown(" ".join(command)[:60]) for command in jobs[:3])
        raise OptionError(f"the command line has {len(jobs)} commands that may be the job: {listed}. Give one of them.")
    return "the command line", _command([word for command in commands for word in command], defaults)


def _is_path(text: str) -> bool:
    return re.search(r"\.(ya?ml|json|sh|txt)$", text) is not None and " " not in text.strip()


def _file(path: Path) -> _Command:
    """Return a file's content: YAML (JSON is YAML), or a script.

    Raises:
        OptionError: it is missing, too large, or no configuration.
    """
    text = _read(path)
    if path.suffix in (".sh", ".txt"):
        return _text(text if "\n" in text else text + "\n")[1]
    return _Command(flatten(_logged(_inherited(path, text, [])), path.name))


def _read(path: Path) -> str:
    try:
        return read_named(path, MOST_BYTES, error=OptionError).decode("utf-8")
    except (OptionError, UnicodeDecodeError) as error:
        there = sorted(file.name for file in path.parent.glob("*.y*ml"))[:5] if path.parent.is_dir() else []
        beside = f"beside it are {', '.join(there)}" if there else "there is no YAML file beside it"
        raise OptionError(f"{path} cannot be read: {str(error).rstrip('.')}; {beside}. Check the path.") from error


def _inherited(path: Path, text: str, read: list[Path]) -> Mapping[str, Any]:
    """Return a file's mapping over that of the files which its ``defaults`` name, as NeMo-RL inherits; ``read`` has those read."""
    content = _yaml(path, text)
    parents = content.get("defaults")
    if isinstance(parents, list) and all(isinstance(parent, str) and parent.endswith((".yaml", ".yml")) for parent in parents):
        names = parents
    elif isinstance(parents, str):
        names = [parents]
    else:  # hydra's groups: their values are the release's defaults
        return {key: value for key, value in content.items() if key not in ("defaults", "hydra")}
    whole: dict[str, Any] = {}
    for name in names:
        read.append(path.parent / name)
        if len(read) > MOST_PARENTS:
            raise OptionError(f"{path} inherits from more than {MOST_PARENTS} files; does one name itself?")
        if os.path.isabs(name):
            raise OptionError(f"{path} inherits from {shown(name)}; files are named from where it lies, e.g. '../base.yaml'")
        whole = _over(whole, _inherited(path.parent / name, _read(path.parent / name), read))
    return _over(whole, {key: value for key, value in content.items() if key != "defaults"})


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("YAML files need pyyaml, which is not installed; pip install pyyaml", name="yaml") from error
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise OptionError(f"{path} is no YAML: {' '.join(str(error).split())[:300]}. Correct it there.") from error
    if not isinstance(content, dict):
        raise OptionError(f"{path} holds {shown(content)}; a configuration is a mapping of keys to values. Name another file.")
    flatten(content, path.name)  # counts what its aliases stand for, before anything goes through them
    return content


def _overrides(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the keys that are given anew, and those that are left out."""
    if isinstance(words, str) or not all(isinstance(word, str) and ("=" in word or word.startswith(("-", "~"))) for word in words):
        expected = "overrides are texts such as 'data.train_batch_size=1024', or '~data.seed', which leaves a key out"
        raise OptionError(f"{expected}; got {shown(words)}")
    keys, _, dropped = arguments_of(words)
    return keys, dropped


# -- the system of a configuration

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
"""System -> the programs that its command lines run."""


@dataclass(frozen=True, kw_only=True)
class Other:
    """A system, or a trainer of one, that is not read."""

    name: str
    runs: str
    """A pattern of the programs that its command lines run."""
    keys: tuple[str, ...] = ()
    """How keys begin that are its own; ``"A$+B"`` are two whole keys that only together are a sign, ``"A=B"`` is a key's value."""


OTHERS_OF_NEMO = "NeMo-RL's SFT, DPO or distillation"
"""The trainers of NeMo-RL that are not read: their files have the same keys of the policy, and others in the place of ``grpo`` and
``ppo``."""

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

    A batch of rollouts, a number of responses or a device's batch size are keys of many systems and tell nothing. The signs of
    systems that are not read are known too, so that theirs are refused by name.

    Args:
        name: the configuration's name in messages.
        keys: the configuration's keys.
        runs: the program that its command line runs, or ``""``.

    Raises:
        OptionError: it is of none that is read.
    """
    refuse_others(name, runs)
    ran = _system_that_runs(runs)
    if ran:
        return ran
    counts = {system: sum(key.startswith(signs) for key in keys) for system, signs in SIGNS.items()}
    num_known = {system: sum(is_of_release(system, key) for key in keys) for system in SIGNS}
    best = max(SIGNS, key=lambda system: (counts[system], num_known[system]))
    theirs = {other.name: sum(_has(keys, sign) for sign in other.keys) for other in OTHERS}
    most = max(theirs, key=lambda other: theirs[other])
    if theirs[most] > counts[best] // SIGNS_OF_ANOTHER:
        raise _not_read(name, most)
    if not counts[best]:
        has = ", ".join(list(keys)[:5]) or "no keys"
        raise OptionError(
            f"{name} has no keys of a system that is read ({READ}, hfsdk): it has {has}. If it is of one of them, say which: "
            "system='verl'."
        )
    if best == "NeMo-RL" and _has_parts(keys, "sft.", "dpo.", "rm.", "distillation.") and not _has_parts(keys, "grpo.", "ppo."):
        raise _not_read(name, OTHERS_OF_NEMO)
    if num_known[best] < LEAST_KNOWN * len(keys):
        raise OptionError(
            f"{name} has {len(keys)} keys, of which {best} knows {num_known[best]}: it is of another system, and those that are "
            f"read are {READ}. If it is {best}'s, say system={best!r}; numbers that other keys could change are then left out."
        )
    return best


def _system_that_runs(runs: str) -> str:
    return next((system for system, pattern in MODULES.items() if re.search(rf"(^|\s|/)({pattern})", runs)), "")


def is_read(runs: str) -> bool:
    """Return whether a command runs a trainer whose configurations are read."""
    return bool(_system_that_runs(runs))


def _has_parts(keys: Mapping[str, object], *parts: str) -> bool:
    return any(key.startswith(parts) for key in keys)


def refuse_others(name: str, runs: str) -> None:
    """Refuse the program of a system that is not read.

    Raises:
        OptionError: ``runs`` names one.
    """
    for other in OTHERS:
        if re.search(other.runs, runs):
            raise _not_read(name, other.name)


def _has(keys: Mapping[str, object], sign: str) -> bool:
    if "$+" in sign:
        return all(any(key == part or key.startswith(f"{part}.") for key in keys) for part in sign.split("$+"))
    if "=" in sign:
        key, _, value = sign.partition("=")
        return str(keys.get(key)) == value
    return any(key.startswith(sign) for key in keys)


def _not_read(name: str, other: str) -> OptionError:
    return OptionError(f"{name} is of {other}, which is not read; read are {READ_ALONE}, and hfsdk's own algorithms.")
