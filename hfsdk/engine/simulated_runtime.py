"""``SimulatedRuntime``: the same calls on a virtual clock. Lengths and times exist, values do not.

Every pool has a clock, CPU tasks have one, and every stored object knows when it was ready; a call starts at the later of the two::

    pool "actor"     | generate ............ | log_probs .. |                       | update ..
    pool "critic"    .                       | values ... |                         | update ....
    CPU tasks        .                       | reward |   .         | advantages |
                     ^ prompts ready at 0    ^ inputs ready         ^ when the last of its columns is there

No process is started, no weight is made, no function of the user's is called. What a call would take is asked of a
:class:`Costs` (``hfsdk.planner.perf_model.PerfModel`` is one). Ranks that share rows share the answer; within an update every
optimizer step waits for the slowest rank, as the gradient reduction makes it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from hfsdk.boxes import megatron_boxes
from hfsdk.dataflow import Call
from hfsdk.engine.dispatch import mesh_of
from hfsdk.engine.microbatch import MiniBatchPlan
from hfsdk.engine.shadow_plan import exported, received_by_link
from hfsdk.errors import CallError, CheckpointError, ColumnError, OptionError, SimulatedValueError
from hfsdk.pending import ColumnInfo
from hfsdk.placement import Pool
from hfsdk.resharding import LINKS
from hfsdk.roles import RoleSpec, Sampling
from hfsdk.runtime import DeviceStatus, Kept, Order, Outcome, Part, Pick, Progress, RoleState, Stored, Work
from hfsdk.spec import DTYPE_BYTES, ClusterSpec
from hfsdk.table import Array, Column, Ragged, Table, concat, take
from hfsdk.trace import Span

Rows = tuple[Array, Array]
"""Prompt lengths and response lengths of some rows."""
Phases = Mapping[str, float]
"""Span name -> seconds, in order."""
Attributes = Mapping[str, Mapping[str, int]]
"""Span name -> its attributes."""


class Costs(Protocol):
    """Who predicts seconds. Every answer must be a pure function of its arguments."""

    @property
    def dispatch_s(self) -> float:
        """Seconds between a call's start and its work on the devices."""
        ...

    def method_costs(
        self, method: str, role: RoleSpec, cluster: ClusterSpec, devices: Sequence[int], rows: Sequence[Rows], stale: bool = False
    ) -> Sequence[Phases]:
        """Return, for each (prompt lengths, response lengths) of ranks that share rows, seconds by span name, in order."""
        ...

    def host_task(self, num_rows: int, num_tokens: int) -> float:
        """Return the seconds of a CPU task."""
        ...


LENGTH_KINDS = ("full", "uniform", "lognormal")


@dataclass(frozen=True, kw_only=True)
class ResponseLengths:
    """How long simulated responses are: a stated distribution, drawn by a stable hash of (seed, position, copy).

    The layout and the ranks play no part, so a sample has the same length everywhere.
    """

    kind: str = "full"
    """``"full"``: every response has ``max_new_tokens``; ``"uniform"``: from the least to the most allowed;
    ``"lognormal"``: a long tail, cut at the most allowed."""
    median: float = 0.4
    """Median of ``"lognormal"``, as a share of ``max_new_tokens``."""
    sigma: float = 0.6
    """Standard deviation of the logarithm of ``"lognormal"``."""

    def __post_init__(self) -> None:
        if self.kind not in LENGTH_KINDS or not 0 < self.median <= 1 or self.sigma < 0:
            raise OptionError(
                f"response lengths are one of {', '.join(LENGTH_KINDS)} with a median in (0, 1] and a sigma of at least 0; "
                f"got kind={self.kind!r}, median={self.median}, sigma={self.sigma}"
            )

    def draw(self, sampling: Sampling, seed: int, positions: Array, copies: Array) -> Array:
        """Return the response length of every sample, [rows]."""
        most, least = sampling.max_new_tokens, max(1, sampling.min_new_tokens)
        if self.kind == "full" or sampling.ignore_eos:
            return np.full(len(positions), most, dtype=np.int64)
        u, v = (_unit_hash(seed, positions, copies, salt) for salt in (1, 2))
        if self.kind == "uniform":
            uniform: Array = least + np.floor(u * (most - least + 1)).astype(np.int64)
            return uniform
        normal = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)  # Box and Muller, 1958
        lengths: Array = np.rint(self.median * most * np.exp(self.sigma * normal))
        return lengths.clip(least, most).astype(np.int64)


