"""How many bytes a role needs on each of its devices, and whether the declared roles fit: refused before it is spent.

Weights, gradients and optimizer state follow Megatron-core's ``theoretical_memory_usage.py`` (bytes a parameter; d = data-parallel
size with ``AdamW(distributed=True)``, else 1; Adam keeps two fp32 moments)::

    trained in fp32    4 weights + 4 gradients + 8 / d Adam
    trained in bf16    2 weights + 4 gradients + (4 masters + 8 Adam) / d
    frozen             4 or 2 weights
    with LoRA          4 or 2 weights of a frozen base, and its adapters (and a scalar head) as above

Roles on a device that begin with the same frozen base hold it once (:mod:`hfsdk.core.frozen_bases`): here it counts for one of
them. A rollout has its own base, and room for one adapter of a padded rank.

A part that is offloaded to host memory counts only while it is used (not on CPU, where that is the same memory). On accelerators a
rollout that shares a device with its trainer sleeps: its weights and cache are there while it generates, and not while a trainer
works there; while it is given weights that are offloaded, both are. AdamW has temporaries while it steps
(:func:`adamw_temporary_bytes`); by then activations are gone, so the larger of the two counts::

    between calls      stays     of weights, gradients, optimizer what is not offloaded
    training           comes     weights, gradients, optimizer; the latter with AdamW(offload=True) for the step alone
                       works     activations + logits, or temporaries (+ optimizer)
    generating         comes     rollout_weights, kv_cache                            asked is the larger of the two phases

Only one of several such rollouts on a device can sleep, and none is counted on to. A role without a ``train`` layout
(``actor.rollout``) only generates: the engine makes no trainer, so it has the rollout's copy and its cache.

Activations follow Korthikanti et al. (arXiv 2205.05198) with an attention that keeps no scores: 18 h + 4 f bytes a token and
layer in bf16 (h hidden, f MLP), twice that in fp32; on processors, where the outputs of norms are made again, 4 h less; with
selective recompute 18 h, with full recompute 2 h (a layer's input), either way once the rest of the layer that is computed again.
Adapters keep their A x, [tokens, rank] each. Roles of a device run one after the other: what a pass needs counts once, the most.

Measured on CPU: SmolLM2-135M, 1024 tokens, fp32, one training process: 3.8 GB resident, predicted 3.9; tp2: 2.2 and 2.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hfsdk.core.checks import Index, checked, with_checked
from hfsdk.core.cluster import ClusterSpec, DeviceSpec
from hfsdk.core.errors import DeviceMemoryError
from hfsdk.core.frozen_bases import HeldBase, base_key, held_by_others
from hfsdk.core.layout import Layout
from hfsdk.core.lora import SLOTS, AdapterSpec
from hfsdk.core.placement import Placement
from hfsdk.core.roles import PARTS, RoleSpec
from hfsdk.core.rollout_sizes import cache_bytes
from hfsdk.core.spec import DTYPE_BYTES, ModelSpec
from hfsdk.core.training_choices import choose_training
from hfsdk.planner.perf.adapter_sizes import slot_numbers, tp_sums, trained_numbers
from hfsdk.planner.perf.expert_sizes import kept_rows, sparse_layers
from hfsdk.resharding.boxes import padded_vocab

CPU_PROCESS_BYTES = 700 * 10**6
"""A worker process on CPU with torch, megatron and vllm imported."""
CUDA_CONTEXT_BYTES = 600 * 10**6
"""CUDA's context with the kernels that were loaded, and the workspaces of cuBLAS: 32 MiB a handle and stream on Hopper (PyTorch,
``aten/src/ATen/cuda/CublasHandlePool.cpp``). Not measured here."""
NCCL_BYTES = 1_400 * 10**6
"""Buffers of two communicators; one of eight A100 takes 688 MB once it was used (NCCL issue 964). Not measured here."""
CUDA_GRAPH_BYTES = 500 * 10**6
"""vLLM's graphs for batches of up to 64 sequences: 0.21 GiB for a 1B (vLLM pull request 11349), 0.36 GiB a rank on tp2 (gpustack's
runner, pull request 251). Not measured here."""
GPU_PROCESS_BYTES = CUDA_CONTEXT_BYTES + NCCL_BYTES + CUDA_GRAPH_BYTES
"""A worker process on a GPU, in addition to the tensors of its roles."""
ADAMW_TEMPORARY_BYTES = {"foreach": 4, "fused": 0}
"""Bytes for each parameter that a rank steps, while it does: ``foreach`` makes the roots of all second moments before it uses one
(``torch/optim/adam.py``, ``_multi_tensor_adam``), the fused kernel keeps them in registers."""
LOGITS_COPIES = {"gpu": (2.5, 2.0), "cpu": (1.5, 1.0)}
"""fp32 arrays of [micro-batch tokens, vocabulary] alive at once, with training and without: logits, their exponentials, part of the
gradient. On processors exponentials are of a few tokens, and the gradient takes the logits' place; half for a temperature."""


