"""Memory of a device in each phase of a step, by purpose: the planner's arithmetic over the states that a system keeps.

Parameters of a rank, activations, logits and a rollout's copy are counted by :mod:`hfsdk.planner.perf.memory`; what differs
between systems is how many bytes a parameter has, over how many ranks they are cut, and what is in host memory when
(:class:`States`)::

    generation    what stays of all roles    + rollout's weights + cache        (vLLM takes its share of the whole device)
    preparation   what stays                 + one role's forward pass: activations of a layer, logits     rollout asleep, or not
    learning      what stays                 + one role's gradients, activations, logits

With LoRA gradients and optimizer are those of adapters alone; a reference that is the actor without them holds nothing.

Where weights are cut over ranks (FSDP, ZeRO-3) a pass has two whole layers of them in bf16 at a time: the one it works on, and the
next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hfsdk.configs.step_config import PHASES, Finding, RoleConfig, RolloutConfig, StepConfig
from hfsdk.core.cluster import DeviceSpec
from hfsdk.core.layout import Layout
from hfsdk.core.roles import PARTS, AdamW, RoleSpec
from hfsdk.core.spec import ModelSpec
from hfsdk.planner.perf.memory import GPU_PROCESS_BYTES, MemoryEstimate, role_bytes, rollout_parameters

NO_FIT = "does not fit"
"""Kind of the findings here."""

GATHERED_LAYERS = 2

Specs = Mapping[str, ModelSpec | None]
"""Role -> its architecture; ``None`` where the size is not known."""

ADVICE: dict[str, dict[str, str]] = {
    "verl": {
        "kv_cache": "lower actor_rollout_ref.rollout.gpu_memory_utilization, or offload: actor.fsdp_config.param_offload=True, "
        "optimizer_offload=True",
        "optimizer": "actor.fsdp_config.optimizer_offload=True, or more GPUs", "weights": "param_offload=True, or more GPUs",
        "gradients": "more GPUs, or Megatron with a larger tp or pp",
        "preparation": "lower rollout.log_prob_micro_batch_size_per_gpu and ref.log_prob_micro_batch_size_per_gpu "
        "(log_prob_max_token_len_per_gpu); or actor.fsdp_config.ulysses_sequence_parallel_size=2",
        "learning": "lower actor.ppo_micro_batch_size_per_gpu (ppo_max_token_len_per_gpu), which changes no gradient; or "
        "actor.fsdp_config.ulysses_sequence_parallel_size=2",
    },
    "TRL": {
        "kv_cache": "lower vllm_gpu_memory_utilization, or vllm_enable_sleep_mode=True; without vLLM fewer samples at once",
        "optimizer": "DeepSpeed ZeRO-3 or FSDP (accelerate launch --config_file), which cut it over processes",
        "weights": "DeepSpeed ZeRO-3 or FSDP (accelerate launch --config_file), which cut them over processes",
        "gradients": "DeepSpeed ZeRO-2 or ZeRO-3",
        **dict.fromkeys(
            ("preparation", "learning"), "lower per_device_train_batch_size and raise gradient_accumulation_steps as much: "
            "num_generations can stay where it divides their product times processes; or a shorter max_completion_length",
        ),
    },
    "OpenRLHF": {
        "kv_cache": "lower --vllm.gpu_memory_utilization; --ds.enable_sleep, --vllm.enable_sleep",
        "optimizer": "--ds.adam_offload, or --ds.zero_stage 3", "weights": "--ds.zero_stage 3, --ref.offload",
        "gradients": "--ds.zero_stage 3",
        "preparation": "lower --rollout.micro_batch_size (--rollout.max_tokens_per_gpu)",
        "learning": "lower --train.micro_batch_size (--train.max_tokens_per_gpu); --actor.gradient_checkpointing_enable",
    },
    "NeMo-RL": {
        "kv_cache": "lower policy.generation.vllm_cfg.gpu_memory_utilization",
        "optimizer": "policy.dtensor_cfg.cpu_offload=true, or more GPUs",
        "weights": "policy.dtensor_cfg.cpu_offload=true, or a larger tensor_parallel_size", "gradients": "more GPUs",
        "preparation": "lower policy.logprob_batch_size (logprob_mb_tokens), or set policy.logprob_chunk_size; a larger "
        "tensor_parallel_size or context_parallel_size",
        "learning": "activation_checkpointing=true; lower policy.train_micro_batch_size (train_mb_tokens); a larger "
        "tensor_parallel_size or context_parallel_size",
    },
}  # fmt: skip
"""System -> the part that takes most, or the phase whose passes do -> advice in its own keys."""
OWN = "session.place(...) says what helps, most first"


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """One device of a pool in one phase."""

    pool: str
    num_devices: int
    device_name: str
    phase: str
    parts: Mapping[str, int]
    """``"weights"``, ``"gradients"``, ``"optimizer"``, ``"rollout"``, ``"kv_cache"``, ``"working"``, ``"process"`` -> bytes."""
    roles: Mapping[str, int]
    """Role -> bytes of it."""
    exists: int
    """Bytes of the device."""
    worker: str
    """The role that needs most in this phase, whose work it is."""
    left_out: tuple[str, ...] = ()
    """Roles whose size is not known: the bytes are without them."""

    @property
    def asked(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def over(self) -> int:
        """Bytes too much; negative is room."""
        return self.asked - self.exists


def memory_by_phase(step: StepConfig, specs: Specs, device: DeviceSpec) -> tuple[PhaseMemory, ...]:
    """Return the bytes that one device of each pool holds in each phase; none where the actor's size is not known."""
    if specs.get("actor") is None:
        return ()
    return tuple(_phase(step, specs, device, pool, phase) for pool in step.pools for phase in PHASES)


