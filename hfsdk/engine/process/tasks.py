"""CPU tasks: the user's functions over columns (rewards, advantages, metrics), run in their own process.

Nothing here knows Ray; the runtime decides where it runs and kills it when it takes too long.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import io
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hfsdk.core.arguments import Arguments, Scoring
from hfsdk.core.builtin import SEQUENCES
from hfsdk.core.errors import CallError, ColumnError, RewardFunctionError
from hfsdk.core.functions import Shipped
from hfsdk.core.methods import PROBE, REDUCE
from hfsdk.core.reward_arguments import GIVEN, arguments_of, check_columns
from hfsdk.core.sample_outcome import SampleOutcome, named
from hfsdk.core.table import Column, Ragged, Table, as_column
from hfsdk.core.tokenizer_files import TOKENIZER, tokenizers_own, unreadable
from hfsdk.core.unscored import NOT_SCORED, is_unscored
from hfsdk.core.untrusted import has_file
from hfsdk.engine.process.sample_workers import MOST_FAILURES, Sample, SampleWorkers, workers_of

USER_ERRORS = (Exception, SystemExit, KeyboardInterrupt)
"""Errors that a user's function may raise and must not end its process with: ``exit()`` in a loss is a failed call."""


def run_task(method: str, table: Table, arguments: Arguments, writes: Sequence[str]) -> tuple[dict[str, Column], Any]:
    """Run one task and return (columns, small result).

    Raises:
        RewardFunctionError: the reward function raised or did not return one finite number per sample.
        CallError: another function raised, or returned other columns than it said.
    """
    shipped = arguments.shipped
    if isinstance(arguments, Scoring):
        if method == PROBE.name:
            return {}, _run_each(table, arguments, None)
        return _score_each(table, arguments) if arguments.workers else _score_all(table, arguments), None
    function = _function(shipped)
    try:
        value = function(table)
    except USER_ERRORS as error:  # whatever the user's function raises is reported at the user's line
        raise CallError(f"{shipped.name} raised {error!r}", details=user_traceback(error)) from None
    if method == REDUCE.name:
        return {}, as_it_travels(value, shipped.name)
    return _checked_columns(value, shipped.name, table.num_rows, writes), None


@lru_cache(maxsize=8)
def _function(shipped: Shipped) -> Callable[..., Any]:
    """Return a function, the same one at its next call: a judge that it has loaded, a count that it keeps, stay."""
    return shipped.load()


def _checked_columns(value: Any, name: str, num_rows: int, writes: Sequence[str]) -> dict[str, Column]:
    if not isinstance(value, Mapping) or set(value) != set(writes):
        got = sorted(value) if isinstance(value, Mapping) else type(value).__name__
        raise CallError(f"{name} must return a dict with exactly the columns {sorted(writes)}; it returned {got}")
    columns: dict[str, Column] = {}
    for column_name, column in value.items():
        ready = as_column(column)
        if len(ready) != num_rows:
            raise CallError(f"{name} returned {len(ready)} entries for column {column_name!r}; the batch has {num_rows} samples")
        if isinstance(ready, list):
            as_it_travels(ready, f"{name} (column {column_name!r})")
        columns[column_name] = ready
    return columns


def _score_all(table: Table, arguments: Scoring) -> dict[str, Column]:
    """Score a batch by one call of the function, in this process."""
    name, lengths = arguments.shipped.name, table.ragged("response").lengths.tolist()
    function = _function(arguments.shipped)
    values = given_of(table, arguments.tokenizer)
    lacking = check_columns(function, name, [column for column in values if column not in GIVEN])
    if lacking:
        raise RewardFunctionError(lacking)
    scores = call_reward(function, name, values)
    if not arguments.per_token:
        return {arguments.column: np.asarray(check_scores(scores, name, table.num_rows), dtype=np.float32)}
    rows = check_token_scores(scores, name, lengths)
    return _token_columns(rows, [score is None for score in scores], arguments)


def _score_each(table: Table, arguments: Scoring) -> dict[str, Column]:
    """Score a batch sample by sample, in processes of the function's own.

    Raises:
        RewardFunctionError: a sample failed, and is not to be skipped, or has a score that is none.
    """
    skips = arguments.failures == "skip"
    outcomes = _run_each(table, arguments, None if skips else MOST_FAILURES)
    failed = {row: outcome for row, outcome in enumerate(outcomes) if outcome is not None and outcome.failure}
    words = {}
    if failed:
        texts = given_of(table.take(list(failed)), arguments.tokenizer)["completions"]
        words = {row: named(row, text, outcome) for (row, outcome), text in zip(failed.items(), texts, strict=True)}
    # A score that is no number is a mistake in the function, which would come back on every sample: it is not skipped.
    refused = [row for row, outcome in failed.items() if not skips or outcome.failure == "is no score"]
    if refused:
        raise RewardFunctionError(_say_failed(words, refused, arguments), details=failed[refused[0]].details)
    for line in words.values():
        print(f"not scored: {line}", flush=True)
    unscored = [outcome is None or outcome.score is None for outcome in outcomes]
    scores = [NOT_SCORED if outcome is None or outcome.score is None else outcome.score for outcome in outcomes]
    columns: dict[str, Column]
    if arguments.per_token:
        lengths = table.ragged("response").lengths.tolist()
        rows = [[float(NOT_SCORED)] * n if out else score for n, out, score in zip(lengths, unscored, scores, strict=True)]
        columns = _token_columns(rows, unscored, arguments)
    else:
        columns = {arguments.column: np.asarray(scores, dtype=np.float32)}
    if skips:
        columns[arguments.failures_column] = np.asarray([words.get(row, "") for row in range(table.num_rows)])
    return columns


