"""How roles are declared: ``session.actor(...)``, ``critic``, ``reference``, ``reward``, ``cost``."""

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
"""With the learning rate suggested for the model."""


class Declarations:
    """Declares roles, each by its kind."""

    def __init__(self, context: Context, deployment: Deployment) -> None:
        self._context, self._deployment = context, deployment

    @property
    def _backend(self) -> Backend:
        return self._context.backend

    def _dtype(self, asked: str | None) -> str:
        """Return the dtype that was asked for, or what models have here."""
        return self._backend.default_dtype if asked is None else asked

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
        """Declare the policy to be trained. Checked now, loaded at ``place`` or first use.

        Args:
            model: a name (``"tiny"``, ``"smollm2-135m-instruct"``), a local folder, a hub id; in simulation also a preset.
            train: layout of training, e.g. ``"tp2 dp2"``; an axis left out is 1, dp fills up.
            rollout: layout of generation on the same devices, e.g. ``"tp1"``.
            dtype: ``"fp32"`` or ``"bf16"`` (with fp32 masters); by default bf16 on GPUs, fp32 on processors and in simulation.
            lora: train adapters of low rank and leave the weights as they are: ``hf.LoRA(rank=16)``, or a folder of adapters to go
                on with, which peft or ``save_pretrained`` wrote. Roles that begin with the same model then share its weights on
                each device, and only adapters go to the rollout.
            optimizer: AdamW with its schedule and clipping; without ``lr`` it takes the learning rate suggested for the model.
            micro_batch_tokens: most tokens of one forward pass on one rank.
            recompute: activations that the backward pass computes again instead of keeping them: ``""`` none, ``"selective"``
                those inside attention and MLP, ``"full"`` all but each layer's input (a third more arithmetic, least memory).
                The gradient is the same.
            rollout_options: how the generating engine is sized.
            cpu_weights: short for ``RolloutOptions(cpu_weights=...)``: ``"packed"`` or ``"shared"``.
            offload: keep weights, gradients, masters and moments in host memory, and bring them to the device for this role's own
                calls but ``generate``; the numbers are the same. ``AdamW(offload=True)`` keeps masters and moments there also
                between the steps of a call. On processors, where a rollout with ``cpu_weights="shared"`` has the weights too,
                those stay.
            name: another name than "actor", where there are several.
            replace: with other arguments than before, whether a role of this name that was trained may be replaced; its updates are
                lost then. One without updates is replaced with a notice; the same arguments give the same handle.

        Raises:
            ModelNotFoundError: no such model, or a folder without weights.
            UnsupportedModelError: an architecture or head size that the engines do not run.
            LayoutError: a layout that fits neither the model nor the devices.
            OptionError: an option out of its range, or a role of this name was trained and ``replace`` is not given.
        """
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
        """Declare the value function: the model's body with a scalar head. Checked now, loaded at ``place`` or first use.

        Args:
            model: as in :meth:`actor`, or the actor itself (its initial weights).
            train: layout of training and inference, e.g. ``"tp2 dp2"``; an axis left out is 1, dp fills up.
            dtype: ``"fp32"`` or ``"bf16"``; by default bf16 on GPUs, fp32 on processors and in simulation.
            lora: as in :meth:`actor`; the scalar head is trained too.
            optimizer: AdamW with its schedule and clipping.
            micro_batch_tokens: most tokens of one forward pass on one rank.
            recompute: as in :meth:`actor`.
            offload: as in :meth:`actor`.
            name: another name than "critic", where there are several; Safe-RLHF asks for ``"cost_critic"``.
            replace: as in :meth:`actor`.

        Raises: as in :meth:`actor`.
        """
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
        """Declare the frozen policy that the KL is measured against, or the teacher of `hf.Distillation`.

        Args:
            model: the actor (the weights that it began with, in its dtype, also after updates), or a model as in :meth:`actor`,
                e.g. a folder that ``actor.save_pretrained`` wrote.
            layout: of inference; by default the actor's.
            dtype: by default the actor's, or as in :meth:`actor`.
            lora: folder of adapters that the model has, as peft or ``save_pretrained`` wrote it; of an actor that went on with some
                those are taken without asking.
            micro_batch_tokens: as in :meth:`actor`.
            offload: keep the weights in host memory and bring them to the device for this role's own calls.
            name: as in :meth:`actor`.
            replace: as in :meth:`actor`.

        Raises: as in :meth:`actor`.
        """
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
        """Declare what scores responses: a function ``f(prompts, completions, **columns) -> list[float | None]``, or a model.

        A function of one argument, whatever its name, is given the completions there: ``session.reward(hf.data.vader_sentiment)``.
        An async function is awaited, and its requests run side by side where it gathers them. ``None`` in its list is a sample that
        is not scored: it is left out of advantages, losses and statistics, and is never 0. In a sum it leaves that function's part
        out of the sample's score, so functions of several tasks give ``None`` for each other's rows.

        Called again with a new function, the same handle goes on with it (a new version; no worker restarts). What a function
        keeps between calls (a judge in a global variable) stays in its process, until one that takes too long ends it; what it
        prints is in ``session.logs("reward")``.

        Args:
            source: a function in TRL's form; it travels by value and gets the data's other columns by name. Or a model with
                a scalar head, as in :meth:`actor`. Or a list of functions and of handles of this method, to be summed.
            weights: of such a list; by default 1 each.
            per_token: whether the function returns a list of numbers per completion, one for each of ``completion_ids`` (which it
                gets by that name); they are kept as ``token_scores``, their sums as ``scores``, and `PPO`,
                `ReinforcePlusPlus` and `ProcessGRPO` reward each token or step with its own.
            timeout_s: most seconds one call of the function may take; with ``workers``, one sample.
            workers: run samples one by one in so many processes side by side: the function is called with lists of length 1 (so a
                score may not depend on the other samples), a sample that takes longer than ``timeout_s`` is ended and named, and
                the others go on. ``None`` calls the function once with the whole batch.
            failures: with ``workers``, what a sample does on which the function raises, takes too long or ends its process:
                ``"raise"`` names it in the call's error; ``"skip"`` leaves it out of the loss as not scored, with the reason in
                the column ``score_failures``.
            layout: of a model's inference or, with an optimizer, of its training.
            dtype: of a model, as in :meth:`actor`.
            lora: as in :meth:`critic`, of a model that is trained here or that peft trained.
            optimizer: to train a model here, on pairs (``reward.update(next(pairs), hf.BradleyTerry())``); without a scalar head it
                starts with a random one. ``None`` is frozen.
            micro_batch_tokens: of a model.
            offload: of a model, as in :meth:`reference`, or with an optimizer as in :meth:`actor`.
            name: another name than "reward", where there are several.
            replace: as in :meth:`actor`.

        Raises:
            OptionError: the function does not take completions, weights do not fit the list, one in it has the sum's name, or a
                role of this name was trained and ``replace`` is not given.
            ModelNotFoundError: no such model.
        """
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
        """Declare the cost of Safe-RLHF: like :meth:`reward`, but to be kept below a limit (``hf.SafeRLHF(cost_limit=...)``).

        Args:
            source: a function ``f(prompts, completions, **columns) -> list[float]`` or a model, as in :meth:`reward`.
            timeout_s: most seconds one call of the function may take; with ``workers``, one sample.
            workers: as in :meth:`reward`.
            failures: as in :meth:`reward`; the column is ``cost_failures``.
            layout: of a model's inference or, with an optimizer, of its training.
            dtype: of a model, as in :meth:`actor`.
            lora: as in :meth:`reward`.
            optimizer: to train a model here, on pairs (``cost.update(next(pairs), hf.CostLoss())``); ``None`` is frozen.
            micro_batch_tokens: of a model.
            offload: of a model, as in :meth:`reward`.
            name: another name than "cost", where there are several.
            replace: as in :meth:`actor`.

        Raises: as in :meth:`reward`.
        """
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
                taken = {part.name for part in parts}
                part_name = f"{name}.{own}" if f"{name}.{own}" not in taken else f"{name}.{own}.{number}"
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
