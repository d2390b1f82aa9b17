"""A policy small enough to follow by hand, behind handles as algorithms take them: `ToyModels`, with columns in a `ToyBatch`."""

import pickle
from types import SimpleNamespace

import numpy as np
import torch

from hfsdk.core.batch import Batch
from hfsdk.core.table import Ragged, Table
from hfsdk.engine.training.loss import ModelOutput, Tally, TokenBatch, evaluate

END, GOOD = 0, 2


class ToyBatch(Batch):
    """Runs map and reduce at once, on a pickled copy of the function, and checks the columns as Batch does."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows.num_rows

    def __getitem__(self, name):
        return self.rows[name]

    @property
    def columns(self):
        return tuple(self.rows)

    def __contains__(self, name):
        return name in self.rows

    def _run(self, fn, reads):
        return pickle.loads(pickle.dumps(fn))(Table({name: self.rows[name] for name in reads}))

    def map(self, fn, reads, writes):
        columns = self._run(fn, reads)
        assert set(columns) == set(writes)
        return self.plus(**columns)

    def reduce(self, fn, reads):
        return SimpleNamespace(value=self._run(fn, reads))

    def alias(self, name, source):
        return self.plus(**{name: self.rows[source]})

    def join(self, other, **columns):
        assert len(other) == len(self)
        return self.plus(**{new: other.rows[name] for new, name in columns.items()})

    def drop(self, *names):
        return ToyBatch(Table({name: column for name, column in self.rows.items() if name not in names}, self.rows.row_ids))

    def take(self, rows):
        return ToyBatch(self.rows.take(rows))

    def plus(self, **columns):
        return ToyBatch(self.rows.with_columns(columns))


class ToyModels:
    """Tokens 0 (ends the response), 1 and 2, drawn from one distribution, at most three. The score counts the twos."""

    def __init__(self, seed=0, lr=0.1, score=None, per_token=False):
        self.per_token = per_token
        self.logits = torch.zeros(3, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits], lr=lr)
        self.rng, self.calls, self.updates = np.random.default_rng(seed), [], []
        self.score = score or (lambda tokens: float((tokens == GOOD).sum()))
        self.reference_logits = torch.zeros(3)
        self.actor = SimpleNamespace(
            generate=self.generate, compute_log_probs=self.log_probs("old"), update=self.update, spec=None
        )  # fmt: skip
        self.reference = SimpleNamespace(compute_log_probs=self.log_probs("ref"), spec=None)
        self.reward = SimpleNamespace(compute_scores=self.scores)

    def generate(self, prompts, *, max_new_tokens, temperature, n=1):
        self.calls.append(f"generate n={n} temperature={temperature:g}")
        chances = self.logits.detach().softmax(0).double().numpy()
        responses = []
        for _ in range(len(prompts) * n):
            drawn = self.rng.choice(3, max_new_tokens, p=chances / chances.sum())
            drawn = np.full(max_new_tokens, chances.argmax()) if temperature == 0 else drawn
            ends = np.flatnonzero(drawn == END)
            responses.append(drawn[: ends[0] + 1] if len(ends) else drawn)
        response = Ragged.of(responses, np.int32)
        rows = prompts.take(np.repeat(np.arange(len(prompts)), n))
        return rows.plus(
            response=response, rollout_log_probs=self._log_probs(response, self.logits),
            finish_reason=np.array(["stop" if END in r else "length" for r in responses]),
            group=np.repeat(np.arange(len(prompts)), n),
        )  # fmt: skip

    def _log_probs(self, response, logits):
        return response.map(torch.log_softmax(logits.detach(), 0)[torch.tensor(response.flat.astype(np.int64))].numpy())

    def log_probs(self, kind):
        def run(batch):
            self.calls.append(f"{kind}_log_probs")
            logits = self.logits if kind == "old" else self.reference_logits
            return batch.plus(**{f"{kind}_log_probs": self._log_probs(batch.rows["response"], logits)})

        return run

    def scores(self, batch):
        self.calls.append("scores")
        response = batch.rows["response"]
        scored = batch.plus(scores=np.array([self.score(tokens) for tokens in response], np.float32))
        return scored.plus(token_scores=response.map((response.flat == GOOD).astype(np.float32))) if self.per_token else scored

    def update(self, batch, loss, *, epochs, mini_batches):
        self.calls.append("update")
        self.updates.append((batch, loss, epochs, mini_batches))
        rows = []
        for part in [p for _ in range(epochs) for p in np.array_split(self.rng.permutation(len(batch)), mini_batches)]:
            columns = {name: batch.take(part).rows[name] for name in ("response", *loss.reads)}
            b = TokenBatch(Table(columns), num_tokens=int(columns["response"].lengths.sum()), num_rows=len(part))
            every = torch.log_softmax(self.logits, 0)
            entropy = -(every.exp() * every).sum()
            out = ModelOutput(log_probs=every[b["response"]], entropy=entropy.expand(len(b["response"])))
            tally = Tally()
            self.optimizer.zero_grad()
            evaluate(loss, out, b, tally).backward()
            self.optimizer.step()
            rows.append({"loss": tally.loss, **tally.metrics()})
        return SimpleNamespace(rows=rows)


def prompts(num=16):
    return ToyBatch(Table({"prompt": Ragged.of([[1]] * num)}))
