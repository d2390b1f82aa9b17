"""Low-rank adapters: what is asked (``LoRA``), and the tensors that a model's adapters have (``AdapterSpec``).

Beside a frozen weight W [out, in] two small ones are trained (Hu et al., arXiv 2106.09685, equation 3)::

    y = W x + scale B A x        A [rank, in], drawn        B [out, rank], zero at first: nothing changes before the first step
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from hfsdk.core.checks import Index, NamedFields, Positive, Within, check_fields, checked, shown
from hfsdk.core.errors import ModelNotFoundError, OptionError, UnsupportedModelError
from hfsdk.core.experts import refuse_experts
from hfsdk.core.field_texts import documented
from hfsdk.core.hf_config import flag_of
from hfsdk.core.spec import ModelSpec
from hfsdk.core.untrusted import has_file, read_json

LINEARS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
"""The linear layers of attention and MLP, as files name them; models whose files fuse some have the fused ones."""

A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of an adapter's two tensors, as peft writes them."""

PEFT = "base_model.model."
"""What peft puts before the name of an adapter's tensor."""

BESIDE, SLOTS = 1, 2
"""The rollout's slot for the adapters of a snapshot, the role's own being in slot 0; and how many it has."""

ADAPTER_CONFIG = "adapter_config.json"
"""The file beside them that says what they are."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM 0.32 takes as the largest rank of an adapter."""

PLAIN = {
    "bias": "none", "use_dora": False, "fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {}, "lora_bias": False,
    "layers_to_transform": None, "layers_pattern": None, "exclude_modules": None, "trainable_token_indices": None,
    "target_parameters": None, "megatron_config": None, "corda_config": None, "alora_invocation_tokens": None,
}  # fmt: skip
"""What peft's description says where adapters are those of the paper; anything else there changes what they compute."""


@documented
@dataclass(frozen=True, kw_only=True)
class LoRA(NamedFields):
    """Adapters of low rank beside a frozen model: ``session.actor("smollm2-135m-instruct", lora=hf.LoRA(rank=16))``.

    Only they are trained, moved to the rollout, kept in snapshots and saved (Hu et al., arXiv 2106.09685). A critic's and a
    reward model's scalar head is trained with them.
    """

    rank: Annotated[int, Within(1, 512)] = 16
    """Rows of A and columns of B."""
    alpha: Positive = 32.0
    """What the adapter's output is multiplied with, times 1 / rank."""
    targets: str | tuple[str, ...] = "linear"
    """Which layers have one: ``"linear"``, all of attention and MLP, or some by name, e.g. ``("q_proj", "v_proj")``."""
    rank_stabilised: bool = False
    """Whether ``alpha`` is divided by the root of the rank instead (rsLoRA, Kalajdzievski, arXiv 2312.03732)."""
    seed: Index = 0
    """Of the drawn A."""

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
        """Read what adapters a folder has that peft's ``save_pretrained`` wrote.

        Raises:
            ModelNotFoundError: it has none, or of a kind that hfsdk does not train.
        """
        if not has_file(folder, ADAPTER_CONFIG):
            raise ModelNotFoundError(
                f"{shown(str(folder))} has no {ADAPTER_CONFIG} that says what its adapters are; give the folder that peft's "
                "save_pretrained, or actor.save_pretrained, wrote"
            )
        config, path = read_json(folder, ADAPTER_CONFIG), Path(folder) / ADAPTER_CONFIG
        rank, alpha, targets = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
        listed = [targets] if isinstance(targets, str) else targets
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise ModelNotFoundError(f"{path} has target_modules={shown(targets)}; a list of names of layers is needed. Mend it.")
        odd = [name for name, plain in PLAIN.items() if config.get(name) not in (None, False, plain, [], {})]
        if config.get("peft_type", "LORA") != "LORA" or odd:
            asked = ", ".join(odd) or shown(config["peft_type"])
            raise ModelNotFoundError(f"{path} asks for {asked}, which hfsdk's adapters do not have")
        named = targets if isinstance(targets, str) else tuple(dict.fromkeys(name.rsplit(".", 1)[-1] for name in listed))
        every = named == "all-linear" or set(named) >= set(LINEARS) - {"qkv_proj", "gate_up_proj"}
        try:
            stabilised = flag_of(config, str(path), "use_rslora")
            return cls(rank=rank, alpha=alpha, targets="linear" if every else named, rank_stabilised=stabilised)  # type: ignore[arg-type]
        except (OptionError, UnsupportedModelError) as error:
            raise ModelNotFoundError(f"{path}: {error}") from None

    @checked
    def peft_config(self, spec: ModelSpec, base: str, *, scalar: bool = False) -> dict[str, object]:
        """Return what peft's ``adapter_config.json`` says of them.

        Args:
            spec: the model that they stand beside.
            base: its folder.
            scalar: whether a scalar head is saved with them.
        """
        modules = dict.fromkeys(name.rsplit(".", 2)[-2] for name in linear_weights(spec))
        return {
            "peft_type": "LORA", "task_type": "SEQ_CLS" if scalar else "CAUSAL_LM", "base_model_name_or_path": base,
            "r": self.rank, "lora_alpha": self.alpha, "lora_dropout": 0.0, "bias": "none", "use_rslora": self.rank_stabilised,
            "target_modules": [name for name in modules if self.takes(name)], "inference_mode": True,
            "modules_to_save": ["score"] if scalar else None,
        }  # fmt: skip

    @property
    def scale(self) -> float:
        """What B A x is multiplied with."""
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


def padded_rank(rank: int) -> int:
    """Return the least rank that the generating engine takes with room for this one."""
    return next(most for most in RANKS if most >= rank)


def linear_weights(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the weights of a model's linear layers, which adapters can stand beside: shape [out, in] by name."""
    names = ModelSpec.tensors(spec).items()
    return {name: (shape[0], shape[1]) for name, shape in names if name.endswith("_proj.weight")}


@dataclass(frozen=True, kw_only=True)
class AdapterSpec(ModelSpec):
    """The adapters of a model as numbers: a spec whose tensors are theirs, so that a plan, a share or a checkpoint is of them."""

    lora: LoRA

    @classmethod
    def of(cls, spec: ModelSpec, lora: LoRA) -> AdapterSpec:
        """Return the adapters that ``lora`` asks for beside ``spec``."""
        return cls(**{field.name: getattr(spec, field.name) for field in fields(ModelSpec)}, lora=lora)

    @property
    def base(self) -> ModelSpec:
        """The model that they stand beside."""
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
