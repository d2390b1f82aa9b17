"""What a model and a cluster are, as numbers: ``ModelSpec``, ``DeviceSpec``, ``LinkSpec``, ``ClusterSpec``.

Pure and frozen; nothing here loads a weight or asks a device. Parameter counts follow the tensor shapes of the Hugging
Face format exactly; FLOPs follow Kaplan et al. (arXiv 2001.08361, section 2.1): 2 per weight and token forward, twice
that again backward, plus the attention term.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
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
from hfsdk.core.errors import ModelNotFoundError, OptionError
from hfsdk.core.hf_config import (
    CLASS_PREFIXES,
    HEAD_CLASSES,
    biases_of,
    check_neutral,
    family_of,
    kv_heads_of,
    require,
    size_of,
    window_of,
)
from hfsdk.core.rope import RopeScaling, YarnScaling, rope_parameters, rope_scaling

DTYPE_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes per element of the dtypes that hfsdk trains and generates in."""

Dtype = Annotated[str, OneOf(*DTYPE_BYTES)]

Heads = Annotated[int, Within(1, 10**5)]
Width = Annotated[int, Within(1, 10**7)]
"""Sizes of a model, bounded by some hundred times what the largest models have, so that a slip is told."""

MOST_DEVICES = 100_000
"""Devices of the largest cluster that is taken."""


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
    hidden_size: Width
    mlp_hidden_size: Width
    num_heads: Heads
    """Query heads."""
    num_kv_heads: Heads
    """Key/value heads; fewer than ``num_heads`` is grouped-query attention."""
    head_dim: Heads
    """Size of one head; need not be ``hidden_size / num_heads``."""
    vocab_size: Annotated[int, Within(1, 10**8)]
    """Rows of the embedding as stored, without any engine's padding."""
    max_positions: Count
    tied_embeddings: bool = False
    norm_eps: Positive = 1e-5
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | YarnScaling | None = None
    """Of rope type ``llama3`` or ``yarn``; ``None``: rotary positions as they are."""
    attention_bias: bool = False
    """Of llama alone: whether queries, keys, values and the output of attention have a bias."""
    mlp_bias: bool = False
    """Of llama alone: whether the three layers of the MLP have a bias."""
    sliding_window: Count | None = None
    """How many tokens each token sees, itself included; ``None``: all before it."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_heads % self.num_kv_heads:
            raise OptionError(
                f"{self.name}: num_kv_heads must divide num_heads; got num_kv_heads={self.num_kv_heads}, num_heads={self.num_heads}"
            )
        if (self.attention_bias or self.mlp_bias) and self.family != "llama":
            raise OptionError(f"{self.name}: attention_bias and mlp_bias are options of llama; got family={self.family!r}")

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
        return cls(
            name=name,
            family=family,
            num_layers=size_of(config, name, "num_hidden_layers"),
            hidden_size=hidden_size,
            mlp_hidden_size=size_of(config, name, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=kv_heads_of(config, family, num_heads),
            head_dim=config.get("head_dim") or (128 if family == "qwen3" else hidden_size // num_heads),
            vocab_size=size_of(config, name, "vocab_size"),
            max_positions=size_of(config, name, "max_position_embeddings"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
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
        """Read ``folder/config.json``.

        Raises:
            ModelNotFoundError: the folder has no ``config.json``, or one that cannot be read.
        """
        path = Path(folder) / "config.json"
        if not os.path.isfile(path):
            raise ModelNotFoundError(
                f"{shown(str(folder))} has no config.json; a model folder holds config.json and *.safetensors as "
                "transformers' save_pretrained writes them. Check the path."
            )
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelNotFoundError(f"{path} cannot be read as JSON: {shown(str(error))}. Write the folder again.") from error
        require(isinstance(config, dict), str(path), "no mapping", "what transformers' save_pretrained writes")
        return cls.from_hf_config(config, name=Path(folder).resolve().name[:200] or "model")

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
            shapes |= {f"{prefix}mlp.{name}": shape for name, shape in self._mlp_tensors().items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def _attention_tensors(self) -> dict[str, tuple[int, ...]]:
        hidden, query, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
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

    def _mlp_tensors(self) -> dict[str, tuple[int, ...]]:
        hidden, width = self.hidden_size, self.mlp_hidden_size
        rows = {"gate_up_proj": 2 * width} if self.fused else {"gate_proj": width, "up_proj": width}
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (count, hidden) for name, count in rows.items()}
        shapes["down_proj.weight"] = (hidden, width)
        if self.mlp_bias:
            shapes |= {f"{name}.bias": (count,) for name, count in (*rows.items(), ("down_proj", hidden))}
        return shapes

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
        matmul = self.num_parameters() - (0 if self.tied_embeddings else self.vocab_size * self.hidden_size)
        seen = context_tokens if self.sliding_window is None else min(context_tokens, self.sliding_window)
        attention = 2 * self.num_layers * seen * self.num_heads * self.head_dim
        return 2.0 * num_tokens * (matmul + attention)

    @checked
    def kv_bytes_per_token(self, dtype: Dtype = "bf16") -> int:
        """Return the bytes of key and value cache one token needs over all layers."""
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


def _preset(name: str, sizes: Sizes, **more: Any) -> ModelSpec:
    layers, hidden, mlp, heads, kv_heads = sizes
    more = {"head_dim": hidden // heads, "tied_embeddings": name in TIED, **more}
    return ModelSpec(
        name=name, num_layers=layers, hidden_size=hidden, mlp_hidden_size=mlp, num_heads=heads, num_kv_heads=kv_heads, **more
    )


def _qwen(name: str, sizes: Sizes) -> ModelSpec:
    common = {"norm_eps": 1e-6, "rope_theta": 1e6}
    if name.startswith("qwen3"):
        return _preset(name, sizes, family="qwen3", head_dim=128, vocab_size=151936, max_positions=40960, **common)
    vocab = 151936 if name in TIED else 152064
    return _preset(name, sizes, family="qwen2", vocab_size=vocab, max_positions=32768, **common)


PRESETS: dict[str, ModelSpec] = {
    **{name: _preset(name, sizes, vocab_size=32000, max_positions=4096) for name, sizes in LLAMA_SIZES.items()},
    **{name: _preset(name, sizes, vocab_size=128256, max_positions=8192, rope_theta=5e5) for name, sizes in LLAMA3_SIZES.items()},
    **{name: _qwen(name, sizes) for name, sizes in QWEN_SIZES.items()},
    **{
        name: _preset(name, sizes, vocab_size=49152, max_positions=8192, rope_theta=1e5, tied_embeddings=True)
        for name, sizes in SMOLLM2_SIZES.items()
    },
}
"""Published architectures by name, for planning and simulation."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return words for the known names nearest to an unknown one, e.g. ``"did you mean 'llama-70b'?"``, or all of them."""
    names = list(known)
    folded = {one.lower(): one for one in names}
    asked = name.strip().lower()
    close = difflib.get_close_matches(asked, list(folded), n=3, cutoff=0.5)
    found = [folded[one] for one in dict.fromkeys([one for one in folded if asked and one.startswith(asked)] + close)][:3]
    every = f"here are {', '.join(names)}"
    return f"did you mean {' or '.join(map(repr, found))}? T{every}" if found else f"t{every}"


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """A connection between two devices, or of a node to the network."""

    name: Name
    bandwidth: Positive
    """Bytes per second, one direction; of a network link: of a whole node, shared by its devices."""
    latency_s: NonNegative

    def __post_init__(self) -> None:
        check_fields(self)


