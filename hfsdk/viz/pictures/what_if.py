"""The what-if picture: sliders over a plan. Live, the kernel plans anew while one is dragged; frozen, the last plan stays.

::

    devices          ------o---------  128          kind of device  [A100-80GB]     planned in 90 ms
    response length  ---------o------  2 048 tokens placement       [auto]
    | seconds over what was dragged   o     |   | cost over it            o    |    dashed: predicted; a line where the plan changes
    |      o - - o - - O - - - /            |   |     o - - o - - O - - /      |
    the plan (hfsdk.viz.pictures.plan)

One message goes each way: the browser sends the newest values when no answer is outstanding, the kernel answers with the whole
view. Settings that come between are dropped, so that at most one plan is being searched for. In a notebook the saved output is the
frozen picture at every moment; the widget has no output of its own but moves into that one (``initialize`` in
``static/what_if.js``).
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from hfsdk.core.system import can_start_threads, exiting
from hfsdk.viz.frame import Picture, count_text, widget_class
from hfsdk.viz.pictures.plan import PlanPicture, PlanView, plan_view
from hfsdk.viz.plain import finite, plain


class SliderView(TypedDict):
    """A slider and where it may stop."""

    name: str
    label: str
    unit: str
    stops: list[float]
    value: float | None
    fixed: bool


class MenuView(TypedDict):
    """A choice among words."""

    name: str
    label: str
    options: list[str]
    value: str


class WhatIfView(TypedDict):
    """All the picture needs."""

    picture: Literal["what_if"]
    title: str
    summary: str
    live: bool
    request: int
    """The newest question of the browser's that this answers."""
    took_s: float | None
    error: str
    sliders: list[SliderView]
    menus: list[MenuView]
    curve: dict[str, Any] | None
    plan: PlanView


def what_if_view(data: Mapping[str, Any], live: bool = False, request: int = 0) -> WhatIfView:
    """Turn ``WhatIf.view()`` into the view of the picture; ``live`` lets its sliders move."""
    plan, curve = plan_view(data["plan"]), data["curve"]
    title = "what if: " + plan["title"].removeprefix("plan for ")
    sliders: list[SliderView] = [
        {"name": s["name"], "label": s["label"], "unit": s["unit"], "value": finite(s["value"]), "fixed": bool(s["fixed"]),
         "stops": [x for x in s["stops"] if finite(x) is not None] or [0]}
        for s in data["sliders"]
    ]  # fmt: skip
    points = [] if curve is None else [
        {"value": p["value"], "seconds": finite(p["seconds"]), "dollars": finite(p["cost_per_step"]) or None, "plan": p["plan"]}
        for p in curve["points"] if finite(p["value"]) is not None
    ]  # fmt: skip
    return {
        "picture": "what_if", "title": title, "summary": "What if: " + plan["summary"], "live": live, "request": request,
        "took_s": finite(data["seconds_taken"]), "error": data["error"], "sliders": sliders,
        "menus": [{**m, "options": [*m["options"]]} for m in data["menus"]],  # type: ignore[typeddict-item]
        "curve": {**curve, "points": sorted(points, key=lambda p: p["value"])} if points else None, "plan": plan,
    }  # fmt: skip


class WhatIfPicture(Picture):
    """``WhatIfPicture(what_if_view(what_if.view()))``."""

    name = "what_if"

    def to_text(self) -> str:
        """Return the question and its plan."""
        return "\n".join([*self._setting_lines(), PlanPicture(self.view["plan"]).to_text()])

    def _setting_lines(self) -> list[str]:
        words = [f"{s['label']} {count_text(s['value'])} {s['unit']}".strip() for s in self.view["sliders"]]
        words += [f"{m['label']} {m['value']}" for m in self.view["menus"] if m["value"] != "auto"]
        curve, lines = self.view["curve"], ["asked for: " + ", ".join(words)]
        if curve is not None:
            curve_points = [f"{count_text(p['value'])}: {p['seconds']:.3g} s" for p in curve["points"] if p["seconds"] is not None]
            lines.append(f"a step over {curve['label']}: {', '.join(curve_points) or 'nothing fits'}")
        return lines + ([self.view["error"]] if self.view["error"] else [])


MOST_CHARS = 200
"""Most characters of a browser's setting of a menu."""


