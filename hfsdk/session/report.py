"""``session.report``: a session as one offline HTML file, with everything that can be looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from hfsdk.core.batch import Batch
from hfsdk.core.errors import HfsdkError, OptionError, SimulatedValueError
from hfsdk.core.files import as_path, export
from hfsdk.models import ActorModel
from hfsdk.session.parts import Parts
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.frame import html_page
from hfsdk.viz.modules import static
from hfsdk.viz.tables import batch_html, metrics_html, session_html


def report(parts: Parts, path: str | Path, *, batch: Batch | None = None) -> Path:
    """Carry out ``session.report``; its text says what the arguments are."""
    target = as_path(path, "a report")
    if target.suffix != ".html" or not target.parent.is_dir():
        raise OptionError(f"a report is an .html file in a folder that exists; got {str(target)!r}")
    run = parts.runs.run
    batch = batch if batch is not None else getattr(run.last, "batch", None) if run is not None else None
    loaded = {role["name"] for role in parts.view()["roles"] if role["state"] == "loaded"}  # a report loads nothing
    moved = [h for h in parts.deployment.book if isinstance(h, ActorModel) and h.name in loaded]
    sections: list[tuple[str, Callable[[], str]]] = [
        ("Session", lambda: session_html(parts.view())),
        ("Placement", lambda: picture_of(parts.deployment.live()).to_html()),
        ("Training", lambda: "" if run is None else picture_of(run).to_html()),
        ("Dataflow of the last step", lambda: picture_of(parts.dataflows).to_html()),
        ("Timeline of the last step", lambda: picture_of(parts.traces).to_html()),
        ("Memory", lambda: picture_of(parts.memory).to_html()),
        *((f"Resharding of {actor.name}", partial(_reshard, actor)) for actor in moved),
        ("Tokens", lambda: "" if batch is None else picture_of(batch.tokens()).to_html()),
        ("Batch", lambda: "" if batch is None else batch_html(batch.view())),
        ("History", lambda: _history(parts)),
    ]
    drawn = [(heading, _section(draw)) for heading, draw in sections]
    return write_report(
        target, f"hfsdk: {parts.context.name}", [(heading, html) for heading, html in drawn if html], parts.context.notice
    )


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


def _history(parts: Parts) -> str:
    rows: list[Any] = [row for row in parts.log.history().path() if row["kind"] == "step"]
    table = metrics_html(rows) if rows else ""
    return table and f'<div style="overflow-x:auto" tabindex="0" role="region" aria-label="history">{table}</div>'


# -- a report as one HTML file: sections of pictures and tables, nothing loaded from anywhere


def write_report(
    path: str | Path, title: str, sections: Iterable[tuple[str, str]], notice: Callable[[str], object] | None = None
) -> Path:
    """Write a self-contained page.

    Args:
        path: the file to write; its folder must exist.
        title: the page's title, as text.
        sections: heading (text) and body (HTML, e.g. ``picture.to_html()`` or ``batch_html(data)``), in order.
        notice: a function that hears when another file is replaced; by default a warning.

    Returns:
        The path written.

    Raises:
        OutputError: it cannot be written; what was there is unchanged.
    """
    sections = list(sections)
    links = "".join(f'<a href="#s{i}">{escape(heading)}</a>' for i, (heading, _) in enumerate(sections))
    body = "".join(f'<section id="s{i}"><h2>{escape(h)}</h2>{html}</section>' for i, (h, html) in enumerate(sections))
    main = f'<main class="hf hf-report"><h1>{escape(title)}</h1><nav>{links}</nav>{body}</main>'
    page = f"<style>{static('frame.css')}</style>{main}"
    return export(path, html_page(title, page), "the report", notice)
