"""``FirstBadSearch``: finds where a run's first bad number comes from, by doing its last steps again from a snapshot.

::

    row of metrics      which step          the first that failed, or whose loss, gradient, KL, ratio or score is bad
    the step again      which call          the first whose column is not finite, or far above what it was in the step before
                        which weight        before every call each rank looks at its weights
    its update          which mini-batch    the optimizer step that was refused, or whose numbers jump
                        which sample, token what the loss gives each token, and its gradient
    the sample alone    which layer         hooks on every module: the first output that is not finite or leaves its range

A replay is bit-equal: weights, optimizer state, counters of seeds and prompts are the snapshot's. What the user's functions keep
between calls is not part of it. Bad is what is not finite, or jumps (:mod:`hfsdk.run.metric_outliers`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hfsdk.core.arguments import Learning
from hfsdk.core.batch import Batch, refs_of
from hfsdk.core.column_spread import LEAST, TIMES, Spread, odd, spreads
from hfsdk.core.errors import HfsdkError, NonFiniteLossError, OptionError
from hfsdk.core.first_bad import FirstBad
from hfsdk.core.functions import Shipped
from hfsdk.core.microbatch import MiniBatchPlan, plan_update
from hfsdk.core.pending import scored_rows_of
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.table import Ragged
from hfsdk.diagnose.step_recorder import StepHost, StepRecorder, StepsAgain, SubmittedCall
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import rank_questions
from hfsdk.models import ModelHandle
from hfsdk.models.handle import TrainedHandle, primitive
from hfsdk.run.metric_outliers import BadNumber, first_bad
from hfsdk.run.recovery import is_death
from hfsdk.run.run import RunControl
from hfsdk.session.algorithm import Algorithm
from hfsdk.session.client import ControllerClient
from hfsdk.session.streams import RowStream

KIND_OF = {
    "compute_scores": "reward", "compute_costs": "reward", "generate": "generation", "compute_log_probs": "log_probs",
    "compute_values": "values",
}  # fmt: skip
"""A call's method -> what its bad number is, where the model's weights are finite."""
ADVANTAGES = frozenset({"rewards", "advantages", "returns"})
LOOKED_AT = ("loss", "grad_norm")
"""The numbers of a mini-batch that are looked at."""


@dataclass(eq=False)
class FirstBadSearch:
    """Finds where a run's first bad number comes from."""

    again: StepsAgain
    control: RunControl

    @property
    def parts(self) -> StepHost:
        """The session."""
        return self.again.host

    @property
    def algorithm(self) -> Algorithm:
        """The run's."""
        return self.again.algorithm

    @property
    def prompts(self) -> RowStream:
        """The run's."""
        return self.again.prompts

    def symptom(self) -> BadNumber | None:
        """Return the run's first bad number; ``None`` where there is none."""
        record = self.control.record
        bad = first_bad(record.rows)
        failed = record.failed_step
        return BadNumber(failed, "", math.nan, None) if bad is None and failed is not None else bad

    def last_good(self) -> Snapshot | None:
        """Return the snapshot that a search goes back to."""
        symptom = self.symptom()
        return self.again.look_back.before(self.parts.context.next_step() if symptom is None else symptom.step)

    def find(self, step: int | None, *, stay: bool) -> FirstBad | None:
        """See :meth:`hfsdk.run.run.Run.first_bad`."""
        begun = time.perf_counter()
        self.parts.client.check_open()
        self.parts.runs.check_between_steps("first_bad")
        symptom = self.symptom() if step is None else self._symptom_at(step)
        if symptom is None:
            return None
        snapshot = self.again.snapshot_before(symptom.step)
        self.parts.client.drain()
        self.parts.client.send(m.AcknowledgeFailures())
        bad_ranks = self._bad_now()
        with self.again.coming_back(snapshot, "first_bad", stay=stay) as left:
            finding = self._search(symptom, snapshot, bad_ranks)
        if finding is None:
            return None
        but = f", but for {finding.parameter}, of which ranks that differ in dp alone keep one copy together" if bad_ranks else ""
        return replace(finding, left=left[0] + but, seconds=time.perf_counter() - begun)

    def _symptom_at(self, step: int) -> BadNumber:
        rows, failed = self.control.record.rows, self.control.record.failed_step
        steps = [row["step"] for row in rows] + ([] if failed is None else [failed])
        if step not in steps:
            there = f"steps {min(steps)} to {max(steps)}" if steps else "no steps yet"
            raise OptionError(f"the run has no step {step}; it has {there}")
        bad = self.symptom()
        if bad is not None and bad.step == step:
            return bad
        return BadNumber(step, "", math.nan, None, asked=step != failed)

    # -- looking at weights

    def _weights(self, message: m.Submit) -> Mapping[int, Any]:
        """Look at the weights of a call's role, by rank; nothing where it has none, or has failed by now."""
        handle = self._handles().get(message.role)
        if handle is None or handle.spec is None:
            return {}
        try:
            return dict(enumerate(handle.run(rank_questions.bad_weights)))
        except HfsdkError as error:
            if is_death(error):  # what comes back is no state of this step
                raise
            return {}

    def _handles(self) -> dict[str, ModelHandle]:
        return {handle.name: handle for handle in self.parts.deployment.book}

    # -- looking

    def _bad_now(self) -> tuple[str, Mapping[int, Mapping[str, float]]] | None:
        """Return a role that holds weights now which are not finite on some of its data-parallel ranks, and these by rank.

        A snapshot has one copy of what these ranks share, and a replay need not come to the same.
        """
        for name, handle in self._handles().items():
            if handle.role.trainable and handle.role.train is not None and handle.role.train.num_replicas > 1:
                by_rank = {rank: bad for rank, (_, bad) in enumerate(handle.run(rank_questions.bad_weights)) if bad}
                if by_rank and len(by_rank) < handle.role.train.size:
                    return name, by_rank
        return None

    def _search(
        self, symptom: BadNumber, snapshot: Snapshot, bad_ranks: tuple[str, Mapping[int, Mapping[str, float]]] | None
    ) -> FirstBad | None:
        before, tape = self.again.step(snapshot, symptom.step, self._weights)
        place = self._bad_column(tape, before)
        weight = self._bad_weight(tape, place)
        # a bad weight comes before the column that it has made bad; the others count where no column is bad
        place = weight or place or self._bad_scoring(tape) or self._refused(tape)
        if place is None:
            place, tape = self._jump(snapshot, symptom, tape)
        if place is None and bad_ranks is not None:
            return _of_itself(symptom, snapshot, *bad_ranks)
        if place is None:
            if tape.error is not None:
                raise OptionError(f"step {symptom.step} did not end by a number that is not finite: {tape.error}") from tape.error
            return None
        batch = tape.batch(place.call.index)
        layer = "" if place.kind in ("reward", "advantage", "column", "loss") else self._layer(place, batch, snapshot)
        return self._finding(symptom, snapshot, place, batch, layer)

    def _bad_column(self, tape: StepRecorder, before: StepRecorder | None) -> BadPlace | None:
        """Return the first column that is not finite or far from what it was."""
        for call in tape.calls:
            now = self._spreads(call)
            then = {} if before is None else self._spreads(_like(call, before))
            usual_of = {name: usual for name, s in now.items() if (usual := odd(s, then.get(name))) is not None}
            if not usual_of:
                continue
            # of a call's columns the one that is not finite, or else the one farthest above its usual size
            name = max(usual_of, key=lambda n: math.inf if usual_of[n] == math.inf else now[n].largest / usual_of[n])
            spread, finite = now[name], usual_of[name] < math.inf
            sample, token = spread.at if finite else spread.bad_at
            kind = KIND_OF.get(call.message.method, "advantage" if ADVANTAGES & set(now) else "column")
            value = spread.value if finite else spread.bad
            return BadPlace(kind, call, name, value, usual_of[name] if finite else None, sample, token)
        return None

    def _spreads(self, call: SubmittedCall | None) -> dict[str, Spread]:
        client = self.parts.client
        if call is None or not call.message.writes or client.state(call.call_id) != "done":
            return {}
        lease = client.task("reduce", Shipped.of(spreads), call.written, (), call.message.num_rows)
        client.wait([lease.call_id], None)
        spread_of: dict[str, Spread] = client.result(lease.call_id)
        return {name: spread_of[name] for name in call.message.writes if name in spread_of}

    def _bad_weight(self, tape: StepRecorder, place: BadPlace | None) -> BadPlace | None:
        """Return the first weight that is not finite, where it was so before the first bad column was written."""
        for call in tape.calls if place is None else tape.calls[: place.call.index + 1]:
            bad_by_rank = {rank: bad for rank, (_, bad) in call.weights.items() if bad}
            if not bad_by_rank:
                continue
            names = {name for bad in bad_by_rank.values() for name in bad}
            rank, name = next((rank, name) for rank, bad in bad_by_rank.items() for name in bad)
            earlier = [c for c in tape.calls[: call.index] if c.message.role == call.message.role and c.weights]
            since = f"it was finite before {earlier[-1].name} of that step" if earlier else "it was so before the step's first call"
            more = f", with {len(names) - 1} other parameters" if len(names) > 1 else ""
            ranks = tuple(rank for rank, bad in bad_by_rank.items() if name in bad)
            # the bad column shows a sample and a token only where this role's weights wrote it
            own = place if place is not None and place.call.message.role == call.message.role else None
            return BadPlace(
                "weight", call if own is None else own.call, "" if own is None else own.column, bad_by_rank[rank][name],
                sample=None if own is None else own.sample, token=None if own is None else own.token,
                parameter=name, ranks=ranks, said=since + more,
            )  # fmt: skip
        return None

    def _bad_scoring(self, tape: StepRecorder) -> BadPlace | None:
        """Return the sample that a reward or cost function fails on, where a call of one was refused."""
        client = self.parts.client
        call = next((c for c in tape.calls if c.message.method in ("compute_scores", "compute_costs")
                     and client.state(c.call_id) == "failed"), None)  # fmt: skip
        if call is None or tape.error is None or isinstance(tape.error, NonFiniteLossError):
            return None
        scores = getattr(self._handles()[call.message.role], call.message.method)
        batch = Batch(client, dict(call.message.inputs), call.message.num_rows)

        def fails(rows: Sequence[int]) -> bool:
            client.send(m.AcknowledgeFailures())
            try:
                scores(batch.take(rows)).wait()
            except HfsdkError as error:
                if is_death(error):
                    raise
                return True
            return False

        rows = bisected([(row,) for row in range(len(batch))], fails)
        said = getattr(tape.error, "message", str(tape.error)).splitlines()[0]
        return BadPlace("reward", call, call.message.writes[0], sample=rows[0] if rows else None, said=said)

    # -- in an update

    def _refused(self, tape: StepRecorder) -> BadPlace | None:
        """Return the place of the number for which an update was refused; the weights are those before its optimizer step."""
        client = self.parts.client
        call = next((c for c in tape.calls if c.learning is not None and client.state(c.call_id) == "failed"), None)
        if call is None or not isinstance(tape.error, NonFiniteLossError):
            return None
        update = TapedUpdate(client, call, self._handles())
        done = update.handle.run(rank_questions.bad_weights)[0][0] - next(iter(call.weights.values()))[0]
        return update.place(update.plan[done], None)

    def _jump(self, snapshot: Snapshot, symptom: BadNumber, tape: StepRecorder) -> tuple[BadPlace | None, StepRecorder]:
        """Return the mini-batch whose loss or gradient jumps, looked at with the weights before it, and the tape up to there."""
        client = self.parts.client
        for call in [c for c in tape.calls if c.learning is not None and client.state(c.call_id) == "done"]:
            usual = self._usual(call.message.role, symptom.step)
            for number, row in enumerate(client.result(call.call_id)):
                name = next((n for n in LOOKED_AT if not abs(row[n]) <= TIMES * max(LEAST, usual.get(n, math.inf))), None)
                if name is None:
                    continue
                _, again = self.again.step(snapshot, symptom.step, self._weights, stop_before=call.index)
                assert again.next is not None
                again.calls.append(replace(call, message=again.next))
                update = TapedUpdate(client, again.calls[-1], self._handles())
                update.step_to(number)
                place = update.place(update.plan[number], max(LEAST, usual[name]))
                if place.sample is None:
                    lr = row.get("lr")
                    said = f"{name} is {row[name]:.3g}, {usual[name]:.3g} at most in the steps before" + (
                        f"; learning rate {lr:g}" if lr is not None else ""
                    )
                    place = replace(place, column=name, value=row[name], usual=usual[name], said=said)
                return place, again
        return None, tape

    def _usual(self, role: str, step: int) -> dict[str, float]:
        """Return the largest loss and gradient of a role's updates in the run's steps before one."""
        rows = [row for row in self.control.record.rows if row["step"] < step]
        sizes = {n: [abs(row[key]) for row in rows for key in (f"{role}_{n}", n) if key in row] for n in LOOKED_AT}
        return {name: max(values) for name, values in sizes.items() if values}

    # -- of the sample

    def _layer(self, place: BadPlace, batch: Batch, snapshot: Snapshot) -> str:
        """Return the layer whose output first leaves its range for the sample, or for any of the mini-batch's."""
        handle = self._handles().get(place.call.message.role)
        if handle is None or handle.spec is None:
            return ""
        sample = place.sample if place.sample is not None else (place.mini.rows[0] if place.mini is not None else 0)
        names = [n for n in ("prompt", "response", "temperature") if n in batch.columns]
        if "response" not in names:
            return ""
        table = batch.take([sample]).table(*names)
        with suppress(HfsdkError):
            now = handle.run(rank_questions.layer_outputs, table)
            if first := first_bad_layer(now):
                return first
            self.parts.client.drain()
            # every output is finite: the same sample with the snapshot's weights shows the usual sizes
            self.parts.snapshots.resume(snapshot)
            return first_bad_layer(now, handle.run(rank_questions.layer_outputs, table))
        return ""

    def _finding(self, symptom: BadNumber, snapshot: Snapshot, place: BadPlace, batch: Batch, layer: str) -> FirstBad:
        """Put the finding together."""
        finding = FirstBad(
            kind=place.kind, symptom=str(symptom), step=symptom.step, call=place.call.name, role=place.call.message.role,
            column=place.column, value=place.value, usual=place.usual, epoch=None if place.mini is None else place.mini.epoch,
            mini_batch=None if place.mini is None else place.mini.index, sample=place.sample, token=place.token,
            parameter=place.parameter, ranks=place.ranks, layer=layer, snapshot=snapshot.name,
        )  # fmt: skip
        if place.sample is not None and "response" in batch.columns:
            sample = batch.take([place.sample]) if place.looked is None else place.looked
            finding = replace(finding, text=marked_text(sample, place.token), rows=tokens_around(sample, place.token))
        return replace(finding, verdict=verdict_of(finding, place.said), code=code_of(finding, symptom.step - snapshot.steps))


