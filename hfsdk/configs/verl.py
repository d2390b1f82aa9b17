"""verl's configuration, as release 0.9.1 reads it: its keys, defaults and rules.

Sources in that release: ``verl/trainer/config/_generated_ppo_trainer.yaml`` (defaults), ``verl/utils/config.py``
(``validate_config``), ``verl/workers/config/actor.py`` and ``critic.py``, ``verl/trainer/ppo/v1/trainer_base.py`` (a mini-batch is
``ppo_mini_batch_size * rollout.n`` samples), ``verl/workers/engine_workers.py`` (``train_mini_batch`` divides that by the engine's
data-parallel size), ``verl/workers/engine/utils.py`` (``prepare_micro_batches``).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hfsdk.configs.model import expert_rule, lora_asked, shared_experts
from hfsdk.configs.settings import Settings
from hfsdk.configs.step_config import BROKEN, NOTE, PHASES, Finding, RoleConfig, RolloutConfig, States, StepConfig
from hfsdk.configs.trl import rules_into
from hfsdk.configs.zero_and_fsdp import fsdp1_rule
from hfsdk.core.layout import Layout
from hfsdk.core.lora import LoRA

# -- the algorithm and its options

A, R, CORRECTION = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "algorithm.rollout_correction."

OPTION_DEFAULTS: dict[str, Any] = {
    f"{A}clip_ratio_low": 0.2, f"{A}clip_ratio_high": 0.2, f"{A}clip_ratio_c": 3.0, f"{A}entropy_coeff": 0,
    f"{A}loss_agg_mode": "token-mean", f"{A}use_kl_loss": False, f"{A}kl_loss_coef": 0.001, f"{A}kl_loss_type": "low_var_kl",
    f"{A}tau_pos": 1.0, f"{A}tau_neg": 1.05,
    f"{A}policy_loss.loss_mode": "vanilla", f"{A}policy_loss.clip_cov_ratio": 0.0002, f"{A}policy_loss.clip_cov_lb": 1.0,
    f"{A}policy_loss.clip_cov_ub": 5.0, f"{A}policy_loss.kl_cov_ratio": 0.0002, f"{A}policy_loss.ppo_kl_coef": 0.1,
    f"{CORRECTION}rollout_is": None, f"{CORRECTION}rollout_is_threshold": 2.0, f"{CORRECTION}rollout_is_batch_normalize": False,
    "critic.cliprange_value": 0.5, f"{R}temperature": 1.0, "algorithm.gamma": 1.0, "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False, "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.norm_adv_by_std_in_grpo": True,
}  # fmt: skip
"""Defaults of the option keys that are read here."""

OURS = {
    "gae": "PPO", "grpo": "GRPO", "grpo_vectorized": "GRPO", "gdpo": "GDPO", "rloo": "RLOO", "rloo_vectorized": "RLOO",
    "remax": "ReMax", "reinforce_plus_plus": "ReinforcePlusPlus", "opo": "OPO",
    "reinforce_plus_plus_baseline": "ReinforcePlusPlusBaseline",
}  # fmt: skip
"""``algorithm.adv_estimator`` -> hfsdk's class, with the loss ``vanilla``."""

LOSSES = {
    "gspo": "GSPO", "cispo": "CISPO", "kl_cov": "KLCov", "clip_cov": "ClipCov", "sapo": "SAPO", "geo_mean": "GMPO",
    "dppo_tv": "DPPO", "dppo_kl": "DPPO", "gpg": "GPG",
}  # fmt: skip
"""``policy_loss.loss_mode`` -> hfsdk's class, with the estimator ``grpo``; that of ``gpg`` is ``gpg`` too."""

KL_KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""``kl_loss_type`` and ``kl_penalty`` -> hfsdk's estimator; a ``+`` behind it gives the gradient of k2."""

AGGREGATIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum": "sequence_sum"}


def algorithm_of(s: Settings, estimator: str) -> str:
    """Return the name of hfsdk's class, ``""`` where it has none."""
    mode = s.one_of(f"{A}policy_loss.loss_mode", ("vanilla", *LOSSES), "learning")
    if "gpg" in (estimator, mode):  # one without the other is neither
        return "GPG" if estimator == mode else ""
    if mode in LOSSES and estimator not in ("grpo", "grpo_vectorized"):
        return OURS.get(estimator, "") if estimator != "gdpo" else ""
    return LOSSES.get(mode) or OURS.get(estimator, "")


