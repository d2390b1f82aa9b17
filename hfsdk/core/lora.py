"""Low-rank adapters: the user's declaration (``LoRA``), and the tensors that a model's adapters have (``AdapterSpec``).

Next to a frozen weight W [out, in] two small ones are trained (Hu et al., arXiv 2106.09685, equation 3)::

    y = W x + scale B A x        A [rank, in], drawn        B [out, rank], zero at first: nothing changes before the first step
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from hfsdk.core.checks import Index, NamedFields, Positive, Within, check_fields, checked, shown
from hfsdk.core.errors import ModelNotFoundError, OptionError, UnsupportedModelError
from hfsdk.core.field_texts import documented
from hfsdk.core.spec import ModelSpec, flag_of, refuse_experts
from hfsdk.core.untrusted import folders_with, has_file, read_json
from hfsdk.core.weight_files import ADAPTER_WEIGHTS, weight_names

LINEARS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
"""The linear layers of attention and MLP, as files name them; models whose files fuse some have the fused ones."""

A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of an adapter's two tensors, as peft writes them."""

PEFT = "base_model.model."
"""The prefix that peft puts before the name of an adapter's tensor."""

BESIDE, SLOTS = 1, 2
"""The rollout's slot for the adapters of a snapshot, the role's own being in slot 0; and how many it has."""

ADAPTER_CONFIG = "adapter_config.json"
"""The file next to the adapters that describes them."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM 0.32 takes as the largest rank of an adapter."""

ALL_LINEAR = "all-linear"
"""The text that peft takes for every linear layer but the head."""

WITHOUT_EFFECT = (
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout",
    "megatron_core", "runtime_config", "ensure_weight_tying", "qalora_group_size", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "velora_config", "exclude_modules", "layers_to_transform", "layers_pattern", "unsloth_fixed",
    "lora_dtype", "lorap_lr_ratio", "hfsdk_score",
)  # fmt: skip
"""Fields of peft's description that change nothing of what trained adapters compute: who made them, how they were begun and trained
(without dropout here), options of fields that are refused; and which layers have adapters, which the tensors say. ms-swift adds
``lora_dtype`` and ``lorap_lr_ratio``."""

NEUTRAL: dict[str, Any] = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {},
    "lora_bias": False, "use_qalora": False, "layer_replication": None, "trainable_token_indices": None, "target_parameters": None,
    "megatron_config": None, "alora_invocation_tokens": None, "monteclora_config": None, "use_bdlora": None, "arrow_config": None,
    "kasa_config": None,
}  # fmt: skip
"""Fields that change it -> their value where adapters are those of the paper."""

BASE_AS_IT_WAS = (True, False, "gaussian", "orthogonal", "eva", "mica")
"""Ways in which A and B were initialised where the weights stayed; others (PiSSA, OLoRA, LoftQ) have changed the weights too."""

NOT_KEPT = ("auto_mapping", "init_lora_weights", "exclude_modules", "layers_to_transform", "layers_pattern")
"""Fields that are not written again: a name of code that peft would import, and what ``target_modules`` says as it is written."""

READ = ("r", "lora_alpha", "target_modules", "use_rslora", "modules_to_save", "init_lora_weights")
"""Fields that are read."""

SCALAR_HEADS = ("score", "classifier")
"""The names that peft's ``modules_to_save`` has of a scalar head; peft names both, whichever there is."""

MERGE = (
    "Merge them into the model with peft, peft_model.merge_and_unload().save_pretrained(folder), and give that folder as the model."
)
"""The advice for adapters that hfsdk does not run."""


