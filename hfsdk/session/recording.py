"""Runs ``algorithm.step`` once to see its calls: no devices, no clock, no lanes. The planner lays out what was seen.

The handles are the real ones, over a sender that answers every message at once (the controller's narrow waist makes that possible):
a submitted call is noted with what it reads and the lengths of its rows, and counts as done. Values do not exist.
"""

from __future__ import annotations

import inspect
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from hfsdk.core.arguments import Generation, Learning
from hfsdk.core.batch import Batch
from hfsdk.core.call_events import Listener
from hfsdk.core.checks import check_options, is_whole, shown
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.columns import is_per_token, writes_per_token
from hfsdk.core.errors import ColumnError, OptionError, PlacementError, SimulatedValueError
from hfsdk.core.layout import Layout
from hfsdk.core.methods import METHODS, UPDATE, method_of
from hfsdk.core.microbatch import plan_update
from hfsdk.core.pending import ColumnInfo, ColumnRef
from hfsdk.core.placement import PRESETS
from hfsdk.core.plan import MOST_SAMPLES, Plan, Workload, check_workload, counted
from hfsdk.core.response_lengths import ResponseLengths, draw_lengths
from hfsdk.core.roles import RoleSpec
from hfsdk.core.rollout_sizes import context_tokens
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.table import Array, Ragged, Table
from hfsdk.core.text import nearest
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.process.startup import without_collector
from hfsdk.engine.simulation.values import SimulatedValue
from hfsdk.models import ModelHandle, RewardModel
from hfsdk.models.counters import Counters
from hfsdk.models.reward import RewardSum
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.planner.planning import plan_step
from hfsdk.planner.search.recorded import MOST_DRAWN, MOST_STEPS, Recorded, RecordedCall
from hfsdk.session.client import ControllerClient
from hfsdk.session.context import no_snapshots
from hfsdk.session.role_book import Models, RoleBook
from hfsdk.session.tokenizer import StandInTokenizer

ONE_PASS = 2**40
"""Tokens of a micro-batch that holds everything."""


def record_step(algorithm: Any, handles: Sequence[tuple[ModelHandle, RoleSpec]], workload: Workload, seed: int,
                numbers: Mapping[str, float]) -> Recorded:  # fmt: skip
    """Run one step of an algorithm on a workload and return its calls.

    Args:
        algorithm: an object with ``step(models, prompts)``.
        handles: the session's handles, and their roles as declared.
        workload: the amount of work in a step; it replaces the algorithm's options of the same names.
        seed: the session's.
        numbers: the session's counters and numbers, e.g. a cost's multiplier.

    Raises:
        OptionError: the algorithm has no option of a name that the workload sets, generates nothing, has more mini-batches than
            samples, or samples would be longer than a model's context.
        PlacementError: the session lacks a role that the step uses.
    """
    chosen = with_workload(algorithm, workload)
    _check_context([role for _, role in handles], workload)
    recorder = CallRecorder(workload)
    host = _Host(ControllerClient(recorder), seed, numbers)
    book = RoleBook(lambda text: None)
    for handle, role in handles:
        twin = book.take(type(handle), role, _maker(type(handle), host, role))[0]
        if isinstance(handle, RewardSum) and isinstance(twin, RewardSum):
            twin.parts = tuple(part for part in map(book.find, [p.name for p in handle.parts]) if isinstance(part, RewardModel))
            twin.weights = handle.weights
    offsets = np.arange(workload.prompts + 1, dtype=np.int64) * workload.prompt_tokens
    prompts = Ragged(np.broadcast_to(np.int32(0), (int(offsets[-1]),)), offsets)  # values do not exist: one token, seen often
    batch = Batch.from_columns(host.client, {"prompt": prompts, "position": np.arange(workload.prompts)})
    try:
        chosen.step(Models(book), batch)
    except (ColumnError, SimulatedValueError) as error:
        if not any(method_of(call.method).generates for call in recorder.calls):
            Recorded(algorithm=type(algorithm).__name__, calls=tuple(recorder.calls))
        raise OptionError(f"one step of {type(algorithm).__name__} could not be run without values: {error}") from error
    return Recorded(algorithm=type(algorithm).__name__, calls=tuple(recorder.calls))


