"""``Parts``: the parts of a session. Its facade passes calls on to them; training, comparing and reports use several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from hfsdk.core.call_events import Listener
from hfsdk.run.run import CurrentRun
from hfsdk.session.client import ControllerClient
from hfsdk.session.context import Context, PendingSave
from hfsdk.session.data import Sources
from hfsdk.session.placing import Deployment
from hfsdk.session.plans import Plans
from hfsdk.session.predictions import Predictions
from hfsdk.session.roles import Declarations
from hfsdk.session.streams import StreamPlaces
from hfsdk.session.views import BatchRegistry, Dataflows, MemoryUse, Traces, session_view
from hfsdk.state.checkpoint import Saveable
from hfsdk.state.history import HistoryLog
from hfsdk.state.saves import Saves
from hfsdk.state.snapshots import Snapshots

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a session; each knows those below it alone."""

    context: Context
    batches: BatchRegistry
    pending_save: PendingSave
    deployment: Deployment
    declarations: Declarations
    places: StreamPlaces
    sources: Sources
    log: HistoryLog
    runs: CurrentRun
    snapshots: Snapshots
    saved: Saveable
    saves: Saves
    predictions: Predictions
    plans: Plans

    @classmethod
    def of(cls, context: Context) -> Self:
        """Return the parts of a new session."""
        pending_save, places, runs = PendingSave(), StreamPlaces(), CurrentRun()
        context.client.run_goes_on = lambda: runs.goes_on
        deployment = Deployment(context, pending_save)
        log = HistoryLog(context.client, deployment.book)
        saved = Saveable(context, deployment, places, log)
        predictions = Predictions(context, deployment)
        return cls(
            context=context,
            batches=BatchRegistry(context.client),
            pending_save=pending_save,
            deployment=deployment,
            declarations=Declarations(context, deployment),
            places=places,
            sources=Sources(context, deployment.book, places),
            log=log,
            runs=runs,
            snapshots=Snapshots(context, deployment, places, log, runs),
            saved=saved,
            saves=Saves(saved, pending_save, runs),
            predictions=predictions,
            plans=Plans(context, deployment, predictions),
        )

    @property
    def client(self) -> ControllerClient:
        """The client that calls are sent through."""
        return self.context.client

    @property
    def traces(self) -> Traces:
        """The spans of the steps."""
        return Traces(self.client)

    @property
    def dataflows(self) -> Dataflows:
        """The calls of the steps and the columns between them."""
        return Dataflows(self.client, self.context.cluster)

    @property
    def memory(self) -> MemoryUse:
        """The bytes on every device through the current step."""
        trace, context, deployment = self.traces.snapshot(), self.context, self.deployment
        title = f"memory of {context.name}, {trace.title}"
        return MemoryUse(trace, deployment.specs.values(), deployment.placement, context.cluster, title)

    def view(self) -> dict[str, Any]:
        """Return plain data of the session's card; does not wait."""
        context = self.context
        return session_view(
            context.name, context.runtime, context.cluster, self.client, self.deployment.book, context.messages
        )  # fmt: skip

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Carry out ``session.subscribe``; its text says what the arguments are."""
        self.client.check_open()
        return self.client.listen(listener)


class HasParts(Protocol):
    """A facade over parts."""

    _parts: Parts


def parts_of(session: HasParts) -> Parts:
    """Return the parts of a session, for code that looks behind its facade: tests, benchmarks."""
    return session._parts
