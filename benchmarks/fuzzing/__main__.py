"""``python -m benchmarks.fuzzing --seed 3 --num 10000``: the calls of a campaign, its counts and its failures."""

from __future__ import annotations

import argparse

from . import fuzz, reproduce

parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzzing", description=__doc__)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--num", type=int, default=1000, help="calls over all targets")
parser.add_argument("--kind", choices=["session", "pure"], action="append", help="by default both")
parser.add_argument("--real", action="store_true", help="on a session with real workers")
parser.add_argument("--only", action="append", default=[], help="targets whose names contain this")
parser.add_argument("--target", help="with --at: the one target of which one call is made again, in this process")
parser.add_argument("--at", type=int, default=0, help="number of the call to make again")
arguments = parser.parse_args()

if arguments.target:
    reproduce(arguments.target, arguments.seed, arguments.at, arguments.at + 1, real=arguments.real)
else:
    report = fuzz(
        arguments.seed, arguments.num, arguments.kind or ("session", "pure"), real=arguments.real, only=arguments.only
    )  # fmt: skip
    print(report)
