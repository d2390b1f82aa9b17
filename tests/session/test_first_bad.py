"""The first bad number without engines: the rule for jumps, the run's own snapshots, which layer, the words and the card."""

from __future__ import annotations

import math
import random
import re
import xml.etree.ElementTree as ET
from contextlib import nullcontext

import numpy as np
import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.core.arguments import Learning
from hfsdk.core.batch import refs_of
from hfsdk.core.column_spread import odd, spreads
from hfsdk.core.runtime import Part, Stored
from hfsdk.core.table import Ragged, Table
from hfsdk.core.unscored import NOT_SCORED
from hfsdk.diagnose.first_bad import TapedUpdate, bisected, code_of, first_bad_layer, verdict_of
from hfsdk.diagnose.step_recorder import SHARE, RollingSnapshots, SubmittedCall
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls.dispatch import plan_orders
from hfsdk.run.metric_outliers import Jumps, first_bad
from hfsdk.run.run import RunControl
from hfsdk.session.parts import parts_of
from hfsdk.viz.tables import first_bad_html
from tests.session.test_health import healthy
from tests.session.test_training import TEXTS, OneCall

NAN = float("nan")


def found(**more):
    return hf.FirstBad(**{"kind": "advantage", "symptom": "actor_loss of step 6 jumped", "step": 6, "call": "session.map",
                          "role": "session", **more})  # fmt: skip


# -- the rule


@each("seed", range(40))
def test_no_number_of_a_healthy_run_jumps(seed):
    rng = random.Random(seed)
    rows = [
        {"step": i, **row, "actor_loss": rng.gauss(0, 0.05), "critic_loss": rng.lognormvariate(0, 1), "ratio": rng.gauss(1, 0.05),
         "loss": rng.gauss(0, 1e-7)}
        for i, row in enumerate(healthy(seed))
    ]  # fmt: skip
    assert first_bad(rows) is None


@each("seed", range(40))
def test_a_rare_reward_is_no_jump(seed):
    rng = random.Random(seed)
    rows = [{"step": i, "score_mean": 100.0 * (rng.random() < 0.05), "actor_grad_norm": float(rng.random() < 0.05)}
            for i in range(300)]  # fmt: skip
    assert first_bad(rows) is None


@each("name, value", [
    ("actor_grad_norm", 50.0), ("critic_loss", -40.0), ("kl_mean", 90.0), ("ratio", 30.0), ("score_mean", 1e6), ("loss", NAN),
    ("actor_grad_norm", math.inf), ("kl_mean", NAN),
])  # fmt: skip
def test_one_bad_number_is_named_with_its_step(name, value):
    rows = [{"step": i, name: 1.0 + 0.1 * (i % 3)} for i in range(5)]
    bad = first_bad([*rows, {"step": 5, name: value, "seconds": NAN}, {"step": 6, name: value}])
    assert (bad.step, bad.name) == (5, name)
    assert re.search("is nan|is inf" if not math.isfinite(value) else "jumped to .*; it was 1.*at most before", str(bad))


def test_what_jumps_is_not_usual_afterwards():
    jumps = Jumps({"step": i, "loss": 1.0} for i in range(4))
    assert [len(jumps.take({"step": i, "loss": 100.0})) for i in (4, 5)] == [1, 1]


def test_spreads_name_sample_and_token():
    table = Table({
        "a": Ragged.of([[1.0, 2.0], [3.0], [4.0, -90.0]], np.float32), "b": Ragged.of([[1.0], [NAN, NAN], [1.0, NAN]], np.float32),
        "scores": np.array([0.5, 7.0, 1.0]), "n": np.arange(3), "response": Ragged.of([[1], [2, 3], [4]], np.int32),
    })  # fmt: skip
    seen = spreads(table)
    assert set(seen) == {"a", "b", "scores"}
    assert (seen["a"].at, seen["a"].value, seen["a"].next_largest) == ((2, 1), -90.0, 3.0)
    assert seen["b"].bad_at == (1, None), "all of that sample is bad"
    assert seen["scores"].at == (1, None)
    assert odd(seen["a"], None) == 3.0
    assert odd(seen["a"], seen["a"]) is None, "it was so before"
    assert odd(seen["b"], None) == odd(seen["b"], seen["a"]) == math.inf
    assert odd(seen["b"], seen["b"]) is None, "such were there before"
    assert odd(seen["scores"], None) is None
    assert spreads(Table({"scores": np.array([NOT_SCORED, 1.0], np.float32)}))["scores"].bad is None, "it has no score"


