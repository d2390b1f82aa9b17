"""Gradients and AdamW of a Megatron model, whole on every rank or shared out over data parallelism.

Plain, every dp rank sums the gradient and takes the same step. With ``AdamW(distributed=True)`` (Megatron's distributed optimizer,
ZeRO stage 1 of Rajbhandari et al., arXiv 1910.02054) parameters and gradients lie in flat buckets, cut into as many shards as
there are dp ranks whatever the borders of the parameters; each rank keeps masters and moments of its shard only::

    bucket          [ fc2 ........ | fc1 ............ | proj .. ]       dp=2
    gradients       reduce-scatter:  rank 0 |-- sum --|  ?  ?  ?         a rank's other shards are not the sum
                                     rank 1   ?  ?  ? |-- sum --|
    AdamW           rank 0 steps its shard, rank 1 its own
    parameters      all-gather:      both have all of it again

Where ``choices.overlap`` is set there are several buckets, and :mod:`hfsdk.engine.training.passes` starts their sums during the
last backward pass. The saved state is the same for both (:mod:`hfsdk.engine.training.shares`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from hfsdk.core.roles import AdamW
from hfsdk.core.training_choices import TrainingChoices
from hfsdk.engine.training import cpu_support_megatron, megatron_adapters
from hfsdk.engine.training.megatron_groups import RoleGroups

MOMENTS = ("exp_avg", "exp_avg_sq")

PLAIN = TrainingChoices()
"""The choices on processors."""


def wrap(model: torch.nn.Module, groups: RoleGroups, wanted: AdamW, choices: TrainingChoices = PLAIN) -> DistributedDataParallel:
    """Give the parameters one float32 gradient buffer that is summed over dp, in one bucket or, to overlap, in several."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=_shared_out(wanted, groups),
        overlap_grad_reduce=choices.overlap, bucket_size=choices.bucket_elements,
    )  # fmt: skip
    return DistributedDataParallel(model.config, config, model, pg_collection=groups.collection())


def _shared_out(wanted: AdamW, groups: RoleGroups) -> bool:
    return wanted.distributed and groups.dp_size > 1


def make_optimizer(
    ddp: DistributedDataParallel, groups: RoleGroups, wanted: AdamW, dtype: str, choices: TrainingChoices = PLAIN
) -> MegatronOptimizer:
    """Return Megatron's optimizer over PyTorch's AdamW; norm weights and biases do not decay.

    Built here and not by ``get_megatron_optimizer``, which gathers objects over the default process group and takes
    Transformer Engine's Adam, whose state is another, when that is installed.
    """
    parameters = [parameter for _, parameter in megatron_adapters.trained(ddp.module)]
    groups_of_parameters = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": wanted.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    shared_out = _shared_out(wanted, groups)
    lr = wanted.lr or 0.0  # every step sets its own
    config = OptimizerConfig(
        optimizer="adam", lr=lr, clip_grad=wanted.max_grad_norm, bf16=dtype == "bf16",
        params_dtype=torch.bfloat16 if dtype == "bf16" else torch.float32, use_distributed_optimizer=shared_out,
    )  # fmt: skip
    # without gradients, or the shards of fp32 parameters would be views that autograd follows
    with torch.no_grad(), cpu_support_megatron.cuda_type_names():
        fused = choices.fused_adamw or None  # None: torch's own choice, several kernels
        adam = torch.optim.AdamW(groups_of_parameters, lr=lr, betas=wanted.betas, eps=wanted.eps, fused=fused)
        if shared_out:
            optimizer = DistributedOptimizer(
                adam, config, None, _no_state, model_chunks=[ddp], per_model_buffers={0: ddp.buffers},
                data_parallel_group=groups.dp, data_parallel_group_gloo=None, data_parallel_group_idx=0,
                distributed_optimizer_instance_id=0,
            )  # fmt: skip
        elif dtype == "bf16":
            optimizer = Float16OptimizerWithFloat16Params(adam, config, None, _no_state)
        else:
            optimizer = FP32Optimizer(adam, config, _no_state)
    optimizer.grad_stats_parallel_group = groups.world if shared_out else groups.mp
    optimizer.tp_group = groups.tp
    return optimizer


def _no_state(*_: object) -> None:
    """Leave the AdamW state to its first step."""


# ---- gradients


def _gather_shards(bucket: torch.Tensor, groups: RoleGroups) -> None:
    """Fill a flat bucket, of which each dp rank has its own shard, on all of them."""
    dist.all_gather_into_tensor(bucket, bucket.chunk(groups.dp_size)[groups.dp_rank], group=groups.dp)


@torch.no_grad()
def gather_gradient(ddp: DistributedDataParallel, groups: RoleGroups) -> None:
    """Make every parameter's ``main_grad`` the whole sum after the reduction; collective over dp."""
    if ddp.ddp_config.use_distributed_optimizer:
        for buffer in ddp.buffers:
            for bucket in buffer.buckets:
                _gather_shards(bucket.grad_data, groups)


