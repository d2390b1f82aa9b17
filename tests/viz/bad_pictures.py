"""Every picture from bad input: nothing, one device, a thousand, hostile texts, no numbers, spans that never end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import hfsdk as hf
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.comparison import ComparedCall, Comparison
from hfsdk.core.dataflow import Call, CallFlow, CallRun, Dataflow, Holder, ObjectRead, Share, Transfer
from hfsdk.core.experiment import MEASURED, Experiment
from hfsdk.core.gap import CAUSES, Gap, GapCause, LayerGap
from hfsdk.core.history import Branch, History, Mark
from hfsdk.core.layout import Layout
from hfsdk.core.placement import Placement, Pool
from hfsdk.core.roles import RoleSpec
from hfsdk.core.table import Ragged
from hfsdk.core.trace import Span, Trace
from hfsdk.resharding.census import Census
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.resharding.reshard_report import ReshardReport, Resident, TransportReport
from hfsdk.run.run import Run, RunControl
from hfsdk.session.views import MemoryUse
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.frame import Picture
from hfsdk.viz.pictures.calibration import CalibrationPicture, calibration_view
from hfsdk.viz.pictures.explanation import ExplanationPicture, explanation_view
from hfsdk.viz.pictures.placement import PlacementPicture, placement_view
from hfsdk.viz.pictures.plan import PlanPicture, plan_view
from hfsdk.viz.pictures.what_if import WhatIfPicture, what_if_view
from tests.viz import demo, demo_plans
from tests.viz import token_batches as made

ORDERS = "\x1b[31m\x1b]0;owned\x07\x9b2J\x7f\r"
"""What a terminal would obey."""
HOSTILE = "</script><script>window.hacked=1</script>]]>&\"'<!-- \u202eabc שלום 🙂 \ud800 \udc00 \x00\x0b\ufffe " + ORDERS + "x" * 99
NAMED = HOSTILE.encode("utf-8", "replace").decode()
"""The same where a name is taken only if it has a UTF-8 form: of models and columns."""
NAN, INF = float("nan"), float("inf")
POINTS = [[0.0, 3, 0, 0.5], [0.1, 2, 1, 0.4], [0.2, 0, 0, 0.0]]


def broken(data: Any, number: float, keep: tuple[str, ...] = ()) -> Any:
    """The same data with every float and count of bytes or seconds replaced; what places a mark (ranks, devices) stays."""
    if isinstance(data, dict):
        return {k: number if _measured(k, v) and k not in keep else broken(v, number, keep) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(number if isinstance(v, float) else broken(v, number, keep) for v in data)
    return data


def _measured(name: Any, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or str(name).endswith(("_bytes", "_s")) or str(name) in ("seconds", "score")


def hostile(data: Any) -> Any:
    """The same data with every text that a user may choose replaced."""
    if isinstance(data, dict):
        return {k: HOSTILE if k in ("title", "name", "model", "pool", "prompt", "response", "state", "error") else hostile(v)
                for k, v in data.items()}  # fmt: skip
    return type(data)(map(hostile, data)) if isinstance(data, list | tuple) else data


# ---------------------------------------------------------------- traces


def spans(change: Callable[[Span], Span], **options: Any) -> Trace:
    return Trace.of([change(span) for span in demo.step_trace(**options)], "changed")


def hostile_trace() -> Trace:
    words = {"role": HOSTILE, "method": HOSTILE, "name": HOSTILE, "phase": HOSTILE, "pool": HOSTILE}
    trace = spans(lambda s: replace(s, **words, parent=HOSTILE if s.parent else "", attrs={HOSTILE: HOSTILE, "tokens": 1}))
    return Trace(trace.spans, HOSTILE)


def bad_numbers_trace(number: float) -> Trace:
    drain = {"drain": json.dumps([[0.0, 3, 0, number], [number, 2, number, 0.4], [0.2, number, 0, 0.0]])}
    return spans(lambda s: replace(s, duration_s=number, attrs={**dict.fromkeys(s.attrs, number), **drain}))


def some_bad_numbers_trace() -> Trace:
    count = iter(range(10**6))
    return spans(lambda s: s if next(count) % 3 else replace(s, duration_s=NAN, attrs=dict.fromkeys(s.attrs, INF)))


def drained_trace(devices: int = 2) -> Trace:
    drain = {"drain": json.dumps(POINTS)}
    return spans(lambda s: replace(s, attrs={**s.attrs, **drain}) if s.name == "decode" else s, devices=devices)


TRACES: dict[str, Callable[[], Trace]] = {
    "empty": lambda: Trace.of([]),
    "one device": lambda: demo.step_trace(devices=1),
    "1024 devices": lambda: demo.step_trace(devices=1024, nested=False),
    "hostile": hostile_trace,
    "nan": lambda: bad_numbers_trace(NAN),
    "infinity": lambda: bad_numbers_trace(INF),
    "some nan": some_bad_numbers_trace,
    "only running": lambda: spans(lambda s: replace(s, duration_s=None)),
    "one moment": lambda: spans(lambda s: replace(s, duration_s=0.0, start_ns=demo.START_NS)),
    "a year": lambda: spans(lambda s: replace(s, duration_s=3e7)),
    "drained": drained_trace,
    "no tokens left": lambda: spans(lambda s: replace(s, attrs={"drain": "[[0.0, 0, 0, 0.0]]"})),
}


# ---------------------------------------------------------------- the other pictures


def control_of(rows: list[dict[str, Any]], words: str = "a prompt", trace: Trace | None = None) -> RunControl:
    control = RunControl(steps=len(rows) or 5)
    for row in rows:
        samples = [
            {"prompt": words, "response": words, "score": row.get("score_mean")},
            {"prompt": None, "response": "", "score": None},
        ]
        control.record.add(row, None, trace or demo.step_trace(), row["step"], samples)
    return control


def run_of(rows: list[dict[str, Any]], words: str = "a prompt", trace: Trace | None = None) -> Run:
    return Run(control_of(rows, words, trace))


def rows_of(number: float | None, steps: int = 3) -> list[dict[str, Any]]:
    names = ("score_mean", "kl_mean", "seconds", "tokens_per_s", "memory_bytes", "busy_share", "cost", "own")
    return [{"step": i, **dict.fromkeys(names, i + 0.5 if number is None else number)} for i in range(steps)]


def failed_run() -> Run:
    control = control_of(rows_of(None), HOSTILE, hostile_trace())
    control.error = ValueError(HOSTILE)
    control.record.rows = [{**row, HOSTILE: 1.0} for row in control.record.rows]
    return Run(control)


def memory_of(trace: Trace, devices: int = 2) -> MemoryUse:
    return MemoryUse(trace, (), None, ClusterSpec.parse(f"1x{devices} cpu"), trace.title or "memory")


def held_trace(number: float | None = None, devices: int = 2) -> Trace:
    held = {"weights_bytes": 10**9, "optimizer_bytes": 2 * 10**9, "kv_cache_bytes": 5 * 10**8, "rss_bytes": 4 * 10**9}
    found = held if number is None else dict.fromkeys(held, number)
    return spans(lambda s: replace(s, attrs=found), devices=devices)


def planned_memory() -> Picture:
    model = hf.ModelSpec.preset("llama-7b")
    role = RoleSpec(name="actor", kind="actor", model=model, train=Layout(tp=8), rollout=Layout(tp=8), dtype="bf16")
    placement = Placement((Pool("all", tuple(range(1024))),), {"actor": "all"})
    return picture_of(MemoryUse(Trace.of([]), (role,), placement, ClusterSpec.parse("128x8 A100-80GB"), "planned"))


def compared(this: float | None, other: float | None, words: str = "actor.generate") -> Comparison:
    row = ComparedCall(call=words, this_s=this, other_s=other)
    return Comparison(this=words, other=words, this_source="measured", other_source="guess", rows=(row, row), total=row)


def tokens(change: Callable[[dict[str, Any]], dict[str, Any]] = lambda c: c, **options: Any) -> Any:
    return made.Batch.from_columns(made.LocalClient(), change(made.columns(**options)))


def all_numbers(number: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(column: Any) -> Any:
        if isinstance(column, Ragged):
            return column if column.dtype.kind in "iu" else column.map(np.full_like(column.flat, number))
        return np.full_like(column, number) if column.dtype.kind == "f" else column

    return lambda columns: {name: changed(column) for name, column in columns.items()}


def plan_of(name: str, train: str, rollout: str) -> ReshardPlan:
    spec = hf.ModelSpec(
        name=name, num_layers=2, hidden_size=64, mlp_hidden_size=96, num_heads=8, num_kv_heads=4, head_dim=32, vocab_size=260,
        max_positions=128,
    )  # fmt: skip
    return ReshardPlan.between(spec, train, rollout)


def report_of(plan: ReshardPlan, seconds: float) -> ReshardReport:
    came = tuple([0] * plan.num_ranks)
    return ReshardReport(plan, tuple(TransportReport(1, 2, 3, 0, came, seconds) for _ in range(plan.num_ranks)))


def flow_of(words: str, seconds: float | None, state: str = "done", ranks: int = 2) -> Dataflow:
    """Two calls, the second reading from every rank of the first."""
    run = CallRun(
        state=state, start_ns=10**18, duration_s=seconds, pool=words, devices=tuple(range(ranks)), mesh=Layout(dp=ranks).mesh(),
        column_bytes={words: 100 * ranks},
    )  # fmt: skip
    holders = tuple(Holder(rank, 2, 100) for rank in range(ranks))
    shares = tuple(Share((rank,), (ObjectRead(rank, 2, 100, words),)) for rank in range(ranks))
    shared = {"role": words, "method": words, "line": words, "num_rows": 2 * ranks, "protocol": "DP"}
    calls = (
        CallFlow(Call(id=1, phase="generation", writes=(words,), **shared), run),
        CallFlow(Call(id=2, phase="learning", reads=(words,), read_from=(1,), inputs=(1,), **shared), run,
                 (Transfer(1, (words,), (100 * ranks,), holders, shares),)),
    )  # fmt: skip
    return Dataflow.of(calls, 0, nodes=tuple(rank // 8 for rank in range(ranks)), controller_bytes=0)


PLAN_TEXTS = ("title", "preset", "why", "text", "family", "algorithm", "cluster", "error", "label", "unit", "plan_name")


def hostile_plan(data: Any, every: tuple[str, ...] = PLAN_TEXTS) -> Any:
    """The same data with every text of a plan replaced, roles and pools included."""
    if isinstance(data, dict):
        return {HOSTILE if k == "actor" else k: HOSTILE if k in every and isinstance(v, str) else hostile_plan(v)
                for k, v in data.items()}  # fmt: skip
    if isinstance(data, list):
        return [hostile_plan(v) for v in data]
    return HOSTILE if data in ("actor", "actor+reference", "all") else data


def planned(data: dict[str, Any]) -> Picture:
    return PlanPicture(plan_view(data))


def asked(change: Callable[[Any], Any] = lambda data: data, moved: str = "response_tokens", **options: Any) -> Picture:
    what_if = demo_plans.what_if(**options).draw(moved)
    return WhatIfPicture(what_if_view(change(what_if.view())))


def without_points(data: dict[str, Any]) -> dict[str, Any]:
    points = [{**p, "seconds": None, "cost_per_step": None, "plan": ""} for p in data["curve"]["points"]]
    return {**data, "curve": {**data["curve"], "points": points}, "error": HOSTILE}


NO_PLACE = {"title": "", "nodes": [], "devices": {}, "pools": {}, "roles": []}


def placed(data: dict[str, Any]) -> Picture:
    return PlacementPicture(placement_view(data))


def calibrated(number: float | None = None, words: str = "actor.generate", calls: int = 3) -> Picture:
    """A calibration of three calls; with ``number`` every number is that one."""
    data: dict[str, Any] = {
        "error_before": 0.38, "error_after": 0.04,
        "calls": [{"call": words, "measured_s": 0.5 + i, "before_s": 0.9 + i, "after_s": 0.52 + i} for i in range(calls)],
        "constants": [{"name": "host_s", "before": 1e-4, "after": 2e-4, "determined": True},
                      {"name": words, "before": 0.4, "after": 0.4, "determined": False}],
        "bands": {"": [0.9, 1.1], "generate.decode": [0.95, 1.2]} if calls else {"": [1.0, 1.0]},
    }  # fmt: skip
    return CalibrationPicture(calibration_view(data if number is None else broken(data, number)))


def counted(ranks: int = 2, role: str = "actor", twice: int = 0) -> Picture:
    held = Resident("generating", 0, 6 * 10**6, 9 * 10**3, 10**6, twice)
    return picture_of(Census(role, (held,) * ranks, (7 * 10**6,) * ranks))


def gap_of(layers: int = 6, words: str = "generated at 0.7", value: float = 0.1) -> Picture:
    lengths, recorded = np.array([3, 2]), np.array([-1.0, -2.0, -3.0, -1.0, -2.0])
    parts = {"temperature": np.full(5, value), "rest": np.zeros(5)}
    causes = tuple(
        GapCause(cause, "the trainer's pass" if cause < "r" else "", *((value, 1.0, True, words) if cause == "temperature" else ()))
        for cause in CAUSES
    )
    places = ["embedding", *(f"layer {i}" for i in range(layers - 2)), "norm"][:layers]
    far = tuple(LayerGap(place, 1e-7, NAN if i == 0 else value / 10**i, 1e-3) for i, place in enumerate(places))
    return picture_of(Gap("actor", "fp32", words, causes, far, lengths, recorded + value, recorded, parts, (0, 2), words))


# ---------------------------------------------------------------- branches and experiments


def experiment_of(value: float | None, name: str = "PPO", steps: int = 3, *, judged: bool = False) -> Experiment:
    """Two algorithms, two seeds; every measure of the second one is ``value``."""
    rows = [
        {"algorithm": algorithm, "seed": seed, "step": step, **dict.fromkeys(MEASURED, number)}
        for algorithm, number in ((name, value), ("GRPO", 0.1))
        for seed in (0, 1)
        for step in range(steps)
    ]
    then = {"algorithms": {name: {"final_scores": {"0": 0.2, "1": 0.4}}}} if judged else None
    return Experiment(tuple(rows), {name: "()", "GRPO": "()"}, (0, 1), steps, then)


def history_of(score: float | None, name: str = "again", steps: int = 4) -> History:
    """A branch that left ``main`` after its second step."""
    rows = [{"kind": "step", "branch": "main", "step": i, "score_mean": score} for i in range(steps)]
    rows[min(1, steps - 1)]["snapshot"] = HOSTILE if name == HOSTILE else "before"
    rows += [{"kind": "update", "branch": name, "role": "actor"}, {"kind": "step", "branch": name, "step": 2, "score_mean": score}]
    mark = str(rows[min(1, steps - 1)]["snapshot"])
    return History(tuple(rows), (Branch("main"), Branch(name, "main", mark, 1)), (Mark(mark, "main", 1),), name)


def explained(**more: Any) -> Any:
    """A configuration of verl that breaks a rule and does not fit."""
    config = {
        "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 5, "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 7, "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.95, "trainer.save_freq": 1, **more,
    }  # fmt: skip
    return hf.explain(config)


def explained_badly(change: Callable[[Any], Any]) -> Picture:
    return ExplanationPicture(explanation_view(change(explained().view())))


def hostile_texts(value: Any) -> Any:
    """The same with hostile text in the place of what a configuration names."""
    if isinstance(value, dict):
        named = ("model", "how", "rule", "got", "do", "code", "said", "left_out", "title", "label", "pool", "call", "source")
        return {k: HOSTILE if k in named else hostile_texts(v) for k, v in value.items()} | (
            {HOSTILE: HOSTILE} if not value else {}
        )
    return [hostile_texts(one) for one in value] if isinstance(value, list) else value


PICTURES: dict[str, Callable[[], Picture]] = {
    "explanation: hostile": lambda: explained_badly(hostile_texts),
    "explanation: nan": lambda: explained_badly(lambda data: broken(data, NAN)),
    "explanation: infinity": lambda: explained_badly(lambda data: broken(data, INF)),
    "explanation: 0": lambda: explained_badly(lambda data: broken(data, 0.0)),
    "explanation: unknown model": lambda: picture_of(explained(**{"actor_rollout_ref.model.path": "of/nobody"})),
    **{f"timeline: {name}": lambda make=make: picture_of(make()) for name, make in TRACES.items()},
    **{f"timelines: {name}": lambda make=make: hf.viz.timelines_picture({HOSTILE: make(), "b": make(), "c": demo.step_trace()})
       for name, make in TRACES.items() if name != "1024 devices"},
    **{f"comparison: {name}": lambda make=make: picture_of(make().compare(demo.step_trace())) for name, make in TRACES.items()},
    "comparison: nothing": lambda: picture_of(Trace.of([]).compare(Trace.of([]))),
    "comparison: nan, infinity": lambda: picture_of(compared(NAN, INF)),
    "comparison: 0": lambda: picture_of(compared(0.0, 0.0)),
    "comparison: neither": lambda: picture_of(compared(None, None, HOSTILE)),
    "placement: empty": lambda: placed(NO_PLACE),
    "placement: one device": lambda: placed(demo.placement_data(1, 1)),
    "placement: 1024 devices": lambda: placed(demo.placement_data(128, 8)),
    "placement: hostile": lambda: placed(hostile(demo.placement_data(1, 4))),
    "placement: hostile, many": lambda: placed(hostile(demo.placement_data(4, 8))),
    "placement: nan": lambda: placed(broken(demo.placement_data(1, 4), NAN)),
    "placement: infinity": lambda: placed(broken(demo.placement_data(4, 8), INF)),
    "plan: none": lambda: planned(demo_plans.no_plan()),
    "plan: one device": lambda: planned(demo_plans.plan_data(cluster="1x1 H100", price=0.0, steps=1)),
    "plan: 4096 devices": lambda: planned(demo_plans.plan_data(cluster="512x8 H100")),
    "plan: odd nodes": lambda: planned(demo_plans.plan_data(cluster="3x5 H100 + 1x3 A100-80GB")),
    "plan: hostile": lambda: planned(hostile_plan(demo_plans.plan_data())),
    "plan: nan": lambda: planned(broken(demo_plans.plan_data(), NAN)),
    "plan: infinity": lambda: planned(broken(demo_plans.plan_data(), INF)),
    "plan: 0": lambda: planned(broken(demo_plans.plan_data(), 0.0)),
    "plan: too long": lambda: planned(broken(demo_plans.plan_data(), 1e300)),
    "what_if: hostile": lambda: asked(hostile_plan),
    "what_if: one device": lambda: asked(cluster="1x4 H100", moved="devices"),
    "what_if: nan": lambda: asked(lambda data: broken(data, NAN)),
    "what_if: infinity": lambda: asked(lambda data: broken(data, INF)),
    "what_if: nothing fits": lambda: asked(without_points),
    "what_if: 1024 devices": lambda: asked(cluster="128x8 A100-80GB", moved="devices"),
    "calibration: nothing": lambda: calibrated(calls=0),
    "calibration: nan": lambda: calibrated(NAN),
    "calibration: infinity": lambda: calibrated(INF),
    "calibration: 0": lambda: calibrated(0.0),
    "calibration: hostile": lambda: calibrated(words=HOSTILE),
    "census: nothing": lambda: counted(0),
    "census: 1024 ranks": lambda: counted(1024),
    "census: hostile": lambda: counted(2, HOSTILE, twice=10**6),
    "probe: one sample": lambda: picture_of(demo.reward_probe(1)),
    "probe: 2000 samples": lambda: picture_of(demo.reward_probe(2000)),
    "probe: hostile": lambda: picture_of(demo.reward_probe(8, HOSTILE)),
    "gap: no layers": lambda: gap_of(0),
    "gap: 200 layers": lambda: gap_of(200),
    "gap: nan": lambda: gap_of(value=NAN),
    "gap: infinity": lambda: gap_of(value=INF),
    "gap: hostile": lambda: gap_of(words=HOSTILE),
    "dashboard: empty": lambda: picture_of(Run()),
    "dashboard: one step": lambda: picture_of(run_of(rows_of(None, 1))),
    "dashboard: 5000 steps": lambda: picture_of(run_of(rows_of(None, 5000))),
    "dashboard: 1024 devices": lambda: picture_of(run_of(rows_of(None, 2), trace=TRACES["1024 devices"]())),
    "dashboard: hostile": lambda: picture_of(failed_run()),
    "dashboard: nan": lambda: picture_of(run_of(rows_of(NAN), trace=bad_numbers_trace(NAN))),
    "dashboard: infinity": lambda: picture_of(run_of(rows_of(INF), trace=bad_numbers_trace(INF))),
    "dashboard: large and small": lambda: picture_of(run_of([*rows_of(1e300, 1), {"step": 1, "score_mean": -1e300}])),
    "memory: empty": lambda: picture_of(memory_of(Trace.of([]))),
    "memory: one device": lambda: picture_of(memory_of(held_trace(devices=1), 1)),
    "memory: 1024 devices": lambda: picture_of(memory_of(TRACES["1024 devices"](), 1024)),
    "memory: hostile": lambda: picture_of(memory_of(hostile_trace())),
    "memory: nan": lambda: picture_of(memory_of(held_trace(NAN))),
    "memory: infinity": lambda: picture_of(memory_of(held_trace(INF))),
    "memory: nan seconds": lambda: picture_of(memory_of(bad_numbers_trace(NAN))),
    "memory: only running": lambda: picture_of(memory_of(TRACES["only running"]())),
    "memory: planned, not measured": planned_memory,
    "tokens: hostile": lambda: hf.viz.tokens_picture(tokens(), new="new_log_probs"),
    "tokens: one": lambda: hf.viz.tokens_picture(tokens(num_rows=1)),
    "tokens: nan": lambda: hf.viz.tokens_picture(tokens(all_numbers(NAN)), new="new_log_probs"),
    "tokens: infinity": lambda: hf.viz.tokens_picture(tokens(all_numbers(INF)), new="new_log_probs"),
    "tokens: empty responses": lambda: hf.viz.tokens_picture(made.of_lengths([0, 0])),
    "tokens: words of its own": lambda: hf.viz.tokens_picture(tokens(lambda c: {**c, "finish_reason": np.array([HOSTILE] * 12)})),
    "credit: nan": lambda: hf.viz.credit_picture(tokens(all_numbers(NAN))),
    "credit: infinity": lambda: hf.viz.credit_picture(tokens(all_numbers(INF))),
    "credit: hostile": lambda: hf.viz.credit_picture(tokens(), 2),
    "credit: empty": lambda: hf.viz.credit_picture(tokens(), 4),
    "clip: nan": lambda: hf.viz.clip_picture(tokens(all_numbers(NAN))),
    "clip: infinity": lambda: hf.viz.clip_picture(tokens(all_numbers(INF))),
    "clip: many": lambda: hf.viz.clip_picture(tokens(num_rows=600)),
    "clip: hostile": lambda: hf.viz.clip_picture(tokens(lambda c: {**c, NAMED: c["new_log_probs"]}), NAMED),
    "dataflow: empty": lambda: picture_of(Dataflow(())),
    "dataflow: one rank": lambda: picture_of(flow_of("a", 1.0, ranks=1)),
    "dataflow: 1024 ranks": lambda: picture_of(flow_of("a", 1.0, ranks=1024)),
    "dataflow: hostile": lambda: picture_of(flow_of(HOSTILE, 1.0)),
    "dataflow: nan": lambda: picture_of(flow_of("a", NAN)),
    "dataflow: infinity": lambda: picture_of(flow_of("a", INF)),
    "dataflow: only running": lambda: picture_of(flow_of("a", None, "running")),
    "experiment: one step": lambda: picture_of(experiment_of(0.3, steps=1)),
    "experiment: nan": lambda: picture_of(experiment_of(NAN)),
    "experiment: infinity": lambda: picture_of(experiment_of(INF, judged=True)),
    "experiment: no scores": lambda: picture_of(experiment_of(None)),
    "experiment: hostile": lambda: picture_of(experiment_of(0.3, HOSTILE, judged=True)),
    "experiment: nothing": lambda: picture_of(Experiment((), {}, (), 0)),
    "lineage: empty": lambda: picture_of(History((), (Branch("main"),))),
    "lineage: nan": lambda: picture_of(history_of(NAN)),
    "lineage: infinity": lambda: picture_of(history_of(INF)),
    "lineage: no scores": lambda: picture_of(history_of(None)),
    "lineage: 3000 steps": lambda: picture_of(history_of(0.5, steps=3000)),
    "lineage: hostile": lambda: picture_of(history_of(0.5, HOSTILE)),
    "reshard: one rank": lambda: picture_of(plan_of("m", "tp1", "tp1")),
    "reshard: 1024 ranks": lambda: picture_of(plan_of("m", "tp4 dp256", "tp2 dp512")),
    "reshard: hostile": lambda: picture_of(plan_of(NAMED, "tp4", "tp2")),
    "reshard: nan": lambda: picture_of(report_of(plan_of("m", "tp4", "tp2"), NAN)),
    "reshard: infinity": lambda: picture_of(report_of(plan_of("m", "tp4", "tp2"), INF)),
}  # fmt: skip
"""By the picture's kind and what is bad about its input."""
