"""The declaration of roles: ``session.actor(...)``, ``critic``, ``reference``, ``reward``, ``cost``."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np

from hfsdk.core.checks import Count, Name, OneOf, Positive, Within, checked, shown
from hfsdk.core.errors import OptionError
from hfsdk.core.functions import Shipped
from hfsdk.core.layout import Layout
from hfsdk.core.lora import LoRA
from hfsdk.core.roles import AdamW, RoleSpec, RolloutOptions
from hfsdk.core.unscored import PART
from hfsdk.kept.near_cluster import near_the_models
from hfsdk.models import ActorModel, CostModel, CriticModel, ModelHandle, ReferenceModel, RewardModel
from hfsdk.models.reward import RewardSum, WeightedScores, names_of
from hfsdk.session.context import Context
from hfsdk.session.placing import Deployment
from hfsdk.session.role_specs import Backend, ModelSource, function_role, model_role

Layouts = str | Layout
"""``"tp2 dp2"``, ``hf.Layout(tp=2)``, or ``"auto"`` (data parallel)."""

Workers = Annotated[int, Within(1, 1024)]
Failures = Annotated[str, OneOf("raise", "skip")]

Adapters = LoRA | str | Path | None
"""``hf.LoRA(rank=16)``, or a folder of adapters that peft or ``save_pretrained`` wrote."""

S = TypeVar("S", RewardModel, CostModel)

OPTIMIZER = AdamW()
"""AdamW with the learning rate suggested for the model."""


class Declarations:
    """Declares roles, each by its kind."""

    def __init__(self, context: Context, deployment: Deployment) -> None:
        self._context, self._deployment = context, deployment

    @property
    def _backend(self) -> Backend:
        return self._context.backend

    def _dtype(self, dtype: str | None) -> str:
        """Return this dtype or, for ``None``, the one that models have here."""
        return self._backend.default_dtype if dtype is None else dtype

    @near_the_models
    @checked
    def actor(
        self,
        model: ModelSource,
        *,
        train: Layouts = "auto",
        rollout: Layouts = "auto",
        dtype: str | None = None,
        lora: Adapters = None,
        optimizer: AdamW = OPTIMIZER,
        micro_batch_tokens: Count = 2048,
        recompute: str = "",
        rollout_options: RolloutOptions | None = None,
        cpu_weights: str | None = None,
        offload: bool = False,
        name: Name = "actor",
        replace: bool = False,
    ) -> ActorModel:
        """Carry out ``session.actor``; its text says what the arguments are."""
        options = rollout_options or RolloutOptions()
        if cpu_weights is not None:
            options = dataclasses.replace(options, cpu_weights=cpu_weights)
        role = RoleSpec(
            name=name, kind="actor", dtype=self._dtype(dtype), optimizer=optimizer, micro_batch_tokens=micro_batch_tokens,
            recompute=recompute, rollout_options=options, offload=offload, seed=self._context.seed,
        )  # fmt: skip
        return self._deployment.declare(ActorModel, model_role(role, model, train, rollout, self._backend, lora), replace=replace)

    @near_the_models
    @checked
    def critic(
        self,
        model: ModelSource,
        *,
        train: Layouts = "auto",
        dtype: str | None = None,
        lora: Adapters = None,
        optimizer: AdamW = OPTIMIZER,
        micro_batch_tokens: Count = 2048,
        recompute: str = "",
        offload: bool = False,
        name: Name = "critic",
        replace: bool = False,
    ) -> CriticModel:
        """Carry out ``session.critic``; its text says what the arguments are."""
        role = RoleSpec(
            name=name, kind="critic", head="scalar", dtype=self._dtype(dtype), optimizer=optimizer,
            micro_batch_tokens=micro_batch_tokens, recompute=recompute, offload=offload, seed=self._context.seed,
        )  # fmt: skip
        return self._deployment.declare(CriticModel, model_role(role, model, train, None, self._backend, lora), replace=replace)

    @near_the_models
    @checked
    def reference(
        self,
        model: ModelSource,
        *,
        layout: Layouts = "auto",
        dtype: str | None = None,
        lora: str | Path | None = None,
        micro_batch_tokens: Count = 2048,
        offload: bool = False,
        name: Name = "reference",
        replace: bool = False,
    ) -> ReferenceModel:
        """Carry out ``session.reference``; its text says what the arguments are."""
        own = model.role.dtype if isinstance(model, ModelHandle) else self._dtype(None)
        declared = self._deployment.book.declared(model) if isinstance(model, ModelHandle) else None
        train = None if declared is None or "train" in declared.auto else declared.train
        if layout == "auto" and train is not None:
            layout = train  # as declared: what placing filled in may be otherwise on this role's pool, and the next time
        role = RoleSpec(
            name=name, kind="reference", dtype=dtype or own, micro_batch_tokens=micro_batch_tokens, offload=offload,
            seed=self._context.seed,
        )  # fmt: skip
        return self._deployment.declare(ReferenceModel, model_role(role, model, layout, None, self._backend, lora), replace=replace)

    @near_the_models
    @checked
    def reward(
        self,
        source: Callable[..., Any] | ModelSource | Sequence[Callable[..., Any] | RewardModel],
        *,
        weights: Sequence[float] | None = None,
        per_token: bool = False,
        timeout_s: Positive = 60.0,
        workers: Workers | None = None,
        failures: Failures = "raise",
        layout: Layouts = "auto",
        dtype: str | None = None,
        lora: Adapters = None,
        optimizer: AdamW | None = None,
        micro_batch_tokens: Count = 2048,
        offload: bool = False,
        name: Name = "reward",
        replace: bool = False,
    ) -> RewardModel:
        """Carry out ``session.reward``; its text says what the arguments are."""
        if isinstance(source, (list, tuple)):
            if per_token or optimizer is not None:
                raise OptionError("a sum of rewards is neither trained nor per token; give optimizer or per_token to its parts")
            return self._sum_of(source, weights, timeout_s, workers, failures, name, replace)
        if weights is not None:
            raise OptionError("weights go with a list of rewards: session.reward([model, function], weights=[1.0, 0.1])")
        if per_token and (not callable(source) or isinstance(source, ModelHandle)):
            raise OptionError("per_token goes with a function that returns a list of numbers per completion; this is a model")
        return self._scorer(
            RewardModel, source, timeout_s, workers, failures, layout, dtype, lora, optimizer, micro_batch_tokens, offload, name,
            replace, per_token,
        )  # fmt: skip

    @near_the_models
    @checked
    def cost(
        self,
        source: Callable[..., Any] | ModelSource,
        *,
        timeout_s: Positive = 60.0,
        workers: Workers | None = None,
        failures: Failures = "raise",
        layout: Layouts = "auto",
        dtype: str | None = None,
        lora: Adapters = None,
        optimizer: AdamW | None = None,
        micro_batch_tokens: Count = 2048,
        offload: bool = False,
        name: Name = "cost",
        replace: bool = False,
    ) -> CostModel:
        """Carry out ``session.cost``; its text says what the arguments are."""
        return self._scorer(
            CostModel,
            source,
            timeout_s,
            workers,
            failures,
            layout,
            dtype,
            lora,
            optimizer,
            micro_batch_tokens,
            offload,
            name,
            replace,
        )

    def _sum_of(
        self, sources: Sequence[Any], weights: Sequence[float] | None, timeout_s: float, workers: int | None, failures: str,
        name: str, replace: bool,
    ) -> RewardModel:  # fmt: skip
        listed = [1.0] * len(sources) if weights is None else weights
        chosen = list(listed) if isinstance(listed, Sequence | np.ndarray) else []
        finite = all(isinstance(weight, (int, float)) and math.isfinite(weight) for weight in chosen)
        if not sources or len(chosen) != len(sources) or not finite:
            what = f"{len(sources)} rewards and weights={shown(weights)}"
            raise OptionError(f"a sum of rewards needs one finite weight for each; got {what}")
        for source in sources:
            if isinstance(source, ModelHandle) and not isinstance(source, RewardModel):
                raise OptionError(f"a sum of rewards takes functions and handles of session.reward(...); got {shown(source)}")
            if isinstance(source, RewardModel) and name in names_of(source):
                raise OptionError(
                    f"the sum would be named {name!r}, as one of its rewards, {source!r}, and take its place. Declare that one "
                    "with another name, e.g. session.reward(..., name='judge')."
                )
        parts: list[RewardModel] = []
        for number, source in enumerate(sources):
            if not isinstance(source, RewardModel):
                own = re.sub(r"[^\w.+-]", "", str(getattr(source, "__name__", ""))) or str(number)
                # two functions may be called the same, e.g. lambdas
                part_names = {part.name for part in parts}
                part_name = f"{name}.{own}" if f"{name}.{own}" not in part_names else f"{name}.{own}.{number}"
                source = self.reward(
                    source, timeout_s=timeout_s, workers=workers, failures=failures, name=part_name, replace=replace
                )
            parts.append(source)
        names, values = tuple(f"{PART}{part.name}" for part in parts), tuple(float(w) for w in chosen)
        shipped = Shipped.of(WeightedScores(names, values))
        role = RoleSpec(name=name, kind="reward", seed=self._context.seed, timeout_s=timeout_s, function=shipped)
        handle = self._deployment.declare(RewardSum, role, replace=replace)
        handle.parts, handle.weights = tuple(parts), values
        return handle

    def _scorer(
        self, cls: type[S], source: Any, timeout_s: float, workers: int | None, failures: str, layout: Layouts, dtype: str | None,
        lora: Adapters, optimizer: AdamW | None, micro_batch_tokens: int, offload: bool, name: str, replace: bool,
        per_token: bool = False,
    ) -> S:  # fmt: skip
        role = RoleSpec(
            name=name, kind=cls.kind, dtype=self._dtype(dtype), micro_batch_tokens=micro_batch_tokens,
            offload=offload, seed=self._context.seed, timeout_s=timeout_s, per_token=per_token, workers=workers or 0,
            failures=failures,
        )  # fmt: skip
        is_function = callable(source) and not isinstance(source, ModelHandle)
        if failures == "skip" and not (workers and is_function):
            raise OptionError(
                'failures="skip" goes with workers=N and a function: samples then run one by one, so that one can fail by itself'
            )
        if workers and not is_function:
            raise OptionError("workers are processes of a reward function; a model runs on its layout's devices")
        if is_function:
            if optimizer is not None or lora is not None:
                raise OptionError(f"a {cls.kind} function cannot be trained; leave optimizer and lora out, or give a model")
            return self._deployment.declare(cls, function_role(role, source), replace=replace)
        if optimizer is not None:
            role = dataclasses.replace(role, optimizer=optimizer)
        role = model_role(dataclasses.replace(role, head="scalar"), source, layout, None, self._backend, lora)
        return self._deployment.declare(cls, role, replace=replace)
