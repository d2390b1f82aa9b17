"""How the nouns look: placement, timeline, tables, curves; live and frozen.

Nothing is loaded here. ``hfsdk.viz.frame`` says how a picture is built; ``register_hooks`` teaches a running IPython to
draw the nouns, which themselves only return plain view data.

May import: core, resharding.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hfsdk.core.checks import Title, checked

if TYPE_CHECKING:
    import pandas as pd
    from anywidget import AnyWidget
    from matplotlib.figure import Figure

    from hfsdk.core.batch import Batch
    from hfsdk.core.layout import Layout
    from hfsdk.core.spec import ModelSpec
    from hfsdk.core.table import Array
    from hfsdk.core.trace import Traced
    from hfsdk.resharding.reshard_plan import ReshardPlan
    from hfsdk.resharding.reshard_report import ReshardReport
    from hfsdk.viz.frame import Picture
    from hfsdk.viz.pictures.clip import ClipPicture
    from hfsdk.viz.pictures.credit import CreditPicture
    from hfsdk.viz.pictures.resharding import ParameterPicture, ReshardPicture
    from hfsdk.viz.pictures.timeline import TimelinePicture
    from hfsdk.viz.pictures.tokens import TokensPicture


def __dir__() -> list[str]:
    own_names = (name for name, thing in globals().items() if getattr(thing, "__module__", "") == __name__)
    return sorted(name for name in own_names if not name.startswith("_"))


def register_hooks() -> bool:
    """Register the display hooks with the IPython that runs, if one does; returns whether one did."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return False
    from hfsdk.viz.hooks import register

    register(shell)
    return True


def picture(obj: Any) -> Picture:
    """Return the picture of an object that draws itself in a notebook, to save or to show elsewhere.

    ``picture(session.trace).save("trace.svg")``; also ``.html`` (interactive, offline), ``.png`` and ``.txt``.

    Args:
        obj: a trace, a placement (``session.placement``), a reshard plan or report, a comparison, a run, ``session.memory``, ...

    Raises:
        OptionError: there is no picture of such an object.
    """
    from hfsdk.viz.drawn import picture_of

    return picture_of(obj)


def widget(obj: Any) -> AnyWidget:
    """Return the picture of an object that draws itself in a notebook as one anywidget, for hosts other than Jupyter.

    In marimo ``mo.ui.anywidget(hf.viz.widget(session.what_if(hf.PPO())))``. Sliders are answered, buttons are heard, and what still
    runs is followed until it has ended; what does not run is shown as it is now.

    Args:
        obj: an object that :func:`picture` takes, or a picture.

    Raises:
        OptionError: there is no picture of such an object.
        ModuleNotFoundError: anywidget is not installed.
    """
    from hfsdk.viz.widgets import widget_of

    made: AnyWidget = widget_of(obj)
    return made


@checked
def parameter_picture(plan: ReshardPlan, parameter: str) -> ParameterPicture:
    """Draw one parameter of the rollout box by box: the rows each rank trains, those it generates with, and whose they are.

    Args:
        plan: e.g. ``actor.reshard_plan``.
        parameter: one that is cut by rows, e.g. ``"model.layers.0.self_attn.qkv_proj.weight"``.

    Raises:
        OptionError: the rollout has no such parameter.
    """
    from hfsdk.viz.pictures.resharding import ParameterPicture

    return ParameterPicture(plan.view_of(parameter))


@checked
def reshard_picture(*plans: ReshardPlan | ReshardReport) -> ReshardPicture:
    """Draw a weight transition step by step; given several plans, with a switch between them.

    A plan or report evaluated in a cell draws itself this way.

    Raises:
        OptionError: nothing was given, something else than plans and reports, or plans for other numbers of ranks.
    """
    from hfsdk.viz.pictures.resharding import ReshardPicture, reshard_view

    return ReshardPicture(reshard_view(*plans))


@checked
def grouping_picture(
    spec: ModelSpec, train: str | Layout, rollout: str | Layout, dtype: str = "bf16", *, nodes: int | None = None
) -> ReshardPicture:
    """Draw a weight transition with ranks grouped as HybridFlow does (strided), and with consecutive ranks (vanilla).

    Example, the paper's (arXiv 2409.19256, figure 8): ``hf.viz.grouping_picture(spec, "tp4 dp2", "tp2 dp4")``.

    Args:
        spec: the model, e.g. ``hf.ModelSpec.preset("llama-7b")``.
        train: the training layout.
        rollout: the rollout's layout on the same ranks.
        dtype: the dtype that weights travel in.
        nodes: how many ranks a node has; by default all are on one.

    Raises:
        LayoutError: a layout does not fit the model, or the two cover different numbers of ranks.
        OptionError: an option is out of its range.
    """
    from hfsdk.resharding.reshard_plan import GROUPINGS, ReshardPlan

    plans = [ReshardPlan.between(spec, train, rollout, dtype, grouping=grouping, nodes=nodes) for grouping in GROUPINGS]
    return reshard_picture(*plans)


