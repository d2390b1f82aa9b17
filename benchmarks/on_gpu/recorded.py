"""A random 1.5B's numbers as a processor made them in float32, for a GPU's to be compared with: ``recorded.json``.

    PYTHONPATH=.. python -m on_gpu.recorded     from benchmarks/: records them anew; three minutes and 16 GB of memory

    gradient    28 layers: log-probs of 256 tokens, loss, norm of the whole gradient
    steps       8 layers of the same widths: log-probs, then the losses of three AdamW steps, the first's norm, log-probs after them

Of 28 layers AdamW's moments would not fit into such a machine. Weights and rows are NumPy's, the same everywhere; ``sample`` is
said first where they are not.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from hfsdk.core.arguments import Learning
from hfsdk.core.microbatch import plan_update
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Assignment
from hfsdk.core.spec import ModelSpec
from hfsdk.core.table import Table
from hfsdk.engine.worker.role_engine import RoleEngine
from on_gpu import stage
from on_gpu.stage import QWEN_1_5B, SMALL, Setting, write_model

FILE = Path(__file__).with_name("recorded.json")

MOST = {
    "cpu": {"log_probs": 1e-4, "loss": 1e-5, "grad_norm": 1e-5, "losses": 1e-5, "log_probs_after": 1e-3},
    "fp32": {"log_probs": 5e-3, "loss": 1e-4, "grad_norm": 1e-3, "losses": 1e-3, "log_probs_after": 5e-2},
    "bf16": {"log_probs": 0.2, "loss": 5e-3, "grad_norm": 0.05, "losses": 0.02, "log_probs_after": 1.0},
}
"""How far apart numbers may be: log-probs by the largest difference, the others relative to what was recorded."""

Numbers = dict[str, list[float]]


def gradient(hosted: RoleEngine, table: Table) -> Numbers:
    """Return what one pass forwards and backwards gives."""
    found = {"log_probs": stage.log_probs(hosted, table).flat.tolist()}
    lengths = table.ragged("response").lengths
    totals = table.ragged("prompt").lengths + lengths
    plan = plan_update(totals, lengths, 1, 1, 1, hosted.spec.micro_batch_tokens, seed=0)
    learn = Assignment(arguments=Learning(function=stage.Likelihood()), mini_batches=plan)
    metrics = hosted.run("forward_backward", table, learn, stage.NEVER)[1]
    norm = hosted.run("grad_norm", table, Assignment(), stage.NEVER)[1]
    return found | {"loss": [metrics["loss"]], "grad_norm": [norm]}


def steps(hosted: RoleEngine, table: Table) -> Numbers:
    """Return what three optimizer steps give."""
    before = stage.log_probs(hosted, table).flat.tolist()
    taken = [stage.update(hosted, table)[0] for _ in range(3)]
    after = stage.log_probs(hosted, table).flat.tolist()
    losses = [step["loss"] for step in taken]
    return {"log_probs": before, "losses": losses, "grad_norm": [taken[0]["grad_norm"]], "log_probs_after": after}


def parts(small: bool) -> dict[str, tuple[ModelSpec, Callable[[RoleEngine, Table], Numbers]]]:
    """Return what is recorded: a model, and what is asked of it."""
    whole, few = (SMALL, replace(SMALL, num_layers=1)) if small else (QWEN_1_5B, replace(QWEN_1_5B, num_layers=8))
    return {"gradient": (whole, gradient), "steps": (few, steps)}


def sample(folder: Path) -> list[float]:
    """Return a few of a model's weights as they lie on disk."""
    with safe_open(str(folder / "model.safetensors"), "pt") as file:
        last = file.get_tensor(sorted(file.keys())[-2])
    return [float(x) for x in last.flatten()[:: max(1, last.numel() // 4)][:4]]


def measure(setting: Setting, name: str, dtype: str, folder: Path) -> Numbers:
    """Return one part's numbers here."""
    spec, numbers = parts(setting.small)[name]
    torch.manual_seed(0)
    here = stage.worker(setting)
    made: RoleSpec = stage.role(setting, spec, folder, dtype=dtype)
    here.load(made)
    try:
        return numbers(here.roles["actor"], stage.rows(spec, [setting.size(32, 12)] * 8))
    finally:
        here.leave()
        (setting.folder / "store").unlink(missing_ok=True)


def apart(name: str, mine: list[float], theirs: list[float]) -> float:
    """Return how far numbers are from those recorded, as :data:`MOST` has it."""
    a, b = np.asarray(mine), np.asarray(theirs)
    difference = np.abs(a - b)
    return float(difference.max() if name.startswith("log_probs") else (difference / np.abs(b)).max())


def compare(setting: Setting) -> None:
    """A stage: this device's numbers against the recorded ones."""
    told = json.loads(FILE.read_text())["small" if setting.small else "large"]
    for part, (spec, _) in parts(setting.small).items():
        folder = write_model(setting.models, spec, "fp32")
        if not np.allclose(sample(folder), told[part]["sample"]):
            setting.need(False, f"{part}: NumPy makes other weights here than where they were recorded")
            continue
        for dtype in ("fp32", "bf16") if setting.cuda else ("fp32",):
            found = measure(setting, part, dtype, folder)
            for name, most in MOST[dtype if setting.cuda else "cpu"].items():
                if name in found:
                    error = apart(name, found[name], told[part][name])
                    setting.note(**{f"{part}_{dtype}_{name}": error})
                    setting.need(error < most, f"{part}, {dtype}: {name} are {error:.2g} apart, at most {most:g}")


def record(sizes: tuple[str, ...]) -> None:
    """Measure on this processor and write these sizes, ``small`` and ``large``, into the file."""
    found: dict[str, dict[str, Numbers]] = {}
    for size in sizes:
        small = size == "small"
        with tempfile.TemporaryDirectory() as place:
            setting = Setting(cuda=False, small=small, folder=Path(place), models=Path(place))
            found[size] = {}
            for part, (spec, _) in parts(small).items():
                folder = write_model(setting.models, spec, "fp32")
                found[size][part] = {"sample": sample(folder)} | measure(setting, part, "fp32", folder)
                print(size, part, {name: values[:3] for name, values in found[size][part].items()}, flush=True)
    brief = {s: {p: {n: [float(f"{x:.7g}") for x in v] for n, v in m.items()} for p, m in ps.items()} for s, ps in found.items()}
    FILE.write_text(json.dumps((json.loads(FILE.read_text()) if FILE.exists() else {}) | brief) + "\n")


if __name__ == "__main__":
    from hfsdk.engine.training import cpu_support_megatron

    cpu_support_megatron.install()
    record(tuple(sys.argv[1:]) or ("small", "large"))
