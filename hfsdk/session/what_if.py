"""``session.what_if(...)``: a plan with sliders, which is found anew whenever one is moved.

::

    what_if = session.what_if(hf.PPO(), hf.Workload(prompts=1024))      # in a notebook: sliders over the plan's picture
    what_if.set(devices=64, response_tokens=4096).plan                  # the same from Python
    what_if.set(placement="split", layouts={"actor": "tp8 pp2"})        # fixed; "auto" leaves it to the planner again
    what_if.sweep("devices")                                            # seconds and cost by number of devices, a DataFrame

Nothing runs on the session's devices and nothing of the session changes.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Self

from hfsdk.core.checks import Length, checked, is_whole, shown
from hfsdk.core.cluster import DEVICES, MOST_DEVICES, ClusterSpec
from hfsdk.core.errors import HfsdkError, LayoutError, OptionError
from hfsdk.core.layout import Layout
from hfsdk.core.placement import PRESETS
from hfsdk.core.plan import Plan, Workload
from hfsdk.core.spec import ModelSpec
from hfsdk.session.recording import priced
from hfsdk.session.role_specs import check_rollout

if TYPE_CHECKING:
    import pandas as pd

    from hfsdk.viz.frame import Picture


KEPT = 400
"""Answers that are remembered (the plans themselves: the last few)."""

FindPlan = Callable[[ClusterSpec, Workload, str, Mapping[str, Layout]], Plan]
"""Finds a plan: (cluster, workload, preset or ``"auto"``, layouts that are fixed by role, or role and ``" rollout"``)."""


class WhatIf:
    """A plan and the question that it answers. In a notebook it draws itself, with sliders.

    Attributes:
        plan: the last plan that was found.
        error: why what is asked for now has none; empty where it has.
        seconds_taken: wall clock of the last answer.
    """

    def __init__(
        self,
        answer: FindPlan,
        cluster: ClusterSpec,
        workload: Workload,
        *,
        roles: Sequence[str],
        rollouts: Sequence[str],
        max_tokens: int,
        models: Mapping[str, ModelSpec] | None = None,
    ) -> None:
        """Ask for the plan of a session's own cluster (see ``Session.what_if``)."""
        self._answer, self._cluster, self._workload = answer, cluster, workload
        self._layout_names = (*roles, *(f"{role} rollout" for role in rollouts))
        self._max_tokens, self._models = max_tokens, dict(models or {})
        self._lock = threading.RLock()
        self._points: OrderedDict[Question, Point] = OrderedDict()
        self._plans: OrderedDict[Question, Plan] = OrderedDict()
        self._listeners: list[Callable[[], None]] = []
        kinds = {d.name for d in cluster.devices}
        self._first = self.question = Question(
            devices=cluster.num_devices, device=kinds.pop() if len(kinds) == 1 else AS_DECLARED,
            price_per_device_hour=cluster.price_per_device_hour, prompts=workload.prompts, prompt_tokens=workload.prompt_tokens,
            response_tokens=workload.response_tokens,
        )  # fmt: skip
        self.error, self.curve, self.seconds_taken = "", None, 0.0
        self.plan: Plan = self._find(self.question)

    kept_as = ""
    """The name of its session where that is kept."""
    curve: Curve | None
    """The curve over the slider that was dragged last."""

    # -- asking

    @checked
    def set(
        self,
        *,
        devices: int | None = None,
        device: str | None = None,
        price_per_device_hour: float | None = None,
        prompts: int | None = None,
        prompt_tokens: int | None = None,
        response_tokens: int | None = None,
        placement: str | None = None,
        layouts: Mapping[str, str] | None = None,
    ) -> Self:
        """Change the question, and plan anew; what is left out stays.

        Args:
            devices: over all nodes: part of a node, or whole ones.
            device: a preset's name, e.g. ``"H100"``, or ``"as declared"``.
            price_per_device_hour: the price in any currency.
            prompts: the number of prompts of one step.
            prompt_tokens: the length of every prompt.
            response_tokens: most of a response.
            placement: a preset's name, e.g. ``"split"``, or ``"auto"``.
            layouts: by role, or role and ``" rollout"``, e.g. ``{"actor": "tp8 pp2", "actor rollout": "tp4"}``, or ``"auto"``.

        Raises:
            OptionError: a value that cannot be, or names nothing that exists.
            DeviceMemoryError: nothing fits. After an error everything is as it was.
            LayoutError: a fixed layout does not fit its model.
            PlacementError: the placement does not fit the roles or devices.
        """
        arguments = {
            "devices": devices, "device": device, "price_per_device_hour": price_per_device_hour, "prompts": prompts,
            "prompt_tokens": prompt_tokens, "response_tokens": response_tokens, "placement": placement,
        }  # fmt: skip
        changes = {name: value for name, value in arguments.items() if value is not None}
        with self._lock:
            question = self._changed(self.question, {**changes, **flat(layouts or {})})
            plan = self._find(question)
            self.question, self.plan, self.error = question, plan, ""
        for listener in list(self._listeners):
            listener()
        return self

    def attempt(self, changes: Mapping[str, Any]) -> None:
        """Change the question, as the picture's sliders do; where it has no plan, ``error`` says why and the plan stays.

        Args:
            changes: the same as in :meth:`set`, layouts as ``{"layout of actor": "tp8"}``.
        """
        with self._lock:
            started = time.perf_counter()
            try:
                self.question = self._changed(self.question, changes)
                self.plan, self.error = self._find(self.question), ""
            except HfsdkError as error:
                self.error = str(error)
                self.seconds_taken = time.perf_counter() - started

    @checked
    def sweep(self, name: str, values: Annotated[Sequence[float], Length(1, 1_000)] | None = None) -> pd.DataFrame:
        """Return the seconds and the price of a step over one of the sliders, the others as they are.

        Args:
            name: ``"devices"``, ``"prompts"``, ``"prompt_tokens"``, ``"response_tokens"`` or ``"price_per_device_hour"``.
            values: the values on the slider; by default a dozen of the slider's.

        Returns:
            One row per value, indexed by it: seconds, cost_per_step, plan, error.

        Raises:
            OptionError: there is no such slider, or a value cannot be.
        """
        import pandas as pd

        if name not in LABELS:
            raise OptionError(f"there is no slider {shown(name)}; there are {', '.join(LABELS)}")
        chosen = self._chosen(name) if values is None else list(values)
        points = [asdict(self._point(self._changed(self.question, {name: value}), value)) for value in chosen]
        return pd.DataFrame(points, columns=["value", "seconds", "cost_per_step", "plan", "error"]).set_index("value")

    def draw(self, name: str) -> Self:
        """Compute the curve over one of the sliders now; in a notebook that happens when it was dragged.

        Raises:
            OptionError: there is no such slider.
        """
        for _ in self.draw_curve(name):
            pass
        return self

    def draw_curve(self, name: str) -> Iterator[None]:
        """Compute ``curve`` point by point; do not go on after the question has changed."""
        chosen = self._chosen(name)
        with self._lock:
            others, value = self.question, getattr(self.question, name)
            first: dict[str, Any] = {name: self._stops(name)[0]}
            base = replace(others, **first)
            if self.curve is not None and self.curve.done and (self.curve.name, self.curve.others) == (name, base):
                return
            stops = tuple(float(s) for s in self._stops(name))
            curve = self.curve = Curve(name, base, stops)
        for at in sorted({*chosen, value}):
            with self._lock:
                point = self._point(self._changed(others, {name: at}), at)
                curve.points.append(point)
            yield
        curve.done = True

    @checked
    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener()`` after every :meth:`set`; return a function that stops that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    # -- finding

    def _find(self, question: Question) -> Plan:
        started = time.perf_counter()
        unpriced = replace(question, price_per_device_hour=0.0)  # prices change no plan
        plan = self._plans.get(unpriced)
        if plan is None:
            layouts = {name: Layout.parse(text) for name, text in question.layouts}
            for name, layout in layouts.items():
                if layout.size > question.devices:
                    raise LayoutError(
                        f"{name}'s layout '{layout}' needs {layout.size} devices; what is asked for has {question.devices}. "
                        "Use a smaller layout, or more devices."
                    )
            plan = self._answer(self._cluster_of(unpriced), self._workload_of(question), question.placement, layouts)
        self._plans[unpriced] = plan
        plan = priced(plan, question.price_per_device_hour)
        self.seconds_taken = time.perf_counter() - started
        self._points[question] = Point(0.0, plan.seconds, plan.cost_per_step, _grouping(plan))
        while len(self._plans) > 8:
            self._plans.popitem(last=False)
        while len(self._points) > KEPT:
            self._points.popitem(last=False)
        return plan

    def _point(self, question: Question, value: float) -> Point:
        with self._lock:
            # a point of the curve is no answer to the user: the time shown stays that of the last question
            seconds = self.seconds_taken
            if question not in self._points:
                try:
                    self._find(question)
                except HfsdkError as error:
                    self._points[question] = Point(0.0, None, None, "", str(error).splitlines()[0])
            self.seconds_taken = seconds
            return replace(self._points[question], value=float(value))

    def _cluster_of(self, question: Question) -> ClusterSpec:
        if question.device == AS_DECLARED:
            return replace(self._cluster, price_per_device_hour=question.price_per_device_hour)
        per_node = max(map(len, self._cluster.node_devices))
        size = min(per_node, question.devices)
        if question.device != self._first.device:
            return ClusterSpec.parse(f"{question.devices // size}x{size} {question.device}", question.price_per_device_hour)
        # the session's own devices: no preset, or its memory and its links may have been changed
        count, device, cores = question.devices // size, self._cluster.devices[0], self._cluster.node_cores
        return replace(
            self._cluster, node_devices=((device,) * size,) * count, node_cores=(min(cores),) * count if cores else (),
            price_per_device_hour=question.price_per_device_hour,
        )  # fmt: skip

    def _workload_of(self, question: Question) -> Workload:
        return replace(
            self._workload, prompts=question.prompts, prompt_tokens=question.prompt_tokens, response_tokens=question.response_tokens
        )

    # -- checking

    def _changed(self, question: Question, changes: Mapping[str, Any]) -> Question:
        fields: dict[str, Any] = {}
        layouts = dict(question.layouts)
        for name, value in changes.items():
            if name.startswith(LAYOUT_OF):
                layouts[name.removeprefix(LAYOUT_OF)] = self._layout(name.removeprefix(LAYOUT_OF), value)
            elif name == "device":
                fields[name] = self._one_of("device", value, self._device_names())
            elif name == "placement":
                fields[name] = self._one_of("placement", value, (AUTO, *PRESETS))
            elif name == "price_per_device_hour":
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                    raise OptionError(f"price_per_device_hour is a finite number, at least 0; got {shown(value)}")
                fields[name] = float(value)
            elif name in LABELS:
                if isinstance(value, float) and value.is_integer():  # what comes from a browser
                    value = int(value)
                if not is_whole(value) or value < 1:
                    raise OptionError(f"{name} is a whole number of at least 1; got {shown(value)}")
                if name == "devices" and value > MOST_DEVICES:
                    raise OptionError(f"devices are at most {MOST_DEVICES:,}; got {value:,}")
                fields[name] = int(value)
            else:
                settings = ", ".join((*LABELS, "device", "placement", "layouts"))
                raise OptionError(f"there is nothing called {shown(name)} to set; there are {settings}")
        changed = replace(question, **fields, layouts=tuple(sorted((n, x) for n, x in layouts.items() if x != AUTO)))
        self._check(changed)
        return changed

    def _check(self, question: Question) -> None:
        per_node = max(map(len, self._cluster.node_devices))
        if question.device == AS_DECLARED:
            if question.devices != self._cluster.num_devices:
                raise OptionError(
                    f"the cluster is {self._cluster}, of several kinds of devices; to plan for {question.devices}, choose one "
                    f"kind, e.g. device={self._cluster.devices[0].name!r}"
                )
        elif question.devices > per_node and question.devices % per_node:
            raise OptionError(
                f"devices={question.devices} are not whole nodes of {per_node}; take at most {per_node}, or a multiple of it"
            )
        tokens = question.prompt_tokens + question.response_tokens
        if tokens > self._max_tokens:
            raise OptionError(
                f"a prompt of {question.prompt_tokens} and a response of {question.response_tokens} tokens make {tokens}; the "
                f"models have {self._max_tokens} positions"
            )

    def _one_of(self, name: str, value: Any, choices: Sequence[str]) -> str:
        if value not in choices:
            near = get_close_matches(str(value), choices, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"{name} is one of {', '.join(map(repr, choices))}; got {shown(value)}.{hint}")
        return str(value)

    def _layout(self, name: str, value: Any) -> str:
        if name not in self._layout_names:
            raise OptionError(f"layouts are of {', '.join(map(repr, self._layout_names))}; got one of {shown(name)}")
        if not isinstance(value, str):
            raise OptionError(f"the layout of {name} is a text such as 'tp8 pp2', or 'auto'; got {shown(value)}")
        if value == AUTO:
            return AUTO
        layout, role = Layout.parse(value), name.removesuffix(" rollout")
        if name in self._models or role in self._models:
            layout.check_model(self._models.get(name) or self._models[role])
        if name != role:
            check_rollout(role, layout)
        return str(layout)

    # -- looking

    def _device_names(self) -> tuple[str, ...]:
        mixed = len({d.name for d in self._cluster.devices}) > 1
        own = (self._first.device,) if self._first.device not in DEVICES else ()
        return ((AS_DECLARED,) if mixed else own) + tuple(DEVICES)

    def _stops(self, name: str) -> tuple[float, ...]:
        question, first = self.question, getattr(self._first, name)
        if name == "devices":
            per_node = max(map(len, self._cluster.node_devices))
            parts = [2**k for k in range(12) if 2**k < per_node]
            stops = [*parts, *(n * per_node for n in NODES if n * per_node <= max(2 * first, 32 * per_node))]
        elif name == "prompts":
            stops = [n for n in PROMPTS if n >= (self._workload.mini_batches or 1)]
        elif name == "price_per_device_hour":
            stops = list(PRICES)
        else:
            other = question.response_tokens if name == "prompt_tokens" else question.prompt_tokens
            stops = [n for n in TOKENS if n + other <= self._max_tokens]
            first = first if first + other <= self._max_tokens else getattr(question, name)
        return tuple(sorted({*stops, first, getattr(question, name)}))

    def _chosen(self, name: str) -> list[float]:
        """Return a dozen of a slider's values, evenly."""
        if name not in LABELS:
            raise OptionError(f"there is no slider {shown(name)}; there are {', '.join(LABELS)}")
        if self.question.device == AS_DECLARED and name == "devices":
            return [self.question.devices]  # of several kinds: as many as there are
        stops = self._stops(name)
        count = min(CURVE_POINTS, len(stops))
        return [stops[round(i * (len(stops) - 1) / max(1, count - 1))] for i in range(count)]

    def view(self) -> dict[str, Any]:
        """Return plain data for display: the plan's, the sliders, and the curve over the one that was moved last."""
        with self._lock:
            question, layouts, curve = self.question, dict(self.question.layouts), self.curve
            sliders = [{
                "name": name, "label": label, "unit": unit, "stops": list(self._stops(name)), "value": getattr(question, name),
                "fixed": name == "devices" and question.device == AS_DECLARED,
            } for name, (label, unit) in LABELS.items()]  # fmt: skip
            menus = [
                {"name": "device", "label": "kind of device", "options": list(self._device_names()), "value": question.device},
                {"name": "placement", "label": "placement", "options": [AUTO, *PRESETS], "value": question.placement},
            ]
            for name in self._layout_names:
                presets = ROLLOUTS if name.endswith(" rollout") else LAYOUTS
                options = dict.fromkeys([*presets, layouts.get(name, AUTO)])
                menus.append({"name": LAYOUT_OF + name, "label": LAYOUT_OF + name, "options": list(options),
                              "value": layouts.get(name, AUTO)})  # fmt: skip
            shown = curve if curve is not None and self._belongs(curve) else None
            return {
                "kind": "what_if", "plan": self.plan.view(), "error": self.error, "seconds_taken": self.seconds_taken,
                "sliders": sliders, "menus": menus, "curve": None if shown is None else {
                    "name": shown.name, "label": LABELS[shown.name][0], "stops": list(shown.stops), "done": shown.done,
                    "points": [asdict(p) for p in shown.points],
                },
            }  # fmt: skip

    def _belongs(self, curve: Curve) -> bool:
        """Return whether a curve still holds: its slider is there, and the others are as they were."""
        return replace(self.question, **{curve.name: getattr(curve.others, curve.name)}) == curve.others

    def _picture_(self) -> Picture:
        from hfsdk.viz.pictures.what_if import WhatIfPicture, what_if_view

        return WhatIfPicture(what_if_view(self.view()))

    def _ipython_display_(self) -> None:
        from hfsdk.viz.hooks import show_what_if

        show_what_if(self)

    def __repr__(self) -> str:
        values = asdict(self.question)
        layouts = ", ".join(f"{name} {text}" for name, text in self.question.layouts)
        words = ", ".join(f"{name}={value}" for name, value in values.items() if name != "layouts")
        head = f"WhatIf({words}{f', layouts: {layouts}' if layouts else ''})"
        return "\n".join([head, repr(self.plan), *([self.error] if self.error else [])])