def fit_findings(step: StepConfig, memory: tuple[PhaseMemory, ...]) -> tuple[Finding, ...]:
    """Return a finding for each phase that does not fit: by how much, which part takes most, and advice."""
    findings = []
    for phase in memory:
        if phase.over <= 0:
            continue
        most = max(
            ("kv_cache", "rollout", "weights", "gradients", "optimizer", "working"),
            key=lambda part: phase.parts.get(part, 0),
        )
        words = {
            "kv_cache": "the generating engine's cache",
            "rollout": "the engine's copy of the weights",
            "working": f"activations and logits of {phase.worker}",
        }.get(most, most)
        advice = ADVICE.get(step.system, {}).get(phase.phase if most == "working" else most, OWN)
        helps = "a larger tensor parallelism of the generating engine" if most == "rollout" else advice
        without = f" (without {', '.join(phase.left_out)}, whose size is not known)" if phase.left_out else ""
        findings.append(Finding(
            kind=NO_FIT, rule=f"pool {phase.pool} in {phase.phase}: a device has {_gb(phase.exists)}",
            got=f"{_gb(phase.asked)}, {_gb(phase.over)} too much; most is {words}, {_gb(phase.parts[most])}{without}",
            do=f"What helps: {helps}.",
        ))  # fmt: skip
    return tuple(findings)


def _phase(step: StepConfig, specs: Specs, device: DeviceSpec, pool: str, phase: str) -> PhaseMemory:
    here = {pool, step.within.get(pool, pool)}  # on a part of a pool there is what the whole of it has, too
    present = [(role, spec) for role in step.roles if role.pool in here and (spec := specs.get(role.name)) is not None]
    rollout = _rollout(step, specs, device, phase) if step.rollout.pool in here else {}
    works = {role.name: work for role, spec in present for work in [_work(role, spec, phase)] if work}

    def all_bytes(worker: str) -> tuple[dict[str, int], dict[str, int]]:
        parts, roles = dict.fromkeys(PARTS, 0), {}
        for role, spec in present:
            lends = any(other.base_of == role.name for other, _ in present if other.name == worker)
            role_bytes_there = _part_bytes(role, spec, phase, works=role.name == worker or lends)
            roles[role.name] = sum(role_bytes_there.values())
            parts = {part: parts[part] + role_bytes_there[part] for part in PARTS}
        work = works.get(worker, {})
        if worker:
            roles[worker] += sum(work.values())
        parts["gradients"] += work.get("gradients", 0)
        parts |= {"working": work.get("working", 0)}
        return parts, roles

    # Roles of a pool work one after the other in a phase, so the fullest moment is the one in which the largest of them works.
    worker = max(works, key=lambda name: sum(all_bytes(name)[0].values()), default="")
    parts, roles = all_bytes(worker)
    if rollout:
        roles["rollout"] = sum(rollout.values())
    left_out = tuple(role.name for role in step.roles if role.pool in here and specs.get(role.name) is None)
    order = {**{part: parts[part] for part in PARTS}, **rollout, "working": parts["working"], "process": GPU_PROCESS_BYTES}
    return PhaseMemory(
        pool=pool, num_devices=step.pools[pool], device_name=device.name, phase=phase, parts=order, roles=roles,
        exists=device.memory_bytes, worker="rollout" if phase == "generation" and rollout else worker, left_out=left_out,
    )  # fmt: skip


