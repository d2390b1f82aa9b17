"""Curves of training as static SVG, and the teaching figure of one sample's values, rewards and advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hfsdk.viz.frame import NOTEBOOK_HINT, svg_document, svg_text, tag

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_WIDTH, PANEL_HEIGHT, PANELS_PER_ROW = 300, 150, 3
LINE, SECOND = "#3b76c4", "#e08a1e"


def curves_svg(
    frame_rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str] | None = None,
    title: str = "training",
    *,
    predicted: bool = False,
) -> str:
    """Return small multiples, one panel per column, as one SVG.

    Args:
        frame_rows: one mapping per step; ``"step"`` gives x (else the row number). Missing or NaN values leave a gap.
        columns: which to draw; all numeric ones but ``step`` when not given.
        title: printed above.
        predicted: whether the numbers come from a simulation: dashed, hollow points.
    """
    rows = list(frame_rows)
    if columns is None:
        found = dict.fromkeys(k for row in rows for k, v in row.items() if k != "step" and _number(v) is not None)
        columns = list(found)
    xs = [_number(row.get("step")) if "step" in row else float(i) for i, row in enumerate(rows)]
    panels = []
    for i, name in enumerate(columns):
        place = f"translate({i % PANELS_PER_ROW * (PANEL_WIDTH + 16)} {24 + i // PANELS_PER_ROW * (PANEL_HEIGHT + 18)})"
        panels.append(
            tag("g", _panel(name, xs, [_number(row.get(name)) for row in rows], predicted), transform=place, data_column=name)
        )
    across = min(PANELS_PER_ROW, max(1, len(columns)))
    down = math.ceil(len(columns) / PANELS_PER_ROW)
    width, height = across * (PANEL_WIDTH + 16), 24 + down * (PANEL_HEIGHT + 18)
    summary = f"{len(columns)} curves over {len(rows)} steps: {', '.join(columns)}"
    return svg_document(width, height, title, summary, svg_text(4, 15, title, font_weight=600, font_size=13) + "".join(panels))


def advantages_figure(
    tokens: Sequence[str],
    *,
    values: Sequence[float],
    rewards: Sequence[float],
    advantages: Sequence[float],
    returns: Sequence[float] | None = None,
    title: str = "",
) -> Figure:
    """Draw, for one sample, rewards, values and advantages over its response tokens.

    Args:
        tokens: the response's tokens as text, one per number.
        values: the critic's value per token.
        rewards: the reward per token, KL penalty included.
        advantages: the advantage per token.
        returns: drawn beside the values where given.
        title: printed above.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot as plt
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this figure needs {error.name}, which is not installed; {NOTEBOOK_HINT}", name=error.name
        ) from error

    at = range(len(tokens))
    figure, axes = plt.subplots(3, 1, figsize=(max(6.0, min(18.0, 0.34 * len(tokens) + 2)), 5.4), sharex=True, layout="constrained")
    plt.close(figure)  # the caller shows it; pyplot keeps no second copy
    for axis, name in zip(axes, ("reward", "value", "advantage"), strict=True):
        axis.set_ylabel(name)
        axis.axhline(0, color="#8b949e", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#d5dae0", linewidth=0.6)
        axis.set_axisbelow(True)
    _signed_bars(axes[0], rewards)
    axes[1].plot(at, values, color=SECOND, marker="o", markersize=3.5, linewidth=1.4, label="values")
    if returns is not None:
        axes[1].plot(at, returns, color="#2a9d8f", marker="s", markersize=3, linewidth=1.2, linestyle="--", label="returns")
        axes[1].legend(frameon=False, fontsize=8, loc="best")
    _signed_bars(axes[2], advantages)
    labels = [_token_label(t) for t in tokens]
    slanted = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if max(map(len, labels), default=0) > 2 else {}
    axes[2].set_xticks(list(at), labels, fontsize=8, **slanted)
    axes[2].set_xlim(-0.7, len(tokens) - 0.3)
    if title:
        figure.suptitle(_plain(title), fontsize=11)
    return figure


def _signed_bars(axis: Any, heights: Sequence[float]) -> None:
    """Draw bars whose sign shows by colour and by hatching."""
    colors = [LINE if h >= 0 else "#c4291c" for h in heights]
    for bar, height in zip(axis.bar(range(len(heights)), heights, color=colors, width=0.7), heights, strict=True):
        bar.set_hatch("" if height >= 0 else "////")
        bar.set_edgecolor("white")


def _panel(name: str, xs: list[float | None], ys: list[float | None], predicted: bool = False) -> str:
    left, top, right, bottom = 46, 22, PANEL_WIDTH - 10, PANEL_HEIGHT - 18
    parts = [svg_text(left, 13, name, font_weight=600)]
    known = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
    if not known:
        box = tag("rect", x=left, y=top, width=right - left, height=bottom - top, class_="none edge", stroke_dasharray="3 3")
        missing = svg_text(
            (left + right) / 2,
            (top + bottom) / 2,
            "not measured",
            text_anchor="middle",
            font_style="italic",
            class_="sub",
        )
        return "".join(parts) + box + missing
    x0, x1 = min(x for x, _ in known), max(x for x, _ in known)
    y0, y1 = min(y for _, y in known), max(y for _, y in known)
    pad = (y1 - y0) * 0.06 or abs(y0) * 0.1 or 1.0
    low, high = y0 - pad, y1 + pad

    def point(x: float, y: float) -> tuple[float, float]:
        across = 0.5 if x1 == x0 else (x - x0) / (x1 - x0)
        return left + across * (right - left), bottom - (y - low) / (high - low) * (bottom - top)

    parts.append(tag("rect", x=left, y=top, width=right - left, height=bottom - top, class_="panel"))
    for value in ticks(low, high):
        y = point(x0, value)[1]
        parts.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(svg_text(left - 5, y + 3.5, f"{value:.4g}", text_anchor="end", font_size=9.5, class_="sub"))
    for x, anchor in ((x0, "start"), (x1, "end")) if x1 > x0 else ((x0, "middle"),):
        parts.append(svg_text(point(x, low)[0], bottom + 12, f"{x:.6g}", text_anchor=anchor, font_size=9.5, class_="sub"))
    parts.append(svg_text((left + right) / 2, bottom + 12, "step", text_anchor="middle", font_size=9.5, class_="sub"))
    line = {"stroke": LINE, "stroke_dasharray": "4 3"} if predicted else {"stroke": LINE}
    dot = {"stroke": LINE, "class_": "paper"} if predicted else {"fill": LINE}
    for run in _runs(xs, ys):
        places = [point(x, y) for x, y in run]
        if len(places) > 1:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(tag("polyline", points=points, fill="none", stroke_width=1.6, stroke_linejoin="round", **line))
        if len(known) <= 40 or len(places) == 1:
            parts += [tag("circle", cx=x, cy=y, r=2.2, **dot) for x, y in places]
    last_x, last_y = point(*known[-1])
    parts.append(tag("circle", cx=last_x, cy=last_y, r=3.2, **dot))
    parts.append(svg_text(right, 13, f"last {known[-1][1]:.4g}", text_anchor="end", font_size=10, class_="sub"))
    return "".join(parts)


def _runs(xs: list[float | None], ys: list[float | None]) -> list[list[tuple[float, float]]]:
    """Split at missing values, so that a gap is drawn as a gap."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if x is None or y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


def ticks(low: float, high: float) -> list[float]:
    """Return about three round numbers between two."""
    raw = (high - low) / 3
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(k * power for k in (1, 2, 5, 10) if k * power >= raw)
    first = math.ceil(low / size)
    return [k * size for k in range(first, first + 8) if k * size <= high]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _token_label(token: str) -> str:
    shown = token.replace("\n", "⏎").replace("\t", "→")
    shown = "·" + shown[1:] if shown.startswith(" ") else shown
    return _plain(shown if len(shown) <= 14 else shown[:13] + "…")


def _plain(text: str) -> str:
    return text.replace("\\", "\\\\").replace("$", r"\$") if "$" in text else text
