"""NeMo-RL's configuration, as release 0.7.0 reads it: its keys, defaults and rules.

Sources: ``examples/configs/grpo_math_1B.yaml`` and ``ppo_math_1B.yaml`` (the exemplars that every other inherits),
``nemo_rl/algorithms/grpo.py`` and ``ppo.py``, ``nemo_rl/models/policy/lm_policy.py`` (data-parallel size),
``nemo_rl/models/policy/workers/dtensor_policy_worker_v2.py`` and ``megatron_policy_worker.py`` (``train``: local_gbs = gbs //
dp_size, optimizer steps = samples // gbs).
"""

from __future__ import annotations

import math
from typing import Any

from hfsdk.configs.model import expert_rule, lora_asked, shared_experts
from hfsdk.configs.settings import Settings
from hfsdk.configs.step_config import NOTE, PHASES, Finding, RoleConfig, RolloutConfig, States, StepConfig
from hfsdk.configs.trl import Rule, rules_into
from hfsdk.core.layout import Layout
from hfsdk.core.lora import LoRA

RELEASE = "0.7.0"
P, V, D, M = "policy.", "policy.generation.", "policy.dtensor_cfg.", "policy.megatron_cfg."
PROMPT_SHARE = 4
"""Parts of a sample of which prompts are counted as one, where nothing limits them apart from responses."""

POLICY: dict[str, Any] = {
    f"{P}model_name": None, f"{P}train_global_batch_size": 512, f"{P}train_micro_batch_size": 4,
    f"{P}logprob_batch_size": "${policy.train_micro_batch_size}", f"{P}max_total_sequence_length": 512,
    f"{P}logprob_chunk_size": None, f"{P}offload_optimizer_for_logprob": False,
    f"{D}enabled": True, f"{D}cpu_offload": False, f"{D}activation_checkpointing": False, f"{D}tensor_parallel_size": 1,
    f"{D}context_parallel_size": 1, **{
        f"{model}{key}": default for model in (P, "value.")
        for key, default in {
            "dtensor_cfg.lora_cfg.enabled": False, "dtensor_cfg.lora_cfg.dim": 8, "dtensor_cfg.lora_cfg.alpha": 32,
            "dtensor_cfg.lora_cfg.target_modules": [], "dtensor_cfg.lora_cfg.match_all_linear": True,
        }.items()
    },
    f"{M}peft.enabled": False, f"{M}peft.dim": 8, f"{M}peft.alpha": 32, f"{M}peft.target_modules": [],
    f"{M}sequence_parallel": False, f"{D}sequence_parallel": False,
    f"{M}enabled": False, f"{M}activation_checkpointing": False, f"{M}recompute_granularity": "full",
    f"{M}tensor_model_parallel_size": 1, f"{M}pipeline_model_parallel_size": 1, f"{M}context_parallel_size": 1,
    f"{M}expert_model_parallel_size": 1, f"{M}expert_tensor_parallel_size": 1,
    f"{M}optimizer.lr": 5e-6, f"{M}optimizer.optimizer_cpu_offload": False,
    f"{M}distributed_data_parallel_config.grad_reduce_in_fp32": False,
    f"{P}optimizer.kwargs.lr": 5e-6,
    f"{P}dynamic_batching.enabled": False, f"{P}sequence_packing.enabled": True,
    **{
        f"{P}{way}.{what}_mb_tokens": f"${{mul:${{policy.max_total_sequence_length}}, ${{policy.{size}}}}}"
        for way in ("dynamic_batching", "sequence_packing")
        for what, size in (("train", "train_micro_batch_size"), ("logprob", "logprob_batch_size"))
    },
    f"{V}max_new_tokens": "${policy.max_total_sequence_length}", f"{V}temperature": 1.0, f"{V}backend": "vllm",
    f"{V}vllm_cfg.tensor_parallel_size": 1, f"{V}vllm_cfg.pipeline_parallel_size": 1, f"{V}vllm_cfg.gpu_memory_utilization": 0.6,
    f"{V}colocated.enabled": True, f"{V}colocated.resources.gpus_per_node": None, f"{V}colocated.resources.num_nodes": None,
    "data.max_input_seq_length": "${policy.max_total_sequence_length}", "cluster.gpus_per_node": 1, "cluster.num_nodes": 1,
    "loss_fn.reference_policy_kl_type": "k3", "loss_fn.ratio_clip_min": 0.2, "loss_fn.ratio_clip_max": 0.2,
    "loss_fn.ratio_clip_c": None, "loss_fn.token_level_loss": True, "loss_fn.force_on_policy_ratio": False,
    "loss_fn.use_kl_in_reward": False,
}  # fmt: skip
GRPO_DEFAULTS: dict[str, Any] = {
    **POLICY, "grpo.max_rollout_turns": 1,
    "grpo.num_prompts_per_step": 32, "grpo.num_generations_per_prompt": 16, "grpo.use_dynamic_sampling": False,
    "grpo.batch_multiplier": 1, "grpo.normalize_rewards": True, "grpo.adv_estimator.name": "grpo",
    "loss_fn.reference_policy_kl_penalty": 0.01,
}  # fmt: skip
PPO_DEFAULTS: dict[str, Any] = {
    **POLICY, "ppo.max_rollout_turns": 1,
    "ppo.num_prompts_per_step": 32, "ppo.num_generations_per_prompt": 16, "ppo.use_dynamic_sampling": False,
    "ppo.batch_multiplier": 1, "ppo.ppo_epochs": 4, "ppo.adv_estimator.name": "gae", "ppo.adv_estimator.gae_gamma": 1,
    "ppo.adv_estimator.gae_lambda": 0.95, f"{P}max_total_sequence_length": 16384, "data.max_input_seq_length": 2048,
    f"{P}optimizer.kwargs.lr": 1e-6, "value.optimizer.kwargs.lr": 1e-5, "value.model_name": "${policy.model_name}",
    "value.train_micro_batch_size": "${policy.train_micro_batch_size}", "value_loss_fn.cliprange": 0.2,
    "value.dtensor_cfg.activation_checkpointing": False, "value.dtensor_cfg.sequence_parallel": False,
    "loss_fn.reference_policy_kl_penalty": 0.0,
    "loss_fn.ratio_clip_max": 0.28, "loss_fn.ratio_clip_c": 10,
}  # fmt: skip