NVLINK_3 = LinkSpec(name="NVLink", bandwidth=300e9, latency_s=5e-6)
NVLINK_4 = LinkSpec(name="NVLink 4", bandwidth=450e9, latency_s=5e-6)
PCIE_4 = LinkSpec(name="PCIe 4 x16", bandwidth=32e9, latency_s=1e-5)
SHARED_MEMORY = LinkSpec(name="shared memory", bandwidth=4e9, latency_s=1e-4)
NETWORK_200G = LinkSpec(name="200 Gbit/s", bandwidth=25e9, latency_s=2e-5)
NETWORK_8X400G = LinkSpec(name="8 x 400 Gbit/s", bandwidth=400e9, latency_s=2e-5)
NETWORK_10G = LinkSpec(name="10 Gbit/s", bandwidth=1.25e9, latency_s=1e-4)
"""Links by data sheet, one direction. 200 Gbit/s a machine is HybridFlow's testbed (arXiv 2409.19256, section 8.1), 8 x 400 Gbit/s
a DGX H100; shared memory is gloo between processes of one machine, a round figure."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator (or, without one, one worker's share of this machine)."""

    name: Name
    peak_flops: Positive
    """Dense FLOP/s in bf16 (on CPU: in fp32)."""
    memory_bytes: Annotated[int, Within(1, 10**15)]
    memory_bandwidth: Positive
    """Bytes per second of the device's own memory."""
    fp32_flops: NonNegative = 0.0
    """Dense FLOP/s in fp32 without tensor cores, which is PyTorch's default; 0 takes ``peak_flops``."""
    host_bandwidth: Positive = 25e9
    """Bytes per second between host memory and the device, one direction."""
    launches: NonNegative = 1.0
    """Whether kernels are launched from a host (0: the device is the host)."""
    link: LinkSpec = NVLINK_3
    """Between devices of this kind in one node."""
    network: LinkSpec = NETWORK_200G
    """Of a node with such devices."""

    def __post_init__(self) -> None:
        check_fields(self)

    @checked
    def flops(self, dtype: Dtype) -> float:
        """Return the peak FLOP/s in ``"bf16"`` or ``"fp32"``."""
        return self.fp32_flops or self.peak_flops if dtype == "fp32" else self.peak_flops


