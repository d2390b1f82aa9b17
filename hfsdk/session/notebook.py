"""What a session asks of the notebook it runs in; without IPython nothing of the pictures is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hfsdk.session.running import Run


class Watcher(Protocol):
    """Shows a run while it goes on."""

    def ended(self) -> None:
        """The run has ended: show it as it stays."""
        ...


def show_calls(subscribe: Callable[..., Any]) -> None:
    """Draw progress and failure of calls under the cells that start them, where IPython runs."""
    if _shell() is not None:
        from hfsdk.viz.hooks import CallProgress

        CallProgress(subscribe)


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
