"""What a call's ranks get, and which of them are heard."""

import itertools

import numpy as np
from expect import refuses

from hfsdk.core import protocol as protocols
from hfsdk.core.errors import ColumnError
from hfsdk.core.layout import Layout
from hfsdk.core.pending import ColumnInfo, ColumnRef
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Part, Stored
from hfsdk.core.spec import ModelSpec
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls.dispatch import check_aligned, plan_orders


def test_of_three_d_the_last_stage_answers_once_per_replica():
    mesh = Layout.parse("tp2 pp2 dp2").mesh(1)
    places = [mesh.coordinates(rank) for rank in protocols.THREE_D.collectors(mesh)]
    assert [(at.tp, at.pp, at.dp) for at in places] == [(0, 1, 0), (0, 1, 1)]


def test_of_a_pass_every_replica_is_heard_once_from_where_the_outputs_are():
    """Those of the last stage alone have log-probs, values and scores."""
    methods, layouts = ("compute_log_probs", "compute_values", "compute_scores"), ("pp2 dp2", "tp2 pp4 dp1", "tp2 pp2 dp2")
    for method, layout in itertools.product(methods, layouts):
        check_heard(method, layout)


def check_heard(method, layout):
    role = RoleSpec(name="r", kind="critic", model=ModelSpec.preset("llama-7b"), train=Layout.parse(layout))
    lengths = np.array([3, 9, 4, 4, 2])
    columns = {name: ColumnInfo("ragged", "int32", 4 * int(lengths.sum()), lengths) for name in ("prompt", "response")}
    stored = {1: Stored("your data", 5, (Part(np.arange(5), None, 0),), columns)}
    request = m.Submit("r", method, "preparation", {name: ColumnRef(1, name) for name in columns}, ("found",), 5)
    mesh = role.train.mesh(1)
    heard = {rank: order for rank, order in enumerate(plan_orders(request, role, stored)) if order.keep}
    assert {(at.tp, at.pp) for at in map(mesh.coordinates, heard)} == {(0, role.train.pp - 1)}, (method, layout)
    assert sorted(row for order in heard.values() for row in order.rows) == [0, 1, 2, 3, 4], (method, layout)


def test_meshes_of_one_text_have_the_same_coordinates():
    """By its text a kept share finds out whether it is a rank's own."""
    by_text = {}
    for layout in ("tp4 dp1", "tp4 pp2 dp1", "tp2 dp2", "tp8 dp1", "tp6 dp2"):
        for tp in (1, 2, 3, 4, 8):
            mesh = Layout.parse(layout).mesh(tp)
            found = tuple(map(mesh.coordinates, mesh.ranks))
            assert by_text.setdefault(str(mesh), found) == found
    assert str(Layout.parse("tp4 dp1").mesh(2)) == "tp4 pp1 dp1 for rollout tp2"
    assert len(set(by_text.values())) == len(by_text)


def test_what_a_splitting_protocol_gathers_is_each_row_once():
    layouts = (("dp2", 1), ("tp2 dp1", 1), ("tp2 pp2 dp2", 1), ("tp4 dp2", 2), ("pp4 dp2", 4))
    for name, num_rows, (layout, rollout_tp) in itertools.product(("THREE_D", "MICRO_DP", "DP"), (0, 1, 7), layouts):
        mesh, protocol = Layout.parse(layout).mesh(rollout_tp), protocols.PROTOCOLS[name]
        rows = protocol.scatter(num_rows, mesh)
        gathered = sorted(row for rank in protocol.collectors(mesh) for row in rows[rank])
        assert gathered == list(range(num_rows)), (name, num_rows, layout, rollout_tp)


def test_a_per_token_column_is_as_long_as_its_response():
    def check(tokens):
        columns = {
            "response": ColumnInfo("ragged", "int32", 20, np.array([2, 3])),
            "values": ColumnInfo("ragged", "float32", 20, np.array([2, tokens])),
        }
        request = m.Submit("critic", "update", "learning", {name: ColumnRef(1, name) for name in columns}, (), 2)
        check_aligned(request, {1: Stored("critic.compute_values", 2, (), columns)})

    check(3)
    for tokens in (2, 4):
        with refuses(ColumnError, "'values'", "sample 1", f"{tokens} values", "3 response tokens"):
            check(tokens)
