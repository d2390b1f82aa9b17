"""A picture as a bare anywidget: for notebooks that are no Jupyter, as marimo, and for pages of one's own.

::

    noun -> view (JSON data) -> one anywidget: ``_esm`` draws the trait ``view``; buttons and sliders answer by messages

No container of ipywidgets stands around it, nothing is registered with IPython, and no kernel is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

from hfsdk.core.system import can_start_threads, exiting
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.frame import LivePicture, Picture, follow
from hfsdk.viz.hooks import pressed, run_picture
from hfsdk.viz.modules import has_module
from hfsdk.viz.pictures.dashboard import DashboardPicture
from hfsdk.viz.pictures.what_if import LiveWhatIf, WhatIfPicture


@runtime_checkable
class Going(Protocol):
    """Work that may still be under way."""

    @property
    def running(self) -> bool:
        """Whether it is."""
        ...


def widget_of(obj: Any) -> Any:
    """Return the anywidget of a noun or a picture; it follows a running one until that has ended.

    Raises:
        OptionError: there is no picture of such an object.
        ModuleNotFoundError: anywidget is not installed.
    """
    picture = picture_of(obj)
    if isinstance(picture, WhatIfPicture) and obj is not picture:
        return LiveWhatIf(obj, in_output=False).widget
    kept_as = getattr(obj, "kept_as", "")
    if isinstance(picture, DashboardPicture) and obj is not picture:
        return _followed(LivePicture(run_picture(obj), pressed(obj), kept_as), obj, lambda: run_picture(obj))
    return _followed(LivePicture(_with_module(picture), None, kept_as), obj, lambda: _with_module(picture_of(obj)))


class ImagePicture(Picture):
    """A picture that has no module of its own, as the image that it is everywhere."""

    name = "image"

    def to_text(self) -> str:
        """Return the text form of its picture."""
        return str(self.view["text"])


def _with_module(picture: Picture) -> Picture:
    if has_module(picture.name):
        return picture
    title, summary = (str(picture.view.get(key, picture.name)) for key in ("title", "summary"))
    text, html = picture.to_text(), picture.placeholder()
    return ImagePicture({"picture": "image", "title": title, "summary": summary, "text": text, "html": html})


def _followed(live: LivePicture, obj: Any, take: Callable[[], Picture]) -> Any:
    if isinstance(obj, Going) and obj.running and can_start_threads():
        running, end = (lambda: obj.running), partial(_end, live)
        threading.Thread(target=follow, args=(live, take, running, end), name="hfsdk-follow", daemon=True).start()
    return live.widget


def _end(live: LivePicture) -> None:
    live.end()
    if not exiting.is_set():
        live.widget.view = live.picture.view
