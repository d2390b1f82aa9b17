"""Orders for the ranks of a submitted call: pure planning, done by the controller when the inputs' lengths are known.

Which rows a rank gets follows the call's transfer protocol; rows that were not scored take no part in a loss. Calls that pass a
model over whole sequences are balanced by tokens and cut into micro-batches here, once, so that all tp and pp ranks of a dp rank
run the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hfsdk.core.arguments import Learning
from hfsdk.core.builtin import SEQUENCES
from hfsdk.core.columns import PER_TOKEN
from hfsdk.core.errors import ColumnError
from hfsdk.core.layout import Layout, Mesh
from hfsdk.core.methods import UPDATE
from hfsdk.core.microbatch import MiniBatchPlan, plan_pass, plan_update
from hfsdk.core.pending import ColumnInfo, ColumnRef, scored_rows_of
from hfsdk.core.protocol import THREE_D
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Order, Pick, Stored
from hfsdk.core.table import Array
from hfsdk.core.unscored import NONE_SCORED, PART
from hfsdk.engine.calls.messages import Submit

MicroBatches = tuple[tuple[int, ...], ...]
"""Micro-batches: the row numbers of each."""


def mesh_of(role: RoleSpec) -> Mesh:
    """Return the mesh of a role: its training layout, permuted for its rollout; of a rollout alone, that one's replicas."""
    if role.train is None and role.rollout is None:
        raise ColumnError(f"role {role.name!r} runs a function and has no mesh")
    layout = role.train or Layout(dp=role.rollout.size if role.rollout else 1)
    return layout.mesh(role.rollout.tp if role.rollout else 1)


def plan_orders(request: Submit, role: RoleSpec, stored: Mapping[int, Stored]) -> tuple[Order, ...]:
    """Plan a role's call: every rank's rows, where it reads them, and which run together."""
    mesh = mesh_of(role)
    protocol = request.protocol or THREE_D
    inputs = dict(request.inputs)
    work = request.kind.work
    # a loss computes with numbers: columns of texts stay where they are
    if work == "loss":
        inputs = {n: r for n, r in inputs.items() if _info(r, stored).kind != "object"}
    micro_batches: list[MicroBatches] = [()] * mesh.layout.size
    mini_batches: tuple[MiniBatchPlan, ...] = ()
    if work == "pass":
        rows, micro_batches = _plan_pass(request, role, mesh, stored)
    elif work == "loss":
        rows, mini_batches = _plan_update(request, role, mesh, stored)
    else:
        rows = list(protocol.scatter(request.num_rows, mesh, _tokens(inputs, stored)))
    keepers = set(protocol.collectors(mesh))
    shared = one_array_each(rows)
    picks = {id(row_ids): picks_for(inputs, row_ids, stored) for row_ids in {id(row_ids): row_ids for row_ids in shared}.values()}
    return tuple(
        Order(
            shared[rank], picks[id(shared[rank])], rank in keepers,
            arguments=request.arguments, micro_batches=micro_batches[rank], mini_batches=mini_batches,
        )
        for rank in mesh.ranks
    )  # fmt: skip


def one_array_each(rows: Sequence[Array]) -> list[Array]:
    """Return equal rows as one and the same array: whatever depends on a rank's rows alone is then found once by its ``id``."""
    by_id: dict[int, Array] = {}
    by_content: dict[bytes, Array] = {}
    for row_ids in rows:
        if id(row_ids) not in by_id:
            by_id[id(row_ids)] = by_content.setdefault(row_ids.tobytes(), row_ids)
    return [by_id[id(row_ids)] for row_ids in rows]


def task_order(request: Submit, stored: Mapping[int, Stored]) -> Order:
    """Plan a CPU task: one order with all rows."""
    rows = np.arange(request.num_rows)
    return Order(rows, picks_for(request.inputs, rows, stored), arguments=request.arguments)


def picks_for(inputs: Mapping[str, ColumnRef], rows: Array, stored: Mapping[int, Stored]) -> tuple[Pick, ...]:
    """Return where to read ``rows`` of some columns; columns of one call with the same rows are read together."""
    groups: dict[tuple[int, int], dict[str, ColumnRef]] = {}
    for name, ref in inputs.items():
        # columns that were selected together share one array of row numbers
        groups.setdefault((ref.call_id, id(ref.rows) if ref.rows is not None else 0), {})[name] = ref
    picks = []
    for (call_id, _), refs in groups.items():
        selection = next(iter(refs.values())).rows
        wanted = rows if selection is None else selection[rows]
        picks.append(Pick.of(stored[call_id], wanted, {name: ref.name for name, ref in refs.items()}))
    return tuple(picks)