def _of_itself(symptom: BadNumber, snapshot: Snapshot, role: str, by_rank: Mapping[int, Mapping[str, float]]) -> FirstBad:
    """Return a weight that is not finite on some rank though the steps done again leave it finite."""
    name = next(iter(next(iter(by_rank.values()))))
    ranks = tuple(rank for rank, bad in by_rank.items() if name in bad)
    finding = FirstBad(
        kind="weight", symptom=str(symptom), step=symptom.step, call="", role=role, parameter=name, ranks=ranks,
        value=by_rank[ranks[0]][name], snapshot=snapshot.name,
    )  # fmt: skip
    return replace(finding, verdict=verdict_of(finding, ""), code=weight_code(finding))


def _like(call: SubmittedCall, before: StepRecorder) -> SubmittedCall | None:
    """Return the same call of the step before."""
    same = before.calls[call.index] if call.index < len(before.calls) else None
    return same if same is not None and same.name == call.name else None


LOOK = ("token_loss", "token_loss_gradient")


@dataclass(frozen=True)
class BadPlace:
    """The facts about the first bad number, as they are found."""

    kind: str
    call: SubmittedCall
    column: str = ""
    value: float | None = None
    usual: float | None = None
    sample: int | None = None
    token: int | None = None
    mini: MiniBatchPlan | None = None
    parameter: str = ""
    ranks: tuple[int, ...] = ()
    said: str = ""
    """A further sentence about it."""
    looked: Batch | None = None
    """The sample with what its loss gives each token."""


