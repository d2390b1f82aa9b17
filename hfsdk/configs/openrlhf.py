"""OpenRLHF's command line, as release 0.11.2 reads it, and those of 0.6 to 0.10, whose flags have no dots.

Sources: ``openrlhf/cli/train_ppo_ray.py`` (flags, assertions, placement groups), ``openrlhf/utils/deepspeed/deepspeed.py``
(``accumulated_gradient``: train batch x ring x tp / micro-batch / world size), ``openrlhf/trainer/ppo_utils/replay_buffer.py``
(``setup_dynamic_batch``), ``openrlhf/trainer/ppo_trainer.py`` (``max_steps``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hfsdk.configs.model import lora_asked
from hfsdk.configs.settings import Settings
from hfsdk.configs.step_config import NOTE, PHASES, Finding, RoleConfig, RolloutConfig, States, StepConfig
from hfsdk.configs.trl import Rule, rules_into
from hfsdk.core.layout import Layout
from hfsdk.core.lora import LoRA

RELEASE = "0.11.2"
CLI = "openrlhf/cli/train_ppo_ray.py"

DEFAULTS: dict[str, Any] = {
    **{f"{role}.num_nodes": 1 for role in ("actor", "critic", "ref", "reward")},
    **{f"{role}.num_gpus_per_node": 8 for role in ("actor", "critic", "ref", "reward")},
    **{f"{role}.model_name_or_path": None for role in ("actor", "critic", "reward")},
    "train.colocate_actor_ref": False, "train.colocate_critic_reward": False, "train.colocate_all": False,
    "train.async_enable": False, "train.micro_batch_size": 1, "train.batch_size": 128, "train.max_epochs": 1,
    "train.dynamic_batch_enable": False, "train.max_tokens_per_gpu": 16192, "train.agent_func_path": None,
    "rollout.batch_size": 1024, "rollout.micro_batch_size": 1, "rollout.n_samples_per_prompt": 1, "rollout.max_new_tokens": None,
    "rollout.max_tokens_per_gpu": None, "rollout.temperature": 1.0, "rollout.vllm_generate_batch_size": None,
    "data.max_len": 2048, "vllm.num_engines": None, "vllm.tensor_parallel_size": 1, "vllm.gpu_memory_utilization": 0.95,
    "vllm.enable_sleep": False, "ds.enable_sleep": False, "ds.zero_stage": 2, "ds.adam_offload": False,
    "ds.ring_attn_size": 1, "ds.tensor_parallel_size": 1, "ds.lora.rank": 0, "ds.lora.alpha": 16,
    "ds.lora.target_modules": "all-linear", "ds.packing_samples": False,
    "actor.gradient_checkpointing_enable": False, "actor.adam.lr": 1e-6, "critic.adam.lr": 9e-6, "actor.eps_clip": 0.2,
    "actor.policy_loss_type": "ppo",
    "actor.eps_clip_low_high": None, "actor.dual_clip": None, "actor.entropy_coef": None, "actor.loss_agg_mode": "token-mean",
    "critic.value_clip": 0.5, "algo.advantage.estimator": "gae", "algo.advantage.gamma": 1.0, "algo.advantage.lambd": 1.0,
    "algo.kl.init_coef": 0.01, "algo.kl.use_loss": False, "algo.kl.estimator": "k1", "algo.dynamic_filtering_enable": False,
    "reward.remote_url": None, "ref.offload": False, "reward.offload": False,
}  # fmt: skip

SWITCHES = (
    "train.colocate_actor_ref", "train.colocate_critic_reward", "train.colocate_all", "train.async_enable",
    "train.dynamic_batch_enable", "vllm.enable_sleep", "ds.enable_sleep", "ds.adam_offload", "ds.packing_samples",
    "actor.gradient_checkpointing_enable", "algo.kl.use_loss", "algo.dynamic_filtering_enable", "ref.offload", "reward.offload",
    "ref_reward_offload", "bf16", "flash_attn", "ds.load_in_4bit", "load_in_4bit", "normalize_reward", "actor_init_on_gpu",
    "apply_chat_template", "data.apply_chat_template", "enforce_eager", "vllm.enforce_eager", "overlap_comm", "ds.overlap_comm",
    "use_liger_kernel", "ds.use_liger_kernel", "enable_prefix_caching", "vllm.enable_prefix_caching", "load_checkpoint",
    "ckpt.load_enable", "save_hf_ckpt", "ckpt.save_hf", "vllm_sync_with_ray", "vllm.sync_with_ray", "enable_ema",
    "train.enable_ema", "gradient_checkpointing_use_reentrant", "perf", "disable_ds_ckpt", "ckpt.disable_ds",
    "reward.normalize_enable", "partial_rollout", "train.partial_rollout_enable", "save_value_network", "critic.save_value_network",
    "use_ms", "deepcompile", "ds.deepcompile", "full_determinism", "train.full_determinism_enable", "no_advantage_std_norm",
    "algo.advantage.no_std_norm", "use_kl_estimator_k3", "enable_vllm_is_correction", "disable_fast_tokenizer",
    "data.disable_fast_tokenizer",
)  # fmt: skip
"""Flags that take no value."""

OLD_NAMES = {
    "pretrain": "actor.model_name_or_path", "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path", "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size", "rollout_batch_size": "rollout.batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size", "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "max_epochs": "train.max_epochs", "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size", "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_enable_sleep": "vllm.enable_sleep", "deepspeed_enable_sleep": "ds.enable_sleep", "zero_stage": "ds.zero_stage",
    "adam_offload": "ds.adam_offload", "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "colocate_all_models": "train.colocate_all", "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_critic_reward": "train.colocate_critic_reward", "advantage_estimator": "algo.advantage.estimator",
    "init_kl_coef": "algo.kl.init_coef", "use_kl_loss": "algo.kl.use_loss", "kl_estimator": "algo.kl.estimator",
    "actor_learning_rate": "actor.adam.lr", "critic_learning_rate": "critic.adam.lr", "eps_clip": "actor.eps_clip",
    "value_clip": "critic.value_clip", "gamma": "algo.advantage.gamma", "lambd": "algo.advantage.lambd",
    "temperature": "rollout.temperature", "remote_rm_url": "reward.remote_url", "agent_func_path": "train.agent_func_path",
    "async_train": "train.async_enable", "packing_samples": "ds.packing_samples", "ring_attn_size": "ds.ring_attn_size",
    "lora_rank": "ds.lora.rank", "lora_alpha": "ds.lora.alpha", "target_modules": "ds.lora.target_modules",
    "eps_clip_low_high": "actor.eps_clip_low_high", "dynamic_filtering": "algo.dynamic_filtering_enable", "max_len": "data.max_len",
    "max_new_tokens": "rollout.max_new_tokens", "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "dual_clip": "actor.dual_clip", "policy_loss_type": "actor.policy_loss_type",
    "vllm_generate_batch_size": "rollout.vllm_generate_batch_size", "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu", "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "entropy_loss_coef": "actor.entropy_coef",
    **{f"{role}_num_nodes": f"{role}.num_nodes" for role in ("actor", "critic", "ref", "reward")},
    **{f"{role}_num_gpus_per_node": f"{role}.num_gpus_per_node" for role in ("actor", "critic", "ref", "reward")},
}  # fmt: skip
"""Flags of releases up to 0.10.1 -> their names now."""

PROMPT_MOST, RESPONSE_MOST, BOTH_OFFLOAD = "prompt_max_len", "generate_max_len", "ref_reward_offload"
LIMITS_APART = {PROMPT_MOST: 1024, RESPONSE_MOST: 1024}
"""Up to 0.9.6 prompt and response have a limit each; since then one, ``max_len``, is of both."""
OLD_DEFAULTS: dict[str, Any] = {
    "train.micro_batch_size": 4, "rollout.micro_batch_size": 8, **dict.fromkeys(LIMITS_APART), BOTH_OFFLOAD: False, "bf16": False,
}  # fmt: skip
"""Defaults of releases from 0.6 to 0.9, where they differ or are gone."""


def named_now(keys: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return keys by the names they have now, and which have another one than was given."""
    renamed = {old: new for old, new in OLD_NAMES.items() if old in keys and old != new}
    return {OLD_NAMES.get(key, key): value for key, value in keys.items()}, renamed


