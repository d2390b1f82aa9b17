"""``Session``: the devices, the roles that live on them, and everything that is asked of them as a whole."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hfsdk.batch import Batch
from hfsdk.dataflow import Dataflow
from hfsdk.engine import messages as m
from hfsdk.errors import OptionError, PlacementError
from hfsdk.layout import Layout
from hfsdk.models import ActorModel, CostModel, CriticModel, ModelHandle, ReferenceModel, RewardModel
from hfsdk.placement import Placement
from hfsdk.roles import AdamW, RoleSpec, RolloutOptions
from hfsdk.runtime import Runtime
from hfsdk.session.checkpoint import load_session, save_session
from hfsdk.session.client import ControllerClient, Sender
from hfsdk.session.declare import Ground, ModelSource, filled, function_role, model_role
from hfsdk.session.prompts import PromptOptions, PromptStream
from hfsdk.session.roles import Models, RoleBook
from hfsdk.session.start import start_runtime, start_simulated
from hfsdk.session.tokenizer import FolderTokenizer, StandInTokenizer
from hfsdk.session.training import Run, evaluate, train
from hfsdk.session.views import PlacementPicture, Traces, dataflow_of, session_view
from hfsdk.spec import ClusterSpec

if TYPE_CHECKING:
    import pandas as pd

Layouts = str | Layout
"""``"tp2 dp2"``, ``hf.Layout(tp=2)``, or ``"auto"`` (data parallel)."""

ACTOR_OPTIMIZER = AdamW(lr=1e-5)
CRITIC_OPTIMIZER = AdamW(lr=2e-5)
UNLIMITED_TOKENS = 2**31
"""Context of a prompt stream made before there is an actor."""


class Session:
    """Devices and the roles on them. ``with hf.Session(devices=2) as session: ...`` closes it at the end.

    Attributes:
        name: shown in pictures.
        seed: of sampling, shuffling and new heads, where a call gives none.
        cluster: the devices.
        messages: notices so far, e.g. that a role was replaced.
        run: the last ``train``.
    """

    def __init__(
        self,
        devices: int | str | None = None,
        *,
        wait: bool = False,
        seed: int = 0,
        name: str | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        """Start a session.

        Args:
            devices: how many devices of this machine to use (by default its GPUs, or without any up to two processes on its
                processors), ``"auto"`` for the Ray cluster this process belongs to, or a cluster's address.
            wait: whether every call waits before it returns, so that a cell's time is its call's time.
            seed: see the class.
            name: see the class.
            runtime: runs the calls; by default Ray.

        Raises:
            OptionError: ``devices`` is not one of these.
            ModelNotFoundError: Ray is not installed here; the message says which extra brings it.
        """
        from hfsdk.engine.controller import Controller

        chosen = start_runtime(devices) if runtime is None else runtime
        self._setup(Controller(chosen), chosen.cluster, chosen.kind, wait=wait, seed=seed, name=name)

    @classmethod
    def simulated(
        cls,
        cluster: str | ClusterSpec,
        *,
        price_per_device_hour: float = 0.0,
        response_lengths: Any = None,
        wait: bool = False,
        seed: int = 0,
        name: str | None = None,
    ) -> Self:
        """Return a session on a virtual clock: the same calls, with shapes and predicted times, without values.

        Args:
            cluster: e.g. ``"16x8 A100-80GB"``.
            price_per_device_hour: for costs, in any currency.
            response_lengths: distribution of response lengths (see ``SimulatedRuntime``); by default its own.
            wait: as in :class:`Session`.
            seed: as in :class:`Session`.
            name: as in :class:`Session`.

        Raises:
            OptionError: the cluster does not parse.
        """
        spec = ClusterSpec.parse(cluster, price_per_device_hour) if isinstance(cluster, str) else cluster
        return cls(wait=wait, seed=seed, name=name, runtime=start_simulated(spec, response_lengths, seed))

    @classmethod
    def over(cls, controller: Sender, cluster: ClusterSpec, kind: str = "ray", *, wait: bool = False, seed: int = 0) -> Self:
        """Return a session over a controller that exists already (one in another process, or a stand-in in tests)."""
        session = cls.__new__(cls)
        session._setup(controller, cluster, kind, wait=wait, seed=seed, name=None)
        return session

    def _setup(self, controller: Sender, cluster: ClusterSpec, kind: str, *, wait: bool, seed: int, name: str | None) -> None:
        self.name = name or ("simulated" if kind == "simulated" else "session")
        self.seed = int(seed)
        self.cluster = cluster
        self.messages: list[str] = []
        self.run: Run | None = None
        self._kind = kind
        self._ground = Ground(cluster, simulated=kind == "simulated")
        self._client = ControllerClient(controller, wait_each=wait)
        self._book = RoleBook(self.notice)
        self._wish: str | Mapping[str, int] | Placement = "colocate"
        self._placement: Placement | None = None
        self._counters: dict[str, int] = {}
        self._streams: dict[str, PromptStream] = {}
        self._positions: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []
        self._finalizer = weakref.finalize(self, self._client.close)  # also at the interpreter's exit
        for opened in ON_OPEN:
            opened(self)

    # -- roles

    def actor(
        self,
        model: ModelSource,
        *,
        train: Layouts = "auto",
        rollout: Layouts = "auto",
        dtype: str = "fp32",
        optimizer: AdamW = ACTOR_OPTIMIZER,
        micro_batch_tokens: int = 4096,
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
            micro_batch_tokens: most tokens (padding included) of one forward pass on one rank.
            rollout_options: how the generating engine is sized.
            cpu_weights: short for ``RolloutOptions(cpu_weights=...)``: ``"packed"`` or ``"shared"``.
            name: another name than "actor", where there are several.

        Raises:
            ModelNotFoundError: no such model, or a folder without weights.
            UnsupportedModelError: an architecture or head size that the engines do not run.
            LayoutError: a layout that fits neither the model nor the devices.
            OptionError: an option out of its range.
        """
        options = rollout_options or RolloutOptions()
        if cpu_weights is not None:
            options = replace(options, cpu_weights=cpu_weights)
        role = RoleSpec(
            name=name, kind="actor", dtype=dtype, optimizer=_trained(optimizer), micro_batch_tokens=micro_batch_tokens,
            rollout_options=options, seed=self.seed,
        )  # fmt: skip
        return self._declare(ActorModel, model_role(role, model, train, rollout, self._ground))

    def critic(
        self,
        model: ModelSource,
        *,
        train: Layouts = "auto",
        dtype: str = "fp32",
        optimizer: AdamW = CRITIC_OPTIMIZER,
        micro_batch_tokens: int = 4096,
        name: str = "critic",
    ) -> CriticModel:
        """Declare the value function: the model's body with a scalar head. Arguments and errors as in :meth:`actor`."""
        role = RoleSpec(
            name=name, kind="critic", head="scalar", dtype=dtype, optimizer=_trained(optimizer),
            micro_batch_tokens=micro_batch_tokens, seed=self.seed,
        )  # fmt: skip
        return self._declare(CriticModel, model_role(role, model, train, None, self._ground))

    def reference(
        self,
        model: ModelSource,
        *,
        layout: Layouts = "auto",
        dtype: str | None = None,
        micro_batch_tokens: int = 4096,
        name: str = "reference",
    ) -> ReferenceModel:
        """Declare the frozen policy that the KL is measured against.

        Args:
            model: the actor (its initial weights, in its dtype), or a model as in :meth:`actor`.
            layout: of inference.
            dtype: by default the actor's, or fp32.
            micro_batch_tokens: as in :meth:`actor`.
            name: as in :meth:`actor`.

        Raises: as in :meth:`actor`.
        """
        own = model.role.dtype if isinstance(model, ModelHandle) else "fp32"
        role = RoleSpec(name=name, kind="reference", dtype=dtype or own, micro_batch_tokens=micro_batch_tokens, seed=self.seed)
        return self._declare(ReferenceModel, model_role(role, model, layout, None, self._ground))

    def reward(
        self,
        source: Callable[..., Any] | ModelSource,
        *,
        timeout_s: float = 60.0,
        layout: Layouts = "auto",
        dtype: str = "fp32",
        micro_batch_tokens: int = 4096,
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
            name: another name than "reward", where there are several.

        Raises:
            OptionError: the function does not take prompts and completions.
            ModelNotFoundError: no such model.
        """
        return self._scorer(RewardModel, source, timeout_s, layout, dtype, micro_batch_tokens, name)

    def cost(
        self,
        source: Callable[..., Any] | ModelSource,
        *,
        timeout_s: float = 60.0,
        layout: Layouts = "auto",
        dtype: str = "fp32",
        micro_batch_tokens: int = 4096,
        name: str = "cost",
    ) -> CostModel:
        """Declare the cost of Safe-RLHF: like :meth:`reward`, but to be kept below a limit."""
        return self._scorer(CostModel, source, timeout_s, layout, dtype, micro_batch_tokens, name)

    def _scorer[H: RewardModel | CostModel](
        self, cls: type[H], source: Any, timeout_s: float, layout: Layouts, dtype: str, micro_batch_tokens: int, name: str
    ) -> H:
        role = RoleSpec(name=name, kind=cls.kind, dtype=dtype, micro_batch_tokens=micro_batch_tokens, seed=self.seed, timeout_s=timeout_s)
        if callable(source) and not isinstance(source, ModelHandle):
            return self._declare(cls, function_role(role, source, self._book.tokenizer_folder))
        return self._declare(cls, model_role(replace(role, head="scalar"), source, layout, None, self._ground))