class TapedUpdate:
    """A recorded update taken apart, to find the mini-batch, sample and token that its bad number is from.

    Only ``step_to`` learns: losses are looked at token by token, and gradients are dropped again.
    """

    def __init__(self, client: ControllerClient, call: SubmittedCall, handles: Mapping[str, ModelHandle]) -> None:
        handle, learning = handles[call.message.role], call.learning
        assert isinstance(handle, TrainedHandle)
        assert isinstance(learning, Learning)
        self._client, self._call, self._learning = client, call, learning
        self.handle = handle
        self._batch = Batch(client, dict(call.message.inputs), call.message.num_rows)

    @cached_property
    def plan(self) -> tuple[MiniBatchPlan, ...]:
        """The mini-batches of the update; which rows they have depends on no layout."""
        table, learning = self._batch.table("prompt", "response"), self._learning
        prompts, responses = table.ragged("prompt").lengths, table.ragged("response").lengths
        columns = ((ref, self._client.info(ref)) for ref in self._call.message.inputs.values())
        return plan_update(
            prompts + responses, responses, 1, learning.epochs, learning.mini_batches, 2**40, learning.seed,
            together=learning.together, rows=scored_rows_of(columns, self._call.message.num_rows),
        )  # fmt: skip

    def step_to(self, number: int) -> None:
        """Take the optimizer steps before the one of this number; they agree with the update's within rounding."""
        loss = self._learning.shipped.load()
        for mini in self.plan[:number]:
            self.handle.forward_backward(self._batch.take(mini.rows), loss).wait()
            self.handle.step().wait()

    def place(self, mini: MiniBatchPlan, usual: float | None) -> BadPlace:
        """Return the sample and token of a mini-batch whose loss is bad, or of losses over pairs the pair.

        Args:
            mini: the mini-batch; the weights are those before its step.
            usual: how large its number was at most in the step before, of one that jumps; ``None``: it is not finite.
        """
        place = BadPlace("update", self._call, mini=mini, usual=usual)
        # losses over pairs have no value of a single token
        if self._learning.together == 1:
            look = primitive(reads=list(self._batch.columns), writes=LOOK)(rank_questions.token_losses)
            losses = self.handle.call(
                look, self._batch.take(mini.rows), loss=self._learning.shipped, num_tokens=mini.num_tokens, num_rows=mini.num_rows
            )  # fmt: skip
            refs = {name: refs_of(losses)[name] for name in LOOK}
            lease = self._client.task("reduce", Shipped.of(spreads), refs, (), len(losses))
            self._client.wait([lease.call_id], None)
            for name, spread in self._client.result(lease.call_id).items():
                normal = odd(spread, None)
                if normal is None:
                    continue
                finite = spread.bad is None
                at, token = spread.at if finite else spread.bad_at
                return replace(
                    place, kind="loss", column=name, value=spread.value if finite else spread.bad,
                    usual=normal if finite else None, sample=mini.rows[at], token=token, looked=losses.take([at]),
                )  # fmt: skip
        return place if usual is not None else self._bad_gradient(place, mini)

    def _bad_gradient(self, place: BadPlace, mini: MiniBatchPlan) -> BadPlace:
        """Return the sample whose gradient is not finite though its loss is; of losses over pairs also one whose loss is not."""
        shipped, size = self._learning.shipped, self._learning.together
        units = [mini.rows[i : i + size] for i in range(0, len(mini.rows), size)]

        def by_rank(rows: Sequence[int]) -> list[tuple[int, dict[str, float]]]:
            return self.handle.run(rank_questions.gradients, self._batch.take(rows).table(), shipped)

        # each look is a pass over the model: log2 of the samples instead of one for each
        rows = bisected(units, lambda rows: any(by_place for _, by_place in by_rank(rows)))
        if not rows:
            return replace(place, kind="gradient", said="No sample's alone is bad: it is their sum")
        by_place = by_rank(rows)
        stage = max(stage for stage, bad in by_place if bad)  # gradients come from the end
        bad_of = {rank: bad for rank, (at, bad) in enumerate(by_place) if bad and at == stage}
        name = list(next(iter(bad_of.values())))[-1]
        ranks = tuple(rank for rank, bad in bad_of.items() if name in bad)
        return replace(place, kind="gradient", sample=rows[0], parameter=name, ranks=ranks, value=bad_of[ranks[0]][name])