@torch.no_grad()
def keep_sum_once(ddp: DistributedDataParallel, groups: RoleGroups) -> None:
    """Zero all copies but one of a gradient that was summed over ranks, so that the next reduction adds it once.

    Everything is summed over dp; norms of queries and keys, which see this rank's heads only, and with sequence parallelism all
    norms, over tp as well; tied embeddings over the first and last pipeline stage.
    """
    # After a reduce-scatter each rank has the sum in its own shard alone; after an all-reduce all have all of it.
    if ddp.ddp_config.use_distributed_optimizer:
        for bucket in (bucket for buffer in ddp.buffers for bucket in buffer.buckets):
            for rank, shard in enumerate(bucket.grad_data.chunk(groups.dp_size)):
                if rank != groups.dp_rank:
                    shard.zero_()
    elif groups.dp_rank:
        for buffer in ddp.buffers:
            buffer.grad_data.zero_()
    for name, parameter in megatron_adapters.trained(ddp.module):
        norm = "q_layernorm" in name or "k_layernorm" in name or getattr(parameter, "sequence_parallel", False)
        over_tp = groups.tp_rank and norm
        over_stages = not groups.is_first_stage and getattr(parameter, "shared_embedding", False)
        if over_tp or over_stages:
            parameter.main_grad.zero_()


# ---- state


def optimized(
    model: torch.nn.Module, optimizer: MegatronOptimizer
) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor, dict[str, torch.Tensor], slice]]:
    """Yield this rank's optimized parameters: (name, parameter, float32 tensor, its AdamW state, elements of the parameter)."""
    if not isinstance(optimizer, DistributedOptimizer):
        for name, parameter in megatron_adapters.trained(model):
            main = getattr(parameter, "main_param", parameter)
            yield name, parameter, main.data, optimizer.optimizer.state[main], slice(0, parameter.numel())
        return
    mains: dict[torch.nn.Parameter, torch.Tensor] = {}
    for parameters, shards in (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
    ):
        for i, group in enumerate(parameters):
            mains |= dict(zip(group, shards[i], strict=True))
    for name, parameter in megatron_adapters.trained(model):
        if parameter in mains:
            part = optimizer._get_model_param_range_map(parameter)["param"]
            main = mains[parameter]
            yield name, parameter, main.data, optimizer.optimizer.state[main], slice(part.start, part.end)


@torch.no_grad()
def num_steps(model: torch.nn.Module, optimizer: MegatronOptimizer, groups: RoleGroups) -> float | None:
    """Return AdamW's step count, ``None`` before the first; collective over dp where the optimizer is distributed."""
    steps = [float(state["step"]) for *_, state, _ in optimized(model, optimizer) if "step" in state]
    most = torch.tensor(max(steps, default=-1.0), device=groups.device)
    if isinstance(optimizer, DistributedOptimizer):  # a rank may optimize nothing
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.dp)
    return float(most) if most >= 0 else None


@torch.no_grad()
def start_afresh(model: torch.nn.Module, optimizer: MegatronOptimizer, step: float | None) -> None:
    """Make masters the parameters' values and moments zero, after ``step`` steps; ``None`` drops the moments."""
    with_parameters = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for _, parameter, main, state, part in optimized(model, optimizer):
        main.copy_(parameter.data.view(-1)[part].view(main.shape))
        state.clear()
        if step is not None:  # one number for each parameter; AdamW keeps it on the CPU unless a kernel reads it
            state["step"] = torch.tensor(step, device=main.device if with_parameters else "cpu")
            state |= {kind: torch.zeros_like(main) for kind in MOMENTS}


@torch.no_grad()
def refresh_masters(model: torch.nn.Module, optimizer: MegatronOptimizer) -> None:
    """Make the masters of float32 parameters, of which no state tells apart from the weights, the parameters' values."""
    for _, parameter, main, _, part in optimized(model, optimizer):
        if parameter.dtype == torch.float32:
            main.copy_(parameter.data.view(-1)[part].view(main.shape))


def state_tensors(model: torch.nn.Module, optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Yield this rank's masters, where they are not the weights themselves, and moments."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}  # those that are emptied have no address
    for _, _, main, state, _ in optimized(model, optimizer):
        if main.untyped_storage()._cdata not in weights:
            yield main
        yield from (state[key] for key in MOMENTS if key in state)


def gradient_tensors(ddp: DistributedDataParallel) -> Iterator[torch.Tensor]:
    """Yield the gradient buffers, padding included, and the parameters' views on them."""
    for buffer in ddp.buffers:
        yield buffer.grad_data
        yield from (parameter.main_grad for parameter in buffer.params)


def weight_tensors(model: torch.nn.Module, ddp: DistributedDataParallel | None) -> Iterator[torch.Tensor]:
    """Yield the parameters and, where they are views on buffers that are shared out, the buffers."""
    yield from model.parameters()
    yield from (buffer.param_data for buffer in (ddp.buffers if ddp else ()) if buffer.param_data is not None)
