"""``TrainHost``: the parts of a session that training, comparing and recovering use."""

from __future__ import annotations

from typing import Protocol

from hfsdk.run.run import CurrentRun
from hfsdk.session.client import ControllerClient
from hfsdk.session.context import Context
from hfsdk.session.data import Sources
from hfsdk.session.placing import Deployment
from hfsdk.session.plans import Plans
from hfsdk.session.views import Traces
from hfsdk.state.history import HistoryLog
from hfsdk.state.saves import Saves
from hfsdk.state.snapshots import Snapshots


class TrainHost(Protocol):
    """The part of a session that a run needs; :class:`hfsdk.session.parts.Parts` has it, and so may a stand-in of a test."""

    @property
    def context(self) -> Context:
        """The session's name, devices, seed, counters and notices."""
        ...

    @property
    def client(self) -> ControllerClient:
        """The client that calls are sent through."""
        ...

    @property
    def deployment(self) -> Deployment:
        """The roles, and where they live."""
        ...

    @property
    def sources(self) -> Sources:
        """The user's data as streams of batches."""
        ...

    @property
    def runs(self) -> CurrentRun:
        """The run there is, and where runs go on if not here."""
        ...

    @property
    def log(self) -> HistoryLog:
        """The history that each step gets a row in."""
        ...

    @property
    def saves(self) -> Saves:
        """Saves the session, and loads it."""
        ...

    @property
    def snapshots(self) -> Snapshots:
        """Moments to go back to."""
        ...

    @property
    def traces(self) -> Traces:
        """The spans of the steps."""
        ...

    @property
    def plans(self) -> Plans:
        """The planner for this session: placements that the roles could have instead, e.g. without a node."""
        ...
