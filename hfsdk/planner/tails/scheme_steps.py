"""A step's seconds under each scheme, from what its replicas do and the plan's other seconds.

::

    synchronous        | weights | all rows, each replica its own ......... | the rest |
    shared queue       | weights | all rows, whoever has room ...... | the rest |
    partial rollouts   | weights | more rows, stopped when enough | the rest |     what is left goes on in the next step
    one step off       | the next step's rows, on devices of their own .... | weights |
                       | the rest, on the others |
    reallocation       | weights | all rows .... | the last ones, on few |  move  | what is left of the rest |
                                                 | move | the rest of those that ended |

*The rest* is all of a step but its generation: log-probs, scores, advantages, updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hfsdk.planner.tails.generation import OWN, SHARED, Generated, fits, gather, generate
from hfsdk.planner.tails.replica import Row
from hfsdk.planner.tails.tail_case import TailCase

WARM_UP = 6
"""Steps of partial rollouts before those that count: by then as many tokens come in as go out."""


@dataclass(frozen=True, kw_only=True)
class SchemeStep:
    """A step under a scheme; the mean of several."""

    scheme: str
    seconds: float
    generation_s: float
    """Until the last response that the step waits for."""
    rest_s: float
    """Everything else that the step computes; beside generation where that is on other devices."""
    moving_s: float
    """Weights, states, and nothing else meanwhile."""
    response_tokens: float
    """Of the responses that are trained on."""
    stale_share: float
    """Of these tokens, those that an older policy wrote than the one that the step trains."""
    idle_share: float
    """Of device-seconds: devices without a row to generate, a call to run or weights to move."""
    how: str = ""
    """What was chosen, in words."""


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
    needed, launched = case.plan.workload.prompts, 0
    under_way: list[Row] = []
    steps = []
    for _ in range(WARM_UP + case.steps):
        for row in under_way:
            row.stale = row.done
        new = max(0, round(over_sampling * needed) - len({row.group for row in under_way}))
        under_way += case.rows(launched, new)
        launched += new
        left = [row for row in under_way if row.done < row.length]
        until = _enough(under_way, generate(case.costs, case.num_replicas, _copies(left)), needed)
        found = generate(case.costs, case.num_replicas, left, until_s=until)
        waiting = Counter(row.group for row in under_way if row.done < row.length)
        taken = set(list(dict.fromkeys(row.group for row in under_way if not waiting[row.group]))[:needed])
        trained = [row for row in under_way if row.group in taken]
        under_way = [row for row in under_way if row.group not in taken]
        steps.append(_in_turn(case, replace(found, seconds=until), trained))
    return replace(_mean(steps[WARM_UP:]), scheme="partial rollouts", how=f"{over_sampling:g}x prompts under way")


def one_step_off(case: TailCase) -> SchemeStep | None:
    """Return a step whose rows were generated while the step before was trained, on devices of their own: the best split.

    Every token is of the policy before. ``None`` where no split fits.
    """
    found: list[SchemeStep] = []
    for mine in case.shares():
        rest = case.rest_s(case.devices - mine)
        if rest is None or (found and rest > min(step.seconds for step in found)):  # fewer devices train, ever slower
            continue
        costs, weights_s = case.alone(mine)
        steps = []
        for rows in case.each_step():
            made = generate(costs, mine // case.replica_devices, rows)
            trained_s = rest * _share_of(case, rows)
            busy = made.busy_s * case.replica_devices + trained_s * case.used(case.devices - mine) + weights_s * case.devices
            steps.append(_step(case, max(made.seconds, trained_s) + weights_s, made.seconds, trained_s, weights_s, rows, busy))
        how = f"{mine} devices generate, {case.devices - mine} train"
        found.append(replace(_mean(steps), scheme="one step off-policy", stale_share=1.0, how=how))
    return min(found, key=lambda step: step.seconds, default=None)


def reallocated(case: TailCase) -> SchemeStep:
    """Return a step whose last rows go to a few replicas, while the other devices begin with what has ended: the best split.

    Advantages must need no more than a prompt's own responses. Nothing is stale: gradients of the first rows wait for the last.
    """
    whole = synchronous(case, SHARED)
    steps = list(case.each_step())
    runs = [generate(case.costs, case.num_replicas, _copies(rows), SHARED) for rows in steps]
    found = [replace(whole, scheme="reallocation", how="none pays")]
    for last in case.shares():
        few, most = last // case.replica_devices, case.costs.most_rows
        if last > case.devices // 2 or case.rest_s(case.devices - last) is None:
            continue
        for each in sorted({max(1, most >> k) for k in range(0, most.bit_length(), 2)}):
            tried = [_gathered(case, rows, run, few, each) for rows, run in zip(steps, runs, strict=True)]
            how = f"at most the last {few * each} rows on {few} of {case.num_replicas} replicas"
            found.append(replace(_mean(tried), scheme="reallocation", how=how))
    return min(found, key=lambda step: step.seconds)


SCHEMES: Mapping[str, Callable[[TailCase, float], SchemeStep | None]] = {
    "synchronous": lambda case, _: synchronous(case),
    "shared queue": lambda case, _: synchronous(case, SHARED),
    "partial rollouts": partial,
    "one step off-policy": lambda case, _: one_step_off(case),
    "reallocation": lambda case, _: reallocated(case),
}
"""By name, in the table's order."""