@checked
def timelines_picture(traces: Mapping[Title, Traced], title: Title = "") -> TimelinePicture:
    """Draw several traces on one time axis, e.g. ``{"colocate": first.trace[2], "split": second.trace[2]}``.

    Each begins at 0; a table totals the device-seconds of each and how many of them were idle.

    Args:
        traces: measured or predicted ones, by the name that is written above them.
        title: printed above; the names when not given.

    Raises:
        OptionError: there is no trace, or something else among them.
    """
    from hfsdk.viz.pictures.timeline import timelines_picture as draw

    return draw(traces, title)


@checked
def tokens_picture(
    batch: Batch,
    rows: slice | Sequence[int] | Sequence[bool] | Array | None = None,
    *,
    new: str | Batch | None = None,
    old: str = "old_log_probs",
    clip: float = 0.2,
    clip_high: float | None = None,
    color: str | None = None,
) -> TokensPicture:
    """Draw prompts and responses token by token, as ``batch.tokens(...)`` does, with ``to_html``, ``to_svg``, ``to_text``.

    Args:
        batch: a batch with responses; the call waits for its columns.
        rows: which samples, e.g. ``range(8)``; the first 64 when not given.
        new: log-probabilities under the policy as it is now: a column, or ``actor.compute_log_probs(batch)`` after an update.
        old: column of the ratio's denominator.
        clip: epsilon of the ratio: tokens that it leaves without gradient are marked.
        clip_high: upper epsilon, where it differs.
        color: the column that colours the tokens at first, e.g. ``"kl"``.

    Raises:
        ColumnError: a column is missing or has other lengths.
        OptionError: an option is out of its range.
    """
    from hfsdk.viz.pictures.tokens import TokensPicture, tokens_view

    return TokensPicture(tokens_view(batch.tokens(rows, new=new, old=old, clip=clip, clip_high=clip_high, color=color)))


@checked
def credit_picture(batch: Batch, row: int = 0, gamma: float = 1.0, lam: float = 0.95) -> CreditPicture:
    """Draw how one sample's score flows back over its tokens, with sliders for gamma and lambda.

    Args:
        batch: after ``ppo.advantages``: has rewards and values; with advantages and returns its own result is the line.
        row: the sample's number.
        gamma: discount per token that the batch's advantages were made with; the slider begins there.
        lam: lambda of GAE, likewise.

    Raises:
        ColumnError: a column is missing, or there is no such sample.
        OptionError: gamma or lam is not between 0 and 1.
    """
    from hfsdk.viz.pictures.credit import CreditPicture, credit_view

    return CreditPicture(credit_view(batch, row, gamma, lam))


@checked
def clip_picture(
    batch: Batch,
    new: str | Batch = "new_log_probs",
    clip: float = 0.2,
    clip_high: float | None = None,
    *,
    old: str = "old_log_probs",
) -> ClipPicture:
    """Draw the histogram of PPO's ratio over the whole batch, and the share of tokens and of ``|advantage|`` is clipped.

    Args:
        batch: a batch with advantages and the ratio's denominator.
        new: log-probabilities under the policy as it is now: a column, or ``actor.compute_log_probs(batch)`` after an update.
        clip: epsilon; a slider changes it.
        clip_high: upper epsilon, where it differs.
        old: column of the ratio's denominator.

    Raises:
        ColumnError: a column is missing or has other lengths.
        OptionError: a bound is out of its range.
    """
    from hfsdk.viz.pictures.clip import ClipPicture, clip_view

    return ClipPicture(clip_view(batch, new, old, clip, clip_high))


@checked
def advantages_figure(sample: pd.DataFrame, title: str = "") -> Figure:
    """Draw one sample's rewards, values, advantages and returns over its tokens.

    Args:
        sample: the sample that ``batch.inspect(i)`` returns after ``ppo.advantages``.
        title: the title above the picture.

    Raises:
        OptionError: a column is missing.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from hfsdk.core.errors import OptionError
    from hfsdk.viz.curves import advantages_figure as draw

    lacking = [name for name in ("token", "values", "rewards", "advantages", "returns") if name not in sample]
    if lacking:
        raise OptionError(f"sample must be what batch.inspect(i) returns after ppo.advantages; it lacks {', '.join(lacking)}")
    columns = {name: sample[name].tolist() for name in ("values", "rewards", "advantages", "returns")}
    return draw(sample["token"].tolist(), title=title, **columns)
