"""Tables of every call's seconds in every layout on pools of every size: predicted once, looked up by the search.

For an item on a pool the *candidates* are its layouts that fit the model and, alone, the device. Those that are no better than
another in the seconds of any call and in either kind of bytes cannot make a plan better, and are dropped (where others may hold the
same frozen base, among those that cut it alike)::

    actor (generate, log_probs, update) on 16 devices      seconds              resident   working
        tp8 pp2 dp1, rollout tp8                           41.0   9.1  31.0      52 GB       6 GB
        tp4 pp4 dp1, rollout tp4                           33.9   9.0  30.2      61 GB       5 GB   <- faster, fuller: both stay
        tp2 pp8 dp1, rollout tp8                           41.2   9.9  34.1      52 GB       6 GB   <- dropped
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from hfsdk.core.checks import with_checked
from hfsdk.core.clock import stretch
from hfsdk.core.cluster import ClusterSpec, DeviceSpec
from hfsdk.core.frozen_bases import base_shape
from hfsdk.core.layout import Layout
from hfsdk.core.lora import AdapterSpec
from hfsdk.core.methods import EXPORT_WEIGHTS, FORWARD_BACKWARD, GENERATE, STEP, TO_TRAINING, UPDATE, method_of
from hfsdk.core.roles import RoleSpec
from hfsdk.core.rollout_sizes import LEAST_SEQS, cache_bytes
from hfsdk.core.spec import DTYPE_BYTES
from hfsdk.core.table import Array
from hfsdk.planner.perf.adapter_sizes import rollout_numbers
from hfsdk.planner.perf.decoding import ReplicaRows, slots_each
from hfsdk.planner.perf.memory import CPU_PROCESS_BYTES, GPU_PROCESS_BYTES, MemoryEstimate, role_bytes, rollout_parameters
from hfsdk.planner.perf.perf_model import Links, PerfModel, Setup
from hfsdk.planner.perf.row_lengths import LengthSums
from hfsdk.planner.perf.setup import parameters
from hfsdk.planner.perf.sizing import sizes_alone, waits, with_least
from hfsdk.planner.search.fitting import LayoutsOf, layer_bytes, rollouts_of, trains_of
from hfsdk.planner.search.items import Item, Job
from hfsdk.planner.search.pools import Kind, crossings, kinds_of, pack
from hfsdk.planner.search.recorded import REPLICAS_A_STEP, UNSPLIT, RecordedCall

EMPTY = np.zeros(0, dtype=np.int64)
RankRows = tuple[Array, Array, LengthSums]
"""Prompt and response lengths of a rank's rows, and both together, summed once for all layouts."""
NOTHING: list[RankRows] = [(EMPTY, EMPTY, LengthSums.of(EMPTY))]
AXES = 50_000 ** np.arange(3, -1, -1)
"""Four sizes below that (of axes, dp aside) are one number of 64 bits."""
NamedSeconds = list[tuple[str, float]]
"""(span name, seconds), in order."""
MOST_SETUPS = 50_000
"""Setups that are remembered; a search over 4,096 devices makes about 10,000."""
Fitting = tuple[tuple[LayoutsOf, ...], Array, Array, Array]
"""Layouts, and bytes resident, of a frozen base, and working of each."""


@dataclass(eq=False, kw_only=True)
class ClusterCache:
    """Setups, links and bytes of a cluster's layouts, whatever a step does. Searches share them, and find the same without them."""

    kinds: tuple[Kind, ...]
    bridged: frozenset[Kind]
    """Kinds whose nodes have a bridge between two halves, which each layout crosses in its own way."""
    numbers: Iterator[int] = field(default_factory=count)
    likes: dict[tuple[RoleSpec, int], int] = field(default_factory=dict)
    """Each role, with its long row, has its own number, also while a what-if's thread and a cell search at the same time."""
    setups: dict[Any, Setup] = field(default_factory=dict)
    roles: dict[Any, RoleSpec] = field(default_factory=dict)
    links: dict[Any, Links] = field(default_factory=dict)
    bytes: dict[Any, MemoryEstimate] = field(default_factory=dict)
    fitting: dict[Any, Fitting] = field(default_factory=dict)


