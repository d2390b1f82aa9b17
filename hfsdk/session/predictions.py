"""``Predictions``: the planner's estimates for steps that ran: ``session.predict``, ``measured`` and ``calibrate``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from hfsdk.core.checks import Length
from hfsdk.core.errors import OptionError
from hfsdk.core.methods import GENERATE, method_of
from hfsdk.core.roles import RoleSpec
from hfsdk.core.trace import Trace
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.rerun import Rerun
from hfsdk.engine.controller.twin import TwinRun, run_twin
from hfsdk.engine.simulation.roles import BASE_COPIED
from hfsdk.planner.perf.calibration import Calibration, Measured
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.planner.runners_up import relative_errors
from hfsdk.session.context import Context
from hfsdk.session.placing import Deployment
from hfsdk.session.start import start_simulated
from hfsdk.session.views import Traces


class Predictions:
    """Holds what ran against what the planner says.

    Attributes:
        perf: predicts the seconds of :meth:`predict`; :meth:`calibrate` replaces it.
        errors: the model's relative error by method; ``None`` before :meth:`calibrate`.
    """

    def __init__(self, context: Context, deployment: Deployment) -> None:
        self.perf = PerfModel()
        self.errors: Mapping[str, float] | None = None
        self._context, self._deployment = context, deployment

    def predict(self, step: int = -1, *, perf: PerfModel | None = None) -> Trace:
        """Carry out ``session.predict``; its text says what the arguments are."""
        number, trace = self._step_trace(step)
        twin = self._twin(trace, number, perf or self.perf)
        return Trace.of(twin.spans, title=f"step {number}, predicted")

    def measured(self, step: int = -1) -> Measured:
        """Carry out ``session.measured``; its text says what the arguments are."""
        number, trace = self._step_trace(step)
        twin = self._twin(trace, number, self.perf)
        return Measured(trace=trace, cluster=self._context.cluster, questions=twin.questions, tasks=twin.tasks)

    def calibrate(self, steps: Annotated[Sequence[int], Length(1, 10_000)] = (-1,)) -> Calibration[PerfModel]:
        """Carry out ``session.calibrate``; its text says what the arguments are."""
        calibration = PerfModel.fit([self.measured(step) for step in steps], start=self.perf)
        self.perf, self.errors = calibration.perf, relative_errors(calibration.bands)
        return calibration

    def _step_trace(self, step: int) -> tuple[int, Trace]:
        client = self._context.client
        traces = Traces(client)
        last = traces.step
        number = step + last + 1 if step < 0 else step
        calls = client.send(q.CallsOf(number))
        running = [call.id for call in calls if method_of(call.method).repeatable]  # a save that failed told whoever saved
        client.wait(running, None)
        return number, traces[step].snapshot()

    def _twin(self, trace: Trace, step: int, perf: PerfModel) -> TwinRun:
        """Carry a step's calls out again on a simulated twin.

        Raises:
            OptionError: its calls are not kept.
        """
        deployment = self._deployment
        reruns: Sequence[Rerun] = self._context.client.send(q.RerunsOf(step))
        if not reruns and not len(trace) and not step:
            raise OptionError(
                "there is nothing to predict yet: no call of this session is done. Run a step first; what a step will take without "
                "running it says session.plan(algorithm, workload)."
            )
        if not reruns:
            raise OptionError(
                f"there is nothing to predict of step {step}: no call of it is done, or it is so long ago that its calls are not "
                "kept. Run a step first; a trace that was saved can be compared with session.trace[k] all the same."
            )
        runtime = start_simulated(self._context.cluster, None, perf)
        runtime.keep_questions = True
        functions = [handle.role for handle in deployment.book.functions]
        fresh = _fresh(trace, reruns, deployment.specs)
        return run_twin(reruns, runtime, deployment.placement, tuple(deployment.specs.values()), functions, fresh)


def _fresh(trace: Trace, reruns: Iterable[Rerun], specs: Mapping[str, RoleSpec]) -> dict[str, bool]:
    """Return the actors whose first generation in the step moved no weights, or (``False``) adapters alone."""
    first: dict[str, tuple[bool, bool]] = {}
    moves = [span for span in trace if span.name == "reshard"]
    moved, bases = {span.call_id for span in moves}, {span.call_id for span in moves if BASE_COPIED in span.attrs}
    for rerun in reruns:
        spec = specs.get(rerun.call.role)
        if rerun.call.method == GENERATE.name and spec is not None and not spec.shadow_of:
            # with adapters a call may move these alone, and the base not
            base_unmoved = rerun.call.id not in moved or (spec.lora is not None and rerun.call.id not in bases)
            first.setdefault(rerun.call.role, (base_unmoved, rerun.call.id not in moved))
    return {role: whole for role, (base_unmoved, whole) in first.items() if base_unmoved}
