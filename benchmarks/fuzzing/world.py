"""A session with one of everything, so that a call has somebody to be made on and something to be given."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.resharding.census import Census
from hfsdk.resharding.reshard_report import Resident
from hfsdk.session.parts import parts_of

CLUSTER = "1x2 A100-80GB"
TEXTS = ["hello world", "good day", "to be", "or not"]


def score(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Score by length."""
    return [float(len(text)) for text in completions]


def my_loss(out: Any, b: Any) -> Any:
    """Likelier is better."""
    return -out.log_probs


def num_rows(table: hf.Table) -> int:
    """Count the rows."""
    return len(table)


class Recorder:
    """A tracker that keeps nothing."""

    def start(self, *args: Any, **options: Any) -> Recorder:
        return self

    def step(self, *args: Any, **options: Any) -> None:
        pass

    def end(self, *args: Any, **options: Any) -> None:
        pass


@hf.primitive(reads=["prompt", "response"], writes=["margins"])
def margins(model: Any, rows: Any) -> Any:
    """Write zeros."""
    return {"margins": [0.0] * len(rows)}


class World:
    """One session, simulated or real; what is asked of it is made when it is first asked for."""

    def __init__(self, real: bool = False) -> None:
        self.real = real
        self._made: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """Return an instance of a class by its name."""
        if name not in self._made:
            self._made[name] = MAKERS[name](self)
        return self._made[name]

    def warm_up(self) -> None:
        """Import what first calls import, which is the machine's time and not theirs."""
        import matplotlib.figure
        import pandas as pd  # noqa: F401

        matplotlib.figure.Figure()
        parts_of(self.session).client.need_tokenizer().encode_chat([{"role": "user", "content": "hello"}])
        self.get("Plan")
        with contextlib.suppress(hf.HfsdkError):
            hf.Session.attach("nobody")  # Ray, where sessions that are kept are looked for

    def forget(self, name: str) -> None:
        """Make it anew the next time."""
        self._made.pop(name, None)

    @property
    def session(self) -> hf.Session:
        """The session, with five roles that are placed."""
        return self.get("Session")

    @property
    def began(self) -> bool:
        """Whether there is a session by now."""
        return "Session" in self._made

    @property
    def broken(self) -> bool:
        """Whether the session is of no use any more."""
        return self.began and (parts_of(self.session).client.closed or len(self.session.roles) != 5)

    def close(self) -> None:
        """End the session."""
        if self.began:
            with contextlib.suppress(Exception):
                self.session.close()
        self._made.clear()

    def state(self) -> Mapping[str, Any]:
        """Return what a refused call must not change."""
        if not self.began or parts_of(self.session).client.closed:
            return {}
        session, parts = self.session, parts_of(self.session)
        return {
            "roles": {h.name: repr(h.role) for h in session.roles}, "seed": session.seed,
            "placement": repr(parts.deployment.placement),
            "branch": session.branch, "history": len(session.history.rows), "counts": parts.context.counters.all(),
            "snapshots": list(session.snapshots), "places": parts.places.positions(), "calls": parts.client.last_call,
            "open": len(parts.client.open_calls()), "run": id(session.run),
        }  # fmt: skip


def _session(world: World) -> hf.Session:
    made = hf.Session(devices=2, seed=1) if world.real else hf.Session.simulated(CLUSTER, seed=1)
    actor = made.actor("tiny", optimizer=hf.AdamW())
    made.critic("tiny")
    made.reference(actor)
    made.reward(score)
    made.cost(score)
    made.place("colocate")
    return made


def _batch(world: World) -> hf.Batch:
    models = world.session.models
    batch = models.actor.generate(world.get("PromptStream")[0], max_new_tokens=4)
    batch = models.actor.compute_log_probs(batch)
    batch = models.reference.compute_log_probs(batch)
    batch = models.critic.compute_values(batch)
    batch = models.cost.compute_costs(models.reward.compute_scores(batch))
    return ppo.advantages(batch).wait()


def _table(world: World) -> hf.Table:
    ragged = world.get("Ragged")
    per_token = {n: ragged.map(np.linspace(-1, 1, len(ragged.flat), dtype=np.float32)) for n in ("values", "old_log_probs")}
    return hf.Table({"prompt": ragged, "response": ragged, **per_token, "scores": np.arange(len(ragged), dtype=np.float32)})