def with_workload(algorithm: Any, workload: Workload) -> Any:
    """Return the algorithm with the workload's options.

    Raises:
        OptionError: it has no such option.
    """
    if isinstance(algorithm, type) or not callable(inspect.getattr_static(algorithm, "step", None)):
        raise OptionError(f"plan takes an algorithm with a method step, e.g. hf.PPO(); got {shown(algorithm)}")
    options = {name: getattr(workload, name) for name in ("n", "mini_batches", "epochs")}
    changed = {name: value for name, value in options.items() if value is not None}
    has = {f.name for f in fields(algorithm)} if is_dataclass(algorithm) else set()
    missing = [name for name in changed if name not in has]
    if missing:
        raise OptionError(
            f"the workload sets {missing[0]}={changed[missing[0]]}, and {type(algorithm).__name__} has no option of that name; "
            f"leave it out of the workload. It has {', '.join(sorted(has)) or 'none'}."
        )
    if "max_new_tokens" in has:
        changed["max_new_tokens"] = workload.response_tokens
    chosen = replace(algorithm, **changed) if changed else algorithm
    copies, parts = (getattr(chosen, name, 1) if name in has else 1 for name in ("n", "mini_batches"))
    samples = workload.prompts * (copies if is_whole(copies) else 1)
    if is_whole(parts) and parts > samples:
        prompts = counted(workload.prompts, "prompt") + (f" with {copies} responses each" if copies != 1 else "")
        raise OptionError(
            f"{type(algorithm).__name__}'s mini_batches is {parts}, and the workload has {prompts}; a mini-batch needs at least "
            f"one sample. Give hf.Workload(prompts={math.ceil(parts / copies)}) or more, or mini_batches={samples}."
        )
    if samples > MOST_SAMPLES:
        made = f"{counted(workload.prompts, 'prompt')} with n={copies} make {samples:,}"
        raise OptionError(f"a step has at most {MOST_SAMPLES:,} samples; {made}")
    return chosen


def _check_context(roles: Sequence[RoleSpec], workload: Workload) -> None:
    """Check that some actor generates samples as long as the workload's.

    Raises:
        OptionError: none does; says what was asked, what the roles and models have, and what to write.
    """
    needed = workload.prompt_tokens + workload.response_tokens
    actors = [role for role in roles if role.rollout is not None and role.model is not None]
    contexts = [context_tokens(role.model, role.rollout_options) for role in actors if role.model is not None]
    if not actors or needed <= max(contexts):
        return
    role, longest = max(zip(actors, contexts, strict=True), key=lambda pair: pair[1])
    assert role.model is not None
    positions, declared = role.model.max_positions, role.rollout_options.max_model_len
    half = longest // 2
    shorter = f"a shorter workload, e.g. hf.Workload(prompt_tokens={half}, response_tokens={longest - half})"
    do = f"give {shorter}"
    if needed <= positions:
        do = f"declare session.{role.kind}(..., rollout_options=hf.RolloutOptions(max_model_len={needed})), or {do}"
    raise OptionError(
        f"the workload's samples have {workload.prompt_tokens:,} prompt and {workload.response_tokens:,} response tokens, "
        f"{needed:,} in all; {role.name}'s max_model_len is {longest:,}{'' if declared else ' (the default)'}, and the context of "
        f"{role.model} itself is {positions:,}. To plan for it, {do}."
    )


