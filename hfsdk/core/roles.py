"""The pure descriptions that engines build roles from: ``AdamW``, ``Sampling`` and ``RoleSpec``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated

from hfsdk.core.checks import Count, Index, Length, NamedFields, NonNegative, OneOf, Positive, Within, check_fields, checked
from hfsdk.core.errors import OptionError
from hfsdk.core.field_texts import documented
from hfsdk.core.functions import Shipped
from hfsdk.core.layout import Layout
from hfsdk.core.learning_rates import OF_ADAPTERS, RATES, WARMUP_STEPS, suggested_rate
from hfsdk.core.lora import AdapterSpec, LoRA
from hfsdk.core.spec import DTYPE_BYTES, Dtype, ModelSpec

RECOMPUTE = ("", "selective", "full")
"""How much of a forward pass the backward pass may compute again, from nothing to nearly all."""


PARTS = ("weights", "gradients", "optimizer")
"""The parts of a trained role, besides activations, that can lie in host memory; ``"optimizer"`` is masters and moments."""

DECLARED_BY = {
    "actor": "session.actor('tiny')", "critic": "session.critic('tiny')",
    "cost_critic": "session.critic('tiny', name='cost_critic')", "reference": "session.reference(actor)",
    "reward": "session.reward(my_function)", "cost": "session.cost(my_function)",
}  # fmt: skip
"""How each role that algorithms ask for is declared, for messages."""


def _check(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise OptionError(f"{name} must be {wanted}; got {name}={value!r}")


Beta = Annotated[float, Within(0, below=1)]
Parameters = Annotated[int, Within(1, 10**15)]
"""The parameters of a model."""
Learned = Annotated[str, OneOf(*RATES)]
"""The kind of learning of a model, a key of :data:`hfsdk.core.learning_rates.RATES`."""


@documented
@dataclass(frozen=True, kw_only=True)
class AdamW(NamedFields):
    """AdamW with a learning-rate schedule (Loshchilov and Hutter, arXiv 1711.05101)."""

    lr: NonNegative | None = None
    """Peak learning rate; ``None`` takes what :mod:`hfsdk.core.learning_rates` suggests for the model's size and what it learns,
    and says so at the first update."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the first and the second moment per optimizer step (Adam, arXiv 1412.6980)."""
    eps: Positive = 1e-8
    """Added to the square root of the second moment, outside it, as PyTorch does."""
    weight_decay: float = 0.0
    """Decay of the weights, decoupled: they shrink by lr times it at every step."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are scaled down to this global norm, over all shards; 0 turns clipping off."""
    schedule: Annotated[str, OneOf("constant", "linear", "cosine")] = "constant"
    """``"constant"``, ``"linear"`` or ``"cosine"``: how lr falls from its peak to ``min_lr`` after the warm-up."""
    warmup_steps: Index | None = None
    """Optimizer steps over which lr rises linearly from 0; ``None`` is 0 with an ``lr`` of your own and 10 with a suggested one."""
    total_steps: Index = 0
    """Optimizer steps after which ``min_lr`` is reached; needed by linear and cosine."""
    min_lr: float = 0.0
    """The learning rate at which linear and cosine end."""
    distributed: bool = False
    """Masters and moments are sharded over dp (Megatron's distributed optimizer, ZeRO stage 1, arXiv 1910.02054).

    Each rank then holds 1 / dp of them; gradients and updated weights are those of the plain optimizer.
    """
    offload: bool = False
    """Masters and moments stay in host memory and come to the device for the optimizer's step alone (for a whole call: the role's
    own ``offload``)."""

    def __post_init__(self) -> None:
        check_fields(self)
        needs_end = self.schedule == "constant" or self.total_steps > (self.warmup_steps or 0)
        _check(needs_end, "total_steps", self.total_steps, f"above warmup_steps for schedule {self.schedule!r}")

    @checked
    def for_model(self, num_parameters: Parameters, learns: Learned, *, adapters: bool = False) -> AdamW:
        """Return the same with a learning rate and a warm-up: its own, or those suggested.

        Args:
            num_parameters: the model's number of parameters.
            learns: the role's objective: ``"policy"``, ``"values"``, ``"preferences"``, ``"demonstrations"`` or ``"scores"``.
            adapters: whether only adapters (LoRA) are trained, which take larger steps.

        Raises:
            OptionError: it learns something else.
        """
        if self.lr is not None:
            return self if self.warmup_steps is not None else replace(self, warmup_steps=0)
        most = WARMUP_STEPS if self.schedule == "constant" else min(WARMUP_STEPS, self.total_steps // 2)
        warmup_steps = most if self.warmup_steps is None else self.warmup_steps
        lr = suggested_rate(num_parameters, learns).lr * (OF_ADAPTERS if adapters else 1)
        return replace(self, lr=lr, warmup_steps=warmup_steps)

    @checked
    def lr_at(self, step: Index) -> float:
        """Return the learning rate of optimizer step number ``step`` (the first is 0).

        Raises:
            OptionError: it has no learning rate of its own; ``for_model`` gives it the suggested one.
        """
        if self.lr is None:
            raise OptionError("this AdamW takes the learning rate suggested for its model; give lr=..., or use for_model(...)")
        warmup_steps = self.warmup_steps or 0
        if step < warmup_steps:
            return self.lr * (step + 1) / warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = min(1.0, (step - warmup_steps) / (self.total_steps - warmup_steps))
        share = 1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.min_lr + (self.lr - self.min_lr) * share


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn."""

    max_new_tokens: Count = 64
    min_new_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_k: Index = 0
    """0 keeps the whole vocabulary."""
    top_p: Annotated[float, Within(above=0, most=1)] = 1.0
    stop: tuple[Annotated[str, Length(0, 10_000)], ...] = ()
    """Strings that end a response (kept in it)."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        in_range = 0 <= self.min_new_tokens <= self.max_new_tokens
        _check(in_range, "min_new_tokens", self.min_new_tokens, f"between 0 and max_new_tokens ({self.max_new_tokens})")
        warm = self.temperature == 0 or (self.temperature >= 0.01 and math.isfinite(self.temperature))
        _check(warm, "temperature", self.temperature, "0 (greedy) or at least 0.01")

    @property
    def renormalised(self) -> bool:
        """Whether the sampler's log-probs are over a subset of the vocabulary (old_log_probs must be recomputed)."""
        return self.top_k > 0 or self.top_p < 1 or self.temperature == 0 or self.min_new_tokens > 0


def state_bytes(dtype: str, stepped: bool = True) -> int:
    """Return the bytes of a parameter with all that a state keeps of it: the weight, its fp32 master where it is not fp32 itself.

    After the first optimizer step (``stepped``) Adam's two moments as well.
    """
    return DTYPE_BYTES[dtype] + 4 * (dtype != "fp32") + 8 * stepped


@documented
@dataclass(frozen=True, kw_only=True)
class RolloutOptions(NamedFields):
    """How the generating engine is sized."""

    max_model_len: Index = 0
    """Longest prompt plus response, in tokens; 0 takes the smaller of the model's own limit and 2048."""
    max_num_seqs: Annotated[int, Within(0, 10**6)] = 0
    """Sequences decoded at once on one replica; 0 takes 64 on CPU, and on GPUs as many longest ones as the cache holds, from 64 to
    vLLM's own default (1024 on an H100). ``session.place`` chooses both sizes: :mod:`hfsdk.planner.perf.sizing`."""
    max_num_batched_tokens: Count = 4096
    """Most tokens of one forward pass of the engine: prompts that are read, and one for each sequence decoded."""
    kv_cache_bytes: Annotated[int, Within(0, 10**15)] = 0
    """Bytes of key/value cache per rank; 0 sizes it for ``max_num_seqs`` sequences: on CPU at most 256 MB, on GPUs at most what
    everything else on the device leaves while this rollout generates."""
    cpu_weights: Annotated[str, OneOf("packed", "shared")] = "packed"
    """``"packed"``: rebuild the fast packed kernels after every update; ``"shared"``: plain weights, written in place."""

    def __post_init__(self) -> None:
        check_fields(self)


@documented
@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """One role as declared: which model, which layouts, trained how."""

    name: str
    """Name of the role, unique in the session: ``"actor"``, ``"critic"``, ``"reference"``, ``"reward"`` or the user's own."""
    kind: str
    """``"actor"``, ``"critic"``, ``"reference"``, ``"reward"`` or ``"cost"``."""
    folder: str = ""
    """Folder with config.json and safetensors; empty for a reward function or in simulation."""
    model: ModelSpec | None = None
    """The architecture; ``None`` for a function."""
    head: str = "lm"
    """``"lm"``: next-token logits; ``"scalar"``: one number per token (critic, reward model)."""
    train: Layout | None = None
    """Layout of training or, for frozen models, of inference."""
    rollout: Layout | None = None
    """Layout of generation, of an actor."""
    auto: tuple[str, ...] = ()
    """Layouts that the user left open (``"train"``, ``"rollout"``): data parallel, unless a plan says otherwise. With ``"cp"``
    too a plan may let ranks share sequences (simulation)."""
    dtype: Dtype = "fp32"
    """Compute dtype; with bf16 the optimizer keeps fp32 masters."""
    optimizer: AdamW | None = None
    """``None`` for frozen models."""
    lora: LoRA | None = None
    """Adapters that are trained in place of the model's weights, which stay as they are; ``None`` trains the weights."""
    adapters: str = ""
    """Folder of adapters to begin with, as peft writes it; without one A is drawn and B is zero."""
    rollout_options: RolloutOptions = field(default_factory=RolloutOptions)
    """How the generating engine is sized."""
    micro_batch_tokens: Count = 2048
    """Most tokens of one micro-batch on one rank."""
    recompute: Annotated[str, OneOf(*RECOMPUTE)] = ""
    """Activations computed again in the backward pass instead of kept: ``""`` none, ``"selective"`` those inside attention and
    MLP, ``"full"`` all but each layer's input (Korthikanti et al., arXiv 2205.05198)."""
    offload: bool = False
    """Whether the role's state stays in host memory and comes to the device for its own calls alone: a frozen model's weights, a
    trained one's gradients, masters and moments as well. While it generates only the rollout's copy is there."""
    seed: int = 0
    """Seed of a new head."""
    restore: str = ""
    """Folder of a checkpoint to load after the initial weights (set when a pool is rebuilt)."""
    function: Shipped | None = None
    """A reward function in TRL's form, instead of a model."""
    timeout_s: Positive = 60.0
    """Most seconds one call of ``function`` may take: over a batch or, with ``workers``, over one sample."""
    workers: Index = 0
    """Processes in which ``function`` runs on one sample each; 0: on the whole batch, in the process of all functions."""
    failures: Annotated[str, OneOf("raise", "skip")] = "raise"
    """The effect of a sample that raises or takes too long, with workers: ``"raise"``, or it is not scored (``"skip"``)."""
    per_token: bool = False
    """Whether ``function`` gives a list of numbers per completion, one per token, instead of one number."""
    nodes: tuple[int, ...] = ()
    """The node of every rank, once the role is placed."""
    generated_by: str = ""
    """The shadow that generates for this actor, where there is one; ``rollout`` is then its layout."""
    shadow_of: str = ""
    """The trained role whose weights this one generates or infers with, on its own pool (a *shadow*, arXiv 2312.11819)."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def offloads(self) -> tuple[str, ...]:
        """The parts that stay in host memory while the role is idle: some of ``"weights"``, ``"gradients"``, ``"optimizer"``."""
        if self.offload and self.lora is not None:  # the base stays: other roles may have it too
            return PARTS[1:] if self.trainable else ()
        if self.offload:
            return PARTS if self.trainable else ("weights",)
        return ("optimizer",) if self.optimizer is not None and self.optimizer.offload else ()

    @property
    def learned(self) -> ModelSpec | None:
        """The part of the model that is the role's own: its adapters where it has some, else all of it; ``None`` for a function."""
        return self.model if self.model is None or self.lora is None else AdapterSpec.of(self.model, self.lora)

    @property
    def trainable(self) -> bool:
        """Whether the role has an optimizer."""
        return self.optimizer is not None

    @property
    def could_adapt(self) -> bool:
        """Whether LoRA is advice: the role trains all weights, of a model that takes adapters."""
        model = self.model
        return self.trainable and self.lora is None and model is not None and not (model.experts or model.latent)
