"""What a session shows of itself, as plain data: ``PlacementPicture``, ``Traces``, the dataflow, the session's card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hfsdk.dataflow import Call, Dataflow, Edge
from hfsdk.engine import messages as m
from hfsdk.errors import OptionError
from hfsdk.models import ModelHandle
from hfsdk.placement import Placement
from hfsdk.planner.memory import role_bytes
from hfsdk.roles import RoleSpec
from hfsdk.runtime import DeviceStatus
from hfsdk.session.client import ControllerClient
from hfsdk.session.roles import RoleBook
from hfsdk.spec import ClusterSpec
from hfsdk.trace import Span, Trace

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd


class PlacementPicture:
    """Who lives where, with planned and measured memory. In a notebook it draws itself, live while calls run."""

    def __init__(
        self, client: ControllerClient, book: RoleBook, placement: Placement | None, cluster: ClusterSpec, title: str = ""
    ) -> None:
        self._client, self._book, self._cluster, self._title = client, book, cluster, title
        self.placement = placement

    @property
    def running(self) -> bool:
        """Whether a call is under way."""
        return not self._client.closed and bool(self._client.send(m.Look("running")))

    def view(self) -> dict[str, Any]:
        """Return plain data: nodes, devices, pools, roles with their shards; bytes as planned and as measured."""
        measured = {s.device: s for s in self._statuses()}
        states = _role_states(self._client)
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
            "roles": [self._role(h, states, measured) for h in self._book if h.spec is not None],
            "predicted": self._cluster_is_simulated,
        }  # fmt: skip

    @property
    def _cluster_is_simulated(self) -> bool:
        return all(s.pid is None for s in self._statuses())

    def _statuses(self) -> Sequence[DeviceStatus]:
        if self._client.closed:
            return ()
        found: Sequence[DeviceStatus] = self._client.send(m.Look("devices"))
        return found

    def _role(self, handle: ModelHandle, states: Mapping[str, str], measured: Mapping[int, DeviceStatus]) -> dict[str, Any]:
        role = handle.role
        placed = self.placement is not None and role.name in self.placement.roles
        return {
            "name": role.name, "kind": role.kind, "model": str(role.model), "dtype": role.dtype,
            "pool": self.placement.roles[role.name] if placed and self.placement else "",
            "train": str(role.train), "rollout": str(role.rollout) if role.rollout else None,
            "state": states.get(role.name, "declared"), "shards": self._shards(role, measured) if placed else [],
        }  # fmt: skip

    def _shards(self, role: RoleSpec, measured: Mapping[int, DeviceStatus]) -> list[dict[str, Any]]:
        assert self.placement is not None
        assert role.train is not None
        pool = self.placement.pool_of(role.name)
        layout = role.train.fill(pool.size)
        tp = role.rollout.tp if role.rollout else 1
        mesh = layout.mesh(tp)
        on_cpu = self._cluster.devices[0].name == "cpu"
        planned = role_bytes(role, pool.size, on_cpu=on_cpu).resident
        shards = []
        for rank, device in enumerate(pool.devices):
            at = mesh.coordinates(rank)
            status = measured.get(device)
            shards.append({
                "device": device, "rank": rank, "tp": at.tp, "pp": at.pp, "dp": at.dp,
                "rollout_replica": rank // tp if role.rollout else None, "planned_bytes": planned,
                "measured_bytes": status.roles.get(role.name) if status else None,
            })  # fmt: skip
        return shards

    def _nodes(self, devices: Sequence[int]) -> str:
        """Say which nodes some devices are on, where there are several."""
        nodes = sorted({self._cluster.node_of(device) for device in devices})
        return f" of {_numbers('node', nodes)}" if len(self._cluster.node_devices) > 1 else ""

    def __repr__(self) -> str:
        data = self.view()
        lines = [f"Placement of {data['title']}: {self._cluster}"]
        for pool, devices in data["pools"].items():
            where = _numbers("device", devices) + self._nodes(devices)
            lines.append(f"  pool {pool!r} on {where}" + _used(data["devices"], devices))
        for role in data["roles"]:
            rollout = f", rollout '{role['rollout']}'" if role["rollout"] else ""
            where = f"pool {role['pool']!r}" if role["pool"] else "not placed"
            words = [f"{role['model']} {role['dtype']}", f"'{role['train']}'{rollout}", where, role["state"]]
            lines.append(f"  {role['name']}: {', '.join(words)}{_bytes(role)}")
        return "\n".join(lines)


class LiveTrace:
    """The spans of a step, growing while it runs. In a notebook it draws itself."""

    def __init__(self, client: ControllerClient, step: int | None = None) -> None:
        self._client = client
        self._step = step

    @property
    def step(self) -> int:
        """The step's number."""
        current: int = self._client.send(m.Look("step"))
        return current if self._step is None else self._step

    @property
    def running(self) -> bool:
        """Whether a call is under way."""
        if self._client.closed:
            return False
        calls: Sequence[Call] = self._client.send(m.Look("running"))
        return any(self._step in (None, call.step) for call in calls)

    def snapshot(self) -> Trace:
        """Return the spans so far; running ones have no duration yet."""
        step = self.step
        spans: Sequence[Span] = self._client.send(m.Look("spans", step=step))
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
        """Only the call spans."""
        return self.snapshot().calls

    @property
    def duration_s(self) -> float:
        """Seconds from the first start to the last end."""
        return self.snapshot().duration_s

    def idle(self) -> dict[int, float]:
        """Return, for every device, the share of the time in which it ran no span."""
        return self.snapshot().idle()

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per span."""
        return self.snapshot().to_pandas()

    def to_perfetto(self, path: str | Path) -> Path:
        """Write a file that Perfetto and chrome://tracing open."""
        return self.snapshot().to_perfetto(path)

    def __repr__(self) -> str:
        trace = self.snapshot()
        lines = [repr(trace) + (" (running)" if self.running else "")]
        for span in trace.calls:
            took = "running" if span.duration_s is None else f"{span.duration_s:.3f} s"
            lines.append(f"  {(span.start_ns - trace.start_ns) / 1e9:8.3f} s  {span.role}.{span.method:<20} {took}")
        return "\n".join(lines)


