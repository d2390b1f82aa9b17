"""Charts of matplotlib are read on a light and on a dark page: no background of their own, colours of middle lightness."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from matplotlib import colors, pyplot, style  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from hfsdk.viz.curves import INK, LINE, NEGATIVE, SECOND, STYLE, THIRD, advantages_figure  # noqa: E402

PAGES = ("#ffffff", "#111111")
"""JupyterLab's, light and dark."""


def luminance(color: Any) -> float:
    """Relative luminance (WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colors.to_rgb(color)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def contrast(color: Any) -> float:
    """The smaller of a colour's contrasts with the two pages."""
    pairs = [sorted((luminance(color), luminance(page))) for page in PAGES]
    return min((high + 0.05) / (low + 0.05) for low, high in pairs)


def advantages() -> Figure:
    return advantages_figure(
        [" it", " costs", " a", " lot"], values=[0.1] * 4, rewards=[0, 0, 0, 1.0], advantages=[0.2, -0.1, 0, 0.4],
        returns=[0.3] * 4, title="a sample",
    )  # fmt: skip


def users_own() -> Figure:
    with style.context(STYLE):
        figure, axis = pyplot.subplots()
        pyplot.close(figure)
        for k in range(6):
            axis.plot([0, 1], [0, k], label=str(k))
        axis.set(xlabel="step", ylabel="score", title="six")
        axis.legend()
        figure.draw_without_rendering()
    return figure


@pytest.fixture(params=[advantages, users_own], ids=["advantages", "users_own"])
def figure(request: Any) -> Figure:
    made: Figure = request.param()
    made.canvas.draw()  # its ticks are made here, outside of the style
    return made


def test_every_text_and_line_is_read_on_both_pages(figure: Figure) -> None:
    texts = [t for t in figure.findobj(matplotlib.text.Text) if t.get_text() and t.get_visible()]
    assert len(texts) > 8
    assert {t.get_text(): contrast(t.get_color()) for t in texts if contrast(t.get_color()) < 3.9} == {}
    lines = [line for axis in figure.axes for line in axis.lines]
    assert len(lines) > 4
    assert min(contrast(line.get_color()) for line in lines) >= 3
    bars = [bar for axis in figure.axes for bar in axis.patches if isinstance(bar, matplotlib.patches.Rectangle)]
    assert all(contrast(bar.get_facecolor()) >= 3 for bar in bars)
    assert all(contrast(spine.get_edgecolor()) >= 3 for axis in figure.axes for spine in axis.spines.values())


def test_what_is_saved_has_no_background(figure: Figure) -> None:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    file.seek(0)
    pixels = pyplot.imread(file)
    assert pixels.shape[2] == 4
    assert pixels[0, 0, 3] == 0
    assert (pixels[..., 3] == 0).mean() > 0.5


def test_ipython_asks_for_no_background(figure: Figure) -> None:
    inline = pytest.importorskip("matplotlib_inline.backend_inline")
    assert inline._fetch_figure_metadata(figure) is None


def test_the_named_colours_are_read_on_both_pages() -> None:
    with style.context(STYLE):
        cycle = [entry["color"] for entry in pyplot.rcParams["axes.prop_cycle"]]
    assert len(cycle) == 6
    assert min(map(contrast, [*cycle, LINE, SECOND, THIRD, NEGATIVE, INK])) >= 3
