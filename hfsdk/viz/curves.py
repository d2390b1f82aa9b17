"""The teaching figure of one sample's values, rewards and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hfsdk.viz.raster import NOTEBOOK_HINT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = "hfsdk.viz.charts"
"""Style sheet for ``plt.style.use``: no background, and colours that are read on white and on black."""
LINE, SECOND, THIRD, NEGATIVE, INK = "#3b76c4", "#c9761a", "#2a9d8f", "#c4291c", "#797979"


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
        returns: drawn next to the values where given.
        title: the title above the picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot as plt
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this figure needs {error.name}, which is not installed; {NOTEBOOK_HINT}", name=error.name
        ) from error

    with plt.style.context(STYLE):
        figure = _drawn(plt, tokens, values, rewards, advantages, returns)
        if title:
            figure.suptitle(_plain(title), fontsize=11)
    return figure


def _drawn(
    plt: Any,
    tokens: Sequence[str],
    values: Sequence[float],
    rewards: Sequence[float],
    advantages: Sequence[float],
    returns: Sequence[float] | None,
) -> Figure:
    at = range(len(tokens))
    size = (max(6.0, min(18.0, 0.34 * len(tokens) + 2)), 5.4)
    figure: Figure
    figure, axes = plt.subplots(3, 1, figsize=size, sharex=True, layout="constrained")
    plt.close(figure)  # the caller shows it; pyplot keeps no second copy
    for axis, name in zip(axes, ("reward", "value", "advantage"), strict=True):
        axis.set_ylabel(name)
        axis.axhline(0, color=INK, linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y")
        for side in ("x", "y"):  # ticks are made when they are drawn, and the style is no longer in force then
            axis.tick_params(side, color=INK, labelcolor=plt.rcParams[f"{side}tick.labelcolor"])
    _signed_bars(axes[0], rewards)
    axes[1].plot(at, values, color=SECOND, marker="o", markersize=3.5, linewidth=1.4, label="values")
    if returns is not None:
        axes[1].plot(at, returns, color=THIRD, marker="s", markersize=3, linewidth=1.2, linestyle="--", label="returns")
        axes[1].legend(fontsize=8, loc="best")
    _signed_bars(axes[2], advantages)
    labels = [_token_label(t) for t in tokens]
    slanted = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if max(map(len, labels), default=0) > 2 else {}
    axes[2].set_xticks(list(at), labels, fontsize=8, **slanted)
    axes[2].set_xlim(-0.7, len(tokens) - 0.3)
    return figure


def _signed_bars(axis: Any, heights: Sequence[float]) -> None:
    """Draw bars whose sign shows by colour and by hatching."""
    colors = [LINE if h >= 0 else NEGATIVE for h in heights]
    for bar, height in zip(axis.bar(range(len(heights)), heights, color=colors, width=0.7), heights, strict=True):
        bar.set_hatch("" if height >= 0 else "////")
        bar.set_edgecolor("white")  # of the hatching
        bar.set_linewidth(0)


def _token_label(token: str) -> str:
    shown = token.replace("\n", "⏎").replace("\t", "→")
    shown = "·" + shown[1:] if shown.startswith(" ") else shown
    return _plain(shown if len(shown) <= 14 else shown[:13] + "…")


def _plain(text: str) -> str:
    return text.replace("\\", "\\\\").replace("$", r"\$") if "$" in text else text
