"""Proof of weights, why trainer and rollout differ, the first bad number: what they find of what is planted, and what they cost.

    python benchmarks/why.py --check --json why.json
    python benchmarks/why.py --only proof

Targets: proofs take at most 3 % of a warm step; snapshots that a run takes to find its first bad number at most 5 %; every planted
cause is named right, and none on healthy runs.
Uses: two workers of one thread each, and a controller.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from common import ROOT, Report, parser, table

PARTS = ("proof", "differ", "first_bad")
if str(ROOT / "benchmarks") not in sys.path:
    sys.path.insert(0, str(ROOT / "benchmarks"))


def main() -> int:
    """Run the parts that were asked for."""
    options = parser(__doc__)
    options.add_argument("--only", help=f"of {', '.join(PARTS)}: those alone, with commas between")
    arguments = options.parse_args()
    report, lines = Report("why", "2 workers of one thread each"), []
    for part in arguments.only.split(",") if arguments.only else PARTS:
        rows: list[dict[str, Any]] = import_module(f"why_parts.{part}").rows()
        report.details[part] = rows
        lines += [(row["part"], row["what"], f"{row['value']:.3g} {row['unit']}", "ok" if row["ok"] else "missed") for row in rows]
        wrong = sum(not row["ok"] for row in rows)
        report.add(f"{part}: rows that miss", wrong, at_most=0)
    print(table(("part", "what", "value", ""), lines))
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
