"""A campaign against hfsdk: kills, interrupts, damage, full disks, bad input, lost kernels and lines; what holds, what does not.

    python benchmarks/under_fire.py --seed 1 --minutes 10 --check --json one.json
    python benchmarks/under_fire.py --seed 1 --only kills --trial 12        # try one of them once more
    python benchmarks/under_fire.py --merge one.json two.json --check       # the sum of several runs

After each trial the session must be usable, its state a known one, bit for bit (initial, the checkpoint's, the one before, or what
the deed leads to; the next step after ``load`` or ``rewind`` is the recorded one), every error a typed one; nothing may take longer
than its ceiling or be left behind after 10 s. In every other round of ten minutes trained roles have adapters (``--lora``: in all).

Targets, for 60 minutes in all, in one run or the sum of several (half of the share of a shorter run, one of each kind in less than
ten minutes): worker kills >= 60, of them in place >= 20, explain_gap >= 3, first_bad >= 2, and one in each of taking new weights
to the rollout, probe, exports, exports with adapters merged and generation beside a snapshot; with LoRA roles >= 20; interrupts >=
500, of them in start-ups >= 50; driver kills >= 30, of them in or near a save >= 20, with LoRA roles >= 10; damaged files >= 60;
trials with kept sessions >= 35, in them kernels killed >= 30, with LoRA roles >= 10; from afar >= 100, in them connections cut >=
100; fuzzed calls >= 10,000; nothing of it fails.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from common import Report, parser, say
from fire.campaign import Campaign
from fire.ledger import BY_NAME, KINDS, Ledger


def child(plan: str) -> int:
    """Run trials in this process: what the campaign starts."""
    from fire.trials import Log, run_child

    told = json.loads(plan)
    modules = {kind: importlib.import_module(f"fire.{kind}") for kind in told["shares"]}
    log = Log(Path(told["log"]), told["seed"])
    shares, folder = told["shares"], Path(told["folder"])
    run_child(modules, shares, told["first"], log, folder, told["seconds"], told["once"], told["each"])  # type: ignore[arg-type]
    return 0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    found = parser(__doc__)
    found.add_argument("--seed", type=int, default=0, help="of the dice: what is tried, and at which moment")
    found.add_argument(
        "--minutes", type=float, default=5.0, help="how long; under ten, each kind is tried once, however long it takes"
    )
    found.add_argument("--only", metavar="KIND,...", default="", help=f"of {', '.join(kind.name for kind in KINDS)}")
    found.add_argument("--trial", type=int, metavar="K", help="with --only KIND: this one, once")
    found.add_argument("--lora", action="store_true", default=None, help="only roles with adapters; else every other ten minutes")
    found.add_argument("--merge", nargs="+", metavar="FILE", help="sum the JSON of earlier runs instead, and check the sum")
    found.add_argument("--markdown", action="store_true", help="print the table as docs/reliability.md has it")
    found.add_argument("--child", help=argparse.SUPPRESS)
    given = found.parse_args()
    given.only = [kind for kind in given.only.split(",") if kind]
    unknown = [kind for kind in given.only if kind not in BY_NAME]
    if unknown or (given.trial is not None and len(given.only) != 1):
        found.error(f"--only takes kinds ({', '.join(BY_NAME)}), --trial one of them; got {', '.join(given.only) or 'none'}")
    return given


def finish(ledger: Ledger, given: argparse.Namespace) -> int:
    """Print what was tried and what became of it; returns the exit code."""
    say("\n" + (ledger.markdown() if given.markdown else ledger.counts()))
    if ledger.failed:
        say("\n" + ledger.failures())
    report: Report = ledger.report(given.only)
    if given.trial is not None:
        return 1 if ledger.failed else 0
    return report.finish(given)


def main() -> int:
    """Run the campaign, or sum runs."""
    given = arguments()
    if given.child:
        return child(given.child)
    if given.merge:
        return finish(Ledger.merged(map(Ledger.read, given.merge)), given)
    lora = given.lora or (None if given.trial is None else False)
    campaign = Campaign(given.seed, given.minutes, only=given.only, trial=given.trial, lora=lora)
    try:
        campaign.run()
    except KeyboardInterrupt:
        say("interrupted: what it started was ended; this is what was tried so far")
    return finish(campaign.ledger, given)


if __name__ == "__main__":
    sys.exit(main())
