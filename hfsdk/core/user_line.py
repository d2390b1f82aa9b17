"""The user's line that asked for something: the innermost frame outside hfsdk."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from hfsdk.core.text import printable


def user_frame() -> FrameType | None:
    """Return the innermost frame outside hfsdk; ``None`` in a thread of hfsdk's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return frame


def _is_ours(frame: FrameType) -> bool:
    """Whether it is hfsdk's, or the start of a thread, which is nobody's line."""
    name = str(frame.f_globals.get("__name__", ""))
    return name in ("hfsdk", "threading") or name.startswith("hfsdk.")


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, at the user's line: a line of hfsdk's says nothing to the reader of the warning."""
    frame = user_frame() or sys._getframe(1)
    warnings.warn_explicit(
        printable(text), category, frame.f_code.co_filename, frame.f_lineno,
        module=str(frame.f_globals.get("__name__", "")) or None, registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )  # fmt: skip