def test_the_first_layer_is_that_of_the_earliest_stage():
    def outputs(*sizes):
        return [(f"layer{i}", size) for i, size in enumerate(sizes)]

    fine, bad = outputs(1.0, 2.0, 3.0), outputs(1.0, NAN, NAN)
    assert first_bad_layer([(0, fine), (0, bad)]) == "layer1"
    assert first_bad_layer([(0, fine), (1, bad)]) == "layer1 (pipeline stage 1)"
    assert first_bad_layer([(0, fine)]) == ""
    assert first_bad_layer([(0, outputs(1.0, 30.0, 40.0))], [(0, fine)]) == "layer1"


def test_bisecting_finds_the_one_unit_or_nothing():
    units = [(i,) for i in range(13)]
    assert [bisected(units, lambda rows, k=k: k in rows) for k in (0, 6, 12)] == [[0], [6], [12]]
    assert bisected(units, lambda rows: len(rows) == 13) == [], "only all of them together"
    assert bisected(units, lambda rows: False) == []


# -- the run's own snapshots


@pytest.fixture
def ready(session, actor, length_reward):
    session.reward(length_reward)
    return session.prompts(TEXTS, batch_size=2)


def test_an_update_is_taken_apart_by_the_mini_batches_that_it_had():
    """Rows that were not scored took no part in it."""
    scores = np.array([0, NOT_SCORED, 2, 3, 4, 5, 6, 7], np.float32)
    tokens = [[1] * count for count in range(1, 9)]
    with hf.Session.simulated("1x2 A100-80GB") as session:
        actor = session.actor("tiny")
        batch = session.batch(prompt=tokens, response=tokens, scores=scores)
        refs = {name: refs_of(batch)[name] for name in batch.columns}
        message = m.Submit("actor", "update", "learning", refs, (), 8, arguments=Learning(epochs=2, mini_batches=2, seed=5))
        client = parts_of(session).client
        taken_apart = TapedUpdate(client, SubmittedCall(0, message, None), {"actor": actor}).plan
        session.place("colocate")
        columns = {name: client.info(ref) for name, ref in refs.items()}
        stored = {ref.call_id: Stored("your data", 8, (Part(np.arange(8), None, 0),), columns) for ref in refs.values()}
        had = plan_orders(message, actor.role, stored)[0].mini_batches
        assert [sorted(mini.rows) for mini in taken_apart] == [sorted(mini.rows) for mini in had]
        assert not any(1 in mini.rows for mini in had)


def test_a_run_keeps_snapshots_that_nobody_else_sees(session, ready):
    run = session.train(OneCall(), ready, steps=3, progress=False)
    assert not session.snapshots
    assert "before step" in run.last_good.name
    session.train(OneCall(), ready, steps=1, progress=False, look_back=0)
    with refuses(hf.OptionError, "no step 7"):
        session.run.first_bad(7)
    with refuses(hf.OptionError, "no snapshot", "before step 3", "look_back=0"):
        session.run.first_bad(3)
    with refuses(hf.OptionError, "let go", "next run"):
        run.first_bad(0)


def test_snapshots_take_their_share_of_the_time_and_no_more(session, ready):
    look_back = RollingSnapshots(parts_of(session), 2, nullcontext)
    taken, spent = 0, 0.0
    for _ in range(200):
        look_back.before_step()
        if look_back.seconds > spent:
            taken, look_back.last_s, look_back.seconds = taken + 1, 1.0, float(taken + 1)
        spent = look_back.seconds
        look_back.after_step(1.0)
    assert SHARE * 200 - 1 <= taken <= SHARE * 200, "a second each"
    assert len(look_back.snapshots) == 2
    look_back.frozen = True
    look_back.after_step(1e6)
    look_back.before_step()
    assert len(look_back.snapshots) == 2
    assert look_back.seconds == spent


def test_no_snapshot_is_taken_where_memory_is_scarce(session, runtime, ready, monkeypatch):
    (room,) = parts_of(session).snapshots.room()
    monkeypatch.setattr(runtime, "free_host_bytes", lambda devices: {0: 3 * room.needed_bytes})
    with pytest.warns(UserWarning, match=r"takes no snapshots of itself.*free on node 0"):
        run = session.train(OneCall(), ready, steps=2, progress=False)
    assert run.last_good is None
    with refuses(hf.OptionError, "none was taken", "free on node 0"):
        run.first_bad(0)
    monkeypatch.setattr(runtime, "free_host_bytes", lambda devices: {0: 10 * room.needed_bytes})
    with pytest.warns(UserWarning, match=r"a snapshot of this run takes .* free on node 0.*look_back=0\) takes none"):
        run = session.train(OneCall(), ready, steps=1, progress=False)
    assert run.last_good is not None


