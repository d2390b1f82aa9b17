"""What a model is, as numbers: ``ModelSpec``.

Pure and frozen; nothing here loads a weight or asks a device. Parameter counts follow the tensor shapes of the Hugging
Face format exactly; FLOPs follow Kaplan et al. (arXiv 2001.08361, section 2.1): 2 per weight and token forward, twice
that again backward, plus the attention term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from hfsdk.core.checks import (
    Count,
    Length,
    Name,
    NonNegative,
    OneOf,
    Positive,
    Within,
    check_fields,
    checked,
    shown,
)
from hfsdk.core.errors import ModelNotFoundError, OptionError, UnsupportedModelError
from hfsdk.core.experts import Experts, LatentAttention, latent_tensors
from hfsdk.core.field_texts import documented
from hfsdk.core.hf_config import (
    CLASS_PREFIXES,
    HEAD_CLASSES,
    MOST_LAYERS,
    biases_of,
    check_heads,
    check_neutral,
    family_of,
    flag_of,
    kv_heads_of,
    size_of,
    window_of,
)
from hfsdk.core.rope import RopeScaling, YarnScaling, rope_parameters, rope_scaling
from hfsdk.core.text import nearest
from hfsdk.core.untrusted import has_file, read_json
from hfsdk.core.weight_files import own_head

DTYPE_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes per element of the dtypes that hfsdk trains and generates in."""

Dtype = Annotated[str, OneOf(*DTYPE_BYTES)]

Heads = Annotated[int, Within(1, 10**5)]
Width = Annotated[int, Within(1, 10**7)]
"""Sizes of a model, bounded by some hundred times what the largest models have, so that a slip is told."""


