"""``FirstBadSearch``: finds where a run's first bad number comes from, by doing its last steps again from a snapshot.

::

    row of metrics      which step          the first that failed, or whose loss, gradient, KL, ratio or score is bad
    the step again      which call          the first whose column is not finite, or far above what it was in the step before
                        which weight        before every call each rank looks at its weights
    its update          which mini-batch    the optimizer step that was refused, or whose numbers jump
                        which sample, token what the loss gives each token, and its gradient
    the sample alone    which layer         hooks on every module: the first output that is not finite or leaves its range

A replay is bit-equal: weights, optimizer state, counters of seeds and prompts are the snapshot's. What the user's functions keep
between calls is not part of it. Bad is what is not finite, or jumps (:mod:`hfsdk.session.jumps`).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from hfsdk.core.batch import Batch
from hfsdk.core.column_spread import LEAST, TIMES, Spread, odd, spreads
from hfsdk.core.errors import CheckpointError, DependencyError, HfsdkError, NonFiniteLossError, OptionError
from hfsdk.core.first_bad import FirstBad
from hfsdk.core.functions import Shipped
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.text import listed
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls import rank_questions
from hfsdk.engine.calls.host_memory import check_room
from hfsdk.models import ModelHandle
from hfsdk.session.algorithm import Algorithm
from hfsdk.session.bad_layer import first_bad_layer
from hfsdk.session.bad_update import Place, TapedUpdate, bisected
from hfsdk.session.client import uninterrupted
from hfsdk.session.context import STEPS
from hfsdk.session.jumps import BadNumber, first_bad
from hfsdk.session.look_back import LookBack
from hfsdk.session.marked_sample import code_of, marked_text, tokens_around, verdict_of, weight_code
from hfsdk.session.on_death import is_death
from hfsdk.session.run_control import RunControl
from hfsdk.session.session_parts import Parts
from hfsdk.session.streams import RowStream
from hfsdk.session.tape import StepTape, StoppedHere, TapedCall

KIND_OF = {
    "compute_scores": "reward", "compute_costs": "reward", "generate": "generation", "compute_log_probs": "log_probs",
    "compute_values": "values",
}  # fmt: skip
"""A call's method -> what its bad number is, where the model's weights are finite."""
ADVANTAGES = frozenset({"rewards", "advantages", "returns"})
LOOKED_AT = ("loss", "grad_norm")
"""Of a mini-batch's numbers."""