@documented
@dataclass(frozen=True, kw_only=True)
class LoRA(NamedFields):
    """Low-rank adapters of a frozen model: ``session.actor("smollm2-135m-instruct", lora=hf.LoRA(rank=16))``.

    Only they are trained, moved to the rollout, kept in snapshots and saved (Hu et al., arXiv 2106.09685). A critic's and a
    reward model's scalar head is trained with them.
    """

    rank: Annotated[int, Within(1, 512)] = 16
    """Rows of A and columns of B."""
    alpha: Positive = 32.0
    """Factor of the adapter's output, times 1 / rank."""
    targets: str | tuple[str, ...] = "linear"
    """The layers that have an adapter: ``"linear"``, all of attention and MLP, or some by name, e.g. ``("q_proj", "v_proj")``."""
    rank_stabilised: bool = False
    """Whether ``alpha`` is divided by the root of the rank instead (rsLoRA, Kalajdzievski, arXiv 2312.03732)."""
    seed: Index = 0
    """Seed of the drawn A."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.targets == "linear":
            return
        names = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        for name in names:
            if name not in LINEARS:
                raise OptionError(f"targets must be 'linear' or names out of {', '.join(LINEARS)}; got {shown(name)}")
        if not names:
            raise OptionError("targets names no layer: give 'linear', or some of " + ", ".join(LINEARS))
        object.__setattr__(self, "targets", tuple(dict.fromkeys(names)))

    @classmethod
    @checked
    def from_folder(cls, folder: str | Path) -> LoRA:
        """Read the declaration of the adapters that peft's ``save_pretrained`` wrote into a folder.

        Raises:
            ModelNotFoundError: it has none, or of a kind that hfsdk does not train.
        """
        if not has_file(folder, ADAPTER_CONFIG):
            named = folders_with(folder, ADAPTER_CONFIG)
            what_to_do = "give the folder that peft's save_pretrained, or actor.save_pretrained, wrote"
            if named:
                inside = " or ".join(map(shown, named[:3]))
                what_to_do = f"peft writes adapters with a name into a folder of that name: give the one inside it, {inside}"
            raise ModelNotFoundError(f"{shown(str(folder))} has no {ADAPTER_CONFIG} that says what its adapters are; {what_to_do}")
        config, path = read_json(folder, ADAPTER_CONFIG), Path(folder) / ADAPTER_CONFIG
        _check_fields_of(config, path)
        targets = _targets_of(folder, config, path)
        every = set(targets) >= set(LINEARS) - {"qkv_proj", "gate_up_proj"}
        try:
            stabilised, rank, alpha = flag_of(config, str(path), "use_rslora"), config.get("r"), config.get("lora_alpha")
            if alpha == 0:
                raise OptionError(
                    "lora_alpha=0 multiplies adapters by 0, in peft too; verl has written it for every alpha. Write the "
                    "training's alpha there"
                )
            return cls(rank=rank, alpha=alpha, targets="linear" if every else targets, rank_stabilised=stabilised)  # type: ignore[arg-type]
        except (OptionError, UnsupportedModelError) as error:
            raise ModelNotFoundError(f"{path}: {error}") from None

    @checked
    def peft_config(
        self, spec: ModelSpec, base: str, *, scalar: bool = False, before: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return their ``adapter_config.json`` as peft has it.

        Args:
            spec: the model that they adapt.
            base: the base model's folder.
            scalar: whether a scalar head is saved with them.
            before: the description of the adapters that training began with; entries that training has not changed stay.
        """
        modules = dict.fromkeys(name.rsplit(".", 2)[-2] for name in linear_weights(spec))
        same = {key: value for key, value in (before or {}).items() if key not in NOT_KEPT}
        config = {"task_type": "SEQ_CLS" if scalar else "CAUSAL_LM", "base_model_name_or_path": base, "lora_dropout": 0.0, **same}
        return {
            **config, "peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "bias": "none", "inference_mode": True,
            "use_rslora": self.rank_stabilised, "target_modules": [name for name in modules if self.takes(name)],
            "modules_to_save": ["score"] if scalar else None,
        }  # fmt: skip

    @property
    def scale(self) -> float:
        """The factor of B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    def __str__(self) -> str:
        targets = "" if self.targets == "linear" else f" of {', '.join(self.targets)}"
        return f"LoRA rank {self.rank}{targets}"

    @checked
    def takes(self, module: str) -> bool:
        """Whether a layer, e.g. ``"model.layers.0.mlp.up_proj"``, has an adapter."""
        last = module.rsplit(".", 1)[-1]
        return last in (LINEARS if self.targets == "linear" else self.targets)

    @checked
    def check_model(self, spec: ModelSpec) -> None:
        """Check that a model has every layer that is asked for.

        Raises:
            OptionError: it has not; models whose files fuse queries, keys and values have ``qkv_proj`` alone.
            UnsupportedModelError: it is a mixture of experts.
        """
        refuse_experts("LoRA", spec.experts or spec.latent, spec.name)
        if self.targets != "linear":
            there = dict.fromkeys(name.rsplit(".", 2)[-2] for name in linear_weights(spec))
            for name in self.targets:
                if name not in there:
                    raise OptionError(f"{spec.name} has no layer {shown(name)} for an adapter; it has {', '.join(there)}")


def _check_fields_of(config: Mapping[str, Any], path: Path) -> None:
    """Refuse fields of peft's description that ask for more than the paper's adapters, and unknown ones that are not empty.

    Raises:
        ModelNotFoundError: names the fields.
    """
    # peft writes every field it has, most of them at their empty values: only what says something can matter.
    said = {key: value for key, value in config.items() if value not in (None, False, "", [], {})}
    odd = [key for key, plain in NEUTRAL.items() if said.get(key, plain) != plain]
    odd += [key for key in said if key not in (*READ, *NEUTRAL, *WITHOUT_EFFECT)]
    # How adapters were initialised matters only where that changed the base as well (PiSSA, LoftQ): they do not fit the base then.
    begun = config.get("init_lora_weights", True)
    if begun is not None and not any(begun is way or (isinstance(begun, str) and begun.lower() == way) for way in BASE_AS_IT_WAS):
        odd.append("init_lora_weights")
    unsupported = [f"{key}={shown(config[key])}" for key in odd]
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or any(name not in SCALAR_HEADS for name in saved):
        unsupported.append(f"modules_to_save={shown(saved)} (whole weights that were trained beside the adapters)")
    if unsupported:
        raise ModelNotFoundError(f"{path} asks for {', '.join(unsupported)}, which hfsdk's adapters do not have. {MERGE}")


def _targets_of(folder: str | Path, config: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Return the last names of the layers that have adapters: as the tensors say, and only without these the description.

    Where it is a pattern, as Unsloth writes it, nothing is matched with it.

    Raises:
        ModelNotFoundError: it names none, or one that has no adapter here.
    """
    targets = config.get("target_modules")
    listed = [targets] if isinstance(targets, str) else targets
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ModelNotFoundError(f"{path} has target_modules={shown(targets)}; a list of names of layers is needed. Mend it.")
    has_tensors = has_file(folder, ADAPTER_WEIGHTS) or has_file(folder, f"{ADAPTER_WEIGHTS}.index.json")
    modules = [name.removesuffix(A) for name in weight_names(folder, ADAPTER_WEIGHTS) if name.endswith(A)] if has_tensors else []
    if not modules and isinstance(targets, str):
        if targets != ALL_LINEAR:
            raise ModelNotFoundError(
                f"{path} has target_modules={shown(targets)}, a pattern, and there are no tensors that say which layers it means: "
                f"{ADAPTER_WEIGHTS} has none. Take another copy."
            )
        return LINEARS
    named = [] if isinstance(targets, str) else listed
    last = dict.fromkeys(name.rsplit(".", 1)[-1] for name in (*sorted(modules), *named))
    odd = [name for name in last if name not in LINEARS]
    if odd:
        raise ModelNotFoundError(
            f"{path} has adapters of {', '.join(map(shown, odd[:3]))}; hfsdk has them of {', '.join(LINEARS)}. {MERGE}"
        )
    there = {name.rsplit(".", 1)[-1] for name in modules} or set(last)
    return tuple(name for name in LINEARS if name in there)