@documented
@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The architecture of a causal language model (decoder only, RMSNorm, gated MLP, rotary positions).

    Families differ in the attention: ``qwen2`` adds a bias to queries, keys and values (arXiv 2407.10671), ``qwen3`` norms
    each head's queries and keys instead (arXiv 2505.09388), ``llama``, ``mistral`` (2310.06825) and ``phi3`` (2404.14219) do
    neither. A Phi-3's files hold queries, keys and values as one tensor, gate and up-projection as another.

    Example: ``ModelSpec.from_folder(path).num_parameters()``.
    """

    name: Annotated[str, Length(0, 200, encoded=False)]
    """A short name for messages and pictures, e.g. ``"SmolLM2-135M"``."""
    family: Annotated[str, OneOf(*CLASS_PREFIXES)] = "llama"
    """``"llama"``, ``"mistral"``, ``"phi3"``, ``"qwen2"`` or ``"qwen3"``."""
    num_layers: Annotated[int, Within(1, 10_000)]
    """Transformer blocks."""
    hidden_size: Width
    """Width of the residual stream."""
    mlp_hidden_size: Width
    """Width inside the gated MLP (``intermediate_size`` in ``config.json``)."""
    num_heads: Heads
    """Query heads."""
    num_kv_heads: Heads
    """Key/value heads; fewer than ``num_heads`` is grouped-query attention."""
    head_dim: Heads
    """Size of one head; need not be ``hidden_size / num_heads``."""
    vocab_size: Annotated[int, Within(1, 10**8)]
    """Rows of the embedding as stored, without any engine's padding."""
    max_positions: Count
    """Longest sequence, in tokens."""
    tied_embeddings: bool = False
    """Whether input and output embedding are one matrix."""
    norm_eps: Positive = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: Positive = 10000.0
    """Base of the rotary angles."""
    rope_scaling: RopeScaling | YarnScaling | None = None
    """Of rope type ``llama3`` or ``yarn``; ``None``: rotary positions as they are."""
    attention_bias: bool = False
    """Of llama alone: whether queries, keys, values and the output of attention have a bias."""
    mlp_bias: bool = False
    """Of llama alone: whether the three layers of the MLP have a bias."""
    sliding_window: Count | None = None
    """How many tokens each token sees, itself included; ``None``: all before it."""
    experts: Experts | None = None
    """Of a mixture of experts, for planning and simulation: the sparse layers. ``None``: every layer has one MLP."""
    latent: LatentAttention | None = None
    """Attention with compressed keys and values, for the same; ``num_kv_heads`` is 1 then, as all heads share them."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_heads % self.num_kv_heads:
            raise OptionError(
                f"{self.name}: num_kv_heads must divide num_heads; got num_kv_heads={self.num_kv_heads}, num_heads={self.num_heads}"
            )
        if (self.attention_bias or self.mlp_bias) and self.family != "llama":
            raise OptionError(f"{self.name}: attention_bias and mlp_bias are options of llama; got family={self.family!r}")
        if self.experts is not None and self.experts.first_dense >= self.num_layers:
            raise OptionError(
                f"{self.name}: experts.first_dense={self.experts.first_dense} of num_layers={self.num_layers} leaves no layer with "
                "experts; give fewer, or experts=None for a dense model"
            )

    @classmethod
    @checked
    def from_hf_config(cls, config: Mapping[str, Any], name: Annotated[str, Length(0, 200, encoded=False)] = "model") -> ModelSpec:
        """Read a Hugging Face ``config.json`` given as a dict.

        Raises:
            UnsupportedModelError: the architecture, activation, rope type, a sliding window or a bias is one the engines do not
                run, or a number is missing or none.
        """
        name = name if name.isprintable() else shown(name)
        family, rope = family_of(config, name), rope_parameters(config, name)
        check_neutral(config, rope, name)
        attention_bias, mlp_bias = biases_of(config, family, name)
        num_heads, hidden_size = (size_of(config, name, key) for key in ("num_attention_heads", "hidden_size"))
        check_heads(family, hidden_size, num_heads, name)
        return cls(
            name=name,
            family=family,
            num_layers=size_of(config, name, "num_hidden_layers", MOST_LAYERS),
            hidden_size=hidden_size,
            mlp_hidden_size=size_of(config, name, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=kv_heads_of(config, family, num_heads),
            head_dim=config.get("head_dim") or (128 if family == "qwen3" else hidden_size // num_heads),
            vocab_size=size_of(config, name, "vocab_size"),
            max_positions=size_of(config, name, "max_position_embeddings"),
            tied_embeddings=flag_of(config, name, "tie_word_embeddings"),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
            rope_scaling=rope_scaling(config, rope, family, name),
            attention_bias=attention_bias,
            mlp_bias=mlp_bias,
            sliding_window=window_of(config, family, name),
        )

    @classmethod
    @checked
    def from_folder(cls, folder: str | Path) -> ModelSpec:
        """Read ``folder/config.json``; where it ties a head to the embeddings and the files have another one, theirs counts.

        Raises:
            ModelNotFoundError: the folder has no ``config.json``, or one that cannot be read.
            UnsupportedModelError: as :meth:`from_hf_config`, and where a number is out of its range.
        """
        if not has_file(folder, "config.json"):
            raise ModelNotFoundError(
                f"{shown(str(folder))} has no config.json; a model folder holds config.json and *.safetensors as "
                "transformers' save_pretrained writes them. Check the path."
            )
        config = read_json(folder, "config.json")
        try:
            spec = cls.from_hf_config(config, name=Path(folder).resolve().name[:200] or "model")
            return replace(spec, tied_embeddings=spec.tied_embeddings and not own_head(folder))
        except (OptionError, UnsupportedModelError) as error:
            raise UnsupportedModelError(f"{folder}/config.json: {error}") from None

    @classmethod
    @checked
    def preset(cls, name: Name) -> ModelSpec:
        """Return a published architecture by name, for planning and simulation.

        Raises:
            ModelNotFoundError: no preset has this name.
        """
        if name not in PRESETS:
            known = nearest(name, PRESETS)
            raise ModelNotFoundError(f"no model preset {shown(name)}; {known}. Or give its numbers: hf.ModelSpec(...)")
        return PRESETS[name]

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return self.family == "qwen2" or self.attention_bias

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys go through a norm."""
        return self.family == "qwen3"

    @property
    def fused(self) -> bool:
        """Whether files hold queries, keys and values, and gate and up-projection, as one tensor each."""
        return self.family == "phi3"

    @checked
    def class_name(self, head: Annotated[str, OneOf(*HEAD_CLASSES)] = "lm") -> str:
        """Return the name of transformers' class with this head, ``"lm"`` or ``"scalar"``."""
        return CLASS_PREFIXES[self.family] + HEAD_CLASSES[head]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every weight as ``{Hugging Face name: shape}``, in file order."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            prefix = f"model.layers.{i}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes |= {f"{prefix}self_attn.{name}": shape for name, shape in self._attention_tensors().items()}
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            sparse = self.experts is not None and i >= self.experts.first_dense
            mlp = self._expert_tensors() if sparse else self._mlp_tensors(self.mlp_hidden_size)
            shapes |= {f"{prefix}mlp.{name}": shape for name, shape in mlp.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def _attention_tensors(self) -> dict[str, tuple[int, ...]]:
        hidden, query, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if self.latent is not None:
            return latent_tensors(self.latent, hidden, self.num_heads)
        rows = {"qkv_proj": query + 2 * kv} if self.fused else {"q_proj": query, "k_proj": kv, "v_proj": kv}
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (count, hidden) for name, count in rows.items()}
        shapes["o_proj.weight"] = (hidden, query)
        if self.qkv_bias:
            shapes |= {f"{name}.bias": (count,) for name, count in rows.items()}
        if self.attention_bias:
            shapes["o_proj.bias"] = (hidden,)
        if self.qk_norm:
            shapes |= {f"{x}_norm.weight": (self.head_dim,) for x in "qk"}
        return shapes

    def _mlp_tensors(self, width: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        rows = {"gate_up_proj": 2 * width} if self.fused else {"gate_proj": width, "up_proj": width}
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (count, hidden) for name, count in rows.items()}
        shapes["down_proj.weight"] = (hidden, width)
        if self.mlp_bias:
            shapes |= {f"{name}.bias": (count,) for name, count in (*rows.items(), ("down_proj", hidden))}
        return shapes

    def _expert_tensors(self) -> dict[str, tuple[int, ...]]:
        assert self.experts is not None
        shapes: dict[str, tuple[int, ...]] = {"gate.weight": (self.experts.count, self.hidden_size)}
        if self.experts.router_bias:
            shapes["gate.e_score_correction_bias"] = (self.experts.count,)
        each = self._mlp_tensors(self.experts.width)
        shapes |= {f"experts.{e}.{name}": shape for e in range(self.experts.count) for name, shape in each.items()}
        if self.experts.shared:
            together = self._mlp_tensors(self.experts.shared * self.experts.width)
            shapes |= {f"shared_experts.{name}": shape for name, shape in together.items()}
        return shapes

    @property
    def routed_parameters(self) -> int:
        """Weights of all experts that a router chooses from; 0 of a dense model."""
        if self.experts is None:
            return 0
        sparse = self.num_layers - self.experts.first_dense
        return sparse * self.experts.count * 3 * self.hidden_size * self.experts.width

    @property
    def mlp_width_per_token(self) -> int:
        """Width inside the MLPs that one token goes through, the mean of the layers."""
        one = self.experts
        if one is None:
            return self.mlp_hidden_size
        sparse = (self.num_layers - one.first_dense) * (one.per_token + one.shared) * one.width
        return (sparse + one.first_dense * self.mlp_hidden_size) // self.num_layers

    def num_active_parameters(self) -> int:
        """Count the weights that one token goes through: of the experts those it is sent to."""
        if self.experts is None:
            return self.num_parameters()
        unused = self.routed_parameters * (self.experts.count - self.experts.per_token) // self.experts.count
        return self.num_parameters() - unused

    def num_parameters(self) -> int:
        """Count the weights (tied embeddings once)."""
        return sum(math.prod(shape) for shape in self.tensors().values())

    @checked
    def num_bytes(self, dtype: Dtype = "bf16") -> int:
        """Return the bytes of one copy of the weights in ``dtype``."""
        return self.num_parameters() * DTYPE_BYTES[dtype]

    @checked
    def forward_flops(self, num_tokens: Annotated[int, Within(0, 10**15)], context_tokens: NonNegative) -> float:
        """Return the FLOPs of one forward pass over ``num_tokens`` that each see ``context_tokens`` on average."""
        matmul = self.num_active_parameters() - (0 if self.tied_embeddings else self.vocab_size * self.hidden_size)
        seen = context_tokens if self.sliding_window is None else min(context_tokens, self.sliding_window)
        attention = 2 * self.num_layers * seen * self.num_heads * self.head_dim
        return 2.0 * num_tokens * (matmul + attention)

    @checked
    def kv_bytes_per_token(self, dtype: Dtype = "bf16") -> int:
        """Return the bytes of key and value cache one token needs over all layers."""
        if self.latent is not None:
            return self.num_layers * (self.latent.kv_rank + self.latent.rope_dim) * DTYPE_BYTES[dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def __str__(self) -> str:
        return self.name


Sizes = tuple[int, int, int, int, int]
"""Layers, hidden size, MLP hidden size, query heads, key/value heads."""

LLAMA_SIZES: dict[str, Sizes] = {
    "llama-7b": (32, 4096, 11008, 32, 32), "llama-13b": (40, 5120, 13824, 40, 40), "llama-33b": (60, 6656, 17920, 52, 52),
    "llama-34b": (48, 8192, 22016, 64, 8), "llama-65b": (80, 8192, 22016, 64, 64), "llama-70b": (80, 8192, 28672, 64, 8),
}  # fmt: skip
"""Llama 2 (arXiv 2307.09288), its size 34b as Code Llama (2308.12950) has it, and 33b and 65b of the first Llama (2302.13971)."""

LLAMA3_SIZES: dict[str, Sizes] = {
    "llama3-1b": (16, 2048, 8192, 32, 8), "llama3-3b": (28, 3072, 8192, 24, 8), "llama3-8b": (32, 4096, 14336, 32, 8),
    "llama3-70b": (80, 8192, 28672, 64, 8), "llama3-405b": (126, 16384, 53248, 128, 8),
}  # fmt: skip
"""Llama 3, 3.1 and, below 8b, 3.2 (arXiv 2407.21783 and the published configs); the rope of 3.1 changes no size."""

QWEN_SIZES: dict[str, Sizes] = {
    "qwen2.5-0.5b": (24, 896, 4864, 14, 2), "qwen2.5-1.5b": (28, 1536, 8960, 12, 2), "qwen2.5-3b": (36, 2048, 11008, 16, 2),
    "qwen2.5-7b": (28, 3584, 18944, 28, 4), "qwen2.5-14b": (48, 5120, 13824, 40, 8), "qwen2.5-32b": (64, 5120, 27648, 40, 8),
    "qwen2.5-72b": (80, 8192, 29568, 64, 8),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8), "qwen3-1.7b": (28, 2048, 6144, 16, 8), "qwen3-4b": (36, 2560, 9728, 32, 8),
    "qwen3-8b": (36, 4096, 12288, 32, 8), "qwen3-14b": (40, 5120, 17408, 40, 8), "qwen3-32b": (64, 5120, 25600, 64, 8),
}  # fmt: skip
"""Qwen2.5 (arXiv 2412.15115) and the dense models of Qwen3 (2505.09388), and the published configs."""

