"""What a session shows of itself, as plain data: ``LivePlacement``, ``Traces``, the session's card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from hfsdk.core.checks import checked
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.comparison import Comparison
from hfsdk.core.errors import OptionError
from hfsdk.core.layout import Coordinates
from hfsdk.core.methods import SHADOWED
from hfsdk.core.placement import Placement
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import DeviceStatus
from hfsdk.core.text import printable
from hfsdk.core.trace import Span, Trace, Traced
from hfsdk.engine.calls import queries as q
from hfsdk.planner.perf.memory import DeviceMemory, device_bytes
from hfsdk.session.client import ControllerClient
from hfsdk.session.live import LiveStep
from hfsdk.session.role_book import RoleBook

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from hfsdk.viz.frame import Picture


class LivePlacement:
    """Who lives where, with planned and measured memory. In a notebook it draws itself, live while calls run."""

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
        """By device what each role holds there, frozen weights that several begin with once."""
        assert self.placement is not None
        return {one.device: one for one in device_bytes(self._placed.values(), self.placement, self._cluster)}

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per role and device: role, pool, device, rank, coordinates, replica, and the bytes of the view."""
        import pandas as pd

        rows = [{"role": role["name"], "pool": role["pool"], **shard} for role in self.view()["roles"] for shard in role["shards"]]
        return pd.DataFrame(rows)

    def _statuses(self) -> Sequence[DeviceStatus]:
        if self._client.closed or self._predicted:  # a simulated device measures nothing
            return ()
        found: Sequence[DeviceStatus] = self._client.send(q.Devices())
        return found

    def _role(self, role: RoleSpec, states: Mapping[str, tuple[str, int]], measured: Mapping[int, DeviceStatus]) -> dict[str, Any]:
        state, updates = states.get(
            role.name, ("closed" if self._client.closed else "declared", -1 if role.shadow_of else 0)
        )  # fmt: skip
        known = updates >= 0 and role.shadow_of in states
        data: dict[str, Any] = {
            "name": role.name, "kind": f"shadow of {role.shadow_of}" if role.shadow_of else role.kind,
            "model": str(role.model), "lora": str(role.lora or ""), "dtype": role.dtype, "pool": self._pool(role),
            "train": str(role.train) if role.train else None, "rollout": str(role.rollout) if role.rollout else None,
            "state": state, "shadow_of": role.shadow_of, "updates": updates if updates >= 0 else None,
            "behind": states[role.shadow_of][1] - updates if known else None,
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
        from hfsdk.viz.placement.view import PlacementPicture, placement_view

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
        """Only the call spans."""
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
        from hfsdk.viz.timeline.view import TimelinePicture, timeline_view

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
                asked = ":".join("" if part is None else str(part) for part in (step.start, step.stop))
                raise OptionError(f"[{asked}] has no step; the session has {self._steps_there}")
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
    known: Mapping[str, tuple[RoleSpec, str, int]] = client.send(q.Roles())
    roles = []
    for handle in book:
        role = handle.role
        _, state, updates = known.get(role.name, (role, "declared", 0))
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
    held = dict.fromkeys(name for s in shards for name in ([s["base_with"]] if s["base_with"] else s["base_for"]))
    return f"base shared with {', '.join(held)}" if held else ""


def _model(role: RoleSpec) -> str:
    return f"{role.model}, {role.lora}" if role.lora else str(role.model)


def _updates(count: int) -> str:
    return f"{count} update{'s' * (count != 1)}"


def _words(role: Mapping[str, Any]) -> list[str]:
    """Say of a role of the picture's data what it is: model, layouts, and what a shadow does for it."""
    words = [role["kind"]] if role["shadow_of"] else [f"{role['model']} {role['dtype']}", role["lora"]]
    words += [f"'{role['train']}'"] if role["train"] else []
    words += [f"rollout '{role['rollout']}'"] if role["rollout"] else []
    return words + [f"{method} in {shadow}" for method, shadow in role["elsewhere"].items()]


def _ending(shadow: RoleSpec) -> str:
    return shadow.name.rpartition(".")[2]


def _role_states(client: ControllerClient) -> dict[str, tuple[str, int]]:
    known = client.send(q.Roles()).items()
    return {name: ("closed" if client.closed else state, updates) for name, (_, state, updates) in known}


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