class CallRecorder:
    """Answers every message at once and keeps the calls; a ``Sender`` for ``ControllerClient``."""

    def __init__(self, workload: Workload) -> None:
        self.calls: list[RecordedCall] = []
        self._workload = workload
        kind = workload.response_lengths
        self._draw = ResponseLengths(kind=kind) if isinstance(kind, str) else kind
        self._next_id = 0
        self._tables: dict[int, Table] = {}
        self._lengths: dict[int, dict[str, Array | None]] = {}
        """Every call's columns, by its id: the length of every row, ``None`` for one value per sample."""
        self._names: dict[int, str] = {}

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Ignore a listener: no event ever comes."""
        return lambda: None

    def send(self, message: m.Message | q.Query[Any]) -> Any:
        """Answer one message."""
        match message:
            case m.Submit():
                return self._submit(message)
            case m.Put():
                return self._put(message.table)
            case m.Wait():
                return True
            case m.Fetch(columns=columns):
                return self._fetch(columns)
            case q.Query():
                return self._answer(message)
            case m.BeginStep(least=least):
                return least
            case m.Release() | m.Forget() | m.Cancel() | m.Declare() | m.Close():
                return None
        raise SimulatedValueError(f"a step that is planned cannot answer {type(message).__name__}: nothing runs")

    def _answer(self, query: q.Query[Any]) -> Any:
        match query:
            case q.StateOf():
                return "done"
            case q.WriterOf(call_id=number):
                return self._names[number]
            case q.ResultOf(call_id=number):
                return SimulatedValue(self._names[number])
            case q.InfoOf(ref=ref):
                return self._info(ref)
            case q.CurrentStep() | q.UpcomingStep():
                return 0
            case q.Roles():
                return {}
        return []

    def _put(self, table: Table) -> int:
        self._next_id += 1
        self._tables[self._next_id] = table
        self._names[self._next_id] = "your data"
        self._lengths[self._next_id] = {n: c.lengths if isinstance(c, Ragged) else None for n, c in table.items()}
        return self._next_id

    def _info(self, ref: ColumnRef) -> ColumnInfo | None:
        if ref.call_id in self._tables:
            column = self._tables[ref.call_id][ref.name]
            kind = "ragged" if isinstance(column, Ragged) else "scalar"
            return ColumnInfo(kind, "int32", 0, self._lengths[ref.call_id][ref.name])
        lengths = self._lengths[ref.call_id].get(ref.name)
        return None if lengths is None else ColumnInfo("ragged", "float32", int(lengths.sum()) * 4, lengths)

    def _fetch(self, columns: Mapping[str, ColumnRef]) -> Table:
        for name, ref in columns.items():
            if ref.call_id not in self._tables:
                raise SimulatedValueError(f"the values of column {name!r} were asked, and a step that is planned has shapes only")
        values = {}
        for name, ref in columns.items():
            table = self._tables[ref.call_id]
            values[name] = (table if ref.rows is None else table.take(ref.rows))[ref.name]
        return Table(values)

    def _row_lengths(self, ref: ColumnRef) -> Array | None:
        lengths = self._lengths[ref.call_id].get(ref.name)
        return lengths if lengths is None or ref.rows is None else lengths[ref.rows]

    def _submit(self, request: m.Submit) -> int:
        self._next_id += 1
        lengths_of = {name: self._row_lengths(ref) for name, ref in request.inputs.items()}
        ragged = {name: lengths for name, lengths in lengths_of.items() if lengths is not None}
        nothing = np.zeros(request.num_rows, dtype=np.int64)
        prompts = ragged.get("prompt", nothing)
        drawn: list[Array] = []
        if request.kind.generates:
            responses, *drawn = self._generated(request)
        else:
            per_token = (lengths for name, lengths in ragged.items() if is_per_token(name))
            responses = ragged.get("response", next(per_token, nothing))
        sources = dict.fromkeys(ref.call_id for ref in request.inputs.values())
        self._names[self._next_id] = f"{request.role}.{request.method}"
        self._lengths[self._next_id] = {
            name: responses if writes_per_token(request.method, name) else None for name in request.writes
        }
        self.calls.append(RecordedCall(
            id=self._next_id, role=request.role, method=request.method, phase=request.phase,
            inputs=tuple(number for number in sources if number not in self._tables), num_rows=request.num_rows,
            protocol=request.protocol.name if request.protocol else "", prompts=prompts, responses=responses,
            num_read_tokens=int(sum(lengths.sum() for lengths in ragged.values())),
            drawn=tuple(drawn), mini_batches=_mini_batches(request, prompts, responses), on_host=request.protocol is None,
        ))  # fmt: skip
        return self._next_id

    def _generated(self, request: m.Submit) -> list[Array]:
        """Return the response lengths of this step and, where they vary, of the next ones: their prompts follow in the stream."""
        generation = request.arguments
        assert isinstance(generation, Generation)
        copies = generation.copies
        rows = np.arange(request.num_rows)
        ref = request.inputs.get("position")
        positions = rows // copies
        if ref is not None and ref.call_id in self._tables:
            all_positions = np.asarray(self._tables[ref.call_id][ref.name])
            positions = all_positions if ref.rows is None else all_positions[ref.rows]
        most = self._workload.response_tokens
        sampling = replace(generation.sampling, max_new_tokens=most, min_new_tokens=min(most, generation.sampling.min_new_tokens))
        steps = max(1, min(MOST_STEPS, MOST_DRAWN // max(1, len(rows))))
        lengths = [draw_lengths(self._draw, sampling, generation.seed, positions, rows % copies)]
        if len(rows) and (lengths[0] != lengths[0][0]).any():
            ahead = (positions + step * self._workload.prompts for step in range(1, steps))
            lengths += [draw_lengths(self._draw, sampling, generation.seed, later, rows % copies) for later in ahead]
        return lengths


def _mini_batches(request: m.Submit, prompts: Array, responses: Array) -> tuple[Array, ...]:
    learning = request.arguments
    if not isinstance(learning, Learning):
        return ()
    plan = plan_update(
        prompts + responses,
        responses,
        dp=1,
        epochs=learning.epochs,
        mini_batches=learning.mini_batches,
        max_tokens=ONE_PASS,
        seed=learning.seed,
        together=learning.together,
        shuffle=request.method == UPDATE.name,
    )
    return tuple(np.asarray(mini.rows, dtype=np.int64) for mini in plan)


def _maker(cls: type[ModelHandle], host: _Host, role: RoleSpec) -> Callable[[], ModelHandle]:
    return lambda: cls(host, role)


class _Host:
    """A session as handles need it, for one step; what it counts is counted for this step alone."""

    def __init__(self, client: ControllerClient, seed: int, numbers: Mapping[str, float]) -> None:
        self.client, self.seed, self.simulated = client, seed, True
        self.counters = Counters(numbers)
        client.use_tokenizer(StandInTokenizer(2))

    def ready(self, handle: ModelHandle) -> None:
        """Return at once: everything is there."""

    def release(self, handle: ModelHandle) -> None:
        """Ignore the release: nothing is held."""

    def notice(self, text: str) -> None:
        """Ignore a notice: nothing runs."""

    def find_snapshot(self, snapshot: Snapshot | str) -> Snapshot:
        """Refuse: there are no snapshots here."""
        return no_snapshots(snapshot)


# -- ``session.plan``: runs the algorithm's step once to see its calls, and searches for the best placement and layouts

OPTIONS = ("top", "by_placement", "shadows", "error")
"""Arguments of ``session.plan`` that the search takes."""

PLANNED = tuple(method.name for method in METHODS.values() if method.in_step)
"""Methods whose error may be named in any plan; those of the planned step may as well."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanQuestion:
    """A question to the planner; asked again with another workload or cluster, it needs no session."""

    algorithm: Any
    handles: Sequence[tuple[ModelHandle, RoleSpec]]
    """Handles and their roles as declared."""
    seed: int
    numbers: Mapping[str, float]
    cluster: ClusterSpec
    workload: Workload
    perf: PerfModel
    options: Mapping[str, Any]
    """Further arguments of ``plan_step``."""
    errors: Mapping[str, float] | None = None
    """Relative errors by method where ``options`` name none."""
    stretches: bool = False
    """Whether a context that was left open grows with the workload's lengths, up to the model's."""

    def recorded(self) -> Recorded:
        """Run one step and return its calls.

        Raises: as ``record_step``.
        """
        handles = [(handle, role) for (handle, _), role in zip(self.handles, self.roles(), strict=True)]
        return record_step(self.algorithm, handles, self.workload, self.seed, self.numbers)

    def roles(self) -> list[RoleSpec]:
        """Return the roles as they are planned."""
        return [_stretched(role, self.workload) if self.stretches else role for _, role in self.handles]

    def answer(self) -> Plan:
        """Return the plan.

        Raises: as ``record_step`` and ``plan_step``.
        """
        with without_collector():  # it would go through all of a notebook again and again
            return self._answer()

    def _answer(self) -> Plan:
        began = time.perf_counter()
        recorded = self.recorded()
        took = time.perf_counter() - began
        roles, error = self.roles(), self.options.get("error")
        if isinstance(error, Mapping):
            methods = dict.fromkeys([*(call.method for call in recorded.calls), *PLANNED])
            unknown = [name for name in error if name and name not in methods]
            if unknown:
                what = shown(unknown[0])
                raise OptionError(f"error names the method {what}; {nearest(str(unknown[0]), methods)}; '' is all others")
        options = {**self.options, "error": self.errors if error is None else error}
        plan = plan_step(recorded, roles, self.cluster, self.workload, self.perf, again=self.again, **options)
        notices = tuple(_grown(role) for role, (_, declared) in zip(roles, self.handles, strict=True) if role != declared)
        return replace(plan, search=replace(plan.search, record_s=took), notices=notices)

    def again(
        self, *, workload: Workload | None = None, cluster: ClusterSpec | str | None = None,
        layouts: Mapping[str, Layout] | None = None, **options: Any,
    ) -> Plan:  # fmt: skip
        """Return the plan for another workload or cluster; a context left open grows with the lengths, up to the model's.

        Args:
            workload: the amount of work in a step; by default this plan's.
            cluster: the devices; by default this plan's; a text has its price.
            layouts: those that are fixed, by role, or role and ``" rollout"``; those of other roles are as declared.
            options: ``top``, ``by_placement``, ``shadows``, ``error`` or ``placement``, as in ``session.plan`` and ``what_if``.

        Raises: as ``session.plan``.
        """
        checked = check_workload(self.workload if workload is None else workload)
        if not isinstance(cluster, str | ClusterSpec | None):
            raise OptionError(f"cluster is a text such as '16x8 H100' or an hf.ClusterSpec; got {shown(cluster)}")
        price = self.cluster.price_per_device_hour
        on = ClusterSpec.parse(cluster, price) if isinstance(cluster, str) else cluster or self.cluster
        _check_options(options, (*OPTIONS, "placement"))
        handles = [(handle, _with_layouts(role, layouts or {})) for handle, role in self.handles]
        options = {**self.options, **options}
        return replace(self, handles=handles, workload=checked, cluster=on, options=options, stretches=True).answer()

    def fixed(self, cluster: ClusterSpec, workload: Workload, placement: str, layouts: Mapping[str, Layout]) -> Plan:
        """Return the plan with some of it fixed.

        Args:
            cluster: the devices.
            workload: the amount of work in a step.
            placement: a preset's name, or ``"auto"``.
            layouts: those that are fixed, by role, or role and ``" rollout"``; those of other roles are as declared.

        Raises: as ``record_step`` and ``plan_step``.
        """
        return self.again(workload=workload, cluster=cluster, placement=placement, layouts=layouts)