SMOLLM2_SIZES: dict[str, Sizes] = {
    "smollm2-135m": (30, 576, 1536, 9, 3), "smollm2-360m": (32, 960, 2560, 15, 5), "smollm2-1.7b": (24, 2048, 8192, 32, 32),
}  # fmt: skip
"""SmolLM2 (arXiv 2502.02737) and the published configs."""

TIED = ("llama3-1b", "llama3-3b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")
"""Of these, the sizes whose output layer is the embedding; SmolLM2's all are."""


_QWEN3 = {"family": "qwen3", "head_dim": 128, "vocab_size": 151936, "max_positions": 40960, "norm_eps": 1e-6, "rope_theta": 1e6}


def _preset(name: str, sizes: Sizes, **more: Any) -> ModelSpec:
    layers, hidden, mlp, heads, kv_heads = sizes
    more = {"head_dim": hidden // heads, "tied_embeddings": name in TIED, **more}
    return ModelSpec(
        name=name, num_layers=layers, hidden_size=hidden, mlp_hidden_size=mlp, num_heads=heads, num_kv_heads=kv_heads, **more
    )


def _qwen(name: str, sizes: Sizes) -> ModelSpec:
    common = {"norm_eps": 1e-6, "rope_theta": 1e6}
    if name.startswith("qwen3"):
        return _preset(name, sizes, **_QWEN3)
    vocab = 151936 if name in TIED else 152064
    return _preset(name, sizes, family="qwen2", vocab_size=vocab, max_positions=32768, **common)


_EXPERTS: dict[str, tuple[Sizes, Experts, dict[str, Any]]] = {
    "mixtral-8x7b": ((32, 4096, 14336, 32, 8), Experts(count=8, per_token=2, width=14336),
                     {"vocab_size": 32000, "max_positions": 32768, "rope_theta": 1e6}),
    "qwen3-30b-a3b": ((48, 2048, 6144, 32, 4), Experts(count=128, per_token=8, width=768), _QWEN3),
    "qwen3-235b-a22b": ((94, 4096, 12288, 64, 4), Experts(count=128, per_token=8, width=1536), _QWEN3),
    "deepseek-v3": ((61, 7168, 18432, 128, 1),
                    Experts(count=256, per_token=8, width=2048, shared=1, first_dense=3, router_bias=True),
                    {"vocab_size": 129280, "max_positions": 163840, "norm_eps": 1e-6, "head_dim": 160,
                     "latent": LatentAttention(q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)}),
}  # fmt: skip
"""Mixtral (arXiv 2401.04088), Qwen3 (2505.09388), DeepSeek-V3 without its multi-token prediction (2412.19437)."""

PRESETS: dict[str, ModelSpec] = {
    **{name: _preset(name, sizes, vocab_size=32000, max_positions=4096) for name, sizes in LLAMA_SIZES.items()},
    **{name: _preset(name, sizes, vocab_size=128256, max_positions=8192, rope_theta=5e5) for name, sizes in LLAMA3_SIZES.items()},
    **{name: _qwen(name, sizes) for name, sizes in QWEN_SIZES.items()},
    **{
        name: _preset(name, sizes, vocab_size=49152, max_positions=8192, rope_theta=1e5, tied_embeddings=True)
        for name, sizes in SMOLLM2_SIZES.items()
    },
    **{name: _preset(name, sizes, experts=experts, **more) for name, (sizes, experts, more) in _EXPERTS.items()},
}
"""Published architectures by name, for planning and simulation."""
