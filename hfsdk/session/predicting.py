"""What the planner says of steps that ran: ``session.predict``, ``session.measured`` and ``session.calibrate``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from hfsdk.core.checks import Length, checked
from hfsdk.core.errors import OptionError
from hfsdk.core.methods import GENERATE, method_of
from hfsdk.core.trace import Trace
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.rerun import Rerun
from hfsdk.engine.controller.twin import TwinRun, run_twin
from hfsdk.planner.explain import relative_errors
from hfsdk.planner.perf.calibration import Calibration, Measured
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.session.client import ControllerClient
from hfsdk.session.placing import Placing
from hfsdk.session.start import start_simulated
from hfsdk.session.views import Traces


class Predicting(Placing):
    """The part of a session that holds what ran against what the planner says."""

    perf: PerfModel
    """Predicts the seconds of :meth:`predict`; :meth:`calibrate` replaces it."""
    errors: Mapping[str, float] | None
    """Its relative error by method; ``None`` before :meth:`calibrate`."""

    @property
    @abstractmethod
    def trace(self) -> Traces:
        """The spans of the steps."""

    @checked
    def predict(self, step: int = -1, *, perf: PerfModel | None = None) -> Trace:
        """Return a step that ran as a simulated twin of this session takes it.

        The twin has the same cluster, roles, layouts and placement, and carries out the same calls with the lengths that were
        measured: ``session.trace[-1].compare(session.predict())``. Calls that write files and ``handle.run`` are left out.

        Args:
            step: its number, as in :attr:`trace`; by default the last.
            perf: by default the session's, ``session.perf``: the presets', or those of :meth:`calibrate`.

        Returns:
            A trace of predicted spans.

        Raises:
            OptionError: there is no such step, or its calls are not kept any more (of the last 256 calls they are).
            CallError: a call of the step failed.
        """
        number, trace = self._step_trace(step)
        twin = twin_of(self, self._client, trace, number, perf or self.perf)
        return Trace.of(twin.spans, title=f"step {number}, predicted")

    @checked
    def measured(self, step: int = -1) -> Measured:
        """Return a step that ran with what its calls worked on, for ``PerfModel.fit``.

        Arguments and errors as in :meth:`predict`.
        """
        number, trace = self._step_trace(step)
        twin = twin_of(self, self._client, trace, number, self.perf)
        return Measured(trace=trace, cluster=self.cluster, questions=twin.questions, tasks=twin.tasks)

    @checked
    def calibrate(self, steps: Annotated[Sequence[int], Length(1, 10_000)] = (-1,)) -> Calibration[PerfModel]:
        """Fit the performance model to steps of this session; later predictions use it. See ``PerfModel.fit``.

        Raises:
            OptionError: as in :meth:`predict`; or the session is simulated, and nothing was measured.
        """
        found = PerfModel.fit([self.measured(step) for step in steps], start=self.perf)
        self.perf, self.errors = found.perf, relative_errors(found.bands)
        return found

    def _step_trace(self, step: int) -> tuple[int, Trace]:
        traces = self.trace
        last = traces.step
        number = step + last + 1 if step < 0 else step
        calls = self._client.send(q.CallsOf(number))
        running = [call.id for call in calls if method_of(call.method).repeatable]  # a save that failed told whoever saved
        self._client.wait(running, None)
        return number, traces[step].snapshot()


def twin_of(session: Placing, client: ControllerClient, trace: Trace, step: int, perf: PerfModel) -> TwinRun:
    """Carry a step's calls out again on a simulated twin."""
    reruns: Sequence[Rerun] = client.send(q.RerunsOf(step))
    if not reruns and not len(trace) and not step:
        raise OptionError(
            "there is nothing to predict yet: no call of this session is done. Run a step first; what a step will take without "
            "running it says session.plan(algorithm, workload)."
        )
    if not reruns:
        raise OptionError(
            f"there is nothing to predict of step {step}: no call of it is done, or it is so long ago that its calls are not kept. "
            "Run a step first; a trace that was saved can be compared with session.trace[k] all the same."
        )
    runtime = start_simulated(session.cluster, None, perf)
    runtime.keep_questions = True
    functions = [handle.role for handle in session._book.functions]
    return run_twin(reruns, runtime, session._placement, tuple(session._specs.values()), functions, _fresh(trace, reruns, session))


def _fresh(trace: Trace, reruns: Iterable[Rerun], session: Placing) -> list[str]:
    """Return the actors whose first generation in the step moved no weights."""
    found: dict[str, bool] = {}
    moved = {span.call_id for span in trace if span.name == "reshard"}
    for rerun in reruns:
        spec = session._specs.get(rerun.call.role)
        if rerun.call.method == GENERATE.name and spec is not None and not spec.shadow_of:
            found.setdefault(rerun.call.role, rerun.call.id not in moved)
    return [role for role, fresh in found.items() if fresh]
