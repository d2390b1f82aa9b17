"""``SimulatedRuntime``: the same calls on a virtual clock. Lengths and times exist, values do not.

Every device has a clock, CPU tasks have one, and every stored object knows which call's end made it ready; a call starts when all
its devices are free and its inputs there::

    pool "actor"     | generate ............ | log_probs .. |                       | update ..
    pool "critic"    .                       | values ... |                         | update ....
    CPU tasks        .                       | reward |   .         | advantages |
                     ^ prompts ready at 0    ^ inputs ready         ^ when the last of its columns is there

No process is started, no weight is made, no function of the user's is called. The seconds of a call are asked of a :class:`Costs`
(``hfsdk.planner.perf.perf_model.PerfModel`` is one). Ranks that share rows share the answer; within an update every optimizer step
waits for the slowest rank, as the gradient reduction makes it. Pools that share devices (interleaving) exclude each other, and
workers that share cores slow each other down (``simulated_cores``).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hfsdk.core.arguments import Arguments, Folder, ToShadow
from hfsdk.core.clock import start_s
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.dataflow import Call
from hfsdk.core.errors import CallError, CheckpointError
from hfsdk.core.files import FileSum, content_of
from hfsdk.core.methods import FORWARD_BACKWARD, LAST_RESHARD, STEP, TO_TRAINING, UPDATE, method_of
from hfsdk.core.placement import Pool
from hfsdk.core.response_lengths import ResponseLengths
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import (
    CallOutcome,
    DeviceStatus,
    NodeStatus,
    Order,
    Part,
    Pick,
    Progress,
    RoleState,
    StateCopy,
    Weights,
    Work,
)
from hfsdk.core.store import any_path
from hfsdk.core.table import Column, Ragged, RowLengths, Table, concat, take
from hfsdk.core.untrusted import parse_json
from hfsdk.engine.calls.dispatch import mesh_of
from hfsdk.engine.calls.host_memory import kept_bytes
from hfsdk.engine.calls.shadow_plan import exported, plan_between, received_by_link
from hfsdk.engine.simulation.clock import SharedCores
from hfsdk.engine.simulation.roles import (
    DeviceBytes,
    RowGroup,
    SimulatedRole,
    base_moved,
    bases_elsewhere,
    inputs_of,
    note_sleep,
    numbers,
    row_groups,
)
from hfsdk.engine.simulation.values import (
    CostQuestion,
    Costs,
    Estimate,
    Phases,
    SimulatedPart,
    SimulatedRow,
    SimulatedSpans,
    SimulatedValue,
    Timeline,
    lengths_of,
    real_column,
    response_lengths,
    store,
)
from hfsdk.resharding.reshard_plan import LINKS, ReshardPlan
from hfsdk.resharding.reshard_report import TransportReport

__all__ = [
    "CostQuestion", "Costs", "Estimate", "ResponseLengths", "SimulatedPart",
    "SimulatedRow", "SimulatedRuntime", "SimulatedValue",
]  # fmt: skip


class SimulatedRuntime:
    """A :class:`hfsdk.core.runtime.Runtime` that predicts when each call would end, and runs none of them.

    Args:
        cluster: the devices to pretend.
        costs: predicts the calls' seconds.
        response_lengths: ``"full"``, ``"uniform"``, ``"lognormal"`` or a :class:`ResponseLengths`.
        memory: ``memory(role, pool_size)`` predicts a role's bytes on each device.
        process_bytes: the bytes of a worker's process besides its roles.
    """

    kind = "simulated"

    def __init__(
        self,
        cluster: ClusterSpec,
        costs: Costs,
        response_lengths: str | ResponseLengths = "full",
        memory: Callable[[RoleSpec, int], Estimate] | None = None,
        process_bytes: int = 0,
    ) -> None:
        self.cluster = cluster
        self.response_lengths = ResponseLengths(kind=response_lengths) if isinstance(response_lengths, str) else response_lengths
        self._costs = costs
        self._memory = memory
        self._lock = threading.RLock()
        self._cores = SharedCores(cluster) if cluster.shares_cores else None
        self._last: dict[int, Timeline] = {}
        """The last call on each device."""
        self._last_task: Timeline | None = None
        self._pools: dict[str, Pool] = {}
        self._opened_s: dict[int, float] = {}
        """The second from which on each device may be used: its pool was opened when others had been drained and closed."""
        self._closed_s = 0.0
        self._roles: dict[str, SimulatedRole] = {}
        self._num_updates_of: dict[int, int] = {}
        self._device_bytes = DeviceBytes(process_bytes, on_cpu=cluster.devices[0].name.startswith("cpu"))
        self.questions: dict[int, tuple[CostQuestion, ...]] = {}
        """The questions to ``costs``, by call, where ``keep_questions`` is set."""
        self.tasks: dict[int, tuple[int, int]] = {}
        """The same of CPU tasks: rows and tokens."""
        self.keep_questions = False

    # -- pools and roles

    def open_pool(self, pool: Pool) -> None:
        """Start the clocks of its devices where the last closed pool ended."""
        with self._lock:
            self._pools[pool.name] = pool
            self._opened_s |= dict.fromkeys(pool.devices, self._closed_s)

    def close_pool(self, name: str, *, kill: bool = False) -> None:
        """Forget the pool and the roles that live in it."""
        with self._lock:
            # Later pools begin where this one ended, so its calls' times have to be final before they are read.
            self._settle()
            pool = self._pools.pop(name, None)
            lines = [self._last[device] for device in pool.devices if device in self._last] if pool else []
            self._closed_s = max([self._closed_s, *(line.now_s for line in lines)])
            self._roles = {r: state for r, state in self._roles.items() if state.pool.name != name}
            self._device_bytes.clear()

    def rename_pool(self, old: str, new: str) -> None:
        """Call a pool by another name."""
        with self._lock:
            self._pools[new] = replace(self._pools.pop(old), name=new)

    def load(self, role: RoleSpec, pool: Pool, state: RoleState | None = None, source: Pool | None = None) -> None:
        """Record the role; loading takes no virtual time."""
        num_updates = read_checkpoint(role.restore, role.name) if role.restore else 0
        if state is not None:
            num_updates = state.handles[0]
        elif source is not None:
            num_updates = self._roles[role.name].num_updates
        estimate = self._memory(role, pool.size) if self._memory else None
        with self._lock:
            devices = self.cluster.devices
            on_cpu = any(devices[number].name.startswith("cpu") for number in pool.devices)
            self._roles[role.name] = SimulatedRole(role, pool, on_cpu, num_updates, estimate=estimate)
            self._device_bytes.clear()

    def export(self, role: str, pool: Pool) -> RoleState:
        """Return the role's learned state: its number of optimizer steps."""
        with self._lock:
            return RoleState((self._roles[role].num_updates,))

    def keep(self, role: str, pool: Pool, number: int) -> StateCopy:
        """Note the role's number of optimizer steps; the bytes are those that its ranks would keep."""
        with self._lock:
            state = self._roles[role]
            self._num_updates_of[number] = state.num_updates
            sizes = tuple(kept_bytes(state.spec, rank, state.num_updates > 0) for rank in range(pool.size))
            return StateCopy(number, role, str(state.spec.train), pool.devices, sizes, state.num_updates)

    def free_host_bytes(self, devices: Sequence[int]) -> dict[int, int]:
        """Return nothing: no host memory is spent."""
        return {}

    def nodes(self) -> tuple[NodeStatus, ...]:
        """Return the nodes of the cluster; none of them leaves."""
        return tuple(NodeStatus(f"node {number}", number == 0, True) for number in range(len(self.cluster.node_devices)))

    def holds(self, state_copy: StateCopy) -> bool:
        """Return whether it was not forgotten."""
        return state_copy.number in self._num_updates_of

    def restore(self, role: RoleSpec, pool: Pool, state_copy: StateCopy) -> None:
        """Give the role its number of updates back; takes no virtual time."""
        with self._lock:
            state = self._roles[role.name]
            state.num_updates, state.weights.fresh = self._num_updates_of[state_copy.number], False

    def forget(self, state_copy: StateCopy) -> None:
        """Forget it."""
        self._num_updates_of.pop(state_copy.number, None)

    def release(self, role: str, pool: Pool) -> None:
        """Forget the role."""
        with self._lock:
            if role in self._roles and self._roles[role].pool.devices == pool.devices:  # else it has moved
                del self._roles[role]
            self._device_bytes.clear()

    # -- calls

    def goes_direct(self, giver: Pool, taker: Pool) -> bool:
        """Return False: the weights that a shadow takes are priced when they are taken, in any order of roles."""
        return False

    def call(self, work: Work) -> CallOutcome:
        """Advance the pool's clock by the call's seconds.

        Raises:
            CallError: the role is not loaded.
        """
        call, pool = work.call, work.pool
        if pool is None or call.role not in self._roles:
            raise CallError("the role is not loaded on a pool; call session.place(...) first", role=call.role, method=call.method)
        with self._lock:
            state = self._roles[call.role]
            groups = row_groups(work.orders, call, self.response_lengths)
            inputs = inputs_of(g.order for g in groups)
            # From here the order is that of a real call: weights that a shadow takes over, the way back to the trainer, the call.
            line = self._begin(call, pool, inputs, work.weights)
            if work.weights is not None:
                state.resharded_s = self._lay_sync(line, work.weights.role, state.spec)
                state.apart = work.weights.role, state.spec
            if not method_of(call.method).generates and state.weights.away_for(call.method):
                self._lay_return(state, line)
            lay = self._train if method_of(call.method).learns else self._run
            results = lay(state, line, work.orders, groups)
            state.weights.note(call.method)
            note_sleep(self._roles.values(), state, call.method)
            line.device_bytes = self._device_bytes.after(state, self._roles.values(), pool)
        responses = {rank: g.responses for g in groups for rank in g.ranks}
        parts = [(rank, order, responses[rank]) for rank, order in enumerate(work.orders) if order.keep]
        tokens = sum(int(g.prompts.sum() + g.responses.sum()) for g in groups)
        return CallOutcome(store(call, parts, line), results, self._spans(line, tokens))

    def task(self, work: Work) -> CallOutcome:
        """Advance the clock of CPU tasks; the function is not called."""
        call, order = work.call, work.orders[0]
        lengths = lengths_of(order)
        tokens = int(sum(counts.sum() for counts in lengths.values()))
        with self._lock:
            inputs = inputs_of([order])
            before = [self._last_task] if self._last_task is not None else []
            started = float(start_s(earlier.now_s for earlier in (*inputs, *before)))
            line = self._last_task = Timeline(call, (), "", started)
            line.lay([[0]], [{call.method: self._costs.host_task(len(order.rows), tokens)}], [{}])
            if self._cores is not None:
                self._cores.add(line, [*inputs, *before])
            if self.keep_questions:
                self.tasks[call.id] = len(order.rows), tokens
        value = None if call.writes else SimulatedValue(call.function or str(call))
        return CallOutcome(store(call, [(None, order, response_lengths(lengths))], line), (value,), self._spans(line, tokens))

    def _begin(self, call: Call, pool: Pool, inputs: list[Timeline], weights: Weights | None) -> Timeline:
        """Start a call: when its devices are free, its inputs there, and the weights that a shadow takes over."""
        opened = max(self._opened_s.get(device, 0.0) for device in pool.devices)
        needs = inputs + [bundle.content for bundle in weights.bundles] if weights is not None else inputs
        # One call may be the last on several of these devices: it is waited for once.
        before = list({id(line): line for d in pool.devices if (line := self._last.get(d)) is not None}.values())
        ready = [line.now_s for line in needs]
        free = [opened, *(line.now_s for line in before)]
        # With shared cores a call's start is only known when the replay settles it, so there is no queueing time to note yet.
        queued = max(0.0, max(free) - max(ready)) if needs and self._cores is None else 0.0
        line = Timeline(call, pool.devices, pool.name, float(start_s([*ready, *free])), self._costs.dispatch_s, queued)
        if self._cores is not None:
            self._cores.add(line, [*needs, *before], opened)
        self._last |= dict.fromkeys(pool.devices, line)
        return line

    def _spans(self, line: Timeline, tokens: int) -> SimulatedSpans:
        call = line.call
        attrs: dict[str, float | int | str] = {"rows": call.num_rows, "tokens": tokens, "state": "done", "line": call.line}
        if call.inputs:
            attrs["after"] = " ".join(map(str, call.inputs))
        return SimulatedSpans(line, attrs, self._settle)

    def _settle(self) -> None:
        if self._cores is not None:
            with self._lock:
                self._cores.settle()

    def set_fresh(self, role: str, *, adapters: bool = True) -> None:
        """Say that a role's rollout has the trainer's weights, or the base under its adapters alone."""
        with self._lock:
            state = self._roles[role]
            state.weights.fresh = state.weights.generating = adapters
            state.resharded_s = 0.0

    def _ask(
        self, line: Timeline, method: str, role: RoleSpec, rows: Sequence[RowLengths], weights: Sequence[int], stale: bool = False,
        first: bool = False,
    ) -> Sequence[Phases]:  # fmt: skip
        """Ask for a method's seconds on each group of ranks."""
        if self.keep_questions:
            question = CostQuestion(method, role, line.devices, tuple(rows), tuple(weights), stale, first)
            self.questions[line.call.id] = (*self.questions.get(line.call.id, ()), question)
        return self._costs.method_costs(method, role, self.cluster, line.devices, rows, stale, first)

    def _lay_return(self, state: SimulatedRole, line: Timeline) -> None:
        """Lay down the weights' way back from the rollout to the trainer."""
        none = np.zeros(0, dtype=np.int64)
        costs = self._ask(line, TO_TRAINING.name, state.spec, [(none, none)], [len(line.devices)])
        line.lay([range(len(line.devices))], costs, [{"reshard": {"bytes": 0}}])

    def _lay_sync(self, line: Timeline, trained: RoleSpec, shadow: RoleSpec) -> float:
        """Lay down a shadow's taking over of weights: the bytes that each rank gets by the plan, over the links they come by.

        Returns the seconds of the slowest rank.
        """
        links = dict(zip(LINKS[1:], (self.cluster.intra_node, self.cluster.inter_node), strict=True))
        # Ranks that receive the same bytes over the same links take equally long: they are one group of the picture.
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank, received in enumerate(received_by_link(trained, shadow)):
            alike.setdefault(tuple(received[name] for name in links), []).append(rank)
        costs = [
            sum(link.latency_s + count / link.bandwidth for link, count in zip(links.values(), counts, strict=True) if count)
            for counts in alike
        ]
        attrs = [{"sync": {"bytes": sum(counts)}} for counts in alike]
        line.lay(list(alike.values()), [{"sync": seconds} for seconds in costs], attrs)
        return max(costs)

    def _run(self, state: SimulatedRole, line: Timeline, orders: Sequence[Order], groups: list[RowGroup]) -> tuple[Any, ...]:
        """Lay down a call that every group does once."""
        method = line.call.method
        own = method_of(method).generates and not state.spec.shadow_of
        stale = own and (state.weights.stale_for(method) or state.weights.away_for(method))
        rows = [(g.prompts, g.responses) for g in groups]
        # Adapters move alone, except at the first transition, which also brings the frozen base.
        first = stale and state.spec.lora is not None and state.resharded_s is None
        costs = self._ask(line, method, state.spec, rows, [len(g.ranks) for g in groups], stale, first)
        moved = {"reshard": base_moved(state.spec)} if first else {}
        line.lay([g.ranks for g in groups], costs, [{**numbers(g.prompts, g.responses), **moved} for g in groups])
        if stale:
            state.resharded_s = costs[0].get("reshard", 0.0)
        arguments = orders[0].arguments
        if isinstance(arguments, ToShadow):
            state.resharded_s, state.apart = sum(costs[0].values()), (state.spec, arguments.shadow)
            return exported(state.spec, arguments.shadow, line)
        if method == LAST_RESHARD.name:
            return transport_reports(state.spec, state.resharded_s, state.apart)
        result = self._result(state, line.call, arguments, sum(costs[0].values()))
        return (result,) * len(orders)

    def _result(self, state: SimulatedRole, call: Call, arguments: Arguments, seconds: float) -> Any:
        """Return each rank's report, and count updates and checkpoints."""
        method = method_of(call.method)
        if method.work == "step":
            state.num_updates += 1
            return SimulatedRow(seconds=seconds)
        if method.files == "state" and isinstance(arguments, Folder):
            if method.changes_weights:
                state.num_updates = read_checkpoint(arguments.folder, call.role)
            else:
                write_checkpoint(arguments.folder, call.role, state.num_updates)
            return SimulatedRow(num_updates=state.num_updates)
        return SimulatedValue(str(call)) if method.reports_values else None

    def _train(self, state: SimulatedRole, line: Timeline, orders: Sequence[Order], groups: list[RowGroup]) -> tuple[Any, ...]:
        """Lay down forward and backward of every mini-batch, and after each the optimizer step (not in halves)."""
        role = state.spec
        plan = orders[0].mini_batches
        mesh = mesh_of(role)
        shards: list[list[int]] = [[] for _ in range(mesh.layout.num_replicas)]
        for rank, dp in enumerate(mesh.replicas):
            shards[dp].append(rank)
        prompts, responses = (np.zeros(line.call.num_rows, dtype=np.int64) for _ in range(2))
        for group in groups:
            prompts[group.order.rows], responses[group.order.rows] = group.prompts, group.responses
        picked = [[np.array(mini.passes.rows_of(dp), dtype=np.int64) for dp in range(len(shards))] for mini in plan]
        rows = [[(prompts[r], responses[r]) for r in by_dp] for by_dp in picked]
        # All mini-batches are asked about in one question: predictions are vectorised over the passes.
        sizes = [len(shard) for shard in shards] * len(plan)
        passes = self._ask(line, FORWARD_BACKWARD.name, role, [pair for by_dp in rows for pair in by_dp], sizes)
        updates = line.call.method == UPDATE.name
        # A step's seconds do not depend on its rows, so any rows will do for the question.
        steps = self._ask(line, STEP.name, role, [rows[0][0]] * len(plan), [len(mesh.ranks)] * len(plan)) if updates else ()
        results = []
        for number, mini in enumerate(plan):
            began = line.now_s
            costs = passes[number * len(shards) : (number + 1) * len(shards)]
            line.lay(shards, costs, [numbers(p, r, mini_batch=number) for p, r in rows[number]])
            # An optimizer step is one stage of all ranks (a reduction over dp); times a bool it is laid or left out.
            line.lay([mesh.ranks] * updates, steps[number : number + updates], [{}] * updates)
            results.append(SimulatedRow(
                epoch=mini.epoch, mini_batch=mini.index, num_tokens=mini.num_tokens, num_samples=mini.num_rows,
                seconds=line.now_s - began,
            ))  # fmt: skip
        if updates:
            state.num_updates += len(plan)
        return (results if updates else results[0],) * len(orders)

    # -- columns

    def put(self, table: Table) -> Part:
        """Keep a local table; its values are real and can be fetched. It is ready at the start of time."""
        lengths = {name: column.lengths if isinstance(column, Ragged) else None for name, column in table.items()}
        return Part(np.arange(table.num_rows), SimulatedPart("your data", None, lengths, table), table.nbytes)

    def adopt(self, content: Any, num_rows: int, num_bytes: int) -> Part:
        """Refuse: a simulated session has no other process."""
        raise NotImplementedError("a simulated session lives in one process")

    def fetch(self, picks: Sequence[Pick]) -> Table:
        """Return columns of the user's own.

        Raises:
            SimulatedValueError: a column was written by a simulated call.
        """
        columns: dict[str, Column] = {}
        for pick in picks:
            for name, stored_name in pick.columns.items():
                pieces = [
                    take(real_column(handle, stored_name), rows) for handle, rows in zip(pick.handles, pick.local_rows, strict=True)
                ]
                columns[name] = concat(pieces) if pick.order is None else take(concat(pieces), pick.order)
        return Table(columns)

    # -- looking

    def cancel(self, call_id: int, pool: Pool | None) -> None:
        """Do nothing: a simulated call is over at once."""

    def progress(self, pool: Pool) -> tuple[Progress | None, tuple[()]]:
        """Return nothing: no simulated call is ever under way."""
        return None, ()

    def devices(self, pool: Pool) -> tuple[DeviceStatus, ...]:
        """Return the pool's devices with predicted bytes, where a memory model was given."""
        with self._lock:
            states = [state for state in self._roles.values() if state.pool.name == pool.name]
        estimates = {state: self._memory(state.spec, pool.size) for state in states} if self._memory else {}
        # A frozen base that several roles begin with is on the device once: it counts for one of them.
        elsewhere = bases_elsewhere(estimates)
        roles = {
            name: estimate.resident + (estimate.asleep if state.awake else 0) - (estimate.base if name in elsewhere else 0)
            for state, estimate in estimates.items() for name in [state.spec.name]
        }  # fmt: skip
        asleep = {
            state.spec.name: 0 if state.awake else estimate.asleep for state, estimate in estimates.items() if estimate.asleep
        }
        used = sum(roles.values()) if self._memory else None
        return tuple(
            DeviceStatus(device, rank, pool.name, None, used, roles, asleep=asleep) for rank, device in enumerate(pool.devices)
        )

    def saved(self, role: str, pool: Pool) -> Mapping[str, FileSum]:
        """Return no files, and not ``None``: everything is written in the call."""
        return {}

    def logs(self, pool: Pool | None, rank: int) -> str:
        """Say that there is nothing to read."""
        what = f"rank {rank} of pool {pool.name!r}" if pool else "the process of functions"
        return f"{what} is simulated: no process runs, so nothing was printed"

    def controller_bytes(self) -> int:
        """Return 0: there are no column bytes."""
        return 0

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._roles.clear()
            self._last.clear()