def _run_each(table: Table, arguments: Scoring, most_failures: int | None) -> list[SampleOutcome | None]:
    columns, lengths = given_of(table, arguments.tokenizer), table.ragged("response").lengths.tolist()
    samples: list[Sample] = [
        ({name: [column[row]] for name, column in columns.items()}, lengths[row] if arguments.per_token else None)
        for row in range(table.num_rows)
    ]
    if arguments.workers:
        return workers_of(arguments.shipped, arguments.workers).run(samples, arguments.timeout_s, most_failures)
    alone = SampleWorkers(arguments.shipped, 1)
    try:
        return alone.run(samples, arguments.timeout_s, most_failures)
    finally:
        alone.close()


def _say_failed(words: Mapping[int, str], refused: Sequence[int], arguments: Scoring) -> str:
    others = [row for row in refused if row != refused[0]]
    more = f"; so did sample{'s' * (len(others) > 1)} {', '.join(map(str, others))}" if others else ""
    skip = "" if arguments.failures == "skip" else ', failures="skip" leaves them out as not scored'
    return f"{words[refused[0]]}{more}. reward.probe(batch) shows every sample with its seconds{skip}."


def _token_columns(rows: Sequence[Any], unscored: Sequence[bool], arguments: Scoring) -> dict[str, Column]:
    sums = [NOT_SCORED if out else sum(row) for row, out in zip(rows, unscored, strict=True)]
    columns: dict[str, Column] = {arguments.column: np.asarray(sums, dtype=np.float32)}
    return {**columns, f"token_{arguments.column}": Ragged.of(rows, np.float32)}


def given_of(table: Table, tokenizer: str) -> dict[str, Any]:
    """Return the values for a reward function: texts, token ids and the data's own columns, one entry per sample."""
    decode = text_decoder(tokenizer)
    prompts = [decode(row.tolist()) for row in table.ragged("prompt")]
    completions = [decode(row.tolist()) for row in table.ragged("response")]
    values: dict[str, Any] = {"prompts": prompts, "completions": completions}
    values["completion_ids"] = [row.tolist() for row in table.ragged("response")]
    values.update({n: list(c) for n, c in table.items() if n not in (*SEQUENCES, *GIVEN) and not isinstance(c, Ragged)})
    return values


def call_reward(function: Callable[..., Any], name: str, values: Mapping[str, Any]) -> Any:
    """Call a reward function with those of the values that it takes, and await an async one.

    Raises:
        RewardFunctionError: it raised; the context is what.
    """
    positional, keywords = arguments_of(function, values)
    try:
        returned = function(*positional, **keywords)
        return awaited(returned) if inspect.isawaitable(returned) else returned
    except USER_ERRORS as error:  # whatever the user's function raises is reported at the user's line
        texts = isinstance(error, TypeError | IndexError) and str(error).startswith("string ind")
        hint = ". Prompts and completions are texts here, of conversations too: text, not text[-1]['content']" if texts else ""
        raise RewardFunctionError(f"{name} raised {error!r}{hint}", details=user_traceback(error)) from None


@cache
def _loop() -> tuple[asyncio.AbstractEventLoop, threading.Lock]:
    """Return this process's event loop: always the same one, as the connections of a client that a function keeps belong to it."""
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop, threading.Lock()


def awaited(awaitable: Awaitable[Any]) -> Any:
    """Return the result of an awaitable."""

    async def result() -> Any:
        return await awaitable

    loop, running = _loop()
    with running:
        task = loop.create_task(result())
        try:
            return loop.run_until_complete(task)
        except BaseException:
            task.cancel()  # an interrupt leaves it half done: it must not go on in the next call
            raise


