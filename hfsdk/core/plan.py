"""``Workload`` and ``Plan``: the work of a step and its best placement, which ``hfsdk.planner.search.search`` finds.

A plan says which roles share which devices, in which layouts, and what is predicted of one step: when each call runs, what every
device holds, what it costs. With it come the runners-up, each with why it lost, and the placements that do not fit into memory::

    plan = session.plan(hf.PPO(), hf.Workload(prompts=1024, prompt_tokens=1024, response_tokens=1024))
    plan.seconds, plan.placement, plan.layouts["actor"], plan.trace
    print(plan.why())
    session.place(plan)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

from hfsdk.core.checks import Count, NamedFields, Within, check_fields, check_options, shown
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import OptionError
from hfsdk.core.field_texts import documented
from hfsdk.core.layout import Layout
from hfsdk.core.placement import Placement
from hfsdk.core.response_lengths import LENGTH_KINDS
from hfsdk.core.roles import RoleSpec
from hfsdk.core.trace import Span, Trace

if TYPE_CHECKING:
    import pandas as pd


MOST_SAMPLES = 1_000_000
"""Samples (prompts times responses each) of the largest step that is planned."""

Samples = Annotated[int, Within(1, MOST_SAMPLES)]


@runtime_checkable
class Lengths(Protocol):
    """A distribution of response lengths that draws them itself, such as ``ResponseLengths``."""

    def draw(self, sampling: Any, seed: int, positions: Any, copies: Any) -> Any:
        """Return the response length of every sample, [rows]."""
        ...


@documented
@dataclass(frozen=True, kw_only=True)
class Workload(NamedFields):
    """The size of one step's work. ``None`` leaves an option as the algorithm has it."""

    prompts: Samples = 1024
    """Prompts of one step."""
    prompt_tokens: Count = 1024
    """Tokens of every prompt."""
    response_tokens: Count = 1024
    """Most tokens of a response."""
    response_lengths: str | Lengths = "full"
    """``"full"``: every response has ``response_tokens``; ``"uniform"``, ``"lognormal"``, or an ``hf.ResponseLengths``."""
    n: Samples | None = None
    """Responses per prompt."""
    mini_batches: Samples | None = None
    """Optimizer steps per epoch."""
    epochs: Annotated[int, Within(1, 1000)] | None = None
    """Passes over the batch."""
    steps: Count = 1
    """Steps of the whole run, for its costs."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prompts * (self.n or 1) > MOST_SAMPLES:
            raise OptionError(
                f"a workload has at most {MOST_SAMPLES:,} samples; prompts={self.prompts:,} with n={self.n} make "
                f"{self.prompts * (self.n or 1):,}"
            )
        lengths = self.response_lengths
        if isinstance(lengths, type) or (isinstance(lengths, str) and lengths not in LENGTH_KINDS):
            raise OptionError(
                f"a workload's response_lengths are one of {', '.join(map(repr, LENGTH_KINDS))} or a ResponseLengths; "
                f"got response_lengths={shown(lengths)}"
            )
        if self.mini_batches is not None and self.mini_batches > self.prompts * (self.n or 1):
            raise OptionError(
                f"mini_batches={self.mini_batches} needs at least as many samples; {counted(self.prompts, 'prompt')} with "
                f"n={self.n or 1} give {self.prompts * (self.n or 1)}. Use fewer mini-batches or more prompts."
            )

    @property
    def num_tokens(self) -> int:
        """Most tokens of one step: prompts and responses."""
        return self.prompts * (self.n or 1) * (self.prompt_tokens + self.response_tokens)

    def __str__(self) -> str:
        lengths = self.response_lengths if isinstance(self.response_lengths, str) else type(self.response_lengths).__name__
        up_to = "" if lengths == "full" else f" at most ({lengths})"
        copies = f", {self.n} responses each" if self.n and self.n > 1 else ""
        prompts = f"{counted(self.prompts, 'prompt')} of {counted(self.prompt_tokens, 'token')}"
        return f"{prompts}{copies}, responses of {self.response_tokens:,}{up_to}"


def counted(number: int, what: str) -> str:
    """Return e.g. ``"1 prompt"`` or ``"1,024 prompts"``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A value of a number of the workload from which on another placement is best."""

    field: str
    """``"response_tokens"`` or ``"prompts"``."""
    value: int
    """The first value that was looked at (a power of two apart) at which it is so."""
    title: str
    seconds: float
    before: str
    """The placement that is best one value before."""

    def __str__(self) -> str:
        what = counted(self.value, self.field.removesuffix("s").replace("_", " "))
        return f"from {what} on, {self.title} wins ({seconds_text(self.seconds)} a step)"


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The extent of a search: its plans, its counts and its duration."""

    family: str
    """The plans among which this one is the best there is, in words."""
    num_considered: int
    """Placements with sizes in that family; with layouts there are many more."""
    num_pruned: int
    """Placements of ``num_considered`` that a bound ruled out without looking at their layouts."""
    num_layouts: int
    """(role, pool size, layouts) whose seconds were predicted."""
    seconds: float
    """Wall clock of the search, of which ``tables_s`` went into predictions of single calls."""
    tables_s: float = 0.0
    record_s: float = 0.0
    """Wall clock of running the algorithm's step once, to see its calls."""


