"""The report of a session: everything that can be looked at, in one offline HTML file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfsdk.core.errors import HfsdkError, SimulatedValueError
from hfsdk.models import ActorModel
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.report import write_report
from hfsdk.viz.tables import batch_html, metrics_html, session_html

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.session.session import Session


def session_report(session: Session, path: Path, batch: Batch | None) -> Path:
    """Write the report; see ``Session.report``."""
    run = session.run
    batch = batch if batch is not None else getattr(run.last, "batch", None) if run is not None else None
    loaded = {role["name"] for role in session.view()["roles"] if role["state"] == "loaded"}  # a report loads nothing
    moved = [h for h in session.roles if isinstance(h, ActorModel) and h.name in loaded]
    parts: list[tuple[str, Callable[[], str]]] = [
        ("Session", lambda: session_html(session.view())),
        ("Placement", lambda: picture_of(session.placement).to_html()),
        ("Training", lambda: "" if run is None else picture_of(run).to_html()),
        ("Dataflow of the last step", lambda: picture_of(session.dataflow).to_html()),
        ("Timeline of the last step", lambda: picture_of(session.trace).to_html()),
        ("Memory", lambda: picture_of(session.memory).to_html()),
        *((f"Resharding of {actor.name}", partial(_reshard, actor)) for actor in moved),
        ("Tokens", lambda: "" if batch is None else picture_of(batch.tokens()).to_html()),
        ("Batch", lambda: "" if batch is None else batch_html(batch.view())),
        ("History", lambda: _history(session)),
    ]
    drawn = [(heading, _section(draw)) for heading, draw in parts]
    return write_report(path, f"hfsdk: {session.name}", [(heading, html) for heading, html in drawn if html], session.notice)


def _section(draw: Callable[[], str]) -> str:
    """Draw one section; one that cannot be drawn says why, and the others are written all the same."""
    try:
        return draw()
    except SimulatedValueError:
        return ""  # a simulation has times and shapes, no values
    except Exception as error:
        return f'<p class="hf-bad">not drawn: {escape(f"{type(error).__name__}: {error}")}</p>'


def _reshard(handle: ActorModel) -> str:
    try:
        report = handle.last_reshard
    except HfsdkError:
        return ""  # nothing was moved yet
    return picture_of(report).to_html()


def _history(session: Session) -> str:
    rows: list[Any] = [row for row in session.history.path() if row["kind"] == "step"]
    table = metrics_html(rows) if rows else ""
    return table and f'<div style="overflow-x:auto" tabindex="0" role="region" aria-label="history">{table}</div>'