def bisected(units: Sequence[Sequence[int]], bad: Callable[[Sequence[int]], bool]) -> list[int]:
    """Return the rows of one unit that is bad by itself, by halves; ``[]`` where the halves of what is bad are both fine."""
    if not units or not bad([row for unit in units for row in unit]):
        return []
    while len(units) > 1:
        half = len(units) // 2
        parts = units[:half], units[half:]
        units = next((part for part in parts if bad([row for unit in part for row in unit])), [])
        if not units:
            return []
    return list(units[0])


# -- the layer whose output first is not finite or leaves its range, of what the hooks on every rank saw

Outputs = Sequence[tuple[int, Sequence[tuple[str, float]]]]
"""Each rank's pipeline stage, and (module, largest absolute number of its output) in the order the modules ended."""

SMALL = 1e-3
"""An output's usual size is at least this."""


def first_bad_layer(now: Outputs, before: Outputs | None = None) -> str:
    """Return the first module, by pipeline stage, whose output is bad on some rank; ``""`` where none is.

    Args:
        now: outputs that the hooks saw.
        before: outputs for the same sample with the weights of before; with it an output is bad that is `TIMES` larger,
            without it one that is not finite.
    """
    bad_outputs: list[tuple[int, int, str]] = []
    for rank, (stage, outputs) in enumerate(now):
        for place, (name, size) in enumerate(outputs):
            usual = math.inf if before is None else TIMES * max(SMALL, before[rank][1][place][1])
            if not math.isfinite(size) or size > usual:
                bad_outputs.append((stage, place, name))
                break
    if not bad_outputs:
        return ""
    stage, _, name = min(bad_outputs)
    return f"{name} (pipeline stage {stage})" if max(at for at, _ in now) else name


