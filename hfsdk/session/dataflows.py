"""``session.dataflow``: the calls of a step and what flows between them, growing while they run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hfsdk.core.call_flow import Call, CallFlow, Edge
from hfsdk.core.checks import checked, is_whole, shown
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.dataflow import Dataflow
from hfsdk.core.errors import OptionError
from hfsdk.engine.calls import queries as q
from hfsdk.session.client import ControllerClient
from hfsdk.session.live import LiveStep

if TYPE_CHECKING:
    import pandas as pd

    from hfsdk.viz.frame import Picture


class LiveDataflow(LiveStep):
    """The calls of a step and what flows between them. In a notebook it draws itself, live while calls run.

    ``snapshot()`` is the :class:`~hfsdk.core.dataflow.Dataflow` as it is now; what is asked of this object is asked of that.
    """

    def __init__(self, client: ControllerClient, cluster: ClusterSpec, step: int | None = None) -> None:
        super().__init__(client, step)
        self._cluster = cluster

    def snapshot(self) -> Dataflow:
        """Return the dataflow as it is now."""
        step = self.step
        flows: tuple[CallFlow, ...] = self._client.send(q.FlowsOf(step))
        nodes = tuple(node for node, devices in enumerate(self._cluster.node_devices) for _ in devices)
        passed: int = self._client.send(q.ControllerBytes())
        return Dataflow.of(tuple(flows), step, nodes=nodes, controller_bytes=passed)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.snapshot())

    def __len__(self) -> int:
        return len(self.snapshot().calls)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls so far."""
        return self.snapshot().calls

    @property
    def edges(self) -> tuple[Edge, ...]:
        """What flows between them."""
        return self.snapshot().edges

    @checked
    def edge(self, source: int, target: int) -> Edge:
        """Return the edge between two calls, given their ids.

        Raises:
            OptionError: there is none.
        """
        return self.snapshot().edge(source, target)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per call."""
        return self.snapshot().to_pandas()

    def edges_to_pandas(self) -> pd.DataFrame:
        """Return one row per edge, with bytes."""
        return self.snapshot().edges_to_pandas()

    @checked
    def transfer_to_pandas(self, source: int, target: int) -> pd.DataFrame:
        """Return one row per pair of ranks between which something flowed from one call to another.

        Raises:
            OptionError: nothing flows between them.
        """
        return self.snapshot().transfer_to_pandas(source, target)

    def view(self) -> dict[str, Any]:
        """Return what a picture shows, as plain data."""
        return self.snapshot().view()

    def to_text(self) -> str:
        """Return one line per call."""
        return self.snapshot().to_text()

    def _picture_(self) -> Picture:
        from hfsdk.viz.dataflow.view import DataflowPicture, dataflow_view

        return DataflowPicture(dataflow_view(self.view()))

    def _ipython_display_(self) -> None:
        from hfsdk.viz.hooks import show_dataflow

        show_dataflow(self)

    def __repr__(self) -> str:
        return repr(self.snapshot()) + (" (running)" if self.running else "")


class Dataflows(LiveDataflow):
    """The current step's dataflow; ``[k]`` is that of step k, the steps counted from 0 (``[-1]`` is the last)."""

    def __getitem__(self, step: int) -> LiveDataflow:
        if not is_whole(step):
            raise OptionError(
                f"dataflow[k] is that of one step, e.g. dataflow[-1]; got {shown(step)}. session.trace[2:5] spans several steps."
            )
        last = self.step
        number = step + last + 1 if step < 0 else step
        if not 0 <= number <= last:
            raise OptionError(f"there is no step {step}; the session has {self._steps_there}")
        live = LiveDataflow(self._client, self._cluster, number)
        _ = live.step  # raises for one that is no longer kept
        return live
