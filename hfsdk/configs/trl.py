"""TRL's GRPOConfig, as release 1.16.0 reads it, and PPOConfig, as 1.9.0 does; later releases have no PPO.

Sources: ``trl/trainer/grpo_config.py`` (fields, ``__post_init__``: generation_batch_size is per_device_train_batch_size times
processes times steps_per_generation), ``trl/trainer/grpo_trainer.py`` (``_prepare_inputs``: a generation serves
steps_per_generation times num_iterations micro-batches); ``trl/experimental/ppo/ppo_config.py`` and ``ppo_trainer.py``
(``PPOTrainer.__init__``). Defaults that are not TRL's own are those of transformers' ``TrainingArguments``. TRL counts samples
(completions), nowhere prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hfsdk.configs.model import PEFT_DEFAULT, lora_asked
from hfsdk.configs.settings import Settings
from hfsdk.configs.step_config import BROKEN, NOTE, Finding, RoleConfig, RolloutConfig, StepConfig
from hfsdk.configs.zero_and_fsdp import LAUNCH_DEFAULTS, processes_of, states_of
from hfsdk.core.layout import Layout
from hfsdk.core.lora import LoRA

RELEASE, PPO_RELEASE = "1.16.0", "1.9.0"
EACH, ACCUMULATED = "per_device_train_batch_size", "gradient_accumulation_steps"
SERVER_SHARE = 0.9
"""``gpu_memory_utilization`` of ``trl vllm-serve`` (``trl/scripts/vllm_serve.py``)."""
MOST_COPIES = 4096
"""Responses to a prompt up to which a number that fits is looked for."""
PROMPT_TOKENS = 512
"""Tokens of a prompt where nothing says how long prompts are."""

GATHERED = "ds3_gather_for_generation"
OF_DEEPSPEED = (
    "deepspeed_config.gradient_accumulation_steps", "deepspeed.gradient_accumulation_steps",
    "deepspeed.train_micro_batch_size_per_gpu", "deepspeed.train_batch_size",
)  # fmt: skip
"""Keys of DeepSpeed's configuration about batches, in accelerate's file and in its own."""

COMMON: dict[str, Any] = {
    **LAUNCH_DEFAULTS, EACH: 8, ACCUMULATED: 1, "model_name_or_path": None, "gradient_checkpointing": True, "use_peft": False,
    "lora_r": 16, "lora_alpha": 32, "lora_target_modules": None, "use_rslora": False,
    **dict.fromkeys(OF_DEEPSPEED), "max_prompt_length": None, GATHERED: True,
}  # fmt: skip
"""Defaults of transformers, of its launchers, and of earlier releases."""

GRPO_DEFAULTS: dict[str, Any] = {
    **COMMON, "learning_rate": 1e-6, "num_generations": 8, "generation_batch_size": None, "steps_per_generation": None,
    "max_completion_length": 512, "num_iterations": 1, "beta": 0.0, "epsilon": 0.2, "epsilon_high": None, "delta": None,
    "loss_type": "dapo", "scale_rewards": "group", "temperature": 1.0, "use_vllm": False, "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.3, "vllm_tensor_parallel_size": 1, "vllm_enable_sleep_mode": False,
    "vllm_max_model_length": None, "entropy_coef": 0.0, "auto_find_batch_size": False, "importance_sampling_level": "token",
    "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None, "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05, "multi_objective_aggregation": "sum_then_normalize", "use_bias_correction_kl": True,
}  # fmt: skip
PPO_DEFAULTS: dict[str, Any] = {
    **COMMON, "learning_rate": 3e-6, "num_mini_batches": 1, "num_ppo_epochs": 4, "response_length": 53, "temperature": 0.7,
    "kl_coef": 0.05, "kl_estimator": "k1", "cliprange": 0.2, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95,
    "whiten_rewards": False, "missing_eos_penalty": None, "local_rollout_forward_batch_size": 64, "sft_model_path": None,
    "reward_model_path": None,
}  # fmt: skip

AGGREGATIONS = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "fixed_length",
    "cispo": "token_mean",
    "sapo": "sequence_mean",
}
Rule = Callable[..., None]


def rules_into(findings: list[Finding], release: str) -> Rule:
    """Return a function that adds a finding where a rule does not hold."""

    def rule(holds: bool, words: str, got: str, do: str, source: str, kind: str = BROKEN) -> None:
        if not holds:
            findings.append(Finding(kind=kind, rule=words, got=got, do=do, source=f"{release}, {source}" if source else ""))

    return rule


def saved_by_a_run(keys: dict[str, Any], *, is_argument: Callable[[str], bool]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments among the keys that a run saved, and notes on the rest, which is its model's configuration.

    transformers gives trackers the arguments over ``model.config``; both sizes of a generation are in them, which only a made
    GRPOConfig has, and they say how many processes there were.
    """
    if not {"model_type", "architectures"} & keys.keys():
        return keys, {}
    apart = {key: "of the model's own configuration" for key in keys if not is_argument(key)}
    arguments = {key: value for key, value in keys.items() if key not in apart}
    arguments.setdefault("model_name_or_path", keys.get("_name_or_path"))
    return with_processes(arguments), apart