Again = Callable[..., "Plan"]


@documented
@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best placement and layouts of a family, with what is predicted of a step; ``session.place(plan)`` applies it.

    Everything is a prediction of the performance model. ``plan.why()`` says in words why it is the best, ``to_pandas()`` lists
    it with the runners-up.
    """

    algorithm: str
    """Name of the algorithm whose step was planned."""
    cluster: ClusterSpec
    """The devices that it is for."""
    workload: Workload
    """The work of one step."""
    best: Alternative
    """The placement and layouts that were chosen, with their seconds and cost."""
    calls: tuple[PlannedCall, ...]
    """The calls of one step on a timeline that starts at 0, in order of submission."""
    memory: tuple[PlannedMemory, ...]
    """Bytes on every device, by role and kind."""
    runners_up: tuple[Alternative, ...] = ()
    """The next best, each the best of its own way of sharing devices, in order."""
    rejected: tuple[Rejected, ...] = ()
    """Presets that do not fit."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Role -> its model's name; functions are left out."""
    roles: Mapping[str, RoleSpec] = field(default_factory=dict, repr=False)
    """Role -> its declaration when it was planned; ``session.place`` refuses a plan for roles that are declared otherwise since."""
    notices: tuple[str, ...] = ()
    """Changes that this plan needs, in words: what :meth:`again` and ``what_if`` assume and the session has not declared."""
    band_words: str = ""
    """The meaning of :attr:`band`, and how often it held timings that it was not made of."""
    search: Searched
    """How many placements and layouts were looked at, and how long that took."""
    again: Again | None = field(default=None, repr=False, compare=False)
    """``again(workload=..., cluster=...)``: the same question with another workload or cluster, answered anew."""
    find_hinges: Callable[[], tuple[Hinge | None, ...]] | None = field(default=None, repr=False, compare=False)
    """A function that finds :attr:`hinges`."""

    def __getstate__(self) -> dict[str, Any]:
        fields = {k: v for k, v in self.__dict__.items() if k not in ("trace", "sensitivity", "hinges")}
        return {**fields, "again": None, "find_hinges": None}

    # -- the plan itself

    @property
    def placement(self) -> Placement:
        """The devices of every role."""
        return self.best.placement

    @property
    def layouts(self) -> Mapping[str, Layouts]:
        """Role -> its layouts, filled."""
        return self.best.layouts

    @property
    def seconds(self) -> float:
        """Predicted seconds of one step; where responses vary in length, of the run's first one."""
        return self.best.seconds

    @property
    def band(self) -> tuple[float, float]:
        """Low and high of ``seconds``."""
        return self.best.band

    @property
    def too_close(self) -> bool:
        """Whether a runner-up may as well be the faster one: too close to call."""
        return any(other.too_close for other in self.runners_up)

    @cached_property
    def trace(self) -> Trace:
        """The predicted spans of one step, on every device."""
        return Trace.of([span for call in self.calls for span in call.spans()], f"plan for {self.algorithm}")

    @cached_property
    def sensitivity(self) -> tuple[Turn, ...]:
        """The response lengths and prompts from which on another placement wins: both halved and doubled, each planned anew.

        Computed when it is first looked at (some ten plans); empty for a plan that was loaded from a file.
        """
        return tuple(_turns(self)) if self.again is not None else ()

    @cached_property
    def hinges(self) -> tuple[Hinge | None, ...]:
        """The constant of the model that decides against each runner-up, and the value at which it would be as fast as the plan.

        The constant that has to change least, layouts kept; ``None`` where none does it alone within a factor of four. Computed
        when it is first looked at; empty for a plan that was loaded from a file.
        """
        return () if self.find_hinges is None else self.find_hinges()

    # -- money

    @property
    def device_hours(self) -> float:
        """Device-hours of one step: the whole cluster, idle devices included."""
        return self.seconds * self.cluster.num_devices / 3600

    @property
    def cost_per_step(self) -> float:
        """Cost of one step, in the unit of ``cluster.price_per_device_hour``."""
        return self.device_hours * self.cluster.price_per_device_hour

    @property
    def cost(self) -> float:
        """Cost of the workload's whole run of ``steps`` steps."""
        return self.cost_per_step * self.workload.steps

    @property
    def num_idle(self) -> int:
        """Devices that the plan leaves idle."""
        return self.cluster.num_devices - len({d for pool in self.placement.pools for d in pool.devices})

    # -- looking

    def why(self) -> str:
        """Return in words what was chosen, what it was compared with, why the others lost, and on which constant that hangs."""
        lines = [repr(self), ""]
        hinges = self.hinges or (None,) * len(self.runners_up)
        for number, (other, hinge) in enumerate(zip(self.runners_up, hinges, strict=True), start=2):
            lines.append(f"{number}. {line_of(other)}" + ("" if hinge is None else f"; {hinge}"))
        lines += [f"-  {r.preset}: {r.title}: {r.why}" for r in self.rejected]
        if "sensitivity" in self.__dict__:
            lines += ["", *map(str, self.sensitivity)]
        return "\n".join([*lines, "", *([self.band_words] if self.band_words else []), self.search.family])

    def to_pandas(self) -> pd.DataFrame:
        """Return one row for the plan and each runner-up.

        Returns:
            placement, seconds, ``mean_s`` (by which they are ranked), low_s, high_s, cost, peak_bytes, why, each call.
        """
        import pandas as pd

        rows = []
        for rank, plan in enumerate((self.best, *self.runners_up), start=1):
            layouts = {f"{role} {use}": str(x) for role, by_use in plan.layouts.items() for use, x in by_use.items()}
            price = self.cluster.price_per_device_hour * self.cluster.num_devices / 3600
            rows.append({
                "rank": rank, "placement": plan.title, "preset": plan.preset, "seconds": plan.seconds, "mean_s": plan.mean_s,
                "low_s": plan.band[0], "high_s": plan.band[1], "cost": plan.seconds * price, "peak_bytes": plan.peak_bytes,
                "too_close": plan.too_close, "why": plan.why, **layouts,
                **{f"{name}_s": seconds for name, seconds in plan.calls.items()},
            })  # fmt: skip
        return pd.DataFrame(rows).set_index("rank")

    def view(self) -> dict[str, Any]:
        """Return plain data for display; what is computed on demand (``sensitivity``) is there if it has been."""
        return {
            "kind": "plan", "algorithm": self.algorithm, "cluster": str(self.cluster), "num_devices": self.cluster.num_devices,
            "workload": {**asdict(replace(self.workload, response_lengths="full")), "text": str(self.workload)},
            "models": dict(self.models), "seconds": self.seconds, "band": list(self.band), "too_close": self.too_close,
            "device_hours": self.device_hours, "cost_per_step": self.cost_per_step, "cost": self.cost, "num_idle": self.num_idle,
            "price_per_device_hour": self.cluster.price_per_device_hour,
            "nodes": [len(node) for node in self.cluster.node_devices],
            "best": alternative_view(self.best),
            "calls": calls_view(self.calls), "memory": memory_view(self.memory),
            "runners_up": [alternative_view(a) for a in self.runners_up],
            "rejected": [{**asdict(r), "why": r.why} for r in self.rejected],
            "sensitivity": [{**asdict(t), "text": str(t)} for t in self.__dict__.get("sensitivity", ())],
            "search": asdict(self.search), "notices": list(self.notices), "band_words": self.band_words,
        }  # fmt: skip

    def __repr__(self) -> str:
        low, high = self.band
        took, band = seconds_text(self.seconds), f"{seconds_text(low)} to {seconds_text(high)}"
        lines = [f"Plan({self.algorithm} on {self.cluster}: {took} a step ({band})"]
        lines.append(f"  {self.workload}")
        for pool in self.placement.pools:
            where = f" within {pool.within}" if pool.within else ""
            own_roles = [name for name, home in self.placement.roles.items() if home == pool.name]
            lines.append(f"  {pool.name}, {counted(pool.size, 'device')}{where}: " + "; ".join(map(self._role, own_roles)))
        if steps := self.best.steps_s:
            lines.append(f"  {seconds_text(self.best.mean_s)} in the mean of {len(steps)} steps, whose responses differ in length")
        if self.num_idle:
            lines.append(f"  {counted(self.num_idle, 'device')} idle")
        if self.cost_per_step:
            whole = f", {money_text(self.cost)} for {counted(self.workload.steps, 'step')}" if self.workload.steps > 1 else ""
            lines.append(f"  costs {money_text(self.cost_per_step)} a step{whole}, in the unit of the price of a device-hour")
        lines += [f"  {notice}" for notice in self.notices]
        return "\n".join(lines) + ")" + (" too close to call" if self.too_close else "")

    def _role(self, name: str) -> str:
        uses = {"train": "", "rollout": "rollout "}
        words = ", ".join(f"{uses[use]}{layout}" for use, layout in self.layouts[name].items())
        return f"{name} {words}"