def _grouping(plan: Plan) -> str:
    """Name the roles that share devices, without their sizes."""
    return plan.best.preset or re.sub(r" \(\d+\)", "", plan.best.title)


# -- questions and answers: ``Question``, ``Point``, ``Curve``, and the values that the sliders and menus offer

AUTO = "auto"
AS_DECLARED = "as declared"
"""The kind of device where the session's cluster has several."""
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TOKENS = tuple(sorted(2**k * base // 2 for base in (2, 3) for k in range(6, 17)))
PROMPTS = tuple(2**k for k in range(4, 14))
PRICES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0)
CURVE_POINTS = 12
LABELS = {
    "devices": ("devices", ""), "prompts": ("prompts a step", ""), "prompt_tokens": ("prompt length", "tokens"),
    "response_tokens": ("response length", "tokens"), "price_per_device_hour": ("price a device-hour", ""),
}  # fmt: skip
"""The label and the unit of every slider."""
LAYOUTS = (AUTO, "tp1", "tp2", "tp4", "tp8", "tp1 pp2", "tp2 pp2", "tp4 pp2", "tp8 pp2", "tp4 pp4", "tp8 pp4", "tp8 pp8")
ROLLOUTS = (AUTO, "tp1", "tp2", "tp4", "tp8")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to the planner: a cluster, a workload, and what of the plan is fixed."""

    devices: int
    """The number of devices over all nodes."""
    device: str
    """A preset's name, or ``"as declared"``."""
    price_per_device_hour: float
    prompts: int
    prompt_tokens: int
    response_tokens: int
    placement: str = AUTO
    layouts: tuple[tuple[str, str], ...] = ()
    """(role, or role and ``" rollout"``; layout), those that are fixed."""


@dataclass(frozen=True)
class Point:
    """One answer, as curves need it."""

    value: float
    seconds: float | None
    cost_per_step: float | None
    plan: str
    """The groups of roles that share devices; empty where nothing fits."""
    error: str = ""


@dataclass
class Curve:
    """The seconds of a step over one of the sliders, the others as they are."""

    name: str
    others: Question
    stops: tuple[float, ...]
    points: list[Point] = field(default_factory=list)
    done: bool = False


LAYOUT_OF = "layout of "
"""The prefix before a role's name under which a question's layouts are changed."""


def flat(layouts: Mapping[str, str]) -> dict[str, str]:
    """Return layouts by role under the names by which a question is changed."""
    return {LAYOUT_OF + str(name): text for name, text in layouts.items()}
