"""``StepConfig``: one step of a configuration, of any system; with its parts, ``Finding`` and ``Row``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hfsdk.core.layout import Layout
from hfsdk.core.lora import LoRA
from hfsdk.core.placement import Placement
from hfsdk.core.roles import RoleSpec

PHASES = ("generation", "preparation", "learning")
"""The phases of a step: responses, the passes without a gradient over them, updates (HybridFlow, section 2)."""

UNREAD, BROKEN, NOTE = "not read", "broken", "note"
"""Kinds of findings: numbers are left out for keys that are not read; the system refuses the configuration or would not do what it
says; worth to know."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding: an inconsistency, or something worth knowing."""

    kind: str
    """``"not read"``, ``"broken"`` or ``"note"``; of memory ``"does not fit"``."""
    rule: str
    """The rule in words, with its keys."""
    got: str
    """The numbers that break it."""
    do: str
    """The advice."""
    source: str = ""
    """The place where the system has the rule: release, file, function."""

    def __str__(self) -> str:
        source = f" ({self.source})" if self.source else ""
        return f"{self.kind}: {self.rule}; got {self.got}. {self.do}{source}"


@dataclass(frozen=True, kw_only=True)
class ArithmeticRow:
    """One line of the batch arithmetic."""

    name: str
    """The thing that is counted, e.g. ``"samples"``."""
    value: float | None
    """How many; not whole where a rule is broken; ``None`` where the configuration does not say."""
    how: str
    """The formula with keys and numbers."""

    def __str__(self) -> str:
        return f"{self.name}: {number_text(self.value)} = {self.how}"


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes a parameter of each part of a trained model, and over how many ranks it is cut, in addition to tp and pp.

    ``Megatron``: weights 2, gradients 4 or 2, optimizer 12 / dp. ``FSDP`` and ZeRO-3 cut all three (arXiv 1910.02054, 2304.11277).
    """

    name: str
    """Name of the states, e.g. ``"FSDP"``."""
    weights: int
    gradients: int
    optimizer: int
    weights_over: int = 1
    gradients_over: int = 1
    optimizer_over: int = 1
    gradients_stay: bool = False
    """Whether the gradients' memory is kept between updates (a buffer of Megatron's)."""


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """One role: its model, where it lives, in which layout."""

    name: str
    """hfsdk's name: ``"actor"``, ``"critic"``, ``"reference"``, ``"reward"``."""
    model: str
    """The model as the configuration names it."""
    pool: str
    """A key of :attr:`StepConfig.pools`."""
    layout: Layout
    """Layout of training or inference, filled."""
    states: States
    """The states that the role holds; of a frozen role only the weights."""
    trained: bool = False
    train_tokens: int = 0
    """Most tokens of one micro-batch on one rank of an update."""
    pass_tokens: int = 0
    """The same of a pass without a gradient."""
    recompute: str = ""
    """Recomputation, as in ``session.actor``."""
    away: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Phase -> which of weights, gradients, optimizer are in host memory while another role works in it."""
    never: tuple[str, ...] = ()
    """The states that are never on the device (CPU Adam, FSDP's CPU offload)."""
    head: str = "lm"
    lr: float | None = None
    lora: LoRA | None = None
    """Adapters that are trained in place of the weights."""
    sequence_parallel: bool | None = None
    """Whether tensor parallelism cuts norms and residuals too; ``None``: as hfsdk's own trainers choose."""
    split: int = 1
    """Ranks that share a sequence by heads (Ulysses)."""
    uneven: bool = False
    """Whether keys say which stage of a pipeline has which layers."""
    base_of: str = ""
    """The role whose frozen weights it takes, and does not hold itself."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The generating engine."""

    pool: str
    layout: Layout
    """The filled layout; ``pp`` is of the engine's stages."""
    engine: str
    """Name of the engine, e.g. ``"vllm"``."""
    gpu_share: float = 0.0
    """Share of the device's memory the engine takes for weights and cache (vLLM's ``gpu_memory_utilization``); 0: its need."""
    sleeps: bool = True
    """Whether it gives that back while it does not generate."""
    max_num_seqs: int = 0
    """Sequences that one replica decodes at once; 0 where it is not said."""
    max_num_batched_tokens: int = 0
    """Tokens of one forward pass of the engine; 0 where it is not said."""
    rows: int = 0
    """Sequences on one replica at once where there is no share."""
    cache_bytes: int = 0
    """Bytes of its key/value cache where they are said."""
    shares_weights: bool = False
    """Whether it generates with the trainer's own weights (transformers)."""
    gathers: bool = False
    """Whether each device has those whole while it generates, where they are cut over ranks."""


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """One step (iteration) as its configuration asks for it."""

    system: str
    """``"verl"``, ``"TRL"``, ``"OpenRLHF"``, ``"NeMo-RL"`` or ``"hfsdk"``."""
    release: str
    """The release whose keys, defaults and rules were used."""
    algorithm: str
    """The system's own name of the algorithm, e.g. ``"grpo"``."""
    ours: str
    """hfsdk's class of it, e.g. ``"GRPO"``; ``""`` where hfsdk has none."""
    options: Mapping[str, Any]
    """Options of that class."""
    prompts: int
    copies: int
    """Responses per prompt."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    response_tokens: int
    mini_batch: int
    """Samples of one optimizer step, over all ranks."""
    micro_batch: int | None
    """Samples of one pass on one rank; ``None`` where it is counted in tokens."""
    micro_tokens: int | None
    """Tokens of one pass on one rank; ``None`` where it is counted in samples."""
    epochs: int
    dp: int
    """Ranks over which the samples of an update are shared out."""
    pools: Mapping[str, int]
    """Name -> devices."""
    roles: tuple[RoleConfig, ...]
    rollout: RolloutConfig
    nodes: int
    gpus_per_node: int
    rounding: str
    """The fate of samples beyond whole mini-batches: ``"down"`` they are left out, ``"up"`` they make one more, ``"carried"``:
    gradients go on adding up in the next iteration."""
    how: Mapping[str, str]
    """Name of a row -> its formula in the system's own keys."""
    findings: tuple[Finding, ...] = ()
    assumed: Mapping[str, str] = field(default_factory=dict)
    """Values that the configuration does not give -> the assumed ones, and how to give them."""
    reward: str = "a function"
    """The scorer: a function, or a model's name."""
    said_samples: int = 0
    """Samples as the keys say them, where groups would not be whole; 0 where they are."""
    own: Mapping[str, RoleSpec] = field(default_factory=dict)
    """The roles of hfsdk's own configuration as they are declared, by name."""
    placed: Placement | None = None
    """The placement of hfsdk's own configuration."""

    @property
    def samples(self) -> int:
        """Samples of one iteration."""
        return self.prompts * self.copies

    @property
    def counted(self) -> int:
        """Samples of the table of batches, as the keys say."""
        return self.said_samples or self.samples

    @property
    def within(self) -> dict[str, str]:
        """Pool that is a part of another one -> that one."""
        return {} if self.placed is None else {pool.name: pool.within for pool in self.placed.pools if pool.within}

    @property
    def num_devices(self) -> int:
        """Devices of all pools, those of parts once."""
        parts = self.within
        return sum(size for pool, size in self.pools.items() if pool not in parts)

    @property
    def sample_tokens(self) -> int:
        """Tokens of the longest sample."""
        return self.prompt_tokens + self.response_tokens


def number_text(value: float | None) -> str:
    """Return a number for people, one that should be whole and is not with its fraction."""
    if value is None:
        return "not said"
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.4g}"


def plural(count: float, word: str) -> str:
    """Return ``"1 sample"``, ``"2 samples"``."""
    return f"{number_text(count)} {word}{'' if count == 1 else 's'}"