def input_lengths(inputs: Mapping[str, ColumnRef], name: str, stored: Mapping[int, Stored]) -> Array:
    """Return the length of every row of a ragged input column."""
    info = _info(inputs[name], stored)
    if info.lengths is None:
        raise ColumnError(f"column {name!r} has one value per sample; a variable-length column is needed here")
    rows = inputs[name].rows
    return info.lengths if rows is None else info.lengths[rows]


def check_aligned(request: Submit, stored: Mapping[int, Stored]) -> None:
    """Check that per-token columns of a batch are as long as its responses.

    Raises:
        ColumnError: names the column, the first sample that differs, and both lengths.
    """
    inputs = request.inputs
    per_token = [name for name in inputs if name in PER_TOKEN and name != "response"]
    measure = "response" if "response" in inputs else next(iter(per_token), "")  # a task may read no responses
    for name in per_token:
        lengths, wanted = input_lengths(inputs, name, stored), input_lengths(inputs, measure, stored)
        wrong = np.flatnonzero(lengths != wanted) if len(lengths) == len(wanted) else np.zeros(1, dtype=np.int64)
        if len(wrong):
            row = int(wrong[0])
            has = f"{int(wanted[row])} " + ("response tokens" if measure == "response" else f"of {measure!r}")
            raise ColumnError(
                f"column {name!r} (written by {stored[inputs[name].call_id].name}) does not fit {measure!r}: sample {row} has "
                f"{int(lengths[row])} values and {has}; write one value per response token"
            )


def _info(ref: ColumnRef, stored: Mapping[int, Stored]) -> ColumnInfo:
    return stored[ref.call_id].columns[ref.name]


def _tokens(inputs: Mapping[str, ColumnRef], stored: Mapping[int, Stored]) -> Array | None:
    named = [n for n in SEQUENCES if n in inputs and _info(inputs[n], stored).lengths is not None]
    if not named:
        named = [n for n, r in inputs.items() if _info(r, stored).lengths is not None][:1]
    if not named:
        return None
    return np.asarray(np.sum([input_lengths(inputs, n, stored) for n in named], axis=0, dtype=np.int64))


def _plan_pass(request: Submit, role: RoleSpec, mesh: Mesh, stored: Mapping[int, Stored]) -> tuple[list[Array], list[MicroBatches]]:
    total = input_lengths(request.inputs, "prompt", stored) + input_lengths(request.inputs, "response", stored)
    plan = plan_pass(total, mesh.layout.num_replicas, role.micro_batch_tokens)
    shares = [np.sort(np.array(plan.rows_of(dp), dtype=np.int64)) for dp in range(mesh.layout.num_replicas)]
    return [shares[dp] for dp in mesh.replicas], [plan.micro_batches[dp] for dp in mesh.replicas]


def _plan_update(
    request: Submit, role: RoleSpec, mesh: Mesh, stored: Mapping[int, Stored]
) -> tuple[list[Array], tuple[MiniBatchPlan, ...]]:
    arguments = request.arguments
    assert isinstance(arguments, Learning)
    response = input_lengths(request.inputs, "response", stored)
    judging = (ref for name, ref in request.inputs.items() if not name.startswith(PART))  # a part's None is not the sum's
    scored = scored_rows_of(((ref, _info(ref, stored)) for ref in judging), request.num_rows)
    if scored == []:
        raise ColumnError(NONE_SCORED.format(request.num_rows))
    plan = plan_update(
        input_lengths(request.inputs, "prompt", stored) + response,
        response,
        dp=mesh.layout.num_replicas,
        epochs=arguments.epochs,
        mini_batches=arguments.mini_batches,
        max_tokens=arguments.micro_batch_tokens or role.micro_batch_tokens,
        seed=arguments.seed,
        together=arguments.together,
        shuffle=request.method == UPDATE.name,
        rows=scored,
    )
    shares = []
    for dp in range(mesh.layout.num_replicas):
        shares.append(np.unique(np.array([row for mini in plan for row in mini.passes.rows_of(dp)], dtype=np.int64)))
    return [shares[dp] for dp in mesh.replicas], plan
