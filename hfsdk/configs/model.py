"""The architecture of a configuration's model: its name is matched with the presets, or the caller says."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hfsdk.configs.phase_memory import Specs
from hfsdk.configs.step_config import BROKEN, NOTE, Finding, RoleConfig, StepConfig
from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError
from hfsdk.core.layout import Layout
from hfsdk.core.lora import LINEARS, LoRA
from hfsdk.core.spec import PRESETS, ModelSpec

Model = str | Path | ModelSpec

FAMILIES = {
    r"qwen2\.?5": "qwen2.5", r"qwen3": "qwen3", r"llama3\.?[0123]?": "llama3", r"llama2": "llama", r"smollm2": "smollm2",
}  # fmt: skip
"""Patterns of a model's name, without hyphens, that tell its family -> how presets begin."""

_SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)(b|m)(?![a-z0-9])")
_MIXTURES = "|".join(re.escape(name) for name, spec in PRESETS.items() if spec.experts)
_MIXTURE = re.compile(rf"({_MIXTURES})(-(instruct|thinking|base|chat|v0\.1|\d{{4}}))*")
_OTHER = re.compile(
    r"\d+b-?a\d+|vl|omni|moe|next|gptq|awq|scout|maverick|-draft|embedding|reranker|bnb|[48]bit|fp[48]|int[48]|gguf|w\d+a\d+"
)
"""Models of other architectures that have such names."""


def spec_named(name: str) -> ModelSpec | None:
    """Return the preset that a hub name or a path means, e.g. ``"Qwen/Qwen2.5-7B-Instruct"``; ``None`` where none surely is."""
    if name in PRESETS:
        return PRESETS[name]
    last = re.split(r"[/\\]", name.rstrip("/\\"))[-1].lower()
    mixture = _MIXTURE.fullmatch(last)
    if mixture is not None:
        return PRESETS[mixture[1]]
    size = _SIZE.search(last)
    if size is None or _OTHER.search(last):
        return None
    before = re.sub(r"[-_ ]|math|coder|meta", "", last[: size.start()])
    for pattern, family in FAMILIES.items():
        if re.fullmatch(pattern, before):
            return PRESETS.get(f"{family}-{size[1]}{size[2]}")
    return None


def spec_given(model: Model) -> ModelSpec:
    """Return the architecture that a caller names: a preset, a hub name that means one, a folder with ``config.json``, or itself.

    Raises:
        ModelNotFoundError: there is none of that name.
    """
    if isinstance(model, ModelSpec):
        return model
    if os.path.isdir(model):
        return ModelSpec.from_folder(model)
    return spec_named(str(model)) or ModelSpec.preset(str(model))


def specs_of(step: StepConfig, model: Model | Mapping[str, Model] | None) -> Specs:
    """Return the architecture of every role.

    Args:
        step: the step, which names the models.
        model: the model of the actor and all roles that have its model, or by role.

    Raises:
        OptionError: it names a role that the step lacks.
        ModelNotFoundError: no such model.
    """
    named = {role.name: role.model for role in step.roles}
    models = dict(model) if isinstance(model, Mapping) else {} if model is None else {"actor": model}
    unknown = [name for name in models if name not in named]
    if unknown:
        raise OptionError(f"model= names the role {shown(unknown[0])}; the step has {', '.join(named)}")
    specs: dict[str, ModelSpec | None] = {}
    for name, path in named.items():
        if name in models:
            specs[name] = spec_given(models[name])
        elif "actor" in models and path in ("", named["actor"]):
            specs[name] = spec_given(models["actor"])
        else:
            specs[name] = ModelSpec.from_folder(path) if _is_folder(path) else spec_named(path)
    return specs


def lengthened(step: StepConfig, specs: Specs) -> tuple[Specs, tuple[Finding, ...]]:
    """Return the architectures with positions for the step's samples, and a note where a preset has fewer.

    For a model that is known by its name the layers are known, and not whether it is a variant with a longer context.
    """
    short = {name: spec for name, spec in specs.items() if spec is not None and spec.max_positions < step.sample_tokens}
    notes = {
        spec.name: Finding(
            kind=NOTE, rule="a sample may be longer than the model's context", got=f"{step.sample_tokens:,} tokens; {spec.name} is "
            f"known here with {spec.max_positions:,} positions", do="Look at max_position_embeddings of its config.json.",
        )
        for spec in short.values()
    }  # fmt: skip
    longer = {name: replace(spec, max_positions=step.sample_tokens) for name, spec in short.items()}
    return {**specs, **longer}, tuple(notes.values())


