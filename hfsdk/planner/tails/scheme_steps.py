"""A step's seconds under each scheme, from its replicas' work and the plan's other seconds.

::

    synchronous        | weights | all rows, each replica its own ......... | the rest |
    shared queue       | weights | all rows, where there is room .... | the rest |
    partial rollouts   | weights | more rows, stopped when enough | the rest |     what is left goes on in the next step
    one step off       | the next step's rows, on devices of their own .... | weights |
                       | the rest, on the others |
    both               | more rows, on devices of their own, stopped once enough are there and the rest is done | weights |
                       | the rest, on the others |          what is left goes on in the next step
    reallocation       | weights | all rows .... | the last ones, on few |  move  | what is left of the rest |
                                                 | move | the rest of those that ended |

*The rest* is all of a step but its generation: log-probs, scores, advantages, updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hfsdk.planner.tails.generation import OWN, SHARED, Generated, fits, gather, generate
from hfsdk.planner.tails.replica import PendingResponse
from hfsdk.planner.tails.tail_case import TailCase
from hfsdk.planner.tails.token_costs import TokenCosts

WARM_UP = 6
"""Steps of partial rollouts before those that count: by then as many tokens come in as go out."""


@dataclass(frozen=True, kw_only=True)
class SchemeStep:
    """A step under a scheme; the mean of several."""

    scheme: str
    seconds: float
    generation_s: float
    """Seconds until the last response that the step waits for."""
    rest_s: float
    """Seconds of everything else that the step computes; at the same time as generation where that is on other devices."""
    moving_s: float
    """Weights, states, and nothing else meanwhile."""
    response_tokens: float
    """Tokens of the responses that are trained on."""
    stale_share: float
    """Share of these tokens that an older policy wrote than the one that the step trains."""
    idle_share: float
    """Share of device-seconds without a row to generate, a call to run or weights to move."""
    how: str = ""
    """The choice that was made, in words."""


def synchronous(case: TailCase, rule: str = OWN) -> SchemeStep:
    """Return a step that waits for all of its rows."""
    steps = [_in_turn(case, generate(case.costs, case.num_replicas, rows, rule), rows) for rows in case.each_step()]
    name = "synchronous" if rule == OWN else "shared queue"
    return replace(_mean(steps), scheme=name)


def partial(case: TailCase, over_sampling: float) -> SchemeStep:
    """Return a step that begins with more prompts than it needs, and stops all rows when enough prompts have all of theirs.

    APRIL (arXiv 2509.18521), and partial rollouts of Kimi k1.5 (2501.12599): what is stopped goes on in the next step, first in
    the queue, once its tokens were read again with the new weights.
    """
    pool, steps = _UnderWay(case, over_sampling), []
    for _ in range(WARM_UP + case.steps):
        pool.fill()
        until, made = pool.go_on(case.costs, case.num_replicas)
        steps.append(_in_turn(case, replace(made, seconds=until), pool.take()))
    return replace(_mean(steps[WARM_UP:]), scheme="partial rollouts", how=f"{over_sampling:g}x prompts under way")


def one_step_off(case: TailCase) -> SchemeStep | None:
    """Return a step whose rows were generated while the step before was trained, on devices of their own: the best split.

    Every token is of the policy before. ``None`` where no split fits.
    """

    def steps_of(generating: int) -> Iterator[SchemeStep]:
        costs, weights_s = case.alone(generating)
        for rows in case.each_step():
            made = generate(costs, generating // case.replica_devices, rows)
            trained_s = _rest_s(case, case.devices - generating, rows)
            yield _apart(case, generating, max(made.seconds, trained_s), made, rows, weights_s)

    return _best_split(case, "one step off-policy", steps_of)


def partial_off(case: TailCase, over_sampling: float) -> SchemeStep | None:
    """Return a step whose prompts were completed by partial rollouts, on devices of their own, while the one before was trained.

    Both together, as AReaL interrupts its rollouts (arXiv 2505.24298): rows are stopped when the trainer is done and enough prompts
    have all of theirs, and go on with the new weights. Replicas that wait for the trainer go on generating, as long as there are
    rows.
    """

    def steps_of(generating: int) -> Iterator[SchemeStep]:
        costs, weights_s = case.alone(generating)
        pool, rows = _UnderWay(case, over_sampling), case.rows(0, case.plan.workload.prompts)
        for number in range(WARM_UP + case.steps):
            pool.fill()
            trained_s = _rest_s(case, case.devices - generating, rows)
            until, made = pool.go_on(costs, generating // case.replica_devices, at_least_s=trained_s)
            if number >= WARM_UP:
                yield _apart(case, generating, until, made, rows, weights_s)
            rows = pool.take()

    best = _best_split(case, "one step off, partial", steps_of)
    return None if best is None else replace(best, how=f"{best.how}, {over_sampling:g}x prompts under way")


def _best_split(case: TailCase, scheme: str, steps_of: Callable[[int], Iterable[SchemeStep]]) -> SchemeStep | None:
    """Return the step of most trained tokens a second over all splits of the cluster; ``None`` where none fits."""
    best_steps: list[SchemeStep] = []
    for generating in case.shares():
        rest = case.rest_s(case.devices - generating)
        if rest is None or (best_steps and rest > min(step.seconds for step in best_steps)):  # fewer devices train, ever slower
            continue
        how = f"{generating} devices generate, {case.devices - generating} train"
        best_steps.append(replace(_mean(list(steps_of(generating))), scheme=scheme, stale_share=1.0, how=how))
    return max(best_steps, key=lambda step: step.response_tokens / step.seconds, default=None)


def _apart(
    case: TailCase, generating: int, together_s: float, made: Generated, trained: Sequence[PendingResponse], weights_s: float
) -> SchemeStep:
    """Return a step whose next rows are generated on devices of their own; both parts wait for each other, then for the weights."""
    trained_s = _rest_s(case, case.devices - generating, trained)
    busy = made.busy_s * case.replica_devices + trained_s * case.used(case.devices - generating) + weights_s * case.devices
    return _step(case, together_s + weights_s, made.seconds, trained_s, weights_s, trained, busy)


def reallocated(case: TailCase) -> SchemeStep:
    """Return a step whose last rows go to a few replicas, while the other devices begin with those that have ended: the best split.

    Advantages must need no more than a prompt's own responses. Nothing is stale: gradients of the first rows wait for the last.
    """
    whole = synchronous(case, SHARED)
    steps = list(case.each_step())
    runs = [generate(case.costs, case.num_replicas, _copies(rows), SHARED) for rows in steps]
    steps_tried = [replace(whole, scheme="reallocation", how="none pays")]
    for last in case.shares():
        few, most = last // case.replica_devices, case.costs.most_rows
        if last > case.devices // 2 or case.rest_s(case.devices - last) is None:
            continue
        for each in sorted({max(1, most >> k) for k in range(0, most.bit_length(), 2)}):
            tried = [_gathered(case, rows, run, few, each) for rows, run in zip(steps, runs, strict=True)]
            how = f"at most the last {few * each} rows on {few} of {case.num_replicas} replicas"
            steps_tried.append(replace(_mean(tried), scheme="reallocation", how=how))
    return min(steps_tried, key=lambda step: step.seconds)


SCHEMES: Mapping[str, Callable[[TailCase, float], SchemeStep | None]] = {
    "synchronous": lambda case, _: synchronous(case),
    "shared queue": lambda case, _: synchronous(case, SHARED),
    "partial rollouts": partial,
    "one step off-policy": lambda case, _: one_step_off(case),
    "one step off, partial": partial_off,
    "reallocation": lambda case, _: reallocated(case),
}
"""The schemes by name, in the table's order."""