def options_of(s: Settings, estimator: str, response: int, copies: int) -> dict[str, Any]:
    """Return the options of hfsdk's class that the configuration says.

    Sources in that release: ``verl/trainer/ppo/core_algos.py`` (estimators, losses, ``kl_penalty``),
    ``verl/trainer/ppo/rollout_corr_helper.py`` (weights), ``verl/trainer/config/_generated_ppo_trainer.yaml`` (defaults).
    """
    in_loss, in_reward = s.yes(f"{A}use_kl_loss"), s.yes("algorithm.use_kl_in_reward")
    coef = s.number(f"{A}kl_loss_coef") if in_loss else s.number("algorithm.kl_ctrl.kl_coef") if in_reward else 0.0
    low, high = s.number(f"{A}clip_ratio_low"), s.number(f"{A}clip_ratio_high")
    options = {
        "n": copies, "max_new_tokens": response, "temperature": s.number(f"{R}temperature"), "kl_coef": coef,
        "kl": _kl(s, f"{A}kl_loss_type" if in_loss else "algorithm.kl_penalty") if coef else None, "clip": low,
        "clip_high": high if high != low else None, "entropy_coef": s.number(f"{A}entropy_coeff"),
        "aggregation": AGGREGATIONS.get(s.one_of(f"{A}loss_agg_mode", tuple(AGGREGATIONS), "learning")),
    }  # fmt: skip
    if estimator == "gae":
        options |= {"gamma": s.number("algorithm.gamma"), "lam": s.number("algorithm.lam")}
        options |= {"value_clip": s.number("critic.cliprange_value"), "kl_in": "loss" if in_loss and coef else None}
    options |= _options_of_loss(s, s.text(f"{A}policy_loss.loss_mode")) | _correction(s)
    if estimator in ("grpo", "grpo_vectorized", "gdpo"):
        options["scale"] = "group" if s.yes("algorithm.norm_adv_by_std_in_grpo") else "none"
    return {name: value for name, value in options.items() if value is not None}


def _kl(s: Settings, key: str) -> str | None:
    kind = s.one_of(key, (*KL_KINDS, *(f"{kl_kind}+" for kl_kind in KL_KINDS)), "learning")
    ours = KL_KINDS.get(kind.removesuffix("+"))
    return f"{ours}+" if ours in ("k1", "k3") and kind.endswith("+") else ours


def _options_of_loss(s: Settings, mode: str) -> dict[str, Any]:
    """Return the options that one loss alone has, and ``None`` for those that have no part in it."""
    loss = f"{A}policy_loss."
    if mode == "kl_cov":
        return {"share": s.number(f"{loss}kl_cov_ratio"), "old_kl_coef": s.number(f"{loss}ppo_kl_coef"), "clip_high": None}
    if mode == "clip_cov":
        bounds = {"low": s.number(f"{loss}clip_cov_lb"), "high": s.number(f"{loss}clip_cov_ub")}
        return {"share": s.number(f"{loss}clip_cov_ratio"), **bounds}
    without_clip: dict[str, Any] = {"clip": None, "clip_high": None}
    if mode == "sapo":  # its loss is averaged so with any loss_agg_mode
        return {
            **without_clip,
            "tau_pos": s.number(f"{A}tau_pos"),
            "tau_neg": s.number(f"{A}tau_neg"),
            "aggregation": "sequence_mean",
        }
    if mode == "geo_mean":
        return {"aggregation": "sequence_mean"}
    if mode == "gpg":
        return without_clip
    if mode in ("dppo_tv", "dppo_kl"):
        return {"divergence": mode.removeprefix("dppo_"), "ratio_cap": s.number(f"{A}clip_ratio_c")}
    return {}


def _correction(s: Settings) -> dict[str, Any]:
    """Return the weights of the rollout's log-probs: a threshold of one number truncates them, ``"lower_upper"`` masks them."""
    level, threshold = s.value(f"{CORRECTION}rollout_is"), str(s.value(f"{CORRECTION}rollout_is_threshold"))
    normalised = s.yes(f"{CORRECTION}rollout_is_batch_normalize")
    try:
        *floor, cap = (float(bound) for bound in threshold.split("_"))
    except ValueError:
        return {}
    if level not in ("token", "sequence", "geometric"):  # the last of releases up to 0.6
        return {}
    options = {"tis_cap": cap, "tis_level": level, **({"tis_normalise": True} if normalised else {})}
    return options | {"tis_floor": floor[0], "tis_bounds": "mask"} if floor else options