def ask(
    algorithm: Any, workload: Workload, handles: Sequence[tuple[ModelHandle, RoleSpec]], cluster: ClusterSpec, *, seed: int,
    numbers: Mapping[str, float], perf: PerfModel, options: Mapping[str, Any], errors: Mapping[str, float] | None,
) -> PlanQuestion:  # fmt: skip
    """Return the question, checked.

    Raises:
        PlacementError: no role has a model.
        OptionError: the workload is none, or an option out of its range.
    """
    _check_options(options, OPTIONS)
    if not any(role.model is not None for _, role in handles):
        raise PlacementError("there is no model to plan for yet; declare some first, e.g. session.actor('tiny')")
    return PlanQuestion(
        algorithm=algorithm, handles=handles, seed=seed, numbers=numbers, cluster=cluster, workload=check_workload(workload),
        perf=perf, options=options, errors=errors,
    )  # fmt: skip


def priced(plan: Plan, price_per_device_hour: float) -> Plan:
    """Return the same plan where a device-hour has another price, its ``again`` included."""
    cluster, again = replace(plan.cluster, price_per_device_hour=price_per_device_hour), plan.again
    if again is None:
        return replace(plan, cluster=cluster)

    def asked(*, workload: Workload | None = None, cluster: ClusterSpec | str | None = None, **options: Any) -> Plan:
        on = ClusterSpec.parse(cluster, price_per_device_hour) if isinstance(cluster, str) else cluster
        return again(workload=workload, cluster=at if on is None else on, **options)

    at = cluster
    return replace(plan, cluster=cluster, again=asked)


