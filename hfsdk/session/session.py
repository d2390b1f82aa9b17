"""``Session``: the devices, the roles that live on them, and everything that is asked of them as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, overload

from hfsdk.core.batch import Batch
from hfsdk.core.checks import Count, Index, NonNegative, Title, Within, checked
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import OptionError
from hfsdk.core.experiment import Experiment
from hfsdk.core.files import as_path
from hfsdk.core.plan import Plan, Workload
from hfsdk.core.runtime import Runtime
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.text import printable
from hfsdk.engine.calls import queries as q
from hfsdk.engine.process.interrupts import held
from hfsdk.engine.weights.model_folders import eos_token_ids
from hfsdk.models import ActorModel, ModelHandle, RewardModel
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.session.branching import Branching
from hfsdk.session.checkpoint import Saving, load_session
from hfsdk.session.client import ControllerClient, Sender
from hfsdk.session.comparing import Algorithms, compare
from hfsdk.session.evaluation import evaluate
from hfsdk.session.examples import Demonstrations, ExampleOptions, Pairs
from hfsdk.session.flows import Dataflows
from hfsdk.session.memory_use import MemoryUse
from hfsdk.session.notebook import show_calls
from hfsdk.session.planning import Question, ask
from hfsdk.session.predicting import Predicting
from hfsdk.session.prompts import PromptOptions, PromptStream
from hfsdk.session.running import Run
from hfsdk.session.start import Seconds, check_runtime, check_session, start_runtime, start_simulated
from hfsdk.session.streams import RowStream
from hfsdk.session.tracking import Tracker
from hfsdk.session.training import Algorithm, train
from hfsdk.session.views import Traces, session_view
from hfsdk.session.what_if import WhatIf

if TYPE_CHECKING:
    import pandas as pd

E = TypeVar("E", Demonstrations, Pairs)

BatchSize = Annotated[int, Within(1, 1_000_000)]
Top = Annotated[int, Within(1, 1_000)]

UNLIMITED_TOKENS = 2**31
"""Context of a prompt stream made before there is an actor."""


class Session(Branching, Predicting):
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
            runtime: runs the calls; by default Ray.

        Raises:
            OptionError: ``devices`` is not one of these.
            PlacementError: there is no cluster at the address, or it has no devices. With ``deterministic``, the first ``place`` or
                call raises it where a GPU has no such kernels.
            ModelNotFoundError: Ray is not installed here; the message says which extra brings it.
        """
        from hfsdk.engine.controller.controller import Controller

        options = {
            "start_timeout_s": start_timeout_s, "collective_timeout_s": collective_timeout_s, "deterministic": deterministic
        }  # fmt: skip
        check_session(price_per_device_hour, wait, seed, name, **options)
        notices: list[str] = []
        try:
            with held():  # a Ctrl-C finds a session that can be closed, or none
                chosen, notices = start_runtime(devices, **options) if runtime is None else (check_runtime(runtime), notices)
                price = price_per_device_hour or chosen.cluster.price_per_device_hour
                cluster = replace(chosen.cluster, price_per_device_hour=price)
                self._setup(Controller(chosen), cluster, chosen.kind, wait=wait, seed=seed, name=name)
        except BaseException:
            with held():
                if "_finalizer" in vars(self):
                    self._finalizer()
            raise
        for text in notices:
            self.notice(text)

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
            response_lengths: distribution of response lengths (see ``SimulatedRuntime``); by default its own.
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
        session.perf = session.perf if perf is None else perf
        return session

    @classmethod
    def over(cls, controller: Sender, cluster: ClusterSpec, kind: str = "ray", *, wait: bool = False, seed: int = 0) -> Self:
        """Return a session over a controller that exists already (one in another process, or a stand-in in tests)."""
        check_session(cluster.price_per_device_hour, wait, seed, None)
        session = cls.__new__(cls)
        session._setup(controller, cluster, kind, wait=wait, seed=seed, name=None)
        return session

    def _setup(self, controller: Sender, cluster: ClusterSpec, kind: str, *, wait: bool, seed: int, name: str | None) -> None:
        self.name = name or ("simulated" if kind == "simulated" else "session")
        self.seed = int(seed)
        self.cluster = cluster
        self.messages: list[str] = []
        self.run: Run | None = None
        self.perf = PerfModel()
        self.errors: Mapping[str, float] | None = None
        self._begin(ControllerClient(controller, wait_each=wait), kind)
        self._begin_history()
        self._finalizer = weakref.finalize(self, self._client.close)  # also at the interpreter's exit
        show_calls(self.subscribe)

    # -- data

    @checked
    def prompts(
        self,
        source: Any,
        *,
        column: str = "text",
        batch_size: BatchSize,
        seed: int | None = None,
        max_prompt_tokens: Count | None = None,
        chat: bool = False,
        system: str | None = None,
        shuffle: bool = True,
    ) -> PromptStream:
        """Return prompts in batches: ``prompts[k]`` repeats, ``next(prompts)`` advances.

        Args:
            source: a ``datasets.Dataset``, a DataFrame, a dict of columns, or a list of texts, of token ids or of dicts.
            column: where the prompts are; the other columns are passed on to reward functions.
            batch_size: prompts per batch.
            seed: of the order; by default the session's.
            max_prompt_tokens: keep at most the last so many tokens of each prompt; ``None`` cuts nothing.
            chat: put each text into the model's chat template as the user's turn.
            system: the system message of that chat.
            shuffle: whether each pass over the data has an order of its own.

        Raises:
            ColumnError: there is no such column.
            OptionError: a prompt is empty or as long as the context (names its row), or an option is out of range.
        """
        self._client.check_open()
        options = PromptOptions(
            column=column, batch_size=batch_size, seed=self.seed if seed is None else seed, max_prompt_tokens=max_prompt_tokens,
            chat=chat, system=system, shuffle=shuffle,
        )  # fmt: skip
        actors = [h for h in self._book if isinstance(h, ActorModel)]
        context = actors[0].context_tokens if actors else UNLIMITED_TOKENS
        stream = PromptStream(self._client, self._client.tokenizer, source, options, context)
        self._tell_left_out(stream.left_out)
        self._add_stream(stream)
        return stream

    @checked
    def demonstrations(
        self, source: Any, *, batch_size: BatchSize, seed: int | None = None, max_tokens: Count | None = None, shuffle: bool = True
    ) -> Demonstrations:
        """Return texts to imitate in batches, for ``actor.update(next(demonstrations), hf.CrossEntropy())``.

        Args:
            source: as in :meth:`prompts`, with a column ``text``, or ``prompt`` and ``completion``; or a list of texts. The model's
                end-of-sequence token is put behind each.
            batch_size: examples per batch.
            seed: of the order; by default the session's.
            max_tokens: longest prompt plus response; what is longer loses its end. ``None`` cuts nothing.
            shuffle: whether each pass over the data has an order of its own.

        Raises:
            ColumnError: the data has neither.
            OptionError: an example is empty or too long (names its row), or an option is out of range.
        """
        return self._examples(Demonstrations, source, batch_size, seed, max_tokens, shuffle)

    @checked
    def pairs(
        self, source: Any, *, batch_size: BatchSize, seed: int | None = None, max_tokens: Count | None = None, shuffle: bool = True
    ) -> Pairs:
        """Return preference pairs in batches, for ``reward.update(next(pairs), hf.BradleyTerry())`` and `DPO`.

        Args:
            source: as in :meth:`prompts`, with columns ``prompt``, ``chosen`` and ``rejected`` (without ``prompt``: what both
                texts begin with), e.g. ``hf.data.review_pairs()``. ``margin`` and others are passed on, ``chosen_x`` and
                ``rejected_x`` as each row's ``x``.
            batch_size: pairs per batch; it has twice as many rows, the chosen one first.
            seed: of the order; by default the session's.
            max_tokens: as in :meth:`demonstrations`.
            shuffle: as in :meth:`demonstrations`.

        Raises:
            ColumnError: a column is missing.
            OptionError: a pair has two different prompts or is too long (names its row), or an option is out of range.
        """
        return self._examples(Pairs, source, batch_size, seed, max_tokens, shuffle)

    def _examples(self, cls: type[E], source: Any, batch_size: int, seed: int | None, max_tokens: int | None, shuffle: bool) -> E:
        self._client.check_open()
        options = ExampleOptions(
            batch_size=batch_size, seed=self.seed if seed is None else seed, max_tokens=max_tokens, shuffle=shuffle
        )
        models = [h for h in self._book.models if h.spec is not None]
        context = min((h.spec.max_positions for h in models if h.spec), default=UNLIMITED_TOKENS)
        eos = eos_token_ids(self.tokenizer_folder) if self.tokenizer_folder else ()
        stream = cls(self._client, self._client.tokenizer, eos, source, options, context)
        self._tell_left_out(stream.left_out)
        self._add_stream(stream)
        return stream

    def _tell_left_out(self, names: Sequence[str]) -> None:
        if names:
            told = ", ".join(names)
            self.notice(f"hfsdk writes columns named {told} itself; the data's are left out, rename them to pass them on")

    @checked
    def batch(self, **columns: Any) -> Batch:
        """Return own data as a batch: lists of sequences become variable-length columns, numbers one value per sample.

        Raises:
            ColumnError: the columns differ in length or are empty.
        """
        return Batch.from_columns(self._client, columns)

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

        Args:
            algorithm: e.g. ``hf.PPO()``.
            workload: prompts and lengths of one step; what it names replaces the algorithm's own options.
            top: how many plans to return, the best one included.
            by_placement: whether two of them may share devices in the same way and differ in pool sizes.
            shadows: whether shadows (separation) may be used.
            perf: predicts seconds; by default the session's own.
            error: relative error of predicted seconds, for the bands: a number from 0 to 1, or by method; by default what
                :meth:`calibrate` found, or 0.3.

        Returns:
            The plan; ``session.place(plan)`` applies it, ``plan.why()`` explains it.

        Raises:
            DeviceMemoryError: nothing fits; says by how many bytes, and the smallest cluster that would do.
            LayoutError: a declared layout covers no pool of this cluster.
            OptionError: the workload is none, the algorithm generates nothing or lacks an option that the workload names, an
                option is out of its range, or samples would be longer than the actor's ``max_model_len``.
            PlacementError: a role that the step uses is not declared.
        """
        return self._ask(
            algorithm, workload, perf, {"top": top, "by_placement": by_placement, "shadows": shadows, "error": error}
        ).answer()

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
            algorithm: as in :meth:`plan`.
            workload: where the sliders begin.
            top: as in :meth:`plan`.
            shadows: as in :meth:`plan`.
            perf: as in :meth:`plan`.
            error: as in :meth:`plan`.

        Raises: as :meth:`plan`.
        """
        question = self._ask(algorithm, workload, perf, {"top": top, "shadows": shadows, "error": error})
        models = [role for _, role in question.handles if role.model is not None]
        return WhatIf(
            question.fixed, self.cluster, workload, roles=[role.name for role in models],
            rollouts=[role.name for role in models if role.kind == "actor"],
            max_tokens=min(role.model.max_positions for role in models if role.model is not None),
            models={role.name: role.model for role in models if role.model is not None},
        )  # fmt: skip

    def _ask(self, algorithm: Algorithm, workload: Workload, perf: PerfModel | None, options: Mapping[str, Any]) -> Question:
        self._client.check_open()
        handles = [(handle, self._declared(handle)) for handle in self._book]
        return ask(
            algorithm, workload, handles, self.cluster, seed=self.seed, numbers=self.counts(),
            perf=self.perf if perf is None else perf, options=options, errors=self.errors,
        )  # fmt: skip

    # -- looking

    @property
    def trace(self) -> Traces:
        """The spans of the current step; ``trace[k]`` of step k. Drawn live while calls run."""
        return Traces(self._client)

    @property
    def dataflow(self) -> Dataflows:
        """The calls of the current step and the columns between them; ``dataflow[k]`` of step k. Drawn live while calls run."""
        self._client.check_open()
        return Dataflows(self._client, self.cluster)

    @property
    def memory(self) -> MemoryUse:
        """What every device holds through the current step, planned and measured. Drawn in a notebook."""
        trace = self.trace.snapshot()
        return MemoryUse(trace, self._specs.values(), self._placement, self.cluster, f"memory of {self.name}, {trace.title}")

    @property
    def status(self) -> str:
        """``"closed"``, ``"working"`` or ``"idle"``."""
        if self._client.closed:
            return "closed"
        return "working" if self._client.send(q.RunningCalls()) else "idle"

    @checked
    def logs(self, role: str, rank: Index = 0) -> str:
        """Return what the worker of ``rank`` of a role has printed."""
        self._client.check_open()
        return self._book.find(role).logs(rank)

    @checked
    def report(self, path: str | Path, *, batch: Batch | None = None) -> Path:
        """Write one offline HTML file with everything that can be looked at: placement, training, dataflow, timeline, memory, ...

        A file that is there is replaced when this one is complete, with a notice unless this process wrote it; a link there is
        replaced too, never followed.

        Args:
            path: the file to write, ``.html``; its folder must exist.
            batch: whose samples to show; by default the last one of :meth:`train`.

        Returns:
            The path.

        Raises:
            OptionError: the file's name does not end with .html, or its folder does not exist.
            OutputError: it cannot be written; what was there is unchanged.
        """
        target = as_path(path, "a report")
        if target.suffix != ".html" or not target.parent.is_dir():
            raise OptionError(f"a report is an .html file in a folder that exists; got {str(target)!r}")
        self._client.check_open()
        from hfsdk.session.report import session_report  # the pictures are loaded when one is asked for

        return session_report(self, target, batch)

    @checked
    def subscribe(self, listener: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        """Call ``listener(event)`` for every start, progress and end of a call; return a function that stops that.

        An event is ``{"type": "call_started" | "call_progress" | "call_done" | "call_failed" | "call_cancelled", "call_id",
        "call", "line", "done", "total", "unit", "seconds", "error"}``. Starts come on the calling thread, the rest on a thread of
        the listener's own: it may look at the session, wait, and make calls, of which it is not told. One that raises is dropped.

        Raises:
            OptionError: it is no function.
        """
        self._client.check_open()
        return self._client.listen(listener)

    def view(self) -> dict[str, Any]:
        """Return plain data for display; does not wait."""
        return session_view(self.name, self._kind, self.cluster, self._client, self._book, self.messages)

    def _repr_html_(self) -> str | None:
        from hfsdk.viz.hooks import session_card

        return session_card(self)

    def __repr__(self) -> str:
        state = "closed" if self._client.closed else "open"
        roles = ", ".join(h.name for h in self._book) or "none"
        return printable(f"Session({self.name}: {self.cluster}, {self._kind}, {state}; roles: {roles})")

    # -- training and checkpoints

    @checked
    def train(
        self,
        algorithm: Algorithm,
        prompts: RowStream,
        *,
        steps: Count,
        metrics: Sequence[Callable[[Batch], Mapping[str, float] | float]] = (),
        stop: Callable[[dict[str, Any]], bool] | None = None,
        save_every: Index = 0,
        folder: str | Path | None = None,
        keep: Count = 1,
        resume: str | Path | None = None,
        track: str | Tracker | Sequence[str | Tracker] = (),
        progress: bool | None = None,
        wait: bool = True,
    ) -> Run:
        """Run ``steps`` steps of an algorithm: ``algorithm.step(session.models, next(prompts))``, with its metrics.

        The first interrupt pauses after the running step and returns the run so far (``run.paused``); the second cancels the
        running call and raises; a third detaches. A step that did not finish gives its prompts back.

        Args:
            algorithm: e.g. ``hf.PPO(clip=0.2)``.
            prompts: from :meth:`prompts`; for `DPO` pairs from :meth:`pairs`.
            steps: steps to run now.
            metrics: own metrics, each a function of the step's batch that returns a number (named as the function) or a dict.
            stop: called with each step's row of metrics; true ends the run.
            save_every: save to ``folder`` after every so many steps; 0 is never.
            folder: where to save.
            keep: how many of these saves the folder holds, as in :meth:`save`.
            resume: a folder written by ``save``: everything goes on from there, the place in ``prompts`` included.
            track: where every step is kept as well: ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, one with options, e.g.
                ``hf.TensorBoard("logs")``, or several; see :mod:`hfsdk.session.tracking`.
            progress: whether to draw the dashboard (in a notebook) or a bar (in a terminal); by default in both.
            wait: whether to return when the steps are done. Otherwise they run in a thread, the run returns at once, and
                ``run.pause()``, ``run.step()``, ``run.resume()``, ``run.stop()`` and ``run.wait()`` steer it.

        Returns:
            The run; ``run.history`` has one row per step: the algorithm's metrics, your own, and what the step took: seconds,
            tokens_per_s (generated), busy_share (mean of the devices), memory_bytes (fullest device), cost.

        Raises:
            OptionError: an option is out of its range, or a tracker's package is not installed.
            CheckpointError: ``resume`` is not a checkpoint of these roles.
            CallError: a call failed.
        """
        return train(
            self, algorithm, prompts, steps=steps, metrics=metrics, stop=stop, save_every=save_every, folder=folder,
            keep=keep, resume=resume, track=track, progress=progress, wait=wait,
        )  # fmt: skip

    @checked
    def compare(
        self,
        algorithms: Algorithms,
        prompts: PromptStream,
        *,
        steps: Count,
        seeds: Sequence[int] = (0, 1, 2),
        snapshot: Snapshot | str | None = None,
        baseline: str | Path | None = None,
        save_baseline: bool = False,
        progress: bool | None = None,
    ) -> Experiment:
        """Run each algorithm with each seed from the same point, and go back to where the session was.

        Every run is a branch of :attr:`history`. Seeded means repeatable: the same call gives the same scores, bit for bit.

        Args:
            algorithms: e.g. ``[hf.PPO(), hf.GRPO()]``, or by name ``{"no KL": hf.PPO(kl_coef=0.0)}``.
            prompts: from :meth:`prompts`; each run begins at the same place.
            steps: of each run.
            seeds: of sampling and shuffling, in place of the session's.
            snapshot: where to start; by default here.
            baseline: a JSON file with earlier final scores, by which these are judged (``experiment.ok``).
            save_baseline: write that file from these scores instead.
            progress: whether to draw a bar; by default in a notebook and in a terminal.

        Returns:
            The experiment: one DataFrame, one picture, one verdict.

        Raises:
            OptionError: an option is out of its range; there is no baseline, or it is of other steps or options.
            CallError: a call failed; the session is where it was.
        """
        return compare(
            self, algorithms, prompts, steps=steps, seeds=seeds, snapshot=snapshot, baseline=baseline,
            save_baseline=save_baseline, progress=progress,
        )  # fmt: skip

    def watch(self) -> Run:
        """Return the last run of :meth:`train`; as the last line of a cell it is drawn, live while it goes on.

        Raises:
            OptionError: nothing was trained in this session yet.
        """
        if self.run is None:
            raise OptionError("there is no run to watch; session.train(hf.PPO(), prompts, steps=50, wait=False) starts one")
        return self.run

    @checked
    def evaluate(
        self,
        prompts: PromptStream | Sequence[str],
        *,
        reward: RewardModel | None = None,
        num_prompts: Count = 128,
        max_new_tokens: Count = 32,
        temperature: NonNegative = 1.0,
        seed: int | None = None,
        num_samples: Index = 3,
    ) -> pd.DataFrame:
        """Generate for the first ``num_prompts`` of a stream and score the responses; nothing is trained, nothing advances.

        Args:
            prompts: a stream from :meth:`prompts` (best of held-out data), or texts.
            reward: by default the session's.
            num_prompts: at most as many as there are.
            max_new_tokens: longest response, in tokens.
            temperature: of sampling.
            seed: of sampling; by default the session's.
            num_samples: samples kept in ``frame.attrs["samples"]``.

        Returns:
            One row: num_prompts, score_mean, score_std, score_stderr, response_tokens_mean, eos_rate, policy_version and,
            where the session has a reference, kl_mean (per sequence, nats, k1).

        Raises:
            SimulatedValueError: the session is simulated and has no scores.
        """
        return evaluate(
            self, prompts, reward=reward, num_prompts=num_prompts, max_new_tokens=max_new_tokens, temperature=temperature,
            seed=seed, num_samples=num_samples,
        )  # fmt: skip

    @overload
    def save(self, folder: str | Path, *, keep: int = 1, wait: Literal[True] = True) -> Path: ...

    @overload
    def save(self, folder: str | Path, *, keep: int = 1, wait: Literal[False]) -> Saving: ...

    @checked
    def save(self, folder: str | Path, *, keep: Count = 1, wait: bool = True) -> Path | Saving:
        """Save everything: weights, optimizers, schedules, the prompts' places, counters, history.

        The folder holds the last complete save at every moment, also when this one is interrupted or its processes are killed.
        Only what earlier saves wrote there is removed. Threads that save take turns; a folder that another process is saving to
        is refused.

        Args:
            folder: where; it may hold other files as well.
            keep: how many complete saves the folder holds when this one is complete, this one included; older ones are removed.
            wait: whether the save is complete on return. Otherwise the roles' pools are held only while they copy their state,
                the files are written in the background, and what is returned can be waited for. A later save, ``load``,
                ``place`` and ``close`` wait for it.

        Raises:
            OptionError: ``folder`` is no path, ``keep`` is below 1, ``wait`` is no bool, or a step of a run is under way.
            CheckpointError: the folder cannot be written, has too little space, is saved to by another process, or holds a
                ``session.json`` that hfsdk did not write; also where the save before it failed and nobody has looked.
        """
        self._client.check_open()
        self._check_between_steps("save")
        if self._saving is not None and not self._saving.looked:
            self._saving.wait()
        self._saving = None
        saving = Saving(self, folder, keep)
        if wait:
            saving.run()
            return saving.folder
        saving.run_in_background()
        self._saving = saving
        return saving

    @checked
    def load(self, folder: str | Path) -> None:
        """Load what :meth:`save` wrote into the same roles, in whatever layout they are here; waits.

        Weights and optimizer state are those that were saved, bit for bit: every file is compared with its checksum before
        anything of the session is replaced. Nothing in a checkpoint is run.

        Args:
            folder: for the last save in it; of those that ``save(folder, keep=3)`` kept, ``"folder/state-2"`` is an earlier one.

        Raises:
            OptionError: ``folder`` is no path, or a step of a run is under way.
            CheckpointError: no checkpoint, an incomplete or a damaged one (names the file, and earlier saves that are there), or
                one of other roles or models.
        """
        self._check_between_steps("load")
        self._settle_save()
        load_session(self, folder)

    def _check_between_steps(self, what: str) -> None:
        if self.run is not None and not self.run.between_steps:
            raise OptionError(
                f"{what}() would take a step of {self.run!r} half done; run.pause() and run.wait() first, or train with save_every"
            )

    @property
    def roles(self) -> tuple[ModelHandle, ...]:
        """All handles, in the order of declaration."""
        return tuple(self._book)

    def persistent(self) -> dict[str, Any]:
        """Return what a checkpoint keeps besides weights."""
        return {
            "seed": self.seed, "counters": self.counts(), "positions": self._stream_positions(), **self._history_to_save(),
        }  # fmt: skip

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what a checkpoint kept besides weights."""
        self.seed, self._counters = int(saved["seed"]), dict(saved["counters"])
        self._take_history(saved)
        self._positions = dict(saved["positions"])
        for key, stream in self._streams.items():
            stream.position = self._positions.pop(key, stream.position)

    # -- the end

    def close(self) -> None:
        """End every process and free all memory, after a save that is being written; a run of ``train`` stops. Safe to call twice.

        Also called at exit, where such a save is given up: its folder keeps the one before it.
        """
        if not self._client.closed:
            if self.run is not None:
                self.run.close()
            self._settle_save()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
