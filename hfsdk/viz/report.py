"""A report as one HTML file: sections of pictures and tables, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from hfsdk.viz.frame import html_page, static
from hfsdk.viz.plain import clean


def write_report(path: str | Path, title: str, sections: Iterable[tuple[str, str]]) -> Path:
    """Write a self-contained page.

    Args:
        path: the file to write; its folder must exist.
        title: the page's title, as text.
        sections: heading (text) and body (HTML, e.g. ``picture.to_html()`` or ``batch_html(data)``), in order.

    Returns:
        The path written.
    """
    sections = list(sections)
    links = "".join(f'<a href="#s{i}">{escape(heading)}</a>' for i, (heading, _) in enumerate(sections))
    body = "".join(f'<section id="s{i}"><h2>{escape(h)}</h2>{html}</section>' for i, (h, html) in enumerate(sections))
    main = f'<main class="hf hf-report"><h1>{escape(title)}</h1><nav>{links}</nav>{body}</main>'
    page = f"<style>{static('frame.css')}</style>{main}"
    target = Path(path)
    target.write_text(clean(html_page(title, page)), encoding="utf-8")
    return target
