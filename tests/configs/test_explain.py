"""``hf.explain``: numbers against the formulas of each system, its rules, memory by phase, and the same step in hfsdk."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.configs.model import spec_named, specs_of
from hfsdk.configs.phase_memory import GPU_PROCESS_BYTES, learned_of, parameters_of
from hfsdk.configs.unread_keys import known_keys
from hfsdk.core.lora import AdapterSpec
from hfsdk.planner.perf.memory import device_bytes

EXAMPLES = json.loads((Path(__file__).parents[1] / "data" / "configs.json").read_text(encoding="utf-8"))
A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
DOUBTS = {
    "algorithm.adv_estimator": "grpo", "data.train_batch_size": 1024, f"{A}ppo_mini_batch_size": 256,
    f"{A}ppo_micro_batch_size_per_gpu": 80, f"{R}log_prob_micro_batch_size_per_gpu": 160,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 160, f"{R}n": 5, f"{A}use_kl_loss": True,
    "actor_rollout_ref.model.path": "deepseek-ai/deepseek-llm-7b-chat", f"{R}name": "vllm",
}  # fmt: skip
"""verl#1524, on 8 GPUs."""


def example(name: str) -> dict[str, Any]:
    return next(one["config"] for one in EXAMPLES if one["example"].endswith(name))


def flat(config: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) and value else {f"{before}{key}": value}
    return found


def kinds(explained: Any, kind: str) -> str:
    return "\n".join(str(one) for one in explained.findings if one.kind == kind)


def rename(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**config, **{key.replace("__", "."): value for key, value in more.items()}}


@pytest.fixture(scope="module")
def explained() -> dict[str, Any]:
    return {f"{one['system']} {one['example']}": hf.explain(one["config"]) for one in EXAMPLES}


NAMES = [f"{one['system']} {one['example']}" for one in EXAMPLES]


@each("name, one", [*zip(NAMES, EXAMPLES, strict=True)])
def test_every_example_has_the_numbers_of_its_systems_own_formulas(explained, name, one):
    found = explained[name]
    assert found.system == one["system"]
    assert one["oracle"]
    for row, told in one["oracle"].items():
        assert found[row] == told["value"], f"{row}: {told['formula']} ({told['source']})"


def test_four_examples_of_each_system_and_none_of_them_breaks_a_rule(explained):
    for system in ("verl", "TRL", "OpenRLHF", "NeMo-RL"):
        assert sum(name.startswith(system) for name in NAMES) >= 4
    assert {name: kinds(one, "broken") for name, one in explained.items() if kinds(one, "broken")} == {}


def test_no_example_has_a_key_that_could_change_its_batches(explained):
    assert {name: one.withheld["sizes"] for name, one in explained.items() if "sizes" in one.withheld} == {}
    odd = {key: said for one in explained.values() for key, said in one.unread.items() if "other releases" in said}
    assert odd["algo.advantage.is_correction_enable"].endswith("it could change how the model learns")


@each("system", ["verl", "TRL", "OpenRLHF", "NeMo-RL"])
def test_every_key_that_is_read_is_a_key_of_the_release(system):
    from hfsdk.configs import nemo_rl, openrlhf, trl, verl

    read = {
        "verl": verl.DEFAULTS, "TRL": trl.GRPO_DEFAULTS | trl.PPO_DEFAULTS, "OpenRLHF": openrlhf.DEFAULTS,
        "NeMo-RL": nemo_rl.GRPO_DEFAULTS | nemo_rl.PPO_DEFAULTS,
    }[system]  # fmt: skip
    known = known_keys(system)
    elsewhere = {key for key in read if key not in known and not any(one.startswith(f"{key}.") for one in known)}
    earlier = {"max_prompt_length", "torch_dtype", "reward_model.enable", "reward_model.model.path"}
    environment = {key for key in elsewhere if key.isupper()}
    passed_on = {key for key in elsewhere if key.startswith(("deepspeed.", "deepspeed_config.", "model_init_kwargs."))}
    assert elsewhere <= earlier | environment | passed_on


# ---------------------------------------------------------------- the same step in hfsdk


@pytest.mark.parametrize(
    "name",
    ["run_qwen2_5_32b_fsdp.sh", "lora_without_regret.md", "train_ppo_with_reward_fn.sh", "2n8g-fsdp2tp1-noncolocated.yaml"],
)
def test_the_code_runs_as_pasted_and_is_what_was_simulated(name):
    found = hf.explain(example(name))
    space: dict[str, Any] = {}
    exec(found.code, space)
    with space["session"] as session:
        for made in (space["step"].actor, space["step"].critic):
            if made is not None:
                made.wait()
        assert found.trace is not None
        assert session.trace.duration_s == pytest.approx(found.trace.duration_s)
        assert {span.role for span in found.trace.calls.spans} >= {"actor", "reward"}
        assert session.cluster.num_devices == sum(found.step.pools.values())
        assert len(space["step"].batch) == found["samples"]


LORAS = {
    "verl": ({"actor_rollout_ref.model.lora_rank": 32, "actor_rollout_ref.model.lora_alpha": 64}, "linear", 64),
    "TRL": ({"use_peft": True, "lora_r": 32, "lora_target_modules": ["q_proj", "o_proj"]}, ("q_proj", "o_proj"), 32),
    "OpenRLHF": ({"ds.lora.rank": 32}, "linear", 16),
    "NeMo-RL": (
        {"policy.dtensor_cfg.lora_cfg.enabled": True, "policy.dtensor_cfg.lora_cfg.dim": 32}, "linear", 32
    ),
}  # fmt: skip
"""System -> keys, the layers and the alpha that they ask for."""


@each("system, name", [
    ("verl", "run_qwen3_8b_fsdp.sh"), ("TRL", "lora_without_regret.md"), ("OpenRLHF", "train_ppo_with_reward_fn.sh"),
    ("NeMo-RL", "2n8g-fsdp2tp1-noncolocated.yaml"),
])  # fmt: skip
def test_lora_is_read_counted_and_written(system, name):
    keys, targets, alpha = LORAS[system]
    config = flat(example(name))
    off = {"use_peft": False} if system == "TRL" else {}
    full, found = hf.explain({**config, **off}), hf.explain({**config, **keys})
    actor = next(role for role in found.step.roles if role.name == "actor")
    assert actor.lora == hf.LoRA(rank=32, alpha=alpha, targets=targets)
    assert "lora=hf.LoRA(rank=32" in found.code
    assert "upper bound" not in kinds(found, "note")
    spec = specs_of(found.step, None)["actor"]
    whole = parameters_of(replace(actor, lora=None), spec)
    assert parameters_of(actor, spec) == whole + learned_of(actor, spec)
    ranks = actor.layout.tp * actor.layout.pp
    assert AdapterSpec.of(spec, actor.lora).num_parameters() // ranks <= learned_of(actor, spec) < whole // 20
    for with_lora, without in zip(found.memory, full.memory, strict=True):
        assert all(with_lora.parts[part] <= without.parts[part] for part in ("gradients", "optimizer"))
        if "actor" in without.roles and without.phase == "learning":
            assert with_lora.roles["actor"] < without.roles["actor"]


def test_a_reference_that_is_the_actor_without_adapters_holds_nothing():
    lora = {"actor_rollout_ref.model.lora_rank": 8}
    full, found = hf.explain(rename(DOUBTS), model="llama-7b"), hf.explain({**DOUBTS, **lora}, model="llama-7b")
    assert next(role for role in found.step.roles if role.name == "reference").base_of == "actor"
    held = {one.phase: one.roles for one in found.memory}
    assert held["learning"]["reference"] == 0 < {one.phase: one.roles for one in full.memory}["learning"]["reference"]
    away = {f"{A}fsdp_config.param_offload": True}
    prepared = next(one for one in hf.explain({**DOUBTS, **lora, **away}, model="llama-7b").memory if one.phase == "preparation")
    assert prepared.parts["weights"] > 0, "the actor's weights come back for the reference's pass"


