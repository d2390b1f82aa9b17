"""``TapedUpdate``: an update that a tape has, taken apart: which mini-batch, sample and token its bad number is from.

Nothing is learned meanwhile but by ``step_to``: losses are looked at token by token, gradients are dropped again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hfsdk.core.arguments import Learning
from hfsdk.core.batch import Batch, refs_of
from hfsdk.core.column_spread import odd, spreads
from hfsdk.core.functions import Shipped
from hfsdk.core.microbatch import MiniBatchPlan, plan_update
from hfsdk.core.pending import scored_rows_of
from hfsdk.engine.calls import rank_questions
from hfsdk.models import ModelHandle
from hfsdk.models.handle import TrainedHandle
from hfsdk.models.primitive import primitive
from hfsdk.session.client import ControllerClient
from hfsdk.session.tape import TapedCall

LOOK = ("token_loss", "token_loss_gradient")


@dataclass(frozen=True)
class Place:
    """What is known of the first bad number."""

    kind: str
    call: TapedCall
    column: str = ""
    value: float | None = None
    usual: float | None = None
    sample: int | None = None
    token: int | None = None
    mini: MiniBatchPlan | None = None
    parameter: str = ""
    ranks: tuple[int, ...] = ()
    said: str = ""
    """What else is to be said."""
    looked: Batch | None = None
    """The sample with what its loss gives each token."""


class TapedUpdate:
    """See the module's text."""

    def __init__(self, client: ControllerClient, call: TapedCall, handles: Mapping[str, ModelHandle]) -> None:
        handle, given = handles[call.message.role], call.learning
        assert isinstance(handle, TrainedHandle)
        assert isinstance(given, Learning)
        self._client, self._call, self._given = client, call, given
        self.handle = handle
        self._batch = Batch(client, dict(call.message.inputs), call.message.num_rows)

    @cached_property
    def plan(self) -> tuple[MiniBatchPlan, ...]:
        """Its mini-batches; which rows they have depends on no layout."""
        table, given = self._batch.table("prompt", "response"), self._given
        prompts, responses = table.ragged("prompt").lengths, table.ragged("response").lengths
        columns = ((ref, self._client.info(ref)) for ref in self._call.message.inputs.values())
        return plan_update(
            prompts + responses, responses, 1, given.epochs, given.mini_batches, 2**40, given.seed, together=given.together,
            rows=scored_rows_of(columns, self._call.message.num_rows),
        )  # fmt: skip

    def step_to(self, number: int) -> None:
        """Take the optimizer steps before the one of this number; they agree with the update's within rounding."""
        loss = self._given.shipped.load()
        for mini in self.plan[:number]:
            self.handle.forward_backward(self._batch.take(mini.rows), loss).wait()
            self.handle.step().wait()

    def place(self, mini: MiniBatchPlan, usual: float | None) -> Place:
        """Return the sample and token of a mini-batch whose loss is bad, or of losses over pairs the pair.

        Args:
            mini: the mini-batch; the weights are those before its step.
            usual: how large its number was at most in the step before, of one that jumps; ``None``: it is not finite.
        """
        place = Place("update", self._call, mini=mini, usual=usual)
        if self._given.together == 1:
            look = primitive(reads=list(self._batch.columns), writes=LOOK)(rank_questions.token_losses)
            found = self.handle.call(
                look, self._batch.take(mini.rows), loss=self._given.shipped, num_tokens=mini.num_tokens, num_rows=mini.num_rows
            )  # fmt: skip
            refs = {name: refs_of(found)[name] for name in LOOK}
            lease = self._client.task("reduce", Shipped.of(spreads), refs, (), len(found))
            self._client.wait([lease.call_id], None)
            for name, spread in self._client.result(lease.call_id).items():
                normal = odd(spread, None)
                if normal is None:
                    continue
                finite = spread.bad is None
                at, token = spread.at if finite else spread.bad_at
                return replace(
                    place, kind="loss", column=name, value=spread.value if finite else spread.bad,
                    usual=normal if finite else None, sample=mini.rows[at], token=token, looked=found.take([at]),
                )  # fmt: skip
        return place if usual is not None else self._bad_gradient(place, mini)

    def _bad_gradient(self, place: Place, mini: MiniBatchPlan) -> Place:
        """Return the sample whose gradient is not finite though its loss is; of losses over pairs also one whose loss is not."""
        shipped, size = self._given.shipped, self._given.together
        units = [mini.rows[i : i + size] for i in range(0, len(mini.rows), size)]

        def by_rank(rows: Sequence[int]) -> list[tuple[int, dict[str, float]]]:
            return self.handle.run(rank_questions.gradients, self._batch.take(rows).table(), shipped)

        rows = bisected(units, lambda rows: any(found for _, found in by_rank(rows)))
        if not rows:
            return replace(place, kind="gradient", said="No sample's alone is bad: it is their sum")
        found = by_rank(rows)
        stage = max(stage for stage, bad in found if bad)  # gradients come from the end
        held = {rank: bad for rank, (at, bad) in enumerate(found) if bad and at == stage}
        name = list(next(iter(held.values())))[-1]
        ranks = tuple(rank for rank, bad in held.items() if name in bad)
        return replace(place, kind="gradient", sample=rows[0], parameter=name, ranks=ranks, value=held[ranks[0]][name])


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
