"""The dataflow picture without a browser: right bytes, right places, bad input drawn sensibly."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.core.dataflow import Call, CallFlow, CallRun, Dataflow, Holder, ObjectRead, Share, Transfer
from hfsdk.core.layout import Layout
from hfsdk.viz.frame import bytes_text
from hfsdk.viz.pictures.dataflow import DataflowPicture, DataflowView, dataflow_view
from tests.viz.test_frame import NASTY, check

AWKWARD = "\ud800 \x00 " + NASTY + " \u202eabc 🙂"


def flow(ranks: int = 2, per_node: int = 8, **changes: Any) -> Dataflow:
    """``generate`` on dp ranks, ``values`` on tp2: pairs of ranks read the same rows; one reward task; an update to come."""
    run = CallRun(
        state="done", start_ns=10**18, duration_s=0.25, pool="all", devices=tuple(range(ranks)), mesh=Layout(dp=ranks).mesh(),
        column_bytes={"response": 100 * ranks},
    )  # fmt: skip
    holders = tuple(Holder(rank, 2, 100) for rank in range(ranks))
    pairs = [tuple(range(first, min(first + 2, ranks))) for first in range(0, ranks, 2)]
    shares = tuple(Share(pair, tuple(ObjectRead(r, 2, 100, f"{2 * r}-{2 * r + 1}") for r in pair)) for pair in pairs)
    read = Transfer(1, ("response",), (100 * ranks,), holders, shares)
    whole = Share((None,), tuple(ObjectRead(rank, 2, 100, f"{2 * rank}-{2 * rank + 1}") for rank in range(ranks)))
    calls = [
        CallFlow(Call(id=1, role="actor", method="generate", phase="generation", writes=("response",), num_rows=2 * ranks,
                      protocol="MICRO_DP", line="cell 3, line 1"), run),
        CallFlow(Call(id=2, role="critic", method="compute_values", phase="preparation", reads=("response",), read_from=(1,),
                      inputs=(1,), writes=("values",), num_rows=2 * ranks, protocol="THREE_D"), replace(run, **changes), (read,)),
        CallFlow(Call(id=3, role="reward", method="compute_scores", phase="preparation", reads=("response",), read_from=(1,),
                      inputs=(1,), writes=("scores",), num_rows=2 * ranks, function="positive@3f2a91c0"),
                 CallRun(state="done", duration_s=0.01, start_ns=10**18, column_bytes={"scores": 8 * ranks}),
                 (replace(read, shares=(whole,)),)),
        CallFlow(Call(id=4, role="critic", method="update", phase="learning", reads=("values", "scores"), read_from=(2, 3),
                      inputs=(2, 3)), CallRun()),
    ]  # fmt: skip
    nodes = tuple(device // per_node for device in range(ranks))
    return Dataflow.of(tuple(calls), 0, nodes=nodes, controller_bytes=0)


def picture(given: Dataflow) -> DataflowPicture:
    return DataflowPicture(dataflow_view(given.view()))


def test_the_bytes_of_an_edge_are_those_of_its_matrix() -> None:
    given = flow(4)
    edge = given.edge(1, 2)
    assert (edge.num_bytes, edge.bytes_read) == (400, 800), "two ranks of a pair read each row"
    table = given.transfer_to_pandas(1, 2)
    assert table["num_bytes"].sum() == edge.bytes_read
    assert table[table.to_rank == 3]["which"].tolist() == ["4-5", "6-7"]
    shown = picture(given).view["edges"][0]
    assert sum(cell[3] for cell in shown["cells"]) == 800
    assert [r["label"] for r in shown["readers"]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert [[c[0], c[1]] for c in shown["cells"]] == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 2], [2, 3], [3, 2], [3, 3]]
    assert given.to_pandas()["bytes_in"].iloc[:3].tolist() == [0, 400, 400]
    assert given.edges_to_pandas()["bytes_read"].iloc[:2].tolist() == [800, 400]


def test_a_process_reads_every_row_once() -> None:
    shown = picture(flow(4)).view["edges"][1]
    assert [(r["label"], r["rows"]) for r in shown["readers"]] == [("process", 8)]
    assert sum(cell[3] for cell in shown["cells"]) == 400
    assert "Read: by one process, which has all rows." in shown["words"]


def test_network_is_what_another_node_reads() -> None:
    near, far = flow(4), flow(4, per_node=1)
    assert near.network_bytes(near.edge(1, 2)) == 0
    assert far.network_bytes(far.edge(1, 2)) == 400
    cells = picture(far).view["edges"][0]["cells"]
    assert {(w, r): n for w, r, _, _, n, _ in cells} == {(w, r): 100 * (w != r) for w, r, *_ in cells}
    assert any("400 B are read across the network" in word for word in picture(far).view["edges"][0]["words"])
    assert any("nothing travels" in word for word in picture(near).view["edges"][0]["words"])


def test_many_ranks_stand_together() -> None:
    for ranks, by, groups in ((64, "rank", 64), (128, "node", 16), (99, "node", 13)):
        given = flow(ranks)
        shown = picture(given).view["edges"][0]
        assert (shown["by"], len(shown["writers"]), len(shown["readers"])) == (by, groups, groups), ranks
        assert sum(cell[3] for cell in shown["cells"]) == given.edge(1, 2).bytes_read
        assert len(picture(given).to_html()) < 200_000


def test_ranks_with_the_same_rows_stand_together() -> None:
    given = flow(2)
    share = Share(tuple(range(128)), tuple(ObjectRead(r, 2, 100, "") for r in range(2)))
    moved = replace(given.edges[0].transfer, shares=(share,))
    edge = replace(given.edges[0], transfer=moved)
    shown = dataflow_view(replace(given, edges=(edge, *given.edges[1:])).view())["edges"][0]
    assert (shown["by"], [r["label"] for r in shown["readers"]]) == ("group", ["ranks 0-127"])
    assert sum(cell[3] for cell in shown["cells"]) == 128 * 200 == edge.bytes_read


def test_phases_stand_from_left_to_right_and_levels_follow_the_columns() -> None:
    view = picture(flow()).view
    at = {call["id"]: call for call in view["calls"]}
    assert at[1]["x"] < at[2]["x"] == at[3]["x"] < at[4]["x"]
    assert [band["phase"] for band in view["bands"]] == ["generation", "preparation", "learning"]
    for a in view["calls"]:
        for b in view["calls"]:
            apart = a["y"] + a["height"] <= b["y"] or b["y"] + b["height"] <= a["y"]
            assert a is b or a["x"] != b["x"] or apart, "boxes do not overlap"
    for band, call in zip(view["bands"], (at[1], at[2], at[4]), strict=True):
        assert band["x"] < call["x"]
        assert call["x"] + call["width"] < band["x"] + band["width"]


def test_missing_is_missing_and_predicted_is_dashed() -> None:
    waiting = picture(flow())
    edge = waiting.view["edges"][-1]
    assert (edge["num_bytes"], edge["bytes"], edge["cells"]) == (None, "not read yet", [])
    assert "values: not read yet" in waiting.to_text()
    solid = ET.fromstring(waiting.to_svg())
    dashes = {p.get("data-row"): p.get("stroke-dasharray") for p in solid.iter() if p.tag.endswith("path") and p.get("data-row")}
    assert dashes == {"0": None, "1": None, "2": "2 3", "3": "2 3"}
    predicted = picture(flow(predicted=True))
    assert 'stroke-dasharray="6 3"' in predicted.to_svg()
    assert "url(#" in predicted.to_svg()
    assert "not measured" in picture(replace(flow(), controller_bytes=None)).view["note"]
    assert picture(flow()).view["note"].startswith("Column bytes through the controller: 0 (counted")


def test_views_follow_their_schema() -> None:
    for ranks in (1, 2, 1024):
        view = picture(flow(ranks)).view
        check(view, DataflowView)
        assert json.loads(json.dumps(view, allow_nan=False)) == view
        ET.fromstring(DataflowPicture(view).to_svg())


def test_bad_input_is_drawn() -> None:
    nothing = picture(Dataflow(()))
    assert "no calls in this step yet" in nothing.to_svg()
    assert nothing.to_text().startswith("dataflow: 0 calls, 0 edges")
    given = flow(start_ns=0, duration_s=float("nan"))
    awkward = [replace(call, role=AWKWARD, method=AWKWARD, line=AWKWARD, function=AWKWARD) for call in given.calls]
    drawn = picture(replace(given, calls=tuple(awkward), title=AWKWARD))
    html = drawn.to_html()
    ET.fromstring(drawn.to_svg())
    assert html.count("</script") == 1
    html.encode()
    json.dumps(drawn.view, allow_nan=False)
    assert drawn.to_text()
    lost = [replace(call, phase="") for call in given.calls]
    assert len(picture(replace(given, calls=tuple(lost))).view["calls"]) == 4


def test_something_read_from_a_later_phase_stands_behind_it() -> None:
    given = flow()
    calls = tuple(replace(c, phase="generation") if c.id == 4 else c for c in given.calls)
    at = {c["id"]: c["x"] for c in picture(replace(given, calls=calls)).view["calls"]}
    assert at[4] > at[2]


def test_many_calls_are_cut() -> None:
    run = CallRun(state="done", duration_s=0.1)
    flows = tuple(CallFlow(Call(id=n, role="actor", method="run", phase=""), run) for n in range(1, 301))
    view = picture(Dataflow.of(flows, 0)).view
    assert (len(view["calls"]), view["left_out"]) == (120, 180)
    assert view["calls"][-1]["row"] == 299


@pytest.mark.filterwarnings("ignore:critic's training has tp4 over nodes 0, 1")
def test_a_simulated_step_has_its_edges_with_bytes() -> None:
    with hf.Session.simulated("2x2 A100-80GB") as session:
        actor = session.actor("tiny", train="tp2 dp2", rollout="tp1")
        critic = session.critic("tiny", train="tp4")
        session.place("colocate")
        batch = actor.generate(["one two", "three"] * 4, max_new_tokens=4)
        critic.compute_values(batch).wait()
        given = session.dataflow.snapshot()
        assert [str(call) for call in session.dataflow] == ["actor.generate", "critic.compute_values"]
    edge = next(e for e in given.edges if e.columns == ("response",))
    assert edge.num_bytes == 8 * 4 * 4, "8 responses of 4 tokens of int32"
    assert edge.bytes_read == 4 * edge.num_bytes, "all ranks of tp4 read all rows"
    assert given.network_bytes(edge) == edge.bytes_read // 2
    cells = given.transfer_to_pandas(edge.source, edge.target)
    assert cells.groupby("to_rank")["rows"].sum().tolist() == [8, 8, 8, 8]
    assert given.controller_bytes == 0
    drawn = picture(given)
    assert all(call["predicted"] for call in drawn.view["calls"] if call["kind"] == "model")
    assert f"response: {bytes_text(128)}" in drawn.to_text()
    with refuses(hf.OptionError, "call 7", "call 8"):
        given.edge(7, 8)


def test_weights_of_a_shadow_flow_on_an_edge_of_their_own() -> None:
    with hf.Session.simulated("1x4 A100-80GB") as session:
        actor = session.actor("tiny")
        session.critic("tiny")
        session.place("separation")
        actor.generate(["one"], max_new_tokens=4).wait()
        given = session.dataflow.snapshot()
    (edge,) = [e for e in given.edges if e.kind == "weights"]
    names = {call.id: str(call) for call in given.calls}
    assert (names[edge.source], names[edge.target]) == ("actor.export_weights", "actor.rollout.generate")
    assert edge.num_bytes == actor.spec.num_bytes(actor.role.dtype)
    shown = next(e for e in picture(given).view["edges"] if e["kind"] == "weights")
    assert sum(cell[3] for cell in shown["cells"]) == edge.bytes_read


def test_a_notebook_draws_the_flow_and_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    from hfsdk.viz.hooks import register

    shell = InteractiveShell()
    register(shell)
    data, _ = shell.display_formatter.format(flow())
    assert 'data-picture="dataflow"' in data["text/html"]
    plan = hf.ReshardPlan.between(hf.ModelSpec.preset("llama-7b"), "tp4", "tp2")
    assert 'data-picture="reshard"' in shell.display_formatter.format(plan)[0]["text/html"]
    with hf.Session.simulated("1x2 A100-80GB") as session:
        session.critic("tiny")
        session.place()
        session.models.critic.compute_values(session.batch(prompt=[[1]], response=[[2]])).wait()
        shown: list[dict[str, str]] = []
        monkeypatch.setattr("IPython.display.display", lambda data, **options: shown.append(data))
        assert shell.display_formatter.format(session.dataflow) == ({}, {}), "it shows itself"
        (output,) = shown
        assert "critic.compute_values" in output["text/plain"]
        assert 'data-picture="dataflow"' in output["text/html"]