def money_text(amount: float) -> str:
    """Return an amount with two decimals or, below one, three digits."""
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.3g}"


FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""A plan's sensitivity is looked at where a number of its workload is so many times as large."""


def _turns(plan: Plan) -> list[Turn]:
    """Plan anew with one number halved or doubled at a time, and note where another placement becomes the best."""
    assert plan.again is not None
    turns = []
    for name in ("response_tokens", "prompts"):
        base = getattr(plan.workload, name)
        before: Plan | None = None
        for value in sorted({max(1, round(base * factor)) for factor in FACTORS}):
            try:
                now = plan if value == base else plan.again(workload=replace(plan.workload, **{name: value}))
            except (OptionError, MemoryError):  # longer than the models' positions, fewer samples than mini-batches, or too large
                continue
            if before is not None and _grouping(now) != _grouping(before):
                turns.append(Turn(field=name, value=value, title=now.best.preset or now.best.title, seconds=now.seconds,
                                  before=before.best.preset or before.best.title))  # fmt: skip
            before = now
    return turns


def _grouping(plan: Plan) -> frozenset[tuple[frozenset[str], str]]:
    """Return which roles share devices with which, whatever the sizes."""
    homes = plan.placement.roles
    named = {p.name: frozenset(r for r, home in homes.items() if home == p.name) for p in plan.placement.pools}
    return frozenset((named[p.name], " ".join(sorted(named.get(p.within, ())))) for p in plan.placement.pools)