# -- checkpoints of a simulated role: its number of updates

CHECKPOINT = "simulated.json"
"""All that a simulated checkpoint holds: how many updates the state had seen."""


def write_checkpoint(folder: str, role: str, num_updates: int) -> None:
    """Write a role's checkpoint.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        place = any_path(folder) / role
        place.mkdir(parents=True, exist_ok=True)
        (place / CHECKPOINT).write_bytes(json.dumps({"num_updates": num_updates}).encode())
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot save to {folder}: {error.strerror or error}") from error


def read_checkpoint(folder: str, role: str) -> int:
    """Return the number of updates in a role's checkpoint.

    Raises:
        CheckpointError: there is none of a simulated session.
    """
    files = [any_path(folder) / role / CHECKPOINT, any_path(folder) / CHECKPOINT]  # the second is where all roles had it before
    file = next((path for path in files if path.is_file()), files[0])
    try:
        num_updates = parse_json(content_of(file))["num_updates"]
        if type(num_updates) is not int or not 0 <= num_updates < 2**62:
            raise ValueError("num_updates is no whole number of at least 0")
        return num_updates
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder} holds no checkpoint of a simulated session ({error}); give a folder that a simulated session saved"
        ) from error


# -- reports of a simulated weight transition: the plan's bytes and its predicted seconds


def transport_reports(
    role: RoleSpec, seconds: float | None, apart: tuple[RoleSpec, RoleSpec] | None
) -> tuple[TransportReport | None, ...]:
    """Return a report for every rank of an actor or of its shadow; ``None`` for each where nothing has moved yet.

    Every rank is said to take as long as the slowest: only that is predicted.

    Args:
        role: the actor, or its shadow.
        seconds: seconds of the transition, or of this role's side of it.
        apart: the trained role and its shadow, where the rollout is apart.
    """
    first = 0
    if seconds is None:
        return (None,)
    if apart is not None:
        plan = plan_between(*apart)
        first = plan.train.size if role.shadow_of else 0
        last = plan.num_ranks if role.shadow_of else plan.train.size
    else:
        assert role.learned is not None
        assert role.train is not None
        assert role.rollout is not None
        plan = ReshardPlan.between(role.learned, role.train, role.rollout, role.dtype, nodes=role.nodes or None)
        last = plan.num_ranks
    return tuple(_report(plan, rank, seconds) for rank in range(first, last))


def _report(plan: ReshardPlan, rank: int, seconds: float) -> TransportReport:
    received = tuple(int(count) if source != rank else 0 for source, count in enumerate(plan.matrix[:, rank]))
    return TransportReport(plan.bytes_sent(rank), sum(received), plan.bytes_copied(rank), 0, received, seconds)
