"""Which scheme of generation wins where a few responses are much longer than the others: the table of docs/perf-model.md.

    python benchmarks/long_tails.py --seeds 5            about five minutes of one core; --only 16 leaves out 128 GPUs

GRPO with 8 responses a prompt, 4 prompts a GPU, H100, offloaded; speed-ups over the synchronous step in trained tokens a second,
the lowest and the highest of all seeds, two steps each. All of it is simulated (``hf.long_tails``).

Uses: one thread of this process; nothing is started.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from common import Report, parser, say, table

CASES = (("qwen2.5-7b", "2x8 H100"), ("qwen2.5-7b", "16x8 H100"), ("qwen2.5-72b", "16x8 H100"))
LENGTHS = {"all of 2,048": 2048, "agent-35b": 16_384, "math-4b": 31_744}
"""Name of response lengths -> most that are allowed."""


def planned(model: str, cluster: str, lengths: str) -> Any:
    """Return the plan of a step with all roles open."""
    import hfsdk as hf

    most = LENGTHS[lengths]
    drawn = "full" if lengths.startswith("all") else hf.ResponseLengths.measured(lengths)
    session = hf.Session.simulated(cluster)
    options = hf.RolloutOptions(max_num_seqs=256, max_model_len=1024 + most)
    shared: dict[str, Any] = {"dtype": "bf16", "micro_batch_tokens": 32768, "offload": True}
    actor = session.actor(model, rollout_options=options, optimizer=hf.AdamW(distributed=True), recompute="full", **shared)
    session.reference(actor, offload=True)
    session.reward(lambda completions: [0.0] * len(completions))
    prompts = 4 * session.cluster.num_devices
    return session.plan(
        hf.GRPO(n=8), hf.Workload(prompts=prompts, prompt_tokens=1024, response_tokens=most, response_lengths=drawn)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print, and return the exit code."""
    import hfsdk as hf

    given = parser(__doc__)
    given.add_argument("--seeds", type=int, default=5, help="how many seeds of lengths")
    given.add_argument("--only", type=int, nargs="+", default=[16, 128], metavar="DEVICES", help="clusters of these sizes alone")
    arguments = given.parse_args(argv)
    report, rows, fastest = Report("long_tails", "one thread"), [], set()
    for model, cluster in CASES:
        if (devices := hf.ClusterSpec.parse(cluster).num_devices) not in arguments.only:
            continue
        for lengths in LENGTHS:
            plan, found = planned(model, cluster, lengths), defaultdict[str, list[tuple[float, float]]](list)
            for seed in range(1 if lengths.startswith("all") else arguments.seeds):
                tails = hf.long_tails(plan, seed=seed)
                for name, one in tails.to_pandas().iterrows():
                    found[str(name)].append((one.speedup, one.stale_share))
                if not lengths.startswith("all"):
                    fastest.add(tails.fastest.scheme)
                say(f"{model}, {devices} GPUs, {lengths}, seed {seed}: {tails['synchronous'].seconds:,.0f} s; {_words(tails)}")
            rows.append((f"{model}, {devices}", lengths, *(_between(found[name]) for name in found if name != "synchronous")))
            if not lengths.startswith("all"):
                for name in ("reallocation", "one step off, partial"):
                    least = min(speedup for speedup, _ in found[name])
                    report.add(f"{model}, {devices} GPUs, {lengths}, {name}: speed-up at least", least, "x", at_least=1.0)
    names = [name for name in hf.long_tails(plan, steps=1).schemes if name != "synchronous"]
    print("\n" + table(("model, GPUs", "lengths", *names), rows))
    say(f"fastest wherever there is a tail: {', '.join(sorted(fastest))}")
    return report.finish(arguments)


def _words(tails: Any) -> str:
    """Return the speed-up of every scheme but the synchronous one, and what it chose."""
    words = []
    for name, row in tails.to_pandas().iloc[1:].iterrows():
        words.append(f"{name} {row.speedup:.2f}" + (f" ({row.how})" if row.how else ""))
    return "; ".join(words)


def _between(found: Sequence[tuple[float, float]]) -> str:
    """Return the lowest and the highest speed-up, and the share of stale tokens where there are some and not all."""
    (low, high), (few, many) = ((min(x), max(x)) for x in zip(*found, strict=True))
    words = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
    stale = f"{few:.0%}" if f"{few:.0%}" == f"{many:.0%}" else f"{few * 100:.0f} to {many:.0%}"
    return words + (f" ({stale})" if 0 < few < 1 else "")


if __name__ == "__main__":
    sys.exit(main())