def _is_folder(path: str) -> bool:
    return bool(path) and os.path.isfile(os.path.join(os.path.expanduser(path), "config.json"))


# -- adapters of low rank

MOST_RANK = 512
"""The largest rank of ``hf.LoRA``."""

OF_MEGATRON = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",), "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}  # fmt: skip
"""Megatron's names of the linears, which systems that train with it take."""

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

PEFT_DEFAULT = ("q_proj", "v_proj")
"""The layers of adapters where nothing is said, for Llama, Mistral, Qwen2 and Qwen3: peft 0.21, ``peft/utils/constants.py``,
``TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING``."""


def lora_asked(
    rank: int | None, alpha: float, targets: Any, rule: Callable[..., None], key: str, *, stabilised: bool = False
) -> LoRA | None:
    """Return the adapters that a configuration asks for, ``None`` where it asks for none.

    Args:
        rank: 0 and ``None`` are none.
        alpha: the adapters' output is multiplied by alpha / rank.
        targets: names of layers, ``"all-linear"``, or nothing for all of them.
        rule: adds a finding where something does not hold.
        key: the key that sets the rank, for findings.
        stabilised: whether it is 1 / the root of the rank (rsLoRA).
    """
    if not rank:
        return None
    rule(rank <= MOST_RANK, f"hfsdk's adapters have a rank of at most {MOST_RANK}", f"{key}={rank}",
         f"Read memory as of rank {MOST_RANK}.", "", NOTE)  # fmt: skip
    if targets is not None and not isinstance(targets, (str, list, tuple)):
        targets = [targets]
    layers = [part.strip(" '\"") for part in targets.strip("[]() ").split(",")] if isinstance(targets, str) else list(targets or ())
    linears: list[str] = []
    odd = [layer for layer in layers if layer != "all-linear" and str(layer).rsplit(".", 1)[-1] not in {*LINEARS, *OF_MEGATRON}]
    rule(not odd, "layers are named that have no adapters in hfsdk; here all linear layers of attention and MLP have one",
         ", ".join(shown(str(layer)) for layer in odd[:4]), "Read memory as an estimate.", "", NOTE)  # fmt: skip
    for layer in layers:
        last = str(layer).rsplit(".", 1)[-1]
        linears += OF_MEGATRON.get(last, (last,))
    every = not layers or bool(odd) or "all-linear" in layers or set(EVERY) <= set(linears)
    return LoRA(
        rank=min(rank, MOST_RANK), alpha=alpha if alpha > 0 else float(rank), targets="linear" if every else tuple(linears),
        rank_stabilised=stabilised,
    )  # fmt: skip


# -- expert parallelism

COUNTED_WHOLE = "experts are counted as if each rank had all of them, cut by tp"
"""A rule of models that have experts."""


def shared_experts(experts: int, expert_tp: int | None, tp: int, dp: int) -> int:
    """Return the ``ep`` of a layout for Megatron's EP and ETP; 1 where no layout has as many weights on a rank.

    Megatron spreads experts over tp x dp ranks anew: EP parts of the experts, each cut by ETP inside. A ``Layout`` cuts each expert
    by tp as all other weights, and shares them over ``ep`` replicas; a rank has as many weights where both products are the same::

        tp4 dp8, EP 8, ETP 4     ep8     E / 8 experts, each cut in 4
        tp4 dp8, EP 8, ETP 1     ep2     E / 8 whole experts: as many weights as E / 2, each cut in 4

    Args:
        experts: expert-parallel size.
        expert_tp: ETP; ``None`` is tp, as in Megatron.
        tp: tensor parallelism of the other weights.
        dp: replicas.
    """
    parts = max(1, experts) * max(1, expert_tp or tp)
    ep = parts // max(1, tp)
    return ep if parts % max(1, tp) == 0 and ep >= 1 and dp % max(1, ep) == 0 else 1


