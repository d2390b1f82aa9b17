"""The engines over a batch's tokens once more, with one thing changed: what the experiments of ``actor.explain_gap`` call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hfsdk.core.arguments import OWN, Generation, LogProbs, OneSequence, Rescoring
from hfsdk.core.batch import Batch, refs_of, with_written
from hfsdk.core.gap import Inside, Scored
from hfsdk.core.methods import COMPUTE_LOG_PROBS, GENERATE, LAYERS, RESCORE, RESCORE_AS_IS
from hfsdk.core.roles import Sampling
from hfsdk.core.table import Array, Ragged
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.host_memory import too_large
from hfsdk.models.handle import TrainedHandle

LOG_PROBS = "gap_log_probs"
"""The column that the experiments write; it is in no batch of the user's."""


@dataclass(frozen=True, eq=False)
class Setting:
    """What a pass of the trainer is given in place of what the batch has."""

    temperature: float | None = None
    """``None``: the batch's column."""
    top_k: int = 0
    top_p: float = 1.0
    min_new_tokens: int = 0
    prompts: Ragged | None = None
    """``None``: the batch's column."""
    weights: int = OWN
    """Number of the kept state that has them."""


@dataclass(frozen=True, eq=False)
class Origin:
    """How the batch's log-probabilities were made, as the controller remembers it."""

    role: str
    """Who generated them."""
    dtype: str
    sampling: Sampling
    prompts: Ragged | None
    """The prompts that were given to the engine; ``None`` where they are gone."""
    replaced: bool
    """Whether the batch's prompts are another column than the one that was given."""


