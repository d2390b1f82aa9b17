"""Teaching IPython to draw the nouns: display formatters, live pictures, progress under the cell.

The nouns below return plain view data and know nothing of this module; it finds them by the name of their class, so registering
imports none of them. The session's own objects, which stand above, ask it to show them (``_ipython_display_``). Live displays
follow one pattern: show a live picture with a display handle, publish from a thread at most five times a second, and replace it by
the frozen picture when nothing runs any more.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hfsdk.core.hints import PublicNames
from hfsdk.core.system import can_start_threads
from hfsdk.viz.drawn import PICTURES, picture_of
from hfsdk.viz.frame import PUBLISH_INTERVAL_S, LivePicture, Picture, follow
from hfsdk.viz.pictures.dashboard import DashboardPicture, dashboard_view
from hfsdk.viz.pictures.dataflow import DataflowPicture, dataflow_view
from hfsdk.viz.pictures.placement import PlacementPicture, placement_view
from hfsdk.viz.pictures.timeline import TimelinePicture, timeline_view
from hfsdk.viz.pictures.what_if import show_live
from hfsdk.viz.tables import batch_html, first_bad_html, metrics_html, progress_html, progress_text, session_html, snapshot_html

WALL_CLOCK_NS = 10**18
"""Spans before this (2001) are on the virtual clock of a simulation."""

STILL_INTERVAL_S = 1.0
"""Seconds between two redraws of a still picture without anywidget."""


def register(ipython: Any) -> None:
    """Register how every noun is drawn with a running IPython shell (``get_ipython()``)."""
    html = ipython.display_formatter.formatters["text/html"]
    html.for_type_by_name("hfsdk.core.batch", "Batch", _or_text(lambda obj: batch_html(obj.view())))
    html.for_type_by_name("hfsdk.core.snapshot", "Snapshot", _or_text(lambda obj: snapshot_html(obj.view())))
    html.for_type_by_name("hfsdk.core.first_bad", "FirstBad", _or_text(lambda obj: first_bad_html(obj.view())))
    html.for_type_by_name("hfsdk.core.pending", "Metrics", _or_text(_metrics))
    for module, name in PICTURES:
        html.for_type_by_name(module, name, _or_text(lambda obj: picture_of(obj).to_html()))
    from IPython.utils.generics import complete_object

    complete_object.register(PublicNames, _offered)
    with contextlib.suppress(ImportError, AttributeError, KeyError):  # older ones have no such rule
        from IPython.core.guarded_eval import EVALUATION_POLICIES

        # Tab looks into ``session.trace``, though the class answers for attributes that it lacks
        policy: Any = EVALUATION_POLICIES["limited"]
        policy.allowed_getattr_external.add(("hfsdk.session.session", "Session"))


def _offered(obj: PublicNames, names: Sequence[str]) -> list[str]:
    """Return the names that Tab offers of an object, out of all those of its class."""
    offered = set(dir(obj))
    return [name for name in names if name in offered]


def html_of(obj: Any) -> str | None:
    """Return a noun's picture as HTML; ``None``, for its text form, where it cannot be drawn."""
    return _or_text(lambda noun: picture_of(noun).to_html())(obj)


def session_card(obj: Any) -> str | None:
    """Return the HTML card of an object with ``view() -> session data``; ``None``, for its text form, where it cannot be drawn."""
    return _or_text(lambda session: session_html(session.view()))(obj)