def expert_rule(rule: Callable[..., None], num_gpus: int, layout: Layout, experts: int, expert_tp: int | None) -> None:
    """Add a finding where Megatron could not spread experts so, or a layout says it otherwise."""
    parts = max(1, experts) * max(1, expert_tp or layout.tp)
    if parts == layout.tp and experts <= 1:
        return
    rule(num_gpus % (parts * layout.pp) == 0, "the GPUs must be a multiple of expert tp x ep x pp",
         f"{num_gpus}, {parts * layout.pp}", "Take an expert_model_parallel_size that divides them.",
         "megatron/core/parallel_state.py, initialize_model_parallel")  # fmt: skip
    rule(layout.ep * layout.tp == parts or parts == layout.tp, COUNTED_WHOLE,
         f"tp {layout.tp}, expert tp {expert_tp or layout.tp}, ep {experts}, dp {layout.dp}", "Read memory as an upper bound.", "",
         NOTE)  # fmt: skip


# -- cuts of heads, layers and widths, by the rules of the engine that cuts them


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine that cuts weights over tp, and the place where it checks that it can."""

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
    """Return the rules of heads, layers and widths that a step breaks; each model's once.

    ====================  =========================  ====================================  ===========
    engine                attention heads            key/value heads                       MLP, layers
    ====================  =========================  ====================================  ===========
    Megatron              a multiple of tp           a multiple of tp, or it of them       tp; pp
    vLLM, SGLang          a multiple of tp           a multiple of tp, or it of them       tp
    NeMo-RL's DTensor     a multiple of tp           a multiple of tp                      tp
    Ulysses in verl       a multiple of its ranks    a multiple of its ranks, or they of   .
                                                     them
    DeepSpeed             unequal parts are cut      unequal parts are cut                 .
    ====================  =========================  ====================================  ===========
    """
    findings: dict[str, Finding] = {}
    for role in step.roles:
        spec = specs.get(role.name)
        if spec is not None and role.name not in step.own:
            for rule in _of_role(role, spec):
                findings.setdefault(f"{rule.rule} {rule.got}", rule)
    actor, engine = specs.get("actor"), GENERATING.get(step.rollout.engine)
    if actor is not None and engine is not None and not step.own:
        for rule in _of_tp(actor, step.rollout.layout.tp, engine):
            findings.setdefault(f"{rule.rule} {rule.got}", rule)
    return tuple(findings.values())


def _of_role(role: RoleConfig, spec: ModelSpec) -> Iterator[Finding]:
    pp, split, heads, kv = role.layout.pp, role.split, spec.num_heads, spec.num_kv_heads
    engine = {"Megatron": MEGATRON, "FSDP2": DTENSOR}.get(role.states.name)
    if engine is not None:
        yield from _of_tp(spec, role.layout.tp, engine)
    if spec.num_layers % pp and not role.uneven:
        fitting = [divisor for divisor in range(1, spec.num_layers + 1) if spec.num_layers % divisor == 0]
        yield _broken("Megatron's pipeline parallelism must divide the layers, where no key says how they lie", spec,
                      f"{spec.num_layers} layers, pp {pp}", _advice("pp", pp, fitting), MEGATRON.source)  # fmt: skip
    if heads % split or (kv % split and split % kv):
        fitting = [divisor for divisor in range(1, heads + 1) if heads % divisor == 0 and (kv % divisor == 0 or divisor % kv == 0)]
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
    do = _advice("tp", tp, [candidate for candidate in range(1, heads + 1) if _fits(spec, candidate, engine)])
    yield _broken(f"{engine.name}'s tensor parallelism {rule}", spec, f"{got}, tp {tp}", do, engine.source)


def _fits(spec: ModelSpec, tp: int, engine: Engine) -> bool:
    kv = spec.num_kv_heads
    kv_fit = kv % tp == 0 or (engine.repeats and tp % kv == 0)
    return spec.num_heads % tp == 0 and kv_fit and spec.mlp_hidden_size % tp == 0


def _advice(name: str, current: int, fitting: list[int]) -> str:
    below, above = [size for size in fitting if size < current], [size for size in fitting if size > current]
    return f"Take {name}={' or '.join(map(str, below[-1:] + above[:1]))}."


def _broken(rule: str, spec: ModelSpec, got: str, do: str, source: str) -> Finding:
    return Finding(kind=BROKEN, rule=rule, got=f"{spec.name}: {got}", do=do, source=source)
