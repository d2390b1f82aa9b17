"""How roles are declared: ``session.actor(...)``, ``critic``, ``reference``, ``reward``, ``cost``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from hfsdk.errors import OptionError
from hfsdk.layout import Layout
from hfsdk.models import ActorModel, CostModel, CriticModel, ModelHandle, ReferenceModel, RewardModel
from hfsdk.roles import AdamW, RoleSpec, RolloutOptions
from hfsdk.session.declare import Ground, ModelSource, function_role, model_role

Layouts = str | Layout
"""``"tp2 dp2"``, ``hf.Layout(tp=2)``, or ``"auto"`` (data parallel)."""

H = TypeVar("H", bound=ModelHandle)
S = TypeVar("S", RewardModel, CostModel)

ACTOR_OPTIMIZER = AdamW(lr=1e-5)
CRITIC_OPTIMIZER = AdamW(lr=2e-5)


class Declarations(ABC):
    """The part of a session that declares roles."""

    seed: int

    @property
    @abstractmethod
    def _ground(self) -> Ground:
        """What roles are declared on."""

    @abstractmethod
    def _declare(self, cls: type[H], role: RoleSpec) -> H:
        """Return the handle of a role: the one there is, or a new one."""

    @abstractmethod
    def _declared(self, handle: ModelHandle) -> RoleSpec:
        """Return a handle's role as the user declared it, its layouts perhaps open."""

    def actor(
        self,
        model: ModelSource,
        *,
        train: Layouts = "auto",
        rollout: Layouts = "auto",
        dtype: str = "fp32",
        optimizer: AdamW = ACTOR_OPTIMIZER,
        micro_batch_tokens: int = 2048,
        recompute: str = "",
        rollout_options: RolloutOptions | None = None,
        cpu_weights: str | None = None,
        name: str = "actor",
    ) -> ActorModel:
        """Declare the policy to be trained. Checked now, loaded at ``place`` or first use.

        Args:
            model: a name (``"tiny"``, ``"smollm2-135m-instruct"``), a local folder, a hub id; in simulation also a preset.
            train: layout of training, e.g. ``"tp2 dp2"``; an axis left out is 1, dp fills up.
            rollout: layout of generation on the same devices, e.g. ``"tp1"``.
            dtype: ``"fp32"`` or ``"bf16"`` (with fp32 masters).
            optimizer: AdamW with its schedule and clipping.
            micro_batch_tokens: most tokens of one forward pass on one rank.
            recompute: activations that the backward pass computes again instead of keeping them: ``""`` none, ``"selective"``
                those inside attention and MLP, ``"full"`` all but each layer's input (a third more arithmetic, least memory).
                The gradient is the same.
            rollout_options: how the generating engine is sized.
            cpu_weights: short for ``RolloutOptions(cpu_weights=...)``: ``"packed"`` or ``"shared"``.
            name: another name than "actor", where there are several.

        Raises:
            ModelNotFoundError: no such model, or a folder without weights.
            UnsupportedModelError: an architecture or head size that the engines do not run.
            LayoutError: a layout that fits neither the model nor the devices.
            OptionError: an option out of its range.
        """
        if rollout is None:
            raise OptionError("rollout must be a layout like 'tp1' or \"auto\": an actor generates; got None")
        options = rollout_options or RolloutOptions()
        if cpu_weights is not None:
            options = replace(options, cpu_weights=cpu_weights)
        role = RoleSpec(
            name=name, kind="actor", dtype=dtype, optimizer=_trained(optimizer), micro_batch_tokens=micro_batch_tokens,
            recompute=recompute, rollout_options=options, seed=self.seed,
        )  # fmt: skip
        return self._declare(ActorModel, model_role(role, model, train, rollout, self._ground))

    def critic(
        self,
        model: ModelSource,
        *,
        train: Layouts = "auto",
        dtype: str = "fp32",
        optimizer: AdamW = CRITIC_OPTIMIZER,
        micro_batch_tokens: int = 2048,
        recompute: str = "",
        name: str = "critic",
    ) -> CriticModel:
        """Declare the value function: the model's body with a scalar head. Arguments and errors as in :meth:`actor`."""
        role = RoleSpec(
            name=name, kind="critic", head="scalar", dtype=dtype, optimizer=_trained(optimizer),
            micro_batch_tokens=micro_batch_tokens, recompute=recompute, seed=self.seed,
        )  # fmt: skip
        return self._declare(CriticModel, model_role(role, model, train, None, self._ground))

    def reference(
        self,
        model: ModelSource,
        *,
        layout: Layouts = "auto",
        dtype: str | None = None,
        micro_batch_tokens: int = 2048,
        offload: bool = False,
        name: str = "reference",
    ) -> ReferenceModel:
        """Declare the frozen policy that the KL is measured against.

        Args:
            model: the actor (its initial weights, in its dtype), or a model as in :meth:`actor`.
            layout: of inference; by default the actor's.
            dtype: by default the actor's, or fp32.
            micro_batch_tokens: as in :meth:`actor`.
            offload: keep the weights in host memory and bring them to the device for this role's own calls.
            name: as in :meth:`actor`.

        Raises: as in :meth:`actor`.
        """
        own = model.role.dtype if isinstance(model, ModelHandle) else "fp32"
        train = self._declared(model).train if isinstance(model, ModelHandle) else None
        if layout == "auto" and train is not None:
            layout = train  # as declared: what placing filled in may be otherwise on this role's pool, and the next time
        role = RoleSpec(
            name=name, kind="reference", dtype=dtype or own, micro_batch_tokens=micro_batch_tokens, offload=offload, seed=self.seed
        )
        return self._declare(ReferenceModel, model_role(role, model, layout, None, self._ground))

    def reward(
        self,
        source: Callable[..., Any] | ModelSource,
        *,
        timeout_s: float = 60.0,
        layout: Layouts = "auto",
        dtype: str = "fp32",
        micro_batch_tokens: int = 2048,
        offload: bool = False,
        name: str = "reward",
    ) -> RewardModel:
        """Declare what scores responses: a function ``f(prompts, completions, **columns) -> list[float]``, or a model.

        Called again with a new function, the same handle goes on with it (a new version; no worker restarts).

        Args:
            source: a function in TRL's form; it travels by value and gets the data's other columns by name. Or a model with
                a scalar head, as in :meth:`actor`.
            timeout_s: most seconds one call of the function may take.
            layout: of a model's inference.
            dtype: of a model.
            micro_batch_tokens: of a model.
            offload: of a model, as in :meth:`reference`.
            name: another name than "reward", where there are several.

        Raises:
            OptionError: the function does not take prompts and completions.
            ModelNotFoundError: no such model.
        """
        return self._scorer(RewardModel, source, timeout_s, layout, dtype, micro_batch_tokens, offload, name)

    def cost(
        self,
        source: Callable[..., Any] | ModelSource,
        *,
        timeout_s: float = 60.0,
        layout: Layouts = "auto",
        dtype: str = "fp32",
        micro_batch_tokens: int = 2048,
        offload: bool = False,
        name: str = "cost",
    ) -> CostModel:
        """Declare the cost of Safe-RLHF: like :meth:`reward`, but to be kept below a limit."""
        return self._scorer(CostModel, source, timeout_s, layout, dtype, micro_batch_tokens, offload, name)

    def _scorer(
        self, cls: type[S], source: Any, timeout_s: float, layout: Layouts, dtype: str, micro_batch_tokens: int, offload: bool,
        name: str,
    ) -> S:  # fmt: skip
        role = RoleSpec(
            name=name, kind=cls.kind, dtype=dtype, micro_batch_tokens=micro_batch_tokens, offload=offload, seed=self.seed,
            timeout_s=timeout_s,
        )  # fmt: skip
        if callable(source) and not isinstance(source, ModelHandle):
            return self._declare(cls, function_role(role, source))
        return self._declare(cls, model_role(replace(role, head="scalar"), source, layout, None, self._ground))


def _trained(optimizer: AdamW) -> AdamW:
    if not isinstance(optimizer, AdamW):
        raise OptionError(f"optimizer must be an hf.AdamW(lr=...); got {optimizer!r}")
    return optimizer