DEVICES: dict[str, DeviceSpec] = {
    "A100-80GB": DeviceSpec(
        name="A100-80GB", peak_flops=312e12, fp32_flops=19.5e12, memory_bytes=80 * 10**9, memory_bandwidth=2.04e12
    ),
    "A100-80GB-PCIe": DeviceSpec(
        name="A100-80GB-PCIe", peak_flops=312e12, fp32_flops=19.5e12, memory_bytes=80 * 10**9, memory_bandwidth=1.94e12,
        link=PCIE_4,
    ),
    "H100": DeviceSpec(
        name="H100", peak_flops=989e12, fp32_flops=67e12, memory_bytes=80 * 10**9, memory_bandwidth=3.35e12,
        host_bandwidth=55e9, link=NVLINK_4, network=NETWORK_8X400G,
    ),
    "H200": DeviceSpec(
        name="H200", peak_flops=989e12, fp32_flops=67e12, memory_bytes=141 * 10**9, memory_bandwidth=4.8e12,
        host_bandwidth=55e9, link=NVLINK_4, network=NETWORK_8X400G,
    ),
    "cpu": DeviceSpec(
        name="cpu", peak_flops=5e10, memory_bytes=8 * 10**9, memory_bandwidth=2e10, host_bandwidth=1e10, launches=0.0,
        link=SHARED_MEMORY, network=NETWORK_10G,
    ),
}  # fmt: skip
"""Device presets by name (vendors' data sheets, dense; ``cpu`` is a round figure for one core of a server).

The PCIe card of the A100 has the SXM module's peak on paper and less power to reach it; its links are what differs most.
"""

_GROUP = re.compile(r"^\s*(\d+)\s*[xX]\s*(\d+)\s+(\S+)\s*$")


def _group(text: str, part: str) -> tuple[int, int, DeviceSpec]:
    """Read one ``"nodes x devices name"`` of a cluster's text.

    Raises:
        OptionError: it does not parse, names an unknown device, or none.
    """
    match = _GROUP.match(part)
    if not match:
        joined = " Join kinds of devices by '+'." if re.search(r"[,;&]|\band\b", text) else ""
        raise OptionError(
            f"cluster {shown(text)} does not parse at {shown(part.strip())}; write nodes x devices and a device name, "
            f"e.g. '16x8 A100-80GB' or '8x8 H100 + 8x8 A100-80GB'; devices: {', '.join(DEVICES)}.{joined}"
        )
    if match[3] not in DEVICES:
        near = nearest(match[3][:100], DEVICES)
        raise OptionError(f"cluster {shown(text)} names the device {shown(match[3])}, which is not known; {near}")
    count, size = (int(number[:12]) for number in match.groups()[:2])
    if not count or not size:
        raise OptionError(
            f"cluster {shown(text)} has no devices at {shown(part.strip())}: it says {count} nodes of {size}; "
            "give at least one of each"
        )
    return count, size, DEVICES[match[3]]


