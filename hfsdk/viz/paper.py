"""A picture as a file: its ES module renders as it does in a browser, and ``static/paper.js`` lays out what it rendered as SVG.

Each drawing is made in a QuickJS context of its own: it keeps nothing and belongs to no thread.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from hfsdk.viz.modules import esm, static
from hfsdk.viz.plain import clean


def paper_svg(name: str, view: Any) -> str:
    """Return the picture of a view as one SVG document with its own background, in both themes.

    Args:
        name: of the picture's module, e.g. ``"timeline"``.
        view: what it shows, as JSON data.

    Raises:
        ModuleNotFoundError: quickjs-ng is not installed, or cannot be imported because no thread can be started.
    """
    try:
        import quickjs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "pictures as files need quickjs-ng, which is not installed; pip install quickjs-ng", name="quickjs"
        ) from error
    except RuntimeError as error:  # it starts a thread when it is imported
        raise ModuleNotFoundError(
            f"pictures as files need quickjs-ng, which cannot be imported: {error}", name="quickjs"
        ) from error
    context = quickjs.Context()
    context.eval(_program(name))
    svg: str = json.loads(context.get("draw")(json.dumps(view), static("frame.css")))
    return clean(svg)


@cache
def _program(name: str) -> str:
    """Return a script that defines ``draw(json, css)`` for one picture."""
    picture, paper = (f"(() => {{{esm(part).replace('export default', 'return')}}})()" for part in (name, "paper"))
    parts = f"const picture = {picture}, {{paper}} = {paper};"
    return f"{parts} globalThis.draw = (...given) => JSON.stringify(paper(picture, ...given));"
