"""Proof of weights: what it costs of a warm step, and what it finds of what is planted on the way."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import hfsdk as hf

PART = "proof"
OPENINGS = ("the film is a ", "a warm and funny ", "it never quite ", "one of the best ")
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"train": "tp2", "batch": 32, "tokens": 32, "steps": 9},
    "smollm2-135m-instruct": {"train": "dp2", "batch": 8, "tokens": 16, "steps": 6},
}
PARAMETER = "model.layers.1.mlp.down_proj.weight"


def brevity(completions: Sequence[str]) -> list[float]:
    """Reward of no cost."""
    return [-len(text) / 64 for text in completions]


def rows() -> list[dict[str, Any]]:
    """Return the figures: part, what, value, unit, target, ok."""
    found = []
    for model, sizes in MODELS.items():
        for weights in ("packed", "shared"):
            share = cost(model, weights, **sizes)
            what = f"{model}, {weights} weights: share of a warm step"
            found.append({"part": PART, "what": what, "value": 100 * share, "unit": "%", "target": 3.0, "ok": share <= 0.03})
    for harm in HARMS:
        verdict, seconds = planted(harm)
        what = f"planted {harm}: {verdict}"
        found.append({"part": PART, "what": what, "value": seconds, "unit": "s", "target": None, "ok": PARAMETER in verdict})
    return found


def cost(model: str, weights: str, train: str, batch: int, tokens: int, steps: int) -> float:
    """Return the median share of a step's seconds that fingerprints and probes take on the rank where they take longest."""
    with hf.Session(devices=2, seed=1, name="cost of proofs") as session:
        actor = session.actor(model, train=train, rollout="tp1", cpu_weights=weights, optimizer=hf.AdamW(lr=1e-5))
        session.critic(model, train="dp2", optimizer=hf.AdamW(lr=1e-5))
        session.reference(actor)
        session.reward(brevity)
        session.place("colocate")
        prompts = session.prompts(list(OPENINGS) * 8, batch_size=batch)
        run = session.train(hf.PPO(max_new_tokens=tokens), prompts, steps=steps, progress=False)
        shares = []
        for row in run.rows[1:]:
            by_rank: dict[int, float] = defaultdict(float)
            for span in session.trace[row["step"]].spans:
                if span.name == "reshard":
                    by_rank[span.rank] += float(span.attrs.get("proof_s", 0.0))
            shares.append(max(by_rank.values(), default=0.0) / row["seconds"])
    return statistics.median(shares)


HARMS = ("one number", "one stride", "one stale box")


def plant(rank: Any, harm: str) -> None:
    """Have the next transport to rank 1 leave something else in one parameter."""
    from hfsdk.engine.weights import transport

    if rank.rank != 1:
        return
    before = transport._Run.all

    def all_and_harm(self: Any, rounds: Any) -> None:
        old = self.targets[PARAMETER].clone()
        before(self, rounds)
        transport._Run.all = before  # type: ignore[method-assign]
        target = self.targets[PARAMETER].data
        if harm == HARMS[0]:
            target[3, 5] += 1e-7
        elif harm == HARMS[1]:
            target.copy_(target.t().reshape(target.shape).clone())
        else:
            target[:, :16] = old[:, :16] if old.numel() else 0.0

    transport._Run.all = all_and_harm  # type: ignore[method-assign]


def planted(harm: str) -> tuple[str, float]:
    """Return what the error says of something planted, and the seconds of the call."""
    with hf.Session(devices=2, seed=1, name="planted") as session:
        actor = session.actor("tiny", train="tp2", rollout="tp1", cpu_weights="packed", optimizer=hf.AdamW(lr=1e-3))
        actor.generate(list(OPENINGS), max_new_tokens=4).wait()
        actor.run(plant, harm)
        begun = time.perf_counter()
        try:
            actor.generate(list(OPENINGS), max_new_tokens=4).wait()
        except hf.WeightMismatchError as error:
            return error.message.partition(": ")[2].split(". ")[0], time.perf_counter() - begun
        return "nothing", time.perf_counter() - begun