def _part_bytes(role: RoleConfig, spec: ModelSpec, phase: str, *, works: bool) -> dict[str, int]:
    """Return the bytes of a role that are there all through a phase."""
    states, learned = role.states, learned_of(role, spec)
    stepped = learned  # experts' states are cut over the ranks that have them: over all, as much as without ep
    if role.layout.ep > 1 and states.optimizer_over > 1:
        stepped = learned_of(replace(role, layout=replace(role.layout, ep=1)), spec)
    there = learned * (role.lora is not None) if role.base_of else parameters_of(role, spec)
    part_bytes = {
        "weights": states.weights * there // states.weights_over,
        "gradients": states.gradients * learned // states.gradients_over * (role.trained and states.gradients_stay),
        "optimizer": states.optimizer * stepped // states.optimizer_over * role.trained,
    }  # fmt: skip
    # Offloaded parts are away, except while the role works: learning brings all of them back, other passes only the weights.
    gone = set(role.away.get(phase, ()))
    if works:
        gone = set() if phase == "learning" else gone - {"weights"}
    return {part: 0 if part in gone or part in role.never else count for part, count in part_bytes.items()}


def _work(role: RoleConfig, spec: ModelSpec, phase: str) -> dict[str, int]:
    """Return the further bytes while a role works in a phase; nothing where it does not."""
    if phase == "generation" or (phase == "learning" and not role.trained):
        return {}
    learning = phase == "learning"
    estimate = _estimate(role, spec, role.train_tokens if learning else role.pass_tokens, learning)
    states, working = role.states, estimate.activations + estimate.logits
    # Cut weights are gathered layer by layer, the next one while this one computes: bf16 of both are there at once.
    if states.weights_over > 1:
        layer = (parameters_of(role, spec) - _ends(spec, role)) * role.layout.pp // spec.num_layers
        working += GATHERED_LAYERS * 2 * layer
    gradients = 0
    if learning and not states.gradients_stay and "gradients" not in role.never:
        gradients = states.gradients * learned_of(role, spec) // states.gradients_over
    return {"gradients": gradients, "working": working}


def _ends(spec: ModelSpec, role: RoleConfig) -> int:
    return spec.vocab_size // role.layout.tp * spec.hidden_size * (1 if spec.tied_embeddings or role.head == "scalar" else 2)


def _estimate(role: RoleConfig, spec: ModelSpec, tokens: int, learning: bool) -> MemoryEstimate:
    spec_of_role = RoleSpec(
        name=role.name, kind="critic" if role.head == "scalar" else "reference", head=role.head, model=spec, train=role.layout,
        dtype="bf16", optimizer=AdamW() if learning else None, micro_batch_tokens=max(1, tokens), recompute=role.recompute,
        lora=role.lora,
    )  # fmt: skip
    return role_bytes(spec_of_role, role.layout.size, sequence_parallel=role.sequence_parallel)


def parameters_of(role: RoleConfig, spec: ModelSpec) -> int:
    """Return the parameters of one rank of the fullest stage, before they are cut over data-parallel ranks."""
    return _estimate(role, spec, 1, False).weights // 2


def learned_of(role: RoleConfig, spec: ModelSpec) -> int:
    """Return how many of them are trained: all, or those of adapters and of a scalar head."""
    return _estimate(role, spec, 1, True).gradients // 4


def _rollout(step: StepConfig, specs: Specs, device: DeviceSpec, phase: str) -> dict[str, int]:
    """Return the bytes of the generating engine that are there in a phase."""
    rollout, spec = step.rollout, specs["actor"]
    assert spec is not None
    if phase != "generation" and (rollout.sleeps or rollout.shares_weights):
        return {}
    tp = rollout.layout.tp
    weights = (
        0
        if rollout.shares_weights and not rollout.gathers
        else 2 * rollout_parameters(spec, tp, rollout.layout.ep) // rollout.layout.pp
    )
    # vLLM's share is of the whole device and includes its weights; the rest of it becomes cache, however few rows there are.
    if rollout.gpu_share:
        return {"rollout": weights, "kv_cache": max(0, round(rollout.gpu_share * device.memory_bytes) - weights)}
    cache = rollout.cache_bytes or rollout.rows * _sequence_bytes(step, spec, rollout, tp)
    return {"rollout": weights, "kv_cache": cache}


def _sequence_bytes(step: StepConfig, spec: ModelSpec, rollout: RolloutConfig, tp: int) -> int:
    return math.ceil(step.sample_tokens * spec.kv_bytes_per_token("bf16") / min(tp, spec.num_kv_heads) / rollout.layout.pp)


def layouts_text(role: RoleConfig, rollout: RolloutConfig) -> str:
    """Return a role's layouts as they are written, e.g. ``"tp2 pp1 dp4, rollout tp2 pp1 dp4"``."""
    return f"{_text(role.layout)}, rollout {_text(rollout.layout)}" if role.name == "actor" else _text(role.layout)


def states_text(role: RoleConfig) -> str:
    """Return in words the states that a role holds, e.g. ``"FSDP, LoRA of rank 16"``."""
    if role.lora is not None:
        return f"{role.states.name}, LoRA of rank {role.lora.rank}"
    return f"the weights of {role.base_of}" if role.base_of else role.states.name


def _text(layout: Layout) -> str:
    return str(layout)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