class Traces(LiveTrace):
    """The current step's trace; ``[k]`` is the trace of step k, the steps counted from 0 (``[-1]`` is the last)."""

    def __getitem__(self, step: int) -> LiveTrace:
        last = self.step
        number = step + last + 1 if step < 0 else step
        if not 0 <= number <= last:
            raise OptionError(f"there is no step {step}; the session has steps 0 to {last}")
        return LiveTrace(self._client, number)


def dataflow_of(client: ControllerClient, step: int) -> Dataflow:
    """Return a step's calls and the columns between them."""
    calls: Sequence[Call] = client.send(m.Look("calls", step=step))
    by_id = {call.id: call for call in calls}
    edges = []
    for call in calls:
        for source in call.inputs:
            if source in by_id:
                columns = tuple(name for name in call.reads if name in by_id[source].writes)
                edges.append(Edge(source, call.id, columns))
    return Dataflow(tuple(calls), tuple(edges))


def session_view(
    name: str, kind: str, cluster: ClusterSpec, client: ControllerClient, book: RoleBook, messages: Sequence[str]
) -> dict[str, Any]:
    """Return the session's card as plain data."""
    known: Mapping[str, tuple[RoleSpec, str, int]] = {} if client.closed else client.send(m.Look("roles"))
    roles = []
    for handle in book:
        role = handle.role
        _, state, updates = known.get(role.name, (role, "declared", 0))
        function = f"{role.function.name}@{role.function.version}" if role.function else ""
        roles.append({
            "name": role.name, "kind": role.kind, "model": str(role.model) if role.model else f"function {function}",
            "train": str(role.train) if role.train else None, "rollout": str(role.rollout) if role.rollout else None,
            "dtype": role.dtype if role.model else None, "version": updates,
            "state": "closed" if client.closed else "ready" if role.function else state,
        })  # fmt: skip
    running = not client.closed and bool(client.send(m.Look("running")))
    state = "closed" if client.closed else "working" if running else "idle"
    return {"name": name, "runtime": kind, "devices": str(cluster), "state": state, "roles": roles, "messages": list(messages)}


def _role_states(client: ControllerClient) -> dict[str, str]:
    if client.closed:
        return {}
    return {name: state for name, (_, state, _) in client.send(m.Look("roles")).items()}


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
    words = f", {max(s['planned_bytes'] for s in shards) / 1e9:.2f} GB planned"
    return words + (f", {max(measured) / 1e9:.2f} GB measured" if measured else "") + " per device"
