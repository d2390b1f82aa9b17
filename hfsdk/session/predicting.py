"""What the planner says of steps that ran: ``session.predict``, ``session.calibrate``, and what a run has cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hfsdk.engine import messages as m
from hfsdk.engine.rerun import Rerun, TwinRun, run_twin
from hfsdk.errors import OptionError
from hfsdk.planner.calibration import Measured
from hfsdk.planner.perf_model import PerfModel
from hfsdk.session.client import ControllerClient
from hfsdk.session.placing import Placing
from hfsdk.session.start import start_simulated
from hfsdk.trace import Trace


def measured_step(session: Placing, client: ControllerClient, trace: Trace, step: int) -> Measured:
    """Return a step that ran, with all that a performance model needs to know of it.

    Raises:
        OptionError: the step's calls are not kept any more, or it has none.
    """
    twin = twin_of(session, client, trace, step, PerfModel())
    return Measured(trace=trace, cluster=session.cluster, questions=twin.questions, tasks=twin.tasks)


def predicted_step(session: Placing, client: ControllerClient, trace: Trace, step: int, perf: PerfModel) -> Trace:
    """Return a step that ran as a simulated twin of the session takes it, with the lengths that were measured."""
    twin = twin_of(session, client, trace, step, perf)
    return Trace.of(twin.spans, title=f"step {step}, predicted")


def twin_of(session: Placing, client: ControllerClient, trace: Trace, step: int, perf: PerfModel) -> TwinRun:
    """Carry a step's calls out again on a simulated twin."""
    reruns: Sequence[Rerun] = client.send(m.Look("reruns", step=step))
    if not reruns:
        raise OptionError(
            f"there is nothing to predict of step {step}: no call of it is done, or it is so long ago that its calls are not kept. "
            "Run a step first; a trace that was saved can be compared with session.trace[k] all the same."
        )
    client.wait([rerun.call.id for rerun in reruns], None)
    runtime = start_simulated(session.cluster, None, perf)
    runtime.keep_questions = True
    functions = [handle.role for handle in session._book.functions]
    return run_twin(
        reruns, runtime, session._placement, tuple(session._specs.values()), functions, _fresh(trace, reruns, session)
    )


def _fresh(trace: Trace, reruns: Iterable[Rerun], session: Placing) -> list[str]:
    """Return the actors whose first generation in the step moved no weights."""
    found: dict[str, bool] = {}
    moved = {span.call_id for span in trace if span.name == "reshard"}
    for rerun in reruns:
        spec = session._specs.get(rerun.call.role)
        if rerun.call.method == "generate" and spec is not None and not spec.shadow_of:
            found.setdefault(rerun.call.role, rerun.call.id not in moved)
    return [role for role, fresh in found.items() if fresh]
