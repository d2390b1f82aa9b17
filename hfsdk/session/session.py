"""``Session``: the devices, the roles that live on them, and every request to them as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, overload

from hfsdk.algorithms.choices import Copies
from hfsdk.core.batch import Batch
from hfsdk.core.call_events import Listener
from hfsdk.core.checks import Count, Index, Length, Name, NonNegative, Positive, Title, check_options, checked
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import OptionError, SessionClosedError
from hfsdk.core.experiment import Experiment
from hfsdk.core.hints import SESSION, AttributeHints, CompletableProperty, PublicNames
from hfsdk.core.history import History
from hfsdk.core.plan import Plan, Workload
from hfsdk.core.roles import AdamW, RolloutOptions
from hfsdk.core.runtime import Runtime
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.text import printable
from hfsdk.core.trace import Trace
from hfsdk.diagnose.step_export import export_step
from hfsdk.engine.calls import queries as q
from hfsdk.engine.process.interrupts import held
from hfsdk.kept.attach import DAY_S, KeptStart, attach_link, connect, leave, start_keeper
from hfsdk.kept.remote_controller import RemoteController
from hfsdk.models import ActorModel, CostModel, CriticModel, ModelHandle, ReferenceModel, RewardModel
from hfsdk.planner.perf.calibration import Calibration, Measured
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.run.best import KeepBest, evaluate
from hfsdk.run.compare import Algorithms, compare
from hfsdk.run.notebook import show_calls
from hfsdk.run.run import Run
from hfsdk.run.trackers import Tracker
from hfsdk.run.train import train
from hfsdk.run.train_config import RAISE, TrainConfig
from hfsdk.session.algorithm import Algorithm
from hfsdk.session.client import ControllerClient
from hfsdk.session.context import Context
from hfsdk.session.data import BATCH_SIZE, BatchSize
from hfsdk.session.parts import Parts
from hfsdk.session.placing import Asked
from hfsdk.session.plans import Top
from hfsdk.session.role_book import Models
from hfsdk.session.role_specs import ModelSource
from hfsdk.session.roles import OPTIMIZER, Adapters, Failures, Layouts, Workers
from hfsdk.session.start import Seconds, Seed, Started, as_started, check_session, start, start_simulated
from hfsdk.session.streams import Demonstrations, Pairs, PromptStream
from hfsdk.session.views import BatchRegistry, Dataflows, LivePlacement, MemoryUse, Traces
from hfsdk.session.what_if import WhatIf
from hfsdk.state.checkpoint import Saving

if TYPE_CHECKING:
    import pandas as pd


class Session(AttributeHints, PublicNames):
    """Devices and the roles on them. ``with hf.Session(devices=2) as session: ...`` closes it at the end.

    Attributes:
        name: shown in pictures.
        seed: the seed of sampling, shuffling and new heads, where a call gives none.
        cluster: the devices.
        messages: notices so far, e.g. that a role was replaced.
        run: the last ``train``.
        perf: predicts seconds, see :meth:`predict`; :meth:`calibrate` replaces it.
        errors: relative error of ``perf`` by method, for the bands of plans; ``None`` until :meth:`calibrate` has measured it.
    """

    _inner = ("measured", "record", "simulated", "view")
    _elsewhere = SESSION
    _link: RemoteController | None = None
    """The way to what keeps the session, where it is kept."""

    @checked
    def __init__(
        self,
        devices: int | str | None = None,
        *,
        price_per_device_hour: NonNegative = 0.0,
        wait: bool = False,
        seed: int = 0,
        name: Title | None = None,
        start_timeout_s: Seconds = 300.0,
        collective_timeout_s: Seconds | None = None,
        deterministic: bool = False,
        keep: bool = False,
        unattended_s: Seconds = DAY_S,
        runtime: Runtime | None = None,
    ) -> None:
        """Start a session.

        Args:
            devices: how many devices of this machine to use (by default its GPUs, or without any up to two processes on its
                processors), or all devices of a Ray cluster: ``"auto"`` for the one that runs on this machine, or an address,
                ``"host:port"``. This process must be on one of its nodes; code and model folders are brought to the others.
            price_per_device_hour: the price by which a run of :meth:`train` has cost so far, in any currency.
            wait: whether every call waits before it returns, so that a cell's time is its call's time.
            seed: see the class.
            name: see the class.
            start_timeout_s: how long the workers of a pool may take to start and meet; many nodes on one slow disk need more.
            collective_timeout_s: how long a rank waits for the others inside a collective before its call fails; by default torch's
                own limits, 30 minutes for gloo and 10 for NCCL.
            deterministic: whether the same calls in the same layout shall give the same numbers, bit for bit, on GPUs too. On
                processors they always do, and this changes nothing. On GPUs kernels add in an order that depends on timing and on
                what runs beside, so that without it numbers are close, not equal. With it torch, cuBLAS and NCCL are held to one
                order, and vLLM uses kernels that do not depend on the batch: slower, several times where GPUs exchange much; only
                on GPUs of compute capability 9.0 or more (H100, B200); never tried on one so far. What a loss calls and torch has
                in no fixed order raises then. Another number or kind of GPUs gives other numbers all the same.
            keep: whether the session outlives this process: its controller is a process of the cluster, runs of :meth:`train`
                go on there, and ``hf.Session.attach(name)`` in another kernel comes back to all of it. Leaving the kernel leaves
                the session; ``session.close()`` or ``hf.sessions()[name].close()`` ends it. It needs a name.
            unattended_s: a kept session ends by itself when for so many seconds no kernel had it and no run went on; a day.
            runtime: runs the calls; by default Ray.

        Raises:
            OptionError: ``devices`` is not one of these, or a kept session has no name, or that of another one.
            PlacementError: there is no cluster at the address, or it has no devices. With ``deterministic``, the first ``place`` or
                call raises it where a GPU has no such kernels.
            ModelNotFoundError: Ray is not installed here; the message says which extra brings it.
        """
        options = {
            "start_timeout_s": start_timeout_s, "collective_timeout_s": collective_timeout_s, "deterministic": deterministic
        }  # fmt: skip
        check_session(price_per_device_hour, wait, seed, name, **options)
        try:
            with held():  # a Ctrl-C finds a session that can be closed, or none
                if keep and runtime is None:
                    started: Started = start_keeper(devices, name, seed, price_per_device_hour, unattended_s, options)
                else:
                    started = start(devices, options) if runtime is None else as_started(runtime)
                self._open(started, price_per_device_hour, wait=wait, seed=seed, name=name)
        except BaseException:
            with held():
                if "_finalizer" in vars(self):
                    self._finalizer()
            raise
        for text in started.notices:
            self._parts.context.notice(text)

    @classmethod
    @checked
    def attach(
        cls,
        name: Name,
        address: Name | None = None,
        *,
        token: Name | None = None,
        read_only: bool = False,
        take_over: bool = False,
        wait: bool = False,
    ) -> Self:
        """Come back to a session that was made with ``keep=True``, from another kernel.

        Everything is as it was: the roles (``session.models``, ``session.roles``), the placement, trace, history, snapshots, the
        prompts' places (make the same prompts again, and they go on where they were), and the batches that variables of the other
        kernel referred to (``session.batches``). A run of :meth:`train` has gone on meanwhile: ``session.watch()``.

        Args:
            name: the session's; from outside its cluster ``"hfsdk://127.0.0.1:8267/NAME"``, with ``python -m hfsdk.serve`` on its
                head node and an SSH tunnel to it.
            address: the address of its Ray cluster, ``"auto"`` or ``"host:port"``; by default the sessions of this machine alone.
            token: the token of that server; by default ``HFSDK_TOKEN`` of the environment.
            read_only: only look: pictures, history, values of batches; whoever has the session keeps it.
            take_over: take it from a kernel that has it and lives.
            wait: as in :class:`Session`.

        Raises:
            OptionError: there is no such session, or another version of hfsdk keeps it.
            SessionInUseError: another kernel has it; says which.
            PlacementError: there is no such cluster, or this process uses another one.
            SessionClosedError: the answering process does not know the token, or is another version's.
        """
        session = cls.__new__(cls)
        with held():
            started = attach_link(name, address, token, read_only=read_only, take_over=take_over)
            session._open(started, 0.0, wait=wait, seed=0, name=name)
        return session

    @classmethod
    @checked
    def simulated(
        cls,
        cluster: str | ClusterSpec,
        *,
        price_per_device_hour: NonNegative = 0.0,
        response_lengths: Any = None,
        perf: PerfModel | None = None,
        wait: bool = False,
        seed: int = 0,
        name: Title | None = None,
    ) -> Self:
        """Return a session on a virtual clock: the same calls, with shapes and predicted times, without values.

        Args:
            cluster: e.g. ``"16x8 A100-80GB"``, or an :class:`hfsdk.ClusterSpec`.
            price_per_device_hour: the price for costs, in any currency; by default the cluster's.
            response_lengths: ``"full"`` (the default), ``"uniform"``, ``"lognormal"`` or an :class:`hfsdk.ResponseLengths`.
            perf: predicts the seconds, e.g. one that was fitted; by default the presets'.
            wait: as in :class:`Session`.
            seed: as in :class:`Session`.
            name: as in :class:`Session`.

        Raises:
            OptionError: the cluster does not parse, or an argument is none of these.
        """
        check_session(price_per_device_hour, wait, seed, name)
        runtime = start_simulated(cluster, response_lengths, perf)
        session = cls(price_per_device_hour=price_per_device_hour, wait=wait, seed=seed, name=name, runtime=runtime)
        if perf is not None:
            session.perf = perf
        return session

    def _open(self, started: Started, price_per_device_hour: float, *, wait: bool, seed: int, name: str | None) -> None:
        cluster = replace(
            started.cluster, price_per_device_hour=price_per_device_hour or started.cluster.price_per_device_hour
        )  # fmt: skip
        title = name or ("simulated" if started.kind == "simulated" else "session")
        reconnected = started if isinstance(started, KeptStart) else None
        client = ControllerClient(
            started.controller, wait_each=wait, simulated=started.kind == "simulated", shared=reconnected is not None
        )  # fmt: skip
        context = Context(title, cluster, started.kind, client, int(seed))
        client.pass_notices(context.notice)
        self._parts = Parts.of(context)
        if reconnected is not None and reconnected.link is not None:
            self._link = reconnected.link
            self._finalizer = weakref.finalize(context, reconnected.link.leave)
            connect(self._parts, reconnected)
        else:  # once no handle is left either; also at the interpreter's exit
            self._finalizer = weakref.finalize(context, client.close)
        show_calls(self.subscribe)

    @property
    def name(self) -> str:
        """Shown in pictures."""
        return self._parts.context.name

    @name.setter
    def name(self, name: str) -> None:
        check_options("a session", name=(name, Title))
        self._parts.context.name = name

    @property
    def seed(self) -> int:
        """The seed of sampling, shuffling and new heads, where a call gives none."""
        return self._parts.context.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        check_options("a session", seed=(seed, Seed))
        self._parts.context.seed = int(seed)

    @property
    def kept(self) -> bool:
        """Whether it outlives this process (``hf.Session(..., keep=True)``)."""
        return self._link is not None

    @CompletableProperty
    def cluster(self) -> ClusterSpec:
        """The devices."""
        return self._parts.context.cluster

    @property
    def messages(self) -> list[str]:
        """Notices so far, e.g. that a role was replaced."""
        return self._parts.context.messages

    @property
    def status(self) -> str:
        """``"closed"``, ``"working"`` or ``"idle"``."""
        client = self._parts.client
        if client.closed:
            return "closed"
        try:
            return "working" if client.send(q.RunningCalls()) else "idle"
        except SessionClosedError:  # it ended meanwhile
            return "closed"

    # -- roles

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
        return self._parts.declarations.actor(
            model,
            train=train,
            rollout=rollout,
            dtype=dtype,
            lora=lora,
            optimizer=optimizer,
            micro_batch_tokens=micro_batch_tokens,
            recompute=recompute,
            rollout_options=rollout_options,
            cpu_weights=cpu_weights,
            offload=offload,
            name=name,
            replace=replace,
        )

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
            model: the same as in :meth:`actor`, or the actor itself (its initial weights).
            train: layout of training and inference, e.g. ``"tp2 dp2"``; an axis left out is 1, dp fills up.
            dtype: ``"fp32"`` or ``"bf16"``; by default bf16 on GPUs, fp32 on processors and in simulation.
            lora: the same as in :meth:`actor`; the scalar head is trained too.
            optimizer: AdamW with its schedule and clipping.
            micro_batch_tokens: most tokens of one forward pass on one rank.
            recompute: the same as in :meth:`actor`.
            offload: the same as in :meth:`actor`.
            name: another name than "critic", where there are several; Safe-RLHF asks for ``"cost_critic"``.
            replace: the same as in :meth:`actor`.

        Raises: as in :meth:`actor`.
        """
        return self._parts.declarations.critic(
            model,
            train=train,
            dtype=dtype,
            lora=lora,
            optimizer=optimizer,
            micro_batch_tokens=micro_batch_tokens,
            recompute=recompute,
            offload=offload,
            name=name,
            replace=replace,
        )

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
            layout: the layout of inference; by default the actor's.
            dtype: by default the actor's, or as in :meth:`actor`.
            lora: folder of adapters that the model has, as peft or ``save_pretrained`` wrote it; of an actor that went on with some
                those are taken without asking.
            micro_batch_tokens: the same as in :meth:`actor`.
            offload: keep the weights in host memory and bring them to the device for this role's own calls.
            name: the same as in :meth:`actor`.
            replace: the same as in :meth:`actor`.

        Raises: as in :meth:`actor`.
        """
        return self._parts.declarations.reference(
            model,
            layout=layout,
            dtype=dtype,
            lora=lora,
            micro_batch_tokens=micro_batch_tokens,
            offload=offload,
            name=name,
            replace=replace,
        )

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
            weights: the weights of such a list; by default 1 each.
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
            layout: the layout of a model's inference or, with an optimizer, of its training.
            dtype: the dtype of a model, as in :meth:`actor`.
            lora: adapters, as in :meth:`critic`, of a model that is trained here or that peft trained.
            optimizer: to train a model here, on pairs (``reward.update(next(pairs), hf.BradleyTerry())``); without a scalar head it
                starts with a random one. ``None`` is frozen.
            micro_batch_tokens: the tokens in a micro-batch of a model.
            offload: offloading of a model, as in :meth:`reference`, or with an optimizer as in :meth:`actor`.
            name: another name than "reward", where there are several.
            replace: the same as in :meth:`actor`.

        Raises:
            OptionError: the function does not take completions, weights do not fit the list, one in it has the sum's name, or a
                role of this name was trained and ``replace`` is not given.
            ModelNotFoundError: no such model.
        """
        return self._parts.declarations.reward(
            source,
            weights=weights,
            per_token=per_token,
            timeout_s=timeout_s,
            workers=workers,
            failures=failures,
            layout=layout,
            dtype=dtype,
            lora=lora,
            optimizer=optimizer,
            micro_batch_tokens=micro_batch_tokens,
            offload=offload,
            name=name,
            replace=replace,
        )

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
            workers: the same as in :meth:`reward`.
            failures: the same as in :meth:`reward`; the column is ``cost_failures``.
            layout: the layout of a model's inference or, with an optimizer, of its training.
            dtype: the dtype of a model, as in :meth:`actor`.
            lora: the same as in :meth:`reward`.
            optimizer: to train a model here, on pairs (``cost.update(next(pairs), hf.CostLoss())``); ``None`` is frozen.
            micro_batch_tokens: the tokens in a micro-batch of a model.
            offload: offloading of a model, as in :meth:`reward`.
            name: another name than "cost", where there are several.
            replace: the same as in :meth:`actor`.

        Raises: as in :meth:`reward`.
        """
        return self._parts.declarations.cost(
            source,
            timeout_s=timeout_s,
            workers=workers,
            failures=failures,
            layout=layout,
            dtype=dtype,
            lora=lora,
            optimizer=optimizer,
            micro_batch_tokens=micro_batch_tokens,
            offload=offload,
            name=name,
            replace=replace,
        )

    @checked
    def place(self, what: Asked = "colocate", *, fresh: bool = False) -> LivePlacement:
        """Put the declared models on devices and load them; waits.

        On live models: what runs is finished first; roles whose devices, layouts or (on GPUs) share of the memory for generating
        change move with their weights and optimizer state, bit for bit; the others are left alone. Handles stay valid and batches
        readable. An interrupt while it waits for what runs leaves all as it was; one after that is heard once roles are on their
        way, and they are loaded in the background.

        Args:
            what: a preset (``"colocate"``, ``"split"``, ``"standalone"``, ``"flattening"``, ``"separation"``; see
                :meth:`hfsdk.Placement.of`), ``{"actor reference": 2, "critic": 2}``, a :class:`hfsdk.Placement`, or a plan or one
                of its runners-up, which also set the layouts that were left open.
            fresh: whether models whose place or layout changes start again from their initial weights.

        Returns:
            Who lives where, with memory; it draws itself, after a move with what was before.

        Raises:
            PlacementError: it does not fit the roles or devices.
            DeviceMemoryError: the models would not fit into memory; nothing was loaded.
            WorkerDiedError: a worker ended meanwhile. The placement is the new one all the same; the message says what each role
                comes back with at the next call (the newest of snapshot, checkpoint and initial weights) and the updates lost.
        """
        return self._parts.deployment.place(what, fresh=fresh)

    @property
    def roles(self) -> tuple[ModelHandle, ...]:
        """All handles, in the order of declaration."""
        return tuple(self._parts.deployment.book)

    @CompletableProperty
    def models(self) -> Models:
        """The handles as algorithms take them: ``session.models.actor`` and so on."""
        return self._parts.deployment.models

    @CompletableProperty
    def placement(self) -> LivePlacement:
        """The roles on their devices, with memory; drawn live while calls run."""
        return self._parts.deployment.live()

    @checked
    def logs(self, role: str, rank: Index = 0) -> str:
        """Return what the worker of ``rank`` of a role has printed; of a function what all have, which share a process."""
        self._parts.client.check_open()
        return self._parts.deployment.book.find(role).logs(rank)

    # -- data

    @checked
    def prompts(
        self,
        source: Any,
        *,
        column: str | None = None,
        batch_size: BatchSize = BATCH_SIZE,
        seed: int | None = None,
        max_prompt_tokens: Count | None = None,
        chat: bool = False,
        system: str | None = None,
        shuffle: bool = True,
    ) -> PromptStream:
        """Return prompts in batches: ``prompts[k]`` repeats, ``next(prompts)`` advances.

        Args:
            source: a ``datasets.Dataset``, a DataFrame, a Series, a dict of columns, or a list of texts, of token ids, of
                conversations or of dicts. A conversation is a list of ``{"role", "content"}`` messages, as TRL's, and goes into
                the model's chat template.
            column: where the prompts are, by default ``prompt``, or else ``text`` or ``messages``; the other columns (e.g. TRL's
                ``completion``) are passed on to reward functions.
            batch_size: prompts per batch; 32 where it is not given.
            seed: the seed of the order; by default the session's.
            max_prompt_tokens: keep at most the last so many tokens of each prompt; ``None`` cuts nothing.
            chat: put each text into the model's chat template as the user's turn.
            system: the system message of that chat, and with ``chat`` of conversations that have none.
            shuffle: whether each pass over the data has an order of its own.

        Raises:
            ColumnError: there is no such column.
            OptionError: a prompt is empty or as long as the context (names its row), or an option is out of range.
        """
        return self._parts.sources.prompts(
            source,
            column=column,
            batch_size=batch_size,
            seed=seed,
            max_prompt_tokens=max_prompt_tokens,
            chat=chat,
            system=system,
            shuffle=shuffle,
        )

    @checked
    def demonstrations(
        self,
        source: Any,
        *,
        batch_size: BatchSize = BATCH_SIZE,
        seed: int | None = None,
        max_tokens: Count | None = None,
        shuffle: bool = True,
    ) -> Demonstrations:
        """Return texts to imitate in batches, for ``actor.update(next(demonstrations), hf.CrossEntropy())``.

        Args:
            source: as in :meth:`prompts`, with a column ``text``, ``messages`` (the last one, the assistant's, is learned), or
                ``prompt`` and ``completion``; or a list of texts. Each ends with a token of the model's that ends a turn.
            batch_size: examples per batch; 32 where it is not given.
            seed: the seed of the order; by default the session's.
            max_tokens: longest prompt plus response; what is longer loses its end. ``None`` cuts nothing.
            shuffle: whether each pass over the data has an order of its own.

        Raises:
            ColumnError: the data has neither.
            OptionError: an example is empty or too long (names its row), the chat template does not take or would leave out
                something of it, or an option is out of range.
        """
        return self._parts.sources.demonstrations(source, batch_size=batch_size, seed=seed, max_tokens=max_tokens, shuffle=shuffle)

    @checked
    def pairs(
        self,
        source: Any,
        *,
        batch_size: BatchSize = BATCH_SIZE,
        seed: int | None = None,
        max_tokens: Count | None = None,
        shuffle: bool = True,
    ) -> Pairs:
        """Return preference pairs in batches, for ``reward.update(next(pairs), hf.BradleyTerry())`` and `DPO`.

        Args:
            source: as in :meth:`prompts`, with columns ``prompt``, ``chosen`` and ``rejected`` (without ``prompt``: what both
                texts begin with), e.g. ``hf.data.review_pairs()``. ``margin`` and others are passed on, ``chosen_x`` and
                ``rejected_x`` as each row's ``x``.
            batch_size: pairs per batch, 32 where it is not given; it has twice as many rows, the chosen one first.
            seed: the seed of the order; by default the session's.
            max_tokens: the same as in :meth:`demonstrations`.
            shuffle: the same as in :meth:`demonstrations`.

        Raises:
            ColumnError: a column is missing.
            OptionError: a pair has two different prompts or is too long (names its row), or an option is out of range.
        """
        return self._parts.sources.pairs(source, batch_size=batch_size, seed=seed, max_tokens=max_tokens, shuffle=shuffle)

    @checked
    def batch(self, /, **columns: Any) -> Batch:
        """Return own data as a batch: lists of sequences become variable-length columns, numbers one value per sample.

        Raises:
            ColumnError: the columns differ in length or are empty.
        """
        return self._parts.sources.batch(**columns)

    # -- planning

    @checked
    def plan(
        self,
        algorithm: Algorithm,
        workload: Workload,
        *,
        top: Top = 5,
        by_placement: bool = False,
        shadows: bool = True,
        perf: PerfModel | None = None,
        error: NonNegative | Mapping[str, NonNegative] | None = None,
    ) -> Plan:
        """Find the best placement and layouts of the declared roles for one step of an algorithm; nothing runs, nothing is loaded.

        The algorithm's ``step`` is run once without values, to see its calls; then the optimum is searched over set partitions of
        the roles, pool sizes, layouts and strategies (interleaving, separation), under memory: exact within that family
        (``plan.search.family``) and the performance model. Layouts that were declared are kept; those left ``"auto"`` are searched.
        Where responses vary in length, plans are compared in the mean over the lengths of several steps (``plan.best.steps_s``).

        Args:
            algorithm: e.g. ``hf.PPO()``.
            workload: prompts and lengths of one step; what it names replaces the algorithm's own options.
            top: how many plans to return, the best one included.
            by_placement: whether two of them may share devices in the same way and differ in pool sizes.
            shadows: whether shadows (separation) may be used.
            perf: predicts seconds; by default the session's own.
            error: relative error of predicted seconds, for the bands: a number from 0 to 1, or by method; by default what
                :meth:`calibrate` found, or what published timings say of the presets.

        Returns:
            The plan; ``session.place(plan)`` applies it, ``plan.why()`` explains it.

        Raises:
            DeviceMemoryError: nothing fits; says by how many bytes, and the smallest cluster that would do.
            LayoutError: a declared layout covers no pool of this cluster.
            OptionError: the workload is none, the algorithm generates nothing or lacks an option that the workload names, an
                option is out of its range, or samples would be longer than the actor's ``max_model_len``.
            PlacementError: a role that the step uses is not declared.
        """
        return self._parts.plans.plan(
            algorithm, workload, top=top, by_placement=by_placement, shadows=shadows, perf=perf, error=error
        )

    @checked
    def what_if(
        self,
        algorithm: Algorithm,
        workload: Workload,
        *,
        top: Top = 5,
        shadows: bool = True,
        perf: PerfModel | None = None,
        error: NonNegative | Mapping[str, NonNegative] | None = None,
    ) -> WhatIf:
        """Return the plan with sliders: in a notebook, devices, lengths, prompts, price, placement and layouts can be moved.

        Whatever is moved, the plan is found anew. Nothing of the session changes; ``session.place(what_if.plan)`` applies it.
        Where lengths outgrow a ``max_model_len`` that was left open, the plan assumes a larger one and says so.

        Args:
            algorithm: the same as in :meth:`plan`.
            workload: the position of the sliders at first.
            top: the same as in :meth:`plan`.
            shadows: the same as in :meth:`plan`.
            perf: the same as in :meth:`plan`.
            error: the same as in :meth:`plan`.

        Raises: as :meth:`plan`.
        """
        return self._parts.plans.what_if(algorithm, workload, top=top, shadows=shadows, perf=perf, error=error)

    @checked
    def predict(self, step: int = -1, *, perf: PerfModel | None = None) -> Trace:
        """Return a step that ran as a simulated twin of this session takes it.

        The twin has the same cluster, roles, layouts and placement, and carries out the same calls with the lengths that were
        measured: ``session.trace[-1].compare(session.predict())``. Calls that write files and ``handle.run`` are left out.

        Args:
            step: the step's number, as in :attr:`trace`; by default the last.
            perf: the performance model; by default the session's, ``session.perf``: the presets', or those of :meth:`calibrate`.

        Returns:
            A trace of predicted spans.

        Raises:
            OptionError: there is no such step, or its calls are not kept any more (of the last 256 calls they are).
            CallError: a call of the step failed.
        """
        return self._parts.predictions.predict(step, perf=perf)

    @checked
    def measured(self, step: int = -1) -> Measured:
        """Return a step that ran with what its calls worked on, for ``PerfModel.fit``.

        Arguments and errors as in :meth:`predict`.
        """
        return self._parts.predictions.measured(step)

    @checked
    def calibrate(self, steps: Annotated[Sequence[int], Length(1, 10_000)] = (-1,)) -> Calibration[PerfModel]:
        """Fit the performance model to steps of this session; later predictions use it. See ``PerfModel.fit``.

        Raises:
            OptionError: the same as in :meth:`predict`; or the session is simulated, and nothing was measured.
        """
        return self._parts.predictions.calibrate(steps)

    @property
    def perf(self) -> PerfModel:
        """Predicts seconds, see :meth:`predict`; :meth:`calibrate` replaces it."""
        return self._parts.predictions.perf

    @perf.setter
    def perf(self, perf: PerfModel) -> None:
        self._parts.predictions.perf = perf

    @property
    def errors(self) -> Mapping[str, float] | None:
        """Relative error of ``perf`` by method, for the bands of plans; ``None`` until :meth:`calibrate` has measured it."""
        return self._parts.predictions.errors

    @errors.setter
    def errors(self, errors: Mapping[str, float] | None) -> None:
        self._parts.predictions.errors = errors

    # -- looking

    @checked
    def report(self, path: str | Path, *, batch: Batch | None = None) -> Path:
        """Write one offline HTML file with everything that can be looked at: placement, training, dataflow, timeline, memory, ...

        A file that is there is replaced when this one is complete, with a notice unless this process wrote it; a link there is
        replaced too, never followed.

        Of a closed session it has what stays readable (see :meth:`close`).

        Args:
            path: the file to write, ``.html``; its folder must exist.
            batch: the batch whose samples are shown; by default the last one of :meth:`train`.

        Returns:
            The path.

        Raises:
            OptionError: the file's name does not end with .html, or its folder does not exist.
            OutputError: it cannot be written; what was there is unchanged.
        """
        from hfsdk.session.report import report  # the pictures are loaded when one is asked for

        return report(self._parts, path, batch=batch)

    @checked
    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(event)`` for every start, progress and end of a call; return a function that stops that.

        An event is ``{"type": "call_started" | "call_progress" | "call_done" | "call_failed" | "call_cancelled", "call_id",
        "call", "line", "done", "total", "unit", "seconds", "error"}``. Starts come on the calling thread, the rest on a thread of
        the listener's own: it may look at the session, wait, and make calls, of which it is not told. One that raises is dropped.

        Raises:
            OptionError: it is no function.
        """
        return self._parts.subscribe(listener)

    @CompletableProperty
    def trace(self) -> Traces:
        """The spans of the current step; ``trace[k]`` of step k. Drawn live while calls run."""
        return self._parts.traces

    @CompletableProperty
    def dataflow(self) -> Dataflows:
        """The calls of the current step and the columns between them; ``dataflow[k]`` of step k. Drawn live while calls run."""
        return self._parts.dataflows

    @property
    def memory(self) -> MemoryUse:
        """The bytes on every device through the current step, planned and measured. Drawn in a notebook."""
        return self._parts.memory

    def view(self) -> dict[str, Any]:
        """Return plain data for display; does not wait."""
        return self._parts.view()

    def _repr_html_(self) -> str | None:
        from hfsdk.viz.hooks import session_card

        return session_card(self)

    def __repr__(self) -> str:
        context = self._parts.context
        state = "closed" if context.client.closed else "open"
        roles = ", ".join(h.name for h in self.roles) or "none"
        return printable(f"Session({context.name}: {context.cluster}, {context.runtime}, {state}; roles: {roles})")

    # -- training

    @checked
    def train(
        self,
        algorithm: Algorithm,
        prompts: Any,
        *,
        steps: Count,
        metrics: Sequence[Callable[[Batch], Mapping[str, float] | float]] = (),
        stop: Callable[[dict[str, Any]], bool] | None = None,
        save_every: Index = 0,
        folder: str | Path | None = None,
        keep: Count = 1,
        resume: str | Path | None = None,
        keep_best: KeepBest | PromptStream | None = None,
        track: str | Tracker | Sequence[str | Tracker] = (),
        on_death: str = RAISE,
        max_restores: Count = 3,
        shrink: bool = False,
        check: str | None = "light",
        look_back: Index = 2,
        progress: bool | None = None,
        wait: bool = True,
    ) -> Run:
        """Run ``steps`` steps of an algorithm: ``algorithm.step(session.models, next(prompts))``, with its metrics.

        The first interrupt pauses after the running step and returns the run so far (``run.paused``); the second cancels the
        running call and raises; a third detaches. A step that did not finish gives its prompts back.

        Args:
            algorithm: e.g. ``hf.PPO(clip=0.2)``.
            prompts: from :meth:`prompts`; for `DPO` pairs from :meth:`pairs`. Or data as these take them, e.g. a list of texts, in
                batches of 32; the same data given again goes on where it was.
            steps: steps to run now.
            metrics: own metrics, each a function of the step's batch that returns a number (named as the function) or a dict.
            stop: a function that is called with each step's row of metrics; true ends the run.
            save_every: save to ``folder`` after every so many steps; 0 is never.
            folder: where to save, a path or an address. A save there of another process that this one has not loaded is replaced; a
                notice says so first.
            keep: how many of these saves the folder holds, as in :meth:`save`.
            resume: a folder written by ``save``: everything goes on from there, the place in ``prompts`` included.
            keep_best: held-out prompts: of all the run goes through, its start included, the checkpoint whose responses to them
                score best is kept in ``folder/best`` (``run.best``). How often and how it is measured: :class:`hf.KeepBest
                <hfsdk.run.best.KeepBest>`.
            track: where every step is kept as well: ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, one with options, e.g.
                ``hf.TensorBoard("logs")``, or several; see :mod:`hfsdk.run.trackers`.
            on_death: what a worker that dies does to the run: ``"raise"`` ends it; ``"restore"`` goes on from the last save in
                ``folder``, with the same prompts, seeds and so numbers as without the death (``run.restores``). It needs
                ``save_every``, and saves the start too. What your functions keep between calls is not part of a save.
            max_restores: deaths that a run goes on after; one more ends it.
            shrink: with ``on_death="restore"``: whether the run may go on over fewer devices where a node has left the cluster.
                That is planned for every node before the run begins, and told; when it, or another node like it, is there again,
                the roles move back after the running step (``run.resized``). The samples are those of the undisturbed run, but for
                the rounding of sums over other ranks.
            check: what is checked in every step. ``"light"``: what must hold before anything is updated (ratio 1, nothing clipped,
                trainer and rollout apart by rounding alone); ``"full"``: besides, some rows of each generation are replayed
                through the trainer at once (``replay_gap_max``, in nats; a forward pass of 8 rows); ``None``: none of it. What
                does not hold is an `InvariantWarning`. That weights arrive as they left is proven whatever this says
                (``actor.last_reshard.verified``).
            look_back: how many snapshots of itself the run keeps, the newest, for ``run.first_bad()``; 0 takes none. Each is a
                copy of the trained roles in the workers' host memory; none is taken that a node has less than four times as much
                free for. The first is taken before the first step, others when 4 % of the steps' time pays for them. The next run
                lets them go.
            progress: whether to draw the dashboard (in a notebook) or a bar (in a terminal); by default in both.
            wait: whether to return when the steps are done. Otherwise they run in a thread, the run returns at once, and
                ``run.pause()``, ``run.step()``, ``run.resume()``, ``run.stop()`` and ``run.wait()`` steer it.

        Returns:
            The run; ``run.history`` has one row per step: the algorithm's metrics, your own, and what the step took: seconds,
            tokens_per_s (generated), busy_share (mean of the devices), memory_bytes (fullest device), cost; after some steps
            held_out_score (``keep_best``). What the numbers say is wrong, with what to do, is a warning and in ``run.warnings``; a
            number that jumps is too.

        Raises:
            OptionError: an option is out of its range, or a tracker's package is not installed.
            PlacementError: the session lacks roles that the algorithm uses; names all, before anything is loaded. With ``shrink``:
                without one of the nodes the roles fit nowhere.
            CheckpointError: ``resume`` is not a checkpoint of these roles, or the saves would not fit on the disk.
            CallError: a call failed; a `WorkerDiedError`, that a worker died once more than the run may go on after; a
                `NonFiniteLossError`, that a loss, gradient or KL is NaN or infinite: ``session.run.first_bad()`` finds out why.
        """
        config = TrainConfig(
            algorithm=algorithm, prompts=prompts, steps=steps, metrics=metrics, stop=stop, save_every=save_every, folder=folder,
            keep=keep, resume=resume, keep_best=keep_best, track=track, on_death=on_death, max_restores=max_restores, shrink=shrink,
            check=check, look_back=look_back, wait=wait,
        )  # fmt: skip
        return train(self._parts, config, progress=progress)

    @checked
    def compare(
        self,
        algorithms: Algorithms,
        prompts: Any,
        *,
        steps: Count,
        seeds: Sequence[int] = (0, 1, 2),
        snapshot: Snapshot | str | None = None,
        baseline: str | Path | None = None,
        save_baseline: bool = False,
        resume: bool = False,
        progress: bool | None = None,
    ) -> Experiment:
        """Run each algorithm with each seed from the same point, and go back to where the session was.

        Every run is a branch of :attr:`history`. Seeded means repeatable: the same call gives the same scores, bit for bit.

        An interrupt ends it after the running step (a second one at once) and returns the experiment with the runs that are
        finished: ``experiment.partial`` is true and ``experiment.unfinished`` lists the others. The run under way does not count.

        Args:
            algorithms: e.g. ``[hf.PPO(), hf.GRPO()]``, or by name ``{"no KL": hf.PPO(kl_coef=0.0)}``.
            prompts: from :meth:`prompts`, or data as :meth:`train` takes them; each run begins at the same place.
            steps: the steps of each run.
            seeds: the seeds of sampling and shuffling, in place of the session's.
            snapshot: the snapshot to start at; by default here.
            baseline: a JSON file with earlier final scores, by which these are judged (``experiment.ok``).
            save_baseline: write that file from these scores instead.
            resume: whether to keep the runs that the session's last ``compare`` finished from this point, of algorithms of equal
                options with equal ``steps``, and run the others only.
            progress: whether to draw a bar, with the time that is left; by default in a notebook and in a terminal.

        Returns:
            The experiment: one DataFrame, one picture, one verdict.

        Raises:
            OptionError: an option is out of its range; there is no baseline, or it is of other steps or options.
            PlacementError: the session lacks roles that an algorithm uses; names all of them, before anything is loaded.
            CallError: a call failed; the session is where it was, and ``resume=True`` keeps what was finished.
            KeyboardInterrupt: an interrupt, before any run was finished.
        """
        return compare(
            self._parts,
            algorithms,
            prompts,
            steps=steps,
            seeds=seeds,
            snapshot=snapshot,
            baseline=baseline,
            save_baseline=save_baseline,
            resume=resume,
            progress=progress,
        )

    @checked
    def evaluate(
        self,
        prompts: Any,
        *,
        reward: RewardModel | None = None,
        num_prompts: Count = 128,
        max_new_tokens: Count = 32,
        temperature: NonNegative = 1.0,
        seed: int | None = None,
        num_samples: Index = 3,
        n: Copies = 1,
        pass_at: Sequence[Copies] = (),
        pass_score: float = 0.5,
    ) -> pd.DataFrame:
        """Generate for the first ``num_prompts`` of a stream and score the responses; nothing is trained, nothing advances.

        Args:
            prompts: a stream from :meth:`prompts` (best of held-out data), or data as that takes them, in their order.
            reward: the reward model; by default the session's.
            num_prompts: the number of prompts, at most as many as there are.
            max_new_tokens: longest response, in tokens.
            temperature: the temperature of sampling.
            seed: the seed of sampling; by default the session's.
            num_samples: samples kept in ``frame.attrs["samples"]``.
            n: responses per prompt.
            pass_at: each k of which pass@k is to be told, the chance that one of k responses passes; at most ``n``.
            pass_score: the score from which on a response passes.

        Returns:
            One row: num_prompts, score_mean, score_std, score_stderr, response_tokens_mean, eos_rate, policy_version,
            ``pass_at_<k>`` (arXiv 2107.03374, eq. 1: the mean over the prompts that have k scored responses) and, where the
            session has a reference, kl_mean (per sequence, nats, k1). Scores are those of the samples that the reward scored;
            where it did not score some, ``not_scored`` is how many. ``score_stderr`` is over prompts: responses to one are no
            independent measurements.

        Raises:
            OptionError: ``prompts`` are pairs or demonstrations, or a k is more than ``n``.
            SimulatedValueError: the session is simulated and has no scores.
        """
        return evaluate(
            self._parts,
            prompts,
            reward=reward,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            num_samples=num_samples,
            n=n,
            pass_at=pass_at,
            pass_score=pass_score,
        )

    def record(
        self, row: Mapping[str, Any], algorithm: Any = None, calls: Collection[int] = (), metrics: Sequence[Any] = ()
    ) -> None:
        """Add a step's row to the history, with the version of every function that scored it.

        Args:
            row: the step's numbers.
            algorithm: the algorithm that ran it.
            calls: the calls that it made.
            metrics: the user's own metrics among the numbers.
        """
        self._parts.log.record(row, algorithm, calls, metrics)

    def watch(self) -> Run:
        """Return the last run of :meth:`train`; as the last line of a cell it is drawn, live while it goes on.

        Raises:
            OptionError: nothing was trained in this session yet.
        """
        return self._parts.runs.watch()

    @checked
    def export_step(self, step: Index, folder: str | Path) -> Path:
        """Write one step of the last run into a folder, with all that it read, for :func:`hf.replay <hfsdk.replay>` elsewhere.

        The state before the step (weights, optimizer, counters of seeds), the rows that it drew, the algorithm and the functions
        by value, versions, and what every call wrote and returned. The step is taken again from a snapshot of the run's own
        (``session.train(look_back=...)``) to be recorded; then the session is where it was. What your functions keep between calls
        is exported as it is now.

        Args:
            step: a step of the run; the one that failed, too.
            folder: where to write it; a folder that is new or empty. It holds your functions and the step's rows of data.

        Returns:
            The folder.

        Raises:
            OptionError: there is no run here to take a step of again, it has no such step or no snapshot from before it, a step is
                under way, or something of the algorithm cannot be copied.
            CheckpointError: the folder cannot be written, or has something in it.
            CallError: a call fails that did not in the run.
        """
        return export_step(self._parts, step, folder)

    @CompletableProperty
    def run(self) -> Run | None:
        """The last ``train``."""
        return self._parts.runs.run

    @property
    def history(self) -> History:
        """The training of this session (and before it, where it was loaded): steps and updates, branches, functions."""
        return self._parts.log.history()

    # -- going back

    @checked
    def snapshot(self, name: Annotated[str, Length(0, 200)] = "") -> Snapshot:
        """Remember this moment: weights, optimizers, schedules, counters and seed, the prompts' places, functions' versions.

        Waits for what was submitted so far, and copies each trained role's state into the host memory of its workers, a share each:
        data-parallel ranks keep one copy together. A notice tells where that is much of what a node has free. Gathered
        gradients that no ``step`` has taken are not part of it.

        Args:
            name: the name to rewind by; the name of an earlier snapshot goes over to this one.

        Raises:
            OptionError: nothing is trained in this session, or a step of a run is under way.
            CallError: a failure of these roles that nobody has seen yet.
            CheckpointError: a node has not enough host memory free; says how much it takes and how much there is.
        """
        return self._parts.snapshots.snapshot(name)

    @checked
    def rewind(self, snapshot: Snapshot | str) -> str:
        """Go back to a snapshot, bit for bit; what is trained from here on is a new branch. Returns the branch's name.

        Roles may live elsewhere or in another layout by now: weights and optimizer state are the same bits all the same, but
        what is computed with them agrees within float32 rounding only. What runs is finished first. Functions become those of
        the snapshot (with a notice). Batches stay readable; training on one that later weights wrote raises StaleBatchError.

        Args:
            snapshot: a snapshot of ``session.snapshot``, or its name.

        Raises:
            OptionError: there is no such snapshot; a role was released, replaced or added since; a step of a run is under way.
            CheckpointError: the snapshot was let go, or is gone with a worker that ended. In both cases nothing was changed.
        """
        return self._parts.snapshots.rewind(snapshot)

    @checked
    def fork(self, snapshot: Snapshot | str, name: Name) -> str:
        """Go back to a snapshot, as :meth:`rewind` does, onto a branch of this name.

        Raises:
            OptionError: there is a branch of this name; otherwise as in :meth:`rewind`.
        """
        return self._parts.snapshots.fork(snapshot, name)

    @checked
    def forget(self, snapshot: Snapshot | str) -> None:
        """Free a snapshot; states that others share stay.

        Raises:
            OptionError: there is no such snapshot.
        """
        self._parts.snapshots.forget(snapshot)

    @overload
    def save(self, folder: str | Path, *, keep: int = 1, wait: Literal[True] = True) -> Path | str: ...

    @overload
    def save(self, folder: str | Path, *, keep: int = 1, wait: Literal[False]) -> Saving: ...

    @checked
    def save(self, folder: str | Path, *, keep: Count = 1, wait: bool = True) -> Path | str | Saving:
        """Save everything: weights, optimizers, schedules, the prompts' places, counters, history.

        The folder holds the last complete save at every moment, also when this one is interrupted or its processes are killed.
        Only what earlier saves wrote there is removed; where that is a save of another process, which this one has not loaded, a
        notice says so. Threads that save take turns; a folder that another process is saving to
        is refused (a store has no locks: there the save that ends last counts).

        Args:
            folder: where; it may hold other files as well. Or an address in an object store, e.g. ``"s3://bucket/runs/1"``, which
                fsspec and the protocol's package reach from every node; see docs/clusters.md.
            keep: how many complete saves the folder holds when this one is complete, this one included; older ones are removed.
            wait: whether the save is complete on return. Otherwise the roles' pools are held only while they copy their state,
                the files are written in the background, and what is returned can be waited for. A later save, ``load``,
                ``place`` and ``close`` wait for it.

        Raises:
            OptionError: ``folder`` is no path, ``keep`` is below 1, ``wait`` is no bool, the store's package is missing, or a step
                of a run is under way.
            CheckpointError: the folder or store cannot be written, has too little space, is saved to by another process, or holds
                a ``session.json`` that hfsdk did not write; also where the save before it failed and nobody has looked.
        """
        return self._parts.saves.save(folder, keep=keep, wait=wait)

    @checked
    def load(self, folder: str | Path) -> None:
        """Load what :meth:`save` wrote into the same roles, in whatever layout they are here; waits.

        Weights and optimizer state are those that were saved, bit for bit: every file is compared with its checksum before
        anything of the session is replaced. Nothing in a checkpoint is run.

        Args:
            folder: a path or an address, for the last save in it; of those that ``save(folder, keep=3)`` kept,
                ``"folder/state-2"`` is an earlier one.

        Raises:
            OptionError: ``folder`` is no path, or a step of a run is under way.
            CheckpointError: no checkpoint, an incomplete or a damaged one (names the file, and earlier saves that are there), or
                one of other roles or models.
        """
        self._parts.saves.load(folder)

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        """The snapshots by name, the oldest first."""
        return self._parts.snapshots.by_name()

    @property
    def batches(self) -> BatchRegistry:
        """The batches of your variables, by name or call; in an attached session also those of the kernel before."""
        return self._parts.batches

    @property
    def branch(self) -> str:
        """The branch that is trained now."""
        return self._parts.log.branch

    # -- the end

    def detach(self) -> None:
        """Leave a kept session to itself: its runs go on, and ``hf.Session.attach(name)`` comes back. Safe to call twice.

        The end of the interpreter does the same.

        Raises:
            OptionError: the session is not kept, and would be gone.
        """
        if self._link is None:
            raise OptionError("this session ends with its kernel; hf.Session(..., name='exp7', keep=True) makes one that is kept")
        leave(self._parts, self._link)

    def close(self) -> None:
        """End every process and free all memory, after a save that is being written; a run of ``train`` stops. Safe to call twice.

        What was measured stays readable (``trace``, ``dataflow``, ``memory``, ``history``, ``placement``, ``report``), and of
        batches the columns that were brought here before (``batch.table()`` brings all): the last gigabyte of them, while the
        batch is kept.

        Also called at exit, where such a save is given up: its folder keeps the one before it.
        """
        parts = self._parts
        if not parts.client.closed:
            parts.runs.close()
            parts.pending_save.settle()
        parts.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