@lru_cache(maxsize=4)
def _cache_of(cluster: ClusterSpec) -> ClusterCache:
    kinds = kinds_of(cluster)
    near = {kind: cluster.links_of([cluster.node_of(node[0]) for node in kind.nodes])[0] for kind in kinds}
    return ClusterCache(kinds=kinds, bridged=frozenset(kind for kind in kinds if near[kind].bridge))


def cache_of(cluster: ClusterSpec) -> ClusterCache:
    """Return the cache of a cluster's layouts; a new one where it has become large."""
    cache = _cache_of(cluster)
    if len(cache.setups) > MOST_SETUPS:
        _cache_of.cache_clear()
        cache = _cache_of(cluster)
    return cache


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidates:
    """The layouts of an item on a pool of some size."""

    layouts: tuple[LayoutsOf, ...]
    seconds: Array
    """[candidate, job of the item]; weights of a trained role come over the faster link where they might."""
    resident: Array
    """Bytes held all the time, [candidate]."""
    base: Array
    """The bytes of ``resident`` that roles with the same frozen base have together where it is cut alike, [candidate]."""
    working: Array
    """Further bytes while its greediest call runs, [candidate]."""

    def __len__(self) -> int:
        return len(self.layouts)

    @cached_property
    def rollout_tps(self) -> Array:
        """Tensor-parallel size of the rollout, 0 without one, [candidate]."""
        return np.array([x["rollout"].tp if "rollout" in x else 0 for x in self.layouts])

    @cached_property
    def own(self) -> Array:
        """Bytes held all the time that are nobody else's, [candidate]."""
        own_bytes: Array = self.resident - self.base
        return own_bytes

    @cached_property
    def shapes(self) -> Array:
        """How each cuts a base, as a number, [candidate]; equal ones have the same shard on every device of a pool."""
        cuts = [base_shape(x["train"], x.get("rollout")) if "train" in x else (0, 0, 0, 0) for x in self.layouts]
        return np.asarray(np.array(cuts, dtype=np.int64).reshape(-1, 4) @ AXES)

    def take(self, keep: Array) -> Candidates:
        """Return those with these numbers."""
        return Candidates(
            layouts=tuple(self.layouts[i] for i in keep), seconds=self.seconds[keep], resident=self.resident[keep],
            base=self.base[keep], working=self.working[keep],
        )  # fmt: skip


class Cut(NamedTuple):
    """How the weights of a rollout are cut; tp is 0 where there is none."""

    tp: int
    ep: int

    @classmethod
    def of(cls, rollout: Layout | None) -> Cut:
        """Return that of a layout."""
        return cls(0, 1) if rollout is None else cls(rollout.tp, rollout.ep)


class Where(NamedTuple):
    """A setup and its key: hashing its numbers would take longer than a prediction."""

    key: Hashable
    setup: Setup


def process_bytes(kind: Kind) -> int:
    """Return the bytes of a worker process."""
    return CPU_PROCESS_BYTES if kind.on_cpu else GPU_PROCESS_BYTES


def room(kind: Kind) -> int:
    """Return the bytes of a device that roles can have."""
    return kind.device.memory_bytes - process_bytes(kind)


