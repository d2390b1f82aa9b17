"""The state of a trainer as whole tensors of its parameters, whichever optimizer holds it: the naive form of what shares keep.

``{"layout", "rank", "num_updates", "weights": {name: tensor}, "optimizer": {name: {"main", "exp_avg", "exp_avg_sq", "step"}}}``, on
the CPU; of the optimizer only ``main`` before the first step. Put together by other code than what is tested.
"""

import torch
import torch.distributed as dist

MOMENTS = ("exp_avg", "exp_avg_sq")


def state_of(trainer):
    """Return it; collective over the role where the optimizer is distributed."""
    with trainer.on_device("weights", "optimizer"), torch.no_grad():
        weights = {name: tensor.to("cpu", copy=True) for name, tensor in trainer.local_tensors().items()}
        states = {} if trainer._optimizer is None else _optimizer_of(trainer, weights)
    where = {"layout": str(trainer.mesh.layout), "rank": trainer.groups.rank, "num_updates": trainer.num_updates}
    return where | {"weights": weights, "optimizer": states}


def set_state(trainer, state):
    """Take what :func:`state_of` returned on this rank, bit for bit, of either optimizer."""
    from hfsdk.engine.training.megatron_optimizer import optimized

    assert (state["layout"], state["rank"]) == (str(trainer.mesh.layout), trainer.groups.rank)
    with trainer.on_device("weights", "gradients", "optimizer"), torch.no_grad():
        for name, tensor in trainer.local_tensors().items():
            tensor.copy_(state["weights"][name])
        if trainer._optimizer is not None:
            fused = bool(trainer._optimizer.optimizer.defaults["fused"])
            for name, parameter, main, kept, part in optimized(trainer.model, trainer._optimizer):
                known = dict(state["optimizer"].get(name, {}))
                main.copy_(known.pop("main", parameter.data).reshape(-1)[part].view(main.shape))
                kept.clear()
                for key, tensor in known.items():
                    mine = tensor.reshape(-1)[part].view(main.shape) if tensor.dim() else tensor
                    kept[key] = mine.to(main.device if tensor.dim() or fused else "cpu", copy=True)
            trainer.zero_grad()
    trainer.num_updates = state["num_updates"]


def _optimizer_of(trainer, weights):
    """Return the state of whole parameters; a parameter that is its own float32 master has its copy in ``weights``."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from hfsdk.engine.training.megatron_optimizer import optimized

    model, optimizer, groups = trainer.model, trainer._optimizer, trainer.groups
    if not isinstance(optimizer, DistributedOptimizer):
        found = {}
        for name, parameter, main, state, _ in optimized(model, optimizer):
            own = main.data_ptr() != parameter.data_ptr()
            master = main.to("cpu", copy=True) if own else weights[name]
            found[name] = {"main": master, **{key: tensor.to("cpu", copy=True) for key, tensor in state.items()}}
        return found
    names = {parameter: name for name, parameter in model.named_parameters()}
    mine = {name: {"main": main, **state} for name, _, main, state, _ in optimized(model, optimizer)}
    # a parameter's steps are known where a part of it is
    steps = torch.tensor([float(mine.get(name, {}).get("step", -1)) for name in names.values()], device=groups.device)
    dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=groups.dp)
    found = {name: {} for name in names.values()}
    for key in ("main", *MOMENTS) if len(steps) and steps.max() >= 0 else ("main",):
        for buffer in optimizer.buffers:
            for bucket in buffer.buckets:
                flat = torch.zeros(bucket.grad_data.numel(), dtype=torch.float32, device=groups.device)
                for parameter in (p for p in bucket.params_list if names[p] in mine):
                    where = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
                    flat[where.start : where.end] = mine[names[parameter]][key]
                shard = flat.chunk(groups.dp_size)[groups.dp_rank]
                dist.all_gather_into_tensor(flat, shard.clone(), group=groups.dp)
                for parameter in bucket.params_list:
                    start, end = (at - bucket.offset for at in buffer.param_index_map[parameter][:2])
                    found[names[parameter]][key] = flat[start:end].view(parameter.shape).to("cpu", copy=True)
    for name, step in zip(found, steps.cpu(), strict=True):
        if step >= 0:
            found[name]["step"] = step.clone()
    return found