def _gathered(case: TailCase, rows: Sequence[PendingResponse], run: Generated, few: int, each: int) -> SchemeStep:
    """Return a step whose last rows, ``each`` on every replica at most, are brought together on a few replicas."""
    part = case.devices - few * case.replica_devices
    number = max(0, len(run.ended) - few * each)
    while number < len(run.ended) and not fits(case.costs, (row for _, row in run.ended[number:]), few):
        number += max(1, (len(run.ended) - number) // 8)
    at_s = run.ended[min(number, len(run.ended)) - 1][0] if number else 0.0
    made, moved_s = gather(case.costs, case.num_replicas, _copies(rows), SHARED, at_s, few)
    state_s = case.state_s(part)
    open_groups = {row.group for _, row in run.ended[number:]}
    ready = sum(row.most for row in rows if row.group not in open_groups) / case.mean_tokens
    done = min(ready, case.rest_done(part, made.seconds - moved_s - state_s))
    if done <= 0:
        return _in_turn(case, run, rows)
    done_s, left_s = case.rest_s(part, done), case.rest_s(case.devices, max(0.0, _share_of(case, rows) - done))
    assert done_s is not None
    assert left_s is not None
    busy = made.busy_s * case.replica_devices + done_s * case.used(part) + state_s * (part + case.devices)
    busy += (left_s + case.reshard_s) * case.used(case.devices)
    moving_s = case.reshard_s + state_s
    seconds = moving_s + made.seconds + left_s
    return _step(case, seconds, made.seconds, _rest_s(case, case.devices, rows), moving_s, rows, busy)


def _in_turn(case: TailCase, made: Generated, trained: Sequence[PendingResponse]) -> SchemeStep:
    """Return a step in which all devices generate, and then do the rest."""
    rest_s = _rest_s(case, case.devices, trained)
    busy = made.busy_s * case.replica_devices + (case.reshard_s + rest_s) * case.used(case.devices)
    return _step(case, case.reshard_s + made.seconds + rest_s, made.seconds, rest_s, case.reshard_s, trained, busy)


def _step(
    case: TailCase, seconds: float, generation_s: float, rest_s: float, moving_s: float, trained: Sequence[PendingResponse],
    busy: float,
) -> SchemeStep:  # fmt: skip
    tokens = sum(row.length for row in trained)
    return SchemeStep(
        scheme="", seconds=seconds, generation_s=generation_s, rest_s=rest_s, moving_s=moving_s, response_tokens=float(tokens),
        stale_share=sum(row.stale for row in trained) / max(1, tokens), idle_share=max(0.0, 1 - busy / (seconds * case.devices)),
    )  # fmt: skip


def _mean(steps: Sequence[SchemeStep]) -> SchemeStep:
    """Return the mean step: shares are of all tokens, and of all device-seconds."""
    count, tokens = len(steps), sum(step.response_tokens for step in steps)
    seconds = sum(step.seconds for step in steps)
    return replace(
        steps[0], seconds=seconds / count, response_tokens=tokens / count, rest_s=sum(step.rest_s for step in steps) / count,
        generation_s=sum(step.generation_s for step in steps) / count, moving_s=sum(step.moving_s for step in steps) / count,
        stale_share=sum(step.stale_share * step.response_tokens for step in steps) / max(1.0, tokens),
        idle_share=sum(step.idle_share * step.seconds for step in steps) / seconds,
    )  # fmt: skip


def _rest_s(case: TailCase, devices: int, rows: Sequence[PendingResponse]) -> float:
    """Return the seconds of all but generation for these rows on so many devices, on which it fits."""
    seconds = case.rest_s(devices, _share_of(case, rows))
    assert seconds is not None
    return seconds


def _share_of(case: TailCase, rows: Sequence[PendingResponse]) -> float:
    """Return the tokens of these rows as a share of a step's."""
    return sum(row.most for row in rows) / case.mean_tokens


class _UnderWay:
    """Prompts under way of which a part is complete: as many as are always begun, so that there are enough whenever one looks."""

    def __init__(self, case: TailCase, over_sampling: float) -> None:
        self._case, self._needed = case, case.plan.workload.prompts
        self._most, self._launched = round(over_sampling * self._needed), 0
        self._rows: list[PendingResponse] = []

    def fill(self) -> None:
        """Begin new prompts in place of those that were taken; an older policy wrote the responses so far."""
        for row in self._rows:
            row.stale = row.done
        new = max(0, self._most - len({row.group for row in self._rows}))
        self._rows += self._case.rows(self._launched, new)
        self._launched += new

    def go_on(self, costs: TokenCosts, num_replicas: int, *, at_least_s: float = 0.0) -> tuple[float, Generated]:
        """Generate until enough prompts are complete, and for some seconds at least; return the seconds, and the replicas' work."""
        left = [row for row in self._rows if row.done < row.length]
        until_s = max(at_least_s, _enough(self._rows, generate(costs, num_replicas, _copies(left)), self._needed))
        return until_s, generate(costs, num_replicas, left, until_s=until_s)

    def take(self) -> list[PendingResponse]:
        """Take the rows of as many complete prompts as a step trains, the oldest first."""
        waiting = Counter(row.group for row in self._rows if row.done < row.length)
        groups = set(list(dict.fromkeys(row.group for row in self._rows if not waiting[row.group]))[: self._needed])
        trained = [row for row in self._rows if row.group in groups]
        self._rows = [row for row in self._rows if row.group not in groups]
        return trained


def _copies(rows: Sequence[PendingResponse]) -> list[PendingResponse]:
    return [row.copy() for row in rows]


def _enough(rows: Sequence[PendingResponse], run: Generated, needed: int) -> float:
    """Return when so many prompts have all of their rows."""
    waiting = Counter(row.group for row in rows if row.done < row.length)
    there, enough_s = len({row.group for row in rows}) - len(waiting), 0.0
    for at_s, row in run.ended:
        if there >= needed:
            break
        waiting[row.group] -= 1
        there += not waiting[row.group]
        enough_s = at_s
    return enough_s
