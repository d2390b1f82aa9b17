"""Finds the best placement and layouts: branch and bound, exact within the stated family and the performance model.

A *box* is an arrangement (who shares devices with whom, on which kind of nodes) with a range of sizes for every pool. Its bound is
the step's makespan with every job's least seconds at the largest sizes. Boxes are split along their widest range, many at once,
until every pool has one size; then the layouts are chosen exactly (``leaf``)::

    actor 1..16 nodes | critic 1..16 nodes      bound 101 s      split
      actor 1..8      | critic 1..15            bound 190 s      ruled out: a plan with 142 s is known
      actor 9..15     | critic 1..7             bound 133 s      split
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hfsdk.core.roles import RoleSpec
from hfsdk.core.table import Array
from hfsdk.planner.search.candidates import Tables
from hfsdk.planner.search.items import groupings_of, modes_of
from hfsdk.planner.search.leaf import Leaf, Number
from hfsdk.planner.search.recorded import Recorded
from hfsdk.planner.search.solution import Best, Solution, grouping_names
from hfsdk.planner.search.space import Space

BATCH = 4096
"""Boxes that are split at once."""

MOST_FOR_ALL, MOST_FOR_BEST = (60_000, 4_000), (300_000, 12_000)
"""Boxes bounded and placements looked at: beyond the first only plans that could be the very best are looked for, at the second the
search ends. Thousands of devices for little work leave many plans within a fraction of a per cent."""

FAMILY = (
    "Exact, within the performance model, among: every way of sharing devices (set partitions of roles), frozen models also side "
    "by side on parts of another pool (interleaving), the actor's generation and the critic's inference also by shadows on other "
    "pools (separation; while roles and shadows are at most six); pools of 1, 2, 4, ... devices of a node, then whole nodes, of "
    "one kind, or of all devices (on a single node whose size is no power of two, of any number); tp within a node, and dividing "
    "its size where a pool has several, pp that divides the layers, dp the rest; rollout tp likewise; in simulation, where a "
    "row is longer than micro_batch_tokens, also ranks that share rows (cp); devices may stay idle. "
    "Layouts that were declared are kept. Not looked at: parts of a pool of all devices of a mixed cluster, and one part alone "
    "beside devices that idle."
)
"""The family of plans that the search covers, in words."""

SHARING_CORES = " Workers here share cores: with n at work on C cores each runs at C / n of its speed."
"""The sentence for a cluster with fewer cores than workers."""


OVER_STEPS = " Where responses vary in length, plans are compared by their calls' seconds in the mean over {} steps' lengths."
"""The sentence for plans where one step's lengths would decide by chance."""

FROM_MEMORY = (
    " Where a rollout's cache comes from the memory of GPUs the search is not exact: plans are compared with the cache that it has "
    "beside its own role alone. If those found leave it less, and are slower for it, the search is made again, with up to 8 GB. "
    "What is found is timed, and put in order, with what all roles leave it."
)
"""The sentence for plans whose rollouts' sizes come from memory."""


