"""A report as one HTML file: sections of pictures and tables, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

from hfsdk.core.files import export
from hfsdk.viz.frame import html_page
from hfsdk.viz.modules import static


def write_report(
    path: str | Path, title: str, sections: Iterable[tuple[str, str]], notice: Callable[[str], object] | None = None
) -> Path:
    """Write a self-contained page.

    Args:
        path: the file to write; its folder must exist.
        title: the page's title, as text.
        sections: heading (text) and body (HTML, e.g. ``picture.to_html()`` or ``batch_html(data)``), in order.
        notice: told when another file is replaced; by default a warning.

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