def _pairs(world: World) -> Any:
    rows = [{"prompt": text, "chosen": " yes", "rejected": " no"} for text in TEXTS]
    return world.session.pairs(rows, batch_size=2)


def _lengths(world: World) -> Any:
    return hf.ResponseLengths()


def _runtime(world: World) -> Any:
    from hfsdk.session.start import start_simulated

    return start_simulated(CLUSTER, None)


def _halves(world: World) -> Any:
    actor = world.session.models.actor
    actor.forward_backward(world.get("Batch"), my_loss)
    return actor.step().wait()


def _frame(world: World) -> Any:
    import pandas as pd

    return pd.DataFrame({"text": TEXTS})


def _calibration(world: World) -> Any:
    from hfsdk.planner.perf.calibration import Calibration

    return Calibration(perf=hf.PerfModel(), constants=(), observations=(), bands={"": (0.8, 1.2)})


def _reward_probe(world: World) -> Any:
    from hfsdk.core.reward_probe import RewardProbe
    from hfsdk.core.sample_outcome import SampleOutcome

    outcomes = [SampleOutcome(score=1.0, seconds=0.1), SampleOutcome(failure="raised", message="f raised ValueError()")]
    return RewardProbe("reward", ["a", "b"], ["c", "d"], outcomes, np.array([1, 2]))


def _gap(world: World) -> Any:
    from hfsdk.core.gap import CAUSES, Gap, GapCause, LayerGap

    numbers = np.array([-1.0, -2.0])
    tried = tuple(GapCause(cause, "") for cause in CAUSES)
    layers = (LayerGap("layer 0", 0.0, 0.1, 0.01),)
    return Gap("actor", "fp32", "they agree", tried, layers, np.array([2]), numbers, numbers, {"rest": 0 * numbers}, (0, 1))


_free = itertools.count()

VARIANTS = (
    "GSPO", "CISPO", "DAPO", "DrGRPO", "OPO", "ReinforcePlusPlusBaseline", "KLCov", "ClipCov", "ProcessGRPO", "Distillation",
    "SAPO", "GMPO", "GPG", "DPPO", "GDPO",
)  # fmt: skip
"""Algorithms that take ``max_new_tokens`` and ``n`` alike."""

