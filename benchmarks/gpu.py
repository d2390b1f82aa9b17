"""The first thing to run where there is a GPU: every part of the engine that needs neither vLLM nor Ray, on one GPU.

    python benchmarks/gpu.py --check --json gpu.json      on a GPU, under ten minutes
    python benchmarks/gpu.py --full --check               whole sessions too: vLLM, Ray, as many GPUs as there are
    python benchmarks/gpu.py --rehearse --check           every stage on the processor, small; about a minute (with --full two)
    python benchmarks/gpu.py --only attention,states

On a GPU each stage runs in a process of its own with a time limit: one that crashes, hangs or fills the GPU does not take the
others along. It prints PASS or FAIL with its figures as soon as it is over, and the JSON is written anew after each. A rehearsal
runs them all in one process, whole sessions aside. A stage that needs more GPUs than there are is skipped, and that is said.

Target: every stage passes. What a stage asks for stands beside its checks in ``on_gpu/``; its figures are only reported.
Uses: one process of one thread; whole sessions a worker a GPU. Needs torch, megatron-core, safetensors, numpy, pandas, psutil.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from common import ROOT, Report, parser

NAMES = ("join", "constants", "attention", "log_probs", "spans", "passes", "learns", "recorded", "replay", "bridge", "offload",
         "states", "repeats", "fingerprints", "lora")  # fmt: skip
FULL = {"whole": 1, "float32": 1, "adapters": 1, "again": 1, "rollout_tp2": 2, "two_pools": 2, "large": 4}
"""Stages of ``--full``, with the GPUs that each needs."""

LIMIT_S, FULL_LIMIT_S = 150, 900
"""Of one stage; those on one GPU stay under ten minutes all together where none hangs."""

ANSWER = "stage: "
"""Before the line in which a stage's process tells its figures."""


def run_here(names: list[str], rehearse: bool, models: str) -> None:
    """Run stages in this process, tell what they found, and end it: what one left open must not keep it."""
    import torch

    from hfsdk.engine.training import cpu_support_megatron

    torch.set_num_threads(1)
    cpu_support_megatron.install()
    from on_gpu.stage import Setting

    if set(names) & set(FULL):
        from on_gpu.whole import STAGES
    else:
        from on_gpu.stages import STAGES

    for name in names:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="hfsdk-gpu-") as folder:
            setting = Setting(cuda=not rehearse, small=rehearse, folder=Path(folder), models=Path(models))
            try:
                STAGES[name](setting)
            except Exception as error:
                traceback.print_exc()
                setting.failures.append(f"{type(error).__name__}: {str(error)[:300]}")
        seconds = round(time.monotonic() - begun, 1)
        told = {"name": name, "figures": setting.figures, "failures": setting.failures, "seconds": seconds}
        print(ANSWER + json.dumps(told), flush=True)
    sys.stdout.flush()
    os._exit(0)


def run(names: list[str], rehearse: bool, models: str) -> list[dict[str, Any]]:
    """Run stages in one process; returns what each told."""
    command = [sys.executable, __file__, "--stage", ",".join(names), "--models", models, *(["--rehearse"] if rehearse else [])]
    paths = [str(ROOT), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    limit = FULL_LIMIT_S if set(names) & set(FULL) else LIMIT_S
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit, env=environment, check=False)
        out, end = done, f"it ended with {done.returncode}"
    except subprocess.TimeoutExpired as late:
        out, end = late, f"not over after {limit} s"
    texts = [(part or b"").decode(errors="replace") for part in (out.stdout, out.stderr)]
    told = {}
    for line in texts[0].splitlines():
        if line.startswith(ANSWER):
            found = json.loads(line.removeprefix(ANSWER))
            told[found.pop("name")] = found
    never = {"figures": {}, "failures": [end], "seconds": 0.0}
    output = "".join(texts)[-4000:]
    stages = [told.get(name, never) for name in names]
    return [{**stage, "output": output} if stage["failures"] else stage for stage in stages]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    found, every = parser(__doc__), (*NAMES, *FULL)
    found.add_argument("--rehearse", action="store_true", help="every stage on the processor, small")
    found.add_argument("--full", action="store_true", help="whole sessions too, on as many GPUs as there are")
    found.add_argument("--only", metavar="STAGE,...", help=f"of {', '.join(every)}")
    found.add_argument("--stage", help=argparse.SUPPRESS)
    found.add_argument("--models", help=argparse.SUPPRESS)
    given = found.parse_args()
    asked = [name for name in given.only.split(",") if name] if given.only else [*NAMES, *(FULL if given.full else ())]
    if set(asked) - set(every):
        found.error(f"--only takes {', '.join(every)}; got {given.only}")
    given.only = asked
    return given


def machine() -> tuple[str, int]:
    """Return torch's version with the GPU's name, and how many GPUs there are."""
    code = "import torch; n = torch.cuda.device_count(); name = torch.cuda.get_device_name() if n else 'no GPU'"
    command = [sys.executable, "-c", f"{code}; print(n, torch.__version__, name)"]
    count, words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(maxsplit=1)
    return words.strip(), int(count)


def runs(names: list[str], rehearse: bool, count: int) -> list[list[str]]:
    """Return which stages run, by process: on GPUs and with whole sessions each in one of its own; too few GPUs skip one."""
    small, whole = [name for name in names if name not in FULL], [name for name in names if name in FULL]
    enough = [name for name in whole if rehearse or FULL[name] <= count]
    for name in whole:
        if name not in enough:
            print(f"SKIP {name}: it needs {FULL[name]} GPUs, {count} here", flush=True)
    first = [small] if rehearse and small else [[name] for name in small]
    return first + [[name] for name in enough]


def main() -> int:
    """Run the stages; returns the exit code."""
    given = arguments()
    if given.stage:
        run_here(given.stage.split(","), given.rehearse, given.models)
    where, count = machine()
    if where.endswith("no GPU") and not given.rehearse:
        print(f"torch {where}: --rehearse runs every stage on the processor", file=sys.stderr)
        return 2
    report = Report("gpu", f"one process of one thread; torch {where}{', rehearsed on the processor' * given.rehearse}")
    with tempfile.TemporaryDirectory(prefix="hfsdk-gpu-models-") as models:
        for names in runs(given.only, given.rehearse, count):
            for name, found in zip(names, run(names, given.rehearse, models), strict=True):
                report.details[name] = found
                report.add(name, len(found["failures"]), "failures", at_most=0)
                words = "; ".join(f"{key} {value}" for key, value in found["figures"].items())
                print(f"{'FAIL' if found['failures'] else 'PASS'} {name} ({found['seconds']} s): {words}", flush=True)
                for failure in found["failures"]:
                    print(f"     {failure}", flush=True)
            if given.json:
                Path(given.json).write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    return report.finish(given)


if __name__ == "__main__":
    sys.exit(main())
