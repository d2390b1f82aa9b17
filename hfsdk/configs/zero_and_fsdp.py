"""How TRL's processes are launched, and how their model is cut over them: DeepSpeed, FSDP or whole copies (DDP).

The same is said in five ways, and is one set of keys here: a file or dict of DeepSpeed (``deepspeed.zero_optimization.stage``),
flags of ``accelerate launch`` (``zero_stage``, ``fsdp_sharding_strategy``) and its configuration file (the same below
``deepspeed_config`` and ``fsdp_config``), and arguments of transformers (``fsdp="full_shard"``). A rule of FSDP1 is verl's too.

Sources: ``accelerate/commands/launch.py`` 1.15 (``_validate_launch_command``), ``transformers/training_args.py`` 5.19
(``world_size``, ``_n_gpu``), ``torch/distributed/run.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hfsdk.configs.settings import Settings
from hfsdk.configs.step_config import NOTE, States

PROCESSES = "num_processes"
ZERO, OFFLOADED, PARAMS_OFFLOADED = (
    f"deepspeed.zero_optimization.{key}" for key in ("stage", "offload_optimizer.device", "offload_param.device")
)
LAUNCH_DEFAULTS: dict[str, Any] = {
    PROCESSES: None, "num_machines": None, "nproc_per_node": None, "nnodes": None, "num_gpus": None, "num_nodes": None,
    "include": None,
    "CUDA_VISIBLE_DEVICES": None, "dtype": None, "torch_dtype": None,
    "model_init_kwargs.dtype": None, "model_init_kwargs.torch_dtype": None,
    "deepspeed": None, "deepspeed_config_file": None, "use_deepspeed": None, "distributed_type": None, "multi_gpu": None,
    "zero_stage": None,
    "offload_optimizer_device": None, "offload_param_device": None, ZERO: None, OFFLOADED: None, PARAMS_OFFLOADED: None,
    "fsdp": None, "use_fsdp": None, "fsdp_sharding_strategy": None, "fsdp_version": None, "fsdp_reshard_after_forward": None,
    "fsdp_offload_params": None, "fsdp_config": None, "fsdp_activation_checkpointing": None, "gradient_checkpointing": None,
}  # fmt: skip
ZERO_OF_FLAGS = 2
"""``accelerate launch --use_deepspeed`` without ``--zero_stage``."""

ACCELERATE_CONFIGS: dict[str, dict[str, Any]] = {
    "zero1": {
        "num_processes": 8, "distributed_type": "DEEPSPEED", "zero_stage": 1, "deepspeed_config.gradient_accumulation_steps": 1,
    },
    "zero2": {"num_processes": 8, "distributed_type": "DEEPSPEED", "zero_stage": 2},
    "zero3": {"num_processes": 8, "distributed_type": "DEEPSPEED", "zero_stage": 3},
    "fsdp1": {
        "num_processes": 8, "distributed_type": "FSDP", "fsdp_version": 1, "fsdp_reshard_after_forward": "FULL_SHARD",
    },
    "fsdp2": {"num_processes": 8, "distributed_type": "FSDP", "fsdp_version": 2, "fsdp_reshard_after_forward": True},
    "multi_gpu": {"num_processes": 8, "distributed_type": "MULTI_GPU"},
    "single_gpu": {"num_processes": 8, "distributed_type": "NO"},
}  # fmt: skip
"""``--accelerate_config`` of TRL's command line -> the keys of its file that count (``trl/accelerate_configs``)."""

OF_FSDP_CONFIG = {"cpu_offload": "offload_params"}
"""Names in transformers' ``fsdp_config``, which stand there without ``fsdp_``, where accelerate has another."""

STRATEGIES = {
    "FULL_SHARD": (True, True), "SHARD_GRAD_OP": (False, True), "NO_SHARD": (False, False), "HYBRID_SHARD": (True, True),
    "HYBRID_SHARD_ZERO2": (False, True),
}  # fmt: skip
"""FSDP's -> whether weights, and whether gradients and moments, are cut; by their numbers from 1 too."""
DTYPES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "auto": 2, "torch.bfloat16": 2, "torch.float32": 4, "torch.float16": 2, "fp32": 4,
    "bf16": 2,
}  # fmt: skip
NEEDS_MEMORY = ("memory", "seconds")
COUNTING = r"accelerate|(^|\s)deepspeed"
"""Launchers that start a process for each visible device; torchrun starts one, and python too."""
BY_OTHERS = ("NPROC_PER_NODE", "NNODES", "WORLD_SIZE")
"""Variables that none of these launchers counts processes by, but other programs and scripts do."""