@dataclass(eq=False)
class Search:
    """One search: its spaces, its best plans, and how much it looked at."""

    spaces: list[Space]
    best: Best
    num_bounded: int = 0
    """Boxes whose bound was computed."""
    offered: set[Number] = field(default_factory=set)
    """Placements whose layouts were chosen, as :attr:`Leaf.number` has them."""
    least_left: float = np.inf
    """Seconds that a plan which was not looked at takes at least, where the search ended early."""
    tables_s: float = 0.0
    """Seconds that :meth:`prepare` took."""

    @classmethod
    def over(
        cls, roles: Sequence[RoleSpec], recorded: Recorded, tables: Tables, *, top: int = 5, by_placement: bool = False,
        shadows: bool = True, everything: bool = False, only: object = None,
    ) -> Search:  # fmt: skip
        """Prepare the search over all plans of these roles.

        Args:
            roles: that have a model, as declared.
            recorded: the step's calls.
            tables: predicts; of the cluster.
            top: how many plans to find.
            by_placement: whether two of them may have the same grouping with other sizes.
            shadows: whether shadows are in the family.
            everything: keep layouts that cannot be in a best plan as well (tests).
            only: the one grouping to look at, as :attr:`Solution.grouping` gives it; by default all of them.
        """
        modes = [(m, groupings_of(m)) for m in modes_of(roles, recorded, shadows)]
        if only is not None:
            modes = [(m, [g for g in groupings if grouping_names(m, g.blocks, g.hosts) == only]) for m, groupings in modes]
        spaces = [Space(m, groupings, tables.kinds, tables, everything) for m, groupings in modes if groupings]
        return cls(spaces, Best(top, by_placement))

    def again(self, tables: Tables) -> Search:
        """Prepare a search by other tables, with the sizes that all roles leave, for plans faster than this one's."""
        timed = {key: solution.timed() for key, solution in self.best.by_key.items()}
        return Search([space.timed_by(tables) for space in self.spaces], replace(self.best, best_alone=False, by_key=timed))

    def prepare(self) -> None:
        """Predict the seconds of every layout; :meth:`run` would, and this notes how long it takes."""
        began = time.perf_counter()
        for space in self.spaces:
            _ = space.least
        self.tables_s = time.perf_counter() - began

    @property
    def sizes_are_open(self) -> bool:
        """Whether a rollout's sizes come from the memory of GPUs."""
        return any(space.sizes_are_open for space in self.spaces)

    @property
    def sizes_matter(self) -> bool:
        """Whether a plan that was found is slower with the sizes that all roles leave its rollouts."""
        return any(solution.step_seconds > solution.seconds * (1 + 1e-9) for solution in self.best.ranked())

    @property
    def num_leaves(self) -> int:
        """How many placements' layouts were chosen."""
        return len(self.offered)

    def num_placements(self) -> int:
        """Count the placements of the family: arrangements with sizes of pools, and of parts, that fit side by side."""
        counts: dict[Hashable, int] = {}
        total = 0
        for space in self.spaces:
            for a in space.arrangements:
                hosts = space.groupings[a.grouping].hosts
                parts = sorted((a.kinds[b], hosts.count(b)) for b, host in enumerate(hosts) if host < 0)
                key = tuple(parts)
                if key not in counts:
                    counts[key] = _count_sizes(space, parts)
                total += counts[key]
        return total

    def run(self) -> list[Solution]:
        """Return the best plans, fastest first; none where nothing fits."""
        if not self.best.by_key:
            self._prime(self.spaces[0])  # without shadows, which are seldom best
        self._branch()
        return self.best.ranked()

    # -- first plans

    def _prime(self, space: Space) -> None:
        """Offer one placement of every grouping: pools in proportion to the work that their jobs have on all devices."""
        which = np.array([n for n, a in enumerate(space.arrangements) if len(set(a.kinds)) == 1], dtype=np.int64)
        sizes = np.zeros((len(which), space.replay.most_blocks), dtype=np.int64)
        for n, number in enumerate(which):
            a = space.arrangements[number]
            sizes[n, : len(a.kinds)] = self._in_proportion(space, int(number))
        which, sizes, _ = self._tighten(space, which, sizes, sizes)  # those that have room side by side
        bounds = self._bound(space, which, sizes, sizes, space.exact)
        for n in np.argsort(bounds, kind="stable"):
            leaf = self._leaf(space, int(which[n]), sizes[n])
            if bounds[n] < self.best.limit(self.best.key(leaf)):
                self._offer(leaf)

    @staticmethod
    def _in_proportion(space: Space, number: int) -> list[int]:
        a = space.arrangements[number]
        kind, hosts = space.kinds[a.kinds[0]], space.groupings[a.grouping].hosts
        work = space.work[space.rows[number, : len(a.kinds)]]
        total = work[[h < 0 for h in hosts]].sum() or 1.0
        sizes = []
        for part, host in zip(work, hosts, strict=True):
            inside = work[[h == host for h in hosts]].sum() or 1.0
            # Parts get half of the largest pool together: a first guess, which the search improves.
            wanted = (part / total if host < 0 else part / inside / 2) * float(kind.sizes[-1])
            sizes.append(max(0, int(np.searchsorted(kind.sizes, wanted, side="right")) - 1))
        return sizes

    def _offer(self, leaf: Leaf) -> None:
        """Offer a placement, once: the limits only fall, so a second look at the one that came first finds nothing."""
        if leaf.number not in self.offered:
            self.offered.add(leaf.number)
            self.best.offer(leaf)

    # -- branch and bound

    def _branch(self) -> None:
        """Split the boxes with the least bounds of all spaces, until no bound is below the best plans so far."""
        fronts = [self._front(space) for space in self.spaces]
        while True:
            # Proving the runners-up takes most of a large search; beyond this many bounds only the best plan is proven.
            self.best.best_alone = self._beyond(MOST_FOR_ALL)
            for front in fronts:
                # A limit falls with every plan that is found, so boxes that were open a moment ago may be ruled out now.
                front.keep(front.bound < self.best.limits(front.space)[front.which])
            fronts = [front for front in fronts if len(front.which)]
            if not fronts:
                return
            # The box with the least bound anywhere comes first: when it is not below the limit, no box is.
            first = min(fronts, key=lambda front: front.bound.min())
            if self._beyond(MOST_FOR_BEST) and self.best.by_key:
                self.least_left = float(first.bound.min())
                return
            self._split(first)

    def _front(self, space: Space) -> _Front:
        count, blocks = len(space.arrangements), space.replay.most_blocks
        low = np.zeros((count, blocks), dtype=np.int64)
        which, low, high = self._tighten(space, np.arange(count), low, space.num_sizes[space.rows] - 1)
        return _Front(space, which, low, high, self._bound(space, which, low, high, space.least))

    def _split(self, front: _Front) -> None:
        """Choose the layouts of the first boxes that are placements, and split the others of them in two."""
        space, best = front.space, np.argsort(front.bound, kind="stable")[:BATCH]
        single = (front.low[best] == front.high[best]).all(1)
        # A box with one size for every block is a placement: its bound is checked again, since earlier ones of this batch lower the
        # limit.
        for i in best[single]:
            leaf = self._leaf(space, int(front.which[i]), front.low[i])
            if front.bound[i] < self.best.limit(self.best.key(leaf)):
                self._offer(leaf)
        split = best[~single]
        which, low, high = self._tighten(space, *_halves(space, front.which[split], front.low[split], front.high[split]))
        bound = self._bound(space, which, low, high, space.least)
        later = np.ones(len(front.which), dtype=bool)
        later[best] = False
        front.keep(later)
        front.add(which, low, high, bound)

    def _beyond(self, most: tuple[int, int]) -> bool:
        return self.num_bounded > most[0] or self.num_leaves > most[1]

    @property
    def shortened(self) -> str:
        """The sentence that says what an early end left unproven; empty where the search ran to its end."""
        if np.isfinite(self.least_left):
            gap = 1 - self.least_left / min(solution.seconds for solution in self.best.by_key.values())
            return f" Ended early: a plan that was not looked at could be faster by at most {gap:.1%}."
        return " Runners-up are the best of those looked at; the best plan is proven." if self.best.best_alone else ""

    @staticmethod
    def _leaf(space: Space, arrangement: int, sizes: Array) -> Leaf:
        count = len(space.arrangements[arrangement].kinds)
        return Leaf(space=space, arrangement=arrangement, sizes=tuple(map(int, sizes[:count])))

    def _bound(self, space: Space, which: Array, low: Array, high: Array, least: Array) -> Array:
        """Return a lower bound of the makespan of every box; infinite where no plan of it fits."""
        self.num_bounded += len(which)
        rows = space.rows[which]
        single = (low == high)[..., None]
        seconds = np.tile(space.fixed, (len(which), 1))
        fits = np.ones(len(which), dtype=bool)
        resident, working = space.held
        for b in range(rows.shape[1]):
            at = rows[:, b], high[:, b]
            # A block of one size has that size's seconds; one with a range has the least over all sizes up to its largest.
            seconds += np.where(single[:, b], space.exact[at], least[at])
            host = space.hosts[which, b]
            part = np.flatnonzero(host >= 0)
            if len(part):
                over = rows[part, host[part]], high[part, host[part]]
                placed = rows[part, b], high[part, b]
                # On the devices of a part both blocks hold their bytes all the time, but they run one after the other: the larger
                # working set counts.
                needed = resident[placed] + resident[over] + np.maximum(working[placed], working[over])
                fits[part] &= needed <= space.rooms[space.kind_of[which[part], b]]
        ok = fits & np.isfinite(seconds).all(1)
        bound = np.full(len(which), np.inf)
        if ok.any():
            bound[ok] = space.replay.makespan(seconds[ok], space.grouping_of[which[ok]])
        return bound

    def _tighten(self, space: Space, which: Array, low: Array, high: Array) -> tuple[Array, Array, Array]:
        """Leave out boxes without room for their least sizes, and lower the largest sizes to those that the others leave."""
        rows, hosts, kinds = space.rows[which], space.hosts[which], space.kind_of[which]
        least = space.sizes[rows, low]
        keep = (low <= high).all(1)
        high = high.copy()
        for b in range(rows.shape[1]):
            there = kinds[:, b] >= 0
            part = hosts[:, b] >= 0
            # Blocks that compete for the same devices: parts of the same pool, or pools on the same kind of nodes.
            beside = (hosts == hosts[:, b, None]) & np.where(part[:, None], True, kinds == kinds[:, b, None]) & (kinds >= 0)
            used = np.where(beside, least, 0).sum(1) - np.where(there, least[:, b], 0)
            host = np.maximum(hosts[:, b], 0)
            over = space.sizes[rows[np.arange(len(rows)), host], high[np.arange(len(rows)), host]]
            total = np.where(part, over, space.devices[kinds[:, b]])
            room = np.where(there, total - used, 0)
            alone = part & ((hosts == hosts[:, b, None]).sum(1) == 1)
            most = np.where(alone, room - 1, room)  # a part is smaller than its pool
            high[:, b] = np.minimum(high[:, b], (space.sizes[rows[:, b]] <= most[:, None]).sum(1) - 1)
        keep &= (low <= high).all(1)
        return which[keep], low[keep], high[keep]


