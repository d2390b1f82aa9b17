"""The notebook that a session runs in; without IPython nothing of the pictures is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hfsdk.run.run import Run


_hidden: ContextVar[bool] = ContextVar("hidden", default=False)


class Watcher(Protocol):
    """Shows a run while it goes on."""

    def ended(self) -> None:
        """Show the run as it ended."""
        ...


def show_calls(subscribe: Callable[..., Any]) -> None:
    """Draw progress and failure of calls under the cells that start them, where IPython runs and they are not hidden."""
    if _shell() is not None and not _hidden.get():
        from hfsdk.viz.hooks import CallProgress

        CallProgress(subscribe)


@contextmanager
def calls_hidden() -> Iterator[None]:
    """Draw nothing of the calls of sessions that are made in this block: they are not the user's."""
    token = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(token)


def watcher_of(run: Run) -> Watcher | None:
    """Show a run under its cell, where a notebook looks; otherwise return ``None``, and a bar may be drawn."""
    if _shell() is None:
        return None
    from hfsdk.viz.hooks import Dashboard

    return Dashboard.of(run)


def wants_progress() -> bool:
    """Whether someone looks: a terminal or a notebook."""
    return sys.stdout.isatty() or getattr(_shell(), "kernel", None) is not None


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
