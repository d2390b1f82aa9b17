"""``StepTape``: the calls of one step as they are submitted, with what they read, so that each can be looked at and done again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hfsdk.core.arguments import Learning
from hfsdk.core.batch import Batch
from hfsdk.core.errors import HfsdkError
from hfsdk.core.methods import UPDATE
from hfsdk.core.pending import ColumnRef, Lease
from hfsdk.engine.calls import messages as m
from hfsdk.session.client import ControllerClient


class StoppedHere(Exception):  # noqa: N818 - no failure: the step is done again up to here
    """The call before which a step was to stop is next."""


@dataclass(eq=False)
class TapedCall:
    """A call of a step."""

    index: int
    """Its place among the step's calls."""
    message: m.Submit
    lease: Lease
    weights: Mapping[int, Any] = field(default_factory=dict)
    """What the tape's watcher said right before it."""

    @property
    def call_id(self) -> int:
        """Its id."""
        return self.lease.call_id

    @property
    def name(self) -> str:
        """E.g. ``"actor.update"``."""
        return f"{self.message.role}.{self.message.method}"

    @property
    def written(self) -> dict[str, ColumnRef]:
        """The columns that it writes."""
        return {name: ColumnRef(self.call_id, name, lease=self.lease) for name in self.message.writes}

    @property
    def learning(self) -> Learning | None:
        """Of an update, what it was given."""
        given = self.message.arguments
        return given if self.message.method == UPDATE.name and isinstance(given, Learning) else None


class StepTape:
    """The calls that this thread submits while it runs.

    Args:
        client: whose calls.
        watch: called with each call's message right before it is sent; what it returns is kept with the call.
        stop_before: the place of the call before which the step ends by `StoppedHere`.
    """

    def __init__(
        self, client: ControllerClient, watch: Callable[[m.Submit], Mapping[int, Any]] = lambda message: {}, stop_before: int = -1
    ) -> None:
        self._client, self._watch, self._stop_before = client, watch, stop_before
        self._thread, self._busy = threading.get_ident(), False
        self._seen: Mapping[int, Any] = {}
        self.calls: list[TapedCall] = []
        self.next: m.Submit | None = None
        """The call before which it has stopped."""
        self.error: HfsdkError | None = None
        """What the step failed with."""

    def before(self, message: m.Submit) -> None:
        """Stop here, or look."""
        if self._others():
            return
        if len(self.calls) == self._stop_before:
            self.next = message
            raise StoppedHere
        self._busy = True
        try:
            self._seen = self._watch(message)
        finally:
            self._busy = False

    def take(self, message: m.Submit, lease: Lease) -> None:
        """Keep the call."""
        if not self._others():
            self.calls.append(TapedCall(len(self.calls), message, lease, self._seen))

    def _others(self) -> bool:
        """Whether the call is the watcher's, or another thread's."""
        return self._busy or threading.get_ident() != self._thread

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be told of the calls meanwhile."""
        self._client.tape = self
        try:
            yield
        finally:
            self._client.tape = None

    def batch(self, upto: int) -> Batch:
        """Return the columns that the calls so far read and wrote, of as many rows as call ``upto`` has.

        What a call has not written, because it failed or is not over, is left out.
        """
        rows = self.calls[upto].message.num_rows
        refs: dict[str, ColumnRef] = {}
        for call in self.calls[: upto + 1]:
            if call.message.num_rows == rows:
                done = call.written if self._client.state(call.call_id) == "done" else {}
                refs |= {**call.message.inputs, **done}
        whole = {n: ref for n, ref in refs.items() if self._client.state(ref.call_id) == "done"}
        return Batch(self._client, whole, rows)