class GapPasses:
    """See the module's text.

    Args:
        actor: whose engines.
        batch: has prompt, response, rollout_log_probs.

    Attributes:
        prompts, responses: token ids.
        recorded: flat over response tokens.
        temperatures, versions: of each row.
        vocab_size: of the actor.
    """

    def __init__(self, actor: TrainedHandle, batch: Batch) -> None:
        self._actor, self._batch = actor, batch
        spec = actor.spec
        assert spec is not None
        self.vocab_size = spec.vocab_size
        names = [name for name in ("prompt", "response", "rollout_log_probs", "temperature", "policy_version") if name in batch]
        table = batch.table(*names)
        self.prompts, self.responses = table.ragged("prompt"), table.ragged("response")
        self.recorded = np.asarray(table.ragged("rollout_log_probs").flat, dtype=np.float64)
        count = len(batch)
        self.temperatures = np.asarray(table["temperature"]) if "temperature" in table else np.ones(count, np.float32)
        self.versions = np.asarray(table["policy_version"]) if "policy_version" in table else None

    def origin(self) -> Origin | None:
        """Return how the log-probabilities were made; ``None`` where they are the user's own, or nobody remembers."""
        ref, client = refs_of(self._batch)["rollout_log_probs"], self._actor._client
        found = [rerun for rerun in client.send(q.RerunsOf(None)) if rerun.call.id == ref.call_id]
        if not found or found[0].request.method != GENERATE.name or ref.name != "rollout_log_probs":
            return None
        request = found[0].request
        assert isinstance(request.arguments, Generation)
        prompt = request.inputs["prompt"]
        now, given = refs_of(self._batch)["prompt"], None
        if client.send(q.StoredOf(prompt.call_id)) is not None:  # nothing but the record may refer to it by now
            given = client.fetch({"prompt": prompt if ref.rows is None else prompt.take(ref.rows)}).ragged("prompt")
        spec, replaced = client.send(q.Roles()).get(request.role), (now.call_id, now.name) != (prompt.call_id, prompt.name)
        return Origin(request.role, spec.spec.dtype if spec is not None else "", request.arguments.sampling, given, replaced)

    # -- the trainer

    def trainer(self, setting: Setting = Setting(), rows: Array | None = None) -> Array:
        """Return the trainer's log-probabilities, flat over the response tokens of these rows, by default all."""
        rows = np.arange(len(self._batch)) if rows is None else rows
        temperatures = self.temperatures[rows] if setting.temperature is None else np.full(len(rows), setting.temperature)
        found = self._pass(rows, temperatures, setting)
        if setting.min_new_tokens:
            places = np.concatenate([np.arange(n) for n in self.responses.lengths[rows]])
            ended = self._pass(rows, temperatures, setting, without_ends=True)
            found = np.where(places < setting.min_new_tokens, ended, found)
        return found

    def at_temperatures(self, setting: Setting, rows: Array, temperatures: Sequence[float]) -> Array:
        """Return the trainer's log-probabilities of these rows at several temperatures; shape [temperatures, tokens]."""
        each = np.repeat(np.asarray(temperatures), len(rows))
        return self._pass(np.tile(rows, len(temperatures)), each, setting).reshape(len(temperatures), -1)

    def _pass(self, rows: Array, temperatures: Array, setting: Setting, *, without_ends: bool = False) -> Array:
        columns: dict[str, Any] = {"temperature": temperatures.astype(np.float32)}
        batch = self._batch.take(rows)
        if setting.prompts is not None:
            columns["prompt"] = setting.prompts.take(rows)
        batch = Batch(batch._client, {n: refs_of(batch)[n] for n in ("prompt", "response")}, len(batch)).with_columns(**columns)
        asked = LogProbs(
            column=LOG_PROBS, top_k=setting.top_k, top_p=setting.top_p, without_ends=without_ends, weights=setting.weights
        )  # fmt: skip
        found = self._actor._forward(batch, replace(COMPUTE_LOG_PROBS, phase="inspection"), asked, [LOG_PROBS])
        return np.asarray(found.table(LOG_PROBS).ragged(LOG_PROBS).flat, dtype=np.float64)

    def of_version(self, num_updates: int, setting: Setting) -> Array | None:
        """Return what :meth:`trainer` does with the weights after so many updates; ``None`` where no snapshot has them.

        The ranks hold those weights within each pass alone: whatever ends it, the role's state is at every other moment its own.
        Nothing is done where the hosts have no room for a copy of the weights of now.
        """
        client, name = self._actor._client, self._actor.name
        kept = client.send(q.KeptOf(name, num_updates))
        if kept is None or too_large(client.send(m.AskHostRoom((name,), unless_kept=False)), 1.0):
            return None
        return self.trainer(replace(setting, weights=kept.number))

    # -- the generating engine

    def rollout(
        self,
        *,
        fresh: bool,
        rows: Array | None = None,
        inside: tuple[int, int] | None = None,
        through_cache: Sequence[tuple[int, int]] = (),
    ) -> tuple[Scored, Array]:
        """Return what the generating engine says of these rows, and its log-probabilities, flat.

        Args:
            fresh: whether it takes the trainer's weights first, or has those that it has.
            rows: of the batch; by default all.
            inside: the (row of the batch, response token) before which it keeps hidden states.
            through_cache: (row of the batch, response token)s that are scored behind the prefix cache, too.
        """
        rows = np.arange(len(self._batch)) if rows is None else rows
        batch, here = self._batch.take(rows), {int(row): place for place, row in enumerate(rows)}
        method = replace(RESCORE if fresh else RESCORE_AS_IS, writes=(LOG_PROBS,))
        inputs = {name: refs_of(batch)[name] for name in (*method.reads, *method.reads_if_there) if name in batch}
        asked = Rescoring(
            column=LOG_PROBS, inside=None if inside is None else (here[inside[0]], inside[1]),
            through_cache=tuple((here[row], token) for row, token in through_cache),
        )  # fmt: skip
        lease = self._actor._submit(method, asked, inputs, len(batch))
        found = with_written(batch, lease, method.writes).table(LOG_PROBS).ragged(LOG_PROBS).flat
        return self._merged(self._actor._result(lease), rows), np.asarray(found, dtype=np.float64)

    def _merged(self, ranks: Sequence[Scored], rows: Array) -> Scored:
        """Return what all ranks say together; rows are those of the batch."""
        cached = {(int(rows[row]), token): value for rank in ranks for (row, token), value in rank.cached.items()}
        return Scored(
            all(rank.there for rank in ranks), min(rank.num_updates for rank in ranks),
            tuple(dict.fromkeys(name for rank in ranks for name in rank.wrong)), sum(rank.proven for rank in ranks),
            sum(rank.unproven for rank in ranks), next((rank.inside for rank in ranks if rank.inside is not None), None), cached,
        )  # fmt: skip

    # -- inside

    def layers(self, row: int, token: int) -> list[Inside]:
        """Return hidden states of the trainer, by what each rank sees, and of transformers."""
        asked = OneSequence(
            prompt=self.prompts[row], response=self.responses[row], token=token, temperature=float(self.temperatures[row])
        )
        ranks = self._actor._result(self._actor._submit(LAYERS, asked, waits=True))
        return [inside for rank in ranks for inside in rank]

    def of_row(self, flat: Array, row: int) -> Array:
        """Return a row's part of something flat over response tokens."""
        first = int(self.responses.lengths[:row].sum())
        return flat[first : first + int(self.responses.lengths[row])]

    def of_rows(self, flat: Array, rows: Array) -> Array:
        """Return the part of some rows."""
        return np.concatenate([self.of_row(flat, int(row)) for row in rows])

    def worst(self, flat: Array) -> tuple[int, int]:
        """Return (row, response token) of the largest absolute value."""
        at = int(np.nanargmax(np.abs(flat)))
        ends = np.cumsum(self.responses.lengths)
        row = int(np.searchsorted(ends, at, side="right"))
        return row, at - int(ends[row] - self.responses.lengths[row])