class Goes(OneCall):
    """Its numbers become bad in the third step."""

    def __init__(self, *values):
        super().__init__()
        self.values = list(values)

    def metrics(self, step):
        return {"kl_mean": self.values.pop(0)}


def test_a_number_that_is_not_finite_ends_the_run_and_says_what_finds_it(session, ready):
    with refuses(hf.NonFiniteLossError, "kl_mean of step 2 is nan", "the run ends") as caught:
        session.train(Goes(1.0, 1.0, NAN, 1.0), ready, steps=4, progress=False)
    assert "session.run.first_bad()" in caught.value.__notes__[0]
    assert (session.run.state, len(session.run.rows)) == ("failed", 3)


def test_the_search_begins_before_the_step_whose_number_is_bad(session, ready):
    with refuses(hf.NonFiniteLossError, "kl_mean of step 2 is nan"):
        session.train(Goes(1.0, 1.0, NAN, 1.0), ready, steps=4, progress=False, look_back=0)
    with refuses(hf.OptionError, "before step 2", "look_back=0"):
        session.run.first_bad()


def test_a_number_that_jumps_is_a_warning_and_freezes_the_snapshots(session, ready):
    with pytest.warns(
        UserWarning, match=r"step 3: kl_mean of step 3 jumped to 500; it was 1 at most before; session\.run\.first_bad"
    ):
        run = session.train(Goes(1.0, 1.0, 1.0, 500.0, 1.0, 1.0), ready, steps=6, progress=False)
    assert run.state == "finished"
    assert run.last_good.steps < 3


def test_runs_that_cannot_be_done_again_say_so():
    with hf.Session.simulated("1x2 A100-80GB") as simulated:
        simulated.actor("tiny")
        simulated.reward(lambda completions: [0.0] * len(completions))
        run = simulated.train(hf.GRPO(n=2, kl_coef=0), simulated.prompts(["a", "b"], batch_size=2), steps=1, progress=False)
        with refuses(hf.OptionError, "it is simulated"):
            run.first_bad()
    assert (run.last_good, run.algorithm, run.prompts) == (None, None, None)
    with refuses(hf.OptionError, "'exp7'", "no snapshots"):
        hf.Run(RunControl(kept_as="exp7")).first_bad()


# -- the words


def test_the_verdict_says_where_and_how_much():
    bad = found(column="advantages", value=-5e5, usual=3.2, sample=5, token=3)
    text = verdict_of(bad, "")
    assert text.startswith("Step 6, session.map: advantages of sample 5, token 3 is -5e+05, 3.2 at most otherwise.")
    weight = found(kind="weight", call="actor.update", role="actor", parameter="w", ranks=(1,), value=math.inf, layer="l")
    assert "the weight w on rank 1 is inf (set). The output of l is the first to be bad." in verdict_of(weight, "set")
    loss = found(kind="loss", call="actor.update", role="actor", column="token_loss", value=NAN, sample=2, mini_batch=1, epoch=1)
    assert "actor.update in mini-batch 1 of epoch 1: the loss of sample 2 is nan" in verdict_of(loss, "")


def test_the_code_goes_back_and_does_the_steps_again():
    bad = found(column="advantages", value=-5e5, sample=5, token=3, snapshot="before step 4")
    code = code_of(bad, 2)
    assert "session.rewind(run.last_good)  # before step 4" in code
    assert "for _ in range(2):  # steps 4 to 5, bit for bit" in code
    assert code.endswith("step.batch.take([5])['advantages'][0][3]  # -500000")
    compile(code, "cell", "exec")


def test_the_card_marks_the_token_and_is_well_formed():
    bad = found(
        column="advantages", value=NAN, sample=5, token=1, text="the <film>⟦ is⟧ & good", verdict="v", code="a < b", left="here",
        rows=[{"position": 0, "token": "a", "kl": 0.5}, {"position": 1, "token": " is", "kl": NAN}],
    )  # fmt: skip
    html = first_bad_html(bad.view())
    ET.fromstring(html)
    assert ">&lt;film&gt;" not in html
    assert "&lt;film&gt;<mark" in html
    assert "▶ 1" in html
    assert list(bad.around["token"]) == ["a", " is"]
    assert "FirstBad(advantage, actor_loss of step 6 jumped" in repr(bad)
