"""What the algorithms' own arithmetic costs: advantages and losses over 1,024 responses of 1,024 tokens, on one core.

Targets: advantages of each algorithm and its loss's maths (without the backward pass) together at most 150 ms; outside of generate,
forward passes and updates at most 3 % of a warm PPO step of SmolLM2-135M-Instruct (its own metrics included).

One thread, processor time, the median of five. The step: one worker process, 16 prompts, responses of up to 32 tokens, the second
and third step of a session; its share is the seconds outside the calls of actor, critic and reference.

    python benchmarks/maths.py --check             about 2 minutes
    python benchmarks/maths.py --only arithmetic   seconds
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import Report, parser, say

MOST_MS = 150.0
MOST_SHARE = 0.03
ROWS = TOKENS = 1024


def table() -> Any:
    """Return a batch's columns, all that any advantages read."""
    from hfsdk.core.table import Ragged, Table

    rng = np.random.default_rng(0)
    lengths = [TOKENS] * ROWS

    def per_token(scale: float = 1.0) -> Any:
        return Ragged.from_lengths((scale * rng.standard_normal(ROWS * TOKENS)).astype(np.float32), lengths)

    columns = {name: per_token() for name in ("values", "cost_values")}
    columns |= {name: per_token(0.1) for name in ("old_log_probs", "ref_log_probs")}
    scalars = {name: rng.standard_normal(ROWS).astype(np.float32) for name in ("scores", "costs", "baseline_scores")}
    response = Ragged.from_lengths(np.ones(ROWS * TOKENS, np.int32), lengths)
    return Table({**columns, **scalars, "response": response, "group": np.arange(ROWS) // 8})


def milliseconds(run: Callable[[], Any]) -> float:
    """Return the processor time of a call: the median of five, after one."""
    run()
    found = []
    for _ in range(5):
        start = time.process_time()
        run()
        found.append(1e3 * (time.process_time() - start))
    return median(found)


def arithmetic(report: Report) -> None:
    """Time advantages and losses."""
    import torch

    from hfsdk.algorithms import grpo, ppo, reinforce_pp, remax, rloo, safe_rlhf

    torch.set_num_threads(1)
    rows = table()
    functions = {
        "PPO": ppo.Advantages(), "GRPO": grpo.Advantages(), "GRPOVI": grpo.Advantages(increase_variance=True),
        "RLOO": rloo.Advantages(), "ReMax": remax.Advantages(), "REINFORCE++": reinforce_pp.Advantages(),
        "Safe-RLHF": safe_rlhf.Advantages(multiplier=1.0),
    }  # fmt: skip
    flat = {name: torch.tensor(rows.ragged(name).flat) for name in ("old_log_probs", "ref_log_probs", "values")}
    flat |= {"advantages": flat["values"], "returns": flat["old_log_probs"]}
    out = SimpleNamespace(log_probs=flat["ref_log_probs"], entropy=flat["values"], values=flat["values"])
    policy = milliseconds(lambda: ppo.PolicyLoss(kl_coef=0.1)(out, flat))
    value = milliseconds(lambda: ppo.ValueLoss()(out, flat))
    for name, function in functions.items():
        losses = policy + value * (name == "PPO") + 2 * value * (name == "Safe-RLHF")
        took = milliseconds(lambda function=function: function(rows))
        say(f"{name}: advantages {took:.1f} ms, losses {losses:.1f} ms")
        report.add(f"advantages and losses, {name}", took + losses, "ms", at_most=MOST_MS)


def share_of_a_step(report: Report) -> None:
    """Measure what of a SmolLM2 step is neither generation nor a pass nor an update."""
    import hfsdk as hf
    from hfsdk.quickstart import beginnings, sentiment

    with hf.Session(devices=1) as session:
        actor = session.actor("smollm2-135m-instruct", optimizer=hf.AdamW(lr=1e-6))
        session.critic("smollm2-135m-instruct", optimizer=hf.AdamW(lr=1e-5))
        session.reference(actor)
        session.reward(sentiment)
        session.place("colocate")
        prompts = session.prompts(beginnings(), batch_size=16)
        session.train(hf.PPO(max_new_tokens=32), prompts, steps=1, progress=False)
        shares = []
        for _ in range(2):
            start = time.perf_counter()
            session.train(hf.PPO(max_new_tokens=32), prompts, steps=1, progress=False)
            took = time.perf_counter() - start
            inside = sum(s.duration_s or 0.0 for s in session.trace.calls if s.role in ("actor", "critic", "reference"))
            shares.append(1 - inside / took)
            say(f"a step of {took:.2f} s, {took - inside:.3f} s of it outside generation, passes and updates")
    report.add("share of a SmolLM2 step outside generate, forward, update", min(shares), at_most=MOST_SHARE)


PARTS = {"arithmetic": arithmetic, "step": share_of_a_step}


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    arguments = made.parse_args()
    report = Report("maths", "one thread; the step: one worker process of one thread")
    for name in arguments.only:
        PARTS[name](report)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