@dataclass(eq=False)
class _Front:
    """The boxes of a space that are not ruled out yet, a row each."""

    space: Space
    which: Array
    """Arrangement."""
    low: Array
    """Numbers of the least sizes, [box, block]."""
    high: Array
    bound: Array
    """Seconds that no plan of the box is below."""

    def keep(self, these: Array) -> None:
        self.which, self.low, self.high, self.bound = self.which[these], self.low[these], self.high[these], self.bound[these]

    def add(self, which: Array, low: Array, high: Array, bound: Array) -> None:
        self.which, self.bound = np.concatenate([self.which, which]), np.concatenate([self.bound, bound])
        self.low, self.high = np.concatenate([self.low, low]), np.concatenate([self.high, high])


def _halves(space: Space, which: Array, low: Array, high: Array) -> tuple[Array, Array, Array]:
    """Split every box in two along its widest range of sizes."""
    rows, at = np.arange(len(which)), np.argmax(high - low, axis=1)
    middle = (low[rows, at] + high[rows, at]) // 2
    left, right = high.copy(), low.copy()
    left[rows, at], right[rows, at] = middle, middle + 1
    return np.concatenate([which, which]), np.concatenate([low, right]), np.concatenate([left, high])


def _count_sizes(space: Space, pools: Sequence[tuple[int, int]]) -> int:
    """Count the sizes that pools of (kind, number of parts) can have; a sum of sizes is counted by multiplying polynomials."""
    count = 1
    for number, kind in enumerate(space.kinds):
        own_pools = [parts for k, parts in pools if k == number]
        most = kind.num_devices
        steps = np.zeros(most + 1)
        steps[kind.sizes] = 1
        ways: Array = np.zeros(most + 1)
        ways[0] = 1
        for parts in own_pools:
            inside: Array = np.zeros(most + 1)
            inside[0] = 1
            for _ in range(parts):
                inside = np.convolve(inside, steps)[: most + 1]
            # A pool of s devices holds every choice of parts that add up to at most s, which is what the cumulative sum counts.
            ways = np.convolve(ways, steps * np.cumsum(inside))[: most + 1]
        count *= round(float(np.sum(ways)))
    return count
