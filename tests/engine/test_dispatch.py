"""What a call's ranks get, and which of them are heard."""

import numpy as np
import pytest

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


@pytest.mark.parametrize("method", ["compute_log_probs", "compute_values", "compute_scores"])
@pytest.mark.parametrize("layout", ["pp2 dp2", "tp2 pp4 dp1", "tp2 pp2 dp2"])
def test_of_a_pass_every_replica_is_heard_once_from_where_the_outputs_are(method, layout):
    """Those of the last stage alone have log-probs, values and scores."""
    role = RoleSpec(name="r", kind="critic", model=ModelSpec.preset("llama-7b"), train=Layout.parse(layout))
    lengths = np.array([3, 9, 4, 4, 2])
    columns = {name: ColumnInfo("ragged", "int32", 4 * int(lengths.sum()), lengths) for name in ("prompt", "response")}
    stored = {1: Stored("your data", 5, (Part(np.arange(5), None, 0),), columns)}
    request = m.Submit("r", method, "preparation", {name: ColumnRef(1, name) for name in columns}, ("found",), 5)
    mesh = role.train.mesh(1)
    heard = {rank: order for rank, order in enumerate(plan_orders(request, role, stored)) if order.keep}
    assert {(at.tp, at.pp) for at in map(mesh.coordinates, heard)} == {(0, role.train.pp - 1)}
    assert sorted(row for order in heard.values() for row in order.rows) == [0, 1, 2, 3, 4]


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


@pytest.mark.parametrize("name", ["THREE_D", "MICRO_DP", "DP"])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
@pytest.mark.parametrize(("layout", "rollout_tp"), [("dp2", 1), ("tp2 dp1", 1), ("tp2 pp2 dp2", 1), ("tp4 dp2", 2), ("pp4 dp2", 4)])
def test_what_a_splitting_protocol_gathers_is_each_row_once(name, num_rows, layout, rollout_tp):
    mesh, protocol = Layout.parse(layout).mesh(rollout_tp), protocols.PROTOCOLS[name]
    rows = protocol.scatter(num_rows, mesh)
    assert sorted(row for rank in protocol.collectors(mesh) for row in rows[rank]) == list(range(num_rows))


@pytest.mark.parametrize(("tokens", "fits"), [(2, False), (3, True), (4, False)])
def test_a_per_token_column_is_as_long_as_its_response(tokens, fits):
    columns = {
        "response": ColumnInfo("ragged", "int32", 20, np.array([2, 3])),
        "values": ColumnInfo("ragged", "float32", 20, np.array([2, tokens])),
    }
    request = m.Submit("critic", "update", "learning", {name: ColumnRef(1, name) for name in columns}, (), 2)
    stored = {1: Stored("critic.compute_values", 2, (), columns)}
    if fits:
        check_aligned(request, stored)
        return
    with pytest.raises(ColumnError, match=rf"'values'.*sample 1 has {tokens} values and 3 response tokens"):
        check_aligned(request, stored)