# -- the words of a `FirstBad`: its sample as text, the tokens around, a verdict, and the cell that gets it again

AROUND = 5
"""Tokens shown before and after the token."""
MOST_CHARACTERS = 400
"""The number of a sample's characters on either side of the token."""


def marked_text(sample: Batch, token: int | None) -> str:
    """Return prompt and response of a batch's only row, with the token between ⟦ and ⟧."""
    prompt = sample.text("prompt")[0] if "prompt" in sample else ""
    tokens = sample["response"]
    assert isinstance(tokens, Ragged)
    response = tokens[0].tolist()
    if token is None or token >= len(response):
        return prompt[-MOST_CHARACTERS:] + sample.text()[0][:MOST_CHARACTERS]
    client = sample._client
    before, at, after = (client.texts([part])[0] for part in (response[:token], response[token : token + 1], response[token + 1 :]))
    if not at:  # a special token, which texts leave out
        at = client.token_texts(response[token : token + 1])[0]
    return f"{(prompt + before)[-MOST_CHARACTERS:]}⟦{at}⟧{after[:MOST_CHARACTERS]}"


def tokens_around(sample: Batch, token: int | None) -> tuple[Mapping[str, Any], ...]:
    """Return the response's tokens around one, or its first ones, with every column per token."""
    frame = sample.to_pandas("tokens").drop(columns="sample")
    first = max(0, (token or 0) - AROUND)
    few = frame.iloc[first : (token or 0) + AROUND + 1]
    return tuple({str(name): value for name, value in row.items()} for row in few.to_dict("records"))


