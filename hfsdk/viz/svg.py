"""SVG as text, for the pictures that have no module: the tree of a history, an experiment, one parameter's boxes."""

from __future__ import annotations

import uuid
from html import escape
from typing import Any

from hfsdk.viz.frame import channels
from hfsdk.viz.plain import clean

_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_SVG_STYLE = (
    ".fg{fill:#1b1f24}.sub{fill:#59636e}.panel{fill:#f5f7f9}.paper{fill:#fff}.idle{fill:#dfe4e9}.grid{stroke:#d5dae0}"
    ".edge{stroke:#59636e}.bracket{fill:#59636e}.none{fill:none}"
    "@media (prefers-color-scheme:dark){.fg{fill:#e6e9ed}.sub{fill:#9aa4af}"
    ".panel{fill:#1e2329}.paper{fill:#15181c}.idle{fill:#333b45}.grid{stroke:#3b434d}.edge{stroke:#9aa4af}.bracket{fill:#9aa4af}}"
)


def ink_on(color: str) -> str:
    """Return black or white, whichever reads better on ``color`` (relative luminance, WCAG 2)."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in channels(color)]
    return "#15181c" if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.3 else "#ffffff"


def tag(name: str, content: str = "", /, **attrs: Any) -> str:
    """Return one XML element; ``None`` attributes are left out, ``_`` in names becomes ``-``, a trailing ``_`` is dropped."""
    text = "".join(f' {_attr(k)}="{escape(_value(v))}"' for k, v in attrs.items() if v is not None)
    return f"<{name}{text}>{content}</{name}>" if content else f"<{name}{text}/>"


def _attr(name: str) -> str:
    return name.rstrip("_").replace("_", "-") if name != "viewBox" else name


def _value(value: Any) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def svg_text(x: float, y: float, text: str, **attrs: Any) -> str:
    """Return an SVG text element with its text escaped."""
    return tag("text", escape(text, quote=False) or " ", x=x, y=y, **{"class_": "fg", **attrs})


def svg_document(width: float, height: float, title: str, summary: str, body: str) -> str:
    """Return a whole SVG with its own background, both themes, a title and a description."""
    return clean(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_value(width)} {_value(height)}" width="{_value(width)}" '
        f'height="{_value(height)}" role="img" font-family="{_FONT}" font-size="11"><title>{escape(title)}</title>'
        f"<desc>{escape(summary)}</desc><style>{_SVG_STYLE}</style>"
        f'<rect width="100%" height="100%" class="paper"/>{body}</svg>'
    )


class Hatches:
    """The patterns of predicted marks in one static SVG, one per colour."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._prefix = "h" + uuid.uuid4().hex[:6]

    def __call__(self, color: str) -> str:
        """Return the ``fill`` of predicted marks of this colour."""
        return f"url(#{self._ids.setdefault(color, f'{self._prefix}-{len(self._ids)}')})"

    def defs(self) -> str:
        """Return the ``<defs>`` of every colour asked for."""
        patterns = (
            f'<pattern id="{i}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<rect width="5" height="5" class="paper"/><rect width="1.6" height="5" fill="{color}"/></pattern>'
            for color, i in self._ids.items()
        )
        return f"<defs>{''.join(patterns)}</defs>"