@each("odd", ["lm_head", ".*attn.*"])
def test_layers_that_have_no_adapters_here_are_told(odd):
    asked = {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.target_modules": ["q_proj", odd]}
    found = hf.explain({**DOUBTS, **asked}, model="llama-7b")
    assert odd in kinds(found, "note")
    assert found.step.roles[0].lora.targets == "linear"


NAMED = [
    ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "hf.GSPO(max_new_tokens=512, clip=0.2"),
    ({"loss_type": "cispo", "epsilon_high": 3.0}, "hf.CISPO(max_new_tokens=512, clip_high=2.0"),
    ({"loss_type": "dr_grpo"}, "hf.DrGRPO("),
    ({"use_vllm": True}, "tis_cap=3.0, tis_level='sequence', tis_bounds='mask'"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "hf.GSPO("),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov", "n=4, mini_batches=4, share=0.0002, old_kl_coef=0.1"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", "hf.ClipCov("),
    ("algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.5_2.0",
     "tis_cap=2.0, tis_floor=0.5, tis_bounds='mask'"),
    ("algorithm.rollout_correction.rollout_is=geometric algorithm.rollout_correction.rollout_is_batch_normalize=True",
     "tis_cap=2.0, tis_level='geometric', tis_normalise=True"),
    ({"loss_type": "sapo", "sapo_temperature_neg": 1.2}, "hf.SAPO(max_new_tokens=512, tau_neg=1.2"),
    ({"multi_objective_aggregation": "normalize_then_sum"}, "hf.GDPO("),
    ({"beta": 0.04}, "kl_by_ratio=True"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo actor_rollout_ref.actor.tau_pos=0.5", "hf.SAPO(max_new_tokens=512, n=4, "
     "mini_batches=4, tau_pos=0.5"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean actor_rollout_ref.actor.clip_ratio_low=0.3",
     "hf.GMPO(max_new_tokens=512, n=4, clip=0.3, clip_high=0.2"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=gpg algorithm.adv_estimator=gpg", "hf.GPG("),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl actor_rollout_ref.actor.clip_ratio_low=0.05 "
     "actor_rollout_ref.actor.clip_ratio_high=0.05", "divergence='kl', ratio_cap=3.0"),
    ("algorithm.adv_estimator=gdpo", "hf.GDPO("),
    ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=kl+", "kl='k1+'"),
    ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=mse", "kl='k2'"),
    ("actor_rollout_ref.actor.use_kl_loss=True algorithm.adv_estimator=reinforce_plus_plus_baseline", "kl='k3'"),
    ("algorithm.use_kl_in_reward=True algorithm.adv_estimator=rloo algorithm.kl_penalty=low_var_kl", "kl='k3'"),
    ("algorithm.adv_estimator=opo", "hf.OPO("),
    ("algorithm.adv_estimator=reinforce_plus_plus_baseline", "hf.ReinforcePlusPlusBaseline("),
]  # fmt: skip


@each("config, code", NAMED)
def test_the_algorithm_that_a_configuration_names_is_hfsdks_own(config, code):
    if isinstance(config, str):
        given = {"algorithm.adv_estimator": "grpo", **dict(word.split("=") for word in config.split())}
        config = {"actor_rollout_ref.rollout.n": 4, "actor_rollout_ref.model.path": "of/nobody", **given}
    found = hf.explain({"num_generations": 8, **config} if "actor_rollout_ref.rollout.n" not in config else config)
    assert code in found.code.replace("aggregation='token_mean', ", "")
    assert "hfsdk has no" not in found.code


@each("config", [
    {f"{A}policy_loss.loss_mode": "gpg"}, {"algorithm.adv_estimator": "gpg"}, {"algorithm.adv_estimator": "grpo_passk"},
    {"algorithm.adv_estimator": "gdpo", f"{A}policy_loss.loss_mode": "sapo"},
])  # fmt: skip
def test_what_is_half_an_algorithm_of_hfsdks_is_told_as_none(config):
    assert "hfsdk has no" in hf.explain({**DOUBTS, **config}).code


def test_keys_of_gdpo_are_known_and_change_what_is_learned_alone():
    keys = {"algorithm.gdpo_reward_keys": ["accuracy", "format"], "algorithm.gdpo_reward_weights": [1.0, 0.5]}
    found = hf.explain({**DOUBTS, "algorithm.adv_estimator": "gdpo", **keys})
    assert set(found.withheld) == {"learning"}
    assert found["samples"] == 5120


def test_code_of_a_model_that_is_no_preset_holds_its_numbers():
    spec = hf.ModelSpec(name="mine", num_layers=4, hidden_size=256, mlp_hidden_size=512, num_heads=4, num_kv_heads=4, head_dim=64,
                        vocab_size=1000, max_positions=4096)  # fmt: skip
    found = hf.explain(rename(DOUBTS, trainer__n_gpus_per_node=8), model=spec)
    space: dict[str, Any] = {}
    exec(found.code, space)
    with space["session"] as session:
        assert session.models.actor.role.model == spec


def test_a_model_whose_size_is_unknown_leaves_memory_and_time_out_and_says_so():
    found = hf.explain(DOUBTS)
    assert (found.memory, found.trace) == ((), None)
    assert "deepseek-llm-7b-chat" in found.no_trace
    assert "actor, reference" in found.no_trace
    assert found["optimizer steps"] == 4
    known = hf.explain(DOUBTS, model="llama-7b")
    assert known.memory
    assert known.trace is not None


# ---------------------------------------------------------------- what users ask


def test_verl_1524_what_is_counted_in_prompts_and_what_in_samples():
    found = hf.explain(DOUBTS)
    assert [found[name] for name in ("samples", "mini-batch", "mini-batch per rank", "gradient accumulation",
        "optimizer steps")] == [
        5120, 1280, 160, 2, 4,
    ]  # fmt: skip
    assert kinds(found, "broken") == ""
    rows = {row.name: row.how for row in found.arithmetic}
    assert "counted in prompts" in rows["mini-batch"]
    assert "not multiplied by rollout.n" in rows["micro-batch per rank"]


def test_verl_2333_three_nodes_with_a_gpu_each():
    asked = {
        "algorithm.adv_estimator": "grpo", "trainer.nnodes": 3, "trainer.n_gpus_per_node": 1, "data.train_batch_size": 4,
        f"{R}n": 3,
        f"{R}log_prob_micro_batch_size_per_gpu": 2, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2,
        f"{R}tensor_model_parallel_size": 1, f"{A}ppo_micro_batch_size_per_gpu": 2,
    }  # fmt: skip
    wrong = kinds(hf.explain(asked), "broken")
    assert "at least ppo_mini_batch_size" in wrong
    assert "256 x 3 = 768" not in wrong
    right = hf.explain({**asked, f"{A}ppo_mini_batch_size": 4})
    assert kinds(right, "broken") == ""
    assert [right[row] for row in ("samples", "mini-batch per rank", "gradient accumulation", "optimizer steps")] == [12, 4, 2, 1]


def test_verl_3095_the_advice_of_a_broken_rule_mends_it():
    found = hf.explain({**DOUBTS, f"{A}ppo_micro_batch_size_per_gpu": 48})
    (wrong,) = [one for one in found.findings if one.kind == "broken"]
    assert "256 x 5 / 8 = 160 samples, 48" in wrong.got
    assert wrong.source == "verl 0.9.1, verl/workers/engine/utils.py, prepare_micro_batches"
    (mended,) = re.findall(r"Take (\d+)", wrong.do)
    assert kinds(hf.explain({**DOUBTS, f"{A}ppo_micro_batch_size_per_gpu": int(mended)}), "broken") == ""


def test_nemo_rl_3793_the_default_of_ppo_runs_out_of_memory_in_the_log_probs():
    """Its report shows the error in ``get_logprobs``, on one GPU; the phase before it went."""
    found = hf.explain(example("ppo_math_1B.yaml"))
    over = {one.phase: one.over for one in found.memory}
    assert over["generation"] < 0 < over["preparation"]
    assert "logprob_batch_size" in kinds(found, "does not fit")
    mended = {"policy": {**example("ppo_math_1B.yaml")["policy"], "train_micro_batch_size": 1}}
    mended["policy"]["dtensor_cfg"] = {**mended["policy"]["dtensor_cfg"], "activation_checkpointing": True}
    less = {one.phase: one.over for one in hf.explain({**example("ppo_math_1B.yaml"), **mended}).memory}
    assert less["preparation"] < 0


def test_nemo_rl_3005_logits_in_fp32_are_what_its_error_said():
    """4 samples x 4096 tokens x 151936 x 4 bytes = 9.27 GiB, "exactly matching the OOM"; two of them are counted."""
    config = {"policy.model_name": "Qwen/Qwen3-8B", "policy.logprob_batch_size": 4, "policy.max_total_sequence_length": 4096,
              "policy.sequence_packing.enabled": False, "grpo.num_prompts_per_step": 32, "cluster.gpus_per_node": 8}  # fmt: skip
    one = next(one for one in hf.explain(config).memory if one.phase == "preparation")
    logits = 4 * 4096 * 151936 * 4
    assert logits == pytest.approx(9.27 * 2**30, rel=1e-3)
    assert 2 * logits < one.parts["working"] < 2 * logits + 3e9


def test_trl_2688_vllm_beside_the_trainer_takes_its_share_of_the_whole_device():
    config = {"per_device_train_batch_size": 8, "num_generations": 8, "use_vllm": True, "model_name_or_path": "Qwen/Qwen2.5-3B",
              "model_init_kwargs": {"dtype": "bfloat16"}}  # fmt: skip
    much = hf.explain({**config, "vllm_gpu_memory_utilization": 0.9}, cluster="1x8 H100", prompt_tokens=512)
    assert much.memory[0].over > 0
    assert "vllm_gpu_memory_utilization" in kinds(much, "does not fit")
    assert much.memory[0].parts["rollout"] + much.memory[0].parts["kv_cache"] == 72 * 10**9
    assert kinds(hf.explain(config, cluster="1x8 H100", prompt_tokens=512), "does not fit") == ""


@each(
    "system, base, change, rule",
    [
        ("verl", DOUBTS, {"data.train_batch_size": 1023}, "must be a multiple of the number of GPUs"),
        ("verl", DOUBTS, {"data.train_batch_size": 128}, "at least ppo_mini_batch_size"),
        ("verl", DOUBTS, {f"{A}ppo_mini_batch_size": 7}, "multiple of the data-parallel ranks"),
        ("verl", DOUBTS, {f"{A}ppo_micro_batch_size": 256}, "exclude each other"),
        ("verl", DOUBTS, {f"{A}ppo_micro_batch_size_per_gpu": None}, "must be set"),
        ("verl", DOUBTS, {f"{R}log_prob_micro_batch_size_per_gpu": None}, "must be set"),
        ("verl", DOUBTS, {f"{R}log_prob_micro_batch_size_per_gpu": 300}, "a rank's samples must be a multiple"),
        ("verl", DOUBTS, {f"{R}tensor_model_parallel_size": 3}, "multiple of the rollout's tp"),
        ("verl", DOUBTS, {f"{A}use_dynamic_bsz": True, f"{A}ppo_max_token_len_per_gpu": 512}, "must hold one longest sample"),
        ("verl", DOUBTS, {f"{R}log_prob_use_dynamic_bsz": True}, "must be the same"),
        ("verl", DOUBTS, {"model_engine": "megatron", f"{A}megatron.tensor_model_parallel_size": 3}, "multiple of tp x pp x cp"),
        ("TRL", {"per_device_train_batch_size": 1}, {"num_generations": 8}, "groups are whole"),
        ("TRL", {"per_device_train_batch_size": 4}, {"num_generations": 1}, "at least 2"),
        ("TRL", {"per_device_train_batch_size": 4}, {"generation_batch_size": 16, "steps_per_generation": 2}, "exclude each other"),
        ("TRL", {"per_device_train_batch_size": 4}, {"generation_batch_size": 18}, "must be a multiple of per_device"),
        ("TRL", {"per_device_train_batch_size": 3}, {"num_ppo_epochs": 1, "num_mini_batches": 2}, "multiple of num_mini_batches"),
        ("OpenRLHF", "train_dapo_ray_hybrid_engine.sh", {"train.batch_size": 100}, "a whole number of accumulated passes"),
        ("OpenRLHF", "train_dapo_ray_hybrid_engine.sh", {"vllm.num_engines": 3}, "vllm.num_engines x vllm.tensor_parallel_size"),
        ("OpenRLHF", "train_dapo_ray_hybrid_engine.sh", {"rollout.n_samples_per_prompt": 1}, "and there is one"),
        ("OpenRLHF", "train_dapo_ray_hybrid_engine.sh", {"ref.num_gpus_per_node": 4}, "as many GPUs as the actor"),
        ("OpenRLHF", "train_dapo_ray_hybrid_engine.sh", {"train.batch_size": 2048}, "fewer samples than train.batch_size"),
        ("OpenRLHF", "train_dapo_ray_hybrid_engine.sh", {"rollout.micro_batch_size": 512}, "at least the data-parallel ranks"),
        ("NeMo-RL", "grpo_math_8B.yaml", {"policy.train_global_batch_size": 100}, "multiple of the data-parallel ranks"),
        ("NeMo-RL", "grpo_math_8B.yaml", {"policy.train_global_batch_size": 4096}, "it makes no optimizer step"),
        ("NeMo-RL", "grpo_math_8B.yaml", {"policy.dtensor_cfg.tensor_parallel_size": 3}, "multiple of pp x cp x tp"),
        ("NeMo-RL", "grpo_math_8B.yaml", {"policy.dynamic_batching.enabled": True}, "exclude each other"),
        ("NeMo-RL", "grpo_math_8B.yaml", {"policy.megatron_cfg.enabled": True}, "one of policy.dtensor_cfg and"),
        ("NeMo-RL", "grpo_math_8B.yaml", {"policy.sequence_packing.train_mb_tokens": 100}, "must hold one longest sample"),
        ("NeMo-RL", "grpo_math_8B_megatron.yaml", {"policy.dynamic_batching.enabled": True}, "a single pipeline stage"),
        ("NeMo-RL", "grpo_math_70B_megatron.yaml", {"policy.logprob_batch_size": 2}, "must be the same"),
        ("NeMo-RL", "grpo_math_8B.yaml", {"loss_fn.force_on_policy_ratio": True}, "force_on_policy_ratio needs"),
        ("NeMo-RL", "grpo_math_8B.yaml", {"policy.generation.vllm_cfg.tensor_parallel_size": 3}, "multiple of vLLM's tp x pp"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named_with_its_numbers_its_source_and_what_to_do(system, base, change, rule):
    config = example(base) if isinstance(base, str) else base
    overrides = [f"{key}={'null' if value is None else value}" for key, value in change.items()]
    found = hf.explain(config, overrides, system=system, model={} if system == "TRL" else None)
    wrong = [one for one in found.findings if one.kind == "broken" and rule in one.rule]
    assert wrong, kinds(found, "broken")
    assert all(one.got and one.do.endswith(".") and system in one.source for one in wrong)


# ---------------------------------------------------------------- memory


def test_the_states_of_fsdp_are_sixteen_bytes_a_parameter_over_all_ranks():
    found = hf.explain(example("run_qwen2_5_32b_fsdp.sh"))
    actor, spec = found.step.roles[0], spec_named("Qwen/Qwen2.5-32B")
    learning = {one.phase: one for one in found.memory}["learning"]
    whole = sum(learning.parts[part] for part in ("weights", "gradients", "optimizer"))
    assert spec is not None
    assert whole * 16 / 16 == pytest.approx(spec.num_parameters(), rel=0.01)
    assert parameters_of(actor, spec) == pytest.approx(spec.num_parameters(), rel=0.01)
    reference = found.step.roles[1]
    assert "weights" in reference.away["learning"]


def test_of_hfsdks_own_configuration_the_fullest_phase_is_what_place_checks():
    with hf.Session.simulated("1x4 H100") as session:
        actor = session.actor("qwen2.5-1.5b", train="tp2", rollout="tp2", dtype="bf16", optimizer=hf.AdamW(lr=1e-6,
            distributed=True),
                              rollout_options=hf.RolloutOptions(kv_cache_bytes=10**9, max_num_seqs=64))  # fmt: skip
        session.reference(actor)
        session.reward(lambda completions: [0.0] * len(completions))
        session.place("colocate")
        found = hf.explain(hf.GRPO(n=4, mini_batches=2, max_new_tokens=128), session=session, prompts=8, prompt_tokens=64)
        (planned, *_) = device_bytes([h.role for h in session.roles], session.placement.placement, session.cluster)
    assert max(one.asked for one in found.memory) == planned.asked
    assert [found[row] for row in ("samples", "mini-batch", "optimizer steps", "data-parallel ranks")] == [32, 16, 2, 2]
    assert found.system == "hfsdk"
    assert found.memory[0].parts["process"] == GPU_PROCESS_BYTES


def test_more_of_what_a_phase_needs_never_needs_less():
    base = example("run_qwen2_5_32b_fsdp.sh")

    def learning(**more: Any) -> int:
        return {one.phase: one for one in hf.explain({**base, **more}).memory}["learning"].asked

    assert learning(**{f"{A}ppo_micro_batch_size_per_gpu": 4}) > learning()
    assert learning(**{"trainer.nnodes": 4}) < learning()
    assert learning(**{"actor_rollout_ref.model.enable_gradient_checkpointing": False}) > learning()


# ---------------------------------------------------------------- forms of one configuration


@dataclass
class GRPOConfig:
    """The fields of TRL's that matter, made as its ``__post_init__`` makes them."""

    output_dir: str = ""
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_generations: int = 8
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    max_completion_length: int = 512
    report_to: list[str] = field(default_factory=list)


def rows(found: Any) -> dict[str, float | None]:
    return {row.name: row.value for row in found.arithmetic}


def test_a_dict_words_a_file_and_overrides_say_the_same(tmp_path):
    nested: dict[str, Any] = {}
    for key, value in DOUBTS.items():
        *parents, last = key.split(".")
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    path = tmp_path / "ppo.yaml"
    yaml = pytest.importorskip("yaml")
    path.write_text(yaml.safe_dump(nested))
    words = [f"{key}={value}" for key, value in DOUBTS.items()]
    forms = [
        nested,
        str(path),
        path,
        words,
        "python3 -m verl.trainer.main_ppo \\\n " + " \\\n ".join(words),
        ["+" + word for word in words],
    ]
    assert [rows(hf.explain(form)) for form in forms] == [rows(hf.explain(DOUBTS))] * len(forms)
    assert hf.explain(path, ["data.train_batch_size=512"])["samples"] == 2560


def test_trls_object_says_what_its_fields_say():
    made = GRPOConfig(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, generation_batch_size=32, steps_per_generation=2
    )
    found = hf.explain(made)
    assert [found[row] for row in ("samples", "data-parallel ranks", "optimizer steps")] == [32, 4, 1]
    assert kinds(found, "broken") == ""
    fields = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_processes": 4}
    assert rows(found) == rows(hf.explain(fields, system="TRL"))


def test_openrlhfs_command_line_and_its_names_of_before():
    now = hf.explain(
        "train_ppo_ray --train.colocate_all --rollout.batch_size 256 --rollout.n_samples_per_prompt 4 --train.batch_size 128 "
        "--actor.eps_clip_low_high 0.2 0.27 --ds.adam_offload --actor.num_gpus_per_node 4 --ref.num_gpus_per_node 4"
    )
    before = hf.explain(
        "--colocate_all_models --rollout_batch_size 256 --n_samples_per_prompt 4 --train_batch_size 128 --adam_offload "
        "--actor_num_gpus_per_node 4 --ref_num_gpus_per_node=4 --flash_attn --micro_train_batch_size 1"
    )
    assert rows(now) == rows(before)
    assert now["samples"] == 1024
    assert now.step.options["clip_high"] == 0.27
    assert now.step.roles[0].never == ("optimizer",)
    assert before.unread["rollout_batch_size"].startswith("read as rollout.batch_size")
    assert before.unread["flash_attn"] == "a key of other releases than OpenRLHF 0.11.2"


def test_nemo_rl_inherits_from_files_beside_it_and_resolves_references(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "base.yaml").write_text(
        "grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4}\n"
        "policy:\n  model_name: Qwen/Qwen3-4B\n  max_total_sequence_length: 1024\n  train_global_batch_size: 16\n"
        "  sequence_packing: {enabled: true, train_mb_tokens: '${mul:${policy.max_total_sequence_length}, 2}'}\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "defaults: base.yaml\ngrpo: {num_generations_per_prompt: 16}\ncluster: {gpus_per_node: 2}\n"
    )
    found = hf.explain(tmp_path / "mine.yaml")
    assert [found[row] for row in ("samples", "micro-batch tokens per rank", "optimizer steps")] == [128, 2048, 8]
    assert found.defaults["policy.generation.vllm_cfg.gpu_memory_utilization"] == 0.6


def test_what_is_given_is_read_or_listed_and_defaults_are_told():
    given = {**DOUBTS, "trainer.save_freq": 20, "data.shuffle": True, "trainer.critic_warmup": 5}
    found = hf.explain(given)
    assert found.unread == {
        "trainer.save_freq": "a key of verl 0.9.1", "data.shuffle": "a key of verl 0.9.1, at its default",
        "trainer.critic_warmup": "a key of verl 0.9.1; it could change how the model learns",
    }  # fmt: skip
    assert "# not carried over: trainer.critic_warmup" in found.code
    assert found.defaults["data.max_prompt_length"] == 512
    assert found.defaults.keys().isdisjoint(given)
    assert "devices" in found.assumed


# ---------------------------------------------------------------- a number that an unread key could change


FEW = {
    **DOUBTS, "data.train_batch_size": 64, f"{A}ppo_mini_batch_size": 16, f"{A}ppo_micro_batch_size_per_gpu": 2,
    f"{R}log_prob_micro_batch_size_per_gpu": 8, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
}  # fmt: skip
"""64 prompts of 5 responses: 320 samples."""


NEMO_TURNS = {
    "policy.model_name": "Qwen/Qwen2.5-0.5B", "policy.max_total_sequence_length": 2048, "policy.generation.max_new_tokens": 512,
    "grpo.num_prompts_per_step": 32, "cluster.gpus_per_node": 8, "policy.train_micro_batch_size": 1,
}  # fmt: skip


def numbers(found: Any) -> list[Any]:
    """Return all that an explanation says in numbers."""
    said = [row.value for row in found.arithmetic] + [found.memory, found.trace, found.code, found.cluster, *found.assumed.values()]
    return [one for one in said if one]


@each("key, said", [
    ("trainer.test_frec", "did you mean trainer.test_freq?"), ("my.own.key", "no such key"),
    (f"{R}over_sample_rate", "a key of verl 0.9.1"), ("data.max_responce_length", "did you mean data.max_response_length?"),
])  # fmt: skip
def test_where_a_key_could_change_every_number_none_is_given(key, said):
    given = {**FEW, key: 0.5}
    found = hf.explain(given, model="qwen2.5-0.5b")
    assert found.unread[key].endswith("it could change every number")
    assert said in found.unread[key]
    assert numbers(found) == []
    assert [one.kind for one in found.findings] == ["not read"]
    assert f"['~{key}']" in str(found)
    assert "no numbers: keys that are not read could change them" in str(found)
    for table in ("arithmetic", "roles", "memory"):
        assert "320" not in found.to_pandas(table).to_string()
    assert rows(hf.explain(given, [f"~{key}"], model="qwen2.5-0.5b")) == rows(hf.explain(FEW, model="qwen2.5-0.5b"))


@each("key, value, kind", [
    (f"{A}fsdp_config.forward_prefetch", True, "memory"), (f"{R}engine_kwargs.vllm.swap_space", 4, "seconds"),
    ("algorithm.filter_groups.enable", True, "generated"), (f"{A}grad_clip", 0.5, "learning"),
])  # fmt: skip
def test_what_a_key_could_change_is_left_out_and_the_rest_is_said(key, value, kind):
    plain, found = hf.explain(FEW, model="qwen2.5-0.5b"), hf.explain({**FEW, key: value}, model="qwen2.5-0.5b")
    assert key in found.withheld[kind]
    assert bool(found.memory) is ("memory" not in found.withheld)
    assert bool(found.trace) is ("seconds" not in found.withheld)
    without = [name for name, value in rows(found).items() if value is None]
    assert without == ["tokens generated"] * ("generated" in found.withheld)
    assert {name: value for name, value in rows(plain).items() if name not in without}.items() <= rows(found).items()
    assert (f"not carried over: {key}" in found.code) is (kind == "learning")


@each("config, kinds, response", [
    ({**NEMO_TURNS, "grpo.max_rollout_turns": 1}, [], 512), ({**NEMO_TURNS, "grpo.max_rollout_turns": 8}, ["seconds"], 1024),
    ({**FEW, f"{R}multi_turn.enable": True}, ["seconds"], 512),
    ({"rollout.batch_size": 64, "data.max_len": 1024, "train.agent_func_path": "agent.py"}, ["generated", "seconds"], 512),
])  # fmt: skip
def test_turns_of_an_agent_leave_out_what_hangs_on_them(config, kinds, response):
    """NeMo-RL's ``rollouts.py`` goes on up to ``max_total_sequence_length``; verl's response holds all turns."""
    found = hf.explain(config, prompt_tokens=1024 if "policy.model_name" in config else None)
    assert sorted(found.withheld) == kinds
    assert found.step.response_tokens == response


def test_sizes_of_verls_engine_are_carried_over():
    code = hf.explain({**FEW, f"{R}max_num_seqs": 64, f"{R}max_num_batched_tokens": 2048}, model="qwen2.5-0.5b").code
    assert "hf.RolloutOptions(max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=2048)" in code


@each("key, value", [
    ("data.shuffle", True), ("data.shuffle", "True"), (f"{R}disable_log_stats", False), ("critic.ppo_mini_batch_size", 7),
    (f"{A}megatron.sequence_parallel", False), (f"{A}profiler.whatever", 1),
])  # fmt: skip
def test_what_is_at_its_default_or_of_a_part_that_is_not_in_use_changes_nothing(key, value):
    found = hf.explain({**FEW, key: value}, model="qwen2.5-0.5b")
    assert found.withheld == {}
    assert rows(found) == rows(hf.explain(FEW, model="qwen2.5-0.5b"))


@each("system", ["verl", "TRL", "OpenRLHF", "NeMo-RL"])
def test_of_every_key_of_a_release_it_is_known_what_it_could_change(system):
    from hfsdk.configs import nemo_rl, openrlhf, trl, verl
    from hfsdk.configs.unread_keys import is_listed

    read = {
        "verl": verl.DEFAULTS, "TRL": trl.GRPO_DEFAULTS | trl.PPO_DEFAULTS, "NeMo-RL": nemo_rl.GRPO_DEFAULTS | nemo_rl.PPO_DEFAULTS,
        "OpenRLHF": openrlhf.DEFAULTS | openrlhf.OLD_DEFAULTS | openrlhf.OLD_NAMES,
    }[system]  # fmt: skip
    assert [key for key in known_keys(system) if key not in read and not is_listed(system, key)] == []


# ---------------------------------------------------------------- what is none


@each(
    "config, more, named",
    [
        ("nowhere/grpo.yaml", {}, ["nowhere/grpo.yaml", "Check the path"]),
        (7, {}, ["a path of a YAML file, a dict"]),
        ({"learning_rate": 1.0}, {}, ["no keys of a system"]),
        ({}, {}, ["no keys"]),
        ({**DOUBTS, "data.train_batch_size": "many"}, {}, ["data.train_batch_size", "'many'"]),
        ({**DOUBTS, "data.train_batch_size": 1.5}, {}, ["data.train_batch_size", "1.5"]),
        ({**DOUBTS, f"{A}use_kl_loss": "perhaps"}, {}, [f"{A}use_kl_loss", "'perhaps'"]),
        ({**DOUBTS, f"{R}n": "${oc.env:N}"}, {}, [f"{R}n", "${oc.env:N}"]),
        ({**DOUBTS, f"{R}n": "${nothing.here}"}, {}, [f"{R}n", "'nothing.here'"]),
        ({**DOUBTS, f"{R}n": f"${{{R}n}}"}, {}, [f"{R}n", "itself"]),
        ("data.train_batch_size=$BATCH", {}, ["$BATCH", "shell"]),
        ("data.train_batch_size='4", {}, ["words"]),
        (DOUBTS, {"gpu": "B300"}, ["B300", "H100"]),
        (DOUBTS, {"system": "slime"}, ["slime", "verl"]),
        (DOUBTS, {"model": {"judge": "llama-7b"}}, ["'judge'", "actor"]),
        (DOUBTS, {"overrides": ["four"]}, ["overrides", "four"]),
    ],
)
def test_what_is_no_configuration_is_refused_with_what_to_do(config, more, named):
    with refuses(hf.OptionError, *named):
        hf.explain(config, **more)


def test_a_configuration_of_which_a_system_knows_less_than_half_is_not_its_own_unless_that_is_said():
    strange = {"num_generations": 8, "per_device_train_batch_size": 8, **{f"of_another.{number}": number for number in range(3)}}
    with refuses(hf.OptionError, "5 keys", "TRL knows 2", "system='TRL'"):
        hf.explain(strange)
    assert hf.explain(strange, system="TRL").withheld["sizes"] == ("of_another.0", "of_another.1", "of_another.2")
    del strange["of_another.0"]
    assert hf.explain(strange).system == "TRL"


def test_a_sign_of_another_system_does_not_outweigh_many():
    words = {f"{A}optim.{key}": 0 for key in ("lr_warmup_steps", "weight_decay")} | {"gconfig.n": 1}
    assert hf.explain({**DOUBTS, **words}, ["~gconfig.n"]).system == "verl"
    assert hf.explain({**DOUBTS, **words}).withheld["sizes"] == ("gconfig.n",)
    with refuses(hf.OptionError, "AReaL"):
        hf.explain({"data.train_batch_size": 8, f"{R}n": 4, "gconfig.n": 1, "allocation_mode": "d1"})


def test_files_that_are_no_configuration_are_refused(tmp_path):
    pytest.importorskip("yaml")
    cases = {
        "broken.yaml": ("a: [1, 2", "no YAML"), "list.yaml": ("- 1\n- 2\n", "a mapping of keys"),
        "runs.yaml": ("a: !!python/object/apply:os.system ['true']\n", "no YAML"),
        "loop.yaml": ("defaults: loop.yaml\n", "itself"), "self.yaml": ("a: &x\n  b: *x\n", "levels deep"),
    }  # fmt: skip
    for name, (text, told) in cases.items():
        (tmp_path / name).write_text(text)
        with refuses(hf.OptionError, told):
            hf.explain(tmp_path / name)


def test_a_launcher_s_words_and_a_module_s_name_are_read():
    base = "--per_device_train_batch_size 4 --num_generations 8 --model_name_or_path Qwen/Qwen2.5-7B"
    plain = hf.explain(f"--num_processes=4 {base}")
    line = f"accelerate launch --num_processes 4 grpo.py {base}"
    assert rows(hf.explain(line)) == rows(hf.explain(line.split())) == rows(plain)
    assert plain.cluster.num_devices == 4
    told = hf.explain("python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-7B --train_batch_size 128 --zero_stage 3")
    assert told.step.system == "OpenRLHF"
    assert hf.explain(f"--remote_rm_url reward.py {base}").step.system == "TRL"


TRL_KEYS = {"per_device_train_batch_size": 4, "num_generations": 8, "gradient_accumulation_steps": 2}


@each(
    "config, key",
    [
        *(({**TRL_KEYS, key: 0}, key) for key in (*TRL_KEYS, "num_iterations", "vllm_tensor_parallel_size")),
        *(({"policy": {"train_global_batch_size": 512, "dtensor_cfg": {"tensor_parallel_size": 0}}},
           "policy.dtensor_cfg.tensor_parallel_size"),),
        *(({"grpo.num_prompts_per_step": 32, key: 0}, key)
          for key in ("policy.train_global_batch_size", "grpo.num_generations_per_prompt", "cluster.gpus_per_node")),
        *(({"data.train_batch_size": 64, key: 0}, key)
          for key in ("data.train_batch_size", f"{R}n", "trainer.nnodes", "trainer.n_gpus_per_node", f"{A}ppo_epochs")),
        ({"rollout.batch_size": 64, "actor.num_gpus_per_node": 0}, "actor.num_gpus_per_node"),
    ],
)  # fmt: skip
def test_nothing_of_a_kind_is_refused_by_its_key(config, key):
    if "vllm" in key:
        config = {**config, "use_vllm": True}
    with refuses(hf.OptionError, key, "from 1 to 1,000,000,000", "got 0"):
        hf.explain(config)


@each("value", [0, -0.1, 1.5])
def test_a_share_of_memory_is_one(value):
    with refuses(hf.OptionError, f"{R}gpu_memory_utilization", "above 0 and at most 1", value):
        hf.explain({"data.train_batch_size": 64, f"{R}gpu_memory_utilization": value})


def test_numbers_of_numpy_are_numbers():
    assert rows(hf.explain({key: np.int64(value) for key, value in TRL_KEYS.items()})) == rows(hf.explain(TRL_KEYS))


def test_without_experts_no_rule_of_experts_is_said():
    policy = {"train_global_batch_size": 512, "dtensor_cfg": {"tensor_parallel_size": 3}}
    config = {"policy": policy, "cluster": {"gpus_per_node": 8}}
    said = str(hf.explain(config))
    assert "must be a multiple of pp x cp x tp" in said
    assert "expert" not in said


def test_roles_of_other_names_are_declared_by_their_kind():
    with hf.Session.simulated("1x8 H100") as session:
        session.reference(session.actor("tiny"))
        session.critic("tiny")
        session.critic("tiny", name="cost_critic")
        session.reward("tiny")
        session.cost(lambda completions: [0.0] * len(completions))
        told = hf.explain(hf.SafeRLHF(max_new_tokens=8), session=session, prompts=8)
    assert told.trace is not None
    assert "cost_critic = session.critic(" in told.code
    assert "name='cost_critic'" in told.code
    assert "cost = session.cost(score)" in told.code


@pytest.mark.parametrize("cluster", ["1x8 H100", "2x8 H100"])
def test_of_a_session_its_own_roles_and_places_are_explained(cluster):
    """Every plan of a session, parts of pools and shadows too: as long as planned, and the code says the same."""
    lora, algorithm = hf.LoRA(rank=8), hf.PPO(max_new_tokens=512)
    with hf.Session.simulated(cluster) as session:
        session.reference(session.actor("llama3-8b", dtype="bf16", lora=lora, optimizer=hf.AdamW(distributed=True)))
        session.critic("llama3-8b", dtype="bf16", lora=lora, offload=True, recompute="full")
        session.reward("qwen2.5-0.5b", dtype="bf16")
        plan = session.plan(algorithm, hf.Workload(prompts=64, prompt_tokens=512, response_tokens=512), top=8)
        parts = 0
        for one in (plan, *plan.runners_up):
            session.place(one)
            told = hf.explain(algorithm, session=session, prompts=64, prompt_tokens=512)
            assert told.trace.duration_s == pytest.approx(one.seconds, rel=0.01), one
            assert not [finding for finding in told.findings if finding.kind == "broken"]
            pasted: dict[str, Any] = {}
            exec(compile(told.code, "<code>", "exec"), pasted)
            again = pasted["session"]
            pasted["step"].actor.wait()
            pasted["step"].critic.wait()
            assert again.placement.placement.roles == session.placement.placement.roles
            assert again.trace.duration_s == pytest.approx(one.seconds, rel=0.02)
            again.close()
            parts += any(pool.within for pool in session.placement.placement.pools)
    assert cluster == "2x8 H100" or parts, "no plan had parts of pools, so that was not tried"


def test_on_a_part_of_a_pool_there_is_what_the_whole_has():
    with hf.Session.simulated("1x8 H100") as session:
        session.reference(session.actor("llama3-3b", dtype="bf16", optimizer=hf.AdamW(distributed=True)))
        session.reward("llama3-3b", dtype="bf16")
        session.place("interleaving")
        told = hf.explain(hf.GRPO(max_new_tokens=64), session=session)
    asked = {(one.pool, one.phase): one for one in told.memory}
    whole, part = asked["all", "preparation"], asked["reward", "preparation"]
    assert set(part.roles) == {"actor", "reward"} > set(whole.roles)
    assert part.roles["actor"] >= asked["all", "learning"].parts["optimizer"] > 0
    assert told.step.num_devices == 8


def test_a_session_that_lacks_a_role_is_no_step():
    with hf.Session.simulated("1x8 H100") as session:
        session.actor("tiny")
        session.reward("tiny")
        with refuses(hf.OptionError, "no critic and no reference", "session."):
            hf.explain(hf.PPO(max_new_tokens=8), session=session)


def test_an_algorithm_needs_a_session_with_an_actor():
    with refuses(hf.OptionError, "session=session"):
        hf.explain(hf.GRPO())
    with hf.Session.simulated("1x1 H100") as session, refuses(hf.OptionError, "actor"):
        hf.explain(hf.GRPO(), session=session)


@each(
    "name, preset",
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"), ("Qwen/Qwen2.5-Math-1.5B", "qwen2.5-1.5b"), ("/data/Qwen3-8B", "qwen3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3-8b"), ("meta-llama/Llama-3.2-1B", "llama3-1b"), ("Llama-2-70b-hf",
        "llama-70b"),
        ("Qwen/Qwen3-30B-A3B-GPTQ", None),
            ("Qwen/Qwen2.5-VL-7B-Instruct", None), ("mistralai/Mistral-7B-v0.1", None), ("gpt2", None),
        ("unsloth/Qwen2.5-7B-bnb-4bit", None), ("Qwen/Qwen3-8B-FP8", None), ("org/Llama-3.1-8B-w4a16", None),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", None), ("", None), ("Qwen/Qwen2.5-9B", None),
    ],
)  # fmt: skip
def test_a_name_means_a_preset_or_none(name, preset):
    found = spec_named(name)
    assert (found and found.name) == preset


# ---------------------------------------------------------------- looks


def test_the_picture_the_text_and_the_tables_say_the_same():
    found = hf.explain({**example("run_qwen2_5_32b_fsdp.sh"), f"{R}gpu_memory_utilization": 0.9, "trainer.critic_warmup": 1})
    picture = hf.viz.picture(found)
    text, svg = picture.to_text(), picture.to_svg()
    assert repr(found) == text
    for words in ("does not fit in generation", "5,120 samples / 640", "too much", "trainer.critic_warmup"):
        assert words in text
    assert "too much" in svg
    bars = [bar for bar in picture.view["bars"] if bar["kind"] == "memory"]
    assert [sum(part["bytes"] for part in bar["parts"]) for bar in bars] == [one.asked for one in found.memory]
    assert [bar["over"] for bar in bars] == [one.over > 0 for one in found.memory]
    assert found.to_pandas().set_index("name").value["optimizer steps"] == 8
    assert list(found.to_pandas("memory").asked) == [one.asked for one in found.memory]
    assert set(found.to_pandas("unread").key) == set(found.unread)
    assert len(found.to_pandas("roles")) == 2
    with refuses(hf.OptionError, "'prices'", "memory"):
        found.to_pandas("prices")
    with refuses(hf.OptionError, "'sample'", "samples"):
        found["sample"]


# -- mixtures of experts

MIXTURE = {
    "actor_rollout_ref": {
        "model": {"path": "Qwen/Qwen3-30B-A3B-Instruct-2507"},
        "actor": {"strategy": "megatron", "ppo_mini_batch_size": 128, "ppo_micro_batch_size_per_gpu": 1,
                  "megatron": {"tensor_model_parallel_size": 2}},
        "rollout": {"name": "vllm", "tensor_model_parallel_size": 4, "n": 8, "log_prob_micro_batch_size_per_gpu": 1,
                    "gpu_memory_utilization": 0.3},
        "ref": {"log_prob_micro_batch_size_per_gpu": 1},
    },
    "data": {"train_batch_size": 128}, "algorithm": {"adv_estimator": "grpo"}, "trainer": {"nnodes": 2},
}  # fmt: skip


@each("experts, expert_tp, ep", [(1, None, 1), (8, None, 8), (8, 2, 8), (8, 1, 4), (16, 1, 8), (2, 1, 1), (4, 1, 2)])
def test_megatron_s_expert_parallelism_is_that_of_a_layout(experts, expert_tp, ep):
    """tp2 dp8: as many weights of experts on a rank, E / (EP x ETP), as with E / (ep x tp)."""
    config = copy.deepcopy(MIXTURE)
    asked = {"expert_model_parallel_size": experts, "expert_tensor_parallel_size": expert_tp}
    config["actor_rollout_ref"]["actor"]["megatron"] |= asked
    found = hf.explain(config)
    assert f"tp2 pp1 dp8{f' ep{ep}' if ep > 1 else ''}, rollout" in str(found)
    nemo = {"policy": {"model_name": "Qwen/Qwen3-30B-A3B", "dtensor_cfg": {"enabled": False}, "megatron_cfg": {
        "enabled": True, "tensor_model_parallel_size": 2, **asked, "expert_tensor_parallel_size": expert_tp or 2}},
        "cluster": {"gpus_per_node": 8, "num_nodes": 2}, "grpo": {"num_prompts_per_step": 64}}  # fmt: skip
    assert f"tp2 pp1 dp8{f' ep{ep}' if ep > 1 else ''}" in str(hf.explain(nemo))


def test_shared_experts_take_less_memory():
    apart, shared = copy.deepcopy(MIXTURE), copy.deepcopy(MIXTURE)
    shared["actor_rollout_ref"]["actor"]["megatron"]["expert_model_parallel_size"] = 8
    held = [{one.phase: one.parts for one in hf.explain(config).memory}["learning"] for config in (apart, shared)]
    assert held[1]["weights"] < 0.3 * held[0]["weights"]
    assert held[1]["optimizer"] == pytest.approx(held[0]["optimizer"], rel=0.01)


def test_experts_that_megatron_could_not_spread_are_told():
    config = copy.deepcopy(MIXTURE)
    config["actor_rollout_ref"]["actor"]["megatron"] |= {"expert_model_parallel_size": 3, "expert_tensor_parallel_size": 1}
    said = str(hf.explain(config))
    assert "the GPUs must be a multiple of expert tp x ep x pp; got 16, 3" in said
    assert "as if each rank had all of them" in said


@each(
    "name, preset",
    [("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"), ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
     ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"), ("Qwen/Qwen3-30B-A3B-FP8", None), ("Qwen/Qwen3-Next-80B-A3B-Instruct", None),
     ("deepseek-ai/DeepSeek-V3.2-Exp", None)],
)  # fmt: skip
def test_names_of_mixtures_on_the_hub(name, preset):
    found = spec_named(name)
    assert (found.name if found else None) == preset


SCRIPT = """set -x
data_path=$HOME/data/gsm8k
ROOT=$(cd $(dirname $0)/.. && pwd)
export VLLM_ATTENTION_BACKEND=XFORMERS
if [ "$1" = "debug" ]; then
    echo debugging
fi
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$data_path/train.parquet \\
    data.train_batch_size=64 actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True trainer.experiment_name=run-$(date +%s) $@ 2>&1 | tee log.txt
"""


def test_of_a_script_the_job_is_read_and_what_a_shell_works_out_is_refused_where_it_counts():
    found = hf.explain(SCRIPT)
    assert [found.system, found["samples"], found["optimizer steps"]] == ["verl", 256, 4]
    assert found.withheld == {}
    assert not {"data_path", "ROOT"} & set(found.unread)
    with refuses(hf.OptionError, "data.train_batch_size", "'$B'", "write its value"):
        hf.explain(SCRIPT.replace("train_batch_size=64", "train_batch_size=$B"))
    assert hf.explain(SCRIPT.replace("train_batch_size=64", "train_batch_size=$B"), ["data.train_batch_size=64"])["samples"] == 256
    assert hf.explain(SCRIPT + "python3 prepare.py data.train_batch_size=32\n")["samples"] == 256
    with refuses(hf.OptionError, "main_ppo", "2 commands"):
        hf.explain(SCRIPT + "python3 -m verl.trainer.main_ppo data.train_batch_size=32\n")


def test_keys_of_a_critic_by_their_names_of_before_are_read():
    critic = {**DOUBTS, "algorithm.adv_estimator": "gae", "critic.model.path": "Qwen/Qwen2.5-7B"}
    found = hf.explain({**critic, "critic.model.fsdp_config.param_offload": True}, model={"actor": "llama-7b"})
    assert found.unread == {"critic.model.fsdp_config.param_offload": "read as critic.fsdp.param_offload"}
    assert found.memory == hf.explain({**critic, "critic.fsdp.param_offload": True}, model={"actor": "llama-7b"}).memory


# ---------------------------------------------------------------- launchers, DeepSpeed and FSDP


QWEN = {"model_name_or_path": "Qwen/Qwen2.5-7B", "per_device_train_batch_size": 8, "num_generations": 8}
ARGUMENTS = "grpo.py " + " ".join(f"--{key} {value}" for key, value in QWEN.items())
DEEPSPEED = {"deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}}


def states(found: Any) -> list[Any]:
    held = found.step.roles[0]
    return [held.states.name, held.states.weights_over, held.states.gradients_over, held.states.optimizer_over, held.never]


@each("config, processes, said", [
    (f"accelerate launch --num_processes 8 --use_deepspeed --zero_stage 3 {ARGUMENTS}", 8, ["ZeRO-3", 8, 8, 8, ()]),
    (f"accelerate launch --num_processes 8 --use_deepspeed {ARGUMENTS}", 8, ["ZeRO-2", 1, 8, 8, ()]),
    ({**QWEN, **DEEPSPEED, "num_processes": 8}, 8, ["ZeRO-3", 8, 8, 8, ("optimizer",)]),
    ({**QWEN, "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"}, "distributed_type": "DEEPSPEED",
      "num_processes": 8}, 8, ["ZeRO-3", 8, 8, 8, ("weights",)]),
    ({**QWEN, "fsdp": "full_shard auto_wrap", "num_processes": 8}, 8, ["FSDP", 8, 8, 8, ()]),
    ({**QWEN, "fsdp": "shard_grad_op", "num_processes": 8}, 8, ["FSDP", 1, 8, 8, ()]),
    ({**QWEN, "fsdp": ["full_shard", "offload"], "num_processes": 8}, 8,
     ["FSDP", 8, 8, 8, ("weights", "gradients", "optimizer")]),
    ({**QWEN, "fsdp": True, "fsdp_config": {"reshard_after_forward": False}, "num_processes": 8}, 8, ["FSDP", 1, 8, 8, ()]),
    ({**QWEN, "fsdp": "hybrid_shard", "num_processes": 8, "num_machines": 2}, 8, ["FSDP", 4, 4, 4, ()]),
    (f"accelerate launch --num_processes 8 --use_fsdp --fsdp_sharding_strategy 2 {ARGUMENTS}", 8, ["FSDP", 1, 8, 8, ()]),
    (f"accelerate launch --num_processes 8 --zero_stage 3 {ARGUMENTS}", 8, ["DDP", 1, 1, 1, ()]),
    ({**QWEN, "distributed_type": "FSDP", "use_deepspeed": True, "zero_stage": 2, "num_processes": 8}, 8, ["ZeRO-2", 1, 8, 8, ()]),
    ({**QWEN, "distributed_type": "NO", "num_processes": 8}, 1, ["DDP", 1, 1, 1, ()]),
    (f"trl grpo --accelerate_config zero3 {ARGUMENTS[8:]}", 8, ["ZeRO-3", 8, 8, 8, ()]),
    (f"trl grpo --accelerate_config fsdp2 --num_processes 4 {ARGUMENTS[8:]}", 4, ["FSDP", 4, 4, 4, ()]),
    (f"trl grpo --accelerate_config single_gpu {ARGUMENTS[8:]}", 1, ["DDP", 1, 1, 1, ()]),
    (f"torchrun --nnodes 2 --nproc-per-node=8 {ARGUMENTS}", 16, ["DDP", 1, 1, 1, ()]),
    (f"CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node gpu {ARGUMENTS}", 4, ["DDP", 1, 1, 1, ()]),
    (f"CUDA_VISIBLE_DEVICES=0,1 accelerate launch {ARGUMENTS}", 2, ["DDP", 1, 1, 1, ()]),
    (f"CUDA_VISIBLE_DEVICES=0 python {ARGUMENTS}", 1, ["DDP", 1, 1, 1, ()]),
    (f"deepspeed --num_gpus 4 --num_nodes 2 {ARGUMENTS}", 8, ["DDP", 1, 1, 1, ()]),
    (f"deepspeed --include localhost:0,1@other:2,3,4 {ARGUMENTS}", 5, ["DDP", 1, 1, 1, ()]),
])  # fmt: skip
def test_launchers_zero_and_fsdp_are_read_however_they_are_said(config, processes, said):
    found = hf.explain(config)
    assert found["data-parallel ranks"] == processes
    assert found["samples"] == 8 * processes
    assert states(found) == said
    assert found.withheld == {}


def test_zero_three_holds_an_eighth_on_each_of_eight_devices():
    """2 + 2 + 12 bytes a parameter (arXiv 1910.02054), and of ZeRO-1 the moments alone are cut."""
    spec = spec_named("Qwen/Qwen2.5-7B")
    held = {}
    for stage in (1, 3):
        found = hf.explain({**QWEN, "num_processes": 8, "deepspeed": {"zero_optimization": {"stage": stage}}})
        parts = {one.phase: one.parts for one in found.memory}["learning"]
        held[stage] = [parts[name] / spec.num_parameters() for name in ("weights", "gradients", "optimizer")]
    assert held[3] == pytest.approx([2 / 8, 2 / 8, 12 / 8], rel=0.01)
    assert held[1] == pytest.approx([2, 2, 12 / 8], rel=0.01)


def test_under_zero_three_transformers_generates_with_all_weights_on_each_device():
    """``unwrap_model_for_generation`` of TRL gathers them, but for ``ds3_gather_for_generation=False``."""
    zero = {**QWEN, "num_processes": 8, "deepspeed": {"zero_optimization": {"stage": 3}}}
    spec = spec_named("Qwen/Qwen2.5-7B")
    held = [
        {one.phase: one.parts for one in hf.explain({**zero, **more}).memory}["generation"]["rollout"]
        for more in ({}, {"ds3_gather_for_generation": False}, {"deepspeed": {"zero_optimization": {"stage": 2}}})
    ]
    assert held == pytest.approx([2 * spec.num_parameters(), 0, 0], rel=0.01)


@each("config, key", [
    (f"NPROC_PER_NODE=4 python {ARGUMENTS}", "NPROC_PER_NODE"), (f"torchrun --nnodes 1:4 --nproc_per_node 8 {ARGUMENTS}", "nnodes"),
    (f"CUDA_VISIBLE_DEVICES=0,1 python {ARGUMENTS}", "CUDA_VISIBLE_DEVICES"),
    (f"trl grpo --accelerate_config mine {ARGUMENTS[8:]}", "accelerate_config"),
])  # fmt: skip
def test_where_the_processes_are_not_told_no_number_is_given_until_a_cluster_is(config, key):
    assert hf.explain(config).withheld["sizes"] == (key,)
    assert hf.explain(config)["samples"] is None
    if key == "NPROC_PER_NODE":
        assert hf.explain(config, cluster="1x4 H100")["samples"] == 32


def test_odd_values_of_files_and_layers_are_told():
    found = hf.explain({**QWEN, "deepspeed": "x" * 5000})
    assert found.withheld["memory"] == ("deepspeed",)
    assert "'7'" in kinds(hf.explain({**QWEN, "use_peft": True, "lora_target_modules": 7}), "note")


@each("key, value", [
    ("gradient_accumulation_steps", 4), ("train_micro_batch_size_per_gpu", 4), ("train_batch_size", 8),
])  # fmt: skip
def test_deepspeeds_batches_are_those_of_the_arguments(key, value):
    config = {**QWEN, "num_processes": 8}
    assert f"deepspeed.{key} must be" in kinds(hf.explain({**config, f"deepspeed.{key}": value}), "broken")
    assert kinds(hf.explain({**config, f"deepspeed.{key}": "auto"}), "broken") == ""


# ---------------------------------------------------------------- heads and layers


NEMO = {"policy.model_name": "Qwen/Qwen2.5-7B", "policy.train_global_batch_size": 512, "cluster.gpus_per_node": 8}
MEGATRON = {"policy.dtensor_cfg.enabled": False, "policy.megatron_cfg.enabled": True, "policy.logprob_batch_size": 4}


@each("config, said", [
    ({**NEMO, "policy.dtensor_cfg.tensor_parallel_size": 8}, "DTensor's tensor parallelism must divide the attention heads"),
    ({**NEMO, "policy.model_name": "Qwen/Qwen2.5-3B", "policy.dtensor_cfg.tensor_parallel_size": 4}, "the key/value heads; got"),
    ({**NEMO, **MEGATRON, "policy.megatron_cfg.tensor_model_parallel_size": 8}, "Megatron's tensor parallelism must divide the a"),
    ({**NEMO, **MEGATRON, "policy.megatron_cfg.pipeline_model_parallel_size": 8}, "must divide the layers"),
    ({**DOUBTS, "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B", f"{R}tensor_model_parallel_size": 8}, "vLLM's tensor"),
    ({**DOUBTS, "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B", f"{A}ulysses_sequence_parallel_size": 8}, "Ulysses' ranks"),
])  # fmt: skip
def test_heads_and_layers_that_cannot_be_cut_are_told_with_what_can(config, said):
    found = hf.explain(config)
    (wrong,) = [one for one in found.findings if said in str(one)]
    assert wrong.kind == "broken"
    assert wrong.source
    for number in re.findall(r"\d+", wrong.do):
        keys = [key for key, value in config.items() if value == 8 or (value == 4 and key.endswith("parallel_size"))]
        key = next(key for key in keys if key.endswith("parallel_size"))
        assert said not in kinds(hf.explain({**config, key: int(number)}), "broken")


def test_four_ranks_share_two_key_value_heads_in_megatron_and_in_vllm():
    """Qwen2.5-3B: 16 and 2 heads; transformer_config.py and vLLM's models repeat them, DTensor does not."""
    shared = {**NEMO, **MEGATRON, "policy.model_name": "Qwen/Qwen2.5-3B", "policy.megatron_cfg.tensor_model_parallel_size": 4}
    assert "heads" not in kinds(hf.explain({**shared, "policy.generation.vllm_cfg.tensor_parallel_size": 4}), "broken")


def test_layers_may_lie_unevenly_where_a_key_says_how():
    uneven = {**NEMO, **MEGATRON, "policy.megatron_cfg.pipeline_model_parallel_size": 8}
    told = hf.explain({**uneven, "policy.megatron_cfg.num_layers_in_first_pipeline_stage": 0})
    assert "must divide the layers" not in kinds(told, "broken")


def test_fits_is_not_said_above_a_refusal():
    from hfsdk.viz.pictures.explanation import explanation_view

    right = hf.explain(FEW, model="qwen2.5-1.5b")
    assert "fits, with" in explanation_view(right.view())["subtitle"]
    refused = {**right.view(), "no_trace": "hfsdk refuses this step: for a reason"}
    assert "fits" not in explanation_view(refused)["subtitle"]
    wrong = hf.explain({**FEW, f"{A}ppo_micro_batch_size_per_gpu": 7}, model="qwen2.5-1.5b")
    assert "fits" not in explanation_view(wrong.view())["subtitle"]
    unknown = hf.explain({**FEW, "algorithm.adv_estimator": "gae", "critic.model.path": "of/nobody"}, model="qwen2.5-1.5b")
    assert [one.left_out for one in unknown.memory if one.left_out]
    assert "fits" not in explanation_view(unknown.view())["subtitle"]
