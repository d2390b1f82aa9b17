"""The views of a session, as plain data: ``LivePlacement``, ``Traces``, the session's card."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from hfsdk.core.batch import Batch, refs_of
from hfsdk.core.checks import Name, checked, is_whole, shown
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.comparison import Comparison
from hfsdk.core.dataflow import Call, CallFlow, Dataflow, Edge
from hfsdk.core.errors import OptionError
from hfsdk.core.layout import Coordinates
from hfsdk.core.methods import SHADOWED
from hfsdk.core.placement import Placement
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import DeviceStatus
from hfsdk.core.text import printable
from hfsdk.core.trace import KEPT_STEPS, Span, Trace, Traced
from hfsdk.engine.calls import queries as q
from hfsdk.planner.perf.memory import DeviceMemory, device_bytes
from hfsdk.session.client import ControllerClient
from hfsdk.session.role_book import RoleBook

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from hfsdk.viz.frame import Picture


# -- the step of a picture, which may still be running


class LiveStep:
    """One step of a session, or the one that is current whenever somebody looks."""

    def __init__(self, client: ControllerClient, step: int | None = None) -> None:
        self._client, self._step = client, step

    @property
    def step(self) -> int:
        """The step's number.

        Raises:
            OptionError: the step is so long ago that its calls and spans are no longer kept.
        """
        if self._step is None:
            current: int = self._client.send(q.CurrentStep())
            return current
        first: int = self._client.send(q.FirstStep())
        if self._step < first:
            raise OptionError(
                f"step {self._step} is no longer kept: a session keeps calls and spans of its last {KEPT_STEPS} steps (now from "
                f"step {first} on). session.history has every step's numbers; session.trace[k].snapshot() keeps a trace for good."
            )
        return self._step

    @property
    def kept_as(self) -> str:
        """The name of the session where it is kept; else ``""``."""
        return self._client.kept_as

    @property
    def _steps_there(self) -> str:
        """The steps that the session keeps, as messages say them."""
        first: int = self._client.send(q.FirstStep())
        last: int = self._client.send(q.CurrentStep())
        return f"{f'step {last}' if first == last else f'steps {first} to {last}'} ([-1] is the last)"

    @property
    def running(self) -> bool:
        """Whether a call is under way, or of the current step a run that makes more."""
        if self._client.closed:
            return False
        if self._step is None and self._client.run_goes_on():
            return True
        calls: Sequence[Call] = self._client.send(q.RunningCalls())
        return any(self._step in (None, call.step) for call in calls)


class LivePlacement:
    """The roles on their devices, with planned and measured memory. In a notebook it draws itself, live while calls run."""

    def __init__(
        self,
        client: ControllerClient,
        book: RoleBook,
        placement: Placement | None,
        placed: Mapping[str, RoleSpec],
        cluster: ClusterSpec,
        title: str,
        predicted: bool,
        before: Mapping[str, Any] | None = None,
    ) -> None:
        self._client, self._book, self._cluster, self._title, self._predicted = client, book, cluster, title, predicted
        self.placement, self._placed, self._before = placement, dict(placed), before

    @property
    def running(self) -> bool:
        """Whether a call is under way, or a run that makes more."""
        return not self._client.closed and (self._client.run_goes_on() or bool(self._client.send(q.RunningCalls())))

    @property
    def kept_as(self) -> str:
        """The name of the session where it is kept; else ``""``."""
        return self._client.kept_as

    def view(self) -> dict[str, Any]:
        """Return plain data: nodes, devices, pools, roles and shadows with their shards; bytes as planned and as measured.

        ``before`` is the same as it was before the last move, or ``None``.
        """
        measured = {s.device: s for s in self._statuses()}
        states = _role_states(self._client)
        models = [self._placed.get(h.name, h.role) for h in self._book.models]
        shadows = [spec for spec in self._placed.values() if spec.shadow_of]
        nodes, devices, number = [], {}, 0
        pool_of = {d: pool.name for pool in (self.placement.pools if self.placement else ()) for d in pool.devices}
        for i, node in enumerate(self._cluster.node_devices):
            nodes.append({"name": f"node {i}", "devices": list(range(number, number + len(node)))})
            for spec in node:
                status = measured.get(number)
                devices[number] = {
                    "name": spec.name, "memory_bytes": spec.memory_bytes, "used_bytes": status.used_bytes if status else None,
                    "pool": pool_of.get(number, ""), "pid": status.pid if status else None,
                }  # fmt: skip
                number += 1
        return {
            "title": self._title, "nodes": nodes, "devices": devices,
            "pools": {pool.name: list(pool.devices) for pool in (self.placement.pools if self.placement else ())},
            "roles": [self._role(spec, states, measured) for spec in (*models, *shadows)],
            "predicted": self._predicted, "before": self._before,
        }  # fmt: skip

    @cached_property
    def _planned(self) -> Mapping[int, DeviceMemory]:
        """The bytes of each role by device; frozen weights that several begin with count once."""
        assert self.placement is not None
        return {memory.device: memory for memory in device_bytes(self._placed.values(), self.placement, self._cluster)}

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per role and device: role, pool, device, rank, coordinates, replica, and the bytes of the view."""
        import pandas as pd

        rows = [{"role": role["name"], "pool": role["pool"], **shard} for role in self.view()["roles"] for shard in role["shards"]]
        return pd.DataFrame(rows)

    def _statuses(self) -> Sequence[DeviceStatus]:
        if self._client.closed or self._predicted:  # a simulated device measures nothing
            return ()
        statuses: Sequence[DeviceStatus] = self._client.send(q.Devices())
        return statuses

    def _role(self, role: RoleSpec, states: Mapping[str, tuple[str, int]], measured: Mapping[int, DeviceStatus]) -> dict[str, Any]:
        state, updates = states.get(
            role.name, ("closed" if self._client.closed else "declared", -1 if role.shadow_of else 0)
        )  # fmt: skip
        is_synced = updates >= 0 and role.shadow_of in states
        data: dict[str, Any] = {
            "name": role.name, "kind": f"shadow of {role.shadow_of}" if role.shadow_of else role.kind,
            "model": str(role.model), "lora": str(role.lora or ""), "dtype": role.dtype, "pool": self._pool(role),
            "train": str(role.train) if role.train else None, "rollout": str(role.rollout) if role.rollout else None,
            "state": state, "shadow_of": role.shadow_of, "updates": updates if updates >= 0 else None,
            "behind": states[role.shadow_of][1] - updates if is_synced else None,
            "elsewhere": {SHADOWED[_ending(s)].name: s.name for s in self._placed.values() if s.shadow_of == role.name},
            "shards": self._shards(role, measured) if self._pool(role) else [],
        }  # fmt: skip
        return {**data, "weights": _weights(data), "base": _base(data["shards"])}

    def _pool(self, role: RoleSpec) -> str:
        return self.placement.roles.get(role.name, "") if self.placement and role.name in self._placed else ""

    def _shards(self, role: RoleSpec, measured: Mapping[int, DeviceStatus]) -> list[dict[str, Any]]:
        assert self.placement is not None
        pool = self.placement.pool_of(role.name)
        tp = role.rollout.tp if role.rollout else 1
        mesh = role.train.mesh(tp) if role.train else None
        shards = []
        for rank, device in enumerate(pool.devices):
            estimate = self._planned[device].roles[role.name]
            planned = estimate.resident + estimate.asleep  # while it generates
            at = mesh.coordinates(rank) if mesh else Coordinates(rank % tp, 0, rank // tp)
            status = measured.get(device)
            shards.append({
                "device": device, "rank": rank, "tp": at.tp, "pp": at.pp, "dp": at.dp,
                "rollout_replica": rank // tp if role.rollout else None, "planned_bytes": planned,
                "measured_bytes": status.roles.get(role.name) if status else None,
                "offloaded_bytes": status.offloaded.get(role.name) if status else None,
                "asleep_bytes": status.asleep.get(role.name) if status else None, "base_with": estimate.base_with,
                "base_for": [other for name, *others in self._planned[device].bases if name == role.name for other in others],
            })  # fmt: skip
        return shards

    def _nodes(self, devices: Sequence[int]) -> str:
        """Say which nodes some devices are on, where there are several."""
        nodes = sorted({self._cluster.node_of(device) for device in devices})
        return f" of {_numbers('node', nodes)}" if len(self._cluster.node_devices) > 1 else ""

    def _picture_(self) -> Picture:
        from hfsdk.viz.pictures.placement import PlacementPicture, placement_view

        return PlacementPicture(placement_view(self.view()))

    def _ipython_display_(self) -> None:
        from hfsdk.viz.hooks import show_placement

        show_placement(self)

    def __repr__(self) -> str:
        data = self.view()
        lines = [f"Placement of {data['title']}: {self._cluster}"]
        for pool, devices in data["pools"].items():
            where = _numbers("device", devices) + self._nodes(devices)
            lines.append(f"  pool {pool!r} on {where}" + _used(data["devices"], devices))
        for role in data["roles"]:
            where = f"pool {role['pool']!r}" if role["pool"] else "not placed"
            words = [*_words(role), where, role["state"], role["weights"], role["base"]]
            lines.append(f"  {role['name']}: {', '.join(w for w in words if w)}{_bytes(role)}")
        return "\n".join(lines)


class LiveTrace(LiveStep):
    """The spans of a step, growing while it runs. In a notebook it draws itself."""

    def snapshot(self) -> Trace:
        """Return the spans so far; running ones have no duration yet."""
        step = self.step
        spans: Sequence[Span] = self._client.send(q.SpansOf(step))
        return Trace.of(spans, title=f"step {step}")

    def __iter__(self) -> Iterator[Span]:
        return iter(self.snapshot())

    def __len__(self) -> int:
        return len(self.snapshot())

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans so far."""
        return self.snapshot().spans

    @property
    def calls(self) -> Trace:
        """The call spans alone."""
        return self.snapshot().calls

    @property
    def duration_s(self) -> float:
        """Seconds from the first start to the last end."""
        return self.snapshot().duration_s

    def critical_path(self) -> Trace:
        """Return the calls that decided how long it took (see ``Trace.critical_path``)."""
        return self.snapshot().critical_path()

    def compare(self, other: Traced | Mapping[str, float], *, names: tuple[str, str] | None = None) -> Comparison:
        """Hold it against another trace, measured or predicted, or against a guess: ``compare({"generate": 4.0})``.

        Raises:
            OptionError: a guess that names no call of this trace or is not a number of seconds, or another type.
        """
        return self.snapshot().compare(other, names=names)

    def drain(self) -> pd.DataFrame:
        """Return how every generation ran dry (see ``Trace.drain``)."""
        return self.snapshot().drain()

    def device_seconds(self) -> tuple[float, float]:
        """Return (device-seconds in all, those of them idle)."""
        return self.snapshot().device_seconds()

    def idle(self) -> dict[int, float]:
        """Return, for every device, the share of the time in which it ran no span."""
        return self.snapshot().idle()

    def overlap(self) -> dict[tuple[str, ...], float]:
        """Return for how many seconds which pools were at work at once."""
        return self.snapshot().overlap()

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per span."""
        return self.snapshot().to_pandas()

    @checked
    def to_perfetto(self, path: str | Path) -> Path:
        """Write a file that Perfetto and chrome://tracing open."""
        return self.snapshot().to_perfetto(path)

    def _picture_(self) -> Picture:
        from hfsdk.viz.pictures.timeline import TimelinePicture, timeline_view

        return TimelinePicture(timeline_view(self.snapshot()))

    def _ipython_display_(self) -> None:
        from hfsdk.viz.hooks import show_trace

        show_trace(self)

    def __repr__(self) -> str:
        trace = self.snapshot()
        lines = [repr(trace) + (" (running)" if self.running else "")]
        for span in trace.calls:
            took = "running" if span.duration_s is None else f"{span.duration_s:.3f} s"
            lines.append(f"  {(span.start_ns - trace.start_ns) / 1e9:8.3f} s  {span.role}.{span.method:<20} {took}")
        return printable("\n".join(lines))


class Traces(LiveTrace):
    """The current step's trace; ``[k]`` is the trace of step k, the steps counted from 0 (``[-1]`` is the last).

    ``[2:5]`` is one trace of steps 2, 3 and 4, ``[:]`` of all that are kept: the last :data:`~hfsdk.core.trace.KEPT_STEPS` steps.
    Asking for an older one raises OptionError; ``session.history`` has every step's numbers.
    """

    @overload
    def __getitem__(self, step: int) -> LiveTrace: ...

    @overload
    def __getitem__(self, step: slice) -> Trace: ...

    @checked
    def __getitem__(self, step: int | slice) -> LiveTrace | Trace:
        last = self.step
        if isinstance(step, slice):
            first: int = self._client.send(q.FirstStep())
            numbers = range(last + 1)[step]
            if not numbers:
                key = ":".join("" if part is None else str(part) for part in (step.start, step.stop))
                raise OptionError(f"[{key}] has no step; the session has {self._steps_there}")
            if step.start is None and step.step is None:
                numbers = range(max(first, numbers.start), numbers.stop)
            spans = [s for number in numbers for s in LiveTrace(self._client, number).spans]
            return Trace.of(spans, _numbers("step", list(numbers)))
        number = step + last + 1 if step < 0 else step
        if not 0 <= number <= last:
            raise OptionError(f"there is no step {step}; the session has {self._steps_there}")
        live = LiveTrace(self._client, number)
        _ = live.step  # raises for one that is no longer kept
        return live


def session_view(
    name: str, kind: str, cluster: ClusterSpec, client: ControllerClient, book: RoleBook, messages: Sequence[str]
) -> dict[str, Any]:
    """Return the session's card as plain data."""
    known_roles: Mapping[str, tuple[RoleSpec, str, int]] = client.send(q.Roles())
    roles = []
    for handle in book:
        role = handle.role
        _, state, updates = known_roles.get(role.name, (role, "declared", 0))
        function = f"{role.function.name}@{role.function.version}" if role.function else ""
        roles.append({
            "name": role.name, "kind": role.kind, "model": _model(role) if role.model else f"function {function}",
            "train": str(role.train) if role.train else None, "rollout": str(role.rollout) if role.rollout else None,
            "dtype": role.dtype if role.model else None, "version": updates,
            "state": "closed" if client.closed else "ready" if role.function else state,
        })  # fmt: skip
    running = not client.closed and bool(client.send(q.RunningCalls()))
    state = "closed" if client.closed else "working" if running else "idle"
    return {"name": name, "runtime": kind, "devices": str(cluster), "state": state, "roles": roles, "messages": list(messages)}


def _weights(role: Mapping[str, Any]) -> str:
    """Say how many updates a role's weights have seen or, of a shadow's, how old they are."""
    updates, behind = role["updates"], role["behind"]
    if not role["shadow_of"]:
        return _updates(updates) if updates else ""
    if updates is None or behind is None:
        return "no weights yet"
    return f"fresh ({_updates(updates)})" if behind == 0 else f"{_updates(behind)} behind" if behind > 0 else "of another version"


def _base(shards: Sequence[Mapping[str, Any]]) -> str:
    """Say with which roles another has its frozen weights, which are on a device once."""
    sharers = dict.fromkeys(name for s in shards for name in ([s["base_with"]] if s["base_with"] else s["base_for"]))
    return f"base shared with {', '.join(sharers)}" if sharers else ""


def _model(role: RoleSpec) -> str:
    return f"{role.model}, {role.lora}" if role.lora else str(role.model)


def _updates(count: int) -> str:
    return f"{count} update{'s' * (count != 1)}"


def _words(role: Mapping[str, Any]) -> list[str]:
    """Describe a role of the picture's data: model, layouts, and what a shadow does for it."""
    words = [role["kind"]] if role["shadow_of"] else [f"{role['model']} {role['dtype']}", role["lora"]]
    words += [f"'{role['train']}'"] if role["train"] else []
    words += [f"rollout '{role['rollout']}'"] if role["rollout"] else []
    return words + [f"{method} in {shadow}" for method, shadow in role["elsewhere"].items()]


def _ending(shadow: RoleSpec) -> str:
    return shadow.name.rpartition(".")[2]


def _role_states(client: ControllerClient) -> dict[str, tuple[str, int]]:
    roles = client.send(q.Roles()).items()
    return {name: ("closed" if client.closed else state, updates) for name, (_, state, updates) in roles}


def _numbers(word: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    run = list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{word}s {numbers[0]}-{numbers[-1]}" if run else f"{word}s " + ", ".join(map(str, numbers))


def _used(devices: Mapping[int, Mapping[str, Any]], numbers: Sequence[int]) -> str:
    used = [devices[d]["used_bytes"] for d in numbers if devices[d]["used_bytes"] is not None]
    return f", {max(used) / 1e9:.2f} of {devices[numbers[0]]['memory_bytes'] / 1e9:.2f} GB used" if used else ""


def _bytes(role: Mapping[str, Any]) -> str:
    shards = role["shards"]
    if not shards:
        return ""
    measured = [s["measured_bytes"] for s in shards if s["measured_bytes"] is not None]
    offloaded = [s["offloaded_bytes"] for s in shards if s["offloaded_bytes"] is not None]
    words = f", {_size(max(s['planned_bytes'] for s in shards))} planned"
    words += (f", {_size(max(measured))} measured" if measured else "") + " per device"
    words += f", {_size(max(offloaded))} in host memory now" if offloaded else ""
    asleep = max((s["asleep_bytes"] or 0 for s in shards), default=0)
    return words + (f", rollout asleep ({asleep / 1e9:.2f} GB not there)" if asleep else "")


def _size(num_bytes: int) -> str:
    """Return bytes in GB, or in MB where those would read as none."""
    return f"{num_bytes / 1e6:.2f} MB" if 0 < num_bytes < 5e6 else f"{num_bytes / 1e9:.2f} GB"


# -- ``session.dataflow``: the calls of a step and what flows between them, growing while they run


class LiveDataflow(LiveStep):
    """The calls of a step and what flows between them. In a notebook it draws itself, live while calls run.

    ``snapshot()`` is the :class:`~hfsdk.core.dataflow.Dataflow` as it is now; what is asked of this object is asked of that.
    """

    def __init__(self, client: ControllerClient, cluster: ClusterSpec, step: int | None = None) -> None:
        super().__init__(client, step)
        self._cluster = cluster

    def snapshot(self) -> Dataflow:
        """Return the dataflow as it is now."""
        step = self.step
        flows: tuple[CallFlow, ...] = self._client.send(q.FlowsOf(step))
        nodes = tuple(node for node, devices in enumerate(self._cluster.node_devices) for _ in devices)
        passed: int = self._client.send(q.ControllerBytes())
        return Dataflow.of(tuple(flows), step, nodes=nodes, controller_bytes=passed)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.snapshot())

    def __len__(self) -> int:
        return len(self.snapshot().calls)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls so far."""
        return self.snapshot().calls

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The columns that flow from call to call."""
        return self.snapshot().edges

    @checked
    def edge(self, source: int, target: int) -> Edge:
        """Return the edge between two calls, given their ids.

        Raises:
            OptionError: there is none.
        """
        return self.snapshot().edge(source, target)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per call."""
        return self.snapshot().to_pandas()

    def edges_to_pandas(self) -> pd.DataFrame:
        """Return one row per edge, with bytes."""
        return self.snapshot().edges_to_pandas()

    @checked
    def transfer_to_pandas(self, source: int, target: int) -> pd.DataFrame:
        """Return one row per pair of ranks between which something flowed from one call to another.

        Raises:
            OptionError: nothing flows between them.
        """
        return self.snapshot().transfer_to_pandas(source, target)

    def view(self) -> dict[str, Any]:
        """Return plain data for a picture."""
        return self.snapshot().view()

    def to_text(self) -> str:
        """Return one line per call."""
        return self.snapshot().to_text()

    def _picture_(self) -> Picture:
        from hfsdk.viz.pictures.dataflow import DataflowPicture, dataflow_view

        return DataflowPicture(dataflow_view(self.view()))

    def _ipython_display_(self) -> None:
        from hfsdk.viz.hooks import show_dataflow

        show_dataflow(self)

    def __repr__(self) -> str:
        return repr(self.snapshot()) + (" (running)" if self.running else "")


class Dataflows(LiveDataflow):
    """The current step's dataflow; ``[k]`` is that of step k, the steps counted from 0 (``[-1]`` is the last)."""

    def __getitem__(self, step: int) -> LiveDataflow:
        if not is_whole(step):
            raise OptionError(
                f"dataflow[k] is that of one step, e.g. dataflow[-1]; got {shown(step)}. session.trace[2:5] spans several steps."
            )
        last = self.step
        number = step + last + 1 if step < 0 else step
        if not 0 <= number <= last:
            raise OptionError(f"there is no step {step}; the session has {self._steps_there}")
        live = LiveDataflow(self._client, self._cluster, number)
        _ = live.step  # raises for one that is no longer kept
        return live


# -- ``session.memory``: the bytes on every device through one step, planned and measured

PARTS = ("weights", "gradients", "optimizer", "rollout", "kv_cache")
"""The uses of a worker's tensors; ``rollout`` is the generating engine's copy, beyond the trainer's weights."""
ASLEEP = "asleep_bytes"
"""The bytes of a rollout that sleeps: its weights and cache, which are not there, and are counted in nothing else."""
GAUGES = ("rss_bytes", "allocated_bytes", "reserved_bytes")
"""Resident in host memory; torch's tensors on a GPU; what torch holds of the GPU."""


class MemoryUse:
    """Bytes per device through one step: the tensors after every call, the process all along, and what was planned.

    Of a simulated step all of it is predicted, over virtual time. In a notebook it draws itself. Of a measured one the
    numbers were taken when spans ended; what a call needed in between is in the peaks of the process only as far as a span ended
    there.
    """

    def __init__(
        self, trace: Trace, roles: Iterable[RoleSpec], placement: Placement | None, cluster: ClusterSpec, title: str
    ) -> None:
        self.trace, self._cluster, self._title = trace, cluster, title
        self._predicted = trace.source == "predicted"
        planned = () if placement is None else device_bytes(roles, placement, cluster)
        self._planned = {estimate.device: estimate for estimate in planned}

    def view(self) -> dict[str, Any]:
        """Return plain data: for every device planned parts, the tensors after each call, and the gauges at each span's end."""
        spans: dict[int, list[tuple[int, Span]]] = {number: [] for number in self._planned}
        for row, span in enumerate(self.trace.spans):
            if span.device is not None:
                spans.setdefault(span.device, []).append((row, span))
        return {
            "title": self._title, "duration_s": self.trace.duration_s, "predicted": self._predicted,
            "devices": [self._device(number, of_device) for number, of_device in sorted(spans.items())],
        }  # fmt: skip

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per device and call: start_s, end_s, the parts in bytes (``PARTS``, ``ASLEEP``), the gauges at its end."""
        import pandas as pd

        rows = [{"device": d["device"], **call} for d in self.view()["devices"] for call in d["calls"]]
        parts = (*(f"{part}_bytes" for part in PARTS), ASLEEP)
        return pd.DataFrame(rows, columns=["device", "row", "call", "start_s", "end_s", *parts, *GAUGES])

    def _device(self, number: int, spans: Sequence[tuple[int, Span]]) -> dict[str, Any]:
        estimate, origin = self._planned.get(number), self.trace.start_ns
        calls, samples = [], []
        for row, span in spans:
            if span.end_ns is None or span.predicted != self._predicted:
                continue
            end_s, gauges = (span.end_ns - origin) / 1e9, {k: span.attrs.get(k) for k in GAUGES}
            if self._predicted and span.parent:  # a stretch: what it needs it needs from its beginning
                samples.append([(span.start_ns - origin) / 1e9, *gauges.values()])
            if any(gauge is not None for gauge in gauges.values()):
                samples.append([end_s, *gauges.values()])
            if not span.parent and any(f"{p}_bytes" in span.attrs for p in PARTS):
                parts = {f"{p}_bytes": int(span.attrs.get(f"{p}_bytes", 0)) for p in PARTS}
                when = {"start_s": (span.start_ns - origin) / 1e9, "end_s": end_s}
                asleep = {ASLEEP: int(span.attrs.get(ASLEEP, 0))}
                calls.append({"row": row, "call": f"{span.role}.{span.method}", **when, **parts, **asleep, **gauges})
        spec = self._cluster.devices[number]
        samples = [sample for sample in samples if any(value is not None for value in sample[1:])]
        return {
            "device": number, "name": spec.name, "limit_bytes": spec.memory_bytes,
            "planned": None if estimate is None else _planned(estimate), "calls": calls, "samples": sorted(samples),
            "bases": [] if estimate is None else [list(names) for names in estimate.bases],
        }  # fmt: skip

    def _picture_(self) -> Picture:
        from hfsdk.viz.pictures.memory import MemoryPicture, memory_view

        return MemoryPicture(memory_view(self.view()))

    def _repr_html_(self) -> str | None:
        from hfsdk.viz.hooks import html_of

        return html_of(self)

    def __repr__(self) -> str:
        lines = [f"{self._title}: bytes per device, in GB"]
        for device in self.view()["devices"]:
            planned, calls = device["planned"], device["calls"]
            words = [] if planned is None else [f"{planned['asked'] / 1e9:.2f} planned at most"]
            if calls:
                last = calls[-1]
                words += [f"{p} {last[f'{p}_bytes'] / 1e9:.2f}" for p in PARTS if last[f"{p}_bytes"]]
                words += [f"asleep {last[ASLEEP] / 1e9:.2f}"] if last[ASLEEP] else []
                most = max(value for sample in device["samples"] for value in sample[1:] if value is not None)
                what = "predicted with all that calls need" if self._predicted else "the process"
                words.append(f"{what} {most / 1e9:.2f} at most")
            words += [f"one base for {', '.join(names)}" for names in device["bases"]]
            lines.append(f"  device {device['device']}: " + (", ".join(words) or "nothing planned, nothing measured"))
        return "\n".join(lines)


def _planned(estimate: DeviceMemory) -> Mapping[str, int]:
    """Return the parts at the fullest moment, in the order of ``PARTS``, what the greediest call needs besides, and their sum.

    A rollout that sleeps is there at that moment only if it is its generating that makes it the fullest.
    """
    greediest = max((r.working for r in estimate.roles.values()), default=0)
    awake = next((name for name, r in estimate.roles.items() if r.asleep and r.asleep == greediest), "")
    roles = [
        r if not r.asleep or name == awake else replace(r, rollout_weights=0, kv_cache=0) for name, r in estimate.roles.items()
    ]
    parts = {
        "process": estimate.process, **{part: sum(r.stays(part) for r in roles) for part in ("weights", "gradients", "optimizer")},
        "rollout": sum(r.rollout_weights for r in roles), "kv_cache": sum(r.kv_cache for r in roles),
    }  # fmt: skip
    return {**parts, "working": max(0, estimate.asked - sum(parts.values())), "asked": estimate.asked}


# -- the batches that the user can come back to, by name or number


class BatchRegistry(Mapping[str, Batch]):
    """The batches that variables of the notebook, or script, refer to; in an attached session those of the kernel before, too.

    ``session.batches["rollout"]`` is the batch that the variable ``rollout`` refers to, ``session.batches[17]`` the one to which
    call 17 added a column last. A batch of an earlier kernel stays here, and its columns in the cluster, until a variable of its
    name refers to another one, or ``session.batches.drop("rollout")``.
    """

    def __init__(self, client: ControllerClient) -> None:
        self._client = client
        self._earlier: dict[str, Batch] = {}

    def take(self, batches: Mapping[str, Batch]) -> None:
        """Hold what the variables of an earlier kernel referred to."""
        self._earlier.update(batches)

    @checked
    def drop(self, name: Name) -> None:
        """Let a batch of an earlier kernel go, where there is one of this name."""
        self._earlier.pop(name, None)

    def _all(self) -> dict[str, Batch]:
        ask = getattr(sys.modules.get("IPython"), "get_ipython", None)  # another thread may be about to import it
        shell = ask() if ask is not None else None
        names: Mapping[str, Any] = shell.user_ns if shell is not None else vars(sys.modules["__main__"])
        now = {
            name: value for name, value in list(names.items())
            if type(value) is Batch and not name.startswith("_") and refs_of(value).client is self._client and value.columns
        }  # fmt: skip
        for name in now:
            self._earlier.pop(name, None)
        return {**self._earlier, **now}

    def __getitem__(self, key: str | int) -> Batch:
        """Return a batch by its variable's name, or by the number of the call that wrote last.

        Raises:
            OptionError: there is none.
        """
        batches = self._all()
        if isinstance(key, str) and key in batches:
            return batches[key]
        for batch in batches.values():
            if type(key) is int and number_of(batch) == key:
                return batch
        there = ", ".join(f"{name!r} ({number_of(batch)})" for name, batch in batches.items()) or "none"
        raise OptionError(f"there is no batch {shown(key)}; the session has {there}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self._all()

    def __repr__(self) -> str:
        lines = [f"{name} ({number_of(b)}): {len(b)} rows of {', '.join(b.columns)}" for name, b in self._all().items()]
        return "\n".join(lines) or "no batches"


def number_of(batch: Batch) -> int:
    """Return the number of the call that wrote a batch's newest column."""
    return max(ref.call_id for ref in refs_of(batch).by_name.values())
