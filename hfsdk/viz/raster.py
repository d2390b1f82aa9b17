"""A picture's SVG as PNG, with its letters: resvg draws only those whose font it has, and says nothing of the others."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NOTEBOOK_HINT = "pip install 'hfsdk[notebook]'"
SANS = (
    "DejaVu Sans",
    "Liberation Sans",
    "Noto Sans",
    "Arial",
    "Helvetica",
    "Segoe UI",
    "Ubuntu",
    "Cantarell",
    "Roboto",
    "FreeSans",
)
MONO = ("DejaVu Sans Mono", "Liberation Mono", "Noto Sans Mono", "Menlo", "Consolas", "Courier New", "Ubuntu Mono", "FreeMono")
_PROBE = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"><text y="15" font-size="16" font-family="{}">Ag</text></svg>'
)


def png_of(svg: str, zoom: float) -> bytes:
    """Return a picture as PNG, ``zoom`` pixels to one of the SVG's.

    Letters are DejaVu's, from matplotlib's copy where that is installed, else those of a font of this machine.

    Raises:
        ModuleNotFoundError: resvg-py is not installed, or there is no font to draw letters with.
    """
    try:
        import resvg_py
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"PNG needs resvg-py, which is not installed; {NOTEBOOK_HINT}", name="resvg_py") from error
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=zoom, **_fonts()))


def _fonts() -> dict[str, Any]:
    """Return resvg's options: fonts in place of families that this machine lacks, and the files to find them in."""
    files = _shipped()
    if files:
        return {"font_files": files, **_families(SANS[0], MONO[0])}
    sans = _first_drawn(SANS)
    if sans is None:
        raise ModuleNotFoundError(
            "the letters of a PNG need a font, and none of the usual ones is on this machine; "
            "pip install matplotlib, which brings one, or save the picture as .svg",
            name="matplotlib",
        )
    return _families(sans, _first_drawn(MONO) or sans)


def _families(sans: str, mono: str) -> dict[str, str]:
    return {"font_family": sans, "sans_serif_family": sans, "monospace_family": mono}


@cache
def _shipped() -> list[str]:
    """Return DejaVu's files in matplotlib, which is looked up and not imported; none where it is missing or keeps none."""
    module = find_spec("matplotlib")
    places = (module and module.submodule_search_locations) or ()
    folders = [Path(place) / "mpl-data" / "fonts" / "ttf" for place in places]
    names = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold")
    return [str(file) for folder in folders for name in names if (file := folder / f"{name}.ttf").is_file()]


@cache
def _first_drawn(families: tuple[str, ...]) -> str | None:
    """Return the first family with which resvg draws a letter, ``None`` where it draws none."""
    import resvg_py

    blank = bytes(resvg_py.svg_to_bytes(svg_string=_PROBE.format("").replace("Ag", "")))
    return next((name for name in families if bytes(resvg_py.svg_to_bytes(svg_string=_PROBE.format(name))) != blank), None)