def _or_text(draw: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """Return a formatter that never raises: where drawing fails, the object's text form is shown."""

    def safe(obj: Any) -> str | None:
        try:
            return draw(obj)
        except Exception:  # a repr never raises, whatever state the object is in
            return None

    return safe


def _metrics(obj: Any) -> str | None:
    view = obj.view()
    return metrics_html(view["rows"]) if view["state"] == "done" else None


def show_placement(obj: Any) -> None:
    """Display an object with ``view() -> placement data`` and ``running``: live while it runs, frozen when not."""
    _show(obj, lambda: PlacementPicture(placement_view(obj.view())))


def show_dataflow(obj: Any) -> None:
    """Display an object with ``view() -> dataflow data`` and ``running``: live while it runs, frozen when not."""
    _show(obj, lambda: DataflowPicture(dataflow_view(obj.view())))


def show_trace(obj: Any) -> None:
    """Display an object with ``snapshot() -> Trace`` and ``running``: live while it runs, frozen when not."""

    def picture() -> Picture:
        trace = obj.snapshot()
        growing = bool(obj.running) and trace.start_ns > WALL_CLOCK_NS  # a virtual clock stands still while we look
        return TimelinePicture(timeline_view(trace, now_ns=time.time_ns() if growing else None))

    _show(obj, picture)


def show_what_if(what_if: Any) -> None:
    """Display a ``WhatIf``: with sliders where a kernel can answer them, frozen elsewhere."""
    picture = picture_of(what_if)
    if _kernel_shell() is not None:
        try:
            show_live(what_if)
        except ModuleNotFoundError as error:
            _StillPicture(picture, str(error)).display()
        return
    from IPython.display import display

    display(picture.bundle(), raw=True)


_cell_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The cell under which a run has its dashboard."""


def show_run(run: Any) -> threading.Thread | None:
    """Display a training run: live with its buttons while it goes on, frozen when not; return the thread that follows it.

    As the value of the cell that trained, it is there already.
    """
    shell = _kernel_shell()
    cell = -1 if shell is None else shell.execution_count
    if shell is not None and _cell_of.get(run) == cell:
        return None
    _cell_of[run] = cell
    return _show(run, lambda: run_picture(run), pressed(run))


def run_picture(run: Any) -> DashboardPicture:
    """Return a training run's picture, with its buttons while it goes on."""
    return DashboardPicture(dashboard_view(run.view(), live=run.running))


def pressed(run: Any) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that takes the message of a run's button: ``{"action": "pause"}``."""
    buttons = {"pause": run.pause, "resume": run.resume, "step": run.step, "stop": run.stop}

    def press(content: Mapping[str, Any]) -> None:
        if run.running and content.get("action") in buttons:
            buttons[content["action"]]()

    return press


class Dashboard:
    """Follows a run of ``session.train`` under its cell."""

    @classmethod
    def of(cls, run: Any) -> Dashboard | None:
        """Show the run where a notebook looks and a thread can follow it, else nothing."""
        return cls(run) if _kernel_shell() is not None and can_start_threads() else None

    def __init__(self, run: Any) -> None:
        self._thread = show_run(run)

    def ended(self) -> None:
        """Wait until the frozen picture stands in the notebook."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(10)


def _show(
    obj: Any, take: Callable[[], Picture], on_message: Callable[[Mapping[str, Any]], None] | None = None
) -> threading.Thread | None:
    """Show an object that has ``running``: live while that is true."""
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    def running() -> bool:
        return bool(obj.running)

    shell = get_ipython()
    in_kernel = shell is not None and getattr(shell, "kernel", None) is not None
    picture = take()
    if not running() or not in_kernel or not can_start_threads():
        display(picture.bundle(), raw=True)
        return None
    try:
        live: LivePicture | _StillPicture = LivePicture(picture, on_message, getattr(obj, "kept_as", ""))
    except ModuleNotFoundError as error:
        live = _StillPicture(picture, str(error))
    handle = live.display()
    arguments = live, take, running, partial(live.freeze, handle)
    thread = threading.Thread(target=follow, args=arguments, name="hfsdk-follow", daemon=True)
    thread.start()
    return thread


class _StillPicture:
    """The static picture where anywidget is missing, redrawn once a second, with a hint."""

    def __init__(self, picture: Picture, hint: str) -> None:
        self.picture = picture
        self._hint = hint
        self._handle: Any = None
        self._drawn_s = 0.0

    def display(self) -> Any:
        from IPython.display import display

        self._handle = display(self._bundle(), raw=True, display_id=True)
        return self._handle

    def publish(self, view: Any) -> None:
        self.picture = type(self.picture)(view)
        if time.monotonic() - self._drawn_s >= STILL_INTERVAL_S:
            self._drawn_s = time.monotonic()
            self._handle.update(self._bundle(), raw=True)

    def freeze(self, handle: Any) -> None:
        handle.update(self.picture.bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        from html import escape

        hint = f"<div><small>{escape(self._hint)}</small></div>"
        return {"text/plain": self.picture.to_text(), "text/html": self.picture.placeholder() + hint}


class CallProgress:
    """Progress and failure of calls, drawn under the cell that started them.

    One card per cell, made on the main thread when the cell's first call starts; later events, from any thread, only
    update it, at most five times a second, and once more when the cell ends. Nothing is printed.

    Args:
        subscribe: called with a callback that takes events ``{"type", "call_id", "call", "line", "done", "total", "unit",
            "seconds", "error"}``; the types are ``call_started``, ``call_progress``, ``call_done``, ``call_failed`` and
            ``call_cancelled``.
    """

    def __init__(self, subscribe: Callable[[Callable[[dict[str, Any]], None]], Any]) -> None:
        self._lock = threading.Lock()
        self._cards: dict[Any, _Card] = {}
        self._cell: tuple[int, _Card] | None = None
        self._shell = _kernel_shell()
        if self._shell is not None:
            self._shell.events.register("post_run_cell", self._cell_ended)
        self._subscription = subscribe(self.on_event)

    def on_event(self, event: dict[str, Any]) -> None:
        """Take one event of a call."""
        if self._shell is None or "call_id" not in event:
            return
        if event["type"] == "call_started":
            card = self._card_of_this_cell(event["call_id"])
        else:
            with self._lock:
                card = self._cards.get(event["call_id"])
        if card is not None and card.take(event) != "running":
            with self._lock:
                self._cards.pop(event["call_id"], None)

    def close(self) -> None:
        """Draw no more."""
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self._cell_ended)
            self._shell = None

    def _card_of_this_cell(self, call_id: Any) -> _Card | None:
        if threading.current_thread() is not threading.main_thread():
            return None  # only the main thread knows which cell is running
        number = self._shell.execution_count
        if any(run.running and cell == number for run, cell in list(_cell_of.items())):
            return None  # its dashboard says what runs
        with self._lock:
            if self._cell is None or self._cell[0] != number:
                self._cell = (number, _Card())
            self._cards[call_id] = self._cell[1]
            return self._cell[1]

    def _cell_ended(self, result: Any = None) -> None:
        if self._cell is not None:
            self._cell[1].flush()


class _Card:
    """The calls of one cell and their display handle."""

    def __init__(self) -> None:
        self._calls: dict[Any, dict[str, Any]] = {}
        self._lock = threading.RLock()
        self._handle: Any = None
        self._drawn_s = 0.0
        self._timer: threading.Timer | None = None
        self._stale = False

    def take(self, event: dict[str, Any]) -> str:
        """Note an event, draw it now or soon, and return the call's state."""
        with self._lock:
            call = self._calls.setdefault(event["call_id"], {"started_s": time.monotonic(), **dict.fromkeys(_FIELDS)})
            call.update({k: event[k] for k in _FIELDS if event.get(k) is not None})
            call["state"] = _STATES.get(event["type"], "running")
            if call["state"] == "done":
                call["done"] = call["total"] = None  # the last count asked for is not the final one
            if call["state"] != "running" and call["seconds"] is None:
                call["seconds"] = time.monotonic() - call["started_s"]
            wait_s = self._drawn_s + PUBLISH_INTERVAL_S - time.monotonic()
            if self._handle is None or wait_s <= 0:
                self._draw()
            elif not self._stale:
                self._stale = True
                if not can_start_threads():  # drawn with the next event, or at the cell's end
                    return str(call["state"])
                self._timer = threading.Timer(wait_s, self.flush)
                self._timer.daemon = True
                self._timer.start()
            return str(call["state"])

    def flush(self) -> None:
        """Draw now if something changed since the last drawing."""
        with self._lock:
            if self._stale:
                self._draw()

    def _draw(self) -> None:
        from IPython.display import display

        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stale, self._drawn_s = False, time.monotonic()
        calls = list(self._calls.values())
        bundle = {"text/plain": progress_text(calls), "text/html": progress_html(calls)}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


_FIELDS = ("call", "line", "done", "total", "unit", "seconds", "error")
_STATES = {"call_done": "done", "call_failed": "failed", "call_cancelled": "cancelled"}


def _kernel_shell() -> Any:
    try:
        from IPython.core.getipython import get_ipython
    except ModuleNotFoundError:
        return None
    shell = get_ipython()
    return shell if shell is not None and getattr(shell, "kernel", None) is not None else None