def _check_options(options: Mapping[str, Any], names: Sequence[str]) -> None:
    """Check options of a plan.

    Raises:
        OptionError: there is none of that name, or its value is out of range.
    """
    for name, value in options.items():
        if name not in names:
            raise OptionError(f"a plan has no option {shown(name)}; {nearest(name, ('workload', 'cluster', *names))}")
        if name == "top" and (not is_whole(value) or value < 1):
            raise OptionError(f"top is how many plans to return, a whole number of at least 1; got {shown(value)}")
        if name in ("by_placement", "shadows"):
            check_options("plan", **{name: (value, bool)})
        if name == "placement" and value not in ("auto", *PRESETS):
            raise OptionError(f"no placement {shown(value)} to plan with; {nearest(str(value), ('auto', *PRESETS))}")
    error = options.get("error")
    wrong = [e for e in (error.values() if isinstance(error, Mapping) else [error]) if e is not None and not _is_share(e)]
    if wrong:
        raise OptionError(
            "error is a relative error of predicted seconds, from 0 to 1: a number, or by method, e.g. "
            f"{{'generate': 0.15, '': 0.1}}; got {shown(error)}"
        )


def _is_share(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) <= 1


def _stretched(role: RoleSpec, workload: Workload) -> RoleSpec:
    """Return the role with a context for samples as long as the workload's, where it was left open and the model has it."""
    options, needed = role.rollout_options, workload.prompt_tokens + workload.response_tokens
    if role.rollout is None or options.max_model_len or role.model is None or needed > role.model.max_positions:
        return role
    if needed <= context_tokens(role.model, options):
        return role
    return replace(role, rollout_options=replace(options, max_model_len=needed))


def _grown(role: RoleSpec) -> str:
    longest = role.rollout_options.max_model_len
    return (
        f"assumes that {role.name} has max_model_len={longest}; before session.place, declare session.{role.kind}(..., "
        f"rollout_options=hf.RolloutOptions(max_model_len={longest}))"
    )


def _with_layouts(role: RoleSpec, layouts: Mapping[str, Layout]) -> RoleSpec:
    for use, name in (("train", role.name), ("rollout", f"{role.name} rollout")):
        if name in layouts:
            chosen: dict[str, Any] = {use: layouts[name]}
            role = replace(role, **chosen, auto=tuple(a for a in role.auto if a != use))
    return role