def _slowest_links(nodes: Iterable[tuple[DeviceSpec, ...]]) -> tuple[LinkSpec, LinkSpec]:
    kinds = list({node[0].name: node[0] for node in nodes}.values())
    near, far = ([kind.link for kind in kinds], [kind.network for kind in kinds])
    return min(near, key=lambda link: link.bandwidth), min(far, key=lambda link: link.bandwidth)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Nodes x devices with their links. ``ClusterSpec.parse("16x8 A100-80GB")``."""

    node_devices: tuple[tuple[DeviceSpec, ...], ...]
    """For every node its devices."""
    intra_node: LinkSpec = NVLINK_3
    """Between devices of a node."""
    inter_node: LinkSpec = NETWORK_200G
    """Of a node to the others, shared by its devices."""
    price_per_device_hour: NonNegative = 0.0
    node_cores: tuple[Annotated[int, Within(1, MOST_DEVICES)], ...] = ()
    """For every node the processor cores that its CPU workers share, one thread each; empty where each has its own."""

    def __post_init__(self) -> None:
        check_fields(self)
        num_devices = sum(map(len, self.node_devices))
        if not self.node_devices or not all(self.node_devices):
            raise OptionError("a cluster has at least one node, and each node at least one device; e.g. '1x8 H100' has both")
        if num_devices > MOST_DEVICES:
            raise OptionError(f"a cluster has at most {MOST_DEVICES:,} devices; this one would have {num_devices:,}")
        if self.node_cores and len(self.node_cores) != len(self.node_devices):
            raise OptionError(
                f"node_cores names a number of at least 1 for each of {len(self.node_devices)} nodes; got {shown(self.node_cores)}"
            )

    @classmethod
    @checked
    def parse(cls, text: Annotated[str, Length(0, 100_000)], price_per_device_hour: NonNegative = 0.0) -> ClusterSpec:
        """Parse ``"nodes x devices name"``, joined by ``+`` for mixed clusters.

        The links are those of the device preset; in a mixed cluster, of the kind whose links are slowest (see `links_of`).

        Raises:
            OptionError: the text does not parse or names an unknown device, or no devices or too many.
        """
        groups = [_group(text, part) for part in text.split("+")]
        num_devices = sum(count * size for count, size, _ in groups)
        if num_devices > MOST_DEVICES:
            raise OptionError(f"a cluster has at most {MOST_DEVICES:,} devices; {shown(text)} would have {num_devices:,}")
        nodes = [(device,) * size for count, size, device in groups for _ in range(count)]
        return cls.of(nodes, price_per_device_hour=price_per_device_hour)

    @classmethod
    @checked
    def of(
        cls, nodes: Sequence[tuple[DeviceSpec, ...]], *, price_per_device_hour: NonNegative = 0.0, node_cores: tuple[int, ...] = ()
    ) -> ClusterSpec:
        """Return the cluster of these nodes with their devices' own links; of several kinds, of the one whose links are slowest."""
        alike = cls(node_devices=tuple(nodes), price_per_device_hour=price_per_device_hour, node_cores=node_cores)
        near, far = _slowest_links(alike.node_devices)
        return replace(alike, intra_node=near, inter_node=far)

    @checked
    def links_of(self, nodes: Sequence[int]) -> tuple[LinkSpec, LinkSpec]:
        """Return the link inside and the link between these nodes.

        Where the cluster's links are those of its devices, nodes of one kind in a mixed cluster have their own.
        """
        nodes = [self._known(node) for node in nodes]
        if not nodes:
            raise OptionError("links are between nodes; nodes names none")
        if (self.intra_node, self.inter_node) != _slowest_links(self.node_devices):
            return self.intra_node, self.inter_node
        return _slowest_links([self.node_devices[node] for node in nodes])

    @property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """All devices, node by node; a device's index here is its number everywhere in hfsdk."""
        return tuple(device for node in self.node_devices for device in node)

    @property
    def num_devices(self) -> int:
        """Number of devices over all nodes."""
        return len(self.devices)

    @checked
    def node_of(self, device: int) -> int:
        """Return the node that holds device number ``device``.

        Raises:
            OptionError: the cluster has no such device.
        """
        asked = device
        for node, devices in enumerate(self.node_devices):
            if 0 <= device < len(devices):
                return node
            device -= len(devices)
        raise OptionError(f"the cluster has {self.num_devices} devices; asked for number {asked}")

    @checked
    def cores_of(self, node: int) -> int:
        """Return the cores that the workers of a node share; as many as workers where each has its own."""
        return self.node_cores[self._known(node)] if self.node_cores else len(self.node_devices[self._known(node)])

    def _known(self, node: int) -> int:
        if not 0 <= node < len(self.node_devices):
            raise OptionError(f"the cluster has the nodes 0 to {len(self.node_devices) - 1}; asked for node={node}")
        return node

    @property
    def shares_cores(self) -> bool:
        """Whether some node has fewer cores than workers."""
        return any(cores < len(node) for cores, node in zip(self.node_cores, self.node_devices, strict=False))

    @checked
    def with_cores(self, cores: Annotated[int, Within(1, MOST_DEVICES)]) -> ClusterSpec:
        """Return the same cluster whose workers share ``cores`` processor cores on each node (CPU devices).

        Raises:
            OptionError: it is not at least 1.
        """
        return replace(self, node_cores=(cores,) * len(self.node_devices))

    @checked
    def with_memory(self, memory_bytes: Annotated[int, Within(1, 10**15)]) -> ClusterSpec:
        """Return the same cluster with every device's memory set to ``memory_bytes``."""
        nodes = tuple(tuple(replace(d, memory_bytes=memory_bytes) for d in node) for node in self.node_devices)
        return replace(self, node_devices=nodes)

    def __str__(self) -> str:
        parts: list[str] = []
        seen: list[tuple[int, str, int]] = []
        for node in self.node_devices:
            key = (len(node), node[0].name)
            if seen and seen[-1][:2] == key:
                seen[-1] = (*key, seen[-1][2] + 1)
            else:
                seen.append((*key, 1))
        parts = [f"{count}x{size} {name}" for size, name, count in seen]
        return " + ".join(parts)