def verdict_of(finding: FirstBad, said: str) -> str:
    """Return the finding in a sentence or two."""
    where = f" of sample {finding.sample}" if finding.sample is not None else ""
    where += f", token {finding.token}" if finding.token is not None else ""
    number = "" if finding.value is None else f" is {finding.value:.3g}"
    number += f", {finding.usual:.3g} at most otherwise" if finding.usual is not None and finding.value is not None else ""
    mini = f" in mini-batch {finding.mini_batch}" if finding.mini_batch is not None else ""
    mini += f" of epoch {finding.epoch}" if finding.epoch else ""
    layer = f" The output of {finding.layer} is the first to be bad." if finding.layer else ""
    ranks = f" on rank{'s' * (len(finding.ranks) > 1)} {', '.join(map(str, finding.ranks))}" if finding.ranks else ""
    head = f"Step {finding.step}, {finding.call}{mini}: "
    if finding.kind == "weight" and not finding.call:
        return (
            f"The weight {finding.parameter} of {finding.role}{ranks}{number}, and is finite on the ranks that hold the same. Done "
            f"again from {finding.snapshot!r} the steps leave it finite: nothing in them makes it. Look at what ran on the ranks "
            "between two steps, and at the memory of that device."
        )
    if finding.kind == "weight":
        met = f" {finding.call} meets it first: {finding.column}{where}." if finding.column else ""
        body = f"the weight {finding.parameter}{ranks}{number} ({said}).{met}"
    elif finding.kind == "loss":
        what = "the loss" if finding.column == "token_loss" else "the loss's gradient by the model's output"
        body = f"{what}{where}{number}; every column that it reads, and what the model says, is finite."
    elif finding.kind == "gradient":
        body = f"the gradient of {finding.parameter or 'the weights'}{where}{ranks}{number}, and the loss is finite."
    elif finding.kind == "update":
        body = f"no sample stands out. {said[:1].upper()}{said[1:]}."
    elif finding.value is None:
        body = f"the function raises{where.replace(' of ', ' for ', 1)}: {said}"
    else:
        first = " It is the first bad number: all that was written before it is finite and of its usual size."
        body = f"{finding.column}{where}{number}.{first}"
    more = f" {said}." if said and finding.kind == "gradient" else ""
    return head + body + layer + more