MOST_OFFLOADED = 6
"""Most roles whose offloading a refusal may suggest at once."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one role on one device."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Adam's moments and, in bf16, fp32 masters; with the distributed optimizer one data-parallel share.

    The step adds nothing to them on accelerators, where it is fused (:mod:`hfsdk.core.training_choices`).
    """
    rollout_weights: int = 0
    """The generating engine's copy; twice on CPU in mode ``packed``, in mode ``shared`` the part beyond the trainer's."""
    kv_cache: int = 0
    activations: int = 0
    """Activations of one micro-batch (with pp, of all micro-batches in flight)."""
    logits: int = 0
    """Logits of one micro-batch."""
    temporaries: int = 0
    """Temporaries of AdamW while it steps (accelerators)."""
    asleep: int = 0
    """The part of ``rollout_weights`` and ``kv_cache`` that is there only while the role generates (accelerators)."""
    offloaded: tuple[str, ...] = ()
    """The ones of ``"weights"``, ``"gradients"`` and ``"optimizer"`` that are in host memory while they are not used
    (accelerators)."""
    for_steps: bool = False
    """Whether the optimizer's part of that comes for the step alone, and not for the whole of an update."""
    base: int = 0
    """The part of ``weights`` that is not trained here, which roles on a device may have together."""
    base_with: str = ""
    """The role on this device that holds this one's base, which is not in ``weights`` then."""

    @property
    def resident(self) -> int:
        """Bytes held all the time."""
        return sum(map(self.stays, PARTS)) + self.rollout_weights + self.kv_cache - self.asleep

    def stays(self, part: str) -> int:
        """Return the bytes of one of ``roles.PARTS`` that are held all the time."""
        return 0 if part in self.offloaded else int(getattr(self, part))

    @property
    def working(self) -> int:
        """Further bytes while the role's greediest call runs: one with passes of the trainer, or of generating."""
        handing = self.rollout_weights + self.weights if self.asleep and "weights" in self.offloaded else 0
        return max(self.passes, self.asleep, handing)

    @property
    def passes(self) -> int:
        """Further bytes while the trainer works."""
        comes = {part: int(getattr(self, part)) for part in self.offloaded}
        step = self.temporaries + (comes.pop("optimizer", 0) if self.for_steps else 0)
        return sum(comes.values()) + max(self.activations + self.logits, step)  # AdamW's step comes after the passes

    @property
    def total(self) -> int:
        """``resident`` + ``working``."""
        return self.resident + self.working


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The bytes that the roles of a placement ask of one device, and those that it has."""

    device: int
    device_name: str
    pool: str
    exists: int
    process: int
    """Bytes of the worker process itself."""
    roles: dict[str, MemoryEstimate]

    @property
    def asked(self) -> int:
        """Residents of all roles, the greediest role's working bytes, and the process."""
        working = max((e.working for e in self.roles.values()), default=0)
        return self.process + sum(e.resident for e in self.roles.values()) + working

    @property
    def bases(self) -> tuple[tuple[str, ...], ...]:
        """The roles that hold frozen weights together, once: each time the one that they are counted with, then the others."""
        holders = dict.fromkeys(estimate.base_with for estimate in self.roles.values() if estimate.base_with)
        return tuple((name, *(other for other, estimate in self.roles.items() if estimate.base_with == name)) for name in holders)


