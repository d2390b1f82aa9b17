"""Does PPO learn? `tiny` continues the first words of held-in movie reviews; the reward is VADER's compound score.

Targets, 60 steps, each of three seeds:

* the mean score of continuations of 200 held-out prompts at temperature 1 rises by at least 0.3;
* with --vs-trl: the score at equal KL, mean of the seeds, is at least that of TRL 1.12's PPO (trl.experimental.ppo) with the
  same model, prompts, lengths, batch, number of steps, optimizer updates per step and kl_coef. Score is interpolated
  against KL (one estimator, one evaluator for both: learning_task.py) at the smaller of the two final KLs;
* with --lora: the score at equal KL of adapters of rank 16 is, for each seed, at least 0.95 of what training all weights gains to
  there. Their learning rates are ten times those of all weights, the critic's three times. A ratio needs scores that are known
  better than gains do: 8 continuations per held-out prompt, not 2 (with 2, a score is known to within 0.02, a ratio to 0.06).

Uses two worker processes of one thread each (hfsdk), or one process of two threads (TRL, evaluator). TRL lives in an environment
of its own under the cache folder (trl_environment.py). Each has a learning rate chosen on these seeds: of 1e-4 and 2e-4 TRL scores
higher with 2e-4; of 1.5e-4 and 2e-4 hfsdk has more score per KL with 1.5e-4, and its critic a rate of its own, which TRL's single
optimizer does not offer. Everything else that both have is equal, warm-up and betas included, and the rest is TRL's default.

    python benchmarks/learning.py --check                 about 15 minutes
    python benchmarks/learning.py --vs-trl --check        about 30 minutes more
    python benchmarks/learning.py --lora --seeds 11 12 13 --check        about an hour
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import Report, parser, say, short, table
from trl_environment import child_environment, trl_python

GAIN = 0.3
SEEDS = (0, 1, 2)
TRL = "trl==1.12.0"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of PPO; what both systems share comes first."""

    steps: int = 60
    batch_size: int = 64
    epochs: int = 2
    mini_batches: int = 2
    kl_coef: float = 0.05
    save_every: int = 10
    lr: float = 1.5e-4
    critic_lr: float = 1e-3
    warmup: int = 5
    """Steps over which the learning rate rises (hfsdk: the actor's, while the critic learns to judge)."""
    lora_rank: int = 0
    """Of adapters, which are trained in place of the weights; 0 trains the weights (hfsdk alone)."""


OURS = Settings()
OF_LORA, LORA_RATES, LORA_RANK = 0.95, (10, 3), 16
"""Least share of the score; times the learning rates of actor and critic; rank."""
COPIES, LORA_COPIES = 2, 8
"""Continuations per held-out prompt."""
TRL_LR = 2e-4
TRL_THREADS = 2


# -- hfsdk


