"""Does every algorithm learn? Called by ``learning.py --all``; the task and the judge are those of learning.py.

Per seed one session, and one snapshot of `tiny` at the start: each algorithm begins there, trains STEPS steps (some of them
LONGER_STEPS), is judged on the 200 held-out prompts, and the session is rewound. Paired over the prompts, the gain's standard
error is that of the differences.

Targets, each of three seeds:

* every algorithm raises the held-out score by more than twice its standard error (DPO: on pairs of the initial policy's own
  responses that the reward tells apart; ProcessGRPO: from a reward for each word; Distillation: without a reward, from a teacher
  that GRPO trained from the same start);
* Safe-RLHF keeps the mean cost of held-out responses below COST_LIMIT, where PPO, trained for the same reward, does not. A
  response's cost is how many words of praise it holds (words that VADER's lexicon rates positive): PPO learns to gush;
* a reward model with SmolLM2's body, trained on PAIRS pairs of reviews that people rated at least 2 apart, prefers the better
  one of at least 80 % of held-out pairs (of other reviews);
* GRPO raises exact match on 200 held-out additions by at least 20 points (additions_task.py).
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import Report, say, short, table

STEPS = 16
LONGER_STEPS = {"PPO": 28, "Safe-RLHF": 28, "ReMax": 28, "OPO": 40}
"""Of PPO and Safe-RLHF, because the cost needs longer to run away and the multiplier to follow it; of ReMax and OPO, because they
take each batch once (their gradient is REINFORCE's: scores are not normalised, and a second pass drifts)."""
TEACHER = "GRPO"
"""Whose policy, of the same seed, is the teacher of Distillation."""
SEEDS = (0, 1, 2)
COST_LIMIT = 0.95
"""Words of praise per response, for Safe-RLHF."""
FIRST_MULTIPLIER = 0.4
"""lambda at the start: of a score between -1 and 1, per word."""
PAIRS = 1600
HELD_OUT_PAIRS = 300
ACCURACY = 0.80
LR, CRITIC_LR = 2e-4, 1e-3


def praise(completions: list[str]) -> list[float]:
    """Cost: the words of each response that VADER's lexicon rates positive."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    lexicon = SentimentIntensityAnalyzer().lexicon
    return [float(sum(lexicon.get(word, 0.0) > 0 for word in re.findall(r"[a-z']+", text.lower()))) for text in completions]


def algorithms() -> dict[str, Any]:
    """Return what is trained, by name; each sees 64 responses a step, but ReMax, which adds its greedy ones."""
    from learning_task import NEW_TOKENS

    import hfsdk as hf

    one = {"max_new_tokens": NEW_TOKENS, "epochs": 2, "mini_batches": 2}
    several = {**one, "n": 4}
    return {
        "PPO": hf.PPO(**one),
        "GRPO": hf.GRPO(**several),
        "GRPOVI": hf.GRPO(**several, increase_variance=True),
        "RLOO": hf.RLOO(**several),
        "ReMax": hf.ReMax(max_new_tokens=NEW_TOKENS, mini_batches=2),
        "REINFORCE++": hf.ReinforcePlusPlus(**one),
        "Safe-RLHF": hf.SafeRLHF(**one, cost_limit=0.8 * COST_LIMIT, multiplier_lr=8.0),
        "DPO": hf.DPO(beta=0.1),
        "GSPO": hf.GSPO(**several),
        "CISPO": hf.CISPO(**several | {"epochs": 1, "mini_batches": 4}),  # no clip stops a second pass from going on
        "DAPO": hf.DAPO(**several),
        "Dr. GRPO": hf.DrGRPO(**several),
        "OPO": hf.OPO(max_new_tokens=NEW_TOKENS, n=4),
        "REINFORCE++-baseline": hf.ReinforcePlusPlusBaseline(**several),
        "KL-Cov": hf.KLCov(**several),
        "Clip-Cov": hf.ClipCov(**several),
        "SAPO": hf.SAPO(**several),
        "GMPO": hf.GMPO(**several),
        "GPG": hf.GPG(max_new_tokens=NEW_TOKENS, n=4),  # nothing holds a second update on a batch
        "DPPO": hf.DPPO(**several),
        "GDPO": hf.GDPO(**several),
        "TIS": hf.GRPO(**several, tis_cap=2.0),
        "MIS": hf.GRPO(**several, tis_cap=2.0, tis_floor=0.5, tis_level="sequence", tis_bounds="mask"),
        "ProcessGRPO": hf.ProcessGRPO(**several, step_ends=[ord(" ")]),
        "Distillation": hf.Distillation(**one),
    }


def words(completions: list[str], completion_ids: list[list[int]]) -> list[list[float]]:
    """Reward of steps: at the end of each word what VADER's lexicon rates it, from -1 to 1; a token of `tiny` is a byte."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    lexicon = SentimentIntensityAnalyzer().lexicon
    rows = [[0.0] * len(ids) for ids in completion_ids]
    for row, text in zip(rows, completions, strict=True):
        for word in re.finditer(rb"[a-z']+", text.lower().encode()):
            if word.end() < len(row):  # a word that was cut off is none yet
                row[word.end()] = lexicon.get(word.group().decode(), 0.0) / 4
    return rows


def own_pairs(session: Any, texts: list[str], seed: int) -> Any:
    """Return pairs of the policy's own responses, the one with the higher score chosen; prompts with a tie are left out."""
    from learning_task import NEW_TOKENS

    models = session.models
    batch = models.actor.generate(session.prompts(texts, batch_size=400, seed=seed + 50)[0], max_new_tokens=NEW_TOKENS, n=2)
    found = models.reward.compute_scores(batch).table("prompt", "response", "scores")
    scores = np.asarray(found["scores"]).reshape(-1, 2)
    rows = [(2 * i, 2 * i + 1) if a > b else (2 * i + 1, 2 * i) for i, (a, b) in enumerate(scores) if a != b]
    prompts, responses = found.ragged("prompt"), found.ragged("response")
    data = {
        "prompt": [prompts[a].tolist() for a, _ in rows], "chosen": [responses[a].tolist() for a, _ in rows],
        "rejected": [responses[b].tolist() for _, b in rows],
    }  # fmt: skip
    return session.pairs(data, batch_size=32, seed=seed)


def train_each(seed: int, folder: Path, names: list[str]) -> Iterator[tuple[str, list[dict[str, Any]], float, Path]]:
    """Train one algorithm after the other from the same start; gives (name, history, seconds, folder with the policy)."""
    from learning_task import positive, train_prompts

    import hfsdk as hf

    texts, chosen = train_prompts(), algorithms()
    with hf.Session(devices=2, seed=seed) as session:
        actor = session.actor("tiny", rollout="tp1", optimizer=hf.AdamW(lr=LR))
        for name in ("critic", "cost_critic"):
            session.critic("tiny", optimizer=hf.AdamW(lr=CRITIC_LR), name=name)
        session.reference(actor)
        session.reward(positive)
        session.cost(praise)
        session.place("colocate")
        start = session.snapshot("start")
        for name in names:
            algorithm, since = chosen[name], time.perf_counter()
            session.models.cost.multiplier = FIRST_MULTIPLIER
            if name == "DPO":
                stream = own_pairs(session, texts, seed)
            else:
                drawn = getattr(algorithm, "oversample", 1.0)
                stream = session.prompts(texts, batch_size=int(drawn * 64 / algorithm.n), seed=seed)
            if name == "ProcessGRPO":
                session.reward(words, per_token=True)
            if name == "Distillation":
                session.reference(str(folder / TEACHER), replace=True)
            steps = LONGER_STEPS.get(name, STEPS)
            rows = session.train(algorithm, stream, steps=steps, progress=False).rows
            seconds = time.perf_counter() - since
            yield name, rows, seconds, actor.save_pretrained(folder / name.replace(" ", ""))
            if name == "ProcessGRPO":
                session.reward(positive)
            session.rewind(start)


def reward_model(seed: int = 0) -> tuple[float, float, float]:
    """Train a reward model with SmolLM2's body on pairs of reviews; returns held-out accuracy, its standard error, seconds."""
    import hfsdk as hf

    since = time.perf_counter()
    with hf.Session(devices=1, seed=seed) as session:
        model = session.reward("smollm2-135m-instruct", optimizer=hf.AdamW(lr=2e-5, warmup_steps=5), micro_batch_tokens=1024)
        pairs = session.pairs(hf.data.review_pairs("train", PAIRS, seed=seed), batch_size=32, seed=seed, max_tokens=64)
        held_out = session.pairs(
            hf.data.review_pairs("test", HELD_OUT_PAIRS, seed=seed), batch_size=HELD_OUT_PAIRS, shuffle=False, max_tokens=64
        )
        for number, batch in enumerate(pairs):
            row = model.update(batch, hf.BradleyTerry()).rows[-1]
            say(f"  pairs {32 * (number + 1)}: loss {row['loss']:.3f}, accuracy {row['accuracy']:.2f}")
        scores = model.compute_scores(held_out[0])["scores"]
    right = (scores[0::2] > scores[1::2]).mean()
    return float(right), float(np.sqrt(right * (1 - right) / HELD_OUT_PAIRS)), time.perf_counter() - since


def judged(evaluator: Any, folder: Path) -> dict[str, Any]:
    """Return a policy's score per prompt, mean KL, and cost per prompt on the held-out prompts."""
    found = evaluator(folder, num_samples=len(evaluator.prompts))
    texts = [text for _, text, _ in found.samples]
    return {"scores": np.array([s for *_, s in found.samples]), "kl": found.kl, "costs": np.array(praise(texts)), "text": texts[0]}


def run_all(report: Report, arguments: argparse.Namespace, evaluator: Any, folder_of: Callable[[str], Path]) -> None:
    """Add the figures of every part to the report.

    Args:
        report: takes them.
        arguments: seeds, and only (names of algorithms, "reward model", "additions"; empty for all).
        evaluator: of the reviews task, one continuation per prompt.
        folder_of: a model's folder by name.
    """
    wanted = [name for name in algorithms() if not arguments.only or name in arguments.only]
    if "Distillation" in wanted and TEACHER not in wanted:
        wanted.insert(0, TEACHER)
    rows = []
    for seed in arguments.seeds if wanted else []:
        before = judged(evaluator, folder_of("tiny"))
        with tempfile.TemporaryDirectory(prefix="hfsdk-learning-") as place:
            for name, history, seconds, folder in train_each(seed, Path(place), wanted):
                after = judged(evaluator, folder)
                gains = after["scores"] - before["scores"]
                gain, error = float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(len(gains)))
                cost = float(after["costs"].mean())
                say(f"seed {seed} {name}: gain {gain:.3f} +- {error:.3f}, KL {after['kl']:.2f}, cost {cost:.2f}, {seconds:.0f} s")
                rows.append([str(seed), name, *map(short, (gain, error, after["kl"], cost, seconds))])
                report.add(f"gain / standard error, {name}, seed {seed}", gain / error, at_least=2.0)
                if name == "Safe-RLHF":
                    report.add(f"mean cost, {name}, seed {seed}", cost, "words", at_most=COST_LIMIT)
                if name == "PPO":
                    report.add(f"mean cost, {name} (shall exceed the limit), seed {seed}", cost, "words", at_least=COST_LIMIT)
                report.details.setdefault("algorithms", []).append({
                    "seed": seed, "name": name, "gain": gain, "error": error, "kl": after["kl"], "cost": cost,
                    "seconds": seconds, "history": [dict(row) for row in history],
                })  # fmt: skip
        cost = float(before["costs"].mean())
        rows.append([str(seed), "(before)", "", "", "0", short(cost), ""])
    say(table(("seed", "algorithm", "gain", "error", "KL", "cost", "s"), rows))
    if not arguments.only or "reward model" in arguments.only:
        accuracy, error, seconds = reward_model()
        report.add(f"held-out accuracy of a reward model, SmolLM2, {PAIRS} pairs", accuracy, at_least=ACCURACY)
        report.add("  its standard error", error)
        report.add("  seconds", seconds, "s")
    for seed in arguments.seeds if not arguments.only or "additions" in arguments.only else []:
        import additions_task

        say(f"seed {seed}: additions")
        found = additions_task.run(seed)
        additions_task.note(report, found)
        report.details.setdefault("additions", []).append(found)
