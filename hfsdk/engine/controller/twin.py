"""A step carried out again on a simulated twin, from the references and lengths that the controller keeps of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hfsdk.core.arguments import Generation
from hfsdk.core.methods import method_of
from hfsdk.core.pending import ColumnRef
from hfsdk.core.placement import Placement
from hfsdk.core.roles import RoleSpec
from hfsdk.core.table import Array, Ragged, Table
from hfsdk.core.trace import Span
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.rerun import Rerun
from hfsdk.engine.controller.controller import Controller
from hfsdk.engine.simulation.runtime import CostQuestion, SimulatedRuntime


@dataclass(frozen=True, eq=False)
class TwinRun:
    """The result of a step's repetition on a twin."""

    spans: tuple[Span, ...]
    questions: Mapping[int, tuple[CostQuestion, ...]]
    """Number of a call in the original -> its questions to the performance model."""
    tasks: Mapping[int, tuple[int, int]]
    """The same of CPU tasks: rows and tokens."""


def run_twin(
    reruns: Sequence[Rerun], runtime: SimulatedRuntime, placement: Placement | None, roles: Sequence[RoleSpec],
    functions: Sequence[RoleSpec], fresh: Mapping[str, bool],
) -> TwinRun:  # fmt: skip
    """Carry calls out again on a simulated runtime, in their order.

    Args:
        reruns: the calls of a step.
        runtime: the twin's.
        placement: the placement of the roles that are models.
        roles: the roles as they are placed, shadows included.
        functions: roles that are functions.
        fresh: roles whose rollout has weights at the beginning: all of the trainer's, or (``False``) the base of adapters alone.
    """
    controller = Controller(runtime)
    try:
        for role in functions:
            controller.send(m.Declare(role))
        if placement is not None:
            controller.send(m.PlaceRoles(placement, tuple(roles)))
        for name, whole in fresh.items():
            runtime.set_fresh(name, adapters=whole)
        shadow_of = {role.name: role.shadow_of for role in roles if role.shadow_of}
        new_id: dict[int, int] = {}
        for rerun in (r for r in reruns if method_of(r.call.method).repeatable):
            new_id[rerun.call.id] = controller.send(_again(rerun, controller, new_id, shadow_of))
        for number in new_id.values():
            controller.send(m.Wait((number,), 60.0))
        spans = tuple(controller.send(q.SpansOf()))
    finally:
        controller.send(m.Close())
    questions = {old: runtime.questions[new] for old, new in new_id.items() if new in runtime.questions}
    return TwinRun(spans, questions, {old: runtime.tasks[new] for old, new in new_id.items() if new in runtime.tasks})


def _again(rerun: Rerun, controller: Controller, new_id: Mapping[int, int], shadow_of: Mapping[str, str]) -> m.Submit:
    """Return the message that starts a call again on the twin; columns from outside the step become data of the user's."""
    request, inputs = rerun.request, {}
    outside = {name: ref for name, ref in request.inputs.items() if ref.call_id not in new_id}
    for name, ref in request.inputs.items():
        if name not in outside:
            inputs[name] = replace(ref, call_id=new_id[ref.call_id])
    if outside:
        put = controller.send(m.Put(Table({name: _blank(rerun.lengths[name], request.num_rows) for name in outside})))
        inputs |= {name: ColumnRef(put, name) for name in outside}
    arguments = request.arguments
    # the twin generates responses of the lengths that there were, not of lengths that it draws
    if rerun.responses is not None and isinstance(arguments, Generation):
        arguments = replace(arguments, lengths=rerun.responses)
    role = shadow_of.get(request.role, request.role)
    return replace(request, role=role, inputs={name: inputs[name] for name in request.inputs}, arguments=arguments)


def _blank(lengths: Array | None, num_rows: int) -> Array | Ragged:
    if lengths is None:
        return np.zeros(num_rows, dtype=np.int64)
    return Ragged.from_lengths(np.zeros(int(lengths.sum()), dtype=np.int8), lengths)
