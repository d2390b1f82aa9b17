"""Teaching IPython to draw the nouns: display formatters, live pictures, progress under the cell.

The nouns return plain view data and know nothing of this module; it finds them by the name of their class, so registering
imports none of them. Live displays follow one pattern: show a live picture with a display handle, publish from a thread
at most five times a second, and replace it by the frozen picture when nothing runs any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from hfsdk.viz.frame import NOTEBOOK_HINT, PUBLISH_INTERVAL_S, LivePicture, Picture
from hfsdk.viz.placement import PlacementPicture, placement_view
from hfsdk.viz.tables import batch_html, metrics_html, progress_html, progress_text, session_html
from hfsdk.viz.timeline import TimelinePicture, timeline_view

SHORT_CALL_S = 0.3
"""A call faster than this leaves one compact line."""
STILL_INTERVAL_S = 1.0
"""Without anywidget a still picture is redrawn this often."""


def register(ipython: Any) -> None:
    """Register how every noun is drawn with a running IPython shell (``get_ipython()``)."""
    html = ipython.display_formatter.formatters["text/html"]
    html.for_type_by_name("hfsdk.batch", "Batch", lambda obj: batch_html(obj.view()))
    html.for_type_by_name("hfsdk.session.session", "Session", lambda obj: session_html(obj.view()))
    html.for_type_by_name("hfsdk.metrics", "Metrics", lambda obj: metrics_html(obj.view()))
    html.for_type_by_name("hfsdk.trace", "Trace", lambda obj: TimelinePicture(timeline_view(obj)).to_html())
    own = ipython.display_formatter.ipython_display_formatter
    own.for_type_by_name("hfsdk.session.views", "PlacementPicture", show_placement)
    own.for_type_by_name("hfsdk.session.views", "LiveTrace", show_trace)


def show_placement(obj: Any) -> None:
    """Display an object with ``view() -> placement data`` and ``running``: live while it runs, frozen when not."""
    _show(lambda: PlacementPicture(placement_view(obj.view())), lambda: bool(obj.running))


def show_trace(obj: Any) -> None:
    """Display an object with ``snapshot() -> Trace`` and ``running``: live while it runs, frozen when not."""

    def picture() -> Picture:
        return TimelinePicture(timeline_view(obj.snapshot(), now_ns=time.time_ns() if obj.running else None))

    _show(picture, lambda: bool(obj.running))


def _show(take: Callable[[], Picture], running: Callable[[], bool]) -> None:
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    shell = get_ipython()
    in_kernel = shell is not None and getattr(shell, "kernel", None) is not None
    picture = take()
    if not running() or not in_kernel:
        display(picture.bundle(), raw=True)
        return
    try:
        live: LivePicture | _StillPicture = LivePicture(picture)
    except ModuleNotFoundError as error:
        live = _StillPicture(picture, str(error))
    handle = live.display()
    threading.Thread(target=_follow, args=(live, handle, take, running), name="hfsdk-follow", daemon=True).start()


def _follow(live: Any, handle: Any, take: Callable[[], Picture], running: Callable[[], bool]) -> None:
    """Publish until nothing runs, then freeze; freeze also when taking a view fails, with the last one taken."""
    try:
        while running():
            live.publish(take().view)
            time.sleep(PUBLISH_INTERVAL_S)
        live.publish(take().view)
    finally:
        live.freeze(handle)


class _StillPicture:
    """Where anywidget is missing: the static picture, redrawn once a second, with a hint."""

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
    update it, at most five times a second (the last state of a call is never dropped). Nothing is printed.

    Args:
        subscribe: called with a callback that takes events ``{"type": "call_started|call_progress|call_done|call_failed|
            call_cancelled", "call_id", "call", "line", "done", "total", "unit", "seconds", "error"}``.
    """

    def __init__(self, subscribe: Callable[[Callable[[dict[str, Any]], None]], Any]) -> None:
        self._lock = threading.Lock()
        self._cards: dict[int, _Card] = {}
        self._cell: tuple[Any, _Card] | None = None
        self._shell = _kernel_shell()
        self._subscription = subscribe(self.on_event)

    def on_event(self, event: dict[str, Any]) -> None:
        """Take one event of a call."""
        if self._shell is None:
            return
        with self._lock:
            if event["type"] == "call_started":
                self._start(event)
                return
            card = self._cards.get(event["call_id"])
            if card is None:
                return
            card.take(event)
            if card.calls[event["call_id"]]["state"] != "running":
                del self._cards[event["call_id"]]

    def _start(self, event: dict[str, Any]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread knows which cell is running
        cell = self._shell.execution_count
        if self._cell is None or self._cell[0] != cell:
            self._cell = (cell, _Card())
        card = self._cell[1]
        self._cards[event["call_id"]] = card
        card.start(event)


class _Card:
    """The calls of one cell and their display handle."""

    def __init__(self) -> None:
        self.calls: dict[int, dict[str, Any]] = {}
        self._handle: Any = None
        self._drawn_s = 0.0

    def start(self, event: dict[str, Any]) -> None:
        self.calls[event["call_id"]] = {**_fields(event), "state": "running", "started_s": time.monotonic()}
        self._draw(force=self._handle is None)

    def take(self, event: dict[str, Any]) -> None:
        call = self.calls[event["call_id"]]
        call.update({k: v for k, v in _fields(event).items() if v is not None})
        state = {"call_done": "done", "call_failed": "failed", "call_cancelled": "cancelled"}.get(
            event["type"], "running"
        )
        call["state"] = state
        if state != "running" and call.get("seconds") is None:
            call["seconds"] = time.monotonic() - call["started_s"]
        if state != "running" or time.monotonic() - call["started_s"] >= SHORT_CALL_S:
            # a burst of short calls is drawn five times a second, but the last running call ending is always drawn
            self._draw(force=all(c["state"] != "running" for c in self.calls.values()))

    def _draw(self, force: bool) -> None:
        from IPython.display import display

        if not force and time.monotonic() - self._drawn_s < PUBLISH_INTERVAL_S:
            return
        self._drawn_s = time.monotonic()
        calls = list(self.calls.values())
        bundle = {"text/plain": progress_text(calls), "text/html": progress_html(calls)}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def _fields(event: dict[str, Any]) -> dict[str, Any]:
    return {k: event.get(k) for k in ("call", "line", "done", "total", "unit", "seconds", "error")}


def _kernel_shell() -> Any:
    try:
        from IPython.core.getipython import get_ipython
    except ModuleNotFoundError:
        return None
    shell = get_ipython()
    return shell if shell is not None and getattr(shell, "kernel", None) is not None else None


__all__ = ["NOTEBOOK_HINT", "CallProgress", "register", "show_placement", "show_trace"]
