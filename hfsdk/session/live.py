"""What the pictures of a step that may still be running share."""

from __future__ import annotations

from collections.abc import Sequence

from hfsdk.core.call_flow import Call
from hfsdk.core.errors import OptionError
from hfsdk.core.trace import KEPT_STEPS
from hfsdk.engine.calls import queries as q
from hfsdk.session.client import ControllerClient


class LiveStep:
    """One step of a session, or the one that is current whenever somebody looks."""

    def __init__(self, client: ControllerClient, step: int | None = None) -> None:
        self._client, self._step = client, step

    @property
    def step(self) -> int:
        """The step's number.

        Raises:
            OptionError: the step is so long ago that its calls and spans are no longer kept.
        """
        if self._step is None:
            current: int = self._client.send(q.CurrentStep())
            return current
        first: int = self._client.send(q.FirstStep())
        if self._step < first:
            raise OptionError(
                f"step {self._step} is no longer kept: a session keeps calls and spans of its last {KEPT_STEPS} steps (now from "
                f"step {first} on). session.history has every step's numbers; session.trace[k].snapshot() keeps a trace for good."
            )
        return self._step

    @property
    def kept_as(self) -> str:
        """The name of the session where it is kept; else ``""``."""
        return self._client.kept_as

    @property
    def _steps_there(self) -> str:
        """Which steps the session keeps, for messages."""
        first: int = self._client.send(q.FirstStep())
        last: int = self._client.send(q.CurrentStep())
        return f"{f'step {last}' if first == last else f'steps {first} to {last}'} ([-1] is the last)"

    @property
    def running(self) -> bool:
        """Whether a call is under way, or of the current step a run that makes more."""
        if self._client.closed:
            return False
        if self._step is None and self._client.run_goes_on():
            return True
        calls: Sequence[Call] = self._client.send(q.RunningCalls())
        return any(self._step in (None, call.step) for call in calls)