@dataclass(eq=False)
class FirstBadSearch:
    """See the module's text."""

    parts: Parts
    algorithm: Algorithm
    prompts: RowStream
    control: RunControl
    look_back: LookBack

    def symptom(self) -> BadNumber | None:
        """Return the run's first bad number; ``None`` where there is none."""
        record = self.control.record
        found = first_bad(record.rows)
        failed = record.failed_step
        return BadNumber(failed, "", math.nan, None) if found is None and failed is not None else found

    def last_good(self) -> Snapshot | None:
        """Return the snapshot that a search goes back to."""
        symptom = self.symptom()
        return self.look_back.before(self.parts.context.next_step() if symptom is None else symptom.step)

    def find(self, step: int | None, *, stay: bool) -> FirstBad | None:
        """See :meth:`hfsdk.session.running.Run.first_bad`."""
        begun = time.perf_counter()
        self.parts.client.check_open()
        self.parts.runs.check_between_steps("first_bad")
        symptom = self.symptom() if step is None else self._asked(step)
        if symptom is None:
            return None
        snapshot = self.look_back.before(symptom.step)
        if snapshot is None:
            raise OptionError(self._no_snapshot(symptom.step))
        self.parts.client.drain()
        self.parts.client.send(m.Overlook())
        held = self._held_now()
        with self._coming_back(snapshot, stay) as left:
            found = self._search(symptom, snapshot, held)
        if found is None:
            return None
        but = f", but for {found.parameter}, of which ranks that differ in dp alone keep one copy together" if held else ""
        return replace(found, left=left[0] + but, seconds=time.perf_counter() - begun)

    def _asked(self, step: int) -> BadNumber:
        rows, failed = self.control.record.rows, self.control.record.failed_step
        known = [row["step"] for row in rows] + ([] if failed is None else [failed])
        if step not in known:
            there = f"steps {min(known)} to {max(known)}" if known else "no steps yet"
            raise OptionError(f"the run has no step {step}; it has {there}")
        found = self.symptom()
        if found is not None and found.step == step:
            return found
        return BadNumber(step, "", math.nan, None, asked=step != failed)

    def _no_snapshot(self, step: int) -> str:
        have = listed([snapshot.name for snapshot in self.look_back.snapshots])
        why = self.look_back.refused and f"none was taken: one would take {self.look_back.refused}"
        if not self.look_back.most:
            why = "it was told to take none (look_back=0)"
        why = why or (f"it has those {have}; more are kept with session.train(..., look_back=4)" if have else "")
        why = why or "they were let go when the session's next run began, or with a worker that died"
        return f"the run has no snapshot of itself from before step {step}: {why}"

    @contextmanager
    def _coming_back(self, snapshot: Snapshot, stay: bool) -> Iterator[list[str]]:
        """Go back to where the session was when all is done; yields the words for where that is."""
        parts, left = self.parts, [""]
        here: Snapshot | None = None
        if not stay:
            try:
                check_room(parts.snapshots.room(), "a copy of where the session is", "first_bad(stay=True) needs none.")
                here = parts.snapshots.keep("here")
            except CheckpointError as error:
                parts.context.notice(f"first_bad leaves the session at {snapshot.name!r}: {error}")
        left[0] = (
            "the session is where it was" if here is not None
            else f"the session is at the run's snapshot {snapshot.name!r}, on a new branch"
        )  # fmt: skip
        counters, last = parts.context.counters.all(), parts.client.last_call
        try:
            yield left
        finally:
            if not parts.client.closed:
                with uninterrupted():  # what was done again stays nowhere
                    parts.client.drain()
                    parts.client.send(m.Overlook())
                    steps = tuple(change.call_id for change in parts.client.send(q.Changes()) if change.call_id > last)
                    parts.client.send(m.InRow(steps))  # what was done again is no update by hand in the history
                    notices = parts.snapshots.come_home(snapshot if here is None else here, anew=here is None)
                    if here is not None:
                        parts.context.counters.replace(counters)
                    for notice in notices:
                        parts.context.notice(notice)

    # -- doing steps again

    def _again(self, snapshot: Snapshot, step: int, *, stop_before: int = -1) -> tuple[StepTape | None, StepTape]:
        """Do the steps from a snapshot again; return the calls of the one before ``step``, where there is one, and its own."""
        self.parts.client.drain()
        self.parts.client.send(m.Overlook())
        self.parts.snapshots.resume(snapshot)
        before = None
        while (number := self.parts.context.next_step()) < step:
            before = self._one(number, StepTape(self.parts.client))
            if before.error is not None:
                raise before.error
        own = self._one(step, StepTape(self.parts.client, self._weights, stop_before))
        if own.error is not None and is_death(own.error):
            raise own.error
        return before, own

    def _one(self, number: int, tape: StepTape) -> StepTape:
        """Do a step again."""
        parts = self.parts
        parts.context.counters.set(STEPS, number - 1)
        parts.client.send(m.NextStep(number))
        with tape.running(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it was said when the step was taken
            try:
                step = self.algorithm.step(parts.deployment.models, next(self.prompts))
                self.algorithm.metrics(step)
            except StoppedHere:
                pass
            except HfsdkError as error:
                tape.error = _first(error)
        calls = [call.call_id for call in tape.calls]
        parts.client.settle(calls)
        parts.client.send(m.Overlook())
        parts.context.counters.next(STEPS)
        return tape

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

    def _held_now(self) -> tuple[str, Mapping[int, Mapping[str, float]]] | None:
        """Return a role that holds weights now which are not finite on some of its data-parallel ranks, and these by rank.

        A snapshot has one copy of what these ranks share, and a replay need not come to the same.
        """
        for name, handle in self._handles().items():
            if handle.role.trainable and handle.role.train is not None and handle.role.train.num_replicas > 1:
                held = {rank: bad for rank, (_, bad) in enumerate(handle.run(rank_questions.bad_weights)) if bad}
                if held and len(held) < handle.role.train.size:
                    return name, held
        return None

    def _search(
        self, symptom: BadNumber, snapshot: Snapshot, held: tuple[str, Mapping[int, Mapping[str, float]]] | None
    ) -> FirstBad | None:
        before, tape = self._again(snapshot, symptom.step)
        place = self._bad_column(tape, before)
        weight = self._bad_weight(tape, place)
        place = weight or place or self._bad_scoring(tape) or self._refused(tape)
        if place is None:
            place, tape = self._jump(snapshot, symptom, tape)
        if place is None and held is not None:
            return _of_itself(symptom, snapshot, *held)
        if place is None:
            if tape.error is not None:
                raise OptionError(f"step {symptom.step} did not end by a number that is not finite: {tape.error}") from tape.error
            return None
        batch = tape.batch(place.call.index)
        layer = "" if place.kind in ("reward", "advantage", "column", "loss") else self._layer(place, batch, snapshot)
        return self._told(symptom, snapshot, place, batch, layer)

    def _bad_column(self, tape: StepTape, before: StepTape | None) -> Place | None:
        """Return the first column that is not finite or far from what it was."""
        for call in tape.calls:
            now = self._spreads(call)
            then = {} if before is None else self._spreads(_like(call, before))
            found = {name: usual for name, s in now.items() if (usual := odd(s, then.get(name))) is not None}
            if not found:
                continue
            name = max(found, key=lambda n: math.inf if found[n] == math.inf else now[n].largest / found[n])
            spread, finite = now[name], found[name] < math.inf
            sample, token = spread.at if finite else spread.bad_at
            kind = KIND_OF.get(call.message.method, "advantage" if ADVANTAGES & set(now) else "column")
            value = spread.value if finite else spread.bad
            return Place(kind, call, name, value, found[name] if finite else None, sample, token)
        return None

    def _spreads(self, call: TapedCall | None) -> dict[str, Spread]:
        client = self.parts.client
        if call is None or not call.message.writes or client.state(call.call_id) != "done":
            return {}
        lease = client.task("reduce", Shipped.of(spreads), call.written, (), call.message.num_rows)
        client.wait([lease.call_id], None)
        found: dict[str, Spread] = client.result(lease.call_id)
        return {name: found[name] for name in call.message.writes if name in found}

    def _bad_weight(self, tape: StepTape, place: Place | None) -> Place | None:
        """Return the first weight that is not finite, where it was so before the first bad column was written."""
        for call in tape.calls if place is None else tape.calls[: place.call.index + 1]:
            held = {rank: bad for rank, (_, bad) in call.weights.items() if bad}
            if not held:
                continue
            names = {name for bad in held.values() for name in bad}
            rank, name = next((rank, name) for rank, bad in held.items() for name in bad)
            earlier = [c for c in tape.calls[: call.index] if c.message.role == call.message.role and c.weights]
            since = f"it was finite before {earlier[-1].name} of that step" if earlier else "it was so before the step's first call"
            more = f", with {len(names) - 1} other parameters" if len(names) > 1 else ""
            ranks = tuple(rank for rank, bad in held.items() if name in bad)
            own = place if place is not None and place.call.message.role == call.message.role else None
            return Place(
                "weight", call if own is None else own.call, "" if own is None else own.column, held[rank][name],
                sample=None if own is None else own.sample, token=None if own is None else own.token,
                parameter=name, ranks=ranks, said=since + more,
            )  # fmt: skip
        return None

    def _bad_scoring(self, tape: StepTape) -> Place | None:
        """Return the sample that a reward or cost function fails on, where a call of one was refused."""
        client = self.parts.client
        call = next((c for c in tape.calls if c.message.method in ("compute_scores", "compute_costs")
                     and client.state(c.call_id) == "failed"), None)  # fmt: skip
        if call is None or tape.error is None or isinstance(tape.error, NonFiniteLossError):
            return None
        scores = getattr(self._handles()[call.message.role], call.message.method)
        batch = Batch(client, dict(call.message.inputs), call.message.num_rows)

        def fails(rows: Sequence[int]) -> bool:
            client.send(m.Overlook())
            try:
                scores(batch.take(rows)).wait()
            except HfsdkError as error:
                if is_death(error):
                    raise
                return True
            return False

        rows = bisected([(row,) for row in range(len(batch))], fails)
        said = getattr(tape.error, "message", str(tape.error)).splitlines()[0]
        return Place("reward", call, call.message.writes[0], sample=rows[0] if rows else None, said=said)

    # -- in an update

    def _refused(self, tape: StepTape) -> Place | None:
        """Return what an update was refused for; the weights are those before its optimizer step."""
        client = self.parts.client
        call = next((c for c in tape.calls if c.learning is not None and client.state(c.call_id) == "failed"), None)
        if call is None or not isinstance(tape.error, NonFiniteLossError):
            return None
        update = TapedUpdate(client, call, self._handles())
        done = update.handle.run(rank_questions.bad_weights)[0][0] - next(iter(call.weights.values()))[0]
        return update.place(update.plan[done], None)

    def _jump(self, snapshot: Snapshot, symptom: BadNumber, tape: StepTape) -> tuple[Place | None, StepTape]:
        """Return the mini-batch whose loss or gradient jumps, looked at with the weights before it, and the tape up to there."""
        client = self.parts.client
        for call in [c for c in tape.calls if c.learning is not None and client.state(c.call_id) == "done"]:
            usual = self._usual(call.message.role, symptom.step)
            for number, row in enumerate(client.result(call.call_id)):
                name = next((n for n in LOOKED_AT if not abs(row[n]) <= TIMES * max(LEAST, usual.get(n, math.inf))), None)
                if name is None:
                    continue
                _, again = self._again(snapshot, symptom.step, stop_before=call.index)
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
        found = {n: [abs(row[key]) for row in rows for key in (f"{role}_{n}", n) if key in row] for n in LOOKED_AT}
        return {name: max(values) for name, values in found.items() if values}

    # -- of the sample

    def _layer(self, place: Place, batch: Batch, snapshot: Snapshot) -> str:
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
            self.parts.snapshots.resume(snapshot)
            return first_bad_layer(now, handle.run(rank_questions.layer_outputs, table))
        return ""

    def _told(self, symptom: BadNumber, snapshot: Snapshot, place: Place, batch: Batch, layer: str) -> FirstBad:
        """Put together what was found."""
        found = FirstBad(
            kind=place.kind, symptom=str(symptom), step=symptom.step, call=place.call.name, role=place.call.message.role,
            column=place.column, value=place.value, usual=place.usual, epoch=None if place.mini is None else place.mini.epoch,
            mini_batch=None if place.mini is None else place.mini.index, sample=place.sample, token=place.token,
            parameter=place.parameter, ranks=place.ranks, layer=layer, snapshot=snapshot.name,
        )  # fmt: skip
        if place.sample is not None and "response" in batch.columns:
            one = batch.take([place.sample]) if place.looked is None else place.looked
            found = replace(found, text=marked_text(one, place.token), rows=tokens_around(one, place.token))
        return replace(found, verdict=verdict_of(found, place.said), code=code_of(found, symptom.step - snapshot.steps))


def _of_itself(symptom: BadNumber, snapshot: Snapshot, role: str, held: Mapping[int, Mapping[str, float]]) -> FirstBad:
    """Return a weight that is not finite on some rank though the steps done again leave it finite."""
    name = next(iter(next(iter(held.values()))))
    ranks = tuple(rank for rank, bad in held.items() if name in bad)
    found = FirstBad(
        kind="weight", symptom=str(symptom), step=symptom.step, call="", role=role, parameter=name, ranks=ranks,
        value=held[ranks[0]][name], snapshot=snapshot.name,
    )  # fmt: skip
    return replace(found, verdict=verdict_of(found, ""), code=weight_code(found))


def _first(error: HfsdkError) -> HfsdkError:
    """Return what failed first, and not what waited for it."""
    while isinstance(error, DependencyError) and isinstance(error.__cause__, HfsdkError):
        error = error.__cause__
    return error


def _like(call: TapedCall, before: StepTape) -> TapedCall | None:
    """Return the same call of the step before."""
    found = before.calls[call.index] if call.index < len(before.calls) else None
    return found if found is not None and found.name == call.name else None