def check_workload(workload: object) -> Workload:
    """Return the argument, if it is a workload.

    Raises:
        OptionError: it is none.
    """
    check_options("plan", workload=(workload, Workload))
    assert isinstance(workload, Workload)
    return workload


# -- the parts of a plan: its calls, the memory of devices, and the placements that it is compared with

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
    """Spans of the slowest rank: (name of the span, seconds after the call's start, seconds)."""
    seconds: float
    after: tuple[int, ...] = ()
    """The calls whose columns or weights it reads."""
    num_rows: int = 0
    mini_batches: int = 0
    """Optimizer steps of an update in one epoch."""

    @property
    def name(self) -> str:
        """The call's role and method, e.g. ``"actor.generate"``."""
        return f"{self.role}.{self.method}"

    @property
    def end_s(self) -> float:
        """End of the call, in seconds from the step's start."""
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
    """Memory that is predicted for each device of some that are alike."""

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
        """All bytes that stay, and those that the greediest role's call needs while it runs."""
        working = max((role["working"] for role in self.roles.values()), default=0)
        return self.process + sum(role["resident"] for role in self.roles.values()) + working


@dataclass(frozen=True, kw_only=True, repr=False)
class Alternative:
    """A placement with its best layouts, which the plan is compared with."""

    title: str
    """The roles that share devices, e.g. ``"actor reference (64) | critic reward (64)"``."""
    preset: str
    """The preset that it is one of (``"colocate"``, ``"split"``, ...), or ``""``."""
    placement: Placement
    layouts: Mapping[str, Layouts]
    seconds: float
    """Seconds of a step; where responses vary in length, of the run's first one."""
    band: tuple[float, float]
    """Seconds, low and high: the model's stated relative error of every kind of call, all of them off the same way."""
    calls: Mapping[str, float]
    """Kind of call, e.g. ``"actor.generate"`` -> its seconds in the step."""
    facts: Mapping[str, Mapping[str, float]]
    """Role -> ``bubble_s`` (seconds of a step in which its pipeline stages wait for each other), ``tp_bytes`` (bytes that a rank
    sends in tensor-parallel all-reduces in a step), ``dp_bytes`` (in gradient reductions)."""
    peak_bytes: int
    """Bytes of the fullest device."""
    why: str = ""
    """Why it lost, in words; empty for the plan itself."""
    timeline: tuple[PlannedCall, ...] = ()
    """The calls of one step of a runner-up, as in :attr:`Plan.calls`."""
    memory: tuple[PlannedMemory, ...] = ()
    """The memory of every device under a runner-up, as in :attr:`Plan.memory`."""
    too_close: bool = False
    """Whether the model cannot tell it from the plan: the difference is within the error of the calls that differ, or within what
    the lengths of one step make of it."""
    steps_s: tuple[float, ...] = ()
    """Seconds of the run's first steps, where responses vary in length; plans are compared by their mean."""

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
    """The devices that it does not fit on, e.g. ``"each device of pool 'actor' (32 x A100-80GB)"``."""

    @property
    def why(self) -> str:
        """The same in words."""
        return f"out of memory by {self.over_bytes / 1e9:.1f} GB on {self.where}"


