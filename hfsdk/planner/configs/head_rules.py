"""Whether heads, layers and widths can be cut as a configuration asks, by the rules of the engine that cuts them.

====================  ===================================  ==========================================  =================
engine                attention heads                      key/value heads                             MLP, layers
====================  ===================================  ==========================================  =================
Megatron              a multiple of tp                     a multiple of tp, or it of them             tp; pp
vLLM, SGLang          a multiple of tp                     a multiple of tp, or it of them             tp
NeMo-RL's DTensor     a multiple of tp                     a multiple of tp                            tp
Ulysses in verl       a multiple of its ranks              a multiple of its ranks, or they of them    .
DeepSpeed             unequal parts are cut                unequal parts are cut                       .
====================  ===================================  ==========================================  =================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hfsdk.core.spec import ModelSpec
from hfsdk.planner.configs.step_config import BROKEN, Finding, RoleConfig, StepConfig


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What cuts weights over tp, and where it checks that it can."""

    name: str
    source: str
    repeats: bool = True
    """Whether ranks may share a key/value head."""


MEGATRON = Engine(name="Megatron", source="megatron/core/transformer/transformer_config.py, __post_init__")
DTENSOR = Engine(name="DTensor", source="nemo_rl/models/dtensor/parallelize.py, _parallelize_model", repeats=False)
GENERATING = {
    "vllm": Engine(name="vLLM", source="vllm/config/model.py, verify_with_parallel_config, and its models"),
    "sglang": Engine(name="SGLang", source="sglang/srt/models"),
}
"""Engine of a rollout, as :attr:`RolloutConfig.engine` has it; the layout of a server that is started apart is not said."""
ULYSSES = "verl/models/transformers/monkey_patch.py, apply_monkey_patch"


def head_findings(step: StepConfig, specs: Mapping[str, ModelSpec | None]) -> tuple[Finding, ...]:
    """Return the rules of heads, layers and widths that a step breaks; each model's once."""
    found: dict[str, Finding] = {}
    for role in step.roles:
        spec = specs.get(role.name)
        if spec is not None and role.name not in step.own:
            for rule in _of_role(role, spec):
                found.setdefault(f"{rule.rule} {rule.got}", rule)
    actor, engine = specs.get("actor"), GENERATING.get(step.rollout.engine)
    if actor is not None and engine is not None and not step.own:
        for rule in _of_tp(actor, step.rollout.layout.tp, engine):
            found.setdefault(f"{rule.rule} {rule.got}", rule)
    return tuple(found.values())


def _of_role(role: RoleConfig, spec: ModelSpec) -> Iterator[Finding]:
    pp, split, heads, kv = role.layout.pp, role.split, spec.num_heads, spec.num_kv_heads
    engine = {"Megatron": MEGATRON, "FSDP2": DTENSOR}.get(role.states.name)
    if engine is not None:
        yield from _of_tp(spec, role.layout.tp, engine)
    if spec.num_layers % pp and not role.uneven:
        fitting = [one for one in range(1, spec.num_layers + 1) if spec.num_layers % one == 0]
        yield _broken("Megatron's pipeline parallelism must divide the layers, where no key says how they lie", spec,
                      f"{spec.num_layers} layers, pp {pp}", _advice("pp", pp, fitting), MEGATRON.source)  # fmt: skip
    if heads % split or (kv % split and split % kv):
        fitting = [one for one in range(1, heads + 1) if heads % one == 0 and (kv % one == 0 or one % kv == 0)]
        yield _broken(
            "Ulysses' ranks must divide the attention heads, and the key/value heads or be a multiple of them", spec,
            f"{heads} and {kv} heads, {split} ranks", _advice("ulysses_sequence_parallel_size", split, fitting), ULYSSES,
        )  # fmt: skip


def _of_tp(spec: ModelSpec, tp: int, engine: Engine) -> Iterator[Finding]:
    heads, kv, mlp = spec.num_heads, spec.num_kv_heads, spec.mlp_hidden_size
    if _fits(spec, tp, engine):
        return
    if heads % tp:
        rule, got = "must divide the attention heads", f"{heads} heads"
    elif kv % tp and (tp % kv or not engine.repeats):
        rule, got = "must divide the key/value heads" + ", or be a multiple of them" * engine.repeats, f"{kv} key/value heads"
    else:
        rule, got = "must divide the MLP", f"{mlp} wide"
    do = _advice("tp", tp, [one for one in range(1, heads + 1) if _fits(spec, one, engine)])
    yield _broken(f"{engine.name}'s tensor parallelism {rule}", spec, f"{got}, tp {tp}", do, engine.source)


def _fits(spec: ModelSpec, tp: int, engine: Engine) -> bool:
    kv = spec.num_kv_heads
    kv_fit = kv % tp == 0 or (engine.repeats and tp % kv == 0)
    return spec.num_heads % tp == 0 and kv_fit and spec.mlp_hidden_size % tp == 0


def _advice(name: str, asked: int, fitting: list[int]) -> str:
    below, above = [one for one in fitting if one < asked], [one for one in fitting if one > asked]
    return f"Take {name}={' or '.join(map(str, below[-1:] + above[:1]))}."


def _broken(rule: str, spec: ModelSpec, got: str, do: str, source: str) -> Finding:
    return Finding(kind=BROKEN, rule=rule, got=f"{spec.name}: {got}", do=do, source=source)