RELEASE, VALIDATE = "0.9.1", "verl/workers/config/actor.py, ActorConfig.validate"
T = "trainer."
TRAIN, MINI, N = "data.train_batch_size", f"{A}ppo_mini_batch_size", f"{R}n"
MICRO, OLD_MICRO, DYNAMIC, TOKENS = (
    f"{A}{key}" for key in ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")
)
REF = "actor_rollout_ref.ref."
MODELS = ("actor_rollout_ref.model.", "critic.model.")
RECOMPUTE = f"{A}megatron.override_transformer_config.recompute_granularity"

DEFAULTS: dict[str, Any] = {
    TRAIN: 1024, "data.max_prompt_length": 512, "data.max_response_length": 512,
    N: 1, MINI: 256, MICRO: None, OLD_MICRO: None, DYNAMIC: False, TOKENS: 16384,
    **OPTION_DEFAULTS, f"{A}ppo_epochs": 1, f"{A}strategy": "fsdp",
    f"{A}optim.lr": 1e-6, f"{A}ulysses_sequence_parallel_size": 1, f"{A}fsdp_config.ulysses_sequence_parallel_size": 1,
    "reward_model.enable": False, "reward_model.model.path": None, f"{A}fsdp_config.fsdp_size": -1,
    f"{A}fsdp_config.model_dtype": "fp32", f"{A}fsdp_config.param_offload": False,
    f"{A}fsdp_config.optimizer_offload": False, f"{A}megatron.tensor_model_parallel_size": 1,
    f"{A}megatron.pipeline_model_parallel_size": 1, f"{A}megatron.context_parallel_size": 1, f"{A}megatron.param_offload": False,
    f"{A}megatron.expert_model_parallel_size": 1, f"{A}megatron.expert_tensor_parallel_size": None,
    f"{A}megatron.optimizer_offload": False, RECOMPUTE: None,
    "actor_rollout_ref.model.path": "~/models/deepseek-llm-7b-chat", "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    **{
        f"{model}{key}": default for model in MODELS
        for key, default in {
            "lora_rank": 0, "lora_alpha": 16, "target_modules": "all-linear", "lora.rank": 0, "lora.alpha": 32,
            "lora.target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
        }.items()
    },
    f"{R}name": None, f"{R}tensor_model_parallel_size": 2, f"{R}data_parallel_size": 1, f"{R}pipeline_model_parallel_size": 1,
    f"{R}expert_parallel_size": 1, f"{R}max_model_len": None, f"{R}max_num_seqs": 1024, f"{R}max_num_batched_tokens": 8192,
    f"{R}gpu_memory_utilization": 0.5, f"{R}free_cache_engine": True,
    f"{R}log_prob_micro_batch_size": None, f"{R}log_prob_micro_batch_size_per_gpu": None,
    f"{R}log_prob_use_dynamic_bsz": f"${{oc.select:{DYNAMIC},False}}",
    f"{R}log_prob_max_token_len_per_gpu": f"${{oc.select:{TOKENS},16384}}",
    f"{REF}log_prob_micro_batch_size": None, f"{REF}log_prob_micro_batch_size_per_gpu": None,
    f"{REF}log_prob_use_dynamic_bsz": f"${{oc.select:{DYNAMIC},False}}",
    f"{REF}log_prob_max_token_len_per_gpu": f"${{oc.select:{TOKENS},16384}}", f"{REF}fsdp_config.param_offload": False,
    f"{REF}megatron.param_offload": f"${{oc.select:{A}megatron.param_offload,False}}",
    "critic.enable": None, "critic.model.path": "~/models/deepseek-llm-7b-chat", 
    "critic.ppo_micro_batch_size": None, "critic.ppo_micro_batch_size_per_gpu": None,
    "critic.use_dynamic_bsz": f"${{{DYNAMIC}}}", "critic.ppo_max_token_len_per_gpu": 32768, "critic.optim.lr": 1e-5,
    "critic.model.enable_gradient_checkpointing": True, "critic.fsdp.param_offload": False, "critic.fsdp.optimizer_offload": False,
    "algorithm.adv_estimator": "gae", "reward.reward_model.enable": False,
    "reward.reward_model.model_path": None, f"{T}n_gpus_per_node": 8, f"{T}nnodes": 1, f"{T}use_v1": True,
    "model_engine": None,
}  # fmt: skip
"""Defaults of the keys that are read; ``critic.enable`` of nothing is true for ``gae``."""

CONFIG_NAMES = {"ppo_trainer": "fsdp", "ppo_megatron_trainer": "megatron"}
"""``--config-name`` of verl's own files -> the engine that it trains with."""