def run_hfsdk(settings: Settings, seed: int, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Train, leaving ``step0000`` and so on in the folder; returns the history and the prompts that were used, in order."""
    from learning_task import NEW_TOKENS, positive, train_prompts

    import hfsdk as hf

    texts = train_prompts()
    ppo = hf.PPO(
        max_new_tokens=NEW_TOKENS, epochs=settings.epochs, mini_batches=settings.mini_batches, kl_coef=settings.kl_coef
    )  # fmt: skip
    per_step = settings.epochs * settings.mini_batches
    decay = {"schedule": "linear", "total_steps": settings.steps * per_step}
    warmup = settings.warmup * per_step
    with hf.Session(devices=2, seed=seed) as session:
        lora = hf.LoRA(rank=settings.lora_rank, alpha=2 * settings.lora_rank) if settings.lora_rank else None
        optimizer = hf.AdamW(lr=settings.lr, warmup_steps=warmup, **decay)
        actor = session.actor("tiny", rollout="tp1", lora=lora, optimizer=optimizer)
        session.critic("tiny", lora=lora, optimizer=hf.AdamW(lr=settings.critic_lr, **decay))
        session.reference(actor)
        session.reward(positive)
        session.place("colocate")
        prompts = session.prompts(texts, batch_size=settings.batch_size, seed=seed)
        actor.save_pretrained(str(folder / "step0000"), merge=True)
        history: list[dict[str, Any]] = []
        while len(history) < settings.steps:
            count = min(settings.save_every, settings.steps - len(history))
            history += session.train(ppo, prompts, steps=count, progress=False).rows
            actor.save_pretrained(str(folder / f"step{len(history):04d}"), merge=True)
            last = history[-1]
            say(f"  step {len(history)}: score {last['score_mean']:.3f}, KL {last['kl_mean']:.2f}, {last['seconds']:.1f} s")
        used = [texts[prompts.row_at(p)] for p in range(settings.steps * settings.batch_size)]
    return history, used


# -- TRL


def run_trl(settings: Settings, seed: int, prompts: list[str], folder: Path) -> list[dict[str, Any]]:
    """Train by TRL, leaving the same kind of folders; returns its history."""
    from learning_task import NEW_TOKENS

    from hfsdk.assets import model_folder

    shared = {k: v for k, v in asdict(settings).items() if k not in ("critic_lr", "lora_rank")}
    config = {
        **shared, "model": str(model_folder("tiny")), "prompts": prompts, "seed": seed, "new_tokens": NEW_TOKENS,
        "folder": str(folder),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    script = Path(__file__).with_name("trl_ppo.py")
    environment = {**child_environment(TRL_THREADS), "OMP_WAIT_POLICY": "PASSIVE"}
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            [trl_python(TRL), script, "--config", folder / "config.json"], env=environment, stdout=log, stderr=log, check=False
        )
    if done.returncode:
        raise RuntimeError(f"TRL's run failed:\n{(folder / 'log.txt').read_text()[-3000:]}")
    history: list[dict[str, Any]] = json.loads((folder / "history.json").read_text())["history"]
    return history


def train_trl(settings: Settings, seed: int, prompts: list[str], folder: Path, evaluator: Any) -> dict[str, Any]:
    """Train with TRL and judge what it saved."""
    history = run_trl(settings, seed, prompts, folder)
    return {"history": history, "curve": judge(evaluator, folder)}


def earlier_trl(path: str, settings: Settings) -> dict[int, Any]:
    """Return TRL's runs by seed of a JSON that this benchmark wrote with the same settings for TRL."""
    found = json.loads(Path(path).read_text())
    wanted = {k: v for k, v in asdict(settings).items() if k not in ("lr", "critic_lr", "lora_rank")}
    same = {k: v for k, v in found["settings"].items() if k in wanted} == wanted and found["trl_lr"] == settings.lr
    if not same:
        raise SystemExit(f"{path} holds other settings for TRL: {found['settings']}, lr {found['trl_lr']}")
    return {run["seed"]: run["trl"] for run in found["runs"] if "trl" in run}


# -- judging


def judge(evaluator: Any, folder: Path) -> list[dict[str, Any]]:
    """Judge every saved policy of a run, in order."""
    found = []
    for saved in sorted(folder.glob("step*")):
        found.append({"step": int(saved.name[4:]), **asdict(evaluator(saved))})
    return found


def score_at(curve: list[dict[str, Any]], kl: float) -> float:
    """Return a run's score at a KL, linearly between its judged policies."""
    import numpy as np

    points = sorted((point["kl"], point["score"]) for point in curve)
    return float(np.interp(kl, *zip(*points, strict=True)))


def curve_table(curve: list[dict[str, Any]]) -> str:
    """Return a run's judged policies as text."""
    names = ("step", "score", "score_error", "kl", "kl_k1", "kl_k3", "tokens", "ended")
    return table(names, [[short(point[name]) for name in names] for point in curve])


def samples_text(curve: list[dict[str, Any]]) -> str:
    """Return a few continuations before and after."""
    lines = []
    for before, after in zip(curve[0]["samples"], curve[-1]["samples"], strict=True):
        lines.append(f"  {before[0]!r}\n    before {before[1]!r} ({before[2]:.2f})\n    after  {after[1]!r} ({after[2]:.2f})")
    return "\n".join(lines)


def main() -> int:
    arguments = parse()
    from learning_task import Evaluator, held_out_prompts

    from hfsdk.assets import model_folder

    if arguments.all:
        from learning_all import run_all

        uses = "2 worker processes of one thread (reward model: 1); evaluator: one process of two threads"
        report = Report("learning --all", uses)
        run_all(report, arguments, Evaluator(model_folder("tiny"), held_out_prompts(), copies=1), model_folder)
        return report.finish(arguments)
    ours = replace(OURS, steps=arguments.steps, **json.loads(arguments.settings))
    theirs = replace(ours, lr=arguments.trl_lr)
    report = Report("learning", "hfsdk: 2 worker processes of one thread; TRL and evaluator: one process of two threads")
    report.details = {"settings": asdict(ours), "trl_lr": theirs.lr, "runs": []}
    copies = arguments.copies or (LORA_COPIES if arguments.lora else COPIES)
    evaluator = Evaluator(model_folder("tiny"), held_out_prompts(), copies=copies)
    before = earlier_trl(arguments.trl_from, theirs) if arguments.trl_from else {}
    differences = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory(prefix="hfsdk-learning-") as name:
            folder = Path(name)
            say(f"seed {seed}: hfsdk, {ours.steps} steps of {ours.batch_size} prompts")
            history, prompts = run_hfsdk(ours, seed, folder / "hfsdk")
            curve = judge(evaluator, folder / "hfsdk")
            say(curve_table(curve), samples_text(curve), sep="\n")
            run = {"seed": seed, "hfsdk": {"history": history, "curve": curve}}
            report.add(f"gain, seed {seed}", curve[-1]["score"] - curve[0]["score"], at_least=GAIN)
            report.add(f"  final KL (exact per token), seed {seed}", curve[-1]["kl"], "nats")
            report.add(f"  final KL (k1), seed {seed}", curve[-1]["kl_k1"], "nats")
            report.add(f"  final KL (k3), seed {seed}", curve[-1]["kl_k3"], "nats")
            if arguments.lora:
                rates = {"lr": LORA_RATES[0] * ours.lr, "critic_lr": LORA_RATES[1] * ours.critic_lr, "lora_rank": LORA_RANK}
                adapted = replace(ours, **{**rates, **json.loads(arguments.lora_settings)})
                say(f"seed {seed}: LoRA of rank {adapted.lora_rank}")
                lora_history, _ = run_hfsdk(adapted, seed, folder / "lora")
                lora_curve = judge(evaluator, folder / "lora")
                say(curve_table(lora_curve), samples_text(lora_curve), sep="\n")
                run["lora"] = {"history": lora_history, "curve": lora_curve, "settings": asdict(adapted)}
                kl = min(curve[-1]["kl"], lora_curve[-1]["kl"])
                full_at, lora_at = (score_at(one, kl) - curve[0]["score"] for one in (curve, lora_curve))
                report.add(f"  gain of LoRA, seed {seed}", lora_curve[-1]["score"] - lora_curve[0]["score"])
                report.add(f"  final KL of LoRA, seed {seed}", lora_curve[-1]["kl"], "nats")
                error = math.hypot(*(one[-1]["score_error"] / full_at for one in (curve, lora_curve)))
                report.add(f"  standard error of the ratio below, from held-out prompts, seed {seed}", error)
                report.add(f"gain of LoRA / all weights at KL {kl:.2f}, seed {seed}", lora_at / full_at, at_least=OF_LORA)
            if arguments.vs_trl or arguments.trl_from:
                say(f"seed {seed}: TRL")
                run["trl"] = before.get(seed) or train_trl(theirs, seed, prompts, folder / "trl", evaluator)
                their_curve = run["trl"]["curve"]
                say(curve_table(their_curve))
                kl = min(curve[-1]["kl"], their_curve[-1]["kl"])
                at = score_at(curve, kl), score_at(their_curve, kl)
                report.add(f"  score at KL {kl:.2f}, seed {seed}: hfsdk", at[0])
                report.add(f"  score at KL {kl:.2f}, seed {seed}: TRL", at[1])
                report.add(f"  final score of TRL, seed {seed}", their_curve[-1]["score"])
                differences.append(at[0] - at[1])
            report.details["runs"].append(run)
    if differences:
        report.add("score at equal KL, hfsdk - TRL, mean of seeds", sum(differences) / len(differences), at_least=0.0)
    return report.finish(arguments)


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--all", action="store_true", help="every algorithm, reward model, additions: see learning_all.py")
    only = 'with --all: e.g. PPO Safe-RLHF "reward model" additions'
    made.add_argument("--only", nargs="+", default=[], metavar="NAME", help=only)
    made.add_argument("--vs-trl", action="store_true", help="train the same by TRL and compare the scores at equal KL")
    made.add_argument("--lora", action="store_true", help="train adapters too and compare the scores at equal KL")
    made.add_argument("--lora-settings", default="{}", metavar="JSON", help="other settings for these, e.g. '{\"lr\": 1e-3}'")
    made.add_argument("--trl-from", metavar="FILE", help="the same, with TRL's runs of an earlier --json FILE, which do not change")
    made.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), metavar="SEED")
    made.add_argument("--steps", type=int, default=OURS.steps)
    made.add_argument("--copies", type=int, help=f"continuations per held-out prompt; {COPIES}, with --lora {LORA_COPIES}")
    made.add_argument("--settings", default="{}", metavar="JSON", help="other settings for both, e.g. '{\"lr\": 3e-4}'")
    made.add_argument("--trl-lr", type=float, default=TRL_LR)
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