def named_now(keys: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return keys by the flags of ``accelerate launch``, and which were given by another name, in its file or as a list."""
    preset = str(keys.get("accelerate_config", ""))
    if preset in ACCELERATE_CONFIGS:
        keys = {**ACCELERATE_CONFIGS[preset], **{key: value for key, value in keys.items() if key != "accelerate_config"}}
    renamed = {}
    for key in keys:
        outer, _, inner = key.partition(".")
        of_zero = outer == "deepspeed_config" and inner not in ("", "gradient_accumulation_steps")
        if of_zero:
            renamed[key] = inner
        elif outer == "fsdp_config" and inner:
            plain = inner.removeprefix("fsdp_")
            renamed[key] = f"fsdp_{OF_FSDP_CONFIG.get(plain, plain)}"
        elif key.startswith("dynamo_config."):
            renamed[key] = inner if inner.startswith("dynamo_") else f"dynamo_{inner}"
    by_flag = {renamed.get(key, key): value for key, value in keys.items()}
    return by_flag, renamed


def processes_of(s: Settings, num_gpus: int | None) -> tuple[int, int, str, dict[str, str]]:
    """Return the trainer's processes, their nodes, the words for them, and the assumptions."""
    nodes, nodes_key = _first(s, "num_machines", "nnodes", "num_nodes")
    processes = s.maybe_whole(PROCESSES, 1)
    if _type(s) == "NO":
        return 1, 1, "distributed_type NO: one process", {}
    if processes is not None:
        return processes, nodes or 1, f"{PROCESSES} {processes}", {}
    each, key = _first(s, "nproc_per_node", "num_gpus")
    visible, listing = _listed(s)
    on_each_gpu = s.value("nproc_per_node") in ("gpu", "auto")
    if on_each_gpu and visible:
        s.odd.pop("nproc_per_node", None)
    if each is None and (listing == "include" or on_each_gpu or re.search(COUNTING, s.runs)):
        each, key = visible, f"devices of {listing}"
    if each is not None:
        words = f"{key} {each}" + f" x {nodes_key} {nodes}" * bool(nodes)
        return each * (nodes or 1), nodes or 1, words, {}
    if num_gpus is not None:
        for odd in ("nproc_per_node", "nnodes", "num_gpus", "num_nodes"):
            s.odd.pop(odd, None)
        return num_gpus, nodes or 1, f"the {num_gpus} GPUs of cluster=", {}
    for other in (*BY_OTHERS, *([listing] if (visible or 0) > 1 else [])):
        if s.has(other):
            s.odd[other] = (s.value(other), ("sizes",))
    count = nodes or 1
    said = f"{count}: its configuration does not say how many processes it is launched with; cluster='1x8 H100' does"
    return count, count, f"{count} process{'es' * (count > 1)}, assumed", {"processes": said}


def _type(s: Settings) -> str:
    """Return how accelerate launches: as a flag says, else as its file does; ``""`` where neither is there."""
    for flag, name in (("use_deepspeed", "DEEPSPEED"), ("use_fsdp", "FSDP"), ("multi_gpu", "MULTI_GPU")):
        if s.yes(flag):
            return name
    return s.text("distributed_type").upper()


def _first(s: Settings, *keys: str) -> tuple[int | None, str]:
    """Return the number of the first of these keys that is given; a word in its place (``gpu``, ``1:4``) is noted as not read."""
    first: tuple[int | None, str] = (None, "")
    for key in keys:
        value = s.value(key)
        if value is None or first[1]:
            continue
        if isinstance(value, str) and not value.isdigit():
            s.odd[key] = (value, ("sizes",))
        else:
            first = s.maybe_whole(key, 1), key
    return first


def _listed(s: Settings) -> tuple[int | None, str]:
    """Return how many devices a launcher's list names, and its key: ``--include localhost:0,1``, ``CUDA_VISIBLE_DEVICES=0,1``."""
    for key in ("include", "CUDA_VISIBLE_DEVICES"):
        value = s.value(key)
        names = (
            [str(item) for item in value] if isinstance(value, (list, tuple)) else str("" if value is None else value).split("@")
        )
        devices = [device for name in names for device in name.rpartition(":")[2].split(",") if device.strip()]
        if devices:
            return len(devices), key
    return None, ""


def weight_bytes(s: Settings, assumed: dict[str, str]) -> int:
    """Return the bytes of a weight as it is loaded: fp32 where nothing is said.

    ``trl/trainer/utils.py``, ``create_model_from_path``.
    """
    for key in ("model_init_kwargs.dtype", "model_init_kwargs.torch_dtype", "dtype", "torch_dtype"):
        said = s.one_of(key, tuple(DTYPES), "memory")
        if said:
            if said == "auto":
                assumed["dtype"] = f"bf16, as nearly all files have it: {key}=auto is theirs"
            return DTYPES.get(said, 4)
    return 4


def states_of(s: Settings, processes: int, nodes: int, assumed: dict[str, str]) -> tuple[States, tuple[str, ...]]:
    """Return how states lie, and which of them are never on the device."""
    stage, param, moments = _zero(s)
    each = weight_bytes(s, assumed)
    if isinstance(stage, int) and stage >= 0:
        over = [processes if stage >= least else 1 for least in (3, 2, 1)]
        states = States(
            name=f"ZeRO-{stage}", weights=2, gradients=2, optimizer=12, weights_over=over[0], gradients_over=over[1],
            optimizer_over=over[2],
        )  # fmt: skip
        return states, ("weights",) * (param and stage == 3) + ("optimizer",) * moments
    cut, offload, per_node = _fsdp(s)
    ranks = max(1, processes // max(1, nodes)) if per_node else processes
    weights, rest = (ranks if is_cut else 1 for is_cut in cut or (False, False))
    states = States(
        name="DDP" if cut is None or not any(cut) else "FSDP", weights=each, gradients=each, optimizer=2 * each,
        weights_over=weights, gradients_over=rest, optimizer_over=rest,
    )  # fmt: skip
    return states, ("weights", "gradients", "optimizer") * (offload and cut is not None)


def _zero(s: Settings) -> tuple[int | None, bool, bool]:
    """Return the stage of ZeRO, ``None`` without DeepSpeed, and whether weights and moments are in host memory."""
    for key in ("deepspeed", "deepspeed_config_file"):
        file = s.value(key)
        if file not in (None, "", {}, False):
            s.odd[key] = (file, NEEDS_MEMORY)  # a file that is not here
    said = s.value(ZERO)
    stage = None if said is None or said == "auto" else s.maybe_whole(ZERO)
    if said == "auto":
        s.odd[ZERO] = (said, NEEDS_MEMORY)
    by_flag, how = s.maybe_whole("zero_stage"), _type(s)
    launched = how == "DEEPSPEED" or (how == "" and by_flag is not None and "accelerate" not in s.runs)
    if stage is None and launched:
        stage = ZERO_OF_FLAGS if by_flag is None else by_flag
    if stage is None and s.has("deepspeed"):
        stage = 0
    away = [
        any(str(s.value(key)).lower() in ("cpu", "nvme") for key in keys)
        for keys in ((PARAMS_OFFLOADED, "offload_param_device"), (OFFLOADED, "offload_optimizer_device"))
    ]
    return stage, away[0], away[1]


def _fsdp(s: Settings) -> tuple[tuple[bool, bool] | None, bool, bool]:
    """Return which states FSDP cuts, ``None`` without it; whether they are in host memory, and cut inside a node alone."""
    words = s.value("fsdp")
    said = " ".join(map(str, words)) if isinstance(words, (list, tuple)) else str(words or "")
    launched = _type(s) == "FSDP"
    file = s.value("fsdp_config")
    if isinstance(file, str) and file:
        s.odd["fsdp_config"] = (file, NEEDS_MEMORY)
    if not launched and not said.strip():
        return None, False, False
    name = str(s.value("fsdp_sharding_strategy") or "").upper()
    name = list(STRATEGIES)[int(name) - 1] if name in ("1", "2", "3", "4", "5") else name
    name = next((word.upper() for word in said.split() if word.upper() in STRATEGIES), name)
    reshards, version = s.value("fsdp_reshard_after_forward"), s.value("fsdp_version")
    if reshards is not None and str(reshards).upper() in STRATEGIES:  # so it says it for the first version
        name = str(reshards).upper()
    elif reshards is not None and str(2 if version is None and said else version) == "2":
        name = "FULL_SHARD" if str(reshards).lower() == "true" else "SHARD_GRAD_OP"
    if name and name not in STRATEGIES:
        s.odd["fsdp_sharding_strategy"] = (name, NEEDS_MEMORY)
    offload = s.yes("fsdp_offload_params") or "offload" in said.split()
    return STRATEGIES.get(name, (True, True)), offload, name.startswith("HYBRID")


def fsdp1_rule(rule: Callable[..., None], role: str, strategy: str, place: str, size: object, num_gpus: int) -> None:
    """Add the finding on FSDP1's whole copies in verl: a mesh of n x 1, in which gradients are reduced over the 1."""
    rule(num_gpus == 1 or strategy != "fsdp" or size != 1,
         "FSDP1 (strategy fsdp) averages no gradients where fsdp_size is 1: each GPU trains a model of its own",
         f"{place}fsdp_size=1 on {num_gpus} GPUs", f"Set {role}strategy=fsdp2, or {place}fsdp_size=-1 to cut the states.",
         "verl/workers/engine/fsdp/utils.py, get_sharding_strategy; pytorch#154888", NOTE)  # fmt: skip
