"""``Event``: what a controller tells its listeners of calls and roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Required, TypedDict


class Event(TypedDict, total=False):
    """One thing that happened. Calls have all but ``role`` and ``pool``, roles these two."""

    type: Required[str]
    """``"call_started"``, ``"call_progress"``, ``"call_done"``, ``"call_failed"`` or ``"call_cancelled"``; ``"role_loading"`` or
    ``"role_loaded"``; ``"notice"``, of no call or role."""
    text: str
    """The text of a notice."""
    call_id: int
    call: str
    """Role and method, e.g. ``"actor.generate"``."""
    line: str
    """The user's line that started it."""
    phase: str
    """``"generation"``, ``"preparation"`` or ``"learning"``."""
    step: int | None
    """The session's step; ``None`` at a call's start, when it is not known yet."""
    done: float | None
    """The part done of ``total``, in ``unit``; ``None`` where nothing counts."""
    total: float | None
    unit: str
    seconds: float | None
    """Duration of the call, once it has ended."""
    error: str | None
    """Why it failed or was cancelled."""
    role: str
    pool: str


Listener = Callable[[Event], None]
