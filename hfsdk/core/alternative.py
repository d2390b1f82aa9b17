"""What a plan is made of: its calls, what devices hold, and the placements that it is compared with (``Alternative``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hfsdk.core.layout import Layout
from hfsdk.core.placement import Placement
from hfsdk.core.trace import Span

Layouts = Mapping[str, Layout]
"""Use of a layout, ``"train"`` (or inference of frozen models) and ``"rollout"`` -> the filled layout."""


@dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """One call of the step, when it is predicted to run, and where."""

    id: int
    role: str
    method: str
    phase: str
    pool: str
    """Name of its pool; empty for a CPU task."""
    devices: tuple[int, ...]
    start_s: float
    parts: tuple[tuple[str, float, float], ...]
    """Of the slowest rank: (name of the span, seconds after the call's start, seconds)."""
    seconds: float
    after: tuple[int, ...] = ()
    """The calls whose columns or weights it reads."""
    num_rows: int = 0
    mini_batches: int = 0
    """Of an update, its optimizer steps in one epoch."""

    @property
    def name(self) -> str:
        """Its role and method, e.g. ``"actor.generate"``."""
        return f"{self.role}.{self.method}"

    @property
    def end_s(self) -> float:
        """When it is over, in seconds from the step's start."""
        return self.start_s + self.seconds

    def spans(self) -> list[Span]:
        """Return the predicted span of the call and those of its parts on every device."""
        about: dict[str, Any] = {
            "role": self.role, "call_id": self.id, "method": self.method, "pool": self.pool, "phase": self.phase, "predicted": True,
        }  # fmt: skip
        attrs: dict[str, float | int | str] = {"rows": self.num_rows, "state": "planned"}
        if self.after:
            attrs["after"] = " ".join(map(str, self.after))
        spans = [Span(name=self.method, start_ns=round(self.start_s * 1e9), duration_s=self.seconds,
                      attrs=attrs, **about)]  # fmt: skip
        for name, shift, seconds in self.parts:
            start_ns = round((self.start_s + shift) * 1e9)
            spans += [
                Span(name=name, start_ns=start_ns, duration_s=seconds, device=device, rank=rank, **about)
                for rank, device in enumerate(self.devices)
            ]
        return spans


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """What is predicted to lie on each device of some that are alike."""

    pool: str
    devices: tuple[int, ...]
    device_name: str
    exists: int
    """Bytes the device has."""
    process: int
    """Bytes of the worker process itself."""
    roles: Mapping[str, Mapping[str, int]]
    """Role -> what (``weights``, ``gradients``, ``optimizer``, ``rollout_weights``, ``kv_cache``, ``activations``, ``logits``,
    of ``weights`` the ``base`` that roles here may have together, of the rollout's what is ``asleep`` unless it generates, and in
    sum ``resident`` and ``working``) -> bytes."""

    @property
    def asked(self) -> int:
        """All that stays, and what the greediest role's call needs while it runs."""
        working = max((role["working"] for role in self.roles.values()), default=0)
        return self.process + sum(role["resident"] for role in self.roles.values()) + working


@dataclass(frozen=True, kw_only=True, repr=False)
class Alternative:
    """A placement with its best layouts: what the plan is compared with."""

    title: str
    """Who shares devices with whom, e.g. ``"actor reference (64) | critic reward (64)"``."""
    preset: str
    """The preset that it is one of (``"colocate"``, ``"split"``, ...), or ``""``."""
    placement: Placement
    layouts: Mapping[str, Layouts]
    seconds: float
    """Of a step; where responses vary in length, of the run's first one."""
    band: tuple[float, float]
    """Seconds, low and high: the model's stated relative error of every kind of call, all of them off the same way."""
    calls: Mapping[str, float]
    """Kind of call, e.g. ``"actor.generate"`` -> its seconds in the step."""
    facts: Mapping[str, Mapping[str, float]]
    """Role -> ``bubble_s`` (seconds of a step in which its pipeline stages wait for each other), ``tp_bytes`` (bytes that a rank
    sends in tensor-parallel all-reduces in a step), ``dp_bytes`` (in gradient reductions)."""
    peak_bytes: int
    """Of the fullest device."""
    why: str = ""
    """Why it lost, in words; empty for the plan itself."""
    timeline: tuple[PlannedCall, ...] = ()
    """Of a runner-up, the calls of one step, as in :attr:`Plan.calls`."""
    memory: tuple[PlannedMemory, ...] = ()
    """Of a runner-up, what every device holds, as in :attr:`Plan.memory`."""
    too_close: bool = False
    """Whether the model cannot tell it from the plan: the difference is within the error of the calls that differ, or within what
    the lengths of one step make of it."""
    steps_s: tuple[float, ...] = ()
    """Where responses vary in length, the seconds of the run's first steps; plans are compared by their mean."""

    @property
    def mean_s(self) -> float:
        """Seconds by which plans are compared: of a step, in the mean over the lengths of several."""
        return sum(self.steps_s) / len(self.steps_s) if self.steps_s else self.seconds

    def __repr__(self) -> str:
        return f"Alternative({line_of(self)})" if self.why else f"Alternative({self.title}: {seconds_text(self.seconds)})"


@dataclass(frozen=True, kw_only=True)
class Hinge:
    """The constant of the model on which a decision hangs: where two plans would take equally long."""

    constant: str
    """A field of ``hf.PerfModel``."""
    now: float
    at: float

    def __str__(self) -> str:
        return f"as fast as the plan where {self.constant} is {self.at:.3g}, not {self.now:.3g}"


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A named placement in which nothing fits: by how much, and where."""

    preset: str
    title: str
    over_bytes: int
    """Bytes by which the device misses, with the least greedy layouts."""
    where: str
    """E.g. ``"each device of pool 'actor' (32 x A100-80GB)"``."""

    @property
    def why(self) -> str:
        """The same in words."""
        return f"out of memory by {self.over_bytes / 1e9:.1f} GB on {self.where}"


def alternative_view(one: Alternative) -> dict[str, Any]:
    """Return a plan as plain data."""
    return {
        "title": one.title, "preset": one.preset, "seconds": one.seconds, "mean_s": one.mean_s, "band": list(one.band),
        "why": one.why,
        "too_close": one.too_close, "peak_bytes": one.peak_bytes, "calls": dict(one.calls),
        "facts": {role: dict(numbers) for role, numbers in one.facts.items()},
        "layouts": {role: {use: str(layout) for use, layout in by_use.items()} for role, by_use in one.layouts.items()},
        "pools": [{
            "name": pool.name, "devices": list(pool.devices), "within": pool.within,
            "roles": [role for role, home in one.placement.roles.items() if home == pool.name],
        } for pool in one.placement.pools],
        "timeline": calls_view(one.timeline), "memory": memory_view(one.memory),
    }  # fmt: skip


def calls_view(calls: Iterable[PlannedCall]) -> list[dict[str, Any]]:
    """Return calls as plain data."""
    return [{
        "id": c.id, "name": c.name, "role": c.role, "method": c.method, "phase": c.phase, "pool": c.pool,
        "start_s": c.start_s, "seconds": c.seconds, "after": list(c.after),
        "parts": [{"name": name, "start_s": c.start_s + shift, "seconds": s} for name, shift, s in c.parts],
    } for c in calls]  # fmt: skip


def memory_view(memory: Iterable[PlannedMemory]) -> list[dict[str, Any]]:
    """Return what devices hold as plain data."""
    return [{
        "pool": m.pool, "devices": list(m.devices), "device_name": m.device_name, "exists": m.exists, "asked": m.asked,
        "process": m.process, "roles": {name: dict(parts) for name, parts in m.roles.items()},
    } for m in memory]  # fmt: skip


def line_of(one: Alternative) -> str:
    """Return a plan in a line: its preset, who shares devices with whom, seconds, and why it lost."""
    name = f"{one.preset}: " if one.preset else ""
    return f"{name}{one.title}: {seconds_text(one.seconds)}; {one.why}" + (" (too close to call)" if one.too_close else "")


def seconds_text(seconds: float) -> str:
    """Return seconds with three digits, e.g. ``"0.784 s"`` or ``"1,234 s"``."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"