OURS = {"grpo": "GRPO", "gdpo": "GDPO", "reinforce_plus_plus": "ReinforcePlusPlus", "gae": "PPO"}


def read_nemo_rl(s: Settings, prompt_tokens: int | None) -> StepConfig:
    """Return the step that a configuration of NeMo-RL asks for.

    Args:
        s: the configuration's keys.
        prompt_tokens: tokens of the longest prompt, if the caller gives them.

    Raises:
        OptionError: a key's value is of the wrong kind.
    """
    kind = "ppo" if s.has("ppo") else "grpo"
    pools, num_gpus, nodes, each_node = _pools(s)
    megatron = s.yes(f"{M}enabled")
    tp, pp, cp = _axes(s, megatron)
    dp = max(1, num_gpus // max(1, tp * pp * cp))
    experts = (s.whole(f"{M}expert_model_parallel_size"), s.whole(f"{M}expert_tensor_parallel_size")) if megatron else (1, tp)
    layout = Layout(tp=tp, pp=pp, dp=dp, ep=shared_experts(*experts, tp, dp))
    prompts, copies = s.whole(f"{kind}.num_prompts_per_step"), s.whole(f"{kind}.num_generations_per_prompt")
    batch, micro = s.whole(f"{P}train_global_batch_size"), s.whole(f"{P}train_micro_batch_size")
    ways = [way for way in ("dynamic_batching", "sequence_packing") if s.yes(f"{P}{way}.enabled")]
    tokens = s.whole(f"{P}{ways[0]}.train_mb_tokens") if ways else None
    longest = s.whole(f"{P}max_total_sequence_length")
    prompt, assumed = _prompt(s, longest, prompt_tokens)
    response = max(1, min(_most_new(s, kind, longest), longest - prompt))
    estimator = s.one_of(f"{kind}.adv_estimator.name", tuple(OURS), "learning")
    epochs = s.whole("ppo.ppo_epochs") if kind == "ppo" else 1
    findings: list[Finding] = []
    rule = rules_into(findings, f"NeMo-RL {RELEASE}")
    expert_rule(rule, num_gpus, layout, *experts)
    _check(s, rule, kind, num_gpus, (tp, pp, cp), dp, ways, longest, tokens)
    loras = [_lora(s, model, megatron and model == P, rule) for model in (P, "value.")]
    _left_out(s, kind, megatron)
    multiplier = s.number(f"{kind}.batch_multiplier") if s.yes(f"{kind}.use_dynamic_sampling") else 1
    how = {
        "prompts": f"{kind}.num_prompts_per_step" + f"; {multiplier:g} times as many are drawn" * (multiplier != 1),
        "responses per prompt": f"{kind}.num_generations_per_prompt", "mini-batch": "policy.train_global_batch_size, in samples",
        "data-parallel ranks": f"{num_gpus} GPUs / (tp {tp} x pp {pp} x cp {cp})",
        "micro-batch per rank": f"policy.{ways[0]}.train_mb_tokens" if ways else "policy.train_micro_batch_size, in samples",
        "epochs": "ppo.ppo_epochs" if kind == "ppo" else "GRPO goes over its samples once",
        "tokens of a sample": f"policy.max_total_sequence_length {longest:,}, prompt and response",
    }  # fmt: skip
    return StepConfig(
        system="NeMo-RL", release=RELEASE, algorithm=f"{kind}, {estimator}", ours=OURS.get(estimator, ""),
        options=_options(s, kind, copies, response), prompts=max(1, prompts), copies=max(1, copies), prompt_tokens=prompt,
        response_tokens=response, mini_batch=max(1, batch), micro_batch=None if ways else max(1, micro), micro_tokens=tokens,
        epochs=epochs, dp=dp, pools=pools, roles=_roles(s, kind, layout, cp, megatron, tokens, ways, longest, *loras),
        rollout=_rollout(s, pools), nodes=nodes, gpus_per_node=each_node, rounding="down", how=how, findings=tuple(findings),
        assumed=assumed,
    )  # fmt: skip


def _most_new(s: Settings, kind: str, longest: int) -> int:
    """Return the most tokens that are generated for a sample: in several turns up to its limit in all."""
    turns = s.maybe_whole(f"{kind}.max_rollout_turns", 1) or 1
    if turns == 1:
        return s.whole(f"{V}max_new_tokens")
    s.odd[f"{kind}.max_rollout_turns"] = (turns, ("seconds",))  # a turn waits for its environment
    return longest


def _left_out(s: Settings, kind: str, megatron: bool) -> None:
    """Note the parts of a configuration that it does not use."""
    unused = ("dtensor_cfg.", "optimizer", "scheduler") if megatron else ("megatron_cfg.",)  # Megatron's are in its own part
    s.leave_out(*(f"{part}{name}" for part in (P, "value.") for name in unused))
    s.leave_out(*(("ppo.", "value.", "value_loss_fn.") if kind == "grpo" else ("grpo.",)))
    backend = s.one_of(f"{V}backend", ("vllm",), "memory", "seconds")
    s.leave_out(*(f"{V}{part}" for part in ("mcore_generation_config.", "sglang_cfg.") if backend == "vllm"))
    for key, value in s.given.items():
        part, _, last = key.rpartition(".")
        if last in ("enabled", "enable") and value is False:
            s.leave_out(f"{part}.")
    if s.yes(f"{kind}.use_dynamic_sampling"):
        s.odd[f"{kind}.use_dynamic_sampling"] = (True, ("generated", "seconds"))  # prompts are drawn until enough groups are kept


def _pools(s: Settings) -> tuple[dict[str, int], int, int, int]:
    """Return the pools, the trainer's GPUs, nodes, and GPUs a node."""
    each_node, nodes = s.whole("cluster.gpus_per_node"), s.whole("cluster.num_nodes")
    whole = max(1, each_node * nodes)
    if s.yes(f"{V}colocated.enabled"):
        return {"all": whole}, whole, nodes, each_node
    each, apart = (s.maybe_whole(f"{V}colocated.resources.{key}") for key in ("gpus_per_node", "num_nodes"))
    generating = max(1, min(whole - 1, (each or each_node) * (apart or 1))) if whole > 1 else 0
    return {"policy": whole - generating, "generation": generating or 1}, whole - generating, nodes, each_node


def _axes(s: Settings, megatron: bool) -> tuple[int, int, int]:
    if megatron:
        sizes = [s.whole(f"{M}{axis}_parallel_size") for axis in ("tensor_model", "pipeline_model", "context")]
        return sizes[0], sizes[1], sizes[2]
    return s.whole(f"{D}tensor_parallel_size"), 1, s.whole(f"{D}context_parallel_size")


def _prompt(s: Settings, longest: int, prompt_tokens: int | None) -> tuple[int, dict[str, str]]:
    if prompt_tokens is not None:
        return min(prompt_tokens, longest - 1), {}
    most = s.maybe_whole("data.max_input_seq_length")  # nothing is no limit
    if most is not None and most < longest:
        return most, {}
    prompt = max(1, longest // PROMPT_SHARE)
    said = f"{prompt:,} of {longest:,} tokens of a sample: no key limits prompts alone; explain(..., prompt_tokens=...) says it"
    return prompt, {"prompt tokens": said}


def _roles(
    s: Settings, kind: str, layout: Layout, cp: int, megatron: bool, tokens: int | None, ways: list[str], longest: int,
    lora: LoRA | None, critics: LoRA | None,
) -> tuple[RoleConfig, ...]:  # fmt: skip
    pool = "all" if s.yes(f"{V}colocated.enabled") else "policy"
    ranks = layout.num_replicas * cp
    if megatron:
        gradients = 4 if s.yes(f"{M}distributed_data_parallel_config.grad_reduce_in_fp32") else 2
        states = States(name="Megatron", weights=2, gradients=gradients, optimizer=12, optimizer_over=ranks, gradients_stay=True)
        recompute = s.text(f"{M}recompute_granularity") * s.yes(f"{M}activation_checkpointing")
        lr, moments = s.number(f"{M}optimizer.lr"), s.yes(f"{M}optimizer.optimizer_cpu_offload")
    else:
        states = States(name="FSDP2", weights=4, gradients=4, optimizer=8, weights_over=ranks, gradients_over=ranks,
                        optimizer_over=ranks)  # fmt: skip
        recompute = "full" * s.yes(f"{D}activation_checkpointing")
        lr, moments = s.number(f"{P}optimizer.kwargs.lr"), False
    offloaded = not megatron and s.yes(f"{D}cpu_offload")
    always = ("weights", "gradients", "optimizer") * offloaded + ("optimizer",) * moments
    colocated = s.yes(f"{V}colocated.enabled")
    preparing = ("optimizer",) * (colocated or s.yes(f"{P}offload_optimizer_for_logprob"))
    away = {"generation": ("weights", "gradients", "optimizer") * colocated, "preparation": preparing}
    micro, each = s.whole(f"{P}train_micro_batch_size"), s.whole(f"{P}logprob_batch_size")
    passed = s.whole(f"{P}{ways[0]}.logprob_mb_tokens") if ways else each * longest
    common: dict[str, Any] = {"pool": pool, "layout": layout, "states": states, "pass_tokens": passed // cp}
    common["uneven"] = s.lays_out_layers()
    common["sequence_parallel"] = s.yes(f"{M if megatron else D}sequence_parallel")
    train = (tokens or micro * longest) // cp
    roles = [RoleConfig(
        name="actor", model=s.text(f"{P}model_name"), trained=True, train_tokens=train, recompute=recompute, away=away,
        never=always, lr=lr, lora=lora, **common
    )]  # fmt: skip
    if s.number("loss_fn.reference_policy_kl_penalty"):
        gone = dict.fromkeys(PHASES, ("weights",))  # they are in host memory, and change places with the policy's
        roles.append(RoleConfig(name="reference", model=s.text(f"{P}model_name"), away=gone, **common))
    if kind == "ppo":
        value = s.whole("value.train_micro_batch_size") * longest // cp
        roles.append(RoleConfig(
            name="critic", model=s.text("value.model_name"), trained=True, head="scalar", train_tokens=value, away=away,
            recompute="full" * s.yes("value.dtensor_cfg.activation_checkpointing"), lr=s.number("value.optimizer.kwargs.lr"),
            lora=critics,
            **{**common, "pass_tokens": value, "sequence_parallel": s.yes("value.dtensor_cfg.sequence_parallel")},
        ))  # fmt: skip
    return tuple(roles)


def _lora(s: Settings, model: str, megatron: bool, rule: Rule) -> LoRA | None:
    keys = f"{model}megatron_cfg.peft." if megatron else f"{model}dtensor_cfg.lora_cfg."
    if not s.yes(f"{keys}enabled"):
        return None
    targets = s.value(f"{keys}target_modules")
    if not megatron and s.yes(f"{keys}match_all_linear"):
        targets = "all-linear"
    return lora_asked(s.whole(f"{keys}dim"), s.number(f"{keys}alpha"), targets, rule, f"{keys}dim")


def _rollout(s: Settings, pools: dict[str, int]) -> RolloutConfig:
    pool = "generation" if "generation" in pools else "all"
    tp, pp = s.whole(f"{V}vllm_cfg.tensor_parallel_size"), s.whole(f"{V}vllm_cfg.pipeline_parallel_size")
    return RolloutConfig(
        pool=pool, layout=Layout(tp=tp, pp=pp, dp=max(1, pools[pool] // max(1, tp * pp))), engine=s.text(f"{V}backend"),
        gpu_share=s.share(f"{V}vllm_cfg.gpu_memory_utilization"), sleeps=pool == "all",
    )  # fmt: skip


def _options(s: Settings, kind: str, copies: int, response: int) -> dict[str, Any]:
    low, high, dual = s.number("loss_fn.ratio_clip_min"), s.number("loss_fn.ratio_clip_max"), s.value("loss_fn.ratio_clip_c")
    options: dict[str, Any] = {
        "n": copies, "max_new_tokens": response, "temperature": s.number(f"{V}temperature"),
        "kl_coef": s.number("loss_fn.reference_policy_kl_penalty"), "kl": s.text("loss_fn.reference_policy_kl_type"), "clip": low,
        "clip_high": high if high != low else None, "dual_clip": None if dual is None else s.number("loss_fn.ratio_clip_c"),
        "aggregation": "token_mean" if s.yes("loss_fn.token_level_loss") else "sequence_mean",
    }  # fmt: skip
    if kind == "ppo":
        options |= {
            "gamma": s.number("ppo.adv_estimator.gae_gamma"), "lam": s.number("ppo.adv_estimator.gae_lambda"),
            "value_clip": s.number("value_loss_fn.cliprange"),
            "kl_in": "reward" if s.yes("loss_fn.use_kl_in_reward") else "loss",
        }  # fmt: skip
    else:
        options["scale"] = "group" if s.yes("grpo.normalize_rewards") else "none"
    return {name: value for name, value in options.items() if value is not None}


def _check(
    s: Settings, rule: Rule, kind: str, num_gpus: int, axes: tuple[int, int, int], dp: int, ways: list[str], longest: int,
    tokens: int | None,
) -> None:  # fmt: skip
    prompts, copies = s.whole(f"{kind}.num_prompts_per_step"), s.whole(f"{kind}.num_generations_per_prompt")
    batch, micro, samples = s.whole(f"{P}train_global_batch_size"), max(1, s.whole(f"{P}train_micro_batch_size")), prompts * copies
    model, worker = math.prod(axes), "nemo_rl/models/policy/workers, train"
    rule(num_gpus % model == 0 and num_gpus >= model, "the trainer's GPUs must be a multiple of pp x cp x tp",
         f"{num_gpus}, {model}", "Change the layout or cluster.",
         "nemo_rl/models/policy/lm_policy.py, Policy.__init__")  # fmt: skip
    rule(len(ways) < 2, "dynamic_batching and sequence_packing exclude each other", "both are enabled", "Switch one off.",
         "nemo_rl/models/policy/lm_policy.py, Policy.__init__")  # fmt: skip
    megatron, dtensor = s.yes(f"{M}enabled"), s.yes(f"{D}enabled")
    rule(megatron != dtensor, "one of policy.dtensor_cfg and policy.megatron_cfg must be enabled",
         "both" if megatron else "neither", "Enable one of them.",
         "nemo_rl/models/policy/lm_policy.py, Policy.__init__")  # fmt: skip
    rule(batch % dp == 0, "train_global_batch_size must be a multiple of the data-parallel ranks", f"{batch}, {dp}",
         f"Take {math.ceil(batch / dp) * dp}.", worker)  # fmt: skip
    rule(bool(ways) or batch // dp % micro == 0,
         "a rank's part of train_global_batch_size must be a multiple of train_micro_batch_size",
         f"{batch} / {dp} = {batch // dp}, {micro}", f"Take train_micro_batch_size={math.gcd(batch // dp, micro)}.",
         worker)  # fmt: skip
    rule(samples >= batch, "a step has fewer samples than train_global_batch_size: it makes no optimizer step",
         f"{prompts} x {copies} = {samples}, {batch}", f"Take train_global_batch_size={samples} or less.", worker)  # fmt: skip
    rule(samples < batch or samples % batch == 0,
         "the samples are no multiple of train_global_batch_size: the rest is not trained on",
         f"{prompts} x {copies} = {samples}, {batch}", f"Take num_prompts_per_step={math.ceil(samples / batch) * batch // copies}.",
         worker, NOTE)  # fmt: skip
    rule(samples % dp == 0, "num_prompts_per_step x num_generations_per_prompt must be a multiple of the data-parallel ranks",
         f"{samples}, {dp}", f"Take {math.ceil(samples / dp) * dp} samples.", "nemo_rl/algorithms/grpo.py")  # fmt: skip
    rule(not s.yes("loss_fn.force_on_policy_ratio") or samples == batch,
         "force_on_policy_ratio needs train_global_batch_size = num_prompts_per_step x num_generations_per_prompt",
         f"{batch}, {samples}", f"Take train_global_batch_size={samples}.", "nemo_rl/algorithms/grpo.py, setup")  # fmt: skip
    rule(tokens is None or tokens >= longest, "train_mb_tokens must hold one longest sample", f"{tokens}, {longest}",
         f"Take train_mb_tokens={longest} or more.", "nemo_rl/data/packing/algorithms.py")  # fmt: skip
    each = s.whole(f"{P}logprob_batch_size")
    rule(axes[0] < 4 or each == micro or s.yes("loss_fn.force_on_policy_ratio") or s.has("NRL_IGNORE_TP_ACCURACY_CHECK"),
         "with tp of 4 or more train_micro_batch_size and logprob_batch_size must be the same", f"tp {axes[0]}, {micro}, {each}",
         f"Take logprob_batch_size={micro}.", "nemo_rl/models/policy/lm_policy.py, Policy.__init__")  # fmt: skip
    rule(axes[1] == 1 or "dynamic_batching" not in ways, "dynamic_batching needs a single pipeline stage", f"pp {axes[1]}",
         "Take sequence_packing in its place.", "nemo_rl/models/policy/lm_policy.py, Policy.__init__")  # fmt: skip
    vllm = s.whole(f"{V}vllm_cfg.tensor_parallel_size") * s.whole(f"{V}vllm_cfg.pipeline_parallel_size")
    where, size = list(_pools(s)[0].items())[-1]
    rule(size % vllm == 0, f"the GPUs that generate (pool {where}) must be a multiple of vLLM's tp x pp", f"{size}, {vllm}",
         "Change policy.generation.vllm_cfg.tensor_parallel_size.", "nemo_rl/models/generation/vllm")  # fmt: skip
    rule(s.maybe_whole(f"{P}logprob_chunk_size") is None, "logprob_chunk_size cuts the logits of log-prob passes",
         f"{s.value(f'{P}logprob_chunk_size')} tokens", "Read the memory of preparation as an upper bound.", "", NOTE)  # fmt: skip
