"""An independent, naive planner: enumerates every plan of the stated family and replays each call by call, in plain Python.

It shares nothing with ``hfsdk.planner.search.search`` but the recorded calls, the performance model's ``method_costs`` and
``role_bytes``: set partitions, pools, layouts, rows of ranks, memory and the order of calls are all done again, slowly.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from hfsdk.core.errors import LayoutError
from hfsdk.core.layout import Layout
from hfsdk.core.protocol import balanced_split
from hfsdk.core.spec import DTYPE_BYTES
from hfsdk.planner.perf.memory import CPU_PROCESS_BYTES, GPU_PROCESS_BYTES, role_bytes
from hfsdk.resharding.boxes import vllm_boxes


def partitions(items):
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest):
        for n in range(len(smaller)):
            yield [*smaller[:n], [first, *smaller[n]], *smaller[n + 1 :]]
        yield [[first], *smaller]


class BruteForce:
    """All plans of roles on a homogeneous cluster, as (seconds, who shares with whom, sizes, layouts)."""

    def __init__(self, roles, recorded, cluster, perf):
        self.roles, self.recorded, self.cluster, self.perf = roles, recorded, cluster, perf
        self.node_size = len(cluster.node_devices[0])
        self.device = cluster.devices[0]
        self.on_cpu = self.device.name.startswith("cpu")
        self.room = self.device.memory_bytes - (CPU_PROCESS_BYTES if self.on_cpu else GPU_PROCESS_BYTES)
        self.memo = {}

    # -- the family

    def plans(self):
        possible = []
        for role in self.roles:
            methods = [c.method for c in self.recorded.calls if c.role == role.name]
            if role.kind == "actor" and "generate" in methods:
                possible.append((role.name, "rollout"))
            if role.kind == "critic" and role.trainable and "compute_values" in methods:
                possible.append((role.name, "inference"))
        for chosen in product([False, True], repeat=len(possible)):
            yield from self.of_mode([p for p, there in zip(possible, chosen, strict=True) if there])

    def of_mode(self, shadows):
        items = {}
        for role in self.roles:
            items[role.name] = replace(role, rollout=None) if (role.name, "rollout") in shadows else role
        for base, ending in shadows:
            role = next(r for r in self.roles if r.name == base)
            shadow = replace(role, name=f"{base}.{ending}", optimizer=None, shadow_of=base)
            shadow = replace(shadow, train=None) if ending == "rollout" else replace(shadow, train=Layout(), auto=())
            items[shadow.name] = shadow
        for blocks in partitions(list(items)):
            if any(items[name].shadow_of in block for block in blocks for name in block):
                continue
            movable = [b for b, block in enumerate(blocks) if all(self.frozen(items[n]) for n in block)]
            fixed = [b for b in range(len(blocks)) if b not in movable]
            for homes in product([None, *fixed], repeat=len(movable)):
                hosts = dict(zip(movable, homes, strict=True))
                inside = [h for h in homes if h is not None]
                if any(inside.count(h) == 1 for h in inside):
                    continue
                yield from self.of_grouping(items, blocks, hosts)

    @staticmethod
    def frozen(role):
        return role.optimizer is None and role.rollout is None and not role.shadow_of

    def sizes(self):
        below = [1 << i for i in range(10) if 1 << i < self.node_size]
        if len(self.cluster.node_devices) == 1 and self.node_size not in (1, 2, 4, 8, 16):
            below = list(range(1, self.node_size))
        return below + [self.node_size * n for n in range(1, len(self.cluster.node_devices) + 1)]

    def within(self, tp, size):
        """Whether groups of ``tp`` devices never cross nodes."""
        return tp <= self.node_size if size <= self.node_size else self.node_size % tp == 0

    def of_grouping(self, items, blocks, hosts):
        for sizes in product(self.sizes(), repeat=len(blocks)):
            devices = self.devices(sizes, hosts)
            if devices is not None:
                yield from self.of_placement(items, blocks, hosts, sizes, devices)

    def devices(self, sizes, hosts):
        """First fit, largest first; parts the same way inside their host."""

        def fill(nodes, wanted):
            found = {}
            for b in sorted(wanted, key=lambda b: (-sizes[b], b)):
                if sizes[b] >= self.node_size:
                    whole = [n for n in nodes if len(n) == self.node_size][: sizes[b] // self.node_size]
                    if len(whole) < sizes[b] // self.node_size:
                        return None
                    found[b] = [d for n in whole for d in n]
                else:
                    home = next((n for n in nodes if len(n) >= sizes[b]), None)
                    if home is None:
                        return None
                    found[b] = home[: sizes[b]]
                nodes = [[d for d in n if d not in found[b]] for n in nodes]
            return found

        nodes, first = [], 0
        for node in self.cluster.node_devices:
            nodes.append(list(range(first, first + len(node))))
            first += len(node)
        found = fill(nodes, [b for b in range(len(sizes)) if hosts.get(b) is None])
        if found is None:
            return None
        for host in {h for h in hosts.values() if h is not None}:
            parts = [b for b, h in hosts.items() if h == host]
            inside = [[d for d in n if d in found[host]] for n in nodes]
            placed = fill([n for n in inside if n], parts)
            if placed is None or any(sizes[b] >= sizes[host] for b in parts):
                return None
            found |= placed
        return found

    # -- one placement

    def of_placement(self, items, blocks, hosts, sizes, devices):
        names = list(items)
        home = {name: b for b, block in enumerate(blocks) for name in block}
        options = [self.options(items[name], sizes[home[name]]) for name in names]
        shadowed = {r.shadow_of for r in items.values() if r.shadow_of}
        for chosen in product(*options):
            held = dict(zip(names, chosen, strict=True))
            if not self.fits(blocks, hosts, {n: held[n][1] for n in names}):
                continue
            layouts = {n: held[n][0] for n in names}
            seconds = self.replay(items, home, hosts, devices, layouts, shadowed)
            grouping = frozenset(
                (frozenset(block), frozenset(blocks[hosts[b]]) if hosts.get(b) is not None else frozenset())
                for b, block in enumerate(blocks)
            )
            yield seconds, grouping, tuple(sizes[home[n]] for n in names), layouts

    def options(self, role, size):
        key = role.name, role.rollout is None, role.shadow_of, size
        if key not in self.memo:
            found = []
            for train in self.trains(role, size):
                for rollout in self.rollouts(role, size):
                    laid = replace(role, train=train, rollout=rollout)
                    held = role_bytes(laid, size, on_cpu=self.on_cpu, longest=self.longest(role))
                    if held.resident + held.working <= self.room:
                        found.append((laid, (held.resident, held.working, held.base, self.base_key(laid))))
            self.memo[key] = found
        return self.memo[key]

    @staticmethod
    def base_key(role):
        """Of what nothing trains: which numbers a device of the pool has of it, rank by rank."""
        trained = role.train is None or (role.lora is None and (role.trainable or role.shadow_of or role.kind == "reward"))
        if trained:
            return None
        mesh = role.train.mesh(role.rollout.tp if role.rollout else 1)
        places = (mesh.coordinates(rank) for rank in mesh.ranks)
        return role.model, role.dtype, role.train.of_weights, tuple((at.tp, at.pp, at.dp * role.train.cp + at.cp) for at in places)

    def trains(self, role, size):
        if role.train is None:
            return [None]
        if "train" not in role.auto:
            try:
                return [role.train.fill(size)]
            except LayoutError:
                return []
        grid = product(range(1, size + 1), repeat=4)
        layouts = [
            Layout(tp=t, pp=p, dp=size // t // p // c, ep=e, cp=c)
            for t, p, e, c in grid if size % (t * p * e * c) == 0 and self.within(t, size) and (c == 1 or self.may_share(role, c))
        ]  # fmt: skip
        return [x for x in layouts if self.ok(x, role)]

    def longest(self, role):
        name = role.shadow_of or role.name
        calls = [c for c in self.recorded.calls if c.role == name and c.method != "generate"]
        return max((int(n) for c in calls for n in c.prompts + c.responses), default=0)

    def may_share(self, role, cp):
        """Whether so many ranks each have half a micro-batch of a row that is longer than one."""
        longest, most = self.longest(role), role.micro_batch_tokens
        return "cp" in role.auto and longest > most and longest / cp >= most / 2

    def rollouts(self, role, size):
        if role.rollout is None:
            return [None]
        if "rollout" not in role.auto:
            try:
                return [role.rollout.fill(size)]
            except LayoutError:
                return []
        grid = product(range(1, size + 1), range(1, size + 1))
        layouts = [Layout(tp=t, dp=size // t, ep=e) for t, e in grid if size % (t * e) == 0 and self.within(t, size)]
        return [x for x in layouts if self.ok(x, role)]

    @staticmethod
    def ok(layout, role):
        try:
            layout.check_model(role.model)
        except LayoutError:
            return False
        return True

    def fits(self, blocks, hosts, held):
        for b, block in enumerate(blocks):
            mine = [held[n] for n in block]
            if hosts.get(b) is not None:
                mine += [held[n] for n in blocks[hosts[b]]]
            bases = {}
            for _, _, base, key in mine:
                bases.setdefault(key, []).append(base)
            twice = sum(sum(found) - max(found) for key, found in bases.items() if key is not None)
            if sum(one[0] for one in mine) - twice + max(one[1] for one in mine) > self.room:
                return False
        return True

    # -- the order of calls

    def replay(self, items, home, hosts, devices, layouts, shadowed):
        clock, host_clock, ready = {}, 0.0, {}
        changed = dict.fromkeys(items, True)
        lent = dict.fromkeys(items, False)  # on CPU in mode "shared": the rollout has the weights

        def free(b):
            related = [q for q in clock if q == b or hosts.get(q) == b or hosts.get(b) == q]
            return max([clock[q] for q in related], default=0.0)

        for call in self.recorded.calls:
            start = max([ready[i] for i in call.inputs if i in ready], default=0.0)
            if call.on_host:
                host_clock = max(host_clock, start) + self.perf.host_task(call.num_rows, call.num_read_tokens)
                ready[call.id] = host_clock
                continue
            shadow = {"generate": f"{call.role}.rollout", "compute_values": f"{call.role}.inference"}.get(call.method, "")
            who = shadow if shadow in items else call.role
            extra = 0.0
            if who == shadow and changed[who]:
                b = home[call.role]
                clock[b] = free(b) + self.perf.dispatch_s + self.priced("export_weights", layouts[call.role], devices[b], [])
                start = max(start, clock[b])
                extra = self.sync(layouts[who], devices[home[who]], devices[b])
            both = layouts[who].rollout is not None and layouts[who].lora is None
            shares = self.on_cpu and both and layouts[who].rollout_options.cpu_weights == "shared"
            stale = call.method == "generate" and who == call.role and (changed[who] or (shares and not lent[who]))
            if shares and call.method != "generate" and lent[who]:
                extra += self.priced("to_training", layouts[who], devices[home[who]], [])
            lent[who] = call.method == "generate"
            if call.method == "generate" or who == shadow:
                changed[who] = False
            b = home[who]
            took = self.perf.dispatch_s + extra + self.call_seconds(call, layouts[who], devices[b], stale)
            clock[b] = ready[call.id] = max(start, free(b)) + took
            if call.method in ("update", "step"):
                changed |= {n: True for n in items if n == call.role or items[n].shadow_of == call.role}
        return max([host_clock, *clock.values()])

    def sync(self, shadow, mine, theirs):
        from hfsdk.planner.perf.memory import rollout_parameters

        far = len({self.cluster.node_of(d) for d in (*mine, *theirs)}) > 1
        link = self.cluster.inter_node if far else self.cluster.intra_node
        count = shadow.model.num_parameters()
        if shadow.rollout:
            count = rollout_parameters(shadow.model, shadow.rollout.tp, shadow.rollout.ep)
        if shadow.lora is not None:
            boxes = vllm_boxes(shadow.learned, shadow.rollout.tp, 0) if shadow.rollout else []
            count = sum(box.numel for box in boxes) or shadow.learned.num_parameters()
        return link.latency_s + count * DTYPE_BYTES[shadow.dtype] / link.bandwidth

    def call_seconds(self, call, role, devices, stale):
        key = call.id, role.name, role.train, role.rollout, role.shadow_of, len(devices), stale
        if key not in self.memo:
            self.memo[key] = self._call_seconds(call, role, devices, stale)
        return self.memo[key]

    def _call_seconds(self, call, role, devices, stale):
        total = call.prompts + call.responses
        if call.method == "update":
            seconds = 0.0
            for rows in call.mini_batches:
                shards = [rows[s] for s in balanced_split(total[rows], role.train.dp)]
                pairs = [(call.prompts[s], call.responses[s]) for s in shards]
                seconds += max(self.priced("forward_backward", role, devices, [p]) for p in pairs)
                seconds += self.priced("step", role, devices, pairs[:1])
            return seconds
        if call.method == "generate":
            shards = balanced_split(call.prompts, len(devices) // role.rollout.tp)
            steps = [[(call.prompts[s], lengths[s]) for s in shards] for lengths in (call.responses, *call.drawn)]
            slowest = [max(self.priced(call.method, role, devices, [p], stale) for p in pairs) for pairs in steps]
            return sum(slowest) / len(slowest)
        pairs = [(call.prompts[s], call.responses[s]) for s in balanced_split(total, role.train.dp)]
        return max(self.priced(call.method, role, devices, [p], stale) for p in pairs)

    def priced(self, method, role, devices, rows, stale=False):
        empty = np.zeros(0, dtype=np.int64)
        return sum(self.perf.method_costs(method, role, self.cluster, devices, rows or [(empty, empty)], stale)[0].values())