def defaults_of(keys: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return the defaults of the release whose flags these are: the older ones where any flag is by an old name."""
    old = bool(renamed) or any(key in keys for key in (*LIMITS_APART, BOTH_OFFLOAD))
    return {**DEFAULTS, **OLD_DEFAULTS} if old else DEFAULTS


OURS = {
    "gae": "PPO", "reinforce": "ReinforcePlusPlus", "rloo": "RLOO", "group_norm": "GRPO", "dr_grpo": "DrGRPO",
    "reinforce_baseline": "ReinforcePlusPlusBaseline",
}  # fmt: skip
AGGREGATIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
GROUPED = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")


def read_openrlhf(s: Settings) -> StepConfig:
    """Return the step that a command line of OpenRLHF asks for.

    Raises:
        OptionError: a flag's value is of the wrong kind.
    """
    ring, tp = s.whole("ds.ring_attn_size"), s.whole("ds.tensor_parallel_size")
    gpus = s.whole("actor.num_nodes") * s.whole("actor.num_gpus_per_node")
    dp = max(1, gpus // max(1, ring * tp))
    prompts, copies = s.whole("rollout.batch_size"), s.whole("rollout.n_samples_per_prompt")
    batch, dynamic = s.whole("train.batch_size"), s.yes("train.dynamic_batch_enable")
    longest, response, said = _lengths(s)
    estimator = s.one_of("algo.advantage.estimator", tuple(OURS), "sizes")
    findings: list[Finding] = []
    rule = rules_into(findings, f"OpenRLHF {RELEASE}")
    _check(s, rule, gpus, dp, ring, tp)
    lora = lora_asked(s.whole("ds.lora.rank"), s.number("ds.lora.alpha"), s.value("ds.lora.target_modules"), rule, "ds.lora.rank")
    pools = _pools(s, gpus)
    micro, tokens = s.whole("train.micro_batch_size"), s.whole("train.max_tokens_per_gpu") * ring * tp
    how = {
        "prompts": "rollout.batch_size, counted in prompts", "responses per prompt": "rollout.n_samples_per_prompt",
        "mini-batch": "train.batch_size, counted in samples",
        "data-parallel ranks": f"{gpus} GPUs of the actor / (ring {ring} x tp {tp})",
        "micro-batch per rank": "train.max_tokens_per_gpu" + f" x {ring * tp}" * (ring * tp > 1) if dynamic
        else "train.micro_batch_size, counted in samples",
        "epochs": "train.max_epochs", "tokens of a sample": said,
    }  # fmt: skip
    s.leave_out(*(("critic.",) * (estimator != "gae")), *(("ds.lora.", "lora_") * (lora is None)))
    if s.text("train.agent_func_path"):  # an agent's turns are its own
        s.odd["train.agent_func_path"] = (s.text("train.agent_func_path"), ("generated", "seconds"))
    if s.yes("algo.dynamic_filtering_enable"):
        s.odd["algo.dynamic_filtering_enable"] = (True, ("generated", "seconds"))  # prompts are drawn until enough groups are kept
    rows = max(1, copies * prompts // max(1, dp))
    return StepConfig(
        system="OpenRLHF", release=RELEASE, algorithm=estimator, ours=_ours(s, estimator),
        options=_options(s, estimator, copies, response), prompts=max(1, prompts), copies=max(1, copies),
        prompt_tokens=max(1, longest - response), response_tokens=response, mini_batch=max(1, batch),
        micro_batch=None if dynamic else max(1, micro), micro_tokens=tokens if dynamic else None,
        epochs=s.whole("train.max_epochs"),
        dp=dp, pools=pools, roles=_roles(s, pools, dp, tp, ring, longest, lora), rollout=_rollout(s, pools, rows),
        nodes=_nodes(s, pools), gpus_per_node=s.whole("actor.num_gpus_per_node"), rounding="down", how=how,
        findings=tuple(findings), assumed=_assumed(s, longest, response),
        reward=s.text("reward.model_name_or_path") or "a function",
    )  # fmt: skip


def _lengths(s: Settings) -> tuple[int, int, str]:
    """Return the tokens of the longest sample, of its response, and the words for them."""
    if any(s.has(key) for key in LIMITS_APART):
        prompt, response = (s.maybe_whole(key, 1) or default for key, default in LIMITS_APART.items())
        for key in ("data.max_len", "rollout.max_new_tokens"):
            if s.has(key):
                s.odd[key] = (s.value(key), ("sizes",))  # no release has both
        return prompt + response, response, f"{PROMPT_MOST} {prompt:,} + {RESPONSE_MOST} {response:,}"
    longest, answer = s.whole("data.max_len"), s.maybe_whole("rollout.max_new_tokens", 1)
    # a sample that is longer than data.max_len is cut
    answer = max(1, min(max(1, longest // 2) if answer is None else answer, longest - 1))
    return longest, answer, f"data.max_len {longest:,}, prompt and response"


def _assumed(s: Settings, longest: int, response: int) -> dict[str, str]:
    """Return the values that the flags do not give."""
    assumed = {}
    if not any(s.has(key) for key in (*LIMITS_APART, "rollout.max_new_tokens")):
        assumed["prompt tokens"] = f"{longest - response:,}, half of data.max_len {longest:,}; --rollout.max_new_tokens says it"
    if BOTH_OFFLOAD not in s.defaults:
        return assumed
    if not s.yes("bf16"):
        assumed["dtype"] = "bf16, as with --bf16, and by default since 0.9.1"
    missing = [key for key in ("train.micro_batch_size", "rollout.micro_batch_size") if not s.has(key)]
    if missing:
        flags_text = " and ".join(f"{key} {OLD_DEFAULTS[key]}" for key in missing)
        assumed["release"] = f"one from 0.6 to 0.9, by its flags: {flags_text} (0.10: 1)"
    return assumed


def _offloads(s: Settings, role: str) -> bool:
    return s.yes(f"{role}.offload") or (BOTH_OFFLOAD in s.defaults and s.yes(BOTH_OFFLOAD))


def _ours(s: Settings, estimator: str) -> str:
    ours = OURS.get(estimator, "")
    by_sequence = s.one_of("actor.policy_loss_type", ("ppo", "gspo"), "learning") == "gspo"
    return "GSPO" if by_sequence and ours in ("GRPO", "DrGRPO") else ours


def _nodes(s: Settings, pools: dict[str, int]) -> int:
    return max(1, math.ceil(sum(pools.values()) / max(1, s.whole("actor.num_gpus_per_node"))))


def _scored_elsewhere(s: Settings) -> bool:
    return bool(s.text("reward.remote_url") or s.text("train.agent_func_path"))


def _size(s: Settings, role: str) -> int:
    return max(1, s.whole(f"{role}.num_nodes") * s.whole(f"{role}.num_gpus_per_node"))


def _pools(s: Settings, gpus: int) -> dict[str, int]:
    """Return the placement groups: all together, or actor with reference, critic with reward, and each other alone."""
    engines = (s.maybe_whole("vllm.num_engines") or 0) * s.whole("vllm.tensor_parallel_size")
    apart = not s.yes("train.colocate_all") or s.yes("train.async_enable")
    pools = {"all" if s.yes("train.colocate_all") else "actor": gpus}
    if not s.yes("train.colocate_all"):
        has_critic = s.text("algo.advantage.estimator") == "gae"
        alone = {"ref": s.number("algo.kl.init_coef") > 0 and not s.yes("train.colocate_actor_ref"), "critic": has_critic}
        alone["reward"] = not _scored_elsewhere(s) and not (has_critic and s.yes("train.colocate_critic_reward"))
        pools |= {role: _size(s, role) for role, is_alone in alone.items() if is_alone}
    return pools | ({"vllm": engines} if apart and engines else {})


def _roles(
    s: Settings, pools: dict[str, int], dp: int, tp: int, ring: int, longest: int, lora: LoRA | None
) -> tuple[RoleConfig, ...]:  # fmt: skip
    sleeps, dynamic = s.yes("ds.enable_sleep"), s.yes("train.dynamic_batch_enable")
    path, split = s.text("actor.model_name_or_path"), max(1, ring * tp)

    def states(size: int) -> States:
        stage = s.whole("ds.zero_stage")
        over = [max(1, size // tp) if stage >= least else 1 for least in (3, 2, 1)]
        return States(
            name=f"ZeRO-{stage}", weights=2, gradients=2, optimizer=12, weights_over=over[0], gradients_over=over[1],
            optimizer_over=over[2],
        )  # fmt: skip

    trained = s.whole("train.max_tokens_per_gpu") if dynamic else s.whole("train.micro_batch_size") * longest // ring
    passed = s.whole("rollout.micro_batch_size") * longest // ring
    if dynamic:
        passed = s.maybe_whole("rollout.max_tokens_per_gpu") or trained
    away = dict.fromkeys(PHASES, ("weights", "gradients", "optimizer") * sleeps)

    def role(name: str, pool: str, model: str, **more: Any) -> RoleConfig:
        where = "all" if "all" in pools else pool
        size = pools[where]
        layout = Layout(tp=tp, dp=max(1, size // split))
        common = {"states": states(size), "pass_tokens": passed, "layout": layout, "pool": where}
        return RoleConfig(name=name, model=model, sequence_parallel=False, **{**common, **more})  # DeepSpeed's AutoTP has none

    learned: dict[str, Any] = {
        "trained": True, "train_tokens": trained, "recompute": "full" * s.yes("actor.gradient_checkpointing_enable"), "away": away,
        "never": ("optimizer",) * s.yes("ds.adam_offload"), "lora": lora,
    }  # fmt: skip
    roles = [role("actor", "actor", path, lr=s.number("actor.adam.lr"), **learned)]
    if s.number("algo.kl.init_coef") > 0:
        gone = ("weights",) * _offloads(s, "ref")
        pool = "actor" if s.yes("train.colocate_actor_ref") else "ref"
        roles.append(role("reference", pool, path, away=dict.fromkeys(PHASES, gone)))
    scorer = s.text("reward.model_name_or_path").split(",")[0]
    if s.text("algo.advantage.estimator") == "gae":
        model = s.text("critic.model_name_or_path") or (path if _scored_elsewhere(s) else scorer)
        roles.append(role("critic", "critic", model, head="scalar", lr=s.number("critic.adam.lr"), **learned))
    if not _scored_elsewhere(s):
        gone = ("weights",) * _offloads(s, "reward")
        together = s.yes("train.colocate_critic_reward") and "critic" in pools
        roles.append(role(
            "reward", "critic" if together else "reward", scorer, head="scalar", away=dict.fromkeys(PHASES, gone)
        ))  # fmt: skip
    return tuple(roles)


def _rollout(s: Settings, pools: dict[str, int], rows: int) -> RolloutConfig:
    engines, tp = s.maybe_whole("vllm.num_engines") or 0, s.whole("vllm.tensor_parallel_size")
    first = next(iter(pools))
    if not engines:
        return RolloutConfig(
            pool=first, layout=Layout(dp=max(1, pools[first])), engine="transformers", rows=rows, shares_weights=True
        )
    return RolloutConfig(
        pool="vllm" if "vllm" in pools else first, layout=Layout(tp=tp, dp=engines), engine="vllm",
        gpu_share=s.share("vllm.gpu_memory_utilization"), sleeps=s.yes("vllm.enable_sleep") and "vllm" not in pools,
    )  # fmt: skip


def _options(s: Settings, estimator: str, copies: int, response: int) -> dict[str, Any]:
    low_high, dual = s.value("actor.eps_clip_low_high"), s.value("actor.dual_clip")
    low = s.number("actor.eps_clip")
    pair = [float(x) for x in low_high] if isinstance(low_high, (list, tuple)) and len(low_high) == 2 else [low, low]
    coef, in_loss = s.number("algo.kl.init_coef"), s.yes("algo.kl.use_loss")
    entropy = s.value("actor.entropy_coef")
    options: dict[str, Any] = {
        "n": copies, "max_new_tokens": response, "temperature": s.number("rollout.temperature"), "kl_coef": coef, "clip": pair[0],
        "clip_high": pair[1] if pair[1] != pair[0] else None, "kl": s.text("algo.kl.estimator"),
        "entropy_coef": None if entropy is None else s.number("actor.entropy_coef"),
        "aggregation": AGGREGATIONS.get(s.one_of("actor.loss_agg_mode", tuple(AGGREGATIONS), "learning")),
        "dual_clip": None if dual is None else s.number("actor.dual_clip"),
    }  # fmt: skip
    if estimator in ("gae", "reinforce"):
        options["gamma"] = s.number("algo.advantage.gamma")
    if estimator == "gae":
        options |= {"lam": s.number("algo.advantage.lambd"), "value_clip": s.number("critic.value_clip")}
        options["kl_in"] = "loss" if in_loss else "reward"
    if estimator in ("group_norm", "dr_grpo", "reinforce_baseline"):
        options["scale"] = "group" if estimator == "group_norm" else "none"
        options["kl"] = options["kl"] if options["kl"] in ("k2", "k3") else "k3"
    return {name: value for name, value in options.items() if value is not None}


def _check(s: Settings, rule: Rule, gpus: int, dp: int, ring: int, tp: int) -> None:
    prompts, copies = s.whole("rollout.batch_size"), s.whole("rollout.n_samples_per_prompt")
    batch, micro, samples = s.whole("train.batch_size"), max(1, s.whole("train.micro_batch_size")), prompts * copies
    dynamic, estimator = s.yes("train.dynamic_batch_enable"), s.text("algo.advantage.estimator")
    rule(gpus % max(1, ring * tp) == 0, "the actor's GPUs must be a multiple of ds.ring_attn_size x ds.tensor_parallel_size",
         f"{gpus}, {ring} x {tp}", "Change one of them.", "openrlhf/utils/deepspeed/deepspeed.py, setup_distributed")  # fmt: skip
    rule(dynamic or batch % (dp * micro) == 0,
         "train.batch_size must be train.micro_batch_size x data-parallel ranks x a whole number of accumulated passes",
         f"{batch}, {micro} x {dp}", f"Take train.batch_size={math.ceil(batch / (dp * micro)) * dp * micro}.",
         "openrlhf/utils/deepspeed/deepspeed.py, get_ds_train_config; DeepSpeed refuses it")  # fmt: skip
    rule(not dynamic or batch % dp == 0, "train.batch_size should be a multiple of the data-parallel ranks: the rest is left out",
         f"{batch}, {dp}", f"Take {math.ceil(batch / dp) * dp}.", "replay_buffer.py, setup_dynamic_batch", NOTE)  # fmt: skip
    rule(samples >= batch, "an iteration has fewer samples than train.batch_size: it makes no whole optimizer step",
         f"rollout.batch_size {prompts} x {copies} = {samples}, {batch}", f"Take train.batch_size={samples} or less.",
         "openrlhf/trainer/ppo_utils/replay_buffer.py, setup_dynamic_batch")  # fmt: skip
    rule(samples < batch or samples % batch == 0, "the samples are no multiple of train.batch_size: the rest is not trained on",
         f"{samples}, {batch}", f"Take rollout.batch_size={math.ceil(samples / batch) * batch // math.gcd(batch, copies)}.",
         "replay_buffer.py, setup_dynamic_batch", NOTE)  # fmt: skip
    cut = copies * prompts // max(1, s.whole("rollout.micro_batch_size"))
    rule(cut >= dp, "samples / rollout.micro_batch_size must be at least the data-parallel ranks",
         f"{samples} / {s.whole('rollout.micro_batch_size')} = {cut}, {dp}", "Take a smaller rollout.micro_batch_size.",
         CLI)  # fmt: skip
    engines = s.maybe_whole("vllm.num_engines") or 0
    colocated = s.yes("train.colocate_all")
    in_all = engines * s.whole("vllm.tensor_parallel_size")
    rule(not engines or not colocated or s.yes("train.async_enable") or gpus == in_all,
         "with train.colocate_all the actor's GPUs must be vllm.num_engines x vllm.tensor_parallel_size",
         f"{gpus}, {engines} x {s.whole('vllm.tensor_parallel_size')} = {in_all}",
         f"Take vllm.num_engines={max(1, gpus // s.whole('vllm.tensor_parallel_size'))}.", f"{CLI}, train")  # fmt: skip
    together = colocated or s.yes("train.colocate_actor_ref")
    rule(not together or s.number("algo.kl.init_coef") <= 0 or _size(s, "actor") == _size(s, "ref"),
         "a colocated reference must have as many GPUs as the actor", f"{_size(s, 'actor')}, {_size(s, 'ref')}",
         "Set ref.num_nodes and ref.num_gpus_per_node alike.", f"{CLI}, train")  # fmt: skip
    rule(copies > 1 or estimator not in GROUPED, f"{estimator} compares the responses to one prompt, and there is one",
         f"rollout.n_samples_per_prompt={copies}", "Set it to 2 or more, e.g. 8.", CLI)  # fmt: skip
    rule(not s.yes("ds.packing_samples") or bool(engines), "ds.packing_samples needs vLLM", "vllm.num_engines is 0",
         "Set vllm.num_engines.", CLI)  # fmt: skip
    rule(copies > 1 or not s.yes("algo.dynamic_filtering_enable"), "dynamic filtering needs several responses to a prompt",
         f"rollout.n_samples_per_prompt={copies}", "Set it to 2 or more.", CLI)  # fmt: skip
    generated = s.maybe_whole("rollout.vllm_generate_batch_size") or prompts
    rule(generated <= prompts or s.yes("train.async_enable"), "rollout.vllm_generate_batch_size above rollout.batch_size needs "
         "train.async_enable", f"{generated} > {prompts}", "Leave it out.", CLI)  # fmt: skip
    rule(not s.yes("vllm.enable_sleep") or colocated, "vllm.enable_sleep is switched off without train.colocate_all", "it is set",
         "Leave it out, or colocate.", CLI, NOTE)  # fmt: skip
    limit = s.whole("train.max_tokens_per_gpu") * ring * tp
    longest = _lengths(s)[0]
    rule(not dynamic or limit >= longest,
         "train.max_tokens_per_gpu holds no longest sample: one is a micro-batch alone",
         f"{limit:,}, {longest:,} in a sample", "Memory is then that of a longest sample.",
         "openrlhf/utils/seqlen_balancing.py, get_minimum_num_micro_batch_size", NOTE)  # fmt: skip
