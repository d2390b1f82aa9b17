"""What the stages share: where they run, how large, clocks that wait for the GPU, and a role on a worker without Ray."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hfsdk.core.arguments import Learning, LogProbs
from hfsdk.core.layout import Layout
from hfsdk.core.microbatch import plan_pass, plan_update
from hfsdk.core.roles import AdamW, RoleSpec
from hfsdk.core.runtime import Assignment
from hfsdk.core.spec import SCALAR_HEAD_NAMES, ModelSpec
from hfsdk.core.table import Ragged, Table
from hfsdk.engine.process.safepoint import SafePoint
from hfsdk.engine.worker.role_engine import RoleEngine
from hfsdk.engine.worker.role_host import WorkerSetup
from hfsdk.engine.worker.worker import Worker

NEVER = SafePoint(lambda: False)

SMALL = ModelSpec(
    name="small", family="qwen2", num_layers=2, hidden_size=64, mlp_hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=512, max_positions=2048, tied_embeddings=True,
)  # fmt: skip
QWEN_1_5B = ModelSpec(
    name="1.5B", family="qwen2", num_layers=28, hidden_size=1536, mlp_hidden_size=8960, num_heads=12, num_kv_heads=2, head_dim=128,
    vocab_size=151_936, max_positions=4096, tied_embeddings=True,
)  # fmt: skip
LAYERS_OF_7B = ModelSpec(
    name="4 layers of 7B", family="qwen2", num_layers=4, hidden_size=3584, mlp_hidden_size=18_944, num_heads=28, num_kv_heads=4,
    head_dim=128, vocab_size=152_064, max_positions=4096, tied_embeddings=False,
)  # fmt: skip


@dataclass
class Setting:
    """Where a stage runs. ``figures`` is what it measured, ``failures`` what did not hold.

    ``folder`` is this stage's own; ``models`` has the models that all stages read, each written by the first that asks.
    """

    cuda: bool
    small: bool
    folder: Path
    models: Path
    figures: dict[str, float | str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    dtype_asked: str = ""
    """Of the stage; empty for what is usual here."""

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        return torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")

    @property
    def dtype(self) -> str:
        """What models compute in."""
        return self.dtype_asked or ("bf16" if self.cuda else "fp32")

    def size(self, large: int, small: int) -> int:
        """Return a size, smaller in a rehearsal."""
        return small if self.small else large

    def model(self, large: ModelSpec) -> ModelSpec:
        """Return a model, smaller in a rehearsal."""
        return SMALL if self.small else large

    def note(self, **figures: float | str) -> None:
        """Remember what was measured."""
        self.figures |= {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in figures.items()}

    def need(self, holds: object, words: str) -> None:
        """Remember what does not hold; the stage goes on, so that all of it is seen."""
        if not holds:
            self.failures.append(words)

    def sync(self) -> None:
        """Wait for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], times: int = 5) -> float:
        """Return the median time of some work, the GPU's included, after one time that is not counted."""
        found = []
        for _ in range(times + 1):
            self.sync()
            begun = time.perf_counter()
            work()
            self.sync()
            found.append(time.perf_counter() - begun)
        return statistics.median(found[1:])

    def peak_bytes(self, work: Callable[[], Any]) -> int:
        """Return by how much some work raised what torch has allocated, at its peak; 0 without a GPU, where nothing is counted."""
        if not self.cuda:
            work()
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def used_bytes(self) -> int:
        """Return what torch's tensors have on the GPU; 0 without one."""
        self.sync()
        return torch.cuda.memory_allocated() if self.cuda else 0

    def generator(self) -> torch.Generator:
        """Return a seeded generator of this device."""
        return torch.Generator(self.device).manual_seed(0)


def worker(setting: Setting) -> Worker:
    """Return a worker that has joined a world of its own, as a pool's worker does."""
    made = Worker(0)
    made.gpus = ("0",) if setting.cuda else ()
    made.join(WorkerSetup(0, 0, 1, "all", "gpu", f"file://{setting.folder / 'store'}"))
    return made


def role(setting: Setting, spec: ModelSpec, folder: Path | None = None, **more: Any) -> RoleSpec:
    """Return a trained actor of a model whose weights are in a folder; written now, at random, unless one is given."""
    folder = folder or write_model(setting.models, spec, setting.dtype)
    made = RoleSpec(
        name="actor", kind="actor", folder=str(folder), model=spec, train=Layout.parse("tp1").fill(1), dtype=setting.dtype,
        optimizer=AdamW(lr=1e-4), micro_batch_tokens=setting.size(8192, 128),
    )  # fmt: skip
    return replace(made, **more)


def write_model(models: Path, spec: ModelSpec, dtype: str) -> Path:
    """Write a model of random weights as transformers would, without it, unless it is there; the same on every machine."""
    from safetensors.torch import save_file

    folder = models / f"{spec.name}, {spec.num_layers} layers, {dtype}"
    if (folder / "config.json").exists():  # which is written last
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    rng = np.random.default_rng(0)
    weights = {}
    for name, shape in spec.tensors().items():
        random = len(shape) > 1
        made = torch.from_numpy(rng.standard_normal(shape, np.float32)).mul_(0.02) if random else torch.ones(shape)
        weights[name] = (torch.zeros(shape) if name.endswith(".bias") else made).to(kind)
    assert not set(weights) & set(SCALAR_HEAD_NAMES)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": [spec.class_name()], "model_type": spec.family, "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers, "intermediate_size": spec.mlp_hidden_size, "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions, "tie_word_embeddings": spec.tied_embeddings, "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps, "rope_theta": spec.rope_theta,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rows(spec: ModelSpec, lengths: Sequence[int], seed: int = 0) -> Table:
    """Return prompts of 8 tokens and responses of these lengths."""
    rng = np.random.default_rng(seed)
    prompts = Ragged.of([rng.integers(0, spec.vocab_size, 8) for _ in lengths], np.int64)
    responses = Ragged.of([rng.integers(0, spec.vocab_size, length) for length in lengths], np.int64)
    return Table({"prompt": prompts, "response": responses})


class Likelihood:
    """The loss of the updates, as a session ships one."""

    name = "likelihood"

    def load(self) -> Callable[[Any, Any], torch.Tensor]:
        """Return it."""
        return lambda out, b: -out.log_probs


def update(hosted: RoleEngine, table: Table) -> list[dict[str, float]]:
    """Take one optimizer step on all rows; return its metrics."""
    lengths = table.ragged("response").lengths
    plan = plan_update(table.ragged("prompt").lengths + lengths, lengths, 1, 1, 1, hosted.spec.micro_batch_tokens, seed=0)
    return list(hosted.run("update", table, Assignment(arguments=Learning(function=Likelihood()), mini_batches=plan), NEVER)[1])


def log_probs(hosted: RoleEngine, table: Table) -> Ragged:
    """Return the log-probs of the responses."""
    lengths = table.ragged("prompt").lengths + table.ragged("response").lengths
    micro_batches = plan_pass(lengths, 1, hosted.spec.micro_batch_tokens).micro_batches[0]
    given = Assignment(arguments=LogProbs(column="found"), micro_batches=micro_batches)
    columns, _ = hosted.run("compute_log_probs", table, given, NEVER)
    assert columns is not None
    found = columns["found"]
    assert isinstance(found, Ragged)
    return found
