"""The report of a session: everything that can be looked at, in one offline HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfsdk.errors import HfsdkError
from hfsdk.models import ActorModel
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.report import write_report
from hfsdk.viz.tables import batch_html, metrics_html, session_html

if TYPE_CHECKING:
    from hfsdk.batch import Batch
    from hfsdk.session import Session


def session_report(session: Session, path: Path, batch: Batch | None) -> Path:
    """Write the report; see ``Session.report``."""
    run = session.run
    batch = batch if batch is not None else getattr(run.last, "batch", None) if run is not None else None
    sections = [("Session", session_html(session.view())), ("Placement", picture_of(session.placement).to_html())]
    if run is not None:
        sections.append(("Training", picture_of(run).to_html()))
    sections += [
        ("Dataflow of the last step", picture_of(session.dataflow).to_html()),
        ("Timeline of the last step", picture_of(session.trace).to_html()),
        ("Memory", picture_of(session.memory).to_html()),
    ]
    for handle in session.roles:
        if not isinstance(handle, ActorModel):
            continue
        try:
            sections.append((f"Resharding of {handle.name}", picture_of(handle.last_reshard).to_html()))
        except HfsdkError:
            continue  # nothing was moved yet
    if batch is not None:
        sections.append(("Tokens", picture_of(batch.tokens()).to_html()))
        sections.append(("Batch", batch_html(batch.view())))
    rows: list[Any] = session.history.to_dict("records")
    if rows:
        sections.append(("History", metrics_html(rows)))
    return write_report(path, f"hfsdk: {session.name}", sections)
