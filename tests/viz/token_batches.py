"""Batches held in memory, with the tokenizer of ``tiny``: real columns' shapes, hostile bytes, NaN where asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import hfsdk
from hfsdk.algorithms import rlmath
from hfsdk.assets.folder_tokenizer import FolderTokenizer
from hfsdk.core.batch import Batch
from hfsdk.core.pending import ColumnInfo, Lease
from hfsdk.core.table import Ragged, Table, take

TOKENIZER = FolderTokenizer(Path(hfsdk.__file__).parent / "assets" / "tiny")
EOS = 258
TEXTS = (
    "a gripping, if uneven, thriller",
    " naïve 🙂\n\tand\x00 long", "</script><script>window.hacked=1</script>", "שלום \u202eabc", "",
)  # fmt: skip


class LocalClient:
    """Answers for columns that lie here; remembers how many rows of a column were brought."""

    closed = False

    def __init__(self, tokenizer: Any = TOKENIZER) -> None:
        self.tables: list[Table] = []
        self.tokenizer = tokenizer
        self.most_rows = 0

    def put(self, table: Table) -> Lease:
        self.tables.append(table)
        return Lease(len(self.tables) - 1, lambda call_id: None)

    def wait(self, call_ids: Any, timeout: float | None) -> None:
        pass

    def state(self, call_id: int) -> str:
        return "done"

    def writer(self, call_id: int) -> str:
        return "test"

    def info(self, ref: Any) -> ColumnInfo:
        column = self.tables[ref.call_id][ref.name]
        return ColumnInfo("ragged", "float32", 0, column.lengths if isinstance(column, Ragged) else None)

    def gone(self, ref: Any) -> bool:
        return False

    def fetch(self, refs: Any) -> Table:
        found = {}
        for name, ref in refs.items():
            column = self.tables[ref.call_id][ref.name]
            found[name] = column if ref.rows is None else take(column, ref.rows)
            self.most_rows = max(self.most_rows, len(found[name]))
        return Table(found)

    def texts(self, rows: Any) -> list[str]:
        return [self.tokenizer.decode(row, special=False) for row in rows]

    def token_texts(self, token_ids: Any) -> list[str]:
        return self.tokenizer.pieces(token_ids)

    def token_bytes(self, token_ids: Any) -> list[bytes]:
        return self.tokenizer.token_bytes(token_ids)


def columns(num_rows: int = 12, n: int = 2, seed: int = 0, spread: float = 0.25, whiten: bool = True) -> dict[str, Any]:
    """What a PPO step leaves, with the engine's own numerics; every fifth response is empty."""
    rng = np.random.default_rng(seed)
    texts = [TEXTS[i % len(TEXTS)] for i in range(num_rows)]
    responses = [np.array([*t.encode(), EOS] if t else [], np.int32) for t in texts]
    response = Ragged.of(responses, dtype=np.int32)
    lengths, total = torch.tensor(response.lengths), len(response.flat)

    def drawn(mean: float, scale: float) -> torch.Tensor:
        return torch.tensor(rng.normal(mean, scale, total), dtype=torch.float32)

    old, values = drawn(-1.5, 0.7), drawn(0.2, 0.3)
    rollout, ref, new = old + drawn(0, 1e-6), old + drawn(0, 0.2), old + drawn(0, spread)
    scores = torch.tensor(rng.uniform(-1, 1, num_rows), dtype=torch.float32)
    rewards = rlmath.token_rewards(scores, old - ref, lengths, 0.05)
    advantages, returns = rlmath.gae(rewards, values, lengths, 1.0, 0.95)
    per_token = {
        "rollout_log_probs": rollout, "old_log_probs": old, "ref_log_probs": ref, "new_log_probs": new, "values": values,
        "rewards": rewards, "advantages": rlmath.whiten(advantages) if whiten else advantages, "returns": returns, "kl": old - ref,
    }  # fmt: skip
    found = {name: response.map(column.numpy()) for name, column in per_token.items()}
    prompt = Ragged.of([list(b"the film is") for _ in texts], dtype=np.int32)
    facts = {
        "scores": scores.numpy(), "group": np.arange(num_rows) // n,
        "finish_reason": np.array(["stop" if i % 3 else "length" for i in range(num_rows)]),
    }  # fmt: skip
    return {"prompt": prompt, "response": response, **found, **facts}


def batch(num_rows: int = 12, **options: Any) -> Batch:
    """The same as a batch."""
    return Batch.from_columns(LocalClient(), columns(num_rows, **options))


def of_lengths(lengths: list[int], client: LocalClient | None = None) -> Batch:
    """Responses of these lengths, of the letter a, with values alone."""
    response = Ragged.of([np.full(n, 97, np.int32) for n in lengths], dtype=np.int32)
    values = response.map(np.zeros(len(response.flat), np.float32))
    return Batch.from_columns(client or LocalClient(), {"response": response, "values": values})
