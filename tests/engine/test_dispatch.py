"""What a call's ranks get, and which of them are heard."""

import numpy as np
import pytest

from hfsdk.core import protocol as protocols
from hfsdk.core.errors import ColumnError
from hfsdk.core.layout import Layout
from hfsdk.core.pending import ColumnInfo, ColumnRef
from hfsdk.core.runtime import Stored
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls.dispatch import check_aligned


def test_of_three_d_the_last_stage_answers_once_per_replica():
    mesh = Layout.parse("tp2 pp2 dp2").mesh(1)
    places = [mesh.coordinates(rank) for rank in protocols.THREE_D.collectors(mesh)]
    assert [(at.tp, at.pp, at.dp) for at in places] == [(0, 1, 0), (0, 1, 1)]


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
