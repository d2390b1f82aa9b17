"""Do trainer, rollout and transformers agree? Random weights with sharp logits, fp32, layouts that fit four processes.

Targets, for train layouts tp1, tp2, dp2, tp2 dp2 x rollout tp1, tp2 (with --all every layout of tp, pp and dp on up to four
ranks, those with dp also with the distributed optimizer, x every rollout tp that divides the ranks, in the actor's pool; and every
layout x rollout tp1, tp2 of a shadow on a pool of two further workers), untied and tied embeddings, logits with std of at least 1:

* log-probs of the rollout's own samples: largest difference between any two of trainer, rollout and transformers at most 1e-4,
  after load and again after an update (transformers reads what ``actor.save_pretrained`` wrote);
* the whole gradient of a PPO loss (clipped ratio with old log-probs slightly off, entropy bonus) under Hugging Face names:
  ||g - g_ref|| / ||g_ref|| at most 1e-5, g_ref from plain PyTorch on transformers in one process.

Uses as many worker processes as the layout has ranks (1, 2 or 4; two more with a pool for the rollout), of one thread each (two
where there is one rank), and this process. Cases with as many workers share a session.

    python benchmarks/parity.py --check                                            about 6 minutes
    python benchmarks/parity.py --all --check                                      112 cases, about an hour
    python benchmarks/parity.py --all --layout "pp2 dp2" --rollout tp4             some of them
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from common import Report, parser, quiet_transformers, say, short, table, write_gradients

import hfsdk as hf
from hfsdk.algorithms import ppo

LOG_PROB_TARGET = 1e-4
GRADIENT_TARGET = 1e-5
TRAIN = {
    "tp1": 1, "tp2": 2, "pp2": 2, "dp2": 2, "tp4": 4, "pp4": 4, "dp4": 4, "tp2 pp2": 4, "tp2 dp2": 4, "pp2 dp2": 4,
}  # fmt: skip
"""Train layout -> ranks."""
ROLLOUT = {"tp1": 1, "tp2": 2, "tp4": 4}
"""Rollout layout (dp fills up) -> ranks of a replica."""
VOCAB, NUM_PROMPTS, NEW_TOKENS = 1003, 24, 24
CLIP, ENTROPY_COEF = 0.2, 0.01


@dataclass(frozen=True)
class Case:
    """What is compared."""

    train: str
    rollout: str
    distributed: bool = False
    """Whether the optimizer is."""
    own_pool: bool = False
    """Whether the rollout lives on two workers of its own."""

    @property
    def devices(self) -> int:
        """Worker processes."""
        return TRAIN[self.train] + 2 * self.own_pool


CASES = [Case(t, r) for t in ("tp1", "tp2", "dp2", "tp2 dp2") for r in ("tp1", "tp2") if ROLLOUT[r] <= TRAIN[t]]
ALL_CASES = [
    Case(t, r, distributed)
    for t in TRAIN for r in ROLLOUT if ROLLOUT[r] <= TRAIN[t]
    for distributed in ((False, True) if "dp" in t else (False,))
] + [Case(t, r, own_pool=True) for t in TRAIN for r in ("tp1", "tp2")]  # fmt: skip


@dataclass
class Result:
    """One layout's largest differences."""

    embeddings: str
    train: str
    rollout: str
    optimizer: str
    pool: str
    load: float = float("nan")
    update: float = float("nan")
    gradient: float = float("nan")
    worst_tensor: str = ""
    moved: float = float("nan")
    """Largest change of a log-prob by the update, so that "after an update" means something."""
    logits_std: float = float("nan")


# -- the plain side: transformers, one process