@checked
def role_bytes(
    role: RoleSpec, pool_size: int, *, on_cpu: bool = False, longest: Index = 0, sequence_parallel: bool | None = None
) -> MemoryEstimate:
    """Estimate the bytes of ``role`` on each device of a pool of ``pool_size`` (the fullest pipeline stage).

    ``longest``: tokens of the longest row, where it is known; one that is longer than a micro-batch is one by itself.
    ``sequence_parallel``: whether norms and residuals are cut over tp too; by default as trainers here choose.

    Raises:
        LayoutError: the role's layout does not cover ``pool_size`` devices.
    """
    if role.model is None:
        return MemoryEstimate()
    spec, size = role.model, DTYPE_BYTES[role.dtype]
    parameters = learned = frozen = activations = logits = stepped = 0
    shards, fused = 1, False  # of AdamW's state: over how many ranks `stepped` is cut
    if role.train is not None:  # a shadow that generates has no trainer
        layout = role.train.fill(pool_size)
        parameters = learned = _trainer_parameters(spec, layout, role.head)
        frozen = parameters - (spec.hidden_size if role.head == "scalar" and layout.pp == 1 else 0)
        if role.lora is not None:
            learned = trained_numbers(role, layout)
            parameters = frozen + learned
        chosen = choose_training(on_cpu=on_cpu, tp=layout.tp, dp=layout.num_copies)
        cut = chosen.sequence_parallel if sequence_parallel is None else sequence_parallel
        activations, logits = _pass_bytes(role, spec, layout, on_cpu, longest, cut)
        shards = layout.num_copies if role.optimizer is not None and role.optimizer.distributed else 1
        stepped = learned
        if layout.ep > 1 and shards > 1:  # experts' state is cut over the dp / ep ranks that have them: as much as without ep
            stepped = _trainer_parameters(spec, replace(layout, ep=1), role.head)
        fused = chosen.fused_adamw
    masters = 4 if role.dtype == "bf16" else 0
    rollout_weights = kv_cache = 0
    if role.kind == "actor" and role.rollout is not None:
        tp = role.rollout.tp
        copies = 2 if on_cpu and role.rollout_options.cpu_weights == "packed" else 1
        rollout_weights = copies * size * rollout_parameters(spec, tp, role.rollout.ep)
        if role.lora is not None:
            rollout_weights += size * SLOTS * slot_numbers(spec, role.lora, tp)
        elif on_cpu and role.rollout_options.cpu_weights == "shared":  # only one engine's are there at a time
            rollout_weights = max(0, rollout_weights - size * parameters)
        kv_cache = cache_bytes(spec, role.rollout_options, tp, role.dtype, on_cpu=on_cpu)
    sleeps = not on_cpu and role.train is not None
    offloaded = () if on_cpu else role.offloads
    return MemoryEstimate(
        weights=size * parameters,
        gradients=4 * learned if role.trainable else 0,
        optimizer=(masters + 8) * stepped // shards if role.trainable else 0,
        rollout_weights=rollout_weights,
        kv_cache=kv_cache,
        activations=activations,
        logits=logits,
        asleep=rollout_weights + kv_cache if sleeps else 0,
        temporaries=adamw_temporary_bytes(stepped // shards if role.trainable else 0, on_cpu=on_cpu, fused=fused),
        offloaded=offloaded,
        for_steps=not on_cpu and role.optimizer is not None and role.optimizer.offload,
        base=0 if (role.trainable and role.lora is None) or "weights" in offloaded else size * frozen,
    )


def bases_once(roles: Iterable[RoleSpec], estimates: Mapping[str, MemoryEstimate]) -> dict[str, MemoryEstimate]:
    """Return the roles' bytes on a device, where roles that begin with the same frozen base have it once.

    Args:
        roles: roles in filled layouts, all on one pool (or on another that has the device as well).
        estimates: the bytes that each role holds by itself, by its name.
    """
    keys = {role.name: base_key(role) for role in roles}
    others = held_by_others({name: HeldBase(keys[name], estimate.base) for name, estimate in estimates.items()})
    return {
        name: replace(e, weights=e.weights - e.base, base=0, base_with=others[name]) if name in others else e
        for name, e in estimates.items()
    }


@checked
def adamw_temporary_bytes(parameters: int, *, on_cpu: bool, fused: bool = False) -> int:
    """Return the bytes of AdamW's temporaries on a rank that steps so many parameters.

    On CPU it steps one tensor after the other, with temporaries of that one: less than any pass has.
    """
    return 0 if on_cpu else parameters * ADAMW_TEMPORARY_BYTES["fused" if fused else "foreach"]


@checked
def device_bytes(roles: Iterable[RoleSpec], placement: Placement, cluster: ClusterSpec) -> tuple[DeviceMemory, ...]:
    """Return the bytes asked of every placed device, in device order; roles without a model need no device."""
    devices = [replace(memory, device=number) for memory, numbers in alike_devices(roles, placement, cluster) for number in numbers]
    return tuple(sorted(devices, key=lambda d: d.device))


def alike_devices(
    roles: Iterable[RoleSpec], placement: Placement, cluster: ClusterSpec
) -> Iterator[tuple[DeviceMemory, tuple[int, ...]]]:
    """Yield the same once for all devices of a pool that are alike, as it is on the first of them, with their numbers."""
    devices = cluster.devices
    homes = [(role, home, frozenset(home.devices)) for role in roles if role.model for home in [placement.pool_of(role.name)]]
    for pool in (p for p in placement.pools if not p.within):
        near = [(role, home, there) for role, home, there in homes if pool.name in (home.name, home.within)]
        kinds: list[DeviceSpec] = []
        alike: dict[tuple[int, ...], list[int]] = {}
        for number in pool.devices:
            if devices[number] not in kinds:
                kinds.append(devices[number])
            # Devices are alike when they are of one kind and the same roles live on them: a part of a pool makes others of the same
            # pool.
            alike.setdefault((kinds.index(devices[number]), *(number in there for *_, there in near)), []).append(number)
        for (kind, *here), numbers in alike.items():
            spec = kinds[kind]
            on_cpu = spec.name.startswith("cpu")
            there = [(role, home.size) for (role, home, _), is_here in zip(near, here, strict=True) if is_here]
            estimates = {role.name: role_bytes(role, size, on_cpu=on_cpu) for role, size in there}
            estimates = bases_once(
                (with_checked(role, train=role.train and role.train.fill(size)) for role, size in there), estimates
            )
            # Only one of several engines on a device can sleep, and nobody knows which: none is counted on to.
            if sum(estimate.asleep > 0 for estimate in estimates.values()) > 1:
                estimates = {name: replace(estimate, asleep=0) for name, estimate in estimates.items()}
            process = CPU_PROCESS_BYTES if on_cpu else GPU_PROCESS_BYTES
            memory = DeviceMemory(
                device=numbers[0], device_name=spec.name, pool=pool.name, exists=spec.memory_bytes, process=process, roles=estimates
            )
            yield memory, tuple(numbers)


@checked
def check_fits(roles: Iterable[RoleSpec], placement: Placement, cluster: ClusterSpec) -> None:
    """Check that the declared roles fit into every device of the placement.

    Raises:
        DeviceMemoryError: with one table a pool: what is asked, what exists, and what to do.
    """
    declared = list(roles)
    over = [d for d in device_bytes(declared, placement, cluster) if d.asked > d.exists]
    if not over:
        return
    groups: dict[tuple[str, str, int], list[DeviceMemory]] = {}
    for device in over:
        groups.setdefault((device.pool, device.device_name, device.exists), []).append(device)
    text = [_table(group) for group in groups.values()]
    worst = max(over, key=lambda d: d.asked - d.exists)
    raise DeviceMemoryError(
        f"the declared roles do not fit; asked and existing bytes per device, in GB:\n{chr(10).join(text)}\n"
        f"{_advice(worst, [r for r in declared if r.name in worst.roles], placement)}"
    )


def _layer_parameters(spec: ModelSpec, tp: int, kv_shards: int) -> int:
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    split = 2 * query + 3 * spec.mlp_hidden_size
    matrices_and_norms = spec.hidden_size * (split // tp + 2 * kv // kv_shards + 2)
    biases = query // tp + 2 * kv // kv_shards if spec.qkv_bias else 0
    biases += spec.hidden_size if spec.attention_bias else 0
    biases += 2 * spec.mlp_hidden_size // tp + spec.hidden_size if spec.mlp_bias else 0
    return matrices_and_norms + biases + (2 * spec.head_dim if spec.qk_norm else 0)


def _layers_parameters(spec: ModelSpec, tp: int, kv_shards: int, pp: int = 1, ep: int = 1) -> int:
    """Parameters of the layers of a rank on the fullest stage."""
    if spec.experts is not None:
        return sparse_layers(spec, tp, kv_shards, spec.num_layers // pp, ep)
    return spec.num_layers // pp * _layer_parameters(spec, tp, kv_shards)


def _trainer_parameters(spec: ModelSpec, layout: Layout, head: str) -> int:
    """Parameters of a Megatron rank on the fullest stage: the embedding, and with pp=1 the head as well."""
    vocab = padded_vocab(spec.vocab_size, layout.tp) // layout.tp * spec.hidden_size
    own_head = spec.hidden_size if head == "scalar" else 0 if spec.tied_embeddings else vocab
    ends = vocab + spec.hidden_size + (own_head if layout.pp == 1 else 0)
    return _layers_parameters(spec, layout.tp, layout.tp, layout.pp, layout.ep) + ends


def rollout_parameters(spec: ModelSpec, tp: int, ep: int = 1) -> int:
    """Parameters of a vLLM rank; kv heads are replicated where tp exceeds them, and replicas may share experts."""
    vocab = padded_vocab(spec.vocab_size, tp) // tp * spec.hidden_size
    ends = vocab * (1 if spec.tied_embeddings else 2) + spec.hidden_size
    return _layers_parameters(spec, tp, min(tp, spec.num_kv_heads), ep=ep) + ends


def _pass_bytes(
    role: RoleSpec, spec: ModelSpec, layout: Layout, on_cpu: bool, longest: int, sequence_parallel: bool
) -> tuple[int, int]:
    """Return the bytes of activations and of logits of one micro-batch.

    1F1B keeps up to pp micro-batches of L / pp layers on the first stage: as much as one micro-batch of L layers. Where
    nothing is trained, one layer's outputs live at a time. Sequence parallelism splits the 10 h of norms and residuals as well
    (arXiv 2205.05198, table 2: 10 + 24 / t without it, 34 / t with it).
    """
    size, tp, hidden, width = DTYPE_BYTES[role.dtype], layout.tp, spec.hidden_size, spec.mlp_width_per_token
    tokens = max(role.micro_batch_tokens, -(-longest // layout.cp))
    whole = 1 / tp if sequence_parallel else 1
    norms = 10 if not on_cpu else 8 if role.recompute == "selective" else 6  # recomputed MLPs keep what they begin with
    per_layer = norms * hidden * whole + (8 * hidden + 4 * width) / tp + kept_rows(spec)
    again = {"": 0.0, "selective": 4 * width / tp, "full": per_layer - 2 * hidden * whole}[role.recompute]
    layers = spec.num_layers if role.trainable else 1
    activations = tokens * ((per_layer - again) * layers + again) * size / 2
    if role.lora is not None and role.trainable:
        inputs_kept = 1 if role.recompute == "full" else layers
        activations += tokens * inputs_kept * sum(sums.numbers for sums in tp_sums(AdapterSpec.of(spec, role.lora))) * size
    copies = LOGITS_COPIES["cpu" if on_cpu else "gpu"][0 if role.trainable else 1]
    columns = 1 if role.head == "scalar" else padded_vocab(spec.vocab_size, tp) // tp
    return round(activations), round(tokens * columns * 4 * copies)


_COLUMNS = ("weights", "gradients", "optimizer", "rollout_weights", "kv_cache", "activations", "logits", "temporaries")


def _table(group: Sequence[DeviceMemory]) -> str:
    """Draw one table for devices that are all alike."""
    first = group[0]
    numbers = [d.device for d in group]
    run = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1
    which = f"devices {numbers[0]}-{numbers[-1]}" if run else f"device{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
    lines = [
        f"{which} ({first.device_name}, pool {first.pool!r}): asked {_gb(first.asked)}, exists {_gb(first.exists)}, "
        f"too much by {_gb(first.asked - first.exists)}",
        "  " + " ".join([f"{'role':<12}", *(f"{name:>15}" for name in _COLUMNS)]),
    ]
    for name, estimate in first.roles.items():
        values = {c: f"({_gb(getattr(estimate, c))})" if c in estimate.offloaded else _gb(getattr(estimate, c)) for c in _COLUMNS}
        lines.append("  " + " ".join([f"{name:<12}", *(f"{values[column]:>15}" for column in _COLUMNS)]))
    lines.append(f"  {'process':<12} {_gb(first.process):>15}")
    working = max(first.roles, key=lambda name: first.roles[name].working)
    greediest = first.roles[working]
    doing = "it generates" if greediest.working > greediest.passes else "its greediest call runs"
    lines.append(f"  asked = all that stays, + {working}'s {_gb(greediest.working)} while {doing}, + process")
    lines += [
        f"  {name}'s rollout sleeps while it does not generate: its {_gb(estimate.asleep)} do not stay"
        for name, estimate in first.roles.items() if estimate.asleep
    ]  # fmt: skip
    lines += [
        f"  {name} has its frozen weights from {estimate.base_with}, which holds them once for both"
        for name, estimate in first.roles.items() if estimate.base_with
    ]  # fmt: skip
    if any(estimate.offloaded for estimate in first.roles.values()):
        lines.append("  (in parentheses: in host memory until the role's own calls need it)")
    return "\n".join(lines)


def _advice(device: DeviceMemory, roles: Sequence[RoleSpec], placement: Placement) -> str:
    """Name the steps that help, the ones that help most first."""
    options: dict[str, int] = {}
    estimates = device.roles.values()
    state = sum(e.weights + e.gradients + e.optimizer for e in estimates)
    axes = "tp, pp or ep" if any(r.model and r.model.experts for r in roles) else "tp or pp"
    options[f"a larger {axes}, or more devices in this pool"] = state
    replicas = {r.name: (r.train or Layout()).fill(placement.pool_of(r.name).size).num_copies for r in roles}
    repeated = [r.name for r in roles if r.optimizer is not None and not r.optimizer.distributed and replicas[r.name] > 1]
    if repeated:
        saved = sum(device.roles[name].optimizer * (1 - 1 / replicas[name]) for name in repeated)
        options["optimizer=AdamW(distributed=True)"] = round(saved)
    full = [device.roles[r.name] for r in roles if r.could_adapt and not r.shadow_of]
    options["lora=hf.LoRA(rank=16), which trains adapters alone"] = sum(e.gradients + e.optimizer for e in full)
    if not device.device_name.startswith("cpu"):
        masters = [device.roles[r.name].optimizer for r in roles if r.optimizer is not None and "optimizer" not in r.offloads]
        options["optimizer=AdamW(offload=True)"] = sum(masters)
        for word, trainable in (("trained", True), ("frozen", False)):
            away = _offloading(device, [role for role in roles if role.trainable == trainable])
            options[f"offload=True for {word} models"] = device.asked - away.asked
    if any(r.trainable and r.recompute != "full" for r in roles):
        options["recompute='full'"] = max(e.activations for e in estimates) * 3 // 4
    if len(roles) > 1:
        others = [e.resident for e in estimates]
        options["fewer roles on a device, e.g. session.place('split')"] = sum(others) - max(others)
    if any(r.dtype == "fp32" for r in roles):
        options["dtype='bf16'"] = sum(e.weights + e.rollout_weights + e.activations for e in estimates) // 2
    tokens = max(r.micro_batch_tokens for r in roles)
    options[f"micro_batch_tokens below {tokens}"] = max(e.activations + e.logits for e in estimates)
    options["smaller rollout_options (kv_cache_bytes, max_num_seqs)"] = sum(e.kv_cache for e in estimates)
    if device.device_name.startswith("cpu"):
        options["rollout_options.cpu_weights='shared'"] = sum(e.rollout_weights for e in estimates) // 2
    # Steps that free less than 2 % of what is asked would send the user on errands.
    ranked = [word for word in sorted(options, key=lambda w: -options[w]) if options[word] > device.asked // 50]
    return f"What helps, most first: {'; '.join(ranked)}.{_fits_with_offload(device, roles)}"


def _offloading(device: DeviceMemory, roles: Iterable[RoleSpec]) -> DeviceMemory:
    """Return the bytes that would be asked of a device were these roles declared with ``offload=True``."""
    away = {role.name: replace(role, offload=True).offloads for role in roles}
    return replace(device, roles={name: replace(e, offloaded=away.get(name, e.offloaded)) for name, e in device.roles.items()})


def _fits_with_offload(device: DeviceMemory, roles: Sequence[RoleSpec]) -> str:
    """Say with which roles in host memory between their calls all would fit, the fewest, if with any."""
    if device.device_name.startswith("cpu"):
        return ""
    can = [role for role in roles if not role.shadow_of and not role.offload]
    for count in range(1, min(len(can), MOST_OFFLOADED) + 1):
        bytes_by_roles = {some: _offloading(device, some).asked for some in combinations(can, count)}
        best = min(bytes_by_roles, key=lambda some: bytes_by_roles[some])
        if bytes_by_roles[best] <= device.exists:
            return f" With offload=True for {' and '.join(role.name for role in best)} it fits: asked {_gb(bytes_by_roles[best])}."
    return ""


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f}"