def check_token_scores(scores: Any, name: str, lengths: Sequence[int]) -> list[list[float]]:
    """Check that a per-token reward function gave one finite number per token of each sample, or ``None`` for a sample."""
    if isinstance(scores, str) or not isinstance(scores, (Sequence, np.ndarray)) or len(scores) != len(lengths):
        got = len(scores) if isinstance(scores, (Sequence, np.ndarray)) else type(scores).__name__
        raise RewardFunctionError(
            f"{name} must return a list of {len(lengths)} lists, one number per token of each completion; it returned {got}"
        )
    rows = []
    for i, (row, length) in enumerate(zip(scores, lengths, strict=True)):
        if row is None:
            rows.append([float(NOT_SCORED)] * length)
            continue
        try:
            numbers = check_scores(row, name, length)
            if is_unscored(np.asarray(numbers)).any():
                raise RewardFunctionError(f"{name} returned None among its completions; give None in place of its whole list")
            rows.append(numbers)
        except RewardFunctionError as error:
            raise RewardFunctionError(
                f"sample {i} has {length} tokens (completion_ids[{i}]): {error}".replace("completions", "tokens")
            ) from None
    return rows


def check_scores(scores: Any, name: str, num_samples: int) -> list[float]:
    """Check that a reward function gave one finite number per sample, or ``None`` for one that it does not score.

    Raises:
        RewardFunctionError: says what it gave, and for which sample.
    """
    if not isinstance(scores, np.ndarray) and callable(getattr(scores, "tolist", None)):
        scores = scores.tolist()  # a tensor, a Series
    if isinstance(scores, str) or not isinstance(scores, (Sequence, np.ndarray)):
        wanted = f"a list of {num_samples} numbers"
        raise RewardFunctionError(f"{name} must return {wanted}, one per completion; it returned {type(scores).__name__}")
    if len(scores) != num_samples:
        raise RewardFunctionError(f"{name} returned {len(scores)} scores for {num_samples} completions; return one per completion")
    checked = []
    for i, score in enumerate(scores):
        if getattr(score, "shape", None) == () and callable(getattr(score, "item", None)):
            score = score.item()  # a tensor of one number
        if score is None:
            checked.append(float(NOT_SCORED))
            continue
        if isinstance(score, (str, bytes)) or not isinstance(score, (int, float, np.number, np.bool_)):
            raise RewardFunctionError(
                f"{name} returned {score!r} ({type(score).__name__}) for sample {i}; return a number{OR_NONE}"
            )
        number = score if isinstance(score, int) else float(score)  # an int may be too large for a float
        if not abs(number) <= LARGEST_SCORE:  # NaN neither
            raise RewardFunctionError(f"{name} returned {score} for sample {i}; return a finite number (in float32){OR_NONE}")
        checked.append(float(number))
    return checked


OR_NONE = ", or None for a sample that is not to be scored"

LARGEST_SCORE = float(np.finfo(np.float32).max)
"""Scores are kept in float32."""


def as_it_travels(value: Any, name: str) -> Any:
    """Return a copy of the value that a user's function returned, made by pickling it, as the caller gets it.

    A copy, because it may be a view of weights that are given up as soon as the function is over. Tensors on a GPU arrive on the
    CPU: the caller may have no GPU, and the worker's is full.

    Raises:
        CallError: it cannot; says what to return instead.
    """
    import pickle

    import cloudpickle

    try:
        return pickle.loads(_to_host(cloudpickle, value))
    except Exception as error:  # whatever an object's pickling raises
        raise CallError(
            f"{name} returned {type(value).__name__}, which cannot travel to the notebook ({error}). Return plain things: "
            "numbers, texts, arrays, or lists and dicts of them."
        ) from None


def _to_host(cloudpickle: Any, value: Any) -> bytes:
    """Pickle a value with its tensors as those of the CPU; modules that hold tensors are objects like any other."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return bytes(cloudpickle.dumps(value))

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                return value.cpu().__reduce_ex__(5)
            return super().reducer_override(value)

    written = io.BytesIO()
    Pickler(written).dump(value)
    return written.getvalue()


@lru_cache(maxsize=8)
def text_decoder(folder: str) -> Callable[[list[int]], str]:
    """Return a function from token ids to text, special tokens left out, from ``folder/tokenizer.json``.

    Raises:
        ColumnError: there is no folder, or no tokenizer in it.
        ModelNotFoundError: its tokenizer is damaged.
    """
    if not folder:
        raise ColumnError("a reward function is given texts, and no model with a tokenizer is declared, e.g. session.actor('tiny')")
    if not has_file(folder, TOKENIZER):
        raise ColumnError(f"{folder} has no tokenizer.json, so tokens cannot be turned into text for a reward function")
    tokenizer = tokenizers_own(folder)

    def decode(ids: list[int]) -> str:
        try:
            return str(tokenizer.decode(ids, skip_special_tokens=True))
        except BaseException as error:  # Rust's panics are no Exception
            raise unreadable(folder, TOKENIZER, error) from None

    return decode


def user_traceback(error: BaseException) -> str:
    """Return the traceback from the user's own frames on; all of it where there are none."""
    own = str(Path(__file__).parents[2])
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, f in enumerate(frames) if not f.filename.startswith(own) and "site-packages" not in f.filename), 0)
    last = traceback.format_exception_only(error)
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames[first:]), *last]).rstrip()
