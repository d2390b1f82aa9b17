"""hfsdk's own configuration: an algorithm, and the session whose roles and placement it runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError
from hfsdk.core.frozen_bases import base_key, base_of
from hfsdk.core.layout import Layout
from hfsdk.core.placement import Placement
from hfsdk.core.roles import RoleSpec
from hfsdk.core.spec import DTYPE_BYTES, ModelSpec
from hfsdk.planner.configs.step_config import PHASES, RoleConfig, RolloutConfig, States, StepConfig
from hfsdk.session.attach import package_version
from hfsdk.session.session import Session

BATCH_SIZE, PROMPT_TOKENS = 32, 512
"""What ``session.prompts`` takes where nothing is said; tokens of a prompt that nothing limits."""


def read_own(
    algorithm: Any, session: Session | None, prompts: int | None, prompt_tokens: int | None
) -> tuple[StepConfig, Mapping[str, ModelSpec | None]]:
    """Return the step of an algorithm on a session, and its roles' architectures.

    Args:
        algorithm: e.g. ``hf.GRPO(n=8)``.
        session: has the roles it uses.
        prompts: of one step; by default that of ``session.prompts``.
        prompt_tokens: of the longest prompt.

    Raises:
        OptionError: there is no session, or it has no actor.
    """
    if session is None:
        raise OptionError(
            f"{type(algorithm).__name__} says nothing of models and devices; give hf.explain(algorithm, session=session)"
        )
    models = {role.name: role for handle in session.roles for role in [handle.role] if role.model is not None}
    if "actor" not in models:
        raise OptionError(
            f"the session has no actor (it has {', '.join(models) or 'no model'}); session.actor('tiny') declares one"
        )
    cluster, placement = session.cluster, session.placement.placement
    placement = placement or Placement.of("colocate", [*models], cluster.num_devices)
    assumed = {}
    if prompts is None:
        assumed["prompts"] = f"{BATCH_SIZE}, the batch_size of session.prompts; explain(..., prompts=...) says it"
    if prompt_tokens is None:
        assumed["prompt tokens"] = f"{PROMPT_TOKENS}; explain(..., prompt_tokens=...) says it"
    number, prompt = prompts or BATCH_SIZE, prompt_tokens or PROMPT_TOKENS
    copies, parts = getattr(algorithm, "n", 1), getattr(algorithm, "mini_batches", 1)
    response = getattr(algorithm, "max_new_tokens", 0)
    if not response:
        raise OptionError(f"{shown(type(algorithm).__name__)} generates nothing: it learns from pairs, one batch a step")
    samples, actor = number * copies, models["actor"]
    used = [name for name in _needed(algorithm, session) if name in models]
    placed = _of_these(placement, used)
    pools = {pool.name: pool.size for pool in placed.pools}
    layout = _filled(actor, placement)
    how = {
        "prompts": "batch_size of session.prompts", "responses per prompt": "n",
        "mini-batch": f"{samples:,} samples / mini_batches {parts}" + "; uneven ones are fine" * bool(samples % parts),
        "data-parallel ranks": f"dp of the actor's layout '{layout}'",
        "micro-batch per rank": "micro_batch_tokens of session.actor",
        "epochs": "epochs",
    }  # fmt: skip
    shadow = placement.roles.get("actor.rollout")
    rollout = actor.rollout or Layout()
    pool = shadow or placement.pool_of("actor").name
    config = StepConfig(
        system="hfsdk", release=package_version(), algorithm=type(algorithm).__name__, ours=type(algorithm).__name__,
        options={name: getattr(algorithm, name) for name in getattr(algorithm, "__dataclass_fields__", ())}, prompts=number,
        copies=copies, prompt_tokens=prompt, response_tokens=response, mini_batch=-(-samples // parts), micro_batch=None,
        micro_tokens=actor.micro_batch_tokens, epochs=getattr(algorithm, "epochs", 1), dp=layout.num_replicas, pools=pools,
        roles=_with_bases([_role(models[name], placement) for name in used], [models[name] for name in used]),
        rollout=RolloutConfig(
            pool=pool, layout=replace(rollout, dp=None).fill(pools[pool]), engine="vllm", sleeps=not shadow,
            cache_bytes=actor.rollout_options.kv_cache_bytes, rows=actor.rollout_options.max_num_seqs or 64,
        ),
        nodes=len(cluster.node_devices), gpus_per_node=len(cluster.node_devices[0]), rounding="up", how=how, assumed=assumed,
        reward=str(models["reward"].model) if "reward" in models else "a function",
        own={name: models[name] for name in used}, placed=placed,
    )  # fmt: skip
    return config, {name: models[name].model for name in used}


def _needed(algorithm: Any, session: Session) -> Sequence[str]:
    """Return the roles of a step.

    Raises:
        OptionError: the session lacks one.
    """
    needed: Sequence[str] = getattr(algorithm, "roles", ())
    missing = [name for name in needed if name not in {handle.name for handle in session.roles}]
    if missing:
        raise OptionError(
            f"a step of {type(algorithm).__name__} needs {', '.join(needed)}, and the session has no {' and no '.join(missing)}; "
            f"declare session.{missing[0]}(...)"
        )
    return needed


def _of_these(placement: Placement, roles: Sequence[str]) -> Placement:
    """Return the placement of these roles and their shadows alone."""
    homes = {name: pool for name, pool in placement.roles.items() if name.partition(".")[0] in roles}
    wholes = {pool.within for pool in placement.pools if pool.name in homes.values()}
    return Placement(tuple(pool for pool in placement.pools if pool.name in {*homes.values(), *wholes}), homes)


def _filled(role: RoleSpec, placement: Placement) -> Layout:
    layout, size = role.train or Layout(), placement.pool_of(role.name).size
    return replace(layout, dp=None).fill(size)


def _role(role: RoleSpec, placement: Placement) -> RoleConfig:
    layout, size = _filled(role, placement), DTYPE_BYTES[role.dtype]
    distributed = role.optimizer is not None and role.optimizer.distributed
    states = States(
        name="Megatron", weights=size, gradients=4, optimizer=8 if role.dtype == "fp32" else 12,
        optimizer_over=layout.num_copies if distributed else 1, gradients_stay=True,
    )  # fmt: skip
    return RoleConfig(
        name=role.name, model=str(role.model), pool=placement.pool_of(role.name).name, layout=layout, states=states,
        trained=role.trainable, train_tokens=role.micro_batch_tokens, pass_tokens=role.micro_batch_tokens, recompute=role.recompute,
        away=dict.fromkeys(PHASES, role.offloads), head=role.head, lr=role.optimizer.lr if role.optimizer else None, lora=role.lora,
    )  # fmt: skip


def _with_bases(roles: Sequence[RoleConfig], models: Sequence[RoleSpec]) -> tuple[RoleConfig, ...]:
    """Return the roles, those that begin with the frozen weights of one before them in the same pool without these."""
    found: list[RoleConfig] = []
    keys = [
        (role.pool, base_key(replace(model, train=role.layout))) if base_of(model) is not None else None
        for role, model in zip(roles, models, strict=True)
    ]
    for number, role in enumerate(roles):
        first = number if keys[number] is None else keys.index(keys[number])
        found.append(replace(role, base_of=roles[first].name) if first < number else role)
    return tuple(found)