def weight_code(finding: FirstBad) -> str:
    """Return the lines that show a weight's largest number on every rank."""
    look = "lambda rank: float(dict(rank.module.named_parameters())[name].abs().max())"
    return f"name = {finding.parameter!r}\nsession.models.{finding.role}.run({look})"


def code_of(finding: FirstBad, num_good: int) -> str:
    """Return the cell that gets the number again.

    Args:
        finding: the number, and where it was met.
        num_good: steps from the snapshot to the bad one.
    """
    lines = [
        "run = session.run",
        f"session.rewind(run.last_good)  # {finding.snapshot}: weights, optimizers, prompts and seeds as they were",
        "algorithm, prompts = run.algorithm, run.prompts",
    ]
    step = "algorithm.step(session.models, next(prompts))"
    if num_good == 1:
        lines.append(f"algorithm.metrics({step})  # step {finding.step - 1}, bit for bit")
    elif num_good > 1:
        lines += [
            f"for _ in range({num_good}):  # steps {finding.step - num_good} to {finding.step - 1}, bit for bit",
            f"    {step}",
        ]
    if finding.kind != "weight":
        lines.append(f"step = {step}  # step {finding.step}")
    number = "?" if finding.value is None else f"{finding.value:.6g}"
    if finding.kind == "weight":
        lines += [
            "with contextlib.suppress(hf.HfsdkError):  # what the weight makes fail",
            f"    algorithm.metrics({step})  # step {finding.step}",
            weight_code(finding),
        ]
        lines[0:0] = ["import contextlib", ""]
    elif finding.value is None and finding.column:
        lines.append(f"step.batch[{finding.column!r}]  # it raises")
    elif finding.kind not in ("loss", "gradient", "update"):
        at = f"step.batch.take([{finding.sample}])[{finding.column!r}]"
        lines.append(f"{at}{'[0]' if finding.token is None else f'[0][{finding.token}]'}  # {number}")
    else:
        lines.append(f"algorithm.metrics(step)  # {'it raises' if finding.symptom.endswith('failed') else finding.symptom}")
    return "\n".join(lines)
