"""What the pictures of a step that may still be running share."""

from __future__ import annotations

from collections.abc import Sequence

from hfsdk.dataflow import Call
from hfsdk.engine import messages as m
from hfsdk.session.client import ControllerClient


class LiveStep:
    """One step of a session, or the one that is current whenever somebody looks."""

    def __init__(self, client: ControllerClient, step: int | None = None) -> None:
        self._client, self._step = client, step

    @property
    def step(self) -> int:
        """The step's number."""
        current: int = self._client.send(m.Look("step"))
        return current if self._step is None else self._step

    @property
    def running(self) -> bool:
        """Whether a call is under way."""
        if self._client.closed:
            return False
        calls: Sequence[Call] = self._client.send(m.Look("running"))
        return any(self._step in (None, call.step) for call in calls)