def padded_rank(rank: int) -> int:
    """Return the least rank that the generating engine takes with room for this one."""
    return next(most for most in RANKS if most >= rank)


def linear_weights(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the weights of a model's linear layers, which can have adapters: shape [out, in] by name."""
    names = ModelSpec.tensors(spec).items()
    return {name: (shape[0], shape[1]) for name, shape in names if name.endswith("_proj.weight")}


@dataclass(frozen=True, kw_only=True)
class AdapterSpec(ModelSpec):
    """The adapters of a model as numbers: a spec whose tensors are theirs, so that a plan, a share or a checkpoint is of them."""

    lora: LoRA

    @classmethod
    def of(cls, spec: ModelSpec, lora: LoRA) -> AdapterSpec:
        """Return the adapters that ``lora`` asks for on ``spec``."""
        return cls(**{field.name: getattr(spec, field.name) for field in fields(ModelSpec)}, lora=lora)

    @property
    def base(self) -> ModelSpec:
        """The model that they adapt."""
        return ModelSpec(**{field.name: getattr(self, field.name) for field in fields(ModelSpec)})

    def __str__(self) -> str:
        return f"{self.lora} of {self.name}" if self.lora.targets == "linear" else f"{self.lora} in {self.name}"

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every adapter's A [rank, in] and B [out, rank] as ``{name: shape}``."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (rows, columns) in linear_weights(self).items():
            module = name.removesuffix(".weight")
            if self.lora.takes(module):
                shapes[module + A], shapes[module + B] = (self.lora.rank, columns), (rows, self.lora.rank)
        return shapes