def with_processes(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a made GRPOConfig with how many processes it was made for."""
    batch, steps, each = (keys.get(key) for key in ("generation_batch_size", "steps_per_generation", EACH))
    if isinstance(batch, int) and isinstance(steps, int) and isinstance(each, int) and steps * each > 0:
        return {**keys, "num_processes": max(1, batch // (steps * each))}
    return keys


def read_grpo(s: Settings, num_gpus: int | None, prompt_tokens: int | None) -> StepConfig:
    """Return the step that a GRPOConfig asks for.

    Args:
        s: the configuration's keys, and those of its launcher.
        num_gpus: devices, where the caller gave a cluster.
        prompt_tokens: tokens of the longest prompt, if the caller gives them.

    Raises:
        OptionError: a key's value is of the wrong kind.
    """
    processes, nodes, dp_how, assumed = processes_of(s, num_gpus)
    each, accumulated, copies = s.whole(EACH), s.whole(ACCUMULATED), s.whole("num_generations")
    at_once = max(1, each * processes)
    batch, steps = s.maybe_whole("generation_batch_size", 1), s.maybe_whole("steps_per_generation", 1)
    steps = steps or (max(1, batch // at_once) if batch else accumulated)
    samples, epochs = batch or at_once * steps, s.whole("num_iterations")
    findings: list[Finding] = []
    rule = rules_into(findings, f"TRL {RELEASE}")
    _check_grpo(s, rule, processes, samples, steps)
    lora = _lora(s, rule, assumed)
    response = s.whole("max_completion_length")
    prompt = prompt_tokens or _said_prompt(s, response) or PROMPT_TOKENS
    if prompt_tokens is None and _said_prompt(s, response) is None:
        assumed["prompt tokens"] = f"{prompt}: TRL {RELEASE} has no limit of them; explain(..., prompt_tokens=...) says it"
    layout, (states, never) = Layout(dp=processes), states_of(s, processes, nodes, assumed)
    rollout, gpus = _grpo_rollout(s, processes, nodes, num_gpus, samples, states.name == "ZeRO-3", assumed)
    s.leave_out(*(("vllm_",) * (not s.yes("use_vllm"))), *(("lora_", "use_dora") * (lora is None)))
    how = {
        "prompts": f"generation_batch_size {samples:,} / num_generations {copies}: TRL counts samples, not prompts",
        "responses per prompt": "num_generations",
        "samples": f"{EACH} {each} x {processes} processes x steps_per_generation {steps} (generation_batch_size)",
        "mini-batch": f"{EACH} {each} x {processes} processes x {ACCUMULATED} {accumulated}", "data-parallel ranks": dp_how,
        "micro-batch per rank": f"{EACH}, counted in samples", "epochs": "num_iterations",
    }  # fmt: skip
    model, tokens = s.text("model_name_or_path"), each * (prompt + response)
    roles = [RoleConfig(
        name="actor", model=model, pool="all", layout=layout, states=states, trained=True, train_tokens=tokens, pass_tokens=tokens,
        recompute="full" * _recomputes(s), lr=s.number("learning_rate"), never=never, lora=lora,
    )]  # fmt: skip
    if s.number("beta"):
        away = ("weights",) * ("weights" in never)
        frozen = RoleConfig(
            name="reference", model=model, pool="all", layout=layout, states=states, pass_tokens=tokens, never=away
        )  # fmt: skip
        roles.append(replace(frozen, base_of="actor" * (lora is not None)))  # with adapters off: grpo_trainer.py, use_adapter
    return StepConfig(
        system="TRL", release=RELEASE, algorithm=f"GRPOConfig, loss {s.text('loss_type')}", ours=_ours(s),
        options=_grpo_options(s, copies, response),
        prompts=max(1, samples // max(1, copies)), copies=max(1, copies), prompt_tokens=prompt, response_tokens=response,
        said_samples=samples if samples % max(1, copies) else 0,
        mini_batch=at_once * accumulated, micro_batch=each, micro_tokens=None, epochs=epochs, dp=processes,
        pools={"all": processes, **gpus}, roles=tuple(roles), rollout=rollout, nodes=nodes,
        gpus_per_node=max(1, processes // nodes), rounding="carried", how=how, findings=tuple(findings),
        assumed=assumed,
    )  # fmt: skip


def _check_grpo(s: Settings, rule: Rule, processes: int, samples: int, steps: int) -> None:
    """Check the rules of GRPOConfig, for ``samples`` of a generation that serves ``steps`` micro-batches of a process."""
    each, accumulated, copies = s.whole(EACH), s.whole(ACCUMULATED), s.whole("num_generations")
    batch, per_generation = s.maybe_whole("generation_batch_size", 1), s.maybe_whole("steps_per_generation", 1)
    at_once, epochs = max(1, each * processes), s.whole("num_iterations")
    config, trainer = "trl/trainer/grpo_config.py, __post_init__", "trl/trainer/grpo_trainer.py, _prepare_inputs"
    rule(batch is None or per_generation is None or batch == at_once * per_generation,
         "generation_batch_size and steps_per_generation exclude each other",
         f"{batch} and {per_generation}", "Leave one out.", config)  # fmt: skip
    rule(batch is None or batch % at_once == 0, f"generation_batch_size must be a multiple of {EACH} x processes",
         f"{batch}, {each} x {processes} = {at_once}", f"Take {-(-(batch or 1) // at_once) * at_once}.", config)  # fmt: skip
    rule(samples % max(1, copies) == 0, "generation_batch_size must be a multiple of num_generations: groups are whole",
         f"{each} x {processes} processes x {steps} = {samples}, {copies}", _whole_groups(each, processes, steps, copies),
         config)  # fmt: skip
    rule(copies >= 2, "num_generations must be at least 2: advantages compare the responses to one prompt", str(copies),
         "Set num_generations=8, say.", config)  # fmt: skip
    rule(not s.yes("auto_find_batch_size"), "auto_find_batch_size cannot be used with GRPO: groups would not stay whole", "true",
         f"Set it to false and lower {EACH}.", config)  # fmt: skip
    rule(steps * epochs % accumulated == 0, "an optimizer step adds up gradients over two generations: "
         f"{ACCUMULATED} does not divide steps_per_generation x num_iterations", f"{accumulated}, {steps} x {epochs}",
         f"Take steps_per_generation={-(-steps // accumulated) * accumulated}.", trainer, NOTE)  # fmt: skip
    tp = s.whole("vllm_tensor_parallel_size") if s.yes("use_vllm") and s.text("vllm_mode") == "colocate" else 1
    rule(processes % tp == 0, "the processes must be a multiple of vllm_tensor_parallel_size", f"{processes}, {tp}",
         f"Take {math.gcd(processes, tp)}.", "trl/generation/vllm_generation.py, _init_vllm")  # fmt: skip
    _check_deepspeed(s, rule, processes)


def _check_deepspeed(s: Settings, rule: Rule, processes: int) -> None:
    """Check that DeepSpeed's file or dict has the batches of the arguments."""
    each, accumulated = s.whole(EACH), s.whole(ACCUMULATED)
    same = dict(zip(OF_DEEPSPEED, (accumulated, accumulated, each, each * accumulated * processes), strict=True))
    for key, value in same.items():
        in_file = s.value(key)
        rule(in_file in (None, "auto") or str(in_file) == str(value), f"{key} must be what the arguments say",
             f"{in_file}, {value}",
             f"Set it to {value}, or to auto.", "transformers/integrations/deepspeed.py, trainer_config_process")  # fmt: skip


def _recomputes(s: Settings) -> bool:
    return s.yes("gradient_checkpointing") or s.yes("fsdp_activation_checkpointing")


def _lora(s: Settings, rule: Rule, assumed: dict[str, str]) -> LoRA | None:
    """Return the adapters of peft's LoraConfig (``trl/trainer/utils.py``, ``get_peft_config``)."""
    if not s.yes("use_peft"):
        return None
    targets = s.value("lora_target_modules")
    if targets is None:
        targets = list(PEFT_DEFAULT)
        assumed["adapters"] = f"on {' and '.join(targets)}, peft's default for Llama and Qwen; lora_target_modules says it"
    return lora_asked(s.whole("lora_r"), s.number("lora_alpha"), targets, rule, "lora_r", stabilised=s.yes("use_rslora"))


def _ours(s: Settings) -> str:
    by_sequence = s.one_of("importance_sampling_level", ("token", "sequence"), "learning") == "sequence"
    summed = s.one_of("multi_objective_aggregation", ("sum_then_normalize", "normalize_then_sum"), "learning")
    loss = s.text("loss_type")
    if summed == "normalize_then_sum":  # with another ratio or loss than GRPO's there is no class for it
        return "GDPO" if not by_sequence and loss in ("grpo", "bnpo", "dapo", "dr_grpo") else ""
    if by_sequence:
        return "GSPO" if loss != "sapo" else ""
    return {"cispo": "CISPO", "dr_grpo": "DrGRPO", "sapo": "SAPO"}.get(loss, "GRPO")


def _grpo_options(s: Settings, copies: int, response: int) -> dict[str, Any]:
    high, scale, delta = s.value("epsilon_high"), s.value("scale_rewards"), s.value("delta")
    loss = s.one_of("loss_type", tuple(AGGREGATIONS), "learning")
    options = {
        "n": copies, "max_new_tokens": response, "temperature": s.number("temperature"), "kl_coef": s.number("beta"),
        "clip": s.number("epsilon"), "entropy_coef": s.number("entropy_coef"), "aggregation": AGGREGATIONS.get(loss),
        "dual_clip": None if delta is None else s.number("delta"),
        "clip_high": None if high is None else s.number("epsilon_high"),
        "scale": scale if isinstance(scale, str) else "group" if scale else "none",
    }  # fmt: skip
    if loss == "sapo":
        gate = {"tau_pos": s.number("sapo_temperature_pos"), "tau_neg": s.number("sapo_temperature_neg")}
        options |= {"clip": None, "clip_high": None, "dual_clip": None, **gate}
    if options["kl_coef"]:
        options["kl_by_ratio"] = s.yes("use_bias_correction_kl")
    if loss == "cispo":  # it bounds the weight itself by epsilon_high, hfsdk its distance from 1
        options |= {"clip": None, "clip_high": s.number("epsilon_high") - 1.0 if high is not None else None}
    if s.yes("use_vllm") and s.yes("vllm_importance_sampling_correction"):
        level, _, bounds = s.text("vllm_importance_sampling_mode").partition("_")
        most, least = (s.value(f"vllm_importance_sampling_clip_{end}") for end in ("max", "min"))
        options |= {"tis_cap": most, "tis_floor": least, "tis_level": level, "tis_bounds": bounds} if most is not None else {}
    return {name: value for name, value in options.items() if value is not None}


def _said_prompt(s: Settings, response: int) -> int | None:
    alone, whole = s.maybe_whole("max_prompt_length"), s.maybe_whole("vllm_max_model_length")  # the first of releases up to 0.25
    return alone or (whole - response if whole and whole > response else None)


def _whole_groups(each: int, processes: int, steps: int, copies: int) -> str:
    fitting = [n for n in range(max(2, copies // 4), min(4 * copies, MOST_COPIES) + 1) if each * processes * steps % n == 0]
    near = sorted(fitting, key=lambda n: abs(n - copies))[:3]
    more = next(
        (e for e in range(each, each + min(copies, MOST_COPIES) + 1) if e * processes * steps % max(1, copies) == 0), copies
    )
    fewer = f"num_generations={' or '.join(map(str, sorted(near)))}, or " if near else ""
    return f"Take {fewer}{EACH}={more}."


def _grpo_rollout(
    s: Settings, processes: int, nodes: int, num_gpus: int | None, samples: int, gathered: bool, assumed: dict[str, str]
) -> tuple[RolloutConfig, dict[str, int]]:
    """Return the rollout, and the pool of its own that vLLM's server has."""
    if not s.yes("use_vllm"):
        return RolloutConfig(
            pool="all", layout=Layout(dp=processes), engine="transformers", rows=-(-samples // processes), shares_weights=True,
            gathers=s.yes(GATHERED) and gathered,
        ), {}  # fmt: skip
    if s.text("vllm_mode") == "server":
        left = (num_gpus or 0) - processes
        if left < 1:
            left = max(1, processes // nodes)
            assumed["server"] = (
                f"{left} GPUs for vLLM's server, as on a node of the trainer: it is started apart; cluster= counts them in"
            )
        assumed["server's layout"] = f"tensor parallel over its {left} GPUs"
        return RolloutConfig(
            pool="server", layout=Layout(tp=left, dp=1), engine="vllm (server)", gpu_share=SERVER_SHARE, sleeps=False
        ), {"server": left}  # fmt: skip
    tp = s.whole("vllm_tensor_parallel_size")
    return RolloutConfig(
        pool="all", layout=Layout(tp=tp, dp=max(1, processes // tp)), engine="vllm", sleeps=s.yes("vllm_enable_sleep_mode"),
        gpu_share=s.share("vllm_gpu_memory_utilization"),
    ), {}  # fmt: skip


def read_ppo(s: Settings, num_gpus: int | None, prompt_tokens: int | None) -> StepConfig:
    """Return the step that a PPOConfig asks for; arguments as of :func:`read_grpo`.

    Raises:
        OptionError: a key's value is of the wrong kind.
    """
    processes, nodes, dp_how, assumed = processes_of(s, num_gpus)
    each, accumulated, parts = s.whole(EACH), s.whole(ACCUMULATED), max(1, s.whole("num_mini_batches"))
    local, samples = each * accumulated, each * accumulated * processes
    findings: list[Finding] = []
    rule, source = rules_into(findings, f"TRL {PPO_RELEASE}"), "trl/experimental/ppo/ppo_trainer.py, PPOTrainer.__init__"
    rule(samples % parts == 0, "batch_size must be a multiple of num_mini_batches", f"{samples}, {parts}",
         f"Take {ACCUMULATED}={-(-accumulated // parts) * parts}.", source)  # fmt: skip
    rule(local % parts == 0, "a process's batch must be a multiple of num_mini_batches",
         f"{each} x {accumulated} = {local}, {parts}",
         f"Take {ACCUMULATED}={-(-accumulated // parts) * parts}.", source)  # fmt: skip
    _check_deepspeed(s, rule, processes)
    rule(not s.yes("whiten_rewards") or local // parts >= 8, "whitening needs mini-batches of at least 8 samples on each process",
         f"{local} / {parts} = {local // parts}", f"Take more {ACCUMULATED}, or fewer num_mini_batches.", source)  # fmt: skip
    response = s.whole("response_length")
    prompt = prompt_tokens or s.maybe_whole("max_prompt_length", 1) or PROMPT_TOKENS
    if prompt_tokens is None and s.value("max_prompt_length") is None:
        assumed["prompt tokens"] = f"{prompt}: PPOConfig has no limit of them; explain(..., prompt_tokens=...) says it"
    how = {
        "prompts": f"{EACH} {each} x {ACCUMULATED} {accumulated} x {processes} processes (batch_size)",
        "responses per prompt": "PPO draws one", "mini-batch": f"batch_size {samples:,} / num_mini_batches {parts}",
        "data-parallel ranks": dp_how, "micro-batch per rank": EACH, "epochs": "num_ppo_epochs",
    }  # fmt: skip
    missing = s.value("missing_eos_penalty")
    options = {
        "n": 1, "max_new_tokens": response, "temperature": s.number("temperature"), "kl_coef": s.number("kl_coef"),
        "kl": s.text("kl_estimator"), "clip": s.number("cliprange"), "value_clip": s.number("cliprange_value"),
        "gamma": s.number("gamma"), "lam": s.number("lam"), "whiten_rewards": s.yes("whiten_rewards"),
        **({} if missing is None else {"missing_eos_penalty": s.number("missing_eos_penalty")}),
    }  # fmt: skip
    layout, (states, never) = Layout(dp=processes), states_of(s, processes, nodes, assumed)
    model = s.text("sft_model_path") or s.text("model_name_or_path")
    tokens, forward = each * (prompt + response), s.whole("local_rollout_forward_batch_size") * (prompt + response)
    common: dict[str, Any] = {"pool": "all", "layout": layout, "states": states, "pass_tokens": forward}
    learned: dict[str, Any] = {
        "trained": True, "train_tokens": tokens, "recompute": "full" * _recomputes(s),
        "lr": s.number("learning_rate"), "never": never,
    }  # fmt: skip
    scorer, lora = s.text("reward_model_path"), _lora(s, rule, assumed)
    roles = (
        RoleConfig(name="actor", model=model, lora=lora, **common, **learned),
        RoleConfig(name="reference", model=model, base_of="actor" * (lora is not None), **common),
        RoleConfig(name="critic", model=scorer or model, head="scalar", **common, **learned),
        RoleConfig(name="reward", model=scorer or model, head="scalar", **common),
    )  # fmt: skip
    return StepConfig(
        system="TRL", release=PPO_RELEASE, algorithm="PPOConfig", ours="PPO", options=options, prompts=max(1, samples), copies=1,
        prompt_tokens=prompt, response_tokens=response, mini_batch=max(1, samples // parts), micro_batch=each, micro_tokens=None,
        epochs=s.whole("num_ppo_epochs"), dp=processes, pools={"all": processes}, roles=roles,
        rollout=RolloutConfig(
            pool="all", layout=Layout(dp=processes), engine="transformers", shares_weights=True,
            rows=min(local, s.whole("local_rollout_forward_batch_size")), gathers=s.yes(GATHERED) and states.name == "ZeRO-3",
        ),
        nodes=nodes, gpus_per_node=max(1, processes // nodes), rounding="carried", how=how, findings=tuple(findings),
        assumed=assumed,
        reward=scorer or model,
    )  # fmt: skip