class LiveWhatIf:
    """The widget of one ``WhatIf``: its own thread answers the newest question, and draws the curve when none is asked.

    Where no thread can be started, each question is answered as it comes.

    Attributes:
        widget: the anywidget that shows it.

    Raises:
        ModuleNotFoundError: anywidget is not installed.
    """

    def __init__(self, what_if: Any, *, in_output: bool = True) -> None:
        """Make the widget.

        Args:
            what_if: the ``WhatIf``.
            in_output: whether it moves into the output that :meth:`show` displays; else it stands wherever its host puts it.
        """
        self._what_if, self._key = what_if, uuid.uuid4().hex if in_output else ""
        self._wake = threading.Condition()
        self._wanted: tuple[int, Mapping[str, Any]] | None = None
        self._settled: str | None = None
        self._handle: Any = None
        self._request, self._closed = 0, False
        self.widget = widget_class("what_if")(view=self._view(), key=self._key, kept_as=getattr(what_if, "kept_as", ""))
        self.widget.on_msg(lambda _widget, content, _buffers: self.hear(content))
        self.widget.observe(lambda change: None if change["new"] else self.close(), "comm")
        self._unsubscribe = what_if.subscribe(self.changed)
        self._threaded = can_start_threads()
        if self._threaded:
            threading.Thread(target=self._answer_all, name="hfsdk-what-if", daemon=True).start()

    def show(self) -> None:
        """Show it under the running cell; where it was shown before, it stays as it is, frozen."""
        from IPython.display import display

        self._handle = display(self._bundle(), raw=True, display_id=True)

    def close(self) -> None:
        """End the thread and let go of the ``WhatIf``; the widget's end calls it. The picture stays, frozen."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._unsubscribe()
        if _live.get(self._what_if) is self:
            del _live[self._what_if]

    def hear(self, content: Mapping[str, Any]) -> None:
        """Take a message of the browser's: ``{"set": {...}, "request": 3}`` or ``{"settle": "devices", "request": 3}``."""
        with self._wake:
            if "set" in content:
                changes = self._settings_of(content["set"])
                before = self._wanted[1] if self._wanted else {}  # not answered yet: one answer will do for both
                self._wanted, self._settled = (int(content["request"]), {**before, **changes}), None
            elif "settle" in content:
                self._settled = str(content["settle"] or "")[:MOST_CHARS]
            self._wake.notify()
        if not self._threaded and not self._closed:
            self._answer()

    def _settings_of(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a browser's values for which the picture has a slider or a menu: nothing else is kept."""
        names = [control["name"] for control in (*self.widget.view["sliders"], *self.widget.view["menus"])]
        values = {name: changes[name] for name in names if name in changes}
        values = {name: value for name, value in values.items() if isinstance(value, str | int | float)}
        return {name: value[:MOST_CHARS] if isinstance(value, str) else value for name, value in values.items()}

    def changed(self) -> None:
        """Show the values that were set from Python."""
        self._publish()
        self._save()

    def _answer_all(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._wanted is not None or self._settled is not None)
            if self._closed or exiting.is_set():
                return
            self._answer()

    def _answer(self) -> None:
        with self._wake:
            wanted, settled = self._wanted, self._settled
            self._wanted = self._settled = None
        try:
            if wanted is not None:
                self._request = wanted[0]
                self._what_if.attempt(wanted[1])
            elif settled is not None:
                self._settle(settled)
        except Exception as error:  # there is nobody to raise to: the picture says it
            self._what_if.error = f"{type(error).__name__}: {error}"
        self._publish()

    def _settle(self, dragged: str) -> None:
        """Draw the curve over the dragged value, until something is dragged again; then bring the notebook's copy up to date."""
        if any(s["name"] == dragged for s in self._what_if.view()["sliders"]):
            for _ in self._what_if.draw_curve(dragged):
                if self._wanted is not None:
                    return
        self._save()

    def _publish(self) -> None:
        self.widget.view = self._view()

    def _view(self) -> dict[str, Any]:
        return dict(plain(what_if_view(self._what_if.view(), live=True, request=self._request)))

    def _save(self) -> None:
        if self._handle is not None and not exiting.is_set():
            self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        frozen = WhatIfPicture(what_if_view(self._what_if.view())).bundle()
        return {**frozen, "text/html": f'<div data-hf-live="{self._key}">{frozen["text/html"]}</div>'}


_live: dict[Any, LiveWhatIf] = {}
"""``WhatIf`` -> its picture, until the widget closes."""


def show_live(what_if: Any) -> None:
    """Show a ``WhatIf`` in a notebook with a kernel; the sliders are in the output that was shown last.

    Raises:
        ModuleNotFoundError: anywidget is not installed.
    """
    if what_if not in _live:
        _live[what_if] = LiveWhatIf(what_if)
    _live[what_if].show()
