"""``Session``: the devices, the roles that live on them, and everything that is asked of them as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from hfsdk.core.checks import Index, Name, NonNegative, Title, check_options, checked
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import OptionError, SessionClosedError
from hfsdk.core.hints import SESSION, AttributeHints, CompletableProperty, PublicNames
from hfsdk.core.history import History
from hfsdk.core.runtime import Runtime
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.text import printable
from hfsdk.diagnose.step_export import export_step
from hfsdk.engine.calls import queries as q
from hfsdk.engine.process.interrupts import held
from hfsdk.kept.attach import DAY_S, KeptStart, attach_link, connect, leave, start_keeper
from hfsdk.kept.remote_controller import RemoteController
from hfsdk.models import ModelHandle
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.run.best import evaluate
from hfsdk.run.compare import compare
from hfsdk.run.notebook import show_calls
from hfsdk.run.run import CurrentRun, Run
from hfsdk.run.train import train
from hfsdk.session.client import ControllerClient
from hfsdk.session.context import Context
from hfsdk.session.data import Sources
from hfsdk.session.parts import Parts, delegate, itself
from hfsdk.session.placing import Deployment
from hfsdk.session.plans import Plans
from hfsdk.session.predictions import Predictions
from hfsdk.session.report import report
from hfsdk.session.role_book import Models
from hfsdk.session.roles import Declarations
from hfsdk.session.start import Seconds, Seed, Started, check_session, start, start_simulated, taken
from hfsdk.session.views import BatchRegistry, Dataflows, LivePlacement, MemoryUse, Traces
from hfsdk.state.history import HistoryLog
from hfsdk.state.saves import SaveFunction, Saves
from hfsdk.state.snapshots import Snapshots


class Session(AttributeHints, PublicNames):
    """Devices and the roles on them. ``with hf.Session(devices=2) as session: ...`` closes it at the end.

    Attributes:
        name: shown in pictures.
        seed: of sampling, shuffling and new heads, where a call gives none.
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
            price_per_device_hour: for what a run of :meth:`train` has cost so far, in any currency.
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
                    started = start(devices, options) if runtime is None else taken(runtime)
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
            address: of its Ray cluster, ``"auto"`` or ``"host:port"``; by default the sessions of this machine alone.
            token: of that server; by default ``HFSDK_TOKEN`` of the environment.
            read_only: only look: pictures, history, values of batches; whoever has the session keeps it.
            take_over: take it from a kernel that has it and lives.
            wait: as in :class:`Session`.

        Raises:
            OptionError: there is no such session, or another version of hfsdk keeps it.
            SessionInUseError: another kernel has it; says which.
            PlacementError: there is no such cluster, or this process uses another one.
            SessionClosedError: what answers does not know the token, or is another version's.
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
            price_per_device_hour: for costs, in any currency; by default the cluster's.
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
        kept = started if isinstance(started, KeptStart) else None
        client = ControllerClient(
            started.controller, wait_each=wait, simulated=started.kind == "simulated", shared=kept is not None
        )  # fmt: skip
        context = Context(title, cluster, started.kind, client, int(seed))
        client.pass_notices(context.notice)
        self._parts = Parts.of(context)
        if kept is not None and kept.link is not None:
            self._link = kept.link
            self._finalizer = weakref.finalize(context, kept.link.leave)
            connect(self._parts, kept)
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
        """Of sampling, shuffling and new heads, where a call gives none."""
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

    actor = delegate(lambda parts: parts.declarations, Declarations.actor)
    critic = delegate(lambda parts: parts.declarations, Declarations.critic)
    reference = delegate(lambda parts: parts.declarations, Declarations.reference)
    reward = delegate(lambda parts: parts.declarations, Declarations.reward)
    cost = delegate(lambda parts: parts.declarations, Declarations.cost)
    place = delegate(lambda parts: parts.deployment, Deployment.place)

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
        """Who lives where, with memory; drawn live while calls run."""
        return self._parts.deployment.live()

    @checked
    def logs(self, role: str, rank: Index = 0) -> str:
        """Return what the worker of ``rank`` of a role has printed; of a function what all have, which share a process."""
        self._parts.client.check_open()
        return self._parts.deployment.book.find(role).logs(rank)

    # -- data

    prompts = delegate(lambda parts: parts.sources, Sources.prompts)
    demonstrations = delegate(lambda parts: parts.sources, Sources.demonstrations)
    pairs = delegate(lambda parts: parts.sources, Sources.pairs)
    batch = delegate(lambda parts: parts.sources, Sources.batch)

    # -- planning

    plan = delegate(lambda parts: parts.plans, Plans.plan)
    what_if = delegate(lambda parts: parts.plans, Plans.what_if)
    predict = delegate(lambda parts: parts.predictions, Predictions.predict)
    measured = delegate(lambda parts: parts.predictions, Predictions.measured)
    calibrate = delegate(lambda parts: parts.predictions, Predictions.calibrate)

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

    report = delegate(itself, report)
    subscribe = delegate(itself, Parts.subscribe)

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
        """What every device holds through the current step, planned and measured. Drawn in a notebook."""
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

    train = delegate(itself, train)
    compare = delegate(itself, compare)
    evaluate = delegate(itself, evaluate)
    record = delegate(lambda parts: parts.log, HistoryLog.record)
    watch = delegate(lambda parts: parts.runs, CurrentRun.watch)
    export_step = delegate(itself, export_step)

    @CompletableProperty
    def run(self) -> Run | None:
        """The last ``train``."""
        return self._parts.runs.run

    @property
    def history(self) -> History:
        """What was trained in this session (and before it, where it was loaded): steps and updates, branches, functions."""
        return self._parts.log.history()

    # -- going back

    snapshot = delegate(lambda parts: parts.snapshots, Snapshots.snapshot)
    rewind = delegate(lambda parts: parts.snapshots, Snapshots.rewind)
    fork = delegate(lambda parts: parts.snapshots, Snapshots.fork)
    forget = delegate(lambda parts: parts.snapshots, Snapshots.forget)
    save: SaveFunction = delegate(lambda parts: parts.saves, Saves.save)  # type: ignore[arg-type, assignment]  # both overloads
    load = delegate(lambda parts: parts.saves, Saves.load)

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
