"""What tests share: a refusal that names its values, and waiting for something without a clock of one's own."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from hfsdk.session.session_parts import parts_of

CEILING_S = 300.0
"""Longest wait for what should be there at once: nothing is slow enough to need it, whatever else the machine does."""
LOOK_AGAIN_S = 0.02


@contextlib.contextmanager
def refuses(error, *named):
    """Expect an error of this class whose text names each of these values.

    The wording of a class is pinned once, in ``test_error_texts.py``; elsewhere what was asked, what exists and what to do are
    values: ``with refuses(LayoutError, "tp=2", 9, "SmolLM2-135M"): ...``. Yields pytest's ``ExceptionInfo``.
    """
    with pytest.raises(error) as caught:
        yield caught
    text = str(caught.value)
    missing = [str(value) for value in named if str(value) not in text]
    assert not missing, f"{type(caught.value).__name__} does not name {missing}: {text}"


def until(what, wanted, session=None):
    """Wait until ``wanted()`` is true and return it; ``what`` says in a failure what did not come.

    With a session it is asked again at each event of the session (a call starts, progresses, ends; a role loads), else a few
    times a second: processes, files and other sessions tell nobody.
    """
    happened, end = threading.Event(), time.monotonic() + CEILING_S
    unsubscribe = parts_of(session).client.subscribe(lambda event: happened.set()) if session is not None else lambda: None
    try:
        while not (answer := wanted()):
            if time.monotonic() > end:
                raise AssertionError(f"waited {CEILING_S:g} s in vain for {what}")
            happened.wait(LOOK_AGAIN_S if session is None else 1.0)
            happened.clear()
        return answer
    finally:
        unsubscribe()