def _unit_hash(seed: int, positions: Array, copies: Array, salt: int) -> Array:
    """Return one number in (0, 1) per row: splitmix64 (Steele et al., 2014) over seed, position, copy and salt."""
    state = np.full(len(positions), seed % 2**64, dtype=np.uint64)
    for word in (positions, copies, np.full(len(positions), salt)):
        state = (state ^ word.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


@dataclass(frozen=True, eq=False)
class SimulatedPart:
    """The handle of one stored object: when it was ready, and the shape of its columns."""

    writer: str
    ready_s: float
    """Virtual seconds."""
    lengths: Mapping[str, Array | None]
    """Column -> length of every row here, ``None`` for columns with one value per sample."""
    table: Table | None = None
    """The user's own data; ``None`` for what was simulated."""


class SimulatedRow(dict[str, Any]):
    """What a simulated call reports. Looking for a number that needs values raises ``SimulatedValueError``."""

    def __missing__(self, name: str) -> NoReturn:
        raise SimulatedValueError(
            f"{name!r} was asked of a simulated run, which has shapes and times only: {', '.join(self) or 'nothing'}. "
            "Run the same cells on a real session to see it."
        )


class SimulatedValue(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands for a number that no simulated run has: printing it is fine, using it raises ``SimulatedValueError``."""

    __hash__ = object.__hash__

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<no value: {self.name} was simulated>"

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise SimulatedValueError(
            f"the value of {self.name} was asked, but the run is simulated and has shapes and times only. "
            "Run the same cells on a real session to see it."
        )

    __float__ = __int__ = __index__ = __bool__ = __len__ = __iter__ = __getitem__ = __array__ = __array_ufunc__ = _refuse


TOKEN_ENDINGS = (
    "response", "log_probs", "entropy", "values", "rewards", "advantages", "returns", "kl", "mask", "ratio", "token_costs",
    "token_scores",
)  # fmt: skip
"""A column written by a function of the user's is taken to have one value per response token if its name ends so."""

GENERATE = ("generate", "chat")
"""Methods of the generating engine."""

GENERATED = {
    "response": "int32", "rollout_log_probs": "float32", "finish_reason": "<U6", "policy_version": "int64",
    "temperature": "float32", "group": "int64",
}  # fmt: skip
"""Columns that ``generate`` writes -> dtype."""


@dataclass(eq=False)
class _Role:
    spec: RoleSpec
    pool: Pool
    num_updates: int = 0
    synced: int = -1
    """The number of updates that the rollout's weights have seen; -1 before the first transition."""


@dataclass(frozen=True, eq=False)
class _Group:
    """Ranks that got the same rows, and the lengths of those rows."""

    ranks: tuple[int, ...]
    order: Order
    prompts: Array
    responses: Array


@dataclass(eq=False)
class _Timeline:
    """The spans of one call, laid down at virtual times."""

    call: Call
    pool: Pool
    now_s: float
    """Where the next stage starts."""
    spans: list[Span] = field(default_factory=list)

    def lay(self, ranks: Sequence[Iterable[int]], costs: Sequence[Phases], attrs: Sequence[Attributes]) -> None:
        """Run each group's phases one after the other; the next stage starts when the slowest group is through."""
        end = self.now_s
        for group, phases, numbers in zip(ranks, costs, attrs, strict=True):
            at = self.now_s
            for name, seconds in phases.items():
                if seconds:
                    self.spans += self._spans(name, group, at, seconds, numbers.get(name, {}))
                at += seconds
            end = max(end, at)
        self.now_s = end

    def _spans(self, name: str, ranks: Iterable[int], at: float, seconds: float, attrs: Mapping[str, int]) -> list[Span]:
        """Return the same span on every rank.

        Thousands of spans a step are most of what a simulation costs, and giving a frozen dataclass its fields at once takes a
        sixth of the time in which its ``__init__`` sets them one by one.
        """
        call, devices, copies = self.call, self.pool.devices, []
        pattern = vars(Span(
            name=name, role=call.role, call_id=call.id, method=call.method, step=call.step, pool=self.pool.name,
            start_ns=round(at * 1e9), duration_s=seconds, phase=call.phase, predicted=True, attrs=attrs,
        ))  # fmt: skip
        for rank in ranks:
            span = object.__new__(Span)
            object.__setattr__(span, "__dict__", pattern | {"device": devices[rank], "rank": rank})
            copies.append(span)
        return copies


class SimulatedRuntime:
    """Implements :class:`hfsdk.runtime.Runtime`; see the module's text.

    Args:
        cluster: the devices to pretend.
        costs: who predicts seconds.
        response_lengths: ``"full"``, ``"uniform"``, ``"lognormal"`` or a :class:`ResponseLengths`.
        memory: ``memory(role, pool_size)`` predicts a role's bytes on each device, for :meth:`devices`.
    """

    kind = "simulated"

    def __init__(
        self,
        cluster: ClusterSpec,
        costs: Costs,
        response_lengths: str | ResponseLengths = "full",
        memory: Callable[[RoleSpec, int], int] | None = None,
    ) -> None:
        self.cluster = cluster
        self.response_lengths = (
            ResponseLengths(kind=response_lengths) if isinstance(response_lengths, str) else response_lengths
        )
        self._costs = costs
        self._memory = memory
        self._lock = threading.Lock()
        self._clocks: dict[str, float] = {}
        self._tasks_s = 0.0
        self._closed_s = 0.0
        self._roles: dict[str, _Role] = {}
        self._kept: dict[int, int] = {}

    # -- pools and roles

    def open_pool(self, pool: Pool) -> None:
        """Start the pool's clock where the last closed pool ended."""
        with self._lock:
            self._clocks[pool.name] = self._closed_s

    def close_pool(self, name: str, *, kill: bool = False) -> None:
        """Forget the pool and the roles that live in it."""
        with self._lock:
            self._closed_s = max(self._closed_s, self._clocks.pop(name, 0.0))
            self._roles = {r: state for r, state in self._roles.items() if state.pool.name != name}

    def load(self, role: RoleSpec, pool: Pool, state: RoleState | None = None) -> None:
        """Record the role; loading takes no virtual time."""
        num_updates = _read_checkpoint(role.restore) if role.restore else 0
        if state is not None:
            num_updates = state.handles[0]
        with self._lock:
            self._roles[role.name] = _Role(role, pool, num_updates)

    def export(self, role: str, pool: Pool) -> RoleState:
        """Return what the role has learned: its number of optimizer steps."""
        with self._lock:
            return RoleState((self._roles[role].num_updates,))

    def keep(self, role: str, pool: Pool, number: int) -> Kept:
        """Note what the role has learned; the bytes are those that its ranks would keep."""
        with self._lock:
            state = self._roles[role]
            self._kept[number] = state.num_updates
            sizes = tuple(_kept_bytes(state.spec, rank, state.num_updates > 0) for rank in range(pool.size))
            return Kept(number, role, str(state.spec.train), pool.devices, sizes, state.num_updates)

    def holds(self, kept: Kept) -> bool:
        """Return whether it was not forgotten."""
        return kept.number in self._kept

    def restore(self, role: RoleSpec, pool: Pool, kept: Kept) -> None:
        """Give the role its number of updates back; takes no virtual time."""
        with self._lock:
            state = self._roles[role.name]
            state.num_updates, state.synced = self._kept[kept.number], -1

    def forget(self, kept: Kept) -> None:
        """Forget it."""
        self._kept.pop(kept.number, None)

    def release(self, role: str, pool: Pool) -> None:
        """Forget the role."""
        with self._lock:
            self._roles.pop(role, None)

    # -- calls

    def call(self, work: Work) -> Outcome:
        """Advance the pool's clock by what the call takes.

        Raises:
            CallError: the role is not loaded.
        """
        call, pool = work.call, work.pool
        if pool is None or call.role not in self._roles:
            raise CallError("the role is not loaded on a pool; call session.place(...) first", role=call.role, method=call.method)
        with self._lock:
            state = self._roles[call.role]
            groups = self._groups(work.orders, call)
            started = max(self._clocks.get(pool.name, 0.0), _ready_s(g.order for g in groups))
            if work.weights is not None:
                started = max(started, *(bundle.content for bundle in work.weights.bundles))
            line = _Timeline(call, pool, started + self._costs.dispatch_s)
            if work.weights is not None:
                self._lay_sync(line, work.weights.role, state.spec)
            if call.method in ("update", "forward_backward"):
                results = self._train(state, line, work.orders, groups)
            else:
                results = self._run(state, line, work.orders, groups)
            self._clocks[pool.name] = line.now_s
        responses = {rank: g.responses for g in groups for rank in g.ranks}
        kept = [(rank, order, responses[rank]) for rank, order in enumerate(work.orders) if order.keep]
        stored = _store(call, kept, line.now_s)
        tokens = sum(int(g.prompts.sum() + g.responses.sum()) for g in groups)
        return Outcome(stored, results, (_call_span(call, pool.name, started, line.now_s, tokens), *line.spans))

    def task(self, work: Work) -> Outcome:
        """Advance the clock of CPU tasks; the function is not called."""
        call, order = work.call, work.orders[0]
        lengths = _lengths(order)
        with self._lock:
            started = max(self._tasks_s, _ready_s([order]))
            tokens = int(sum(found.sum() for found in lengths.values()))
            ended = started + self._costs.host_task(len(order.rows), tokens)
            self._tasks_s = ended
        stored = _store(call, [(None, order, _responses(lengths))], ended)
        value = None if call.writes else SimulatedValue(call.function or str(call))
        return Outcome(stored, (value,), (_call_span(call, "", started, ended, tokens),))

    def _groups(self, orders: Sequence[Order], call: Call) -> list[_Group]:
        """Bring together the ranks that got the same rows."""
        ranks: dict[bytes, list[int]] = {}
        for rank, order in enumerate(orders):
            ranks.setdefault(order.rows.tobytes(), []).append(rank)
        groups = []
        for members in ranks.values():
            order = orders[members[0]]
            lengths = _lengths(order)
            prompts = lengths.get("prompt", np.zeros(len(order.rows), dtype=np.int64))
            responses = self._draw(order) if call.method in GENERATE else _responses(lengths)
            responses = np.zeros(len(order.rows), dtype=np.int64) if responses is None else responses
            groups.append(_Group(tuple(members), order, prompts, responses))
        return groups

    def _draw(self, order: Order) -> Array:
        options = order.options
        copies = int(options.get("n", 1))
        positions = _values(order, "position")
        if positions is None:
            positions = order.rows // copies
        return self.response_lengths.draw(options["sampling"], int(options.get("seed", 0)), positions, order.rows % copies)

    def _lay_sync(self, line: _Timeline, trained: RoleSpec, shadow: RoleSpec) -> None:
        """Lay down a shadow's taking over of weights: what the plan says that each rank gets, over the links it comes by."""
        links = dict(zip(LINKS[1:], (self.cluster.intra_node, self.cluster.inter_node), strict=True))
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank, received in enumerate(received_by_link(trained, shadow)):
            alike.setdefault(tuple(received[name] for name in links), []).append(rank)
        costs = [
            sum(link.latency_s + count / link.bandwidth for link, count in zip(links.values(), counts, strict=True) if count)
            for counts in alike
        ]
        attrs = [{"sync": {"bytes": sum(counts)}} for counts in alike]
        line.lay(list(alike.values()), [{"sync": seconds} for seconds in costs], attrs)

    def _run(self, state: _Role, line: _Timeline, orders: Sequence[Order], groups: list[_Group]) -> tuple[Any, ...]:
        """Lay down a call that every group does once."""
        method = line.call.method
        stale = method in GENERATE and state.synced != state.num_updates and not state.spec.shadow_of
        rows = [(g.prompts, g.responses) for g in groups]
        costs = self._costs.method_costs(method, state.spec, self.cluster, line.pool.devices, rows, stale)
        line.lay([g.ranks for g in groups], costs, [_numbers(g.prompts, g.responses) for g in groups])
        if stale:
            state.synced = state.num_updates
        if method == "export_weights":
            return exported(state.spec, orders[0].options["shadow"], line.now_s)
        result = self._result(state, line.call, orders[0].options, sum(costs[0].values()))
        return (result,) * len(orders)

    def _result(self, state: _Role, call: Call, options: Mapping[str, Any], seconds: float) -> Any:
        """Return what each rank reports, and count updates and checkpoints."""
        if call.method == "step":
            state.num_updates += 1
            return SimulatedRow(seconds=seconds)
        if call.method == "save_state":
            _write_checkpoint(options["folder"], state.num_updates)
            return SimulatedRow(num_updates=state.num_updates)
        if call.method == "load_state":
            state.num_updates, state.synced = _read_checkpoint(options["folder"]), -1
            return SimulatedRow(num_updates=state.num_updates)
        if call.method in ("run", "call", "chat", "grad_norm", "compute_loss", "last_reshard", "census"):
            return SimulatedValue(str(call))
        return None

    def _train(self, state: _Role, line: _Timeline, orders: Sequence[Order], groups: list[_Group]) -> tuple[Any, ...]:
        """Lay down forward and backward of every mini-batch, and after each the optimizer step (not in halves)."""
        role, devices = state.spec, line.pool.devices
        plan: tuple[MiniBatchPlan, ...] = orders[0].options["plan"]
        mesh = mesh_of(role)
        shards: list[list[int]] = [[] for _ in range(mesh.layout.num_replicas)]
        for rank in mesh.ranks:
            shards[mesh.coordinates(rank).dp].append(rank)
        prompts, responses = (np.zeros(line.call.num_rows, dtype=np.int64) for _ in range(2))
        for group in groups:
            prompts[group.order.rows], responses[group.order.rows] = group.prompts, group.responses
        picked = [[np.array(mini.passes.rows_of(dp), dtype=np.int64) for dp in range(len(shards))] for mini in plan]
        rows = [[(prompts[r], responses[r]) for r in by_dp] for by_dp in picked]
        ask = self._costs.method_costs
        passes = ask("forward_backward", role, self.cluster, devices, [pair for by_dp in rows for pair in by_dp])
        steps = ask("step", role, self.cluster, devices, [rows[0][0]]) if line.call.method == "update" else ()
        results = []
        for number, mini in enumerate(plan):
            began = line.now_s
            costs = passes[number * len(shards) : (number + 1) * len(shards)]
            line.lay(shards, costs, [_numbers(p, r, mini_batch=number) for p, r in rows[number]])
            line.lay([mesh.ranks] * len(steps), steps, [{}] * len(steps))
            results.append(SimulatedRow(
                epoch=mini.epoch, mini_batch=mini.index, num_tokens=mini.num_tokens, num_samples=mini.num_rows,
                seconds=line.now_s - began,
            ))  # fmt: skip
        if steps:
            state.num_updates += len(plan)
        return (results if steps else results[0],) * len(orders)

    # -- columns

    def put(self, table: Table) -> Part:
        """Keep a local table; its values are real and can be fetched. It is ready at the start of time."""
        lengths = {name: column.lengths if isinstance(column, Ragged) else None for name, column in table.items()}
        return Part(np.arange(table.num_rows), SimulatedPart("your data", 0.0, lengths, table), table.nbytes)

    def fetch(self, picks: Sequence[Pick]) -> Table:
        """Return columns of the user's own.

        Raises:
            SimulatedValueError: a column was written by a simulated call.
        """
        columns: dict[str, Column] = {}
        for pick in picks:
            for name, stored_name in pick.columns.items():
                pieces = [
                    take(_real_column(handle, stored_name), rows)
                    for handle, rows in zip(pick.handles, pick.local_rows, strict=True)
                ]
                columns[name] = concat(pieces) if pick.order is None else take(concat(pieces), pick.order)
        return Table(columns)

    # -- looking

    def cancel(self, call_id: int, pool: Pool | None) -> None:
        """Do nothing: a simulated call is over at once."""

    def progress(self, pool: Pool) -> tuple[Progress | None, tuple[Span, ...]]:
        """Return nothing: no simulated call is ever under way."""
        return None, ()

    def devices(self, pool: Pool) -> tuple[DeviceStatus, ...]:
        """Return the pool's devices with predicted bytes, where a memory model was given."""
        with self._lock:
            specs = [state.spec for state in self._roles.values() if state.pool.name == pool.name]
        roles = {spec.name: self._memory(spec, pool.size) for spec in specs} if self._memory else {}
        used = sum(roles.values()) if self._memory else None
        return tuple(
            DeviceStatus(device, rank, pool.name, None, used, roles) for rank, device in enumerate(pool.devices)
        )

    def saved(self, role: str, pool: Pool) -> bool:
        """Return true: what there is to write is written in the call."""
        return True

    def logs(self, pool: Pool, rank: int) -> str:
        """Say that there is nothing to read."""
        return f"rank {rank} of pool {pool.name!r} is simulated: no process runs, so nothing was printed"

    def controller_bytes(self) -> int:
        """Return 0: there are no column bytes."""
        return 0

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._roles.clear()
            self._clocks.clear()


def _kept_bytes(role: RoleSpec, rank: int, trained: bool) -> int:
    """Return the bytes of a rank's weights, their fp32 masters where they are not fp32, and the moments after the first step."""
    assert role.model is not None
    mesh = mesh_of(role)
    at = mesh.coordinates(rank)
    numbers = sum(box.numel for box in megatron_boxes(role.model, mesh.layout, at.tp, at.pp))
    masters = 4 * (role.dtype != "fp32")
    return numbers * (DTYPE_BYTES[role.dtype] + masters + 8 * trained)


CHECKPOINT = "simulated.json"
"""All that a simulated checkpoint holds: how many updates the state had seen."""


def _write_checkpoint(folder: str, num_updates: int) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / CHECKPOINT).write_text(json.dumps({"num_updates": num_updates}))
    except OSError as error:
        raise CheckpointError(f"cannot save to {folder}: {error}") from error


def _read_checkpoint(folder: str) -> int:
    file = Path(folder) / CHECKPOINT
    try:
        return int(json.loads(file.read_text())["num_updates"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder} holds no checkpoint of a simulated session ({error}); give a folder that a simulated session saved"
        ) from error


def _ready_s(orders: Iterable[Order]) -> float:
    """When the last object these orders read was ready."""
    return max((h.ready_s for order in orders for pick in order.picks for h in pick.handles), default=0.0)


def _arrange(pick: Pick, pieces: list[Array]) -> Array:
    joined = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
    return joined if pick.order is None else joined[pick.order]


def _lengths(order: Order) -> dict[str, Array]:
    """Return the length of every row of each variable-length column an order reads."""
    found: dict[str, Array] = {}
    for pick in order.picks:
        for name, stored in pick.columns.items():
            pieces = []
            for handle, rows in zip(pick.handles, pick.local_rows, strict=True):
                lengths = handle.lengths[stored]
                if lengths is not None:
                    pieces.append(lengths[rows])
            if pieces:
                found[name] = _arrange(pick, pieces)
    return found


def _values(order: Order, name: str) -> Array | None:
    """Return a scalar column of the user's own data as an order reads it, ``None`` where there is none."""
    for pick in order.picks:
        stored = pick.columns.get(name)
        if stored is not None and pick.handles and all(h.table is not None for h in pick.handles):
            pieces = zip(pick.handles, pick.local_rows, strict=True)
            return _arrange(pick, [np.asarray(h.table[stored])[rows] for h, rows in pieces])
    return None


def _responses(lengths: Mapping[str, Array]) -> Array | None:
    """Return the response lengths: of ``response`` itself, else of the first per-token column."""
    if "response" in lengths:
        return lengths["response"]
    return next((found for name, found in lengths.items() if name.endswith(TOKEN_ENDINGS)), None)


def _per_token(call: Call, column: str) -> bool:
    if call.method in GENERATE:
        return column in ("response", "rollout_log_probs")
    if call.method in ("compute_log_probs", "compute_values"):
        return True
    return column.endswith("token_scores" if call.method in ("compute_scores", "compute_costs") else TOKEN_ENDINGS)


def _store(call: Call, kept: Sequence[tuple[int | None, Order, Array | None]], ready_s: float) -> Stored | None:
    """Describe what a call writes: one part per rank that is gathered."""
    if not call.writes:
        return None
    name = str(call)
    dtypes = {column: np.dtype(GENERATED.get(column, "float32")) for column in call.writes}
    whole: dict[str, Array] = {}
    parts = []
    for rank, order, responses in kept:
        lengths: dict[str, Array | None] = {}
        num_bytes = 0
        for column in call.writes:
            ragged = responses is not None and _per_token(call, column)
            lengths[column] = responses if ragged else None
            if ragged:
                whole.setdefault(column, np.zeros(call.num_rows, dtype=np.int64))[order.rows] = responses
            count = int(responses.sum()) if ragged and responses is not None else len(order.rows)
            num_bytes += count * dtypes[column].itemsize
        parts.append(Part(order.rows, SimulatedPart(name, ready_s, lengths), num_bytes, rank))
    columns = {}
    for column, dtype in dtypes.items():
        found = whole.get(column)
        count = call.num_rows if found is None else int(found.sum())
        columns[column] = ColumnInfo("scalar" if found is None else "ragged", str(dtype), count * dtype.itemsize, found)
    return Stored(name, call.num_rows, tuple(parts), columns)


def _numbers(prompts: Array, responses: Array, **more: int) -> dict[str, dict[str, int]]:
    """Return the attributes of worker spans by their names."""
    read, written = int(prompts.sum()), int(responses.sum())
    both = {"rows": len(prompts), "tokens": read + written, **more}
    return {
        "prefill": {"rows": len(prompts), "tokens": read}, "decode": {"rows": len(prompts), "tokens": written},
        "forward": both, "backward": both,
    }  # fmt: skip


def _call_span(call: Call, pool: str, started_s: float, ended_s: float, tokens: int) -> Span:
    attrs: dict[str, float | int | str] = {"rows": call.num_rows, "tokens": tokens, "state": "done", "line": call.line}
    if call.inputs:
        attrs["after"] = " ".join(map(str, call.inputs))
    return Span(
        name=call.method, role=call.role, call_id=call.id, method=call.method, step=call.step, pool=pool,
        start_ns=round(started_s * 1e9), duration_s=ended_s - started_s, phase=call.phase, predicted=True, attrs=attrs,
    )  # fmt: skip


def _real_column(handle: SimulatedPart, name: str) -> Column:
    if handle.table is not None:
        return handle.table[name]
    if name not in handle.lengths:
        raise ColumnError(f"{handle.writer} wrote no column {name!r}; it wrote {', '.join(handle.lengths)}")
    raise SimulatedValueError(
        f"the values of column {name!r} were asked, but {handle.writer} was simulated and wrote shapes only. "
        "Its lengths and bytes are readable: batch.column_states(). To see values, run the same cells on a real session."
    )
