"""Which architecture a configuration's model has: its name is matched with the presets, or the caller says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError
from hfsdk.core.spec import PRESETS, ModelSpec
from hfsdk.planner.configs.phase_memory import Specs
from hfsdk.planner.configs.step_config import NOTE, Finding, StepConfig

Model = str | Path | ModelSpec

FAMILIES = {
    r"qwen2\.?5": "qwen2.5", r"qwen3": "qwen3", r"llama3\.?[0123]?": "llama3", r"llama2": "llama", r"smollm2": "smollm2",
}  # fmt: skip
"""What the name of a model says of its family, without hyphens -> how presets begin."""

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
        step: names the models.
        model: of the actor and all roles that have its model, or by role.

    Raises:
        OptionError: it names a role that the step lacks.
        ModelNotFoundError: no such model.
    """
    named = {role.name: role.model for role in step.roles}
    given = dict(model) if isinstance(model, Mapping) else {} if model is None else {"actor": model}
    unknown = [name for name in given if name not in named]
    if unknown:
        raise OptionError(f"model= names the role {shown(unknown[0])}; the step has {', '.join(named)}")
    found: dict[str, ModelSpec | None] = {}
    for name, path in named.items():
        if name in given:
            found[name] = spec_given(given[name])
        elif "actor" in given and path in ("", named["actor"]):
            found[name] = spec_given(given["actor"])
        else:
            found[name] = ModelSpec.from_folder(path) if _is_folder(path) else spec_named(path)
    return found


def lengthened(step: StepConfig, specs: Specs) -> tuple[Specs, tuple[Finding, ...]]:
    """Return the architectures with positions for the step's samples, and a note where a preset has fewer.

    Of a model that is known by its name the layers are known, and not whether it is a variant with a longer context.
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