@dataclass(eq=False)
class Tables:
    """Tables of each item's candidates, and of their seconds and bytes, on pools of every size; each is predicted once."""

    cluster: ClusterSpec
    perf: PerfModel
    least: bool = False
    """Whether rollouts whose cache is open get the smallest one, and not the one that they should have."""
    alone: bool = True
    """Whether they are timed with the cache that they have with their own role alone, and not with the one they should have."""
    step: int = -1
    """Number of the step of the run whose response lengths are generated; -1: seconds are the mean over all that are known."""
    num_predicted: int = 0
    """Layouts of items on pools whose calls were predicted."""
    cache: ClusterCache = field(init=False)
    _shares_cores: bool = field(init=False)
    _items: dict[Item, int] = field(default_factory=dict)
    _candidates_of: dict[Any, Candidates] = field(default_factory=dict)
    _rows: dict[Any, list[RankRows]] = field(default_factory=dict)
    _replica_rows: dict[tuple[int, int], ReplicaRows] = field(default_factory=dict)
    _costs: dict[Any, NamedSeconds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache, self._shares_cores = cache_of(self.cluster), self.cluster.shares_cores

    def but(self, *, least: bool = False, alone: bool = True) -> Tables:
        """Return tables with other sizes for rollouts; numbers that do not depend on these are shared."""
        return replace(self, least=least, alone=alone, num_predicted=0)

    def of_step(self, step: int) -> Tables:
        """Return tables of the response lengths of one step of the run."""
        return replace(self, step=step, num_predicted=0)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of the cluster's nodes."""
        return self.cache.kinds

    def candidates(
        self, item: Item, jobs: Sequence[Job], kind: Kind, size: int, *, everything: bool = False, shares: bool = False
    ) -> Candidates:
        """Return the layouts of an item on a pool that are not worse than another (or all); none where nothing fits.

        Where other items begin with the same frozen base (``shares``) they are compared among candidates that cut it alike.
        """
        about = tuple((job.method, job.call.id if job.call else 0, job.stale, job.away, job.sync) for job in jobs)
        sizes = (self.alone, self.least) if waits(item.role) and not kind.on_cpu else ()
        key = self._like(item), item.role.train, item.role.rollout, item.role.auto, about, kind, size, everything, shares, sizes
        if key not in self._candidates_of:
            self._candidates_of[key] = self._candidates(item, jobs, kind, size, everything, shares)
        return self._candidates_of[key]

    def _candidates(self, item: Item, jobs: Sequence[Job], kind: Kind, size: int, everything: bool, shares: bool) -> Candidates:
        layouts, resident, base, working = self._fitting(item, kind, size)
        seconds = [[self.seconds(item, job, each, kind, size) for job in jobs] for each in layouts]
        self.num_predicted += len(layouts)
        candidates = Candidates(
            layouts=layouts, seconds=np.array(seconds).reshape(len(layouts), len(jobs)), resident=resident, base=base,
            working=working,
        )  # fmt: skip
        return candidates if everything or len(layouts) < 2 else candidates.take(_undominated(candidates, shares))

    def _fitting(self, item: Item, kind: Kind, size: int) -> Fitting:
        """Return the layouts that the memory of a pool's devices allows, with their bytes."""
        role = item.role
        key = self._like(item), role.train, role.rollout, role.auto, kind, size, self.least
        if key not in self.cache.fitting:
            rows: list[tuple[LayoutsOf, int, int, int]] = []
            most = room(kind)
            layers: dict[int, float] = {}
            for layouts in self.layouts(item, kind, size):
                train = layouts.get("train")
                if train is not None:
                    layers[train.ep] = layers.get(train.ep) or layer_bytes(role, train.ep)
                    if layers[train.ep] > most * train.tp * train.pp:
                        continue  # said at once what the memory model says of most layouts of a large model
                estimate = self.bytes_of(item, layouts, kind, size)
                if estimate.total <= most:
                    rows.append((layouts, estimate.resident, estimate.base, estimate.working))
            resident, base, working = (np.array([row[i] for row in rows], dtype=float) for i in (1, 2, 3))
            self.cache.fitting[key] = tuple(row[0] for row in rows), resident, base, working
        return self.cache.fitting[key]

    # -- layouts

    def layouts(self, item: Item, kind: Kind, size: int) -> Iterator[LayoutsOf]:
        """Yield the layouts of an item that cover a pool: as declared, or every one that fits the model (tp within a node)."""
        role = item.role
        assert role.model is not None
        rollouts = [None] if role.rollout is None else rollouts_of(role, kind, size)
        trains = [None] if role.train is None else trains_of(role, kind, size, item.long_row)
        for train in trains:
            for rollout in rollouts:
                yield {use: layout for use, layout in (("train", train), ("rollout", rollout)) if layout is not None}

    # -- bytes

    def bytes_of(self, item: Item, layouts: LayoutsOf, kind: Kind, size: int, *, least: bool = False) -> MemoryEstimate:
        """Return the bytes that an item asks of each device of its pool, with the smallest cache (``least``) or the right one."""
        role, least = item.role, (least or self.least) and not kind.on_cpu
        train, rollout = layouts.get("train"), layouts.get("rollout")
        sharded = role.optimizer is not None and role.optimizer.distributed
        shape = (train.tp, train.pp, train.ep, train.cp, train.num_copies if sharded else 0) if train else (0, 0, 0, 0, 0)
        key = self._like(item), shape, (cut := Cut.of(rollout)), kind.on_cpu, least
        if key not in self.cache.bytes:
            role = self._generating(item, cut, least)
            role = role if train is None else with_checked(role, train=train)
            self.cache.bytes[key] = role_bytes(role, size, on_cpu=kind.on_cpu, longest=item.long_row)
        return self.cache.bytes[key]

    # -- seconds

    def seconds(self, item: Item, job: Job, layouts: LayoutsOf, kind: Kind, size: int) -> float:
        """Return the seconds of a job on its slowest rank, from its start; a sync over the faster link it may take."""
        far = self.far(kind, size)
        return self.perf.dispatch_s + sum(seconds for _, seconds in self.phases(item, job, layouts, kind, size, far=far))

    def phases(self, item: Item, job: Job, layouts: LayoutsOf, kind: Kind, size: int, *, far: bool | None) -> NamedSeconds:
        """Return the same by the names of spans, in order, without the time before the first one."""
        phases, slower = self._phases(item, job, layouts, kind, size, far), self.slowdown(kind, size)
        return phases if slower == 1.0 else [(name, seconds * slower) for name, seconds in phases]

    def slowdown(self, kind: Kind, size: int) -> float:
        """Return how many times as long calls take because all workers of a pool are at work and share a node's cores."""
        if not self._shares_cores:
            return 1.0
        nodes = {(min(size, len(node)), self.cluster.cores_of(self.cluster.node_of(node[0]))) for node in kind.nodes}
        return max(stretch(workers, cores) for workers, cores in nodes)

    def _phases(self, item: Item, job: Job, layouts: LayoutsOf, kind: Kind, size: int, far: bool | None) -> NamedSeconds:
        phases: NamedSeconds = []
        if job.sync:
            phases.append(("sync", self.sync_s(item, layouts, far=far)))
        call = job.call
        if job.away and not method_of(job.method).generates and kind.on_cpu:  # the trainer's weights come back first
            phases += self._priced(TO_TRAINING.name, self._where(item, layouts, kind, size, rollout=True), NOTHING, None)
        if call is None:
            return self._priced(EXPORT_WEIGHTS.name, self._where(item, layouts, kind, size), NOTHING, None)
        if method_of(job.method).learns:
            return phases + self._training(call, self._where(item, layouts, kind, size))
        if method_of(job.method).generates and "rollout" in layouts:
            return phases + self._generation(item, job, layouts, kind, size)
        where = self._where(item, layouts, kind, size)
        by = {"DP": size, "MICRO_DP": size // layouts["rollout"].tp if "rollout" in layouts else size}
        parts = 1 if call.protocol in UNSPLIT else by.get(call.protocol, where.setup.layout.num_replicas)
        return phases + self._priced(call.method, where, self._slowest(call, parts), (call.id, parts))

    def far(self, kind: Kind, size: int) -> bool | None:
        """Whether other pools lie on other nodes than a pool of this size; ``None`` where that depends on which pool it is."""
        if len(self.cluster.node_devices) == 1:
            return False
        return True if size >= kind.node_size else None

    def sync_s(self, item: Item, layouts: LayoutsOf, *, far: bool | None) -> float:
        """Return the seconds in which the fullest rank of a shadow takes over its weights (as the simulated runtime has it).

        One that generates gets the weights that its rank of the rollout needs, one that infers the whole model; with LoRA each
        has its base already, and gets adapters. Where ``far`` is
        not known the least that it may take: a cluster's network may be faster than the links in its nodes.
        """
        if far is None:
            return min(self.sync_s(item, layouts, far=True), self.sync_s(item, layouts, far=False))
        link = self.cluster.inter_node if far else self.cluster.intra_node
        role, rollout = item.role, layouts.get("rollout")
        assert role.model is not None
        assert role.learned is not None
        size = DTYPE_BYTES[role.dtype]
        count = parameters(role.learned)
        if rollout is not None and role.lora is None:
            count = rollout_parameters(role.model, rollout.tp, rollout.ep)
        elif rollout is not None and role.lora is not None:
            count = rollout_numbers(AdapterSpec.of(role.model, role.lora), rollout.tp)
        return link.latency_s + size * count / link.bandwidth

    def _generation(self, item: Item, job: Job, layouts: LayoutsOf, kind: Kind, size: int) -> NamedSeconds:
        """Moving stale weights does not depend on the rows; generating depends on the trainer's layout by the cache it leaves."""
        assert job.call is not None
        cut = Cut.of(layouts["rollout"])
        where, parts = self._where(item, layouts, kind, size, rollout=True), size // cut.tp
        rows = self._replicas(job.call, parts)
        key = self._like(item), kind, size, cut, job.call.id, slots_each(where.setup, rows).tobytes(), self.step
        if key not in self._costs:
            self._costs[key] = self._generated(where.setup, rows)
        moved: NamedSeconds = []
        if job.stale or (job.away and kind.on_cpu):
            before = dict(self._priced(GENERATE.name, where, NOTHING, "fresh"))
            moved = [(n, s - before.get(n, 0.0)) for n, s in self._priced(GENERATE.name, where, NOTHING, "stale", stale=True)]
        return [(name, seconds) for name, seconds in moved if seconds] + self._costs[key]

    def _training(self, call: RecordedCall, where: Where) -> NamedSeconds:
        """Every optimizer step waits for the dp rank that is slowest in its mini-batch."""
        dp, total = where.setup.layout.num_replicas, dict[str, float]()
        for number, rows in enumerate(call.mini_batches):
            mark = call.id, dp, ("rows", len(rows)) if call.alike else number
            steps = self._priced(STEP.name, where, NOTHING, None) if call.method == UPDATE.name else []
            for name, seconds in self._priced(FORWARD_BACKWARD.name, where, self._slowest(call, dp, rows, mark), mark) + steps:
                total[name] = total.get(name, 0.0) + seconds
        return list(total.items())

    def _generated(self, setup: Setup, rows: ReplicaRows) -> NamedSeconds:
        """Return the seconds of the slowest replica, in the mean over the steps whose lengths are known or of one of them."""
        named = self.perf.generate_each(setup, rows)
        by_step = sum(named.values(), np.zeros(len(rows.each))).reshape(-1, REPLICAS_A_STEP)
        slowest = by_step.argmax(1) + np.arange(0, by_step.size, REPLICAS_A_STEP)
        chosen = slowest if self.step < 0 else slowest[min(self.step, len(slowest) - 1)]
        return [(name, float(seconds[chosen].mean())) for name, seconds in named.items()]

    def _replicas(self, call: RecordedCall, parts: int) -> ReplicaRows:
        key = call.id, parts
        if key not in self._replica_rows:
            self._replica_rows[key] = call.slowest_replicas(parts)
        return self._replica_rows[key]

    def _slowest(self, call: RecordedCall, parts: int, rows: Array | None = None, mark: Any = None) -> list[RankRows]:
        key = mark or (call.id, parts)
        if key not in self._rows:
            self._rows[key] = [(p, r, LengthSums.of(p + r)) for p, r in call.slowest_rows(parts, rows)]
        return self._rows[key]

    def _priced(self, method: str, where: Where, rows: Sequence[RankRows], mark: object, *, stale: bool = False) -> NamedSeconds:
        """Return the phases of the slowest of some ranks; ``mark`` says which rows they are."""
        key = where.key, method, mark, stale
        if key not in self._costs:
            every = [list(self.perf.costs(method, where.setup, p, r, stale, both).items()) for p, r, both in rows]
            self._costs[key] = every[0] if len(every) == 1 else max(every, key=lambda phases: sum(s for _, s in phases))
        return self._costs[key]

    # -- setups

    def setup(self, item: Item, layouts: LayoutsOf, kind: Kind, size: int, *, rollout: bool = False) -> Setup:
        """Return ``Setup.of`` the item on a pool of this size, at a fraction of its price."""
        return self._where(item, layouts, kind, size, rollout=rollout).setup

    def _where(self, item: Item, layouts: LayoutsOf, kind: Kind, size: int, *, rollout: bool = False) -> Where:
        train = layouts.get("train") or Layout(dp=size)
        cut = Cut.of(layouts["rollout"] if rollout else None)
        alone = self.alone and cut.tp > 0 and waits(item.role)  # of the others every table has the same
        key = self._like(item), kind, size, train.tp, train.pp, train.ep, train.cp, cut, alone
        if key not in self.cache.setups:
            self.cache.setups[key] = self._setup(item, layouts, train, cut, kind, size)
        return Where(key, self.cache.setups[key])

    def _setup(self, item: Item, layouts: LayoutsOf, train: Layout, cut: Cut, kind: Kind, size: int) -> Setup:
        rollout_tp, least = cut.tp, (self._like(item), kind, cut.tp)
        if least not in self.cache.setups:
            few = max(1, rollout_tp)
            small = {"train": Layout(tp=few, dp=1)} | ({"rollout": Layout(tp=few, dp=1)} if rollout_tp else {})
            role = with_checked(item.role, train=small["train"], rollout=small.get("rollout"))
            home = kind.devices if kind.whole else kind.devices[:few]
            if kind.whole:
                rollout = Layout(tp=few, dp=len(home) // few) if rollout_tp else None
                role = with_checked(role, train=Layout(dp=len(home)), rollout=rollout)
            self.cache.setups[least] = Setup.of(role, self.cluster, home)
        changes: dict[str, Any] = {"layout": train, "links": self.links(train, kind, size)}
        if rollout_tp:
            changes["rollout"] = Layout(tp=rollout_tp, dp=size // rollout_tp, ep=cut.ep)
            changes["rollout_links"] = self.links(changes["rollout"], kind, size)
            if waits(item.role) and not kind.on_cpu:
                role = self._generating(item, cut, least=False)
                assert role.model is not None
                options = role.rollout_options
                if self.alone:
                    options = sizes_alone(role, self.bytes_of(item, layouts, kind, size, least=True), self._devices(kind))
                changes["max_num_seqs"] = options.max_num_seqs or LEAST_SEQS
                changes["kv_cache_bytes"] = cache_bytes(role.model, options, rollout_tp, role.dtype, on_cpu=False)
        return replace(self.cache.setups[least], **changes)

    def _generating(self, item: Item, cut: Cut, least: bool) -> RoleSpec:
        """Return an item's role with a rollout so cut, all that its bytes depend on; ``least``: with the smallest cache."""
        key = self._like(item), cut, least
        if key not in self.cache.roles:
            role = with_checked(item.role, rollout=Layout(tp=cut.tp, ep=cut.ep, dp=cut.ep) if cut.tp else None)
            self.cache.roles[key] = with_least(role) if least else role
        return self.cache.roles[key]

    def _devices(self, kind: Kind) -> Sequence[DeviceSpec]:
        return list(dict.fromkeys(self.cluster.devices)) if kind.whole else [kind.device]

    def links(self, layout: Layout, kind: Kind, size: int) -> Links:
        """Return ``Links.of`` a layout on a pool of this size; those of tp, pp and dp that cross nodes alike share the answer."""
        plain = layout.ep == layout.cp == 1 and not kind.whole and kind not in self.cache.bridged
        key = kind, crossings(layout, kind.node_size, size) if plain else layout
        if key not in self.cache.links:
            home = kind.devices if kind.whole else (pack(kind, [size]) or [()])[0]
            self.cache.links[key] = Links.of(self.cluster, home, layout)
        return self.cache.links[key]

    def _like(self, item: Item) -> int:
        if item not in self._items:
            self._items[item] = self.cache.likes.setdefault((item.like, item.long_row), next(self.cache.numbers))
        return self._items[item]


def _undominated(candidates: Candidates, shares: bool) -> Array:
    """Return the numbers of the candidates than which no other (that cuts a base alike) is at least as good in everything."""
    numbers = np.column_stack([candidates.seconds, candidates.resident, candidates.working])
    order = np.lexsort(numbers.T[::-1])
    ordered = numbers[order]
    no_worse = (ordered[:, None] <= ordered[None]).all(2)  # [i, j]: i is at least as good as j in everything
    if shares:
        shapes = candidates.shapes[order]
        no_worse &= shapes[:, None] == shapes[None]
    beaten = np.triu(no_worse, 1).any(0)  # by one before it in order: of two alike the first stays
    undominated: Array = np.sort(order[~beaten])
    return undominated