OLD_CRITIC = "critic.model.fsdp_config."
"""How keys of the critic's FSDP begin up to 0.7."""

MISSING = "???"
"""hydra's sign for a value that has to be given yet."""

ENGINES = ("dp", "fsdp", "fsdp2", "megatron")


def named_now(keys: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return keys by the names they have now, and which have another one than was given.

    ``--config-name`` of a file of verl's own is its engine; another file stays named.
    """
    engine = CONFIG_NAMES.get(str(keys.get("config_name", "")).removesuffix(".yaml"))
    if engine is not None:
        keys = {f"{A}strategy": engine, **{key: value for key, value in keys.items() if key not in ("config_name", "config_path")}}
    keys = {key: value for key, value in keys.items() if value != MISSING}
    renamed = {key: key.replace(OLD_CRITIC, "critic.fsdp.", 1) for key in keys if key.startswith(OLD_CRITIC)}
    return {renamed.get(key, key): value for key, value in keys.items()}, renamed


def read_verl(settings: Settings) -> StepConfig:
    """Return the step that a configuration of verl asks for.

    Raises:
        OptionError: a key's value is of the wrong kind, or one that is needed has none.
    """
    s = settings
    gpus_per_node, nodes = s.whole(f"{T}n_gpus_per_node"), s.whole(f"{T}nnodes")
    num_gpus = max(1, gpus_per_node * nodes)
    engines = (s.one_of("model_engine", ENGINES, "sizes"), s.one_of(f"{A}strategy", ENGINES, "sizes"))
    megatron = "megatron" in engines
    layout, split, dp_how = _trainer(s, num_gpus, megatron)
    dynamic, estimator = s.yes(DYNAMIC), s.text("algorithm.adv_estimator")
    prompt, response = s.whole("data.max_prompt_length"), s.whole("data.max_response_length")
    most = s.maybe_whole(f"{R}max_model_len", 1)
    if most is not None and most < prompt + response:  # vllm_async_server.py, generate: responses end there
        s.odd[f"{R}max_model_len"] = (most, ("sizes",))
    copies, mini, prompts = s.whole(N), s.whole(MINI), s.whole(TRAIN)
    dp = layout.num_replicas
    micro = None if dynamic else s.maybe_whole(MICRO, 1) or _per_gpu(s.maybe_whole(OLD_MICRO, 1), num_gpus)
    tokens = s.whole(TOKENS) * split if dynamic else None
    how = {
        "prompts": f"{TRAIN}, counted in prompts", "responses per prompt": N,
        "samples": f"{TRAIN} {prompts:,} x {N} {copies}",
        "mini-batch": f"ppo_mini_batch_size {mini:,} (counted in prompts) x rollout.n {copies}",
        "data-parallel ranks": dp_how,
        "micro-batch per rank": f"ppo_max_token_len_per_gpu x {split} sequence-parallel ranks" if dynamic
        else "ppo_micro_batch_size_per_gpu, counted in samples: it is not multiplied by rollout.n",
        "epochs": f"{A}ppo_epochs",
    }  # fmt: skip
    findings = _findings(s, num_gpus, layout, split, megatron)
    loras = [_lora(s, model, megatron, rules_into(findings, f"verl {RELEASE}")) for model in MODELS]
    _left_out(s, megatron, loras)
    roles = _roles(s, layout, split, megatron, num_gpus, prompt + response, micro, tokens, *loras)
    return StepConfig(
        system="verl", release=RELEASE, algorithm=estimator, ours=algorithm_of(s, estimator),
        options=options_of(s, estimator, response, copies), prompts=max(1, prompts), copies=max(1, copies), prompt_tokens=prompt,
        response_tokens=response, mini_batch=max(1, mini * copies), micro_batch=micro, micro_tokens=tokens,
        epochs=max(1, s.whole(f"{A}ppo_epochs")), dp=dp, pools={"all": num_gpus}, roles=roles,
        rollout=_rollout(s, num_gpus), nodes=nodes, gpus_per_node=gpus_per_node, rounding="up", how=how,
        findings=tuple(findings),
        reward=_reward(s),
    )  # fmt: skip


def _reward(s: Settings) -> str:
    """Return the model that scores, whose memory is not counted; its keys stood elsewhere up to 0.6."""
    for part, path in (("reward.reward_model.", "model_path"), ("reward_model.", "model.path")):
        if s.yes(f"{part}enable"):
            s.odd[f"{part}enable"] = (True, ("memory", "seconds"))
            return s.text(f"{part}{path}")
    s.leave_out("reward.reward_model.", "reward_model.model.", "reward_model.rollout.", "reward_model.micro_batch_size",
                "reward_model.strategy", "reward_model.n_gpus_per_node", "reward_model.nnodes", "reward_model.enable_resource_pool",
                "reward_model.ulysses_", "reward_model.use_dynamic_bsz", "reward_model.forward_max_token_len_per_gpu",
                "reward_model.max_length")  # fmt: skip
    return "a function"


def _left_out(s: Settings, megatron: bool, loras: list[LoRA | None]) -> None:
    """Note the parts of a configuration that it does not use."""
    engines = ("fsdp_config.", "fsdp.") if megatron else ("megatron.", "lora.")
    s.leave_out(*(f"{part}{engine}" for part in (A, REF, "critic.", *MODELS) for engine in (*engines, "veomni.", "torchtitan.")))
    if not _has_critic(s):
        s.leave_out("critic.")
    if not s.yes(f"{A}use_kl_loss") and not s.yes("algorithm.use_kl_in_reward"):
        s.leave_out(REF)
    for model, lora in zip(MODELS, loras, strict=True):
        if lora is None:
            s.leave_out(f"{model}lora", f"{model}exclude_modules")
    for part, switch in (("distillation.", "enabled"), ("algorithm.filter_groups.", "enable"), (f"{A}qat.", "enable"),
                         (f"{R}profiler.", "enable")):  # fmt: skip
        if s.given.get(f"{part}{switch}") in (None, False):
            s.leave_out(part)


def _per_gpu(whole: int | None, num_gpus: int) -> int | None:
    return None if whole is None else max(1, whole // num_gpus)


def _trainer(s: Settings, num_gpus: int, megatron: bool) -> tuple[Layout, int, str]:
    """Return the trainer's layout, the ranks that share a sequence, and the words for dp."""
    if megatron:
        m = f"{A}megatron."
        tp, pp, cp = (s.whole(f"{m}{axis}_parallel_size") for axis in ("tensor_model", "pipeline_model", "context"))
        dp = max(1, num_gpus // max(1, tp * pp * cp))
        ep, expert_tp = s.whole(f"{m}expert_model_parallel_size"), s.maybe_whole(f"{m}expert_tensor_parallel_size")
        return (
            Layout(tp=tp, pp=pp, dp=dp, ep=shared_experts(ep, expert_tp, tp, dp)),
            cp,
            f"{num_gpus} GPUs / (tp {tp} x pp {pp} x cp {cp})",
        )
    split = max(s.whole(f"{A}ulysses_sequence_parallel_size"), s.whole(f"{A}fsdp_config.ulysses_sequence_parallel_size"))
    dp = max(1, num_gpus // max(1, split))
    return Layout(tp=1, pp=1, dp=dp), split, f"{num_gpus} GPUs / {split} sequence-parallel"


def _states(s: Settings, megatron: bool, num_gpus: int, dp: int) -> States:
    if megatron:
        return States(name="Megatron", weights=2, gradients=4, optimizer=12, optimizer_over=dp, gradients_stay=True)
    size = s.whole(f"{A}fsdp_config.fsdp_size") if s.value(f"{A}fsdp_config.fsdp_size") != -1 else num_gpus
    over = max(1, min(size, num_gpus))
    each = 2 if s.text(f"{A}fsdp_config.model_dtype") in ("bf16", "bfloat16") else 4
    return States(
        name="FSDP", weights=each, gradients=each, optimizer=2 * each, weights_over=over, gradients_over=over, optimizer_over=over
    )  # fmt: skip


def _away(param: bool, optimizer: bool) -> dict[str, tuple[str, ...]]:
    """Return the parts that are in host memory while other roles work."""
    gone = ("weights", "gradients") * param + ("optimizer",) * optimizer
    return dict.fromkeys(PHASES, gone)


def _roles(
    s: Settings, layout: Layout, split: int, megatron: bool, num_gpus: int, longest: int, micro: int | None, tokens: int | None,
    lora: LoRA | None, critics: LoRA | None,
) -> tuple[RoleConfig, ...]:  # fmt: skip
    states = _states(s, megatron, num_gpus, layout.num_replicas)
    engine = "megatron" if megatron else "fsdp_config"
    path = s.text("actor_rollout_ref.model.path")

    def local(samples: int | None, most: int | None) -> int:
        return math.ceil((most if most is not None else (samples or 1) * longest) / split)

    def passes(prefix: str) -> int:
        if s.yes(f"{prefix}log_prob_use_dynamic_bsz"):
            return s.whole(f"{prefix}log_prob_max_token_len_per_gpu")
        samples_each = s.maybe_whole(f"{prefix}log_prob_micro_batch_size_per_gpu", 1)
        return local(samples_each or _per_gpu(s.maybe_whole(f"{prefix}log_prob_micro_batch_size", 1), num_gpus), None)

    checkpointed = s.text(RECOMPUTE) if megatron else "full" * s.yes("actor_rollout_ref.model.enable_gradient_checkpointing")
    roles = [RoleConfig(
        name="actor", model=path, pool="all", layout=layout, states=states, trained=True, train_tokens=local(micro, tokens),
        pass_tokens=passes(R), recompute=checkpointed, lr=s.number(f"{A}optim.lr"),
        away=_away(s.yes(f"{A}{engine}.param_offload"), s.yes(f"{A}{engine}.optimizer_offload")), lora=lora,
        split=1 if megatron else split, uneven=s.lays_out_layers(),
    )]  # fmt: skip
    if s.yes(f"{A}use_kl_loss") or s.yes("algorithm.use_kl_in_reward"):
        gone = ("weights",) * s.yes(f"{REF}{engine}.param_offload")
        roles.append(RoleConfig(
            name="reference", model=path, pool="all", layout=layout, states=states, pass_tokens=passes(REF),
            away=dict.fromkeys(PHASES, gone),
            base_of="actor" * (lora is not None),  # trainer_base.py, ref_in_actor
        ))  # fmt: skip
    if _has_critic(s):
        samples_each = s.maybe_whole("critic.ppo_micro_batch_size_per_gpu", 1)
        most = s.whole("critic.ppo_max_token_len_per_gpu") if s.yes("critic.use_dynamic_bsz") else None
        each = local(samples_each or _per_gpu(s.maybe_whole("critic.ppo_micro_batch_size", 1), num_gpus), most)
        roles.append(RoleConfig(
            name="critic", model=s.text("critic.model.path"), pool="all", layout=layout, states=states, trained=True, head="scalar",
            train_tokens=each, pass_tokens=each, recompute="full" * s.yes("critic.model.enable_gradient_checkpointing"),
            lr=s.number("critic.optim.lr"), away=_away(s.yes("critic.fsdp.param_offload"), s.yes("critic.fsdp.optimizer_offload")),
            lora=critics,
        ))  # fmt: skip
    return tuple(replace(role, sequence_parallel=megatron) for role in roles)  # config_converter.py: wherever tp > 1


def _lora(s: Settings, model: str, megatron: bool, rule: Any) -> LoRA | None:
    """Return the adapters of a model; Megatron's are asked for under keys of their own."""
    keys = ("lora.rank", "lora.alpha", "lora.target_modules") if megatron else ("lora_rank", "lora_alpha", "target_modules")
    rank, alpha, targets = (f"{model}{key}" for key in keys)
    return lora_asked(s.maybe_whole(rank), s.number(alpha), s.value(targets), rule, rank)


def _has_critic(s: Settings) -> bool:
    enabled = s.value("critic.enable")
    return s.text("algorithm.adv_estimator") == "gae" if enabled is None else s.yes("critic.enable")


def _rollout(s: Settings, num_gpus: int) -> RolloutConfig:
    tp, pp = s.whole(f"{R}tensor_model_parallel_size"), s.whole(f"{R}pipeline_model_parallel_size")
    dp, experts = max(1, num_gpus // max(1, tp * pp)), s.whole(f"{R}expert_parallel_size")  # vLLM's ep is tp x dp of an engine
    return RolloutConfig(
        pool="all", layout=Layout(tp=tp, pp=pp, dp=dp, ep=shared_experts(experts, 1, tp, dp)),
        engine=s.one_of(f"{R}name", ("vllm", "sglang"), "memory", "seconds") or "vllm",
        gpu_share=s.share(f"{R}gpu_memory_utilization"), sleeps=s.yes(f"{R}free_cache_engine"),
        max_num_seqs=_size_or_0(s, "max_num_seqs"), max_num_batched_tokens=_size_or_0(s, "max_num_batched_tokens"),
    )  # fmt: skip


def _size_or_0(s: Settings, key: str) -> int:
    """Return a size of the generating engine, 0 where it is not given."""
    return s.whole(f"{R}{key}") if s.has(f"{R}{key}") else 0


def _findings(s: Settings, num_gpus: int, layout: Layout, split: int, megatron: bool) -> list[Finding]:
    findings: list[Finding] = []

    def rule(holds: bool, words: str, got: str, do: str, source: str, kind: str = BROKEN) -> None:
        if not holds:
            findings.append(Finding(kind=kind, rule=words, got=got, do=do, source=f"verl {RELEASE}, {source}"))

    dynamic, prompts, copies, mini = s.yes(DYNAMIC), s.whole(TRAIN), s.whole(N), s.whole(MINI)
    micro, dp, samples = s.maybe_whole(MICRO), layout.num_replicas, prompts * copies
    longest = s.whole("data.max_prompt_length") + s.whole("data.max_response_length")
    size, ranks = layout.tp * layout.pp * split, "tp x pp x cp" if megatron else "ulysses_sequence_parallel_size"
    rule(num_gpus % size == 0, f"the GPUs must be a multiple of {ranks}", f"{num_gpus} GPUs, {size}",
         "Change the layout or trainer.n_gpus_per_node x nnodes.", "verl/utils/config.py, validate_config")  # fmt: skip
    if megatron:
        expert_rule(rule, num_gpus, layout, s.whole(f"{A}megatron.expert_model_parallel_size"),
                    s.maybe_whole(f"{A}megatron.expert_tensor_parallel_size"))  # fmt: skip
    for role, place in ((A, f"{A}fsdp_config."), ("critic.", "critic.fsdp.")):
        if not megatron and (role == A or _has_critic(s)):
            fsdp1_rule(rule, role, s.text(f"{role}strategy"), place, s.value(f"{place}fsdp_size"), num_gpus)
    rollout = s.whole(f"{R}tensor_model_parallel_size") * s.whole(f"{R}data_parallel_size")
    rollout *= s.whole(f"{R}pipeline_model_parallel_size")
    rule(num_gpus % rollout == 0, "the GPUs must be a multiple of the rollout's tp x dp x pp", f"{num_gpus} GPUs, {rollout}",
         f"Set {R}tensor_model_parallel_size to a divisor of {num_gpus}.",
         "verl/workers/engine_workers.py, init_model")  # fmt: skip
    rule(mini * copies % dp == 0, "ppo_mini_batch_size x rollout.n must be a multiple of the data-parallel ranks",
         f"{mini} x {copies} = {mini * copies}, {dp} ranks", f"Take ppo_mini_batch_size={_multiple(mini, copies, dp)}.",
         "verl/workers/engine_workers.py, train_mini_batch")  # fmt: skip
    if dynamic:
        rule(s.whole(TOKENS) * split >= longest, f"{TOKENS} must hold one longest sample",
             f"{s.whole(TOKENS) * split:,} tokens, {longest:,} in a sample", f"Set it to at least {math.ceil(longest / split):,}.",
             "verl/utils/seqlen_balancing.py, rearrange_micro_batches")  # fmt: skip
        rule(micro is None, "with use_dynamic_bsz a micro-batch is counted in tokens, ppo_micro_batch_size_per_gpu is not used",
             f"{MICRO}={micro}", "Leave it out.", "verl/workers/engine/utils.py, prepare_micro_batches", NOTE)  # fmt: skip
    else:
        _count_rules(s, rule, num_gpus, layout, split, megatron)
    rule(mini <= prompts or not dynamic, "ppo_mini_batch_size is more than train_batch_size: the batch is padded up to it",
         f"{mini} > {prompts}", f"Set {MINI} to at most {prompts}.", "verl/trainer/ppo/v1/trainer_base.py, _balance_batch",
         NOTE)  # fmt: skip
    rule(mini > prompts or prompts % max(1, mini) == 0 or not s.yes(f"{T}use_v1"),
         "train_batch_size is no multiple of ppo_mini_batch_size: the batch is padded with copies up to the next one",
         f"{prompts} and {mini}, {samples:,} samples", f"Take train_batch_size={math.ceil(prompts / max(1, mini)) * mini}.",
         "verl/trainer/ppo/v1/trainer_base.py, _balance_batch", NOTE)  # fmt: skip
    other = s.yes(f"{R}log_prob_use_dynamic_bsz")
    rule(dynamic == other, "actor.use_dynamic_bsz and rollout.log_prob_use_dynamic_bsz must be the same", f"{dynamic} and {other}",
         "Set both alike.", "verl/workers/engine_workers.py, init_model")  # fmt: skip
    rule(copies > 1 or s.text("algorithm.adv_estimator") not in ("grpo", "rloo"),
         "responses are compared with others to their prompt, and there is one: its advantage is its own score", f"{N}={copies}",
         f"Set {N} to 2 or more, e.g. 8.", "verl/trainer/ppo/core_algos.py", NOTE)  # fmt: skip
    return findings


def _count_rules(s: Settings, rule: Any, num_gpus: int, layout: Layout, split: int, megatron: bool) -> None:
    """Add the rules of micro-batches that are counted in samples."""
    prompts, copies, mini, dp = s.whole(TRAIN), s.whole(N), s.whole(MINI), layout.num_replicas
    micro, old, samples = s.maybe_whole(MICRO), s.maybe_whole(OLD_MICRO), prompts * copies
    rule(micro is not None or old is not None, f"without use_dynamic_bsz {MICRO} must be set", "neither it nor use_dynamic_bsz",
         f"Set {MICRO}=4, or {DYNAMIC}=True.", "verl/workers/config/actor.py, ActorConfig.__post_init__")  # fmt: skip
    rule(micro is None or old is None, "ppo_micro_batch_size and ppo_micro_batch_size_per_gpu exclude each other",
         f"{old} and {micro}", "Leave ppo_micro_batch_size out: it is the deprecated one.",
         "verl/workers/config/actor.py, ActorConfig.__post_init__")  # fmt: skip
    rule(prompts >= mini, "train_batch_size must be at least ppo_mini_batch_size (both are counted in prompts)",
         f"{prompts} < {mini}", f"Set {MINI} to at most {prompts}.", VALIDATE)  # fmt: skip
    least = dp * (micro or 1) if megatron else num_gpus
    words = f"dp x {MICRO}" if megatron else "the number of GPUs"
    rule(samples % least == 0, f"train_batch_size x rollout.n must be a multiple of {words}",
         f"{prompts} x {copies} = {samples:,}, {least}", f"Take train_batch_size={_multiple(prompts, copies, least)}.",
         "verl/utils/config.py, validate_config")  # fmt: skip
    per_rank = mini * copies // dp
    rule(micro is None or per_rank % micro == 0, "a rank's part of a mini-batch must be a multiple of ppo_micro_batch_size_per_gpu",
         f"{mini} x {copies} / {dp} = {per_rank} samples, {micro}", f"Take {_divisor(per_rank, micro or 1)}.",
         "verl/workers/engine/utils.py, prepare_micro_batches")  # fmt: skip
    whole = old if old is not None and micro is None else None
    rule(whole is None or mini % whole == 0, "ppo_mini_batch_size must be a multiple of ppo_micro_batch_size", f"{mini}, {whole}",
         "Use ppo_micro_batch_size_per_gpu.", VALIDATE)  # fmt: skip
    rule(whole is None or whole * split >= num_gpus, "ppo_micro_batch_size x sequence parallelism must be at least the GPUs",
         f"{whole} x {split}, {num_gpus}", "Use ppo_micro_batch_size_per_gpu.", VALIDATE)  # fmt: skip
    needed = {R: True, REF: s.yes(f"{A}use_kl_loss") or s.yes("algorithm.use_kl_in_reward")}
    for prefix, wanted in needed.items():
        per_gpu = s.maybe_whole(f"{prefix}log_prob_micro_batch_size_per_gpu")
        old = s.maybe_whole(f"{prefix}log_prob_micro_batch_size")
        rule(not wanted or per_gpu is not None or old is not None,
             f"without use_dynamic_bsz {prefix}log_prob_micro_batch_size_per_gpu must be set", "nothing",
             f"Set it, e.g. to {micro or 4}.", "verl/utils/config.py, validate_config")  # fmt: skip
        local = samples // dp
        rule(not wanted or not per_gpu or local % per_gpu == 0,
             f"a rank's samples must be a multiple of {prefix}log_prob_micro_batch_size_per_gpu",
             f"{samples:,} / {dp} = {local} samples, {per_gpu}", f"Take {_divisor(local, per_gpu or 1)}.",
             "verl/workers/engine/utils.py, prepare_micro_batches")  # fmt: skip


def _multiple(least: int, times: int, of: int) -> int:
    """Return the smallest number from ``least`` on that is, ``times`` over, a multiple of ``of``."""
    step = of // math.gcd(of, max(1, times))
    return max(1, math.ceil(least / step)) * step


MOST_DIVISOR = 100_000
"""Divisors up to which one is looked for."""


def _divisor(whole: int, most: int) -> int:
    """Return the largest divisor of ``whole`` that is at most ``most``."""
    small = [d for d in range(1, min(math.isqrt(max(1, whole)), MOST_DIVISOR) + 1) if whole % d == 0]
    return max((d for small_divisor in small for d in (small_divisor, whole // small_divisor) if d <= most), default=1)
