"""One PPO step under six placements, on the same batch: what each costs, and that all compute the same.

Targets: on the same tokens and weights (fp32), every strategy's log-probs and values are within 1e-4 of colocate's, and the
gradient ||g - g_colocate|| / ||g_colocate|| is at most 1e-5. Times, idle shares, bytes and memory are reported, not judged.

Strategies: colocate, split, standalone (HybridFlow, arXiv 2409.19256, section 8.3); flattening, interleaving, separation
(arXiv 2312.11819; flattening is colocate by another name and so shows how much two measurements of the same thing differ).

Uses four worker processes of one thread each on whatever cores there are: with two cores four ranks share them, so that what
overlaps gains little wall time here. CPU seconds stand beside the wall time for that reason: idle share times devices is
what a machine with a core (or GPU) per rank could gain.

    python benchmarks/strategies.py --check          about 4 minutes
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from common import Report, parser, say, short, table, write_gradients

import hfsdk as hf
from hfsdk.data import movie_reviews

LOG_PROB_TARGET, GRADIENT_TARGET = 1e-4, 1e-5
STRATEGIES = ("colocate", "split", "standalone", "flattening", "interleaving", "separation")
DEVICES, PROMPTS, NEW_TOKENS = 4, 32, 32
MOVERS = ("reshard", "sync", "fetch", "backward")
"""Spans whose bytes moved between processes: weights to a rollout, to a shadow; columns; gradients over dp."""


def teacher_forced(session: Any, tokens: hf.Table, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Compute what a step computes on given tokens with the initial weights: flat columns and the actor's gradient."""
    models = session.models
    batch = session.batch(**{name: tokens[name] for name in tokens})
    found = models.actor.compute_log_probs(batch)
    found = models.critic.compute_values(models.reference.compute_log_probs(found))
    found = models.reward.compute_scores(found).table("old_log_probs", "ref_log_probs", "values", "scores")
    columns = {name: np.asarray(getattr(column, "flat", column)) for name, column in found.items()}
    rng, response = np.random.default_rng(0), tokens.ragged("response")
    drawn = {name: response.map(rng.normal(0, 1, len(response.flat)).astype(np.float32)) for name in ("advantages", "noise")}
    batch = batch.with_columns(advantages=drawn["advantages"], noise=drawn["noise"])
    models.actor.forward_backward(batch, weighted).wait()
    models.actor.run(write_gradients, str(folder / "gradient.npz"))
    with np.load(folder / "gradient.npz") as gradients:
        columns["gradient"] = np.concatenate([gradients[name].ravel() for name in sorted(gradients)])
    return columns


def weighted(out: Any, b: Any) -> Any:
    """A loss in which every token counts differently."""
    return -b["advantages"] * out.log_probs - 0.01 * out.entropy + 0.1 * (out.log_probs - b["noise"]) ** 2


def timed_step(session: Any, prompts: Any) -> dict[str, float]:
    """Take one PPO step and read its trace."""
    algorithm = hf.PPO(max_new_tokens=NEW_TOKENS, epochs=1, mini_batches=2)
    step = algorithm.step(session.models, prompts)
    algorithm.metrics(step)
    trace = session.trace
    spans = [span for span in trace.spans if span.device is not None]
    idle = trace.idle()
    devices = session.placement.view()["devices"]
    return {
        "seconds": trace.duration_s,
        "cpu_s": sum(float(span.attrs.get("cpu_s", 0)) for span in spans if not span.parent),
        "idle": sum(idle.get(device, 1.0) for device in range(DEVICES)) / DEVICES,
        "moved_mb": sum(int(span.attrs.get("bytes", 0)) for span in spans if span.name in MOVERS) / 1e6,
        "memory_gb": max(device["used_bytes"] or 0 for device in devices.values()) / 1e9,
    }


def measure(strategy: str, session: Any, tokens: hf.Table, folder: Path, steps: int) -> dict[str, Any]:
    """Place, compute the teacher-forced numbers, warm up, and time some steps."""
    session.place(strategy)
    session.load(folder / "start")
    columns = teacher_forced(session, tokens, folder)
    prompts = session.prompts(movie_reviews(), batch_size=PROMPTS, max_prompt_tokens=32, seed=1)
    timed = [timed_step(session, prompts[k]) for k in range(steps + 1)][1:]
    medians = {name: float(np.median([one[name] for one in timed])) for name in timed[0]}
    return {"strategy": strategy, "columns": columns, **medians}


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """Return the largest difference of each column, and the gradient's relative one."""
    apart = {name: float(np.abs(found[name] - wanted[name]).max()) for name in wanted if name != "gradient"}
    norm = float(np.linalg.norm(wanted["gradient"].astype(np.float64)))
    off = (found["gradient"] - wanted["gradient"]).astype(np.float64)
    return {**apart, "gradient": float(np.linalg.norm(off)) / norm}


def main() -> int:
    arguments = parse()
    warnings.simplefilter("ignore", UserWarning)  # the reward model's head is random: its scores mean nothing here
    report = Report("strategies", f"{DEVICES} worker processes of one thread each")
    with tempfile.TemporaryDirectory(prefix="hfsdk-strategies-") as name, hf.Session(devices=DEVICES, seed=0) as session:
        folder = Path(name)
        actor = session.actor("tiny", rollout="tp1", optimizer=hf.AdamW(lr=1e-4))
        session.critic("tiny", optimizer=hf.AdamW(lr=1e-4))
        session.reference(actor)
        session.reward("tiny")
        session.place("colocate")
        session.save(folder / "start")
        prompts = session.prompts(movie_reviews(), batch_size=PROMPTS, max_prompt_tokens=32, seed=0)
        tokens = actor.generate(prompts[0], max_new_tokens=NEW_TOKENS).table("prompt", "response", "temperature")
        results = []
        for strategy in arguments.strategies:
            results.append(measure(strategy, session, tokens, folder, arguments.steps))
            say(f"{strategy}: {results[-1]['seconds']:.2f} s a step")
    names = ("strategy", "seconds", "cpu_s", "idle", "moved_mb", "memory_gb")
    rows = [[r[n] if isinstance(r[n], str) else short(r[n]) for n in names] for r in results]
    say("\none step (median); idle: mean share of a device's time without work; memory: the fullest worker\n", table(names, rows))
    apart = {r["strategy"]: differences(r["columns"], results[0]["columns"]) for r in results[1:]}
    say("", table(("strategy", *next(iter(apart.values()))), [[s, *map(short, d.values())] for s, d in apart.items()]), sep="\n")
    report.details = {"steps": [{n: r[n] for n in names} for r in results], "differences": apart}
    for column in ("old_log_probs", "ref_log_probs", "values", "scores"):
        report.add(f"{column}, largest difference", max(d[column] for d in apart.values()), at_most=LOG_PROB_TARGET)
    report.add("gradient", max(d["gradient"] for d in apart.values()), "relative norm", at_most=GRADIENT_TARGET)
    for result in results:
        report.add(f"{result['strategy']}: step", result["seconds"], "s")
    return report.finish(arguments)


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    made.add_argument("--steps", type=int, default=3, help="timed steps of each, after one to warm up")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