def _gathered(case: TailCase, rows: Sequence[Row], run: Generated, few: int, each: int) -> SchemeStep:
    """Return a step whose last rows, ``each`` on every replica at most, are brought together on a few replicas."""
    part = case.devices - few * case.replica_devices
    number = max(0, len(run.ended) - few * each)
    while number < len(run.ended) and not fits(case.costs, (row for _, row in run.ended[number:]), few):
        number += max(1, (len(run.ended) - number) // 8)
    at_s = run.ended[min(number, len(run.ended)) - 1][0] if number else 0.0
    made, moved_s = gather(case.costs, case.num_replicas, _copies(rows), SHARED, at_s, few)
    rest, part_rest = case.rest_s(case.devices), case.rest_s(part)
    assert rest is not None
    assert part_rest is not None
    share, state_s = _share_of(case, rows), case.state_s(part)
    open_groups = {row.group for _, row in run.ended[number:]}
    ready = sum(row.most for row in rows if row.group not in open_groups) / sum(row.most for row in rows)
    room = max(0.0, made.seconds - moved_s - state_s) / (part_rest * share)
    done = min(ready, room)
    if not done:
        return _in_turn(case, run, rows)
    left_s = (1 - done) * rest * share
    busy = made.busy_s * case.replica_devices + done * part_rest * share * case.used(part) + state_s * (part + case.devices)
    busy += (left_s + case.reshard_s) * case.used(case.devices)
    moving_s = case.reshard_s + state_s
    return _step(case, moving_s + made.seconds + left_s, made.seconds, rest * share, moving_s, rows, busy)


def _in_turn(case: TailCase, made: Generated, trained: Sequence[Row]) -> SchemeStep:
    """Return a step in which all devices generate, and then do the rest."""
    rest = case.rest_s(case.devices)
    assert rest is not None
    rest_s = rest * _share_of(case, trained)
    busy = made.busy_s * case.replica_devices + (case.reshard_s + rest_s) * case.used(case.devices)
    return _step(case, case.reshard_s + made.seconds + rest_s, made.seconds, rest_s, case.reshard_s, trained, busy)


def _step(
    case: TailCase, seconds: float, generation_s: float, rest_s: float, moving_s: float, trained: Sequence[Row], busy: float
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


def _share_of(case: TailCase, rows: Sequence[Row]) -> float:
    """What the rest of a step takes with these rows, as a share of what it takes with the plan's."""
    return sum(row.most for row in rows) / case.mean_tokens


def _copies(rows: Sequence[Row]) -> list[Row]:
    return [row.copy() for row in rows]


def _enough(rows: Sequence[Row], run: Generated, needed: int) -> float:
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
