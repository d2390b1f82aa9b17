"""Checks of what a user declares, up to a ``RoleSpec``: models found, layouts parsed. Pure but for reading configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hfsdk.core.checks import shown
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import LayoutError, ModelNotFoundError, OptionError, PlacementError
from hfsdk.core.functions import Shipped
from hfsdk.core.layout import Layout
from hfsdk.core.lora import LoRA
from hfsdk.core.placement import Placement, Pool, is_shadow
from hfsdk.core.plan import Layouts, Plan
from hfsdk.core.reward_arguments import check_reward_function
from hfsdk.core.roles import RoleSpec
from hfsdk.core.rollout_sizes import context_tokens
from hfsdk.core.spec import PRESETS, ModelSpec
from hfsdk.core.text import nearest
from hfsdk.core.untrusted import absolute, has_file
from hfsdk.engine.process.gpus import default_dtype
from hfsdk.models.handle import ModelHandle
from hfsdk.planner.perf.sizing import sized

ModelSource = str | Path | ModelSpec | ModelHandle
"""A name (``"tiny"``), a local folder, a hub id, another handle (its initial weights), or in simulation a preset or a spec."""

RUN_EVERYWHERE = (32, 64, 128)
"""Head sizes that every build of the generating engine has kernels for; only others are looked up there."""


@dataclass(frozen=True)
class Backend:
    """The runtime's properties that a role's declaration depends on."""

    cluster: ClusterSpec
    simulated: bool

    @property
    def on_cpu(self) -> bool:
        """Whether real work runs on processors."""
        return not self.simulated and self.cluster.devices[0].name == "cpu"

    @property
    def default_dtype(self) -> str:
        """The dtype of a model for which none is given."""
        return default_dtype(self.cluster.devices[0].name, self.simulated)


def find_model(model: ModelSource, backend: Backend) -> tuple[str, ModelSpec]:
    """Return (folder, architecture) of a model; the folder is empty for a preset in simulation.

    Raises:
        ModelNotFoundError: nothing of that name, or a folder without weights.
        UnsupportedModelError: the engines do not run its architecture.
    """
    if isinstance(model, ModelHandle):
        if model.spec is None:
            raise ModelNotFoundError(f"{model.name} is a function and has no weights; give a model")
        return model.role.folder, model.spec
    if isinstance(model, ModelSpec):
        if not backend.simulated:
            raise ModelNotFoundError(f"the spec {model} has no weights to load; give a folder or a name, or use Session.simulated")
        return "", model
    if isinstance(model, type):
        raise ModelNotFoundError(
            f"{model.__name__} is a class; give a model: a name, hf.ModelSpec.preset('llama-7b'), or one with its numbers, "
            "hf.ModelSpec(name=..., num_layers=..., ...)"
        )
    if not isinstance(model, (str, Path)):
        raise ModelNotFoundError(f"a model is a name, a folder or a hub id; got {type(model).__name__}")
    name = str(model)
    if backend.simulated:
        if name in PRESETS:
            return "", ModelSpec.preset(name)
        folder = absolute(name)
        if has_file(folder, "config.json"):
            return str(folder), ModelSpec.from_folder(folder)
    # may prepare or download a model, which presets, and folders in simulation, do not need
    from hfsdk.assets import MODELS, model_folder

    if backend.simulated and name.lower() not in MODELS and "/" not in name:
        raise ModelNotFoundError(
            f"asked for the model {name!r}, which is not known; {nearest(name, (*PRESETS, *MODELS))}. A simulated session "
            "takes presets, a folder with config.json, a hub id, or numbers: hf.ModelSpec(...)"
        )
    folder = model_folder(name)
    spec = ModelSpec.from_folder(folder)
    return str(folder), replace(spec, name=Path(name).name or name)


def parse_layout(text: str | Layout, spec: ModelSpec, num_devices: int, what: str) -> Layout:
    """Return a layout, its dp perhaps open; ``"auto"`` is data parallel.

    Raises:
        LayoutError: it does not parse, or fits neither the model nor the session's devices.
        OptionError: it is neither a text nor a layout.
    """
    if not isinstance(text, (str, Layout)):
        raise OptionError(f"{what} layout must be a text like 'tp2 dp2', \"auto\" or an hf.Layout; got {shown(text)}")
    layout = Layout() if text == "auto" else Layout.parse(text)
    layout.check_model(spec)
    if layout.size > num_devices:
        raise LayoutError(
            f"{what} layout '{layout}' needs {layout.size} devices; the session has {num_devices}. "
            "Use a smaller layout, or a session with more devices."
        )
    return layout


def with_adapters(role: RoleSpec, model: ModelSource, spec: ModelSpec, lora: LoRA | str | Path | None) -> RoleSpec:
    """Return the role with the adapters that are asked for, or that a role it begins with began with.

    Raises:
        ModelNotFoundError: a folder without adapters.
        OptionError: the model has not the layers that are asked for.
    """
    if lora is None:
        # a critic or a reference of an actor begins with the adapters that the actor began with
        if isinstance(model, ModelHandle) and model.role.adapters:
            return replace(role, lora=model.role.lora, adapters=model.role.adapters)
        return role
    if isinstance(lora, LoRA):
        role = replace(role, lora=lora)
    else:
        folder = absolute(lora)
        role = replace(role, lora=LoRA.from_folder(folder), adapters=str(folder))
    assert role.lora is not None
    role.lora.check_model(spec)
    if not role.trainable and not role.adapters:
        raise OptionError(
            f"lora=hf.LoRA(...) gives {role.name} adapters to train; give it an optimizer too, or a folder of adapters"
        )
    return role


def model_role(
    role: RoleSpec, model: ModelSource, train: str | Layout, rollout: str | Layout | None, backend: Backend,
    lora: LoRA | str | Path | None = None,
) -> RoleSpec:  # fmt: skip
    """Complete and check a role that is a model.

    Raises:
        ModelNotFoundError: no such model, or a folder without adapters.
        UnsupportedModelError: an architecture or head size that the engines do not run.
        LayoutError: a layout that does not fit.
        OptionError: an option out of its range.
    """
    folder, spec = find_model(model, backend)
    num_devices = backend.cluster.num_devices
    left_open = {"train": train == "auto", "rollout": rollout == "auto", "cp": train == "auto" and backend.simulated}
    auto = tuple(use for use, is_open in left_open.items() if is_open)
    filled_in = parse_layout(train, spec, num_devices, f"{role.name}'s")
    if filled_in.cp > 1 and not backend.simulated:
        raise LayoutError(
            f"{role.name}'s layout '{filled_in}' has cp={filled_in.cp}, which is planned and simulated; the trainer does not share "
            "sequences. Leave cp out, or use hf.Session.simulated(...)."
        )
    role = with_adapters(replace(role, folder=folder, model=spec, train=filled_in, auto=role.auto or auto), model, spec, lora)
    if rollout is None:
        return role
    layout = parse_layout(rollout, spec, num_devices, f"{role.name}'s rollout")
    check_rollout(role.name, layout)
    context_tokens(spec, role.rollout_options)
    if backend.on_cpu and spec.head_dim not in RUN_EVERYWHERE:
        from hfsdk.engine.generation.rollout_engine import check_model

        check_model(spec, "cpu")
    return replace(role, rollout=layout)


def check_rollout(name: str, layout: Layout) -> None:
    """Check that the generating engine has a layout's axes.

    Raises:
        LayoutError: it is cut over layers or sequences.
    """
    cut = "pp" if layout.pp > 1 else "cp"
    if layout.pp > 1 or layout.cp > 1:
        raise LayoutError(
            f"{name}'s rollout layout '{layout}' has {cut}={getattr(layout, cut)}; the generating engine runs tp and dp only"
        )


def function_role(role: RoleSpec, function: Callable[..., Any]) -> RoleSpec:
    """Complete and check a role that is a function of completions (and prompts, and the dataset's columns).

    Raises:
        OptionError: it does not take completions.
    """
    if role.timeout_s <= 0:
        raise OptionError(f"timeout_s must be above 0; got {role.timeout_s}")
    if role.offload:
        raise OptionError(f"offload=True keeps a model's weights in host memory; {role.name} is a function. Leave offload out.")
    check_reward_function(function, role.kind)
    return replace(role, function=Shipped.of(function))


def filled(role: RoleSpec, pool: Pool, cluster: ClusterSpec) -> RoleSpec:
    """Return the role with its layouts covering a pool, and the nodes of its ranks.

    Raises:
        PlacementError: they do not.
    """
    try:
        train = role.train.fill(pool.size) if role.train else None
        nodes = tuple(cluster.node_of(device) for device in pool.devices)
        return replace(role, train=train, rollout=role.rollout.fill(pool.size) if role.rollout else None, nodes=nodes)
    except LayoutError as error:
        raise PlacementError(f"{role.name} does not fit pool {pool.name!r}: {error}") from error


def planned(plan: Plan, declared: Sequence[RoleSpec], cluster: ClusterSpec) -> list[RoleSpec]:
    """Return the roles with the layouts of a plan where they were left open; a shadow's rollout is its role's.

    Raises:
        PlacementError: the plan is for another number of devices or other roles, or a role is declared otherwise than it was
            planned.
    """
    if plan.cluster.num_devices != cluster.num_devices:
        raise PlacementError(
            f"the plan is for {plan.cluster} ({plan.cluster.num_devices} devices); this session has {cluster}. "
            "Make a plan here: session.plan(algorithm, workload)."
        )
    for role in declared:
        if role.name not in plan.models or plan.models[role.name] != str(role.model):
            declared_as = f"{role.name} ({role.model})"
            raise PlacementError(
                f"the plan places {shown(dict(plan.models))}, and not {declared_as}; make a new one: session.plan(...)"
            )
        if role.name in plan.roles:
            _check_same(role, plan.roles[role.name])
    return with_layouts(plan.layouts, declared)


def with_layouts(planned: Mapping[str, Layouts], declared: Sequence[RoleSpec]) -> list[RoleSpec]:
    """Return the roles with planned layouts where they were left open; a shadow's rollout is its role's.

    Raises:
        PlacementError: a role is not among them, or is declared with other layouts.
    """
    roles = []
    for role in declared:
        if role.name not in planned:
            raise PlacementError(f"the plan places {shown(list(planned))}, and not {role.name}; make a new one: session.plan(...)")
        layouts = {**planned.get(f"{role.name}.rollout", {}), **planned[role.name]}
        for use, own in (("train", role.train), ("rollout", role.rollout)):
            there = layouts.get(use)
            # dp may have been left open when the role was declared, so it is compared by itself
            fits = own is None or use in role.auto or there is None or replace(own, dp=None) == replace(there, dp=None)
            if not fits or (own is not None and own.dp and there and use not in role.auto and own.dp != there.dp):
                raise PlacementError(
                    f"the plan has {role.name}'s {use} layout as '{there}', and it is declared as '{own}' now; make a new plan"
                )
            if there and there.cp > 1 and (own is None or own.cp != there.cp) and "cp" not in role.auto:
                raise PlacementError(
                    f"the plan has {role.name}'s {use} layout as '{there}', in which ranks share sequences; that is planned and "
                    "simulated, and not run here. Make the plan in this session: session.plan(...)"
                )
        roles.append(replace(role, train=layouts.get("train", role.train), rollout=layouts.get("rollout", role.rollout)))
    return roles


def _check_same(role: RoleSpec, planned: RoleSpec) -> None:
    """Check that a role is what it was planned as, in all that seconds and bytes depend on.

    Raises:
        PlacementError: names what differs.
    """
    facts, theirs = _facts(role), _facts(planned)
    for name, value in facts.items():
        if value == theirs[name]:
            continue
        if name == "max_model_len" and value < theirs[name]:
            raise PlacementError(
                f"the plan assumes samples of up to {theirs[name]} tokens, and {role.name}'s max_model_len is {value}. Declare "
                f"session.{role.kind}(..., rollout_options=hf.RolloutOptions(max_model_len={theirs[name]})), then place the plan."
            )
        raise PlacementError(
            f"the plan was made for {role.name} with {name}={theirs[name]!r}, and it is declared with {name}={value!r} now. "
            "Plan again: session.plan(algorithm, workload)."
        )


def _facts(role: RoleSpec) -> dict[str, Any]:
    """Return the facts that a plan depends on, by the names under which they are declared; layouts are compared apart."""
    optimizer, options = role.optimizer, role.rollout_options
    facts = {
        "model": role.model, "dtype": role.dtype, "head": role.head, "lora": role.lora, "recompute": role.recompute,
        "offload": role.offload,
        "micro_batch_tokens": role.micro_batch_tokens,
        "optimizer": "none" if optimizer is None else "AdamW",
        "AdamW.distributed": optimizer is not None and optimizer.distributed,
        "AdamW.offload": optimizer is not None and optimizer.offload,
    }  # fmt: skip
    if role.rollout is not None and role.model is not None:
        facts |= {**asdict(options), "max_model_len": context_tokens(role.model, options)}
    return facts


def placed(declared: Sequence[RoleSpec], placement: Placement, cluster: ClusterSpec) -> list[RoleSpec]:
    """Return the roles with their layouts covering their pools and their rollouts' sizes, and the shadows that the placement names.

    A role whose generating is done by a shadow (``actor.rollout``) has no rollout of its own.

    Raises:
        PlacementError: a layout does not fit its pool, or a role cannot have a shadow that is named.
    """
    roles = {role.name: role for role in declared}
    for name in (n for n in placement.roles if is_shadow(n)):
        base, _, ending = name.rpartition(".")
        role, kind = roles[base], {"rollout": "actor", "inference": "critic"}[ending]
        if role.kind != kind:
            raise PlacementError(f"{name!r}: only a {kind} has a shadow for {ending}; {base} is a {role.kind}. Leave it out.")
        shadow = replace(role, name=name, optimizer=None, shadow_of=base)
        if ending == "rollout":  # of which there is nothing to offload
            roles[name] = replace(shadow, train=None, offload=False)
        else:
            roles[name] = replace(shadow, train=Layout())
        if ending == "rollout":
            roles[base] = replace(role, rollout=None)
    for role in roles.values():
        pool = placement.pool_of(role.name)
        if pool.within and (role.trainable or role.rollout):
            raise PlacementError(
                f"{role.name} is trained or generates, and {pool.name!r} is a part of pool {pool.within!r}: only frozen models, "
                f"such as reference and reward, live on parts. Put {role.name} on {pool.within!r} or on a pool of its own."
            )
    return sized([filled(role, placement.pool_of(role.name), cluster) for role in roles.values()], placement, cluster)