MAKERS: dict[str, Callable[[World], Any]] = {
    # the session and what it hands out
    "Session": _session,
    "ActorModel": lambda w: w.session.models.actor,
    "ModelHandle": lambda w: w.session.models.actor,
    "CriticModel": lambda w: w.session.models.critic,
    "ReferenceModel": lambda w: w.session.models.reference,
    "RewardModel": lambda w: w.session.models.reward,
    "CostModel": lambda w: w.session.models.cost,
    "Models": lambda w: w.session.models,
    "Batch": _batch,
    "Value": lambda w: w.get("Batch").reduce(num_rows, ["prompt"]),
    "Metrics": lambda w: w.session.models.actor.update(w.get("Batch"), ppo.PolicyLoss()).wait(),
    "OneRowMetrics": _halves,
    "PromptStream": lambda w: w.session.prompts(TEXTS, batch_size=2),
    "Demonstrations": lambda w: w.session.demonstrations(TEXTS, batch_size=2),
    "Pairs": _pairs,
    "RowStream": lambda w: w.get("PromptStream"),
    "KeepBest": lambda w: hf.KeepBest(w.get("PromptStream")),
    "Run": lambda w: w.session.train(hf.PPO(max_new_tokens=4), w.get("PromptStream"), steps=1, progress=False),
    "Rows": lambda w: w.get("Run").rows,
    "Snapshot": lambda w: w.session.snapshot(f"before {next(_free)}"),
    "History": lambda w: (w.get("Run"), w.session.history)[1],
    "Traces": lambda w: (w.get("Run"), w.session.trace)[1],
    "LiveTrace": lambda w: (w.get("Run"), w.session.trace[0])[1],
    "Trace": lambda w: w.get("LiveTrace").snapshot(),
    "Traced": lambda w: w.get("Trace"),
    "Span": lambda w: w.get("Trace").spans[0],
    "RewardProbe": _reward_probe,
    "Comparison": lambda w: w.get("Trace").compare(w.get("Trace")),
    "Dataflows": lambda w: (w.get("Run"), w.session.dataflow)[1],
    "LiveDataflow": lambda w: (w.get("Run"), w.session.dataflow[0])[1],
    "Dataflow": lambda w: w.get("LiveDataflow").snapshot(),
    "Call": lambda w: w.get("Dataflow").calls[0],
    "Edge": lambda w: w.get("Dataflow").edges[0],
    "MemoryUse": lambda w: w.session.memory,
    "BatchRegistry": lambda w: w.session.batches,
    "LivePlacement": lambda w: w.session.placement,
    "ReshardReport": lambda w: (w.get("Batch"), w.session.models.actor.last_reshard)[1],
    "ReshardPlan": lambda w: hf.ReshardPlan.between(w.get("ModelSpec"), "tp2", "dp2"),
    "Experiment": lambda w: w.session.compare([w.get("PPO")], w.get("PromptStream"), steps=1, seeds=[0], progress=False),
    "FirstBad": lambda w: hf.FirstBad(kind="loss", symptom="step 3 failed", step=3, call="actor.update", role="actor"),
    "Plan": lambda w: w.session.plan(w.get("PPO"), w.get("Workload")),
    "LongTails": lambda w: hf.long_tails(w.get("Plan"), steps=1),
    "SchemeStep": lambda w: w.get("LongTails")["synchronous"],
    "WhatIf": lambda w: w.session.what_if(w.get("PPO"), w.get("Workload")),
    "Explanation": lambda w: hf.explain({"num_generations": 8, "model_name_or_path": "Qwen/Qwen2.5-0.5B"}),
    "Calibration": _calibration,
    "Gap": _gap,
    "Census": lambda w: Census("actor", (Resident("training", 1, 0, 0, 0, 0),), (1,)),
    "Saving": lambda w: w.session.save("saved by the world", wait=False),
    "Client": lambda w: parts_of(w.session).client,
    "RoleSpec": lambda w: w.session.models.actor.role,
    "Runtime": _runtime,
    "Tracker": lambda w: Recorder(),
    # nouns
    "Algorithm": lambda w: w.get("PPO"),
    "PPO": lambda w: hf.PPO(max_new_tokens=4),
    "DPO": lambda w: hf.DPO(),
    "GRPO": lambda w: hf.GRPO(max_new_tokens=4, n=2),
    "RLOO": lambda w: hf.RLOO(max_new_tokens=4, n=2),
    "ReMax": lambda w: hf.ReMax(max_new_tokens=4),
    "ReinforcePlusPlus": lambda w: hf.ReinforcePlusPlus(max_new_tokens=4),
    **{name: lambda w, name=name: getattr(hf, name)(max_new_tokens=4, n=2) for name in VARIANTS},
    "OverlongPenalty": lambda w: hf.OverlongPenalty(max_new_tokens=4, buffer=2),
    "PassAtKTraining": lambda w: hf.PassAtKTraining(max_new_tokens=4, n=2, k=2),
    "PassAtK": lambda w: hf.PassAtK(k=(1, 2)),
    "SafeRLHF": lambda w: hf.SafeRLHF(max_new_tokens=4),
    "AdamW": lambda w: hf.AdamW(),
    "RolloutOptions": lambda w: hf.RolloutOptions(),
    "LoRA": lambda w: hf.LoRA(),
    "Workload": lambda w: hf.Workload(prompts=16, prompt_tokens=16, response_tokens=16),
    "Lengths": _lengths,
    "ResponseLengths": _lengths,
    "Primitive": lambda w: margins,
    "TransferProtocol": lambda w: hf.protocols.THREE_D,
    "Layout": lambda w: hf.Layout(tp=2),
    "Mesh": lambda w: hf.Layout(tp=2, dp=1).mesh(),
    "Pool": lambda w: hf.Pool("all", (0, 1)),
    "Placement": lambda w: hf.Placement.of("colocate", ["actor", "critic"], 2),
    "ClusterSpec": lambda w: hf.ClusterSpec.parse(CLUSTER),
    "DeviceSpec": lambda w: w.get("ClusterSpec").devices[0],
    "LinkSpec": lambda w: w.get("ClusterSpec").intra_node,
    "ModelSpec": lambda w: hf.ModelSpec.preset("llama3-1b"),
    "PerfModel": lambda w: hf.PerfModel(),
    "Ragged": lambda w: hf.Ragged.of([[1, 2], [3], [4, 5, 6]]),
    "Table": _table,
    "DataFrame": _frame,
    "MLflow": lambda w: hf.MLflow(),
    "TensorBoard": lambda w: hf.TensorBoard(),
    "WandB": lambda w: hf.WandB(),
}
"""Class -> how to have one."""