def alternative_view(plan: Alternative) -> dict[str, Any]:
    """Return a plan as plain data."""
    return {
        "title": plan.title, "preset": plan.preset, "seconds": plan.seconds, "mean_s": plan.mean_s, "band": list(plan.band),
        "why": plan.why,
        "too_close": plan.too_close, "peak_bytes": plan.peak_bytes, "calls": dict(plan.calls),
        "facts": {role: dict(numbers) for role, numbers in plan.facts.items()},
        "layouts": {role: {use: str(layout) for use, layout in by_use.items()} for role, by_use in plan.layouts.items()},
        "pools": [{
            "name": pool.name, "devices": list(pool.devices), "within": pool.within,
            "roles": [role for role, home in plan.placement.roles.items() if home == pool.name],
        } for pool in plan.placement.pools],
        "timeline": calls_view(plan.timeline), "memory": memory_view(plan.memory),
    }  # fmt: skip


def calls_view(calls: Iterable[PlannedCall]) -> list[dict[str, Any]]:
    """Return calls as plain data."""
    return [{
        "id": c.id, "name": c.name, "role": c.role, "method": c.method, "phase": c.phase, "pool": c.pool,
        "start_s": c.start_s, "seconds": c.seconds, "after": list(c.after),
        "parts": [{"name": name, "start_s": c.start_s + shift, "seconds": s} for name, shift, s in c.parts],
    } for c in calls]  # fmt: skip


def memory_view(memory: Iterable[PlannedMemory]) -> list[dict[str, Any]]:
    """Return the bytes that devices hold, as plain data."""
    return [{
        "pool": m.pool, "devices": list(m.devices), "device_name": m.device_name, "exists": m.exists, "asked": m.asked,
        "process": m.process, "roles": {name: dict(parts) for name, parts in m.roles.items()},
    } for m in memory]  # fmt: skip


def line_of(plan: Alternative) -> str:
    """Return a plan in a line: its preset, who shares devices with whom, seconds, and why it lost."""
    name = f"{plan.preset}: " if plan.preset else ""
    return f"{name}{plan.title}: {seconds_text(plan.seconds)}; {plan.why}" + (" (too close to call)" if plan.too_close else "")


def seconds_text(seconds: float) -> str:
    """Return seconds with three digits, e.g. ``"0.784 s"`` or ``"1,234 s"``."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"