def make_model(folder: Path, *, tied: bool) -> float:
    """Write a random Llama of 8 query and 4 key heads of 32; return the std of its logits on random tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        head_dim=32, max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.1, eos_token_id=0, pad_token_id=0,
        bos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        return float(model(torch.randint(2, VOCAB, (4, 64))).logits.std())


def plain_model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def plain_forward(model: Any, prompts: hf.Ragged, responses: hf.Ragged) -> tuple[Any, Any]:
    """Return log-probs and entropies of all response tokens, flat, by one padded pass."""
    import torch

    lengths = prompts.lengths + responses.lengths
    tokens_BS = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
    selected_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens_BS[i, : lengths[i]] = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        selected_BS[i, len(prompt) - 1 : lengths[i] - 1] = True
    log_probs_NV = model(tokens_BS).logits[selected_BS].log_softmax(-1)
    targets_N = torch.from_numpy(responses.flat.astype(np.int64))
    return log_probs_NV.gather(1, targets_N[:, None])[:, 0], -(log_probs_NV.exp() * log_probs_NV).sum(1)


def plain_log_probs(folder: Path, table_: hf.Table) -> np.ndarray[Any, Any]:
    import torch

    with torch.no_grad():
        return plain_forward(plain_model(folder), table_.ragged("prompt"), table_.ragged("response"))[0].numpy()


def plain_gradient(folder: Path, table_: hf.Table) -> dict[str, np.ndarray[Any, Any]]:
    """Return the gradient of the PPO loss as one would write it by hand."""
    import torch

    model = plain_model(folder)
    log_probs, entropy = plain_forward(model, table_.ragged("prompt"), table_.ragged("response"))
    old, advantages = (torch.from_numpy(table_.ragged(name).flat.copy()) for name in ("old_log_probs", "advantages"))
    ratio = (log_probs - old).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * advantages, clipped * advantages) - ENTROPY_COEF * entropy
    loss.mean().backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


# -- the hfsdk side


def sample(actor: Any, prompts: list[list[int]]) -> tuple[Any, hf.Table]:
    """Generate and take the trainer's log-probs of it."""
    batch = actor.compute_log_probs(actor.generate(prompts, max_new_tokens=NEW_TOKENS))
    return batch, batch.table("prompt", "response", "rollout_log_probs", "old_log_probs")


def spread(table_: hf.Table, plain: np.ndarray[Any, Any]) -> float:
    """Return the largest difference between any two of trainer, rollout and transformers."""
    three = np.stack([table_.ragged("old_log_probs").flat, table_.ragged("rollout_log_probs").flat, plain])
    return float((three.max(0) - three.min(0)).max())


def difference(found: Any, wanted: dict[str, np.ndarray[Any, Any]]) -> tuple[float, str]:
    """Return ||g - g_ref|| / ||g_ref|| over all tensors and, in words, the tensor that is worst by itself."""
    if set(found) != set(wanted):
        raise RuntimeError(f"gradients have other names: {sorted(set(found) ^ set(wanted))}")
    total = np.sqrt(sum(float((w.astype(np.float64) ** 2).sum()) for w in wanted.values()))
    apart = {name: float(np.linalg.norm((found[name] - w).astype(np.float64))) for name, w in wanted.items()}
    own = {name: apart[name] / max(float(np.linalg.norm(w.astype(np.float64))), 1e-30) for name, w in wanted.items()}
    worst = max(own, key=lambda name: own[name])
    return float(np.sqrt(sum(v**2 for v in apart.values())) / total), f"{worst} {short(own[worst])}"


def compare(session: Any, folder: Path, work: Path, case: Case, result: Result) -> None:
    """Fill in one layout's differences."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(2, VOCAB, size=n).tolist() for n in generator.integers(1, 40, size=NUM_PROMPTS)]
    optimizer = hf.AdamW(lr=1e-3, distributed=case.distributed)
    actor = session.actor(str(folder), train=case.train, rollout=case.rollout, optimizer=optimizer)
    session.place({"actor": TRAIN[case.train], "actor.rollout": 2} if case.own_pool else "colocate")
    batch, seen = sample(actor, prompts)
    result.load = spread(seen, plain_log_probs(folder, seen))
    old = seen.ragged("old_log_probs")
    noise = generator.normal(0, 0.15, size=len(old.flat)).astype(np.float32)
    advantages = generator.normal(0, 1, size=len(old.flat)).astype(np.float32)
    batch = batch.with_columns(old_log_probs=old.map(old.flat + noise), advantages=old.map(advantages))
    actor.forward_backward(batch, ppo.PolicyLoss(clip=CLIP, entropy_coef=ENTROPY_COEF))
    actor.run(write_gradients, str(work / "gradient.npz"))
    with np.load(work / "gradient.npz") as found:
        wanted = plain_gradient(folder, batch.table("prompt", "response", "old_log_probs", "advantages"))
        result.gradient, result.worst_tensor = difference(found, wanted)
    actor.step()
    _, after = sample(actor, prompts)
    updated = Path(actor.save_pretrained(str(work / "updated")))
    result.update = spread(after, plain_log_probs(updated, after))
    result.moved = float(np.abs(plain_log_probs(updated, seen) - old.flat).max())
    actor.release()


def main() -> int:
    arguments = parse()
    quiet_transformers()
    report = Report("parity", "1, 2 or 4 worker processes (two threads for 1, else one each), and transformers in this process")
    results = []
    for embeddings in arguments.embeddings:
        with tempfile.TemporaryDirectory(prefix="hfsdk-parity-") as name:
            folder = Path(name) / "model"
            logits_std = make_model(folder, tied=embeddings == "tied")
            for devices, cases in groupby(sorted(chosen(arguments), key=lambda c: c.devices), key=lambda c: c.devices):
                with hf.Session(devices=devices, wait=True) as session:
                    for number, case in enumerate(cases):
                        work = Path(name) / f"{devices}-{number}"
                        work.mkdir()
                        optimizer, pool = "distributed" if case.distributed else "plain", "own" if case.own_pool else "one"
                        result = Result(embeddings, case.train, case.rollout, optimizer, pool, logits_std=logits_std)
                        compare(session, folder, work, case, result)
                        results.append(result)
                        say(
                            f"{embeddings}, train {case.train}, rollout {case.rollout}, {pool} pool, {optimizer} optimizer: "
                            f"log-probs {short(result.load)} after load, {short(result.update)} after an update; "
                            f"gradient {short(result.gradient)}, worst tensor {result.worst_tensor}"
                        )
    names = ("embeddings", "train", "rollout", "pool", "optimizer", "load", "update", "gradient", "moved")
    rows = [[v if isinstance(v, str) else short(v) for v in (getattr(r, n) for n in names)] for r in results]
    say("\nlargest differences by layout (moved: change of a log-prob by the update)\n", table(names, rows), sep="\n")
    report.details = {"layouts": [asdict(r) for r in results]}
    report.add("smallest std of the logits", min(r.logits_std for r in results), at_least=1.0)
    report.add("log-probs after load", max(r.load for r in results), "nats", at_most=LOG_PROB_TARGET)
    report.add("log-probs after an update", max(r.update for r in results), "nats", at_most=LOG_PROB_TARGET)
    report.add("gradient", max(r.gradient for r in results), "relative norm", at_most=GRADIENT_TARGET)
    report.add("smallest change by the update", min(r.moved for r in results), "nats", at_least=0.01)
    return report.finish(arguments)


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that were asked for."""
    cases = ALL_CASES if arguments.all else CASES
    wanted = [c for c in cases if arguments.layout in (None, c.train) and arguments.rollout in (None, c.rollout)]
    wanted = [c for c in wanted if arguments.pool in (None, "own" if c.own_pool else "one")]
    return [c for c in wanted if arguments.optimizer in (None, "distributed" if c.distributed else "plain")]


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--all", action="store_true", help="every layout of up to four ranks")
    made.add_argument("--layout", choices=TRAIN, help="only this train layout, e.g. 'tp2 dp2'")
    made.add_argument("--rollout", choices=ROLLOUT, help="only this rollout layout")
    made.add_argument("--pool", choices=("one", "own"), help="only with the rollout in the actor's pool, or in one of its own")
    made.add_argument("--optimizer", choices=("plain", "distributed"), help="only this optimizer")
    made.add_argument("--embeddings", nargs="+", choices=("untied", "tied"), default=["untied", "tied"])
    arguments = made.parse_args()
    if not chosen(arguments):
        made.error("no case is left; more layouts come with --all")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
